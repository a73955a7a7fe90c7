"""Inputs without meaning, op by op: the class of the error, and that it names node, tensor, rule, what was expected and what was found."""

from __future__ import annotations

import re

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type, norm_forward_phase
from graphdnn.errors import BuildError, ExecutionError, NotSupportedError, ValidationError
from tests.attention_cases import need

D = data_type
F32 = {"io_data_type": D.FLOAT, "intermediate_data_type": D.FLOAT, "compute_data_type": D.FLOAT}
PLAIN = {"padding": [0, 0], "stride": [1, 1], "dilation": [1, 1]}
TRAINING = norm_forward_phase.TRAINING


def t(g, name, *dim, dtype=D.FLOAT):
    return g.tensor(dim=dim, layout="row", data_type=dtype, name=name)


def sdpa(g, **more):
    q, k, v = (t(g, n, 2, 2, 4, 8) for n in "qkv")
    o, _ = g.sdpa(q, k, v, generate_stats=False, name="node", **more)
    return o.set_dim((2, 2, 4, 8)).set_stride((64, 32, 8, 1)).set_output(True).set_name("o")


def dropped(g, p):
    return sdpa(g, dropout=(p, t(g, "seed", 1, 1, 1, 1, dtype=D.INT64), t(g, "offset", 1, 1, 1, 1, dtype=D.INT64)))


def conv(g, x, w, **more):
    return g.conv_fprop(t(g, "x", *x), t(g, "w", *w), **(PLAIN | more), name="node")


def quantized(g, block):
    y, scale = g.block_scale_quantize(t(g, "x", 2, 70), block, name="node")
    y.set_data_type(D.FP8_E4M3), scale.set_data_type(D.FP8_E8M0)


# (what declares it, the error's class, tensor, rule, expected, found; "" where the rule is about no tensor)
CASES = {
    "channels that do not divide": (lambda g: conv(g, (2, 8, 5, 5), (6, 7, 1, 1)), ValidationError, "x", "no multiple", "multiple of 7", "C = 8"),
    "outputs that do not divide": (lambda g: conv(g, (2, 8, 5, 5), (6, 2, 1, 1)), ValidationError, "w", "groups", "4 groups", "K = 6"),
    "a filter that is too large": (
        lambda g: conv(g, (2, 4, 5, 5), (6, 4, 9, 1), padding=[1, 0]),
        ValidationError,
        "w",
        "larger",
        "at most 7",
        "9 taps",
    ),
    "dgrad without dims": (
        lambda g: g.conv_dgrad(t(g, "dy", 2, 6, 5, 5), t(g, "w", 6, 4, 1, 1), **PLAIN, name="node"),
        ValidationError,
        "node::DX",
        "inferencing is not possible",
        "dims of DX",
        "none",
    ),
    "dgrad with other dims": (
        lambda g: g.conv_dgrad(t(g, "dy", 2, 6, 5, 5), t(g, "w", 6, 4, 1, 1), **PLAIN, name="node").set_dim((2, 4, 6, 5)),
        ValidationError,
        "node::DX",
        "not consistent",
        r"\[2, 6, 5, 5\]",
        r"\[2, 4, 6, 5\]",
    ),
    "wgrad without dims": (
        lambda g: g.conv_wgrad(t(g, "x", 2, 4, 5, 5), t(g, "dy", 2, 6, 5, 5), **PLAIN, name="node"),
        ValidationError,
        "node::DW",
        "inferencing is not possible",
        "dims of DW",
        "none",
    ),
    "wgrad with other dims": (
        lambda g: g.conv_wgrad(t(g, "x", 2, 4, 5, 5), t(g, "dy", 2, 6, 5, 5), **PLAIN, name="node").set_dim((6, 4, 3, 1)),
        ValidationError,
        "node::DW",
        "not consistent",
        r"\[2, 6, 5, 5\]",
        r"\[6, 4, 3, 1\]",
    ),
    "a normalized axis of 0": (
        lambda g: g.layernorm(TRAINING, t(g, "x", 2, 0), t(g, "s", 1, 0), t(g, "b", 1, 0), 1e-5, name="node"),
        ValidationError,
        "x",
        "no elements",
        "extent >= 1",
        r"\[2, 0\]",
    ),
    "a block that does not divide": (lambda g: quantized(g, 32), ValidationError, "x", "block", "70", "32"),
    "attn_scale as an integer": (lambda g: sdpa(g, attn_scale=2), BuildError, "", "attn_scale", "a float", "2"),
    "dropout of 1": (lambda g: dropped(g, 1.0), ValidationError, "", "dropout probability", "0 <= p < 1", r"1\.0"),
    "dropout below 0": (lambda g: dropped(g, -0.25), ValidationError, "", "dropout probability", "0 <= p < 1", r"-0\.25"),
    "heads that do not divide": (
        lambda g: (
            g.sdpa(t(g, "q", 2, 3, 4, 8), t(g, "k", 2, 2, 4, 8), t(g, "v", 2, 2, 4, 8), generate_stats=False, name="node")[0]
            .set_dim((2, 3, 4, 8))
            .set_stride((96, 32, 8, 1))
        ),
        NotSupportedError,
        "k",
        "heads of Q",
        "divisor of 3",
        "2",
    ),
    "K of a matmul": (lambda g: g.matmul(t(g, "a", 3, 7), t(g, "b", 8, 5), name="node"), ValidationError, "", "K differs", "7", r"'b' \[8, 5\]"),
    "broadcast": (lambda g: g.add(t(g, "a", 2, 3), t(g, "b", 2, 4), name="node"), ValidationError, "", "'a' and 'b'", r"\[2, 3\]", r"\[2, 4\]"),
    "a pooling window that is too large": (
        lambda g: g.resample(t(g, "x", 1, 1, 3, 3), "MAXPOOL", [5, 1], name="node"),
        ValidationError,
        "x",
        "does not fit",
        "1 to 3",
        "5",
    ),
    "softmax's axis": (lambda g: g.softmax(t(g, "x", 2, 3), 2, name="node"), ValidationError, "x", "axis", r"-2\.\.1", "2"),
}


