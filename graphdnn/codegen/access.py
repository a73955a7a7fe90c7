"""Access maps of the data-movement ops: which element of which input an output element is. One row per op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graphdnn.ir.index import ZERO, Index, Linear, divide, modulo, reshaped
from graphdnn.ir.node import Node
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.opspecs.window import slides_of


@dataclass(frozen=True, slots=True)
class Guard:
    """True where lo <= value < hi. The bounds are compared with other numbers, so they are plain ones (see ``ir.extent``)."""

    value: Linear
    lo: int
    hi: int

    def __post_init__(self) -> None:
        """An extent of 1 is a 1 here: it would pass for larger than an index that is at most 1."""
        object.__setattr__(self, "lo", int(self.lo))
        object.__setattr__(self, "hi", int(self.hi))


@dataclass(frozen=True, slots=True)
class Piece:
    """One source of a moved element: element ``index`` of ``tensor``, where all guards hold."""

    tensor: int
    index: Index
    guards: tuple[Guard, ...] = ()


def _reshape(node: Node, graph: OperationGraph, index: Index) -> tuple[Piece, ...]:
    x = node.input_ids[0]
    return (Piece(x, reshaped(index, graph.tensors[node.output_ids[0]].dim, graph.tensors[x].dim)),)


def _transpose(node: Node, graph: OperationGraph, index: Index) -> tuple[Piece, ...]:
    source = [ZERO] * len(index)
    for i, axis in zip(index, node.attr("permutation"), strict=True):
        source[axis] = i
    return (Piece(node.input_ids[0], tuple(source)),)


def _slice(node: Node, graph: OperationGraph, index: Index) -> tuple[Piece, ...]:
    x = node.input_ids[0]
    steps = node.attr("slice_strides") or (1,) * len(index)
    source = []
    for i, (start, stop), step, d in zip(index, node.attr("slices"), steps, graph.tensors[x].dim, strict=True):
        first, _, _ = slice(start, stop, step).indices(d)
        source.append(i.scaled(step).shifted(first))
    return (Piece(x, tuple(source)),)


def _concatenate(node: Node, graph: OperationGraph, index: Index) -> tuple[Piece, ...]:
    axis = node.attr("axis") % len(index)
    pieces, start = [], 0
    for x in node.input_ids:
        extent = graph.tensors[x].dim[axis]
        if extent:
            moved = tuple(i.shifted(-start) if a == axis else i for a, i in enumerate(index))
            pieces.append(Piece(x, moved, (Guard(index[axis], start, start + extent),)))
        start += extent
    return tuple(pieces)


def _window(node: Node, graph: OperationGraph, index: Index) -> tuple[Piece, ...]:
    x = node.input_ids[0]
    slides, dim = slides_of(node), graph.tensors[x].dim
    lead = len(dim) - len(slides)
    source, guards = list(index[:lead]), []
    for a, s in enumerate(slides):
        at = (index[lead + a].scaled(s.step) + index[lead + len(slides) + a].scaled(s.dilation)).shifted(s.offset)
        source.append(divide(at, s.divisor))
        guards.append(Guard(at, 0, dim[lead + a] * s.divisor))
        if s.exact:
            guards.append(Guard(modulo(at, s.divisor), 0, 1))
    return (Piece(x, tuple(source), tuple(guards)),)


MOVES: dict[str, Callable[[Node, OperationGraph, Index], tuple[Piece, ...]]] = {
    "RESHAPE": _reshape,
    "TRANSPOSE": _transpose,
    "SLICE": _slice,
    "CONCATENATE": _concatenate,
    "WINDOW": _window,
}
