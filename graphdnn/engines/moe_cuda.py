"""Lowering of a grouped matmul for CUDA cores: the tiles of matmul_simt, which learn from the offsets whose rows they have.

Tiles along the rows are as many as the worst offsets need; those left over do nothing. Offsets and indices are clamped, so that none reads or writes
outside of its tensor, and every row belongs to one group.
"""

from __future__ import annotations

from graphdnn.codegen.body import Signature
from graphdnn.codegen.dialect import literal
from graphdnn.codegen.spec import Recipe
from graphdnn.codegen.tape import Assign, Tape
from graphdnn.dtypes import info
from graphdnn.engines import matmul_cuda
from graphdnn.engines.base import ceil_div
from graphdnn.engines.matmul_cuda import Placing, SimtTile
from graphdnn.engines.moe_parts import GroupedParts, Row, stride_of


def lower(parts: GroupedParts, tile: SimtTile, words: str, title: list[str]) -> Recipe:
    """Kernel and steps of the product."""
    p, graph = parts.product, parts.product.signature.graph
    origin = _rows_of_expert if parts.backward else _tile_of_rows
    groups = min(parts.experts + 1, parts.rows)
    tiles = ceil_div(p.m.size, tile.bm) if parts.backward else (parts.rows + groups * (tile.bm - 1)) // tile.bm
    lists = [parts.starts, *(t for r in (parts.source, parts.target) if r for t in (r.index, r.extra) if t is not None)]
    place = Placing(
        tiles,
        lambda signature, itype, at: origin(parts, tile, signature, itype, at),
        lambda signature, itype: row_lines(parts.source, signature, itype, "m"),
        lambda signature, itype: row_lines(parts.target, signature, itype, "m"),
        max(parts.rows + tile.bm, *(graph.tensors[t].size * abs(stride_of(graph, t)) for t in lists)),
    )
    return matmul_cuda.lower(p, tile, words, title, place)


def entry(signature: Signature, tensor: int, itype: str, at: str) -> str:
    """Text of entry ``at`` of a list."""
    return f"{signature.pointer(tensor)}[{itype}({at} * {itype}({stride_of(signature.graph, tensor)}))]"


def row_lines(row: Row | None, signature: Signature, itype: str, at: str) -> list[str]:
    """Sets the variable of ``row`` for the sorted row ``at``, clamped to the rows there are; nothing where there is no such variable."""
    if row is None:
        return []
    value = f"int64({entry(signature, row.index, itype, at)})"
    if row.factor != 1:
        value = f"{value} * int64({row.factor})"
    if row.extra is not None:
        value = f"{value} + int64({entry(signature, row.extra, itype, at)})"
    return [f"{row.name} = {itype}(min(max({value}, int64(0)), int64({max(row.limit - 1, 0)})))"]


def _bound(parts: GroupedParts, signature: Signature, itype: str, at: str) -> str:
    """Offset ``at``, clamped to the rows."""
    register = info(signature.graph.tensors[parts.starts].dtype).register
    return f"{itype}(min(max({entry(signature, parts.starts, itype, at)}, {register}(0)), {register}({parts.rows})))"


def _tile_of_rows(parts: GroupedParts, tile: SimtTile, signature: Signature, itype: str, at: str) -> list[str]:
    """Walks the groups, group 0 being the rows before the first offset, to the one that has tile ``at``."""
    experts = f"{itype}({parts.experts})"
    need = f"need = {itype}({itype}(x_hi - x_lo + {itype}({tile.bm - 1})) // {itype}({tile.bm}))"
    first = _bound(parts, signature, itype, f"{itype}(0)")
    return [
        f"tile_at = {at}",
        f"group = {itype}(0)",
        f"x_lo = {itype}(0)",
        f"x_hi = {first}",
        need,
        f"while tile_at >= need and group < {experts}:",
        f"    tile_at = {itype}(tile_at - need)",
        f"    group = {itype}(group + {itype}(1))",
        "    x_lo = x_hi",
        f"    x_hi = {itype}({parts.rows})",
        f"    if group < {experts}:",
        f"        x_hi = {itype}(max(x_lo, {_bound(parts, signature, itype, 'group')}))",
        f"    {need}",
        f"m0 = {itype}(x_lo + {itype}(tile_at * {itype}({tile.bm})))",
        "m_end = x_hi",
        f"expert = {itype}(group - {itype}(1)) if group > {itype}(0) else {itype}(0)",
        f"k_first = {itype}(0)",
        f"k_end = {itype}({parts.product.k.size}) if group > {itype}(0) and m0 < m_end else {itype}(0)",
    ]


def _rows_of_expert(parts: GroupedParts, tile: SimtTile, signature: Signature, itype: str, at: str) -> list[str]:
    """The sum of a tile runs over the rows of its expert."""
    expert = "expert" if parts.experts > 1 else f"{itype}(0)"
    lines = [f"m0 = {itype}({at} * {itype}({tile.bm}))", f"m_end = {itype}({parts.product.m.size})"]
    lines += [f"k_first = {_bound(parts, signature, itype, f'{itype}(0)')}", f"k_end = {itype}({parts.rows})"]
    if parts.experts > 1:
        lines += [
            f"group = {itype}(1)",
            f"while group <= {expert}:",
            f"    k_first = {itype}(max(k_first, {_bound(parts, signature, itype, 'group')}))",
            f"    group = {itype}(group + {itype}(1))",
            f"if group < {itype}({parts.experts}):",
            f"    k_end = {itype}(max(k_first, {_bound(parts, signature, itype, 'group')}))",
        ]
    return lines


def zeros(parts: GroupedParts) -> Tape:
    """What the results are where the product is 0, for every row of the result."""
    p = parts.product
    return Tape([Assign("c", p.c_text(literal(0, p.calc)), ()), *p.epilogue.items])
