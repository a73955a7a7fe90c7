"""Composite ops become simpler nodes; tensors with a placement are read through views. Runs after check, when every dim and data type is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphdnn.ir.node import NodeDecl
from graphdnn.ir.tensor import TensorDecl
from graphdnn.opspecs import registry
from graphdnn.opspecs.expansion import Expansion
from graphdnn.passes.check import carrier


def expand(nodes: Sequence[NodeDecl]) -> list[NodeDecl]:
    """``nodes`` with every composite one replaced by what it stands for, composites inside them too; every reader of a tensor with a placement reads
    a view of it that has the declared dims."""
    return viewed(_expanded(nodes))


def _expanded(nodes: Sequence[NodeDecl]) -> list[NodeDecl]:
    result: list[NodeDecl] = []
    for n in nodes:
        rule = registry.spec(n.op).expand
        if rule is None:
            result.append(n)
            continue
        expansion = Expansion(n, carrier(n))
        rule(expansion)
        result.extend(_expanded(expansion.nodes))
    return result


def viewed(nodes: Sequence[NodeDecl]) -> list[NodeDecl]:
    """``nodes``, in which every reader of a tensor with a placement reads a view of it."""
    views: dict[TensorDecl, TensorDecl] = {}
    result: list[NodeDecl] = []
    for n in nodes:
        for t in n.inputs.values():
            if t.placement is not None and t not in views:
                made = Expansion(n, t.dtype)
                views[t] = made.view(t)
                result.extend(made.nodes)
        changed = {p: views.get(t, t) for p, t in n.inputs.items()}
        result.append(n if changed == n.inputs else replace(n, inputs=changed))
    return result
