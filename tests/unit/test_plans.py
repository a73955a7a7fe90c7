"""Candidates, plan lists, workspace layout, building and running plans on the CPU; fake engines where a real one would not fail."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest

from graphdnn import device as devices
from graphdnn.codegen.spec import Buffer, Constant, KernelSpec, Launch, Matrix, Memset, Panels, PointerParam, Recipe, ScalarParam
from graphdnn.dtypes import data_type
from graphdnn.engines import ENGINES
from graphdnn.engines.base import Engine, Knobs
from graphdnn.errors import BuildError, ExecutionError, NotSupportedError, ValidationError
from graphdnn.ir.layout import packed
from graphdnn.ir.node import Node
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.ir.tensor import Tensor
from graphdnn.passes import regions
from graphdnn.plans import assemble, candidates, heuristics, serialize
from graphdnn.plans.assemble import Arena
from graphdnn.plans.planset import KnobRange
from graphdnn.status import OK, reject

F32 = data_type.FLOAT
CPU = devices.cpu()
H200 = devices.describe("sm_90")


class Builder:
    """Operation graphs without the frontend. Tensors are row-major; outputs are virtual until ``out``."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.nodes: list[Node] = []

    def tensor(self, name, dim, dtype=F32, **kwargs) -> int:
        self.tensors.append(Tensor(name, len(self.tensors) + 1, tuple(dim), packed(dim), dtype, **kwargs))
        return len(self.tensors) - 1

    def op(self, op, name, inputs, dim, **attrs) -> int:
        ports = {"MATMUL": ("A", "B"), "REDUCTION": ("X",), "POINTWISE": ("IN_0", "IN_1", "IN_2")}[op]
        out = {"MATMUL": "C", "REDUCTION": "Y", "POINTWISE": "OUT_0"}[op]
        y = self.tensor(f"{name}::{out}", dim, virtual=True)
        pairs = tuple(zip(ports, inputs, strict=False))
        self.nodes.append(Node(op, name, pairs, ((out, y),), tuple(sorted(attrs.items())), F32))
        return y

    def out(self, *ids) -> None:
        for t in ids:
            self.tensors[t] = replace(self.tensors[t], virtual=False)

    def graph(self, name="test") -> OperationGraph:
        return OperationGraph(tuple(self.tensors), tuple(self.nodes), name)


def fp8_pattern() -> OperationGraph:
    """gelu(scale * (x @ w) + bias) and its largest magnitude."""
    b = Builder()
    x, w = b.tensor("x", (2, 8, 16)), b.tensor("w", (1, 16, 12))
    s, bias = b.tensor("s", (1, 1, 1), by_value=True, value=0.5), b.tensor("bias", (1, 1, 12))
    h = b.op("MATMUL", "mm", (x, w), (2, 8, 12))
    h = b.op("POINTWISE", "scale", (h, s), (2, 8, 12), mode="MUL")
    h = b.op("POINTWISE", "bias", (h, bias), (2, 8, 12), mode="ADD")
    y = b.op("POINTWISE", "gelu", (h,), (2, 8, 12), mode="GELU_FWD")
    amax = b.op("REDUCTION", "amax", (y,), (1, 1, 1), mode="AMAX")
    b.out(y, amax)
    return b.graph()


def softmax() -> OperationGraph:
    """exp(x - max) / sum."""
    b = Builder()
    x = b.tensor("x", (64, 128))
    top = b.op("REDUCTION", "row_max", (x,), (64, 1), mode="MAX")
    shift = b.op("POINTWISE", "shift", (x, top), (64, 128), mode="SUB")
    e = b.op("POINTWISE", "exp", (shift,), (64, 128), mode="EXP")
    total = b.op("REDUCTION", "row_sum", (e,), (64, 1), mode="ADD")
    y = b.op("POINTWISE", "normalize", (e, total), (64, 128), mode="DIV")
    b.out(y)
    return b.graph()


