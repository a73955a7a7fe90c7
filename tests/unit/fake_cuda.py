"""A driver library in Python: the tests of loading and launching run where there is no GPU.

It takes what ctypes would pass to libcuda (ints that are addresses, or ctypes objects), keeps what a launch would read, and fails on request.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from graphdnn.codegen.spec import DescriptorParam, PointerParam

_LAUNCH_CONFIG = [
    ("grid", ctypes.c_uint * 3),
    ("block", ctypes.c_uint * 3),
    ("shared", ctypes.c_uint),
    ("stream", ctypes.c_void_p),
    ("attrs", ctypes.c_void_p),
]
CONTEXT = 0xC0
_VOID, _LONG = ctypes.c_void_p, ctypes.c_uint64
COMPILED = {
    "cuLaunchKernelEx": ctypes.CFUNCTYPE(ctypes.c_int, _VOID, _VOID, _VOID, _VOID),
    "cuMemsetD8Async": ctypes.CFUNCTYPE(ctypes.c_int, _LONG, ctypes.c_ubyte, ctypes.c_size_t, _VOID),
    "cuCtxGetCurrent": ctypes.CFUNCTYPE(ctypes.c_int, _VOID),
    "cuCtxPushCurrent_v2": ctypes.CFUNCTYPE(ctypes.c_int, _VOID),
    "cuCtxPopCurrent_v2": ctypes.CFUNCTYPE(ctypes.c_int, _VOID),
    "cuTensorMapReplaceAddress": ctypes.CFUNCTYPE(ctypes.c_int, _VOID, _LONG),
}
"""Functions that compiled code calls: these have an address."""


class LaunchConfig(ctypes.Structure):
    _fields_ = [*_LAUNCH_CONFIG, ("count", ctypes.c_uint)]


class Descriptor(ctypes.Structure):
    """A TMA descriptor as a parameter; its value is the address in it."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]

    @property
    def value(self) -> int:
        assert ctypes.addressof(self) % 64 == 0
        return int(self.words[0])


def _int(value: Any) -> int:
    value = getattr(value, "_obj", value)
    if isinstance(value, ctypes.c_void_p | ctypes.c_uint64):
        return value.value or 0
    return int(value or 0)


def _at(value: Any) -> int:
    """The address that a pointer parameter gets."""
    return ctypes.addressof(value._obj) if hasattr(value, "_obj") else int(value)


def _write(where: Any, value: int, kind: Any = ctypes.c_uint64) -> None:
    target = getattr(where, "_obj", None)
    if target is None:
        target = kind.from_address(where)
    target.value = value


def parameters_of(plan: Any) -> dict[str, list[Any]]:
    """What FakeCuda needs to know of the kernels of a built plan."""
    return {k.binary.entry: kinds(k.spec) for k in plan.kernels}


def kinds(spec: Any) -> list[Any]:
    """What a launch passes for each parameter of a kernel."""
    return [_FORMS.get(type(p)) or _NUMBERS[p.type] for p in spec.params]


_FORMS = {PointerParam: ctypes.c_uint64, DescriptorParam: Descriptor}
_NUMBERS = {"float32": ctypes.c_float, "float64": ctypes.c_double, "int32": ctypes.c_int32, "uint32": ctypes.c_uint32, "int64": ctypes.c_int64}


