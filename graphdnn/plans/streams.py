"""The stream that a framework would use now for the arrays of a pack."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from graphdnn.device import DeviceProps


def current(pack: Mapping[Any, Any], device: DeviceProps) -> int:
    """The current stream of the framework whose device arrays are in ``pack``; 0 (the legacy default stream) where there is none, and on a CPU."""
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
    return 0


def _of_torch(torch: Any, index: int) -> int:
    """Without the Stream object that ``torch.cuda.current_stream`` makes, where torch has the function that its own kernels' launchers call."""
    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(torch.cuda.current_stream(index).cuda_stream) if raw is None else raw(index)
