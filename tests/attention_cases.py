"""Attention problems by a few words: values of their tensors, graphs of the forward op and of its gradient, runs of both against the reference."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import graphdnn
from graphdnn import data_type as D
from graphdnn import reference
from graphdnn.engines import ENGINES
from tests.helpers import Outcome, check_graph, given, representable

TOP_LEFT, BOTTOM_RIGHT = graphdnn.diagonal_alignment.TOP_LEFT, graphdnn.diagonal_alignment.BOTTOM_RIGHT
SCORE_MODS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "softcap": lambda g, s, extra: g.mul(g.tanh(g.div(s, 3.0)), 3.0),
    "tensor": lambda g, s, extra: g.mul(g.add(s, extra), 0.5),
    "index": lambda g, s, extra: g.add(s, g.mul(g.sub(g.gen_index(s, 3), g.gen_index(s, 2)), -0.125)),
    "select": lambda g, s, extra: g.binary_select(s, float("-inf"), g.cmp_ge(g.add(g.gen_index(s, 2), 2.0), g.gen_index(s, 3))),
    "square": lambda g, s, extra: g.sub(s, g.mul(0.0625, g.mul(s, s))),
}


@dataclass(frozen=True)
class Case:
    """One problem. ``layout``: how Q, K, V, O and the gradients lie; "packed" (with ``lengths``): rows of all batches one after the other.
    ``lengths``: of Q and of K and V, by batch. ``bias``, ``extra``: dims. ``page``: rows of a page. ``window``: (left, right, bottom right)."""

    s_q: int = 33
    s_kv: int = 33
    d: int = 16
    d_v: int = 0
    b: int = 2
    h: int = 2
    h_k: int = 0
    h_v: int = 0
    dtype: D = D.FLOAT
    compute: D = D.FLOAT
    layout: str = "bhsd"
    scale: float | None | str = 0.25
    window: tuple[int | None, int | None, bool] = (None, None, False)
    alibi: bool = False
    bias: tuple[int, ...] = ()
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    blocks: bool = False
    dropout: float = 0.0
    dropout_mask: bool = False
    sink: bool = False
    score_mod: str = ""
    page: int = 0
    packed_tables: bool = False
    statistics: bool = True
    spread: float = 1.0
    seeds_by_value: bool = False

    @property
    def dims(self) -> dict[str, tuple[int, ...]]:
        """Dims by tensor name."""
        h_k = self.h_k or self.h
        h_v, d_v = self.h_v or h_k, self.d_v or self.d
        sizes = {"q": (self.h, self.s_q, self.d), "k": (h_k, self.s_kv, self.d), "v": (h_v, self.s_kv, d_v), "o": (self.h, self.s_q, d_v)}
        found = {n: (self.b, *x) for n, x in sizes.items()}
        if self.page:
            pages = self.b * -(-self.s_kv // self.page) + 1
            found |= {n: (pages, found[n][1], self.page, found[n][3]) for n in "kv"}
        return found | {"do": found["o"], "stats": (self.b, self.h, self.s_q, 1)}


def strides(dim: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Strides of [b, h, s, d]."""
    b, h, s, d = dim
    return {
        "bhsd": (h * s * d, s * d, d, 1),
        "bshd": (s * h * d, d, h * d, 1),
        "sbhd": (h * d, d, b * h * d, 1),
        "gaps": (h * (s * (2 * d + 3) + 5), s * (2 * d + 3) + 5, 2 * d + 3, 2),
        "bhds": (h * s * d, s * d, 1, s),
        "interleaved": (s * h * 3 * d, d, h * 3 * d, 1),
        "packed": (s * h * d, d, h * d, 1),
    }[layout]


