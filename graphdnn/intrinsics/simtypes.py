"""Typed scalars of the simulator: Python numbers whose operators give the types that numba gives.

int32 + int32 is int64, uint32 * uint32 is uint64, float32 * 2.0 is float64 (so that a literal without a type shows), float32 * int32 is float64.
Values wrap and round as the hardware's do. A plain Python int is an int64, a plain float a float64, as numba types literals. Division by zero gives
infinities, NaN or (integers) SimulationError: on a GPU the quotient has no meaning.
tests/sim/test_simulator.py compares the result types with numba's own typing rules.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, ClassVar

import numpy as np

from graphdnn.intrinsics.errors import SimulationError
from graphdnn.intrinsics.forms import BITS, FLOATS, INTEGERS, SIGNED, UNSIGNED

_to_single, _new_int, _new_float = ctypes.c_float, int.__new__, float.__new__
_NARROW = frozenset(("int8", "uint8", "int16", "bool"))
"""What numba promotes to float32 beside a float32."""


def type_name(value: Any) -> str:
    """numba's name of the type of a value in kernel text; SimulationError for what is no scalar."""
    name = getattr(type(value), "TYPE", None) or _PLAIN.get(type(value))
    if name is None:
        raise SimulationError(f"a kernel calculates with a {type(value).__name__}: {value!r}")
    return name


_PLAIN: dict[type, str] = {bool: "bool", int: "int64", float: "float64"}


def result_type(op: str, a: str, b: str) -> str:
    """Type of ``a op b`` for op one of + - * / // % ** & | ^ << >>; SimulationError where numba has none."""
    floats = [t for t in (a, b) if t in FLOATS]
    if floats:
        if op in ("&", "|", "^", "<<", ">>"):
            raise SimulationError(f"{a} {op} {b} has no meaning")
        if "float64" in (a, b):
            return "float64"
        other = b if a == "float32" else a
        if other == "float32" or other in _NARROW or (op == "**" and a == "float32"):
            return "float32"
        return "float64"
    if op == "/":
        return "float64"
    if op in ("<<", ">>"):
        return "uint64" if a in UNSIGNED else "int64"
    if a == b == "bool" and op in ("&", "|", "^"):
        return "bool"
    return "uint64" if a in UNSIGNED and b in UNSIGNED else "int64"


def wrap(value: int, bits: int, signed: bool) -> int:
    """``value`` modulo 2**bits, in the range of the type."""
    value = int(value) & (1 << bits) - 1
    return value - (1 << bits) if signed and value >> (bits - 1) else value


class Integer(int):
    """Base of the integer types. Calling one casts: floats truncate (SimulationError out of range), integers wrap."""

    TYPE: ClassVar[str]
    LOW: ClassVar[int]
    HIGH: ClassVar[int]

    def __new__(cls, value: Any = 0) -> Integer:
        """Cast."""
        if isinstance(value, int):
            if cls.LOW <= value <= cls.HIGH:
                return int.__new__(cls, value)
            return int.__new__(cls, wrap(value, BITS[cls.TYPE], cls.LOW < 0))
        if not isinstance(value, float):
            raise SimulationError(f"{cls.TYPE}({value!r}): not a number")
        if not math.isfinite(value) or not cls.LOW <= int(value) <= cls.HIGH:
            raise SimulationError(f"{cls.TYPE}({float(value)!r}) has no meaning: out of range; use rint_{cls.TYPE}")
        return int.__new__(cls, int(value))

    def __repr__(self) -> str:
        return f"{self.TYPE}({int(self)})"

    def __abs__(self) -> Any:
        return type(self)(int.__abs__(self))

    def __neg__(self) -> Any:
        return TYPES["uint64" if self.TYPE in UNSIGNED else "int64"](int.__neg__(self))

    def __invert__(self) -> Any:
        return TYPES["uint64" if self.TYPE in UNSIGNED else "int64"](int.__invert__(self))

    def __pos__(self) -> Any:
        return TYPES["uint64" if self.TYPE in UNSIGNED else "int64"](self)


