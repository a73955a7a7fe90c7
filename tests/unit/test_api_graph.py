"""Class pygraph: op calls, the five steps and their order, plan methods, execution."""

from __future__ import annotations

import gc
import json
import weakref
from fractions import Fraction

import numpy as np
import pytest

import graphdnn as cudnn
from graphdnn import behavior_note, build_plan_policy, data_type, heur_mode, knob_type, numerical_note, reduction_mode

F32 = data_type.FLOAT
FLOAT = {"io_data_type": F32, "intermediate_data_type": F32, "compute_data_type": F32}
NS, VE, RE, TE = cudnn.cudnnGraphNotSupportedError, ValueError, RuntimeError, TypeError


def graph(**kwargs):
    return cudnn.pygraph(**({"device": "cpu"} | FLOAT | kwargs))


def declared(**kwargs):
    """y = relu(a @ b + bias)."""
    g = graph(**kwargs)
    a = g.tensor(dim=[2, 3, 7], stride=[21, 7, 1], name="a")
    b = g.tensor(dim=[2, 7, 5], stride=[35, 5, 1], name="b")
    bias = g.tensor(dim=[1, 1, 5], stride=[5, 5, 1], name="bias")
    y = g.relu(g.bias(g.matmul(a, b, name="mm"), bias, name="plus"), name="act").set_output(True).set_name("y")
    return g, a, b, bias, y


@pytest.fixture(scope="module")
def built():
    found = declared()
    found[0].build([heur_mode.A, heur_mode.FALLBACK])
    return found


def values(seed=0):
    rng = np.random.default_rng(seed)
    a, b, bias = (rng.standard_normal(s, dtype=np.float32) for s in ((2, 3, 7), (2, 7, 5), (1, 1, 5)))
    return a, b, bias, np.full((2, 3, 5), np.nan, np.float32)


def expected(a, b, bias):
    return np.maximum(a.astype(np.float64) @ b + bias, 0)


def workspace(g, index=None):
    size = g.get_workspace_size() if index is None else g.get_workspace_size_plan_at_index(index)
    return np.empty(size, np.uint8) if size else None


# ---------------------------------------------------------------------------------------------------------------------------------------- op calls
def test_default_names():
    g = graph()
    x, y = (g.tensor(dim=[2, 2], stride=[2, 1]) for _ in range(2))
    m = g.matmul(x, y)
    assert (x.get_name(), y.get_name(), m.get_name()) == ("0::A", "0::B", "0::C")
    z = g.tensor(dim=[2, 2], stride=[2, 1])
    assert g.add(m, z).get_name() == "1::OUT_0" and z.get_name() == "1::IN_1"
    assert g.relu(m, name="act").get_name() == "act::OUT_0"
    assert g.reduction(m, reduction_mode.ADD).get_name() == "::Y"
    assert g.transpose(m, [1, 0], name="t").get_name() == "t::Y"
    assert g.concatenate([m, m], 0).get_name() == "5::Y"
    assert g.reshape(m, name="r").get_name() == "r::Y"
    assert g.slice(m, [slice(0, 1), slice(None)], name="s").get_name() == "s::Y"


def test_outputs_are_virtual_and_unset_before_validate():
    g, *_, y = declared()
    mm = next(t for t in g._tensors if t.get_name() == "mm::C")
    assert mm.get_is_virtual() and not y.get_is_virtual()
    assert y.get_dim() == [] and y.get_stride() == []
    assert g.validate() is None
    assert y.get_dim() == [2, 3, 5] and y.get_stride() == [15, 5, 1] and y.get_data_type() is F32


def test_no_argument_is_a_method_of_another_name():
    """Methods called max, min, abs, pow, slice stand beside the builtins they are named after."""
    g = graph()
    x = g.tensor(dim=[4, 6], stride=[6, 1])
    y = g.abs(g.max(g.slice(x, [slice(1, -1), slice(0, 6, 2)]), g.pow(g.min(x, x), x, name="p")), name="a")
    assert y.get_name() == "a::OUT_0"


