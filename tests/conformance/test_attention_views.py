"""Attention on parts of other tensors, which it reads where they are."""

from __future__ import annotations

import pytest

import graphdnn
from graphdnn import data_type as D
from tests.helpers import check_graph

B, S, H, W = 2, 13, 4, 8
IN_FLOAT = {"compute_data_type": D.FLOAT, "intermediate_data_type": D.FLOAT}


def heads(g, t, h, w=W):
    return g.transpose(g.reshape(t).set_dim((B, S, h, w)), (0, 2, 1, 3))


def columns(g, t, first, count):
    return g.slice(t, [slice(None), slice(first, first + count)])


def attend(g, q, k, v, dtype=D.FLOAT, w=W):
    o, stats = g.sdpa(q, k, v, generate_stats=True, attn_scale=0.3, use_causal_mask=True)
    o.set_output(True).set_name("o").set_data_type(dtype).set_dim((B, H, S, w)).set_stride((S * H * w, w, H * w, 1))
    stats.set_output(True).set_name("stats").set_data_type(D.FLOAT)


@pytest.mark.parametrize("dtype", [D.FLOAT, D.BFLOAT16], ids=lambda d: d.name)
@pytest.mark.parametrize("lead", [0, 1, 3])
def test_packed_input(device, dtype, lead):
    """One matrix with the columns of Q, of K and of V, behind ``lead`` others, so that the parts start anywhere; two heads
    of Q share one of K and V."""

    def build(g):
        x = g.tensor(dim=(B * S, lead + 2 * H * W), layout="row", data_type=dtype, name="x")
        q, k, v = (columns(g, x, lead + at * W, n * W).set_data_type(dtype) for at, n in ((0, H), (H, H // 2), (H + H // 2, H // 2)))
        attend(g, heads(g, q, H).set_data_type(dtype), heads(g, k, H // 2).set_data_type(dtype), heads(g, v, H // 2).set_data_type(dtype), dtype)

    outcome = check_graph(build, device, graph=IN_FLOAT | {"intermediate_data_type": dtype})
    assert outcome.graph.explain().kernels == 1


def test_packed_product(device):
    """The matrix is a product; it is stored once, and read again by a reduction of its own."""

    def build(g):
        x, w = (g.tensor(dim=d, layout="row", data_type=D.FLOAT, name=n) for n, d in {"x": (B * S, 9), "w": (9, 3 * H * W)}.items())
        qkv = g.matmul(x, w)
        attend(g, *(heads(g, columns(g, qkv, i * H * W, H * W), H) for i in range(3)))
        top = g.reduction(g.abs(columns(g, qkv, 0, H * W)), graphdnn.reduction_mode.MAX, axes=1, keepdim=True)
        top.set_output(True).set_name("top").set_data_type(D.FLOAT)

    outcome = check_graph(build, device, graph=IN_FLOAT, every_plan=device == "cpu", runs=1)
    assert outcome.graph.explain().kernels == 3


def test_a_part_that_others_read(device):
    """K is stored for attention alone; the product reads it through the movement."""

    def build(g):
        x = g.tensor(dim=(B * S, 3 * H * W), layout="row", data_type=D.FLOAT, name="x")
        q, k, v = (heads(g, columns(g, x, i * H * W, H * W), H) for i in range(3))
        attend(g, q, k, v)
        g.matmul(q, g.transpose(k, (0, 1, 3, 2))).set_output(True).set_name("scores").set_data_type(D.FLOAT)

    assert check_graph(build, device, graph=IN_FLOAT).graph.explain().kernels == 2
