"""Attention and its gradient against the float64 reference: sizes, masks, types, layouts, dropout, packed and paged tensors, NaN that is masked."""

from __future__ import annotations

import numpy as np
import pytest

from graphdnn import data_type as D
from tests.attention_cases import SCORE_MODS, Case, feeds, need, random_case, run_backward, run_forward, with_results
from tests.helpers import check_graph

NONE, TL, BR = (None, None, False), (None, 0, False), (None, 0, True)
SMALL = {
    "1x1": Case(1, 1, 5),
    "1 row": Case(1, 33, 16, window=BR),
    "2x2": Case(2, 2, 3, window=TL),
    "31x33": Case(31, 33, 17, d_v=9, window=TL),
    "33x31": Case(33, 31, 8, window=BR),
    "64x64": Case(64, 64, 16, window=TL),
    "65x63": Case(65, 63, 20, d_v=33),
    "groups": Case(20, 24, 12, h=6, h_k=3, h_v=2, window=TL),
    "one head of k": Case(17, 40, 16, h=4, h_k=1, window=BR),
    "empty": Case(0, 7, 4),
    "no columns": Case(5, 0, 4),
    "no elements": Case(3, 4, 0, d_v=5),
}
LARGE = {
    "97x127": Case(97, 127, 64, window=TL),
    "127x97": Case(127, 97, 24, window=BR),
    "129x129": Case(129, 129, 32, window=TL),
    "192x192": Case(192, 192, 128, h=1, window=TL),
    "192x129": Case(192, 129, 40, d_v=64),
    "head dim 257": Case(33, 65, 257, d_v=300, h=1, window=TL),
    "704": Case(704, 704, 32, b=1, h=1, window=TL),
}
MASKS = {
    "band": Case(window=(5, 3, False)),
    "band, bottom right": Case(20, 33, window=(5, 3, True)),
    "left": Case(window=(4, None, False)),
    "left 1": Case(window=(1, 0, False)),
    "left 0": Case(window=(0, 0, False)),
    "right 100": Case(window=(None, 100, False)),
    "rows without columns": Case(40, 20, window=BR),
    "rows without columns, left": Case(40, 20, window=(3, 0, False)),
    "alibi": Case(h=5, window=TL, alibi=True),
    "alibi, no causal": Case(alibi=True),
    "bias": Case(bias=(2, 2, 33, 33)),
    "bias of rows": Case(bias=(1, 2, 33, 1), window=TL),
    "bias of columns": Case(bias=(1, 1, 1, 33), window=BR),
    "bias, rank 2": Case(bias=(33, 33)),
    "padding": Case(lengths=((33, 20), (7, 33))),
    "padding to nothing": Case(b=3, lengths=((33, 0, 5), (33, 9, 0))),
    "padding, causal": Case(lengths=((30, 17), (33, 12)), window=TL),
    "padding, bottom right": Case(33, 40, lengths=((30, 17), (40, 21)), window=BR),
    "padding, band, bias": Case(lengths=((30, 17), (33, 12)), window=(6, 2, True), bias=(1, 2, 33, 33)),
    "sink": Case(sink=True, window=TL),
    "sink, padding": Case(sink=True, lengths=((33, 0), (0, 12))),
    "everything": Case(30, 36, h=4, h_k=2, window=(20, 4, True), alibi=True, bias=(2, 1, 30, 36), lengths=((30, 11), (30, 36)), sink=True),
    "scale in memory": Case(scale="tensor"),
    "scale by value": Case(scale="by value", window=TL),
    "scale a constant": Case(scale="constant"),
    "no scale": Case(scale=None, spread=0.5),
    "large scores": Case(scale=40.0, window=TL),
}
LAYOUTS = ("bshd", "sbhd", "gaps", "bhds", "interleaved")
TYPES = [(D.HALF, D.FLOAT), (D.BFLOAT16, D.FLOAT), (D.DOUBLE, D.DOUBLE), (D.FP8_E4M3, D.FLOAT)]


def skip_large(device, case):
    if device == "cudasim" and case.b * case.h * case.s_q * case.s_kv * max(case.d, case.d_v) > 1 << 17:
        pytest.skip("too large for the simulator")


