"""L1 L3 L4 L6 L10 L11 L14 L15: layouts, strides and broadcasts that gave silently wrong numbers elsewhere."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type
from tests.helpers import Data, check_graph, given

F32, F16 = data_type.FLOAT, data_type.HALF
FLOAT = {"io_data_type": F32, "compute_data_type": F32}


def _add(dims_a, stride_a, dims_b, stride_b):
    def build(g):
        a = g.tensor(dim=dims_a, stride=stride_a, data_type=F32, name="a")
        b = g.tensor(dim=dims_b, stride=stride_b, data_type=F32, name="b")
        g.add(a, b).set_name("y").set_output(True)

    return build


@pytest.mark.parametrize("last", [1, 2, 7])
@pytest.mark.parametrize("swapped", [False, True])
def test_L1_broadcast_ignores_strides_of_size_one_dims(device, last, swapped):
    data = {"a": given([[[1, 2], [3, 4]]]), "b": given([[[10], [20]]])}
    sides = ((1, 2, 2), (4, 2, 1)), ((1, 2, 1), (2, 1, last))
    names = ("a", "b")
    if swapped:
        sides, names = sides[::-1], names[::-1]
    data = {n: data[m] for n, m in zip(("a", "b"), names, strict=True)}
    got = check_graph(_add(*sides[0], *sides[1]), device, data=data, graph=FLOAT).outputs["y"]
    assert got.tolist() == [[[11, 12], [23, 24]]]


@pytest.mark.parametrize(("dims", "stride"), [((1, 1, 2), (9, 5, 1)), ((1, 1, 1), (3, 7, 2))])
def test_L1_other_broadcasts(device, dims, stride):
    data = {"a": given([[[1, 2], [3, 4]]]), "b": given(np.array([10, 20])[: dims[2]].reshape(dims))}
    got = check_graph(_add((1, 2, 2), (4, 2, 1), dims, stride), device, data=data, graph=FLOAT).outputs["y"]
    assert got.tolist() == [[[11, 22], [13, 24]] if dims[2] == 2 else [[11, 12], [13, 14]]]


def test_L1_broadcast_on_both_sides(device):
    data = {"a": given([[[1], [2]]]), "b": given([[[10, 20]]])}

    def build(g):
        a = g.tensor(dim=(1, 2, 1), stride=(2, 1, 7), name="a")
        b = g.tensor(dim=(1, 1, 2), stride=(9, 4, 1), name="b")
        g.add(a, b).set_name("y").set_output(True).set_stride([4, 2, 1])

    got = check_graph(build, device, data=data, graph=FLOAT).outputs["y"]
    assert got.tolist() == [[[11, 21], [12, 22]]]


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("then", ["nothing", "add_zero", "relu"])
def test_L3_slice_alone_and_fused_on_nchw(device, dtype, then):
    n, c, h, w = 2, 6, 5, 3

    def build(g):
        x = g.tensor(dim=[n, c, h, w], stride=[c * h * w, h * w, w, 1], data_type=dtype, name="x")
        y = g.slice(x, slices=[slice(0, 1), slice(2, 5), slice(1, h - 1), slice(None)]).set_data_type(dtype)
        if then == "add_zero":
            y = g.add(y, 0.0)
        elif then == "relu":
            y = g.relu(y)
        y.set_name("y").set_output(True).set_data_type(dtype)

    x = np.random.default_rng(0).integers(-50, 50, (n, c, h, w)).astype(float)
    out = check_graph(build, device, data={"x": given(x)}, graph={"compute_data_type": F32})
    want = x[0:1, 2:5, 1 : h - 1]
    assert out.outputs["y"].shape == (1, 3, h - 2, w)
    np.testing.assert_array_equal(out.outputs["y"], np.maximum(want, 0) if then == "relu" else want)


@pytest.mark.parametrize("broadcast", ["left", "right", "both"])
@pytest.mark.parametrize("shape", [(32, 32, 32, 32), (3, 5, 7, 9)])
def test_L4_stride_0_batch_of_a_matmul(device, broadcast, shape):
    b, m, n, k = shape
    if device == "cudasim" and shape[0] == 32:
        b, m, n, k = 4, 8, 8, 8
    left, right = broadcast in ("left", "both"), broadcast in ("right", "both")

    def build(g):
        a = g.tensor(dim=[b, m, k], stride=[0 if left else m * k, k, 1], data_type=F32, name="a")
        c = g.tensor(dim=[b, k, n], stride=[0 if right else k * n, n, 1], data_type=F32, name="b")
        g.matmul(a, c).set_name("y").set_output(True)

    data = {"a": given(1.0), "b": given(1.0)}
    assert (check_graph(build, device, data=data, graph=FLOAT).outputs["y"] == k).all()
    check_graph(build, device, data={"a": Data("grid", -4, 4), "b": Data("grid", -4, 4)}, graph=FLOAT)


def test_L4_one_matrix_against_a_batch(device):
    b, m, n, k = 3, 5, 7, 9

    def build(g):
        a = g.tensor(dim=[1, m, k], stride=[m * k, k, 1], data_type=F32, name="a")
        c = g.tensor(dim=[b, k, n], stride=[k * n, n, 1], data_type=F32, name="b")
        g.matmul(a, c).set_name("y").set_output(True)

    assert check_graph(build, device, graph=FLOAT).outputs["y"].shape == (b, m, n)


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("mode", ["AVG", "ADD", "AMAX", "MUL"])
def test_L6_gen_index_is_logical_in_a_fused_reduction(device, axis, mode):
    """Channels-last input; where(index along axis < 2, x, index) reduced over the last dim."""
    dim = (4, 4, 8, 8) if device != "cudasim" else (2, 4, 3, 4)
    stride = (dim[1] * dim[2] * dim[3], 1, dim[3] * dim[1], dim[1])

    def build(g):
        x = g.tensor(dim=dim, stride=stride, data_type=F32, name="x")
        index = g.gen_index(x, axis=axis)
        low = g.cmp_lt(index, g.tensor_scalar(2.0, graphdnn.scalar_type.COMPILE_TIME_CONST))
        chosen = g.binary_select(x, index, low)
        y = g.reduction(chosen, mode=graphdnn.reduction_mode[mode])
        y.set_dim([*dim[:3], 1]).set_name("y").set_output(True)

    x = np.random.default_rng(axis).integers(1, 3, dim).astype(float)
    got = check_graph(build, device, data={"x": given(x)}, graph=FLOAT).outputs["y"]
    where = np.arange(dim[axis]).reshape([-1 if a == axis else 1 for a in range(4)])
    chosen = np.where(where < 2, x, where + np.zeros(dim))
    how = {"AVG": np.mean, "ADD": np.sum, "AMAX": np.max, "MUL": np.prod}[mode]
    np.testing.assert_allclose(got, how(chosen, axis=3, keepdims=True), rtol=1e-5)


LAYOUTS = {"channels-last": (0, 2, 3, 1), "transposed": (0, 1, 3, 2), "batch last": (1, 2, 3, 0)}
"""Axes from the slowest in memory to the fastest."""


def strides_of(dim, order):
    stride, step = [0] * len(dim), 1
    for axis in reversed(order):
        stride[axis], step = step, step * dim[axis]
    return stride


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", ["variance", "logsumexp"])
def test_L6_gen_index_is_logical_behind_rows(device, layout, op):
    """The same with the variance (of a layernorm) and the logsumexp of rows; the index runs along the reduced axis and along another."""
    dim = (4, 4, 8, 8) if device != "cudasim" else (2, 4, 3, 4)

    def build(g):
        x = g.tensor(dim=dim, stride=strides_of(dim, LAYOUTS[layout]), data_type=F32, name="x")
        mixed = g.add(g.mul(g.gen_index(x, axis=3), x), g.gen_index(x, axis=1))
        if op == "logsumexp":
            g.logsumexp(mixed, 3).set_name("y").set_output(True)
        else:
            s, b = (g.tensor(dim=(1, 1, 1, dim[3]), layout="row", data_type=F32, name=n) for n in "sb")
            for name, t in zip("zmy", g.layernorm(graphdnn.norm_forward_phase.TRAINING, mixed, s, b, 0.5), strict=True):
                t.set_name(name).set_output(True)

    x = np.random.default_rng(5).integers(-3, 4, dim).astype(float)
    got = check_graph(build, device, data={"x": given(x)}, graph=FLOAT | {"intermediate_data_type": F32}).outputs["y"]
    mixed = np.arange(dim[3]) * x + np.arange(dim[1])[:, None, None]
    want = np.log(np.exp(mixed).sum(3)) if op == "logsumexp" else 1 / np.sqrt(mixed.var(3) + 0.5)
    np.testing.assert_allclose(got.reshape(want.shape), want, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_L6_pooling_indices_are_logical(device, layout):
    """The index of a maximum counts the elements of its window row by row, whatever lies beside what in memory."""
    dim = (2, 3, 6, 4)

    def build(g):
        x = g.tensor(dim=dim, stride=strides_of(dim, LAYOUTS[layout]), data_type=F32, name="x")
        y, index = g.resample(x, "MAXPOOL", [2, 2], stride=[2, 2], generate_index=True)
        y.set_name("y").set_output(True)
        index.set_name("index").set_output(True).set_data_type(data_type.INT32)

    x = np.random.default_rng(6).permutation(np.prod(dim)).reshape(dim).astype(float)
    got = check_graph(build, device, data={"x": given(x)}, graph=FLOAT).outputs
    windows = x.reshape(2, 3, 3, 2, 2, 2).transpose(0, 1, 2, 4, 3, 5).reshape(2, 3, 3, 2, 4)
    np.testing.assert_array_equal(got["y"], windows.max(-1))
    np.testing.assert_array_equal(got["index"], windows.argmax(-1))


def test_L10_overlapping_input_is_read_by_its_strides(device):
    """The wrong batch stride of the report is a legal overlap: each batch starts one token after the one before."""
    b, h, s, d = 3, 2, 4, 5

    def build(g):
        q = g.tensor(dim=[b, h, s, d], stride=[h * d, d, h * d, 1], data_type=F32, name="q")
        g.add(q, 0.0).set_name("y").set_output(True).set_stride([h * s * d, s * d, d, 1]).set_dim([b, h, s, d])

    flat = np.arange((b - 1 + s) * h * d, dtype=float)
    at = (np.arange(b) * h * d)[:, None, None, None] + (np.arange(h) * d)[:, None, None] + (np.arange(s) * h * d)[:, None] + np.arange(d)
    got = check_graph(build, device, data={"q": given(flat[at])}, graph=FLOAT).outputs["y"]
    np.testing.assert_array_equal(got, flat[at])


def test_L10_right_batch_stride(device):
    b, h, s, d = 3, 2, 4, 5

    def build(g):
        q = g.tensor(dim=[b, h, s, d], stride=[s * h * d, d, h * d, 1], data_type=F32, name="q")
        k = g.tensor(dim=[b, h, d, s], stride=[s * h * d, d, 1, h * d], data_type=F32, name="k")
        g.matmul(q, k).set_name("y").set_output(True)

    check_graph(build, device, graph=FLOAT)


def test_L10_overlap_is_said(capfd, monkeypatch):
    """A lint line names the tensor; it is no error."""
    monkeypatch.setenv("GRAPHDNN_LOG", "info")
    monkeypatch.setenv("GRAPHDNN_LOG_FILE", "stderr")
    g = graphdnn.pygraph(device="cpu", io_data_type=F32, compute_data_type=F32)
    q = g.tensor(dim=[3, 2, 4, 5], stride=[10, 5, 10, 1], name="q")
    g.neg(q).set_output(True).set_dim([3, 2, 4, 5]).set_stride([40, 20, 5, 1])
    g.validate()
    g.build_operation_graph()
    said = [line for line in capfd.readouterr().err.splitlines() if "overlap" in line]
    assert said and "'q'" in said[0], "the log says that input q overlaps itself"


def test_L11_layout_names_give_right_strides():
    g = graphdnn.pygraph(device="cpu", io_data_type=F32)
    assert g.tensor(dim=[3, 4], layout="row").get_stride() == [4, 1]
    assert g.tensor(dim=[2, 3, 4], layout="row").get_stride() == [12, 4, 1]
    assert g.tensor(dim=[2, 3, 4], layout="column").get_stride() == [12, 1, 3]
    assert g.tensor(dim=[2, 3, 5, 7], layout="channels_last").get_stride() == [105, 1, 21, 3]
    assert g.tensor(dim=[2, 3, 5], layout=(1, 0, 2)).get_stride() == [3, 1, 6]


@pytest.mark.parametrize("layouts", list(itertools.product(["row", "column"], repeat=3)))
def test_L11_m_n_k_all_differ(device, layouts):
    """A batch stride taken from the wrong extent cannot hide when b, m, n, k are all different."""
    b, m, n, k = 2, 3, 5, 7

    def build(g):
        a = g.tensor(dim=[b, m, k], layout=layouts[0], data_type=F32, name="a")
        c = g.tensor(dim=[b, k, n], layout=layouts[1], data_type=F32, name="b")
        d = g.tensor(dim=[b, m, n], layout=layouts[2], data_type=F32, name="d")
        g.add(g.matmul(a, c), d).set_name("y").set_output(True)

    check_graph(build, device, graph=FLOAT)


@pytest.mark.parametrize("form", ["strided", "broadcast"])
@pytest.mark.parametrize("fused", ["add", "select"])
def test_L14_epilogue_operand_with_its_own_strides(device, form, fused):
    b, m, n, k = (2, 64, 80, 48) if device != "cudasim" else (2, 5, 7, 3)

    def build(g):
        a = g.tensor(dim=[b, m, k], stride=[m * k, k, 1], data_type=F32, name="a")
        c = g.tensor(dim=[b, k, n], stride=[k * n, n, 1], data_type=F32, name="b")
        dims, strides = ((b, m, n), (m * 2 * n, 2 * n, 2)) if form == "strided" else ((1, 1, n), (n, n, 1))
        d = g.tensor(dim=dims, stride=strides, data_type=F32, name="d")
        y = g.matmul(a, c)
        y = g.add(y, d) if fused == "add" else g.binary_select(y, d, g.cmp_gt(d, 0.0))
        y.set_name("y").set_output(True).set_dim([b, m, n]).set_stride([m * n, n, 1])

    check_graph(build, device, graph=FLOAT)


@pytest.mark.parametrize("order", ["row_last", "column_last"])
def test_L15_output_strides_come_from_the_last_full_operand(device, order):
    x, y = np.arange(1.0, 7).reshape(2, 3), np.array([[10.0, 20, 30], [40, 50, 60]])
    seen = {}

    def build(g):
        a = g.tensor(dim=[2, 3], stride=[3, 1], data_type=F32, name="x")
        b = g.tensor(dim=[2, 3], stride=[1, 2], data_type=F32, name="y")
        seen["z"] = (g.add(b, a) if order == "row_last" else g.add(a, b)).set_name("z").set_output(True)

    got = check_graph(build, device, data={"x": given(x), "y": given(y)}, graph=FLOAT).outputs["z"]
    assert seen["z"].get_stride() == ([3, 1] if order == "row_last" else [1, 2])
    np.testing.assert_array_equal(got, x + y)