def feeds(case: Case, seed: int = 0) -> dict[str, Any]:
    """Values of every input of the forward op by name."""
    rng = np.random.default_rng([seed, zlib.crc32(repr(case).encode())])
    found = {n: representable(rng.standard_normal(case.dims[n]) * case.spread, case.dtype) for n in "qkv"}
    scores = (case.b, case.h, case.s_q, case.s_kv)
    if case.bias:
        found["bias"] = representable(rng.standard_normal(case.bias), case.dtype)
    if case.lengths:
        found |= {n: np.reshape(x, (case.b, 1, 1, 1)) for n, x in zip(("len_q", "len_kv"), case.lengths, strict=True)}
    if case.layout == "packed":
        for n, x in (("q", 0), ("k", 1), ("v", 1), ("o", 0)):
            _, h, _, d = case.dims[n]
            found[f"{n}_start"] = np.concatenate([[0], np.cumsum(np.asarray(case.lengths[x]) + 1)]).reshape(-1, 1, 1, 1) * h * d  # one row between
        found["stats_start"] = np.concatenate([[0], np.cumsum(case.lengths[0])]).reshape(-1, 1, 1, 1) * case.h
    if case.blocks:
        found["blocks"] = rng.integers(0, 256, (case.b, case.h, -(-case.s_q // 128), -(-case.s_kv // 1024)))
    if case.dropout:
        found |= {"seed": np.array(rng.integers(0, 2**62)), "offset": np.array(rng.integers(0, 2**40))}
    if case.dropout_mask:
        found |= {"drop": (rng.random(scores) < 0.7) * 1.0, "drop_scale": np.array(1.25), "drop_inv": np.array(0.8)}
    if case.sink:
        found["sink"] = representable(rng.standard_normal((1, case.h, 1, 1)), case.compute)
    if case.score_mod == "tensor":
        found["extra"] = representable(rng.standard_normal((case.h, 1, case.s_kv)), D.FLOAT)
    if case.scale == "tensor":
        found["scale"] = np.array(0.25)
    if case.page:
        each = -(-case.s_kv // case.page)
        order = rng.permutation(case.b * each + 1)[: case.b * each].reshape(case.b, 1, each, 1)
        found |= {"k_pages": order, "v_pages": order[::-1].copy()}
        if case.packed_tables:
            found["pages_start"] = (np.arange(case.b + 1) * each).reshape(-1, 1, 1, 1)
    return found


class Declared:
    """The tensors of a case in a graph, and the arguments that forward and backward share."""

    def __init__(self, g: Any, case: Case, values: dict[str, Any]) -> None:
        self.g, self.case, self.values = g, case, values
        self.offsets: dict[str, Any] = {}

    def tensor(self, name: str, dtype: D | None = None) -> Any:
        """An input: Q and the like as the layout says, everything else row-major."""
        case = self.case
        if name in ("q", "k", "v", "o", "do"):
            t = self.g.tensor(dim=case.dims[name], stride=strides(case.dims[name], case.layout), data_type=case.dtype, name=name)
            return self._packed(t, "o" if name == "do" else name)
        dim = self.values[name].shape or (1, 1, 1, 1)
        t = self.g.tensor(dim=dim, layout="row", data_type=dtype or D.FLOAT, name=name)
        if name == "stats" and case.layout == "packed":
            return self._packed(t.set_stride((case.h * case.s_q, 1, case.h, 1)), name)
        return t

    def _packed(self, t: Any, name: str) -> Any:
        if self.case.layout != "packed":
            return t
        if f"{name}_start" not in self.offsets:
            self.offsets[f"{name}_start"] = self.tensor(f"{name}_start", D.INT64 if name == "k" else D.INT32)
        return t.set_ragged_offset(self.offsets[f"{name}_start"])

    def output(self, t: Any, name: str, like: str, dtype: D | None = None) -> Any:
        """Dims, strides, data type and name of a result."""
        case, dim = self.case, self.case.dims[like]
        if like == "stats":
            t.set_dim(dim).set_stride((case.h * case.s_q, case.s_q, 1, 1))
            if case.layout == "packed":
                self._packed(t.set_stride((case.h * case.s_q, 1, case.h, 1)), "stats")
        else:
            self._packed(t.set_dim(dim).set_stride(strides(dim, case.layout)), like)
        return t.set_data_type(dtype or case.dtype).set_output(True).set_name(name)

    def common(self, backward: bool = False) -> dict[str, Any]:
        """Keywords."""
        case, has = self.case, self.values
        left, right, bottom = case.window
        kinds = {"by value": graphdnn.scalar_type.RUNTIME_PARAM, "constant": graphdnn.scalar_type.COMPILE_TIME_CONST}
        scale = self.tensor("scale") if case.scale == "tensor" else case.scale
        scale = self.g.tensor_scalar(0.25, kinds[scale]) if scale in kinds else scale
        found: dict[str, Any] = {"attn_scale": scale, "use_alibi_mask": case.alibi, "name": "a"}
        found |= {"diagonal_band_left_bound": left, "diagonal_band_right_bound": right, "diagonal_alignment": BOTTOM_RIGHT if bottom else TOP_LEFT}
        if case.bias:
            found["bias"] = self.tensor("bias", case.dtype)
        if case.lengths:
            found |= {"use_padding_mask": True, "seq_len_q": self.tensor("len_q", D.INT32), "seq_len_kv": self.tensor("len_kv", D.INT32)}
        if case.dropout:
            numbers = [self.tensor(n, D.INT64).set_is_pass_by_value(case.seeds_by_value) for n in ("seed", "offset")]
            found["dropout"] = (case.dropout, *numbers)
        if case.dropout_mask:
            names = ("drop", "drop_scale", "drop_inv")[: 3 if backward else 2]
            found["dropout"] = tuple(self.tensor(n) for n in names)
        if case.sink:
            found["sink_token"] = self.tensor("sink", case.compute)
        if case.score_mod:
            extra = self.tensor("extra") if "extra" in has else None
            found["score_mod"] = lambda g, s: SCORE_MODS[case.score_mod](g, s, extra)
        return found


def forward(case: Case, values: dict[str, Any]) -> Callable[[Any], None]:
    """Declares the forward op: outputs o, stats, top, total, dump."""

    def build(g: Any) -> None:
        has = Declared(g, case, values)
        more: dict[str, Any] = has.common() | {"generate_stats": case.statistics}
        if case.blocks:
            more["block_mask"] = has.tensor("blocks", D.UINT8)
        if case.page:
            for n in "kv":
                more[f"paged_attention_{n}_table"] = table = has.tensor(f"{n}_pages", D.INT32)
                if case.packed_tables:
                    starts = has.offsets.setdefault("pages_start", None) or has.tensor("pages_start", D.INT32)
                    has.offsets["pages_start"] = starts
                    table.set_ragged_offset(starts)
            more["paged_attention_max_seq_len_kv"] = case.s_kv
        dim = case.dims["stats"]
        if case.statistics and case.layout != "packed":
            names = (("score_max", "top"), ("score_sum_exp", "total"))
            more |= {n: g.tensor(dim=dim, layout="row", data_type=case.compute, name=t) for n, t in names}
        if case.dropout:
            more["rng_dump"] = g.tensor(dim=(case.b, case.h, case.s_q, case.s_kv), layout="row", data_type=D.FLOAT, name="dump")
        o, stats = g.sdpa(*(has.tensor(n) for n in "qkv"), **more)
        has.output(o, "o", "o")
        if stats is not None:
            has.output(stats, "stats", "stats", case.compute)

    return build


def backward(case: Case, values: dict[str, Any]) -> Callable[[Any], None]:
    """Declares the gradient: outputs dq, dk, dv, dbias, dsink."""

    def build(g: Any) -> None:
        has = Declared(g, case, values)
        more = has.common(backward=True)
        if case.bias:
            more["dBias"] = g.tensor(dim=case.bias, layout="row", data_type=case.dtype, name="dbias")
        if case.sink:
            more["dSink_token"] = g.tensor(dim=(1, case.h, 1, 1), layout="row", data_type=case.compute, name="dsink")
        results = g.sdpa_backward(*(has.tensor(n) for n in ("q", "k", "v", "o", "do")), has.tensor("stats", case.compute), **more)
        for t, n in zip(results, "qkv", strict=True):
            has.output(t, f"d{n}", n)

    return build


def arguments(case: Case) -> dict[str, Any]:
    """Arguments of the graph."""
    return {"io_data_type": case.dtype, "intermediate_data_type": case.compute, "compute_data_type": case.compute}


def results(case: Case, values: dict[str, Any], build: Callable[[Any], None]) -> dict[str, Any]:
    """What the reference says, by tensor name; no engine is asked."""
    g = graphdnn.pygraph(device="cpu", **arguments(case))
    build(g)
    g.build_operation_graph()
    og = g._opgraph
    found = reference.run(og, {i: values[og.tensors[i].name] for i in og.inputs if og.tensors[i].value is None})
    return {og.tensors[i].name: x for i, x in found.items()}


def with_results(case: Case, values: dict[str, Any], seed: int = 1) -> dict[str, Any]:
    """``values``, O and Stats of the forward reference, and dO."""
    plain = replace(case, blocks=False, page=0, statistics=True)
    found = results(plain, values, forward(plain, values))
    do = representable(np.random.default_rng(seed).standard_normal(case.dims["o"]), case.dtype)
    return values | {"o": found["o"], "stats": found["stats"], "do": do}


def random_case(seed: int) -> Case:
    """A small problem with any of the options that forward and backward share."""
    rng = np.random.default_rng(seed)

    def chance(p: float) -> bool:
        return bool(rng.random() < p)

    b, h = int(rng.integers(1, 4)), int(rng.choice([1, 2, 4, 6]))
    s_q, s_kv, d, d_v = (int(n) for n in rng.integers(1, 45, 4))
    divisors = [n for n in range(1, h + 1) if h % n == 0]
    bound = int(rng.integers(0, 12)) if chance(0.4) else None
    right = 0 if chance(0.5) else None
    bottom = chance(0.5) and (bound, right) != (None, None)
    lengths = tuple(tuple(int(n) for n in rng.integers(0, s + 1, b)) for s in (s_q, s_kv)) if chance(0.4) else None
    bias = tuple(int(n) if chance(0.6) else 1 for n in (b, h, s_q, s_kv)) if chance(0.4) else ()
    dtype = D(int(rng.choice([int(t) for t in (D.FLOAT, D.HALF, D.BFLOAT16, D.DOUBLE)])))
    layouts = ["bhsd", "bshd", "sbhd", "gaps"] + (["packed"] * 4 if lengths else [])
    return Case(
        s_q, s_kv, d, d_v, b, h, int(rng.choice(divisors)), int(rng.choice(divisors)), dtype, D.DOUBLE if dtype is D.DOUBLE else D.FLOAT,
        layout=str(rng.choice(layouts)), scale=float(np.float32(1 / np.sqrt(d))), window=(bound, right, bottom),
        alibi=chance(0.3), bias=bias, lengths=lengths, dropout=0.25 if chance(0.25) else 0.0, sink=chance(0.3),
        score_mod=str(rng.choice(list(SCORE_MODS))) if chance(0.3) else "",
    )  # fmt: skip


def need(engine: str) -> None:
    """The engine that a test is about must be there: otherwise it fails, and says so."""
    assert engine in {e.name for e in ENGINES}, f"engine {engine} is not there"


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    """What by-value tensors are given."""
    return {"values": {n: int(values[n]) for n in ("seed", "offset") if n in values}}


def run_forward(case: Case, device: str, values: dict[str, Any] | None = None, **more: Any) -> Outcome:
    """The forward op on ``device`` against its reference."""
    need("attention_fwd")
    values = feeds(case) if values is None else values
    data = {n: given(x) for n, x in values.items()}
    return check_graph(forward(case, values), device, **_numbers(values), data=data, graph=arguments(case), **{"may_exclude": 0.0, "runs": 1} | more)


def run_backward(case: Case, device: str, values: dict[str, Any] | None = None, **more: Any) -> Outcome:
    """The gradient on ``device`` against its reference."""
    need("attention_bwd")
    values = with_results(case, feeds(case)) if values is None else values
    data = {n: given(x) for n, x in values.items()}
    return check_graph(backward(case, values), device, **_numbers(values), data=data, graph=arguments(case), **{"may_exclude": 0.0, "runs": 1} | more)
