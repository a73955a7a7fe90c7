"""Rows of the API page on names, inference and errors (its parts 1.6, 2.0 and 2.1), each with what declares it and what must come of it.

::

    row.py         Row: "same" as the page, "runs here" (the page refuses it, the mathematics does not), "our error" (it accepts what has no meaning)
    common.py      names (1.6), the order of work and its rules (2.0)
    structured.py  pointwise, matmul, convolution, reduction, movement (2.1)
    norms.py       normalization and statistics (2.1)
    blocks.py      block scaling, random numbers (2.1)

``tests/unit/test_api_page.py`` holds every row to its word; ``docs/gen_pages.py`` prints the last two kinds into ``docs/coming_from_cudnn.md``.
"""

from __future__ import annotations

from tests.api_page import blocks, common, norms, structured
from tests.api_page.row import Row

ROWS: tuple[Row, ...] = (*common.ROWS, *structured.ROWS, *norms.ROWS, *blocks.ROWS)
"""Every row, in the order of the page."""
