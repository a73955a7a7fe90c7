"""A script with names of the cuDNN Frontend only: after `import graphdnn as cudnn` it runs unchanged, here on the CPU.

    python examples/02_from_cudnn_script.py          (torch tensors too, where torch is installed)

The same graph in fp32, bf16 and fp16; buffers are NumPy arrays, then torch CPU tensors; the scale is a by-value scalar on the host.
"""

import importlib.util

import ml_dtypes
import numpy as np

import graphdnn as cudnn

B, M, N, K = 2, 48, 80, 64


def build(io):
    """relu(scale * (a @ b) + bias) with every candidate plan built. Returns the graph and its tensors a, b, scale, bias, y."""
    graph = cudnn.pygraph(io_data_type=io, intermediate_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT)
    a = graph.tensor(name="a", dim=[B, M, K], stride=[M * K, K, 1], data_type=io)
    b = graph.tensor(name="b", dim=[B, K, N], stride=[K * N, N, 1], data_type=io)
    scale = graph.tensor(name="scale", dim=[1, 1, 1], stride=[1, 1, 1], data_type=cudnn.data_type.FLOAT, is_pass_by_value=True)
    bias = graph.tensor(name="bias", dim=[1, 1, N], stride=[N, N, 1], data_type=io)
    c = graph.matmul(name="matmul", A=a, B=b)
    c = graph.mul(name="scale", a=c, b=scale)
    c = graph.bias(name="bias", input=c, bias=bias)
    y = graph.relu(name="relu", input=c)
    y.set_output(True).set_data_type(io)

    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans(cudnn.build_plan_policy.ALL)
    return graph, (a, b, scale, bias, y)


def run(label, io, put, scalar, tolerance):
    """Execute every plan on buffers of one library (`put` makes one from float64 values) and compare with float64."""
    graph, (a, b, scale, bias, y) = build(io)
    rng = np.random.default_rng(0)
    buffers = {t: put(rng.standard_normal(t.get_dim())) for t in (a, b, bias)}
    wide = {t: as_float64(x) for t, x in buffers.items()}
    exact = np.maximum(0.125 * (wide[a] @ wide[b]) + wide[bias], 0)
    for index in range(graph.get_execution_plan_count()):
        out = put(np.full(y.get_dim(), np.nan))
        workspace = np.empty(graph.get_workspace_size_plan_at_index(index), np.uint8)
        graph.execute_plan_at_index({**buffers, scale: scalar, y: out}, workspace, index)
        error = np.abs(as_float64(out) - exact).max() / np.abs(exact).max()
        assert error < tolerance, (label, index, error)
        print(f"{label}  plan {index}: error {error:.1e} of the largest value  {graph.get_plan_name_at_index(index)}")


def as_float64(buffer):
    return buffer.double().numpy() if hasattr(buffer, "double") else buffer.astype(np.float64)


def main():
    types = {
        "fp32": (cudnn.data_type.FLOAT, np.float32, "float32", 1e-6),
        "bf16": (cudnn.data_type.BFLOAT16, ml_dtypes.bfloat16, "bfloat16", 8e-3),
        "fp16": (cudnn.data_type.HALF, np.float16, "float16", 1e-3),
    }
    for name, (io, dtype, torch_name, tolerance) in types.items():
        run(f"numpy {name}", io, lambda x, dtype=dtype: x.astype(dtype), np.full((1, 1, 1), 0.125, np.float32), tolerance)
        if importlib.util.find_spec("torch"):
            import torch

            torch_dtype = getattr(torch, torch_name)
            run(f"torch {name}", io, lambda x, dtype=torch_dtype: torch.from_numpy(x).to(dtype), torch.full((1, 1, 1), 0.125), tolerance)


if __name__ == "__main__":
    main()
