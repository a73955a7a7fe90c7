"""The contract of an engine, and what engines share: traffic, cost, names."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

from graphdnn import log
from graphdnn.codegen.contraction import CONTRACTIONS, contractions
from graphdnn.codegen.spec import Buffer, Recipe
from graphdnn.codegen.tape import TapeTooLong
from graphdnn.device import DeviceProps
from graphdnn.dtypes import data_type, info
from graphdnn.engines import subbyte
from graphdnn.engines.attention_parts import AttentionProblem
from graphdnn.ir.extent import Extent, varies
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.opspecs import registry
from graphdnn.opspecs.fast_conv import FastConv
from graphdnn.passes.regions import Region
from graphdnn.status import OK, Status, reject


@dataclass(frozen=True)
class Knobs:
    """Base of every knob set: a frozen dataclass whose repr is a constructor call."""


class Engine(ABC):
    """One kernel family. The public methods are final; a family fills the hooks.

    ``_accepts(graph, region)``: whether the region's form fits at all, with the reason; no device, no compiling.
    ``_candidates``: knob sets worth trying, best guess first; pure. ``_check``: the only constraint set for one knob set.
    ``_cost``: seconds by the roofline model. ``_lower``: kernels and steps; may raise TapeTooLong. Hooks raise nothing else.
    """

    id: ClassVar[int]
    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        for field in ("id", "name"):
            assert field in cls.__dict__, f"engine class {cls.__name__} must set '{field}'"

    @final
    def check_support(self, graph: OperationGraph, region: Region, device: DeviceProps) -> Status:
        """Whether some knob set of this engine can run ``region`` on ``device``; compiles nothing."""
        status = self._accepts(graph, region)
        if not status:
            return status
        reasons = []
        for knobs in self._candidates(graph, region, device):
            status = self._check(graph, region, device, knobs)
            if status:
                return status
            reasons.append(status)
        return reasons[0] if reasons else reject(f"{self.name}: no knob set for this region on {device.name}")

    @final
    def candidates(self, graph: OperationGraph, region: Region, device: DeviceProps) -> tuple[Knobs, ...]:
        """Knob sets that pass ``check``, best guess first. Those left out are debug lines of the log."""
        if not self._accepts(graph, region):
            return ()
        found = [(k, self._check(graph, region, device, k)) for k in self._candidates(graph, region, device)]
        if log.enabled("debug"):
            for knobs, status in found:
                if not status:
                    log.debug(f"candidate left out: {self.name} {knobs!r}: {status.reason}")
        return tuple(knobs for knobs, status in found if status)

    @final
    def check(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> Status:
        """Whether ``knobs`` can run ``region`` on ``device``."""
        status = self._accepts(graph, region)
        return self._check(graph, region, device, knobs) if status else status

    @final
    def cost(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> float:
        """Estimated seconds of one execution, launch overhead excluded."""
        return self._cost(graph, region, device, knobs)

    @final
    def lower(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs, memory: Mapping[int, Buffer]) -> Recipe:
        """Kernels and steps. ``memory``: a buffer for every tensor that it reads or stores; scratch is ``Buffer("workspace", -1, offset)``."""
        packed = subbyte.outputs(graph, region)
        recipe = self._lower(graph, region, device, knobs, subbyte.unpacked(memory, packed) if packed else memory)
        return subbyte.packing(graph, packed, recipe, memory, device.kind == "cpu") if packed else recipe

    def numeric_notes(self, graph: OperationGraph, region: Region, knobs: Knobs) -> tuple[str, ...]:
        """Names of numerical_note members that hold for this kernel."""
        return ()

    def algorithm(self, knobs: Knobs) -> FastConv | None:
        """How the anchor's sums are made where that is not product by product, for the error bound; None where it is."""
        return None

    @abstractmethod
    def _accepts(self, graph: OperationGraph, region: Region) -> Status: ...

    @abstractmethod
    def _candidates(self, graph: OperationGraph, region: Region, device: DeviceProps) -> tuple[Knobs, ...]: ...

    def _check(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> Status:
        return OK

    def _cost(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> float:
        return roofline(graph, region, device)

    @abstractmethod
    def _lower(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs, memory: Mapping[int, Buffer]) -> Recipe: ...


class Scratch:
    """Hands out a region's own workspace, in parts that start at multiples of 256 bytes. ``size``: bytes so far."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.size = 0

    def take(self, nbytes: int) -> Buffer:
        """The next ``nbytes`` bytes."""
        buffer = Buffer("workspace", -1, self.size)
        self.size += (nbytes + 255) // 256 * 256
        return buffer


def placeholder(region: Region) -> dict[int, Buffer]:
    """Buffers to build a tape with where only its form matters."""
    return {t: Buffer("tensor", t) for t in (*region.reads, *region.stores, *(t for t, _ in region.views))}


def fits(build: Any) -> Status:
    """OK if ``build()`` makes its tape, else a rejection that names the tensor to store."""
    try:
        build()
    except TapeTooLong as error:
        return reject("the fused expression is too long for one kernel", cut=error.tensor)
    return OK


def element_bytes(dtype: data_type, count: int) -> int:
    """Bytes of ``count`` elements."""
    return (info(dtype).bits * count + 7) // 8


def _touched(graph: OperationGraph, tensor: int) -> int:
    """Distinct elements of a tensor: a stride of 0 reads one."""
    t = graph.tensors[tensor]
    n = 1
    for d, s in zip(t.dim, t.stride, strict=True):
        n *= d if s or d == 0 else 1
    return n


def traffic(graph: OperationGraph, region: Region) -> tuple[int, int]:
    """Bytes that the region must read and write, each tensor once."""
    read = sum(
        element_bytes(graph.tensors[t].dtype, _touched(graph, t))
        for t in region.reads
        if not (graph.tensors[t].by_value or graph.tensors[t].constant)
    )
    return read, sum(element_bytes(graph.tensors[t].dtype, _touched(graph, t)) for t in region.stores)


def flops(graph: OperationGraph, region: Region) -> int:
    """Arithmetic operations: 2 m n k for a contraction, the products of an attention, what its spec says for a few ops, one an element
    for the others."""
    total = 0
    for i in region.nodes:
        node = graph.nodes[i]
        out = graph.tensors[node.output_ids[0]]
        if node.op in CONTRACTIONS:
            total += 2 * sum(math.prod(form.sizes) for form in contractions(node, graph))
        elif node.op == "REDUCTION":
            total += graph.tensors[node.input_ids[0]].size
        elif node.op == "POINTWISE":
            total += out.size
        elif registry.spec(node.op).role == "attention":
            total += AttentionProblem.of(graph, node).flops
        else:
            work = registry.spec(node.op).work
            total += work([graph.tensors[t].dim for t in node.input_ids], [graph.tensors[t].dim for t in node.output_ids]) if work else 0
    return total


def roofline(graph: OperationGraph, region: Region, device: DeviceProps, efficiency: float = 1.0, dtype: str = "FLOAT") -> float:
    """Seconds: the larger of bytes over bandwidth and operations over the peak of ``dtype``, over ``efficiency`` for the operations."""
    peak = device.flops.get(dtype) or device.flops["FLOAT"]
    return max(sum(traffic(graph, region)) / (device.dram_gbps * 1e9), flops(graph, region) / (peak * 1e12 * efficiency))


def chain(graph: OperationGraph, region: Region, limit: int = 5) -> str:
    """The op chain of a region, for names and headers: ``matmul_mul_gelu_fwd``."""
    words = []
    for i in region.nodes:
        node = graph.nodes[i]
        mode = node.attr("mode")
        words.append({"POINTWISE": str(mode).lower(), "REDUCTION": f"reduce_{mode}".lower()}.get(node.op, node.op.lower()))
    if len(words) > limit:
        words = [*words[: limit - 1], f"{len(words) - limit + 1}_more"]
    return "_".join(words)


def entry_name(words: str, *parts: object) -> str:
    """``words`` and a digest of ``parts``: the same text for the same kernel, in every process."""
    return f"{words}_{hashlib.sha256(repr(parts).encode()).hexdigest()[:10]}"


def header(graph: OperationGraph, region: Region, knobs: Knobs) -> list[str]:
    """Comment lines that say what a kernel computes. No user's text is in them: names are neither code nor part of the cache key."""
    lines = [f"# {chain(graph, region, 24).replace('_', ' ')}; space {list(region.space)}; {knobs!r}"]
    for what, ids in (("reads", region.reads), ("writes", region.stores)):
        for t in (graph.tensors[i] for i in ids):
            lines.append(f"#   {what} {t.dtype.name} {list(t.dim)} : {list(t.stride)}{' by value' if t.by_value or t.constant else ''}")
    return lines


def power_of_two(n: int) -> int:
    """Smallest power of two that is not under ``n`` (at least 1)."""
    return 1 << max(n - 1, 0).bit_length()


def ceil_div(a: int, b: int) -> int:
    """Ceiling of a / b; a number that may be another in the next call if ``a`` is one."""
    return Extent(-(-int(a) // b)) if varies(a) else -(-a // b)
