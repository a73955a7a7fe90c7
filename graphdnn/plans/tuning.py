"""The tuning database: which plans were measured for a graph on a device, and how long each took. One SQLite file, any number of processes.

A tuning run is written in one transaction and never changed, so processes that tune the same graph at once lose nothing, and merging two databases
is a union. Engines and knobs are stored by name, not by place in a list, with the versions of everything that makes machine code: what does not fit
any more is not found. Every run carries a SHA-256; one that does not check is not used. A file that SQLite cannot read is moved aside and told.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from graphdnn import env, log, targets
from graphdnn._version import __version__
from graphdnn.errors import ExecutionError, GraphError, SerializationError, explain
from graphdnn.plans import codec

if TYPE_CHECKING:
    import sqlite3

    from graphdnn.device import DeviceProps
    from graphdnn.ir.opgraph import OperationGraph
    from graphdnn.plans.plan import ExecutionPlan

SCHEMA = 2
BUSY_S = 30.0
"""How long a process waits for another one's transaction."""
_TABLES = """
CREATE TABLE IF NOT EXISTS runs (
    id TEXT PRIMARY KEY, graph TEXT NOT NULL, device TEXT NOT NULL, toolchain TEXT NOT NULL, version TEXT NOT NULL, created REAL NOT NULL,
    host TEXT NOT NULL, pid INTEGER NOT NULL, iterations INTEGER NOT NULL, workspace_limit INTEGER, candidates INTEGER, filters TEXT NOT NULL,
    heuristic INTEGER NOT NULL, digest TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS results (
    run TEXT NOT NULL REFERENCES runs(id), rank INTEGER NOT NULL, label TEXT NOT NULL, choices TEXT NOT NULL, seconds REAL NOT NULL,
    workspace INTEGER NOT NULL, PRIMARY KEY (run, rank)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS runs_of_graph ON runs (graph, device, toolchain, version);
"""
_COLUMNS = ("id", "graph", "device", "toolchain", "version", "created", "host", "pid", "iterations", "workspace_limit", "candidates",
            "filters", "heuristic")  # fmt: skip
_BUSY, _MEDIUM = {5, 6}, {3: "may not be accessed", 7: "memory ran out", 8: "is read-only", 10: "read or write failed", 13: "the disk is full",
                          14: "cannot be opened", 15: "locking failed", 22: "the file is too large"}  # fmt: skip
T = TypeVar("T")
Choice = tuple[int, str, str]
"""Engine id, engine name, knobs as text: what runs one region."""
PlanKey = tuple[str, tuple[tuple[int, str], ...]]
"""Label of the partition; engine id and knobs of each region."""


@dataclass(frozen=True)
class Measured:
    """One plan of a run: label of its partition, a choice for each region, median seconds of one execution, bytes of workspace."""

    label: str
    choices: tuple[Choice, ...]
    seconds: float
    workspace: int

    @property
    def key(self) -> PlanKey:
        """What identifies a plan of a graph."""
        return self.label, tuple((engine, knobs) for engine, _, knobs in self.choices)


@dataclass(frozen=True)
class Key:
    """What measurements are valid for. ``graph``: ``OperationGraph.key``; ``device``: its name and size; ``toolchain``: that of its target;
    ``version``: of graphdnn."""

    graph: str
    device: str
    toolchain: str
    version: str = __version__


@dataclass(frozen=True)
class Run:
    """One tuning of one graph. ``results``: the chosen plan first, then by time; ``heuristic``: place of the plan that heuristics would have taken;
    ``created``: seconds since 1970. What plans were left out for: ``workspace_limit``, bytes that they were allowed to need, and ``candidates``, the
    number that was tried (None: no plan was); ``filters``: ``PlanSet.filters``."""

    id: str
    graph: str
    device: str
    toolchain: str
    version: str
    created: float
    host: str
    pid: int
    iterations: int
    workspace_limit: int | None
    candidates: int | None
    filters: str
    heuristic: int
    results: tuple[Measured, ...]

    @property
    def key(self) -> Key:
        """What the run is valid for."""
        return Key(self.graph, self.device, self.toolchain, self.version)

    def answers(self, workspace_limit: int | None, candidates: int, filters: str) -> bool:
        """Whether it left out no plan that a tuning with these options would try."""
        limited = self.workspace_limit is not None and (workspace_limit is None or self.workspace_limit < workspace_limit)
        return not limited and (self.candidates is None or self.candidates >= candidates) and self.filters in ("", filters)

    def digest(self) -> str:
        """SHA-256 of all of it."""
        return hashlib.sha256(json.dumps(codec.encode(self), sort_keys=True).encode()).hexdigest()


