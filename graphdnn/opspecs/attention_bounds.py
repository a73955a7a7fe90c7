"""How far a correct attention kernel may be from the float64 reference: spans of its results (:mod:`graphdnn.opspecs.spans`).

Scores get error intervals, operation by operation. Forward: the weights of a row are w_j = exp(s_j - m) (1 + r_j); m cancels. With weights P_j that
sum to 1 and |r_j| <= R_j, O = sum P_j (1 + r_j) v_j / sum P_j (1 + r_j) differs from sum P_j v_j by at most (sum P_j R_j |v_j| + |O| sum P_j R_j) /
(1 - sum P_j R_j). R_j covers the interval of s_j, the rounding of the exponent (also of one scaled for a power of two), the exponential, and the
rescaling of an online softmax (Milakov and Gimelshein, 2018), once for every TILE columns. Backward: interval arithmetic of the formulas.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphdnn.ir.node import Node
from graphdnn.ir.tensor import Dims
from graphdnn.opspecs import folds, score_steps
from graphdnn.opspecs.attention_parts import Problem, Steps, slopes
from graphdnn.opspecs.attention_reference import Scores
from graphdnn.opspecs.evaluate import evaluate
from graphdnn.opspecs.pointwise import POINTWISE
from graphdnn.opspecs.reduction import REDUCTION
from graphdnn.opspecs.scalars import Array
from graphdnn.opspecs.score_grad import gradient_steps
from graphdnn.opspecs.spans import ULPS, Arithmetic, Span, anything, exact

TILE = 8
"""Columns that an online softmax takes at least before it rescales again."""
Spans = dict[str, Span]


def _swap(x: Array) -> Array:
    return np.swapaxes(x, -1, -2)


def _touched(keep: Array, finite: Array) -> Array:
    """Elements of a product of a matrix, of which only what ``keep`` marks counts, with one of which not all is finite, that this may reach."""
    if np.all(finite):
        return np.zeros((*keep.shape[:-1], finite.shape[-1]), bool)
    return np.asarray(np.matmul(keep.astype(np.float64), (~finite).astype(np.float64)) > 0)


def _where(kept: Array, x: Span) -> Span:
    """``x`` where ``kept``, else exactly 0."""
    return Span(np.where(kept, x.lo, 0.0), np.where(kept, x.hi, 0.0), np.asarray(x.nan & kept))


class ScoreSpans:
    """Spans of the scores of a node and of the operands that make them, padding zeroed."""

    def __init__(self, node: Node, arrays: list[Array], spans: list[Span], arithmetic: Arithmetic) -> None:
        ports = [p for p, _ in node.inputs]
        self.node, self.arithmetic = node, arithmetic
        self.arrays, self.inputs = dict(zip(ports, arrays, strict=True)), dict(zip(ports, spans, strict=True))
        self.problem = p = Problem.of(dict(node.attrs), self.arrays)
        self.q = _where(p.rows, self.inputs["Q"])
        self.k, self.v = (
            _where(p.cols, self.inputs[port].map(lambda x, port=port: p.rows_of(port, x))).map(p.all_heads)  # type: ignore[misc]
            for port in ("K", "V")
        )
        self.raw = self._raw()
        steps = node.attr("score_mod")
        self.final = self.modified(steps, {"S": self.raw}) if steps else self.raw

    def scaled(self, x: Span, *ports: str) -> Span:
        """``x`` times the numbers at those of ``ports`` that there are; "attn_scale" is the attribute."""
        for port in ports:
            if port in self.inputs:
                x = self.arithmetic.binary("*", x, self.inputs[port].map(lambda v: v.reshape((1,) * 4)))
            elif port == "attn_scale" and self.node.attr("attn_scale_value") is not None:
                x = self.arithmetic.binary("*", x, self.arithmetic.constant(self.node.attr("attn_scale_value")))
        return x

    def _raw(self) -> Span:
        a, p = self.arithmetic, self.problem
        x = self.scaled(folds.matmul(self.q, self.k.map(_swap), a), "Descale_Q", "Descale_K", "Attn_scale", "attn_scale")
        if "Bias" in self.inputs:
            x = a.binary("+", x, self.inputs["Bias"])
        if self.node.attr("alibi_mask"):
            slope = a.spread(exact(slopes(p.sizes.h_q).reshape(1, -1, 1, 1)), ULPS["pow"] + 8)  # the exponent, at most 8, is rounded too
            x = a.binary("+", x, a.binary("*", slope, exact(p.distance())))
        return x

    def modified(self, steps: Steps, names: Spans) -> Span:
        """Result of a score_mod."""
        made: list[Span] = []
        shape = self.problem.sizes.scores

        def operand(x: Any) -> Span:
            return score_steps.meaning(x, self.arithmetic.constant, made, self.inputs.__getitem__, names)

        for mode, inputs, attrs in steps:
            row, given = POINTWISE[mode], dict(attrs)
            words: dict[str, Any] = dict(zip("abc", map(operand, inputs), strict=False)) | row.values(given, self.arithmetic.compute)
            if "axis" in row.attrs:
                words["index"] = exact(row.reference(np.zeros(shape), axis=given["axis"]))
            found = evaluate(row.expression(self.arithmetic.compute), words, self.arithmetic)
            made.append(found.map(lambda v: np.broadcast_to(v, shape)))
        return made[-1] if made else names["S"]


# --------------------------------------------------------------------------------------------------------------------------------------- forward
def forward(node: Node, dims: list[Dims], arrays: list[Array], spans: list[Span], arithmetic: Arithmetic) -> list[Span]:
    """Spans of SDPA's outputs."""
    with np.errstate(all="ignore"):
        found = _Rows(node, arrays, spans, arithmetic).outputs({p for p, _ in node.outputs})
    return [found[p].map(lambda v, d=d: v.reshape(d)) for (p, _), d in zip(node.outputs, dims, strict=True)]  # type: ignore[misc]


