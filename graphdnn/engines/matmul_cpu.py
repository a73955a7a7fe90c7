"""Lowering of a matmul region for a CPU: BLAS by panels with the epilogue while the panel is in cache, or dot products for what BLAS lacks."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from graphdnn.codegen.spec import Buffer, Constant, KernelSpec, Launch, Matrix, Memset, Panels, Recipe, Step
from graphdnn.codegen.tape import Load
from graphdnn.dtypes import data_type
from graphdnn.engines.base import Scratch, ceil_div, entry_name, power_of_two
from graphdnn.engines.matmul_parts import MatmulParts, Operand
from graphdnn.engines.matmul_sums import Partials, end_of, finish, partials
from graphdnn.engines.strips import GRAIN, Strips, merged, runs_along_rows, strip_of, strips
from graphdnn.ir.index import Linear, Var, depends, rename, var

DEPTH = 8192
"""Longest sum whose packed input still stays in cache; a longer one is made in chunks."""
STACK = 1 << 17
"""Bytes of a packed row on a thread's stack."""
BLOCK = 1 << 15
"""Results that are reduced together, in 16 to 128 whole rows: how they are cut must not depend on threads."""
BLAS = {"float32": data_type.FLOAT, "float64": data_type.DOUBLE}
"""Register types that BLAS multiplies."""


def lower(parts: MatmulParts, rows: int, words: str, title: list[str]) -> Recipe:
    """Kernels and steps; ``rows``: rows of a panel."""
    if parts.reduced == 0:
        return Recipe((), ())
    lowering = _Lowering(parts, words, title)
    return lowering.panels(rows) if parts.calc in BLAS else lowering.dots()


