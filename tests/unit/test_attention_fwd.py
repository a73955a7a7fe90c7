"""Engine attention_fwd: what it needs of memory, and the integers that it reads when it runs."""

from __future__ import annotations

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type
from graphdnn.codegen.spec import Buffer, Limits, Listing, Packed
from graphdnn.errors import ExecutionError
from graphdnn.targets import limits
from tests.helpers import built

F32, I32 = data_type.FLOAT, data_type.INT32
B, H, ROWS, COLS, D = 2, 2, 5, 6, 4
PAGE = 4


def tensor(g, dim, dtype, name):
    return g.tensor(dim=dim, layout="row", data_type=dtype, name=name)


def attention(device, paged):
    """(graph, tensors by name): lengths of Q and of K and V, pages where asked for."""
    g = graphdnn.pygraph(device=device)
    t = {"q": tensor(g, (B, H, ROWS, D), F32, "q"), "rows": tensor(g, (B, 1, 1, 1), I32, "rows"), "cols": tensor(g, (B, 1, 1, 1), I32, "cols")}
    kv = (3, H, PAGE, D) if paged else (B, H, COLS, D)
    t |= {name: tensor(g, kv, F32, name) for name in "kv"}
    more = {}
    if paged:
        t["pages"] = tensor(g, (B, 1, 2, 1), I32, "pages")
        more = {"paged_attention_k_table": t["pages"], "paged_attention_v_table": t["pages"], "paged_attention_max_seq_len_kv": COLS}
    o, _ = g.sdpa(t["q"], t["k"], t["v"], generate_stats=False, use_padding_mask=True, seq_len_q=t["rows"], seq_len_kv=t["cols"], **more)
    t["o"] = o.set_output(True).set_dim((B, H, ROWS, D)).set_stride((H * ROWS * D, ROWS * D, D, 1)).set_data_type(F32)
    return built(g), t


def run(device, rows, cols, pages=None):
    """The result for these lengths and pages."""
    g, t = attention(device, pages is not None)
    rng = np.random.default_rng(1)
    pack = {x: rng.standard_normal(t[name].get_dim()).astype(np.float32) for name, x in t.items() if name in "qkv"}
    given = {"rows": rows, "cols": cols, "pages": pages}
    pack |= {t[name]: np.array(v, np.int32).reshape(t[name].get_dim()) for name, v in given.items() if v is not None}
    out = pack[t["o"]] = np.full((B, H, ROWS, D), np.nan, np.float32)
    g.execute(pack, np.zeros(max(1, g.get_workspace_size()), np.uint8))
    return out


def test_one_kernel_and_no_workspace():
    g, _ = attention("cpu", False)
    assert g.get_workspace_size() == 0
    assert len(g.plan.kernels) == 1
    found = g.explain()
    assert (found.kernels, found.launches, found.flops) == (1, 1, 2 * B * H * ROWS * COLS * 2 * D)
    assert "workspace   0 B" in str(found)


@pytest.mark.parametrize(
    ("rows", "cols", "pages", "name", "found"),
    [
        ([5, 6], [6, 6], None, "rows", "6"),
        ([5, -1], [6, 6], None, "rows", "-1"),
        ([5, 5], [7, 6], None, "cols", "7"),
        ([5, 5], [6, 6], [[0, 3], [1, 2]], "pages", "3"),
        ([5, 5], [6, 6], [[0, 1], [-1, 2]], "pages", "-1"),
    ],
)
def test_a_cpu_reports_numbers_out_of_range(rows, cols, pages, name, found):
    with pytest.raises(ExecutionError) as error:
        run("cpu", rows, cols, pages)
    assert name in str(error.value)
    assert f"found {found}" in str(error.value)


def test_pages_that_no_row_needs_may_be_anything():
    wanted = run("cpu", [5, 5], [4, 6], [[0, 1], [1, 2]])
    assert (run("cpu", [5, 5], [4, 6], [[0, -7], [1, 2]]) == wanted).all()


@pytest.mark.sim
def test_kernels_take_the_nearest_number_unless_the_switch_asks_for_checks(monkeypatch):
    wanted = run("cudasim", [5, 0], [6, 6], [[0, 2], [1, 2]])
    assert (run("cudasim", [9, -1], [99, 6], [[-3, 8], [1, 2]]) == wanted).all()
    monkeypatch.setenv("GRAPHDNN_CHECK_VALUES", "1")
    with pytest.raises(ExecutionError, match="pages"):
        run("cudasim", [5, 0], [6, 6], [[0, 8], [1, 2]])


def packed(device, starts, rows, room, written=False):
    """Attention on packed Q (or packed O) with these offsets, in a buffer of ``room`` elements; Q's rows are of two heads."""
    g = graphdnn.pygraph(device=device)
    t = {n: tensor(g, (B, H, ROWS, D), F32, n) for n in "qkv"} | {n: tensor(g, (B, 1, 1, 1), I32, n) for n in ("rows", "cols")}
    t["starts"] = tensor(g, (B + 1, 1, 1, 1), I32, "starts")
    o, _ = g.sdpa(t["q"], t["k"], t["v"], generate_stats=False, use_padding_mask=True, seq_len_q=t["rows"], seq_len_kv=t["cols"])
    t["o"] = o.set_output(True).set_dim((B, H, ROWS, D)).set_stride((H * ROWS * D, D, H * D, 1)).set_data_type(F32).set_name("o")
    (o if written else t["q"].set_stride((H * ROWS * D, D, H * D, 1))).set_ragged_offset(t["starts"])
    built(g)
    pack = {t[n]: np.random.default_rng(2).standard_normal((B, H, ROWS, D)).astype(np.float32) for n in "qkvo"}
    pack |= {t["rows"]: np.array(rows, np.int32), t["cols"]: np.full(B, ROWS, np.int32), t["starts"]: np.array(starts, np.int32)}
    pack[t["o" if written else "q"]] = np.ones(room, np.float32)
    g.execute(pack, np.zeros(max(1, g.get_workspace_size()), np.uint8))
    return pack[t["o"]]


