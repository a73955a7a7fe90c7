"""Candidates of a graph: which partitions, which engine and knobs in each region, in which order; and the list of plans that a graph works with.

The maximal regions come first; where an engine says that storing one tensor would let it in, that cut is tried as well and ranked by cost. One
region is varied at a time. One kernel per op comes last, whatever it costs: it takes what nothing else takes. Every rejection is kept with its
reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graphdnn import log
from graphdnn.device import DeviceProps
from graphdnn.errors import BuildError, GraphError, explain
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.passes import places, regions
from graphdnn.passes.regions import Partition, Region
from graphdnn.plans import heuristics, views
from graphdnn.plans.heuristics import Candidate, Option
from graphdnn.plans.planset import PlanSet, Rejection

if TYPE_CHECKING:
    from graphdnn.engines.base import Engine
    from graphdnn.plans.cache import KernelStore

MAX_CUTS = 6


@dataclass
class Survey:
    """What engines offer for the regions of one partition. ``rejections``: by engines that do not take a region; ``cuts``: tensors that
    such an engine would have stored."""

    partition: Partition
    options: list[list[Option]] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every region has an engine."""
        return all(self.options)


def survey(graph: OperationGraph, partition: Partition, device: DeviceProps, engines: Sequence[Engine], label: str = "") -> Survey:
    """Ask every engine about every region. Of a partition that only stands by (one with a label) reasons are kept where no engine takes a region."""
    found = Survey(partition)
    for r, region in enumerate(partition.regions):
        row: list[Option] = []
        refused: list[Engine] = []
        for engine in engines:
            knobs = engine.candidates(graph, region, device)
            for i, k in enumerate(knobs):
                row.append(Option(engine, k, i, engine.cost(graph, region, device, k), len(knobs), engine.numeric_notes(graph, region, k)))
            if not knobs:
                refused.append(engine)
        for engine in refused if not label or not row else ():
            status = engine.check_support(graph, region, device)
            found.rejections.append(Rejection(engine.name, f"{label}|r{r}" if label else f"r{r}", region_name(graph, region), status.reason))
            if status.cut is not None and status.cut not in found.cuts:
                found.cuts.append(status.cut)
        found.options.append(row)
    return found


def region_name(graph: OperationGraph, region: Region) -> str:
    """The node that a region is known by: its anchor, else its last node."""
    return graph.nodes[(region.anchors or region.nodes[-1:])[0]].name if region.nodes else ""


def create(
    graph: OperationGraph,
    device: DeviceProps,
    modes: Iterable[Any] = ("A",),
    *,
    engines: Sequence[Engine] | None = None,
    store: KernelStore | None = None,
    measured: bool = True,
) -> PlanSet:
    """The ranked plans of ``graph`` on ``device``.

    ``modes``: names or members of heur_mode, in order of preference; A, B and OPENSOURCE rank by the roofline model, B after plans that the tuning
    database has measured (if ``measured``), FALLBACK lists the most general engine of each region; none: an empty list that only takes custom plans.
    ``store``: compiled kernels to share (kernel-cache objects).
    Raises NotSupportedError with every rejection where modes were given and no engine takes the graph.
    """
    if engines is None:
        from graphdnn.engines import ENGINES

        engines = ENGINES
    names = [str(getattr(m, "name", m)) for m in modes]
    surveys = _surveys(graph, device, engines)
    found: dict[str, Candidate] = {}
    for name in names:
        ranked = _candidates(surveys, name, device)
        for c in _measured_first(graph, device, ranked) if name == "B" and measured else ranked:
            found.setdefault(c.name, c)
    base = next((s for _, s in surveys if s.complete), surveys[0][1])
    plans = PlanSet(graph, device, base, engines, [r for _, s in surveys for r in s.rejections], store)
    for r in plans.rejections:
        log.debug(f"rejected: {r}")
    for c in found.values():
        plans.add(c)
    if names and not found:
        raise plans.nothing_left("no engine takes every part of the graph")
    return plans


def partition(graph: OperationGraph, device: DeviceProps, label: str, engines: Sequence[Engine] = ()) -> Partition:
    """The partition that a candidate's ``label`` stands for; ``engines``: those that "split" asks which regions they do not take."""
    if label == "unfused":
        return regions.unfused(graph)
    forced: frozenset[int] = frozenset()
    if label.startswith("cut"):
        forced = frozenset((int(label[3:]),))
    elif label == "split":
        whole = partition(graph, device, "")
        stuck = [r for r in whole.regions if not any(e.candidates(graph, r, device) for e in engines)]
        forced = frozenset(t for r in stuck for n in r.nodes for t in graph.nodes[n].output_ids)
    rows = device.cores if device.kind == "cpu" else places.ROWS
    return views.seen(graph, regions.partition(graph, forced, label == "sums", rows))


def _surveys(graph: OperationGraph, device: DeviceProps, engines: Sequence[Engine]) -> list[tuple[str, Survey]]:
    """Surveys with their labels: maximal regions, those with sums of a matmul's rows and columns inside, cuts that engines asked for, single ops for
    regions that nobody takes, single ops throughout."""
    found: list[tuple[str, Survey]] = []
    seen: set[tuple[Region, ...]] = set()

    def add(label: str) -> Survey | None:
        cut = partition(graph, device, label, engines)
        if cut.regions in seen:
            return None
        seen.add(cut.regions)
        found.append((label, survey(graph, cut, device, engines, label)))
        return found[-1][1]

    first = add("")
    assert first is not None, "nothing was seen before"
    add("sums")
    for t in first.cuts[:MAX_CUTS]:
        add(f"cut{t}")
    if not any(s.complete for _, s in found):
        add("split")
    add("unfused")
    return found


def _candidates(surveys: Sequence[tuple[str, Survey]], mode: str, device: DeviceProps) -> list[Candidate]:
    """Candidates of one heuristic mode, best first; the unfused ones last."""
    if mode == "FALLBACK":
        return [c for label, s in surveys for c in heuristics.generic(s.partition, s.options, device.kind, label)]
    if mode not in ("A", "B", "OPENSOURCE"):
        raise BuildError(explain("unknown heuristic mode", expected="A, B, FALLBACK or OPENSOURCE", found=mode))
    ranked = [c for label, s in surveys if label != "unfused" for c in heuristics.variations(s.partition, s.options, device.kind, label)]
    last = [c for label, s in surveys if label == "unfused" for c in heuristics.variations(s.partition, s.options, device.kind, label)[:1]]
    return heuristics.rank(ranked)[: heuristics.MAX_VARIATIONS] + last


def _measured_first(graph: OperationGraph, device: DeviceProps, ranked: list[Candidate]) -> list[Candidate]:
    """Candidates that the tuning database knows, the fastest first, then the others as they are. A database that cannot be read is none."""
    from graphdnn.plans import tuning

    place = tuning.database()
    try:
        known = place.measured(tuning.key_of(graph, device)) if place else []
    except GraphError as error:
        log.warning(f"the tuning database is not used: {error}")
        return ranked
    order = {m.key: i for i, m in enumerate(known)}
    if order:
        log.info(f"{len(order)} measured plans from {place.path if place else ''}")
    return sorted(ranked, key=lambda c: order.get(c.key, len(order)))
