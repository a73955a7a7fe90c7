"""How far a convolution by tiles (fast_conv.py) may be from the plain sum.

Every number that a kernel rounds on its way is a sum of products of magnitudes; each rounding multiplies one of them by 1 + d, |d| <= u
(Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1). With n roundings behind any one term the result errs by at most
n u / (1 - n u) times the sum of all magnitudes. Winograd: |A^T| [(|G| |g|) * (|B^T| |d|)]. The roundings of a row of k terms are at most k + 1 (each
coefficient, its product, k - 1 sums), taken twice (two dims); then one product and C - 1 sums. Fourier: the moduli of all partial transforms are at
most the sum of the moduli of their inputs, so the magnitude is sum |d| times sum |g| over a tile. A butterfly multiplies by a rounded root of unity
(an error of 1 u for the root, at most sqrt(5) u for the product: Brent, Percival & Zimmermann, 2007) and adds (1 u): under 5 roundings, log2(size)
times for each dim and each of the three transforms; the product of 2 C real terms, in real and imaginary part, at most 4 C + 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from graphdnn.ir.tensor import Dims
from graphdnn.opspecs.fast_conv import FastConv, winograd
from graphdnn.opspecs.folds import growth
from graphdnn.opspecs.rounding import Array
from graphdnn.opspecs.spans import Arithmetic, Span, anything

if TYPE_CHECKING:
    from graphdnn.opspecs.fast_conv import Rows


def widened(found: Span, how: FastConv, taps: Dims, operands: Callable[[Dims], tuple[Array, Array]], arithmetic: Arithmetic) -> Span:
    """The span of a convolution, with what tiles lose more. ``found``: of the plain sum, (N, K, P, Q). ``operands(outputs)``: largest magnitudes of
    the elements of the image that so many outputs meet, padding included, (N, groups, C, outputs + taps - 1 ...), and of the filter in the order in
    which it meets them, (groups, K, C, R, S). Where a tile has an element that is not finite, or a magnitude that may leave the range, nothing is
    known of its outputs."""
    out = found.lo.shape[2:]
    step = tuple(how.size - r + 1 for r in taps)
    image, weight = operands(tuple(-(-p // s) * s for p, s in zip(out, step, strict=True)))
    windows = np.lib.stride_tricks.sliding_window_view(image, (how.size, how.size), axis=(3, 4))[..., :: step[0], :: step[1], :, :]
    with np.errstate(all="ignore"):
        size, steps = (_fourier if how.kind == "fft" else _winograd)(how.size, windows, weight)
        slack = growth(steps, arithmetic.unit) * size
        largest = [np.max(np.where(np.isfinite(x), x, 0.0), initial=1.0) for x in (windows, weight)]
        lost = ~(size <= arithmetic.top) | (max(largest) * how.size**4 > arithmetic.top)
        slack = slack + steps * arithmetic.tiny * how.size**6 * weight.shape[2] * sum(largest)
    slack, lost = (_untiled(x, out, found.lo.shape) for x in (slack, lost))
    unknown = anything(found.lo.shape)
    with np.errstate(all="ignore"):
        lo, hi = np.where(lost, unknown.lo, found.lo - slack), np.where(lost, unknown.hi, found.hi + slack)
    return Span(lo, hi, np.where(lost, True, found.nan))


def _untiled(x: Array, out: Dims, dim: Dims) -> Array:
    """(N, groups, K, tiles, tiles, outputs, outputs) as (N, groups * K, P, Q)."""
    moved = np.moveaxis(x, 5, 4)
    n, g, k, t, a, u, b = moved.shape
    return moved.reshape(n, g * k, t * a, u * b)[..., : out[0], : out[1]].reshape(dim)


def _magnitudes(rows: Rows) -> Array:
    return np.array([[abs(float(v)) for v in row] for row in rows])


def _terms(rows: Rows) -> int:
    return max(sum(v != 0 for v in row) for row in rows) + 1


def _winograd(size: int, windows: Array, weight: Array) -> tuple[Array, int]:
    first, second = (winograd(size, r) for r in weight.shape[3:])
    g = np.einsum("ar,bs,gkcrs->gkcab", _magnitudes(first.filter), _magnitudes(second.filter), weight)
    d = np.einsum("ai,bj,ngctuij->ngctuab", _magnitudes(first.input), _magnitudes(second.input), windows)
    m = np.einsum("gkcab,ngctuab->ngktuab", g, d)
    total = np.einsum("pa,qb,ngktuab->ngktupq", _magnitudes(first.output), _magnitudes(second.output), m)
    steps = sum(_terms(rows) for w in (first, second) for rows in (w.filter, w.input, w.output)) + 1 + weight.shape[2]
    return total, steps


def _fourier(size: int, windows: Array, weight: Array) -> tuple[Array, int]:
    total = np.einsum("gkc,ngctu->ngktu", weight.sum(axis=(3, 4)), windows.sum(axis=(5, 6)))
    outputs = tuple(size - r + 1 for r in weight.shape[3:])
    steps = 5 * 6 * (size.bit_length() - 1) + 4 * weight.shape[2] + 4
    return np.broadcast_to(total[..., None, None], (*total.shape, *outputs)), steps


def magnitude(x: Span) -> Array:
    """Largest magnitude of each element; inf where it may be infinite or NaN."""
    with np.errstate(all="ignore"):
        found: Any = np.maximum(np.abs(x.lo), np.abs(x.hi))
    return np.where(x.nan | np.isnan(found), np.inf, found)
