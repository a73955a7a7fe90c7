"""Part 2.1: block scaling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphdnn import data_type, tensor_reordering
from graphdnn.errors import KindError
from tests.api_page.row import Row, fails, here, ours, same, shapes, t

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
)
