"""Parts of the docs that come from the data of tests.

Which engines take each op on each target: asked of the engines themselves about the graphs of ``tests/api_table``, which the tests run. Where an
answer differs from the real library's: the rows of ``tests/api_page``, each of which is a test.
"""

from __future__ import annotations

import sys
from pathlib import Path

import graphdnn
from graphdnn.engines import ENGINES
from graphdnn.passes import regions
from graphdnn.plans import candidates

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests are no installed package
from tests.api_page import ROWS as PAGE
from tests.api_table import ROWS
from tests.api_table.row import Case, Row, Types

DEVICES = {"CPU": "cpu", "Simulator": "cudasim", "Any CUDA GPU": "sm_80", "sm_90a": "sm_90"}
"""Column -> device; a GPU is described, not present."""


def op_rows() -> list[list[str]]:
    """Methods, data types, and the engines of each target."""
    found: dict[str, list[str]] = {}
    for row in ROWS.values():
        methods = sorted({m for m, _ in row.forms(Case(graphdnn.pygraph(device="cpu"), row.types[0]))})
        cells = [_types(row), *(_engines(row, device) for device in DEVICES.values())]
        known = found.setdefault(" | ".join(cells), ["", *cells])
        known[0] = ", ".join(filter(None, (known[0], *(f"`{m}`" for m in methods))))
    return list(found.values())


def differences(kind: str) -> list[list[str]]:
    """Rows of the API page of this kind: op, input, what the real library and what graphdnn does."""
    return [[f"`{r.node}`" if hasattr(graphdnn.pygraph, r.node) else r.node, r.what, r.page, r.here] for r in PAGE if r.kind == kind]


def _types(row: Row) -> str:
    return ", ".join(dict.fromkeys(t.io.name for t in row.types))


def _engines(row: Row, device: str) -> str:
    """Names of every engine that some region of the row's graph may run on; of the types, one that calculates in FLOAT and one of 16 bits."""
    asked = {t.io.name: t for t in reversed(row.types) if t.io.name in ("FLOAT", "HALF")} or {"": row.types[0]}
    taken = {name for t in asked.values() for name in _taken(row, t, device)}
    return ", ".join(e.name for e in ENGINES if e.name in taken) or "not yet"


def _taken(row: Row, types: Types, device: str) -> set[str]:
    g = graphdnn.pygraph(device=device)
    row.declare(Case(g, types))
    g.build_operation_graph()
    graph = g._opgraph
    assert graph is not None, "just built"
    found = candidates.survey(graph, regions.partition(graph), g._get_device(), ENGINES)
    return {o.engine.name for options in found.options for o in options} if found.complete else set()
