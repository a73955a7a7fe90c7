"""Threads of a warp that meet, values passed between its lanes, and a choice without a branch.

Every thread of the warp takes part in ``warp_sync()``, which orders the warp's accesses to shared memory, ``shuffle_xor(x, mask)``, the ``x`` of lane
``lane ^ mask``, and ``shuffle_first(x)``, the ``x`` of lane 0. ``select(c, x, y)``: x if c else y, both calculated.
``hidden(x)``: x, of which LLVM knows nothing: it does not unroll a loop that counts with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphdnn.intrinsics import simasync as sim
from graphdnn.intrinsics.instruction import CONVERGENT, Instruction, statement

if TYPE_CHECKING:
    from graphdnn.intrinsics.emit import Emit, Value


def _warp_sync(o: Emit) -> None:
    statement(o, "bar.warp.sync 0xffffffff;")


def _asm(text: str) -> Any:
    """A word from a word."""
    from llvmlite import ir

    return ir.InlineAsm(ir.FunctionType(ir.IntType(32), [ir.IntType(32)]), text, "=r,r", side_effect=True)


def _shuffle(o: Emit, x: Value, mask: int) -> Value:
    bits = x.as_int() if x.real else x
    words = [bits.to("i32")] if x.bits == 32 else [bits.to("i32"), bits.lshr(32).to("i32")]
    move = _asm(f"shfl.sync.bfly.b32 $0, $1, {mask}, 0x1f, 0xffffffff;")
    moved = [o.value(o.builder.call(move, [w.v], attrs=CONVERGENT)) for w in words]
    joined = moved[0] if x.bits == 32 else moved[0].to("i64", signed=False) | (moved[1].to("i64", signed=False) << 32)
    return joined.as_float() if x.real else joined


def _select(o: Emit, condition: Value, yes: Value, no: Value) -> Value:
    return o.select(condition, yes, no)


def _hidden(o: Emit, x: Value) -> Value:
    return o.ptx("mov.b32 $0, $1;", "=r,r", "i32", x)


def _first(o: Emit, x: Value) -> Value:
    return o.value(o.builder.call(_asm("shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;"), [x.v], attrs=CONVERGENT))


INSTRUCTIONS: tuple[Any, ...] = (
    Instruction("warp_sync", (), "void", _warp_sync, sim.warp_sync),
    Instruction("shuffle_first", ("u32",), "u32", _first, sim.shuffle_first),
    Instruction("shuffle_xor", ("number", "literal"), "number", _shuffle, sim.shuffle_xor),
    Instruction("hidden", ("u32",), "u32", _hidden, sim.hidden),
    Instruction("select", ("bool", "number", "number"), "number", _select, sim.select),
)
"""The rows of this file."""
