"""Normalizations, statistics and softmax on every target: layouts, ranks, data types, axes, sizes, what stands around them, and their edges."""

from __future__ import annotations

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type
from tests.helpers import Data, check_graph, given
from tests.norm_cases import DIM, INFERENCE, OPS, TRAINING, VALUES, Bench, data_of, declared, layernorm, layernorm_backward

F32, F16, BF16, F64 = data_type.FLOAT, data_type.HALF, data_type.BFLOAT16, data_type.DOUBLE
IN_FLOAT = {"io_data_type": F32, "intermediate_data_type": F32, "compute_data_type": F32}


def run(build, device, **kwargs):
    kwargs.setdefault("graph", IN_FLOAT)
    data = data_of(build) | kwargs.pop("data", {})
    return check_graph(build, device, data=data, values=VALUES, **kwargs)


@pytest.mark.parametrize("op", OPS)
def test_every_op(device, op):
    run(declared([op]), device)


def padded(dim):
    """Row-major with gaps."""
    stride, step = [], 2
    for d in reversed(dim):
        stride.append(step)
        step = step * d + 3
    return tuple(reversed(stride))


def reversed_order(dim):
    """First dim fastest."""
    return tuple(int(np.prod(dim[:a])) for a in range(len(dim)))


LAYOUTS = {
    "2-D": ((7, 6), "row"),
    "2-D columns": ((7, 6), reversed_order),
    "3-D": ((3, 4, 5), "row"),
    "3-D channels last": ((3, 4, 5), "channels_last"),
    "4-D channels last": (DIM, "channels_last"),
    "4-D first dim fastest": (DIM, reversed_order),
    "4-D padded": (DIM, padded),
    "5-D": ((2, 4, 3, 2, 5), "row"),
    "5-D channels last": ((2, 4, 3, 2, 5), "channels_last"),
}


@pytest.mark.parametrize("name", ["3-D", "4-D channels last", "4-D padded", "5-D"])
def test_layouts(device, name):
    dim, layout = LAYOUTS[name]
    run(declared(["layernorm", "batchnorm", "softmax"], dim, layout=layout), device, runs=1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "op"), [(n, o) for n in LAYOUTS for o in OPS if "2-D" not in n or not o.startswith("instancenorm")])
def test_every_op_in_every_layout(device, name, op):
    dim, layout = LAYOUTS[name]
    run(declared([op], dim, layout=layout), device, offsets={"x": 1})


TYPES = {
    "half": (F16, F32, F32),
    "bfloat16": (BF16, F32, F32),
    "bfloat16 parameters": (BF16, BF16, F32),
    "double": (F64, F64, F64),
    "double out of single": (F32, F32, F64),
}


def of_type(names, kind, **more):
    dtype, parameters, compute = TYPES[kind]
    graph = {"io_data_type": dtype, "intermediate_data_type": compute, "compute_data_type": compute}
    return declared(names, dtype=dtype, parameters=parameters, **more), graph


@pytest.mark.parametrize("kind", ["half", "bfloat16 parameters", "double"])
def test_types(device, kind):
    build, graph = of_type(["layernorm", "layernorm_backward", "softmax"], kind)
    run(build, device, graph=graph, runs=1)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", TYPES)
def test_every_op_on_every_type(device, kind, op):
    build, graph = of_type([op], kind)
    run(build, device, graph=graph)


@pytest.mark.slow
@pytest.mark.parametrize("op", [o for o in OPS if not o.endswith("backward")])
@pytest.mark.parametrize("out", [data_type.FP8_E4M3, data_type.FP8_E5M2, data_type.INT8], ids=lambda d: d.name)
def test_narrow_outputs(device, op, out):
    run(declared([op], dtype=BF16, out=out), device)


@pytest.mark.parametrize("dtype", [data_type.INT8, data_type.INT32], ids=lambda d: d.name)
def test_integers_are_calculated_in_float(device, dtype):
    """Also without a compute type: the mean of integers is no integer."""

    def build(g):
        x = g.tensor(dim=[3, 7], layout="row", data_type=dtype, name="x")
        s = g.tensor(dim=[1, 7], layout="row", data_type=dtype, name="s")
        y, mean, _ = g.layernorm(TRAINING, x, s, s, 1)
        for name, t in (("y", y), ("mean", mean), ("softmax", g.softmax(x, 1))):
            t.set_output(True).set_name(name).set_data_type(F32)

    check_graph(build, device)


@pytest.mark.parametrize("axes", [(1,), (1, 2, 3), (0, 2)], ids=str)
def test_axes(device, axes):
    def build(g):
        layernorm(Bench(g), DIM, axes)
        layernorm_backward(Bench(g), DIM, axes)

    run(build, device, runs=1)


