"""Tapes without branches: ``x if c else y`` as ``select(c, x, y)``, which calculates both.

A conditional expression is a branch to numba, and LLVM keeps it where one side is long (an erf). Lanes of a loop that branch cannot be interleaved: a
GELU epilogue of 8 lanes took eight times the latency of one. Tape values have no effects, so both sides may always be calculated.
"""

from __future__ import annotations

import ast
from dataclasses import replace

from graphdnn.codegen.tape import Assign, Item, Tape


class _Select(ast.NodeTransformer):
    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:  # noqa: N802 - the name that ast calls
        """Both sides, calculated."""
        self.generic_visit(node)
        return ast.Call(ast.Name("select", ast.Load()), [node.test, node.body, node.orelse], [])

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:  # noqa: N802
        """Truth values joined bit by bit; without this they would branch too."""
        self.generic_visit(node)
        joined = node.values[0]
        for value in node.values[1:]:
            joined = ast.BinOp(joined, ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr(), value)
        return joined


def _item(item: Item) -> Item:
    if not isinstance(item, Assign) or " if " not in item.expr:
        return item
    tree = _Select().visit(ast.parse(item.expr, mode="eval"))
    return replace(item, expr=ast.unparse(ast.fix_missing_locations(tree)))


def branchless(tape: Tape) -> Tape:
    """``tape`` with every conditional expression as a select; guards of loads and stores stay."""
    return Tape([_item(i) for i in tape.items])
