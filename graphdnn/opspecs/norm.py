"""Normalizations by statistics of a sample: layernorm, rmsnorm, adalayernorm, instancenorm and groupnorm, forward and backward.

All are one op, y = (x - mean) * inv_variance * scale + bias, that differ in which elements share statistics (:mod:`graphdnn.opspecs.norm_shapes`).
The variance is that of the elements (divided by their number), found in a second pass over them; inv_variance = 1 / sqrt(variance + epsilon).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from graphdnn.errors import ValidationError, explain
from graphdnn.ir.node import Node, NodeDecl
from graphdnn.ir.tensor import Dims, TensorDecl
from graphdnn.opspecs import norm_shapes as rules
from graphdnn.opspecs import shapes
from graphdnn.opspecs.expansion import Expansion
from graphdnn.opspecs.formula import Arrays, reference
from graphdnn.opspecs.norm_shapes import Family
from graphdnn.opspecs.scalars import Array
from graphdnn.opspecs.spec import OpSpec

PHASES = ("INFERENCE", "TRAINING")


# ------------------------------------------------------------------------------------------------------------------------------------- shapes
def infer_forward(family: Family, node: NodeDecl) -> Dims:
    """Y and the statistics; returns their dims."""
    shapes.require(node, ("X", "SCALE", "EPSILON"), ("Y",))
    rules.single(node, "EPSILON", "MOMENTUM")
    x = node.inputs["X"]
    groups = rules.groups_of(node, rules.input_dims(node, family.rank)[1], node.attrs.get("num_groups")) if family.grouped else 1
    found = rules.statistics(node, family, groups)
    shapes.give(node, "Y", shapes.dims(x), lambda: shapes.strides(x))
    rules.give_statistics(node, family, found)
    return found


def infer_backward(family: Family, node: NodeDecl, optional: tuple[str, ...] = ()) -> None:
    """DX, DSCALE and DBIAS; ``optional``: inputs that may be missing."""
    given = ("MEAN", "INV_VARIANCE") if family.centered else ("INV_VARIANCE",)
    shapes.require(node, ("DY", "X", "SCALE", *(p for p in given if p not in optional)), ("DX", "DSCALE"))
    x = rules.input_dims(node, family.rank)
    rules.equal(node, "DY", x, "dims of the input")
    groups = 1
    if family.grouped:
        stored = rules.padded(shapes.dims(node.inputs["INV_VARIANCE"]), len(x))
        groups = rules.groups_of(node, x[1], stored[1])
        node.attrs["num_groups"] = groups
    found = rules.statistics(node, family, groups)
    for port in given:
        if port in node.inputs:
            rules.equal(node, port, found, "dims of the statistics")
    rules.give_gradients(node, family)


def _infer_forward(family: Family, node: NodeDecl) -> None:
    if node.attrs.get("forward_phase") not in PHASES:
        rule, expected = "forward phase not set", "norm_forward_phase." + " or .".join(PHASES)
        raise ValidationError(explain(rule, node=node.label, expected=expected, found=node.attrs.get("forward_phase")))
    infer_forward(family, node)


# ---------------------------------------------------------------------------------------------------------------------------------- expansion
class View:
    """The axes that a normalization is calculated in: those of X, or, with groups of channels, those of X with axis 1 split into groups and members.
    ``axes``: those that it reduces."""

    def __init__(self, expansion: Expansion, family: Family) -> None:
        """Of the node that is expanded."""
        self.expansion = expansion
        self.dim = shapes.dims(expansion.input("X"))
        self.groups = expansion.node.attrs["num_groups"] if family.grouped else 0
        scale = rules.padded(shapes.dims(expansion.input("SCALE")), len(self.dim))
        self.axes = self.over(family.statistics(self.dim, scale, self.groups))

    def _split(self, dim: Dims) -> Dims:
        whole = rules.padded(dim, len(self.dim))
        return rules.grouped(whole, self.dim[1], self.groups) if self.groups else whole

    def over(self, dim: Dims) -> Dims:
        """Axes to reduce for a result of dims ``dim``, which are given without the split."""
        return rules.normalized_axes(self._split(dim), self._split(self.dim))

    def of(self, t: TensorDecl) -> TensorDecl:
        """``t``, which broadcasts to X or is statistics, with these axes."""
        return self.expansion.reshape(t, self._split(shapes.dims(t))) if self.groups else t

    def input(self, port: str) -> TensorDecl:
        """The input at ``port`` with these axes."""
        return self.of(self.expansion.input(port))

    def mean(self, t: TensorDecl) -> TensorDecl:
        """Mean of a value with these axes."""
        return self.expansion.reduction("AVG", t, self.axes)


def number(e: Expansion, port: str, rank: int) -> TensorDecl:
    """The input of one element at ``port``, of no larger rank than ``rank``."""
    t = e.input(port)
    return t if len(shapes.dims(t)) <= rank else e.reshape(t, (1,) * rank)


class Normalized(NamedTuple):
    """Values of a normalization; no mean where none is subtracted."""

    y: TensorDecl
    mean: TensorDecl | None
    variance: TensorDecl
    inverse: TensorDecl

    def deliver(self, e: Expansion) -> None:
        """As the outputs Y, MEAN and INV_VARIANCE, where they are there."""
        e.deliver("Y", self.y)
        if self.mean is not None:
            e.deliver("MEAN", self.mean)
        e.deliver("INV_VARIANCE", self.inverse)


def affine(e: Expansion, deviation: TensorDecl, inverse: TensorDecl, scale: TensorDecl, bias: TensorDecl | None) -> TensorDecl:
    """deviation * inverse * scale + bias."""
    y = e.pointwise("MUL", e.pointwise("MUL", deviation, inverse), scale)
    return y if bias is None else e.pointwise("ADD", y, bias)


def normalize(family: Family, e: Expansion) -> Normalized:
    """The values of a forward op."""
    view, bias = View(e, family), e.given("BIAS")
    x = view.input("X")
    mean = view.mean(x) if family.centered else None
    deviation = x if mean is None else e.pointwise("SUB", x, mean)
    variance = view.mean(e.pointwise("MUL", deviation, deviation))
    inverse = e.pointwise("RSQRT", e.pointwise("ADD", variance, number(e, "EPSILON", len(view.dim))))
    y = affine(e, deviation, inverse, view.input("SCALE"), None if bias is None else view.of(bias))
    return Normalized(y, mean, variance, inverse)


def _expand_forward(family: Family, e: Expansion) -> None:
    normalize(family, e).deliver(e)


def expand_backward(family: Family, e: Expansion) -> None:
    """With xhat = (x - mean) * inv and g = dy * scale: DX = inv * (g - mean(g) - xhat * mean(g * xhat)), DSCALE = sum(dy * xhat), DBIAS = sum(dy)."""
    view = View(e, family)
    dy, x, inverse, given = view.input("DY"), view.input("X"), view.input("INV_VARIANCE"), e.given("MEAN")
    deviation = x
    if family.centered:
        deviation = e.pointwise("SUB", x, view.mean(x) if given is None else view.of(given))
    xhat = e.pointwise("MUL", deviation, inverse)
    g = e.pointwise("MUL", dy, view.input("SCALE"))
    rest = e.pointwise("SUB", g, view.mean(g)) if family.centered else g
    product = e.pointwise("MUL", xhat, view.mean(e.pointwise("MUL", g, xhat)))
    e.deliver("DX", e.pointwise("MUL", e.pointwise("SUB", rest, product), inverse))
    for port, value in (("DSCALE", e.pointwise("MUL", dy, xhat)), ("DBIAS", dy)):
        out = e.output(port)
        if out is not None:
            e.deliver(port, e.reduction("ADD", value, view.over(shapes.dims(out))))


# ---------------------------------------------------------------------------------------------------------------------------------- references
def standardized(x: Array, axes: Dims, epsilon: float, centered: bool = True) -> tuple[Array, Array, Array, Array]:
    """(x - mean) / sqrt(variance + epsilon), mean, variance, 1 / sqrt(variance + epsilon)."""
    mean = np.mean(x, axis=axes, keepdims=True) if centered else np.zeros(())
    variance = np.mean(np.square(x - mean), axis=axes, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon), mean, variance, 1 / np.sqrt(variance + epsilon)


def sum_to(x: Array, dim: Dims) -> Array:
    """``x`` added up along the axes where ``dim`` (ones in front may be missing) has 1."""
    kept = rules.padded(dim, x.ndim)
    return np.asarray(np.sum(x, axis=tuple(a for a in range(x.ndim) if kept[a] == 1 != x.shape[a]), keepdims=True))


def gradient(dy: Array, x: Array, scale: Array, mean: Array, inverse: Array, axes: Dims, centered: bool = True) -> Array:
    """Gradient of x where ``mean`` and ``inverse`` are functions of it."""
    n = np.prod([x.shape[a] for a in axes], initial=1.0)
    g, xhat = dy * scale, (x - mean) * inverse
    through_mean = np.sum(g, axis=axes, keepdims=True) if centered else 0.0
    return np.asarray(inverse / n * (n * g - through_mean - xhat * np.sum(g * xhat, axis=axes, keepdims=True)))


def _forward(family: Family, a: Arrays, dims: dict[str, Dims], node: Node) -> Arrays:
    x, scale, epsilon = a["X"], a["SCALE"], float(a["EPSILON"].reshape(()))
    if family.grouped:
        found = [standardized(p, tuple(range(1, x.ndim)), epsilon) for p in np.split(x, node.attr("num_groups"), axis=1)]
        xhat, mean, _, inverse = (np.concatenate(f, axis=1) for f in zip(*found, strict=True))
    else:
        axes = rules.normalized_axes(family.statistics(x.shape, rules.padded(scale.shape, x.ndim), 1), x.shape)
        xhat, mean, _, inverse = standardized(x, axes, epsilon, family.centered)
    return {"Y": xhat * scale + a.get("BIAS", np.zeros(())), "MEAN": mean, "INV_VARIANCE": inverse}


def _backward(family: Family, a: Arrays, dims: dict[str, Dims], node: Node) -> Arrays:
    x, dy = a["X"], a["DY"]
    inverse = a["INV_VARIANCE"].reshape(rules.padded(a["INV_VARIANCE"].shape, x.ndim))
    axes = rules.normalized_axes(inverse.shape, x.shape)
    mean = a["MEAN"] if "MEAN" in a else np.mean(x, axis=axes, keepdims=True) if family.centered else np.zeros(())
    scale = np.broadcast_to(a["SCALE"], x.shape)
    if family.grouped:
        groups = node.attr("num_groups")
        axes = tuple(range(1, x.ndim))
        parts = [np.split(v, groups, axis=1) for v in (dy, x, scale, mean, inverse)]
        dx = np.concatenate([gradient(d, v, s, m, i, axes) for d, v, s, m, i in zip(*parts, strict=True)], axis=1)
        mean, inverse = (np.repeat(v, x.shape[1] // groups, axis=1) for v in (mean, inverse))
    else:
        dx = gradient(dy, x, scale, mean, inverse, axes, family.centered)
    found = {"DX": dx, "DSCALE": dy * (x - mean) * inverse, "DBIAS": dy}
    return {p: v if p == "DX" else sum_to(v, dims[p]) for p, v in found.items() if p in dims}


# ---------------------------------------------------------------------------------------------------------------------------------- the specs
def _specs(tag: str, family: Family, *, bias: bool = False, own: tuple[str, ...] = (), loose: tuple[str, ...] = ()) -> tuple[OpSpec, OpSpec]:
    """Forward and backward op. ``bias``: optional, and its gradient. ``own``: further attributes. ``loose``: inputs that backward can do without."""
    mean = ("MEAN",) if family.centered else ()
    forward = OpSpec(
        tag=tag,
        role="composite",
        inputs=("X", "SCALE", "BIAS", "EPSILON"),
        outputs=("Y", *mean, "INV_VARIANCE"),
        optional=(*(("BIAS",) if bias else ()), *mean, "INV_VARIANCE"),
        attrs=("forward_phase", *own),
        domain="float",
        infer=partial(_infer_forward, family),
        check=shapes.check_plain,
        reference=reference(partial(_forward, family)),
        expand=partial(_expand_forward, family),
    )
    backward = OpSpec(
        tag=f"{tag}_BPROP",
        role="composite",
        inputs=("DY", "X", "SCALE", *mean, "INV_VARIANCE"),
        outputs=("DX", "DSCALE", "DBIAS"),
        optional=(*loose, *(("DBIAS",) if bias else ())),
        attrs=own,
        domain="float",
        infer=partial(infer_backward, family, optional=loose),
        check=shapes.check_plain,
        reference=reference(partial(_backward, family)),
        expand=partial(expand_backward, family),
    )
    return forward, backward


SPECS = (
    *_specs("LAYER_NORM", rules.LAYER),
    *_specs("RMS_NORM", rules.RMS, bias=True),
    *_specs("ADA_LAYER_NORM", rules.ADA, bias=True),
    *_specs("INSTANCE_NORM", rules.INSTANCE, loose=("MEAN",)),
    *_specs("GROUP_NORM", rules.GROUP, own=("num_groups",)),
)
