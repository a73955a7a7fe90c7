"""Reshapes and transposes behind an anchor: they change where its kernel stores, and what follows is calculated in the same loops."""

from __future__ import annotations

import pytest

import graphdnn
from graphdnn import data_type
from tests.helpers import check_graph
from tests.norm_cases import TRAINING, Bench

F32, F16, BF16 = data_type.FLOAT, data_type.HALF, data_type.BFLOAT16
IN_FLOAT = {"io_data_type": F32, "intermediate_data_type": F32, "compute_data_type": F32}


def tensor(g, name, *dim, dtype=F32):
    return g.tensor(dim=dim, layout="row", data_type=dtype, name=name)


def reshaped(g, x, *dim):
    return g.reshape(x, reshape_mode=graphdnn.reshape_mode.LOGICAL).set_dim(dim)


def done(t, name, dtype=F32):
    return t.set_output(True).set_name(name).set_data_type(dtype)


def regions(build, device, count, **kwargs):
    outcome = check_graph(build, device, graph=kwargs.pop("graph", IN_FLOAT), **kwargs)
    assert len(outcome.graph.explain().regions) == count
    return outcome


@pytest.mark.parametrize("dtype", [F32, BF16], ids=lambda d: d.name)
@pytest.mark.parametrize("width", [8, 3])
def test_heads_apart(device, dtype, width):
    """A projection's result as heads, with a bias of each head, stored in another type: one kernel."""
    heads = 24 // width

    def build(g):
        c = g.matmul(tensor(g, "x", 2, 10, 12, dtype=dtype), tensor(g, "w", 1, 12, 24, dtype=dtype))
        y = g.transpose(reshaped(g, c, 2, 10, heads, width), [0, 2, 1, 3])
        done(g.add(y, tensor(g, "bias", 1, heads, 1, width)), "y", BF16)
        done(g.transpose(reshaped(g, c, 2, 10, heads, width), [0, 2, 3, 1]), "z")

    regions(build, device, 1)


def test_a_view_that_merges_nothing(device):
    """Rows of 10 as rows of 4: quotients and remainders in the index of the store."""

    def build(g):
        c = g.matmul(tensor(g, "x", 2, 6, 7), tensor(g, "w", 1, 7, 10))
        done(g.mul(reshaped(g, c, 30, 4), tensor(g, "scale", 30, 1)), "y")

    regions(build, device, 1)


def test_a_view_read_elsewhere_too(device):
    """The transposed value is stored, its sums read what it comes from."""

    def build(g):
        y = g.transpose(g.relu(g.matmul(tensor(g, "x", 1, 6, 7), tensor(g, "w", 1, 7, 10))), [0, 2, 1])
        done(g.reduction(g.mul(y, y), graphdnn.reduction_mode.ADD).set_dim((1, 10, 1)), "sums")
        done(y, "y", F16)

    check_graph(build, device, graph=IN_FLOAT)


@pytest.mark.parametrize("groups", [1, 2])
def test_channels_of_a_convolution_in_groups(device, groups):
    def build(g):
        x, w = tensor(g, "x", 2, 4, 5, 5), tensor(g, "w", 6, 4 // groups, 3, 3)
        y = g.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
        done(g.add(reshaped(g, y, 2, 2, 3, 5, 5), tensor(g, "bias", 1, 2, 3, 1, 1)), "five")
        done(g.transpose(g.relu(y), [0, 2, 3, 1]), "last")

    regions(build, device, 1)


def test_results_and_rows_of_softmax(device):
    def build(g):
        x = tensor(g, "x", 3, 4, 12)
        y = g.softmax(x, -1)
        done(g.mul(g.transpose(reshaped(g, y, 3, 4, 3, 4), [0, 2, 1, 3]), tensor(g, "z", 3, 1, 4, 1)), "y")
        done(g.sqrt(reshaped(g, g.reduction(x, graphdnn.reduction_mode.AMAX, axes=(2,), keepdim=True), 12)), "amax")

    regions(build, device, 1)


@pytest.mark.parametrize("dtype", [F32, F16], ids=lambda d: d.name)
@pytest.mark.parametrize("layout", ["row", "channels_last"])
def test_groupnorm_with_all_around(device, dtype, layout):
    """Residual sum in front (an output), product, residual, relu and mask behind, statistics beside them: one kernel; its gradient: two."""
    dim = (2, 6, 3, 4)

    def build(g):
        b = Bench(g, dtype, layout=layout)
        total = g.add(b.x("x", dim), b.x("residual", dim))
        y, mean, inverse = g.groupnorm(TRAINING, total, *(b.p(n, [1, 6, 1, 1]) for n in ("scale", "bias")), 1e-3, 2)
        kept = g.add(g.mul(y, b.p("gate", [2, 1, 1, 1])), b.x("z", dim))
        mask = g.cmp_gt(kept, 0.0).set_output(True).set_name("mask").set_data_type(data_type.BOOLEAN)
        assert mask is not None
        b.outputs("norm", [total, g.relu(kept), mean, inverse], (2, 3))

    regions(build, device, 1)

    def backward(g):
        b = Bench(g, dtype, layout=layout)
        dz = g.mul(b.x("dy", dim), g.tensor(dim=dim, layout="row", data_type=data_type.BOOLEAN, name="mask"))
        made = g.groupnorm_backward(dz, b.x("x", dim), b.p("scale", [1, 6, 1, 1]), b.p("mean", [2, 2, 1, 1]), b.p("inverse", [2, 2, 1, 1]))
        b.outputs("norm", [dz, g.add(made[0], b.x("other", dim)), *made[1:]], (2, 3))

    regions(backward, device, 2)


def test_values_of_rows_are_calculated_again(device):
    """A second loop nest reads results of rows and the input, not a copy of what was made of them."""

    def build(g):
        x, dy = tensor(g, "x", 3, 4, 10), tensor(g, "dy", 3, 4, 10)
        centred = g.sub(x, g.reduction(x, graphdnn.reduction_mode.AVG, axes=(2,), keepdim=True))
        done(g.mul(centred, g.reduction(g.mul(centred, dy), graphdnn.reduction_mode.AVG, axes=(2,), keepdim=True)), "y")
        done(g.reduction(dy, graphdnn.reduction_mode.ADD, axes=(0,), keepdim=True), "sums")
        done(g.reduction(g.mul(centred, dy), graphdnn.reduction_mode.ADD, axes=(0,), keepdim=True), "products")

    outcome = regions(build, device, 2)
    partition = outcome.graph.plan.partition
    tensors = outcome.graph._opgraph.tensors
    assert [tensors[t].dim for t in partition.materialized] == [(3, 4, 1)]
