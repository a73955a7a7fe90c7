"""Simulator target: CUDA kernel text run in this process, in Python, with every access checked.

A block's threads take turns (:mod:`graphdnn.intrinsics.simblock`), blocks run one after another, and one plan runs at a time in a process.
The checks: indices against the extents of the tensors, alignment, unset shared or local memory, races between barriers, deadlock, types that no GPU
code would have. Each failure is a SimulationError that names kernel, block, thread, line and, for memory, the parameter and the index.

The workspace is filled with 0xFF (NaN in every float type, -1) before a run, so that a kernel that relies on what it left there shows.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import Any

from graphdnn import env, intrinsics
from graphdnn.codegen.spec import (
    Arg,
    Binary,
    Buffer,
    Check,
    Constant,
    DescriptorParam,
    KernelSpec,
    Launch,
    Memset,
    Param,
    PointerParam,
    Recipe,
    Source,
    TensorMap,
    TensorScalar,
)
from graphdnn.errors import BuildError, explain
from graphdnn.intrinsics.errors import SimulationError
from graphdnn.targets import limits
from graphdnn.targets.base import Executable, Target

__all__ = ["SimulationError", "SimulatorExecutable", "SimulatorTarget"]

_LAUNCHES = threading.Lock()
_UNSET_WORKSPACE = 0xFF


class SimulatorTarget(Target):
    """Runs CUDA kernel text without a GPU. The binary of a kernel is its text."""

    name = "cudasim"

    def toolchain_key(self) -> str:
        """The digest of the intrinsics, whose models run the text."""
        return f"cudasim {intrinsics.digest()}"

    def compile(self, source: Source) -> Binary:
        """Check that the text is Python and defines the entry. Raises BuildError."""
        try:
            code = compile(source.text, _filename(source.spec), "exec")
        except SyntaxError as error:
            raise BuildError(explain(f"kernel '{source.entry}' is no valid Python: {error}")) from error
        if source.entry not in code.co_names:
            raise BuildError(explain(f"the text of kernel '{source.entry}' does not define it", expected=f"def {source.entry}(...)"))
        return Binary(source.entry, source.text.encode(), {"arch": "cudasim"})

    def load(self, recipe: Recipe, binaries: Sequence[Binary]) -> SimulatorExecutable:
        """Execute the texts in the simulator's namespace."""
        return SimulatorExecutable(recipe, [_Kernel.load(spec, b) for spec, b in zip(recipe.kernels, binaries, strict=True)])


def _filename(spec: KernelSpec) -> str:
    return f"<graphdnn kernel {spec.name} {spec.digest()[:8]}>"


@dataclass(frozen=True)
class _Kernel:
    """A loaded kernel: its function, and its text for messages."""

    spec: KernelSpec
    entry: Callable[..., None]
    code: CodeType
    lines: tuple[str, ...]

    @staticmethod
    def load(spec: KernelSpec, binary: Binary) -> _Kernel:
        text = binary.code.decode()
        space = intrinsics.namespace("cudasim")
        exec(compile(text, _filename(spec), "exec"), space)
        entry = space[binary.entry]
        return _Kernel(spec, entry, entry.__code__, tuple(text.splitlines()))

    def place(self, trace: TracebackType | None) -> str:
        """The line of the text that a traceback goes through, if any: ", line 7: x = p0[i]"."""
        line = 0
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self.code.co_filename:
                line = trace.tb_lineno
            trace = trace.tb_next
        return f", line {line}: {self.lines[line - 1].strip()}" if line else ""


