"""Engine ``matmul_wgmma``: fused matmul of bfloat16 and half on the tensor cores of Hopper (sm_90a), fed by the TMA unit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from graphdnn.codegen.spec import Buffer, Recipe
from graphdnn.codegen.tape import TapeTooLong
from graphdnn.device import DeviceProps
from graphdnn.dtypes import data_type
from graphdnn.engines import matmul_parts
from graphdnn.engines.base import Engine, Knobs, ceil_div, chain, header, placeholder, traffic
from graphdnn.engines.wgmma_tile import BK, WgmmaTile
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.passes.regions import Region
from graphdnn.status import OK, Status, reject

if TYPE_CHECKING:
    from graphdnn.engines.wgmma_parts import WgmmaParts

TYPES = (data_type.BFLOAT16, data_type.HALF)
TILES = (
    WgmmaTile(128, 256, 4, cluster=2),
    WgmmaTile(128, 256, 4),
    WgmmaTile(128, 128, 5, alternate=True, cluster=2),
    WgmmaTile(128, 128, 5, alternate=True),
    WgmmaTile(128, 128, 6),
    WgmmaTile(64, 128, 6, alternate=True),
    WgmmaTile(64, 64, 8, alternate=True),
)
SMALL_TILES = (
    WgmmaTile(128, 64, 2),
    WgmmaTile(64, 64, 3, alternate=True),
    WgmmaTile(128, 128, 2, alternate=True),
    WgmmaTile(64, 128, 2, alternate=True, cluster=2),
)
"""For the simulator."""
_L2_BYTES = 44
"""Bytes that a multiprocessor gets from the L2 cache in a clock, with all of them asking."""
_FLOPS = 4096
"""Of bfloat16 and half in a clock and multiprocessor."""


class MatmulWgmma(Engine):
    """See the module."""

    id: ClassVar[int] = 3
    name: ClassVar[str] = "matmul_wgmma"

    def _accepts(self, graph: OperationGraph, region: Region) -> Status:
        if region.kind != "matmul":
            return reject(f"matmul_wgmma: the region has no matmul as its anchor ({region.kind})")
        node = graph.nodes[region.anchors[0]]
        if node.op != "MATMUL":
            return reject(f"matmul_wgmma: the anchor '{node.label}' of the region is another op ({node.op})")
        if node.compute is not data_type.FLOAT:
            return reject(f"matmul_wgmma: node '{node.label}' computes in {node.compute.name}; wgmma sums bfloat16 and half in FLOAT only")
        for tensor in (graph.tensors[node.input("A")], graph.tensors[node.input("B")]):
            if tensor.dtype not in TYPES:
                return reject(f"matmul_wgmma: input '{tensor.name}' is {tensor.dtype.name}; wgmma takes {' and '.join(t.name for t in TYPES)} here")
        try:
            parts = self._parts(graph, region, placeholder(region))
        except TapeTooLong as error:
            return reject("the fused expression is too long for one kernel", cut=error.tensor)
        return parts if isinstance(parts, Status) else OK

    def _parts(self, graph: OperationGraph, region: Region, memory: Mapping[int, Buffer]) -> WgmmaParts | Status:
        from graphdnn.engines.wgmma_parts import take_apart

        return take_apart(matmul_parts.take_apart(graph, region, memory, False), graph, region)

    def _candidates(self, graph: OperationGraph, region: Region, device: DeviceProps) -> tuple[Knobs, ...]:
        tiles = SMALL_TILES if device.kind == "cudasim" else TILES
        if device.kind == "cpu":
            return tiles
        return tuple(sorted(tiles, key=lambda t: self._cost(graph, region, device, t)))

    def _check(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> Status:
        if device.kind == "cpu" or device.arch != "sm_90a":
            return reject(f"matmul_wgmma: wgmma and TMA need an sm_90a GPU; the device is {device.name} ({device.arch})")
        assert isinstance(knobs, WgmmaTile), f"knobs of another engine: {knobs!r}"
        if knobs.shared_bytes > device.shared_per_block_optin:
            return reject(
                f"matmul_wgmma: {knobs!r} needs {knobs.shared_bytes} bytes of shared memory; {device.name} has {device.shared_per_block_optin}"
            )
        if knobs.bn % (64 * knobs.cluster):
            return reject(f"matmul_wgmma: {knobs!r}: the columns of a tile do not divide into parts of 64 for the blocks of a cluster")
        return OK

    def numeric_notes(self, graph: OperationGraph, region: Region, knobs: Knobs) -> tuple[str, ...]:
        """Tensor cores add in an order and with a rounding of their own."""
        return ("TENSOR_CORE",)

    def _cost(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> float:
        assert isinstance(knobs, WgmmaTile), f"knobs of another engine: {knobs!r}"
        node = graph.nodes[region.anchors[0]]
        *batch, m, n = graph.tensors[node.output_ids[0]].dim
        k = graph.tensors[node.input("A")].dim[-1]
        tiles = math.prod((*knobs.counts(m, n), *batch))
        clocks = _clocks(tiles, ceil_div(k, BK), len(region.nodes), device.sm_count, knobs)
        slow = 20.0 if device.kind == "cudasim" else 1.0  # 384 simulated threads take their time: only where asked for
        return slow * max(clocks / (device.clock_ghz * 0.9e9), sum(traffic(graph, region)) / (device.dram_gbps * 1e9))

    def _lower(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs, memory: Mapping[int, Buffer]) -> Recipe:
        assert isinstance(knobs, WgmmaTile), f"knobs of another engine: {knobs!r}"
        from graphdnn.engines import wgmma_cuda

        parts = self._parts(graph, region, memory)
        assert not isinstance(parts, Status), f"the region was accepted: {parts}"
        return wgmma_cuda.lower(parts, knobs, device.sm_count, chain(graph, region), header(graph, region, knobs))


def _clocks(tiles: int, k_steps: int, nodes: int, sm_count: int, tile: WgmmaTile) -> float:
    """Clocks of the slowest multiprocessor: its tiles' main loops, and the epilogues that nothing hides."""
    fetched = (tile.bm + tile.bn // tile.cluster) * BK * 2
    step = max(2 * tile.bm * tile.bn * BK / _FLOPS / 0.93, fetched / _L2_BYTES)
    epilogue = tile.bm * tile.bn * (0.06 + 0.05 * nodes)
    turns = ceil_div(tiles, sm_count // tile.cluster)
    hidden = tile.alternate and turns > 1
    exposed = max(epilogue - k_steps * step, 0.0) * (turns - 1) + epilogue if hidden else turns * epilogue
    return turns * k_steps * step + exposed + 700
