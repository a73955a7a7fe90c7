"""Lowering of a reduction region for CUDA.

A block has ``tx`` results times ``ty`` partners that share the reduced range and meet in a tree in shared memory, in a fixed order. Where the results
would not fill the device the range is split too: partial sums go to the workspace and a second kernel combines them, in order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from graphdnn.codegen.body import lane_width, lanes
from graphdnn.codegen.dialect import IndexWriter, decompose, index_type
from graphdnn.codegen.spec import KernelSpec, Launch, Recipe
from graphdnn.engines.base import Knobs, ceil_div, entry_name, power_of_two
from graphdnn.engines.reduction_parts import ReductionParts
from graphdnn.ir.index import Var


@dataclass(frozen=True)
class ReductionCuda(Knobs):
    """``tx`` results times ``ty`` partners a block; ``rows``: neighbours walk the reduced range (else the results); ``split``: parts of it."""

    tx: int
    ty: int
    rows: bool
    split: int = 1
    width: int = 16


def candidates(parts: ReductionParts, threads: int, sms: int) -> tuple[Knobs, ...]:
    """Best guess first, for blocks of ``threads`` on ``sms`` multiprocessors."""
    reduced = math.prod(v.size for v in parts.reduced)
    if parts.size * reduced == 0:
        return (ReductionCuda(1, 32, True),)
    contiguous = parts.contiguous()
    width = lane_width(parts.tape, parts.signature.graph, parts.reduced[-1]) if contiguous and parts.reduced else 1
    shapes = []
    for rows, limit in ((contiguous, threads), (contiguous, threads // 4), (not contiguous, threads)):
        ty = min(limit, power_of_two(ceil_div(reduced, width))) if rows else min(limit, power_of_two(reduced), max(limit // 32, 2))
        tx = max(1, min(threads // ty, power_of_two(parts.size)))
        blocks = ceil_div(parts.size, tx)
        starved = blocks < sms and reduced > ty * width * 8
        split = min(ceil_div(2 * sms, blocks), ceil_div(reduced, ty * width * 4)) if starved else 1
        shapes += [ReductionCuda(tx, ty, rows, split), ReductionCuda(tx, ty, rows)]
    return tuple(dict.fromkeys(shapes))


def lower(parts: ReductionParts, knobs: ReductionCuda, words: str, title: list[str]) -> Recipe:
    """Kernels and steps."""
    inner = parts.reduced[-1] if parts.reduced else Var("j", 1)
    width = lane_width(parts.tape, parts.signature.graph, inner, knobs.width)
    while inner.size % width:
        width //= 2
    groups = math.prod(v.size for v in parts.reduced[:-1]) * (inner.size // width)
    blocks, threads = ceil_div(parts.size, knobs.tx) * knobs.split, knobs.tx * knobs.ty
    reach = max(parts.size * knobs.split, blocks * threads, groups + threads)
    itype = index_type([*parts.tape.linears(), *parts.finish.linears()], cuda=True) if reach < 2**31 else "int64"
    body = lanes(parts.tape, parts.signature, inner, width, IndexWriter(itype), IndexWriter(itype, "ql"))
    same = {
        "header": title,
        "itype": itype,
        "sums": parts.sum_rows(),
        "outputs": parts.size,
        "output_split": decompose("o", parts.outputs, itype),
    }
    fields = same | _shape(knobs.tx, knobs.ty, knobs.rows)
    fields |= {
        "split": knobs.split,
        "step": ceil_div(groups, knobs.split),
        "groups": groups,
        "reduce_split": decompose("r", [*parts.reduced[:-1], Var("g", inner.size // width)], itype),
        "first": f"{itype}(g * {itype}({width}))" if inner.size // width > 1 else f"{itype}(0)",
        "width": width,
        "loads": body.loads,
        "stores": body.stores,
        "setup": body.setup,
        "body": body.body,
        "finish": [],
        "partials": [],
    }
    if knobs.split == 1:
        fields["finish"] = parts.finish_lines(IndexWriter(itype, "qe"))
        return Recipe((_kernel(parts.signature.params, fields, words, threads),), (Launch(0, blocks, parts.signature.args),))
    scratch, size = parts.partials(knobs.split)
    fields["partials"] = [parts.signature.buffer(s.hold, b, written=True) for s, b in zip(parts.sums, scratch, strict=True)]
    first = _kernel(parts.signature.params, fields, words, threads)
    signature, combine, finish = parts.second(scratch, IndexWriter(itype, "qe"))
    second, grid = combining(same | {"body": combine, "finish": finish}, knobs.split, signature.params, words, threads)
    return Recipe((first, second), (Launch(0, blocks, parts.signature.args), Launch(1, grid, signature.args)), size)


def combining(fields: dict[str, Any], partials: int, params: Any, words: str, threads: int) -> tuple[KernelSpec, int]:
    """The kernel that combines ``partials`` partial results of each result, number ``r`` of result ``o``, in a fixed order, and its blocks.
    ``fields``: header, itype, sums, outputs (their number), output_split, body and finish."""
    itype, results = fields["itype"], fields["outputs"]
    ty = min(64, threads, power_of_two(partials))
    tx = max(1, min(threads // ty, power_of_two(results)))
    after = fields | _shape(tx, ty, False) | {"split": 1, "step": partials, "groups": partials, "reduce_split": [], "first": f"{itype}(0)"}
    after |= {"width": 1, "loads": [], "stores": [], "setup": [], "partials": []}
    return _kernel(params, after, f"{words}_finish", tx * ty), ceil_div(results, tx)


def _shape(tx: int, ty: int, rows: bool) -> dict[str, Any]:
    return {"tx": tx, "ty": ty, "rows": rows, "stride": 1 if rows else tx, "half": ty // 2}


def _kernel(params: Any, fields: dict[str, Any], words: str, threads: int) -> KernelSpec:
    return KernelSpec("cuda/reduction.py.j2", entry_name(words, fields, params, threads), params, fields, block=threads)
