"""A convolution at step 1 cut into square tiles of its image, for the engines that transform tiles: what they take, their loops, their tapes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from graphdnn.codegen.access import Guard
from graphdnn.codegen.contraction import Contraction, Read, contractions
from graphdnn.dtypes import info
from graphdnn.engines.base import ceil_div, fits, placeholder, traffic
from graphdnn.engines.conv_stages import Finished, Taken
from graphdnn.engines.matmul_parts import epilogue_tape, operand, take_apart
from graphdnn.ir.index import Linear, Var, rename, var
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.passes.regions import Region
from graphdnn.status import Status, reject


def accepts(name: str, graph: OperationGraph, region: Region) -> Status:
    """Whether engine ``name`` can cut the region's convolution into tiles."""
    node = graph.nodes[region.anchors[0]]
    forms = contractions(node, graph)
    window = forms[0].window
    if window is None or len(forms) > 1:
        return reject(f"{name}: the anchor '{node.label}' of the region does not slide over one image ({node.op}; a data gradient needs stride 1)")
    if len(window.steps) != 2:
        return reject(f"{name}: convolution '{node.label}' has {len(window.steps)} spatial dims; {name} takes 2")
    if window.steps != (1, 1) or window.dilations != (1, 1):
        return reject(f"{name}: convolution '{node.label}' has strides {window.steps} and dilations {window.dilations}; {name} takes 1")
    if not info(node.compute).register.startswith("float"):
        return reject(f"{name}: convolution '{node.label}' is computed in {node.compute.name}; {name} needs a float type")
    if region.epilogue_reductions:
        reduction = graph.nodes[region.epilogue_reductions[0]].name
        return reject(f"{name}: reduction '{reduction}' of the results; {name} has none in its epilogue")
    if 0 in forms[0].sizes:
        return reject(f"{name}: convolution '{node.label}' is empty")
    return fits(lambda: take_apart(graph, region, placeholder(region), True, forms[0]))


@dataclass(frozen=True)
class Tiles:
    """An accepted region in tiles of ``size`` x ``size`` inputs. Loops: ``group``, ``image``, the tile's place ``at``, ``channels``, ``filters``."""

    graph: OperationGraph
    region: Region
    form: Contraction
    size: int

    @property
    def calc(self) -> str:
        """Register type of the arithmetic."""
        return info(self.graph.nodes[self.region.anchors[0]].compute).register

    @property
    def item(self) -> int:
        """Bytes of it."""
        return 8 if self.calc == "float64" else 4

    @property
    def group(self) -> Var:
        """Groups."""
        return self.form.batch[0]

    @property
    def image(self) -> Var:
        """Images."""
        return self.form.m[0]

    @property
    def channels(self) -> Var:
        """Channels that are summed."""
        return self.form.k[0]

    @property
    def filters(self) -> Var:
        """Filters of a group."""
        return self.form.n

    @property
    def taps(self) -> tuple[Var, Var]:
        """The filter's taps."""
        return self.form.k[1], self.form.k[2]

    @property
    def outputs(self) -> tuple[int, int]:
        """Outputs of a tile."""
        return self.size - self.taps[0].size + 1, self.size - self.taps[1].size + 1

    @property
    def at(self) -> tuple[Var, Var]:
        """The tile's row and column."""
        rows, columns = (Var(f"t{a + 1}", ceil_div(self.form.m[a + 1].size, self.outputs[a])) for a in range(2))
        return rows, columns

    @property
    def count(self) -> int:
        """Tiles of all images."""
        return self.image.size * self.at[0].size * self.at[1].size

    @property
    def place(self) -> Linear:
        """A tile's number."""
        rows, columns = self.at
        return (var(self.image).scaled(rows.size) + var(rows)).scaled(columns.size) + var(columns)

    def inputs(self, rows: Linear, columns: Linear, loops: tuple[Var, ...]) -> Taken:
        """The image under a tile at (rows, columns) of it, prologue included, zero outside of the image."""
        window = self.form.window
        assert window is not None, "accepted"
        at, guards = window.read([var(t).scaled(o) for t, o in zip(self.at, self.outputs, strict=True)], [rows, columns])
        read = Read(self.form.a.tensor, (*self.form.a.index[:2], *at), guards)
        found = operand(self.graph, self.region, read, self.calc, "a")
        return Taken(found.tape, found.value, loops)

    def weights(self, loops: tuple[Var, ...]) -> Taken:
        """The filter, prologue included."""
        found = operand(self.graph, self.region, self.form.b, self.calc, "b")
        return Taken(found.tape, found.value, loops)

    def finished(self, rows: Linear, columns: Linear, loops: tuple[Var, ...], c: str) -> Finished:
        """The epilogue of the output at (rows, columns) of a tile."""
        places = [var(t).scaled(o) + u for t, o, u in zip(self.at, self.outputs, (rows, columns), strict=True)]
        names = {v: p for v, p in zip(self.form.m[1:], places, strict=True) if v.size > 1}
        tape = epilogue_tape(self.graph, self.region, [], self.form.out).mapped(lambda e: rename(e, names))
        guards = tuple(
            Guard(p, 0, v.size) for p, v, o, t in zip(places, self.form.m[1:], self.outputs, self.at, strict=True) if v.size < o * t.size
        )
        return Finished(tape, c, loops, guards)

    def moved(self) -> int:
        """Bytes that the region must read and write whatever is done."""
        return sum(traffic(self.graph, self.region))


def tiles_of(graph: OperationGraph, region: Region, size: int) -> Tiles:
    """An accepted region in tiles of ``size``."""
    return Tiles(graph, region, contractions(graph.nodes[region.anchors[0]], graph)[0], size)


def volume(*loops: Var) -> int:
    """Product of extents."""
    return math.prod(v.size for v in loops)
