"""Batch normalization: training, inference, backward, and its parts for fusions by hand (genstats, bn_finalize, dbn_weight). Channels are axis 1.

Training normalizes by the variance of the batch, divided by the number n of elements of a channel; the running variance takes it divided by n - 1
(by 1 where n is 1): next = (1 - momentum) * previous + momentum * of this batch.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from graphdnn.errors import ValidationError, explain
from graphdnn.ir.node import Node, NodeDecl
from graphdnn.ir.tensor import Dims, TensorDecl
from graphdnn.opspecs import norm, shapes
from graphdnn.opspecs import norm_shapes as rules
from graphdnn.opspecs.expansion import Expansion
from graphdnn.opspecs.formula import Arrays, reference
from graphdnn.opspecs.scalars import Array
from graphdnn.opspecs.spec import OpSpec

RUNNING = ("PREV_RUNNING_MEAN", "PREV_RUNNING_VAR", "MOMENTUM")
NEXT = ("NEXT_RUNNING_MEAN", "NEXT_RUNNING_VAR")
_CHANNELS = "one element for each channel"


# ------------------------------------------------------------------------------------------------------------------------------------- running
def _infer_running(node: NodeDecl, dim: Dims) -> None:
    """Running statistics: all of their inputs or none, of dims ``dim``, and their next values."""
    given = [p for p in RUNNING if p in node.inputs]
    wanted = ", ".join(RUNNING).lower()
    if 0 < len(given) < len(RUNNING):
        missing = ", ".join(p.lower() for p in RUNNING if p not in given)
        rule, found = f"running statistics without {missing}", ", ".join(given).lower()
        raise ValidationError(explain(rule, node=node.label, expected=wanted, found=found, fix="give all three, or none"))
    if given:
        for port in RUNNING[:2]:
            rules.equal(node, port, dim, _CHANNELS)
        rules.give_channels_last(node, NEXT, dim)
    elif any(p in node.outputs for p in NEXT):
        raise ValidationError(explain("there are no running statistics to go on from", node=node.label, expected=wanted, found="none"))


def _expand_running(e: Expansion, mean: TensorDecl, variance: TensorDecl, unbias: TensorDecl, momentum: TensorDecl) -> None:
    """The next running statistics; ``unbias`` times the variance is that of the whole population."""
    rest = e.pointwise("SUB", e.constant(1, len(shapes.dims(mean))), momentum)
    for now, before, after in zip((mean, e.pointwise("MUL", variance, unbias)), RUNNING, NEXT, strict=False):
        e.deliver(after, e.pointwise("ADD", e.pointwise("MUL", e.input(before), rest), e.pointwise("MUL", now, momentum)))


def _running(a: Arrays, mean: Array, variance: Array, n: float) -> Arrays:
    if RUNNING[0] not in a:
        return {}
    momentum = float(a["MOMENTUM"].reshape(()))
    unbiased = variance * n / max(n - 1, 1)
    return {p: (1 - momentum) * a[q] + momentum * now for p, q, now in zip(NEXT, RUNNING, (mean, unbiased), strict=False)}


# ------------------------------------------------------------------------------------------------------------------------- training, backward
def _infer_training(node: NodeDecl) -> None:
    _infer_running(node, norm.infer_forward(rules.BATCH, node))


def _expand_training(e: Expansion) -> None:
    found = norm.normalize(rules.BATCH, e)
    assert found.mean is not None, "batch normalization subtracts the mean"
    if RUNNING[0] in e.node.inputs:
        x = shapes.dims(e.input("X"))
        n = math.prod(x) // x[1] if x[1] else 1
        _expand_running(e, found.mean, found.variance, e.constant(n / max(n - 1, 1), len(x)), norm.number(e, "MOMENTUM", len(x)))
    found.deliver(e)


def _training(a: Arrays, dims: dict[str, Dims], node: Node) -> Arrays:
    x = a["X"]
    axes = (0, *range(2, x.ndim))
    xhat, mean, variance, inverse = norm.standardized(x, axes, float(a["EPSILON"].reshape(())))
    found = {"Y": xhat * a["SCALE"] + a["BIAS"], "MEAN": mean, "INV_VARIANCE": inverse}
    return found | _running(a, mean, variance, x.size / max(x.shape[1], 1))


def _backward(a: Arrays, dims: dict[str, Dims], node: Node) -> Arrays:
    x, dy = a["X"], a["DY"]
    dx = norm.gradient(dy, x, a["SCALE"], a["MEAN"], a["INV_VARIANCE"], (0, *range(2, x.ndim)))
    xhat = (x - a["MEAN"]) * a["INV_VARIANCE"]
    return {"DX": dx, "DSCALE": norm.sum_to(dy * xhat, dims["DSCALE"]), "DBIAS": norm.sum_to(dy, dims["DBIAS"])}


# ----------------------------------------------------------------------------------------------------------------------------------- inference
def _infer_inference(node: NodeDecl) -> None:
    ports = ("X", "SCALE", "BIAS", "MEAN", "INV_VARIANCE")
    shapes.require(node, ports, ("Y",))
    x = rules.input_dims(node, 2)
    for port in ports[1:]:
        rules.fit(node, port, rules.per_channel(x), _CHANNELS)
    shapes.give(node, "Y", x, lambda: shapes.strides(node.inputs["X"]))


def _expand_inference(e: Expansion) -> None:
    deviation = e.pointwise("SUB", e.input("X"), e.input("MEAN"))
    e.deliver("Y", norm.affine(e, deviation, e.input("INV_VARIANCE"), e.input("SCALE"), e.input("BIAS")))


def _inference(a: Arrays, dims: dict[str, Dims], node: Node) -> Arrays:
    return {"Y": a["X"] * (a["SCALE"] * a["INV_VARIANCE"]) + (a["BIAS"] - a["MEAN"] * a["SCALE"] * a["INV_VARIANCE"])}


# ------------------------------------------------------------------------------------------------------------------------------------- genstats
def _infer_genstats(node: NodeDecl) -> None:
    shapes.require(node, ("X",), ("SUM", "SQ_SUM"))
    rules.give_channels_last(node, ("SUM", "SQ_SUM"), rules.per_channel(rules.input_dims(node, 2)))


def _expand_genstats(e: Expansion) -> None:
    x = e.input("X")
    axes = (0, *range(2, len(shapes.dims(x))))
    e.deliver("SUM", e.reduction("ADD", x, axes))
    e.deliver("SQ_SUM", e.reduction("ADD", e.pointwise("MUL", x, x), axes))


def _genstats(a: Arrays, dims: dict[str, Dims], node: Node) -> Arrays:
    x = np.moveaxis(a["X"], 1, 0).reshape(a["X"].shape[1], -1)
    return {"SUM": np.sum(x, axis=1), "SQ_SUM": np.einsum("ci,ci->c", x, x)}


# -------------------------------------------------------------------------------------------------------------------------- bn_finalize
_FINAL = ("EQ_SCALE", "EQ_BIAS", "MEAN", "INV_VARIANCE")


def _infer_finalize(node: NodeDecl) -> None:
    ports = ("SUM", "SQ_SUM", "SCALE", "BIAS")
    shapes.require(node, (*ports, "EPSILON", "ACCUM_COUNT"), _FINAL)
    dim = shapes.dims(node.inputs["SUM"])
    for port in ports:
        rules.equal(node, port, dim, "dims of the sum")
    rules.single(node, "EPSILON", "ACCUM_COUNT", "MOMENTUM")
    rules.give_channels_last(node, _FINAL, dim)
    _infer_running(node, dim)


def _expand_finalize(e: Expansion) -> None:
    total = e.input("SUM")
    rank = len(shapes.dims(total))
    count, one, zero = norm.number(e, "ACCUM_COUNT", rank), e.constant(1, rank), e.constant(0, rank)
    mean = e.pointwise("DIV", total, count)
    square = e.pointwise("DIV", e.input("SQ_SUM"), count)
    variance = e.pointwise("MAX", e.pointwise("SUB", square, e.pointwise("MUL", mean, mean)), zero)
    inverse = e.pointwise("RSQRT", e.pointwise("ADD", variance, norm.number(e, "EPSILON", rank)))
    scale = e.pointwise("MUL", e.input("SCALE"), inverse)
    e.deliver("EQ_BIAS", e.pointwise("SUB", e.input("BIAS"), e.pointwise("MUL", mean, scale)))
    if RUNNING[0] in e.node.inputs:
        unbias = e.pointwise("DIV", count, e.pointwise("MAX", e.pointwise("SUB", count, one), one))
        _expand_running(e, mean, variance, unbias, norm.number(e, "MOMENTUM", rank))
    for port, value in zip(("EQ_SCALE", "MEAN", "INV_VARIANCE"), (scale, mean, inverse), strict=True):
        e.deliver(port, value)


def _finalize(a: Arrays, dims: dict[str, Dims], node: Node) -> Arrays:
    n = float(a["ACCUM_COUNT"].reshape(()))
    mean = a["SUM"] / n
    variance = np.maximum((a["SQ_SUM"] - a["SUM"] * mean) / n, 0.0)
    inverse = 1 / np.sqrt(variance + float(a["EPSILON"].reshape(())))
    found = {"EQ_SCALE": a["SCALE"] * inverse, "EQ_BIAS": a["BIAS"] - a["SUM"] * a["SCALE"] * inverse / n, "MEAN": mean, "INV_VARIANCE": inverse}
    return found | _running(a, mean, variance, n)


# ---------------------------------------------------------------------------------------------------------------------------------- dbn_weight
_WEIGHT = ("DSCALE", "DBIAS", "EQ_BIAS", "EQ_SCALE_DY", "EQ_SCALE_X")


def _infer_weight(node: NodeDecl) -> None:
    shapes.require(node, ("DY", "X", "SCALE", "MEAN", "INV_VARIANCE"), _WEIGHT)
    x = rules.input_dims(node, 2)
    rules.equal(node, "DY", x, "dims of the input")
    found = rules.statistics(node, rules.BATCH)
    for port in ("SCALE", "MEAN", "INV_VARIANCE"):
        rules.equal(node, port, found, _CHANNELS)
    rules.give_channels_last(node, _WEIGHT, found)


def _expand_weight(e: Expansion) -> None:
    """DX = EQ_SCALE_DY * DY + EQ_SCALE_X * X + EQ_BIAS is what DBN gives."""
    x, dy, mean, inverse = (e.input(p) for p in ("X", "DY", "MEAN", "INV_VARIANCE"))
    dim = shapes.dims(x)
    axes = (0, *range(2, len(dim)))
    n = e.constant(math.prod(dim) // dim[1] if dim[1] else 1, len(dim))
    xhat = e.pointwise("MUL", e.pointwise("SUB", x, mean), inverse)
    dscale, dbias = e.reduction("ADD", e.pointwise("MUL", dy, xhat), axes), e.reduction("ADD", dy, axes)
    of_dy = e.pointwise("MUL", e.input("SCALE"), inverse)
    of_x = e.pointwise("NEG", e.pointwise("MUL", e.pointwise("MUL", of_dy, inverse), e.pointwise("DIV", dscale, n)))
    offset = e.pointwise("ADD", e.pointwise("MUL", of_dy, e.pointwise("DIV", dbias, n)), e.pointwise("MUL", of_x, mean))
    e.deliver("EQ_BIAS", e.pointwise("NEG", offset))
    for port, value in zip(("DSCALE", "DBIAS", "EQ_SCALE_DY", "EQ_SCALE_X"), (dscale, dbias, of_dy, of_x), strict=True):
        e.deliver(port, value)


def _weight(a: Arrays, dims: dict[str, Dims], node: Node) -> Arrays:
    x, dy, scale, mean, inverse = (a[p] for p in ("X", "DY", "SCALE", "MEAN", "INV_VARIANCE"))
    n = x.size / max(x.shape[1], 1)
    dbias = norm.sum_to(dy, mean.shape)
    dscale = inverse * (norm.sum_to(dy * x, mean.shape) - mean * dbias)
    slope = -scale * np.square(inverse) * dscale / n
    offset = -scale * inverse * dbias / n - slope * mean
    return {"DSCALE": dscale, "DBIAS": dbias, "EQ_SCALE_DY": scale * inverse, "EQ_SCALE_X": slope, "EQ_BIAS": offset}


SPECS = (
    OpSpec(
        tag="BATCHNORM",
        role="composite",
        inputs=("X", "SCALE", "BIAS", "EPSILON", *RUNNING),
        outputs=("Y", "MEAN", "INV_VARIANCE", *NEXT),
        optional=(*RUNNING, "MEAN", "INV_VARIANCE", *NEXT),
        attrs=("peer_stats",),
        domain="float",
        infer=_infer_training,
        check=shapes.check_plain,
        reference=reference(_training),
        expand=_expand_training,
    ),
    OpSpec(
        tag="DBN",
        role="composite",
        inputs=("DY", "X", "SCALE", "MEAN", "INV_VARIANCE"),
        outputs=("DX", "DSCALE", "DBIAS"),
        attrs=("peer_stats",),
        domain="float",
        infer=partial(norm.infer_backward, rules.BATCH),
        check=shapes.check_plain,
        reference=reference(_backward),
        expand=partial(norm.expand_backward, rules.BATCH),
    ),
    OpSpec(
        tag="BATCHNORM_INFERENCE",
        role="composite",
        inputs=("X", "SCALE", "BIAS", "MEAN", "INV_VARIANCE"),
        outputs=("Y",),
        domain="float",
        infer=_infer_inference,
        check=shapes.check_plain,
        reference=reference(_inference),
        expand=_expand_inference,
    ),
    OpSpec(
        tag="GENSTATS",
        role="composite",
        inputs=("X",),
        outputs=("SUM", "SQ_SUM"),
        domain="float",
        infer=_infer_genstats,
        check=shapes.check_plain,
        reference=reference(_genstats),
        expand=_expand_genstats,
    ),
    OpSpec(
        tag="BN_FINALIZE",
        role="composite",
        inputs=("SUM", "SQ_SUM", "SCALE", "BIAS", "EPSILON", "ACCUM_COUNT", *RUNNING),
        outputs=(*_FINAL, *NEXT),
        optional=(*RUNNING, *NEXT),
        domain="float",
        infer=_infer_finalize,
        check=shapes.check_plain,
        reference=reference(_finalize),
        expand=_expand_finalize,
    ),
    OpSpec(
        tag="DBN_WEIGHT",
        role="composite",
        inputs=("DY", "X", "SCALE", "MEAN", "INV_VARIANCE"),
        outputs=_WEIGHT,
        domain="float",
        infer=_infer_weight,
        check=shapes.check_plain,
        reference=reference(_weight),
        expand=_expand_weight,
    ),
)
