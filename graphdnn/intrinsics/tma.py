"""Tiled copies by the TMA unit: a box of a tensor, described by a tensor map, into shared memory; the bytes count on a barrier.

``tma_map(d0)``: address of a descriptor parameter. ``tma_prefetch(map)``: fetch the descriptor itself. ``tma_load(to, map, bar, (x, y, ...))``: copy
the box whose first element has these coordinates, the contiguous dim first; what lies outside the tensor arrives as zeros and counts as well.
``tma_multicast(to, map, bar, (x, y, ...), mask)``: the same into each block of the cluster whose bit is set in ``mask``, at the same addresses.
With a 128-byte swizzle ``to`` is a multiple of 1024, and 16-byte piece i of 128-byte line j lies at place i ^ (j % 8) of the line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphdnn.intrinsics import simasync as sim
from graphdnn.intrinsics.instruction import Instruction, statement

if TYPE_CHECKING:
    from graphdnn.intrinsics.emit import Emit, Value


def _map(o: Emit, index: int) -> Value:
    from llvmlite import ir

    from graphdnn.intrinsics.lower_ptx import MAP_MARK

    text = "{\n.reg .b64 t;\nmov.b64 t, " + f"{MAP_MARK}{index}" + ";\ncvta.param.u64 $0, t;\n}"
    return o.value(o.builder.call(ir.InlineAsm(ir.FunctionType(ir.IntType(64), []), text, "=l", side_effect=True), []))


def _prefetch(o: Emit, map: Value) -> None:
    statement(o, "prefetch.tensormap [$0];", "l", map)


def _load(o: Emit, to: Value, map: Value, bar: Value, at: list[Value], mask: int = 0) -> None:
    places = ", ".join(f"${3 + i}" for i in range(len(at)))
    copy = f"cp.async.bulk.tensor.{len(at)}d.shared::cluster.global.mbarrier::complete_tx::bytes"
    text = f"{copy} [$0], [$1, {{{places}}}], [$2];"
    if mask:
        text = f"{{\n.reg .b16 all;\nmov.b16 all, {mask};\n{copy}.multicast::cluster [$0], [$1, {{{places}}}], [$2], all;\n}}"
    statement(o, text, ",".join(["r", "l", "r", *["r"] * len(at)]), to, map, bar, *at)


INSTRUCTIONS: tuple[Any, ...] = (
    Instruction("tma_map", ("map",), "u64", _map, sim.tma_map),
    Instruction("tma_prefetch", ("u64",), "void", _prefetch, sim.tma_prefetch),
    Instruction("tma_load", ("u32", "u64", "u32", "coordinates"), "void", _load, sim.tma_load),
    Instruction("tma_multicast", ("u32", "u64", "u32", "coordinates", "literal"), "void", _load, sim.tma_multicast),
)
"""The rows of this file."""
