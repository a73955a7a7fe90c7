"""The JSON text of a graph: its form, its re-import, damage."""

from __future__ import annotations

import json
import random
import string

import numpy as np
import pytest

import graphdnn as cudnn
from graphdnn import data_type, heur_mode, reduction_mode, scalar_type
from graphdnn.ir import jsontext
from graphdnn.opspecs import registry

F32 = data_type.FLOAT


def every_op(device="cpu", **kwargs):
    """All seven ops, scalars of both kinds, several data types, rank 0, explicit uids and alignment."""
    g = cudnn.pygraph(device=device, **({"io_data_type": F32, "intermediate_data_type": F32, "compute_data_type": F32} | kwargs))
    a = g.tensor(dim=[2, 3, 8], stride=[24, 8, 1], name="a", data_type=data_type.HALF, uid=50).set_alignment(4)
    b = g.tensor(dim=[2, 8, 5], layout="column", name="b", data_type=data_type.HALF)
    s = g.tensor(dim=[1, 1, 1], stride=[1, 1, 1], name="s", is_pass_by_value=True)
    m = g.matmul(a, b, name="mm", padding=0.5)
    m = g.relu(g.mul(m, s), negative_slope=0.1, upper_clip=6.0, name="act")
    m = g.add(m, g.tensor_scalar(0.25, scalar_type.RUNTIME_PARAM))
    m = g.sub(m, 3)
    t = g.transpose(m, [0, 2, 1], name="t")
    p = g.slice(t, [slice(0, 2), slice(1, -1), slice(0, 3, 2)], name="part")
    c = g.concatenate([p, p], axis=-1, name="both")
    r = g.reshape(c, name="flat").set_dim([2, 12]).set_stride([12, 1])
    i = g.gen_index(r, axis=1, name="index")
    r = g.add(r, i, name="sum").set_output(True).set_name("r").set_data_type(data_type.BFLOAT16)
    g.reduction(r, reduction_mode.AVG, axes=(0, 1), name="mean").set_output(True).set_name("mean")
    return g


# --------------------------------------------------------------------------------------------------------------------------------------------- form
def test_top_level_and_context():
    found = json.loads(str(every_op(sm_count=12)))
    assert list(found) == ["context", "cudnn_backend_version", "cudnn_frontend_version", "json_version", "nodes", "tensors"]
    assert (found["cudnn_backend_version"], found["cudnn_frontend_version"], found["json_version"]) == ("9.22.0", 12300, "1.0")
    assert found["context"] == {
        "name": "", "io_data_type": "FLOAT", "intermediate_data_type": "FLOAT", "compute_data_type": "FLOAT", "sm_count": 12,
        "is_dynamic_shape_enabled": False, "is_override_shape_enabled": False,
    }  # fmt: skip
    assert json.loads(str(cudnn.pygraph(device="cpu")))["context"]["io_data_type"] is None
    assert repr(every_op()) == str(every_op())


def test_keys_are_sorted():
    text = str(every_op())

    def check(pairs):
        keys = [k for k, _ in pairs]
        assert keys == sorted(keys)
        return dict(pairs)

    json.loads(text, object_pairs_hook=check)


def test_nodes_before_and_after_uids():
    g = every_op()
    mm = json.loads(str(g))["nodes"][0]
    assert mm == {
        "tag": "MATMUL", "name": "mm", "compute_data_type": None, "inputs": {"A": 50, "B": "b"}, "outputs": {"C": "mm::C"}, "padding_value": 0.5,
    }  # fmt: skip
    g.build_operation_graph()
    found = json.loads(str(g))
    mm = found["nodes"][0]
    assert mm["compute_data_type"] == "FLOAT" and mm["inputs"]["A"] == 50 and isinstance(mm["outputs"]["C"], int)
    assert found["tensors"][str(mm["outputs"]["C"])]["name"] == "mm::C"
    assert all(t["uid_assigned"] and key == str(t["uid"]) for key, t in found["tensors"].items())
    assert not any("compute_data_type" in n for n in found["nodes"] if n["tag"] == "CONCATENATE")