@pytest.mark.parametrize("name", SMALL)
def test_sizes(device, name):
    skip_large(device, SMALL[name])
    run_forward(SMALL[name], device, runs=2)


@pytest.mark.parametrize("name", SMALL)
def test_sizes_backward(device, name):
    skip_large(device, SMALL[name])
    run_backward(SMALL[name], device, runs=2)


@pytest.mark.parametrize("name", LARGE)
def test_large_sizes(device, name):
    skip_large(device, LARGE[name])
    run_forward(LARGE[name], device)


@pytest.mark.parametrize("name", LARGE)
def test_large_sizes_backward(device, name):
    skip_large(device, LARGE[name])
    run_backward(LARGE[name], device)


LENGTHS = (1, 2, 31, 33, 63, 64, 65, 97, 127, 129, 192)


@pytest.mark.parametrize("s_q", LENGTHS)
@pytest.mark.parametrize("bottom", [False, True])
@pytest.mark.parametrize("run", [run_forward, run_backward])
def test_lengths(device, s_q, bottom, run):
    """Every length as that of Q, with another one for K and V."""
    s_kv = LENGTHS[(LENGTHS.index(s_q) * 3 + 4 + bottom) % len(LENGTHS)]
    case = Case(s_q, s_kv, 8, d_v=12, b=1, window=(None, 0, bottom))
    skip_large(device, case)
    run(case, device)


@pytest.mark.parametrize("name", MASKS)
def test_masks(device, name):
    run_forward(MASKS[name], device)


