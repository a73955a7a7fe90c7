"""The error of the simulator."""

from __future__ import annotations

from graphdnn.errors import ExecutionError


class SimulationError(ExecutionError):
    """A kernel did in the simulator what has no meaning on a device: access out of bounds, unset memory read, race, deadlock, wrong types."""
