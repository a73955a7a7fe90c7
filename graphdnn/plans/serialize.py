"""A built plan as bytes, and back.

A sealed file (see ``container``): JSON, then for every kernel its source text and its binary. The JSON holds versions, device, graph, partition,
engines, knobs, launch recipe and what is known of each kernel. Loading creates only the dataclasses of those (see ``codec``), executes nothing, and
needs no compiler where the binaries run: on a GPU that takes their architecture, or on a CPU of the same name and features. On another CPU, and in
the simulator (whose binaries are Python text, which a file must not bring in), the plan is lowered and compiled again from graph, engine and knobs.
A file may hold plans for several devices (see ``bundle``): the one for the device at hand is loaded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from graphdnn import device as devices
from graphdnn import log, targets
from graphdnn._version import __version__
from graphdnn.codegen.spec import Binary, Recipe
from graphdnn.device import DeviceProps
from graphdnn.errors import NotSupportedError, SerializationError, ValidationError, explain
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.passes.regions import Partition
from graphdnn.plans import codec, heuristics, pieces
from graphdnn.plans.cache import Kernel
from graphdnn.plans.container import BUNDLE, refuse, seal, unseal
from graphdnn.plans.heuristics import Option
from graphdnn.plans.pieces import need
from graphdnn.plans.plan import Choice, ExecutionPlan

if TYPE_CHECKING:
    from graphdnn.engines.base import Engine

MAGIC = b"GDNNPLAN"
FORMAT = 2


def expect_fixed(dims: object) -> None:
    """NotSupportedError for a graph with ``dims``: a file holds the plan of one shape."""
    if dims:
        rule, fix = "a plan file holds a plan for one shape", "store str(graph), and build that: its kernels come from the disk cache"
        raise NotSupportedError(explain(rule, expected="a graph of fixed shapes", found="a graph with dims", fix=fix))


def dump(plan: ExecutionPlan) -> bytes:
    """The plan as bytes. BuildError if it is not built, NotSupportedError for one shape of a graph with dims."""
    expect_fixed(plan.shaped)
    kernels, blobs = [], []
    for k in plan.kernels:
        text, code = k.source.encode(), k.binary.code
        kernels.append(
            {"key": k.key, "entry": k.binary.entry, "facts": k.binary.facts, "texts": k.binary.texts, "source": len(text), "code": len(code)}
        )
        blobs += [text, code]
    content = {
        "graphdnn": __version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "toolchain": targets.get(plan.device).toolchain_key(),
        "host": targets.get(plan.device).host_key(),
        "device": json.loads(plan.device.to_json()),
        "graph": codec.encode(plan.graph),
        "kernels": kernels,
    }
    return seal(MAGIC, FORMAT, content | pieces.encoded(plan), blobs)


def load(data: bytes, device: DeviceProps | None = None) -> ExecutionPlan:
    """The plan that :func:`dump` wrote, ready to execute by uid; ``device``: where it will run, by default a device of the kind it was built for.

    Of a file with several plans, the one for ``device``, by default that of a graph that says nothing. SerializationError that says what is inside
    and what is here, for damage, for another version, and for a device that no plan of the file runs on.
    """
    data = bytes(data)
    if is_bundle(data):
        from graphdnn.plans import bundle

        data, device = bundle.pick(data, device)
    content, blobs = opened(data, device)
    try:
        stored = stored_device(content)
        place = device if device is not None else _place(stored)
        reason = pieces.unfit(stored.kind, stored.arch, _shared(content), place)
        if reason is not None:
            sides = (f"{d.text} ({d.name}, {d.arch})" for d in (stored, place))
            raise refuse(f"the plan was built for another device: {reason}", *sides)
        if place.kind == "cudasim" or (place.kind == "cpu" and content["host"] != targets.get(place).host_key()):
            return _again(content, place)
        return _restored(content, blobs, place)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise _malformed(error, content, device) from error


def read(data: bytes) -> tuple[ExecutionPlan, dict[str, Any]]:
    """The plan of a file with one plan, with its stored binaries and for the device that it was built for, wherever this is; and what the file says
    of its versions. To look at: nothing is linked or loaded. SerializationError as :func:`load`."""
    content, blobs = opened(data, None)
    try:
        plan = _restored(content, blobs, stored_device(content))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise _malformed(error, content, None) from error
    return plan, {name: content.get(name) for name in ("graphdnn", "python", "toolchain", "host")}


def _malformed(error: Exception, content: dict[str, Any], device: DeviceProps | None) -> SerializationError:
    return refuse(f"the stored plan is malformed ({type(error).__name__}: {str(error)[:100]})", _built_with(content), running(device))


def stored_device(content: dict[str, Any]) -> DeviceProps:
    """The device that a plan was built for."""
    return DeviceProps.from_json(json.dumps(content["device"]))


def _shared(content: dict[str, Any]) -> int:
    """Bytes of shared memory that the largest block of a stored plan takes."""
    return max((int(k["facts"].get("shared_bytes", 0)) for k in content["kernels"]), default=0)


def merge(files: Iterable[bytes]) -> bytes:
    """Plans of one graph for several devices, each of :func:`dump` or of this function, as one file, which :func:`load` takes.

    ValidationError for two plans for one device, and for plans of different graphs; SerializationError as :func:`load`.
    """
    from graphdnn.plans import bundle

    singles = [plan for data in files for plan in parts(data)]
    rows, graphs = [], []
    for data in singles:
        content, _ = opened(data, None)
        try:
            stored = stored_device(content)
            rows.append((bundle.Row(stored.kind, stored.arch, stored.name, str(content["host"]), _shared(content), len(data)), data))
            graphs.append(_interface(content))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _malformed(error, content, None) from error
    if any(g != graphs[0] for g in graphs):
        raise ValidationError(explain("a file of plans holds plans of one graph", expected="the same nodes and tensors", found="different ones"))
    return bundle.pack(rows)


def is_bundle(data: bytes) -> bool:
    """Whether ``data`` begins as a file of several plans."""
    return data[: len(BUNDLE)] == BUNDLE


def is_plan(data: bytes) -> bool:
    """Whether ``data`` begins as a stored plan, or a file of several."""
    return data[: len(MAGIC)] == MAGIC or is_bundle(data)


def parts(data: bytes) -> list[bytes]:
    """The plans of a file, each as a file of its own."""
    if not is_bundle(data):
        return [data]
    from graphdnn.plans import bundle

    return [plan for _, plan in bundle.unpack(data)]


def _interface(content: dict[str, Any]) -> Any:
    """What a user sees of a stored graph: the tensors in memory, without what a plan may change (views, alignments)."""
    tensors = content["graph"]["tensors"]
    return sorted([t[f] for f in ("uid", "name", "dim", "stride", "dtype", "by_value")] for t in tensors if not t["virtual"])


def restore(data: bytes, device: DeviceProps) -> ExecutionPlan:
    """:func:`load`, for pickle."""
    return load(data, device)


def _place(stored: DeviceProps) -> DeviceProps:
    if stored.kind == "cpu":
        return devices.cpu()
    return stored if stored.kind == "cudasim" else devices.parse("cuda")


def running(device: DeviceProps | None) -> str:
    """What is here, for messages."""
    return f"graphdnn {__version__}" + (f" on {device.text} ({device.name})" if device else "")


def _built_with(content: dict[str, Any]) -> str:
    device = content.get("device")
    name = f"{device.get('name')} ({device.get('arch')})" if isinstance(device, dict) else "an unknown device"
    return f"graphdnn {content.get('graphdnn')} for {name}"


def opened(data: bytes, device: DeviceProps | None) -> tuple[dict[str, Any], memoryview]:
    """The JSON and the bytes after it, once checksum and version are right."""
    content, blobs = unseal(data, MAGIC, FORMAT, "plan", running(device))
    if content.get("graphdnn") != __version__:
        raise refuse("the plan was built by another version", _built_with(content), running(device))
    return content, blobs


def _restored(content: dict[str, Any], blobs: memoryview, device: DeviceProps) -> ExecutionPlan:
    """The plan with its stored binaries."""
    return pieces.plan(content, pieces.graph(content), device, lambda recipe: _kernels(recipe, content, blobs))


def _kernels(recipe: Recipe, content: dict[str, Any], blobs: memoryview) -> tuple[Kernel, ...]:
    kernels, at = [], 0
    need(len(content["kernels"]) == len(recipe.kernels), "one binary for each kernel")
    for spec, k in zip(recipe.kernels, content["kernels"], strict=True):
        text, code = (blobs[at : at + k["source"]], blobs[at + k["source"] : at + k["source"] + k["code"]])
        at += len(text) + len(code)
        need(len(text) == k["source"] and len(code) == k["code"], "all bytes of a kernel")
        facts, texts = dict(k["facts"]), {str(n): str(t) for n, t in k["texts"].items()}
        kernels.append(Kernel(spec, str(k["key"]), Binary(str(k["entry"]), bytes(code), facts, texts), "file", str(text, "utf-8")))
    need(at == len(blobs), "no bytes after the last kernel")
    return tuple(kernels)


def _again(content: dict[str, Any], device: DeviceProps) -> ExecutionPlan:
    """The plan lowered anew from graph, engines and knobs: another CPU, or another compiler than it was built with."""
    from graphdnn.engines import ENGINES

    graph = pieces.graph(content)
    partition, choices = pieces.choices(content, graph)
    options = [_option(graph, partition, r, c, device, ENGINES) for r, c in enumerate(choices)]
    name, _, _ = pieces.facts(content)
    log.info(f"plan {name}, built with {content['toolchain']!r}, is compiled again")
    label = name.rpartition("|r0:")[0]
    return ExecutionPlan.of(graph, device, heuristics.candidate(partition, options, device.kind, label)).build()


def _option(graph: OperationGraph, partition: Partition, r: int, choice: Choice, device: DeviceProps, engines: Sequence[Engine]) -> Option:
    region = partition.regions[r]
    engine = next((e for e in engines if e.id == choice.engine), None)
    option = heuristics.option_like(graph, region, device, engine, choice.knobs) if engine is not None else None
    if option is None:
        raise refuse(
            f"engine {choice.engine} ({choice.name}) of the plan does not take region {r} here",
            f"engine {choice.name}, {choice.knobs}",
            running(device),
        )
    return option
