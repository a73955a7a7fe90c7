"""The tables: complete, self-consistent, and every expression equal to its reference in every compute type."""

from __future__ import annotations

import ast
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from graphdnn.dtypes import data_type
from graphdnn.errors import NotSupportedError
from graphdnn.opspecs import registry, scalars
from graphdnn.opspecs.evaluate import evaluate
from graphdnn.opspecs.pointwise import POINTWISE
from graphdnn.opspecs.reduction import REDUCTION, reduced_axes
from graphdnn.opspecs.rounding import round_to
from graphdnn.opspecs.shapes import broadcast_dims, overlaps
from graphdnn.opspecs.spans import Arithmetic, exact

F32, F64, I32, I64 = data_type.FLOAT, data_type.DOUBLE, data_type.INT32, data_type.INT64
NUMPY = {F32: np.float32, F64: np.float64, I32: np.int32, I64: np.int64}
API_MODES = """ADD MUL SQRT MAX MIN RELU_FWD TANH_FWD SIGMOID_FWD ELU_FWD GELU_FWD SOFTPLUS_FWD SWISH_FWD RELU_BWD TANH_BWD SIGMOID_BWD ELU_BWD
GELU_BWD SOFTPLUS_BWD SWISH_BWD ERF IDENTITY GELU_APPROX_TANH_BWD GELU_APPROX_TANH_FWD GEN_INDEX BINARY_SELECT EXP LOG NEG MOD POW ABS CEIL COS FLOOR
RSQRT SIN LOGICAL_NOT TAN SUB ADD_SQUARE DIV CMP_EQ CMP_NEQ CMP_GT CMP_GE CMP_LT CMP_LE LOGICAL_AND LOGICAL_OR RECIPROCAL""".split()
API_METHODS = {
    "a b": "add sub mul div add_square logical_and logical_or",
    "input bias": "bias",
    "input scale": "scale",
    "input0 input1": "max min mod pow",
    "input comparison": "cmp_eq cmp_neq cmp_gt cmp_ge cmp_lt cmp_le",
    "input0 input1 mask": "binary_select",
    "input": "gen_index relu leaky_relu elu gelu gelu_approx_tanh sigmoid softplus swish tanh identity abs neg sqrt rsqrt reciprocal exp log ceil "
    "floor sin cos tan erf logical_not",
    "loss input": "relu_backward leaky_relu_backward elu_backward gelu_backward gelu_approx_tanh_backward sigmoid_backward softplus_backward "
    "swish_backward tanh_backward",
}
FUNCTIONS = "exp log sin cos tan tanh erf sqrt rsqrt pow floor ceil abs nanmax nanmin floormod truediv ipow expm1 log1p sigmoid".split()


class Plain:
    """The dialect in NumPy, every operation rounded to one type: what a kernel does."""

    def __init__(self, compute: data_type) -> None:
        self.type = NUMPY[compute]

    def constant(self, value):
        if isinstance(value, float) and issubclass(self.type, np.integer):
            limits = np.iinfo(self.type)
            value = limits.max if value == math.inf else limits.min if value == -math.inf else round(value)
        return self.type(value) if not isinstance(value, np.ndarray) else value.astype(self.type)

    def binary(self, op, x, y):
        return np.asarray({"+": np.add, "-": np.subtract, "*": np.multiply}[op](x, y))

    def negative(self, x):
        return np.negative(x)

    def compare(self, op, x, y):
        return {"==": x == y, "!=": x != y, "<": x < y, "<=": x <= y, ">": x > y, ">=": x >= y}[op]

    def both(self, x, y):
        return x & y

    def either(self, x, y):
        return x | y

    def opposite(self, x):
        return ~x

    def choose(self, condition, yes, no):
        return np.where(condition, yes, no)

    def call(self, name, args):
        wide = [np.asarray(a, np.float64) for a in args]
        if name in ("truediv", "floormod", "ipow"):
            own = np.broadcast_arrays(*(np.asarray(a, self.type) for a in args))
            return {"truediv": scalars.divide, "floormod": scalars.modulo, "ipow": scalars.power}[name](*own)
        if name in ("nanmax", "nanmin", "abs"):
            return {"nanmax": np.maximum, "nanmin": np.minimum, "abs": np.abs}[name](*args)
        table = {"erf": scalars.erf, "sigmoid": scalars.sigmoid, "rsqrt": lambda x: 1 / np.sqrt(x), "pow": np.power}
        return np.asarray(table.get(name, getattr(np, name, None))(*wide)).astype(self.type)


