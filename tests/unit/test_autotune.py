"""The tuner on the CPU: what it chooses, what it drops, what it remembers."""

from __future__ import annotations

import math
import pickle
import threading
import time

import numpy as np
import pytest

import graphdnn
from graphdnn import build_plan_policy, data_type, heur_mode
from graphdnn.engines import ENGINES
from graphdnn.errors import BuildError, ExecutionError, KindError, NotSupportedError, ValidationError
from graphdnn.plans import autotune, cache, contest, tuning, workers
from tests.attention_cases import Case, arguments, feeds, forward
from tests.helpers import Setup, given
from tests.unit import planted
from tests.unit.test_tuning import alive

F32 = data_type.FLOAT


def pointwise(n=3000, **kwargs):
    """gelu(x) * s + b with a scalar s, and its tensors."""
    g = graphdnn.pygraph(device=kwargs.pop("device", "cpu"), io_data_type=F32, intermediate_data_type=F32, compute_data_type=F32, **kwargs)
    x, b = g.tensor(dim=(2, n, 3), layout="row", name="x"), g.tensor(dim=(1, n, 1), layout="row", name="b")
    s = g.tensor(dim=(1, 1, 1), stride=(1, 1, 1), is_pass_by_value=True, name="s")
    y = g.add(g.mul(g.gelu(x), s), b).set_output(True).set_name("y")
    return g, (x, b, s, y)


def matmul(**kwargs):
    """gelu(a @ b) as one kernel, or two."""
    g = graphdnn.pygraph(device="cpu", io_data_type=F32, intermediate_data_type=F32, compute_data_type=F32, **kwargs)
    a, b = g.tensor(dim=(2, 24, 40), layout="row", name="a"), g.tensor(dim=(2, 40, 16), layout="row", name="b")
    g.gelu(g.matmul(a, b)).set_output(True).set_name("y")
    g.build_operation_graph()
    return g


@pytest.fixture(autouse=True)
def database(tmp_path, monkeypatch):
    """A tuning database of the test's own."""
    monkeypatch.setenv("GRAPHDNN_TUNING_DB", str(tmp_path / "tuning.db"))
    return tuning.Database(tmp_path / "tuning.db")


def planting(monkeypatch, *engines):
    monkeypatch.setattr("graphdnn.engines.ENGINES", (*engines, *ENGINES))


def test_the_chosen_plan_is_right_and_never_slower_than_the_heuristics(database):
    g, (x, b, s, y) = pointwise()
    rng = np.random.default_rng(0)
    data, bias, out = (
        rng.standard_normal((2, 3000, 3), np.float32),
        rng.standard_normal((1, 3000, 1), np.float32),
        np.full((2, 3000, 3), 7, np.float32),
    )
    lines: list[str] = []
    cache.listeners.append(lines.append)
    try:
        found = g.autotune({x: data, b: bias, s: 0.5, y: out}, workers=0, iterations=5)
    finally:
        cache.listeners.remove(lines.append)
    assert found.source == "measured" and found.exact and found.stored and not found.problem
    assert (out == 7).all(), "nothing of the pack is written"
    times = {r.index: r.seconds for r in found.timed}
    assert {found.chosen, found.heuristic} <= set(times) and found.ratio <= 1.0 and found.spread >= 1.0
    assert found.chosen == found.heuristic or found.ratio <= 1 - max(found.noise, autotune.LEAST_GAIN)
    assert g.plan is g._plans.plan_at(found.chosen) and f"plan {found.chosen}" in str(found)
    assert any("take turns" in line for line in lines)
    (run,) = database.runs()
    assert {m.key for m in run.results} == {tuning.plan_key(g._plans.plan_at(i)) for i in times} and run.results[run.heuristic].seconds > 0
    g.execute({x: data, b: bias, s: 0.5, y: out}, np.empty(g.get_workspace_size(), np.uint8))
    gelu = 0.5 * data.astype(np.float64) * (1 + np.vectorize(math.erf)(data / math.sqrt(2)))
    assert np.abs(out - (gelu * 0.5 + bias)).max() < 1e-5


