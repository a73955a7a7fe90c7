"""Compiling for CUDA: rendered text -> numba.cuda -> PTX -> ptxas -> cubin, with no driver and no GPU."""

from __future__ import annotations

import re
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from graphdnn import env
from graphdnn.codegen.spec import Binary, DescriptorParam, KernelSpec, Param, PointerParam, Source
from graphdnn.device import split_arch
from graphdnn.errors import BuildError, explain
from graphdnn.targets import cuda_toolchain as toolchain
from graphdnn.targets.base import paused_collector

# numba has one compiler lock; taking ours first keeps the change of the warning filters to one thread at a time.
_compile_lock = threading.Lock()


def compile_kernel(source: Source, arch: str) -> Binary:
    """See ``CudaTarget.compile``."""
    started = time.perf_counter()
    lineinfo = env.lineinfo()
    ptx = _finish_ptx(_numba_ptx(source, arch, lineinfo), source)
    made = toolchain.assemble(ptx, arch, source.entry, lineinfo)
    facts = {
        "arch": arch,
        "registers": made.registers,
        "shared_bytes": max(made.static_shared_bytes, source.spec.shared_bytes),
        "static_shared_bytes": made.static_shared_bytes,
        "spill_stores": made.spill_stores,
        "spill_loads": made.spill_loads,
        "spill_bytes": made.spill_stores + made.spill_loads,
        "stack_bytes": made.stack_bytes,
        "ptxas": made.ptxas,
        "compile_seconds": round(time.perf_counter() - started, 3),
    }
    return Binary(source.entry, made.cubin, facts, {"ptx": ptx})


def _numba_ptx(source: Source, arch: str, lineinfo: bool) -> str:
    """PTX as numba prints it."""
    from importlib.util import find_spec

    if find_spec("numba_cuda") is None:
        raise BuildError(
            explain(
                "the CUDA compiler is not installed", expected="package numba-cuda", found="none", fix=f"{toolchain.INSTALL}, or use device='cpu'"
            )
        )
    from numba.core import config

    if config.ENABLE_CUDASIM:
        raise BuildError(
            explain(
                "numba.cuda cannot compile",
                expected="NUMBA_ENABLE_CUDASIM unset",
                found="NUMBA_ENABLE_CUDASIM=1",
                fix="unset it; device='cudasim' is graphdnn's own simulator",
            )
        )
    from numba import cuda, types
    from numba.core.errors import NumbaWarning
    from numba.cuda.core.errors import NumbaWarning as NumbaCudaWarning

    spec = source.spec
    major, minor, suffix = split_arch(arch)
    with _compile_lock, warnings.catch_warnings(), paused_collector():
        # Advice about the style of a kernel helps its author; this text has none.
        for category in (NumbaWarning, NumbaCudaWarning):
            warnings.simplefilter("ignore", category)
        try:
            signature = types.void(*(_numba_type(types, i, p) for i, p in enumerate(spec.params)))
            ptx, _ = cuda.compile(
                _function(source, lineinfo),
                signature,
                device=False,
                abi="numba",
                cc=(major, minor, suffix) if suffix else (major, minor),
                launch_bounds=(spec.block, spec.min_blocks or 1),
                output="ptx",
                opt=3,
                lineinfo=lineinfo,
            )
        except BuildError:
            raise
        except Exception as exc:  # whatever numba, llvmlite or libNVVM raise: the text is ours, so all of them mean that the build failed
            raise _compiler_error(source, arch, exc) from exc
    return str(ptx)


def _compiler_error(source: Source, arch: str, exc: Exception) -> BuildError:
    missing = isinstance(exc, ImportError | OSError) or type(exc).__name__ in ("NvvmSupportError", "DynamicLibNotFoundError")
    return BuildError(
        explain(
            f"kernel '{source.entry}' could not be compiled for {arch}",
            found=f"{type(exc).__name__}: {str(exc)[:4000]}",
            fix=toolchain.INSTALL if missing else None,
        )
    )


def _numba_type(types: Any, index: int, param: Param) -> Any:
    if isinstance(param, PointerParam):
        return types.CPointer(getattr(types, param.storage))
    if isinstance(param, DescriptorParam):
        from graphdnn.intrinsics.lower_ptx import DescriptorType

        return DescriptorType(index)
    return getattr(types, param.type)


def _function(source: Source, lineinfo: bool) -> Callable[..., None]:
    """The Python function of the text, with its lines known to tracebacks and to numba's messages."""
    import linecache

    from graphdnn import intrinsics

    name = _text_file(source) if lineinfo else f"<graphdnn {source.entry}>"
    linecache.cache[name] = (len(source.text), None, source.text.splitlines(keepends=True), name)
    namespace: dict[str, Any] = dict(intrinsics.namespace("cuda"))
    exec(compile(source.text, name, "exec"), namespace)
    function: Callable[..., None] = namespace[source.entry]
    return function


def _text_file(source: Source) -> str:
    """Path of a file with the text, which a profiler opens to show lines; only a name if the cache folder cannot be written."""
    path = env.cache_dir() / "lineinfo" / f"{source.entry}.py"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.text)
    except OSError:
        return path.name
    return str(path)


def _finish_ptx(ptx: str, source: Source) -> str:
    """Every change to numba's PTX, in order: the entry gets its stable name, numba's environment variable, which nothing reads, goes, and shared
    arrays are numbered from 0. All of these carry a count of what the process compiled before, so equal kernels would differ.

    A kind of parameter that numba cannot declare (a TMA descriptor by value) is declared as integers and rewritten here; so is a cluster.
    """
    found = re.search(r"\.entry\s+([\w$]+)\s*\(", ptx)
    if found is None:
        raise BuildError(explain(f"no entry in the PTX of kernel '{source.entry}'", expected="one .entry", found=ptx[:500]))
    ptx = _descriptors(ptx.replace(found[1], source.entry), source.spec)
    if source.spec.cluster > 1:
        ptx = re.sub(r"^(\.maxntid .*)$", rf".explicitcluster\n.reqnctapercluster {source.spec.cluster}, 1, 1\n\1", ptx, count=1, flags=re.MULTILINE)
    ptx = re.sub(r"^\.common \.global .*NumbaEnv.*;\n", "", ptx, flags=re.MULTILINE)
    numbers: dict[str, int] = {}
    return re.sub(r"\b_cudapy_smem_(\d+)\b", lambda m: f"{source.entry}_shared_{numbers.setdefault(m[1], len(numbers))}", ptx)


def _descriptors(ptx: str, spec: KernelSpec) -> str:
    """Each run of words that stands for a descriptor as one parameter, aligned as the TMA unit needs it, and its name where the text asks for it."""
    if not any(isinstance(p, DescriptorParam) for p in spec.params):
        return ptx
    from graphdnn.intrinsics.lower_ptx import DESCRIPTOR_WORDS, MAP_MARK

    place = 0
    for index, param in enumerate(spec.params):
        name = f"{spec.name}_param_{place}"
        if not isinstance(param, DescriptorParam):
            place += 1
            continue
        words = r",\s*".join(rf"\.param \.u64 {spec.name}_param_{place + i}" for i in range(DESCRIPTOR_WORDS))
        ptx, count = re.subn(words + r"\b", f".param .align 64 .b8 {name}[{8 * DESCRIPTOR_WORDS}]", ptx)
        assert count == 1, f"descriptor parameter {param.name} of {spec.name} is not declared as {DESCRIPTOR_WORDS} words"
        ptx = re.sub(rf"\b{MAP_MARK}{index}\b", name, ptx)
        place += DESCRIPTOR_WORDS
    return ptx