def test_attributes():
    nodes = {n["name"]: n for n in json.loads(str(every_op()))["nodes"]}
    act = nodes["act"]
    assert act["mode"] == "RELU_FWD" and act["relu_lower_clip_slope"] == "3DCCCCCD" and act["relu_upper_clip"] == "40C00000"
    assert [act[k] for k in ("axis", "relu_lower_clip", "swish_beta", "elu_alpha", "softplus_beta")] == [None] * 5
    assert nodes["t"]["permutation"] == [0, 2, 1]
    assert nodes["part"]["slices"] == [[0, 2], [1, -1], [0, 3]] and nodes["part"]["slice_strides"] == [1, 1, 2]
    assert nodes["both"]["inputs"] == {"0": "part::Y", "1": "part::Y"} and nodes["both"]["in_place_index"] is None
    assert nodes["flat"]["reshape_mode"] == "VIEW_ONLY" and nodes["flat"]["dim"] == [] and nodes["flat"]["stride"] == []
    assert nodes["mean"]["mode"] == "AVG" and nodes["mean"]["is_deterministic"] is True
    assert nodes["index"]["axis"] == 1


def test_wide_attributes_of_double_nodes():
    g = cudnn.pygraph(device="cpu")
    x = g.tensor(dim=[2], stride=[1], data_type=data_type.DOUBLE)
    g.relu(x, negative_slope=0.1).set_output(True).set_data_type(data_type.DOUBLE)
    g.validate()
    (node,) = json.loads(str(g))["nodes"]
    assert node["relu_lower_clip_slope"] == "3FB999999999999A"
    assert cudnn.pygraph(device="cpu").deserialize(str(g)) is None


def test_unused_tensors_are_left_out_and_equal_names_stay_apart():
    g = cudnn.pygraph(device="cpu", io_data_type=F32, compute_data_type=F32)
    g.tensor(dim=[9], stride=[1], name="unused")
    x, y = (g.tensor(dim=[2], stride=[1], name="same") for _ in range(2))
    g.sub(x, y).set_output(True)
    found = json.loads(str(g))
    assert set(found["tensors"]) == {"same", "same#1", "0::OUT_0"} and found["nodes"][0]["inputs"] == {"IN_0": "same", "IN_1": "same#1"}
    h = cudnn.pygraph(device="cpu")
    h.deserialize(str(g))
    assert str(h) == str(g)
    assert len({*h._nodes[0].inputs.values()}) == 2


def test_ragged_offsets():
    g = cudnn.pygraph(device="cpu")
    offset = g.tensor(dim=[3, 1], stride=[1, 1], data_type=data_type.INT32, name="offset", uid=9)
    x = g.tensor(dim=[2, 4], stride=[4, 1], name="x", ragged_offset=offset)
    g.relu(x)
    found = json.loads(str(g))["tensors"]
    assert (found["x"]["ragged_offset_uid"], found["x"]["ragged_offset_name"]) == (9, "offset") and "9" in found
    h = cudnn.pygraph(device="cpu")
    h.deserialize(str(g))
    assert str(h) == str(g)


# --------------------------------------------------------------------------------------------------------------------------------------- re-import
@pytest.mark.parametrize("steps", ["none", "validate", "build_operation_graph"])
def test_round_trip(steps):
    g = every_op()
    if steps != "none":
        getattr(g, steps)()
    h = cudnn.pygraph(device="cpu")
    h.deserialize(str(g))
    assert str(h) == str(g) and h.key() == g.key()
    g.build_operation_graph()
    h.build_operation_graph()
    assert h._opgraph.key == g._opgraph.key


