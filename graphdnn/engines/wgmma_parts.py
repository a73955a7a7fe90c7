"""A matmul region as the tensor cores of Hopper want it: two inputs that the TMA unit can tile, which result dim is the column, what is reduced.

The kernel calls the result dim that it walks with 16-byte accesses its *column*; where results are contiguous along m, it computes the transpose by
exchanging the inputs, which costs nothing: wgmma takes both orders of both inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphdnn.codegen.body import lane_width
from graphdnn.codegen.dialect import index_type
from graphdnn.codegen.spec import Buffer, TensorMap
from graphdnn.codegen.tape import Load, Store
from graphdnn.dtypes import data_type, info
from graphdnn.engines.matmul_parts import MatmulParts, Operand
from graphdnn.engines.wgmma_tile import BK
from graphdnn.ir.index import Linear, Var, lane_step
from graphdnn.ir.node import Node
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.passes.places import reduced_axes
from graphdnn.passes.regions import Region
from graphdnn.status import OK, Status, reject

LIMIT = 2**31
ALIGNMENT = 16
_MAX_BATCH = 3
"""Dims that a tensor map has beside the two of the matrix."""


@dataclass(frozen=True)
class Input:
    """One input: memory at element ``start`` of ``tensor``, a matrix of ``free`` times k, in a stack.

    ``by_k``: the contiguous dim is k; else it is the free one. ``stride``: elements between lines, 0 where there is one line.
    ``batch``: the batch variables along which it moves, with their strides.
    """

    tensor: int
    dtype: data_type
    start: int
    free: Var
    k: Var
    by_k: bool
    stride: int
    batch: tuple[tuple[Var, int], ...]

    def tensor_map(self, memory: Buffer, rows: int) -> TensorMap:
        """The descriptor for boxes of ``rows`` values of the free dim; only 64 where that is the contiguous one."""
        inner, outer = (self.k, self.free) if self.by_k else (self.free, self.k)
        line = self.stride or -(-inner.size // 8) * 8  # one line: any valid stride
        dims = (inner.size, outer.size, *(v.size for v, _ in self.batch))
        strides = tuple(2 * s for s in (line, *(s for _, s in self.batch)))
        box = (BK, rows if self.by_k else BK, *(1 for _ in self.batch))
        where = Buffer(memory.kind, memory.index, memory.offset + 2 * self.start)
        return TensorMap(where, self.dtype, dims, strides, box, 128)


@dataclass(frozen=True)
class Reduced:
    """An epilogue reduction: of everything ("full"), or with a result a "row" (over the columns) or a "column". ``batch``: over the batch too."""

    kind: str
    batch: bool


@dataclass(frozen=True)
class WgmmaParts:
    """``rows`` and ``columns``: the inputs that give the result's rows and columns as the kernel sees them. ``width``: columns of one access."""

    parts: MatmulParts
    rows: Input
    columns: Input
    width: int
    reduced: tuple[Reduced, ...]


def take_apart(parts: MatmulParts, graph: OperationGraph, region: Region) -> WgmmaParts | Status:
    """The region's parts, or the reason why it has none. ``parts``: of :func:`graphdnn.engines.matmul_parts.take_apart`."""
    status = _sizes(parts, graph, region)
    if not status:
        return status
    a = _input(parts.a, parts.m, parts, graph, parts.node.input("A"))
    b = _input(parts.b, parts.n, parts, graph, parts.node.input("B"))
    for found in (a, b):
        if isinstance(found, Status):
            return found
    assert isinstance(a, Input) and isinstance(b, Input), "both inputs have been checked"
    if a.dtype is not b.dtype:
        names = " and ".join(f"'{graph.tensors[x.tensor].name}' is {x.dtype.name}" for x in (a, b))
        return reject(f"matmul_wgmma: {names}; wgmma needs both inputs of one type")
    swap = _contiguous_bytes(parts, graph, parts.m) > _contiguous_bytes(parts, graph, parts.n)
    width = lane_width(parts.epilogue, graph, parts.m if swap else parts.n, 8)
    reduced = []
    for s in parts.sums:
        kind = _reduced(graph, s.node, graph.tensors[parts.node.output_ids[0]].dim, swap)
        if isinstance(kind, Status):
            return kind
        reduced.append(kind)
    rows, columns = (b, a) if swap else (a, b)
    return WgmmaParts(parts, rows, columns, max(width, 2), tuple(reduced))


