"""Attention on 8-bit floats: SDPA_FP8_FWD, SDPA_FP8_BWD (one scale a tensor), as SDPA or SDPA_BWD with scaling around it.

x8 stands for descale_x * x8; a result r is stored as scale_r * r and its largest magnitude before that is in Amax_r. The weights P and the gradient
dS of the scores are numbers of the compute type that never are in memory: they are not rounded to 8 bits, which hardware does to multiply them, so
scale_s, descale_s and scale_dP, descale_dP count by their products (1 where they belong together). Amax_S is the largest weight of a row's softmax
(with a sink, the sink counts as a column), Amax_dP the largest |dS| before attn_scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphdnn.ir import layout
from graphdnn.ir.node import Node, NodeDecl
from graphdnn.ir.tensor import Dims, TensorDecl
from graphdnn.opspecs import attention_reference as formulas
from graphdnn.opspecs import attention_rules as rules
from graphdnn.opspecs import formula
from graphdnn.opspecs.attention import FORWARD_ATTRS, FORWARD_PORTS, GRADIENT_ATTRS, GRADIENT_PORTS, infer_backward, infer_forward
from graphdnn.opspecs.attention_parts import INTEGERS, PAGES, SCORE_PORTS
from graphdnn.opspecs.expansion import Expansion
from graphdnn.opspecs.formula import Arrays
from graphdnn.opspecs.spec import OpSpec

FORWARD_SCALES = ("Descale_Q", "Descale_K", "Descale_V", "Descale_S", "Scale_S", "Scale_O")
GRADIENT_SCALES = tuple(f"Descale_{x}" for x in ("Q", "K", "V", "O", "dO", "S", "dP")) + tuple(f"Scale_{x}" for x in ("S", "dQ", "dK", "dV", "dP"))


# ----------------------------------------------------------------------------------------------------------------------------- shapes and types
def largest(node: NodeDecl) -> None:
    """Amax outputs lie as the user has set them, one element each."""
    ports = [p for p in node.outputs if p.startswith("Amax_")]
    rules.given_by_user(node, ports)
    for port in ports:
        rules.one_element(node, port)


def _infer(node: NodeDecl, backward: bool) -> None:
    for port in GRADIENT_SCALES if backward else FORWARD_SCALES:
        if port in node.inputs:
            rules.one_element(node, port)
    (infer_backward if backward else infer_forward)(node)
    largest(node)


def check(node: NodeDecl) -> None:
    """As for 16-bit attention; nothing may be packed."""
    rules.check(node)
    rules.not_packed(node)


# ------------------------------------------------------------------------------------------------------------------------------------- expansion
def product(e: Expansion, *factors: TensorDecl | None) -> TensorDecl | None:
    """Product of those that there are."""
    found: TensorDecl | None = None
    for f in factors:
        found = f if found is None else found if f is None else e.pointwise("MUL", found, f)
    return found


def scale(e: Expansion, *more: TensorDecl | None) -> TensorDecl | None:
    """attn_scale, tensor or number, times ``more``."""
    value = e.node.attrs.get("attn_scale_value")
    return product(e, *more, e.given("Attn_scale"), None if value is None else e.constant(value, 4))


def virtual(e: Expansion, name: str, dim: Dims) -> TensorDecl:
    """An intermediate result in the compute type."""
    return TensorDecl(f"{e.label}.{name}", dim, layout.packed(dim), e.compute, virtual=True)


def add(e: Expansion, op: str, inputs: dict[str, TensorDecl], made: dict[str, TensorDecl], ports: Sequence[str], attrs: Sequence[str]) -> None:
    """A node ``op``: ``inputs`` and those of the composite node that it also has, outputs ``made`` and those of the composite node."""
    passed = {p: t for p, t in e.node.inputs.items() if p in ports and p != "Attn_scale"} | {p: t for p, t in inputs.items() if t is not None}
    outputs = {p: t for p, t in e.node.outputs.items() if p in ports} | made
    kept = {n: v for n, v in e.node.attrs.items() if n in attrs} | {"attn_scale_value": None}
    passed, outputs = ({p: found[p] for p in ports if p in found} for found in (passed, outputs))
    e.nodes.append(NodeDecl(op, f"{e.label}.{len(e.nodes)}", passed, outputs, kept, e.compute))


def deliver(e: Expansion, port: str, value: TensorDecl, factor: TensorDecl | None) -> None:
    """``value`` scaled at ``port``, and its largest magnitude at the port for it."""
    if e.output(f"Amax_{port}") is not None:
        e.deliver(f"Amax_{port}", e.reduction("AMAX", value, range(4)))
    e.deliver(port, value if factor is None else e.pointwise("MUL", value, factor))


def largest_weight(e: Expansion, total: TensorDecl) -> None:
    """Amax_S from the sums of the rows, in each of which the largest weight is 1 / sum; a sum of NaN stays NaN."""
    zero = e.constant(0, 4)
    share = e.pointwise("BINARY_SELECT", zero, e.pointwise("RECIPROCAL", total), e.pointwise("CMP_EQ", total, zero))
    e.deliver("Amax_S", e.reduction("AMAX", share, range(4)))


def _expand_forward(e: Expansion) -> None:
    dim = tuple(e.node.outputs["O"].dim or ())
    o, total = virtual(e, "O", dim), virtual(e, "Sum_exp", (*dim[:3], 1))  # the caller's Sum_exp may be rounded: Amax_S is of the exact one
    factor = scale(e, e.input("Descale_Q"), e.input("Descale_K"))
    assert factor is not None, "two of its factors are required"
    add(e, "SDPA", {"Attn_scale": factor}, {"O": o, "Sum_exp": total}, FORWARD_PORTS, FORWARD_ATTRS)
    if e.output("Amax_S") is not None:
        largest_weight(e, total)
    e.deliver("Sum_exp", total)
    whole = product(e, e.input("Descale_V"), e.input("Descale_S"), e.input("Scale_S"))
    assert whole is not None, "three factors"
    deliver(e, "O", e.pointwise("MUL", o, whole), e.input("Scale_O"))


def _expand_backward(e: Expansion) -> None:
    plain = {p: e.pointwise("MUL", e.input(p), e.input(f"Descale_{p}")) for p in ("Q", "K", "V", "O", "dO")}
    made = {f"d{p}": virtual(e, f"d{p}", tuple(plain[p].dim or ())) for p in "QKV"}
    rows = tuple(plain["Q"].dim or ())
    peaks = {"dS_max": virtual(e, "dS_max", (*rows[:3], 1))} if e.output("Amax_dP") is not None else {}
    factor = scale(e)
    add(e, "SDPA_BWD", plain | ({"Attn_scale": factor} if factor is not None else {}), made | peaks, GRADIENT_PORTS, GRADIENT_ATTRS)
    for peak in peaks.values():
        e.deliver("Amax_dP", e.reduction("AMAX", peak, range(4)))
    for p, of in (("dQ", "dP"), ("dK", "dP"), ("dV", "S")):
        factor = e.pointwise("MUL", e.input(f"Scale_{of}"), e.input(f"Descale_{of}"))
        deliver(e, p, e.pointwise("MUL", made[p], factor), e.input(f"Scale_{p}"))


# ------------------------------------------------------------------------------------------------------------------------------------ references
def _forward(a: Arrays, dims: dict[str, Dims], node: Node) -> Arrays:
    n = {p: formulas.number(a, p) for p in FORWARD_SCALES}
    plain = a | {p: a[p] * n[f"Descale_{p}"] for p in "QKV"}
    found = formulas.forward_formula({p: x for p, x in plain.items() if p not in FORWARD_SCALES}, dims, node)
    o = found["O"] * n["Descale_S"] * n["Scale_S"]
    share = np.where(found["Sum_exp"] == 0, 0.0, 1 / found["Sum_exp"])
    return found | {"O": o * n["Scale_O"], "Amax_O": np.max(np.abs(o), initial=0.0), "Amax_S": np.max(share, initial=0.0)}


def _backward(a: Arrays, dims: dict[str, Dims], node: Node) -> Arrays:
    n = {p: formulas.number(a, p) for p in GRADIENT_SCALES}
    plain = a | {p: a[p] * n[f"Descale_{p}"] for p in ("Q", "K", "V", "O", "dO")}
    found = formulas.backward_formula({p: x for p, x in plain.items() if p not in GRADIENT_SCALES}, dims, node)
    found["Amax_dP"] = np.max(found["dS_max"], initial=0.0)
    for p, of in (("dQ", "dP"), ("dK", "dP"), ("dV", "S")):
        whole = found[p] * n[f"Scale_{of}"] * n[f"Descale_{of}"]
        found |= {p: whole * n[f"Scale_{p}"], f"Amax_{p}": np.max(np.abs(whole), initial=0.0)}
    return found


def composite(tag: str, ports: tuple[Sequence[str], Sequence[str], Sequence[str]], attrs: Sequence[str], **functions: Any) -> OpSpec:
    """A spec; ``ports``: inputs, outputs, those that may be missing."""
    inputs, outputs, optional = (tuple(p) for p in ports)
    return OpSpec(tag, "composite", inputs, outputs, optional=optional, attrs=tuple(attrs), domain="float", integers=INTEGERS, **functions)


_PLAIN = ("Bias", "SEQ_LEN_Q", "SEQ_LEN_KV", "Seed", "Offset", "Dropout_mask", "Dropout_scale", "SINK_TOKEN", "Attn_scale", *SCORE_PORTS)
_PAGES = tuple(PAGES.values())
_STATISTICS = ("Stats", "Max", "Sum_exp", "RNG_DUMP")
SPECS = (
    composite(
        "SDPA_FP8_FWD",
        (
            ("Q", "K", "V", *FORWARD_SCALES, *_PLAIN, *_PAGES),
            ("O", *_STATISTICS, "Amax_S", "Amax_O"),
            (*_PLAIN, *_PAGES, *_STATISTICS, "Amax_S", "Amax_O"),
        ),
        FORWARD_ATTRS,
        infer=lambda node: _infer(node, False),
        check=check,
        expand=_expand_forward,
        reference=formula.reference(_forward, INTEGERS),
    ),
    composite(
        "SDPA_FP8_BWD",
        (
            ("Q", "K", "V", "O", "dO", "Stats", *GRADIENT_SCALES, *_PLAIN, "Dropout_scale_inv"),
            ("dQ", "dK", "dV", "Amax_dQ", "Amax_dK", "Amax_dV", "Amax_dP", "DSINK_TOKEN"),
            (*_PLAIN, "Dropout_scale_inv", "Amax_dQ", "Amax_dK", "Amax_dV", "Amax_dP", "DSINK_TOKEN"),
        ),
        GRADIENT_ATTRS,
        infer=lambda node: _infer(node, True),
        check=check,
        expand=_expand_backward,
        reference=formula.reference(_backward, INTEGERS),
    ),
)
