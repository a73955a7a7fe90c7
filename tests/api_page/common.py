"""Parts 1.6 and 2.0: default names, the order of work in validate, what is filled in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import graphdnn
from graphdnn import data_type, norm_forward_phase, reduction_mode
from graphdnn.errors import BuildError, KindError
from tests.api_page.row import F16, F32, Row, breaks, fails, here, names, ours, runs, same, shapes, t

TRAINING = norm_forward_phase.TRAINING
ONE = {"padding": [0, 0], "stride": [1, 1], "dilation": [1, 1]}
X = (2, 4, 5, 3)
C = (1, 4, 1, 1)


def norm(method: str, **more: Any) -> Callable[[Any], Any]:
    """A forward normalization named n."""
    return lambda g: getattr(g, method)(TRAINING, t(g, *X), t(g, *C), bias=t(g, *C), epsilon=1e-5, name="n", **more)


def _inputs_of(declare: Callable[[Any], Any], *wanted: str) -> Callable[[Any], None]:
    """Names that unnamed inputs get."""

    def test(g: Any) -> None:
        declare(g)
        assert [x.get_name() for x in g._nodes[0].inputs.values()] == list(wanted)

    return test


def _named(wanted: dict[str, str]) -> Callable[[Any], None]:
    """Names of the result of each method with no name of its own, the second node of the graph."""

    def declare(g: Any, method: str) -> Any:
        image, weight = t(g, *X), t(g, 6, 4, 1, 1)
        calls: dict[str, Callable[[], Any]] = {
            "add": lambda: g.add(image, image),
            "matmul": lambda: g.matmul(image, t(g, 2, 4, 3, 5)),
            "conv_fprop": lambda: g.conv_fprop(image, weight, **ONE),
            "concatenate": lambda: g.concatenate([image, image], 1),
            "conv_dgrad": lambda: g.conv_dgrad(t(g, 2, 6, 5, 3), weight, **ONE),
            "reduction": lambda: g.reduction(image, reduction_mode.ADD),
            "reshape": lambda: g.reshape(image),
            "layernorm": lambda: g.layernorm(TRAINING, image, t(g, *C), t(g, *C), 1e-5)[0],
        }
        return calls[method]()

    def test(g: Any) -> None:
        for method, name in wanted.items():
            g = graphdnn.pygraph(device="cpu")
            g.relu(t(g, 2, 3))
            assert declare(g, method).get_name() == name

    return test


NAMES = (
    same("1.6", "pointwise", "OUT_0; unnamed inputs", _inputs_of(lambda g: g.add(t(g, 2), t(g, 2), name="p"), "p::IN_0", "p::IN_1")),
    same("1.6", "pointwise", "OUT_0", names(lambda g: g.add(t(g, 2), t(g, 2), name="p"), "p::OUT_0")),
    same("1.6", "matmul", "C; unnamed inputs", _inputs_of(lambda g: g.matmul(t(g, 2, 3), t(g, 3, 4), name="m"), "m::A", "m::B")),
    same("1.6", "matmul", "C", names(lambda g: g.matmul(t(g, 2, 3), t(g, 3, 4), name="m"), "m::C")),
    same("1.6", "conv_fprop", "Y", names(lambda g: g.conv_fprop(t(g, *X), t(g, 6, 4, 1, 1), **ONE, name="c"), "c::Y")),
    same("1.6", "conv_dgrad", "DX", names(lambda g: g.conv_dgrad(t(g, *X), t(g, 4, 6, 1, 1), **ONE, name="c"), "c::DX")),
    same("1.6", "conv_wgrad", "DW", names(lambda g: g.conv_wgrad(t(g, *X), t(g, *X), **ONE, name="c"), "c::DW")),
    same("1.6", "reduction", "Y", names(lambda g: g.reduction(t(g, 2, 3), reduction_mode.ADD, name="r"), "r::Y")),
    same("1.6", "reshape", "Y", names(lambda g: g.reshape(t(g, 2, 3), name="r"), "r::Y")),
    same("1.6", "transpose", "Y", names(lambda g: g.transpose(t(g, 2, 3), [1, 0], name="r"), "r::Y")),
    same("1.6", "slice", "Y", names(lambda g: g.slice(t(g, 2), [slice(None)], name="r"), "r::Y")),
    same("1.6", "concatenate", "Y", names(lambda g: g.concatenate([t(g, 2)], 0, name="r"), "r::Y")),
    same("1.6", "genstats", "sums", names(lambda g: g.genstats(t(g, *X), name="g"), "g_sum_output", "g_sq_sum_output")),
    *(same("1.6", m, "Y and statistics", names(norm(m), "n::Y", "n::MEAN", "n::INV_VARIANCE")) for m in ("layernorm", "instancenorm")),
    same("1.6", "rmsnorm", "Y and statistics", names(norm("rmsnorm"), "n::Y", "n::INV_VARIANCE")),
    same(
        "1.6",
        "batchnorm",
        "Y, statistics, running statistics",
        names(
            lambda g: g.batchnorm(t(g, *X), *(t(g, *C) for _ in range(4)), 1e-5, 0.1, name="n"),
            "n::Y",
            "n::MEAN",
            "n::INV_VARIANCE",
            "n::NEXT_RUNNING_MEAN",
            "n::NEXT_RUNNING_VAR",
        ),
    ),
    same(
        "1.6",
        "batchnorm_backward",
        "gradients",
        names(lambda g: g.batchnorm_backward(t(g, *X), t(g, *X), t(g, *C), t(g, *C), t(g, *C), name="n"), "n::DX", "n::DSCALE", "n::DBIAS"),
    ),
    same(
        "1.6",
        "rmsnorm_backward",
        "gradients",
        names(lambda g: g.rmsnorm_backward(t(g, *X), t(g, *X), t(g, *C), t(g, 2, 1, 5, 3), True, name="n"), "n::DX", "n::Dscale", "n::Dbias"),
    ),
    same("1.6", "sdpa", "O, Stats", names(lambda g: g.sdpa(*(t(g, *X) for _ in range(3)), generate_stats=True, name="a"), "a::O", "a::Stats")),
    same(
        "1.6",
        "sdpa_backward",
        "gradients",
        names(lambda g: g.sdpa_backward(*(t(g, *X) for _ in range(5)), t(g, 2, 4, 5, 1), name="a"), "a::dQ", "a::dK", "a::dV"),
    ),
    same("1.6", "block_scale_quantize", "Y, scale", names(lambda g: g.block_scale_quantize(t(g, 2, 32), 16, name="b"), "b::Y", "b::scale")),
    same("1.6", "block_scale_dequantize", "Y", names(lambda g: g.block_scale_dequantize(t(g, 2, 32), t(g, 2, 2), [1, 16], name="b"), "b::Y")),
    same(
        "1.6",
        "no name",
        "the node's index, or nothing",
        _named(
            {
                "add": "1::OUT_0",
                "matmul": "1::C",
                "conv_fprop": "1::Y",
                "concatenate": "1::Y",
                "conv_dgrad": "::DX",
                "reduction": "::Y",
                "reshape": "::Y",
                "layernorm": "::Y",
            }
        ),
    ),
)


# ----------------------------------------------------------------------------------------------------------------------------------------- part 2.0
def changed(**fields: Any) -> Callable[[Any], Any]:
    """A graph with a user tensor of which something is wrong."""

    def declare(g: Any) -> Any:
        x = t(g, 2, 3, name="x")
        for name, value in fields.items():
            setattr(x, name, value)
        return g.relu(x)

    return declare


def _types(g: Any) -> None:
    x = t(g, 2, 3)
    y = g.relu(g.neg(x)).set_output(True)
    kept = g.exp(y).set_data_type(data_type.BFLOAT16).set_output(True)
    g.validate()
    found = [x.get_data_type(), g._nodes[0].outputs["OUT_0"].get_data_type(), y.get_data_type(), kept.get_data_type()]
    assert found == [F16, F32, F16, data_type.BFLOAT16]


def _uids(g: Any) -> None:
    a, b = t(g, 2, 3, uid=2), t(g, 3, 4)
    c = g.matmul(a, b)
    y = g.add(c, t(g, 1, 1)).set_output(True)
    g.build_operation_graph()
    assert (b.get_uid(), a.get_uid(), c.get_uid()) == (1, 2, 3) and y.get_uid() == 5


def _kept(g: Any) -> None:
    y = g.neg(t(g, 2, 3)).set_dim([2, 3]).set_stride([1, 2]).set_data_type(data_type.BFLOAT16)
    g.validate()
    assert (y.get_dim(), y.get_stride(), y.get_data_type()) == ([2, 3], [1, 2], data_type.BFLOAT16)


def _empty(g: Any) -> None:
    g.validate()
    g.validate()


def _before(g: Any) -> None:
    y = g.neg(t(g, 2, 3))
    assert y.get_dim() == y.get_stride() == []
    g.validate()
    assert y.get_dim() == [2, 3]


def two_uids(g: Any) -> Any:
    """One uid given twice."""
    return g.add(t(g, 2, uid=7), t(g, 2, uid=7))


NO_TYPES: dict[str, Any] = {"types": ()}
RULES = (
    same("2.0", "tensors", "no dims", fails(changed(dim=None), "'x'", "dims not set")),
    same("2.0", "tensors", "no strides", fails(changed(stride=None), "'x'", "strides not set")),
    same("2.0", "tensors", "dims and strides of two ranks", fails(changed(stride=(1,)), "'x'", "rank")),
    same("2.0", "tensors", "virtual and by value", fails(changed(virtual=True, by_value=True), "'x'", "by value")),
    same("2.0", "tensors", "an input's strides overlap", runs(lambda g: g.neg(t(g, 4, 3, stride=(1, 1))).set_stride([3, 1]))),
    same("2.0", "tensors", "an input's strides are negative", runs(lambda g: g.neg(t(g, 4, stride=(-1,))).set_stride([1]))),
    ours(
        "2.0",
        "tensors",
        "an output's strides overlap",
        "accepted; elements overwrite each other",
        fails(lambda g: g.neg(t(g, 4, 3)).set_stride([1, 1]).set_output(True), "overlaps itself"),
    ),
    ours("2.0", "tensors", "a virtual tensor that no op writes", "accepted", fails(changed(virtual=True), "'x'", "no node writes")),
    ours("2.0", "tensors", "dims below 0", "accepted", fails(changed(dim=(2, -3)), "'x'", "negative")),
    ours(
        "2.0",
        "tensors",
        "None for a required tensor",
        "crash",
        fails(lambda g: g.relu(None), "graph tensor", error=KindError, at="call"),
        "`KindError` (a `TypeError`)",
    ),
    ours(
        "2.0",
        "tensors",
        "a tensor of another graph",
        "undefined",
        fails(lambda g: g.relu(t(graphdnn.pygraph(device="cpu"), 2)), "another graph", at="call"),
    ),
    same("2.0", "data types", "virtual: intermediate_data_type, others: io_data_type", _types),
    same(
        "2.0",
        "data types",
        "none for a tensor that is not virtual: found at the operation graph",
        fails(lambda g: g.neg(t(g, 2)), "data type not set", error=BuildError, at="build"),
        **NO_TYPES,
    ),
    here(
        "2.0",
        "data types",
        "none for a virtual tensor, and no intermediate_data_type",
        "error at the operation graph",
        "the compute type of its op",
        runs(lambda g: g.neg(g.neg(t(g, 2, data_type=F16)))),
        **NO_TYPES,
    ),
    here(
        "2.0",
        "data types",
        "no compute_data_type",
        "error at the operation graph",
        "DOUBLE beside DOUBLE, integers among integers, else FLOAT",
        runs(lambda g: g.identity(t(g, 2, data_type=F16)).set_data_type(F16)),
        **NO_TYPES,
    ),
    same("2.0", "outputs", "what the user sets stays", _kept),
    same(
        "2.0",
        "outputs",
        "dims without strides: the default layout of the op",
        shapes(lambda g: g.reduction(t(g, 2, 3, 4), reduction_mode.ADD).set_dim([2, 1, 4]), ((2, 1, 4), (4, 1, 1))),
    ),
    ours("2.0", "outputs", "dims that contradict the op", "accepted", fails(lambda g: g.neg(t(g, 2, 3)).set_dim([2, 4]), "contradict", r"\[2, 3\]")),
    same("2.0", "outputs", "empty before validate", _before),
    same("2.0", "layouts", "NHWC order of rank 4", shapes(lambda g: g.genstats(t(g, *X))[:1], (C, (4, 1, 4, 4)))),
    same("2.0", "layouts", "NHWC order of rank 2 is row-major", shapes(lambda g: g.reshape(t(g, 6)).set_dim([2, 3]), ((2, 3), (3, 1)))),
    same("2.0", "graph", "an empty one validates, twice", _empty),
    same("2.0", "graph", "one uid twice", breaks(two_uids, "uid 7 already assigned")),
    same("2.0", "graph", "uids from 1, the last input first, around those that are given", _uids),
)
ROWS: tuple[Row, ...] = (*NAMES, *RULES)