def key_of(graph: OperationGraph, device: DeviceProps) -> Key:
    """The key of ``graph`` on ``device``: the same in every process that sees a device of this kind and size."""
    size = f"{device.cores} cores, {env.num_threads()} threads" if device.kind == "cpu" else f"{device.sm_count} SMs"
    return Key(graph.key, f"{device.kind} {device.arch} {device.name}, {size}", targets.get(device).toolchain_key())


def plan_key(plan: ExecutionPlan) -> PlanKey:
    """What identifies a plan of a graph, whatever its place in a list."""
    return plan.name.rpartition("|r0:")[0], tuple((c.engine, c.knobs) for c in plan.choices)


def of_plan(plan: ExecutionPlan, seconds: float) -> Measured:
    """The record of a plan."""
    choices = tuple((c.engine, c.name, c.knobs) for c in plan.choices)
    return Measured(plan_key(plan)[0], choices, float(seconds), int(plan.workspace_bytes))


def new_id() -> str:
    """A name for a run that no other run has."""
    import uuid

    return uuid.uuid4().hex


def database() -> Database | None:
    """The database that the environment names: GRAPHDNN_TUNING_DB, else tuning.db in the cache folder; None where the cache is switched off."""
    if env.tuning_db.is_set:
        return Database(env.tuning_db())
    return Database(env.cache_dir() / "tuning.db") if env.cache() else None


