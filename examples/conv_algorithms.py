"""One convolution by every algorithm that takes it: the plain sum, Winograd's minimal filtering, Fourier transforms.

    python examples/conv_algorithms.py

For each: engine, kernels, workspace, the largest error against float64 (and torch's, on the CPU), numerical notes. The last line is the heuristic's
choice where the user has ruled out all but plain sums.
"""

import numpy as np
import torch

import graphdnn
from graphdnn import data_type, heur_mode, knob_type, numerical_note

N, C, H, W, K = 2, 16, 20, 20, 24
FLOAT = data_type.FLOAT
ALGORITHMS = {
    "tiles in registers": (6, 0),
    "implicit GEMM": (5, 0),
    "Winograd F(2x2, 3x3)": (7, 1),
    "Winograd F(4x4, 3x3)": (7, 0),
    "FFT of 16 x 16 tiles": (8, 0),
    "heuristic": None,
    "heuristic, plain sums": None,
}
"""Engine id and its KERNEL_CFG."""


def planned(label: str) -> tuple[graphdnn.pygraph, list[graphdnn.tensor]]:
    """relu(conv3x3(x, w) + b), channels last, built with one algorithm; its tensors in the order x, w, b, y."""
    g = graphdnn.pygraph(io_data_type=FLOAT, intermediate_data_type=FLOAT, compute_data_type=FLOAT, device="cpu")
    x = g.tensor(dim=(N, C, H, W), layout="channels_last", name="x")
    w = g.tensor(dim=(K, C, 3, 3), layout="channels_last", name="w")
    b = g.tensor(dim=(1, K, 1, 1), layout="row", name="b")
    y = g.relu(g.bias(g.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1], name="conv"), b)).set_output(True)
    g.validate()
    g.build_operation_graph()
    chosen = ALGORITHMS[label]
    if chosen is None:
        g.create_execution_plans([heur_mode.A])
    else:
        g.create_execution_plan(chosen[0], {knob_type.KERNEL_CFG: chosen[1]})
    if "plain" in label:
        g.deselect_numeric_notes([numerical_note.WINOGRAD, numerical_note.FFT])
    g.check_support()
    g.build_plans()
    return g, [x, w, b, y]


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(s, generator=generator) for s in ((N, C, H, W), (K, C, 3, 3), (1, K, 1, 1)))
    x, w = (t.to(memory_format=torch.channels_last) for t in (x, w))
    exact = torch.relu(torch.nn.functional.conv2d(x.double(), w.double(), padding=1) + b.double())
    by_torch = torch.relu(torch.nn.functional.conv2d(x, w, b.reshape(K), padding=1))

    print(f"{'algorithm':<24} {'plan':<14} {'kernels':>7} {'workspace':>10} {'error':>8}  notes")
    for label in ALGORITHMS:
        g, tensors = planned(label)
        y = torch.full_like(by_torch, torch.nan)
        g.execute(dict(zip(tensors, [x, w, b, y], strict=True)), np.empty(max(g.get_workspace_size(), 1), np.uint8))
        error = float((y.double() - exact).abs().max())
        notes = ", ".join(g.plan.numeric_notes) or "-"
        print(f"{label:<24} {g.plan.name:<14} {len(g.plan.kernels):>7} {g.get_workspace_size():>10,} {error:>8.1e}  {notes}")
        assert error < 1e-5 * 20 * float(exact.abs().max()), "the result is wrong"
    print(f"{'torch':<24} {'':<14} {'':>7} {'':>10} {float((by_torch.double() - exact).abs().max()):>8.1e}")


if __name__ == "__main__":
    main()
