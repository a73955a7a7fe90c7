"""A loaded recipe on a GPU: launch arguments packed once, addresses patched for each call.

All values that differ from call to call lie in one block: addresses in an array, by-value scalars in 8-byte slots after it; a launch holds
pointers to its values. So a call is one slice assignment and one driver call for each step: 2.2 us of host time at 4 tensors besides the driver's
own (Python 3.11 on 2 shared cores, 2026-12). A block in use belongs to one call: it is taken from a free list and given back (list.pop and append
are atomic), which serves threads, streams, and a call made inside a call by a signal handler. The driver copies the arguments during the launch.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from graphdnn import _libcuda, env, log
from graphdnn.codegen.spec import (
    Arg,
    Binary,
    Buffer,
    Check,
    Constant,
    DescriptorParam,
    Groups,
    KernelSpec,
    Launch,
    Memset,
    Panels,
    PointerParam,
    Recipe,
    ScalarParam,
    Step,
    TensorMap,
    TensorScalar,
)
from graphdnn.errors import ExecutionError, explain
from graphdnn.targets import cuda_graph, limits
from graphdnn.targets.base import Executable
from graphdnn.targets.cuda_driver import activated, capturing, load_function, primary_context, resolve_device
from graphdnn.targets.cuda_maps import Descriptor, encode

_FORMATS = {"float32": "f4x", "float64": "d", "int32": "i4x", "uint32": "I4x", "int64": "q"}
_MAX_GRID = 2**31 - 1


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig. One pointer to it in place of nine arguments halves what ctypes does for a launch; it also has room for clusters."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


@dataclass(frozen=True, slots=True)
class _Slots:
    """Order of the values in a block: addresses (plain tensors, offset tensors, workspace parts), then scalars."""

    tensors: tuple[int, ...]
    offset_tensors: tuple[tuple[int, int], ...]
    workspace: tuple[int, ...]
    scalars: tuple[tuple[int, str], ...]

    @property
    def pointers(self) -> int:
        """How many addresses there are."""
        return len(self.tensors) + len(self.offset_tensors) + len(self.workspace)

    def position(self, arg: Buffer | TensorScalar, type: str) -> int:
        """Slot number of an argument."""
        if isinstance(arg, TensorScalar):
            return self.pointers + self.scalars.index((arg.index, type))
        if arg.kind == "workspace":
            return len(self.tensors) + len(self.offset_tensors) + self.workspace.index(arg.offset)
        if arg.offset:
            return len(self.tensors) + self.offset_tensors.index((arg.index, arg.offset))
        return self.tensors.index(arg.index)


class _Block:
    """Values of one call and everything that points to them; used by one call at a time."""

    __slots__ = ("_stream_value", "address", "calls", "configs", "context", "context_ref", "descriptors", "keep", "memory", "pointers", "stream")

    def __init__(self, slots: _Slots) -> None:
        self.memory = ctypes.create_string_buffer(8 * (slots.pointers + len(slots.scalars)) or 8)
        self.address = ctypes.addressof(self.memory)
        self.pointers: Any = (ctypes.c_uint64 * slots.pointers).from_buffer(self.memory)
        self.context = ctypes.c_uint64()
        self.context_ref = ctypes.byref(self.context)
        self.configs: list[_LaunchConfig] = []
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []
        self.keep: list[Any] = []
        self.descriptors: list[Descriptor] = []
        self.stream = ctypes.c_void_p(0)
        self._stream_value = 0

    def set_stream(self, stream: int) -> None:
        """Let the calls go to ``stream``; cheap where it is the one of the call before."""
        if stream != self._stream_value:
            self.stream.value = stream
            for config in self.configs:
                config.stream = stream
            self._stream_value = stream


class CudaExecutable(Executable):
    """Runs the steps on one device, on the stream of each call."""

    def __init__(self, recipe: Recipe, binaries: Sequence[Binary], arch: str, index: int) -> None:
        """Load every kernel. Raises ExecutionError without a driver or GPU, on the wrong architecture, or for damaged code."""
        self._check(recipe, binaries)
        self._driver = _libcuda.driver()
        self.device = resolve_device(arch, index)
        self._context = primary_context(self.device)
        self._recipe = recipe
        self._names = [b.entry for b in binaries]
        self._dynamic = [max(0, s.shared_bytes - int(b.facts.get("static_shared_bytes", 0))) for s, b in zip(recipe.kernels, binaries, strict=True)]
        self._functions = [load_function(self.device, b.code, b.entry, d) for b, d in zip(binaries, self._dynamic, strict=True)]
        self._steps = tuple(s for s in recipe.steps if (s.grid if isinstance(s, Launch) else isinstance(s, Memset) and s.nbytes))
        self._checks = _checks(recipe, self._steps) if env.check_values() else {}
        self._slots = _collect(self._steps, recipe.kernels)
        self._scalars_at = 8 * self._slots.pointers
        self._scalars = struct.Struct("<" + "".join(_FORMATS[type] for _, type in self._slots.scalars))
        self._tensors = _getter(self._slots.tensors)
        self._constants = _Constants()
        self._maps = self._encoded()
        self._launch = self._driver.function("cuLaunchKernelEx")
        self._memset = self._driver.function("cuMemsetD8Async")
        self._current = self._driver.new_function("cuCtxGetCurrent")
        self._free: list[_Block] = [self._new_block()]

    def run(
        self, pointers: Mapping[int, int], scalars: Mapping[int, float | int], workspace: int, stream: int, rooms: limits.Rooms | None = None
    ) -> None:
        """Enqueue the steps on ``stream``, a CUstream handle (0: the legacy default stream); never synchronizes unless values are to be checked.

        Makes the device's primary context current for the call if the thread has another one or none. Raises ExecutionError for a missing address
        or scalar, in a process forked after CUDA was started, and for what the driver reports (a fault of an earlier kernel among others).
        """
        if _libcuda.forked:
            raise _libcuda.fork_error()
        check = self._checking(pointers, workspace, stream, rooms or {}) if self._checks else None
        try:
            block = self._free.pop()
        except IndexError:
            block = self._new_block()
        try:
            self._patch(block, pointers, scalars, workspace)
            block.set_stream(stream)
            if self._current(block.context_ref) == 0 and block.context.value == self._context:
                self._enqueue(block, stream, check)
            else:
                self._driver.call("cuCtxPushCurrent_v2", self._context)
                try:
                    self._enqueue(block, stream, check)
                finally:
                    self._driver.handle("cuCtxPopCurrent_v2")
        finally:
            self._free.append(block)

    def graph_nodes(self, pointers: Mapping[int, int], scalars: Mapping[int, float | int], workspace: int) -> cuda_graph.Nodes:
        """See the base class; the values are the block's own, which no call uses."""
        if _libcuda.forked:
            raise _libcuda.fork_error()
        if self._checks:
            log.warning("GRAPHDNN_CHECK_VALUES: values are not checked in a CUDA graph")
        block = self._new_block()
        self._patch(block, pointers, scalars, workspace)
        return cuda_graph.nodes(self._driver, self._context, block, self._launch)

    def _checking(self, pointers: Mapping[int, int], workspace: int, stream: int, rooms: limits.Rooms) -> Callable[[int], None] | None:
        """Called before every launch with its number: waits for the stream and checks the integers that it, or one behind it, will read, which a
        launch before it may have written. Only where the switch GRAPHDNN_CHECK_VALUES is on; None in a capture."""
        with activated(self._context):
            if capturing(stream):  # a wait would end the capture; and what is read now would not hold for a replay
                log.warning("GRAPHDNN_CHECK_VALUES: values are not checked while a CUDA graph is captured")
                return None

        def address(buffer: Buffer) -> int:
            return (workspace if buffer.kind == "workspace" else pointers[buffer.index]) + buffer.offset

        def fetch(address: int, nbytes: int) -> Any:
            host = ctypes.create_string_buffer(nbytes)
            self._driver.call("cuMemcpyDtoH_v2", ctypes.addressof(host), address, nbytes)
            return host

        def check(number: int) -> None:
            steps = self._checks.get(number, ())
            if steps:
                self._driver.call("cuStreamSynchronize", stream)
            for step in steps:
                limits.check(step, address, fetch, rooms)

        return check

    def _enqueue(self, block: _Block, stream: int, check: Callable[[int], None] | None = None) -> None:
        for number, (function, args) in enumerate(block.calls):
            if check is not None:
                check(number)
            result = function(*args)
            if result:
                raise self._driver.error(result, self._describe(number, stream))

    def _patch(self, block: _Block, pointers: Mapping[int, int], scalars: Mapping[int, float | int], workspace: int) -> None:
        """Write this call's values into the block."""
        slots = self._slots
        try:
            values = self._tensors(pointers)
            if slots.offset_tensors:
                values += tuple([pointers[i] + offset for i, offset in slots.offset_tensors])
            if slots.workspace:
                values += tuple([workspace + offset for offset in slots.workspace])
            block.pointers[:] = values
            for descriptor in block.descriptors:
                descriptor.move(self._driver, values[descriptor.slot])
        except KeyError as exc:
            raise _missing(exc.args[0], "address") from None
        except TypeError:
            found = f"{pointers!r}, workspace {workspace!r}"
            raise ExecutionError(explain("an address is not an int", expected="device addresses as Python ints", found=found)) from None
        if slots.scalars:
            self._patch_scalars(block, scalars)

    def _patch_scalars(self, block: _Block, scalars: Mapping[int, float | int]) -> None:
        try:
            self._scalars.pack_into(block.memory, self._scalars_at, *[scalars[i] for i, _ in self._slots.scalars])
        except KeyError as exc:
            raise _missing(exc.args[0], "by-value scalar") from None
        except (struct.error, OverflowError, TypeError):
            # One by one: a double beyond float32 becomes an infinity, as in a cast, and 2.0 serves as an integer; the rest is refused by name.
            for number, (tensor, type) in enumerate(self._slots.scalars):
                try:
                    struct.pack_into("8s", block.memory, self._scalars_at + 8 * number, _bits(scalars[tensor], type))
                except (struct.error, OverflowError, TypeError, ValueError):
                    rule = "a by-value scalar does not fit its type"
                    raise ExecutionError(explain(rule, tensor=str(tensor), expected=type, found=repr(scalars[tensor]))) from None

    def _new_block(self) -> _Block:
        block = _Block(self._slots)
        for step in self._steps:
            if isinstance(step, Memset):
                slot = ctypes.c_uint64.from_address(block.address + 8 * self._slots.position(step.buffer, ""))
                block.calls.append((self._memset, (slot, step.value, step.nbytes, block.stream)))
            elif isinstance(step, Launch):
                block.calls.append((self._launch, self._prepare(step, block)))
        return block

    def _prepare(self, step: Launch, block: _Block) -> tuple[int, int, int, None]:
        """Arguments of cuLaunchKernelEx for a launch whose parameters lie in ``block``."""
        spec = self._recipe.kernels[step.kernel]
        addresses = [self._place(arg, getattr(param, "type", ""), block) for arg, param in zip(step.args, spec.params, strict=True)]
        parameters = (ctypes.c_void_p * max(len(addresses), 1))(*addresses)
        config = _LaunchConfig((step.grid, 1, 1), (spec.block, 1, 1), self._dynamic[step.kernel], 0, None, 0)
        block.configs.append(config)
        block.keep.append(parameters)
        return ctypes.addressof(config), self._functions[step.kernel], ctypes.addressof(parameters), None

    def _place(self, arg: Arg, type: str, block: _Block) -> int:
        """Where the value of an argument lies."""
        if isinstance(arg, Constant):
            return self._constants.address(arg, type)
        if isinstance(arg, TensorMap):
            descriptor = Descriptor(self._driver, self._maps[arg], self._slots.position(arg.buffer, ""))
            block.descriptors.append(descriptor)
            return descriptor.address
        return block.address + 8 * self._slots.position(arg, type)

    def _encoded(self) -> dict[TensorMap, bytes]:
        """The descriptors of all launches."""
        wanted = dict.fromkeys(a for s in self._steps if isinstance(s, Launch) for a in s.args if isinstance(a, TensorMap))
        if not wanted:
            return {}
        with activated(self._context):
            return {m: encode(self._driver, m) for m in wanted}

    def _describe(self, number: int, stream: int) -> str:
        step = self._steps[number]
        what = f"kernel '{self._names[step.kernel]}' (grid {step.grid})" if isinstance(step, Launch) else "a memset"
        return f"step {number} of the plan, {what}, on cuda:{self.device}, stream {stream:#x}"

    @staticmethod
    def _check(recipe: Recipe, binaries: Sequence[Binary]) -> None:
        """Refuse a recipe that the launches would read wrongly; such a recipe comes from a damaged or foreign file."""
        if len(binaries) != len(recipe.kernels):
            raise ExecutionError(explain("the plan has not one binary a kernel", expected=len(recipe.kernels), found=len(binaries)))
        for number, step in enumerate(recipe.steps):
            if isinstance(step, Panels | Groups):
                found = type(step).__name__
                raise ExecutionError(explain(f"step {number} of the plan runs on a CPU only", expected="Launch or Memset", found=found))
            if isinstance(step, Launch):
                _check_launch(number, step, recipe.kernels)


