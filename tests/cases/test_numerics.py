"""N1 N6 N8 N10 N11: NaN, roundings that the user asked for, integer widths, IEEE fp32, range of the activation functions."""

from __future__ import annotations

import math

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type
from tests.helpers import check_graph, given

F32, F16, BF16, I32 = data_type.FLOAT, data_type.HALF, data_type.BFLOAT16, data_type.INT32
FLOAT = {"compute_data_type": F32}
NAN, INF = math.nan, math.inf
X0 = [-3, NAN, -1, 0, 1, 2, NAN]
X1 = [0, 0, NAN, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [F32, F16, BF16, data_type.DOUBLE])
def test_N1_nan_propagates_through_relu_max_min_clamp(device, dtype):
    def build(g):
        a = g.tensor(dim=[7], stride=[1], data_type=dtype, name="a")
        b = g.tensor(dim=[7], stride=[1], data_type=dtype, name="b")
        results = {
            "relu": g.relu(a),
            "max": g.max(a, b),
            "max_swapped": g.max(b, a),
            "min": g.min(a, b),
            "clamp": g.max(a, 0.5),
            "clip": g.relu(a, lower_clip=-2.0, upper_clip=1.5),
            "leaky": g.relu(a, negative_slope=0.5),
        }
        for name, t in results.items():
            t.set_name(name).set_output(True).set_data_type(dtype)

    got = check_graph(build, device, data={"a": given(X0), "b": given(X1)}).outputs
    want = {
        "relu": [0, NAN, 0, 0, 1, 2, NAN],
        "max": [0, NAN, NAN, 0, 1, 2, NAN],
        "max_swapped": [0, NAN, NAN, 0, 1, 2, NAN],
        "min": [-3, NAN, NAN, 0, 0, 0, NAN],
        "clamp": [0.5, NAN, 0.5, 0.5, 1, 2, NAN],
        "clip": [-2, NAN, -1, 0, 1, 1.5, NAN],
        "leaky": [-1.5, NAN, -0.5, 0, 1, 2, NAN],
    }
    for name, values in want.items():
        np.testing.assert_array_equal(got[name], values, err_msg=name)


