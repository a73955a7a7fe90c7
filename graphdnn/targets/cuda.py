"""The CUDA target: rendered text -> numba.cuda -> PTX -> ptxas -> cubin, with no driver and no GPU; loaded and launched through the driver.

``compile`` imports numba; ``load`` and the executable import neither numba nor a compiler, so that a stored plan runs where only the driver is.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphdnn.codegen.spec import Binary, Recipe, Source
from graphdnn.device import split_arch
from graphdnn.targets import cuda_versions
from graphdnn.targets.base import Enqueue, Executable, Target, Timed


class CudaTarget(Target):
    """NVIDIA GPUs of one architecture. ``index``: the device that plans are loaded on; -1: the one that is current when they are loaded."""

    name = "cuda"

    def __init__(self, arch: str, index: int = -1) -> None:
        """Raises ValidationError for a text that is not an architecture."""
        split_arch(arch)
        self.arch = arch
        self.index = index

    def toolchain_key(self) -> str:
        """Architecture, versions of numba-cuda, numba, llvmlite, libNVVM and ptxas ("none" where not installed), and the line information switch."""
        return cuda_versions.key(self.arch)

    def compile(self, source: Source) -> Binary:
        """Cubin of one kernel; needs no driver.

        ``facts``: arch, registers, shared_bytes (of a block, static and dynamic), static_shared_bytes, spill_stores, spill_loads, spill_bytes,
        stack_bytes (a thread), ptxas (version), compile_seconds. ``texts``: "ptx". Raises BuildError that names the package to install, or carries
        the compiler's message.
        """
        from graphdnn.targets import cuda_compile

        return cuda_compile.compile_kernel(source, self.arch)

    def load(self, recipe: Recipe, binaries: Sequence[Binary]) -> Executable:
        """Load on the target's device. Raises ExecutionError without a driver or GPU, or on a GPU of another architecture."""
        from graphdnn.targets.cuda_launch import CudaExecutable

        return CudaExecutable(recipe, binaries, self.arch, self.index)

    def timed(self, calls: Sequence[Enqueue]) -> Timed:
        """The calls captured into a CUDA graph, replayed between two events."""
        from graphdnn.targets.cuda_driver import resolve_device
        from graphdnn.targets.cuda_timer import CapturedCalls

        return CapturedCalls(calls, resolve_device(self.arch, self.index))

    def capturing(self, stream: int) -> bool:
        """Whether the work of a stream is being captured into a CUDA graph."""
        from graphdnn.targets.cuda_driver import capturing

        return capturing(stream, self.index)

    def sass(self, binary: Binary) -> str:
        """Machine code of a binary as text. Raises BuildError without cuobjdump."""
        from graphdnn.targets import cuda_toolchain

        return cuda_toolchain.disassemble(binary.code)
