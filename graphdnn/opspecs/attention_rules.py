"""What the arguments of attention must be like: shapes in infer, data types in check.

Where the cuDNN Frontend refuses something that has a meaning (a head dim, a combination of masks), nothing is refused here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphdnn.dtypes import data_type, info
from graphdnn.errors import BuildError, NotSupportedError, ValidationError, explain
from graphdnn.ir.node import NodeDecl
from graphdnn.ir.tensor import Dims, TensorDecl
from graphdnn.opspecs import score_steps, shapes
from graphdnn.opspecs.attention_parts import INTEGERS, MASK_BLOCK, PAGES, SCORE_PORTS, Sizes, sizes

RAGGED = ("Q", "K", "V", "O", "dO", "Stats", "Max", "Sum_exp", "dQ", "dK", "dV", *PAGES.values())
"""Ports whose tensors may be packed."""
FLOATS = ("Q", "K", "V", "O", "dO", "dO_f16", "Stats", "Max", "Sum_exp", "dQ", "dK", "dV", "SINK_TOKEN", "DSINK_TOKEN", "dBias", "dS_max")
"""Ports that take float types alone, as those do whose names begin with Amax_."""


def refuse(
    node: NodeDecl, port: str, rule: str, expected: object, error: type[Exception] = ValidationError, found: object = None, fix: str | None = None
) -> Exception:
    """An error about the tensor at ``port``; ``found``: its dims unless said."""
    t = node.inputs.get(port) or node.outputs.get(port)
    dims = list(t.dim) if t is not None and t.dim is not None else "nothing"
    where = None if t is None else t.name or port
    return error(explain(rule, node=node.label, tensor=where, expected=expected, found=dims if found is None else found, fix=fix))


# ---------------------------------------------------------------------------------------------------------------------------------------- shapes
def sizes_of(node: NodeDecl) -> Sizes:
    """The sizes of a node; errors where its main operands do not go together."""
    for port in ("Q", "K", "V", *(t for t in PAGES.values() if t in node.inputs)):
        if len(shapes.dims(node.inputs[port])) != 4:
            raise refuse(node, port, f"{port} has the wrong rank", "dims [batch, heads, rows, head dim]" if port in "QKV" else "rank 4")
    found = sizes({p: shapes.dims(t) for p, t in node.inputs.items()}, node.attrs)
    for port, heads in (("K", found.h_k), ("V", found.h_v)):
        if heads == 0 or found.h_q % heads:
            rule = f"the heads of Q are no multiple of those of {port}"
            raise refuse(node, port, rule, f"a divisor of {found.h_q} heads", NotSupportedError, heads)
    if shapes.dims(node.inputs["K"])[3] != found.d_qk:
        raise refuse(node, "K", "Q and K differ in the head dim", f"[..., {found.d_qk}]")
    for port, heads, d in (("K", found.h_k, found.d_qk), ("V", found.h_v, shapes.dims(node.inputs["V"])[3])):
        if PAGES[port] not in node.inputs:
            same(node, port, (found.b, heads, found.s_kv, d))
    return found


def same(node: NodeDecl, port: str, dim: Dims) -> None:
    """The tensor at ``port``, if there is one, has these dims."""
    t = node.inputs.get(port) or node.outputs.get(port)
    if t is not None and t.dim is not None and tuple(t.dim) != dim:
        raise refuse(node, port, f"{port} does not fit", list(dim))


def broadcasts(node: NodeDecl, port: str, dim: Dims) -> None:
    """The tensor at ``port``, if there is one, can be broadcast to these dims."""
    t = node.inputs.get(port) or node.outputs.get(port)
    if t is None or t.dim is None:
        return
    wide = (1,) * (len(dim) - len(t.dim)) + tuple(t.dim)
    if len(wide) != len(dim) or any(have not in (1, want) for have, want in zip(wide, dim, strict=True)):
        raise refuse(node, port, f"{port} does not fit", f"dims that broadcast to {list(dim)}")


def elements(node: NodeDecl, port: str, count: int) -> None:
    """The tensor at ``port``, if there is one, has ``count`` elements along its first dim."""
    t = node.inputs.get(port)
    if t is not None and t.dim is not None and (tuple(t.dim) or (1,)) != (count, *(1,) * (len(t.dim) - 1)):
        raise refuse(node, port, f"{port} does not fit", [count, 1, 1, 1])


def one_element(node: NodeDecl, port: str) -> None:
    """The tensor at ``port`` has one element."""
    t = node.inputs.get(port) or node.outputs[port]
    if t.dim is not None and any(d != 1 for d in t.dim):
        raise refuse(node, port, f"{port} does not fit", [1, 1, 1, 1])


def given_by_user(node: NodeDecl, ports: Sequence[str]) -> None:
    """Dims and strides of these outputs have been set: nothing says how they should lie in memory."""
    for port in ports:
        t = node.outputs[port]
        for what, value in (("dims", t.dim), ("strides", t.stride)):
            if value is None:
                text = f"the {what} of {port} are not set, and inferencing is not possible"
                setter = "set_dim" if what == "dims" else "set_stride"
                raise refuse(node, port, text, f"{what} of the output", found="none", fix=f"call {setter} on it")


def masks(node: NodeDecl, size: Sizes) -> None:
    """Lengths, bounds, dropout, biases, tensors of a score_mod: what forward and backward share."""
    _lengths(node, size)
    _bounds(node)
    _dropout(node)
    score_steps.check(node)
    for port in ("Bias", "dBias", "Dropout_mask", *SCORE_PORTS):
        broadcasts(node, port, size.scores)
    for port in ("Seed", "Offset", "Attn_scale", "Dropout_scale", "Dropout_scale_inv"):
        elements(node, port, 1)
    for port in ("SINK_TOKEN", "DSINK_TOKEN"):
        same(node, port, (1, size.h_q, 1, 1))
    if "Block_mask" in node.inputs:
        tiles = (-(-size.s_q // MASK_BLOCK), -(-size.s_kv // (MASK_BLOCK * 8)))
        have = shapes.dims(node.inputs["Block_mask"])
        broadcasts(node, "Block_mask", (size.b, size.h_q, *tiles))
        if have[2:] != tiles:
            raise refuse(node, "Block_mask", "Block_mask does not fit", f"one bit for {MASK_BLOCK} rows and columns: [..., {tiles[0]}, {tiles[1]}]")


def _lengths(node: NodeDecl, size: Sizes) -> None:
    have = [port for port in ("SEQ_LEN_Q", "SEQ_LEN_KV") if port in node.inputs]
    padded = bool(node.attrs.get("padding_mask"))
    if padded and len(have) < 2:
        text = "a padding mask needs the lengths of Q and of K and V"
        raise ValidationError(explain(text, node=node.label, expected="seq_len_q and seq_len_kv", found=", ".join(have) or "neither"))
    if have and not padded and not node.attrs.get("score_mod"):
        fix = "use_padding_mask=True"
        raise ValidationError(explain("lengths without a padding mask", node=node.label, expected="a padding mask", found=", ".join(have), fix=fix))
    for length in have:
        elements(node, length, size.b)
    for port, t in (*node.inputs.items(), *node.outputs.items()):
        if t.ragged_offset is not None and not padded:
            text = f"{port} is packed, which needs a padding mask"
            raise refuse(node, port, text, "seq_len_q and seq_len_kv", NotSupportedError, "a ragged offset", "use_padding_mask=True")


def _dropout(node: NodeDecl) -> None:
    """One way to drop weights, with all that it needs. The probability becomes the float32 that numbers, which are drawn in float32, are compared
    with and that the scale of what is left is made of: 0 <= p < 1 before and after it is rounded."""
    drawn, backward = ("dropout_probability", "Seed", "Offset"), ("Dropout_scale_inv",) if node.op.endswith("_BWD") else ()
    masked = ("Dropout_mask", "Dropout_scale", *backward)
    have = {name for name in (*drawn, *masked) if name in node.inputs or node.attrs.get(name) is not None}
    if have & set(drawn) and have & set(masked):
        rule, expected = "dropout is asked for in two ways", f"{', '.join(drawn)}, or {', '.join(masked)}"
        raise ValidationError(explain(rule, node=node.label, expected=expected, found=", ".join(sorted(have))))
    for whole in (drawn, masked):
        missing = [name for name in whole if name not in have]
        if missing and len(missing) < len(whole):
            rule = f"dropout lacks {', '.join(missing)}"
            raise ValidationError(explain(rule, node=node.label, expected=", ".join(whole), found=", ".join(n for n in whole if n in have)))
    p = node.attrs.get("dropout_probability")
    if p is None:
        return
    if not 0.0 <= p < 1.0 or float(np.float32(p)) == 1.0:
        rule, expected = "the dropout probability is out of range", "0 <= p < 1, also when it is rounded to float32"
        raise ValidationError(explain(rule, node=node.label, expected=expected, found=p))
    node.attrs["dropout_probability"] = float(np.float32(p))


def _bounds(node: NodeDecl) -> None:
    for name in ("left_bound", "right_bound"):
        value = node.attrs.get(name)
        if value is not None and value < 0:
            raise BuildError(explain(f"{name} must not be negative", node=node.label, expected="None (no bound), or at least 0", found=value))
    if node.attrs.get("diagonal_alignment", "TOP_LEFT") not in ("TOP_LEFT", "BOTTOM_RIGHT"):
        found = node.attrs["diagonal_alignment"]
        raise ValidationError(explain("diagonal_alignment is not known", node=node.label, expected="TOP_LEFT or BOTTOM_RIGHT", found=found))
    bound = any(node.attrs.get(name) is not None for name in ("left_bound", "right_bound"))
    if node.attrs.get("diagonal_alignment") == "BOTTOM_RIGHT" and not bound:
        rule, fix = "diagonal_alignment aligns a band, and there is none", "set a bound (right 0: causal), or leave the alignment out"
        raise ValidationError(explain(rule, node=node.label, expected="a left or right bound beside BOTTOM_RIGHT", found="neither", fix=fix))


def pages(node: NodeDecl, size: Sizes) -> None:
    """Page tables and the containers they index."""
    tables = [t for t in PAGES.values() if t in node.inputs]
    if node.attrs.get("max_seq_len_kv") is not None and not tables:
        text = "a largest length of K and V has a meaning only for paged K and V"
        found = node.attrs["max_seq_len_kv"]
        raise NotSupportedError(explain(text, node=node.label, expected="paged_attention_k_table or _v_table", found=found))
    for port, table in PAGES.items():
        if table not in node.inputs:
            continue
        have, block = shapes.dims(node.inputs[table]), shapes.dims(node.inputs[port])[2]
        least = -(-size.s_kv // block) if block else 0
        if have[:2] != (size.b, 1) or have[3] != 1 or have[2] < least or not block:
            raise refuse(node, table, f"{table} does not fit", f"[{size.b}, 1, {least} or more pages of {block} rows, 1]")


# ------------------------------------------------------------------------------------------------------------------------------------ data types
def check(node: NodeDecl) -> None:
    """Data types, and tensors that are more than dims and strides."""
    for port, t in (*node.inputs.items(), *node.outputs.items()):
        _plain(node, port, t)
        kind = info(t.dtype).kind
        if port in INTEGERS and t.dtype not in (data_type.INT32, data_type.INT64):
            raise refuse(node, port, f"{port} has the wrong data type", "INT32 or INT64", found=t.dtype.name)
        if port == "Block_mask" and t.dtype is not data_type.UINT8:
            raise refuse(node, port, "Block_mask has the wrong data type", "UINT8, one bit a block", found=t.dtype.name)
        if port == "Bias" and t.dtype is data_type.BOOLEAN:
            rule = "a bias is added; a mask of booleans is none"
            raise refuse(node, port, rule, "a float type", NotSupportedError, "BOOLEAN", "score_mod with binary_select")
        if (port in FLOATS or port.startswith("Amax_")) and kind != "f":
            raise refuse(node, port, f"{port} has the wrong data type", "a float type", NotSupportedError, t.dtype.name)


def not_packed(node: NodeDecl) -> None:
    """NotSupportedError for packed tensors."""
    for port, t in (*node.inputs.items(), *node.outputs.items()):
        if t.ragged_offset is not None:
            rule = "attention on 8-bit floats takes no packed tensors"
            raise refuse(node, port, rule, "a padding mask alone", NotSupportedError, "a ragged offset")


def _plain(node: NodeDecl, port: str, t: TensorDecl) -> None:
    if t.ragged_offset is not None and (port not in RAGGED or t.ragged_offset.dtype not in (data_type.INT32, data_type.INT64)):
        text = f"{port} cannot be packed" if port not in RAGGED else "ragged offsets have the wrong data type"
        found = f"a ragged offset of {t.ragged_offset.dtype.name}"
        raise refuse(node, port, text, "INT32 or INT64 offsets of " + ", ".join(RAGGED), NotSupportedError, found)
    if (t.reordering != "NONE" or t.vector_count != 1) and not (node.attrs.get("is_mxfp8") and port.startswith("Descale_")):
        text = f"{node.op.lower()} takes tensors that dims and strides describe"
        raise refuse(node, port, text, "dims and strides alone", NotSupportedError, t.reordering)
