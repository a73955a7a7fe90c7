"""Lowering of attention (forward) for CUDA cores: any CUDA GPU, shared-memory tiles, any head dim."""

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

STATIC_SHARED = 48 * 1024


@dataclass(frozen=True)
class AttentionSimt(Knobs):
    """A block makes ``bm`` rows of O, ``bv`` elements of each, against ``bn`` rows of K and V at a time, in steps of ``bk``; a thread makes ``tm`` x
    ``tn`` scores."""

    bm: int
    bn: int
    bk: int
    bv: int
    tm: int
    tn: int

    @property
    def partners(self) -> int:
        """Threads along a row of scores."""
        return self.bn // self.tn

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.bm // self.tm * self.partners

    @property
    def tiles(self) -> int:
        """Elements of the tiles of Q and K, and in the same place of V."""
        return max(self.bk * (self.bm + self.bn + 2), self.bk * self.bv)

    def shared(self, item: int) -> int:
        """Bytes of static shared memory."""
        return (self.tiles + self.bm * (self.bn + 1) + self.threads + 2 * self.bm) * item


def candidates(p: AttentionProblem, simulated: bool) -> tuple[AttentionSimt, ...]:
    """Tiles, best guess first."""
    if simulated:
        wide = min(ceil_div(max(p.d_v, 1), 4) * 4, 32)  # in one part if it fits: parts calculate scores again
        found = [AttentionSimt(8, 8, 4, wide, 2, 2), AttentionSimt(4, 8, 4, 8, 1, 2)]
    else:
        bv = next((n for n in (16, 32, 64) if p.d_v <= n), 128)
        found = [AttentionSimt(64, 64, 16, bv, 4, 4), AttentionSimt(32, 64, 16, bv, 2, 4), AttentionSimt(16, 64, 16, bv, 1, 4)]
        if p.s_q <= 32:
            found = found[::-1] if p.s_q <= 16 else [found[1], found[2], found[0]]
    return tuple(k for k in found if check(p, k))


def check(p: AttentionProblem, knobs: AttentionSimt) -> Status:
    """Whether a block fits."""
    nbytes = knobs.shared(8 if p.calc == "float64" else 4)
    if nbytes > STATIC_SHARED:
        return reject(f"attention_fwd: {knobs!r} needs {nbytes} bytes of shared memory; at most {STATIC_SHARED}")
    if knobs.bm % knobs.tm or knobs.bn % knobs.tn or knobs.bv % knobs.partners or knobs.threads % knobs.bm or knobs.bn % knobs.bk:
        return reject(f"attention_fwd: {knobs!r}: the tiles do not divide evenly among the threads")
    return OK


def lower(p: AttentionProblem, knobs: AttentionSimt, memory: Mapping[int, Buffer], words: str, title: list[str]) -> Recipe:
    """The kernel."""
    tiles, parts = ceil_div(p.s_q, knobs.bm), max(ceil_div(p.d_v, knobs.bv), 1)  # rows of O without elements still have statistics
    items = p.b * p.h_q * tiles * parts
    if items == 0:
        return Recipe((), ())
    itype, signature = p.index_type(items * knobs.threads), Signature(p.graph, memory)
    text = ScoreText(p, signature, itype)
    ends = Finish(text, "part" if parts > 1 else "")
    first, last = text.columns("r0", f"{itype}(end - {itype}(1))")
    fields: dict[str, Any] = {
        "header": title,
        "itype": itype,
        "calc": p.calc,
        "zero": literal(0, p.calc),
        "one": literal(1, p.calc),
        "low": f"{p.calc}(-math.inf)",
        "bm": knobs.bm,
        "bn": knobs.bn,
        "bk": knobs.bk,
        "bv": knobs.bv,
        "tm": knobs.tm,
        "tn": knobs.tn,
        "tv": knobs.bv // knobs.partners,
        "partners": knobs.partners,
        "ways": knobs.threads // knobs.bm,
        "threads": knobs.threads,
        "ldq": knobs.bm + 1,
        "ldk": knobs.bn + 1,
        "lds": knobs.bn + 1,
        "ldv": knobs.bv,
        "offset_k": knobs.bk * (knobs.bm + 1),
        "shared_tiles": knobs.tiles,
        "shared_scores": knobs.bm * (knobs.bn + 1),
        "d_qk": p.d_qk,
        "d_v": p.d_v,
        "s_q": p.s_q,
        "split": split(p, tiles, parts, itype),
        "item": [*text.item(), *(line for x in "QKV" for line in text.base(x, f"{x.lower()}_at")), *ends.item, _first(knobs, parts, itype)],
        "first": first,
        "last": last,
        "q": _input(text, "Q", "row_q", "x"),
        "k": _input(text, "K", "col", "x"),
        "v": _input(text, "V", "col", "x"),
        "score": text.score(),
        "keep": text.keep(inside=True),
        "masked": bool(text.keep(inside=True)),
        "weight": text.weight(),
        "finish": ends.lines,
        "row_of_o": ends.row,
        "result": ends.result(f"acc[i * {knobs.bv // knobs.partners} + jj]"),
        "store": ends.store("x"),
    }
    kernel = KernelSpec("cuda/attention_fwd.py.j2", entry_name(words, fields, signature.params), signature.params, fields, block=knobs.threads)
    launch = Launch(0, items, signature.args)
    if not p.has("RNG_DUMP"):
        return Recipe((kernel,), (*limits(p, memory), launch))
    other, also = dump(p, memory, words, title, False, 1)
    return Recipe((kernel, other), (*limits(p, memory), launch, also))


def _first(knobs: AttentionSimt, parts: int, itype: str) -> str:
    return f"v0 = {itype}(part * {itype}({knobs.bv}))" if parts > 1 else f"v0 = {itype}(0)"


def _input(text: ScoreText, port: str, row: str, column: str) -> dict[str, Any]:
    """How an element of Q, K or V is read; ``along``: neighbouring threads walk along a row."""
    name = f"{port.lower()}_row"
    strides = text.problem.tensor(port).strides
    along = not strides[2] or abs(strides[3]) <= abs(strides[2])
    return {"row": text.row(port, f"{port.lower()}_at", row, name), "value": text.load(port, name, column), "along": along}
