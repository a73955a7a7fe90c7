"""What a target is: it compiles rendered kernels to binaries and turns binaries plus a recipe into something that runs."""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from graphdnn.codegen.spec import Binary, KernelSpec, Recipe, Source
from graphdnn.errors import NotSupportedError, explain
from graphdnn.targets.limits import Rooms

if TYPE_CHECKING:
    from graphdnn.targets.cuda_graph import Nodes


@contextmanager
def paused_collector() -> Iterator[None]:
    """No collection of cyclic garbage meanwhile, then as before. Numba builds large trees of objects that live to the end of a compilation, which
    the collector walks over and over: 12 % of the processor time of a first build (2026-11-29)."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class Prepared(ABC):
    """A run that is made again and again: its values are laid out once, in memory of its own. Used by one thread at a time."""

    @abstractmethod
    def update(self, pointers: Mapping[int, int], scalars: Mapping[int, float | int], workspace: int, rooms: Rooms | None = None) -> None:
        """Take other values, as of ``Executable.run``, for the runs from now on. Raises ExecutionError for a missing one."""

    @abstractmethod
    def move(self, addresses: Sequence[int]) -> None:
        """Take other addresses, in the order that ``Executable.arrange`` was given; numbers and workspace stay."""

    @abstractmethod
    def run(self, stream: int) -> None:
        """Enqueue the steps, as ``Executable.run`` does."""

    @property
    def runner(self) -> Callable[[int], None]:
        """What does the same as ``run`` with the least time."""
        return self.run


class Executable(ABC):
    """A loaded recipe, bound to one device. Immutable once arranged: any number of threads and streams may run it at once."""

    native: Any = None
    """The compiled part of a call (``targets.native``), if runs may be left to it."""
    ids: tuple[int, ...] = ()
    """The order of addresses that ``arrange`` was given."""

    def arrange(self, ids: Sequence[int]) -> None:
        """Say once, after the load, in which order ``run_at`` gets addresses: ids of all tensors that the recipe names."""
        self.ids = tuple(ids)

    def run_at(
        self, addresses: Sequence[int], scalars: Mapping[int, float | int], workspace: int, stream: int, rooms: Rooms | None = None
    ) -> None:
        """``run`` with the addresses in the order of ``arrange``."""
        self.run(dict(zip(self.ids, addresses, strict=True)), scalars, workspace, stream, rooms)

    def prepare(self, pointers: Mapping[int, int], scalars: Mapping[int, float | int], workspace: int, rooms: Rooms | None = None) -> Prepared:
        """A run with these values that can be made many times; the arguments are those of ``run``."""
        return _Repeated(self, pointers, scalars, workspace, rooms)

    @abstractmethod
    def run(self, pointers: Mapping[int, int], scalars: Mapping[int, float | int], workspace: int, stream: int, rooms: Rooms | None = None) -> None:
        """Enqueue the steps. ``pointers``: tensor id -> address, ``scalars``: by-value tensor id -> number, ``workspace``: address (0 if none),
        ``rooms``: how large the buffers of packed tensors are.

        Must not allocate device memory, compile or synchronize. CPU and simulator finish before they return. Raises ExecutionError.
        """

    def graph_nodes(self, pointers: Mapping[int, int], scalars: Mapping[int, float | int], workspace: int) -> Nodes:
        """The steps, with these arguments, as nodes of a CUDA graph. NotSupportedError on devices that have none."""
        raise no_cuda_graph(f"a plan that {type(self).__name__} runs")


def no_cuda_graph(found: str) -> NotSupportedError:
    """The error for what cannot become a CUDA graph; ``found``: which plan it is."""
    return NotSupportedError(
        explain(
            "only plans of CUDA devices become nodes of a CUDA graph (behavior note SUPPORTS_CUDA_GRAPH_NATIVE_API): this one does no work of a GPU",
            expected="a plan of a CUDA device",
            found=found,
            fix="call execute(), or build with device='cuda'",
        )
    )


Enqueue = Callable[[int], None]
"""Enqueues one execution on the stream that it is given."""


class Timed(ABC):
    """Executions that can be timed, again and again."""

    @abstractmethod
    def seconds(self) -> float:
        """Run all of them; the seconds of one."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds."""


class _OnHost(Timed):
    """Executions that have finished when they return."""

    def __init__(self, calls: Sequence[Enqueue]) -> None:
        self._calls = tuple(calls)

    def seconds(self) -> float:
        start = time.perf_counter()
        for call in self._calls:
            call(0)
        return (time.perf_counter() - start) / len(self._calls)

    def close(self) -> None:
        self._calls = ()


class Target(ABC):
    """One kind of device. ``compile`` needs no device; ``load`` does."""

    name: str
    """"cpu", "cuda" or "cudasim"."""

    @abstractmethod
    def toolchain_key(self) -> str:
        """Text that changes whenever the machine code for the same source might: versions, arch or CPU name and features."""

    def host_key(self) -> str:
        """What stored binaries need of the machine beyond kind and architecture, as text that must be equal; "" where that is all."""
        return ""

    @abstractmethod
    def compile(self, source: Source) -> Binary:
        """Machine code of one kernel. Raises BuildError that says what is missing (no ptxas) or shows the compiler's message."""

    @abstractmethod
    def load(self, recipe: Recipe, binaries: Sequence[Binary]) -> Executable:
        """Make a recipe runnable; ``binaries[i]`` belongs to ``recipe.kernels[i]``. Raises ExecutionError without a usable device."""

    def timed(self, calls: Sequence[Enqueue]) -> Timed:
        """The same executions, at least one, to be timed without what the host does."""
        return _OnHost(calls)

    def capturing(self, stream: int) -> bool:
        """Whether the work of a stream is being captured: nothing should be compiled or loaded then."""
        return False

    def specs(self, recipe: Recipe) -> tuple[KernelSpec, ...]:
        """Kernels of the recipe, in the order of the binaries."""
        return recipe.kernels


class _Repeated(Prepared):
    """For executables that have nothing to lay out."""

    def __init__(
        self, executable: Executable, pointers: Mapping[int, int], scalars: Mapping[int, float | int], workspace: int, rooms: Rooms | None
    ) -> None:
        self._executable = executable
        self.update(pointers, scalars, workspace, rooms)

    def update(self, pointers: Mapping[int, int], scalars: Mapping[int, float | int], workspace: int, rooms: Rooms | None = None) -> None:
        """Keep them."""
        self._pointers, self._scalars, self._workspace, self._rooms = pointers, scalars, workspace, rooms

    def move(self, addresses: Sequence[int]) -> None:
        """Keep them."""
        self._pointers, self._rooms = dict(zip(self._executable.ids, addresses, strict=True)), None

    def run(self, stream: int) -> None:
        """Run with what is kept."""
        self._executable.run(self._pointers, self._scalars, self._workspace, stream, self._rooms)
