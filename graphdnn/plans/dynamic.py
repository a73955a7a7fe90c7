"""Plans of one graph for many shapes, few of which need a compilation.

A shape gets a plan of its own: its graph is lowered for it (milliseconds of Python, kept for the next call), with the engines and knobs of a *line*,
and the kernels are those of the line's forms (codegen/parametric.py), compiled when the first shape needs them. The first line is the plan that the
heuristics chose for the typical shape. A shape that its engines refuse (an extent that TMA cannot address) or whose kernel would have another form
goes to a *general* line, which promises nothing about the alignment of rows, so that one form serves all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from graphdnn.codegen.parametric import Forms, launched, parametric
from graphdnn.codegen.spec import Recipe
from graphdnn.codegen.tape import TapeTooLong
from graphdnn.dtypes import info
from graphdnn.engines import ENGINES
from graphdnn.errors import GraphError
from graphdnn.ir.extent import plain
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.passes.regions import Partition
from graphdnn.plans import cache, candidates, heuristics
from graphdnn.plans.assemble import assemble
from graphdnn.plans.heuristics import Candidate, Option
from graphdnn.plans.plan import ExecutionPlan, Owned

if TYPE_CHECKING:
    from graphdnn.device import DeviceProps
    from graphdnn.engines.base import Engine
    from graphdnn.plans.cache import KernelStore

Values = tuple[int, ...]
"""Values of the symbols, in their order."""
MAX_PLANS = 512
"""Plans kept; the oldest goes first."""
FIRST_FORMS = 1
"""So many sets of forms the first line may have before other shapes go to a general one: what is fast stays fast, and compilations stay few."""


@dataclass
class Line:
    """Engines and knobs for each region of the partition ``label``. ``general``: rows are aligned to elements only. ``grown``: how often a shape
    brought a form that was new."""

    label: str
    choices: tuple[tuple[Engine, Any], ...]
    general: bool
    grown: int = 0


@dataclass(frozen=True)
class Fitted:
    """A line on the graph of one shape."""

    line: Line
    graph: OperationGraph
    candidate: Candidate
    recipe: Recipe
    owned: Owned


class ShapePlans:
    """Plans of a graph by the values of its symbols. Threads may share it."""

    def __init__(
        self,
        device: DeviceProps,
        first: Candidate,
        graph_at: Callable[[Values], OperationGraph],
        neighbours: Callable[[Values, bool], Sequence[Values]],
        typical: Values,
        store: KernelStore | None = None,
        forms: Forms | None = None,
    ) -> None:
        """``first``: the chosen plan for the shape ``typical``. ``graph_at``: the graph for values of the symbols. ``neighbours``: other
        shapes, which show what numbers change, as round as the given one or (True) as odd as they may be. ``promised``: the bytes of workspace
        that a user was told to be enough; None until somebody asks. ``store``, ``forms``: of a kernel cache that graphs share."""
        self._device, self._graph_at, self._neighbours = device, graph_at, neighbours
        self._typical, self._store = typical, store
        self.forms = Forms() if forms is None else forms
        self.promised: int | None = None
        self._largest = 0
        self.lines = [Line(first.label, tuple((o.engine, o.knobs) for o in first.options), False)]
        self._plans: dict[Values, ExecutionPlan] = {}
        self._lock = threading.RLock()

    def plan(self, values: Values) -> ExecutionPlan:
        """The built plan for these values. Raises what building a graph of this shape raises."""
        found = self._plans.get(values)
        if found is None:
            with self._lock:
                found = self._plans.get(values)
                if found is None:
                    while len(self._plans) >= MAX_PLANS:
                        del self._plans[next(iter(self._plans))]
                    before = len(self.forms.news)
                    made = self._made(values)
                    with cache.because(self.forms.news[-1] if len(self.forms.news) > before else "a plan was built"):
                        found = self._plans[values] = made.build()
                    self._largest = max(self._largest, found.workspace_bytes)
        return found

    def known(self, values: Values) -> bool:
        """Whether the plan for these values is there: nothing is lowered, compiled or loaded for it."""
        return values in self._plans

    def largest(self, corners: Iterable[Values]) -> int:
        """Bytes of workspace that the lines need for these values of the symbols, or that a plan made since needed. It is :attr:`promised` then."""
        with self._lock:
            if self.promised is None:
                graphs = [g for g in (self._valid(values) for values in corners) if g is not None]
                self._largest = max([self._largest, *(f.recipe.workspace for g in graphs for f in self._every(g))])
            self.promised = self._largest
            return self._largest

    def _every(self, graph: OperationGraph) -> list[Fitted]:
        """Every line on ``graph``; a new one where none fits. Empty where there is nothing to do, and for a shape that no plan runs."""
        if all(graph.tensors[o].size == 0 for o in graph.outputs):
            return []
        fitted = [f for f in (self._fitted(line, graph) for line in self.lines) if f is not None]
        try:
            return fitted or [self._general(graph)]
        except GraphError:
            return []

    def _made(self, values: Values) -> ExecutionPlan:
        graph = self._graph_at(values)
        if all(graph.tensors[o].size == 0 for o in graph.outputs):
            return self._nothing(graph)
        fitted = [f for f in (self._fitted(line, graph) for line in self.lines) if f is not None and self._promise_kept(f)]
        chosen = next((f for f in fitted if self._known(f)), None) or self._grown(fitted, graph, values)
        recipe, owned = parametric(chosen.recipe, chosen.owned, self.forms)
        made = ExecutionPlan.of(chosen.graph, self._device, chosen.candidate, self._store, lowered=(recipe, owned))
        made.forms = self.forms
        return made

    def _nothing(self, graph: OperationGraph) -> ExecutionPlan:
        """The plan of a graph whose outputs have no elements: it checks its buffers and launches nothing."""
        candidate = heuristics.candidate(Partition((), ()), [], self._device.kind)
        return ExecutionPlan.of(graph, self._device, candidate, self._store, lowered=(Recipe((), ()), ()))

    def _known(self, fitted: Fitted) -> bool:
        return self.forms.known([fitted.recipe.kernels[k] for k in launched(fitted.recipe)])

    def _grown(self, fitted: Sequence[Fitted], graph: OperationGraph, values: Values) -> Fitted:
        """The line that takes the shape in: the first where its forms are there or it has few, else a general one, which is made if there is none."""
        first = next((f for f in fitted if not f.line.general and (f.line.grown < FIRST_FORMS or self._formed(f))), None)
        chosen = first or next((f for f in fitted if f.line.general), None) or self._general(graph, next(iter(fitted), None))
        chosen.line.grown += not self._formed(chosen)
        for k in launched(chosen.recipe):
            self.forms.kernel(chosen.recipe.kernels[k])
        general = chosen.line.general
        for other in dict.fromkeys((*self._neighbours(values, general), *self._neighbours(self._typical, general))):
            model = self._valid(other)
            near = None if model is None else self._fitted(chosen.line, model)
            for spec in () if near is None else (near.recipe.kernels[k] for k in launched(near.recipe)):
                self.forms.learn(spec)
        return chosen

    def _valid(self, values: Values) -> OperationGraph | None:
        """The graph for values that nobody asked for; None where an op refuses them (a dim that must be even, or equal to another one)."""
        try:
            return self._graph_at(values)
        except GraphError:
            return None

    def _formed(self, fitted: Fitted) -> bool:
        return self.forms.formed([fitted.recipe.kernels[k] for k in launched(fitted.recipe)])

    def _promise_kept(self, fitted: Fitted) -> bool:
        """Whether the workspace of which the user was told is enough."""
        return self.promised is None or fitted.recipe.workspace <= self.promised

    def _general(self, graph: OperationGraph, otherwise: Fitted | None = None) -> Fitted:
        """A new general line: what the heuristics choose for a typical shape with odd extents, or, if ``graph`` does not fit that, for ``graph``.
        One that needs more than the promised workspace is taken only where every plan does, and there is nothing ``otherwise``."""
        found = None
        for model in (m for m in (self._valid(self._neighbours(self._typical, True)[0]), graph) if m is not None):
            try:
                plans = candidates.create(_loosened(model), self._device)
            except GraphError:
                if model is graph:
                    raise
                continue
            for best in (plans.plan_at(i).candidate for i in range(len(plans) if model is graph else 1)):
                line = Line(best.label, tuple((o.engine, o.knobs) for o in best.options), True)
                fitted = self._fitted(line, graph)
                if fitted is not None and self._promise_kept(fitted):
                    self.lines.append(line)
                    return fitted
                found = found or fitted
        if otherwise is not None:
            return otherwise
        assert found is not None, "a candidate of a graph fits this graph"
        self.lines.append(found.line)
        return found

    def _fitted(self, line: Line, graph: OperationGraph) -> Fitted | None:
        """The line on ``graph``; None where its engines do not take it."""
        graph = _loosened(graph) if line.general else graph
        partition = candidates.partition(graph, self._device, line.label, ENGINES)
        if len(partition.regions) != len(line.choices):
            return None
        options = []
        for region, (engine, knobs) in zip(partition.regions, line.choices, strict=True):
            if not engine.check(graph, region, self._device, knobs):
                return None
            cost = engine.cost(graph, region, self._device, knobs)
            options.append(Option(engine, knobs, 0, cost, 1, engine.numeric_notes(graph, region, knobs)))
        candidate = heuristics.candidate(partition, options, self._device.kind, line.label)
        try:
            recipe, owned = assemble(graph, self._device, candidate)
        except TapeTooLong:
            return None
        return Fitted(line, graph, candidate, recipe, owned)


def numbered(graph: OperationGraph) -> OperationGraph:
    """The graph of one shape in plain numbers: whoever is given a plan's graph may ask whether an extent is 1 (see ``ir.extent``)."""
    return replace(graph, tensors=tuple(replace(t, dim=plain(t.dim), stride=plain(t.stride)) for t in graph.tensors))


def _loosened(graph: OperationGraph) -> OperationGraph:
    """The graph with tensors that are aligned to their elements only."""
    tensors = tuple(replace(t, alignment=min(t.alignment, max(1, info(t.dtype).bits // 8))) for t in graph.tensors)
    return replace(graph, tensors=tensors)