@pytest.mark.parametrize("name", MASKS)
def test_masks_backward(device, name):
    run_backward(MASKS[name], device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("run", [run_forward, run_backward])
def test_layouts(device, layout, run):
    run(Case(21, 35, 12, d_v=7, h=4, h_k=2, layout=layout, window=TL), device)


@pytest.mark.parametrize(("dtype", "compute"), TYPES)
@pytest.mark.parametrize("run", [run_forward, run_backward])
def test_types(device, dtype, compute, run):
    run(Case(34, 50, 24, dtype=dtype, compute=compute, window=TL, bias=(1, 2, 34, 50), sink=True), device)


@pytest.mark.parametrize("name", SCORE_MODS)
@pytest.mark.parametrize("run", [run_forward, run_backward])
def test_score_mod(device, name, run):
    """Without score_mod_bprop: the gradient is derived."""
    run(Case(20, 27, 8, score_mod=name, window=(None, 5, False)), device)


DROPOUT = [
    Case(30, 37, dropout=0.3, window=TL),
    Case(9, 70, dropout=0.3, seeds_by_value=True),
    Case(30, 37, dropout_mask=True),
    Case(dropout=0.5, lengths=((33, 4), (20, 33))),
]


@pytest.mark.parametrize("case", DROPOUT)
@pytest.mark.parametrize("run", [run_forward, run_backward])
def test_dropout(device, case, run):
    run(case, device, runs=2)


PACKED = [
    Case(20, 25, 8, b=3, h=2, layout="packed", lengths=((20, 7, 1), (25, 3, 9))),
    Case(20, 25, 8, b=3, h=4, h_k=2, layout="packed", lengths=((20, 0, 13), (3, 25, 0)), window=BR, sink=True),
    Case(20, 25, 8, b=3, dtype=D.HALF, layout="packed", lengths=((5, 20, 13), (25, 25, 2)), window=TL, bias=(1, 2, 20, 25)),
]


@pytest.mark.parametrize("case", PACKED)
@pytest.mark.parametrize("run", [run_forward, run_backward])
def test_packed(device, case, run):
    run(case, device, runs=2)


PAGED = [
    Case(3, 30, 8, page=8, lengths=((3, 2), (30, 9))),
    Case(1, 40, 16, h=4, h_k=1, page=16, packed_tables=True, lengths=((1, 1), (33, 40))),
    Case(9, 33, 8, page=4, lengths=((9, 9), (33, 0)), window=BR, dtype=D.BFLOAT16),
    Case(6, 16, 8, page=8),
]


@pytest.mark.parametrize("case", PAGED)
def test_paged(device, case):
    run_forward(case, device)


@pytest.mark.parametrize("case", [Case(150, 300, 8, h=3, blocks=True), Case(130, 1100, 4, b=1, blocks=True, window=(None, 900, False))])
def test_block_mask(device, case):
    skip_large(device, case)
    run_forward(case, device)


def test_inference_has_no_statistics(device):
    run_forward(Case(statistics=False, window=TL), device)


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("run", [run_forward, run_backward])
def test_random_combinations(device, seed, run):
    """Sizes, masks, types and layouts drawn at random."""
    run(random_case(seed), device)


def test_every_plan(device):
    run_forward(Case(40, 50, 24, h=4, h_k=2, window=TL), device, every_plan=True)
    run_backward(Case(40, 50, 24, h=4, h_k=2, window=TL), device, every_plan=True)


# ------------------------------------------------------------------------------------------------------------------------- in a larger graph
def test_ops_around_it(device):
    """Views and pointwise ops in front, a gate and a residual behind; batch and rows of the input are swapped, heads lie inside of a row."""
    need("attention_fwd")

    def build(g):
        rows, b, h, d = 21, 2, 3, 8
        x = g.tensor(dim=(rows, b, h, 3 * d), layout="row", name="x")
        scale, gate = g.tensor(dim=(1, h, 1, 1), layout="row", name="scale"), g.tensor(dim=(b, h, rows, d), layout="row", name="gate")
        q, k, v = (g.transpose(g.slice(x, [slice(None)] * 3 + [slice(i * d, (i + 1) * d)]), [1, 2, 0, 3]) for i in range(3))
        o, _ = g.sdpa(g.mul(q, scale), g.tanh(k), v, attn_scale=0.3, use_causal_mask=True, generate_stats=False)
        o.set_dim((b, h, rows, d)).set_stride((h * rows * d, d, h * d, 1))
        g.add(g.mul(o, g.sigmoid(gate)), gate).set_output(True).set_name("y")

    arguments = {"io_data_type": D.FLOAT, "intermediate_data_type": D.FLOAT, "compute_data_type": D.FLOAT}
    check_graph(build, device, graph=arguments)


@pytest.mark.parametrize("stored", [False, True])
def test_forward_and_backward_in_one_graph(device, stored):
    """O and Stats go from one to the other, as outputs or inside of the graph."""
    need("attention_fwd")
    need("attention_bwd")

    def build(g):
        dims = {"q": (2, 2, 19, 8), "k": (2, 1, 23, 8), "v": (2, 1, 23, 8), "do": (2, 2, 19, 8)}
        q, k, v, do = (g.tensor(dim=d, layout="row", name=n) for n, d in dims.items())
        o, stats = g.sdpa(q, k, v, attn_scale=0.3, use_causal_mask=True, generate_stats=True)
        o.set_dim(dims["q"]).set_stride((304, 152, 8, 1)).set_name("o").set_output(stored)
        stats.set_name("stats").set_output(stored)
        for t, n in zip(g.sdpa_backward(q, k, v, o, do, stats, attn_scale=0.3, use_causal_mask=True), "qkv", strict=True):
            t.set_dim(dims[n]).set_stride((dims[n][1] * dims[n][2] * 8, dims[n][2] * 8, 8, 1)).set_name(f"d{n}").set_output(True)

    arguments = {"io_data_type": D.FLOAT, "intermediate_data_type": D.FLOAT, "compute_data_type": D.FLOAT}
    check_graph(build, device, graph=arguments)


# ------------------------------------------------------------------------------------------------------------------------- what must not leak
def spoiled(case, values):
    """``values`` with NaN and infinities in every row of padding, and in the last columns, which a causal mask hides from most rows."""
    rng = np.random.default_rng(5)
    odd = np.array([np.nan, np.inf, -np.inf])
    found = {n: x.copy() for n, x in values.items()}
    for n, of in (("q", 0), ("do", 0), ("o", 0), ("k", 1), ("v", 1)):
        if n in found and case.lengths:
            for b, length in enumerate(case.lengths[of]):
                found[n][b, :, length:] = rng.choice(odd, found[n][b, :, length:].shape)
    return found


LEAKS = {
    "padding": Case(lengths=((33, 20), (7, 33))),
    "padding, causal": Case(40, 40, lengths=((37, 20), (9, 40)), window=TL),
    "padding, packed": Case(20, 25, 8, b=3, layout="packed", lengths=((20, 7, 1), (25, 3, 9))),
    "causal": Case(40, 40, window=TL),
    "band, bottom right": Case(20, 50, window=(4, 2, True)),
}


@pytest.mark.parametrize("name", LEAKS)
def test_masked_values_have_no_part(device, name):
    """In causal and band masks a single column of V and a single one of K are NaN: rows that hide it stay finite."""
    case = LEAKS[name]
    values = spoiled(case, feeds(case))
    if not case.lengths:
        values["v"][:, :, -3] = np.nan
        values["k"][:, :, -3, 0] = np.inf
    outcome = run_forward(case, device, values, may_exclude=0.5)
    assert np.isfinite(outcome.outputs["o"]).any()
    assert outcome.excluded == 0 if case.lengths else outcome.excluded > 0


@pytest.mark.parametrize("name", LEAKS)
def test_masked_values_have_no_part_backward(device, name):
    case = LEAKS[name]
    values = spoiled(case, with_results(case, feeds(case)))
    if not case.lengths:
        values["v"][:, :, -3] = np.nan
        values["q"][:, :, 2, 1] = np.nan
    outcome = run_backward(case, device, values, may_exclude=0.7)
    assert outcome.excluded == 0 if case.lengths else 0 < outcome.excluded < outcome.elements


@pytest.mark.parametrize("run", [run_forward, run_backward])
def test_a_dropout_mask_has_no_part_where_scores_are_hidden(device, run):
    """NaN and negative numbers there, beside NaN in V."""
    case = Case(9, 11, 8, d_v=8, dropout_mask=True, window=TL, lengths=((9, 5), (11, 7)))
    values = feeds(case)
    hidden = np.arange(11) > np.arange(9)[:, None]
    values["drop"] = np.where(hidden, np.random.default_rng(2).choice([np.nan, -1.0, np.inf], hidden.shape), values["drop"])
    values = values if run is run_forward else with_results(case, values)
    for n in "kv":
        values[n][:, :, 9:] = np.nan  # no row has these columns
    outcome = run(case, device, values)
    assert all(np.isfinite(outcome.outputs[n]).all() for n in ("o", "dq", "dk", "dv") if n in outcome.outputs)


def test_a_bias_of_minus_infinity_masks(device):
    """Rows of it alone give 0, and a gradient of 0."""
    case = Case(20, 24, bias=(1, 1, 20, 24))
    values = feeds(case)
    values["bias"] = np.where(np.random.default_rng(0).random((1, 1, 20, 24)) < 0.3, -np.inf, values["bias"])
    values["bias"][..., 3, :] = -np.inf
    outcome = run_forward(case, device, values)
    assert (outcome.outputs["o"][:, :, 3] == 0).all() and np.isneginf(outcome.outputs["stats"][:, :, 3]).all()
    outcome = run_backward(case, device, with_results(case, values))
    assert (outcome.outputs["dq"][:, :, 3] == 0).all()


def test_lengths_and_sink_by_value(device):
    """One batch and head: what is otherwise read from memory is a number of the variant pack."""
    need("attention_fwd")

    def build(g):
        q, k, v = (g.tensor(dim=(1, 1, 6, 4), layout="row", data_type=D.FLOAT, name=n) for n in "qkv")

        def number(name, dtype):
            return g.tensor(dim=(1, 1, 1, 1), layout="row", data_type=dtype, is_pass_by_value=True, name=name)

        lengths = {f"seq_len_{n}": number(f"length of {n}", D.INT32) for n in ("q", "kv")}
        o, _ = g.sdpa(q, k, v, generate_stats=False, use_padding_mask=True, sink_token=number("sink", D.FLOAT), **lengths)
        o.set_output(True).set_name("o").set_dim((1, 1, 6, 4)).set_stride((24, 24, 4, 1)).set_data_type(D.FLOAT)

    check_graph(build, device, values={"length of q": 5, "length of kv": 4, "sink": 0.5})
