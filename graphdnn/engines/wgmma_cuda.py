"""Lowering of a matmul region for wgmma: tiles by TMA, one producer and two consumer warpgroups, epilogue slice by slice through shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphdnn.codegen.body import Signature, lanes
from graphdnn.codegen.branchless import branchless
from graphdnn.codegen.dialect import IndexWriter, decompose
from graphdnn.codegen.spec import KernelSpec, Launch, Recipe, Role, SharedPart
from graphdnn.engines.base import Knobs, ceil_div, entry_name
from graphdnn.engines.wgmma_parts import BK, Input, WgmmaParts
from graphdnn.engines.wgmma_sums import Sums
from graphdnn.ir.index import Var

CONSUMERS = 2
WARPGROUP = 128
"""Threads of a warpgroup."""
SLICE = 64
"""Columns that are staged at a time."""
STAGING = 64 * SLICE * 4
"""Bytes of a consumer's staged slice."""
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240
"""24 + 2 * 240 registers a thread of each warpgroup is all that the register file has; 40 instead of 24 hangs (H200)."""


@dataclass(frozen=True)
class WgmmaTile(Knobs):
    """Tiles of ``bm`` x ``bn`` results, ``stages`` steps of 64 k in flight. ``alternate``: the two consumer warpgroups take tiles in turn, so that
    the epilogue of one runs under the main loop of the other; else they share a tile, half the rows each. ``group``: rows of tiles that are walked
    together, for the L2 cache."""

    bm: int
    bn: int
    stages: int
    alternate: bool = False
    group: int = 16

    @property
    def blocks(self) -> int:
        """Blocks of 64 rows that one consumer has."""
        return self.bm // 64 // (1 if self.alternate else CONSUMERS)

    @property
    def registers(self) -> int:
        """Accumulators of a thread."""
        return self.blocks * self.bn // 2

    @property
    def stage_bytes(self) -> int:
        """Both input tiles."""
        return (self.bm + self.bn) * BK * 2

    def layout(self) -> tuple[SharedPart, ...]:
        """Dynamic shared memory."""
        sizes = {
            "stages": self.stages * self.stage_bytes,
            "staging": CONSUMERS * STAGING,
            "full": 8 * self.stages,
            "empty": 8 * self.stages,
            "turn": 8,
            "turn_second": 8,
        }
        parts, at = [], 0
        for name, size in sizes.items():
            parts.append(SharedPart(name, at, size))
            at += size
        return tuple(parts)

    @property
    def shared_bytes(self) -> int:
        """All of it."""
        last = self.layout()[-1]
        return last.offset + last.nbytes


ROLES = (Role("producer", WARPGROUP, PRODUCER_REGISTERS), Role("consumer", CONSUMERS * WARPGROUP, CONSUMER_REGISTERS))


