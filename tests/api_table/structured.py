"""Rows of matmul, convolution, reduction, data movement, pooling and interpolation."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from typing import Any

from graphdnn import data_type, reduction_mode, reshape_mode
from graphdnn.dtypes import storable
from graphdnn.frontend.names import convolution_mode
from tests.api_table.row import FLOATS, INTEGERS, NARROW, Case, Form, Row, Types, each
from tests.helpers import given

D = data_type
CONTRACTED = (
    *each(*FLOATS, *NARROW),
    Types(D.DOUBLE, compute=D.DOUBLE),
    Types(D.HALF, out=D.FLOAT),
    Types(D.FP8_E4M3, out=D.HALF, compute=D.FAST_FLOAT_FOR_FP8),
    Types(D.INT8, out=D.INT32, compute=D.INT32),
    Types(D.UINT8, out=D.INT32, compute=D.INT32),
    Types(D.INT32, compute=D.INT32),
    Types(D.INT64, compute=D.INT64),
    Types(D.INT8, out=D.FLOAT),
)
"""Types of matmul and convolution."""


# ------------------------------------------------------------------------------------------------------------------------------------------ matmul
def matmul(c: Case) -> Iterator[tuple[str, Form]]:
    """One rank, ranks that differ, a batch of one, column-major operands, extents that tensor cores take."""
    a, b = c.t("a", (2, 3, 7)), c.t("b", (2, 7, 5), layout="column")
    for form in (
        {"A": a, "B": b, "compute_data_type": c.types.compute, "padding": 0.5, "name": "mm"},
        {"A": a, "B": b},
        {"A": a, "B": c.t("matrix", (7, 5))},
        {"A": c.t("left", (3, 7), layout="column"), "B": b},
        {"A": c.t("one", (1, 3, 7)), "B": b},
        {"A": c.t("aligned left", (16, 32)), "B": c.t("aligned right", (32, 16))},
    ):
        yield "matmul", form


# ------------------------------------------------------------------------------------------------------------------------------------- convolution
IMAGE, FILTER, LOSS = (2, 4, 6, 5), (6, 2, 3, 2), (2, 6, 3, 6)
MOTION = {"stride": [2, 1], "dilation": [1, 2]}
UNEVEN = {"pre_padding": [1, 2], "post_padding": [0, 1]}
SAME = {"padding": [1, 0], "stride": [1, 1], "dilation": [1, 1]}
OPERANDS = {
    "conv_fprop": (("image", "x", IMAGE), ("weight", "w", FILTER)),
    "conv_dgrad": (("loss", "dy", LOSS), ("filter", "w", FILTER)),
    "conv_wgrad": (("image", "x", IMAGE), ("loss", "dy", LOSS)),
}
RESULTS = {"conv_fprop": LOSS, "conv_dgrad": IMAGE, "conv_wgrad": FILTER}


def convolution(method: str, c: Case) -> Iterator[tuple[str, Form]]:
    """Both forms of padding, both modes, two groups, NCHW and NHWC."""
    for form in (
        UNEVEN | MOTION | {"convolution_mode": convolution_mode.CONVOLUTION, "compute_data_type": c.types.compute, "name": "conv"},
        UNEVEN | MOTION | {"convolution_mode": convolution_mode.CROSS_CORRELATION},
        UNEVEN | MOTION,
    ):
        yield method, {a: c.t(n, d, layout="channels_last") for a, n, d in OPERANDS[method]} | form
    square = {"x": (1, 3, 5, 4), "w": (2, 3, 3, 1), "dy": (1, 2, 5, 4)}
    tensors = {a: c.t(f"{n} row", square[n]) for a, n, _ in OPERANDS[method]}
    yield method, tensors | SAME | {"convolution_mode": convolution_mode.CONVOLUTION, "compute_data_type": c.types.compute, "name": "conv"}
    yield method, tensors | SAME
    line = {"x": (2, 3, 7), "w": (3, 1, 2), "dy": (2, 3, 6)}
    yield method, {a: c.t(f"{n} line", line[n]) for a, n, _ in OPERANDS[method]} | {"padding": [0], "stride": [1], "dilation": [1]}


def conv_finish(c: Case, method: str, form: Form, results: list[Any]) -> None:
    """Dims of gradients."""
    if method != "conv_fprop":
        port = "x" if method == "conv_dgrad" else "w"
        known = next(t.name for a, t in form.items() if a in ("loss", "image"))
        kind = known.partition(" ")[2]
        dims = {"": RESULTS[method], "row": {"x": (1, 3, 5, 4), "w": (2, 3, 3, 1)}[port], "line": {"x": (2, 3, 7), "w": (3, 1, 2)}[port]}
        results[0].set_dim(dims[kind])


# --------------------------------------------------------------------------------------------------------------------------- reduction, movement
def reduction(c: Case) -> Iterator[tuple[str, Form]]:
    """Every mode; the axes by the output's dims, by name, dropped and kept."""
    x = c.t("x", (2, 3, 5), layout="column")
    modes = [m for m in reduction_mode if m is not reduction_mode.NOT_SET]
    for m in modes:
        yield "reduction", {"input": x, "mode": m, "axes": [0, -1], "keepdim": True, "compute_data_type": c.types.compute, "name": f"r{m.name}"}
    yield "reduction", {"input": x, "mode": reduction_mode.ADD}
    yield "reduction", {"input": x, "mode": reduction_mode.MAX, "axes": 1}
    yield "reduction", {"input": x, "mode": reduction_mode.AVG, "axes": (0, 1, 2)}


