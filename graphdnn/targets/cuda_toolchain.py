"""The programs and packages that make CUDA machine code: where they are, of which version, and how ptxas and cuobjdump are run.

PTX is assembled by ptxas, not by nvJitLink: given the same PTX, nvJitLink drops setmaxnreg and serializes wgmma (seen on an H200, toolkits 13.0
and 13.5). The ptxas that belongs to the libNVVM that wrote the PTX is preferred; an older one refuses the PTX's version.

What identifies them, which a plan from the cache asks for, is in ``cuda_versions``.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphdnn.errors import BuildError, ExecutionError, explain
from graphdnn.targets import native
from graphdnn.targets.cuda_versions import installed, system_tools

if TYPE_CHECKING:
    import subprocess

INSTALL = "pip install 'graphdnn[cu13]' (or [cu12] for a CUDA 12 driver)"
_TIMEOUT_S = 600


def _wheel_tools(name: str) -> Iterator[Path]:
    """Where the wheels have the program: beside libNVVM first, so that the two are of one toolkit."""
    library = libnvvm()
    if library is not None:
        for parent in list(library.parents)[:4]:
            yield parent / "bin" / name
    try:
        from cuda.pathfinder import find_nvidia_binary_utility

        found = find_nvidia_binary_utility(name)
    except Exception:  # not installed, or a cuda.pathfinder that does not know this program (its own error class): the system's tools are next
        return
    if found:
        yield Path(found)


@functools.cache
def libnvvm() -> Path | None:
    """The libNVVM that numba-cuda compiles with; None if there is none."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib("nvvm").abs_path
    except Exception:  # not installed, or not found (cuda.pathfinder's own error classes): the caller reports it as missing
        return None
    return Path(path) if path else None


@dataclass(frozen=True, slots=True)
class Tool:
    """A program and the toolkit release it is of; (0, 0) if it does not say."""

    path: Path
    release: tuple[int, int]

    @property
    def version(self) -> str:
        """The release as text, "13.5"."""
        return f"{self.release[0]}.{self.release[1]}"


@functools.cache
def tools(name: str) -> tuple[Tool, ...]:
    """Every program ``name`` found, best first."""
    found: dict[Path, Tool] = {}
    for path in (*_wheel_tools(name), *system_tools(name)):
        if path.is_file() and os.access(path, os.X_OK) and path.resolve() not in found:
            found[path.resolve()] = Tool(path, _release(_run([str(path), "--version"]).stdout))
    return tuple(found.values())


