"""Regions: which nodes become one kernel, in which order, and which virtual tensors must be stored between them.

A region has an anchor (a matmul, an attention node, or reductions over one space and the same axes) or none. Values that only need memory are *free*:
every region that wants one calculates it again from memory (numbers stay equal, since each value is rounded to its tensor's data type), so pointwise
and movement ops in front of an anchor are always fused into it. What follows an anchor joins its epilogue where it can be calculated in the same
loops (:mod:`graphdnn.passes.places`: reshapes and transposes are free there) and no region would come to wait for itself; where it cannot, the
anchor's value is stored: a cut, with a note that says why.
"""

from __future__ import annotations

import graphlib
from dataclasses import dataclass

from graphdnn.ir.index import Index, equal
from graphdnn.ir.node import Node
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.ir.tensor import Dims
from graphdnn.opspecs import registry
from graphdnn.passes import places
from graphdnn.passes.drafts import VIEWS, Draft, Drafts, Kind
from graphdnn.passes.places import broadcasts, of_all, of_lines, reduced_axes, row_by_row

MAX_NODES = 96
"""A free value with more nodes behind it is stored instead of calculated again."""
MAX_ANCHORS = 8
"""Reductions of one region."""
MAX_STORES = 12
"""Outputs of one pointwise region."""
MAX_READS = 2
"""Large tensors that a value is calculated again from at most; storing it moves as many bytes."""
@dataclass(frozen=True)
class Region:
    """One kernel's share of a graph. ``space``: dims of its loop nest (a reduction's: before reducing; a matmul's: of its result).

    ``anchors``: node indexes of the matmul or the reductions. ``epilogue_reductions``: reductions of a matmul region's values.
    A "rows" region goes through its rows several times: ``stages`` are its anchors in groups, a group needs the results of those before it; what
    it stores in the whole space comes last. ``reads`` / ``stores``: tensor ids read from and written to memory. ``nodes``: all nodes in it.
    ``views``: tensors that are read in the memory of another, and that one.
    """

    kind: Kind
    space: Dims
    anchors: tuple[int, ...]
    nodes: tuple[int, ...]
    reads: tuple[int, ...]
    stores: tuple[int, ...]
    epilogue_reductions: tuple[int, ...] = ()
    stages: tuple[tuple[int, ...], ...] = ()
    views: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Partition:
    """Regions in execution order; ``materialized``: virtual tensors that live in the workspace; ``notes``: where it was cut and why."""

    regions: tuple[Region, ...]
    materialized: tuple[int, ...]
    notes: tuple[str, ...] = ()


def partition(graph: OperationGraph, forced: frozenset[int] = frozenset(), sums: bool = False, rows: int = places.ROWS) -> Partition:
    """The maximal regions. ``forced``: tensors that must be stored although they could be fused. ``sums``: reductions of a matmul's rows or columns
    join its epilogue too, which not every engine takes; reductions of all its values always do. ``rows``: so many rows fill the device, and are
    walked more than once rather than in one kernel after the other."""
    return _Partitioner(graph, forced, sums=sums, rows=rows).run()


def unfused(graph: OperationGraph) -> Partition:
    """One kernel per op, every intermediate stored."""
    every = frozenset(t for n in graph.nodes for t in n.output_ids)
    return _Partitioner(graph, every, fuse=False).run()


