"""What the examples of whole blocks share: graphs on torch tensors, the report against one kernel per operation, the comparison with torch.

A block in float32 is compared with torch in float64. The bound of its error is what torch in float32 errs by: both round every operation of the
block to the same 24 bits, only the order of their sums differs, for which a factor of 4 is left.
"""

from collections.abc import Callable

import torch

import graphdnn
from graphdnn import data_type, heur_mode

Tensors = dict[str, torch.Tensor]
ROOM = 4.0


def graph(name: str) -> graphdnn.pygraph:
    """An empty graph in float32 on the CPU."""
    float32 = data_type.FLOAT
    return graphdnn.pygraph(name, io_data_type=float32, intermediate_data_type=float32, compute_data_type=float32, device="cpu")


def inputs(g: graphdnn.pygraph, values: Tensors) -> dict[str, graphdnn.tensor]:
    """An input for each of ``values``, with its name, dims and strides; those that no operation reads do not count."""
    return {name: g.tensor(dim=t.shape, stride=t.stride(), name=name) for name, t in values.items()}


def heads(g: graphdnn.pygraph, t: graphdnn.tensor, batch: int, length: int, count: int, size: int) -> graphdnn.tensor:
    """Rows of tokens, with ``count`` heads of ``size`` elements each, as (batch, head, position, element)."""
    return g.transpose(g.reshape(t).set_dim((batch, length, count, size)), (0, 2, 1, 3))


def tokens(g: graphdnn.pygraph, t: graphdnn.tensor, rows: int, columns: int) -> graphdnn.tensor:
    """What ``heads`` was made of."""
    return g.reshape(g.transpose(t, (0, 2, 1, 3))).set_dim((rows, columns))


def through(g: graphdnn.pygraph, into: graphdnn.tensor, d: graphdnn.tensor, w: graphdnn.tensor) -> tuple[graphdnn.tensor, graphdnn.tensor]:
    """From the gradient ``d`` of into @ w: the gradients of ``into`` and of ``w``."""
    return g.matmul(d, g.transpose(w, (1, 0))), g.matmul(g.transpose(into, (1, 0)), d)


def run(g: graphdnn.pygraph, values: Tensors, outputs: dict[str, graphdnn.tensor]) -> Tensors:
    """Build the graph, print its kernels and traffic, run it on ``values`` (by the names of its inputs) and return its ``outputs``."""
    for name, t in outputs.items():
        t.set_output(True).set_name(name)
    g.build([heur_mode.A])
    r = g.explain()
    print(f"{r.graph:<10} {r.kernels} kernels ({r.unfused_kernels} with one per operation)", end=", ")
    print(f"{r.bytes / 2**20:.2f} MiB of memory traffic ({r.unfused_bytes / 2**20:.2f})")
    found = {name: torch.empty_strided(t.get_dim(), t.get_stride()) for name, t in outputs.items()}
    g.execute(values | found, torch.empty(g.get_workspace_size(), dtype=torch.uint8))
    return found


def gradients(block: Callable[[Tensors], torch.Tensor], values: Tensors, dtype: torch.dtype) -> Tensors:
    """torch's result "y" of ``block`` and, from the gradient "dy" of it, those of all other values, "d" and their name."""
    v = {name: t.detach().to(dtype).requires_grad_(name != "dy") for name, t in values.items()}
    y = block(v)
    y.backward(v["dy"])
    return {"y": y.detach()} | {f"d{name}": t.grad for name, t in v.items() if t.grad is not None}


def compare(found: Tensors, block: Callable[[Tensors], torch.Tensor], values: Tensors) -> None:
    """AssertionError unless every tensor of ``found`` is as near to torch's float64 as torch's float32 is, but for ROOM."""
    exact, plain = (gradients(block, values, dtype) for dtype in (torch.float64, torch.float32))
    for name, t in found.items():
        size = exact[name].abs().max()
        error, usual = (((x - exact[name]).abs().max() / size).item() for x in (t.reshape(exact[name].shape), plain[name]))
        print(f"  {name:<8} error {error:.1e} of the largest value (torch in float32: {usual:.1e})")
        assert error <= ROOM * max(usual, 2.0**-24), name
