"""Chains of int8: products summed in INT32, scales, bias and activation in FLOAT, results rounded and saturated to int8, all in one kernel."""

from __future__ import annotations

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type
from tests.helpers import Data, check_graph, given

D = data_type
F32, I8, I32 = D.FLOAT, D.INT8, D.INT32
FULL = Data("full")
REAL = {"compute_data_type": F32}


def t(g, name, dim, dtype=I8, layout="row", **more):
    return g.tensor(dim=dim, layout=layout, data_type=dtype, name=name, **more)


def done(y, name="y", dtype=I8):
    return y.set_output(True).set_name(name).set_data_type(dtype)


def one_kernel(build, device, kernels=1, **data):
    """All of a graph's inputs take every value of their type, unless said otherwise."""
    outcome = check_graph(build, device, data=dict.fromkeys(("a", "b", "x", "w", "z", "dy"), FULL) | data, runs=1)
    assert outcome.graph.explain().kernels == kernels, outcome.graph.explain()
    return outcome


def requantized(g, y, channel, residual=None):
    """y (INT32) * scale + bias, (+ residual * its scale), relu, to int8."""
    y = g.mul(y, t(g, "scale", channel, F32), **REAL)
    y = g.add(y, t(g, "bias", channel, F32), **REAL)
    if residual is not None:
        y = g.add(y, g.mul(residual, 0.5, **REAL), **REAL)
    return g.relu(y, **REAL)


SCALES = {"scale": Data("uniform", 1e-4, 1e-2), "bias": Data("normal", hi=20.0)}


@pytest.mark.parametrize("layouts", [("row", "column"), ("row", "row"), ("column", "row")])
def test_matmul(device, layouts):
    """A scale and a bias a column; half of the results saturate or are cut off."""

    def build(g):
        a, b = t(g, "a", (2, 9, 70), layout=layouts[0]), t(g, "b", (1, 70, 12), layout=layouts[1])
        y = g.matmul(a, b, compute_data_type=I32).set_data_type(I32)
        done(requantized(g, y, (1, 1, 12), t(g, "z", (2, 9, 12))))

    found = one_kernel(build, device, **SCALES).outputs["y"]
    assert found.max() == 127 and found.min() == 0


@pytest.mark.parametrize("out", [I8, D.UINT8, I32, F32, D.HALF])
@pytest.mark.parametrize("left", [I8, D.UINT8])
def test_matmul_of_signed_and_unsigned(device, left, out):
    """The sum is exact in INT32; int8 results of integers wrap."""

    def build(g):
        a, b = t(g, "a", (1, 5, 33), left), t(g, "b", (1, 33, 7))
        done(g.matmul(a, b, compute_data_type=I32), dtype=out)

    one_kernel(build, device)


@pytest.mark.parametrize("compute", [I32, F32, D.NOT_SET])
def test_compute_types_of_a_product(device, compute):
    """FLOAT is exact here too (70 products of 14 bits); not set, integers are summed in INT32."""

    def build(g):
        a, b = t(g, "a", (1, 9, 70)), t(g, "b", (1, 70, 12))
        done(g.matmul(a, b, compute_data_type=compute), dtype=I32)

    one_kernel(build, device)


def test_the_rounding_is_half_to_even_and_saturates(device):
    """y = x / 2 of every int8, scaled up at both ends; NaN becomes 0."""
    x = np.arange(-128, 128).reshape(1, 256, 1)
    scale = np.array([0.5, 1e38, np.nan]).reshape(1, 1, 3)

    def build(g):
        y = g.matmul(t(g, "a", (1, 256, 1)), t(g, "b", (1, 1, 1)), compute_data_type=I32).set_data_type(I32)
        done(g.mul(y, t(g, "scale", (1, 1, 3), F32), **REAL)).set_dim((1, 256, 3)).set_stride((768, 3, 1))

    found = check_graph(build, device, data={"a": given(x), "b": given(1), "scale": given(scale)}, runs=1).outputs["y"]
    assert np.array_equal(found[0, :, 0], np.round(x[0, :, 0] / 2))
    assert np.array_equal(found[0, :, 1], np.sign(x[0, :, 0]) * 127 - (x[0, :, 0] < 0))
    assert not found[0, :, 2].any()


