"""Lowering of a grouped matmul for a CPU: BLAS by panels of the rows of one expert, bounds read when it runs, after the checks."""

from __future__ import annotations

from typing import Any

from graphdnn.codegen.body import lanes
from graphdnn.codegen.dialect import IndexWriter, decompose
from graphdnn.codegen.spec import Buffer, Constant, Groups, KernelSpec, Launch, Matrix, Recipe
from graphdnn.codegen.tape import Load, Tape
from graphdnn.dtypes import data_type
from graphdnn.engines.base import ceil_div, entry_name
from graphdnn.engines.matmul_parts import Operand, step
from graphdnn.engines.moe_cuda import row_lines
from graphdnn.engines.moe_parts import GroupedParts, Row, listing
from graphdnn.engines.strips import GRAIN
from graphdnn.ir.index import Var

_TYPES = {"float32": data_type.FLOAT, "float64": data_type.DOUBLE, "int32": data_type.INT32, "int64": data_type.INT64}


class Lowering:
    """Kernels and steps of one grouped matmul."""

    def __init__(self, parts: GroupedParts, rows: int, words: str, title: list[str]) -> None:
        """``rows``: most rows of a panel."""
        self.parts, self.words, self.title = parts, words, title
        self.p = parts.product
        self.rows = max(1, min(rows, self.p.m.size if parts.backward else parts.rows))
        self.item = 8 if self.p.calc.endswith("64") else 4
        self.kernels: list[KernelSpec] = []
        self.scratch = 0

    def recipe(self) -> Recipe:
        """All of it."""
        p, parts = self.p, self.parts
        a, pack_a = self._left_of_all() if parts.backward else self._left()
        b, pack_b = self._right()
        panel = Matrix(self._take(self.rows * p.n.size), _TYPES[p.calc], (1, self.rows, p.n.size), (0, p.n.size, 1))
        epilogue = self._epilogue(panel.buffer)
        groups = Groups(listing(parts, parts.starts), parts.rows, parts.backward, a, b, panel, self.rows, epilogue, pack_a, pack_b)
        return Recipe(tuple(self.kernels), (groups,), self.scratch)

    # -- inputs ---------------------------------------------------------------------------------------------------------------------------
    def _left(self) -> tuple[Matrix, Launch | None]:
        p, m, k = self.p, self.parts.rows, self.p.k
        direct = None if self.parts.source else self._direct(p.a, (1, m, k.size), None, p.m, k)
        if direct is not None:
            return direct, None
        buffer = self._take(self.rows * k.size)
        lines = self._row(self.parts.source) or ["m = o"]
        return Matrix(buffer, _TYPES[p.calc], (1, m, k.size), (0, max(k.size, 1), 1)), self._pack(p.a, lines, k, buffer, m, True)

    def _left_of_all(self) -> tuple[Matrix, Launch | None]:
        """The gradient's: transposed."""
        p = self.p
        shape = (1, p.m.size, p.k.size)
        direct = self._direct(p.a, shape, None, p.m, p.k)
        if direct is not None:
            return direct, None
        buffer = self._take(p.m.size * p.k.size)
        return Matrix(buffer, _TYPES[p.calc], shape, (0, 1, max(p.m.size, 1))), self._pack(p.a, ["k = o"], p.m, buffer, p.k.size, False)

    def _right(self) -> tuple[Matrix, Launch | None]:
        p, backward = self.p, self.parts.backward
        stack, k, n = 1 if backward else self.parts.experts, p.k, p.n
        shape = (stack, k.size, n.size)
        direct = self._direct(p.b, shape, None if backward else self.parts.expert, k, n)
        if direct is not None:
            return direct, None
        loads = p.b.tape.loads()
        down = bool(loads) and step(loads[0], (k,)) == 1 and step(loads[0], (n,)) != 1
        rows, inner = (n, k) if down else (k, n)
        buffer = self._take(stack * k.size * n.size)
        strides = (k.size * n.size, 1, max(k.size, 1)) if down else (k.size * n.size, max(n.size, 1), 1)
        lines = decompose("o", [Var("expert", stack), rows], "int64")
        return Matrix(buffer, _TYPES[p.calc], shape, strides), self._pack(p.b, lines, inner, buffer, stack * rows.size, False)

    def _direct(self, x: Operand, shape: tuple[int, int, int], stack: Var | None, rows: Var, columns: Var) -> Matrix | None:
        """``x`` as BLAS reads it, where it lies in memory with one unit stride."""
        if x.direct is None or 0 in shape:
            return None
        load = x.tape.items[0]
        assert isinstance(load, Load), "a direct operand is one load"
        r, c = (load.offset.coefficient(v) for v in (rows, columns))
        r, c = (r or shape[2], c) if shape[1] == 1 else (r, c)
        r, c = (r, c or 1) if shape[2] == 1 else (r, c)
        if load.offset.const or not ((c == 1 and r >= shape[2]) or (r == 1 and c >= shape[1])):
            return None
        lead = load.offset.coefficient(stack) if stack else 0
        return Matrix(self.p.signature.memory_of(x.direct), _TYPES[self.p.calc], shape, (lead, r, c))

    # -- kernels --------------------------------------------------------------------------------------------------------------------------
    def _take(self, elements: int) -> Buffer:
        buffer = Buffer("workspace", -1, self.scratch)
        self.scratch += (elements * self.item + 255) // 256 * 256
        return buffer

    def _row(self, row: Row | None) -> list[str]:
        self.signature = self.p.signature.empty()
        return row_lines(row, self.signature, "int64", "o")

    def _walk(self, tape: Tape, lines: list[str], inner: Var) -> dict[str, Any]:
        """Fields of the template ``cpu/strips.py.j2`` for items ``o``, of which ``lines`` make the loop variables."""
        part = lanes(tape, self.signature, inner, 1, IndexWriter("int64"), IndexWriter("int64", "ql"))
        loops = {"start": "lo", "stop": "hi", "first": "0", "last": str(inner.size), "middle": [], "count": 1, "after": []}
        return {"header": self.title, **loops, "setup": [*lines, *part.setup], "body": part.body}

    def _pack(self, x: Operand, lines: list[str], inner: Var, target: Buffer, items: int, panel: bool) -> Launch:
        """Writes the values of ``x``, one row after the other; of a ``panel``, the first of which is given when it runs."""
        if not panel or self.parts.source is None:
            self.signature = self.p.signature.empty()
        fields = self._walk(x.tape, lines, inner)
        out = self.signature.buffer(self.p.calc, target, written=True)
        row = f"(o - {self.signature.value('int64', Constant(0, 'int64'))})" if panel else "o"
        fields["body"] = [*fields["body"], f"{out}[{row} * {inner.size} + jl] = {x.value}"]
        return self._launch(f"{self.words}_pack", fields, items, inner.size)

    def _epilogue(self, panel: Buffer) -> Launch:
        parts, p = self.parts, self.p
        lines = self._row(parts.target)
        items = parts.experts * p.m.size if parts.backward else parts.rows
        if parts.backward:
            lines = decompose("o", [parts.expert, p.m], "int64")
        elif parts.target is None:
            lines = ["m = o"]
        fields = self._walk(p.epilogue, lines, p.n)
        pointer = self.signature.buffer(p.calc, panel)
        base = self.signature.value("int64", Constant(0, "int64"))
        fields["body"] = [f"c = {p.c_text(f'{pointer}[(o - {base}) * {p.n.size} + jl]')}", *fields["body"]]
        return self._launch(self.words, fields, items, p.n.size)

    def _launch(self, words: str, fields: dict[str, Any], items: int, work: int) -> Launch:
        name = entry_name(words, fields, self.signature.params)
        self.kernels.append(KernelSpec("cpu/strips.py.j2", name, self.signature.params, fields))
        return Launch(len(self.kernels) - 1, items, self.signature.args, max(1, ceil_div(GRAIN, max(work, 1))))
