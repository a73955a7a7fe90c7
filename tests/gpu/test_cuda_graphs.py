"""CUDA graphs on a real GPU: captures, plans as nodes, pipelines. Run with ``-m gpu``; TMA descriptors need an H100 or H200."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import pytest

import graphdnn
from graphdnn import _libcuda, behavior_note, data_type
from graphdnn.targets.cuda_driver import activated, primary_context
from graphdnn.targets.cuda_memory import Stream

pytestmark = pytest.mark.gpu

F32 = data_type.FLOAT
FLOAT = {"io_data_type": F32, "intermediate_data_type": F32, "compute_data_type": F32, "device": "cuda:0"}
ROWS, INNER, COLUMNS = 512, 256, 512


@pytest.fixture(scope="module")
def torch() -> Any:
    import torch

    return torch


@pytest.fixture(scope="module")
def product() -> Any:
    """A matmul on tensor cores, with TMA descriptors on a Hopper GPU, whose scaled result is also summed."""
    g = graphdnn.pygraph(**FLOAT)
    a = g.tensor(dim=(ROWS, INNER), layout="row", data_type=data_type.BFLOAT16, name="a", uid=1)
    b = g.tensor(dim=(INNER, COLUMNS), layout="row", data_type=data_type.BFLOAT16, name="b", uid=2)
    y = g.mul(g.matmul(a, b), g.tensor(dim=(1, 1), layout="row", name="s", uid=3, is_pass_by_value=True))
    y.set_output(True).set_uid(4)
    g.reduction(y, graphdnn.reduction_mode.ADD).set_dim((1, 1)).set_output(True).set_uid(5)
    g.build([graphdnn.heur_mode.A])
    assert behavior_note.SUPPORTS_CUDA_GRAPH_NATIVE_API in g.get_behavior_notes()
    if g.plan.device.arch == "sm_90a":
        assert "eng3" in g.plan.name, "the plan has TMA descriptors"
    return g


def tensors(torch: Any, seed: int, scale: float) -> dict[int, Any]:
    torch.manual_seed(seed)
    a, b = (torch.randn(s, device="cuda").to(torch.bfloat16) for s in ((ROWS, INNER), (INNER, COLUMNS)))
    nan = float("nan")
    return {1: a, 2: b, 3: scale, 4: torch.full((ROWS, COLUMNS), nan, device="cuda"), 5: torch.full((1, 1), nan, device="cuda")}


def workspace(torch: Any, g: Any) -> Any:
    return torch.full((g.get_workspace_size() + 1,), 0xFF, dtype=torch.uint8, device="cuda")


def eager(torch: Any, g: Any, pack: dict[int, Any]) -> list[Any]:
    """Results of a plain execute; the outputs of ``pack`` are NaN again afterwards."""
    g.execute(pack, workspace(torch, g))
    found = [pack[uid].clone() for uid in (4, 5)]
    for uid in (4, 5):
        pack[uid].fill_(float("nan"))
    torch.cuda.synchronize()
    assert not any(t.isnan().any() for t in found)
    return found


def same(torch: Any, pack: dict[int, Any], wanted: list[Any]) -> bool:
    torch.cuda.synchronize()
    return all(torch.equal(pack[uid], w) for uid, w in zip((4, 5), wanted, strict=True))


def test_torch_captures_on_a_side_stream(torch: Any, product: Any) -> None:
    """Inputs changed in place between replays."""
    pack, ws = tensors(torch, 1, 0.5), workspace(torch, product)
    stream, cuda_graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(cuda_graph, stream=stream):
        product.execute(pack, ws)
    for seed in (2, 3):
        pack[1].copy_(tensors(torch, seed, 0.5)[1])
        wanted = eager(torch, product, pack)
        cuda_graph.replay()
        assert same(torch, pack, wanted)


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["global", "of the thread", "relaxed"])
def test_a_raw_capture(torch: Any, product: Any, mode: int) -> None:
    """cuStreamBeginCapture in every mode on a stream of one's own, which the handle names."""
    pack, space = tensors(torch, 10 + mode, 0.25), workspace(torch, product)
    wanted = eager(torch, product, pack)
    driver, handle, stream = _libcuda.driver(), graphdnn.create_handle("cuda:0"), Stream()
    graphdnn.set_stream(handle, stream.handle)
    begin, end = (driver.new_function(name) for name in ("cuStreamBeginCapture_v2", "cuStreamEndCapture"))
    graph = ctypes.c_void_p()
    with activated(primary_context(0)):
        driver.check(begin(ctypes.c_void_p(stream.handle), ctypes.c_int(mode)), "beginning a capture")
        product.execute(pack, space, handle)
        driver.check(end(ctypes.c_void_p(stream.handle), ctypes.byref(graph)), "ending a capture")
        made = Executable(graph.value or 0)
        made.instantiate()
        assert pack[4].isnan().all()
        made.launch(stream.handle)
        assert same(torch, pack, wanted)
        made.close()


