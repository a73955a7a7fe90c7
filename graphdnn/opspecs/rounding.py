"""Values <-> data types <-> memory, in NumPy, by the numerics contract.

A *value array* is float64 (data types of kind "f") or int64 (integers and BOOLEAN); every value of every data type is exact in it.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np

from graphdnn.dtypes import data_type, info, numpy_dtype
from graphdnn.errors import ValidationError, explain
from graphdnn.ir.tensor import Dims

Array = np.ndarray[Any, np.dtype[Any]]


class Placed(Protocol):
    """What memory access needs of a tensor: ir.tensor.Tensor is one, and so is a declaration whose dims and strides are set."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def dim(self) -> Dims | None:
        """Extents."""

    @property
    def stride(self) -> Dims | None:
        """Strides in elements; may be negative or 0."""

    @property
    def dtype(self) -> data_type:
        """Data type of an element."""


# --------------------------------------------------------------------------------------------------------------------------------- value arrays
def as_values(x: Any) -> Array:
    """Anything array-like as a value array: floats of every width (ml_dtypes too) as float64, integers and bools as int64."""
    found = np.asarray(x)
    kind = found.dtype.kind
    if found.dtype.name in ("int4", "uint4"):
        kind = "i"
    return np.asarray(found, dtype=np.int64 if kind in "iub" else np.float64)


def round_to(x: Any, dtype: data_type) -> Array:
    """The values that ``x`` becomes when it is stored as ``dtype``.

    Float to float: to nearest, ties to even, in one rounding; fp8 and fp4 saturate, NaN stays NaN (fp4: 0); FP8_E8M0: nearest power of two, ties up,
    saturating, negative numbers NaN. Float to integer: half to even, saturates, NaN 0. Integer to integer wraps. Integer to float: to nearest, via
    float32 for the types narrower than that. To BOOLEAN: not 0. Takes a value array or what :func:`as_values` takes.
    """
    values, row = as_values(x), info(dtype)
    if row.kind == "b":
        return np.asarray(values != 0, dtype=np.int64)
    with np.errstate(all="ignore"):
        if row.kind == "i":
            return _saturated(values, dtype) if values.dtype.kind == "f" else _wrapped(values, row.bits, int(row.limits[0]))
        return _to_float(values, dtype)


def _wrapped(values: Array, bits: int, lowest: int) -> Array:
    if bits == 64:
        return values
    return ((values - lowest) & ((1 << bits) - 1)) + lowest


def _saturated(values: Array, dtype: data_type) -> Array:
    lo, hi = (int(v) for v in info(dtype).limits)
    rounded = np.rint(np.where(np.isnan(values), 0.0, values))
    inside = (rounded > float(lo)) & (rounded < float(hi))
    return np.where(inside, np.where(inside, rounded, 0.0).astype(np.int64), np.where(rounded < 0, lo, np.where(rounded >= float(hi), hi, 0)))


def _to_float(values: Array, dtype: data_type) -> Array:
    row = info(dtype)
    if dtype is data_type.DOUBLE:
        return values.astype(np.float64)
    if dtype is data_type.FLOAT or values.dtype.kind == "i":
        values = values.astype(np.float32).astype(np.float64)
        if dtype is data_type.FLOAT:
            return values
    if dtype is data_type.FP8_E8M0:
        return _power_of_two(values)
    if row.bits < 16:
        values = np.clip(np.where(np.isnan(values), 0.0, values) if row.bits == 4 else values, *row.limits)
    return _rounded_to_odd(values).astype(numpy_dtype(dtype)).astype(np.float64)


def _rounded_to_odd(values: Array) -> Array:
    """float32 values that round on to fewer bits as the float64 values do: truncated, with the last bit set where that lost something."""
    single = values.astype(np.float32)
    back = single.astype(np.float64)
    bits = single.view(np.int32)
    odd = np.where(np.abs(back) > np.abs(values), bits - 1, bits) | 1
    inexact = (back != values) & ~np.isnan(values)
    return np.where(inexact, odd, bits).astype(np.int32).view(np.float32)