@pytest.mark.parametrize(
    "call",
    [
        lambda g, x: g.relu(None),
        lambda g, x: g.relu(3.0),
        lambda g, x: g.add(x, None),
        lambda g, x: g.add(x, "x"),
        lambda g, x: g.add(x, np.ones(3, np.float32)),
        lambda g, x: g.add(1, 2),
        lambda g, x: g.add(x),
        lambda g, x: g.add(x, x, x, x, x),
        lambda g, x: g.add(x, y=x),
        lambda g, x: g.relu(x, negative_slope="a"),
        lambda g, x: g.leaky_relu(x),
        lambda g, x: g.leaky_relu(x, None),
        lambda g, x: g.gen_index(x, 1.5),
        lambda g, x: g.relu(x, compute_data_type="no type"),
        lambda g, x: g.relu(x, name=3),
        lambda g, x: g.matmul(x, None),
        lambda g, x: g.matmul(x, 2.0),
        lambda g, x: g.matmul(x, x, padding="0"),
        lambda g, x: g.reduction(x, "ADD"),
        lambda g, x: g.reduction(x, reduction_mode.ADD, axes="0"),
        lambda g, x: g.reshape(x, reshape_mode="LOGICAL"),
        lambda g, x: g.transpose(x, "10"),
        lambda g, x: g.transpose(x, [0.5, 1]),
        lambda g, x: g.slice(x, slice(0, 1)),
        lambda g, x: g.slice(x, [0, 1]),
        lambda g, x: g.slice(x, [slice("a"), slice(None)]),
        lambda g, x: g.concatenate(x, 0),
        lambda g, x: g.concatenate([x, None], 0),
        lambda g, x: g.concatenate([x], "0"),
        lambda g, x: g.create_execution_plans(heur_mode.A),
        lambda g, x: g.create_execution_plans(["A"]),
        lambda g, x: g.build_plans("ALL"),
        lambda g, x: g.create_execution_plan("0", {}),
        lambda g, x: g.create_execution_plan(0, {"KERNEL_CFG": 0}),
    ],
)
def test_wrong_kinds_are_type_errors(call):
    g = graph()
    x = g.tensor(dim=[2, 3], stride=[3, 1], name="x")
    g.neg(x)
    before = str(g)
    with pytest.raises(TE) as caught:
        call(g, x)
    assert isinstance(caught.value, cudnn.GraphError)
    assert str(g) == before, "a refused call leaves no node behind"


def test_numbers_as_operands(built):
    g = graph()
    x = g.tensor(dim=[2, 3], stride=[3, 1], name="x")
    y = g.add(g.mul(2, g.sub(1.0, x)), np.float32(0.5)).set_output(True)
    g.build([heur_mode.A])
    data, out = np.arange(6, dtype=np.float32).reshape(2, 3), np.empty((2, 3), np.float32)
    g.execute({x: data, y: out}, workspace(g))
    np.testing.assert_array_equal(out, 2 * (1 - data) + 0.5)


SCALARS = {
    "negative_slope": lambda g, x, v: g.relu(x, negative_slope=v),
    "swish_beta": lambda g, x, v: g.swish(x, swish_beta=v),
    "padding": lambda g, x, v: g.matmul(x, g.transpose(x, [1, 0]), padding=v),
    "tensor_scalar": lambda g, x, v: g.mul(x, g.tensor_scalar(v, cudnn.scalar_type.COMPILE_TIME_CONST)),
    "operand": lambda g, x, v: g.add(x, v),
    "epsilon": lambda g, x, v: g.rmsnorm(cudnn.norm_forward_phase.INFERENCE, x, g.tensor(dim=[1, 3], stride=[3, 1], name="s"), epsilon=v)[0],
}
"""Every way to give an op a number (that is not an integer by nature)."""


