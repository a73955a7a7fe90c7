"""Tile shapes of the wgmma matmul: its knobs, and what follows from them alone. Small, since every build imports it."""

from __future__ import annotations

from dataclasses import dataclass

from graphdnn.codegen.spec import Role, SharedPart
from graphdnn.engines.base import Knobs, ceil_div

BK = 64
"""Values of k in a stage: 128 bytes, one line of the swizzle."""
CONSUMERS = 2
WARPGROUP = 128
"""Threads of a warpgroup."""
SLICE = 64
"""Columns that are staged at a time."""
LINE = 2 * BK
"""Bytes of a line of an input tile."""
STAGING = 64 * SLICE * 4
"""Bytes of a consumer's staged slice."""
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240
"""24 + 2 * 240 registers a thread of each warpgroup is all that the register file has; 40 instead of 24 hangs (H200)."""


@dataclass(frozen=True)
class WgmmaTile(Knobs):
    """Tiles of ``bm`` x ``bn`` results, ``stages`` steps of 64 k in flight. ``alternate``: the two consumer warpgroups take tiles in turn, so that
    the epilogue of one runs under the main loop of the other; else they share a tile, half the rows each. ``cluster``: blocks whose tiles lie below
    each other and that fetch the column input together. ``group``: rows of tiles that are walked together, for the L2 cache: with 16 of 128 rows the
    tiles of a wave make about a square."""

    bm: int
    bn: int
    stages: int
    alternate: bool = False
    cluster: int = 1
    group: int = 16

    def counts(self, rows: int, columns: int) -> tuple[int, int]:
        """Tiles of a matrix: rows of tiles, ``cluster`` of which count as one, and columns."""
        return ceil_div(rows, self.bm * self.cluster), ceil_div(columns, self.bn)

    @property
    def blocks(self) -> int:
        """Blocks of 64 rows that one consumer has."""
        return self.bm // 64 // (1 if self.alternate else CONSUMERS)

    @property
    def registers(self) -> int:
        """Accumulators of a thread."""
        return self.blocks * self.bn // 2

    @property
    def stage_bytes(self) -> int:
        """Both input tiles."""
        return (self.bm + self.bn) * LINE

    def layout(self) -> tuple[SharedPart, ...]:
        """Dynamic shared memory."""
        sizes = {
            "stages": self.stages * self.stage_bytes,
            "staging": CONSUMERS * STAGING,
            "full": 8 * self.stages,
            "empty": 8 * self.stages,
            "turn": 8,
            "turn_second": 8,
        }
        parts, at = [], 0
        for name, size in sizes.items():
            parts.append(SharedPart(name, at, size))
            at += size
        return tuple(parts)

    @property
    def shared_bytes(self) -> int:
        """All of it."""
        last = self.layout()[-1]
        return last.offset + last.nbytes


ROLES = (Role("producer", WARPGROUP, PRODUCER_REGISTERS), Role("consumer", CONSUMERS * WARPGROUP, CONSUMER_REGISTERS))
