"""The reference: conversions, memory, values of small graphs, and error bounds that hold and are tight."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from graphdnn import reference
from graphdnn.dtypes import data_type, info, numpy_dtype, storable
from graphdnn.errors import ValidationError
from graphdnn.ir.tensor import Tensor
from graphdnn.opspecs import folds, registry
from graphdnn.opspecs.evaluate import evaluate
from graphdnn.opspecs.pointwise import POINTWISE
from graphdnn.opspecs.reduction import REDUCTION, reduced_axes
from graphdnn.opspecs.spans import Arithmetic, Span, exact
from graphdnn.passes.infer import Context
from tests.unit.declare import Declared
from tests.unit.test_opspecs import NUMPY, Plain

F32, F64, F16, BF16, I8, U8, I32, I64, I4, B = (
    data_type[n] for n in ("FLOAT", "DOUBLE", "HALF", "BFLOAT16", "INT8", "UINT8", "INT32", "INT64", "INT4", "BOOLEAN")
)
E4M3, E5M2, E8M0, FP4 = data_type.FP8_E4M3, data_type.FP8_E5M2, data_type.FP8_E8M0, data_type.FP4_E2M1
INF, NAN = math.inf, math.nan


# --------------------------------------------------------------------------------------------------------------------------------- conversions
@pytest.mark.parametrize(
    ("dtype", "values", "want"),
    [
        (I8, [0.5, 1.5, -2.5, 127.4, 500.0, -INF, NAN], [0, 2, -2, 127, 127, -128, 0]),
        (U8, [-1.0, 255.5, 0.51], [0, 255, 1]),
        (I4, [-9.0, 7.5, 2.5], [-8, 7, 2]),
        (I32, [2.0**31, -(2.0**40), 2147483646.5], [2**31 - 1, -(2**31), 2147483646]),
        (I64, [2.0**63, -INF, 2.0**62], [2**63 - 1, -(2**63), 2**62]),
        (I8, [128, -129, 256, 1000], [-128, 127, 0, -24]),
        (U8, [-1, 256], [255, 0]),
        (I4, [8, -9], [-8, 7]),
        (I32, [2**31, -(2**31) - 1, 2**40 + 7], [-(2**31), 2**31 - 1, 7]),
        (B, [0.0, -0.0, 0.1, NAN, -INF], [0, 0, 1, 1, 1]),
        (B, [0, 2, -1], [0, 1, 1]),
        (F32, [2**24 + 1, 1], [2**24, 1]),
        (F16, [65519.0, 65520.0, 2.0**-25, 2.0**-24], [65504, INF, 0, 2.0**-24]),
        (F16, [1 + 2.0**-11 + 2.0**-40], [1 + 2.0**-10]),  # one rounding, not two
        (BF16, [1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8, 1e39], [1 + 2.0**-7, 1, INF]),
        (E4M3, [448.0, 464.0, 1e9, -INF, NAN, 17.0, 19.0], [448, 448, 448, -448, NAN, 16, 20]),
        (E5M2, [1e9, INF, NAN], [57344, 57344, NAN]),
        (FP4, [5.0, 7.0, -INF, NAN, 0.25, 0.75, 2.5], [4, 6, -6, 0, 0, 1, 2]),
        (E8M0, [1.0, 3.0, 5.0, 0.0, INF, -1.0, NAN], [1, 4, 4, 2.0**-127, 2.0**127, NAN, NAN]),
    ],
)
def test_round_to(dtype, values, want):
    got = reference.round_to(values, dtype)
    np.testing.assert_array_equal(got, want)
    assert got.dtype == (np.float64 if info(dtype).kind == "f" else np.int64)


@pytest.mark.parametrize("dtype", [F16, BF16, E4M3, E5M2])
def test_rounding_of_floats_is_that_of_torch(dtype):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(4000) * 2.0 ** rng.integers(-12, 8, 4000)).astype(np.float32)
    x = np.clip(x, *info(dtype).limits).astype(np.float32)
    want = torch.from_numpy(x).to(getattr(torch, info(dtype).torch)).double().numpy()
    np.testing.assert_array_equal(reference.round_to(x, dtype), want)


def every_value(dtype):
    bits = info(dtype).bits
    if bits == 4:
        return reference.decode(np.arange(256, dtype=np.uint8), dtype, 512)
    if bits == 8:
        return reference.decode(np.arange(256, dtype=np.uint8), dtype)
    rng = np.random.default_rng(1)
    return reference.decode(rng.integers(0, 256, 4000 * bits // 8, dtype=np.uint8).view(f"u{bits // 8}"), dtype)


@pytest.mark.parametrize("dtype", storable(), ids=lambda d: d.name)
def test_every_value_survives_rounding_and_storage(dtype):
    values = every_value(dtype)
    if dtype is E5M2:
        values = values[~np.isinf(values)]  # may be read, is never written
    np.testing.assert_array_equal(reference.round_to(values, dtype), values)
    stored = reference.encode(values, dtype)
    np.testing.assert_array_equal(reference.decode(stored, dtype, values.size), values)
    if info(dtype).bits == 4:
        assert stored.dtype == np.uint8 and stored.size == (values.size + 1) // 2
    else:
        assert stored.dtype == numpy_dtype(dtype)


def test_four_bit_elements_are_packed_low_half_first():
    assert reference.encode([1, -1, 7], I4).tolist() == [0xF1, 0x07]
    assert reference.encode([1.0, 6.0, -0.5], FP4).tolist() == [0x72, 0x09]


# -------------------------------------------------------------------------------------------------------------------------------------- memory
LAYOUTS = [((2, 3), (3, 1)), ((2, 3), (1, 2)), ((2, 3), (10, 3)), ((3, 4), (-4, 1)), ((2, 3), (5, -2)), ((), ()), ((0, 3), (3, 1)), ((1, 3), (77, 1))]


@pytest.mark.parametrize("dtype", [F32, BF16, I64, B, I4, FP4, E4M3], ids=lambda d: d.name)
@pytest.mark.parametrize(("dim", "stride"), LAYOUTS)
@pytest.mark.parametrize("offset", [None, 12])
def test_memory_round_trip(dtype, dim, stride, offset):
    t = Tensor("t", 1, dim, stride, dtype)
    values = reference.round_to(np.random.default_rng(2).integers(-4, 5, dim), dtype)
    buffer = reference.to_storage(values, t, offset=offset)
    np.testing.assert_array_equal(reference.from_storage(buffer, t, offset=offset), values)
    np.testing.assert_array_equal(reference.from_storage(buffer.view(np.uint8), t, offset=offset), values)


def test_memory_of_given_buffers():
    t = Tensor("t", 1, (2, 2), (4, 1), F32)
    buffer = np.full(8, np.nan, np.float32)
    assert reference.to_storage([[1, 2], [3, 4]], t, buffer, offset=2) is buffer
    np.testing.assert_array_equal(buffer, [NAN, NAN, 1, 2, NAN, NAN, 3, 4])
    repeated = Tensor("r", 1, (2, 3), (0, 1), F32)
    assert reference.from_storage(np.arange(3, dtype=np.float32), repeated).tolist() == [[0, 1, 2]] * 2
    nibbles = np.full(3, 0xAB, np.uint8)
    reference.to_storage([1, 2], Tensor("n", 1, (2,), (2,), I4), nibbles, offset=1)
    assert nibbles.tolist() == [0x1B, 0x2B, 0xAB]
    for offset in (5, -1):
        with pytest.raises(ValidationError, match="too small"):
            reference.from_storage(buffer, t, offset=offset)
    with pytest.raises(ValidationError, match="contiguous"):
        reference.to_storage(1.0, t, np.zeros((4, 8), np.float32)[:, ::2])


# ------------------------------------------------------------------------------------------------------------------------------------- running
def one(g: Declared, y, feeds, **more):
    graph, ids = g.build()
    return reference.run(graph, {ids[t]: v for t, v in feeds.items()}, **more)[ids[y]]


def test_a_small_graph_is_numpy():
    g = Declared(Context(F32, F32, F32))
    x, w, b = g.tensor((2, 3, 4)), g.tensor((4, 5)), g.tensor((5,))
    t = g.pointwise("ADD", g.node("MATMUL", {"A": x, "B": w}), b)
    y = g.output(g.node("REDUCTION", {"X": g.pointwise("GELU_FWD", t)}, mode="AMAX", axes=(0, 2), keepdim=False))
    rng = np.random.default_rng(0)
    feeds = {x: rng.normal(size=(2, 3, 4)).astype(np.float32), w: rng.normal(size=(4, 5)).astype(np.float32), b: np.arange(5)}
    want = torch.nn.functional.gelu(torch.tensor(feeds[x]).double() @ torch.tensor(feeds[w]).double() + torch.arange(5)).abs().amax((0, 2))
    np.testing.assert_allclose(one(g, y, feeds), want.numpy(), rtol=1e-6)


def test_N6_virtual_rounding_is_kept():
    for dtype, count in ((BF16, 1), (F32, 1)):
        g = Declared(Context(F32, F32, F32))
        a = g.tensor((8,))
        t = g.pointwise("DIV", a, g.scalar(3.0), dtype=dtype)
        m = g.node("REDUCTION", {"X": t}, out=((1,), None), mode="AMAX")
        y = g.output(g.node("REDUCTION", {"X": g.pointwise("CMP_EQ", t, m)}, out=((1,), None), mode="ADD"))
        assert one(g, y, {a: np.arange(1, 9)}).tolist() == [count]


@pytest.mark.parametrize(("middle", "want"), [(None, 256), (U8, 0)])
def test_N8_integers_wrap_at_declared_tensors(middle, want):
    g = Declared()
    a = g.tensor((2,), dtype=U8)
    t = g.pointwise("ADD", a, a)
    if middle is not None:
        t.dtype = middle
    y = g.output(g.pointwise("IDENTITY", t), I32)
    assert one(g, y, {a: [128, 128]}).tolist() == [want] * 2
    g = Declared()
    a = g.tensor((2,), dtype=U8)
    t = g.pointwise("NEG", g.pointwise("ABS", a))
    if middle is not None:
        t.dtype = middle
    y = g.output(g.node("REDUCTION", {"X": t}, out=((1,), None), mode="ADD"), I32)
    assert one(g, y, {a: [200, 200]}).tolist() == [-400 if middle is None else 112]


def test_integers_wrap_in_the_compute_type():
    g = Declared()
    a = g.tensor((2,), dtype=I32)
    y = g.output(g.pointwise("MUL", a, a), I64)
    assert one(g, y, {a: [65537, 3]}).tolist() == [65537**2 % 2**32, 9]
    g = Declared()
    a = g.tensor((2, 2), dtype=I32)
    y = g.output(g.node("MATMUL", {"A": a, "B": a}), I64)
    assert one(g, y, {a: [[2**16, 0], [0, 3]]}).tolist() == [[0, 0], [0, 9]]
    g = Declared()
    a = g.tensor((3,), dtype=I32)
    y = g.output(g.node("REDUCTION", {"X": a}, out=((1,), None), mode="AVG"), I32)
    assert one(g, y, {a: [2**31 - 1] * 3}).tolist() == [2**31 - 1]


def test_operands_enter_in_the_compute_type():
    g = Declared()
    a = g.tensor((4,))
    y = g.output(g.pointwise("ADD", a, a, compute=I32), F32)
    assert one(g, y, {a: [0.5, 1.5, 1e30, NAN]}).tolist() == [0, 4, -2, 0]
    g = Declared()
    a = g.tensor((1,), dtype=F64)
    y = g.output(g.pointwise("SUB", a, g.scalar(1.0), compute=F32), F64)
    assert one(g, y, {a: [1 + 2.0**-40]}).tolist() == [0]
    g = Declared()
    a = g.tensor((2,), dtype=I32)
    y = g.output(g.pointwise("EXP", a, compute=I32), F32)
    np.testing.assert_allclose(one(g, y, {a: [1, -1]}), np.exp([1, -1]), rtol=1e-7)
    g = Declared()
    a = g.tensor((2,), dtype=I32)
    y = g.output(g.node("REDUCTION", {"X": a}, out=((1,), None), mode="NORM2"), I32)
    assert one(g, y, {a: [60000, 80000]}).tolist() == [100000]


def test_movement_ops_convert_straight():
    g = Declared(Context(F32, F32, F32))
    a, b = g.tensor((2, 3), dtype=F64), g.tensor((2, 1), dtype=I64)
    t = g.node("TRANSPOSE", {"X": a}, permutation=(1, 0), dtype=F64)
    y = g.output(g.node("RESHAPE", {"X": t}, out=((6,), None), dtype=F64))
    c = g.output(g.node("CONCATENATE", {"0": a, "1": b}, axis=1, dtype=I64))
    s = g.output(g.node("SLICE", {"X": a}, slices=((1, 2), (None, None)), slice_strides=(1, 2), dtype=I8))
    graph, ids = g.build()
    fine = 1 + 2.0**-40
    got = reference.run(graph, {ids[a]: [[fine, 2, 3], [4, 5, 600]], ids[b]: [[2**60 + 1], [7]]})
    assert got[ids[y]].tolist() == [fine, 4, 2, 5, 3, 600]
    assert got[ids[c]].tolist() == [[1, 2, 3, 2**60 + 1], [4, 5, 600, 7]]
    assert got[ids[s]].tolist() == [[4, 127]]


def test_gen_index_is_logical():
    g = Declared()
    x = g.tensor((2, 3, 4), (1, 8, 2))
    y = g.output(g.pointwise("GEN_INDEX", x, axis=1), F32)
    np.testing.assert_array_equal(one(g, y, {x: np.zeros((2, 3, 4))}), np.broadcast_to(np.arange(3)[:, None], (2, 3, 4)))


def test_feeds():
    g = Declared()
    x, s = g.tensor((2, 3), name="given"), g.scalar(0.5, constant=False)
    y = g.output(g.pointwise("MUL", x, s), F32)
    graph, ids = g.build()
    assert reference.run(graph, {ids[x]: 2})[ids[y]].tolist() == [[1] * 3] * 2
    assert reference.run(graph, {ids[x]: 2, ids[s]: 3})[ids[y]].tolist() == [[6] * 3] * 2
    assert reference.run(graph, {ids[x]: np.ones((2, 3), ml_dtypes.bfloat16)})[ids[y]].tolist() == [[0.5] * 3] * 2
    with pytest.raises(ValidationError, match="given"):
        reference.run(graph, {})
    with pytest.raises(ValidationError, match="shape"):
        reference.run(graph, {ids[x]: np.zeros((3, 2))})


# ---------------------------------------------------------------------------------------------------------------------------------- error bounds
def executed(graph, feeds, rng):
    """The graph as a kernel calculates it: every operation rounded to the compute type, sums in a random order."""
    known = {t: reference.round_to(np.broadcast_to(v, graph.tensors[t].dim), graph.tensors[t].dtype) for t, v in feeds.items()}
    for t in graph.inputs:
        known.setdefault(t, reference.round_to(np.full(graph.tensors[t].dim, graph.tensors[t].value), graph.tensors[t].dtype))
    for n in graph.nodes:
        (out,), attrs = n.output_ids, dict(n.attrs)
        target = graph.tensors[out]
        spec = registry.spec(n.op)
        if spec.role == "movement":
            moved = spec.reference(n, [target.dim], [reference.round_to(known[t], target.dtype) for t in n.input_ids])[0]
            known[out] = moved
            continue
        compute = registry.carrier(n.op, attrs, n.compute)
        operands = [reference.round_to(known[t], compute).astype(NUMPY[compute]) for t in n.input_ids]
        with np.errstate(all="ignore"):
            result = RUNNERS[spec.role](n, attrs, target.dim, operands, compute, rng)
        known[out] = reference.round_to(result, target.dtype)
    return known


def run_pointwise(n, attrs, dim, operands, compute, rng):
    row = POINTWISE[attrs["mode"]]
    names = dict(zip("abc", operands, strict=False)) | row.values(attrs, compute)
    if "axis" in row.attrs:
        names["index"] = row.reference(np.zeros(dim), axis=attrs["axis"])
    return np.broadcast_to(evaluate(row.expression(compute), names, Plain(compute)), dim)


def run_reduction(n, attrs, dim, operands, compute, rng):
    row, x = REDUCTION[attrs["mode"]], operands[0]
    axes = reduced_axes(attrs, x.shape, dim)
    if compute in (I32, I64):
        return row.reference(x, axes).reshape(dim)
    others = [a for a in range(x.ndim) if a not in axes]
    rows = np.moveaxis(x, others, range(len(others))).reshape(*(x.shape[a] for a in others), -1)
    algebra, count = Plain(compute), rows.shape[-1]
    parts = [evaluate(row.map, {"a": rows[..., i]}, algebra) for i in rng.permutation(count)]
    while len(parts) > 1:
        i = rng.integers(len(parts) - 1)
        parts[i : i + 2] = [evaluate(row.combine, {"x": parts[i], "y": parts[i + 1]}, algebra)]
    return np.asarray(evaluate(row.finalize, {"x": parts[0], "n": NUMPY[compute](count)}, algebra)).reshape(dim)


def run_matmul(n, attrs, dim, operands, compute, rng):
    a, b = operands
    total = np.zeros(dim, NUMPY[compute])
    for k in rng.permutation(a.shape[-1]):
        total = total + a[..., :, k, None] * b[..., k, None, :]
    return total


RUNNERS = {"pointwise": run_pointwise, "reduction": run_reduction, "matmul": run_matmul}
UNARY = [m for m, r in POINTWISE.items() if len(r.args) == 1 and m not in ("GEN_INDEX", "TAN")]
BINARY = [m for m, r in POINTWISE.items() if len(r.args) == 2]


def random_graph(rng) -> tuple[Declared, dict]:
    g = Declared()
    dim = (2, 3, 4)
    dtypes = [F32, F32, F16, BF16, F64, E4M3, I32, I8]
    feeds, pool = {}, []

    def fresh(shape):
        t = g.tensor(shape, dtype=dtypes[rng.integers(len(dtypes))])
        feeds[t] = rng.choice([rng.normal(0, 2, shape), rng.integers(-4, 5, shape) / 4, np.abs(rng.normal(1, 1, shape))])
        return t

    pool.append(fresh(dim))
    for _ in range(rng.integers(1, 7)):
        x, kind = pool[rng.integers(len(pool))], rng.random()
        more = {"dtype": [F32, BF16, I8, F64][rng.integers(4)]} if rng.random() < 0.3 else {}
        if kind < 0.4:
            y = g.pointwise(UNARY[rng.integers(len(UNARY))], x, **more)
        elif kind < 0.7:
            y = g.pointwise(BINARY[rng.integers(len(BINARY))], x, pool[rng.integers(len(pool))] if rng.random() < 0.5 else fresh((1, 4)), **more)
        elif kind < 0.85:
            y = g.node("REDUCTION", {"X": x}, mode=list(REDUCTION)[rng.integers(9)], axes=(2,), keepdim=True, **more)
        elif kind < 0.93:
            g.infer()
            y = g.node("MATMUL", {"A": x, "B": fresh((x.dim[-1], 4))}, **more)
        else:
            y = g.node("TRANSPOSE", {"X": x}, permutation=(0, 1, 2), **more)
        pool.append(y)
    g.output(g.pointwise("IDENTITY", pool[-1]), F32)
    return g, feeds


def test_bounds_hold_for_what_a_kernel_calculates():
    """Random graphs, executed in their compute types with sums in random order: nothing lies outside its bound; most bounds say something."""
    elements = open_ = 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        g, feeds = random_graph(rng)
        graph, ids = g.build()
        given = {ids[t]: v for t, v in feeds.items() if t in ids}
        bounded, got = reference.run_with_error(graph, given), executed(graph, given, rng)
        for t, (value, bound) in bounded.items():
            wrong = reference.mismatches(got[t], value, bound)
            node = graph.nodes[graph.producer[t]]
            assert not wrong.any(), f"seed {seed}, {node}: {got[t][wrong][:3]} against {value[wrong][:3]} +- {bound[wrong][:3]}"
            np.testing.assert_array_equal(reference.round_to(value, graph.tensors[t].dtype), value)
            elements, open_ = elements + value.size, open_ + int(np.isinf(bound).sum())
    assert open_ < 0.02 * elements, f"{open_} of {elements} elements have no bound"


def test_bounds_of_low_precision_are_half_a_unit():
    g = Declared(Context(F32, F32, F32))
    a, b = g.tensor((1000,), dtype=BF16), g.tensor((1000,), dtype=BF16)
    y = g.output(g.pointwise("MUL", a, b), BF16)
    graph, ids = g.build()
    rng = np.random.default_rng(0)
    value, bound = reference.run_with_error(graph, {ids[a]: rng.normal(size=1000), ids[b]: rng.normal(size=1000)})[ids[y]]
    assert np.mean(bound == 0) > 0.98, "the product of two bf16 numbers is exact in float32: only near ties is the rounding open"
    assert (bound <= 2.0**-7 * np.abs(value)).all()


def test_sums_of_grid_numbers_are_exact():
    g = Declared(Context(F32, F32, F32))
    a, b = g.tensor((3, 64)), g.tensor((64, 5))
    m = g.output(g.node("MATMUL", {"A": a, "B": b}))
    s = g.output(g.node("REDUCTION", {"X": a}, mode="ADD", axes=(1,), keepdim=False))
    graph, ids = g.build()
    rng = np.random.default_rng(0)
    feeds = {ids[a]: rng.integers(-8, 9, (3, 64)) / 4, ids[b]: rng.integers(-8, 9, (64, 5)) / 8}
    for value, bound in reference.run_with_error(graph, feeds).values():
        assert (bound == 0).all() and value.any()
    feeds = {ids[a]: rng.normal(size=(3, 64)), ids[b]: rng.normal(size=(64, 5))}
    for t, (value, bound) in reference.run_with_error(graph, feeds).items():
        assert (bound > 0).all() and (bound < 1e-3).all(), (graph.tensors[t], value, bound)
    assert ids[m] != ids[s]


def bounded(mode, *operands, dtype=F32, compute=F32, **attrs):
    g = Declared()
    tensors = [g.tensor(np.shape(x)) for x in operands]
    y = g.output(g.pointwise(mode, *tensors, compute=compute, **attrs), dtype)
    graph, ids = g.build()
    return reference.run_with_error(graph, {ids[t]: x for t, x in zip(tensors, operands, strict=True)})[ids[y]]


def test_special_values_are_certain_where_their_causes_are():
    value, bound = bounded("EXP", [NAN, INF, -INF, 0.0, 200.0])
    np.testing.assert_array_equal(value, [NAN, INF, 0, 1, INF])
    assert (bound[[0, 1, 4]] == 0).all() and bound[3] > 0
    value, bound = bounded("ADD", [INF, INF, NAN, 3.0], [1.0, -INF, 1.0, 4.0])
    np.testing.assert_array_equal(value, [INF, NAN, NAN, 7])
    assert (bound == 0).all()
    value, bound = bounded("DIV", [1.0, 1.0, 0.0, 1.0], [0.0, -0.0, 0.0, 3.0])
    np.testing.assert_array_equal(value[:3], [INF, -INF, NAN])
    assert (bound == 0).all()
    value, bound = bounded("LOG", [-1.0, 0.0])
    np.testing.assert_array_equal(value, [NAN, -INF])
    assert (bound == 0).all()
    value, bound = bounded("MUL", [0.0, 1e30], [INF, 1e30])
    np.testing.assert_array_equal(value, [NAN, INF])
    assert (bound == 0).all()


def test_jumps_are_covered_where_the_interval_straddles_them():
    g = Declared(Context(F32, F32, F32))
    x = g.tensor((4,))
    t = g.pointwise("MUL", g.pointwise("EXP", x), g.scalar(0.1))
    floor, step = g.output(g.pointwise("FLOOR", t)), g.output(g.pointwise("CMP_GE", t, g.scalar(1.0)))
    whole = g.output(g.pointwise("IDENTITY", t, dtype=I8))
    graph, ids = g.build()
    got = reference.run_with_error(graph, {ids[x]: [math.log(10), math.log(15), math.log(12), 0.3]})
    assert (got[ids[floor]][1] == [1, 0, 0, 0]).all()
    assert (got[ids[step]][1] == [1, 0, 0, 0]).all()
    assert (got[ids[whole]][1] == [0, 1, 0, 0]).all(), "1.5 rounds to 1 or 2"


def test_overflow_and_cancellation():
    g = Declared(Context(F32, F32, F32))
    x = g.tensor((3,))
    s = g.output(g.node("REDUCTION", {"X": x}, mode="ADD", axes=(0,)))
    n = g.output(g.node("REDUCTION", {"X": x}, mode="NORM2", axes=(0,)))
    graph, ids = g.build()
    got = reference.run_with_error(graph, {ids[x]: [3e38, 3e38, -3e38]})
    assert np.isinf(got[ids[s]][1]), "the order decides whether a partial sum overflows"
    got = reference.run_with_error(graph, {ids[x]: [1e30, 1.0, 1.0]})
    assert np.isinf(got[ids[n]][1]), "a square overflows unless it is calculated in more than the compute type"
    got = reference.run_with_error(graph, {ids[x]: [1.0, 2.0**-30, -1.0]})
    value, bound = got[ids[s]]
    assert value == 2.0**-30 and 2.0**-30 <= bound < 1e-6


def test_products_may_be_fused_with_the_next_addition():
    """fma(a, b, c) and a * b + c rounded twice are both inside."""
    a = np.float32(1 + 2.0**-12)
    value, bound = bounded("ADD_SQUARE", [-1.0], [float(a)])
    fused, twice = float(a) ** 2 - 1, float(np.float32(a * a) - np.float32(1))
    assert fused != twice and abs(fused - value[0]) <= bound[0] and abs(twice - value[0]) <= bound[0]


def test_integer_results_are_exact_or_unknown():
    g = Declared()
    x, z = g.tensor((3,)), g.tensor((3,), dtype=I32)
    t = g.pointwise("EXP", x, dtype=I32)
    exact_sum, loose = g.output(g.pointwise("MUL", z, z), I64), g.output(g.pointwise("ADD", t, z), I32)
    graph, ids = g.build()
    got = reference.run_with_error(graph, {ids[x]: [0.0, math.log(2.5), 20.0], ids[z]: [2**20, -3, 4]})
    assert (got[ids[exact_sum]][1] == 0).all() and got[ids[exact_sum]][0][0] == 2**40 % 2**32
    value, bound = got[ids[loose]]
    assert bound[0] == 0 and bound[1] == 1 and 0 < bound[2] < 2000


def test_mismatches():
    value, bound = np.array([1.0, NAN, INF, 5.0, 2.0, NAN]), np.array([0.1, 0.0, 0.0, INF, 0.0, INF])
    assert not reference.mismatches([1.05, NAN, INF, NAN, 2.0, 3.0], value, bound).any()
    assert reference.mismatches([1.2, 0.0, 1.0, NAN, NAN, 3.0], value, bound).tolist() == [True, True, True, False, True, False]
    assert reference.mismatches(np.array([2**62 + 1]), np.array([2**62]), np.zeros(1)).all()
    assert not reference.mismatches(np.array([3], np.int8), np.array([3]), np.zeros(1)).any()


# ------------------------------------------------------------------------------------------------------------------------------- interval rules
@pytest.mark.parametrize("mode", [m for m in POINTWISE if m != "GEN_INDEX"])
def test_intervals_cover_every_point_inside(mode):
    """Random boxes of operands, among them ones across 0 and wide ones; 30 points of each box, ends included."""
    row, rng = POINTWISE[mode], np.random.default_rng(3)
    count, boxes = len(row.args), 3000
    arithmetic, spans, points = Arithmetic(F64), [], []
    for _ in range(count):
        center = np.round(rng.normal(0, 3, boxes) * 4) / 4
        width = rng.choice([0.0, 1e-9, 1e-3, 0.5, 3.0], boxes)
        lo, hi = np.where(rng.random(boxes) < 0.3, 0.0, center), center + width
        lo, hi = np.minimum(lo, hi), np.maximum(lo, hi)
        lo, hi = np.where(width == 0, center, lo), np.where(width == 0, center, hi)
        spans.append(Span(lo, hi, np.zeros(boxes, bool)))
        at = np.concatenate([np.zeros((1, boxes)), np.ones((1, boxes)), rng.random((28, boxes))])
        points.append(np.clip(lo + at * (hi - lo), lo, hi))
    values = row.values({}, F64)
    found = evaluate(row.expr, dict(zip("abc", spans, strict=False)) | values, arithmetic)
    with np.errstate(all="ignore"):
        want = row.reference(*points, **values)
    slack = np.where(np.isfinite(want), 1e-14 + 1e-12 * np.abs(want), 0.0)
    inside = np.where(np.isnan(want), found.nan, (want + slack >= found.lo) & (want - slack <= found.hi))
    assert inside.all(), [(s.lo[~inside.all(0)][0], s.hi[~inside.all(0)][0]) for s in spans]


@pytest.mark.parametrize("mode", REDUCTION)
def test_reduction_intervals_cover_every_point_inside(mode):
    rng = np.random.default_rng(4)
    lo = np.round(rng.normal(0, 2, (500, 6)) * 4) / 4
    hi = lo + rng.choice([0.0, 1e-3, 1.0], (500, 6))
    found = folds.reduce(REDUCTION[mode], Span(lo, hi, np.zeros(lo.shape, bool)), (1,), Arithmetic(F64))
    for _ in range(30):
        x = lo + rng.choice([0.0, 0.5, 1.0], lo.shape) * (hi - lo)
        want = REDUCTION[mode].reference(x, (1,))
        slack = 1e-12 * (1 + np.abs(want))
        assert ((want >= found.lo - slack) & (want <= found.hi + slack)).all()


def test_matmul_intervals():
    rng = np.random.default_rng(5)
    lo_a, lo_b = rng.normal(size=(2, 3, 7)), rng.normal(size=(7, 5))
    hi_a, hi_b = lo_a + 0.01, lo_b + 0.02
    zero = [np.zeros(x.shape, bool) for x in (lo_a, lo_b)]
    found = folds.matmul(Span(lo_a, hi_a, zero[0]), Span(lo_b, hi_b, zero[1]), Arithmetic(F32))
    for _ in range(30):
        value = (lo_a + rng.random(lo_a.shape) * 0.01) @ (lo_b + rng.random(lo_b.shape) * 0.02)
        assert ((value >= found.lo) & (value <= found.hi)).all()
    assert (found.hi - found.lo).max() < 1
    a, b = np.array([[1.0, INF], [1.0, 2.0]]), np.array([[1.0, 0.0], [1.0, 0.0]])
    found = folds.matmul(exact(a), exact(b), Arithmetic(F32))
    np.testing.assert_array_equal(found.lo, [[INF, NAN], [3, 0]])
    assert found.nan.tolist() == [[False, True], [False, False]]
    uncertain = Span(b - 0.1, b + 0.1, np.zeros(b.shape, bool))
    assert folds.matmul(exact(a), uncertain, Arithmetic(F32)).nan[0].all()


def test_quantum():
    assert folds.quantum(np.array([0.75, 6.0, -1.0, 0.0, INF, 2.0**-1074])).tolist() == [0.25, 2, 1, INF, 0, 2.0**-1074]
