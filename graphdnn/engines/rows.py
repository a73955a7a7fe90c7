"""Engine ``rows``: a chain of reductions along the same rows and what is calculated from them for every element (softmax, normalization, written
out by hand or not), in one kernel that walks each row several times while it is in cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from graphdnn.codegen.body import lane_width, lanes, tape_lines
from graphdnn.codegen.dialect import IndexWriter, decompose, index_type
from graphdnn.codegen.spec import Buffer, KernelSpec, Launch, Recipe
from graphdnn.codegen.tape import Tape
from graphdnn.device import DeviceProps
from graphdnn.engines.base import Engine, Knobs, ceil_div, chain, entry_name, fits, header, placeholder, power_of_two, roofline
from graphdnn.engines.reduction_parts import Accumulator
from graphdnn.engines.rows_parts import RowsParts, take_apart
from graphdnn.ir.index import Var
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.passes.regions import Region
from graphdnn.status import OK, Status, reject

GRAIN = 16384
"""Elements that are worth handing to another CPU thread."""


@dataclass(frozen=True)
class RowsCpu(Knobs):
    """No choice: one row at a time."""


@dataclass(frozen=True)
class RowsCuda(Knobs):
    """``tx`` rows times ``ty`` partners a block; ``along``: neighbouring threads walk along a row (else from row to row)."""

    tx: int
    ty: int
    along: bool
    width: int = 16


class Rows(Engine):
    """See the module."""

    id: ClassVar[int] = 4
    name: ClassVar[str] = "rows"

    def _accepts(self, graph: OperationGraph, region: Region) -> Status:
        if region.kind != "rows":
            return reject(f"rows: the region does not walk rows more than once ({region.kind})")
        return fits(lambda: take_apart(graph, region, placeholder(region), False))

    def _candidates(self, graph: OperationGraph, region: Region, device: DeviceProps) -> tuple[Knobs, ...]:
        if device.kind == "cpu":
            return (RowsCpu(),)
        parts = take_apart(graph, region, placeholder(region), False)
        threads, along = (16, 8) if device.kind == "cudasim" else (256, 128), parts.contiguous()
        width = _width(parts, RowsCuda(1, 1, True)) if along else 1
        found = []
        for rows, limit in ((along, threads[0]), (along, threads[1]), (not along, threads[0])):
            ty = min(limit, power_of_two(ceil_div(parts.count, width))) if rows else max(1, min(limit // 8, power_of_two(parts.count)))
            found.append(RowsCuda(max(1, min(limit // ty, power_of_two(parts.size))), ty, rows))
        return tuple(dict.fromkeys(found))

    def _check(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> Status:
        if isinstance(knobs, RowsCuda) and knobs.tx * knobs.ty > 1024:
            return reject(f"rows: {knobs.tx} x {knobs.ty} threads; a block has at most 1024")
        return OK

    def _cost(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> float:
        return roofline(graph, region, device) * 1.1  # later passes read from cache

    def _lower(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs, memory: Mapping[int, Buffer]) -> Recipe:
        parts = take_apart(graph, region, memory, isinstance(knobs, RowsCpu))
        words, title = chain(graph, region), header(graph, region, knobs)
        if isinstance(knobs, RowsCpu):
            return _cpu(parts, words, title)
        assert isinstance(knobs, RowsCuda)
        return _cuda(parts, knobs, words, title)


def _inner(parts: RowsParts) -> tuple[list[Var], Var, int]:
    """Outer loops along a row, the fastest one, and the iterations of the outer ones."""
    outer, inner = parts.reduced[:-1], (parts.reduced[-1] if parts.reduced else Var("j", 1))
    return outer, inner, math.prod(v.size for v in outer)


def _results(sums: list[Accumulator], parts: RowsParts) -> list[str]:
    return [f"{s.result} = {s.finished(s.name, parts.count, parts.signature.graph)}" for s in sums]


def _cpu(parts: RowsParts, words: str, title: list[str]) -> Recipe:
    outer, inner, rows = _inner(parts)
    passes = []
    for number, (sums, tape, after) in enumerate([*((p.sums, p.tape, p.after) for p in parts.passes), ([], parts.last, Tape())]):
        if not tape.items:
            continue
        body = lanes(tape, parts.signature, inner, 1, IndexWriter("int64", f"q{number}_"), IndexWriter("int64", f"l{number}_"))
        done = _results(sums, parts) + tape_lines(after, parts.signature, IndexWriter("int64", f"f{number}_"))
        starts = [f"{s.name} = {s.identity}" for s in sums]
        passes.append({"starts": starts, "setup": body.setup, "body": body.body, "after": done})
    fields: dict[str, Any] = {
        "header": title,
        "row_split": decompose("o", parts.outputs, "int64"),
        "outer": rows,
        "outer_split": decompose("ro", outer, "int64"),
        "inner": inner.size,
        "passes": passes,
    }
    kernel = KernelSpec("cpu/rows.py.j2", entry_name(words, fields, parts.signature.params), parts.signature.params, fields)
    return Recipe((kernel,), (Launch(0, parts.size, parts.signature.args, max(1, GRAIN // parts.count)),))


def _width(parts: RowsParts, knobs: RowsCuda) -> int:
    _, inner, _ = _inner(parts)
    width = lane_width(parts.joined, parts.signature.graph, inner, knobs.width)
    while inner.size % width:
        width //= 2
    return width


def _cuda(parts: RowsParts, knobs: RowsCuda, words: str, title: list[str]) -> Recipe:
    outer, inner, rows = _inner(parts)
    width = _width(parts, knobs)
    groups, threads = rows * (inner.size // width), knobs.tx * knobs.ty
    blocks = ceil_div(parts.size, knobs.tx)
    between = [e for p in parts.passes for e in p.after.linears()]
    reach = max(blocks * threads, groups + threads)
    itype = index_type([*parts.joined.linears(), *between], cuda=True) if reach < 2**31 else "int64"
    passes = []
    for number, (sums, tape, after) in enumerate([*((p.sums, p.tape, p.after) for p in parts.passes), ([], parts.last, Tape())]):
        if not tape.items:
            continue
        body = lanes(tape, parts.signature, inner, width, IndexWriter(itype, f"q{number}_"), IndexWriter(itype, f"l{number}_"), f"{number}")
        writer = IndexWriter(itype, f"f{number}_")
        stores = {id(i) for i in after.stores()}
        shared = tape_lines(Tape([i for i in after.items if id(i) not in stores]), parts.signature, writer)
        kept = tape_lines(Tape(list(after.stores())), parts.signature, IndexWriter(itype, f"g{number}_"))
        trees = [
            {"name": s.name, "hold": s.hold, "identity": s.identity, "tree": s.combined("left", "right"), "slot": f"part_{s.name}"} for s in sums
        ]
        passes.append(
            {
                "sums": trees,
                "loads": body.loads,
                "stores": body.stores,
                "setup": body.setup,
                "body": body.body,
                "after": _results(sums, parts) + shared,
                "row_stores": kept,
            }
        )
    fields: dict[str, Any] = {
        "header": title,
        "itype": itype,
        "tx": knobs.tx,
        "ty": knobs.ty,
        "along": knobs.along,
        "stride": 1 if knobs.along else knobs.tx,
        "half": knobs.ty // 2,
        "rows": parts.size,
        "row_split": decompose("o", parts.outputs, itype),
        "groups": groups,
        "group_split": decompose("r", [*outer, Var("g", inner.size // width)], itype),
        "first": f"{itype}(g * {itype}({width}))" if inner.size // width > 1 else f"{itype}(0)",
        "width": width,
        "passes": passes,
    }
    name = entry_name(words, fields, parts.signature.params)
    kernel = KernelSpec("cuda/rows.py.j2", name, parts.signature.params, fields, block=threads)
    return Recipe((kernel,), (Launch(0, blocks, parts.signature.args),))
