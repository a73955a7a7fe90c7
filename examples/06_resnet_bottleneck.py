"""The bottleneck block of ResNet-50, 1x1, 3x3, 1x1 convolution with batch normalization, ReLU and a residual: inference and a step of training.

    python examples/06_resnet_bottleneck.py          (needs torch)

Each graph is printed with its kernels and its memory traffic, and the results are compared with torch: see pipeline.py.
"""

import torch
from pipeline import Tensors, compare, graph, inputs, run
from torch.nn.functional import batch_norm, conv2d, relu

BATCH, CHANNELS, INNER, SIZE, EPSILON = 2, 64, 16, 14, 1e-5
LAYERS = ((INNER, CHANNELS, 1), (INNER, INNER, 3), (CHANNELS, INNER, 1))  # filters, channels, taps each way
GEOMETRY = [{"padding": (r // 2,) * 2, "stride": (1, 1), "dilation": (1, 1)} for _, _, r in LAYERS]


def block(v: Tensors) -> torch.Tensor:
    """In torch, with the statistics of the batch."""
    a = v["x"]
    for i, (_, _, r) in enumerate(LAYERS):
        c = conv2d(a, v[f"w{i}"], padding=r // 2)
        a = batch_norm(c, None, None, v[f"scale{i}"].flatten(), v[f"bias{i}"].flatten(), training=True, eps=EPSILON)
        a = relu(a if i < 2 else a + v["x"])
    return a


def forward(training: bool, values: Tensors) -> Tensors:
    g = graph("training" if training else "inference")
    v, kept = inputs(g, values), {}
    a = v["x"]
    for i in range(3):
        c = g.conv_fprop(a, v[f"w{i}"], **GEOMETRY[i], name=f"conv{i}")
        if training:
            a, mean, inv, _, _ = g.batchnorm(c, v[f"scale{i}"], v[f"bias{i}"], None, None, EPSILON, None, name=f"bn{i}")
            kept |= {f"c{i}": c, f"mean{i}": mean, f"inv{i}": inv}
        else:
            a = g.batchnorm_inference(c, *(v[f"{n}{i}"] for n in ("mean", "inv", "scale", "bias")), name=f"bn{i}")
        a = g.relu(a if i < 2 else g.add(a, v["x"], name="residual"), name=f"relu{i}")
    return run(g, values, {"y": a} | kept)


def backward(values: Tensors) -> Tensors:
    """From what the forward pass kept, the results c of the convolutions; what went into the next one is calculated again from these."""
    g = graph("backward")
    v, found = inputs(g, values), {}
    again = [g.batchnorm_inference(*(v[f"{n}{i}"] for n in ("c", "mean", "inv", "scale", "bias"))) for i in (0, 1)]
    into = [v["x"], *(g.relu(t) for t in again)]
    d = residual = g.relu_backward(v["dy"], v["y"], name="drelu2")
    for i in (2, 1, 0):
        dc, dscale, dbias = g.batchnorm_backward(d, *(v[f"{n}{i}"] for n in ("c", "scale", "mean", "inv")), name=f"dbn{i}")
        dw = g.conv_wgrad(into[i], dc, **GEOMETRY[i], name=f"wgrad{i}").set_dim(v[f"w{i}"].get_dim())
        da = g.conv_dgrad(dc, v[f"w{i}"], **GEOMETRY[i], name=f"dgrad{i}").set_dim((BATCH, LAYERS[i][1], SIZE, SIZE))
        d = g.relu_backward(da, into[i], name=f"drelu{i - 1}") if i else g.add(da, residual, name="dresidual")
        found |= {f"dw{i}": dw, f"dscale{i}": dscale, f"dbias{i}": dbias}
    return run(g, values, found | {"dx": d})


def main() -> None:
    torch.manual_seed(6)
    values = {n: torch.randn(BATCH, CHANNELS, SIZE, SIZE).to(memory_format=torch.channels_last) for n in ("x", "dy")}
    for i, (k, c, r) in enumerate(LAYERS):
        values[f"w{i}"] = (torch.randn(k, c, r, r) * (c * r * r) ** -0.5).to(memory_format=torch.channels_last)
        values |= {f"scale{i}": torch.rand(1, k, 1, 1) + 0.5, f"bias{i}": torch.randn(1, k, 1, 1)}
    kept = forward(True, values)
    compare({"y": kept["y"]} | backward(values | kept), block, values)
    compare({"y": forward(False, values | kept)["y"]}, block, values)  # with the statistics of the batch, which give the same


if __name__ == "__main__":
    main()
