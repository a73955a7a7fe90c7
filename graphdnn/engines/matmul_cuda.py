"""Lowering of a matmul region for CUDA cores: tiles in shared memory, sums in registers, epilogue in a rolled loop over the staged tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from graphdnn.codegen.body import Signature, tape_lines
from graphdnn.codegen.dialect import IndexWriter, decompose, index_type, literal
from graphdnn.codegen.spec import Buffer, KernelSpec, Launch, Memset, Recipe, Step
from graphdnn.dtypes import info
from graphdnn.engines.base import Knobs, ceil_div, entry_name
from graphdnn.engines.matmul_parts import MatmulParts, Operand, step
from graphdnn.ir.index import Var

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
        "by_rows": _by_rows(parts),
        "half": tile.threads // 2,
    }
    if place:
        fields["a"]["lines"] = [*place.source(signature, itype), *fields["a"]["lines"]]
        fields["epilogue"] = [*place.target(signature, itype), *fields["epilogue"]]
        fields |= {"origin": place.origin(signature, itype, tile_m), "m": "m_end", "k": "k_end", "k_first": "k_first"}
    sums, scratch, steps = _sums(parts, signature, blocks, tile.threads)
    fields |= {"sums": sums, "counter": scratch, "blocks": blocks}
    name = entry_name(words, fields, signature.params, tile)
    kernel = KernelSpec("cuda/matmul_simt.py.j2", name, signature.params, fields, block=tile.threads)
    return Recipe((kernel,), (*steps, Launch(0, blocks, signature.args)), _scratch_bytes(parts, blocks))


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


def _scratch_bytes(parts: MatmulParts, blocks: int) -> int:
    return 256 + sum(_partial_bytes(s.hold, blocks) for s in parts.sums) if parts.sums else 0


def _partial_bytes(hold: str, blocks: int) -> int:
    return (blocks * (8 if hold.endswith("64") else 4) + 255) // 256 * 256


def _sums(parts: MatmulParts, signature: Signature, blocks: int, threads: int) -> tuple[list[dict[str, Any]], str, list[Step]]:
    """Epilogue reductions: a partial result per block in the workspace; the last block to finish combines them in a fixed order."""
    if not parts.sums:
        return [], "", []
    counter = signature.buffer("uint32", Buffer("workspace", -1, 0), written=True)
    rows, at = [], 256
    for k, s in enumerate(parts.sums):
        partial = signature.buffer(s.hold, Buffer("workspace", -1, at), written=True)
        at += _partial_bytes(s.hold, blocks)
        out = signature.graph.tensors[s.node.output_ids[0]]
        value = s.finished(s.name, parts.reduced, signature.graph)
        rows.append(
            {
                "name": s.name,
                "hold": s.hold,
                "identity": s.identity,
                "slot": f"part{k}",
                "partial": partial,
                "tree": s.combined("left", "right"),
                "gather": s.combined(s.name, f"{partial}[r]"),
                "result": value,
                "target": signature.pointer(s.node.output_ids[0], written=True),
                "encoded": info(out.dtype).encode.format("y"),
            }
        )
    return rows, counter, [Memset(Buffer("workspace", -1, 0), 4)]
