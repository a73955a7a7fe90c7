"""Memory of one's own to run a plan in: a block for every tensor that a pack would bring, on the plan's device."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from graphdnn import reference
from graphdnn.device import DeviceProps
from graphdnn.errors import ExecutionError, NotSupportedError, explain
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.plans.assemble import bytes_below, tensor_bytes

Array = np.ndarray[Any, np.dtype[Any]]
UNWRITTEN = 255
"""Bytes of memory that nothing has written yet: NaN, or -1."""


class Scratch:
    """Buffers by tensor id: NumPy memory, or device memory for a CUDA plan. Aligned to 256 bytes.

    ``rooms``: bytes in front of the address and from it on, for tensors whose dims do not say it (packed rows)."""

    def __init__(self, graph: OperationGraph, device: DeviceProps, rooms: Mapping[int, tuple[int, int]] | None = None) -> None:
        """No memory yet."""
        self.graph, self.device = graph, device
        self.rooms = dict(rooms or {})
        self.cuda = device.kind == "cuda"
        self.kept: dict[int, Any] = {}

    def block(self, nbytes: int) -> Any:
        """Memory that nothing has written yet."""
        if not self.cuda:
            return _host(nbytes)
        from graphdnn.targets.cuda_memory import DeviceArray

        made = DeviceArray((max(nbytes, 1),), np.uint8, self.device.index)
        fill(self.device, made.address, made.nbytes)
        return made

    def nbytes(self, t: int) -> int:
        """Bytes of tensor ``t``, those below its address included."""
        return sum(self.rooms[t]) if t in self.rooms else tensor_bytes(self.graph.tensors[t])

    def _below(self, t: int) -> int:
        return self.rooms[t][0] if t in self.rooms else bytes_below(self.graph.tensors[t])

    def put(self, t: int, values: Array | None) -> int:
        """Memory of tensor ``t`` with ``values`` in it (None: nothing written yet); the address of its first element."""
        if values is None or not self.nbytes(t):
            self.kept[t] = self.block(self.nbytes(t))
            return self.address(t)
        host = _host(self.nbytes(t))
        reference.to_storage(values, self.graph.tensors[t], host)
        if self.cuda:
            from graphdnn.targets.cuda_memory import DeviceArray

            self.kept[t] = DeviceArray.from_numpy(host, self.device.index)
        else:
            self.kept[t] = host
        return self.address(t)

    def give(self, t: int, values: Any) -> Any:
        """What a pack holds for an input with ``values``: a number for a by-value tensor, else the address of new memory."""
        return np.asarray(values).reshape(-1)[0].item() if self.graph.tensors[t].by_value else self.put(t, values)

    def address(self, t: int) -> int:
        """Where the first element of tensor ``t`` is."""
        return _start(self.kept[t]) + self._below(t)

    def copy(self, t: int, address: int) -> None:
        """Memory of tensor ``t`` with the bytes of the buffer whose first element is at ``address``."""
        self.kept[t] = made = self.block(self.nbytes(t))
        _move(self.cuda, self.device, _start(made), address - self._below(t), self.nbytes(t))

    def clear(self, t: int) -> None:
        """Tensor ``t`` as if nothing had written it."""
        fill(self.device, _start(self.kept[t]), self.nbytes(t))

    def get(self, t: int) -> Array:
        """Values of tensor ``t``."""
        return reference.from_storage(self.raw(t), self.graph.tensors[t])

    def raw(self, t: int) -> Array:
        """Bytes of tensor ``t``, in host memory: a copy where that is another."""
        return np.asarray(self.kept[t].numpy() if self.cuda else self.kept[t])[: self.nbytes(t)]

    def wait(self) -> None:
        """Until a GPU is done."""
        if self.cuda:
            from graphdnn.targets.cuda_driver import synchronize

            synchronize(self.device.index)


@contextmanager
def enough() -> Iterator[None]:
    """NotSupportedError where the block finds no memory, on the host or on a GPU."""
    try:
        yield
    except (MemoryError, ExecutionError) as error:
        if isinstance(error, ExecutionError) and "CUDA_ERROR_OUT_OF_MEMORY" not in str(error):
            raise
        fix = "free some memory, or take the heuristic's plan: build()"
        rule = "there is no memory for inputs and outputs to time plans on"
        raise NotSupportedError(explain(rule, expected="room for a copy of each", found=str(error), fix=fix)) from error


def fill(device: DeviceProps, address: int, nbytes: int) -> None:
    """Make memory of ``device`` look unwritten."""
    if device.kind != "cuda":
        ctypes.memset(address, UNWRITTEN, nbytes)
    elif nbytes:
        from graphdnn import _libcuda
        from graphdnn.targets.cuda_driver import activated, primary_context

        with activated(primary_context(device.index)):
            _libcuda.driver().call("cuMemsetD8Async", address, UNWRITTEN, nbytes, 0)


def _move(cuda: bool, device: DeviceProps, target: int, source: int, nbytes: int) -> None:
    if not cuda:
        ctypes.memmove(target, source, nbytes)
    elif nbytes:
        from graphdnn import _libcuda
        from graphdnn.targets.cuda_driver import activated, primary_context

        with activated(primary_context(device.index)):
            _libcuda.driver().call("cuMemcpyDtoD_v2", target, source, nbytes)


def _start(memory: Any) -> int:
    return int(memory.address) if hasattr(memory, "address") else int(memory.__array_interface__["data"][0])


def _host(nbytes: int) -> Array:
    raw = np.full(nbytes + 256, UNWRITTEN, np.uint8)
    start = -raw.__array_interface__["data"][0] % 256
    return raw[start : start + nbytes]
