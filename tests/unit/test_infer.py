"""infer and check: the rules of the API page, the errors that it lacks, and resolved data types."""

from __future__ import annotations

import copy

import pytest

from graphdnn.dtypes import data_type
from graphdnn.errors import BuildError, NotSupportedError, ValidationError
from graphdnn.ir import layout
from graphdnn.passes.check import carrier, check
from graphdnn.passes.infer import Context, infer
from tests.unit.declare import Declared

F32, F64, F16, BF16, I8, I32, I64, B, NOT_SET = (
    data_type[n] for n in ("FLOAT", "DOUBLE", "HALF", "BFLOAT16", "INT8", "INT32", "INT64", "BOOLEAN", "NOT_SET")
)


def said(caught) -> str:
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------------------- pointwise
@pytest.mark.parametrize(
    ("a", "b", "dim", "stride"),
    [
        (((2, 3), (3, 1)), ((2, 3), (1, 2)), (2, 3), (1, 2)),  # the last operand with the result's dims
        (((2, 3), (1, 2)), ((2, 3), (3, 1)), (2, 3), (3, 1)),
        (((2, 3), (1, 2)), ((1, 3), (3, 1)), (2, 3), (1, 2)),
        (((3,), (1,)), ((2, 3), (1, 2)), (2, 3), (1, 2)),
        (((2, 3, 1), None), ((2, 1, 5), None), (2, 3, 5), (15, 1, 3)),  # none: IN_0's order, on ties the earlier dim is faster
        (((1, 2, 1), (2, 1, 7)), ((1, 1, 2), (9, 4, 1)), (1, 2, 2), (2, 1, 2)),
        (((3,), (1,)), ((2, 1), (1, 1)), (2, 3), (3, 1)),  # dims that IN_0 lacks are slowest
        (((), ()), ((2, 3), (3, 1)), (2, 3), (3, 1)),
        (((2, 3), (9, 2)), ((), ()), (2, 3), (9, 2)),
        (((0, 3), (3, 1)), ((1, 3), (3, 1)), (0, 3), (3, 1)),
    ],
)
def test_pointwise_dims_and_strides(a, b, dim, stride):
    g = Declared()
    y = g.pointwise("ADD", g.tensor(*a), g.tensor(*b))
    g.infer()
    assert (y.dim, y.stride) == (dim, stride)


def test_strides_of_a_ternary_come_from_the_last_that_fits():
    g = Declared()
    a, b, mask = g.tensor((2, 3), (3, 1)), g.tensor((2, 3), (1, 2)), g.tensor((2, 1), (1, 1))
    y = g.pointwise("BINARY_SELECT", a, b, mask)
    g.infer()
    assert y.stride == (1, 2)


def test_non_virtual_output_without_a_pattern_needs_strides():
    g = Declared()
    y = g.output(g.pointwise("ADD", g.tensor((2, 3, 1)), g.tensor((2, 1, 5))))
    with pytest.raises(ValidationError, match="output strides could not be computed.*set_stride"):
        g.infer()
    y.stride = (15, 5, 1)
    g.infer()
    assert y.dim == (2, 3, 5) and y.stride == (15, 5, 1)


def test_broadcast_error_names_everything():
    g = Declared()
    a, c = g.tensor((2, 1, 16, 16), name="A"), g.tensor((2, 1, 16, 256), name="C")
    g.pointwise("ADD", a, c)
    with pytest.raises(ValidationError) as caught:
        g.infer()
    for part in ("n0", "'A'", "'C'", "[2, 1, 16, 16]", "[2, 1, 16, 256]", "axis 3"):
        assert part in said(caught)


def test_broadcast_error_of_a_ternary_names_the_pair_that_clashes():
    g = Declared()
    g.pointwise("BINARY_SELECT", g.tensor((2, 3), name="p"), g.tensor((1, 3), name="q"), g.tensor((4, 1), name="m"))
    with pytest.raises(ValidationError, match="'p' and 'm'.*axis 0"):
        g.infer()


