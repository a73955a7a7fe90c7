"""Engine ``conv_fft``: convolution (and data gradient) of any filter size at stride 1 by Fourier transforms of tiles: the products of a filter of
R x S taps become about 4 a value.

Image, filter and result are transformed line by line, first along rows, then along columns, through the workspace. Half of a spectrum says all
of a real tile. One stack of real products does the complex ones: [Xr Xi] times [[Wr, -Wi], [Wi, Wr]], the image times the conjugate of the filter,
which is a correlation; its last taps - 1 outputs along each dim wrap around and are left out (overlap-save).
The error bound: opspecs/fast_conv_bounds.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from graphdnn.codegen.body import Signature
from graphdnn.codegen.dialect import to_dtype
from graphdnn.codegen.linear_text import Complex, LinearText
from graphdnn.codegen.recipes import joined
from graphdnn.codegen.spec import Buffer, Recipe
from graphdnn.device import DeviceProps
from graphdnn.engines import conv_stages
from graphdnn.engines.base import Engine, Knobs, Scratch, chain, header
from graphdnn.engines.conv_stages import Placed, Stage
from graphdnn.engines.conv_tiles import Tiles, accepts, tiles_of, volume
from graphdnn.ir.index import Linear, Var, var
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.opspecs.fast_conv import FastConv
from graphdnn.passes.regions import Region
from graphdnn.status import OK, Status, reject


@dataclass(frozen=True)
class FftTile(Knobs):
    """Tiles of ``size`` x ``size`` inputs, a power of two."""

    size: int


class ConvFft(Engine):
    """See the module."""

    id: ClassVar[int] = 8
    name: ClassVar[str] = "conv_fft"

    def _accepts(self, graph: OperationGraph, region: Region) -> Status:
        return accepts(self.name, graph, region)

    def _candidates(self, graph: OperationGraph, region: Region, device: DeviceProps) -> tuple[Knobs, ...]:
        return (FftTile(8), FftTile(16)) if device.kind == "cudasim" else (FftTile(16), FftTile(32))

    def _check(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> Status:
        tiles = _tiles(graph, region, knobs)
        taps = tuple(v.size for v in tiles.taps)
        if max(taps) * 2 > tiles.size + 1:
            return reject(f"conv_fft: {knobs!r} leaves few outputs of a tile under a filter of {taps[0]} x {taps[1]} taps; at most half a tile")
        return OK

    def _cost(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> float:
        """The products, and every transformed value of each of the two dims written and read once."""
        tiles = _tiles(graph, region, knobs)
        plan = _Plan(tiles)
        scratch = (sum(plan.elements) + sum(plan.halves)) * tiles.item
        return conv_stages.cost(tiles.calc, plan.sizes, 2 * scratch + tiles.moved(), 6, device)

    def numeric_notes(self, graph: OperationGraph, region: Region, knobs: Knobs) -> tuple[str, ...]:
        """Fourier."""
        return ("FFT",)

    def algorithm(self, knobs: Knobs) -> FastConv:
        """See :meth:`Engine.algorithm`."""
        assert isinstance(knobs, FftTile), f"knobs of another engine: {knobs!r}"
        return FastConv("fft", knobs.size)

    def _lower(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs, memory: Mapping[int, Buffer]) -> Recipe:
        tiles = _tiles(graph, region, knobs)
        plan, space = _Plan(tiles), Scratch()
        half = space.take(max(plan.halves) * tiles.item)
        v, u, m = (space.take(n * tiles.item) for n in plan.elements)
        product = conv_stages.product(tiles.calc, plan.sizes, device, v, u, m, space.size)
        words, title = chain(graph, region), header(graph, region, knobs)

        def recipe(stage: Stage) -> Recipe:
            spec, launch = conv_stages.kernel(stage, Signature(graph, memory), tiles.calc, title, device.kind == "cpu")
            return Recipe((spec,), (launch,), space.size)

        before = (*plan.image(words, half, v), *plan.filter(words, half, u))
        return joined([*map(recipe, before), product, *map(recipe, plan.result(words, m, half))])


def _tiles(graph: OperationGraph, region: Region, knobs: Knobs) -> Tiles:
    assert isinstance(knobs, FftTile), f"knobs of another engine: {knobs!r}"
    return tiles_of(graph, region, knobs.size)


def _row_major(*loops: Var | tuple[Linear, int]) -> Linear:
    """The number of an element among ``loops`` (or expressions with their extents), the last fastest."""
    total = Linear()
    for v in loops:
        e, size = (var(v), v.size) if isinstance(v, Var) else v
        total = total.scaled(size) + e
    return total


class _Plan:
    """The stages. ``spectrum``: columns of half a spectrum; values of it lie as [column][part], parts real and imaginary."""

    def __init__(self, tiles: Tiles) -> None:
        self.tiles, self.size = tiles, tiles.size
        self.column = Var("f2", self.size // 2 + 1)
        self.place = (tiles.place, tiles.count)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Batches, rows, columns and terms of the products."""
        t = self.tiles
        return self.size * self.column.size * t.group.size, t.count, 2 * t.filters.size, 2 * t.channels.size

    @property
    def elements(self) -> tuple[int, int, int]:
        """Of transformed image, filter and result."""
        batch, m, n, k = self.sizes
        return batch * m * k, batch * k * n, batch * m * n

    @property
    def halves(self) -> tuple[int, int, int]:
        """Of the same, transformed along rows only."""
        t, parts = self.tiles, 2 * self.column.size
        weights = volume(t.group, t.channels, t.taps[0], t.filters)
        return tuple(parts * n for n in (self._lines * self.size * t.channels.size, weights, self._lines * t.outputs[0] * t.filters.size))  # type: ignore[return-value]

    @property
    def _lines(self) -> int:
        return self.tiles.group.size * self.tiles.count

    # -- forth ----------------------------------------------------------------------------------------------------------------------------
    def image(self, words: str, half: Buffer, v: Buffer) -> tuple[Stage, Stage]:
        """V[row, column of the spectrum][group][tile][part, channel]."""
        t = self.tiles
        row, column = Var("i1", self.size), Var("i2", self.size)
        tile = (t.group, t.image, *t.at)
        step = self._lines * self.size * t.channels.size
        lines, results = self._real(self.size)
        base = _row_major(t.group, self.place, row, t.channels)
        first = Stage(
            f"{words}_image_rows", (*tile, row, t.channels), t.inputs(var(row), var(column), (column,)), lines, results, self._half(half, base, step)
        )
        base = var(self.column).scaled(2 * step) + _row_major(t.group, self.place, row_of(self.size), t.channels)
        source = Placed(half, base, tuple(part * step + i * t.channels.size for i in range(self.size) for part in range(2)))
        lines, pairs = self._complex(self.size)
        base = _row_major(self.column, t.group, self.place, (Linear(), 2), t.channels)
        every = self.column.size * self._lines * 2 * t.channels.size
        target = Placed(v, base, tuple(f * every + part * t.channels.size for f in range(self.size) for part in range(2)))
        return first, Stage(f"{words}_image_columns", (*tile, self.column, t.channels), source, lines, [x for z in pairs for x in z], target)

    def filter(self, words: str, half: Buffer, u: Buffer) -> tuple[Stage, Stage]:
        """U[row, column of the spectrum][group][part, channel][part, filter]."""
        t, n = self.tiles, self.tiles.filters.size
        row, column = t.taps
        step = volume(t.group, t.channels, row, t.filters)
        lines, results = self._real(column.size)
        base = _row_major(t.group, t.channels, row, t.filters)
        loops = (t.group, t.channels, row, t.filters)
        first = Stage(f"{words}_filter_rows", loops, t.weights((column,)), lines, results, self._half(half, base, step))
        base = var(self.column).scaled(2 * step) + _row_major(t.group, t.channels, row_of(row.size), t.filters)
        source = Placed(half, base, tuple(part * step + i * n for i in range(row.size) for part in range(2)))
        lines, pairs = self._complex(row.size)
        lines += [f"minus{k} = {t.calc}(-{im})" for k, (_, im) in enumerate(pairs)]
        base = _row_major(self.column, t.group, (Linear(), 2), t.channels, (Linear(), 2), t.filters)
        every, down = self.column.size * t.group.size * 4 * t.channels.size * n, t.channels.size * 2 * n
        steps = [f * every + at for f in range(self.size) for at in (0, n, down, down + n)]
        values = [x for k, (re, im) in enumerate(pairs) for x in (re, f"minus{k}", im, re)]
        loops = (t.group, t.channels, self.column, t.filters)
        return first, Stage(f"{words}_filter_columns", loops, source, lines, values, Placed(u, base, tuple(steps)))

    def _half(self, half: Buffer, base: Linear, step: int) -> Placed:
        return Placed(half, base, tuple(range(0, 2 * self.column.size * step, step)))

    def _real(self, count: int) -> tuple[list[str], list[str]]:
        """Lines that transform x0, x1, ... (``count`` of them, then zeros), and real and imaginary part of each column of half the spectrum."""
        text = LinearText(self.tiles.calc, "y")
        values: list[Complex] = [(f"x{i}" if i < count else None, None) for i in range(self.size)]
        return self._named(text, text.fourier(values, -1)[: self.column.size])

    def _complex(self, count: int) -> tuple[list[str], list[tuple[str, str]]]:
        """The same of x0 + i x1, x2 + i x3, ... to a whole spectrum."""
        text = LinearText(self.tiles.calc, "y")
        values: list[Complex] = [(f"x{2 * i}", f"x{2 * i + 1}") if i < count else (None, None) for i in range(self.size)]
        lines, results = self._named(text, text.fourier(values, -1))
        return lines, list(zip(results[0::2], results[1::2], strict=True))

    def _named(self, text: LinearText, values: list[Complex]) -> tuple[list[str], list[str]]:
        flat = [x for z in values for x in z]
        zero = ["nothing = " + f"{self.tiles.calc}(0.0)"] if None in flat else []
        return [*zero, *text.lines(flat)], [x or "nothing" for x in flat]

    # -- back -----------------------------------------------------------------------------------------------------------------------------
    def result(self, words: str, m: Buffer, half: Buffer) -> tuple[Stage, Stage]:
        """The outputs of a tile from M[row, column of the spectrum][group][tile][part, filter]."""
        t, n = self.tiles, self.tiles.filters.size
        tile, (rows, columns) = (t.group, t.image, *t.at), t.outputs
        base = _row_major(self.column, t.group, self.place, (Linear(), 2), t.filters)
        every = self.column.size * self._lines * 2 * n
        source = Placed(m, base, tuple(f * every + part * n for f in range(self.size) for part in range(2)))
        text = LinearText(t.calc, "y")
        back = text.fourier([(f"x{2 * i}", f"x{2 * i + 1}") for i in range(self.size)], 1)[:rows]
        lines, results = self._named(text, back)
        step = self._lines * rows * n
        base = var(self.column).scaled(2 * step) + _row_major(t.group, self.place, row_of(rows), t.filters)
        target = Placed(half, base, tuple(part * step + i * n for i in range(rows) for part in range(2)))
        first = Stage(f"{words}_result_columns", (*tile, self.column, t.filters), source, lines, results, target)
        row, column = Var("u1", rows), Var("u2", columns)
        lines, results = self._back_to_real(columns)
        out = t.graph.tensors[t.graph.nodes[t.region.anchors[0]].output_ids[0]]
        end = t.finished(var(row), var(column), (column,), to_dtype("total", t.calc, out.dtype))
        source = self._half(half, _row_major(t.group, self.place, row, t.filters), step)
        return first, Stage(words, (*tile, row, t.filters), source, lines, results, end)

    def _back_to_real(self, count: int) -> tuple[list[str], list[str]]:
        """The first ``count`` values of the real line whose half spectrum is x0 + i x1, ...; the other half is its mirror image, conjugate. The
        imaginary parts of the first and of the middle column are 0 but for rounding and have no part in it."""
        t, middle = self.tiles, self.size // 2
        text = LinearText(t.calc, "y")
        values: list[Complex] = [(f"x{2 * k}", f"x{2 * k + 1}" if 0 < k < middle else None) for k in range(middle + 1)]
        mirror: list[Complex] = [(f"x{2 * k}", text.combination(((-1, f"x{2 * k + 1}"),))) for k in range(middle - 1, 0, -1)]
        sums = [re for re, _ in text.fourier([*values, *mirror], 1)[:count]]
        results = [text.combination(((1.0 / self.size**2, re),)) for re in sums]
        return text.lines(results), [r or "nothing" for r in results]


def row_of(size: int) -> tuple[Linear, int]:
    """The first row of a tile that has ``size`` of them, whose elements a stage gathers or scatters itself."""
    return Linear(), size
