"""Models of the Hopper instructions of mbarrier.py, tma.py, wgmma.py, staging.py and warp.py, on a :mod:`graphdnn.intrinsics.simmachine`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from graphdnn.intrinsics.errors import SimulationError
from graphdnn.intrinsics.simmachine import BASE, WARP, WARPGROUP, Barrier, Copy, Group, Machine, Meeting, TensorMap, alive, machine, machines
from graphdnn.intrinsics.simtypes import TYPES, type_name


def model(row: Any) -> Callable[..., Any]:
    """The simulator function of an instruction: checks kinds and casts as numba would."""

    def call(*args: Any) -> Any:
        if len(args) != len(row.args):
            raise SimulationError(f"{row.name} takes {len(row.args)} arguments, not {len(args)}")
        machine_line(sys._getframe(1).f_lineno)
        made = row.sim(*(_given(row.name, kind, a) for kind, a in zip(row.args, args, strict=True)))
        return TYPES[{"u32": "uint32", "u64": "uint64"}[row.result]](made) if row.result in ("u32", "u64") else made

    call.__name__ = row.name
    return call


def machine_line(line: int) -> None:
    """Note the line of kernel text that runs, for reports of deadlocks."""
    machine().line = line


def _given(name: str, kind: str, value: Any) -> Any:
    if kind in ("u32", "u64"):
        if not isinstance(value, int):
            raise SimulationError(f"{name}: {value!r} is no integer")
        return int(TYPES["uint32" if kind == "u32" else "uint64"](value))
    if kind == "literal" and type(value) is not int:
        raise SimulationError(f"{name}: {value!r} is no literal")
    if kind == "coordinates":
        return tuple(int(TYPES["uint32"](v)) for v in value)
    if kind == "accumulator" and not isinstance(value, Accumulator):
        raise SimulationError(f"{name}: {value!r} is no accumulator")
    return value


# -- mbarrier.py --------------------------------------------------------------------------------------------------------------------------
def shared_base() -> int:
    """Model of mbarrier.shared_base."""
    return BASE


def barrier_init(address: int, count: int) -> None:
    """Model of mbarrier.barrier_init."""
    m = machine()
    m.place(address, 8, 8, "barrier_init")
    m.after_barrier()
    m.barriers[address] = Barrier(count, len(m.clocks), (m.thread, int(m.clocks[m.thread, m.thread])))
    m.fenced = False


def barrier_init_fence() -> None:
    """Model of mbarrier.barrier_init_fence."""
    machine().fenced = True


def barrier_expect(address: int, nbytes: int) -> None:
    """Model of mbarrier.barrier_expect."""
    m = machine()
    m.barrier(address).bytes += nbytes
    m.arrive(address)


def barrier_arrive(address: int) -> None:
    """Model of mbarrier.barrier_arrive."""
    machine().arrive(address)


def barrier_arrive_remote(address: int, rank: int) -> None:
    """Model of mbarrier.barrier_arrive_remote."""
    alive(rank, "barrier_arrive_remote").arrive(address)


def cluster_rank() -> int:
    """Model of mbarrier.cluster_rank."""
    return machine().rank


def cluster_sync() -> None:
    """Model of mbarrier.cluster_sync: all threads of the cluster, whatever place in the text they come from."""
    m, first = machine(), machines()[0]
    first.met += 1
    number = (first.met - 1) // (len(machines()) * m.block.size) + 1
    m.wait(lambda: first.met >= number * len(machines()) * m.block.size, "cluster_sync", "cluster", number)
    if m.synced < number:
        m.synced = number
        m.join(range(m.block.size))


def barrier_wait(address: int, parity: int) -> None:
    """Model of mbarrier.barrier_wait."""
    m = machine()
    bar = m.barrier(address)
    if parity not in (0, 1):
        raise SimulationError(f"barrier_wait: parity {parity} is neither 0 nor 1")
    missing = f"{bar.pending} arrivals and {bar.bytes} bytes missing"
    m.wait(lambda: bar.phase % 2 != parity, f"the barrier at {address - BASE} (parity {parity}, {missing})", address, parity)
    m.clocks[m.thread] = np.maximum(m.clocks[m.thread], bar.clock)


# -- tma.py -------------------------------------------------------------------------------------------------------------------------------
def tma_map(map: Any) -> int:
    """Model of tma.tma_map."""
    m = machine()
    if not isinstance(map, TensorMap):
        raise SimulationError(f"tma_map: {map!r} is no descriptor parameter")
    if map not in m.maps:
        m.maps.append(map)
    return m.maps.index(map) + 1


def _map(handle: int) -> TensorMap:
    maps = machine().maps
    if not 1 <= handle <= len(maps):
        raise SimulationError(f"{handle:#x} is not the address of a descriptor (tma_map)")
    found: TensorMap = maps[handle - 1]
    return found


def tma_prefetch(handle: int) -> None:
    """Model of tma.tma_prefetch."""
    _map(handle)


def tma_load(to: int, handle: int, bar: int, at: tuple[int, ...]) -> None:
    """Model of tma.tma_load."""
    _start_copy(machine(), _map(handle), to, bar, at)


def tma_multicast(to: int, handle: int, bar: int, at: tuple[int, ...], mask: int) -> None:
    """Model of tma.tma_multicast."""
    for rank in range(mask.bit_length()):
        if mask >> rank & 1:
            _start_copy(alive(rank, "tma_multicast"), _map(handle), to, bar, at)


def _start_copy(m: Machine, map: TensorMap, to: int, bar: int, at: tuple[int, ...]) -> None:
    if len(at) != len(map.box):
        raise SimulationError(f"tma_load: {len(at)} coordinates for a tensor map of {len(map.box)} dims")
    nbytes = int(np.prod(map.box)) * map.array.itemsize
    first = m.place(to, nbytes, 8 * map.swizzle or 128, "tma_load")
    m.barrier(bar)
    if not m.fenced:
        raise SimulationError("tma_load: the TMA unit does not see the barriers yet (barrier_init_fence)")
    m.check_free(first, first + nbytes)
    m.bytes[first : first + nbytes] = 0xCD
    m.is_set[first : first + nbytes] = 0
    m.copies.append(Copy(first, first + nbytes, bar, lambda: map.boxed(at), map.swizzle))
    m.block.late.append(m.land)


# -- wgmma.py -----------------------------------------------------------------------------------------------------------------------------
class Accumulator:
    """Registers of one thread: ``values`` (None: never set), and the groups, with their ``keep``, that still have to be added."""

    def __init__(self, count: int, values: Any = None, todo: tuple[tuple[Group, bool], ...] = ()) -> None:
        self.count, self.values, self.todo = count, values, todo

    def settled(self, thread: int) -> Accumulator:
        """With the groups that are done added."""
        values, todo = self.values, list(self.todo)
        while todo and todo[0][0].done:
            group, keep = todo.pop(0)
            start = np.full(self.count, np.nan, np.float32) if values is None else values
            values = (start if keep else np.float32(0.0)) + group.product[thread % WARPGROUP]
        return Accumulator(self.count, values, tuple(todo))


_CODES = {0: 0, 1: 128, 2: 64, 3: 32}
"""Swizzle codes of a matrix descriptor."""


def matrix_descriptor(address: int, leading: int, stride: int, swizzle: int) -> int:
    """Model of wgmma.matrix_descriptor: the bits that the hardware gets."""
    from graphdnn.intrinsics.wgmma import descriptor_bits

    return (address & 0x3FFFF) >> 4 | descriptor_bits(leading, stride, swizzle)


def accumulator(count: int) -> Accumulator:
    """Model of wgmma.accumulator."""
    return Accumulator(count)


def _tile(descriptor: int, more: int, rows: int, free: int) -> tuple[Any, int]:
    """Addresses of a tile's elements (rows by 16 values of k), before the swizzle, and the swizzle. ``more``: bytes from the descriptor's start."""
    start = (descriptor & 0x3FFF) * 16 + more
    leading, stride = (descriptor >> 16 & 0x3FFF) * 16, (descriptor >> 32 & 0x3FFF) * 16
    r, k = np.arange(rows)[:, None], np.arange(16)[None, :]
    if free:
        at = start + r // 64 * leading + k // 8 * stride + k % 8 * 128 + r % 64 * 2
    else:
        at = start + r // 8 * stride + r % 8 * 128 + k * 2
    return at, _CODES[descriptor >> 62]


@cache
def _fragment(columns: int) -> tuple[Any, Any]:
    """Rows and columns of the registers of a 64 x columns block: arrays of threads by registers."""
    t, i = np.arange(WARPGROUP)[:, None], np.arange(columns // 2)[None, :]
    return t // 32 * 16 + t % 32 // 4 + i % 4 // 2 * 8, i // 4 * 8 + t % 4 * 2 + i % 2


def _multiply(
    m: Machine, kind: str, count: int, a: int, b: int, blocks: int, steps: int, a_free: int, b_free: int
) -> tuple[Any, list[tuple[int, int]]]:
    """A function that gives the registers of all threads, and the byte ranges that it reads."""
    from graphdnn.intrinsics.wgmma import k_step, row_block

    columns = 2 * count // blocks
    tiles, reads = [], []
    for block in range(blocks):
        for step in range(steps):
            left = _tile(a, step * k_step(bool(a_free)) + block * row_block(steps, bool(a_free)), 64, a_free)
            right = _tile(b, step * k_step(bool(b_free)), columns, b_free)
            tiles.append((block, left, right))
            reads += [(int(x.min()) // 1024 * 1024 - BASE, -(-int(x.max() + 2) // 1024) * 1024 - BASE) for x, _ in (left, right)]
    rows, cols = _fragment(columns)

    def product() -> Any:
        total = np.zeros((blocks, 64, columns), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for block, (x, xs), (y, ys) in tiles:
                total[block] += m.fetch(x, xs, kind) @ m.fetch(y, ys, kind).T
        return np.concatenate([total[b][rows, cols] for b in range(blocks)], axis=1)

    return product, reads


def wgmma(kind: str, acc: Accumulator, a: int, b: int, keep: int, blocks: int, steps: int, a_free: int, b_free: int) -> Accumulator:
    """Model of wgmma.wgmma_X."""
    m = machine()
    thread, number = m.thread, m.issued[m.thread]
    groups = m.groups.setdefault(thread // WARPGROUP, [])
    call = (kind, acc.count, a, b, blocks, steps, a_free, b_free)
    if number == len(groups):
        product, reads = _multiply(m, *call)
        group = Group(call, reads)
        group.product = product
        groups.append(group)
    group = groups[number]
    if group.call != call:
        raise SimulationError(f"the threads of a warpgroup start different wgmmas: {group.call} and {call} (thread {thread})")
    m.issued[thread] += 1
    group.joined += 1
    if group.joined == WARPGROUP:
        group.product = group.product()
    return Accumulator(acc.count, acc.values, (*acc.todo, (group, keep != 0)))


def wgmma_wait(acc: Accumulator, younger: int) -> Accumulator:
    """Model of wgmma.wgmma_wait."""
    m = machine()
    groups = m.groups.get(m.thread // WARPGROUP, [])
    waited = groups[: max(m.issued[m.thread] - younger, 0)]
    if waited:
        m.wait(lambda: waited[-1].joined == WARPGROUP, "wgmma_wait, for the other threads of the warpgroup", id(waited[-1]))
    for group in reversed(waited):
        if group.done:
            break
        group.done = True
    return acc.settled(m.thread)


def registers_decrease(count: int) -> None:
    """Model of wgmma.registers_decrease."""
    _set_registers(count, False)


def registers_increase(count: int) -> None:
    """Model of wgmma.registers_increase."""
    _set_registers(count, True)


def _set_registers(count: int, more: bool) -> None:
    m = machine()
    have = m.registers[m.thread]
    if count % 8 or not 24 <= count <= 256 or (count < have) == more:
        raise SimulationError(f"setmaxnreg from {have} to {count}: a multiple of 8 from 24 to 256 is needed, {'above' if more else 'below'} {have}")
    m.wait(lambda: m.free_registers >= count - have, f"setmaxnreg, for {count - have} more registers")
    m.free_registers -= count - have
    m.registers[m.thread] = count


# -- staging.py ---------------------------------------------------------------------------------------------------------------------------
@cache
def _staged_words() -> Any:
    """Words of the 32 registers of each lane in a staged tile."""
    from graphdnn.intrinsics.staging import place

    return np.array([[place(t // 4 + i % 4 // 2 * 8, i // 4 * 8 + t % 4 * 2 + i % 2) // 4 for i in range(32)] for t in range(WARP)])


def tile_put(address: int, acc: Accumulator, s: int) -> None:
    """Model of staging.tile_put."""
    from graphdnn.intrinsics.staging import BYTES

    m = machine()
    if acc.todo:
        raise SimulationError("tile_put reads registers of a wgmma that this thread has not waited for (wgmma_wait)")
    if acc.values is None or not 0 <= 32 * s < acc.count:
        raise SimulationError(f"tile_put: registers {32 * s} to {32 * s + 31} of {acc.count} have no value")
    words = m.place(address, BYTES, 1024, "tile_put") // 4 + _staged_words()[m.thread % WARP]
    m.touch(words, True, "a staged element")
    m.words[words] = acc.values[32 * s : 32 * s + 32]
    m.is_set.reshape(-1, 4)[words] = 1


def tile_get(x: Any, address: int, row: int, column: int, count: int) -> None:
    """Model of staging.tile_get."""
    from graphdnn.intrinsics.staging import BYTES, place

    m = machine()
    if count not in (2, 4, 8) or column % count:
        raise SimulationError(f"tile_get: {count} elements from column {column}")
    words = m.place(address, BYTES, 1024, "tile_get") // 4 + np.array([place(row, column + i) for i in range(count)]) // 4
    if not m.is_set.reshape(-1, 4)[words].all():
        raise SimulationError("tile_get reads a staged element that was never put there")
    m.touch(words, False, "a staged element")
    for i, value in enumerate(m.words[words]):
        x[i] = TYPES["float32"](float(value))


# -- warp.py ------------------------------------------------------------------------------------------------------------------------------
def _meet(what: str, value: Any = None) -> tuple[Machine, list[Any]]:
    """Values of all lanes of the warp, in order."""
    m = machine()
    lane, at = m.thread % WARP, m.warps.setdefault(m.thread // WARP, Meeting())
    number = at.number
    if at.values and at.what != what:
        raise SimulationError(f"lanes of a warp meet at different places: {at.what} and {what} (thread {m.thread})")
    at.what = what
    at.values[lane] = value
    if len(at.values) == WARP:
        at.results[number] = [at.values[i] for i in range(WARP)]
        at.results.pop(number - 2, None)
        at.values = {}
        at.number += 1
        if what == "warp_sync":
            m.after_barrier()
            first = m.thread - lane
            m.join(range(first, first + WARP))
    else:
        m.wait(lambda: number in at.results, what, "warp", m.thread // WARP, number)
    return m, at.results[number]


def warp_sync() -> None:
    """Model of warp.warp_sync."""
    _meet("warp_sync")


def shuffle_xor(x: Any, mask: int) -> Any:
    """Model of warp.shuffle_xor."""
    m, values = _meet(f"shuffle_xor {mask}", x)
    return values[m.thread % WARP ^ mask]


def shuffle_first(x: int) -> Any:
    """Model of warp.shuffle_first."""
    return _meet("shuffle_first", x)[1][0]


def hidden(x: int) -> Any:
    """Model of warp.hidden."""
    return x


def select(condition: Any, yes: Any, no: Any) -> Any:
    """Model of warp.select: the type that numba gives."""
    a, b = type_name(yes), type_name(no)
    if type_name(condition) != "bool":
        raise SimulationError(f"select: the condition is a {type_name(condition)}")
    common = a if a == b else "int64" if a.startswith(("int", "uint")) and b.startswith(("int", "uint")) else "float64"
    return TYPES[common](yes if condition else no)
