"""Attention on 8-bit floats, with one scale a tensor and with MXFP8 scales, against float64; the references know nothing of the expansions."""

from __future__ import annotations

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type as D
from tests.attention_cases import need
from tests.helpers import Data, check_graph, given

GRAPH = {"io_data_type": D.FP8_E4M3, "intermediate_data_type": D.FLOAT, "compute_data_type": D.FLOAT}
ONE = (1, 1, 1, 1)
TL, BR = graphdnn.diagonal_alignment.TOP_LEFT, graphdnn.diagonal_alignment.BOTTOM_RIGHT
FORWARD = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
BACKWARD = ("descale_q", "descale_k", "descale_v", "descale_o", "descale_dO", "descale_s", "descale_dP") + (
    "scale_s",
    "scale_dQ",
    "scale_dK",
    "scale_dV",
    "scale_dP",
)
SCALES = {"descale_s": 1 / 256, "scale_s": 256.0, "scale_o": 2.0, "descale_o": 0.5, "descale_dP": 0.25, "scale_dP": 4.0, "descale_k": 1.5}


def row_major(dim):
    return [int(np.prod(dim[i + 1 :])) for i in range(len(dim))]


def done(t, name, dim, dtype):
    return t.set_dim(dim).set_stride(row_major(dim)).set_data_type(dtype).set_output(True).set_name(name)


def inputs(g, names, dim, dtype=D.FP8_E4M3):
    return [g.tensor(dim=dim, layout="row", data_type=dtype, name=n) for n in names]


def numbers():
    return {n: given(SCALES.get(n, 1.25)) for n in (*FORWARD, *BACKWARD)}


CASES = {
    "plain": ((2, 2, 2, 20, 28, 16, 12), {}),
    "causal, groups, sink": ((2, 4, 2, 20, 20, 16, 16), {"right_bound": 0, "sink": True}),
    "bottom right, padding": ((2, 2, 1, 20, 30, 8, 24), {"right_bound": 0, "diagonal_alignment": BR, "lengths": ((20, 9), (30, 13))}),
    "window": ((1, 2, 2, 33, 33, 32, 32), {"left_bound": 7, "right_bound": 2}),
}


def common(g, options, b, h):
    more = {k: v for k, v in options.items() if k not in ("lengths", "sink")} | {"attn_scale": 0.25, "name": "a"}
    data = numbers()
    if "lengths" in options:
        more |= {"use_padding_mask": True}
        for n, x in zip(("seq_len_q", "seq_len_kv"), options["lengths"], strict=True):
            more[n] = g.tensor(dim=(b, 1, 1, 1), layout="row", data_type=D.INT32, name=n)
            data[n] = given(np.reshape(x, (b, 1, 1, 1)))
    if "sink" in options:
        more["sink_token"] = g.tensor(dim=(1, h, 1, 1), layout="row", data_type=D.FLOAT, name="sink")
    return more, data


@pytest.mark.parametrize("dtype", [D.FP8_E4M3, D.FP8_E5M2])
@pytest.mark.parametrize("name", CASES)
def test_forward(device, name, dtype):
    need("attention_fwd")
    (b, h, h_k, s_q, s_kv, d, d_v), options = CASES[name]
    data = {}

    def build(g):
        more, found = common(g, options, b, h)
        data.update(found)
        q, k, v = (inputs(g, n, dim, dtype)[0] for n, dim in (("q", (b, h, s_q, d)), ("k", (b, h_k, s_kv, d)), ("v", (b, h_k, s_kv, d_v))))
        o, stats, amax_s, amax_o = g.sdpa_fp8(q, k, v, *inputs(g, FORWARD, ONE, D.FLOAT), generate_stats=True, **more)
        done(o, "o", (b, h, s_q, d_v), dtype)
        stats.set_output(True).set_data_type(D.FLOAT)
        done(amax_s, "amax_s", ONE, D.FLOAT)
        done(amax_o, "amax_o", ONE, D.FLOAT)

    check_graph(build, device, data=data, graph=GRAPH, runs=1)