@pytest.mark.parametrize("name", CASES)
def test_message(name):
    declare, error, tensor, rule, expected, found = CASES[name]
    g = graphdnn.pygraph(device="cpu", **F32)
    with pytest.raises(error) as caught:
        declare(g)
        g.validate()
    text = str(caught.value).split("graph:")[0]
    assert isinstance(caught.value, graphdnn.GraphError)
    where, _, rest = text.partition("; expected ")
    wanted, _, seen = rest.partition(", found ")
    assert "node 'node'" in where and f"tensor '{tensor}'" * bool(tensor) in where, text
    assert re.search(rule, where), text
    assert re.search(expected, wanted) or re.search(expected, where), text
    assert re.search(found, seen), text


def run(g, outputs, arrays):
    """Build and execute on the CPU."""
    g.build([graphdnn.heur_mode.A])
    pack = arrays | {o.get_name(): np.zeros(o.get_dim(), np.float32) for o in outputs}
    g.execute(pack, np.empty(g.get_workspace_size(), np.uint8))


@pytest.mark.parametrize(("which", "value"), [("len_q", 5), ("len_kv", 9), ("len_kv", -1)])
def test_lengths_beyond_the_buffer(which, value):
    """What a kernel reads from memory is checked on a CPU at execute (on GPUs where GRAPHDNN_CHECK_VALUES is set)."""
    need("attention_fwd")
    g = graphdnn.pygraph(device="cpu", **F32)
    lengths = {n: t(g, n, 2, 1, 1, 1, dtype=D.INT32) for n in ("len_q", "len_kv")}
    o = sdpa(g, use_padding_mask=True, seq_len_q=lengths["len_q"], seq_len_kv=lengths["len_kv"])
    arrays = {n: np.ones((2, 2, 4, 8), np.float32) for n in "qkv"} | {n: np.full((2, 1, 1, 1), 4, np.int32) for n in lengths}
    arrays[which][1] = value
    with pytest.raises(ExecutionError, match=f"'{which}'.*expected.*4.*found.*{value}"):
        run(g, [o], arrays)


def test_page_tables_out_of_range():
    need("attention_fwd")
    g = graphdnn.pygraph(device="cpu", **F32)
    q, k, v = t(g, "q", 2, 2, 4, 8), t(g, "k", 3, 2, 4, 8), t(g, "v", 3, 2, 4, 8)
    tables = {f"paged_attention_{n}_table": t(g, f"table_{n}", 2, 1, 1, 1, dtype=D.INT32) for n in "kv"}
    lengths = {f"seq_len_{n}": t(g, f"len_{n}", 2, 1, 1, 1, dtype=D.INT32) for n in ("q", "kv")}
    o, _ = g.sdpa(q, k, v, generate_stats=False, use_padding_mask=True, **lengths, **tables, paged_attention_max_seq_len_kv=4, name="node")
    o.set_dim((2, 2, 4, 8)).set_stride((64, 32, 8, 1)).set_output(True).set_name("o")
    arrays = {"q": np.ones((2, 2, 4, 8), np.float32)} | {n: np.ones((3, 2, 4, 8), np.float32) for n in "kv"}
    arrays |= {f"len_{n}": np.full((2, 1, 1, 1), 4, np.int32) for n in ("q", "kv")}
    arrays |= {f"table_{n}": np.array([0, 3]).reshape(2, 1, 1, 1).astype(np.int32) for n in "kv"}
    with pytest.raises(ExecutionError, match="'table_.'.*expected.*2.*found.*3"):
        run(g, [o], arrays)
