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


def test_another_axis_ends_the_walk() -> None:
    b = Builder()
    x = b.tensor(4, 8)
    d = b.add(x, b.total(x, 4, 1), 4, 8)
    b.total(d, 1, 8, virtual=False)
    p = partition(b.graph())
    check(b.graph(), p)
    assert kinds(p) == ["rows", "reduction"] and [b.tensors[t].dim for t in p.materialized] == [(4, 8)]


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
