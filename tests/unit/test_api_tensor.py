"""Class tensor, ways to declare tensors, scalars."""

from __future__ import annotations

import copy
import enum
import json
import pickle

import ml_dtypes
import numpy as np
import pytest

import graphdnn as cudnn
from graphdnn import data_type


@pytest.fixture
def g():
    return cudnn.pygraph(device="cpu", io_data_type=data_type.FLOAT, compute_data_type=data_type.FLOAT)


def test_a_fresh_tensor():
    t = cudnn.tensor()
    assert (t.get_name(), t.get_data_type(), t.get_dim(), t.get_stride(), t.get_uid()) == ("", data_type.NOT_SET, [], [], 0)
    assert not t.get_is_virtual() and not t.get_is_pass_by_value() and not t.get_has_compile_time_constant()
    assert t.get_reordering_type() is cudnn.tensor_reordering.NONE
    assert (t.get_alignment(), t.get_vector_count(), t.get_vector_dimension()) == (16, 1, -1)


def test_setters_return_the_tensor(g):
    t, offset = cudnn.tensor(), g.tensor(dim=[3, 1], stride=[1, 1])
    for call in (
        lambda: t.set_name("x"),
        lambda: t.set_data_type(data_type.HALF),
        lambda: t.set_dim([2, 3]),
        lambda: t.set_stride((3, 1)),
        lambda: t.set_is_virtual(True),
        lambda: t.set_output(True),
        lambda: t.set_is_pass_by_value(True),
        lambda: t.set_uid(0),
        lambda: t.set_reordering_type(cudnn.tensor_reordering.F8_128x4),
        lambda: t.set_ragged_offset(offset),
        lambda: t.set_alignment(4),
        lambda: t.set_vector_count_and_dimension(4, 1),
    ):
        assert call() is t
    assert t.get_dim() == [2, 3] and t.get_stride() == [3, 1] and isinstance(t.get_dim(), list)
    assert not t.get_is_virtual() and t.set_output(False).get_is_virtual()
    assert t.get_uid() == 0 and t.uid == 0, "0 is an explicit uid"
    assert (t.get_alignment(), t.get_vector_count(), t.get_vector_dimension()) == (4, 4, 1)
    assert t.get_reordering_type() is cudnn.tensor_reordering.F8_128x4


def test_identity_semantics(g):
    a, b = (g.tensor(dim=[2], stride=[1]) for _ in range(2))
    assert a == a and a != b and len({a: 1, b: 2}) == 2
    assert not hasattr(a, "__dlpack__")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (data_type.BFLOAT16, "BFLOAT16"),
        ("bfloat16", "BFLOAT16"),
        ("BFLOAT16", "BFLOAT16"),
        ("half", "HALF"),
        (np.float16, "HALF"),
        (np.dtype("int64"), "INT64"),
        (bool, "BOOLEAN"),
        (ml_dtypes.float8_e4m3fn, "FP8_E4M3"),
        (np.dtype(ml_dtypes.bfloat16), "BFLOAT16"),
        (None, "NOT_SET"),
    ],
)
def test_data_types_by_any_name(value, expected):
    assert cudnn.tensor().set_data_type(value).get_data_type().name == expected


def test_torch_data_types():
    import torch
    for name, expected in (("float32", "FLOAT"), ("bfloat16", "BFLOAT16"), ("float8_e5m2", "FP8_E5M2"), ("bool", "BOOLEAN")):
        assert cudnn.tensor().set_data_type(getattr(torch, name)).get_data_type().name == expected
    assert cudnn.tensor().set_dim(torch.Size([2, 3])).get_dim() == [2, 3]


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.set_data_type("no such type"),
        lambda t: t.set_data_type(3),
        lambda t: t.set_dim("12"),
        lambda t: t.set_dim(3),
        lambda t: t.set_dim([1.5]),
        lambda t: t.set_stride([True]),
        lambda t: t.set_uid("a"),
        lambda t: t.set_name(3),
        lambda t: t.set_reordering_type("NONE"),
        lambda t: t.set_ragged_offset(None),
        lambda t: t.set_alignment("4"),
    ],
)
def test_wrong_kinds(call):
    with pytest.raises(TypeError) as caught:
        call(cudnn.tensor())
    assert isinstance(caught.value, cudnn.GraphError)


@pytest.mark.parametrize("value", [0, 3, -4])
def test_alignment_is_a_power_of_two(value):
    with pytest.raises(cudnn.ValidationError, match="power of two"):
        cudnn.tensor().set_alignment(value)


