"""The compiled part of a call (``graphdnn/native``), where it was built: the same steps as the Python beside it, without the interpreter's time.

It is built with the package where a C compiler is at hand, and everything works without it. ``GRAPHDNN_NATIVE=0`` leaves it out. In a checkout whose
sources in C are newer than what was built from them, it is not used: it may not be what the Python beside it expects.
"""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from graphdnn import env, log
from graphdnn._libcuda import Driver
from graphdnn.errors import ExecutionError

_FUNCTIONS = ("cuLaunchKernelEx", "cuMemsetD8Async", "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuTensorMapReplaceAddress")


SOURCES = Path(__file__).parent.parent / "native"
"""In a checkout; a wheel has none."""
NOT_BUILT = "not compiled at installation: a C compiler or Python's headers (python3-dev) were missing; with both, install again (--force-reinstall)"
STALE = "older than its sources: install again (pip install --no-deps -e .)"


def built() -> bool:
    """Whether the compiled part is there and can be used."""
    return _module() is not None


def where() -> tuple[str, str]:
    """Path of the compiled part, and why it cannot be used, "" if it can. It is not imported."""
    spec = find_spec("graphdnn._native")
    if spec is None or not spec.origin:
        return "", NOT_BUILT
    made = Path(spec.origin).stat().st_mtime_ns
    return spec.origin, STALE if any(p.stat().st_mtime_ns > made for p in SOURCES.glob("*.[ch]")) else ""


def connected(driver: Driver) -> Any | None:
    """The module, which calls ``driver`` from now on; None where it was not built, is switched off, or the driver lacks a function."""
    module = _module() if env.native() else None
    if module is not None:
        try:
            module.connect(*map(driver.address, _FUNCTIONS))
        except ExecutionError:  # of CUDA 11: no descriptors, no launch configuration
            return None
    return module


@functools.cache
def _module() -> Any | None:
    try:
        path, fault = where()
        if path and fault:
            log.warning(f"the compiled part of execute, {path}, is not used: it is {fault}")
        return None if fault else import_module("graphdnn._native")
    except (ImportError, OSError):
        return None
