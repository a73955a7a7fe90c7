"""softmax, log_softmax and logsumexp over one axis, forward and backward. The largest element is subtracted first, so that nothing overflows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from graphdnn.errors import ValidationError, explain
from graphdnn.ir import layout
from graphdnn.ir.node import Node, NodeDecl
from graphdnn.ir.tensor import Dims, TensorDecl
from graphdnn.opspecs import shapes
from graphdnn.opspecs.expansion import Expansion
from graphdnn.opspecs.formula import Arrays, Formula, reference
from graphdnn.opspecs.scalars import Array
from graphdnn.opspecs.spec import OpSpec


# ---------------------------------------------------------------------------------------------------------------------------------------- shapes
def _infer(node: NodeDecl) -> None:
    """Y like X."""
    shapes.require(node, ("X",), ("Y",))
    x = node.inputs["X"]
    node.attrs["axis"] = shapes.axis(node, "axis", node.attrs.get("axis"), x)
    shapes.give(node, "Y", shapes.dims(x), lambda: shapes.strides(x))


def _without(dim: Dims, axis: int, keep: bool) -> Dims:
    return tuple(1 if a == axis else d for a, d in enumerate(dim) if keep or a != axis)


def _infer_sum(node: NodeDecl) -> None:
    """Y: X with extent 1, or no extent, at the axis."""
    shapes.require(node, ("X",), ("Y",))
    x = node.inputs["X"]
    axis = node.attrs["axis"] = shapes.axis(node, "axis", node.attrs.get("axis"), x)
    keep = bool(node.attrs.get("keepdim", False))
    order = [abs(s) for a, s in enumerate(shapes.strides(x)) if keep or a != axis]
    dim = _without(shapes.dims(x), axis, keep)
    shapes.give(node, "Y", dim, lambda: layout.like(dim, order))


def _infer_backward(node: NodeDecl) -> None:
    """DX like Y, the result of the forward op, which DY fits."""
    shapes.require(node, ("DY", "Y"), ("DX",))
    y = node.inputs["Y"]
    node.attrs["axis"] = shapes.axis(node, "axis", node.attrs.get("axis"), y)
    _same(node, "DY", (shapes.dims(y),))
    shapes.give(node, "DX", shapes.dims(y), lambda: shapes.strides(y))


def _infer_sum_backward(node: NodeDecl) -> None:
    """DX like X; DY and Y with or without the axis."""
    shapes.require(node, ("DY", "X", "Y"), ("DX",))
    x = node.inputs["X"]
    axis = node.attrs["axis"] = shapes.axis(node, "axis", node.attrs.get("axis"), x)
    for port in ("DY", "Y"):
        _same(node, port, tuple(_without(shapes.dims(x), axis, keep) for keep in (True, False)))
    shapes.give(node, "DX", shapes.dims(x), lambda: shapes.strides(x))


def _same(node: NodeDecl, port: str, allowed: tuple[Dims, ...]) -> None:
    t = node.inputs[port]
    if shapes.dims(t) not in allowed:
        expected = "dims " + " or ".join(str(list(d)) for d in allowed)
        raise ValidationError(explain(f"{port.lower()} does not fit", node=node.label, tensor=t.name, expected=expected, found=list(shapes.dims(t))))


# ------------------------------------------------------------------------------------------------------------------------------------- expansion
def _shifted(e: Expansion) -> tuple[TensorDecl, TensorDecl, TensorDecl]:
    """X minus its largest element, e to that, and the sum of it."""
    x, axes = e.input("X"), (e.node.attrs["axis"],)
    shifted = e.pointwise("SUB", x, e.reduction("MAX", x, axes))
    power = e.pointwise("EXP", shifted)
    return shifted, power, e.reduction("ADD", power, axes)


def _expand_softmax(e: Expansion) -> None:
    _, power, total = _shifted(e)
    e.deliver("Y", e.pointwise("DIV", power, total))


def _expand_log_softmax(e: Expansion) -> None:
    shifted, _, total = _shifted(e)
    e.deliver("Y", e.pointwise("SUB", shifted, e.pointwise("LOG", total)))


def _expand_logsumexp(e: Expansion) -> None:
    """An infinite largest element is not subtracted: the logarithm of the sum is then right without."""
    x, axes = e.input("X"), (e.node.attrs["axis"],)
    rank = len(shapes.dims(x))
    largest, infinity = e.reduction("MAX", x, axes), e.constant(float("inf"), rank)
    finite = e.pointwise("CMP_LT", e.pointwise("ABS", largest), infinity)
    shift = e.pointwise("BINARY_SELECT", largest, e.constant(0, rank), finite)
    total = e.reduction("ADD", e.pointwise("EXP", e.pointwise("SUB", x, shift)), axes)
    e.deliver("Y", e.pointwise("ADD", e.pointwise("LOG", total), shift))


def _expand_softmax_backward(e: Expansion) -> None:
    dy, y, axes = e.input("DY"), e.input("Y"), (e.node.attrs["axis"],)
    e.deliver("DX", e.pointwise("MUL", y, e.pointwise("SUB", dy, e.reduction("ADD", e.pointwise("MUL", dy, y), axes))))


def _expand_log_softmax_backward(e: Expansion) -> None:
    dy, y, axes = e.input("DY"), e.input("Y"), (e.node.attrs["axis"],)
    e.deliver("DX", e.pointwise("SUB", dy, e.pointwise("MUL", e.pointwise("EXP", y), e.reduction("ADD", dy, axes))))


def _expand_logsumexp_backward(e: Expansion) -> None:
    """Where Y is -inf, all of X is, and the gradient is 0."""
    x = e.input("X")
    kept = _without(shapes.dims(x), e.node.attrs["axis"], True)
    dy, y = (t if shapes.dims(t) == kept else e.reshape(t, kept) for t in (e.input("DY"), e.input("Y")))
    lowest, zero = e.constant(float("-inf"), len(kept)), e.constant(0, len(kept))
    power = e.pointwise("EXP", e.pointwise("SUB", x, y))
    e.deliver("DX", e.pointwise("MUL", dy, e.pointwise("BINARY_SELECT", zero, power, e.pointwise("CMP_EQ", y, lowest))))


# ------------------------------------------------------------------------------------------------------------------------------------ references
def _logsumexp(x: Array, axis: int) -> Array:
    return np.asarray(np.logaddexp.reduce(x, axis=axis, keepdims=True))


def _log_softmax_formula(a: Arrays, dims: dict[str, Dims], node: Node) -> Arrays:
    total = _logsumexp(a["X"], node.attr("axis"))
    return {"Y": np.where(np.isposinf(total), np.nan, a["X"] - total)}


def _softmax_formula(a: Arrays, dims: dict[str, Dims], node: Node) -> Arrays:
    return {"Y": np.exp(_log_softmax_formula(a, dims, node)["Y"])}


def _logsumexp_formula(a: Arrays, dims: dict[str, Dims], node: Node) -> Arrays:
    return {"Y": _logsumexp(a["X"], node.attr("axis"))}


def _softmax_backward_formula(a: Arrays, dims: dict[str, Dims], node: Node) -> Arrays:
    y, dy, axis = a["Y"], a["DY"], node.attr("axis")
    rows, gradients = np.moveaxis(y, axis, -1), np.moveaxis(dy, axis, -1)
    dx = rows * gradients - rows * np.einsum("...i,...i->...", rows, gradients)[..., None]
    return {"DX": np.moveaxis(dx, -1, axis)}


def _log_softmax_backward_formula(a: Arrays, dims: dict[str, Dims], node: Node) -> Arrays:
    y, dy, axis = a["Y"], a["DY"], node.attr("axis")
    return {"DX": dy - np.exp(y) * np.sum(dy, axis=axis, keepdims=True)}


def _logsumexp_backward_formula(a: Arrays, dims: dict[str, Dims], node: Node) -> Arrays:
    x = a["X"]
    kept = _without(x.shape, node.attr("axis"), True)
    y = a["Y"].reshape(kept)
    return {"DX": a["DY"].reshape(kept) * np.where(np.isneginf(y), 0.0, np.exp(x - y))}


# ------------------------------------------------------------------------------------------------------------------------------------ the specs
def _spec(
    tag: str,
    inputs: tuple[str, ...],
    infer: Callable[[NodeDecl], None],
    formula: Formula,
    expand: Callable[[Expansion], None],
    attrs: tuple[str, ...] = ("axis",),
) -> OpSpec:
    return OpSpec(
        tag=tag,
        role="composite",
        inputs=inputs,
        outputs=("DX",) if "DY" in inputs else ("Y",),
        attrs=attrs,
        domain="float",
        infer=infer,
        check=shapes.check_plain,
        reference=reference(formula),
        expand=expand,
    )


SPECS = (
    _spec("SOFTMAX", ("X",), _infer, _softmax_formula, _expand_softmax),
    _spec("LOG_SOFTMAX", ("X",), _infer, _log_softmax_formula, _expand_log_softmax),
    _spec("LOGSUMEXP", ("X",), _infer_sum, _logsumexp_formula, _expand_logsumexp, ("axis", "keepdim")),
    _spec("SOFTMAX_BPROP", ("DY", "Y"), _infer_backward, _softmax_backward_formula, _expand_softmax_backward),
    _spec("LOG_SOFTMAX_BPROP", ("DY", "Y"), _infer_backward, _log_softmax_backward_formula, _expand_log_softmax_backward),
    _spec("LOGSUMEXP_BPROP", ("DY", "X", "Y"), _infer_sum_backward, _logsumexp_backward_formula, _expand_logsumexp_backward),
)