def test_faulty_candidates_are_dropped_and_reported(monkeypatch):
    planting(monkeypatch, planted.Wrong(), planted.Crashing(), planted.Dying())
    g, _ = pointwise()
    found = g.autotune(workers=2, iterations=2)
    why = {r.engines[0]: r.why for r in found.dropped}
    assert "wrong result" in why["planted_wrong"] and "outside of the error bound" in why["planted_wrong"]
    assert "SIGSEGV" in why["planted_crashing"] and "exit status 3" in why["planted_dying"]
    assert {r.engines[0] for r in found.timed} == {"pointwise"} and "SIGSEGV" in str(found)


def test_a_candidate_that_hangs_is_killed(monkeypatch):
    planting(monkeypatch, planted.Hanging())
    g, _ = pointwise()
    g.build_operation_graph()
    g.create_execution_plans([heur_mode.A])
    hanging = next(p for p in g._plans if p.choices[0].name == "planted_hanging")
    (outcome,) = workers.build([hanging], 1, 1.0)
    assert "did not finish within 1 s" in outcome.error


def test_an_interrupt_ends_every_worker(monkeypatch):
    """Also one that hangs, which would else be waited for."""
    planting(monkeypatch, planted.Hanging())
    g, _ = pointwise()
    g.build_operation_graph()
    g.create_execution_plans([heur_mode.A])
    plans = sorted(g._plans, key=lambda p: p.choices[0].name == "planted_hanging")
    started: list[int] = []
    real = workers.Worker._start

    def start(worker):
        process = real(worker)
        started.append(process.pid)
        return process

    def interrupt(line):
        raise KeyboardInterrupt

    monkeypatch.setattr(workers.Worker, "_start", start)
    with pytest.raises(KeyboardInterrupt):
        workers.build([plans[0], plans[-1]], 2, 600.0, interrupt)
    assert len(started) == 2 and not any(map(alive, started))


@pytest.mark.parametrize("spent", [False, True])
def test_a_process_in_which_a_plan_has_failed_gets_no_other_one(monkeypatch, spent):
    """The next plan would be blamed for a broken context (H200, 2026-11-30)."""
    told = f"workers.Outcome(error=str(os.getpid()), spent={spent})"
    monkeypatch.setattr(workers, "_PROGRAM", f"import os; from graphdnn.plans import workers; workers._made = lambda data: {told}; workers.main()")
    worker = workers.Worker()
    try:
        first, second = worker.ask(b"", 60.0).error, worker.ask(b"", 60.0).error
    finally:
        worker.close()
    assert first.isdecimal() and second.isdecimal() and (first != second) == spent


def test_a_plan_that_fails_when_it_runs_spends_its_process(monkeypatch):
    g, _ = pointwise()
    g.build([heur_mode.A])
    monkeypatch.setattr(workers, "try_out", lambda plan: 1 / 0)
    made = workers._made(pickle.dumps(g.plan))
    assert made.spent and "ZeroDivisionError" in made.error
    monkeypatch.setattr(workers, "try_out", lambda plan: None)
    assert not workers._made(pickle.dumps(g.plan)).spent


def test_a_worker_is_killed_with_what_it_has_started_and_its_last_words_are_kept(monkeypatch, tmp_path):
    """A compiler that hangs is a process of its own."""
    started = tmp_path / "pid"
    lines = f"p = subprocess.Popen(['sleep', '600']); open({str(tmp_path / 'new')!r}, 'w').write(str(p.pid)); os.rename({str(tmp_path / 'new')!r}, "
    monkeypatch.setattr(workers, "_PROGRAM", f"import os, subprocess; {lines}{str(started)!r}); p.wait()")

    class WhenStarted(threading.Thread):
        """Time is up when the worker has started something."""

        def __init__(self, interval, function):
            super().__init__(daemon=True)
            self.function, self.off = function, threading.Event()

        def run(self):
            while not started.exists() and not self.off.wait(0.02):
                pass
            if started.exists():
                self.function()

        def cancel(self):
            self.off.set()

    with monkeypatch.context() as patch:
        patch.setattr(threading, "Timer", WhenStarted)
        worker = workers.Worker()
        assert "did not finish within 2 s" in worker.ask(b"", 2.0).error
        worker.close()
    while alive(int(started.read_text())):  # a signal takes its time; a process that got none sleeps for ten minutes
        time.sleep(0.05)
    monkeypatch.setattr(workers, "_PROGRAM", "import no_such_module")
    worker = workers.Worker()
    assert "exit status 1 (ModuleNotFoundError: No module named 'no_such_module')" in worker.ask(b"", float("inf")).error
    worker.close()
    with pytest.raises(ValueError, match="closed file"):
        worker.ask(b"", 1.0)


