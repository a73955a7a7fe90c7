"""``graphdnn bench``: what it computes, the tables, the errors; no test looks at a time. ``bench matmul`` itself runs on a GPU only."""

from __future__ import annotations

import itertools
import json

import pytest

import graphdnn
from graphdnn import cli
from graphdnn.bench import common, cpu, cpu_cases, host, host_start
from graphdnn.bench import matmul as bench
from graphdnn.errors import ExecutionError, GraphError


def test_floors_are_those_of_the_performance_page():
    floors = {s: bench.Case(s, False).floor_us for s in bench.SHAPES}
    assert [round(floors[s], 1) for s in bench.SHAPES] == [10.9, 1391.8, 174.0, 43.5, 8.3]
    assert bench.Case((16, 512, 512, 1024), True).name == "16 x 512 x 512 x 1024 +amax"


@pytest.mark.parametrize("amax", [True, False])
def test_the_graph_is_one_kernel_on_the_tensor_cores(amax):
    import torch
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
    import torch
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ExecutionError, match="needs a GPU"):
        bench.run()
    assert cli.main(["bench", "matmul"]) == 1 and "needs a GPU" in capsys.readouterr().err


def test_contenders_take_turns_and_the_first_round_does_not_count():
    order = itertools.count()
    first, second = common.take_turns([lambda: float(next(order)), lambda: float(next(order))], 3)
    assert (first, second) == ([2.0, 4.0, 6.0], [3.0, 5.0, 7.0])


def test_a_sample_is_the_mean_of_calls_that_fill_it():
    now, calls = [0.0], []

    def call() -> None:
        calls.append(now[0])
        now[0] += cpu.SAMPLE_SECONDS / 4

    sample = cpu.timer(call, lambda: now[0])
    before = len(calls)
    assert sample() == pytest.approx(1e6 * cpu.SAMPLE_SECONDS / 4) and len(calls) - before == 1 + 4


QUICK = ("add_relu_bf16", "rmsnorm", "softmax", "moe")
"""Cases of the default run; the others take seconds to compile, and what they compile has its own tests."""


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name, marks=() if c.name in QUICK else pytest.mark.slow) for c in cpu_cases.CASES])
def test_a_case_of_the_cpu_is_what_torch_computes(case):
    import torch
    made = cpu.prepare(torch, case, case.small)
    with torch.no_grad():
        found, other, right = cpu.errors(made)
    assert right, f"error {found:.1e}"
    assert other < 2 * max(cpu.TOLERANCE.values()), "torch's own result is not the peer's of float64"
    again = [o.clone() for o in made.outputs]
    made.ours()
    assert all(torch.equal(a, o) for a, o in zip(again, made.outputs, strict=True))


def test_a_wrong_result_is_said_to_be_wrong():
    import torch
    case = cpu_cases.CASES[0]
    made = cpu.prepare(torch, case, case.small)
    made.expected[0][0, 0] += 1.0
    assert not cpu.errors(made)[2]
    made.expected[0][0, 0] = float("nan")
    assert not cpu.errors(made)[2]


def test_the_command_prints_a_table_and_writes_it(tmp_path, capsys):
    import torch
    threads, path = torch.get_num_threads(), tmp_path / "cpu.json"
    assert cli.main(["bench", "cpu", "--small", "--rounds", "1", "--only", "softmax", "--only", "moe", "--json", str(path)]) == 0
    head, softmax, moe = capsys.readouterr().out.splitlines()
    assert "threads each" in head and "softmax" in softmax and "grouped matmul" in moe and "WRONG" not in softmax + moe
    written = json.loads(path.read_text())
    assert [r["case"] for r in written["results"]] == ["softmax", "moe"] and all(r["right"] for r in written["results"])
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["cpu", "--rounds", "0"], "rounds is too small"),
        (["cpu", "--json", "/no/such/folder/x.json"], "a file in a folder that exists"),
        (["host", "--device", "cpu", "--calls", "0"], "calls is too small"),
        (["host", "--device", "cpu", "--starts", "-1"], "starts is too small; expected at least 0"),
        (["dynamic", "--shapes", "0"], "shapes is too small"),
        (["matmul", "--rounds", "0"], "rounds is too small"),
    ],
)
def test_bad_numbers_and_files_are_told_before_anything_is_measured(argv, why, capsys):
    assert cli.main(["bench", *argv]) == 1
    told = capsys.readouterr()
    assert f"ValidationError: {why}" in told.err.replace("the results cannot be written; expected ", "") and not told.out


def test_an_unknown_case_lists_the_known_ones(capsys):
    assert cli.main(["bench", "cpu", "--only", "cake"]) == 1
    said = capsys.readouterr().err
    assert "'cake'" in said and all(c.name in said for c in cpu_cases.CASES)
    assert len({c.name for c in cpu_cases.CASES}) == len(cpu_cases.CASES)


# ----------------------------------------------------------------------------------------------------------------------------------------- host
def test_the_host_table_has_every_contender_and_right_results(tmp_path, capsys):
    path = tmp_path / "host.json"
    assert cli.main(["bench", "host", "--device", "cpu", "--rounds", "1", "--calls", "20", "--starts", "0", "--json", str(path)]) == 0
    said, rows = capsys.readouterr().out, json.loads(path.read_text())["results"]
    assert "WRONG" not in said and [r["case"] for r in rows] == ["4 tensors"] * 6 + ["13 tensors"] * 6
    assert {"graphdnn execute", "graphdnn bound", "an empty call"} <= {r["contender"] for r in rows}
    assert all(r["samples"] == 20 and 0 < r["p10"] <= r["p50"] <= r["p90"] <= r["p99"] for r in rows)


def test_a_distribution_is_of_the_samples():
    row = host.result("c", "x", "us", range(100, 0, -1))
    assert (row.p10, row.p50, row.p90, row.p99, row.samples) == (11, 51, 91, 100, 100)


def test_a_start_builds_from_the_disk_and_loads(tmp_path):
    import torch

    data = host.inputs(torch, "cpu", 1)
    graph, _ = host.build(graphdnn, data, device="cpu")
    text, plan = tmp_path / "graph.json", tmp_path / "plan.gdnn"
    text.write_text(str(graph))
    plan.write_bytes(bytes(graph.serialize()))
    for what, file, origins in (("build", text, {"memory", "disk"}), ("load", plan, {"file"})):
        said = host_start.main(what, "cpu", str(file))
        assert said["ms"] > 0 and set(said["origins"]) <= origins
    plan.write_bytes(b"nothing")
    with pytest.raises(ExecutionError, match=r"could not load.*SerializationError"):
        host.started("load", "cpu", plan)
