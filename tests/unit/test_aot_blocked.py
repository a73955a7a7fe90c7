"""Plan files in processes where the compilers cannot be imported: CPU plans with llvmlite alone, CUDA plans with nothing but a driver (the one in
Python of fake_cuda.py). What asks for a compiler there says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphdnn
from graphdnn.plans import serialize
from tests.unit.test_aot import COLUMNS, ROWS, declared

ROOT = Path(__file__).resolve().parents[2]
D = graphdnn.data_type

BEGIN = """
import sys, json
from tests.blocked import block, COMPILERS
import numpy as np
"""
CPU = (
    BEGIN
    + """
block(*(set(COMPILERS) - {"llvmlite"}))
import graphdnn
g = graphdnn.pygraph(device="cpu")
g.deserialize(open(sys.argv[1], "rb").read())
x, shift = (np.load(p) for p in sys.argv[2:4])
y, sums = np.empty_like(x), np.empty((len(x), 1), np.float32)
g.execute({1: x, 2: shift, 3: y, 4: sums}, np.empty(g.get_workspace_size(), np.uint8))
print(json.dumps({"y": y.tolist(), "sums": sums.tolist(), "origins": [k.origin for k in g.plan.kernels]}))
"""
)
WITHOUT_LLVMLITE = (
    BEGIN
    + """
block(*COMPILERS)
import graphdnn
g = graphdnn.pygraph(device="cpu")
try:
    g.deserialize(open(sys.argv[1], "rb").read())
    g.execute({1: 64, 2: 64, 3: 64, 4: 64}, 64)
except graphdnn.ExecutionError as error:
    print(error)
"""
)
CUDA = (
    BEGIN
    + """
block(*COMPILERS)
import graphdnn
from graphdnn import _libcuda
from graphdnn.inspection.planfile import inspect
from graphdnn.plans import serialize
from tests.unit.fake_cuda import FakeCuda, parameters_of
data = open(sys.argv[1], "rb").read()
shown = str(inspect(data, ("source", "ptx")))
plan = next(p for p, _ in map(serialize.read, serialize.parts(data)) if p.device.arch == "sm_90a")
fake = FakeCuda(parameters_of(plan))
_libcuda._driver = _libcuda.Driver(fake)
g = graphdnn.pygraph()
g.deserialize(data)
fake.calls.clear()
g.execute({1: 0x10000, 2: 0x20000, 3: 0x30000, 4: 0x40000}, 0x80000)
asked = len(fake.calls)
h = graphdnn.pygraph(io_data_type=graphdnn.data_type.FLOAT, compute_data_type=graphdnn.data_type.FLOAT)
h.relu(h.tensor(dim=(77, 5), layout="row")).set_output(True)
try:
    h.build([graphdnn.heur_mode.A])
    refused = ""
except graphdnn.BuildError as error:
    refused = str(error)
loaded = [entry[1][:4].hex() for entry in fake.log if entry[0] == "load"]
print(json.dumps({"log": [e for e in fake.log if e[0] in ("launch", "memset", "encode", "move")], "loaded": loaded, "refused": refused,
                  "device": g.plan.device.name, "asked": asked, "shown": len(shown)}))
"""
)


def program(text: str, *arguments: Any, cache: Path) -> Any:
    env = {"PYTHONPATH": str(ROOT), "PATH": "/nowhere", "GRAPHDNN_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-c", text, *map(str, arguments)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.gdnn"
    path.write_bytes(graphdnn.compile_for(declared(), "sm_80,sm_90a,cpu"))
    return path


def test_a_cpu_plan_needs_llvmlite_alone(file: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    x, shift = rng.standard_normal((ROWS, COLUMNS), np.float32), rng.standard_normal((1, COLUMNS), np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "shift.npy", shift)
    found = json.loads(program(CPU, file, tmp_path / "x.npy", tmp_path / "shift.npy", cache=tmp_path / "cache"))
    g = graphdnn.pygraph(device="cpu")
    g.deserialize(file.read_bytes())
    y, sums = np.empty_like(x), np.empty((ROWS, 1), np.float32)
    g.execute({1: x, 2: shift, 3: y, 4: sums}, np.empty(g.get_workspace_size(), np.uint8))
    assert set(found["origins"]) == {"file"}, "nothing was compiled"
    np.testing.assert_array_equal(np.array(found["y"], np.float32), y)
    np.testing.assert_array_equal(np.array(found["sums"], np.float32), sums)


def test_without_llvmlite_a_cpu_plan_says_so(file: Path, tmp_path: Path) -> None:
    told = program(WITHOUT_LLVMLITE, file, cache=tmp_path)
    assert "a CPU plan is linked by llvmlite" in told and "pip install llvmlite" in told


def test_a_cuda_plan_needs_the_driver_alone(file: Path, tmp_path: Path) -> None:
    """Its steps reach the driver as the recipe says; a build in that process is a typed error that names what is missing."""
    found = json.loads(program(CUDA, file, cache=tmp_path))
    plan = next(p for p, _ in map(serialize.read, serialize.parts(file.read_bytes())) if p.device.arch == "sm_90a")
    launches = [entry for entry in found["log"] if entry[0] == "launch"]
    assert [entry[1] for entry in launches] == [k.name for k in plan.kernels] and found["device"] == "Fake GPU"
    workspace = set(range(0x80000, 0x80000 + plan.workspace_bytes + 1))
    assert {v for entry in launches for v in entry[6]} <= {0x10000, 0x20000, 0x30000, 0x40000} | workspace
    assert set(found["loaded"]) == {b"\x7fELF".hex()} and found["asked"] and found["shown"] > 5000
    assert "cannot be compiled here; expected package jinja2" in found["refused"] and "graphdnn compile" in found["refused"]
