"""The tensor-core matmul on an H100 or H200: conformance, a fuzz with the engine forced, streams, CUDA graphs, unaligned buffers.

Run with ``-m gpu -n auto``: most of the time goes into compiling. GRAPHDNN_FUZZ (default 500) is the number of fuzzed problems.
For compute-sanitizer: ``compute-sanitizer --tool memcheck python -m pytest -m gpu tests/gpu/test_wgmma.py -k sanitized``.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

import graphdnn
from graphdnn import device
from graphdnn.dtypes import data_type
from graphdnn.engines.matmul_wgmma import TILES
from tests.helpers import Data
from tests.wgmma_problems import Problem, build, bytes_of, check, random_problem

D = data_type
pytestmark = pytest.mark.gpu
GPU = "cuda:0"
SLACK = 4.0
"""Tensor cores cut off what does not fit beside the largest term, where the derived bounds assume rounding to nearest after every addition."""
FUZZ = int(os.environ.get("GRAPHDNN_FUZZ", "500"))
PARTS = 25
"""Tests that the fuzzed problems are shared out to, so that several processes work on them."""


@pytest.fixture(autouse=True, scope="module")
def hopper():
    if device.cuda(0).arch != "sm_90a":
        pytest.fail("these tests need a GPU of compute capability 9.0")


TRAINING = Problem(300, 520, 328, (3,), (3,), epilogue=("scale", "bias", "second", "gelu", "amax"))
CASES = {
    "training": TRAINING,
    "half": replace(TRAINING, dtype=D.HALF, result=D.HALF),
    "one": Problem(1, 1, 1, result=D.FLOAT),
    "row of one": Problem(1, 4096, 512, result=D.FLOAT, epilogue=("bias",)),
    "column of one": Problem(4096, 1, 512, result=D.FLOAT),
    "odd": Problem(257, 129, 65, (2,), (1,), result=D.FLOAT, epilogue=("row scale", "residual")),
    "deep": Problem(128, 256, 8192, result=D.FLOAT),
    "many tiles": Problem(2100, 1300, 200, epilogue=("bias", "relu", "amax")),
    "results along rows": replace(TRAINING, out="column"),
    "sums": Problem(500, 700, 256, (2,), (2,), epilogue=("gelu", "row sums", "column sums", "batch column sums", "amax")),
    "fp8 results": Problem(256, 256, 128, result=D.FP8_E4M3, epilogue=("scale", "amax")),
    "two broadcast batches": Problem(64, 72, 40, (4, 1), (1, 5), result=D.FLOAT),
}


LAYOUTS = {f"a {a}, b {b}": replace(TRAINING, a=a, b=b, pad=8) for a in ("row", "column") for b in ("row", "column")}


@pytest.mark.parametrize("tile", TILES, ids=repr)
@pytest.mark.parametrize("name", CASES)
def test_conformance(name, tile):
    check(CASES[name], GPU, repr(tile), slack=SLACK)


@pytest.mark.parametrize("tile", TILES, ids=repr)
@pytest.mark.parametrize("name", LAYOUTS)
def test_both_orders_of_both_inputs(name, tile):
    check(LAYOUTS[name], GPU, repr(tile), slack=SLACK)


def test_infinities_and_nan():
    special = Data("special", -2.0, 2.0)
    check(Problem(200, 136, 72, epilogue=("relu", "amax")), GPU, slack=SLACK, data={"a": special})


# -------------------------------------------------------------------------------------------------------------------------------------------- fuzz
def fuzzed(count: int) -> list[tuple[Problem, str]]:
    """Problems with the tile shape that each is run with."""
    rng = np.random.default_rng(20261129)
    found: list[tuple[Problem, str]] = []
    while len(found) < count:
        p = random_problem(rng, 500)
        if bytes_of(p) < 64 << 20:
            found.append((p, repr(TILES[rng.integers(len(TILES))])))
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_fuzz(part):
    failures = []
    for seed, (problem, tile) in list(enumerate(fuzzed(FUZZ)))[part::PARTS]:
        try:
            check(problem, GPU, tile, seed=seed, slack=SLACK)
        except AssertionError as error:
            failures.append(f"seed {seed}: {error}")
    assert not failures, f"{len(failures)} problems are wrong:\n" + "\n".join(failures[:10])


@pytest.mark.parametrize("seed", range(6))
def test_sanitized_sample(seed):
    problem, tile = fuzzed(6)[seed]
    check(problem, GPU, tile, seed=seed, runs=1, slack=SLACK)


# --------------------------------------------------------------------------------------------------------------------- streams, graphs, alignment
class Loaded:
    """A training matmul in torch: ``run`` executes it on the current stream."""

    def __init__(self, problem: Problem = TRAINING, shift: int = 0) -> None:
        import torch

        self.torch, self.problem = torch, problem
        g = self.graph = graphdnn.pygraph(device=GPU, intermediate_data_type=D.FLOAT, compute_data_type=D.FLOAT)
        build(g, problem)
        g.build([graphdnn.heur_mode.A])
        og = g._opgraph
        self.tensors = {}
        generator = torch.Generator("cuda").manual_seed(3)
        for i in (*og.inputs, *og.outputs):
            t = og.tensors[i]
            if t.by_value:
                continue
            kind = {D.BFLOAT16: torch.bfloat16, D.HALF: torch.float16, D.FLOAT: torch.float32}[t.dtype]
            flat = torch.randn(t.extent + 64, device="cuda", generator=generator).to(kind)
            self.tensors[t.uid] = flat[shift:].as_strided(t.dim, t.stride)
        self.outputs = {og.tensors[i].uid: og.tensors[i].name for i in og.outputs}
        self.scale = next(t.uid for t in og.tensors if t.name == "scale")
        self.workspace = torch.empty(g.get_workspace_size() + 16, device="cuda", dtype=torch.uint8)

    def run(self, workspace=None) -> None:
        self.graph.execute(self.tensors | {self.scale: 0.37}, self.workspace if workspace is None else workspace)

    def results(self):
        self.torch.cuda.synchronize()
        return {name: self.tensors[uid].float().clone() for uid, name in self.outputs.items()}


def test_the_engine_is_chosen():
    assert "eng3" in Loaded().graph.get_plan_name_at_index(0)


def test_cuda_graph_replays_and_streams_agree():
    import torch

    case = Loaded()
    case.run()
    first = case.results()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        case.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            case.run()
    for uid in case.outputs:
        case.tensors[uid].fill_(float("nan"))
    for _ in range(3):
        graph.replay()
    assert all(torch.equal(first[n], r) for n, r in case.results().items())
    # two streams, each with its own outputs and workspace, one plan
    streams, sets = [torch.cuda.Stream() for _ in range(2)], []
    for s in streams:
        outputs = {uid: torch.full_like(case.tensors[uid], float("nan")) for uid in case.outputs}
        sets.append((s, outputs, torch.empty_like(case.workspace)))
    torch.cuda.synchronize()
    for _ in range(20):
        for s, outputs, workspace in sets:
            with torch.cuda.stream(s):
                case.graph.execute(case.tensors | outputs | {case.scale: 0.37}, workspace)
    torch.cuda.synchronize()
    for _, outputs, _ in sets:
        assert all(torch.equal(first[case.outputs[uid]], t.float()) for uid, t in outputs.items())


def test_addresses_may_change_between_calls():
    import torch

    case = Loaded()
    case.run()
    first = case.results()
    for _ in range(3):
        moved = {uid: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda").copy_(t) for uid, t in case.tensors.items()}
        case.graph.execute(moved | {case.scale: 0.37}, case.workspace)
        torch.cuda.synchronize()
        assert all(torch.equal(first[n], moved[uid].float()) for uid, n in case.outputs.items())


def test_unaligned_buffers_are_never_a_fault():
    """A view that begins 2 bytes past a multiple of 16: another kernel serves it, or a typed error says what to do."""
    import torch

    aligned, shifted = Loaded(), Loaded(shift=1)
    for uid, t in shifted.tensors.items():
        t.copy_(aligned.tensors[uid])
    aligned.run()
    room = torch.empty(shifted.graph.get_workspace_size() + (1 << 20), device="cuda", dtype=torch.uint8)
    try:
        shifted.run(room)
    except graphdnn.GraphError as error:
        assert "align" in str(error)
        return
    expected, got = aligned.results(), shifted.results()
    for name in expected:
        scale = expected[name].abs().max()
        assert float((expected[name] - got[name]).abs().max() / scale) < 2e-2, name
