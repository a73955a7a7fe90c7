"""CPU target: kernels compiled with numba and LLVM to object code, run over our own threads; contractions by np.matmul panels.

::

    cpu.py          the target
    cpu_compile.py  Source -> object code (imports numba)
    cpu_object.py   object code <-> bytes, linked through llvmlite alone
    cpu_run.py      steps of a recipe
    cpu_pool.py     threads
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from graphdnn.codegen.spec import Binary, Recipe, Source
from graphdnn.errors import SerializationError, explain
from graphdnn.targets import cpu_object
from graphdnn.targets.base import Target
from graphdnn.targets.cpu_run import CpuExecutable


class CpuTarget(Target):
    """The CPU of this process. There is no CPU target for another machine: machine code is made for the CPU that compiles it."""

    name = "cpu"

    def toolchain_key(self) -> str:
        """Versions of numba and llvmlite, CPU and its features, and our pipeline. Imports llvmlite, which a load needs too, but not numba."""
        return f"cpu numba-{_version('numba')} llvmlite-{_version('llvmlite')} {self.host_key()}"

    def host_key(self) -> str:
        """The form of stored objects, the CPU and its features. Which compiler made an object does not matter to one that links it."""
        return f"pipeline-{cpu_object.PIPELINE} {cpu_object.host_key()}"

    def compile(self, source: Source) -> Binary:
        """Object code for this CPU. Facts: arch, object_bytes, vectorized (has vector instructions), calls (libm functions). Raises BuildError."""
        from graphdnn.intrinsics import namespace
        from graphdnn.targets import cpu_compile

        stored, text = cpu_compile.compile_object(source, namespace("cpu"))
        facts = {
            "arch": cpu_object.host_cpu()[1],
            "object_bytes": len(stored.image),
            "vectorized": cpu_compile.is_vectorized(text),
            "calls": list(stored.symbols),
        }
        return Binary(source.entry, stored.pack(), facts, {"llvm": text})

    def load(self, recipe: Recipe, binaries: Sequence[Binary]) -> CpuExecutable:
        """Link the binaries into this process without numba. Raises SerializationError for one that is damaged or was made for another CPU."""
        if len(binaries) != len(recipe.kernels):
            rule = "a plan and its kernels do not belong together"
            raise SerializationError(explain(rule, expected=f"{len(recipe.kernels)} kernels", found=len(binaries)))
        return CpuExecutable(recipe, [cpu_object.load(binary.code) for binary in binaries])


@functools.cache
def _version(package: str) -> str:
    """Version of an installed package without importing it. importlib.metadata is the last way: it costs more than a plan from the cache."""
    module = sys.modules.get(package)
    if module is not None:
        return str(module.__version__)
    from importlib.util import find_spec

    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return "none"
    path = Path(spec.origin).with_name("_version.py")
    found = re.search(r"""["']?version["']?\s*[:=]\s*["']([^"']+)["']""", path.read_text()) if path.exists() else None
    if found is not None:
        return found.group(1)
    from importlib.metadata import version

    return version(package)
