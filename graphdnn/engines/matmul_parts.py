"""A matmul region taken apart, the same for every matmul engine: loop variables, the tapes of its two inputs, the epilogue, its reductions.

The anchor is any contraction (a matrix product, a convolution): what they are to these engines is in :mod:`graphdnn.codegen.contraction`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from graphdnn.codegen.body import Signature
from graphdnn.codegen.contraction import Contraction, Read, contraction
from graphdnn.codegen.dialect import to_dtype
from graphdnn.codegen.spec import Buffer
from graphdnn.codegen.tape import Load, Store, Tape, TapeBuilder
from graphdnn.dtypes import info
from graphdnn.engines.reduction_parts import Accumulator, accumulate, accumulators
from graphdnn.engines.space import nest
from graphdnn.ir.index import ZERO, Index, Linear, Var, atoms, divide, modulo, offset, rename, slope, var
from graphdnn.ir.node import Node
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.passes import places as positions
from graphdnn.passes.collapse import apply, collapse
from graphdnn.passes.places import moved, of_all, reduced_axes
from graphdnn.passes.regions import Region


@dataclass(frozen=True)
class Operand:
    """One input: its tape and the name of its value there. ``direct``: the tensor itself, where the tape is one load that changes nothing."""

    tape: Tape
    value: str
    direct: int | None

    def mapped(self, change: Callable[[Tape], Tape]) -> Operand:
        """With another form of its tape."""
        return replace(self, tape=change(self.tape))


@dataclass(frozen=True)
class Place:
    """What an epilogue reduction leaves: one number ("full"), or one for every "column" or "row" of each of ``groups`` runs of the batch. ``offset``:
    element of its tensor in the batch variables and n, or those and the loops of m. ``count``: elements behind a number."""

    kind: str
    groups: int
    offset: Linear
    count: int


@dataclass(frozen=True)
class Loops:
    """The region in loops of its own: rows ``m`` and the sum ``k`` count through several, slowest first, none of them of extent 1."""

    m: tuple[Var, ...]
    k: tuple[Var, ...]
    a: Operand
    b: Operand
    epilogue: Tape


@dataclass(frozen=True)
class MatmulParts:
    """``batch``: collapsed batch variables, slowest first. ``m``, ``n``, ``k``: the other loops, each as one number. ``calc``: register type of the
    sum.

    The epilogue tape reads ``c``, the sum already rounded to the result tensor; ``c_text`` gives it from an expression of the sum. It ends with
    one combining line for each of ``sums`` (accumulators ``acc0`` ...), whose results go to ``places`` (None: no place that the engines know).
    ``loops``: the same before m and k were made one number.
    """

    signature: Signature
    node: Node
    batch: list[Var]
    m: Var
    n: Var
    k: Var
    a: Operand
    b: Operand
    epilogue: Tape
    sums: list[Accumulator]
    calc: str
    loops: Loops
    places: list[Place | None]

    @property
    def batches(self) -> int:
        """Matrices in the stack."""
        return math.prod(v.size for v in self.batch)

    def c_text(self, total: str) -> str:
        """The result element, from an expression of the sum."""
        return to_dtype(total, self.calc, self.signature.graph.tensors[self.node.output_ids[0]].dtype)

    @property
    def reduced(self) -> int:
        """Elements of one batch of results, times the batches: what a reduction of all of them runs over."""
        return self.batches * self.m.size * self.n.size


def take_apart(graph: OperationGraph, region: Region, memory: Mapping[int, Buffer], cpu: bool, form: Contraction | None = None) -> MatmulParts:
    """The parts of a matmul region; ``form``: of one of the contractions that make up its anchor (None: the anchor in one piece). Raises
    TapeTooLong."""
    form = form or contraction(graph.nodes[region.anchors[0]], graph)
    parts = _apart(Same(graph), region, cpu and bool(region.epilogue_reductions), form)
    return replace(parts, signature=Signature(graph, memory))


class Same:
    """A graph as a key: equal to itself alone, so that looking it up does not walk all of it."""

    __slots__ = ("graph",)

    def __init__(self, graph: OperationGraph) -> None:
        self.graph = graph

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.graph is other.graph

    def __hash__(self) -> int:
        return id(self.graph)


@functools.lru_cache(maxsize=32)  # every engine, and every knob set that is checked, asks for the same parts: half of a build from the cache
def _apart(same: Same, region: Region, cpu: bool, form: Contraction) -> MatmulParts:
    """:func:`take_apart` for no buffers in particular. Nobody changes what is shared here."""
    graph = same.graph
    node = graph.nodes[region.anchors[0]]
    calc = info(node.compute).register
    a, b = operand(graph, region, form.a, calc, "a"), operand(graph, region, form.b, calc, "b")
    sums = accumulators(graph, region.epilogue_reductions, cpu)
    places = [_place(graph, s.node, form) for s in sums]
    batch, (left, right, epilogue), places = _batch(form, (a.tape, b.tape, epilogue_tape(graph, region, sums, form.out)), places)
    rows, depth = _order(graph, form.m, [*epilogue.stores(), *left.loads()]), _order(graph, form.k, left.loads())
    loops = Loops(rows, depth, replace(a, tape=left), replace(b, tape=right), epilogue)
    m, k = whole("m", loops.m), whole("k", loops.k)

    def flat(tape: Tape) -> Tape:
        return flattened(flattened(tape, loops.m, m), loops.k, k)

    return MatmulParts(
        Signature(graph, {}), node, batch, m, form.n, k, loops.a.mapped(flat), loops.b.mapped(flat), flat(epilogue), sums, calc, loops, places
    )


def whole(name: str, loops: Sequence[Var]) -> Var:
    """One variable that counts through ``loops``."""
    return Var(name, math.prod(v.size for v in loops))


def flattened(tape: Tape, loops: Sequence[Var], flat: Var) -> Tape:
    """``tape`` with ``loops`` written as quotients and remainders of one number, after those that it walks as one have been merged."""
    kept, merged = collapse(loops, tape.linears())
    rest, names = var(flat), {}
    for v in reversed(kept):
        size = max(v.size, 1)  # an empty loop is never run
        names[v] = modulo(rest, size)
        rest = divide(rest, size)
    return tape.mapped(lambda e: rename(apply(e, merged), names))


def step(access: Load | Store, loops: Sequence[Var]) -> float:
    """Elements between two neighbours of the fastest of ``loops``; 0 where the access does not move with it."""
    return abs(slope(access.offset, loops[-1])) if loops else 0.0


def _order(graph: OperationGraph, loops: Sequence[Var], accesses: Sequence[Load | Store]) -> tuple[Var, ...]:
    """``loops`` from slowest to fastest in the memory of the first store and the largest load, without those of extent 1."""
    by = sorted(accesses, key=lambda x: (isinstance(x, Load), -graph.tensors[x.tensor].size))
    return tuple(sorted((v for v in loops if v.size != 1), key=lambda v: tuple(-abs(slope(x.offset, v)) for x in by)))


def operand(graph: OperationGraph, region: Region, read: Read, calc: str, prefix: str) -> Operand:
    """The tape of one input; ``prefix`` of its names."""
    builder = TapeBuilder(graph, region.reads, prefix=prefix)
    value = builder.guarded(read.tensor, read.index, calc, read.guards)
    loads = builder.tape.loads()
    plain = len(builder.tape.items) == 1 and bool(loads) and not loads[0].guards
    if plain:  # what lies in memory may be of another type than the operand: a movement op converts, and widening takes no instruction
        row = info(graph.tensors[loads[0].tensor].dtype)
        plain = row.storage == calc and row.decode == "{}"
    return Operand(builder.tape, value, loads[0].tensor if plain else None)


def epilogue_tape(graph: OperationGraph, region: Region, sums: list[Accumulator], index: Index) -> Tape:
    """What happens to ``c``, the result element at ``index``."""
    node = graph.nodes[region.anchors[0]]
    builder = TapeBuilder(graph, region.reads, {node.output_ids[0]: ("c", index)})
    reduced = {s.node.output_ids[0] for s in sums}
    place = positions.places(graph, region.anchors, region.nodes, region.space)
    for t in region.stores:
        if t not in reduced:
            builder.store(t, moved(place[t], region.space, index))
    accumulate(builder, sums, index)
    return builder.tape


def _place(graph: OperationGraph, node: Node, form: Contraction) -> Place | None:
    axes, space, result = reduced_axes(graph, node), graph.tensors[node.input_ids[0]].dim, graph.tensors[node.output_ids[0]]
    count = math.prod(space[a] for a in axes)
    if of_all(space, axes):
        return Place("full", 1, ZERO, count)
    gone = {v for a in axes for v in _variables(form.out[a])}
    kept = {v for a, e in enumerate(form.out) if a not in axes for v in _variables(e)}
    m, n = ({v for v in loops if v.size > 1} for loops in (form.m, (form.n,)))
    batch = [v for v in form.batch if v.size > 1]
    groups = list(itertools.takewhile(lambda v: v in kept, batch))
    if not gone.issuperset(batch[len(groups) :]):
        return None
    same_rank = len(result.dim) == len(space)
    at = offset(tuple(ZERO if a in axes else e for a, e in enumerate(form.out) if same_rank or a not in axes), result.strides)
    for kind, lines, others in (("column", n, m), ("row", m, n)):
        if gone - set(batch) == others and kept - set(batch) == lines:
            return Place(kind, math.prod(v.size for v in groups), at, count)
    return None


def _variables(e: Linear) -> set[Var]:
    return {a for a in atoms(e) if isinstance(a, Var)}


def _batch(form: Contraction, tapes: tuple[Tape, Tape, Tape], places: list[Place | None]) -> tuple[list[Var], list[Tape], list[Place | None]]:
    """The batch loops, merged over all tapes and places. They keep their order (the result's, slowest first): CPU panels count rows through them."""
    ends = [p.offset if p else ZERO for p in places]
    fresh, joined, ends = nest(form.batch, Tape([i for t in tapes for i in t.items]), [], ends, names="z", last="z")
    items, parts = iter(joined.items), []
    for t in tapes:
        parts.append(Tape(list(itertools.islice(items, len(t.items)))))
    return fresh, parts, [replace(p, offset=e) if p else None for p, e in zip(places, ends, strict=True)]