def chain() -> OperationGraph:
    """relu(relu(x @ w0) @ w1) @ w2: three kernels."""
    b = Builder()
    h = b.tensor("x", (1, 8, 16))
    for i, (k, n) in enumerate(((16, 8), (8, 8), (8, 4))):
        h = b.op("MATMUL", f"mm{i}", (h, b.tensor(f"w{i}", (1, k, n))), (1, 8, n))
        if i < 2:
            h = b.op("POINTWISE", f"relu{i}", (h,), (1, 8, n), mode="RELU_FWD")
    b.out(h)
    return b.graph()


def chain_data() -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(3)
    dims = {"x": (1, 8, 16), "w0": (1, 16, 8), "w1": (1, 8, 8), "w2": (1, 8, 4)}
    pack = {name: rng.standard_normal(dim).astype(np.float32) for name, dim in dims.items()}
    x, w0, w1, w2 = (pack[n].astype(float) for n in dims)
    return pack | {"mm2::C": np.full((1, 8, 4), np.nan, np.float32)}, np.maximum(np.maximum(x @ w0, 0) @ w1, 0) @ w2


def add_relu(n=24) -> OperationGraph:
    b = Builder()
    x, z = b.tensor("x", (n,)), b.tensor("z", (n,))
    y = b.op("POINTWISE", "relu", (b.op("POINTWISE", "add", (x, z), (n,), mode="ADD"),), (n,), mode="RELU_FWD")
    b.out(y)
    return b.graph()


# ------------------------------------------------------------------------------------------------------------------------------ fake engines
@dataclass(frozen=True)
class FakeKnobs(Knobs):
    level: int = 0


class Fake(Engine):
    """Takes what ``takes`` says, at ``seconds`` for each level; its kernels are copies of the pointwise engine's or do not compile."""

    id = 0
    name = "fake"

    def __init__(self, id=0, name="fake", takes=None, seconds=(1e-6,), scratch=0, notes=(), cut=None):
        self.id, self.name, self.takes, self.seconds, self.scratch, self.notes, self.cut = id, name, takes, seconds, scratch, notes, cut

    def _accepts(self, graph, region):
        ok = self.takes is None or self.takes(graph, region)
        return OK if ok else reject(f"{self.name} does not want {region.kind}", self.cut)

    def _candidates(self, graph, region, device):
        return tuple(FakeKnobs(i) for i in range(len(self.seconds)))

    def _cost(self, graph, region, device, knobs):
        return self.seconds[knobs.level]

    def numeric_notes(self, graph, region, knobs):
        return self.notes

    def _lower(self, graph, region, device, knobs, memory: Mapping[int, Buffer]):
        ids = (*region.reads, *region.stores)
        params = tuple(PointerParam(f"t{t}", "float32") for t in ids)
        spec = KernelSpec("cpu/none.py.j2", f"{self.name}_{region.kind}", (*params, PointerParam("scratch", "uint8")))
        args = (*(memory[t] for t in ids), Buffer("workspace", -1, 8))
        return Recipe((spec,), (Memset(Buffer("workspace", -1, 0), 4), Launch(0, 1, args)), self.scratch)


def single(graph, region):
    return len(region.nodes) == 1


# ------------------------------------------------------------------------------------------------------------------------------ candidates
def test_candidates_are_ranked_and_named():
    plans = candidates.create(fp8_pattern(), H200)
    names = [p.name for p in plans]
    assert len(set(names)) == len(names) == plans.count() == len(plans) > 2
    fused = [p.cost for p in plans if not p.name.startswith("unfused")]
    assert fused == sorted(fused) and names[0].startswith("r0:eng2") and names[-1].startswith("unfused|r0:")
    assert plans.name_at(0) == names[0] and len(plans.plan_at(0).partition.regions) == 1


def test_same_graph_same_candidates():
    assert [p.name for p in candidates.create(softmax(), CPU)] == [p.name for p in candidates.create(softmax(), CPU)]


def test_one_region_is_varied_at_a_time():
    engines = (Fake(0, "a", seconds=(3e-6, 1e-6)), Fake(1, "b", seconds=(2e-6,)))
    plans = candidates.create(chain(), CPU, engines=engines)
    whole = [p for p in plans if not p.name.startswith("unfused")]
    best = "r0:eng0_k12=1|r1:eng0_k12=1|r2:eng0_k12=1"
    assert whole[0].name == best and len(whole) == 1 + 3 * 2
    for p in whole[1:]:
        assert sum(a != b for a, b in zip(p.name.split("|"), best.split("|"), strict=True)) == 1
    assert whole[1].name.count("eng1") == 1, "the cheaper variation comes first"


