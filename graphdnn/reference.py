"""Runs an operation graph in NumPy from the references of its ops: what every target is compared with.

Floats are calculated in float64, integers in the width of their compute type; every tensor's value is rounded to its data type, every node's result
to its compute type first, by the numerics contract. :func:`run` gives values; :func:`run_with_error` also how far a correct kernel may be from them,
by carrying an interval for every element through the same graph (:mod:`graphdnn.opspecs.spans`): tolerances are derived, never tuned.

Conversions between value arrays (float64, int64), data types and memory: ``round_to``, ``encode``, ``decode``, ``from_storage``, ``to_storage``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphdnn.dtypes import data_type, info
from graphdnn.errors import ValidationError, explain
from graphdnn.ir.node import Node
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.opspecs import fast_conv_bounds, folds, registry
from graphdnn.opspecs.conv import unit_steps
from graphdnn.opspecs.evaluate import evaluate
from graphdnn.opspecs.fast_conv import FastConv
from graphdnn.opspecs.pointwise import POINTWISE
from graphdnn.opspecs.reduction import REDUCTION, reduced_axes
from graphdnn.opspecs.rounding import Array, as_values, decode, encode, from_storage, round_to, to_storage
from graphdnn.opspecs.spans import Arithmetic, Span, exact, hull
from graphdnn.opspecs.spec import MatmulForm

__all__ = ["as_values", "decode", "encode", "from_storage", "mismatches", "round_to", "run", "run_with_error", "to_storage"]


def run(graph: OperationGraph, feeds: Mapping[int, Any], *, intermediates: bool = False) -> dict[int, Array]:
    """Values of the graph's outputs by tensor id (with ``intermediates``, of every tensor that a node writes): float64 or int64, representable in
    the tensor's data type, in the shape of its dims.

    ``feeds``: logical values of the inputs by tensor id, array-like (ml_dtypes arrays too) or a number; they are rounded to the tensor's data type.
    A by-value tensor or constant with a stored value needs none. ValidationError for a missing feed or one of another shape.
    """
    runner = _Runner(graph, feeds, spans=False)
    wanted = [t for n in graph.nodes for t in n.output_ids] if intermediates else graph.outputs
    return {t: runner.known[t].value for t in wanted}


def run_with_error(
    graph: OperationGraph, feeds: Mapping[int, Any], algorithms: Mapping[int, FastConv] | None = None
) -> dict[int, tuple[Array, Array]]:
    """(values, bounds) of every tensor that a node writes. A correct kernel's element differs from the value by at most the bound (float64).

    Bound 0: exactly this value, NaN where it is NaN. Bound inf: nothing can be said (an interval covers a pole, a possible NaN or overflow).
    :func:`mismatches` compares. ``algorithms``: nodes whose sums are not made product by product (``ExecutionPlan.algorithms``).
    """
    runner = _Runner(graph, feeds, spans=True, algorithms=algorithms or {})
    return {t: (runner.known[t].value, _bound(runner.known[t])) for n in graph.nodes for t in n.output_ids}


def mismatches(found: Any, value: Array, bound: Array) -> Array:
    """True where ``found`` (values, or elements of any data type) is further from ``value`` than ``bound`` allows."""
    x, v = as_values(found), np.asarray(value)
    with np.errstate(all="ignore"):
        difference = np.where(x == v, 0.0, np.abs(x.astype(np.float64) - v.astype(np.float64)))
        if x.dtype.kind == "i" and v.dtype.kind == "i":
            difference = np.where(difference == 0, (x != v) * 1.0, difference)
    same_nan = np.isnan(x) & np.isnan(v) if x.dtype.kind == "f" and v.dtype.kind == "f" else np.zeros(np.shape(v), bool)
    return np.asarray(~(np.isposinf(bound) | same_nan | (difference <= bound)))


# ----------------------------------------------------------------------------------------------------------------------------------- the runner
@dataclass(frozen=True)
class _Known:
    """A tensor's values and, if asked for, their spans."""

    value: Array
    span: Span | None

    def moved(self, f: Callable[[Array], Any]) -> _Known:
        return _Known(np.asarray(f(self.value)), self.span.map(f) if self.span else None)


def _bound(known: _Known) -> Array:
    span = known.span
    assert span is not None, "run_with_error keeps spans"
    value = known.value.astype(np.float64)
    distance = np.maximum(_distance(value, span.hi), _distance(span.lo, value))
    return np.where(span.certain_nan, 0.0, np.where(span.nan, np.inf, distance))


def _distance(low: Array, high: Array) -> Array:
    """high - low, not rounded down."""
    with np.errstate(all="ignore"):
        found = np.where(low == high, 0.0, high - low)
        inexact = np.isfinite(found) & ((low + found != high) | (high - found != low))
        return np.where(inexact, found * (1 + 2.0**-50), found)


