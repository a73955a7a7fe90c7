"""RNG: random numbers by logical position. Element i (row-major) of Y is a function of seed, offset and i alone (:mod:`graphdnn.opspecs.philox`),
so that neither strides nor tiles nor targets change it, and a backward pass gets the same numbers again.

A row of :data:`DISTRIBUTIONS` is an expression of the common dialect over ``a``, the uniform or normal number of the element. Its steps are exact or
rounded one by one (``mul_rn``): uniform and Bernoulli numbers have equal bits everywhere, normal ones too, and are compared with NumPy's formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from graphdnn.dtypes import data_type, info
from graphdnn.errors import NotSupportedError, ValidationError, explain
from graphdnn.ir import layout
from graphdnn.ir.node import Node, NodeDecl
from graphdnn.ir.tensor import Dims
from graphdnn.opspecs import philox, shapes
from graphdnn.opspecs.evaluate import evaluate
from graphdnn.opspecs.scalars import Array
from graphdnn.opspecs.spans import ULPS, Arithmetic, Span, exact
from graphdnn.opspecs.spec import OpSpec


@dataclass(frozen=True)
class Distribution:
    """One distribution. ``source``: what ``a`` is. ``attrs``: name -> default (None: required). ``derived``: the numbers, from the attributes, that
    stand in ``T()`` in ``expr``, the result in the compute type. ``reference(a, **numbers)``: NumPy form."""

    source: Literal["philox_uniform", "philox_normal"]
    attrs: Mapping[str, float | None]
    derived: Callable[..., dict[str, float]]
    expr: str
    reference: Callable[..., Array]
    doc: str

    def values(self, attrs: Mapping[str, Any], compute: data_type) -> dict[str, float]:
        """The derived numbers, rounded to the compute type."""
        found = self.derived(**{n: default if attrs.get(n) is None else attrs[n] for n, default in self.attrs.items()})
        with np.errstate(over="ignore"):
            return {n: float(np.float32(v)) if compute is data_type.FLOAT else float(v) for n, v in found.items()}


DISTRIBUTIONS: dict[str, Distribution] = {
    "BERNOULLI": Distribution(
        "philox_uniform", {"bernoulli_probability": None}, lambda bernoulli_probability: {"threshold": 1 - bernoulli_probability},
        "T(1) if a >= T(threshold) else T(0)", lambda a, threshold: (a >= threshold).astype(np.float64),
        "1 with a probability, else 0: 1 where the uniform number is at least 1 - probability",
    ),
    "UNIFORM": Distribution(
        "philox_uniform", {"uniform_minimum": 0.0, "uniform_maximum": 1.0},
        lambda uniform_minimum, uniform_maximum: {"low": uniform_minimum, "width": uniform_maximum - uniform_minimum},
        "mul_rn(a, T(width)) + T(low)", lambda a, low, width: a * width + low, "minimum <= y < maximum, before rounding",
    ),
    "NORMAL": Distribution(
        "philox_normal", {"normal_mean": 0.0, "normal_standard_deviation": 1.0},
        lambda normal_mean, normal_standard_deviation: {"mean": normal_mean, "deviation": normal_standard_deviation},
        "mul_rn(a, T(deviation)) + T(mean)", lambda a, mean, deviation: a * deviation + mean, "of a mean and a standard deviation",
    ),
}  # fmt: skip
"""Name -> row."""
_NUMBERS = {"philox_uniform": philox.uniform, "philox_normal": philox.normal}


def row_of(node: NodeDecl | Node) -> Distribution:
    """The row of a node. ValidationError for a distribution that is missing or unknown."""
    name = node.attrs.get("distribution") if isinstance(node, NodeDecl) else node.attr("distribution")
    row = DISTRIBUTIONS.get(name) if isinstance(name, str) else None
    if row is None:
        expected = "one of " + ", ".join(DISTRIBUTIONS)
        raise ValidationError(explain("distribution not set or not known", node=node.label, expected=expected, found=name))
    return row


def _infer(node: NodeDecl) -> None:
    """Y: the dims asked for, row-major unless strides are given."""
    shapes.require(node, ("Seed", "Offset"), ("Y",))
    row, y = row_of(node), node.outputs["Y"]
    wanted = node.attrs.get("dim") if node.attrs.get("dim") is not None else y.dim
    if wanted is None:
        raise ValidationError(
            explain("dims of random numbers cannot be inferred", node=node.label, tensor=y.name, expected="dims", fix="give dim=, or call set_dim")
        )
    for port in ("Seed", "Offset"):
        t = node.inputs[port]
        if math.prod(shapes.dims(t)) != 1:
            raise ValidationError(
                explain(f"{port.lower()} is one number", node=node.label, tensor=t.name, expected="one element", found=list(shapes.dims(t)))
            )
    _check_numbers(node, row)
    dim = tuple(wanted)
    given = tuple(node.attrs.get("stride") or ())
    shapes.give(node, "Y", dim, lambda: given if given else layout.packed(dim))


def _check_numbers(node: NodeDecl, row: Distribution) -> None:
    for name, default in row.attrs.items():
        value = node.attrs.get(name)
        if value is None and default is None or value is not None and not math.isfinite(value):
            raise ValidationError(explain(f"{name} must be a number", node=node.label, expected="a finite number", found=value))
    p, deviation = node.attrs.get("bernoulli_probability"), node.attrs.get("normal_standard_deviation")
    if p is not None and not 0 <= p <= 1:
        raise ValidationError(explain("a probability is out of range", node=node.label, expected="0 <= bernoulli_probability <= 1", found=p))
    if deviation is not None and deviation < 0:
        raise ValidationError(explain("a standard deviation is negative", node=node.label, expected="0 or more", found=deviation))
    low, high = (node.attrs.get(n) for n in ("uniform_minimum", "uniform_maximum"))
    if (low or 0.0) > (1.0 if high is None else high):
        raise ValidationError(explain("the bounds are swapped", node=node.label, expected="minimum <= maximum", found=f"{low} and {high}"))


def _check(node: NodeDecl) -> None:
    shapes.check_plain(node)
    for port in ("Seed", "Offset"):
        t = node.inputs[port]
        if t.dtype not in (data_type.INT32, data_type.INT64):
            raise NotSupportedError(
                explain(f"{port.lower()} must be an integer", node=node.label, tensor=t.name, expected="INT32 or INT64", found=t.dtype.name)
            )


    _check_finite(node)


def _check_finite(node: NodeDecl) -> None:
    """What the kernels calculate with is finite in the type of calculation: not only the attributes, which are float64."""
    row, compute = row_of(node), data_type.DOUBLE if node.compute is data_type.DOUBLE else data_type.FLOAT
    for name, value in row.values(node.attrs, compute).items():
        if not math.isfinite(value):
            rule, given = f"the {name} of the random numbers is out of range", {n: node.attrs.get(n) for n in row.attrs}
            raise ValidationError(explain(rule, node=node.label, expected=f"a finite number in {compute.name}", found=given))


def numbers(node: Node, dim: Dims, seed: Array, offset: Array) -> Array:
    """``a`` of every element: float64, from one-element int64 arrays."""
    index = np.arange(math.prod(dim), dtype=np.int64).reshape(dim)
    return _NUMBERS[row_of(node).source](int(seed.reshape(-1)[0]), int(offset.reshape(-1)[0]), index)


def _reference(node: Node, dims: list[Dims], arrays: list[Any]) -> list[Any]:
    row = row_of(node)
    compute = node.compute if info(node.compute).kind == "f" else data_type.FLOAT
    return [row.reference(numbers(node, dims[0], *arrays), **row.values(dict(node.attrs), compute))]


def _spans(node: Node, dims: list[Dims], arrays: list[Any], spans: list[Span], arithmetic: Arithmetic) -> list[Span]:
    """Seed and offset are known integers: only the functions of the dialect err."""
    row, number = row_of(node), exact(numbers(node, dims[0], *arrays))
    if row.source in ULPS:
        number = Arithmetic(data_type.FLOAT).spread(number, ULPS[row.source])
    return [evaluate(row.expr, {"a": number} | row.values(dict(node.attrs), arithmetic.compute), arithmetic)]


SPECS = (
    OpSpec(
        tag="RNG",
        role="random",
        inputs=("Seed", "Offset"),
        outputs=("Y",),
        attrs=("distribution", "dim", "stride", *(n for row in DISTRIBUTIONS.values() for n in row.attrs)),
        domain="float",
        integers=("Seed", "Offset"),
        infer=_infer,
        check=_check,
        reference=_reference,
        work=lambda _, dims: 60 * math.prod(dims[0]),  # the rounds of Philox
        spans=_spans,
    ),
)
