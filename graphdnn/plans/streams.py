"""Streams: the address of one in whatever form it is given, and the one that a framework would use now for the arrays of a pack."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from operator import index
from typing import Any

from graphdnn.device import DeviceProps
from graphdnn.errors import KindError, ValidationError, explain
from graphdnn.plans.buffers import ADDRESSES


def address(stream: Any) -> int:
    """The CUstream of an int, or of a stream object: torch (``cuda_stream``), cupy (``ptr``), cuda.core and others (``__cuda_stream__``).

    KindError for anything else, ValidationError for a number that is no address."""
    value = stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        value = (protocol() if callable(protocol) else protocol)[1]
    elif not hasattr(stream, "__index__"):
        value = getattr(stream, "cuda_stream", getattr(stream, "ptr", stream))
    try:
        found = None if isinstance(stream, bool) else index(value)
    except TypeError:
        found = None
    if found is None:
        expected = "a CUstream as int, or a stream object (torch: stream.cuda_stream, cupy, cuda.core)"
        raise KindError(explain("stream has the wrong type", expected=expected, found=type(stream).__name__))
    if not 0 <= found < ADDRESSES:
        raise ValidationError(explain("stream is not an address", expected="0 or the address of a CUDA stream", found=found))
    return found


def current(pack: Mapping[Any, Any], device: DeviceProps) -> int:
    """The current stream of the framework whose device arrays are in ``pack``, or the one that they name; 0 (the legacy default stream) where there
    is none, and on a CPU."""
    if device.kind != "cuda" or not isinstance(pack, Mapping):  # which the plan refuses
        return 0
    torch = sys.modules.get("torch")
    if torch is not None:
        tensor = torch.Tensor
        for value in pack.values():
            if isinstance(value, tensor) and value.is_cuda:
                return _of_torch(torch, value.get_device())
    cupy = sys.modules.get("cupy")
    if cupy is not None and any(isinstance(v, cupy.ndarray) for v in pack.values()):
        return int(cupy.cuda.get_current_stream().ptr)
    return _of_interfaces(pack)


def _of_interfaces(pack: Mapping[Any, Any]) -> int:
    """The stream that arrays name in ``__cuda_array_interface__`` (version 3: their contents are ready for what is enqueued there); 0 if none
    does.

    Where they name several, 0: the legacy default stream waits for all streams that were not made to ignore it."""
    shown = [getattr(v, "__cuda_array_interface__", None) for v in pack.values() if type(v) is not int]
    named = {stream for f in shown if isinstance(f, Mapping) and type(stream := f.get("stream")) is int}
    only = named.pop() if len(named) == 1 else 0
    return only if 1 < only < ADDRESSES else 0  # 1 is another name of the legacy default stream


def in_use(device: DeviceProps) -> set[int]:
    """The legacy default stream, and the current one of every framework that works on ``device``."""
    found, torch, cupy = {0}, sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and torch.cuda.is_initialized():
        found.add(_of_torch(torch, max(device.index, 0)))
    if cupy is not None:
        found.add(int(cupy.cuda.get_current_stream().ptr))
    return found


def _of_torch(torch: Any, index: int) -> int:
    """Without the Stream object that ``torch.cuda.current_stream`` makes, where torch has the function that its own kernels' launchers call."""
    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(torch.cuda.current_stream(index).cuda_stream) if raw is None else raw(index)
