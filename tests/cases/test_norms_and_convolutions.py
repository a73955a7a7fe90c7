"""N4 N15 U1 U4: squares beyond half, output sizes of two inputs, norms among other ops, convolutions that others have no plan for."""

from __future__ import annotations

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type, norm_forward_phase
from graphdnn.errors import ValidationError
from tests.helpers import Data, check_graph, given

F32, F16, BF16 = data_type.FLOAT, data_type.HALF, data_type.BFLOAT16
TRAINING, INFERENCE = norm_forward_phase.TRAINING, norm_forward_phase.INFERENCE
GRAPH = {"intermediate_data_type": F32, "compute_data_type": F32}
SAME = {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}


def row(g, name, *dim, dtype=F32):
    return g.tensor(dim=dim, layout="row", data_type=dtype, name=name)


def stored(t, name, dtype):
    return t.set_name(name).set_output(True).set_data_type(dtype)


@pytest.mark.parametrize(("value", "dtype"), [(300.0, F16), (12000.0, F16), ("outliers", F16), ("outliers", BF16)], ids=str)
def test_N4_squares_beyond_half(device, value, dtype):
    """300 * 300 is infinite in half, 12000 far beyond; squares and their sums are FLOAT. Rows of [1500, 1280] have outliers of both signs."""
    width = 2048 if device != "cudasim" else 48
    pair = np.tile([1500.0, -1280.0], width // 2) if value == "outliers" else np.full(width, value)

    def build(g):
        x, one, zero = row(g, "x", 4, width, dtype=dtype), row(g, "one", 1, width), row(g, "zero", 1, width)
        stored(g.rmsnorm(INFERENCE, x, one, epsilon=1e-6)[0], "rms", dtype)
        stored(g.layernorm(INFERENCE, x, one, zero, 1e-6)[0], "layer", dtype)

    data = {"x": given(np.tile(pair, (4, 1))), "one": given(1.0), "zero": given(0.0)}
    # Of a row of equal numbers the bound of a normalization divides by a variance that may be 0: compared below instead.
    found = check_graph(build, device, data=data, graph=GRAPH, runs=1, may_exclude=1.0).outputs
    x = np.tile(pair, (4, 1))
    u = 2.0**-10 if dtype is F16 else 2.0**-7  # a rounding of the result and one of the input
    np.testing.assert_allclose(found["rms"], x / np.sqrt((x * x).mean(1, keepdims=True)), rtol=u)
    if value == "outliers":
        np.testing.assert_allclose(found["layer"], (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True), rtol=u)
    else:
        assert (found["rms"] == 1).all() and (found["layer"] == 0).all()


def test_N15_one_output_size_of_two_inputs_is_asked_for():
    """k3 p1 s2 makes 4 of 7 and of 8: dims are demanded, and those that contradict the op are refused."""

    def declare(extent):
        g = graphdnn.pygraph(device="cpu", io_data_type=F32, **GRAPH)
        dx = g.conv_dgrad(row(g, "dy", 2, 5, 4, 4), row(g, "w", 5, 3, 3, 3), padding=[1, 1], stride=[2, 2], dilation=[1, 1], name="back")
        if extent:
            dx.set_dim((2, 3, extent, extent))
        dx.set_output(True)
        g.validate()
        return dx.get_dim()

    assert declare(7) == [2, 3, 7, 7] and declare(8) == [2, 3, 8, 8]
    with pytest.raises(ValidationError, match="(?s)'back'.*inferencing is not possible.*dims of DX.*set_dim"):
        declare(0)
    for extent in (6, 9):
        with pytest.raises(ValidationError, match=f"'back'.*not consistent.*\\[2, 3, {extent}, {extent}\\]"):
            declare(extent)


def test_N15_the_odd_size_has_right_numbers(device, extent=7):
    """An even one is among the geometries of tests/conformance/test_conv.py."""

    def build(g):
        dx = g.conv_dgrad(row(g, "dy", 2, 5, 4, 4), row(g, "w", 5, 3, 3, 3), padding=[1, 1], stride=[2, 2], dilation=[1, 1])
        stored(dx.set_dim((2, 3, extent, extent)), "dx", F32)

    check_graph(build, device, graph=GRAPH, runs=1)


@pytest.mark.parametrize(
    ("width", "dtype", "around"), [(768, F32, "product"), (1024, F16, "relu"), (768, BF16, "residual"), (1024, F32, "residual")], ids=str
)
def test_U1_layernorm_and_what_follows_is_one_kernel(device, width, dtype, around):
    """layernorm * z, then relu, with a residual in front. Narrow in the simulator."""
    width = width // 16 if device == "cudasim" else width

    def build(g):
        x, z = row(g, "x", 2, 3, width, dtype=dtype), row(g, "z", 2, 3, width, dtype=dtype)
        if around == "residual":
            x = g.add(x, row(g, "r", 2, 3, width, dtype=dtype))
        y = g.layernorm(TRAINING, x, row(g, "s", 1, 1, width), row(g, "b", 1, 1, width), 1e-5)
        stored(g.relu(g.mul(y[0], z)) if around != "product" else g.mul(y[0], z), "y", dtype)
        stored(y[1], "mean", F32), stored(y[2], "inverse", F32)

    g = check_graph(build, device, graph=GRAPH, runs=1).graph
    assert len(g.explain().regions) == 1


def test_U4_chained_convolutions_without_a_type_between(device):
    """(a) (1, 1, 64, 64) with two 3 x 3 filters: the tensor between them has no data type of its own, and gets the compute type."""
    size = 64 if device != "cudasim" else 7
    between = []

    def build(g):
        first = g.conv_fprop(row(g, "x", 1, 1, size, size), row(g, "w0", 1, 1, 3, 3), **SAME)
        between.append(first)
        stored(g.conv_fprop(first, row(g, "w1", 1, 1, 3, 3), **SAME), "y", F32)

    g = check_graph(build, device, graph={"compute_data_type": F32}, runs=1).graph
    assert between[0].get_data_type() is F32
    assert len(g.explain().regions) == 2, "two kernels, since no sum of one can be kept for the windows of the other"


def row_major_convolution(n, size):
    def build(g):
        x, w = row(g, "x", n, 3, size, size), row(g, "w", 32, 3, 5, 5)
        y = g.conv_fprop(x, w, padding=[2, 2], stride=[1, 1], dilation=[1, 1])
        stored(g.relu(y), "y", F32).set_dim((n, 32, size, size)).set_stride((32 * size * size, size * size, size, 1))

    return build


@pytest.mark.parametrize("device", ["cpu", "sm_80", "sm_90", "cudasim"])
def test_U4_the_reported_convolution_has_a_plan(device):
    """(b) (256, 3, 224, 224) by (32, 3, 5, 5), NCHW fp32, relu: planned at its full size, in one kernel."""
    g = graphdnn.pygraph(device=device, **GRAPH)
    row_major_convolution(256, 224)(g)
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([graphdnn.heur_mode.A])
    g.check_support()
    assert len(g.explain().regions) == 1


def test_U4_the_reported_convolution_is_right(device):
    """The same at sizes that the reference can do."""
    n, size = (2, 26) if device != "cudasim" else (1, 5)
    check_graph(row_major_convolution(n, size), device, data={"x": Data("normal")}, graph=GRAPH, runs=1)