PACKED = {
    "as they should be": ([0, 16, 32], [2, 2], 32, None),
    "the last batch is shorter than the room for it": ([0, 16, 99], [2, 1], 24, None),
    "an empty batch may begin at the end": ([0, 16, 16], [2, 0], 16, None),
    "negative": ([-8, 16, 32], [2, 2], 32, "batch 0 is negative"),
    "not ascending": ([16, 0, 32], [2, 2], 32, "batch 1 is less than the one before it"),
    "the end before the beginning": ([0, 16, 8], [2, 2], 32, "batch 2 is less"),
    "beyond the buffer": ([0, 17, 33], [2, 2], 32, "batch 1 is not inside of the buffer"),
    "far beyond": ([0, 2**31 - 1, 2**31 - 1], [2, 2], 32, "batch 1 is not inside of the buffer"),
}


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("name", PACKED)
def test_a_cpu_reports_offsets_of_packed_tensors(name, written):
    starts, rows, room, words = PACKED[name]
    if words is None:
        assert not np.isnan(packed("cpu", starts, rows, room, written)).any()
        return
    with pytest.raises(ExecutionError, match=f"{words}.*'starts'|'starts'.*{words}"):
        packed("cpu", starts, rows, room, written)


def test_batches_that_share_rows_are_for_inputs_alone():
    """Each gives what it would in rows of its own; written twice, a row would hold whichever came last. Rows between each other's are fine."""
    assert not np.isnan(packed("cpu", [0, 8, 32], [3, 3], 32)).any()
    with pytest.raises(ExecutionError, match="'o', which is written, overlap"):
        packed("cpu", [0, 8, 32], [3, 3], 32, written=True)
    step = Packed(Listing(Buffer("tensor", 0), I32, 3, 1, "s"), Listing(Buffer("tensor", 1), I32, 2, 1, "u"), 1, 4, 8, ((4, 1),), 2, 32, "o", True)
    for second, apart in ((4, True), (3, False)):
        arrays = {0: np.array([0, second, 99], np.int32), 1: np.array([4, 4], np.int32)}
        if apart:
            limits.check(step, lambda b, a=arrays: a[b.index].ctypes.data)
        else:
            with pytest.raises(ExecutionError, match="overlap"):
                limits.check(step, lambda b, a=arrays: a[b.index].ctypes.data)


@pytest.mark.sim
def test_a_gpu_reports_offsets_where_the_switch_asks(monkeypatch):
    monkeypatch.setenv("GRAPHDNN_CHECK_VALUES", "1")
    for name in ("negative", "not ascending", "beyond the buffer"):
        starts, rows, room, words = PACKED[name]
        with pytest.raises(ExecutionError, match=words):
            packed("cudasim", starts, rows, room)


def test_offsets_that_the_graph_calculates_are_checked():
    g = graphdnn.pygraph(device="cpu")
    t = {n: tensor(g, (B, H, ROWS, D), F32, n) for n in "qkv"} | {n: tensor(g, (B, 1, 1, 1), I32, n) for n in ("rows", "cols")}
    prefix = tensor(g, (B + 1, 1, 1, 1), I32, "prefix")
    starts = g.mul(prefix, tensor(g, (1, 1, 1, 1), I32, "eight"), compute_data_type=I32).set_data_type(I32).set_output(True).set_name("starts")
    t["q"].set_stride((H * ROWS * D, D, H * D, 1)).set_ragged_offset(starts)
    o, _ = g.sdpa(t["q"], t["k"], t["v"], generate_stats=False, use_padding_mask=True, seq_len_q=t["rows"], seq_len_kv=t["cols"])
    o.set_output(True).set_dim((B, H, ROWS, D)).set_stride((H * ROWS * D, ROWS * D, D, 1)).set_data_type(F32).set_name("o")
    built(g)
    pack = {n: np.ones((B, H, ROWS, D), np.float32) for n in "qkvo"} | {"q": np.ones(32, np.float32), "eight": np.array([8], np.int32)}
    pack |= {"rows": np.array([2, 2], np.int32), "cols": np.full(B, ROWS, np.int32), "starts": np.zeros(B + 1, np.int32)}
    workspace = np.zeros(max(1, g.get_workspace_size()), np.uint8)
    g.execute(pack | {"prefix": np.array([0, 2, 4], np.int32)}, workspace)
    with pytest.raises(ExecutionError, match="batch 1 is not inside"):
        g.execute(pack | {"prefix": np.array([0, 3, 5], np.int32)}, workspace)


def test_limits_follow_offsets_lengths_and_strides():
    pages = np.array([9, 9, 1, 9, 2, 9, 3, 9, 0], np.int64)
    starts, used = np.array([2, 6, 9], np.int32), np.array([7, 5], np.int32)
    arrays = {0: pages, 1: starts, 2: used}

    def listing(i, count, stride=1):
        dtype = data_type.INT64 if i == 0 else I32
        return Listing(Buffer("tensor", i), dtype, count, stride, f"t{i}")

    def check(high):
        step = Limits(listing(0, 9, 2), 2, 0, 0, high, "page", listing(2, 2), 4, listing(1, 2))
        limits.check(step, lambda b: arrays[b.index].ctypes.data + b.offset)

    check(3)
    with pytest.raises(ExecutionError, match=r"page, batch 1, entry 0"):
        check(2)
