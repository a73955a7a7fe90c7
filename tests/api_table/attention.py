"""Rows of attention and its gradient, plain, on 8-bit floats with one scale a tensor, and with MXFP8 scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from graphdnn import attention_implementation, data_type, diagonal_alignment
from tests.api_table.row import FLOATS, Case, Form, Row, Types, each
from tests.helpers import Data, given

D = data_type
TOP_LEFT, BOTTOM_RIGHT = diagonal_alignment.TOP_LEFT, diagonal_alignment.BOTTOM_RIGHT
Q, K, V, OUT, STATS, SCORES, SINK, ONE = (
    (2, 4, 5, 8),
    (2, 2, 6, 8),
    (2, 1, 6, 4),
    (2, 4, 5, 4),
    (2, 4, 5, 1),
    (2, 4, 5, 6),
    (1, 4, 1, 1),
    (1, 1, 1, 1),
)
LENGTHS = {"q": [5, 3], "kv": [6, 2]}


def lengths(c: Case) -> Form:
    """Of the sequences of both batches."""
    found = {f"seq_len_{n}": c.t(f"len_{n}", (2, 1, 1, 1), D.INT32, data=given([[[[x]]] for x in xs])) for n, xs in LENGTHS.items()}
    return {"use_padding_mask": True, **found}


def philox(c: Case) -> tuple[Any, ...]:
    """Dropout by seed and offset."""
    return 0.25, c.t("seed", ONE, D.INT64, data=given(1234567)), c.by_value("offset", 89, 4, D.INT64)


def masked(c: Case, backward: bool = False) -> tuple[Any, ...]:
    """Dropout by a mask."""
    numbers = [c.t(n, ONE, D.FLOAT, data=given(x)) for n, x in (("drop_scale", 1.25), ("drop_inverse", 0.8))]
    return c.t("drop", SCORES, D.FLOAT, data=Data("grid", 0, 1)), *numbers[: 1 + backward]


def fresh(c: Case, name: str, dim: Sequence[int], dtype: data_type) -> partial[Any]:
    """A tensor of the caller's to write to, another one for each call."""

    def make() -> Any:
        number = sum(t.name.startswith(f"{name} ") for t in c.graph._tensors)
        return c.graph.tensor(dim=dim, layout="row", data_type=dtype, name=f"{name} {number}")

    return partial(make)


def softcap(g: Any, s: Any) -> Any:
    """A score that stays within 2."""
    return g.mul(g.tanh(g.mul(s, 0.5)), 2.0)


def halved(g: Any, ds: Any) -> Any:
    """Some gradient of a score."""
    return g.mul(ds, 0.5)


def sdpa(method: str, c: Case) -> Iterator[tuple[str, Form]]:
    """Everything at once as far as it goes together; then what is left of each argument."""
    tensors = {"q": c.t("q", Q), "k": c.t("k", K, layout="channels_last"), "v": c.t("v", V)}
    scale, wide = c.t("scale", ONE, D.FLOAT, data=given(0.5)), c.types.compute
    pages = {n: c.t(f"{n} pages", (3, d[1], 4, d[3])) for n, d in (("k", K), ("v", V))}
    tables = {f"paged_attention_{n}_table": c.t(f"{n} table", (2, 1, 2, 1), D.INT32, data=given([[[[0], [2]]], [[[1], [0]]]])) for n in "kv"}
    results = {"score_max": fresh(c, "top", STATS, wide), "score_sum_exp": fresh(c, "total", STATS, wide)}
    more = {"name": "a", "compute_data_type": wide, "implementation": attention_implementation.AUTO, "unfuse_fma": True}
    window = {"use_causal_mask": True, "sliding_window_length": 4, "diagonal_alignment": TOP_LEFT}
    for form in (
        {"generate_stats": True, "attn_scale": 0.5, "bias": c.t("bias", (1, 4, 5, 6)), "use_alibi_mask": True, **lengths(c), **window, **more}
        | {"dropout": philox(c), "rng_dump": fresh(c, "dump", SCORES, D.FLOAT), **results, "sink_token": c.t("sink", SINK, D.FLOAT)},
        {"is_inference": True, "attn_scale": scale, "use_causal_mask_bottom_right": True, "score_mod": softcap},
        {"is_inference": False, "diagonal_alignment": BOTTOM_RIGHT, "diagonal_band_left_bound": 3, "diagonal_band_right_bound": 1}
        | {"dropout": masked(c), "implementation": attention_implementation.UNIFIED},
        {"generate_stats": False, "block_mask": c.t("blocks", (2, 4, 1, 1), D.UINT8, data=Data("grid", 0, 1))},
        {"generate_stats": False, "implementation": attention_implementation.COMPOSITE},
    ):
        yield method, tensors | form
    yield method, {"q": tensors["q"], **pages, "generate_stats": True, **lengths(c), **tables, "paged_attention_max_seq_len_kv": 6}


