"""Lowering of convolutions with few products in a sum (depthwise, narrow groups) for a GPU: one thread makes one output, so no tile is padded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from graphdnn.codegen.body import Signature, tape_lines
from graphdnn.codegen.contraction import Contraction
from graphdnn.codegen.dialect import IndexWriter, decompose, index_type, literal
from graphdnn.codegen.spec import KernelSpec, Launch, Recipe
from graphdnn.engines.base import Knobs, ceil_div, entry_name
from graphdnn.engines.matmul_parts import MatmulParts, flattened, whole
from graphdnn.ir.index import slope


@dataclass(frozen=True)
class ThreadCuda(Knobs):
    """Blocks of ``block`` threads."""

    block: int = 128


FILTERS = 8
"""Most results that read one window: more are worth a tile in shared memory."""
REACHED = 1 / 12
"""Share of the peak: each product takes two loads, mostly from the first-level cache, and their indices. Expected, not measured."""


def seconds(form: Contraction, least: float, knobs: ThreadCuda) -> float:
    """Of work that takes ``least`` in whole blocks."""
    outputs = max(math.prod(form.sizes[:3]), 1)
    return least * ceil_div(outputs, knobs.block) * knobs.block / outputs


def fields_of(parts: MatmulParts, title: list[str], block: int = 0) -> tuple[dict[str, Any], Signature]:
    """Fields of a template whose item is one output, the sum of its products included, and the parameters. ``block``: threads of a CUDA block.
    Neighbouring items are neighbouring elements of the first stored tensor."""
    loops = [v for v in (*parts.batch, *parts.loops.m, parts.n) if v.size != 1]
    stores = parts.loops.epilogue.stores()
    loops.sort(key=lambda v: -abs(slope(stores[0].offset, v)))
    k = whole("k", parts.loops.k)
    a, b = (flattened(x.tape, parts.loops.k, k) for x in (parts.loops.a, parts.loops.b))
    items = math.prod(v.size for v in loops)
    expressions = [*a.linears(), *b.linears(), *parts.loops.epilogue.linears()]
    itype = index_type(expressions, cuda=True) if block and ceil_div(items, block) * block < 2**31 else "int64"
    signature = parts.signature.empty()
    terms = [*tape_lines(a, signature, IndexWriter(itype, "qa")), *tape_lines(b, signature, IndexWriter(itype, "qb"))]
    fields: dict[str, Any] = {
        "header": title,
        "itype": itype,
        "items": items,
        "split": decompose("item", loops, itype),
        "zero": literal(0, parts.calc),
        "depth": k.size,
        "terms": terms,
        "left": parts.loops.a.value,
        "right": parts.loops.b.value,
        "c": parts.c_text("total"),
        "epilogue": tape_lines(parts.loops.epilogue, signature, IndexWriter(itype)),
    }
    return fields, signature


def lower(parts: MatmulParts, knobs: ThreadCuda, words: str, title: list[str]) -> Recipe:
    """The kernel."""
    fields, signature = fields_of(parts, title, knobs.block)
    blocks = ceil_div(fields["items"], knobs.block)
    spec = KernelSpec("cuda/conv_thread.py.j2", entry_name(words, fields, signature.params), signature.params, fields, block=knobs.block)
    return Recipe((spec,), (Launch(0, blocks, signature.args),))
