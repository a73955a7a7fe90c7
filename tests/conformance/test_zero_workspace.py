"""Contractions in plans that need no workspace: on a CPU one output after the other, elsewhere by the usual kernels."""

from __future__ import annotations

import pytest

from graphdnn import data_type
from tests.helpers import Data, check_graph

D = data_type
TYPES = {"workspace_limit": 0, "compute_data_type": D.FLOAT, "intermediate_data_type": D.FLOAT, "io_data_type": D.FLOAT}


def matmul(g, io=D.FLOAT):
    """gelu(s * (relu(a) @ b)): a padded, b transposed and shared by the batches, s a column."""
    a = g.tensor(dim=(2, 5, 37), stride=(37 * 6, 37, 1), data_type=io, name="a")
    b = g.tensor(dim=(1, 37, 9), stride=(1, 1, 37), data_type=io, name="b")
    s = g.tensor(dim=(1, 5, 1), layout="row", data_type=D.FLOAT, name="s")
    g.gelu(g.mul(g.matmul(g.relu(a), b), s)).set_output(True).set_data_type(io)


def integers(g):
    a, b = g.tensor(dim=(2, 5, 37), layout="row", data_type=D.INT8, name="a"), g.tensor(dim=(2, 37, 9), layout="column", data_type=D.INT8, name="b")
    g.matmul(a, b, compute_data_type=D.INT32).set_output(True).set_data_type(D.INT32)


def no_products(g):
    a, b = g.tensor(dim=(2, 5, 0), layout="row", name="a"), g.tensor(dim=(2, 0, 9), layout="row", name="b")
    g.matmul(a, b).set_output(True)


def convolution(g):
    """relu of a convolution in two groups, strided along one dim and dilated along the other."""
    x, w = g.tensor(dim=(2, 6, 9, 7), layout="channels_last", name="x"), g.tensor(dim=(4, 3, 3, 2), layout="row", name="w")
    g.relu(g.conv_fprop(image=x, weight=w, padding=[1, 0], stride=[2, 1], dilation=[1, 2])).set_output(True)


def data_gradient(g):
    dy, w = g.tensor(dim=(2, 4, 5, 5), layout="channels_last", name="dy"), g.tensor(dim=(4, 3, 3, 3), layout="row", name="w")
    g.conv_dgrad(loss=dy, filter=w, padding=[1, 1], stride=[2, 2], dilation=[1, 1]).set_output(True).set_dim((2, 3, 9, 9))


def weight_gradient(g):
    dy, x = g.tensor(dim=(2, 4, 5, 5), layout="channels_last", name="dy"), g.tensor(dim=(2, 3, 9, 9), layout="row", name="x")
    g.conv_wgrad(loss=dy, image=x, padding=[1, 1], stride=[2, 2], dilation=[1, 1]).set_output(True).set_dim((4, 3, 3, 3))


@pytest.mark.parametrize("build", [matmul, integers, no_products, convolution, data_gradient, weight_gradient])
def test_contraction(device, build):
    outcome = check_graph(build, device, graph=TYPES)
    assert outcome.graph.get_workspace_size() == 0
    assert device != "cpu" or outcome.graph.plan.choices[0].knobs in ("PlainCpu()", "LanesCpu(rows=1, groups=8)")


@pytest.mark.parametrize("io", [D.HALF, D.BFLOAT16, D.DOUBLE, D.FP8_E4M3], ids=lambda d: d.name)
def test_types(device, io):
    compute = D.DOUBLE if io is D.DOUBLE else D.FLOAT
    check_graph(lambda g: matmul(g, io), device, graph=TYPES | {"compute_data_type": compute, "intermediate_data_type": compute})


def test_extremes(device):
    """NaN, infinities and the largest values go through the products as they do elsewhere."""
    check_graph(matmul, device, graph=TYPES, data={"a": Data("special"), "b": Data("uniform")}, may_exclude=0.9)
