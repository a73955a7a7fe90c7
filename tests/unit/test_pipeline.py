"""Pipelines: memory laid out by lifetimes, what does not fit together, captures against a driver written in Python."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type
from graphdnn.errors import BuildError, ExecutionError, KindError, NotSupportedError, SerializationError, ValidationError
from graphdnn.plans.assemble import ALIGNMENT
from graphdnn.plans.container import seal, unseal
from graphdnn.plans.pipeline import Buffer, layout
from graphdnn.plans.pipeline_file import FORMAT, MAGIC
from graphdnn.targets import cuda_driver
from tests.fake_driver import FLOAT, AnyKernel, install, on_gpu
from tests.helpers import built
from tests.unit.fake_graph import FakeGraphs
from tests.unit.test_executor import CudaArray

CPU = {"device": "cpu"} | FLOAT


# ------------------------------------------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize("seed", range(40))
def test_what_is_alive_at_once_shares_no_byte(seed):
    """Against brute force: every byte of every stage has at most one owner. And the plan is no larger than everything side by side."""
    rng = random.Random(seed)
    count = rng.randrange(1, 7)
    stages = [SimpleNamespace(plan=SimpleNamespace(workspace_bytes=rng.choice([0, 0, 1, 300, 1000, 5000]))) for _ in range(count)]
    within = []
    for number in range(rng.randrange(0, 9)):
        first = rng.randrange(count)
        last = rng.randrange(first, count)
        within.append(Buffer(f"b{number}", data_type.FLOAT, rng.randrange(0, 4000), reads=[last], writes=[first]))
    made = layout(within, stages)
    for stage in range(count):
        owner = np.full(made.nbytes, -1)
        spans = [(made.places[b.name], b.nbytes) for b in within if b.life[0] <= stage <= b.life[1]]
        spans.append((made.scratch[stage], stages[stage].plan.workspace_bytes))
        for number, (start, size) in enumerate(spans):
            assert 0 <= start and start + size <= made.nbytes and (owner[start : start + size] == -1).all()
            owner[start : start + size] = number
    assert all(at % ALIGNMENT == 0 for at in (*made.places.values(), *made.scratch))
    assert made.nbytes <= sum(-(-b.nbytes // ALIGNMENT) * ALIGNMENT for b in made.blocks)


def test_a_chain_of_equal_buffers_needs_two():
    """Stage i reads buffer i - 1 and writes buffer i: the third lies where the first did."""
    within = [Buffer(f"b{n}", data_type.FLOAT, 1 << 16, reads=[n + 1], writes=[n]) for n in range(6)]
    made = layout(within, [SimpleNamespace(plan=SimpleNamespace(workspace_bytes=0))] * 7)
    assert made.nbytes == 2 << 16 and made.places["b0"] == made.places["b2"] == made.places["b4"]


# ------------------------------------------------------------------------------------------------------------------------------- graphs
@functools.cache
def unary(mode: str, dim=(4, 8), device: str = "cpu", **kwargs):
    """y = mode(x)."""
    g = graphdnn.pygraph(mode, **FLOAT | {"device": device})
    getattr(g, mode)(g.tensor(dim=dim, layout="row", name="x", **kwargs)).set_output(True).set_name("y")
    return built(g)


def test_names_inputs_and_outputs():
    """By tensor, uid and name. A buffer that is read first is an input, one that is written over is both, one that nobody reads later an output."""
    first, second, third = unary("relu"), unary("neg"), unary("exp")
    x = first.query_tensor_attributes_of_uid(next(t.get_uid() for t in first._tensors if t.get_name() == "x"))
    uid = next(t.get_uid() for t in second._tensors if t.get_name() == "y")
    p = graphdnn.Pipeline().add(first, {x: "a", "y": "b"}).add(second, {"x": "b", uid: "a"}).add(third, {"x": "a", "y": "c"})
    p.build()
    assert (p.inputs, p.outputs, p.intermediates) == (("a",), ("a", "c"), ("b",))
    a = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    pack, before = {"a": a, "c": np.empty_like(a)}, a.copy()
    p.execute(pack, np.empty(p.workspace_bytes, np.uint8))
    assert np.array_equal(a, -np.maximum(before, 0)) and np.allclose(pack["c"], np.exp(a), rtol=1e-6)
    text = p.explain()
    assert "3 graphs" in text and "input and output" in text and "intermediate" in text and "relu" in text
    assert "3 graphs" in repr(p) and p.get_workspace_size() == p.workspace_bytes == 128


def test_in_place_intermediates_and_negative_strides():
    """h is written, changed in place, read from its end backwards; nothing is written outside of the workspace."""
    make, change = unary("relu"), unary("neg")
    back = graphdnn.pygraph(**CPU)
    x = back.tensor(dim=(32,), stride=(-1,), name="x")
    back.identity(x).set_output(True).set_name("y").set_dim((32,)).set_stride((1,))
    built(back)
    p = graphdnn.Pipeline().add(make, {"y": "h"}).add(change, {"x": "h", "y": "h"}).build()
    assert p.outputs == ("h",), "nobody reads it after the last write"
    p.add(back, {"x": "h", "y": "z"}).build()
    values = np.arange(-16, 16, dtype=np.float32)
    room = np.full(p.workspace_bytes + 64, 0xA5, np.uint8)
    pack = {"x": values, "z": np.empty(32, np.float32)}
    p.execute(pack, room[: p.workspace_bytes])
    assert np.array_equal(pack["z"], -np.maximum(values, 0)[::-1]) and (room[p.workspace_bytes :] == 0xA5).all()


def test_numbers():
    """A by-value tensor is a name in the pack; with a value of its own it may be left out."""

    def scaled(**value):
        g = graphdnn.pygraph(**CPU)
        x = g.tensor(dim=(4,), layout="row", name="x")
        s = g.tensor_scalar(3.0, graphdnn.scalar_type.RUNTIME_PARAM).set_name("s") if value else g.tensor((1,), (1,), is_pass_by_value=True, name="s")
        g.mul(x, s).set_output(True).set_name("y")
        return built(g)

    x, y = np.ones(4, np.float32), np.empty(4, np.float32)
    p = graphdnn.Pipeline().add(scaled()).build()
    p.execute({"x": x, "y": y, "s": 2.0})
    assert (y == 2).all()
    with pytest.raises(ValidationError, match="missing buffers.*'s'"):
        p.execute({"x": x, "y": y})
    p = graphdnn.Pipeline().add(scaled(value=True)).build()
    p.execute({"x": x, "y": y})
    assert (y == 3).all()
    with pytest.raises(ValidationError, match="buffer 's' is passed in two ways"):
        graphdnn.Pipeline().add(scaled()).add(unary("relu", (1,)), {"x": "s", "y": "z"}).build()


def test_what_does_not_fit_together():
    relu, small, half = unary("relu"), unary("neg", (4, 7)), unary("exp", data_type=data_type.HALF)
    P = graphdnn.Pipeline
    for make, error, text in (
        (lambda: P().build(), BuildError, "no graphs"),
        (lambda: P().workspace_bytes, BuildError, "not built"),
        (lambda: P().add("graph"), KindError, "pygraph"),
        (lambda: P().add(graphdnn.pygraph(**CPU)), BuildError, "no execution plans"),
        (lambda: P().add(relu, ["x"]), KindError, "buffers has the wrong type"),
        (lambda: P().add(relu, {"z": "a"}), ValidationError, "stage 0 .'relu'.*no such tensor.*found 'z'"),
        (lambda: P().add(relu, {1.5: "a"}), KindError, "a key has the wrong kind.*float"),
        (lambda: P().add(relu, {"x": ""}), KindError, "has no name"),
        (lambda: P().add(relu, {"x": "a", "y": "a"}).add(half, {"x": "a", "y": "b"}).build(), ValidationError, "two data types.*FLOAT, found HALF"),
        (lambda: P().add(small, {"y": "h"}).add(relu, {"x": "h", "y": "z"}).build(), ValidationError, "read further.*at most 112 bytes, found 128"),
        (lambda: P().add(relu).build(["x"]), ValidationError, "no stage writes.*'y'.*found 'x'"),
        (lambda: P().add(relu).build("y"), KindError, "keep has the wrong type.*list of str"),
        (lambda: P().add(relu).build().replay(), ExecutionError, "nothing was captured"),
        (lambda: P().add(relu).add(unary("neg", device="sm_90")), ValidationError, "are of one device"),
        (lambda: P(handle=graphdnn.create_handle("cudasim")).add(relu), ValidationError, "are of one device; expected cudasim, found cpu"),
        (
            lambda: P.deserialize(P().add(relu).build().serialize(), graphdnn.create_handle("cudasim"), "cpu"),
            ValidationError,
            "handle and the device disagree",
        ),
    ):
        with pytest.raises(error, match=text):
            make()


def test_packs_are_checked_before_anything_runs():
    p = graphdnn.Pipeline().add(unary("relu"), {"y": "h"}).add(unary("neg"), {"x": "h", "y": "y"}).add(unary("exp"), {"y": "z"}).build()
    x = np.ones((4, 8), np.float32)
    good, ws = {"x": x, "y": np.zeros_like(x), "z": np.zeros_like(x)}, np.empty(p.workspace_bytes, np.uint8)
    for pack, workspace, error, text in (
        ({"x": x, "y": x}, ws, ValidationError, "missing buffers.*'z'"),
        (good | {"z": None}, ws, ValidationError, "missing buffers.*'z'"),
        (good | {"h": x}, ws, ValidationError, "'h' is an intermediate.*keep=.'h'"),
        (good | {"q": x}, ws, ValidationError, "'q' is in no stage; expected buffers named x, y, z"),
        (good | {"z": np.zeros((4, 8))}, ws, ValidationError, "wrong data type"),
        (good | {"z": np.zeros((4, 7), np.float32)}, ws, ValidationError, "too small"),
        (good, None, ValidationError, "needs a workspace"),
        (good, ws[1:], ValidationError, "workspace is too small"),
        ([], ws, KindError, "pack of a pipeline"),
        ({1: x}, ws, KindError, "pack of a pipeline"),
    ):
        with pytest.raises(error, match=text):
            p.execute(pack, workspace)
        assert not good["y"].any(), "the first graphs have not run"
    with pytest.raises(ValidationError) as caught:
        p.execute(good | {"z": np.zeros((4, 8))}, ws)
    assert caught.value.__notes__ == ["pipeline: stage 2 ('exp')"]


# ------------------------------------------------------------------------------------------------------------------------------ captures
@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    return install(monkeypatch, FakeGraphs(AnyKernel()))


@pytest.mark.parametrize("run", ["execute", "capture"])
def test_arrays_on_another_gpu_are_refused(monkeypatch, run):
    """With the workspace as an address, the stage between would run on the pipeline's own GPU, in memory of the other."""
    made = three(install(monkeypatch, FakeGraphs(AnyKernel(), devices=2)))
    shapes = {"x": (96, 64), "w": (64, 80), "y": (96, 80)}
    arrays = {name: CudaArray(address, 1, shapes[name]) for name, address in PACK.items()}
    with pytest.raises(ValidationError, match=r"GPU that it was built for(.|\n)*cuda:0(.|\n)*cuda:1"):
        getattr(made, run)(arrays, WORKSPACE)


