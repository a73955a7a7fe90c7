"""BLOCK_SCALE_QUANTIZE and BLOCK_SCALE_DEQUANTIZE: small types with one scale for every block of neighbouring elements (MXFP8: 32 and FP8_E8M0,
NVFP4: 16 and FP8_E4M3; any block that divides the extent, any float type of the scale).

Quantize, of a block along one axis: scale = max |x| / largest value of Y's type, rounded to the scale's type (upward for FP8_E8M0, so that nothing
saturates), y = x / scale rounded to Y's type; 0 where the scale is 0. Both are calculated over the view [..., blocks, block, ...] of X, so that one
kernel reads X once. Dequantize: y = x * scale, element i of an axis with scale i // block, so that the last block need not be full; the scale is
read through a window that stands still within a block, so that it is fused into what reads Y.

Scales in the order F8_128x4 (tiles of 128 x 4 scales, 512 bytes each): element (r, c) of a tile is at (r % 32) * 16 + r // 32 * 4 + c; tiles are
row-major; c runs along the block-scaled axis, r along the other one of the last two; dims are padded to multiples of 128 and 4. A virtual tensor of
scales has no bytes that could be in an order: the values are the same, with the padded dims.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphdnn.dtypes import data_type, info
from graphdnn.errors import NotSupportedError, ValidationError, explain
from graphdnn.ir import layout
from graphdnn.ir.extent import plain
from graphdnn.ir.node import Node, NodeDecl
from graphdnn.ir.tensor import Dims, Placement, TensorDecl
from graphdnn.opspecs import shapes
from graphdnn.opspecs.expansion import Expansion
from graphdnn.opspecs.rounding import round_to
from graphdnn.opspecs.scalars import Array
from graphdnn.opspecs.spec import OpSpec
from graphdnn.opspecs.window import Slide, windowed

TILE_ROWS, TILE_COLUMNS = 128, 4
REORDERED = "F8_128x4"
UPWARD = {data_type.FLOAT: 1.5 - 2.0**-23, data_type.DOUBLE: 1.5 - 2.0**-52}
"""By compute type, the largest number below 1.5. Rounding x times this to the nearest power of two, 1.5 * 2**k upward, is rounding x up: 2**k times
it is below 1.5 * 2**k, and the next number above 2**k times it is not."""


# ---------------------------------------------------------------------------------------------------------------------------------------- shapes
def _up(extent: int, multiple: int) -> int:
    return -(-extent // multiple) * multiple


def _whole(node: NodeDecl, what: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ValidationError(explain(f"{what} not set or not positive", node=node.label, expected="an integer >= 1", found=value))


def _divides(node: NodeDecl, x: TensorDecl, axis: int, block: int) -> int:
    """Blocks along an axis. ValidationError where the last one would not be full: the API infers extent // block scales, none for what is left."""
    extent = shapes.dims(x)[axis]
    if extent % block:
        rule = f"the block size does not divide the extent: there are {extent} // {block} scales, and none for the last {extent % block} elements"
        expected = f"a block size that divides {extent}, the extent of axis {axis}"
        raise ValidationError(explain(rule, node=node.label, tensor=x.name, expected=expected, found=block))
    return extent // block


def _tile_axes(node: NodeDecl, t: TensorDecl, axis: int, rank: int) -> int:
    """The axis that runs down the rows of a tile. NotSupportedError where the scaled axis is not one of the last two."""
    if rank >= 2 and axis >= rank - 2:
        return 2 * rank - 3 - axis
    rule = f"{REORDERED} scales belong to one of the last two axes"
    raise NotSupportedError(explain(rule, node=node.label, tensor=t.name, expected=f"axis {rank - 2} or {rank - 1} of {rank}", found=axis))


