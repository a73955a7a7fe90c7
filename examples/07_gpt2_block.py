"""A block of GPT-2, layer norm, causal attention, residual, layer norm, MLP with GELU, residual: forward, and backward with all gradients.

    python examples/07_gpt2_block.py          (needs torch)

Each graph is printed with its kernels and its memory traffic, and the results are compared with torch: see pipeline.py.
"""

import torch
from pipeline import Tensors, compare, graph, run
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

from graphdnn import norm_forward_phase, reduction_mode

BATCH, LENGTH, HEADS, HEAD, EPSILON = 2, 48, 4, 16, 1e-5
TOKENS, WIDTH = BATCH * LENGTH, HEADS * HEAD
MATRICES = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
MASKED = {"attn_scale": HEAD**-0.5, "use_causal_mask": True}


def block(v: Tensors) -> torch.Tensor:
    """In torch."""
    h = layer_norm(v["x"], (WIDTH,), v["scale0"][0], v["shift0"][0], EPSILON)
    qkv = (h @ v["w_qkv"] + v["b_qkv"]).reshape(BATCH, LENGTH, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
    o = scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).reshape(TOKENS, WIDTH)
    x1 = v["x"] + o @ v["w_out"] + v["b_out"]
    h = layer_norm(x1, (WIDTH,), v["scale1"][0], v["shift1"][0], EPSILON)
    return x1 + gelu(h @ v["w_up"] + v["b_up"]) @ v["w_down"] + v["b_down"]


def heads(g, t, part=0):
    """Columns ``part * WIDTH ...`` of a matrix of tokens as (batch, head, position, element of the head)."""
    t = g.slice(t, [slice(0, TOKENS), slice(part * WIDTH, (part + 1) * WIDTH)])
    return g.transpose(g.reshape(t).set_dim((BATCH, LENGTH, HEADS, HEAD)), (0, 2, 1, 3))


def tokens(g, t):
    return g.reshape(g.transpose(t, (0, 2, 1, 3))).set_dim((TOKENS, WIDTH))


def declare(g, **inputs):
    """The inputs of a graph: all parameters, and ``inputs`` by name with their dims."""
    inputs |= {f"w_{n}": dim for n, dim in MATRICES.items()} | {f"b_{n}": (1, dim[1]) for n, dim in MATRICES.items()}
    inputs |= {f"{n}{i}": (1, WIDTH) for n in ("scale", "shift") for i in (0, 1)}
    return {n: g.tensor(dim=dim, layout="row", name=n) for n, dim in inputs.items()}


def forward(values: Tensors) -> Tensors:
    g = graph("forward")
    v = declare(g, x=(TOKENS, WIDTH))
    dense = lambda t, n: g.bias(g.matmul(t, v[f"w_{n}"], name=n), v[f"b_{n}"])  # noqa: E731
    norm = lambda t, i: g.layernorm(norm_forward_phase.TRAINING, t, v[f"scale{i}"], v[f"shift{i}"], EPSILON, name=f"norm{i}")  # noqa: E731
    h, mean0, inv0 = norm(v["x"], 0)
    qkv = dense(h, "qkv")
    o, stats = g.sdpa(*(heads(g, qkv, i) for i in range(3)), generate_stats=True, **MASKED, name="attention")
    o = tokens(g, o)
    x1 = g.add(dense(o, "out"), v["x"])
    h, mean1, inv1 = norm(x1, 1)
    u = dense(h, "up")
    y = g.add(dense(g.gelu(u), "down"), x1)
    return run(g, values, dict(y=y, qkv=qkv, o=o, stats=stats, x1=x1, u=u, mean0=mean0, inv0=inv0, mean1=mean1, inv1=inv1))


def backward(values: Tensors) -> Tensors:
    """From what the forward pass kept; the normalized values and GELU are calculated again."""
    g = graph("backward")
    shapes = dict.fromkeys(("x", "x1", "o", "dy"), (TOKENS, WIDTH)) | {"qkv": (TOKENS, 3 * WIDTH), "u": (TOKENS, 4 * WIDTH)}
    shapes |= dict.fromkeys(("mean0", "inv0", "mean1", "inv1"), (TOKENS, 1)) | {"stats": (BATCH, HEADS, LENGTH, 1)}
    v, found = declare(g, **shapes), {}

    def dense(into, d, n):
        """The gradient of what went into a dense layer; those of its parameters are found on the way."""
        found[f"dw_{n}"] = g.matmul(g.transpose(into, (1, 0)), d, name=f"dw_{n}")
        found[f"db_{n}"] = g.reduction(d, reduction_mode.ADD, axes=0, keepdim=True)
        return g.matmul(d, g.transpose(v[f"w_{n}"], (1, 0)), name=f"d_{n}")

    def again(t, i):
        return g.add(g.mul(g.mul(g.sub(t, v[f"mean{i}"]), v[f"inv{i}"]), v[f"scale{i}"]), v[f"shift{i}"])

    def norm(d, t, i):
        dx, *found[f"dscale{i}"], found[f"dshift{i}"] = g.layernorm_backward(d, t, *(v[f"{n}{i}"] for n in ("scale", "mean", "inv")), name=f"dnorm{i}")
        found[f"dscale{i}"] = found[f"dscale{i}"][0]
        return dx

    du = g.gelu_backward(dense(g.gelu(v["u"]), v["dy"], "down"), v["u"])
    dx1 = g.add(norm(dense(again(v["x1"], 1), du, "up"), v["x1"], 1), v["dy"])
    do = heads(g, dense(v["o"], dx1, "out"))
    q, k, w = (heads(g, v["qkv"], i) for i in range(3))
    parts = g.sdpa_backward(q, k, w, heads(g, v["o"]), do, v["stats"], **MASKED, name="dattention")
    dqkv = g.concatenate([tokens(g, t) for t in parts], axis=1)
    found["dx"] = g.add(norm(dense(again(v["x"], 0), dqkv, "qkv"), v["x"], 0), dx1)
    return run(g, values, found)


def main() -> None:
    torch.manual_seed(7)
    values = {"x": torch.randn(TOKENS, WIDTH), "dy": torch.randn(TOKENS, WIDTH)}
    for n, (k, m) in MATRICES.items():
        values |= {f"w_{n}": torch.randn(k, m) * k**-0.5, f"b_{n}": torch.randn(1, m) * 0.1}
    for i in (0, 1):
        values |= {f"scale{i}": torch.rand(1, WIDTH) + 0.5, f"shift{i}": torch.randn(1, WIDTH) * 0.1}
    kept = forward(values)
    compare({"y": kept["y"]} | backward(values | kept), block, values)


if __name__ == "__main__":
    main()
