"""Lowering of attention (forward) for a CPU: both products by register tiles, scores of a tile on the thread's stack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphdnn.codegen.body import Signature
from graphdnn.codegen.dialect import literal
from graphdnn.codegen.spec import Buffer, KernelSpec, Launch, Recipe
from graphdnn.engines.attention_dump import dump
from graphdnn.engines.attention_finish import Finish
from graphdnn.engines.attention_limits import limits
from graphdnn.engines.attention_parts import AttentionProblem, split
from graphdnn.engines.attention_score import ScoreText
from graphdnn.engines.base import Knobs, ceil_div, entry_name
from graphdnn.status import OK, Status, reject

TILE = 6
"""Rows of a register tile."""
STACK = 384 * 1024
"""Bytes of buffers on a thread's stack."""


@dataclass(frozen=True)
class AttentionCpu(Knobs):
    """An item makes ``blocks`` vectors of rows (64 bytes each) against ``columns`` rows of K and V at a time. ``depth`` and ``values``: elements of a
    row of K, and of V, that are worked on at once."""

    blocks: int
    columns: int
    depth: int
    values: int

    def sizes(self, lanes: int) -> dict[str, int]:
        """Elements of each buffer."""
        return {
            "q": self.blocks * lanes * self.depth,
            "k": self.columns * self.depth,
            "v": self.columns * self.values,
            "s": self.blocks * self.columns * lanes,
            "block": self.columns * lanes,
            "acc": self.blocks * lanes * self.values,
        }

    def stack(self, lanes: int) -> int:
        """Bytes on the stack."""
        s = self.sizes(lanes)
        return (s["q"] + s["k"] + s["v"] + s["s"] + s["acc"]) * 64 // lanes


def _lanes(p: AttentionProblem) -> int:
    return 8 if p.calc == "float64" else 16


def candidates(p: AttentionProblem) -> tuple[AttentionCpu, ...]:
    """Tiles, best guess first: as many rows as there are and fit, long rows in pieces."""
    lanes = _lanes(p)
    most = ceil_div(max(p.s_q, 1), lanes)
    found = []
    for blocks, columns in ((4, 48), (4, 96), (8, 96), (2, 48), (1, 48), (1, 12)):
        knobs = AttentionCpu(min(blocks, most), columns, min(max(p.d_qk, 1), 512), min(max(p.d_v, 1), 512))
        if check(p, knobs) and knobs not in found:
            found.append(knobs)
    return tuple(found)


def check(p: AttentionProblem, knobs: AttentionCpu) -> Status:
    """Whether the tiles fit on a thread's stack."""
    stack = knobs.stack(_lanes(p))
    if stack > STACK:
        return reject(f"attention_fwd: {knobs!r} needs {stack} bytes of stack; at most {STACK}")
    if knobs.columns % TILE:
        return reject(f"attention_fwd: {knobs!r}: columns is not a multiple of {TILE}")
    return OK


def lower(p: AttentionProblem, knobs: AttentionCpu, memory: Mapping[int, Buffer], words: str, title: list[str]) -> Recipe:
    """The kernel, and what else the outputs need."""
    lanes = _lanes(p)
    rows = knobs.blocks * lanes
    tiles, parts = ceil_div(p.s_q, rows), max(ceil_div(p.d_v, knobs.values), 1)  # rows of O without elements still have statistics
    items = p.b * p.h_q * tiles * parts
    if items == 0:
        return Recipe((), ())
    signature = Signature(p.graph, memory)
    text = ScoreText(p, signature, "int64")
    ends = Finish(text, "part" if parts > 1 else "")
    first, last = text.columns("r0", "(end - 1)")
    fields: dict[str, Any] = {
        "header": title,
        "calc": p.calc,
        "zero": literal(0, p.calc),
        "one": literal(1, p.calc),
        "low": f"{p.calc}(-math.inf)",
        "lanes": lanes,
        "rows": rows,
        "columns": knobs.columns,
        "depth": knobs.depth,
        "depth_parts": ceil_div(p.d_qk, knobs.depth),
        "chunked": p.d_qk != knobs.depth,  # knobs of another shape may be wider than this one
        "d_qk": p.d_qk,
        "values": knobs.values,
        "tile": TILE,
        "value_tiles": knobs.values // TILE * TILE,
        "value_rest": knobs.values % TILE,
        "sizes": knobs.sizes(lanes),
        "split": split(p, tiles, parts, "int64"),
        "first_row": f"tile * {rows}",
        "item": [*text.item(), *text.base("Q", "q_at"), *text.base("K", "k_at"), *text.base("V", "v_at"), *ends.item, *_width(p, knobs, parts)],
        "first": first,
        "last": last,
        "q": {"row": text.row("Q", "q_at", "row", "q_row"), "value": text.load("Q", "q_row", "(x0 + x)")},
        "k": {"row": text.row("K", "k_at", "col", "k_row"), "value": text.load("K", "k_row", "(x0 + x)")},
        "v": {"row": text.row("V", "v_at", "col", "v_row"), "value": text.load("V", "v_row", "(v0 + x)")},
        "score": text.score(),
        "keep": text.keep(inside=True),
        "masked": bool(text.keep(inside=True)),
        "clear": text.clear("(r0 + e0)", f"(r0 + e0 + {lanes - 1})", "c0", "(c0 + count - 1)"),
        "weight": text.weight(),
        "s_q": p.s_q,
        "finish": [*ends.lines, *ends.row],
        "result": ends.result(f"acc[e0 + x * {lanes}]"),
        "store": ends.store("(v0 + x)"),
    }
    kernel = KernelSpec("cpu/attention_fwd.py.j2", entry_name(words, fields, signature.params), signature.params, fields)
    launch = Launch(0, items, signature.args)
    if not p.has("RNG_DUMP"):
        return Recipe((kernel,), (*limits(p, memory), launch))
    other, also = dump(p, memory, words, title, True, 1)
    return Recipe((kernel, other), (*limits(p, memory), launch, also))


def _width(p: AttentionProblem, knobs: AttentionCpu, parts: int) -> list[str]:
    width = f"min({knobs.values}, {p.d_v} - v0)" if p.d_v % knobs.values or not p.d_v else str(knobs.values)
    return [f"v0 = part * {knobs.values}" if parts > 1 else "v0 = 0", f"value_width = {width}"]