def three(fake: FakeGraphs):
    def product(g):
        x, w = g.tensor(dim=(96, 64), layout="row", name="x"), g.tensor(dim=(64, 80), layout="row", name="w")
        y = g.matmul(x, w)
        y.set_output(True).set_name("h")
        g.reduction(y, graphdnn.reduction_mode.ADD).set_dim((1, 1)).set_output(True).set_name("sum")

    def change(g):
        g.relu(g.tensor(dim=(96, 80), layout="row", name="h")).set_output(True).set_name("r")

    def finish(g):
        g.add(g.tensor(dim=(96, 80), layout="row", name="r"), g.tensor(dim=(1, 1), layout="row", name="sum")).set_output(True).set_name("y")

    p = graphdnn.Pipeline()
    for declare in (product, change, finish):
        p.add(on_gpu(fake, declare))
    return p.build()


PACK = {"x": 1 << 20, "w": 2 << 20, "y": 3 << 20}
WORKSPACE = 1 << 30


def enqueued(fake: FakeGraphs, run) -> list[tuple]:
    fake.log.clear()
    run()
    shown = {"launch": lambda e: ("launch", *e[1:5], e[6]), "memset": lambda e: e[:4]}
    return [shown[e[0]](e) for e in fake.log if e[0] in shown]


