"""Lowering of attention's backward pass for a CPU: tiles of scores on the thread's stack, both kinds of products in register tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphdnn.engines.attention_bwd_parts import GRADIENTS, SIDES, BackwardText, Kind
from graphdnn.engines.base import Knobs, ceil_div

ROWS = 6
"""Rows of a register tile."""
WHOLE = 1024
"""Bytes of a row that is kept whole; longer heads are walked in parts, and sums of each part are items of their own."""
PART = 512
"""Bytes of such a part."""


@dataclass(frozen=True)
class AttentionBwdCpu(Knobs):
    """Most rows and columns of a tile of scores."""

    tile: int = 96


@dataclass(frozen=True)
class CpuForm:
    """How one kernel is cut. ``lanes``: elements of a register tile's line; ``still`` and ``moving``: extents of a tile of scores; ``deep``: heads
    are walked in parts of ``part`` elements."""

    lanes: int
    still: int
    moving: int
    deep: bool
    part: int

    @property
    def chunk(self) -> int:
        """Elements of a head that one item sums."""
        return self.part if self.deep else 0

    def depth(self, size: int) -> int:
        """Elements of a head in the buffers, at most."""
        return self.part if self.deep else size

    def parts(self, size: int) -> int:
        """Parts of a head."""
        return max(1, ceil_div(size, self.part)) if self.deep else 1

    def blocks(self, size: int) -> int:
        """Lines of a register tile that cover ``size`` elements."""
        return max(1, ceil_div(size, self.lanes))

    def line(self, size: int) -> int:
        """Elements between lines of ``size`` elements: an odd number of cache lines, so that lines do not share one set of a cache."""
        return (self.blocks(size) | 1) * self.lanes


def form(still: int, moving: int, longest: int, item: int, knobs: AttentionBwdCpu) -> CpuForm:
    """The cut for sides of these extents and heads of at most ``longest`` elements of ``item`` bytes."""
    lanes = 64 // item
    tile = knobs.tile if longest * item <= PART else max(knobs.tile // 2, lanes)
    s = min(ceil_div(tile, lanes), max(ceil_div(still, lanes), 1)) * lanes
    m = min(ceil_div(tile, ROWS), max(ceil_div(moving, ROWS), 1)) * ROWS
    return CpuForm(lanes, s, m, longest * item > WHOLE, PART // item)


def fields(text: BackwardText, kind: Kind, ports: tuple[str, ...], cut: CpuForm) -> dict[str, Any]:
    """What the template needs of tiles, buffers and products; ``ports``: the results of this kernel."""
    line = cut.line(cut.still)
    arrays = [{"name": n, "size": cut.moving * line} for n in ("left_tile", "right_tile")]
    products, sides = [], {}
    for n, ((still, moving), tile) in enumerate(zip(SIDES[kind], ("left_tile", "right_tile"), strict=True)):
        ends = {}
        for port, end, index in ((still, "still_side", text.still), (moving, "moving_side", text.moving)):
            row = text.side(port, index)
            depth = cut.depth(row["size"])
            own = {"number": n, "still": f"still{n}", "moving": f"moving{n}", "depth": depth, "line": cut.line(depth), "blocks": cut.blocks(depth)}
            ends[end] = sides[port] = row | own
        depth = max(ends["still_side"]["depth"], 1)
        arrays += [{"name": f"still{n}", "size": depth * line}, {"name": f"moving{n}", "size": cut.moving * cut.line(depth)}]
        products.append(ends | {"tile": tile})
    gradients, sums = [], []
    for port in ports:
        g = GRADIENTS[port]
        sums.append({"name": f"sum_{port.lower()}", "size": cut.still * sides[g.moving]["line"]})
        gradients.append({"sum": sums[-1]["name"], "tile": g.tile, "moving_side": sides[g.moving], "again": cut.deep})
    own = {"tile_s": cut.still, "tile_w": cut.moving, "line_s": line, "blocks_s": cut.blocks(cut.still), "deep": cut.deep, "calc": text.calc}
    own |= {"s": text.still, "w": text.moving, "masked": text.masked}
    return own | {"arrays": [*arrays, *sums], "sums": sums, "products": products, "gradients": gradients}


def store(text: BackwardText, port: str, cut: CpuForm, head: str) -> dict[str, Any]:
    """How an item writes what it has summed of one result."""
    size = text.problem.tensor(port).dim[3]
    width = cut.depth(size)
    base, row, line = text.result(port, f"sum_{port.lower()}[rl * {cut.line(width)} + cl]", head)
    return {
        "base": base,
        "rows": f"min({text.store_limit(port)} - begin, {cut.still})",
        "row": [f"{text.still} = begin + rl", *row],
        "columns": f"min({size} - c0, {width})",
        "lines": ["d = c0 + cl", line],
    }


def store_peak(text: BackwardText, cut: CpuForm) -> dict[str, Any]:
    """How an item writes the largest |dS| of its rows."""
    base, lines = text.peak("peak[rl]")
    rows = f"min({text.store_limit('dS_max')} - begin, {cut.still})"
    return {"base": base, "rows": rows, "row": ["row = begin + rl"], "columns": "1 if part == 0 else 0", "lines": lines}


def store_bias(text: BackwardText, cut: CpuForm, rows: int, columns: int) -> dict[str, Any]:
    """How an item writes its tile of dBias, ``rows`` x ``columns`` (1 where the bias is broadcast: all of the tile is added up)."""
    dim, _ = text.bias_shape()
    return {
        "base": [],
        "rows": f"min({dim[2]} - r0, {rows})",
        "row": ["row = r0 + rl"],
        "columns": f"min({dim[3]} - k0, {columns})",
        "lines": [
            "d = k0 + cl",
            f"total = {text.calc}(0)",
            f"for a in range({cut.moving // rows}):",
            f"    for z in range({cut.still // columns}):",
            f"        total = {text.calc}(total + sum_tile[(rl + a) * {cut.line(cut.still)} + cl + z])",
            text.bias_line("total"),
        ],
    }
