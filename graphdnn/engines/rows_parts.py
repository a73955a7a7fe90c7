"""A rows region taken apart: one tape for each pass over a row that ends in reductions, what is calculated between passes, and the last pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from graphdnn.codegen.body import Signature
from graphdnn.codegen.spec import Buffer
from graphdnn.codegen.tape import Load, Store, Tape, TapeBuilder
from graphdnn.engines.reduction_parts import Accumulator, accumulate, accumulators
from graphdnn.engines.space import nest, store_free
from graphdnn.ir.index import Index, Var
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.passes.places import places, reduced_axes, spreads, variables, whole
from graphdnn.passes.regions import Region


@dataclass(frozen=True)
class Pass:
    """One pass over a row: ``tape`` combines an element into ``sums``; ``after`` reads the results ``y0`` ... and calculates, once a row."""

    sums: list[Accumulator]
    tape: Tape
    after: Tape


@dataclass(frozen=True)
class RowsParts:
    """``outputs`` and ``reduced``: loops over rows and along a row, slowest first, the fastest named 'k' and 'j'. ``last``: the pass that stores what
    has an element for each of the row; empty if there is none. ``count``: elements of a row."""

    signature: Signature
    outputs: list[Var]
    reduced: list[Var]
    passes: list[Pass]
    last: Tape
    count: int

    @property
    def size(self) -> int:
        """Number of rows."""
        return math.prod(v.size for v in self.outputs)

    @property
    def joined(self) -> Tape:
        """Everything that runs once an element."""
        return Tape([i for p in self.passes for i in p.tape.items] + self.last.items)

    def contiguous(self) -> bool:
        """Whether the largest tensor is walked with smaller steps along a row than from row to row."""
        accesses: list[Load | Store] = [*self.joined.loads(), *self.last.stores()]
        if not self.reduced or not accesses:
            return True
        tensors = self.signature.graph.tensors
        biggest = max(accesses, key=lambda x: tensors[x.tensor].size)
        across = biggest.offset.coefficient(self.outputs[-1]) if self.outputs else 0
        along = biggest.offset.coefficient(self.reduced[-1])
        return across == 0 or (along != 0 and abs(along) <= abs(across))


def take_apart(graph: OperationGraph, region: Region, memory: Mapping[int, Buffer], cpu: bool) -> RowsParts:
    """The parts of a rows region. Raises TapeTooLong."""
    loop = variables(region.space)
    axes = reduced_axes(graph, graph.nodes[region.anchors[0]])
    place = places(graph, region.anchors, region.nodes, region.space)
    sums = {s.node.output_ids[0]: s for s in accumulators(graph, region.anchors, cpu)}
    ready = _ready(graph, region)
    known: dict[int, tuple[str, Index]] = {}
    tapes: list[Tape] = []
    grouped: list[list[Accumulator]] = []
    for number, stage in enumerate(region.stages):
        group = [sums[graph.nodes[a].output_ids[0]] for a in stage]
        each = TapeBuilder(graph, region.reads, known, prefix=f"a{number}_")
        accumulate(each, group, whole(region.space))
        known |= {t: (s.result, place[t]) for s in group for t in s.node.output_ids}
        between = TapeBuilder(graph, region.reads, known, prefix=f"b{number}_")
        late = [t for t, level in ready.items() if level == number + 1 and not spreads(place[t], region.space, axes)]
        for t in late:
            if t not in known:
                known[t] = (between.value(t, place[t]), place[t])
        if number == 0:  # what depends on no result but has one element a row
            result = group[0].node.output_ids[0]
            for t in region.stores:
                if t not in place and graph.tensors[t].dim == graph.tensors[result].dim:
                    known[t] = (between.value(t, place[result]), place[result])
                    late.append(t)
        for t in late:
            if t in region.stores:
                between.store(t, known[t][1])
        tapes += [each.tape, between.tape]
        grouped.append(group)
    final = TapeBuilder(graph, region.reads, known, prefix="c_")
    for t in region.stores:
        if t in place and t not in known:
            final.store(t, place[t])
        elif t not in known:
            store_free(final, graph, t, loop)
    tapes.append(final.tape)
    return _nested(Signature(graph, memory), region, tapes, grouped, loop, axes)


def _ready(graph: OperationGraph, region: Region) -> dict[int, int]:
    """Tensors that depend on results of the region, in order, with the number of passes that must have run before."""
    passes = {graph.nodes[a].output_ids[0]: number + 1 for number, stage in enumerate(region.stages) for a in stage}
    found: dict[int, int] = {}
    for i in region.nodes:
        node = graph.nodes[i]
        for t in node.output_ids:
            level = passes.get(t) or max((found.get(x, 0) for x in node.input_ids), default=0)
            if level:
                found[t] = level
    return found


def _nested(
    signature: Signature, region: Region, tapes: list[Tape], grouped: list[list[Accumulator]], loop: tuple[Var, ...], axes: tuple[int, ...]
) -> RowsParts:
    graph = signature.graph
    both = Tape([i for t in tapes for i in t.items])
    both_kinds: list[Load | Store] = [*both.loads(), *both.stores()]
    accesses = sorted(both_kinds, key=lambda x: -graph.tensors[x.tensor].size)
    order = [x.offset for x in accesses]
    outputs, both, order = nest([v for a, v in enumerate(loop) if a not in axes], both, order, order, names="o", last="k")
    reduced, both, _ = nest([v for a, v in enumerate(loop) if a in axes], both, order, names="r")
    cut, parts = 0, []
    for t in tapes:
        parts.append(Tape(both.items[cut : cut + len(t.items)]))
        cut += len(t.items)
    passes = [Pass(group, parts[2 * n], parts[2 * n + 1]) for n, group in enumerate(grouped)]
    return RowsParts(signature, outputs, reduced, passes, parts[-1], math.prod(region.space[a] for a in axes))
