"""Attention on MXFP8: SDPA_MXFP8_FWD, SDPA_MXFP8_BWD, as BLOCK_SCALE_DEQUANTIZE and SDPA or SDPA_BWD.

A product of MXFP8 numbers has its blocks of 32 along what it sums over. Forward, S = Q K^T sums over elements of a row, O = P V over rows of V: so
are their scales. The gradient sums over elements of a row in S and in dP = dO V^T, over rows in dV = P^T dO, dK = dS^T Q and dQ = dS K, for which
it has copies of the same values, quantized along the rows: dO_T, Q_T, K_T (dims of the plain ones). D = sum dO * O of a row reads both in 16 bits.

All of it is one SDPA_BWD on rows three times as long, whose products only meet where they should, because the rest is 0:

    Q [q, 0, q_T]   K [k, k_T, 0]   dO [do, do_T, do_16]   V [v, 0, 0]   O [0, 0, o_16]

S = q k^T, dP = do v^T, D = sum do_16 o_16, and dQ has dS k_T in its second part, dK dS^T q_T in its third, dV P^T do_T in its second. (Where a copy
is NaN or infinite and the plain one is not, 0 times it makes the whole row NaN.) Without copies, q, k and do_16 are in their places.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from graphdnn.ir.node import Node, NodeDecl
from graphdnn.ir.tensor import Dims, TensorDecl
from graphdnn.opspecs import attention_reference as formulas
from graphdnn.opspecs import attention_rules as rules
from graphdnn.opspecs import block_scale, formula, shapes
from graphdnn.opspecs.attention import FORWARD_ATTRS, FORWARD_PORTS, GRADIENT_ATTRS, GRADIENT_PORTS, infer_backward, infer_forward
from graphdnn.opspecs.attention_fp8 import add, composite, deliver, largest, scale, virtual
from graphdnn.opspecs.attention_parts import INTEGERS
from graphdnn.opspecs.expansion import Expansion
from graphdnn.opspecs.formula import Arrays
from graphdnn.opspecs.scalars import Array

BLOCK = 32
_DEQUANTIZE = next(s for s in block_scale.SPECS if s.tag == "BLOCK_SCALE_DEQUANTIZE")
_ALONG_ROW, _ALONG_ROWS = (1, 1, 1, BLOCK), (1, 1, BLOCK, 1)
_LIKE = {"Q_T": "Q", "K_T": "K", "dO": "O", "dO_T": "O", "dO_f16": "O"}
"""Ports of the gradient, and those whose dims they have."""
_SCALED = ("Q", "K", "V", "Q_T", "K_T", "dO", "dO_T")


def _operands(ports: Iterable[str], backward: bool) -> tuple[str, ...]:
    """The quantized operands among ``ports`` that are read."""
    return tuple(p for p in (_SCALED if backward else _SCALED[:3]) if p in ports and (p != "dO" or "Descale_dO" in ports))


def _blocks(port: str, backward: bool) -> Dims:
    return _ALONG_ROWS if port.endswith("_T") or (port == "V" and not backward) else _ALONG_ROW


def _dequantized(node: NodeDecl, port: str, backward: bool) -> NodeDecl:
    """The node that gives the values of the operand at ``port``."""
    shapes.require(node, (f"Descale_{port}",), ())
    x, blocks = node.inputs[port], _blocks(port, backward)
    y = TensorDecl(f"{node.label}.{port}", dtype=node.compute, virtual=True)
    return NodeDecl(_DEQUANTIZE.tag, node.name, {"X": x, "scale": node.inputs[f"Descale_{port}"]}, {"Y": y}, {"block_size": blocks}, node.compute)


# ----------------------------------------------------------------------------------------------------------------------------- shapes and types
def _infer(node: NodeDecl, backward: bool) -> None:
    (infer_backward if backward else infer_forward)(node)
    for port, like in _LIKE.items() if backward else ():
        rules.same(node, port, shapes.dims(node.inputs[like]))
    for port in _operands(node.inputs, backward):
        _DEQUANTIZE.infer(_dequantized(node, port, backward))
    largest(node)


def _check(node: NodeDecl, backward: bool) -> None:
    rules.check(node)
    rules.not_packed(node)
    for port in _operands(node.inputs, backward):
        _DEQUANTIZE.check(_dequantized(node, port, backward))


# ------------------------------------------------------------------------------------------------------------------------------------- expansion
def _plain(e: Expansion, port: str, backward: bool) -> TensorDecl:
    made = _dequantized(e.node, port, backward)
    _DEQUANTIZE.infer(made)
    made.name, y = f"{e.label}.{len(e.nodes)}", made.outputs["Y"]
    y.dtype = e.compute
    e.nodes.append(made)
    return y


def _expand_forward(e: Expansion) -> None:
    inputs = {port: _plain(e, port, False) for port in "QKV"}
    factor, o = scale(e), virtual(e, "O", tuple(e.node.outputs["O"].dim or ()))
    add(e, "SDPA", inputs | ({} if factor is None else {"Attn_scale": factor}), {"O": o}, FORWARD_PORTS, FORWARD_ATTRS)
    deliver(e, "O", o, None)


_PARTS = {"Q": ("Q", "", "Q_T"), "K": ("K", "K_T", ""), "V": ("V", "", ""), "dO": ("dO", "dO_T", "dO_f16"), "O": ("", "", "O")}
_PART_OF = {"dQ": ("Q", 1), "dK": ("K", 2), "dV": ("V", 1)}
"""See the module: what the rows consist of ("": zeros), and in which part each gradient is."""


def _expand_backward(e: Expansion) -> None:
    plain = {port: _plain(e, port, True) for port in _operands(e.node.inputs, True)}
    plain |= {port: e.pointwise("IDENTITY", e.input(port)) for port in ("O", "dO_f16")}
    for port, other in (("Q_T", "Q"), ("K_T", "K"), ("dO_T", "dO_f16"), ("dO", "dO_f16")):
        plain.setdefault(port, plain[other])

    def row(port: str, parts: tuple[str, ...]) -> TensorDecl:
        dim = tuple(plain[port].dim or ())
        return e.concatenate([plain[p] if p else e.zeros(dim, e.compute) for p in parts], 3)

    inputs = {port: row(port, parts) for port, parts in _PARTS.items()}
    factor = scale(e)
    made = {port: virtual(e, port, tuple(inputs[of].dim or ())) for port, (of, _) in _PART_OF.items()}
    add(e, "SDPA_BWD", inputs | ({} if factor is None else {"Attn_scale": factor}), made, GRADIENT_PORTS, GRADIENT_ATTRS)
    for port, (of, part) in _PART_OF.items():
        *lead, d = tuple(plain[of].dim or ())
        deliver(e, port, e.slice(made[port], [*((0, n) for n in lead), (part * d, (part + 1) * d)]), None)


# ------------------------------------------------------------------------------------------------------------------------------------ references
def _value(a: Arrays, port: str, backward: bool, node: Node) -> Array:
    attrs = (("block_size", _blocks(port, backward)),)
    made = Node(_DEQUANTIZE.tag, node.name, (("X", 0), ("scale", 1)), (("Y", 2),), attrs, node.compute)
    return np.asarray(_DEQUANTIZE.reference(made, [a[port].shape], [a[port], a[f"Descale_{port}"]])[0])


def _plain_arrays(a: Arrays, backward: bool, node: Node) -> Arrays:
    kept = {p: x for p, x in a.items() if not p.startswith("Descale_")}
    return kept | ({"dO": a["dO_f16"]} if backward else {}) | {p: _value(a, p, backward, node) for p in _operands(a, backward)}


def _with_largest(found: Arrays, ports: tuple[str, ...]) -> Arrays:
    return found | {f"Amax_{p}": np.max(np.abs(found[p]), initial=0.0) for p in ports}


def _forward(a: Arrays, dims: dict[str, Dims], node: Node) -> Arrays:
    return _with_largest(formulas.forward_formula(_plain_arrays(a, False, node), dims, node), ("O",))


def _backward(a: Arrays, dims: dict[str, Dims], node: Node) -> Arrays:
    return _with_largest(formulas.backward_formula(_plain_arrays(a, True, node), dims, node), ("dQ", "dK", "dV"))


_COPIES = ("Q_T", "K_T", "dO_T", "Descale_Q_T", "Descale_K_T", "Descale_dO", "Descale_dO_T")
_DESCALES = ("Descale_Q", "Descale_K", "Descale_V")
_MASKS = ("SEQ_LEN_Q", "SEQ_LEN_KV", "Seed", "Offset", "Dropout_mask", "Dropout_scale", "Dropout_scale_inv")
SPECS = (
    composite(
        "SDPA_MXFP8_FWD",
        (("Q", "K", "V", *_DESCALES, "Attn_scale", "SINK_TOKEN"), ("O", "Stats", "Amax_O"), ("Attn_scale", "SINK_TOKEN", "Stats", "Amax_O")),
        FORWARD_ATTRS,
        infer=lambda node: _infer(node, False),
        check=lambda node: _check(node, False),
        expand=_expand_forward,
        reference=formula.reference(_forward, INTEGERS),
    ),
    composite(
        "SDPA_MXFP8_BWD",
        (
            ("Q", "K", "V", "O", "dO_f16", "dO", "Stats", *_DESCALES, *_COPIES, "Attn_scale", *_MASKS, "SINK_TOKEN"),
            ("dQ", "dK", "dV", "Amax_dQ", "Amax_dK", "Amax_dV", "DSINK_TOKEN"),
            (*_COPIES, "Attn_scale", *_MASKS, "SINK_TOKEN", "Amax_dQ", "Amax_dK", "Amax_dV", "DSINK_TOKEN"),
        ),
        GRADIENT_ATTRS,
        infer=lambda node: _infer(node, True),
        check=lambda node: _check(node, True),
        expand=_expand_backward,
        reference=formula.reference(_backward, INTEGERS),
    ),
)