def test_cost_counts_launches():
    one, three = (candidates.create(g, CPU, engines=(Fake(seconds=(0.0,)),)).plan_at(0).cost for g in (add_relu(), chain()))
    assert three == pytest.approx(3 * one) and one == heuristics.LAUNCH_S["cpu"]


def test_plans_that_are_not_deterministic_come_last():
    engines = (Fake(0, "quick", seconds=(1e-9,), notes=("NONDETERMINISTIC",)), Fake(1, "slow", seconds=(1e-3,), notes=("TENSOR_CORE",)))
    plans = candidates.create(add_relu(), CPU, engines=engines)
    assert [p.numeric_notes[0].name for p in plans][:2] == ["TENSOR_CORE", "NONDETERMINISTIC"]


def test_rejections_are_kept_with_node_and_reason():
    plans = candidates.create(fp8_pattern(), CPU)
    found = {(r.engine, r.region): r for r in plans.rejections}
    assert found["pointwise", "r0"].node == "mm" and "anchor" in found["pointwise", "r0"].reason
    assert "pointwise (r0, node 'mm')" in str(found["pointwise", "r0"])


def test_a_cut_that_an_engine_asks_for_is_tried():
    graph = add_relu()
    middle = graph.nodes[0].output_ids[0]
    picky = Fake(0, "picky", takes=single, seconds=(1e-9,), cut=middle)
    any_engine = Fake(1, "any", seconds=(1e-3,))
    plans = candidates.create(graph, CPU, engines=(picky, any_engine))
    assert plans.name_at(0) == f"cut{middle}|r0:eng0|r1:eng0" and plans.plan_at(0).partition.materialized == (middle,)
    assert any(p.name == "r0:eng1" for p in plans)


def test_regions_that_nobody_takes_are_split_into_single_ops():
    plans = candidates.create(chain(), CPU, engines=(Fake(takes=single),))
    assert len(plans.plan_at(0).partition.regions) == 5 and plans.name_at(0).startswith("split|r0")
    assert any("matmul" in r.reason and r.region == "r1" for r in plans.rejections)


def test_no_engine_at_all():
    with pytest.raises(NotSupportedError) as caught:
        candidates.create(chain(), CPU, engines=(Fake(takes=lambda g, r: False),))
    text = str(caught.value)
    assert "No valid execution plans" in text and "fake (r0, node 'mm0'): fake does not want matmul" in text
    assert CPU.name in text and "graphdnn" in text and "Python" in text
    assert not isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("mode", ["A", "B", "OPENSOURCE", "FALLBACK"])
def test_every_mode_gives_plans(mode):
    assert candidates.create(fp8_pattern(), CPU, [mode]).count() >= 1


def test_fallback_takes_the_last_engine_with_its_own_guess():
    engines = (Fake(0, "a", seconds=(1e-9,)), Fake(1, "b", seconds=(5e-6, 1e-6)))
    assert candidates.create(add_relu(), CPU, ["FALLBACK"], engines=engines).name_at(0) == "r0:eng1_k12=0"
    with pytest.raises(BuildError, match="unknown heuristic mode"):
        candidates.create(add_relu(), CPU, ["C"], engines=engines)


def test_an_empty_graph_has_a_plan():
    plans = candidates.create(OperationGraph((), ()), CPU)
    plans.build()
    assert plans.chosen.name == "empty" and plans.workspace_bytes == 0
    plans.chosen.execute({}, None)


# ------------------------------------------------------------------------------------------------------------------------------ plan lists
def test_bad_indexes():
    plans = candidates.create(add_relu(), CPU)
    for index in (-1, plans.count(), 10**9, True, 1.5):
        with pytest.raises(BuildError, match="is invalid"):
            plans.plan_at(index)
        with pytest.raises(BuildError):
            plans.build_at(index)