def reduction_finish(c: Case, method: str, form: Form, results: list[Any]) -> None:
    """The output's dims say what is reduced where no axes do."""
    if "axes" not in form:
        results[0].set_dim([1, 3, 1])


def reshape(c: Case) -> Iterator[tuple[str, Form]]:
    """Both modes, row-major and other inputs."""
    x = c.t("x", (2, 6, 5), layout="channels_last")
    yield "reshape", {"input": x, "name": "r", "reshape_mode": reshape_mode.LOGICAL}
    yield "reshape", {"input": x, "reshape_mode": reshape_mode.VIEW_ONLY}
    yield "reshape", {"input": c.t("rows", (2, 6, 5))}


def reshape_finish(c: Case, method: str, form: Form, results: list[Any]) -> None:
    """Dims, and once strides."""
    results[0].set_dim([3, 4, 5])
    if form.get("reshape_mode") is reshape_mode.LOGICAL:
        results[0].set_stride([1, 15, 3])


def transpose(c: Case) -> Iterator[tuple[str, Form]]:
    """A list, a tuple, axes from the end."""
    x = c.t("x", (2, 3, 5))
    yield "transpose", {"input": x, "permutation": [2, 0, 1], "compute_data_type": c.types.compute, "name": "t"}
    yield "transpose", {"input": x, "permutation": (0, 2, 1)}
    yield "transpose", {"input": c.t("padded", (2, 3, 5), layout="column"), "permutation": [-1, 1, 0]}


def slices(c: Case) -> Iterator[tuple[str, Form]]:
    """Open ends, negative bounds, steps, bounds past the end."""
    x = c.t("x", (2, 6, 5), layout="column")
    yield "slice", {"input": x, "slices": [slice(None), slice(-4, 6, 3), slice(1, 9)], "compute_data_type": c.types.compute, "name": "s"}
    yield "slice", {"input": x, "slices": [slice(1, None), slice(0, 6, 1), slice(2, -1)]}
    yield "slice", {"input": c.t("point", ())}


def concatenate(c: Case) -> Iterator[tuple[str, Form]]:
    """Two and three inputs, one tensor twice, an axis from the end."""
    x, y = c.t("x", (2, 3, 4), layout="column"), c.t("y", (2, 5, 4))
    yield "concatenate", {"inputs": [x, y], "axis": 1, "in_place_index": 0, "name": "c"}
    yield "concatenate", {"inputs": (x, y, x), "axis": -2}
    yield "concatenate", {"inputs": [x], "axis": 0}


