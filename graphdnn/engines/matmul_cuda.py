"""Lowering of a matmul region for CUDA cores: tiles in shared memory, sums in registers, epilogue in a rolled loop over the staged tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from graphdnn.codegen.body import Signature, tape_lines
from graphdnn.codegen.dialect import IndexWriter, decompose, index_type, literal
from graphdnn.codegen.spec import Buffer, KernelSpec, Launch, Memset, Recipe, Step
from graphdnn.engines.base import Knobs, ceil_div, entry_name
from graphdnn.engines.matmul_parts import MatmulParts, Operand, step
from graphdnn.engines.matmul_sums import Partials, end_of, finish, partials, result
from graphdnn.ir.index import Var

COUNTER = 256
"""Bytes before the partial results of all values; the counter of finished blocks is the first four."""
PAD = 4
"""Elements between the rows of a shared tile, against bank conflicts; keeps 16-byte alignment of float32."""


@dataclass(frozen=True)
class SimtTile(Knobs):
    """A block makes ``bm`` x ``bn`` results, ``tm`` x ``tn`` a thread, in steps of ``bk``."""

    bm: int
    bn: int
    bk: int
    tm: int
    tn: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (self.bm // self.tm) * (self.bn // self.tn)

    def shared_bytes(self, item: int) -> int:
        """Static shared memory: the input tiles and, in the same place, the staged result."""
        return max(self.bk * (self.bm + self.bn + 2 * PAD), self.bm * (self.bn + PAD)) * item


@dataclass(frozen=True)
class Placing:
    """Rows and sums that a block learns when it runs. ``tiles``: tiles along the rows, some of which may be left over. ``origin``: lines that set
    ``m0``, ``m_end``, ``k_first`` and ``k_end``, given the signature, the index type and the number of the tile along the rows; ``source`` and
    ``target``: lines in front of an element of A and of a result. ``reach``: largest index in any of them."""

    tiles: int
    origin: Callable[[Signature, str, str], list[str]]
    source: Callable[[Signature, str], list[str]]
    target: Callable[[Signature, str], list[str]]
    reach: int


def lower(parts: MatmulParts, tile: SimtTile, words: str, title: list[str], place: Placing | None = None) -> Recipe:
    """Kernel and steps."""
    if parts.reduced == 0:
        return Recipe((), ())
    m, n, k = parts.m.size, parts.n.size, parts.k.size
    tiles = place.tiles if place else ceil_div(m, tile.bm), ceil_div(n, tile.bn)
    blocks = parts.batches * tiles[0] * tiles[1]
    expressions = [*parts.a.tape.linears(), *parts.b.tape.linears(), *parts.epilogue.linears()]
    wide = max(blocks * tile.threads, (m + tile.bm) * 2, (n + tile.bn) * 2, k + tile.bk, place.reach if place else 0)
    itype = index_type(expressions, cuda=True) if wide < 2**31 else "int64"
    tile_m = "tile_m" if tiles[0] > 1 else f"{itype}(0)"
    signature = parts.signature.empty()
    fields: dict[str, Any] = {
        "header": title,
        "itype": itype,
        "calc": parts.calc,
        "zero": literal(0, parts.calc),
        "bm": tile.bm,
        "bn": tile.bn,
        "bk": tile.bk,
        "tm": tile.tm,
        "tn": tile.tn,
        "lda": tile.bm + PAD,
        "ldb": tile.bn + PAD,
        "ldc": tile.bn + PAD,
        "offset_b": tile.bk * (tile.bm + PAD),
        "shared": tile.shared_bytes(1),
        "threads": tile.threads,
        "columns": tile.bn // tile.tn,
        "m": m,
        "n": n,
        "k": k,
        "k_first": 0,
        "tile_split": decompose("tile", [*parts.batch, Var("tile_m", tiles[0]), Var("tile_n", tiles[1])], itype),
        "origin": [f"m0 = {itype}({tile_m} * {itype}({tile.bm}))"],
        "tile_n": "tile_n" if tiles[1] > 1 else f"{itype}(0)",
        "a": _input(parts.a, _along_k(parts.loops.a, parts.loops.m, parts.loops.k), tile.bm * tile.bk, tile, signature, itype, "qa"),
        "b": _input(parts.b, _along_k(parts.loops.b, (parts.n,), parts.loops.k), tile.bn * tile.bk, tile, signature, itype, "qb"),
        "c": parts.c_text("total"),
        "epilogue": tape_lines(parts.epilogue, signature, IndexWriter(itype, "qe")),
        "half": tile.threads // 2,
        "blocks": blocks,
    }
    if place:
        fields["a"]["lines"] = [*place.source(signature, itype), *fields["a"]["lines"]]
        fields["epilogue"] = [*place.target(signature, itype), *fields["epilogue"]]
        fields |= {"origin": place.origin(signature, itype, tile_m), "m": "m_end", "k": "k_end", "k_first": "k_first"}
    every = partials(parts, COUNTER if any(p and p.kind == "full" for p in parts.places) else 0, tiles[1], tiles[0])
    full, lines = ([p for p in every if (p.place.kind == "full") is whole] for whole in (True, False))
    fields |= _sums(full, signature) | _line_sums(lines, signature, tile, tiles, itype)
    by_rows = lines[0].place.kind == "column" if lines else _by_rows(parts)  # a thread stays in its column, or in its row
    name = entry_name(words, fields | {"by_rows": by_rows}, signature.params, tile)
    kernel = KernelSpec("cuda/matmul_simt.py.j2", name, signature.params, fields | {"by_rows": by_rows}, block=tile.threads)
    ends = [finish(parts, p, words, title, itype, True) for p in lines]
    launches = [Launch(1 + i, grid, args) for i, (_, grid, args) in enumerate(ends)]
    steps: list[Step] = [Memset(Buffer("workspace", -1, 0), 4)] if full else []
    return Recipe((kernel, *(k for k, _, _ in ends)), (*steps, Launch(0, blocks, signature.args), *launches), end_of(every, 0))


def _along_k(x: Operand, rows: Sequence[Var], k: Sequence[Var]) -> bool:
    """Whether neighbouring threads walk k, because it is contiguous in memory, or the rows of a tile."""
    loads = x.tape.loads()
    return not loads or (step(loads[0], k) or 1 << 60) <= (step(loads[0], rows) or 1 << 60)


def _input(x: Operand, along_k: bool, elements: int, tile: SimtTile, signature: Signature, itype: str, prefix: str) -> dict[str, Any]:
    """How a block loads a tile of one input."""
    return {
        "lines": tape_lines(x.tape, signature, IndexWriter(itype, prefix)),
        "value": x.value,
        "along_k": along_k,
        "rounds": ceil_div(elements, tile.threads),
        "even": elements % tile.threads == 0,
        "elements": elements,
    }


def _by_rows(parts: MatmulParts) -> bool:
    """Whether neighbouring threads of the epilogue walk a row of the result."""
    stores = parts.loops.epilogue.stores()
    return not stores or (step(stores[0], (parts.n,)) or 1) <= (step(stores[0], parts.loops.m) or 1 << 60)


def _row(p: Partials, signature: Signature) -> dict[str, Any]:
    partial = signature.buffer(p.acc.hold, p.buffer, written=True)
    return {
        "name": p.acc.name,
        "hold": p.acc.hold,
        "identity": p.acc.identity,
        "slot": p.acc.name.replace("acc", "part"),
        "partial": partial,
        "tree": p.acc.combined("left", "right"),
        "gather": p.acc.combined(p.acc.name, f"{partial}[r]"),
    }


def _sums(full: Sequence[Partials], signature: Signature) -> dict[str, Any]:
    """Reductions of everything: a partial result per block; the last block to finish combines them in a fixed order."""
    counter = signature.buffer("uint32", Buffer("workspace", -1, 0), written=True) if full else ""
    rows = [_row(p, signature) | {"finish": result(p, signature, IndexWriter("uint32"))} for p in full]
    return {"sums": rows, "counter": counter}


def _line_sums(lines: Sequence[Partials], signature: Signature, tile: SimtTile, tiles: tuple[int, int], itype: str) -> dict[str, Any]:
    """Reductions of columns or of rows: the threads of a column (row) of the tile meet, and leave a partial result for it."""
    if not lines:
        return {"line_sums": []}
    columns = lines[0].place.kind == "column"
    extent, width = (tile.bn, lines[0].width) if columns else (tile.bm, lines[0].width)
    piece = f"{itype}(tile // {itype}({tiles[1]}))"  # counted through the batches
    if not columns:
        piece = f"{itype}({itype}({itype}(tile // {itype}({tiles[0] * tiles[1]})) * {itype}({tiles[1]})) + {itype}(tile % {itype}({tiles[1]})))"
    return {
        "line_sums": [_row(p, signature) for p in lines],
        "line": "n" if columns else "m",
        "line_start": "n0" if columns else "m0",
        "lines": width,
        "extent": extent,
        "half_line": tile.threads // extent // 2,
        "place": f"{itype}({itype}({piece} * {itype}({width})) + {'n' if columns else 'm'})",
    }