class Real(float):
    """Base of the float types. Calling one casts, rounding once."""

    TYPE: ClassVar[str]

    def __repr__(self) -> str:
        return f"{self.TYPE}({float.__repr__(self)})"

    def __abs__(self) -> Any:
        return float.__new__(type(self), float.__abs__(self))

    def __neg__(self) -> Any:
        return float.__new__(type(self), float.__neg__(self))

    def __pos__(self) -> Any:
        return self


class float64(Real):
    """IEEE double."""

    TYPE = "float64"


class float32(Real):
    """IEEE single; a Python float holds the value."""

    TYPE = "float32"

    def __new__(cls, value: Any = 0.0) -> float32:
        """Round to nearest."""
        return float.__new__(cls, _to_single(value).value)


def _integer(name: str) -> type[Integer]:
    bits, signed = BITS[name], name in SIGNED
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    return type(name, (Integer,), {"TYPE": name, "LOW": low, "HIGH": high, "__doc__": f"{name}, wrapping."})


TYPES: dict[str, Any] = {"float32": float32, "float64": float64} | {name: _integer(name) for name in INTEGERS}
"""The scalar types by name; kernel text sees them under these names."""


def exact32(value: float) -> float32:
    """float32 of a number that is one already (a loaded element): no rounding."""
    return float.__new__(float32, value)


def cast(name: str) -> Callable[[Any], Any]:
    """Cast to the type, bool included."""
    return bool if name == "bool" else TYPES[name]


def _divide(a: float, b: float) -> float:
    """IEEE division."""
    try:
        return float.__truediv__(a, b)
    except ZeroDivisionError:
        return math.nan if a == 0.0 or a != a else math.copysign(math.inf, a) * math.copysign(1.0, b)


def _whole(slot: Callable[[Any, Any], Any], symbol: str) -> Callable[[Any, Any], Any]:
    """Floor quotient or remainder; a divisor of 0 is the kernel's mistake."""

    def checked(a: Any, b: Any) -> Any:
        if b == 0:
            raise SimulationError(f"{a!r} {symbol} 0 has no meaning; use floormod or truediv")
        return slot(a, b)

    return checked


def _shift(slot: Callable[[int, int], int]) -> Callable[[int, int], int]:
    def checked(a: int, b: int) -> int:
        if not 0 <= b < 64:
            raise SimulationError(f"shift by {b!r} has no meaning for 64 bits")
        return slot(a, b)

    return checked


def _float_power(a: float, b: float) -> float:
    with np.errstate(all="ignore"):
        return float(np.power(np.float64(a), np.float64(b)))


def _int_power(a: int, b: int) -> int:
    if b < 0:
        raise SimulationError(f"{a!r} ** {b!r} has no meaning for integers; use ipow")
    return pow(int(a), int(b), 1 << 64)


_Slot = Callable[[Any, Any], Any]
_OPERATIONS: dict[str, tuple[str, _Slot | None, _Slot | None]] = {
    "+": ("add", float.__add__, int.__add__),
    "-": ("sub", float.__sub__, int.__sub__),
    "*": ("mul", float.__mul__, int.__mul__),
    "/": ("truediv", _divide, None),
    "//": ("floordiv", _whole(float.__floordiv__, "//"), _whole(int.__floordiv__, "//")),
    "%": ("mod", _whole(float.__mod__, "%"), _whole(int.__mod__, "%")),
    "**": ("pow", _float_power, _int_power),
    "&": ("and", None, int.__and__),
    "|": ("or", None, int.__or__),
    "^": ("xor", None, int.__xor__),
    "<<": ("lshift", None, _shift(int.__lshift__)),
    ">>": ("rshift", None, _shift(int.__rshift__)),
}
"""Operator: name of its method, what calculates it on floats, on integers. The slots of the base types give plain numbers, also of typed scalars."""


