"""What a target is: it compiles rendered kernels to binaries and turns binaries plus a recipe into something that runs."""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

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


class Executable(ABC):
    """A loaded recipe, bound to one device. Immutable: any number of threads and streams may run it at once."""

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
