"""Tapes: single-assignment programs over scalars, built by walking an operation graph back from the values that a kernel needs.

A tape has loads (tensor, element offset as a linear expression of the loop variables, guards), assignments, and stores. Movement ops leave no
instruction: they only change the index with which their input is asked for. A value asked for twice with one index is calculated once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from graphdnn.codegen.access import MOVES, Guard, Piece
from graphdnn.codegen.dialect import literal, substitute, to_dtype, to_register
from graphdnn.dtypes import info
from graphdnn.ir.index import ZERO, Index, Linear, bounds, broadcast, equal, offset
from graphdnn.ir.node import Node
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.opspecs import rng
from graphdnn.opspecs.pointwise import POINTWISE

MAX_ITEMS = 600
"""A longer tape is not built: compile time grows with its square."""


class TapeTooLong(Exception):
    """More than MAX_ITEMS instructions; ``tensor`` could be stored to cut the tape."""

    def __init__(self, tensor: int) -> None:
        super().__init__(tensor)
        self.tensor = tensor


@dataclass(frozen=True, slots=True)
class Load:
    """name = element of ``tensor`` at ``offset`` where all guards hold, else zero; in the register type of its dtype."""

    name: str
    tensor: int
    offset: Linear
    guards: tuple[Guard, ...] = ()


@dataclass(frozen=True, slots=True)
class Scalar:
    """name = by-value ``tensor``, rounded to its dtype, in the register type of that."""

    name: str
    tensor: int


@dataclass(frozen=True, slots=True)
class Coordinate:
    """name = the logical coordinate ``value``."""

    name: str
    register: str
    value: Linear


@dataclass(frozen=True, slots=True)
class Assign:
    """name = expr; ``expr`` is finished text of the common dialect that reads the names ``reads``."""

    name: str
    expr: str
    reads: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Choose:
    """name = yes if guard else no."""

    name: str
    guard: Guard
    yes: str
    no: str


@dataclass(frozen=True, slots=True)
class Store:
    """Write ``value`` (already rounded, in the register type of the tensor's dtype) where all guards hold."""

    tensor: int
    offset: Linear
    value: str
    guards: tuple[Guard, ...] = ()


Item = Load | Scalar | Coordinate | Assign | Choose | Store


def _item_linears(item: Item) -> list[Linear]:
    if isinstance(item, (Load, Store)):
        return [item.offset, *(g.value for g in item.guards)]
    if isinstance(item, Coordinate):
        return [item.value]
    return [item.guard.value] if isinstance(item, Choose) else []


def _guard_map(g: Guard, change: Callable[[Linear], Linear]) -> Guard:
    return replace(g, value=change(g.value))


def map_linears(item: Item, change: Callable[[Linear], Linear]) -> Item:
    """``item`` with every index expression changed."""
    if isinstance(item, (Load, Store)):
        return replace(item, offset=change(item.offset), guards=tuple(_guard_map(g, change) for g in item.guards))
    if isinstance(item, Coordinate):
        return replace(item, value=change(item.value))
    return replace(item, guard=_guard_map(item.guard, change)) if isinstance(item, Choose) else item


def reads_of(item: Item) -> tuple[str, ...]:
    """Names that an item reads."""
    if isinstance(item, Assign):
        return item.reads
    if isinstance(item, Choose):
        return (item.yes, item.no)
    return (item.value,) if isinstance(item, Store) else ()


@dataclass
class Tape:
    """The instructions, in order."""

    items: list[Item] = field(default_factory=list)

    def linears(self) -> list[Linear]:
        """Every index expression on the tape."""
        return [e for item in self.items for e in _item_linears(item)]

    def mapped(self, change: Callable[[Linear], Linear]) -> Tape:
        """The tape with every index expression changed."""
        return Tape([map_linears(i, change) for i in self.items])

    def loads(self) -> list[Load]:
        """The loads, in order."""
        return [i for i in self.items if isinstance(i, Load)]

    def stores(self) -> list[Store]:
        """The stores, in order."""
        return [i for i in self.items if isinstance(i, Store)]


class TapeBuilder:
    """Builds one tape. ``memory``: tensors that are read from memory; everything else is calculated from its producer, except the ``bound``
    values (an anchor's result), which already have a name at one index."""

    def __init__(
        self,
        graph: OperationGraph,
        memory: Iterable[int],
        bound: Mapping[int, tuple[str, Index]] | None = None,
        prefix: str = "v",
    ) -> None:
        self.graph = graph
        self.tape = Tape()
        self._memory = frozenset(memory)
        self._bound = dict(bound or {})
        self._prefix = prefix
        self._values: dict[tuple[int, Index, tuple[Guard, ...]], str] = {}
        self._converted: dict[tuple[str, str], str] = {}

    def _name(self) -> str:
        return f"{self._prefix}{len(self.tape.items)}"

    def _add(self, item: Item, tensor: int) -> None:
        if len(self.tape.items) >= MAX_ITEMS:
            raise TapeTooLong(tensor)
        self.tape.items.append(item)

    def assign(self, expr: str, reads: tuple[str, ...], tensor: int = -1) -> str:
        """A new name for ``expr``."""
        name = self._name()
        self._add(Assign(name, expr, reads), tensor)
        return name

    def value(self, tensor: int, index: Index, guards: tuple[Guard, ...] = ()) -> str:
        """Name of element ``index`` of ``tensor``, in the register type of its dtype; ``guards`` say where the result matters."""
        key = (tensor, index, guards)
        if key not in self._values:
            self._values[key] = self._make(tensor, index, guards)
        return self._values[key]

    def _make(self, tensor: int, index: Index, guards: tuple[Guard, ...]) -> str:
        t = self.graph.tensors[tensor]
        if tensor in self._bound:
            name, at = self._bound[tensor]
            assert equal(at, index), f"anchor value {tensor} asked for at another index than it has"
            return name
        if t.constant:
            register = info(t.dtype).register
            return self.assign(to_dtype(literal(t.value if t.value is not None else 0, register), register, t.dtype), (), tensor)
        if t.by_value and tensor not in self.graph.producer:
            name = self._name()
            self._add(Scalar(name, tensor), tensor)
            return name
        if tensor in self._memory or tensor not in self.graph.producer:
            name = self._name()
            self._add(Load(name, tensor, offset(index, t.strides), guards), tensor)
            return name
        node = self.graph.nodes[self.graph.producer[tensor]]
        if node.op in MOVES:
            return self._moved(node, tensor, index, guards)
        return self._random(node, tensor, index) if node.op == "RNG" else self._pointwise(node, tensor, index, guards)

    def _moved(self, node: Node, tensor: int, index: Index, guards: tuple[Guard, ...]) -> str:
        target = self.graph.tensors[tensor].dtype
        pieces = MOVES[node.op](node, self.graph, index)
        names = [self._piece(p, guards, target) for p in pieces]
        result = names[-1] if names else self.assign(literal(0, info(target).register), (), tensor)
        fill = node.attr("fill")
        if fill is not None:  # what lies outside of the last piece; else the pieces cover everything
            register = info(target).register
            result = self._within(pieces[-1].guards, result, self.assign(to_dtype(literal(fill, register), register, target), (), tensor), tensor)
        for piece, name in zip(reversed(pieces[:-1]), reversed(names[:-1]), strict=True):
            assert piece.guards, "several pieces are told apart by guards"
            result = self._within(piece.guards, name, result, tensor)
        return result

    def _within(self, guards: tuple[Guard, ...], inside: str, outside: str, tensor: int) -> str:
        """``inside`` where all guards hold, else ``outside``."""
        for g in guards:
            if not _always(g):
                chosen = self._name()
                self._add(Choose(chosen, g, inside, outside), tensor)
                inside = chosen
        return inside

    def _piece(self, piece: Piece, guards: tuple[Guard, ...], target: object) -> str:
        own = (*guards, *(g for g in piece.guards if not _always(g)))
        name = self.value(piece.tensor, piece.index, own)
        source = self.graph.tensors[piece.tensor].dtype
        if source is target:
            return name
        expr = to_dtype(name, info(source).register, target)  # type: ignore[arg-type]
        return name if expr == name else self.assign(expr, (name,), piece.tensor)

    def operand(self, tensor: int, index: Index, register: str, guards: tuple[Guard, ...] = ()) -> str:
        """Element of ``tensor`` (broadcast to the space of ``index``) converted to a compute register."""
        t = self.graph.tensors[tensor]
        name = self.value(tensor, broadcast(index, t.dim), guards)
        key = (name, register)
        if key not in self._converted:
            expr = to_register(name, info(t.dtype).register, register)
            self._converted[key] = name if expr == name else self.assign(expr, (name,), tensor)
        return self._converted[key]

    def guarded(self, tensor: int, index: Index, register: str, guards: tuple[Guard, ...]) -> str:
        """Like :meth:`operand`, and zero where a guard fails: also where the value is calculated, and f(0) would not be 0."""
        name = self.operand(tensor, index, register, guards)
        t = self.graph.tensors[tensor]
        loaded = (tensor in self._memory or tensor not in self.graph.producer) and not (t.by_value or t.constant)
        if loaded or not guards:
            return name
        return self._within(guards, name, self.assign(literal(0, register), (), tensor), tensor)

    def _pointwise(self, node: Node, tensor: int, index: Index, guards: tuple[Guard, ...]) -> str:
        register = info(node.compute).register
        row = POINTWISE[node.attr("mode")]
        operands = [self.operand(t, index, register, guards) for t in node.input_ids]
        names = dict(zip("abc", operands, strict=False))
        names |= {k: plain_number(v) for k, v in row.values(dict(node.attrs), node.compute).items()}
        expr = row.expression(node.compute)
        if "axis" in row.attrs:
            coordinate = self._name()
            self._add(Coordinate(coordinate, register, index[node.attr("axis", 0) % len(index)]), tensor)
            names["index"] = coordinate
        text = f"{register}({substitute(expr, register, names)})"
        return self.rounded(self.assign(text, tuple(operands), tensor), register, tensor)

    def _random(self, node: Node, tensor: int, index: Index) -> str:
        """The number of a logical element: of its row-major position, whatever the layout."""
        row, register = rng.row_of(node), info(node.compute).register
        place, flat, step = self._name(), ZERO, 1
        for i, d in zip(reversed(index), reversed(self.graph.tensors[tensor].dim), strict=True):
            flat, step = flat + i.scaled(step), step * d
        self._add(Coordinate(place, "int64", flat), tensor)
        keys = [self.operand(t, (ZERO,) * len(self.graph.tensors[t].dim), "int64") for t in node.input_ids]
        number = self.assign(f"{register}({row.source}({keys[0]}, {keys[1]}, {place}))", (*keys, place), tensor)
        names = {"a": number} | {k: plain_number(v) for k, v in row.values(dict(node.attrs), node.compute).items()}
        return self.rounded(self.assign(f"{register}({substitute(row.expr, register, names)})", (number,), tensor), register, tensor)

    def rounded(self, name: str, register: str, tensor: int) -> str:
        """``name`` (compute register) rounded to the dtype of ``tensor``."""
        expr = to_dtype(name, register, self.graph.tensors[tensor].dtype)
        return name if expr == name else self.assign(expr, (name,), tensor)

    def store(self, tensor: int, index: Index, guards: tuple[Guard, ...] = ()) -> None:
        """Calculate element ``index`` of ``tensor`` and write it."""
        name = self.value(tensor, index)
        self._add(Store(tensor, offset(index, self.graph.tensors[tensor].strides), name, guards), tensor)


def plain_number(value: float | int) -> str:
    """An attribute's number as text that stands inside ``T()``."""
    if value != value:
        return "math.nan"
    return ("math.inf" if value > 0 else "-math.inf") if value in (float("inf"), float("-inf")) else repr(value)


def _always(g: Guard) -> bool:
    lo, hi = bounds(g.value)
    return g.lo <= lo and hi < g.hi