@pytest.mark.parametrize("dim", [(0, 4), (2, 3), (4, 2)])
def test_output_dims_of_the_user_must_be_the_inferred_ones(dim):
    g = Declared()
    y = g.pointwise("NEG", g.tensor((2, 4)), out=(dim, None))
    with pytest.raises(ValidationError, match="contradict"):
        g.infer()
    y.dim = (2, 4)
    g.infer()
    assert y.stride == (4, 1)


def test_pointwise_operands_and_mode():
    for mode, operands, what in [("ADD", 1, "IN_1"), ("NEG", 2, "1 operands"), (None, 1, "mode"), ("FROBNICATE", 1, "FROBNICATE")]:
        g = Declared()
        g.node("POINTWISE", {f"IN_{i}": g.tensor((2,)) for i in range(operands)}, mode=mode)
        with pytest.raises(ValidationError, match=what):
            g.infer()
    g = Declared()
    g.node("POINTWISE", {"IN_0": None}, mode="NEG")
    with pytest.raises(ValidationError, match="IN_0"):
        g.infer()


def test_gen_index_axis():
    for given, want in ((1, 1), (-1, 2), (-3, 0)):
        g = Declared()
        g.pointwise("GEN_INDEX", g.tensor((2, 3, 4)), axis=given)
        g.infer()
        assert g.nodes[0].attrs["axis"] == want
    for given, dim in ((3, (2, 3, 4)), (-4, (2, 3, 4)), (None, (2,)), (0, ()), (True, (2, 3))):
        g = Declared()
        g.pointwise("GEN_INDEX", g.tensor(dim), axis=given)
        with pytest.raises(ValidationError, match="axis"):
            g.infer()


def test_attributes_without_meaning():
    for attrs in ({"softplus_beta": 0.0}, {"softplus_beta": float("nan")}):
        g = Declared()
        g.pointwise("SOFTPLUS_FWD", g.tensor((2,)), **attrs)
        with pytest.raises(ValidationError, match="softplus_beta"):
            g.infer()


# ------------------------------------------------------------------------------------------------------------------------------------- scalars
def test_scalar_dims_become_ones_of_the_other_rank():
    g = Declared()
    two = g.scalar(2.0)
    y = g.pointwise("MUL", two, g.tensor((2, 3, 4), (12, 1, 3)))
    g.infer()
    assert two.dim == two.stride == (1, 1, 1)
    assert y.dim == (2, 3, 4) and y.stride == (12, 1, 3)


def test_scalar_shared_by_two_ranks_adds_no_dims():
    g = Declared()
    half = g.scalar(0.5, constant=False)
    x, z = g.pointwise("MUL", g.tensor((2, 3, 4)), half), g.pointwise("MUL", g.tensor((5,)), half)
    r = g.pointwise("ADD", g.tensor(()), half)
    for _ in range(2):
        g.infer()
        assert x.dim == (2, 3, 4) and z.dim == (5,) and r.dim == ()
        assert half.dim == ()


def test_scalars_alone_keep_one_dim():
    g = Declared()
    y = g.pointwise("ADD", g.scalar(1), g.scalar(2.0))
    g.infer()
    assert y.dim == (1,)


def test_scalar_dims_survive_an_error():
    g = Declared()
    two = g.scalar(2.0)
    g.pointwise("MUL", g.tensor((2, 3)), two)
    g.pointwise("ADD", g.tensor((2,)), g.tensor((3,)))
    with pytest.raises(ValidationError):
        g.infer()
    assert two.dim == (1, 1)


