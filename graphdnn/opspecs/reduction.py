"""THE table of reduction modes, and the op REDUCTION.

A row: ``map`` of an element ``a``, ``combine`` of two partial results ``x`` and ``y`` (in any order; the only operation whose error depends on it),
``finalize`` of the result ``x`` and the number ``n`` of reduced elements; expressions of the common dialect like those of the pointwise table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from graphdnn.dtypes import compute_carrier, data_type, info
from graphdnn.errors import BuildError, ValidationError, explain
from graphdnn.ir import layout
from graphdnn.ir.node import Node, NodeDecl
from graphdnn.ir.tensor import Dims
from graphdnn.opspecs import scalars as s
from graphdnn.opspecs import shapes
from graphdnn.opspecs.scalars import Array
from graphdnn.opspecs.spec import OpSpec


@dataclass(frozen=True)
class ReductionOp:
    """One reduction mode.

    ``identity``: an expression, or "lowest" / "highest" (minus / plus infinity, for integers the limit of the type). ``reference(x, axes)``: NumPy
    form with kept dims; float64, int32 or int64 in, the same out. ``empty``: result of reducing nothing in an integer type, an expression, or None
    where integers have no such value (an error); float types give finalize(identity, 0). ``wide``: integers accumulate in INT64 whatever the compute
    type, and wrap (or, rounded by ``finalize``, fit) at the end. Domain as in the pointwise table.
    """

    mode: str
    identity: str
    map: str
    combine: str
    finalize: str
    reference: Callable[[Array, Dims], Array]
    doc: str
    empty: str | None = "T(0)"
    domain: Literal["any", "float"] = "any"
    wide: bool = False

    def carrier(self, compute: data_type, attrs: Mapping[str, Any] = MappingProxyType({})) -> data_type:
        """The type it is calculated in when ``compute`` (a carrier) is asked for; ``attrs`` decide nothing here."""
        return data_type.FLOAT if self.domain == "float" and info(compute).kind != "f" else compute


def _mean(x: Array, axes: Dims) -> Array:
    if x.dtype.kind == "f":
        return np.asarray(np.sum(x, axis=axes, keepdims=True) / math.prod(x.shape[a] for a in axes))
    n = np.full((1,) * x.ndim, math.prod(x.shape[a] for a in axes), dtype=np.int64)
    return s.divide(np.asarray(np.sum(x, axis=axes, keepdims=True, dtype=np.int64)), n).astype(x.dtype)


def _rows() -> Iterable[ReductionOp]:
    op, total = ReductionOp, "x + y"

    def keep(f: Callable[..., Any], **more: Any) -> Callable[[Array, Dims], Array]:
        return lambda x, axes: np.asarray(f(x, axis=axes, keepdims=True, **more)).astype(x.dtype)

    def lowest(x: Array) -> float | int:
        return -np.inf if x.dtype.kind == "f" else s.limits(x)[0]

    def highest(x: Array) -> float | int:
        return np.inf if x.dtype.kind == "f" else s.limits(x)[1]

    yield op("ADD", "T(0)", "a", total, "x", keep(np.sum), "sum")
    yield op("MUL", "T(1)", "a", "x * y", "x", keep(np.prod), "product", empty="T(1)")
    yield op("MIN", "highest", "a", "nanmin(x, y)", "x", lambda x, axes: keep(np.min, initial=highest(x))(x, axes), "smallest; NaN wins", empty=None)
    yield op("MAX", "lowest", "a", "nanmax(x, y)", "x", lambda x, axes: keep(np.max, initial=lowest(x))(x, axes), "largest; NaN wins", empty=None)
    yield op("AMAX", "T(0)", "abs(a)", "nanmax(x, y)", "x", lambda x, axes: keep(np.max, initial=0)(np.abs(x), axes), "largest |x|; NaN wins")
    yield op("AVG", "T(0)", "a", total, "truediv(x, n)", _mean, "mean; integers round half to even", empty=None, wide=True)
    yield op("NORM1", "T(0)", "abs(a)", total, "x", lambda x, axes: keep(np.sum)(np.abs(x), axes), "sum of |x|")
    norm2, no_zeros = "square root of the sum of squares", "a if a != T(0) else T(1)"
    yield op("NORM2", "T(0)", "a * a", total, "sqrt(x)", lambda x, axes: np.sqrt(keep(np.sum)(x * x, axes)), norm2, domain="float")
    skipping: Callable[[Array, Dims], Array] = lambda x, axes: keep(np.prod)(np.where(x != 0, x, 1), axes)  # noqa: E731
    yield op("MUL_NO_ZEROS", "T(1)", no_zeros, "x * y", "x", skipping, "product of what is not 0", empty="T(1)")


def _table(rows: Iterable[ReductionOp]) -> dict[str, ReductionOp]:
    found: dict[str, ReductionOp] = {}
    for row in rows:
        assert row.mode not in found, f"reduction row {row.mode} is there twice"
        found[row.mode] = row
    return found


REDUCTION: dict[str, ReductionOp] = _table(_rows())
"""Mode -> row. The order gives the members of ``graphdnn.reduction_mode`` their numbers."""


def reduced_axes(attrs: Mapping[str, Any], x: Dims, y: Dims) -> Dims:
    """Axes that a reduction of dims ``x`` to dims ``y`` reduces: those that the attribute names, else those where y has extent 1 and x has not."""
    axes = attrs.get("axes")
    if axes is not None:
        return tuple(sorted(a % len(x) for a in axes))
    return tuple(a for a, (n, m) in enumerate(zip(x, y, strict=True)) if m == 1 and n != 1)


def _mode(node: NodeDecl) -> ReductionOp | None:
    """The row; None while the mode is not set, which :func:`_check` refuses later than :func:`_infer`, as the API does."""
    mode = node.attrs.get("mode")
    if mode in (None, "NOT_SET"):
        return None
    row = REDUCTION.get(mode) if isinstance(mode, str) else None
    if row is None:
        raise ValidationError(explain("reduction mode not known", node=node.label, expected="one of " + ", ".join(REDUCTION), found=mode))
    return row


def _infer(node: NodeDecl) -> None:
    shapes.require(node, ("X",), ("Y",))
    _mode(node)
    x, y = node.inputs["X"], node.outputs["Y"]
    source = shapes.dims(x)
    if node.attrs.get("axes") is not None:
        axes = [shapes.axis(node, "reduction axis", a, x) for a in node.attrs["axes"]]
        if len(set(axes)) != len(axes):
            raise ValidationError(explain("an axis is named twice", node=node.label, expected="different axes", found=list(node.attrs["axes"])))
        node.attrs["axes"] = tuple(sorted(axes))
        keep = bool(node.attrs.get("keepdim", False))
        dim = tuple(1 if a in axes else d for a, d in enumerate(source) if keep or a not in axes)
    else:
        dim = source if y.dim is None else tuple(y.dim)
        if len(dim) != len(source) or any(m not in (1, n) for n, m in zip(source, dim, strict=True)):
            raise ValidationError(
                explain(
                    "the output of a reduction has the input's dims, or 1 where it reduces",
                    node=node.label,
                    tensor=y.name,
                    expected=f"rank {len(source)}, every extent 1 or that of {list(source)}",
                    found=list(dim),
                    fix="use reduction(axes=..., keepdim=False) for a result of lower rank",
                )
            )
    shapes.give(node, "Y", dim, lambda: layout.packed(dim, layout.channels_last_order(len(dim))))


def _check(node: NodeDecl) -> None:
    shapes.check_plain(node)
    row = _mode(node)
    if row is None:
        raise BuildError(explain("reduction mode not set", node=node.label, expected="one of " + ", ".join(REDUCTION), found="NOT_SET"))
    x, y = shapes.dims(node.inputs["X"]), shapes.dims(node.outputs["Y"])
    count = math.prod(x[a] for a in reduced_axes(node.attrs, x, y))
    if count == 0 and row.empty is None and 0 not in y and info(row.carrier(compute_carrier(node.compute))).kind != "f":
        raise ValidationError(
            explain(
                f"{row.mode} of no elements has no value in an integer type",
                node=node.label,
                tensor=node.inputs["X"].name,
                expected="at least one element along every reduced axis",
                found=f"dims {list(x)} reduced to {list(y)}",
                fix="set compute_data_type to FLOAT",
            )
        )


def _reference(node: Node, dims: list[tuple[int, ...]], arrays: list[Any]) -> list[Any]:
    row = REDUCTION[node.attr("mode")]
    x = s.narrowed(arrays[0], row.carrier(node.compute))
    axes = reduced_axes(dict(node.attrs), x.shape, dims[0])
    with np.errstate(all="ignore"):
        return [s.widened(row.reference(x, axes).reshape(dims[0]))]


ROWS = {"REDUCTION": REDUCTION}
SPECS = (
    OpSpec(
        tag="REDUCTION",
        role="reduction",
        inputs=("X",),
        outputs=("Y",),
        attrs=("mode", "is_deterministic", "axes", "keepdim"),
        infer=_infer,
        check=_check,
        reference=_reference,
    ),
)