class _Lowering:
    def __init__(self, parts: MatmulParts, words: str, title: list[str]) -> None:
        self.parts, self.words, self.title = parts, words, title
        self.scratch = Scratch()
        self.kernels: list[KernelSpec] = []
        self.item = 8 if parts.calc.endswith("64") else 4
        loops = parts.loops
        self.batch, self.m, self.k, self.a, self.b = list(parts.batch), list(loops.m), list(loops.k), loops.a, loops.b
        self.chunks: list[Var] = []
        self.block = max(16, min(128, power_of_two(BLOCK // max(parts.n.size, 1) // 2 + 1))) if parts.sums else 1

    @property
    def stack(self) -> list[Var]:
        """Loops over the products that BLAS makes."""
        return [*self.batch, *self.chunks]

    # -- steps ----------------------------------------------------------------------------------------------------------------------------
    def panels(self, rows: int) -> Recipe:
        self._promote()
        self._cut()
        p = self.parts
        batches, m, n = _count(self.stack), _count(self.m), p.n.size
        whole = batches == 1 or rows < m or bool(self.chunks)  # chunks of one product are added one after the other
        rows = min(self._strips(rows), m) if whole else min(rows // m, batches) * m
        if p.sums and rows < m:
            rows = min(ceil_div(rows, self.block) * self.block, m)
        dtype = BLAS[p.calc]
        a, pack_a = self._left(dtype, rows)
        b, pack_b = self._right(dtype)
        along_rows = any(x is not None and x.kind == "row" for x in p.places) or runs_along_rows(p.loops.epilogue, self.m, (p.n,))
        panel = Matrix(self.scratch.take(rows * n * self.item), dtype, (1, rows, n), (0, n, 1) if along_rows else (0, 1, rows))
        if not self.chunks:
            epilogue, after = self._epilogue(panel, along_rows, True)
            return self._recipe(Panels(a, b, panel, rows, epilogue, pack_a, pack_b, self.block), *after)
        size = _count(self.batch) * m * n * self.item
        total = Matrix(self.scratch.take(size), dtype, (_count(self.batch), m, n), (m * n, n, 1))
        panel = replace(panel, strides=(0, n, 1))
        add = self._add(panel, total)
        epilogue, after = self._epilogue(total, True, False)
        return self._recipe(Memset(total.buffer, size), Panels(a, b, panel, rows, add, pack_a, pack_b), epilogue, *after)

    def _recipe(self, *steps: Step) -> Recipe:
        return Recipe(tuple(self.kernels), steps, self.scratch.size)

    def _strips(self, rows: int) -> int:
        """``rows`` rounded up to whole strips of the packed input."""
        strip = 1 if self.a.direct is not None else strip_of(merged(self.a.tape, self.m)[0], runs_along_rows(self.a.tape, self.m, self.k))
        return ceil_div(rows, strip) * strip

    def _promote(self) -> None:
        """An input that lies in memory as a stack of matrices is not packed: its outer loop becomes that of the stack."""
        if self.batch or self.a.direct is None:
            return
        rows, depth = merged(self.a.tape, self.m)[0], merged(self.a.tape, self.k)[0]
        if len(rows) == 2 and len(depth) < 2:
            self.batch, self.m = self._leading(self.m, rows[1])
        elif len(rows) < 2 and len(depth) == 2:
            self.chunks, self.k = self._leading(self.k, depth[1])

    def _leading(self, loops: list[Var], inner: Var) -> tuple[list[Var], list[Var]]:
        """``loops`` cut in front of those that make up ``inner``."""
        at = len(loops)
        while _count(loops[at:]) < inner.size:
            at -= 1
        return loops[:at], loops[at:]

    def _cut(self) -> None:
        """Cut a sum that is too long into chunks of equal length, where its loops allow it."""
        if self.chunks or self.a.direct is not None or _count(self.k) <= DEPTH:
            return
        for at, v in enumerate(self.k):
            rest = _count(self.k[at + 1 :])
            inner = next((d for d in range(min(v.size, DEPTH // max(rest, 1)), 0, -1) if v.size % d == 0), 0)
            if inner * rest * 16 > DEPTH:
                outer, part = Var(f"{v.name}o", v.size // inner), Var(f"{v.name}i", inner)
                self._rename({v: var(outer).scaled(inner) + var(part)})
                self.chunks, self.k = [*self.k[:at], outer], [u for u in (part, *self.k[at + 1 :]) if u.size != 1]
                return

    def _rename(self, names: dict[Var, Linear]) -> None:
        self.a, self.b = (x.mapped(lambda t: t.mapped(lambda e: rename(e, names))) for x in (self.a, self.b))

    def dots(self) -> Recipe:
        p = self.parts
        m, n, k = _count(self.m), p.n.size, p.k.size
        signature = self._fresh()
        fields = self._rows_fields(signature)
        b = self.scratch.take(p.batches * n * k * self.item)
        steps = [self._pack(self.b, (p.n,), self.k, b, None, p.batch)] if k else []
        fields |= {"right": f"(o // {m} * {n} + jl) * {k}", "depth": k, "calc": p.calc, "c": p.c_text("total")}
        fields |= {"columns": n, "pb": signature.buffer(p.calc, b), "local": k * self.item <= STACK and k > 0}
        if fields["local"]:
            packed = strips(self.a.tape, signature, p.batch, self.m, self.k, True)
            packed.fields["body"].append(f"row[{packed.column}] = {self.a.value}")
            fields |= {"pa": "row", "left": "0", "packed": packed.fields}
        else:
            a = self.scratch.take(p.batches * m * k * self.item)
            steps += [self._pack(self.a, self.m, self.k, a, None, p.batch)] if k else []
            fields |= {"pa": signature.buffer(p.calc, a), "left": f"o * {k}"}
        found = self._partials(m)
        fields["after"] = [f"{signature.buffer(s.acc.hold, s.buffer, written=True)}[o] = {s.acc.name}" for s in found]
        name = entry_name(self.words, fields, signature.params)
        launch = self._launch(KernelSpec("cpu/matmul_dot.py.j2", name, signature.params, fields), p.batches * m, signature.args, k * n)
        return self._recipe(*steps, launch, *self._combine(found))

    # -- inputs ---------------------------------------------------------------------------------------------------------------------------
    def _left(self, dtype: data_type, rows: int) -> tuple[Matrix, Launch | None]:
        m, k = _count(self.m), _count(self.k)
        shape = (_count(self.stack), m, k)
        direct = self._direct(self.a, dtype, shape, self.m, self.k)
        if direct is not None or 0 in shape:
            return direct or Matrix(Buffer("workspace", -1, 0), dtype, shape, (0, max(k, 1), 1)), None
        buffer = self.scratch.take(rows * k * self.item)
        along_rows = runs_along_rows(self.a.tape, self.m, self.k)
        strides = (0, k, 1) if along_rows else (0, 1, rows)
        return Matrix(buffer, dtype, shape, strides), self._pack(self.a, self.m, self.k, buffer, Constant(0, "int64"), self.stack, strides)

    def _right(self, dtype: data_type) -> tuple[Matrix, Launch | None]:
        k, n = _count(self.k), self.parts.n
        shape = (_count(self.stack), k, n.size)
        direct = self._direct(self.b, dtype, shape, self.k, (n,))
        if direct is not None or 0 in shape:
            return direct or Matrix(Buffer("workspace", -1, 0), dtype, shape, (0, max(n.size, 1), 1)), None
        shared = not any(depends(e, v) for e in self.b.tape.linears() for v in self.stack)
        batch = [] if shared else self.stack
        buffer = self.scratch.take(_count(batch) * k * n.size * self.item)
        stride = 0 if shared else k * n.size
        return Matrix(buffer, dtype, shape, (stride, n.size, 1)), self._pack(self.b, self.k, (n,), buffer, None, batch)

    def _direct(self, x: Operand, dtype: data_type, shape: tuple[int, int, int], rows: Sequence[Var], columns: Sequence[Var]) -> Matrix | None:
        """``x`` as BLAS reads it, where it lies in memory with one unit stride and one batch stride."""
        by, tape = merged(x.tape, rows)
        across, tape = merged(tape, columns)
        batch, tape = merged(tape, self.stack)
        if x.direct is None or max(len(by), len(across), len(batch)) > 1:
            return None
        load = tape.items[0]
        assert isinstance(load, Load), "a direct operand is one load"
        e: Linear = load.offset
        r, c = (e.coefficient(v[0]) if v else 0 for v in (by, across))
        r, c = (r or shape[2], c) if shape[1] == 1 else (r, c)
        r, c = (r, c or 1) if shape[2] == 1 else (r, c)
        plain = (c == 1 and r >= shape[2]) or (r == 1 and c >= shape[1])
        if not plain or e.const:
            return None
        step = e.coefficient(batch[0]) if batch else 0
        return Matrix(self.parts.signature.memory_of(x.direct), dtype, shape, (step, r, c))

    def _pack(
        self,
        x: Operand,
        rows: Sequence[Var],
        columns: Sequence[Var],
        target: Buffer,
        first: Constant | None,
        batch: Sequence[Var],
        strides: tuple[int, int, int] | None = None,
    ) -> Launch:
        """A kernel that writes the values of ``x``; ``first``: the first row of a panel, given when it runs; ``strides``: of the copy, by rows."""
        width = _count(columns)
        strides = strides or (0, width, 1)
        signature = self._fresh()
        walk = strips(x.tape, signature, batch, rows, columns, strides[2] == 1)
        out = signature.buffer(self.parts.calc, target, written=True)
        base = signature.value("int64", first) if first is not None else None
        walk.fields["body"].append(f"{out}[{_place(walk, base, strides)}] = {x.value}")
        fields = walk.fields | {"header": [*self.title, "# packs an input of the matmul"]}
        name = entry_name(f"{self.words}_pack", fields, signature.params)
        kernel = KernelSpec("cpu/strips.py.j2", name, signature.params, fields)
        return self._launch(kernel, _count(batch) * _count(rows), signature.args, width, walk.grain(width))

    # -- epilogue -------------------------------------------------------------------------------------------------------------------------
    def _epilogue(self, source: Matrix, along_rows: bool, panel: bool) -> tuple[Launch, list[Step]]:
        """A kernel that finishes the results in ``source``: a ``panel``, whose first row is given when it runs, or all of them."""
        p = self.parts
        signature = self._fresh()
        walk = strips(p.loops.epilogue, signature, self.batch, self.m, (p.n,), along_rows, ("row0", "row1") if p.sums else ("lo", "hi"))
        fields = walk.fields | {"header": self.title}
        pointer = signature.buffer(p.calc, source.buffer)
        blocks = ceil_div(_count(self.m), self.block)
        found = self._partials(_count(self.batch) // p.batches * blocks)
        fields |= self._blocks(found, signature, walk, along_rows) if found else {}
        base = signature.value("int64", Constant(0, "int64")) if panel else None
        fields["body"] = [f"c = {p.c_text(f'{pointer}[{_place(walk, base, source.strides)}]')}", *fields["body"]]
        template = "cpu/strip_blocks.py.j2" if found else "cpu/strips.py.j2"
        kernel = KernelSpec(template, entry_name(self.words, fields, signature.params), signature.params, fields)
        items, grain = (blocks, None) if found else (_count(self.m), walk.grain(p.n.size))
        launch = self._launch(kernel, _count(self.batch) * items, signature.args, self.block * p.n.size, grain)
        return launch, self._combine(found)

    def _add(self, panel: Matrix, total: Matrix) -> Launch:
        """A kernel that adds a panel of one chunk to the sums. Panels come one after the other, so that the order of additions is fixed."""
        signature = self._fresh()
        calc, m, n = self.parts.calc, _count(self.m), self.parts.n.size
        source, out = signature.buffer(calc, panel.buffer), signature.buffer(calc, total.buffer, written=True)
        base = signature.value("int64", Constant(0, "int64"))
        setup = [f"target = (o // {m * _count(self.chunks)} * {m} + o % {m}) * {n}"]
        body = [f"{out}[target + jl] = {calc}({out}[target + jl] + {source}[(o - {base}) * {n} + jl])"]
        fields: dict[str, Any] = {"header": [*self.title, "# adds a chunk of the sum"], "start": "lo", "stop": "hi", "first": "0", "last": str(n)}
        fields |= {"setup": setup, "middle": [], "count": 1, "body": body, "after": []}
        name = entry_name(f"{self.words}_add", fields, signature.params)
        return self._launch(KernelSpec("cpu/strips.py.j2", name, signature.params, fields), m, signature.args, n)

    def _rows_fields(self, signature: Any) -> dict[str, Any]:
        p = self.parts
        walk = strips(p.loops.epilogue, signature, p.batch, self.m, (p.n,), True)
        setup = [*walk.fields["setup"], *(f"{s.name} = {s.identity}" for s in p.sums)]
        return {"header": self.title, "setup": setup, "body": walk.fields["body"], "after": []}

    # -- reductions -----------------------------------------------------------------------------------------------------------------------
    def _partials(self, down: int) -> list[Partials]:
        """Partial results where the rows of a batch are cut into ``down`` pieces."""
        found = partials(self.parts, self.scratch.size, 1, down)
        self.scratch.size = end_of(found, self.scratch.size)
        return found

    def _combine(self, found: list[Partials]) -> list[Step]:
        ends = [finish(self.parts, s, self.words, self.title, "int64", False) for s in found]
        return [self._launch(kernel, items, args, s.each) for s, (kernel, items, args) in zip(found, ends, strict=True)]

    def _blocks(self, found: list[Partials], signature: Any, walk: Strips, along_rows: bool) -> dict[str, Any]:
        """Fields of the template ``cpu/strip_blocks.py.j2``: accumulators of a block, of each row, or, in memory or in turn, of each column."""
        n, m = self.parts.n.size, _count(self.m)
        blocks = ceil_div(m, self.block)
        first = f"block // {blocks} * {m}"
        span = [f"row0 = {first} + block % {blocks} * {self.block}", f"row1 = min(row0 + {self.block}, {first} + {m})"]
        lines: dict[str, list[str]] = {k: [] for k in ("starts", "starts_of_columns", "after_column", "ends")}
        lines |= {k: list(walk.fields[k]) for k in ("setup", "middle", "body", "after")}
        for s in found:
            name, p = s.acc.name, signature.buffer(s.acc.hold, s.buffer, written=True)
            if s.place.kind == "full":
                lines["starts"].append(f"{name} = {s.acc.identity}")
                lines["ends"].append(f"{p}[block] = {name}")
            elif s.place.kind == "row":
                lines["setup"].append(f"{name} = {s.acc.identity}")
                lines["after"].append(f"{p}[o] = {name}")
            else:
                lines["starts_of_columns"].append(f"{p}[block * {n} + e] = {s.acc.identity}")
                column = f"{p}[block * {n} + {walk.column}]"
                if along_rows:
                    lines["body"] = [re.sub(rf"\b{name}\b", column, line) for line in lines["body"]]
                else:
                    lines["middle" if walk.fields["middle"] else "setup"].append(f"{name} = {column}")
                    lines["after_column"].append(f"{column} = {name}")
        return lines | {"span": span, "columns": n}

    # -- small things ---------------------------------------------------------------------------------------------------------------------
    def _fresh(self) -> Any:
        return self.parts.signature.empty()

    def _launch(self, kernel: KernelSpec, items: int, args: tuple[Any, ...], work: int, grain: int | None = None) -> Launch:
        self.kernels.append(kernel)
        return Launch(len(self.kernels) - 1, items, args, grain or max(1, ceil_div(GRAIN, max(work, 1))))


def _count(loops: Sequence[Var]) -> int:
    return math.prod(v.size for v in loops)


def _place(walk: Strips, base: str | None, strides: tuple[int, int, int]) -> str:
    """Element of a matrix with these strides, of which row ``base`` is the first in memory."""
    row = f"({walk.row} - {base})" if base else walk.row if walk.row == "o" else f"({walk.row})"
    column = walk.column if walk.column.isalnum() else f"({walk.column})"
    return f"{row} * {strides[1]} + {column}" if strides[2] == 1 else f"{row} + {column} * {strides[2]}"
