"""How many kernels a normalization, softmax or statistic takes, alone and with what stands around it: plans only, nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import graphdnn
from graphdnn import data_type, heur_mode, reduction_mode
from tests.norm_cases import TRAINING, Bench, channels, rest_dim, scale_dim

DIM = (32, 256, 14, 14)
ALL = {"io_data_type": data_type.FLOAT, "intermediate_data_type": data_type.FLOAT, "compute_data_type": data_type.FLOAT}
Op = Callable[[Bench, Any], Any]


def per_sample(b: Bench, name: str) -> Any:
    return b.p(name, [DIM[0], 1, 1, DIM[3]])


def by_channel(b: Bench, *names: str) -> list[Any]:
    return [b.p(n, channels(DIM)) for n in names]


def along(b: Bench, *names: str) -> list[Any]:
    return [b.p(n, scale_dim(DIM)) for n in names]


def grouped(b: Bench, *names: str) -> list[Any]:
    return [b.p(n, [DIM[0], 8, 1, 1]) for n in names]


def of_samples(b: Bench, *names: str) -> list[Any]:
    return [b.p(n, [*DIM[:2], 1, 1]) for n in names]


FORWARD: dict[str, Op] = {
    "layernorm": lambda b, x: b.graph.layernorm(TRAINING, x, *along(b, "s", "t"), 1e-5),
    "rmsnorm": lambda b, x: b.graph.rmsnorm(TRAINING, x, *along(b, "s"), epsilon=1e-5),
    "adalayernorm": lambda b, x: b.graph.adalayernorm(TRAINING, x, per_sample(b, "s"), per_sample(b, "t"), 1e-5),
    "instancenorm": lambda b, x: b.graph.instancenorm(TRAINING, x, *by_channel(b, "s", "t"), 1e-5),
    "groupnorm": lambda b, x: b.graph.groupnorm(TRAINING, x, *by_channel(b, "s", "t"), 1e-5, 8),
    "batchnorm": lambda b, x: b.graph.batchnorm(x, *by_channel(b, "s", "t", "m", "v"), 1e-5, 0.1),
    "batchnorm_inference": lambda b, x: [b.graph.batchnorm_inference(x, *by_channel(b, "m", "i", "s", "t"))],
    "softmax": lambda b, x: [b.graph.softmax(x, -1)],
    "log_softmax over channels": lambda b, x: [b.graph.log_softmax(x, 1)],
}
"""Ops with a result like X; the others of their results are statistics."""
BACKWARD: dict[str, Op] = {
    "layernorm": lambda b, dy: b.graph.layernorm_backward(dy, b.x("x", DIM), *along(b, "s"), *(b.p(n, rest_dim(DIM)) for n in ("m", "i"))),
    "rmsnorm": lambda b, dy: b.graph.rmsnorm_backward(dy, b.x("x", DIM), *along(b, "s"), b.p("i", rest_dim(DIM)), True),
    "adalayernorm": lambda b, dy: b.graph.adalayernorm_backward(dy, b.x("x", DIM), per_sample(b, "s"), *(b.p(n, rest_dim(DIM)) for n in ("m", "i"))),
    "instancenorm": lambda b, dy: b.graph.instancenorm_backward(dy, b.x("x", DIM), *by_channel(b, "s"), *of_samples(b, "m", "i")),
    "instancenorm without mean": lambda b, dy: b.graph.instancenorm_backward(dy, b.x("x", DIM), *by_channel(b, "s"), None, *of_samples(b, "i")),
    "groupnorm": lambda b, dy: b.graph.groupnorm_backward(dy, b.x("x", DIM), *by_channel(b, "s"), *grouped(b, "m", "i")),
    "batchnorm": lambda b, dy: b.graph.batchnorm_backward(dy, b.x("x", DIM), *by_channel(b, "s", "m", "i")),
    "softmax": lambda b, dy: [b.graph.softmax_backward(dy, b.x("x", DIM), -1)],
    "log_softmax": lambda b, dy: [b.graph.log_softmax_backward(dy, b.x("x", DIM), -1)],
    "logsumexp": lambda b, dy: [b.graph.logsumexp_backward(b.p("dz", DIM[:3]), dy, b.p("z", DIM[:3]), -1)],
}
"""Gradients of X, then those of parameters."""
STATISTICS: dict[str, Op] = {
    "genstats": lambda b, x: b.graph.genstats(x),
    "dbn_weight": lambda b, x: b.graph.dbn_weight(b.x("dy", DIM), x, *by_channel(b, "m", "i", "s")),
    "bn_finalize": lambda b, x: b.graph.bn_finalize(*by_channel(b, "sum", "square", "s", "t"), 1e-5, 24, *by_channel(b, "m", "v"), 0.1),
    "logsumexp": lambda b, x: [b.graph.logsumexp(x, -1, keepdim=True)],
    "logsumexp without the dim": lambda b, x: [b.graph.logsumexp(x, -1)],
    "amax": lambda b, x: [b.graph.reduction(x, reduction_mode.AMAX, axes=(0, 1, 2, 3), keepdim=True)],
}
"""Results are smaller than X."""


def done(*tensors: Any) -> None:
    for t in tensors:
        if t is not None:
            t.set_output(True)


def plain(b: Bench, op: Op) -> None:
    """The op alone."""
    done(*op(b, b.x("x0", DIM)))


def around(b: Bench, op: Op) -> None:
    """A residual sum in front, which is an output too; behind, another residual, relu and its mask."""
    total = b.graph.add(b.x("x0", DIM), b.x("residual", DIM))
    y, *rest = op(b, total)
    kept = b.graph.add(b.graph.mul(y, 0.5), b.x("z", DIM))
    done(total, b.graph.relu(kept), b.graph.cmp_gt(kept, 0.0).set_data_type(data_type.BOOLEAN), *rest)


def behind_mask(b: Bench, op: Op) -> None:
    """The mask of a relu in front, its result an output too; a residual's gradient added behind."""
    dz = b.graph.mul(b.x("dy0", DIM), b.x("mask", DIM))
    dx, *rest = op(b, dz)
    done(dz, b.graph.add(dx, b.x("other", DIM)), *rest)


