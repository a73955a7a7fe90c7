"""Class Graph: ops on arrays, built on exit, called by names or by position, with NumPy and torch buffers."""

from __future__ import annotations

import pickle

import ml_dtypes
import numpy as np
import pytest

import graphdnn as cudnn
from graphdnn import data_type, heur_mode

F32 = data_type.FLOAT
FLOAT = {"io_data_type": F32, "intermediate_data_type": F32, "compute_data_type": F32, "device": "cpu"}
RE, VE, TE = RuntimeError, ValueError, TypeError


@pytest.fixture(params=["numpy", "torch"])
def put(request):
    """A function that makes a buffer of one library from a NumPy array."""
    if request.param == "numpy":
        return lambda x: x
    import torch
    return torch.from_numpy


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s, dtype=np.float32) for s in ((2, 3, 7), (2, 7, 5), (1, 1, 5))]


def made(put, **kwargs):
    x, w, b = (put(a) for a in arrays())
    with cudnn.Graph(**(FLOAT | kwargs)) as g:
        y = g.matmul(x, w, name="mm")
        y = g.bias(name="plus", input=y, bias=b)
        y.set_output(True)
    return g, (x, w, b), y


def exact(seed=0):
    x, w, b = arrays(seed)
    return x.astype(np.float64) @ w + b


def close(got, seed=0):
    np.testing.assert_allclose(np.asarray(got), exact(seed), rtol=1e-5, atol=1e-6)


def test_call_with_a_dict_allocates_outputs(put):
    g, *_ = made(put)
    x, w, b = (put(a) for a in arrays(3))
    pack = {"mm::0": x, "mm::1": w, "plus::bias": b}
    found = g(pack)
    assert found is pack and type(found["plus::OUT_0"]) is type(x)
    close(found["plus::OUT_0"], 3)


def test_other_keys(put):
    g, (x, w, b), y = made(put)
    out = put(np.full((2, 3, 5), np.nan, np.float32))
    other = [put(a) for a in arrays(1)]
    y.set_name("result")
    tensors = [g._find(t) for t in (x, w, b)]
    for keys in ((x, w, b, y) if not isinstance(x, np.ndarray) else (*tensors, y), (*tensors, "result"), tuple(t.get_uid() for t in (*tensors, y))):
        g(dict(zip(keys, (*other, out), strict=True)))
        close(out, 1)
        out[:] = float("nan")


def test_positional_call(put):
    for before in (True, False):
        x, w, b = (put(a) for a in arrays())
        with cudnn.Graph(**FLOAT) as g:
            y = g.bias(g.matmul(x, w, name="mm"), b, name="plus").set_output(True)
            if before:
                g.set_io_tuples(["mm::1", x, "plus::1"], [y])
        if not before:
            with pytest.raises(RE, match="order"):
                g(x, w, b)
            g.set_io_tuples(inputs=("mm::1", "mm::0", "plus::1"), outputs=("plus::OUT_0",))
        close(g(w, x, b))
        with pytest.raises(VE, match="number of inputs"):
            g(w, x)


def test_io_of_the_constructor_and_several_outputs(put):
    x, w, _ = (put(a) for a in arrays())
    with cudnn.Graph(inputs=["mm::0", "mm::1"], outputs=["act::OUT_0", "mm::C"], **FLOAT) as g:
        m = g.matmul(x, w, name="mm").set_output(True)
        g.relu(m, name="act").set_output(True)
    act, m = g(x, w)
    np.testing.assert_allclose(np.asarray(m), np.matmul(*arrays()[:2]), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(act), np.maximum(np.asarray(m), 0))


def test_names_of_nodes(put):
    x = put(arrays()[0])
    with cudnn.Graph(**FLOAT) as g:
        a = g.relu(x)
        b = g.relu(a)
        c = g.neg(b).set_output(True)
        assert [t.get_name() for t in (a, b, c)] == ["relu.0::OUT_0", "relu.1::OUT_0", "neg.0::OUT_0"]
        with pytest.raises(VE, match="one name"):
            g.abs(c, name="relu.0")
    found = g({"relu.0::0": x})
    np.testing.assert_array_equal(np.asarray(found["neg.0::OUT_0"]), -np.maximum(arrays()[0], 0))


