"""Kernel-cache objects carried as text, on every target: to another object, another process, another graph that shares kernels; and how long a
build takes that finds all of its kernels in one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphdnn
from graphdnn.codegen import render
from graphdnn.plans import cache

ROOT = Path(__file__).resolve().parents[2]
F32 = graphdnn.data_type.FLOAT


def declared(device: str, kept: Any, rows: int = 3) -> graphdnn.pygraph:
    """relu(a @ b + bias) and the largest of it."""
    g = graphdnn.pygraph(device=device, io_data_type=F32, compute_data_type=F32, intermediate_data_type=F32, kernel_cache=kept)
    a = g.tensor(dim=(2, rows, 5), layout="row", name="a", uid=1)
    b = g.tensor(dim=(2, 5, 4), layout="row", name="b", uid=2)
    bias = g.tensor(dim=(1, 1, 4), layout="row", name="bias", uid=3)
    y = g.relu(g.add(g.matmul(a, b), bias)).set_output(True).set_uid(4).set_name("y")
    top = g.reduction(y, graphdnn.reduction_mode.MAX).set_dim((1, 1, 1)).set_stride((1, 1, 1))
    top.set_output(True).set_uid(5).set_name("top")
    return g


def run(g: graphdnn.pygraph, device: str) -> list[np.ndarray]:
    """The results on fixed inputs, checked against float64."""
    rng = np.random.default_rng(6)
    a, b, bias = (rng.standard_normal(s, np.float32) for s in ((2, 3, 5), (2, 5, 4), (1, 1, 4)))
    arrays: Any = [a, b, bias, np.full((2, 3, 4), np.nan, np.float32), np.full((1, 1, 1), np.nan, np.float32)]
    workspace: Any = np.empty(g.get_workspace_size(), np.uint8)
    if device.startswith("cuda:"):
        import torch

        arrays, workspace = [torch.from_numpy(x).to(device) for x in arrays], torch.from_numpy(workspace).to(device)
    g.execute(dict(enumerate(arrays, 1)), workspace)
    y, top = (x if isinstance(x, np.ndarray) else x.cpu().numpy() for x in arrays[3:])
    want = np.maximum(a.astype(np.float64) @ b.astype(np.float64) + bias, 0)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
    assert top.item() == y.max()
    return [y, top]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel comes from elsewhere than the object: the disk is switched off, the memory of the process is empty."""
    monkeypatch.setenv("GRAPHDNN_CACHE", "0")
    monkeypatch.setattr(cache, "memory", cache.KernelStore())


def filled(device: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, graphdnn.pygraph]:
    """The text of a cache with the kernels of the graph, and the graph; the process has forgotten them."""
    kept = graphdnn.create_kernel_cache()
    g = declared(device, kept)
    g.build([graphdnn.heur_mode.A])
    monkeypatch.setattr(cache, "memory", cache.KernelStore())
    return kept.serialize(), g


def test_round_trip(device: str, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bits from the plan that compiled and from the one whose kernels came as text; nothing is compiled for it."""
    text, first = filled(device, monkeypatch)
    other = graphdnn.create_kernel_cache()
    other.deserialize(text)
    assert other.serialize() == text
    before = cache.counters.misses
    second = declared(device, other)
    second.build([graphdnn.heur_mode.A])
    assert cache.counters.misses == before and {k.origin for k in second.plan.kernels} == {"memory"}
    assert [k.binary for k in second.plan.kernels] == [k.binary for k in first.plan.kernels]
    for a, b in zip(run(first, device), run(second, device), strict=True):
        np.testing.assert_array_equal(a, b)
    third = declared(device, other, rows=7)
    third.build([graphdnn.heur_mode.A])
    assert len(json.loads(other.serialize())["kernels"]) > len(json.loads(text)["kernels"]), "what it lacked is in it now"


PROGRAM = """
import json, sys
import graphdnn
from graphdnn.plans import cache
from tests.unit.test_kernel_cache import declared
kept = graphdnn.create_kernel_cache()
kept.deserialize(open(sys.argv[1]).read())
g = declared(sys.argv[2], kept)
loaded = {"numba", "jinja2"} & set(sys.modules)
g.build([graphdnn.heur_mode.A])
print(json.dumps([cache.counters.misses, sorted({k.origin for k in g.plan.kernels}), sorted(({"numba", "jinja2"} & set(sys.modules)) - loaded)]))
"""


def test_in_another_process(device: str, alone: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process with neither disk cache nor compiled kernels builds from the text, without importing a compiler."""
    path = tmp_path / "kernels.json"
    path.write_text(filled(device, monkeypatch)[0])
    env = os.environ | {"GRAPHDNN_CACHE": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(path), device], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0, ["memory"], []]


