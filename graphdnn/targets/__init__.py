"""Targets compile rendered kernels to binaries, and turn a recipe with its binaries into something that runs.

``base`` is the contract; ``cpu``, ``cuda`` and ``simulator`` fulfil it. A target is imported when a device of its kind is first used.
"""

from __future__ import annotations

import functools

from graphdnn.device import DeviceProps
from graphdnn.errors import ValidationError, explain
from graphdnn.targets.base import Executable, Target

__all__ = ["Executable", "Target", "get"]


def get(device: DeviceProps) -> Target:
    """The target of ``device``; one object for each kind, architecture and index. Raises ValidationError for an unknown kind."""
    return _get(device.kind, device.arch, device.index)


@functools.cache
def _get(kind: str, arch: str, index: int) -> Target:
    if kind == "cpu":
        from graphdnn.targets.cpu import CpuTarget

        return CpuTarget()
    if kind == "cudasim":
        from graphdnn.targets.simulator import SimulatorTarget

        return SimulatorTarget()
    if kind == "cuda":
        from graphdnn.targets.cuda import CudaTarget

        return CudaTarget(arch, index)
    raise ValidationError(explain("no target for this kind of device", expected="cpu, cuda or cudasim", found=repr(kind)))
