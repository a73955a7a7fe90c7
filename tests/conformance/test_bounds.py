"""The bounds themselves: a reference whose bounds were loose, or that excluded much, would let wrong kernels pass.

The table says, per output data type and number of added terms, how many units in the last place (of the result, or of the largest sum of magnitudes
where terms cancel) the derived bound may be. Derivation: a function costs at most 4 ulp of fp32 by the numerics contract and its operands half an ulp
each; a row with several functions stays under 16 ulp of the largest of operands and result. n terms added in any order in fp32 are within n eps of
the sum of their magnitudes, and a product adds one eps; a rounding to the output adds half a unit of the output's type.
"""

from __future__ import annotations

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type, reference
from graphdnn.dtypes import info
from graphdnn.opspecs.pointwise import POINTWISE
from graphdnn.opspecs.reduction import REDUCTION
from tests.conformance.test_pointwise import apply
from tests.helpers import Data, Setup, given

F32 = data_type.FLOAT
FUNCTION_ULPS = 16
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


EDGES = (0.0, 0.5, 1.0, 2.0, 3.0, 7.0, 10.0, 20.0, 30.0, 39.0, 41.0, 60.0, 88.0, 100.0, 1e4, 1e-3, 1e-6, 1e-20, np.inf)


@pytest.mark.parametrize("mode", sorted(POINTWISE))
def test_functions(mode):
    """All pairs of 200 operands, edges, infinities and NaN among them. The bound covers the row's expression and its reference alike, so a tight
    one says that the two agree: an expression that is wrong anywhere would need a wide bound there."""
    n = 200
    rng = np.random.default_rng(0)
    values = np.concatenate([EDGES, np.negative(EDGES), [np.nan], rng.uniform(-6, 6, n - 2 * len(EDGES) - 1)])
    left, right = np.repeat(values[:, None], n, 1), np.repeat(values[None, :], n, 0)

    def build(g):
        inputs = [g.tensor(dim=[n, n], stride=[n, 1], data_type=F32, name=f"x{i}") for i in range(3)]
        apply(g, mode, inputs).set_name("y").set_output(True).set_data_type(F32)

    value, bound = bounds(build, {"x0": given(left), "x1": given(right), "x2": Data("grid", 0, 1)})["y"]
    unsaid = np.isinf(bound)  # an infinite dY times a slope that may be subnormal or 0
    assert unsaid.mean() < 0.02, f"{unsaid.mean():.1%} of the results have no bound"
    bound = np.where(unsaid, 0, bound)
    operands = np.abs(left) if len(POINTWISE[mode].args) == 1 else np.maximum(np.abs(left), np.abs(right))
    scale = np.maximum(np.where(np.isfinite(operands), operands, 1), np.where(np.isfinite(value), np.abs(value), 1))
    ulps = bound / (2 * info(F32).eps * np.maximum(scale, 2.0**-126))
    at = np.unravel_index(np.argmax(ulps), ulps.shape)
    assert ulps[at] <= FUNCTION_ULPS, f"{ulps[at]:.0f} ulp at {left[at]}, {right[at]}"
    assert (bound[np.isnan(value)] == 0).all(), "NaN is certain"


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
