"""Plans chosen by measurement: a convolution is tuned, and a second process takes the result from the tuning database without timing anything.

    python examples/11_autotune.py

Prints a row for each candidate plan (time, workspace, engine and knobs, or why it was dropped), what the choice gains over the heuristics', and what
a second process does: with autotune, with heur_mode.B, and in benchmark mode.
"""

import os
import subprocess
import sys
import tempfile

import numpy as np

import graphdnn
from graphdnn import data_type, heur_mode

IMAGES, CHANNELS, FILTERS, SIZE = 2, 16, 24, 20


def declare(**settings: bool) -> tuple[graphdnn.pygraph, list[graphdnn.tensor]]:
    """relu(conv(x, w) + bias) with 3 x 3 filters; the graph and x, w, bias, y."""
    types = {"io_data_type": data_type.FLOAT, "intermediate_data_type": data_type.FLOAT, "compute_data_type": data_type.FLOAT}
    g = graphdnn.pygraph(device="cpu", **types, **settings)
    x = g.tensor(dim=(IMAGES, CHANNELS, SIZE, SIZE), layout="channels_last", name="x")
    w = g.tensor(dim=(FILTERS, CHANNELS, 3, 3), layout="channels_last", name="w")
    bias = g.tensor(dim=(1, FILTERS, 1, 1), layout="channels_last", name="bias")
    y = g.relu(g.bias(g.conv_fprop(image=x, weight=w, padding=[1, 1], stride=[1, 1], dilation=[1, 1]), bias)).set_output(True)
    return g, [x, w, bias, y]


def second() -> None:
    """What another process finds."""
    g, _ = declare()
    found = g.autotune()
    print(f"second process   {found.source}: plan {g.plan.name}, {found.executions} timed executions")
    g, _ = declare()
    g.build([heur_mode.B])
    print(f"heur_mode.B      plan {g.plan.name}")
    g, _ = declare(benchmark=True)
    g.build([heur_mode.A])
    print(f"benchmark=True   plan {g.plan.name}")
    g, _ = declare(deterministic=True)
    g.build([heur_mode.B])
    print(f"deterministic    plan {g.plan.name}, by heuristics alone")


def channels_last(rng: np.random.Generator, n: int, c: int, h: int, w: int) -> np.ndarray:
    return rng.standard_normal((n, h, w, c), dtype=np.float32).transpose(0, 3, 1, 2)


def main() -> None:
    g, (x, w, bias, y) = declare()
    rng = np.random.default_rng(1)
    data, filters = channels_last(rng, IMAGES, CHANNELS, SIZE, SIZE), channels_last(rng, FILTERS, CHANNELS, 3, 3)
    out, shift = channels_last(rng, IMAGES, FILTERS, SIZE, SIZE), channels_last(rng, 1, FILTERS, 1, 1)
    pack = {x: data, w: filters, bias: shift, y: out}
    found = g.autotune(pack, iterations=5, candidates=6, workers=2)
    print(found)
    print(f"gain             {1 / found.ratio:.2f} (heuristic: plan {found.heuristic}); results checked by {'bounds' if found.exact else 'norm'}")
    g.execute(pack, np.empty(g.get_workspace_size(), np.uint8))

    padded = np.pad(data.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    exact = np.maximum(np.einsum("ncpqrs,kcrs->nkpq", windows, filters) + shift, 0)
    print(f"error            {np.abs(out - exact).max():.1e} (largest difference from float64)")
    assert np.abs(out - exact).max() < 1e-3, "the result is wrong"
    print(subprocess.run([sys.executable, __file__, "second"], check=True, capture_output=True, text=True).stdout, end="")


if __name__ == "__main__":
    if sys.argv[1:] == ["second"]:
        second()
    else:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["GRAPHDNN_TUNING_DB"] = os.path.join(folder, "tuning.db")
            main()
