"""Memory that the Graph wrapper allocates for its user, and the default handle of a thread."""

from __future__ import annotations

import sys
import threading
from typing import Any

from graphdnn.device import DeviceProps
from graphdnn.dtypes import info, numpy_dtype
from graphdnn.errors import ExecutionError, explain
from graphdnn.frontend.handle import Handle, create_handle, set_stream
from graphdnn.frontend.tensor import tensor as Tensor

_local = threading.local()
ALIGNMENT = 256


def thread_handle(device: DeviceProps | None = None) -> Handle:
    """The default handle of this thread, on ``device`` or the default one, bound to torch's current stream where torch is on that GPU."""
    handles: dict[str | None, Handle] = _local.__dict__.setdefault("handles", {})
    key = None if device is None else device.text
    if key not in handles:
        handles[key] = create_handle(device)
    handle = handles[key]
    torch = sys.modules.get("torch")
    if torch is not None and handle.device.kind == "cuda" and not handle.device.described:
        set_stream(handle, torch.cuda.current_stream(handle.device.index).cuda_stream)
    return handle


def _torch(device: DeviceProps) -> Any:
    torch = sys.modules.get("torch")
    if torch is None:
        raise ExecutionError(
            explain(
                "no library can allocate on this device", expected="torch to be imported", found=device.text, fix="pass every output and workspace="
            )
        )
    return torch


def _elements(t: Tensor) -> int:
    dim, stride = t.dim or (), t.stride or ()
    return 0 if 0 in dim else 1 + sum((d - 1) * s for d, s in zip(dim, stride, strict=True))


def empty(t: Tensor, device: DeviceProps, torch_like: bool) -> Any:
    """An uninitialized array for ``t``: torch's if the caller uses torch or the device is a GPU, else NumPy's. A data type that the library lacks
    is a flat uint8 array of its bytes."""
    facts = info(t.dtype)
    if torch_like or device.kind == "cuda":
        torch = _torch(device)
        place = f"cuda:{device.index}" if device.kind == "cuda" else "cpu"
        dtype = getattr(torch, facts.torch, None) if facts.torch is not None and facts.bits >= 8 else None
        if dtype is None:
            return torch.empty((_elements(t) * facts.bits + 7) // 8, dtype=torch.uint8, device=place)
        return torch.empty_strided(t.dim or (), t.stride or (), dtype=dtype, device=place)
    import numpy as np

    if facts.bits < 8:
        return np.empty((_elements(t) * facts.bits + 7) // 8, np.uint8)
    dtype = numpy_dtype(t.dtype)
    flat = np.empty(_elements(t), dtype)
    return np.lib.stride_tricks.as_strided(flat, t.dim or (), tuple(s * dtype.itemsize for s in t.stride or ()))


def scratch(size: int, device: DeviceProps, torch_like: bool) -> Any:
    """``size`` bytes, aligned as a workspace must be."""
    if device.kind == "cuda" or (torch_like and "torch" in sys.modules):
        torch = _torch(device)
        memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=f"cuda:{device.index}" if device.kind == "cuda" else "cpu")
        start = -memory.data_ptr() % ALIGNMENT
    else:
        import numpy as np

        memory = np.empty(size + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]