def test_a_reimported_graph_runs():
    g, h = every_op(), cudnn.pygraph(device="cpu")
    h.deserialize(str(g))
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s).astype(np.float16) for s in ((2, 3, 8), (2, 5, 8)))
    results = []
    for one in (g, h):
        one.build([heur_mode.A])
        mean = np.full((), np.nan, np.float32)
        import ml_dtypes

        r = np.zeros((2, 12), ml_dtypes.bfloat16)
        size = one.get_workspace_size()
        one.execute({"a": a, "b": b, "s": 0.5, "r": r, "mean": mean}, np.empty(size, np.uint8) if size else None)
        results.append((r.astype(np.float32), mean))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1] and np.isfinite(results[0][1])


def test_text_of_the_cudnn_frontend():
    """Without our own fields, with ports and attributes in its order, tensors by name."""

    def tensor(name, dim, virtual=False, dtype="FLOAT"):
        stride = [int(np.prod(dim[i + 1 :])) for i in range(len(dim))]
        return {
            "name": name, "data_type": dtype, "dim": dim, "stride": stride, "is_virtual": virtual, "is_pass_by_value": False, "pass_by_value": None,
            "reordering_type": "NONE", "uid": 0, "uid_assigned": False,
        }  # fmt: skip

    pointwise = dict.fromkeys(("axis", "relu_lower_clip", "relu_upper_clip", "relu_lower_clip_slope", "swish_beta", "elu_alpha", "softplus_beta"))
    text = json.dumps(
        {
            "context": {"name": "", "compute_data_type": "FLOAT", "intermediate_data_type": "FLOAT", "io_data_type": None, "sm_count": -1},
            "cudnn_backend_version": "9.10.1",
            "cudnn_frontend_version": 11200,
            "json_version": "1.0",
            "nodes": [
                {
                    "tag": "MATMUL",
                    "name": "mm",
                    "compute_data_type": "FLOAT",
                    "inputs": {"B": "b", "A": "a"},
                    "outputs": {"C": "mm::C"},
                    "padding_value": 0.0,
                },
                {
                    "tag": "POINTWISE",
                    "name": "1",
                    "compute_data_type": "FLOAT",
                    "inputs": {"IN_0": "mm::C", "IN_1": "bias"},
                    "outputs": {"OUT_0": "y"},
                    "mode": "ADD",
                }
                | pointwise,
            ],
            "tensors": {
                "a": tensor("a", [1, 3, 4]),
                "b": tensor("b", [1, 4, 5]),
                "bias": tensor("bias", [1, 1, 5]),
                "mm::C": tensor("mm::C", [1, 3, 5], True),
                "y": tensor("y", [1, 3, 5]),
            },
        }
    )
    g = cudnn.pygraph(device="cpu")
    g.deserialize(text)
    g.build([heur_mode.A])
    a, b, bias, y = np.ones((1, 3, 4), np.float32), np.full((1, 4, 5), 2, np.float32), np.ones((1, 1, 5), np.float32), np.empty((1, 3, 5), np.float32)
    size = g.get_workspace_size()
    g.execute({"a": a, "b": b, "bias": bias, "y": y}, np.empty(size, np.uint8) if size else None)
    assert (y == 9).all()


def test_deserialize_replaces_what_was_declared():
    g = every_op()
    g.build([heur_mode.A])
    h = cudnn.pygraph(device="cpu", io_data_type=F32, compute_data_type=F32)
    x = h.tensor(dim=[2], stride=[1])
    h.relu(x).set_output(True)
    g.deserialize(str(h))
    assert str(g) == str(h) and g.get_execution_plan_count() == 0


# ------------------------------------------------------------------------------------------------------------------------------------------ errors
def _with(change):
    found = json.loads(str(every_op()))
    change(found)
    return json.dumps(found)


def _set(*path_and_value):
    *path, last, value = path_and_value

    def change(found):
        for step in path:
            found = found[step]
        found[last] = value

    return change


