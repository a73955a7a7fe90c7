"""Engine ``attention_fwd``: scaled dot product attention in one kernel, with an online softmax: scores live in registers, on the stack or in shared
memory, a tile at a time, and never in global memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from graphdnn.codegen.spec import Buffer, Recipe
from graphdnn.device import DeviceProps
from graphdnn.engines import attention_cpu, attention_cuda
from graphdnn.engines.attention_cpu import AttentionCpu
from graphdnn.engines.attention_cuda import AttentionSimt
from graphdnn.engines.attention_parts import AttentionProblem
from graphdnn.engines.base import Engine, Knobs, chain, header, traffic
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.passes.regions import Region
from graphdnn.status import OK, Status, reject

FORWARD = ("SDPA",)
"""Tags that the engine takes."""


class AttentionForward(Engine):
    """See the module."""

    id: ClassVar[int] = 9
    name: ClassVar[str] = "attention_fwd"

    def _accepts(self, graph: OperationGraph, region: Region) -> Status:
        node = graph.nodes[region.anchors[0]]
        if node.op not in FORWARD:
            return reject(f"attention_fwd: the anchor '{node.label}' of the region is another op ({node.op})")
        return OK

    def _candidates(self, graph: OperationGraph, region: Region, device: DeviceProps) -> tuple[Knobs, ...]:
        p = AttentionProblem.of(graph, graph.nodes[region.anchors[0]])
        return attention_cpu.candidates(p) if device.kind == "cpu" else attention_cuda.candidates(p, device.kind == "cudasim")

    def _check(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> Status:
        p = AttentionProblem.of(graph, graph.nodes[region.anchors[0]])
        if isinstance(knobs, AttentionCpu):
            return attention_cpu.check(p, knobs)
        assert isinstance(knobs, AttentionSimt), f"knobs of another engine: {knobs!r}"
        return attention_cuda.check(p, knobs)

    def _cost(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> float:
        p = AttentionProblem.of(graph, graph.nodes[region.anchors[0]])
        peak = (device.flops.get(p.node.compute.name) or device.flops["FLOAT"]) * 1e12
        work = p.scores * (2 * (p.d_qk + p.d_v) + 16)  # an exponential is worth about 16
        return max(sum(traffic(graph, region)) / (device.dram_gbps * 1e9), work / (peak * 0.5))

    def _lower(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs, memory: Mapping[int, Buffer]) -> Recipe:
        p = AttentionProblem.of(graph, graph.nodes[region.anchors[0]])
        words, title = chain(graph, region), header(graph, region, knobs)
        if isinstance(knobs, AttentionCpu):
            return attention_cpu.lower(p, knobs, memory, words, title)
        assert isinstance(knobs, AttentionSimt), f"knobs of another engine: {knobs!r}"
        return attention_cuda.lower(p, knobs, memory, words, title)
