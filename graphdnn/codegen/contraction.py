"""Contractions: sums of products of two inputs, as loops and index maps. One row per op.

Every contraction is C[batch, m, n] = sum over k of A[batch, m, k] * B[batch, k, n], where each of the four counts through loops of its own. A matrix
product has one loop for each of m, n and k. A convolution walks its outputs by m and its taps and channels by k, and reads A through a window: the
im2col matrix is an index map with guards, not memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphdnn.codegen.access import Guard
from graphdnn.ir.index import Index, Linear, Var, bounds, divide, modulo, var
from graphdnn.ir.node import Node
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.ir.tensor import Dims
from graphdnn.opspecs.conv import Motion, groups_of, motion

MAX_PHASES = 16
"""Pieces of a strided data gradient; where there would be more, it is made in one piece."""


@dataclass(frozen=True, slots=True)
class Read:
    """An input: element ``index`` of ``tensor`` where all guards hold, else zero."""

    tensor: int
    index: Index
    guards: tuple[Guard, ...] = ()


@dataclass(frozen=True, slots=True)
class Window:
    """How A is read, an entry for each spatial dim: at ``out * step + tap * dilation + shift``, zero outside of 0 .. extent - 1; ``out`` from the
    loops of m, ``tap`` from those of k. Neighbouring outputs share most of what they read."""

    steps: Dims
    dilations: Dims
    shifts: Dims
    extents: Dims

    @property
    def step(self) -> int:
        """Of the last dim."""
        return self.steps[-1]

    @property
    def dilation(self) -> int:
        """Of the last dim."""
        return self.dilations[-1]

    def read(self, positions: Sequence[Linear], taps: Sequence[Linear]) -> tuple[Index, tuple[Guard, ...]]:
        """Spatial index of the element that a tap meets at an output position, and where there is one."""
        index, guards = [], []
        for p, r, step, dil, shift, x in zip(positions, taps, self.steps, self.dilations, self.shifts, self.extents, strict=True):
            at = (p.scaled(step) + r.scaled(dil)).shifted(shift)
            index.append(at)
            guards += _within(at, 0, x)
        return tuple(index), tuple(guards)


@dataclass(frozen=True, slots=True)
class Contraction:
    """``out``: the element of the result that (batch, m, n) is. Loops that are given as one number count with the last one fastest. Where there is
    a ``window``, the first loop of k counts channels, the rest of k and m spatial dims."""

    batch: tuple[Var, ...]
    m: tuple[Var, ...]
    n: Var
    k: tuple[Var, ...]
    a: Read
    b: Read
    out: Index
    window: Window | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Extents of batch, m, n and k."""
        return math.prod(v.size for v in self.batch), math.prod(v.size for v in self.m), self.n.size, math.prod(v.size for v in self.k)


def contraction(node: Node, graph: OperationGraph) -> Contraction:
    """The loops of a node whose op has the role "matmul"."""
    return CONTRACTIONS[node.op](node, graph)


def contractions(node: Node, graph: OperationGraph) -> tuple[Contraction, ...]:
    """The node as contractions over parts of its result, one after the other, where that saves work: a strided data gradient multiplies no zeros."""
    return _phases(node, graph) if node.op == "CONV_DGRAD" else (contraction(node, graph),)


def _matmul(node: Node, graph: OperationGraph) -> Contraction:
    a, b = node.input("A"), node.input("B")
    dim = graph.tensors[node.output_ids[0]].dim
    batch = tuple(Var(f"z{i}", d) for i, d in enumerate(dim[:-2]))
    m, n, k = Var("m", dim[-2]), Var("n", dim[-1]), Var("k", graph.tensors[a].dim[-1])
    lead = tuple(var(v) for v in batch)
    return Contraction(batch, (m,), n, (k,), Read(a, (*lead, var(m), var(k))), Read(b, (*lead, var(k), var(n))), (*lead, var(m), var(n)))


# --------------------------------------------------------------------------------------------------------------------------------- convolutions
def _loops(name: str, first: int, rest: Sequence[int]) -> tuple[Var, ...]:
    return tuple(Var(f"{name}{i}", d) for i, d in enumerate((first, *rest)))


def _channel(group: Var, channel: Var) -> Linear:
    return var(group).scaled(channel.size) + var(channel)


def _within(value: Linear, lo: int, hi: int) -> list[Guard]:
    """lo <= value < hi, in numbers that are not negative; nothing where that is always so."""
    low, high = bounds(value)
    return [] if lo <= low and high < int(hi) else [Guard(value.shifted(-value.const), lo - value.const, hi - value.const)]


def _spatial(loops: Sequence[Var]) -> tuple[Linear, ...]:
    return tuple(var(v) for v in loops[1:])