def _drop(*path):
    def change(found):
        for step in path[:-1]:
            found = found[step]
        del found[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_set("nodes", 0, "inputs", "A", "nobody"), "port A"),
        (_set("nodes", 0, "inputs", "A", None), "port A"),
        (_set("nodes", 0, "inputs", "A", 51), "port A"),
        (_set("nodes", 0, "inputs", "A", True), "port A"),
        (_set("nodes", 0, "inputs", "D", "a"), "ports"),
        (_drop("nodes", 0, "outputs"), "outputs"),
        (_set("nodes", 0, "padding_value", "0"), "padding_value"),
        (_set("nodes", 0, "colour", "red"), "colour"),
        (_set("nodes", 0, "compute_data_type", "FLOAT8"), "compute_data_type"),
        (_set("nodes", 2, "relu_upper_clip", 6.0), "relu_upper_clip"),
        (_set("nodes", 2, "relu_upper_clip", "40C0000"), "relu_upper_clip"),
        (_set("nodes", 2, "relu_upper_clip", "GGGGGGGG"), "relu_upper_clip"),
        (_set("nodes", 2, "mode", "RELU"), "mode|RELU"),
        (_set("nodes", 2, "axis", [0]), "axis"),
        (_set("nodes", 5, "permutation", [0, "2", 1]), "permutation"),
        (_set("nodes", 6, "slices", [[0, 1, 2]]), "slices"),
        (_set("nodes", {"a": 1}), "nodes"),
        (_set("nodes", 0, 5), "node 0"),
        (_set("tensors", []), "tensors"),
        (_set("tensors", "b", "text"), "tensor 'b'"),
        (_set("tensors", "b", "dim", [2, -8, 5]), "dims"),
        (_set("tensors", "b", "dim", [2, 8.0, 5]), "dim"),
        (_set("tensors", "b", "dim", [2**63, 8, 5]), "dim"),
        (_set("tensors", "b", "dim", [2**62, 8, 5]), "large|dims|batch"),
        (_set("tensors", "b", "stride", [1]), "stride"),
        (_set("tensors", "b", "data_type", "half"), "data_type"),
        (_set("tensors", "b", "is_virtual", 0), "is_virtual"),
        (_set("tensors", "b", "alignment", 3), "alignment"),
        (_set("tensors", "b", "reordering_type", "SWAPPED"), "reordering_type"),
        (_set("tensors", "b", "compile_time_constant", True), "constant"),
        (_set("tensors", "b", "pass_by_value", {"index": 9, "value": "00000000"}), "index"),
        (_set("tensors", "b", "pass_by_value", {"index": 1, "value": "00000000"}), "value"),
        (_set("tensors", "b", "name", "\ud800"), "name"),
        (_set("tensors", "b", "rank", 1), "rank"),
        (_set("tensors", "b", "ragged_offset_uid", 1234), "ragged"),
        (_set("context", None), "context"),
        (_set("context", "sm_count", "all"), "sm_count"),
    ],
)
def test_malformed_text_names_the_place(change, says):
    g = cudnn.pygraph(device="cpu")
    with pytest.raises(cudnn.ValidationError, match=says):
        g.deserialize(_with(change))
        g.validate()


def test_unknown_op_is_not_supported():
    g = cudnn.pygraph(device="cpu")
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="TELEPORT"):
        g.deserialize(_with(_set("nodes", 0, "tag", "TELEPORT")))


def test_internal_ops_are_not_supported():
    """What only expansions make is refused before its attributes are read; every other attribute of an op has a reader."""
    internal = {tag for tag, spec in registry.every().items() if spec.internal}
    assert internal == {"WINDOW"}
    for tag, spec in registry.every().items():
        node = {"tag": tag, "inputs": dict.fromkeys(spec.inputs, "x"), "outputs": dict.fromkeys(spec.outputs, "y")}
        text = json.dumps({"context": {}, "tensors": {}, "nodes": [node]})
        with pytest.raises(cudnn.GraphError) as caught:
            cudnn.pygraph(device="cpu").deserialize(text)
        assert isinstance(caught.value, cudnn.cudnnGraphNotSupportedError) == (tag in internal), tag
        if tag not in internal:
            assert set(spec.attrs) <= set(jsontext._READERS), tag


