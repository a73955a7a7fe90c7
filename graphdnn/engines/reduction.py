"""Engine ``reduction``: reductions of one space over the same axes, with what is calculated before (prologue) and after (epilogue) in one kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from graphdnn.codegen.spec import Buffer, Recipe
from graphdnn.device import DeviceProps
from graphdnn.engines import reduction_cpu, reduction_cuda
from graphdnn.engines.base import Engine, Knobs, ceil_div, chain, fits, header, placeholder, roofline
from graphdnn.engines.reduction_cpu import ReductionCpu
from graphdnn.engines.reduction_cuda import ReductionCuda
from graphdnn.engines.reduction_parts import take_apart
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.passes.regions import Region
from graphdnn.status import OK, Status, reject


class Reduction(Engine):
    """See the module."""

    id: ClassVar[int] = 1
    name: ClassVar[str] = "reduction"

    def _accepts(self, graph: OperationGraph, region: Region) -> Status:
        if region.kind != "reduction":
            return reject(f"reduction: the region has no reduction as its anchor ({region.kind})")
        return fits(lambda: take_apart(graph, region, placeholder(region), False))

    def _candidates(self, graph: OperationGraph, region: Region, device: DeviceProps) -> tuple[Knobs, ...]:
        parts = take_apart(graph, region, placeholder(region), device.kind == "cpu")
        if device.kind == "cpu":
            return reduction_cpu.candidates(parts)
        return reduction_cuda.candidates(parts, 16 if device.kind == "cudasim" else 256, device.sm_count)

    def _check(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> Status:
        if isinstance(knobs, ReductionCuda) and knobs.tx * knobs.ty > 1024:
            return reject(f"reduction: {knobs.tx} x {knobs.ty} threads; a block has at most 1024")
        return OK

    def _cost(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> float:
        """Equal for shapes that fill the device, so that the order of the candidates decides; worse where few blocks would starve it."""
        seconds = roofline(graph, region, device)
        results = max(graph.tensors[graph.nodes[region.anchors[0]].output_ids[0]].size, 1)
        if isinstance(knobs, ReductionCpu):
            return seconds * max(1.0, device.cores / (results * knobs.split))
        assert isinstance(knobs, ReductionCuda)
        blocks = ceil_div(results, knobs.tx) * knobs.split
        return seconds * max(1.0, device.sm_count / blocks) + (2e-6 if knobs.split > 1 else 0.0)

    def _lower(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs, memory: Mapping[int, Buffer]) -> Recipe:
        parts = take_apart(graph, region, memory, isinstance(knobs, ReductionCpu))
        if parts.size == 0:
            return Recipe((), ())
        words, title = chain(graph, region), header(graph, region, knobs)
        if isinstance(knobs, ReductionCpu):
            return reduction_cpu.lower(parts, knobs, words, title)
        assert isinstance(knobs, ReductionCuda)
        return reduction_cuda.lower(parts, knobs, words, title)