def test_wrong_results_are_found_by_norm_where_the_reference_is_too_slow(monkeypatch):
    monkeypatch.setattr(contest, "REFERENCE_WORK", 0)
    planting(monkeypatch, planted.Wrong())
    found = pointwise()[0].autotune(workers=0, iterations=1)
    assert not found.exact and [r.engines[0] for r in found.dropped] == ["planted_wrong"] and "wrong result" in found.dropped[0].why


def test_only_wrong_plans_is_an_error_that_lists_them(monkeypatch):
    monkeypatch.setattr("graphdnn.engines.ENGINES", (planted.Wrong(),))
    with pytest.raises(ExecutionError, match="no plan gives right results(.|\n)*wrong result"):
        pointwise()[0].autotune(workers=0)


def test_a_second_graph_takes_the_stored_plan_without_timing(monkeypatch, database):
    first = matmul().autotune(workers=0, iterations=3)
    monkeypatch.setattr(autotune, "_Tuning", None)
    g = matmul(name="another name")
    second = g.autotune()
    assert second.source == "database" and second.executions == 0 and second.chosen == first.chosen
    assert len(database.runs()) == 1 and g.plan.built and "nothing was timed" in str(second)
    with pytest.raises(ValidationError, match="missing buffer"):
        matmul().autotune({})  # a wrong call is one whatever the database knows


def test_heuristic_mode_B_lists_measured_plans_first(database):
    g = matmul()
    g.create_execution_plans([heur_mode.A])
    ranked = list(g._plans)
    key = tuning.key_of(g._opgraph, g._get_device())
    assert len(ranked) > 2
    planted_order = tuple(tuning.of_plan(p, 1e-6 * i) for i, p in enumerate(reversed(ranked), 1))
    database.add([run_of(key, planted_order)])
    for modes, wanted in (([heur_mode.B], ranked[::-1]), ([heur_mode.A], ranked)):
        g.create_execution_plans(modes)
        assert [p.name for p in g._plans] == [p.name for p in wanted]
    g = matmul(deterministic=True)
    g.create_execution_plans([heur_mode.B])
    assert [p.name for p in g._plans] == [p.name for p in ranked], "deterministic mode asks no database"


def run_of(key, results, **more):
    facts = {"id": tuning.new_id(), "created": 1.0, "host": "h", "pid": 1, "iterations": 5, "workspace_limit": None, "candidates": None} | more
    facts = {"filters": "", "heuristic": 0} | facts
    return tuning.Run(graph=key.graph, device=key.device, toolchain=key.toolchain, version=key.version, results=results, **facts)


def test_what_does_not_fit_any_more_is_not_used(database):
    """C3: engine, knobs and versions are stored, not places in a list."""
    g = matmul()
    g.create_execution_plans([heur_mode.A])
    key, plan = tuning.key_of(g._opgraph, g._get_device()), g._plans.plan_at(1)
    gone = tuning.Measured("", ((2, "matmul_simt", "PanelCpu(rows=7)"),), 1e-9, 0)
    other = tuning.Key(key.graph, key.device, "another toolchain")
    database.add([run_of(key, (gone,)), run_of(other, (tuning.of_plan(plan, 1e-9),))])
    assert autotune.stored(g._plans, autotune.Options()) is None
    assert tuning.key_of(g._opgraph, graphdnn.device.describe("sm_90")) != key


def test_a_limit_on_workspace_holds_and_limited_runs_do_not_answer_for_all(database):
    g = matmul()
    g.create_execution_plans([heur_mode.A])
    sizes = sorted({p.workspace_bytes for p in g._plans})
    assert sizes[0] == 0
    found = g.autotune(workspace_limit=sizes[1], workers=0, iterations=1)
    assert {r.workspace for r in found.timed} == set(sizes[:2]) and found.dropped and all("more than" in r.why for r in found.dropped)
    key = tuning.key_of(g._opgraph, g._get_device())
    assert database.measured(key) == [] and len(database.measured(key, sizes[1])) == len(found.timed)
    assert [m.workspace for m in database.measured(key, 0)] == [0]
    in_memory = matmul().autotune(workspace=np.empty(sizes[1], np.uint8))
    assert in_memory.source == "database" and in_memory.chosen == found.chosen
    g = matmul(workspace_limit=0)
    g.build([heur_mode.A])
    assert g.get_workspace_size() == 0
    g.deselect_engines([f"eng2_k12={i}" for i, p in enumerate(g._plans) if not p.workspace_bytes and "unfused" not in p.name] + ["k12=3"])
    with pytest.raises(NotSupportedError, match="bytes of workspace, more than 0"):
        g.autotune(workspace_limit=0, workers=0)


