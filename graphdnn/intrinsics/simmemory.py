"""Memory of the simulator: checked pointers, shared memory as poisoned bytes with a race check, arrays of a thread; models of memory.py.

Reading what was never written, an index out of bounds or negative, a misaligned vector access, a write through a pointer that the kernel declares
read-only: each is a SimulationError. Shared memory: two threads that touch one element between two barriers, one of them changing it, is a race.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

from graphdnn.intrinsics.errors import SimulationError
from graphdnn.intrinsics.forms import BITS
from graphdnn.intrinsics.simtypes import TYPES, exact32

FORMATS = {
    "float32": "f", "float64": "d", "int8": "b", "uint8": "B", "int16": "h", "uint16": "H",
    "int32": "i", "uint32": "I", "int64": "q", "uint64": "Q",
}  # fmt: skip
"""memoryview formats of the element types."""
POISON = 0xCD
"""Fill of unset shared memory; where it is read as part of something larger, it shows."""
STATIC_LIMIT = 48 * 1024
"""Bytes of statically declared shared memory that a block may have."""
UNBOUNDED = 1 << 46
"""Bytes assumed behind a pointer whose extent is not known."""
VECTOR_BYTES = (4, 8, 16)
_MANY, _ATOMIC = -1, -2
"""Stand-ins for a thread number: several readers; an atomic operation."""


def element_maker(storage: str) -> Callable[[Any], Any]:
    """Typed scalar of a plain number that came from memory of this type."""
    if storage == "float32":
        return exact32
    cls = TYPES[storage]
    base = float if storage == "float64" else int
    return lambda v: base.__new__(cls, v)


def _whole(index: Any, what: str) -> int:
    if not isinstance(index, int):
        raise SimulationError(f"{what}: the index {index!r} is no integer")
    return int(index)


class Pointer:
    """A kernel's pointer parameter to ``address``, behind which the bytes [low, high) (addresses; None: unknown) may be touched.

    A negative index is refused, unless ``low`` lies below the address: a tensor with a negative stride.
    """

    __slots__ = ("address", "end", "first", "itemsize", "make", "name", "storage", "view", "writable")

    def __init__(self, name: str, storage: str, address: int, span: tuple[int, int] | None, writable: bool) -> None:
        self.name, self.storage, self.address, self.writable = name, storage, address, writable
        self.itemsize = BITS[storage] // 8
        if address % self.itemsize:
            raise SimulationError(f"parameter '{name}': address {address:#x} is not aligned to its elements ({storage})")
        low, high = span or (address, address + UNBOUNDED)
        self.first = min(0, -((address - low) // self.itemsize))
        self.end = max(self.first, (high - address) // self.itemsize)
        start = address + self.first * self.itemsize
        memory = (ctypes.c_char * ((self.end - self.first) * self.itemsize)).from_address(start)
        self.view = memoryview(memory).cast("B").cast(FORMATS[storage])  # type: ignore[call-overload]
        self.make = element_maker(storage)

    def at(self, index: Any, count: int = 1) -> int:
        """Place in ``view`` of ``count`` elements from ``index`` on, checked."""
        i = _whole(index, f"parameter '{self.name}'")
        if i < self.first or i + count > self.end:
            span = f"{i} .. {i + count - 1}" if count > 1 else f"{i}"
            raise SimulationError(f"parameter '{self.name}': index {span} is outside of {self.first} .. {self.end - 1} ({self.storage})")
        return i - self.first

    def vector(self, index: Any, count: Any) -> int:
        """Place in ``view`` of an aligned vector of ``count`` elements, checked."""
        nbytes = count * self.itemsize
        if nbytes not in VECTOR_BYTES:
            raise SimulationError(f"parameter '{self.name}': a vector of {count} x {self.storage} is none of {VECTOR_BYTES} bytes")
        place = self.at(index, count)
        if (self.address + int(index) * self.itemsize) % nbytes:
            raise SimulationError(f"parameter '{self.name}': index {int(index)} is not aligned to a vector of {nbytes} bytes")
        return place

    def __getitem__(self, index: Any) -> Any:
        return self.make(self.view[self.at(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.put(self.at(index), value)

    def put(self, place: int, value: Any) -> None:
        """Store at a checked place."""
        if not self.writable:
            raise SimulationError(f"parameter '{self.name}' is written, but the kernel declares it as read-only")
        self.view[place] = TYPES[self.storage](value)


def flat_index(index: Any, shape: tuple[int, ...], what: str) -> int:
    """Row-major offset of an index (a number, or one per dim), each checked."""
    parts = index if isinstance(index, tuple) else (index,)
    if len(parts) != len(shape):
        raise SimulationError(f"{what}: {len(parts)} indices for shape {shape}")
    offset = 0
    for part, extent in zip(parts, shape, strict=True):
        i = _whole(part, what)
        if not 0 <= i < extent:
            raise SimulationError(f"{what}: index {i} is outside of 0 .. {extent - 1} (shape {shape})")
        offset = offset * extent + i
    return offset


def _shape(shape: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in shape) if isinstance(shape, tuple) else (int(shape),)


class LocalArray:
    """Array of one thread. Reading an element that was never written is an error."""

    __slots__ = ("cells", "make", "shape", "storage")

    def __init__(self, shape: Any, element: Any) -> None:
        self.shape, self.storage = _shape(shape), element.TYPE
        self.make = element
        self.cells: list[Any] = [None] * math.prod(self.shape)

    def __getitem__(self, index: Any) -> Any:
        return self.get(flat_index(index, self.shape, f"local array of {self.storage}"))

    def __setitem__(self, index: Any, value: Any) -> None:
        self.cells[flat_index(index, self.shape, f"local array of {self.storage}")] = self.make(value)

    def get(self, offset: int) -> Any:
        """The element at a checked offset."""
        value = self.cells[offset]
        if value is None:
            raise SimulationError(f"local array of {self.storage}: element {offset} is read before it is written")
        return value


class SharedMemory:
    """Shared memory of one block: bytes, which of them are set, and who touched what since the last barrier (the current ``epoch``)."""

    def __init__(self, dynamic_bytes: int) -> None:
        self.dynamic_bytes = dynamic_bytes
        self.data = bytearray([POISON]) * (STATIC_LIMIT + dynamic_bytes)
        self.is_set = bytearray(len(self.data))
        self.epoch = 0
        self.votes: dict[int, list[bool]] = {}
        self.used = 0
        self._writer: dict[int, tuple[int, int]] = {}
        self._reader: dict[int, tuple[int, int]] = {}

    def allocate(self, nbytes: int, alignment: int) -> int:
        """Offset of a new static array."""
        start = -(-self.used // alignment) * alignment
        self.used = start + nbytes
        if self.used > STATIC_LIMIT:
            raise SimulationError(f"the block declares {self.used} bytes of static shared memory; at most {STATIC_LIMIT} can be had")
        return start

    def note_read(self, offset: int, thread: int, what: str) -> None:
        """Record a read; a race if another thread wrote since the last barrier."""
        epoch, writer = self._writer.get(offset, (-1, 0))
        if epoch == self.epoch and writer != thread:
            raise SimulationError(f"race: {what} is read by thread {thread} and written by {_who(writer)}, with no barrier between")
        epoch, reader = self._reader.get(offset, (-1, 0))
        self._reader[offset] = (self.epoch, thread if epoch != self.epoch or reader == thread else _MANY)

    def note_write(self, offset: int, thread: int, what: str) -> None:
        """Record a write that changes the element; a race if another thread touched it since the last barrier."""
        for touched, kind in ((self._writer, "written"), (self._reader, "read")):
            epoch, other = touched.get(offset, (-1, 0))
            if epoch == self.epoch and other != thread:
                raise SimulationError(f"race: {what} is written by {_who(thread)} and {kind} by {_who(other)}, with no barrier between")
        self._writer[offset] = (self.epoch, thread)


def _who(thread: int) -> str:
    return {_MANY: "several threads", _ATOMIC: "an atomic operation"}.get(thread, f"thread {thread}")


class SharedArray:
    """A typed view of a block's shared memory. ``thread()`` is the number of the running thread."""

    __slots__ = ("itemsize", "make", "memory", "shape", "start", "storage", "thread", "view")

    def __init__(self, memory: SharedMemory, start: int, shape: tuple[int, ...], storage: str, thread: Callable[[], int]) -> None:
        self.memory, self.start, self.shape, self.storage, self.thread = memory, start, shape, storage, thread
        self.itemsize = BITS[storage] // 8
        self.make = element_maker(storage)
        self.view = memoryview(memory.data)[start : start + math.prod(shape) * self.itemsize].cast(FORMATS[storage])  # type: ignore[call-overload]

    def _place(self, index: Any) -> tuple[int, int, str]:
        what = f"shared array of {self.storage}"
        i = flat_index(index, self.shape, what)
        return i, self.start + i * self.itemsize, f"{what}, element {i},"

    def __getitem__(self, index: Any) -> Any:
        i, offset, what = self._place(index)
        if 0 in self.memory.is_set[offset : offset + self.itemsize]:
            raise SimulationError(f"{what} is read before it is written")
        self.memory.note_read(offset, self.thread(), what)
        return self.make(self.view[i])

    def __setitem__(self, index: Any, value: Any) -> None:
        i, offset, what = self._place(index)
        self._put(i, offset, value, self.thread(), what)

    def _put(self, i: int, offset: int, value: Any, thread: int, what: str) -> None:
        span = slice(offset, offset + self.itemsize)
        before = bytes(self.memory.data[span]) if 0 not in self.memory.is_set[span] else None
        self.view[i] = TYPES[self.storage](value)
        if before != bytes(self.memory.data[span]):
            self.memory.note_write(offset, thread, what)
        self.memory.is_set[span] = b"\x01" * self.itemsize

    def add(self, index: Any, value: Any) -> Any:
        """Atomic add; returns the old value."""
        i, offset, what = self._place(index)
        if 0 in self.memory.is_set[offset : offset + self.itemsize]:
            raise SimulationError(f"{what} is read before it is written")
        old = self.make(self.view[i])
        self._put(i, offset, old + value, _ATOMIC, what)
        return old


