"""Partition: what fuses, where it is cut, in which order; on operation graphs made by hand."""

from __future__ import annotations

from graphdnn import device
from graphdnn.codegen.spec import Buffer
from graphdnn.engines import ENGINES
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.passes.regions import Partition, partition, unfused
from tests.opgraphs import Builder


def kinds(p: Partition) -> list[str]:
    return [r.kind for r in p.regions]


def check(graph: OperationGraph, p: Partition) -> None:
    """Every output is stored once, and every read is an input or was stored before."""
    stored: set[int] = set()
    for r in p.regions:
        for t in r.reads:
            assert t in stored or t not in graph.producer
        assert not stored & set(r.stores)
        stored |= set(r.stores)
    assert stored == set(graph.outputs) | set(p.materialized)


def test_matmul_takes_prologue_epilogue_and_full_reduction() -> None:
    b = Builder()
    a, w, bias = b.tensor(2, 3, 4), b.tensor(1, 4, 5), b.tensor(1, 1, 5)
    c = b.matmul(b.add(a, a, 2, 3, 4), w, 2, 3, 5)
    y = b.add(c, bias, 2, 3, 5, virtual=False)
    b.total(y, 1, 1, 1, virtual=False)
    p = partition(b.graph())
    check(b.graph(), p)
    assert kinds(p) == ["matmul"] and p.materialized == () and len(p.regions[0].epilogue_reductions) == 1


def softmax_by_hand(rows: int, columns: int) -> Builder:
    b = Builder()
    x = b.tensor(rows, columns)
    m = b.total(x, rows, 1)
    d = b.add(x, m, rows, columns)
    s = b.total(d, rows, 1)
    b.add(d, s, rows, columns, virtual=False)
    return b


def test_softmax_by_hand_walks_its_rows_in_one_kernel() -> None:
    b = softmax_by_hand(4, 8)
    p = partition(b.graph())
    check(b.graph(), p)
    assert kinds(p) == ["rows"] and p.materialized == () and p.regions[0].stages == ((0,), (2,))


def test_long_rows_are_calculated_again_instead_of_stored() -> None:
    b = softmax_by_hand(4, 1 << 20)
    p = partition(b.graph())
    check(b.graph(), p)
    assert kinds(p) == ["reduction", "reduction", "pointwise"]
    assert all(b.tensors[t].dim == (4, 1) for t in p.materialized)
    assert len(p.notes) == 2


def test_another_axis_calculates_again_from_results_of_rows() -> None:
    b = Builder()
    x = b.tensor(4, 8)
    d = b.add(x, b.total(x, 4, 1), 4, 8)
    b.total(d, 1, 8, virtual=False)
    p = partition(b.graph())
    check(b.graph(), p)
    assert kinds(p) == ["reduction", "reduction"] and [b.tensors[t].dim for t in p.materialized] == [(4, 1)]


def test_another_axis_reads_what_comes_from_many_tensors() -> None:
    b = Builder()
    x, y, z = b.tensor(4, 8), b.tensor(4, 8), b.tensor(4, 8)
    d = b.add(b.add(b.add(x, b.total(x, 4, 1), 4, 8), y, 4, 8), z, 4, 8)
    b.total(d, 1, 8, virtual=False)
    p = partition(b.graph())
    check(b.graph(), p)
    assert kinds(p) == ["rows", "reduction"] and p.materialized == (d,)


def view(b: Builder, x: int, *dim: int, virtual: bool = True) -> int:
    return b.node("RESHAPE", (x,), dim, "X", virtual)


def test_reshapes_of_results_and_of_rows_are_free() -> None:
    """Groups of a row, written out: what follows has other dims than the loops, and joins them."""
    b = Builder()
    x, residual, scale = b.tensor(4, 6, 5), b.tensor(4, 6, 5), b.tensor(1, 6, 1)
    parts = view(b, x, 4, 2, 3, 5)
    mean = b.total(parts, 4, 2, 1, 1)
    y = view(b, b.add(parts, mean, 4, 2, 3, 5), 4, 6, 5)
    b.add(b.add(y, scale, 4, 6, 5), residual, 4, 6, 5, virtual=False)
    view(b, mean, 4, 2, virtual=False)
    b.add(x, x, 4, 6, 5, virtual=False)
    p = partition(b.graph())
    check(b.graph(), p)
    assert kinds(p) == ["rows"] and p.materialized == () and p.regions[0].space == (4, 2, 3, 5)


