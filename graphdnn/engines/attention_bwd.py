"""Engine ``attention_bwd``: gradients of scaled dot-product attention. The scores are calculated again from Q, K and Stats, tile by tile; one block
(item) sums a result in a fixed order, so that runs give the same bits. Workspace: D and Stats, a number each for every row of Q."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from graphdnn.codegen.body import Signature
from graphdnn.codegen.dialect import literal, to_register
from graphdnn.codegen.spec import Buffer, KernelSpec, Launch, Recipe
from graphdnn.device import DeviceProps
from graphdnn.dtypes import info
from graphdnn.engines import attention_bwd_cpu, attention_bwd_cuda
from graphdnn.engines.attention_bwd_cpu import AttentionBwdCpu
from graphdnn.engines.attention_bwd_cuda import STATIC_SHARED, AttentionBwdCuda
from graphdnn.engines.attention_bwd_parts import GRADIENTS, BackwardText, Kind, split
from graphdnn.engines.attention_dump import dump
from graphdnn.engines.attention_limits import limits
from graphdnn.engines.attention_parts import AttentionProblem
from graphdnn.engines.base import Engine, Knobs, ceil_div, chain, entry_name, header, traffic
from graphdnn.errors import NotSupportedError
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.opspecs.score_grad import gradient_steps
from graphdnn.passes.regions import Region
from graphdnn.status import OK, Status, reject

TAGS = ("SDPA_BWD",)
PRODUCTS = 7
"""Matrix products of the tiles: scores and dP twice, dK, dV and dQ."""


class AttentionBackward(Engine):
    """See the module."""

    id: ClassVar[int] = 10
    name: ClassVar[str] = "attention_bwd"

    def _accepts(self, graph: OperationGraph, region: Region) -> Status:
        node = graph.nodes[region.anchors[0]]
        if node.op not in TAGS:
            return reject(f"attention_bwd: '{node.label}' is not a backward pass ({node.op})")
        try:
            gradient_steps(node.attrs)
        except NotSupportedError as error:
            return reject(f"attention_bwd: '{node.label}': {error}")
        return OK

    def _candidates(self, graph: OperationGraph, region: Region, device: DeviceProps) -> tuple[Knobs, ...]:
        problem = _problem(graph, region)
        if device.kind == "cpu":
            return (AttentionBwdCpu(), AttentionBwdCpu(48))
        if device.kind == "cudasim":
            return (AttentionBwdCuda(8, 8, 16, 4, 4), AttentionBwdCuda(4, 8, 8, 4, 4))
        tiles = [AttentionBwdCuda(r, c, 64) for r, c in ((64, 64), (32, 64), (16, 64), (64, 16), (32, 32), (16, 16))]
        if problem.calc == "float64":
            tiles = [AttentionBwdCuda(r, c, 32) for r, c in ((32, 32), (16, 32), (32, 16), (16, 16))]
        return tuple(sorted(tiles, key=lambda t: self._cost(graph, region, device, t)))

    def _check(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> Status:
        if not isinstance(knobs, AttentionBwdCuda):
            return OK
        problem = _problem(graph, region)
        kinds: tuple[Kind, ...] = ("kv", "q", "bias") if problem.has("dBias") else ("kv", "q")
        for kind in kinds:
            cut = attention_bwd_cuda.form(kind, knobs)
            need = cut.shared_bytes(8 if problem.calc == "float64" else 4)
            if need > STATIC_SHARED:
                return reject(f"attention_bwd: {knobs!r} needs {need} bytes of shared memory; at most {STATIC_SHARED}")
            if not cut.even():
                return reject(f"attention_bwd: {knobs!r} gives the threads of a block unequal shares")
        return OK

    def _cost(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> float:
        p = _problem(graph, region)
        rows, columns = (knobs.rows, knobs.columns) if isinstance(knobs, AttentionBwdCuda) else (1, 1)
        scores = p.b * p.h_q * ceil_div(p.s_q, rows) * rows * ceil_div(p.s_kv, columns) * columns
        bounded = 0.5 if p.right is not None and p.s_q > 1 else 1.0
        work = 2.0 * scores * PRODUCTS * max(p.d_qk, p.d_v) * bounded
        reuse = min(rows, columns) / (min(rows, columns) + 8) if isinstance(knobs, AttentionBwdCuda) else 1.0
        if knobs == AttentionBwdCpu(48):
            reuse = 0.95
        peak = device.flops.get(graph.nodes[region.anchors[0]].compute.name) or device.flops["FLOAT"]
        return max(sum(traffic(graph, region)) / (device.dram_gbps * 1e9), work / (peak * 1e12 * 0.5 * reuse))

    def _lower(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs, memory: Mapping[int, Buffer]) -> Recipe:
        return _Lowering(_problem(graph, region), memory, knobs, chain(graph, region), header(graph, region, knobs)).recipe()


def _problem(graph: OperationGraph, region: Region) -> AttentionProblem:
    return AttentionProblem.of(graph, graph.nodes[region.anchors[0]])


@dataclass
class _Walk:
    """The items of a kernel: named numbers, slowest first; lines that set the tile's start and what repeats inside."""

    sizes: list[tuple[str, int]]
    setup: list[str]
    repeats: int
    head: list[str]

    @property
    def items(self) -> int:
        return math.prod(n for _, n in self.sizes)