# -------------------------------------------------------------------------------------------------------------------------------------- matmul
@pytest.mark.parametrize(
    ("a", "b", "dim"),
    [((3, 7), (7, 5), (3, 5)), ((2, 3, 7), (2, 7, 5), (2, 3, 5)), ((1, 3, 7), (4, 7, 5), (4, 3, 5)), ((3, 7), (4, 7, 5), (4, 3, 5)),
     ((6, 1, 3, 7), (4, 7, 5), (6, 4, 3, 5)), ((2, 3, 0), (2, 0, 5), (2, 3, 5))],
)  # fmt: skip
def test_matmul_dims_are_row_major(a, b, dim):
    g = Declared()
    y = g.node("MATMUL", {"A": g.tensor(a), "B": g.tensor(b, layout.by_name(b, "column"))})
    g.infer()
    assert y.dim == dim and y.stride == layout.packed(dim)


@pytest.mark.parametrize(
    ("a", "b", "what"),
    [((3, 7), (8, 5), "K differs"), ((3, 7), (5, 7), "transpose"), ((2, 3, 7), (3, 7, 5), "batch axis 0"),
     ((4, 2, 3, 7), (4, 3, 7, 5), "batch axis 1"), ((7,), (7, 5), "rank >= 2"), ((3, 7), (), "rank >= 2")],
)  # fmt: skip
def test_matmul_errors(a, b, what):
    g = Declared()
    g.node("MATMUL", {"A": g.tensor(a, name="left"), "B": g.tensor(b, name="right")})
    with pytest.raises(ValidationError, match=what) as caught:
        g.infer()
    assert "n0" in said(caught) and ("left" in said(caught) or "right" in said(caught))


def test_matmul_needs_both():
    g = Declared()
    g.node("MATMUL", {"A": g.tensor((2, 3))})
    with pytest.raises(ValidationError, match="input B"):
        g.infer()


# ----------------------------------------------------------------------------------------------------------------------------------- reduction
@pytest.mark.parametrize(
    ("out", "attrs", "dim", "stride"),
    [
        (None, {}, (2, 3, 4), (12, 1, 3)),  # no dims: those of the input, channels last
        ((2, 1, 4), {}, (2, 1, 4), (4, 1, 1)),
        ((1, 1, 1), {}, (1, 1, 1), (1, 1, 1)),
        ((2, 3, 4), {}, (2, 3, 4), (12, 1, 3)),
        (None, {"axes": (1,), "keepdim": True}, (2, 1, 4), (4, 1, 1)),
        (None, {"axes": (1,), "keepdim": False}, (2, 4), (4, 1)),
        (None, {"axes": (-1, 0), "keepdim": False}, (3,), (1,)),
        (None, {"axes": (0, 1, 2), "keepdim": False}, (), ()),
        (None, {"axes": (), "keepdim": False}, (2, 3, 4), (12, 1, 3)),
        ((2, 4), {"axes": (1,)}, (2, 4), (4, 1)),
    ],
)
def test_reduction_dims(out, attrs, dim, stride):
    g = Declared()
    y = g.node("REDUCTION", {"X": g.tensor((2, 3, 4))}, out=None if out is None else (out, None), mode="ADD", **attrs)
    g.infer()
    assert (y.dim, y.stride) == (dim, stride)


@pytest.mark.parametrize(
    ("out", "attrs", "what"),
    [((2, 4), {}, "axes="), ((2, 2, 4), {}, "1 where it reduces"), ((2, 3, 4), {"axes": (1,), "keepdim": True}, "contradict"),
     (None, {"axes": (3,)}, "out of range"), (None, {"axes": (0, -3)}, "twice"), (None, {"mode": "MEDIAN"}, "MEDIAN")],
)  # fmt: skip
def test_reduction_errors(out, attrs, what):
    g = Declared()
    g.node("REDUCTION", {"X": g.tensor((2, 3, 4))}, out=None if out is None else (out, None), **({"mode": "ADD"} | attrs))
    with pytest.raises(ValidationError, match=what):
        g.infer()


def test_reduction_mode_not_set_is_found_at_the_operation_graph():
    g = Declared()
    g.node("REDUCTION", {"X": g.tensor((2, 3))}, mode="NOT_SET")
    g.infer()
    with pytest.raises(BuildError, match="mode"):
        check(g.nodes)


