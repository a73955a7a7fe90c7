"""An attention node taken apart: sizes, and where the elements of its tensors are. Forward and backward share it (attention_score.py: the scores).

Everything is printed in the common dialect, in one integer type ``itype`` ("int64" on a CPU, "int32" on CUDA where every offset fits), with names
that the kernel chooses. Kernel text first runs :meth:`AttentionText.item` (once batch and head are known), then uses the rest for rows and columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from graphdnn.codegen.body import Signature, decoded
from graphdnn.codegen.dialect import IndexWriter, decompose, literal, to_dtype, to_register
from graphdnn.dtypes import info
from graphdnn.ir.index import Linear, Var
from graphdnn.ir.node import Node
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.ir.tensor import Tensor

_ANY = 1 << 30
"""Size of a variable whose range is not known when the text is printed."""


@dataclass(frozen=True)
class AttentionProblem:
    """One attention node: forward or backward, of any tag. ``ports``: tensor ids by port, inputs and outputs."""

    graph: OperationGraph
    node: Node
    ports: Mapping[str, int]

    @classmethod
    def of(cls, graph: OperationGraph, node: Node) -> AttentionProblem:
        """The problem of ``node``."""
        return cls(graph, node, dict(node.inputs) | dict(node.outputs))

    def has(self, port: str) -> bool:
        """Whether the node has a tensor at ``port``."""
        return port in self.ports

    def tensor(self, port: str) -> Tensor:
        """The tensor at ``port``."""
        return self.graph.tensors[self.ports[port]]

    @property
    def calc(self) -> str:
        """Register type of scores and sums."""
        return info(self.node.compute).register

    @property
    def b(self) -> int:
        """Batches."""
        return self.tensor("Q").dim[0]

    @property
    def h_q(self) -> int:
        """Heads of Q."""
        return self.tensor("Q").dim[1]

    @property
    def h_k(self) -> int:
        """Heads of K."""
        return self.tensor("K").dim[1]

    @property
    def h_v(self) -> int:
        """Heads of V."""
        return self.tensor("V").dim[1]

    @property
    def s_q(self) -> int:
        """Rows of Q in a batch, at most."""
        return self.tensor("Q").dim[2]

    @cached_property
    def s_kv(self) -> int:
        """Rows of K and V in a batch, at most."""
        given = self.node.attr("max_seq_len_kv")
        if given is not None:
            return int(given)
        for table, container in (("Page_table_K", "K"), ("Page_table_V", "V")):
            if self.has(table):
                return self.tensor(table).dim[2] * self.tensor(container).dim[2]
        return self.tensor("K").dim[2]

    @property
    def d_qk(self) -> int:
        """Length of a row of Q and K."""
        return self.tensor("Q").dim[3]

    @property
    def d_v(self) -> int:
        """Length of a row of V and O."""
        return self.tensor("V").dim[3]

    @property
    def padded(self) -> bool:
        """Whether batches have lengths of their own."""
        return bool(self.node.attr("padding_mask")) and self.has("SEQ_LEN_KV")

    @property
    def left(self) -> int | None:
        """Left bound: columns > row + shift - left are kept."""
        found = self.node.attr("left_bound")
        return None if found is None else int(found)

    @property
    def right(self) -> int | None:
        """Right bound: columns <= row + shift + right are kept."""
        found = self.node.attr("right_bound")
        return None if found is None else int(found)

    @property
    def shifted(self) -> bool:
        """Whether the diagonal ends in the bottom right corner."""
        return self.node.attr("diagonal_alignment") == "BOTTOM_RIGHT" and (self.left is not None or self.right is not None)

    @property
    def dropout(self) -> float | None:
        """Probability with which a random number drops a weight; None where a mask is given or nothing is dropped."""
        return float(self.node.attr("dropout_probability") or 0.0) if self.has("Seed") else None

    @property
    def scores(self) -> int:
        """Number of scores, masked ones included."""
        return self.b * self.h_q * self.s_q * self.s_kv

    @cached_property
    def pairs(self) -> int:
        """Scores that no bound hides, lengths of batches left aside."""
        rows, columns = int(self.s_q), int(self.s_kv)
        shift = columns - rows if self.shifted else 0
        last = rows * columns if self.right is None else _under(rows, columns, shift + self.right + 1)
        first = 0 if self.left is None else _under(rows, columns, shift - self.left + 1)
        return self.b * self.h_q * max(0, last - first)

    @property
    def flops(self) -> int:
        """Arithmetic operations of the products that the formula has: two forward; backward three more, over rows of Q and K, or of V."""
        over_k, over_v = (3, 2) if self.has("dO") else (1, 1)
        return 2 * self.pairs * (over_k * self.d_qk + over_v * self.d_v)

    def heads_of(self, port: str) -> int:
        """Heads of the tensor at ``port``."""
        return self.tensor(port).dim[1]

    def index_type(self, threads: int) -> str:
        """Integer type of index arithmetic on CUDA: int32 where no offset, and no number of the ``threads`` of a grid, can leave it."""
        anywhere = any(p.startswith(("Ragged_", "Page_table_")) for p in self.ports)
        reach = max((self.graph.tensors[t].extent for t in self.ports.values()), default=0)
        counts = max(threads, self.s_q * 2, self.s_kv * 2, abs(self.left or 0), abs(self.right or 0))
        return "int64" if anywhere or max(reach, counts) >= 1 << 30 else "int32"


def _under(rows: int, columns: int, ahead: int) -> int:
    """How many of the columns lie before row + ``ahead``, in all rows: none in the first rows, one more a row, then all of them."""
    start = min(max(-ahead, 0), rows)
    end = min(max(columns - ahead, start), rows)
    return (start + end - 1) * (end - start) // 2 + ahead * (end - start) + (rows - end) * columns


def split(p: AttentionProblem, tiles: int, parts: int, itype: str) -> list[str]:
    """Lines that split the number ``o`` of an item into batch, head, tile of rows and part of the row of V."""
    loops = [Var("b", p.b), Var("h", p.h_q), Var("tile", tiles), Var("part", parts)]
    return [*decompose("o", loops, itype), *(f"{v.name} = {itype}(0)" for v in loops if v.size == 1)]


class AttentionText:
    """Prints the text of addresses in one attention kernel; parameters are collected in ``signature``.
    ``batch`` and ``head``: names of b and of the head of Q."""

    def __init__(self, problem: AttentionProblem, signature: Signature, itype: str, batch: str = "b", head: str = "h") -> None:
        self.problem, self.signature, self.itype, self.batch, self.head = problem, signature, itype, batch, head
        self.calc = problem.calc
        self.sq, self.skv = "sq", "skv"

    # -- index arithmetic -------------------------------------------------------------------------------------------------------------------
    def number(self, value: int) -> str:
        """An integer literal."""
        return str(value) if self.itype == "int64" else f"{self.itype}({value})"

    def linear(self, *terms: tuple[str, int], const: int = 0) -> str:
        """Text of the sum of name * factor and ``const``."""
        if self.itype == "int64":  # what numba calculates in anyway; casts would cost compile time
            words = [name if factor == 1 else f"{name} * {factor}" for name, factor in terms if factor]
            return f"({' + '.join([*words, *([str(const)] if const or not words else [])])})"
        total = Linear((), const)
        for name, factor in terms:
            total = total + Linear(((Var(name, _ANY), factor),) if factor else ())
        return IndexWriter(self.itype)(total)

    # -- once an item ------------------------------------------------------------------------------------------------------------------------
    def item(self) -> list[str]:
        """Lines, once ``batch`` and ``head`` are known: actual lengths ``sq`` and ``skv``, ``shift`` of the diagonal, ``attn_scale``, ``slope``, and
        the numbers of dropout."""
        p = self.problem
        lines = [*self._length(self.sq, "SEQ_LEN_Q", p.s_q), *self._length(self.skv, "SEQ_LEN_KV", p.s_kv)]
        if p.shifted:
            lines.append(f"shift = {self.linear((self.skv, 1), (self.sq, -1))}")
        if p.has("Attn_scale"):
            lines.append(f"attn_scale = {self.scalar('Attn_scale', self.calc)}")
        if p.node.attr("alibi_mask"):
            lines += self._slope()
        return [*lines, *self.numbers()]

    def numbers(self) -> list[str]:
        """Lines, once an item: the numbers of dropout."""
        p = self.problem
        lines = []
        if p.dropout is not None:
            lines += [f"seed = {self.scalar('Seed', 'int64')}", f"philox_offset = {self.scalar('Offset', 'int64')}"]
        if p.has("Dropout_scale"):
            lines.append(f"dropout_scale = {self.scalar('Dropout_scale', self.calc)}")
        return lines

    def _length(self, name: str, port: str, most: int) -> list[str]:
        p = self.problem
        if not (p.node.attr("padding_mask") and p.has(port)):
            return [f"{name} = {self.number(most)}"]
        stride = p.tensor(port).strides[0]
        raw = decoded(self.signature, p.ports[port], self.linear((self.batch, stride)))
        return [f"{name} = min(max({self.itype}({raw}), {self.number(0)}), {self.number(most)})"]

    def scalar(self, port: str, register: str) -> str:
        """Text of the one number at ``port``, by value or in memory."""
        text = decoded(self.signature, self.problem.ports[port], self.number(0))
        return to_register(text, info(self.problem.tensor(port).dtype).register, register)

    def _slope(self) -> list[str]:
        """Slope of this head (Press, Smith, Lewis, "Train short, test long", 2022): 2**(-8 i / n) for the n heads up to the largest power of two,
        then every second of those of 2 n heads."""
        heads = self.problem.h_q
        n = 1 << max(heads.bit_length() - 1, 0)
        h, calc = self.head, self.calc
        first = f"{calc}({self.linear((h, 1), const=1)}) * {literal(-8.0 / n, calc)}"
        rest = f"{calc}({self.linear((h, 2), const=1 - 2 * n)}) * {literal(-4.0 / n, calc)}"
        exponent = first if n == heads else f"({first}) if {h} < {self.number(n)} else ({rest})"
        return [f"slope = pow({literal(2, calc)}, {calc}({exponent}))"]

    # -- where elements are -------------------------------------------------------------------------------------------------------------------
    def head_of(self, port: str) -> str:
        """Text of the head of the tensor at ``port`` that belongs to the head of Q."""
        group = self.problem.h_q // max(self.problem.heads_of(port), 1)
        return self.head if group <= 1 else f"{self.itype}({self.head} // {self.number(group)})"

    def base(self, port: str, name: str, head: str | None = None) -> list[str]:
        """Lines that set ``name`` to the offset of row 0, element 0 of this batch and head. ``head``: text of the head, if not that of Q's."""
        p = self.problem
        strides = p.tensor(port).strides
        at = f"{name}_head"
        lines = [f"{at} = {head or self.head_of(port)}"] if strides[1] else []
        terms = [(at, strides[1])] if strides[1] else []
        if p.has(f"Ragged_{port}"):
            lines.append(f"{name}_start = {self.itype}({self._ragged(f'Ragged_{port}')})")
            terms.append((f"{name}_start", 1))
        elif not p.has(f"Page_table_{port}"):
            terms.append((self.batch, strides[0]))
        return [*lines, f"{name} = {self.linear(*terms)}"]

    def _ragged(self, port: str) -> str:
        t = self.problem.tensor(port)
        return decoded(self.signature, self.problem.ports[port], self.linear((self.batch, t.strides[0])))

    def row(self, port: str, base: str, row: str, name: str) -> list[str]:
        """Lines that set ``name`` to the offset of element 0 of row ``row``; ``base`` as set by :meth:`base`."""
        p = self.problem
        strides = p.tensor(port).strides
        if not p.has(f"Page_table_{port}"):
            return [f"{name} = {self.linear((base, 1), (row, strides[2]))}"]
        blocks, size = p.tensor(port).dim[0], p.tensor(port).dim[2]
        page = f"{name}_page"
        lines = [f"{page}_number = {self.itype}({row} // {self.number(size)})", *self._page(f"Page_table_{port}", f"{page}_number", page)]
        lines.append(f"{page} = min(max({page}, {self.number(0)}), {self.number(max(blocks - 1, 0))})")
        within = f"{name}_within"
        lines.append(f"{within} = {self.itype}({row} % {self.number(size)})")
        return [*lines, f"{name} = {self.linear((base, 1), (page, strides[0]), (within, strides[2]))}"]

    def _page(self, port: str, number: str, name: str) -> list[str]:
        """Lines that set ``name`` to entry ``number`` of this batch's part of a page table."""
        p = self.problem
        strides = p.tensor(port).strides
        lines, terms = [], [(number, strides[2])]
        if p.has(f"Ragged_{port}"):
            lines.append(f"{name}_start = {self.itype}({self._ragged(f'Ragged_{port}')})")
            terms.append((f"{name}_start", 1))
        else:
            terms.append((self.batch, strides[0]))
        entry = decoded(self.signature, p.ports[port], self.linear(*terms))
        return [*lines, f"{name} = {self.itype}({entry})"]

    def at(self, port: str, row_name: str, column: str) -> str:
        """Text of the offset of element ``column`` of the row whose offset is ``row_name``."""
        return self.linear((row_name, 1), (column, self.problem.tensor(port).strides[3]))

    def load(self, port: str, row_name: str, column: str) -> str:
        """Text of an element in the compute type."""
        t = self.problem.tensor(port)
        text = decoded(self.signature, self.problem.ports[port], self.at(port, row_name, column))
        return to_register(text, info(t.dtype).register, self.calc)

    def store(self, port: str, row_name: str, column: str, value: str) -> str:
        """A line that writes ``value`` (in the compute type), rounded to the tensor's data type."""
        t = self.problem.tensor(port)
        rounded = to_dtype(value, self.calc, t.dtype)
        pointer = self.signature.pointer(self.problem.ports[port], written=True)
        return f"{pointer}[{self.at(port, row_name, column)}] = {info(t.dtype).encode.format(rounded)}"

    def broadcast(self, tensor: int, row: str, col: str) -> str:
        """Text of the element of a tensor that broadcasts to [b, h_q, s_q, s_kv], as stored (its register type)."""
        t = self.problem.graph.tensors[tensor]
        names = (self.batch, self.head, row, col)[4 - len(t.dim) :]
        terms = [(n, s) for n, d, s in zip(names, t.dim, t.strides, strict=True) if d != 1]
        return decoded(self.signature, tensor, self.linear(*terms))