class _Runner:
    """Walks the graph once; ``known`` holds every tensor reached."""

    def __init__(self, graph: OperationGraph, feeds: Mapping[int, Any], spans: bool, algorithms: Mapping[int, FastConv] | None = None) -> None:
        self.graph = graph
        self.algorithms = {graph.nodes[i].output_ids[0]: how for i, how in (algorithms or {}).items()}
        self.spans = spans
        self.known: dict[int, _Known] = {t: self._fed(t, feeds) for t in graph.inputs}
        for n in graph.nodes:
            for t, result in zip(n.output_ids, self._node(n), strict=True):
                self.known[t] = result

    def _fed(self, tensor: int, feeds: Mapping[int, Any]) -> _Known:
        t = self.graph.tensors[tensor]
        given = feeds.get(tensor, t.value)
        if given is None:
            raise ValidationError(explain("no value given", tensor=t.name, expected=f"feeds[{tensor}], an array of dims {list(t.dim)} or a number"))
        value = round_to(given, t.dtype)
        if value.shape not in ((), t.dim) and value.size != 1:
            raise ValidationError(explain("the value has another shape", tensor=t.name, expected=list(t.dim), found=list(value.shape)))
        value = np.broadcast_to(value if value.shape == t.dim else value.reshape(()), t.dim)
        return _Known(value, exact(value) if self.spans else None)

    def _node(self, n: Node) -> list[_Known]:
        spec = registry.spec(n.op)
        outputs = [self.graph.tensors[t] for t in n.output_ids]
        dims = [t.dim for t in outputs]
        inputs = [self.known[t] for t in n.input_ids]
        if spec.role == "movement":
            inputs = [_converted(x, outputs[0].dtype) for x in inputs]
            return [self._moved(n, dims, inputs)]
        compute = registry.carrier(n.op, dict(n.attrs), n.compute)
        kept = [port in spec.integers for port, _ in n.inputs]
        inputs = [x if whole else _converted(x, compute) for x, whole in zip(inputs, kept, strict=True)]
        types = [[t.dtype for t in outputs]] if spec.typed else []
        values = [round_to(v, compute) for v in spec.reference(n, dims, [x.value for x in inputs], *types)]
        results, own = [], spec.spans
        given = [x.span for x in inputs if x.span is not None]
        spans = own(n, dims, [x.value for x in inputs], given, Arithmetic(compute)) if own and self.spans else None
        for i, (v, t) in enumerate(zip(values, outputs, strict=True)):
            found = spans[i] if spans else self._span(n, t.dim, inputs, v, compute) if self.spans else None
            span = hull(found, v) if found else None
            results.append(_converted(_Known(v, span), t.dtype))
        return results

    def _moved(self, n: Node, dims: list[tuple[int, ...]], inputs: list[_Known]) -> _Known:
        def move(arrays: list[Array]) -> Array:
            return np.asarray(registry.spec(n.op).reference(n, dims, arrays)[0])

        value = move([x.value for x in inputs])
        spans = [x.span for x in inputs if x.span is not None]
        if not self.spans:
            return _Known(value, None)
        return _Known(value, Span(move([x.lo for x in spans]), move([x.hi for x in spans]), move([x.nan for x in spans])))

    def _span(self, n: Node, dim: tuple[int, ...], inputs: list[_Known], value: Array, compute: data_type) -> Span:
        """Where a kernel's result of ``n`` may lie, before it is rounded to the output's data type."""
        spans = [x.span for x in inputs if x.span is not None]
        found = _ANALYSES[registry.spec(n.op).role](n, dim, spans, Arithmetic(compute))
        how = self.algorithms.get(n.output_ids[0])
        if how is not None:
            taps, operands = unit_steps(n, [s.lo.shape for s in spans], dim, *(fast_conv_bounds.magnitude(s) for s in spans))
            found = fast_conv_bounds.widened(found, how, taps, operands, Arithmetic(compute))
        found = found.map(lambda v: np.broadcast_to(v, dim))
        if info(compute).kind == "f":
            return found
        certain = np.broadcast_to(_sure(n, dim, spans), dim)
        return _integers(found, compute, certain, value)


# ------------------------------------------------------------------------------------------------------------------------------------- analyses
def _pointwise(n: Node, dim: tuple[int, ...], spans: list[Span], arithmetic: Arithmetic) -> Span:
    row, attrs = POINTWISE[n.attr("mode")], dict(n.attrs)
    names: dict[str, Any] = dict(zip("abc", spans, strict=False)) | row.values(attrs, arithmetic.compute)
    if "axis" in row.attrs:
        names["index"] = exact(row.reference(np.zeros(dim), axis=attrs["axis"]))
    return evaluate(row.expression(arithmetic.compute), names, arithmetic)


