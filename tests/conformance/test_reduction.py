"""Every reduction mode over every set of axes, on every data type, with and without splitting."""

from __future__ import annotations

import itertools
import math

import pytest

import graphdnn
from graphdnn import data_type
from graphdnn.dtypes import info, storable
from graphdnn.opspecs.reduction import REDUCTION
from tests.helpers import Data, check_graph

F32 = data_type.FLOAT
MODES = sorted(REDUCTION)
TYPES = [d for d in storable() if info(d).bits >= 8 and d is not data_type.FP8_E8M0]
DIM = (3, 4, 5)
AXES = [a for n in range(4) for a in itertools.combinations(range(3), n)]


def kept(dim, axes):
    return [1 if a in axes else d for a, d in enumerate(dim)]


def all_modes(dim, axes, dtype, stride=None, modes=MODES, out=None, compute=data_type.NOT_SET):
    """A builder: every mode over ``axes`` of one input."""

    def build(g):
        x = g.tensor(dim=dim, data_type=dtype, name="x", **({"stride": stride} if stride else {"layout": "row"}))
        for mode in modes:
            y = g.reduction(x, graphdnn.reduction_mode[mode], compute_data_type=compute)
            y.set_dim(kept(dim, axes)).set_name(mode).set_output(True).set_data_type(out or wide(dtype))

    return build


def wide(dtype):
    return data_type.DOUBLE if dtype is data_type.DOUBLE else F32 if info(dtype).kind == "f" else data_type.INT64


def data_for(dtype):
    return {"x": Data("uniform", -2, 2)} if info(dtype).kind == "f" else {}


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_every_mode_over_every_set_of_axes(device, axes):
    check_graph(all_modes(DIM, axes, F32), device, data=data_for(F32))


@pytest.mark.parametrize("axes", [(2,), (0, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("dtype", [d for d in TYPES if d is not F32], ids=lambda d: d.name)
def test_every_mode_on_every_type(device, dtype, axes):
    check_graph(all_modes(DIM, axes, dtype), device, data=data_for(dtype))


@pytest.mark.parametrize("dtype", TYPES, ids=lambda d: d.name)
def test_result_in_the_type_of_the_input(device, dtype):
    """Results are rounded (floats), or saturated or wrapped (integers), to the output's type."""
    check_graph(all_modes((2, 40), (1,), dtype, out=dtype), device, data=data_for(dtype))


@pytest.mark.parametrize("stride", [(1, 3, 12), (20, 1, 4), (60, 14, 2), (0, 5, 1), (20, 5, 0)], ids=str)
@pytest.mark.parametrize("axes", [(0,), (2,), (0, 2)], ids=str)
def test_layouts(device, stride, axes):
    check_graph(all_modes(DIM, axes, F32, stride, modes=["ADD", "MAX", "NORM2"]), device, data=data_for(F32), offsets={"x": 3})


@pytest.mark.parametrize("axes", [(1,), (0, 1)], ids=str)
def test_nan_and_infinities(device, axes):
    check_graph(all_modes((4, 33), axes, F32), device, data={"x": Data("special", -1, 1)}, may_exclude=0.5)


LONG = {
    "one long row": ((1, 70_000), (1,)),
    "few long rows": ((3, 20_001), (1,)),
    "few long columns": ((20_001, 3), (0,)),
    "everything": ((129, 257), (0, 1)),
    "middle": ((2, 5000, 3), (1,)),
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("dtype", [F32, data_type.BFLOAT16, data_type.INT32], ids=lambda d: d.name)
def test_sizes_where_one_block_would_starve(device, name, dtype):
    """On the simulator the same graphs, shrunk; its block sizes are small, so they split too."""
    dim, axes = LONG[name]
    if device == "cudasim":
        dim = tuple(math.ceil(d / 60) if d > 100 else d for d in dim)
    modes = ["ADD", "AVG", "MAX", "AMAX", "NORM2"]
    check_graph(all_modes(dim, axes, dtype, modes=modes), device, data={"x": Data("uniform", -1, 3)} if info(dtype).kind == "f" else {})


@pytest.mark.parametrize("size", [1, 2, 31, 32, 33, 63, 64, 65, 127, 129, 255, 257, 1023, 1025])
def test_tails(device, size):
    """A tail is padded with the identity: all-negative input for MAX, values near 1 for MUL."""
    size = size % 150 + 1 if device == "cudasim" else size

    def build(g):
        x = g.tensor(dim=[2, size], stride=[size, 1], data_type=F32, name="x")
        y = g.tensor(dim=[2, size], stride=[size, 1], data_type=F32, name="near_one")
        for mode in ("MAX", "ADD", "AVG", "MIN"):
            g.reduction(x, graphdnn.reduction_mode[mode]).set_dim([2, 1]).set_name(mode).set_output(True).set_data_type(F32)
        g.reduction(y, graphdnn.reduction_mode.MUL).set_dim([2, 1]).set_name("MUL").set_output(True).set_data_type(F32)

    check_graph(build, device, data={"x": Data("uniform", -9, -4), "near_one": Data("uniform", 0.99, 1.01)})


@pytest.mark.parametrize("dim", [(0,), (3, 0), (0, 3), (2, 0, 3)], ids=str)
def test_empty(device, dim):
    check_graph(all_modes(dim, [a for a, d in enumerate(dim) if d == 0], F32), device)


def test_prologue_and_epilogue(device):
    """Mean and variance by hand, then a normalization: two reductions, each consumed by pointwise ops."""

    def build(g):
        x = g.tensor(dim=[4, 37], stride=[37, 1], data_type=data_type.HALF, name="x")
        mean = g.reduction(x, graphdnn.reduction_mode.AVG).set_dim([4, 1])
        centered = g.sub(x, mean)
        variance = g.reduction(g.mul(centered, centered), graphdnn.reduction_mode.AVG).set_dim([4, 1]).set_name("variance").set_output(True)
        variance.set_data_type(F32)
        y = g.mul(centered, g.rsqrt(g.add(variance, 1e-5)))
        y.set_name("y").set_output(True).set_data_type(data_type.HALF)

    check_graph(build, device, graph={"intermediate_data_type": F32, "compute_data_type": F32})


def test_softmax_by_hand(device):
    def build(g):
        x = g.tensor(dim=[2, 3, 19], stride=[57, 19, 1], data_type=F32, name="x")
        m = g.reduction(x, graphdnn.reduction_mode.MAX).set_dim([2, 3, 1])
        e = g.exp(g.sub(x, m))
        g.div(e, g.reduction(e, graphdnn.reduction_mode.ADD).set_dim([2, 3, 1])).set_name("y").set_output(True).set_data_type(F32)

    check_graph(build, device, data={"x": Data("normal", hi=10)})


def test_same_bits_on_every_run_and_for_every_plan(device):
    """Sums are added in a fixed order; every candidate plan agrees within the bound."""
    dim = (3, 5000) if device != "cudasim" else (3, 120)
    check_graph(all_modes(dim, (1,), F32, modes=["ADD", "NORM2"]), device, data=data_for(F32), every_plan=True, runs=3)