def test_nothing_built_yet():
    plans = candidates.create(add_relu(), CPU)
    assert plans.chosen_index == -1
    for get in (lambda: plans.chosen, lambda: plans.workspace_bytes):
        with pytest.raises(BuildError, match="Plan index -1 is invalid"):
            get()
    with pytest.raises(BuildError, match="not built"):
        plans.plan_at(0).execute({}, None)


def test_engines_and_knobs():
    plans = candidates.create(fp8_pattern(), H200)
    assert plans.engine_count() == 1 + max(e.id for e in ENGINES)
    (knob,) = plans.knobs_for_engine(2)
    assert knob == KnobRange("KERNEL_CFG", 0, knob.max_value, 1) and knob.max_value > 0
    with pytest.raises(BuildError, match="anchor"):
        plans.knobs_for_engine(0)
    with pytest.raises(BuildError, match="no such engine"):
        plans.knobs_for_engine(99)


def test_custom_plans():
    plans = candidates.create(fp8_pattern(), H200, modes=())
    assert plans.count() == 0
    with pytest.raises(NotSupportedError, match="no plan has been created"):
        plans.check_support()
    index = plans.add_custom(2, {"KERNEL_CFG": 1})
    assert plans.name_at(index) == "r0:eng2_k12=1"
    assert plans.name_at(plans.add_custom(2, {})) == "r0:eng2_k12=0"
    plans.check_support()
    for engine, knobs in ((99, {}), (0, {}), (2, {"KERNEL_CFG": 1000}), (2, {"KERNEL_CFG": -1}), (2, {"TILE_SIZE": 1})):
        with pytest.raises(BuildError):
            plans.add_custom(engine, knobs)
    assert plans.count() == 2


def test_a_custom_plan_changes_the_costliest_region_that_the_engine_takes():
    engines = (Fake(0, "a", seconds=(1e-6, 2e-6)), Fake(1, "b", takes=lambda g, r: candidates.region_name(g, r) != "mm2", seconds=(5e-6,)))
    plans = candidates.create(chain(), CPU, modes=(), engines=engines)
    assert plans.name_at(plans.add_custom(1)) == "r0:eng1|r1:eng0_k12=0|r2:eng0_k12=0"


def test_notes():
    engines = (Fake(0, "a", seconds=(1e-9,), notes=("NONDETERMINISTIC",)), Fake(1, "b", seconds=(1e-3,)))
    graph = add_relu()
    make = lambda: candidates.create(graph, CPU, engines=engines)  # noqa: E731
    assert [n.name for n in make().plan_at(0).behavior_notes] == ["RUNTIME_COMPILATION"]
    for change, left in (
        (lambda p: p.select_behavior_notes(["RUNTIME_COMPILATION"]), 3),
        (lambda p: p.select_behavior_notes(["CUBLASLT_DEPENDENCY"]), 0),
        (lambda p: p.deselect_behavior_notes(["CUBLASLT_DEPENDENCY"]), 3),
        (lambda p: p.deselect_behavior_notes(["RUNTIME_COMPILATION"]), 0),
        (lambda p: p.select_numeric_notes(["NONDETERMINISTIC"]), 1),
        (lambda p: p.deselect_numeric_notes(["NONDETERMINISTIC"]), 2),
        (lambda p: p.deselect_engines(["eng1"]), 1),
        (lambda p: p.deselect_engines("eng"), 0),
        (lambda p: p.deselect_engines([]), 3),
    ):
        plans = make()
        change(plans)
        assert plans.count() == 3, "indexes stay"
        assert sum(not plans.obstacle(i) for i in range(3)) == left
        if not left:
            with pytest.raises(NotSupportedError, match="rejected or deselected"):
                plans.check_support()


def test_eng1_is_not_eng10():
    plans = candidates.create(add_relu(), CPU, engines=(Fake(1, "a"), Fake(10, "b")))
    plans.deselect_engines(["eng1"])
    assert [bool(plans.obstacle(i)) for i in range(2)] == [True, False]


