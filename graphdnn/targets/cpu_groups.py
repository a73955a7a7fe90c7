"""Products over groups of rows whose bounds are read when they run: see ``Groups`` in codegen/spec.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from graphdnn.codegen.spec import Groups, Launch
from graphdnn.targets.cpu_step import Bound, Call, Step, View
from graphdnn.targets.limits import read

if TYPE_CHECKING:
    pass


class GroupLoop(Step):
    """The step; holds no state of a run."""

    def __init__(self, step: Groups, call: Callable[[Launch, bool], Call]) -> None:
        """Views and argument blocks, laid out once."""
        self._step = step
        packed = step.pack_a is not None and not step.inner
        shape = (1, min(step.rows, step.total), step.a.shape[2]) if packed else step.a.shape
        self._a, self._b = View(step.a, shape, step.a.strides), View(step.b, step.b.shape, step.b.strides)
        self._panel = View(step.panel, step.panel.shape, step.panel.strides)
        self._epilogue = call(step.epilogue, True)
        self._pack_a = call(step.pack_a, not step.inner) if step.pack_a else None
        self._pack_b = call(step.pack_b, False) if step.pack_b else None

    def run(self, bound: Bound) -> None:
        """Pack, then one product after the other."""
        import numpy as np

        step = self._step
        starts: list[int] = read(step.starts, bound.address).tolist()
        if self._pack_b is not None:
            self._pack_b.run(bound)
        a, b, panel = (view.at(bound.address(view.buffer)) for view in (self._a, self._b, self._panel))
        epilogue = self._epilogue.values(bound)
        with np.errstate(all="ignore"):  # inf and NaN are values here, not warnings
            for lo, hi in self._inner(bound, a, b, panel[0], starts) if step.inner else self._rows(bound, a[0], b, panel[0], starts):
                epilogue[-1] = lo
                self._epilogue.run_range(epilogue, lo, hi)

    def _rows(self, bound: Bound, a: Any, b: Any, panel: Any, starts: list[int]) -> Iterator[tuple[int, int]]:
        """Panels of neighbouring rows of one group; gives the items of each when its panel is there."""
        import numpy as np

        step, pack = self._step, self._pack_a.values(bound) if self._pack_a else []
        ends = [*starts, step.total]
        for g, (first, end) in enumerate(zip([0, *starts], ends, strict=True), -1):
            for lo in range(first, end, step.rows):
                hi = min(lo + step.rows, end)
                if g < 0:
                    panel[: hi - lo] = 0
                    yield lo, hi
                    continue
                left = a[lo:hi]
                if self._pack_a is not None:
                    pack[-1] = lo
                    self._pack_a.run_range(pack, lo, hi)
                    left = a[: hi - lo]
                np.matmul(left, b[g], out=panel[: hi - lo])
                yield lo, hi

    def _inner(self, bound: Bound, a: Any, b: Any, panel: Any, starts: list[int]) -> Iterator[tuple[int, int]]:
        """Panels of the result of one group."""
        import numpy as np

        step = self._step
        if self._pack_a is not None:
            self._pack_a.run(bound)
        m = step.a.shape[1]
        for g, (first, end) in enumerate(zip(starts, [*starts[1:], step.total], strict=True)):
            for lo in range(0, m, step.rows):
                hi = min(lo + step.rows, m)
                np.matmul(a[0, lo:hi, first:end], b[0, first:end], out=panel[: hi - lo])
                yield g * m + lo, g * m + hi