def _tiled(dim: Dims, stride: Dims, rows: int, columns: int) -> Placement:
    """Where scales in the order F8_128x4 are: ``dim`` is padded, ``rows`` and ``columns`` are its last two axes in either order."""
    padded = tuple(_up(d, TILE_ROWS if a == rows else TILE_COLUMNS) if a in (rows, columns) else d for a, d in enumerate(dim))
    across = padded[columns] // TILE_COLUMNS
    parts = {
        rows: ((padded[rows] // TILE_ROWS, 4, 32), (across * TILE_ROWS * TILE_COLUMNS, 4, 16)),
        columns: ((across, TILE_COLUMNS), (TILE_ROWS * TILE_COLUMNS, 1)),
    }
    pairs = [parts.get(a, ((d,), (s,))) for a, (d, s) in enumerate(zip(padded, stride, strict=True))]
    return Placement(tuple(d for part, _ in pairs for d in part), tuple(s for _, part in pairs for s in part), padded)


def _split(values: Dims, axis: int, *parts: int) -> Dims:
    return (*values[:axis], *parts, *values[axis + 1 :])


def _infer_quantize(node: NodeDecl) -> None:
    """Y like X (``transpose``: the axis fastest); one scale a block, row-major (``transpose``: the axis fastest)."""
    shapes.require(node, ("X",), ("Y", "scale"))
    x, scale = node.inputs["X"], node.outputs["scale"]
    block = _whole(node, "block_size", node.attrs.get("block_size"))
    rank = len(shapes.dims(x))
    given = node.attrs.get("axis")
    axis = node.attrs["axis"] = shapes.axis(node, "axis", rank - 1 if given is None else given, x)
    blocks, dim, transpose = _divides(node, x, axis, block), shapes.dims(x), bool(node.attrs.get("transpose"))
    order = (axis, *(a for a in range(rank - 1, -1, -1) if a != axis)) if transpose else None
    shapes.give(node, "Y", dim, lambda: layout.packed(dim, order) if transpose else shapes.strides(x))
    counts = _split(dim, axis, blocks)
    if scale.reordering == REORDERED:
        rows = _tile_axes(node, scale, axis, rank)
        full = _tiled(counts, layout.packed(counts), rows, axis).padded
        wanted = counts if scale.dim is not None and tuple(scale.dim) == counts else full
        shapes.give(node, "scale", wanted, lambda: layout.packed(full, order))
        scale.placement = None if scale.virtual else _tiled(wanted, tuple(scale.stride or ()), rows, axis)
    else:
        shapes.give(node, "scale", counts, lambda: layout.packed(counts, order))


def _infer_dequantize(node: NodeDecl) -> None:
    """Y like X; ``block_size`` becomes one entry a dim."""
    shapes.require(node, ("X", "scale"), ("Y",))
    x, scale = node.inputs["X"], node.inputs["scale"]
    dim, counts = shapes.dims(x), shapes.dims(scale)
    given = node.attrs.get("block_size")
    sizes = tuple(_whole(node, "block_size", b) for b in (given if isinstance(given, list | tuple) else (given,)))
    if len(counts) != len(dim) or not sizes or len(sizes) > len(dim):
        rule, expected = "descale and block_size follow the dims of the input", f"a descale of rank {len(dim)}, at most {len(dim)} block sizes"
        found = f"a descale of rank {len(counts)}, block_size {list(sizes)}"
        raise ValidationError(explain(rule, node=node.label, tensor=scale.name, expected=expected, found=found))
    blocks = _aligned(dim, counts, sizes)
    for a, b in enumerate(blocks):
        wanted = -(-dim[a] // b)
        multiple = 1 if scale.reordering != REORDERED else TILE_COLUMNS if b > 1 else TILE_ROWS
        if counts[a] != wanted and (a < len(dim) - 2 or counts[a] != _up(wanted, multiple)):
            rule, found = f"the descale does not fit the input along axis {a}", f"{counts[a]} scales"
            expected = f"{wanted} scales for {dim[a]} elements in blocks of {b}"
            raise ValidationError(explain(rule, node=node.label, tensor=scale.name, expected=expected, found=found))
    node.attrs["block_size"] = blocks
    if scale.reordering == REORDERED and not scale.virtual:
        columns = max((a for a, b in enumerate(blocks) if b > 1), default=len(dim) - 1)
        scale.placement = _tiled(counts, shapes.strides(scale), _tile_axes(node, scale, columns, len(dim)), columns)
    shapes.give(node, "Y", dim, lambda: shapes.strides(x))


def _aligned(dim: Dims, counts: Dims, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Block sizes right-aligned to the dims; a single one goes to the last axis along which there are fewer scales than elements."""
    if len(sizes) > 1 or len(dim) == 1:
        return (1,) * (len(dim) - len(sizes)) + sizes
    needs = [-(-d // sizes[0]) for d in dim]
    fits = [a for a, (n, c) in enumerate(zip(needs, counts, strict=True)) if c in (n, _up(n, TILE_COLUMNS))]
    fewer = [a for a in fits if counts[a] < dim[a]] or [len(dim) - 1]
    return tuple(sizes[0] if a == fewer[-1] else 1 for a in range(len(dim)))


# ----------------------------------------------------------------------------------------------------------------------------------------- types
def _plain(node: NodeDecl, scale: TensorDecl) -> None:
    """Dims and strides describe every tensor; the scales may be reordered."""
    before = scale.reordering
    if before == REORDERED and not scale.virtual:
        if info(scale.dtype).bits != 8:
            rule = f"{REORDERED} is an order of bytes"
            raise NotSupportedError(explain(rule, node=node.label, tensor=scale.name, expected="an 8-bit scale", found=scale.dtype.name))
        scale.reordering = "NONE"
    try:
        shapes.check_plain(node)
    finally:
        scale.reordering = before


def _check_scale(node: NodeDecl, scale: TensorDecl) -> None:
    _plain(node, scale)
    if info(scale.dtype).kind != "f" or info(scale.dtype).bits < 8:
        raise ValidationError(
            explain("a scale is a float", node=node.label, tensor=scale.name, expected="FP8_E8M0, FP8_E4M3, FLOAT, ...", found=scale.dtype.name)
        )


def _check_quantize(node: NodeDecl) -> None:
    y = node.outputs["Y"]
    _check_scale(node, node.outputs["scale"])
    if info(y.dtype).bits > 8 or y.dtype in (data_type.FP8_E8M0, data_type.BOOLEAN, data_type.UINT8):
        expected = "FP8_E4M3, FP8_E5M2, FP4_E2M1, INT8 or INT4"
        fix = "set_data_type on the first result"
        raise ValidationError(
            explain("a quantized tensor has a small type", node=node.label, tensor=y.name, expected=expected, found=y.dtype.name, fix=fix)
        )


def _check_dequantize(node: NodeDecl) -> None:
    _check_scale(node, node.inputs["scale"])


# ------------------------------------------------------------------------------------------------------------------------------------- expansion
def _expand_quantize(e: Expansion) -> None:
    x, y, scale = e.input("X"), e.output("Y"), e.output("scale")
    assert y is not None and scale is not None, "both are outputs"
    axis, block, dim = e.node.attrs["axis"], e.node.attrs["block_size"], shapes.dims(x)
    blocked = e.reshape(x, _split(dim, axis, dim[axis] // block, block))
    rank = len(dim) + 1
    value = e.reduction("AMAX", blocked, (axis + 1,))
    if scale.dtype is data_type.FP8_E8M0:
        value = e.pointwise("DIV", value, e.constant(info(y.dtype).limits[1], rank))
        value = e.pointwise("MUL", value, e.constant(UPWARD[e.compute], rank), dtype=scale.dtype)
        result = e.pointwise("DIV", blocked, value, dtype=y.dtype)
    else:
        value = e.pointwise("DIV", value, e.constant(info(y.dtype).limits[1], rank), dtype=scale.dtype)
        result = e.pointwise("BINARY_SELECT", e.pointwise("DIV", blocked, value), e.constant(0, rank), value, dtype=y.dtype)
    e.deliver("Y", result)
    e.deliver("scale", value, _split(dim, axis, dim[axis] // block))


def _expand_dequantize(e: Expansion) -> None:
    x, scale, blocks = e.input("X"), e.input("scale"), e.node.attrs["block_size"]
    dim = shapes.dims(x)
    counts = tuple(-(-d // b) for d, b in zip(dim, blocks, strict=True))
    if plain(counts) != plain(shapes.dims(scale)):
        scale = e.slice(scale, [(0, c) for c in counts])
    first = next((a for a, b in enumerate(blocks) if b > 1), len(dim))
    if first < len(dim):
        scale = windowed(e, scale, [Slide(d, 1, 1, 0, 0, b) for d, b in zip(dim[first:], blocks[first:], strict=True)], dtype=scale.dtype)
        scale = e.reshape(scale, dim)
    e.deliver("Y", e.pointwise("DIV" if e.node.attrs.get("is_negative_scale") else "MUL", x, scale))


# ------------------------------------------------------------------------------------------------------------------------------------ references
def _arranged(logical: Array, dim: Dims, columns: int) -> Array:
    """Scales [..., n, m] padded with zeros and cut into tiles: the array whose dims a reordered tensor is placed with."""
    last = logical.ndim - 1
    fill = [(0, _up(d, (TILE_ROWS, TILE_COLUMNS)[a == columns]) - d) if a >= last - 1 else (0, 0) for a, d in enumerate(logical.shape)]
    return np.pad(logical, fill).reshape(dim)


def _quantize(node: Node, dims: list[Dims], arrays: list[Any], types: list[data_type]) -> list[Any]:
    x, axis, block = arrays[0], node.attr("axis"), node.attr("block_size")
    kinds, wanted = dict(zip([p for p, _ in node.outputs], types, strict=True)), dict(zip([p for p, _ in node.outputs], dims, strict=True))
    largest = float(info(kinds["Y"]).limits[1])
    rows = np.moveaxis(x, axis, -1)
    rows = rows.reshape(*rows.shape[:-1], rows.shape[-1] // block, block)
    with np.errstate(all="ignore"):
        ideal = np.max(np.abs(rows), axis=-1, initial=0.0) / largest
        if kinds["scale"] is data_type.FP8_E8M0:
            fraction, exponent = np.frexp(ideal)
            up = np.ldexp(1.0, np.clip(np.where(fraction == 0.5, exponent - 1, exponent), -127, 127))
            ideal = np.where(ideal < 2.0**-127, 2.0**-127, np.where(np.isfinite(ideal), up, ideal))
        scale = round_to(ideal, kinds["scale"])
        y = np.where(scale[..., None] == 0, 0.0, rows / scale[..., None])
    counts = np.moveaxis(scale, -1, axis)
    if counts.size != math.prod(wanted["scale"]):
        counts = _arranged(counts, wanted["scale"], axis)
    found = {"Y": np.moveaxis(y.reshape(*y.shape[:-2], x.shape[axis]), -1, axis).reshape(wanted["Y"]), "scale": counts.reshape(wanted["scale"])}
    return [found[p] for p, _ in node.outputs]


def _dequantize(node: Node, dims: list[Dims], arrays: list[Any]) -> list[Any]:
    x, scale = arrays
    blocks = node.attr("block_size")
    spread = scale
    for a, b in enumerate(blocks):
        spread = np.take(spread, np.arange(x.shape[a]) // b, axis=a)
    with np.errstate(all="ignore"):
        return [x / spread if node.attr("is_negative_scale") else x * spread]


SPECS = (
    OpSpec(
        tag="BLOCK_SCALE_QUANTIZE",
        role="composite",
        inputs=("X",),
        outputs=("Y", "scale"),
        attrs=("block_size", "axis", "transpose"),
        domain="float",
        infer=_infer_quantize,
        check=_check_quantize,
        reference=_quantize,
        typed=True,
        expand=_expand_quantize,
    ),
    OpSpec(
        tag="BLOCK_SCALE_DEQUANTIZE",
        role="composite",
        inputs=("X", "scale"),
        outputs=("Y",),
        attrs=("block_size", "is_negative_scale"),
        domain="float",
        infer=_infer_dequantize,
        check=_check_dequantize,
        reference=_dequantize,
        expand=_expand_dequantize,
    ),
)
