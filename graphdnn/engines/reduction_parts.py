"""A reduction region taken apart, the same for every target: accumulators, the loops, the tape before and the tape after the reduction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from graphdnn.codegen.body import Signature, tape_lines
from graphdnn.codegen.dialect import IndexWriter, literal, substitute, to_dtype, to_register
from graphdnn.codegen.spec import Buffer
from graphdnn.codegen.tape import Assign, Tape, TapeBuilder
from graphdnn.dtypes import info
from graphdnn.engines.space import nest, store_free
from graphdnn.ir.index import Index, Var
from graphdnn.ir.node import Node
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.opspecs.reduction import REDUCTION, ReductionOp
from graphdnn.passes.places import places, reduced_axes, variables, whole
from graphdnn.passes.regions import Region

_LIMITS = {"float32": (-math.inf, math.inf), "float64": (-math.inf, math.inf), "int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}


@dataclass(frozen=True)
class Accumulator:
    """One reduction: its row of the table, its registers (``calc`` the node's compute type, ``hold`` what it accumulates in), the sum's name."""

    node: Node
    row: ReductionOp
    calc: str
    hold: str
    name: str
    cpu: bool

    @property
    def identity(self) -> str:
        """Where an accumulator starts."""
        named = dict(zip(("lowest", "highest"), _LIMITS[self.hold], strict=True))
        known = named.get(self.row.identity)
        return substitute(self.row.identity, self.hold, {}) if known is None else literal(known, self.hold)

    @property
    def result(self) -> str:
        """Name of the finished result."""
        return self.name.replace("acc", "y")

    def combined(self, x: str, y: str) -> str:
        """Two partial results as one."""
        if self.cpu and self.row.combine == "x + y" and self.hold.startswith("float"):
            return f"fadd_reassoc({x}, {y})"  # lets LLVM sum in vector lanes: another order, the same in every run
        return f"{self.hold}({substitute(self.row.combine, self.hold, {'x': x, 'y': y})})"

    def mapped(self, value: str) -> str:
        """The mapped element, from a value in the compute register."""
        return f"{self.hold}({substitute(self.row.map, self.hold, {'a': to_register(value, self.calc, self.hold)})})"

    def finished(self, total: str, count: int, graph: OperationGraph) -> str:
        """The result over ``count`` elements, rounded to the result's tensor."""
        text = f"{self.hold}({substitute(self.row.finalize, self.hold, {'x': total, 'n': literal(count, self.hold)})})"
        return to_dtype(to_register(text, self.hold, self.calc), self.calc, graph.tensors[self.node.output_ids[0]].dtype)


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


def accumulate(builder: TapeBuilder, sums: list[Accumulator], index: Index) -> None:
    """Adds to a tape the combining of element ``index`` of each reduction's input."""
    for s in sums:
        value = builder.operand(s.node.input_ids[0], index, s.calc)
        mapped = builder.assign(s.mapped(value), (value,))
        builder.tape.items.append(Assign(s.name, s.combined(s.name, mapped), (s.name, mapped)))


@dataclass(frozen=True)
class ReductionParts:
    """``outputs``: loops over results, the fastest named 'k'; ``reduced``: loops over what is reduced, the fastest named 'j'; both slowest first.

    ``tape`` combines one element into the accumulators; ``finish`` reads the results ``y0`` ... and stores. ``count``: elements of one result.
    """

    signature: Signature
    sums: list[Accumulator]
    outputs: list[Var]
    reduced: list[Var]
    tape: Tape
    finish: Tape
    count: int

    @property
    def size(self) -> int:
        """Number of results."""
        return math.prod(v.size for v in self.outputs)

    def contiguous(self) -> bool:
        """Whether the largest input is walked with smaller steps along the reduced loops than across the results."""
        loads = self.tape.loads()
        if not self.reduced or not loads:
            return bool(self.reduced)
        tensors = self.signature.graph.tensors
        biggest = max(loads, key=lambda x: tensors[x.tensor].size)
        across = biggest.offset.coefficient(self.outputs[-1]) if self.outputs else 0
        along = biggest.offset.coefficient(self.reduced[-1])
        return across == 0 or (along != 0 and abs(along) <= abs(across))

    def sum_rows(self) -> list[dict[str, str]]:
        """What a template needs of each accumulator."""
        tree = ("left", "right")
        return [
            {"name": s.name, "hold": s.hold, "identity": s.identity, "tree": s.combined(*tree), "slot": f"part{k}"} for k, s in enumerate(self.sums)
        ]

    def results(self, suffix: str = "") -> list[str]:
        """Lines that finish each accumulator (named with ``suffix``)."""
        return [f"{s.result} = {s.finished(s.name + suffix, self.count, self.signature.graph)}" for s in self.sums]

    def finish_lines(self, writer: IndexWriter) -> list[str]:
        """Results, then the epilogue and the stores."""
        return self.results() + tape_lines(self.finish, self.signature, writer)

    def partials(self, split: int) -> tuple[list[Buffer], int]:
        """A workspace buffer of split x results partial sums for each accumulator, and the bytes of all."""
        found, at = [], 0
        for s in self.sums:
            found.append(Buffer("workspace", -1, at))
            at = (at + self.size * split * (8 if s.hold.endswith("64") else 4) + 255) // 256 * 256
        return found, at

    def second(self, scratch: list[Buffer], writer: IndexWriter) -> tuple[Signature, list[str], list[str]]:
        """Signature, loop body and finish of the kernel that combines partial sums: number ``r`` of result ``o`` is element r * results + o."""
        again = replace(self, signature=self.signature.empty())
        body = []
        for s, b in zip(self.sums, scratch, strict=True):
            p = again.signature.buffer(s.hold, b)
            body.append(f"{s.name} = {s.combined(s.name, f'{p}[{writer.itype}(r * {writer.number(self.size)}) + o]')}")
        return again.signature, body, again.finish_lines(writer)


def take_apart(graph: OperationGraph, region: Region, memory: Mapping[int, Buffer], cpu: bool) -> ReductionParts:
    """The parts of a reduction region. Raises TapeTooLong."""
    loop = variables(region.space)
    axes = reduced_axes(graph, graph.nodes[region.anchors[0]])
    sums = accumulators(graph, region.anchors, cpu)
    before = TapeBuilder(graph, region.reads)
    accumulate(before, sums, whole(region.space))
    late = places(graph, region.anchors, region.nodes, region.space)
    result = sums[0].node.output_ids[0]
    after = TapeBuilder(graph, region.reads, {s.node.output_ids[0]: (s.result, late[s.node.output_ids[0]]) for s in sums}, prefix="w")
    for t in region.stores:
        if t in late:
            after.store(t, late[t])
        elif graph.tensors[t].dim == graph.tensors[result].dim:
            after.store(t, late[result])
        else:
            store_free(before, graph, t, loop)
    count = math.prod(region.space[a] for a in axes)
    kept = tuple(v for a, v in enumerate(loop) if a not in axes)
    gone = tuple(v for a, v in enumerate(loop) if a in axes)
    both, n = Tape([*before.tape.items, *after.tape.items]), len(before.tape.items)
    by_load = [x.offset for x in sorted(before.tape.loads(), key=lambda x: -graph.tensors[x.tensor].size)]
    outputs, both, by_load = nest(kept, both, [*by_load, *(s.offset for s in after.tape.stores())], by_load, names="o", last="k")
    reduced, both, _ = nest(gone, both, by_load, names="r")
    return ReductionParts(Signature(graph, memory), sums, outputs, reduced, Tape(both.items[:n]), Tape(both.items[n:]), count)
