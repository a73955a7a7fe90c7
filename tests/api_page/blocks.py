"""Part 2.1: block scaling and grouped matmuls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphdnn import data_type, tensor_reordering
from graphdnn import moe_grouped_matmul_mode as mode
from graphdnn.errors import KindError
from tests.api_page.row import Row, fails, here, names, ours, same, shapes, t

D = data_type


def quantized(*dim: int, block: int = 16, tiled: bool = False, **more: Any) -> Callable[[Any], Any]:
    """Y in FP8_E4M3, scales in FP8_E8M0."""

    def declare(g: Any) -> Any:
        y, scale = g.block_scale_quantize(t(g, *dim, name="x"), block, name="q", **more)
        y.set_data_type(D.FP8_E4M3)
        scale.set_data_type(D.FP8_E8M0)
        if tiled:
            scale.set_reordering_type(tensor_reordering.F8_128x4)
        return [y, scale]

    return declare


def dequantized(scale: tuple[int, ...], block: Any, output: bool = False) -> Callable[[Any], Any]:
    """Y of (2, 32)."""

    def declare(g: Any) -> Any:
        x, s = t(g, 2, 32, name="x", data_type=D.FP8_E4M3), t(g, *scale, name="scale", data_type=D.FP8_E8M0)
        return g.block_scale_dequantize(x, s, block, name="d").set_output(output)

    return declare


def grouped(**more: Any) -> Callable[[Any], Any]:
    """Six tokens of 5, four experts of (5, 3)."""

    def declare(g: Any) -> Any:
        weight = t(g, 4, 5, 3, stride=(15, 1, 5), name="weight")
        offsets = t(g, 4, 1, 1, data_type=D.INT32, name="offsets")
        index = {n: t(g, 1, v, 1, data_type=D.INT32, name=n) for n, v in more.items() if n.startswith("token_")}
        return g.moe_grouped_matmul(t(g, 1, 6, 5, name="token"), weight, offsets, **(more | index), name="m")

    return declare


def gradient(g: Any) -> Any:
    """Of the weights."""
    return g.moe_grouped_matmul_bwd(t(g, 1, 6, 3), t(g, 1, 6, 5), t(g, 4, 1, 1, data_type=D.INT32), name="m")


ROWS: tuple[Row, ...] = (
    same("2.1", "block_scale_quantize", "Y like X, one scale a block", shapes(quantized(2, 64), ((2, 64), (64, 1)), ((2, 4), (4, 1)))),
    same(
        "2.1",
        "block_scale_quantize",
        "transposed: the axis fastest",
        shapes(quantized(2, 8, 32, block=4, axis=1, transpose=True), ((2, 8, 32), (256, 1, 8)), ((2, 2, 32), (64, 1, 2))),
    ),
    same(
        "2.1",
        "block_scale_quantize",
        "F8_128x4: scales padded",
        shapes(quantized(2, 96, block=32, tiled=True), ((2, 96), (96, 1)), ((128, 4), (4, 1))),
    ),
    ours(
        "2.1",
        "block_scale_quantize",
        "a block size that does not divide (70 by 32)",
        "accepted, 2 blocks",
        fails(quantized(2, 70, block=32), "'q'", "'x'", "32", "70"),
    ),
    same(
        "2.1", "block_scale_quantize", "no block size", fails(lambda g: g.block_scale_quantize(t(g, 2, 32)), "block_size", error=TypeError, at="call")
    ),
    same("2.1", "block_scale_dequantize", "Y like X", shapes(dequantized((2, 2), [1, 16]), ((2, 32), (32, 1)))),
    same(
        "2.1",
        "block_scale_dequantize",
        "no block size",
        fails(lambda g: g.block_scale_dequantize(t(g, 2, 32), t(g, 2, 2), None), "block_size", error=KindError, at="call"),
    ),
    here(
        "2.1",
        "block_scale_dequantize",
        "a result that is not virtual",
        "`RuntimeError`",
        "is stored",
        shapes(dequantized((2, 2), [1, 16], True), ((2, 32), (32, 1))),
    ),
    ours("2.1", "block_scale_dequantize", "scales of other dims", "accepted", fails(dequantized((2, 3), [1, 16]), "'d'", "'scale'")),
    same("1.6", "moe_grouped_matmul", "Output", names(grouped(), "m::Output")),
    same("1.6", "moe_grouped_matmul_bwd", "DWeight", names(gradient, "m::DWeight")),
    same("2.1", "moe_grouped_matmul", "[1, M, N], row-major", shapes(grouped(), ((1, 6, 3), (18, 3, 1)))),
    same(
        "2.1", "moe_grouped_matmul", "as many rows as the index", shapes(grouped(mode=mode.GATHER, token_index=8, top_k=2), ((1, 8, 3), (24, 3, 1)))
    ),
    same("2.1", "moe_grouped_matmul", "a mode without its index", fails(grouped(mode=mode.GATHER), "'m'", "index")),
    same("2.1", "moe_grouped_matmul_bwd", "[E, K, N], K contiguous", shapes(gradient, ((4, 5, 3), (15, 1, 5)))),
)
