"""Engine attention_fwd: what it needs of memory, and the integers that it reads when it runs."""

from __future__ import annotations

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type
from graphdnn.codegen.spec import Buffer, Limits, Listing
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
