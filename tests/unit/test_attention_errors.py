"""Part 2.2 of the API page, row by row: what the cuDNN Frontend answers, and what is answered here.

"same": the same class. "runs here": it has a meaning, so it is accepted (conformance tests run it). "ours": refused here, accepted there.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type as D
from graphdnn.errors import BuildError, KindError, NotSupportedError, ValidationError

TL, BR = graphdnn.diagonal_alignment.TOP_LEFT, graphdnn.diagonal_alignment.BOTTOM_RIGHT
VE, NS, RE = ValidationError, NotSupportedError, BuildError


def row_major(dim):
    return [int(np.prod(dim[i + 1 :])) for i in range(len(dim))]


class Built:
    """A graph with Q, K, V and a call. ``use`` may change dims, strides and arguments before ``run``."""

    def __init__(self, device="sm_90", dtype=D.HALF, intermediate=D.FLOAT, **dims):
        sizes = {"b": 2, "h": 4, "h_k": 4, "h_v": 4, "s_q": 32, "s_kv": 32, "d": 64, "d_v": 64} | dims
        self.g = graphdnn.pygraph(device=device, io_data_type=dtype, intermediate_data_type=intermediate, compute_data_type=D.FLOAT)
        b, h, h_k, h_v, s_q, s_kv, d, d_v = sizes.values()
        self.dims = {"q": (b, h, s_q, d), "k": (b, h_k, s_kv, d), "v": (b, h_v, s_kv, d_v), "o": (b, h, s_q, d_v)}
        self.q, self.k, self.v, self.o, self.do = (self.t(n, self.dims[n]) for n in "qkvoo")
        self.stats = self.t("stats", (b, h, s_q, 1), D.FLOAT)
        self.lengths = {n: self.t(n, (b, 1, 1, 1), D.INT32) for n in ("seq_len_q", "seq_len_kv")}
        self.padding = {"use_padding_mask": True, **self.lengths}
        self.tables = {f"paged_attention_{n}_table": self.t(n, (b, 1, 4, 1), D.INT32) for n in "kv"}

    def t(self, name, dim, dtype=D.NOT_SET):
        return self.g.tensor(dim=dim, stride=row_major(dim), data_type=dtype, name=name)

    def ragged(self, *tensors):
        offsets = self.t("offsets", (self.dims["q"][0] + 1, 1, 1, 1), D.INT32)
        for t in tensors:
            t.set_ragged_offset(offsets)

    def forward(self, place=True, **more):
        """The call, and its dims unless ``place`` says not."""
        if "is_inference" not in more and "generate_stats" not in more:
            more["generate_stats"] = True
        o, stats = self.g.sdpa(self.q, self.k, self.v, **{"attn_scale": 0.125} | more)
        if place:
            o.set_dim(self.dims["o"]).set_stride(row_major(self.dims["o"]))
        o.set_output(True)
        if stats is not None:
            stats.set_output(True).set_data_type(D.FLOAT)
        self.g.build_operation_graph()

    def backward(self, place=True, **more):
        """The gradient."""
        made = self.g.sdpa_backward(self.q, self.k, self.v, self.o, self.do, self.stats, **{"attn_scale": 0.125} | more)
        for t, n in zip(made, "qkv", strict=True):
            t.set_output(True)
            if place:
                t.set_dim(self.dims[n]).set_stride(row_major(self.dims[n]))
        self.g.build_operation_graph()


def changed(x, **attributes):
    for name, value in attributes.items():
        getattr(x, f"set_{name}")(value)


CAUSAL, BOTTOM = {"use_causal_mask": True}, {"use_causal_mask_bottom_right": True}


def plain(**more):
    return lambda: Built().forward(**more)


def gradient(**more):
    return lambda: Built().backward(**more)


def sized(call="forward", options=None, **dims):
    return lambda: getattr(Built(**dims), call)(**options or {})


def used(words, call="forward", **dims):
    """Arguments that need the graph's tensors: a function of the Built."""

    def run():
        built = Built(**dims)
        getattr(built, call)(**words(built))

    return run


def strided(built, name="q"):
    changed(getattr(built, name), stride=[32 * 64 * 4, 32 * 64, 1, 32])
    return {}


def packed(built, *names):
    built.ragged(*(getattr(built, n) for n in names))
    return {}


def cut(built):
    built.q.dim = built.q.dim[:3]
    built.q.stride = built.q.stride[:3]
    return {}


def seeds(built):
    return built.t("seed", (1, 1, 1, 1), D.INT64), built.t("offset", (1, 1, 1, 1), D.INT64)


