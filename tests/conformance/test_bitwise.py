"""The same bits in every run: every op of every family, whatever the number of CPU threads and whoever of them takes which items, whatever the order
of a GPU's blocks and threads (in the simulator), and run after run on a GPU."""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import graphdnn
from graphdnn import data_type, reduction_mode
from graphdnn.targets import cpu_pool, cpu_step, simulator
from tests.api_table import ROWS
from tests.api_table.row import Case
from tests.helpers import Setup, Workspace, built
from tests.norm_cases import OPS, VALUES, data_of, declared

F32 = data_type.FLOAT
IN_FLOAT = {"io_data_type": F32, "intermediate_data_type": F32, "compute_data_type": F32}


@contextmanager
def threads(count: int, single: bool) -> Iterator[None]:
    """A pool of so many CPU threads; ``single``: each item is handed out for itself, however little work it is."""
    before, run = cpu_pool._pool, cpu_step.Call.run_range

    def one_by_one(call, values, lo, hi):
        call._grain, grain = 1, call._grain
        try:
            run(call, values, lo, hi)
        finally:
            call._grain = grain

    cpu_pool._pool = cpu_pool.ThreadPool(count)
    cpu_step.Call.run_range = one_by_one if single else run
    try:
        yield
    finally:
        cpu_pool._pool, cpu_step.Call.run_range = before, run


@contextmanager
def backwards(interval: float) -> Iterator[None]:
    """The simulator starts blocks and threads from the last to the first, and Python changes threads after ``interval`` seconds."""
    before = sys.getswitchinterval()
    simulator.range = lambda *a: builtins.range(*a)[::-1]
    sys.setswitchinterval(interval)
    try:
        yield
    finally:
        del simulator.range
        sys.setswitchinterval(before)


def schedules(device: str) -> list[contextmanager]:
    """Ways to run on a device, the usual one first."""
    if device == "cpu":
        return [threads(1, False), threads(2, False), threads(2, True), threads(3, True), threads(3, True)]
    if device == "cudasim":
        return [backwards(5e-3), backwards(1e-5)]
    return []


def check(build, device, data=None, values=None, plans=False, **graph):
    """Outputs have the same bits in all schedules; ``plans``: of the best plan of every combination of engines, cuts and ways to split a range."""
    g = graphdnn.pygraph(device=device, **(graph or IN_FLOAT))
    build(g)
    built(g)
    setup = Setup(g._opgraph, device, "numpy")
    setup.fill(3, data or {}, {}, values or {})
    names = [re.sub(r"eng([2-9]|\d\d)_k12=\d+", r"eng\1", p.name) for p in g._plans]
    chosen = [i for i, n in enumerate(names) if names.index(n) == i and not n.startswith("unfused")]
    for index in chosen if plans else (0,):
        g.build_plan_at_index(index)
        seen = [bits(g, setup, index), bits(g, setup, index)]
        for schedule in schedules(device):
            with schedule:
                seen.append(bits(g, setup, index))
        wrong = [n for n, found in enumerate(seen) if found != seen[0]]
        assert not wrong, f"plan {g.get_plan_name_at_index(index)}: runs {wrong} differ from the first"


def bits(g, setup, index) -> list[bytes]:
    """Outputs of one run."""
    setup.clear_outputs()
    workspace = Workspace(g.get_workspace_size_plan_at_index(index), setup.device)
    g.execute_plan_at_index(setup.pack(), workspace.argument(), index)
    setup.fetch()
    return [setup.buffers[i].block.tobytes() for i in setup.operation_graph.outputs]


@pytest.mark.parametrize("name", ROWS)
def test_every_method(device, name):
    row = ROWS[name]
    types = row.types[0]
    case = Case(graphdnn.pygraph(device="cpu"), types)
    row.declare(case)
    check(lambda g: row.declare(Case(g, types)), device, case.data, case.values, compute_data_type=data_type.NOT_SET)


LARGE = (8, 24, 30, 20)
"""More than one thread gets, and more than one block of a GPU."""


@pytest.mark.parametrize("op", OPS)
def test_every_norm_in_large(device, op):
    dim = (2, 6, 7, 5) if device == "cudasim" else LARGE
    build = declared([op], dim)
    check(build, device, data_of(build), VALUES)


@pytest.mark.parametrize(("dim", "axes"), [((1 << 18,), (0,)), ((3, 1 << 16), (1,)), ((1 << 12, 40), (0,)), ((40, 300, 11), (0, 2))], ids=str)
def test_reductions(device, dim, axes):
    """Split ranges, columns, rows; every way to lower them."""
    dim = tuple(min(d, 90) for d in dim) if device == "cudasim" else dim

    def build(g):
        x = g.tensor(dim=dim, layout="row", data_type=F32, name="x")
        for mode in ("ADD", "NORM2", "MUL", "AMAX"):
            g.reduction(x, reduction_mode[mode], axes=axes, keepdim=True).set_output(True).set_name(mode)

    check(build, device, plans=True)


@pytest.mark.parametrize("kind", ["matmul", "conv", "weights"])
def test_sums_of_contractions(device, kind):
    """Partial results of tiles, blocks of rows and strips; sums too long for one panel."""
    small = device == "cudasim"

    def build(g):
        if kind == "matmul":
            m, n, k = (20, 12, 9) if small else (700, 300, 500)
            y = g.matmul(g.tensor(dim=(2, m, k), layout="row", name="x"), g.tensor(dim=(1, k, n), layout="row", name="w"))
            kept = (2, 1, n)
        else:
            d = 6 if small else 28
            x, w = g.tensor(dim=(4, 8, d, d), layout="row", name="x"), g.tensor(dim=(16, 8, 3, 3), layout="row", name="w")
            more = {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}
            if kind == "conv":
                y, kept = g.conv_fprop(x, w, **more), (1, 16, 1, 1)
            else:
                y = g.conv_wgrad(x, g.tensor(dim=(4, 16, d, d), layout="row", name="dy"), **more).set_dim((16, 8, 3, 3))
                kept = (16, 1, 1, 1)
        y.set_output(True).set_name("y")
        g.reduction(y, reduction_mode.ADD).set_dim(kept).set_output(True).set_name("sums")
        g.reduction(y, reduction_mode.NORM1).set_dim((1,) * len(kept)).set_output(True).set_name("total")

    check(build, device, plans=True)
