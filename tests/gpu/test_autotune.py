"""The tuner on a real GPU: a convolution, a matmul, a normalization, planted faults. Run with ``-m gpu -s`` to see the tables."""

from __future__ import annotations

from typing import Any

import pytest

import graphdnn
from graphdnn import data_type, heur_mode, norm_forward_phase
from graphdnn.plans import autotune, tuning

pytestmark = pytest.mark.gpu

F32, BF16 = data_type.FLOAT, data_type.BFLOAT16
TYPES = {"io_data_type": BF16, "intermediate_data_type": F32, "compute_data_type": F32, "device": "cuda:0"}


def convolution() -> Any:
    """relu(conv(x, w)), channels last, 3 x 3."""
    g = graphdnn.pygraph(**TYPES)
    x = g.tensor(dim=(8, 64, 28, 28), layout="channels_last", name="x")
    w = g.tensor(dim=(64, 64, 3, 3), layout="channels_last", name="w")
    y = g.relu(g.conv_fprop(image=x, weight=w, padding=[1, 1], stride=[1, 1], dilation=[1, 1])).set_output(True)
    y.set_data_type(BF16)
    return g


def matmul() -> Any:
    """gelu(a @ b + bias)."""
    g = graphdnn.pygraph(**TYPES)
    a, b = g.tensor(dim=(1, 2048, 1024), layout="row", name="a"), g.tensor(dim=(1, 1024, 2048), layout="row", name="b")
    bias = g.tensor(dim=(1, 1, 2048), layout="row", name="bias")
    g.gelu(g.bias(g.matmul(a, b), bias)).set_output(True).set_data_type(BF16)
    return g


def norm() -> Any:
    """layernorm(x)."""
    g = graphdnn.pygraph(**TYPES)
    x = g.tensor(dim=(4096, 2048, 1, 1), layout="row", name="x")
    scale, bias = (g.tensor(dim=(1, 2048, 1, 1), layout="row", name=n, data_type=F32) for n in ("scale", "bias"))
    y, _, _ = g.layernorm(norm_forward_phase.INFERENCE, x, scale, bias, 1e-5)
    y.set_output(True).set_data_type(BF16)
    return g


@pytest.fixture
def database(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> tuning.Database:
    monkeypatch.setenv("GRAPHDNN_TUNING_DB", str(tmp_path / "tuning.db"))
    return tuning.Database(tmp_path / "tuning.db")


@pytest.mark.parametrize("build", [convolution, matmul, norm])
def test_the_chosen_plan_is_not_slower_and_is_remembered(build: Any, database: tuning.Database) -> None:
    g = build()
    found = g.autotune(candidates=12, iterations=15)
    print(f"\n{build.__name__}: {found}")
    assert found.source == "measured" and found.stored, found.problem
    assert g.plan is g._plans.plan_at(found.chosen) and len(found.timed) >= 1
    if found.chosen != found.heuristic:
        assert found.ratio <= 1 - max(found.noise, autotune.LEAST_GAIN)
    assert not [r for r in found.dropped if "wrong result" in r.why or "died" in r.why], "every candidate is right"
    again = build()
    again.build_operation_graph()
    again.create_execution_plans([heur_mode.B])
    assert again.get_plan_name_at_index(0) == g.plan.name
    second = build().autotune(candidates=12)
    assert second.source == "database" and second.executions == 0 and second.chosen == found.chosen


def test_a_pack_of_torch_tensors_is_only_read(database: tuning.Database) -> None:
    import torch

    g = matmul()
    g.build_operation_graph()
    uids = {t.name: t.uid for t in g._opgraph.tensors}
    torch.manual_seed(0)
    a, b, bias = (torch.randn(s, device="cuda").to(torch.bfloat16) for s in ((1, 2048, 1024), (1, 1024, 2048), (1, 1, 2048)))
    y = torch.full((1, 2048, 2048), 7.0, device="cuda", dtype=torch.bfloat16)
    output = next(g._opgraph.tensors[t].uid for t in g._opgraph.outputs)
    pack = {uids["a"]: a, uids["b"]: b, uids["bias"]: bias, output: y}
    found = g.autotune(pack, candidates=4, iterations=5, workers=2)
    print(f"\nwith a pack: {found}")
    assert bool((y == 7).all()), "nothing of the pack is written"
    g.execute(pack, torch.empty(max(g.get_workspace_size(), 1), device="cuda", dtype=torch.uint8))
    torch.cuda.synchronize()
    wanted = torch.nn.functional.gelu(a.float() @ b.float() + bias.float())
    assert float((y.float() - wanted).norm() / wanted.norm()) < 6e-3


def test_faulty_candidates_are_dropped_and_the_context_stays_whole(database: tuning.Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong one, one that reads and writes where nothing is (in a worker's context, not in this one), and one that ends its worker."""
    import torch

    from graphdnn.engines import ENGINES
    from tests.unit import planted

    monkeypatch.setattr("graphdnn.engines.ENGINES", (planted.Wrong(), planted.Crashing(), planted.Dying(), *ENGINES))
    g = graphdnn.pygraph(io_data_type=F32, intermediate_data_type=F32, compute_data_type=F32, device="cuda:0")
    x, b = g.tensor(dim=(2, 3000, 5), layout="row", name="x"), g.tensor(dim=(1, 3000, 1), layout="row", name="b")
    y = g.relu(g.add(x, b)).set_output(True)
    found = g.autotune(workers=2, iterations=3)
    print(f"\nplanted: {found}")
    why = {r.engines[0]: r.why for r in found.dropped}
    assert "wrong result" in why["planted_wrong"] and "ILLEGAL_ADDRESS" in why["planted_crashing"] and "exit status 3" in why["planted_dying"]
    assert {r.engines[0] for r in found.timed} == {"pointwise"}
    data, bias = torch.randn(2, 3000, 5, device="cuda"), torch.randn(1, 3000, 1, device="cuda")
    out = torch.full_like(data, float("nan"))
    g.execute({x: data, b: bias, y: out}, None)
    assert torch.equal(out, torch.relu(data + bias))
