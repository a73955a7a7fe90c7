"""What a plan does and why: kernels, memory traffic, operations, time that the device needs at least, choices, cuts, rejections.

All figures come from the graph and the device's properties; nothing is run or compiled.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from graphdnn.codegen.spec import Check
from graphdnn.device import DeviceProps
from graphdnn.dtypes import data_type
from graphdnn.engines.base import flops, traffic
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.opspecs import registry
from graphdnn.passes import regions
from graphdnn.passes.regions import Region
from graphdnn.plans.plan import ExecutionPlan
from graphdnn.plans.planset import PlanSet, Rejection


@dataclass(frozen=True)
class RegionReport:
    """One fused kernel. Bytes count each tensor once; ``seconds`` is the time the device needs at least, ``estimate`` what the engine's model says.
    ``kernel_names``: the kernels that run it (a second one where partial results are finished)."""

    name: str
    kind: str
    engine: str
    engine_id: int
    kernel_cfg: int
    knobs: str
    nodes: tuple[str, ...]
    reads: tuple[str, ...]
    stores: tuple[str, ...]
    bytes_read: int
    bytes_written: int
    flops: int
    seconds: float
    estimate: float
    kernel_names: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """The report: ``print`` it, or take ``data`` (JSON values). ``kernels`` counts fused kernels, ``unfused_kernels`` those of one kernel per op."""

    graph: str
    device: str
    plan: str
    kernels: int
    unfused_kernels: int
    launches: int
    bytes_read: int
    bytes_written: int
    unfused_bytes: int
    flops: int
    floor_seconds: float
    estimate: float
    workspace_bytes: int
    regions: tuple[RegionReport, ...]
    cuts: tuple[str, ...]
    stored: tuple[str, ...]
    numeric_notes: tuple[str, ...]
    behavior_notes: tuple[str, ...]
    candidates: tuple[tuple[str, float], ...]
    rejections: tuple[Rejection, ...]

    @property
    def bytes(self) -> int:
        """Bytes read and written by the plan."""
        return self.bytes_read + self.bytes_written

    @property
    def saved(self) -> float:
        """Share of the unfused traffic that fusion saves, 0 to 1."""
        return 1 - self.bytes / self.unfused_bytes if self.unfused_bytes else 0.0

    @property
    def arithmetic_intensity(self) -> float:
        """Operations per byte of traffic."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def data(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return self.to_dict()

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        found = _lists(asdict(self))
        found["candidates"] = [{"name": n, "cost": c} for n, c in self.candidates]
        more = {"bytes": self.bytes, "saved": self.saved, "arithmetic_intensity": self.arithmetic_intensity}
        return {str(k): v for k, v in (found | more).items()}

    def __str__(self) -> str:
        least = sum(r.seconds for r in self.regions)
        moved = f"{size(self.bytes_read)} read, {size(self.bytes_written)} written"
        times = f"at least {seconds(self.floor_seconds)} for this graph, {seconds(least)} for these kernels; estimate {seconds(self.estimate)}"
        lines = [
            f"plan {self.plan} of graph '{self.graph}' on {self.device}",
            f"  kernels     {self.kernels} ({self.unfused_kernels} with one kernel per op); launches {self.launches}",
            f"  traffic     {moved}; {size(self.unfused_bytes)} unfused: {self.saved:.0%} saved",
            f"  operations  {count(self.flops)}FLOP, {self.arithmetic_intensity:.3g} per byte",
            f"  time        {times}",
            f"  workspace   {size(self.workspace_bytes)}",
        ]
        if self.numeric_notes:
            lines.append(f"  notes       {', '.join(self.numeric_notes)}")
        lines += ["", *_table([("region", "engine", "traffic", "FLOP", "at least", "nodes"), *(_row(r) for r in self.regions)])]
        lines += [f"  {r.name}: {r.knobs}; kernels {', '.join(r.kernel_names)}" for r in self.regions]
        lines += _section("cuts", self.cuts)
        shown = [str(r) for r in self.rejections if "|" not in r.region]
        hidden = len(self.rejections) - len(shown)
        lines += _section("rejections", shown + ([f"and {hidden} in other partitions (see .data)"] if hidden else []))
        lines += _section("other candidates", (f"{name}: {seconds(cost)}" for name, cost in self.candidates[:6] if name != self.plan))
        return "\n".join(lines)


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _lists(v) for k, v in value.items()}
    return [_lists(v) for v in value] if isinstance(value, (list, tuple)) else value


def _row(r: RegionReport) -> tuple[str, ...]:
    names = textwrap.shorten(" ".join(r.nodes), 70, placeholder=" ...")
    return r.name, f"{r.engine} (eng{r.engine_id})", size(r.bytes_read + r.bytes_written), count(r.flops), seconds(r.seconds), names


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)).rstrip() for r in rows]


