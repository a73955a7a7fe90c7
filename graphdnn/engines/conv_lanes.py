"""Lowering of convolutions with few products in a sum (depthwise, narrow groups) for a CPU: vector lanes are groups, or outputs of one line.

An item is a block of output rows, of a block of groups (lanes are groups: depthwise, channels lie side by side in memory) or of one group (lanes are
outputs along the last dim). The image rows under it are copied once, prologue and padding included, to a buffer on the thread's stack; the products
of a sum stand unrolled in the lane loop, and so does the epilogue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from graphdnn.codegen.body import Signature, lanes
from graphdnn.codegen.contraction import Contraction
from graphdnn.codegen.dialect import IndexWriter, decompose, literal
from graphdnn.codegen.spec import Buffer, KernelSpec, Launch, Memset, Recipe, Step
from graphdnn.codegen.tape import Tape
from graphdnn.engines.base import Knobs, ceil_div, entry_name
from graphdnn.engines.matmul_parts import MatmulParts
from graphdnn.engines.strips import strips
from graphdnn.ir.index import Linear, Var, depends, rename, rewrite, slope, var

PRODUCTS = 64
"""Most products of a sum: they stand unrolled in the kernel."""
BUFFER_BYTES = 1 << 18
"""Largest buffer on a thread's stack."""


@dataclass(frozen=True)
class LanesCpu(Knobs):
    """An item makes ``rows`` rows of outputs, of ``groups`` groups where the lanes are groups."""

    rows: int = 8
    groups: int = 32


@dataclass(frozen=True)
class Lanes:
    """``across``: lanes are groups. ``rows``, ``groups``: of an item. The buffer holds ``planes`` (other taps and channels) of ``lines`` rows of
    ``positions`` elements (times groups). ``products``: in a sum."""

    across: bool
    rows: int
    groups: int
    planes: int
    lines: int
    positions: int
    products: int

    @property
    def elements(self) -> int:
        """Of the buffer."""
        return self.planes * self.lines * self.positions * self.groups


def lanes_of(form: Contraction, knobs: LanesCpu, across: bool) -> Lanes:
    """The sizes that ``knobs`` give."""
    window = form.window
    assert window is not None, "accepted"
    flat = len(form.m) == 2  # one spatial dim: no rows
    rows = 1 if flat else max(min(knobs.rows, form.m[-2].size), 1)
    lines = 1 if flat else (rows - 1) * window.steps[-2] + (form.k[-2].size - 1) * window.dilations[-2] + 1
    positions = (max(form.m[-1].size, 1) - 1) * window.step + (form.k[-1].size - 1) * window.dilation + 1
    planes = math.prod(v.size for v in (form.k[0], *form.k[1:-2]))
    groups = min(knobs.groups, form.batch[0].size) if across else 1
    return Lanes(across, rows, groups, planes, lines, positions, math.prod(v.size for v in form.k))


def items(form: Contraction, sizes: Lanes) -> int:
    """Items of the kernel."""
    outer = form.m[:-2] if len(form.m) > 2 else form.m[:1]
    rows = ceil_div(form.m[-2].size, sizes.rows) if len(form.m) > 2 else 1
    return math.prod(v.size for v in outer) * ceil_div(form.batch[0].size, sizes.groups) * rows


def lies_across(tape: Tape, form: Contraction, group: Var) -> bool:
    """Whether lanes should be groups: each has one channel, and neighbours in memory are groups rather than outputs."""
    loads = tape.loads()
    if form.k[0].size != 1 or group.size == 1 or not loads:
        return False
    by_group, by_output = (abs(slope(loads[0].offset, v)) for v in (group, form.m[-1]))
    return form.m[-1].size == 1 or 0 < by_group <= by_output


def group_of(parts: MatmulParts) -> Var:
    """The loop over groups."""
    return parts.batch[0] if parts.batch else Var("z", 1)


def lower(parts: MatmulParts, form: Contraction, knobs: LanesCpu, words: str, title: list[str]) -> Recipe:
    """The kernel that packs the weights and the one that does the rest."""
    across = lies_across(parts.loops.a.tape, form, group_of(parts))
    return _Lowering(parts, form, lanes_of(form, knobs, across), words, title).recipe()