@pytest.mark.parametrize("name", SCALARS)
def test_numbers_of_every_kind(name):
    """NumPy's scalars count as the numbers that they are; what no float or 64-bit integer holds is refused with a typed error, like what is none."""

    def text(value):
        g = graph()
        SCALARS[name](g, g.tensor(dim=[2, 3], stride=[3, 1], name="x"), value).set_output(True)
        g.validate()
        return str(g)

    assert text(0.5) == text(np.float32(0.5)) == text(np.float16(0.5)) == text(np.float64(0.5)) == text(Fraction(1, 2))
    for beyond in (10**400, Fraction(10**400)):
        with pytest.raises(cudnn.ValidationError):
            text(beyond)
    for none in ("1", 1j, np.complex64(1), None if name == "operand" else "x", [0.5], np.ones(3)):
        with pytest.raises(TE) as caught:
            text(none)
        assert isinstance(caught.value, cudnn.GraphError)


def test_a_tensor_of_another_graph():
    g, other = graph(), graph()
    x = other.tensor(dim=[2], stride=[1], name="stranger")
    with pytest.raises(cudnn.ValidationError, match="stranger"):
        g.relu(x)
    free = cudnn.tensor().set_dim([2]).set_stride([1]).set_name("free")
    assert g.relu(free).get_name() == "0::OUT_0", "a tensor of no graph belongs to the first that uses it"
    with pytest.raises(cudnn.ValidationError, match="free"):
        other.relu(free)


# ------------------------------------------------------------------------------------------------------------------------------------- validate
def test_validate_again_after_mending():
    g = graph()
    x = g.tensor(dim=[2, 3], stride=[3, 1], name="x")
    z = g.tensor(dim=[2, 4], stride=[4, 1], name="z")
    y = g.add(x, z, name="sum").set_output(True)
    for _ in range(2):
        with pytest.raises(VE, match="sum"):
            g.validate()
        assert y.get_dim() == [], "nothing is left of a failed step"
    z.set_dim([1, 3]).set_stride([3, 1])
    g.validate()
    assert y.get_dim() == [2, 3]
    x.set_dim([5, 3])
    g.validate()
    assert y.get_dim() == [5, 3], "what was inferred follows what was declared"
    y.set_dim([5, 3])
    x.set_dim([4, 3])
    with pytest.raises(VE, match=r"5"):
        g.validate()


def test_validate_is_idempotent():
    g, *_ = declared()
    g.validate()
    text, key = str(g), g.key()
    g.validate()
    assert (str(g), g.key()) == (text, key)
    g.build_operation_graph()
    text = str(g)
    g.build_operation_graph()
    assert str(g) == text


def test_an_empty_graph_validates():
    g = graph()
    g.validate()
    g.build_operation_graph()
    assert json.loads(str(g))["nodes"] == []


def test_errors_carry_the_graph():
    g = graph()
    g.relu(cudnn.tensor().set_name("shapeless"), name="act").set_output(True)
    with pytest.raises(VE, match="shapeless") as caught:
        g.validate()
    assert '"RELU_FWD"' in "".join(caught.value.__notes__)
    g, *_ = declared()
    g.build()
    g.create_execution_plans([heur_mode.A])
    g.deselect_engines(["eng"])
    with pytest.raises(NS) as caught:
        g.check_support()
    assert '"MATMUL"' in "".join(caught.value.__notes__)


def test_names_do_not_reach_generated_code(tmp_path):
    evil = f'x"""\nopen({str(tmp_path / "made")!r}, "w")\n"""\n'
    g = graph(name=evil)
    x = g.tensor(dim=[4, 4], layout="row", name=evil)
    m = g.matmul(g.relu(x, name=evil + "1"), x, name=evil).set_output(True).set_name(evil + "m")
    g.reduction(m, reduction_mode.ADD, axes=0, name=evil + "r").set_output(True)
    g.build([heur_mode.A])
    h = graph()
    h.deserialize(g.serialize())
    h.deserialize(str(g))
    assert "made" not in g.plan.source and not (tmp_path / "made").exists()


def test_uids(built):
    g, a, b, bias, y = built
    ids = [t.get_uid() for t in (a, b, bias, y)]
    assert all(ids) and len(set(ids)) == 4
    assert (b.get_uid(), a.get_uid()) == (1, 2), "inputs are numbered in reverse port order, as in the frontend"
    assert g.query_tensor_attributes_of_uid(ids[0]) is a


