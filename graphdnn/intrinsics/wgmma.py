"""Warpgroup matrix multiply (wgmma): 64 x n results per block of rows, both inputs in shared memory, sums in float32 registers of 128 threads.

An input tile has its rows (of A) or columns (of B) and 16 * steps values of k, 2 bytes each, as the TMA unit leaves them with a 128-byte swizzle:
*by k*: one 128-byte line a row; *free*: blocks of 64 rows, in each one 128-byte line a value of k.

``matrix_descriptor(address, leading, stride, swizzle)``: bytes between blocks along the free dim (free tiles), and between groups of 8 lines.
``accumulator(n)``: n registers without a value. ``wgmma_X(acc, a, b, keep, blocks, steps, a_free, b_free)``: acc = keep * acc + A B for ``blocks``
blocks of 64 rows; starts, and commits as one group. Registers and tiles belong to the tensor cores until ``wgmma_wait(acc, n)`` has returned, which
waits until at most the ``n`` youngest groups are not done. Register 4 j + 2 h + p of a block, in thread t, is row 16 (t // 32) + (t % 32) // 4 + 8 h
and column 8 j + 2 (t % 4) + p.

``registers_decrease(n)`` / ``registers_increase(n)``: registers that each thread of the warpgroup keeps from here on (setmaxnreg).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from graphdnn.intrinsics import simasync as sim
from graphdnn.intrinsics.instruction import Instruction, registers_through, statement

if TYPE_CHECKING:
    from graphdnn.intrinsics.emit import Emit, Value

LINE = 128
"""Bytes of a line of an input tile, which is also the width of the swizzle."""
_SWIZZLES = {0: 0, 128: 1, 64: 2, 32: 3}


def descriptor_bits(leading: int, stride: int, swizzle: int) -> int:
    """A matrix descriptor without its address: both distances in units of 16 bytes, and the code of the swizzle."""
    return (leading >> 4) << 16 | (stride >> 4) << 32 | _SWIZZLES[swizzle] << 62


def k_step(free: bool) -> int:
    """Bytes from one group of 16 values of k to the next."""
    return 16 * LINE if free else 32


def row_block(steps: int, free: bool) -> int:
    """Bytes from one block of 64 rows to the next."""
    return 16 * steps * LINE if free else 64 * LINE


def _descriptor(o: Emit, address: Value, leading: int, stride: int, swizzle: int) -> Value:
    low = (address & 0x3FFFF).lshr(4).to("i64", signed=False)
    bits = descriptor_bits(leading, stride, swizzle)
    return low | (bits - (1 << 64) if bits >> 63 else bits)


def _accumulator(o: Emit, count: int) -> list[Any]:
    from llvmlite import ir

    return [ir.Constant(ir.FloatType(), ir.Undefined)] * count


def _wgmma(kind: str, o: Emit, acc: list[Any], a: Value, b: Value, keep: Value, blocks: int, steps: int, a_free: int, b_free: int) -> list[Any]:
    per_block = len(acc) // blocks
    first = 2 * len(acc)  # number of operand ``a``: the registers come in and go out
    lines = [".reg .pred keep, yes;", ".reg .b64 a, b;", "wgmma.fence.sync.aligned;", f"setp.ne.b32 keep, ${first + 2}, 0;", "setp.eq.b32 yes, 0, 0;"]
    for step in range(steps):
        for block in range(blocks):
            registers = ",".join(f"${block * per_block + i}" for i in range(per_block))
            at = (step * k_step(bool(a_free)) + block * row_block(steps, bool(a_free))) >> 4
            lines.append(f"add.s64 a, ${first}, {at};")
            lines.append(f"add.s64 b, ${first + 1}, {step * k_step(bool(b_free)) >> 4};")
            shape = f"m64n{2 * per_block}k16.f32.{kind}.{kind}"
            on = "yes" if step else "keep"
            lines.append(f"wgmma.mma_async.sync.aligned.{shape} {{{registers}}}, a, b, {on}, 1, 1, {a_free}, {b_free};")
    lines.append("wgmma.commit_group.sync.aligned;")
    return registers_through(o, "{\n" + "\n".join(lines) + "\n}", acc, "l,l,r", a, b, keep)


def _wait(o: Emit, acc: list[Any], groups: int) -> list[Any]:
    return registers_through(o, f"wgmma.wait_group.sync.aligned {groups};", acc)


def _decrease(o: Emit, count: int) -> None:
    statement(o, f"setmaxnreg.dec.sync.aligned.u32 {count};")


def _increase(o: Emit, count: int) -> None:
    statement(o, f"setmaxnreg.inc.sync.aligned.u32 {count};")


_MULTIPLY = ("accumulator", "u64", "u64", "u32", "literal", "literal", "literal", "literal")
INSTRUCTIONS: tuple[Any, ...] = (
    Instruction("matrix_descriptor", ("u32", "literal", "literal", "literal"), "u64", _descriptor, sim.matrix_descriptor),
    Instruction("accumulator", ("literal",), "accumulator", _accumulator, sim.accumulator),
    Instruction("wgmma_BFLOAT16", _MULTIPLY, "accumulator", partial(_wgmma, "bf16"), partial(sim.wgmma, "BFLOAT16")),
    Instruction("wgmma_HALF", _MULTIPLY, "accumulator", partial(_wgmma, "f16"), partial(sim.wgmma, "HALF")),
    Instruction("wgmma_wait", ("accumulator", "literal"), "accumulator", _wait, sim.wgmma_wait),
    Instruction("registers_decrease", ("literal",), "void", _decrease, sim.registers_decrease),
    Instruction("registers_increase", ("literal",), "void", _increase, sim.registers_increase),
)
"""The rows of this file."""
