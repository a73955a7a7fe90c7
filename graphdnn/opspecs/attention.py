"""SDPA and SDPA_BWD: scaled dot product attention and its gradients, each one node up to its engine."""

from __future__ import annotations

from functools import partial

from graphdnn.errors import NotSupportedError, ValidationError, explain
from graphdnn.ir.node import NodeDecl
from graphdnn.opspecs import attention_bounds, shapes
from graphdnn.opspecs import attention_rules as rules
from graphdnn.opspecs.attention_parts import INTEGERS, PAGES, SCORE_PORTS
from graphdnn.opspecs.attention_reference import backward, forward
from graphdnn.opspecs.score_grad import gradient_steps
from graphdnn.opspecs.spec import OpSpec

MASK_ATTRS = ("alibi_mask", "padding_mask", "left_bound", "right_bound", "diagonal_alignment", "attn_scale_value", "dropout_probability", "score_mod")
"""Attributes that say what happens to a score."""
_OPTIONAL_SCORE = ("Attn_scale", "Bias", "SEQ_LEN_Q", "SEQ_LEN_KV", "Seed", "Offset", "Dropout_mask", "Dropout_scale")
_DUMP = "RNG_DUMP"


def infer_forward(node: NodeDecl) -> None:
    """Stats [b, h_q, s_q, 1] row-major; O as the user has set it."""
    shapes.require(node, ("Q", "K", "V"), ("O",))
    size = rules.sizes_of(node)
    rules.pages(node, size)
    rules.masks(node, size)
    rules.given_by_user(node, ("O",))
    rules.same(node, "O", (size.b, size.h_q, size.s_q, size.d_v))
    _rows(node, ("Stats", "Max", "Sum_exp"))
    _dump(node)


def infer_backward(node: NodeDecl) -> None:
    """Nothing but DSINK_TOKEN and dBias without dims: gradients lie as the user has set them."""
    shapes.require(node, ("Q", "K", "V", "O", "dO", "Stats"), ("dQ", "dK", "dV"))
    size = rules.sizes_of(node)
    rules.masks(node, size)
    rules.given_by_user(node, ("dQ", "dK", "dV"))
    for port, like in (("dQ", "Q"), ("dK", "K"), ("dV", "V"), ("dBias", "Bias"), ("DSINK_TOKEN", "SINK_TOKEN")):
        if port in node.outputs and like in node.inputs:
            given = node.inputs[like]
            shapes.give(node, port, shapes.dims(given), partial(shapes.strides, given))
    for port in ("O", "dO"):
        rules.same(node, port, (size.b, size.h_q, size.s_q, size.d_v))
    rules.same(node, "Stats", (size.b, size.h_q, size.s_q, 1))
    if "DSINK_TOKEN" in node.outputs and "SINK_TOKEN" not in node.inputs:
        raise ValidationError(explain("a gradient of the sink needs the sink", node=node.label, expected="sink_token", found="none"))
    for port, name in (("Q", "max_total_seq_len_q"), ("K", "max_total_seq_len_kv")):
        if node.attrs.get(name) is not None and node.inputs[port].ragged_offset is None:
            text = f"{name} has a meaning only where {port} is packed"
            raise NotSupportedError(explain(text, node=node.label, expected=f"a ragged offset of {port}", found=node.attrs[name]))
    _rows(node, ("dS_max",))
    _dump(node)


def _check_backward(node: NodeDecl) -> None:
    """A score_mod without score_mod_bprop can be differentiated."""
    rules.check(node)
    gradient_steps(node.attrs)


def _rows(node: NodeDecl, ports: tuple[str, ...]) -> None:
    """Values of rows: [b, h_q, s_q, 1] row-major."""
    b, h, s, _ = shapes.dims(node.inputs["Q"])
    for port in ports:
        if port in node.outputs:
            shapes.give(node, port, (b, h, s, 1), lambda: (h * s, s, 1, 1))


def _dump(node: NodeDecl) -> None:
    if _DUMP in node.outputs:
        if "Seed" not in node.inputs:
            text = "there are no random numbers to dump"
            raise ValidationError(explain(text, node=node.label, expected="dropout=(probability, seed, offset)", found="none"))
        size = rules.sizes_of(node)
        b, h, i, j = size.scores
        shapes.give(node, _DUMP, size.scores, lambda: (h * i * j, i * j, j, 1))


_MORE = ("Block_mask", *PAGES.values(), "SINK_TOKEN", *SCORE_PORTS)
_FORWARD_IN, _FORWARD_OUT = ("Q", "K", "V", *_OPTIONAL_SCORE, *_MORE), ("O", "Stats", "Max", "Sum_exp", _DUMP)
_LESS = ("Dropout_scale_inv", "SINK_TOKEN", *SCORE_PORTS)
_GRADIENT_IN = ("Q", "K", "V", "O", "dO", "Stats", *_OPTIONAL_SCORE, *_LESS)
_GRADIENT_OUT = ("dQ", "dK", "dV", "dBias", _DUMP, "DSINK_TOKEN", "dS_max")
FORWARD_PORTS, GRADIENT_PORTS = (*_FORWARD_IN, *_FORWARD_OUT), (*_GRADIENT_IN, *_GRADIENT_OUT)
"""Inputs, then outputs. dS_max, which only expansions ask for: the largest magnitude of every row of dS."""
FORWARD_ATTRS = (*MASK_ATTRS, "generate_stats", "max_seq_len_kv", "mma_core_mode", "implementation", "is_mxfp8", "unfuse_fma")
GRADIENT_ATTRS = (*MASK_ATTRS, "score_mod_bprop", "max_total_seq_len_q", "max_total_seq_len_kv", "is_deterministic_algorithm", "is_mxfp8")

SPECS = (
    OpSpec(
        tag="SDPA",
        role="attention",
        inputs=_FORWARD_IN,
        outputs=_FORWARD_OUT,
        optional=(*_OPTIONAL_SCORE, *_MORE, *_FORWARD_OUT[1:]),
        attrs=FORWARD_ATTRS,
        domain="float",
        integers=INTEGERS,
        infer=infer_forward,
        check=rules.check,
        reference=forward,
        spans=attention_bounds.forward,
    ),
    OpSpec(
        tag="SDPA_BWD",
        role="attention",
        inputs=_GRADIENT_IN,
        outputs=_GRADIENT_OUT,
        optional=(*_OPTIONAL_SCORE, *_LESS, *_GRADIENT_OUT[3:]),
        attrs=GRADIENT_ATTRS,
        domain="float",
        integers=INTEGERS,
        infer=infer_backward,
        check=_check_backward,
        reference=backward,
        spans=attention_bounds.backward,
    ),
)
