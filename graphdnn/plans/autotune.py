"""Autotuning: build the candidate plans of a graph, check and time them, keep the fastest; or find in the tuning database what was measured before.

Plans that cannot fit (limits of the device, workspace) are left out before anything is compiled. The others are built, and run for the first time, in
worker processes. What they calculate is checked, then they are timed in turns: all of them a little, the best of them more. The heuristic's plan is
always among them and is only given up for one that is faster by more than noise.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from graphdnn import log, targets
from graphdnn.errors import BuildError, ExecutionError, GraphError, NotSupportedError, ValidationError, explain
from graphdnn.plans import buffers, cache, contest, streams, tuning, workers
from graphdnn.plans.assemble import tensor_bytes
from graphdnn.plans.contest import Arena, Contender, Judge

if TYPE_CHECKING:
    from graphdnn.plans.plan import ExecutionPlan
    from graphdnn.plans.planset import PlanSet

FIRST_ROUNDS = 5
FAR, NEAR, FINALISTS = 3.0, 1.25, 6
"""Plans slower than FAR times the best in one execution are not timed again; those within NEAR of it after FIRST_ROUNDS, at most FINALISTS, are
timed to the end."""
CANDIDATES = 32
"""Plans that are tried unless asked for another number."""
LEAST_GAIN = 0.01
"""The heuristic's plan is kept unless another one is faster by this share, and by more than noise."""


