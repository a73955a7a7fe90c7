"""MOE_GROUPED_MATMUL and its weight gradient: rows of a token matrix, sorted by expert, times the weight of their expert.

Expert e has rows first_token_offset[e] up to first_token_offset[e + 1] (the last one up to the end); rows before the first offset have no expert,
and results of 0. Which rows these are: NONE, of token and of the result; GATHER, of the result, whose row i reads token row token_index[i]; SCATTER,
of token, whose row i makes result row token_index[i], or token_index[i] * top_k + token_ks[i] where token_ks is given (k-th choice of a token); rows
that no index names are 0. The gradient of a weight is token[rows of e]^T @ doutput[rows of e], 0 for an expert without rows.

Offsets and indices are read when the plan runs. A CPU reports what has no meaning as an ExecutionError, and so does a GPU with
GRAPHDNN_CHECK_VALUES=1: offsets that decrease or are out of range, an index out of range, and with SCATTER two rows for one row of the result.
Elsewhere nothing outside of a buffer is touched: an offset below its predecessor, or out of range, counts as the nearest that is not, an index out of
range as the nearest row; a row of the result that two rows name holds one of the two, and which one may differ from run to run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from graphdnn.dtypes import data_type
from graphdnn.errors import NotSupportedError, ValidationError, explain
from graphdnn.ir import layout
from graphdnn.ir.node import Node, NodeDecl
from graphdnn.ir.tensor import Dims, TensorDecl
from graphdnn.opspecs import folds, shapes
from graphdnn.opspecs import scalars as s
from graphdnn.opspecs.scalars import Array
from graphdnn.opspecs.spans import Arithmetic, Span, exact
from graphdnn.opspecs.spec import OpSpec

MODES = ("NONE", "GATHER", "SCATTER")
_INDEX_TYPES = (data_type.INT32, data_type.INT64)


# ---------------------------------------------------------------------------------------------------------------------------------------- shapes
def _matrix(node: NodeDecl, port: str, lead: int | None = 1) -> Dims:
    """Dims of a stack of matrices of ``lead`` (None: any number)."""
    t = node.inputs[port]
    dim = shapes.dims(t)
    if len(dim) != 3 or lead not in (None, dim[0]):
        expected = f"dims [{'E' if lead is None else lead}, rows, columns]"
        raise ValidationError(explain(f"{port} is not a stack of matrices", node=node.label, tensor=t.name, expected=expected, found=list(dim)))
    return dim


def _listed(node: NodeDecl, port: str, count: int | None, of: str) -> int:
    """Entries of a tensor along its one dim that is not 1; ``count``: as many as that."""
    t = node.inputs[port]
    dim = shapes.dims(t)
    found = math.prod(dim)
    if sum(d != 1 for d in dim) > 1 or count not in (None, found):
        expected = f"one entry for each of {count} {of}" if count is not None else "one dim that is not 1"
        raise ValidationError(explain(f"{port} is not one list", node=node.label, tensor=t.name, expected=expected, found=list(dim)))
    return found


def _refuse(node: NodeDecl, rule: str, expected: str, found: object) -> ValidationError:
    return ValidationError(explain(rule, node=node.label, expected=expected, found=found))


def _some(node: NodeDecl, experts: int) -> None:
    if not experts:
        raise _refuse(node, "a grouped matmul needs experts", "at least one", experts)


def _infer(node: NodeDecl) -> None:
    """[1, rows, N], row-major: rows of token, or entries of token_index with GATHER."""
    shapes.require(node, ("Token", "Weight", "FirstTokenOffset"), ("Output",))
    (_, m, k), (experts, depth, n) = _matrix(node, "Token"), _matrix(node, "Weight", None)
    mode, top_k = node.attrs.get("mode"), node.attrs.get("top_k") or 0
    has_index, has_slots = "TokenIndex" in node.inputs, "TokenKs" in node.inputs
    if mode not in MODES:
        raise _refuse(node, "moe mode not set or not known", "one of " + ", ".join(MODES), mode)
    if k != depth:
        raise _refuse(node, "K of token and weight differ", f"a weight [E, {k}, N]", f"[{experts}, {depth}, {n}]")
    if has_index != (mode != "NONE"):
        raise _refuse(node, f"mode {mode} {'takes no' if has_index else 'needs a'} token_index", "mode GATHER or SCATTER with token_index", mode)
    if top_k < 0 or (mode == "NONE" and (has_slots or top_k > 1)):
        found = f"top_k {top_k}" + (" and token_ks" if has_slots else "")
        raise _refuse(node, f"top_k and token_ks do not fit mode {mode}", "top_k >= 0, and neither with mode NONE", found)
    if has_slots and top_k < 1:
        raise _refuse(node, "token_ks numbers the top_k choices of a token", "top_k >= 1", top_k)
    _some(node, experts)
    _listed(node, "FirstTokenOffset", experts, "experts")
    rows = m if mode == "NONE" else _listed(node, "TokenIndex", m if mode == "SCATTER" else None, "rows of token")
    if has_slots:
        _listed(node, "TokenKs", rows, "entries of token_index")
    dim = (1, rows, n)
    shapes.give(node, "Output", dim, lambda: layout.packed(dim))


def _infer_backward(node: NodeDecl) -> None:
    """[E, K, N] with K contiguous."""
    shapes.require(node, ("DOutput", "Token", "FirstTokenOffset"), ("DWeight",))
    (_, rows, n), (_, m, k) = _matrix(node, "DOutput"), _matrix(node, "Token")
    if rows != m:
        raise _refuse(node, "rows of doutput and token differ", f"a doutput [1, {m}, N]", f"[1, {rows}, {n}]")
    experts = _listed(node, "FirstTokenOffset", None, "experts")
    _some(node, experts)
    dim = (experts, k, n)
    shapes.give(node, "DWeight", dim, lambda: layout.packed(dim, (1, 2, 0)))


def _check(node: NodeDecl) -> None:
    shapes.check_plain(node)
    for port in ("FirstTokenOffset", "TokenIndex", "TokenKs"):
        t = node.inputs.get(port)
        if t is not None and t.dtype not in _INDEX_TYPES:
            expected = " or ".join(d.name for d in _INDEX_TYPES)
            raise NotSupportedError(explain(f"{port} must be integers", node=node.label, tensor=t.name, expected=expected, found=t.dtype.name))
    _check_values(node, [t for p, t in node.inputs.items() if t.by_value or t.constant])


def _check_values(node: NodeDecl, scalars: list[TensorDecl]) -> None:
    if scalars:
        rule, fix = "a grouped matmul reads its inputs from memory", "give a tensor that is not passed by value"
        raise NotSupportedError(explain(rule, node=node.label, tensor=scalars[0].name, fix=fix))


# ------------------------------------------------------------------------------------------------------------------------------------ references
def _groups(offsets: Array, rows: int) -> Iterator[tuple[int, slice]]:
    """(expert, its rows)."""
    starts = np.maximum.accumulate(np.clip(offsets.reshape(-1).astype(np.int64), 0, rows))
    ends = [*starts[1:], rows]
    return ((e, slice(int(lo), int(hi))) for e, (lo, hi) in enumerate(zip(starts, ends, strict=True)))


def _sources(node: Node, ports: dict[str, Array], rows: int) -> Array:
    """Row of token of every sorted row."""
    if node.attr("mode") != "GATHER":
        return np.arange(rows)
    return np.clip(ports["TokenIndex"].reshape(-1).astype(np.int64), 0, max(ports["Token"].shape[1] - 1, 0))


def _targets(node: Node, ports: dict[str, Array], rows: int) -> Array:
    """Row of the result of every sorted row."""
    if node.attr("mode") != "SCATTER":
        return np.arange(rows)
    index = ports["TokenIndex"].reshape(-1).astype(np.int64)
    if "TokenKs" in ports:
        index = index * node.attr("top_k") + ports["TokenKs"].reshape(-1).astype(np.int64)
    return np.clip(index, 0, max(rows - 1, 0))


def _forward(node: Node, dim: Dims, ports: dict[str, Array], product: Callable[[slice, Array, int], Array], kind: Any = np.float64) -> Array:
    """``product(rows, their rows of token, expert)`` put together."""
    found = np.zeros(dim, kind)
    sources, targets = _sources(node, ports, dim[1]), _targets(node, ports, dim[1])
    for e, rows in _groups(ports["FirstTokenOffset"], dim[1]):
        if rows.stop > rows.start:
            found[0, targets[rows]] = product(rows, sources[rows], e)
    return found


def _named(node: Node, arrays: list[Any]) -> dict[str, Any]:
    return {p: a for (p, _), a in zip(node.inputs, arrays, strict=True)}


def _reference(node: Node, dims: list[Dims], arrays: list[Any]) -> list[Any]:
    ports = _named(node, arrays)
    token, weight = (s.narrowed(ports[p], node.compute) for p in ("Token", "Weight"))
    with np.errstate(all="ignore"):
        return [s.widened(_forward(node, dims[0], ports, lambda _, at, e: token[0, at] @ weight[e], np.result_type(token, weight)))]


def _reference_backward(node: Node, dims: list[Dims], arrays: list[Any]) -> list[Any]:
    ports = _named(node, arrays)
    token, loss = (s.narrowed(ports[p], node.compute) for p in ("Token", "DOutput"))
    with np.errstate(all="ignore"):
        parts = [token[0, rows].T @ loss[0, rows] for _, rows in _groups(ports["FirstTokenOffset"], token.shape[1])]
    return [s.widened(np.stack(parts) if parts else np.zeros(dims[0], np.result_type(token, loss)))]


def _drawn(node: Node, dims: dict[str, Dims], generator: np.random.Generator) -> dict[str, Array]:
    """Offsets in order, rows that exist, and no place of the result twice."""
    mode = dict(node.attrs).get("mode", "NONE")  # the gradient has none
    tokens = dims["Token"][1]
    rows = math.prod(dims["TokenIndex"]) if mode == "GATHER" else tokens
    found = {"FirstTokenOffset": np.sort(generator.integers(0, rows + 1, math.prod(dims["FirstTokenOffset"])))}
    if mode == "GATHER":
        found["TokenIndex"] = generator.integers(0, max(tokens, 1), rows)
    elif mode == "SCATTER":
        places, choices = generator.permutation(rows), node.attr("top_k") if "TokenKs" in dims else 1
        found |= {"TokenIndex": places // choices, "TokenKs": places % choices}
    return {port: values.reshape(dims[port]) for port, values in found.items() if port in dims}


def _stacked(spans: list[Span], dim: Dims) -> Span:
    if not spans:
        return exact(np.zeros(dim))
    return Span(*(np.stack([getattr(x, name) for x in spans]) for name in ("lo", "hi", "nan")))


def _spans(node: Node, dims: list[Dims], arrays: list[Any], spans: list[Span], arithmetic: Arithmetic) -> list[Span]:
    """Of each expert's product, as of a matmul; integers are exact."""
    if not arithmetic.real:
        return [exact(_reference(node, dims, arrays)[0])]
    ports, known = _named(node, arrays), _named(node, spans)
    made: dict[int, Span] = {}

    def product(rows: slice, at: Array, e: int) -> Span:
        if e not in made:
            made[e] = folds.matmul(known["Token"].map(lambda v: v[0, at]), known["Weight"].map(lambda v: v[e]), arithmetic)
        return made[e]

    def part(name: str, kind: Any) -> Array:
        return _forward(node, dims[0], ports, lambda rows, at, e: np.asarray(getattr(product(rows, at, e), name)), kind)

    return [Span(part("lo", np.float64), part("hi", np.float64), part("nan", bool))]


