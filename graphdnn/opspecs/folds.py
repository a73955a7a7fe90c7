"""Error intervals of sums, products and extremes over many elements, in any order of the operations, and of matrix products."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from graphdnn.ir.tensor import Dims
from graphdnn.opspecs.evaluate import evaluate
from graphdnn.opspecs.reduction import ReductionOp
from graphdnn.opspecs.rounding import Array
from graphdnn.opspecs.spans import Arithmetic, Span, anything, exact

_REFERENCE_UNIT = 2.0**-53


def reduce(row: ReductionOp, x: Span, axes: Dims, arithmetic: Arithmetic) -> Span:
    """The span of a reduction over ``axes``, with kept dims."""
    kept = tuple(1 if a in axes else d for a, d in enumerate(x.lo.shape))
    others = tuple(a for a in range(x.lo.ndim) if a not in axes)
    count = int(np.prod([x.lo.shape[a] for a in axes], dtype=np.int64))
    rows = x.map(lambda v: np.transpose(v, (*others, *axes)).reshape((*(x.lo.shape[a] for a in others), count)))
    assert row.combine in _FOLDS, f"reduction row {row.mode}: how an error grows through '{row.combine}' needs a row in _FOLDS"
    total = _FOLDS[row.combine](evaluate(row.map, {"a": rows}, arithmetic), arithmetic)
    if count == 0:
        ends = {"lowest": -np.inf, "highest": np.inf}
        start = exact(ends[row.identity]) if row.identity in ends else evaluate(row.identity, {}, arithmetic)
        total = start.map(lambda v: np.broadcast_to(v, total.lo.shape))
    result = evaluate(row.finalize, {"x": total, "n": exact(count)}, arithmetic)
    return result.map(lambda v: v.reshape(kept))


def growth(count: int, unit: float) -> float:
    """Relative error of ``count`` roundings one after the other."""
    return count * unit / (1 - count * unit) if count * unit < 0.5 else 2 * count * unit


def quantum(x: Array) -> Array:
    """The largest power of two of which a finite number is a multiple; inf for 0, 0 for what is not finite."""
    fraction, exponent = np.frexp(np.where(np.isfinite(x), x, 0.0))
    digits = (np.abs(fraction) * 2.0**53).astype(np.int64)
    lowest = np.ldexp((digits & -digits).astype(np.float64), exponent - 53)
    return np.where(np.isfinite(x), np.where(x == 0, np.inf, lowest), 0.0)


def _sum(m: Span, arithmetic: Arithmetic) -> Span:
    """Last axis added up. Every partial sum errs relative to at most the sum of magnitudes; where all numbers are multiples of a quantum and that sum
    is short enough, every partial sum is exact."""
    count = m.lo.shape[-1]
    with np.errstate(all="ignore"):
        lo, hi = np.sum(m.lo, axis=-1), np.sum(m.hi, axis=-1)
        magnitude = np.sum(np.where(np.isfinite(m.lo) & np.isfinite(m.hi), np.maximum(np.abs(m.lo), np.abs(m.hi)), 0.0), axis=-1)
        step = np.min(quantum(m.lo), axis=-1, initial=np.inf)
        exactly = np.all(m.point & np.isfinite(m.lo), axis=-1) & (magnitude <= 2.0**arithmetic.digits * step)
        slack = (growth(max(count - 1, 0), arithmetic.unit) + (count + 16) * _REFERENCE_UNIT) * magnitude
        slack = np.where(exactly | (count <= 1), 0.0, slack)
    plus, minus = np.any(m.lo == np.inf, axis=-1), np.any(m.hi == -np.inf, axis=-1)
    certain = np.any(m.certain_nan, axis=-1) | (plus & minus)
    open_ = np.any(m.nan, axis=-1) | (np.any(m.hi == np.inf, axis=-1) & np.any(m.lo == -np.inf, axis=-1))
    with np.errstate(all="ignore"):
        over = np.sum(np.where(np.isfinite(m.hi) & (m.hi > 0), m.hi, 0.0), axis=-1) > arithmetic.top
        under = np.sum(np.where(np.isfinite(m.lo) & (m.lo < 0), m.lo, 0.0), axis=-1) < -arithmetic.top
        lo, hi = np.where(np.isfinite(lo), lo - slack, lo), np.where(np.isfinite(hi), hi + slack, hi)
    open_ = open_ | ((over | plus) & (under | minus))
    bad = np.isnan(lo) | np.isnan(hi)
    found = Span(np.where(bad | (under & ~plus), -np.inf, lo), np.where(bad | (over & ~minus), np.inf, hi), open_ | bad | certain)
    found = arithmetic.spread(found, 0.0, 0.0)
    return Span(np.where(certain, np.nan, found.lo), np.where(certain, np.nan, found.hi), found.nan)


def _product(m: Span, arithmetic: Arithmetic) -> Span:
    """Last axis multiplied. The relative error does not depend on the order, unless a partial product may leave the range."""
    count = m.lo.shape[-1]
    wide = _Exact(arithmetic)
    total = m
    while total.lo.shape[-1] > 1:
        half = total.lo.shape[-1] // 2
        joined, rest = wide.binary("*", _part(total, 0, half), _part(total, half, 2 * half)), _part(total, 2 * half, None)
        total = Span(*(np.concatenate([p, q], axis=-1) for p, q in ((joined.lo, rest.lo), (joined.hi, rest.hi), (joined.nan, rest.nan))))
    total = total.map(lambda v: v[..., 0]) if count else exact(np.ones(m.lo.shape[:-1]))
    with np.errstate(all="ignore"):
        size = np.maximum(np.abs(m.lo), np.abs(m.hi))
        least = np.where((m.lo <= 0) & (m.hi >= 0), np.where(m.point, 1.0, 0.0), np.minimum(np.abs(m.lo), np.abs(m.hi)))
        up = np.sum(np.where(np.isfinite(size) & (size > 1), np.log2(size), 0.0), axis=-1)
        down = np.sum(np.where((least < 1) & (least > 0), np.log2(least), 0.0), axis=-1)
        over = up >= np.log2(arithmetic.top) if arithmetic.real else np.zeros_like(up, bool)
        under = (down <= np.log2(arithmetic.normal) if arithmetic.real else np.zeros_like(up, bool)) | np.any(least == 0, axis=-1)
        zero = np.any(m.point & (m.lo == 0), axis=-1)
        lost = np.where(under & ~over & ~zero & ~total.certain_nan, count * arithmetic.tiny * 2.0 ** np.minimum(up, 1000.0), 0.0)
    rounded = arithmetic.spread(total, growth(max(count - 1, 0), arithmetic.unit) / (2 * arithmetic.unit))
    bad = over & ~rounded.certain_nan & ~(total.point & np.isinf(total.lo) & ~zero)
    return Span(np.where(bad, -np.inf, rounded.lo - lost), np.where(bad, np.inf, rounded.hi + lost), rounded.nan | bad)


def _part(x: Span, start: int, stop: int | None) -> Span:
    return x.map(lambda v: v[..., start:stop])


class _Exact(Arithmetic):
    """The operations of a compute type without rounding and range."""

    def __init__(self, of: Arithmetic) -> None:
        super().__init__(of.compute)
        self.unit, self.tiny, self.top, self.real = 2.0**-52, 0.0, np.inf, False


def _extreme(pick: np.ufunc, start: float) -> Callable[[Span, Arithmetic], Span]:
    def fold(m: Span, arithmetic: Arithmetic) -> Span:
        certain = np.any(m.certain_nan, axis=-1)
        lo, hi = pick.reduce(m.lo, axis=-1, initial=start), pick.reduce(m.hi, axis=-1, initial=start)
        zeros = (lo == 0) & (hi == 0) & np.any(np.signbit(m.lo) & (m.lo == 0), axis=-1) & np.any(~np.signbit(m.lo) & (m.lo == 0), axis=-1)
        return Span(np.where(zeros, -0.0, lo), np.where(zeros, 0.0, hi), np.any(m.nan, axis=-1) | certain)

    return fold


_FOLDS: dict[str, Callable[[Span, Arithmetic], Span]] = {
    "x + y": _sum,
    "x * y": _product,
    "nanmax(x, y)": _extreme(np.maximum, -np.inf),
    "nanmin(x, y)": _extreme(np.minimum, np.inf),
}
"""How a row's ``combine`` folds."""


