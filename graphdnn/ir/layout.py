"""Strides: packed layouts by name or by order."""

from __future__ import annotations

from collections.abc import Sequence

from graphdnn.errors import ValidationError, explain
from graphdnn.ir.tensor import Dims


def packed(dim: Sequence[int], order: Sequence[int] | None = None) -> Dims:
    """Packed strides. ``order`` lists the dims from fastest to slowest; default row-major (last dim fastest).

    Extents of 0 count as 1, so that the strides of an empty tensor are those of its shape with ones.
    """
    axes = range(len(dim) - 1, -1, -1) if order is None else order
    stride, step = [0] * len(dim), 1
    for a in axes:
        stride[a] = step
        step = step * (dim[a] or 1)
    return tuple(stride)


def channels_last_order(rank: int) -> tuple[int, ...]:
    """Dims from fastest to slowest in the NHWC order of the API page: dim 1, then the last dim down to dim 2, then dim 0."""
    return tuple(range(rank))[::-1] if rank < 2 else (1, *range(rank - 1, 1, -1), 0)


def like(dim: Sequence[int], stride_of: Sequence[int]) -> Dims:
    """Packed strides of ``dim`` in the order of the strides ``stride_of``; on ties the earlier dim is faster."""
    return packed(dim, sorted(range(len(dim)), key=lambda a: (stride_of[a], a)))


def by_name(dim: Sequence[int], layout: str | Sequence[int]) -> Dims:
    """Strides for ``layout``: "row" (last dim fastest), "column" (last two dims swapped), "channels_last", or an order fastest first."""
    rank = len(dim)
    if not isinstance(layout, str):
        order = tuple(layout)
        if sorted(order) != list(range(rank)):
            raise ValidationError(
                explain("layout order must name every dim once, fastest first", expected=f"a permutation of 0..{rank - 1}", found=order)
            )
        return packed(dim, order)
    name = layout.lower()
    if name in ("row", "row_major", "contiguous", "nchw"):
        return packed(dim)
    if name in ("channels_last", "nhwc"):
        return packed(dim, channels_last_order(rank))
    if name in ("column", "column_major") and rank >= 2:
        return packed(dim, (rank - 2, rank - 1, *range(rank - 3, -1, -1)))
    raise ValidationError(explain("unknown layout", expected="'row', 'column' (rank >= 2), 'channels_last' or an order of dims", found=repr(layout)))
