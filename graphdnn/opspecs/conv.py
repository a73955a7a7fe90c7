"""CONV_FPROP, CONV_DGRAD, CONV_WGRAD: convolutions of any spatial rank, and their gradients.

Images are (N, C, spatial...), filters (K, C / groups, spatial...), outputs (N, K, spatial...); the groups follow from the channel counts. Output p
of a spatial dim sums filter tap r over image element ``p * stride + r * dilation - pre_padding``; math_mode CONVOLUTION takes the taps in reverse.
Padding is zeros and takes part in the arithmetic: 0 times an infinite filter element is NaN. A negative padding crops.

The dims of a data gradient do not follow from those of its inputs (two images can give one output size), nor do those of a weight gradient: both are
set by the user and checked here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphdnn.errors import ValidationError, explain
from graphdnn.ir import layout
from graphdnn.ir.node import Node, NodeDecl
from graphdnn.ir.tensor import Dims, TensorDecl
from graphdnn.opspecs import scalars as s
from graphdnn.opspecs import shapes
from graphdnn.opspecs.spec import MatmulForm, OpSpec

ATTRIBUTES = ("pre_padding", "post_padding", "stride", "dilation", "math_mode")
_MISSING = ("Pre padding not set.", "Post padding not set.", "Conv strides not set.", "Conv dilation not set.")
_MODES = ("CROSS_CORRELATION", "CONVOLUTION")


@dataclass(frozen=True, slots=True)
class Motion:
    """How a filter moves over an image, an entry for each spatial dim; ``flipped``: its taps are taken in reverse."""

    pre: Dims
    post: Dims
    stride: Dims
    dilation: Dims
    flipped: bool

    def outputs(self, image: Sequence[int], taps: Sequence[int]) -> Dims:
        """Output extents; 0 or less where the filter is larger than the padded image."""
        parts = zip(image, taps, self.pre, self.post, self.stride, self.dilation, strict=True)
        return tuple((x + pre + post - dil * (w - 1) - 1) // step + 1 for x, w, pre, post, step, dil in parts)


def motion(attrs: Mapping[str, Any]) -> Motion:
    """The attributes of a node that has passed infer."""
    pre, post, stride, dilation = (tuple(attrs[a]) for a in ATTRIBUTES[:4])
    return Motion(pre, post, stride, dilation, attrs.get("math_mode") == "CONVOLUTION")


def groups_of(image: Dims, weight: Dims) -> int:
    """Groups of an image (N, C, ...) under a filter (K, C / groups, ...)."""
    return image[1] // weight[1] if weight[1] else 1


# ----------------------------------------------------------------------------------------------------------------------------------------- infer
def _refuse(node: NodeDecl, rule: str, expected: object, found: object, tensor: TensorDecl | None = None, fix: str | None = None) -> ValidationError:
    return ValidationError(explain(rule, node=node.label, tensor=tensor.name if tensor else None, expected=expected, found=found, fix=fix))


def _motion(node: NodeDecl, rank: int) -> Motion:
    """Attributes that are there and have an entry for each spatial dim."""
    for name, rule in zip(ATTRIBUTES, _MISSING, strict=False):
        if not node.attrs.get(name):
            raise _refuse(node, rule, f"{name} with {max(rank - 2, 1)} entries", "none", fix=f"pass {name}=[...]")
        if len(node.attrs[name]) != rank - 2:
            raise _refuse(node, f"{name} needs one entry for each spatial dim", f"{rank - 2} entries", list(node.attrs[name]))
    if node.attrs.get("math_mode") not in (None, *_MODES):
        raise _refuse(node, "convolution mode not known", " or ".join(_MODES), node.attrs["math_mode"])
    for name in ("stride", "dilation"):
        if any(v < 1 for v in node.attrs[name]):
            raise _refuse(node, f"{name} must be positive", "entries >= 1", list(node.attrs[name]))
    return motion(node.attrs)


def _ranks(node: NodeDecl, tensors: Sequence[TensorDecl]) -> int:
    rank = len(shapes.dims(tensors[0]))
    for t in tensors:
        if len(shapes.dims(t)) != rank or rank < 3:
            found = ", ".join(f"'{t.name}' {list(shapes.dims(t))}" for t in tensors)
            raise _refuse(node, "a convolution needs tensors of one rank with a spatial dim", "dims (N, C, spatial...)", found, t)
    return rank


def _check_channels(node: NodeDecl, image: TensorDecl, weight: TensorDecl) -> None:
    """Groups: the channels of the image are a multiple of the filter's, its outputs a multiple of the groups."""
    x, w = shapes.dims(image), shapes.dims(weight)
    if x[1] % w[1] if w[1] else x[1]:
        expected = f"C a multiple of {w[1]} (dim 1 of '{weight.name}', C / groups)"
        raise _refuse(node, f"the channels of '{image.name}' are no multiple of those of the filter", expected, f"C = {x[1]}", image)
    groups = groups_of(x, w)
    if w[0] % groups if groups else w[0]:
        expected = f"K a multiple of the {groups} groups ({x[1]} channels / {w[1]} a group)"
        raise _refuse(node, "the outputs of the filter do not divide into its groups", expected, f"K = {w[0]}", weight)


