"""Graphs with dims: every shape against the reference, on every target, and few compilations."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import graphdnn
from graphdnn import Dim, data_type, reference
from tests.helpers import Outcome, Setup, _compare, _run_plan, built

F, B = data_type.FLOAT, data_type.BFLOAT16
Values = tuple[int, ...]


def matmul_gelu(g: Any, m: Any, n: Any, k: Any, dtype: data_type = F) -> None:
    a, b, bias = (g.tensor(name=s, dim=d, layout="row", data_type=dtype) for s, d in (("A", [2, m, k]), ("B", [2, k, n]), ("bias", [1, 1, n])))
    g.gelu(g.add(g.matmul(a, b), bias)).set_output(True).set_data_type(dtype).set_name("Y")


def layernorm(g: Any, rows: Any, width: Any, dtype: data_type = F) -> None:
    x = g.tensor(name="X", dim=[rows, width, 1, 1], layout="row", data_type=dtype)
    scale, bias = (g.tensor(name=s, dim=[1, width, 1, 1], layout="row", data_type=dtype) for s in ("scale", "bias"))
    for name, t in zip(("Y", "mean", "inv"), g.layernorm(graphdnn.norm_forward_phase.TRAINING, x, scale, bias, 1e-5), strict=True):
        t.set_output(True).set_name(name)


def chain(g: Any, rows: Any, columns: Any) -> None:
    """Pointwise with a broadcast row and column, and strides that are padded."""
    x = g.tensor(name="X", dim=[rows, columns], stride=[columns + 3, 1])
    row, column = g.tensor(name="row", dim=[1, columns], layout="row"), g.tensor(name="column", dim=[rows, 1], layout="row")
    g.relu(g.add(g.mul(x, row), column)).set_output(True).set_name("Y").set_dim([rows, columns]).set_stride([1, rows])


def convolution(g: Any, n: Any, h: Any) -> None:
    x = g.tensor(name="X", dim=[n, 4, h, 9], layout="channels_last")
    w = g.tensor(name="W", dim=[6, 4, 3, 3], layout="channels_last")
    g.relu(g.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1])).set_output(True).set_name("Y")


def softmax(g: Any, rows: Any, columns: Any) -> None:
    g.softmax(g.tensor(name="X", dim=[rows, columns], layout="row"), 1).set_output(True).set_name("Y")


def columns_sum(g: Any, rows: Any, columns: Any) -> None:
    x = g.tensor(name="X", dim=[rows, columns], layout="row")
    g.reduction(x, graphdnn.reduction_mode.ADD, axes=[0], keepdim=True).set_output(True).set_name("Y")


def attention(g: Any, s: Any) -> None:
    q, k, v = (g.tensor(name=n, dim=[2, 3, s, 8], layout="row") for n in "QKV")
    o, _ = g.sdpa(q, k, v, attn_scale=0.25, is_inference=True, use_causal_mask=True)
    o.set_output(True).set_name("O").set_dim([2, 3, s, 8]).set_stride([24 * s, 8 * s, 8, 1])


CASES: dict[str, tuple[Callable[..., None], Sequence[Dim], int]] = {
    "matmul_rows": (lambda g, m: matmul_gelu(g, m, 24, 40), [Dim("m", 0, 300)], 2),
    "matmul": (matmul_gelu, [Dim("m", 0, 300), Dim("n", 0, 300), Dim("k", 0, 300)], 4),
    "matmul_bf16": (lambda g, m: matmul_gelu(g, m, 64, 64, B), [Dim("m", 0, 300)], 4),
    "layernorm_rows": (lambda g, r: layernorm(g, r, 40), [Dim("rows", 0, 300)], 2),
    "layernorm": (layernorm, [Dim("rows", 0, 300), Dim("width", 1, 300)], 4),
    "chain": (chain, [Dim("rows", 0, 300), Dim("columns", 0, 300)], 4),
    "convolution": (convolution, [Dim("n", 0, 5), Dim("h", 1, 20)], 10),
    "softmax": (softmax, [Dim("rows", 0, 300), Dim("columns", 1, 300)], 4),
    "columns_sum": (columns_sum, [Dim("rows", 0, 300), Dim("columns", 0, 300)], 6),
    "attention": (attention, [Dim("s", 1, 70)], 4),
}
"""Graph, dims, and how many compilations all shapes of them may take."""
EXTENTS = (0, 1, 2, 3, 5, 7, 8, 13, 16, 31, 37, 48, 64, 97, 128, 211, 256, 300)
SHAPES = {"convolution": 12, "attention": 8}
"""Shapes of a case, where 24 take too long; a quarter of them in the simulator."""


def drawn(dims: Sequence[Dim], count: int, seed: int) -> list[Values]:
    """Distinct shapes, those with the smallest extents first among them."""
    rng = random.Random(seed)
    found: dict[Values, None] = {tuple(max(d.min, 1) for d in dims): None}
    for _ in range(20 * count):
        found[tuple(rng.choice([e for e in EXTENTS if d.min <= e <= d.max]) for d in dims)] = None
        if len(found) == count:
            break
    return list(found)


def small(values: Values) -> Values:
    """What the simulator can do in a moment."""
    return tuple(v if v < 20 else v % 20 for v in values)


def run(g: Any, values: Values, device: str, seed: int, tell: bool) -> None:
    """One shape: guarded buffers, two runs of the same bits, the reference of a graph of this shape. ``tell``: the extents are given as numbers."""
    og = g._frozen_at(dict(zip(g.dims, values, strict=True)))
    setup = Setup(og, device, "numpy")
    setup.fill(seed, {}, {}, {})
    named = dict(zip(g.dims, values, strict=True))
    outcome = Outcome(_Bound(g, named) if tell else g)
    _run_plan(setup, None, 2, outcome)
    _compare(setup, reference.run_with_error(og, setup.feeds()), outcome)


class _Bound:
    """A graph whose extents are given with every call."""

    def __init__(self, graph: Any, dims: dict[str, int]) -> None:
        self._graph, self._dims = graph, dims

    def get_workspace_size(self) -> int:
        return int(self._graph.get_workspace_size())

    def execute(self, pack: Any, workspace: Any) -> None:
        self._graph.execute(pack, workspace, dims=self._dims)


@pytest.mark.parametrize("name", CASES)
def test_shapes(name: str, device: str) -> None:
    build, dims, allowed = CASES[name]
    g = graphdnn.pygraph(io_data_type=F, intermediate_data_type=F, compute_data_type=F, device=device)
    build(g, *dims)
    before = graphdnn.stats().compilations
    built(g)
    shapes = drawn(dims, SHAPES.get(name, 24) // (4 if device == "cudasim" else 1), 5)
    if device == "cudasim":
        shapes = list(dict.fromkeys(tuple(max(v, d.min) for v, d in zip(small(s), dims, strict=True)) for s in shapes))
    for number, values in enumerate(shapes):
        run(g, values, device, number, tell=number % 2 == 1)
    made = graphdnn.stats().compilations - before
    assert made <= allowed, f"{made} compilations: {graphdnn.stats().reasons}"
