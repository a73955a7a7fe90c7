"""A loaded recipe on a GPU: launch arguments packed once, addresses patched for each call.

All values that differ from call to call lie in one block: addresses in an array, by-value scalars in 8-byte slots after it; a launch holds
pointers to its values. So a call is one slice assignment and one driver call for each step: 1.2 us of host time at 4 tensors besides the driver's
own (Python 3.11 on 2 shared cores, 2026-11). A block in use belongs to one call: it is taken from a free list and given back (list.pop and append
are atomic), which serves threads, streams, and a call made inside a call by a signal handler. The driver copies the arguments during the launch.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from graphdnn import _libcuda, env, log
from graphdnn.codegen.recipes import listings
from graphdnn.codegen.spec import (
    Arg,
    Binary,
    Buffer,
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
    TensorMap,
)
from graphdnn.errors import ExecutionError, explain
from graphdnn.targets import limits, native
from graphdnn.targets.base import Executable, Prepared
from graphdnn.targets.cuda_driver import activated, capturing, load_function, primary_context, resolve_device
from graphdnn.targets.cuda_maps import Descriptor, encode
from graphdnn.targets.cuda_slots import FORMATS, Constants, Slots, as_bits, checks_before, collect, getter

if TYPE_CHECKING:
    from graphdnn.targets.cuda_graph import Nodes

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


class Block:
    """Values of one call and everything that points to them; used by one call at a time."""

    __slots__ = (
        "address",
        "calls",
        "configs",
        "context",
        "context_ref",
        "descriptors",
        "kept",
        "memory",
        "native",
        "pointers",
        "stream",
        "stream_value",
    )

    def __init__(self, slots: Slots) -> None:
        self.memory = ctypes.create_string_buffer(8 * (slots.pointers + len(slots.scalars)) or 8)
        self.address = ctypes.addressof(self.memory)
        self.pointers: Any = (ctypes.c_uint64 * slots.pointers).from_buffer(self.memory)
        self.context = ctypes.c_uint64()
        self.context_ref = ctypes.byref(self.context)
        self.configs: list[_LaunchConfig] = []
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []
        self.descriptors: list[Descriptor] = []
        self.stream = ctypes.c_void_p(0)
        self.stream_value = 0
        self.kept: list[Any] = [self.memory]
        self.native: Any = None

    def set_stream(self, stream: int) -> None:
        """Let the calls go to ``stream``, another one than before (``stream_value``)."""
        self.stream.value = stream
        for config in self.configs:
            config.stream = stream
        self.stream_value = stream


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
        self._checks = checks_before(recipe, self._steps) if env.check_values() else {}
        self.checked = bool(self._checks)
        looked_at = [x.buffer for checks in self._checks.values() for c in checks for x in listings(c).values()]
        self.slots = collect(self._steps, recipe.kernels, looked_at)
        self._scalars_at = 8 * self.slots.pointers
        self._scalars = struct.Struct("<" + "".join(FORMATS[type] for _, type in self.slots.scalars))
        self._fetch = getter(self.slots.tensors)
        self.pick: Callable[[Any], tuple[int, ...]] | None = None
        self._derived = bool(self.slots.offset_tensors or self.slots.workspace)
        self._constants = Constants()
        self._maps = self._encoded()
        self.native = None if self.checked else native.connected(self._driver)
        self._launch = self._driver.new_function("cuLaunchKernelEx")
        self._memset = self._driver.function("cuMemsetD8Async")
        self._current = self._driver.new_function("cuCtxGetCurrent")
        self._free: list[Block] = [self.new_block()]

    def run(
        self, pointers: Mapping[int, int], scalars: Mapping[int, float | int], workspace: int, stream: int, rooms: limits.Rooms | None = None
    ) -> None:
        """Enqueue the steps on ``stream``, a CUstream handle (0: the legacy default stream); never synchronizes unless values are to be checked.

        Makes the device's primary context current for the call if the thread has another one or none. Raises ExecutionError for a missing address
        or scalar, in a process forked after CUDA was started, and for what the driver reports (a fault of an earlier kernel among others).
        """
        self._run(self.fetch(pointers), scalars, workspace, stream, rooms)

    def arrange(self, ids: Sequence[int]) -> None:
        """See the base class."""
        super().arrange(ids)
        self.pick = None if self.ids == self.slots.tensors else getter(tuple(self.ids.index(t) for t in self.slots.tensors))

    def run_at(
        self, addresses: Sequence[int], scalars: Mapping[int, float | int], workspace: int, stream: int, rooms: limits.Rooms | None = None
    ) -> None:
        """``run`` with the addresses in the order of ``arrange``."""
        self._run(addresses if self.pick is None else self.pick(addresses), scalars, workspace, stream, rooms)

    def _run(self, addresses: Sequence[int], scalars: Mapping[int, float | int], workspace: int, stream: int, rooms: limits.Rooms | None) -> None:
        if _libcuda.forked:
            raise _libcuda.fork_error()
        try:
            block = self._free.pop()
        except IndexError:
            block = self.new_block()
        try:
            self.patch(block, addresses, scalars, workspace)
            self.submit(block, stream, self.checking(addresses, workspace, stream, rooms) if self.checked else None)
        finally:
            self._free.append(block)

    def graph_nodes(self, pointers: Mapping[int, int], scalars: Mapping[int, float | int], workspace: int) -> Nodes:
        """See the base class; the values are the block's own, which no call uses."""
        from graphdnn.targets import cuda_graph

        if _libcuda.forked:
            raise _libcuda.fork_error()
        if self._checks:
            log.warning("GRAPHDNN_CHECK_VALUES: values are not checked in a CUDA graph")
        block = self.new_block()
        self.patch(block, self.fetch(pointers), scalars, workspace)
        return cuda_graph.nodes(self._driver, self._context, block, self._launch)

    def prepare(
        self, pointers: Mapping[int, int], scalars: Mapping[int, float | int], workspace: int, rooms: limits.Rooms | None = None
    ) -> Prepared:
        """A run with a block of its own."""
        return CudaPrepared(self, pointers, scalars, workspace, rooms)

    def submit(self, block: Block, stream: int, check: Callable[[int], None] | None = None) -> None:
        """Enqueue the steps with the values of ``block``; ``check``: see :meth:`checking`."""
        if stream != block.stream_value:
            block.set_stream(stream)
        if check is None and block.native is not None:
            block.native.launch(stream)
            return
        if self._current(block.context_ref) or block.context.value != self._context:
            self._driver.call("cuCtxPushCurrent_v2", self._context)
            try:
                self._enqueue(block, stream, check)
            finally:
                self._driver.handle("cuCtxPopCurrent_v2")
        elif check is not None:
            self._enqueue(block, stream, check)
        else:
            for function, args in block.calls:
                if result := function(*args):
                    self._failed(block.calls.index((function, args)), result, stream)

    def checking(self, addresses: Sequence[int], workspace: int, stream: int, rooms: limits.Rooms | None) -> Callable[[int], None] | None:
        """Called before every launch with its number: waits for the stream and checks the integers that it, or one behind it, will read, which a
        launch before it may have written. Only where the switch GRAPHDNN_CHECK_VALUES is on; None in a capture."""
        with activated(self._context):
            if capturing(stream):  # a wait would end the capture; and what is read now would not hold for a replay
                log.warning("GRAPHDNN_CHECK_VALUES: values are not checked while a CUDA graph is captured")
                return None

        def address(buffer: Buffer) -> int:
            return (workspace if buffer.kind == "workspace" else addresses[self.slots.tensors.index(buffer.index)]) + buffer.offset

        def fetch(address: int, nbytes: int) -> Any:
            host = ctypes.create_string_buffer(nbytes)
            self._driver.call("cuMemcpyDtoH_v2", ctypes.addressof(host), address, nbytes)
            return host

        def check(number: int) -> None:
            steps = self._checks.get(number, ())
            if steps:
                self._driver.call("cuStreamSynchronize", stream)
            for step in steps:
                limits.check(step, address, fetch, rooms or {})

        return check

    def _enqueue(self, block: Block, stream: int, check: Callable[[int], None] | None = None) -> None:
        for number, (function, args) in enumerate(block.calls):
            if check is not None:
                check(number)
            result = function(*args)
            if result:
                self._failed(number, result, stream)

    def fetch(self, pointers: Mapping[int, int]) -> tuple[int, ...]:
        """The addresses in the order of a block. ExecutionError for a missing one."""
        try:
            return self._fetch(pointers)
        except KeyError as exc:
            raise _missing(exc.args[0], "address") from None

    def patch(self, block: Block, addresses: Sequence[int], scalars: Mapping[int, float | int], workspace: int) -> None:
        """Write one call's values into a block."""
        slots = self.slots
        try:
            values = addresses
            if self._derived:
                values = [*addresses, *[addresses[at] + n for at, n in slots.offset_tensors], *[workspace + n for n in slots.workspace]]
            block.pointers[:] = values
            moved = [d for d in block.descriptors if d.now != values[d.slot]]
            if moved:
                with activated(self._context):  # the driver changes no descriptor for a thread without a context
                    for descriptor in moved:
                        descriptor.move(self._driver, values[descriptor.slot])
        except TypeError:
            found = f"{addresses!r}, workspace {workspace!r}"
            raise ExecutionError(explain("an address is not an int", expected="device addresses as Python ints", found=found)) from None
        if slots.scalars:
            self._patch_scalars(block, scalars)

    def _patch_scalars(self, block: Block, scalars: Mapping[int, float | int]) -> None:
        try:
            self._scalars.pack_into(block.memory, self._scalars_at, *[scalars[i] for i, _ in self.slots.scalars])
        except KeyError as exc:
            raise _missing(exc.args[0], "by-value scalar") from None
        except (struct.error, OverflowError, TypeError):
            # One by one: a double beyond float32 becomes an infinity, as in a cast, and 2.0 serves as an integer; the rest is refused by name.
            for number, (tensor, type) in enumerate(self.slots.scalars):
                try:
                    struct.pack_into("8s", block.memory, self._scalars_at + 8 * number, as_bits(scalars[tensor], type))
                except (struct.error, OverflowError, TypeError, ValueError):
                    rule = "a by-value scalar does not fit its type"
                    raise ExecutionError(explain(rule, tensor=str(tensor), expected=type, found=repr(scalars[tensor]))) from None

    def new_block(self) -> Block:
        """A block with all but the values of a call in place."""
        block = Block(self.slots)
        for step in self._steps:
            if isinstance(step, Memset):
                slot = ctypes.c_uint64.from_address(block.address + 8 * self.slots.position(step.buffer, ""))
                block.calls.append((self._memset, (slot, step.value, step.nbytes, block.stream)))
            elif isinstance(step, Launch):
                block.calls.append((self._launch, self._prepare(step, block)))
        if self.native is not None:
            block.native = self._compiled(block)
        return block

    def _compiled(self, block: Block) -> Any:
        """The block's calls for compiled code, which has descriptors of its own where it moves them."""
        steps = [
            (ctypes.addressof(args[0]._obj), ctypes.addressof(args[1]._obj), ctypes.addressof(args[2]._obj))
            if function is self._launch
            else (0, ctypes.addressof(args[0]), args[1], args[2])
            for function, args in block.calls
        ]
        descriptors = tuple((d.address, d.slot) for d in block.descriptors)
        return self.native.Launches([*block.kept, self._constants], self._failed, self._context, block.address, tuple(steps), descriptors)

    def native_launches(self, addresses: Sequence[int], scalars: Mapping[int, float | int], workspace: int) -> tuple[Any, bytes]:
        """Launch values for compiled code, and the by-value numbers as they lie in them."""
        block = self.new_block()
        self.patch(block, addresses if self.pick is None else self.pick(addresses), scalars, workspace)
        return block.native, bytes(block.memory)[self._scalars_at :][: 8 * len(self.slots.scalars)]

    def _prepare(self, step: Launch, block: Block) -> tuple[Any, Any, Any, None]:
        """Arguments of cuLaunchKernelEx for a launch whose parameters lie in ``block``, made once: ctypes converts an int on every call, and a
        reference never. The handle of a function is an address, so it is passed as a reference to what lies there, which nothing here reads."""
        spec = self._recipe.kernels[step.kernel]
        addresses = [self._place(arg, getattr(param, "type", ""), block) for arg, param in zip(step.args, spec.params, strict=True)]
        parameters = (ctypes.c_void_p * max(len(addresses), 1))(*addresses)
        block.kept.append(parameters)
        config = _LaunchConfig((step.grid, 1, 1), (spec.block, 1, 1), self._dynamic[step.kernel], 0, None, 0)
        block.configs.append(config)
        block.kept.append(config)
        handle = ctypes.c_char.from_address(self._functions[step.kernel])
        return ctypes.byref(config), ctypes.byref(handle), ctypes.byref(parameters), None

    def _place(self, arg: Arg, type: str, block: Block) -> int:
        """Where the value of an argument lies."""
        if isinstance(arg, Constant):
            return self._constants.address(arg, type)
        if isinstance(arg, TensorMap):
            descriptor = Descriptor(self._driver, self._maps[arg], self.slots.position(arg.buffer, ""))
            block.descriptors.append(descriptor)
            block.kept.append(descriptor.memory)
            return descriptor.address
        return block.address + 8 * self.slots.position(arg, type)

    def _encoded(self) -> dict[TensorMap, bytes]:
        """The descriptors of all launches."""
        wanted = dict.fromkeys(a for s in self._steps if isinstance(s, Launch) for a in s.args if isinstance(a, TensorMap))
        if not wanted:
            return {}
        with activated(self._context):
            return {m: encode(self._driver, m) for m in wanted}

    def _failed(self, number: int, result: int, stream: int) -> NoReturn:
        """Raise the error for a step that the driver did not take; -1: the device's context."""
        if _libcuda.forked:
            raise _libcuda.fork_error()
        raise self._driver.error(result, self._describe(number, stream))

    def _describe(self, number: int, stream: int) -> str:
        if number < 0:
            return f"making the context of cuda:{self.device} current"
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


