"""populate_cuda_graph, update_cuda_graph and lazy steps in a capture, against a driver written in Python."""

from __future__ import annotations

import pickle
import struct

import pytest

import graphdnn
from graphdnn import behavior_note, data_type
from graphdnn.errors import BuildError, ExecutionError, KindError, NotSupportedError, ValidationError
from tests.cases.test_execute import chain, pack
from tests.fake_driver import FLOAT, AnyKernel, install, on_gpu
from tests.helpers import built
from tests.unit.fake_graph import CHILD, KERNEL, FakeGraphs

NATIVE = behavior_note.SUPPORTS_CUDA_GRAPH_NATIVE_API
WORKSPACE = 1 << 30


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    return install(monkeypatch, FakeGraphs(AnyKernel()))


def several(g):
    """A matmul with TMA descriptors, whose result is also summed: a memset and a kernel."""
    a = g.tensor(dim=(512, 256), layout="row", data_type=data_type.BFLOAT16, name="a", uid=1)
    b = g.tensor(dim=(256, 512), layout="row", data_type=data_type.BFLOAT16, name="b", uid=2)
    y = g.matmul(a, b)
    g.mul(y, g.tensor(dim=(1, 1), layout="row", name="s", uid=3, is_pass_by_value=True)).set_output(True).set_uid(4)
    g.reduction(y, graphdnn.reduction_mode.ADD).set_dim((1, 1)).set_output(True).set_uid(5)


def buffers(first: int) -> dict[int, int | float]:
    return {1: first << 20, 2: first + 1 << 20, 3: 0.5 * first, 4: first + 2 << 20, 5: first + 3 << 20}


def run_steps(fake: FakeGraphs, g, arguments, workspace: int) -> list[tuple]:
    """What execute enqueues, as FakeGraphs.steps tells it."""
    fake.log.clear()
    g.execute(arguments, workspace)
    found = []
    for entry in fake.log:
        if entry[0] == "launch":
            found.append(("launch", *entry[1:5], entry[6]))
        elif entry[0] == "memset":
            found.append(entry[:4])
    return found


def test_nodes_are_what_execute_enqueues(fake):
    """Kernels, memsets, by-value numbers, TMA descriptors and workspace; then with other buffers; the graph keeps its own copies."""
    g = on_gpu(fake, several)
    assert NATIVE in g.get_behavior_notes() and any(p for s in g.plan.recipe.kernels for p in s.params if type(p).__name__ == "DescriptorParam")
    graph, other = fake.new_graph(), fake.new_graph()
    fake.calls.clear()
    g.populate_cuda_graph(None, buffers(1), WORKSPACE, graph)
    g.populate_cuda_graph(None, buffers(7), WORKSPACE, other)
    assert not [c for c in fake.calls if "Launch" in c or "Stream" in c or "Synchronize" in c]
    first = run_steps(fake, g, buffers(1), WORKSPACE)
    assert {s[0] for s in first} == {"launch", "memset"}
    assert fake.steps(graph) == first and fake.steps(other) == run_steps(fake, g, buffers(7), WORKSPACE) != first
    g.update_cuda_graph(None, buffers(20), 2 * WORKSPACE, graph)
    assert fake.steps(graph) == run_steps(fake, g, buffers(20), 2 * WORKSPACE)
    assert fake.steps(other) == run_steps(fake, g, buffers(7), WORKSPACE), "graphs share nothing"
    assert fake.stack == [], "the caller's context is current again"


def test_a_handle_and_the_wrong_kinds(fake):
    g = on_gpu(fake, chain(4))
    graph, handle = fake.new_graph(), graphdnn.create_handle("cuda:0")
    g.populate_cuda_graph(handle, pack(4), 0, graph)
    assert len(fake.steps(graph)) == 1
    for bad, error in ((0, ValidationError), (-1, ValidationError), ("graph", KindError), (1.0, KindError)):
        with pytest.raises(error, match="cuda_graph"):
            g.populate_cuda_graph(handle, pack(4), 0, bad)
    with pytest.raises(ValidationError, match="missing buffer for uid 4"):
        g.populate_cuda_graph(handle, pack(3), 0, fake.new_graph())
    with pytest.raises(ExecutionError, match="another device"):
        g.populate_cuda_graph(graphdnn.create_handle("cpu"), pack(4), 0, fake.new_graph())
    with pytest.raises(ExecutionError, match="not empty; expected a graph of cuGraphCreate without nodes, found 1 nodes"):
        g.populate_cuda_graph(handle, pack(4), 0, graph)
    fake.fail["cuGraphAddKernelNode_v2"] = 1
    with pytest.raises(ExecutionError, match="adding step 0 of the plan.*INVALID_VALUE"):
        g.populate_cuda_graph(handle, pack(4), 0, fake.new_graph())