def test_scale_without_leading_ones(device):
    def build(g):
        x = g.tensor(dim=[2, 5, 8], layout="row", name="x")
        s, t = (g.tensor(dim=[8], layout="row", name=n) for n in ("scale", "bias"))
        inverse, dy = (g.tensor(dim=d, layout="row", name=n) for n, d in (("inverse", [2, 5, 1]), ("dy", [2, 5, 8])))
        Bench(g).outputs("layernorm", g.layernorm(TRAINING, x, s, t, 1e-5))
        Bench(g).outputs("rmsnorm", g.rmsnorm(INFERENCE, x, s, epsilon=1e-5))
        dx, dscale, dbias = g.rmsnorm_backward(dy, x, s, inverse, True)
        Bench(g).outputs("backward", [dx, dscale.set_dim([8]), dbias.set_dim([1, 5, 8])])

    run(build, device)


def test_sequence_first(device):
    """adalayernorm of [S, B, D] with scale [1, B, D] normalizes over D alone."""

    def build(g):
        b = Bench(g)
        x, dy, s = b.x("x", (5, 3, 8)), b.x("dy", (5, 3, 8)), b.p("scale", [1, 3, 8])
        b.outputs("forward", g.adalayernorm(TRAINING, x, s, s, 1e-5))
        b.outputs("backward", g.adalayernorm_backward(dy, x, s, b.p("mean", [5, 3, 1]), b.p("inverse", [5, 3, 1])))

    assert run(build, device).graph._nodes[0].outputs["MEAN"].dim == (5, 3, 1)


def test_partial_gradients_of_scale(device):
    """Dims that are set on DSCALE may be larger than those of scale: then less is added up. Without, they are those of the API."""

    def build(g):
        b = Bench(g)
        x, dy, s, mean, inverse = (
            b.x("x", (3, 5, 8)),
            b.x("dy", (3, 5, 8)),
            b.p("scale", [1, 1, 8]),
            b.p("mean", [3, 5, 1]),
            b.p("inverse", [3, 5, 1]),
        )
        for name, dim in (("api", None), ("scale", [1, 1, 8]), ("by sample", [3, 1, 8]), ("all", [3, 5, 8])):
            made = g.layernorm_backward(dy, x, s, mean, inverse)
            b.outputs(name, [made[0], *(t if dim is None else t.set_dim(dim) for t in made[1:])])

    g = run(build, device).graph
    assert [tuple(n.outputs["DSCALE"].dim) for n in g._nodes] == [(1, 5, 8), (1, 1, 8), (3, 1, 8), (3, 5, 8)]


SIZES = [1, 2, 31, 33, 64, 65, 127, 129, 255, 1025]


def rows_of(sizes):
    def build(g):
        for n in sizes:
            x = g.tensor(dim=[3, n], layout="row", name=f"x{n}")
            s = g.tensor(dim=[1, n], layout="row", name=f"scale{n}")
            Bench(g).outputs(f"layernorm{n}", g.layernorm(TRAINING, x, s, s, 1e-5))
            Bench(g).outputs(f"softmax{n}", [g.softmax(x, 1)])

    return build


@pytest.mark.parametrize("sizes", [(33, 127)], ids=str)
def test_tails(device, sizes):
    run(rows_of(sizes), device, runs=1)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_every_tail(device, size):
    run(rows_of([size]), device, data={f"x{size}": Data("uniform", 5, 9)})


LONG = {"channels": (4, 3, 150, 121), "few rows": (2, 2, 70_001), "many channels": (3, 700, 5)}


@pytest.mark.slow
@pytest.mark.parametrize("op", ["batchnorm", "batchnorm_backward", "genstats", "instancenorm", "groupnorm", "layernorm", "softmax"])
@pytest.mark.parametrize("name", LONG)
def test_sizes_that_do_not_fit_one_walk(device, name, op):
    """Where rows are too long or too few to walk again, they are cut; the numbers are the same. Smaller on the simulator."""
    dim = LONG[name]
    dim = tuple(min(d, 20) for d in dim) if device == "cudasim" else dim
    if op == "groupnorm":
        dim = (dim[0], 2 * dim[1], *dim[2:])
    run(declared([op], dim), device, runs=1)


# ------------------------------------------------------------------------------------------------------------------------- around them (case U1)
@pytest.mark.parametrize(("width", "dtype"), [(768, F16), (1024, BF16)], ids=str)
def test_residual_before_and_product_after_in_one_kernel(device, width, dtype):
    width = 72 if device == "cudasim" else width

    def build(g):
        b = Bench(g, dtype)
        x, r, z = (b.x(n, (2, 3, width)) for n in ("x", "residual", "z"))
        total = g.add(x, r).set_name("sum").set_output(True).set_data_type(dtype)
        y, mean, inverse = g.layernorm(TRAINING, total, b.p("scale", [1, 1, width]), b.p("bias", [1, 1, width]), 1e-5)
        kept = g.mul(y, z)
        mask = g.cmp_gt(kept, 0.0)
        b.outputs("norm", [g.relu(kept), mean, inverse, mask.set_data_type(data_type.BOOLEAN)], (1, 2))
        mask.set_data_type(data_type.BOOLEAN)

    g = run(build, device).graph
    assert len(g.explain().regions) == 1


