"""Which outputs may be written over which inputs."""

from __future__ import annotations

from graphdnn.passes.regions import partition
from graphdnn.plans.overlap import inplace_pairs
from tests.opgraphs import Builder


def pairs(builder):
    graph = builder.graph()
    return inplace_pairs(graph, partition(graph))


def test_running_statistics():
    """Both terms of the next value end in it, behind a reduction."""
    b = Builder()
    x, before, rest = b.tensor(4, 3, 5), b.tensor(1, 3, 1), b.tensor(1, 1, 1)
    mean = b.total(x, 1, 3, 1)
    kept = b.node("POINTWISE", (before, rest), (1, 3, 1), "IN_0 IN_1", mode="MUL")
    after = b.add(mean, kept, 1, 3, 1, virtual=False)
    assert pairs(b) == {(after, before)}


def test_residual_stream():
    b = Builder()
    x, y = b.tensor(2, 3), b.tensor(2, 3)
    out = b.add(b.add(x, y, 2, 3), x, 2, 3, virtual=False)
    assert pairs(b) == {(out, x), (out, y)}


def test_input_that_something_else_reads():
    b = Builder()
    x, y = b.tensor(2, 3), b.tensor(2, 3)
    out = b.add(x, y, 2, 3, virtual=False)
    b.total(x, 2, 1, virtual=False)
    assert pairs(b) == {(out, y)}


def test_output_that_is_read_again():
    """It could be calculated again from the input, which is gone."""
    b = Builder()
    out = b.add(b.tensor(2, 3), b.tensor(2, 3), 2, 3, virtual=False)
    b.total(out, 2, 1, virtual=False)
    assert pairs(b) == set()


def test_other_dims():
    """A row that every row of the output reads."""
    b = Builder()
    x, row = b.tensor(2, 3), b.tensor(1, 3)
    out = b.add(x, row, 2, 3, virtual=False)
    assert pairs(b) == {(out, x)}


def test_operands_of_tiled_kernels():
    b = Builder()
    residual = b.tensor(4, 6)
    b.add(b.matmul(b.tensor(4, 5), b.tensor(5, 6), 4, 6), residual, 4, 6, virtual=False)
    assert pairs(b) == set()
