"""WINDOW: a view of a tensor in which every output position has the elements under it as dims of their own. Made by expansions only.

Y has X's leading dims, then for each of X's last ``len(windows)`` dims its positions, then for each its taps. Position p and tap r of a dim read

    floor((p * step + r * dilation + offset) / divisor)

of X, or ``fill`` where that is outside of X, or where ``exact`` is set and the division leaves a remainder. No element is copied: reductions over the
taps read X through this map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from graphdnn.dtypes import data_type
from graphdnn.ir.node import Node, NodeDecl
from graphdnn.ir.tensor import Dims, TensorDecl
from graphdnn.opspecs import shapes
from graphdnn.opspecs.expansion import Expansion
from graphdnn.opspecs.spec import OpSpec


@dataclass(frozen=True, slots=True)
class Slide:
    """How the window of one dim moves; see the module."""

    positions: int
    taps: int
    step: int
    dilation: int
    offset: int
    divisor: int = 1
    exact: bool = False


def windowed(expansion: Expansion, x: TensorDecl, slides: Sequence[Slide], fill: float | int = 0, dtype: data_type | None = None) -> TensorDecl:
    """The WINDOW of ``x`` in an expansion, converted to ``dtype`` (the compute type if None)."""
    assert x.dim is not None, "the tensors of an expansion have dims"
    dim = (*x.dim[: len(x.dim) - len(slides)], *(s.positions for s in slides), *(s.taps for s in slides))
    attrs = {"windows": tuple(astuple(s) for s in slides), "fill": fill}
    return expansion.add("WINDOW", {"X": x}, dim, attrs, ("Y", None), dtype)


def slides_of(node: Node) -> list[Slide]:
    """The windows of a node."""
    return [Slide(*values) for values in node.attr("windows")]


def _infer(node: NodeDecl) -> None:
    shapes.require(node, ("X",), ("Y",))


def _reference(node: Node, dims: list[Dims], arrays: list[Any]) -> list[Any]:
    x, slides = np.asarray(arrays[0]), slides_of(node)
    lead = x.ndim - len(slides)
    index: list[Any] = [np.arange(n).reshape([-1 if b == a else 1 for b in range(len(dims[0]))]) for a, n in enumerate(x.shape[:lead])]
    valid: Any = np.ones((1,) * len(dims[0]), bool)
    for a, s in enumerate(slides):
        shape = [1] * len(dims[0])
        shape[lead + a] = s.positions
        p = np.arange(s.positions).reshape(shape)
        shape[lead + a], shape[lead + len(slides) + a] = 1, s.taps
        at = p * s.step + np.arange(s.taps).reshape(shape) * s.dilation + s.offset
        where = at // s.divisor
        valid = valid & (where >= 0) & (where < x.shape[lead + a]) & (np.asarray(not s.exact) | (at % s.divisor == 0))
        index.append(np.clip(where, 0, max(x.shape[lead + a] - 1, 0)))
    fill = np.asarray(node.attr("fill") if x.dtype != bool else False, x.dtype)
    if 0 in x.shape:
        return [np.full(dims[0], fill)]
    return [np.broadcast_to(np.where(valid, x[tuple(index)], fill), dims[0])]


SPECS = (OpSpec("WINDOW", "movement", ("X",), ("Y",), _infer, shapes.check_plain, _reference, attrs=("windows", "fill"), internal=True),)
