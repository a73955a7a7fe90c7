"""Gradients of attention on 8-bit floats: the formulas, with DOUBLE in place of the 8-bit types, against central differences of the forward op."""

from __future__ import annotations

import numpy as np
import pytest

from graphdnn import data_type as D
from tests.conformance.test_attention_fp8 import BACKWARD, FORWARD, ONE, done, scale
from tests.conformance.test_attention_gradients import Built

B, H, H_K, S_Q, S_KV, WIDTH = 1, 2, 1, 32, 64, 32
DIMS = {"q": (B, H, S_Q, WIDTH), "k": (B, H_K, S_KV, WIDTH), "v": (B, H_K, S_KV, WIDTH), "o": (B, H, S_Q, WIDTH), "do": (B, H, S_Q, WIDTH)}
SCALES = {"descale_q": 1.25, "descale_k": 0.75, "descale_v": 1.5, "descale_s": 1 / 16, "scale_s": 16.0, "scale_o": 2.0, "descale_o": 0.5}
SCALES |= {"descale_dO": 0.5, "scale_dQ": 2.0, "scale_dK": 4.0, "scale_dV": 0.25, "descale_dP": 0.25, "scale_dP": 4.0}
GRAPH = {"io_data_type": D.DOUBLE, "intermediate_data_type": D.DOUBLE, "compute_data_type": D.DOUBLE}


def inputs(g, names, like=None):
    return [g.tensor(dim=DIMS[like or n] if like or n in DIMS else ONE, layout="row", data_type=D.DOUBLE, name=n) for n in names]


def fp8_forward(g):
    o, stats, *largest = g.sdpa_fp8(*inputs(g, "qkv"), *inputs(g, FORWARD), attn_scale=0.25, right_bound=20, generate_stats=True)
    done(o, "o", DIMS["o"], D.DOUBLE)
    done(stats, "stats", (B, H, S_Q, 1), D.DOUBLE)
    for t, n in zip(largest, "so", strict=True):
        done(t, f"amax_{n}", ONE, D.DOUBLE)


def fp8_backward(g):
    stats = g.tensor(dim=(B, H, S_Q, 1), layout="row", data_type=D.DOUBLE, name="stats")
    made = g.sdpa_fp8_backward(*inputs(g, ("q", "k", "v", "o", "do")), stats, *inputs(g, BACKWARD), attn_scale=0.25, right_bound=20)
    results(made, ("amax_dq", "amax_dk", "amax_dv", "amax_dp"))


def results(made, largest):
    for t, n in zip(made, ("dq", "dk", "dv", *largest), strict=True):
        done(t, n, DIMS.get(n[1:], ONE), D.DOUBLE)


def mx_forward(g):
    q, k, v = inputs(g, "qkv")
    scales = [scale(g, f"descale_{t.get_name()}", t.get_dim(), axis, False) for t, axis in ((q, 3), (k, 3), (v, 2))]
    o, stats, amax = g.sdpa_mxfp8(q, k, v, *scales, attn_scale=0.25, diagonal_band_right_bound=20, generate_stats=True)
    done(o, "o", DIMS["o"], D.DOUBLE)
    done(stats, "stats", (B, H, S_Q, 1), D.DOUBLE)
    done(amax, "amax_o", ONE, D.DOUBLE)


def mx_backward(g):
    q, q_t, k, k_t, v, do, do_t, o, do16 = (inputs(g, (n,), like)[0] for n, like in MX)
    stats = g.tensor(dim=(B, H, S_Q, 1), layout="row", data_type=D.DOUBLE, name="stats")
    scales = [scale(g, f"descale_{t.get_name()}_rows", t.get_dim(), 3, False) for t in (q, q_t, k, k_t, v, do, do_t)]
    made = g.sdpa_mxfp8_backward(q, q_t, k, k_t, v, o, do16, do, do_t, stats, *scales, attn_scale=0.25, right_bound=20)
    results(made, ("amax_dq", "amax_dk", "amax_dv"))


MX = (("q", "q"), ("q_t", "q"), ("k", "k"), ("k_t", "k"), ("v", "v"), ("do", "do"), ("do_t", "do"), ("o", "o"), ("do16", "do"))


def check(forward, backward, values, true):
    """A step of Q, K or V in a random direction changes sum(O * dO) by the gradient times the direction. ``true``: factors that a stored tensor is
    multiplied by to be what it stands for."""
    rng, run = np.random.default_rng(1), Built(forward, **GRAPH)
    start = run(values)
    gradients = Built(backward, **GRAPH)(values | {"o": start["o"], "stats": start["stats"]})

    def loss(moved):
        return np.sum(run(values | moved)["o"] * true["o"] * values["do"] * true["do"])

    for n in "qkv":
        way = rng.standard_normal(DIMS[n])
        ends = [loss({n: values[n] + step * way}) for step in (1e-5, -1e-5)]
        found = np.sum(gradients[f"d{n}"] * true[f"d{n}"] * true[n] * way)
        size = np.sum(np.abs(gradients[f"d{n}"] * true[f"d{n}"] * way))
        assert abs(found - (ends[0] - ends[1]) / 2e-5) <= 1e-8 * size, n
        np.testing.assert_allclose(gradients[f"amax_d{n}"].item(), np.abs(gradients[f"d{n}"] * true[f"d{n}"]).max(), rtol=1e-12)


def test_one_scale_a_tensor():
    rng = np.random.default_rng(0)
    values = {n: rng.standard_normal(DIMS[n]) for n in ("q", "k", "v", "do")} | {n: np.full(ONE, v) for n, v in SCALES.items()}
    true = {n: SCALES[f"descale_{n}"] for n in "qkvo"} | {"do": SCALES["descale_dO"]}
    check(fp8_forward, fp8_backward, values, true | {f"d{n.lower()}": 1 / SCALES[f"scale_d{n}"] for n in "QKV"})


@pytest.mark.slow
def test_scales_of_blocks():
    """Exponents of V are those of whole blocks of rows: the forward op has scales of columns there, the gradient scales of rows."""
    rng = np.random.default_rng(0)
    values = {n: rng.standard_normal(DIMS[n]) for n in ("q", "k", "v", "do")} | {n: np.zeros(DIMS[n[0]]) for n in ("q_t", "k_t")}
    values |= {"do16": values["do"], "do_t": np.zeros(DIMS["do"])}
    rows = {n: rng.integers(125, 130, (*DIMS[n][:3], 1)) for n in ("q", "k", "do")} | {"v": np.repeat(rng.integers(125, 130, (B, H_K, 2, 1)), 32, 2)}
    values |= {f"descale_{n}_rows": x for n, x in rows.items()} | {f"descale_{n}": rows[n] for n in "qk"}
    values |= {f"descale_{n}_t_rows": rows[n] for n in ("q", "k", "do")}
    values["descale_v"] = np.broadcast_to(rows["v"][:, :, ::32], (B, H_K, 2, WIDTH))
    check(mx_forward, mx_backward, values, {n: 2.0 ** (rows[n] - 127.0) for n in "qkv"} | dict.fromkeys(("o", "do", "dq", "dk", "dv"), 1.0))
