"""Matmul problems for the tensor-core engine: built through the public API, run with that engine forced, compared with the reference.

Used by the simulator's tests and by those on a GPU; :func:`random_problem` draws shapes, layouts, types and epilogues for the fuzz.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import graphdnn
from graphdnn import reference
from graphdnn.dtypes import data_type, info
from tests.helpers import Outcome, Setup, Workspace

D = data_type
ENGINE = 3


@dataclass(frozen=True)
class Problem:
    """``a``, ``b``: layouts of the inputs ("row": k, n contiguous; "column": m, k), ``out`` of the results. ``batch_a``, ``batch_b``: leading dims.
    ``epilogue``: names in EPILOGUES, applied in order. ``pad``: elements between the lines of every matrix, a multiple of 8."""

    m: int
    n: int
    k: int
    batch_a: tuple[int, ...] = ()
    batch_b: tuple[int, ...] = ()
    a: str = "row"
    b: str = "row"
    out: str = "row"
    dtype: data_type = D.BFLOAT16
    result: data_type = D.BFLOAT16
    epilogue: tuple[str, ...] = ()
    pad: int = 0

    @property
    def batch(self) -> tuple[int, ...]:
        """Leading dims of the result."""
        return tuple(np.broadcast_shapes(self.batch_a, self.batch_b))


def strides(batch: tuple[int, ...], rows: int, columns: int, layout: str, pad: int = 0) -> tuple[int, ...]:
    """Packed strides with lines at multiples of 8 elements, ``pad`` more between them."""
    inner, outer = (columns, rows) if layout == "row" else (rows, columns)
    line = -(-inner // 8) * 8 + pad
    total, found = line * outer, []
    for d in reversed(batch):
        found.append(total)
        total *= d
    return (*reversed(found), *((line, 1) if layout == "row" else (1, line)))


def _vector(g: Any, p: Problem, name: str, rows: bool, dtype: data_type = D.BFLOAT16) -> Any:
    dim = (*(1 for _ in p.batch), p.m if rows else 1, 1 if rows else p.n)
    return g.tensor(dim=dim, layout="row", data_type=dtype, name=name)


def _full(g: Any, p: Problem, name: str) -> Any:
    return g.tensor(dim=(*p.batch, p.m, p.n), stride=strides(p.batch, p.m, p.n, p.out), data_type=p.result, name=name)


def _scale(g: Any, p: Problem, y: Any) -> Any:
    rank = len(p.batch) + 2
    return g.mul(y, g.tensor(dim=[1] * rank, stride=[1] * rank, is_pass_by_value=True, data_type=D.FLOAT, name="scale"))


def _reduced(mode: str, dim: Callable[[Problem], tuple[int, ...]]) -> Callable[[Any, Problem, Any], Any]:
    def add(g: Any, p: Problem, y: Any) -> Any:
        out = g.reduction(y, graphdnn.reduction_mode[mode])
        out.set_name(f"{mode}{dim(p)}").set_output(True).set_data_type(D.FLOAT).set_dim(dim(p))
        return y

    return add


def _second(g: Any, p: Problem, y: Any) -> Any:
    done(g, p, y, "second", p.dtype)
    return y


def done(g: Any, p: Problem, y: Any, name: str, dtype: data_type) -> None:
    """Mark an output."""
    dim = (*p.batch, p.m, p.n)
    y.set_name(name).set_output(True).set_data_type(dtype).set_dim(dim).set_stride(strides(p.batch, p.m, p.n, p.out, p.pad))


ONES = lambda p: tuple(1 for _ in p.batch)  # noqa: E731
EPILOGUES: dict[str, Callable[[Any, Problem, Any], Any]] = {
    "scale": _scale,
    "bias": lambda g, p, y: g.add(y, _vector(g, p, "bias", False)),
    "float bias": lambda g, p, y: g.add(y, _vector(g, p, "bias", False, D.FLOAT)),
    "row scale": lambda g, p, y: g.mul(y, _vector(g, p, "row", True)),
    "residual": lambda g, p, y: g.add(y, _full(g, p, "residual")),
    "gelu": lambda g, p, y: g.gelu(y),
    "relu": lambda g, p, y: g.relu(y),
    "swish": lambda g, p, y: g.swish(y),
    "second": _second,
    "amax": _reduced("AMAX", lambda p: (*ONES(p), 1, 1)),
    "sum": _reduced("ADD", lambda p: (*ONES(p), 1, 1)),
    "row sums": _reduced("ADD", lambda p: (*p.batch, p.m, 1)),
    "row maxima": _reduced("MAX", lambda p: (*p.batch, p.m, 1)),
    "column sums": _reduced("ADD", lambda p: (*ONES(p), 1, p.n)),
    "batch column sums": _reduced("ADD", lambda p: (*p.batch, 1, p.n)),
}
SUMS = ("row sums", "row maxima", "column sums", "batch column sums")
"""Epilogues that only join in the partition labelled "sums"."""


def build(g: Any, p: Problem) -> None:
    """Declare the problem on a graph."""
    a = g.tensor(dim=(*p.batch_a, p.m, p.k), stride=strides(p.batch_a, p.m, p.k, p.a, p.pad), data_type=p.dtype, name="a")
    b = g.tensor(dim=(*p.batch_b, p.k, p.n), stride=strides(p.batch_b, p.k, p.n, p.b, p.pad), data_type=p.dtype, name="b")
    y = g.matmul(a, b, compute_data_type=D.FLOAT, name="matmul")
    for step in p.epilogue:
        y = EPILOGUES[step](g, p, y)
    done(g, p, y, "y", p.result)


def planned(p: Problem, device: str) -> Any:
    """The graph with its plans created, not built."""
    g = graphdnn.pygraph(device=device, intermediate_data_type=D.FLOAT, compute_data_type=D.FLOAT)
    build(g, p)
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([graphdnn.heur_mode.A])
    return g


def plan_index(g: Any, config: int | str | None = None) -> int:
    """Index of the first plan with one region on the engine, with KERNEL_CFG or knobs ``config`` if given; AssertionError if there is none."""
    names = [g.get_plan_name_at_index(i) for i in range(g.get_execution_plan_count())]
    number = str(config) if isinstance(config, int) else r"\d+"
    found = [i for i, n in enumerate(names) if re.fullmatch(rf"(\w+\|)?r0:eng{ENGINE}_k12={number}", n)]
    if isinstance(config, str):
        found = [i for i in found if g._plans.plan_at(i).choices[0].knobs == config]
    assert found, f"engine {ENGINE} does not take the graph as a whole: {names}"
    return found[0]


def check(
    p: Problem,
    device: str,
    config: int | str | None = None,
    *,
    seed: int = 0,
    runs: int = 2,
    slack: float = 1.0,
    data: Mapping[str, Any] | None = None,
) -> Outcome:
    """Run the problem on the engine and compare every output with the reference. ``slack``: what the derived error bounds are multiplied by."""
    g = planned(p, device)
    index = plan_index(g, config)
    g.build_plan_at_index(index)
    setup = Setup(g._opgraph, device, "numpy")
    setup.fill(seed, data or {}, {}, {"scale": 0.37})
    wanted = reference.run_with_error(setup.operation_graph, setup.feeds())
    outcome, before = Outcome(g), None
    for _ in range(runs):
        setup.clear_outputs()
        pack, workspace = setup.pack(), Workspace(g.get_workspace_size_plan_at_index(index), device)
        g.execute_plan_at_index(pack, workspace.argument(), index)
        setup.fetch()
        setup.assert_undamaged()
        workspace.assert_undamaged()
        now = {i: setup.buffers[i].block.tobytes() for i in setup.operation_graph.outputs}
        assert before is None or before == now, "two runs of one plan gave different bits"
        before = now
    for i in setup.operation_graph.outputs:
        t, got = setup.operation_graph.tensors[i], setup.buffers[i].read()
        value, bound = wanted[i]
        wrong = reference.mismatches(got, value, bound * slack)
        if wrong.any():
            at = tuple(int(x) for x in np.argwhere(wrong)[0])
            error = f"{int(wrong.sum())} of {got.size} wrong, first at {at}: {got[at]!r}, expected {value[at]!r} within {bound[at] * slack:.3g}"
            raise AssertionError(f"'{t.name}' of {p} with KERNEL_CFG {config}: {error}")
        outcome.outputs[t.name], outcome.expected[t.name] = got, value
    return outcome


def random_problem(rng: np.random.Generator, largest: int = 600) -> Problem:
    """A problem that the engine takes: any sizes, both orders of everything, batches that broadcast."""
    m, n, k = (int(rng.choice([rng.integers(1, 40), rng.integers(1, largest), 64 * rng.integers(1, largest // 64 + 1)])) for _ in range(3))
    batches = [((), ()), ((), ()), ((2,), (2,)), ((3,), (1,)), ((1,), (3,)), ((2, 3), (2, 3)), ((2, 1), (1, 3))]
    batch_a, batch_b = batches[rng.integers(len(batches))]
    value = ["scale", "bias", "float bias", "row scale", "residual", "gelu", "relu", "swish"]
    chosen = [str(s) for s in rng.permutation(value)[: rng.integers(0, 4)]]
    chosen = [s for s in chosen if s != "float bias" or "bias" not in chosen]
    tail = [str(s) for s in rng.permutation(["second", "amax", "sum", *SUMS])[: rng.choice([0, 0, 1, 1, 2])]]
    tail = [s for s in tail if s != "batch column sums" or len(set(batch_a + batch_b)) > 1]
    layout = lambda: str(rng.choice(["row", "column"]))  # noqa: E731
    dtype = D.BFLOAT16 if rng.random() < 0.6 else D.HALF
    result = [dtype, dtype, D.FLOAT, D.HALF, D.FP8_E4M3][rng.integers(5)]
    return Problem(m, n, k, batch_a, batch_b, layout(), layout(), layout(), dtype, result, (*chosen, *tail), int(rng.choice([0, 0, 8, 24])))


def bytes_of(p: Problem) -> int:
    """Rough memory of a problem."""
    size = info(p.dtype).bits // 8
    batch = int(np.prod(p.batch)) if p.batch else 1
    return batch * (p.m * p.k + p.k * p.n + p.m * p.n) * size
