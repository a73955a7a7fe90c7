"""Engine ``conv_direct``: convolution (and data gradient) without a matrix: on a CPU sums in vector registers, on a GPU a thread for each output.

An item makes a strip of outputs along the last spatial dim, all their channels. The lines of the image under the strip are copied once, prologue and
padding included, to a buffer on the thread's stack; tiles of 6 outputs x 64 bytes of channels walk taps and channels in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from graphdnn.codegen.body import Signature, lanes
from graphdnn.codegen.contraction import Contraction, contractions
from graphdnn.codegen.dialect import IndexWriter, decompose
from graphdnn.codegen.recipes import joined
from graphdnn.codegen.spec import Buffer, KernelSpec, Launch, Memset, Recipe, Step
from graphdnn.device import DeviceProps
from graphdnn.engines import conv_lanes, conv_thread
from graphdnn.engines.base import Engine, Knobs, ceil_div, chain, entry_name, fits, header, placeholder, roofline
from graphdnn.engines.conv_lanes import LanesCpu
from graphdnn.engines.conv_thread import ThreadCuda
from graphdnn.engines.matmul_parts import MatmulParts, take_apart
from graphdnn.engines.matmul_sums import Partials, end_of, finish, partials
from graphdnn.engines.strips import runs_along_rows, strips
from graphdnn.ir.index import Linear, Var, rewrite, slope
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.passes.regions import Region
from graphdnn.status import OK, Status, reject

ROWS = 6
"""Outputs of a register tile."""
LINE_BYTES, TILE_BYTES = 1 << 18, 1 << 17
"""Largest buffers on a thread's stack."""
CACHED = 1 << 22
"""Bytes of weights that stay in a cache from one strip to the next."""
FIRST_LEVEL = 1 << 15
"""Bytes of the first-level cache: lanes read their lines twice as fast from it (depthwise 3 x 3, 3.0 ms to 4.6, Zen 3, 2026-11-29)."""
LINE_RATE = 5e9
"""Bytes of image lines that a core copies in a second (Zen 3, 2026-11-29)."""
LANES = 0.4
"""Share of the peak that lanes reach: two loads for each product, or a load and a broadcast."""
SHORT = 16
"""Fewer channels than these lie side by side in the line buffer whatever the image's layout: a tile's loop should be long."""


@dataclass(frozen=True)
class DirectCpu(Knobs):
    """``strip``: outputs along the last spatial dim that one item makes at most; a multiple of 6, or all of them."""

    strip: int = 96


@dataclass(frozen=True)
class _Sizes:
    """Of one group: ``outputs`` along the last spatial dim, ``lines`` of the image under them (taps of the other dims), ``taps`` of the last one,
    ``channels`` summed, ``columns`` made; ``width``: columns of a tile."""

    outputs: int
    lines: int
    taps: int
    channels: int
    columns: int
    width: int
    item: int

    @property
    def blocks(self) -> int:
        """Tiles that cover the columns."""
        return ceil_div(self.columns, self.width)

    @property
    def depth(self) -> int:
        """Products in a sum."""
        return self.lines * self.taps * self.channels