def test_a_capture_of_cuda_core(torch: Any, product: Any) -> None:
    from cuda.core import Device

    pack, space = tensors(torch, 20, 0.75), workspace(torch, product)
    wanted = eager(torch, product, pack)
    place = Device(0)
    place.set_current()
    stream, handle = place.create_stream(), graphdnn.create_handle("cuda:0")
    builder = stream.create_graph_builder()
    builder.begin_building()
    graphdnn.set_stream(handle, int(builder.stream.handle))
    product.execute(pack, space, handle)
    graph = builder.end_building().complete()
    graph.launch(stream)
    stream.sync()
    assert same(torch, pack, wanted)


def test_a_capture_of_cupy(torch: Any, product: Any) -> None:
    cupy = pytest.importorskip("cupy")
    pack, space = tensors(torch, 21, 0.75), workspace(torch, product)
    wanted = eager(torch, product, pack)
    arrays = {uid: value if uid == 3 else value.data_ptr() for uid, value in pack.items()}
    stream, handle = cupy.cuda.Stream(non_blocking=True), graphdnn.create_handle("cuda:0")
    graphdnn.set_stream(handle, stream.ptr)
    with stream:
        stream.begin_capture()
        product.execute(arrays, space.data_ptr(), handle)
        graph = stream.end_capture()
        graph.launch()
    stream.synchronize()
    assert same(torch, pack, wanted)


class Executable:
    """A CUgraph of one's own, by ctypes."""

    def __init__(self, graph: int = 0) -> None:
        self.driver = _libcuda.driver()
        self.graph = graph or self.driver.handle("cuGraphCreate", 0)
        self.executable = 0

    def instantiate(self) -> None:
        self.executable = self.driver.handle("cuGraphInstantiateWithFlags", self.graph, 0)

    def take_over(self) -> None:
        """cuGraphExecUpdate_v2."""
        update = self.driver.new_function("cuGraphExecUpdate_v2")
        info = (ctypes.c_uint64 * 4)()
        self.driver.check(update(ctypes.c_void_p(self.executable), ctypes.c_void_p(self.graph), ctypes.byref(info)), "cuGraphExecUpdate")

    def launch(self, stream: int) -> None:
        self.driver.call("cuGraphLaunch", self.executable, stream)

    def close(self) -> None:
        self.driver.call("cuGraphExecDestroy", self.executable)
        self.driver.call("cuGraphDestroy", self.graph)


def test_a_plan_as_nodes(torch: Any, product: Any) -> None:
    """Populated, instantiated, launched; then updated with other buffers and another number. Nothing runs before the launch."""
    stream = torch.cuda.Stream()
    first, second = tensors(torch, 4, 0.5), tensors(torch, 5, -2.0)
    wanted = eager(torch, product, first), eager(torch, product, second)
    spaces = workspace(torch, product), workspace(torch, product)
    with activated(primary_context(0)):
        made = Executable()
        product.populate_cuda_graph(None, first, spaces[0], made.graph)
        made.instantiate()
        torch.cuda.synchronize()
        assert first[4].isnan().all()
        made.launch(stream.cuda_stream)
        assert same(torch, first, wanted[0])
        product.update_cuda_graph(None, second, spaces[1], made.graph)
        made.take_over()
        first[4].fill_(float("nan"))
        torch.cuda.synchronize()
        made.launch(stream.cuda_stream)
        assert same(torch, second, wanted[1]) and first[4].isnan().all()
        made.close()


