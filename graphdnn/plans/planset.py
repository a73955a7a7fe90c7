"""The plans of one graph, in order of preference, and what a user may do with them: look, filter, add, build."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphdnn import log
from graphdnn.device import DeviceProps
from graphdnn.errors import BuildError, GraphError, NotSupportedError, explain
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.plans import heuristics
from graphdnn.plans.heuristics import Candidate, Option
from graphdnn.plans.plan import ExecutionPlan

if TYPE_CHECKING:
    from graphdnn.codegen.spec import KernelSpec
    from graphdnn.engines.base import Engine
    from graphdnn.plans.cache import KernelStore
    from graphdnn.plans.candidates import Survey

KERNEL_CFG = "KERNEL_CFG"
GIVE_UP_AFTER = 3
"""So many plans in a row that fail with the same text fail for a reason that no other plan cures (no compiler)."""


@dataclass(frozen=True)
class Rejection:
    """Why something was left out. ``engine``: of an engine or plan; ``region``: "r0", with the label of another partition; ``node``: its anchor."""

    engine: str
    region: str
    node: str
    reason: str

    def __str__(self) -> str:
        place = ", ".join(p for p in (self.region, f"node '{self.node}'" if self.node else "") if p)
        return f"{self.engine} ({place}): {self.reason}" if place else f"{self.engine}: {self.reason}"


@dataclass(frozen=True)
class KnobRange:
    """A knob of an engine: name of its knob_type, smallest and largest value, step."""

    type: str
    min_value: int
    max_value: int
    stride: int = 1


class PlanSet:
    """Candidate plans. Nothing is compiled before :meth:`build` or :meth:`build_at`; the filters only mark plans, so indexes stay."""

    def __init__(
        self,
        graph: OperationGraph,
        device: DeviceProps,
        survey: Survey,
        engines: Sequence[Engine],
        rejections: Iterable[Rejection] = (),
        store: KernelStore | None = None,
    ) -> None:
        """``survey``: the partition that custom plans use, with what the engines offer for it. ``oversized``: plans that were left out for
        ``workspace_limit``."""
        self.graph = graph
        self.device = device
        self.survey = survey
        self.rejections: list[Rejection] = list(rejections)
        self.store = store
        self._engines = {e.id: e for e in engines}
        self._plans: list[ExecutionPlan] = []
        self._barred: dict[int, str] = {}
        self._filters: set[str] = set()
        self.workspace_limit: int | None = None
        self.oversized: set[int] = set()
        self._chosen: int | None = None
        self.ready: ExecutionPlan | None = None
        self._lock = threading.RLock()

    # -- the list -------------------------------------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Any:
        return iter(tuple(self._plans))

    def count(self) -> int:
        """Number of plans, deselected ones included."""
        return len(self._plans)

    def add(self, candidate: Candidate) -> int:
        """Append a plan; its index."""
        self._plans.append(ExecutionPlan.of(self.graph, self.device, candidate, self.store))
        return len(self._plans) - 1

    def plan_at(self, index: int) -> ExecutionPlan:
        """The plan at ``index``. BuildError if there is none."""
        if isinstance(index, bool) or not hasattr(index, "__index__") or not 0 <= int(index) < len(self._plans):
            raise BuildError(
                explain(
                    f"Plan index {index} is invalid.",
                    expected=f"0 to {len(self._plans) - 1}" if self._plans else "plans to have been created",
                    found=index,
                )
            )
        return self._plans[int(index)]

    def name_at(self, index: int) -> str:
        """Name of the plan at ``index``."""
        return self.plan_at(index).name

    @property
    def chosen_index(self) -> int:
        """Index of the plan that execute uses; -1 before one is built."""
        return -1 if self._chosen is None else self._chosen

    @property
    def chosen(self) -> ExecutionPlan:
        """The plan that execute uses. BuildError before one is built."""
        if self.ready is None:
            raise BuildError(explain("Plan index -1 is invalid.", expected="a built plan", found="none", fix="call build_plans() first"))
        return self.ready

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace of the chosen plan."""
        return self.chosen.workspace_bytes

    # -- engines and custom plans ---------------------------------------------------------------------------------------------------------
    def engine_count(self) -> int:
        """One more than the highest engine id: ids are 0 to count - 1."""
        return 1 + max(self._engines, default=-1)

    def _engine_options(self, engine_id: int) -> tuple[int, list[Option]]:
        """The costliest region that the engine takes, and what it offers there."""
        engine = self._engines.get(engine_id)
        if engine is None:
            raise BuildError(explain("no such engine", expected=f"an engine id, one of {sorted(self._engines)}", found=engine_id))
        region = heuristics.costliest(self.survey.options, engine_id)
        if region is None:
            reasons = "; ".join(r.reason for r in self.rejections if r.engine == engine.name) or "the graph has nothing for it"
            raise BuildError(explain(f"engine {engine_id} ({engine.name}) does not take this graph: {reasons}", fix="use another engine id"))
        return region, [o for o in self.survey.options[region] if o.engine.id == engine_id]

    def knobs_for_engine(self, engine_id: int) -> tuple[KnobRange, ...]:
        """Knobs of an engine for this graph: KERNEL_CFG indexes its list of configurations. BuildError for an engine that does not take it."""
        _, options = self._engine_options(engine_id)
        return (KnobRange(KERNEL_CFG, 0, len(options) - 1),)

    def add_custom(self, engine_id: int, knobs: Mapping[Any, int] | None = None) -> int:
        """Append a plan that uses engine ``engine_id`` with ``knobs`` in the costliest region that it takes; its index. BuildError if it cannot."""
        region, options = self._engine_options(engine_id)
        index = 0
        for knob, value in (knobs or {}).items():
            if getattr(knob, "name", knob) != KERNEL_CFG:
                raise BuildError(explain(f"engine {engine_id} has no such knob", expected=KERNEL_CFG, found=getattr(knob, "name", knob)))
            if not 0 <= int(value) < len(options):
                raise BuildError(
                    explain(f"knob {KERNEL_CFG} of engine {engine_id} is out of range", expected=f"0 to {len(options) - 1}", found=value)
                )
            index = int(value)
        if not self.survey.complete:
            raise BuildError(explain("no plan for the rest of the graph", found=self._reasons()))
        base = [heuristics.best(o) for o in self.survey.options]
        base[region] = options[index]
        return self.add(heuristics.candidate(self.survey.partition, base, self.device.kind))

    # -- filters --------------------------------------------------------------------------------------------------------------------------
    def _bar(self, why: str, test: Callable[[ExecutionPlan], bool]) -> None:
        for i, plan in enumerate(self._plans):
            if test(plan):
                self._barred.setdefault(i, why)
                self._filters.add(why)

    @property
    def filters(self) -> str:
        """What plans were left out for, but for their workspace; "" if none was. The same text in every process."""
        return "; ".join(sorted(self._filters))

    def select_behavior_notes(self, notes: Iterable[Any]) -> None:
        """Keep only plans that have all of ``notes``."""
        wanted = names_of(notes)
        self._bar(f"lacks a behavior note of {sorted(wanted)}", lambda p: not wanted <= set(p.behavior_notes))

    def deselect_behavior_notes(self, notes: Iterable[Any]) -> None:
        """Leave out plans that have any of ``notes``."""
        bad = names_of(notes)
        self._bar(f"has a behavior note of {sorted(bad)}", lambda p: bool(bad & set(p.behavior_notes)))

    def select_numeric_notes(self, notes: Iterable[Any]) -> None:
        """Keep only plans that have all of ``notes``."""
        wanted = names_of(notes)
        self._bar(f"lacks a numerical note of {sorted(wanted)}", lambda p: not wanted <= set(p.numeric_notes))

    def deselect_numeric_notes(self, notes: Iterable[Any]) -> None:
        """Leave out plans that have any of ``notes``."""
        bad = names_of(notes)
        self._bar(f"has a numerical note of {sorted(bad)}", lambda p: bool(bad & set(p.numeric_notes)))

    def deselect_engines(self, names: Iterable[str]) -> None:
        """Leave out plans in whose name one of ``names`` occurs ("eng4", "eng4_k12=1"); "eng1" does not mean "eng10"."""
        for name in (names,) if isinstance(names, str) else names:
            pattern = re.compile(re.escape(str(name)) + (r"(?!\d)" if str(name)[-1:].isdigit() else ""))
            self._bar(f"'{name}' was deselected", lambda p, pattern=pattern: bool(pattern.search(p.name)))  # type: ignore[misc]

    def deselect_workspace_greater_than(self, nbytes: int) -> None:
        """Leave out plans that need more than ``nbytes`` of workspace; looked at when a plan's turn comes."""
        limit = int(nbytes)
        self.workspace_limit = limit if self.workspace_limit is None else min(limit, self.workspace_limit)

    def as_listed(self) -> None:
        """Put plans that were built for many shapes back to what they were made from, for the shape of the list's graph alone."""
        for i, plan in enumerate(self._plans):
            if plan.shaped:
                self._plans[i] = ExecutionPlan.of(self.graph, self.device, plan.candidate, self.store)

    # -- support and build ----------------------------------------------------------------------------------------------------------------
    def obstacle(self, index: int) -> str:
        """Why the plan at ``index`` may not be used (filters, limits of the device); "" if it may. Lowers the plan, compiles nothing."""
        if index in self._barred:
            return self._barred[index]
        plan = self._plans[index]
        try:
            need, why = plan.workspace_bytes, _beyond(self.device, plan.recipe.kernels)
        except GraphError as error:
            need, why = 0, str(error)
        limit = self.workspace_limit
        if not why and limit is not None and need > limit:
            why = f"needs {need} bytes of workspace, more than {limit}"
            self.oversized.add(index)
        if why:
            self._barred[index] = why
            log.debug(f"plan {plan.name} left out: {why}")
        return why

    def check_support(self) -> None:
        """Returns if some plan can be used. NotSupportedError with every reason if none can; compiles nothing."""
        with self._lock:
            if not self._plans or all(self.obstacle(i) for i in range(len(self._plans))):
                raise self.nothing_left("no plan has been created" if not self._plans else "every plan was rejected or deselected")

    def build(self, policy: Any = "HEURISTICS_CHOICE", make: Callable[[ExecutionPlan], ExecutionPlan] = ExecutionPlan.build) -> None:
        """Build the first plan that builds (HEURISTICS_CHOICE) or all that build (ALL); the first becomes the chosen one.

        ``make`` builds a plan, and may put another in its place.

        A plan that does not compile is noted among the rejections, and in the log only as debug: another one takes its place. NotSupportedError if no
        plan could be tried, BuildError that lists every plan that was if none compiled.
        """
        every = getattr(policy, "name", policy) == "ALL"
        with self._lock:
            self.check_support()
            first, failures = None, []
            for i, plan in enumerate(self._plans):
                if self.obstacle(i):
                    continue
                try:
                    self._plans[i] = make(plan)
                except GraphError as error:
                    failures.append((plan.name, error))
                    self._failed(i, error)
                    if first is None and len(failures) >= GIVE_UP_AFTER and len({str(e) for _, e in failures}) == 1:
                        break
                    continue
                first = i if first is None else first
                if not every:
                    break
            if first is None:
                tried = "".join(f"\n  - {name}: {str(error).splitlines()[0]}" for name, error in failures)
                raise BuildError(f"no plan could be built: {failures[-1][1]}\ntried:{tried}{self._facts()}") from failures[-1][1]
            self._chosen, self.ready = first, self._plans[first]

    def build_at(self, index: int, make: Callable[[ExecutionPlan], ExecutionPlan] = ExecutionPlan.build) -> None:
        """Build the plan at ``index`` and choose it. BuildError for a bad index or what does not compile, NotSupportedError for a deselected one."""
        with self._lock:
            plan = self.plan_at(index)
            why = self.obstacle(int(index))
            if why:
                raise NotSupportedError(explain(f"plan {int(index)} ({plan.name}) cannot be used: {why}"))
            self.ready = self._plans[int(index)] = make(plan)
            self._chosen = int(index)

    def _failed(self, index: int, error: GraphError) -> None:
        rejection = Rejection(self._plans[index].name, "", "", str(error))
        self._barred[index] = str(error)
        self.rejections.append(rejection)
        log.debug(f"plan does not build: {rejection}")

    # -- texts ----------------------------------------------------------------------------------------------------------------------------
    def _reasons(self) -> str:
        lines = [f"{self._plans[i].name}: {why}" for i, why in sorted(self._barred.items())]
        lines += [str(r) for r in dict.fromkeys(self.rejections)]
        shown = lines[:40] + ([f"and {len(lines) - 40} more"] if len(lines) > 40 else [])
        return "".join(f"\n  - {line}" for line in shown)

    def _facts(self) -> str:
        from graphdnn._version import __version__

        python = ".".join(map(str, sys.version_info[:3]))
        device = f"device {self.device.text} ({self.device.name}, {self.device.arch})"
        return f"\nenvironment: graphdnn {__version__}, Python {python}, {sys.platform}, {device}"

    def nothing_left(self, rule: str) -> NotSupportedError:
        """The error for a graph without a usable plan: the rule, every rejection, facts of the environment."""
        return NotSupportedError(explain(f"No valid execution plans: {rule}") + self._reasons() + self._facts())


def _beyond(device: DeviceProps, kernels: Iterable[KernelSpec]) -> str:
    """Which kernel asks a GPU for more shared memory than it has; "" if none does. Engines prune by their own counts: this holds for all of them."""
    limit = device.shared_per_block_optin
    for spec in kernels if device.kind != "cpu" else ():
        if spec.shared_bytes > limit:
            return f"kernel '{spec.name}' needs {spec.shared_bytes} bytes of shared memory; {device.name} has {limit} for a block"
    return ""


def names_of(notes: Iterable[Any]) -> set[str]:
    """Names of notes, which may be members of the API's enums or texts."""
    return {str(getattr(n, "name", n)) for n in notes}