def _into(name: str) -> Callable[[Any], Any]:
    """Round or wrap a plain number to a result type; the fast way."""
    if name == "bool":
        return bool
    cls = TYPES[name]
    if name == "float32":
        return lambda v: _new_float(cls, _to_single(v).value)
    if name == "float64":
        return lambda v: _new_float(cls, v)
    low, high, signed = cls.LOW, cls.HIGH, name in SIGNED
    return lambda v: _new_int(cls, v if low <= v <= high else wrap(v, BITS[name], signed))


@cache
def _operation(op: str, a: str, b: str) -> _Slot:
    """``op`` on values of types a and b, cast to the type of the result as numba casts them."""
    result = result_type(op, a, b)
    into, (_, on_floats, on_integers) = _into(result), _OPERATIONS[op]
    if result in FLOATS:
        assert on_floats is not None, f"{op} of floats is refused by result_type"
        slot = on_floats
        if a in FLOATS and b in FLOATS:
            return lambda x, y: into(slot(x, y))
        return lambda x, y: into(slot(float(x), float(y)))
    assert on_integers is not None, f"{op} of integers gives a float"
    slot = on_integers
    if result == "int64" and "uint64" in (a, b) and op not in ("<<", ">>"):
        return lambda x, y: into(slot(wrap(x, 64, True), wrap(y, 64, True)))
    return lambda x, y: into(slot(x, y))


def _install(cls: Any, op: str) -> None:
    """Give ``cls`` the operator and its reflected form."""
    by_type: dict[type, Callable[[Any, Any], Any]] = {}
    by_left_type: dict[type, Callable[[Any, Any], Any]] = {}

    def method(self: Any, other: Any) -> Any:
        known = by_type.get(type(other))
        if known is None:
            known = by_type[type(other)] = _operation(op, cls.TYPE, type_name(other))
        return known(self, other)

    def reflected(self: Any, other: Any) -> Any:
        known = by_left_type.get(type(other))
        if known is None:
            known = by_left_type[type(other)] = _operation(op, type_name(other), cls.TYPE)
        return known(other, self)

    name = _OPERATIONS[op][0]
    setattr(cls, f"__{name}__", method)
    setattr(cls, f"__r{name}__", reflected)


for _cls in TYPES.values():
    for _op in _OPERATIONS:
        _install(_cls, _op)


def unified(types: tuple[str, ...]) -> str:
    """Type of min() and max() of values of these types: the narrowest that holds all."""
    kinds = [t for t in types if t != "bool"]
    if not kinds:
        return "bool"
    widths = {t: BITS[t] for t in kinds}
    if any(t in FLOATS for t in kinds):
        wide = "float64" in kinds or any(t in INTEGERS and widths[t] > 16 for t in kinds)
        return "float64" if wide else "float32"
    signed = max((widths[t] for t in kinds if t in SIGNED), default=0)
    unsigned = max((widths[t] for t in kinds if t in UNSIGNED), default=0)
    if not signed:
        return f"uint{unsigned}"
    bits = max(signed, 2 * unsigned)
    return f"int{bits}" if bits <= 64 else "float64"


def _extreme(fn: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """min or max as CUDA has them: of floats, the one that is not NaN."""

    def pick(*values: Any) -> Any:
        result = values[0]
        for v in values[1:]:
            result = v if result != result else result if v != v else fn(result, v)
        return cast(unified(tuple(type_name(v) for v in values)))(result)

    return pick


def typed_range(*bounds: Any) -> Iterator[Any]:
    """range() with the item type that numba gives: int32 if all bounds are signed and at most 32 bits, uint64 if all are unsigned, else int64."""
    types = {type_name(b) for b in bounds}
    name = "int32" if types <= {"int8", "int16", "int32"} else "uint64" if types <= set(UNSIGNED) else "int64"
    return map(TYPES[name], range(*(int(b) for b in bounds)))


BUILTINS: dict[str, Any] = {"min": _extreme(min), "max": _extreme(max), "range": typed_range}
"""Built-in functions that know the typed scalars."""
