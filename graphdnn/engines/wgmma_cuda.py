"""Lowering of a matmul region for wgmma: tiles by TMA, one producer and two consumer warpgroups, epilogue slice by slice through shared memory."""

from __future__ import annotations

from typing import Any

from graphdnn.codegen.body import Signature, lanes
from graphdnn.codegen.branchless import branchless
from graphdnn.codegen.dialect import IndexWriter, decompose
from graphdnn.codegen.spec import KernelSpec, Launch, Recipe
from graphdnn.engines.base import ceil_div, entry_name
from graphdnn.engines.wgmma_parts import Input, WgmmaParts
from graphdnn.engines.wgmma_sums import Sums
from graphdnn.engines.wgmma_tile import BK, CONSUMERS, LINE, ROLES, SLICE, STAGING, WARPGROUP, WgmmaTile
from graphdnn.ir.extent import varies
from graphdnn.ir.index import Var


def lower(wgmma: WgmmaParts, tile: WgmmaTile, sm_count: int, words: str, title: list[str]) -> Recipe:
    """Kernels and steps."""
    signature = wgmma.parts.signature.empty()
    counts = tile.counts(wgmma.rows.free.size, wgmma.columns.free.size)
    tiles = wgmma.parts.batches * counts[0] * counts[1]
    walkers = min(sm_count // tile.cluster, tiles)
    grid = walkers * tile.cluster
    fields: dict[str, Any] = {"header": title} | _main_loop(wgmma, tile, signature, tiles, walkers, counts)
    sums = Sums.plan(wgmma, signature, grid, CONSUMERS * WARPGROUP // 32)
    fields |= _epilogue(wgmma, tile, signature, sums)
    kernel = KernelSpec(
        "cuda/matmul_wgmma.py.j2",
        entry_name(words, fields, signature.params, tile),
        signature.params,
        fields,
        block=sum(r.threads for r in ROLES),
        shared_bytes=tile.shared_bytes,
        min_blocks=1,
        cluster=tile.cluster,
        shared=tile.layout(),
        roles=ROLES,
    )
    finish = sums.finish(words, title)
    launches = [Launch(1 + i, blocks, args) for i, (_, blocks, args) in enumerate(finish)]
    return Recipe((kernel, *(k for k, _, _ in finish)), (*sums.steps(), Launch(0, grid, signature.args), *launches), sums.nbytes)


def _main_loop(wgmma: WgmmaParts, tile: WgmmaTile, signature: Signature, tiles: int, walkers: int, counts: tuple[int, int]) -> dict[str, Any]:
    """What brings the tiles and multiplies them. ``walkers``: clusters of the grid."""
    parts = wgmma.parts
    k_steps = ceil_div(parts.k.size, BK)
    own_rows = 0 if tile.alternate else tile.bm // CONSUMERS
    part = tile.bn // tile.cluster
    return {
        "maps": [
            _input(wgmma.rows, "a", "r0", tile.bm, 0, 1, signature),
            _input(wgmma.columns, "b", "c0", tile.bn, tile.bm * LINE, tile.cluster, signature),
        ],
        # each block of a cluster brings its part of the column input to all of them
        "halves": [f"half = uint32(rank * uint32({part}))", f"half_bytes = uint32(rank * uint32({part * LINE}))"] if tile.cluster > 1 else [],
        "first_tile": f"uint32(uint32(cuda.blockIdx.x) // uint32({tile.cluster}))" if tile.cluster > 1 else "uint32(cuda.blockIdx.x)",
        "stages": tile.stages,
        "releases": (1 if tile.alternate else CONSUMERS) * tile.cluster,
        "stage_bytes": tile.stage_bytes,
        "tiles": tiles,
        "stride": walkers,
        "tile_step": walkers * (CONSUMERS if tile.alternate else 1),
        "coordinates": coordinates(parts.batch, counts, tile),
        "k": parts.k.size,
        "bk": BK,
        "k_steps": k_steps,
        "multiply": f"wgmma_{wgmma.rows.dtype.name}",
        "steps": BK // 16,
        "blocks": tile.blocks,
        "accumulators": tile.registers,
        "alternate": tile.alternate,
        "skip": k_steps % tile.stages,
        "flips": k_steps // tile.stages % 2,
        "group_rows": own_rows,
        "group_bytes": own_rows * LINE,
    }


def _epilogue(wgmma: WgmmaParts, tile: WgmmaTile, signature: Signature, sums: Sums) -> dict[str, Any]:
    """What happens to the results, 64 columns at a time."""
    rows, columns = wgmma.rows.free, wgmma.columns.free
    tape = branchless(sums.renamed(wgmma.parts.epilogue))
    body = lanes(tape, signature, columns, wgmma.width, IndexWriter("uint32", "qe"), IndexWriter("uint32", "ql"))
    return {
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
        "c": wgmma.parts.c_text("staged[l]"),
        "setup": body.setup,
        "loads": body.loads,
        "body": body.body,
        "stores": body.stores,
        "sums": sums.fields(),
    }


def _input(x: Input, name: str, first: str, rows: int, at: int, shared_by: int, signature: Signature) -> dict[str, Any]:
    """What the template needs of an input: its descriptor, the copies that bring its tile (of ``rows`` rows from ``first`` on, to byte ``at`` of a
    stage; of which each of ``shared_by`` blocks brings a part to all), how wgmma reads it."""
    part = rows // shared_by
    begin, place = (first, "to") if shared_by == 1 else (f"uint32({first} + half)", "uint32(to + half_bytes)")
    copies = []
    for n in range(1 if x.by_k else part // 64):
        free = f"uint32({begin} + uint32({64 * n}))" if n else begin
        inner, outer = ("k0", free) if x.by_k else (free, "k0")
        copies.append(
            {
                "call": "tma_load" if shared_by == 1 else "tma_multicast",
                "to": f"uint32({place} + uint32({at + n * 64 * LINE}))",
                "at": ", ".join((inner, outer, *(v.name for v, _ in x.batch))),
                "mask": "" if shared_by == 1 else f", {(1 << shared_by) - 1}",
            }
        )
    return {
        "name": name,
        "param": signature.descriptor(x.tensor_map(signature.memory_of(x.tensor), part)),
        "copies": copies,
        "offset": at,
        "free": int(not x.by_k),
        # bytes between blocks of 64 along the free dim (unused where k is contiguous), and between groups of 8 lines
        "leading": 16 if x.by_k else 64 * LINE,
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
    rows, group = counts[0], max(tile.group // tile.cluster, 1)
    if group >= rows and not varies(rows):
        lines += [f"tr = uint32(t % uint32({rows}))", f"tc = uint32(t // uint32({rows}))"]
    else:
        lines += [f"tg = uint32(t // uint32({group * counts[1]}))", f"ti = uint32(t % uint32({group * counts[1]}))"]
        first = f"uint32(tg * uint32({group}))"
        deep = f"uint32({group})"
        if rows % group or varies(rows):
            lines.append(f"deep = min(uint32({group}), uint32(uint32({rows}) - {first}))")
            deep = "deep"
        lines += [f"tr = uint32({first} + uint32(ti % {deep}))", f"tc = uint32(ti // {deep})"]
    if tile.cluster > 1:
        lines.append(f"tr = uint32(uint32(tr * uint32({tile.cluster})) + rank)")
    return [*lines, f"r0 = uint32(tr * uint32({tile.bm}))", f"c0 = uint32(tc * uint32({tile.bn}))"]
