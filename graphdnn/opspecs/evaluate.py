"""Evaluates expressions of the common dialect over an algebra: plain arrays, or error intervals (:mod:`graphdnn.opspecs.spans`).

The kernels' code is made from the same text, so an analysis that walks it sees every operation and constant that they have.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

V = TypeVar("V")
C = TypeVar("C")


class Algebra(Protocol[V, C]):
    """Meaning of the dialect's operations over values ``V`` and conditions ``C``."""

    def constant(self, value: Any) -> V:
        """``T(value)``: a number, or a value to be converted, in the compute type."""

    def binary(self, op: str, x: V, y: V) -> V:
        """``op`` is "+", "-" or "*"."""

    def negative(self, x: V) -> V:
        """-x."""

    def call(self, name: str, args: list[V]) -> V:
        """One of the dialect's functions."""

    def compare(self, op: str, x: V, y: V) -> C:
        """``op`` is one of == != < <= > >=."""

    def both(self, x: C, y: C) -> C:
        """x and y."""

    def either(self, x: C, y: C) -> C:
        """x or y."""

    def opposite(self, x: C) -> C:
        """Not x."""

    def choose(self, condition: C, yes: V, no: V) -> V:
        """``yes if condition else no``."""


_BINARY: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}
_COMPARE: dict[type[ast.cmpop], str] = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}


@functools.cache
def _parsed(expr: str) -> ast.expr:
    return ast.parse(expr, mode="eval").body


def evaluate(expr: str, names: Mapping[str, Any], algebra: Algebra[V, C]) -> V:
    """Value of ``expr``. ``names``: operands (values of the algebra) and, for use inside ``T()``, attributes (numbers)."""
    return _Walk(names, algebra).value(_parsed(expr))


class _Walk(Generic[V, C]):
    def __init__(self, names: Mapping[str, Any], algebra: Algebra[V, C]) -> None:
        self._names = names
        self._algebra = algebra

    def value(self, e: ast.expr) -> V:
        a = self._algebra
        if isinstance(e, ast.Name):
            found: V = self._names[e.id]
            return found
        if isinstance(e, ast.BinOp):
            assert type(e.op) in _BINARY, f"not an operator of the dialect: {ast.unparse(e)}; truediv, floormod and pow are functions"
            return a.binary(_BINARY[type(e.op)], self.value(e.left), self.value(e.right))
        if isinstance(e, ast.UnaryOp) and isinstance(e.op, ast.USub):
            return a.negative(self.value(e.operand))
        if isinstance(e, ast.IfExp):
            return a.choose(self.condition(e.test), self.value(e.body), self.value(e.orelse))
        assert isinstance(e, ast.Call) and isinstance(e.func, ast.Name), f"not in the dialect: {ast.unparse(e)}"
        if e.func.id == "T":
            inner = e.args[0]
            return a.constant(self._names[inner.id] if isinstance(inner, ast.Name) else ast.literal_eval(inner))
        return a.call(e.func.id, [self.value(x) for x in e.args])

    def condition(self, e: ast.expr) -> C:
        a = self._algebra
        if isinstance(e, ast.BoolOp):
            join = a.both if isinstance(e.op, ast.And) else a.either
            return functools.reduce(join, [self.condition(x) for x in e.values])
        if isinstance(e, ast.UnaryOp) and isinstance(e.op, ast.Not):
            return a.opposite(self.condition(e.operand))
        assert isinstance(e, ast.Compare) and len(e.ops) == 1, f"not a condition of the dialect: {ast.unparse(e)}"
        return a.compare(_COMPARE[type(e.ops[0])], self.value(e.left), self.value(e.comparators[0]))
