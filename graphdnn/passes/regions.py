"""Regions: which nodes become one kernel, in which order, and which virtual tensors must be stored between them.

A region has an anchor (a matmul, an attention node, or reductions over one space and the same axes) or none. Values that only need memory are *free*:
every region that wants one calculates it again from memory (numbers stay equal, since each value is rounded to its tensor's data type), so pointwise
and movement ops in front of an anchor are always fused into it. What follows an anchor joins its epilogue where the space stays the same and no
region would come to wait for itself; where it cannot, the anchor's value is stored: a cut, with a note that says why.
"""

from __future__ import annotations

import graphlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from graphdnn.ir.node import Node
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.ir.tensor import Dims
from graphdnn.opspecs import reduction, registry

Kind = Literal["pointwise", "reduction", "rows", "matmul", "attention"]
MAX_NODES = 96
"""A free value with more nodes behind it is stored instead of calculated again."""
MAX_ANCHORS = 8
"""Reductions of one region."""
MAX_STORES = 12
"""Outputs of one pointwise region."""
ROW = 1 << 16
"""Most reduced elements of one result for what follows the reduction to walk the same row again in the same kernel: it should still be in cache."""
ROWS, SMALL = 256, 1 << 18
"""Rows that fill a device, and the elements of a problem that is too small to mind."""


@dataclass(frozen=True)
class Region:
    """One kernel's share of a graph. ``space``: dims of its loop nest (a reduction's: before reducing; a matmul's: of its result).

    ``anchors``: node indexes of the matmul or the reductions. ``epilogue_reductions``: reductions of a matmul region's values.
    A "rows" region goes through its rows several times: ``stages`` are its anchors in groups, a group needs the results of those before it; what
    it stores in the whole space comes last. ``reads`` / ``stores``: tensor ids read from and written to memory. ``nodes``: all nodes in it.
    """

    kind: Kind
    space: Dims
    anchors: tuple[int, ...]
    nodes: tuple[int, ...]
    reads: tuple[int, ...]
    stores: tuple[int, ...]
    epilogue_reductions: tuple[int, ...] = ()
    stages: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Partition:
    """Regions in execution order; ``materialized``: virtual tensors that live in the workspace; ``notes``: where it was cut and why."""

    regions: tuple[Region, ...]
    materialized: tuple[int, ...]
    notes: tuple[str, ...] = ()


@dataclass
class _Draft:
    kind: Kind
    space: Dims
    anchors: list[int] = field(default_factory=list)
    epilogue_reductions: list[int] = field(default_factory=list)
    stores: list[int] = field(default_factory=list)
    before: set[int] = field(default_factory=set)
    axes: tuple[int, ...] = ()
    level: dict[int, int] = field(default_factory=dict)
    """Reduction: stages that must have run before a tensor of the region is known."""


def partition(graph: OperationGraph, forced: frozenset[int] = frozenset(), sums: bool = False) -> Partition:
    """The maximal regions. ``forced``: tensors that must be stored although they could be fused. ``sums``: reductions of a matmul's rows or columns
    join its epilogue too, which not every engine takes; reductions of all its values always do."""
    return _Partitioner(graph, forced, sums=sums).run()


def unfused(graph: OperationGraph) -> Partition:
    """One kernel per op, every intermediate stored."""
    every = frozenset(t for n in graph.nodes for t in n.output_ids)
    return _Partitioner(graph, every, fuse=False).run()


def reduced_axes(graph: OperationGraph, node: Node) -> tuple[int, ...]:
    """Axes that a reduction node reduces."""
    return reduction.reduced_axes(dict(node.attrs), graph.tensors[node.input_ids[0]].dim, graph.tensors[node.output_ids[0]].dim)


