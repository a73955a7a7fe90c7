"""Shapes and strides given at execute (``override_uids``), on graphs with and without dims, against a graph that was declared with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphdnn
from graphdnn import Dim, ValidationError, data_type, heur_mode, reference
from tests.fuzz.dynamic import Told
from tests.helpers import Outcome, Setup, _compare, _run_plan, built

F = data_type.FLOAT
SHAPES = ((3, 5, 7, 0, 0), (1, 1, 1, 0, 0), (17, 4, 3, 3, 5), (0, 5, 7, 2, 0), (5, 31, 0, 0, 1), (1, 33, 16, 0, 3), (13, 1, 2, 1, 1))
"""m, n, k, and how many elements the rows of A and of Y are padded by."""


def declared(device: str, m: Any, n: Any, k: Any, gap: int = 0, wide: int = 0, **arguments: Any) -> Any:
    """relu(A @ B + bias), and the largest of each row of A @ B."""
    g = graphdnn.pygraph(io_data_type=F, intermediate_data_type=F, compute_data_type=F, device=device, **arguments)
    a = g.tensor(name="A", uid=1, dim=[2, m, k], stride=[(k + gap) * m, k + gap, 1])
    b, bias = g.tensor(name="B", uid=2, dim=[2, k, n], layout="row"), g.tensor(name="bias", uid=3, dim=[1, 1, n], layout="row")
    c = g.matmul(a, b)
    y = g.relu(g.add(c, bias)).set_output(True).set_name("Y").set_uid(4)
    y.set_dim([2, m, n]).set_stride([(n + wide) * m, n + wide, 1])
    top = g.reduction(c, graphdnn.reduction_mode.MAX, axes=[2], keepdim=True)
    top.set_output(True).set_name("top").set_uid(5).set_dim([2, m, 1]).set_stride([m, 1, 1])
    return g


class Overridden:
    """A graph that is told the shapes and strides of another one with every call."""

    def __init__(self, graph: Any, as_declared: Any, **told: Any) -> None:
        self._graph, self._as_declared, self._told = graph, as_declared, told
        tensors = [t for t in as_declared._opgraph.tensors if not t.virtual]
        self._told |= {"override_uids": [t.uid for t in tensors], "override_shapes": [t.dim for t in tensors]}
        self._told["override_strides"] = [list(t.stride) for t in tensors]

    def get_workspace_size(self) -> int:
        return int(self._as_declared.get_workspace_size())

    def execute(self, pack: Any, workspace: Any) -> None:
        self._graph.execute(pack, workspace, **self._told)


def agrees(g: Any, device: str, shapes: Any) -> None:
    """``g``, told each of these shapes, gives what the reference does."""
    for number, shape in enumerate(shapes):
        same = built(declared(device, *shape))
        setup = Setup(same._opgraph, device, "pointer")
        setup.fill(number, {}, {}, {})
        outcome = Outcome(Overridden(g, same))
        _run_plan(setup, None, 2, outcome)
        _compare(setup, reference.run_with_error(same._opgraph, setup.feeds()), outcome)


@pytest.mark.parametrize("dims", [False, True])
def test_shapes_and_strides(dims: bool, device: str) -> None:
    sizes = [Dim("m", 0, 99), Dim("n", 0, 99), Dim("k", 0, 99)] if dims else [4, 6, 8]
    g = declared(device, *sizes, is_override_shape_enabled=True)
    built(g)
    agrees(g, device, SHAPES[: 3 if device == "cudasim" else None])
    padded = sum(any(s[3:]) for s in SHAPES[: 3 if device == "cudasim" else None])
    assert len(g._variants) == (padded if dims else len(SHAPES[: 3 if device == "cudasim" else None])), "what the dims say is no override"


def test_a_plan_of_the_list_is_overridden_too() -> None:
    g, same = declared("cpu", 4, 6, 8, is_override_shape_enabled=True), built(declared("cpu", 5, 7, 3, 1, 2))
    g.build([heur_mode.A])
    setup = Setup(same._opgraph, "cpu", "numpy")
    setup.fill(1, {}, {}, {})
    told = Overridden(g, same)
    told.execute = lambda pack, workspace: g.execute_plan_at_index(pack, workspace, 0, **told._told)  # type: ignore[method-assign]
    outcome = Outcome(told)
    _run_plan(setup, None, 1, outcome)
    _compare(setup, reference.run_with_error(same._opgraph, setup.feeds()), outcome)


SIZES = {1: [2, 5, 8], 2: [2, 8, 6], 4: [2, 5, 6], 5: [2, 5, 1]}


@pytest.mark.parametrize(
    ("dims", "change", "arguments", "match"),
    [
        (False, {4: [2, 9, 6]}, {}, r"'Y'.*|contradict"),
        (False, {1: [2, -5, 8]}, {}, "negative"),
        (False, {1: [2, 5, 7]}, {}, r"expected.*found"),
        (True, {4: [2, 9, 6]}, {}, r"dim 'm' is bound to two extents.*expected 5 .*'A'.*found 9 .*'Y'.*To fix"),
        (True, {}, {"dims": {"m": 6}}, r"dim 'm' is bound to two extents.*expected 6 \(from dims\)"),
        (True, {1: [2, 100, 8], 4: [2, 100, 6], 5: [2, 100, 1]}, {}, "dim 'm' is outside its range.*expected 0 to 99.*found 100 in 'A'"),
        (True, {1: [3, 5, 8]}, {}, r"'A'.*another shape than the dims say.*expected \[2, 5, 8\].*found \[3, 5, 8\]"),
    ],
)
def test_what_is_refused(dims: bool, change: dict[int, list[int]], arguments: dict[str, Any], match: str) -> None:
    sizes = [Dim("m", 0, 99), Dim("n", 0, 99), Dim("k", 0, 99)] if dims else [4, 6, 8]
    g = declared("cpu", *sizes, is_override_shape_enabled=True)
    built(g)
    told = SIZES | change
    pack = dict.fromkeys((1, 2, 3, 4, 5), 1 << 20)
    with pytest.raises(ValidationError, match=match):
        g.execute(pack, None, override_uids=list(told), override_shapes=list(told.values()), override_strides=None, **arguments)


def test_one_tensor_with_two_shapes_and_lists_that_are_none() -> None:
    g = declared("cpu", 4, 6, 8, is_override_shape_enabled=True)
    built(g)
    pack = dict.fromkeys((1, 2, 3, 4, 5), 1 << 20)
    with pytest.raises(ValidationError, match=r"uid 1 is given two shapes; expected dims \(2, 5, 8\).*found \(2, 6, 8\).*To fix"):
        g.execute(pack, None, override_uids=[1, 1], override_shapes=[[2, 5, 8], [2, 6, 8]])
    with pytest.raises(graphdnn.KindError, match="override_uids has the wrong type"):
        g.execute(pack, None, override_uids=1, override_shapes=[[2, 5, 8]])
    with pytest.raises(ValidationError, match="the graph has no dims"):
        g.execute(pack, None, override_uids=[1], override_shapes=[[2, 4, 8]], dims={"m": 4})


def test_less_aligned_buffers_of_every_shape(device: str) -> None:
    """What a plan needs of addresses is found out when it runs: another shape's plan takes less aligned buffers too, without a kernel for each."""
    n = Dim("n", 0, 4096, hint=64)
    g = graphdnn.pygraph(io_data_type=data_type.BFLOAT16, intermediate_data_type=F, compute_data_type=F, device=device)
    x = g.tensor(name="X", dim=[8, n], layout="row")
    y = g.relu(g.add(x, g.tensor(name="b", dim=[8, 1], layout="row")))
    y.set_output(True).set_name("Y")
    g.reduction(y, graphdnn.reduction_mode.ADD, axes=[1], keepdim=True).set_output(True).set_name("sum").set_data_type(F)
    built(g)
    for count, extent in enumerate((64, 48, 1, 33, 100, 256)):
        if count == 4:
            before = graphdnn.stats().compilations
        told = Told(g, {"n": extent}, g._plans.chosen_index, False)
        setup = Setup(told.operation_graph(), device, "pointer")
        setup.fill(count, {}, {"X": 1, "Y": 3}, {})
        outcome = Outcome(told)
        _run_plan(setup, None, 1, outcome)
        _compare(setup, reference.run_with_error(setup.operation_graph, setup.feeds(), told.plan().algorithms), outcome)
    assert graphdnn.stats().compilations - before <= 1