def test_names_can_be_stored():
    with pytest.raises(cudnn.ValidationError, match="surrogate"):
        cudnn.tensor().set_name("a\ud800")
    assert cudnn.tensor().set_name("größe").get_name() == "größe"


def test_repr_is_json(g):
    (found,) = json.loads(repr(g.tensor(dim=[2, 3], stride=[3, 1], data_type=data_type.HALF, name="x", uid=7)))
    assert found == {
        "name": "x", "data_type": "HALF", "dim": [2, 3], "stride": [3, 1], "is_virtual": False, "is_pass_by_value": False, "pass_by_value": None,
        "reordering_type": "NONE", "uid": 7, "uid_assigned": True,
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------------------------------------- pygraph.tensor
def test_tensor_arguments(g):
    class Uid(enum.IntEnum):
        X = 5

    t = g.tensor([4, 2], [1, 4], data_type.INT8, True, False, None, cudnn.tensor_reordering.NONE, "t", Uid.X)
    assert (t.get_dim(), t.get_stride(), t.get_data_type(), t.get_is_virtual(), t.get_name(), t.get_uid()) == (
        [4, 2],
        [1, 4],
        data_type.INT8,
        True,
        "t",
        5,
    )
    assert g.tensor(dim=(2,), stride=(1,)).uid is None and g.tensor(dim=(2,), stride=(1,), uid=0).uid == 0
    assert g.query_tensor_attributes_of_uid(5) is t
    with pytest.raises(RuntimeError, match="99"):
        g.query_tensor_attributes_of_uid(99)


def test_layouts(g):
    assert g.tensor(dim=(2, 3, 4), layout="row").get_stride() == [12, 4, 1]
    assert g.tensor(dim=(), layout="row").dim == ()
    for wrong in ({}, {"stride": [1], "layout": "row"}):
        with pytest.raises(TypeError, match="stride or layout"):
            g.tensor(dim=[2], **wrong)
    for layout in ("diagonal", (0, 0, 1), (0, 1)):
        with pytest.raises(ValueError, match="layout"):
            g.tensor(dim=[2, 3, 4], layout=layout)


def test_missing_or_unknown_arguments(g):
    for call in (lambda: g.tensor(), lambda: g.tensor(dim=[1], stride=[1], shape=[1]), lambda: g.tensor_scalar(1.0)):
        with pytest.raises(TypeError):
            call()


# ----------------------------------------------------------------------------------------------------------------------------------- tensor_like
def test_like_a_graph_tensor(g):
    t = g.tensor(dim=[2, 3], stride=[1, 2], data_type=data_type.HALF, name="t", uid=3).set_alignment(4)
    u = cudnn.pygraph(device="cpu").tensor_like(t, name="u")
    assert (u.get_dim(), u.get_stride(), u.get_data_type(), u.get_alignment(), u.get_name(), u.uid) == ([2, 3], [1, 2], data_type.HALF, 4, "u", None)
    assert g.tensor_like(t).get_name() == ""


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (np.float32, "FLOAT"),
        (np.uint8, "UINT8"),
        (np.int64, "INT64"),
        (np.bool_, "BOOLEAN"),
        (ml_dtypes.bfloat16, "BFLOAT16"),
        (np.int16, "NOT_SET"),
        (np.complex64, "NOT_SET"),
    ],
)
def test_like_a_numpy_array(g, dtype, expected):
    x = np.zeros((2, 3, 4), dtype)[:, ::2].transpose(0, 2, 1)
    t = g.tensor_like(x)
    assert (t.get_dim(), t.get_stride(), t.get_data_type().name) == ([2, 4, 2], [12, 1, 8], expected)
    assert not t.get_is_pass_by_value() and not t.get_is_virtual()


def test_like_one_element_in_host_memory(g):
    for x in (np.zeros((1, 1, 1), np.float32), np.zeros((), ml_dtypes.bfloat16)):
        assert g.tensor_like(x).get_is_pass_by_value()


def test_like_a_torch_tensor(g):
    import torch
    t = g.tensor_like(torch.zeros(4, 3, dtype=torch.bfloat16).t())
    assert (t.get_dim(), t.get_stride(), t.get_data_type(), t.get_is_pass_by_value()) == ([3, 4], [1, 3], data_type.BFLOAT16, False)
    assert g.tensor_like(torch.zeros(1, 1)).get_is_pass_by_value()
    assert g.tensor_like(torch.zeros(4, dtype=torch.float8_e4m3fn)).get_data_type() is data_type.FP8_E4M3


