"""The tuning database: many processes, kills, damage, locks, full disks; the command."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import graphdnn
from graphdnn import cli, env
from graphdnn.errors import ExecutionError, GraphError, SerializationError
from graphdnn.plans import tuning, tuning_files
from graphdnn.plans.tuning import Database, Key, Measured, Run

ROOT = Path(__file__).resolve().parents[2]
F32 = graphdnn.data_type.FLOAT
KEY = Key("g", "cpu", "tools")
PROGRAM = """
import os, sys
import graphdnn
from graphdnn.plans import tuning
if "die" in sys.argv:  # SIGKILL in the middle of a transaction: the run is there, its results are not
    tuning._insert = lambda db, run: (db.execute("INSERT INTO results VALUES ('x', 0, '', '', 1.0, 0)"), os.kill(os.getpid(), 9))
F = graphdnn.data_type.FLOAT
g = graphdnn.pygraph(device="cpu", io_data_type=F, compute_data_type=F, intermediate_data_type=F)
x = g.tensor(dim=(2, 30, 5), layout="row", name="x")
g.relu(g.reduction(x, graphdnn.reduction_mode.ADD, axes=(1,), keepdim=True)).set_output(True)
found = g.autotune(workers=0, iterations=2, reuse="reuse" in sys.argv)
print(found.source, found.executions, found.problem)
"""


def run(i: int = 1, **more) -> Run:
    facts = {"id": f"id{i}", "graph": KEY.graph, "device": KEY.device, "toolchain": KEY.toolchain, "version": KEY.version, "created": float(i)}
    facts |= {"host": "h", "pid": 3, "iterations": 5, "workspace_limit": None, "candidates": None, "filters": "", "heuristic": 0} | more
    results = (Measured("", ((3, "mm", "K(1)"),), 1e-5, 0), Measured("cut4", ((3, "mm", "K(2)"), (0, "pointwise", "P()")), 2e-5, 512))
    return Run(**{"results": results} | facts)


@pytest.fixture
def database(tmp_path, monkeypatch) -> Database:
    monkeypatch.setenv("GRAPHDNN_TUNING_DB", str(tmp_path / "folder" / "tuning.db"))
    return Database(tmp_path / "folder" / "tuning.db")


def start(database: Database, *args: str) -> subprocess.Popen:
    env = os.environ | {"GRAPHDNN_TUNING_DB": str(database.path)}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *args], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def test_eight_processes_lose_nothing_and_a_killed_one_harms_nothing(database):
    dying = start(database, "die")
    dying.communicate(timeout=120)
    assert dying.returncode == -signal.SIGKILL and database.path.exists()
    assert database.runs() == [], "its transaction is gone"
    processes = [start(database) for _ in range(8)]
    assert all(finished(p).startswith("measured") for p in processes)
    runs = database.runs()
    assert len({r.pid for r in runs}) == len(runs) == 8 and len({r.key for r in runs}) == 1
    assert finished(start(database, "reuse")) == "database 0 \n"
    assert len(database.runs()) == 8


def test_runs_are_kept_as_they_are_and_added_once(database, tmp_path):
    assert database.runs() == [] and database.clear() == 0 and not database.path.exists()
    assert database.add([run(1), run(2)]) == 2 and database.add([run(2), run(3)]) == 1
    assert database.runs() == [run(3), run(2), run(1)] and database.runs(KEY) == database.runs()
    assert database.runs(Key("other", KEY.device, KEY.toolchain)) == []
    text = tmp_path / "runs.json"
    tuning_files.write(text, database.runs())
    other = Database(tmp_path / "other.db")
    assert other.add(tuning_files.load(text)) == 3 and other.add(tuning_files.load(database.path)) == 0
    assert other.runs() == database.runs()
    assert database.clear() == 3 and database.runs() == []


def test_the_newest_run_comes_first_and_limited_ones_answer_within_their_limit(database):
    fast = Measured("", ((3, "mm", "K(9)"),), 1e-6, 4096)
    database.add([run(1), run(2, results=(fast,)), run(3, workspace_limit=100, results=(run().results[1],))])
    assert database.measured(KEY) == [fast, *run().results]
    assert database.measured(KEY, 600) == [*run().results]
    assert database.measured(KEY, 50) == [run().results[0]], "the limited run's plan needs more"


def test_a_run_that_left_plans_out_answers_only_who_would_leave_them_out_too(database):
    database.add([run(1, candidates=8), run(2, filters="'eng2' was deselected", results=run().results[:1])])
    assert database.measured(KEY) == [*run().results] == database.measured(KEY, None, 8)
    assert database.measured(KEY, None, 9) == []
    assert database.measured(KEY, None, 9, "'eng2' was deselected") == [run().results[0]]


def test_a_file_that_is_no_database_is_moved_aside(database, capfd, monkeypatch):
    monkeypatch.setenv("GRAPHDNN_LOG", "warning")
    database.add([run(1)])
    whole = database.path.read_bytes()
    for damage in (b"no database " * 100, whole[:5000], whole[:100] + bytes(4000) + whole[4100:]):
        database.path.write_bytes(damage)
        assert database.add([run(5)]) == 1 and database.runs()[0] == run(5)
    assert len(list(database.path.parent.glob("tuning.db.damaged-*"))) >= 2
    assert "is damaged" in capfd.readouterr().err


def test_a_damaged_run_is_left_out(database, capfd, monkeypatch):
    monkeypatch.setenv("GRAPHDNN_LOG", "warning")
    database.add([run(1), run(2)])
    with sqlite3.connect(database.path) as db:
        db.execute("UPDATE results SET seconds = 1e-9 WHERE run = 'id2' AND rank = 1")
    assert database.runs() == [run(1)] and "another checksum" in capfd.readouterr().err


@pytest.mark.parametrize("seed", [0, 1, 2, 105])
def test_random_damage_is_a_typed_error_or_a_new_file(database, seed):
    database.add([run(i) for i in range(6)])
    whole, rng, good = database.path.read_bytes(), random.Random(seed), {run(i) for i in range(6)}
    for number in range(40):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 30)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        for file in database.path.parent.iterdir():
            file.unlink()
        database.path.write_bytes(data[: rng.randrange(len(data))] if number % 4 == 0 else data)
        try:
            assert set(database.runs()) <= good
            database.add([run(9)])
            assert run(9) in database.runs()
        except GraphError as error:
            assert "tuning database" in str(error) or "database of another version" in str(error)


@contextmanager
def no_room():
    """No file may grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_locked_full_and_foreign_files_are_typed_errors(database, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "BUSY_S", 0.1)
    database.add([run(1)])
    with sqlite3.connect(database.path, isolation_level=None) as db:
        db.execute("BEGIN EXCLUSIVE")
        with pytest.raises(ExecutionError, match="locked by another process; expected the lock within 0.1 s.* To fix"):
            database.add([run(2)])
        db.execute("ROLLBACK")
    with no_room(), pytest.raises(ExecutionError, match="cannot be used: .*GRAPHDNN_TUNING_DB"):
        database.add([run(2)])
    assert database.runs() == [run(1)], "what was there is there"
    with pytest.raises(ExecutionError, match="cannot be opened"):
        Database(tmp_path).add([run(1)])
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE songs (name TEXT)")
    with pytest.raises(SerializationError, match="another version or program.*songs"):
        Database(other).add([run(1)])
    with sqlite3.connect(database.path) as db:
        db.execute("PRAGMA user_version = 7")
    with pytest.raises(SerializationError, match="expected a tuning database of schema 2, found schema 7"):
        database.runs()


