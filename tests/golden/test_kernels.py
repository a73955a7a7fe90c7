"""Generated text against stored text: a change of a template or of the lowering shows as a diff that somebody has read.

Update with ``GRAPHDNN_UPDATE_GOLDEN=1 pytest tests/golden`` and read the diff.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from graphdnn import device
from graphdnn.codegen.render import render
from graphdnn.codegen.spec import Buffer
from graphdnn.dtypes import data_type
from graphdnn.engines import ENGINES
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.passes.regions import partition
from tests.opgraphs import Builder

FOLDER = Path(__file__).parent / "kernels"
BF16 = data_type.BFLOAT16


def bias_relu() -> OperationGraph:
    b = Builder()
    x, bias = b.tensor(4, 6, 20, dtype=BF16), b.tensor(20, dtype=BF16)
    total = b.add(x, bias, 4, 6, 20)
    b.node("POINTWISE", (total,), (4, 6, 20), "IN_0", False, BF16, mode="RELU_FWD")
    return b.graph()


def flat_add_with_tail() -> OperationGraph:
    b = Builder()
    b.add(b.tensor(3, 7), b.tensor(3, 7), 3, 7, virtual=False)
    return b.graph()


def concatenated_slices() -> OperationGraph:
    b = Builder()
    x, y = b.tensor(4, 6), b.tensor(4, 3)
    part = b.node("SLICE", (x,), (4, 2), "X", slices=((0, 4), (1, 5)), slice_strides=(1, 2))
    joined = b.node("CONCATENATE", (part, y), (4, 5), "0 1", axis=1)
    b.node("TRANSPOSE", (joined,), (5, 4), "X", False, permutation=(1, 0))
    return b.graph()


def rows_mean() -> OperationGraph:
    b = Builder()
    b.node("REDUCTION", (b.tensor(512, 1024, dtype=BF16),), (512, 1), "X", False, mode="AVG")
    return b.graph()


def columns_sum_and_max() -> OperationGraph:
    b = Builder()
    x = b.tensor(300, 200)
    b.node("REDUCTION", (x,), (1, 200), "X", False, mode="ADD")
    b.node("REDUCTION", (x,), (1, 200), "X", False, mode="MAX")
    return b.graph()


def split_sum() -> OperationGraph:
    b = Builder()
    b.total(b.tensor(1 << 22), 1, virtual=False)
    return b.graph()


def matmul_scale_gelu_amax() -> OperationGraph:
    b = Builder()
    a, w, s = b.tensor(2, 48, 40, dtype=BF16), b.tensor(1, 40, 56, dtype=BF16), b.tensor(1, 1, 1, by_value=True)
    c = b.matmul(a, w, 2, 48, 56)
    scaled = b.node("POINTWISE", (c, s), (2, 48, 56), "IN_0 IN_1", mode="MUL")
    y = b.node("POINTWISE", (scaled,), (2, 48, 56), "IN_0", False, BF16, mode="GELU_FWD")
    b.node("REDUCTION", (y,), (1, 1, 1), "X", False, mode="AMAX")
    return b.graph()


def normalized_rows() -> OperationGraph:
    b = Builder()
    x, w = b.tensor(512, 1024, dtype=BF16), b.tensor(1, 1024, dtype=BF16)
    mean = b.node("REDUCTION", (x,), (512, 1), "X", mode="AVG")
    centred = b.node("POINTWISE", (x, mean), (512, 1024), "IN_0 IN_1", mode="SUB")
    square = b.node("POINTWISE", (centred, centred), (512, 1024), "IN_0 IN_1", mode="MUL")
    scale = b.node("POINTWISE", (b.node("REDUCTION", (square,), (512, 1), "X", mode="AVG"),), (512, 1), "IN_0", mode="RSQRT")
    y = b.node("POINTWISE", (centred, scale), (512, 1024), "IN_0 IN_1", mode="MUL")
    b.node("POINTWISE", (y, w), (512, 1024), "IN_0 IN_1", False, BF16, mode="MUL")
    return b.graph()


def causal_attention() -> OperationGraph:
    b = Builder()
    q, k, v = (b.tensor(2, h, 300, 64, dtype=BF16) for h in (4, 2, 2))
    b.node("SDPA", (q, k, v), (2, 4, 300, 64), "Q K V", False, BF16, "O", attn_scale_value=0.125, right_bound=0)
    return b.graph()


GRAPHS: tuple[Callable[[], OperationGraph], ...] = (
    bias_relu, flat_add_with_tail, concatenated_slices, rows_mean, columns_sum_and_max, split_sum, normalized_rows, matmul_scale_gelu_amax,
    causal_attention,
)  # fmt: skip
DEVICES = {"cpu": device.cpu, "sm_80": lambda: device.describe("sm_80")}


def text_of(graph: OperationGraph, where: device.DeviceProps) -> str:
    parts = []
    for region in partition(graph).regions:
        engine = next(e for e in ENGINES if e.check_support(graph, region, where))
        knobs = engine.candidates(graph, region, where)[0]
        recipe = engine.lower(graph, region, where, knobs, {t: Buffer("tensor", t) for t in (*region.reads, *region.stores)})
        parts += [render(k).text for k in recipe.kernels]
        parts.append("# steps\n" + "".join(f"# {s!r}\n" for s in recipe.steps) + f"# workspace {recipe.workspace}\n")
    return "\n".join(parts)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("make", GRAPHS, ids=lambda f: f.__name__)
def test_text_is_the_stored_text(make: Callable[[], OperationGraph], where: str) -> None:
    text = text_of(make(), DEVICES[where]())
    compile(text, "kernel", "exec")
    path = FOLDER / f"{make.__name__}.{where}.txt"
    if os.environ.get("GRAPHDNN_UPDATE_GOLDEN") == "1":
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; if that is meant, set GRAPHDNN_UPDATE_GOLDEN=1 and read the diff"
