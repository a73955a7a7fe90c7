"""Engine ``conv_implicit_gemm``: portable convolution and its gradients, of every data type, any strides, groups and spatial rank, as a matmul.

Its input is read through a window: no im2col matrix is stored. On CUDA a block loads tiles of it element by element; a CPU unfolds the rows of one
panel, in cache, for BLAS.
"""

from __future__ import annotations

import math
from typing import ClassVar

from graphdnn.codegen.contraction import Contraction, contraction, contractions
from graphdnn.device import DeviceProps
from graphdnn.engines.base import Knobs
from graphdnn.engines.matmul_parts import MatmulParts
from graphdnn.engines.matmul_simt import MatmulSimt, PanelCpu
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.passes.regions import Region

PANEL_BYTES = 4 << 20
"""Unfolded input of a panel."""
UNFOLDED_RATE = 5e9
"""Bytes of it that a core writes in a second (Zen 3, 2026-11-29)."""


class ConvImplicitGemm(MatmulSimt):
    """See the module."""

    id: ClassVar[int] = 5
    name: ClassVar[str] = "conv_implicit_gemm"

    def _takes(self, op: str) -> bool:
        return op != "MATMUL"

    def _forms(self, graph: OperationGraph, region: Region) -> tuple[Contraction, ...]:
        """Partial sums of reductions are counted through one kernel's blocks: they want the anchor in one piece."""
        node = graph.nodes[region.anchors[0]]
        return (contraction(node, graph),) if region.epilogue_reductions else contractions(node, graph)

    def _cost(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> float:
        seconds = super()._cost(graph, region, device, knobs)
        if not isinstance(knobs, PanelCpu):
            return seconds
        seconds *= 1.1  # BLAS on matrices of few columns
        unfolded = 0
        for form in self._forms(graph, region):
            pointwise = not form.a.guards and math.prod(v.size for v in form.k[1:]) == 1  # a filter of one tap: memory is the matrix
            batch, m, _, k = form.sizes
            unfolded += 0 if pointwise else batch * m * k
        return seconds + unfolded * self._item(graph, region) / (UNFOLDED_RATE * max(device.cores, 1))

    def _rows(self, parts: MatmulParts, knobs: PanelCpu) -> int:
        """Fewer where the unfolded rows of a panel would not stay in cache."""
        return max(min(knobs.rows, PANEL_BYTES // (max(parts.k.size, 1) * 4)), 128)
