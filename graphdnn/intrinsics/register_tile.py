"""A tile of sums in vector registers: the inner loop of CPU contractions that read their input where it lies.

``tile_madd(c, ci, ldc, a, ai, lda, ka, b, bi, depth, rows)``, CPU only: for i < rows and j < J

    c[ci + i * ldc + j] += sum over d < depth of a[ai + i * lda + d * ka] * b[bi + d * J + j]

J is 64 bytes of elements (two vectors); ``rows`` a literal, at most 6, so that 16 vector registers hold the sums, a line of b and an element of a.
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


def _tile(builder: Any, element: Any, align: int, rows: int, operands: Any) -> None:
    """Sums loaded, the loop over d with the sums as phi nodes, sums stored."""
    c, ci, ldc, a, ai, lda, ka, b, bi, depth = operands
    vector = ir.VectorType(element, VECTOR_BYTES // align)
    lanes = vector.count

    def number(x: int) -> Any:
        return ir.Constant(_INDEX, x)

    def at(pointer: Any, index: Any) -> Any:
        return builder.bitcast(builder.gep(pointer, [index]), vector.as_pointer())

    places = [at(c, builder.add(ci, builder.add(builder.mul(ldc, number(i)), number(v * lanes)))) for i in range(rows) for v in range(VECTORS)]
    begin = [builder.load(p, align=align) for p in places]
    before, loop, after = builder.block, builder.append_basic_block("madd"), builder.append_basic_block("madd_end")
    builder.cbranch(builder.icmp_signed("<", number(0), depth), loop, after)
    builder.position_at_end(loop)
    d, sums = builder.phi(_INDEX), [builder.phi(vector) for _ in places]
    line, first = builder.add(bi, builder.mul(d, number(lanes * VECTORS))), builder.add(ai, builder.mul(d, ka))
    right = [builder.load(at(b, builder.add(line, number(v * lanes))), align=align) for v in range(VECTORS)]
    ends = []
    for i in range(rows):
        left = _splat(builder, builder.load(builder.gep(a, [builder.add(first, builder.mul(lda, number(i)))])), lanes)
        ends += [_multiply_add(builder, vector, left, right[v], sums[i * VECTORS + v]) for v in range(VECTORS)]
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


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def tile_madd(
    typingctx: Any, c: Any, ci: Any, ldc: Any, a: Any, ai: Any, lda: Any, ka: Any, b: Any, bi: Any, depth: Any, rows: Any
) -> tuple[Any, Callable[..., Any]]:
    """Sums of a register tile; see the module."""
    if not isinstance(rows, types.IntegerLiteral):
        raise RequireLiteralValue("tile_madd: the number of rows must be a literal")
    if not 1 <= rows.literal_value <= MAX_ROWS:
        raise TypingError(f"tile_madd of {rows.literal_value} rows: 1 to {MAX_ROWS} fit in registers")
    if not all(isinstance(p, types.CPointer) and p.dtype == c.dtype and p.dtype.bitwidth in (32, 64) for p in (a, b, c)):
        raise TypingError(f"tile_madd needs three pointers to one type of 4 or 8 bytes, got {c}, {a} and {b}")
    i, dtype = types.int64, c.dtype

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _tile(builder, context.get_data_type(dtype), dtype.bitwidth // 8, rows.literal_value, args[:10])
        return context.get_dummy_value()

    return types.void(c, i, i, a, i, i, i, b, i, i, rows), codegen


CPU = {"tile_madd": tile_madd}
"""Names that the CPU's namespace gets from this file."""