def sdpa_backward(method: str, c: Case) -> Iterator[tuple[str, Form]]:
    """As for the forward op. O and Stats need not be those of a forward pass for the formulas to hold; they are near."""
    wide = c.types.compute
    tensors = {"q": c.t("q", Q), "k": c.t("k", K), "v": c.t("v", V), "o": c.t("o", OUT, data=Data("normal", hi=0.5)), "dO": c.t("dO", OUT)}
    tensors["stats"] = c.t("stats", STATS, wide, data=Data("uniform", 2, 4))
    results = {"dBias": fresh(c, "dBias", (1, 4, 5, 6), D.FLOAT), "rng_dump": fresh(c, "dump", SCORES, D.FLOAT)}
    sink = {"sink_token": c.t("sink", SINK, D.FLOAT), "dSink_token": fresh(c, "dSink", SINK, D.FLOAT)}
    window = {"use_causal_mask": True, "sliding_window_length": 4, "diagonal_alignment": TOP_LEFT}
    more = {"use_alibi_mask": True, "use_deterministic_algorithm": True, "compute_data_type": wide, "name": "a"}
    for form in (
        {"attn_scale": 0.5, "bias": c.t("bias", (1, 4, 5, 6)), **lengths(c), **window, "dropout": philox(c), **results, **sink, **more},
        {"attn_scale": c.t("scale", ONE, D.FLOAT, data=given(0.5)), "use_causal_mask_bottom_right": True, "dropout": masked(c, True)},
        {"diagonal_alignment": BOTTOM_RIGHT, "diagonal_band_left_bound": 3, "diagonal_band_right_bound": 1, "score_mod": softcap},
        {"score_mod": softcap, "score_mod_bprop": halved},
        {},
    ):
        yield method, tensors | form
    starts = {n: c.t(f"{n} start", (3, 1, 1, 1), D.INT32, data=given(x)) for n, x in STARTS.items()}
    packed = {n: c.t(f"packed {n}", d).set_ragged_offset(starts[n]) for n, d in (("q", Q), ("k", K), ("v", V), ("o", OUT), ("dO", OUT))}
    yield method, packed | {"stats": tensors["stats"], **lengths(c), "max_total_seq_len_q": 10, "max_total_seq_len_kv": 12}


STARTS = {n: [[[[i * d[1] * d[2] * d[3]]]] for i in range(3)] for n, d in (("q", Q), ("k", K), ("v", V), ("o", OUT), ("dO", OUT))}


# ------------------------------------------------------------------------------------------------------------------------------------------- 8 bits
SCALES = {"descale_s": 1 / 256, "scale_s": 256.0, "scale_o": 2.0, "descale_o": 0.5, "descale_dP": 0.25, "scale_dP": 4.0}
FORWARD = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
BACKWARD = ("descale_q", "descale_k", "descale_v", "descale_o", "descale_dO", "descale_s", "descale_dP")
BACKWARD += ("scale_s", "scale_dQ", "scale_dK", "scale_dV", "scale_dP")


def numbers(c: Case, names: Sequence[str]) -> Form:
    """One scale for each tensor."""
    return {n: c.t(n, ONE, D.FLOAT, data=given(SCALES.get(n, 1.25))) for n in names}