@pytest.mark.parametrize("place", ["cpu", "sm_90"])
def test_a_build_with_it_prints_and_compiles_nothing(place: str, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes it quick; docs/ahead_of_time.md has the time."""
    text, _ = filled(place, monkeypatch)
    other = graphdnn.create_kernel_cache()
    other.deserialize(text)
    printed: list[str] = []
    monkeypatch.setattr(render, "render", lambda spec: printed.append(spec.name))
    before = cache.counters.misses
    declared(place, other).build([graphdnn.heur_mode.A])
    assert cache.counters.misses == before and printed == []



def wide(kept: Any, m: int, n: int, k: int) -> graphdnn.pygraph:
    """gelu(a @ b) in BFLOAT16, which tensor cores multiply."""
    kinds = {"io_data_type": graphdnn.data_type.BFLOAT16, "compute_data_type": F32, "intermediate_data_type": F32}
    g = graphdnn.pygraph(device="sm_90", kernel_cache=kept, **kinds)
    a, b = (g.tensor(dim=dim, layout="row", name=name) for name, dim in (("a", (1, m, k)), ("b", (1, k, n))))
    g.gelu(g.matmul(a, b)).set_output(True).set_name("y")
    g.build([graphdnn.heur_mode.A])
    return g


def test_tensor_core_kernels_of_other_sizes_come_from_the_text(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes were seen, the text tells another object what they have in common, and a third size compiles nothing."""
    kept = graphdnn.create_kernel_cache()
    first = wide(kept, 4096, 1024, 512)
    assert "wgmma" in first.plan.kernels[0].source
    wide(kept, 8192, 4096, 2048)
    monkeypatch.setattr(cache, "memory", cache.KernelStore())
    again = graphdnn.create_kernel_cache()
    again.deserialize(kept.serialize())
    before = cache.counters.misses
    third = wide(again, 8192, 8192, 8192)
    assert cache.counters.misses == before and "wgmma" in third.plan.kernels[0].source
    assert third.plan.recipe.steps != first.plan.recipe.steps, "its own numbers are arguments"


def test_threads_that_build_other_sizes_with_one_object(alone: None) -> None:
    """Each gets what it would get alone; afterwards a size that nobody had compiles nothing."""
    kept = graphdnn.create_kernel_cache()

    def relu(rows: int) -> None:
        g = graphdnn.pygraph(device="cpu", io_data_type=F32, compute_data_type=F32, intermediate_data_type=F32, kernel_cache=kept)
        x = g.tensor(dim=(rows, 24), stride=(25, 1), name="x")
        g.relu(x).set_output(True).set_name("y").set_dim((rows, 24)).set_stride((24, 1))
        g.build([graphdnn.heur_mode.A])
        given = np.random.default_rng(rows).standard_normal((rows, 25), np.float32)
        out = np.full((rows, 24), np.nan, np.float32)
        g.execute({"x": given[:, :24], "y": out}, None)
        np.testing.assert_array_equal(out, np.maximum(given[:, :24], 0))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(relu, (5, 7, 64, 33, 100, 1, 2, 999, 16, 31, 0, 8)))
    before = cache.counters.misses
    relu(77)
    assert cache.counters.misses == before
