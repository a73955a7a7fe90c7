"""Engine ``reduction``: reductions of one space over the same axes, with what is calculated before (prologue) and after (epilogue) in one kernel.

A block has ``tx`` outputs times ``ty`` partners that share the reduced range and meet in a tree in shared memory, in a fixed order. Where the outputs
would not fill the device the range is split too: partial results go to the workspace and a second kernel adds them, in order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from graphdnn.codegen.access import Index
from graphdnn.codegen.body import Signature, lane_width, lanes, tape_lines
from graphdnn.codegen.dialect import IndexWriter, decompose, index_type, literal, substitute, to_dtype, to_register
from graphdnn.codegen.spec import Buffer, KernelSpec, Launch, Recipe
from graphdnn.codegen.tape import Assign, Tape, TapeBuilder
from graphdnn.device import DeviceProps
from graphdnn.dtypes import info
from graphdnn.engines.base import Engine, Knobs, ceil_div, chain, entry_name, fits, header, no_packed_outputs, power_of_two, roofline
from graphdnn.engines.space import index_of, nest, store_broadcast, variables
from graphdnn.ir.index import ZERO, Var, var
from graphdnn.ir.node import Node
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.opspecs.reduction import REDUCTION, ReductionOp
from graphdnn.passes.regions import Region, reduced_axes
from graphdnn.status import OK, Status, reject

CPU_CHUNK = 16384
"""Elements that one item of a split reduction takes on a CPU."""
COLUMNS = 64
"""Neighbouring outputs that one CPU item accumulates at once where the reduced axes are not the contiguous ones."""


@dataclass(frozen=True)
class ReductionCpu(Knobs):
    """``columns``: neighbouring outputs accumulated together (1: one at a time). ``split``: parts of the reduced range."""

    columns: int = 1
    split: int = 1


@dataclass(frozen=True)
class ReductionCuda(Knobs):
    """``tx`` outputs times ``ty`` partners a block; ``rows``: neighbours walk the reduced range (else the outputs); ``split``: parts of it."""

    tx: int
    ty: int
    rows: bool
    split: int = 1
    width: int = 16


@dataclass(frozen=True)
class Accumulator:
    """One reduction: its row, its registers (``calc`` the node's compute type, ``hold`` what is accumulated in), the name of the sum."""

    node: Node
    row: ReductionOp
    calc: str
    hold: str
    name: str
    cpu: bool = False

    @property
    def identity(self) -> str:
        """Where an accumulator starts."""
        return identity_text(self.row, self.hold)

    def combined(self, x: str, y: str) -> str:
        """Two partial results as one."""
        if self.cpu and self.row.combine == "x + y" and self.hold.startswith("float"):
            return f"fadd_reassoc({x}, {y})"  # lets LLVM sum in vector lanes: another order, the same in every run
        return f"{self.hold}({substitute(self.row.combine, self.hold, {'x': x, 'y': y})})"

    def mapped(self, value: str) -> str:
        """The mapped element, from a value in the compute register."""
        return substitute(self.row.map, self.hold, {"a": to_register(value, self.calc, self.hold)})

    def finished(self, x: str, count: int) -> str:
        """The result over ``count`` elements, in the compute register."""
        text = f"{self.hold}({substitute(self.row.finalize, self.hold, {'x': x, 'n': literal(count, self.hold)})})"
        return to_register(text, self.hold, self.calc)


def identity_text(row: ReductionOp, register: str) -> str:
    """The identity of a reduction as a literal of type ``register``."""
    limits = {"float32": (-math.inf, math.inf), "float64": (-math.inf, math.inf), "int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}
    named = {"lowest": limits[register][0], "highest": limits[register][1]}
    return literal(named[row.identity], register) if row.identity in named else substitute(row.identity, register, {})


def accumulators(graph: OperationGraph, nodes: tuple[int, ...], cpu: bool) -> list[Accumulator]:
    """One accumulator a reduction node. A CPU sums FLOAT in double precision, which memory speed hides."""
    result = []
    for k, i in enumerate(nodes):
        node = graph.nodes[i]
        calc = info(node.compute).register
        row = REDUCTION[node.attr("mode")]
        hold = "int64" if row.wide and calc == "int32" else "float64" if cpu and calc == "float32" and row.combine == "x + y" else calc
        result.append(Accumulator(node, row, calc, hold, f"acc{k}", cpu))
    return result


@dataclass
class _Parts:
    """A reduction region taken apart: loops, tapes, accumulators."""

    signature: Signature
    sums: list[Accumulator]
    outputs: list[Var]
    reduced: list[Var]
    tape: Tape
    finish: Tape
    count: int
    kept: tuple[Var, ...] = field(default=())


class Reduction(Engine):
    """See the module."""

    id: ClassVar[int] = 1
    name: ClassVar[str] = "reduction"

    def _accepts(self, graph: OperationGraph, region: Region) -> Status:
        if region.kind != "reduction":
            return reject(f"reduction: the region has no reduction as its anchor ({region.kind})")
        status = no_packed_outputs(graph, region)
        return status and fits(lambda: self._parts(graph, region, {t: Buffer("tensor", t) for t in (*region.reads, *region.stores)}, False))

    def _candidates(self, graph: OperationGraph, region: Region, device: DeviceProps) -> tuple[Knobs, ...]:
        parts = self._parts(graph, region, {t: Buffer("tensor", t) for t in (*region.reads, *region.stores)}, device.kind == "cpu")
        outputs, reduced = math.prod(v.size for v in parts.outputs), math.prod(v.size for v in parts.reduced)
        if outputs * reduced == 0:
            return (ReductionCpu(),) if device.kind == "cpu" else (ReductionCuda(1, 32, True),)
        contiguous = self._rows_contiguous(parts)
        if device.kind == "cpu":
            split = 1 if outputs >= 64 or reduced < 2 * CPU_CHUNK else ceil_div(reduced, CPU_CHUNK)
            columns = 1 if contiguous or not parts.outputs or parts.outputs[-1].size < 8 or split > 1 else COLUMNS
            return tuple(dict.fromkeys((ReductionCpu(columns, split), ReductionCpu(1, 1))))
        threads = 16 if device.kind == "cudasim" else 256
        return tuple(dict.fromkeys(self._shapes(parts, contiguous, outputs, reduced, threads, device.sm_count)))

    def _shapes(self, parts: _Parts, contiguous: bool, outputs: int, reduced: int, threads: int, sms: int) -> list[ReductionCuda]:
        width = lane_width(parts.tape, parts.signature.graph, parts.reduced[-1]) if contiguous and parts.reduced else 1
        shapes = []
        for rows, limit in ((contiguous, threads), (contiguous, threads // 4), (not contiguous, threads)):
            ty = min(limit, power_of_two(ceil_div(reduced, width))) if rows else min(limit, power_of_two(reduced), max(limit // 32, 2))
            tx = max(1, min(threads // ty, power_of_two(outputs)))
            blocks = ceil_div(outputs, tx)
            split = min(ceil_div(2 * sms, blocks), ceil_div(reduced, ty * width * 4)) if blocks < sms and reduced > ty * width * 8 else 1
            shapes += [ReductionCuda(tx, ty, rows, split), ReductionCuda(tx, ty, rows, 1)]
        return shapes

    def _rows_contiguous(self, parts: _Parts) -> bool:
        loads = parts.tape.loads()
        if not parts.reduced or not loads:
            return bool(parts.reduced)
        graph = parts.signature.graph
        biggest = max(loads, key=lambda x: graph.tensors[x.tensor].size)
        across = biggest.offset.coefficient(parts.outputs[-1]) if parts.outputs else 0
        along = biggest.offset.coefficient(parts.reduced[-1])
        return across == 0 or (along != 0 and abs(along) <= abs(across))

    def _check(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> Status:
        if isinstance(knobs, ReductionCuda) and knobs.tx * knobs.ty > 1024:
            return reject(f"reduction: {knobs.tx} x {knobs.ty} threads; a block has at most 1024")
        return OK

    def _cost(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs) -> float:
        """Equal for shapes that fill the device, so that the order of the candidates decides; worse where few blocks would starve it."""
        seconds = roofline(graph, region, device)
        outputs = max(graph.tensors[graph.nodes[region.anchors[0]].output_ids[0]].size, 1)
        if isinstance(knobs, ReductionCpu):
            return seconds * max(1.0, device.cores / (outputs * knobs.split))
        assert isinstance(knobs, ReductionCuda)
        blocks = ceil_div(outputs, knobs.tx) * knobs.split
        return seconds * max(1.0, device.sm_count / blocks) + (2e-6 if knobs.split > 1 else 0.0)

    # -- taking apart ---------------------------------------------------------------------------------------------------------------------
    def _parts(self, graph: OperationGraph, region: Region, memory: Mapping[int, Buffer], cpu: bool) -> _Parts:
        signature = Signature(graph, memory)
        loop = variables(region.space)
        index = index_of(loop)
        first = graph.nodes[region.anchors[0]]
        axes = reduced_axes(graph, first)
        sums = accumulators(graph, region.anchors, cpu)
        builder = TapeBuilder(graph, region.reads)
        for s in sums:
            value = builder.operand(s.node.input_ids[0], index, s.calc)
            mapped = builder.assign(f"{s.hold}({s.mapped(value)})", (value,))
            builder.tape.items.append(Assign(s.name, s.combined(s.name, mapped), (s.name, mapped)))
        results = {s.node.output_ids[0]: (s.name.replace("acc", "y"), self._result_index(graph, s.node, loop, axes)) for s in sums}
        epilogue = TapeBuilder(graph, region.reads, results, prefix="w")
        after = self._after(graph, region)
        for t in region.stores:
            if t in after:
                epilogue.store(t, results[first.output_ids[0]][1])
            else:
                store_broadcast(builder, graph, t, loop)
        count = math.prod(region.space[a] for a in axes)
        return self._loops(signature, sums, builder.tape, epilogue.tape, loop, axes, count)

    def _after(self, graph: OperationGraph, region: Region) -> set[int]:
        """Tensors that depend on a result of the region's reductions."""
        found = {t for a in region.anchors for t in graph.nodes[a].output_ids}
        for i in region.nodes:
            if found & set(graph.nodes[i].input_ids) and i not in region.anchors:
                found.update(graph.nodes[i].output_ids)
        return found

    def _result_index(self, graph: OperationGraph, node: Node, loop: tuple[Var, ...], axes: tuple[int, ...]) -> Index:
        kept = [var(v) for a, v in enumerate(loop) if a not in axes]
        if len(graph.tensors[node.output_ids[0]].dim) == len(loop):
            return tuple(ZERO if a in axes else var(v) for a, v in enumerate(loop))
        return tuple(kept)

    def _loops(
        self, signature: Signature, sums: list[Accumulator], tape: Tape, finish: Tape, loop: tuple[Var, ...], axes: tuple[int, ...], count: int
    ) -> _Parts:
        graph = signature.graph
        kept = tuple(v for a, v in enumerate(loop) if a not in axes)
        gone = tuple(v for a, v in enumerate(loop) if a in axes)
        both = Tape([*tape.items, *finish.items])
        by_load = [x.offset for x in sorted(tape.loads(), key=lambda x: -graph.tensors[x.tensor].size)]
        outputs, both, _ = nest(kept, both, [*by_load, *(s.offset for s in finish.stores())], names="o", last="k")
        reduced, both, _ = nest(gone, both, [*(x.offset for x in Tape(both.items[: len(tape.items)]).loads())], names="r")
        n = len(tape.items)
        return _Parts(signature, sums, outputs, reduced, Tape(both.items[:n]), Tape(both.items[n:]), count, kept)

    # -- lowering -------------------------------------------------------------------------------------------------------------------------
    def _lower(self, graph: OperationGraph, region: Region, device: DeviceProps, knobs: Knobs, memory: Mapping[int, Buffer]) -> Recipe:
        parts = self._parts(graph, region, memory, isinstance(knobs, ReductionCpu))
        outputs = math.prod(v.size for v in parts.outputs)
        if outputs == 0:
            return Recipe((), ())
        words = chain(graph, region)
        title = header(graph, region, knobs)
        if isinstance(knobs, ReductionCpu):
            return _lower_cpu(parts, knobs, outputs, words, title)
        assert isinstance(knobs, ReductionCuda)
        return _lower_cuda(parts, knobs, outputs, words, title)


def _sum_rows(parts: _Parts) -> list[dict[str, str]]:
    """What a template needs of each accumulator."""
    return [
        {"name": s.name, "hold": s.hold, "identity": s.identity, "tree": s.combined("left", "right"), "slot": f"part{k}"}
        for k, s in enumerate(parts.sums)
    ]


def _finish_lines(parts: _Parts, writer: IndexWriter) -> list[str]:
    """Results from the accumulators, rounded to their tensors, then the epilogue and the stores."""
    graph = parts.signature.graph
    lines = []
    for s in parts.sums:
        out = graph.tensors[s.node.output_ids[0]]
        lines.append(f"{s.name.replace('acc', 'y')} = {to_dtype(s.finished(s.name, parts.count), s.calc, out.dtype)}")
    return lines + tape_lines(parts.finish, parts.signature, writer)


def _partials(parts: _Parts, outputs: int, split: int) -> tuple[list[Buffer], int]:
    """A workspace buffer of split x outputs partial results for each accumulator, and the bytes of all."""
    buffers, at = [], 0
    for s in parts.sums:
        buffers.append(Buffer("workspace", -1, at))
        at = (at + outputs * split * (8 if s.hold.endswith("64") else 4) + 255) // 256 * 256
    return buffers, at


def _second(parts: _Parts, outputs: int, split: int, scratch: list[Buffer], writer: IndexWriter) -> tuple[Signature, list[str], list[str]]:
    """Signature, loop body and finish of the kernel that combines partial results: partial ``r`` of output ``o`` is element r * outputs + o."""
    signature = parts.signature.empty()
    body = []
    for s, b in zip(parts.sums, scratch, strict=True):
        p = signature.buffer(s.hold, b)
        body.append(f"{s.name} = {s.combined(s.name, f'{p}[{writer.itype}(r * {writer.number(outputs)}) + o]')}")
    again = _Parts(signature, parts.sums, parts.outputs, parts.reduced, parts.tape, parts.finish, parts.count)
    return signature, body, _finish_lines(again, writer)


def _lower_cpu(parts: _Parts, knobs: ReductionCpu, outputs: int, words: str, title: list[str]) -> Recipe:
    outer, inner = parts.reduced[:-1], (parts.reduced[-1] if parts.reduced else Var("j", 1))
    rows = math.prod(v.size for v in outer)
    sums = _sum_rows(parts)
    fields: dict[str, Any] = {"header": title, "sums": sums, "outer": rows, "inner": inner.size, "split": knobs.split, "columns": knobs.columns}
    steps: tuple[Launch, ...]
    if knobs.columns > 1:
        k = parts.outputs[-1]
        tiles = ceil_div(k.size, knobs.columns)
        fields |= {"tile_split": decompose("o", [*parts.outputs[:-1], Var("t", tiles)], "int64"), "last": k.size}
        fields["first"] = f"t * {knobs.columns}" if tiles > 1 else "0"
        fields["reduce_split"] = decompose("r", [*outer, inner], "int64")
        lane = lanes(parts.tape, parts.signature, k, 1, IndexWriter("int64"), IndexWriter("int64", "ql"))
        finish = lanes(parts.finish, parts.signature, k, 1, IndexWriter("int64", "qe"), IndexWriter("int64", "qf"))
        fields |= {
            "setup": lane.setup,
            "body": lane.body,
            "finish_setup": finish.setup,
            "finish": _results(parts) + finish.body,
            "total": rows * inner.size,
        }
        fields["body"] = [_lane_sums(line, parts) for line in fields["body"]]
        items, template = math.prod(v.size for v in parts.outputs[:-1]) * tiles, "cpu/reduction_columns.py.j2"
        name = entry_name(words, fields, parts.signature.params)
        kernel = KernelSpec(template, name, parts.signature.params, fields)
        return Recipe((kernel,), (Launch(0, items, parts.signature.args, max(1, CPU_CHUNK // max(1, knobs.columns * rows * inner.size))),))
    writer, inner_writer = IndexWriter("int64"), IndexWriter("int64", "ql")
    lane = lanes(parts.tape, parts.signature, inner, 1, writer, inner_writer)
    split_rows = knobs.split > 1 and rows >= knobs.split
    step = ceil_div(rows if split_rows else inner.size, knobs.split)
    fields |= {
        "output_split": decompose("o", parts.outputs, "int64"),
        "outer_split": decompose("ro", list(outer), "int64"),
        "setup": lane.setup,
        "body": lane.body,
        "outer_range": f"s * {step}, min(s * {step} + {step}, {rows})" if split_rows else str(rows),
        "inner_range": f"s * {step}, min(s * {step} + {step}, {inner.size})" if knobs.split > 1 and not split_rows else str(inner.size),
        "outputs": outputs,
    }
    if knobs.split == 1:
        fields |= {"finish": _finish_lines(parts, IndexWriter("int64", "qe")), "partials": []}
        kernel = KernelSpec("cpu/reduction.py.j2", entry_name(words, fields, parts.signature.params), parts.signature.params, fields)
        return Recipe((kernel,), (Launch(0, outputs, parts.signature.args, max(1, CPU_CHUNK // max(1, rows * inner.size))),))
    scratch, size = _partials(parts, outputs, knobs.split)
    fields |= {"finish": [], "partials": [parts.signature.buffer(s.hold, b, written=True) for s, b in zip(parts.sums, scratch, strict=True)]}
    first = KernelSpec("cpu/reduction.py.j2", entry_name(words, fields, parts.signature.params), parts.signature.params, fields)
    signature, body, finish_lines = _second(parts, outputs, knobs.split, scratch, IndexWriter("int64", "qe"))
    after = {"header": title, "sums": sums, "split": knobs.split, "output_split": fields["output_split"], "body": body, "finish": finish_lines}
    second = KernelSpec("cpu/reduction_finish.py.j2", entry_name(words + "_finish", after, signature.params), signature.params, after)
    steps = (Launch(0, outputs * knobs.split, parts.signature.args), Launch(1, outputs, signature.args, 256))
    return Recipe((first, second), steps, size)


def _results(parts: _Parts) -> list[str]:
    """Results from per-lane accumulators of a column tile."""
    graph = parts.signature.graph
    lines = []
    for s in parts.sums:
        out = graph.tensors[s.node.output_ids[0]]
        lines.append(f"{s.name.replace('acc', 'y')} = {to_dtype(s.finished(f'{s.name}[jl - first]', parts.count), s.calc, out.dtype)}")
    return lines


def _lane_sums(line: str, parts: _Parts) -> str:
    """Accumulate per lane: ``acc0`` becomes ``acc0[jl - first]``."""
    return re.sub(r"\bacc(\d+)\b", r"acc\1[jl - first]", line)


def _lower_cuda(parts: _Parts, knobs: ReductionCuda, outputs: int, words: str, title: list[str]) -> Recipe:
    graph = parts.signature.graph
    inner = parts.reduced[-1] if parts.reduced else Var("j", 1)
    width = lane_width(parts.tape, graph, inner, knobs.width)
    while inner.size % width:
        width //= 2
    groups = math.prod(v.size for v in parts.reduced[:-1]) * (inner.size // width)
    step = ceil_div(groups, knobs.split)
    blocks = ceil_div(outputs, knobs.tx) * knobs.split
    threads = knobs.tx * knobs.ty
    wide = max(outputs * knobs.split, blocks * threads, groups + threads)
    itype = index_type([*parts.tape.linears(), *parts.finish.linears()], cuda=True) if wide < 2**31 else "int64"
    lane = lanes(parts.tape, parts.signature, inner, width, IndexWriter(itype), IndexWriter(itype, "ql"))
    decls = {
        "header": title,
        "itype": itype,
        "tx": knobs.tx,
        "ty": knobs.ty,
        "rows": knobs.rows,
        "stride": 1 if knobs.rows else knobs.tx,
        "half": knobs.ty // 2,
        "sums": _sum_rows(parts),
        "output_split": decompose("o", parts.outputs, itype),
        "outputs": outputs,
    }
    fields = decls | {
        "split": knobs.split,
        "step": step,
        "groups": groups,
        "reduce_split": decompose("r", [*parts.reduced[:-1], Var("g", inner.size // width)], itype),
        "first": f"{itype}(g * {itype}({width}))" if inner.size // width > 1 else f"{itype}(0)",
        "width": width,
        "loads": lane.loads,
        "stores": lane.stores,
        "setup": lane.setup,
        "body": lane.body,
    }
    if knobs.split == 1:
        fields |= {"finish": _finish_lines(parts, IndexWriter(itype, "qe")), "partials": []}
        kernel = KernelSpec("cuda/reduction.py.j2", entry_name(words, fields, parts.signature.params), parts.signature.params, fields, block=threads)
        return Recipe((kernel,), (Launch(0, blocks, parts.signature.args),))
    scratch, size = _partials(parts, outputs, knobs.split)
    fields |= {"finish": [], "partials": [parts.signature.buffer(s.hold, b, written=True) for s, b in zip(parts.sums, scratch, strict=True)]}
    first = KernelSpec("cuda/reduction.py.j2", entry_name(words, fields, parts.signature.params), parts.signature.params, fields, block=threads)
    signature, body, finish = _second(parts, outputs, knobs.split, scratch, IndexWriter(itype, "qe"))
    ty = min(64 if threads >= 64 else threads, power_of_two(knobs.split))
    tx = max(1, min(threads // ty, power_of_two(outputs)))
    after = decls | {"tx": tx, "ty": ty, "rows": False, "stride": tx, "half": ty // 2}
    after |= {"split": 1, "step": knobs.split, "groups": knobs.split, "reduce_split": [], "first": f"{itype}(0)", "width": 1}
    after |= {"loads": [], "stores": [], "setup": [], "body": body, "finish": finish, "partials": []}
    second = KernelSpec("cuda/reduction.py.j2", entry_name(words + "_finish", after, signature.params), signature.params, after, block=tx * ty)
    return Recipe((first, second), (Launch(0, blocks, parts.signature.args), Launch(1, ceil_div(outputs, tx), signature.args)), size)