@dataclass(frozen=True)
class Options:
    """What a user may say of a tuning; see ``pygraph.autotune``."""

    workspace_limit: int | None = None
    iterations: int = 20
    candidates: int | None = None
    workers: int | None = None
    timeout_s: float = 120.0
    reuse: bool = True

    def __post_init__(self) -> None:
        """ValidationError for numbers without meaning."""
        for name, least in (("iterations", 1), ("candidates", 1), ("workers", 0), ("workspace_limit", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValidationError(explain(f"{name} is too small", expected=f"at least {least}", found=value))
        if not self.timeout_s > 0:
            raise ValidationError(explain("timeout_s is too small", expected="seconds, more than 0", found=self.timeout_s))


@dataclass(frozen=True)
class Row:
    """One candidate. ``seconds``: of one execution (median), None if it was not timed; ``samples``: how many times it was; ``why``: what it was
    dropped for, or not timed; ``engines``, ``knobs``: of each region."""

    index: int
    name: str
    engines: tuple[str, ...]
    knobs: tuple[str, ...]
    seconds: float | None = None
    workspace: int | None = None
    samples: int = 0
    why: str = ""


@dataclass(frozen=True)
class Tuned:
    """Result of a tuning. ``print`` it for a table.

    ``chosen``, ``heuristic``: index of the plan that ``execute`` uses now, and of the one that heuristics take. ``rows``: every candidate, the
    chosen one first, the others by time, then those that were dropped. ``ratio``: time of the chosen over that of the heuristic's plan, median of the
    rounds in which they took turns, or of what the database says (1.0 if they are the same); ``noise``: its uncertainty. ``executions``: timed ones.
    ``source``: "measured", "database", or "heuristics" (in deterministic mode). ``exact``: results were checked by the reference's error bounds, not
    by their norm. ``stored``: the database has it now; ``problem``: why not. ``taken``: seconds that all of it took.
    """

    chosen: int
    heuristic: int
    rows: tuple[Row, ...]
    source: str
    ratio: float = 1.0
    noise: float = 0.0
    executions: int = 0
    exact: bool = False
    stored: bool = False
    problem: str = ""
    taken: float = 0.0

    @property
    def timed(self) -> tuple[Row, ...]:
        """Rows with a time."""
        return tuple(r for r in self.rows if r.seconds is not None)

    @property
    def dropped(self) -> tuple[Row, ...]:
        """Rows without one: what could not be used, with the reason."""
        return tuple(r for r in self.rows if r.seconds is None)

    @property
    def spread(self) -> float:
        """Time of the slowest plan over that of the fastest; 1.0 where fewer than two were timed."""
        times = [r.seconds for r in self.rows if r.seconds is not None]
        return max(times) / min(times) if times else 1.0

    def __str__(self) -> str:
        lines = [f"{self._head()}, {self.taken:.1f} s"]
        for r in self.rows:
            mark = "*" if r.index == self.chosen else "h" if r.index == self.heuristic else " "
            seconds = f"{r.seconds * 1e6:12.2f} us" if r.seconds is not None else " " * 13 + "--"
            space = f"{r.workspace} bytes" if r.workspace is not None else ""
            engines = "; ".join(f"{e} {k}" for e, k in zip(r.engines, r.knobs, strict=True))
            lines.append(f"{mark} {seconds} {space:>16}  {r.name}: {r.why.splitlines()[0] if r.why else engines}")
        return "\n".join(lines)

    def _head(self) -> str:
        if self.source != "measured":
            return f"plan {self.chosen}, from {self.source}; nothing was timed"
        faster = f"{1 / self.ratio:.2f} times as fast as the heuristic's" if self.chosen != self.heuristic else "the heuristic's"
        noise = f" (noise {self.noise:.1%})" if self.noise else ""  # none where nothing was compared with the heuristic's
        return f"plan {self.chosen}, {faster}{noise}; slowest over fastest {self.spread:.1f}; {len(self.dropped)} dropped"


def tune(plans: PlanSet, pack: Mapping[Any, Any] | None, workspace: Any, options: Options) -> Tuned:
    """Choose the fastest plan of a list and build it. Raises what ``pygraph.autotune`` says."""
    start = time.perf_counter()
    options = replace(options, workspace_limit=_limit(options.workspace_limit, plans.workspace_limit, workspace))
    plans.as_listed()
    found = stored(plans, options) if options.reuse else None
    if found is not None:
        _check(plans.chosen, pack, workspace)  # what is wrong with a call does not depend on what other processes have measured
    else:
        can_be_timed(plans)
        if in_capture(plans):
            rule, fix = "plans cannot be timed while a stream is being captured into a CUDA graph", "call autotune() before the capture begins"
            raise ExecutionError(explain(rule, expected="no capture under way: a tuning allocates memory and waits", fix=fix))
        found = _Tuning(plans, options).run(pack, workspace)
    return replace(found, taken=time.perf_counter() - start)


def can_be_timed(plans: PlanSet) -> None:
    """NotSupportedError for a device on which time means nothing or nothing runs."""
    device = plans.device
    if device.kind == "cudasim" or device.described:
        why = "the simulator's time says nothing of a GPU's" if device.kind == "cudasim" else "nothing can run on a described device"
        raise NotSupportedError(explain(f"plans for {device.text} cannot be timed: {why}", expected="cpu or a CUDA device that is present"))


def in_capture(plans: PlanSet, stream: int = 0) -> bool:
    """Whether ``stream``, or one that a framework uses now, is being captured."""
    device = plans.device
    if device.kind != "cuda" or device.described:
        return False
    target = targets.get(device)
    return any(target.capturing(s) for s in {stream} | streams.in_use(device))


def _limit(limit: int | None, of_list: int | None, workspace: Any) -> int | None:
    """What a plan may need: the limit of the tuning and of the list of plans, and the size of the workspace that it is to run in."""
    room = None if workspace is None else buffers.facts(workspace, "the workspace").room
    if workspace is not None and room is None and limit is None:
        raise ValidationError(
            explain("the size of the workspace is not known", expected="an array, or workspace_limit with an address", found=f"address {workspace}")
        )
    return min((n for n in (limit, of_list, room) if n is not None), default=None)


def heuristic(plans: PlanSet) -> Tuned:
    """The heuristics' choice, built without timing anything."""
    plans.build()
    return Tuned(plans.chosen_index, plans.chosen_index, (), "heuristics")


def stored(plans: PlanSet, options: Options) -> Tuned | None:
    """The fastest plan that the tuning database knows, built; None if it knows none that can be used here. Nothing is timed."""
    key, place = tuning.key_of(plans.graph, plans.device), tuning.database()
    try:
        known = place.measured(key, options.workspace_limit, min(options.candidates or 1, plans.count()), plans.filters) if place else []
    except GraphError as error:
        log.warning(f"the tuning database is not used: {error}")
        return None
    indexes = {tuning.plan_key(p): i for i, p in reversed(list(enumerate(plans)))}
    for m in known:
        index = indexes.get(m.key, -1)
        if index < 0 or plans.obstacle(index):
            continue
        try:
            plans.build_at(index)
        except GraphError as error:
            log.debug(f"plan {plans.name_at(index)} of the tuning database does not build: {error}")
            continue
        assert place is not None, "it knew the plan"
        log.info(f"tuning: plan {plans.name_at(index)} from {place.path}, measured with {m.seconds * 1e6:.2f} us")
        ranked = [m, *sorted((x for x in known if x is not m and x.key in indexes), key=lambda x: x.seconds)]
        rows = tuple(_row(plans, indexes[x.key], x.seconds, workspace=x.workspace) for x in ranked)
        first = next(i for i in range(plans.count()) if not plans.obstacle(i))
        base = next((r.seconds for r in rows if r.index == first and r.seconds), m.seconds)
        return Tuned(index, first, rows, "database", m.seconds / base, stored=True)
    return None


def _row(plans: PlanSet, index: int, seconds: float | None = None, **facts: Any) -> Row:
    plan = plans.plan_at(index)
    return Row(index, plan.name, tuple(c.name for c in plan.choices), tuple(c.knobs for c in plan.choices), seconds, **facts)


def _room(plans: PlanSet, indexes: Iterable[int]) -> int:
    """How many processes may run plans on the CPU at once, so that none is killed for want of memory: each has inputs and outputs of its own, and
    makes the inputs in float64 first."""
    if plans.device.kind == "cuda" or not hasattr(os, "sysconf"):  # a GPU says when it has no more
        return sys.maxsize
    tensors = 4 * sum(tensor_bytes(t) for t in plans.graph.tensors if not t.virtual)
    each = tensors + max(plans.plan_at(i).workspace_bytes for i in indexes)
    return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 // max(each, 1))


def _check(plan: ExecutionPlan, pack: Mapping[Any, Any] | None, workspace: Any) -> None:
    """What execute raises for a pack and a workspace, whatever its size and alignment, before anything is compiled."""
    binder = plan.binder().loose(workspace=0, workspace_alignment=1)
    if pack is not None:
        binder.bind(pack, None)
    if workspace is not None and buffers.facts(workspace).room != 0:
        binder.workspace_address(workspace)


class _Tuning:
    """One tuning under way."""

    def __init__(self, plans: PlanSet, options: Options) -> None:
        self.plans, self.options = plans, options
        self.dropped: dict[int, str] = {}
        self.limited = False
        self.cut: int | None = None
        self.executions = 0

    def run(self, pack: Mapping[Any, Any] | None, workspace: Any) -> Tuned:
        """All of it."""
        fitting = self._fitting()
        if not fitting:
            raise NotSupportedError(self._text("No valid execution plans: every plan was rejected or deselected, or needs too large a workspace"))
        _check(self.plans.plan_at(fitting[0]), pack, workspace)
        usable = self._built(fitting)
        if not usable:
            raise BuildError(self._text("no plan could be built", "workers=0 builds in this process" if self.options.workers != 0 else None))
        arena = Arena(self.plans.plan_at(usable[0]), pack, workspace)
        judge = self._judge(arena, usable)
        right: list[Contender] = []
        try:
            for i in usable:
                self._enter(arena, judge, i, right)
            if not right:
                raise ExecutionError(self._text("no plan gives right results"))
            return self._decided(right, judge.exact)
        finally:
            for c in right:
                c.timed.close()

    def _judge(self, arena: Arena, usable: list[int]) -> Judge:
        """By the first plan that runs; those before are no longer ``usable``."""
        for i in list(usable):
            try:
                return Judge(arena, self.plans.plan_at(i))
            except GraphError as error:
                self._drop(i, f"does not run: {error}")
                usable.remove(i)
        raise ExecutionError(self._text("no plan runs"))

    def _drop(self, index: int, why: str) -> None:
        log.debug(f"tuning: plan {self.plans.name_at(index)} is dropped: {why}")
        self.dropped[index] = why

    def _text(self, rule: str, fix: str | None = None) -> str:
        lines = "".join(f"\n  - {self.plans.name_at(i)}: {why.splitlines()[0]}" for i, why in sorted(self.dropped.items()))
        return explain(rule, fix=fix) + lines

    def _fitting(self) -> list[int]:
        """Plans worth building, the best guess first."""
        found: list[int] = []
        limit, most = self.options.workspace_limit, self.options.candidates or CANDIDATES
        for i in range(self.plans.count()):
            why = self.plans.obstacle(i)
            self.limited |= i in self.plans.oversized
            if not why and limit is not None and self.plans.plan_at(i).workspace_bytes > limit:
                why, self.limited = f"needs {self.plans.plan_at(i).workspace_bytes} bytes of workspace, more than {limit}", True
            if not why and len(found) >= most:
                why, self.cut = f"not tried: beyond the first {most} candidates", most
            if why:
                self.dropped[i] = why
            else:
                found.append(i)
        return found

    def _built(self, indexes: Iterable[int]) -> list[int]:
        """Those that build, and do not crash in a process of their own."""
        chosen = list(indexes)
        count = min(os.cpu_count() or 1, 8) if self.options.workers is None else self.options.workers
        if count:
            count = max(1, min(count, _room(self.plans, chosen)))
            cache.tell(f"tuning: {len(chosen)} plans to build in {min(count, len(chosen))} processes")
            outcomes = workers.build([self.plans.plan_at(i) for i in chosen], count, self.options.timeout_s, cache.tell)
            self.dropped.update({i: o.error for i, o in zip(chosen, outcomes, strict=True) if o.error})
        found = []
        for i in chosen:
            try:
                if i not in self.dropped:
                    self.plans.plan_at(i).build()
                    found.append(i)
            except GraphError as error:
                self.dropped[i] = str(error)
        return found

    def _enter(self, arena: Arena, judge: Judge, index: int, right: list[Contender]) -> None:
        """Check a plan's results; it is among ``right`` afterwards, or dropped."""
        plan = self.plans.plan_at(index)
        try:
            why = judge(plan)
            if not why:
                right.append(contest.contender(arena, index, plan))
                self.executions += 2
        except (GraphError, MemoryError) as error:
            why = f"does not run: {error}"
        if why:
            self._drop(index, why)

    def _decided(self, right: list[Contender], exact: bool) -> Tuned:
        base = right[0]
        near = self._nearest(right, FAR, len(right), base)
        self._rounds(near, min(FIRST_ROUNDS, self.options.iterations))
        last, early = self._nearest(near, NEAR, FINALISTS, base), {c.index: contest.compared(c, base) for c in near}
        beaten = base.seconds > FAR * min(c.seconds for c in last)
        last = [c for c in last if c is not base or not beaten]  # so far behind it would only cost time
        if len(last) > 1:
            self._rounds(last, self.options.iterations)
        best = min(last, key=lambda c: c.seconds)
        ratio, noise = early[best.index] if beaten else contest.compared(best, base)
        if ratio > 1 - max(noise, LEAST_GAIN):
            best, ratio = base, 1.0
        self.plans.build_at(best.index)
        ranked = [best, *sorted((c for c in right if c is not best), key=lambda c: c.seconds)]
        rows = [_row(self.plans, c.index, c.seconds, workspace=c.plan.workspace_bytes, samples=len(c.samples)) for c in ranked]
        rows += [_row(self.plans, i, why=why) for i, why in sorted(self.dropped.items())]
        problem = self._store(ranked, base)
        result = Tuned(best.index, base.index, tuple(rows), "measured", ratio, noise, self.executions, exact, not problem, problem)
        cache.tell(f"tuning: {result._head()}")
        return result

    def _nearest(self, contenders: list[Contender], factor: float, most: int, base: Contender) -> list[Contender]:
        limit = factor * min(c.seconds for c in contenders)
        kept = sorted((c for c in contenders if c.seconds <= limit), key=lambda c: c.seconds)[:most]
        return [base, *(c for c in kept if c is not base)]

    def _rounds(self, contenders: list[Contender], count: int) -> None:
        cache.tell(f"tuning: {len(contenders)} plans take turns in {count} rounds")
        self.executions += contest.rounds(contenders, count)

    def _store(self, ranked: list[Contender], base: Contender) -> str:
        """Write the run to the database; why not, if that fails: the tuned plan is worth more than its record."""
        place = tuning.database()
        if place is None:
            return "the cache is switched off (GRAPHDNN_CACHE=0)"
        key = tuning.key_of(self.plans.graph, self.plans.device)
        results = tuple(tuning.of_plan(c.plan, c.seconds) for c in ranked)
        run = tuning.Run(
            id=tuning.new_id(),
            graph=key.graph,
            device=key.device,
            toolchain=key.toolchain,
            version=key.version,
            created=time.time(),
            host=platform.node(),
            pid=os.getpid(),
            iterations=self.options.iterations,
            workspace_limit=self.options.workspace_limit if self.limited else None,
            candidates=self.cut,
            filters=self.plans.filters,
            heuristic=next(i for i, c in enumerate(ranked) if c is base),
            results=results,
        )
        try:
            place.add([run])
        except GraphError as error:
            log.warning(f"the tuning is not stored: {error}")
            return str(error)
        return ""