def test_a_capture_holds_what_execute_enqueues(fake):
    """One driver call a replay, on the stream of the call; pipeline, graphs and plans are gone before it. The last reference frees the graph."""
    pipelines = [three(fake)]
    wanted = enqueued(fake, lambda: pipelines[0].execute(PACK, WORKSPACE))
    assert len(wanted) > 3 and {a for s in wanted if s[0] == "launch" for a in s[5]} >= set(PACK.values())
    captured = pipelines[0].capture(PACK, WORKSPACE)
    assert not fake.graphs, "the template is destroyed"
    pipelines.clear()
    gc.collect()
    fake.stack.append(cuda_driver.primary_context(0))
    fake.log.clear()
    fake.calls.clear()
    for stream in (0, 0x77):
        captured.launch(stream)
        assert fake.log[-1] == ("graph", wanted, stream)
    assert fake.calls == ["cuCtxGetCurrent", "cuStreamIsCapturing", "cuGraphLaunch"] * 2
    del captured
    gc.collect()
    assert not fake.executed


def test_replay_uses_the_stream_of_the_handle(fake):
    p, handle = three(fake), graphdnn.create_handle("cuda:0")
    p.capture(PACK, WORKSPACE)
    graphdnn.set_stream(handle, 0x99)
    p.replay(handle)
    assert fake.log[-2][0] == "graph" and fake.log[-2][2] == 0x99
    with pytest.raises(ExecutionError, match="another device"):
        p.replay(graphdnn.create_handle("cpu"))
    p.build()
    with pytest.raises(ExecutionError, match="nothing was captured"):
        p.replay()