def test_foreign_graphs_are_refused(torch: Any, product: Any) -> None:
    pack, ws = tensors(torch, 6, 1.0), workspace(torch, product)
    with activated(primary_context(0)):
        graph = Executable().graph
        with pytest.raises(graphdnn.ExecutionError, match="not populated by this plan.*found 0 nodes"):
            product.update_cuda_graph(None, pack, ws, graph)
        product.populate_cuda_graph(None, pack, ws, graph)
        with pytest.raises(graphdnn.ExecutionError, match="not empty"):
            product.populate_cuda_graph(None, pack, ws, graph)
        other = graphdnn.pygraph(**FLOAT)
        x = other.tensor(dim=(64, 64), layout="row", name="x", uid=1)
        other.relu(x).set_output(True).set_uid(2)
        other.build([graphdnn.heur_mode.A])
        x_y = {1: torch.randn(64, 64, device="cuda"), 2: torch.empty(64, 64, device="cuda")}
        with pytest.raises(graphdnn.ExecutionError, match="not populated by this plan"):
            other.update_cuda_graph(None, x_y, None, graph)
        _libcuda.driver().call("cuGraphDestroy", graph)


def test_a_capture_outlives_graph_and_plan(torch: Any) -> None:
    g = graphdnn.pygraph(**FLOAT)
    x = g.tensor(dim=(33, 70), layout="row", name="x", uid=1)
    g.tanh(g.add(x, x)).set_output(True).set_uid(2)
    g.build([graphdnn.heur_mode.A])
    pack = {1: torch.randn(33, 70, device="cuda"), 2: torch.empty(33, 70, device="cuda")}
    cuda_graph = torch.cuda.CUDAGraph()
    g.execute(pack, None)
    wanted = pack[2].clone()
    with torch.cuda.graph(cuda_graph):
        g.execute(pack, None)
    del g, x
    gc.collect()
    pack[2].fill_(float("nan"))
    cuda_graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(pack[2], wanted)


def test_lazy_steps_in_a_capture(torch: Any) -> None:
    """A buffer less aligned than declared: refused in a capture, which goes on; after one execute with it, captured."""
    g = graphdnn.pygraph(**FLOAT)
    x = g.tensor(dim=(64, 64), layout="row", name="x", uid=1)
    g.relu(x).set_output(True).set_uid(2)
    g.build([graphdnn.heur_mode.A])
    loose = torch.randn(64 * 64 + 1, device="cuda")[1:].view(64, 64)
    y = torch.full((64, 64), float("nan"), device="cuda")
    cuda_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(cuda_graph), pytest.raises(graphdnn.ExecutionError, match="stream is being captured"):
        g.execute({1: loose, 2: y}, None)
    g.execute({1: loose, 2: y}, None)
    cuda_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(cuda_graph):
        g.execute({1: loose, 2: y}, None)
    y.fill_(float("nan"))
    cuda_graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, loose.relu())