CONVOLUTIONS = {
    "rows": {"layout": "row"},
    "channels last": {"layout": "channels_last"},
    "strided, dilated": {"layout": "channels_last", "stride": [2, 1], "dilation": [1, 2]},
    "grouped": {"layout": "row", "groups": 2},
    "depthwise": {"layout": "channels_last", "groups": 6},
    "one tap": {"layout": "channels_last", "taps": 1},
}


def convolution(layout, stride=(1, 1), dilation=(1, 1), groups=1, taps=3, out=I8):
    def build(g):
        x = t(g, "x", (2, 6, 8, 7), layout=layout)
        w = t(g, "w", (6, 6 // groups, taps, taps), layout=layout)
        pad = [taps // 2] * 2
        y = g.conv_fprop(x, w, padding=pad, stride=list(stride), dilation=list(dilation), compute_data_type=I32).set_data_type(I32)
        done(requantized(g, y, (1, 6, 1, 1)), dtype=out)

    return build


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(device, name):
    one_kernel(convolution(**CONVOLUTIONS[name]), device, **SCALES)


def test_convolution_with_a_residual(device):
    """conv, scale, bias, + an int8 residual with a scale of its own, relu, int8: the block of a quantized network."""

    def build(g):
        x, w, z = t(g, "x", (2, 8, 6, 6), layout="channels_last"), t(g, "w", (8, 8, 3, 3)), t(g, "z", (2, 8, 6, 6), layout="channels_last")
        y = g.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1], compute_data_type=I32).set_data_type(I32)
        done(requantized(g, y, (1, 8, 1, 1), z))

    one_kernel(build, device, **SCALES)


@pytest.mark.parametrize("kind", ["dgrad", "wgrad"])
def test_gradients_of_a_convolution(device, kind):
    def build(g):
        more = {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1], "compute_data_type": I32}
        dy = t(g, "dy", (2, 6, 5, 5), layout="channels_last")
        if kind == "dgrad":
            done(g.conv_dgrad(dy, t(g, "w", (6, 4, 3, 3)), **more).set_dim((2, 4, 5, 5)), dtype=I32)
        else:
            done(g.conv_wgrad(t(g, "x", (2, 4, 5, 5), layout="channels_last"), dy, **more).set_dim((6, 4, 3, 3)), dtype=I32)

    one_kernel(build, device)


def test_two_layers_are_two_kernels(device):
    """int8 is what goes from one to the other."""

    def build(g):
        y = t(g, "x", (2, 6, 6, 5), layout="channels_last")
        for n in range(2):
            w = t(g, f"w{n}", (6, 6, 3, 3))
            y = g.conv_fprop(y, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1], compute_data_type=I32).set_data_type(I32)
            y = g.relu(g.mul(y, 0.004, **REAL), **REAL).set_data_type(I8)
        done(y)

    outcome = one_kernel(build, device, kernels=2)
    middle = outcome.graph.plan.partition.materialized
    assert [outcome.graph._opgraph.tensors[i].dtype for i in middle] == [I8]


# ---------------------------------------------------------------------------------------------------------------------------- dequantize in front
@pytest.mark.parametrize("through", ["identity", "scale", "zero point"])
def test_dequantize_in_front(device, through):
    """int8 weights beside 16-bit activations: converted, scaled or shifted and scaled in the prologue."""

    def build(g):
        a, w = t(g, "a", (2, 5, 40), D.BFLOAT16), t(g, "b", (1, 40, 9), layout="column")
        if through == "identity":
            w = g.identity(w, **REAL).set_data_type(F32)
        elif through == "scale":
            w = g.mul(w, t(g, "scale", (1, 1, 9), F32), **REAL)
        else:
            shifted = g.sub(w, t(g, "zero", (1, 1, 9), I8), compute_data_type=I32).set_data_type(I32)
            w = g.mul(shifted, t(g, "scale", (1, 1, 9), F32), **REAL)
        done(g.matmul(a, w, compute_data_type=F32), dtype=D.BFLOAT16)

    one_kernel(build, device, a=Data("normal"), zero=FULL, scale=Data("uniform", 0.01, 0.1))