def test_explicit_uids():
    g = graph()
    x = g.tensor(dim=[2], stride=[1], uid=1)
    z = g.tensor(dim=[2], stride=[1], uid=0)
    y = g.add(x, z).set_output(True)
    g.build()
    assert (x.get_uid(), z.get_uid(), y.get_uid()) == (1, 0, 2)
    y.set_uid(1)
    with pytest.raises(RE, match="already assigned"):
        g.validate()


def test_unset_data_type_is_an_error_of_build_operation_graph():
    g = cudnn.pygraph(device="cpu", compute_data_type=F32)
    g.relu(g.tensor(dim=[2], stride=[1], name="untyped")).set_output(True)
    g.validate()
    with pytest.raises(RE, match="untyped"):
        g.build_operation_graph()


def test_key():
    keys = {declared()[0].key() for _ in range(3)}
    assert len(keys) == 1 and isinstance(keys.pop(), int)
    g, h = declared()[0], declared()[0]
    next(iter(h._tensors)).set_name("other")
    assert g.key() != h.key(), "names are part of it"
    before = g.key()
    g.build_operation_graph()
    assert g.key() != before, "uids are part of it"


# -------------------------------------------------------------------------------------------------------------------------------- order of calls
def test_steps_out_of_order():
    g, a, *_ = declared()
    for error, call in (
        (NS, lambda: g.create_execution_plans([heur_mode.A])),
        (NS, g.check_support),
        (NS, g.build_plans),
        (RE, g.get_workspace_size),
        (RE, lambda: g.get_workspace_size_plan_at_index(0)),
        (RE, lambda: g.execute({}, None)),
        (RE, lambda: g.execute_plan_at_index({}, None, 0)),
        (RE, lambda: g.build_plan_at_index(0)),
        (RE, g.get_engine_count),
        (RE, lambda: g.get_knobs_for_engine(0)),
        (RE, lambda: g.create_execution_plan(0, {})),
        (RE, g.serialize),
        (RE, g.get_behavior_notes),
        (RE, lambda: g.get_plan_name_at_index(0)),
        (RE, lambda: g.deselect_engines(["eng0"])),
        (RE, lambda: g.plan),
    ):
        with pytest.raises(error) as caught:
            call()
        assert isinstance(caught.value, cudnn.GraphError) and not (error is NS and isinstance(caught.value, RE))
    assert g.get_execution_plan_count() == 0
    g.build([heur_mode.A])
    assert g.get_execution_plan_count() > 0


def test_steps_between_create_and_build():
    g, *_ = declared()
    assert g.build() is None and g.get_execution_plan_count() == 0
    g.create_execution_plans([heur_mode.A])
    for call in (g.get_workspace_size, lambda: g.execute({}, None), g.serialize, lambda: g.execute_plan_at_index({}, None, 0)):
        with pytest.raises(RE):
            call()
    assert behavior_note.RUNTIME_COMPILATION in g.get_behavior_notes()
    for index in (-1, 10**6):
        for call in (g.build_plan_at_index, g.get_plan_name_at_index, g.get_workspace_size_plan_at_index, g.get_behavior_notes_for_plan_at_index):
            with pytest.raises(RE):
                call(index)
    g.check_support()
    g.build_plan_at_index(0)
    assert g.get_workspace_size() >= 0


def test_an_op_added_later_needs_the_steps_again(built):
    g, *_, y = declared()
    g.build([heur_mode.A])
    g.neg(y).set_output(True)
    assert g.get_execution_plan_count() == 0
    with pytest.raises(RE):
        g.execute({}, None)
    g.build([heur_mode.A])
    assert len(g._opgraph.outputs) == 2


def test_empty_modes():
    g, *_ = declared()
    g.build()
    with pytest.raises(VE, match="modes"):
        g.create_execution_plans([])


# ------------------------------------------------------------------------------------------------------------------------------------------ plans
@pytest.mark.parametrize("mode", list(heur_mode))
def test_every_heuristic_mode(mode):
    g, a, b, bias, y = declared()
    g.build([mode])
    *inputs, out = values()
    g.execute(dict(zip((a, b, bias, y), (*inputs, out), strict=True)), workspace(g))
    np.testing.assert_allclose(out, expected(*inputs), rtol=1e-5, atol=1e-6)