class _Function:
    """What ``library[name]`` gives: callable, with the attributes that ctypes functions have."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.argtypes: Any = None
        self.restype: Any = None

    def __call__(self, *args: Any) -> int:
        return int(self.call(*args) or 0)


class FakeCuda:
    """``parameters``: ctypes types of the kernel's parameters, by entry. ``fail``: function name -> CUresult. ``log``: what happened, in
    order; ``calls``: the name of every function that was called."""

    def __init__(self, parameters: dict[str, list[Any]], capability: tuple[int, int] = (9, 0), devices: int = 1) -> None:
        self.parameters = parameters
        self.capability = capability
        self.devices = devices
        self.fail: dict[str, int] = {}
        self.log: list[tuple[Any, ...]] = []
        self.calls: list[str] = []
        self.functions: list[str] = []
        self.captured: set[int] = set()
        self.broken: list[Exception] = []
        self._local = threading.local()

    @property
    def stack(self) -> list[int]:
        """Contexts of this thread, the current one last."""
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack

    def __getitem__(self, name: str) -> Any:
        method = getattr(self, name, None)
        if method is None:
            raise AttributeError(name)

        def call(*args: Any) -> int | None:
            self.calls.append(name)
            return self.fail[name] if name in self.fail else method(*args)

        if name not in COMPILED:
            return _Function(call)

        def checked(*args: Any) -> int:
            try:
                return int(call(*args) or 0)
            except Exception as error:  # ctypes would print it, and go on with 0
                self.broken.append(error)
                return 999

        return COMPILED[name](checked)

    def cuInit(self, flags: int) -> None: ...

    def cuDriverGetVersion(self, out: int) -> None:
        _write(out, 13000, ctypes.c_int)

    def cuGetErrorName(self, code: int, out: int) -> int:
        names = {1: b"CUDA_ERROR_INVALID_VALUE", 100: b"CUDA_ERROR_NO_DEVICE", 700: b"CUDA_ERROR_ILLEGAL_ADDRESS", 200: b"CUDA_ERROR_INVALID_IMAGE"}
        if code not in names:
            return 1
        ctypes.c_char_p.from_address(out).value = names[code]
        return 0

    def cuGetErrorString(self, code: int, out: int) -> int:
        return self.cuGetErrorName(code, out)

    def cuDeviceGetCount(self, out: int) -> None:
        _write(out, self.devices, ctypes.c_int)

    def cuDeviceGet(self, out: int, index: int) -> int:
        _write(out, index, ctypes.c_int)
        return 0 if 0 <= index < self.devices else 101

    def cuDeviceGetName(self, out: int, size: int, ordinal: int) -> None:
        ctypes.memmove(out, b"Fake GPU\0", 9)

    def cuDeviceGetAttribute(self, out: int, attribute: int, ordinal: int) -> None:
        values = {
            16: 132,
            13: 1980000,
            36: 3201000,
            37: 6144,
            38: 60 << 20,
            75: self.capability[0],
            76: self.capability[1],
            81: 233472,
            82: 65536,
            97: 232448,
            10: 32,
        }
        _write(out, values[attribute], ctypes.c_int)

    def cuDevicePrimaryCtxRetain(self, out: int, ordinal: int) -> None:
        self.log.append(("retain", ordinal))
        _write(out, CONTEXT + ordinal)

    def cuCtxGetCurrent(self, out: Any) -> None:
        _write(out, self.stack[-1] if self.stack else 0)

    def cuCtxGetDevice(self, out: int) -> None:
        _write(out, self.stack[-1] - CONTEXT, ctypes.c_int)

    def cuCtxPushCurrent_v2(self, context: int) -> None:
        self.log.append(("push", context))
        self.stack.append(context)

    def cuCtxPopCurrent_v2(self, out: int) -> None:
        self.log.append(("pop",))
        _write(out, self.stack.pop())

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> None: ...

    def cuModuleLoadData(self, out: int, image: int) -> None:
        self.log.append(("load", ctypes.string_at(image)))
        _write(out, 0xA000 + len(self.log))

    def cuModuleGetFunction(self, out: int, module: int, name: bytes) -> int:
        if name.decode() not in self.parameters:
            return 500
        self.functions.append(name.decode())
        _write(out, len(self.functions))
        return 0

    def cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> None:
        self.log.append(("attribute", attribute, value))

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: None) -> None:
        config, function, parameters = _at(config), _at(function), _at(parameters)
        launch, name = LaunchConfig.from_address(config), self.functions[function - 1]
        kinds = self.parameters[name]
        places = (ctypes.c_void_p * len(kinds)).from_address(parameters)
        values = [kind.from_address(place).value for kind, place in zip(kinds, places, strict=True)]
        self.log.append(("launch", name, tuple(launch.grid), tuple(launch.block), launch.shared, launch.stream or 0, values, self.stack[-1]))

    def cuTensorMapEncodeTiled(self, out: int, *what: int) -> None:
        kind, rank, address, dims, strides, box, steps, interleave, swizzle, promotion, fill = what
        wide, narrow = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
        assert out % 64 == 0 and list(narrow.from_address(steps)) == [1] * rank and (interleave, fill) == (0, 0)
        outer = (ctypes.c_uint64 * (rank - 1)).from_address(strides)
        self.log.append(("encode", kind, list(wide.from_address(dims)), list(outer), list(narrow.from_address(box)), swizzle))
        _write(out, address)
        _write(out + 8, len(self.log))

    def cuTensorMapReplaceAddress(self, out: int, address: int) -> None:
        assert self.stack, "CUDA_ERROR_INVALID_CONTEXT: the thread has no context (H200, 2026-11-30)"
        self.log.append(("move", address))
        _write(out, address)

    def cuStreamIsCapturing(self, stream: int, out: int) -> None:
        _write(out, int(stream in self.captured), ctypes.c_int)

    def cuMemsetD8Async(self, address: Any, value: int, nbytes: int, stream: Any) -> None:
        self.log.append(("memset", _int(address), value, nbytes, _int(stream)))

    def cuStreamSynchronize(self, stream: Any) -> None:
        self.log.append(("synchronize", _int(stream)))

    def cuMemcpyDtoH_v2(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)