class _Lowering:
    """Kernels and steps of one node."""

    def __init__(self, problem: AttentionProblem, memory: Mapping[int, Buffer], knobs: Knobs, words: str, title: list[str]) -> None:
        self.problem, self.memory, self.knobs, self.words, self.title = problem, memory, knobs, words, title
        self.cpu = isinstance(knobs, AttentionBwdCpu)
        self.itype = "int64" if self.cpu else problem.index_type(self._threads())
        self.item = 8 if problem.calc == "float64" else 4
        rows = problem.b * problem.h_q * problem.s_q
        self.vector = (rows * self.item + 255) // 256 * 256
        self.delta, self.lse = Buffer("workspace", -1, 0), Buffer("workspace", -1, self.vector)
        self.kernels: list[KernelSpec] = []
        self.steps: list[Launch] = []

    def recipe(self) -> Recipe:
        """All of it."""
        p = self.problem
        self._rows()
        if p.h_k == p.h_v:
            self._tiles("kv", ("dK", "dV"))
        else:
            self._tiles("kv", ("dK",))
            self._tiles("kv", ("dV",))
        self._tiles("q", ("dQ",))
        if p.has("dBias"):
            self._bias()
        if p.has("DSINK_TOKEN"):
            self._sink()
        if p.has("RNG_DUMP") and p.tensor("RNG_DUMP").size:
            kernel, launch = dump(p, self.memory, self.words, self.title, self.cpu, len(self.kernels))
            self.kernels.append(kernel)
            self.steps.append(launch)
        checks = limits(p, self.memory) if self.steps else ()
        return Recipe(tuple(self.kernels), (*checks, *self.steps), 2 * self.vector)

    def _threads(self) -> int:
        """More than the threads of any launch: those of a row, or of a tile of the smallest extent, for every part of a head."""
        p = self.problem
        parts = 1 + max(p.d_qk, p.d_v) // 16
        return 1024 * parts * p.b * max(p.h_q, p.h_k, p.h_v) * ceil_div(max(p.s_q, p.s_kv), 8)

    # -- steps ----------------------------------------------------------------------------------------------------------------------------
    def _text(self, kind: Kind, fills: bool = False) -> BackwardText:
        return BackwardText(self.problem, Signature(self.problem.graph, self.memory), self.itype, kind, (self.delta, self.lse), fills)

    def _add(self, template: str, what: str, fields: dict[str, Any], signature: Signature, items: int, grain: int = 1, block: int = 0) -> None:
        """A kernel and its launch; none where there is nothing to do."""
        if not items:
            return
        fields["header"] = [*self.title, f"# {what}"]
        name = entry_name(f"{self.words}_{what.split(':')[0]}", fields, signature.params)
        target = "cpu" if self.cpu else "cuda"
        self.kernels.append(KernelSpec(f"{target}/{template}.py.j2", name, signature.params, fields, block=block))
        self.steps.append(Launch(len(self.kernels) - 1, items, signature.args, grain))

    def _sums(self, what: str, text: BackwardText, fields: dict[str, Any], items: int, length: int) -> None:
        """A kernel that adds up rows of ``length`` numbers."""
        fields["calc"] = text.calc
        if self.cpu:
            self._add("attention_rows", what, fields, text.signature, items, max(1, 16384 // max(length, 1)))
            return
        assert isinstance(self.knobs, AttentionBwdCuda), "not a CPU"
        threads = self.knobs.threads
        ty = min(threads, 1 << max(length - 1, 0).bit_length(), 32 if items >= threads else threads)
        total = {"name": "total", "tree": f"{text.calc}(left + right)", "slot": "part"}
        fields |= {"itype": self.itype, "tx": threads // ty, "ty": ty, "half": ty // 2, "items": items, "sums": [total]}
        self._add("attention_rows", what, fields, text.signature, ceil_div(items, threads // ty), block=threads)

    def _rows(self) -> None:
        """D = sum dO * O of every row, and its Stats, +inf where the row has no weights: then exp(S - Stats) is 0."""
        p, text = self.problem, self._text("q", fills=True)
        t, calc = text.text, text.calc
        infinite = literal(math.inf, calc)
        setup = [*split("o", [("b", p.b), ("h", p.h_q), ("row", p.s_q)], self.itype), *t.item()]
        for port in ("dO", "O", "Stats"):
            setup += [*t.base(port, f"{port.lower()}_base"), *t.row(port, f"{port.lower()}_base", "row", f"{port.lower()}_row")]
        setup.append(f"stop = {t.number(p.d_v)} if row < sq else {t.number(0)}")
        value = f"value = {calc}({t.load('dO', 'do_row', 'r')} * {t.load('O', 'o_row', 'r')})"
        finish = [f"{text.delta}[o] = total", f"stats = {infinite}", "if row < sq:", f"    stats = {t.load('Stats', 'stats_row', t.number(0))}"]
        finish.append(f"{text.lse}[o] = {infinite} if stats == -{infinite} else stats")
        fields = {"setup": setup, "stop": "stop", "body": [value], "finish": finish}
        self._sums("rows: D and Stats of every row of Q", text, fields, p.b * p.h_q * p.s_q, p.d_v)

    def _sink(self) -> None:
        """Gradient of a head's sink: minus the sum over its rows of the sink's share of the weights times D."""
        p, text = self.problem, self._text("q")
        t, i, calc = text.text, self.itype, text.calc
        sink = to_register(t.broadcast(p.ports["SINK_TOKEN"], "row", "col"), info(p.tensor("SINK_TOKEN").dtype).register, calc)
        at = t.linear(("b", p.h_q * p.s_q), ("h", p.s_q), ("row", 1))
        rows = max(p.s_q, 1)
        body = [f"b = {i}(r // {i}({rows}))", f"row = {i}(r % {i}({rows}))", f"at = {at}"]
        body.append(f"value = {calc}(exp({calc}(sink - {text.lse}[at])) * {text.delta}[at])")
        row = ["b = " + t.number(0), *t.base("DSINK_TOKEN", "sink_base"), *t.row("DSINK_TOKEN", "sink_base", t.number(0), "sink_row")]
        finish = [*row, t.store("DSINK_TOKEN", "sink_row", t.number(0), f"{calc}(-total)")]
        fields = {"setup": ["h = o", f"sink = {sink}"], "stop": t.number(p.b * p.s_q), "body": body, "finish": finish}
        self._sums("sink: gradient of the sink tokens", text, fields, p.h_q, p.b * p.s_q)

    # -- tiles ----------------------------------------------------------------------------------------------------------------------------
    def _cut(self, kind: Kind) -> Any:
        p = self.problem
        still, moving = (p.s_q, p.s_kv) if kind == "q" else (p.s_kv, p.s_q)
        if isinstance(self.knobs, AttentionBwdCpu):
            return attention_bwd_cpu.form(still, moving, max(p.d_qk, p.d_v), self.item, self.knobs)
        assert isinstance(self.knobs, AttentionBwdCuda), "the engine's own knobs"
        return attention_bwd_cuda.form(kind, self.knobs)

    def _fields(self, text: BackwardText, kind: Kind, ports: tuple[str, ...], cut: Any) -> dict[str, Any]:
        lower = attention_bwd_cpu.fields if self.cpu else attention_bwd_cuda.fields
        return lower(text, kind, ports, cut)

    def _tiles(self, kind: Kind, ports: tuple[str, ...]) -> None:
        """The kernel that makes the results ``ports``, summed over the moving side."""
        p, text, cut = self.problem, self._text(kind), self._cut(kind)
        heads = p.tensor(ports[0]).dim[1]
        still, group = p.tensor(ports[0]).dim[2], p.h_q // max(heads, 1)
        if not p.b * heads * still * max(p.tensor(x).dim[3] for x in ports):
            return
        parts = max(cut.parts(p.tensor(x).dim[3]) for x in ports)
        i = self.itype
        sizes = [("b", p.b), ("hs", heads), ("tile", ceil_div(still, cut.still)), ("part", parts)]
        setup = [*split("o", sizes, i), f"begin = {i}(tile * {i}({cut.still}))", f"c0 = {i}(part * {i}({cut.chunk}))"]
        head = f"h = {i}({i}(hs * {i}({group})) + {i}(g))" if group > 1 else "h = hs"
        fields = self._fields(text, kind, ports, cut) | {"setup": setup, "repeats": group}
        fields["head"] = [head, *text.text.item(), *text.bases(), *text.limits(cut.still)]
        own = [f"{GRADIENTS[x].tile}[e] = {GRADIENTS[x].value}" for x in ports]
        fields["score"] = [*text.score(), *own]
        peaks = kind == "q" and p.has("dS_max")
        if self.cpu:
            fields["results"] = [attention_bwd_cpu.store(text, x, cut, "hs") for x in ports]
            if peaks:
                area = {"name": "peak", "size": cut.still}
                fields |= {"arrays": [*fields["arrays"], area], "sums": [*fields["sums"], area]}
                fields["score"].append("peak[sl] = nanmax(peak[sl], fabs(ds))")
                fields["results"].append(attention_bwd_cpu.store_peak(text, cut))
        else:
            fields["results"] = [line for x in ports for line in attention_bwd_cuda.store(text, x, cut, "hs")]
            fields["results"] += attention_bwd_cuda.store_peak(text, cut) if peaks else []
        names = " and ".join(ports)
        block = self.knobs.threads if isinstance(self.knobs, AttentionBwdCuda) else 0
        self._add("attention_bwd", f"{'_'.join(ports).lower()}: {names}", fields, text.signature, math.prod(n for _, n in sizes), block=block)

    def _bias(self) -> None:
        """dBias: a tile of it, over all batches, heads, rows and columns that the bias was broadcast to."""
        p, text, cut = self.problem, self._text("bias"), self._cut("bias")
        dim, _ = text.bias_shape()
        i = self.itype
        if not p.tensor("dBias").size:
            return
        tiles = [ceil_div(p.s_q, cut.moving), ceil_div(p.s_kv, cut.still)]
        own = [t if d > 1 else 1 for t, d in zip(tiles, dim[2:], strict=True)]
        inner = [p.b // dim[0] if dim[0] == 1 else 1, p.h_q if dim[1] == 1 else 1, tiles[1] if dim[3] == 1 else 1]
        sizes = [("bb", dim[0]), ("hb", dim[1]), ("tile_r", own[0]), ("tile_c", own[1])]
        setup = [*split("o", sizes, i), f"r0 = {i}(tile_r * {i}({cut.moving}))", f"k0 = {i}(tile_c * {i}({cut.still}))"]
        repeats = math.prod(inner)
        walk = [f"gg = {i}(g)", *split("gg", list(zip(("gb", "gh", "gc"), inner, strict=True)), i)]
        walk += [f"b = {i}(bb + gb)", f"h = {i}(hb + gh)", f"begin = {i}(k0 + {i}(gc * {i}({cut.still})))"]
        limits = text.limits(cut.still)
        if dim[2] > 1:
            end = f"min(last, {i}(r0 + {i}({cut.moving})))"
            limits += [f"last = {end} if {i}(r0 + {i}({cut.moving})) > first else r0", "first = r0"]
        fields = self._fields(text, "bias", (), cut) | {"setup": setup, "repeats": repeats}
        fields["head"] = [*walk, *text.text.item(), *text.bases(), *limits]
        fields["score"] = [*text.score(), "sum_tile[e] = " + f"{text.calc}(sum_tile[e] + ds)"]
        rows, columns = (cut.moving if dim[2] > 1 else 1), (cut.still if dim[3] > 1 else 1)
        if self.cpu:
            area = {"name": "sum_tile", "size": cut.moving * cut.line(cut.still)}
            fields |= {"arrays": [*fields["arrays"], area], "sums": [area]}
            fields["results"] = [attention_bwd_cpu.store_bias(text, cut, rows, columns)]
        else:
            fields["results"] = attention_bwd_cuda.store_bias(text, cut, rows, columns)
        block = self.knobs.threads if isinstance(self.knobs, AttentionBwdCuda) else 0
        self._add("attention_bwd", "dbias: dBias", fields, text.signature, math.prod(n for _, n in sizes), block=block)