@dataclass(frozen=True)
class Database:
    """The file ``path``; it is made when something is first stored. Every method opens and closes it, so that threads and forks share nothing.

    All of them raise ExecutionError where the file is locked for longer than BUSY_S, the disk is full or it may not be accessed, and
    SerializationError where another version wrote it. A damaged file is moved aside, with a warning, and a new one begun.
    """

    path: Path

    def add(self, runs: Iterable[Run]) -> int:
        """Store runs; how many of them were not there yet."""
        found = list(runs)
        with suppress(OSError):  # opening the file then says what is wrong
            self.path.parent.mkdir(parents=True, exist_ok=True)
        return self._do(lambda db: _add(db, found, self.path), make=True)

    def runs(self, key: Key | None = None) -> list[Run]:
        """Stored runs, the newest first: of ``key``, or all of them. Those that do not check are left out, with a warning."""
        where = " WHERE graph = ? AND device = ? AND toolchain = ? AND version = ?" if key else ""
        values = (key.graph, key.device, key.toolchain, key.version) if key else ()
        if not self._there():
            return []
        if not all(os.access(p, os.W_OK) for p in (self.path, self.path.parent)):
            return self.only_read(where, values)
        return self._do(lambda db: _read(db, where, values, self.path))

    def measured(self, key: Key, workspace_limit: int | None = None, candidates: int = 1, filters: str = "") -> list[Measured]:
        """Plans of ``key`` that need at most ``workspace_limit`` bytes, best first: the order of the newest run, then what only older ones have.

        A run that left out what a tuning with this limit, these candidates and filters would try is not asked."""
        found: dict[Any, Measured] = {}
        for run in self.runs(key):
            for m in run.results if run.answers(workspace_limit, candidates, filters) else ():
                if workspace_limit is None or m.workspace <= workspace_limit:
                    found.setdefault(m.key, m)
        return list(found.values())

    def clear(self) -> int:
        """Delete every run; how many there were."""

        def delete(db: sqlite3.Connection) -> int:
            count = int(db.execute("SELECT count(*) FROM runs").fetchone()[0])
            db.execute("DELETE FROM results")
            db.execute("DELETE FROM runs")
            return count

        return self._do(delete) if self._there() else 0

    def only_read(self, where: str = "", values: tuple[str, ...] = ()) -> list[Run]:
        """Runs (``where``: SQL) of a file that must not be changed: another one's. A damaged file is a SerializationError."""
        import sqlite3

        # SQLite would write beside a file in WAL mode, even to read it: in a folder that cannot be written, nobody changes the file either
        fixed = not os.access(self.path.parent, os.W_OK) and not os.path.exists(f"{self.path}-wal")
        name = f"{self.path.resolve().as_uri()}?mode=ro{'&immutable=1' if fixed else ''}"
        try:
            with closing(sqlite3.connect(name, uri=True, timeout=BUSY_S)) as db:
                db.text_factory = _text
                return _read(db, where, values, self.path) if self._version(db) else []
        except (sqlite3.Error, UnicodeError) as error:
            raise self._refused(error) from error

    def _there(self) -> bool:
        """Whether there is a file. ExecutionError where that cannot be seen."""
        try:
            return self.path.exists()
        except OSError as error:
            raise self._unusable("cannot be opened", str(error)) from error

    # -- SQLite ---------------------------------------------------------------------------------------------------------------------------
    def _do(self, work: Callable[[sqlite3.Connection], T], make: bool = False) -> T:
        """``work`` in one transaction. A damaged file is moved aside and the work done again, on a new one."""
        import sqlite3

        try:
            try:
                with self._open(make) as db:
                    return work(db)
            except (sqlite3.DatabaseError, UnicodeError) as error:  # the latter: a message of SQLite's that quotes damaged bytes
                if _code(error) in _BUSY or _code(error) in _MEDIUM:
                    raise
                self._move_aside(str(error))
                with self._open(True) as db:
                    return work(db)
        except (sqlite3.Error, UnicodeError) as error:
            raise self._refused(error) from error

    @contextmanager
    def _open(self, make: bool = True) -> Iterator[sqlite3.Connection]:
        import sqlite3

        db = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)
        db.text_factory = _text
        try:
            version = self._version(db)
            if make:
                _wal(db)
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("BEGIN IMMEDIATE" if make else "BEGIN")
            try:
                if version == 0:
                    for statement in _TABLES.split(";"):
                        db.execute(statement)
                    db.execute(f"PRAGMA user_version = {SCHEMA}")
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
        finally:
            db.close()

    def _version(self, db: sqlite3.Connection) -> int:
        """SCHEMA, or 0 for an empty file. sqlite3.DatabaseError where tables are not what they were made as: what is written would be changed."""
        import sqlite3

        version = int(db.execute("PRAGMA user_version").fetchone()[0])
        made = dict(db.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall())
        tables = set(made)
        if version == SCHEMA and not set(made.values()) >= {s.strip().replace("IF NOT EXISTS ", "") for s in _TABLES.split(";")[:-1]}:
            raise sqlite3.DatabaseError("its tables are damaged")
        if version not in (0, SCHEMA) or (version == 0 and tables and "runs" not in tables):
            raise SerializationError(
                explain(
                    f"'{self.path}' is the database of another version or program",
                    expected=f"a tuning database of schema {SCHEMA}",
                    found=f"schema {version}, tables {sorted(map(str, tables))[:8]}",
                    fix="name another file in GRAPHDNN_TUNING_DB, or delete this one",
                )
            )
        return version

    def _sound(self) -> bool:
        import sqlite3

        try:
            with self._open() as db:
                _read(db, "", (), self.path)
                return bool(db.execute("PRAGMA integrity_check").fetchone()[0] == "ok")
        except (sqlite3.Error, UnicodeError) as error:
            return _code(error) in _BUSY

    def _move_aside(self, why: str) -> None:
        """Rename the damaged file. One process at a time, and only if it is still damaged: another one may have begun a new file."""
        try:
            with _exclusive(self.path.with_name(self.path.name + ".lock")):
                if self._sound():
                    return
                aside = self.path.with_name(f"{self.path.name}.damaged-{time.time_ns()}")
                os.rename(self.path, aside)
                for suffix in ("-wal", "-shm"):
                    self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        except OSError as error:
            rule, fix = f"tuning database '{self.path}' is damaged ({why}) and cannot be moved aside", "delete it"
            raise SerializationError(explain(rule, found=str(error), fix=fix)) from error
        log.warning(f"tuning database {self.path} is damaged ({why}); it is now {aside.name}, and a new one is begun")

    def _refused(self, error: Exception) -> GraphError:
        code = _code(error)
        if code in _BUSY:
            rule = f"tuning database '{self.path}' is locked by another process"
            return ExecutionError(explain(rule, expected=f"the lock within {BUSY_S:g} s", found=str(error), fix="wait, or end that process"))
        if code in _MEDIUM:
            return self._unusable(_MEDIUM[code], str(error))
        return SerializationError(explain(f"tuning database '{self.path}' is damaged", found=str(error), fix="delete it"))

    def _unusable(self, why: str, found: str) -> ExecutionError:
        fix = "make room or give the file to this user, or name another file in GRAPHDNN_TUNING_DB"
        rule = f"tuning database '{self.path}' cannot be used: {why}"
        return ExecutionError(explain(rule, expected="a file that can be read and written", found=found, fix=fix))