def test_a_capture_inside_a_capture_is_refused(fake):
    p, handle = three(fake), graphdnn.create_handle("cuda:0")
    graphdnn.set_stream(handle, 0x99)
    fake.captured.add(0x99)
    with pytest.raises(ExecutionError, match="a capture is under way on this stream already.*stream 0x99.*before it begins"):
        p.capture(PACK, WORKSPACE, handle)
    assert not fake.graphs and not fake.executed
    fake.captured.clear()
    p.capture(PACK, WORKSPACE, handle)


def test_a_stage_that_fails_to_run_is_named(fake):
    p = three(fake)
    p.execute(PACK, WORKSPACE)
    fake.fail["cuLaunchKernelEx"] = 700
    with pytest.raises(ExecutionError) as caught:
        p.execute(PACK, WORKSPACE)
    assert caught.value.__notes__ == ["pipeline: stage 0 ('test_graph')"]


def test_a_failed_capture_leaves_nothing(fake):
    p = three(fake)
    fake.fail["cuGraphInstantiateWithFlags"] = 1
    with pytest.raises(ExecutionError, match="cuGraphInstantiateWithFlags.*INVALID_VALUE"):
        p.capture(PACK, WORKSPACE)
    assert not fake.graphs and not fake.executed and fake.stack == []


def test_a_cpu_has_no_captures():
    p = graphdnn.Pipeline().add(unary("relu")).build()
    x = np.ones((4, 8), np.float32)
    with pytest.raises(NotSupportedError, match="only plans of CUDA devices.*of cpu"):
        p.capture({"x": x, "y": x.copy()})


# --------------------------------------------------------------------------------------------------------------------------------- files
def stored() -> bytes:
    return graphdnn.Pipeline("p").add(unary("relu"), {"y": "h"}).add(unary("neg"), {"x": "h"}).build().serialize()


def test_damaged_files():
    """Every damage is a typed error: cut, changed anywhere, longer, of another kind; so are files of wrong content with a right checksum."""
    data, rng = stored(), random.Random(0)
    plan = bytes(unary("relu").serialize())
    damaged = [b"", data[:7], data[:51], data[:-1], data + b"\0", plan, b"GDNNPLAN" + data[8:]]
    for _ in range(60):
        at = rng.randrange(len(data))
        damaged.append(data[:at] + bytes([data[at] ^ rng.randrange(1, 256)]) + data[at + 1 :])
    for bad in damaged:
        with pytest.raises(SerializationError, match="pipeline"):
            graphdnn.Pipeline.deserialize(bad)
    with pytest.raises(SerializationError, match="not a serialized plan"):
        graphdnn.pygraph(**CPU).deserialize(data)
    with pytest.raises(KindError):
        graphdnn.Pipeline.deserialize(3.0)
    content, blobs = unseal(data, MAGIC, FORMAT, "pipeline", "")
    first, second = content["stages"]
    for change in (
        {"graphdnn": "0.0"},
        {"stages": []},
        {"stages": [first]},
        {"stages": [first, second | {"size": -5}]},
        {"stages": [first, second | {"size": "5"}]},
        {"stages": [first, second | {"names": {"x": "h"}}]},
        {"stages": [first, second | {"names": {"99": "h"}}]},
        {"stages": [first, second | {"names": {next(iter(second["names"])): 3}}]},
        {"stages": [first, 3]},
        {"stages": None},
        {"keep": ["x"]},
        {"keep": [3]},
        {"name": 3},
    ):
        with pytest.raises(SerializationError, match="pipeline"):
            graphdnn.Pipeline.deserialize(seal(MAGIC, FORMAT, content | change, [bytes(blobs)]))


