"""Every environment switch, typed, in one place. A switch is read when it is called: ``env.num_threads()``.

A value that a switch does not know is a ValidationError that names the variable and what it allows. ``SWITCHES`` lists all of them for the docs
and for ``graphdnn doctor``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from graphdnn.errors import ValidationError, explain

T = TypeVar("T")
LOG_LEVELS = ("off", "error", "warning", "info", "debug")
_TRUE, _FALSE = ("1", "true", "on", "yes"), ("0", "false", "off", "no")


@dataclass(frozen=True)
class Switch(Generic[T]):
    """One variable. ``parse`` gives None for a text that it does not know; ``default`` makes the value of an unset or empty variable;
    ``aliases`` are read, in order, where ``name`` is unset, each with its own parser."""

    name: str
    doc: str
    allowed: str
    parse: Callable[[str], T | None]
    default: Callable[[], T]
    aliases: tuple[tuple[str, Callable[[str], T | None]], ...] = ()

    def __call__(self) -> T:
        """The value now. Raises ValidationError for a text that is not allowed."""
        for name, parse in ((self.name, self.parse), *self.aliases):
            text = os.environ.get(name, "").strip()
            if not text:
                continue
            value = parse(text)
            if value is None:
                raise ValidationError(
                    explain(
                        f"environment variable {name} has an unknown value",
                        expected=self.allowed,
                        found=repr(text),
                        fix=f"unset {name} or give it one of these values",
                    )
                )
            return value
        return self.default()

    @property
    def is_set(self) -> bool:
        """Whether the variable or one of its aliases has a value."""
        return any(os.environ.get(name, "").strip() for name in (self.name, *(a for a, _ in self.aliases)))


def _flag(text: str) -> bool | None:
    low = text.lower()
    return True if low in _TRUE else False if low in _FALSE else None


def _level(text: str) -> str | None:
    return text.lower() if text.lower() in LOG_LEVELS else None


def _level_of_flag(text: str) -> str | None:
    flag = _flag(text)
    return None if flag is None else "info" if flag else "off"


def _threads(text: str) -> int | None:
    return int(text) if text.isdecimal() and 1 <= int(text) <= 4096 else None


def _device(text: str) -> str | None:
    from graphdnn.device import known_archs

    low = text.lower()
    kind, colon, rest = low.partition(":")
    arch = rest if kind == "cudasim" and colon else low
    if arch in ("cpu", "cuda", "cudasim", "sm_90", *known_archs()) and (arch == low or arch.startswith("sm_")):
        return low
    return low if kind == "cuda" and rest.isdecimal() else None


def _default_threads() -> int:
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def _path(text: str) -> Path:
    """ "~" is the home folder, as in a shell: a file of settings has none that would put it in."""
    return Path(os.path.expanduser(text))


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base:
        return Path(base) / "graphdnn"
    try:
        return Path.home() / ".cache" / "graphdnn"
    except RuntimeError:  # no HOME and no entry in the password file
        import tempfile

        return Path(tempfile.gettempdir()) / f"graphdnn-{os.getuid() if hasattr(os, 'getuid') else 'user'}"


device: Switch[str | None] = Switch(
    "GRAPHDNN_DEVICE",
    "device of graphs that say nothing of a device",
    "cpu, cuda, cuda:<index>, cudasim, cudasim:<architecture>, or a described device such as sm_80 or sm_90",
    _device,
    lambda: None,
)
cache_dir: Switch[Path] = Switch(
    "GRAPHDNN_CACHE_DIR", "folder of the kernel cache; default $XDG_CACHE_HOME/graphdnn or ~/.cache/graphdnn", "a path", _path, _default_cache_dir
)
cache: Switch[bool] = Switch("GRAPHDNN_CACHE", "0: compiled kernels are kept in memory only", "0 or 1", _flag, lambda: True)
num_threads: Switch[int] = Switch(
    "GRAPHDNN_NUM_THREADS",
    "threads of the CPU target; default: the CPUs this process may use",
    "an integer from 1 to 4096",
    _threads,
    _default_threads,
)
log_level: Switch[str] = Switch(
    "GRAPHDNN_LOG",
    "lowest severity that is logged; info writes the JSON text of every graph that is built",
    "off, error, warning, info or debug (CUDNN_FRONTEND_LOG_INFO: 0 or 1)",
    _level,
    lambda: "off",
    (("CUDNN_FRONTEND_LOG_INFO", _level_of_flag),),
)
log_file: Switch[str] = Switch(
    "GRAPHDNN_LOG_FILE", "where the log goes", "stdout, stderr or a path", str, lambda: "stderr", (("CUDNN_FRONTEND_LOG_FILE", str),)
)
lineinfo: Switch[bool] = Switch("GRAPHDNN_LINEINFO", "1: kernels carry line information for profilers and debuggers", "0 or 1", _flag, lambda: False)
nvtx: Switch[bool] = Switch("GRAPHDNN_NVTX", "1: every execute is an NVTX range named after the plan", "0 or 1", _flag, lambda: False)
check_values: Switch[bool] = Switch(
    "GRAPHDNN_CHECK_VALUES",
    "1: lengths, offsets and indices that kernels read from memory are checked when they are, on GPUs too, which then wait (not in a capture); "
    "a CPU always checks",
    "0 or 1",
    _flag,
    lambda: False,
)

native: Switch[bool] = Switch(
    "GRAPHDNN_NATIVE",
    "0: the compiled part of execute on a GPU is not used, as where it could not be compiled at installation",
    "0 or 1",
    _flag,
    lambda: True,
)

tuning_db: Switch[Path] = Switch(
    "GRAPHDNN_TUNING_DB",
    "file of the tuning database; default tuning.db in the folder of the kernel cache",
    "a path",
    _path,
    lambda: cache_dir() / "tuning.db",
)
benchmark: Switch[bool] = Switch(
    "GRAPHDNN_BENCHMARK",
    "1: build_plans measures the plans of a graph that the tuning database does not know, and takes the fastest",
    "0 or 1",
    _flag,
    lambda: False,
)
deterministic: Switch[bool] = Switch(
    "GRAPHDNN_DETERMINISTIC",
    "1: plans are chosen by heuristics alone, never by time or by the tuning database, and only such as give equal bits on every run",
    "0 or 1",
    _flag,
    lambda: False,
)

SWITCHES: tuple[Switch[Any], ...] = (
    device,
    cache_dir,
    cache,
    num_threads,
    log_level,
    log_file,
    lineinfo,
    nvtx,
    check_values,
    native,
    tuning_db,
    benchmark,
    deterministic,
)