def plain(row, operands, compute, attrs=None):
    values = row.values(attrs or {}, compute)
    names = dict(zip("abc", (np.asarray(x, NUMPY[compute]) for x in operands), strict=False)) | values
    if "axis" in row.attrs:
        names["index"] = np.indices(np.shape(operands[0]))[values["axis"]]
    with np.errstate(all="ignore"):
        return np.broadcast_to(evaluate(row.expression(compute), names, Plain(compute)), np.shape(operands[0]))


def reference(row, operands, compute, attrs=None):
    wide = {F32: np.float64, F64: np.float64, I32: np.int32, I64: np.int64}[compute]
    with np.errstate(all="ignore"):
        return row.reference(*(np.asarray(x, wide) for x in operands), **row.values(attrs or {}, compute))


def grid(values, count):
    """All combinations of ``values`` for ``count`` operands."""
    return [np.array(x) for x in zip(*itertools.product(values, repeat=count), strict=True)]


INF, NAN = math.inf, math.nan
SPECIAL = [NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -3.0, 6.0, 7.0, 89.0, -89.0, 100.0, -100.0, 1e4, -1e4, 1e-3, -1e-3, 39.0, -39.0]
SPECIAL += [41.0, -41.0, 2.7]
ATTRIBUTES = {
    "RELU_FWD": [{}, {"relu_lower_clip_slope": 0.1}, {"relu_lower_clip": -0.5, "relu_upper_clip": 6.0, "relu_lower_clip_slope": 2.0}],
    "RELU_BWD": [{}, {"relu_lower_clip_slope": 0.1}, {"relu_lower_clip": -0.5, "relu_upper_clip": 6.0, "relu_lower_clip_slope": 2.0}],
    "SWISH_FWD": [{}, {"swish_beta": 0.5}, {"swish_beta": -1.5}],
    "SWISH_BWD": [{}, {"swish_beta": 0.5}, {"swish_beta": -1.5}],
    "ELU_FWD": [{}, {"elu_alpha": 0.3}],
    "ELU_BWD": [{}, {"elu_alpha": 0.3}],
    "SOFTPLUS_FWD": [{}, {"softplus_beta": 2.0}],
    "SOFTPLUS_BWD": [{}, {"softplus_beta": 2.0}],
}
CASES = [(mode, attrs) for mode in POINTWISE for attrs in ATTRIBUTES.get(mode, [{}])]


# ------------------------------------------------------------------------------------------------------------------------------------ the table
def test_every_mode_and_method_of_the_api_has_a_row():
    assert set(API_MODES) <= set(POINTWISE)
    methods = {row.method: row.args for row in POINTWISE.values()} | {a.method: a.args for row in POINTWISE.values() for a in row.aliases}
    assert {m: tuple(args.split()) for args, names in API_METHODS.items() for m in names.split()}.items() <= methods.items()
    assert set(REDUCTION) >= {"ADD", "MUL", "MIN", "MAX", "AMAX", "AVG", "NORM1", "NORM2", "MUL_NO_ZEROS"}


def test_keywords_of_methods_name_attributes_of_their_row():
    for row in POINTWISE.values():
        for params in (row.params, *(a.params for a in row.aliases)):
            assert all(p.attr in row.attrs for p in params), row.mode
        assert row.doc and "\n" not in row.doc
    assert {p.keyword for p in POINTWISE["RELU_FWD"].params} == {"negative_slope", "lower_clip", "upper_clip"}
    assert POINTWISE["RELU_FWD"].aliases[0].params[0].required


@pytest.mark.parametrize("row", [*POINTWISE.values(), *REDUCTION.values()], ids=lambda r: r.mode)
def test_expressions_are_of_the_dialect(row):
    """No literal or attribute outside T(), only known operators, functions and names."""
    texts = [row.expr, row.int_expr] if hasattr(row, "expr") else [row.map, row.combine, row.finalize]
    allowed = {"a", "b", "c"} if hasattr(row, "expr") else {"a", "x", "y", "n"}
    for text in filter(None, texts):
        tree = ast.parse(text, mode="eval")
        casts = [call for call in ast.walk(tree) if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "T"]
        inside = {id(n) for call in casts for n in ast.walk(call.args[0])}
        for n in ast.walk(tree):
            if isinstance(n, ast.Constant):
                assert id(n) in inside, f"bare literal {n.value} in {text}"
            elif isinstance(n, ast.Name) and id(n) in inside:
                assert n.id in row.attrs or n.id == "index", n.id
            elif isinstance(n, ast.BinOp) and id(n) not in inside:
                assert isinstance(n.op, (ast.Add, ast.Sub, ast.Mult)), f"{ast.unparse(n)} in {text}: + - * are the operators; truediv, floormod, pow"
            elif isinstance(n, ast.Call):
                assert n.func.id == "T" or n.func.id in FUNCTIONS, n.func.id
            elif isinstance(n, ast.Name) and n.id not in FUNCTIONS and n.id != "T":
                assert n.id in allowed, f"{n.id} in {text}"


