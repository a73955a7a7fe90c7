"""Engine ``moe_grouped``: rows sorted by expert times the weight of their expert, and the gradient of the weights; offsets are read when it runs.

What stands in front of its inputs and behind its result is fused into it, as into a matmul.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from graphdnn.codegen.recipes import joined
from graphdnn.codegen.spec import Buffer, Recipe
from graphdnn.device import DeviceProps
from graphdnn.engines import moe_cuda
from graphdnn.engines.base import Knobs, chain, fits, header, placeholder, roofline
from graphdnn.engines.matmul_cuda import SimtTile
from graphdnn.engines.matmul_simt import MatmulSimt, PanelCpu
from graphdnn.engines.moe_cpu import Lowering
from graphdnn.engines.moe_parts import GroupedParts, checks, take_apart
from graphdnn.engines.pointwise import PointwiseCpu, PointwiseCuda, elementwise
from graphdnn.ir.index import Var
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.passes.regions import Region
from graphdnn.status import Status


class MoeGrouped(MatmulSimt):
    """See the module."""

    id: ClassVar[int] = 11
    name: ClassVar[str] = "moe_grouped"
    has_plain: ClassVar[bool] = False

    def _accepts(self, graph: OperationGraph, region: Region) -> Status:
        return fits(lambda: take_apart(graph, region, placeholder(region)))

    def _cost(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> float:
        seconds = roofline(graph, region, device, 0.5, graph.nodes[region.anchors[0]].compute.name)
        if isinstance(knobs, SimtTile):  # large tiles reuse more, small ones waste less of a group's last tile
            return seconds * (1.0 + 32 / (knobs.bm * knobs.tm) + knobs.bm / 1024)
        return seconds * (1.0 if knobs == PanelCpu() else 1.1)

    def _lower(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs, memory: Mapping[int, Buffer]) -> Recipe:
        parts = take_apart(graph, region, memory)
        if 0 in region.space:
            return Recipe((), ())
        words, title = chain(graph, region), header(graph, region, knobs)
        if isinstance(knobs, SimtTile):
            product = moe_cuda.lower(parts, knobs, words, title)
        else:
            assert isinstance(knobs, PanelCpu)
            product = Lowering(parts, knobs.rows, words, title).recipe()
        recipes = [product] if parts.target is None else [self._zeros(graph, region, knobs, parts), product]
        return joined([Recipe((), checks(parts)), *recipes])

    def _zeros(self, graph: OperationGraph, region: Region, knobs: Knobs, parts: GroupedParts) -> Recipe:
        """A kernel in front that gives every row of the result what it has where no index names it."""
        assert parts.target is not None, "rows are scattered"
        loops = [v for v in (Var(parts.target.name, parts.rows), parts.product.n) if v.size > 1]
        simple = PointwiseCuda(knobs.threads) if isinstance(knobs, SimtTile) else PointwiseCpu()
        return elementwise(graph, region, simple, parts.product.signature.empty(), loops, moe_cuda.zeros(parts))