def test_what_cannot_be_looked_at_or_moved_is_a_typed_error(database, tmp_path, monkeypatch):
    long = Database(tmp_path / ("n" * 300))
    for call in (long.runs, long.clear, lambda: long.add([run(1)])):
        with pytest.raises(ExecutionError, match="cannot be used: cannot be opened"):
            call()
    database.add([run(1)])
    database.path.write_bytes(b"no database " * 100)
    (database.path.parent / "tuning.db.lock").mkdir()
    with pytest.raises(SerializationError, match="is damaged .* and cannot be moved aside.*delete it"):
        database.runs()


@pytest.mark.parametrize(
    "change",
    [{"results": (Measured("", ((3, "mm", "K(1)"),), s, w),)} for s, w in ((float("nan"), 0), (float("inf"), 0), (0.0, 0), (1.0, -1), (1.0, 1 << 63))]
    + [{"pid": 1 << 70}, {"candidates": -1}, {"created": 1e300}, {"created": float("nan")}, {"host": "\ud800"}],
    ids=repr,
)
def test_an_export_that_no_tuning_writes(tmp_path, change):
    """Its checksum is right: a table of it, and the database, would stumble over the numbers."""
    text = tmp_path / "runs.json"
    tuning_files.write(text, [run(1, **change)])
    with pytest.raises(SerializationError, match="no tuning database and no export"):
        tuning_files.load(text)


def test_a_tilde_is_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GRAPHDNN_TUNING_DB", "~/tuning.db")
    monkeypatch.setenv("GRAPHDNN_CACHE_DIR", "~/cache")
    assert tuning.database() == Database(tmp_path / "tuning.db") and env.cache_dir() == tmp_path / "cache"


