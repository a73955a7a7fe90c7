"""The tuner on a GPU that a driver written in Python stands for: what is captured, timed, chosen and given back."""

from __future__ import annotations

import gc

import pytest

import graphdnn
from graphdnn import data_type
from graphdnn.codegen.spec import Binary
from graphdnn.errors import ExecutionError
from graphdnn.plans import cache, contest
from graphdnn.targets.cuda import CudaTarget
from graphdnn.targets.cuda_timer import CapturedCalls
from tests.fake_driver import install
from tests.unit.fake_timing import FakeTiming

F32 = data_type.FLOAT


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path) -> FakeTiming:
    """Kernels are not compiled, and their results, which there are none of, are taken for right."""
    monkeypatch.setenv("GRAPHDNN_TUNING_DB", str(tmp_path / "tuning.db"))
    monkeypatch.setenv("GRAPHDNN_CACHE", "0")
    monkeypatch.setattr(cache, "memory", cache.KernelStore())
    monkeypatch.setattr(CudaTarget, "compile", lambda self, source: Binary(source.entry, source.entry.encode(), {}))
    monkeypatch.setattr(contest.Judge, "__call__", lambda self, plan: "")
    return install(monkeypatch, FakeTiming())


def graph(**settings: bool) -> graphdnn.pygraph:
    g = graphdnn.pygraph(device="cuda:0", io_data_type=F32, intermediate_data_type=F32, compute_data_type=F32, **settings)
    a, b = g.tensor(dim=(2, 64, 32), layout="row", name="a"), g.tensor(dim=(2, 32, 48), layout="row", name="b")
    g.relu(g.matmul(a, b)).set_output(True)
    g.build_operation_graph()
    g.create_execution_plans([graphdnn.heur_mode.A])
    return g


def test_the_cheapest_kernels_win_and_all_handles_are_given_back(fake: FakeTiming) -> None:
    g = graph()
    names = [[k.name for k in p.recipe.kernels] for p in g._plans]
    assert len(names) > 3
    fake.cost = {name: 20.0 for row in names for name in row}
    fake.cost[names[2][0]] = 5.0
    found = g.autotune(workers=0, iterations=3)
    assert found.chosen == 2 and found.heuristic == 0 and found.ratio == pytest.approx(0.25) and found.noise == pytest.approx(0, abs=1e-6)
    assert {r.index: round(r.seconds * 1e6) for r in found.timed} == {i: round(sum(fake.cost[n] for n in row)) for i, row in enumerate(names)}
    assert fake.calls.count("cuGraphLaunch") < found.executions, "a replay is several executions"
    gc.collect()
    assert not fake.held, "memory, streams, events and graphs are given back"
    assert graph().autotune().source == "database"


def test_buffers_rotate_and_exceed_the_cache(fake: FakeTiming) -> None:
    g = graph()
    g.build_plans()
    arena = contest.Arena(g.plan, None)
    size = sum(arena.sets[0].nbytes(t) for t in arena.sets[0].kept)
    assert len(arena.sets) == contest.MOST_SETS or len(arena.sets) * size >= 2 * g.plan.device.l2_bytes
    addresses = {s.address(t) for s in arena.sets for t in s.kept}
    assert len(addresses) == len(arena.sets) * len(arena.sets[0].kept)
    assert all((s.raw(t) == arena.sets[0].raw(t)).all() for s in arena.sets for t in s.kept)


def test_nothing_is_timed_in_a_capture(fake: FakeTiming) -> None:
    fake.captured.add(0)
    fake.calls.clear()
    with pytest.raises(ExecutionError, match="while a stream is being captured.*before the capture begins"):
        graph().autotune(workers=0)
    g = graph(benchmark=True)
    g.build_plans()
    assert g.plan.built and not [c for c in fake.calls if "Alloc" in c or "Synchronize" in c or "BeginCapture" in c]


def test_a_call_that_fails_ends_the_capture(fake: FakeTiming) -> None:
    def fails(stream: int) -> None:
        raise ExecutionError("no")

    with pytest.raises(ExecutionError, match="no"):
        CapturedCalls([fails], 0)
    assert not fake.recorded and not fake.held
    fake.fail["cuEventCreate"] = 100
    with pytest.raises(ExecutionError, match="cuEventCreate"):
        CapturedCalls([lambda stream: None], 0)
    assert not fake.held