def _outputs(node: NodeDecl, moves: Motion, image: TensorDecl, weight: TensorDecl) -> Dims:
    """Dims of the output of ``weight`` over ``image``."""
    x, w = shapes.dims(image), shapes.dims(weight)
    _check_channels(node, image, weight)
    if any(t < 1 for t in w[2:]):
        raise _refuse(node, "the filter is empty", "spatial dims >= 1", list(w), weight)
    found = moves.outputs(x[2:], w[2:])
    for a, out in enumerate(found):
        if out < 1:
            padded, reach = x[2 + a] + moves.pre[a] + moves.post[a], moves.dilation[a] * (w[2 + a] - 1) + 1
            rule = f"the filter is larger than the padded input in spatial dim {a}"
            expected = f"at most {padded} (an extent of {x[2 + a]}, padded by {moves.pre[a]} and {moves.post[a]})"
            raise _refuse(node, rule, expected, f"{w[2 + a]} taps with dilation {moves.dilation[a]}: {reach}", weight)
    return (x[0], w[0], *found)


def _packed(dim: Dims) -> Dims:
    return layout.packed(dim, layout.channels_last_order(len(dim)))


def _fprop_infer(node: NodeDecl) -> None:
    shapes.require(node, ("X", "W"), ("Y",))
    x, w = node.inputs["X"], node.inputs["W"]
    moves = _motion(node, _ranks(node, (x, w)))
    dim = _outputs(node, moves, x, w)
    shapes.give(node, "Y", dim, lambda: _packed(dim))


def _given(node: NodeDecl, port: str, like: str) -> TensorDecl:
    """An output whose dims the user has set."""
    t = node.outputs[port]
    if t.dim is None:
        rule = "output dimension inferencing is not possible"
        raise _refuse(node, rule, f"dims of {port}, such as {like}", "none", t, "call set_dim on the output: several dims can give one output size")
    return t


def _check_loss(node: NodeDecl, moves: Motion, image: TensorDecl, weight: TensorDecl, given: TensorDecl) -> None:
    """The dims of DY are those of the output of ``weight`` over ``image``; ``given`` is which of the two the user has set."""
    loss = node.inputs["DY"]
    wanted, found = _outputs(node, moves, image, weight), shapes.dims(loss)
    if wanted != found:
        rule = f"the dims set on the output are not consistent with those of '{loss.name}'"
        expected = f"dims whose forward convolution has dims {list(found)}"
        raise _refuse(node, rule, expected, f"{list(given.dim or ())}: its forward convolution has dims {list(wanted)}", given)


