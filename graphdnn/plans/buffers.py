"""What can be known of a buffer that a user hands over: address, element type, bytes that may be touched, and where it lives.

torch and NumPy are asked directly; anything else by ``__cuda_array_interface__`` or DLPack. No framework is imported here: one that the user has
not imported has no arrays either.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

from graphdnn.errors import KindError, ValidationError, explain

POINTER, NUMPY, TORCH, OTHER = 1, 2, 3, 4
KINDS: dict[type, int] = {int: POINTER}
"""Kind of a value by its exact type, filled as types are met."""


ADDRESSES = 1 << 64
"""Addresses are below."""


@dataclass(frozen=True, slots=True)
class Facts:
    """``room``: bytes from ``pointer`` to the end of the memory that the buffer may reach; None if unknown (a bare address). ``before``: bytes of
    that memory in front of ``pointer``.
    ``dtype``: NumPy-like name, "" if unknown. ``device``: "cpu", "cuda:0", ... or "" if unknown."""

    pointer: int
    room: int | None = None
    dtype: str = ""
    device: str = ""
    writable: bool = True
    before: int | None = None


def _classify(value: Any) -> int:
    """POINTER, NUMPY, TORCH or OTHER; 0 for what is no buffer."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return TORCH
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return NUMPY
    if (isinstance(value, int) and not isinstance(value, bool)) or (numpy is not None and isinstance(value, numpy.integer)):
        return POINTER
    if numpy is not None and isinstance(value, numpy.generic):  # shows its memory, which is a temporary copy
        return 0
    return OTHER if any(hasattr(value, a) for a in ("__cuda_array_interface__", "__dlpack__", "__array_interface__")) else 0


def facts(value: Any, what: str = "the value", tensor: str | None = None) -> Facts:
    """All that is known of a buffer. ValidationError for an int that is no address, KindError for what is no buffer or does not let itself be looked
    at; both name ``what`` and ``tensor``."""
    cls = type(value)
    kind = KINDS.get(cls, 0) or _classify(value)
    if not kind:
        expected = "an array (NumPy, torch, cupy, DLPack, __cuda_array_interface__) or an int address"
        raise KindError(explain(f"{what} is not a buffer", tensor=tensor, expected=expected, found=cls.__name__))
    KINDS[cls] = kind
    if kind == POINTER:
        if value >= ADDRESSES:
            raise ValidationError(explain(f"{what} is not an address", tensor=tensor, expected="a number of 64 bits", found=f"{int(value):#x}"))
        return Facts(int(value))
    try:
        return _numpy(value) if kind == NUMPY else _torch(value) if kind == TORCH else _other(value)
    except Exception as error:  # the protocols run code of whatever library made the array
        found = f"{cls.__name__}: {type(error).__name__}: {str(error)[:100]}"
        raise KindError(explain(f"{what} has no memory that can be used", tensor=tensor, expected="a strided array", found=found)) from error


def _other(value: Any) -> Facts:
    if hasattr(value, "__cuda_array_interface__"):
        return _interface(value.__cuda_array_interface__, _interface_device(value))
    return _dlpack(value) if hasattr(value, "__dlpack__") else _interface(value.__array_interface__, "cpu")


def _reach(shape: Any, strides: Any, itemsize: int) -> int:
    """Bytes from the first element to one past the highest."""
    if 0 in shape:
        return 0
    if strides is None:
        count = 1
        for n in shape:
            count *= n
        return count * itemsize
    return int(itemsize + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s > 0))


def _numpy(value: Any) -> Facts:
    pointer, read_only = value.__array_interface__["data"]
    room = value.nbytes if value.flags.c_contiguous else _reach(value.shape, value.strides, value.itemsize)
    before = -sum((n - 1) * s for n, s in zip(value.shape, value.strides, strict=True) if s < 0) if value.size else 0
    array, owner = sys.modules["numpy"].ndarray, value
    while isinstance(owner.base, array):
        owner = owner.base
    if owner is not value and (owner.flags.c_contiguous or owner.flags.f_contiguous):
        start = owner.__array_interface__["data"][0]
        room, before = max(room, start + owner.nbytes - pointer), max(before, pointer - start)
    return Facts(pointer, room, value.dtype.name, "cpu", not read_only, before)


