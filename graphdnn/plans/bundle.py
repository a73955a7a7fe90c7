"""Plans of one graph for several devices in one file, and which of them runs on the device at hand.

A sealed file (see ``container``): JSON with a row for each plan, then the plans, each the whole file that ``serialize.dump`` wrote. So the choice
reads the rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from graphdnn import device as devices
from graphdnn import targets
from graphdnn._version import __version__
from graphdnn.device import DeviceProps
from graphdnn.errors import SerializationError, ValidationError, explain
from graphdnn.plans import codec
from graphdnn.plans.container import BUNDLE, refuse, seal, unseal
from graphdnn.plans.pieces import unfit

FORMAT = 1
_WHAT = "file of plans"


@dataclass(frozen=True)
class Row:
    """What the choice reads of a plan: kind, architecture and name of the device it was built for, what its binaries need of a CPU ("" for a GPU),
    bytes of shared memory of its largest block, bytes of the plan in the file."""

    kind: str
    arch: str
    name: str
    host: str
    shared: int
    size: int

    @property
    def text(self) -> str:
        """The device, for messages and tables."""
        return f"{self.arch if self.kind == 'cuda' else self.kind} ({self.name})"


def pack(plans: Sequence[tuple[Row, bytes]]) -> bytes:
    """The file. ValidationError for no plan, and for two that the same device would choose."""
    rows = [row for row, _ in plans]
    seen = [(r.kind, r.arch, r.host) for r in rows]
    twice = next((r for r, key in zip(rows, seen, strict=True) if seen.count(key) > 1), None)
    if twice is not None or not rows:
        found = f"two for {twice.text}" if twice is not None else "none"
        raise ValidationError(explain("a file of plans holds one plan for each device", expected="different architectures", found=found))
    return seal(BUNDLE, FORMAT, {"graphdnn": __version__, "plans": [asdict(r) for r in rows]}, [data for _, data in plans])


def unpack(data: bytes, running: str = "") -> list[tuple[Row, bytes]]:
    """Rows and plans of a file. SerializationError for anything that :func:`pack` did not write."""
    running = running or f"graphdnn {__version__}"
    content, rest = unseal(data, BUNDLE, FORMAT, _WHAT, running)
    rows = content.get("plans")
    good = isinstance(rows, list) and rows and all(isinstance(r, dict) and r.keys() == Row.__dataclass_fields__.keys() for r in rows)
    found = [codec.decode(Row, r | {codec.TAG: Row.__name__}, "plans") for r in rows] if good else []  # type: ignore[union-attr]
    if not found or not all(map(_sound, found)) or sum(r.size for r in found) != len(rest):
        raise refuse(f"the {_WHAT} is malformed: its rows do not fit what follows", f"graphdnn {content.get('graphdnn')}", running)
    plans, at = [], 0
    for r in found:
        plans.append((r, bytes(rest[at : at + r.size])))
        at += r.size
    return plans


def _sound(row: Row) -> bool:
    """Whether there are such devices and sizes."""
    try:
        return row.size >= 0 and row.shared >= 0 and (row.kind == "cpu" or (row.kind in ("cuda", "cudasim") and bool(devices.split_arch(row.arch))))
    except ValidationError:
        return False


def pick(data: bytes, device: DeviceProps | None) -> tuple[bytes, DeviceProps]:
    """The plan of a file for ``device``, and the device: by default one of the kind of all plans, or that of a graph that says nothing.

    Preferred: built for this very architecture (CPU), then the newest that runs. SerializationError that lists what is inside and what is here.
    """
    plans = unpack(data)
    here = _default({row.kind for row, _ in plans}) if device is None else device
    fitting = [(row, plan) for row, plan in plans if unfit(row.kind, row.arch, row.shared, here) is None]
    if not fitting:
        raise _none(plans, here)
    host = targets.get(here).host_key() if len(fitting) > 1 else ""
    _, best = max(fitting, key=lambda p: (p[0].arch == here.arch, p[0].host == host, devices.split_arch(p[0].arch)[:2] if here.kind == "cuda" else 0))
    return best, here


def _default(kinds: set[Any]) -> DeviceProps:
    if len(kinds) > 1:
        return devices.current_default()
    return devices.parse(next(iter(kinds)))


def _none(plans: Sequence[tuple[Row, bytes]], here: DeviceProps) -> SerializationError:
    arch = here.arch if here.kind == "cuda" else here.kind
    fix = f"add it: graphdnn compile graph.json --arch {','.join([*(r.arch if r.kind == 'cuda' else r.kind for r, _ in plans), arch])}"
    if here.kind != "cpu" and any(row.kind == "cpu" for row, _ in plans):
        fix += ", or load with device='cpu'"
    reasons = "; ".join(dict.fromkeys(filter(None, (unfit(row.kind, row.arch, row.shared, here) for row, _ in plans))))
    inside = ", ".join(row.text for row, _ in plans)
    return SerializationError(
        explain(
            f"no plan of the file runs on this device ({reasons})",
            expected=f"one of {inside}",
            found=f"{here.text} ({here.name}, {here.arch})",
            fix=fix,
        )
    )
