"""The NVIDIA driver library through ctypes: opened on first use, never at import; every failure is an ExecutionError with the way out.

Why not ``cuda.bindings``: importing it costs 0.15 s (0.7 s with ``cuda.core``; Python 3.11, 2 cores, 2026-12), where a serialized plan has to load in
10 ms, and one launch through ctypes costs 0.5 us of host time here. The functions used are part of the driver's stable C interface.

Two ways to call: ``driver().call("cuMemAlloc_v2", ...)`` checks the result and explains a failure; ``driver().function("cuLaunchKernelEx")`` is the
bare function for the execute path, whose caller passes the result to ``driver().check``. Addresses and handles are Python ints throughout.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from typing import Any

from graphdnn.errors import ExecutionError, explain

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_CODES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "I": ctypes.c_uint,
    "B": ctypes.c_ubyte,
    "Q": ctypes.c_uint64,
    "z": ctypes.c_size_t,
    "s": ctypes.c_char_p,
}
_SIGNATURES: dict[str, str] = {
    "cuInit": "I",
    "cuDriverGetVersion": "p",
    "cuGetErrorName": "ip",
    "cuGetErrorString": "ip",
    "cuDeviceGetCount": "p",
    "cuDeviceGet": "pi",
    "cuDeviceGetName": "pii",
    "cuDeviceGetAttribute": "pii",
    "cuDevicePrimaryCtxRetain": "pi",
    "cuCtxGetCurrent": "p",
    "cuCtxGetDevice": "p",
    "cuCtxPushCurrent_v2": "p",
    "cuCtxPopCurrent_v2": "p",
    "cuCtxSynchronize": "",
    "cuModuleLoadData": "pp",
    "cuModuleGetFunction": "pps",
    "cuFuncSetAttribute": "pii",
    "cuLaunchKernelEx": "pppp",
    "cuMemsetD8Async": "QBzp",
    "cuTensorMapEncodeTiled": "piIQppppiiii",
    "cuTensorMapReplaceAddress": "pQ",
    "cuMemAlloc_v2": "pz",
    "cuMemFree_v2": "Q",
    "cuMemcpyHtoD_v2": "Qpz",
    "cuMemcpyDtoH_v2": "pQz",
    "cuMemcpyDtoD_v2": "QQz",
    "cuStreamCreate": "pI",
    "cuStreamDestroy_v2": "p",
    "cuStreamSynchronize": "p",
    "cuStreamIsCapturing": "pp",
    "cuStreamBeginCapture_v2": "pi",
    "cuStreamEndCapture": "pp",
    "cuEventCreate": "pI",
    "cuEventRecord": "pp",
    "cuEventSynchronize": "p",
    "cuEventElapsedTime": "ppp",
    "cuEventDestroy_v2": "p",
    "cuThreadExchangeStreamCaptureMode": "p",
    "cuGraphCreate": "pI",
    "cuGraphDestroy": "p",
    "cuGraphAddKernelNode_v2": "pppzp",
    "cuGraphAddMemsetNode": "pppzpp",
    "cuGraphGetNodes": "ppp",
    "cuGraphGetRootNodes": "ppp",
    "cuGraphNodeGetDependentNodes": "ppp",
    "cuGraphNodeGetType": "pp",
    "cuGraphKernelNodeGetParams_v2": "pp",
    "cuGraphKernelNodeSetParams_v2": "pp",
    "cuGraphMemsetNodeGetParams": "pp",
    "cuGraphMemsetNodeSetParams": "pp",
    "cuGraphInstantiateWithFlags": "ppQ",
    "cuGraphLaunch": "pp",
    "cuGraphExecDestroy": "p",
}
_STICKY = frozenset({226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721})
_FIXES: dict[int, str] = {
    2: "free device memory, or choose a plan with less workspace (deselect_workspace_greater_than)",
    3: "if this process was forked after CUDA was first used, start it with the 'spawn' method or use CUDA only in the child",
    4: "do not use CUDA while the process ends (atexit functions, destructors)",
    46: "the device is busy or in exclusive mode: see which process holds it with nvidia-smi, or use another GPU",
    34: "libcuda.so.1 is a stub for linking; put the real driver's folder first in LD_LIBRARY_PATH",
    36: "update the NVIDIA driver; graphdnn needs one for CUDA 12.0 or newer",
    100: "check that nvidia-smi lists a GPU and that CUDA_VISIBLE_DEVICES does not hide it (containers: docker run --gpus all), or use device='cpu'",
    101: "no such device, or it is gone: check nvidia-smi and CUDA_VISIBLE_DEVICES, then restart the process",
    200: "rebuild the plan; its machine code is damaged or for another kind of device",
    209: "build the plan for the architecture of this GPU",
    214: "the GPU's memory is faulty: restart the process, and look at nvidia-smi -q -d ECC",
    400: "pass a live stream of the plan's device; a destroyed stream, or one of another device, is not valid",
    701: "use a plan with fewer registers or less shared memory; the launch asks for more than the device has",
    709: "pass a live stream if this one was destroyed; if the device was reset (cudaDeviceReset, cuDevicePrimaryCtxReset), restart the process",
    803: "the driver library and the kernel module are of different versions: restart the machine or reinstall the driver",
    804: "update the NVIDIA driver, or remove the CUDA compatibility libraries from LD_LIBRARY_PATH",
    900: "do this before the capture begins: load the plan and run it once",
    901: "the capture failed earlier; end it, fix the first error and capture again",
    906: "capture on a stream of your own: the legacy default stream cannot be captured",
    999: "restart the process; the GPU may have fallen off the bus: see nvidia-smi and dmesg (Xid), and reset it or the machine",
}
_STICKY_FIX = (
    "an earlier kernel of this process failed, not necessarily one of this plan; every CUDA call of the process fails from now on, so restart it. "
    "CUDA_LAUNCH_BLOCKING=1, or running under compute-sanitizer, shows the launch that failed"
)

_lock = threading.Lock()
_driver: Driver | None = None
forked = False
"""True in a process that was forked after CUDA was initialised here: the driver does not work in such a child. The execute path reads it."""


class Driver:
    """The opened and initialised driver library."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._functions: dict[str, Any] = {}

    def function(self, name: str) -> Any:
        """The bare function ``name``; it returns the CUresult as an int."""
        found = self._functions.get(name)
        if found is None:
            found = self.new_function(name)
            found.argtypes = [_CODES[c] for c in _SIGNATURES[name]]
            self._functions[name] = found
        return found

    def new_function(self, name: str) -> Any:
        """A function object of its own without argument types: cheaper to call with ctypes objects that were made before (``byref(...)``)."""
        try:
            found = self._library[name]
        except AttributeError:
            raise ExecutionError(
                explain(
                    f"the NVIDIA driver has no function {name}",
                    expected="a driver for CUDA 12.0 or newer",
                    found=f"CUDA {self.version_text()}",
                    fix="update the driver",
                )
            ) from None
        found.restype = ctypes.c_int
        return found

    def address(self, name: str) -> int:
        """Where the function ``name`` lies, for compiled code. ExecutionError if there is none."""
        return ctypes.cast(self.function(name), ctypes.c_void_p).value or 0

    def call(self, name: str, *args: Any) -> None:
        """Call ``name``. Raises ExecutionError if it fails, and in a child forked after CUDA was started."""
        if forked:
            raise fork_error()
        self.check(self.function(name)(*args), name)

    def check(self, result: int, doing: str) -> None:
        """Raise the ExecutionError of a result other than 0; ``doing``: what was being done."""
        if result:
            raise self.error(result, doing)

    def error(self, result: int, doing: str) -> ExecutionError:
        """The decoded error: name, the driver's text, and what helps."""
        sticky = result in _STICKY
        fix = _STICKY_FIX if sticky else _FIXES.get(result)
        return ExecutionError(
            explain(
                f"CUDA error in {doing}",
                found=f"{self._text('cuGetErrorName', result)} ({result}): {self._text('cuGetErrorString', result)}",
                fix=fix,
            )
        )

    def _text(self, function: str, result: int) -> str:
        text = ctypes.c_char_p()
        failed = self.function(function)(result, ctypes.addressof(text))
        return "unknown error" if failed or not text.value else text.value.decode(errors="replace")

    def value(self, name: str, *args: int) -> int:
        """Result of a function that writes one int through its first argument."""
        out = ctypes.c_int()
        self.call(name, ctypes.addressof(out), *args)
        return out.value

    def handle(self, name: str, *args: Any) -> int:
        """Result of a function that writes one handle or address through its first argument; 0 for null."""
        out = ctypes.c_uint64()
        self.call(name, ctypes.addressof(out), *args)
        return out.value

    def version_text(self) -> str:
        """Newest CUDA version that the driver runs, "13.0"; "unknown" if it does not say."""
        out = ctypes.c_int()
        if self.function("cuDriverGetVersion")(ctypes.addressof(out)):
            return "unknown"
        return f"{out.value // 1000}.{out.value % 1000 // 10}"

    def current_device(self) -> int | None:
        """Device of the context that is current in this thread; None if there is none. Creates no context."""
        if not self.handle("cuCtxGetCurrent"):
            return None
        return self.value("cuCtxGetDevice")