def _torch(value: Any) -> Facts:
    if value.is_neg():
        raise TypeError("torch negates what lies in this view whenever it reads it; give resolve_neg() of it")
    pointer = value.data_ptr()
    storage = value.untyped_storage().nbytes()
    before = value.storage_offset() * value.element_size()
    device = str(value.device)
    dtype = str(value.dtype).removeprefix("torch.")
    return Facts(pointer, storage - before, dtype, "cuda:0" if device == "cuda" else device, before=before)


def torch_address(value: Any, nbytes: int) -> int:
    """The address of a contiguous torch tensor of at least ``nbytes``; 0 for any other, which has to be looked at closely."""
    try:
        return int(value.data_ptr()) if value.nbytes >= nbytes and value.is_contiguous() and not value.is_neg() else 0
    except RuntimeError:  # without strides (sparse), without memory of its own (wrapped by torch.func), ...
        return 0


_LETTERS = {"f": "float", "i": "int", "u": "uint", "b": "bool", "V": "void", "c": "complex"}


def _interface(facts: dict[str, Any], device: str) -> Facts:
    text = facts["typestr"]
    bits = 8 * int(text[2:])
    dtype = "bool" if text[1] == "b" else f"{_LETTERS.get(text[1], 'void')}{bits}"
    pointer, read_only = facts["data"]
    return Facts(int(pointer or 0), _reach(facts["shape"], facts.get("strides"), bits // 8), dtype, device, not read_only)


_MAX_SHOWN = 16


def _description(value: Any) -> tuple[int, tuple[Any, ...]]:
    """The address of an array that shows itself by ``__cuda_array_interface__``, and all else that a check can look at."""
    facts = value.__cuda_array_interface__
    pointer, read_only = facts["data"]
    return int(pointer or 0), (facts["typestr"], facts["shape"], facts.get("strides"), read_only, _interface_device(value))


def address_if_known(value: Any, known: set[Any]) -> int:
    """The address of an array on a GPU that is described as one of ``known``; 0 for any other, which has to be looked at closely."""
    try:
        pointer, about = _description(value)
        return pointer if about in known and pointer < ADDRESSES else 0
    except Exception:  # the close look says what is wrong with it
        return 0


def remember(value: Any, known: set[Any]) -> None:
    """Add the description of an array that was found to fit, where it has one."""
    if hasattr(value, "__cuda_array_interface__") and len(known) < _MAX_SHOWN:
        about = _description(value)[1]
        if isinstance(about[1], tuple):
            known.add(about)


def _interface_device(value: Any) -> str:
    """The ordinal where the array tells it (cupy by ``device.id``, others by DLPack); "cuda" where it does not."""
    index = getattr(getattr(value, "device", None), "id", None)
    if index is None and hasattr(value, "__dlpack_device__"):
        index = value.__dlpack_device__()[1]
    return f"cuda:{index}" if isinstance(index, int) else "cuda"


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_SMALL = {
    7: "float8_e3m4",
    8: "float8_e4m3",
    10: "float8_e4m3fn",
    11: "float8_e4m3fnuz",
    12: "float8_e5m2",
    13: "float8_e5m2fnuz",
    14: "float8_e8m0fnu",
    17: "float4_e2m1fn",
}
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_DEVICES = {1: "cpu", 3: "cpu", 11: "cpu"}  # 3 and 11: host memory that CUDA or ROCm has pinned


def _dlpack(value: Any) -> Facts:
    """Facts from the capsule, which is dropped unused: the producer keeps the memory alive as long as ``value`` lives."""
    where, ordinal = (int(x) for x in value.__dlpack_device__())
    capsule = value.__dlpack__(stream=-1) if where == 2 else value.__dlpack__()
    t = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    shape = tuple(t.shape[i] for i in range(t.ndim))
    size = max(1, t.bits * t.lanes // 8)
    strides = tuple(t.strides[i] * size for i in range(t.ndim)) if t.strides else None
    dtype = "bool" if t.code == 6 else _SMALL.get(t.code) or f"{_CODES.get(t.code, 'void')}{t.bits * t.lanes}"
    device = _DEVICES.get(where) or (f"cuda:{ordinal}" if where in (2, 13) else f"DLPack device {where}")
    return Facts((t.data or 0) + t.byte_offset, _reach(shape, strides, size), dtype, device)
