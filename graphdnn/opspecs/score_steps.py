"""The steps of a score_mod: what may stand in them, checked once, and what their references stand for, in whatever reads them.

A step is (pointwise mode, references of its inputs, attributes). A reference is a number, "T:i" (the tensor at port SCORE_MOD_i), "#i" (the result of
step i, one before it), "S" (what is modified: the score, or in a score_mod_bprop the gradient of the modified score), or "P" (there: the score before
score_mod).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from graphdnn.errors import ValidationError, explain
from graphdnn.ir.node import NodeDecl
from graphdnn.opspecs.attention_parts import SCORE_PORTS
from graphdnn.opspecs.pointwise import POINTWISE, check_attributes

Step = tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]
NAMES = {"score_mod": ("S",), "score_mod_bprop": ("S", "P")}
"""Attribute -> the names that its references may have."""
_WRITTEN = re.compile(r"(#|T:)(0|[1-9][0-9]{0,8})")
_PREFIX = SCORE_PORTS[0].removesuffix("0")
T = TypeVar("T")


def result(step: int) -> str:
    """The reference of the result of a step."""
    return f"#{step}"


def tensor(port: str) -> str:
    """The reference of the tensor at a port."""
    return f"T:{port.removeprefix(_PREFIX)}"


def parsed(x: Any) -> tuple[str, Any]:
    """What reference ``x`` is: ("number", it), ("result", step), ("tensor", port) or ("name", it)."""
    if not isinstance(x, str):
        return "number", x
    found = _WRITTEN.fullmatch(x)
    if found is None:
        return "name", x
    return ("result", int(found[2])) if found[1] == "#" else ("tensor", f"{_PREFIX}{found[2]}")


def meaning(x: Any, number: Callable[[Any], T], made: Sequence[T], of_port: Callable[[str], T], names: Mapping[str, T]) -> T:
    """What reference ``x`` of a checked step stands for. ``made``: results of the steps before; ``number``, ``of_port``, ``names``: the rest."""
    kind, value = parsed(x)
    ways: dict[str, Callable[[Any], T]] = {"number": number, "result": made.__getitem__, "tensor": of_port, "name": names.__getitem__}
    return ways[kind](value)


# ---------------------------------------------------------------------------------------------------------------------------------------- checks
def check(node: NodeDecl) -> None:
    """ValidationError where the steps of a node, which may come from a text, are none: modes, counts of inputs, references, attributes."""
    for attr, names in NAMES.items():
        for i, step in enumerate(node.attrs.get(attr) or ()):
            _check_step(node, f"step {i} of {attr}", step, (*names, *map(result, range(i)), *(tensor(p) for p in SCORE_PORTS if p in node.inputs)))


def _check_step(node: NodeDecl, where: str, step: Step, known: tuple[str, ...]) -> None:
    mode, inputs, pairs = step
    row = POINTWISE.get(mode)
    if row is None:
        raise _wrong(node, f"{where} has no pointwise mode", "one of " + ", ".join(POINTWISE), mode)
    if len(inputs) != len(row.args):
        raise _wrong(node, f"{where}, {mode}, has the wrong number of inputs", len(row.args), len(inputs))
    for x in inputs:
        if isinstance(x, str) and x not in known:
            raise _wrong(node, f"{where}, {mode}, reads what is not there", f"a number or one of {', '.join(known)}", x)
    attrs = dict(pairs)
    unknown = sorted(set(attrs) - set(row.attrs))
    if unknown or len(attrs) < len(pairs):
        raise _wrong(node, f"{where}, {mode}, has other attributes", ", ".join(row.attrs) or "none", ", ".join(unknown) or "one twice")
    axis = attrs.get("axis")
    if "axis" in row.attrs and (not isinstance(axis, int) or not 0 <= axis < 4):
        raise _wrong(node, f"{where}, {mode}, has no axis, or one out of range", "0..3: batch, head, row, column", axis)
    check_attributes(node.label, row, attrs, node.compute)


def _wrong(node: NodeDecl, rule: str, expected: object, found: object) -> ValidationError:
    return ValidationError(explain(rule, node=node.label, expected=expected, found=found))
