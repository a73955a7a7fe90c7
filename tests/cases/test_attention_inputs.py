"""L6 L7 L13 N3 N13: attention on views of one buffer, on strides that others assume, on tails of very negative scores, with both alignments."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type
from graphdnn.errors import ValidationError
from tests.attention_cases import Case, feeds, need, run_backward, run_forward, with_results
from tests.helpers import Data, built, check_graph, given

D = data_type
F32 = {"io_data_type": D.FLOAT, "intermediate_data_type": D.FLOAT, "compute_data_type": D.FLOAT}
BR = (None, 0, True)


def attention(q, k, v, o, stats=False, **more):
    """A builder: (dim, stride) of each tensor in HALF, or another type by ``dtype``."""
    dtype = more.pop("dtype", D.HALF)

    def build(g):
        tensors = [g.tensor(dim=d, stride=s, data_type=dtype, name=n) for n, (d, s) in zip("qkv", (q, k, v), strict=True)]
        out, found = g.sdpa(*tensors, generate_stats=stats, name="a", **more)
        out.set_dim(o[0]).set_stride(o[1]).set_data_type(dtype).set_output(True).set_name("o")
        if found is not None:
            found.set_output(True).set_data_type(D.FLOAT).set_name("stats")

    return build


def bhsd(*dim):
    """Row-major strides of dims [b, h, s, d]."""
    _, h, s, d = dim
    return dim, (h * s * d, s * d, d, 1)


@pytest.mark.parametrize("begin", [0, 1], ids=["aligned", "unaligned"])
def test_L7_views_of_one_buffer(device, begin):
    """q is heads 0 to 15 of 18, k and v one head each, inside the buffer: rows of 1152 elements, one head of k for 16 of q; the buffer itself on a
    16-byte boundary, or one element after it."""
    need("attention_fwd")
    s, heads, d = (20, 4, 8) if device == "cudasim" else (256, 16, 64)
    row = (heads + 2) * d
    q, kv = ((1, heads, s, d), (row, d, row, 1)), ((1, 1, s, d), (row, d, row, 1))
    offsets = {"q": begin, "k": begin + heads * d, "v": begin + (heads + 1) * d}
    same = {n: Data("normal") for n in "qkv"}
    viewed = check_graph(attention(q, kv, kv, bhsd(1, heads, s, d), attn_scale=0.125), device, data=same, offsets=offsets, graph=F32, runs=1)
    plain = [bhsd(1, n, s, d) for n in (heads, 1, 1, heads)]
    packed = check_graph(attention(*plain, attn_scale=0.125), device, data=same, graph=F32, runs=1)
    assert viewed.excluded == packed.excluded == 0
    np.testing.assert_allclose(viewed.outputs["o"], packed.outputs["o"], rtol=2.0**-9, atol=2.0**-12)


def gradient(dim, strides, s_kv, dtype=D.FLOAT):
    """A builder of sdpa_backward whose O and dO have strides of their own."""
    b, h, s, d = dim

    def build(g):
        def tensor(name, dim, stride=None):
            return g.tensor(dim=dim, stride=stride or bhsd(*dim)[1], data_type=dtype, name=name)

        q, k, v = tensor("q", dim), tensor("k", (b, h, s_kv, d)), tensor("v", (b, h, s_kv, d))
        o, do = tensor("o", dim, strides[0]), tensor("do", dim, strides[1])
        stats = g.tensor(dim=(b, h, s, 1), layout="row", data_type=D.FLOAT, name="stats")
        for t, like, name in zip(g.sdpa_backward(q, k, v, o, do, stats, attn_scale=0.25), (q, k, v), ("dq", "dk", "dv"), strict=True):
            t.set_dim(like.get_dim()).set_stride(like.get_stride()).set_output(True).set_name(name).set_data_type(dtype)

    return build


@pytest.mark.parametrize("kind", ["another order", "stride 0 everywhere", "one row of q"])
def test_L13_dO_has_strides_of_its_own(device, kind):
    """dO row-major beside O as [b, s, h, d]; dO of sum().backward(), one number for all; a decoding step."""
    need("attention_bwd")
    dim = (2, 2, 1, 64) if kind == "one row of q" else (2, 2, 9, 8) if device == "cudasim" else (2, 2, 49, 32)
    b, h, s, d = dim
    sequence_first = (s * h * d, d, h * d, 1)
    do = (0, 0, 0, 0) if kind == "stride 0 everywhere" else bhsd(*dim)[1]
    dtype, s_kv = (D.BFLOAT16, 40 if device == "cudasim" else 1000) if kind == "one row of q" else (D.FLOAT, s)
    data = {"stats": Data("uniform", 5, 6), "o": Data("normal", hi=0.5)}
    check_graph(gradient(dim, (sequence_first, do), s_kv, dtype), device, data=data, graph=F32, runs=1)


@pytest.mark.parametrize("where", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_L13_a_long_decoding_step(where):
    """The reported size: one row of q, 65536 keys, 16 heads of 64, bf16, dO of sum().backward(), whose strides are all 0. Against float64 formulas
    here, since intervals of that many scores take minutes. A gradient of K or V is one product, rounded once; that of Q is a sum, whose error is
    within 2^-12 of its terms' magnitudes if no more than 2^12 roundings lie behind any of them."""
    import torch

    h, d, s_kv, scale = 16, 64, 65536, 0.125
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, n, d).bfloat16() for n in (1, s_kv, s_kv))
    do = torch.tensor(1.0, dtype=torch.bfloat16).expand(1, h, 1, d)
    wide = {n: t.double() for n, t in {"q": q, "k": k, "v": v, "do": do}.items()}
    scores = scale * wide["q"] @ wide["k"].transpose(2, 3)
    stats = scores.logsumexp(3, keepdim=True).float()
    p = (scores - stats.double()).exp()
    o = (p @ wide["v"]).bfloat16()
    dp, delta = wide["do"] @ wide["v"].transpose(2, 3), (wide["do"] * o.double()).sum(3, keepdim=True)
    ds, size = scale * p * (dp - delta), scale * p * (dp.abs() + delta.abs())
    want = {"dq": ds @ wide["k"], "dk": ds.transpose(2, 3) @ wide["q"], "dv": p.transpose(2, 3) @ wide["do"]}
    room = {"dq": 2.0**-12 * size @ wide["k"].abs(), "dk": 2.0**-12 * size.transpose(2, 3) @ wide["q"].abs(), "dv": 2.0**-12 * want["dv"].abs()}

    g = graphdnn.pygraph(device=where, **F32)
    inputs = [g.tensor_like(t.to(where)).set_name(n) for n, t in (("q", q), ("k", k), ("v", v), ("o", o), ("do", do), ("stats", stats))]
    assert inputs[4].get_stride() == [0, 0, 0, 0]
    made = g.sdpa_backward(*inputs, attn_scale=scale)
    found = {n: torch.full_like(t, float("nan"), device=where) for n, t in (("dq", q), ("dk", k), ("dv", v))}
    for t, (n, x) in zip(made, found.items(), strict=True):
        t.set_dim(list(x.shape)).set_stride(list(x.stride())).set_output(True).set_name(n).set_data_type(D.BFLOAT16)
    built(g)
    pack = {n: t.to(where) for n, t in (("q", q), ("k", k), ("v", v), ("o", o), ("do", do), ("stats", stats))} | found
    g.execute(pack, torch.empty(max(g.get_workspace_size(), 1), dtype=torch.uint8, device=where))
    for n, x in found.items():
        wrong = (x.cpu().double() - want[n]).abs() > 2.0**-8 * want[n].abs() + room[n]
        assert not wrong.any(), f"{n}: {int(wrong.sum())} elements"


