"""Turns rows of :mod:`graphdnn.intrinsics.instruction` into numba intrinsics. Imports numba: reached only by namespace("cuda") and the compiler."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.errors import RequireLiteralValue, TypingError
from numba.cuda.extending import models, register_model
from numba.extending import intrinsic

from graphdnn.intrinsics.emit import F32, I32, Emit
from graphdnn.intrinsics.instruction import Instruction

DESCRIPTOR_WORDS = 16
MAP_MARK = "GRAPHDNN_MAP_"
"""Stands in the PTX for the name of the parameter that holds a descriptor; the target puts that in."""
_SCALARS = {"u32": types.uint32, "u64": types.uint64}


class DescriptorType(types.Type):  # type: ignore[misc]
    """A TMA descriptor by value: numba passes 16 words, which the target turns into one parameter. ``index``: its place among the parameters."""

    def __init__(self, index: int) -> None:
        self.index = index
        super().__init__(name=f"tensor_map_{index}")


@register_model(DescriptorType)
class _DescriptorModel(models.StructModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, [(f"w{i}", types.uint64) for i in range(DESCRIPTOR_WORDS)])


class LocalArray:
    """A thread's local array as an instruction sees it."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any) -> None:
        self._builder = builder
        self._data = context.make_array(kind)(context, builder, value).data

    def store(self, index: int, value: Any) -> None:
        """Write an element."""
        self._builder.store(value, self._builder.gep(self._data, [ir.Constant(ir.IntType(64), index)]))


def make(row: Instruction) -> Any:
    """The numba intrinsic of ``row``."""

    def typing(typingctx: Any, *args: Any) -> tuple[Any, Callable[..., Any]]:
        cast = _same_number(row, [_argument(row, kind, a) for kind, a in zip(row.args, args, strict=True)])
        result = _result(row, cast)

        def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            o = Emit(builder, "cuda")
            ready = [_value(o, context, kind, t, v) for kind, t, v in zip(row.args, cast, values, strict=True)]
            return _returned(o, context, row.result, row.ptx(o, *ready))

        return result(*cast), codegen

    # numba reads the number of arguments from the signature
    names = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ("typingctx", *(f"a{i}" for i in range(len(row.args))))]
    typing.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    typing.__name__ = typing.__qualname__ = row.name
    return intrinsic(prefer_literal="literal" in row.args)(typing)


def _argument(row: Instruction, kind: str, given: Any) -> Any:
    """The numba type that an argument is cast to."""
    if kind in _SCALARS:
        return _SCALARS[kind]
    if kind == "literal":
        if not isinstance(given, types.IntegerLiteral):
            raise RequireLiteralValue(f"{row.name}: an integer literal is needed, not {given}")
        return given
    plain = types.unliteral(given)
    fits = {
        "accumulator": isinstance(plain, types.UniTuple) and plain.dtype == types.float32,
        "map": isinstance(plain, DescriptorType),
        "coordinates": isinstance(plain, types.BaseTuple) and all(isinstance(t, types.Integer) for t in plain.types),
        "array": isinstance(plain, types.Array) and plain.dtype == types.float32,
        "bool": plain == types.boolean,
        "number": isinstance(plain, types.Integer | types.Float) and plain.bitwidth in (32, 64),
    }
    if not fits[kind]:
        raise TypingError(f"{row.name} takes a value of kind '{kind}', not {given}")
    return types.UniTuple(types.uint32, len(plain)) if kind == "coordinates" else plain


def _same_number(row: Instruction, cast: list[Any]) -> list[Any]:
    """One type for all arguments of kind "number": the wider of two floats, int64 of two integers, float64 of both."""
    numbers = {t for kind, t in zip(row.args, cast, strict=True) if kind == "number"}
    if len(numbers) < 2:
        return cast
    common = types.int64 if all(isinstance(t, types.Integer) for t in numbers) else types.float64
    return [common if kind == "number" else t for kind, t in zip(row.args, cast, strict=True)]


def _result(row: Instruction, cast: list[Any]) -> Any:
    if row.result == "void":
        return types.void
    if row.result in _SCALARS:
        return _SCALARS[row.result]
    if row.result in row.args:
        return cast[row.args.index(row.result)]
    return types.UniTuple(types.float32, cast[row.args.index("literal")].literal_value)


def _value(o: Emit, context: Any, kind: str, t: Any, v: Any) -> Any:
    if kind == "literal":
        return t.literal_value
    if kind == "map":
        return t.index
    if kind == "array":
        return LocalArray(context, o.builder, t, v)
    if kind == "accumulator":
        return [o.builder.extract_value(v, i) for i in range(len(t))]
    if kind == "coordinates":
        return [o.value(o.builder.extract_value(v, i)) for i in range(len(t))]
    return o.value(v)


def _returned(o: Emit, context: Any, kind: str, made: Any) -> Any:
    if kind == "void":
        return context.get_dummy_value()
    if kind != "accumulator":
        return made.v
    total = ir.Constant(ir.ArrayType(F32, len(made)), ir.Undefined)
    for i, value in enumerate(made):
        total = o.builder.insert_value(total, value, i)
    return total


def word(number: int) -> Any:
    """An LLVM constant of 32 bits."""
    return ir.Constant(I32, number)
