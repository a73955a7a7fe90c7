"""The epilogue of an FP8-training layer: matmul -> scale -> bias -> GELU -> AMAX as one generated kernel, run on the CPU with real data.

    python examples/01_fp8_training_epilogue.py

Prints the kernels of the plan, the memory traffic that fusion saves, the error against float64, and what the first build costs: cold, and in a
second process that finds the kernel in the disk cache.
"""

import math
import os
import subprocess
import sys
import tempfile
import time

import numpy as np

import graphdnn
from graphdnn import data_type, heur_mode, reduction_mode

BATCH, M, N, K = 2, 384, 1024, 768


def build() -> tuple[graphdnn.pygraph, list[graphdnn.tensor], float]:
    """The built graph, its tensors in the order x, w, scale, bias, y, amax, and the seconds that building took."""
    g = graphdnn.pygraph(io_data_type=data_type.FLOAT, intermediate_data_type=data_type.FLOAT, compute_data_type=data_type.FLOAT, device="cpu")
    x = g.tensor(dim=(BATCH, M, K), layout="row", name="x")
    w = g.tensor(dim=(1, K, N), layout="row", name="w")
    scale = g.tensor(dim=(1, 1, 1), stride=(1, 1, 1), is_pass_by_value=True, name="scale")
    bias = g.tensor(dim=(1, 1, N), layout="row", name="bias")
    h = g.matmul(x, w, name="matmul")
    h = g.scale(h, scale, name="scale")
    h = g.bias(h, bias, name="bias")
    y = g.gelu(h, name="gelu").set_output(True)
    amax = g.reduction(y, mode=reduction_mode.AMAX, axes=(0, 1, 2), keepdim=True, name="amax").set_output(True)
    start = time.perf_counter()
    g.build([heur_mode.A, heur_mode.FALLBACK])
    return g, [x, w, scale, bias, y, amax], time.perf_counter() - start


def main() -> None:
    g, tensors, cold = build()
    rng = np.random.default_rng(1)
    x, w, bias = (rng.standard_normal(s, dtype=np.float32) for s in ((BATCH, M, K), (1, K, N), (1, 1, N)))
    scale, y, amax = 1 / math.sqrt(K), np.empty((BATCH, M, N), np.float32), np.empty((1, 1, 1), np.float32)
    workspace = np.empty(g.get_workspace_size(), np.uint8)
    pack = dict(zip(tensors, [x, w, scale, bias, y, amax], strict=True))
    g.execute(pack, workspace)

    h = x.astype(np.float64) @ w.astype(np.float64) * scale + bias
    exact = 0.5 * h * (1 + np.vectorize(math.erf)(h * math.sqrt(0.5)))
    report = g.explain()
    print(f"plan             {g.get_plan_name_at_index(0)}")
    print(f"kernels          {report.kernels} ({report.unfused_kernels} with one kernel per operation)")
    saved = 1 - report.bytes / report.unfused_bytes
    print(f"memory traffic   {report.bytes / 2**20:.1f} MiB, {saved:.0%} less than unfused ({report.unfused_bytes / 2**20:.1f} MiB)")
    print(f"error            y: {np.abs(y - exact).max():.1e}, amax: {abs(amax.item() - np.abs(exact).max()):.1e} (largest difference from float64)")
    print(f"first build      {cold:.2f} s, cold")
    print(subprocess.run([sys.executable, __file__, "second"], check=True, capture_output=True, text=True).stdout, end="")
    assert np.abs(y - exact).max() < 1e-5 * np.abs(exact).max(), "the result is wrong"


def second_process() -> None:
    seconds = build()[2]
    print(f"second process   {seconds:.3f} s, from the disk cache, numba {'imported' if 'numba' in sys.modules else 'not imported'}")


if __name__ == "__main__":
    if sys.argv[1:] == ["second"]:
        second_process()
    else:
        with tempfile.TemporaryDirectory() as folder:  # an empty cache, so that the first build is a cold one
            os.environ["GRAPHDNN_CACHE_DIR"] = folder
            main()