def test_a_matmul_ends_with_heads_apart() -> None:
    b = Builder()
    c = b.matmul(b.tensor(2, 8, 4), b.tensor(1, 4, 6), 2, 8, 6)
    heads = b.node("TRANSPOSE", (view(b, c, 2, 8, 3, 2),), (2, 3, 8, 2), "X", permutation=(0, 2, 1, 3))
    b.add(heads, b.tensor(1, 3, 1, 2), 2, 3, 8, 2, virtual=False)
    p = partition(b.graph())
    check(b.graph(), p)
    assert kinds(p) == ["matmul"] and p.materialized == ()


def test_a_value_and_its_transpose_do_not_meet_in_one_loop() -> None:
    b = Builder()
    c = b.matmul(b.tensor(1, 4, 4), b.tensor(1, 4, 4), 1, 4, 4)
    turned = b.node("TRANSPOSE", (c,), (1, 4, 4), "X", permutation=(0, 2, 1))
    b.add(c, turned, 1, 4, 4, virtual=False)
    b.matmul(turned, b.tensor(1, 4, 4), 1, 4, 4, virtual=False)
    b.total(turned, 1, 4, 1, virtual=False)
    p = partition(b.graph(), sums=True)
    check(b.graph(), p)
    assert p.materialized == (c,), "one copy, read in both orders"
    assert kinds(p) == ["matmul", "matmul", "reduction"], "the sum of both is stored where one of them is reduced"


def test_a_slice_of_a_result_reads_it_from_memory() -> None:
    b = Builder()
    c = b.matmul(b.tensor(1, 4, 4), b.tensor(1, 4, 4), 1, 4, 4)
    b.node("SLICE", (c,), (1, 2, 4), "X", False, slices=((0, 1), (1, 3), (0, 4)))
    p = partition(b.graph())
    check(b.graph(), p)
    assert kinds(p) == ["matmul", "pointwise"] and p.materialized == (c,)


def test_what_depends_on_no_result_is_stored_with_results() -> None:
    b = Builder()
    x, s = b.tensor(4, 8), b.tensor(4, 1)
    b.add(b.total(b.add(x, s, 4, 8), 4, 1), s, 4, 1, virtual=False)
    b.add(s, s, 4, 1, virtual=False)
    p = partition(b.graph())
    check(b.graph(), p)
    assert kinds(p) == ["reduction"]


def test_reductions_of_one_space_and_a_side_output_share_a_kernel() -> None:
    b = Builder()
    x = b.tensor(4, 8)
    y = b.add(x, x, 4, 8, virtual=False)
    b.total(y, 4, 1, virtual=False)
    b.total(x, 4, 1, virtual=False)
    p = partition(b.graph())
    check(b.graph(), p)
    assert kinds(p) == ["reduction"] and len(p.regions[0].anchors) == 2 and len(p.regions[0].stores) == 3


def test_two_matmuls_that_need_each_other_are_never_one_cycle() -> None:
    b = Builder()
    x, w = b.tensor(1, 4, 4), b.tensor(1, 4, 4)
    c = b.matmul(x, w, 1, 4, 4)
    d = b.matmul(c, w, 1, 4, 4)
    b.add(c, d, 1, 4, 4, virtual=False)
    b.add(d, x, 1, 4, 4, virtual=False)
    p = partition(b.graph())
    check(b.graph(), p)
    assert kinds(p) == ["matmul", "matmul"]


def test_value_that_would_make_regions_wait_for_each_other_is_cut() -> None:
    b = Builder()
    x = b.tensor(4, 1 << 20)
    r = b.total(x, 4, 1)
    q = b.total(b.add(x, r, 4, 1 << 20), 4, 1)
    b.add(r, q, 4, 1, virtual=False)
    b.add(r, r, 4, 1, virtual=False)
    p = partition(b.graph())
    check(b.graph(), p)
    assert kinds(p) == ["reduction", "reduction"]


