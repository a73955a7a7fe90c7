"""Attention in random graphs: sdpa and its gradient with every option, each by chance."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from tests.attention_cases import SCORE_MODS, strides
from tests.fuzz.anchors import Values, call, integers, number, operand, parameter
from tests.fuzz.program import Dims, Made, Op
from tests.helpers import Data, given

if TYPE_CHECKING:
    from tests.fuzz.generator import Generator

LENGTHS = (1, 2, 31, 33, 63, 64, 65, 97, 127, 129, 192, 704)
"""Lengths of sequences: of one, around tiles of 32, 64 and 128, of several tiles, of no whole tile."""
LONGEST = 192
"""Longer ones are drawn less often."""
LAYOUTS = ("bhsd", "bshd", "sbhd", "gaps", "bhds", "interleaved")
"""How Q, K, V, O and the gradients lie, beside any strides at all."""
BACKWARD_SHARE = 0.24
"""Of gradients: a kernel of one takes seconds to compile."""


@dataclass
class Problem:
    """One call while it is drawn. ``rows``: name of the offsets of packed tensors by heads and head dim; ``packed``: "q" and "kv", as drawn;
    ``lengths``: of Q and of K and V by batch, where there is padding."""

    scores: Dims
    d: int
    d_v: int
    h_k: int
    h_v: int
    backward: bool
    tensors: dict[str, str] = field(default_factory=dict)
    own: Values = field(default_factory=dict)
    made: list[Made] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    lengths: dict[str, list[int]] = field(default_factory=dict)
    packed: set[str] = field(default_factory=set)
    page: int = 0
    rows: dict[tuple[str, int], str] = field(default_factory=dict)

    def dims(self, name: str) -> Dims:
        """Of q, k, v, o (and the gradients of each) and stats."""
        b, h, s_q, s_kv = self.scores
        sizes = {"q": (h, s_q, self.d), "k": (self.h_k, s_kv, self.d), "v": (self.h_v, s_kv, self.d_v), "o": (h, s_q, self.d_v), "stats": (h, s_q, 1)}
        return (b, *sizes[name])

    def offsets(self, g: Generator, name: str) -> str:
        """Name of the offsets of a packed tensor, "" of one that is not: whole rows of all heads, a row between two batches."""
        side = "kv" if name in "kv" else "q"
        if side not in self.packed:
            return ""
        _, h, _, d = self.dims(name)
        if (side, h * d) not in self.rows:
            starts = accumulate((n + 1 for n in self.lengths[side]), initial=0)
            self.rows[side, h * d] = integers(g, (self.scores[0] + 1, 1, 1, 1), [[[[n * h * d]]] for n in starts], g.r.choice(("INT32", "INT64")))
        return self.rows[side, h * d]

    def stride(self, g: Generator, name: str) -> Dims:
        """Strides of one of the large tensors."""
        dim = self.dims(name)
        if self.offsets(g, name):
            return (dim[2] * dim[1] * dim[3], dim[3], dim[1] * dim[3], 1)
        layout = g.r.choice((*LAYOUTS, "any"))
        self.tags.append(f"layout {layout}")
        return g.strides(dim, repeat=False) if layout == "any" else strides(dim, layout)


def attention(g: Generator) -> None:
    """sdpa or its gradient."""
    p = _problem(g)
    dtype = g.r.choice(("FLOAT", "FLOAT", "HALF", "BFLOAT16", "DOUBLE"))
    p.own["attn_scale"] = number(g, g.r.choice((0.25, 0.5, 1.0)))
    _padding(g, p)
    _masks(g, p)
    _dropout(g, p)
    if not p.backward:
        _forward_only(g, p)
    for n in "qkv":
        p.tensors[n] = _paged(g, p, n, dtype) if p.page and n in "kv" and f"paged_attention_{n}_table" in p.tensors else _large(g, p, n, n, dtype)
    if p.backward:
        _backward(g, p, dtype)
        return
    stats = p.own["generate_stats"]
    starts = p.offsets(g, "stats") if stats and g.r.random() < 0.8 else ""
    op = call(g, "sdpa", p.tensors, p.own, [(1, "", True)] if stats and not starts else [])
    if starts:
        name, dim = f"{op.out}_1", p.dims("stats")
        op = replace(op, further=((1, name, dim, (math.prod(dim), 1, dim[1], 1)),), ragged={name: starts})
        p.tags.append("packed stats")
    _finish(g, p, op, "o")


def _problem(g: Generator) -> Problem:
    """Sizes within the limits."""
    r = g.r
    usual = [n for n in LENGTHS if n <= LONGEST]
    work, elements = (1 << 20, g.limits.elements) if g.limits.long else (1 << 13, 2 * g.limits.elements)
    while True:
        s_q, s_kv = (r.choice(LENGTHS if r.random() < 0.75 else usual) for _ in range(2))
        for tried in range(24):  # smaller and smaller around long sequences
            b, h = r.choice((1, 2, 3) if tried < 6 else (1, 1, 2)), r.choice((1, 2, 4) if tried < 12 else (1, 1, 2))
            d, d_v = (r.choice((1, 2, 3, 8, 16) if tried < 16 else (1, 1, 2)) for _ in range(2))
            h_k, h_v = (r.choice([n for n in (1, 2, 4) if h % n == 0]) for _ in range(2))
            largest = max(b * h * s_q * max(d, d_v), b * s_kv * max(h_k * d, h_v * d_v))
            if b * h * s_q * s_kv * max(d, d_v) <= work and largest <= elements:
                tags = [f"s_q {s_q}", f"s_kv {s_kv}", *(["groups of heads"] if h not in (h_k, h_v) else []), *(["one head of k"] if h_k < h else [])]
                return Problem((b, h, s_q, s_kv), d, d_v, h_k, h_v, r.random() < BACKWARD_SHARE, tags=tags)


def _large(g: Generator, p: Problem, name: str, argument: str, dtype: str, data: Data | None = None) -> str:
    """Q, K, V, O or dO: packed, laid out in one of the usual ways, or behind another op."""
    dim, offsets = p.dims(name), p.offsets(g, name)
    if not offsets and data is None and g.r.random() < 0.3:
        return operand(g, dim, dtype).name
    made = g.buffer(dim, dtype, data, p.stride(g, name), offsets)
    if offsets:
        g.pool.remove(made)  # rows of one batch follow those of another: nothing else reads it
    return made.name


# ------------------------------------------------------------------------------------------------------------------------------------------ options
def _padding(g: Generator, p: Problem) -> None:
    """Lengths by batch, 0 among them, and perhaps packed tensors."""
    r, (b, _, s_q, s_kv) = g.r, p.scores
    if r.random() >= 0.4:
        return
    p.own["use_padding_mask"] = True
    for side, most in (("q", s_q), ("kv", s_kv)):
        p.lengths[side] = [r.choice((0, most, r.randint(0, most), r.randint(0, most))) for _ in range(b)]
        p.tensors[f"seq_len_{side}"] = integers(g, (b, 1, 1, 1), [[[[n]]] for n in p.lengths[side]])
        if 0 in p.lengths[side]:
            p.tags.append(f"{side} padded to nothing")
    p.packed = r.choice((set(), set(), {"q", "kv"}, {"q", "kv"}, {"q"}, {"kv"}))
    p.tags += [f"packed {side}" for side in sorted(p.packed)]


def _masks(g: Generator, p: Problem) -> None:
    """Bounds, ALiBi, bias, sink, score_mod."""
    r, (b, h, s_q, s_kv) = g.r, p.scores
    bounds = {n: r.choice(v) for n, v in (("right", (None, 0, 0, 1, 3, 40)), ("left", (None, None, 0, 1, 2, 5, 40)))}
    found = {f"diagonal_band_{n}_bound": v for n, v in bounds.items() if v is not None}
    if found and r.random() < 0.8:
        p.own |= found | {"diagonal_alignment": r.choice(("TOP_LEFT", "BOTTOM_RIGHT"))}
    if r.random() < 0.3:
        p.own["use_alibi_mask"] = True
    if r.random() < 0.3:
        dim = (r.choice((1, b)), r.choice((1, h)), r.choice((1, s_q)), r.choice((1, s_kv)))
        p.tensors["bias"] = parameter(g, dim if math.prod(dim) <= 4 * g.limits.elements else (1, 1, 1, s_kv))
        if p.backward and r.random() < 0.7:
            p.made.append(Made("dBias", "", g.input_of(p.tensors["bias"]).dim))
    if r.random() < 0.25:
        p.tensors["sink_token"] = g.buffer((1, h, 1, 1), "FLOAT").name
        if p.backward and r.random() < 0.7:
            p.made.append(Made("dSink_token", "", (1, h, 1, 1)))
    if r.random() < 0.25:
        p.own["score_mod"] = name = r.choice(sorted(SCORE_MODS))
        if name == "tensor":
            p.tensors["score_mod.extra"] = g.buffer((h, 1, s_kv), "FLOAT", Data("uniform", -1, 1)).name


def _dropout(g: Generator, p: Problem) -> None:
    """By a seed, whose mask is perhaps an output, or by a mask."""
    r, (b, h, s_q, s_kv) = g.r, p.scores
    kind = r.choice(("seed", "mask", None, None, None, None))
    if kind is None:
        return
    p.tags.append(f"dropout by {kind}")
    if kind == "seed":
        p.own["dropout"] = [0.25, *(integers(g, (1, 1, 1, 1), r.randrange(1 << 20), "INT64") for _ in range(2))]
        if r.random() < 0.8 and math.prod(p.scores) <= 8 * g.limits.elements:
            p.made.append(Made("rng_dump", "", p.scores))
        return
    dim = (r.choice((1, b)), r.choice((1, h)), r.choice((1, s_q)), s_kv)
    dim = dim if math.prod(dim) <= 4 * g.limits.elements else (1, 1, 1, s_kv)
    parts = [g.buffer(dim, "FLOAT", Data("grid", 0, 1)).name]
    parts += [g.buffer((1, 1, 1, 1), "FLOAT", given(v)).name for v in ((1.25, 0.8) if p.backward else (1.25,))]
    p.own["dropout"] = parts


def _forward_only(g: Generator, p: Problem) -> None:
    """Statistics, a mask of blocks, pages."""
    r, (b, h, s_q, s_kv) = g.r, p.scores
    p.own["generate_stats"] = r.random() < 0.6
    if p.packed < {"q"}:
        p.made += [Made(n, "", p.dims("stats")) for n in ("score_max", "score_sum_exp") if r.random() < 0.25]
    if r.random() < 0.15:
        dim = (r.choice((1, b)), r.choice((1, h)), -(-s_q // 128), -(-s_kv // 1024))
        bits = [r.choice((255, 1, 2, 3, r.randrange(256))) for _ in range(math.prod(dim))]
        p.tensors["block_mask"] = integers(g, dim, np.reshape(bits, dim).tolist(), "UINT8")
    if "kv" not in p.packed and r.random() < 0.2:
        p.page = r.choice((1, 4, 16, 64))
        each = -(-s_kv // p.page) + r.choice((0, 0, 1))
        for n in r.choice(("k", "v", "kv", "kv")):
            places = r.sample(range(b * each + 1), b * each)
            p.tensors[f"paged_attention_{n}_table"] = integers(g, (b, 1, each, 1), np.reshape(places, (b, 1, each, 1)).tolist())
        p.own["paged_attention_max_seq_len_kv"] = s_kv


def _paged(g: Generator, p: Problem, name: str, dtype: str) -> str:
    """K or V in pages."""
    pages = g.input_of(p.tensors[f"paged_attention_{name}_table"]).dim
    _, h, _, d = p.dims(name)
    return g.buffer((pages[0] * pages[2] + 1, h, p.page, d), dtype).name


# ----------------------------------------------------------------------------------------------------------------------------------------- results
def _backward(g: Generator, p: Problem, dtype: str) -> None:
    """The gradient of given O, dO and Stats."""
    for argument, name, data in (("o", "o", Data("normal", hi=0.5)), ("dO", "o", Data())):
        p.tensors[argument] = _large(g, p, name, argument, dtype, data)
    b, h, s_q, _ = p.scores
    starts = p.offsets(g, "stats")
    stats = g.buffer(p.dims("stats"), "FLOAT", Data("uniform", 3, 5), (h * s_q, 1, h, 1) if starts else None, starts)
    p.tensors["stats"] = stats.name
    if starts:
        g.pool.remove(stats)
    op = call(g, "sdpa_backward", p.tensors, p.own)
    further = tuple((i, f"{op.out}_{i}", p.dims(n), p.stride(g, n)) for i, n in ((1, "k"), (2, "v")))
    ragged = {name: p.offsets(g, n) for n, (_, name, _, _) in zip("kv", further, strict=True) if p.offsets(g, n)}
    _finish(g, p, replace(op, further=further, ragged=ragged), "q")


def _finish(g: Generator, p: Problem, op: Op, name: str) -> None:
    """Emit the call whose first result is like ``name``."""
    dim, stride, offsets = p.dims(name), p.stride(g, name), p.offsets(g, name)
    made = tuple(replace(m, name=f"{op.out}_{m.argument}") for m in p.made)
    ragged = op.ragged | ({op.out: offsets} if offsets else {})
    value = g.emit(replace(op, out_dim=dim, out_stride=stride, made=made, ragged=ragged, tags=tuple(p.tags)), dim, stride, "f")
    if offsets:  # packed rows are an output and nothing else reads them
        g.pool.remove(value)
        g.ops[-1] = replace(g.ops[-1], output=True, out_dtype=g.ops[-1].out_dtype or "FLOAT")