def test_deselect_by_workspace():
    plans = candidates.create(add_relu(), CPU, engines=(Fake(0, "big", seconds=(1e-9,), scratch=1000), Fake(1, "small", scratch=10)))
    plans.deselect_workspace_greater_than(999)
    assert "more than 999" in plans.obstacle(0) and not plans.obstacle(1)
    with pytest.raises(NotSupportedError, match="cannot be used"):
        plans.build_at(0)


def test_a_plan_that_does_not_compile_is_passed_over_and_kept_as_a_rejection(empty_cache):
    """The fake's template does not exist; the real engine comes second."""
    plans = candidates.create(add_relu(), CPU, engines=(Fake(50, "broken", seconds=(1e-9,)), *ENGINES))
    assert "broken" in plans.plan_at(0).choices[0].name
    plans.build()
    assert plans.chosen_index > 0
    assert any("eng50" in r.engine for r in plans.rejections)


def test_when_nothing_compiles(empty_cache):
    plans = candidates.create(add_relu(), CPU, engines=(Fake(50, "broken", seconds=(1e-9,) * 9),))
    with pytest.raises(BuildError, match="no plan could be built"):
        plans.build()
    assert plans.chosen_index == -1


def test_build_all_and_build_at():
    plans = candidates.create(add_relu(), CPU)
    plans.build("ALL")
    assert all(p.built for p in plans) and plans.chosen_index == 0
    last = plans.count() - 1
    plans.build_at(last)
    assert plans.chosen_index == last


# ------------------------------------------------------------------------------------------------------------------------------ workspace
def test_arena_reuses_memory_whose_time_is_over():
    a = Arena()
    assert a.place(100, 0, 1) == 0
    assert a.place(100, 1, 2) == 256, "both live in region 1"
    assert a.place(100, 2, 3) == 0
    assert a.place(300, 0, 0) == 256, "aligned"
    assert a.size == 556
    assert a.place(0, 0, 9) % 256 == 0 and a.size == 556


def test_arena_never_overlaps():
    rng = np.random.default_rng(0)
    for _ in range(50):
        a, placed = Arena(), []
        for _ in range(20):
            size, first = int(rng.integers(1, 1000)), int(rng.integers(0, 6))
            last = first + int(rng.integers(0, 4))
            at = a.place(size, first, last)
            assert at % 256 == 0 and at + size <= a.size
            assert all(last < f or e < first or at + size <= p or p + s <= at for p, s, f, e in placed)
            placed.append((at, size, first, last))


def test_intermediates_and_scratch_share_the_workspace():
    graph = chain()
    plan = candidates.create(graph, CPU, engines=(Fake(scratch=600),)).plan_at(0)
    recipe = plan.recipe
    assert {graph.tensors[t].name for t in plan.partition.materialized} == {"relu0::OUT_0", "relu1::OUT_0"}
    launches = assemble.launches(recipe)
    assert len(launches) == 3 and len(recipe.kernels) == 3 and plan.region_kernels == ((0,), (1,), (2,))
    spots = [b for b in assemble.buffers(recipe) if b.kind == "workspace"]
    assert all(b.index == 0 for b in spots), "no scratch-relative buffer is left"
    assert max(b.offset for b in spots) < recipe.workspace <= 2 * 256 + 600 + 256, "the scratch of the three regions is the same memory"
    for n, t in enumerate(plan.partition.materialized):  # what region n stores is where region n + 1 reads it
        at = [x.args[[p.name for p in recipe.kernels[x.kernel].params].index(f"t{t}")] for x in launches[n : n + 2]]
        assert at[0] == at[1] and at[0].kind == "workspace"


def test_panels_are_relocated_whole():
    spec = KernelSpec("t", "k", (PointerParam("p", "float32"), ScalarParam("n", "int64")))
    scratch, first = Buffer("workspace", -1, 64), Constant(0, "int64")
    launch = Launch(0, 4, (scratch, first))
    matrix = Matrix(scratch, F32, (1, 4, 4), (0, 4, 1))
    panels = Panels(matrix, Matrix(Buffer("tensor", 3), F32, (1, 4, 4), (0, 4, 1)), matrix, 2, launch, launch, None)

    class Paneled(Fake):
        id, name = 0, "paneled"

        def _lower(self, graph, region, device, knobs, memory):
            return Recipe((spec,), (panels,), 128)

    (step,) = candidates.create(add_relu(), CPU, engines=(Paneled(),)).plan_at(0).recipe.steps
    assert isinstance(step, Panels)
    spots = [step.a.buffer, step.panel.buffer, step.epilogue.args[0], step.pack_a.args[0]]
    assert all(b == Buffer("workspace", 0, 64) for b in spots) and step.b.buffer == Buffer("tensor", 3) and step.pack_b is None