def span_of(row, operands, compute, attrs):
    names = dict(zip("abc", map(exact, operands), strict=False)) | row.values(attrs, compute)
    if "axis" in row.attrs:
        names["index"] = exact(row.reference(operands[0], axis=attrs["axis"]))
    return evaluate(row.expression(compute), names, Arithmetic(compute)).map(lambda v: np.broadcast_to(v, operands[0].shape))


def outside(span, values):
    """Where ``values`` are not in their intervals; a NaN must be announced."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isnan(values), ~span.nan, span.certain_nan | (values < span.lo) | (values > span.hi))


@pytest.mark.parametrize("compute", [F32, F64], ids=lambda d: d.name)
@pytest.mark.parametrize(("mode", "attrs"), CASES)
def test_expression_is_the_reference(mode, attrs, compute):
    """The reference, and the expression with every operation rounded, lie in the intervals that the expression's error analysis gives."""
    row = POINTWISE[mode]
    count = len(row.args)
    rng = np.random.default_rng(len(mode))
    special = grid(SPECIAL if count < 3 else SPECIAL[:12], count)
    for kind, operands in (("special", special), ("ordinary", [rng.normal(0, 3, 2000) for _ in range(count)])):
        operands = [np.asarray(x, NUMPY[compute]).astype(float) for x in operands]
        if mode == "GEN_INDEX":
            operands, attrs = [np.ones((2, 3, 4))], {"axis": 1}
        got, want = plain(row, operands, compute, attrs).astype(float), reference(row, operands, compute, attrs)
        want = round_to(want, compute)
        span = span_of(row, operands, compute, attrs)
        for values in (got, want):
            wrong = outside(span, values)
            assert not wrong.any(), [(*(x[wrong][:3] for x in operands), values[wrong][:3], span.lo[wrong][:3], span.hi[wrong][:3])]
        if kind == "ordinary":
            known = ~np.isnan(want) & np.isfinite(want)
            size = np.maximum(np.abs(want), np.max(np.abs(operands), axis=0))[known]
            width = (span.hi - span.lo)[known] / size
            assert np.median(width) <= 60 * 2 * np.finfo(NUMPY[compute]).eps, "the intervals are tight"


@pytest.mark.parametrize("compute", [I32, I64], ids=lambda d: d.name)
@pytest.mark.parametrize("mode", [m for m, r in POINTWISE.items() if r.domain == "any" and m != "GEN_INDEX"])
def test_integer_expression_is_the_reference(mode, compute):
    limits = np.iinfo(NUMPY[compute])
    operands = grid([0, 1, -1, 2, -2, 3, 7, -8, 100, 46341, limits.max, limits.min], len(POINTWISE[mode].args))
    for attrs in ({}, {"relu_lower_clip": -2.0, "relu_upper_clip": 6.0, "relu_lower_clip_slope": 1.0}) if "RELU" in mode else ({},):
        row = POINTWISE[mode]
        np.testing.assert_array_equal(plain(row, operands, compute, attrs), reference(row, operands, compute, attrs))


# --------------------------------------------------------------------------------------------------------------------------- values worth a name
def f32(mode, *operands, **attrs):
    return plain(POINTWISE[mode], operands, F32, attrs).tolist()


def test_N1_nan_goes_through():
    x0, x1 = [-3, NAN, -1, 0, 1, 2, NAN], [0, 0, NAN, 0, 0, 0, 0]
    np.testing.assert_array_equal(f32("RELU_FWD", x0), [0, NAN, 0, 0, 1, 2, NAN])
    np.testing.assert_array_equal(f32("MAX", x0, x1), [0, NAN, NAN, 0, 1, 2, NAN])
    np.testing.assert_array_equal(f32("RELU_FWD", x0, relu_lower_clip=0.5), [0.5, NAN, 0.5, 0.5, 1, 2, NAN])
    np.testing.assert_array_equal(f32("MAX", x0, [0.5] * 7), [0.5, NAN, 0.5, 0.5, 1, 2, NAN])
    assert math.isnan(f32("RELU_BWD", [1.0], [NAN])[0])


