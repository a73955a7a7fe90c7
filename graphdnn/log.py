"""The log: one line a message, to the place and from the severity that the environment names (``GRAPHDNN_LOG``, ``GRAPHDNN_LOG_FILE``).

``log.debug("...")``; ``log.enabled("debug")`` where making the text costs something. :func:`graph_json` writes the JSON text of a graph alone on
its line, so that a reader of the log can parse it.
"""

from __future__ import annotations

import sys
import threading
import time

from graphdnn import env
from graphdnn.errors import ValidationError, explain

_lock = threading.Lock()
_start = time.monotonic()
STARTED_NS = time.time_ns()
"""When this process imported graphdnn: nanoseconds since 1970."""


def enabled(level: str) -> bool:
    """Whether messages of ``level`` (error, warning, info, debug) are written now."""
    return 0 < env.LOG_LEVELS.index(level) <= env.LOG_LEVELS.index(env.log_level())


def quiet_compilers() -> None:
    """Keep numba from logging at DEBUG where an application sets that for its root logger: numba would write every bytecode it analyses, and
    numba-cuda 0.30.4 fails in doing so (TypeError in its ``_lazy_pformat``)."""
    import logging

    for name in ("numba", "numba_cuda"):
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.WARNING)


def _write(line: str) -> None:
    place = env.log_file()
    with _lock:
        if place in ("stdout", "stderr"):
            stream = sys.stdout if place == "stdout" else sys.stderr
            stream.write(line + "\n")
            stream.flush()
            return
        try:
            with open(place, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise ValidationError(
                explain(
                    "the log file of GRAPHDNN_LOG_FILE cannot be written",
                    expected="stdout, stderr or a writable path",
                    found=f"{place} ({error.strerror})",
                )
            ) from error


def message(level: str, text: str) -> None:
    """Write ``text`` with its severity and the seconds since import."""
    if enabled(level):
        _write(f"[graphdnn {time.monotonic() - _start:9.3f}s] {level.upper()}: {text}")


def error(text: str) -> None:
    """Something failed that the caller will see."""
    message("error", text)


def warning(text: str) -> None:
    """Something works, but not as the user may expect."""
    message("warning", text)


def info(text: str) -> None:
    """A step of building or running, once a graph."""
    message("info", text)


def debug(text: str) -> None:
    """Details: every rejected candidate, every cache lookup."""
    message("debug", text)


def graph_json(text: str) -> None:
    """The JSON text of a graph, alone on one line, at level info."""
    if enabled("info"):
        _write(text)