def test_policy_all_and_execution_by_index():
    g, a, b, bias, y = declared()
    g.build()
    g.create_execution_plans([heur_mode.A, heur_mode.FALLBACK])
    g.check_support()
    g.build_plans(build_plan_policy.ALL)
    count = g.get_execution_plan_count()
    names = [g.get_plan_name_at_index(i) for i in range(count)]
    assert len(set(names)) == count and all("eng" in n for n in names)
    for i in range(count):
        *inputs, out = values(i)
        g.execute_plan_at_index(dict(zip((a, b, bias, y), (*inputs, out), strict=True)), workspace(g, i), i)
        np.testing.assert_allclose(out, expected(*inputs), rtol=1e-5, atol=1e-6)
        assert behavior_note.RUNTIME_COMPILATION in g.get_behavior_notes_for_plan_at_index(i)


def test_engines_knobs_custom_plans():
    """As scripts do it: every engine, every value of KERNEL_CFG, RuntimeError tolerated."""
    g, a, b, bias, y = declared()
    g.validate()
    g.build_operation_graph()
    made = 0
    for engine in range(g.get_engine_count()):
        try:
            knobs = g.get_knobs_for_engine(engine)
        except RuntimeError:
            continue
        assert any(k.type is knob_type.KERNEL_CFG for k in knobs) and all(isinstance(k, cudnn.knob) for k in knobs)
        for k in knobs:
            for value in range(k.min_value, k.max_value + 1, k.stride):
                g.create_execution_plan(engine, {k.type: value})
                made += 1
        g.create_execution_plan(engine, {})
        with pytest.raises(RE):
            g.create_execution_plan(engine, {knob_type.KERNEL_CFG: 10**6})
        with pytest.raises(RE):
            g.create_execution_plan(engine, {knob_type.STAGES: 1})
    assert made and g.get_execution_plan_count() > made
    with pytest.raises(RE):
        g.create_execution_plan(10**6, {})
    g.check_support()
    g.build_plans()
    *inputs, out = values()
    g.execute({a: inputs[0], b: inputs[1], bias: inputs[2], y: out}, workspace(g))
    np.testing.assert_allclose(out, expected(*inputs), rtol=1e-5, atol=1e-6)


def test_filters():
    def planned():
        g, *_ = declared()
        g.build()
        g.create_execution_plans([heur_mode.A])
        return g

    g = planned()
    g.deselect_engines([f"eng{i}" for i in range(g.get_engine_count())])
    with pytest.raises(NS, match="deselected"):
        g.check_support()
    with pytest.raises(NS):
        g.build_plans()
    g = planned()
    g.select_behavior_notes([behavior_note.RUNTIME_COMPILATION])
    g.deselect_behavior_notes([behavior_note.CUBLASLT_DEPENDENCY])
    g.deselect_numeric_notes([numerical_note.NONDETERMINISTIC])
    g.deselect_workspace_greater_than(10**12)
    g.check_support()
    g = planned()
    g.deselect_behavior_notes([behavior_note.RUNTIME_COMPILATION])
    with pytest.raises(NS):
        g.check_support()
    g = planned()
    g.select_numeric_notes([numerical_note.TENSOR_CORE])
    with pytest.raises(NS):
        g.check_support()
    for call in (
        lambda: g.deselect_engines("eng0"),
        lambda: g.select_numeric_notes([behavior_note.RUNTIME_COMPILATION]),
        lambda: g.deselect_workspace_greater_than("1"),
    ):
        with pytest.raises(TE):
            call()


# -------------------------------------------------------------------------------------------------------------------------------------- execution
def test_keys_of_a_variant_pack(built):
    g, a, b, bias, y = built
    for keys in ((a, b, bias, y), [t.get_uid() for t in (a, b, bias, y)], ("a", "b", "bias", "y")):
        *inputs, out = values()
        g.execute(dict(zip(keys, (*inputs, out), strict=True)) | {None: None, 12345: out}, workspace(g))
        np.testing.assert_allclose(out, expected(*inputs), rtol=1e-5, atol=1e-6)