@pytest.mark.parametrize("mode", ["MAX", "MIN", "AMAX"])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_N1_nan_wins_in_reductions(device, mode, where, dtype):
    """Row 0 holds a NaN; over rows alone, and over everything."""
    n = 700 if device != "cudasim" else 40
    x = np.linspace(-3, 5, 3 * n).reshape(3, n)
    x[0, {"first": 0, "middle": n // 2, "last": n - 1}[where]] = NAN

    def build(g):
        t = g.tensor(dim=[3, n], stride=[n, 1], data_type=dtype, name="x")
        for name, dim in (("rows", [3, 1]), ("all", [1, 1])):
            g.reduction(t, graphdnn.reduction_mode[mode]).set_dim(dim).set_name(name).set_output(True).set_data_type(F32)

    got = check_graph(build, device, data={"x": given(x)}, graph=FLOAT).outputs
    assert np.isnan(got["rows"]).reshape(-1).tolist() == [True, False, False]
    assert np.isnan(got["all"]).all()


def test_N6_declared_rounding_of_a_virtual_tensor_is_kept(device):
    """T = a / 3 declared bf16: its maximum is found again by equality; were T kept in fp32 while the maximum is rounded, the count would be 0."""

    def build(g):
        a = g.tensor(dim=[2, 8], stride=[8, 1], data_type=F32, name="a")
        t = g.div(a, 3.0).set_data_type(BF16)
        m = g.reduction(t, graphdnn.reduction_mode.AMAX).set_dim([2, 1]).set_data_type(BF16)
        ties = g.cmp_eq(t, m)
        g.reduction(ties, graphdnn.reduction_mode.ADD).set_dim([2, 1]).set_name("count").set_output(True).set_data_type(F32)

    got = check_graph(build, device, data={"a": given(np.stack([np.arange(1.0, 9), np.arange(9.0, 1, -1)]))}, graph=FLOAT)
    assert got.outputs["count"].reshape(-1).tolist() == [1, 1]


def test_N6_explicit_cast_down_and_up_is_not_dropped(device):
    x = np.float32([1.001, 2.0039, 3.14159, -7.77]).astype(float)

    def build(g):
        a = g.tensor(dim=[4], stride=[1], data_type=F32, name="a")
        low = g.identity(a).set_data_type(BF16)
        g.identity(low).set_name("y").set_output(True).set_data_type(F32)
        g.identity(g.identity(a)).set_name("plain").set_output(True).set_data_type(F32)

    got = check_graph(build, device, data={"a": given(x)}, graph=FLOAT).outputs
    import ml_dtypes

    np.testing.assert_array_equal(got["y"], x.astype(ml_dtypes.bfloat16).astype(float))
    assert (got["y"] != x).all()
    np.testing.assert_array_equal(got["plain"], x)


@pytest.mark.parametrize(("middle", "want"), [(None, 256), (data_type.UINT8, 0), (I32, 256)])
def test_N8_integers_wrap_only_at_a_declared_tensor(device, middle, want):
    def build(g):
        a = g.tensor(dim=[3], stride=[1], data_type=data_type.UINT8, name="a")
        s = g.add(a, a)
        if middle is not None:
            s.set_data_type(middle)
        g.identity(s).set_name("y").set_output(True).set_data_type(I32)

    got = check_graph(build, device, data={"a": given([128, 128, 128])})
    assert got.outputs["y"].tolist() == [want] * 3


@pytest.mark.parametrize(("middle", "want"), [(None, -400), (data_type.UINT8, 112)])
def test_N8_narrow_negation_then_sum(device, middle, want):
    def build(g):
        a = g.tensor(dim=[2], stride=[1], data_type=data_type.UINT8, name="a")
        t = g.neg(g.abs(a))
        if middle is not None:
            t.set_data_type(middle)
        g.reduction(t, graphdnn.reduction_mode.ADD).set_dim([1]).set_name("y").set_output(True).set_data_type(I32)

    assert check_graph(build, device, data={"a": given([200, 200])}).outputs["y"].tolist() == [want]


def test_N10_fp32_matmul_is_ieee(device):
    n = 512 if device != "cudasim" else 12

    def build(g):
        a = g.tensor(dim=[n, n], stride=[n, 1], data_type=F32, name="a")
        b = g.tensor(dim=[n, n], stride=[n, 1], data_type=F32, name="b")
        g.matmul(a, b).set_name("y").set_output(True)

    done = check_graph(build, device, graph={"io_data_type": F32, "compute_data_type": F32})
    error = np.abs(done.outputs["y"] - done.expected["y"]).max()
    assert error < 2e-4, f"TF32 would be near 3e-2, IEEE fp32 near 5e-5; found {error:.2e}"
    notes = [n.name for n in done.graph.plan.numeric_notes]
    assert "DOWN_CONVERT_INPUTS" not in notes and "REDUCED_PRECISION_REDUCTION" not in notes


def _unary(methods, values, device, dtype=F32):
    """``{name: (method, kwargs)}`` all applied to ``values``."""

    def build(g):
        x = g.tensor(dim=[len(values)], stride=[1], data_type=dtype, name="x")
        for name, (method, kwargs) in methods.items():
            getattr(g, method)(x, **kwargs).set_name(name).set_output(True).set_data_type(dtype)

    return check_graph(build, device, data={"x": given(values)}, graph=FLOAT if dtype is F32 else None).outputs


def test_N11_softplus(device):
    got = _unary({"y": ("softplus", {})}, [100.0, -100.0, -88.0, 0.0, INF, -INF, NAN], device)["y"]
    assert got[0] == 100
    assert 0 <= got[1] < 1e-37
    assert got[2] == pytest.approx(math.exp(-88), rel=1e-2) and got[2] > 0, "subnormal, not flushed to 0"
    assert got[3] == pytest.approx(math.log(2), rel=1e-6)
    assert got[4] == INF and got[5] == 0 and math.isnan(got[6])


def test_N11_negated_softplus_keeps_the_subnormal(device):
    def build(g):
        x = g.tensor(dim=[1], stride=[1], data_type=F32, name="x")
        g.neg(g.softplus(x)).set_name("y").set_output(True).set_data_type(F32)

    got = check_graph(build, device, data={"x": given([-88.0])}, graph=FLOAT).outputs["y"]
    assert got[0] == pytest.approx(-6.05e-39, rel=1e-2)


def test_N11_activations_at_the_edges(device):
    x = [INF, -INF, 89.0, -89.0, 1e4, -1e4, NAN]
    methods = {m: (m, {}) for m in ("tanh", "sigmoid", "gelu", "gelu_approx_tanh", "swish", "elu", "erf", "exp", "softplus")}
    got = _unary(methods, x, device)
    want = {
        "tanh": [1, -1, 1, -1, 1, -1],
        "erf": [1, -1, 1, -1, 1, -1],
        "sigmoid": [1, 0, 1, 0, 1, 0],
        "gelu": [INF, 0, 89, 0, 1e4, 0],
        "gelu_approx_tanh": [INF, 0, 89, 0, 1e4, 0],
        "swish": [INF, 0, 89, 0, 1e4, 0],
        "elu": [INF, -1, 89, -1, 1e4, -1],
        "exp": [INF, 0, INF, 0, INF, 0],
        "softplus": [INF, 0, 89, 0, 1e4, 0],
    }
    for name, values in want.items():
        np.testing.assert_allclose(got[name][:6], values, rtol=1e-6, atol=1e-36, err_msg=name)
        assert math.isnan(got[name][6]), f"{name}(NaN)"


def test_N11_two_gelus_are_two_modes(device):
    got = _unary({"erf": ("gelu", {}), "tanh": ("gelu_approx_tanh", {})}, [2.7, -2.7, 0.5], device)
    assert 3e-4 < abs(got["erf"][0] - got["tanh"][0]) < 5e-4


def test_N11_elu_backward_and_friends(device):
    x = [INF, -INF, 89.0, -89.0, 1e4, -1e4, 0.5, -0.5]
    names = ("elu_backward", "gelu_backward", "gelu_approx_tanh_backward", "sigmoid_backward", "softplus_backward", "swish_backward", "tanh_backward")

    def build(g):
        t = g.tensor(dim=[len(x)], stride=[1], data_type=F32, name="x")
        dy = g.tensor(dim=[len(x)], stride=[1], data_type=F32, name="dy")
        for name in names:
            getattr(g, name)(dy, t).set_name(name).set_output(True).set_data_type(F32)

    got = check_graph(build, device, data={"x": given(x), "dy": given(1.0)}, graph=FLOAT).outputs
    want = {
        "elu_backward": [1, 0, 1, 0, 1, 0, 1, math.exp(-0.5)],
        "sigmoid_backward": [0, 0, 0, 0, 0, 0],
        "tanh_backward": [0, 0, 0, 0, 0, 0],
        "softplus_backward": [1, 0, 1, 0, 1, 0],
        "gelu_backward": [1, 0, 1, 0, 1, 0],
        "gelu_approx_tanh_backward": [1, 0, 1, 0, 1, 0],
        "swish_backward": [1, 0, 1, 0, 1, 0],
    }
    for name, values in want.items():
        np.testing.assert_allclose(got[name][: len(values)], values, rtol=1e-6, atol=1e-30, err_msg=name)


def test_N11_pow_of_negative_bases(device):
    base, power = [-2.0, -2.0, -2.0, 0.0, -8.0, 2.0, 0.0], [3.0, 2.0, -1.0, 0.0, 1 / 3, 0.5, -1.0]

    def build(g):
        a = g.tensor(dim=[7], stride=[1], data_type=F32, name="a")
        b = g.tensor(dim=[7], stride=[1], data_type=F32, name="b")
        g.pow(a, b).set_name("y").set_output(True).set_data_type(F32)

    got = check_graph(build, device, data={"a": given(base), "b": given(power)}, graph=FLOAT).outputs["y"]
    np.testing.assert_allclose(got, [-8, 4, -0.5, 1, NAN, math.sqrt(2), INF], rtol=1e-6)