def read(g: Any, **arguments: Any) -> Any:
    """The graph that the text of ``g`` gives, built for its device."""
    again = graphdnn.pygraph(device=g._get_device(), **arguments)
    again.deserialize(str(g))
    return built(again)


def test_a_graph_that_was_read_from_a_text(device: str) -> None:
    """The text of a built graph has the dims of what lies between its ops: they follow from those of the call."""
    agrees(read(built(declared(device, 4, 6, 8, is_override_shape_enabled=True))), device, SHAPES[:2])


def test_a_text_of_composite_ops_and_of_dims_that_no_op_infers() -> None:
    """A normalization counts the elements of the call; the dims of a reshape stay the user's. The text or the graph allows overriding."""
    from tests.fake_driver import FLOAT

    g = graphdnn.pygraph(device="cpu", **FLOAT)
    x, s, b = (g.tensor(name=n, dim=d, layout="row", uid=i) for i, (n, d) in enumerate((("x", (8, 64)), ("s", (1, 64)), ("b", (1, 64))), 1))
    y = g.layernorm(graphdnn.norm_forward_phase.INFERENCE, x, s, b, g.tensor_scalar(1e-5, graphdnn.scalar_type.RUNTIME_PARAM))[0]
    g.relu(y).set_output(True).set_uid(4)
    again, rng = read(built(g), is_override_shape_enabled=True), np.random.default_rng(5)
    for rows, width in ((3, 64), (8, 64), (5, 40)):
        data = {i: rng.standard_normal(d).astype(np.float32) for i, d in ((1, (rows, width)), (2, (1, width)), (3, (1, width)))}
        told: dict[str, Any] = {"override_uids": [1, 2, 3, 4], "override_shapes": [*(v.shape for v in data.values()), (rows, width)]}
        out = np.full((rows, width), np.nan, np.float32)
        again.execute(data | {4: out}, np.empty(1 << 16, np.uint8), **told)
        wide = data[1].astype(np.float64)
        normal = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
        assert np.allclose(out, np.maximum(normal * data[2] + data[3], 0), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValidationError, match="cannot be overridden"):
        read(g).execute(data | {4: out}, np.empty(1 << 16, np.uint8), **told)
    h = graphdnn.pygraph(device="cpu", is_override_shape_enabled=True, **FLOAT)
    flat = h.reshape(h.relu(h.tensor(dim=(8, 64), layout="row", uid=1))).set_dim((64, 8)).set_stride((8, 1))
    h.relu(flat).set_output(True).set_uid(2)
    with pytest.raises(ValidationError, match="a reshape keeps the number of elements"):
        read(built(h)).execute({1: out, 2: out}, None, override_uids=[1, 2], override_shapes=[(4, 64), (32, 8)])
