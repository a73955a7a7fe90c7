"""Runs a CPU recipe: argument blocks are laid out at load, so that a run only writes addresses and numbers into them."""

from __future__ import annotations

import ctypes
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from graphdnn.codegen.spec import Arg, Buffer, Constant, KernelSpec, Launch, Matrix, Memset, Panels, PointerParam, Recipe, TensorScalar
from graphdnn.errors import ExecutionError, explain
from graphdnn.targets.base import Executable
from graphdnn.targets.cpu_object import LoadedKernel
from graphdnn.targets.cpu_pool import pool

_SLOTS = {"pointer": "Q", "float32": "f4x", "float64": "d", "int32": "i4x", "int64": "q", "uint32": "I4x"}
_WIDTH = {"int32": 32, "int64": 64, "uint32": 32}
CHUNKS_PER_THREAD = 16
"""Chunks a thread gets on average, if the grain allows: they even out threads that the system delays, and cost one atomic add each."""


class _Bound:
    """What one run is given; the lookups raise errors that name what is missing."""

    __slots__ = ("pointers", "scalars", "workspace")

    def __init__(self, pointers: Mapping[int, int], scalars: Mapping[int, float | int], workspace: int) -> None:
        self.pointers, self.scalars, self.workspace = pointers, scalars, workspace

    def address(self, buffer: Buffer) -> int:
        if buffer.kind == "workspace":
            return self.workspace + buffer.offset
        return self.pointers[buffer.index] + buffer.offset


class _Step(ABC):
    """One step, ready to run."""

    @abstractmethod
    def run(self, bound: _Bound) -> None:
        """Finish the step's work before returning."""


class _Fill(_Step):
    """Memset."""

    def __init__(self, step: Memset) -> None:
        self._step = step

    def run(self, bound: _Bound) -> None:
        ctypes.memset(bound.address(self._step.buffer), self._step.value, self._step.nbytes)


class _Call(_Step):
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

    def values(self, bound: _Bound) -> list[Any]:
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

    def run(self, bound: _Bound) -> None:
        if self._grid:
            self.run_range(self.values(bound), 0, self._grid)

    def run_range(self, values: list[Any], lo: int, hi: int) -> None:
        """Items [lo, hi), in this thread if they are one grain, else over the pool. Items are independent: how they are cut changes no result."""
        block = self._pack(*values)
        grains = -(-(hi - lo) // self._grain)
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


class _View:
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


class _PanelLoop(_Step):
    """Panels: see the class of that name in codegen/spec.py for what it means."""

    def __init__(self, step: Panels, call: Any) -> None:
        batch, m, k = step.a.shape
        n, rows = step.panel.shape[2], step.rows
        assert rows > 0 and step.b.shape[1:] == (k, n), f"Panels of {rows} rows: {step.a.shape} @ {step.b.shape} -> {step.panel.shape}"
        self._rows, self._m = min(rows, m), m
        self._batches = max(1, rows // m) if m else 1
        self._grid = range(0, batch, self._batches) if m and n else range(0)
        self._count = batch
        group = (self._batches, self._rows)
        self._panel = _View(step.panel, (*group, n), (self._rows * step.panel.strides[1], *step.panel.strides[1:]))
        packed = (self._rows * step.a.strides[1], *step.a.strides[1:])
        self._a = _View(step.a, (*group, k), packed) if step.pack_a else _View(step.a, step.a.shape, step.a.strides)
        self._b = _View(step.b, (batch, k, n), step.b.strides)
        self._pack_a: _Call | None = call(step.pack_a, True) if step.pack_a else None
        self._pack_b: _Call | None = call(step.pack_b, False) if step.pack_b else None
        self._epilogue: _Call = call(step.epilogue, True)

    def run(self, bound: _Bound) -> None:
        import numpy as np

        if self._pack_b is not None:
            self._pack_b.run(bound)
        a, b, panel = (view.at(bound.address(view.buffer)) for view in (self._a, self._b, self._panel))
        pack = self._pack_a.values(bound) if self._pack_a else []
        epilogue = self._epilogue.values(bound)
        with np.errstate(all="ignore"):  # inf and NaN are values here, not warnings
            for b0 in self._grid:
                b1 = min(b0 + self._batches, self._count)
                for m0 in range(0, self._m, self._rows):
                    m1 = min(m0 + self._rows, self._m)
                    lo, hi = b0 * self._m + m0, (b1 - 1) * self._m + m1
                    if self._pack_a is not None:
                        pack[-1] = lo
                        self._pack_a.run_range(pack, lo, hi)
                        left = a[: b1 - b0, : m1 - m0]
                    else:
                        left = a[b0:b1, m0:m1]
                    np.matmul(left, b[b0:b1], out=panel[: b1 - b0, : m1 - m0])
                    epilogue[-1] = lo
                    self._epilogue.run_range(epilogue, lo, hi)


class CpuExecutable(Executable):
    """A recipe in memory. Holds no buffers and no state of a run, so threads may share it."""

    def __init__(self, recipe: Recipe, kernels: Sequence[LoadedKernel]) -> None:
        def call(launch: Launch, first_last: bool) -> _Call:
            return _Call(launch, recipe.kernels[launch.kernel], kernels[launch.kernel], first_last)

        self._steps: list[_Step] = []
        for step in recipe.steps:
            if isinstance(step, Memset):
                self._steps.append(_Fill(step))
            elif isinstance(step, Launch):
                self._steps.append(call(step, False))
            else:
                self._steps.append(_PanelLoop(step, call))

    def run(self, pointers: Mapping[int, int], scalars: Mapping[int, float | int], workspace: int, stream: int) -> None:
        """Run the steps; finished on return. ``stream`` is ignored. Raises ExecutionError, which names a tensor that has no address or value."""
        bound = _Bound(pointers, scalars, workspace)
        try:
            for step in self._steps:
                step.run(bound)
        except KeyError as error:
            rule, fix = "a tensor of the recipe was not bound", "pass it in the variant pack"
            raise ExecutionError(explain(rule, tensor=str(error.args[0]), expected="an address or a value", found="none", fix=fix)) from error
