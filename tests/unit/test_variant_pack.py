"""Binding of variant packs: keys, values, checks, overlaps, by-value numbers, workspace."""

from __future__ import annotations

import ctypes
import enum
import math
import threading
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from graphdnn import device as devices
from graphdnn.codegen.spec import Buffer, Constant, KernelSpec, Launch, Memset, PointerParam, Recipe, ScalarParam, TensorScalar
from graphdnn.dtypes import data_type, info, numpy_dtype
from graphdnn.errors import KindError, ValidationError
from graphdnn.ir.node import Node
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.ir.tensor import Tensor, TensorDecl
from graphdnn.plans import buffers, scalars
from graphdnn.plans.slots import accepted, prepare

F32 = data_type.FLOAT
CUDA = devices.describe("sm_90")
SIZES = {"x": 1, "bias": 3, "s": 4, "y": 7}
UID = SIZES


def graph(dtype=F32, dim=(2, 3), stride=(3, 1), value=None, **changes):
    """y = (x + bias) * s, with s by value."""
    tensors = {
        "x": Tensor("x", UID["x"], dim, stride, dtype),
        "bias": Tensor("bias", UID["bias"], dim, stride, dtype),
        "s": Tensor("s", UID["s"], (1, 1), (1, 1), F32, by_value=True, value=value),
        "y": Tensor("y", UID["y"], dim, stride, dtype),
        "v": Tensor("v", 9, dim, stride, dtype, virtual=True),
    }
    for name, change in changes.items():
        tensors[name] = replace(tensors[name], **change)
    nodes = (
        Node("POINTWISE", "add", (("IN_0", 0), ("IN_1", 1)), (("OUT_0", 4),), (("mode", "ADD"),), F32),
        Node("POINTWISE", "mul", (("IN_0", 4), ("IN_1", 2)), (("OUT_0", 3),), (("mode", "MUL"),), F32),
    )
    return OperationGraph(tuple(tensors.values()), nodes)


def recipe(workspace=0, alignment=16):
    pointers = tuple(PointerParam(n, "float32", alignment, n == "y") for n in ("x", "bias", "y"))
    spec = KernelSpec("t", "k", (*pointers, ScalarParam("s", "float32"), ScalarParam("one", "float32")))
    args = (Buffer("tensor", 0), Buffer("tensor", 1), Buffer("tensor", 3), TensorScalar(2, "float32"), Constant(1.0, "float32"))
    steps = (Memset(Buffer("workspace", 0, 0), workspace),) if workspace else ()
    return Recipe((spec,), (*steps, Launch(0, 6, args)), workspace)


def binder(g=None, device=None, workspace=0, space=(2, 3), alignment=16, **kwargs):
    return prepare(g or graph(), device or devices.cpu(), recipe(workspace, alignment), space, **kwargs)


def arrays(dtype=np.float32):
    return {n: np.zeros((2, 3), dtype) for n in ("x", "bias", "y")}


def address(a):
    return a.__array_interface__["data"][0]


# ---------------------------------------------------------------------------------------------------------------------------------------- keys
def test_keys_by_uid_name_tensor_and_enum():
    class Key(enum.IntEnum):
        X = 1

    a = arrays()
    decl = TensorDecl(name="other name", uid=3)
    pointers, numbers, workspace = binder().bind({Key.X: a["x"], decl: a["bias"], "y": a["y"], np.int64(4): 2.5}, None)
    assert pointers == {0: address(a["x"]), 1: address(a["bias"]), 3: address(a["y"])}
    assert dict(numbers) == {2: 2.5} and workspace == 0


def test_none_keys_and_extra_uids_are_ignored():
    a = arrays()
    binder().bind({1: a["x"], 3: a["bias"], 7: a["y"], 4: 1.0, None: object(), 99: a["x"], "unknown": 5, TensorDecl(): a["y"]}, None)


def test_uid_0_is_legal():
    a = arrays()
    pointers, _, _ = binder(graph(x={"uid": 0})).bind({0: a["x"], 3: a["bias"], 7: a["y"], 4: 1.0}, None)
    assert pointers[0] == address(a["x"])


def test_a_key_of_another_kind():
    with pytest.raises(KindError, match="key"):
        binder().bind({1.5: np.zeros(3)}, None)


def test_a_name_of_two_tensors_is_no_key():
    b = binder(graph(bias={"name": "x"}))
    with pytest.raises(ValidationError, match="several"):
        b.bind({"x": np.zeros(6, np.float32)}, None)
    a = arrays()
    b.bind({1: a["x"], 3: a["bias"], "y": a["y"], "s": 1}, None)