def test_a_tuning_that_saw_less_does_not_answer_for_one_that_would_see_more(database):
    """A limit or a filter of the graph's own list, and fewer candidates, leave plans out of a run."""
    def tuned(prepare=lambda g: None, **options):
        g = matmul(**{k: options.pop(k) for k in ("workspace_limit",) if k in options})
        g.create_execution_plans([heur_mode.A])
        prepare(g)
        return g.autotune(workers=0, iterations=1, **options)

    def narrowed(g):
        g.deselect_engines([g.get_plan_name_at_index(0)])

    assert tuned(workspace_limit=0).source == tuned(candidates=1).source == tuned(narrowed).source == "measured"
    assert tuned(workspace_limit=0).source == tuned(candidates=1).source == tuned(narrowed).source == "database"
    assert tuned().source == "database", "of the run with one candidate: nobody asks for more"
    whole = tuned(candidates=100)
    assert whole.source == "measured" and len(whole.timed) > 2
    again = tuned(candidates=100)
    assert again.source == "database" and again.chosen == whole.chosen == again.rows[0].index
    times = [r.seconds for r in again.rows[1:]]
    assert times == sorted(times) and (again.ratio < 1) == (again.chosen != again.heuristic)


def test_bad_packs_and_workspaces_are_told_before_anything_is_compiled(monkeypatch):
    g, (x, b, s, y) = pointwise(n=50)
    data = {x: np.zeros((2, 50, 3), np.float32), b: np.zeros((1, 50, 1), np.float32), s: 1.0, y: np.zeros((2, 50, 3), np.float32)}
    monkeypatch.setattr(autotune._Tuning, "_built", None)
    small = np.zeros((2, 5, 3), np.float32)
    for bad, why in (({}, "missing buffer"), (data | {x: small}, "too small"), (data | {y: "y"}, "not a buffer")):
        with pytest.raises((ValidationError, KindError), match=why):
            g.autotune(bad)
    locked = np.zeros(1 << 20, np.uint8)
    locked.flags.writeable = False
    with pytest.raises(ValidationError, match="workspace is read-only"):
        g.autotune(workspace=locked)


def test_no_memory_for_the_inputs_is_no_reason_not_to_build():
    def huge(**kwargs):
        g = graphdnn.pygraph(device="cpu", io_data_type=F32, intermediate_data_type=F32, compute_data_type=F32, **kwargs)
        g.relu(g.tensor(dim=(1 << 50,), stride=(1,))).set_output(True)
        return g

    with pytest.raises(NotSupportedError, match="no memory for inputs and outputs"):
        huge().autotune(workers=0)
    g = huge(benchmark=True)
    g.build([heur_mode.A])
    assert g.plan.built


def test_an_interrupt_gives_back_what_contenders_hold(monkeypatch):
    closed: list[int] = []

    def interrupted(arena, index, plan):
        if index:
            raise KeyboardInterrupt
        made = real(arena, index, plan)
        monkeypatch.setattr(made.timed, "close", lambda: closed.append(index))
        return made

    real = contest.contender
    monkeypatch.setattr(contest, "contender", interrupted)
    g = matmul()
    g.build([heur_mode.A])
    before = g.plan
    with pytest.raises(KeyboardInterrupt):
        g.autotune(workers=0)
    assert closed == [0] and g.plan is before


def test_a_first_plan_that_does_not_run_is_dropped(monkeypatch):
    monkeypatch.setattr(contest, "REFERENCE_WORK", 0)
    real = contest.Arena.results
    g = matmul()
    g.create_execution_plans([heur_mode.A])

    def results(arena, plan):
        if plan is g._plans.plan_at(0):
            raise ExecutionError("no")
        return real(arena, plan)

    monkeypatch.setattr(contest.Arena, "results", results)
    found = g.autotune(workers=0, iterations=1)
    assert found.source == "measured" and not found.exact and {r.index: r.why for r in found.dropped}[0] == "does not run: no"