@pytest.mark.parametrize("op", ["batchnorm", "instancenorm"])
def test_add_relu_mask(device, op):
    """NormAddRelu, and its backward: the mask times dY, stored as dZ too, then the gradient of the normalization."""

    def build(g):
        b = Bench(g, F16)
        x, z, dy, mask = b.x("x", DIM), b.x("z", DIM), b.x("dy", DIM), g.tensor(dim=DIM, layout="row", data_type=data_type.BOOLEAN, name="mask")
        c, rest = b.p("scale", [1, 6, 1, 1]), [1 if op == "batchnorm" else 2, 6, 1, 1]
        if op == "batchnorm":
            y = g.batchnorm(x, c, c, None, None, 1e-5, None)[0]
        else:
            y = g.instancenorm(TRAINING, x, c, c, 1e-5)[0]
        total = g.add(y, z)
        b.outputs("forward", [g.relu(total), g.cmp_gt(total, 0.0)])
        dz = g.mul(dy, mask)
        b.outputs("backward", [dz, *getattr(g, f"{op}_backward")(dz, x, c, b.p("mean", rest), b.p("inverse", rest))], (2, 3))

    run(build, device, runs=1)


def test_one_norm_after_another(device):
    def build(g):
        b = Bench(g)
        s = b.p("scale", [1, 24])
        y = g.rmsnorm(INFERENCE, g.layernorm(INFERENCE, b.x("x", (5, 24)), s, s, 1e-5)[0], s, epsilon=1e-5)[0]
        b.outputs("y", [g.log_softmax(y, 1)])

    run(build, device)


