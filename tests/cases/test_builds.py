"""C1 C3 D1 D3 P4 for ops of every family: attributes in cache keys, the same choice every time, shapes that change, kernels counted and told of."""

from __future__ import annotations

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type, heur_mode, norm_forward_phase
from graphdnn.plans import disk
from tests.buffers import Guarded
from tests.helpers import built

F32 = data_type.FLOAT
FLOAT = {"io_data_type": F32, "intermediate_data_type": F32, "compute_data_type": F32}
X = np.random.default_rng(0).standard_normal((2, 4, 6)).astype(np.float32)
INFERENCE = norm_forward_phase.INFERENCE


def normalized(epsilon):
    def make(g, x):
        ones = g.tensor(dim=(1, 1, 6), layout="row", name="ones")
        return g.rmsnorm(INFERENCE, x, ones, epsilon=epsilon)[0]

    return make


def grouped(groups):
    def make(g, x):
        one = g.tensor(dim=(1, 4, 1), layout="row", name="ones")
        return g.groupnorm(INFERENCE, x, one, one, 1e-5, groups)[0]

    return make


def pooled(**more):
    return lambda g, x: g.resample(x, more.get("mode", "MAXPOOL"), [2], [1], [more.get("padding", 0)], [0])[0]


def attended(**more):
    def make(g, x):
        q = g.reshape(x).set_dim((1, 2, 4, 6)).set_stride((48, 24, 6, 1))
        o, _ = g.sdpa(q, q, q, generate_stats=False, **({"attn_scale": 0.5} | more))
        return o.set_dim((1, 2, 4, 6)).set_stride((48, 24, 6, 1))

    return make


def convolved(**more):
    def make(g, x):
        w = g.tensor(dim=(4, 4, 3), layout="row", name="ones")
        return g.conv_fprop(x, w, **({"pre_padding": [1], "post_padding": [1], "stride": [1], "dilation": [1]} | more))

    return make


PAIRS = {
    "epsilon": (normalized(1e-5), normalized(1.0)),
    "groups": (grouped(2), grouped(4)),
    "axis": (lambda g, x: g.softmax(x, 1), lambda g, x: g.softmax(x, 2)),
    "pooling mode": (pooled(mode="MAXPOOL"), pooled(mode="AVGPOOL_INCLUDE_PADDING")),
    "counted padding": (lambda g, x: pooled(mode="AVGPOOL_INCLUDE_PADDING", padding=1)(g, x), pooled(mode="AVGPOOL_EXCLUDE_PADDING", padding=1)),
    "attention scale": (attended(attn_scale=0.1), attended(attn_scale=2.0)),
    "causal": (attended(), attended(use_causal_mask=True)),
    "window": (attended(diagonal_band_left_bound=1), attended(diagonal_band_left_bound=2)),
    "convolution's side of padding": (convolved(pre_padding=[2], post_padding=[0]), convolved()),
    "convolution's dilation": (convolved(), convolved(pre_padding=[2], post_padding=[2], dilation=[2])),
    "seed": (lambda g, x: g.add(x, g.rng("UNIFORM", 1, 2, dim=X.shape)), lambda g, x: g.add(x, g.rng("UNIFORM", 3, 2, dim=X.shape))),
}


def run(make):
    """The output of ``make(g, x)`` on the CPU; ones in every other input."""
    g = graphdnn.pygraph(device="cpu", **FLOAT)
    x = g.tensor(dim=X.shape, layout="row", name="x")
    y = make(g, x).set_output(True)
    built(g)
    out = Guarded.make(tuple(y.get_dim()), tuple(y.get_stride()), F32)
    others = {t: np.ones(t.get_dim(), np.float32) for t in g._tensors if t.get_name() == "ones"}
    g.execute({x: X, y: out.numpy_view(), **others}, np.empty(g.get_workspace_size(), np.uint8))
    return out.read()


