"""Convolution, data gradient, weight gradient: geometry, layouts, groups, types, prologues (padding stays zero), epilogues, every candidate plan."""

from __future__ import annotations

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type
from graphdnn.engines.base import flops
from graphdnn.frontend.names import convolution_mode
from graphdnn.ir.layout import by_name
from tests.helpers import built, check_graph

D = data_type
F32 = D.FLOAT
KINDS = ("fprop", "dgrad", "wgrad")


def entries(value, rank):
    return tuple(value) if isinstance(value, tuple) else (value,) * rank


class Case:
    """One convolution: ``x`` image dims, ``k`` outputs, ``taps`` filter dims."""

    def __init__(self, x=(2, 4, 7, 5), k=6, taps=3, pre=1, post=None, stride=1, dilation=1, groups=1, flip=False):
        rank = len(x) - 2
        self.x, self.groups, self.flip = x, groups, flip
        self.taps, self.pre, self.stride, self.dilation = (entries(v, rank) for v in (taps, pre, stride, dilation))
        self.post = self.pre if post is None else entries(post, rank)
        self.w = (k, x[1] // groups, *self.taps)
        parts = zip(x[2:], self.taps, self.pre, self.post, self.stride, self.dilation, strict=True)
        self.y = (x[0], k, *((n + p + q - d * (r - 1) - 1) // s + 1 for n, r, p, q, s, d in parts))

    def arguments(self):
        mode = convolution_mode.CONVOLUTION if self.flip else convolution_mode.CROSS_CORRELATION
        lists = {"pre_padding": self.pre, "post_padding": self.post, "stride": self.stride, "dilation": self.dilation}
        return lists | {"convolution_mode": mode}

    def add(self, g, kind, x=None, w=None, dy=None, layout="channels_last", dtype=F32, compute=D.NOT_SET):
        def tensor(given, dim, name):
            return given if given is not None else g.tensor(dim=dim, layout=layout, data_type=dtype, name=name)

        more = self.arguments() | {"compute_data_type": compute}
        if kind == "fprop":
            return g.conv_fprop(tensor(x, self.x, "x"), tensor(w, self.w, "w"), **more)
        if kind == "dgrad":
            return g.conv_dgrad(tensor(dy, self.y, "dy"), tensor(w, self.w, "w"), **more).set_dim(self.x)
        return g.conv_wgrad(tensor(x, self.x, "x"), tensor(dy, self.y, "dy"), **more).set_dim(self.w)


def done(t, name="result", dtype=F32):
    return t.set_name(name).set_output(True).set_data_type(dtype)


def graph_of(case, kind, **more):
    out = more.pop("out", F32)

    def build(g):
        done(case.add(g, kind, **more), dtype=out)

    return build


GEOMETRY = {
    "plain": Case(),
    "1-D, stride 2": Case(x=(2, 3, 9), k=4, pre=1, post=0, stride=2),
    "3-D, all different": Case(x=(2, 3, 5, 4, 6), k=4, taps=(3, 2, 1), pre=(1, 0, -1), post=(0, 1, 0), stride=(2, 1, 1)),
    "dilated, strided, uneven padding": Case(x=(2, 4, 9, 7), taps=(3, 2), pre=(2, 3), post=(0, 1), stride=(2, 3), dilation=(2, 1), flip=True),
    "grouped": Case(k=8, groups=2, stride=(1, 2)),
    "whole steps": Case(x=(2, 4, 8, 6), stride=2, flip=True),
    "whole steps, dilated": Case(x=(1, 3, 8, 9), k=4, taps=(3, 4), pre=(3, 2), stride=(2, 3), dilation=(3, 2)),
    "steps and dilation share a factor": Case(x=(1, 3, 9, 7), k=4, taps=(3, 2), pre=(1, 2), stride=(4, 2), dilation=(2, 2)),
    "steps over the filter": Case(x=(2, 4, 8, 9), taps=2, pre=0, post=(1, 2), stride=(4, 3), groups=2),
    "patches": Case(x=(1, 3, 10, 15), k=4, taps=5, pre=0, stride=5),
    "patches that do not come out even": Case(x=(1, 2, 11, 9), k=3, taps=(5, 3), pre=(2, 0), post=1, stride=(5, 4)),
    "depthwise": Case(groups=4, k=4),
    "depthwise, two filters a channel": Case(groups=4, k=8, flip=True),
    "1x1": Case(taps=1, pre=0),
    "1x1, grouped, strided": Case(taps=1, pre=0, groups=2, stride=2),
    "filter as large as the image": Case(x=(2, 3, 4, 5), taps=(4, 5), pre=0),
    "one pixel, padded": Case(x=(2, 3, 1, 1)),
    "one channel, one filter": Case(x=(1, 1, 5, 6), k=1),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GEOMETRY)
def test_geometry(device, name, kind):
    """Layouts in turn."""
    layout = ("row", "channels_last")[(list(GEOMETRY).index(name) + KINDS.index(kind)) % 2]
    check_graph(graph_of(GEOMETRY[name], kind, layout=layout), device)


TYPES = [
    ("fprop", D.DOUBLE, D.DOUBLE, D.NOT_SET),
    ("wgrad", D.DOUBLE, D.DOUBLE, D.NOT_SET),
    ("fprop", D.HALF, D.HALF, F32),
    ("dgrad", D.HALF, D.HALF, F32),
    ("fprop", D.BFLOAT16, F32, D.NOT_SET),
    ("wgrad", D.BFLOAT16, F32, D.NOT_SET),
    ("fprop", D.FP8_E4M3, D.HALF, F32),
    ("dgrad", D.FP8_E5M2, F32, D.FAST_FLOAT_FOR_FP8),
    ("fprop", D.INT8, D.INT32, D.INT32),
    ("wgrad", D.INT8, D.INT32, D.INT32),
    ("fprop", D.INT8, F32, F32),
    ("dgrad", D.INT64, D.INT64, D.NOT_SET),
    ("dgrad", D.DOUBLE, D.DOUBLE, D.NOT_SET),
    ("dgrad", D.INT8, D.INT32, D.INT32),
    ("wgrad", D.FP8_E4M3, F32, F32),
    ("fprop", D.UINT8, D.INT32, D.INT32),
]


@pytest.mark.parametrize("types", TYPES, ids=lambda t: "_".join(str(getattr(d, "name", d)) for d in t))
def test_types(device, types):
    kind, *types = types
    check_graph(graph_of(Case(x=(2, 3, 5, 4), k=5), kind, dtype=types[0], out=types[1], compute=types[2]), device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("types", [(D.INT8, D.INT32, D.INT32), (D.FP8_E5M2, D.HALF, F32)], ids=lambda t: t[0].name)
def test_narrow_types_of_any_form(device, types, kind):
    """Groups, strides, dilation, uneven padding and reversed taps together; and one channel a group."""
    dtype, out, compute = types
    case = Case(
        x=(1, 4, 7, 6), k=4, taps=(3, 2), pre=(2, 0), post=(1, 2), stride=(2, 1), dilation=(1, 2), groups=2 if kind == "fprop" else 4, flip=True
    )
    check_graph(graph_of(case, kind, dtype=dtype, out=out, compute=compute), device, runs=1)


@pytest.mark.parametrize(
    ("kind", "order"), [("fprop", (0, 3, 2, 1)), ("fprop", (2, 3, 0, 1)), ("dgrad", (0, 3, 2, 1)), ("wgrad", (2, 3, 0, 1))], ids=str
)
def test_any_strides(device, kind, order):
    """Orders of memory that are neither NCHW nor NHWC, with gaps, from an odd first element."""

    def build(g):
        case = Case(x=(2, 3, 5, 4), k=5, stride=(2, 1))

        def tensor(dim, name):
            return g.tensor(dim=dim, stride=[2 * s for s in by_name(dim, order)], data_type=F32, name=name)

        result = done(case.add(g, kind, tensor(case.x, "x"), tensor(case.w, "w"), tensor(case.y, "dy")))
        result.set_dim({"fprop": case.y, "dgrad": case.x, "wgrad": case.w}[kind])
        result.set_stride([3 * s for s in by_name(result.get_dim(), order)])

    check_graph(build, device, offsets={"x": 1, "w": 3, "dy": 1})


@pytest.mark.parametrize(
    ("kind", "layout", "dtype"),
    [*((k, ("row", "channels_last")[i % 2], F32) for i, k in enumerate(KINDS)), ("fprop", "channels_last", F32), ("fprop", "row", D.INT8)],
    ids=str,
)
def test_every_candidate_plan(device, kind, layout, dtype):
    """All engines and knobs; wide enough for several register tiles and strips, long enough for sums in chunks."""
    case = Case(x=(2, 20, 9, 67), k=19, stride=(2, 1), dilation=(1, 2)) if device != "cudasim" else Case(x=(1, 2, 4, 5), k=3)
    check_graph(graph_of(case, kind, layout=layout, dtype=dtype, out=D.INT32 if dtype is D.INT8 else F32), device, every_plan=True)


NARROW = {
    "depthwise": Case(x=(1, 40, 10, 13), k=40, groups=40, stride=(2, 1)),
    "two filters a channel": Case(x=(2, 12, 9, 6), k=24, groups=12, taps=(5, 3), pre=2, dilation=(1, 2)),
    "narrow groups": Case(x=(2, 12, 9, 11), k=9, groups=3, stride=(1, 2)),
    "1-D": Case(x=(2, 34, 19), k=34, taps=4, groups=34),
    "3-D": Case(x=(1, 5, 4, 6, 7), k=5, taps=(2, 3, 3), groups=5),
}


@pytest.mark.parametrize("layout", ["row", "channels_last"])
@pytest.mark.parametrize("kind", ["fprop", "dgrad"])
@pytest.mark.parametrize("name", NARROW)
def test_narrow_groups(device, name, kind, layout):
    """Lanes over groups or outputs: blocks with tails, a prologue that padding does not see, an epilogue of every broadcast."""
    case = NARROW[name] if device != "cudasim" else Case(x=(1, 4, 5, 4), k=4, groups=4, stride=(2, 1))

    def build(g):
        given = case.x if kind == "fprop" else case.y
        a = g.sigmoid(g.tensor(dim=given, layout=layout, data_type=F32, name="in"))
        y = case.add(g, kind, layout=layout, **{"x" if kind == "fprop" else "dy": a})
        dim = case.y if kind == "fprop" else case.x
        bias = g.tensor(dim=(1, dim[1], *(1 for _ in dim[2:])), layout=layout, data_type=F32, name="bias")
        more = g.tensor(dim=dim, layout="row", data_type=D.HALF, name="residual")
        done(g.relu(g.add(g.bias(y, bias), more))).set_dim(dim).set_stride(by_name(dim, layout))

    outcome = check_graph(build, device, graph={"compute_data_type": F32}, runs=1)
    assert len(outcome.graph.plan.partition.regions) == 1
    assert name != "depthwise" or ("LanesCpu" if device == "cpu" else "ThreadCuda") in outcome.graph.plan.choices[0].knobs


@pytest.mark.parametrize("layout", ["row", "channels_last"])
def test_strided_data_gradients_multiply_no_zeros(device, layout):
    """Phases: as many operations as the forward convolution that they belong to, and a full reduction still in one kernel."""
    case = Case(x=(1, 4, 8, 6), taps=2, pre=0, stride=2)

    def build(g):
        done(case.add(g, "dgrad", layout=layout))

    g = check_graph(build, device).graph
    assert flops(g._opgraph, g.plan.partition.regions[0]) == 2 * np.prod(case.y) * np.prod(case.w[1:])


def test_long_sums_in_chunks(device):
    """A weight gradient over more outputs than are summed in one go."""
    size = (2, 3, 80, 70) if device != "cudasim" else (1, 2, 5, 4)
    for layout in ("row", "channels_last"):
        check_graph(graph_of(Case(x=size, k=5), "wgrad", layout=layout), device, runs=1)


@pytest.mark.parametrize(("kind", "dtype"), [("fprop", F32), ("fprop", D.INT32), ("dgrad", F32), ("wgrad", F32)], ids=str)
def test_empty_extents(device, kind, dtype):
    for case in (Case(x=(0, 4, 5, 5)), Case(x=(2, 0, 5, 5), k=3), Case(k=0)):
        check_graph(graph_of(case, kind, dtype=dtype, out=dtype), device, runs=1)


# ---------------------------------------------------------------------------------------------------------------------------------------- fusion
def vector(g, dim, name, dtype=F32):
    return g.tensor(dim=dim, layout="row", data_type=dtype, name=name)


@pytest.mark.parametrize("layout", ["row", "channels_last"])
@pytest.mark.parametrize("kind", ["fprop", "wgrad"])
def test_padding_is_zero_behind_the_prologue(device, kind, layout):
    """relu(scale * x + bias) of a padded element is not 0 times scale plus bias: the guard is on the prologue's result."""
    case = Case(stride=(1, 2), pre=2)

    def build(g):
        x = g.tensor(dim=case.x, layout=layout, data_type=F32, name="image")
        x = g.relu(g.bias(g.scale(x, vector(g, (1, 4, 1, 1), "scale")), vector(g, (1, 4, 1, 1), "bias")))
        done(case.add(g, kind, x=x, layout=layout))

    outcome = check_graph(build, device, graph={"compute_data_type": F32})
    assert len(outcome.graph.plan.partition.regions) == 1


def test_prologues_on_both_inputs(device):
    def build(g):
        case = Case()
        image = g.tensor(dim=(2, 7, 5, 4), layout="row", data_type=F32, name="nhwc")
        x = g.exp(g.transpose(image, [0, 3, 1, 2]))
        w = g.mul(g.tensor(dim=case.w, layout="row", data_type=D.INT8, name="quantized"), vector(g, (6, 1, 1, 1), "scale"))
        done(case.add(g, "fprop", x=x, w=w))

    outcome = check_graph(build, device, graph={"compute_data_type": F32, "intermediate_data_type": F32})
    assert len(outcome.graph.plan.partition.regions) == 1


EPILOGUES = {
    "bias relu": lambda g, y: g.relu(g.bias(y, vector(g, (1, 6, 1, 1), "bias"))),
    "residual": lambda g, y: g.relu(g.add(g.scale(y, 0.5), g.tensor(dim=(2, 6, 7, 5), layout="row", data_type=D.HALF, name="residual"))),
    "a bias each pixel, swish": lambda g, y: g.swish(g.add(y, vector(g, (1, 1, 7, 5), "bias"))),
    "its own column": lambda g, y: g.mul(y, g.gen_index(y, axis=3)),
}


@pytest.mark.parametrize("layout", ["row", "channels_last"])
@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues_are_fused(device, name, layout):
    def build(g):
        y = done(EPILOGUES[name](g, Case().add(g, "fprop", layout=layout)), dtype=D.BFLOAT16 if name == "residual" else F32)
        y.set_dim((2, 6, 7, 5)).set_stride(by_name((2, 6, 7, 5), layout))

    outcome = check_graph(build, device, graph={"compute_data_type": F32})
    assert len(outcome.graph.plan.partition.regions) == 1, outcome.graph.explain()


def test_several_outputs_and_a_full_reduction(device):
    def build(g):
        y = done(Case().add(g, "fprop"), "y", D.HALF)
        r = done(g.relu(y), "r")
        done(g.cmp_gt(r, 0.25), "mask", D.BOOLEAN)
        done(g.reduction(r, graphdnn.reduction_mode.AMAX).set_dim((1, 1, 1, 1)), "amax")

    outcome = check_graph(build, device, graph={"compute_data_type": F32})
    assert len(outcome.graph.plan.partition.regions) == 1


def test_sums_of_channels_follow(device):
    """Batch statistics: a reduction that conv's epilogue does not take runs behind it."""

    def build(g):
        y = done(Case().add(g, "fprop"), "y")
        done(g.reduction(y, graphdnn.reduction_mode.ADD).set_dim((1, 6, 1, 1)), "sums")
        done(g.reduction(g.mul(y, y), graphdnn.reduction_mode.ADD).set_dim((1, 6, 1, 1)), "squares")

    check_graph(build, device, graph={"compute_data_type": F32})


# --------------------------------------------------------------------------------------------------------------------------------------- gradients
def run(case, kind, arrays):
    """The result of one op in double precision on the CPU."""
    dims = {"fprop": case.y, "dgrad": case.x, "wgrad": case.w}
    g = graphdnn.pygraph(device="cpu")
    inputs = {n: g.tensor_like(arrays[n]).set_name(n).set_is_pass_by_value(False) for n in arrays}
    result = done(case.add(g, kind, **inputs), dtype=D.DOUBLE).set_dim(dims[kind]).set_stride(by_name(dims[kind], "row"))
    built(g)
    found = np.full(dims[kind], np.nan)
    workspace = np.empty(max(g.get_workspace_size(), 1), np.uint8)
    g.execute({inputs[n].get_uid(): arrays[n] for n in arrays} | {result.get_uid(): found}, workspace)
    return found


def inputs_of(case):
    rng = np.random.default_rng(0)
    return {n: rng.standard_normal(dim) for n, dim in (("x", case.x), ("w", case.w), ("dy", case.y))}


@pytest.mark.parametrize("name", ["1-D, stride 2", "3-D, all different", "dilated, strided, uneven padding", "depthwise, two filters a channel"])
def test_gradients_against_central_differences(name):
    """d/dt sum(y(x + t e) * dy) along random directions e: exact but for rounding, since y is linear in each input."""
    case = GEOMETRY[name]
    a, rng = inputs_of(case), np.random.default_rng(1)

    def objective(x, w):
        return np.vdot(run(case, "fprop", {"x": x, "w": w}), a["dy"])

    e, f, h = rng.standard_normal(case.x), rng.standard_normal(case.w), 0.5
    by_x = (objective(a["x"] + h * e, a["w"]) - objective(a["x"] - h * e, a["w"])) / (2 * h)
    by_w = (objective(a["x"], a["w"] + h * f) - objective(a["x"], a["w"] - h * f)) / (2 * h)
    np.testing.assert_allclose(np.vdot(run(case, "dgrad", {"dy": a["dy"], "w": a["w"]}), e), by_x, rtol=1e-11)
    np.testing.assert_allclose(np.vdot(run(case, "wgrad", {"x": a["x"], "dy": a["dy"]}), f), by_w, rtol=1e-11)


@pytest.mark.parametrize("name", ["plain", "grouped", "depthwise", "1x1, grouped, strided"])
def test_against_torch(name):
    import torch
    case = GEOMETRY[name]
    a = inputs_of(case)
    x, w, dy = (torch.from_numpy(a[n]).requires_grad_() for n in ("x", "w", "dy"))
    y = torch.nn.functional.conv2d(x, w, None, case.stride, case.pre, case.dilation, case.groups)
    y.backward(dy.detach())
    for kind, wanted, needs in (("fprop", y, "xw"), ("dgrad", x.grad, "wd"), ("wgrad", w.grad, "xd")):
        found = run(case, kind, {n: a[n] for n in a if n[0] in needs})
        np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["row", "channels_last"])
def test_blocks_of_rows_read_no_further_than_the_image(device, layout):
    """9 rows of outputs in blocks of 8 and 4, without padding: the last block has fewer, and the image ends with the buffer."""
    graph = graph_of(Case(x=(2, 3, 11, 8), k=3, pre=0, groups=3), "fprop", layout=layout)
    check_graph(graph, device, every_plan=device == "cpu", runs=1, barred=("eng5", "eng7", "eng8"))
