"""Views: which movements attention reads through, where they start, and what is left of the copies."""

from __future__ import annotations

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type as D
from graphdnn.plans import views

B, S, H, W = 2, 5, 3, 8


def graph(device="cpu"):
    return graphdnn.pygraph(device=device, io_data_type=D.FLOAT, compute_data_type=D.FLOAT, intermediate_data_type=D.FLOAT)


def heads(g, t, h=H):
    return g.transpose(g.reshape(t).set_dim((B, S, h, W)), (0, 2, 1, 3))


def columns(g, t, first, count):
    return g.slice(t, [slice(None), slice(first * W, (first + count) * W)])


def attend(g, q, k, v):
    return g.sdpa(q, k, v, generate_stats=False)[0].set_output(True).set_dim((B, H, S, W)).set_stride((S * H * W, W, H * W, 1))


def plan(g):
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([graphdnn.heur_mode.A])
    return g.explain()


MOVES = {
    "transpose": (lambda g, x: g.transpose(x, (1, 0)), (1, 24), 0),
    "split": (lambda g, x: heads(g, x), (120, 8, 24, 1), 0),
    "part": (lambda g, x: heads(g, columns(g, x, 1, 2), 2), (120, 8, 24, 1), 8),
    "every second row from the fourth": (lambda g, x: g.slice(x, [slice(3, None, 2), slice(None)]), (48, 1), 72),
    "rows across": (lambda g, x: g.reshape(g.transpose(x, (1, 0))).set_dim((B * S, H * W)), None, None),
    "twice": (lambda g, x: g.concatenate([x, x], axis=0), None, None),
    "converted": (lambda g, x: g.transpose(x, (1, 0)).set_data_type(D.HALF), None, None),
}


@pytest.mark.parametrize("name", MOVES)
def test_strides_and_start(name):
    """What is found agrees with the reference of the movement on element numbers."""
    move, strides, start = MOVES[name]
    g = graph()
    x = g.tensor(dim=(B * S, H * W), layout="row", name="x")
    g.identity(move(g, x).set_name("moved")).set_output(True)
    g.validate()
    g.build_operation_graph()
    names = {t.name: i for i, t in enumerate(g._opgraph.tensors)}
    assert views.over(g._opgraph, names["moved"], names["x"]) == (None if strides is None else (strides, start))


def test_parts_of_one_input_are_not_copied():
    g = graph()
    x = g.tensor(dim=(B * S, 3 * H * W), layout="row", name="x")
    attend(g, *(heads(g, columns(g, x, i * H, H)) for i in range(3)))
    report = plan(g)
    assert report.kernels == 1 and report.cuts == () and report.workspace_bytes == 0
    assert report.bytes_read == B * S * 3 * H * W * 4


def test_parts_of_a_product_are_not_copied():
    """The packed matrix is the only thing that is stored, and a bias belongs to its epilogue."""
    g = graph()
    x, w, b = (g.tensor(dim=d, layout="row", name=n) for n, d in {"x": (B * S, 16), "w": (16, 3 * H * W), "b": (1, 3 * H * W)}.items())
    qkv = g.bias(g.matmul(x, w), b)
    attend(g, *(heads(g, columns(g, qkv, i * H, H)) for i in range(3)))
    report = plan(g)
    assert report.kernels == 2 and len(report.stored) == 1


def test_a_product_is_stored_as_attention_reads_it():
    """Heads split and swapped are stored by the product's own kernel; what else reads the product looks through them."""
    g = graph()
    x = g.tensor(dim=(B * S, 16), layout="row", name="x")
    w = [g.tensor(dim=(16, H * W), layout="row", name=n) for n in "qkv"]
    made = [g.matmul(x, t) for t in w]
    attend(g, *(heads(g, t) for t in made))
    g.relu(made[0]).set_output(True)
    report = plan(g)
    assert report.kernels == 4


def test_calculated_parts_are_stored():
    """Nothing else needs relu(x) in memory, so each part is calculated where it is stored, without gaps."""
    g = graph()
    x = g.tensor(dim=(B * S, 3 * H * W), layout="row", name="x")
    y = g.relu(x)
    attend(g, *(heads(g, columns(g, y, i * H, H)) for i in range(3)))
    report = plan(g)
    assert report.kernels == 4 and report.workspace_bytes == 2 * 1024 + 960


def test_a_plan_with_views_is_stored_and_loaded(tmp_path):
    g = graph()
    x = g.tensor(dim=(B * S, 3 * H * W), layout="row", name="x", uid=1)
    attend(g, *(heads(g, columns(g, x, i * H, H)) for i in range(3))).set_uid(2)
    g.build([graphdnn.heur_mode.A])
    again = graph()
    again.deserialize(bytes(g.serialize()))
    data = np.random.default_rng(0).standard_normal((B * S, 3 * H * W), dtype=np.float32)
    found = [np.full((B, S, H, W), np.nan, np.float32) for _ in range(2)]
    for made, out in zip((g, again), found, strict=True):
        made.execute({1: data, 2: out.transpose(0, 2, 1, 3)}, None)
    q, k, v = data.astype(np.float64).reshape(B, S, 3, H, W).transpose(2, 0, 3, 1, 4)
    p = np.exp(q @ k.swapaxes(2, 3))
    want = (p / p.sum(axis=3, keepdims=True)) @ v
    np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(found[0].transpose(0, 2, 1, 3), want, rtol=1e-4, atol=1e-5)
