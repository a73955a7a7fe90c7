"""Run a plan on random inputs and compare every output with the reference."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphdnn import reference
from graphdnn.codegen.spec import Limits
from graphdnn.dtypes import data_type, info
from graphdnn.errors import NotSupportedError, ValidationError, explain
from graphdnn.ir.tensor import Tensor
from graphdnn.opspecs import registry
from graphdnn.plans.plan import ExecutionPlan
from graphdnn.plans.scratch import Scratch

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Compared:
    """One output: the largest difference from the reference, the largest reference value, and elements beyond the bound that correct kernels keep."""

    name: str
    difference: float
    largest: float
    wrong: int
    count: int


@dataclass(frozen=True)
class Checked:
    """``first`` and ``best``: seconds of the first and of the fastest execution."""

    outputs: tuple[Compared, ...]
    first: float
    best: float

    @property
    def right(self) -> bool:
        """Whether every element is within its bound."""
        return not any(o.wrong for o in self.outputs)

    def lines(self) -> Iterator[str]:
        """The result as text."""
        for o in self.outputs:
            verdict = "right" if not o.wrong else f"WRONG: {o.wrong} of {o.count} elements are outside of the error bound"
            yield f"{o.name}: largest difference {o.difference:.3g} (largest value {o.largest:.3g}); {verdict}"
        yield f"time: {self.best * 1e6:.1f} us (first {self.first * 1e6:.1f} us)"


def random_values(rng: np.random.Generator, tensor: Tensor, within: tuple[int, int] | None = None) -> Array:
    """Values for an input: N(0, 1) for floats, small integers for the others, rounded to the data type; integers in ``within`` where it is given."""
    row = info(tensor.dtype)
    if within is not None:
        return rng.integers(within[0], max(within) + 1, tensor.dim)
    if tensor.dtype is data_type.FP8_E8M0:
        return np.asarray(2.0 ** rng.integers(-3, 4, tensor.dim))
    if row.kind == "f":
        return reference.round_to(rng.standard_normal(tensor.dim), tensor.dtype)
    return rng.integers(max(-4, int(row.limits[0])), min(5, int(row.limits[1]) + 1), tensor.dim)


def check(plan: ExecutionPlan, seed: int = 0, repeat: int = 5, tell: Callable[[str], None] = lambda line: None) -> Checked:
    """Execute ``plan`` (built, on a device that is present) once and then ``repeat`` times. Raises what execute raises, NotSupportedError for packed
    tensors, whose offsets cannot be random, and ValidationError for a negative seed."""
    if seed < 0:
        raise ValidationError(explain("seed is too small", expected="at least 0", found=seed))
    plan.load()
    graph, rng = plan.graph, np.random.default_rng(seed)
    feeds = random_feeds(plan, rng)
    tell("calculating the reference")
    expected = reference.run_with_error(graph, feeds, plan.algorithms)
    memory = Scratch(graph, plan.device)
    pack: dict[int, Any] = {graph.tensors[t].uid: memory.give(t, values) for t, values in feeds.items()}
    pack |= {graph.tensors[t].uid: memory.put(t, None) for t in graph.outputs}
    workspace = memory.block(plan.workspace_bytes)
    tell("executing")
    times = []
    for _ in range(1 + max(0, repeat)):
        start = time.perf_counter()
        plan.execute(pack, workspace)
        memory.wait()
        times.append(time.perf_counter() - start)
    return Checked(tuple(_compare(graph.tensors[t], memory.get(t), *expected[t]) for t in graph.outputs), times[0], min(times))


def random_feeds(plan: ExecutionPlan, rng: np.random.Generator) -> dict[int, Any]:
    """Values of the inputs: what an op draws for its own, within what a kernel checks, else anything. NotSupportedError for packed tensors, whose
    offsets cannot be random."""
    graph, feeds = plan.graph, {}
    packed = next((t.name for t in graph.tensors if t.ragged), None)
    if packed is not None:
        rule = "a plan with packed tensors cannot run on random inputs"
        raise NotSupportedError(explain(rule, tensor=packed, expected="tensors without ragged offsets", found="a ragged offset"))
    within = {s.values.buffer.index: (s.low, s.high) for s in plan.recipe.steps if isinstance(s, Limits)}
    drawn: dict[int, Any] = {}
    for n in graph.nodes:
        draw = registry.spec(n.op).drawn
        if draw is not None:
            values = draw(n, {port: graph.tensors[t].dim for port, t in n.inputs}, rng)
            drawn = {t: values[port] for port, t in n.inputs if port in values} | drawn
    for t in graph.inputs:
        tensor = graph.tensors[t]
        own = drawn.get(t) if tensor.value is None else tensor.value
        feeds[t] = random_values(rng, tensor, within.get(t)) if own is None else own
    return feeds


def _compare(tensor: Tensor, found: Array, value: Array, bound: Array) -> Compared:
    wrong = reference.mismatches(found, value, bound)
    with np.errstate(all="ignore"):
        difference = np.abs(found.astype(np.float64) - value.astype(np.float64))
    finite = np.isfinite(difference)
    sizes = np.abs(value[np.isfinite(value)]) if value.dtype.kind == "f" else np.abs(value)
    return Compared(
        tensor.name, float(difference[finite].max(initial=0.0)), float(sizes.max(initial=0.0)), int(np.count_nonzero(wrong)), math.prod(tensor.dim)
    )

