"""Two GPUs of one architecture: a plan follows its tensors, executors, CUDA graphs, pipelines and the tuner on the second one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphdnn
from graphdnn import _libcuda
from graphdnn.targets.cuda_driver import activated, primary_context
from tests import hammer
from tests.hammer import NAN, A, Values, built, place, values, workspace

FIRST, SECOND = "cuda:0", "cuda:1"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")]
kinds = pytest.mark.parametrize("kind", hammer.KINDS)


def pack(g: Any, given: Values, device: str) -> dict[int, Any]:
    """The inputs with outputs of NaN."""
    return given.given | {uid: place(g, uid, device).fill_(NAN) for uid in given.wanted}


def right(given: dict[int, Any], expected: Values, device: str) -> bool:
    torch.cuda.synchronize(device)
    return all(torch.equal(given[uid], wanted) for uid, wanted in expected.wanted.items())


@kinds
def test_a_plan_follows_its_tensors(kind: str) -> None:
    """To and fro, while the first GPU is torch's current one; bound, and on a stream of the second GPU."""
    g = built(kind, FIRST)
    for number, device in enumerate((SECOND, FIRST, SECOND)):
        expected = values(g, kind, device, number)
        given = pack(g, expected, device)
        torch.cuda.synchronize(device)
        g.execute(given, workspace(g, device))
        assert right(given, expected, device), device
    expected, room = values(g, kind, SECOND, 7), workspace(g, SECOND)
    given = pack(g, expected, SECOND)
    torch.cuda.synchronize(SECOND)
    with torch.cuda.stream(torch.cuda.Stream(SECOND)):
        run = g.bind(given, room)
        run()
    assert run.plan.device.text == SECOND and right(given, expected, SECOND)


@kinds
def test_threads_on_both_gpus_execute_one_plan(kind: str) -> None:
    g = built(kind, FIRST)
    assert not hammer.hammer(g, kind, [FIRST, SECOND] * 3, 500)


def test_tensors_of_two_gpus_are_refused() -> None:
    g = built("matmul", FIRST)
    here, there = (pack(g, values(g, "matmul", d, 1), d) for d in (FIRST, SECOND))
    for mixed in (here | {A: there[A]}, there | {A: here[A]}):
        for device in (FIRST, SECOND):
            with pytest.raises(graphdnn.ValidationError, match="wrong device"):
                g.execute(mixed, workspace(g, device))
    with pytest.raises(graphdnn.ValidationError, match="wrong device"):
        g.execute(here, workspace(g, SECOND))
    with pytest.raises(graphdnn.ValidationError, match="wrong device"):
        g.execute(there, workspace(g, FIRST))


def test_a_handle_and_a_graph_of_the_second_gpu() -> None:
    handle, stream = graphdnn.create_handle(SECOND), torch.cuda.Stream(SECOND)
    graphdnn.set_stream(handle, stream.cuda_stream)
    g = graphdnn.pygraph(handle=handle, io_data_type=hammer.F32, intermediate_data_type=hammer.F32, compute_data_type=hammer.F32)
    a, b, s = hammer.inputs(g, (2, 65, 64), (2, 65, 64))
    g.relu(g.mul(g.add(a, b), s)).set_output(True).set_uid(hammer.Y)
    g.build([graphdnn.heur_mode.A])
    expected = values(g, "pointwise", SECOND, 3)
    given = pack(g, expected, SECOND)
    torch.cuda.synchronize(SECOND)
    g.execute(given, workspace(g, SECOND), handle)
    stream.synchronize()
    assert g.plan.device.text == SECOND and right(given, expected, SECOND)
    with pytest.raises(graphdnn.ExecutionError, match="another device"):
        built("pointwise", FIRST).execute(given, None, handle)
    graphdnn.destroy_handle(handle)


