"""Every example runs, is short, and prints what it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: str) -> str:
    """Standard output of an example, run as a user would."""
    program = str(next(EXAMPLES.glob(f"{name}_*.py")))
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, program, *arguments], capture_output=True, text=True, env=env, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_readme(tmp_path: Path) -> None:
    """The Python of the README runs as it stands, and its second command is the one that CI calls."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    python = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    result = subprocess.run(
        [sys.executable, "-c", python[0]], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "graph.svg").exists() and "def " in result.stdout
    first, second = re.findall(r"```bash\n(.*?)\n```", text, re.DOTALL)[:2]
    assert first.endswith("examples/01_fp8_training_epilogue.py")
    assert second.split("python ")[1] in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["executing", "getting_started", "fusion", "attention", "ahead_of_time", "cuda_graphs_and_pipelines"])
def test_page(page: str, tmp_path: Path) -> None:
    """The Python of a page, from top to bottom, runs as it stands."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    program = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, f"no {pattern!r} in:\n{text}"
    return float(found[1])


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.stem)
def test_short(path: Path) -> None:
    """A whole block with its gradients may be longer."""
    assert len(path.read_text(encoding="utf-8").splitlines()) < (120 if "block" in path.stem else 80)


COMPILED = """
import runpy, sys
example = runpy.run_path(sys.argv[1])
example["build"]()
import graphdnn
print(graphdnn.stats().compilations, "numba" in sys.modules)
"""


def build_in_a_new_process(cache: Path) -> tuple[int, bool]:
    """Compilations of the build of example 01, and whether numba was imported."""
    program = str(EXAMPLES / "01_fp8_training_epilogue.py")
    env = os.environ | {"PYTHONPATH": str(ROOT), "GRAPHDNN_CACHE_DIR": str(cache)}
    result = subprocess.run([sys.executable, "-c", COMPILED, program], capture_output=True, text=True, env=env, timeout=300)
    assert result.returncode == 0, result.stderr
    count, numba = result.stdout.split()
    return int(count), numba == "True"


def kernels(graph: str, text: str) -> int:
    """Kernels of a graph of a block, whose fusion saves at least half of the traffic."""
    found = re.search(rf"^{graph} +(\d+) kernels \((\d+) with one per operation\), (\S+) MiB of memory traffic \((\S+)\)$", text, re.MULTILINE)
    assert found, f"no graph {graph} in:\n{text}"
    assert float(found[3]) < 0.5 * float(found[4])
    return int(found[1])


def test_resnet_bottleneck() -> None:
    """The example itself compares every gradient with torch."""
    out = run("06")
    assert kernels("inference", out) == 3
    assert kernels("training", out) == 6
    assert kernels("backward", out) <= 9
    for name in ("y", "dx", "dw0", "dscale0", "dbias2"):
        assert number(rf"  {name} +error (\S+) of", out) < 1e-5


def test_gpt2_block() -> None:
    """Attention reads its parts of the packed matrix where they are: norm, product, attention, product, norm, two products."""
    out = run("07")
    assert kernels("forward", out) == 7
    assert kernels("backward", out) <= 11
    for name in ("y", "dx", "dw_qkv", "db_down", "dscale0"):
        assert number(rf"  {name} +error (\S+) of", out) < 1e-5


@pytest.mark.slow
def test_llama_block() -> None:
    out = run("08")
    assert kernels("forward", out) <= 12
    assert kernels("backward", out) <= 16
    for name in ("y", "dx", "dw_k", "dw_gate", "dscale1"):
        assert number(rf"  {name} +error (\S+) of", out) < 1e-5


def test_fp8_training_epilogue() -> None:
    out = run("01")
    assert number(r"kernels +(\d+) ", out) == 1
    assert number(r"(\d+)% less than unfused", out) > 50
    assert number(r"y: (\S+),", out) < 1e-5 and number(r"amax: (\S+) ", out) < 1e-5
    assert number(r"first build +(\S+) s, cold", out) and number(r"second process +(\S+) s", out)
    assert "numba not imported" in out


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    """It takes the kernels from the disk cache, and needs no numba. (The example prints what that saves.)"""
    assert build_in_a_new_process(tmp_path) == (2, True), "its kernel, and the one that combines partial results"
    assert build_in_a_new_process(tmp_path) == (0, False)


def test_from_cudnn_script() -> None:
    out = run("02")
    for label in ("numpy fp32", "torch fp32", "numpy bf16", "torch bf16", "numpy fp16", "torch fp16"):
        assert f"{label}  plan 0: error" in out
    text = (EXAMPLES / "02_from_cudnn_script.py").read_text(encoding="utf-8")
    assert re.findall(r"^ *(?:import|from) graphdnn.*", text, re.MULTILINE) == ["import graphdnn as cudnn"]


def test_explain_and_draw(tmp_path: Path) -> None:
    out = run("03", str(tmp_path))
    svg = (tmp_path / "attention.svg").read_text(encoding="utf-8")
    assert svg.lstrip().startswith(("<svg", "<?xml")) and "normalize" in svg and "row_max" in svg
    assert "cuts\n" in out and "weigh" in out


def test_compile_for_hopper(tmp_path: Path) -> None:
    out = run("04", str(tmp_path / "plan"))
    assert "PTX: target sm_90a" in out
    assert ", 0 bytes spilled" in out
    assert "0 on local memory, 0 in double precision" in out
    assert number(r"SASS: (\d+) instructions", out) > 10
    assert (tmp_path / "plan").stat().st_size > 1000


def test_serialize_and_reload() -> None:
    out = run("05")
    assert "by process 2, numba not imported" in out
    assert number(r"error against float64 (\S+)", out) < 1e-6


def test_compile_ahead() -> None:
    out = run("09")
    assert "process 2, which cannot import numba" in out and number(r"error against float64 (\S+)", out) < 1e-4
    assert "3 plans" in out and "for sm_90a (NVIDIA H200" in out and "registers" in out


def test_conv_algorithms() -> None:
    out = run("conv")
    rows = {line[:24].strip(): line for line in out.splitlines()}
    error = {name: number(r" (\d\.\de-\d\d) ", rows[name] + " ") for name in rows if name != "algorithm"}
    assert error["tiles in registers"] < 1e-4 and error["Winograd F(2x2, 3x3)"] < error["Winograd F(4x4, 3x3)"] < 1e-3
    assert "WINOGRAD_TILE_6x6" in rows["Winograd F(4x4, 3x3)"] and rows["FFT of 16 x 16 tiles"].endswith("FFT")
    assert rows["heuristic, plain sums"].endswith("-")


def test_pipeline() -> None:
    out = run("10")
    assert number(r"(\d+) bytes of workspace", out) < number(r"\((\d+) if nothing shared memory", out)
    assert number(r"torch in float64: (\S+)", out) < 1e-4


def test_autotune() -> None:
    out = run("11")
    assert number(r"error            (\S+)", out) < 1e-3 and number(r"gain             (\S+)", out) >= 1
    chosen = re.search(r"^\* .*  (r0:\S+): ", out, re.MULTILINE)
    assert chosen and f"database: plan {chosen[1]}, 0 timed executions" in out
    assert f"heur_mode.B      plan {chosen[1]}\n" in out and f"benchmark=True   plan {chosen[1]}\n" in out
