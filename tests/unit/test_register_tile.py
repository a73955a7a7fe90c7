"""The CPU's register tile: sums in every type and number of rows, strides of its operands, refusals, vector code."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from numba import cfunc, types
from numba.core.errors import TypingError

from graphdnn import intrinsics

TEXT = """
def kernel(c, a, b, lda, ka, depth):
    tile_madd(c, 3, {ldc}, a, 2, lda, ka, b, 1, depth, {rows})
"""


def compiled(dtype, rows, ldc):
    names = intrinsics.namespace("cpu")
    exec(TEXT.format(rows=rows, ldc=ldc), names)
    pointer = types.CPointer(dtype)
    return cfunc(types.void(pointer, pointer, pointer, types.int64, types.int64, types.int64), nopython=True)(names["kernel"])


@pytest.mark.parametrize("name", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize(("rows", "depth", "lda", "ka"), [(6, 13, 20, 1), (1, 1, 0, 0), (3, 0, 1, 9), (4, 7, 1, 9)])
def test_sums(name, rows, depth, lda, ka):
    rng = np.random.default_rng(0)
    dtype, columns = np.dtype(name), 64 // np.dtype(name).itemsize
    ldc = columns + 5
    c, a, b = (rng.integers(-9, 10, n).astype(dtype) for n in (3 + rows * ldc, 200, 1 + 13 * columns))
    wanted = c.copy()
    for i in range(rows):
        for j in range(columns):
            wanted[3 + i * ldc + j] += sum(a[2 + i * lda + d * ka] * b[1 + d * columns + j] for d in range(depth))
    function = compiled(getattr(types, name), rows, ldc)
    arguments = [x.ctypes.data_as(t) for x, t in zip((c, a, b), function.ctypes.argtypes, strict=False)]
    function.ctypes(*arguments, *(ctypes.c_int64(x) for x in (lda, ka, depth)))
    np.testing.assert_array_equal(c, wanted)


PRODUCT = """
def kernel(c, a, b, depth):
    tile_product(c, 2, {ldc}, a, 1, {lda}, {ka}, b, 3, {ldb}, depth, {rows}, {blocks}, {how})
"""


@pytest.mark.parametrize("name", ["float32", "float64"])
@pytest.mark.parametrize(("rows", "blocks", "depth"), [(1, 1, 5), (6, 2, 9), (13, 3, 4), (12, 1, 0)])
@pytest.mark.parametrize("how", [0, 1, 2])
def test_products_of_tiles(name, rows, blocks, depth, how):
    """``how`` 2: a is -0.0 in places where b is NaN or infinite; +0.0 hides nothing."""
    rng = np.random.default_rng(1)
    dtype = np.dtype(name)
    columns = blocks * 64 // dtype.itemsize
    ldc, lda, ka, ldb = columns + 3, 1, rows + 2, columns + 16
    c, a, b = (rng.integers(-9, 10, n).astype(dtype) for n in (2 + rows * ldc, 1 + 9 * ka, 3 + 9 * ldb))
    a += dtype.type(0)  # no -0.0 but those below
    if how == 2 and depth:
        b[3 : 3 + columns] = np.nan
        a[1 : 1 + rows] = -0.0
    wanted = c.copy()
    for i in range(rows):
        for j in range(columns):
            terms = [(a[1 + i * lda + d * ka], b[3 + d * ldb + j]) for d in range(depth)]
            total = sum(x * y for x, y in terms if how < 2 or x != 0 or not np.signbit(x))
            wanted[2 + i * ldc + j] = total + (c[2 + i * ldc + j] if how else 0)
    names = intrinsics.namespace("cpu")
    exec(PRODUCT.format(ldc=ldc, lda=lda, ka=ka, ldb=ldb, rows=rows, blocks=blocks, how=how), names)
    pointer = types.CPointer(getattr(types, name))
    function = cfunc(types.void(pointer, pointer, pointer, types.int64), nopython=True)(names["kernel"])
    function.ctypes(*(x.ctypes.data_as(t) for x, t in zip((c, a, b), function.ctypes.argtypes, strict=False)), ctypes.c_int64(depth))
    np.testing.assert_array_equal(c, wanted)


@pytest.mark.parametrize(("dtype", "rows"), [(types.float32, 7), (types.float32, 0), (types.int16, 2)])
def test_refusals(dtype, rows):
    with pytest.raises(TypingError):
        compiled(dtype, rows, 20)


def test_sums_are_vectors():
    text = compiled(types.float32, 6, 16).inspect_llvm()
    assert text.count("call <8 x float> @llvm.fmuladd.v8f32") % 12 == 0, "two vectors a row"
    assert "phi <8 x float>" in text and "fmul float" not in text, "the sums stay in registers through the loop"
