"""THE table of the API page: for every op method of a graph, the forms in which it can be called and the data types that it takes.

::

    row.py         Types, Case, Row; how a form is called by keyword and by position; what of a signature the rows use
    pointwise.py   rows of the pointwise methods, made from the op table
    structured.py  matmul, convolution, reduction, movement, resampling
    norms.py       normalization, statistics, softmax
    attention.py   attention, on 8-bit floats too
    quant.py       random numbers, block scaling, grouped matmul

A new method needs a row: ``tests/conformance/test_api_table.py`` builds and runs every row on every target, and fails for a method without one,
or a row that leaves an argument out.
"""

from __future__ import annotations

from tests.api_table import attention, norms, pointwise, quant, structured
from tests.api_table.row import Row

ROWS: dict[str, Row] = {row.name: row for module in (pointwise, structured, norms, attention, quant) for row in module.ROWS}
"""Rows by name: that of the method, or of a group of methods that share a graph."""
