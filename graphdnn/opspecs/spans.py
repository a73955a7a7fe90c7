"""Error intervals: for every element, the values that a correct kernel may give.

A :class:`Span` holds bounds and whether a NaN is possible. :class:`Arithmetic` carries spans through the operations of a compute type: every
operation is evaluated at the ends of its operands' intervals and widened by its own rounding error, so errors of inputs propagate by themselves, and
where an interval straddles a jump (a comparison, floor, a pole) the result covers both sides. Nothing is tuned: a basic operation errs by half a unit
in the last place (none where all values agree exactly), a function by :data:`ULPS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphdnn.dtypes import data_type, info
from graphdnn.opspecs import scalars as s
from graphdnn.opspecs.rounding import Array, largest, round_to, smallest, unit_roundoff

ULPS = {
    "exp": 4.0, "expm1": 4.0, "log": 4.0, "log1p": 4.0, "tanh": 4.0, "erf": 4.0, "sigmoid": 4.0, "sin": 4.0, "cos": 4.0, "tan": 5.0, "pow": 8.0,
    "rsqrt": 2.0, "floormod": 0.5, "sqrt": 0.5, "philox_normal": 4.0,
}  # fmt: skip
"""Largest error of the dialect's functions in units in the last place: what the intrinsics promise and CUDA's library states, rounded up. Results
below the smallest normal number may be flushed to 0."""


@dataclass(frozen=True)
class Span:
    """``lo`` <= value <= ``hi`` (float64 arrays), or NaN where ``nan``. Where the value is certainly NaN, ``lo`` and ``hi`` are NaN."""

    lo: Array
    hi: Array
    nan: Array

    @property
    def point(self) -> Array:
        """Where every kernel must give the same number (a 0 of unknown sign is not the same)."""
        return np.asarray((self.lo == self.hi) & ~self.nan & (np.signbit(self.lo) == np.signbit(self.hi)))

    @property
    def certain_nan(self) -> Array:
        """Where every kernel must give NaN."""
        return np.isnan(self.lo)

    def map(self, f: Callable[[Array], Any]) -> Span:
        """Every array changed by ``f`` (a movement of elements)."""
        return Span(np.asarray(f(self.lo)), np.asarray(f(self.hi)), np.asarray(f(self.nan)))


@dataclass(frozen=True)
class Truth:
    """Where a condition may hold and where it may fail."""

    yes: Array
    no: Array


def exact(values: Any) -> Span:
    """The spans of known values."""
    x = np.asarray(values, dtype=np.float64)
    return Span(x, x, np.isnan(x))


def anything(shape: tuple[int, ...]) -> Span:
    """No knowledge."""
    return Span(np.full(shape, -np.inf), np.full(shape, np.inf), np.ones(shape, bool))


def hull(x: Span, values: Array) -> Span:
    """``x`` widened to cover ``values``; anything where one of the two is NaN and the other is not sure to be."""
    v = np.asarray(values, dtype=np.float64)
    off = np.isnan(v) != x.certain_nan
    return Span(np.where(off, -np.inf, np.minimum(x.lo, v)), np.where(off, np.inf, np.maximum(x.hi, v)), x.nan | off)


def _finish(lo: Array, hi: Array, nan: Array, certain: Array) -> Span:
    """NaN bounds mean: certain NaN where ``certain``, else no knowledge."""
    bad = np.isnan(lo) | np.isnan(hi)
    return Span(
        np.where(certain, np.nan, np.where(bad, -np.inf, lo)), np.where(certain, np.nan, np.where(bad, np.inf, hi)), np.asarray(nan | bad | certain)
    )


class Arithmetic:
    """The operations of a compute type (a carrier) on spans: an algebra for :func:`graphdnn.opspecs.evaluate.evaluate`.

    For integer compute types the values are treated as real numbers; the caller rounds and wraps.
    """

    def __init__(self, compute: data_type) -> None:
        """Roundoff and range of ``compute``."""
        self.compute = compute
        self.real = info(compute).kind == "f"
        self.unit = unit_roundoff(compute) if self.real else 2.0**-53
        self.digits = 24 if compute is data_type.FLOAT else 53
        self.tiny = smallest(compute) if self.real else 0.0
        self.normal = (2.0**-126 if compute is data_type.FLOAT else 2.0**-1022) if self.real else 0.0
        self.top = largest(compute) if self.real else np.inf

    # ------------------------------------------------------------------------------------------------------------------------ rounding
    def single(self, x: Any) -> Array:
        """Numbers rounded to the compute type."""
        return round_to(np.asarray(x, dtype=np.float64), self.compute) if self.real else np.asarray(x, dtype=np.float64)

    def spread(self, x: Span, ulps: float, lost: float | None = None) -> Span:
        """``x`` widened by ``ulps`` and by ``lost`` (underflow), with overflow to infinity. Bounds of 0 stay: results of 0 are exact."""
        lost = self.tiny if lost is None else lost
        with np.errstate(all="ignore"):
            lo, hi = (np.where(np.isfinite(v) & (v != 0), 2 * ulps * self.unit * np.abs(v) + lost, 0.0) for v in (x.lo, x.hi))
            lo, hi = x.lo - lo, x.hi + hi
        lo = np.where(lo > self.top, np.inf, np.where(lo < -self.top, -np.inf, lo))
        hi = np.where(hi > self.top, np.inf, np.where(hi < -self.top, -np.inf, hi))
        return Span(lo, hi, x.nan)

    def settle(self, x: Span, known: Array, value: Array) -> Span:
        """``x`` rounded, but exactly ``value`` (rounded) where ``known``."""
        wide, value = self.spread(x, 0.5), self.single(value)
        missing = known & np.isnan(value)
        return Span(np.where(known, value, wide.lo), np.where(known, value, wide.hi), np.where(known, missing, wide.nan))

    # ------------------------------------------------------------------------------------------------------------------- the algebra
    def constant(self, value: Any) -> Span:
        """``T(value)``."""
        if isinstance(value, Span):
            return value.map(lambda v: v if v.dtype == bool else self.single(v))
        return exact(self.single(value))

    def binary(self, op: str, x: Span, y: Span) -> Span:
        """x + y, x - y, x * y."""
        if op == "*":
            return self._times(x, y)
        y = self.negative(y) if op == "-" else y
        with np.errstate(all="ignore"):
            lo, hi = x.lo + y.lo, x.hi + y.hi
        opposite = ((x.hi == np.inf) & (y.lo == -np.inf)) | ((x.lo == -np.inf) & (y.hi == np.inf))
        points = x.point & y.point
        certain = x.certain_nan | y.certain_nan | (points & np.isnan(lo))
        return self.settle(_finish(lo, hi, x.nan | y.nan | opposite, certain), points & ~certain, lo)

    def _times(self, x: Span, y: Span) -> Span:
        with np.errstate(all="ignore"):
            products = [p * q for p in (x.lo, x.hi) for q in (y.lo, y.hi)]
        points = x.point & y.point
        certain = x.certain_nan | y.certain_nan | (points & np.isnan(products[0]))
        zero_times_infinity = (_has_zero(x) & _has_infinity(y)) | (_has_infinity(x) & _has_zero(y))
        clean = [np.where(np.isnan(p), 0.0, p) for p in products]
        lo, hi = np.minimum.reduce(clean), np.maximum.reduce(clean)
        wide = _finish(lo, hi, x.nan | y.nan | zero_times_infinity, certain)
        # A product that is not exact may be fused with a following addition, so only exact ones are the same everywhere.
        short = points & ~certain
        for f in (x.lo, y.lo):
            short = short & (round_to(f, data_type.FLOAT) == f)
        return self.settle(wide, short & (self.single(products[0]) == products[0]), products[0])

    def product(self, x: Span, y: Span) -> Span:
        """x * y where nothing may be fused with it: the rounded product of known numbers is known."""
        return self.settle(self._times(x, y), x.point & y.point, x.lo * y.lo)

    def negative(self, x: Span) -> Span:
        """-x."""
        return Span(-x.hi, -x.lo, x.nan)

    def compare(self, op: str, x: Span, y: Span) -> Truth:
        """Every comparison with NaN is false, but != is true."""
        nan, shape = x.nan | y.nan, np.broadcast_shapes(x.lo.shape, y.lo.shape)
        if op in ("==", "!="):
            equal = (x.lo <= y.hi) & (y.lo <= x.hi)
            same = (x.lo == x.hi) & (y.lo == y.hi) & equal
            found = Truth(np.broadcast_to(equal, shape), np.broadcast_to(~same | nan, shape))
            return found if op == "==" else self.opposite(found)
        if op in (">", ">="):
            x, y, op = y, x, op.replace(">", "<")
        may, must = (x.lo < y.hi, x.hi < y.lo) if op == "<" else (x.lo <= y.hi, x.hi <= y.lo)
        return Truth(np.broadcast_to(may, shape), np.broadcast_to(~must | nan, shape))

    def both(self, x: Truth, y: Truth) -> Truth:
        """And."""
        return Truth(x.yes & y.yes, x.no | y.no)

    def either(self, x: Truth, y: Truth) -> Truth:
        """Or."""
        return Truth(x.yes | y.yes, x.no & y.no)

    def opposite(self, x: Truth) -> Truth:
        """Not."""
        return Truth(x.no, x.yes)

    def choose(self, condition: Truth, yes: Span, no: Span) -> Span:
        """Both where the condition is open."""
        either = condition.yes & condition.no

        def pick(a: Array, b: Array, joined: Array) -> Array:
            return np.where(either, joined, np.where(condition.yes, a, b))

        lo, hi = pick(yes.lo, no.lo, np.fmin(yes.lo, no.lo)), pick(yes.hi, no.hi, np.fmax(yes.hi, no.hi))
        return Span(lo, hi, pick(yes.nan, no.nan, np.asarray(yes.nan | no.nan)))

    def call(self, name: str, args: list[Span]) -> Span:
        """A function of the dialect."""
        with np.errstate(all="ignore"):
            if name in _MONOTONE:
                return self._monotone(name, args[0])
            return _FUNCTIONS[name](self, *args)

    # ------------------------------------------------------------------------------------------------------------------- functions
    def _monotone(self, name: str, x: Span) -> Span:
        """An increasing function, on its domain lo >= ``start``."""
        function, start, least = _MONOTONE[name]
        outside = x.hi < start
        lo, hi = (function(np.where(v < start, start, v)) for v in (x.lo, x.hi))
        found = _finish(lo, hi, x.nan | (x.lo < start), x.certain_nan | outside)
        if name in ("floor", "ceil"):
            return found
        if name == "sqrt":
            return self.settle(found, x.point & ~outside, lo)
        wide = self.spread(found, ULPS[name], self.normal)
        return Span(np.maximum(wide.lo, least), wide.hi, wide.nan)

    def absolute(self, x: Span) -> Span:
        """|x|."""
        crosses = (x.lo < 0) & (x.hi > 0)
        far = np.maximum(np.abs(x.lo), np.abs(x.hi))
        return Span(np.where(crosses, 0.0, np.minimum(np.abs(x.lo), np.abs(x.hi))), far, x.nan)

    def extreme(self, x: Span, y: Span, pick: np.ufunc) -> Span:
        """Larger or smaller of two; NaN wins. Of -0 and 0 either may come out."""
        lo, hi, certain = pick(x.lo, y.lo), pick(x.hi, y.hi), x.certain_nan | y.certain_nan
        zeros = (lo == 0) & (hi == 0) & (x.lo == 0) & (y.lo == 0) & (np.signbit(x.lo) != np.signbit(y.lo))
        return Span(np.where(certain, np.nan, np.where(zeros, -0.0, lo)), np.where(certain, np.nan, np.where(zeros, 0.0, hi)), x.nan | y.nan)

    def divide(self, x: Span, y: Span) -> Span:
        """x / y. A divisor that may be 0, or is 0 of unknown sign, gives anything."""
        quotients = [p / q for p in (x.lo, x.hi) for q in (y.lo, y.hi)]
        points = x.point & y.point
        open_ = _has_zero(y) & ~points
        certain = x.certain_nan | y.certain_nan | (points & np.isnan(quotients[0]))
        lo, hi = np.minimum.reduce(quotients), np.maximum.reduce(quotients)
        wide = _finish(np.where(open_, -np.inf, lo), np.where(open_, np.inf, hi), x.nan | y.nan | open_, certain)
        return self.settle(wide, points & ~certain, quotients[0])

    def inverse_root(self, x: Span) -> Span:
        """1 / sqrt(x), in one instruction or two."""
        return self.spread(self.divide(exact(1.0), self._monotone("sqrt", x)), ULPS["rsqrt"], self.normal)

    def wave(self, x: Span, function: Callable[[Array], Array], name: str) -> Span:
        """sin and cos: as far from the middle as the argument is, at most -1..1."""
        middle = np.where(np.isfinite(x.lo) & np.isfinite(x.hi), x.lo / 2 + x.hi / 2, 0.0)
        away = np.where(np.isfinite(x.lo) & np.isfinite(x.hi), np.maximum(x.hi - middle, middle - x.lo), np.inf)
        center = function(middle)
        infinite = np.isinf(x.lo) | np.isinf(x.hi)
        certain = x.certain_nan | (x.point & infinite)
        found = _finish(np.maximum(center - away, -1.0), np.minimum(center + away, 1.0), x.nan | infinite, certain)
        return self.spread(found, ULPS[name], self.normal)

    def tangent(self, x: Span) -> Span:
        """Increasing between poles; anything where a pole is inside."""
        branch = np.floor(x.lo / np.pi + 0.5) != np.floor(x.hi / np.pi + 0.5)
        infinite = np.isinf(x.lo) | np.isinf(x.hi)
        lo, hi = np.where(branch | infinite, -np.inf, np.tan(x.lo)), np.where(branch | infinite, np.inf, np.tan(x.hi))
        return self.spread(_finish(lo, hi, x.nan | infinite, x.certain_nan | (x.point & infinite)), ULPS["tan"], self.normal)

    def modulo(self, x: Span, y: Span) -> Span:
        """x - y * floor(x / y) where the floor is sure, else all of 0..y."""
        points = x.point & y.point
        value = np.mod(x.lo, y.lo)
        certain = x.certain_nan | y.certain_nan | (points & np.isnan(value))
        quotients = [p / q for p in (x.lo, x.hi) for q in (y.lo, y.hi)]
        low, high = np.minimum.reduce(quotients), np.maximum.reduce(quotients)
        slack = 2.0**-50
        k = np.floor(low - slack * np.abs(low))
        sure = (k == np.floor(high + slack * np.abs(high))) & ~_has_zero(y) & np.isfinite(low) & np.isfinite(high)
        multiples = [k * y.lo, k * y.hi]
        lo, hi = np.minimum(0.0, y.lo), np.maximum(0.0, y.hi)
        lo = np.where(sure, np.maximum(lo, x.lo - np.maximum(*multiples)), lo)
        hi = np.where(sure, np.minimum(hi, x.hi - np.minimum(*multiples)), hi)
        lo, hi = np.where(points, value, lo), np.where(points, value, hi)
        missing = ~points & (_has_zero(y) | _has_infinity(x))
        # near a multiple the result is close to 0 or y; the error is relative to y
        found = _finish(lo, hi, x.nan | y.nan | missing, certain)
        away = np.where(points, 0.0, 2 * ULPS["floormod"] * self.unit * np.maximum(np.abs(y.lo), np.abs(y.hi)))
        return self.spread(Span(found.lo - away, found.hi + away, found.nan), ULPS["floormod"])

    def power(self, x: Span, y: Span) -> Span:
        """x ** y by its corners where x >= 0 (it is monotone in each), at known numbers, and for a known integer y; else anything."""
        corners = [np.power(p, q) for p in (x.lo, x.hi) for q in (y.lo, y.hi)]
        points = x.point & y.point
        whole = y.point & (y.lo == np.rint(y.lo)) & np.isfinite(y.lo)
        through_zero = (x.lo < 0) & (x.hi >= 0)
        usable = points | (x.lo >= 0) | (whole & ~through_zero) | (whole & (y.lo >= 0))
        lo, hi = np.minimum.reduce(corners), np.maximum.reduce(corners)
        lo = np.where(through_zero & usable & (lo > 0), 0.0, lo)
        steep = (x.lo == 0) & (x.hi > 0) & (y.lo < 0)
        lo, hi = np.where(steep & (y.hi >= 0) & (lo > 0), 0.0, lo), np.where(steep, np.inf, hi)
        certain = (x.certain_nan | y.certain_nan | (points & np.isnan(lo))) & ~((x.lo == 1) & x.point) & ~((y.lo == 0) & y.point)
        open_ = ~usable | (np.isnan(lo) & ~certain)
        found = _finish(np.where(open_, -np.inf, lo), np.where(open_, np.inf, hi), x.nan | y.nan | open_, certain)
        return self.spread(found, ULPS["pow"], self.normal)

    def unknown(self, *args: Span) -> Span:
        """No analysis: anything."""
        return anything(np.broadcast_shapes(*(a.lo.shape for a in args)))


def _has_zero(x: Span) -> Array:
    return np.asarray((x.lo <= 0) & (x.hi >= 0))


def _has_infinity(x: Span) -> Array:
    return np.isinf(x.lo) | np.isinf(x.hi)


_MONOTONE: dict[str, tuple[Callable[[Array], Array], float, float]] = {
    "exp": (np.exp, -np.inf, 0.0),
    "expm1": (np.expm1, -np.inf, -np.inf),
    "log": (np.log, 0.0, -np.inf),
    "log1p": (np.log1p, -1.0, -np.inf),
    "tanh": (np.tanh, -np.inf, -np.inf),
    "erf": (s.erf, -np.inf, -np.inf),
    "sigmoid": (s.sigmoid, -np.inf, 0.0),
    "sqrt": (np.sqrt, 0.0, 0.0),
    "floor": (np.floor, -np.inf, -np.inf),
    "ceil": (np.ceil, -np.inf, -np.inf),
}
"""Increasing functions: NumPy form, start of the domain (NaN below), smallest result that any implementation may give."""
_FUNCTIONS: dict[str, Callable[..., Span]] = {
    "abs": Arithmetic.absolute,
    "nanmax": lambda a, x, y: a.extreme(x, y, np.maximum),
    "nanmin": lambda a, x, y: a.extreme(x, y, np.minimum),
    "mul_rn": Arithmetic.product,
    "truediv": Arithmetic.divide,
    "rsqrt": Arithmetic.inverse_root,
    "sin": lambda a, x: a.wave(x, np.sin, "sin"),
    "cos": lambda a, x: a.wave(x, np.cos, "cos"),
    "tan": Arithmetic.tangent,
    "floormod": Arithmetic.modulo,
    "pow": Arithmetic.power,
    "ipow": Arithmetic.unknown,
}