def test_raw_pointers(built):
    g, a, b, bias, y = built
    *inputs, out = values()
    space = np.empty(g.get_workspace_size() + 256, np.uint8)
    pack = {t: v.ctypes.data for t, v in zip((a, b, bias, y), (*inputs, out), strict=True)}
    g.execute(pack, space.ctypes.data + (-space.ctypes.data) % 256)
    np.testing.assert_allclose(out, expected(*inputs), rtol=1e-5, atol=1e-6)


def test_torch_buffers(built):
    import torch
    g, a, b, bias, y = built
    *inputs, out = values()
    result = torch.from_numpy(out)
    space = torch.empty(g.get_workspace_size(), dtype=torch.uint8)
    g.execute(dict(zip((a, b, bias, y), (*map(torch.from_numpy, inputs), result), strict=True)), space)
    np.testing.assert_allclose(result.numpy(), expected(*inputs), rtol=1e-5, atol=1e-6)


def test_by_value_tensors_are_read_at_execute():
    import torch
    g = graph()
    x = g.tensor(dim=[2, 3], stride=[3, 1])
    s = g.tensor(dim=[1, 1], stride=[1, 1], is_pass_by_value=True, name="s")
    t = g.tensor_like(torch.zeros(1, 1))
    y = g.add(g.mul(x, s), t).set_output(True)
    g.build([heur_mode.A])
    data, out = np.ones((2, 3), np.float32), np.empty((2, 3), np.float32)
    for given in (2.0, np.float32(3), np.full((1, 1), 4, np.float32), torch.full((1, 1), 5.0)):
        g.execute({x: data, s: given, t: torch.full((1, 1), 0.5), y: out}, workspace(g))
        assert (out == np.asarray(given).item() + 0.5).all()
    with pytest.raises(VE, match="'s'"):
        g.execute({x: data, t: 1.0, y: out}, workspace(g))


def test_runtime_scalar_has_a_default():
    g = graph()
    x = g.tensor(dim=[2], stride=[1])
    s = g.tensor_scalar(2.5, cudnn.scalar_type.RUNTIME_PARAM)
    y = g.mul(x, s).set_output(True)
    g.build([heur_mode.A])
    data, out = np.ones(2, np.float32), np.empty(2, np.float32)
    g.execute({x: data, y: out}, workspace(g))
    assert (out == 2.5).all()
    g.execute({x: data, y: out, s: 4.0}, workspace(g))
    assert (out == 4).all()


def test_handles_at_execute(built):
    g, a, b, bias, y = built
    *inputs, out = values()
    pack = dict(zip((a, b, bias, y), (*inputs, out), strict=True))
    handle = cudnn.create_handle("cpu")
    g.execute(pack, workspace(g), handle)
    g.execute(pack, workspace(g), handle=int(handle))
    cudnn.set_stream(handle=handle, stream=0)
    g.execute(pack, workspace(g), handle)
    with pytest.raises(RE, match="device"):
        g.execute(pack, workspace(g), cudnn.create_handle("cudasim"))
    cudnn.destroy_handle(handle)
    with pytest.raises(RE, match="live handle"):
        g.execute(pack, workspace(g), handle)


