"""Turns rows of :mod:`graphdnn.intrinsics.forms` into numba intrinsics. Imports numba: reached only by namespace("cpu" or "cuda")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from numba.core import types
from numba.core.errors import TypingError
from numba.extending import intrinsic

from graphdnn.intrinsics.emit import Emit
from graphdnn.intrinsics.forms import Form

NUMBA_TYPES: dict[str, Any] = {
    name: getattr(types, name) for name in ("float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
} | {"bool": types.boolean}


def type_name(t: Any) -> str:
    """numba's name of a scalar type, literals taken as what they are literals of ("float32", "int64", "bool", ...)."""
    return str(types.unliteral(t))


def make(form: Form, target: Literal["cpu", "cuda"]) -> Any:
    """The numba intrinsic of ``form`` for ``target``."""
    lowering = form.cpu if target == "cpu" else form.cuda

    def typing(*args: Any) -> tuple[Any, Callable[..., Any]]:
        names = tuple(type_name(a) for a in args)
        signature = form.rule(names)
        if signature is None:
            raise TypingError(f"{form.name}({', '.join(names)}) has no meaning; print the casts of its arguments")
        casts, result = signature

        def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            o = Emit(builder, target)
            return lowering(o, *(o.value(v) for v in values)).v

        return NUMBA_TYPES[result](*(NUMBA_TYPES[c] for c in casts)), codegen

    return intrinsic(_with_arity(typing, form.name, form.arity))


def _with_arity(typing: Callable[..., Any], name: str, arity: int) -> Callable[..., Any]:
    """``typing`` with named arguments: numba reads their number from the signature."""
    by_arity: dict[int, Callable[..., Any]] = {
        1: lambda typingctx, a: typing(a),
        2: lambda typingctx, a, b: typing(a, b),
        3: lambda typingctx, a, b, c: typing(a, b, c),
    }
    definition = by_arity[arity]
    definition.__name__ = definition.__qualname__ = name
    return definition
