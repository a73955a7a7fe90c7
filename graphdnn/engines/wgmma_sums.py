"""Reductions in the epilogue of a wgmma matmul, the same in every run: partial results in the workspace, combined in a fixed order.

*full*: each warp of the grid leaves one partial result; the last warp to arrive combines them. *row* / *column*: one partial result for every row and
64 columns, or every column and 16 rows; a second kernel combines them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from graphdnn.codegen.body import Signature, tape_lines
from graphdnn.codegen.dialect import IndexWriter, decompose
from graphdnn.codegen.spec import Arg, Buffer, KernelSpec, Memset, Step
from graphdnn.codegen.tape import Assign, Tape, TapeBuilder
from graphdnn.dtypes import info
from graphdnn.engines.base import ceil_div
from graphdnn.engines.reduction_cuda import combining
from graphdnn.engines.reduction_parts import Accumulator
from graphdnn.engines.wgmma_parts import Reduced, WgmmaParts
from graphdnn.ir.index import ZERO, Index, Var, var
from graphdnn.passes.places import reduced_axes

MASKS = (1, 2, 4, 8, 16)
"""Lanes of a warp that meet, by exclusive or."""
ROWS, COLUMNS = 16, 64
"""Of the piece of the result that a warp handles at a time."""
COUNTER = 256
"""Bytes before the partial results; the counter of finished warps is the first four."""
_THREADS = 256


@dataclass(frozen=True)
class Sum:
    """One reduction. ``partials``: partial results of one result; ``results``: results; ``scratch``: their workspace buffer, partial r of result o at
    element r * results + o."""

    acc: Accumulator
    reduced: Reduced
    partials: int
    results: int
    count: int
    scratch: Buffer


@dataclass(frozen=True)
class Sums:
    """All reductions of one kernel."""

    wgmma: WgmmaParts
    signature: Signature
    sums: tuple[Sum, ...]
    warps: int
    block_warps: int

    @staticmethod
    def plan(wgmma: WgmmaParts, signature: Signature, blocks: int, block_warps: int) -> Sums:
        """Lay the partial results out in the workspace, for a grid of ``blocks`` blocks with ``block_warps`` consumer warps each."""
        found, at, warps = [], COUNTER, blocks * block_warps
        for acc, reduced in zip(wgmma.parts.sums, wgmma.reduced, strict=True):
            partials, results, count = _sizes(wgmma, reduced, warps)
            found.append(Sum(acc, reduced, partials, results, count, Buffer("workspace", -1, at)))
            at = (at + partials * results * (8 if acc.hold.endswith("64") else 4) + 255) // 256 * 256
        return Sums(wgmma, signature, tuple(found), warps, block_warps)

    @property
    def nbytes(self) -> int:
        """Bytes of workspace."""
        if not self.sums:
            return 0
        last = self.sums[-1]
        size = last.partials * last.results * (8 if last.acc.hold.endswith("64") else 4)
        return max((last.scratch.offset + size + 255) // 256 * 256, self._spare())

    def _spare(self) -> int:
        """What the portable engine needs for the full reductions in tiles of 128 x 64: it serves buffers that turn out to be unaligned."""
        rows, columns = self.wgmma.parts.m.size, self.wgmma.parts.n.size
        tiles = self.wgmma.parts.batches * ceil_div(rows, 128) * ceil_div(columns, 64)
        return COUNTER + sum((tiles * (8 if s.acc.hold.endswith("64") else 4) + 255) // 256 * 256 for s in self._of("full"))

    def _of(self, kind: str) -> list[Sum]:
        return [s for s in self.sums if s.reduced.kind == kind]

    def steps(self) -> list[Step]:
        """What runs before the kernel."""
        return [Memset(Buffer("workspace", -1, 0), 4)] if self._of("full") else []

    def renamed(self, tape: Tape) -> Tape:
        """The epilogue with one accumulator a lane for sums of columns."""
        names = {s.acc.name for s in self._of("column")}

        def lane(item: Any) -> Any:
            if not isinstance(item, Assign) or item.name not in names:
                return item
            text = re.sub(rf"\b{item.name}\b", f"{item.name}[l]", item.expr)
            return replace(item, name=f"{item.name}[l]", expr=text)

        return Tape([lane(i) for i in tape.items])

    def fields(self) -> dict[str, Any]:
        """What the template needs; three lists by kind, and the end of the full reductions."""
        width = self.wgmma.width
        across = COLUMNS // width
        masks = {"row": [m for m in MASKS if m < across], "column": [m for m in MASKS if m >= across], "full": list(MASKS)}
        made: dict[str, Any] = {kind: [self._row(s, masks[kind]) for s in self._of(kind)] for kind in masks}
        made |= {"warps": self.warps, "last": self.warps - 1, "block_warps": self.block_warps}
        made["counter"] = self.signature.buffer("uint32", Buffer("workspace", -1, 0), written=True) if made["full"] else ""
        return made

    def _row(self, s: Sum, masks: list[int]) -> dict[str, Any]:
        name = f"{s.acc.name}[l]" if s.reduced.kind == "column" else s.acc.name
        partial = self.signature.buffer(s.acc.hold, s.scratch, written=True)
        row: dict[str, Any] = {
            "name": s.acc.name,
            "hold": s.acc.hold,
            "start": s.acc.identity,
            "meet": [f"{name} = {s.acc.combined(name, f'shuffle_xor({name}, {m})')}" for m in masks],
            "partial": partial,
            "place": self._place(s),
        }
        if s.reduced.kind == "full":
            out = s.acc.node.output_ids[0]
            graph = self.signature.graph
            row["gather"] = f"{name} = {s.acc.combined(name, f'{partial}[r]')}"
            row["result"] = s.acc.finished(name, s.count, graph)
            row["target"] = self.signature.pointer(out, written=True)
            row["encoded"] = info(graph.tensors[out].dtype).encode.format("y")
        return row

    def _place(self, s: Sum) -> str:
        """Element of the partial result of a row and 64 columns from ``first_column``, or of column ``jl`` and 16 rows from ``first_row``."""
        rows, columns = self.wgmma.rows.free, self.wgmma.columns.free
        if s.reduced.kind == "row":
            number, result, blocks, size = "uint32(first_column >> uint32(6))", rows.name, ceil_div(columns.size, COLUMNS), rows.size
        else:
            number, result, blocks, size = "uint32(first_row >> uint32(4))", "jl", ceil_div(rows.size, ROWS), columns.size
        if self.wgmma.parts.batches > 1 and s.reduced.batch:
            number = f"uint32(uint32(tb * uint32({blocks})) + {number})"
        elif self.wgmma.parts.batches > 1:
            result = f"uint32(uint32(tb * uint32({size})) + {result})"
        return f"uint32(uint32({number} * uint32({s.results})) + {result})"

    def finish(self, words: str, title: list[str]) -> list[tuple[KernelSpec, int, tuple[Arg, ...]]]:
        """Kernel, blocks and arguments of the step that combines each sum of rows or columns."""
        return [self._second(s, words, title) for s in self.sums if s.reduced.kind != "full"]

    def _second(self, s: Sum, words: str, title: list[str]) -> tuple[KernelSpec, int, tuple[Arg, ...]]:
        signature = self.signature.empty()
        scratch = signature.buffer(s.acc.hold, s.scratch)
        loop, index = self._results(s)
        builder = TapeBuilder(signature.graph, (), {s.acc.node.output_ids[0]: (s.acc.result, index)}, prefix="w")
        builder.store(s.acc.node.output_ids[0], index)
        fields = {
            "header": title,
            "itype": "uint32",
            "sums": [{"name": s.acc.name, "hold": s.acc.hold, "identity": s.acc.identity, "tree": s.acc.combined("left", "right"), "slot": "part0"}],
            "outputs": s.results,
            "output_split": decompose("o", loop, "uint32"),
            "body": [f"{s.acc.name} = {s.acc.combined(s.acc.name, f'{scratch}[uint32(uint32(r * uint32({s.results})) + o)]')}"],
            "finish": [
                f"{s.acc.result} = {s.acc.finished(s.acc.name, s.count, signature.graph)}",
                *tape_lines(builder.tape, signature, IndexWriter("uint32", "qe")),
            ],
        }
        kernel, blocks = combining(fields, s.partials, signature.params, words, _THREADS)
        return kernel, blocks, signature.args

    def _results(self, s: Sum) -> tuple[list[Var], Index]:
        """Loop variables over the results, and the index of one."""
        graph, node = self.signature.graph, self.wgmma.parts.node
        dim = graph.tensors[node.output_ids[0]].dim
        kept = (self.wgmma.rows if s.reduced.kind == "row" else self.wgmma.columns).free
        at = {self.wgmma.parts.m: len(dim) - 2, self.wgmma.parts.n: len(dim) - 1}[kept]
        loop = [Var(f"o{a}", d) for a, d in enumerate(dim)]
        alive = [a for a in range(len(dim)) if a == at or (a < len(dim) - 2 and not s.reduced.batch)]
        full = tuple(var(v) if a in alive else ZERO for a, v in enumerate(loop))
        rank = len(graph.tensors[s.acc.node.output_ids[0]].dim)
        return [loop[a] for a in alive], full if rank == len(dim) else tuple(full[a] for a in _kept_axes(s, dim, graph))


def _kept_axes(s: Sum, dim: tuple[int, ...], graph: Any) -> list[int]:
    gone = reduced_axes(graph, s.acc.node)
    return [a for a in range(len(dim)) if a not in gone]


def _sizes(wgmma: WgmmaParts, reduced: Reduced, warps: int) -> tuple[int, int, int]:
    """Partial results of a result, results, and elements of the space behind each."""
    rows, columns, batches = wgmma.rows.free.size, wgmma.columns.free.size, wgmma.parts.batches
    if reduced.kind == "full":
        return warps, 1, wgmma.parts.reduced
    kept, gone, blocks = (rows, columns, ceil_div(columns, COLUMNS)) if reduced.kind == "row" else (columns, rows, ceil_div(rows, ROWS))
    return (blocks * batches, kept, gone * batches) if reduced.batch else (blocks, kept * batches, gone)