@pytest.mark.parametrize("which", ["all of q", "one number of q", "a row without scores"])
def test_largest_numbers_show_nan(device, which):
    """NaN wins in Amax_S and Amax_O, as in the reduction AMAX; rows whose batch is empty have no part in it."""
    shape = (2, 1, 5, 8)
    q = np.ones(shape)
    q[{"all of q": ..., "one number of q": (1, 0, 3, 2), "a row without scores": (1, 0)}[which]] = np.nan
    more = {"lengths": ((5, 0), (5, 0))} if which == "a row without scores" else {}
    data = {}

    def build(g):
        options, found = common(g, more, 2, 1)
        data.update(found | {"q": given(q)})
        o, _, amax_s, amax_o = g.sdpa_fp8(*inputs(g, "qkv", shape), *inputs(g, FORWARD, ONE, D.FLOAT), generate_stats=False, **options)
        done(o, "o", shape, D.FP8_E4M3)
        done(amax_s, "amax_s", ONE, D.FLOAT)
        done(amax_o, "amax_o", ONE, D.FLOAT)

    found = check_graph(build, device, data=data, graph=GRAPH, runs=1, may_exclude=1.0)
    for name in ("amax_s", "amax_o"):
        assert np.isnan(found.outputs[name]).all() == np.isnan(found.expected[name]).all() == (not more)


def test_largest_weight_of_exact_sums(device):
    """Sum_exp of the caller's in 16 bits: Amax_S is that of the sums before they are rounded."""
    need("attention_fwd")
    (b, h, h_k, s_q, s_kv, d, d_v), options = CASES["plain"]
    data = {}

    def build(g):
        more, found = common(g, options, b, h)
        data.update(found)
        q, k, v = (inputs(g, n, dim)[0] for n, dim in (("q", (b, h, s_q, d)), ("k", (b, h_k, s_kv, d)), ("v", (b, h_k, s_kv, d_v))))
        more["score_sum_exp"] = g.tensor(dim=(b, h, s_q, 1), layout="row", data_type=D.BFLOAT16, name="total")
        o, _, amax_s, amax_o = g.sdpa_fp8(q, k, v, *inputs(g, FORWARD, ONE, D.FLOAT), generate_stats=False, **more)
        done(o, "o", (b, h, s_q, d_v), D.FP8_E4M3)
        done(amax_s, "amax_s", ONE, D.FLOAT)
        done(amax_o, "amax_o", ONE, D.FLOAT)

    check_graph(build, device, data=data, graph=GRAPH, runs=1)


@pytest.mark.parametrize("name", CASES)
def test_backward(device, name):
    """O and Stats need not be those of a forward pass for the formulas to hold; they are near."""
    need("attention_bwd")
    (b, h, h_k, s_q, s_kv, d, d_v), options = CASES[name]
    data = {}

    def build(g):
        more, found = common(g, options, b, h)
        data.update(found | {"stats": Data("uniform", lo=3.0, hi=5.0), "o": Data("normal", hi=0.5)})
        if "sink" in options:
            more["dSink_token"] = g.tensor(dim=(1, h, 1, 1), layout="row", data_type=D.FLOAT, name="dsink")
        dims = {"q": (b, h, s_q, d), "k": (b, h_k, s_kv, d), "v": (b, h_k, s_kv, d_v), "o": (b, h, s_q, d_v), "do": (b, h, s_q, d_v)}
        tensors = [g.tensor(dim=dim, layout="row", data_type=D.FP8_E5M2 if n == "do" else D.FP8_E4M3, name=n) for n, dim in dims.items()]
        (stats,) = inputs(g, ("stats",), (b, h, s_q, 1), D.FLOAT)
        made = g.sdpa_fp8_backward(*tensors, stats, *inputs(g, BACKWARD, ONE, D.FLOAT), **more)
        for t, n in zip(made, ("dq", "dk", "dv", "amax_dq", "amax_dk", "amax_dv", "amax_dp"), strict=True):
            done(t, n, dims.get(n[1:], ONE), D.FP8_E5M2 if n[0] == "d" else D.FLOAT)

    check_graph(build, device, data=data, graph=GRAPH, runs=1)


