"""Attention by its formulas, in float64, with the whole matrix of scores: what kernels are compared with. Knows nothing of how they go about it.

Forward: scores S = scale * Q K^T + bias + slope * (column - row), modified, -inf where a mask hides them; m = max S (and sink), e = exp(S - m),
l = sum e + exp(sink - m); O = drop(e) V / l, Stats = m + log l. A row without scores: O = 0, Stats = -inf.
Backward (Dao, "FlashAttention-2", 2023, section 3.1): P = exp(S - Stats), D = sum dO * O, dP = drop(dO V^T), dS = P * (dP - D).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphdnn.ir.node import Node
from graphdnn.ir.tensor import Dims
from graphdnn.opspecs import formula, score_steps
from graphdnn.opspecs.attention_parts import INTEGERS, SCORE_PORTS, Problem, Steps, slopes
from graphdnn.opspecs.formula import Arrays
from graphdnn.opspecs.pointwise import POINTWISE
from graphdnn.opspecs.scalars import Array
from graphdnn.opspecs.score_grad import gradient_steps


def number(a: Arrays, port: str, default: float = 1.0) -> float:
    """The one element at ``port``."""
    return float(a[port].reshape(())) if port in a else default


def scale_of(a: Arrays, attrs: dict[str, Any]) -> float:
    """Factor of the products: a tensor, an attribute, or 1."""
    given = attrs.get("attn_scale_value")
    return number(a, "Attn_scale", 1.0 if given is None else float(given))


def modified(steps: Steps, names: Arrays, tensors: Arrays, node: Node) -> Array:
    """Result of a score_mod. ``names``: what its references "S" and "P" mean; ``tensors``: arrays by port."""
    made: list[Array] = []
    shape = names["S"].shape

    def operand(x: Any) -> Array:
        return score_steps.meaning(
            x, lambda n: np.broadcast_to(np.float64(n), shape), made, lambda port: np.broadcast_to(tensors[port], shape), names
        )

    for mode, inputs, attrs in steps:
        row = POINTWISE[mode]
        found = row.reference(*(operand(x) for x in inputs), **row.values(dict(attrs), node.compute))
        made.append(np.asarray(found, np.float64))
    return made[-1] if made else names["S"]


class Scores:
    """Scores before ("raw") and after ("final") score_mod, and the operands that made them, padding zeroed."""

    def __init__(self, a: Arrays, node: Node) -> None:
        attrs = dict(node.attrs)
        self.problem = p = Problem.of(attrs, a)
        self.q = np.where(p.rows, a["Q"], 0.0)
        self.k, self.v = (p.all_heads(np.where(p.cols, p.rows_of(port, a[port]), 0.0)) for port in ("K", "V"))
        self.scale = scale_of(a, attrs) * number(a, "Descale_Q") * number(a, "Descale_K")
        raw = np.einsum("bhid,bhjd->bhij", self.q, self.k) * self.scale
        if "Bias" in a:
            raw = raw + a["Bias"]
        if attrs.get("alibi_mask"):
            raw = raw + slopes(p.sizes.h_q).reshape(1, -1, 1, 1) * p.distance()
        self.raw, self.tensors = raw, {t: a[t] for t in SCORE_PORTS if t in a}
        steps = attrs.get("score_mod")
        self.final = modified(steps, {"S": raw}, self.tensors, node) if steps else raw


def selected(keep: Array, weights: Array, x: Array) -> Array:
    """weights @ x, of which only the terms count that ``keep`` marks: what is masked may be NaN."""
    finite = np.isfinite(x)
    found = np.asarray(np.matmul(weights, np.where(finite, x, 0.0)))
    for d in np.flatnonzero(~np.all(finite, axis=(0, 1, 2))):
        found[..., d] = np.sum(np.where(keep, weights * x[..., None, :, d], 0.0), axis=-1)
    return found


def _swap(x: Array) -> Array:
    return np.swapaxes(x, -1, -2)


def forward_formula(a: Arrays, dims: dict[str, Dims], node: Node) -> Arrays:
    """Outputs of SDPA by port."""
    scores = Scores(a, node)
    p = scores.problem
    s = np.where(p.keep, scores.final, -np.inf)
    m = np.max(s, axis=-1, keepdims=True, initial=-np.inf)
    sink = np.where(p.rows, a["SINK_TOKEN"], -np.inf) if "SINK_TOKEN" in a else np.full_like(m, -np.inf)
    m = np.maximum(m, sink)
    shift = np.where(np.isneginf(m), 0.0, m)
    e = np.where(p.keep, np.exp(s - shift), 0.0)
    total = np.sum(e, axis=-1, keepdims=True) + np.exp(sink - shift)
    dropped = e if p.dropout() is None else e * p.dropout()
    o = np.where(total == 0, 0.0, selected(p.keep, dropped, scores.v) / total)
    found = {"O": o, "Stats": m + np.log(total), "Max": m, "Sum_exp": total}
    if "RNG_DUMP" in dims:
        found["RNG_DUMP"] = p.drawn()
    return found


def backward_formula(a: Arrays, dims: dict[str, Dims], node: Node) -> Arrays:
    """Outputs of SDPA_BWD by port."""
    scores = Scores(a, node)
    p = scores.problem
    stats, o, do = (np.where(p.rows, a[port], 0.0) for port in ("Stats", "O", "dO"))
    lost = np.isneginf(stats)
    weights = np.where(p.keep & ~lost, np.exp(scores.final - np.where(lost, 0.0, stats)), 0.0)
    factor = 1.0 if p.dropout() is None else p.dropout()
    q, k, do_rows, do_16 = _copies(a, scores, do)
    d = np.sum(do_16 * o, axis=-1, keepdims=True)
    dp = np.einsum("bhid,bhjd->bhij", do, scores.v) * factor
    ds = np.where(p.keep, weights * (dp - d), 0.0)
    steps = gradient_steps(node.attrs)
    if steps:
        ds = np.where(p.keep, modified(steps, {"S": ds, "P": scores.raw}, scores.tensors, node), 0.0)
    keep, turned = _swap(p.keep), _swap(ds)
    found = {
        "dQ": scores.scale * selected(p.keep, ds, k),
        "dK": p.sum_of_groups(scores.scale * selected(keep, turned, q), p.sizes.h_k),
        "dV": p.sum_of_groups(selected(keep, _swap(weights * factor), do_rows), p.sizes.h_v),
        "dS_max": np.max(np.abs(ds), axis=-1, keepdims=True, initial=0.0),
    }
    if "dBias" in dims:
        found["dBias"] = _summed(ds, dims["dBias"])
    if "RNG_DUMP" in dims:
        found["RNG_DUMP"] = p.drawn()
    if "DSINK_TOKEN" in dims:
        share = np.where(p.rows & ~lost, np.exp(a["SINK_TOKEN"] - np.where(lost, 0.0, stats)), 0.0)
        found["DSINK_TOKEN"] = -np.sum(share * d, axis=(0, 2, 3))
    return found


def _copies(a: Arrays, scores: Scores, do: Array) -> tuple[Array, Array, Array, Array]:
    """Q, K and dO as the products over rows have them, and dO as D has it; MXFP8 gives these numbers of their own."""
    p = scores.problem
    q, rows, exact = (np.where(p.rows, a[port], 0.0) if port in a else other for port, other in (("Q_T", scores.q), ("dO_T", do), ("dO_f16", do)))
    k = p.all_heads(np.where(p.cols, a["K_T"], 0.0)) if "K_T" in a else scores.k
    return q, k, rows, exact


def _summed(x: Array, dim: Dims) -> Array:
    """``x`` added up over the axes where ``dim`` has extent 1 or none."""
    wide = (1,) * (x.ndim - len(dim)) + tuple(dim)
    return np.asarray(np.sum(x, axis=tuple(i for i, n in enumerate(wide) if n == 1), keepdims=True).reshape(dim))


forward, backward = (formula.reference(f, INTEGERS) for f in (forward_formula, backward_formula))