def _spans_backward(node: Node, dims: list[Dims], arrays: list[Any], spans: list[Span], arithmetic: Arithmetic) -> list[Span]:
    if not arithmetic.real:
        return [exact(_reference_backward(node, dims, arrays)[0])]
    ports, known = _named(node, arrays), _named(node, spans)
    token, loss = known["Token"], known["DOutput"]
    groups = _groups(ports["FirstTokenOffset"], token.lo.shape[1])
    products = [folds.matmul(token.map(lambda v, r=rows: v[0, r].T), loss.map(lambda v, r=rows: v[0, r]), arithmetic) for _, rows in groups]
    return [_stacked(products, dims[0])]


SPECS = (
    OpSpec(
        tag="MOE_GROUPED_MATMUL",
        role="grouped",
        inputs=("Token", "Weight", "FirstTokenOffset", "TokenIndex", "TokenKs"),
        outputs=("Output",),
        optional=("TokenIndex", "TokenKs"),
        attrs=("mode", "top_k"),
        integers=("FirstTokenOffset", "TokenIndex", "TokenKs"),
        infer=_infer,
        check=_check,
        reference=_reference,
        work=lambda given, made: 2 * math.prod(made[0]) * given[0][2],
        spans=_spans,
        drawn=_drawn,
    ),
    OpSpec(
        tag="MOE_GROUPED_MATMUL_BWD",
        role="grouped",
        inputs=("DOutput", "Token", "FirstTokenOffset"),
        outputs=("DWeight",),
        integers=("FirstTokenOffset",),
        infer=_infer_backward,
        check=_check,
        reference=_reference_backward,
        work=lambda given, made: 2 * math.prod(given[0]) * made[0][1],
        spans=_spans_backward,
        drawn=_drawn,
    ),
)
