"""Views: tensors that attention reads in the memory of another, of which movement ops only renamed the elements.

Attention reads by address, so what it reads is stored. But Q, K and V are often slices of one matrix whose axes were split and swapped, and these are
in memory already, at other strides: such a copy is left out, and attention is given the strides and the address inside the other tensor.
"""

from __future__ import annotations

from dataclasses import replace

from graphdnn.codegen.access import MOVES
from graphdnn.codegen.spec import Buffer
from graphdnn.dtypes import info
from graphdnn.ir.index import Var, offset
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.ir.tensor import Dims
from graphdnn.opspecs import registry
from graphdnn.opspecs.shapes import overlaps
from graphdnn.passes.places import variables, whole
from graphdnn.passes.regions import Partition, Region


def over(graph: OperationGraph, tensor: int, source: int) -> tuple[Dims, int] | None:
    """Strides and offset, in elements, at which the memory of ``source`` holds ``tensor``; None where it does not."""
    t, s = graph.tensors[tensor], graph.tensors[source]
    at, index = tensor, whole(t.dim)
    while at != source:
        node = graph.nodes[graph.producer[at]] if at in graph.producer else None
        pieces = MOVES[node.op](node, graph, index) if node is not None and node.op in MOVES else ()
        if len(pieces) != 1 or pieces[0].guards:
            return None
        at, index = pieces[0].tensor, pieces[0].index
        if graph.tensors[at].dtype is not t.dtype:
            return None
    place = offset(index, s.strides)
    steps = {a.name: c for a, c in place.terms if isinstance(a, Var)}
    if len(steps) != len(place.terms) or s.by_value or s.ragged or t.size == 0 or info(t.dtype).bits < 8:
        return None
    return tuple(steps.get(v.name, 0) for v in variables(t.dim)), place.const


def _root(graph: OperationGraph, tensor: int) -> int:
    """What the movement ops behind ``tensor`` start from."""
    while tensor in graph.producer and graph.nodes[graph.producer[tensor]].op in MOVES:
        tensor = graph.nodes[graph.producer[tensor]].input_ids[0]
    return tensor


def _is_stored(graph: OperationGraph, tensor: int) -> bool:
    """Whether a tensor that no movement op makes is to be expected in memory: the user's, or calculated from the result of a reduction or product."""
    if tensor not in graph.producer or not graph.tensors[tensor].virtual:
        return True
    node = graph.nodes[graph.producer[tensor]]
    return node.op not in ("POINTWISE", *MOVES) or any(_is_stored(graph, t) for t in node.input_ids if t in graph.producer)


def laid_out(graph: OperationGraph) -> OperationGraph:
    """The graph with the strides of views for what attention reads. They serve as well where such a tensor is stored after all."""
    tensors = list(graph.tensors)
    for t in {t for n in graph.nodes if registry.spec(n.op).role == "attention" for t in n.input_ids}:
        root, own = _root(graph, t), graph.tensors[t]
        found = over(graph, t, root) if own.virtual and root != t and _is_stored(graph, root) else None
        if found is not None and not overlaps(own.dim, found[0]):
            start = found[1] * info(own.dtype).bits // 8
            alignment = min(graph.tensors[root].alignment, start & -start or own.alignment)
            tensors[t] = replace(own, stride=tuple(s or 1 for s in found[0]), alignment=alignment)
    return replace(graph, tensors=tuple(tensors)) if tensors != list(graph.tensors) else graph


def seen(graph: OperationGraph, partition: Partition) -> Partition:
    """The partition without copies that views make unnecessary."""
    copies = {r.stores[0]: r for r in partition.regions if _is_copy(graph, r)}
    if not copies:
        return partition
    regions = [_reading(r, copies) for r in partition.regions if r not in copies.values()]
    stored = tuple(t for t in partition.materialized if t not in copies)
    names = {graph.tensors[t].name for t in copies} - {graph.tensors[t].name for t in stored}
    notes = [n for n in partition.notes if not any(n.startswith(f"'{name}' is stored: ") for name in names)]
    return Partition(tuple(regions), stored, tuple(notes))


def _is_copy(graph: OperationGraph, region: Region) -> bool:
    if region.kind != "pointwise" or len(region.stores) != 1 or len(region.reads) != 1 or not graph.tensors[region.stores[0]].virtual:
        return False
    tensor, source = region.stores[0], region.reads[0]
    found = over(graph, tensor, source) if source == _root(graph, tensor) else None
    return found is not None and found[0] == graph.tensors[tensor].strides


def _reading(region: Region, copies: dict[int, Region]) -> Region:
    """``region`` with the sources of copies in the place of these. Only attention reads them as they are; others rename elements on their way."""
    made = [t for t in region.reads if t in copies]
    if not made:
        return region
    reads = tuple(dict.fromkeys(copies[t].reads[0] if t in copies else t for t in region.reads))
    moved = sorted({n for t in made for n in copies[t].nodes} - {*region.nodes})
    if region.kind != "attention":
        return replace(region, reads=reads, nodes=tuple(sorted((*region.nodes, *moved))))
    return replace(region, reads=reads, nodes=(*region.nodes, *moved), views=tuple((t, copies[t].reads[0]) for t in made))


def buffers(graph: OperationGraph, region: Region, memory: dict[int, Buffer]) -> dict[int, Buffer]:
    """Where the views of a region are."""
    found = {}
    for t, source in region.views:
        place = over(graph, t, source)
        assert place is not None, "a view is made where there is a place"
        base = memory[source]
        found[t] = replace(base, offset=base.offset + place[1] * info(graph.tensors[t].dtype).bits // 8)
    return found
