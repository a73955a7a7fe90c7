"""Checks of integers that kernels read from memory, such as lengths and numbers of pages: the step ``Limits`` of a recipe."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphdnn.codegen.spec import Buffer, Limits, Listing
from graphdnn.errors import ExecutionError, explain

if TYPE_CHECKING:
    import numpy as np

Fetch = Callable[[int, int], Any]
"""``fetch(address, nbytes)``: that memory, as a buffer that the host can read."""


def here(address: int, nbytes: int) -> Any:
    """Fetch for memory of the host."""
    return (ctypes.c_char * nbytes).from_address(address)


def read(listing: Listing, address: Callable[[Buffer], int], fetch: Fetch = here) -> np.ndarray[Any, Any]:
    """The numbers as int64."""
    import numpy as np

    from graphdnn.dtypes import numpy_dtype

    kind = numpy_dtype(listing.dtype)
    if not listing.count:
        return np.zeros(0, np.int64)
    reach = 1 + (listing.count - 1) * abs(listing.stride)
    low = min(0, (listing.count - 1) * listing.stride) * kind.itemsize
    memory = fetch(address(listing.buffer) + low, reach * kind.itemsize)
    return np.ndarray((listing.count,), kind, memory, -low, (listing.stride * kind.itemsize,)).astype(np.int64)


def check(step: Limits, address: Callable[[Buffer], int], fetch: Fetch = here) -> None:
    """Nothing, or an ExecutionError that names the tensor, the entry and what it holds. ``address``: where a buffer is."""
    from graphdnn.dtypes import info

    size = info(step.values.dtype).bits // 8
    used = None if step.used is None else read(step.used, address, fetch)
    starts = None if step.starts is None else read(step.starts, address, fetch)
    for b in range(step.batches):
        at = b * step.batch_stride if starts is None else int(starts[b])
        count = step.values.count if used is None else min(step.values.count, -(-max(int(used[b]), 0) // step.per))
        buffer = replace(step.values.buffer, offset=step.values.buffer.offset + at * size)
        found = read(replace(step.values, buffer=buffer, count=count), address, fetch)
        wrong = (found < step.low) | (found > step.high)
        if wrong.any():
            i = int(wrong.argmax())
            where = f"entry {i}" if step.batches == 1 else f"batch {b}, entry {i}"
            expected = f"{step.low}..{step.high}"
            raise ExecutionError(explain(f"{step.rule}, {where}", tensor=step.values.name, expected=expected, found=int(found[i])))
