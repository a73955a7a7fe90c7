"""A tile of sums in vector registers: the inner loop of CPU contractions that read their input where it lies.

``tile_madd(c, ci, ldc, a, ai, lda, ka, b, bi, depth, rows)``, CPU only: for i < rows and j < J

    c[ci + i * ldc + j] += sum over d < depth of a[ai + i * lda + d * ka] * b[bi + d * J + j]

J is 64 bytes of elements (two vectors); ``rows`` a literal, at most 6, so that 16 vector registers hold the sums, a line of b and an element of a.
``tile_product(c, ci, ldc, a, ai, lda, ka, b, bi, ldb, depth, rows, blocks, how)``: the same for any number of rows, ``blocks`` times J columns, and
lines of b that are ``ldb`` apart; ``rows``, ``blocks`` and ``how`` literals. ``how`` 0: c is set to the sums; 1: they are added to it; 2: added,
without the terms where a is -0.0 (which stand for nothing: b may be NaN there).

Every sum is added up in the order of d, with a fused multiply-add where the CPU has one. Written in LLVM vectors because LLVM finds them in the loops
only by luck (2 to 36 GFLOP/s for one shape with the loop order; this, 83; one Zen 3 core, 2026-11-29).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.errors import RequireLiteralValue, TypingError
from numba.extending import intrinsic

VECTOR_BYTES = 32
VECTORS = 2
MAX_ROWS = 6
_INDEX = ir.IntType(64)


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    vector = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes))


def _multiply_add(builder: Any, vector: Any, x: Any, y: Any, z: Any) -> Any:
    if isinstance(vector.element, ir.IntType):
        return builder.add(builder.mul(x, y), z)
    suffix = f"v{vector.count}f{32 if isinstance(vector.element, ir.FloatType) else 64}"
    fused = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fmuladd.{suffix}")
    return builder.call(fused, [x, y, z])


def _unless_hidden(builder: Any, scalar: Any, after: Any, before: Any) -> Any:
    """``after``, or ``before`` where the scalar is -0.0."""
    bits = ir.IntType(64 if isinstance(scalar.type, ir.DoubleType) else 32)
    hidden = builder.icmp_unsigned("==", builder.bitcast(scalar, bits), ir.Constant(bits, 1 << (bits.width - 1)))
    return builder.select(hidden, before, after)


def _tile(builder: Any, element: Any, align: int, rows: int, operands: Any, how: int = 1) -> None:
    """Sums loaded (or zeros, ``how`` 0), the loop over d with the sums as phi nodes, sums stored."""
    c, ci, ldc, a, ai, lda, ka, b, bi, ldb, depth = operands
    vector = ir.VectorType(element, VECTOR_BYTES // align)
    lanes = vector.count

    def number(x: int) -> Any:
        return ir.Constant(_INDEX, x)

    def at(pointer: Any, index: Any) -> Any:
        return builder.bitcast(builder.gep(pointer, [index]), vector.as_pointer())

    places = [at(c, builder.add(ci, builder.add(builder.mul(ldc, number(i)), number(v * lanes)))) for i in range(rows) for v in range(VECTORS)]
    begin = [builder.load(p, align=align) if how else ir.Constant(vector, [0] * lanes) for p in places]
    before, loop, after = builder.block, builder.append_basic_block("madd"), builder.append_basic_block("madd_end")
    builder.cbranch(builder.icmp_signed("<", number(0), depth), loop, after)
    builder.position_at_end(loop)
    d, sums = builder.phi(_INDEX), [builder.phi(vector) for _ in places]
    line, first = builder.add(bi, builder.mul(d, ldb)), builder.add(ai, builder.mul(d, ka))
    right = [builder.load(at(b, builder.add(line, number(v * lanes))), align=align) for v in range(VECTORS)]
    ends = []
    for i in range(rows):
        scalar = builder.load(builder.gep(a, [builder.add(first, builder.mul(lda, number(i)))]))
        left = _splat(builder, scalar, lanes)
        for v in range(VECTORS):
            old = sums[i * VECTORS + v]
            new = _multiply_add(builder, vector, left, right[v], old)
            ends.append(_unless_hidden(builder, scalar, new, old) if how == 2 else new)
    following = builder.add(d, number(1))
    for phi, start, end in zip([d, *sums], [number(0), *begin], [following, *ends], strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(end, loop)
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)
    builder.position_at_end(after)
    results = [builder.phi(vector) for _ in places]
    for place, result, start, end in zip(places, results, begin, ends, strict=True):
        result.add_incoming(start, before)
        result.add_incoming(end, loop)
        builder.store(result, place, align=align)


def _product(builder: Any, element: Any, align: int, rows: int, blocks: int, operands: Any, how: int) -> None:
    """Register tiles over the rows and the blocks of columns of a whole tile."""
    c, ci, ldc, a, ai, lda, ka, b, bi, ldb, depth = operands
    columns = ir.Constant(_INDEX, VECTORS * VECTOR_BYTES // align)

    def part(count: int, row: Any, block: Any) -> None:
        column = builder.mul(block, columns)
        at = builder.add(builder.add(ci, column), builder.mul(row, ldc))
        own = (c, at, ldc, a, builder.add(ai, builder.mul(row, lda)), lda, ka, b, builder.add(bi, column), ldb, depth)
        _tile(builder, element, align, count, own, how)

    with cgutils.for_range(builder, ir.Constant(_INDEX, blocks), intp=_INDEX) as n:
        if rows >= MAX_ROWS:
            with cgutils.for_range(builder, ir.Constant(_INDEX, rows // MAX_ROWS), intp=_INDEX) as group:
                part(MAX_ROWS, builder.mul(group.index, ir.Constant(_INDEX, MAX_ROWS)), n.index)
        if rows % MAX_ROWS:
            part(rows % MAX_ROWS, ir.Constant(_INDEX, rows // MAX_ROWS * MAX_ROWS), n.index)


def _literals(name: str, **given: Any) -> list[int]:
    """Values of arguments that must be literal numbers."""
    for what, x in given.items():
        if not isinstance(x, types.IntegerLiteral):
            raise RequireLiteralValue(f"{name}: {what} must be a literal")
    return [x.literal_value for x in given.values()]


def _check_pointers(name: str, c: Any, a: Any, b: Any) -> None:
    if not all(isinstance(p, types.CPointer) and p.dtype == c.dtype and p.dtype.bitwidth in (32, 64) for p in (a, b, c)):
        raise TypingError(f"{name} needs three pointers to one type of 4 or 8 bytes, got {c}, {a} and {b}")


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def tile_madd(
    typingctx: Any, c: Any, ci: Any, ldc: Any, a: Any, ai: Any, lda: Any, ka: Any, b: Any, bi: Any, depth: Any, rows: Any
) -> tuple[Any, Callable[..., Any]]:
    """Sums of a register tile; see the module."""
    (count,) = _literals("tile_madd", rows=rows)
    if not 1 <= count <= MAX_ROWS:
        raise TypingError(f"tile_madd of {count} rows: 1 to {MAX_ROWS} fit in registers")
    _check_pointers("tile_madd", c, a, b)
    i, dtype = types.int64, c.dtype

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        line = ir.Constant(_INDEX, VECTORS * VECTOR_BYTES * 8 // dtype.bitwidth)
        _tile(builder, context.get_data_type(dtype), dtype.bitwidth // 8, count, [*args[:9], line, args[9]])
        return context.get_dummy_value()

    return types.void(c, i, i, a, i, i, i, b, i, i, rows), codegen


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def tile_product(  # fmt: skip
    typingctx: Any, c: Any, ci: Any, ldc: Any, a: Any, ai: Any, lda: Any, ka: Any, b: Any, bi: Any, ldb: Any, depth: Any,
    rows: Any, blocks: Any, how: Any,
) -> tuple[Any, Callable[..., Any]]:
    """Product of whole tiles; see the module."""
    count, wide, kind = _literals("tile_product", rows=rows, blocks=blocks, how=how)
    _check_pointers("tile_product", c, a, b)
    if count < 1 or wide < 1 or kind not in (0, 1, 2) or (kind == 2 and not isinstance(c.dtype, types.Float)):
        raise TypingError(f"tile_product of {count} rows, {wide} blocks, how {kind}: at least 1, 1 and 0 to 2 (2 for floats alone)")
    i, dtype = types.int64, c.dtype

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _product(builder, context.get_data_type(dtype), dtype.bitwidth // 8, count, wide, args[:11], kind)
        return context.get_dummy_value()

    return types.void(c, i, i, a, i, i, i, b, i, i, i, rows, blocks, how), codegen


CPU = {"tile_madd": tile_madd, "tile_product": tile_product}
"""Names that the CPU's namespace gets from this file."""
