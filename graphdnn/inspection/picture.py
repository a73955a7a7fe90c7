"""A graph as a picture, before any format: boxes, arrows, colours of fusion groups, and a layered layout.

The layout needs no library: ops stand on even layers (longest path), every arrow gets stops on the layers between, the last of which holds its text;
a few sweeps put everything near what it is joined to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from graphdnn.ir.opgraph import OperationGraph
from graphdnn.passes.regions import Partition

PALETTE = ("#cfe2f3", "#d9ead3", "#fff2cc", "#f4cccc", "#d9d2e9", "#fce5cd", "#d0e0e3", "#ead1dc", "#e2efda", "#ddd9c4")
CHAR, LINE, PAD, GAP_X, GAP_Y, MARGIN = 7.2, 16.0, 12.0, 24.0, 18.0, 24.0
_SWEEPS = 6


@dataclass
class Box:
    """An op (``group``: index of its region, -1 if none), a tensor from or to the user, or a stop of an arrow. ``lines``: its text."""

    key: str
    lines: tuple[str, ...]
    tensor: bool = False
    stop: bool = False
    group: int = -1
    layer: int = 0
    x: float = 0.0
    y: float = 0.0

    @property
    def width(self) -> float:
        """Room for the longest line."""
        if self.stop:
            return 0.85 * CHAR * max(map(len, self.lines), default=1)
        return CHAR * max(map(len, self.lines)) + 2 * PAD

    @property
    def height(self) -> float:
        """Room for all lines."""
        return LINE if self.stop else LINE * len(self.lines) + PAD


@dataclass
class Arrow:
    """A tensor on its way. ``dashed``: virtual, it need not exist in memory; ``stored``: virtual, but kept in the workspace between kernels."""

    start: str
    end: str
    label: str
    dashed: bool
    stored: bool = False
    stops: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What stands on the arrow."""
        return self.label + (" (workspace)" if self.stored else "")


@dataclass
class Picture:
    """``groups``: text for each region; ``boxes`` by key."""

    title: str
    boxes: dict[str, Box]
    arrows: list[Arrow]
    groups: list[str]
    width: float = 0.0
    height: float = 0.0


def colour(group: int) -> str:
    """Fill colour of a fusion group."""
    return PALETTE[group % len(PALETTE)] if group >= 0 else "#ffffff"


def picture(graph: OperationGraph, partition: Partition | None = None, engines: Sequence[str] = ()) -> Picture:
    """The picture of ``graph``; ``partition`` colours it, ``engines`` names what runs each region."""
    regions = partition.regions if partition else ()
    home: dict[int, list[int]] = {}
    for r, region in enumerate(regions):
        for n in region.nodes:
            home.setdefault(n, []).append(r)
    boxes: dict[str, Box] = {}
    for i, node in enumerate(graph.nodes):
        mode = node.attr("mode")
        kind = node.op.lower() + (f" {mode}" if mode else "")
        where = "" if len(home.get(i, ())) < 2 else "in " + ", ".join(f"r{r}" for r in home[i])
        boxes[f"n{i}"] = Box(f"n{i}", tuple(t for t in (node.name, kind, where) if t), group=home.get(i, [-1])[0])
    arrows: list[Arrow] = []
    stored = set(partition.materialized) if partition else set()
    for t, tensor in enumerate(graph.tensors):
        start = f"n{graph.producer[t]}" if t in graph.producer else f"t{t}"
        scalar = " by value" if tensor.by_value else ""
        label = f"{'x'.join(map(str, tensor.dim)) or 'scalar'} {tensor.dtype.name}{scalar}"
        if start[0] == "t" or not tensor.virtual:
            boxes[f"t{t}"] = Box(f"t{t}", (tensor.name or f"uid {tensor.uid}",), tensor=True)
        if start[0] == "n" and not tensor.virtual:
            arrows.append(Arrow(start, f"t{t}", label, False))
        arrows += [Arrow(start, f"n{n}", label, tensor.virtual, t in stored) for n in graph.consumers.get(t, ())]
    used = {a.start for a in arrows} | {a.end for a in arrows}
    boxes = {k: b for k, b in boxes.items() if k in used or not b.tensor}
    groups = [f"r{r}: {engines[r] if r < len(engines) else region.kind}" for r, region in enumerate(regions)]
    return Picture(graph.name or "graph", boxes, arrows, groups)


