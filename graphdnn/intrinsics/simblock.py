"""Threads and barriers of the simulator, and its ``cuda`` namespace.

One CUDA thread of a block runs at a time and runs until it must wait; then another that can go on is chosen. So runs are repeatable, a deadlock is
what it is (nobody can go on), and models of asynchronous hardware may complete their work at any switch. A waiting thread keeps its Python thread;
kernels without barriers need only the caller's.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from graphdnn.intrinsics.errors import SimulationError
from graphdnn.intrinsics.forms import BITS, FLOATS, INTEGERS, Form
from graphdnn.intrinsics.instruction import Instruction
from graphdnn.intrinsics.simmemory import NAMES, LocalArray, SharedArray, SharedMemory
from graphdnn.intrinsics.simtypes import BUILTINS, TYPES, cast, type_name

_int32 = TYPES["int32"]


class _Abandoned(BaseException):
    """Unwinds the waiting threads of a block that has failed. No Exception, so that kernel text cannot catch it."""


class _Thread:
    """One CUDA thread: number (counted through the blocks of a cluster), place in its block ``x``, ``rank`` of the block; and while it waits: until
    when, where (text and line). Threads with the same ``key`` wait for the same."""

    __slots__ = ("key", "line", "number", "rank", "ready", "where", "wake", "x")

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.rank = number // size
        self.x = _int32(number % size)
        self.wake = threading.Lock()
        self.wake.acquire()
        self.ready: Callable[[], bool] = bool
        self.key: Any = None
        self.where, self.line = "", 0


class Block:
    """The running block, or the blocks of a cluster: threads, shared memory and barriers. Models reach it as ``current()``.

    ``wait(ready, where, line)`` is what every blocking intrinsic is made of. ``late``: asynchronous work under way; the last is done when no thread
    can go on without it, never earlier. ``at_end``: checks of what must hold once all threads have ended.
    """

    def __init__(self, index: int, size: int, grid: int, dynamic_bytes: int, cluster: int = 1) -> None:
        """``cluster`` blocks of ``size`` threads, from number ``index`` on. ``ended``: threads of each that have ended."""
        self.first, self.size, self.grid, self.cluster = index, size, grid, cluster
        self.memories = [SharedMemory(dynamic_bytes) for _ in range(cluster)]
        self.ended = [0] * cluster
        self.arrays: dict[tuple[Any, int, int], SharedArray] = {}
        self.failure: BaseException | None = None
        self.failed_thread = 0
        self.late: list[Callable[[], None]] = []
        self.at_end: list[Callable[[], None]] = []
        self._todo = deque(range(size * cluster))
        self._waiting: deque[_Thread] = deque()
        self._arrived: list[list[tuple[_Thread, tuple[Any, int]]]] = [[] for _ in range(cluster)]
        self._done = threading.Event()

    @property
    def index(self) -> Any:
        """Number of the running thread's block."""
        return _int32(self.first + self.thread.rank)

    @property
    def memory(self) -> SharedMemory:
        """Shared memory of the running thread's block."""
        return self.memories[self.thread.rank]

    def run(self, entry: Callable[[], None], pool: ThreadPoolExecutor) -> None:
        """Run all threads to their end, or until one fails (``failure``). ``pool`` must have room for every thread of a block."""
        self._entry, self._pool = entry, pool
        self._work()
        self._done.wait()

    def _work(self) -> None:
        """Run CUDA threads one after another, as long as there are new ones; then let a waiting one go on."""
        while self._todo and self.failure is None:
            self.thread = _Thread(self._todo.popleft(), self.size)
            try:
                self._entry()
                self.ended[self.thread.rank] += 1
            except _Abandoned:
                pass
            except BaseException as error:  # an error of any kind must end the block, or its waiting threads would hang
                self._fail(error)
        self._resume_another()

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure, self.failed_thread = error, self.thread.number

    def _resume_another(self) -> None:
        """Hand over to a waiting thread that can go on (any, if the block has failed). None can: deadlock. None waits: the block is done."""
        chosen = self._ready_thread()
        while chosen is None and self._waiting and self.late:
            self._guarded(self.late.pop())
            chosen = self._ready_thread()
        if chosen is None and self._waiting:
            self._fail(SimulationError(self._deadlock()))
            chosen = self._waiting[0]
        if chosen is None:
            for check in self.at_end if self.failure is None else ():
                self._guarded(check)
            self._done.set()
            return
        self._waiting.remove(chosen)
        self.thread = chosen
        chosen.wake.release()

    def _ready_thread(self) -> _Thread | None:
        """The first waiting thread that can go on; what many wait for is looked at once."""
        blocked: set[Any] = set()
        for t in self._waiting:
            if t.key in blocked:
                continue
            if self.failure is not None or t.ready():
                return t
            if t.key is not None:
                blocked.add(t.key)
        return None

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do work that belongs to no thread; its error is the block's."""
        try:
            work()
        except SimulationError as error:
            self._fail(error)

    def wait(self, ready: Callable[[], bool], where: str, line: int, key: Any = None) -> None:
        """Let others run until ``ready()``; ``where`` and ``line`` are for the report of a deadlock. Threads with equal keys wait for the same."""
        if ready():
            return
        me = self.thread
        me.ready, me.where, me.line, me.key = ready, where, line, key
        self._waiting.append(me)
        if self._todo and self.failure is None:
            self._pool.submit(self._work)
        else:
            self._resume_another()
        me.wake.acquire()
        if self.failure is not None:
            raise _Abandoned

    def barrier(self, line: int, site: tuple[Any, int]) -> None:
        """All threads of the block must come here, to the same place in the text."""
        memory, arrived = self.memory, self._arrived[self.thread.rank]
        if arrived and arrived[0][1] != site:
            first, me = arrived[0][0], self.thread.number
            raise SimulationError(f"threads wait at different barriers: thread {me} in line {line}, thread {first.number} in line {first.line}")
        arrived.append((self.thread, site))
        if len(arrived) == self.size:
            arrived.clear()
            memory.epoch += 1
            return
        epoch = memory.epoch
        self.thread.line = line
        self.wait(lambda: memory.epoch != epoch, "syncthreads", line, (id(memory), epoch))

    def _deadlock(self) -> str:
        places: dict[str, list[int]] = {}
        for t in self._waiting:
            places.setdefault(f"at {t.where} in line {t.line}", []).append(t.number)
        waiting = {t.number for t in self._waiting}
        text = "; ".join(f"{_spans(numbers)} wait {place}" for place, numbers in places.items())
        ended = [n for n in range(self.size * self.cluster) if n not in waiting]
        return f"deadlock: {text}" + (f"; {_spans(ended)} ended" if ended else "")


