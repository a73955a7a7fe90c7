"""Attention on MXFP8: SDPA_MXFP8_FWD, SDPA_MXFP8_BWD, as BLOCK_SCALE_DEQUANTIZE and SDPA or SDPA_BWD.

Q and K have a scale for every 32 elements of a row, V in the forward op for every 32 rows, in the gradient for every 32 elements of a row. The
gradient reads O and dO in 16 bits; the copies quantized along the other axis (Q_T, K_T, dO_T) and the quantized dO, which hardware multiplies, are
not read.
"""

from __future__ import annotations

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


def _blocks(port: str, backward: bool) -> Dims:
    return _ALONG_ROWS if port == "V" and not backward else _ALONG_ROW


def _dequantized(node: NodeDecl, port: str, backward: bool) -> NodeDecl:
    """The node that gives the values of the operand at ``port``."""
    x, blocks = node.inputs[port], _blocks(port, backward)
    y = TensorDecl(f"{node.label}.{port}", dtype=node.compute, virtual=True)
    return NodeDecl(_DEQUANTIZE.tag, node.name, {"X": x, "scale": node.inputs[f"Descale_{port}"]}, {"Y": y}, {"block_size": blocks}, node.compute)


# ----------------------------------------------------------------------------------------------------------------------------- shapes and types
def _infer(node: NodeDecl, backward: bool) -> None:
    (infer_backward if backward else infer_forward)(node)
    if backward:
        rules.same(node, "dO_f16", shapes.dims(node.inputs["O"]))
    for port in "QKV":
        _DEQUANTIZE.infer(_dequantized(node, port, backward))
    largest(node)


def _check(node: NodeDecl, backward: bool) -> None:
    rules.check(node)
    rules.not_packed(node)
    for port in "QKV":
        _DEQUANTIZE.check(_dequantized(node, port, backward))


# ------------------------------------------------------------------------------------------------------------------------------------- expansion
def _plain(e: Expansion, port: str, backward: bool) -> TensorDecl:
    made = _dequantized(e.node, port, backward)
    _DEQUANTIZE.infer(made)
    made.name, y = f"{e.label}.{len(e.nodes)}", made.outputs["Y"]
    y.dtype = e.compute
    e.nodes.append(made)
    return y


def _expand(e: Expansion, backward: bool) -> None:
    inputs = {port: _plain(e, port, backward) for port in "QKV"} | ({"dO": e.input("dO_f16")} if backward else {})
    factor = scale(e)
    inputs |= {} if factor is None else {"Attn_scale": factor}
    results = ("dQ", "dK", "dV") if backward else ("O",)
    made = {}
    for port in results:
        out = e.output(port)
        assert out is not None, "required"
        made[port] = virtual(e, port, tuple(out.dim or ()))
    op, ports, attrs = ("SDPA_BWD", GRADIENT_PORTS, GRADIENT_ATTRS) if backward else ("SDPA", FORWARD_PORTS, FORWARD_ATTRS)
    add(e, op, inputs, made, ports, attrs)
    for port, value in made.items():
        deliver(e, port, value, None)


# ------------------------------------------------------------------------------------------------------------------------------------ references
def _value(a: Arrays, port: str, backward: bool, node: Node) -> Array:
    attrs = (("block_size", _blocks(port, backward)),)
    made = Node(_DEQUANTIZE.tag, node.name, (("X", 0), ("scale", 1)), (("Y", 2),), attrs, node.compute)
    return np.asarray(_DEQUANTIZE.reference(made, [a[port].shape], [a[port], a[f"Descale_{port}"]])[0])


def _plain_arrays(a: Arrays, backward: bool, node: Node) -> Arrays:
    kept = {p: x for p, x in a.items() if not p.startswith("Descale_")}
    return kept | {p: _value(a, p, backward, node) for p in "QKV"} | ({"dO": a["dO_f16"]} if backward else {})


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
        expand=lambda e: _expand(e, False),
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
        expand=lambda e: _expand(e, True),
        reference=formula.reference(_backward, INTEGERS),
    ),
)
