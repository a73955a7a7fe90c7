"""Rows of normalization, statistics and softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from graphdnn import data_type, norm_forward_phase
from tests.api_table.row import FLOATS, Case, Form, Row, Types, each
from tests.helpers import Data

D = data_type
TRAINING, INFERENCE = norm_forward_phase.TRAINING, norm_forward_phase.INFERENCE
DIM, CHANNELS, SAMPLES, GROUPS = (2, 6, 3, 4), (1, 6, 1, 1), (2, 6, 1, 1), (2, 3, 1, 1)
ROW, LINE = (1, 1, 3, 4), (2, 6, 1, 1)
"""Dims of a layernorm's scale over the last two axes, and of its statistics."""
TYPES = (
    *each(*FLOATS),
    Types(D.DOUBLE, parameters=D.DOUBLE, compute=D.DOUBLE),
    Types(D.HALF, parameters=D.HALF),
    Types(D.BFLOAT16, parameters=D.BFLOAT16),
    Types(D.HALF, out=D.FP8_E4M3),
    Types(D.BFLOAT16, out=D.FP8_E5M2),
    Types(D.FP8_E4M3, out=D.HALF),
    Types(D.FLOAT, out=D.BFLOAT16),
)
POSITIVE = Data("uniform", 0.5, 1.5)
STATISTICS = frozenset((1, 2, 3, 4))


def x(c: Case, name: str = "x") -> Any:
    """The input, channels last."""
    return c.t(name, DIM, layout="channels_last")


def more(c: Case, name: str) -> Form:
    """What every method takes."""
    return {"compute_data_type": c.types.compute, "name": name}


def epsilon(c: Case) -> Any:
    """A by-value tensor."""
    return c.by_value("epsilon", 1e-3)


def forward(method: str, dim: tuple[int, ...], *, optional_bias: bool = False, **own: Any) -> Callable[[Case], Iterator[tuple[str, Form]]]:
    """Both phases; epsilon as a tensor and as a number; with and without the bias where it is optional."""

    def forms(c: Case) -> Iterator[tuple[str, Form]]:
        tensors = {"input": x(c), "scale": c.p("scale", dim), "bias": c.p("bias", dim)}
        yield method, {"norm_forward_phase": TRAINING, **tensors, "epsilon": epsilon(c), **own, **more(c, "node")}
        yield method, {"norm_forward_phase": INFERENCE, **tensors, "epsilon": 1e-3, **own}
        if optional_bias:
            tensors.pop("bias")
            yield method, {"norm_forward_phase": TRAINING, **tensors, "epsilon": 1e-3, **own}
            yield method, {"norm_forward_phase": INFERENCE, **tensors, "bias": None, "epsilon": epsilon(c), **own}

    return forms


def backward(method: str, dim: tuple[int, ...], statistics: tuple[int, ...], **own: Any) -> Callable[[Case], Iterator[tuple[str, Form]]]:
    """All arguments; those that are required."""

    def forms(c: Case) -> Iterator[tuple[str, Form]]:
        inverse = c.p("inverse", statistics, data=POSITIVE)
        tensors = {"grad": x(c, "dy"), "input": x(c), "scale": c.p("scale", dim), "mean": c.p("mean", statistics), "inv_variance": inverse}
        yield method, {**tensors, **own, **more(c, "node")}
        yield method, tensors
        if method == "instancenorm_backward":
            tensors.pop("mean")
            yield method, tensors

    return forms


def rmsnorm_backward(c: Case) -> Iterator[tuple[str, Form]]:
    """With and without the gradient of a bias."""
    tensors = {"grad": x(c, "dy"), "input": x(c), "scale": c.p("scale", ROW), "inv_variance": c.p("inverse", LINE, data=POSITIVE)}
    yield "rmsnorm_backward", {**tensors, "has_dbias": True, **more(c, "node")}
    yield "rmsnorm_backward", {**tensors, "has_dbias": False}


def batchnorm(c: Case) -> Iterator[tuple[str, Form]]:
    """With running statistics and without."""
    tensors = {"input": x(c), "scale": c.p("scale", CHANNELS), "bias": c.p("bias", CHANNELS)}
    running = {"in_running_mean": c.p("mean", CHANNELS), "in_running_var": c.p("variance", CHANNELS, data=POSITIVE)}
    momentum = c.by_value("momentum", 0.25)
    yield "batchnorm", {**tensors, **running, "epsilon": epsilon(c), "momentum": momentum, "peer_stats": [], **more(c, "node")}
    yield "batchnorm", {**tensors, **running, "epsilon": 1e-3, "momentum": 0.125}
    yield "batchnorm", {**tensors, "in_running_mean": None, "in_running_var": None, "epsilon": 1e-3, "momentum": None}


def batchnorm_inference(c: Case) -> Iterator[tuple[str, Form]]:
    """All arguments; those that are required."""
    given = {"scale": c.p("scale", CHANNELS), "bias": c.p("bias", CHANNELS)}
    tensors = {"input": x(c), "mean": c.p("mean", CHANNELS), "inv_variance": c.p("inverse", CHANNELS, data=POSITIVE), **given}
    yield "batchnorm_inference", {**tensors, **more(c, "node")}
    yield "batchnorm_inference", tensors


