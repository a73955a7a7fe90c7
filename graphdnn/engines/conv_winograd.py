"""Engine ``conv_winograd``: 3 x 3 convolution (and data gradient) at stride 1 by Winograd's minimal filtering, F(2 x 2) and F(4 x 4).

Filter and image tiles are transformed into the workspace, one stack of products is made of them, and results are transformed back in front of the
epilogue: 16 products for 4 outputs or 36 for 16, where the sum takes 36 or 144.
The matrices: opspecs/fast_conv.py; the error bound: fast_conv_bounds.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from graphdnn.codegen.body import Signature
from graphdnn.codegen.dialect import to_dtype
from graphdnn.codegen.linear_text import LinearText
from graphdnn.codegen.recipes import joined
from graphdnn.codegen.spec import Buffer, Recipe
from graphdnn.device import DeviceProps
from graphdnn.engines import conv_stages
from graphdnn.engines.base import Engine, Knobs, Scratch, chain, header
from graphdnn.engines.conv_stages import Placed, Stage
from graphdnn.engines.conv_tiles import Tiles, accepts, tiles_of
from graphdnn.ir.index import Var, var
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.opspecs.fast_conv import FastConv, winograd
from graphdnn.passes.regions import Region
from graphdnn.status import Status, reject

if TYPE_CHECKING:
    from graphdnn.opspecs.fast_conv import Rows

TAPS = 3


@dataclass(frozen=True)
class WinogradTile(Knobs):
    """Tiles of ``size`` x ``size`` inputs: 4 for F(2 x 2, 3 x 3), 6 for F(4 x 4, 3 x 3)."""

    size: int


class ConvWinograd(Engine):
    """See the module."""

    id: ClassVar[int] = 7
    name: ClassVar[str] = "conv_winograd"

    def _accepts(self, graph: OperationGraph, region: Region) -> Status:
        status = accepts(self.name, graph, region)
        if not status:
            return status
        taps = tuple(v.size for v in tiles_of(graph, region, TAPS).taps)
        return status if taps == (TAPS, TAPS) else reject(f"conv_winograd: the filter has {taps[0]} x {taps[1]} taps; conv_winograd takes 3 x 3")

    def _candidates(self, graph: OperationGraph, region: Region, device: DeviceProps) -> tuple[Knobs, ...]:
        return (WinogradTile(6), WinogradTile(4))

    def _cost(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> float:
        """The products, and every transformed value written and read once."""
        tiles = _tiles(graph, region, knobs)
        scratch = sum(_elements(tiles)) * tiles.item
        return conv_stages.cost(tiles.calc, _sizes(tiles), 2 * scratch + tiles.moved(), 3, device)

    def numeric_notes(self, graph: OperationGraph, region: Region, knobs: Knobs) -> tuple[str, ...]:
        """Winograd, and the extent of its tiles."""
        size = self.algorithm(knobs).size
        return ("WINOGRAD", f"WINOGRAD_TILE_{size}x{size}")

    def algorithm(self, knobs: Knobs) -> FastConv:
        """See :meth:`Engine.algorithm`."""
        assert isinstance(knobs, WinogradTile), f"knobs of another engine: {knobs!r}"
        return FastConv("winograd", knobs.size)

    def _lower(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs, memory: Mapping[int, Buffer]) -> Recipe:
        tiles, space = _tiles(graph, region, knobs), Scratch()
        v, u, m = (space.take(n * tiles.item) for n in _elements(tiles))
        product = conv_stages.product(tiles.calc, _sizes(tiles), device, v, u, m, space.size)
        words, title, recipes = chain(graph, region), header(graph, region, knobs), []
        first, last = (_image(tiles, v, words), _filter(tiles, u, words)), _result(tiles, m, words)
        for stage, what in ((first[0], "image tiles"), (first[1], "filters"), (last, "")):
            own = [*title, f"# transforms {what}"] if what else title
            spec, launch = conv_stages.kernel(stage, Signature(graph, memory), tiles.calc, own, device.kind == "cpu")
            recipes.append(Recipe((spec,), (launch,), space.size))
        return joined([*recipes[:2], product, recipes[2]])


def _tiles(graph: OperationGraph, region: Region, knobs: Knobs) -> Tiles:
    assert isinstance(knobs, WinogradTile), f"knobs of another engine: {knobs!r}"
    return tiles_of(graph, region, knobs.size)


def _sizes(t: Tiles) -> tuple[int, int, int, int]:
    """Batches, rows, columns and terms of the products."""
    return t.size**2 * t.group.size, t.count, t.filters.size, t.channels.size


def _elements(t: Tiles) -> tuple[int, int, int]:
    """Of transformed image, filter and result."""
    batch, m, n, k = _sizes(t)
    return batch * m * k, batch * k * n, batch * m * n


def _mapped(t: Tiles, rows: Rows, columns: int) -> tuple[list[str], list[str]]:
    """Lines that transform x0, x1, ... (columns x columns of them) by ``rows`` along both dims, and the names of the results."""
    text = LinearText(t.calc, "y")
    names = [[f"x{i * columns + j}" for j in range(columns)] for i in range(columns)]
    results = [r for r in text.product2(rows, rows, names) if r is not None]
    return text.lines(results), results


def _image(t: Tiles, v: Buffer, words: str) -> Stage:
    """V[row, column of the transform][group][tile][channel]."""
    inside = (Var("i1", t.size), Var("i2", t.size))
    lines, results = _mapped(t, winograd(t.size, TAPS).input, t.size)
    base = (var(t.group).scaled(t.count) + t.place).scaled(t.channels.size) + var(t.channels)
    step = t.group.size * t.count * t.channels.size
    loops = (t.group, t.image, *t.at, t.channels)
    source = t.inputs(var(inside[0]), var(inside[1]), inside)
    return Stage(f"{words}_image", loops, source, lines, results, Placed(v, base, tuple(e * step for e in range(t.size**2))))


def _filter(t: Tiles, u: Buffer, words: str) -> Stage:
    """U[row, column of the transform][group][channel][filter]."""
    lines, results = _mapped(t, winograd(t.size, TAPS).filter, TAPS)
    base = (var(t.group).scaled(t.channels.size) + var(t.channels)).scaled(t.filters.size) + var(t.filters)
    step = t.group.size * t.channels.size * t.filters.size
    loops = (t.group, t.channels, t.filters)
    return Stage(f"{words}_filter", loops, t.weights(t.taps), lines, results, Placed(u, base, tuple(e * step for e in range(t.size**2))))


def _result(t: Tiles, m: Buffer, words: str) -> Stage:
    """The outputs of a tile from M[row, column of the transform][group][tile][filter]."""
    inside = (Var("u1", t.outputs[0]), Var("u2", t.outputs[1]))
    lines, results = _mapped(t, winograd(t.size, TAPS).output, t.size)
    base = (var(t.group).scaled(t.count) + t.place).scaled(t.filters.size) + var(t.filters)
    step = t.group.size * t.count * t.filters.size
    out = t.graph.tensors[t.graph.nodes[t.region.anchors[0]].output_ids[0]]
    target = t.finished(var(inside[0]), var(inside[1]), inside, to_dtype("total", t.calc, out.dtype))
    source = Placed(m, base, tuple(e * step for e in range(t.size**2)))
    return Stage(words, (t.group, t.image, *t.at, t.filters), source, lines, results, target)
