"""RESAMPLE and RESAMPLE_BPROP: pooling and interpolation of images (N, C, spatial...) of any spatial rank, and their gradients.

``mode``:

- MAXPOOL: the largest element under the window, NaN above all; padding never wins. ``Index``: its place in the window, counted row-major, the first
  of several.
- AVGPOOL_INCLUDE_PADDING, AVGPOOL_EXCLUDE_PADDING: the sum under the window over the size of the window, or over the elements inside the image.
- NEAREST: element floor(p * ratio). BILINEAR: at (p + 1/2) * ratio - 1/2, within the image; linear in every spatial dim.

``ratio``: input elements for one output element, as (numerator, denominator) for each spatial dim; for pooling the stride, whole numbers. Every mode
is a weighted sum, or a maximum, over a WINDOW; the gradients gather, so that no element is written twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from graphdnn.dtypes import data_type, info
from graphdnn.errors import ValidationError, explain
from graphdnn.ir import layout
from graphdnn.ir.node import Node, NodeDecl
from graphdnn.ir.tensor import Dims, TensorDecl
from graphdnn.opspecs import scalars as s
from graphdnn.opspecs import shapes
from graphdnn.opspecs.resample_steps import expand, expand_backward
from graphdnn.opspecs.rounding import round_to
from graphdnn.opspecs.sampling import INTERPOLATION, POOLING, Sampling, sampling
from graphdnn.opspecs.spec import OpSpec

ATTRIBUTES = ("mode", "window", "ratio", "pre_padding", "post_padding")


# ----------------------------------------------------------------------------------------------------------------------------------------- infer
def _refuse(node: NodeDecl, rule: str, expected: object, found: object, tensor: TensorDecl | None = None, fix: str | None = None) -> ValidationError:
    return ValidationError(explain(rule, node=node.label, tensor=tensor.name if tensor else None, expected=expected, found=found, fix=fix))


def _settle(node: NodeDecl, image: TensorDecl, out: TensorDecl) -> Sampling:
    """The attributes, complete: defaults filled in, everything checked. ``out``: the small end of a pooling, the result of an interpolation."""
    mode, spatial = node.attrs.get("mode"), len(shapes.dims(image)) - 2
    if mode not in POOLING + INTERPOLATION:
        raise _refuse(node, "resample mode not known", ", ".join(POOLING + INTERPOLATION), mode)
    if spatial < 1:
        raise _refuse(node, "resample needs a spatial dim", "dims (N, C, spatial...)", list(shapes.dims(image)), image)
    if any(n < 1 for n in shapes.dims(image)[2:]):
        raise _refuse(node, "resample needs elements in every spatial dim", "extents >= 1", list(shapes.dims(image)), image)
    for name in ("pre_padding", "post_padding"):
        node.attrs[name] = tuple(node.attrs.get(name) or (0,) * spatial)
    settle = _settle_pooling if mode in POOLING else _settle_interpolation
    settle(node, image, out)
    for name in ("window", "ratio", "pre_padding", "post_padding"):
        if len(node.attrs[name]) != spatial:
            what = "stride" if name == "ratio" else name
            raise _refuse(node, f"{what} needs one entry for each spatial dim", f"{spatial} entries", list(node.attrs[name]))
    found = sampling(node.attrs)
    if any(n < 1 or d < 1 for n, d in found.ratio):
        raise _refuse(node, "stride must be positive", "numbers > 0", [n / d if d else n for n, d in found.ratio])
    if any(n >= 1 << 31 or d >= 1 << 31 for n, d in found.ratio):
        raise _refuse(node, "stride is out of range", "a ratio of numbers below 2**31", [f"{n}/{d}" for n, d in found.ratio])
    if found.pools:
        _check_pooling(node, found, image)
    elif any(n < 1 for n in found.outputs(shapes.dims(image)[2:])):
        raise _refuse(node, "the result of the interpolation is empty", "a stride of at most the extent", list(found.ratio), image)
    return found


def _settle_pooling(node: NodeDecl, image: TensorDecl, out: TensorDecl) -> None:
    window = tuple(node.attrs.get("window") or ())
    if not window:
        raise _refuse(node, "pooling needs a window", "window with an entry for each spatial dim", "none")
    node.attrs |= {"window": window, "ratio": tuple(node.attrs.get("ratio") or ((w, 1) for w in window))}
    if any(d != 1 for _, d in node.attrs["ratio"]):
        raise _refuse(node, "the stride of a pooling is whole", "integers", [n / d if d else n for n, d in node.attrs["ratio"]])


def _settle_interpolation(node: NodeDecl, image: TensorDecl, out: TensorDecl) -> None:
    if any(node.attrs.get("window") or ()) or any((*node.attrs["pre_padding"], *node.attrs["post_padding"])):
        raise _refuse(node, "an interpolation has neither window nor padding", "none", "window or padding")
    node.attrs["window"] = (0,) * (len(shapes.dims(image)) - 2)
    if node.attrs.get("ratio"):
        return
    if out.dim is None:
        rule, expected = "the size of the interpolation is not known", "stride=, or dims of the output"
        raise _refuse(node, rule, expected, "neither", out, "call set_dim on the output")
    if len(out.dim) == len(shapes.dims(image)) and all(n > 0 for n in out.dim[2:]):
        node.attrs["ratio"] = tuple((n // math.gcd(n, p), p // math.gcd(n, p)) for n, p in zip(shapes.dims(image)[2:], out.dim[2:], strict=True))
    else:
        raise _refuse(node, "the dims of the interpolation do not fit", f"{len(shapes.dims(image))} extents >= 1", list(out.dim), out)


def _check_pooling(node: NodeDecl, found: Sampling, image: TensorDecl) -> None:
    for a, (w, pre, post) in enumerate(zip(found.window, found.pre, found.post, strict=True)):
        padded = shapes.dims(image)[2 + a] + pre + post
        if w < 1 or w > padded:
            raise _refuse(node, f"the window does not fit in spatial dim {a}", f"1 to {padded} (the padded extent)", w, image)
        if not (0 <= pre < w and 0 <= post < w):
            raise _refuse(node, f"padding in spatial dim {a} must be smaller than the window", f"0 to {w - 1}", f"{pre} and {post}", image)


def _infer(node: NodeDecl) -> None:
    shapes.require(node, ("X",), ("Y",))
    x = node.inputs["X"]
    found = _settle(node, x, node.outputs["Y"])
    dim = (*shapes.dims(x)[:2], *found.outputs(shapes.dims(x)[2:]))
    for port in node.outputs:
        shapes.give(node, port, dim, lambda: layout.packed(dim, layout.channels_last_order(len(dim))))


def _infer_backward(node: NodeDecl) -> None:
    """DX as set by the user: several sizes of an image can give one output size."""
    shapes.require(node, ("DY",), ("DX",))
    loss, dx = node.inputs["DY"], node.outputs["DX"]
    if dx.dim is None:
        fix = "call set_dim on the output: several dims can give one output size"
        raise _refuse(node, "output dimension inferencing is not possible", "dims of DX", "none", dx, fix)
    if dx.stride is None:
        dx.stride = layout.packed(dx.dim, layout.channels_last_order(len(dx.dim)))
    found = _settle(node, dx, loss)
    dim = tuple(dx.dim)
    wanted = (*dim[:2], *found.outputs(dim[2:]))
    if wanted != shapes.dims(loss):
        rule = f"the dims set on the output are not consistent with those of '{loss.name}'"
        raise _refuse(node, rule, f"dims that resample to {list(shapes.dims(loss))}", f"{list(dim)}: they give {list(wanted)}", dx)
    if (found.mode == "MAXPOOL") != ("Index" in node.inputs):
        what = "needs the index of the forward pass" if found.mode == "MAXPOOL" else "takes no index"
        raise _refuse(node, f"the gradient of {found.mode} {what}", "index=" if found.mode == "MAXPOOL" else "none", ", ".join(node.inputs))
    if "Index" in node.inputs and shapes.dims(node.inputs["Index"]) != wanted:
        raise _refuse(node, "the index does not fit", list(wanted), list(shapes.dims(node.inputs["Index"])), node.inputs["Index"])


# ------------------------------------------------------------------------------------------------------------------------------------- reference
def _boxes(found: Sampling, image: Dims) -> Iterator[tuple[tuple[int, ...], tuple[Any, ...]]]:
    """Every output and the part of the image under its window."""
    outputs = found.outputs(image)
    for p in itertools.product(*(range(n) for n in outputs)):
        starts = [i * step - pre for i, (step, _), pre in zip(p, found.ratio, found.pre, strict=True)]
        yield p, tuple(slice(max(a, 0), min(a + w, n)) for a, w, n in zip(starts, found.window, image, strict=True))


def _places(found: Sampling, image: Dims) -> list[Any]:
    """Along each dim a matrix (outputs, elements) of interpolation weights."""
    result = []
    for n, p, (num, den) in zip(image, found.outputs(image), found.ratio, strict=True):
        at = np.arange(p)
        if found.mode == "NEAREST":
            result.append(np.arange(n) == (at * num // den)[:, None])
        else:
            place = np.clip(((2 * at + 1) * num - den) / (2 * den), 0, n - 1)
            result.append(np.maximum(0.0, 1.0 - np.abs(place[:, None] - np.arange(n))))
    return result


def _blended(x: Any, axis: int, weights: Any) -> Any:
    """Along an axis sums of elements times a row of ``weights`` each. An element of weight 0 has no part: inf * 0 would be NaN."""
    x, lines = np.moveaxis(x, axis, -1), []
    with np.errstate(all="ignore"):
        for row in weights.astype(x.dtype):
            lines.append((x[..., row != 0] * row[row != 0]).sum(axis=-1))
    return np.stack(lines, axis)


def _reference(node: Node, dims: list[Dims], arrays: list[Any]) -> list[Any]:
    found, x = sampling(dict(node.attrs)), arrays[0]
    if not found.pools:
        for a, weights in enumerate(_places(found, x.shape[2:])):
            x = _blended(x, 2 + a, weights)
        return [x]
    y, index = np.zeros(dims[0], x.dtype), np.zeros(dims[0], np.int64)
    for p, box in _boxes(found, x.shape[2:]):
        at: tuple[Any, ...] = (..., *p)
        part = x[(..., *box)]
        flat = part.reshape(*x.shape[:2], -1)
        if found.mode == "MAXPOOL":
            first = np.argmax(flat, axis=-1)
            y[at] = np.take_along_axis(flat, first[..., None], -1)[..., 0]
            place = np.unravel_index(first, part.shape[2:])
            starts = [b.start - (i * step - pre) for b, i, (step, _), pre in zip(box, p, found.ratio, found.pre, strict=True)]
            index[at] = np.ravel_multi_index([q + a for q, a in zip(place, starts, strict=True)], found.window)
        else:
            count = flat.shape[-1] if found.mode == "AVGPOOL_EXCLUDE_PADDING" else math.prod(found.window)
            y[at] = _mean(s.narrowed(flat, node.compute).sum(axis=-1, dtype=s.narrowed(flat, node.compute).dtype), count)
    return [y if port == "Y" else index for port, _ in node.outputs]


def _mean(total: Any, count: int) -> Any:
    return total / count if total.dtype.kind == "f" else s.divide(total, np.full_like(total, count))


def _reference_backward(node: Node, dims: list[Dims], arrays: list[Any]) -> list[Any]:
    found, by_port = sampling(dict(node.attrs)), {p: a for (p, _), a in zip(node.inputs, arrays, strict=True)}
    dy, image = by_port["DY"], dims[0][2:]
    if not found.pools:
        for a, weights in enumerate(_places(found, image)):
            dy = _blended(dy, 2 + a, weights.T)
        return [dy]
    dx = np.zeros(dims[0], dy.dtype)
    for p, box in _boxes(found, image):
        at: tuple[Any, ...] = (..., *p)
        under: tuple[Any, ...] = (..., *box)
        if found.mode == "MAXPOOL":
            starts = [i * step - pre for i, (step, _), pre in zip(p, found.ratio, found.pre, strict=True)]
            for n, c in np.ndindex(dims[0][:2]):
                place = np.unravel_index(int(by_port["Index"][(n, c, *p)]), found.window)
                dx[(n, c, *(q + a for q, a in zip(place, starts, strict=True)))] += dy[(n, c, *p)]
        else:
            count = math.prod(b.stop - b.start for b in box) if found.mode == "AVGPOOL_EXCLUDE_PADDING" else math.prod(found.window)
            share = round_to(_mean(dy[at], count), node.compute)  # what an output gives to each element is a value of the compute type
            dx[under] += share[(..., *(None,) * len(box))]
    return [dx]


class _Carrier:
    """Type of calculation: interpolation means something only in floats."""

    def carrier(self, compute: data_type, attrs: Mapping[str, Any]) -> data_type:
        """FLOAT for an interpolation that was to be calculated in integers."""
        return data_type.FLOAT if attrs.get("mode") == "BILINEAR" and info(compute).kind != "f" else compute


ROWS = {tag: {mode: _Carrier() for mode in POOLING + INTERPOLATION} for tag in ("RESAMPLE", "RESAMPLE_BPROP")}
SPECS = (
    OpSpec(
        "RESAMPLE",
        "composite",
        ("X",),
        ("Y", "Index"),
        _infer,
        shapes.check_plain,
        _reference,
        optional=("Index",),
        attrs=ATTRIBUTES,
        expand=expand,
    ),
    OpSpec(
        "RESAMPLE_BPROP",
        "composite",
        ("DY", "Index"),
        ("DX",),
        _infer_backward,
        shapes.check_plain,
        _reference_backward,
        optional=("Index",),
        attrs=ATTRIBUTES,
        expand=expand_backward,
    ),
)
