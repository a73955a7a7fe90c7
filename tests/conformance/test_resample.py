"""Pooling and interpolation, forward and backward: modes, ranks, layouts, types, what stands around them, torch, central differences."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type
from graphdnn.errors import KindError, ValidationError
from tests.helpers import Data, built, check_graph

D = data_type
F32 = D.FLOAT
POOLING = {"window": (3, 2), "stride": (2, 1), "pre_padding": (1, 0), "post_padding": (2, 1)}
CASES = {
    "max": ("MAXPOOL", (2, 3, 6, 7), POOLING),
    "max, 1-D, window steps": ("MAXPOOL", (2, 3, 8), {"window": (3,)}),
    "average of the window": ("AVGPOOL_INCLUDE_PADDING", (2, 3, 6, 7), POOLING),
    "average of the image": ("AVGPOOL_EXCLUDE_PADDING", (2, 3, 6, 7), POOLING),
    "average, 3-D": ("AVGPOOL_EXCLUDE_PADDING", (1, 2, 3, 4, 5), {"window": (2, 3, 2), "stride": (1, 2, 2), "pre_padding": (1, 1, 0)}),
    "nearest, larger": ("NEAREST", (2, 3, 4, 5), {"stride": (0.5, Fraction(1, 3))}),
    "nearest, smaller": ("NEAREST", (2, 3, 7, 8), {"stride": (1.5, 3)}),
    "bilinear, larger": ("BILINEAR", (2, 3, 4, 5), {"stride": (0.5, Fraction(2, 3))}),
    "bilinear, smaller": ("BILINEAR", (2, 3, 7, 8), {"stride": (2.5, 1.5)}),
    "trilinear": ("BILINEAR", (1, 2, 3, 4, 2), {"stride": (0.5, 1.25, 1)}),
}


def done(t, name, dtype=F32):
    return t.set_name(name).set_output(True).set_data_type(dtype)


def both(case, layout="row", dtype=F32, out=None):
    """A graph of the op and its gradient."""
    mode, dim, more = case

    def build(g):
        x = g.tensor(dim=dim, layout=layout, data_type=dtype, name="x")
        y, index = g.resample(x, mode, **more, generate_index=mode == "MAXPOOL")
        done(y, "y", out or dtype)
        if index is not None:
            done(index, "index", D.INT32)
        g.validate()
        dy = g.tensor(dim=y.get_dim(), layout=layout, data_type=dtype, name="dy")
        done(g.resample_backward(dy, mode, **more, index=index).set_dim(dim), "dx", out or dtype)

    return build


@pytest.mark.parametrize("name", CASES)
def test_modes(device, name):
    """Layouts in turn."""
    check_graph(both(CASES[name], ("row", "channels_last")[list(CASES).index(name) % 2]), device, runs=1)


@pytest.mark.parametrize(
    ("name", "dtype", "out"),
    [
        ("max", D.INT8, D.INT8),
        ("max", D.HALF, D.HALF),
        ("average of the image", D.INT32, D.INT32),
        ("average of the window", D.BFLOAT16, F32),
        ("bilinear, larger", D.INT8, F32),
    ],
)
def test_types(device, name, dtype, out):
    check_graph(both(CASES[name], dtype=dtype, out=out), device, runs=1)


def test_nan_wins_and_padding_never_does(device):
    """A window of -inf keeps its own first place; one with a NaN gives the NaN and its place."""
    values = np.full((1, 2, 4, 4), -np.inf)
    values[0, 1] = np.arange(16).reshape(4, 4)
    values[0, 1, 2, 1] = np.nan

    def build(g):
        x = g.tensor(dim=(1, 2, 4, 4), layout="row", data_type=F32, name="x")
        y, index = g.resample(x, "MAXPOOL", [3, 3], [2, 2], [1, 1], [1, 1], True)
        done(y, "y")
        done(index, "index", D.INT8)

    outcome = check_graph(build, device, data={"x": Data("values", values=values)}, runs=1, may_exclude=1)
    assert outcome.outputs["index"][0, 0].tolist() == [[4, 3], [1, 0]]
    assert outcome.outputs["index"][0, 1, 1].tolist() == [5, 3]
    assert np.isnan(outcome.outputs["y"][0, 1, 1]).all() and np.isneginf(outcome.outputs["y"][0, 0]).all()


@pytest.mark.parametrize("mode", ["MAXPOOL", "AVGPOOL_EXCLUDE_PADDING", "AVGPOOL_INCLUDE_PADDING"])
def test_pointwise_around_it_is_fused(device, mode):
    """The value outside of the image is that of the mode, not f(0)."""

    def build(g):
        x = g.tensor(dim=(2, 3, 5, 4), layout="channels_last", data_type=F32, name="x")
        bias = g.tensor(dim=(1, 3, 1, 1), layout="row", data_type=F32, name="bias")
        y, _ = g.resample(g.relu(g.add(x, bias)), mode, [2, 2], [1, 1], [1, 1], [1, 1])
        done(g.mul(y, 0.5), "y")

    outcome = check_graph(build, device, graph={"compute_data_type": F32, "intermediate_data_type": F32})
    assert len(outcome.graph.plan.partition.regions) == 1


OUTSIDERS = {
    "nearest, gradient": ("NEAREST", 2, [1.0, np.inf, np.nan], "backward", [1, 0, np.inf, 0, np.nan, 0]),
    "bilinear, gradient": ("BILINEAR", 3, [1.0, -np.inf, np.nan], "backward", [0, 1, 0, 0, -np.inf, 0, 0, np.nan, 0]),
    "bilinear, identity": ("BILINEAR", 1, [1.0, 2.0, 3.0, np.inf, np.nan, 4.0], "forward", [1, 2, 3, np.inf, np.nan, 4]),
    "bilinear, larger": ("BILINEAR", Fraction(1, 3), [1.0, np.inf, 2.0], "forward", [1, 1, np.inf, np.inf, np.inf, np.inf, np.inf, 2, 2]),
}
"""Mode, stride, values along both spatial dims, direction, and the result along one of them."""


@pytest.mark.parametrize("name", OUTSIDERS)
def test_what_has_no_part_in_a_result_does_not_reach_it(device, name):
    """An element of weight 0 may be inf or NaN; in two dims, ones along the first. ``check_graph`` compares with the reference too."""
    mode, stride, values, kind, wanted = OUTSIDERS[name]

    def build(g):
        x = g.tensor(dim=(1, 1, 2, len(values)), layout="row", data_type=F32, name="x")
        if kind == "forward":
            done(g.resample(x, mode, stride=(1, stride))[0], "y")
        else:
            done(g.resample_backward(x, mode, stride=(1, stride)).set_dim((1, 1, 2, len(wanted))), "y")

    data = np.broadcast_to(np.asarray(values), (1, 1, 2, len(values)))
    outcome = check_graph(build, device, data={"x": Data("values", values=data)}, runs=1)
    full = np.broadcast_to(np.asarray(wanted, float), (1, 1, 2, len(wanted)))
    np.testing.assert_array_equal(outcome.outputs["y"], full)


@pytest.mark.parametrize("mode", ["NEAREST", "BILINEAR"])
def test_places_beyond_int32(mode):
    """4096ths of elements of a long line: their numbers need more than 32 bits. The line is its own index, so results are places."""
    n, num, den = 600_000, 4095, 4096
    g = graphdnn.pygraph(device="cpu", io_data_type=D.DOUBLE, compute_data_type=D.DOUBLE)
    x = g.tensor(dim=(1, 1, n), layout="row", name="x")
    y, _ = g.resample(x, mode, stride=[Fraction(num, den)])
    dx = g.resample_backward(y, mode, stride=[Fraction(num, den)]).set_dim((1, 1, n)).set_output(True)
    y.set_output(True)
    built(g)
    p = np.arange(n * den // num)
    found, sums = np.zeros((1, 1, len(p))), np.zeros((1, 1, n))
    g.execute({x: np.arange(n, dtype=np.float64).reshape(1, 1, n), y: found, dx: sums}, np.empty(g.get_workspace_size(), np.uint8))
    wanted = p * num // den if mode == "NEAREST" else np.clip(((2 * p + 1) * num - den) / (2 * den), 0, n - 1)
    np.testing.assert_allclose(found[0, 0], wanted, rtol=1e-12)
    low = np.floor(wanted).astype(int)
    high = np.minimum(low + 1, n - 1)
    part = wanted - low
    total = np.bincount(low, wanted * (1 - part), n) + np.bincount(high, wanted * part, n)
    np.testing.assert_allclose(sums[0, 0], total, rtol=1e-9, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------------------------------- gradients
def run(case, arrays, kind):
    """Results in double precision on the CPU: [y, index] or [dx]."""
    mode, dim, more = case
    g = graphdnn.pygraph(device="cpu", compute_data_type=D.DOUBLE)
    inputs = {n: g.tensor_like(a).set_name(n).set_is_pass_by_value(False) for n, a in arrays.items()}
    if kind == "forward":
        results = [t for t in g.resample(inputs["x"], mode, **more, generate_index=mode == "MAXPOOL") if t is not None]
    else:
        results = [g.resample_backward(inputs["dy"], mode, **more, index=inputs.get("index")).set_dim(dim)]
    for t in results:
        t.set_output(True)
        t.set_data_type(D.DOUBLE if t is results[0] else D.INT32)
    built(g)
    found = [np.empty(t.get_dim(), np.float64 if t is results[0] else np.int32) for t in results]
    views = [np.lib.stride_tricks.as_strided(f, f.shape, [s * f.itemsize for s in t.get_stride()]) for f, t in zip(found, results, strict=True)]
    workspace = np.empty(max(g.get_workspace_size(), 1), np.uint8)
    g.execute({inputs[n].get_uid(): a for n, a in arrays.items()} | {t.get_uid(): v for t, v in zip(results, views, strict=True)}, workspace)
    return views


@pytest.mark.parametrize("name", ["max", "average of the window", "average of the image", "nearest, larger", "bilinear, larger", "bilinear, smaller"])
def test_gradients_against_central_differences(name):
    case, rng = CASES[name], np.random.default_rng(0)
    x, e = (rng.standard_normal(case[1]) for _ in range(2))
    y, *index = run(case, {"x": x}, "forward")
    dy = rng.standard_normal(y.shape)
    h = 1e-6  # small enough that no maximum changes its place
    up, down = (np.vdot(run(case, {"x": x + t * e}, "forward")[0], dy) for t in (h, -h))
    (dx,) = run(case, {"dy": dy} | ({"index": np.ascontiguousarray(index[0])} if index else {}), "backward")
    np.testing.assert_allclose(np.vdot(dx, e), (up - down) / (2 * h), rtol=1e-7)


def test_against_torch():
    import torch
    f = torch.nn.functional
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 3, 7, 8))).requires_grad_()
    window = {"window": (3, 2), "stride": (2, 2), "pre_padding": (1, 1), "post_padding": (1, 1)}
    cases = {
        "MAXPOOL": (window, lambda: f.max_pool2d(x, (3, 2), 2, 1)),
        "AVGPOOL_INCLUDE_PADDING": (window, lambda: f.avg_pool2d(x, (3, 2), 2, 1)),
        "AVGPOOL_EXCLUDE_PADDING": (window, lambda: f.avg_pool2d(x, (3, 2), 2, 1, count_include_pad=False)),
        "NEAREST": ({"stride": (Fraction(1, 2), Fraction(8, 11))}, lambda: f.interpolate(x, (14, 11), mode="nearest")),
        "BILINEAR": ({"stride": (Fraction(7, 4), Fraction(8, 11))}, lambda: f.interpolate(x, (4, 11), mode="bilinear", align_corners=False)),
    }
    for mode, (more, call) in cases.items():
        wanted = call()
        y, *index = run((mode, (2, 3, 7, 8), more), {"x": x.detach().numpy()}, "forward")
        np.testing.assert_allclose(y, wanted.detach().numpy(), rtol=1e-12, atol=1e-12, err_msg=mode)
        dy = torch.from_numpy(np.random.default_rng(1).standard_normal(y.shape))
        (gradient,) = torch.autograd.grad(wanted, x, dy)
        arrays = {"dy": dy.numpy()} | ({"index": np.ascontiguousarray(index[0])} if index else {})
        (dx,) = run((mode, (2, 3, 7, 8), more), arrays, "backward")
        np.testing.assert_allclose(dx, gradient.numpy(), rtol=1e-12, atol=1e-12, err_msg=mode)


# ---------------------------------------------------------------------------------------------------------------------------- before any kernel
def graph():
    return graphdnn.pygraph(device="cpu", io_data_type=F32, intermediate_data_type=F32, compute_data_type=F32)


def image(g, dim=(2, 3, 6, 7), name="x"):
    return g.tensor(dim=dim, layout="row", name=name)


def test_dims_strides_names_and_text():
    g = graph()
    y, index = g.resample(image(g), "maxpool", [3, 2], generate_index=True, name="p")
    z, none = g.resample(image(g), "BILINEAR")
    y.set_output(True)
    z.set_dim((2, 3, 9, 14)).set_output(True)
    g.validate()
    assert none is None and y.get_dim() == index.get_dim() == [2, 3, 2, 3] and index.get_data_type() is D.INT32
    assert y.get_stride() == [18, 1, 9, 3] and (y.get_name(), index.get_name()) == ("p::Y", "p::Index")
    assert '"ratio":[[2,3],[1,2]]' in str(g) and "generate_index" not in str(g)
    again = graphdnn.pygraph(device="cpu")
    again.deserialize(str(g))
    assert str(again) == str(g)


BAD = [
    ("MAXPOOL", {}, "needs a window"),
    ("MAXPOOL", {"window": (3,)}, "window needs one entry"),
    ("MAXPOOL", {"window": (9, 2)}, r"does not fit in spatial dim 0.*1 to 6"),
    ("MAXPOOL", {"window": (3, 2), "pre_padding": (3, 0)}, "smaller than the window"),
    ("MAXPOOL", {"window": (3, 2), "stride": (1.5, 1)}, "whole"),
    ("MAXPOOL", {"window": (3, 2), "stride": (0, 1)}, "positive"),
    ("BILINEAR", {}, "size of the interpolation"),
    ("BILINEAR", {"stride": (2,)}, "stride needs one entry"),
    ("BILINEAR", {"stride": (9, 1)}, "empty"),
    ("MAXPOOL", {"window": (3, 2), "stride": (2**40, 1)}, "stride is out of range"),
    ("NEAREST", {"stride": (1, 1), "window": (2, 2)}, "neither window nor padding"),
    ("CUBIC", {"window": (2, 2)}, "mode not known"),
]


@pytest.mark.parametrize(("mode", "more", "words"), BAD)
def test_inputs_without_meaning(mode, more, words):
    g = graph()
    g.resample(image(g), mode, **more, name="p")
    with pytest.raises(ValidationError, match=f"'p'.*{words}"):
        g.validate()


def test_gradients_need_dims_and_the_index():
    for given, index, words in (
        (None, True, "inferencing is not possible"),
        ((2, 3, 6, 9), True, "not consistent"),
        ((2, 3, 6, 7), False, "needs the index"),
    ):
        g = graph()
        dx = g.resample_backward(image(g, (2, 3, 2, 3), "dy"), "MAXPOOL", [3, 2], index=image(g, (2, 3, 2, 3), "i") if index else None, name="p")
        if given:
            dx.set_dim(given)
        with pytest.raises(ValidationError, match=words):
            g.validate()
    g = graph()
    g.resample_backward(image(g, (2, 3, 2, 3), "dy"), "AVGPOOL_INCLUDE_PADDING", [3, 2], index=image(g, (2, 3, 2, 3), "i")).set_dim((2, 3, 6, 7))
    with pytest.raises(ValidationError, match="takes no index"):
        g.validate()


def test_wrong_kinds():
    g = graph()
    for arguments in ((3, [2, 2]), ("MAXPOOL", 3), ("MAXPOOL", [2, 2], "2"), ("MAXPOOL", [2, 2], [True, 1]), ("MAXPOOL", [2.0, 2])):
        with pytest.raises(KindError):
            g.resample(image(g), *arguments)
    with pytest.raises(ValidationError, match="only MAXPOOL"):
        g.resample(image(g), "NEAREST", stride=[1, 1], generate_index=True)
    with pytest.raises(ValidationError, match="finite"):
        g.resample(image(g), "NEAREST", stride=[float("inf"), 1])


@pytest.mark.parametrize("kind", [float, np.float64, np.float32, np.float16, Fraction])
def test_strides_of_every_kind_of_number_keep_their_fraction(kind):
    g = graph()
    y, _ = g.resample(image(g), "BILINEAR", stride=[kind(1.5), kind(2)])
    g.validate()
    assert y.get_dim() == [2, 3, 4, 3] and '"ratio":[[3,2],[2,1]]' in str(g)
    g = graph()
    g.resample(image(g), "MAXPOOL", [2, 2], stride=[kind(1.5), kind(2)])
    with pytest.raises(ValidationError, match="whole"):
        g.validate()
    for whole in (kind(2), np.int64(2), np.uint8(2)):
        g = graph()
        g.resample(image(g), "MAXPOOL", [2, 2], stride=[whole, 1])
        g.validate()
        assert '"ratio":[[2,1],[1,1]]' in str(g)


@pytest.mark.parametrize("stride", [10**400, Fraction(10**400), np.float32("inf"), float("nan")])
def test_strides_that_no_float_holds(stride):
    g = graph()
    with pytest.raises(ValidationError, match="stride"):
        g.resample(image(g), "NEAREST", stride=[stride, 1])


@pytest.mark.parametrize("stride", [np.bool_(True), np.complex64(1), 1j, None, "1", [1], np.ones(2)])
def test_strides_that_are_no_numbers(stride):
    g = graph()
    with pytest.raises(KindError, match="stride"):
        g.resample(image(g), "NEAREST", stride=[stride, 1])