def test_benchmark_mode_times_once_and_deterministic_mode_never(monkeypatch, database):
    def build(**kwargs):
        g, _ = pointwise(n=500, **kwargs)
        g.build([heur_mode.A, heur_mode.FALLBACK])
        return g.plan.built and len(database.runs())

    counted: list[int] = []
    real = contest.rounds
    monkeypatch.setattr(contest, "rounds", lambda *a: counted.append(1) or real(*a))
    assert build() == 0
    assert build(benchmark=True, deterministic=True) == 0 and not counted
    monkeypatch.setenv("GRAPHDNN_BENCHMARK", "1")
    assert build(deterministic=True) == 0 and build(benchmark=False) == 0 and build(device="sm_90") == 0 and not counted
    assert build() == 1 and counted
    times = len(counted)
    assert build() == 1 and build(benchmark=True) == 1 and len(counted) == times, "the second time it is known"
    monkeypatch.setenv("GRAPHDNN_DETERMINISTIC", "1")
    g, _ = pointwise(n=700)
    assert g.autotune().source == "heuristics" and g.plan.built and len(counted) == times


def test_bad_input():
    g, (x, b, s, y) = pointwise(n=50)
    for bad in ({"iterations": 0}, {"candidates": 0}, {"workers": -1}, {"workspace_limit": -1}, {"timeout_s": 0}):
        with pytest.raises(ValidationError, match=next(iter(bad))):
            g.autotune(**bad)
    for bad in ({"iterations": "5"}, {"workspace_limit": 1.5}, {"pack": [1]}):
        with pytest.raises(KindError, match=next(iter(bad))):
            g.autotune(**bad)
    with pytest.raises(ValidationError, match="missing buffer for uid .* \\('b'\\)"):
        g.autotune({x: np.zeros((2, 50, 3), np.float32), s: 1.0, y: np.zeros((2, 50, 3), np.float32)}, workers=0)
    with pytest.raises(ValidationError, match="size of the workspace is not known"):
        g.autotune(workspace=4096)
    for device, why in (("cudasim", "simulator"), ("sm_90", "described device")):
        with pytest.raises(NotSupportedError, match=f"cannot be timed: .*{why}"):
            pointwise(n=50, device=device)[0].autotune()
    g.create_execution_plans([heur_mode.A])
    g.build_plans(build_plan_policy.HEURISTICS_CHOICE)
    loaded = graphdnn.pygraph(device="cpu")
    loaded.deserialize(g.serialize())
    with pytest.raises(BuildError, match="a loaded graph has one plan"):
        loaded.autotune()


def test_a_graph_with_dims_is_tuned_at_its_hint():
    g = graphdnn.pygraph(device="cpu", io_data_type=F32, intermediate_data_type=F32, compute_data_type=F32)
    x = g.tensor(dim=(graphdnn.Dim("n", 1, 64), 4), stride=(4, 1), name="x")
    y = g.relu(x).set_output(True)
    found = g.autotune(workers=0, iterations=1)
    assert found.source == "measured"
    for n in (5, 64):
        data, out = np.random.default_rng(n).standard_normal((n, 4), np.float32), np.full((n, 4), np.nan, np.float32)
        g.execute({x: data, y: out}, np.empty(g.get_workspace_size(), np.uint8))
        assert (out == np.maximum(data, 0)).all()
    again = g.autotune(workers=1, iterations=1, reuse=False)
    assert not [r for r in again.dropped if "dims" in r.why], "the plan that was built for many shapes takes part"


def test_packed_tensors_are_tuned_with_a_pack_of_arrays():
    case = Case(20, 25, 8, b=3, layout="packed", lengths=((20, 7, 1), (25, 3, 9)))
    values = feeds(case)
    g = graphdnn.pygraph(device="cpu", **arguments(case))
    forward(case, values)(g)
    g.build_operation_graph()
    setup = Setup(g._opgraph, "cpu without fences", "numpy")
    setup.fill(0, {k: given(v) for k, v in values.items() if isinstance(v, np.ndarray)}, {}, {})
    with pytest.raises(NotSupportedError, match="packed tensors"):
        g.autotune(workers=0)
    found = g.autotune(setup.pack(), workers=0, iterations=1, candidates=2)
    assert found.source == "measured" and not found.exact and not [r for r in found.dropped if "wrong" in r.why]
    setup.assert_undamaged()