def test_tables_that_are_not_what_they_were_made_as_are_damage(database):
    """A column that has lost its type keeps what it is given as something else: no run would be right again."""
    database.add([run(1)])
    database.path.write_bytes(database.path.read_bytes().replace(b"created REAL", b"created REUL"))
    assert database.runs() == [] and database.add([run(2)]) == 1 and database.runs() == [run(2)]


READ_ONLY = """
import os, sys
from pathlib import Path
from graphdnn.errors import ExecutionError
from graphdnn.plans import tuning_files
from tests.unit.test_tuning import KEY, Database, run

def right(path):
    database = Database(path)
    return database.runs() == [run(1)] == tuning_files.load(path) and database.measured(KEY) == [*run().results]

def refused(path):
    try:
        Database(path).add([run(2)])
    except ExecutionError as error:
        return str(error)

given, own = map(Path, sys.argv[1:])
Database(own).add([run(1)])
assert right(own) and refused(own.parent / "no folder" / os.sep.join(["x"] * 5000))  # what this imports may not be readable later
os.setuid(65534)
assert right(given), "it is read"
assert "is read-only" in (refused(given) or "stored"), "it is not written"
"""


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="gives up the rights of root in a process of its own")
def test_a_database_that_may_only_be_read_is_read(tmp_path):
    with tempfile.TemporaryDirectory() as folder:  # every folder above pytest's own is root's alone
        given = Database(Path(folder, "tuning.db"))
        given.add([run(1)])
        given.path.chmod(0o444)
        Path(folder).chmod(0o555)
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", READ_ONLY, str(given.path), str(tmp_path / "own.db")]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-2000:]


def test_a_tuning_that_cannot_be_stored_is_still_a_tuning(database, tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHDNN_TUNING_DB", str(tmp_path))
    g = graphdnn.pygraph(device="cpu", io_data_type=F32, compute_data_type=F32)
    g.relu(g.tensor(dim=(2, 30, 5), layout="row")).set_output(True)
    found = g.autotune(workers=0, iterations=1)
    assert found.source == "measured" and not found.stored and "cannot be opened" in found.problem and g.plan.built
    g.build([graphdnn.heur_mode.B])
    assert g.plan.built


def test_the_command(database, tmp_path, capsys):
    g = graphdnn.pygraph(device="cpu", io_data_type=F32, compute_data_type=F32)
    g.relu(g.tensor(dim=(2, 30, 5), layout="row")).set_output(True)
    g.build()
    graph, out = tmp_path / "g.json", tmp_path / "runs.json"
    graph.write_text(str(g))

    def call(*argv) -> str:
        assert cli.main([str(a) for a in argv]) == 0
        return capsys.readouterr().out

    assert "0 runs" in call("tuning", "list")
    tune = ("tune", graph, "--device", "cpu", "--workers", 0, "--iterations", 1)
    assert "the heuristic's" in call(*tune) and "from database" in call(*tune)
    assert "1 runs" in call("tuning", "list") and "pointwise PointwiseCpu" in call("tuning", "list")
    (listed,) = json.loads(call("tuning", "list", "--json"))["runs"]
    assert listed["results"] and listed["pid"] == os.getpid()
    assert "1 runs" in call("tuning", "export", "-o", out)
    assert "0 of 1 runs were new" in call("tuning", "merge", out)
    assert "1 runs removed" in call("tuning", "clear") and "1 of 2 runs were new" in call("tuning", "merge", out, out)
    out.write_text(out.read_text().replace('"pid": ', '"pid": 1'))
    assert cli.main(["tuning", "merge", str(out)]) == 1 and "another checksum" in capsys.readouterr().err
    assert cli.main(["tuning", "merge", str(graph)]) == 1 and "no tuning database" in capsys.readouterr().err


KILLED = """
import os, threading, time
import graphdnn
from graphdnn.engines import ENGINES
from graphdnn.plans import workers
from tests.unit import planted
import graphdnn.engines
graphdnn.engines.ENGINES = (planted.Hanging(), *ENGINES)
real = workers.Worker._start
def started(self):
    process = real(self)
    print(process.pid, flush=True)
    return process
workers.Worker._start = started
F = graphdnn.data_type.FLOAT
g = graphdnn.pygraph(device="cpu", io_data_type=F, compute_data_type=F)
g.relu(g.tensor(dim=(2, 30, 5), layout="row")).set_output(True)
g.autotune(workers=1)
"""


def test_a_worker_that_hangs_ends_with_a_parent_that_is_killed(database):
    env = os.environ | {"GRAPHDNN_TUNING_DB": str(database.path)}
    parent = subprocess.Popen([sys.executable, "-c", KILLED], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    time.sleep(1.0)
    parent.kill()
    parent.wait()
    end = time.monotonic() + 60
    while alive(worker) and time.monotonic() < end:
        time.sleep(0.2)
    assert not alive(worker)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
