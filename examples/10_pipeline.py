"""Three graphs as one pipeline: buffers by name, one workspace for all, run as a whole. On the CPU, or `python 10_pipeline.py cuda:0`.

On a GPU the pipeline is captured into one CUDA graph and replayed with inputs that change in place.
"""

import sys

import torch

import graphdnn
from graphdnn import data_type, heur_mode

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"
TOKENS, WIDTH, HIDDEN = 512, 256, 1024


def graph(name: str) -> graphdnn.pygraph:
    float32 = data_type.FLOAT
    return graphdnn.pygraph(name, io_data_type=float32, intermediate_data_type=float32, compute_data_type=float32, device=DEVICE)


def linear(name: str, rows: int, inner: int, columns: int, activation: str | None = None) -> graphdnn.pygraph:
    """y = activation(x @ w + b)."""
    g = graph(name)
    x, w, b = (g.tensor(dim=d, layout="row", name=n) for n, d in {"x": (rows, inner), "w": (inner, columns), "b": (1, columns)}.items())
    y = g.add(g.matmul(x, w), b)
    (getattr(g, activation)(y) if activation else y).set_output(True).set_name("y")
    g.build([heur_mode.A])
    return g


def normalize() -> graphdnn.pygraph:
    """y = (x - mean) / deviation of each row."""
    g = graph("normalize")
    x = g.tensor(dim=(TOKENS, WIDTH), layout="row", name="x")
    centered = g.sub(x, g.reduction(x, graphdnn.reduction_mode.AVG, axes=1, keepdim=True))
    variance = g.reduction(g.mul(centered, centered), graphdnn.reduction_mode.AVG, axes=1, keepdim=True)
    g.mul(centered, g.rsqrt(g.add(variance, 1e-5))).set_output(True).set_name("y")
    g.build([heur_mode.A])
    return g


def main() -> None:
    block = graphdnn.Pipeline("feed forward")
    block.add(normalize(), {"y": "normal"})
    block.add(linear("up", TOKENS, WIDTH, HIDDEN, "gelu"), {"x": "normal", "w": "w1", "b": "b1", "y": "hidden"})
    block.add(linear("down", TOKENS, HIDDEN, WIDTH), {"x": "hidden", "w": "w2", "b": "b2"})
    block.build()
    print(block.explain(), "\n")

    shapes = {"x": (TOKENS, WIDTH), "w1": (WIDTH, HIDDEN), "b1": (1, HIDDEN), "w2": (HIDDEN, WIDTH), "b2": (1, WIDTH)}
    pack = {name: torch.randn(shape, device=DEVICE) * (shape[0] ** -0.5) for name, shape in shapes.items()}
    pack["y"] = torch.empty((TOKENS, WIDTH), device=DEVICE)
    workspace = torch.empty(block.workspace_bytes, dtype=torch.uint8, device=DEVICE)

    if DEVICE == "cpu":
        block.execute(pack, workspace)
    else:
        block.capture(pack, workspace)
        pack["x"].normal_()  # in place: the replay reads it
        block.replay()

    v = {name: t.double() for name, t in pack.items()}
    hidden = torch.nn.functional.gelu(torch.layer_norm(v["x"], [WIDTH]) @ v["w1"] + v["b1"])
    error = (v["y"] - (hidden @ v["w2"] + v["b2"])).abs().max().item()
    print(f"largest difference from torch in float64: {error:.1e}")
    assert error < 1e-4


main()
