"""Contractions: sums of products of two inputs, as loops and index maps. One row per op.

Every contraction is C[batch, m, n] = sum over k of A[batch, m, k] * B[batch, k, n], where each of the four counts through loops of its own. A matrix
product has one loop for each of m, n and k. A convolution walks its outputs by m and its taps and channels by k, and reads A through a window: the
im2col matrix is an index map with guards, not memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphdnn.codegen.access import Guard, Index
from graphdnn.ir.index import Linear, Var, bounds, divide, modulo, var
from graphdnn.ir.node import Node
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.ir.tensor import Dims
from graphdnn.opspecs.conv import Motion, groups_of, motion


@dataclass(frozen=True, slots=True)
class Read:
    """An input: element ``index`` of ``tensor`` where all guards hold, else zero."""

    tensor: int
    index: Index
    guards: tuple[Guard, ...] = ()


@dataclass(frozen=True, slots=True)
class Window:
    """A reads its last dim at ``out * step + tap * dilation`` plus a constant, ``out`` the last loop of m and ``tap`` the last of k: neighbouring
    outputs share most of what they read."""

    step: int
    dilation: int


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
    return [] if lo <= low and high < hi else [Guard(value.shifted(-value.const), lo - value.const, hi - value.const)]


def _spatial(loops: Sequence[Var]) -> tuple[Linear, ...]:
    return tuple(var(v) for v in loops[1:])


def _taps(loops: Sequence[Var], backwards: bool) -> tuple[Linear, ...]:
    """The filter's taps that the loops after the first stand for."""
    return tuple(var(v).scaled(-1).shifted(v.size - 1) if backwards else var(v) for v in loops[1:])


def _window(moves: Motion, image: Dims, positions: Sequence[Linear], taps: Sequence[Linear]) -> tuple[Index, tuple[Guard, ...]]:
    """Spatial index into an image of the element that a tap meets at an output position, and where there is one."""
    index, guards = [], []
    for x, p, r, pre, step, dil in zip(image[2:], positions, taps, moves.pre, moves.stride, moves.dilation, strict=True):
        at = (p.scaled(step) + r.scaled(dil)).shifted(-pre)
        index.append(at)
        guards += _within(at, 0, x)
    return tuple(index), tuple(guards)


def _fprop(node: Node, graph: OperationGraph) -> Contraction:
    moves, (x, w), y = motion(dict(node.attrs)), node.input_ids, node.output_ids[0]
    image, weight, out = (graph.tensors[t].dim for t in (x, w, y))
    groups = groups_of(image, weight)
    g, m, k = Var("z0", groups), _loops("m", out[0], out[2:]), _loops("k", weight[1], weight[2:])
    n = Var("n", weight[0] // max(groups, 1))
    at, guards = _window(moves, image, _spatial(m), _spatial(k))
    a = Read(x, (var(m[0]), _channel(g, k[0]), *at), guards)
    b = Read(w, (_channel(g, n), var(k[0]), *_taps(k, moves.flipped)))
    return Contraction((g,), m, n, k, a, b, (var(m[0]), _channel(g, n), *_spatial(m)), Window(moves.stride[-1], moves.dilation[-1]))


def _dgrad(node: Node, graph: OperationGraph) -> Contraction:
    """The image gathers from the outputs whose windows meet it: at stride s, those of every s-th tap. The tap loops run backwards, so that no index
    of a loop has a negative coefficient."""
    moves, (dy, w), dx = motion(dict(node.attrs)), node.input_ids, node.output_ids[0]
    loss, weight, image = (graph.tensors[t].dim for t in (dy, w, dx))
    groups = groups_of(image, weight)
    g, m, k = Var("z0", groups), _loops("m", image[0], image[2:]), _loops("k", weight[0] // max(groups, 1), weight[2:])
    n = Var("n", weight[1])
    index, guards = [], []
    for p, h, r, pre, step, dil in zip(loss[2:], m[1:], k[1:], moves.pre, moves.stride, moves.dilation, strict=True):
        spread = (var(h) + var(r).scaled(dil)).shifted(pre - (r.size - 1) * dil)
        index.append(divide(spread, step))
        guards += _within(spread, 0, (p - 1) * step + 1) + _within(modulo(spread, step), 0, 1)
    a = Read(dy, (var(m[0]), _channel(g, k[0]), *index), tuple(guards))
    b = Read(w, (_channel(g, k[0]), var(n), *_taps(k, not moves.flipped)))
    return Contraction((g,), m, n, k, a, b, (var(m[0]), _channel(g, n), *_spatial(m)), Window(1, moves.dilation[-1]))


def _wgrad(node: Node, graph: OperationGraph) -> Contraction:
    """The windows are A again, so that a CPU packs them panel by panel: its rows are the filter's channels and taps."""
    moves, (dy, x), dw = motion(dict(node.attrs)), node.input_ids, node.output_ids[0]
    loss, image, weight = (graph.tensors[t].dim for t in (dy, x, dw))
    groups = groups_of(image, weight)
    g, m, k = Var("z0", groups), _loops("m", weight[1], weight[2:]), _loops("k", loss[0], loss[2:])
    n = Var("n", weight[0] // max(groups, 1))
    at, guards = _window(moves, image, _spatial(k), _spatial(m))
    a = Read(x, (var(k[0]), _channel(g, m[0]), *at), guards)
    b = Read(dy, (var(k[0]), _channel(g, n), *_spatial(k)))
    return Contraction((g,), m, n, k, a, b, (_channel(g, n), var(m[0]), *_taps(m, moves.flipped)))


CONTRACTIONS: dict[str, Callable[[Node, OperationGraph], Contraction]] = {
    "MATMUL": _matmul,
    "CONV_FPROP": _fprop,
    "CONV_DGRAD": _dgrad,
    "CONV_WGRAD": _wgrad,
}
"""Op of role "matmul" -> its loops."""
