"""Spelling of the common dialect: literals, conversions between register types and data types, index expressions.

The text is Python that numba compiles for a CPU and for CUDA and that the simulator runs; what a name does there is in ``graphdnn.intrinsics``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from graphdnn.dtypes import data_type, info
from graphdnn.ir.index import Linear, Quotient, Var, bounds

_FLOAT_REGISTERS = ("float32", "float64")


def literal(value: float | int, register: str) -> str:
    """``value`` as an expression of type ``register``: never a bare number, which numba would take for a float64 or int64."""
    if register in _FLOAT_REGISTERS:
        value = float(value)
        text = "math.nan" if value != value else ("math.inf" if value > 0 else "-math.inf") if value in (float("inf"), float("-inf")) else repr(value)
        return f"{register}({text})"
    return f"{register}({int(value)})"


def to_register(expr: str, source: str, target: str) -> str:
    """Convert between register types: float to int rounds half to even, saturates, NaN gives 0; int64 to int32 wraps."""
    if source == target:
        return expr
    if source in _FLOAT_REGISTERS and target not in _FLOAT_REGISTERS:
        return f"rint_{target}({expr})"
    return f"{target}({expr})"


def to_dtype(expr: str, register: str, dtype: data_type) -> str:
    """Round a value in a register of type ``register`` to ``dtype``; the result is in the dtype's own register type."""
    row = info(dtype)
    is_float = register in _FLOAT_REGISTERS
    if dtype is data_type.BOOLEAN:
        return f"to_bool({expr})"
    if row.kind == "f":
        if dtype in (data_type.FLOAT, data_type.DOUBLE):
            return to_register(expr, register, row.register)
        return f"round_{dtype.name}({expr if is_float else f'float32({expr})'})"
    if dtype in (data_type.INT32, data_type.INT64):
        return to_register(expr, register, row.register)
    return f"{'sat' if is_float else 'wrap'}_{dtype.name}({expr})"


def substitute(expr: str, register: str, names: Mapping[str, str]) -> str:
    """A row's expression with ``T(`` spelled as the register type and its names replaced."""

    def spell(match: re.Match[str]) -> str:
        word = match.group(0)
        return f"{register}(" if word == "T(" else names.get(word, word)

    return re.sub(r"\bT\(|\b[A-Za-z_]\w*\b", spell, expr)


class IndexWriter:
    """Prints linear expressions in one integer type and hoists quotients and remainders into named lines.

    ``itype`` "uint32": every operation is wrapped (numba widens uint32 products to uint64); "int64": plain. ``lines`` collects the hoisted
    assignments, to be printed before the use.
    """

    def __init__(self, itype: str, prefix: str = "q") -> None:
        self.itype = itype
        self._prefix = prefix
        self._names: dict[object, str] = {}
        self.lines: list[str] = []

    def number(self, value: int) -> str:
        """An integer literal in the index type."""
        return f"{self.itype}({value})"

    def __call__(self, e: Linear) -> str:
        """The text of ``e``."""
        parts: list[str] = []
        for a, c in e.terms:
            name = self._atom(a)
            parts.append(name if c == 1 else self._wrap(f"{name} * {self.number(c)}"))
        if e.const or not parts:
            parts.append(self.number(e.const))
        text = parts[0]
        for p in parts[1:]:
            text = self._wrap(f"{text} + {p}")
        return text

    def _wrap(self, text: str) -> str:
        return f"{self.itype}({text})"

    def _atom(self, a: object) -> str:
        if isinstance(a, Var):
            return a.name
        if a not in self._names:
            assert not isinstance(a, (Linear, str)), "atoms only"
            op = "//" if isinstance(a, Quotient) else "%"
            text = self._wrap(f"{self(a.of)} {op} {self.number(a.by)}")  # type: ignore[attr-defined]
            self._names[a] = f"{self._prefix}{len(self._names)}"
            self.lines.append(f"{self._names[a]} = {text}")
        return self._names[a]


def index_type(expressions: list[Linear], cuda: bool) -> str:
    """ "uint32" on CUDA where every (sub)expression stays in 0 .. 2^31-1, else "int64"; a CPU always uses int64, which LLVM vectorizes best."""
    if not cuda:
        return "int64"
    from graphdnn.ir.index import linears

    for e in expressions:
        for x in linears(e):
            lo, hi = bounds(x)
            # Partial sums are printed term by term, so every coefficient must be non-negative for uint32.
            if lo < 0 or hi >= 2**31 or x.const < 0 or any(c < 0 for _, c in x.terms):
                return "int64"
    return "uint32"


def decompose(flat: str, variables: list[Var], itype: str) -> list[str]:
    """Lines that split the number ``flat`` into ``variables``, the last fastest. Variables of size 1 get no line: ``index.var`` never prints them.
    Those of size 0 get one, which is never reached."""
    active = [v for v in variables if v.size != 1]
    if not active:
        return []
    lines: list[str] = []
    rest = flat
    for n, v in enumerate(reversed(active)):
        if n == len(active) - 1:
            lines.append(f"{v.name} = {rest}")
            break
        lines.append(f"{v.name} = {itype}({rest} % {itype}({v.size or 1}))")
        if n < len(active) - 1:
            lines.append(f"{flat}_{n} = {itype}({rest} // {itype}({v.size or 1}))")
            rest = f"{flat}_{n}"
    return lines