def test_forced_and_unfused() -> None:
    b = Builder()
    x = b.tensor(4, 8)
    y = b.add(x, x, 4, 8)
    z = b.add(y, x, 4, 8, virtual=False)
    graph = b.graph()
    assert kinds(partition(graph)) == ["pointwise"]
    for p in (partition(graph, frozenset((y,))), unfused(graph)):
        check(graph, p)
        assert kinds(p) == ["pointwise", "pointwise"] and p.materialized == (y,) and p.regions[1].stores == (z,)


def test_an_empty_space_keeps_its_reduction_apart() -> None:
    b = Builder()
    c = b.matmul(b.tensor(0, 3, 4), b.tensor(1, 4, 5), 0, 3, 5, virtual=False)
    b.total(c, 1, 1, 1, virtual=False)
    p = partition(b.graph())
    check(b.graph(), p)
    assert kinds(p) == ["matmul", "reduction"]


def test_results_of_different_rank_share_a_kernel() -> None:
    b = Builder()
    x = b.tensor(64, 7)
    b.node("REDUCTION", (x,), (64, 1), "X", False, mode="AMAX", axes=(1,))
    b.node("REDUCTION", (x,), (64,), "X", False, mode="MUL", axes=(1,))
    graph = b.graph()
    (region,) = partition(graph).regions
    for where in (device.cpu(), device.describe("sm_80")):
        (knobs, *_) = ENGINES[1].candidates(graph, region, where)
        recipe = ENGINES[1].lower(graph, region, where, knobs, {t: Buffer("tensor", t) for t in (*region.reads, *region.stores)})
        assert len(recipe.kernels) == 1


def test_an_output_is_not_stored_from_an_empty_loop_nest() -> None:
    b = Builder()
    x, y = b.tensor(0, 3), b.tensor(1, 3)
    b.add(x, y, 0, 3, virtual=False)
    b.add(y, y, 1, 3, virtual=False)
    p = partition(b.graph())
    check(b.graph(), p)
    assert sorted(r.space for r in p.regions) == [(0, 3), (1, 3)]


def test_a_value_stored_late_is_stored_before_its_earlier_readers() -> None:
    """Attention stores what it reads; the sum was to calculate it itself."""
    b = Builder()
    x = b.tensor(1, 1, 8, 4)
    y = b.add(x, x, 1, 1, 8, 4)
    b.total(y, 1, 1, 1, 1, virtual=False)
    b.node("SDPA", (y, y, y), (1, 1, 8, 4), "Q K V", False, attn_scale_value=1.0)
    p = partition(b.graph())
    check(b.graph(), p)
    assert kinds(p) == ["pointwise", "reduction", "attention"] and p.materialized == (y,)


def test_what_is_empty_is_not_stored_where_the_results_of_empty_rows_are() -> None:
    b = Builder()
    x = b.tensor(1, 0)
    b.add(b.total(x, 1, 1), x, 1, 0, virtual=False)
    p = partition(b.graph())
    check(b.graph(), p)
    assert kinds(p) == ["reduction", "pointwise"] and [r.space for r in p.regions] == [(1, 0), (1, 0)]


def test_a_value_stored_late_is_stored_before_those_that_read_it_through_others() -> None:
    """The product is there before attention stores ``y``, and takes a sum of it into its epilogue afterwards."""
    b = Builder()
    x, left, right = b.tensor(1, 1, 8, 4), b.tensor(1, 1, 8, 4), b.tensor(1, 1, 4, 4)
    y = b.add(x, x, 1, 1, 8, 4)
    product = b.matmul(left, right, 1, 1, 8, 4)
    twice = b.add(y, y, 1, 1, 8, 4)
    b.node("SDPA", (y, y, y), (1, 1, 8, 4), "Q K V", False, attn_scale_value=1.0)
    b.add(product, twice, 1, 1, 8, 4, virtual=False)
    p = partition(b.graph())
    check(b.graph(), p)
    assert sorted(kinds(p)) == ["attention", "matmul", "pointwise"] and p.materialized == (y,)
