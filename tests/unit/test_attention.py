"""Attention before any kernel: names, dims, text, and the float64 references against torch, central differences and each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type as D
from graphdnn import reference
from graphdnn.opspecs.attention_parts import slopes
from graphdnn.opspecs.score_grad import derived
from tests.attention_cases import SCORE_MODS, Case, arguments, backward, feeds, forward, results, with_results

EXACT = {"dtype": D.DOUBLE, "compute": D.DOUBLE}
TL, BR = (None, 0, False), (None, 0, True)
SMALL = Case(7, 9, 4, d_v=3, h=4, h_k=2, h_v=1, **EXACT)
DIFFERENTIABLE = {
    "plain": SMALL,
    "causal": replace(SMALL, window=TL),
    "band, bottom right": replace(SMALL, window=(3, 1, True)),
    "bias, alibi": replace(SMALL, bias=(1, 4, 7, 9), alibi=True),
    "bias of columns": replace(SMALL, bias=(2, 1, 1, 9), window=TL),
    "sink": replace(SMALL, sink=True, window=TL),
    "padding": replace(SMALL, lengths=((7, 3), (9, 5)), sink=True, bias=(9,)),
    "dropout": replace(SMALL, dropout=0.4),
    "dropout mask": replace(SMALL, dropout_mask=True, window=TL),
    "scale in memory": replace(SMALL, scale="tensor"),
    **{name: replace(SMALL, score_mod=name, bias=(7, 9)) for name in SCORE_MODS},
}


def tensors(g, **dims):
    return [g.tensor(dim=d, layout="row", name=n) for n, d in dims.items()]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_against_central_differences(name):
    """Of <O, dO> along a random direction in every differentiable input at once, and in each alone."""
    case = DIFFERENTIABLE[name]
    values = with_results(case, feeds(case))
    found = results(case, values, backward(case, values))
    rng = np.random.default_rng(3)
    names = {"q": "dq", "k": "dk", "v": "dv", "bias": "dbias", "sink": "dsink"}
    directions = {n: rng.standard_normal(values[n].shape) for n in names if n in values}
    direct = {n: float(np.vdot(found[names[n]], e)) for n, e in directions.items()}
    h = 2.0**-18
    for chosen in (*([n] for n in directions), list(directions)):
        up, down = (np.vdot(_o(case, values | {n: values[n] + t * directions[n] for n in chosen}), values["do"]) for t in (h, -h))
        np.testing.assert_allclose(sum(direct[n] for n in chosen), (up - down) / (2 * h), rtol=1e-8, atol=1e-8)


def _o(case, values):
    plain = {n: x for n, x in values.items() if n not in ("o", "stats", "do")}
    return results(case, plain, forward(case, plain))["o"]


TORCH = {
    "plain": (SMALL, {}),
    "causal": (replace(SMALL, window=TL, s_kv=7), {"is_causal": True}),
    "bias": (replace(SMALL, bias=(2, 1, 7, 9)), {"attn_mask": "bias"}),
    "groups": (replace(SMALL, h_k=2, h_v=2), {}),
}


@pytest.mark.parametrize("name", TORCH)
def test_against_torch(name):
    import torch
    case, more = TORCH[name]
    values = with_results(case, feeds(case))
    found = results(case, values, forward(case, values)) | results(case, values, backward(case, values))
    q, k, v = (torch.from_numpy(values[n]).requires_grad_() for n in "qkv")
    wide = [x.repeat_interleave(case.h // x.shape[1], 1) for x in (k, v)]
    more = {n: torch.from_numpy(values[x]) if x == "bias" else x for n, x in more.items()}
    o = torch.nn.functional.scaled_dot_product_attention(q, *wide, scale=0.25, **more)
    np.testing.assert_allclose(found["o"], o.detach().numpy(), rtol=1e-12, atol=1e-13)
    for got, wanted in zip(("dq", "dk", "dv"), torch.autograd.grad(o, (q, k, v), torch.from_numpy(values["do"])), strict=True):
        np.testing.assert_allclose(found[got], wanted.numpy(), rtol=1e-11, atol=1e-12)


def test_statistics_are_parts_of_the_logarithm_of_the_sum():
    case = replace(SMALL, sink=True, lengths=((7, 3), (9, 0)), window=BR)
    found = results(case, feeds(case), forward(case, feeds(case)))
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(found["stats"], found["top"] + np.log(found["total"]), rtol=1e-14)
    assert np.isneginf(found["stats"][1, :, 3:]).all() and (found["o"][1] == 0).all()
    sink = feeds(case)["sink"]
    np.testing.assert_array_equal(found["stats"][1, :, :3], np.broadcast_to(sink[0], (4, 3, 1)))


def test_pages_and_packed_rows_hold_the_same_values():
    """A paged K and V give what the gathered ones give."""
    paged = Case(5, 13, 4, page=4, lengths=((5, 4), (13, 6)), **EXACT)
    values = feeds(paged)
    gathered = {}
    for n in "kv":
        pages = values[f"{n}_pages"][:, 0, :, 0]
        rows = values[n][pages]  # [b, pages, h, rows, d]
        gathered[n] = np.moveaxis(rows, 2, 1).reshape(2, 2, -1, 4)[:, :, :13]
    plain = replace(paged, page=0)
    wanted = results(plain, values | gathered, forward(plain, values | gathered))
    np.testing.assert_array_equal(results(paged, values, forward(paged, values))["o"], wanted["o"])


def test_dropout_drops_what_the_dump_says():
    case = replace(SMALL, dropout=0.4)
    values = feeds(case)
    found = results(case, values, forward(case, values))
    masked = replace(SMALL, dropout_mask=True)
    given = {n: values[n] for n in "qkv"} | {"drop": found["dump"], "drop_scale": np.array(1 / (1 - np.float64(0.4)))}
    np.testing.assert_allclose(found["o"], results(masked, given, forward(masked, given))["o"], rtol=2e-7)
    assert 0.5 < found["dump"].mean() < 0.7 and set(np.unique(found["dump"])) == {0.0, 1.0}


def test_slopes():
    """Those of the paper for 8 heads, and for 6: 4 of 4 heads, then the first and the third of 8."""
    np.testing.assert_array_equal(slopes(8), 2.0 ** -np.arange(1, 9))
    np.testing.assert_allclose(slopes(6), [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])
    assert slopes(1).tolist() == [2.0**-8]


# --------------------------------------------------------------------------------------------------------------------- callbacks as data, text
def test_a_callback_becomes_steps():
    """Numbers, tensors of the graph, used twice; ops that do not lead to the result are left out."""
    g = graphdnn.pygraph(device="cpu", **arguments(SMALL))
    q, k, v, bias = tensors(g, q=(1, 2, 4, 8), k=(1, 2, 4, 8), v=(1, 2, 4, 8), bias=(2, 4, 4))

    def callback(graph, s):
        graph.exp(s)
        both = graph.add(s, bias)
        return graph.binary_select(both, graph.mul(both, 2.0), graph.cmp_gt(graph.gen_index(s, -1), 1))

    g.sdpa(q, k, v, generate_stats=False, score_mod=callback)
    node = g._nodes[0]
    assert node.attrs["score_mod"] == (
        ("ADD", ("S", "T:0"), ()),
        ("MUL", ("#0", 2.0), ()),
        ("GEN_INDEX", ("S",), (("axis", 3),)),
        ("CMP_GT", ("#2", 1), ()),
        ("BINARY_SELECT", ("#0", "#1", "#3"), ()),
    )
    assert node.inputs["SCORE_MOD_0"] is bias and len(g._nodes) == 1


def test_a_gradient_callback_may_use_what_the_forward_one_has_seen():
    g = graphdnn.pygraph(device="cpu", **arguments(SMALL))
    seen = {}

    def score_mod(graph, s):
        seen["s"] = graph.mul(s, 0.5)
        return graph.tanh(seen["s"])

    ports = {"q": (1, 2, 4, 8), "k": (1, 2, 4, 8), "v": (1, 2, 4, 8), "o": (1, 2, 4, 8), "do": (1, 2, 4, 8), "stats": (1, 2, 4, 1)}
    g.sdpa_backward(*tensors(g, **ports), score_mod=score_mod, score_mod_bprop=lambda graph, ds: graph.mul(graph.tanh_backward(ds, seen["s"]), 0.5))
    assert g._nodes[0].attrs["score_mod_bprop"] == (("MUL", ("P", 0.5), ()), ("TANH_BWD", ("S", "#0"), ()), ("MUL", ("#1", 0.5), ()))


def test_a_derived_gradient_ends_with_its_result():
    steps = (("MUL", ("S", "S"), ()), ("MAX", ("#0", "S"), ()))
    found = derived(steps)
    assert found[:2] == (("MUL", ("P", "P"), ()), ("MAX", ("#0", "P"), ()))
    assert found[-1][0] == "IDENTITY"
    assert derived((("GEN_INDEX", ("S",), (("axis", 2),)),))[-1] == ("MUL", ("S", 0.0), ())


TEXTS = {
    "plain": Case(),
    "everything": Case(
        30, 36, h=4, h_k=2, window=(20, 4, True), alibi=True, bias=(2, 1, 30, 36), lengths=((30, 11), (30, 36)), sink=True, score_mod="select"
    ),
    "packed": Case(20, 25, 8, b=3, h=2, layout="packed", lengths=((20, 7, 1), (25, 3, 9)), dropout=0.25),
    "paged": Case(3, 30, 8, page=8, packed_tables=True, lengths=((3, 2), (30, 9))),
    "double": Case(dtype=D.DOUBLE, compute=D.DOUBLE, scale=0.1, score_mod="tensor"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_round_trip(name):
    """Before and after validate; the second graph means the same."""
    case = TEXTS[name]
    values = with_results(case, feeds(case)) if not case.page else feeds(case)
    for declare in (forward, backward) if not case.page else (forward,):
        g = graphdnn.pygraph(device="cpu", **arguments(case))
        declare(case, values)(g)
        for step in (lambda: None, g.validate, g.build_operation_graph):
            step()
            again = graphdnn.pygraph(device="cpu")
            again.deserialize(str(g))
            assert str(again) == str(g)
        again.build_operation_graph()
        assert again._opgraph.key == g._opgraph.key


def test_every_argument_is_in_the_key():
    """Graphs that differ in one number or flag share no kernel."""
    plain = Case(window=(5, 3, False), score_mod="softcap", dropout=0.25)
    variants = [{}, {"scale": 0.5}, {"scale": None}, {"window": (4, 3, False)}, {"window": (5, 2, False)}, {"window": (5, 3, True)}, {"alibi": True}]
    variants += [{"dropout": 0.5}, {"score_mod": "square"}, {"score_mod": ""}, {"statistics": False}, {"sink": True}, {"h_k": 1}]
    keys = set()
    for changes in variants:
        case = replace(plain, **changes)
        g = graphdnn.pygraph(device="cpu", **arguments(case))
        forward(case, feeds(case))(g)
        g.build_operation_graph()
        keys.add(g._opgraph.key)
    assert len(keys) == len(variants)


def test_text_has_the_fields_of_the_page():
    g = graphdnn.pygraph(device="cpu", **arguments(Case()))
    forward(Case(scale=0.1, window=TL), feeds(Case(scale=0.1, window=TL)))(g)
    g.validate()
    text = str(g)
    for field in (
        '"attn_scale_value":"3DCCCCCD"',
        '"left_bound":null',
        '"right_bound":0',
        '"diagonal_alignment":"TOP_LEFT"',
        '"generate_stats":true',
    ):
        assert field in text
    for field in ('"implementation":"UNIFIED"', '"is_mxfp8":false', '"tag":"SDPA"', '"mma_core_mode":"HALF"', '"max_seq_len_kv":null'):
        assert field in text
    assert '"inputs":{"K":"k","Q":"q","V":"v"}' in text and '"Max":"top"' in text and '"Sum_exp":"total"' in text


def test_names_dims_and_strides_of_results():
    g = graphdnn.pygraph(device="cpu", io_data_type=D.HALF, intermediate_data_type=D.FLOAT, compute_data_type=D.FLOAT)
    q, k, v = tensors(g, q=(2, 3, 4, 8), k=(2, 3, 5, 8), v=(2, 3, 5, 6))
    o, stats = g.sdpa(q, k, v, is_inference=False, use_causal_mask_bottom_right=True, sliding_window_length=3, name="att")
    o.set_dim((2, 3, 4, 6)).set_stride((72, 6, 18, 1)).set_output(True)
    stats.set_output(True)
    g.validate()
    assert (o.get_name(), stats.get_name()) == ("att::O", "att::Stats")
    assert stats.get_dim() == [2, 3, 4, 1] and stats.get_stride() == [12, 4, 1, 1] and o.get_stride() == [72, 6, 18, 1]
    attrs = g._nodes[0].attrs
    assert (attrs["left_bound"], attrs["right_bound"], attrs["diagonal_alignment"]) == (3, 0, "BOTTOM_RIGHT")
    assert g.sdpa(q, k, v, generate_stats=False)[1] is None


def test_a_packed_tensor_brings_its_offsets():
    case = TEXTS["packed"]
    g = graphdnn.pygraph(device="cpu", **arguments(case))
    forward(case, feeds(case))(g)
    g.build_operation_graph()
    node, names = g._opgraph.nodes[0], [t.name for t in g._opgraph.tensors]
    assert {p: names[t] for p, t in node.inputs if p.startswith("Ragged_")} == {
        f"Ragged_{p}": f"{n}_start" for p, n in (("Q", "q"), ("K", "k"), ("V", "v"), ("O", "o"), ("Stats", "stats"))
    }
    assert g._opgraph.tensors[names.index("q")].ragged


def test_bounds_hold_and_are_narrow():
    """float32 arithmetic in another order stays within them; they are below a thousandth of the values."""
    case = Case(40, 72, 32, window=TL)
    values = feeds(case)
    g = graphdnn.pygraph(device="cpu", **arguments(case))
    forward(case, values)(g)
    g.build_operation_graph()
    og = g._opgraph
    known = reference.run_with_error(og, {i: values[og.tensors[i].name] for i in og.inputs})
    value, bound = next(known[i] for i in og.outputs if og.tensors[i].name == "o")
    q, k, v = (values[n].astype(np.float32) for n in "qkv")
    s = np.einsum("bhid,bhjd->bhij", q, k) * np.float32(0.25)
    s = np.where(np.tri(40, 72, dtype=bool), s, np.float32(-np.inf))
    e = np.exp(s - s.max(-1, keepdims=True))
    o = np.matmul(e, v) / e.sum(-1, keepdims=True)
    assert o.dtype == np.float32 and not reference.mismatches(o, value, bound).any()
    assert bound.max() < 1e-3 * np.abs(value).max()
