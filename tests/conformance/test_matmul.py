"""Matmul: types, layouts, batches, prologues, epilogues, epilogue reductions, empty extents, every candidate plan."""

from __future__ import annotations

import itertools

import pytest

import graphdnn
from graphdnn import data_type
from tests.helpers import Data, check_graph

D = data_type
F32 = D.FLOAT
TYPES = [
    (D.FLOAT, D.FLOAT, D.FLOAT, D.NOT_SET),
    (D.DOUBLE, D.DOUBLE, D.DOUBLE, D.NOT_SET),
    (D.HALF, D.HALF, D.HALF, D.FLOAT),
    (D.HALF, D.HALF, D.FLOAT, D.HALF),
    (D.BFLOAT16, D.BFLOAT16, D.BFLOAT16, D.FLOAT),
    (D.FP8_E4M3, D.FP8_E4M3, D.BFLOAT16, D.FLOAT),
    (D.FP8_E5M2, D.FP8_E4M3, D.FLOAT, D.FAST_FLOAT_FOR_FP8),
    (D.INT8, D.INT8, D.INT32, D.INT32),
    (D.UINT8, D.INT8, D.INT32, D.NOT_SET),
    (D.INT32, D.INT32, D.INT32, D.NOT_SET),
    (D.INT64, D.INT64, D.INT64, D.NOT_SET),
    (D.HALF, D.FLOAT, D.FLOAT, D.NOT_SET),
    (D.INT8, D.HALF, D.FLOAT, D.FLOAT),
    (D.FLOAT, D.FLOAT, D.FLOAT, D.DOUBLE),
    (D.BOOLEAN, D.BOOLEAN, D.INT32, D.NOT_SET),
]


def pair(g, b=(2,), m=5, n=7, k=11, left=F32, right=F32, layouts=("row", "row")):
    a = g.tensor(dim=(*b, m, k), layout=layouts[0], data_type=left, name="a")
    c = g.tensor(dim=(*b, k, n), layout=layouts[1], data_type=right, name="b")
    return a, c


def done(t, name="y", dtype=F32):
    return t.set_name(name).set_output(True).set_data_type(dtype)


@pytest.mark.parametrize("types", TYPES, ids=lambda t: "_".join(d.name for d in t))
def test_types(device, types):
    def build(g):
        a, b = pair(g, left=types[0], right=types[1])
        done(g.matmul(a, b, compute_data_type=types[3]), dtype=types[2])

    check_graph(build, device)


@pytest.mark.parametrize("layouts", list(itertools.product(("row", "column", (0, 2, 1), (1, 0, 2)), repeat=2)), ids=str)
@pytest.mark.parametrize("dtype", [F32, D.BFLOAT16], ids=lambda d: d.name)
def test_layouts(device, layouts, dtype):
    def build(g):
        a, b = pair(g, b=(3,), left=dtype, right=dtype, layouts=layouts)
        done(g.matmul(a, b, compute_data_type=F32))

    check_graph(build, device, offsets={"a": 1, "b": 3})


@pytest.mark.parametrize("stride", [(200, 20, 1), (200, 20, 2), (0, 20, 1), (11, 11, 1), (0, 0, 1), (0, 0, 0)], ids=str)
def test_padded_overlapping_and_repeated_operands(device, stride):
    def build(g):
        a = g.tensor(dim=(3, 5, 7), stride=stride, data_type=F32, name="a")
        b = g.tensor(dim=(3, 7, 9), stride=(100, 1, 10), data_type=F32, name="b")
        done(g.matmul(a, b)).set_dim((3, 5, 9)).set_stride((100, 2, 11))

    check_graph(build, device)


@pytest.mark.parametrize(
    "batches",
    [((), ()), ((1,), (4,)), ((4,), (1,)), ((2, 3), (2, 3)), ((2, 1), (1, 3)), ((1, 3), (2, 1)), ((2, 3, 2), (1, 1, 2)), ((1, 1, 1), (2, 3, 2))],
    ids=str,
)
def test_batches(device, batches):
    def build(g):
        a = g.tensor(dim=(*batches[0], 3, 6), layout="row", data_type=F32, name="a")
        b = g.tensor(dim=(*batches[1], 6, 5), layout="row", data_type=F32, name="b")
        done(g.matmul(a, b))

    check_graph(build, device)


