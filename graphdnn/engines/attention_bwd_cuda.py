"""Lowering of attention's backward pass for CUDA cores: tiles of scores in shared memory, sums in registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphdnn.engines.attention_bwd_parts import GRADIENTS, SIDES, BackwardText, Kind
from graphdnn.engines.base import Knobs, ceil_div

STATIC_SHARED = 48 * 1024
PAD = 4
"""Elements between the lines of the staging buffer, against bank conflicts."""


@dataclass(frozen=True)
class AttentionBwdCuda(Knobs):
    """A block of ``side`` x ``side`` threads walks tiles of ``rows`` x ``columns`` scores, heads in steps of ``depth``, and sums ``chunk`` elements
    of a head. Tiles of dBias have half as many rows: their sums need a tile of their own."""

    rows: int
    columns: int
    chunk: int
    depth: int = 16
    side: int = 16

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.side * self.side


@dataclass(frozen=True)
class CudaForm:
    """How one kernel is cut: extents of a tile of scores, and of the part of a head that is summed."""

    still: int
    moving: int
    chunk: int
    depth: int
    side: int
    kind: Kind

    @property
    def line(self) -> int:
        """Elements of a line of the staging buffer: both sides of a product."""
        return self.still + self.moving + PAD

    @property
    def stage(self) -> int:
        """Elements of the staging buffer."""
        return self.depth * max(self.line, self.chunk if self.kind != "bias" else 0)

    def shared_bytes(self, item: int) -> int:
        """Static shared memory."""
        tiles = 3 if self.kind == "bias" else 2
        return (self.stage + tiles * self.moving * (self.still + 1)) * item

    def parts(self, size: int) -> int:
        """Parts of a head that are summed by blocks of their own."""
        return max(1, ceil_div(size, self.chunk))

    def even(self) -> bool:
        """Whether every loop of a block's threads comes out even."""
        threads = self.side * self.side
        loads = (self.still * self.depth, self.moving * self.depth, self.depth * self.chunk)
        spread = (self.still, self.moving, self.chunk)
        return not any(n % threads for n in loads) and not any(n % self.side for n in spread) and self.moving % self.depth == 0


def form(kind: Kind, knobs: AttentionBwdCuda) -> CudaForm:
    """The cut of a kernel."""
    still, moving = (knobs.rows, knobs.columns) if kind == "q" else (knobs.columns, knobs.rows)
    moving = max(moving // 2, knobs.depth) if kind == "bias" else moving
    return CudaForm(still, moving, knobs.chunk, knobs.depth, knobs.side, kind)


def fields(text: BackwardText, kind: Kind, ports: Sequence[str], cut: CudaForm) -> dict[str, Any]:
    """What the template needs of tiles and products; ``ports``: the results of this kernel."""
    i, products = text.itype, []
    sides: dict[str, dict[str, Any]] = {}
    for (still, moving), tile in zip(SIDES[kind], ("left_tile", "right_tile"), strict=True):
        sides |= {still: text.side(still, text.still), moving: text.side(moving, text.moving)}
        products.append({"tile": tile, "still_side": sides[still], "moving_side": sides[moving]})
    gradients = [{"sum": f"sum_{p.lower()}", "tile": GRADIENTS[p].tile, "moving_side": sides[GRADIENTS[p].moving]} for p in ports]
    fast, slow, count = ("wl", "sl", cut.moving) if kind == "q" else ("sl", "wl", cut.still)
    return {
        "tile_s": cut.still,
        "tile_w": cut.moving,
        "depth": cut.depth,
        "chunk": cut.chunk,
        "across": cut.side,
        "threads": cut.side * cut.side,
        "ts": cut.still // cut.side,
        "tw": cut.moving // cut.side,
        "gs": cut.still // cut.side,
        "gc": cut.chunk // cut.side,
        "ld_stage": cut.line,
        "stage": cut.stage,
        "itype": i,
        "calc": text.calc,
        "s": text.still,
        "w": text.moving,
        "products": products,
        "gradients": gradients,
        "masked": text.masked,
        "peaks": kind == "q" and text.problem.has("dS_max"),
        "shared_sum": kind == "bias",
        "element": [f"{fast} = {i}(t % {i}({count}))", f"{slow} = {i}(t // {i}({count}))"],
    }


def store(text: BackwardText, port: str, cut: CudaForm, head: str) -> list[str]:
    """Lines that write what a block has summed of one result."""
    i, s = text.itype, text.still
    each = cut.chunk // cut.side
    base, row, line = text.result(port, f"sum_{port.lower()}[i * {each} + jj]", head)
    size = text.problem.tensor(port).dim[3]
    return [
        *base,
        f"for i in range({cut.still // cut.side}):",
        f"    {s} = {i}(begin + {i}({i}(ty * {i}({cut.still // cut.side})) + {i}(i)))",
        f"    if {s} < {text.store_limit(port)}:",
        *(f"        {x}" for x in row),
        f"        for jj in range({each}):",
        f"            d = {i}(c0 + {i}({i}(tx * {i}({each})) + {i}(jj)))",
        f"            if d < {i}({size}):",
        f"                {line}",
    ]


def store_peak(text: BackwardText, cut: CudaForm) -> list[str]:
    """Lines that write the largest |dS| of a block's rows."""
    i = text.itype
    base, lines = text.peak("peak")
    test = f"if thread < {i}({cut.still}) and part == {i}(0) and row < {text.store_limit('dS_max')}:"
    return [*base, f"row = {i}(begin + thread)", test, *(f"    {x}" for x in lines)]


def store_bias(text: BackwardText, cut: CudaForm, rows: int, columns: int) -> list[str]:
    """Lines that write a tile of dBias, ``rows`` x ``columns`` (1 where the bias is broadcast: all of the tile is added up)."""
    i, calc = text.itype, text.calc
    place = f"sum_tile[{i}({i}({i}(rl + {i}(a)) * {i}({cut.still + 1})) + {i}(cl + {i}(z)))]"
    dim, _ = text.bias_shape()
    return [
        "cuda.syncthreads()",
        "t = thread",
        f"while t < {i}({rows * columns}):",
        f"    cl = {i}(t % {i}({columns}))",
        f"    rl = {i}(t // {i}({columns}))",
        f"    row = {i}(r0 + rl)",
        f"    d = {i}(k0 + cl)",
        f"    if row < {i}({dim[2]}) and d < {i}({dim[3]}):",
        f"        total = {calc}(0)",
        f"        for a in range({cut.moving // rows}):",
        f"            for z in range({cut.still // columns}):",
        f"                total = {calc}(total + {place})",
        f"        {text.bias_line('total')}",
        f"    t = {i}(t + {i}({cut.side * cut.side}))",
    ]
