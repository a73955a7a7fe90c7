"""What a simulated block has for the Hopper instructions: barriers, copies under way, matrix multiplies, registers, who has seen what.

The models of the instructions (:mod:`graphdnn.intrinsics.simasync`) act on it. They are as late and as strict as a device may be.

A copy lands when no thread of the block can go on without it, the youngest first; until then its bytes are poison. A wgmma gives its registers to the
wait that asks for them, and owns its input tiles until some thread has waited; a copy into them is an error, and so is a wgmma on bytes that have not
landed. Barriers count arrivals and bytes and refuse more than they expect. Two threads that touch a staged word need a warp_sync or a barrier between
them: every thread carries a vector clock. A launch has its registers; ``registers_increase`` waits until others have given some back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from graphdnn.intrinsics.errors import SimulationError

BASE = 1024
"""Address of dynamic shared memory, as on a device; a matrix descriptor holds 18 bits of an address."""
WARP, WARPGROUP = 32, 128
_REGISTERS = 65536


class Barrier:
    """An mbarrier. ``phase``: phases that have ended. ``pending``: arrivals that the current one still needs. ``bytes``: announced and not
    landed. ``born``: thread that made it, and its clock then."""

    def __init__(self, count: int, threads: int, born: tuple[int, int]) -> None:
        self.count = self.pending = count
        self.born = born
        self.bytes = 0
        self.phase = 0
        self.clock = np.zeros(threads, np.int64)

    def settle(self) -> None:
        """End the phase if nothing is missing."""
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count


class TensorMap:
    """A descriptor parameter: ``array`` has the tensor's elements as unsigned integers, the contiguous dim last."""

    def __init__(self, array: Any, box: tuple[int, ...], swizzle: int) -> None:
        self.array, self.box, self.swizzle = array, box, swizzle
        if box[0] * array.itemsize > (swizzle or 256 * array.itemsize) or max(box) > 256:
            raise SimulationError(f"tensor map: a box of {box} elements is too wide (swizzle {swizzle} bytes)")

    def boxed(self, at: tuple[int, ...]) -> Any:
        """The box whose first element has the coordinates ``at``, zero where it is outside."""
        out = np.zeros(self.box[::-1], self.array.dtype)
        spans = [(c, min(c + b, n)) for c, b, n in zip(at, self.box, self.array.shape[::-1], strict=True)][::-1]
        if all(a < b for a, b in spans):
            out[tuple(slice(0, b - a) for a, b in spans)] = self.array[tuple(slice(a, b) for a, b in spans)]
        return out


class Copy:
    """A TMA copy on its way: bytes ``first`` to ``last`` of shared memory."""

    def __init__(self, first: int, last: int, bar: int, fetch: Callable[[], Any], swizzle: int) -> None:
        self.first, self.last, self.bar, self.fetch, self.swizzle = first, last, bar, fetch, swizzle


class Group:
    """One wgmma of a warpgroup. ``reads``: byte ranges of its inputs. ``joined``: threads that have issued it."""

    def __init__(self, call: tuple[Any, ...], reads: list[tuple[int, int]]) -> None:
        self.call, self.reads = call, reads
        self.joined = 0
        self.done = False
        self.product: Any = None


class Meeting:
    """Where the lanes of a warp exchange values; ``results`` by number, until all lanes have read them."""

    def __init__(self) -> None:
        self.number = 0
        self.what = ""
        self.values: dict[int, Any] = {}
        self.results: dict[int, list[Any]] = {}