@pytest.mark.parametrize("name", UID)
def test_a_missing_buffer_is_named(name):
    pack = {UID[n]: a for n, a in arrays().items()} | {4: 1.0}
    del pack[UID[name]]
    with pytest.raises(ValidationError, match=rf"missing buffer for uid {UID[name]} \('{name}'\)"):
        binder().bind(pack, None)
    with pytest.raises(ValidationError, match=rf"missing buffer for uid {UID[name]} \('{name}'\)"):
        binder().bind(pack | {UID[name]: None}, None)


# ---------------------------------------------------------------------------------------------------------------------------------------- values
class Interface:
    """Shows an array by ``__array_interface__`` only."""

    def __init__(self, array):
        self.__array_interface__ = array.__array_interface__
        self.keep = array


class Dlpack:
    """Shows an array by DLPack only."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class CudaArray:
    """A GPU array as cupy and numba show theirs."""

    def __init__(self, pointer=0x7F0000000000, shape=(2, 3), typestr="<f4", strides=None, read_only=False, index=None):
        self.__cuda_array_interface__ = {"version": 3, "shape": shape, "typestr": typestr, "data": (pointer, read_only), "strides": strides}
        if index is not None:
            self.device = type("Device", (), {"id": index})()


FORMS = {
    "numpy": lambda a: a,
    "torch": torch.from_numpy,
    "array interface": Interface,
    "dlpack of numpy": Dlpack,
    "dlpack of torch": lambda a: Dlpack(torch.from_numpy(a)),
    "pointer": address,
    "numpy integer": lambda a: np.uint64(address(a)),
    "parameter": lambda a: torch.nn.Parameter(torch.from_numpy(a), requires_grad=False),
    "subclass": lambda a: a.view(type("Sub", (np.ndarray,), {})),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_kind_of_host_buffer(form):
    a = arrays()
    for _ in range(2):  # the second bind takes the short way
        pointers, _, _ = binder().bind({1: FORMS[form](a["x"]), 3: FORMS[form](a["bias"]), 7: FORMS[form](a["y"]), 4: 1.0}, None)
        assert pointers == {0: address(a["x"]), 1: address(a["bias"]), 3: address(a["y"])}


def pack_with(name, value, dtype=np.float32):
    return {UID[n]: a for n, a in arrays(dtype).items()} | {4: 1.0, UID[name]: value}


@pytest.mark.parametrize("value", [[1.0] * 6, "text", b"bytes", object(), np.float32(1)])
def test_what_is_no_buffer(value):
    with pytest.raises(KindError, match=r"'x': buffer for uid 1 \('x'\) is not a buffer"):
        binder().bind(pack_with("x", value), None)


def test_arrays_without_memory():
    class Broken:
        def __dlpack__(self, **kwargs):
            raise BufferError("no")

        def __dlpack_device__(self):
            return (1, 0)

    for value in (Broken(), torch.zeros(2, 3).to_sparse()):
        with pytest.raises(KindError, match=r"uid 1 \('x'\) has no memory that can be used"):
            binder().bind(pack_with("x", value), None)
    with pytest.raises(ValidationError, match="wrong device.*meta"):
        binder().bind(pack_with("x", torch.empty(2, 3, device="meta")), None)


@pytest.mark.parametrize("value", [2.0, True])
def test_a_number_for_a_tensor_that_is_not_by_value(value):
    with pytest.raises(KindError, match="not a by-value tensor"):
        binder().bind(pack_with("x", value), None)


@pytest.mark.parametrize("form", ["numpy", "torch", "array interface", "dlpack of numpy"])
def test_wrong_data_type(form):
    with pytest.raises(ValidationError, match=r"uid 3 \('bias'\) has the wrong data type.*expected FLOAT.*found int32"):
        binder().bind(pack_with("bias", FORMS[form](np.zeros((2, 3), np.int32))), None)


@pytest.mark.parametrize("dtype", [d for d in data_type if d.name not in ("NOT_SET", "INT8x4", "UINT8x4", "INT8x32", "FAST_FLOAT_FOR_FP8")])
def test_data_types_and_their_storage(dtype):
    g = graph(dtype, dim=(4, 4), stride=(4, 1))
    own = numpy_dtype(dtype)
    for name in accepted(dtype):
        if not hasattr(np, name) and not hasattr(ml_dtypes, name):
            continue
        kind = np.dtype(getattr(np, name)) if hasattr(np, name) else np.dtype(getattr(ml_dtypes, name))
        pack = {u: np.zeros(16, kind) for u in (1, 3, 7)} | {4: 1.0}
        binder(g, space=(4, 4)).bind(pack, None)
    if info(dtype).bits < 8:
        with pytest.raises(ValidationError, match="pack two values a byte"):
            binder(g).bind({u: np.zeros(16, own) for u in (1, 3, 7)} | {4: 1.0}, None)
    else:
        assert own.name in accepted(dtype) and own.itemsize * 8 == info(dtype).bits
    torch_name = info(dtype).torch
    if torch_name is not None:
        pack = {u: torch.zeros(16, dtype=getattr(torch, torch_name)) for u in (1, 3, 7)} | {4: 1.0}
        binder(g, space=(4, 4)).bind(pack, None)


@pytest.mark.parametrize("form", ["numpy", "torch", "array interface", "dlpack of numpy", "dlpack of torch"])
def test_too_small(form):
    with pytest.raises(ValidationError, match=r"uid 3 \('bias'\) is too small.*at least 24 bytes.*found 20 bytes"):
        binder().bind(pack_with("bias", FORMS[form](np.zeros(5, np.float32))), None)


def test_room_is_what_the_memory_has_not_what_the_view_shows():
    g = graph(dim=(2, 3), stride=(10, 1))  # needs 13 elements
    whole = np.zeros((2, 10), np.float32)
    b = binder(g, space=(2, 3))
    for make in (lambda a: a, torch.from_numpy):
        pack = {1: make(whole)[:, :3], 3: make(whole.copy())[:, 3:6], 7: make(whole.copy())[:, 7:], 4: 1}
        b.bind(pack, None)
        with pytest.raises(ValidationError, match="too small"):
            b.bind(pack | {3: make(whole.copy())[1:, :3]}, None)
        with pytest.raises(ValidationError, match="too small"):
            b.bind(pack | {3: make(whole.copy())[:, 8:]}, None)


def test_an_expanded_tensor_has_little_room():
    """1000 elements that are one element of memory."""
    for value in (torch.zeros(1).expand(1000), np.broadcast_to(np.float32(0), (1000,)), torch.zeros(1).expand(2, 3)):
        with pytest.raises(ValidationError, match="too small"):
            binder().bind(pack_with("x", value), None)
    binder(graph(x={"stride": (0, 0)})).bind(pack_with("x", torch.zeros(1).expand(1000)), None)


def test_read_only_output():
    y = np.zeros((2, 3), np.float32)
    y.flags.writeable = False
    for value in (y, Interface(y)):
        with pytest.raises(ValidationError, match="read-only"):
            binder().bind(pack_with("y", value), None)
        binder().bind(pack_with("x", value), None)


def test_null_pointers():
    for value in (0, -8, CudaArray(0)):
        with pytest.raises(ValidationError, match="null pointer"):
            binder(device=CUDA).bind({1: value, 3: 0x1000, 7: 0x2000, 4: 1}, None)


def test_empty_tensors_need_no_memory():
    g = graph(dim=(0, 3), stride=(3, 1))
    binder(g).bind({1: np.zeros((0, 3), np.float32), 3: torch.zeros(0, 3), 7: 0, 4: 1}, None)


def test_sub_byte_extent_is_in_bytes():
    g = graph(data_type.INT4, dim=(3, 3), stride=(3, 1))
    binder(g).bind({u: np.zeros(5, np.uint8) for u in (1, 3, 7)} | {4: 1}, None)
    with pytest.raises(ValidationError, match="at least 5 bytes"):
        binder(g).bind({u: np.zeros(4, np.uint8) for u in (1, 3, 7)} | {4: 1}, None)


# -------------------------------------------------------------------------------------------------------------------------------- device, alignment
def test_host_memory_for_a_cuda_plan():
    for value in (np.zeros((2, 3), np.float32), torch.zeros(2, 3), Dlpack(np.zeros((2, 3), np.float32))):
        with pytest.raises(ValidationError, match=r"wrong device.*found cpu.*device='cpu'"):
            binder(device=CUDA).bind({1: value, 3: 0x1000, 7: 0x2000, 4: 1.0}, None)


def test_gpu_memory_for_a_cpu_plan():
    with pytest.raises(ValidationError, match="wrong device.*found cuda"):
        binder().bind(pack_with("x", CudaArray()), None)


def test_gpu_memory_of_another_gpu():
    device = replace(CUDA, index=1)
    binder(device=device).bind({1: CudaArray(0x1000, index=1), 3: CudaArray(0x2000), 7: 0x3000, 4: 1.0}, None)
    with pytest.raises(ValidationError, match="expected memory of cuda:1, found cuda:0"):
        binder(device=device).bind({1: CudaArray(0x1000, index=0), 3: 0x2000, 7: 0x3000, 4: 1.0}, None)


def test_cuda_arrays_are_checked():
    b = binder(device=CUDA)
    good = {1: CudaArray(0x1000), 3: CudaArray(0x2000), 7: CudaArray(0x3000), 4: 1.0}
    assert b.bind(good, None)[0] == {0: 0x1000, 1: 0x2000, 3: 0x3000}
    with pytest.raises(ValidationError, match="too small"):
        b.bind(good | {1: CudaArray(0x1000, (5,))}, None)
    with pytest.raises(ValidationError, match="wrong data type.*float16"):
        b.bind(good | {1: CudaArray(0x1000, typestr="<f2")}, None)
    with pytest.raises(ValidationError, match="read-only"):
        b.bind(good | {7: CudaArray(0x3000, read_only=True)}, None)
    b.bind(good | {1: CudaArray(0x1000, (2, 3), strides=(64, 4))}, None)


def test_alignment_matters_on_a_gpu_only():
    with pytest.raises(ValidationError, match=r"uid 1 \('x'\) is not aligned.*divisible by 16.*set_alignment\(8\)"):
        binder(device=CUDA).bind({1: 0x1008, 3: 0x2000, 7: 0x3000, 4: 1.0}, None)
    binder(device=CUDA, alignment=4).bind({1: 0x1004, 3: 0x2000, 7: 0x3000, 4: 1.0}, None)
    raw = np.zeros(28, np.uint8)
    binder().bind(pack_with("x", address(raw) + 1), None)


# ---------------------------------------------------------------------------------------------------------------------------------------- overlap
def test_in_place_where_every_element_stays_where_it_is():
    x, bias = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)
    pack = {1: x, 3: bias, 7: x, 4: 1.0}
    binder().bind(pack, None)
    for b in (binder(space=None), binder(graph(x={"stride": (1, 2)})), binder(space=(5, 2, 3))):
        with pytest.raises(ValidationError, match=r"output uid 7 \('y'\) overlaps an input, uid 1 \('x'\)"):
            b.bind(pack, None)
    binder(space=None, inplace=frozenset({(3, 0)})).bind(pack, None)


def test_partial_overlap():
    raw = np.zeros(100, np.float32)
    pack = {1: raw, 3: raw[50:], 4: 1.0}
    binder().bind(pack | {7: raw[6:]}, None)
    for at in (1, 5):
        with pytest.raises(ValidationError, match="overlaps an input"):
            binder().bind(pack | {7: raw[at:]}, None)
    with pytest.raises(ValidationError, match="overlaps"):
        binder().bind(pack | {7: address(raw) + 4}, None)


def test_inputs_may_share_memory():
    x = np.zeros((2, 3), np.float32)
    binder().bind(pack_with("x", x) | {3: x}, None)


def test_interleaved_views_do_not_overlap():
    """Columns 0..2 and 3..5 of one matrix: their byte ranges meet, their elements do not."""
    whole = np.zeros((2, 6), np.float32)
    g = graph(dim=(2, 3), stride=(6, 1))
    binder(g).bind({1: whole[:, :3], 3: whole.copy(), 7: whole[:, 3:], 4: 1}, None)
    with pytest.raises(ValidationError, match="overlaps"):
        binder(g).bind({1: whole[:, :3], 3: whole.copy(), 7: address(whole) + 8, 4: 1}, None)


def test_two_outputs_that_overlap():
    g = graph(bias={"virtual": False})
    twice = (*g.nodes, Node("POINTWISE", "neg", (("IN_0", 0),), (("OUT_0", 1),), (("mode", "NEG"),), F32))
    b = binder(OperationGraph(g.tensors, twice))
    y = np.zeros((2, 3), np.float32)
    with pytest.raises(ValidationError, match="overlaps another output"):
        b.bind({1: np.zeros((2, 3), np.float32), 3: y, 7: y, 4: 1}, None)


# ---------------------------------------------------------------------------------------------------------------------------------------- numbers
NUMBERS = {
    "float": 2.5,
    "int": 2,
    "numpy scalar": np.float64(2.5),
    "numpy 0-d": np.array(2.5, np.float32),
    "numpy 1-element": np.full((1, 1, 1), 2.5, np.float16),
    "torch 0-d": torch.tensor(2.5),
    "torch bf16": torch.full((1, 1), 2.5, dtype=torch.bfloat16),
    "bf16": np.array([2.5], ml_dtypes.bfloat16),
    "bf16 scalar": ml_dtypes.bfloat16(2.5),
    "dlpack": Dlpack(np.array([2.5], np.float32)),
    "bool": True,
}


@pytest.mark.parametrize("form", NUMBERS)
def test_by_value_numbers(form):
    _, numbers, _ = binder().bind(pack_with("s", NUMBERS[form]), None)
    assert numbers[2] == {"int": 2.0, "bool": 1.0}.get(form, 2.5) and isinstance(numbers[2], float)


def test_by_value_numbers_are_read_at_every_bind():
    value, b = torch.tensor(1.0), binder()
    assert b.bind(pack_with("s", value), None)[1][2] == 1.0
    value.fill_(3.0)
    assert b.bind(pack_with("s", value), None)[1][2] == 3.0


@pytest.mark.parametrize("value", [np.zeros(2, np.float32), torch.zeros(3), "1.0", [1.0], np.zeros(0)])
def test_by_value_takes_one_number(value):
    with pytest.raises(ValidationError, match=r"'s': a by-value tensor \(uid 4\) takes one number"):
        binder().bind(pack_with("s", value), None)


def test_a_stored_value_needs_no_buffer_and_may_be_replaced():
    b = binder(graph(value=0.1))
    pack = pack_with("x", np.zeros((2, 3), np.float32))
    del pack[4]
    assert b.bind(pack, None)[1][2] == float(np.float32(0.1))
    assert b.bind(pack | {4: 7}, None)[1][2] == 7.0
    assert b.bind(pack, None)[1][2] == float(np.float32(0.1)), "one execute does not change the next"


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        (data_type.FLOAT, 0.1, float(np.float32(0.1))),
        (data_type.FLOAT, 1e39, math.inf),
        (data_type.FLOAT, 10**400, math.inf),
        (data_type.DOUBLE, 0.1, 0.1),
        (data_type.HALF, 0.1, float(np.float16(0.1))),
        (data_type.HALF, 65519.0, 65504.0),
        (data_type.HALF, -65520.0, -math.inf),
        (data_type.BFLOAT16, 0.1, float(ml_dtypes.bfloat16(0.1))),
        (data_type.BFLOAT16, 1.00390625, 1.0),
        (data_type.BFLOAT16, 3.4e38, math.inf),
        (data_type.BFLOAT16, -math.inf, -math.inf),
        (data_type.FP8_E4M3, 1e6, 448.0),
        (data_type.FP8_E4M3, 0.3, 0.3125),
        (data_type.FP8_E5M2, -1e9, -57344.0),
        (data_type.INT32, 2.5, 2),
        (data_type.INT32, 3.5, 4),
        (data_type.INT32, 1e20, 2**31 - 1),
        (data_type.INT32, math.nan, 0),
        (data_type.INT32, 2**31, -(2**31)),
        (data_type.INT64, -math.inf, -(2**63)),
        (data_type.INT8, 300, 44),
        (data_type.INT8, 300.0, 127),
        (data_type.UINT8, -1, 255),
        (data_type.UINT8, -1.0, 0),
        (data_type.BOOLEAN, 0.5, 1),
        (data_type.BOOLEAN, 0, 0),
    ],
)
def test_numbers_are_rounded_to_the_tensor(dtype, value, expected):
    assert scalars.converter(dtype)(value) == expected


@pytest.mark.parametrize("dtype", [data_type.FLOAT, data_type.DOUBLE, data_type.HALF, data_type.BFLOAT16, data_type.FP8_E4M3])
def test_nan_stays_nan(dtype):
    assert math.isnan(scalars.converter(dtype)(math.nan))


def test_bfloat16_rounds_as_ml_dtypes_does():
    values = np.random.default_rng(0).standard_normal(2000).astype(np.float32) * np.exp2(np.random.default_rng(1).integers(-130, 120, 2000))
    convert = scalars.converter(data_type.BFLOAT16)
    assert [convert(float(v)) for v in values] == values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(float).tolist()


# ---------------------------------------------------------------------------------------------------------------------------------------- workspace
def test_workspace():
    pack = {UID[n]: a for n, a in arrays().items()} | {4: 1.0}
    b = binder(workspace=512)
    for good in (
        np.zeros(512, np.uint8),
        np.zeros(128, np.float32),
        torch.zeros(600, dtype=torch.uint8),
        ctypes.addressof(ctypes.create_string_buffer(512)),
    ):
        at = b.bind(pack, good)[2]
        assert at == (good if isinstance(good, int) else address(good) if isinstance(good, np.ndarray) else good.data_ptr())
    for bad, text in (
        (None, "needs a workspace and none was given; expected 512 bytes"),
        (np.zeros(511, np.uint8), "too small; expected at least 512 bytes .*, found 511"),
        (torch.zeros(0), "too small"),
        (0, "null pointer"),
        (CudaArray(0x1000, (512,), "|u1"), "wrong device"),
    ):
        with pytest.raises(ValidationError, match=text):
            b.bind(pack, bad)
    with pytest.raises(KindError):
        b.bind(pack, "workspace")


def test_workspace_of_a_gpu_plan_is_aligned():
    b, pack = binder(device=CUDA, workspace=512), {1: 0x1000, 3: 0x2000, 7: 0x3000, 4: 1.0}
    assert b.bind(pack, 0x4010)[2] == 0x4010
    with pytest.raises(ValidationError, match="not aligned"):
        b.bind(pack, 0x4008)
    with pytest.raises(ValidationError, match="wrong device"):
        b.bind(pack, np.zeros(512, np.uint8))


@pytest.mark.parametrize("value", [None, 0, np.zeros(0, np.uint8), torch.zeros(0), "anything"])
def test_no_workspace_needed(value):
    assert binder().bind({UID[n]: a for n, a in arrays().items()} | {4: 1.0}, value)[2] == 0


# ---------------------------------------------------------------------------------------------------------------------------------------- the rest
def test_only_what_the_kernels_read_is_asked_for():
    b = binder()
    assert {s.tensor.name for s in b.slots} == {"x", "bias", "y"}


def test_threads_share_a_binder():
    b, failures = binder(), []

    def work():
        a = arrays()
        expected = {0: address(a["x"]), 1: address(a["bias"]), 3: address(a["y"])}
        for n in range(500):
            pointers, numbers, _ = b.bind({1: a["x"], 3: a["bias"], 7: a["y"], 4: n}, None)
            if pointers != expected or numbers[2] != n:
                failures.append(n)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_dlpack_capsules_are_given_back():
    """Looking at a buffer must not keep it alive."""
    import gc
    import weakref

    a = torch.zeros(6)
    seen = weakref.ref(a)
    buffers.facts(Dlpack(a))
    del a
    gc.collect()
    assert seen() is None


def test_negative_strides_reach_back():
    g = graph(bias={"stride": (3, -1)})  # bytes -8 .. 16 around the address
    b, x, y = binder(g), np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)
    whole = np.zeros((2, 3), np.float32)
    pointers, _, _ = b.bind({1: x, 3: whole[:, ::-1], 7: y, 4: 1}, None)
    assert pointers[1] == address(whole) + 8
    b.bind({1: x, 3: torch.zeros(10)[2:], 7: y, 4: 1}, None)
    b.bind({1: x, 3: address(whole) + 8, 7: y, 4: 1}, None)
    for short in (whole, torch.zeros(10), torch.zeros(10)[1:], whole[1:, ::-1]):
        with pytest.raises(ValidationError, match="too small.*in front"):
            b.bind({1: x, 3: short, 7: y, 4: 1}, None)
    raw = np.zeros(20, np.float32)
    with pytest.raises(ValidationError, match="overlaps"):
        b.bind({1: x, 3: address(raw) + 32, 7: raw[1:7], 4: 1}, None)
    b.bind({1: x, 3: address(raw) + 32, 7: raw[:6], 4: 1}, None)


def test_the_log_names_arrays_of_another_order(monkeypatch, capsys):
    """Once a plan: strides are not compared, so a row-major array for a column-major tensor is no error."""
    monkeypatch.setenv("GRAPHDNN_LOG", "warning")
    made = binder(graph(bias={"stride": (1, 2)}, y={"dim": (1, 3), "stride": (7, 1)}))
    pack = {"x": torch.zeros(2, 3), "bias": np.zeros((2, 3), np.float32), "s": 1.0, "y": torch.zeros(1, 3)}
    for _ in range(2):
        made.bind(pack, None)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and "uid 3 ('bias') has the declared dims [2, 3] and strides [3, 1], where [1, 2] are declared" in told[0]
    binder().bind({**pack, "bias": pack["x"], "y": torch.zeros(2, 3)}, None)
    assert not capsys.readouterr().err