@pytest.mark.parametrize("dtype", [D.INT4, I8])
def test_weights_in_groups(device, dtype):
    """4-bit (two a byte) and 8-bit weights with a scale for every 16 of a column, dequantized in the prologue."""

    def build(g):
        a, w = t(g, "a", (1, 6, 64), D.HALF), t(g, "b", (1, 64, 10), dtype, layout="column")
        scale = t(g, "scale", (1, 4, 10), D.HALF)
        y = g.matmul(a, g.block_scale_dequantize(w, scale, [16, 1]), compute_data_type=F32)
        done(g.gelu(y), dtype=D.HALF)

    one_kernel(build, device, a=Data("normal"), scale=Data("uniform", 0.01, 0.1))


def test_quantize_activations_then_multiply(device):
    """Rows of FLOAT to int8 by their largest magnitude, an int8 product, both scales taken back: dynamic quantization by hand."""

    def build(g):
        x, w = t(g, "x", (1, 6, 32), F32), t(g, "w", (1, 32, 8), layout="column")
        largest = g.reduction(x, graphdnn.reduction_mode.AMAX, axes=2, keepdim=True)
        scale = g.div(largest, 127.0, **REAL)
        q = g.div(x, scale, **REAL).set_data_type(I8)
        y = g.matmul(q, w, compute_data_type=I32).set_data_type(I32)
        done(g.mul(g.mul(y, scale, **REAL), t(g, "scale", (1, 1, 8), F32), **REAL), dtype=F32)

    check_graph(build, device, data={"x": Data("normal"), "w": FULL, "scale": Data("uniform", 0.01, 0.1)}, runs=1, may_exclude=0.2)


# ------------------------------------------------------------------------------------------------------------------------------- around a product
def test_pointwise_and_reductions(device):
    """INT8 and UINT8 in pointwise graphs of INT32 and of FLOAT, and sums of them."""

    def build(g):
        a, b = t(g, "a", (3, 4, 20)), t(g, "b", (1, 4, 1), D.UINT8)
        total = g.add(a, b, compute_data_type=I32).set_data_type(I32)
        done(g.max(total, a, compute_data_type=I32), "largest", I32)
        done(g.mul(total, 0.37, **REAL), "scaled", I8)
        done(g.cmp_gt(a, b, compute_data_type=I32), "greater", D.BOOLEAN)
        for mode in ("ADD", "MAX", "AMAX", "AVG"):
            done(g.reduction(a, graphdnn.reduction_mode[mode], axes=2, compute_data_type=I32), mode, I32)

    check_graph(build, device, data={"a": FULL, "b": FULL}, runs=1)


@pytest.mark.parametrize("reduced", [(1, 1, 1), (1, 1, 12)])
def test_sums_of_a_product(device, reduced):
    """The largest magnitude of int32 results beside their int8 form."""

    def build(g):
        y = g.matmul(t(g, "a", (1, 9, 20)), t(g, "b", (1, 20, 12)), compute_data_type=I32).set_data_type(I32)
        done(g.reduction(y, graphdnn.reduction_mode.AMAX, compute_data_type=I32).set_dim(reduced), "amax", I32)
        done(g.mul(y, 0.001, **REAL))

    check_graph(build, device, data={"a": FULL, "b": FULL}, runs=1)


def test_sums_wrap_like_int32(device):
    """Three products of 2**31 are 3 * 2**31, which is -2**31 in INT32."""

    def build(g):
        done(g.matmul(t(g, "a", (1, 2, 3), I32), t(g, "b", (1, 3, 2), I32), compute_data_type=I32), dtype=I32)

    found = check_graph(build, device, data={"a": given(1 << 16), "b": given(1 << 15)}, runs=1).outputs["y"]
    assert (found == -(2**31)).all()
