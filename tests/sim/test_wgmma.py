"""The tensor-core matmul in the simulator: right numbers for every layout and epilogue, and every planted fault is caught, every time."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from graphdnn import reference
from graphdnn.codegen.render import render
from graphdnn.codegen.spec import Launch, Recipe, Source, TensorMap
from graphdnn.dtypes import data_type
from graphdnn.engines.matmul_wgmma import SMALL_TILES
from graphdnn.errors import ExecutionError
from graphdnn.intrinsics.errors import SimulationError
from graphdnn.targets.simulator import SimulatorTarget
from tests.buffers import aligned_bytes
from tests.helpers import Data, Setup
from tests.wgmma_problems import Problem, check, plan_index, planned

D = data_type
pytestmark = pytest.mark.sim

TILES = {"shared": repr(SMALL_TILES[0]), "alternate": repr(SMALL_TILES[1]), "two blocks": repr(SMALL_TILES[2]), "cluster": repr(SMALL_TILES[3])}
"""Knobs by what is special in them."""
every_tile = pytest.mark.parametrize("tile", TILES)
faulty_tile = pytest.mark.parametrize("tile", ["shared", "alternate", "cluster"])


@every_tile
def test_training_epilogue_two_outputs_and_tails(tile):
    check(Problem(70, 40, 136, (2,), (2,), epilogue=("scale", "bias", "second", "gelu", "amax")), "cudasim", TILES[tile])


@pytest.mark.parametrize("layouts", [("row", "row"), ("row", "column"), ("column", "row"), ("column", "column")], ids="-".join)
@every_tile
def test_both_orders_of_both_inputs(layouts, tile):
    dtype = D.HALF if tile == "alternate" else D.BFLOAT16
    check(Problem(24, 18, 72, a=layouts[0], b=layouts[1], dtype=dtype, result=D.FLOAT, pad=8), "cudasim", TILES[tile], runs=1)


def test_results_contiguous_along_rows_swap_the_inputs():
    outcome = check(Problem(24, 12, 40, (1,), (3,), out="column", epilogue=("bias", "row scale", "residual")), "cudasim", TILES["alternate"], runs=1)
    source = outcome.graph._plans.plan_at(plan_index(outcome.graph, TILES["alternate"])).source
    assert "vstore" in source


@pytest.mark.parametrize("k", [1, 8, 64, 65, 320])
def test_lengths_of_k(k):
    check(Problem(17, 9, k, result=D.FLOAT, epilogue=("relu",)), "cudasim", TILES["alternate"], runs=1)


@pytest.mark.parametrize("m, n", [(1, 1), (1, 130), (130, 1), (65, 7)])
def test_sizes_around_a_tile(m, n):
    check(Problem(m, n, 24, result=D.FLOAT), "cudasim", TILES["shared"], runs=1)


@pytest.mark.parametrize("batches", [((3,), (1,)), ((1,), (3,)), ((2, 1), (1, 2)), ((2, 2), (2, 2))], ids=str)
def test_batches_that_broadcast(batches):
    check(Problem(9, 8, 24, *batches, result=D.FLOAT, epilogue=("sum",)), "cudasim", TILES["alternate"], runs=1)


@pytest.mark.parametrize("out", ["row", "column"])
@pytest.mark.parametrize("sums", ["row sums", "row maxima", "column sums", "batch column sums"])
def test_sums_of_rows_and_columns(sums, out):
    check(Problem(70, 12, 24, (2,), (2,), out=out, epilogue=("relu", sums)), "cudasim", TILES["alternate"], runs=1)


@pytest.mark.parametrize("m, n", [(1, 28), (28, 1)])
@pytest.mark.parametrize("sums", ["row sums", "column sums", "batch column sums"])
def test_sums_of_one_row_or_one_column(sums, m, n):
    """A dim of 1 counts as reduced or as kept: a sum over the batch alone is then one of columns."""
    check(Problem(m, n, 24, (1,), (3,), a="column", b="column", out="column", epilogue=("swish", sums)), "cudasim", TILES["alternate"], runs=1)


def test_infinities_and_nan():
    special = Data("special", -2.0, 2.0)
    check(Problem(20, 16, 8, epilogue=("relu", "amax")), "cudasim", TILES["alternate"], runs=1, data={"a": special})


# ------------------------------------------------------------------------------------------------------------------------------ planted faults
FAULTY = Problem(24, 24, 328, (1,), (1,), "row", "column", result=D.FLOAT, epilogue=("amax",))
"""Six steps of k: more than any simulated ring has stages."""


class Planted:
    """One kernel, whose text and recipe a test may change before it runs."""

    def __init__(self, problem: Problem, tile: str) -> None:
        g = planned(problem, "cudasim")
        self.plan = g._plans.plan_at(plan_index(g, TILES[tile]))
        self.recipe: Recipe = self.plan.recipe
        self.text = render(self.recipe.kernels[0]).text
        self.setup = Setup(g._opgraph, "cudasim", "pointer")
        self.setup.fill(1, {}, {}, {"scale": 0.5})

    def run(self) -> str:
        """ "" if the numbers are right; else what was caught."""
        target = SimulatorTarget()
        binary = target.compile(Source(self.recipe.kernels[0], self.text))
        executable = target.load(self.recipe, [binary])
        buffers = self.setup.buffers
        executable.set_extents({i: (0, self._bytes(i)) for i in buffers}, self.recipe.workspace)
        workspace = aligned_bytes(self.recipe.workspace + 1)
        try:
            executable.run({i: b.address("cudasim") for i, b in buffers.items()}, self.setup.numbers, workspace.ctypes.data, 0)
        except SimulationError as error:
            return str(error)
        for i, (value, bound) in reference.run_with_error(self.setup.operation_graph, self.setup.feeds()).items():
            if reference.mismatches(buffers[i].read(), value, bound).any():
                return "wrong numbers"
        return ""

    def _bytes(self, index: int) -> int:
        t = self.setup.operation_graph.tensors[index]
        return t.extent * (2 if t.dtype in (D.BFLOAT16, D.HALF) else 4)

    def change(self, pattern: str, to: str, count: int = 0) -> None:
        """Replace text that must be there."""
        self.text, found = re.subn(pattern, to, self.text, count=count, flags=re.MULTILINE)
        assert found, f"the kernel has no {pattern}"

    def map_with(self, which: int, **changes: object) -> None:
        """Change a tensor map of the launch."""
        steps = list(self.recipe.steps)
        at = next(i for i, s in enumerate(steps) if isinstance(s, Launch))
        args = list(steps[at].args)
        place = [i for i, a in enumerate(args) if isinstance(a, TensorMap)][which]
        args[place] = replace(args[place], **changes)
        steps[at] = replace(steps[at], args=tuple(args))
        self.recipe = replace(self.recipe, steps=tuple(steps))


FAULTS = {
    "wrong swizzle of a": lambda p: p.change(r"(a = matrix_descriptor\(.*), 128\)", r"\1, 64)"),
    "no swizzle of b": lambda p: p.change(r"(b = matrix_descriptor\(.*), 128\)", r"\1, 0)"),
    "wrong swizzle of the copy": lambda p: p.map_with(0, swizzle=0, box=(64, *p.recipe.steps[-1].args[0].box[1:])),
    "wrong descriptor stride of a": lambda p: p.change(r"(a = matrix_descriptor\(.*), 1024, 128\)", r"\1, 512, 128)"),
    "wrong descriptor stride of b": lambda p: p.change(r"(b = matrix_descriptor\(.*), 1024, 128\)", r"\1, 2048, 128)"),
    "wrong phase of the consumers": lambda p: p.change(r"^        phase = uint32\(0\)", "        phase = uint32(1)"),
    "wrong phase of the producer": lambda p: p.change(r"^            phase = uint32\(1\)", "            phase = uint32(0)"),
    "phase never flips": lambda p: p.change(r"phase = uint32\(phase \^ uint32\(1\)\)", "phase = phase", 1),
    "missing arrival at the end of a tile": lambda p: p.change(r"^ {16}barrier_arrive(_remote)?\(uint32\(empty \+ before\).*", " " * 16 + "pass"),
    "missing arrivals in the main loop": lambda p: p.change(r"^ {20}barrier_arrive(_remote)?\(uint32\(empty \+ before\).*", " " * 20 + "pass"),
    "missing arrival of the producer": lambda p: p.change(r"barrier_expect\(.*\)", "pass"),
    "too few bytes expected": lambda p: p.change(r"(barrier_expect\(.*), \d+\)", r"\1, 4096)"),
    "missing wait in the main loop": lambda p: p.change(r"acc = wgmma_wait\(acc, 1\)", "pass"),
    "missing wait after the main loop": lambda p: p.change(r"acc = wgmma_wait\(acc, 0\)", "pass"),
    "waits too weakly after the main loop": lambda p: p.change(r"wgmma_wait\(acc, 0\)", "wgmma_wait(acc, 1)"),
    "missing wait for a stage": lambda p: p.change(r"barrier_wait\(uint32\(full \+ slot\), phase\)", "pass"),
    "missing wait for a free stage": lambda p: p.change(r"barrier_wait\(uint32\(empty \+ slot\), phase\)", "pass"),
    "missing meeting after the barriers are made": lambda p: p.change(r"^    (cuda\.syncthreads|cluster_sync)\(\)", "    pass", 1),
    "missing fence of the barriers": lambda p: p.change(r"barrier_init_fence\(\)", "pass"),
    "missing sync after staging": lambda p: p.change(r"(tile_put\(.*\)\n +)warp_sync\(\)", r"\1pass", 1),
    "too many registers kept by the producer": lambda p: p.change(r"registers_decrease\(24\)", "registers_decrease(40)"),
    "coordinates exchanged": lambda p: p.change(r"\(k0, r0(.*)\)\)", r"(r0, k0\1))"),
}


@every_tile
def test_the_kernel_is_right_before_a_fault_is_planted(tile):
    assert Planted(FAULTY, tile).run() == ""


@faulty_tile
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault, tile):
    # the last arrival of a tile is for the tile after it: five tiles on four multiprocessors
    problem = replace(FAULTY, batch_a=(5,), batch_b=(5,)) if "end of a tile" in fault else FAULTY
    planted = Planted(problem, tile)
    FAULTS[fault](planted)
    caught = planted.run()
    assert caught, f"{fault} went unnoticed"
    if tile in ("shared", "cluster"):
        assert planted.run() == caught, "the same fault shows in the same way every time"


def test_missing_turn_is_caught():
    """Two tiles of one block and consumers that alternate: a stage is waited for one ring too early."""
    planted = Planted(replace(FAULTY, batch_a=(5,), batch_b=(5,), k=192), "alternate")
    assert planted.run() == ""
    planted.change(r"barrier_wait\(my_turn, turn\)", "pass")
    assert planted.run()


CLUSTER_FAULTS = {
    "a block ends while others need it": lambda p: p.change(r"^    cluster_sync\(\)  #.*", "    pass"),
    "copy to one block only": lambda p: p.change(r"tma_multicast\((.*), 3\)", r"tma_multicast(\1, 1)"),
    "both blocks bring the same part": lambda p: p.change(r"rank = cluster_rank\(\)", "rank = uint32(0)"),
    "stage is freed in one block only": lambda p: p.change(r"(barrier_arrive_remote\(.*), uint32\(thread & uint32\(127\)\)\)", r"\1, rank)"),
    "stage waits for its own consumers only": lambda p: p.change(r"(barrier_init\(uint32\(empty.*), 2\)", r"\1, 1)"),
}


@pytest.mark.parametrize("fault", CLUSTER_FAULTS)
def test_planted_faults_of_clusters_are_caught(fault):
    planted = Planted(FAULTY, "cluster")
    CLUSTER_FAULTS[fault](planted)
    caught = planted.run()
    assert caught, f"{fault} went unnoticed"
    assert planted.run() == caught


def test_missing_sync_before_the_next_slice_is_caught():
    planted = Planted(replace(FAULTY, n=136, k=8), "two blocks")
    planted.change(r"warp_sync\(\)(\n +s = uint32)", r"pass\1")
    assert "race" in planted.run()


def test_reports_name_the_place():
    planted = Planted(FAULTY, "alternate")
    FAULTS["missing arrival of the producer"](planted)
    assert re.search(r"deadlock: .*threads 0 wait at the barrier.*in line \d+|deadlock: .*wait at the barrier", planted.run())


def test_extents_are_checked():
    planted = Planted(FAULTY, "alternate")
    planted.map_with(0, dims=(328, 25, *planted.recipe.steps[-1].args[0].dims[2:]))
    assert "reach past the tensor's memory" in planted.run()


def test_simulation_errors_are_execution_errors():
    assert issubclass(SimulationError, ExecutionError) and np.float32(1) == 1
