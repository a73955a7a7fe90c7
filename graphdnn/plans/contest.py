"""Plans of one graph against each other: the same inputs for all, every result checked, all timed in turns on rotated buffers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from graphdnn import reference, targets
from graphdnn.dtypes import info
from graphdnn.engines.base import flops
from graphdnn.errors import ValidationError, explain
from graphdnn.plans.assemble import bytes_below
from graphdnn.plans.scratch import Array, Scratch, enough

if TYPE_CHECKING:
    from graphdnn.plans.plan import ExecutionPlan
    from graphdnn.targets.base import Timed

REFERENCE_WORK = 2e9
"""Operations up to which the float64 reference is calculated for the check of results; about a second or two."""
ELEMENT_WORK = 500
"""Operations that the reference and its bounds spend on an element."""
SAMPLE_S = 2e-3
"""Seconds that one sample takes at least, if MOST_CALLS executions last so long."""
SLOW_S = 0.05
"""A plan that takes longer is not run three times for a first impression, but once."""
MOST_CALLS, MOST_SETS = 100, 32
CPU_CACHE = 64 << 20
"""Bytes taken for the caches of a CPU that all cores share."""


class Arena:
    """Inputs and outputs in memory of its own, in so many copies that running through them leaves none of a copy in the cache (MOST_SETS at most).

    Nothing of a user's pack is written: its inputs are copied."""

    def __init__(self, plan: ExecutionPlan, pack: Mapping[Any, Any] | None, workspace: Any = None) -> None:
        """Inputs of ``pack``, else random ones. ``plan``: built; ``workspace``: memory to use for that purpose. Raises what execute raises for a pack
        that does not fit, NotSupportedError where inputs cannot be random or there is no memory."""
        self.graph, self.device = plan.graph, plan.device
        self.workspace = workspace
        self._blocks: list[tuple[int, Any]] = []
        self.numbers: dict[int, float | int] = {}
        with enough():
            self._fill(self._random(plan) if pack is None else self._given(plan, pack))

    def _fill(self, first: Scratch) -> None:
        for t in self.graph.outputs:
            first.put(t, None)
        self.sets = [first]
        size = sum(first.nbytes(t) for t in first.kept)
        cache = self.device.l2_bytes if self.device.kind == "cuda" else max(CPU_CACHE, self.device.l2_bytes * self.device.cores)
        for _ in range(min(math.ceil(2 * cache / max(size, 1)), MOST_SETS) - 1):
            self.sets.append(self._copy(first))
        first.wait()

    def _random(self, plan: ExecutionPlan) -> Scratch:
        from graphdnn.inspection.check import random_feeds

        made = Scratch(self.graph, self.device)
        for t, values in random_feeds(plan, np.random.default_rng(0)).items():
            found = made.give(t, values)
            if self.graph.tensors[t].by_value:
                self.numbers[t] = found
        return made

    def _given(self, plan: ExecutionPlan, pack: Mapping[Any, Any]) -> Scratch:
        binder = plan.load()[0].loose(workspace=0)
        pointers, numbers, _ = binder.bind(pack, None)
        found = binder.rooms(pack) if binder.packed else {}
        rooms = {t: (min(before, bytes_below(self.graph.tensors[t])), room) for t, (before, room) in found.items()}
        unknown = [t for t in pointers if self.graph.tensors[t].ragged and t not in rooms]
        if unknown:
            name, fix = self.graph.tensors[unknown[0]].name, "pass the array instead of its address"
            raise ValidationError(explain("a packed tensor is tuned on a copy", tensor=name, expected="an array", found="an address", fix=fix))
        self.numbers.update({t: v for t, v in numbers.items() if self.graph.tensors[t].by_value})
        made = Scratch(self.graph, self.device, rooms)
        made.wait()
        for t in self.graph.inputs:
            if t in pointers:
                made.copy(t, pointers[t])
        return made

    def _copy(self, first: Scratch) -> Scratch:
        made = Scratch(self.graph, self.device, first.rooms)
        for t in first.kept:
            made.copy(t, first.address(t))
        return made

    def _block(self, nbytes: int) -> Any:
        """Workspace, which plans share: they run one after the other."""
        fitting = [b for n, b in self._blocks if n >= nbytes]
        if not fitting:
            fitting = [Scratch(self.graph, self.device).block(nbytes)]
            self._blocks.append((nbytes, fitting[0]))
        return fitting[0]

    def calls(self, plan: ExecutionPlan) -> list[Callable[[int], None]]:
        """An execution of a built plan on each copy; each takes a stream."""
        binder, executable = plan.load()
        workspace = self.workspace if self.workspace is not None else self._block(plan.workspace_bytes)
        found: list[Callable[[int], None]] = []
        for s in self.sets:
            pack: dict[int, Any] = {self.graph.tensors[t].uid: s.address(t) for t in s.kept}
            pack |= {self.graph.tensors[t].uid: v for t, v in self.numbers.items()}
            pointers, numbers, at = binder.bind(pack, workspace)
            found.append(partial(_run, executable, pointers, numbers, at, s.rooms or None))
        return found

    def results(self, plan: ExecutionPlan) -> dict[int, Array]:
        """Bytes of the outputs after one execution, which begins with none written."""
        first = self.sets[0]
        for t in self.graph.outputs:
            first.clear(t)
        self.calls(plan)[0](0)
        first.wait()
        return {t: np.array(first.raw(t)) for t in self.graph.outputs}

    def feeds(self) -> dict[int, Any]:
        """Values of the inputs."""
        first = self.sets[0]
        return dict(self.numbers) | {t: first.get(t) for t in self.graph.inputs if t in first.kept}