def _code(error: Exception) -> int:
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF


def _text(data: bytes) -> str:
    """Damaged text is text that fits no checksum."""
    return data.decode("utf-8", "replace")


def _wal(db: sqlite3.Connection) -> None:
    """Readers then do not wait for writers. The change of mode does not wait for others by itself, and it is no loss where it cannot be made."""
    import sqlite3

    end = time.monotonic() + BUSY_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if _code(error) not in _BUSY or time.monotonic() > end:
                raise
            time.sleep(0.01)


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """A lock between processes, where the file system has locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _add(db: sqlite3.Connection, runs: Sequence[Run], path: Path) -> int:
    """How many of the runs were new. sqlite3.DatabaseError where one is not found again: in a damaged file SQLite may write it to a wrong place."""
    import sqlite3

    new = [run for run in runs if _insert(db, run)]
    if new:
        known = {id for (id,) in db.execute("SELECT id FROM runs")}
        if not all(run.id in known and _read(db, " WHERE id = ?", (run.id,), path) for run in new):
            raise sqlite3.DatabaseError("what was written is not found again")
    return len(new)


def _insert(db: sqlite3.Connection, run: Run) -> bool:
    """Whether the run is new."""
    values = [getattr(run, c) for c in _COLUMNS]
    marks = ", ".join("?" * (len(values) + 1))
    if not db.execute(f"INSERT OR IGNORE INTO runs ({', '.join(_COLUMNS)}, digest) VALUES ({marks})", [*values, run.digest()]).rowcount:
        return False
    rows = [(run.id, i, m.label, json.dumps(m.choices), m.seconds, m.workspace) for i, m in enumerate(run.results)]
    db.executemany("INSERT INTO results VALUES (?, ?, ?, ?, ?, ?)", rows)
    return True


def _read(db: sqlite3.Connection, where: str, values: tuple[str, ...], path: Path) -> list[Run]:
    found = []
    for *row, digest in db.execute(f"SELECT {', '.join(_COLUMNS)}, digest FROM runs{where} ORDER BY created DESC, id", values).fetchall():
        rows = db.execute("SELECT label, choices, seconds, workspace FROM results WHERE run = ? ORDER BY rank", (row[0],)).fetchall()
        try:
            results = tuple(Measured(str(label), _choices(text), float(s), int(w)) for label, text, s, w in rows)
            run = Run(**dict(zip(_COLUMNS, row, strict=True)), results=results)
            verify(run, digest)
        except (ValueError, TypeError, RecursionError, SerializationError) as error:
            log.warning(f"run {str(row[0])[:40]} of tuning database {path} is damaged ({error}) and not used")
            continue
        found.append(run)
    return found


def verify(run: Run, digest: str) -> None:
    """ValueError for a run that is not what was written, or that no tuning writes."""
    if run.digest() != digest:
        raise ValueError(f"run {run.id[:40]} has another checksum")
    if not 0 <= run.heuristic < len(run.results):
        raise ValueError(f"run {run.id[:40]} has no result {run.heuristic}")
    whole = (run.pid, run.iterations, run.workspace_limit or 0, run.candidates or 0, *(m.workspace for m in run.results))
    if not (all(0 <= n < 1 << 63 for n in whole) and all(0 < m.seconds < math.inf for m in run.results) and 0 <= run.created < 1 << 36):
        raise ValueError(f"run {run.id[:40]} holds numbers that no tuning writes")
    json.dumps(codec.encode(run), ensure_ascii=False).encode()  # UnicodeEncodeError, which is one, for what no file can hold


def _choices(text: str) -> tuple[Choice, ...]:
    return tuple((int(engine), str(name), str(knobs)) for engine, name, knobs in json.loads(text))