@pytest.mark.parametrize("mode", ["MAX", "MIN", "AVG", "ADD", "AMAX"])
@pytest.mark.parametrize("dtype", [I32, F32])
def test_reduction_of_nothing_in_integers(mode, dtype):
    g = Declared()
    g.node("REDUCTION", {"X": g.tensor((3, 0), dtype=dtype)}, out=((3, 1), None), mode=mode)
    g.infer()
    if dtype is I32 and mode in ("MAX", "MIN", "AVG"):
        with pytest.raises(ValidationError, match="no elements"):
            check(g.nodes)
    else:
        check(g.nodes)


# ------------------------------------------------------------------------------------------------------------------------------------ movement
def test_reshape():
    for out, attrs, dim, stride in [
        (((6, 4), None), {}, (6, 4), (4, 1)),
        (((3, 2, 4), None), {}, (3, 2, 4), (8, 1, 2)),
        (((3, 8), (8, 1)), {"reshape_mode": "LOGICAL"}, (3, 8), (8, 1)),
        (None, {"dim": (4, -1)}, (4, 6), (6, 1)),
        (((4, -1), None), {}, (4, 6), (6, 1)),
        (None, {"dim": (4, 6), "stride": (1, 4)}, (4, 6), (1, 4)),
        (((6, 4), None), {"dim": (), "stride": ()}, (6, 4), (4, 1)),
    ]:
        g = Declared()
        y = g.node("RESHAPE", {"X": g.tensor((2, 3, 4))}, out=out, **attrs)
        g.infer()
        assert (y.dim, y.stride) == (dim, stride)
    g = Declared()
    y = g.node("RESHAPE", {"X": g.tensor((1, 1))}, out=((), ()))
    g.infer()
    assert y.dim == ()


@pytest.mark.parametrize(
    ("out", "attrs", "what"),
    [(None, {}, "set_dim"), (((3, 5), None), {}, "24 elements"), (None, {"dim": (-1, -1)}, "elements"), (None, {"dim": (5, -1)}, "elements"),
     (((6, 4), None), {"reshape_mode": "SIDEWAYS"}, "SIDEWAYS"), (((4, 6), None), {"dim": (6, 4)}, "contradict")],
)  # fmt: skip
def test_reshape_errors(out, attrs, what):
    g = Declared()
    g.node("RESHAPE", {"X": g.tensor((2, 3, 4))}, out=out, **attrs)
    with pytest.raises(ValidationError, match=what):
        g.infer()


def test_transpose_is_a_view():
    g = Declared()
    y = g.node("TRANSPOSE", {"X": g.tensor((2, 3, 4), (100, 5, 1))}, permutation=(2, 0, -2))
    g.infer()
    assert y.dim == (4, 2, 3) and y.stride == (1, 100, 5) and g.nodes[0].attrs["permutation"] == (2, 0, 1)


@pytest.mark.parametrize("permutation", [(0, 1), (0, 1, 1), (0, 1, 3), None, (), (0, 1, 2, 3)])
def test_bad_permutation_is_a_runtime_error(permutation):
    g = Declared()
    g.node("TRANSPOSE", {"X": g.tensor((2, 3, 4))}, permutation=permutation)
    with pytest.raises(BuildError, match="permutation"):
        g.infer()


def test_slice_is_a_view_with_python_semantics():
    g = Declared()
    slices, steps = ((None, None), (-3, None), (1, 100), (0, -1)), (1, 2, 3, 1)
    y = g.node("SLICE", {"X": g.tensor((2, 5, 8, 3))}, slices=slices, slice_strides=steps)
    g.infer()
    assert y.dim == (2, 2, 3, 2) and y.stride == (120, 48, 9, 1)
    assert g.nodes[0].attrs["slices"] == ((0, 2), (2, 5), (1, 8), (0, 2))
    again = copy.deepcopy(g.nodes[0].attrs)
    g.infer()
    assert g.nodes[0].attrs == again