def fp8(c: Case) -> Iterator[tuple[str, Form]]:
    """As for sdpa."""
    tensors = {"q": c.t("q", Q), "k": c.t("k", K), "v": c.t("v", V), **numbers(c, FORWARD)}
    pages = {n: c.t(f"{n} pages", (3, d[1], 4, d[3])) for n, d in (("k", K), ("v", V))}
    tables = {f"paged_attention_{n}_table": c.t(f"{n} table", (2, 1, 2, 1), D.INT32, data=given([[[[0], [2]]], [[[1], [0]]]])) for n in "kv"}
    results = {n: fresh(c, n, STATS, D.FLOAT) for n in ("score_max", "score_sum_exp")}
    more = {"use_alibi_mask": True, "sliding_window": 4, "diagonal_alignment": TOP_LEFT, "compute_data_type": D.FLOAT, "name": "a"}
    yield "sdpa_fp8", {
        **tensors, "generate_stats": True, "attn_scale": 0.5, **lengths(c), "use_causal_mask": True, "bias": c.t("bias", (1, 4, 5, 6), D.FLOAT),
        **more, "dropout": philox(c), "rng_dump": fresh(c, "dump", SCORES, D.FLOAT), **results, "sink_token": c.t("sink", SINK, D.FLOAT),
    }  # fmt: skip
    yield "sdpa_fp8", {**tensors, "is_inference": True, "use_causal_mask_bottom_right": True, "fn": softcap}
    bounds = {"diagonal_alignment": BOTTOM_RIGHT, "left_bound": 3, "right_bound": 1}
    yield "sdpa_fp8", {**tensors, "is_inference": False, **bounds}
    yield "sdpa_fp8", {**tensors, **pages, "generate_stats": False, **lengths(c), **tables, "paged_attention_max_seq_len_kv": 6}


def fp8_backward(c: Case) -> Iterator[tuple[str, Form]]:
    """As for sdpa_backward."""
    tensors = {"q": c.t("q", Q), "k": c.t("k", K), "v": c.t("v", V), "o": c.t("o", OUT, data=Data("normal", hi=0.5)), "dO": c.t("dO", OUT)}
    tensors |= {"stats": c.t("stats", STATS, D.FLOAT, data=Data("uniform", 3, 5)), **numbers(c, BACKWARD)}
    sink = {"sink_token": c.t("sink", SINK, D.FLOAT), "dSink_token": fresh(c, "dSink", SINK, D.FLOAT)}
    more = {"use_deterministic_algorithm": True, "compute_data_type": D.FLOAT, "name": "a"}
    first = {"attn_scale": 0.5, **lengths(c), "use_causal_mask": True, "diagonal_alignment": TOP_LEFT, **more, **sink}
    bounds = {"diagonal_alignment": BOTTOM_RIGHT, "left_bound": 3, "right_bound": 1}
    for form in (first, {"use_causal_mask_bottom_right": True}, {**bounds, "dropout": philox(c)}):
        yield "sdpa_fp8_backward", tensors | form


WIDE_Q, WIDE_K, BLOCKED_K = (1, 2, 5, 32), (1, 1, 32, 32), (1, 1, 1, 32)
"""Dims of MXFP8: blocks of 32 elements along d, of V along s_kv; K as V, so that one dims do."""