def foreign_graphs(fake: FakeGraphs, populated: int):
    """Graphs that the plan of ``several`` has not written, and what the message says of each."""
    yield fake.new_graph(), "chain of . nodes, found 0 nodes"
    shorter = fake.new_graph()
    on_gpu(fake, chain(5)).populate_cuda_graph(None, pack(5), 0, shorter)
    yield shorter, "chain of . nodes, found 1 nodes"
    for change, text in ((0, "node . runs another kernel"), (8, "node . launches grid"), (32, "shared bytes")):
        copy = clone(fake, populated)
        node = next(n for n in reversed(fake.graphs[copy].nodes) if fake.nodes[n].kind == 0)
        raw = bytearray(fake.nodes[node].raw)
        struct.pack_into("<I", raw, change, struct.unpack_from("<I", raw, change)[0] + 1)
        fake.nodes[node].raw = bytes(raw)
        yield copy, text
    child = clone(fake, populated)
    fake.nodes[fake.graphs[child].nodes[0]].kind = CHILD
    yield child, "found a child graph"
    apart = clone(fake, populated)
    fake.nodes[fake.graphs[apart].nodes[0]].after = []
    yield apart, "a chain: one node after another"


def clone(fake: FakeGraphs, graph: int) -> int:
    made, names = fake.new_graph(), {}
    for handle in reversed(fake.graphs[graph].nodes):
        node = fake.nodes[handle]
        names[handle] = fake.add(made, node.kind, node.raw, node.values, [names[a] for a in node.after])
    return made


def test_update_takes_only_what_the_plan_has_written(fake):
    """A clone is as good as the original. Anything else is told from it, and no node is changed."""
    g = on_gpu(fake, several)
    graph = fake.new_graph()
    g.populate_cuda_graph(None, buffers(1), WORKSPACE, graph)
    copy = clone(fake, graph)
    g.update_cuda_graph(None, buffers(9), WORKSPACE, copy)
    assert fake.steps(copy) == run_steps(fake, g, buffers(9), WORKSPACE) and fake.steps(graph) == run_steps(fake, g, buffers(1), WORKSPACE)
    for other, text in foreign_graphs(fake, graph):
        fake.calls.clear()
        with pytest.raises(ExecutionError, match=f"was not populated by this plan.*{text}.*To fix: populate an empty graph"):
            g.update_cuda_graph(None, buffers(9), WORKSPACE, other)
        assert not [c for c in fake.calls if "SetParams" in c]
    assert KERNEL.unpack(fake.nodes[fake.graphs[graph].nodes[0]].raw), "the original is whole"


def test_nodes_for_buffers_less_aligned_than_declared(fake):
    """The steps of the plan that execute would run for them: built on first need, also while some stream is captured. They are other kernels."""
    g = on_gpu(fake, chain(4))
    loose = pack(4) | {2: (2 << 20) + 4}
    described = graphdnn.pygraph(device="sm_90", **FLOAT)
    chain(4)(described)
    described.query_tensor_attributes_of_uid(2).set_alignment(4)
    fake.parameters.declare(built(described))
    graph = fake.new_graph()
    fake.captured.add(0)
    g.populate_cuda_graph(None, loose, 0, graph)
    fake.captured.clear()
    assert fake.steps(graph) == run_steps(fake, g, loose, 0)
    with pytest.raises(ExecutionError, match="not populated by this plan.*another kernel"):
        g.update_cuda_graph(None, pack(4), 0, graph)