def test_overrides_of_shapes():
    g = graph(is_override_shape_enabled=True)
    x = g.tensor(dim=[2, 3], stride=[3, 1], uid=1)
    y = g.relu(x).set_output(True).set_uid(2)
    g.build([heur_mode.A])
    data, out = np.arange(-10, 10, dtype=np.float32).reshape(4, 5), np.empty((4, 5), np.float32)
    for strides in ([[5, 1], [5, 1]], None, [[20, 5, 1], [20, 5, 1]]):
        out[:] = np.nan
        g.execute(
            {1: data, 2: out}, None, override_uids=[1, 2, 77], override_shapes=[(4, 5), (4, 5), (1,)], override_strides=strides and [*strides, (1,)]
        )
        np.testing.assert_array_equal(out, np.maximum(data, 0))
    small = np.full((2, 3), -1, np.float32)
    g.execute({x: small, y: small}, None, override_uids=[1], override_shapes=[[2, 3]], override_strides=[[3, 1]])
    assert (small == 0).all() and len(g._variants) == 1, "the declared shape is no override"
    with pytest.raises(VE):
        g.execute({1: data, 2: out}, None, override_uids=[1], override_shapes=[])
    fixed = graph()
    x = fixed.tensor(dim=[2, 3], stride=[3, 1], uid=1)
    fixed.relu(x).set_output(True)
    fixed.build([heur_mode.A])
    with pytest.raises(VE, match="is_override_shape_enabled"):
        fixed.execute({1: data, 2: out}, None, override_uids=[1], override_shapes=[(4, 5)])


def test_explain_and_draw(built, tmp_path):
    report = built[0].explain()
    assert report.kernels == 1 and report.unfused_kernels == 3 and "matmul" in str(report)
    g, *_ = declared()
    assert g.explain().kernels == 1 and g.get_execution_plan_count() == 0, "explaining keeps no plans"
    assert "<svg" in g.draw(tmp_path / "g.svg") and (tmp_path / "g.svg").stat().st_size > 100
    assert built[0].draw(format="mermaid").startswith("flowchart")
    assert "def " in built[0].plan.source


def test_graphs_are_freed():
    g, *_ = declared()
    g.build([heur_mode.A])
    gone = weakref.ref(g)
    del g, _
    gc.collect()
    assert gone() is None


# ------------------------------------------------------------------------------------------------------------------------- graph, jit, graph_cache
def test_jit_and_graph_cache():
    calls = []

    @cudnn.jit(heur_modes=heur_mode.A)
    @cudnn.graph_cache(key_fn=lambda handle, n: n, maxsize=2)
    def doubled(handle, n):
        """Twice."""
        calls.append(n)
        with cudnn.graph(handle, io_data_type=F32) as (g, tensors):
            assert tensors == []
            x = g.tensor(dim=[n], stride=[1])
            y = g.add(x, x).set_output(True)
        return g, [x, y]

    assert doubled.__doc__ == "Twice."
    handle = cudnn.create_handle("cpu")
    g, (x, y) = doubled(handle, 3)
    again, _ = doubled(handle, 3)
    assert again is g and g == again and calls == [3] and isinstance(x, int)
    out = np.empty(3, np.float32)
    g.execute({x: np.ones(3, np.float32), y: out}, None, handle=handle)
    assert (out == 2).all()
    doubled(handle, 4), doubled(handle, 5), doubled(handle, 3)
    assert calls == [3, 4, 5, 3], "the oldest goes first"


def test_jit_takes_a_list_and_leaves_built_graphs_alone():
    g, *tensors = declared()
    g.build([heur_mode.A])
    plan = g.plan

    @cudnn.jit([heur_mode.A, heur_mode.FALLBACK])
    def same():
        return g, tensors

    found, uids = same()
    assert found is g and g.plan is plan and uids == [t.get_uid() for t in tensors]


def test_graph_defaults():
    with cudnn.graph(None) as (g, _):
        assert (g._io, g._intermediate, g._compute) == (data_type.HALF, F32, F32)


def test_dims_given_to_reshape_by_position_are_told_the_way():
    g = graph()
    with pytest.raises(TypeError, match=r"'RESHAPE': a name has the wrong type.*found \(3, 2\).*set_dim"):
        g.reshape(g.tensor(dim=[2, 3], stride=[3, 1]), (3, 2))


@pytest.mark.parametrize("call", [lambda g, x: g.reduction(x, "sum"), lambda g, x: g.conv_fprop(x, x, padding=1), lambda g, x: g.tensor((2, 3))])
def test_no_error_names_what_has_no_name(call):
    g = graph()
    with pytest.raises(TypeError) as caught:
        call(g, g.tensor(dim=[2, 3], stride=[3, 1]))
    assert "''" not in str(caught.value).partition("graph: ")[0]
