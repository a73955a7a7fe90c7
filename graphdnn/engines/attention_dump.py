"""The kernel that writes RNG_DUMP: 1 where dropout keeps a weight, 0 where it drops it, for every score, masked or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphdnn.codegen.body import Signature
from graphdnn.codegen.dialect import decompose, to_dtype
from graphdnn.codegen.spec import Buffer, KernelSpec, Launch
from graphdnn.dtypes import info
from graphdnn.engines.attention_parts import AttentionProblem
from graphdnn.engines.attention_score import ScoreText
from graphdnn.engines.base import ceil_div, entry_name
from graphdnn.ir.index import Var

BLOCK = 256
GRAIN = 4096
"""Numbers that are worth handing to another CPU thread."""


def dump(p: AttentionProblem, memory: Mapping[int, Buffer], words: str, title: list[str], cpu: bool, kernel: int) -> tuple[KernelSpec, Launch]:
    """The kernel and its launch, as number ``kernel`` of the recipe. Only where the node draws numbers and has an RNG_DUMP that is not empty."""
    loops = [Var("b", p.b), Var("h", p.h_q), Var("row", p.s_q), Var("col", p.s_kv)]
    rows, count = p.b * p.h_q * p.s_q, p.b * p.h_q * p.s_q * p.s_kv
    itype, signature = "int64" if cpu else p.index_type(count + BLOCK), Signature(p.graph, memory)
    text = ScoreText(p, signature, itype)
    target = p.tensor("RNG_DUMP")
    place = text.linear(*((v.name, s) for v, s in zip(loops, target.strides, strict=True)))
    value = info(target.dtype).encode.format(to_dtype("kept", p.calc, target.dtype))
    body = [*text.kept(), f"{signature.pointer(p.ports['RNG_DUMP'], written=True)}[{place}] = {value}"]
    fields: dict[str, Any] = {"header": [*title, "# writes which weights dropout keeps"], "body": body}
    if cpu:
        split = [*decompose("o", loops[:3], itype), *_single(loops[:3], itype), *text.numbers()]
        fields |= {"flat": False, "setup": split, "first": "0", "last": str(p.s_kv), "body": ["col = jl", *body], "after": []}
        spec = KernelSpec("cpu/pointwise.py.j2", entry_name(f"{words}_dump", fields, signature.params), signature.params, fields)
        return spec, Launch(kernel, rows if p.s_kv else 0, signature.args, max(1, GRAIN // max(p.s_kv, 1)))
    split = [*decompose("item", loops, itype), *_single(loops, itype), *text.numbers()]
    fields |= {"itype": itype, "items": count, "split": split, "first": "col", "width": 1, "setup": [], "loads": [], "stores": [], "tail": False}
    fields["size"] = p.s_kv
    spec = KernelSpec("cuda/pointwise.py.j2", entry_name(f"{words}_dump", fields, signature.params), signature.params, fields, block=BLOCK)
    return spec, Launch(kernel, ceil_div(count, BLOCK), signature.args)


def _single(loops: list[Var], itype: str) -> list[str]:
    return [f"{v.name} = {itype}(0)" for v in loops if v.size == 1]
