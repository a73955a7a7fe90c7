"""What a row of the Hopper instructions is: name, kinds of its arguments, PTX form, simulator model side by side.

Rows stand in mbarrier.py, tma.py, wgmma.py, warp.py and staging.py. Unlike the rows of :mod:`graphdnn.intrinsics.forms` they have effects: on shared
memory, on barriers, on the order in which things become visible. So their models act on a simulated block (:mod:`graphdnn.intrinsics.simasync`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphdnn.intrinsics.emit import Emit, Value


@dataclass(frozen=True)
class Instruction:
    """One instruction that kernel text may call.

    ``args``: kinds. "u32", "u64": integers of that type. "literal": an integer literal; both forms get a Python int. "accumulator": a tuple of
    float32 registers; the PTX form gets a list of LLVM values. "map": a descriptor parameter; the PTX form gets its number among the parameters.
    "coordinates": a tuple of integers. "array": a thread's local array of float32. "bool". "number": a 32 or 64 bit integer or float; several of
    them are cast to one type.
    ``result``: "void", "u32", "u64", "accumulator" (the type of the accumulator argument, or as many registers as the first literal says), "number".
    ``ptx(o, *args)`` writes the instruction. ``sim(*args)``: its model.
    """

    name: str
    args: tuple[str, ...]
    result: str
    ptx: Callable[..., Any]
    sim: Callable[..., Any]


CONVERGENT = ("convergent",)
"""LLVM may not make such a call depend on more conditions than it does in the text: all threads of a warp run it together."""


def statement(o: Emit, text: str, constraints: str = "", *args: Value) -> None:
    """Inline PTX with effects and no result; it is never moved across memory accesses."""
    from llvmlite import ir

    signature = ir.FunctionType(ir.VoidType(), [a.type for a in args])
    clobbered = ",".join(filter(None, (constraints, "~{memory}")))
    o.builder.call(ir.InlineAsm(signature, text, clobbered, side_effect=True), [a.v for a in args], attrs=CONVERGENT)


def registers_through(o: Emit, text: str, registers: list[Any], constraints: str = "", *args: Value) -> list[Any]:
    """Inline PTX that reads and writes the float32 ``registers`` in place ($0, $1, ...); ``args`` come after twice as many numbers."""
    from llvmlite import ir

    count = len(registers)
    every = ",".join(filter(None, (*["=f"] * count, *map(str, range(count)), constraints, "~{memory}")))
    single = ir.FloatType()
    signature = ir.FunctionType(ir.LiteralStructType([single] * count), [*[single] * count, *(a.type for a in args)])
    out = o.builder.call(ir.InlineAsm(signature, text, every, side_effect=True), [*registers, *(a.v for a in args)], attrs=CONVERGENT)
    return [o.builder.extract_value(out, i) for i in range(count)]