def test_cuda_graphs_on_the_second_gpu() -> None:
    """Captured by torch, which is refused before the plan is loaded there; and as nodes of a raw graph."""
    g = built("matmul", FIRST)
    expected, room = [values(g, "matmul", SECOND, n) for n in (1, 2)], workspace(g, SECOND)
    given = pack(g, expected[0], SECOND)
    stream = torch.cuda.Stream(SECOND)
    with torch.cuda.device(SECOND):
        torch.cuda.synchronize()
        early = torch.cuda.CUDAGraph()
        with torch.cuda.graph(early, stream=stream), pytest.raises(graphdnn.ExecutionError, match="not loaded on cuda:1 yet"):
            g.execute(given, room)
        g.execute(given, room)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            g.execute(given, room)
        for uid in expected[0].wanted:
            given[uid].fill_(NAN)
        captured.replay()
        assert right(given, expected[0], SECOND)
    other, driver = pack(g, expected[1], SECOND), _libcuda.driver()
    torch.cuda.synchronize(SECOND)
    with activated(primary_context(1)):
        raw = driver.handle("cuGraphCreate", 0)
        g.populate_cuda_graph(None, given, room, raw)
        g.update_cuda_graph(None, other, room, raw)
        ready = driver.handle("cuGraphInstantiateWithFlags", raw, 0)
        driver.call("cuGraphLaunch", ready, stream.cuda_stream)
        stream.synchronize()
        driver.call("cuGraphExecDestroy", ready)
        driver.call("cuGraphDestroy", raw)
    assert right(other, expected[1], SECOND)


def two_stages(device: str) -> Any:
    """relu((a + b) * s), and the sum of what comes of it."""
    first, second = hammer.graph(device), hammer.graph(device)
    a, b, s = hammer.inputs(first, (2, 65, 64), (2, 65, 64))
    first.relu(first.mul(first.add(a, b), s)).set_output(True).set_name("h")
    h = second.tensor(dim=(2, 65, 64), layout="row", name="h")
    second.reduction(h, graphdnn.reduction_mode.ADD).set_dim((1, 1, 1)).set_output(True).set_name("y")
    pipeline = graphdnn.Pipeline("two")
    for g in (first, second):
        g.build([graphdnn.heur_mode.A])
        pipeline.add(g)
    return pipeline.build()


def test_a_pipeline_on_the_second_gpu() -> None:
    """Executed and replayed; one that was built for the first GPU says so, and its file runs on the second one."""
    made = two_stages(SECOND)
    numbers = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-2, 3, (2, 65, 64), generator=numbers).float().to(SECOND) for _ in range(2))
    y = torch.full((1, 1, 1), NAN, device=SECOND)
    given = {"a": a, "b": b, "s": 0.5, "y": y}

    def total() -> float:
        return float(((a + b) * 0.5).relu().double().sum())

    torch.cuda.synchronize(SECOND)
    elsewhere = two_stages(FIRST)
    for pipeline in (made, graphdnn.Pipeline.deserialize(elsewhere.serialize(), device=SECOND)):
        room = torch.empty(max(pipeline.workspace_bytes, 1), dtype=torch.uint8, device=SECOND)
        pipeline.execute(given, room)
        torch.cuda.synchronize(SECOND)
        assert y.item() == total()
        pipeline.capture(given, room)
        a.neg_()
        b.neg_()
        y.fill_(NAN)
        torch.cuda.synchronize(SECOND)
        pipeline.replay()
        torch.cuda.synchronize(SECOND)
        assert y.item() == total()
        a.neg_()
        b.neg_()
    with pytest.raises(graphdnn.ValidationError, match="wrong device"):
        elsewhere.execute(given, torch.empty(elsewhere.workspace_bytes, dtype=torch.uint8, device=SECOND))


def test_the_tuner_on_the_second_gpu(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHDNN_TUNING_DB", str(tmp_path / "tuning.db"))
    g = hammer.matmul(SECOND)
    found = g.autotune(candidates=3, iterations=3, workers=3)
    assert found.source == "measured" and found.stored, found.problem
    assert not [r for r in found.dropped if "wrong result" in r.why or "died" in r.why]
    expected = values(g, "matmul", SECOND, 5)
    given = pack(g, expected, SECOND)
    torch.cuda.synchronize(SECOND)
    g.execute(given, workspace(g, SECOND))
    assert right(given, expected, SECOND)
