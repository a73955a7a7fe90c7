"""MATMUL: C = A @ B over the last two dims, batch dims broadcast as in NumPy (right-aligned, ranks may differ)."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphdnn.errors import ValidationError, explain
from graphdnn.ir import layout
from graphdnn.ir.node import Node, NodeDecl
from graphdnn.opspecs import scalars as s
from graphdnn.opspecs import shapes
from graphdnn.opspecs.spec import OpSpec


def _infer(node: NodeDecl) -> None:
    shapes.require(node, ("A", "B"), ("C",))
    a, b = node.inputs["A"], node.inputs["B"]
    for t in (a, b):
        if len(shapes.dims(t)) < 2:
            found = f"dims {list(shapes.dims(t))}"
            raise ValidationError(explain("matmul needs matrices", node=node.label, tensor=t.name, expected="rank >= 2", found=found))
    left, right = shapes.dims(a), shapes.dims(b)
    if left[-1] != right[-2]:
        raise ValidationError(
            explain(
                f"K differs: the last dim of '{a.name}' and the last but one of '{b.name}'",
                node=node.label,
                expected=f"dims (..., M, {left[-1]}) and (..., {left[-1]}, N)",
                found=f"'{a.name}' {list(left)} and '{b.name}' {list(right)}",
                fix=f"transpose '{b.name}'" if left[-1] == right[-1] else None,
            )
        )
    batch = shapes.broadcast_dims([left[:-2], right[:-2]])
    if isinstance(batch, int):
        raise ValidationError(
            explain(
                f"batch dims of '{a.name}' and '{b.name}' cannot be broadcast together: batch axis {batch} differs",
                node=node.label,
                expected="equal extents, or 1 on one side, from the right",
                found=f"'{a.name}' {list(left)} and '{b.name}' {list(right)}",
            )
        )
    dim = (*batch, left[-2], right[-1])
    shapes.give(node, "C", dim, lambda: layout.packed(dim))


def _reference(node: Node, dims: list[tuple[int, ...]], arrays: list[Any]) -> list[Any]:
    a, b = (s.narrowed(x, node.compute) for x in arrays)
    with np.errstate(all="ignore"):
        return [s.widened(np.matmul(a, b))]


SPECS = (
    OpSpec(
        tag="MATMUL",
        role="matmul",
        inputs=("A", "B"),
        outputs=("C",),
        attrs=("padding_value",),
        infer=_infer,
        check=shapes.check_plain,
        reference=_reference,
    ),
)
