"""The harness itself: it must see stray writes, wrong values and missing elements, or the tests that use it could not fail."""

from __future__ import annotations

import numpy as np
import pytest

from graphdnn.dtypes import data_type, info, storable
from tests.buffers import GUARD, Guarded, positions
from tests.helpers import Data, draw, representable


@pytest.mark.parametrize("dtype", storable(), ids=lambda d: d.name)
@pytest.mark.parametrize("stride", [(15, 5, 1), (1, 10, 2), (40, 12, 2)], ids=str)
def test_what_is_written_is_read_back(dtype, stride):
    values = draw(np.random.default_rng(0), (2, 3, 5), dtype, Data("uniform", -3, 3))
    buffer = Guarded.make((2, 3, 5), stride, dtype, offset=4)
    buffer.freeze()
    buffer.write(values)
    np.testing.assert_array_equal(buffer.read(), values)
    assert buffer.damage(written=True) == ""
    assert buffer.damage(written=False)


@pytest.mark.parametrize("dtype", storable(), ids=lambda d: d.name)
def test_stray_writes_are_seen(dtype):
    """One byte before, after, and in a gap; for 4-bit types also the other half of an element's byte."""
    buffer = Guarded.make((2, 3), (8, 2), dtype)
    bits = info(dtype).bits
    gap = buffer.start + (4 * bits // 8 if bits == 4 else bits // 8)  # element 8 does not exist, nor does element 1
    for position in (buffer.start - 1, len(buffer.block) - GUARD, gap + (1 if bits == 4 else 0)):
        buffer.freeze()
        buffer.block[position] ^= 0x40
        found = buffer.damage(written=True)
        buffer.block[:] = buffer.snapshot
        assert found, f"byte {position - buffer.start}"
    if bits == 4:
        buffer.freeze()
        buffer.block[buffer.start] ^= 0x10  # element 1 shares the byte of element 0
        assert buffer.damage(written=True)


def test_guards_keep_the_alignment():
    for offset in (0, 1, 4):
        buffer = Guarded.make((8,), (1,), data_type.FLOAT, offset)
        assert (buffer.address("cpu") - 4 * offset) % 256 == 0


def test_positions_follow_strides():
    assert positions((2, 3), (10, 2)).tolist() == [[0, 2, 4], [10, 12, 14]]
    assert positions((2, 2), (0, 1)).tolist() == [[0, 1], [0, 1]]
    assert positions((), ()).tolist() == 0
    assert positions((0, 3), (3, 1)).shape == (0, 3)


def test_overlapping_inputs_read_as_they_are_stored():
    buffer = Guarded.make((2, 3), (1, 1), data_type.FLOAT)
    buffer.write(np.arange(6.0).reshape(2, 3))
    got = buffer.read()
    assert got[0, 1] == got[1, 0] and got[0, 2] == got[1, 1]


@pytest.mark.parametrize("dtype", storable(), ids=lambda d: d.name)
@pytest.mark.parametrize("kind", ["normal", "uniform", "grid", "special", "full"])
def test_drawn_values_are_exact_in_their_type(dtype, kind):
    if kind == "full" and info(dtype).kind == "f":
        kind = "uniform"
    values = draw(np.random.default_rng(1), (300,), dtype, Data(kind, -3, 3))
    np.testing.assert_array_equal(values, representable(values, dtype))
    assert len(np.unique(values)) > 1 or (dtype is data_type.BOOLEAN and kind in ("normal", "uniform"))  # all of those are true
    if kind == "special" and dtype in (data_type.FLOAT, data_type.HALF, data_type.DOUBLE):
        assert np.isnan(values).any() and np.isposinf(values).any() and np.isneginf(values).any()