class _Lowering:
    def __init__(self, parts: MatmulParts, form: Contraction, sizes: Lanes, words: str, title: list[str]) -> None:
        assert form.window is not None, "accepted"
        self.parts, self.form, self.window, self.sizes, self.words, self.title = parts, form, form.window, sizes, words, title
        self.group, self.item = group_of(parts), 8 if parts.calc.endswith("64") else 4
        flat = len(form.m) == 2
        self.row, self.column = Var("m_", 1) if flat else form.m[-2], form.m[-1]
        self.outer = form.m[:1] if flat else form.m[:-2]
        self.lane = Var("jl", self.sizes.groups if sizes.across else sizes.positions)

    def recipe(self) -> Recipe:
        """Kernels and steps."""
        p, s = self.parts, self.sizes
        count = ceil_div(self.group.size, s.groups) * s.groups * p.n.size * s.products
        weights = Buffer("workspace", -1, 0)
        steps: list[Step] = [Memset(weights, count * self.item)] if self.group.size % s.groups else []
        kernels = []
        if s.products:
            pack, launch = self._pack(weights)
            kernels.append(pack)
            steps.append(launch)
        signature = p.signature.empty()
        fields = {"header": self.title, "calc": p.calc, "line": max(s.elements, 1), "across": s.across, "setup": self._setup()}
        fields |= {"rows": s.rows, "row": self.row.name, "column": self.column.name, "columns": self.column.size, "last": self.row.size}
        fields |= {"filters": p.n.size, "filter": p.n.name, "lanes": self._width(), "fill": self._fill(signature)}
        fields |= self._sum(signature.buffer(p.calc, weights)) | self._after(signature)
        name = entry_name(self.words, fields, signature.params)
        kernels.append(KernelSpec("cpu/conv_lanes.py.j2", name, signature.params, fields))
        work = s.rows * self.column.size * s.groups * p.n.size * max(s.products, 1)
        steps.append(Launch(len(kernels) - 1, items(self.form, s), signature.args, max(1, (1 << 16) // max(work, 1))))
        return Recipe(tuple(kernels), tuple(steps), (count * self.item + 255) // 256 * 256)

    # -- parts of the kernel --------------------------------------------------------------------------------------------------------------
    def _setup(self) -> list[str]:
        s = self.sizes
        block, rows = Var("block", ceil_div(self.group.size, s.groups)), Var("part", ceil_div(self.row.size, s.rows))
        lines = decompose("o", [*self.outer, block, rows], "int64")
        if self.group.size > 1 and not s.across:
            lines.append(f"{self.group.name} = block")
        lines.append(f"y0 = part * {s.rows}" if rows.size > 1 else "y0 = 0")
        return [*lines, f"g0 = block * {s.groups}" if block.size > 1 else "g0 = 0"]

    def _width(self) -> str:
        """Lanes of a block of groups."""
        s = self.sizes
        even = self.group.size % s.groups == 0
        return str(s.groups) if even else f"min({self.group.size} - g0, {s.groups})"

    def _fill(self, signature: Signature) -> dict[str, Any]:
        """The copy of the image: plane by plane, row by row."""
        s, form = self.sizes, self.form
        y, x = Var("y", 1 << 30), Var("x", s.positions if s.positions > 1 else 2)
        tape = self.parts.loops.a.tape.mapped(lambda e: self._joined(e, y, x))
        planes = [form.k[0], *form.k[1:-2]]
        line = Var("line_", s.lines)
        inner = self.group if s.across else x
        tape, place = self._laned(tape, inner), "(w * {0} + x) * {1} + jl" if s.across else "w * {0} + jl"
        part = lanes(tape, signature, self.lane, 1, IndexWriter("int64"), IndexWriter("int64", "ql"))
        middle = [*decompose("w", [*planes, line], "int64"), f"y = {self._image_row(line.name if s.lines > 1 else '0')}"]
        body = [*part.body, f"line[{place.format(s.positions, s.groups)}] = {self.parts.a.value}"]
        return {"count": s.planes * s.lines, "middle": middle, "setup": part.setup, "body": body, "positions": s.positions}

    def _image_row(self, line: str) -> str:
        """The place that a line of the buffer copies: the last block, which may lack rows, stays at the last place that any output needs."""
        place = f"y0 * {self._row_step()} + {line}"
        if self.row.size % self.sizes.rows == 0:
            return place
        last = (self.row.size - 1) * self._row_step() + (self.form.k[-2].size - 1) * self.window.dilations[-2]
        return f"min({place}, {last})"

    def _row_step(self) -> int:
        return self.window.steps[-2] if len(self.form.m) > 2 else 1

    def _joined(self, e: Linear, y: Var, x: Var) -> Linear:
        """``e`` with out * step + tap * dilation of the last two dims written as the places ``y`` and ``x``."""
        dims = [(self.form.m[-1], self.form.k[-1], self.window.step, self.window.dilation, x)]
        if len(self.form.m) > 2:
            dims.append((self.form.m[-2], self.form.k[-2], self.window.steps[-2], self.window.dilations[-2], y))

        def terms(z: Linear) -> Linear:
            for out, tap, step, dilation, place in dims:
                c = z.coefficient(out) // step if out.size > 1 else z.coefficient(tap) // dilation
                rest = tuple((a, f) for a, f in z.terms if a not in (out, tap))
                z = Linear((*rest, (place, c)) if c else rest, z.const)
            return z

        return rewrite(e, terms)

    def _laned(self, tape: Tape, inner: Var) -> Tape:
        """``tape`` with ``inner`` counted by the lanes."""
        first = var(Var("g0", 1 << 30)) if self.sizes.across else Linear()
        return tape.mapped(lambda e: rename(e, {inner: first + Linear(((self.lane, 1),))}) if depends(e, inner) else e)

    def _sum(self, weights: str) -> dict[str, Any]:
        """Where a sum reads: offsets of its products in the buffer and in the packed weights, in the order of those."""
        s, form, calc = self.sizes, self.form, self.parts.calc
        down, along = (self.window.dilations[-2] if len(form.m) > 2 else 1), self.window.dilation
        taps = form.k[-2].size if len(form.k) > 2 else 1
        others = math.prod(v.size for v in form.k[1:-2])
        values, t = [], 0
        for plane in range(others if s.products else 0):
            for r in range(taps):
                for q in range(form.k[-1].size):
                    for c in range(form.k[0].size):
                        at = ((c * others + plane) * s.lines + r * down) * s.positions + q * along
                        values.append((f"w{t}", f"line[x0 + {at * s.groups} + {self._lane_step()}]"))
                        t += 1
        group = "0" if self.group.size == 1 else f"g0 // {s.groups}" if s.across else self.group.name
        first = f"({group} * {self.parts.n.size} + {self.parts.n.name if self.parts.n.size > 1 else 0}) * {s.products * s.groups}"
        lines, total = [], literal(0, calc)
        for t, (_, x) in enumerate(values):
            factor = f"{weights}[wt + {t * s.groups} + jl]" if s.across else f"w{t}"
            lines.append(f"total = mul_add({x}, {factor}, {total if t == 0 else 'total'})")
        loads = [] if s.across else [f"w{t} = {weights}[wt + {t}]" for t in range(len(values))]
        start = f"({self.row.name} - y0) * {self._row_step() * s.positions * s.groups}"
        if s.across:
            start += f" + {self.column.name} * {self.window.step * s.groups}"
        return {"weight": first, "weights": loads, "products": lines or [f"total = {total}"], "start": start}

    def _lane_step(self) -> str:
        return "jl" if self.sizes.across or self.window.step == 1 else f"jl * {self.window.step}"

    def _after(self, signature: Signature) -> dict[str, Any]:
        """The epilogue of a lane."""
        inner = self.group if self.sizes.across else self.column
        tape = self._laned(self.parts.loops.epilogue, inner)
        part = lanes(tape, signature, self.lane, 1, IndexWriter("int64"), IndexWriter("int64", "ql"))
        return {"after": {"setup": part.setup, "body": [f"c = {self.parts.c_text('total')}", *part.body]}}

    def _pack(self, target: Buffer) -> tuple[KernelSpec, Launch]:
        """Weights as [block of groups][filter][tap, channel][group]."""
        s, p = self.sizes, self.parts
        signature = p.signature.empty()
        columns = [v for v in (*self.form.k[1:], self.form.k[0]) if v.size != 1]
        walk = strips(p.loops.b.tape, signature, p.batch, (p.n,), columns, True)
        out = signature.buffer(p.calc, target, written=True)
        n, per = p.n.size, s.groups
        place = f"((o // {n} // {per} * {n} + o % {n}) * {s.products} + {walk.column}) * {per} + o // {n} % {per}"
        walk.fields["body"].append(f"{out}[{place}] = {p.b.value}")
        fields = walk.fields | {"header": [*self.title, "# packs the weights"]}
        kernel = KernelSpec("cpu/strips.py.j2", entry_name(f"{self.words}_pack", fields, signature.params), signature.params, fields)
        return kernel, Launch(0, p.batches * n, signature.args, walk.grain(s.products))