class _Partitioner:
    def __init__(self, graph: OperationGraph, forced: frozenset[int], fuse: bool = True, sums: bool = False) -> None:
        self.graph = graph
        self.forced = forced
        self.fuse = fuse
        self.sums = sums
        self.drafts: list[_Draft] = []
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
        region = self.home[tensor]
        if tensor not in self.stored_by:
            self.stored_by[tensor] = region
            self.drafts[region].stores.append(tensor)
            if self.graph.tensors[tensor].virtual:
                self.notes.append(f"'{self.graph.tensors[tensor].name}' is stored: {why}")

    def _take(self, region: int, tensors: Iterable[int], why: str) -> None:
        """Let ``region`` read ``tensors`` (from memory or as free values)."""
        for t in tensors:
            if t in self.home and self.home[t] != region:
                self._materialize(t, why)
            self.drafts[region].before |= self._needs(t) - {region}

    def _new(self, draft: _Draft) -> int:
        self.drafts.append(draft)
        return len(self.drafts) - 1

    # -- one node at a time ---------------------------------------------------------------------------------------------------------------
    def run(self) -> Partition:
        for i, n in enumerate(self.graph.nodes):
            role = registry.spec(n.op).role
            if role == "matmul":
                self._matmul(i, n)
            elif role == "attention":
                self._attention(i, n)
            elif n.op == "REDUCTION":
                self._reduction(i, n)
            else:
                self._map(i, n)
        for t in self.graph.outputs:
            self._output(t)
        return self._finish()

    def _matmul(self, i: int, n: Node) -> None:
        out = n.output_ids[0]
        region = self._new(_Draft("matmul", self.graph.tensors[out].dim, [i]))
        self._take(region, n.input_ids, f"matmul '{n.name}' reads it in tiles")
        self._settle(out, region)

    def _attention(self, i: int, n: Node) -> None:
        """A region of its own: it reads stored tensors, and what it makes is stored."""
        for t in n.input_ids:
            if t in self.graph.producer and t not in self.home and t not in self.stored_by:
                self.notes.append(f"'{self.graph.tensors[t].name}' is stored: attention '{n.name}' reads it in tiles")
                self._store_alone(t)
        region = self._new(_Draft("attention", self.graph.tensors[n.output_ids[0]].dim, [i]))
        self._take(region, n.input_ids, f"attention '{n.name}' reads it in tiles")
        for out in n.output_ids:
            self.home[out] = region
            self._keep(out, region, f"attention '{n.name}' ends with it")

    def _reduction(self, i: int, n: Node) -> None:
        x, y = n.input_ids[0], n.output_ids[0]
        axes = reduced_axes(self.graph, n)
        space = self.graph.tensors[x].dim
        if self.fuse and x in self.home and x not in self.forced:
            draft = self.drafts[self.home[x]]
            joins = _of_all(space, axes) or (self.sums and _of_rows_or_columns(space, axes))
            if draft.kind == "matmul" and joins and space == draft.space and 0 not in space:
                draft.epilogue_reductions.append(i)
                draft.stores.append(y)
                self.stored_by[y] = self.home[x]
                self.waits[y] = frozenset((self.home[x],))
                return
        region = self._sibling(space, axes, x, self.graph.tensors[y].dim) if self.fuse else None
        if region is None:
            region = self._new(_Draft("reduction", space, axes=axes))
        draft = self.drafts[region]
        draft.anchors.append(i)
        self._take(region, (x,), f"reduction '{n.name}' runs over it in another loop nest")
        draft.level[y] = draft.level.get(x, 0) + 1
        self._settle(y, region)

    def _sibling(self, space: Dims, axes: tuple[int, ...], x: int, dim: Dims) -> int | None:
        """A reduction region of the same loop nest that can take one more reduction, of the value ``x``."""
        for r, d in enumerate(self.drafts):
            alike = d.kind == "reduction" and d.space == space and d.axes == axes and len(d.anchors) < MAX_ANCHORS
            if alike and self.home.get(x) == r:
                return r if dim == self._epilogue_space(r) else None
            if alike and x not in self.home and self._may_join(r, (x,)):
                return r
        return None

    def _settle(self, out: int, region: int) -> None:
        """``out`` is calculated in ``region``; store it now where that was asked for."""
        self.home[out] = region
        if out in self.forced:
            self._keep(out, region, "asked for")

    def _keep(self, out: int, region: int, why: str) -> None:
        """Store ``out`` and let nothing join its region for its sake."""
        self._materialize(out, why)
        del self.home[out]
        self.waits[out] = frozenset((region,))

    def _map(self, i: int, n: Node) -> None:
        out = n.output_ids[0]
        dim = self.graph.tensors[out].dim
        inside = sorted({self.home[t] for t in n.input_ids if t in self.home}, reverse=True)
        if self.fuse and n.op == "POINTWISE":
            for region in inside:
                others = [t for t in n.input_ids if self.home.get(t) != region]
                if (self._epilogue_space(region) == dim or self._walks_again(region, dim, n)) and self._may_join(region, others):
                    self._take(region, others, f"'{n.name}' needs it in the epilogue of another kernel")
                    level = self.drafts[region].level
                    level[out] = max((level.get(t, 0) for t in n.input_ids if self.home.get(t) == region), default=0)
                    self._settle(out, region)
                    return
        for t in n.input_ids:
            if t in self.home:
                self._materialize(t, self._why(n, t))
        self.waits[out] = frozenset().union(*(self._needs(t) for t in n.input_ids))
        behind = [self.cone.get(t, frozenset()) for t in n.input_ids if t not in self.home and t not in self.stored_by]
        self.cone[out] = frozenset((i,)).union(*behind)
        if out in self.forced or len(self.cone[out]) > MAX_NODES:
            self._store_alone(out)

    def _walks_again(self, region: int, dim: Dims, n: Node) -> bool:
        """Whether a node over the whole space can run in one more pass over the rows of a reduction region."""
        draft = self.drafts[region]
        if draft.kind != "reduction" or dim != draft.space or not _row_by_row(draft.space, draft.axes):
            return False
        kept = tuple(1 if a in draft.axes else d for a, d in enumerate(draft.space))
        return all(self.graph.tensors[t].dim in (kept, draft.space) for t in n.input_ids if self.home.get(t) == region)

    def _why(self, n: Node, tensor: int) -> str:
        space = self._epilogue_space(self.home[tensor])
        if n.op != "POINTWISE":
            return f"{n.op.lower()} '{n.name}' reads it in another order than its kernel writes it"
        dim = self.graph.tensors[n.output_ids[0]].dim
        return (
            f"'{n.name}' has dims {list(dim)}, its kernel ends with {list(space)}"
            if dim != space
            else f"'{n.name}' would make two kernels wait for each other"
        )

    def _epilogue_space(self, region: int) -> Dims:
        draft = self.drafts[region]
        if draft.kind == "pointwise":
            return draft.space
        return self.graph.tensors[self.graph.nodes[draft.anchors[0]].output_ids[0]].dim

    def _store_alone(self, out: int) -> None:
        region = self._new(_Draft("pointwise", self.graph.tensors[out].dim, stores=[out], before=set(self.waits[out])))
        self.stored_by[out] = region
        self.waits[out] = frozenset((region,))
        self.cone[out] = frozenset()

    # -- outputs --------------------------------------------------------------------------------------------------------------------------
    def _output(self, t: int) -> None:
        if t in self.stored_by:
            return
        if t in self.home:
            self._materialize(t, "output")
            return
        region = self._host(t)
        if region is None:
            region = self._new(_Draft("pointwise", self.graph.tensors[t].dim))
        draft = self.drafts[region]
        draft.stores.append(t)
        draft.before |= self.waits[t]
        self.stored_by[t] = region

    def _host(self, t: int) -> int | None:
        """A region whose loop nest can store the free output ``t`` as well."""
        dim = self.graph.tensors[t].dim
        for r, d in enumerate(self.drafts):
            same = d.space == dim
            fits = same or (d.kind == "pointwise" and 0 not in d.space and _broadcasts(dim, d.space))
            if d.kind in ("matmul", "attention") or not fits or len(d.stores) >= MAX_STORES or any(s in self.forced for s in (*d.stores, t)):
                continue
            shares = bool(set(self._memory_behind((t,))) & set(self._memory_behind(self._wanted(d))))
            if (shares or (same and d.kind == "pointwise")) and self._may_join(r, (t,)):
                return r
        return None

    # -- result ---------------------------------------------------------------------------------------------------------------------------
    def _wanted(self, d: _Draft) -> list[int]:
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

    def _stages(self, d: _Draft) -> tuple[tuple[int, ...], ...]:
        """Anchors of a region by stage, if it walks its rows more than once; else nothing."""
        if d.kind != "reduction":
            return ()
        stage = {a: d.level[self.graph.nodes[a].output_ids[0]] - 1 for a in d.anchors}
        again = any(d.level.get(t, 0) > 0 and self.graph.tensors[t].dim == d.space and not self._is_result(d, t) for t in d.stores)
        if not again and not any(stage.values()):
            return ()
        return tuple(tuple(a for a in d.anchors if stage[a] == s) for s in range(max(stage.values()) + 1))

    def _is_result(self, d: _Draft, t: int) -> bool:
        """Whether ``t`` has the dims of the results (which can be those of the space, where nothing is reduced)."""
        return self.graph.tensors[t].dim == self.graph.tensors[self.graph.nodes[d.anchors[0]].output_ids[0]].dim

    def _finish(self) -> Partition:
        order = list(graphlib.TopologicalSorter({r: sorted(d.before) for r, d in enumerate(self.drafts)}).static_order())
        regions = []
        for r in order:
            d = self.drafts[r]
            reads, nodes = self._walk(self._wanted(d), r)
            stages = self._stages(d)
            kind: Kind = "rows" if stages else d.kind
            parts = tuple(d.anchors), tuple(sorted(nodes)), tuple(reads), tuple(d.stores), tuple(d.epilogue_reductions), stages
            regions.append(Region(kind, d.space, *parts))
        materialized = tuple(t for t in self.stored_by if self.graph.tensors[t].virtual)
        return Partition(tuple(regions), materialized, tuple(dict.fromkeys(self.notes)))