SLOW = ("causal", "window")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in PAIRS])
def test_C1_one_attribute_apart(name):
    first, second = PAIRS[name]
    a, b, again = run(first), run(second), run(first)
    assert a.shape != b.shape or not np.array_equal(a, b)
    np.testing.assert_array_equal(a, again)


def test_C3_the_choice_is_made_without_a_clock():
    """The same plan every time, named by engine and knobs, and the same numbers to the bit; a stored plan keeps its choice."""
    x = np.random.default_rng(1).standard_normal((64, 512)).astype(np.float32)
    names, sums = set(), set()
    for _ in range(3):
        g = graphdnn.pygraph(device="cpu", **FLOAT)
        t = g.tensor_like(x)
        y = g.reduction(t, graphdnn.reduction_mode.ADD).set_dim((1, 1)).set_output(True)
        built(g)
        out = np.zeros((1, 1), np.float32)
        g.execute({t: x, y: out}, np.empty(g.get_workspace_size(), np.uint8))
        names.add(g.get_plan_name_at_index(0))
        sums.add(out.tobytes())
    assert len(names) == len(sums) == 1


def test_D1_a_plan_for_one_row_runs_five():
    """1 is not special: shapes overridden at execute, in both directions."""
    g = graphdnn.pygraph(device="cpu", is_override_shape_enabled=True, **FLOAT)
    a, b = g.tensor(dim=(1, 1, 4), layout="row", name="a"), g.tensor(dim=(1, 4, 3), layout="row", name="b")
    c = g.matmul(a, b).set_output(True)
    built(g)
    rng = np.random.default_rng(0)
    for m in (1, 5, 2, 1):
        left, right, out = (
            rng.standard_normal((1, m, 4)).astype(np.float32),
            rng.standard_normal((1, 4, 3)).astype(np.float32),
            np.empty((1, m, 3), np.float32),
        )
        shapes, strides = [[1, m, 4], [1, m, 3]], [[4 * m, 4, 1], [3 * m, 3, 1]]
        workspace = np.empty(max(g.get_workspace_size(), 1 << 16), np.uint8)
        g.execute({a: left, b: right, c: out}, workspace, override_uids=[a.get_uid(), c.get_uid()], override_shapes=shapes, override_strides=strides)
        np.testing.assert_allclose(out, left @ right, rtol=1e-5, atol=1e-6)


def test_D1_D3_one_kernel_for_every_size_and_its_range_is_told():
    rows = graphdnn.Dim("rows", 0, 3000)
    g = graphdnn.pygraph(io_data_type=data_type.FLOAT, compute_data_type=data_type.FLOAT, device="cpu")
    x = g.tensor(name="x", dim=[rows, 33], layout="row")
    g.tanh(g.add(x, 0.765432)).set_output(True).set_name("y")
    before = graphdnn.stats().compilations
    g.build([heur_mode.A])
    assert [(d.min, d.max) for d in g.dims.values()] == [(0, 3000)]
    for n in (128, 256, 1, 0, 2999, 37):
        data, out = np.random.default_rng(n).standard_normal((n, 33)).astype(np.float32), np.full((n, 33), np.nan, np.float32)
        g.execute({"x": data, "y": out}, None)
        np.testing.assert_allclose(out, np.tanh(data + np.float32(0.765432)), rtol=1e-5, atol=1e-6)
    made = graphdnn.stats()
    assert made.compilations - before <= 2 and any("form" in reason for reason in made.reasons)


def test_D3_a_graph_built_again_compiles_nothing():
    run(PAIRS["axis"][0])
    compiled, hits = disk.counters.misses, disk.counters.memory_hits
    run(PAIRS["axis"][0])
    assert disk.counters.misses == compiled and disk.counters.memory_hits > hits


def test_P4_compiling_is_told_with_its_time(empty_cache, monkeypatch, capfd):
    monkeypatch.setenv("GRAPHDNN_LOG", "info")
    run(lambda g, x: g.add(g.softmax(x, 2), 0.123456))
    assert "compiled " in (told := capfd.readouterr().err) and " s" in told
