"""A pipeline as one file, and back: a sealed file (see ``container``) of the stages' names and their serialized plans.

Where buffers lie in the workspace is worked out again at load: it depends on the plans alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphdnn._version import __version__
from graphdnn.device import DeviceProps
from graphdnn.errors import KindError, SerializationError, ValidationError, explain
from graphdnn.plans import serialize
from graphdnn.plans.container import refuse, seal, unseal
from graphdnn.plans.pipeline import Stage, stage

MAGIC = b"GDNNPIPE"
FORMAT = 1
_FIX = "build the pipeline again here and serialize it"


def dump(name: str, stages: Sequence[Stage], keep: Sequence[str]) -> bytes:
    """The pipeline as bytes; the same plans give the same bytes."""
    plans = [serialize.dump(s.plan) for s in stages]
    rows = [{"names": {str(uid): buffer for uid, buffer in s.names.items()}, "size": len(p)} for s, p in zip(stages, plans, strict=True)]
    return seal(MAGIC, FORMAT, {"graphdnn": __version__, "name": name, "keep": list(keep), "stages": rows}, plans)


def load(data: bytes, device: DeviceProps | None = None) -> tuple[str, list[Stage], list[str]]:
    """Name, stages and kept buffers of what :func:`dump` wrote; plans ready to execute on ``device``, by default one of the kind they were built for.

    SerializationError for damage, another version, and a device that the plans do not run on."""
    try:
        name, rows, keep = parts(data, serialize.running(device))
        stages = []
        for number, (names, file) in enumerate(rows):
            plan = serialize.load(file, device)
            device = plan.device
            stages.append(stage(plan, {int(uid): buffer for uid, buffer in names.items()}, number))
        return name, stages, keep
    except (KeyError, TypeError, ValueError, AttributeError, ValidationError, KindError) as error:
        raise SerializationError(explain(f"the stored pipeline is malformed ({type(error).__name__}: {str(error)[:100]})", fix=_FIX)) from error


def parts(data: bytes, running: str) -> tuple[str, list[tuple[dict[str, str], bytes]], list[str]]:
    """Name, stages (names of their buffers by uid, the file of their plan) and kept buffers of what :func:`dump` wrote; no plan is read.

    SerializationError for damage and another version; KeyError, TypeError or AttributeError for a sealed file that dump did not write."""
    content, blobs = unseal(data, MAGIC, FORMAT, "pipeline", running)
    if content.get("graphdnn") != __version__:
        raise refuse("the pipeline was built by another version", f"graphdnn {content.get('graphdnn')}", running, _FIX)
    stages, at = [], 0
    for number, row in enumerate(content["stages"]):
        size = row["size"]
        _need(type(size) is int and 0 < size <= len(blobs) - at, f"the plan of stage {number}")
        stages.append((dict(row["names"]), bytes(blobs[at : at + size])))
        at += size
    _need(bool(stages) and at == len(blobs), "one plan for each stage")
    _need(isinstance(content["name"], str) and all(isinstance(k, str) for k in content["keep"]), "name and kept buffers")
    return content["name"], stages, list(content["keep"])


def _need(condition: Any, what: str) -> None:
    if not condition:
        raise SerializationError(explain(f"a stored pipeline does not fit together: {what}", fix=_FIX))
