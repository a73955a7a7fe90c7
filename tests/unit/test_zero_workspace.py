"""Every op has a plan that needs no workspace, or what it keeps there is known; what such plans calculate is right."""

from __future__ import annotations

from functools import partial

import pytest

import graphdnn
from graphdnn import heur_mode
from graphdnn.errors import NotSupportedError
from tests.api_table import ROWS
from tests.api_table.row import Case, Row, invoke

GRADIENT = "two numbers of every row of Q, which the pass over the rows of K and V reads"
EIGHT_BITS = "Amax of tensors that are stored in eight bits: the wide values are reduced and quantized by kernels behind the attention"
NEEDS = {
    "sdpa_backward": GRADIENT,
    "scaled_dot_product_flash_attention_backward": GRADIENT,
    "sdpa_fp8": EIGHT_BITS,
    "sdpa_fp8_backward": f"{GRADIENT}; {EIGHT_BITS}",
    "sdpa_mxfp8": f"dequantized operands, which every tile reads again; {EIGHT_BITS}",
    "sdpa_mxfp8_backward": f"dequantized operands, which every tile reads again; {GRADIENT}",
}
"""Ops that have no such plan, with what they keep in the workspace."""
GROUPED = dict.fromkeys(("moe_grouped_matmul", "moe_grouped_matmul_bwd"), "panels of a group's rows, which BLAS multiplies")
"""The same, on a CPU only."""


def methods() -> list[tuple[str, str]]:
    """(row, method) of every op method, once."""
    found: dict[str, str] = {}
    for name, row in ROWS.items():
        for method, _ in row.forms(Case(graphdnn.pygraph(device="cpu"), row.types[0])):
            found.setdefault(method, name)
    return [(row, method) for method, row in found.items()]


def single(row: Row, method: str, device: str) -> graphdnn.pygraph:
    """A graph of one call of ``method``, the first of its row."""
    case = Case(graphdnn.pygraph(device=device, workspace_limit=0), row.types[0])
    form = next(form for m, form in row.forms(case) if m == method)
    made = invoke(case.graph, method, {k: v() if isinstance(v, partial) else v for k, v in form.items()}, "keyword")
    row._deliver(case, method, method, form, list(made) if isinstance(made, list | tuple) else [made])
    return case.graph


@pytest.mark.parametrize("device", ["cpu", "sm_90"])
def test_every_op_has_a_plan_without_workspace(device):
    found = {}
    for row, method in methods():
        g = single(ROWS[row], method, device)
        g.build_operation_graph()
        g.create_execution_plans([heur_mode.A, heur_mode.FALLBACK])
        try:
            g.check_support()
        except NotSupportedError as error:
            assert "bytes of workspace, more than 0" in str(error), f"{method}: {error}"
            found[method] = str(error)
    known = NEEDS | (GROUPED if device == "cpu" else {})
    assert set(found) == set(known), "\n".join(f"{m}: {t.splitlines()[1]}" for m, t in found.items())
