"""References of ops with several inputs and outputs, written as functions of arrays by port."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from graphdnn.ir.node import Node
from graphdnn.ir.tensor import Dims
from graphdnn.opspecs.scalars import Array

Arrays = dict[str, Array]
"""float64 arrays by port."""
Formula = Callable[[Arrays, dict[str, Dims], Node], Arrays]
"""Outputs (at least those asked for) from inputs, dims of the outputs asked for, and the node for its attributes."""


def reference(formula: Formula, integers: Collection[str] = ()) -> Callable[[Node, list[Dims], list[Any]], list[Any]]:
    """The ``reference`` of an OpSpec that calculates in floats; arrays at the ports ``integers`` stay what they are."""

    def run(node: Node, dims: list[Dims], arrays: list[Any]) -> list[Any]:
        wanted = {p: d for (p, _), d in zip(node.outputs, dims, strict=True)}
        with np.errstate(all="ignore"):
            named = {p: np.asarray(a, dtype=None if p in integers else np.float64) for (p, _), a in zip(node.inputs, arrays, strict=True)}
            found = formula(named, wanted, node)
        return [found[p].reshape(d) for p, d in wanted.items()]

    return run