def test_a_file_for_another_device(fake):
    described = graphdnn.Pipeline().add(unary("relu", device="sm_90")).build()
    data = described.serialize()
    for device in ("cpu", "sm_80"):
        with pytest.raises(SerializationError, match="another device"):
            graphdnn.Pipeline.deserialize(data, device=device)
    with pytest.raises(SerializationError, match="another device"):
        graphdnn.Pipeline.deserialize(data, graphdnn.create_handle("cpu"))
    fake.parameters.declare(SimpleNamespace(plan=described._stages[0].plan))
    loaded = graphdnn.Pipeline.deserialize(data, graphdnn.create_handle("cuda:0"))
    loaded.execute({"x": 1 << 20, "y": 2 << 20})
    assert fake.log[-2][0] == "launch"
    with pytest.raises(ExecutionError, match="described device"):
        described.execute({"x": 1 << 20, "y": 2 << 20})


def test_copies():
    p = graphdnn.Pipeline("p").add(unary("relu"), {"y": "h"}).add(unary("neg"), {"x": "h"}).build()
    x = np.arange(-16, 16, dtype=np.float32).reshape(4, 8)
    for other in (pickle.loads(pickle.dumps(p)), copy.deepcopy(p)):
        y = np.empty_like(x)
        other.execute({"x": x, "y": y}, np.empty(other.workspace_bytes, np.uint8))
        assert np.array_equal(y, -np.maximum(x, 0)) and other.explain() == p.explain()
    with pytest.raises(BuildError, match="not built"):
        copy.copy(graphdnn.Pipeline().add(unary("relu")))


def test_threads_share_a_pipeline():
    """Each with its own buffers and workspace."""
    p = graphdnn.Pipeline("p").add(unary("relu", (64, 64)), {"y": "h"}).add(unary("neg", (64, 64)), {"x": "h"}).build()
    wrong: list[int] = []

    def work(seed: int) -> None:
        x, y = np.random.default_rng(seed).standard_normal((64, 64)).astype(np.float32), np.empty((64, 64), np.float32)
        space = np.empty(p.workspace_bytes, np.uint8)
        for _ in range(200):
            y.fill(np.nan)
            p.execute({"x": x, "y": y}, space)
            if not np.array_equal(y, -np.maximum(x, 0)):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_tensors_without_names_are_not_shared():
    """Two graphs both call theirs "0::IN_0" and "0::OUT_0". Two tensors of one name in a graph are told apart by uid only."""

    def nameless(name: str = ""):
        g = graphdnn.pygraph(**CPU)
        x, y = (g.tensor(dim=(4,), layout="row", name=name, uid=u) for u in (1, 2))
        g.add(x, y).set_output(True).set_uid(3)
        return built(g)

    p = graphdnn.Pipeline().add(nameless(), {1: "a", 2: "b"}).add(nameless(), {1: "a", 2: "b"}).build()
    assert (p.inputs, p.outputs) == (("a", "b"), ("0/0::OUT_0", "1/0::OUT_0"))
    with pytest.raises(ValidationError, match="tensor 'x': stage 0.*several tensors have one name.*by uid"):
        graphdnn.Pipeline().add(nameless("x"), {1: "a"})
    assert graphdnn.Pipeline().add(nameless("x"), {1: "a", 2: "a"}).build().inputs == ("a",)


def test_graphs_with_dims():
    g = graphdnn.pygraph(**CPU)
    g.relu(g.tensor(dim=(graphdnn.Dim("n", 1, 64), 8), layout="row", name="x")).set_output(True).set_name("y")
    with pytest.raises(NotSupportedError, match="lays out its buffers once.*found dims n.*fixed extents"):
        graphdnn.Pipeline().add(built(g))