def test_an_array_used_twice_is_one_tensor(put):
    x = put(arrays()[0])
    with cudnn.Graph(**FLOAT) as g:
        y = g.add(a=x, b=x, name="sum").set_output(True)
        assert len(g._arrays) == 1
        parts = g.concatenate([x, y], axis=0, name="both").set_output(True)
    found = g({"sum::a": x})
    np.testing.assert_array_equal(np.asarray(found["sum::OUT_0"]), 2 * arrays()[0])
    assert np.asarray(found[parts.get_name()]).shape == (4, 3, 7)
    assert "both::inputs::0" not in found
    np.testing.assert_array_equal(np.asarray(g({"both::0::0": x})["both::Y"])[:2], arrays()[0])


def test_data_types_and_strides_of_allocated_outputs(put):
    x = put(arrays()[0])
    with cudnn.Graph(**FLOAT) as g:
        g.transpose(x, [2, 0, 1], name="t").set_output(True)
        g.relu(x, name="half").set_output(True).set_data_type("bfloat16")
    found = g({"t::0": x})
    assert tuple(found["t::Y"].shape) == (7, 2, 3)
    np.testing.assert_array_equal(np.asarray(found["t::Y"]), arrays()[0].transpose(2, 0, 1))
    half = found["half::OUT_0"]
    if isinstance(half, np.ndarray):
        assert half.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(half, np.maximum(arrays()[0], 0).astype(ml_dtypes.bfloat16))
    else:
        assert str(half.dtype) == "torch.bfloat16"


def test_torch_tensors_with_gradients_are_detached():
    import torch
    x = torch.ones(2, 3, requires_grad=True)
    with cudnn.Graph(io_data_type=torch.float32, compute_data_type=torch.float32, device="cpu") as g:
        g.mul(a=x, b=2.0, name="twice").set_output(True)
    assert (g({x: x})["twice::OUT_0"] == 2).all()


def test_one_element_is_passed_by_value(put):
    x, s = put(arrays()[0]), put(np.full((1, 1, 1), 2, np.float32))
    with cudnn.Graph(**FLOAT) as g:
        g.scale(x, s, name="scale").set_output(True)
    for value in (s, 3.0):
        found = g({"scale::0": x, "scale::1": value})
        np.testing.assert_allclose(np.asarray(found["scale::OUT_0"]), arrays()[0] * (3 if value == 3.0 else 2))


def test_declared_tensors(put):
    with cudnn.Graph(**FLOAT) as g:
        x = g.tensor(dim=(2, 3), layout="row", name="x")
        y = g.relu(x, name="act").set_output(True)
    data = put(np.array([[-1, 2, -3], [4, -5, 6]], np.float32))
    for key in (x, "x", "act::0"):
        np.testing.assert_array_equal(np.asarray(g({key: data})["act::OUT_0"]), [[0, 2, 0], [4, 0, 6]])
    assert g.query_tensor_attributes_of_uid(y.get_uid()) is y and g.get_workspace_size() >= 0


def test_workspace(put):
    g, (x, w, b), _ = made(put, workspace_alloc=False, heuristics=[heur_mode.FALLBACK])
    pack = {"mm::0": x, "mm::1": w, "plus::bias": b}
    size = g.get_workspace_size()
    if size:
        with pytest.raises(RE, match="workspace"):
            g(dict(pack))
    close(g(dict(pack), workspace=np.empty(size + 64, np.uint8))["plus::OUT_0"])


