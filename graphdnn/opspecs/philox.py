"""Philox 4x32-10 in NumPy (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11), as the references use it.

Key = the two halves of ``seed``, counter = the halves of ``index`` and of ``offset``; the low half first. ``index`` is the row-major number of a
logical element. Written apart from the kernels' form (:mod:`graphdnn.intrinsics.philox`); the words of both are equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphdnn.opspecs.scalars import Array

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def words(seed: int, offset: int, index: Any) -> Array:
    """The four words of every ``index`` (any integers, taken modulo 2**64), uint32 of shape (4, *index.shape)."""
    at = np.asarray(index).astype(np.int64).view(np.uint64)
    key = np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], np.uint64)
    base = np.broadcast_to(np.array(offset & 0xFFFFFFFFFFFFFFFF, np.uint64), at.shape)
    a, b, c, d = at & _LOW, at >> _HALF, base & _LOW, base >> _HALF
    for _ in range(10):
        product, other = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (other >> _HALF) ^ b ^ key[0], other & _LOW, (product >> _HALF) ^ d ^ key[1], product & _LOW
        key = (key + np.array([0x9E3779B9, 0xBB67AE85], np.uint64)) & _LOW
    return np.stack([a, b, c, d]).astype(np.uint32)


def uniform(seed: int, offset: int, index: Any) -> Array:
    """float64 in [0, 1), multiples of 2**-24: the bits that every target has."""
    return np.asarray((words(seed, offset, index)[0] >> 8).astype(np.float64) * 2.0**-24)


def normal(seed: int, offset: int, index: Any) -> Array:
    """float64, mean 0, deviation 1, by the formula of Box and Muller in float64; kernels calculate it in float32."""
    first, second, _, _ = words(seed, offset, index)
    radius = ((first >> 8).astype(np.float64) + 1) * 2.0**-24
    return np.asarray(np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * ((second >> 8) * 2.0**-24)))
