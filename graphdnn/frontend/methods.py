"""From rows of the pointwise table to methods of a graph, with the signatures of the API."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from graphdnn.dtypes import data_type
from graphdnn.errors import KindError, explain
from graphdnn.frontend.declare import Declarations
from graphdnn.frontend.tensor import as_integer, as_number
from graphdnn.frontend.tensor import tensor as Tensor
from graphdnn.opspecs.pointwise import POINTWISE, Param, PointwiseOp

COMPUTE_BEFORE_KEYWORDS = ("swish_backward",)
"""Methods whose compute_data_type stands before their own keywords in the API."""
ATTRIBUTES: tuple[str, ...] = tuple(sorted({name for row in POINTWISE.values() for name in row.attrs}))
"""Attributes of any row: a pointwise node has all of them, None where they are not set."""


@dataclass(frozen=True)
class Method:
    """One method of a graph: its name, the row it makes nodes of, its tensor arguments, its keywords."""

    name: str
    row: PointwiseOp
    args: tuple[str, ...]
    params: tuple[Param, ...]

    @property
    def doc(self) -> str:
        """One line."""
        names = ", ".join(f"{letter} = {arg}" for letter, arg in zip("abc", self.args, strict=False) if letter != arg)
        return f"{self.row.doc} ({names})." if names and re.search(r"\b[abc]\b", self.row.doc) else f"{self.row.doc}."

    def parameters(self) -> list[tuple[str, str, Any]]:
        """(name, type, default) of every parameter after self; ``inspect.Parameter.empty`` where it is required."""
        required = inspect.Parameter.empty
        operands = [(a, "Tensor | float", required) for a in self.args]
        kinds = {p.keyword: "int" if isinstance(self.row.attrs[p.attr], int) else "float" for p in self.params}
        own = [(p.keyword, kinds[p.keyword] if p.required else f"{kinds[p.keyword]} | None", required if p.required else None) for p in self.params]
        compute = [("compute_data_type", "Any", data_type.NOT_SET)]
        middle = compute + own if self.name in COMPUTE_BEFORE_KEYWORDS else own + compute
        return [*operands, *middle, ("name", "str", "")]

    def signature(self) -> inspect.Signature:
        """The signature, as ``inspect.signature`` gives it."""
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter("self", kind)]
        parameters += [inspect.Parameter(n, kind, default=default, annotation=hint) for n, hint, default in self.parameters()]
        return inspect.Signature(parameters, return_annotation="Tensor")


def methods() -> list[Method]:
    """Every method that the rows name, in the order of the table."""
    found = []
    for row in POINTWISE.values():
        found.append(Method(row.method, row, row.args, row.params))
        found += [Method(a.method, row, a.args, a.params) for a in row.aliases]
    return found


def _attribute(node: str, param: Param, row: PointwiseOp, value: Any) -> float | int | None:
    if value is None and not param.required:
        return None
    if isinstance(row.attrs[param.attr], int):
        return as_integer(f"node '{node}': argument '{param.keyword}'", value)
    return as_number(f"node '{node}': argument '{param.keyword}'", value)


def add_node(graph: Declarations, method: Method, values: Mapping[str, Any]) -> Tensor:
    """Make the node of one call and return its output. ``values``: every argument by name."""
    node = graph._node_name("POINTWISE", values["name"])
    if not any(isinstance(values[a], Tensor) for a in method.args):
        graph._operand(node, method.args[0], values[method.args[0]])
    inputs = {f"IN_{i}": graph._operand_or_number(node, a, values[a]) for i, a in enumerate(method.args)}
    attrs: dict[str, Any] = {"mode": method.row.mode} | dict.fromkeys(ATTRIBUTES)
    attrs |= {p.attr: _attribute(node, p, method.row, values[p.keyword]) for p in method.params}
    return graph._add("POINTWISE", node, inputs, ("OUT_0",), attrs, values["compute_data_type"])[0]


def _function(cls: type, method: Method) -> Callable[..., Tensor]:
    signature = method.signature()

    def call(self: Declarations, *args: Any, **kwargs: Any) -> Tensor:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            raise KindError(explain(f"{method.name}(): {error}", expected=f"{method.name}{signature}")) from None
        bound.apply_defaults()
        return add_node(self, method, bound.arguments)

    call.__name__, call.__qualname__, call.__doc__, call.__module__ = method.name, f"{cls.__name__}.{method.name}", method.doc, cls.__module__
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def add_methods(cls: type[Declarations]) -> None:
    """Give ``cls`` a method for every name in the table; refuses to hide what it has already."""
    for method in methods():
        assert not hasattr(cls, method.name), f"pointwise method {method.name} would hide {cls.__name__}.{method.name}"
        setattr(cls, method.name, _function(cls, method))