# ------------------------------------------------------------------------------------------------------------------------------ pipelines
def three_graphs(torch: Any) -> Any:
    """A matmul with TMA descriptors, a softmax of its rows, a second matmul and a sum: eager on demand, captured."""
    first = graphdnn.pygraph("product", **FLOAT)
    a = first.tensor(dim=(ROWS, INNER), layout="row", data_type=data_type.BFLOAT16, name="a")
    b = first.tensor(dim=(INNER, COLUMNS), layout="row", data_type=data_type.BFLOAT16, name="b")
    s = first.tensor(dim=(1, 1), layout="row", name="s", is_pass_by_value=True)
    first.mul(first.matmul(a, b), s).set_output(True).set_name("h")
    second = graphdnn.pygraph("softmax", **FLOAT)
    h = second.tensor(dim=(ROWS, COLUMNS), layout="row", name="h")
    second.softmax(h, axis=-1).set_output(True).set_name("p").set_data_type(data_type.BFLOAT16)
    third = graphdnn.pygraph("back", **FLOAT)
    p = third.tensor(dim=(ROWS, COLUMNS), layout="row", data_type=data_type.BFLOAT16, name="p")
    c = third.tensor(dim=(COLUMNS, INNER), layout="row", data_type=data_type.BFLOAT16, name="c")
    y = third.matmul(p, c)
    y.set_output(True).set_name("y")
    third.reduction(y, graphdnn.reduction_mode.ADD).set_dim((1, 1)).set_output(True).set_name("sum")
    pipeline = graphdnn.Pipeline("three")
    for g in (first, second, third):
        g.build([graphdnn.heur_mode.A])
        pipeline.add(g)
    if first.plan.device.arch == "sm_90a":
        assert "eng3" in first.plan.name, "the pipeline has TMA descriptors"
    return pipeline.build()


def test_a_captured_pipeline_replayed_a_thousand_times(torch: Any) -> None:
    """Inputs changed in place before every replay, results bitwise those of eager execution; graphs, plans, pipeline deleted before."""
    pipeline = three_graphs(torch)
    torch.manual_seed(0)
    a, b, c = (torch.randn(s, device="cuda").to(torch.bfloat16) for s in ((ROWS, INNER), (INNER, COLUMNS), (COLUMNS, INNER)))
    y, total = torch.empty((ROWS, INNER), device="cuda"), torch.empty((1, 1), device="cuda")
    pack = {"a": a, "b": b, "c": c, "s": 0.125, "y": y, "sum": total}
    space = torch.full((pipeline.workspace_bytes,), 0xFF, dtype=torch.uint8, device="cuda")
    variants = [torch.randn_like(a) for _ in range(8)]
    wanted = []
    for v in variants:
        a.copy_(v)
        pipeline.execute(pack, space)
        wanted.append((y.clone(), total.clone()))
    captured = pipeline.capture(pack, space)
    del pipeline, pack
    gc.collect()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with torch.cuda.stream(stream):
        space.fill_(0xFF)
        for number in range(1000):
            a.copy_(variants[number % 8])
            y.fill_(float("nan"))
            captured.launch(stream.cuda_stream)
            first, second = wanted[number % 8]
            wrong += (y != first).sum() + (total != second).sum()
    torch.cuda.synchronize()
    assert wrong.item() == 0
    assert not torch.equal(wanted[0][0], wanted[1][0])


def test_a_pipeline_inside_a_torch_capture(torch: Any) -> None:
    """capture() and replay() are refused there, by name, and end nothing; execute() becomes a part of torch's graph."""
    pipeline = three_graphs(torch)
    a, b, c = (torch.randn(s, device="cuda").to(torch.bfloat16) for s in ((ROWS, INNER), (INNER, COLUMNS), (COLUMNS, INNER)))
    pack = {"a": a, "b": b, "c": c, "s": 1.0, "y": torch.empty((ROWS, INNER), device="cuda"), "sum": torch.empty((1, 1), device="cuda")}
    space = torch.empty((pipeline.workspace_bytes,), dtype=torch.uint8, device="cuda")
    pipeline.execute(pack, space)
    wanted = pack["y"].clone()
    pipeline.capture(pack, space)
    outer = torch.cuda.CUDAGraph()
    with torch.cuda.graph(outer):
        with pytest.raises(graphdnn.ExecutionError, match="a capture is under way"):
            pipeline.capture(pack, space)
        with pytest.raises(graphdnn.ExecutionError, match="not replayed inside a capture"):
            pipeline.replay()
        pipeline.execute(pack, space)
    pack["y"].fill_(float("nan"))
    outer.replay()
    torch.cuda.synchronize()
    assert torch.equal(pack["y"], wanted)