class CudaPrepared(Prepared):
    """Values in a block that no other call uses, so that they stay; TMA descriptors are moved with their tensors, never made again."""

    def __init__(
        self,
        executable: CudaExecutable,
        pointers: Mapping[int, int],
        scalars: Mapping[int, float | int],
        workspace: int,
        rooms: limits.Rooms | None,
    ) -> None:
        self._executable = executable
        self._block = executable.new_block()
        self.update(pointers, scalars, workspace, rooms)

    def update(
        self, pointers: Mapping[int, int], scalars: Mapping[int, float | int], workspace: int, rooms: limits.Rooms | None = None
    ) -> None:
        """Write the values into the block."""
        self._set(self._executable.fetch(pointers), scalars, workspace, rooms)

    def move(self, addresses: Sequence[int]) -> None:
        """Write the addresses into the block."""
        pick = self._executable.pick
        self._set(addresses if pick is None else pick(addresses), self._scalars, self._workspace, None)

    def _set(self, addresses: Sequence[int], scalars: Mapping[int, float | int], workspace: int, rooms: limits.Rooms | None) -> None:
        self._executable.patch(self._block, addresses, scalars, workspace)
        self._addresses, self._scalars, self._workspace, self._rooms = addresses, scalars, workspace, rooms

    def run(self, stream: int) -> None:
        """Enqueue the steps; raises as ``CudaExecutable.run``."""
        if _libcuda.forked:
            raise _libcuda.fork_error()
        executable, check = self._executable, None
        if executable.checked:
            check = executable.checking(self._addresses, self._workspace, stream, self._rooms)
        executable.submit(self._block, stream, check)

    @property
    def runner(self) -> Callable[[int], None]:
        """Compiled, where that is built."""
        return self.run if self._block.native is None else self._block.native.launch


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
        elif isinstance(param, ScalarParam) and param.type not in FORMATS:
            expected, found = f"parameter {param.name} of type {', '.join(FORMATS)}", param.type
    if expected:
        raise ExecutionError(explain(f"{rule}: kernel '{spec.name}'", expected=expected, found=found))


def _missing(tensor: int, what: str) -> ExecutionError:
    return ExecutionError(explain(f"tensor {tensor} has no {what}", expected=f"the {what} of every tensor that the plan reads or writes"))
