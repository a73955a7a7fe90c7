"""Attention before any kernel: names, dims, text, the float64 references."""

from __future__ import annotations

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type as D
from graphdnn import reference


def graph():
    return graphdnn.pygraph(device="cpu", io_data_type=D.DOUBLE, intermediate_data_type=D.DOUBLE, compute_data_type=D.DOUBLE)


def tensors(g, **dims):
    return [g.tensor(dim=d, layout="row", name=n) for n, d in dims.items()]


def out(t, dim):
    return t.set_dim(dim).set_stride([int(np.prod(dim[i + 1 :])) for i in range(len(dim))]).set_output(True)


def values(g, feeds):
    g.build_operation_graph()
    og = g._opgraph
    found = reference.run(og, {i: feeds[og.tensors[i].name] for i in og.inputs if og.tensors[i].value is None})
    return {og.tensors[i].name: v for i, v in found.items()}


def test_forward_against_torch():
    """Groups of heads, s_q != s_kv, a score_mod, causal."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    dims = {"q": (2, 4, 5, 8), "k": (2, 2, 7, 8), "v": (2, 1, 7, 3)}
    feeds = {n: rng.standard_normal(d) for n, d in dims.items()}
    g = graph()
    o, stats = g.sdpa(
        *tensors(g, **dims),
        generate_stats=True,
        attn_scale=0.5,
        use_causal_mask=True,
        score_mod=lambda g, s: g.mul(g.tanh(g.div(s, 2.0)), 2.0),
        name="a",
    )
    out(o, (2, 4, 5, 3))
    stats.set_output(True)
    found = values(g, feeds)
    q, k, v = (torch.from_numpy(feeds[n]) for n in dims)
    s = 2 * torch.tanh(q @ k.repeat_interleave(2, 1).mT * 0.5 / 2)
    s = s.masked_fill(torch.ones(5, 7).triu(1).bool(), -np.inf)
    np.testing.assert_allclose(found["a::O"], (torch.softmax(s, -1) @ v.repeat_interleave(4, 1)).numpy(), rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(found["a::Stats"], torch.logsumexp(s, -1, keepdim=True).numpy(), rtol=1e-13, atol=1e-14)
    again = graphdnn.pygraph(device="cpu")
    again.deserialize(str(g))
    assert str(again) == str(g) and '"score_mod":[["DIV",["S",2.0],[]]' in str(g)