@pytest.mark.parametrize("mode", [m for m, r in POINTWISE.items() if len(r.args) == 1 and not m.startswith(("LOGICAL", "GEN"))])
def test_nan_in_nan_out(mode):
    assert math.isnan(f32(mode, [NAN])[0])


def test_N11_edges_of_activations():
    assert f32("SOFTPLUS_FWD", [100.0, -200.0, INF, -INF]) == [100, 0, INF, 0]
    assert f32("SOFTPLUS_FWD", [-88.0])[0] == pytest.approx(6.0546e-39, rel=1e-4)
    x = [INF, -INF, 89.0, -89.0, 1e4, -1e4]
    want = {
        "TANH_FWD": [1, -1, 1, -1, 1, -1],
        "SIGMOID_FWD": [1, 0, 1, 0, 1, 0],
        "GELU_FWD": [INF, 0, 89, 0, 1e4, 0],
        "GELU_APPROX_TANH_FWD": [INF, 0, 89, 0, 1e4, 0],
        "SWISH_FWD": [INF, 0, 89, 0, 1e4, 0],
        "ELU_FWD": [INF, -1, 89, -1, 1e4, -1],
    }
    for mode, values in want.items():
        np.testing.assert_allclose(f32(mode, x), values, rtol=1e-7, atol=1e-36, err_msg=mode)
    slopes = {"ELU_BWD": [1, 0] * 3, "GELU_BWD": [1, 0] * 3, "GELU_APPROX_TANH_BWD": [1, 0] * 3, "SWISH_BWD": [1, 0] * 3, "SOFTPLUS_BWD": [1, 0] * 3}
    for mode, values in (slopes | {"TANH_BWD": [0] * 6, "SIGMOID_BWD": [0] * 6}).items():
        np.testing.assert_allclose(f32(mode, np.ones(6), x), values, atol=1e-36, err_msg=mode)
    x = np.linspace(-6, 6, 1001)
    gap = np.abs(np.subtract(f32("GELU_FWD", x), f32("GELU_APPROX_TANH_FWD", x))).max()
    assert 4e-4 < gap < 5e-4
    assert f32("POW", [-2.0, -2.0, 0.0, 0.0], [3.0, -1.0, 0.0, -1.0]) == [-8, -0.5, 1, INF]
    assert math.isnan(f32("POW", [-8.0], [1 / 3])[0])


@pytest.mark.parametrize("mode", [m for m in POINTWISE if m.endswith("_BWD")])
def test_gradient_rows_are_derivatives(mode):
    """Against central differences of the forward row, away from the kinks."""
    forward = POINTWISE[mode.replace("_BWD", "_FWD")]
    x = np.array([-5.0, -2.3, -0.7, -0.01, 0.02, 0.9, 3.3, 5.5])
    for attrs in ATTRIBUTES.get(mode, [{}]):
        h = 1e-6
        slope = (reference(forward, [x + h], F64, attrs) - reference(forward, [x - h], F64, attrs)) / (2 * h)
        np.testing.assert_allclose(reference(POINTWISE[mode], [np.full(8, 3.0), x], F64, attrs), 3 * slope, rtol=1e-6, atol=1e-8)


def test_gradient_at_the_clips_is_that_of_outside():
    assert f32("RELU_BWD", [1.0] * 4, [0.0, 6.0, 5.9, 6.1], relu_upper_clip=6.0) == [0, 0, 1, 0]
    assert f32("RELU_BWD", [1.0], [INF]) == [1]
    assert f32("RELU_BWD", [2.0, NAN], [-1.0, -1.0]) == [0, 0]