class Machine:
    """What a block has besides threads and plain shared memory."""

    def __init__(self, block: Any, rank: int) -> None:
        self.block, self.rank = block, rank
        self.memory = memory = block.memories[rank]
        threads = block.size
        self.start = len(memory.data) - memory.dynamic_bytes
        self.size = memory.dynamic_bytes
        self.bytes = np.frombuffer(memory.data, np.uint8)[self.start :]
        self.is_set = np.frombuffer(memory.is_set, np.uint8)[self.start :]
        self.words: Any = self.bytes[: self.size // 4 * 4].view(np.float32)
        self.maps: list[Any] = []
        self.barriers: dict[int, Barrier] = {}
        self.fenced = False
        self.copies: list[Copy] = []
        self.groups: dict[int, list[Group]] = {}
        self.issued = [0] * threads
        self.warps: dict[int, Meeting] = {}
        self.registers = [_REGISTERS // threads // 8 * 8] * threads
        self.free_registers = 0
        self.epoch = 0
        self.clocks = np.eye(threads, dtype=np.int64)
        self.writer = np.full(self.size // 4, -1, np.int64)
        self.written = np.zeros(self.size // 4, np.int64)
        self.reader = np.full(self.size // 4, -1, np.int64)
        self.was_read = np.zeros(self.size // 4, np.int64)
        self.line = 0
        self.met = self.synced = 0

    @property
    def thread(self) -> int:
        """Number of the running thread in its block."""
        return int(self.block.thread.x)

    def wait(self, ready: Callable[[], bool], where: str, *key: Any) -> None:
        """Let others run until ``ready()``; threads of the block with an equal ``key`` wait for the same."""
        self.block.wait(ready, where, self.line, (self.rank, *key) if key else None)

    def place(self, address: int, nbytes: int, alignment: int, what: str) -> int:
        """Offset in dynamic shared memory of a checked address."""
        at = address - BASE
        if not 0 <= at <= self.size - nbytes:
            raise SimulationError(f"{what}: bytes {at} to {at + nbytes} are outside of the {self.size} bytes of dynamic shared memory")
        if address % alignment:
            raise SimulationError(f"{what}: address {address:#x} is not a multiple of {alignment}")
        return at

    # -- what happens before what ---------------------------------------------------------------------------------------------------------
    def after_barrier(self) -> None:
        """A syncthreads since the last look orders everything before it."""
        if self.epoch != self.memory.epoch:
            self.epoch = self.memory.epoch
            self.join(range(len(self.clocks)))

    def join(self, threads: Any) -> None:
        """These threads have met."""
        self.clocks[threads] = self.clocks[threads].max(axis=0)
        self.clocks[threads, threads] += 1

    def touch(self, words: Any, writes: bool, what: str) -> None:
        """Record accesses of the running thread to words; a race is an error."""
        self.after_barrier()
        mine = self.clocks[self.thread]
        for other, clock, kind in ((self.writer, self.written, "written"), (self.reader, self.was_read, "read")):
            if kind == "read" and not writes:
                continue
            found = other[words]
            late = (found >= 0) & (clock[words] > mine[found])
            if late.any():
                by = int(found[late][0])
                done = "written" if writes else "read"
                raise SimulationError(
                    f"race: {what} is {done} by thread {self.thread} and {kind} by thread {by}, with no warp_sync or barrier between"
                )
        mark, clock = (self.writer, self.written) if writes else (self.reader, self.was_read)
        mark[words], clock[words] = self.thread, mine[self.thread]

    # -- barriers -------------------------------------------------------------------------------------------------------------------------
    def barrier(self, address: int) -> Barrier:
        """The barrier at an address."""
        found = self.barriers.get(address)
        if found is None:
            raise SimulationError(f"there is no barrier at shared address {address:#x}; barrier_init was not called")
        self.after_barrier()
        maker, clock = found.born
        if self.rank == self.block.thread.rank and self.clocks[self.thread, maker] < clock:
            raise SimulationError(f"thread {self.thread} uses a barrier that thread {maker} has made, but they have not met since (syncthreads)")
        return found

    def arrive(self, address: int) -> None:
        """One arrival of the running thread, which may be of another block."""
        bar = self.barrier(address)
        if bar.pending == 0:
            raise SimulationError(f"barrier at {address:#x}: more than {bar.count} arrivals in phase {bar.phase}")
        bar.pending -= 1
        if self.rank == self.block.thread.rank:
            bar.clock = np.maximum(bar.clock, self.clocks[self.thread])
            self.clocks[self.thread, self.thread] += 1
        bar.settle()

    # -- copies ---------------------------------------------------------------------------------------------------------------------------
    def check_free(self, first: int, last: int) -> None:
        """Nobody may still read or fill the bytes that a copy is about to fill."""
        for groups in self.groups.values():
            for group in groups:
                if not group.done and any(first < b and a < last for a, b in group.reads):
                    raise SimulationError("tma_load overwrites a tile that a wgmma still reads: no thread has waited for it (wgmma_wait)")
        if any(first < c.last and c.first < last for c in self.copies):
            raise SimulationError("tma_load overwrites bytes that another copy is still filling")

    def land(self) -> None:
        """Complete the youngest copy."""
        copy = self.copies.pop()
        data = np.ascontiguousarray(copy.fetch()).view(np.uint8).reshape(-1)
        at = swizzled(np.arange(copy.first, copy.last) + BASE, copy.swizzle) - BASE
        self.bytes[at] = data
        self.is_set[at] = 1
        bar = self.barriers[copy.bar]
        bar.bytes -= len(data)
        bar.settle()

    # -- matrix tiles ---------------------------------------------------------------------------------------------------------------------
    def fetch(self, addresses: Any, swizzle: int, kind: str) -> Any:
        """float32 values of 16-bit elements at these addresses."""
        at = swizzled(addresses, swizzle) - BASE
        if at.min() < 0 or at.max() + 2 > self.size:
            raise SimulationError("wgmma reads outside of the dynamic shared memory")
        if not (self.is_set[at].all() and self.is_set[at + 1].all()):
            raise SimulationError("wgmma reads bytes of its input tiles that have not landed")
        bits = self.bytes[at].astype(np.uint32) | self.bytes[at + 1].astype(np.uint32) << 8
        if kind == "HALF":
            return bits.astype(np.uint16).view(np.float16).astype(np.float32)
        return (bits << 16).view(np.float32)

    def finish(self) -> None:
        """What must hold when all threads have ended."""
        if self.copies:
            raise SimulationError(f"the block ended with {len(self.copies)} copies on their way")
        if any(not g.done for groups in self.groups.values() for g in groups):
            raise SimulationError("the block ended with a wgmma that no thread has waited for")


_machines: WeakKeyDictionary[Any, list[Machine]] = WeakKeyDictionary()


def machines() -> list[Machine]:
    """The machines of the running cluster, by rank."""
    from graphdnn.intrinsics import simblock

    block = simblock.current()
    found = _machines.get(block)
    if found is None:
        found = _machines[block] = [Machine(block, rank) for rank in range(block.cluster)]
        block.at_end.extend(m.finish for m in found)
    return found


def machine() -> Machine:
    """The machine of the running thread's block."""
    from graphdnn.intrinsics import simblock

    return machines()[simblock.current().thread.rank]


def alive(rank: int, what: str) -> Machine:
    """The machine of another block of the cluster, which must not have ended."""
    found = machines()
    if not 0 <= rank < len(found):
        raise SimulationError(f"{what}: the cluster has {len(found)} blocks, none of rank {rank}")
    if found[rank].block.ended[rank] == found[rank].block.size:
        raise SimulationError(f"{what}: block {rank} of the cluster has ended, its shared memory is gone (cluster_sync)")
    return found[rank]


def swizzled(addresses: Any, swizzle: int) -> Any:
    """Where the bytes at these addresses really lie: 16-byte piece i of line j at i ^ j, as far as the swizzle reaches."""
    mask = {0: 0, 32: 1, 64: 3, 128: 7}[swizzle]
    return addresses ^ ((addresses >> 7 & mask) << 4)