class ConvDirect(Engine):
    """See the module."""

    id: ClassVar[int] = 6
    name: ClassVar[str] = "conv_direct"

    def _accepts(self, graph: OperationGraph, region: Region) -> Status:
        node = graph.nodes[region.anchors[0]]
        if any(form.window is None for form in contractions(node, graph)):
            return reject(f"conv_direct: the anchor '{node.label}' of the region does not slide over an image ({node.op}, or too many strides)")
        status = fits(lambda: take_apart(graph, region, placeholder(region), True, _forms(graph, region)[0]))
        return _accepts_sums(graph, region) if status and region.epilogue_reductions else status

    def _candidates(self, graph: OperationGraph, region: Region, device: DeviceProps) -> tuple[Knobs, ...]:
        if device.kind != "cpu":
            return (ThreadCuda(),)
        return (DirectCpu(), DirectCpu(24), LanesCpu(), LanesCpu(4, 16), LanesCpu(1, 8))

    def _check(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> Status:
        if isinstance(knobs, ThreadCuda) != (device.kind != "cpu"):
            return reject(f"conv_direct: {knobs!r} is made for another kind of device than {device.name}")
        if region.epilogue_reductions and not isinstance(knobs, DirectCpu):
            name = graph.nodes[region.epilogue_reductions[0]].name
            return reject(f"conv_direct: {knobs!r} leaves no partial results, for the reduction '{name}'")
        if isinstance(knobs, ThreadCuda):
            filters = _forms(graph, region)[0].n.size
            few = f"{filters} results of a group read the same windows; {knobs!r} is for at most {conv_thread.FILTERS}"
            return OK if filters <= conv_thread.FILTERS else reject(f"conv_direct: {few}")
        if isinstance(knobs, LanesCpu):
            return self._check_lanes(graph, region, knobs)
        assert isinstance(knobs, DirectCpu), f"knobs of another engine: {knobs!r}"
        for form in _forms(graph, region):
            sizes = _sizes(graph, region, form)
            strip = min(knobs.strip, sizes.outputs)
            line, tile = _line(form, sizes, strip) * sizes.item, strip * sizes.blocks * sizes.width * sizes.item
            if line > LINE_BYTES or tile > TILE_BYTES:
                return reject(f"conv_direct: {knobs!r} needs {line} and {tile} bytes of stack; at most {LINE_BYTES} and {TILE_BYTES}")
        return OK

    def _check_lanes(self, graph: OperationGraph, region: Region, knobs: LanesCpu) -> Status:
        for form in _forms(graph, region):
            products = math.prod(v.size for v in form.k)
            if products > conv_lanes.PRODUCTS:
                return reject(f"conv_direct: {knobs!r} writes out the {products} products of a sum; at most {conv_lanes.PRODUCTS}")
            size = _lanes(graph, region, form, knobs).elements * _sizes(graph, region, form).item
            if size > conv_lanes.BUFFER_BYTES:
                return reject(f"conv_direct: {knobs!r} needs {size} bytes of stack; at most {conv_lanes.BUFFER_BYTES}")
        return OK

    def _cost(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> float:
        """Work of the padded tiles; every strip reads all weights again and copies its lines."""
        forms = _forms(graph, region)
        reached = LANES if isinstance(knobs, LanesCpu) else conv_thread.REACHED if isinstance(knobs, ThreadCuda) else 0.9
        least = roofline(graph, region, device, reached, graph.nodes[region.anchors[0]].compute.name)
        total = sum(math.prod(f.sizes) for f in forms) or 1
        return sum(self._pass(graph, region, device, knobs, f, least * math.prod(f.sizes) / total) for f in forms)

    def _pass(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs, form: Contraction, least: float) -> float:
        """Seconds of one of the contractions, which would take ``least`` without waste."""
        sizes = _sizes(graph, region, form)
        if isinstance(knobs, ThreadCuda):
            return conv_thread.seconds(form, least, knobs)
        if isinstance(knobs, LanesCpu):
            found = _lanes(graph, region, form, knobs)
            items, cores = conv_lanes.items(form, found), max(device.cores, 1)
            busy = items / (ceil_div(items, cores) * cores) if items else 1.0
            nbytes = found.elements * sizes.item
            if found.across and found.groups * sizes.item < 64 < form.batch[0].size * sizes.item:
                least *= 3  # loops of one vector (depthwise 3 x 3 8.2 ms to 3.0)
            return least * (1 + 1 / busy) / 2 + items * nbytes * (1 if nbytes <= FIRST_LEVEL else 2) / (LINE_RATE * cores)
        assert isinstance(knobs, DirectCpu), f"knobs of another engine: {knobs!r}"
        strip = min(knobs.strip, sizes.outputs)
        items = _items(form, sizes, strip)
        padded = sizes.blocks * sizes.width / max(sizes.columns, 1) * ceil_div(strip, ROWS) * ROWS / max(strip, 1)
        weights, lines = sizes.depth * sizes.blocks * sizes.width * sizes.item, _line(form, sizes, strip) * sizes.item
        cores = max(device.cores, 1)
        moved = items * (weights / (80e9 if weights <= CACHED else 20e9) + lines / LINE_RATE) / cores
        return least * padded + moved

    def _lower(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs, memory: Mapping[int, Buffer]) -> Recipe:
        words, title, recipes = chain(graph, region), header(graph, region, knobs), []
        for form in _forms(graph, region):
            parts, sizes = take_apart(graph, region, memory, device.kind == "cpu", form), _sizes(graph, region, form)
            if parts.reduced and isinstance(knobs, LanesCpu):
                recipes.append(conv_lanes.lower(parts, form, knobs, words, title))
            elif parts.reduced and isinstance(knobs, ThreadCuda):
                recipes.append(conv_thread.lower(parts, knobs, words, title))
            elif parts.reduced:
                assert isinstance(knobs, DirectCpu), f"knobs of another engine: {knobs!r}"
                recipes.append(_Lowering(parts, form, sizes, min(knobs.strip, sizes.outputs), words, title).recipe())
        return joined(recipes)


def _accepts_sums(graph: OperationGraph, region: Region) -> Status:
    forms = _forms(graph, region)
    parts = take_apart(graph, region, placeholder(region), True, forms[0])
    for s, place in zip(parts.sums, parts.places, strict=True):
        if len(forms) > 1 or place is None or place.kind == "row":
            return reject(f"conv_direct: reduction '{s.node.label}' is not of all results or of channels, or those are made in {len(forms)} passes")
    return OK


def _forms(graph: OperationGraph, region: Region) -> tuple[Contraction, ...]:
    return contractions(graph.nodes[region.anchors[0]], graph)


def _lanes(graph: OperationGraph, region: Region, form: Contraction, knobs: LanesCpu) -> conv_lanes.Lanes:
    parts = take_apart(graph, region, placeholder(region), True, form)
    return conv_lanes.lanes_of(form, knobs, conv_lanes.lies_across(parts.loops.a.tape, form, conv_lanes.group_of(parts)))


def _sizes(graph: OperationGraph, region: Region, form: Contraction) -> _Sizes:
    node = graph.nodes[region.anchors[0]]
    item = 8 if node.compute.name in ("DOUBLE", "INT64") else 4
    lines = math.prod(v.size for v in form.k[1:-1])
    return _Sizes(form.m[-1].size, lines, form.k[-1].size, form.k[0].size, form.n.size, 64 // item, item)


def _reach(form: Contraction) -> int:
    """Elements of an image line under one output."""
    assert form.window is not None, "accepted"
    return (form.k[-1].size - 1) * form.window.dilation + 1


def _line(form: Contraction, sizes: _Sizes, strip: int) -> int:
    """Elements of the line buffer."""
    assert form.window is not None, "accepted"
    return sizes.lines * sizes.channels * (max(strip - 1, 0) * form.window.step + _reach(form))


def _items(form: Contraction, sizes: _Sizes, strip: int) -> int:
    return math.prod(v.size for v in (*form.batch, *form.m[:-1])) * ceil_div(sizes.outputs, max(strip, 1))


class _Lowering:
    def __init__(self, parts: MatmulParts, form: Contraction, sizes: _Sizes, strip: int, words: str, title: list[str]) -> None:
        assert form.window is not None, "accepted"
        self.parts, self.form, self.sizes, self.strip, self.words, self.title = parts, form, sizes, strip, words, title
        self.window, self.positions = form.window, (strip - 1) * form.window.step + _reach(form)
        self.x = Var("x", (sizes.outputs - 1) * form.window.step + _reach(form))
        self.image = parts.loops.a.tape.mapped(self._merged)
        loads = self.image.loads()
        fast = slope(loads[0].offset, form.k[0]) if loads else 1.0
        self.along_channels = form.k[0].size > 1 and (self.x.size == 1 or abs(fast) <= abs(slope(loads[0].offset, self.x) if loads else 1.0))
        self.channels_last = self.along_channels or sizes.channels < SHORT

    def _merged(self, e: Linear) -> Linear:
        """``e`` with out * step + tap * dilation written as the position ``x``."""
        out, tap, window = self.form.m[-1], self.form.k[-1], self.window

        def terms(y: Linear) -> Linear:
            c = y.coefficient(out) // window.step if out.size > 1 else y.coefficient(tap) // window.dilation
            rest = tuple((a, f) for a, f in y.terms if a not in (out, tap))
            return Linear((*rest, (self.x, c)) if c else rest, y.const)

        return rewrite(e, terms)

    def recipe(self) -> Recipe:
        """The kernel that packs the weights and the one that does the rest."""
        s, p = self.sizes, self.parts
        nbytes = p.batches * s.blocks * s.width * s.depth * s.item
        weights = Buffer("workspace", -1, 0)
        pack, pack_launch = self._pack(weights)
        signature = p.signature.empty()
        items, scratch = _items(self.form, s, self.strip), (nbytes + 255) // 256 * 256
        found = partials(p, scratch, 1, items // p.batches)
        fields = self._fields(signature) | {"fill": self._fill(signature), "after": self._after(signature, found)}
        fields |= self._window() | {"weights": signature.buffer(p.calc, weights)}
        fields["sums"] = [
            {"name": x.acc.name, "hold": x.acc.hold, "start": x.acc.identity, "partial": signature.buffer(x.acc.hold, x.buffer, written=True)}
            | {"by_column": x.place.kind == "column"}
            for x in found
        ]
        name = entry_name(self.words, fields, signature.params)
        kernel = KernelSpec("cpu/conv_direct.py.j2", name, signature.params, fields)
        steps: list[Step] = [Memset(weights, nbytes)] if s.columns % s.width else []
        ends = [finish(p, x, self.words, self.title, "int64", False) for x in found]
        launches = [Launch(1, items, signature.args), *(Launch(2 + i, count, args) for i, (_, count, args) in enumerate(ends))]
        return Recipe((pack, kernel, *(k for k, _, _ in ends)), (*steps, pack_launch, *launches), end_of(found, scratch))

    def _pack(self, target: Buffer) -> tuple[KernelSpec, Launch]:
        """Weights in blocks of a tile's width: [group][block][tap, channel][column]."""
        s, p = self.sizes, self.parts
        signature = p.signature.empty()
        columns = [v for v in (*self.form.k[1:], self.form.k[0]) if v.size != 1]
        walk = strips(p.loops.b.tape, signature, p.batch, (p.n,), columns, True)
        out = signature.buffer(p.calc, target, written=True)
        block = f"o // {s.columns} * {s.blocks} + o % {s.columns} // {s.width}"
        walk.fields["body"].append(f"{out}[(({block}) * {s.depth} + {walk.column}) * {s.width} + o % {s.columns} % {s.width}] = {p.b.value}")
        fields = walk.fields | {"header": [*self.title, "# packs the weights"]}
        kernel = KernelSpec("cpu/strips.py.j2", entry_name(f"{self.words}_pack", fields, signature.params), signature.params, fields)
        return kernel, Launch(0, p.batches * s.columns, signature.args, walk.grain(s.depth))

    def _fields(self, signature: Signature) -> dict[str, Any]:
        s, p = self.sizes, self.parts
        pieces = ceil_div(s.outputs, self.strip)
        ld = s.blocks * s.width
        return {
            "header": self.title,
            "calc": p.calc,
            "setup": decompose("o", [*p.batch, *self.form.m[:-1], Var("strip", pieces)], "int64"),
            "first": f"strip * {self.strip}" if pieces > 1 else "0",
            "line": _line(self.form, s, self.strip),
            "tile": self.strip * ld,
            "outputs": s.outputs,
            "strip": self.strip,
            "step": self.window.step,
            "reach": _reach(self.form),
            "channels": s.channels,
            "columns": s.columns,
            "ld": ld,
            "blocks": s.blocks,
            "width": s.width,
            "rows": ROWS,
            "rest": s.outputs % ROWS,
        }

    def _fill(self, signature: Signature) -> dict[str, Any]:
        """The copy of image lines: for every line, and every position or channel of it, the other."""
        s, width = self.sizes, self.positions
        channel, lines = self.form.k[0], list(self.form.k[1:-1])
        middle, inner = (lines, channel) if self.along_channels else ([*lines, channel], self.x)
        part = lanes(self.image, signature, inner, 1, IndexWriter("int64"), IndexWriter("int64", "ql"))
        if self.along_channels:
            line, x, c = "w", "(x - x0)", "jl"
        else:
            line, x, c = f"w // {s.channels}", "(jl - x0)", f"w % {s.channels}"
        place = f"(({line}) * {width} + {x}) * {s.channels} + {c}" if self.channels_last else f"(({line}) * {s.channels} + {c}) * {width} + {x}"
        body = [*part.body, f"line[{place}] = {self.parts.a.value}"]
        lines_text, count = decompose("w", middle, "int64"), math.prod(v.size for v in middle)
        return {"count": count, "middle": lines_text, "setup": part.setup, "body": body, "along_channels": self.along_channels}

    def _window(self) -> dict[str, Any]:
        """Where a tile reads: taps of the last dim are one run with the channels where they lie side by side, else a call each."""
        s, step, dilation = self.sizes, self.window.step, self.window.dilation
        joined = self.channels_last and (dilation == 1 or s.taps == 1)
        line, tap = ("w", "0") if joined else (f"w // {s.taps}", f"w % {s.taps}")
        start = f"e * {step} + {tap} * {dilation}"
        if self.channels_last:
            window, lda, ka = f"({line} * {self.positions} + {start}) * {s.channels}", step * s.channels, 1
        else:
            window, lda, ka = f"{line} * {s.channels * self.positions} + {start}", step, self.positions
        depth = s.channels * (s.taps if joined else 1)
        group = self.parts.batch[0].name if self.parts.batch else "0"
        weight = f"(({group} * {s.blocks} + jb) * {s.depth} + w * {depth}) * {s.width}"
        return {"taps": s.lines * (1 if joined else s.taps), "window": window, "lda": lda, "ka": ka, "weight": weight, "depth": depth}

    def _after(self, signature: Signature, sums: Sequence[Partials]) -> dict[str, Any]:
        """The epilogue over the tile."""
        p, q, ld = self.parts, self.form.m[-1], self.sizes.blocks * self.sizes.width
        along_rows = runs_along_rows(p.loops.epilogue, (q,), (p.n,))
        part = lanes(p.loops.epilogue, signature, p.n if along_rows else q, 1, IndexWriter("int64"), IndexWriter("int64", "ql"))
        place = f"({q.name} - q0) * {ld} + jl" if along_rows else f"(jl - q0) * {ld} + {p.n.name}"
        names = {"row": q.name, "column": p.n.name, "along_rows": along_rows}
        body = part.body
        for x in sums:
            if x.place.kind == "column":
                body = [re.sub(rf"\b{x.acc.name}\b", f"{x.acc.name}[{'jl' if along_rows else p.n.name}]", line) for line in body]
        return names | {"setup": part.setup, "body": body, "c": p.c_text(f"tile[{place}]")}