def fork_error() -> ExecutionError:
    """What every CUDA use raises in a process forked after CUDA was started."""
    return ExecutionError(
        explain(
            "CUDA cannot be used in a process that was forked after CUDA was started",
            expected="CUDA started in this process",
            found=f"process {os.getpid()}, a fork of one that used CUDA",
            fix="start worker processes with multiprocessing.get_context('spawn'), or use CUDA only in the children",
        )
    )


def _after_fork_in_child() -> None:
    global forked, _lock
    forked = forked or _driver is not None
    _lock = threading.Lock()


def installed() -> bool:
    """Whether there is a driver library to open (0.1 ms where there is none). It may still find no GPU."""
    if _driver is not None:
        return True
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return True


def driver() -> Driver:
    """The driver, opened and initialised on the first call. Creates no context.

    Raises ExecutionError that says what is missing (driver library, working driver, GPU), and in a child forked after CUDA was started. A failure is
    not remembered: the next call tries again.
    """
    global _driver
    if forked:
        raise fork_error()
    if _driver is not None:
        return _driver
    with _lock:
        if _driver is None:
            _driver = _open()
    return _driver


def _open() -> Driver:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as exc:
        raise ExecutionError(
            explain(
                "no NVIDIA driver on this machine",
                expected=f"the driver's library {_LIBRARY}",
                found=str(exc),
                fix="install the NVIDIA driver (containers: docker run --gpus all), use device='cpu', or build for a described device ('sm_90')",
            )
        ) from None
    opened = Driver(library)
    opened.check(opened.function("cuInit")(0), "starting the NVIDIA driver (cuInit)")
    count = ctypes.c_int()
    opened.check(opened.function("cuDeviceGetCount")(ctypes.addressof(count)), "counting the GPUs")
    if count.value == 0:
        raise opened.error(100, "counting the GPUs")
    return opened


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