class _Rows:
    """The softmax of every row, and how far its parts may be off."""

    def __init__(self, node: Node, arrays: list[Array], spans: list[Span], arithmetic: Arithmetic) -> None:
        self.spans = ScoreSpans(node, arrays, spans, arithmetic)
        self.arithmetic, p = arithmetic, self.spans.problem
        self.problem, unit = p, arithmetic.unit
        s = np.where(p.keep, Scores(self.spans.arrays, node).final, -np.inf)
        lo, hi = (np.where(p.keep, x, -np.inf) for x in (self.spans.final.lo, self.spans.final.hi))
        known = (lo == hi) & (lo == s)
        off = np.where(known, 0.0, np.maximum(hi - s, s - lo))
        bad = p.keep & (self.spans.final.nan | ~np.isfinite(off) | np.isposinf(s))
        self.bad = np.any(bad, axis=-1, keepdims=True)
        sink = np.where(p.rows, self.spans.arrays["SINK_TOKEN"], -np.inf) if "SINK_TOKEN" in self.spans.arrays else -np.inf
        self.lowest, self.m, self.highest = (np.maximum(np.max(x, axis=-1, keepdims=True, initial=-np.inf), sink) for x in (lo, s, hi))
        shift = np.where(np.isneginf(self.m), 0.0, self.m)
        weights = np.where(p.keep, np.exp(s - shift), 0.0)
        self.total = np.sum(weights, axis=-1, keepdims=True) + np.exp(sink - shift)
        self.share = np.where(self.total == 0, 0.0, weights / self.total)
        size = np.where(np.isfinite(s), np.abs(s), 0.0)
        rescales = -(-p.sizes.s_kv // TILE)
        reach = np.maximum(np.max(size, axis=-1, keepdims=True, initial=0.0), np.abs(shift))
        per_exp = (2 * ULPS["exp"] + 2) * unit
        self.off = np.expm1(off + 2 * unit * (size + np.abs(shift)) + per_exp + rescales * (4 * unit * reach + per_exp))
        self.summing = folds.growth(p.sizes.s_kv + rescales + 2, unit) + (p.sizes.s_kv + 16) * 2.0**-53
        self.spread = np.sum(self.share * self.off, axis=-1, keepdims=True) + self.summing

    def outputs(self, ports: set[str]) -> Spans:
        """Spans by port."""
        unit, log = self.arithmetic.unit, np.log(self.total)
        room = np.where(self.spread < 0.5, 1 - self.spread, np.nan)
        moved = np.where(self.total == 0, 0.0, self.spread / room)
        slack = moved + 2 * unit * (ULPS["log"] * np.abs(log) + np.abs(self.m) + np.abs(self.m + log)) + self.arithmetic.normal
        away = np.where(self.highest == self.lowest, 0.0, np.maximum(self.highest - self.m, self.m - self.lowest))
        summed = self.total * np.expm1(away + moved + 8 * unit)
        found = {
            "O": self._sums(room),
            "Stats": self._around(self.m + log, slack),
            "Max": self._known(Span(self.lowest, self.highest, np.isnan(self.m))),
            "Sum_exp": self._around(self.total, np.where(self.total == 0, 0.0, summed)),
        }
        return found | ({"RNG_DUMP": exact(self.problem.drawn())} if "RNG_DUMP" in ports else {})

    def _sums(self, room: Array) -> Span:
        v, factor = self.spans.v, self.problem.dropout()
        finite = np.isfinite(v.lo) & np.isfinite(v.hi) & ~v.nan
        middle, half = np.where(finite, v.lo / 2 + v.hi / 2, 0.0), np.where(finite, v.hi / 2 - v.lo / 2, 0.0)
        size = np.abs(middle) + half
        share = self.share if factor is None else self.share * np.abs(factor)
        value = np.matmul(self.share if factor is None else self.share * factor, middle)
        kept = (share != 0).astype(np.float64)
        slack = np.matmul(share * (self.off + self.summing), size) + np.abs(value) * self.spread + np.matmul(share, half)
        slack = slack / room + 8 * self.arithmetic.unit * np.abs(value) + self.arithmetic.normal * (np.matmul(kept, size) + 1)
        empty = ~np.any(share != 0, axis=-1, keepdims=True)
        slack, value = np.where(empty, 0.0, slack), np.where(empty, 0.0, value)
        return self._around(value, np.where(_touched(self.problem.keep, finite), np.nan, slack))

    def _around(self, value: Array, slack: Array) -> Span:
        slack = np.where(np.isneginf(value), 0.0, slack)
        return self._known(self.arithmetic.spread(Span(value - slack, value + slack, np.isnan(slack)), 0.5))

    def _known(self, x: Span) -> Span:
        """``x``, but nothing is known of rows with scores that are not finite."""
        nothing, bad = anything(x.lo.shape), self.bad | x.nan | np.isnan(x.lo) | np.isnan(x.hi)
        return Span(np.where(bad, nothing.lo, x.lo), np.where(bad, nothing.hi, x.hi), np.broadcast_to(bad, x.lo.shape))


# -------------------------------------------------------------------------------------------------------------------------------------- backward
def backward(node: Node, dims: list[Dims], arrays: list[Array], spans: list[Span], arithmetic: Arithmetic) -> list[Span]:
    """Spans of SDPA_BWD's outputs."""
    wanted = {p: d for (p, _), d in zip(node.outputs, dims, strict=True)}
    with np.errstate(all="ignore"):
        found = _Gradients(node, arrays, spans, arithmetic).outputs(wanted)
    return [found[p].map(lambda v, d=d: v.reshape(d)) for p, d in wanted.items()]  # type: ignore[misc]


class _Gradients:
    """The formulas of the gradients in interval arithmetic."""

    def __init__(self, node: Node, arrays: list[Array], spans: list[Span], arithmetic: Arithmetic) -> None:
        self.node, self.spans, self.arithmetic = node, ScoreSpans(node, arrays, spans, arithmetic), arithmetic
        self.problem = p = self.spans.problem
        self.o, self.do, stats = (_where(p.rows, self.spans.inputs[port]) for port in ("O", "dO", "Stats"))
        self.lost = np.isneginf(stats.lo)
        self.stats = _where(~self.lost, stats)
        self.weights = _where(p.keep & ~self.lost, self._power(self.spans.final))
        self.d = folds.matmul(self.do.map(lambda v: v[..., None, :]), self.o.map(lambda v: v[..., :, None]), arithmetic).map(lambda v: v[..., 0])

    def _power(self, x: Span) -> Span:
        """exp(x - Stats), the exponent perhaps scaled for a power of two."""
        a = self.arithmetic
        exponent = a.binary("-", x, self.stats)
        slack = 2 * a.unit * (np.maximum(np.abs(x.lo), np.abs(x.hi)) + np.abs(self.stats.lo))
        slack = np.where(np.isfinite(slack), slack, 0.0)
        return a.call("exp", [Span(exponent.lo - slack, exponent.hi + slack, exponent.nan)])

    def _dropped(self, x: Span) -> Span:
        factor = self.problem.dropout()
        if factor is None:
            return x
        return self.arithmetic.binary("*", x, self.arithmetic.spread(self.arithmetic.constant(factor), 1.0))

    def _gradient(self) -> Span:
        """dS, after score_mod_bprop."""
        a, p = self.arithmetic, self.problem
        dp = self._dropped(folds.matmul(self.do, self.spans.v.map(_swap), a))
        ds = _where(p.keep, a.binary("*", self.weights, a.binary("-", dp, self.d)))
        steps = gradient_steps(self.node.attrs)
        return _where(p.keep, self.spans.modified(steps, {"S": ds, "P": self.spans.raw})) if steps else ds

    def _product(self, keep: Array, x: Span, y: Span) -> Span:
        """x @ y, of which what ``keep`` does not mark has no part."""
        finite = np.isfinite(y.lo) & np.isfinite(y.hi) & ~y.nan
        found, touched = folds.matmul(x, _where(finite, y), self.arithmetic), _touched(keep, finite)
        return Span(np.where(touched, -np.inf, found.lo), np.where(touched, np.inf, found.hi), found.nan | touched)

    def _of_groups(self, x: Span, rows: Span, heads: int) -> Span:
        """x^T rows, added up over the heads of Q that share one of K or V."""

        def together(v: Array) -> Array:
            return np.asarray(v.reshape(v.shape[0], heads, v.shape[1] // heads * v.shape[2], v.shape[3]))

        return self._product(_swap(together(self.problem.keep)), x.map(together).map(_swap), rows.map(together))

    def outputs(self, dims: dict[str, Dims]) -> Spans:
        """Spans by port."""
        p, a, ds = self.problem, self.arithmetic, self._gradient()
        scales = ("Attn_scale", "attn_scale")
        found = {
            "dQ": self.spans.scaled(self._product(p.keep, ds, self.spans.k), *scales),
            "dK": self.spans.scaled(self._of_groups(ds, self.spans.q, p.sizes.h_k), *scales),
            "dV": self._of_groups(self._dropped(self.weights), self.do, p.sizes.h_v),
        }
        if "dBias" in dims:
            wide = (1,) * (4 - len(dims["dBias"])) + tuple(dims["dBias"])
            found["dBias"] = folds.reduce(REDUCTION["ADD"], ds, tuple(i for i, n in enumerate(wide) if n == 1), a)
        if "dS_max" in dims:
            found["dS_max"] = folds.reduce(REDUCTION["AMAX"], ds, (3,), a)
        if "RNG_DUMP" in dims:
            found["RNG_DUMP"] = exact(p.drawn())
        if "DSINK_TOKEN" in dims:
            sink = self.spans.inputs["SINK_TOKEN"]
            share = _where(p.rows & ~self.lost, self._power(sink.map(lambda v: np.broadcast_to(v, self.d.lo.shape))))
            found["DSINK_TOKEN"] = a.negative(folds.reduce(REDUCTION["ADD"], a.binary("*", share, self.d), (0, 2, 3), a))
        return found
