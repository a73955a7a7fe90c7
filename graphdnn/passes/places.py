"""Where the values of a region stand: the index of each tensor that depends on its anchors, in the variables of its loop nest.

A result of a reduction keeps the variables that are not reduced, the result of a matmul has all of its own. A reshape or transpose only renames what
it is given, so both are free after an anchor as well as in front of it: what follows is calculated and stored in the region's own loops, at another
index. What spreads over the rows again has the index of the whole space.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from graphdnn.ir.extent import varies
from graphdnn.ir.index import ZERO, Index, Var, atoms, broadcast, equal, reshaped, substitute, var
from graphdnn.ir.node import Node
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.ir.tensor import Dims
from graphdnn.opspecs import reduction

ROW = 1 << 16
"""Most reduced elements of one result for what follows the reduction to walk the same row again in the same kernel: it should still be in cache."""
ROWS, SMALL = 256, 1 << 18
"""Rows that fill a GPU, and the elements of a problem that is too small to mind."""


def variables(space: Dims, prefix: str = "i") -> tuple[Var, ...]:
    """One loop variable a dim."""
    return tuple(Var(f"{prefix}{a}", d) for a, d in enumerate(space))


def whole(space: Dims) -> Index:
    """The index of the loop nest over ``space`` itself."""
    return tuple(var(v) for v in variables(space))


def reduced_axes(graph: OperationGraph, node: Node) -> tuple[int, ...]:
    """Axes that a reduction node reduces."""
    return reduction.reduced_axes(dict(node.attrs), graph.tensors[node.input_ids[0]].dim, graph.tensors[node.output_ids[0]].dim)


def of_anchor(graph: OperationGraph, node: Node) -> Index:
    """Index of an anchor's result; reduced dims may have been kept or not."""
    dim = graph.tensors[node.output_ids[0]].dim
    if node.op != "REDUCTION":
        return whole(dim)
    axes, loop = reduced_axes(graph, node), whole(graph.tensors[node.input_ids[0]].dim)
    if len(dim) == len(loop):
        return tuple(ZERO if a in axes else e for a, e in enumerate(loop))
    return tuple(e for a, e in enumerate(loop) if a not in axes)


def of_node(graph: OperationGraph, node: Node, space: Dims, known: Mapping[int, Index]) -> Index | None:
    """Index of the result of a pointwise, reshape or transpose node, some of whose inputs are ``known`` to stand in the loop nest over ``space``.
    None where a value is needed at another index than it has, and for other nodes."""
    dim = graph.tensors[node.output_ids[0]].dim
    if node.op == "RESHAPE":
        source = graph.tensors[node.input_ids[0]].dim
        found = reshaped(known[node.input_ids[0]], source, dim) if 0 not in dim else None
        return found if found is not None and equal(reshaped(found, dim, source), known[node.input_ids[0]]) else None
    if node.op == "TRANSPOSE":
        return tuple(known[node.input_ids[0]][p] for p in node.attr("permutation"))
    if node.op != "POINTWISE":
        return None
    own = [t for t in node.input_ids if t in known]
    alike = [known[t] for t in own if graph.tensors[t].dim == dim]
    if not alike and dim != space:
        return None
    found = alike[0] if alike else whole(space)
    return found if all(equal(broadcast(found, graph.tensors[t].dim), known[t]) for t in own) else None


def seen_as(dim: Dims, space: Dims) -> Index | None:
    """Index of a tensor of dims ``dim`` that is the loop nest over ``space`` with neighbouring dims merged; None if it is not that."""
    if 0 in dim or 0 in space or math.prod(dim) != math.prod(space):
        return None
    found = reshaped(whole(space), space, dim)
    merged = all(isinstance(a, Var) for e in found for a in atoms(e))
    return found if merged and equal(reshaped(found, dim, space), whole(space)) else None


def places(graph: OperationGraph, anchors: Iterable[int], nodes: Iterable[int], space: Dims) -> dict[int, Index]:
    """Index of every tensor that depends on the ``anchors`` of a region of these ``nodes``, in :func:`variables` of ``space``."""
    found = {graph.nodes[a].output_ids[0]: of_anchor(graph, graph.nodes[a]) for a in anchors}
    for i in sorted(nodes):
        node = graph.nodes[i]
        if node.output_ids[0] not in found and any(t in found for t in node.input_ids):
            place = of_node(graph, node, space, found)
            if place is not None:
                found[node.output_ids[0]] = place
    return found


def moved(place: Index, space: Dims, index: Index) -> Index:
    """``place`` where the loop nest over ``space`` stands at ``index``."""
    names = dict(zip(variables(space), index, strict=True))
    return tuple(substitute(e, names) for e in place)


def spreads(place: Index, space: Dims, axes: Iterable[int]) -> bool:
    """Whether a value at ``place`` differs along some of ``axes``: it has an element for each of a row."""
    loop = variables(space)
    gone = {loop[a] for a in axes}
    return any(isinstance(a, Var) and a in gone for e in place for a in atoms(e))


def of_all(space: Dims, axes: Iterable[int]) -> bool:
    """Whether a reduction of ``axes`` leaves one result."""
    return all(a in axes or d == 1 for a, d in enumerate(space))


def of_lines(space: Dims, axes: Iterable[int], columns: int | None) -> bool:
    """Whether a reduction leaves one result for each row or each column of a contraction's result, whose columns are dim ``columns``. None: it is a
    stack of matrices, reduced for each of them or for all; a dim of 1 counts as reduced and as kept."""
    m, n, gone = len(space) - 2, len(space) - 1, set(axes)
    if columns is not None:
        large = {a for a, d in enumerate(space) if d > 1}
        return gone & large in (large - {columns}, large & {columns})
    batch = {a for a in range(m) if space[a] > 1}
    over, kept = ({a for a in (m, n) if space[a] == 1 or (a in gone) is reduced} for reduced in (True, False))
    return any(a in over and b in kept for a, b in ((m, n), (n, m))) and (batch <= gone or not batch & gone)


def row_by_row(space: Dims, axes: Iterable[int], rows: int) -> bool:
    """Whether rows are short enough to be walked twice, and at least ``rows`` of them run side by side; how many there are does not count where it
    differs from call to call."""
    total, row = math.prod(space), math.prod(space[a] for a in axes)
    return 0 < row <= ROW and (total // row >= rows or total <= SMALL or any(varies(d) for d in space))


def broadcasts(dim: Dims, space: Dims) -> bool:
    """Whether ``dim`` broadcasts (right-aligned) to ``space`` without being larger anywhere."""
    return len(dim) <= len(space) and all(d in (1, s) for d, s in zip(reversed(dim), reversed(space), strict=False))
