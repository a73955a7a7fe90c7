"""Slice, transpose, reshape, concatenate: alone, fused, chained, on every width of element."""

from __future__ import annotations

import itertools

import pytest

import graphdnn
from graphdnn import data_type
from graphdnn.dtypes import info, storable
from tests.helpers import check_graph

F32 = data_type.FLOAT
TYPES = [d for d in storable() if info(d).bits >= 8]
DIM = (4, 3, 10)
MOVES = {
    "slice": lambda g, x: g.slice(x, [slice(1, 3), slice(None), slice(2, 9, 3)]),
    "slice negative": lambda g, x: g.slice(x, [slice(-3, -1), slice(0, 2), slice(-10, None, 4)]),
    "transpose": lambda g, x: g.transpose(x, [2, 0, 1]),
    "swap": lambda g, x: g.transpose(x, [0, 2, 1]),
    "reshape merge": lambda g, x: g.reshape(x).set_dim([12, 10]).set_stride([10, 1]),
    "reshape split": lambda g, x: g.reshape(x).set_dim([2, 2, 3, 5, 2]).set_stride([60, 30, 10, 2, 1]),
    "reshape mix": lambda g, x: g.reshape(x).set_dim([8, 15]).set_stride([15, 1]),
    "reshape flat": lambda g, x: g.reshape(x).set_dim([120]).set_stride([1]),
    "reshape logical": lambda g, x: g.reshape(x, reshape_mode=graphdnn.reshape_mode.LOGICAL).set_dim([5, 24]).set_stride([24, 1]),
    "concatenate": lambda g, x: g.concatenate([x, _other(g, x, 1), x], axis=1),
    "concatenate last": lambda g, x: g.concatenate([_other(g, x, 2), x], axis=2),
}


def _other(g, x, axis):
    dim = [2 if a == axis else d for a, d in enumerate(DIM)]
    return g.tensor(dim=dim, layout="channels_last", data_type=x.get_data_type(), name="other")


def _input(g, dtype, stride=(30, 10, 1)):
    return g.tensor(dim=DIM, stride=stride, data_type=dtype, name="x")


def _output(t, dtype):
    return t.set_name("y").set_output(True).set_data_type(dtype)


@pytest.mark.parametrize(
    "dtype", [F32, data_type.BFLOAT16, data_type.FP8_E4M3, data_type.DOUBLE, data_type.INT64, data_type.BOOLEAN], ids=lambda d: d.name
)
@pytest.mark.parametrize("move", MOVES)
def test_alone(device, move, dtype):
    check_graph(lambda g: _output(MOVES[move](g, _input(g, dtype)), dtype), device)


@pytest.mark.parametrize("stride", [(1, 4, 12), (30, 1, 3), (80, 25, 2), (0, 10, 1)], ids=str)
@pytest.mark.parametrize("move", MOVES)
def test_alone_on_other_layouts(device, move, stride):
    def build(g):
        y = _output(MOVES[move](g, _input(g, F32, stride)), F32)
        if 0 in stride:  # the view inherits the repeat; an output may not overlap itself
            dim = {"slice": [2, 3, 3], "slice negative": [2, 2, 3], "transpose": [10, 4, 3], "swap": [4, 10, 3]}.get(move)
            if dim:
                y.set_dim(dim).set_stride([dim[1] * dim[2], dim[2], 1])
            elif move.startswith("concatenate"):
                d1, d2 = (3 + 2 + 3, 10) if move == "concatenate" else (3, 12)
                y.set_dim([4, d1, d2]).set_stride([d1 * d2, d2, 1])

    check_graph(build, device, offsets={"x": 1})


@pytest.mark.parametrize("move", MOVES)
def test_between_pointwise_ops(device, move):
    def build(g):
        x = g.add(_input(g, F32), 1.0).set_data_type(F32)
        y = MOVES[move](g, x).set_data_type(F32)
        _output(g.relu(y), F32)

    check_graph(build, device, graph={"compute_data_type": F32})


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("mode", ["ADD", "MAX"])
def test_before_a_reduction(device, move, mode):
    def build(g):
        y = MOVES[move](g, _input(g, data_type.HALF)).set_data_type(data_type.HALF)
        g.reduction(y, graphdnn.reduction_mode[mode], axes=[-1], keepdim=True).set_name("y").set_output(True).set_data_type(F32)

    check_graph(build, device, graph={"compute_data_type": F32})


@pytest.mark.parametrize("move", MOVES)
def test_after_a_reduction(device, move):
    """Its result has to be stored before it is moved."""

    def build(g):
        x = g.tensor(dim=(*DIM, 6), layout="row", data_type=F32, name="wide")
        r = g.reduction(x, graphdnn.reduction_mode.ADD, axes=[3], keepdim=False).set_data_type(F32)
        _output(MOVES[move](g, r).set_data_type(F32), F32)

    check_graph(build, device, graph={"compute_data_type": F32})


@pytest.mark.parametrize(
    "pair",
    list(
        itertools.product(
            [m for m in MOVES if m not in ("reshape merge", "reshape mix", "reshape flat", "reshape split", "reshape logical")],
            ["transpose", "slice"],
        )
    ),
    ids=str,
)
def test_chains(device, pair):
    """Two moves of rank 3, then a reshape across what they left."""

    def build(g):
        first = MOVES[pair[0]](g, _input(g, F32)).set_data_type(F32)
        second = g.transpose(first, [2, 1, 0]) if pair[1] == "transpose" else g.slice(first, [slice(0, 2), slice(1, None), slice(None, None, 2)])
        _output(g.identity(second.set_data_type(F32)), F32)

    check_graph(build, device, graph={"compute_data_type": F32})


def test_reshape_of_a_transposed_tensor(device):
    """No strides describe it: a chain of divisions and remainders."""

    def build(g):
        x = g.transpose(_input(g, F32), [1, 2, 0]).set_data_type(F32)
        _output(g.mul(g.reshape(x).set_dim([6, 20]).set_stride([20, 1]).set_data_type(F32), 2.0), F32)

    check_graph(build, device, graph={"compute_data_type": F32})


@pytest.mark.parametrize("dtype", TYPES, ids=lambda d: d.name)
def test_every_type_is_moved_bit_for_bit(device, dtype):
    """All four ops in one graph on every data type; NaN payloads and negative zeros included where the type has them."""

    def build(g):
        x = _input(g, dtype)
        for name in ("slice", "transpose", "reshape mix", "concatenate"):
            MOVES[name](g, x).set_name(name).set_output(True).set_data_type(dtype)

    check_graph(build, device)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_concatenate_of_many(device, axis):
    def build(g):
        parts = []
        for i in range(5):
            dim = list(DIM)
            dim[axis] = i + 1
            parts.append(g.tensor(dim=dim, layout=("row", "channels_last")[i % 2], data_type=F32, name=f"p{i}"))
        _output(g.concatenate(parts, axis=axis), F32)

    check_graph(build, device)


def test_move_feeds_both_sides(device):
    """x[:, :5] * x[:, 5:]: gating, one tensor read through two maps."""

    def build(g):
        x = _input(g, data_type.BFLOAT16)
        a = g.slice(x, [slice(None), slice(None), slice(0, 5)]).set_data_type(data_type.BFLOAT16)
        b = g.slice(x, [slice(None), slice(None), slice(5, 10)]).set_data_type(data_type.BFLOAT16)
        _output(g.mul(g.swish(a), b), data_type.BFLOAT16).set_dim((4, 3, 5)).set_stride((15, 5, 1))

    check_graph(build, device, graph={"compute_data_type": F32})