class _Partitioner(Drafts):
    def __init__(self, graph: OperationGraph, forced: frozenset[int], fuse: bool = True, sums: bool = False, rows: int = places.ROWS) -> None:
        super().__init__(graph, forced)
        self.fuse = fuse
        self.sums = sums
        self.rows = rows

    # -- one node at a time ---------------------------------------------------------------------------------------------------------------
    def run(self) -> Partition:
        for i, n in enumerate(self.graph.nodes):
            role = registry.spec(n.op).role
            if role == "matmul":
                self._product(i, n, "matmul")
            elif role == "grouped":
                self._store_addresses(n)
                self._product(i, n, "grouped")
            elif role == "attention":
                self._attention(i, n)
            elif n.op == "REDUCTION":
                self._reduction(i, n)
            else:
                self._map(i, n)
        for t in self.graph.outputs:
            self._output(t)
        return self._finish()

    def _product(self, i: int, n: Node, kind: Kind) -> None:
        out = n.output_ids[0]
        region = self._new(Draft(kind, self.graph.tensors[out].dim, [i], place={out: places.of_anchor(self.graph, n)}))
        self._take(region, n.input_ids, f"matmul '{n.name}' reads it in tiles")
        self._settle(out, region)

    def _store_addresses(self, n: Node) -> None:
        for port in registry.spec(n.op).integers:
            t = dict(n.inputs).get(port)
            if t is not None and t in self.graph.producer and t not in self.home and t not in self.stored_by:
                self.notes.append(f"'{self.graph.tensors[t].name}' is stored: it tells '{n.name}' where to read")
                self._store_late(t)

    def _attention(self, i: int, n: Node) -> None:
        """A region of its own: it reads stored tensors, and what it makes is stored."""
        for t in n.input_ids:
            if t in self.graph.producer and t not in self.home and t not in self.stored_by:
                self.notes.append(f"'{self.graph.tensors[t].name}' is stored: attention '{n.name}' reads it in tiles")
                self._store_late(t)
            elif t in self.home:
                self._store(t, f"attention '{n.name}' reads it in tiles")
        region = self._new(Draft("attention", self.graph.tensors[n.output_ids[0]].dim, [i]))
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
            joins = of_all(space, axes) or (self.sums and of_lines(space, axes, registry.spec(self.graph.nodes[draft.anchors[0]].op).columns))
            if draft.kind == "matmul" and joins and equal(draft.place[x], places.whole(draft.space)) and 0 not in space:
                draft.epilogue_reductions.append(i)
                draft.stores.append(y)
                self.stored_by[y] = self.home[x]
                self.waits[y] = frozenset((self.home[x],))
                return
        why = f"reduction '{n.name}' runs over it in another loop nest"
        region, again = self._sibling(space, axes, x, why) if self.fuse else (None, False)
        if region is None:
            region = self._new(Draft("reduction", space, axes=axes))
        draft = self.drafts[region]
        draft.anchors.append(i)
        if again:
            draft.before |= self._needs(x)
        else:
            self._take(region, (x,), why)
        draft.level[y] = draft.level.get(x, 0) + 1
        draft.place[y] = places.of_anchor(self.graph, n)
        self._settle(y, region)

    def _sibling(self, space: Dims, axes: tuple[int, ...], x: int, why: str) -> tuple[int | None, bool]:
        """A reduction region of the same loop nest that can take one more reduction, of the value ``x``, and whether that is calculated again."""
        alike = [
            r for r, d in enumerate(self.drafts) if d.kind == "reduction" and (d.space, d.axes) == (space, axes) and len(d.anchors) < MAX_ANCHORS
        ]
        home = self.home.get(x)
        if home in alike and equal(self.drafts[home].place[x], places.whole(space)):
            return home, False
        again = home is not None and self._from_rows(home, x, why)
        return next((r for r in alike if self._may_join(r, (x,))), None), again

    def _from_rows(self, home: int, x: int, why: str) -> bool:
        """Whether ``x`` is calculated again outside its home: from results of rows, which are then stored, and few large tensors."""
        if not self.drafts[home].spreads(x) or not self._is_spare(x):
            return False
        stored, free, inside, todo = list[int](), list[int](), set[int](), [x]
        while todo:
            t = todo.pop()
            if self.home.get(t) != home:
                free.append(t)
            elif not self.drafts[home].spreads(t) or not self._is_spare(t):
                stored.append(t)
            elif t not in inside:
                inside.add(t)
                todo.extend(self._made_by(t).input_ids)
        large = [t for t in {*self._memory_behind(free), *stored} if 2 * self.graph.tensors[t].size > self.graph.tensors[x].size]
        if len(large) > MAX_READS or len(inside) > MAX_NODES:
            return False
        for t in stored:
            self._materialize(t, why)
        return True

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
        inside = sorted({self.home[t] for t in n.input_ids if t in self.home}, reverse=True)
        for region in inside if self.fuse else ():
            others = [t for t in n.input_ids if self.home.get(t) != region]
            place = self._place(region, n)
            if place is not None and self._may_join(region, others):
                self._take(region, others, f"'{n.name}' needs it in the epilogue of another kernel")
                draft = self.drafts[region]
                draft.place[out] = place
                draft.level[out] = max((draft.level.get(t, 0) for t in n.input_ids if self.home.get(t) == region), default=0)
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

    def _place(self, region: int, n: Node) -> Index | None:
        """Where the result of ``n`` stands in the loop nest of a region, if it can be calculated there. What has an element for each of a row takes
        one more pass over the rows."""
        draft = self.drafts[region]
        place = places.of_node(self.graph, n, draft.space, {t: draft.place[t] for t in n.input_ids if self.home.get(t) == region})
        empty = 0 in self.graph.tensors[n.output_ids[0]].dim  # rows without elements have results all the same
        again = place is not None and draft.kind == "reduction" and (empty or places.spreads(place, draft.space, draft.axes))
        return None if again and not row_by_row(draft.space, draft.axes, self.rows) else place

    def _why(self, n: Node, tensor: int) -> str:
        if n.op not in ("POINTWISE", *VIEWS):
            return f"{n.op.lower()} '{n.name}' reads it in another order than its kernel writes it"
        if self._place(self.home[tensor], n) is not None:
            return f"'{n.name}' would make two kernels wait for each other"
        dim, space = self.graph.tensors[n.output_ids[0]].dim, self.graph.tensors[tensor].dim
        return f"'{n.name}' has dims {list(dim)}, its kernel ends with {list(space)}"

    # -- outputs --------------------------------------------------------------------------------------------------------------------------
    def _output(self, t: int) -> None:
        if t in self.stored_by:
            return
        if t in self.home:
            self._materialize(t, "output")
            return
        region = self._host(t)
        if region is None:
            region = self._new(Draft("pointwise", self.graph.tensors[t].dim))
        draft = self.drafts[region]
        draft.stores.append(t)
        draft.before |= self.waits[t]
        self.stored_by[t] = region

    def _host(self, t: int) -> int | None:
        """A region whose loop nest can store the free output ``t`` as well."""
        dim = self.graph.tensors[t].dim
        for r, d in enumerate(self.drafts):
            same = d.space == dim
            fits = same or (d.kind == "pointwise" and 0 not in d.space and broadcasts(dim, d.space)) or places.seen_as(dim, d.space) is not None
            fits = fits or (d.kind == "reduction" and dim == self._result_dim(d))
            if d.kind not in ("pointwise", "reduction") or not fits or len(d.stores) >= MAX_STORES or any(s in self.forced for s in (*d.stores, t)):
                continue
            shares = bool(set(self._memory_behind((t,))) & set(self._memory_behind(self._wanted(d))))
            if (shares or (same and d.kind == "pointwise")) and self._may_join(r, (t,)):
                return r
        return None

    def _result_dim(self, d: Draft) -> Dims:
        return self.graph.tensors[self.graph.nodes[d.anchors[0]].output_ids[0]].dim

    # -- result ---------------------------------------------------------------------------------------------------------------------------
    def _stages(self, d: Draft) -> tuple[tuple[int, ...], ...]:
        """Anchors of a region by stage, if it walks its rows more than once; else nothing."""
        if d.kind != "reduction":
            return ()
        stage = {a: d.level[self.graph.nodes[a].output_ids[0]] - 1 for a in d.anchors}
        again = any(d.level.get(t, 0) > 0 and d.spreads(t) for t in d.stores)
        if not again and not any(stage.values()):
            return ()
        return tuple(tuple(a for a in d.anchors if stage[a] == s) for s in range(max(stage.values()) + 1))

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
