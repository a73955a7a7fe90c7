"""Further families of random graphs: attention, grouped matmul, block scaling, random numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphdnn.engines import ENGINES
from graphdnn.ir import layout
from tests.fuzz.anchors import Values, call, image, operand, parameter
from tests.fuzz.program import Dims
from tests.helpers import Data, given

if TYPE_CHECKING:
    from tests.fuzz.generator import Generator

BLOCKS = {"FP8_E4M3": "FP8_E8M0", "FP8_E5M2": "FP8_E8M0", "FP4_E2M1": "FP8_E4M3", "INT8": "HALF"}
"""Types that blocks are quantized to, and that of their scales."""


def integers(g: Generator, dim: Dims, values: Any, dtype: str = "INT32") -> str:
    """A buffer of these integers."""
    return g.buffer(dim, dtype, given(values)).name


# ---------------------------------------------------------------------------------------------------------------------------------------- attention
def attention(g: Generator) -> None:
    """sdpa or its gradient: masks, bias, dropout, sink, padding, groups of heads, head dims of any size."""
    r = g.r
    (b, h, s_q, d), (h_k, h_v, s_kv, d_v) = _sizes(g)
    sizes = {"q": (b, h, s_q, d), "k": (b, h_k, s_kv, d), "v": (b, h_v, s_kv, d_v)}
    out: Dims = (b, h, s_q, d_v)
    dtype = r.choice(("FLOAT", "FLOAT", "HALF", "BFLOAT16", "DOUBLE"))
    tensors = {n: operand(g, dim, dtype).name for n, dim in sizes.items()}
    own: Values = {"attn_scale": r.choice((0.25, 0.5, 1.0))}
    backward = r.random() < 0.35 and any(e.name == "attention_bwd" for e in ENGINES)
    _masks(g, tensors, own, (b, h, s_q, s_kv), backward)
    if backward:
        more = {"o": (out, Data("normal", hi=0.5)), "dO": (out, None), "stats": ((b, h, s_q, 1), Data("uniform", 3, 5))}
        tensors |= {n: g.buffer(dim, dtype if n != "stats" else "FLOAT", data).name for n, (dim, data) in more.items()}
        op = call(g, "sdpa_backward", tensors, own)
        further = tuple((i, f"{op.out}_{i}", sizes[n]) for i, n in ((1, "k"), (2, "v")))
        op = replace(op, out_dim=sizes["q"], out_stride=layout.packed(sizes["q"]), further=further)
        g.emit(op, sizes["q"], layout.packed(sizes["q"]), "f")
        return
    own["generate_stats"] = stats = r.random() < 0.5
    op = call(g, "sdpa", tensors, own, [(1, "", True)] if stats else [])
    order = r.choice(((3, 2, 1, 0), (3, 1, 2, 0)))
    stride = layout.packed(out, order)
    g.emit(replace(op, out_dim=out, out_stride=stride), out, stride, "f")


def _sizes(g: Generator) -> tuple[Dims, Dims]:
    """(b, h_q, s_q, d) and (h_k, h_v, s_kv, d_v) whose tensors are within the limits."""
    r, lengths = g.r, (1, 2, 5, 17, 33) if g.limits.long else (1, 2, 3, 5)
    while True:
        b, h, d, d_v = r.choice((1, 2)), r.choice((1, 2, 4)), r.choice((1, 3, 8, 16)), r.choice((2, 8, 16))
        h_k, h_v = (r.choice([n for n in (1, 2, 4) if h % n == 0]) for _ in range(2))
        s_q, s_kv = r.choice(lengths), r.choice(lengths)
        if b * h * max(s_q, s_kv) * max(d, d_v, s_kv) <= g.limits.elements:
            return (b, h, s_q, d), (h_k, h_v, s_kv, d_v)


def _masks(g: Generator, tensors: dict[str, str], own: Values, scores: Dims, backward: bool) -> None:
    """What goes with a call, each by chance."""
    r, (b, h, s_q, s_kv) = g.r, scores
    if r.random() < 0.6:
        own["diagonal_alignment"] = r.choice(("TOP_LEFT", "BOTTOM_RIGHT"))
        own["diagonal_band_right_bound"] = r.choice((0, 0, 1, 3))
        if r.random() < 0.4:
            own["diagonal_band_left_bound"] = r.choice((1, 2, 5))
    if r.random() < 0.3:
        own["use_alibi_mask"] = True
    if r.random() < 0.4:
        tensors["bias"] = parameter(g, (r.choice((1, b)), r.choice((1, h)), r.choice((1, s_q)), s_kv))
    if r.random() < 0.3:
        own["use_padding_mask"] = True
        for n, most in (("seq_len_q", s_q), ("seq_len_kv", s_kv)):
            tensors[n] = integers(g, (b, 1, 1, 1), [[[[r.randint(0, most)]]] for _ in range(b)])
    if r.random() < 0.25:
        tensors["sink_token"] = g.buffer((1, h, 1, 1), "FLOAT").name
    if r.random() < 0.25:
        names = [integers(g, (1, 1, 1, 1), r.randrange(1 << 20), "INT64") for _ in range(2)]
        own["dropout"] = [0.25, *names]


# ------------------------------------------------------------------------------------------------------------------- grouped matmul, blocks, numbers
def grouped(g: Generator) -> None:
    """A grouped matmul of any mode, or the gradient of its weights."""
    r = g.r
    m, k, n, e = r.choice((1, 3, 8, 13)), r.choice((1, 4, 7)), r.choice((1, 3, 8)), r.choice((1, 2, 4))
    dtype = r.choice(("FLOAT", "HALF", "BFLOAT16", "DOUBLE"))
    tensors = {"token": operand(g, (1, m, k), dtype).name}
    tensors["first_token_offset"] = integers(g, (e, 1, 1), [[[v]] for v in sorted(r.randint(0, m) for _ in range(e))])
    if r.random() < 0.3:
        tensors["doutput"] = operand(g, (1, m, n), dtype).name
        g.emit(call(g, "moe_grouped_matmul_bwd", tensors, {}), (e, k, n), (k * n, 1, k), "f")
        return
    tensors["weight"] = operand(g, (e, k, n), dtype).name
    mode = r.choice(("NONE", "GATHER", "SCATTER"))
    own: Values = {"mode": mode}
    rows = m
    if mode == "GATHER":
        rows, own["top_k"] = r.choice((1, m, 2 * m)), 2
        tensors["token_index"] = integers(g, (1, rows, 1), [[[r.randrange(m)] for _ in range(rows)]])
        tensors["first_token_offset"] = integers(g, (e, 1, 1), [[[v]] for v in sorted(r.randint(0, rows) for _ in range(e))])
    if mode == "SCATTER":
        places = list(range(m))
        r.shuffle(places)
        tensors["token_index"] = integers(g, (1, m, 1), [[[p] for p in places]])
    dim = (1, rows, n)
    g.emit(call(g, "moe_grouped_matmul", tensors, own), dim, layout.packed(dim), "f")


def blocks(g: Generator) -> None:
    """Quantized in blocks, and back; or only back."""
    r, x = g.r, image(g, 2)
    axis = r.randrange(len(x.dim))
    block = r.choice([n for n in range(1, x.dim[axis] + 1) if x.dim[axis] % n == 0])
    counts = tuple(d // block if a == axis else d for a, d in enumerate(x.dim))
    kind = r.choice(sorted(BLOCKS))
    sizes = [block if a == axis else 1 for a in range(len(x.dim))]
    if r.random() < 0.6:
        q = call(g, "block_scale_quantize", {"input": x.name}, {"block_size": block, "axis": axis}, [(1, "", r.random() < 0.3)])
        q = replace(q, out_dtype=kind, extra_dtype=BLOCKS[kind])
        g.ops.append(q)
        tensors = {"input": q.out, "descale": q.extra[0][1]}
    else:
        data = Data("grid", -4, 4) if kind == "INT8" else Data("uniform", -2, 2)
        tensors = {"input": g.buffer(x.dim, kind, data).name, "descale": g.buffer(counts, BLOCKS[kind], Data("uniform", 0.5, 2)).name}
    g.emit(call(g, "block_scale_dequantize", tensors, {"block_size": sizes}), x.dim, None, "f")


def numbers(g: Generator) -> None:
    """Random numbers times something."""
    r, x = g.r, image(g, 2)
    name = r.choice(("BERNOULLI", "UNIFORM", "NORMAL"))
    own: Values = {"distribution": name, "seed": r.randrange(1 << 40), "offset": r.randrange(1 << 20), "dim": list(x.dim)}
    own |= {"BERNOULLI": {"probability": 0.7}, "UNIFORM": {"minimum": -1.0}, "NORMAL": {"standard_deviation": 0.5}}[name]
    made = g.emit(call(g, "rng", {}, own), x.dim, layout.packed(x.dim), "f")
    op = call(g, "mul", {"a": x.name, "b": made.name}, {})
    g.emit(op, x.dim, g.inherited([x, made], x.dim, scalars=False), "f")


MORE: dict[str, Callable[[Generator], None]] = {
    "attention": attention,
    "grouped matmul": grouped,
    "block scaling": blocks,
    "random numbers": numbers,
}
"""Family -> what draws one of it."""
