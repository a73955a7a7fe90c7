"""Steps of a CPU recipe, ready to run: memset, kernel launch; matrices as NumPy sees them."""

from __future__ import annotations

import ctypes
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from graphdnn.codegen.spec import Arg, Buffer, Constant, KernelSpec, Launch, Matrix, Memset, PointerParam, TensorScalar
from graphdnn.errors import ExecutionError, explain
from graphdnn.targets.cpu_object import LoadedKernel
from graphdnn.targets.cpu_pool import pool
from graphdnn.targets.limits import Rooms

_SLOTS = {"pointer": "Q", "float32": "f4x", "float64": "d", "int32": "i4x", "int64": "q", "uint32": "I4x"}
_WIDTH = {"int32": 32, "int64": 64, "uint32": 32}
CHUNKS_PER_THREAD = 16
"""Chunks a thread gets on average, if the grain allows: they even out threads that the system delays, and cost one atomic add each."""


class Bound:
    """What one run is given; the lookups raise errors that name what is missing."""

    __slots__ = ("pointers", "rooms", "scalars", "workspace")

    def __init__(self, pointers: Mapping[int, int], scalars: Mapping[int, float | int], workspace: int, rooms: Rooms | None = None) -> None:
        self.pointers, self.scalars, self.workspace, self.rooms = pointers, scalars, workspace, rooms

    def address(self, buffer: Buffer) -> int:
        """Where a buffer is in this run."""
        if buffer.kind == "workspace":
            return self.workspace + buffer.offset
        return self.pointers[buffer.index] + buffer.offset


class Step(ABC):
    """One step, ready to run."""

    @abstractmethod
    def run(self, bound: Bound) -> None:
        """Finish the step's work before returning."""

    def ready(self, bound: Bound) -> Callable[[], object]:
        """``run`` with these values, laid out for many calls."""
        return partial(self.run, bound)


class Fill(Step):
    """Memset."""

    def __init__(self, step: Memset) -> None:
        self._step = step

    def run(self, bound: Bound) -> None:
        """Fill it."""
        ctypes.memset(bound.address(self._step.buffer), self._step.value, self._step.nbytes)


class Call(Step):
    """A kernel launch. ``first_last``: the last argument is the first item of the range, given when called (a part of a Panels step)."""

    def __init__(self, launch: Launch, spec: KernelSpec, kernel: LoadedKernel, first_last: bool = False) -> None:
        assert len(launch.args) == len(spec.params), f"{spec.name}: {len(launch.args)} arguments for {len(spec.params)} parameters"
        if first_last:
            last = launch.args[-1] if launch.args else None
            assert isinstance(last, Constant) and last.type == "int64", f"{spec.name}: a panel's kernel ends with an int64 Constant, not {last}"
        self._name, self._call, self._kernel = spec.name, kernel.call, kernel
        self._grid, self._grain = launch.grid, max(1, launch.grain)
        types = ["pointer" if isinstance(p, PointerParam) else str(getattr(p, "type", "")) for p in spec.params]
        self._pack = struct.Struct("=" + "".join(_SLOTS[t] for t in types)).pack
        self._values: list[Any] = [_number(a.value, a.type) if isinstance(a, Constant) else 0 for a in launch.args]
        self._tensors = _slots(launch.args, "tensor")
        self._workspace = [(slot, offset) for slot, _, offset in _slots(launch.args, "workspace")]
        self._scalars = [(slot, a.index, types[slot]) for slot, a in enumerate(launch.args) if isinstance(a, TensorScalar)]

    def values(self, bound: Bound) -> list[Any]:
        """The arguments of one run."""
        values = self._values.copy()
        pointers, workspace = bound.pointers, bound.workspace
        for slot, index, offset in self._tensors:
            values[slot] = pointers[index] + offset
        for slot, offset in self._workspace:
            values[slot] = workspace + offset
        for slot, index, kind in self._scalars:
            values[slot] = _number(bound.scalars[index], kind)
        return values

    def run(self, bound: Bound) -> None:
        """All its items."""
        if self._grid:
            self.run_range(self.values(bound), 0, self._grid)

    def ready(self, bound: Bound) -> Callable[[], object]:
        """All its items, with the arguments packed."""
        return partial(self._run_block, self._pack(*self.values(bound)), 0, self._grid)

    def run_range(self, values: list[Any], lo: int, hi: int) -> None:
        """Items [lo, hi), in this thread if they are one grain, else over the pool. Items are independent: how they are cut changes no result."""
        self._run_block(self._pack(*values), lo, hi)

    def _run_block(self, block: bytes, lo: int, hi: int) -> None:
        grains = -(-(hi - lo) // self._grain)
        if hi <= lo:
            return
        if grains <= 1:
            status = self._call(lo, hi, block, 0, None)
        else:
            threads = pool()
            chunk = -(-grains // (threads.threads * CHUNKS_PER_THREAD)) * self._grain
            status = threads.run(self._call, (lo, hi, block, chunk, ctypes.c_int64(0)), -(-(hi - lo) // chunk))
        if status:
            found = f"status {status} on items {lo} to {hi}"
            raise ExecutionError(explain("a CPU kernel stopped", node=self._name, expected="status 0", found=found))


def _slots(args: Sequence[Arg], kind: str) -> list[tuple[int, int, int]]:
    return [(slot, a.index, a.offset) for slot, a in enumerate(args) if isinstance(a, Buffer) and a.kind == kind]


def _number(value: float | int, kind: str) -> float | int:
    """``value`` as a number that fits the slot: floats overflow to infinity, integers wrap, as a C cast does."""
    if kind in _WIDTH:
        bits = _WIDTH[kind]
        wrapped = int(value) & ((1 << bits) - 1)
        return wrapped - (1 << bits) if kind != "uint32" and wrapped >> (bits - 1) else wrapped
    number = float(value)
    return ctypes.c_float(number).value if kind == "float32" else number


class View:
    """A stack of matrices as NumPy sees it; ``shape`` replaces the matrix's own where a panel is regrouped."""

    def __init__(self, matrix: Matrix, shape: tuple[int, int, int], strides: tuple[int, int, int]) -> None:
        from graphdnn.dtypes import numpy_dtype

        self.buffer, self.shape, self.dtype = matrix.buffer, shape, numpy_dtype(matrix.dtype)
        self.strides = tuple(s * self.dtype.itemsize for s in strides)
        spans = [(n - 1) * s for n, s in zip(shape, self.strides, strict=True)]
        self._low = sum(min(0, s) for s in spans)
        self._memory: Any = ctypes.c_char * (sum(max(0, s) for s in spans) - self._low + self.dtype.itemsize)
        self._empty = 0 in shape

    def at(self, address: int) -> Any:
        """The array at ``address``; nothing is copied."""
        import numpy as np

        if self._empty:
            return np.empty(self.shape, self.dtype)
        return np.ndarray(self.shape, self.dtype, self._memory.from_address(address + self._low), -self._low, self.strides)