def of_product(b: Bench, op: Op) -> None:
    """Of a product, which is an output too; what follows in the results' dims."""
    x = b.graph.mul(b.x("x0", DIM), b.x("y0", DIM))
    first, *rest = op(b, x)
    done(x, first, b.graph.sqrt(b.graph.mul(first, first)), *rest)


COUNTS = {
    "forward": {
        "layernorm": (1, 1),
        "rmsnorm": (1, 1),
        "adalayernorm": (1, 1),
        "instancenorm": (1, 1),
        "groupnorm": (3, 1),
        "batchnorm": (1, 1),
        "batchnorm_inference": (1, 1),
        "softmax": (1, 1),
        "log_softmax over channels": (1, 1),
    },
    "backward": {  # sums over the batch are a second loop nest, except where channels are the rows
        "layernorm": (2, 2),
        "rmsnorm": (2, 2),
        "adalayernorm": (2, 2),
        "instancenorm": (2, 2),
        "instancenorm without mean": (3, 2),
        "groupnorm": (2, 2),
        "batchnorm": (1, 1),
        "softmax": (1, 1),
        "log_softmax": (1, 1),
        "logsumexp": (1, 1),
    },
    "statistics": {
        "genstats": (1, 1),
        "dbn_weight": (2, 1),
        "bn_finalize": (1, 1),
        "logsumexp": (1, 1),
        "logsumexp without the dim": (2, 1),
        "amax": (1, 1),
    },
}
"""(before, now): regions of the op, alone and with pointwise ops around it. Before: reshapes of results were kernels of their own, and what depends
on rows was stored for other loops to read."""
FORMS = {"forward": (FORWARD, around), "backward": (BACKWARD, behind_mask), "statistics": (STATISTICS, of_product)}


def kernels(declare: Callable[[Bench], None], device: str) -> tuple[int, int]:
    """Regions and kernels of the best plan."""
    g = graphdnn.pygraph(device=device, **ALL)
    declare(Bench(g))
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([heur_mode.A])
    plan = next(iter(g._plans))
    return len(plan.partition.regions), len(plan.recipe.kernels)


@pytest.mark.parametrize("device", ["cpu", "sm_90a"])
@pytest.mark.parametrize(("kind", "op"), [(k, op) for k, row in COUNTS.items() for op in row])
def test_kernels(kind: str, op: str, device: str) -> None:
    ops, form = FORMS[kind]
    now = COUNTS[kind][op][1]
    split = op == "amax"  # one result of a large range: parts of it, then a kernel that combines them
    apart = op == "bn_finalize"  # reads no X: what is calculated of X is another kernel
    assert kernels(lambda b: plain(b, ops[op]), device) == (now, now + split)
    assert kernels(lambda b: form(b, ops[op]), device) == (now + apart, now + split + apart)


@pytest.mark.parametrize("make", [plain, around])
def test_few_long_rows(make: Callable[[Bench, Op], None]) -> None:
    """Few rows leave most of a GPU idle: there each pass over them is a kernel of its own, split; a CPU walks its rows in one."""

    def layernorm(b: Bench, x: Any) -> Any:
        return b.graph.layernorm(TRAINING, x, *(b.p(n, (1, *DIM[1:])) for n in ("s", "t")), 1e-5)

    assert kernels(lambda b: make(b, layernorm), "cpu") == (1, 1)
    assert kernels(lambda b: make(b, layernorm), "sm_90a") == (3, 5)


def test_tables_agree() -> None:
    assert {k: list(v) for k, v in COUNTS.items()} == {k: list(ops) for k, (ops, _) in FORMS.items()}
