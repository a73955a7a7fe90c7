"""U2 U5 U6 U7 U9 U10 U11: messages that say what is wrong, and graphs that others call unsupported."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type
from tests.helpers import built, check_graph, given

F32 = data_type.FLOAT
FLOAT = {"io_data_type": F32, "compute_data_type": F32}


def _added(**kwargs):
    """x + bias, built for the CPU."""
    g = graphdnn.pygraph(device="cpu", **FLOAT)
    x = g.tensor(dim=[2, 3], stride=[3, 1], name="x", uid=1)
    bias = g.tensor(dim=[1, 3], stride=[3, 1], name="bias", uid=3)
    y = g.add(x, bias, name="plus").set_name("y").set_output(True).set_uid(7).set_dim([2, 3]).set_stride([3, 1])
    built(g, **kwargs)
    return g, x, bias, y


def _buffers():
    return {1: np.ones((2, 3), np.float32), 3: np.full((1, 3), 2, np.float32), 7: np.zeros((2, 3), np.float32)}


def test_U2_broadcast_error_names_op_tensors_dims_and_axis():
    g = graphdnn.pygraph(device="cpu", **FLOAT)
    a = g.tensor(dim=[2, 1, 16, 16], layout="row", name="A")
    c = g.tensor(dim=[2, 1, 16, 256], layout="row", name="C")
    g.add(a, c, name="sum_of_two").set_output(True)
    with pytest.raises(ValueError) as caught:
        g.validate()
    text = str(caught.value)
    for part in ("sum_of_two", "'A'", "'C'", "[2, 1, 16, 16]", "[2, 1, 16, 256]", "3"):
        assert part in text.replace("(", "[").replace(")", "]"), f"{part} is missing in: {text}"
    assert isinstance(caught.value, graphdnn.ValidationError)


def test_U5_nothing_left_gives_a_reason_per_candidate_and_facts_of_the_environment():
    g = graphdnn.pygraph(device="cpu", **FLOAT)
    x = g.tensor(dim=[2, 3], stride=[3, 1], name="x")
    g.relu(x).set_output(True)
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([graphdnn.heur_mode.A, graphdnn.heur_mode.FALLBACK])
    names = [g.get_plan_name_at_index(i) for i in range(g.get_execution_plan_count())]
    g.deselect_engines(["eng"])
    with pytest.raises(graphdnn.cudnnGraphNotSupportedError) as caught:
        g.check_support()
    text = str(caught.value)
    for name in names:
        assert name in text, f"candidate {name} and why it was rejected: {text}"
    assert "deselect" in text
    assert "cpu" in text and graphdnn.__version__ in text, f"device and version: {text}"
    assert not isinstance(caught.value, RuntimeError)


def test_U5_engine_rejections_are_kept_with_their_reason():
    """The matmul engine does not take an addition, and says so."""
    g, *_ = _added()
    rejected = g.explain().data["rejections"]
    assert rejected, "engines that do not fit are listed"
    assert all(r["engine"] and len(r["reason"]) > 10 for r in rejected)


def test_U6_float64_matmul_and_check_support_without_compiling(device, empty_cache):
    from graphdnn.plans import cache

    g = graphdnn.pygraph(device=device)
    a = g.tensor(dim=[2, 3, 7], layout="row", data_type=data_type.DOUBLE, name="a")
    b = g.tensor(dim=[2, 7, 5], layout="row", data_type=data_type.DOUBLE, name="b")
    g.matmul(a, b).set_output(True).set_data_type(data_type.DOUBLE)
    before = cache.counters.misses + cache.counters.disk_hits + cache.counters.memory_hits
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([graphdnn.heur_mode.A])
    g.check_support()
    assert cache.counters.misses + cache.counters.disk_hits + cache.counters.memory_hits == before, "check_support asks for no kernel"

    def build(g):
        a = g.tensor(dim=[2, 3, 7], layout="row", data_type=data_type.DOUBLE, name="a")
        b = g.tensor(dim=[2, 7, 5], layout="row", data_type=data_type.DOUBLE, name="b")
        g.matmul(a, b).set_name("y").set_output(True).set_data_type(data_type.DOUBLE)

    done = check_graph(build, device)
    np.testing.assert_allclose(done.outputs["y"], done.expected["y"], rtol=0, atol=1e-14)


SINGLE = {
    "reshape": lambda g, x: g.reshape(x).set_dim([3, 8]).set_stride([8, 1]),
    "transpose": lambda g, x: g.transpose(x, [2, 0, 1]),
    "slice": lambda g, x: g.slice(x, [slice(0, 1), slice(1, 3), slice(0, 4, 2)]),
    "concatenate": lambda g, x: g.concatenate([x, x], axis=1),
    "identity": lambda g, x: g.identity(x),
    "gen_index": lambda g, x: g.gen_index(x, axis=1),
    "reduction": lambda g, x: g.reduction(x, graphdnn.reduction_mode.MAX).set_dim([2, 1, 4]),
    "matmul": lambda g, x: g.matmul(x, g.transpose(x, [0, 2, 1]).set_data_type(x.get_data_type())),
}


def test_U7_a_single_quantize_runs(device):
    """Alone, as an int8 conversion, and as MXFP8 blocks."""

    def build(g):
        x = g.tensor(dim=[2, 64], layout="row", data_type=F32, name="x")
        g.identity(x).set_name("int8").set_output(True).set_data_type(data_type.INT8)

    def blocks(g):
        x = g.tensor(dim=[2, 64], layout="row", data_type=F32, name="x")
        y, scale = g.block_scale_quantize(x, 32)
        y.set_name("y").set_output(True).set_data_type(data_type.FP8_E4M3)
        scale.set_name("scale").set_output(True).set_data_type(data_type.FP8_E8M0)

    x = 40 * np.random.default_rng(0).standard_normal((2, 64))
    for make in (build, blocks):
        found = check_graph(make, device, data={"x": given(x)}, graph=FLOAT).outputs
    np.testing.assert_array_less(np.abs(found["y"] * np.repeat(found["scale"], 32, axis=1) - x), 2.0**-4 * np.abs(x) + 1)


@pytest.mark.parametrize("op", SINGLE)
@pytest.mark.parametrize("dtype", [F32, data_type.BFLOAT16, data_type.INT8])
def test_U7_any_single_op_runs(device, op, dtype):
    def build(g):
        x = g.tensor(dim=[2, 3, 4], layout="row", data_type=dtype, name="x")
        SINGLE[op](g, x).set_name("y").set_output(True).set_data_type(dtype)

    check_graph(build, device)


@pytest.mark.parametrize("dtype", [d for d in data_type if d.name in ("INT8x4", "UINT8x4", "INT8x32")])
def test_U9_unsupported_dtype_is_a_typed_error(dtype):
    g = graphdnn.pygraph(device="cpu")
    with pytest.raises(graphdnn.GraphError) as caught:
        x = g.tensor(dim=[2, 4], stride=[4, 1], data_type=dtype, name="odd")
        g.relu(x, name="act").set_output(True).set_data_type(F32)
        built(g)
    assert dtype.name in str(caught.value)


def test_U9_tensor_without_shape_is_a_typed_error():
    g = graphdnn.pygraph(device="cpu", **FLOAT)
    x = graphdnn.tensor().set_name("shapeless")
    g.relu(x).set_output(True)
    with pytest.raises(ValueError, match="shapeless"):
        g.validate()


def test_U9_error_while_building_carries_the_graph():
    """The JSON text of the graph travels with the error, so that a report can be replayed."""
    g = graphdnn.pygraph(device="cpu", **FLOAT)
    a, b = (g.tensor(dim=d, layout="row", name=n) for n, d in (("A", [2, 3]), ("B", [2, 4])))
    g.add(a, b, name="bad").set_output(True)
    with pytest.raises(graphdnn.ValidationError) as caught:
        g.validate()
    attached = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert '"nodes"' in attached and '"ADD"' in attached


def test_U10_error_classes_are_distinct():
    classes = (graphdnn.NotSupportedError, graphdnn.ValidationError, graphdnn.BuildError, graphdnn.ExecutionError)
    assert all(issubclass(c, graphdnn.GraphError) for c in classes)
    assert not any(issubclass(a, b) for a, b in itertools.permutations(classes, 2))
    assert not issubclass(graphdnn.NotSupportedError, RuntimeError)
    assert issubclass(graphdnn.ValidationError, ValueError)
    assert issubclass(graphdnn.BuildError, RuntimeError) and issubclass(graphdnn.ExecutionError, RuntimeError)
    assert graphdnn.cudnnGraphNotSupportedError is graphdnn.NotSupportedError


@pytest.mark.parametrize("key", ["uid", "tensor", "name"])
def test_U11_missing_buffer_names_uid_and_tensor(key):
    g, x, bias, y = _added()
    pack = {1: np.ones((2, 3), np.float32), 7: np.zeros((2, 3), np.float32)}
    if key != "uid":
        pack = {{1: x, 7: y}[k] if key == "tensor" else {1: "x", 7: "y"}[k]: v for k, v in pack.items()}
    with pytest.raises(ValueError) as caught:
        g.execute(pack, None)
    assert "3" in str(caught.value) and "bias" in str(caught.value)
    full = _buffers()
    g.execute(full, None)
    assert (full[7] == 3).all(), "the graph stays usable after the error"


@pytest.mark.parametrize(
    ("uid", "value", "says"),
    [
        (3, np.ones((1, 3), np.float64), "float64"),
        (3, np.ones((1, 3), np.int32), "int32"),
        (3, np.ones(2, np.float32), "bias"),
        (7, np.zeros((1, 3), np.float32), "y"),
        (3, object(), "bias"),
        (3, None, "bias"),
        (3, "text", "bias"),
    ],
    ids=["dtype", "int dtype", "too small", "output too small", "object", "None", "text"],
)
def test_U11_wrong_buffer_is_refused_before_anything_is_written(uid, value, says):
    g, *_ = _added()
    pack = _buffers() | {uid: value}
    with pytest.raises((ValueError, TypeError)) as caught:
        g.execute(pack, None)
    assert isinstance(caught.value, graphdnn.GraphError) and says in str(caught.value)
    assert (pack[7] == 0).all(), "nothing has run"
    full = _buffers()
    g.execute(full, None)
    assert (full[7] == 3).all()


def test_U11_extra_and_none_keys_are_ignored():
    g, *_ = _added()
    full = _buffers()
    g.execute(full | {99: np.ones(1), None: None}, None)
    assert (full[7] == 3).all()


def test_U11_workspace_missing_or_too_small():
    g = graphdnn.pygraph(device="cpu", **FLOAT)
    x = g.tensor(dim=[64, 96], stride=[96, 1], name="x")
    b = g.tensor(dim=[96, 80], stride=[80, 1], name="b")
    m = g.matmul(x, b)
    s = g.reduction(m, graphdnn.reduction_mode.MAX).set_dim([64, 1])
    y = g.matmul(g.sub(m, s), g.transpose(b, [1, 0])).set_name("y").set_output(True)
    built(g)
    size = g.get_workspace_size()
    assert size > 0, "this graph stores an intermediate"
    pack = {x: np.ones((64, 96), np.float32), b: np.ones((96, 80), np.float32), y: np.zeros((64, 96), np.float32)}
    for workspace in (None, 0, np.empty(size - 1, np.uint8), np.empty(0, np.uint8)):
        with pytest.raises(graphdnn.GraphError, match=f"(?i)workspace.*{size}"):
            g.execute(pack, workspace)
    g.execute(pack, np.empty(size, np.uint8))
    assert (pack[y] == 0).all()


def test_U11_numpy_buffers_for_a_cuda_plan_or_no_device():
    """A plan for a described device is built; executing it names the device that is missing or the array that is on the wrong one."""
    g, *_ = _added_on("sm_90")
    with pytest.raises(graphdnn.GraphError) as caught:
        g.execute(_buffers(), None)
    assert any(word in str(caught.value) for word in ("device", "GPU", "driver"))


def _added_on(device):
    g = graphdnn.pygraph(device=device, **FLOAT)
    x = g.tensor(dim=[2, 3], stride=[3, 1], name="x", uid=1)
    bias = g.tensor(dim=[1, 3], stride=[3, 1], name="bias", uid=3)
    y = g.add(x, bias).set_name("y").set_output(True).set_uid(7).set_dim([2, 3]).set_stride([3, 1])
    built(g)
    return g, x, bias, y


@pytest.mark.gpu
def test_U11_numpy_buffers_on_a_gpu():
    g, *_ = _added_on("cuda:0")
    with pytest.raises(graphdnn.GraphError, match="x|bias|y"):
        g.execute(_buffers(), None)
