"""A grouped matmul taken apart: the loops and tapes of its product, and what its lists of offsets and rows say.

The product is C[dest(m), n] = sum over k of A[src(m), k] * B[expert, k, n] for the sorted rows m of an expert, or, for the gradient of the weights,
C[expert, m, n] = sum over the expert's rows k of A[k, m] * B[k, n]. ``src``, ``dest`` and ``expert`` are variables that a kernel reads from memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphdnn.codegen.body import Signature
from graphdnn.codegen.contraction import Read
from graphdnn.codegen.spec import Buffer, Listing, Places, Starts
from graphdnn.dtypes import info
from graphdnn.engines.matmul_parts import Loops, MatmulParts, epilogue_tape, operand
from graphdnn.ir.index import ZERO, Var, var
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.passes.regions import Region


@dataclass(frozen=True)
class Row:
    """How a row number follows from a sorted row: ``index`` * ``factor`` + ``extra``, entries of tensors; at most ``limit`` - 1. ``name``: of the
    variable that holds it."""

    name: str
    index: int
    factor: int
    extra: int | None
    limit: int


@dataclass(frozen=True)
class GroupedParts:
    """``product``: the matmul. ``backward``: the sum runs over the rows of a group. ``starts``: tensor of the offsets. ``experts``, ``rows``: how
    many there are. ``source`` / ``target``: rows of A and of the result where they are not the sorted rows. ``expert``: the variable."""

    product: MatmulParts
    backward: bool
    starts: int
    experts: int
    rows: int
    expert: Var
    source: Row | None = None
    target: Row | None = None


def stride_of(graph: OperationGraph, tensor: int) -> int:
    """Elements from one entry of a list to the next."""
    t = graph.tensors[tensor]
    return next((s for d, s in zip(t.dim, t.stride, strict=True) if d != 1), 1)


def listing(parts: GroupedParts, tensor: int) -> Listing:
    """A list as it lies in memory."""
    signature = parts.product.signature
    t = signature.graph.tensors[tensor]
    return Listing(signature.memory_of(tensor), t.dtype, t.size, stride_of(signature.graph, tensor), t.name)


def checks(parts: GroupedParts) -> tuple[Starts | Places, ...]:
    """What offsets and indices must be. Two sorted rows with one row of the result are refused: it would hold whichever came last."""

    def places(row: Row, distinct: bool) -> Places:
        return Places(listing(parts, row.index), row.factor, None if row.extra is None else listing(parts, row.extra), row.limit, distinct)

    rows = ((parts.source, False), (parts.target, True))
    return Starts(listing(parts, parts.starts), parts.rows), *(places(r, distinct) for r, distinct in rows if r)


def take_apart(graph: OperationGraph, region: Region, memory: Mapping[int, Buffer]) -> GroupedParts:
    """The parts of a region that a grouped matmul anchors. Raises TapeTooLong."""
    node = graph.nodes[region.anchors[0]]
    ports, out = dict(node.inputs), graph.tensors[node.output_ids[0]].dim
    calc, starts, token = info(node.compute).register, ports["FirstTokenOffset"], ports["Token"]
    experts = graph.tensors[starts].size
    expert, n = Var("expert", max(experts, 1)), Var("n", out[2])
    source = target = None
    backward = "DOutput" in ports
    if backward:
        rows = graph.tensors[token].dim[1]
        m, k, batch = Var("m", out[1]), Var("k", rows), [expert]
        a, b = Read(token, (ZERO, var(k), var(m))), Read(ports["DOutput"], (ZERO, var(k), var(n)))
        index, by = (var(expert), var(m), var(n)), m
    else:
        rows, mode = out[1], node.attr("mode")
        m, k, batch = Var("m", rows), Var("k", graph.tensors[token].dim[2]), []
        if mode == "GATHER":
            source = Row("src", ports["TokenIndex"], 1, None, graph.tensors[token].dim[1])
        if mode == "SCATTER":
            extra = ports.get("TokenKs")
            target = Row("dest", ports["TokenIndex"], 1 if extra is None else node.attr("top_k"), extra, rows)
        by, to = (Var(r.name, r.limit) if r else m for r in (source, target))
        a, b = Read(token, (ZERO, var(by), var(k))), Read(ports["Weight"], (var(expert), var(k), var(n)))
        index = (ZERO, var(to), var(n))
    left, right = operand(graph, region, a, calc, "a"), operand(graph, region, b, calc, "b")
    last = epilogue_tape(graph, region, [], index)
    product = MatmulParts(Signature(graph, memory), node, batch, m, n, k, left, right, last, [], calc, Loops((by,), (k,), left, right, last), [])
    return GroupedParts(product, backward, starts, experts, rows, expert, source, target)
