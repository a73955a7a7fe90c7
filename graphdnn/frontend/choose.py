"""Which device a graph is for: what was said, in order of precedence, and whether it fits together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graphdnn import device as devices
from graphdnn.device import DeviceProps
from graphdnn.errors import KindError, ValidationError, explain
from graphdnn.frontend.handle import Handle, resolve_device
from graphdnn.frontend.properties import DeviceProperties
from graphdnn.frontend.tensor import as_integer


def _of_version(sm_version: Any) -> DeviceProps:
    """The present default device if it has this compute capability, so that the plan can run; else a described one."""
    number = as_integer("sm_version", sm_version)
    described = devices.describe(f"sm_{number}")
    default = devices.current_default()
    return default if (default.kind, default.arch) == (described.kind, described.arch) else described


def _of_property(device_property: Any) -> DeviceProps:
    if not isinstance(device_property, DeviceProperties):
        raise KindError(
            explain("device_property has the wrong type", expected="an object of create_device_properties()", found=repr(device_property)[:80])
        )
    props = device_property.props
    return replace(props, index=-1) if props.kind == "cuda" else props


def _differs(a: DeviceProps, b: DeviceProps) -> bool:
    return (a.kind, a.arch) != (b.kind, b.arch) or (a.index != b.index and a.index >= 0 and b.index >= 0)


def explicit_device(device: Any, handle: Handle | None, device_property: Any, sm_version: Any, sm_count: int | None) -> DeviceProps | None:
    """The device that the arguments of a graph name: ``device``, else the handle's, else ``device_property``, else ``sm_version`` (the present GPU if
    it is such a one, else a described one); None if they name none. ValidationError if two of them disagree. ``sm_count`` limits a GPU's
    multiprocessors."""
    said: list[tuple[str, DeviceProps]] = []
    if device is not None:
        said.append(("device", resolve_device(device)))
    if handle is not None:
        said.append(("handle", handle.device))
    if device_property is not None:
        said.append(("device_property", _of_property(device_property)))
    if sm_version is not None and not said:
        said.append(("sm_version", _of_version(sm_version)))
    elif sm_version is not None and said[0][1].kind == "cuda":
        said.append(("sm_version", devices.describe(f"sm_{as_integer('sm_version', sm_version)}")))
    elif sm_version is not None:
        raise ValidationError(explain(f"{said[0][0]} and sm_version disagree", expected="a CUDA device", found=said[0][1].text))
    for name, other in said[1:]:
        if _differs(said[0][1], other):
            raise ValidationError(
                explain(f"{said[0][0]} and {name} disagree", expected=f"{said[0][1].text} ({said[0][1].arch})", found=f"{other.text} ({other.arch})")
            )
    if not said:
        return None
    return limited(said[0][1], sm_count)


def limited(device: DeviceProps, sm_count: int | None) -> DeviceProps:
    """``device`` with at most ``sm_count`` multiprocessors (a CPU as it is)."""
    if sm_count is None or device.kind == "cpu":
        return device
    if sm_count < 1:
        raise ValidationError(explain("sm_count must be positive", expected=f"1 to {device.sm_count}", found=sm_count))
    return replace(device, sm_count=min(sm_count, device.sm_count))