def _dgrad_infer(node: NodeDecl) -> None:
    shapes.require(node, ("DY", "W"), ("DX",))
    loss, w = node.inputs["DY"], node.inputs["W"]
    moves = _motion(node, _ranks(node, (loss, w)))
    dx = _given(node, "DX", "(N, C, H, W)")
    _ranks(node, (loss, dx))
    _check_loss(node, moves, dx, w, dx)
    dim = shapes.dims(dx)
    shapes.give(node, "DX", dim, lambda: _packed(dim))


def _wgrad_infer(node: NodeDecl) -> None:
    shapes.require(node, ("DY", "X"), ("DW",))
    loss, x = node.inputs["DY"], node.inputs["X"]
    node.inputs = {"DY": loss, "X": x}  # the method takes them the other way round
    moves = _motion(node, _ranks(node, (loss, x)))
    dw = _given(node, "DW", "(K, C / groups, R, S)")
    _ranks(node, (loss, dw))
    _check_loss(node, moves, x, dw, dw)
    dim = shapes.dims(dw)
    shapes.give(node, "DW", dim, lambda: _packed(dim))


# ------------------------------------------------------------------------------------------------------------------------------------- reference
def _overlap(moves: Motion, image: Sequence[int], reach: Sequence[int]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Where the elements of an image lie in its padded form of extents ``reach``: slices of the padded form and of the image."""
    inside, own = [], []
    for n, whole, pre in zip(image, reach, moves.pre, strict=True):
        first, skip = max(pre, 0), max(-pre, 0)
        count = max(min(n - skip, whole - first), 0)
        inside.append(slice(first, first + count))
        own.append(slice(skip, skip + count))
    return (..., *inside), (..., *own)


def _reach(moves: Motion, out: Sequence[int], taps: Sequence[int]) -> Dims:
    """Extents of the padded image that the filter touches."""
    parts = zip(out, taps, moves.stride, moves.dilation, strict=True)
    return tuple((p - 1) * step + dil * (r - 1) + 1 for p, r, step, dil in parts)


def _padded(x: Any, moves: Motion, out: Sequence[int], taps: Sequence[int]) -> Any:
    reach = _reach(moves, out, taps)
    inside, own = _overlap(moves, x.shape[2:], reach)
    found = np.zeros((*x.shape[:2], *reach), x.dtype)
    found[inside] = x[own]
    return found


def _taps(moves: Motion, out: Sequence[int], taps: Sequence[int]) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """For every tap: its index in the filter, and the slices of the padded image that it meets."""
    for r in itertools.product(*(range(n) for n in taps)):
        parts = zip(r, out, moves.stride, moves.dilation, strict=True)
        met = tuple(slice(i * dil, i * dil + (p - 1) * step + 1, step) for i, p, step, dil in parts)
        own = tuple(n - 1 - i for i, n in zip(r, taps, strict=True)) if moves.flipped else r
        yield (..., *own), (..., *met)


def _each(channels: int, groups: int) -> int:
    """Channels of a group; 1 where there is none."""
    return channels // groups if groups else 1


def _grouped(x: Any, axis: int, groups: int) -> Any:
    """Dim ``axis`` as (groups, rest)."""
    return x.reshape(*x.shape[:axis], groups, _each(x.shape[axis], groups), *x.shape[axis + 1 :])


def _flat(x: Any, kept: int) -> Any:
    """All dims after the first ``kept`` as one."""
    return x.reshape(*x.shape[:kept], math.prod(x.shape[kept:]))


def _fprop_reference(node: Node, dims: list[Dims], arrays: list[Any]) -> list[Any]:
    moves, (x, w) = motion(dict(node.attrs)), (s.narrowed(a, node.compute) for a in arrays)
    out, taps, groups = dims[0][2:], w.shape[2:], groups_of(x.shape, w.shape)
    image, weight = _grouped(_padded(x, moves, out, taps), 1, groups), _grouped(w, 0, groups)
    y = np.zeros((x.shape[0], groups, _each(w.shape[0], groups), math.prod(out)), x.dtype)
    with np.errstate(all="ignore"):
        for tap, met in _taps(moves, out, taps):
            y += np.matmul(weight[tap], _flat(image[met], 3))
    return [s.widened(y.reshape(dims[0]))]


def _dgrad_reference(node: Node, dims: list[Dims], arrays: list[Any]) -> list[Any]:
    moves, (loss, w) = motion(dict(node.attrs)), (s.narrowed(a, node.compute) for a in arrays)
    out, taps, groups = loss.shape[2:], w.shape[2:], groups_of(dims[0], w.shape)
    weight, dy = _grouped(w, 0, groups), _flat(_grouped(loss, 1, groups), 3)
    reach = _reach(moves, out, taps)
    padded = np.zeros((dims[0][0], groups, w.shape[1], *reach), loss.dtype)
    with np.errstate(all="ignore"):
        for tap, met in _taps(moves, out, taps):
            padded[met] += np.matmul(np.swapaxes(weight[tap], 1, 2), dy).reshape(padded[met].shape)
    inside, own = _overlap(moves, dims[0][2:], reach)
    dx = np.zeros((dims[0][0], groups, w.shape[1], *dims[0][2:]), loss.dtype)
    dx[own] = padded[inside]
    return [s.widened(dx.reshape(dims[0]))]


def _wgrad_reference(node: Node, dims: list[Dims], arrays: list[Any]) -> list[Any]:
    moves, (loss, x) = motion(dict(node.attrs)), (s.narrowed(a, node.compute) for a in arrays)
    out, taps, groups = loss.shape[2:], dims[0][2:], groups_of(x.shape, dims[0])
    image, dy = _grouped(_padded(x, moves, out, taps), 1, groups), _flat(_grouped(loss, 1, groups), 3)
    dw = np.zeros((groups, _each(dims[0][0], groups), *dims[0][1:]), x.dtype)
    with np.errstate(all="ignore"):
        for tap, met in _taps(moves, out, taps):
            dw[tap] = np.matmul(dy, np.swapaxes(_flat(image[met], 3), 2, 3)).sum(axis=0, dtype=x.dtype)
    return [s.widened(dw.reshape(dims[0]))]


# ----------------------------------------------------------------------------------------------------------------------------- as a matrix product
def _windows(moves: Motion, out: Dims, taps: Dims, groups: int) -> Callable[[Any], Any]:
    """Images as matrices (groups, N * outputs, C / groups * taps), taps in the order of the filter's memory."""

    def unfold(x: Any) -> Any:
        image = _grouped(_padded(x, moves, out, taps), 1, groups)
        n, _, c = image.shape[:3]
        found = np.zeros((groups, n, math.prod(out), c, *taps), x.dtype)
        for tap, met in _taps(moves, out, taps):
            found[tap] = _flat(image[met], 3).transpose(1, 0, 3, 2)
        return found.reshape(groups, n * math.prod(out), c * math.prod(taps))

    return unfold


def _spread(x: Any, stride: Dims) -> Any:
    """``x`` with stride - 1 zeros between neighbours."""
    found = np.zeros((*x.shape[:2], *((p - 1) * step + 1 for p, step in zip(x.shape[2:], stride, strict=True))), x.dtype)
    every: tuple[Any, ...] = (..., *(slice(None, None, step) for step in stride))
    found[every] = x
    return found


def _rows(x: Any, groups: int) -> Any:
    """(N, C, spatial) as (groups, N * spatial, C / groups)."""
    found = _flat(_grouped(x, 1, groups), 3).transpose(1, 0, 3, 2)
    return found.reshape(groups, found.shape[1] * found.shape[2], found.shape[3])


def _unrows(c: Any, dim: Dims) -> Any:
    """Back from (groups, N * spatial, C / groups)."""
    groups, _, each = c.shape
    return c.reshape(groups, dim[0], math.prod(dim[2:]), each).transpose(1, 0, 3, 2).reshape(dim)


def _fprop_form(node: Node, inputs: list[Dims], dim: Dims) -> MatmulForm:
    moves, (x, w) = motion(dict(node.attrs)), inputs
    groups = groups_of(x, w)
    columns = lambda a: _flat(_grouped(a, 0, groups), 2).swapaxes(1, 2)  # noqa: E731
    return MatmulForm(_windows(moves, dim[2:], w[2:], groups), columns, lambda c: _unrows(c, dim))


def _dgrad_form(node: Node, inputs: list[Dims], dim: Dims) -> MatmulForm:
    """The forward convolution of DY, spread by the stride, with the reversed filter whose input and output channels are swapped."""
    moves, (_, w) = motion(dict(node.attrs)), inputs
    groups = groups_of(dim, w)
    pre = tuple(dil * (r - 1) - p for dil, r, p in zip(moves.dilation, w[2:], moves.pre, strict=True))
    back = Motion(pre, pre, (1,) * len(pre), moves.dilation, not moves.flipped)
    unfold = _windows(back, dim[2:], w[2:], groups)
    columns = lambda a: _flat(_grouped(a, 0, groups).swapaxes(1, 2), 2).swapaxes(1, 2)  # noqa: E731
    return MatmulForm(lambda a: unfold(_spread(a, moves.stride)), columns, lambda c: _unrows(c, dim))


def _wgrad_form(node: Node, inputs: list[Dims], dim: Dims) -> MatmulForm:
    moves, (loss, x) = motion(dict(node.attrs)), inputs
    groups = groups_of(x, dim)
    return MatmulForm(lambda a: _rows(a, groups).swapaxes(1, 2), _windows(moves, loss[2:], dim[2:], groups), lambda c: c.reshape(dim))


def unit_steps(node: Node, inputs: list[Dims], dim: Dims, x: Any, w: Any) -> tuple[Dims, Callable[[Dims], tuple[Any, Any]]]:
    """A forward convolution or data gradient at step 1 as a sum of image elements p + r times taps r: the extents of the filter, and the arrays
    (N, groups, C, outputs + taps - 1 ...) of image ``x``, padding included, and (groups, K, C, R, S) of filter ``w`` for any number of outputs."""
    moves, taps, back = motion(dict(node.attrs)), inputs[1][2:], node.op == "CONV_DGRAD"
    groups = groups_of(dim if back else inputs[0], inputs[1])
    weight = _grouped(w, 0, groups)
    if back:
        weight, pre = weight.swapaxes(1, 2), tuple(r - 1 - p for r, p in zip(taps, moves.pre, strict=True))
        moves = Motion(pre, pre, moves.stride, moves.dilation, not moves.flipped)
    if moves.flipped:
        weight = np.flip(weight, tuple(range(3, weight.ndim)))
    return taps, lambda out: (_grouped(_padded(x, moves, out, taps), 1, groups), weight)


def _op(tag: str, inputs: tuple[str, str], output: str, infer: Any, reference: Any, form: Any, columns: int) -> OpSpec:
    return OpSpec(tag, "matmul", inputs, (output,), infer, shapes.check_plain, reference, attrs=ATTRIBUTES, as_matmul=form, columns=columns)


SPECS = (
    _op("CONV_FPROP", ("X", "W"), "Y", _fprop_infer, _fprop_reference, _fprop_form, 1),
    _op("CONV_DGRAD", ("DY", "W"), "DX", _dgrad_infer, _dgrad_reference, _dgrad_form, 1),
    _op("CONV_WGRAD", ("DY", "X"), "DW", _wgrad_infer, _wgrad_reference, _wgrad_form, 0),
)
