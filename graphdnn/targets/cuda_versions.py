"""What is installed to make CUDA machine code, by name and version, read from the names of files: part of the key of every kernel.

This is on the path of a plan that comes from the cache: nothing is run, and nothing imported that costs something.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from graphdnn import env

_COMPILER = ("numba", "numba-cuda", "llvmlite", "nvidia-nvvm", "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12")


@functools.cache
def installed() -> dict[str, str]:
    """Version of every installed distribution by normalized name, from the names of the .dist-info folders.

    ``importlib.metadata`` would say the same, but importing it costs as much as a whole warm build may (0.04 s on 2 cores, 2026-12).
    """
    found: dict[str, str] = {}
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                stem = name.rpartition(".")[0].partition("-py3.")[0]  # an egg ends in the version of Python
                distribution, _, version = stem.rpartition("-")
                if distribution:
                    found.setdefault(distribution.replace("_", "-").replace(".", "-").lower(), version)
    return found


def key(arch: str) -> str:
    """Text that changes whenever the machine code of one kernel source for ``arch`` might. Imports nothing, runs nothing."""
    versions = " ".join(f"{name}={installed().get(name, 'none')}" for name in _COMPILER)
    return f"cuda {arch} {versions} toolkit={_toolkit_stamp()} lineinfo={int(env.lineinfo())}"


@functools.cache
def _toolkit_stamp() -> str:
    """Identity of a toolkit that no wheel names (a system or conda installation); "none" where the wheels are installed or nothing is found."""
    if "nvidia-nvvm" in installed() or "nvidia-cuda-nvcc-cu12" in installed():
        return "none"
    for path in system_tools("ptxas"):
        if path.is_file():
            stat = path.stat()
            return f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    return "none"


def system_tools(name: str) -> Iterator[Path]:
    """Where a toolkit that is not from wheels may have the program; the paths need not exist."""
    for variable in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "bin" / name
    yield Path("/usr/local/cuda/bin") / name
    import shutil

    on_path = shutil.which(name)
    if on_path:
        yield Path(on_path)