class Dlpack:
    """An array that only knows DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OnDevice:
    __cuda_array_interface__ = {"shape": (2, 3), "typestr": "<f4", "strides": None, "data": (4096, False), "version": 3}


def test_like_other_arrays(g):
    t = g.tensor_like(Dlpack(np.zeros((2, 3), np.float16)))
    assert (t.get_dim(), t.get_stride(), t.get_data_type()) == ([2, 3], [3, 1], data_type.HALF)
    t = g.tensor_like(OnDevice())
    assert (t.get_dim(), t.get_stride(), t.get_data_type(), t.get_is_pass_by_value()) == ([2, 3], [3, 1], data_type.FLOAT, False)


@pytest.mark.parametrize("value", [3, "x", None, [1.0], np.float32(1)])
def test_like_what_is_no_tensor(g, value):
    with pytest.raises(TypeError, match="not a tensor"):
        g.tensor_like(value)


def test_like_arrays_without_our_memory_form(g):
    with pytest.raises(cudnn.ValidationError, match="two"):
        g.tensor_like(np.zeros(4, ml_dtypes.int4))
    odd = np.zeros(24, np.uint8)[1:].view()
    with pytest.raises(cudnn.ValidationError, match="multiples"):
        g.tensor_like(np.lib.stride_tricks.as_strided(odd[:8].view(np.float32), (2,), (5,)))


# --------------------------------------------------------------------------------------------------------------------------------------- scalars
def test_scalars(g):
    kinds = cudnn.scalar_type
    t = g.tensor_scalar(0.1, kinds.RUNTIME_PARAM)
    assert (t.get_dim(), t.get_stride(), t.get_data_type()) == ([1], [1], data_type.FLOAT)
    assert t.get_is_pass_by_value() and not t.get_has_compile_time_constant() and t.value == float(np.float32(0.1))
    assert json.loads(repr(g.tensor_scalar(3.0, kinds.RUNTIME_PARAM)))[0]["pass_by_value"] == {"index": 3, "value": "40400000"}
    t = g.tensor_scalar(7, kinds.COMPILE_TIME_CONST)
    assert t.get_data_type() is data_type.INT32 and t.get_has_compile_time_constant()
    assert g.tensor_scalar(2**40, kinds.COMPILE_TIME_CONST).get_data_type() is data_type.INT64
    assert g.tensor_scalar(1e300, kinds.RUNTIME_PARAM).value == float("inf")
    assert g.tensor_scalar(np.float32(0.5), kinds.RUNTIME_PARAM).value == 0.5
    for value, kind in ((1.0, 0), ("1", kinds.RUNTIME_PARAM), (True, kinds.RUNTIME_PARAM), (None, kinds.RUNTIME_PARAM)):
        with pytest.raises(TypeError):
            g.tensor_scalar(value, kind)
    with pytest.raises(cudnn.ValidationError, match="64 bits"):
        g.tensor_scalar(2**70, kinds.COMPILE_TIME_CONST)


def test_scalars_take_the_rank_of_their_neighbour(g):
    x = g.tensor(dim=[2, 3, 4], layout="row")
    s = g.tensor_scalar(2.0, cudnn.scalar_type.COMPILE_TIME_CONST)
    y = g.mul(s, x)
    g.validate()
    assert s.get_dim() == [1, 1, 1] and y.get_dim() == [2, 3, 4]


def test_numbers_keep_their_digits_beside_doubles():
    g = cudnn.pygraph(device="cpu")
    x = g.tensor(dim=[2], stride=[1], data_type=data_type.DOUBLE)
    y = g.mul(g.add(x, 0.1), 0.1).set_output(True).set_data_type(data_type.DOUBLE)
    g.validate()
    numbers = [t for t in g._tensors if t.constant]
    assert [(t.dtype, t.value) for t in numbers] == [(data_type.DOUBLE, 0.1)] * 2 and y.get_dim() == [2]
    g = cudnn.pygraph(device="cpu", compute_data_type=data_type.FLOAT)
    g.mul(g.tensor(dim=[2], stride=[1], data_type=data_type.HALF), 0.1)
    g.validate()
    (number,) = [t for t in g._tensors if t.constant]
    assert (number.dtype, number.value) == (data_type.FLOAT, float(np.float32(0.1)))


def test_tensors_copy(g):
    t = g.tensor(dim=[2], stride=[1], name="t")
    for other in (copy.deepcopy(t), pickle.loads(pickle.dumps(t))):
        assert other is not t and other.get_dim() == [2] and other.get_name() == "t"
