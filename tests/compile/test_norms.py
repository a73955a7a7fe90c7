"""Normalizations compile with no GPU; in float32 their SASS has no double precision, no local memory, no spills."""

from __future__ import annotations

import pytest

from tests.compile.test_templates import DOUBLE, LOCAL, compiled
from tests.norm_cases import OPS, declared

SOME = ("layernorm", "batchnorm", "logsumexp")


@pytest.mark.parametrize("op", [pytest.param(o, marks=() if o in SOME else pytest.mark.slow) for o in OPS])
def test_clean_machine_code(op):
    plan = compiled(declared([op], (8, 64, 28, 20)), "sm_90").plan
    assert not DOUBLE.search(plan.sass) and not LOCAL.search(plan.sass)
    assert not any(r["spill_bytes"] for r in plan.resources)
