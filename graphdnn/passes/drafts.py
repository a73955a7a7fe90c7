"""Regions while they are drawn up: which tensors live in which, what is stored, and who must wait for whom."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from graphdnn.ir.index import Index
from graphdnn.ir.node import Node
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.ir.tensor import Dims
from graphdnn.passes import places

Kind = Literal["pointwise", "reduction", "rows", "matmul", "attention", "grouped"]
VIEWS = ("RESHAPE", "TRANSPOSE")
"""Ops that only rename the elements of their input."""


@dataclass
class Draft:
    """A region to be; fields as in :class:`graphdnn.passes.regions.Region`. ``before``: regions that run first; ``axes``: of a reduction."""

    kind: Kind
    space: Dims
    anchors: list[int] = field(default_factory=list)
    epilogue_reductions: list[int] = field(default_factory=list)
    stores: list[int] = field(default_factory=list)
    before: set[int] = field(default_factory=set)
    axes: tuple[int, ...] = ()
    level: dict[int, int] = field(default_factory=dict)
    """Reduction: stages that must have run before a tensor of the region is known."""
    place: dict[int, Index] = field(default_factory=dict)
    """Where tensors of the region stand in its loop nest."""

    def spreads(self, t: int) -> bool:
        """Whether a tensor of a reduction region has an element for each of a row."""
        return self.kind == "reduction" and places.spreads(self.place[t], self.space, self.axes)


class Drafts:
    """Drafts and their tensors. ``home``: the region that calculates a tensor that depends on its anchors; ``stored_by``: the one that stores it.
    Of free values, ``waits``: regions that must have run; ``cone``: nodes that whoever wants one calculates again."""

    def __init__(self, graph: OperationGraph, forced: frozenset[int]) -> None:
        """No drafts yet. ``forced``: tensors that must be stored."""
        self.graph = graph
        self.forced = forced
        self.drafts: list[Draft] = []
        self.home: dict[int, int] = {}
        self.stored_by: dict[int, int] = {}
        self.waits: dict[int, frozenset[int]] = {}
        self.cone: dict[int, frozenset[int]] = {}
        self.notes: list[str] = []

    # -- dependencies ---------------------------------------------------------------------------------------------------------------------
    def _closure(self, regions: Iterable[int]) -> set[int]:
        found: set[int] = set()
        todo = list(regions)
        while todo:
            r = todo.pop()
            if r not in found:
                found.add(r)
                todo.extend(self.drafts[r].before)
        return found

    def _needs(self, tensor: int) -> frozenset[int]:
        """Regions that must have run before ``tensor`` can be had outside its home."""
        if tensor in self.home:
            return frozenset((self.home[tensor],))
        return self.waits.get(tensor, frozenset())

    def _may_join(self, region: int, tensors: Iterable[int]) -> bool:
        return all(region not in self._closure(self._needs(t)) for t in tensors)

    def _materialize(self, tensor: int, why: str) -> None:
        while self._is_spare(tensor) and self._made_by(tensor).op in VIEWS and self._made_by(tensor).input_ids[0] in self.home:
            tensor = self._made_by(tensor).input_ids[0]  # whoever reads it looks through the view
        self._store(tensor, why)

    def _store(self, tensor: int, why: str) -> None:
        region = self.home[tensor]
        if tensor not in self.stored_by:
            self.stored_by[tensor] = region
            self.drafts[region].stores.append(tensor)
            if self.graph.tensors[tensor].virtual:
                self.notes.append(f"'{self.graph.tensors[tensor].name}' is stored: {why}")

    def _is_spare(self, tensor: int) -> bool:
        """Whether nothing asks for a tensor to be stored."""
        return self.graph.tensors[tensor].virtual and tensor not in self.forced and tensor not in self.stored_by

    def _made_by(self, tensor: int) -> Node:
        return self.graph.nodes[self.graph.producer[tensor]]

    def _take(self, region: int, tensors: Iterable[int], why: str) -> None:
        """Let ``region`` read ``tensors`` (from memory or as free values)."""
        for t in tensors:
            if t in self.home and self.home[t] != region:
                self._materialize(t, why)
            self.drafts[region].before |= self._needs(t) - {region}

    def _new(self, draft: Draft) -> int:
        self.drafts.append(draft)
        return len(self.drafts) - 1

    def _store_alone(self, out: int) -> None:
        region = self._new(Draft("pointwise", self.graph.tensors[out].dim, stores=[out], before=set(self.waits[out])))
        self.stored_by[out] = region
        self.waits[out] = frozenset((region,))
        self.cone[out] = frozenset()

    def _store_late(self, out: int) -> None:
        """Store a value alone that regions were to calculate for themselves: from now on they read it, and so wait for it, as whoever reads a free
        value behind which it stands."""
        made = self.graph.producer[out]
        users = [d for r, d in enumerate(self.drafts) if made in self._walk(self._wanted(d), r)[1]]
        self._store_alone(out)
        for d in users:
            d.before.add(self.stored_by[out])
        for t, behind in self.cone.items():
            if made in behind:
                self.waits[t] |= {self.stored_by[out]}

    # -- what a region reads -------------------------------------------------------------------------------------------------------------
    def _wanted(self, d: Draft) -> list[int]:
        """Tensors whose values the region must have: what it stores and what its anchors read."""
        inputs = [t for a in (*d.anchors, *d.epilogue_reductions) for t in self.graph.nodes[a].input_ids]
        return [*d.stores, *inputs]

    def _memory_behind(self, tensors: Iterable[int], region: int | None = None) -> dict[int, None]:
        reads, _ = self._walk(tensors, region)
        return reads

    def _walk(self, tensors: Iterable[int], region: int | None) -> tuple[dict[int, None], set[int]]:
        """Tensors read from memory and nodes calculated to have ``tensors`` (in ``region``)."""
        reads: dict[int, None] = {}
        nodes: set[int] = set()
        seen: set[int] = set()
        todo = list(tensors)[::-1]
        while todo:
            t = todo.pop()
            if t in seen:
                continue
            seen.add(t)
            node = self.graph.producer.get(t)
            own = self.stored_by.get(t, region) == region
            if node is None or (not own and not self.cone.get(t)):
                reads[t] = None
            else:
                nodes.add(node)
                todo.extend(reversed(self.graph.nodes[node].input_ids))
        return reads, nodes
