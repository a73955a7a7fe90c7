"""The compiled part of a call (``graphdnn/native``), where it was built: the same steps as the Python beside it, without the interpreter's time.

It is built with the package where a C compiler is at hand, and everything works without it. ``GRAPHDNN_NATIVE=0`` leaves it out.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from graphdnn import env
from graphdnn._libcuda import Driver
from graphdnn.errors import ExecutionError

_FUNCTIONS = ("cuLaunchKernelEx", "cuMemsetD8Async", "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuTensorMapReplaceAddress")


def built() -> bool:
    """Whether the compiled part is there."""
    return _module() is not None


def connected(driver: Driver) -> Any | None:
    """The module, which calls ``driver`` from now on; None where it was not built, is switched off, or the driver lacks a function."""
    module = _module() if env.native() else None
    if module is not None:
        try:
            module.connect(*map(driver.address, _FUNCTIONS))
        except ExecutionError:  # of CUDA 11: no descriptors, no launch configuration
            return None
    return module


def _module() -> Any | None:
    try:
        return import_module("graphdnn._native")
    except ImportError:
        return None
