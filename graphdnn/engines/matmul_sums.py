"""Reductions in the epilogue of a tiled matmul or convolution, the same in every run: partial results in the workspace, combined in a fixed order.

A partial result belongs to a piece of the result's matrix: a tile of a GPU, a block of rows or a strip of a CPU. Of everything ("full"): one for each
piece. Of columns (rows): one for each column (row) of a piece; pieces above (beside) each other meet in a second kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphdnn.codegen.body import Signature
from graphdnn.codegen.dialect import IndexWriter, decompose
from graphdnn.codegen.spec import Arg, Buffer, KernelSpec
from graphdnn.dtypes import info
from graphdnn.engines.base import entry_name
from graphdnn.engines.matmul_parts import MatmulParts, Place
from graphdnn.engines.reduction_cuda import combining
from graphdnn.engines.reduction_parts import Accumulator
from graphdnn.ir.index import Var


@dataclass(frozen=True)
class Partials:
    """One reduction. ``buffer`` holds, for each of ``groups`` and each of ``each`` pieces in it, ``width`` partial results."""

    acc: Accumulator
    place: Place
    buffer: Buffer
    groups: int
    each: int
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, aligned."""
        return (self.groups * self.each * self.width * (8 if self.acc.hold.endswith("64") else 4) + 255) // 256 * 256


def partials(parts: MatmulParts, at: int, across: int, down: int) -> list[Partials]:
    """The partial results of every reduction, from byte ``at`` of the workspace, where a batch is cut into ``across`` x ``down`` pieces."""
    found = []
    for s, place in zip(parts.sums, parts.places, strict=True):
        assert place is not None, "accepted"
        width = {"full": 1, "column": parts.n.size, "row": parts.m.size}[place.kind]
        pieces = {"full": across * down, "column": down, "row": across}[place.kind]
        found.append(Partials(s, place, Buffer("workspace", -1, at), place.groups, parts.batches // place.groups * pieces, width))
        at += found[-1].nbytes
    return found


def end_of(found: Sequence[Partials], start: int) -> int:
    """Bytes of workspace up to the end of the partial results, of which the first is at ``start``."""
    return found[-1].buffer.offset + found[-1].nbytes if found else start


def result(p: Partials, signature: Signature, writer: IndexWriter) -> list[str]:
    """Lines that finish a sum and store it."""
    out = p.acc.node.output_ids[0]
    target, at = signature.pointer(out, written=True), writer(p.place.offset)
    value = p.acc.finished(p.acc.name, p.place.count, signature.graph)
    return [*writer.lines, f"y = {value}", f"{target}[{at}] = {info(signature.graph.tensors[out].dtype).encode.format('y')}"]


def finish(parts: MatmulParts, p: Partials, words: str, title: list[str], itype: str, cuda: bool) -> tuple[KernelSpec, int, tuple[Arg, ...]]:
    """The kernel that combines the partial results of a reduction, its items or blocks, and its arguments."""
    signature = parts.signature.empty()
    source, results = signature.buffer(p.acc.hold, p.buffer), p.groups * p.width
    writer = IndexWriter(itype)

    def times(x: str, n: int) -> str:
        return f"{itype}({x} * {writer.number(n)})"

    if p.groups == 1:
        at = f"{itype}({times('r', p.width)} + o)"
    else:
        group, line = f"{itype}(o // {writer.number(p.width)})", f"{itype}(o % {writer.number(p.width)})"
        at = f"{itype}({times(f'{itype}({times(group, p.each)} + r)', p.width)} + {line})"
    fields: dict[str, Any] = {
        "header": [*title, "# combines partial results"],
        "itype": itype,
        "sums": [{"name": p.acc.name, "hold": p.acc.hold, "identity": p.acc.identity, "tree": p.acc.combined("left", "right"), "slot": "part0"}],
        "outputs": results,
        "output_split": decompose("o", _lines(parts, p), itype),
        "body": [f"{p.acc.name} = {p.acc.combined(p.acc.name, f'{source}[{at}]')}"],
        "finish": result(p, signature, writer),
    }
    if cuda:
        kernel, blocks = combining(fields, p.each, signature.params, words, 128)
        return kernel, blocks, signature.args
    fields["split"] = p.each
    name = entry_name(f"{words}_finish", fields, signature.params)
    return KernelSpec("cpu/reduction_finish.py.j2", name, signature.params, fields), results, signature.args


def _lines(parts: MatmulParts, p: Partials) -> list[Var]:
    """Loops over the results, slowest first."""
    lines = {"full": [], "column": [parts.n], "row": list(parts.loops.m)}[p.place.kind]
    groups = [v for i, v in enumerate(parts.batch) if math.prod(u.size for u in parts.batch[: i + 1]) <= p.groups]
    found = [*groups, *lines]
    assert math.prod(v.size for v in found) == p.groups * p.width, "one result for each"
    return found