def masks(built, count):
    names = (("mask", (2, 4, 32, 32)), ("scale", (1, 1, 1, 1)), ("scale_inv", (1, 1, 1, 1)))
    return tuple(built.t(n, d) for n, d in names[:count])


def bprop(g, s):
    return g.mul(s, 2.0)


ROWS = [
    # ---- 16-bit forward
    ("O dims or strides unset", VE, "same", plain(place=False)),
    ("last stride of Q != 1", NS, "runs here", used(strided)),
    ("h_q not a multiple of h_k", NS, "same", sized(h_k=3)),
    ("h_q not a multiple of h_v", NS, "same", sized(h_v=3)),
    ("attn_scale int", RE, "same", plain(attn_scale=2)),
    ("bias dtype BOOLEAN", NS, "same", used(lambda b: {"bias": b.t("bias", (1, 1, 32, 32), D.BOOLEAN)})),
    ("padding mask without both lengths", VE, "same", plain(use_padding_mask=True)),
    ("padding mask with one length", VE, "same", used(lambda b: {"use_padding_mask": True, "seq_len_q": b.lengths["seq_len_q"]})),
    ("lengths without padding mask", VE, "same", used(lambda b: b.lengths)),
    ("lengths without padding mask, with score_mod", None, "same", used(lambda b: {**b.lengths, "score_mod": bprop})),
    ("ragged offset without padding mask", NS, "same", used(lambda b: packed(b, "q"))),
    ("ragged offset with padding mask", None, "same", used(lambda b: packed(b, "q", "k", "v") | b.padding)),
    ("dropout p == 1.0", VE, "same", used(lambda b: {"dropout": (1.0, *seeds(b))})),
    ("dropout p < 0", VE, "same", used(lambda b: {"dropout": (-0.5, *seeds(b))})),
    ("alibi without right_bound == 0", NS, "runs here", plain(use_alibi_mask=True)),
    ("bottom right, s_q > s_kv, no padding", NS, "runs here", sized(options=BOTTOM, s_q=48)),
    ("bottom right with bias", NS, "runs here", used(lambda b: BOTTOM | {"bias": b.t("bias", (1, 1, 32, 32))})),
    ("bottom right with alibi", NS, "runs here", plain(**BOTTOM, use_alibi_mask=True)),
    ("bottom right with dropout", NS, "runs here", used(lambda b: BOTTOM | {"dropout": (0.5, *seeds(b))})),
    ("left_bound, s_q > s_kv, no padding", NS, "runs here", sized(options={"diagonal_band_left_bound": 4}, s_q=48)),
    ("left_bound == 0", None, "same", plain(diagonal_band_left_bound=0)),
    ("left_bound < 0", None, "ours", plain(diagonal_band_left_bound=-1)),
    ("right_bound < 0", RE, "same", plain(diagonal_band_right_bound=-1)),
    ("right_bound > s_kv", None, "same", plain(diagonal_band_right_bound=1000)),
    ("sink with s_q == 1", NS, "runs here", used(lambda b: {"sink_token": b.t("sink", (1, 4, 1, 1), D.FLOAT)}, s_q=1)),
    ("paged without padding mask", NS, "runs here", used(lambda b: b.tables, b=2, s_kv=8)),
    ("max_seq_len_kv without tables", NS, "same", plain(paged_attention_max_seq_len_kv=32)),
    ("score_mod with causal", NS, "runs here", plain(score_mod=bprop, **CAUSAL)),
    ("score_mod with alibi and left bound", NS, "runs here", plain(score_mod=bprop, use_alibi_mask=True, diagonal_band_left_bound=4)),
    ("score_mod with padding", NS, "runs here", used(lambda b: {"score_mod": bprop} | b.padding)),
    ("intermediate_data_type NOT_SET", VE, "runs here", lambda: Built(intermediate=D.NOT_SET).forward()),
    ("d % 8 != 0", NS, "runs here", sized(d=63, d_v=5)),
    ("d > 256", None, "same", sized(d=264, d_v=520)),
    ("sm_version < 80", NS, "ours", lambda: Built(device="sm_75").forward()),
    ("io FLOAT", NS, "runs here", lambda: Built(dtype=D.FLOAT).forward()),
    ("io INT8", NS, "same", lambda: Built(dtype=D.INT8).forward()),
    (
        "UNIFIED with dropout and stats",
        NS,
        "runs here",
        used(lambda b: {"implementation": graphdnn.attention_implementation.UNIFIED, "dropout": (0.5, *seeds(b))}),
    ),
    (
        "COMPOSITE with block_mask",
        NS,
        "runs here",
        used(lambda b: {"implementation": graphdnn.attention_implementation.COMPOSITE, "block_mask": b.t("bm", (2, 4, 1, 1), D.UINT8)}),
    ),
    ("AUTO with block_mask", None, "same", used(lambda b: {"block_mask": b.t("bm", (2, 4, 1, 1), D.UINT8)})),
    ("neither generate_stats nor is_inference", RE, "same", plain(generate_stats=None)),
    ("both generate_stats and is_inference", RE, "same", plain(generate_stats=True, is_inference=False)),
    # ---- 16-bit backward
    ("dQ, dK, dV dims unset", VE, "same", gradient(place=False)),
    ("backward: d > 256", NS, "runs here", sized("backward", d=264)),
    ("backward: d % 8", NS, "runs here", sized("backward", d=33, d_v=33)),
    ("backward: s_q == s_kv == 1", NS, "runs here", sized("backward", s_q=1, s_kv=1)),
    ("backward: left_bound == 0", RE, "runs here", gradient(diagonal_band_left_bound=0)),
    ("backward: right_bound < 0", RE, "same", gradient(diagonal_band_right_bound=-1)),
    ("backward: alibi without causal", NS, "runs here", gradient(use_alibi_mask=True)),
    ("backward: bottom right, s_q > s_kv", NS, "runs here", sized("backward", BOTTOM, s_q=48)),
    ("backward: heads of k", NS, "same", sized("backward", h_k=3)),
    ("backward: padding without lengths", VE, "same", gradient(use_padding_mask=True)),
    ("max_total_seq_len_q of a plain tensor", NS, "same", gradient(max_total_seq_len_q=64)),
    ("max_total_seq_len_kv of a plain tensor", NS, "same", gradient(max_total_seq_len_kv=64)),
    (
        "max_total_seq_len of packed tensors",
        None,
        "same",
        used(lambda b: packed(b, "q", "k", "v") | b.padding | {"max_total_seq_len_q": 64, "max_total_seq_len_kv": 64}, "backward"),
    ),
    ("dSink_token without sink_token", VE, "same", used(lambda b: {"dSink_token": b.t("ds", (1, 4, 1, 1), D.FLOAT)}, "backward")),
    ("dBias without bias", None, "same", used(lambda b: {"dBias": b.t("db", (1, 4, 32, 32))}, "backward")),
    ("backward: dropout two-tuple", RE, "same", used(lambda b: {"dropout": masks(b, 2)}, "backward")),
    ("backward: dropout three-tuple", None, "same", used(lambda b: {"dropout": masks(b, 3)}, "backward")),
    ("forward: dropout three-tuple of tensors", RE, "same", used(lambda b: {"dropout": masks(b, 3)})),
    ("backward: deterministic, score_mod", None, "same", gradient(use_deterministic_algorithm=True, score_mod=bprop)),
    ("backward: score_mod and score_mod_bprop", None, "same", gradient(score_mod=bprop, score_mod_bprop=bprop)),
    ("backward: Philox dropout", None, "same", used(lambda b: {"dropout": (0.1, *seeds(b))}, "backward")),
    ("backward: sink", None, "same", used(lambda b: {"sink_token": b.t("s", (1, 4, 1, 1), D.FLOAT)}, "backward")),
    # ---- what has no meaning, and what the page does not say
    ("rank of Q", VE, "same", used(cut)),
    ("head dims of Q and K", VE, "same", used(lambda b: changed(b.k, dim=(2, 4, 32, 32)) or {})),
    ("rows of K and V", VE, "same", used(lambda b: changed(b.v, dim=(2, 4, 31, 64)) or {})),
    ("bias that does not broadcast", VE, "same", used(lambda b: {"bias": b.t("bias", (1, 3, 32, 32))})),
    ("block mask of other dims", VE, "same", used(lambda b: {"block_mask": b.t("bm", (2, 4, 2, 1), D.UINT8)})),
    ("sink of other dims", VE, "same", used(lambda b: {"sink_token": b.t("s", (1, 1, 1, 1), D.FLOAT)})),
    ("lengths of another batch", VE, "same", used(lambda b: changed(b.lengths["seq_len_q"], dim=(3, 1, 1, 1)) or b.padding)),
    ("lengths of floats", VE, "same", used(lambda b: changed(b.lengths["seq_len_q"], data_type=D.FLOAT) or b.padding)),
    ("bottom right without a bound", VE, "ours", plain(diagonal_alignment=BR)),
    ("both causal masks", VE, "ours", plain(**CAUSAL, **BOTTOM)),
    ("causal mask and another right bound", VE, "ours", plain(**CAUSAL, diagonal_band_right_bound=3)),
    ("window and another left bound", VE, "ours", plain(sliding_window_length=3, diagonal_band_left_bound=4)),
    ("rng_dump without dropout", VE, "ours", used(lambda b: {"rng_dump": b.t("dump", (2, 4, 32, 32), D.FLOAT)})),
    ("packed bias", NS, "ours", used(lambda b: b.padding | {"bias": b.t("bias", (2, 1, 32, 32)).set_ragged_offset(b.t("x", (3, 1, 1, 1), D.INT32))})),
]
ANSWERS = {"left_bound < 0": RE, "sm_version < 80": VE}
"""Rows marked "ours" whose class is not the page's: no graph has such a device; a negative bound has no meaning on either side."""


