"""Every row of the API page on names, inference and errors (:mod:`tests.api_page`)."""

from __future__ import annotations

import pytest

from tests.api_page import ROWS
from tests.api_page.row import OURS, RUNS, SAME


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name)
def test_row(row):
    row.test(row.graph())


def test_rows_say_how_they_compare():
    assert len({r.name for r in ROWS}) == len(ROWS)
    for r in ROWS:
        assert r.kind in (SAME, RUNS, OURS) and bool(r.page) == bool(r.here) == (r.kind != SAME), r.name
