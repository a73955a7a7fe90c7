"""Further families of random graphs: grouped matmul, block scaling, random numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from graphdnn.ir import layout
from tests.fuzz.anchors import Values, call, image, integers, operand
from tests.fuzz.attention import attention
from tests.helpers import Data

if TYPE_CHECKING:
    from tests.fuzz.generator import Generator

BLOCKS = {"FP8_E4M3": "FP8_E8M0", "FP8_E5M2": "FP8_E8M0", "FP4_E2M1": "FP8_E4M3", "INT8": "HALF"}
"""Types that blocks are quantized to, and that of their scales."""


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
        q = replace(q, out_dtype=kind, extra_dtype=BLOCKS[kind], tags=(kind,))
        g.ops.append(q)
        tensors = {"input": q.out, "descale": q.extra[0][1]}
    else:
        data = Data("grid", -4, 4) if kind == "INT8" else Data("uniform", -2, 2)
        tensors = {"input": g.buffer(x.dim, kind, data).name, "descale": g.buffer(counts, BLOCKS[kind], Data("uniform", 0.5, 2)).name}
    g.emit(replace(call(g, "block_scale_dequantize", tensors, {"block_size": sizes}), tags=(kind,)), x.dim, None, "f")


def numbers(g: Generator) -> None:
    """Random numbers times something."""
    r, x = g.r, image(g, 2)
    name = r.choice(("BERNOULLI", "UNIFORM", "NORMAL"))
    drawn = {"seed": r.randrange(1 << 40), "offset": r.randrange(1 << 20)}
    held = {n: integers(g, (1, 1, 1, 1), v, "INT64") for n, v in drawn.items() if r.random() < 0.4}
    own: Values = {"distribution": name, "dim": list(x.dim)} | {n: v for n, v in drawn.items() if n not in held}
    own |= {"BERNOULLI": {"probability": 0.7}, "UNIFORM": {"minimum": -1.0}, "NORMAL": {"standard_deviation": 0.5}}[name]
    made = g.emit(call(g, "rng", held, own), x.dim, layout.packed(x.dim), "f")
    op = call(g, "mul", {"a": x.name, "b": made.name}, {})
    g.emit(op, x.dim, g.inherited([x, made], x.dim, scalars=False), "f")


MORE: dict[str, Callable[[Generator], None]] = {
    "attention": attention,
    "grouped matmul": grouped,
    "block scaling": blocks,
    "random numbers": numbers,
}
"""Family -> what draws one of it."""