def test_equal_kernels_are_compiled_once():
    b = Builder()
    x = b.tensor("x", (8,))
    ids = [b.op("POINTWISE", "relu", (x,), (8,), mode="RELU_FWD")]
    ids.append(b.op("POINTWISE", "neg", (b.op("POINTWISE", "relu2", (ids[0],), (8,), mode="RELU_FWD"),), (8,), mode="NEG"))
    b.out(*ids)
    graph = b.graph()
    made = heuristics.candidate(regions.unfused(graph), [heuristics.Option(Fake(), FakeKnobs(), 0, 0.0)] * 3, "cpu")

    class Same(Fake):
        id, name = 0, "same"

        def _lower(self, graph, region, device, knobs, memory):
            spec = KernelSpec("t", "same", (PointerParam("x", "float32"), PointerParam("y", "float32")))
            return Recipe((spec,), (Launch(0, 1, (memory[region.reads[0]], memory[region.stores[0]])),))

    option = heuristics.Option(Same(), FakeKnobs(), 0, 0.0)
    recipe, owned = assemble.assemble(graph, CPU, replace(made, options=(option,) * 3))
    assert len(recipe.kernels) == 1 and [x.kernel for x in assemble.launches(recipe)] == [0, 0, 0] and owned == ((0,),) * 3


# ------------------------------------------------------------------------------------------------------------------------------ running
def _pattern_data():
    rng = np.random.default_rng(7)
    pack = {"x": rng.standard_normal((2, 8, 16)), "w": rng.standard_normal((1, 16, 12)), "bias": rng.standard_normal((1, 1, 12))}
    pack = {k: v.astype(np.float32) for k, v in pack.items()}
    return pack | {"gelu::OUT_0": np.full((2, 8, 12), np.nan, np.float32), "amax::Y": np.full((1, 1, 1), np.nan, np.float32)}


def test_every_plan_gives_the_same_answer():
    plans = candidates.create(fp8_pattern(), CPU)
    plans.build("ALL")
    seen = []
    for plan in plans:
        pack = _pattern_data()
        plan.execute(pack, np.full(plan.workspace_bytes, 255, np.uint8))
        seen.append(pack["gelu::OUT_0"])
        assert pack["amax::Y"].item() == np.abs(seen[-1]).max()
    for other in seen[1:]:
        np.testing.assert_allclose(other, seen[0], rtol=2e-5, atol=2e-5)


def test_a_plan_of_several_kernels_in_a_workspace_with_guards():
    plan = candidates.create(chain(), CPU).plan_at(0).build()
    assert len(plan.partition.regions) == 3 and plan.workspace_bytes > 0
    pack, expected = chain_data()
    room = np.full(plan.workspace_bytes + 512, 171, np.uint8)
    plan.execute(pack, room[256 : 256 + plan.workspace_bytes])
    np.testing.assert_allclose(pack["mm2::C"], expected, rtol=1e-5, atol=1e-5)
    assert (room[:256] == 171).all() and (room[-256:] == 171).all()


