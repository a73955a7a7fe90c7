"""Engine ``matmul_simt``: portable matmul of every data type and any strides, with prologue and epilogue tapes and epilogue reductions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from graphdnn.codegen.contraction import Contraction, contraction
from graphdnn.codegen.recipes import joined
from graphdnn.codegen.spec import Buffer, Recipe
from graphdnn.device import DeviceProps
from graphdnn.dtypes import info
from graphdnn.engines import matmul_cpu, matmul_cuda, plain_cpu
from graphdnn.engines.base import Engine, Knobs, ceil_div, chain, fits, header, placeholder, roofline
from graphdnn.engines.matmul_cuda import SimtTile
from graphdnn.engines.matmul_parts import MatmulParts, take_apart
from graphdnn.engines.plain_cpu import PlainCpu
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.passes.regions import Region
from graphdnn.status import OK, Status, reject

STATIC_SHARED = 48 * 1024
STEP_CLOCKS = 700
"""Clocks of one step along k at least: the tiles come from memory or the L2 cache first, and nothing is fetched ahead."""


@dataclass(frozen=True)
class PanelCpu(Knobs):
    """``rows``: rows of a result panel. Many keep BLAS fast, few keep the panel in cache until its epilogue has run (2-core Zen 3, 2026-11-29:
    2048 x 2048 x 2048 in panels of 128 rows 152 ms, 256 130, 1024 121, whole 129)."""

    rows: int = 1024


class MatmulSimt(Engine):
    """See the module. ``_takes``, ``_forms`` and ``_rows`` are hooks of engines that lower other contractions in the same way."""

    id: ClassVar[int] = 2
    name: ClassVar[str] = "matmul_simt"
    has_plain: ClassVar[bool] = True
    """Whether a CPU can make its results one by one, without a workspace."""

    def _takes(self, op: str) -> bool:
        """Whether an anchor of this op is the engine's."""
        return op == "MATMUL"

    def _forms(self, graph: OperationGraph, region: Region) -> tuple[Contraction, ...]:
        """The contractions that make up the anchor, run one after the other."""
        return (contraction(graph.nodes[region.anchors[0]], graph),)

    def _accepts(self, graph: OperationGraph, region: Region) -> Status:
        if region.kind != "matmul":
            return reject(f"{self.name}: the region has no {self.name.split('_')[0]} as its anchor ({region.kind})")
        node = graph.nodes[region.anchors[0]]
        if not self._takes(node.op):
            return reject(f"{self.name}: the anchor '{node.label}' of the region is another op ({node.op})")
        status = fits(lambda: take_apart(graph, region, placeholder(region), False, self._forms(graph, region)[0]))
        return self._accepts_sums(graph, region) if status and region.epilogue_reductions else status

    def _accepts_sums(self, graph: OperationGraph, region: Region) -> Status:
        parts = take_apart(graph, region, placeholder(region), False)
        for s, place in zip(parts.sums, parts.places, strict=True):
            if place is None:
                return reject(f"{self.name}: reduction '{s.node.label}' is not of all results, of columns or of rows", cut=s.node.input_ids[0])
        return OK

    def _candidates(self, graph: OperationGraph, region: Region, device: DeviceProps) -> tuple[Knobs, ...]:
        if device.kind == "cpu":
            panels = (PanelCpu(), PanelCpu(256), PanelCpu(4096))
            return (*panels, PlainCpu()) if self.has_plain else panels
        if device.kind == "cudasim":
            return (SimtTile(8, 8, 4, 2, 2), SimtTile(4, 8, 4, 1, 2))
        tiles = [
            SimtTile(128, 64, 16, 8, 4),
            SimtTile(64, 64, 16, 4, 4),
            SimtTile(32, 64, 16, 4, 2),
            SimtTile(32, 32, 16, 2, 2),
            SimtTile(16, 16, 16, 1, 1),
        ]
        item = self._item(graph, region)
        usable = [t for t in tiles if t.shared_bytes(item) <= STATIC_SHARED]
        return tuple(sorted(usable, key=lambda t: self._cost(graph, region, device, t)))

    def _item(self, graph: OperationGraph, region: Region) -> int:
        return 8 if info(graph.nodes[region.anchors[0]].compute).register.endswith("64") else 4

    def _check(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> Status:
        if region.epilogue_reductions and isinstance(knobs, PlainCpu):
            name = graph.nodes[region.epilogue_reductions[0]].name
            return reject(f"{self.name}: {knobs!r} leaves no partial results, for the reduction '{name}'")
        if region.epilogue_reductions:
            parts = take_apart(graph, region, placeholder(region), False)
            kinds = {p.kind for p in parts.places if p}
            if isinstance(knobs, SimtTile) and {"row", "column"} <= kinds:
                return reject(f"{self.name}: sums of rows and of columns in one kernel: a thread walks a row or a column of its tile")
            if isinstance(knobs, PanelCpu) and "column" in kinds and parts.calc not in matmul_cpu.BLAS:
                return reject(f"{self.name}: sums of columns of {parts.calc}: a CPU makes such results row by row, and keeps none of columns")
        if isinstance(knobs, SimtTile) and knobs.shared_bytes(self._item(graph, region)) > STATIC_SHARED:
            return reject(
                f"{self.name}: {knobs!r} needs {knobs.shared_bytes(self._item(graph, region))} bytes of shared memory; at most {STATIC_SHARED}"
            )
        return OK

    def _cost(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> float:
        dtype = graph.nodes[region.anchors[0]].compute.name
        if isinstance(knobs, PlainCpu):
            return roofline(graph, region, device, plain_cpu.REACHED, dtype)
        if not isinstance(knobs, SimtTile):
            return roofline(graph, region, device, 0.9, dtype) * (1.0 if knobs == PanelCpu() else 1.1)
        forms = [f for f in self._forms(graph, region) if math.prod(f.sizes[:3])]
        work = [math.prod(f.sizes[:3]) * (f.sizes[3] + 1) for f in forms]
        shares = [w / sum(work) for w in work]
        return sum(self._tiled(graph, region, device, knobs, f, share) for f, share in zip(forms, shares, strict=True))

    def _tiled(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: SimtTile, form: Contraction, share: float) -> float:
        """Seconds of one of the contractions on a GPU, which is ``share`` of the region's work."""
        dtype = graph.nodes[region.anchors[0]].compute.name
        batch, m, n, k = form.sizes
        tiles = batch * ceil_div(m, knobs.bm) * ceil_div(n, knobs.bn)
        covered = tiles * knobs.bm * knobs.bn / max(m * n * batch, 1)  # work on tails counts
        waves = ceil_div(tiles, device.sm_count) / max(tiles / device.sm_count, 1e-9)
        reuse = 2 * knobs.tm * knobs.tn / (knobs.tm + knobs.tn) / 12  # multiply-adds for each shared-memory read, at most about 1
        efficiency = min(0.85, 0.25 + reuse)
        seconds = roofline(graph, region, device, efficiency, dtype) * share * max(covered, 1.0) * max(waves, 1.0)
        steps = ceil_div(k, knobs.bk)
        return max(seconds, steps * STEP_CLOCKS / (device.clock_ghz * 1e9))

    def _lower(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs, memory: Mapping[int, Buffer]) -> Recipe:
        forms = self._forms(graph, region)
        return joined([self._lower_form(graph, region, device, knobs, take_apart(graph, region, memory, device.kind == "cpu", f)) for f in forms])

    def _lower_form(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs, parts: MatmulParts) -> Recipe:
        words, title = chain(graph, region), header(graph, region, knobs)
        if isinstance(knobs, SimtTile):
            return matmul_cuda.lower(parts, knobs, words, title)
        if isinstance(knobs, PlainCpu):
            return plain_cpu.lower(parts, words, title)
        assert isinstance(knobs, PanelCpu)
        m, most = max(parts.m.size, 1), self._rows(parts, knobs)
        rows = ceil_div(m, ceil_div(m, most)) if m > most else most
        return matmul_cpu.lower(parts, rows, words, title)

    def _rows(self, parts: MatmulParts, knobs: PanelCpu) -> int:
        """Rows of a CPU panel at most."""
        return knobs.rows
