"""Random numbers: distributions, seeds, equal bits whatever the target and the layout, dropout in one kernel, errors, JSON."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type
from graphdnn.errors import KindError, NotSupportedError, ValidationError
from graphdnn.opspecs import philox
from tests.helpers import check_graph, given

D = data_type
F32 = D.FLOAT
SEED, OFFSET = 0x123456789ABCDEF, -(2**40) + 3
CASES = {
    "bernoulli": ("BERNOULLI", {"probability": 0.3}),
    "bernoulli, always": ("BERNOULLI", {"probability": 1.0}),
    "bernoulli, never": ("BERNOULLI", {"probability": 0}),
    "uniform": ("uniform", {}),
    "uniform, bounds": ("UNIFORM", {"minimum": -3.7, "maximum": 1e3}),
    "normal": ("NORMAL", {}),
    "normal, moments": ("NORMAL", {"mean": -0.3, "standard_deviation": 2.7}),
}


def drawn(case, dim=(3, 5, 7), dtype=F32, **more):
    """A graph that stores the numbers of a case and nothing else; seed in device memory, offset by value."""

    def build(g):
        seed = g.tensor(dim=(1, 1, 1, 1), layout="row", data_type=D.INT64, name="seed")
        offset = g.tensor(dim=(1,), layout="row", data_type=D.INT64, is_pass_by_value=True, name="offset")
        y = g.rng(case[0], seed, offset, dim=dim, **case[1], **more)
        y.set_output(True).set_data_type(dtype).set_name("y")

    return build


def run(build, device, **more):
    return check_graph(build, device, data={"seed": given(SEED)}, values={"offset": OFFSET}, runs=1, **more)


@pytest.mark.parametrize("name", CASES)
def test_distributions(device, name):
    """Bits of the CPU; uniform and Bernoulli numbers those of NumPy too, since their bound is 0."""
    found = run(drawn(CASES[name]), device).outputs["y"]
    assert np.array_equal(found, run(drawn(CASES[name]), "cpu").outputs["y"])
    if name == "uniform":
        assert np.array_equal(found.reshape(-1), philox.uniform(SEED, OFFSET, np.arange(105)))


@pytest.mark.parametrize("dtype", [D.HALF, D.FP8_E4M3, D.INT8, D.BOOLEAN, D.DOUBLE])
def test_data_types(device, dtype):
    run(drawn(("NORMAL", {"mean": 1.0, "standard_deviation": 40.0}), dtype=dtype), device)


def test_double_has_the_same_numbers(device):
    """In DOUBLE the arithmetic on the number is wider, not the number."""
    found = run(drawn(CASES["uniform, bounds"], dtype=D.DOUBLE, compute_data_type=D.DOUBLE), device).outputs["y"]
    assert np.array_equal(found.reshape(-1), philox.uniform(SEED, OFFSET, np.arange(105)) * (1e3 + 3.7) - 3.7)


@pytest.mark.parametrize("dim", [(), (0, 4), (1,), (2, 3, 2, 2, 3)])
def test_ranks(device, dim):
    run(drawn(CASES["normal"], dim=dim), device)


def test_strides_do_not_matter(device):
    """A permuted, padded output holds the numbers of a row-major one."""

    def build(g):
        for name, stride in (("plain", None), ("padded", (1, 100, 5))):
            y = g.rng("UNIFORM", 5, 6, dim=(4, 3, 8)).set_output(True).set_name(name).set_data_type(F32)
            if stride is not None:
                y.set_stride(stride)

    found = check_graph(build, device).outputs
    assert np.array_equal(found["plain"], found["padded"])


def dropout(g, x, p, n):
    seed = g.tensor(dim=(1,), layout="row", data_type=D.INT32, name="seed") if n == 0 else 17
    return g.mul(g.mul(x, g.rng("BERNOULLI", seed, 3, dim=x.get_dim() or (2, 6, 10), probability=1 - p)), 1 / (1 - p))


def test_dropout_is_one_kernel_forward_and_backward(device):
    """The backward graph draws the mask again: nothing but the seed is kept."""

    def build(g):
        x = g.tensor(dim=(2, 6, 10), layout="row", data_type=F32, name="x")
        dropout(g, g.gelu(x), 0.4, 0).set_output(True).set_name("y").set_data_type(F32)

    outcome = check_graph(build, device, data={"x": given(3.0), "seed": given(17)})
    assert outcome.graph.explain().kernels == 1

    def backward(g):
        dy = g.tensor(dim=(2, 6, 10), layout="channels_last", data_type=F32, name="dy")
        dropout(g, dy, 0.4, 1).set_output(True).set_name("dx").set_data_type(F32)

    gradient = check_graph(backward, device, data={"dy": given(1.0)})
    assert gradient.graph.explain().kernels == 1
    assert np.array_equal(gradient.outputs["dx"] != 0, outcome.outputs["y"] != 0)


def test_dropout_around_a_matmul_is_one_kernel(device):
    """In the prologue of A and in the epilogue."""

    def build(g):
        a, b = (g.tensor(dim=d, layout="row", data_type=F32, name=n) for n, d in (("a", (2, 6, 5)), ("b", (1, 5, 10))))
        keep = g.rng("BERNOULLI", 1, 2, dim=(2, 6, 5), probability=0.75)
        y = g.matmul(g.mul(a, keep), b)
        g.mul(g.relu(y), g.rng("BERNOULLI", 2, 2, dim=(2, 6, 10), probability=0.5)).set_output(True).set_name("y").set_data_type(F32)

    assert check_graph(build, device).graph.explain().kernels == 1


def test_a_mask_of_another_size_broadcasts_and_is_reduced(device):
    def build(g):
        x = g.tensor(dim=(4, 6, 9), layout="row", data_type=D.HALF, name="x")
        row = g.rng("NORMAL", 1, 2, dim=(6, 1))
        y = g.reduction(g.add(x, row), graphdnn.reduction_mode.ADD, axes=2)
        y.set_output(True).set_name("y").set_data_type(F32)

    check_graph(build, device)


def test_json_round_trip():
    g = graphdnn.pygraph(device="cpu", io_data_type=F32, compute_data_type=F32)
    g.rng("NORMAL", 5, 2**40, dim=(3, 4), mean=0.1, standard_deviation=2.0, name="noise").set_output(True).set_name("y")
    again = graphdnn.pygraph(device="cpu")
    again.deserialize(str(g))
    assert str(again) == str(g) and '"tag":"RNG"' in str(g) and '"distribution":"NORMAL"' in str(g)
    again.validate()
    assert [t.get_dim() for t in again._tensors if t.get_name() == "y"] == [[3, 4]]


ERRORS = {
    "no dims": (ValidationError, "dims of random numbers", lambda g: g.rng("UNIFORM", 1, 2)),
    "not known": (ValidationError, "distribution", lambda g: g.rng("POISSON", 1, 2, dim=(3,))),
    "no probability": (ValidationError, "bernoulli_probability", lambda g: g.rng("BERNOULLI", 1, 2, dim=(3,))),
    "probability": (ValidationError, "out of range", lambda g: g.rng("BERNOULLI", 1, 2, dim=(3,), probability=1.5)),
    "nan": (ValidationError, "normal_mean", lambda g: g.rng("NORMAL", 1, 2, dim=(3,), mean=float("nan"))),
    "deviation": (ValidationError, "negative", lambda g: g.rng("NORMAL", 1, 2, dim=(3,), standard_deviation=-1.0)),
    "bounds": (ValidationError, "swapped", lambda g: g.rng("UNIFORM", 1, 2, dim=(3,), minimum=2.0)),
    "infinite in FLOAT": (ValidationError, "mean.*finite number in FLOAT", lambda g: g.rng("NORMAL", 1, 2, dim=(3,), mean=1e39)),
    "infinite width": (ValidationError, "width.*finite number in FLOAT", lambda g: g.rng("UNIFORM", 1, 2, dim=(3,), minimum=-3e38, maximum=3e38)),
    "infinite in both": (ValidationError, "width", lambda g: g.rng("UNIFORM", 1, 2, (3,), None, -1e308, 1e308, compute_data_type=D.DOUBLE)),
    "no float": (ValidationError, "'mean' is out of range", lambda g: g.rng("NORMAL", 1, 2, dim=(3,), mean=10**400)),
    "foreign argument": (ValidationError, "another distribution", lambda g: g.rng("UNIFORM", 1, 2, dim=(3,), probability=0.5)),
    "kind of distribution": (KindError, "distribution", lambda g: g.rng(1, 1, 2, dim=(3,))),
    "kind of seed": (KindError, "seed", lambda g: g.rng("UNIFORM", 1.5, 2, dim=(3,))),
    "kind of a number": (KindError, "mean", lambda g: g.rng("NORMAL", 1, 2, dim=(3,), mean="0")),
    "large seed": (ValidationError, "one number", lambda g: g.rng("UNIFORM", g.tensor(dim=(2,), layout="row", data_type=D.INT32), 2, dim=(3,))),
    "float seed": (NotSupportedError, "integer", lambda g: g.rng("UNIFORM", g.tensor(dim=(1,), layout="row", data_type=F32), 2, dim=(3,))),
}


@pytest.mark.parametrize("kind", [int, Fraction, np.float16, np.float32, np.float64, np.int64])
def test_arguments_of_every_kind_of_number(kind):
    texts = set()
    for k in (float, kind):
        g = graphdnn.pygraph(device="cpu", io_data_type=F32)
        g.rng("NORMAL", 1, 2, dim=(3,), mean=k(3), standard_deviation=k(2)).set_output(True)
        g.validate()
        texts.add(str(g))
    assert len(texts) == 1


def test_what_only_double_holds_is_taken_in_double():
    g = graphdnn.pygraph(device="cpu", io_data_type=D.DOUBLE)
    g.rng("NORMAL", 1, 2, dim=(3,), mean=1e39, compute_data_type=D.DOUBLE).set_output(True)
    g.build_operation_graph()


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    kind, words, call = ERRORS[name]
    g = graphdnn.pygraph(device="cpu", io_data_type=F32)
    with pytest.raises(kind, match=words):
        call(g).set_output(True)
        g.build_operation_graph()


def test_the_mask_of_an_attention(device):
    """What sdpa drops is what a Bernoulli mask of the same seed and offset drops: both go by the row-major number of a score."""

    def build(g):
        q, k, v = (g.tensor(dim=(2, 3, s, 8), layout="row", data_type=F32, name=n) for n, s in (("q", 5), ("k", 7), ("v", 7)))
        seed, offset = (g.tensor(dim=(1, 1, 1, 1), layout="row", data_type=D.INT64, name=n) for n in ("seed", "offset"))
        dump = g.tensor(dim=(2, 3, 5, 7), layout="row", data_type=F32, name="dump").set_output(True)
        o, _ = g.sdpa(q, k, v, generate_stats=False, attn_scale=0.3, dropout=(0.3, seed, offset), rng_dump=dump)
        o.set_output(True).set_name("o").set_dim((2, 3, 5, 8)).set_stride((120, 40, 8, 1)).set_data_type(F32)
        g.rng("BERNOULLI", seed, offset, dim=(2, 3, 5, 7), probability=1 - 0.3).set_output(True).set_name("mask").set_data_type(F32)

    found = check_graph(build, device, data={"seed": given(SEED), "offset": given(OFFSET)}, runs=1).outputs
    assert np.array_equal(found["dump"], found["mask"])
    assert 0 < found["mask"].mean() < 1