def _spans(numbers: Sequence[int]) -> str:
    """ "threads 0-3, 7" """
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return "threads " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


_running: list[Block] = []


def current() -> Block:
    """The block that runs; SimulationError outside of a launch."""
    if not _running:
        raise SimulationError("called outside of a simulated kernel")
    return _running[-1]


def run_block(block: Block, entry: Callable[[], None], pool: ThreadPoolExecutor) -> None:
    """Make ``block`` the current one and run it. One at a time: the caller holds the simulator's lock."""
    _running.append(block)
    try:
        block.run(entry, pool)
    finally:
        _running.pop()


class _ThreadIdx:
    """cuda.threadIdx; launches are linear in x."""

    y = z = _int32(0)

    @property
    def x(self) -> Any:
        return current().thread.x


class _BlockIdx:
    """cuda.blockIdx."""

    y = z = _int32(0)

    @property
    def x(self) -> Any:
        return current().index


class _BlockDim:
    """cuda.blockDim."""

    y = z = _int32(1)

    @property
    def x(self) -> Any:
        return _int32(current().size)


class _GridDim:
    """cuda.gridDim."""

    y = z = _int32(1)

    @property
    def x(self) -> Any:
        return _int32(current().grid)


class _Shared:
    """cuda.shared. A call in the text is one array, however often it runs; size 0 is the dynamic shared memory."""

    @staticmethod
    def array(shape: Any, dtype: Any) -> SharedArray:
        block, frame = current(), sys._getframe(1)
        site = (frame.f_code, frame.f_lasti, block.thread.rank)
        found = block.arrays.get(site)
        if found is None:
            found = block.arrays[site] = _shared_array(block, shape, dtype.TYPE)
        return found