class SimulatorExecutable(Executable):
    """A recipe in the simulator. Runs of several threads follow one another."""

    def __init__(self, recipe: Recipe, kernels: Sequence[_Kernel]) -> None:
        self._recipe = recipe
        self._kernels = tuple(kernels)
        self._extents: Mapping[int, tuple[int, int]] = {}
        self._workspace_bytes = recipe.workspace

    def set_extents(self, extents: Mapping[int, tuple[int, int]], workspace_bytes: int) -> None:
        """Tell how far the memory of each tensor reaches, once after load: tensor id -> (first byte, end) relative to its address.

        ``workspace_bytes`` is what execute() is given. Accesses to a tensor that is not listed are checked for negative indices and alignment only.
        """
        self._extents = dict(extents)
        self._workspace_bytes = workspace_bytes

    def run(
        self, pointers: Mapping[int, int], scalars: Mapping[int, float | int], workspace: int, stream: int, rooms: limits.Rooms | None = None
    ) -> None:
        """Run all steps to their end; ``stream`` means nothing here. Raises SimulationError."""
        size = max((k.spec.block * k.spec.cluster for k in self._kernels), default=1)
        with _LAUNCHES, ThreadPoolExecutor(max(1, size)) as pool:
            if workspace:
                ctypes.memset(workspace, _UNSET_WORKSPACE, self._workspace_bytes)
            for step in self._recipe.steps:
                if isinstance(step, Memset):
                    self._memset(step, pointers, workspace)
                elif isinstance(step, Launch):
                    self._launch(step, pointers, scalars, workspace, pool)
                elif isinstance(step, Check):
                    if env.check_values():
                        limits.check(step, lambda b: self._locate(b, pointers, workspace)[0], rooms=rooms)
                else:
                    raise SimulationError(explain("a step that CUDA does not have", expected="Memset or Launch", found=type(step).__name__))

    def _locate(self, buffer: Buffer, pointers: Mapping[int, int], workspace: int) -> tuple[int, tuple[int, int] | None]:
        """Address of a buffer, and the addresses between which memory may be touched."""
        if buffer.kind == "workspace":
            return workspace + buffer.offset, (workspace + buffer.offset, workspace + self._workspace_bytes)
        base = pointers[buffer.index]
        extent = self._extents.get(buffer.index)
        if extent is None:
            return base + buffer.offset, None
        # a tensor whose strides are all positive begins at its address: what lies before an offset into it is not meant
        low = base + extent[0] if extent[0] < 0 else base + buffer.offset
        return base + buffer.offset, (low, base + extent[1])

    def _memset(self, step: Memset, pointers: Mapping[int, int], workspace: int) -> None:
        address, span = self._locate(step.buffer, pointers, workspace)
        if span is not None and address + step.nbytes > span[1]:
            room = f"at most {span[1] - address} bytes"
            raise SimulationError(explain(f"Memset of {step.buffer} writes past its end", expected=room, found=step.nbytes))
        ctypes.memset(address, step.value, step.nbytes)

    def _launch(
        self, step: Launch, pointers: Mapping[int, int], scalars: Mapping[int, float | int], workspace: int, pool: ThreadPoolExecutor
    ) -> None:
        from graphdnn.intrinsics.simblock import Block, run_block

        kernel = self._kernels[step.kernel]
        spec = kernel.spec
        if len(step.args) != len(spec.params):
            raise SimulationError(explain(f"kernel '{spec.name}': wrong number of arguments", expected=len(spec.params), found=len(step.args)))
        try:
            args = [self._argument(p, a, pointers, scalars, workspace) for p, a in zip(spec.params, step.args, strict=True)]
        except SimulationError as error:
            raise SimulationError(explain(f"kernel '{spec.name}': {error}")) from error
        if step.grid % spec.cluster:
            raise SimulationError(explain(f"kernel '{spec.name}': the grid is no multiple of its clusters", expected=spec.cluster, found=step.grid))
        for index in range(0, step.grid, spec.cluster):
            block = Block(index, spec.block, step.grid, spec.shared_bytes, spec.cluster)
            run_block(block, lambda: kernel.entry(*args), pool)
            if block.failure is not None:
                _report(kernel, block.failure, index + block.failed_thread // spec.block, block.failed_thread % spec.block)

    def _argument(self, param: Param, arg: Arg, pointers: Mapping[int, int], scalars: Mapping[int, float | int], workspace: int) -> Any:
        """The object that the kernel gets for one parameter."""
        from graphdnn.intrinsics.simmemory import Pointer
        from graphdnn.intrinsics.simtypes import TYPES

        if isinstance(param, PointerParam) and isinstance(arg, Buffer):
            address, span = self._locate(arg, pointers, workspace)
            if address % param.alignment:
                raise SimulationError(
                    f"parameter '{param.name}': the kernel relies on an alignment of {param.alignment} bytes, got address {address:#x}"
                )
            return Pointer(param.name, param.storage, address, span, param.written)
        if isinstance(param, DescriptorParam) and isinstance(arg, TensorMap):
            return _descriptor(param.name, arg, *self._locate(arg.buffer, pointers, workspace))
        if isinstance(arg, TensorScalar | Constant) and getattr(param, "type", None) == arg.type:
            return TYPES[arg.type](scalars[arg.index] if isinstance(arg, TensorScalar) else arg.value)
        raise SimulationError(f"parameter {param} cannot be given {arg}")


def _descriptor(name: str, arg: TensorMap, address: int, span: tuple[int, int] | None) -> Any:
    """The model of a TMA descriptor: a checked view of the tensor's memory."""
    import numpy as np

    from graphdnn.dtypes import info
    from graphdnn.intrinsics.simmachine import TensorMap as Model

    if address % 16 or any(s % 16 for s in arg.strides):
        raise SimulationError(f"parameter '{name}': address {address:#x} and strides {arg.strides} must be multiples of 16 bytes")
    size = info(arg.dtype).bits // 8
    strides = (size, *arg.strides)
    need = size + sum((d - 1) * s for d, s in zip(arg.dims, strides, strict=True))
    if span is not None and not span[0] <= address <= span[1] - need:
        raise SimulationError(f"parameter '{name}': dims {arg.dims} and strides {strides} reach past the tensor's memory")
    memory: Any = (ctypes.c_char * need).from_address(address)
    return Model(np.ndarray(arg.dims[::-1], f"u{size}", memory, strides=strides[::-1]), arg.box, arg.swizzle)


def _report(kernel: _Kernel, failure: BaseException, block: int, thread: int) -> None:
    """Raise what went wrong in a block, with its place."""
    if not isinstance(failure, Exception):
        raise failure
    what = str(failure) if isinstance(failure, SimulationError) else f"{type(failure).__name__}: {failure}"
    where = f"kernel '{kernel.spec.name}', block {block}, thread {thread}{kernel.place(failure.__traceback__)}"
    raise SimulationError(explain(f"{where}: {what}")) from failure