def vload(dst: LocalArray, pointer: Pointer, index: Any, n: Any) -> None:
    """Model of memory.vload."""
    i = pointer.vector(index, n)
    if dst.storage != pointer.storage or n > len(dst.cells):
        raise SimulationError(f"vload of {n} x {pointer.storage} into a local array of {len(dst.cells)} x {dst.storage}")
    dst.cells[:n] = [pointer.make(v) for v in pointer.view[i : i + n]]


def vstore(pointer: Pointer, index: Any, src: LocalArray, n: Any) -> None:
    """Model of memory.vstore."""
    i = pointer.vector(index, n)
    if src.storage != pointer.storage or n > len(src.cells):
        raise SimulationError(f"vstore of {n} x {pointer.storage} from a local array of {len(src.cells)} x {src.storage}")
    for k in range(n):
        pointer.put(i + k, src.get(k))


def atomic_inc_u32(pointer: Pointer, index: Any) -> Any:
    """Model of memory.atomic_inc_u32."""
    if pointer.storage != "uint32":
        raise SimulationError(f"atomic_inc_u32 needs a pointer to uint32; parameter '{pointer.name}' points to {pointer.storage}")
    i = pointer.at(index)
    old = pointer.make(pointer.view[i])
    pointer.put(i, int(old) + 1)
    return old


NAMES: dict[str, Any] = {"vload": vload, "vstore": vstore, "atomic_inc_u32": atomic_inc_u32}
"""Names that the simulator's namespace gets from this file."""