LENGTHS = (1, 2, 31, 33, 63, 64, 65, 97, 127, 129, 192, 704)


@pytest.mark.parametrize(("length", "mask"), [(n, "plain") for n in LENGTHS] + [(n, "with a bias") for n in LENGTHS if n in (1, 64, 97, 192)])
def test_N3_tails_of_very_negative_scores(device, length, mask):
    """Every score is near -120: a tail that counted as score 0 would take all the weight, and O would be near 0. The simulator runs shorter ones."""
    need("attention_fwd")
    length = min(length, 129) if device == "cudasim" else length
    d, b = (16, 1) if device == "cudasim" else (64, 2)
    rng = np.random.default_rng(length)
    q, k = (0.1 * rng.standard_normal((b, 1, length, d)) for _ in range(2))
    q[..., 0], k[..., 0] = 1.0, -120 * np.sqrt(d)
    plain = bhsd(b, 1, length, d)
    bias = rng.standard_normal((1, 1, length, length)) if mask == "with a bias" else np.zeros(1)

    def build(g):
        more = {"bias": g.tensor(dim=bias.shape, layout="row", data_type=D.FLOAT, name="bias")} if mask == "with a bias" else {}
        attention(plain, plain, plain, plain, stats=True, attn_scale=float(d**-0.5), dtype=D.FLOAT, **more)(g)

    found = check_graph(build, device, data={"q": given(q), "k": given(k), "bias": given(bias)}, graph=F32, runs=1)
    scores = q @ np.swapaxes(k, 2, 3) / np.sqrt(d) + bias
    np.testing.assert_allclose(found.outputs["stats"][..., 0], np.log(np.exp(scores + 120).sum(-1)) - 120, atol=1e-3)
    assert np.abs(found.outputs["o"]).max() > 1e-3


