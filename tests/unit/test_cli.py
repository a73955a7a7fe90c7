"""The command line, in process (``main(argv)``) and once as ``python -m graphdnn``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import graphdnn
from graphdnn import cli
from graphdnn.inspection import check as checking
from graphdnn.plans import cache, disk, serialize
from graphdnn.targets import native

ROOT = Path(__file__).resolve().parents[2]
F32 = graphdnn.data_type.FLOAT


@pytest.fixture(scope="module")
def text() -> str:
    """relu(x * s + bias) and its column sums."""
    g = graphdnn.pygraph(device="cpu", io_data_type=F32, compute_data_type=F32)
    x = g.tensor(dim=[6, 8], stride=[8, 1], name="x")
    s = g.tensor(dim=[1, 1], stride=[1, 1], is_pass_by_value=True, name="s")
    bias = g.tensor(dim=[1, 8], stride=[8, 1], name="bias")
    y = g.relu(g.add(g.mul(x, s, name="scale"), bias, name="shift"), name="clip").set_output(True)
    g.reduction(y, graphdnn.reduction_mode.ADD, name="sums").set_dim([1, 8]).set_stride([8, 1]).set_output(True)
    g.validate()
    g.build_operation_graph()
    return str(g)


@pytest.fixture
def file(tmp_path, text) -> Path:
    path = tmp_path / "clip.json"
    path.write_text(text)
    return path


@pytest.fixture
def cold(empty_cache, monkeypatch) -> Path:
    """Nothing on disk, nothing in memory."""
    monkeypatch.setattr(cache, "memory", cache.KernelStore())
    return empty_cache


def run(capsys, *argv) -> tuple[int, str, str]:
    status = cli.main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return status, out, err


def test_doctor(capsys, monkeypatch):
    status, out, _ = run(capsys, "doctor")
    assert status == 0 and all(part in out for part in ("numba", "ptxas", "numpy", "GRAPHDNN_DEVICE", graphdnn.__version__, "compiling for CUDA"))
    rows = json.loads(run(capsys, "doctor", "--json")[1])
    assert {"part", "found", "version", "path", "needed_for"} == set(rows[0])
    monkeypatch.setenv("GRAPHDNN_NUM_THREADS", "many")
    assert "INVALID" in run(capsys, "doctor")[1]


def test_explain(capsys, file):
    status, out, err = run(capsys, "explain", file, "--device", "cpu")
    assert status == 0 and "clip" in out and "kernels" in out and "rejections" in out and "compiling" not in err
    data = json.loads(run(capsys, "explain", file, "--device", "sm_90", "--json")[1])
    assert data["plan"].startswith("r0:eng") and "H200" in data["device"]


@pytest.mark.parametrize(
    ("argv", "name", "start"), [((), "clip.svg", "<svg"), (("--format", "dot"), "clip.dot", "digraph"), (("-o", "a.mmd"), "a.mmd", "flow")]
)
def test_draw(capsys, file, monkeypatch, argv, name, start):
    monkeypatch.chdir(file.parent)
    status, out, _ = run(capsys, "draw", file, "--device", "cpu", *argv)
    assert status == 0 and out.strip().endswith(name)
    assert (file.parent / name).read_text().startswith(start)


def test_compile_then_everything_with_the_plan(capsys, file, tmp_path, cold):
    plan = tmp_path / "out.gdnn"
    status, out, err = run(capsys, "compile", file, "--device", "cpu", "-o", plan)
    assert status == 0 and "bytes of code (compiled)" in out and str(plan) in out
    assert "s] compiling" in err and "candidate plans on cpu" in err
    assert serialize.load(plan.read_bytes()).built
    status, out, err = run(capsys, "run", plan, "--repeat", 1)
    assert status == 0 and out.count("right") == 2 and "time:" in out and "compiling" not in err
    assert run(capsys, "explain", plan)[0] == 0 and run(capsys, "draw", plan)[0] == 0
    status, _, err = run(capsys, "run", plan, "--device", "sm_90")
    assert status == 1 and "SerializationError" in err and "another device" in err


def test_compile_for_a_gpu_that_is_not_there(capsys, file):
    status, out, _ = run(capsys, "compile", file, "--device", "sm_90a")
    assert status == 0 and "registers" in out and "0 bytes spilled" in out and file.with_suffix(".gdnn").exists()


def test_run_a_graph(capsys, file):
    status, out, err = run(capsys, "run", file, "--device", "cpu", "--seed", 5, "-q")
    assert status == 0 and err == "" and "clip::OUT_0: largest difference" in out and "sums::Y" in out


def test_run_tells_of_a_wrong_result(capsys, file, monkeypatch):
    bad = checking.Checked((checking.Compared("y", 1.0, 2.0, 3, 4),), 1e-3, 1e-4)
    monkeypatch.setattr(checking, "check", lambda *args: bad)
    status, out, _ = run(capsys, "run", file, "--device", "cpu", "-q")
    assert status == 1 and "WRONG: 3 of 4" in out


def test_cache(capsys, file, cold):
    assert run(capsys, "cache", "path")[1].strip() == str(cold)
    assert ": 0 kernels" in run(capsys, "cache")[1]
    run(capsys, "compile", file, "--device", "cpu", "-q")
    count = len(disk.disk().entries())
    assert count and f": {count} kernels" in run(capsys, "cache", "info")[1]
    assert f"{count} kernels removed" in run(capsys, "cache", "clear")[1]
    assert disk.disk().entries() == []


def test_cache_switched_off(capsys, monkeypatch):
    monkeypatch.setenv("GRAPHDNN_CACHE", "0")
    assert "switched off" in run(capsys, "cache")[1]


def test_errors_are_one_line_and_status_1(capsys, tmp_path, file):
    (tmp_path / "noise").write_bytes(bytes(range(200, 256)))
    (tmp_path / "broken.gdnn").write_bytes(serialize.MAGIC + bytes(100))
    for argv, part in (
        (("run", tmp_path / "missing"), "cannot be read"),
        (("run", tmp_path / "noise"), "neither JSON text nor a serialized plan"),
        (("run", tmp_path / "broken.gdnn"), "SerializationError"),
        (("explain", file, "--device", "toaster"), "unknown device"),
        (("run", file, "--device", "sm_90"), "described device"),
    ):
        status, _, err = run(capsys, *argv)
        last = err.strip().splitlines()[-1]
        assert status == 1 and last.startswith("graphdnn: ") and part in last, err


def test_an_interrupt_is_one_line_and_status_130(capsys, file, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("graphdnn.plans.autotune.tune", interrupted)
    assert cli.main(["tune", str(file), "--device", "cpu", "-q"]) == 130 and capsys.readouterr().err == "graphdnn: interrupted\n"
    assert cli.main(["run", str(file), "--device", "cpu", "-q", "--seed", "-1"]) == 1 and "seed is too small" in capsys.readouterr().err
    assert cli.main(["run", str(file), "--device", "sm_90", "-q"]) == 1 and "built for a described device" in capsys.readouterr().err


def test_usage(capsys):
    for argv in ((), ("nonsense",), ("run",), ("cache", "burn")):
        with pytest.raises(SystemExit) as caught:
            cli.main(list(argv))
        assert caught.value.code == 2
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0 and "doctor" in capsys.readouterr().out


def test_as_a_module(file):
    done = subprocess.run([sys.executable, "-m", "graphdnn", "explain", str(file), "--device", "cpu"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "kernels" in done.stdout, done.stderr


def test_doctor_says_why_there_is_no_compiled_execute(capsys, monkeypatch):
    monkeypatch.setattr("graphdnn.targets.native.where", lambda: ("", native.NOT_BUILT))
    out = run(capsys, "doctor")[1]
    assert "compiled execute: not compiled at installation: a C compiler or Python's headers" in out
