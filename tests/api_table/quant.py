"""Rows of random numbers, block scaling and grouped matmul."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from graphdnn import data_type
from graphdnn import moe_grouped_matmul_mode as mode
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


PLACES = (3, 0, 5, 1, 4, 2)


def grouped(c: Case) -> Iterator[tuple[str, Form]]:
    """Every mode: four experts of uneven shares, one of nothing; a token that is read twice; the choices of a token."""
    token, weight = c.t("token", (1, 6, 5)), c.t("weight", (4, 5, 3), layout="column")
    offsets = c.t("offsets", (4, 1, 1), D.INT32, data=given([[[0]], [[2]], [[2]], [[3]]]))
    tensors = {"token": token, "weight": weight, "first_token_offset": offsets}

    def listed(name: str, values: Sequence[int]) -> Any:
        return c.t(name, (1, 6, 1), D.INT32, data=given([[[v] for v in values]]))

    halves, slots = listed("tokens", [p // 2 for p in PLACES]), listed("choices", [p % 2 for p in PLACES])
    more = {"compute_data_type": c.types.compute, "name": "m"}
    yield "moe_grouped_matmul", {**tensors, "token_index": halves, "token_ks": slots, "mode": mode.SCATTER, "top_k": 2, **more}
    yield "moe_grouped_matmul", {**tensors, "token_index": listed("read", (0, 2, 2, 5, 1, 0)), "mode": mode.GATHER, "top_k": 2}
    yield "moe_grouped_matmul", {**tensors, "token_index": listed("places", PLACES), "mode": mode.SCATTER}
    yield "moe_grouped_matmul", {**tensors, "mode": mode.NONE}
    yield "moe_grouped_matmul", tensors
    gradient = {"doutput": c.t("dy", (1, 6, 3)), "token": token, "first_token_offset": offsets}
    yield "moe_grouped_matmul_bwd", {**gradient, **more}
    yield "moe_grouped_matmul_bwd", gradient


SCALE = {"parameters": D.FP8_E8M0}
INTO = tuple(Types(x, out=y, **SCALE) for x in FLOATS for y in (D.FP8_E4M3, D.FP4_E2M1))
INTO += (Types(D.FLOAT, out=D.FP8_E5M2, **SCALE), Types(D.BFLOAT16, out=D.FP4_E2M1, parameters=D.FP8_E4M3), Types(D.FLOAT, out=D.INT8))
FROM = tuple(Types(x, out=y, **SCALE) for x in (D.FP8_E4M3, D.FP8_E5M2, D.FP4_E2M1) for y in (D.FLOAT, D.BFLOAT16))
FROM += (Types(D.FP4_E2M1, out=D.HALF, parameters=D.FP8_E4M3), Types(D.INT8, out=D.FLOAT))
GROUPED = (*each(*FLOATS, D.FP8_E4M3, D.FP8_E5M2), Types(D.DOUBLE, compute=D.DOUBLE), Types(D.HALF, out=D.FLOAT))
GROUPED += (Types(D.INT8, out=D.INT32, compute=D.INT32),)
ROWS = (
    Row("rng", rng, each(*FLOATS, D.FP8_E4M3, D.INT8, D.BOOLEAN), rng_finish),
    Row("block_scale_quantize", quantize, INTO, quantize_finish),
    Row("block_scale_dequantize", dequantize, FROM),
    Row("moe_grouped_matmul, moe_grouped_matmul_bwd", grouped, GROUPED),
)
