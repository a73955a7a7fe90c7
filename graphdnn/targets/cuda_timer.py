"""How long work takes on a GPU: several executions captured into a CUDA graph, replayed between two events, so that host time has no part in it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from graphdnn import _libcuda
from graphdnn.targets.base import Enqueue, Timed
from graphdnn.targets.cuda_driver import activated, primary_context

_NON_BLOCKING, _RELAXED = 1, 2


class CapturedCalls(Timed):
    """``calls`` captured once, on a stream of their own; each :meth:`seconds` replays them. Raises ExecutionError where the driver refuses."""

    def __init__(self, calls: Sequence[Enqueue], index: int) -> None:
        """``index``: the device that the calls run on, whose executables are loaded."""
        self._count, self._context = len(calls), primary_context(index)
        self._stream = self._graph = self._start = self._end = 0
        self._driver = _libcuda.driver()
        try:
            with activated(self._context):
                self._stream = self._driver.handle("cuStreamCreate", _NON_BLOCKING)
                self._start, self._end = (self._driver.handle("cuEventCreate", 0) for _ in range(2))
                self._graph = self._capture(calls)
        except BaseException:
            self.close()
            raise

    def _capture(self, calls: Sequence[Enqueue]) -> int:
        driver, graph = self._driver, ctypes.c_uint64()
        driver.call("cuStreamBeginCapture_v2", self._stream, _RELAXED)
        try:
            try:
                for call in calls:
                    call(self._stream)
            finally:  # a stream must not be left in a capture, whatever went wrong
                failed = driver.function("cuStreamEndCapture")(self._stream, ctypes.addressof(graph))
            driver.check(failed, "the end of a capture")
            return driver.handle("cuGraphInstantiateWithFlags", graph.value, 0)
        finally:
            if graph.value:
                driver.call("cuGraphDestroy", graph.value)

    def seconds(self) -> float:
        """Seconds of one call, the mean of those captured; the stream has finished on return."""
        driver, found = self._driver, ctypes.c_float()
        with activated(self._context):
            driver.call("cuEventRecord", self._start, self._stream)
            driver.call("cuGraphLaunch", self._graph, self._stream)
            driver.call("cuEventRecord", self._end, self._stream)
            driver.call("cuEventSynchronize", self._end)
            driver.call("cuEventElapsedTime", ctypes.addressof(found), self._start, self._end)
        return found.value / 1e3 / self._count

    def close(self) -> None:
        """Give graph, events and stream back."""
        parts = (("cuGraphExecDestroy", self._graph), ("cuEventDestroy_v2", self._start), ("cuEventDestroy_v2", self._end))
        with activated(self._context):
            for name, handle in (*parts, ("cuStreamDestroy_v2", self._stream)):
                if handle:
                    self._driver.function(name)(handle)  # what fails here has failed before, and was told
        self._stream = self._graph = self._start = self._end = 0