def _taps(loops: Sequence[Var], backwards: bool) -> tuple[Linear, ...]:
    """The filter's taps that the loops after the first stand for."""
    return tuple(var(v).scaled(-1).shifted(v.size - 1) if backwards else var(v) for v in loops[1:])


def _sliding(moves: Motion, image: Dims) -> Window:
    """The window of a filter that moves over an image."""
    return Window(moves.stride, moves.dilation, tuple(-p for p in moves.pre), image[2:])


def _fprop(node: Node, graph: OperationGraph) -> Contraction:
    moves, (x, w), y = motion(dict(node.attrs)), node.input_ids, node.output_ids[0]
    image, weight, out = (graph.tensors[t].dim for t in (x, w, y))
    groups = groups_of(image, weight)
    g, m, k = Var("z0", groups), _loops("m", out[0], out[2:]), _loops("k", weight[1], weight[2:])
    n, window = Var("n", weight[0] // max(groups, 1)), _sliding(moves, image)
    at, guards = window.read(_spatial(m), _spatial(k))
    a = Read(x, (var(m[0]), _channel(g, k[0]), *at), guards)
    b = Read(w, (_channel(g, n), var(k[0]), *_taps(k, moves.flipped)))
    return Contraction((g,), m, n, k, a, b, (var(m[0]), _channel(g, n), *_spatial(m)), window)


def _wgrad(node: Node, graph: OperationGraph) -> Contraction:
    """The windows are A again, so that a CPU packs them panel by panel: its rows are the filter's channels and taps."""
    moves, (dy, x), dw = motion(dict(node.attrs)), node.input_ids, node.output_ids[0]
    loss, image, weight = (graph.tensors[t].dim for t in (dy, x, dw))
    groups = groups_of(image, weight)
    g, m, k = Var("z0", groups), _loops("m", weight[1], weight[2:]), _loops("k", loss[0], loss[2:])
    n = Var("n", weight[0] // max(groups, 1))
    at, guards = _sliding(moves, image).read(_spatial(k), _spatial(m))
    a = Read(x, (var(k[0]), _channel(g, m[0]), *at), guards)
    b = Read(dy, (var(k[0]), _channel(g, n), *_spatial(k)))
    return Contraction((g,), m, n, k, a, b, (_channel(g, n), var(m[0]), *_taps(m, moves.flipped)))


# -------------------------------------------------------------------------------------------------------------------------------- data gradients
@dataclass(frozen=True, slots=True)
class _Phase:
    """Rows ``first``, ``first + step``, ... of a spatial dim of an image that has ``rows`` of them. Tap ``tap + t * every`` (``taps`` of them) of
    the filter meets output row - t * dilation + shift; no other tap meets any."""

    first: int
    rows: int
    tap: int
    every: int
    taps: int
    dilation: int
    shift: int


def _phases_of(a: int, image: int, taps: int, moves: Motion) -> list[_Phase]:
    """Element h of the image meets tap r of output p where p * step + r * dilation = h + pre: for h = row * step + first, the taps with
    r * dilation = first + pre modulo step, which are the same for all rows. So each phase is a convolution of its own, at step 1."""
    pre, step, dil = moves.pre[a], moves.stride[a], moves.dilation[a]
    every, found = step // math.gcd(step, dil), []
    for first in range(min(step, image)):
        tap = next((r for r in range(min(every, taps)) if (first + pre - r * dil) % step == 0), None)
        rows = -(-(image - first) // step)
        if tap is None:
            found.append(_Phase(first, rows, 0, 1, 0, 1, 0))
        else:
            found.append(_Phase(first, rows, tap, every, -(-(taps - tap) // every), dil * every // step, (first + pre - tap * dil) // step))
    return found


def _phases(node: Node, graph: OperationGraph) -> tuple[Contraction, ...]:
    """A data gradient by phases: rows of the image that meet the same taps."""
    moves, w, dx = motion(dict(node.attrs)), node.input_ids[1], node.output_ids[0]
    taps, image = graph.tensors[w].dim[2:], graph.tensors[dx].dim[2:]
    if math.prod(moves.stride) > MAX_PHASES:
        return (_dgrad(node, graph),)
    every = [_phases_of(a, x, r, moves) for a, (x, r) in enumerate(zip(image, taps, strict=True))]
    return tuple(_phase(node, graph, moves, chosen) for chosen in itertools.product(*every)) or (_dgrad(node, graph),)


def _phase(node: Node, graph: OperationGraph, moves: Motion, dims: Sequence[_Phase]) -> Contraction:
    """The tap loops run backwards, so that no loop of an index has a negative coefficient."""
    (dy, w), dx = node.input_ids, node.output_ids[0]
    loss, weight, image = (graph.tensors[t].dim for t in (dy, w, dx))
    groups = groups_of(image, weight)
    channels = weight[0] // max(groups, 1) if all(d.taps for d in dims) else 0  # nothing to add up
    g, n = Var("z0", groups), Var("n", weight[1])
    m, k = _loops("m", image[0], [d.rows for d in dims]), _loops("k", channels, [max(d.taps, 1) for d in dims])
    back = tuple(d.dilation for d in dims)
    window = Window((1,) * len(dims), back, tuple(d.shift - (d.taps - 1) * d.dilation for d in dims), loss[2:])
    at, guards = window.read(_spatial(m), _spatial(k))
    taps = tuple(var(v).scaled(-d.every).shifted(d.tap + (v.size - 1) * d.every) for d, v in zip(dims, k[1:], strict=True))
    own = tuple(t.scaled(-1).shifted(r - 1) for t, r in zip(taps, weight[2:], strict=True)) if moves.flipped else taps
    place = tuple(var(v).scaled(s).shifted(d.first) for d, v, s in zip(dims, m[1:], moves.stride, strict=True))
    a = Read(dy, (var(m[0]), _channel(g, k[0]), *at), guards)
    b = Read(w, (_channel(g, k[0]), var(n), *own))
    return Contraction((g,), m, n, k, a, b, (var(m[0]), _channel(g, n), *place), window)


@dataclass(frozen=True, slots=True)
class _Gather:
    """One spatial dim of a data gradient in one piece: its loops (``phase`` goes with the batch), the elements of image, DY and filter, guards."""

    phase: Var
    rows: Var
    taps: Var
    image: Linear
    loss: Linear
    tap: Linear
    loss_guards: list[Guard]
    tap_guards: list[Guard]


def _gather(a: int, image: int, loss: int, taps: int, moves: Motion) -> _Gather:
    """Where the phases have as many rows each, they are one more loop of the batch, and guards cut off the taps that some of them lack. Else every
    tap is tried, and guards keep those that meet an output."""
    pre, step, dil = moves.pre[a], moves.stride[a], moves.dilation[a]
    phased = step > 1 and image % step == 0 and math.gcd(step, dil) == 1
    phase = Var(f"z{a + 1}", step if phased else 1)
    rows, count = Var(f"m{a + 1}", image // phase.size), -(-taps // phase.size)
    t = Var(f"k{a + 1}", count)
    back = var(t).scaled(-1).shifted(count - 1)
    if phased:
        first = modulo(var(phase).shifted(pre).scaled(pow(dil, -1, step)), step)
        tap = first + back.scaled(step)
        at = var(rows) + back.scaled(-dil) + divide(var(phase).shifted(pre) + first.scaled(-dil), step)
        return _Gather(phase, rows, t, var(rows).scaled(step) + var(phase), at, tap, _within(at, 0, loss), _within(tap, 0, taps))
    spread = (var(rows) + back.scaled(-dil)).shifted(pre)
    guards = _within(spread, 0, (loss - 1) * step + 1) + _within(modulo(spread, step), 0, 1)
    return _Gather(phase, rows, t, var(rows), divide(spread, step), back, guards, [])


def _dgrad(node: Node, graph: OperationGraph) -> Contraction:
    """All of a data gradient in one piece. The image gathers from the outputs whose windows meet it."""
    moves, (dy, w), dx = motion(dict(node.attrs)), node.input_ids, node.output_ids[0]
    loss, weight, image = (graph.tensors[t].dim for t in (dy, w, dx))
    groups = groups_of(image, weight)
    g, m, k, n = Var("z0", groups), Var("m0", image[0]), Var("k0", weight[0] // max(groups, 1)), Var("n", weight[1])
    dims = [_gather(a, *extents, moves) for a, extents in enumerate(zip(image[2:], loss[2:], weight[2:], strict=True))]
    taps = tuple(d.tap.scaled(-1).shifted(r - 1) if moves.flipped else d.tap for d, r in zip(dims, weight[2:], strict=True))
    a = Read(dy, (var(m), _channel(g, k), *(d.loss for d in dims)), tuple(x for d in dims for x in d.loss_guards))
    b = Read(w, (_channel(g, k), var(n), *taps), tuple(x for d in dims for x in d.tap_guards))
    batch, rows, depth = (g, *(d.phase for d in dims)), (m, *(d.rows for d in dims)), (k, *(d.taps for d in dims))
    return Contraction(batch, rows, n, depth, a, b, (var(m), _channel(g, n), *(d.image for d in dims)))


CONTRACTIONS: dict[str, Callable[[Node, OperationGraph], Contraction]] = {
    "MATMUL": _matmul,
    "CONV_FPROP": _fprop,
    "CONV_DGRAD": _dgrad,
    "CONV_WGRAD": _wgrad,
}
"""Op of role "matmul" -> its loops."""
