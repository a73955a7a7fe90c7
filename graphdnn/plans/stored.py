"""What a graph was built to, kept in the disk cache beside the kernels, so that another process need not choose and lower again.

An entry is a sealed file (``container``): names of the list of plans, and of the plan that ``build`` chose its partition, engines, knobs and recipe,
with the keys of its kernels, which are entries of their own. Its key is a SHA-256 over all that decides: the operation graph with uids and names, the
device, the heuristic modes, the filters, graphdnn's own files and the toolchain. What an entry cannot tell is made as if there were none.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from graphdnn import log, targets
from graphdnn._version import __version__
from graphdnn.errors import GraphError, SerializationError
from graphdnn.plans import cache, pieces
from graphdnn.plans.container import seal, unseal
from graphdnn.plans.disk import counters, disk
from graphdnn.plans.plan import ExecutionPlan
from graphdnn.plans.planset import PlanSet, names_of

if TYPE_CHECKING:
    from graphdnn.device import DeviceProps
    from graphdnn.ir.opgraph import OperationGraph
    from graphdnn.plans.heuristics import Candidate

MAGIC = b"GDNNBULT"
FORMAT = 1


def create(graph: OperationGraph, device: DeviceProps, modes: Sequence[str], measured: bool) -> PlanSet:
    """The ranked plans of ``graph``, as ``candidates.create`` lists them, from the entry of an earlier build where there is one. Raises what that
    raises."""
    key = _key(graph, device, modes, measured)

    def listed() -> PlanSet:
        from graphdnn.plans import candidates

        return candidates.create(graph, device, modes, measured=measured and key is None)

    return listed() if key is None else Plans(key, graph, device, listed)


def _key(graph: OperationGraph, device: DeviceProps, modes: Sequence[str], measured: bool) -> str | None:
    """None where more decides than the key can hold (engines that are not ours, measurements), for a custom list, and without a cache."""
    engines, files = sys.modules.get("graphdnn.engines"), _files()
    if not modes or disk() is None or files is None or (engines is not None and engines.ENGINES is not engines.BUILT_IN):
        return None
    if "B" in modes and measured:
        from graphdnn.plans import tuning

        place = tuning.database()
        if place is not None and place.path.exists():
            return None
    parts = (FORMAT, __version__, files, targets.get(device).toolchain_key(), device, tuple(modes), graph)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.cache
def _files() -> str | None:
    """Names, sizes and times of graphdnn's own files, by which Python itself knows whether bytecode is that of a source; the content in place of
    times that are all the same (of images and packages that are built to be equal byte by byte). None if they cannot be seen (an archive), or are
    newer than this process, which then may run what they were before."""
    package = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    found: dict[str, tuple[int, Any]] = {}
    try:
        todo = [package, *filter(os.path.isdir, [os.path.join(os.path.dirname(package), "codegen_templates")])]
        while todo:
            for entry in os.scandir(todo.pop()):
                if entry.is_dir():
                    todo += [entry.path] if entry.name != "__pycache__" else []
                    continue
                facts = entry.stat()
                found[entry.path] = facts.st_size, facts.st_mtime_ns
        times = {time for _, time in found.values()}
        if len(times) == 1:
            found = {path: (size, _content(path)) for path, (size, _) in found.items()}
    except OSError:
        return None
    start = len(os.path.dirname(package))
    return repr(sorted((path[start:], *facts) for path, facts in found.items())) if found and max(times) <= log.STARTED_NS else None


def _content(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


class Plans(PlanSet):
    """A list of plans that is made when something is asked of it that its entry does not tell. From then on it is a :class:`PlanSet`."""

    def __init__(self, key: str, graph: OperationGraph, device: DeviceProps, make: Callable[[], PlanSet]) -> None:
        """``make``: lists the plans. Raises what it raises where there is no entry."""
        self.graph, self.device = graph, device
        self._key, self._make, self._lock = key, make, threading.RLock()
        self._narrowed: list[tuple[str, Any]] = []
        self._chosen: int | None = None
        self.ready = None
        self._seen: tuple[str, dict[str, Any] | None] | None = None
        self._made_from: Candidate | None = None
        self._sound = True
        """Whether every plan built so far: what is chosen in place of one that did not, perhaps for a reason that passes, is not for others."""
        entry = self._entry()
        if entry is None:
            self._become()
        self._names: tuple[str, ...] = tuple(p.name for p in self._plans) if entry is None else tuple(entry["names"])

    @property
    def _listed(self) -> bool:
        """Whether it is an ordinary list by now."""
        return "_plans" in self.__dict__

    def __getattr__(self, name: str) -> Any:
        """What a PlanSet has and this does not: asked for where an entry does not tell the answer."""
        if not name.startswith("__"):
            self._become()
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def _become(self) -> None:
        """Make the list, in the state in which the calls so far would have left it."""
        with self._lock:
            if self._listed:
                return
            made = self._make()
            for name, value in self._narrowed:
                getattr(made, name)(value)
            if self.ready is not None:
                made.check_support()  # notes which plans before the chosen one cannot be used
                assert self._chosen is not None, "it is built"
                self._made_from, made._plans[self._chosen] = made._plans[self._chosen].candidate, self.ready
            self.__dict__.update({name: value for name, value in made.__dict__.items() if name not in self.__dict__})

    # -- what an entry tells --------------------------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return self.count()

    def __iter__(self) -> Iterator[ExecutionPlan]:
        return iter(tuple(self._plans))

    def count(self) -> int:
        """See the base class."""
        return super().count() if self._listed else len(self._names)

    def name_at(self, index: int) -> str:
        """See the base class."""
        return self._names[index] if not self._listed and type(index) is int and 0 <= index < len(self._names) else super().name_at(index)

    def plan_at(self, index: int) -> ExecutionPlan:
        """See the base class."""
        known = not self._listed and self.ready is not None and type(index) is int and index == self._chosen
        return self.ready if known and self.ready is not None else super().plan_at(index)

    def check_support(self) -> None:
        """See the base class."""
        if self._listed or not (self._entry() or {}).get("plan"):
            super().check_support()

    # -- filters --------------------------------------------------------------------------------------------------------------------------
    def _filter(self, name: str, value: Any) -> None:
        """Apply a filter now if there is a list or a plan was chosen, else when the list is made."""
        if self._listed or self._chosen is not None:
            getattr(super(), name)(value)
        self._narrowed.append((name, value))

    def select_behavior_notes(self, notes: Iterable[Any]) -> None:
        """See the base class."""
        self._filter("select_behavior_notes", sorted(names_of(notes)))

    def deselect_behavior_notes(self, notes: Iterable[Any]) -> None:
        """See the base class."""
        self._filter("deselect_behavior_notes", sorted(names_of(notes)))

    def select_numeric_notes(self, notes: Iterable[Any]) -> None:
        """See the base class."""
        self._filter("select_numeric_notes", sorted(names_of(notes)))

    def deselect_numeric_notes(self, notes: Iterable[Any]) -> None:
        """See the base class."""
        self._filter("deselect_numeric_notes", sorted(names_of(notes)))

    def deselect_engines(self, names: Iterable[str]) -> None:
        """See the base class."""
        self._filter("deselect_engines", [names] if isinstance(names, str) else [str(n) for n in names])

    def deselect_workspace_greater_than(self, nbytes: int) -> None:
        """See the base class."""
        self._filter("deselect_workspace_greater_than", int(nbytes))

    # -- build ----------------------------------------------------------------------------------------------------------------------------
    def build(self, policy: Any = "HEURISTICS_CHOICE", make: Callable[[ExecutionPlan], ExecutionPlan] = ExecutionPlan.build) -> None:
        """See the base class."""
        with self._lock:
            first = getattr(policy, "name", policy) == "HEURISTICS_CHOICE" and self._chosen is None
            if first and not self._listed and self._restore(make):
                return
            super().build(policy, make)
            if first and self._sound and self._names == tuple(p.name for p in self._plans):
                self._keep()

    def _failed(self, index: int, error: GraphError) -> None:
        self._sound = False
        super()._failed(index, error)

    def _restore(self, make: Callable[[ExecutionPlan], ExecutionPlan]) -> bool:
        """Build the plan of the entry; whether that was done."""
        content = (self._entry() or {}).get("plan")
        if content is None:
            return False
        try:
            index = range(len(self._names))[content["index"]]
            keys = list(map(str, content["kernels"]))
            plan = pieces.plan(content, self.graph, self.device, lambda recipe: cache.kept(recipe.kernels, keys) or (), self._candidate)
            if len(plan.kernels) != len(plan.recipe.kernels):
                return False
            self.ready, self._chosen = make(plan), index
        except (GraphError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            log.debug(f"the stored build {self._key[:16]} is not used: {error}")
            return False
        return True

    def _candidate(self) -> Candidate:
        self._become()
        assert self._made_from is not None, "the list knows what its plans are made from"
        return self._made_from

    # -- entries --------------------------------------------------------------------------------------------------------------------------
    def _place(self, filtered: bool) -> str:
        return hashlib.sha256(repr((self._key, self._narrowed)).encode()).hexdigest() if filtered and self._narrowed else self._key

    def _entry(self) -> dict[str, Any] | None:
        """What is stored for the filters so far; it is read once."""
        name = self._place(True)
        if self._seen is None or self._seen[0] != name:
            self._seen = name, self._read(name)
        return self._seen[1]

    def _read(self, name: str) -> dict[str, Any] | None:
        """An entry that is damaged is counted, and written again by the next build."""
        place = disk()
        data = place.read(name) if place else None
        if data is None:
            return None
        try:
            content, _ = unseal(data, MAGIC, FORMAT, "build", __version__)
        except SerializationError as error:
            counters.damaged += 1
            log.warning(f"{error}; the graph is planned again")
            return None
        names, plan = content.get("names"), content.get("plan")
        good = isinstance(names, list) and names and all(isinstance(n, str) for n in names) and isinstance(plan, dict | None)
        if not good or content.get("key") != name:
            return None
        log.debug(f"what an earlier process built the graph to is in entry {name[:16]} of the cache; nothing is planned")
        return content

    def _keep(self) -> None:
        """Write what was built. The list is stored as well where filters were set: they come after it."""
        place = disk()
        if place is None:
            return
        plan = {"index": self._chosen, "kernels": [k.key for k in self.chosen.kernels]} | pieces.encoded(self.chosen)
        for filtered, content in ((True, plan), (False, None)):
            name = self._place(filtered)
            if filtered or (self._narrowed and place.read(name) is None):
                place.write(name, seal(MAGIC, FORMAT, {"key": name, "names": self._names, "plan": content}))
