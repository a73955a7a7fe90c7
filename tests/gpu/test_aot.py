"""A plan file compiled without a GPU runs on an H100 or H200 in a process that can import no compiler, start no program and open no libNVVM.

GRAPHDNN_TEST_PLAN names a file compiled elsewhere, as by ``python -m tests.gpu.test_aot plan.gdnn`` on a machine with no GPU; without it another
process of this machine, which is told that there is no GPU, compiles one. Run with ``-m gpu``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import graphdnn
from graphdnn import data_type

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
B, M, N, K = 2, 520, 328, 264
A_UID, B_UID, BIAS_UID, SCALE_UID, Y_UID, AMAX_UID = range(1, 7)
ARCHS = "sm_80,sm_90a"


def graph() -> graphdnn.pygraph:
    """bf16: y = gelu(scale * a @ b + bias), and the largest |y|: tensor cores, TMA, a by-value scalar, a memset."""
    bf16, f32 = data_type.BFLOAT16, data_type.FLOAT
    g = graphdnn.pygraph(io_data_type=bf16, intermediate_data_type=f32, compute_data_type=f32)
    a = g.tensor(dim=(B, M, K), layout="row", name="a", uid=A_UID)
    b = g.tensor(dim=(1, K, N), layout="row", name="b", uid=B_UID)
    bias = g.tensor(dim=(1, 1, N), layout="row", name="bias", uid=BIAS_UID)
    scale = g.tensor(dim=(1, 1, 1), layout="row", name="scale", uid=SCALE_UID, is_pass_by_value=True, data_type=f32)
    y = g.gelu(g.add(g.mul(g.matmul(a, b), scale), bias))
    y.set_output(True).set_uid(Y_UID).set_name("y").set_data_type(bf16)
    largest = g.reduction(y, graphdnn.reduction_mode.AMAX)
    largest.set_dim((1, 1, 1)).set_stride((1, 1, 1)).set_output(True).set_uid(AMAX_UID).set_name("amax").set_data_type(f32)
    return g


# The bound: eps/2 of bfloat16 for the stored result; K products and their sums in float32, whose rounding the tensor cores replace by cutting off
# (slack 4, as in test_wgmma.py); GELU's slope is below 1.13.
PROGRAM = f"""
import json, sys
import torch
from tests.blocked import block
block("numba", "numba_cuda", "llvmlite")
import graphdnn
g = graphdnn.pygraph()
g.deserialize(open(sys.argv[1], "rb").read())
torch.manual_seed(5)
a, b, bias = (torch.randn(s, device="cuda").to(torch.bfloat16) for s in (({B}, {M}, {K}), (1, {K}, {N}), (1, 1, {N})))
workspace = torch.empty(g.get_workspace_size() + 16, device="cuda", dtype=torch.uint8)
results = []
for _ in range(3):
    y = torch.full(({B}, {M}, {N}), float("nan"), device="cuda", dtype=torch.bfloat16)
    amax = torch.full((1, 1, 1), float("nan"), device="cuda")
    g.execute({{{A_UID}: a, {B_UID}: b, {BIAS_UID}: bias, {SCALE_UID}: 0.25, {Y_UID}: y, {AMAX_UID}: amax}}, workspace)
    torch.cuda.synchronize()
    results.append((y, amax))
y, amax = results[0]
equal = all(torch.equal(y, r) and torch.equal(amax, m) for r, m in results)
z = 0.25 * (a.double() @ b.double()) + bias.double()
want = z * 0.5 * (1 + torch.erf(z / 2**0.5))
rounding = 4 * 1.13 * ({K} + 4) * 2.0**-24 * (0.25 * (a.double().abs() @ b.double().abs()) + bias.double().abs())
bound = 2.0**-8 * want.abs() + rounding + 2.0**-133
worst = ((y.double() - want).abs() / bound).max().item()
top = (amax.double().item() - want.abs().max().item()) / bound.max().item()
plan = g.plan
print(json.dumps({{"worst": worst, "amax": top, "equal": equal, "arch": sorted({{k.binary.facts["arch"] for k in plan.kernels}}), "name": plan.name,
                  "origin": sorted({{k.origin for k in plan.kernels}}), "device": plan.device.name,
                  "imported": sorted({{m.partition(".")[0] for m in sys.modules}} & {{"numba", "numba_cuda", "llvmlite"}})}}))
"""


def write(path: Path) -> None:
    """Compile the graph for both architectures; needs no GPU."""
    path.write_bytes(graphdnn.compile_for(graph(), ARCHS))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("GRAPHDNN_TEST_PLAN")
    if given:
        return Path(given)
    path = tmp_path_factory.mktemp("plans") / "plan.gdnn"
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "GRAPHDNN_DEVICE": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "tests.gpu.test_aot", str(path)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return path


def test_a_plan_from_elsewhere_runs_without_a_compiler(file: Path, tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "GRAPHDNN_CACHE_DIR": str(tmp_path)}
    env.pop("GRAPHDNN_DEVICE", None)
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(file)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["arch"] == ["sm_90a"] and found["origin"] == ["file"] and found["imported"] == [] and "eng3" in found["name"], found
    assert found["equal"] and found["worst"] <= 1 and abs(found["amax"]) <= 1, found
    assert list(tmp_path.iterdir()) == [], "nothing was compiled into the cache"


if __name__ == "__main__":
    write(Path(sys.argv[1]))
