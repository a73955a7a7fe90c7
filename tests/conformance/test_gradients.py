"""Gradients of convolution, grouped matmul and pointwise activations, in DOUBLE on the CPU: against torch and against central differences.

Normalization and softmax: ``test_norm_gradients.py``; pooling and interpolation: ``test_resample.py``; attention: ``test_attention.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import graphdnn
from graphdnn import data_type
from graphdnn.frontend.names import convolution_mode
from graphdnn.opspecs.pointwise import POINTWISE
from tests.api_table.pointwise import GIVEN

F = torch.nn.functional
DOUBLE = data_type.DOUBLE


def run(declare: Callable[..., Any], arrays: Sequence[Any], dims: Sequence[tuple[int, ...]]) -> list[Any]:
    """Results of ``declare(g, *tensors)``, row-major, of these dims, on arrays of float64 (or int32)."""
    g = graphdnn.pygraph(io_data_type=DOUBLE, intermediate_data_type=DOUBLE, compute_data_type=DOUBLE, device="cpu")
    inputs = [g.tensor_like(a).set_is_pass_by_value(False) for a in arrays]
    made = declare(g, *inputs)
    made = list(made) if isinstance(made, list | tuple) else [made]
    for t, dim in zip(made, dims, strict=True):
        t.set_output(True).set_dim(dim).set_stride([int(np.prod(dim[i + 1 :])) for i in range(len(dim))])
    g.build([graphdnn.heur_mode.A])
    results = [np.full(dim, np.nan) for dim in dims]
    g.execute(dict(zip((*inputs, *made), (*arrays, *results), strict=True)), np.zeros(g.get_workspace_size(), np.uint8))
    return results


# ------------------------------------------------------------------------------------------------------------------------------------- convolution
CONVOLUTIONS = {
    "plain": ((2, 4, 6, 5), (6, 4, 3, 3), {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}),
    "strided, dilated, two groups": ((2, 4, 9, 8), (6, 2, 3, 2), {"padding": [2, 1], "stride": [2, 3], "dilation": [1, 2]}),
    "depthwise, 1-D": ((2, 3, 9), (6, 1, 4), {"padding": [1], "stride": [2], "dilation": [1]}),
    "3-D": ((1, 2, 4, 5, 3), (3, 2, 2, 3, 1), {"padding": [0, 1, 1], "stride": [1, 2, 1], "dilation": [2, 1, 1]}),
}


@pytest.mark.parametrize("flip", [False, True], ids=["cross-correlation", "convolution"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name, flip):
    x_dim, w_dim, lists = CONVOLUTIONS[name]
    more = lists | {"convolution_mode": convolution_mode.CONVOLUTION if flip else convolution_mode.CROSS_CORRELATION}
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal(x_dim), rng.standard_normal(w_dim)
    tx, tw = torch.tensor(x, requires_grad=True), torch.tensor(w, requires_grad=True)
    call = (F.conv1d, F.conv2d, F.conv3d)[len(x_dim) - 3]
    flipped = torch.flip(tw, list(range(2, len(w_dim)))) if flip else tw
    want = call(tx, flipped, None, lists["stride"], lists["padding"], lists["dilation"], x_dim[1] // w_dim[1])
    y_dim = tuple(want.shape)
    dy = rng.standard_normal(y_dim)
    want.backward(torch.tensor(dy))
    (y,) = run(lambda g, a, b: g.conv_fprop(a, b, **more), (x, w), [y_dim])
    (dx,) = run(lambda g, a, b: g.conv_dgrad(a, b, **more).set_dim(x_dim), (dy, w), [x_dim])
    (dw,) = run(lambda g, a, b: g.conv_wgrad(a, b, **more).set_dim(w_dim), (x, dy), [w_dim])
    for found, wanted in ((y, want.detach()), (dx, tx.grad), (dw, tw.grad)):
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-10, atol=1e-11)
    # a convolution is linear in each operand: differences along random directions are exact but for rounding
    ex, ew = rng.standard_normal(x_dim), rng.standard_normal(w_dim)
    up, down = (run(lambda g, a, b: g.conv_fprop(a, b, **more), (x + h * ex, w + h * ew), [y_dim])[0] for h in (1e-3, -1e-3))
    np.testing.assert_allclose(np.vdot(dx, ex) + np.vdot(dw, ew), np.vdot(up - down, dy) / 2e-3, rtol=1e-8)


# ------------------------------------------------------------------------------------------------------------------------------------- activations
TORCH: dict[str, Callable[..., Any]] = {
    "relu": lambda x, o: torch.where(
        x < o.get("lower_clip", 0), o.get("lower_clip", 0) + o.get("negative_slope", 0) * (x - o.get("lower_clip", 0)), x
    ).clamp(max=o.get("upper_clip", float("inf"))),
    "leaky_relu": lambda x, o: F.leaky_relu(x, o["negative_slope"]),
    "tanh": lambda x, o: torch.tanh(x),
    "sigmoid": lambda x, o: torch.sigmoid(x),
    "elu": lambda x, o: F.elu(x),
    "gelu": lambda x, o: F.gelu(x),
    "gelu_approx_tanh": lambda x, o: F.gelu(x, approximate="tanh"),
    "softplus": lambda x, o: F.softplus(x),
    "swish": lambda x, o: x * torch.sigmoid(o.get("swish_beta", 1.0) * x),
}
"""Forward method -> the same in torch."""
BACKWARD = {
    m: params
    for row in POINTWISE.values()
    for m, params in ((row.method, row.params), *((a.method, a.params) for a in row.aliases))
    if m.endswith("_backward")
}


def test_no_activation_is_left_out():
    assert set(BACKWARD) == {f"{m}_backward" for m in TORCH}


@pytest.mark.parametrize("given", [False, True], ids=["defaults", "attributes"])
@pytest.mark.parametrize("method", BACKWARD)
def test_activation(method, given):
    forward = method.removesuffix("_backward")
    options = {p.keyword: GIVEN[p.keyword] for p in BACKWARD[method] if given or p.required}
    rng = np.random.default_rng(1)
    x, dy = 2 * rng.standard_normal((8, 25)), rng.standard_normal((8, 25))
    (dx,) = run(lambda g, a, b: getattr(g, method)(a, b, **options), (dy, x), [x.shape])
    leaf = torch.tensor(x, requires_grad=True)
    want = TORCH[forward](leaf, options)
    want.backward(torch.tensor(dy))
    np.testing.assert_allclose(dx, leaf.grad.numpy(), rtol=1e-11, atol=1e-12)
    h = 1e-6
    y, up, down = (run(lambda g, a: getattr(g, forward)(a, **options), (a,), [x.shape])[0] for a in (x, x + h, x - h))
    np.testing.assert_allclose(y, want.detach().numpy(), rtol=1e-11, atol=1e-12)
    corners = [options.get("lower_clip", 0.0), options.get("upper_clip", np.inf)]
    smooth = np.all([np.abs(x - c) > 2 * h for c in corners], axis=0)
    np.testing.assert_allclose(dx[smooth], (dy * (up - down) / (2 * h))[smooth], rtol=1e-6, atol=1e-8)


# ---------------------------------------------------------------------------------------------------------------------------------- grouped matmul
def test_grouped_matmul():
    """Three experts, one of them without rows, against a loop of torch's matmuls."""
    rng, starts = np.random.default_rng(2), np.array([0, 4, 4], np.int32).reshape(3, 1, 1)
    token, weight, dy = rng.standard_normal((1, 7, 5)), rng.standard_normal((3, 5, 2)), rng.standard_normal((1, 7, 2))
    leaf = torch.tensor(weight, requires_grad=True)
    bounds = [*starts.ravel(), 7]
    want = torch.cat([torch.tensor(token[0, a:b]) @ leaf[e] for e, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False))])
    want.backward(torch.tensor(dy[0]))
    kind = {"compute_data_type": DOUBLE}
    (y,) = run(lambda g, *t: g.moe_grouped_matmul(*t, **kind), (token, weight, starts), [(1, 7, 2)])
    (dw,) = run(lambda g, *t: g.moe_grouped_matmul_bwd(*t, **kind), (dy, token, starts), [weight.shape])
    np.testing.assert_allclose(y[0], want.detach().numpy(), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(dw, leaf.grad.numpy(), rtol=1e-12, atol=1e-13)
    e = rng.standard_normal(weight.shape)
    up, down = (run(lambda g, *t: g.moe_grouped_matmul(*t, **kind), (token, weight + h * e, starts), [(1, 7, 2)])[0] for h in (1e-3, -1e-3))
    np.testing.assert_allclose(np.vdot(dw, e), np.vdot(up - down, dy) / 2e-3, rtol=1e-9)