def layout(p: Picture) -> Picture:
    """Set the coordinates of every box (its centre) and the size of the whole."""
    _layers(p)
    rows = _rows(p)
    around = _neighbours(p)
    for sweep in range(_SWEEPS):
        for row in rows if sweep % 2 == 0 else rows[::-1]:
            row.sort(key=lambda k: _mean(p, around[k], p.boxes[k].x))
            _spread(p, row)
    for _ in range(_SWEEPS):
        for row in rows:
            _settle(p, row, {k: _mean(p, around[k], p.boxes[k].x) for k in row})
    left = min((b.x - b.width / 2 for b in p.boxes.values()), default=0.0)
    top = MARGIN + LINE * (2 + len(p.groups))
    for row in rows:
        height = max(p.boxes[k].height for k in row)
        for k in row:
            p.boxes[k].x += MARGIN - left
            p.boxes[k].y = top + height / 2
        top += height + GAP_Y
    text = max(map(len, (p.title, *p.groups)), default=0)
    p.width = max([CHAR * text + 60, *(b.x + b.width / 2 for b in p.boxes.values())]) + MARGIN
    p.height = top - GAP_Y + MARGIN
    return p


def _layers(p: Picture) -> None:
    """Longest path from above; inputs then move down next to what reads them; long arrows get stops."""
    after: dict[str, list[str]] = {k: [] for k in p.boxes}
    before: dict[str, list[str]] = {k: [] for k in p.boxes}
    for a in p.arrows:
        after[a.start].append(a.end)
        before[a.end].append(a.start)
    order: list[str] = []
    missing = {k: len(set(v)) for k, v in before.items()}
    todo = [k for k, n in missing.items() if n == 0]
    while todo:
        k = todo.pop()
        order.append(k)
        for e in dict.fromkeys(after[k]):
            missing[e] -= 1
            p.boxes[e].layer = max(p.boxes[e].layer, p.boxes[k].layer + 2)
            if missing[e] == 0:
                todo.append(e)
    for k in reversed(order):
        if not before[k] and after[k]:
            p.boxes[k].layer = min(p.boxes[e].layer for e in after[k]) - 2
    for i, a in enumerate(p.arrows):
        for layer in range(p.boxes[a.start].layer + 1, p.boxes[a.end].layer):
            key = f"s{i}_{layer}"
            p.boxes[key] = Box(key, (a.text,) if layer == p.boxes[a.end].layer - 1 else (), stop=True, layer=layer)
            a.stops.append(key)


def _rows(p: Picture) -> list[list[str]]:
    rows: list[list[str]] = [[] for _ in range(1 + max((b.layer for b in p.boxes.values()), default=-1))]
    for k, b in p.boxes.items():
        rows[b.layer].append(k)
    for row in rows:
        _spread(p, row)
    return [r for r in rows if r]


def _neighbours(p: Picture) -> dict[str, list[str]]:
    around: dict[str, list[str]] = {k: [] for k in p.boxes}
    for a in p.arrows:
        path = [a.start, *a.stops, a.end]
        for one, two in zip(path, path[1:], strict=False):
            around[one].append(two)
            around[two].append(one)
    return around


def _mean(p: Picture, keys: Sequence[str], default: float) -> float:
    return sum(p.boxes[k].x for k in keys) / len(keys) if keys else default


def _spread(p: Picture, row: Sequence[str]) -> None:
    """Side by side, centred on 0."""
    total = sum(p.boxes[k].width for k in row) + GAP_X * (len(row) - 1)
    x = -total / 2
    for k in row:
        p.boxes[k].x = x + p.boxes[k].width / 2
        x += p.boxes[k].width + GAP_X


def _settle(p: Picture, row: Sequence[str], wish: dict[str, float]) -> None:
    """Move boxes of a row towards their wishes, in order and without touching: once from the left, once from the right, then the mean of both."""
    left, right = {}, {}
    edge = float("-inf")
    for k in row:
        half = p.boxes[k].width / 2
        left[k] = max(wish[k], edge + half)
        edge = left[k] + half + GAP_X
    edge = float("inf")
    for k in reversed(row):
        half = p.boxes[k].width / 2
        right[k] = min(wish[k], edge - half)
        edge = right[k] - half - GAP_X
    for k in row:
        p.boxes[k].x = (left[k] + right[k]) / 2