def _power_of_two(values: Array) -> Array:
    fraction, exponent = np.frexp(np.abs(values))
    power = np.ldexp(1.0, np.clip(np.where(fraction >= 0.75, exponent, exponent - 1), -127, 127))
    power = np.where(values < 2.0**-127, 2.0**-127, np.where(np.isinf(values), 2.0**127, power))
    return np.where(np.isnan(values) | (values < 0), np.nan, power)


# --------------------------------------------------------------------------------------------------------------------------------------- storage
def encode(x: Any, dtype: data_type) -> Array:
    """Stored elements of values (rounded first, see :func:`round_to`), in the NumPy or ml_dtypes type of ``dtype`` and the shape of ``x``.

    4-bit types: a flat uint8 array of the elements in row-major order, two a byte, the even one in the low half.
    """
    values, row = round_to(x, dtype), info(dtype)
    with np.errstate(all="ignore"):
        if row.bits == 8 and row.kind == "f" or row.bits == 16:
            elements = values.astype(np.float32).astype(numpy_dtype(dtype))
        else:
            elements = values.astype(numpy_dtype(dtype))
    return _pack(_nibbles(values, dtype)) if row.bits == 4 else elements


def decode(stored: Any, dtype: data_type, count: int | None = None) -> Array:
    """Values of stored elements: an array of any type of the right element size (bytes for 4-bit types, of which ``count`` elements are taken)."""
    row, raw = info(dtype), np.ascontiguousarray(stored)
    if row.bits == 4:
        flat = raw.reshape(-1).view(np.uint8)
        nibbles = np.stack([flat & 15, flat >> 4], axis=1).reshape(-1)
        return _from_nibbles(nibbles[:count], dtype)
    if row.kind == "b":
        return np.asarray(raw.view(np.uint8) != 0, dtype=np.int64).reshape(raw.shape)
    elements = raw if raw.dtype == numpy_dtype(dtype) else raw.view(numpy_dtype(dtype))
    with np.errstate(all="ignore"):
        return np.asarray(elements, dtype=np.float64 if row.kind == "f" else np.int64).reshape(raw.shape)


def _nibbles(values: Array, dtype: data_type) -> Array:
    if info(dtype).kind == "i":
        return (values & 15).astype(np.uint8)
    return values.astype(numpy_dtype(dtype)).view(np.uint8) & 15


def _from_nibbles(nibbles: Array, dtype: data_type) -> Array:
    if info(dtype).kind == "i":
        return (nibbles.astype(np.int64) ^ 8) - 8
    return nibbles.astype(np.uint8).view(numpy_dtype(dtype)).astype(np.float64)


def _pack(nibbles: Array) -> Array:
    flat = nibbles.reshape(-1)
    even = np.append(flat, np.uint8(0)) if flat.size % 2 else flat
    return np.asarray(even[0::2] | (even[1::2] << 4), dtype=np.uint8)


# --------------------------------------------------------------------------------------------------------------------------------------- memory
def reach(t: Placed) -> tuple[int, int]:
    """Smallest and largest element offset from the logical element (0, ..., 0); (0, -1) for an empty tensor."""
    dim, stride = _placed(t)
    if 0 in dim:
        return 0, -1
    steps = [(d - 1) * s for d, s in zip(dim, stride, strict=True)]
    return sum(x for x in steps if x < 0), sum(x for x in steps if x > 0)


def from_storage(buffer: Any, t: Placed, offset: int | None = None) -> Array:
    """Logical values, in the shape of the tensor, out of the memory ``buffer``: a contiguous array that is read as flat elements of the tensor's
    dtype (bytes for 4-bit types). Logical element (0, ..., 0) is element ``offset``; None: as far in as negative strides need.

    ValidationError where the strides leave the buffer.
    """
    flat, dim, stride, start = _view(np.ascontiguousarray(buffer), t, offset)
    if info(t.dtype).bits == 4:
        at = _positions(dim, stride) + start
        return _from_nibbles((flat[at >> 1] >> ((at & 1) * 4).astype(np.uint8)) & 15, t.dtype)
    view = np.lib.stride_tricks.as_strided(flat[start:], dim, [s * flat.itemsize for s in stride], writeable=False)
    return decode(view, t.dtype).reshape(dim)