@pytest.mark.parametrize("device", ["cpu", "cudasim"])
def test_other_devices_have_no_cuda_graphs(device):
    g = graphdnn.pygraph(device=device, **FLOAT)
    chain(3)(g)
    built(g)
    assert NATIVE not in g.get_behavior_notes()
    for method in (g.populate_cuda_graph, g.update_cuda_graph):
        with pytest.raises(NotSupportedError, match="only plans of CUDA devices.*SUPPORTS_CUDA_GRAPH_NATIVE_API.*execute"):
            method(None, pack(3), None, 0x600)
    g = graphdnn.pygraph(device=device, **FLOAT)
    chain(3)(g)
    g.build_operation_graph()
    with pytest.raises(BuildError):
        g.populate_cuda_graph(None, pack(3), None, 0x600)
    g.create_execution_plans([graphdnn.heur_mode.A])
    g.select_behavior_notes([NATIVE])
    with pytest.raises(NotSupportedError, match="lacks a behavior note"):
        g.check_support()


def test_the_filter_keeps_plans_of_a_gpu():
    g = graphdnn.pygraph(device="sm_90", **FLOAT)
    chain(3)(g)
    g.build_operation_graph()
    g.create_execution_plans([graphdnn.heur_mode.A])
    g.select_behavior_notes([NATIVE])
    g.check_support()


def test_a_plan_is_not_loaded_in_a_capture(fake):
    """One that came with a pickle is loaded by its first execute: in a capture that is an error, and the plan stays usable."""
    g = pickle.loads(pickle.dumps(on_gpu(fake, chain(4))))
    fake.captured.add(0)
    with pytest.raises(ExecutionError, match="is not loaded yet, and the stream is being captured.*before the capture begins"):
        g.execute(pack(4), None)
    fake.captured.clear()
    g.execute(pack(4), None)
    fake.captured.add(0)
    g.execute(pack(4), None)


def test_a_destroyed_stream_is_not_taken_for_a_captured_one(fake):
    g = pickle.loads(pickle.dumps(on_gpu(fake, chain(4))))
    for code, text in ((400, "CUDA error in asking whether stream 0x77 is captured.*live stream"), (906, "stream is being captured")):
        fake.fail["cuStreamIsCapturing"] = code
        with pytest.raises(ExecutionError, match=text):
            g.plan.execute(pack(4), None, 0x77)


def test_a_plan_for_other_shapes_is_not_built_in_a_capture(fake):
    def declare(g, columns=64):
        g.relu(g.tensor(dim=(4, columns), layout="row", name="x", uid=1)).set_output(True).set_uid(2)

    for columns in (64, 32):
        described = graphdnn.pygraph(device="sm_90", **FLOAT)
        declare(described, columns)
        fake.parameters.declare(built(described))
    g = graphdnn.pygraph(device="cuda:0", is_override_shape_enabled=True, **FLOAT)
    declare(g)
    built(g)
    other = {"override_uids": [1, 2], "override_shapes": [(4, 32)] * 2, "override_strides": [(32, 1)] * 2}
    fake.captured.add(0)
    with pytest.raises(ExecutionError, match="the plan for the overridden shapes is not built yet, and the stream is being captured"):
        g.execute(pack(2), None, **other)
    fake.captured.clear()
    g.execute(pack(2), None, **other)
    fake.captured.add(0)
    g.execute(pack(2), None, **other)


def test_dims_that_addresses_do_not_tell(fake):
    """The nodes are those of the extents that the call names; an update of another shape changes nothing."""

    def rows(g):
        n = graphdnn.Dim("n", 1, 4096)
        g.relu(g.tensor(dim=(n, 64), layout="row", name="x", uid=1)).set_output(True).set_uid(2)

    g, graph, addresses = on_gpu(fake, rows), fake.new_graph(), {1: 1 << 20, 2: 2 << 20}
    with pytest.raises(ValidationError, match="dim 'n' is not known"):
        g.populate_cuda_graph(None, addresses, 0, graph)
    g.populate_cuda_graph(None, addresses, 0, graph, dims={"n": 4096})
    before = fake.steps(graph)
    assert len(before) == 1
    g.update_cuda_graph(None, {1: 3 << 20, 2: 4 << 20}, 0, graph, dims={"n": 4096})
    after = fake.steps(graph)
    assert after != before
    with pytest.raises(ExecutionError, match="node 0 launches"):
        g.update_cuda_graph(None, addresses, 0, graph, dims={"n": 16})
    assert fake.steps(graph) == after