def _reduction(n: Node, dim: tuple[int, ...], spans: list[Span], arithmetic: Arithmetic) -> Span:
    axes = reduced_axes(dict(n.attrs), spans[0].lo.shape, dim)
    return folds.reduce(REDUCTION[n.attr("mode")], spans[0], axes, arithmetic).map(lambda v: v.reshape(dim))


def _matmul(n: Node, dim: tuple[int, ...], spans: list[Span], arithmetic: Arithmetic) -> Span:
    form = _form(n, dim, spans)
    return folds.matmul(spans[0].map(form.left), spans[1].map(form.right), arithmetic).map(form.result)


def _form(n: Node, dim: tuple[int, ...], spans: list[Span]) -> MatmulForm:
    found = registry.spec(n.op).as_matmul
    return found(n, [s.lo.shape for s in spans], dim) if found else MatmulForm(np.asarray, np.asarray, np.asarray)


_ANALYSES: dict[str, Callable[[Node, tuple[int, ...], list[Span], Arithmetic], Span]] = {
    "pointwise": _pointwise,
    "reduction": _reduction,
    "matmul": _matmul,
}
"""Role of an op -> how its span is found."""


def _sure(n: Node, dim: tuple[int, ...], spans: list[Span]) -> Array:
    """Where every input that an integer result depends on is known, so that the result is."""
    role = registry.spec(n.op).role
    if role == "reduction":
        axes = reduced_axes(dict(n.attrs), spans[0].lo.shape, dim)
        return np.asarray(np.all(spans[0].point, axis=axes)).reshape(dim)
    if role == "matmul":
        form = _form(n, dim, spans)
        rows, columns = np.any(form.left(~spans[0].point), axis=-1), np.any(form.right(~spans[1].point), axis=-2)
        return np.asarray(form.result(~(rows[..., :, None] | columns[..., None, :])))
    known = np.ones(dim, bool)
    for s in spans:
        known = known & s.point
    return known


def _integers(found: Span, compute: data_type, certain: Array, value: Array) -> Span:
    """The span of an integer result: exact where the inputs are, else rounded to integers; all of the type's range where it may wrap."""
    lo, hi = (float(x) for x in info(compute).limits)
    low, high = np.rint(found.lo), np.rint(found.hi)
    wraps = ~((low >= lo) & (high <= hi)) | found.nan
    v = value.astype(np.float64)
    low, high = np.where(wraps, lo, low), np.where(wraps, hi, high)
    return Span(np.where(certain, v, low), np.where(certain, v, high), np.zeros(v.shape, bool))


def _converted(x: _Known, dtype: data_type) -> _Known:
    """Values and spans rounded to ``dtype``. Rounding is monotone, so the ends of an interval are rounded like values; the exceptions: wrapping
    integers, NaN that becomes an integer, BOOLEAN."""
    value = round_to(x.value, dtype)
    if x.span is None:
        return _Known(value, None)
    span, row = x.span, info(dtype)
    v = value.astype(np.float64)
    known = span.point | span.certain_nan
    lo, hi, nan = _ends(x, dtype)
    if row.kind != "f" or row.bits == 4:
        nothing = nan & ~known  # a NaN would become 0
        lo, hi, nan = np.where(nothing, np.minimum(lo, 0.0), lo), np.where(nothing, np.maximum(hi, 0.0), hi), np.zeros_like(nan)
    kept = Span(np.where(known, v, lo), np.where(known, v, hi), np.where(known, np.isnan(v), nan))
    return _Known(value, hull(kept, v))


def _ends(x: _Known, dtype: data_type) -> tuple[Array, Array, Array]:
    """Rounded ends of the intervals, and where NaN is possible."""
    span, row = x.span, info(dtype)
    assert span is not None, "called with spans"
    if row.kind == "b":
        zero = (span.lo <= 0) & (span.hi >= 0)
        never = (span.lo == 0) & (span.hi == 0) & ~span.nan
        return np.where(zero, 0.0, 1.0), np.where(never, 0.0, 1.0), np.zeros_like(span.nan)
    if x.value.dtype.kind == "i" and row.kind == "i":
        lowest, size = float(row.limits[0]), 2.0**row.bits
        wraps = np.floor((span.lo - lowest) / size) != np.floor((span.hi - lowest) / size)
        shift = np.floor((span.lo - lowest) / size) * size
        return np.where(wraps, lowest, span.lo - shift), np.where(wraps, lowest + size - 1, span.hi - shift), span.nan
    ends = (span.lo, span.hi)
    if x.value.dtype.kind == "i" and row.register == "float32":
        ends = (round_to(span.lo, data_type.FLOAT), round_to(span.hi, data_type.FLOAT))
    lo, hi = (round_to(e, dtype).astype(np.float64) for e in ends)
    lost = np.isnan(lo) | np.isnan(hi)  # FP8_E8M0 has no negative numbers
    return np.where(lost, -np.inf, lo), np.where(lost, np.inf, hi), span.nan | lost