@pytest.mark.parametrize(
    ("slices", "steps", "what"),
    [(((0, 2),), (1,), "one slice for every dim"), (((0, 2), (0, 3)), (1, 0), "step >= 1"), (((0, 2), (0, 3)), (-1, 1), "forward"),
     (((0, 0), (0, 3)), (1, 1), "empty"), (((0, 2), (3, 9)), (1, 1), "empty"), ((), (), "one slice"), (((0, 2), (0, 3)), (1,), "one slice")],
)  # fmt: skip
def test_slice_errors(slices, steps, what):
    g = Declared()
    g.node("SLICE", {"X": g.tensor((2, 3))}, slices=slices, slice_strides=steps)
    with pytest.raises(ValidationError, match=what):
        g.infer()


def test_slice_of_an_empty_extent_stays_empty():
    g = Declared()
    y = g.node("SLICE", {"X": g.tensor((0, 3))}, slices=((None, None), (1, 3)), slice_strides=(1, 1))
    g.infer()
    assert y.dim == (0, 2)


def test_concatenate():
    g = Declared()
    parts = {"0": g.tensor((2, 3, 4), (12, 1, 3)), "1": g.tensor((2, 5, 4)), "2": g.tensor((2, 0, 4))}
    y = g.node("CONCATENATE", parts, axis=-2)
    g.infer()
    assert y.dim == (2, 8, 4) and y.stride == (32, 1, 8) and g.nodes[0].attrs["axis"] == 1


@pytest.mark.parametrize(
    ("dims", "attrs", "error", "what"),
    [(((2, 3), (2, 4)), {"axis": 2}, BuildError, "axis"), (((2, 3), (2, 4)), {"axis": 0}, ValidationError, "another axis"),
     (((2, 3), (3,)), {"axis": 0}, ValidationError, "another axis"), ((), {"axis": 0}, ValidationError, "at least one"),
     (((2, 3), (2, 3)), {"axis": 0, "in_place_index": 2}, ValidationError, "in_place_index"), (((),), {"axis": 0}, BuildError, "axis")],
)  # fmt: skip
def test_concatenate_errors(dims, attrs, error, what):
    g = Declared()
    g.node("CONCATENATE", {str(i): g.tensor(d) for i, d in enumerate(dims)}, **attrs)
    with pytest.raises(error, match=what):
        g.infer()


# ---------------------------------------------------------------------------------------------------------------------- tensors and the graph
@pytest.mark.parametrize(
    ("change", "what"),
    [({"dim": None}, "dims not set"), ({"stride": None}, "strides not set"), ({"stride": (1,)}, "rank"), ({"dim": (2, -3)}, "negative"),
     ({"virtual": True}, "no node writes"), ({"virtual": True, "by_value": True}, "by value"), ({"by_value": True}, "one element"),
     ({"dim": (2**40, 2**40)}, "too large"), ({"stride": (2**63, 1)}, "too large"), ({"vector_count": 4, "vector_dimension": 2}, "vectorized dim")],
)  # fmt: skip
def test_user_tensor_errors(change, what):
    g = Declared()
    x = g.tensor((2, 3), name="mine")
    for name, value in change.items():
        setattr(x, name, value)
    g.pointwise("NEG", x)
    with pytest.raises(ValidationError, match=what) as caught:
        g.infer()
    assert "mine" in said(caught)


def test_ragged_offsets_are_consistent():
    for change, what in (({"dtype": F32}, "INT32"), ({"dim": (3, 1), "stride": (1, 1)}, "one entry a batch"), ({}, "")):
        g = Declared()
        x = g.tensor((3, 4), name="packed")
        x.ragged_offset = g.tensor((4, 1), dtype=I32)
        for name, value in change.items():
            setattr(x.ragged_offset, name, value)
        g.pointwise("NEG", x)
        if what:
            with pytest.raises(ValidationError, match=what):
                g.infer()
        else:
            g.infer()
            with pytest.raises(NotSupportedError, match="ragged"):
                check(g.nodes)


