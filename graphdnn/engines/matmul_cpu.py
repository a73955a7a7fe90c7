"""Lowering of a matmul region for a CPU: BLAS by panels with the epilogue while the panel is in cache, or dot products for what BLAS lacks."""

from __future__ import annotations

import math
from typing import Any

from graphdnn.codegen.body import Lanes, lanes
from graphdnn.codegen.dialect import IndexWriter, decompose
from graphdnn.codegen.spec import Buffer, Constant, KernelSpec, Launch, Matrix, Panels, Recipe, Step
from graphdnn.codegen.tape import Load, Tape
from graphdnn.dtypes import data_type, info
from graphdnn.engines.base import ceil_div, entry_name
from graphdnn.engines.matmul_parts import MatmulParts, Operand
from graphdnn.ir.index import Linear, Var, depends

GRAIN = 8192
"""Elements that are worth handing to another thread."""
_BLAS = {"float32": data_type.FLOAT, "float64": data_type.DOUBLE}


class _Scratch:
    """Hands out workspace."""

    def __init__(self) -> None:
        self.size = 0

    def take(self, nbytes: int) -> Buffer:
        buffer = Buffer("workspace", -1, self.size)
        self.size += (nbytes + 255) // 256 * 256
        return buffer


def lower(parts: MatmulParts, rows: int, words: str, title: list[str]) -> Recipe:
    """Kernels and steps; ``rows``: rows of a panel."""
    if parts.reduced == 0:
        return Recipe((), ())
    lowering = _Lowering(parts, words, title)
    return lowering.panels(rows) if parts.calc in _BLAS else lowering.dots()


