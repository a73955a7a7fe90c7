"""Dims of which each is 1 in turn, all are, and each is 0: one graph of every family, whose shapes of 1 mean what its other shapes mean.

An extent of 1 that varies is no number 1 for whoever lowers a graph (graphdnn/ir/extent.py). Where a comparison gets that wrong, a kernel of such a
shape reads or writes beside its elements, or the graph of the shape has other dims than one that is declared for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

import graphdnn
from graphdnn import Dim, GraphError, data_type, norm_forward_phase, reduction_mode, reference
from tests.fuzz.dynamic import Told
from tests.helpers import Data, Outcome, Setup, _compare, _run_plan, built, given

F, TRAINING = data_type.FLOAT, norm_forward_phase.TRAINING
POSITIVE = Data("uniform", 0.5, 1.5)
WINDOW = {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}


@dataclass(frozen=True)
class Case:
    """``declare(graph, *dims)``; the dims at the hints; data of inputs by name."""

    declare: Callable[..., None]
    hints: dict[str, int]
    data: dict[str, Data] = field(default_factory=dict)


def rows(g: Any, name: str, *dim: Any, dtype: data_type = F) -> Any:
    """An input."""
    return g.tensor(name=name, dim=list(dim), layout="row", data_type=dtype)


def result(t: Any, name: str, *dim: Any, layout: str = "") -> None:
    """An output, of set dims where they are not inferred."""
    t.set_output(True).set_name(name)
    if dim:
        t.set_dim(list(dim))
    if layout:
        t.set_layout(layout)


def matmul(g: Any, b: Any, m: Any, n: Any, k: Any) -> None:
    c = g.add(g.matmul(rows(g, "A", b, m, k), rows(g, "B", b, k, n)), rows(g, "bias", 1, 1, n))
    result(g.gelu(c), "Y")
    result(g.reduction(c, reduction_mode.MAX, axes=[1], keepdim=True), "top")


def shared_matrix(g: Any, b: Any, m: Any, n: Any, k: Any) -> None:
    a = g.mul(rows(g, "A", b, m, k), rows(g, "column", b, m, 1))
    result(g.matmul(a, g.tensor(name="B", dim=[1, k, n], layout="column")), "Y")


def fprop(g: Any, n: Any, c: Any, h: Any, w: Any, k: Any) -> None:
    x, weight = (g.tensor(name=s, dim=d, layout="channels_last") for s, d in (("X", [n, c, h, w]), ("W", [k, c, 3, 3])))
    result(g.add(g.conv_fprop(x, weight, **WINDOW), g.tensor(name="bias", dim=[1, k, 1, 1], layout="channels_last")), "Y")


def dgrad(g: Any, n: Any, c: Any, h: Any, w: Any, k: Any) -> None:
    result(g.conv_dgrad(rows(g, "dY", n, k, h, w), rows(g, "W", k, c, 3, 3), **WINDOW), "dX", n, c, h, w)


def strided_dgrad(g: Any, n: Any, h: Any, w: Any) -> None:
    motion = {"padding": [0, 0], "stride": [2, 2], "dilation": [1, 1]}
    result(g.conv_dgrad(rows(g, "dY", n, 4, h, w), rows(g, "W", 4, 3, 2, 2), **motion), "dX", n, 3, 2 * h, 2 * w)


def wgrad(g: Any, n: Any, c: Any, h: Any, w: Any, k: Any) -> None:
    result(g.conv_wgrad(rows(g, "X", n, c, h, w), rows(g, "dY", n, k, h, w), **WINDOW), "dW", k, c, 3, 3)


def depthwise(g: Any, n: Any, c: Any, h: Any, w: Any) -> None:
    x, weight = (g.tensor(name=s, dim=d, layout="channels_last") for s, d in (("X", [n, c, h, w]), ("W", [c, 1, 3, 3])))
    result(g.relu(g.conv_fprop(x, weight, **WINDOW)), "Y")


def grouped(g: Any, n: Any, c: Any, h: Any, k: Any) -> None:
    result(g.conv_fprop(rows(g, "X", n, 2 * c, h, 5), rows(g, "W", 2 * k, c, 3, 3), **WINDOW), "Y")


def pointwise(g: Any, m: Any, n: Any) -> None:
    x = g.tensor(name="X", dim=[m, n], stride=[n + 3, 1])
    y = g.add(g.mul(x, rows(g, "row", 1, n)), rows(g, "column", m, 1))
    result(g.add(y, g.gen_index(y, 0)), "Y", m, n)
    result(g.relu(g.add(x, 1.0)), "Z", m, n, layout="column")


def reductions(g: Any, a: Any, b: Any, c: Any) -> None:
    x = rows(g, "X", a, b, c)
    for number, axes in enumerate(([0], [1], [2], [0, 2], [0, 1, 2])):
        result(g.reduction(g.mul(x, float(number + 1)), reduction_mode.AVG, axes=axes, keepdim=number % 2 == 1), f"Y{number}")


def layernorm(g: Any, m: Any, w: Any) -> None:
    x, scale, bias = rows(g, "X", m, w, 1, 1), rows(g, "scale", 1, w, 1, 1), rows(g, "bias", 1, w, 1, 1)
    for name, t in zip(("Y", "mean", "inv"), g.layernorm(TRAINING, x, scale, bias, 1e-2), strict=True):
        result(t, name)


def layernorm_backward(g: Any, m: Any, w: Any) -> None:
    shape = [m, w, 1, 1]
    made = g.layernorm_backward(
        grad=rows(g, "dY", *shape), input=rows(g, "X", *shape), scale=rows(g, "scale", 1, w, 1, 1), mean=rows(g, "mean", m, 1, 1, 1),
        inv_variance=rows(g, "inv", m, 1, 1, 1),
    )  # fmt: skip
    for name, t in zip(("dX", "dScale", "dBias"), made, strict=True):
        result(t, name)


def batchnorm(g: Any, n: Any, c: Any, h: Any) -> None:
    x = g.tensor(name="X", dim=[n, c, h, 5], layout="channels_last")
    scale, bias = (rows(g, s, 1, c, 1, 1) for s in ("scale", "bias"))
    made = g.batchnorm(input=x, scale=scale, bias=bias, in_running_mean=None, in_running_var=None, epsilon=1e-2, momentum=None)
    for name, t in zip(("Y", "mean", "inv"), made, strict=False):
        result(t, name)


def groupnorm(g: Any, n: Any, c: Any, h: Any) -> None:
    x, scale, bias = rows(g, "X", n, 2 * c, h, 3), rows(g, "scale", 1, 2 * c, 1, 1), rows(g, "bias", 1, 2 * c, 1, 1)
    result(g.groupnorm(norm_forward_phase=TRAINING, input=x, scale=scale, bias=bias, epsilon=1e-2, num_groups=2)[0], "Y")


def softmaxes(g: Any, m: Any, n: Any) -> None:
    x = rows(g, "X", m, n)
    result(g.softmax(x, 1), "Y")
    result(g.log_softmax(x, 0), "Z")
    result(g.softmax_backward(grad=x, output=rows(g, "P", m, n), axis=1), "dX")


def attention(g: Any, b: Any, h: Any, s: Any, t: Any, d: Any, e: Any) -> None:
    q, k, v = rows(g, "Q", b, 2 * h, s, d), rows(g, "K", b, h, t, d), rows(g, "V", b, h, t, e)
    made = g.sdpa(q, k, v, attn_scale=0.5, generate_stats=True, bias=rows(g, "bias", 1, 2 * h, s, t), diagonal_band_right_bound=1)
    result(made[0], "O", b, 2 * h, s, e, layout="row")
    result(made[1], "stats")


def attention_backward(g: Any, b: Any, h: Any, s: Any, t: Any, d: Any) -> None:
    q, k, v = rows(g, "Q", b, h, s, d), rows(g, "K", b, h, t, d), rows(g, "V", b, h, t, d)
    given = {"o": rows(g, "o", b, h, s, d), "dO": rows(g, "dO", b, h, s, d), "stats": rows(g, "stats", b, h, s, 1)}
    made = g.sdpa_backward(q=q, k=k, v=v, **given, attn_scale=0.5)
    for name, r, dim in zip(("dQ", "dK", "dV"), made, ([b, h, s, d], [b, h, t, d], [b, h, t, d]), strict=True):
        result(r, name, *dim, layout="row")


def pooling(g: Any, n: Any, c: Any, h: Any, w: Any) -> None:
    x = g.tensor(name="X", dim=[n, c, h, w], layout="channels_last")
    window = {"window": [2, 3], "stride": [1, 2], "pre_padding": [1, 1], "post_padding": [0, 1]}
    y, index = g.resample(input=x, mode="MAXPOOL", generate_index=True, **window)
    result(y, "Y")
    result(index, "index")
    result(g.resample(input=x, mode="BILINEAR", stride=[0.5, 0.5])[0], "Z")


def random_numbers(g: Any, m: Any, n: Any) -> None:
    seed, offset = (rows(g, s, 1, 1, dtype=data_type.INT64) for s in ("seed", "offset"))
    drawn = g.rng("UNIFORM", seed, offset, minimum=0.0, maximum=1.0).set_dim([m, n])
    result(g.mul(rows(g, "X", m, n), drawn), "Y")


def movement(g: Any, m: Any, n: Any) -> None:
    x = rows(g, "X", m, n, 3)
    flat = g.reshape(x).set_dim([m * n, 3])
    result(g.neg(g.reshape(flat).set_dim([3, n, m])), "Y", 3, n, m)
    result(g.transpose(x, [2, 0, 1]), "T", 3, m, n, layout="row")
    result(g.concatenate([x, rows(g, "W", m + 1, n, 3)], 0), "C", 2 * m + 1, n, 3, layout="row")
    result(g.slice(rows(g, "S", m + 2, n), [slice(1, None), slice(None)]), "L", m + 1, n, layout="row")


def quantized(g: Any, m: Any, n: Any) -> None:
    y, scale = g.block_scale_quantize(rows(g, "X", m, n), block_size=1, axis=1)
    result(y.set_data_type(data_type.INT8), "Y")
    result(g.block_scale_dequantize(y, descale=scale, block_size=[1, 1]), "Z", m, n)
    packed, scales = g.block_scale_quantize(rows(g, "W", m, 8 * n), block_size=8, axis=1)
    result(packed.set_data_type(data_type.FP8_E4M3), "packed")
    result(scales, "scales")


CASES = {
    "matmul": Case(matmul, {"b": 2, "m": 5, "n": 7, "k": 3}),
    "shared matrix": Case(shared_matrix, {"b": 2, "m": 5, "n": 7, "k": 3}),
    "fprop": Case(fprop, {"n": 2, "c": 4, "h": 5, "w": 6, "k": 3}),
    "dgrad": Case(dgrad, {"n": 2, "c": 4, "h": 5, "w": 6, "k": 3}),
    "strided dgrad": Case(strided_dgrad, {"n": 2, "h": 3, "w": 5}),
    "wgrad": Case(wgrad, {"n": 2, "c": 4, "h": 5, "w": 6, "k": 3}),
    "depthwise": Case(depthwise, {"n": 2, "c": 4, "h": 5, "w": 6}),
    "grouped": Case(grouped, {"n": 2, "c": 2, "h": 5, "k": 3}),
    "pointwise": Case(pointwise, {"m": 5, "n": 7}),
    "reductions": Case(reductions, {"a": 3, "b": 5, "c": 7}),
    "layernorm": Case(layernorm, {"m": 5, "w": 7}),
    "layernorm backward": Case(layernorm_backward, {"m": 5, "w": 7}, {"inv": POSITIVE}),
    "batchnorm": Case(batchnorm, {"n": 3, "c": 4, "h": 2}),
    "groupnorm": Case(groupnorm, {"n": 3, "c": 2, "h": 5}),
    "softmaxes": Case(softmaxes, {"m": 5, "n": 7}, {"P": Data("uniform", 0, 1)}),
    "attention": Case(attention, {"b": 2, "h": 2, "s": 5, "t": 6, "d": 8, "e": 4}),
    "attention backward": Case(attention_backward, {"b": 2, "h": 2, "s": 5, "t": 6, "d": 8}, {"stats": Data("uniform", 3, 5)}),
    "pooling": Case(pooling, {"n": 2, "c": 3, "h": 4, "w": 5}),
    "random numbers": Case(random_numbers, {"m": 5, "n": 7}, {"seed": given(7), "offset": given(3)}),
    "quantized": Case(quantized, {"m": 5, "n": 7}),
    "movement": Case(movement, {"m": 5, "n": 7}),
}


def graph_of(case: Case, device: str, dims: dict[str, Any]) -> Any:
    """The case declared with numbers or dims."""
    g = graphdnn.pygraph(io_data_type=F, intermediate_data_type=F, compute_data_type=F, device=device)
    case.declare(g, *dims.values())
    return g


def shapes(case: Case) -> list[dict[str, int]]:
    """The hints, each dim alone 1 and 0, all 1, and all but one."""
    hints, ones = case.hints, dict.fromkeys(case.hints, 1)
    return [hints, ones, *({**hints, n: e} for n in hints for e in (1, 0)), *({**ones, n: e} for n, e in hints.items())]


@pytest.mark.parametrize("name", CASES)
def test_ones_and_zeros(name: str, device: str) -> None:
    case, dims = CASES[name], {n: Dim(n, 0, 64, hint=e) for n, e in CASES[name].hints.items()}
    g = built(graph_of(case, device, dims))
    wanted, ran = shapes(case), 0
    for number, values in enumerate(wanted):
        told = Told(g, values, g._plans.chosen_index, False)
        static = graph_of(case, device, values)
        try:
            static.validate()
            static.build_operation_graph()
        except GraphError as error:
            with pytest.raises(type(error)):
                told.plan()
            continue
        og, bound = static._opgraph, told.operation_graph()
        assert [t.dim for t in og.tensors] == [t.dim for t in bound.tensors], values
        setup = Setup(bound, device, "pointer")
        setup.fill(number, case.data, {}, {})
        outcome = Outcome(told)
        _run_plan(setup, None, 1, outcome)
        try:
            _compare(setup, reference.run_with_error(og, setup.feeds(), told.plan().algorithms), outcome)
        except AssertionError as error:
            raise AssertionError(f"at {values}: {error}") from error
        ran += 1
    assert ran >= len(wanted) // 2