# ------------------------------------------------------------------------------------------------------------------------------------- resampling
POOLED = {"window": [3, 2], "stride": [2, 1], "pre_padding": [1, 0], "post_padding": [1, 1]}
FINER = {"stride": [0.5, Fraction(2, 3)]}
SAMPLED, SPREAD, DEFAULT = (2, 3, 3, 5), (2, 3, 10, 7), (2, 3, 1, 2)
"""Dims of (2, 3, 5, 5) pooled, interpolated, and pooled with a window alone."""

PLACES = [[2, 5, 4, 3, 4], [0, 1, 2, 5, 2], [3, 0, 1, 2, 0]]
"""Places in windows of 3 x 2 that lie in the image."""


def resample(c: Case) -> Iterator[tuple[str, Form]]:
    """Every mode, with all arguments and with as few as it takes."""
    x = c.t("x", (2, 3, 5, 5), layout="channels_last")
    more = {"compute_data_type": c.types.compute, "name": "r"}
    yield "resample", {"input": x, "mode": "MAXPOOL", **POOLED, "generate_index": True, **more}
    yield "resample", {"input": x, "mode": "AVGPOOL_INCLUDE_PADDING", **POOLED, **more}
    yield "resample", {"input": x, "mode": "AVGPOOL_EXCLUDE_PADDING", **POOLED}
    yield "resample", {"input": x, "mode": "maxpool", "window": [3, 2]}
    yield "resample", {"input": x, "mode": "BILINEAR", **FINER}
    yield "resample", {"input": x, "mode": "NEAREST"}


def resample_finish(c: Case, method: str, form: Form, results: list[Any]) -> None:
    """Dims of an interpolation without a stride."""
    if "stride" not in form and "window" not in form:
        results[0].set_dim(SPREAD)


def resample_backward(c: Case) -> Iterator[tuple[str, Form]]:
    """Every mode; MAXPOOL with its index."""
    dy, wide = c.t("dy", SAMPLED, layout="channels_last"), c.t("wide", SPREAD)
    index = c.t("index", SAMPLED, D.INT32, data=given(PLACES))
    more = {"compute_data_type": c.types.compute, "name": "r"}
    yield "resample_backward", {"loss": dy, "mode": "MAXPOOL", **POOLED, "index": index, **more}
    yield "resample_backward", {"loss": dy, "mode": "AVGPOOL_INCLUDE_PADDING", **POOLED, **more}
    yield "resample_backward", {"loss": dy, "mode": "AVGPOOL_EXCLUDE_PADDING", **POOLED}
    yield "resample_backward", {"loss": c.t("small", DEFAULT), "mode": "AVGPOOL_INCLUDE_PADDING", "window": [3, 2]}
    yield "resample_backward", {"loss": wide, "mode": "BILINEAR", **FINER}
    yield "resample_backward", {"loss": wide, "mode": "NEAREST"}


def image_finish(c: Case, method: str, form: Form, results: list[Any]) -> None:
    """The image's dims."""
    results[0].set_dim((2, 3, 5, 5))


SAMPLED_TYPES = (*each(*FLOATS, *NARROW), Types(D.DOUBLE, compute=D.DOUBLE), Types(D.HALF, out=D.FLOAT), Types(D.INT32, compute=D.INT32))
REDUCED = (*each(*FLOATS, *NARROW), Types(D.DOUBLE, compute=D.DOUBLE), Types(D.BOOLEAN, out=D.INT32, compute=D.INT32))
REDUCED += (*each(*INTEGERS, out=D.INT64, compute=D.INT64), Types(D.INT8, compute=D.INT32), Types(D.HALF, out=D.FLOAT))
ROWS = (
    Row("matmul", matmul, CONTRACTED),
    *(Row(m, partial(convolution, m), CONTRACTED, conv_finish) for m in OPERANDS),
    Row("reduction", reduction, REDUCED, reduction_finish),
    Row("reshape", reshape, each(*storable()), reshape_finish),
    Row("transpose", transpose, each(*storable())),
    Row("slice", slices, each(*storable())),
    Row("concatenate", concatenate, each(*storable())),
    Row("resample", resample, SAMPLED_TYPES, resample_finish),
    Row("resample_backward", resample_backward, SAMPLED_TYPES, image_finish),
)