@pytest.mark.parametrize("with_mask", [False, True], ids=["plain", "with a bias"])
def test_N3_one_row_of_q(device, with_mask):
    """Sq = 1, Sk = 128 with an explicit mask."""
    need("attention_fwd")
    d = 16 if device == "cudasim" else 64
    run_forward(Case(1, 128, d, b=1, h=2, dtype=D.BFLOAT16, bias=(1, 1, 1, 128) if with_mask else ()), device)


@pytest.mark.parametrize(("kind", "layout"), [("causal and ALiBi", "gaps"), ("dropout", "bhds")])
def test_L6_masks_and_dropout_are_logical(device, kind, layout):
    """Row, column, head and the number that dropout draws by are logical: every layout gives what row-major tensors give, to the bit of a weight."""
    need("attention_fwd")
    more = {"window": (None, 0, False), "alibi": True} if kind == "causal and ALiBi" else {"dropout": 0.5}
    case = Case(9, 13, 8, h=3, layout=layout, **more)
    values = feeds(case)
    plain = replace(case, layout="bhsd")
    found, wanted = run_forward(case, device, values).outputs, run_forward(plain, device, values).outputs
    np.testing.assert_allclose(found["o"], wanted["o"], rtol=1e-5, atol=1e-6)


def kept(scores_of, s_q, s_kv, **more):
    """Which keys each row keeps: v is the identity and all scores are equal, so that O shows the weights."""
    build = attention(bhsd(1, 1, s_q, 4), bhsd(1, 1, s_kv, 4), bhsd(1, 1, s_kv, s_kv), bhsd(1, 1, s_q, s_kv), stats=True, dtype=D.FLOAT, **more)
    values = {"q": given(0.0), "v": given(np.eye(s_kv).reshape(1, 1, s_kv, s_kv))}
    found = check_graph(build, scores_of, data=values, graph=F32, runs=1).outputs
    return ["".join(str(int(x > 0)) for x in row) for row in found["o"][0, 0]], found["stats"][0, 0, :, 0]


def test_N13_both_alignments(device):
    need("attention_fwd")
    bottom = graphdnn.diagonal_alignment.BOTTOM_RIGHT
    assert kept(device, 2, 4, use_causal_mask=True)[0] == ["1000", "1100"]
    assert kept(device, 2, 4, use_causal_mask_bottom_right=True)[0] == ["1110", "1111"]
    assert kept(device, 2, 4, diagonal_alignment=bottom, diagonal_band_right_bound=0)[0] == ["1110", "1111"]


def test_N13_more_rows_than_columns(device):
    """Leading rows keep nothing: O is 0 there and Stats -inf."""
    need("attention_fwd")
    rows, stats = kept(device, 4, 2, use_causal_mask_bottom_right=True)
    assert rows == ["00", "00", "10", "11"]
    assert np.isneginf(stats[:2]).all() and np.isfinite(stats[2:]).all()
    run_forward(Case(9, 5, 8, window=BR), device)


def test_N13_an_alignment_without_a_band_is_said():
    """A flag that would change nothing is not dropped in silence."""
    g = graphdnn.pygraph(device="cpu", **F32)
    q = g.tensor(dim=(1, 1, 4, 8), layout="row", name="q")
    o, _ = g.sdpa(q, q, q, generate_stats=False, diagonal_alignment=graphdnn.diagonal_alignment.BOTTOM_RIGHT, name="a")
    o.set_dim((1, 1, 4, 8)).set_stride((32, 32, 8, 1)).set_output(True)
    with pytest.raises(ValidationError, match="'a'.*BOTTOM_RIGHT"):
        g.validate()


@pytest.mark.parametrize("length", [33, 64, 65])
def test_N3_gradient(device, length):
    need("attention_bwd")
    case = Case(length, length, 8, bias=(1, 1, length, length))
    values = feeds(case)
    values["k"] = values["k"] * 0.1
    values["k"][..., 0] = -30.0
    values["q"] = values["q"] * 0.1
    values["q"][..., 0] = 1.0
    run_backward(case, device, with_results(case, values))
