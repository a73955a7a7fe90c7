"""Ranking of candidates by estimated time. Pure: the same graph and device always give the same order, nothing is timed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphdnn.ir.opgraph import OperationGraph
from graphdnn.passes.regions import Partition, Region

if TYPE_CHECKING:
    from graphdnn.device import DeviceProps
    from graphdnn.engines.base import Engine

LAUNCH_S = {"cpu": 4e-6, "cuda": 2.5e-6, "cudasim": 1e-3}
"""Time that one more kernel costs beside its work, in seconds: a wake-up of the thread pool, a launch, a start of the simulator."""
MAX_VARIATIONS = 256
"""Candidates kept per partition."""


@dataclass(frozen=True)
class Option:
    """One way to run one region: an engine, its knobs, their index in the engine's list of ``count`` (knob KERNEL_CFG), estimated seconds, names
    of the numerical notes that hold."""

    engine: Engine
    knobs: Any
    index: int
    cost: float
    count: int = 1
    notes: tuple[str, ...] = ()

    @property
    def tag(self) -> str:
        """ "eng3_k12=1": engine id and, where there is a choice, the value of KERNEL_CFG (knob type 12)."""
        return f"eng{self.engine.id}_k12={self.index}" if self.count > 1 else f"eng{self.engine.id}"


@dataclass(frozen=True)
class Candidate:
    """A partition with one option for each of its regions. ``label``: "" for the maximal regions, else what was cut ("unfused", "cut4")."""

    partition: Partition
    options: tuple[Option, ...]
    cost: float
    label: str = ""

    @property
    def numeric_notes(self) -> tuple[str, ...]:
        """Names of numerical_note members that hold for some region."""
        return tuple(dict.fromkeys(n for o in self.options for n in o.notes))

    @property
    def key(self) -> tuple[str, tuple[tuple[int, str], ...]]:
        """Label, engine ids and knobs as text: the same in every version that has them, whatever the place in a list."""
        return self.label, tuple((o.engine.id, repr(o.knobs)) for o in self.options)

    @property
    def name(self) -> str:
        """ "r0:eng3_k12=1|r1:eng0", with the label in front where there is one."""
        text = "|".join(f"r{i}:{o.tag}" for i, o in enumerate(self.options)) or "empty"
        return f"{self.label}|{text}" if self.label else text


def candidate(partition: Partition, options: Sequence[Option], kind: str, label: str = "") -> Candidate:
    """A candidate with its cost on a device of ``kind``."""
    return Candidate(partition, tuple(options), sum(o.cost for o in options) + len(options) * LAUNCH_S.get(kind, 0.0), label)


def best(options: Sequence[Option]) -> Option:
    """The cheapest option that is deterministic if any is; of equal ones the first (engines list their best guess first)."""
    return min(options, key=lambda o: ("NONDETERMINISTIC" in o.notes, o.cost))


def variations(partition: Partition, options: Sequence[Sequence[Option]], kind: str, label: str = "") -> list[Candidate]:
    """The best option everywhere, then every other option of one region at a time; cheapest first. Empty if a region has no option."""
    if not all(options):
        return []
    base = [best(o) for o in options]
    found = [candidate(partition, base, kind, label)]
    for r, row in enumerate(options):
        found.extend(candidate(partition, [*base[:r], o, *base[r + 1 :]], kind, label) for o in row if o is not base[r])
    return rank(found)[:MAX_VARIATIONS]


def rank(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Cheapest first, those whose results may differ from run to run after all others; equal ones keep their order."""
    return sorted(candidates, key=lambda c: ("NONDETERMINISTIC" in c.numeric_notes, c.cost))


def generic(partition: Partition, options: Sequence[Sequence[Option]], kind: str, label: str = "") -> list[Candidate]:
    """Mode FALLBACK: in every region the last engine that takes it, with its own best guess."""
    if not all(options):
        return []
    last = [row[-1].engine.id for row in options]
    return [candidate(partition, [next(o for o in row if o.engine.id == i) for row, i in zip(options, last, strict=True)], kind, label)]


def option_like(graph: OperationGraph, region: Region, device: DeviceProps, engine: Engine, knobs: str) -> Option | None:
    """The option of ``engine`` whose knobs print as ``knobs``, or else its best guess; None if it does not take the region."""
    offered = engine.candidates(graph, region, device)
    if not offered:
        return None
    index = next((i for i, k in enumerate(offered) if repr(k) == knobs), 0)
    chosen = offered[index]
    return Option(engine, chosen, index, engine.cost(graph, region, device, chosen), len(offered), engine.numeric_notes(graph, region, chosen))


def costliest(options: Sequence[Sequence[Option]], engine_id: int) -> int | None:
    """The region that costs most, among those that engine ``engine_id`` takes."""
    able = [r for r, row in enumerate(options) if any(o.engine.id == engine_id for o in row)]
    return max(able, key=lambda r: best(options[r]).cost, default=None)
