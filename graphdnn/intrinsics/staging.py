"""A warp's share of an accumulator through shared memory: 16 rows by 64 columns of float32, 4096 bytes at a multiple of 1024.

``tile_put(address, acc, s)``: the warp writes its part of columns 64 s .. 64 s + 63 (a slice: registers 32 s to 32 s + 31; ``s`` counts through
the blocks of rows). ``tile_get(x, address, row, column, n)``: x[0 .. n-1] = the staged row from ``column`` on; ``n`` is 2, 4 or 8 and divides
``column``. Between the two stands a warp_sync, and another before the next tile_put.

Padding would not fit beside four stages of 128 x 256 x 64, so the tile is swizzled: 32-byte piece j of a row lies at place j ^ (row % 8), and its two
16-byte halves are exchanged where that place is 4 or more. Then the 8-byte stores of half a warp, and the 16-byte loads of a quarter, meet every bank
once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphdnn.intrinsics import simasync as sim
from graphdnn.intrinsics.instruction import Instruction, statement

if TYPE_CHECKING:
    from graphdnn.intrinsics.emit import Emit, Value

ROWS, COLUMNS, PITCH = 16, 64, 256
"""Of a staged tile; PITCH in bytes."""
BYTES = ROWS * PITCH


def place(row: int, column: int) -> int:
    """Byte of an element in the staged tile."""
    piece = (column // 8) ^ (row % 8)
    half = (column // 4 % 2) ^ (piece // 4)
    return row * PITCH + piece * 32 + half * 16 + column % 4 * 4


def _lane(o: Emit) -> Value:
    return o.ptx("mov.u32 $0, %laneid;", "=r", "i32")


def _put(o: Emit, address: Value, acc: list[Any], s: Value) -> None:
    lane = _lane(o)
    row, quad = lane.lshr(2), lane & 3
    # place(row, 8 j + 2 quad), of which j contributes by exclusive or
    within = (row << 5) ^ (((quad.lshr(1) ^ row.lshr(2)) & 1) << 4) ^ ((quad & 1) << 3)
    base = address + (row << 8) + within
    builder = o.builder
    end = builder.append_basic_block("staged")
    choose = builder.switch(s.v, end)
    for part in range(len(acc) // 32):
        block = builder.append_basic_block(f"slice{part}")
        choose.add_case(o.const(s, part).v, block)
        builder.position_at_end(block)
        _put_slice(o, base, acc[32 * part : 32 * part + 32])
        builder.branch(end)
    builder.position_at_end(end)


def _put_slice(o: Emit, base: Value, registers: list[Any]) -> None:
    lines = [".reg .b32 at;"]
    for j in range(8):
        lines.append(f"xor.b32 at, $0, {place(0, 8 * j)};")
        lines.append(f"st.shared.v2.f32 [at], {{${4 * j + 1}, ${4 * j + 2}}};")
        lines.append(f"st.shared.v2.f32 [at + {8 * PITCH}], {{${4 * j + 3}, ${4 * j + 4}}};")
    statement(o, "{\n" + "\n".join(lines) + "\n}", ",".join(["r"] + ["f"] * 32), base, *map(o.value, registers))


def _get(o: Emit, x: Any, address: Value, row: Value, column: Value, count: int) -> None:
    from llvmlite import ir

    piece = column.lshr(3) ^ (row & 7)
    half = (column.lshr(2) ^ piece.lshr(2)) & 1
    at = address + (row << 8) + (piece << 5) + (half << 4) + ((column & 3) << 2)
    lanes = min(count, 4)
    for n in range(0, count, 4):
        pointer = o.builder.inttoptr((at ^ (n << 2)).v, ir.PointerType(ir.VectorType(ir.FloatType(), lanes), addrspace=3))
        loaded = o.builder.load(pointer, align=4 * lanes)
        for k in range(lanes):
            x.store(n + k, o.builder.extract_element(loaded, ir.Constant(ir.IntType(32), k)))


INSTRUCTIONS: tuple[Any, ...] = (
    Instruction("tile_put", ("u32", "accumulator", "u32"), "void", _put, sim.tile_put),
    Instruction("tile_get", ("array", "u32", "u32", "u32", "literal"), "void", _get, sim.tile_get),
)
"""The rows of this file."""
