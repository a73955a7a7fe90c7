"""A softmax written by hand, which no single kernel of one pass can do: where the graph is cut, why, and a picture of it.

    python examples/03_explain_and_draw.py [folder for softmax.svg]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import graphdnn
from graphdnn import data_type, heur_mode, reduction_mode

ROWS, COLUMNS = 96, 1000


def main(folder: Path) -> None:
    g = graphdnn.pygraph(name="softmax", io_data_type="float32", compute_data_type=data_type.FLOAT, device="cpu")
    x = g.tensor(dim=(ROWS, COLUMNS), layout="row", name="x")
    top = g.reduction(x, mode=reduction_mode.MAX, axes=(1,), keepdim=True, name="row_max")
    e = g.exp(g.sub(x, top, name="shift"), name="exp")
    total = g.reduction(e, mode=reduction_mode.ADD, axes=(1,), keepdim=True, name="row_sum")
    y = g.div(e, total, name="normalize").set_output(True).set_name("y")
    g.build([heur_mode.A])

    values = np.random.default_rng(3).standard_normal((ROWS, COLUMNS)).astype(np.float32) * 20
    result = np.empty_like(values)
    g.execute({"x": values, y: result}, np.empty(g.get_workspace_size(), np.uint8))
    exact = np.exp(values.astype(np.float64) - values.max(axis=1, keepdims=True))
    exact /= exact.sum(axis=1, keepdims=True)
    assert np.abs(result - exact).max() < 1e-6, "the result is wrong"

    print(g.explain())
    picture = folder / "softmax.svg"
    g.draw(picture)
    print(f"picture: {picture} ({picture.stat().st_size} bytes)")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
