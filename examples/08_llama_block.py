"""A block of Llama: RMS norm, rotary embedding, causal attention with grouped heads, residual, RMS norm, SwiGLU, residual: forward and backward.

    python examples/08_llama_block.py          (needs torch)

Each graph is printed with its kernels and its memory traffic, and the results are compared with torch: see pipeline.py.
"""

import torch
from pipeline import Tensors, compare, graph, heads, inputs, run, through, tokens
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from graphdnn import norm_forward_phase

BATCH, LENGTH, HEADS, GROUPS, SIZE, INNER, EPSILON = 2, 40, 6, 2, 16, 160, 1e-5  # HEADS of Q, GROUPS of K and V
TOKENS, WIDTH, NARROW = BATCH * LENGTH, HEADS * SIZE, GROUPS * SIZE
ROWS, HALF = (TOKENS, WIDTH), (1, 1, LENGTH, SIZE // 2)
MATRICES = {"q": (WIDTH, WIDTH), "k": (WIDTH, NARROW), "v": (WIDTH, NARROW), "out": (WIDTH, WIDTH)}
MATRICES |= {"gate": (WIDTH, INNER), "up": (WIDTH, INNER), "down": (INNER, WIDTH)}
PARAMETERS = {f"w_{n}": dim for n, dim in MATRICES.items()} | {"scale0": (1, WIDTH), "scale1": (1, WIDTH)}
ATTENTION = {"attn_scale": SIZE**-0.5, "use_causal_mask": True, "name": "attention"}
COUNT = {"q": HEADS, "k": GROUPS, "v": GROUPS}


def angles() -> Tensors:
    """Cosines and sines of the rotary embedding: position times 10000 ** (-2 i / SIZE)."""
    at = torch.arange(LENGTH)[:, None] * 10000.0 ** (-torch.arange(SIZE // 2) * 2 / SIZE)
    return {"cos": at.cos().reshape(HALF), "sin": at.sin().reshape(HALF)}


def block(v: Tensors) -> torch.Tensor:
    """In torch."""
    cos, sin = (t.to(v["x"].dtype) for t in angles().values())

    def rotated(t):
        a, b = t.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    h = rms_norm(v["x"], (WIDTH,), v["scale0"][0], EPSILON)
    q, k, w = ((h @ v[f"w_{n}"]).reshape(BATCH, LENGTH, c, SIZE).transpose(1, 2) for n, c in COUNT.items())
    o = scaled_dot_product_attention(rotated(q), rotated(k), w, is_causal=True, enable_gqa=True)
    x1 = v["x"] + o.transpose(1, 2).reshape(ROWS) @ v["w_out"]
    h = rms_norm(x1, (WIDTH,), v["scale1"][0], EPSILON)
    return x1 + (silu(h @ v["w_gate"]) * (h @ v["w_up"])) @ v["w_down"]


def rotated(g, t, cos, sin):
    """Every pair (i, i + SIZE / 2) turned by its angle."""
    a, b = (g.slice(t, [slice(None)] * 3 + [s]) for s in (slice(0, SIZE // 2), slice(SIZE // 2, SIZE)))
    return g.concatenate([g.sub(g.mul(a, cos), g.mul(b, sin)), g.add(g.mul(b, cos), g.mul(a, sin))], axis=3)


def in_rows(t, count):
    """``t``, of dims (batch, head, position, element), stored so that it is rows of tokens as it stands."""
    return t.set_dim((BATCH, count, LENGTH, SIZE)).set_stride((LENGTH * count * SIZE, SIZE, count * SIZE, 1))


def forward(values: Tensors) -> Tensors:
    g = graph("forward")
    v, kept = inputs(g, values), {}

    def dense(t, n):
        return g.matmul(t, v[f"w_{n}"], name=n)

    def norm(t, i):
        y, kept[f"inv{i}"] = g.rmsnorm(norm_forward_phase.TRAINING, t, v[f"scale{i}"], None, EPSILON, name=f"norm{i}")
        return y

    h = norm(v["x"], 0)
    q, k, kept["v"] = (heads(g, dense(h, n), BATCH, LENGTH, c, SIZE) for n, c in COUNT.items())
    kept |= {"q": rotated(g, q, v["cos"], v["sin"]), "k": rotated(g, k, v["cos"], v["sin"])}
    o, kept["stats"] = g.sdpa(kept["q"], kept["k"], kept["v"], generate_stats=True, **ATTENTION)
    kept["o"] = in_rows(o, HEADS)
    kept["x1"] = g.add(dense(tokens(g, o, *ROWS), "out"), v["x"])
    h = norm(kept["x1"], 1)
    kept |= {"gate": dense(h, "gate"), "up": dense(h, "up")}
    y = g.add(dense(g.mul(g.swish(kept["gate"]), kept["up"]), "down"), kept["x1"])
    return run(g, values, kept | {"y": y})


def backward(values: Tensors) -> Tensors:
    """From what the forward pass kept; the normalized values and SwiGLU are calculated again."""
    g = graph("backward")
    v, found = inputs(g, values), {}

    def dense(into, d, n):
        """The gradient of what went into a dense layer."""
        back, found[f"dw_{n}"] = through(g, into, d, v[f"w_{n}"])
        return back

    def again(t, i):
        return g.mul(g.mul(t, v[f"inv{i}"]), v[f"scale{i}"])

    def norm(d, t, i):
        back, found[f"dscale{i}"], _ = g.rmsnorm_backward(d, t, v[f"scale{i}"], v[f"inv{i}"], has_dbias=False, name=f"dnorm{i}")
        return back

    gated = g.swish(v["gate"])
    d = dense(g.mul(gated, v["up"]), v["dy"], "down")
    h = again(v["x1"], 1)
    dh = g.add(dense(h, g.swish_backward(g.mul(d, v["up"]), v["gate"]), "gate"), dense(h, g.mul(d, gated), "up"))
    dx1 = g.add(norm(dh, v["x1"], 1), v["dy"])
    do = heads(g, dense(tokens(g, v["o"], *ROWS), dx1, "out"), BATCH, LENGTH, HEADS, SIZE)
    d = g.sdpa_backward(v["q"], v["k"], v["v"], v["o"], do, v["stats"], **ATTENTION)
    dq, dk, dv = (in_rows(t, c) for t, c in zip(d, COUNT.values(), strict=True))
    dq, dk = (rotated(g, t, v["cos"], g.neg(v["sin"])) for t in (dq, dk))  # turned back
    h, parts = again(v["x"], 0), {"q": dq, "k": dk, "v": dv}
    a, b, c = (dense(h, tokens(g, t, TOKENS, COUNT[n] * SIZE), n) for n, t in parts.items())
    return run(g, values, found | {"dx": g.add(norm(g.add(g.add(a, b), c), v["x"], 0), dx1)})


def main() -> None:
    torch.manual_seed(8)
    values = {"x": torch.randn(ROWS), "dy": torch.randn(ROWS)} | {n: torch.randn(dim) * dim[0] ** -0.5 for n, dim in PARAMETERS.items()}
    kept = forward(values | angles())
    compare({"y": kept["y"]} | backward(values | angles() | kept), block, values)


if __name__ == "__main__":
    main()