@pytest.mark.parametrize(("row", "page", "mark", "call"), ROWS, ids=[re.sub(r"[^\w<>=%, -]", "", r[0]) for r in ROWS])
def test_row(row, page, mark, call):
    wanted = None if mark == "runs here" else ANSWERS.get(row, page)
    if wanted is None:
        call()
        return
    with pytest.raises(wanted) as found:
        call()
    assert type(found.value) is wanted and len(str(found.value)) > 20


def test_wrong_kinds():
    for arguments in ({"score_mod": 3}, {"diagonal_alignment": 0}, {"implementation": "AUTO"}, {"bias": 3}, {"sliding_window_length": 1.5}):
        with pytest.raises(KindError):
            Built().forward(**arguments)
    with pytest.raises(KindError):
        Built().forward(score_mod=lambda g, s: None)
    with pytest.raises(NotSupportedError, match="not pointwise"):
        Built().forward(score_mod=lambda g, s: g.transpose(s, [0, 1, 3, 2]))
    with pytest.raises(NotSupportedError, match="rounds a value"):
        Built().forward(score_mod=lambda g, s: g.add(s, 1.0).set_data_type(D.HALF))
    with pytest.raises(NotSupportedError, match="no rule for the derivative"):
        Built().backward(score_mod=lambda g, s: g.mod(2.0, s))