SIZES = [(1, 1, 1), (1, 7, 33), (33, 1, 7), (7, 33, 1), (16, 16, 16), (17, 31, 65), (64, 64, 64), (65, 129, 40), (128, 200, 130)]


@pytest.mark.parametrize("mnk", SIZES, ids=str)
def test_sizes_around_tiles(device, mnk):
    m, n, k = (min(x, 19) for x in mnk) if device == "cudasim" else mnk

    def build(g):
        a, b = pair(g, b=(2,), m=m, n=n, k=k)
        done(g.matmul(a, b))

    check_graph(build, device)


@pytest.mark.parametrize(("m", "n", "k"), [(3, 4, 0), (0, 4, 5), (3, 0, 5)])
@pytest.mark.parametrize("dtype", [F32, D.INT32], ids=lambda d: d.name)
def test_empty_extents(device, m, n, k, dtype):
    def build(g):
        a, b = pair(g, m=m, n=n, k=k, left=dtype, right=dtype)
        done(g.matmul(a, b), dtype=dtype)

    check_graph(build, device)


PROLOGUES = {
    "relu(A)": lambda g, a, b: (g.relu(a), b),
    "A * scale column": lambda g, a, b: (g.mul(a, vector(g, (2, 1, 11), "s")), b),
    "A * scale row, B + 1": lambda g, a, b: (g.mul(a, vector(g, (2, 5, 1), "s")), g.add(b, 1.0)),
    "sigmoid(B)": lambda g, a, b: (a, g.sigmoid(b)),
    "A transposed view": lambda g, a, b: (g.transpose(g.neg(g.tensor(dim=(2, 11, 5), layout="row", data_type=F32, name="at")), [0, 2, 1]), b),
    "A sliced": lambda g, a, b: (
        g.slice(g.tensor(dim=(2, 9, 22), layout="row", data_type=F32, name="wide"), [slice(None), slice(2, 7), slice(0, 22, 2)]),
        b,
    ),
    "A concatenated": lambda g, a, b: (
        g.concatenate(
            [g.tensor(dim=(2, 5, 4), layout="row", data_type=F32, name="p"), g.tensor(dim=(2, 5, 7), layout="row", data_type=F32, name="q")], axis=2
        ),
        b,
    ),
    "A reshaped": lambda g, a, b: (
        g.reshape(g.tensor(dim=(10, 11), layout="row", data_type=F32, name="flat")).set_dim((2, 5, 11)).set_stride((55, 11, 1)),
        b,
    ),
    "index": lambda g, a, b: (g.add(a, g.gen_index(a, axis=2)), b),
}


def vector(g, dim, name, dtype=F32):
    return g.tensor(dim=dim, layout="row", data_type=dtype, name=name)


@pytest.mark.parametrize("name", PROLOGUES)
def test_prologues(device, name):
    def build(g):
        a, b = PROLOGUES[name](g, *pair(g))
        done(g.matmul(a, b))

    check_graph(build, device, graph={"compute_data_type": F32})


EPILOGUES = {
    "scale bias gelu": lambda g, c: g.gelu(g.add(g.mul(c, 0.5), vector(g, (1, 1, 7), "bias"))),
    "row bias": lambda g, c: g.add(c, vector(g, (2, 5, 1), "bias")),
    "batch bias": lambda g, c: g.mul(c, vector(g, (2, 1, 1), "bias")),
    "broadcast operand first": lambda g, c: g.sub(vector(g, (1, 1, 7), "bias"), c),
    "residual half": lambda g, c: g.add(c, vector(g, (2, 5, 7), "residual", D.HALF)),
    "residual column-major": lambda g, c: g.add(g.tensor(dim=(2, 5, 7), stride=(35, 1, 5), data_type=F32, name="residual"), c),
    "mask": lambda g, c: g.binary_select(c, g.neg(c), g.cmp_ge(g.gen_index(c, axis=1), g.gen_index(c, axis=2))),
    "twice": lambda g, c: g.mul(c, g.sigmoid(c)),
    "squared": lambda g, c: g.mul(c, c),
}


