"""``graphdnn bench`` without a GPU: what it computes, the table, the errors. The timing itself runs on a GPU only."""

from __future__ import annotations

import pytest

import graphdnn
from graphdnn import bench, cli
from graphdnn.errors import ExecutionError, GraphError


def test_floors_are_those_of_the_performance_page():
    floors = {s: bench.Case(s, False).floor_us for s in bench.SHAPES}
    assert [round(floors[s], 1) for s in bench.SHAPES] == [10.9, 1391.8, 174.0, 43.5, 8.3]
    assert bench.Case((16, 512, 512, 1024), True).name == "16 x 512 x 512 x 1024 +amax"


@pytest.mark.parametrize("amax", [True, False])
def test_the_graph_is_one_kernel_on_the_tensor_cores(amax):
    torch = pytest.importorskip("torch")
    data = {n: torch.empty(s, dtype=torch.bfloat16) for n, s in (("A", (2, 256, 512)), ("B", (2, 512, 256)), ("bias", (1, 1, 256)))}
    g = graphdnn.pygraph(
        io_data_type=graphdnn.data_type.BFLOAT16,
        intermediate_data_type=graphdnn.data_type.FLOAT,
        compute_data_type=graphdnn.data_type.FLOAT,
        device="sm_90",
    )
    bench._declare(graphdnn, g, data, amax)
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([graphdnn.heur_mode.A])
    assert g.get_plan_name_at_index(0).startswith("r0:eng3") and "|" not in g.get_plan_name_at_index(0)


def test_the_table_compares_with_ours():
    def result(name: str, us: float, error: float, fused: bool = True) -> bench.Result:
        return bench.Result("1 x 2 x 3 x 4", name, fused, us, us, 1.0, 5.0, error, error <= bench.TOLERANCE, 0.5)

    rows = [result("graphdnn", 10.0, 1e-3), result("cudnn", 12.0, float("nan")), result("torch.bmm alone", 8.0, 0.0, False)]
    head, ours, cudnn, bare = bench._lines(rows)
    assert "floor 1.0 us" in head and "1.00 x" in ours and "error 1.0e-03" in ours and "WRONG" not in ours
    assert "1.20 x" in cudnn and "WRONG" in cudnn and "error" not in bare


def test_shapes_on_the_command_line():
    assert bench.parse_shape("16x512X512x1024") == (16, 512, 512, 1024)
    for text in ("16x512x512", "axbxcxd", "0x1x1x1", "1x2x3x-4"):
        with pytest.raises(GraphError, match="not a matmul shape"):
            bench.parse_shape(text)


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ExecutionError, match="needs a GPU"):
        bench.matmul()
    assert cli.main(["bench", "matmul"]) == 1 and "needs a GPU" in capsys.readouterr().err
