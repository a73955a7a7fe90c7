"""Engine ``pointwise``: any DAG of pointwise and data-movement ops over one space, several outputs, one kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from graphdnn.codegen.body import Signature, lane_width, lanes
from graphdnn.codegen.dialect import IndexWriter, decompose, index_type
from graphdnn.codegen.spec import Buffer, KernelSpec, Launch, Recipe
from graphdnn.codegen.tape import Tape, TapeBuilder
from graphdnn.device import DeviceProps
from graphdnn.engines.base import Engine, Knobs, ceil_div, chain, entry_name, fits, header, roofline
from graphdnn.engines.space import nest, priority, store_free
from graphdnn.ir.index import Var
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.passes.places import variables
from graphdnn.passes.regions import Region
from graphdnn.status import Status, reject

CPU_GRAIN = 32768
"""Elements that are worth handing to another thread."""


@dataclass(frozen=True)
class PointwiseCpu(Knobs):
    """``split``: elements of the fastest loop in one item, where few items would starve the threads."""

    split: int = 32768


@dataclass(frozen=True)
class PointwiseCuda(Knobs):
    """``block``: threads. ``width``: most elements a thread takes of the fastest loop (16-byte accesses of the widest type at most)."""

    block: int = 256
    width: int = 16


class Pointwise(Engine):
    """See the module."""

    id: ClassVar[int] = 0
    name: ClassVar[str] = "pointwise"

    def _accepts(self, graph: OperationGraph, region: Region) -> Status:
        if region.kind != "pointwise":
            return reject(f"pointwise: the region has an anchor ({region.kind})")
        return fits(lambda: self._tape(graph, region))

    def _candidates(self, graph: OperationGraph, region: Region, device: DeviceProps) -> tuple[Knobs, ...]:
        if device.kind == "cpu":
            return (PointwiseCpu(),)
        if device.kind == "cudasim":
            return (PointwiseCuda(16), PointwiseCuda(8, 1))
        return tuple(PointwiseCuda(b, w) for b, w in ((256, 16), (128, 16), (512, 16), (256, 4), (256, 1)))

    def _cost(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> float:
        seconds = roofline(graph, region, device)
        if isinstance(knobs, PointwiseCuda):  # narrow accesses reach less of the bandwidth; block sizes differ only a little
            seconds *= {16: 1.0, 4: 1.15, 1: 1.6}[knobs.width] * (1.0 if knobs.block == 256 else 1.01)
        return seconds

    def _tape(self, graph: OperationGraph, region: Region) -> tuple[tuple[Var, ...], Tape]:
        loop = variables(region.space)
        builder = TapeBuilder(graph, region.reads)
        for t in sorted(region.stores, key=lambda t: -graph.tensors[t].size):
            store_free(builder, graph, t, loop)
        return loop, builder.tape

    def _lower(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs, memory: Mapping[int, Buffer]) -> Recipe:
        if math.prod(region.space) == 0:
            return Recipe((), ())
        signature = Signature(graph, memory)
        loop, tape = self._tape(graph, region)
        return elementwise(graph, region, knobs, signature, loop, tape)


def elementwise(graph: OperationGraph, region: Region, knobs: Knobs, signature: Signature, loop: Sequence[Var], tape: Tape) -> Recipe:
    """A kernel that runs ``tape``, part of what ``region`` does, for every value of the variables of ``loop``."""
    nested, tape, _ = nest(loop, tape, priority(tape, graph))
    build = _cpu if isinstance(knobs, PointwiseCpu) else _cuda
    return build(graph, region, knobs, signature, nested or [Var("j", 1)], tape)


def _cpu(graph: OperationGraph, region: Region, knobs: Knobs, signature: Signature, nested: list[Var], tape: Tape) -> Recipe:
    assert isinstance(knobs, PointwiseCpu)
    outer, j = nested[:-1], nested[-1]
    parts = lanes(tape, signature, j, 1, IndexWriter("int64"), IndexWriter("int64", "ql"))
    rows = math.prod(v.size for v in outer)
    flat = not outer
    chunks = 1 if flat or rows >= 64 else ceil_div(j.size, knobs.split)
    step = ceil_div(j.size, chunks)
    split = decompose("o", [*outer, Var("c", chunks)], "int64")
    fields = {
        "header": header(graph, region, knobs),
        "flat": flat,
        "setup": [*split, *parts.setup],
        "first": f"c * {step}" if chunks > 1 else "0",
        "last": f"min(c * {step} + {step}, {j.size})" if chunks > 1 else str(j.size),
        "body": parts.body,
        "after": [],
    }
    name = entry_name(chain(graph, region), fields, signature.params)
    kernel = KernelSpec("cpu/pointwise.py.j2", name, signature.params, fields)
    items = j.size if flat else rows * chunks
    return Recipe((kernel,), (Launch(0, items, signature.args, CPU_GRAIN if flat else max(1, CPU_GRAIN // step)),))


def _cuda(graph: OperationGraph, region: Region, knobs: Knobs, signature: Signature, nested: list[Var], tape: Tape) -> Recipe:
    assert isinstance(knobs, PointwiseCuda)
    outer, j = nested[:-1], nested[-1]
    width = lane_width(tape, graph, j, knobs.width)
    groups = ceil_div(j.size, width)
    items = math.prod(v.size for v in outer) * groups
    itype = index_type(tape.linears(), cuda=True) if items * width + knobs.block < 2**31 else "int64"
    writers = IndexWriter(itype), IndexWriter(itype, "ql")
    parts = lanes(tape, signature, j, width, *writers)
    fields = {
        "header": header(graph, region, knobs),
        "itype": itype,
        "items": items,
        "split": decompose("item", [*outer, Var("g", groups)], itype),
        "first": f"{itype}(g * {itype}({width}))" if groups > 1 else f"{itype}(0)",
        "size": j.size,
        "tail": j.size % width != 0,
        "width": width,
        "setup": parts.setup,
        "loads": parts.loads,
        "body": parts.body,
        "stores": parts.stores,
    }
    name = entry_name(chain(graph, region), fields, signature.params, knobs)
    kernel = KernelSpec("cuda/pointwise.py.j2", name, signature.params, fields, block=knobs.block)
    return Recipe((kernel,), (Launch(0, ceil_div(items, knobs.block), signature.args),))