# ---------------------------------------------------------------------------------------------------------------------------------------- edges
def test_large_mean(device):
    """The variance is found in a second pass: mean 4096, deviation 1."""
    rng = np.random.default_rng(0)
    width = 500 if device != "cudasim" else 60
    x = np.float32(4096 + rng.standard_normal((3, width)))

    def build(g):
        b = Bench(g)
        s = b.p("scale", [1, width])
        b.outputs("y", g.layernorm(TRAINING, b.x("x", (3, width)), s, s, 1e-5))

    found = run(build, device, data={"x": given(x), f"scale[1, {width}]": given(1.0)}, may_exclude=1.0).outputs
    want = 1 / np.sqrt(x.astype(np.float64).var(axis=1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(found["y.2"], want, rtol=1e-5)


def test_nan_and_infinities(device):
    """Wherever NaN stands it spoils its own row and no other."""

    def build(g):
        b = Bench(g)
        x, s = b.x("x", (6, 9)), b.p("scale", [1, 9])
        b.outputs("layernorm", g.layernorm(TRAINING, x, s, s, 1e-5))
        b.outputs("rmsnorm", g.rmsnorm(TRAINING, x, s, None, 1e-5))
        b.outputs("softmax", [g.softmax(x, 1), g.log_softmax(x, 1), g.logsumexp(x, 1)])
        b.outputs("gradient", [g.logsumexp_backward(b.p("dy", [6]), x, b.p("logsumexp", [6]), 1)])

    x = np.linspace(-2, 2, 54).reshape(6, 9)
    x[0, 3], x[1, 8], x[2, 0], x[3] = np.nan, np.inf, -np.inf, -np.inf
    x[4] = 1e4
    total = np.array([np.nan, np.inf, 3.0, -np.inf, 1e4 + np.log(9), 2.0])
    outcome = run(build, device, data={"x": given(x), "logsumexp[6]": given(total)}, may_exclude=0.3)
    softmax, log_softmax, logsumexp, gradient = (outcome.outputs[n] for n in ("softmax.0", "softmax.1", "softmax.2", "gradient.0"))
    assert np.isnan(softmax[[0, 1, 3]]).all() and np.isfinite(softmax[[2, 4, 5]]).all() and softmax[2, 0] == 0 and log_softmax[2, 0] == -np.inf
    assert np.isnan(logsumexp[0]) and logsumexp[1] == np.inf and logsumexp[3] == -np.inf and np.isfinite(logsumexp[[2, 4, 5]]).all()
    assert (gradient[3] == 0).all() and np.isnan(gradient[0]).all()
    assert np.isnan(outcome.outputs["layernorm.0"][[0, 1, 2, 3]]).all() and np.isfinite(outcome.outputs["layernorm.0"][4:]).all()
    rmsnorm = outcome.outputs["rmsnorm.0"]  # an infinity makes the other elements 0, since no mean is subtracted
    assert np.isnan(rmsnorm[0]).all() and np.isnan(rmsnorm[1, 8]) and (rmsnorm[1, :8] == 0).all() and (outcome.outputs["rmsnorm.1"][1:4] == 0).all()


def test_empty_batch(device):
    def build(g):
        b = Bench(g)
        s, c = b.p("scale", [1, 1, 5]), b.p("scale", [1, 4, 1])
        b.outputs("layernorm", g.layernorm(TRAINING, b.x("x", (0, 4, 5)), s, s, 1e-5))
        b.outputs("instancenorm", g.instancenorm(TRAINING, b.x("x", (0, 4, 5)), c, c, 1e-5))
        b.outputs("softmax", [g.softmax(b.x("x", (0, 4, 5)), 1), g.logsumexp(b.x("none", (3, 0)), 1)])
        b.outputs("backward", g.layernorm_backward(b.x("x", (0, 4, 5)), b.x("x", (0, 4, 5)), s, b.p("mean", [0, 4, 1]), b.p("mean", [0, 4, 1])))

    outcome = run(build, device)
    assert (outcome.outputs["softmax.1"] == -np.inf).all() and (outcome.outputs["backward.1"] == 0).all()


def test_forms_of_epsilon(device):
    """A number, a stored scalar of either kind, a by-value tensor of any rank, memory."""

    def build(g):
        b = Bench(g)
        s = b.p("scale", [1, 7])
        runtime, constant = (g.tensor_scalar(1e-3, graphdnn.scalar_type[k]) for k in ("RUNTIME_PARAM", "COMPILE_TIME_CONST"))
        stored = g.tensor(dim=[1, 1, 1], layout="row", name="inverse")
        for i, e in enumerate((1e-3, runtime, constant, b.number("epsilon", 4), stored)):
            b.outputs(f"rmsnorm{i}", [g.rmsnorm(INFERENCE, b.x("x", (4, 7)), s, epsilon=e)[0]])

    found = run(build, device, data={"inverse": given(1e-3)}).outputs
    assert all((found["rmsnorm0.0"] == found[f"rmsnorm{i}.0"]).all() for i in range(1, 5))


def test_batch_of_one_element_a_channel(device):
    """n / (n - 1) counts as 1: the variance is 0 either way."""
    found = run(declared(["batchnorm"], (1, 4)), device).outputs
    assert np.isfinite(found["batchnorm.4"]).all()


@pytest.mark.parametrize("dim", [DIM, (2, 3, 190, 180)], ids=str)
def test_running_statistics_in_place(device, dim):
    """The next running statistics written over the previous ones, in one kernel or cut into several."""
    import torch
    dim = tuple(min(d, 9) for d in dim) if device == "cudasim" else dim
    g = graphdnn.pygraph(device=device, **IN_FLOAT)
    x, (s, b, m, v) = g.tensor(dim=dim, layout="row"), (g.tensor(dim=[1, dim[1], 1, 1], layout="row") for _ in range(4))
    y, mean, inverse, next_m, next_v = (t.set_output(True) for t in g.batchnorm(x, s, b, m, v, 1e-5, 0.1))
    g.build([graphdnn.heur_mode.A])
    place = device if device.startswith("cuda:") else "cpu"
    pack = {t: torch.rand(t.get_dim(), generator=torch.manual_seed(1)) + 0.5 for t in (x, s, b, m, v, y, mean, inverse)}
    module = torch.nn.BatchNorm2d(dim[1])
    for name, t in zip(("weight", "bias", "running_mean", "running_var"), (s, b, m, v), strict=True):
        getattr(module, name).data.copy_(pack[t].ravel())
    want = module(pack[x]).detach()
    pack = {t: a.to(place) for t, a in pack.items()}
    g.execute(pack | {next_m: pack[m], next_v: pack[v]}, torch.zeros(g.get_workspace_size(), dtype=torch.uint8, device=place))
    for found, expected in ((pack[y], want), (pack[m].ravel(), module.running_mean), (pack[v].ravel(), module.running_var)):
        np.testing.assert_allclose(found.cpu().numpy(), expected.numpy(), rtol=1e-4, atol=1e-5)


def test_every_plan(device):
    """Fused or one kernel per op: within the same bounds."""
    run(declared(["layernorm", "softmax"], (3, 4, 6)), device, every_plan=True, runs=1)


def test_tables_agree():
    """Every composite op of these families is in some case."""
    g = graphdnn.pygraph(device="cpu")
    for name in OPS:
        OPS[name](Bench(g), DIM)
    from graphdnn.opspecs import batchnorm, norm
    from graphdnn.opspecs import softmax as softmax_ops

    assert {n.op for n in g._nodes} == {s.tag for m in (norm, batchnorm, softmax_ops) for s in m.SPECS}