def _check_launch(number: int, step: Launch, kernels: Sequence[KernelSpec]) -> None:
    rule, expected, found = f"step {number} of the plan cannot be launched", "", ""
    if not 0 <= step.kernel < len(kernels):
        raise ExecutionError(explain(rule, expected=f"a kernel below {len(kernels)}", found=step.kernel))
    spec = kernels[step.kernel]
    if not 0 <= step.grid <= _MAX_GRID:
        expected, found = f"a grid from 0 to {_MAX_GRID} blocks", str(step.grid)
    elif not 1 <= spec.block <= 1024:
        expected, found = "1 to 1024 threads a block", str(spec.block)
    elif len(step.args) != len(spec.params):
        expected, found = f"{len(spec.params)} arguments", str(len(step.args))
    for arg, param in zip(step.args, spec.params, strict=False):
        if isinstance(param, PointerParam) != isinstance(arg, Buffer) or isinstance(param, DescriptorParam) != isinstance(arg, TensorMap):
            expected, found = f"a {type(param).__name__} for parameter {param.name}", repr(arg)
        elif isinstance(param, ScalarParam) and param.type not in _FORMATS:
            expected, found = f"parameter {param.name} of type {', '.join(_FORMATS)}", param.type
    if expected:
        raise ExecutionError(explain(f"{rule}: kernel '{spec.name}'", expected=expected, found=found))


