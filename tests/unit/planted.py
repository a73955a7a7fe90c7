"""Engines with faults, for the tests of the tuner: worker processes import them from here."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from graphdnn.codegen.spec import Buffer, Launch, Recipe
from graphdnn.device import DeviceProps
from graphdnn.engines.base import Knobs
from graphdnn.engines.pointwise import Pointwise
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.passes.regions import Region


class Planted(Pointwise):
    """The pointwise engine, twice as expensive, so that the heuristic's choice is another one."""

    id, name = 60, "planted"

    def _cost(self, *args: Any) -> float:
        return 2 * super()._cost(*args)


class Wrong(Planted):
    """Writes half of its output."""

    id, name = 61, "planted_wrong"

    def _lower(self, *args: Any) -> Recipe:
        made = super()._lower(*args)
        return replace(made, steps=tuple(replace(s, grid=s.grid // 2) if isinstance(s, Launch) else s for s in made.steps))


class Crashing(Planted):
    """Reads and writes where nothing is."""

    id, name = 62, "planted_crashing"

    def _lower(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs, memory: Mapping[int, Buffer]) -> Recipe:
        return super()._lower(graph, region, device, knobs, {t: replace(b, offset=b.offset + (1 << 45)) for t, b in memory.items()})


@dataclass(frozen=True)
class _Trap(Knobs):
    """Knobs that do something when a worker reads them."""

    knobs: Any
    seconds: float

    def __reduce__(self) -> Any:
        return (time.sleep, (self.seconds,)) if self.seconds else (os._exit, (3,))


class Dying(Planted):
    """Ends the worker that would build it."""

    id, name = 63, "planted_dying"
    seconds = 0.0

    def _candidates(self, *args: Any) -> tuple[Knobs, ...]:
        return tuple(_Trap(k, self.seconds) for k in super()._candidates(*args)[:1])

    def _check(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Any) -> Any:
        return super()._check(graph, region, device, knobs.knobs)

    def _cost(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Any) -> float:
        return super()._cost(graph, region, device, knobs.knobs)

    def _lower(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Any, memory: Mapping[int, Buffer]) -> Recipe:
        return super()._lower(graph, region, device, knobs.knobs, memory)


class Hanging(Dying):
    """Keeps the worker that would build it for ever."""

    id, name = 64, "planted_hanging"
    seconds = 1000.0