def test_inputs_may_overlap_and_run_backwards_outputs_may_not():
    g = Declared()
    x, z = g.tensor((3, 4), (2, 1)), g.tensor((3, 4), (-4, 1))
    y = g.pointwise("ADD", x, z)
    g.infer()
    assert y.stride == (-4, 1), "a virtual result has the rule's strides"
    for stride, what in (((2, 1), "overlaps itself"), ((0, 1), "overlaps itself"), ((-4, 1), "negative")):
        g = Declared()
        g.output(g.pointwise("NEG", g.tensor((3, 4)), out=((3, 4), stride)))
        with pytest.raises(ValidationError, match=what):
            g.infer()
    g = Declared()
    y = g.output(g.pointwise("NEG", g.tensor((1, 4)), out=((1, 4), (0, 1))))
    g.infer()


@pytest.mark.parametrize(("stride", "want"), [((0, 1), (1, 3)), ((-4, 1), (4, 1)), ((2, 1), (4, 1)), ((1, -3), (1, 3))])
def test_output_does_not_take_over_strides_that_cannot_be_written(stride, want):
    g = Declared()
    y = g.output(g.pointwise("NEG", g.tensor((3, 4), stride)))
    g.infer()
    assert y.stride == want


def test_graph_errors():
    g, other = Declared(), Declared()
    g.pointwise("NEG", other.tensor((2,), name="stranger"))
    with pytest.raises(ValidationError, match="stranger.*another graph"):
        g.infer()
    g = Declared()
    y = g.pointwise("NEG", g.tensor((2,)))
    g.nodes.append(copy.copy(g.nodes[0]))
    with pytest.raises(ValidationError, match="one producer"):
        g.infer()
    g = Declared()
    a = g.pointwise("NEG", g.tensor((2,)))
    b = g.pointwise("ABS", a)
    g.nodes[0].inputs["IN_0"] = b
    with pytest.raises(ValidationError, match="cycle.*n0"):
        g.infer()
    g = Declared()
    x, y = g.tensor((2,), uid=7), g.tensor((2,), uid=7)
    g.pointwise("ADD", x, y)
    with pytest.raises(BuildError, match="uid 7 already assigned"):
        g.infer()
    g = Declared()
    g.pointwise("NEG", g.tensor((2,)))
    g.nodes[0].op = "NO_SUCH_OP"
    with pytest.raises(NotSupportedError, match="NO_SUCH_OP"):
        g.infer()


def test_empty_graph_and_any_order_of_nodes():
    infer([], [], Context())
    g = Declared()
    a = g.pointwise("NEG", g.tensor((2, 3)))
    b = g.pointwise("ABS", a)
    g.nodes.reverse()
    g.infer()
    assert b.dim == (2, 3)


def test_infer_twice_changes_nothing():
    g = Declared(Context(F16, F32, F32))
    x, w = g.tensor((2, 3, 4), dtype=NOT_SET), g.tensor((2, 4, 5), (20, 1, 4), dtype=NOT_SET)
    m = g.node("MATMUL", {"A": x, "B": w})
    s = g.pointwise("MUL", m, g.scalar(0.5))
    r = g.node("REDUCTION", {"X": s}, mode="AMAX", axes=(-1,), keepdim=False)
    c = g.node("CONCATENATE", {"0": s, "1": s}, axis=-1)
    g.output(g.node("SLICE", {"X": c}, slices=((None, None), (0, 2), (-4, None)), slice_strides=(1, 1, 2)))
    g.infer()
    before = [copy.deepcopy((t.dim, t.stride, t.dtype)) for t in g.tensors] + [copy.deepcopy((n.attrs, n.compute)) for n in g.nodes]
    g.infer()
    assert before == [(t.dim, t.stride, t.dtype) for t in g.tensors] + [(n.attrs, n.compute) for n in g.nodes]
    assert r.dim == (2, 3)


