"""The fake driver with memory, captures and events: kernels do nothing, and take the time that a test says."""

from __future__ import annotations

import ctypes
from typing import Any

from tests.unit.fake_cuda import FakeCuda, _at, _int, _write


class FakeTiming(FakeCuda):
    """Device memory is host memory. ``cost``: kernel name -> microseconds. ``held``: handles that exist, with what they are."""

    def __init__(self) -> None:
        super().__init__({})
        self.cost: dict[str, float] = {}
        self.held: dict[int, Any] = {}
        self.clock = 0.0
        self.recorded: dict[int, list[str]] = {}
        self._next = 0x9000

    def _hold(self, out: int, what: Any) -> None:
        self._next += 1
        self.held[self._next] = what
        _write(out, self._next)

    def _drop(self, handle: Any) -> None:
        del self.held[_int(handle)]

    # memory
    def cuMemAlloc_v2(self, out: int, size: int) -> None:
        memory = ctypes.create_string_buffer(size + 256)
        address = (ctypes.addressof(memory) + 255) // 256 * 256
        self.held[address] = memory
        _write(out, address)

    def cuMemFree_v2(self, address: int) -> None:
        self._drop(address)

    def cuMemcpyHtoD_v2(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def cuMemcpyDtoD_v2(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def cuMemsetD8Async(self, address: Any, value: int, nbytes: int, stream: Any) -> None:
        if not self.recorded:
            ctypes.memset(_int(address), value, nbytes)

    def cuCtxSynchronize(self) -> None: ...

    # kernels
    def cuModuleGetFunction(self, out: int, module: int, name: bytes) -> None:
        self.functions.append(name.decode())
        _write(out, len(self.functions))

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: None) -> None:
        name = self.functions[_at(function) - 1]
        for launches in self.recorded.values():
            launches.append(name)

    # streams, captures, events
    def cuStreamCreate(self, out: int, flags: int) -> None:
        self._hold(out, "stream")

    def cuStreamDestroy_v2(self, stream: int) -> None:
        self._drop(stream)

    def cuStreamBeginCapture_v2(self, stream: int, mode: int) -> None:
        assert mode == 2 and not self.recorded
        self.recorded[stream] = []

    def cuStreamEndCapture(self, stream: int, out: int) -> None:
        self._hold(out, self.recorded.pop(stream))

    def cuGraphInstantiateWithFlags(self, out: int, graph: int, flags: int) -> None:
        self._hold(out, self.held[graph])

    def cuGraphDestroy(self, graph: int) -> None:
        self._drop(graph)

    def cuGraphExecDestroy(self, graph: int) -> None:
        self._drop(graph)

    def cuGraphLaunch(self, graph: int, stream: int) -> None:
        self.clock += sum(self.cost[name] for name in self.held[graph]) / 1e3

    def cuEventCreate(self, out: int, flags: int) -> None:
        self._hold(out, 0.0)

    def cuEventDestroy_v2(self, event: int) -> None:
        self._drop(event)

    def cuEventRecord(self, event: int, stream: int) -> None:
        self.held[event] = self.clock

    def cuEventSynchronize(self, event: int) -> None: ...

    def cuEventElapsedTime(self, out: int, start: int, end: int) -> None:
        _write(out, self.held[end] - self.held[start], ctypes.c_float)
