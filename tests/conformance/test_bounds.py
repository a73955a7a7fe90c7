"""The bounds themselves: a reference whose bounds were loose, or that excluded much, would let wrong kernels pass.

The table says, per output data type and number of added terms, how many units in the last place (of the result, or of the largest sum of magnitudes
where terms cancel) the derived bound may be. Derivation: a function costs at most 4 ulp of fp32 by the numerics contract and its operands half an ulp
each; a row with several functions stays under 64 ulp away from its zeros. n terms added in any order in fp32 are within n eps of the sum of their
magnitudes, and a product adds one eps; a rounding to the output adds half a unit of the output's type.
"""

from __future__ import annotations

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type, reference
from graphdnn.dtypes import info
from graphdnn.opspecs.pointwise import POINTWISE
from graphdnn.opspecs.reduction import REDUCTION
from tests.conformance.test_pointwise import apply, operands
from tests.helpers import Data, Setup

F32 = data_type.FLOAT
FUNCTION_ULPS = 64
ADDED_ULPS = {1: 4, 10: 24, 100: 220, 1000: 2100}
"""Terms added -> units of fp32 that the bound may be of the sum of magnitudes."""


def bounds(build, data, compute=F32):
    g = graphdnn.pygraph(device="cpu", compute_data_type=compute, intermediate_data_type=compute)
    build(g)
    g.validate()
    g.build_operation_graph()
    setup = Setup(g._opgraph, "cpu", "numpy")
    setup.fill(0, data, {}, {})
    found = reference.run_with_error(g._opgraph, setup.feeds())
    return {g._opgraph.tensors[i].name: found[i] for i in g._opgraph.outputs}


@pytest.mark.parametrize("mode", sorted(POINTWISE))
def test_functions(mode):
    """Away from zeros, poles and cancellation: positive operands."""

    def build(g):
        apply(g, mode, operands(g, 3, F32)).set_name("y").set_output(True).set_data_type(F32)

    data = {"x0": Data("uniform", 0.3, 0.9), "x1": Data("uniform", 1.1, 1.5), "x2": Data("grid", 0, 1)}
    value, bound = bounds(build, data)["y"]
    assert np.isfinite(bound).all()
    scale = np.maximum(np.abs(value), 0.05)
    assert (bound <= FUNCTION_ULPS * 2 * info(F32).eps * scale).all(), f"{(bound / scale).max() / (2 * info(F32).eps):.0f} ulp"


@pytest.mark.parametrize("mode", sorted(set(REDUCTION)))
@pytest.mark.parametrize("n", ADDED_ULPS)
def test_reductions(mode, n):
    """Positive terms near 1."""

    def build(g):
        x = g.tensor(dim=[3, n], stride=[n, 1], data_type=F32, name="x")
        g.reduction(x, graphdnn.reduction_mode[mode]).set_dim([3, 1]).set_name("y").set_output(True).set_data_type(F32)

    value, bound = bounds(build, {"x": Data("uniform", 0.99, 1.01)})["y"]
    assert (bound <= ADDED_ULPS[n] * 2 * info(F32).eps * np.abs(value)).all()
    if mode in ("MAX", "MIN", "AMAX"):
        assert (bound == 0).all(), "a choice among the terms is exact"


@pytest.mark.parametrize("n", ADDED_ULPS)
@pytest.mark.parametrize("out", [F32, data_type.BFLOAT16, data_type.HALF, data_type.FP8_E4M3], ids=lambda d: d.name)
def test_matmul(n, out):
    """Terms of both signs: the bound follows the sum of magnitudes, and the rounding of the output's type."""

    def build(g):
        a = g.tensor(dim=[4, n], stride=[n, 1], data_type=F32, name="a")
        b = g.tensor(dim=[n, 5], stride=[5, 1], data_type=F32, name="b")
        g.matmul(a, b).set_name("y").set_output(True).set_data_type(out)
        g.matmul(g.abs(a), g.abs(b)).set_name("sizes").set_output(True).set_data_type(F32)

    found = bounds(build, {"a": Data("normal"), "b": Data("normal")})
    (value, bound), (sizes, _) = found["y"], found["sizes"]
    room = ADDED_ULPS[n] * 2 * info(F32).eps * sizes
    rounding = 0 if out is F32 else 2 * info(out).eps * (np.abs(value) + room) + 2.0**-9
    assert (bound <= room + rounding).all()
    assert (bound > 0).any() or out is not F32


def test_integers_and_moves_are_exact():
    def build(g):
        x = g.tensor(dim=[4, 6], stride=[6, 1], data_type=data_type.INT32, name="x")
        g.mul(g.add(x, x), x).set_name("y").set_output(True).set_data_type(data_type.INT32)
        g.reduction(x, graphdnn.reduction_mode.ADD).set_dim([4, 1]).set_name("sum").set_output(True).set_data_type(data_type.INT64)
        g.transpose(x, [1, 0]).set_name("t").set_output(True).set_data_type(data_type.INT32)

    for name, (_, bound) in bounds(build, {"x": Data("full")}, data_type.INT32).items():
        assert (bound == 0).all(), name


def test_a_rounding_that_could_go_either_way_widens_the_bound_by_one_unit_only():
    """A sum rounded to bfloat16 near a tie: one unit in the last place, not an infinity."""

    def build(g):
        x = g.tensor(dim=[50, 33], stride=[33, 1], data_type=F32, name="x")
        y = g.reduction(x, graphdnn.reduction_mode.ADD).set_dim([50, 1]).set_data_type(data_type.BFLOAT16)
        g.mul(y, 1.0).set_name("y").set_output(True).set_data_type(F32)

    value, bound = bounds(build, {"x": Data("normal")})["y"]
    assert (bound <= 2.0**-7 * np.maximum(np.abs(value), 0.1)).all()
    assert (bound == 0).sum() > 40, "most sums are far from a tie"
