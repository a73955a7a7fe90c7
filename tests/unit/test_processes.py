"""Many processes on one cold cache, one of them killed; a cache that cannot be written; no HOME; many threads on one plan."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type
from tests.helpers import built

PROGRAM = """
import json, os, sys
import numpy as np
import graphdnn
from graphdnn.plans import cache
if len(sys.argv) > 1 and sys.argv[1] == "die":
    # SIGKILL in the middle of a publication: files are written, the rename has not happened.
    import graphdnn.plans.disk as disk
    real = os.rename
    def die(*args, **kwargs):
        print("dying", flush=True)
        os.kill(os.getpid(), 9)
    os.rename = die
F = graphdnn.data_type.FLOAT
g = graphdnn.pygraph(device="cpu", io_data_type=F, compute_data_type=F)
a = g.tensor(dim=[2, 5, 7], stride=[35, 7, 1], uid=1)
b = g.tensor(dim=[2, 7, 3], stride=[21, 3, 1], uid=2)
y = g.gelu(g.matmul(a, b)).set_output(True).set_uid(3)
g.reduction(y, graphdnn.reduction_mode.AMAX).set_dim([1, 1, 1]).set_output(True).set_uid(4)
g.build([graphdnn.heur_mode.A])
rng = np.random.default_rng(0)
x, w = rng.standard_normal((2, 5, 7)).astype(np.float32), rng.standard_normal((2, 7, 3)).astype(np.float32)
out, top = np.full((2, 5, 3), np.nan, np.float32), np.full((1, 1, 1), np.nan, np.float32)
g.execute({1: x, 2: w, 3: out, 4: top}, np.empty(g.get_workspace_size(), np.uint8))
c = x.astype(np.float64) @ w
from math import erf
want = 0.5 * c * (1 + np.vectorize(erf)(c / np.sqrt(2)))
assert np.abs(out - want).max() < 1e-5, (out, want)
assert abs(top.item() - np.abs(want).max()) < 1e-5
print(json.dumps({"misses": cache.counters.misses, "disk": cache.counters.disk_hits}))
"""
BASE = {k: v for k, v in os.environ.items() if not k.startswith(("GRAPHDNN", "XDG", "HOME"))}
ROOT = Path(__file__).resolve().parents[2]


def start(env: dict[str, str], *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *args], cwd=ROOT, env=BASE | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finished(process: subprocess.Popen[str]) -> dict[str, int]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def test_8_processes_on_one_cold_cache_one_killed(tmp_path):
    """Seven get right results, whoever dies where; the cache is whole afterwards."""
    env = {"HOME": str(tmp_path), "GRAPHDNN_CACHE_DIR": str(tmp_path / "cache"), "GRAPHDNN_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    doomed = start(env, "die")
    others = [start(env) for _ in range(7)]
    out, err = doomed.communicate(timeout=300)
    assert doomed.returncode == -signal.SIGKILL or "dying" not in out, f"{doomed.returncode}: {err}"
    results = [finished(p) for p in others]
    assert any(r["misses"] for r in results) or "dying" not in out
    after = finished(start(env))
    assert after["misses"] == 0 and after["disk"] > 0, "the next process finds every kernel"


def test_killed_alone_leaves_nothing_half_made(tmp_path):
    """The only process dies between writing and publishing: the next one compiles, the one after that hits."""
    env = {"HOME": str(tmp_path), "GRAPHDNN_CACHE_DIR": str(tmp_path / "cache")}
    doomed = start(env, "die")
    out, _ = doomed.communicate(timeout=300)
    assert doomed.returncode == -signal.SIGKILL and "dying" in out
    assert finished(start(env))["misses"] > 0
    assert finished(start(env))["misses"] == 0


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


@pytest.mark.parametrize("how", ["read-only folder", "a file in its place", "path under a file"])
def test_cache_that_cannot_be_written(tmp_path, how):
    """Root may write anywhere, so beside the read-only folder there are two places where nobody can make a folder."""
    folder = tmp_path / "cache"
    if how == "read-only folder":
        folder.mkdir()
        folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    else:
        folder.write_text("not a folder")
    env = {"HOME": str(tmp_path), "GRAPHDNN_CACHE_DIR": str(folder / "deeper" if how == "path under a file" else folder)}
    try:
        for _ in range(2):
            assert finished(start(env))["misses"] > 0 or (_is_root() and how == "read-only folder")
    finally:
        folder.chmod(stat.S_IRWXU)


def test_read_only_cache_that_is_full_is_read(tmp_path):
    """Filled, then write-protected: hits, no complaints."""
    env = {"HOME": str(tmp_path), "GRAPHDNN_CACHE_DIR": str(tmp_path / "cache")}
    finished(start(env))
    folders = [tmp_path / "cache", *(p for p in (tmp_path / "cache").rglob("*") if p.is_dir())]
    for f in folders:
        f.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert finished(start(env))["misses"] == 0
    finally:
        for f in folders:
            f.chmod(stat.S_IRWXU)


@pytest.mark.parametrize("home", [None, "/nonexistent", ""])
def test_home_unset_or_missing(home, tmp_path):
    env = {"TMPDIR": str(tmp_path)} | ({} if home is None else {"HOME": home})
    if home == "/nonexistent" and _is_root():
        env["HOME"] = "/proc/nonexistent"  # where even root cannot make a folder
    finished(start(env))


THREADS, RUNS = 8, 1000


def test_8_threads_on_one_plan_1000_runs_each_are_bitwise_equal():
    """Each thread has buffers and a workspace of its own; every run of every thread gives the bits of the first."""
    g = graphdnn.pygraph(device="cpu", io_data_type=data_type.FLOAT, compute_data_type=data_type.FLOAT)
    a = g.tensor(dim=[2, 33, 17], stride=[561, 17, 1], uid=1)
    b = g.tensor(dim=[2, 17, 9], stride=[153, 9, 1], uid=2)
    y = g.gelu(g.matmul(a, b)).set_output(True).set_uid(3)
    g.reduction(y, graphdnn.reduction_mode.ADD).set_dim([1, 1, 1]).set_output(True).set_uid(4)
    built(g)
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((2, 33, 17)).astype(np.float32), rng.standard_normal((2, 17, 9)).astype(np.float32)
    size = g.get_workspace_size()

    def once(workspace: np.ndarray, out: np.ndarray, total: np.ndarray) -> bytes:
        out.fill(np.nan)
        total.fill(np.nan)
        g.execute({1: x, 2: w, 3: out, 4: total}, workspace)
        return out.tobytes() + total.tobytes()

    def buffers() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.full(size, 0xFF, np.uint8), np.empty((2, 33, 9), np.float32), np.empty((1, 1, 1), np.float32)

    want = once(*buffers())
    assert np.isfinite(np.frombuffer(want, np.float32)).all()
    wrong: list[str] = []
    together = threading.Barrier(THREADS)

    def work(number: int) -> None:
        mine = buffers()
        together.wait()
        for i in range(RUNS):
            try:
                if once(*mine) != want:
                    wrong.append(f"thread {number}, run {i}: other bits")
                    return
            except Exception as error:
                wrong.append(f"thread {number}, run {i}: {error!r}")
                return

    threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong, wrong


def test_threads_that_build_the_same_graph_at_once(empty_cache):
    """Eight threads, one cold cache in one process: all get right results."""
    problems: list[str] = []
    together = threading.Barrier(THREADS)

    def work() -> None:
        try:
            g = graphdnn.pygraph(device="cpu", io_data_type=data_type.FLOAT, compute_data_type=data_type.FLOAT)
            x = g.tensor(dim=[40], stride=[1], uid=1)
            g.tanh(g.mul(x, 3.0)).set_output(True).set_uid(2)
            together.wait()
            built(g)
            data, out = np.linspace(-1, 1, 40, dtype=np.float32), np.zeros(40, np.float32)
            g.execute({1: data, 2: out}, None)
            np.testing.assert_allclose(out, np.tanh(data * 3), rtol=1e-5)
        except Exception as error:
            problems.append(repr(error))

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not problems, problems
