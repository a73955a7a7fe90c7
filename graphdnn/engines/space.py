"""Loop variables of a region's space and the stores of free outputs: what pointwise and reduction kernels share."""

from __future__ import annotations

from collections.abc import Sequence

from graphdnn.codegen.access import Guard
from graphdnn.codegen.tape import Tape, TapeBuilder
from graphdnn.ir.index import ZERO, Linear, Var, rename, var
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.passes.collapse import apply, collapse, ordered
from graphdnn.passes.places import broadcasts, seen_as


def store_free(builder: TapeBuilder, graph: OperationGraph, tensor: int, loop: Sequence[Var]) -> None:
    """Store ``tensor`` from a loop over a space that its dims broadcast to (it is written where the coordinates that it lacks are 0), or that it is
    with dims merged."""
    dim, space = graph.tensors[tensor].dim, tuple(v.size for v in loop)
    if not broadcasts(dim, space):
        place = seen_as(dim, space)
        assert place is not None, f"tensor {tensor} of dims {dim} has no place in a loop over {space}"
        builder.store(tensor, place)
        return
    missing = len(loop) - len(dim)
    own = tuple(ZERO if d == 1 else var(v) for v, d in zip(loop[missing:], dim, strict=True))
    lacking = [v for a, v in enumerate(loop) if v.size > 1 and (a < missing or dim[a - missing] == 1)]
    builder.store(tensor, own, tuple(Guard(var(v), 0, 1) for v in lacking))


def priority(tape: Tape, graph: OperationGraph) -> list[Linear]:
    """Offsets that decide the loop order: the largest stores first, then the largest loads."""
    stores = sorted(tape.stores(), key=lambda s: -graph.tensors[s.tensor].size)
    loads = sorted(tape.loads(), key=lambda s: -graph.tensors[s.tensor].size)
    return [s.offset for s in stores] + [x.offset for x in loads]


def nest(
    loop: Sequence[Var], tape: Tape, by: Sequence[Linear], also: Sequence[Linear] = (), names: str = "i", last: str = "j"
) -> tuple[list[Var], Tape, list[Linear]]:
    """The smallest loop nest over ``loop``, slowest first, its tape, and the expressions ``also`` in its variables. The fastest is named ``last``."""
    order = ordered(loop, by)
    kept, merged = collapse(order, [*tape.linears(), *also])
    fresh = [Var(f"{names}{n}", v.size) for n, v in enumerate(kept[:-1])] + [Var(last, v.size) for v in kept[-1:]]
    mapping = {old: var(new) for old, new in zip(kept, fresh, strict=True)}

    def change(e: Linear) -> Linear:
        return rename(apply(e, merged), mapping)

    return fresh, tape.mapped(change), [change(e) for e in also]