def lower(wgmma: WgmmaParts, tile: WgmmaTile, sm_count: int, words: str, title: list[str]) -> Recipe:
    """Kernels and steps."""
    parts = wgmma.parts
    signature = parts.signature.empty()
    rows, columns = wgmma.rows.free, wgmma.columns.free
    counts = (ceil_div(rows.size, tile.bm), ceil_div(columns.size, tile.bn))
    tiles = parts.batches * counts[0] * counts[1]
    grid = min(sm_count, tiles)
    k_steps = ceil_div(parts.k.size, BK)
    inputs = [_input(x, name, first, n, at, signature) for x, name, first, n, at in _placed(wgmma, tile)]
    sums = Sums.plan(wgmma, signature, grid, CONSUMERS * WARPGROUP // 32)
    tape = branchless(sums.renamed(parts.epilogue))
    body = lanes(tape, signature, columns, wgmma.width, IndexWriter("uint32", "qe"), IndexWriter("uint32", "ql"))
    fields: dict[str, Any] = {
        "header": title,
        "maps": inputs,
        "stages": tile.stages,
        "releases": 1 if tile.alternate else CONSUMERS,
        "stage_bytes": tile.stage_bytes,
        "tiles": tiles,
        "grid": grid,
        "coordinates": coordinates(parts.batch, counts, tile),
        "k": parts.k.size,
        "bk": BK,
        "k_steps": k_steps,
        "multiply": f"wgmma_{wgmma.rows.dtype.name}",
        "steps": BK // 16,
        "blocks": tile.blocks,
        "accumulators": tile.registers,
        "alternate": tile.alternate,
        "tile_step": grid * (CONSUMERS if tile.alternate else 1),
        "skip": k_steps % tile.stages,
        "flips": k_steps // tile.stages % 2,
        "group_rows": 0 if tile.alternate else tile.bm // CONSUMERS,
        "group_bytes": 0 if tile.alternate else tile.bm // CONSUMERS * BK * 2,
        "staging_bytes": STAGING,
        "warp_bytes": STAGING // 4,
        "slices": tile.registers // 32,
        "row_slices": tile.bn // SLICE,
        "row": rows.name,
        "column": columns.name,
        "rows": rows.size,
        "columns": columns.size,
        "width": wgmma.width,
        "tail": columns.size % wgmma.width != 0,
        "lanes": SLICE // wgmma.width,
        "pass_rows": 32 * wgmma.width // SLICE,
        "c": parts.c_text("staged[l]"),
        "setup": body.setup,
        "loads": body.loads,
        "body": body.body,
        "stores": body.stores,
        "sums": sums.fields(),
    }
    name = entry_name(words, fields, signature.params, tile)
    kernel = KernelSpec(
        "cuda/matmul_wgmma.py.j2",
        name,
        signature.params,
        fields,
        block=sum(r.threads for r in ROLES),
        shared_bytes=tile.shared_bytes,
        min_blocks=1,
        shared=tile.layout(),
        roles=ROLES,
    )
    finish = sums.finish(words, title)
    launches = [Launch(1 + i, blocks, args) for i, (_, blocks, args) in enumerate(finish)]
    return Recipe((kernel, *(k for k, _, _ in finish)), (*sums.steps(), Launch(0, grid, signature.args), *launches), sums.nbytes)


def _placed(wgmma: WgmmaParts, tile: WgmmaTile) -> tuple[tuple[Input, str, str, int, int], ...]:
    """Each input with its name, its first row in a tile, its rows, and where its tile begins in a stage."""
    return (wgmma.rows, "a", "r0", tile.bm, 0), (wgmma.columns, "b", "c0", tile.bn, tile.bm * BK * 2)


def _input(x: Input, name: str, first: str, rows: int, at: int, signature: Signature) -> dict[str, Any]:
    """What the template needs of an input: its descriptor, the copies that bring its tile, how wgmma reads it."""
    batch = [v.name for v, _ in x.batch]
    copies = []
    for n in range(1 if x.by_k else rows // 64):
        free = f"uint32({first} + uint32({64 * n}))" if n else first
        inner, outer = ("k0", free) if x.by_k else (free, "k0")
        copies.append({"offset": at + n * 64 * BK * 2, "at": ", ".join((inner, outer, *batch))})
    return {
        "name": name,
        "param": signature.descriptor(x.tensor_map(signature.memory_of(x.tensor), rows)),
        "copies": copies,
        "offset": at,
        "free": int(not x.by_k),
        # bytes between blocks of 64 along the free dim (unused where k is contiguous), and between groups of 8 lines
        "leading": 16 if x.by_k else 64 * BK * 2,
        "stride": 1024,
        "swizzle": 128,
    }


def coordinates(batch: list[Var], counts: tuple[int, int], tile: WgmmaTile) -> list[str]:
    """Lines from ``tile`` (a number) to the batch variables, ``tb`` (their number), r0 and c0. Tiles are walked down ``group`` rows of tiles, then on
    to the next column: neighbours in time share inputs in the L2 cache."""
    each = counts[0] * counts[1]
    batches = [v for v in batch if v.size > 1]
    lines = (
        [f"tb = uint32(tile // uint32({each}))", *decompose("tb", batches, "uint32"), f"t = uint32(tile % uint32({each}))"]
        if batches
        else ["t = tile"]
    )
    rows, group = counts[0], min(tile.group, counts[0])
    if group == rows:
        lines += [f"tr = uint32(t % uint32({rows}))", f"tc = uint32(t // uint32({rows}))"]
    else:
        lines += [f"tg = uint32(t // uint32({group * counts[1]}))", f"ti = uint32(t % uint32({group * counts[1]}))"]
        first = f"uint32(tg * uint32({group}))"
        deep = f"uint32({group})"
        if rows % group:
            lines.append(f"deep = min(uint32({group}), uint32(uint32({rows}) - {first}))")
            deep = "deep"
        lines += [f"tr = uint32({first} + uint32(ti % {deep}))", f"tc = uint32(ti // {deep})"]
    return [*lines, f"r0 = uint32(tr * uint32({tile.bm}))", f"c0 = uint32(tc * uint32({tile.bn}))"]