def _of_all(space: Dims, axes: tuple[int, ...]) -> bool:
    return all(a in axes or d == 1 for a, d in enumerate(space))


def _of_rows_or_columns(space: Dims, axes: tuple[int, ...]) -> bool:
    """One of the last two dims is reduced, and of the batch all or nothing; a dim of 1 counts as either."""
    m, n = len(space) - 2, len(space) - 1
    batch = {a for a in range(m) if space[a] > 1}
    over, kept = ({a for a in (m, n) if space[a] == 1 or (a in axes) is reduced} for reduced in (True, False))
    return any(a in over and b in kept for a, b in ((m, n), (n, m))) and (batch <= set(axes) or not batch & set(axes))


def _row_by_row(space: Dims, axes: tuple[int, ...]) -> bool:
    """Whether rows are short enough to be walked twice and enough of them run side by side."""
    total, row = math.prod(space), math.prod(space[a] for a in axes)
    return 0 < row <= ROW and (total // row >= ROWS or total <= SMALL)


def of_all(graph: OperationGraph, node: Node) -> bool:
    """Whether a reduction node reduces all values of its input to one."""
    return _of_all(graph.tensors[node.input_ids[0]].dim, reduced_axes(graph, node))


def _broadcasts(dim: Dims, space: Dims) -> bool:
    """Whether ``dim`` broadcasts (right-aligned) to ``space`` without being larger anywhere."""
    return len(dim) <= len(space) and all(d in (1, s) for d, s in zip(reversed(dim), reversed(space), strict=False))
