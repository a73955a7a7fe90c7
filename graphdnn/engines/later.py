"""Engines that are imported when they are first needed: those of kinds of regions that most graphs do not have.

An import costs more than a look at a region: with all engines imported a build from the disk cache would take twice as long. What is known of such an
engine before is its id, its name and the kind of region that it takes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import import_module
from typing import ClassVar

from graphdnn.codegen.spec import Buffer, Recipe
from graphdnn.device import DeviceProps
from graphdnn.engines.base import Engine, Knobs
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.opspecs.fast_conv import FastConv
from graphdnn.passes.regions import Region
from graphdnn.status import Status, reject


class Later(Engine):
    """Stands for the engine ``where`` ("module:class"), which sees only regions of ``kind``. ``anchor``: what such a region has, in words."""

    id: ClassVar[int] = -1
    name: ClassVar[str] = "later"
    where: ClassVar[str]
    kind: ClassVar[str]
    anchor: ClassVar[str]

    @property
    def real(self) -> Engine:
        """The engine itself."""
        return _load(self.where)

    def _accepts(self, graph: OperationGraph, region: Region) -> Status:
        if region.kind != self.kind:
            return reject(f"{self.name}: the region has no {self.anchor} as its anchor ({region.kind})")
        return self.real._accepts(graph, region)

    def _candidates(self, graph: OperationGraph, region: Region, device: DeviceProps) -> tuple[Knobs, ...]:
        return self.real._candidates(graph, region, device)

    def _check(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> Status:
        return self.real._check(graph, region, device, knobs)

    def _cost(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> float:
        return self.real._cost(graph, region, device, knobs)

    def _lower(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs, memory: Mapping[int, Buffer]) -> Recipe:
        return self.real._lower(graph, region, device, knobs, memory)

    def numeric_notes(self, graph: OperationGraph, region: Region, knobs: Knobs) -> tuple[str, ...]:
        """Those of the engine itself."""
        return self.real.numeric_notes(graph, region, knobs)

    def algorithm(self, knobs: Knobs) -> FastConv | None:
        """That of the engine itself."""
        return self.real.algorithm(knobs)


@functools.cache
def _load(where: str) -> Engine:
    module, _, name = where.partition(":")
    made: Engine = getattr(import_module(f"graphdnn.engines.{module}"), name)()
    return made


class _Convolution(Later):
    """A convolution's region is of the kind "matmul", as a matmul's is."""

    id, name, kind, anchor = -2, "convolution", "matmul", "convolution"

    def _accepts(self, graph: OperationGraph, region: Region) -> Status:
        node = graph.nodes[region.anchors[0]] if region.kind == self.kind else None
        if node is not None and node.op == "MATMUL":
            return reject(f"{self.name}: the anchor '{node.label}' of the region does not slide over an image ({node.op})")
        return super()._accepts(graph, region)


class ConvDirect(_Convolution):
    """Convolution without a matrix."""

    id, name, where = 6, "conv_direct", "conv_direct:ConvDirect"


class ConvWinograd(_Convolution):
    """3 x 3 convolution by transformed tiles."""

    id, name, where = 7, "conv_winograd", "conv_winograd:ConvWinograd"


class ConvFft(_Convolution):
    """Convolution by Fourier transforms."""

    id, name, where = 8, "conv_fft", "conv_fft:ConvFft"


class AttentionForward(Later):
    """Attention, forward."""

    id, name, where, kind, anchor = 9, "attention_fwd", "attention_fwd:AttentionForward", "attention", "attention node"


class AttentionBackward(Later):
    """The gradient of attention."""

    id, name, where, kind, anchor = 10, "attention_bwd", "attention_bwd:AttentionBackward", "attention", "attention node"


class MoeGrouped(Later):
    """Matmul of rows grouped by expert."""

    id, name, where, kind, anchor = 11, "moe_grouped", "moe_grouped:MoeGrouped", "grouped", "grouped matmul"
