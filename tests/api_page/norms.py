"""Part 2.1: normalization and statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphdnn import norm_forward_phase
from graphdnn.errors import KindError, NotSupportedError
from tests.api_page.row import Row, fails, here, ours, same, shapes, t

TRAINING, INFERENCE, NOT_SET = norm_forward_phase.TRAINING, norm_forward_phase.INFERENCE, norm_forward_phase.NOT_SET
X3, X4, C4, I4 = (2, 5, 8), (4, 6, 3, 10), (1, 6, 1, 1), (4, 6, 1, 1)
ROWS3, LAST = (40, 8, 1), (40, 1, 5)
NCHW, NHWC, CHANNELS = (180, 30, 10, 1), (180, 1, 60, 6), (6, 1, 6, 6)
Declare = Callable[[Any], Any]


def forward(method: str, x: tuple[int, ...], scale: tuple[int, ...], phase: norm_forward_phase = TRAINING, bias: Any = None, **more: Any) -> Declare:
    """A forward op named n."""

    def declare(g: Any) -> Any:
        s = t(g, *scale, name="scale")
        return getattr(g, method)(phase, t(g, *x, name="x"), s, bias=t(g, *(bias or scale), name="bias"), epsilon=1e-5, name="n", **more)

    return declare


def backward(method: str, x: tuple[int, ...], scale: tuple[int, ...], statistics: tuple[int, ...], *more: Any, mean: bool = True) -> Declare:
    """A gradient named n."""

    def declare(g: Any) -> Any:
        given = [t(g, *statistics, name=n) for n in ("mean", "inverse")[not mean :]]
        return getattr(g, method)(t(g, *x, name="dy"), t(g, *x, name="x"), t(g, *scale, name="scale"), *given, *more, name="n")

    return declare


def batchnorm(running: Any = C4, momentum: Any = 0.1, scale: tuple[int, ...] = C4, **more: Any) -> Declare:
    """Batch normalization with running statistics or without."""

    def declare(g: Any) -> Any:
        given = [None if running is None else t(g, *running, name=n) for n in ("mean", "variance")]
        return g.batchnorm(t(g, *X4, name="x"), t(g, *scale, name="scale"), t(g, *C4), *given, 1e-5, momentum, name="n", **more)

    return declare


def three(dim: tuple[int, ...], stride: tuple[int, ...], *rest: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
    """DX and twice the same for its parameters."""
    return ((dim, stride), *(rest * 2))


FORWARD = (
    same(
        "2.1",
        "layernorm",
        "Y like X; statistics where scale has 1, in X's order",
        shapes(forward("layernorm", X3, (1, 1, 8)), (X3, ROWS3), ((2, 5, 1), (5, 1, 1)), ((2, 5, 1), (5, 1, 1))),
    ),
    same("2.1", "layernorm", "no statistics in INFERENCE", shapes(forward("layernorm", X3, (1, 1, 8), INFERENCE), (X3, ROWS3), None, None)),
    same("2.1", "layernorm", "phase not set", fails(forward("layernorm", X3, (1, 1, 8), NOT_SET), "'n'", "phase not set")),
    ours("2.1", "layernorm", "a scale of 7 elements for 8", "accepted", fails(forward("layernorm", X3, (1, 1, 7)), "'n'", "'scale'", r"\[1, 1, 7\]")),
    here(
        "2.1",
        "layernorm",
        "a scale of rank 1 for X of rank 3",
        "statistics of ones",
        "as [1, 1, 8]",
        shapes(forward("layernorm", X3, (8,)), (X3, ROWS3), ((2, 5, 1), (5, 1, 1)), ((2, 5, 1), (5, 1, 1))),
    ),
    ours(
        "2.1",
        "layernorm",
        "a scale of ones, which names no axis",
        "accepted",
        fails(forward("layernorm", X3, (1, 1, 1)), "'n'", "no axis is normalized"),
    ),
    ours(
        "2.1",
        "layernorm",
        "a normalized axis without elements",
        "accepted",
        fails(forward("layernorm", (2, 0), (1, 0)), "'n'", "axis 1 has no elements"),
    ),
    same("2.1", "rmsnorm", "Y, INV_VARIANCE", shapes(forward("rmsnorm", X3, (1, 1, 8)), (X3, ROWS3), ((2, 5, 1), (5, 1, 1)))),
    ours(
        "2.1", "rmsnorm", "a normalized axis without elements", "accepted", fails(forward("rmsnorm", (2, 0), (1, 0)), "'n'", "axis 1 has no elements")
    ),
    same(
        "2.1", "rmsnorm", "epsilon is required", fails(lambda g: g.rmsnorm(TRAINING, t(g, 2, 8), t(g, 1, 8)), "epsilon", error=KindError, at="call")
    ),
    same(
        "2.1",
        "adalayernorm",
        "a scale for each sample",
        shapes(forward("adalayernorm", X3, (2, 1, 8)), (X3, ROWS3), ((2, 5, 1), (5, 1, 1)), ((2, 5, 1), (5, 1, 1))),
    ),
    here(
        "2.1",
        "adalayernorm",
        "[S, B, D] with a scale [1, B, D]",
        "statistics [S, 1, 1]",
        "[S, B, 1]: normalized over D",
        shapes(forward("adalayernorm", (5, 2, 8), (1, 2, 8)), ((5, 2, 8), (16, 8, 1)), ((5, 2, 1), (2, 1, 1)), ((5, 2, 1), (2, 1, 1))),
    ),
    same(
        "2.1",
        "instancenorm",
        "Y like X, statistics [N, C, 1...] in NHWC order",
        shapes(forward("instancenorm", X4, C4), (X4, NCHW), (I4, CHANNELS), (I4, CHANNELS)),
    ),
    same("2.1", "instancenorm", "phase not set", fails(forward("instancenorm", X4, C4, NOT_SET), "'n'", "phase not set")),
    ours(
        "2.1",
        "instancenorm",
        "a scale of other channels",
        "accepted",
        fails(forward("instancenorm", X4, (1, 5, 1, 1)), "'n'", "'scale'", "each channel"),
    ),
    same("2.1", "batchnorm", "Y like X, the rest [1, C, 1...] in NHWC order", shapes(batchnorm(), (X4, NCHW), *[(C4, CHANNELS)] * 4)),
    same("2.1", "batchnorm", "no running statistics", shapes(batchnorm(None, None), (X4, NCHW), (C4, CHANNELS), (C4, CHANNELS), None, None)),
    same(
        "2.1",
        "batchnorm",
        "epsilon is required",
        fails(lambda g: g.batchnorm(t(g, *X4), t(g, *C4), t(g, *C4), None, None, None, None), "epsilon", error=KindError, at="call"),
    ),
    same("2.1", "batchnorm", "running statistics without momentum", fails(batchnorm(C4, None), "'n'", "without momentum")),
    ours("2.1", "batchnorm", "a scale of other channels", "accepted", fails(batchnorm(scale=(1, 5, 1, 1)), "'n'", "'scale'", "each channel")),
    ours(
        "2.1",
        "batchnorm",
        "peer_stats",
        "statistics of several GPUs",
        fails(
            lambda g: g.batchnorm(t(g, *X4), t(g, *C4), t(g, *C4), None, None, 1e-5, None, [t(g, *C4)]),
            "one device",
            error=NotSupportedError,
            at="call",
        ),
        "`NotSupportedError`: statistics are those of one device",
    ),
    same(
        "2.1",
        "batchnorm_inference",
        "Y like X",
        shapes(lambda g: g.batchnorm_inference(t(g, *X4, stride=NHWC), *(t(g, *C4) for _ in range(4))), (X4, NHWC)),
    ),
    ours(
        "2.1",
        "batchnorm_inference",
        "statistics of other channels",
        "accepted",
        fails(lambda g: g.batchnorm_inference(t(g, *X4), t(g, 1, 5, 1, 1), *(t(g, *C4) for _ in range(3)), name="n"), "'n'", "mean does not fit"),
    ),
    same("2.1", "genstats", "[1, C, 1...] in NHWC order", shapes(lambda g: g.genstats(t(g, *X4)), (C4, CHANNELS), (C4, CHANNELS))),
)
BACKWARD = (
    same(
        "2.1",
        "layernorm_backward",
        "DX in NHWC order, DSCALE [1, X[1:]]",
        shapes(backward("layernorm_backward", X3, (1, 1, 8), (2, 5, 1)), *three(X3, LAST, ((1, 5, 8), LAST))),
    ),
    same(
        "2.1",
        "layernorm_backward",
        "(N, C, 1, 1)",
        shapes(backward("layernorm_backward", (4, 6, 1, 1), C4, (4, 1, 1, 1)), *three((4, 6, 1, 1), CHANNELS, (C4, CHANNELS))),
    ),
    same("2.1", "layernorm_backward", "dims and strides of the user", lambda g: _kept(g)),
    here(
        "2.1",
        "layernorm_backward",
        "a scale larger than [1, X[1:]]",
        "error",
        "DSCALE like scale",
        shapes(backward("layernorm_backward", X3, X3, (1, 1, 1)), *three(X3, LAST, (X3, LAST))),
    ),
    ours(
        "2.1",
        "layernorm_backward",
        "statistics of other dims",
        "accepted",
        fails(backward("layernorm_backward", X3, (1, 1, 8), (2, 1, 1)), "'n'", "'mean'", r"\[2, 5, 1\]"),
    ),
    ours(
        "2.1",
        "layernorm_backward",
        "DSCALE that scale cannot have",
        "accepted",
        fails(lambda g: backward("layernorm_backward", X3, (1, 1, 8), (2, 5, 1))(g)[1].set_dim((1, 1, 7)), "'n'", "dscale cannot have"),
    ),
    same(
        "2.1",
        "rmsnorm_backward",
        "with DBIAS",
        shapes(backward("rmsnorm_backward", X3, (1, 1, 8), (2, 5, 1), True, mean=False), *three(X3, LAST, ((1, 5, 8), LAST))),
    ),
    same(
        "2.1",
        "rmsnorm_backward",
        "without",
        shapes(backward("rmsnorm_backward", X3, (1, 1, 8), (2, 5, 1), False, mean=False), (X3, LAST), ((1, 5, 8), LAST), None),
    ),
    same(
        "2.1",
        "rmsnorm_backward",
        "has_dbias is required",
        fails(lambda g: g.rmsnorm_backward(t(g, 2, 8), t(g, 2, 8), t(g, 1, 8), t(g, 2, 1)), "has_dbias", error=TypeError, at="call"),
    ),
    same(
        "2.1",
        "adalayernorm_backward",
        "row-major, DSCALE like scale",
        shapes(backward("adalayernorm_backward", X3, (2, 1, 8), (2, 5, 1)), *three(X3, ROWS3, ((2, 1, 8), (8, 8, 1)))),
    ),
    same(
        "2.1", "batchnorm_backward", "NHWC order, [1, C, 1...]", shapes(backward("batchnorm_backward", X4, C4, C4), *three(X4, NHWC, (C4, CHANNELS)))
    ),
    same(
        "2.1",
        "instancenorm_backward",
        "NHWC order, [1, C, 1...]",
        shapes(backward("instancenorm_backward", X4, C4, I4), *three(X4, NHWC, (C4, CHANNELS))),
    ),
    same(
        "2.1",
        "instancenorm_backward",
        "no statistics",
        fails(lambda g: g.instancenorm_backward(t(g, *X4), t(g, *X4), t(g, *C4), name="n"), "'n'", "INV_VARIANCE"),
    ),
    here(
        "2.1",
        "instancenorm_backward",
        "no mean",
        "error",
        "calculated from X",
        shapes(lambda g: g.instancenorm_backward(t(g, *X4), t(g, *X4), t(g, *C4), inv_variance=t(g, *I4)), *three(X4, NHWC, (C4, CHANNELS))),
    ),
    ours("2.1", "batchnorm_backward", "statistics of samples", "accepted", fails(backward("batchnorm_backward", X4, C4, I4), "'n'", "'mean'")),
)


def _kept(g: Any) -> None:
    made = backward("layernorm_backward", X3, (1, 1, 8), (2, 5, 1))(g)
    for y, dim, stride in zip(made, (X3, (1, 1, 8), (1, 1, 8)), (ROWS3, (8, 8, 1), (8, 8, 1)), strict=True):
        y.set_dim(dim).set_stride(stride)
    g.validate()
    assert [tuple(y.get_dim()) for y in made] == [X3, (1, 1, 8), (1, 1, 8)] and made[0].get_stride() == list(ROWS3)


ROWS: tuple[Row, ...] = (*FORWARD, *BACKWARD)