# -------------------------------------------------------------------------------------------------------------------------- attributes and types
def test_attribute_values_fit_the_compute_type():
    row = POINTWISE["RELU_FWD"]
    assert row.values({}, F32) == {"relu_lower_clip": 0.0, "relu_upper_clip": INF, "relu_lower_clip_slope": 0.0}
    assert row.values({"relu_lower_clip_slope": 0.1, "relu_lower_clip": None}, F32)["relu_lower_clip_slope"] == float(np.float32(0.1))
    assert row.values({"relu_lower_clip_slope": 0.1}, F64)["relu_lower_clip_slope"] == 0.1
    assert row.values({"relu_lower_clip": 2.5}, I32) == {"relu_lower_clip": 2, "relu_upper_clip": 2**31 - 1, "relu_lower_clip_slope": 0}
    assert row.values({"relu_lower_clip": -INF}, I64)["relu_lower_clip"] == -(2**63)
    assert POINTWISE["GEN_INDEX"].values({"axis": 2}, F32) == {"axis": 2}


def test_rows_that_need_floats_are_calculated_in_floats():
    assert POINTWISE["EXP"].carrier(I32, {}) is F32 and POINTWISE["EXP"].carrier(F64, {}) is F64
    assert POINTWISE["ADD"].carrier(I64, {}) is I64
    assert POINTWISE["RELU_FWD"].carrier(I32, {}) is I32
    assert POINTWISE["RELU_FWD"].carrier(I32, {"relu_upper_clip": 6.0}) is I32
    assert POINTWISE["RELU_FWD"].carrier(I32, {"relu_lower_clip_slope": 0.1}) is F32
    assert REDUCTION["NORM2"].carrier(I32) is F32 and REDUCTION["AVG"].carrier(I32) is I32
    assert registry.carrier("REDUCTION", {"mode": "NORM2"}, I64) is F32 and registry.carrier("MATMUL", {}, I32) is I32


def test_registry():
    assert {"POINTWISE", "REDUCTION", "MATMUL", "RESHAPE", "TRANSPOSE", "SLICE", "CONCATENATE", "LAYER_NORM"} <= set(registry.every())
    assert registry.spec("MATMUL").outputs == ("C",)
    with pytest.raises(NotSupportedError, match="NO_SUCH_OP"):
        registry.spec("NO_SUCH_OP")


# ------------------------------------------------------------------------------------------------------------------------------------ reductions
def folded(row, x, compute):
    """Map, combine in order, finalize: what a kernel does with one row of elements."""
    algebra = Plain(compute)
    hold = I64 if row.wide and compute is I32 else compute
    limits = np.iinfo(NUMPY[hold]) if hold in (I32, I64) else None
    ends = {"lowest": limits.min if limits else -INF, "highest": limits.max if limits else INF}
    start = NUMPY[hold](ends[row.identity]) if row.identity in ends else evaluate(row.identity, {}, Plain(hold))
    with np.errstate(all="ignore"):
        mapped = [evaluate(row.map, {"a": NUMPY[compute](v)}, algebra) for v in x]
        total = start
        for one in mapped:
            total = np.asarray(evaluate(row.combine, {"x": total, "y": np.asarray(one, NUMPY[hold])}, Plain(hold)))
        return np.asarray(evaluate(row.finalize, {"x": total, "n": NUMPY[hold](len(x))}, Plain(hold))).astype(NUMPY[compute])


@pytest.mark.parametrize("compute", [F32, F64, I32, I64], ids=lambda d: d.name)
@pytest.mark.parametrize("row", REDUCTION.values(), ids=lambda r: r.mode)
def test_reduction_row_is_its_reference(row, compute):
    calc = row.carrier(compute)
    integer = calc in (I32, I64)
    rows = [[3, -5, 0, 2, 2], [-4, -1, -7, -1, -2], [0, 0], [7], [5, 6], [-5, -6, 0, 4]]
    rows += [[2**31 - 1, 2**31 - 1, 5], [-(2**31), 7]] if integer else [[1.5, NAN, -3], [INF, 2], [INF, -INF], [0.0, NAN]]
    for x in rows:
        array = np.array(x, {F32: np.float64, F64: np.float64, I32: np.int32, I64: np.int64}[calc])
        with np.errstate(all="ignore"):
            want = row.reference(array, (0,))
        assert want.shape == (1,) and want.dtype == array.dtype
        np.testing.assert_allclose(folded(row, x, calc), want[0], rtol=0 if integer else 1e-6, err_msg=str(x))


def test_reduction_of_nothing():
    want = {"ADD": 0, "MUL": 1, "MIN": INF, "MAX": -INF, "AMAX": 0, "AVG": NAN, "NORM1": 0, "NORM2": 0, "MUL_NO_ZEROS": 1}
    for mode, value in want.items():
        row = REDUCTION[mode]
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(row.reference(np.zeros((2, 0)), (1,)), np.full((2, 1), value))
        np.testing.assert_array_equal(folded(row, [], F32), np.float32(value))
    assert {m for m in want if REDUCTION[m].empty is None} == {"MIN", "MAX", "AVG"}


