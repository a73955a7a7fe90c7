"""THE table of pointwise ops, and the op POINTWISE that all of them are.

A row's ``expr`` is an expression of the common dialect over ``a``, ``b``, ``c`` (the operands, in the compute type), from which the code of every
target is made. Every literal and every attribute stands inside ``T()``. NaN passes through every row: a comparison with NaN is false, so the branch
that NaN takes must be the one that hands it on. Rows stay finite and right at the ends of the range: ``inf * 0`` is kept out by a test before it.

Domain: "float" rows mean something only on floats; with an integer compute type they are calculated in FLOAT (:meth:`PointwiseOp.carrier`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from graphdnn.dtypes import data_type, info
from graphdnn.errors import ValidationError, explain
from graphdnn.ir.node import Node, NodeDecl
from graphdnn.opspecs import scalars as s
from graphdnn.opspecs import shapes
from graphdnn.opspecs.scalars import Array
from graphdnn.opspecs.spec import OpSpec


@dataclass(frozen=True, slots=True)
class Param:
    """A keyword of a pygraph method that is no tensor: its name and the attribute that it sets. Optional ones default to None (the row's default)."""

    keyword: str
    attr: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Alias:
    """Another pygraph method that makes the same op."""

    method: str
    args: tuple[str, ...]
    params: tuple[Param, ...] = ()


@dataclass(frozen=True)
class PointwiseOp:
    """One pointwise op.

    ``mode``: JSON name. ``method``, ``args``, ``params``: the pygraph method, its tensor arguments (operands a, b, c in this order) and its keywords.
    ``expr``: what it calculates; ``int_expr``: the same for integer compute types where it is spelled differently. ``reference``: NumPy form,
    ``reference(*operands, **attributes)``: broadcast float64, int32 or int64 arrays in, the same type out. ``attrs``: attribute name -> default;
    float defaults enter the expression, int ones (``axis``) are structure.
    """

    mode: str
    method: str
    args: tuple[str, ...]
    expr: str
    reference: Callable[..., Array]
    doc: str
    domain: Literal["any", "float"] = "any"
    attrs: Mapping[str, float | int] = field(default_factory=dict)
    params: tuple[Param, ...] = ()
    int_expr: str = ""
    aliases: tuple[Alias, ...] = ()

    def expression(self, compute: data_type) -> str:
        """The expression for a compute type (a carrier)."""
        return self.int_expr if self.int_expr and info(compute).kind != "f" else self.expr

    def carrier(self, compute: data_type, attrs: Mapping[str, Any]) -> data_type:
        """The type it is calculated in when ``compute`` (a carrier) is asked for: FLOAT instead of integers where integers have no meaning for it,
        or where an attribute has a fraction."""
        if info(compute).kind == "f":
            return compute
        given = [attrs.get(n) for n, default in self.attrs.items() if isinstance(default, float)]
        fraction = any(v is not None and np.isfinite(v) and v != int(v) for v in given)
        return data_type.FLOAT if self.domain == "float" or fraction else compute

    def values(self, attrs: Mapping[str, Any], compute: data_type) -> dict[str, float | int]:
        """Attribute values, defaults filled in, as numbers that the compute type (a carrier) holds exactly: floats rounded to it, or integers
        rounded half to even within its limits (so an infinite clip is the limit)."""
        found = {n: default if attrs.get(n) is None else attrs[n] for n, default in self.attrs.items()}
        return {n: _in_type(v, compute) if isinstance(self.attrs[n], float) else int(v) for n, v in found.items()}


def _in_type(value: float, compute: data_type) -> float | int:
    row = info(compute)
    if row.kind == "f":
        with np.errstate(over="ignore"):
            return float(np.float32(value)) if row.register == "float32" else float(value)
    lo, hi = (int(x) for x in row.limits)
    if value != value:
        return 0
    return (lo if value < 0 else hi) if abs(value) >= float(hi) else round(value)


# ------------------------------------------------------------------------------------------------------------------------------------- references
_ROOT_HALF, _ROOT_2_OVER_PI = 0.7071067811865476, 0.7978845608028654


def _relu(x: Array, relu_lower_clip: float, relu_upper_clip: float, relu_lower_clip_slope: float) -> Array:
    low = relu_lower_clip + relu_lower_clip_slope * (x - relu_lower_clip) if relu_lower_clip_slope else relu_lower_clip
    return np.minimum(np.where(x < relu_lower_clip, low, x), relu_upper_clip)


def _relu_bwd(dy: Array, x: Array, relu_lower_clip: float, relu_upper_clip: float, relu_lower_clip_slope: float) -> Array:
    below = relu_lower_clip_slope * dy if relu_lower_clip_slope else np.zeros_like(dy)
    above = (x >= relu_upper_clip) & np.isfinite(relu_upper_clip)
    return np.where(x <= relu_lower_clip, below, np.where(above, 0, np.where(x == x, dy, x)))


def _gelu(x: Array) -> Array:
    return np.where(x < -40, 0.0, 0.5 * x * s.erfc(-x * _ROOT_HALF))


def _gelu_bwd(dy: Array, x: Array) -> Array:
    slope = 0.5 * s.erfc(-x * _ROOT_HALF) + x * np.exp(-0.5 * x * x) / np.sqrt(2 * np.pi)
    return dy * np.where(x > 40, 1.0, np.where(x < -40, 0.0, slope))


def _gelu_tanh(x: Array) -> Array:
    return np.where(x < -40, 0.0, x / (1 + np.exp(-2 * _ROOT_2_OVER_PI * (x + 0.044715 * x**3))))


def _gelu_tanh_bwd(dy: Array, x: Array) -> Array:
    u = _ROOT_2_OVER_PI * (x + 0.044715 * x**3)
    slope = 1 / (1 + np.exp(-2 * u)) + 0.5 * x / np.cosh(u) ** 2 * _ROOT_2_OVER_PI * (1 + 3 * 0.044715 * x * x)
    return dy * np.where(x > 40, 1.0, np.where(x < -40, 0.0, slope))


def _swish(x: Array, swish_beta: float) -> Array:
    return np.where(swish_beta * x < -1e4, 0.0, x * s.sigmoid(swish_beta * x))


def _swish_bwd(dy: Array, x: Array, swish_beta: float) -> Array:
    z = swish_beta * x
    slope = s.sigmoid(z) + z / (2 + 2 * np.cosh(z))
    return dy * np.where(z > 1e4, 1.0, np.where(z < -1e4, 0.0, slope))


def _elu(x: Array, elu_alpha: float) -> Array:
    return np.where(x > 0, x, elu_alpha * np.expm1(x))


def _elu_bwd(dy: Array, x: Array, elu_alpha: float) -> Array:
    return np.where(x > 0, dy, dy * elu_alpha * np.exp(x))


def _softplus(x: Array, softplus_beta: float) -> Array:
    return np.asarray(np.logaddexp(0, softplus_beta * x) / softplus_beta)


def _softplus_bwd(dy: Array, x: Array, softplus_beta: float) -> Array:
    return dy * s.sigmoid(softplus_beta * x)


def _select(a: Array, b: Array, mask: Array) -> Array:
    return np.asarray(np.where(mask != 0, a, b))


def _gen_index(x: Array, axis: int) -> Array:
    shape = [1] * x.ndim
    shape[axis] = -1
    return np.broadcast_to(np.arange(x.shape[axis], dtype=x.dtype).reshape(shape), x.shape).copy()


def _truth(x: Array, like: Array) -> Array:
    return np.asarray(x).astype(like.dtype)


# ------------------------------------------------------------------------------------------------------------------------------------- the table
_X, _AB, _I2, _CMP, _BWD = ("input",), ("a", "b"), ("input0", "input1"), ("input", "comparison"), ("loss", "input")
_FLOAT: dict[str, Any] = {"domain": "float"}
_CLIPS = {"relu_lower_clip": 0.0, "relu_upper_clip": float("inf"), "relu_lower_clip_slope": 0.0}
_SLOPE = Param("negative_slope", "relu_lower_clip_slope", required=True)
_RELU: dict[str, Any] = {
    "attrs": _CLIPS,
    "params": (
        Param("negative_slope", "relu_lower_clip_slope"),
        Param("lower_clip", "relu_lower_clip"),
        Param("upper_clip", "relu_upper_clip"),
    ),
}
_SWISH: dict[str, Any] = _FLOAT | {"attrs": {"swish_beta": 1.0}, "params": (Param("swish_beta", "swish_beta"),)}
_ELU: dict[str, Any] = _FLOAT | {"attrs": {"elu_alpha": 1.0}}
_SOFTPLUS: dict[str, Any] = _FLOAT | {"attrs": {"softplus_beta": 1.0}}
_INDEX: dict[str, Any] = {"attrs": {"axis": 0}, "params": (Param("axis", "axis", required=True),)}

_LINEAR = "T(relu_lower_clip) + T(relu_lower_clip_slope) * (a - T(relu_lower_clip))"
_RELU_EXPR = (
    f"nanmin(((T(relu_lower_clip) if T(relu_lower_clip_slope) == T(0) else {_LINEAR}) if a < T(relu_lower_clip) else a), T(relu_upper_clip))"
)
# The last branch is taken by a NaN input alone. `u - u != 0` is true for an infinite upper clip: then x = inf is not above it.
_RELU_BWD_EXPR = (
    "a if b > T(relu_lower_clip) and (b < T(relu_upper_clip) or T(relu_upper_clip) - T(relu_upper_clip) != T(0)) else "
    "((T(0) if T(relu_lower_clip_slope) == T(0) else T(relu_lower_clip_slope) * a) if b <= T(relu_lower_clip) else "
    "(T(0) if b >= T(relu_upper_clip) else b))"
)
# tanh form of GELU: (1 + tanh u) / 2 is sigmoid(2u), which keeps the digits of small results; 1.5957691 = 2 sqrt(2/pi).
_TWO_U = "T(1.5957691216057308) * ({0} + T(0.044715) * {0} * {0} * {0})"
_GELU_BWD_EXPR = (
    "a if b > T(40) else (a * T(0) if b < T(-40) else "
    "a * (T(0.5) * (T(1) + erf(b * T(0.7071067811865476))) + b * exp(T(-0.5) * b * b) * T(0.3989422804014327)))"
)
_GELU_TANH_BWD_EXPR = (
    f"a if b > T(40) else (a * T(0) if b < T(-40) else a * sigmoid({_TWO_U.format('b')}) * (T(1) + "
    f"b * sigmoid(-({_TWO_U.format('b')})) * T(1.5957691216057308) * (T(1) + T(0.134145) * b * b)))"
)
_SWISH_BWD_EXPR = (
    "a if T(swish_beta) * b > T(1e4) else (a * T(0) if T(swish_beta) * b < T(-1e4) else "
    "a * sigmoid(T(swish_beta) * b) * (T(1) + T(swish_beta) * b * sigmoid(T(-1) * T(swish_beta) * b)))"
)
_SOFTPLUS_EXPR = "truediv(nanmax(T(softplus_beta) * a, T(0)) + log1p(exp(-abs(T(softplus_beta) * a))), T(softplus_beta))"


def _rows() -> Iterable[PointwiseOp]:
    op = PointwiseOp
    # arithmetic
    yield op("IDENTITY", "identity", _X, "a", lambda a: a, "a, converted to the output's data type")
    yield op("ADD", "add", _AB, "a + b", lambda a, b: a + b, "a + b", aliases=(Alias("bias", ("input", "bias")),))
    yield op("SUB", "sub", _AB, "a - b", lambda a, b: a - b, "a - b")
    yield op("MUL", "mul", _AB, "a * b", lambda a, b: a * b, "a * b", aliases=(Alias("scale", ("input", "scale")),))
    yield op("DIV", "div", _AB, "truediv(a, b)", s.divide, "a / b: true division; integers round half to even, x / 0 saturates, 0 / 0 is 0")
    yield op("ADD_SQUARE", "add_square", _AB, "a + b * b", lambda a, b: a + b * b, "a + b * b")
    yield op("MOD", "mod", _I2, "floormod(a, b)", s.modulo, "floor modulo (sign of the divisor); x mod 0 is NaN, 0 for integers")
    power = "input0 ** input1; integers: negative exponents give 0, except of 1 and -1"
    yield op("POW", "pow", _I2, "pow(a, b)", s.power, power, int_expr="ipow(a, b)")
    yield op("MAX", "max", _I2, "nanmax(a, b)", lambda a, b: np.maximum(a, b), "larger of the two; NaN wins")
    yield op("MIN", "min", _I2, "nanmin(a, b)", lambda a, b: np.minimum(a, b), "smaller of the two; NaN wins")
    yield op("NEG", "neg", _X, "-a", lambda a: -a, "-a")
    yield op("ABS", "abs", _X, "abs(a)", lambda a: np.abs(a), "|a|")
    yield op("CEIL", "ceil", _X, "ceil(a)", lambda a: np.ceil(a), "smallest integer not below a", int_expr="a")
    yield op("FLOOR", "floor", _X, "floor(a)", lambda a: np.floor(a), "largest integer not above a", int_expr="a")
    # functions
    yield op("SQRT", "sqrt", _X, "sqrt(a)", lambda a: np.sqrt(a), "square root", **_FLOAT)
    yield op("RSQRT", "rsqrt", _X, "rsqrt(a)", lambda a: 1 / np.sqrt(a), "1 / square root", **_FLOAT)
    yield op("RECIPROCAL", "reciprocal", _X, "truediv(T(1), a)", lambda a: 1 / a, "1 / a", **_FLOAT)
    yield op("EXP", "exp", _X, "exp(a)", lambda a: np.exp(a), "e ** a", **_FLOAT)
    yield op("LOG", "log", _X, "log(a)", lambda a: np.log(a), "natural logarithm", **_FLOAT)
    yield op("SIN", "sin", _X, "sin(a)", lambda a: np.sin(a), "sine", **_FLOAT)
    yield op("COS", "cos", _X, "cos(a)", lambda a: np.cos(a), "cosine", **_FLOAT)
    yield op("TAN", "tan", _X, "tan(a)", lambda a: np.tan(a), "tangent", **_FLOAT)
    yield op("ERF", "erf", _X, "erf(a)", s.erf, "error function", **_FLOAT)
    # comparisons and logic
    yield op("CMP_EQ", "cmp_eq", _CMP, "T(1) if a == b else T(0)", lambda a, b: _truth(a == b, a), "1 where a == b, else 0")
    yield op("CMP_NEQ", "cmp_neq", _CMP, "T(1) if a != b else T(0)", lambda a, b: _truth(a != b, a), "1 where a != b, else 0 (NaN: 1)")
    yield op("CMP_GT", "cmp_gt", _CMP, "T(1) if a > b else T(0)", lambda a, b: _truth(a > b, a), "1 where a > b, else 0")
    yield op("CMP_GE", "cmp_ge", _CMP, "T(1) if a >= b else T(0)", lambda a, b: _truth(a >= b, a), "1 where a >= b, else 0")
    yield op("CMP_LT", "cmp_lt", _CMP, "T(1) if a < b else T(0)", lambda a, b: _truth(a < b, a), "1 where a < b, else 0")
    yield op("CMP_LE", "cmp_le", _CMP, "T(1) if a <= b else T(0)", lambda a, b: _truth(a <= b, a), "1 where a <= b, else 0")
    both, either = "T(1) if a != T(0) and b != T(0) else T(0)", "T(1) if a != T(0) or b != T(0) else T(0)"
    yield op("LOGICAL_AND", "logical_and", _AB, both, lambda a, b: _truth((a != 0) & (b != 0), a), "1 where both are not 0, else 0")
    yield op("LOGICAL_OR", "logical_or", _AB, either, lambda a, b: _truth((a != 0) | (b != 0), a), "1 where one is not 0, else 0")
    yield op("LOGICAL_NOT", "logical_not", _X, "T(1) if a == T(0) else T(0)", lambda a: _truth(a == 0, a), "1 where a is 0, else 0")
    yield op("BINARY_SELECT", "binary_select", (*_I2, "mask"), "a if c != T(0) else b", _select, "input0 where mask is not 0, else input1")
    yield op("GEN_INDEX", "gen_index", _X, "T(index)", _gen_index, "the logical coordinate along axis, whatever the strides", **_INDEX)
    # activations
    yield op(
        "RELU_FWD", "relu", _X, _RELU_EXPR, _relu, "x clipped to lower..upper; below lower: lower + slope * (x - lower)",
        aliases=(Alias("leaky_relu", _X, (_SLOPE,)),), **_RELU,
    )  # fmt: skip
    yield op("TANH_FWD", "tanh", _X, "tanh(a)", lambda a: np.tanh(a), "hyperbolic tangent", **_FLOAT)
    yield op("SIGMOID_FWD", "sigmoid", _X, "sigmoid(a)", s.sigmoid, "1 / (1 + e ** -x)", **_FLOAT)
    elu, elu_bwd = "a if a > T(0) else T(elu_alpha) * expm1(a)", "a if b > T(0) else a * T(elu_alpha) * exp(b)"
    yield op("ELU_FWD", "elu", _X, elu, _elu, "x, for x <= 0 alpha * (e ** x - 1)", **_ELU)
    gelu = "T(0) if a < T(-40) else T(0.5) * a * (T(1) + erf(a * T(0.7071067811865476)))"
    yield op("GELU_FWD", "gelu", _X, gelu, _gelu, "x times the normal distribution function (erf form)", **_FLOAT)
    gelu_tanh = f"T(0) if a < T(-40) else a * sigmoid({_TWO_U.format('a')})"
    yield op("GELU_APPROX_TANH_FWD", "gelu_approx_tanh", _X, gelu_tanh, _gelu_tanh, "GELU, tanh approximation", **_FLOAT)
    yield op("SOFTPLUS_FWD", "softplus", _X, _SOFTPLUS_EXPR, _softplus, "log(1 + e ** (beta x)) / beta, without overflow", **_SOFTPLUS)
    swish = "T(0) if T(swish_beta) * a < T(-1e4) else a * sigmoid(T(swish_beta) * a)"
    yield op("SWISH_FWD", "swish", _X, swish, _swish, "x * sigmoid(beta * x)", **_SWISH)
    # gradients: a = loss (dY), b = forward input X
    yield op(
        "RELU_BWD", "relu_backward", _BWD, _RELU_BWD_EXPR, _relu_bwd, "gradient of relu: dY inside the clips, slope * dY below, 0 above",
        aliases=(Alias("leaky_relu_backward", _BWD, (_SLOPE,)),), **_RELU,
    )  # fmt: skip
    tanh_bwd = "a * (T(4) * sigmoid(T(2) * b) * sigmoid(T(-2) * b))"
    yield op("TANH_BWD", "tanh_backward", _BWD, tanh_bwd, lambda dy, x: dy * (1 / np.cosh(x) ** 2), "gradient of tanh", **_FLOAT)
    sigmoid_bwd = "a * (sigmoid(b) * sigmoid(-b))"
    yield op("SIGMOID_BWD", "sigmoid_backward", _BWD, sigmoid_bwd, lambda dy, x: dy * (0.5 / (1 + np.cosh(x))), "gradient of sigmoid", **_FLOAT)
    yield op("ELU_BWD", "elu_backward", _BWD, elu_bwd, _elu_bwd, "gradient of elu", **_ELU)
    yield op("GELU_BWD", "gelu_backward", _BWD, _GELU_BWD_EXPR, _gelu_bwd, "gradient of gelu", **_FLOAT)
    yield op("GELU_APPROX_TANH_BWD", "gelu_approx_tanh_backward", _BWD, _GELU_TANH_BWD_EXPR, _gelu_tanh_bwd, "gradient of gelu_approx_tanh", **_FLOAT)
    softplus_bwd = "a * sigmoid(T(softplus_beta) * b)"
    yield op("SOFTPLUS_BWD", "softplus_backward", _BWD, softplus_bwd, _softplus_bwd, "gradient of softplus", **_SOFTPLUS)
    yield op("SWISH_BWD", "swish_backward", _BWD, _SWISH_BWD_EXPR, _swish_bwd, "gradient of swish", **_SWISH)


def _table(rows: Iterable[PointwiseOp]) -> dict[str, PointwiseOp]:
    found: dict[str, PointwiseOp] = {}
    methods: set[str] = set()
    for row in rows:
        names = {row.method, *(a.method for a in row.aliases)}
        assert row.mode not in found and not names & methods, f"pointwise row {row.mode} repeats a mode or a method name"
        found[row.mode] = row
        methods |= names
    return found


POINTWISE: dict[str, PointwiseOp] = _table(_rows())
"""Mode -> row."""


# ------------------------------------------------------------------------------------------------------------------------------------- the op
def row_of(node: NodeDecl | Node) -> PointwiseOp:
    """The row of a node. ValidationError for a mode that is missing or unknown."""
    mode = node.attrs.get("mode") if isinstance(node, NodeDecl) else node.attr("mode")
    row = POINTWISE.get(mode) if isinstance(mode, str) else None
    if row is None:
        raise ValidationError(explain("pointwise mode not set or not known", node=node.label, expected="one of " + ", ".join(POINTWISE), found=mode))
    return row


def _infer(node: NodeDecl) -> None:
    row = row_of(node)
    ports = tuple(f"IN_{i}" for i in range(len(row.args)))
    shapes.require(node, ports, ("OUT_0",))
    extra = [p for p in node.inputs if p not in ports]
    if extra:
        rule, found = f"{row.mode} takes {len(ports)} operands", ", ".join(node.inputs)
        raise ValidationError(explain(rule, node=node.label, expected=", ".join(ports), found=found))
    operands = [node.inputs[p] for p in ports]
    if "axis" in row.attrs:
        node.attrs["axis"] = shapes.axis(node, "axis", node.attrs.get("axis"), operands[0])
    check_attributes(node.name, row, node.attrs, node.compute)
    dim = shapes.broadcast(node, operands)
    shapes.give(node, "OUT_0", dim, lambda: shapes.pointwise_strides(node, operands, dim))


def check_attributes(node: str, row: PointwiseOp, attrs: Mapping[str, Any], compute: data_type) -> None:
    """ValidationError for attributes, of a row in the node of this name, that are no numbers or that have no meaning, rounded to ``compute`` too."""
    for name, default in row.attrs.items():
        value = attrs.get(name)
        if isinstance(default, float) and value is not None and value != value:
            raise ValidationError(explain(f"{name} must be a number", node=node, expected=f"a number (default {default})", found=value))
    beta = attrs.get("softplus_beta")
    if beta is not None and compute not in (data_type.NOT_SET, data_type.DOUBLE):
        beta = _in_type(beta, data_type.FLOAT)
    if "softplus_beta" in row.attrs and beta is not None and (beta == 0 or abs(beta) == float("inf")):
        raise ValidationError(explain("softplus divides by beta", node=node, expected="softplus_beta finite and not 0", found=beta))


def _reference(node: Node, dims: list[tuple[int, ...]], arrays: list[Any]) -> list[Any]:
    row = row_of(node)
    attrs = dict(node.attrs)
    compute = row.carrier(node.compute, attrs)
    operands = [s.narrowed(np.broadcast_to(x, dims[0]), compute) for x in arrays]
    with np.errstate(all="ignore"):
        return [s.widened(row.reference(*operands, **row.values(attrs, compute)))]


ROWS = {"POINTWISE": POINTWISE}
SPECS = (
    OpSpec(
        tag="POINTWISE",
        role="pointwise",
        inputs=("IN_0", "IN_1", "IN_2"),
        outputs=("OUT_0",),
        optional=("IN_1", "IN_2"),
        attrs=(
            "mode", "axis", "relu_lower_clip", "relu_upper_clip", "relu_lower_clip_slope", "swish_beta", "elu_alpha", "softplus_beta",
        ),
        infer=_infer,
        check=shapes.check_plain,
        reference=_reference,
    ),
)  # fmt: skip
