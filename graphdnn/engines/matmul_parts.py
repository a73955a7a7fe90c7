"""A matmul region taken apart, the same for every matmul engine: loop variables, the tapes of its two inputs, the epilogue, its reductions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from graphdnn.codegen.access import Index
from graphdnn.codegen.body import Signature
from graphdnn.codegen.dialect import to_dtype
from graphdnn.codegen.spec import Buffer
from graphdnn.codegen.tape import Tape, TapeBuilder
from graphdnn.dtypes import info
from graphdnn.engines.reduction_parts import Accumulator, accumulate, accumulators
from graphdnn.engines.space import nest
from graphdnn.ir.index import Var, var
from graphdnn.ir.node import Node
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.passes.regions import Region


@dataclass(frozen=True)
class Operand:
    """One input: its tape and the name of its value there. ``direct``: the tensor itself, where the tape is one load that changes nothing."""

    tape: Tape
    value: str
    direct: int | None


@dataclass(frozen=True)
class MatmulParts:
    """``batch``: collapsed batch variables, slowest first. ``m``, ``n``, ``k``: the other loops. ``calc``: register type of the sum.

    The epilogue tape reads ``c``, the sum already rounded to the result tensor; ``c_text`` gives it from an expression of the sum. It ends with
    one combining line for each of ``sums`` (accumulators ``acc0`` ...).
    """

    signature: Signature
    node: Node
    batch: list[Var]
    m: Var
    n: Var
    k: Var
    a: Operand
    b: Operand
    epilogue: Tape
    sums: list[Accumulator]
    calc: str

    @property
    def batches(self) -> int:
        """Matrices in the stack."""
        return math.prod(v.size for v in self.batch)

    def c_text(self, total: str) -> str:
        """The result element, from an expression of the sum."""
        return to_dtype(total, self.calc, self.signature.graph.tensors[self.node.output_ids[0]].dtype)

    @property
    def reduced(self) -> int:
        """Elements of one batch of results, times the batches: what each epilogue reduction runs over."""
        return self.batches * self.m.size * self.n.size


def take_apart(graph: OperationGraph, region: Region, memory: Mapping[int, Buffer], cpu: bool) -> MatmulParts:
    """The parts of a matmul region. Raises TapeTooLong."""
    signature = Signature(graph, memory)
    node = graph.nodes[region.anchors[0]]
    dim = graph.tensors[node.output_ids[0]].dim
    batch = tuple(Var(f"z{a}", d) for a, d in enumerate(dim[:-2]))
    m, n = Var("m", dim[-2]), Var("n", dim[-1])
    k = Var("k", graph.tensors[node.input("A")].dim[-1])
    calc = info(node.compute).register
    lead = tuple(var(v) for v in batch)
    a = _operand(graph, region, node.input("A"), (*lead, var(m), var(k)), calc, "a")
    b = _operand(graph, region, node.input("B"), (*lead, var(k), var(n)), calc, "b")
    sums = accumulators(graph, region.epilogue_reductions, cpu)
    epilogue = _epilogue(graph, region, sums, (*lead, var(m), var(n)))
    return _collapse_batch(signature, node, batch, (m, n, k), (a, b), epilogue, sums, calc)


def _operand(graph: OperationGraph, region: Region, tensor: int, index: Index, calc: str, prefix: str) -> Operand:
    builder = TapeBuilder(graph, region.reads, prefix=prefix)
    value = builder.operand(tensor, index, calc)
    t = graph.tensors[tensor]
    plain = len(builder.tape.items) == 1 and bool(builder.tape.loads()) and info(t.dtype).storage == calc and info(t.dtype).decode == "{}"
    return Operand(builder.tape, value, builder.tape.loads()[0].tensor if plain else None)


def _epilogue(graph: OperationGraph, region: Region, sums: list[Accumulator], index: Index) -> Tape:
    node = graph.nodes[region.anchors[0]]
    builder = TapeBuilder(graph, region.reads, {node.output_ids[0]: ("c", index)})
    reduced = {s.node.output_ids[0] for s in sums}
    for t in region.stores:
        if t not in reduced:
            builder.store(t, index)
    accumulate(builder, sums, index)
    return builder.tape


def _collapse_batch(
    signature: Signature,
    node: Node,
    batch: tuple[Var, ...],
    loops: tuple[Var, Var, Var],
    inputs: tuple[Operand, Operand],
    epilogue: Tape,
    sums: list[Accumulator],
    calc: str,
) -> MatmulParts:
    a, b = inputs
    cut = len(a.tape.items), len(a.tape.items) + len(b.tape.items)
    joined = Tape([*a.tape.items, *b.tape.items, *epilogue.items])
    # Batches keep their order (the result's, slowest first): CPU panels count rows through them.
    fresh, joined, _ = nest(batch, joined, [], names="z", last="z")
    parts = Tape(joined.items[: cut[0]]), Tape(joined.items[cut[0] : cut[1]]), Tape(joined.items[cut[1] :])
    m, n, k = loops
    return MatmulParts(
        signature, node, fresh, m, n, k, Operand(parts[0], a.value, a.direct), Operand(parts[1], b.value, b.direct), parts[2], sums, calc
    )
