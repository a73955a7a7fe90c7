"""The second half of attention, softmax(scores) @ v, with the softmax written by hand: where the graph is cut, why, and a picture of it.

    python examples/03_explain_and_draw.py [folder for attention.svg]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import graphdnn
from graphdnn import data_type, heur_mode, reduction_mode

HEADS, QUERIES, KEYS, WIDTH = 3, 96, 500, 64


def main(folder: Path) -> None:
    g = graphdnn.pygraph(io_data_type="float32", compute_data_type=data_type.FLOAT, device="cpu")
    scores = g.tensor(dim=(HEADS, QUERIES, KEYS), layout="row", name="scores")
    v = g.tensor(dim=(HEADS, KEYS, WIDTH), layout="row", name="v")
    top = g.reduction(scores, mode=reduction_mode.MAX, axes=(2,), keepdim=True, name="row_max")
    e = g.exp(g.sub(scores, top, name="shift"), name="exp")
    total = g.reduction(e, mode=reduction_mode.ADD, axes=(2,), keepdim=True, name="row_sum")
    weights = g.div(e, total, name="normalize")
    out = g.matmul(weights, v, name="weigh").set_output(True).set_name("out")
    g.build([heur_mode.A])

    rng = np.random.default_rng(3)
    x, values = (rng.standard_normal(t.get_dim(), dtype=np.float32) for t in (scores, v))
    result = np.empty((HEADS, QUERIES, WIDTH), np.float32)
    g.execute({"scores": x, v: values, out: result}, np.empty(g.get_workspace_size(), np.uint8))
    exact = np.exp(x.astype(np.float64) - x.max(axis=2, keepdims=True))
    exact = exact / exact.sum(axis=2, keepdims=True) @ values
    assert np.abs(result - exact).max() < 1e-6, "the result is wrong"

    print(g.explain())
    picture = folder / "attention.svg"
    g.draw(picture)
    print(f"picture: {picture} ({picture.stat().st_size} bytes)")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
