"""Contexts and modules on top of the driver library (``graphdnn._libcuda``): what loading a plan needs.

Work is done in the primary context of a device, the one that torch, cupy, numba and cuda.core use, so addresses and streams of theirs are valid.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from graphdnn import _libcuda
from graphdnn.device import runs_on, split_arch
from graphdnn.errors import ExecutionError, explain

_CAPABILITY = (75, 76)
_MAX_DYNAMIC_SHARED = 8
_RELAXED_CAPTURE = 2
_CAPTURE_ERRORS = range(900, 909)

_lock = threading.RLock()
_contexts: dict[int, int] = {}
# Modules are never unloaded. A captured CUDA graph holds bare function handles: it may be replayed after every plan object is gone, and an unload
# would turn that into a crash in the driver. Equal kernels share one module; a cubin is some tens of kilobytes of device memory.
_modules: dict[tuple[int, bytes], int] = {}
_functions: dict[tuple[int, str], tuple[int, int]] = {}


def primary_context(index: int) -> int:
    """Handle of the primary context of device ``index``, created on the first call and kept for the life of the process."""
    with _lock:
        if index not in _contexts:
            driver = _libcuda.driver()
            _contexts[index] = driver.handle("cuDevicePrimaryCtxRetain", driver.value("cuDeviceGet", index))
        return _contexts[index]


@contextmanager
def activated(context: int) -> Iterator[None]:
    """Make ``context`` the thread's current one for the block, if it is not already; what was current is current again afterwards."""
    driver = _libcuda.driver()
    if driver.handle("cuCtxGetCurrent") == context:
        yield
        return
    driver.call("cuCtxPushCurrent_v2", context)
    try:
        yield
    finally:
        driver.handle("cuCtxPopCurrent_v2")


@contextmanager
def capture_allowed() -> Iterator[None]:
    """Let this thread load modules while some stream is being captured; a load is no work of a stream and cannot harm the capture."""
    driver = _libcuda.driver()
    mode = ctypes.c_int(_RELAXED_CAPTURE)
    driver.call("cuThreadExchangeStreamCaptureMode", ctypes.addressof(mode))
    try:
        yield
    finally:
        driver.call("cuThreadExchangeStreamCaptureMode", ctypes.addressof(mode))


def resolve_device(arch: str, index: int) -> int:
    """The device to load on: ``index``, or for -1 the one that is current. Raises ExecutionError if code for ``arch`` does not run there."""
    driver = _libcuda.driver()
    if index < 0:
        index = driver.current_device() or 0
    ordinal = driver.value("cuDeviceGet", index)
    has = (driver.value("cuDeviceGetAttribute", _CAPABILITY[0], ordinal), driver.value("cuDeviceGetAttribute", _CAPABILITY[1], ordinal))
    if not runs_on(arch, has):
        major, minor, suffix = split_arch(arch)
        raise ExecutionError(
            explain(
                "the plan is built for another GPU architecture",
                expected=f"{arch}: compute capability {major}.{minor}{'' if suffix == 'a' else f' to {major}.9'}",
                found=f"cuda:{index} of compute capability {has[0]}.{has[1]}",
                fix=f"build the plan for sm_{has[0]}{has[1]}",
            )
        )
    return index


def load_function(index: int, cubin: bytes, entry: str, dynamic_shared: int) -> int:
    """Handle of kernel ``entry`` of ``cubin`` in the primary context of device ``index``, allowed to use ``dynamic_shared`` bytes.

    Getting the function loads its code even where CUDA loads lazily, so that the first launch may happen inside a capture.
    Raises ExecutionError for a damaged cubin, a missing entry, or more shared memory than the device has.
    """
    driver = _libcuda.driver()
    with _lock, activated(primary_context(index)), capture_allowed():
        name = (index, hashlib.sha256(cubin).digest())
        if name not in _modules:
            # The image must end with a zero byte if the driver takes it for text; a damaged one might be.
            image = ctypes.create_string_buffer(cubin + b"\0")
            out = ctypes.c_uint64()
            driver.check(
                driver.function("cuModuleLoadData")(ctypes.addressof(out), ctypes.addressof(image)), f"loading kernel '{entry}' on cuda:{index}"
            )
            _modules[name] = out.value
        module = _modules[name]
        found = _functions.get((module, entry))
        if found is None:
            out = ctypes.c_uint64()
            driver.check(driver.function("cuModuleGetFunction")(ctypes.addressof(out), module, entry.encode()), f"looking up kernel '{entry}'")
            found = (out.value, 0)
        function, allowed = found
        # The allowance only grows: another plan may share the function.
        if dynamic_shared > allowed:
            doing = f"giving kernel '{entry}' {dynamic_shared} bytes of shared memory"
            driver.check(driver.function("cuFuncSetAttribute")(function, _MAX_DYNAMIC_SHARED, dynamic_shared), doing)
            allowed = dynamic_shared
        _functions[(module, entry)] = (function, allowed)
        return function


def capturing(stream: int, index: int = -1) -> bool:
    """Whether ``stream``, of device ``index`` (-1: the current one), is being captured, or (the legacy default stream) may not be used because
    another one is. ExecutionError for a stream that was destroyed."""
    with activated(primary_context(index if index >= 0 else _libcuda.driver().current_device() or 0)):
        return captured_now(stream)


def captured_now(stream: int) -> bool:
    """:func:`capturing`, for a stream of the context that is current."""
    driver, out = _libcuda.driver(), ctypes.c_int()
    result = driver.function("cuStreamIsCapturing")(stream, ctypes.addressof(out))
    if result in _CAPTURE_ERRORS:
        return True
    driver.check(result, f"asking whether stream {stream:#x} is captured")
    return bool(out.value)


def synchronize(index: int = 0) -> None:
    """Wait for all work on device ``index``. Raises ExecutionError if any of it failed."""
    driver = _libcuda.driver()
    with activated(primary_context(index)):
        driver.call("cuCtxSynchronize")
