"""Functions on NumPy arrays that NumPy does not have; integer results keep the width of their input, which is how int32 arithmetic wraps here."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphdnn.dtypes import data_type

Array = np.ndarray[Any, np.dtype[Any]]

_erf = np.frompyfunc(math.erf, 1, 1)
_erfc = np.frompyfunc(math.erfc, 1, 1)


def erf(x: Array) -> Array:
    """Error function of a float64 array."""
    return np.asarray(_erf(x), dtype=np.float64)


def erfc(x: Array) -> Array:
    """1 - erf(x) without cancellation."""
    return np.asarray(_erfc(x), dtype=np.float64)


def sigmoid(x: Array) -> Array:
    """1 / (1 + e**-x), accurate in relative terms on both sides."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e) / (1.0 + e)


def limits(a: Array) -> tuple[int, int]:
    """Smallest and largest value of an integer array's type."""
    found = np.iinfo(a.dtype)
    return int(found.min), int(found.max)


def divide(a: Array, b: Array) -> Array:
    """True division: IEEE for floats; for integers the quotient rounded half to even, x / 0 saturates, 0 / 0 is 0."""
    if a.dtype.kind == "f":
        return np.asarray(a / b)
    lo, hi = limits(a)
    x, y = a.astype(np.int64), np.where(b == 0, 1, b).astype(np.int64)
    edge = (x == np.iinfo(np.int64).min) & (y == -1)
    x = np.where(edge, x + 1, x)
    q = x // y
    left = np.abs(x - q * y).astype(np.uint64)
    gap = np.abs(y).astype(np.uint64) - left
    q = q + ((left > gap) | ((left == gap) & (q % 2 != 0)))
    q = np.where(b == 0, np.where(x > 0, hi, np.where(x < 0, lo, 0)), q)
    return np.asarray(np.clip(q, lo, hi), dtype=a.dtype)


def modulo(a: Array, b: Array) -> Array:
    """Floor modulo; x mod 0 is NaN for floats, 0 for integers."""
    return np.asarray(np.mod(a, b))


def power(a: Array, b: Array) -> Array:
    """a ** b; integers wrap, and with a negative exponent give 0 except for a base of 1 or -1."""
    if a.dtype.kind == "f":
        return np.asarray(np.power(a, b))
    result: Array = np.ones_like(a)
    base: Array = a.copy()
    left: Array = np.where(b < 0, 0, b)
    while left.any():
        result = np.where(left & 1, result * base, result)
        base = base * base
        left = left >> 1
    unit = np.where(a == 1, 1, np.where(a == -1, np.where(b & 1, -1, 1), 0))
    return np.where(b < 0, unit, result).astype(a.dtype)


def narrowed(x: Array, compute: data_type) -> Array:
    """Reference values as the array type whose arithmetic is that of a compute type: float64 for floats, int32 or int64 for integers."""
    return x.astype({data_type.INT32: np.int32, data_type.INT64: np.int64}.get(compute, np.float64))


def widened(x: Any) -> Array:
    """A result as reference values: float64 or int64."""
    found = np.asarray(x)
    return found.astype(np.float64 if found.dtype.kind == "f" else np.int64)
