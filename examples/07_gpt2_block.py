"""A block of GPT-2, layer norm, causal attention, residual, layer norm, MLP with GELU, residual: forward, and backward with all gradients.

    python examples/07_gpt2_block.py          (needs torch)

Each graph is printed with its kernels and its memory traffic, and the results are compared with torch: see pipeline.py.
"""

import torch
from pipeline import Tensors, compare, graph, heads, inputs, run, through, tokens
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

from graphdnn import norm_forward_phase, reduction_mode

BATCH, LENGTH, HEADS, SIZE, EPSILON = 2, 48, 4, 16, 1e-5
TOKENS, WIDTH = BATCH * LENGTH, HEADS * SIZE
SPLIT, JOIN = (BATCH, LENGTH, HEADS, SIZE), (TOKENS, WIDTH)
MATRICES = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
PARAMETERS = {f"w_{n}": dim for n, dim in MATRICES.items()} | {f"b_{n}": (1, dim[1]) for n, dim in MATRICES.items()}
PARAMETERS |= {f"{n}{i}": (1, WIDTH) for n in ("scale", "shift") for i in (0, 1)}
ATTENTION = {"attn_scale": SIZE**-0.5, "use_causal_mask": True, "name": "attention"}


def block(v: Tensors) -> torch.Tensor:
    """In torch."""
    h = layer_norm(v["x"], (WIDTH,), v["scale0"][0], v["shift0"][0], EPSILON)
    qkv = (h @ v["w_qkv"] + v["b_qkv"]).reshape(BATCH, LENGTH, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
    o = scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).reshape(TOKENS, WIDTH)
    x1 = v["x"] + o @ v["w_out"] + v["b_out"]
    h = layer_norm(x1, (WIDTH,), v["scale1"][0], v["shift1"][0], EPSILON)
    return x1 + gelu(h @ v["w_up"] + v["b_up"]) @ v["w_down"] + v["b_down"]


def parts(g, qkv):
    """Q, K and V, which attention reads where they are: a third of the columns each."""
    return [heads(g, g.slice(qkv, [slice(None), slice(i * WIDTH, (i + 1) * WIDTH)]), *SPLIT) for i in range(3)]


def in_rows(t):
    """``t``, of dims (batch, head, position, element), stored so that it is rows of tokens as it stands."""
    return t.set_dim((BATCH, HEADS, LENGTH, SIZE)).set_stride((LENGTH * WIDTH, SIZE, WIDTH, 1))


def forward(values: Tensors) -> Tensors:
    g = graph("forward")
    v, kept = inputs(g, values), {}

    def dense(t, n):
        return g.bias(g.matmul(t, v[f"w_{n}"], name=n), v[f"b_{n}"])

    def norm(t, i):
        y, kept[f"mean{i}"], kept[f"inv{i}"] = g.layernorm(norm_forward_phase.TRAINING, t, v[f"scale{i}"], v[f"shift{i}"], EPSILON, name=f"norm{i}")
        return y

    kept["qkv"] = dense(norm(v["x"], 0), "qkv")
    o, kept["stats"] = g.sdpa(*parts(g, kept["qkv"]), generate_stats=True, **ATTENTION)
    kept["o"] = in_rows(o)
    kept["x1"] = g.add(dense(tokens(g, o, *JOIN), "out"), v["x"])
    kept["u"] = dense(norm(kept["x1"], 1), "up")
    return run(g, values, kept | {"y": g.add(dense(g.gelu(kept["u"]), "down"), kept["x1"])})


def backward(values: Tensors) -> Tensors:
    """From what the forward pass kept; the normalized values and GELU are calculated again."""
    g = graph("backward")
    v, found = inputs(g, values), {}

    def dense(into, d, n):
        """The gradient of what went into a dense layer."""
        found[f"db_{n}"] = g.reduction(d, reduction_mode.ADD, axes=0, keepdim=True)
        back, found[f"dw_{n}"] = through(g, into, d, v[f"w_{n}"])
        return back

    def again(t, i):
        return g.add(g.mul(g.mul(g.sub(t, v[f"mean{i}"]), v[f"inv{i}"]), v[f"scale{i}"]), v[f"shift{i}"])

    def norm(d, t, i):
        given = (v[f"{n}{i}"] for n in ("scale", "mean", "inv"))
        back, found[f"dscale{i}"], found[f"dshift{i}"] = g.layernorm_backward(d, t, *given, name=f"dnorm{i}")
        return back

    du = g.gelu_backward(dense(g.gelu(v["u"]), v["dy"], "down"), v["u"])
    dx1 = g.add(norm(dense(again(v["x1"], 1), du, "up"), v["x1"], 1), v["dy"])
    do = heads(g, dense(tokens(g, v["o"], *JOIN), dx1, "out"), *SPLIT)
    d = g.sdpa_backward(*parts(g, v["qkv"]), v["o"], do, v["stats"], **ATTENTION)
    dqkv = g.concatenate([tokens(g, in_rows(t), *JOIN) for t in d], axis=1)
    found["dx"] = g.add(norm(dense(again(v["x"], 0), dqkv, "qkv"), v["x"], 0), dx1)
    return run(g, values, found)


def main() -> None:
    torch.manual_seed(7)
    values = {"x": torch.randn(JOIN), "dy": torch.randn(JOIN)} | {n: torch.randn(dim) * dim[0] ** -0.5 for n, dim in PARAMETERS.items()}
    kept = forward(values)
    compare({"y": kept["y"]} | backward(values | kept), block, values)


if __name__ == "__main__":
    main()
