"""Compiled kernels, kept: in memory, and on disk for the next process (disk.py).

The key of a kernel is a SHA-256 over its spec, the templates, the intrinsics and the toolchain with the device's arch, so a hit needs no rendering
and whatever could change the machine code changes the key.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graphdnn import log
from graphdnn.codegen.spec import Binary, KernelSpec
from graphdnn.errors import BuildError, explain
from graphdnn.plans.disk import Counters, DiskCache, counters, disk, pack, unpack

if TYPE_CHECKING:
    from graphdnn.targets.base import Target

__all__ = ["Counters", "DiskCache", "Kernel", "KernelStore", "Stats", "because", "counters", "disk", "get", "kernel_key", "listeners", "memory"]
__all__ += ["kept", "pack", "stats", "tell", "unpack"]

listeners: list[Callable[[str], None]] = []
"""Called with one line of text when a compilation starts and when it ends, and at the steps of a tuning (progress of the command line)."""


class KernelStore:
    """Compiled kernels in memory, the least recently used first out. Safe to share between threads."""

    def __init__(self, capacity: int = 1024) -> None:
        """``capacity`` kernels are kept."""
        self.capacity = capacity
        self._kernels: OrderedDict[str, Binary] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kernels)

    def get(self, key: str) -> Binary | None:
        """The kernel of ``key``, if it is here."""
        with self._lock:
            binary = self._kernels.get(key)
            if binary is not None:
                self._kernels.move_to_end(key)
            return binary

    def put(self, key: str, binary: Binary) -> None:
        """Keep a kernel."""
        with self._lock:
            self._kernels[key] = binary
            self._kernels.move_to_end(key)
            while len(self._kernels) > self.capacity:
                self._kernels.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._kernels.clear()

    def items(self) -> list[tuple[str, Binary]]:
        """All kernels with their keys, oldest use first."""
        with self._lock:
            return list(self._kernels.items())


memory = KernelStore()
_reason: ContextVar[str] = ContextVar("reason", default="a plan was built")


@contextmanager
def because(reason: str) -> Iterator[None]:
    """What is compiled in the block is counted under ``reason``."""
    token = _reason.set(reason)
    try:
        yield
    finally:
        _reason.reset(token)


@dataclass(frozen=True)
class Stats:
    """What this process has compiled and found, kernel by kernel: ``compilations`` and the ``compile_seconds`` spent in them, by ``reasons``;
    ``memory_hits`` and ``disk_hits``: kernels that were there; ``damaged``: entries of the disk cache that were thrown away."""

    compilations: int
    compile_seconds: float
    reasons: dict[str, int]
    memory_hits: int
    disk_hits: int
    damaged: int


def stats() -> Stats:
    """Counts of this process so far."""
    c = counters
    return Stats(c.misses, c.compile_s, dict(c.reasons), c.memory_hits, c.disk_hits, c.damaged)


_compiling: dict[str, threading.Lock] = {}


def _forked() -> None:
    """Threads that held a lock are not in the child."""
    memory._lock = threading.Lock()
    _compiling.clear()


os.register_at_fork(after_in_child=_forked)


def kernel_key(spec: KernelSpec, target: Target) -> str:
    """Key of a kernel: everything its machine code depends on."""
    from graphdnn import intrinsics
    from graphdnn.codegen import render

    parts = (spec.digest(), render.digest(), intrinsics.digest(), target.name, target.toolchain_key())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel of a plan. ``origin``: "memory", "disk", "compiled" or "file" (a serialized plan)."""

    spec: KernelSpec
    key: str
    binary: Binary
    origin: str
    text: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Stable name of the kernel."""
        return self.spec.name

    @property
    def registers(self) -> int:
        """Registers of a thread; 0 where the target has none to count."""
        return int(self.binary.facts.get("registers", 0))

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return int(self.binary.facts.get("shared_bytes", self.spec.shared_bytes))

    @property
    def spill_bytes(self) -> int:
        """Bytes that a thread spills to local memory."""
        return int(self.binary.facts.get("spill_bytes", 0))

    @property
    def source(self) -> str:
        """The Python text: as it was compiled, else from the cache folder, else printed again from the spec."""
        if self.text is not None:
            return self.text
        place = disk()
        found = place.source(self.key) if place else None
        if found is not None:
            return found
        from graphdnn.codegen import render

        return render.render(self.spec).text


def get(spec: KernelSpec, target: Target, store: KernelStore | None = None) -> Kernel:
    """The compiled kernel of ``spec``: from ``store``, from memory, from disk, else rendered and compiled (BuildError as ``Target.compile``)."""
    key = kernel_key(spec, target)
    for place in (store, memory):
        binary = place.get(key) if place is not None else None
        if binary is not None:
            return _taken(Kernel(spec, key, binary, "memory"), store)
    on_disk = disk()
    if on_disk is None:
        with _one_at_a_time(key):
            binary = memory.get(key)
            if binary is None:
                return _keep(_compile(spec, key, target, None), store)
        return _taken(Kernel(spec, key, binary, "memory"), store)
    binary = on_disk.get(key)
    if binary is None:
        with on_disk.lock(key):
            binary = on_disk.get(key)
            if binary is None:
                return _keep(_compile(spec, key, target, on_disk), store)
    return _taken(Kernel(spec, key, binary, "disk"), store)


def kept(specs: Sequence[KernelSpec], keys: Sequence[str]) -> tuple[Kernel, ...] | None:
    """The compiled kernels of ``specs``, whose keys are known, from memory or disk; None, and nothing is counted, unless all of them are there and
    have the names of their specs."""
    on_disk, found = disk(), []
    for spec, key in zip(specs, keys, strict=True):
        binary, origin = memory.get(key), "memory"
        if binary is None and on_disk is not None:
            binary, origin = on_disk.get(key), "disk"
        if binary is None or binary.entry != spec.name:
            return None
        found.append(Kernel(spec, key, binary, origin))
    return tuple(_taken(k, None) for k in found)


def _taken(kernel: Kernel, store: KernelStore | None) -> Kernel:
    if kernel.origin == "disk":
        counters.disk_hits += 1
        place = disk()
        log.debug(f"kernel {kernel.name}: cache hit from {place.folder(kernel.key) if place else 'disk'}")
    else:
        counters.memory_hits += 1
    return _keep(kernel, store)


@contextmanager
def _one_at_a_time(key: str) -> Iterator[None]:
    """Without a disk cache, whose lock does that: threads that need one kernel wait for the first to compile it."""
    lock = _compiling.setdefault(key, threading.Lock())
    try:
        with lock:
            yield
    finally:
        _compiling.pop(key, None)


def _keep(kernel: Kernel, store: KernelStore | None) -> Kernel:
    memory.put(kernel.key, kernel.binary)
    if store is not None:
        store.put(kernel.key, kernel.binary)
    return kernel


def _compile(spec: KernelSpec, key: str, target: Target, on_disk: DiskCache | None) -> Kernel:
    from graphdnn.codegen import render

    counters.misses += 1
    counters.reasons[_reason.get()] = counters.reasons.get(_reason.get(), 0) + 1
    tell(f"compiling {spec.name} for {target.name}")
    start = time.perf_counter()
    try:
        source = render.render(spec)
    except ImportError as error:
        raise _no_compiler(spec, error) from error
    except Exception as error:  # whatever a template raises is a fault of ours, and another plan may do without that template
        raise BuildError(explain(f"kernel '{spec.name}' cannot be printed by {spec.template}", found=f"{type(error).__name__}: {error}")) from error
    log.quiet_compilers()
    try:
        binary = target.compile(source)
    except ImportError as error:
        raise _no_compiler(spec, error) from error
    taken = time.perf_counter() - start
    counters.compile_s += taken
    tell(f"compiled {spec.name} for {target.name} in {taken:.2f} s")
    if on_disk is not None:
        on_disk.put(key, source, binary)
    return Kernel(spec, key, binary, "compiled", source.text)


def _no_compiler(spec: KernelSpec, error: ImportError) -> BuildError:
    """On a machine that was meant to run plans, not to build them."""
    fix = "pip install graphdnn, for a GPU graphdnn[cu13], or load a plan compiled elsewhere: graphdnn compile graph.json --arch ..."
    return BuildError(explain(f"kernel '{spec.name}' cannot be compiled here", expected=f"package {error.name}", found=str(error), fix=fix))


def tell(line: str) -> None:
    """A line of progress, to the log and to the listeners."""
    log.info(line)
    for listener in tuple(listeners):
        listener(line)
