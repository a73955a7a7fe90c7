"""Philox: the known answers of its authors, equal bits on the CPU, in the simulator and in NumPy, numbers that look random."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import pytest
from numba import cfunc, types

from graphdnn import intrinsics
from graphdnn.intrinsics.simtypes import TYPES
from graphdnn.opspecs import philox

KNOWN = {
    (0, 0, 0): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    (-1, -1, -1): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    (0x299F31D0A4093822, 0x0370734413198A2E, 0x85A308D3243F6A88 - 2**64): (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
}
"""(seed, offset, index) -> words: the vectors for philox4x32-10 of the Random123 distribution."""
TRIPLES = [(7, 0, 0), (123456789012345, -77, 3_000_000_000), (-1, 2**62, 2**32 - 5)]


@functools.cache
def compiled(name: str) -> Any:
    space = intrinsics.namespace("cpu")
    exec(f"def k(lo, hi, r, s, o, base):\n    for i in range(lo, hi):\n        r[i] = {name}(s, o, base + i)\n", space)
    return cfunc(types.void(types.int64, types.int64, types.CPointer(types.float32), *[types.int64] * 3), error_model="numpy")(space["k"])


def on_the_cpu(name: str, seed: int, offset: int, base: int, count: int) -> np.ndarray:
    out = np.zeros(count, np.float32)
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 2, ctypes.c_void_p, *[ctypes.c_int64] * 3)(compiled(name).address)(
        0, count, out.ctypes.data, seed, offset, base
    )
    return out


@pytest.mark.parametrize("triple", KNOWN)
def test_known_answers(triple: tuple[int, int, int]) -> None:
    from graphdnn.intrinsics.philox import words_model

    assert tuple(int(w) for w in philox.words(*triple)) == KNOWN[triple] == words_model(*triple)


@pytest.mark.parametrize("seed, offset, base", TRIPLES)
def test_uniform_numbers_have_equal_bits_everywhere(seed: int, offset: int, base: int) -> None:
    found = on_the_cpu("philox_uniform", seed, offset, base, 4096)
    assert np.array_equal(found, philox.uniform(seed, offset, np.arange(4096) + base))
    sim, whole = intrinsics.namespace("cudasim")["philox_uniform"], TYPES["int64"]
    assert [float(sim(whole(seed), whole(offset), whole(base + i))) for i in range(500)] == found[:500].tolist()


@pytest.mark.parametrize("seed, offset, base", TRIPLES)
def test_normal_numbers(seed: int, offset: int, base: int) -> None:
    """Bits of the simulator and the CPU are equal; NumPy's float64 is within 4 ulp, each of the formula's factors within 2."""
    found, expected = on_the_cpu("philox_normal", seed, offset, base, 1 << 16), philox.normal(seed, offset, np.arange(1 << 16) + base)
    assert (np.abs(found - expected) <= 4 * np.spacing(np.abs(expected).astype(np.float32))).all()
    sim, whole = intrinsics.namespace("cudasim")["philox_normal"], TYPES["int64"]
    assert [float(sim(whole(seed), whole(offset), whole(base + i))) for i in range(500)] == found[:500].tolist()


def test_moments_and_independence() -> None:
    """Within 5 standard errors of what random numbers give; another seed, offset or index gives unrelated ones."""
    n = 1 << 16
    u, z = philox.uniform(1, 2, np.arange(n)), on_the_cpu("philox_normal", 1, 2, 0, n).astype(np.float64)
    assert 0 <= u.min() and u.max() < 1
    assert abs(u.mean() - 0.5) < 5 * np.sqrt(1 / 12 / n) and abs(z.mean()) < 5 / np.sqrt(n) and abs(z.var() - 1) < 5 * np.sqrt(2 / n)
    others = (philox.uniform(2, 2, np.arange(n)), philox.uniform(1, 3, np.arange(n)), philox.uniform(1, 2, np.arange(n) + 1))
    assert all(abs(np.corrcoef(u, other)[0, 1]) < 5 / np.sqrt(n) for other in others)