def _contiguous_bytes(parts: MatmulParts, graph: OperationGraph, column: Var) -> int:
    """Bytes that the epilogue loads and stores in order along ``column``."""
    accesses = [i for i in parts.epilogue.items if isinstance(i, (Load, Store)) and lane_step(i.offset, column, 2) == 1]
    return sum(graph.tensors[i.tensor].size * info(graph.tensors[i.tensor].dtype).bits // 8 for i in accesses)


def _sizes(parts: MatmulParts, graph: OperationGraph, region: Region) -> Status:
    where = f"node '{parts.node.label}'"
    if parts.reduced == 0:
        return reject(f"matmul_wgmma: {where} has an empty result")
    if parts.k.size == 0:
        return reject(f"matmul_wgmma: {where} has K = 0: there is nothing to multiply")
    for t in (*region.reads, *region.stores):
        if graph.tensors[t].extent >= LIMIT:
            return reject(
                f"matmul_wgmma: '{graph.tensors[t].name}' spans {graph.tensors[t].extent} elements; at most {LIMIT - 1} with 32-bit indices"
            )
    if index_type(parts.epilogue.linears(), cuda=True) != "uint32":
        return reject(f"matmul_wgmma: an index of the epilogue of {where} does not fit 31 bits, or runs backwards")
    return OK


def _input(operand: Operand, free: Var, parts: MatmulParts, graph: OperationGraph, asked: int) -> Input | Status:
    name = graph.tensors[asked].name
    items = operand.tape.items
    load = items[0] if items else None
    if len(items) != 1 or not isinstance(load, Load) or load.guards:
        why = f"matmul_wgmma: input '{name}' is calculated in front of the matmul; the TMA unit only copies. Storing it first would help"
        return reject(why, cut=asked)
    tensor = graph.tensors[load.tensor]
    if tensor.dtype is not graph.tensors[asked].dtype:
        return reject(f"matmul_wgmma: '{tensor.name}' is {tensor.dtype.name}, and converted in front of the matmul")
    if tensor.alignment < ALIGNMENT:
        return reject(f"matmul_wgmma: '{tensor.name}' is aligned to {tensor.alignment} bytes; TMA needs {ALIGNMENT} (set_alignment)")
    return _strided(load, free, parts, graph)


def _strided(load: Load, free: Var, parts: MatmulParts, graph: OperationGraph) -> Input | Status:
    tensor, offset = graph.tensors[load.tensor], load.offset
    known = {free, parts.k, *parts.batch}
    if any(a not in known for a, _ in offset.terms):
        return reject(f"matmul_wgmma: '{tensor.name}' is reshaped in a way that is no stride; TMA needs one")
    lines = _order(offset, free, parts.k)
    if lines is None:
        f, k = offset.coefficient(free), offset.coefficient(parts.k)
        found = f"matmul_wgmma: '{tensor.name}' has strides {f} and {k} (k)"
        return reject(f"{found}: one must be 1, the other a multiple of {ALIGNMENT} bytes ({ALIGNMENT // 2} elements)")
    batch = tuple((v, offset.coefficient(v)) for v in parts.batch if offset.coefficient(v))
    if any(not _good_stride(s) for _, s in batch) or offset.const * 2 % ALIGNMENT:
        what = f"batch strides {[s for _, s in batch]} and first element {offset.const}"
        return reject(f"matmul_wgmma: '{tensor.name}' has {what}: all must be multiples of {ALIGNMENT} bytes ({ALIGNMENT // 2} elements)")
    if len(batch) > _MAX_BATCH:
        return reject(f"matmul_wgmma: '{tensor.name}' has {len(batch)} batch dims that do not merge; a tensor map has {_MAX_BATCH}")
    by_k, stride = lines
    return Input(load.tensor, tensor.dtype, offset.const, free, parts.k, by_k, stride, batch)


def _order(offset: Linear, free: Var, k: Var) -> tuple[bool, int] | None:
    """(whether k is contiguous, stride of the other dim), or None if TMA can take neither order."""
    for by_k, inner, outer in ((True, k, free), (False, free, k)):
        contiguous = inner.size == 1 or offset.coefficient(inner) == 1
        stride = offset.coefficient(outer)
        if contiguous and (outer.size == 1 or _good_stride(stride)):
            return by_k, stride
    return None


def _good_stride(elements: int) -> bool:
    return elements > 0 and elements * 2 % ALIGNMENT == 0 and elements * 2 < 2**40


def _reduced(graph: OperationGraph, node: Node, dim: tuple[int, ...], swap: bool) -> Reduced | Status:
    axes = set(reduced_axes(graph, node))
    rank = len(dim)
    batch = {a for a in range(rank - 2) if dim[a] > 1}
    over = [a in axes or dim[a] == 1 for a in (rank - 2, rank - 1)]
    kept = [a not in axes or dim[a] == 1 for a in (rank - 2, rank - 1)]
    if all(over) and batch <= axes:
        return Reduced("full", True)
    whole_batch = bool(batch & axes)
    if batch <= axes or not whole_batch:
        for by, other in ((1, 0), (0, 1)):
            if over[by] and kept[other]:
                return Reduced("row" if bool(by) != swap else "column", whole_batch)
    return reject(
        f"matmul_wgmma: reduction '{node.label}' over axes {sorted(axes)} is neither of all results nor of rows or columns", cut=node.input_ids[0]
    )