def matmul(a: Span, b: Span, arithmetic: Arithmetic) -> Span:
    """A @ B: input errors by |A| |B|, rounding by k steps relative to |A| |B|; exact where all products are multiples of a quantum, few enough."""
    finite_a, finite_b = (np.isfinite(x.lo) & np.isfinite(x.hi) & ~x.nan for x in (a, b))
    count = a.lo.shape[-1]
    with np.errstate(all="ignore"):
        center_a, error_a = _center(a, finite_a)
        center_b, error_b = _center(b, finite_b)
        value = np.matmul(center_a, center_b)
        large_a, large_b = np.abs(center_a), np.abs(center_b)
        moved = np.matmul(large_a, error_b) + np.matmul(error_a, large_b + error_b)
        magnitude = np.matmul(large_a + error_a, large_b + error_b)
        step_a, step_b = np.min(quantum(center_a), axis=-1, initial=np.inf), np.min(quantum(center_b), axis=-2, initial=np.inf)
        step = step_a[..., :, None] * step_b[..., None, :]
        sure = ~np.any(error_a, axis=-1)[..., :, None] & ~np.any(error_b, axis=-2)[..., None, :]
        exactly = sure & (magnitude <= 2.0**arithmetic.digits * step)
        slack = (growth(count, arithmetic.unit) + (count + 16) * _REFERENCE_UNIT) * magnitude + count * arithmetic.tiny
        slack = np.where(exactly, 0.0, slack) + moved
    over = magnitude > arithmetic.top
    odd = ~np.all(finite_a, axis=-1)[..., :, None] | ~np.all(finite_b, axis=-2)[..., None, :]
    found = Span(np.where(over, -np.inf, value - slack), np.where(over, np.inf, value + slack), over)
    return _with_specials(found, odd, a, b)


def _center(x: Span, finite: Array) -> tuple[Array, Array]:
    """Middles and half widths; 0 for what is not finite."""
    lo, hi = np.where(finite, x.lo, 0.0), np.where(finite, x.hi, 0.0)
    middle = np.where(lo == hi, lo, lo / 2 + hi / 2)
    return middle, np.where(lo == hi, 0.0, np.maximum(hi - middle, middle - lo) * (1 + 2.0**-50))


def _with_specials(found: Span, odd: Array, a: Span, b: Span) -> Span:
    """Elements with infinities or NaN in their row or column: known where row and column are, else anything."""
    if not np.any(odd):
        return found
    with np.errstate(all="ignore"):
        value = np.matmul(a.lo, b.lo)
    known_a, known_b = (np.all(x.point | x.certain_nan, axis=axis) for x, axis in ((a, -1), (b, -2)))
    known = known_a[..., :, None] & known_b[..., None, :] & ~np.isfinite(value) & ~found.nan
    unknown = anything(found.lo.shape)
    lo, hi = (np.where(odd, np.where(known, value, u), f) for u, f in ((unknown.lo, found.lo), (unknown.hi, found.hi)))
    return Span(lo, hi, np.where(odd, ~known | np.isnan(value), found.nan))
