"""The fixed share of random graphs that every test run does, and the full budgets (``-m slow``, ``-m gpu``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from tests.fuzz.anchors import FAMILIES
from tests.fuzz.blocks import MORE
from tests.fuzz.dynamic import check_dynamic
from tests.fuzz.features import features, thin
from tests.fuzz.generator import generate
from tests.fuzz.program import Program, check, script
from tests.fuzz.repair import tame
from tests.fuzz.run import limits_for, report, run

CPU_SHARE, CPU_GROUP = 50, 5
SIM_SHARE = 30


def checked(seed: int, device: str) -> tuple[int, int]:
    """Elements and how many of them were not compared; a failure carries its script."""
    program = tame(seed, limits_for(device))
    try:
        outcome = check(program, device)
    except Exception as error:
        pytest.fail(f"{type(error).__name__}: {error}\n\n{script(program, device, f'seed {seed} on {device}')}")
    return outcome.elements, outcome.excluded


@pytest.mark.parametrize("first", range(0, CPU_SHARE, CPU_GROUP))
def test_cpu(first):
    done = [checked(seed, "cpu") for seed in range(first, first + CPU_GROUP)]
    assert sum(e for e, _ in done) > 0


@pytest.mark.sim
@pytest.mark.parametrize("seed", range(SIM_SHARE))
def test_simulator(seed):
    checked(seed, "cudasim")


def checked_dims(seeds: Iterable[int], device: str) -> Counter[str]:
    """What became of the shapes of these seeds with dims; a failure names its seed."""
    found: Counter[str] = Counter()
    for seed in seeds:
        try:
            found.update(check_dynamic(tame(seed, limits_for(device)), device, seed))
        except Exception as error:
            pytest.fail(f"check_dynamic, seed {seed} on {device}: {type(error).__name__}: {error}")
    return found


def test_dims():
    assert checked_dims((3, 7), "cpu")["same numbers"] >= 5


@pytest.mark.sim
def test_dims_in_the_simulator():
    assert checked_dims(range(3), "cudasim")["same numbers"] >= 3


@pytest.mark.slow
@pytest.mark.parametrize(("device", "count"), [("cpu", 600), ("cudasim", 120)])
def test_dims_full_budget(device, count):
    """Every family runs at shapes other than its own."""
    results = run(device, list(range(count)), dims=True)
    assert report(results, device, None) == 0
    found = sum((Counter(r.shapes) for r in results), Counter())
    assert found["same numbers"] >= 2 * count
    assert [f for f in FAMILIES | MORE if found[f"same numbers: {f}"] < count // 60] == []


@pytest.mark.gpu
def test_dims_on_a_gpu():
    assert checked_dims(range(40), "cuda:0")["same numbers"] >= 60


@pytest.mark.slow
@pytest.mark.parametrize(("device", "count"), [("cpu", 2000), ("cudasim", 200)])
def test_full_budget(device, count):
    results = run(device, list(range(count)))
    assert len(results) == count
    assert report(results, device, None) == 0


@pytest.mark.gpu
def test_gpu_budget():
    results = run("cuda:0", list(range(1000)))
    assert report(results, "cuda:0", None) == 0


def test_programs_are_reproducible_and_survive_json():
    """A seed names one program; its text gives it back."""
    for seed in range(20):
        program = tame(seed, limits_for("cpu"))
        assert program == tame(seed, limits_for("cpu"))
        assert Program.from_json(program.to_json()) == program


def test_a_script_runs(capsys):
    """What a failing seed prints is a program that repeats it."""
    program = tame(3, limits_for("cpu"))
    exec(compile(script(program, "cpu", "an example"), "script", "exec"), {})
    assert "Outcome(" in capsys.readouterr().out


def test_the_programs_are_varied():
    """Over 400 seeds: every pointwise method, every reduction mode, each movement op, every family, every dtype, every kind of layout."""
    from graphdnn.opspecs.pointwise import POINTWISE
    from graphdnn.opspecs.reduction import REDUCTION
    from tests.fuzz.anchors import families
    from tests.fuzz.generator import FLOATS, INTS

    programs = [generate(seed) for seed in range(400)]
    ops = [o for p in programs for o in p.ops]
    inputs = [i for p in programs for i in p.inputs]
    assert {r.method for r in POINTWISE.values()} <= {o.method for o in ops}
    assert {"matmul", "reduction", "slice", "transpose", "reshape", "concatenate"} <= {o.method for o in ops}
    assert set(REDUCTION) == {o.kwargs["mode"] for o in ops if o.method == "reduction"}
    assert {*FLOATS, *INTS} <= {i.dtype for i in inputs}
    assert {*FLOATS} <= {o.out_dtype for o in ops if o.output}
    assert {0, 1, 2, 3, 4, 5, 6} <= {len(i.dim) for i in inputs}
    assert any(0 in i.dim for i in inputs) and any(0 in i.stride for i in inputs if i.mode == "buffer")
    assert {"buffer", "by_value", "runtime", "constant"} == {i.mode for i in inputs}
    assert any(i.offset for i in inputs) and any(o.out_offset for o in ops)
    assert sum(sum(o.output for o in p.ops) > 1 for p in programs) > 100
    drawn = [f for p in programs for f in families(p.ops)]
    assert all(drawn.count(f) >= 20 for f in FAMILIES | MORE)
    chains = [p for p in programs for m in p.ops if m.method == "matmul" for r in p.ops if r.method == "reduction" and _reaches(p, m.out, r.out)]
    assert len(chains) >= 10, "matmul and then a reduction of what it gives"


@pytest.mark.parametrize(("device", "count", "least", "of_attention"), [("cpu", 2000, 5, 12), ("cudasim", 1000, 1, 1)])
def test_nothing_is_thin(device, count, least, of_attention):
    """In the full budgets every size, option and layout of attention and every kind of every other family is drawn."""
    counts = Counter(f for seed in range(count) for f in features(generate(seed, limits_for(device)).ops))
    small = {"s_q 704", "s_kv 704"} if device == "cudasim" else set()
    assert [f for f in thin(counts, least) if f.partition(": ")[2] not in small] == []
    assert [f for f in thin(counts, of_attention) if f.startswith("attention") and f.partition(": ")[2] not in small] == []


def _reaches(program: Program, start: str, goal: str) -> bool:
    """Whether the tensor ``goal`` depends on ``start``."""
    found = {start}
    for op in program.ops:
        if found & set(op.reads):
            found.add(op.out)
    return goal in found