@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.parametrize("out", [F32, D.BFLOAT16], ids=lambda d: d.name)
def test_epilogues(device, name, out):
    def build(g):
        y = EPILOGUES[name](g, g.matmul(*pair(g)))
        done(y, dtype=out).set_dim((2, 5, 7)).set_stride((35, 7, 1))

    check_graph(build, device, graph={"compute_data_type": F32})


def test_several_outputs_from_one_epilogue(device):
    def build(g):
        c = done(g.matmul(*pair(g)), "c", D.HALF)
        r = done(g.relu(c), "r")
        done(g.cmp_gt(r, 0.25), "mask", D.BOOLEAN)
        done(g.add(r, c), "sum", D.BFLOAT16).set_dim((2, 5, 7)).set_stride((1, 14, 2))

    check_graph(build, device, graph={"compute_data_type": F32})


@pytest.mark.parametrize("mode", ["AMAX", "MAX", "ADD", "AVG", "NORM2", "MIN"])
@pytest.mark.parametrize("dim", [(1, 1, 1), (2, 1, 1), (1, 1, 7), (2, 5, 1), (2, 1, 7)], ids=str)
def test_epilogue_reductions(device, mode, dim):
    def build(g):
        m, n, k = 5, 7, 11
        c = g.relu(g.matmul(*pair(g, m=m, n=n, k=k)))
        done(c, "c")
        done(g.reduction(c, graphdnn.reduction_mode[mode]).set_dim(dim), "r")

    check_graph(build, device, graph={"compute_data_type": F32})


def test_fp8_training_pattern(device):
    """matmul, scale, bias, GELU, AMAX, cast to fp8: the graph of the first example."""
    m, n, k = (70, 90, 50) if device != "cudasim" else (9, 10, 6)

    def build(g):
        a, b = pair(g, m=m, n=n, k=k, left=D.FP8_E4M3, right=D.FP8_E4M3)
        scale = g.tensor(dim=[1, 1, 1], stride=[1, 1, 1], is_pass_by_value=True, data_type=F32, name="scale")
        y = g.gelu(g.add(g.mul(g.matmul(a, b), scale), vector(g, (1, 1, n), "bias", D.BFLOAT16)))
        done(g.reduction(y, graphdnn.reduction_mode.AMAX).set_dim([1, 1, 1]), "amax")
        done(y, "y", D.FP8_E4M3)

    check_graph(build, device, values={"scale": 0.125}, graph={"intermediate_data_type": F32, "compute_data_type": F32})


@pytest.mark.parametrize("mode", ["MAX", "ADD"])
def test_chain_matmul_pointwise_reduction_pointwise_matmul(device, mode):
    def build(g):
        a, b = pair(g)
        s = g.mul(g.matmul(a, b), 0.3)
        top = g.reduction(s, graphdnn.reduction_mode[mode]).set_dim((2, 5, 1))
        p = g.tanh(g.sub(s, top))
        c = g.tensor(dim=(2, 7, 4), layout="column", data_type=F32, name="c")
        done(g.add(g.matmul(p, c), top))

    check_graph(build, device, graph={"compute_data_type": F32})


def test_nan_and_infinities(device):
    """0 * inf and inf - inf are NaN; an untouched row stays finite."""

    def build(g):
        done(g.matmul(*pair(g, b=(2,))))

    check_graph(build, device, data={"a": Data("special", -1, 1), "b": Data("normal")}, may_exclude=0.5)


@pytest.mark.parametrize("dtype", [F32, D.BFLOAT16, D.INT8, D.DOUBLE], ids=lambda d: d.name)
def test_every_candidate_plan(device, dtype):
    """All engines and knobs, cut and uncut, give the same numbers within the bound, and the same bits on every run."""
    m, n, k = (37, 50, 29) if device != "cudasim" else (5, 6, 4)

    def build(g):
        a, b = pair(g, m=m, n=n, k=k, left=dtype, right=dtype)
        c = g.matmul(g.abs(a).set_data_type(dtype), b)
        done(g.relu(c), "y", {D.INT8: D.INT32}.get(dtype, dtype))

    check_graph(build, device, every_plan=True)
