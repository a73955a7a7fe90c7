"""What an intrinsic is: one row with a typing rule and one form per target. Knows neither numba nor llvmlite.

A form for the CPU or CUDA is a function ``form(o, *values) -> value`` over an emitter ``o`` (:class:`graphdnn.intrinsics.emit.Emit`) and its
values; run once while numba lowers a call, it writes LLVM instructions in place, so that nothing is left to call, inline or look up. A simulator
form is a plain Python function over numbers. All three stand side by side in the file of the intrinsic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphdnn.intrinsics.emit import Value

Signature = tuple[tuple[str, ...], str]
"""Types that the arguments are cast to, and the type of the result, as numba type names."""
Rule = Callable[[tuple[str, ...]], Signature | None]
"""Typing rule: the signature for given argument types, or None where the call has no meaning (a typing error on every target)."""
Lowering = Callable[..., "Value"]
"""``form(o: Emit, *values: Value) -> Value``."""

FLOATS = ("float32", "float64")
SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
INTEGERS = SIGNED + UNSIGNED
BITS = {name: int(name.removeprefix("u").removeprefix("int").removeprefix("float")) for name in FLOATS + INTEGERS} | {"bool": 8}


@dataclass(frozen=True)
class Form:
    """One intrinsic. ``cpu`` and ``cuda``: its LLVM forms; ``sim``: its Python model, which gets Python numbers (``float``, ``int``) and returns
    one that the caller then rounds to the result type; an integer wraps to it, or saturates if ``saturates``."""

    name: str
    rule: Rule
    cpu: Lowering
    cuda: Lowering
    sim: Callable[..., Any]
    arity: int = 1
    saturates: bool = False


def both(name: str, rule: Rule, lowering: Lowering, sim: Callable[..., Any], arity: int = 1, saturates: bool = False) -> Form:
    """An intrinsic with one LLVM form for the CPU and CUDA."""
    return Form(name, rule, lowering, lowering, sim, arity, saturates)


def floating(types: tuple[str, ...]) -> Signature | None:
    """All float32 -> float32; all floats with a float64 among them -> float64. Integers are refused: the caller states the cast."""
    if any(t not in FLOATS for t in types):
        return None
    wide = "float64" if "float64" in types else "float32"
    return (wide,) * len(types), wide


def integral(types: tuple[str, ...]) -> Signature | None:
    """Integers only: int32 if all fit in it, else int64 (as narrow as the compute type of the kernel)."""
    if any(t not in INTEGERS for t in types):
        return None
    wide = "int32" if all(BITS[t] < 32 or t == "int32" for t in types) else "int64"
    return (wide,) * len(types), wide


def arithmetic(types: tuple[str, ...]) -> Signature | None:
    """:func:`floating` or :func:`integral`; a mixture is float64, as numba has it, so that a literal without a type shows."""
    if all(t in FLOATS or t in INTEGERS for t in types) and any(t in FLOATS for t in types) and any(t in INTEGERS for t in types):
        return ("float64",) * len(types), "float64"
    return floating(types) or integral(types)


def to(result: str, *accepted: str) -> Rule:
    """One argument of an ``accepted`` type, taken as it is; result of type ``result``."""

    def rule(types: tuple[str, ...]) -> Signature | None:
        return (types, result) if len(types) == 1 and types[0] in accepted else None

    return rule


def stored(storage: str, result: str) -> Rule:
    """One integer of any width (a loaded element, or a nibble of one), cast to ``storage``; result of type ``result``."""

    def rule(types: tuple[str, ...]) -> Signature | None:
        return ((storage,), result) if len(types) == 1 and types[0] in INTEGERS else None

    return rule