# ----------------------------------------------------------------------------------------------------------------------------------------- MXFP8
def up(n, multiple):
    return -(-n // multiple) * multiple


def scale(g, name, dim, axis, reordered):
    """Scales of a tensor of dims ``dim`` along ``axis``; in the order F8_128x4, padded."""
    counts = [up(n, 32) // 32 if a == axis else n for a, n in enumerate(dim)]
    if reordered:
        other = 5 - axis
        counts[axis], counts[other] = up(counts[axis], 4), up(counts[other], 128)
    t = g.tensor(dim=counts, layout="row", data_type=D.FP8_E8M0, name=name)
    return t.set_reordering_type(graphdnn.tensor_reordering.F8_128x4) if reordered else t


@pytest.mark.parametrize("reordered", [False, True])
@pytest.mark.parametrize("dtype", [D.BFLOAT16, D.FLOAT])
@pytest.mark.parametrize("sizes", [(1, 2, 2, 40, 64, 32, 64), (2, 2, 1, 33, 40, 48, 32)])
def test_mxfp8(device, sizes, dtype, reordered):
    """The last block of a row of Q and K, and of the rows of V, need not be full."""
    need("attention_fwd")
    b, h, h_k, s_q, s_kv, d, d_v = sizes

    def build(g):
        q, k, v = (inputs(g, n, dim)[0] for n, dim in (("q", (b, h, s_q, d)), ("k", (b, h_k, s_kv, d)), ("v", (b, h_k, s_kv, d_v))))
        descales = [scale(g, f"descale_{t.get_name()}", t.get_dim(), a, reordered) for t, a in ((q, 3), (k, 3), (v, 2))]
        o, stats, amax = g.sdpa_mxfp8(q, k, v, *descales, attn_scale=0.01, use_causal_mask=True, generate_stats=True)
        done(o, "o", (b, h, s_q, d_v), dtype)
        stats.set_output(True).set_data_type(D.FLOAT)
        done(amax, "amax", ONE, D.FLOAT)

    check_graph(build, device, graph=GRAPH, runs=1)


@pytest.mark.parametrize(("dtype", "tiled"), [(D.BFLOAT16, False), (D.FLOAT, True)])
def test_mxfp8_backward(device, dtype, tiled):
    """Every operand has numbers of its own: what a product reads shows. S has q and k, dP do and v, dQ k_t, dK q_t, dV do_t, D do16 and o."""
    need("attention_bwd")
    b, h, h_k, s_q, s_kv, d = 2, 2, 1, 7, 34, 8

    def build(g):
        dims = {"q": (b, h, s_q, d), "k": (b, h_k, s_kv, d), "v": (b, h_k, s_kv, d)}
        q, k, v = (inputs(g, n, dim)[0] for n, dim in dims.items())
        q_t, k_t, do, do_t = (inputs(g, (n,), dims[like])[0] for n, like in (("q_t", "q"), ("k_t", "k"), ("do", "q"), ("do_t", "q")))
        o, do16 = inputs(g, ("o", "do16"), dims["q"], D.BFLOAT16)
        (stats,) = inputs(g, ("stats",), (b, h, s_q, 1), D.FLOAT)
        along = [(q, 3), (q_t, 2), (k, 3), (k_t, 2), (v, 3), (do, 3), (do_t, 2)]
        descales = [scale(g, f"descale_{t.get_name()}", t.get_dim(), a, tiled) for t, a in along]
        made = g.sdpa_mxfp8_backward(q, q_t, k, k_t, v, o, do16, do, do_t, stats, *descales, attn_scale=0.01, right_bound=0)
        for t, n in zip(made, ("dq", "dk", "dv", "amax_dq", "amax_dk", "amax_dv"), strict=True):
            done(t, n, dims.get(n[1:], ONE), dtype if n[0] == "d" else D.FLOAT)

    check_graph(build, device, graph=GRAPH, data={"stats": Data("uniform", lo=3.0, hi=5.0)}, runs=1)
