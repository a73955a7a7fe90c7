"""A process where compilers cannot be imported or run: the tests of plans built ahead of time begin their programs with ``block(...)``.

Stands alone (no pytest, nothing of the tests), so that a program can import it before anything else.
"""

from __future__ import annotations

import importlib.abc
import os
import sys
from typing import Any

COMPILERS = ("numba", "numba_cuda", "llvmlite", "jinja2", "networkx", "ml_dtypes")
"""Packages that building needs; the first three make machine code."""


class Blocker(importlib.abc.MetaPathFinder):
    """Finds for none of ``names`` what Python would find."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """ModuleNotFoundError for a blocked package."""
        if fullname.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {fullname!r} (blocked by the test)", name=fullname)


def block(*names: str) -> None:
    """From now on: no import of ``names``, no program is started (ptxas), no compiler library is opened (libNVVM, nvJitLink, NVRTC)."""
    already = sorted(set(names) & set(sys.modules))
    assert not already, f"{already} were imported before they could be blocked"
    sys.meta_path.insert(0, Blocker(names))
    sys.addaudithook(_refuse)
    for variable in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"):
        os.environ.pop(variable, None)


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if event in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system"):
        raise RuntimeError(f"a program was started: {args[:2]}")
    if event == "ctypes.dlopen" and any(n in str(args[0]).lower() for n in ("nvvm", "nvrtc", "nvjitlink", "ptxcompiler")):
        raise RuntimeError(f"a compiler library was opened: {args[0]}")
