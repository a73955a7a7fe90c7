"""Loops of CPU kernels over the rows and columns of a matrix whose elements a tape reads or writes: row by row, or along the rows in strips.

A convolution's rows and columns count through several loops each. The inner loop is the one that is contiguous in memory, so that LLVM vectorizes it,
and no index in it has a quotient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphdnn.codegen.body import Signature, lanes
from graphdnn.codegen.dialect import IndexWriter, decompose
from graphdnn.codegen.tape import Load, Store, Tape
from graphdnn.ir.index import Var, slope
from graphdnn.passes.collapse import apply, collapse

VECTOR = 16
"""An inner loop of this many elements is long enough."""
GRAIN = 8192
"""Elements that are worth handing to another thread."""
_LONG = 128
"""A strip of more rows may be cut anywhere."""


@dataclass(frozen=True)
class Strips:
    """Fields of the template ``cpu/strips.py.j2`` without what a kernel does with a value; ``row`` and ``column``: text of the matrix indices.
    ``strip``: rows that should stay together."""

    fields: dict[str, Any]
    row: str
    column: str
    strip: int = 1

    def grain(self, width: int) -> int:
        """Rows of ``width`` elements that are worth handing to another thread."""
        rows = max(1, -(-GRAIN // max(width, 1)))
        return -(-rows // self.strip) * self.strip


def merged(tape: Tape, loops: Sequence[Var]) -> tuple[list[Var], Tape]:
    """``loops``, those that the tape walks as one merged, and the tape in what remains."""
    kept, changes = collapse([v for v in loops if v.size != 1], tape.linears())
    return kept, tape.mapped(lambda e: apply(e, changes))


def runs_along_rows(tape: Tape, rows: Sequence[Var], columns: Sequence[Var]) -> bool:
    """Whether a row is walked element by element; else the inner loop goes from row to row."""
    by, tape = merged(tape, rows)
    across, tape = merged(tape, columns)
    accesses: list[Load | Store] = [*tape.stores(), *tape.loads()]
    if not accesses or not by:
        return True

    def speed(loops: list[Var]) -> int:
        step = abs(slope(accesses[0].offset, loops[-1])) if loops else 0
        return min(loops[-1].size, VECTOR) * (4 if step == 1 else 1) if step else 1

    return speed(across) >= speed(by)


def strips(
    tape: Tape,
    signature: Signature,
    batch: Sequence[Var],
    rows: Sequence[Var],
    columns: Sequence[Var],
    along_rows: bool,
    span: tuple[str, str] = ("lo", "hi"),
) -> Strips:
    """The loops over a matrix whose rows count through ``batch`` and ``rows``; ``along_rows``: a row is walked element by element. ``span``:
    names of the first row and of the end."""
    lo, hi = span
    by, tape = merged(tape, rows)
    across, tape = merged(tape, columns)
    if along_rows:
        outer, middle, inner = [*batch, *by], across[:-1], (across or [Var("j", 1)])[-1]
        spans = {"start": lo, "stop": hi, "first": "0", "last": str(inner.size)}
        row, column = "o", f"w * {inner.size} + jl" if middle else "jl"
    else:
        outer, middle, inner = [*batch, *by[:-1]], across, by[-1]
        size = inner.size
        spans = {"start": f"{lo} // {size}", "stop": f"({hi} + {size - 1}) // {size}"}
        spans |= {"first": f"max({lo} - o * {size}, 0)", "last": f"min({hi} - o * {size}, {size})"}
        row, column = f"o * {size} + jl", "w" if middle else "0"
    part = lanes(tape, signature, inner, 1, IndexWriter("int64"), IndexWriter("int64", "ql"))
    setup, count = decompose("o", outer, "int64"), math.prod(v.size for v in middle)
    if middle:
        lines: dict[str, Any] = {"setup": setup, "middle": [*decompose("w", middle, "int64"), *part.setup], "count": count}
    else:
        lines = {"setup": [*setup, *part.setup], "middle": [], "count": 1}
    return Strips(spans | lines | {"body": part.body, "after": []}, row, column, strip_of(by, along_rows))


def strip_of(rows: Sequence[Var], along_rows: bool) -> int:
    """Rows that the inner loop takes in one go; 1 where it takes any number of them, or one."""
    return 1 if along_rows or rows[-1].size > _LONG else rows[-1].size