def genstats(c: Case) -> Iterator[tuple[str, Form]]:
    """All arguments; those that are required."""
    yield "genstats", {"input": x(c), **more(c, "node")}
    yield "genstats", {"input": c.t("row", DIM)}


def bn_finalize(c: Case) -> Iterator[tuple[str, Form]]:
    """With running statistics and without, numbers as tensors and as numbers."""
    sums = {"sum": c.p("sum", CHANNELS), "sq_sum": c.p("squares", CHANNELS, data=Data("uniform", 40, 80))}
    tensors = {**sums, "scale": c.p("scale", CHANNELS), "bias": c.p("bias", CHANNELS)}
    running = {"in_running_mean": c.p("mean", CHANNELS), "in_running_var": c.p("variance", CHANNELS, data=POSITIVE)}
    momentum, count = c.by_value("momentum", 0.25), c.by_value("count", 24.0)
    yield "bn_finalize", {**tensors, "epsilon": epsilon(c), "accum_count": count, **running, "momentum": momentum, **more(c, "node")}
    yield "bn_finalize", {**tensors, "epsilon": 1e-3, "accum_count": 24, **running, "momentum": 0.125}
    yield "bn_finalize", {**tensors, "epsilon": 1e-3, "accum_count": 24}


def dbn_weight(c: Case) -> Iterator[tuple[str, Form]]:
    """All arguments; those that are required."""
    statistics = {"mean": c.p("mean", CHANNELS), "inv_variance": c.p("inverse", CHANNELS, data=POSITIVE)}
    tensors = {"grad": x(c, "dy"), "input": x(c), **statistics, "scale": c.p("scale", CHANNELS)}
    yield "dbn_weight", {**tensors, **more(c, "node")}
    yield "dbn_weight", tensors


def softmax(c: Case) -> Iterator[tuple[str, Form]]:
    """Over the last axis and over another."""
    for method in ("softmax", "log_softmax", "logsumexp"):
        keep = {"keepdim": True} if method == "logsumexp" else {}
        yield method, {"input": x(c), "axis": -1, **keep, **more(c, f"{method} node")}
        yield method, {"input": x(c), "axis": 1}


def softmax_backward(c: Case) -> Iterator[tuple[str, Form]]:
    """From given outputs, positive ones of softmax and negative ones of log_softmax; of logsumexp with the axis and without."""
    given = {"softmax": c.t("y", DIM, data=Data("uniform", 0, 1)), "log_softmax": c.t("log y", DIM, data=Data("uniform", -3, 0))}
    for method, y in given.items():
        yield f"{method}_backward", {"grad": x(c, "dy"), "output": y, "axis": 1, **more(c, f"{method} node")}
        yield f"{method}_backward", {"grad": x(c, "dy"), "output": y, "axis": -1}
    for name, dim, own in (("kept", (2, 6, 3, 1), more(c, "lse node")), ("dropped", (2, 6, 3), {})):
        sums = {"grad": c.p(f"dy {name}", dim), "output": c.p(f"lse {name}", dim, data=Data("uniform", 1, 3))}
        yield "logsumexp_backward", {**sums, "input": x(c), "axis": 3, **own}


def wide(method: str, i: int) -> bool:
    """Statistics and gradients of parameters."""
    return i in STATISTICS


def finish(c: Case, method: str, form: Form, results: list[Any]) -> None:
    """Gradients of a layernorm's or rmsnorm's parameters have the dims of the scale; where no arguments are given, the inferred ones."""
    if method in ("layernorm_backward", "rmsnorm_backward") and "name" in form:
        for t in results[1:]:
            if t is not None:
                t.set_dim(form["scale"].get_dim())


def _row(name: str, forms: Callable[[Case], Iterator[tuple[str, Form]]], **fields: Any) -> Row:
    return Row(name, forms, TYPES, finish, **({"wide": wide} | fields))


ROWS = (
    _row("layernorm", forward("layernorm", ROW)),
    _row("layernorm_backward", backward("layernorm_backward", ROW, LINE)),
    _row("rmsnorm", forward("rmsnorm", ROW, optional_bias=True)),
    _row("rmsnorm_backward", rmsnorm_backward),
    _row("adalayernorm", forward("adalayernorm", (2, 1, 1, 4), optional_bias=True)),
    _row("adalayernorm_backward", backward("adalayernorm_backward", (2, 1, 1, 4), (2, 6, 3, 1))),
    _row("instancenorm", forward("instancenorm", CHANNELS)),
    _row("instancenorm_backward", backward("instancenorm_backward", CHANNELS, SAMPLES)),
    _row("groupnorm", forward("groupnorm", CHANNELS, num_groups=3)),
    _row("groupnorm_backward", backward("groupnorm_backward", CHANNELS, GROUPS)),
    _row("batchnorm", batchnorm),
    _row("batchnorm_backward", backward("batchnorm_backward", CHANNELS, CHANNELS, peer_stats=[])),
    _row("batchnorm_inference", batchnorm_inference),
    _row("genstats", genstats, wide=lambda method, i: True),
    _row("bn_finalize", bn_finalize, wide=lambda method, i: True),
    _row("dbn_weight", dbn_weight, wide=lambda method, i: True),
    _row("softmax, log_softmax, logsumexp", softmax),
    _row("softmax_backward, log_softmax_backward, logsumexp_backward", softmax_backward),
)