def test_average_of_integers_is_rounded_half_to_even_and_never_wraps():
    top = 2**31 - 1
    x = np.array([[1, 2, 1, 2], [1, 2, 3, 4], [-1, -2, -3, -4], [top, top, top, top], [-1, 0, -1, 0]], np.int32)
    assert REDUCTION["AVG"].reference(x, (1,)).reshape(-1).tolist() == [2, 2, -2, top, 0]


def test_reduced_axes():
    assert reduced_axes({}, (2, 1, 4), (1, 1, 4)) == (0,)
    assert reduced_axes({"axes": (1,)}, (2, 1, 4), (2, 4)) == (1,)
    assert reduced_axes({}, (0, 3), (1, 3)) == (0,)
    assert reduced_axes({"axes": ()}, (2,), (2,)) == ()


# --------------------------------------------------------------------------------------------------------------------------------- the helpers
def test_integer_division_rounds_half_to_even_and_saturates():
    values = [0, 1, -1, 2, 3, -3, 5, 7, -7, 10, 2**31 - 1, -(2**31)]
    a, b = grid(values, 2)
    got = scalars.divide(a.astype(np.int32), b.astype(np.int32))
    for x, y, z in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        exactly = (0 if x == 0 else 2**31 if x > 0 else -(2**31)) if y == 0 else round(Fraction(x, y))
        assert z == max(-(2**31), min(2**31 - 1, exactly)), (x, y)
    wide = scalars.divide(np.array([2**63 - 1, -(2**63), -(2**63), 5]), np.array([2, -1, 3, 0]))
    assert wide.tolist() == [2**62, 2**63 - 1, round(Fraction(-(2**63), 3)), 2**63 - 1]


def test_integer_power_wraps_and_truncates():
    a, b = grid([0, 1, -1, 2, -2, 3, 7], 2)
    for x, y, z in zip(a.tolist(), b.tolist(), scalars.power(a, b).tolist(), strict=True):
        exactly = x**y if y >= 0 else (0 if abs(x) != 1 else x ** (-y))
        assert z == exactly, (x, y)
    assert scalars.power(np.array([3], np.int32), np.array([21], np.int32))[0] == (3**21 + 2**31) % 2**32 - 2**31


@pytest.mark.parametrize(
    ("dim", "stride", "want"),
    [
        ((2, 3), (3, 1), False), ((2, 3), (1, 2), False), ((2, 3), (2, 1), True), ((2, 3), (0, 1), True), ((1, 3), (0, 1), False),
        ((2, 2), (3, 2), False), ((2, 3), (3, 2), False), ((3, 3), (3, 2), False), ((4, 3), (2, 3), True), ((0, 5), (0, 0), False),
        ((2, 3), (-3, 1), False), ((2, 2), (1, -1), True), ((3, 4, 5, 2), (40, 10, 2, 1), False), ((3, 4, 5, 2), (40, 9, 2, 1), True),
        ((1000, 1000, 1000), (1_000_000, 1000, 1), False), ((), (), False), ((1,), (0,), False),
    ],
)  # fmt: skip
def test_strides_that_overlap(dim, stride, want):
    assert overlaps(dim, stride) is want
    if math.prod(dim) < 10**5:
        places = {sum(i * s for i, s in zip(at, stride, strict=True)) for at in itertools.product(*map(range, dim))}
        assert (len(places) < math.prod(dim)) is want


def test_random_strides_overlap_as_enumeration_says():
    rng = np.random.default_rng(5)
    for _ in range(400):
        rank = rng.integers(1, 5)
        dim, stride = tuple(rng.integers(1, 5, rank).tolist()), tuple(rng.integers(-9, 14, rank).tolist())
        places = {sum(i * s for i, s in zip(at, stride, strict=True)) for at in itertools.product(*map(range, dim))}
        assert overlaps(dim, stride) == (len(places) < math.prod(dim)), (dim, stride)


def test_broadcast_dims():
    assert broadcast_dims([(2, 1, 3), (4, 1)]) == (2, 4, 3)
    assert broadcast_dims([(), (5,)]) == (5,)
    assert broadcast_dims([(2, 3), (2, 4)]) == 1
    assert broadcast_dims([(0,), (1,)]) == (0,)