def _missing(tensor: int, what: str) -> ExecutionError:
    return ExecutionError(explain(f"tensor {tensor} has no {what}", expected=f"the {what} of every tensor that the plan reads or writes"))


class _Constants:
    """Numbers known at build, each in memory of its own that every block shares; only read after the load."""

    def __init__(self) -> None:
        self._kept: dict[bytes, Any] = {}

    def address(self, arg: Constant, type: str) -> int:
        """Address of the constant in the type of its parameter."""
        bits = _bits(arg.value, type)
        memory = self._kept.setdefault(bits, ctypes.create_string_buffer(bits, 8))
        return ctypes.addressof(memory)


def _bits(value: float | int, type: str) -> bytes:
    """8 bytes that hold ``value`` as ``type``; a double beyond float32 becomes an infinity, as in a cast."""
    if type == "float32":
        return bytes(ctypes.c_float(float(value))).ljust(8, b"\0")
    return struct.pack("<" + _FORMATS[type], float(value) if type == "float64" else int(value))


def _collect(steps: Sequence[Any], kernels: Sequence[KernelSpec]) -> _Slots:
    """Every distinct value that the steps take from a call."""
    tensors: dict[int, None] = {}
    offset_tensors: dict[tuple[int, int], None] = {}
    workspace: dict[int, None] = {}
    scalars: dict[tuple[int, str], None] = {}
    for step in steps:
        pairs = (
            [(step.buffer, "")]
            if isinstance(step, Memset)
            else [(a, getattr(p, "type", "")) for a, p in zip(step.args, kernels[step.kernel].params, strict=True)]
        )
        for given, type in pairs:
            arg = given.buffer if isinstance(given, TensorMap) else given
            if isinstance(arg, TensorScalar):
                scalars[(arg.index, type)] = None
            elif isinstance(arg, Buffer) and arg.kind == "workspace":
                workspace[arg.offset] = None
            elif isinstance(arg, Buffer) and arg.offset:
                offset_tensors[(arg.index, arg.offset)] = None
            elif isinstance(arg, Buffer):
                tensors[arg.index] = None
    return _Slots(tuple(tensors), tuple(offset_tensors), tuple(workspace), tuple(scalars))


def _getter(ids: tuple[int, ...]) -> Callable[[Mapping[int, int]], tuple[int, ...]]:
    """Fetches the addresses of ``ids`` as a tuple, in C where there are several."""
    if not ids:
        return lambda pointers: ()
    if len(ids) == 1:
        first = ids[0]
        return lambda pointers: (pointers[first],)
    return itemgetter(*ids)


def _checks(recipe: Recipe, launched: Sequence[Step]) -> dict[int, tuple[Check, ...]]:
    """Checks by the number, among the steps that are launched, of the one that they stand before."""
    found: dict[int, tuple[Check, ...]] = {}
    number = 0
    for step in recipe.steps:
        if isinstance(step, Check):
            found[number] = (*found.get(number, ()), step)
        elif number < len(launched) and step is launched[number]:
            number += 1
    return found
