"""Prints tapes as kernel text and collects the kernel's parameters on the way.

A template gets finished lines; which pointer a load reads, how its element is decoded, where a guard stands and in which integer type indices are
calculated is decided here, once for every target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graphdnn.codegen.access import Guard
from graphdnn.codegen.dialect import IndexWriter, literal, to_dtype
from graphdnn.codegen.spec import Arg, Buffer, DescriptorParam, Param, PointerParam, ScalarParam, TensorMap, TensorScalar
from graphdnn.codegen.tape import Assign, Choose, Coordinate, Item, Load, Scalar, Store, Tape
from graphdnn.dtypes import info
from graphdnn.ir.index import Linear, Var, bounds, depends, lane_step, rename
from graphdnn.ir.index import var as variable
from graphdnn.ir.opgraph import OperationGraph


class Signature:
    """Parameters of one kernel and the arguments bound to them, in order of first use."""

    def __init__(self, graph: OperationGraph, memory: Mapping[int, Buffer]) -> None:
        self.graph = graph
        self._memory = memory
        self._params: dict[str, Param] = {}
        self._args: list[Arg] = []
        self._names: dict[tuple[str, int], str] = {}

    def empty(self) -> Signature:
        """A signature of another kernel over the same buffers."""
        return Signature(self.graph, self._memory)

    def memory_of(self, tensor: int) -> Buffer:
        """The buffer of a tensor."""
        return self._memory[tensor]

    def pointer(self, tensor: int, written: bool = False) -> str:
        """Parameter name of the buffer of ``tensor``."""
        t = self.graph.tensors[tensor]
        name = self._names.get(("p", tensor))
        if name is None:
            name = self.buffer(info(t.dtype).storage, self._memory[tensor], t.alignment)
            self._names["p", tensor] = name
        if written:
            row = self._params[name]
            assert isinstance(row, PointerParam)
            self._params[name] = PointerParam(name, row.storage, row.alignment, True)
        return name

    def buffer(self, storage: str, buffer: Buffer, alignment: int = 16, written: bool = False) -> str:
        """Parameter name of any other buffer (scratch)."""
        name = f"p{sum(isinstance(p, PointerParam) for p in self._params.values())}"
        self._params[name] = PointerParam(name, storage, alignment, written)
        self._args.append(buffer)
        return name

    def scalar(self, tensor: int) -> str:
        """Parameter name of a by-value tensor, in the register type of its dtype."""
        name = self._names.get(("s", tensor))
        if name is None:
            register = info(self.graph.tensors[tensor].dtype).register
            name = self.value(register, TensorScalar(tensor, register))
            self._names["s", tensor] = name
        return name

    def value(self, register: str, arg: Arg) -> str:
        """Parameter name of any other scalar."""
        name = f"s{sum(isinstance(p, ScalarParam) for p in self._params.values())}"
        self._params[name] = ScalarParam(name, register)
        self._args.append(arg)
        return name

    def descriptor(self, arg: TensorMap) -> str:
        """Parameter name of a TMA descriptor."""
        name = f"d{sum(isinstance(p, DescriptorParam) for p in self._params.values())}"
        self._params[name] = DescriptorParam(name)
        self._args.append(arg)
        return name

    @property
    def params(self) -> tuple[Param, ...]:
        """The parameters so far."""
        return tuple(self._params.values())

    @property
    def args(self) -> tuple[Arg, ...]:
        """What is bound to them."""
        return tuple(self._args)


def decoded(signature: Signature, tensor: int, index: str) -> str:
    """Text of one element in its register type: read from memory, or the number that a constant or by-value tensor is. Two sub-byte elements share a
    byte, the even one in the low half."""
    t = signature.graph.tensors[tensor]
    row = info(t.dtype)
    if t.constant:
        return to_dtype(literal(t.value if t.value is not None else 0, row.register), row.register, t.dtype)
    if t.by_value:
        return to_dtype(signature.scalar(tensor), row.register, t.dtype)
    p = signature.pointer(tensor)
    if row.bits < 8:
        return row.decode.format(f"uint8((int32({p}[{index} >> 1]) >> int32(({index} & 1) * 4)) & int32(15))")
    return row.decode.format(f"{p}[{index}]")


def condition(guards: Sequence[Guard], writer: IndexWriter) -> str:
    """Text that is true where all guards hold; empty where that is always so."""
    parts = []
    for g in guards:
        lo, hi = bounds(g.value)
        text = writer(g.value)
        if g.lo > lo:
            parts.append(f"{text} >= {writer.number(g.lo)}")
        if g.hi <= hi:
            parts.append(f"{text} < {writer.number(g.hi)}")
    return " and ".join(parts)


def item_lines(item: Item, signature: Signature, writer: IndexWriter) -> list[str]:
    """Text of one instruction."""
    graph = signature.graph
    if isinstance(item, Assign):
        return [f"{item.name} = {item.expr}"]
    if isinstance(item, Scalar):
        return [f"{item.name} = {decoded(signature, item.tensor, '')}"]
    if isinstance(item, Coordinate):
        return [f"{item.name} = {item.register}({writer(item.value)})"]
    if isinstance(item, Choose):
        test = condition((item.guard,), writer)
        return [f"{item.name} = {item.yes} if {test} else {item.no}" if test else f"{item.name} = {item.yes}"]
    if isinstance(item, Load):
        text = decoded(signature, item.tensor, writer(item.offset))
        test = condition(item.guards, writer)
        return [
            f"{item.name} = {text} if {test} else {literal(0, info(graph.tensors[item.tensor].dtype).register)}" if test else f"{item.name} = {text}"
        ]
    text = f"{signature.pointer(item.tensor, written=True)}[{writer(item.offset)}] = {_encoded(graph, item)}"
    test = condition(item.guards, writer)
    return [f"if {test}:", f"    {text}"] if test else [text]


def _encoded(graph: OperationGraph, item: Store) -> str:
    return info(graph.tensors[item.tensor].dtype).encode.format(item.value)


def tape_lines(tape: Tape, signature: Signature, writer: IndexWriter) -> list[str]:
    """Text of a whole tape, element by element; hoisted index lines first."""
    lines = [line for item in tape.items for line in item_lines(item, signature, writer)]
    return [*writer.lines, *lines]


@dataclass
class Lanes:
    """A tape for ``width`` consecutive values of one loop variable: what stands before the lane loop, in it and after it.

    ``loads`` / ``stores``: (array, storage, pointer, offset) of accesses that are contiguous in the variable and go through vload / vstore.
    """

    width: int
    setup: list[str] = field(default_factory=list)
    loads: list[dict[str, str]] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    stores: list[dict[str, str]] = field(default_factory=list)


def lane_width(tape: Tape, graph: OperationGraph, j: Var, limit: int = 16) -> int:
    """Elements of ``j`` that one 16-byte access of the widest contiguous tensor covers, fewer where the largest tensors would not stay aligned from
    row to row: neighbouring threads that take single elements read better than lanes that do not fit a vector."""
    accesses = [i for i in tape.items if isinstance(i, (Load, Store))]
    wide = [i for i in accesses if not i.guards and lane_step(i.offset, j, 2) == 1]
    bits = [info(graph.tensors[i.tensor].dtype).bits for i in wide]
    width = min(16 * 8 // max(bits), limit) if bits and min(bits) >= 8 else 1
    largest = max((graph.tensors[i.tensor].size for i in wide), default=0)
    decisive = [i for i in wide if graph.tensors[i.tensor].size == largest]
    while width > 1 and not all(_contiguous(i, graph, j, width) for i in decisive):
        width //= 2
    return width


def _contiguous(item: Load | Store, graph: OperationGraph, j: Var, width: int) -> bool:
    t = graph.tensors[item.tensor]
    size = info(t.dtype).bits // 8
    if size == 0 or item.guards or lane_step(item.offset, j, width) != 1 or width * size not in (4, 8, 16) or t.alignment < width * size:
        return False
    others = [c for a, c in item.offset.terms if lane_step(Linear(((a, 1),)), j, width) == 0]
    return item.offset.const % width == 0 and len(others) == len(item.offset.terms) - 1 and all(c % width == 0 for c in others)


def lanes(tape: Tape, signature: Signature, j: Var, width: int, outer: IndexWriter, inner: IndexWriter, tag: str = "") -> Lanes:
    """Split ``tape`` over lanes. Before the lane loop ``j`` is the first lane's value; in it the variable is named ``jl``. ``tag``: part of the names
    of vector arrays, where a kernel has several lane loops."""
    result = Lanes(width)
    lane = {j: variable(Var("jl", j.size))}
    graph = signature.graph
    for item in tape.items:
        moving = any(depends(e, j) for e in _linears(item))
        if isinstance(item, (Load, Store)) and width > 1 and _contiguous(item, graph, j, width):
            row = info(graph.tensors[item.tensor].dtype)
            written = isinstance(item, Store)
            rows = result.stores if written else result.loads
            array = f"{'out' if written else 'in'}{tag}_{len(rows)}"
            rows.append({"array": array, "storage": row.storage, "pointer": signature.pointer(item.tensor, written), "offset": outer(item.offset)})
            result.body.append(
                f"{array}[l] = {_encoded(graph, item)}" if isinstance(item, Store) else f"{item.name} = {row.decode.format(f'{array}[l]')}"
            )
        elif isinstance(item, (Load, Scalar, Coordinate)) and not moving:
            result.setup.extend(item_lines(item, signature, outer))
        else:
            result.body.extend(item_lines(_renamed(item, lane), signature, inner))
    result.setup[:0] = outer.lines
    result.body[:0] = inner.lines
    return result


def _linears(item: Item) -> list[Linear]:
    return Tape([item]).linears()


def _renamed(item: Item, names: dict[Var, Linear]) -> Item:
    return Tape([item]).mapped(lambda e: rename(e, names)).items[0]