# ---------------------------------------------------------------------------------------------------------------------------------- data types
def test_fill_from_the_context():
    g = Declared(Context(BF16, F32, F64))
    x = g.tensor((2,), dtype=NOT_SET)
    a = g.pointwise("NEG", x)
    b = g.output(g.pointwise("NEG", a, compute=F32))
    fixed = g.output(g.pointwise("NEG", a, dtype=I8))
    g.infer()
    assert (x.dtype, a.dtype, b.dtype, fixed.dtype) == (BF16, F32, BF16, I8)
    assert [n.compute for n in g.nodes] == [F64, F32, F64]


@pytest.mark.parametrize(
    ("dtypes", "want"),
    [((F16, F16), F32), ((F32, F64), F64), ((I8, I8), I32), ((I8, I64), I64), ((I8, F16), F32), ((B, B), I32), ((B, I64), I64), ((F64, I64), F64)],
)
def test_compute_type_that_is_not_set(dtypes, want):
    g = Declared()
    y = g.pointwise("ADD", *(g.tensor((2,), dtype=d) for d in dtypes))
    g.infer()
    assert y.dtype is NOT_SET and g.nodes[0].compute is NOT_SET
    check(g.nodes)
    assert g.nodes[0].compute is want and y.dtype is want


def test_virtual_types_follow_through_the_graph():
    g = Declared()
    a = g.pointwise("ADD", g.tensor((2,), dtype=F64), g.tensor((2,), dtype=F32))
    b = g.pointwise("NEG", a)
    g.nodes.reverse()
    g.infer()
    check(g.nodes)
    assert b.dtype is F64 and g.nodes[0].compute is F64


def test_virtual_type_of_a_row_that_needs_floats():
    g = Declared()
    y, z = (g.pointwise(m, g.tensor((2,), dtype=I32)) for m in ("EXP", "ABS"))
    half = g.pointwise("ABS", g.tensor((2,), dtype=F16), compute=F16)
    g.infer()
    check(g.nodes)
    assert y.dtype is F32 and z.dtype is I32 and half.dtype is F16
    assert [carrier(n) for n in g.nodes] == [F32, I32, F32]


def test_carrier_of_boolean_beside_floats():
    g = Declared()
    x, b = g.tensor((2,), dtype=F16), g.tensor((2,), dtype=B)
    for operands in ((x, x), (b, b), (x, g.tensor((2,), dtype=F64))):
        g.pointwise("LOGICAL_AND", *operands, compute=B)
    g.infer()
    check(g.nodes)
    assert [carrier(n) for n in g.nodes] == [F32, I32, F64]


def test_data_type_errors():
    g = Declared()
    g.pointwise("NEG", g.tensor((2,), dtype=NOT_SET, name="untyped"))
    g.infer()
    with pytest.raises(BuildError, match="untyped.*not set"):
        check(g.nodes)
    g = Declared()
    y = g.output(g.pointwise("NEG", g.tensor((2,))))
    g.infer()
    with pytest.raises(BuildError, match=f"{y.name}.*not set"):
        check(g.nodes)
    for where in ("input", "output", "compute"):
        g = Declared()
        x, odd = g.tensor((2,)), data_type.INT8x4
        y = g.output(g.pointwise("NEG", x), F32)
        target, name = {"input": (x, "dtype"), "output": (y, "dtype"), "compute": (g.nodes[0], "compute")}[where]
        setattr(target, name, odd)
        g.infer()
        with pytest.raises(NotSupportedError, match="INT8x4"):
            check(g.nodes)


def test_movement_may_convert():
    g = Declared(Context(F32, F32, F32))
    g.output(g.node("SLICE", {"X": g.tensor((4,), dtype=BF16)}, slices=((1, 3),), slice_strides=(1,)), I8)
    g.infer()
    check(g.nodes)


def test_reordered_tensors_are_not_for_these_ops():
    g = Declared(Context(F32, F32, F32))
    g.pointwise("NEG", g.tensor((2,), reordering="F8_128x4", name="scales"))
    g.infer()
    with pytest.raises(NotSupportedError, match="scales.*F8_128x4|F8_128x4.*scales"):
        check(g.nodes)