@pytest.mark.parametrize("handle", ["auto", None, "made"])
def test_handles(put, handle):
    handle = cudnn.create_handle("cpu") if handle == "made" else handle
    kwargs = FLOAT | ({} if handle == "auto" else {"handle": handle})
    if handle == "auto":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GRAPHDNN_DEVICE", "cpu")
            g, (x, w, b), _ = made(put, handle="auto")
    else:
        g, (x, w, b), _ = made(put, **kwargs)
    pack = {"mm::0": x, "mm::1": w, "plus::bias": b}
    close(g(dict(pack))["plus::OUT_0"])
    close(g(dict(pack), handle=cudnn.create_handle("cpu"))["plus::OUT_0"])
    close(g(dict(pack), handle="auto")["plus::OUT_0"])


# ------------------------------------------------------------------------------------------------------------------------------------------ errors
def test_constructor_errors():
    for wrong in ({"inputs": "x"}, {"outputs": 3}, {"heuristics": heur_mode.A}, {"handle": "manual"}):
        with pytest.raises(VE):
            cudnn.Graph(**wrong)
    with pytest.raises(TE):
        cudnn.Graph(3)
    with pytest.raises(TE):
        with cudnn.Graph(no_such_argument=1):
            pass


def test_misuse():
    g = cudnn.Graph(**FLOAT)
    with pytest.raises(RE, match="entered"):
        g.relu(arrays()[0])
    with pytest.raises(RE, match="not built"):
        g({})
    with g:
        g.relu(arrays()[0], name="act").set_output(True)
        with pytest.raises(RE, match="once"):
            g.__enter__()
        for name in ("validate", "build", "execute", "check_support", "deselect_engines", "get_engine_count", "key", "populate_cuda_graph"):
            with pytest.raises(RE, match=name):
                getattr(g, name)
        with pytest.raises(AttributeError):
            g.no_such_op  # noqa: B018
    with pytest.raises(RE, match="built"):
        g.relu(arrays()[0])
    with pytest.raises(RE, match="act::0"):
        g({})
    with pytest.raises(RE, match="act::0"):
        g({"unknown": arrays()[0]})


def test_exceptions_pass_through():
    with pytest.raises(KeyError):
        with cudnn.Graph(**FLOAT) as g:
            g.relu(arrays()[0])
            raise KeyError("mine")
    with pytest.raises(RE, match="not built"):
        g({})
    with pytest.raises(VE, match="broadcast"):
        with cudnn.Graph(**FLOAT) as g:
            g.add(np.ones((2, 3), np.float32), np.ones((2, 4), np.float32)).set_output(True)


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (["mm::0", "mm::1"], ["plus::OUT_0"]),
        (["mm::0", "mm::1", "plus::bias", "mm::0"], ["plus::OUT_0"]),
        (["mm::0", "mm::1", "nobody"], ["plus::OUT_0"]),
        (["mm::0", "mm::1", "mm::C"], ["plus::OUT_0"]),
        (["mm::0", "mm::1", "plus::bias"], []),
        (["mm::0", "mm::1", "plus::bias"], ["mm::C"]),
        (["mm::0", "mm::1", "plus::bias"], ["plus::OUT_0", "plus::OUT_0"]),
        ("mm::0", ["plus::OUT_0"]),
    ],
)
def test_orders_that_do_not_fit(inputs, outputs):
    g, *_ = made(lambda x: x)
    with pytest.raises(VE):
        g.set_io_tuples(inputs, outputs)


def test_serialize_and_copies(put):
    g, (x, w, b), _ = made(put)
    h = pickle.loads(pickle.dumps(g))
    close(h({"mm::0": x, "mm::1": w, "plus::bias": b})["plus::OUT_0"])
    loaded = cudnn.pygraph(device="cpu")
    loaded.deserialize(g.serialize())
    assert loaded.get_workspace_size() == g.get_workspace_size()
    assert "plus" in str(g.explain()) and repr(g).startswith("<graphdnn Graph, built")


def test_a_deserialized_plan_is_kept():
    source, *_ = made(lambda x: x)
    with cudnn.Graph(device="cpu") as g:
        g.deserialize(source.serialize())
        plan = g.plan
    assert g.plan is plan
    x, w, b = arrays()
    close(g({"mm::A": x, "mm::B": w, "plus::IN_1": b})["plus::OUT_0"])