def _section(title: str, items: Iterable[str]) -> list[str]:
    found = [f"  - {i}" for i in items]
    return ["", title, *found] if found else []


def size(n: float) -> str:
    """Bytes for people: "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return ""


def count(n: float) -> str:
    """A count for people: "1.5 G"."""
    for unit in ("", "k", "M", "G", "T"):
        if n < 1000 or unit == "T":
            return f"{n:.3g} {unit}"
        n /= 1000
    return ""


def seconds(s: float) -> str:
    """A time for people: "12.3 us"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if s >= scale:
            return f"{s / scale:.3g} {unit}"
    return f"{s / 1e-9:.3g} ns"


def operation_seconds(graph: OperationGraph, nodes: Iterable[int], device: DeviceProps) -> float:
    """Time for the arithmetic of ``nodes`` at the device's rates: a contraction at the rate of its input type where it has one, the rest at that of
    the compute type."""
    total = 0.0
    for i in nodes:
        node = graph.nodes[i]
        dtype = node.compute
        if registry.spec(node.op).role == "matmul":
            inputs = {graph.tensors[t].dtype for t in node.input_ids}
            dtype = next(iter(inputs)) if len(inputs) == 1 and dtype in (data_type.FLOAT, data_type.INT32) else dtype
        work = flops(graph, Region("pointwise", (), (), (i,), (), ()))
        total += work / (device.rate(dtype.name) * 1e12)
    return total


def _io_bytes(graph: OperationGraph) -> int:
    """What any plan must move: inputs once, outputs once."""
    return sum(traffic(graph, Region("pointwise", (), (), (), graph.inputs, graph.outputs)))


def explain(graph: OperationGraph, plans: PlanSet | ExecutionPlan) -> Explanation:
    """The report on the chosen plan of a set (before a build: the first), or on one plan."""
    chosen = plans if isinstance(plans, ExecutionPlan) else plans.chosen if plans.chosen_index >= 0 else plans.plan_at(0)
    rest = () if isinstance(plans, ExecutionPlan) else tuple(plans)
    device, partition = chosen.device, chosen.partition
    reports = tuple(_region(graph, chosen, r) for r in range(len(partition.regions)))
    everything = {n for r in partition.regions for n in r.nodes}
    single = regions.unfused(graph).regions
    bandwidth = device.dram_gbps * 1e9
    return Explanation(
        graph=graph.name,
        device=f"{device.name} ({device.text})",
        plan=chosen.name,
        kernels=len(reports),
        unfused_kernels=len(single),
        launches=sum(not isinstance(s, Check) for s in chosen.recipe.steps),
        bytes_read=sum(r.bytes_read for r in reports),
        bytes_written=sum(r.bytes_written for r in reports),
        unfused_bytes=sum(sum(traffic(graph, r)) for r in single),
        flops=sum(r.flops for r in reports),
        floor_seconds=max(_io_bytes(graph) / bandwidth, operation_seconds(graph, sorted(everything), device)),
        estimate=chosen.cost,
        workspace_bytes=chosen.workspace_bytes,
        regions=reports,
        cuts=partition.notes,
        stored=tuple(graph.tensors[t].name for t in partition.materialized),
        numeric_notes=tuple(map(str, chosen.numeric_notes)),
        behavior_notes=tuple(map(str, chosen.behavior_notes)),
        candidates=tuple((p.name, p.cost) for p in rest),
        rejections=() if isinstance(plans, ExecutionPlan) else tuple(dict.fromkeys(plans.rejections)),
    )


def _region(graph: OperationGraph, plan: ExecutionPlan, r: int) -> RegionReport:
    region, choice = plan.partition.regions[r], plan.choices[r]
    read, written = traffic(graph, region)
    floor = max((read + written) / (plan.device.dram_gbps * 1e9), operation_seconds(graph, region.nodes, plan.device))
    return RegionReport(
        name=f"r{r}",
        kind=region.kind,
        engine=choice.name,
        engine_id=choice.engine,
        kernel_cfg=choice.index,
        knobs=choice.knobs,
        nodes=tuple(graph.nodes[n].name for n in region.nodes),
        reads=tuple(_tensor(graph, t) for t in region.reads),
        stores=tuple(_tensor(graph, t) for t in region.stores),
        bytes_read=read,
        bytes_written=written,
        flops=flops(graph, region),
        seconds=floor,
        estimate=choice.cost,
        kernel_names=tuple(plan.recipe.kernels[k].name for k in plan.region_kernels[r]),
    )


def _tensor(graph: OperationGraph, t: int) -> str:
    tensor = graph.tensors[t]
    return f"{tensor.name} {list(tensor.dim)} {tensor.dtype.name}"
