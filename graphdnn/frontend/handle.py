"""Handles and streams, and the version numbers of the API.

A handle is an int, as in the cuDNN Frontend, that knows its device and its current stream. ``set_stream`` may change the stream at any time;
an execution uses the stream of that moment.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

from graphdnn import device as devices
from graphdnn.device import DeviceProps
from graphdnn.errors import ExecutionError, KindError, explain
from graphdnn.frontend.tensor import as_integer
from graphdnn.plans import streams

_DESTROYED = -1
"""Stands for the stream of a destroyed handle: compiled code, which looks at nothing else of a handle that it knows, leaves the call to Python."""
_ids = itertools.count(0x1000, 0x10)
_live: dict[int, Handle] = {}
_lock = threading.Lock()


class Handle(int):
    """An opaque non-zero integer. ``device``: what its graphs run on. ``stream``: the CUDA stream that ``set_stream`` has set, or None."""

    device: DeviceProps
    stream: int | None
    stream_object: Any

    def __new__(cls, device: DeviceProps) -> Handle:
        """A handle with a number of its own."""
        with _lock:
            handle = super().__new__(cls, next(_ids))
        handle.device, handle.stream, handle.stream_object = device, None, None
        return handle

    def __repr__(self) -> str:
        stream = "default" if self.stream is None else hex(self.stream)
        return f"<graphdnn handle {int(self):#x}: {self.device.name} ({self.device.text}), stream {stream}>"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(int(self), spec) if spec else repr(self)

    def __copy__(self) -> Handle:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (_restore, (self.device.to_json(),))


def _restore(text: str) -> Handle:
    return _register(Handle(DeviceProps.from_json(text)))


def _register(handle: Handle) -> Handle:
    with _lock:
        _live[int(handle)] = handle
    return handle


def resolve_device(device: Any) -> DeviceProps:
    """The DeviceProps of a text such as "cuda:0" or "sm_90", a torch.device, DeviceProps, or None (GRAPHDNN_DEVICE, else the current CUDA device if
    usable, else the CPU). KindError for anything else."""
    if device is None:
        return devices.current_default()
    if isinstance(device, DeviceProps):
        return device
    if isinstance(device, str) or type(device).__module__ == "torch":
        return devices.parse(str(device))
    raise KindError(
        explain("device has the wrong type", expected="a text such as 'cpu', 'cuda:0', 'cudasim' or 'sm_90', or DeviceProps", found=repr(device))
    )


def create_handle(device: Any = None) -> Handle:
    """A handle on ``device`` (default: GRAPHDNN_DEVICE, else the current CUDA device if usable, else the CPU). Never falsy."""
    return _register(Handle(resolve_device(device)))


def as_handle(handle: Any) -> Handle:
    """The live handle that ``handle`` is, or whose number it is. KindError for other types; ExecutionError for a number that is no live handle."""
    found = _live.get(as_integer("handle", handle))
    if found is None:
        raise ExecutionError(explain("not a live handle", expected="a handle of create_handle() that has not been destroyed", found=hex(int(handle))))
    return found


is_live = _live.__contains__
"""Whether a Handle has not been destroyed: the quick question of the execute path."""


def destroy_handle(handle: int) -> None:
    """End the life of a handle. Graphs that hold it raise ExecutionError when executed."""
    found = as_handle(handle)
    with _lock:
        _live.pop(int(found), None)
    found.stream, found.stream_object = _DESTROYED, None


def set_stream(handle: int, stream: Any) -> None:
    """Enqueue later executions on ``stream``: the address of a CUDA stream as int (torch: ``stream.cuda_stream``; 0: the legacy default stream),
    whose owner has to keep it alive, or a stream object (torch, cupy, cuda.core, anything with ``__cuda_stream__``), which the handle keeps alive.

    KindError for anything else, ValidationError for a number that is no address."""
    found = as_handle(handle)
    found.stream, found.stream_object = streams.address(stream), stream


def get_stream(handle: int) -> int:
    """The stream that ``set_stream`` has set; 0 if none."""
    return as_handle(handle).stream or 0


def backend_version() -> int:
    """92200: the level of the cuDNN backend API that graphdnn follows (9.22.0), for scripts that gate features on it. There is no cuDNN inside."""
    return 92200


def backend_version_string() -> str:
    """The text "9.22.0", see :func:`backend_version`."""
    return "9.22.0"
