"""Checks of integers that kernels read from memory, such as lengths, offsets and numbers of pages: the steps ``Check`` of a recipe."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import singledispatch
from typing import TYPE_CHECKING, Any

from graphdnn.codegen.spec import Buffer, Check, Limits, Listing, Packed, Places, Starts
from graphdnn.errors import ExecutionError, explain

if TYPE_CHECKING:
    import numpy as np

    Numbers = np.ndarray[Any, Any]

Fetch = Callable[[int, int], Any]
"""``fetch(address, nbytes)``: that memory, as a buffer that the host can read."""
Rooms = Mapping[int, tuple[int, int]]
"""By the id of a packed tensor whose buffer's size is known: bytes of it in front of its address, and from there on."""


def here(address: int, nbytes: int) -> Any:
    """Fetch for memory of the host."""
    return (ctypes.c_char * nbytes).from_address(address)


@dataclass(frozen=True)
class Memory:
    """What one run is given: ``address`` says where a buffer is."""

    address: Callable[[Buffer], int]
    fetch: Fetch = here
    rooms: Rooms = field(default_factory=dict)

    def read(self, listing: Listing) -> Numbers:
        """The numbers as int64."""
        return read(listing, self.address, self.fetch)


def read(listing: Listing, address: Callable[[Buffer], int], fetch: Fetch = here) -> Numbers:
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


def check(step: Check, address: Callable[[Buffer], int], fetch: Fetch = here, rooms: Rooms | None = None) -> None:
    """Nothing, or an ExecutionError that names the tensor, the entry and what it holds. ``address``: where a buffer is."""
    _check(step, Memory(address, fetch, rooms or {}))


@singledispatch
def _check(step: Check, memory: Memory) -> None:
    raise AssertionError(f"{type(step).__name__} is no check")


@_check.register
def _limits(step: Limits, memory: Memory) -> None:
    from graphdnn.dtypes import info

    size = info(step.values.dtype).bits // 8
    used = None if step.used is None else memory.read(step.used)
    starts = None if step.starts is None else memory.read(step.starts)
    for b in range(step.batches):
        at = b * step.batch_stride if starts is None else int(starts[b])
        count = step.values.count if used is None else min(step.values.count, -(-max(int(used[b]), 0) // step.per))
        buffer = replace(step.values.buffer, offset=step.values.buffer.offset + at * size)
        found = memory.read(replace(step.values, buffer=buffer, count=count))
        wrong = (found < step.low) | (found > step.high)
        if wrong.any():
            i = int(wrong.argmax())
            where = f"entry {i}" if step.batches == 1 else f"batch {b}, entry {i}"
            expected = f"{step.low}..{step.high}"
            raise ExecutionError(explain(f"{step.rule}, {where}", tensor=step.values.name, expected=expected, found=int(found[i])))


@_check.register
def _starts(step: Starts, memory: Memory) -> None:
    found = memory.read(step.values).tolist()
    for i, (before, value) in enumerate(zip([0, *found], found, strict=False)):
        if not before <= value <= step.total:
            rule = f"the first row of group {i} is out of {'order' if 0 <= value <= step.total else 'range'}"
            raise ExecutionError(explain(rule, tensor=step.values.name, expected=f"non-decreasing numbers in 0..{step.total}", found=value))


@_check.register
def _places(step: Places, memory: Memory) -> None:
    import numpy as np

    at = memory.read(step.index) * step.factor
    if step.extra is not None:
        slots = memory.read(step.extra)
        _range(step.extra, slots, step.factor, "a choice of a token is out of range")
        at = at + slots
    _range(step.index, at, step.limit, "a row index is out of range")
    values, counts = np.unique(at, return_counts=True) if step.distinct else (at, at)
    if step.distinct and (counts > 1).any():
        rule, expected = "two rows have one place in the result", "every place at most once"
        raise ExecutionError(explain(rule, tensor=step.index.name, expected=expected, found=int(values[counts > 1][0])))


def _range(listing: Listing, at: Numbers, limit: int, rule: str) -> None:
    wrong = (at < 0) | (at >= limit)
    if wrong.any():
        i = int(wrong.argmax())
        raise ExecutionError(explain(f"{rule}, entry {i}", tensor=listing.name, expected=f"0..{limit - 1}", found=int(at[i])))


# ------------------------------------------------------------------------------------------------------------------------------- packed tensors
@_check.register
def _packed(step: Packed, memory: Memory) -> None:
    import numpy as np

    starts = memory.read(step.starts)
    rows = np.clip(-(-memory.read(step.used) // step.per), 0, step.rows)
    ends = [(r - 1) * step.step for r in rows.tolist()]
    low = [min(0, e) - step.below for e in ends]
    reach = [max(0, e) + step.above + 1 for e in ends]
    before, room = (n * 8 // step.bits for n in memory.rooms.get(step.tensor, (0, 2**63)))
    for b, (last, start) in enumerate(zip([0, *starts.tolist()], starts.tolist(), strict=False)):
        if start < 0 or start < last:
            kind = "negative" if start < 0 else "less than the one before it"
            raise _refuse(step, f"the offset of batch {b} is {kind}", "numbers from 0 on that do not decrease", start)
        if b < len(ends) and rows[b] and (start + low[b] < -before or start + reach[b] > room):
            expected = f"rows inside of the {room} elements of the buffer"
            raise _refuse(step, f"batch {b} is not inside of the buffer of '{step.name}'", expected, f"{start}, for {int(rows[b])} rows")
    if step.written:
        _apart(step, starts[:-1], rows, [(s + a, s + z) for s, a, z, n in zip(starts.tolist(), low, reach, rows.tolist(), strict=False) if n])


def _refuse(step: Packed, rule: str, expected: str, found: object) -> ExecutionError:
    return ExecutionError(explain(rule, tensor=step.starts.name, expected=expected, found=found))


def _apart(step: Packed, starts: Numbers, rows: Numbers, spans: list[tuple[int, int]]) -> None:
    """Batches that are written have no element in common. Their spans say so as a rule; where spans meet, elements are counted."""
    import numpy as np

    if all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False)):
        return
    at = np.concatenate([s + np.arange(n) * step.step for s, n in zip(starts.tolist(), rows.tolist(), strict=True)])
    for extent, stride in step.row:
        at = (at[:, None] + np.arange(extent) * stride).reshape(-1)
    if np.unique(at).size < at.size:
        raise _refuse(step, f"batches of '{step.name}', which is written, overlap", "every element in one batch", starts.tolist())