class _Lowering:
    def __init__(self, parts: MatmulParts, words: str, title: list[str]) -> None:
        self.parts, self.words, self.title = parts, words, title
        self.scratch = _Scratch()
        self.kernels: list[KernelSpec] = []
        self.item = 8 if parts.calc.endswith("64") else 4

    # -- steps ----------------------------------------------------------------------------------------------------------------------------
    def panels(self, rows: int) -> Recipe:
        p = self.parts
        batches, m, n, k = p.batches, p.m.size, p.n.size, p.k.size
        rows = min(rows, m) if batches == 1 or rows < m else min(rows // m, batches) * m
        dtype = _BLAS[p.calc]
        a, pack_a = self._left(dtype, rows)
        b, pack_b = self._right(dtype)
        panel = Matrix(self.scratch.take(rows * n * self.item), dtype, (1, rows, n), (0, n, 1))
        epilogue, after = self._epilogue(panel.buffer)
        steps: list[Step] = [Panels(a, b, panel, rows, epilogue, pack_a, pack_b), *after]
        assert a.shape == (batches, m, k), "rows of A count through the batches"
        return Recipe(tuple(self.kernels), tuple(steps), self.scratch.size)

    def dots(self) -> Recipe:
        p = self.parts
        m, n, k = p.m, p.n, p.k
        a = self.scratch.take(p.batches * m.size * k.size * self.item)
        b = self.scratch.take(p.batches * n.size * k.size * self.item)
        steps: list[Step] = [self._pack(p.a, m, k, a, None), self._pack(p.b, n, k, b, None)]
        steps = [s for s in steps if k.size]
        signature = self._fresh()
        pa, pb = signature.buffer(p.calc, a), signature.buffer(p.calc, b)
        fields = self._rows_fields(signature, p.epilogue) | {
            "left": f"o * {k.size}",
            "right": f"(o // {m.size} * {n.size} + jl) * {k.size}",
            "depth": k.size,
            "pa": pa,
            "pb": pb,
            "calc": p.calc,
            "c": p.c_text("total"),
        }
        last, after = self._sums(signature, fields)
        name = entry_name(self.words, fields, signature.params)
        launch = self._launch(KernelSpec("cpu/matmul_dot.py.j2", name, signature.params, fields), p.batches * m.size, last, k.size * n.size)
        return Recipe(tuple(self.kernels), (*steps, launch, *after), self.scratch.size)

    # -- inputs ---------------------------------------------------------------------------------------------------------------------------
    def _left(self, dtype: data_type, rows: int) -> tuple[Matrix, Launch | None]:
        p = self.parts
        shape = (p.batches, p.m.size, p.k.size)
        direct = self._direct(p.a, dtype, shape, p.m, p.k)
        if direct is not None or 0 in shape:
            return direct or Matrix(Buffer("workspace", -1, 0), dtype, shape, (0, max(p.k.size, 1), 1)), None
        buffer = self.scratch.take(rows * p.k.size * self.item)
        return Matrix(buffer, dtype, shape, (0, p.k.size, 1)), self._pack(p.a, p.m, p.k, buffer, Constant(0, "int64"))

    def _right(self, dtype: data_type) -> tuple[Matrix, Launch | None]:
        p = self.parts
        shape = (p.batches, p.k.size, p.n.size)
        direct = self._direct(p.b, dtype, shape, p.k, p.n)
        if direct is not None or 0 in shape:
            return direct or Matrix(Buffer("workspace", -1, 0), dtype, shape, (0, max(p.n.size, 1), 1)), None
        shared = not any(depends(e, v) for e in p.b.tape.linears() for v in p.batch)
        batch = [] if shared else p.batch
        count = math.prod(v.size for v in batch)
        buffer = self.scratch.take(count * p.k.size * p.n.size * self.item)
        stride = 0 if shared else p.k.size * p.n.size
        return Matrix(buffer, dtype, shape, (stride, p.n.size, 1)), self._pack(p.b, p.k, p.n, buffer, None, batch)

    def _direct(self, x: Operand, dtype: data_type, shape: tuple[int, int, int], rows: Var, columns: Var) -> Matrix | None:
        """``x`` as BLAS reads it, where it lies in memory with one unit stride and one batch stride."""
        if x.direct is None or len(self.parts.batch) > 1:
            return None
        load = x.tape.items[0]
        assert isinstance(load, Load), "a direct operand is one load"
        e: Linear = load.offset
        r, c = e.coefficient(rows), e.coefficient(columns)
        r, c = (r or columns.size, c) if rows.size == 1 else (r, c)
        r, c = (r, c or 1) if columns.size == 1 else (r, c)
        plain = (c == 1 and r >= columns.size) or (r == 1 and c >= rows.size)
        if not plain or e.const:
            return None
        step = e.coefficient(self.parts.batch[0]) if self.parts.batch else 0
        memory = self.parts.signature.memory_of(x.direct)
        return Matrix(memory, dtype, shape, (step, r, c))

    def _pack(self, x: Operand, rows: Var, columns: Var, target: Buffer, first: Constant | None, batch: list[Var] | None = None) -> Launch:
        """A kernel that writes the values of ``x`` row by row; ``first``: the first row of a panel, given when it runs."""
        batch = self.parts.batch if batch is None else batch
        signature = self._fresh()
        part = lanes(x.tape, signature, columns, 1, IndexWriter("int64"), IndexWriter("int64", "ql"))
        out = signature.buffer(self.parts.calc, target, written=True)
        base = signature.value("int64", first) if first is not None else None
        row = f"(o - {base})" if base else "o"
        fields = {
            "header": [*self.title, "# packs an input of the matmul"],
            "flat": False,
            "setup": [*decompose("o", [*batch, rows], "int64"), *part.setup],
            "first": "0",
            "last": str(columns.size),
            "body": [*part.body, f"{out}[{row} * {columns.size} + jl] = {x.value}"],
            "after": [],
        }
        name = entry_name(f"{self.words}_pack", fields, signature.params)
        kernel = KernelSpec("cpu/pointwise.py.j2", name, signature.params, fields)
        return self._launch(kernel, math.prod(v.size for v in batch) * rows.size, signature.args, columns.size)

    # -- epilogue -------------------------------------------------------------------------------------------------------------------------
    def _epilogue(self, panel: Buffer) -> tuple[Launch, list[Step]]:
        p = self.parts
        signature = self._fresh()
        fields = self._rows_fields(signature, p.epilogue)
        source = signature.buffer(p.calc, panel)
        sums, after = self._sums(signature, fields)
        base = signature.value("int64", Constant(0, "int64"))
        total = p.c_text(f"{source}[(o - {base}) * {p.n.size} + jl]")
        fields["body"] = [f"c = {total}", *fields["body"]]
        fields |= {"flat": False, "first": "0", "last": str(p.n.size)}
        del sums
        kernel = KernelSpec("cpu/pointwise.py.j2", entry_name(self.words, fields, signature.params), signature.params, fields)
        return self._launch(kernel, p.batches * p.m.size, signature.args, p.n.size), after

    def _rows_fields(self, signature: Any, tape: Tape) -> dict[str, Any]:
        p = self.parts
        part: Lanes = lanes(tape, signature, p.n, 1, IndexWriter("int64"), IndexWriter("int64", "ql"))
        starts = [f"{s.name} = {s.identity}" for s in p.sums]
        setup = [*decompose("o", [*p.batch, p.m], "int64"), *part.setup, *starts]
        return {"header": self.title, "setup": setup, "body": part.body, "after": [], "columns": p.n.size}

    def _sums(self, signature: Any, fields: dict[str, Any]) -> tuple[tuple[Any, ...], list[Step]]:
        """Adds a partial result per row to ``fields``; returns the arguments so far and the steps that combine them."""
        p = self.parts
        steps: list[Step] = []
        for s in p.sums:
            buffer = self.scratch.take(p.batches * p.m.size * (8 if s.hold.endswith("64") else 4))
            fields["after"] = [*fields["after"], f"{signature.buffer(s.hold, buffer, written=True)}[o] = {s.name}"]
            steps.append(self._combine(s, buffer))
        return signature.args, steps

    def _combine(self, s: Any, partial: Buffer) -> Launch:
        p = self.parts
        signature = self._fresh()
        source = signature.buffer(s.hold, partial)
        out = signature.graph.tensors[s.node.output_ids[0]]
        value = s.finished(s.name, p.reduced, signature.graph)
        target = signature.pointer(s.node.output_ids[0], written=True)
        fields = {
            "header": self.title,
            "sums": [{"name": s.name, "identity": s.identity}],
            "split": p.batches * p.m.size,
            "output_split": [],
            "body": [f"{s.name} = {s.combined(s.name, f'{source}[r]')}"],
            "finish": [f"y = {value}", f"{target}[0] = {info(out.dtype).encode.format('y')}"],
        }
        name = entry_name(f"{self.words}_finish", fields, signature.params)
        return self._launch(KernelSpec("cpu/reduction_finish.py.j2", name, signature.params, fields), 1, signature.args, 1)

    # -- small things ---------------------------------------------------------------------------------------------------------------------
    def _fresh(self) -> Any:
        return self.parts.signature.empty()

    def _launch(self, kernel: KernelSpec, items: int, args: tuple[Any, ...], work: int) -> Launch:
        self.kernels.append(kernel)
        return Launch(len(self.kernels) - 1, items, args, max(1, ceil_div(GRAIN, max(work, 1))))