def scaled(c: Case, name: str, dim: Sequence[int], axis: int) -> Form:
    """A tensor and its scales along ``axis``."""
    counts = [-(-n // 32) if a == axis else n for a, n in enumerate(dim)]
    return {name: c.t(name, dim, data=Data("normal", hi=0.25)), f"descale_{name}": c.t(f"descale_{name}", counts, D.FP8_E8M0)}


def mxfp8(c: Case) -> Iterator[tuple[str, Form]]:
    """As for sdpa."""
    tensors = scaled(c, "q", WIDE_Q, 3) | scaled(c, "k", WIDE_K, 3) | scaled(c, "v", WIDE_K, 2)
    more = {"compute_data_type": D.FLOAT, "name": "a", "sink_token": c.t("sink", (1, 2, 1, 1), D.FLOAT), "unfuse_fma": True}
    first = {"attn_scale": 0.01, "use_causal_mask": True, "diagonal_alignment": TOP_LEFT, "generate_stats": True, **more}
    bounds = {"diagonal_alignment": BOTTOM_RIGHT, "diagonal_band_left_bound": 3, "diagonal_band_right_bound": 1}
    for form in (first, {"use_causal_mask_bottom_right": True, "generate_stats": False}, {**bounds, "generate_stats": True}):
        yield "sdpa_mxfp8", tensors | form


def mxfp8_backward(c: Case) -> Iterator[tuple[str, Form]]:
    """As for sdpa_backward."""
    tensors = scaled(c, "q", WIDE_Q, 3) | scaled(c, "q_T", WIDE_Q, 2) | scaled(c, "k", WIDE_K, 3) | scaled(c, "k_T", WIDE_K, 2)
    tensors |= scaled(c, "v", WIDE_K, 3) | scaled(c, "dO", WIDE_Q, 3) | scaled(c, "dO_T", WIDE_Q, 2)
    tensors |= {n: c.t(n, WIDE_Q, D.BFLOAT16) for n in ("o_f16", "dO_f16")}
    tensors["stats"] = c.t("stats", (1, 2, 5, 1), D.FLOAT, data=Data("uniform", 3, 5))
    padding = {n: c.t(n, ONE, D.INT32, data=given(x)) for n, x in (("seq_len_q", 4), ("seq_len_kv", 30))}
    sink = {"sink_token": c.t("sink", (1, 2, 1, 1), D.FLOAT), "dSink_token": fresh(c, "dSink", (1, 2, 1, 1), D.FLOAT)}
    more = {"use_deterministic_algorithm": True, "compute_data_type": D.FLOAT, "name": "a", **sink}
    first = {"attn_scale": 0.01, "use_padding_mask": True, **padding, "use_causal_mask": True, "diagonal_alignment": TOP_LEFT, **more}
    bounds = {"diagonal_alignment": BOTTOM_RIGHT, "left_bound": 3, "right_bound": 1}
    for form in (first, {"use_causal_mask_bottom_right": True}, {**bounds, "dropout": philox(c)}):
        yield "sdpa_mxfp8_backward", tensors | form


def finish(c: Case, method: str, form: Form, results: list[Any]) -> None:
    """Dims and strides of O and of gradients, which the API wants, and the types of what is no large tensor."""
    backward, q, v = method.endswith("backward"), form["q"], form["v"]
    like = [q, form["k"], v] if backward else [None]
    for t, source in zip(results, like, strict=False):
        dim = tuple(source.get_dim()) if source is not None else (*q.get_dim()[:3], v.get_dim()[3])
        t.set_dim(dim).set_stride(tuple(c.graph.tensor(dim=dim, layout="row").get_stride()))
        if source is not None and source.ragged_offset is not None:
            t.set_ragged_offset(source.ragged_offset)
    if not backward and results[1] is not None:
        results[1].set_data_type(c.types.compute)
    for t in results[len(like) if backward else 2 :]:
        t.set_dim(ONE).set_stride(ONE).set_data_type(D.FLOAT)


TYPES = (*each(*FLOATS), Types(D.DOUBLE, compute=D.DOUBLE))
EIGHT = (Types(D.FP8_E4M3), Types(D.FP8_E5M2), Types(D.FP8_E4M3, out=D.BFLOAT16))
ALIASES = {"scaled_dot_product_flash_attention": sdpa, "scaled_dot_product_flash_attention_backward": sdpa_backward}
ROWS = (
    Row("sdpa", partial(sdpa, "sdpa"), TYPES, finish),
    Row("sdpa_backward", partial(sdpa_backward, "sdpa_backward"), TYPES, finish),
    *(Row(m, partial(f, m), TYPES[:1], finish) for m, f in ALIASES.items()),
    Row("sdpa_fp8", fp8, EIGHT, finish),
    Row("sdpa_fp8_backward", fp8_backward, EIGHT, finish),
    Row("sdpa_mxfp8", mxfp8, EIGHT[2:], finish),
    Row("sdpa_mxfp8_backward", mxfp8_backward, EIGHT[2:], finish),
)