def test_a_graph_of_one_resample():
    """Null is no fraction, and no attribute is written that nobody reads."""
    g = cudnn.pygraph(device="cpu", io_data_type=F32, compute_data_type=F32)
    g.resample(g.tensor(dim=[1, 2, 4, 4], layout="row", name="x"), "MAXPOOL", [2, 2], generate_index=True)[0].set_output(True)
    assert "generate_index" not in str(g)
    for ratio in ([[None, 1], [2, 1]], [[2], [2, 1]], [[2, 1], [2, 1, 1]], [2, 2], [["2", 1], [2, 1]], 2):
        found = json.loads(str(g))
        found["nodes"][0]["ratio"] = ratio
        with pytest.raises(cudnn.ValidationError, match="ratio"):
            cudnn.pygraph(device="cpu").deserialize(json.dumps(found))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "1", '"text"', "[" * 100_000, "{}", '{"context":{}}', "NaN"])
def test_what_is_no_graph(text):
    with pytest.raises(cudnn.ValidationError):
        cudnn.pygraph(device="cpu").deserialize(text)


NUMBERS = [-1, 0, 1, 2**31, 2**63 - 1, -(2**63), 10**40, 0.5, 1e308]
REPLACEMENTS = [None, True, *NUMBERS, "", "a", "ADD", "3F800000", [], [1], {}, [[0, 1]], "\ud800", "x" * 5000]


def _damaged(text, rng):
    """One random damage: a byte changed, a part cut out, doubled or moved, a number or word replaced."""
    kind = rng.randrange(7)
    i = rng.randrange(len(text))
    j = min(len(text), i + rng.choice([1, 2, 5, 30, 300]))
    if kind == 0:
        return text[:i] + rng.choice(string.printable) + text[i + 1 :]
    if kind == 1:
        return text[:i]
    if kind == 2:
        return text[:i] + text[j:]
    if kind == 3:
        return text[:j] + text[i:j] + text[j:]
    if kind == 4:
        k = rng.randrange(len(text))
        rest = text[:i] + text[j:]
        return rest[:k] + text[i:j] + rest[k:]
    found = json.loads(text)
    places = []

    def walk(node):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            places.append((node, key))
            if isinstance(value, dict | list):
                walk(value)

    walk(found)
    node, key = rng.choice(places)
    if kind == 5:
        node[key] = rng.choice(REPLACEMENTS)
    else:
        del node[key]
    return json.dumps(found)


def test_500_damages_give_a_typed_error_or_a_graph_that_validates():
    rng = random.Random(20)
    g = every_op()
    texts = [str(g)]
    g.build_operation_graph()
    texts.append(str(g))
    refused = valid = 0
    for n in range(500):
        damaged = _damaged(texts[n % 2], rng)
        h = cudnn.pygraph(device="cpu")
        try:
            h.deserialize(damaged)
            h.validate()
            valid += 1
            str(h), h.key()
        except cudnn.GraphError:
            refused += 1
        try:
            h.build_operation_graph()
        except cudnn.GraphError:
            continue
    assert refused > 250 and valid > 20, (refused, valid)


# ------------------------------------------------------------------------------------------------------------------------------------- functions
@pytest.mark.parametrize(
    ("value", "text"),
    [(0.1, "3DCCCCCD"), (-0.0, "80000000"), (float("inf"), "7F800000"), (1e300, "7F800000"), (-1e300, "FF800000"), (3.0, "40400000")],
)
def test_float_hex(value, text):
    assert jsontext.float_hex(value) == text


def test_float_hex_wide():
    assert jsontext.float_hex(0.1, wide=True) == "3FB999999999999A"