def test_eight_threads_on_one_plan():
    plan = candidates.create(softmax(), CPU).plan_at(0).build()
    failures: list[str] = []

    def work(seed: int) -> None:
        x = np.random.default_rng(seed).standard_normal((64, 128)).astype(np.float32)
        room = np.empty(plan.workspace_bytes, np.uint8)
        first = None
        for _ in range(100):
            y = np.empty((64, 128), np.float32)
            plan.execute({"x": x, "normalize::OUT_0": y}, room)
            first = y if first is None else first
            if first.tobytes() != y.tobytes():
                failures.append(f"thread {seed}")

    threads = [threading.Thread(target=work, args=(s,)) for s in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_threads_may_build_one_plan_at_once(empty_cache):
    plan = candidates.create(add_relu(25), CPU).plan_at(0)
    threads = [threading.Thread(target=plan.build) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    y = np.empty(25, np.float32)
    plan.execute({"x": np.ones(25, np.float32), "z": np.ones(25, np.float32), "relu::OUT_0": y}, np.empty(plan.workspace_bytes, np.uint8))
    assert (y == 2).all()


def test_in_place_through_a_real_plan():
    plan = candidates.create(add_relu(), CPU).plan_at(0).build()
    x = np.linspace(-2, 2, 24, dtype=np.float32)
    expected = np.maximum(2 * x, 0)
    plan.execute({"x": x, "z": x.copy(), "relu::OUT_0": x}, None)
    np.testing.assert_array_equal(x, expected)


def test_looking_into_a_plan():
    plan = candidates.create(fp8_pattern(), CPU).plan_at(0)
    assert "def " in plan.source and "not built" in repr(plan) and not plan.built
    with pytest.raises(BuildError):
        plan.kernels  # noqa: B018
    plan.build()
    assert plan.ptx.strip() == "" and "built" in repr(plan) and plan.name in repr(plan) and "cpu" in repr(plan)
    assert {r["name"] for r in plan.resources} == {k.name for k in plan.kernels} == {k.name for k in plan.recipe.kernels}
    assert all(k.source in plan.source for k in plan.kernels)
    with pytest.raises(BuildError, match="machine code"):
        plan.sass  # noqa: B018


def test_a_plan_for_a_described_device():
    plan = candidates.create(add_relu(), H200).plan_at(0).build()
    assert ".target sm_90a" in plan.ptx and plan.kernels[0].registers > 0 and plan.kernels[0].spill_bytes == 0
    with pytest.raises(ExecutionError, match="described device"):
        plan.execute({1: 16, 2: 32, 4: 48}, None)


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
@pytest.mark.parametrize("built", [True, False])
def test_plans_travel(how, built):
    plan = candidates.create(add_relu(), CPU).plan_at(0)
    if built:
        plan.build()
    twin = pickle.loads(pickle.dumps(plan)) if how == "pickle" else copy.deepcopy(plan)
    assert twin.built is built and twin.name == plan.name
    x, y = np.linspace(-2, 2, 24, dtype=np.float32), np.empty(24, np.float32)
    twin.build().execute({1: x, 2: x, 4: y}, None)
    np.testing.assert_array_equal(y, np.maximum(2 * x, 0))


def test_a_described_plan_travels_too():
    plan = candidates.create(add_relu(), H200).plan_at(0).build()
    assert pickle.loads(pickle.dumps(plan)).ptx == plan.ptx


def test_buffers_less_aligned_than_declared_get_a_plan_of_their_own():
    """In the simulator, which checks alignment as a GPU does."""
    plan = candidates.create(add_relu(), devices.cudasim()).plan_at(0).build()
    raw = np.zeros(200, np.float32)
    base = (-raw.__array_interface__["data"][0] % 16) // 4  # element at which 16-byte alignment begins
    x, z, y = raw[base + 1 : base + 25], raw[base + 64 : base + 88], raw[base + 130 : base + 154]
    x[:], z[:] = np.linspace(-2, 2, 24), 1
    for _ in range(2):
        plan.execute({"x": x, "z": z, "relu::OUT_0": y}, None)
        np.testing.assert_array_equal(y, np.maximum(x + z, 0))
    assert len(plan._guards) == 1
    twisted = raw.view(np.uint8)[4 * base + 2 :].view()
    with pytest.raises(ValidationError, match="not aligned as declared.*set_alignment"):
        plan.execute({"x": twisted.__array_interface__["data"][0], "z": z, "relu::OUT_0": y}, None)
    loaded = serialize.load(serialize.dump(plan), devices.cudasim())
    loaded._candidate = None  # as a plan for a GPU, which is not lowered again
    with pytest.raises(ValidationError, match="set_alignment"):
        loaded.execute({"x": x, "z": z, "relu::OUT_0": y}, None)
