"""``graphdnn inspect``: what the report of a plan file says, in words and as JSON, of one plan and of several; files that it refuses."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

import graphdnn
from graphdnn import cli
from graphdnn._version import __version__
from graphdnn.inspection.planfile import inspect
from graphdnn.plans import serialize
from tests.unit.test_aot import declared


@pytest.fixture(scope="module")
def file() -> bytes:
    return graphdnn.compile_for(declared(), "sm_80,sm_90a,cpu")


def test_everything_is_in_it(file: bytes) -> None:
    found = inspect(file).data
    assert json.loads(json.dumps(found)) == found, "JSON values only"
    assert [p["device"]["arch"] for p in found["plans"]][:2] == ["sm_80", "sm_90a"] and found["bytes"] == len(file)
    roles = {t["name"]: (t["role"], t["uid"], t["dim"]) for t in found["graph"]["tensors"]}
    assert roles["x"] == ("input", 1, [6, 70]) and roles["y"][0] == roles["sums"][0] == "output"
    assert [n["op"] for n in found["graph"]["nodes"]] == ["POINTWISE"] * 3 + ["REDUCTION"]
    for data, plan in zip(serialize.parts(file), found["plans"], strict=True):
        built, _ = serialize.read(data)
        assert plan["versions"]["graphdnn"] == __version__ and plan["bytes"] == len(data) and plan["workspace_bytes"] == built.workspace_bytes
        assert [r["knobs"] for r in plan["regions"]] == [c.knobs for c in built.choices]
        assert [s["is"] for s in plan["steps"]] == [type(s).__name__ for s in built.recipe.steps]
        for k, kernel in zip(plan["kernels"], built.kernels, strict=True):
            assert k["name"] == kernel.name and k["code_bytes"] == len(kernel.binary.code)
            assert "source" not in k and "ptx" not in k
    gpu = found["plans"][1]["kernels"][0]
    assert gpu["registers"] > 0 and gpu["spill_bytes"] == 0 and {"registers", "shared_bytes", "block", "params", "template"} <= gpu.keys()


def test_texts_are_given_where_asked_for_and_where_there_are_any(file: bytes) -> None:
    old, _, cpu = (p["kernels"][0] for p in inspect(file, ("source", "ptx", "llvm", "sass")).data["plans"])
    assert "def " in old["source"] and ".target sm_80" in old["ptx"] and "Function :" in old["sass"] and "llvm" not in old
    assert "def " in cpu["source"] and "define " in cpu["llvm"] and "ptx" not in cpu and "sass" not in cpu


def test_the_command(file: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHDNN_DEVICE", "sm_89")
    path = tmp_path / "plan.gdnn"
    path.write_bytes(file)
    assert cli.main(["inspect", str(path), "--ptx"]) == 0
    told = capsys.readouterr().out
    for part in ("3 plans", "the one for sm_80 is loaded", "engine ", "registers", "0 spilled", "launch ", "strides [70, 1]", ".target sm_90a"):
        assert part in told, part
    assert cli.main(["inspect", str(path), "--json"]) == 0 and len(json.loads(capsys.readouterr().out)["plans"]) == 3
    monkeypatch.setenv("GRAPHDNN_DEVICE", "sm_120")
    assert "none of them is loaded here" in str(inspect(file))
    assert "does not run on sm_120" in str(inspect(serialize.parts(file)[0]))


def test_a_pipeline(file: bytes) -> None:
    """The file of a pipeline shows each of its stages."""
    g = declared(device="cpu")
    g.build([graphdnn.heur_mode.A])
    line = graphdnn.Pipeline(name="line")
    line.add(g, {"x": "first", "y": "second", "sums": "unused"})
    line.add(g, {"x": "second", "y": "third", "sums": "last"})
    line.build()
    found = inspect(bytes(line.serialize()))
    assert found.data["pipeline"] == "line" and len(found.data["stages"]) == 2
    assert found.data["stages"][1]["names"]["1"] == "second" and found.data["stages"][0]["file"]["plans"][0]["device"]["kind"] == "cpu"
    assert "pipeline 'line' of 2 stages" in str(found) and "stage 1: " in str(found) and json.loads(json.dumps(found.data)) == found.data


def test_what_it_refuses(file: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.gdnn"
    for data, part in (
        (b"", "not a serialized plan"),
        (b"{}", "not a serialized plan"),
        (file[:-1], "checksum"),
        (file[:8] + struct.pack("<I", 7) + file[12:], "another format"),
    ):
        path.write_bytes(data)
        assert cli.main(["inspect", str(path)]) == 1 and part in capsys.readouterr().err
