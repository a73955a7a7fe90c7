"""Lowering of a reduction region for a CPU: one result at a time, a tile of neighbouring results, or parts of the range that are combined after."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from graphdnn.codegen.body import lanes
from graphdnn.codegen.dialect import IndexWriter, decompose
from graphdnn.codegen.spec import KernelSpec, Launch, Recipe
from graphdnn.engines.base import Knobs, ceil_div, entry_name
from graphdnn.engines.reduction_parts import ReductionParts
from graphdnn.ir.index import Var

CHUNK = 16384
"""Elements that are worth handing to another thread, and that one part of a split reduction takes."""
COLUMNS, TILES = (64, 512), 16
"""Neighbouring results of a tile, at least and at most, and tiles to keep threads busy: wide tiles read longer runs (the sums of 4096 columns in
layernorm's gradient: 256 columns took 0.53 of the time that 64 took; 2-core Zen 3, loaded, 2026-11-29). The width changes no result."""


@dataclass(frozen=True)
class ReductionCpu(Knobs):
    """``columns``: neighbouring results accumulated together (1: one at a time). ``split``: parts of the reduced range."""

    columns: int = 1
    split: int = 1


def candidates(parts: ReductionParts) -> tuple[Knobs, ...]:
    """Best guess first."""
    reduced = math.prod(v.size for v in parts.reduced)
    split = 1 if parts.size >= 64 or reduced < 2 * CHUNK else ceil_div(reduced, CHUNK)
    tiled = split == 1 and bool(parts.outputs) and parts.outputs[-1].size >= 8 and not parts.contiguous()
    width = min(max(parts.outputs[-1].size // TILES // 64 * 64, COLUMNS[0]), COLUMNS[1]) if tiled else 1
    return tuple(dict.fromkeys((ReductionCpu(width, split), ReductionCpu())))


def lower(parts: ReductionParts, knobs: ReductionCpu, words: str, title: list[str]) -> Recipe:
    """Kernels and steps."""
    fields = {"header": title, "sums": parts.sum_rows(), "split": knobs.split}
    tiled = knobs.columns > 1 and parts.outputs  # knobs of another shape meet one with a single result
    return _columns(parts, knobs, words, fields) if tiled else _rows(parts, knobs, words, fields)


def _loops(parts: ReductionParts) -> tuple[list[Var], Var, int]:
    """Outer reduced loops, the fastest one, and the iterations of the outer ones."""
    outer, inner = parts.reduced[:-1], (parts.reduced[-1] if parts.reduced else Var("j", 1))
    return outer, inner, math.prod(v.size for v in outer)


def _columns(parts: ReductionParts, knobs: ReductionCpu, words: str, fields: dict[str, Any]) -> Recipe:
    k = parts.outputs[-1]
    tiles = ceil_div(k.size, knobs.columns)
    total = math.prod(v.size for v in parts.reduced)
    body = lanes(parts.tape, parts.signature, k, 1, IndexWriter("int64"), IndexWriter("int64", "ql"))
    finish = lanes(parts.finish, parts.signature, k, 1, IndexWriter("int64", "qe"), IndexWriter("int64", "qf"))
    fields |= {
        "columns": knobs.columns,
        "tile_split": decompose("o", [*parts.outputs[:-1], Var("t", tiles)], "int64"),
        "first": f"t * {knobs.columns}" if tiles > 1 else "0",
        "last": k.size,
        "total": total,
        "reduce_split": decompose("r", parts.reduced, "int64"),
        "setup": body.setup,
        "body": [re.sub(r"\b(acc\d+)\b", r"\1[jl - first]", line) for line in body.body],
        "finish_setup": finish.setup,
        "finish": parts.results("[jl - first]") + finish.body,
    }
    kernel = KernelSpec("cpu/reduction_columns.py.j2", entry_name(words, fields, parts.signature.params), parts.signature.params, fields)
    items = math.prod(v.size for v in parts.outputs[:-1]) * tiles
    return Recipe((kernel,), (Launch(0, items, parts.signature.args, max(1, CHUNK // max(1, knobs.columns * total))),))


def _rows(parts: ReductionParts, knobs: ReductionCpu, words: str, fields: dict[str, Any]) -> Recipe:
    outer, inner, rows = _loops(parts)
    body = lanes(parts.tape, parts.signature, inner, 1, IndexWriter("int64"), IndexWriter("int64", "ql"))
    by_outer = knobs.split > 1 and rows >= knobs.split
    length = rows if by_outer else inner.size
    step = ceil_div(length, knobs.split)
    part = f"s * {step}, min(s * {step} + {step}, {length})"
    fields |= {
        "outputs": parts.size,
        "output_split": decompose("o", parts.outputs, "int64"),
        "outer_split": decompose("ro", outer, "int64"),
        "outer_range": part if by_outer else str(rows),
        "inner_range": part if knobs.split > 1 and not by_outer else str(inner.size),
        "setup": body.setup,
        "body": body.body,
        "finish": [],
        "partials": [],
    }
    if knobs.split == 1:
        fields["finish"] = parts.finish_lines(IndexWriter("int64", "qe"))
        kernel = KernelSpec("cpu/reduction.py.j2", entry_name(words, fields, parts.signature.params), parts.signature.params, fields)
        return Recipe((kernel,), (Launch(0, parts.size, parts.signature.args, max(1, CHUNK // max(1, rows * inner.size))),))
    scratch, size = parts.partials(knobs.split)
    fields["partials"] = [parts.signature.buffer(s.hold, b, written=True) for s, b in zip(parts.sums, scratch, strict=True)]
    first = KernelSpec("cpu/reduction.py.j2", entry_name(words, fields, parts.signature.params), parts.signature.params, fields)
    signature, combine, finish = parts.second(scratch, IndexWriter("int64", "qe"))
    after = {k: fields[k] for k in ("header", "sums", "split", "output_split")} | {"body": combine, "finish": finish}
    second = KernelSpec("cpu/reduction_finish.py.j2", entry_name(f"{words}_finish", after, signature.params), signature.params, after)
    return Recipe((first, second), (Launch(0, parts.size * knobs.split, parts.signature.args), Launch(1, parts.size, signature.args, 256)), size)
