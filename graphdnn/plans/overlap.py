"""Whether two strided tensors share memory, and which tensors of a plan may."""

from __future__ import annotations

from typing import Any

from graphdnn.dtypes import info
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.ir.tensor import Dims, Tensor
from graphdnn.passes.regions import Partition

_MAX_WORK: Any = 100_000
"""Steps that NumPy may take to decide whether two strided tensors meet."""


def disjoint(a: Tensor, p: int, b: Tensor, q: int) -> bool:
    """Whether two strided tensors whose byte ranges meet share no byte (columns of one matrix, heads of one packed buffer)."""
    import numpy as np

    if min(info(a.dtype).bits, info(b.dtype).bits) < 8:
        return False
    views = [np.asarray(_View(t, at)) for t, at in ((a, p), (b, q))]
    try:
        return not np.shares_memory(views[0], views[1], max_work=_MAX_WORK)
    except np.exceptions.TooHardError:
        return False


class _View:
    """Describes a tensor at an address to NumPy, which only compares addresses: the memory may be a GPU's."""

    def __init__(self, tensor: Tensor, pointer: int) -> None:
        size = info(tensor.dtype).bits // 8
        strides = tuple(s * size for s in tensor.strides)
        self.__array_interface__ = {"version": 3, "typestr": f"|V{size}", "shape": tensor.dim, "strides": strides, "data": (pointer, False)}


def elementwise_space(graph: OperationGraph, partition: Partition) -> Dims | None:
    """The loop dims of a plan that touches element i of its full-size tensors only in step i: one kernel, pointwise ops alone, no movement."""
    if len(partition.regions) != 1:
        return None
    region = partition.regions[0]
    return region.space if region.kind == "pointwise" and all(graph.nodes[n].op == "POINTWISE" for n in region.nodes) else None


def inplace_pairs(graph: OperationGraph, partition: Partition) -> frozenset[tuple[int, int]]:
    """(output, input) ids that may share memory in any plan of these regions: running statistics, residual streams.

    All that reads such an input is pointwise ops of its own dims that end in the output alone, so that element i of the input is of no use after
    element i of the output is stored. Nothing else reads the output, which could calculate it again. Tiled kernels keep their operands apart."""
    found = set()
    for region in partition.regions:
        for out in region.stores:
            if region.kind not in ("matmul", "grouped") and out in graph.outputs and out not in graph.consumers:
                found |= {(out, i) for i in _ends_in(graph, out) if i not in graph.producer and graph.tensors[i].dim == graph.tensors[out].dim}
    return frozenset(found)


def _ends_in(graph: OperationGraph, out: int) -> set[int]:
    """Tensors whose every use ends in ``out``, through pointwise ops of its dims."""
    inside = {out}

    def leads_there(n: int) -> bool:
        node = graph.nodes[n]
        return node.op == "POINTWISE" and node.output_ids[0] in inside and graph.tensors[node.output_ids[0]].dim == graph.tensors[out].dim

    for n in range(len(graph.nodes) - 1, -1, -1):
        if leads_there(n):
            inside |= {t for t in graph.nodes[n].input_ids if t not in graph.outputs and all(leads_there(u) for u in graph.consumers[t])}
    return inside - {out}