def to_storage(x: Any, t: Placed, buffer: Array | None = None, offset: int | None = None) -> Array:
    """Write logical values ``x`` (broadcast to the tensor's dims, rounded to its dtype) into ``buffer`` and return it; without one into a new
    array of just the elements needed, the gaps 0. Where elements overlap, which one stays is not defined. ``offset`` as in from_storage."""
    row = info(t.dtype)
    if buffer is None:
        lo, hi = reach(t)
        count = hi + 1 + (-lo if offset is None else offset)
        buffer = np.zeros((count + 1) // 2, np.uint8) if row.bits == 4 else np.zeros(count, numpy_dtype(t.dtype))
    if not buffer.flags.c_contiguous:
        raise ValidationError(explain("the buffer must be contiguous", tensor=t.name))
    flat, dim, stride, start = _view(buffer, t, offset)
    values = np.broadcast_to(as_values(x), dim)
    if row.bits == 4:
        at = (_positions(dim, stride) + start).reshape(-1)
        nibbles = _nibbles(round_to(values, t.dtype), t.dtype).reshape(-1)
        for half in (0, 1):
            here = at % 2 == half
            flat[at[here] >> 1] = (flat[at[here] >> 1] & (240 >> (half * 4))) | (nibbles[here] << (half * 4))
        return buffer
    np.lib.stride_tricks.as_strided(flat[start:], dim, [s * flat.itemsize for s in stride])[...] = encode(values, t.dtype)
    return buffer


def _placed(t: Placed) -> tuple[Dims, Dims]:
    if t.dim is None or t.stride is None:
        raise ValidationError(explain("dims and strides are not set", tensor=t.name))
    return tuple(t.dim), tuple(0 if d == 1 else s for d, s in zip(t.dim, t.stride, strict=True))


def _view(buffer: Array, t: Placed, offset: int | None) -> tuple[Array, Dims, Dims, int]:
    """The buffer as flat elements, the tensor's dims and effective strides, the place of its first element; checks that all of it lies inside."""
    dim, stride = _placed(t)
    row, flat = info(t.dtype), buffer.reshape(-1).view(np.uint8)
    size = flat.size * 8 // row.bits
    lo, hi = reach(t)
    start = -lo if offset is None else offset
    if 0 not in dim and (start + lo < 0 or start + hi >= size):
        found = f"{size} elements, of which {start + lo}..{start + hi} would be used"
        raise ValidationError(explain("the buffer is too small", tensor=t.name, expected=f"{hi - lo + 1} elements", found=found))
    if row.bits != 4:
        flat = flat[: flat.size - flat.size % (row.bits // 8)].view(np.uint8 if row.kind == "b" else numpy_dtype(t.dtype))
    return flat, dim, stride, start if 0 not in dim else 0


def _positions(dim: Dims, stride: Dims) -> Array:
    at = np.zeros(dim, np.int64)
    for a, (d, s) in enumerate(zip(dim, stride, strict=True)):
        shape = [1] * len(dim)
        shape[a] = d
        at = at + (np.arange(d, dtype=np.int64) * s).reshape(shape)
    return at


def unit_roundoff(compute: data_type) -> float:
    """Largest relative error of one operation in a compute type (a carrier); 0 for integers."""
    return info(compute).eps


def largest(compute: data_type) -> float:
    """Largest finite value of a compute type."""
    return float(info(compute).limits[1])


def smallest(compute: data_type) -> float:
    """Smallest positive value of a float compute type, half of which an operation may lose to underflow."""
    return math.ldexp(1.0, -149 if compute is data_type.FLOAT else -1074)
