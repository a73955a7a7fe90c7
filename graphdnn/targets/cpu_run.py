"""Runs a CPU recipe: argument blocks are laid out at load, so that a run only writes addresses and numbers into them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphdnn.codegen.spec import Check, Groups, Launch, Memset, Panels, Recipe
from graphdnn.errors import ExecutionError, explain
from graphdnn.targets import limits
from graphdnn.targets.base import Executable, Prepared
from graphdnn.targets.cpu_groups import GroupLoop
from graphdnn.targets.cpu_object import LoadedKernel
from graphdnn.targets.cpu_step import Bound, Call, Fill, Step, View


class _PanelLoop(Step):
    """Panels: see the class of that name in codegen/spec.py for what it means."""

    def __init__(self, step: Panels, call: Any) -> None:
        batch, m, k = step.a.shape
        n, rows = step.panel.shape[2], step.rows
        assert rows > 0 and step.b.shape[1:] == (k, n), f"Panels of {rows} rows: {step.a.shape} @ {step.b.shape} -> {step.panel.shape}"
        assert step.block == 1 or rows >= m or rows % step.block == 0, f"Panels of {rows} rows are not whole blocks of {step.block}"
        self._rows, self._m, self._block = min(rows, m), m, step.block
        self._batches = max(1, rows // m) if m else 1
        self._grid = range(0, batch, self._batches) if m and n else range(0)
        self._count = batch
        group = (self._batches, self._rows)
        self._panel = View(step.panel, (*group, n), (self._rows * step.panel.strides[1], *step.panel.strides[1:]))
        packed = (self._rows * step.a.strides[1], *step.a.strides[1:])
        self._a = View(step.a, (*group, k), packed) if step.pack_a else View(step.a, step.a.shape, step.a.strides)
        self._b = View(step.b, (batch, k, n), step.b.strides)
        self._pack_a: Call | None = call(step.pack_a, True) if step.pack_a else None
        self._pack_b: Call | None = call(step.pack_b, False) if step.pack_b else None
        self._epilogue: Call = call(step.epilogue, True)

    def run(self, bound: Bound) -> None:
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
                    per = -(-self._m // self._block)
                    self._epilogue.run_range(epilogue, b0 * per + m0 // self._block, (b1 - 1) * per + -(-m1 // self._block))


class _Check(Step):
    """What kernels will read is compared."""

    def __init__(self, step: Check) -> None:
        self._step = step

    def run(self, bound: Bound) -> None:
        limits.check(self._step, bound.address, rooms=bound.rooms)


class CpuExecutable(Executable):
    """A recipe in memory. Holds no buffers and no state of a run, so threads may share it."""

    def __init__(self, recipe: Recipe, kernels: Sequence[LoadedKernel]) -> None:
        def call(launch: Launch, first_last: bool) -> Call:
            return Call(launch, recipe.kernels[launch.kernel], kernels[launch.kernel], first_last)

        self._steps: list[Step] = []
        for step in recipe.steps:
            if isinstance(step, Memset):
                self._steps.append(Fill(step))
            elif isinstance(step, Launch):
                self._steps.append(call(step, False))
            elif isinstance(step, Check):
                self._steps.append(_Check(step))
            elif isinstance(step, Groups):
                self._steps.append(GroupLoop(step, call))
            else:
                self._steps.append(_PanelLoop(step, call))

    def run(
        self, pointers: Mapping[int, int], scalars: Mapping[int, float | int], workspace: int, stream: int, rooms: limits.Rooms | None = None
    ) -> None:
        """Run the steps; finished on return. ``stream`` is ignored. Raises ExecutionError, which names a tensor that has no address or value."""
        bound = Bound(pointers, scalars, workspace, rooms)
        try:
            for step in self._steps:
                step.run(bound)
        except KeyError as error:
            raise _unbound(error) from error

    def prepare(
        self, pointers: Mapping[int, int], scalars: Mapping[int, float | int], workspace: int, rooms: limits.Rooms | None = None
    ) -> Prepared:
        """A run whose arguments are packed."""
        return _Ready(self, Bound(pointers, scalars, workspace, rooms))

    def steps_for(self, bound: Bound) -> list[Callable[[], object]]:
        """The steps with these values. Raises as ``run``."""
        try:
            return [step.ready(bound) for step in self._steps]
        except KeyError as error:
            raise _unbound(error) from error


class _Ready(Prepared):
    """A run with packed arguments."""

    def __init__(self, executable: CpuExecutable, bound: Bound) -> None:
        self._executable, self._bound = executable, bound
        self._calls = executable.steps_for(bound)

    def update(
        self, pointers: Mapping[int, int], scalars: Mapping[int, float | int], workspace: int, rooms: limits.Rooms | None = None
    ) -> None:
        """Pack other values."""
        bound = Bound(pointers, scalars, workspace, rooms)
        self._calls, self._bound = self._executable.steps_for(bound), bound

    def move(self, addresses: Sequence[int]) -> None:
        """Pack other addresses."""
        self.update(dict(zip(self._executable.ids, addresses, strict=True)), self._bound.scalars, self._bound.workspace)

    def run(self, stream: int) -> None:
        """Run the steps; finished on return. ``stream`` is ignored."""
        try:
            for call in self._calls:
                call()
        except KeyError as error:
            raise _unbound(error) from error


def _unbound(error: KeyError) -> ExecutionError:
    rule, fix = "a tensor of the recipe was not bound", "pass it in the variant pack"
    return ExecutionError(explain(rule, tensor=str(error.args[0]), expected="an address or a value", found="none", fix=fix))
