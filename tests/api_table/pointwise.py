"""Rows of the pointwise methods and their aliases. They are made from the op table, so that a new op is in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from graphdnn import data_type, scalar_type
from graphdnn.dtypes import info, storable
from graphdnn.frontend.methods import Method, methods
from tests.api_table.row import Case, Form, Row, Types
from tests.helpers import Data

DIM = (2, 3, 5)
GIVEN = {"negative_slope": 0.25, "lower_clip": -0.5, "upper_clip": 1.5, "swish_beta": 1.5, "axis": 1}
"""A value for every keyword of a pointwise method; a new one needs a line."""
TYPES = tuple(Types(d) for d in storable())
SHARE = 6
"""Methods that share a graph."""


def operand(c: Case, i: int) -> Any:
    """Operand ``i``: x0 has both signs, x1 is positive and lies in another order, x2 is a mask of integers."""
    if i == 2:
        return c.t("x2", DIM, data_type.INT32, data=Data("grid", -1, 1))
    if info(c.types.io).kind != "f" or c.types.io is data_type.FP8_E8M0:
        return c.t(f"x{i}", DIM, layout=("row", "column")[i])
    return c.t(f"x{i}", DIM, layout=("row", "column")[i], data=(Data("uniform", -2.5, 2.5), Data("uniform", 0.3, 2.0))[i])


def forms_of(m: Method, c: Case) -> Iterator[Form]:
    """Every keyword given; none; each operand as a number, as a broadcast tensor, as a stored and as a by-value scalar."""
    tensors = {a: operand(c, i) for i, a in enumerate(m.args)}
    required = {p.keyword: GIVEN[p.keyword] for p in m.params if p.required}
    every = {p.keyword: GIVEN[p.keyword] for p in m.params}
    yield tensors | every | {"compute_data_type": c.types.compute, "name": f"{m.name} node"}
    yield tensors | required
    if len(m.args) > 1:
        for i, a in enumerate(m.args):
            yield tensors | required | {a: (2, 1.5, 1)[i]}
        last = m.args[1]
        yield tensors | required | {last: c.t("row", DIM[2:], data=Data("uniform", 0.5, 2) if info(c.types.io).kind == "f" else None)}
        yield tensors | required | {last: stored(c, scalar_type.COMPILE_TIME_CONST)}
        yield tensors | required | {last: stored(c, scalar_type.RUNTIME_PARAM)}
        yield tensors | required | {last: c.by_value("number", 0.75)}


def stored(c: Case, kind: scalar_type) -> Any:
    """A scalar that the graph holds."""
    return c.known(kind.name) or c.graph.tensor_scalar(1.25, kind).set_name(kind.name)


def forms(group: Sequence[Method], c: Case) -> Iterator[tuple[str, Form]]:
    """Of all methods of a group."""
    for m in group:
        for form in forms_of(m, c):
            yield m.name, form


def _groups() -> Iterator[list[Method]]:
    every = methods()
    yield from (every[i : i + SHARE] for i in range(0, len(every), SHARE))


ROWS = tuple(Row(f"{g[0].name} to {g[-1].name}", partial(forms, g), TYPES, may_exclude=0.25) for g in _groups())
