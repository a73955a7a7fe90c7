"""Runs of the tuning database as rows of a table, as JSON text, and from other databases."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

from graphdnn.errors import SerializationError, explain
from graphdnn.plans import codec, container, tuning
from graphdnn.plans.tuning import SCHEMA, Run

COLUMNS = ("measured", "host", "device", "graph", "plans", "time", "of the heuristic's", "workspace", "chosen")


def columns(run: Run) -> tuple[str, ...]:
    """A run as texts for :data:`COLUMNS`."""
    first, base = run.results[0], run.results[run.heuristic]
    engines = "; ".join(f"{name} {knobs}" for _, name, knobs in first.choices)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created))
    times = (f"{first.seconds * 1e6:.2f} us", f"{first.seconds / base.seconds:.0%}")
    return when, run.host, run.device, run.graph[:12], str(len(run.results)), *times, str(first.workspace), engines


def write(path: Path, runs: Iterable[Run]) -> None:
    """Write :func:`dump` to a file, in one step. SerializationError if that fails."""
    container.write(path, dump(runs).encode())


def dump(runs: Iterable[Run]) -> str:
    """Runs as JSON text that :func:`load` takes."""
    return json.dumps({"graphdnn tuning": SCHEMA, "runs": [codec.encode(r) | {"digest": r.digest()} for r in runs]}, indent=1)


def load(path: Path) -> list[Run]:
    """The runs in a text of :func:`dump` or in another database. SerializationError for anything else, and where one is damaged."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SerializationError(explain(f"'{path}' cannot be read", expected="a tuning database or its export", found=error.strerror)) from error
    if data.startswith(b"SQLite format 3\0"):
        return tuning.Database(path).only_read()
    try:
        content = json.loads(data)
        if content["graphdnn tuning"] != SCHEMA:
            raise ValueError(f"schema {content['graphdnn tuning']}, not {SCHEMA}")
        pairs = [(codec.decode(Run, {k: v for k, v in r.items() if k != "digest"}), r["digest"]) for r in content["runs"]]
        for run, digest in pairs:
            tuning.verify(run, digest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SerializationError) as error:
        raise SerializationError(
            explain(f"'{path}' is no tuning database and no export of one, or is damaged", found=f"{type(error).__name__}: {error}")
        ) from error
    return [r for r, _ in pairs]