def _shared_array(block: Block, shape: Any, storage: str) -> SharedArray:
    dims = tuple(int(n) for n in shape) if isinstance(shape, tuple) else (int(shape),)
    itemsize = BITS[storage] // 8
    if dims == (0,):
        dims, start = (block.memory.dynamic_bytes // itemsize,), len(block.memory.data) - block.memory.dynamic_bytes
    else:
        count = 1
        for n in dims:
            count *= n
        start = block.memory.allocate(count * itemsize, itemsize)
    return SharedArray(block.memory, start, dims, storage, lambda: block.thread.number)


class _Local:
    """cuda.local."""

    array = LocalArray


class _Atomic:
    """cuda.atomic, on shared arrays (numba has it on arrays only)."""

    @staticmethod
    def add(array: SharedArray, index: Any, value: Any) -> Any:
        return array.add(index, value)


class Cuda:
    """The ``cuda`` of kernel text."""

    threadIdx, blockIdx, blockDim, gridDim = _ThreadIdx(), _BlockIdx(), _BlockDim(), _GridDim()
    shared, local, atomic = _Shared(), _Local(), _Atomic()

    @staticmethod
    def syncthreads() -> None:
        """Barrier of the block."""
        frame = sys._getframe(1)
        current().barrier(frame.f_lineno, (frame.f_code, frame.f_lasti))

    @staticmethod
    def syncthreads_or(predicate: Any) -> Any:
        """Barrier of the block; not 0 where any thread's ``predicate`` is true."""
        frame, block = sys._getframe(1), current()
        votes = block.memory.votes.setdefault(block.memory.epoch, [])
        votes.append(bool(predicate))
        block.barrier(frame.f_lineno, (frame.f_code, frame.f_lasti))
        return TYPES["int32"](any(votes))

    @staticmethod
    def threadfence() -> None:
        """Nothing to do: every write is seen at once, and blocks run one after another."""


def model(form: Form) -> Callable[..., Any]:
    """The simulator function of an intrinsic: checks types by its rule, casts as numba would, calculates on plain numbers, rounds the result."""
    known: dict[tuple[type, ...], tuple[list[Callable[[Any], Any]], Callable[[Any], Any]]] = {}

    def resolve(args: tuple[Any, ...]) -> tuple[list[Callable[[Any], Any]], Callable[[Any], Any]]:
        types = tuple(type_name(a) for a in args)
        signature = form.rule(types) if len(types) == form.arity else None
        if signature is None:
            raise SimulationError(f"{form.name}({', '.join(types)}) has no meaning; print the casts of its arguments")
        casts, result = signature
        into = _saturate(result) if form.saturates and result in INTEGERS else cast(result)
        return [_plain(c) for c in casts], into

    def call(*args: Any) -> Any:
        key = tuple(map(type, args))
        if key not in known:
            known[key] = resolve(args)
        casts, into = known[key]
        return into(form.sim(*(c(a) for c, a in zip(casts, args, strict=True))))

    call.__name__ = form.name
    return call


def _plain(name: str) -> Callable[[Any], Any]:
    """Cast to the type, then to the plain number that a model wants."""
    if name in FLOATS:
        return float
    if name == "bool":
        return bool
    cls = TYPES[name]
    return lambda v: int(cls(v))


def _saturate(name: str) -> Callable[[Any], Any]:
    cls = TYPES[name]
    return lambda v: cls(min(max(v, cls.LOW), cls.HIGH))


def names(rows: Sequence[Form], instructions: Sequence[Instruction] = ()) -> dict[str, Any]:
    """Every name of the simulator's namespace."""
    import math

    from graphdnn.intrinsics import simasync

    own = {row.name: model(row) for row in rows} | {row.name: simasync.model(row) for row in instructions}
    return {"math": math, "cuda": Cuda(), **TYPES, **BUILTINS, **NAMES, **own}