def _release(text: str) -> tuple[int, int]:
    match = re.search(r"release (\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    import subprocess

    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise BuildError(explain(f"the CUDA toolkit program {command[0]} could not be run", found=str(exc), fix=INSTALL)) from exc


def ptxas_for(ptx: str) -> Tool:
    """The ptxas for this PTX: of the release of the libNVVM that wrote it, or newer. Raises BuildError that says what to install."""
    needed = _release(ptx[:2000])
    found = tools("ptxas")
    for tool in found:
        if tool.release >= needed:
            return tool
    have = ", ".join(f"{t.path} ({t.version})" for t in found) or "none"
    raise BuildError(
        explain(
            "no ptxas that can assemble this PTX", expected=f"ptxas of CUDA {needed[0]}.{needed[1]} or newer, beside libNVVM", found=have, fix=INSTALL
        )
    )


@dataclass(frozen=True, slots=True)
class Assembled:
    """A cubin and what ptxas says of the kernel in it: counts and bytes."""

    cubin: bytes
    ptxas: str
    registers: int
    static_shared_bytes: int
    stack_bytes: int
    spill_stores: int
    spill_loads: int


def assemble(ptx: str, arch: str, entry: str, lineinfo: bool = False) -> Assembled:
    """Machine code of ``ptx``. Raises BuildError with ptxas's own message, or that says what to install."""
    import tempfile

    tool = ptxas_for(ptx)
    with tempfile.TemporaryDirectory(prefix="graphdnn-") as folder:
        # One fixed name: a temporary one would be written into the cubin and make equal kernels differ.
        source, output = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        flags = ["-lineinfo"] if lineinfo else []
        done = _run([str(tool.path), f"-arch={arch}", "-v", *flags, str(source), "-o", str(output)])
        log = done.stdout + done.stderr
        if done.returncode or not output.is_file():
            message = "\n".join(line for line in log.splitlines() if "info" not in line)[:4000]
            raise BuildError(
                explain(f"ptxas {tool.version} refused kernel '{entry}' for {arch}", found=message.strip() or f"exit status {done.returncode}")
            )
        return Assembled(output.read_bytes(), tool.version, *_figures(log))


def _figures(log: str) -> tuple[int, int, int, int, int]:
    """Registers, static shared bytes, stack, spill stores and spill loads of ``ptxas -v``: the largest stack, all spills."""

    def numbers(pattern: str) -> list[int]:
        return [int(n) for n in re.findall(pattern, log)]

    return (
        max(numbers(r"Used (\d+) registers"), default=0),
        max(numbers(r"(\d+) bytes smem"), default=0),
        max(numbers(r"(\d+) bytes stack frame"), default=0),
        sum(numbers(r"(\d+) bytes spill stores")),
        sum(numbers(r"(\d+) bytes spill loads")),
    )


def disassemble(cubin: bytes) -> str:
    """SASS of a cubin as cuobjdump prints it. Raises BuildError without cuobjdump or nvdisasm, or if the cubin is damaged."""
    import tempfile

    found = tools("cuobjdump")
    if not found:
        raise BuildError(explain("SASS cannot be shown without cuobjdump", expected="cuobjdump and nvdisasm", found="no cuobjdump", fix=INSTALL))
    with tempfile.TemporaryDirectory(prefix="graphdnn-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = _run([str(found[0].path), "-sass", str(path)])
    if done.returncode or "Function :" not in done.stdout:
        raise BuildError(
            explain("cuobjdump could not disassemble the kernel", found=(done.stderr or done.stdout).strip()[:2000] or "no code", fix=INSTALL)
        )
    return done.stdout


def toolchain_report() -> list[dict[str, Any]]:
    """Every part that graphdnn can use: {part, found, version, path, needed_for}. ``version`` and ``path`` are "" where there is none.

    ``found`` is False with the reason in ``version`` for a driver or GPU that does not work. Packages are looked up, not imported.
    """
    report = [_row("python", True, sys.version.split()[0], sys.executable, "everything")]
    report += [_package(*row) for row in _PACKAGES]
    library = libnvvm()
    version = installed().get("nvidia-nvvm") or installed().get("nvidia-cuda-nvcc-cu12") or ""
    report.append(_row("libnvvm", library is not None, version if library else "", str(library or ""), "compiling for CUDA"))
    for name, needed_for in (("ptxas", "compiling for CUDA"), ("cuobjdump", "showing SASS"), ("nvdisasm", "showing SASS")):
        first = next(iter(tools(name)), None)
        report.append(_row(name, first is not None, first.version if first else "", str(first.path) if first else "", needed_for))
    compiled, fault = native.where()
    report.append(_row("compiled execute", not fault, fault, compiled, "the least host time of a call on a GPU"))
    return report + _devices()


_PACKAGES = (
    ("numpy", "numpy", "everything"),
    ("numba", "numba", "compiling for a CPU or CUDA"),
    ("llvmlite", "llvmlite", "compiling for a CPU or CUDA, loading CPU plans"),
    ("networkx", "networkx", "graph inspection"),
    ("jinja2", "jinja2", "generating kernels"),
    ("ml_dtypes", "ml_dtypes", "bfloat16, fp8, fp4 and int4 in NumPy"),
    ("numba-cuda", "numba_cuda", "compiling for CUDA"),
    ("cuda-bindings", "cuda.bindings", "numba-cuda"),
    ("cuda-core", "cuda.core", "numba-cuda"),
    ("torch", "torch", "torch tensors (optional)"),
)


def _row(part: str, found: bool, version: str, path: str, needed_for: str) -> dict[str, Any]:
    return {"part": part, "found": found, "version": version, "path": path, "needed_for": needed_for}


def _package(distribution: str, module: str, needed_for: str) -> dict[str, Any]:
    folder = _module_folder(module)
    version = installed().get(distribution.replace("_", "-"), "")
    return _row(distribution, folder is not None, version if folder else "", folder or "", needed_for)


def _module_folder(module: str) -> str | None:
    """Folder of a module, without importing it or a package above it that runs code (``cuda`` is a namespace)."""
    from importlib.util import find_spec

    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    return os.path.dirname(spec.origin) if spec.origin else next(iter(spec.submodule_search_locations or ()), None)


def _devices() -> list[dict[str, Any]]:
    from graphdnn import _libcuda, device

    try:
        driver = _libcuda.driver()
    except ExecutionError as exc:
        return [_row("libcuda driver", False, str(exc), "", "running on a GPU"), _row("GPU", False, "", "", "running on a GPU")]
    rows = [_row("libcuda driver", True, f"CUDA {driver.version_text()}", "libcuda.so.1", "running on a GPU")]
    for index in range(driver.value("cuDeviceGetCount")):
        try:
            props = device.cuda(index)
            rows.append(_row(f"GPU cuda:{index}", True, f"{props.name}, {props.arch}", "", "running on a GPU"))
        except ExecutionError as exc:
            rows.append(_row(f"GPU cuda:{index}", False, str(exc), "", "running on a GPU"))
    return rows
