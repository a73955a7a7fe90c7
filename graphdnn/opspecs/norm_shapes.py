"""Shapes of normalizations: which elements of X share statistics, to what scale and bias broadcast, and what outputs look like."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphdnn.errors import ValidationError, explain
from graphdnn.ir import layout
from graphdnn.ir.extent import share, varies
from graphdnn.ir.node import NodeDecl
from graphdnn.ir.tensor import Dims
from graphdnn.opspecs import shapes


@dataclass(frozen=True)
class Family:
    """One way to normalize, as its shapes say it. All dims have the rank of X.

    ``statistics(x, scale, groups)``: dims of the statistics: 1 where X is normalized over, a number of groups, else the extent of X.
    ``parameters(x)``: dims to which scale and bias broadcast. ``gradients(x)``: dims of their gradients where the user sets none.
    ``rank``: least rank of X. ``like_input``: statistics are packed in the stride order of X, else channels last. ``row_major``: so are gradients,
    else channels last. ``centered``: the mean is subtracted. ``grouped``: axis 1 is normalized in groups.
    """

    statistics: Callable[[Dims, Dims, int], Dims]
    parameters: Callable[[Dims], Dims]
    gradients: Callable[[Dims], Dims]
    rank: int = 1
    like_input: bool = False
    row_major: bool = False
    centered: bool = True
    grouped: bool = False


def _of_scale(x: Dims, scale: Dims, groups: int) -> Dims:
    return tuple(d if s == 1 else 1 for d, s in zip(x, scale, strict=True))


def _of_samples(x: Dims, scale: Dims, groups: int) -> Dims:
    """Every sample has its own scale: dim 0, or dim 1 of a sequence of batches, X [S, B, D] with scale [1, B, D]."""
    second = scale[0] == 1 and any(s != 1 for s in scale[2:]) and scale[1] != 1 and (x[0] != 1 or len(x) == 3)
    sample = 1 if second else 0
    return tuple(d if s == 1 or a == sample else 1 for a, (d, s) in enumerate(zip(x, scale, strict=True)))


def _ones(x: Dims) -> Dims:
    return (1,) * (len(x) - 2)


def per_channel(x: Dims) -> Dims:
    """(1, C, 1, ...)."""
    return (1, x[1], *_ones(x))


def _per_sample_and_channel(x: Dims) -> Dims:
    return (x[0], x[1], *_ones(x))


def _whole(x: Dims) -> Dims:
    return x


def _without_batch(x: Dims) -> Dims:
    return (1, *x[1:])


def _ends(x: Dims) -> Dims:
    return (x[0], *(1,) * (len(x) - 2), x[-1]) if len(x) > 1 else x


LAYER = Family(_of_scale, _whole, _without_batch, like_input=True)
RMS = Family(_of_scale, _whole, _without_batch, like_input=True, centered=False)
ADA = Family(_of_samples, _whole, _ends, like_input=True, row_major=True, rank=2)
INSTANCE = Family(lambda x, scale, groups: _per_sample_and_channel(x), _per_sample_and_channel, per_channel, rank=3)
BATCH = Family(lambda x, scale, groups: per_channel(x), per_channel, per_channel, rank=2)
GROUP = Family(lambda x, scale, groups: (x[0], groups, *_ones(x)), _per_sample_and_channel, per_channel, rank=2, grouped=True)


def padded(dim: Dims, rank: int) -> Dims:
    """``dim`` with ones in front."""
    return (1,) * (rank - len(dim)) + tuple(dim)


def normalized_axes(statistics: Sequence[int], x: Sequence[int]) -> Dims:
    """Axes over which elements share statistics of these dims."""
    return tuple(a for a, (s, d) in enumerate(zip(statistics, x, strict=True)) if s == 1 and d != 1)


def grouped(dim: Dims, channels: int, groups: int) -> Dims:
    """Dims with axis 1 as groups times members: of X, of statistics, of scale and bias."""
    whole = dim[1] == channels and (dim[1] != groups or varies(dim[1]) == varies(channels))  # groups may be as many as channels in this call only
    return (dim[0], *((groups, share(channels, groups)) if whole else (dim[1], 1)), *dim[2:])


# ------------------------------------------------------------------------------------------------------------------------------------- checks
def fit(node: NodeDecl, port: str, target: Dims, what: str) -> None:
    """ValidationError unless the input at ``port`` broadcasts to ``target``."""
    t = node.inputs[port]
    found = shapes.dims(t)
    if len(found) > len(target) or any(d not in (1, m) for d, m in zip(padded(found, len(target)), target, strict=True)):
        rule, expected = f"{port.lower()} does not fit the input", f"{what}: {list(target)}, or 1"
        raise ValidationError(explain(rule, node=node.label, tensor=t.name, expected=expected, found=list(found)))


def equal(node: NodeDecl, port: str, target: Dims, what: str) -> None:
    """ValidationError unless the input at ``port`` has the dims ``target`` (ones in front may be missing)."""
    t = node.inputs[port]
    if len(shapes.dims(t)) > len(target) or padded(shapes.dims(t), len(target)) != tuple(target):
        rule = f"{port.lower()} does not fit the input"
        raise ValidationError(explain(rule, node=node.label, tensor=t.name, expected=f"{what}: {list(target)}", found=list(shapes.dims(t))))


def single(node: NodeDecl, *ports: str) -> None:
    """ValidationError unless each of ``ports`` that is there has one element."""
    for port in ports:
        t = node.inputs.get(port)
        if t is not None and math.prod(shapes.dims(t)) != 1:
            found = list(shapes.dims(t))
            raise ValidationError(explain(f"{port.lower()} is one number", node=node.label, tensor=t.name, expected="dims of ones", found=found))


def input_dims(node: NodeDecl, rank: int) -> Dims:
    """Dims of X. ValidationError for a smaller rank."""
    x = node.inputs["X"]
    if len(shapes.dims(x)) < rank:
        expected = f"rank >= {rank}" + (", channels at axis 1" if rank > 1 else "")
        rule = f"{node.op.lower()} needs more dims"
        raise ValidationError(explain(rule, node=node.label, tensor=x.name, expected=expected, found=list(shapes.dims(x))))
    return shapes.dims(x)


def groups_of(node: NodeDecl, channels: int, groups: object) -> int:
    """``groups``, if it divides the channels. ValidationError otherwise."""
    if not isinstance(groups, int) or groups < 1 or channels % groups:
        expected, found = f"a divisor of the {channels} channels", groups
        raise ValidationError(explain("the channels do not fall into groups", node=node.label, expected=expected, found=found))
    return groups


def statistics(node: NodeDecl, family: Family, groups: int = 1) -> Dims:
    """Dims of the statistics of a node's X.

    ValidationError where scale or bias do not fit, where no axis is normalized, or one without elements."""
    x = input_dims(node, family.rank)
    for port in ("SCALE", "BIAS"):
        if port in node.inputs:
            channels = "" if family.parameters is _whole else ", one for each channel"
            fit(node, port, family.parameters(x), f"extents of the input{channels}")
    found = family.statistics(x, padded(shapes.dims(node.inputs["SCALE"]), len(x)), groups)
    if family.like_input and found == x and x[-1] != 1:
        expected = "a scale with the extents of the axes to normalize over"
        raise _refused(node, "no axis is normalized", expected, f"a scale of dims {list(shapes.dims(node.inputs['SCALE']))}")
    for a in normalized_axes(found, x):
        if x[a] == 0:
            raise _refused(node, f"the normalized axis {a} has no elements", "an extent >= 1", list(x))
    return found


def _refused(node: NodeDecl, rule: str, expected: str, found: object) -> ValidationError:
    return ValidationError(explain(rule, node=node.label, tensor=node.inputs["X"].name, expected=expected, found=found))


# ------------------------------------------------------------------------------------------------------------------------------------ outputs
def give_channels_last(node: NodeDecl, ports: Sequence[str], dim: Dims) -> None:
    """Dims and packed channels-last strides for those of ``ports`` that are there."""
    for port in ports:
        if port in node.outputs:
            shapes.give(node, port, dim, lambda: layout.packed(dim, layout.channels_last_order(len(dim))))


def give_statistics(node: NodeDecl, family: Family, dim: Dims) -> None:
    """Dims and strides of the outputs MEAN and INV_VARIANCE, where they are there."""
    if not family.like_input:
        give_channels_last(node, ("MEAN", "INV_VARIANCE"), dim)
        return
    order = [abs(s) for s in shapes.strides(node.inputs["X"])]
    for port in ("MEAN", "INV_VARIANCE"):
        if port in node.outputs:
            shapes.give(node, port, dim, lambda: layout.like(dim, order))


def give_gradients(node: NodeDecl, family: Family) -> None:
    """Dims and strides of DX, DSCALE and DBIAS. The last two have the dims that the user sets, which may be larger than those of scale; unset ones
    are those of the API, or of scale where that is larger."""
    x, scale = shapes.dims(node.inputs["X"]), padded(shapes.dims(node.inputs["SCALE"]), len(shapes.dims(node.inputs["X"])))
    usual = family.gradients(x)
    if not _holds(usual, scale):
        usual = scale
    for port, dim in (("DX", x), ("DSCALE", usual), ("DBIAS", usual)):
        t = node.outputs.get(port)
        if t is None:
            continue
        if port != "DX" and t.dim is not None:
            own = padded(t.dim, len(x))
            if len(own) != len(x) or not _holds(own, scale) or not _holds(x, own):
                expected = f"dims of scale, {list(scale)}; an extent may be that of the input, {list(x)}"
                rule = f"{port.lower()} cannot have these dims"
                raise ValidationError(explain(rule, node=node.label, tensor=t.name, expected=expected, found=list(t.dim)))
            dim = tuple(t.dim)
        order = None if family.row_major else layout.channels_last_order(len(dim))
        shapes.give(node, port, dim, lambda dim=dim, order=order: layout.packed(dim, order))  # type: ignore[misc]


def _holds(larger: Dims, smaller: Dims) -> bool:
    """Whether ``smaller`` broadcasts to ``larger``."""
    return all(m in (1, n) for n, m in zip(larger, smaller, strict=True))