# ------------------------------------------------------------------------------------------------------------------------------- 8-bit floats
def fp8(device="sm_90", d=64, out=D.FP8_E4M3, place=True, ragged=False, amax=D.FLOAT, **more):
    built = Built(device=device, dtype=D.FP8_E4M3, d=d, d_v=d)
    if ragged:
        built.ragged(built.q)
        more |= built.padding
    scales = [built.t(n, (1, 1, 1, 1), D.FLOAT) for n in ("dq", "dk", "dv", "ds", "ss", "so")]
    o, _, *largest = built.g.sdpa_fp8(built.q, built.k, built.v, *scales, attn_scale=0.1, generate_stats=False, **more)
    o.set_dim(built.dims["o"]).set_stride(row_major(built.dims["o"])).set_output(True).set_data_type(out)
    for t in largest:
        t.set_output(True).set_data_type(amax)
        if place:
            t.set_dim((1, 1, 1, 1)).set_stride((1, 1, 1, 1))
    built.g.build_operation_graph()
    return built.g


FP8_ROWS = [
    ("sm < 90", NS, "runs here", lambda: fp8("sm_80")),
    ("d > 256", NS, "runs here", lambda: fp8(d=272)),
    ("d % 16", NS, "runs here", lambda: fp8(d=24)),
    ("output HALF on Hopper", NS, "runs here", lambda: fp8(out=D.HALF)),
    ("bottom right on Hopper", NS, "runs here", lambda: fp8(**BOTTOM)),
    ("top left", None, "same", lambda: fp8(**CAUSAL)),
    ("left bound", None, "same", lambda: fp8(left_bound=4)),
    ("packed on Hopper", NS, "same", lambda: fp8(ragged=True)),
    ("Amax without dims", VE, "same", lambda: fp8(place=False)),
]


@pytest.mark.parametrize(("row", "page", "mark", "call"), FP8_ROWS, ids=[r[0] for r in FP8_ROWS])
def test_fp8_row(row, page, mark, call):
    test_row(row, page, mark, call)


def test_aliases_have_the_signatures_of_the_page():
    assert graphdnn.pygraph.scaled_dot_product_flash_attention is graphdnn.pygraph.sdpa
    assert graphdnn.pygraph.scaled_dot_product_flash_attention_backward is graphdnn.pygraph.sdpa_backward