def _run(executable: Any, pointers: Any, numbers: Any, workspace: int, rooms: Any, stream: int) -> None:
    executable.run(pointers, numbers, workspace, stream, rooms)


class Judge:
    """Says whether results are right: by the reference and its derived bounds, or, where that would take too long, by the heuristic plan's."""

    def __init__(self, arena: Arena, plan: ExecutionPlan) -> None:
        """``plan``: the heuristic's."""
        graph = arena.graph
        work = sum(flops(graph, r) for r in plan.partition.regions) + ELEMENT_WORK * sum(t.size for t in graph.tensors)
        self._arena, self._bounds = arena, dict[str, dict[int, tuple[Array, Array]]]()
        self.exact = work <= REFERENCE_WORK and not any(t.ragged for t in graph.tensors)
        self._expected = {} if self.exact else arena.results(plan)
        self._tolerance = _tolerance(arena)

    def __call__(self, plan: ExecutionPlan) -> str:
        """ "" for right results, else what is wrong with them."""
        found = self._arena.results(plan)
        return self._by_bounds(plan, found) if self.exact else self._by_norm(found)

    def _by_bounds(self, plan: ExecutionPlan, found: Mapping[int, Array]) -> str:
        how = plan.algorithms
        known = self._bounds.get(repr(how))
        if known is None:
            known = self._bounds[repr(how)] = reference.run_with_error(self._arena.graph, self._arena.feeds(), how)
        for t, data in found.items():
            tensor = self._arena.graph.tensors[t]
            wrong = int(np.count_nonzero(reference.mismatches(reference.from_storage(data, tensor), *known[t])))
            if wrong:
                return f"wrong result: {wrong} of {tensor.size} elements of '{tensor.name}' are outside of the error bound"
        return ""

    def _by_norm(self, found: Mapping[int, Array]) -> str:
        for t, data in found.items():
            tensor = self._arena.graph.tensors[t]
            ours, theirs = (_values(d, tensor) for d in (data, self._expected[t]))
            if not np.array_equal(np.isfinite(ours), np.isfinite(theirs)):
                return f"wrong result: '{tensor.name}' has NaN or infinities at other places than the heuristic plan's"
            ours, theirs = (np.where(np.isfinite(v), v, 0.0) for v in (ours, theirs))
            difference, size = float(np.linalg.norm(ours - theirs)), float(np.linalg.norm(theirs))
            if difference > self._tolerance * size:
                return f"wrong result: '{tensor.name}' differs from the heuristic plan's by {difference / max(size, 1e-300):.2g} of its norm"
        return ""


def _values(data: Array, tensor: Any) -> Array:
    """Values in float64: by dims and strides, or, for packed rows, of all that the buffer holds."""
    if not tensor.ragged:
        return np.asarray(reference.from_storage(data, tensor), np.float64).reshape(-1)
    from dataclasses import replace

    count = data.size * 8 // info(tensor.dtype).bits
    return np.asarray(reference.from_storage(data, replace(tensor, dim=(count,), stride=(1,), ragged=False)), np.float64)


def _tolerance(arena: Arena) -> float:
    """How far two right results may be apart, as a share of their norm: two roundings of every tensor that an op writes, and of its compute type."""
    graph = arena.graph
    written = [graph.tensors[t].dtype for n in graph.nodes for t in n.output_ids] + [n.compute for n in graph.nodes]
    return min(2 * sum(2.0 ** -_digits(d) for d in written) + 1e-9, 0.25)


def _digits(dtype: Any) -> int:
    """Binary digits of a value, the first one included; integers are within one of each other."""
    row = info(dtype)
    if row.kind != "f":
        return min(row.bits, 8)
    return {64: 53, 32: 20, 16: 8, 8: 3, 4: 2}[row.bits]


# -------------------------------------------------------------------------------------------------------------------------------------- the clock
@dataclass(eq=False)
class Contender:
    """A built plan, how it is timed, and its samples: seconds of one execution each."""

    index: int
    plan: ExecutionPlan
    timed: Timed
    calls: int
    samples: list[float]

    @property
    def seconds(self) -> float:
        """Median of the samples."""
        return statistics.median(self.samples)


def contender(arena: Arena, index: int, plan: ExecutionPlan) -> Contender:
    """A contender with one sample: a first impression, warm."""
    calls, target = arena.calls(plan), targets.get(arena.device)
    once = target.timed(calls[:1])
    try:
        first = once.seconds()
        seconds = min(once.seconds() for _ in range(1 if first > SLOW_S else 3))
    finally:
        once.close()
    count = max(1, min(MOST_CALLS, round(SAMPLE_S / max(seconds, 1e-9))))
    return Contender(index, plan, target.timed([calls[i % len(calls)] for i in range(count)]), count, [seconds])


def rounds(contenders: Sequence[Contender], count: int) -> int:
    """``count`` new samples of each; they take turns, the other way round in every second round. How many executions that were."""
    from graphdnn.targets.base import paused_collector

    for c in contenders:
        c.samples = []
    with paused_collector():
        for c in contenders:
            c.timed.seconds()
        for number in range(count):
            for c in contenders if number % 2 == 0 else reversed(contenders):
                c.samples.append(c.timed.seconds())
    return sum(c.calls for c in contenders) * (count + 1)


def compared(one: Contender, other: Contender) -> tuple[float, float]:
    """Time of one over that of the other: the median over the rounds, and twice its standard error from the median deviation."""
    ratios = [a / b for a, b in zip(one.samples, other.samples, strict=True)]
    middle = statistics.median(ratios)
    return middle, 2 * 1.4826 * statistics.median(abs(r - middle) for r in ratios) / math.sqrt(len(ratios))
