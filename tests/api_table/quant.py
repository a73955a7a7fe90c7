"""Rows of random numbers, block scaling and grouped matmul."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from graphdnn import data_type
from tests.api_table.row import FLOATS, Case, Form, Row, Types, each
from tests.helpers import given

D = data_type


def rng(c: Case) -> Iterator[tuple[str, Form]]:
    """Every distribution with its parameters and without; seed and offset as numbers, in memory, by value."""
    seed, offset = c.t("seed", (1, 1), D.INT64, data=given(12345)), c.by_value("offset", -77, dtype=D.INT64)
    more = {"compute_data_type": c.types.compute, "name": "r"}
    yield "rng", {"distribution": "BERNOULLI", "seed": seed, "offset": offset, "dim": [2, 3, 5], "probability": 0.3, **more}
    yield "rng", {"distribution": "uniform", "seed": 5, "offset": 6, "dim": (7,), "minimum": -2.0, "maximum": 3.0}
    yield "rng", {"distribution": "NORMAL", "seed": seed, "offset": 6, "mean": 1.0, "standard_deviation": 2.0}
    yield "rng", {"distribution": "NORMAL", "seed": 5, "offset": offset}


def rng_finish(c: Case, method: str, form: Form, results: list[Any]) -> None:
    """Dims on the output where the call gives none."""
    if "dim" not in form:
        results[0].set_dim([2, 4])


def quantize(c: Case) -> Iterator[tuple[str, Form]]:
    """Along the last axis and others, packed along the axis or not."""
    x = c.t("x", (2, 6, 32))
    for transpose, axis in ((True, 1), (False, -2)):
        more = {"compute_data_type": c.types.compute, "name": "q"} if transpose else {}
        yield "block_scale_quantize", {"input": x, "block_size": 3, "axis": axis, "transpose": transpose, **more}
    yield "block_scale_quantize", {"input": x, "block_size": 16}


def quantize_finish(c: Case, method: str, form: Form, results: list[Any]) -> None:
    """Scales of 8 bits."""
    results[1].set_data_type(c.types.parameters)


def dequantize(c: Case) -> Iterator[tuple[str, Form]]:
    """Blocks along the last axis and another, by one number and by a list; scales that divide."""
    x = c.t("x", (2, 6, 32))
    last, middle = c.t("descale", (2, 6, 2), c.types.parameters), c.t("descale of 1", (2, 2, 32), c.types.parameters)
    more = {"compute_data_type": c.types.compute, "name": "d"}
    yield "block_scale_dequantize", {"input": x, "descale": last, "block_size": [1, 16], "is_negative_scale": False, **more}
    yield "block_scale_dequantize", {"input": x, "descale": middle, "block_size": [3, 1], "is_negative_scale": True}
    yield "block_scale_dequantize", {"input": x, "descale": last, "block_size": 16}


SCALE = {"parameters": D.FP8_E8M0}
INTO = tuple(Types(x, out=y, **SCALE) for x in FLOATS for y in (D.FP8_E4M3, D.FP4_E2M1))
INTO += (Types(D.FLOAT, out=D.FP8_E5M2, **SCALE), Types(D.BFLOAT16, out=D.FP4_E2M1, parameters=D.FP8_E4M3), Types(D.FLOAT, out=D.INT8))
FROM = tuple(Types(x, out=y, **SCALE) for x in (D.FP8_E4M3, D.FP8_E5M2, D.FP4_E2M1) for y in (D.FLOAT, D.BFLOAT16))
FROM += (Types(D.FP4_E2M1, out=D.HALF, parameters=D.FP8_E4M3), Types(D.INT8, out=D.FLOAT))
ROWS = (
    Row("rng", rng, each(*FLOATS, D.FP8_E4M3, D.INT8, D.BOOLEAN), rng_finish),
    Row("block_scale_quantize", quantize, INTO, quantize_finish),
    Row("block_scale_dequantize", dequantize, FROM),
)
