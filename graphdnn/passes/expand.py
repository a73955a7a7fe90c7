"""Composite ops become simpler nodes. Runs after check, when every dim and data type is known."""

from __future__ import annotations

from collections.abc import Sequence

from graphdnn.ir.node import NodeDecl
from graphdnn.opspecs import registry
from graphdnn.opspecs.expansion import Expansion
from graphdnn.passes.check import carrier


def expand(nodes: Sequence[NodeDecl]) -> list[NodeDecl]:
    """``nodes`` with every composite one replaced by what it stands for, composites inside them too."""
    result: list[NodeDecl] = []
    for n in nodes:
        rule = registry.spec(n.op).expand
        if rule is None:
            result.append(n)
            continue
        expansion = Expansion(n, carrier(n))
        rule(expansion)
        result.extend(expand(expansion.nodes))
    return result
