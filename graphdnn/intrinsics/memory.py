"""Vector loads and stores, atomics, and arrays of a thread. The simulator's models of these are in :mod:`graphdnn.intrinsics.simmemory`.

``vload(dst, pointer, index, N)`` / ``vstore(pointer, index, src, N)``: elements pointer[index .. index + N - 1] to or from a thread's local array, as
one access of N * itemsize = 4, 8 or 16 bytes, aligned to that; N a literal. They are plain LLVM vector accesses to global memory, so that LLVM may
schedule them.

``atomic_inc_u32(pointer, index)``: add 1 to a uint32, returns the old value; relaxed (fences are the kernel's business).

``local_array(N, type)``: CPU only; N elements on the stack, as a pointer. On CUDA and in the simulator it is cuda.local.array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.errors import RequireLiteralValue, TypingError
from numba.extending import intrinsic

from graphdnn.intrinsics.emit import Emit

VECTOR_BYTES = (4, 8, 16)


def _vector_type(name: str, array: Any, pointer: Any, n: Any) -> tuple[Any, int]:
    """(element type, count) of a vector access; a typing error where it has none."""
    if not isinstance(n, types.IntegerLiteral):
        raise RequireLiteralValue(f"{name}: the number of elements must be a literal")
    count = n.literal_value
    if not isinstance(pointer, types.CPointer) or not isinstance(array, types.Array) or array.dtype != pointer.dtype:
        raise TypingError(f"{name} needs a pointer and a local array of one element type, got {pointer} and {array}")
    if count * pointer.dtype.bitwidth // 8 not in VECTOR_BYTES:
        raise TypingError(f"{name} of {count} x {pointer.dtype}: no access of {VECTOR_BYTES} bytes")
    return pointer.dtype, count


def _vector(context: Any, builder: Any, element: Any, count: int, pointer: Any, index: Any) -> tuple[Any, int, Any]:
    """How to access ``count`` elements: (LLVM type of a lane, elements per lane, address in global memory). Narrow elements travel four bytes a lane,
    since libNVVM moves at most four lanes at a time."""
    lane = context.get_data_type(element) if element.bitwidth >= 32 else ir.IntType(32)
    per_lane = max(1, 32 // element.bitwidth)
    vector = ir.VectorType(lane, count // per_lane).as_pointer()
    generic = builder.bitcast(builder.gep(pointer, [index]), vector)
    return lane, per_lane, builder.addrspacecast(generic, ir.PointerType(vector.pointee, addrspace=1))


def _opaque(builder: Any, word: Any) -> Any:
    """The same word, unknown to LLVM, which would turn a vector of words back into one of narrow elements. ptxas drops the move."""
    return Emit(builder, "cuda").ptx("mov.b32 $0, $1;", "=r,r", "i32", Emit(builder, "cuda").value(word)).v


def _unpack(builder: Any, word: Any, to: Any, count: int) -> list[Any]:
    """The ``count`` elements of type ``to`` in a lane, lowest first."""
    if count == 1:
        return [word]
    hidden = _opaque(builder, word)
    return [builder.trunc(builder.lshr(hidden, ir.Constant(ir.IntType(32), k * to.width)), to) for k in range(count)]


def _pack(builder: Any, elements: list[Any]) -> Any:
    """A lane from its elements, lowest first."""
    if len(elements) == 1:
        return elements[0]
    i32 = ir.IntType(32)
    word = ir.Constant(i32, 0)
    for k, e in enumerate(elements):
        word = builder.or_(word, builder.shl(builder.zext(e, i32), ir.Constant(i32, k * e.type.width)))
    return _opaque(builder, word)


def _elements(context: Any, builder: Any, array_type: Any, array: Any, count: int) -> list[Any]:
    """Addresses of the first ``count`` elements of a local array."""
    data = context.make_array(array_type)(context, builder, array).data
    return [builder.gep(data, [ir.Constant(ir.IntType(64), i)]) for i in range(count)]


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def vload(typingctx: Any, dst: Any, pointer: Any, index: Any, n: Any) -> tuple[Any, Callable[..., Any]]:
    """Global memory to local array; see the module."""
    element, count = _vector_type("vload", dst, pointer, n)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _, per_lane, address = _vector(context, builder, element, count, args[1], args[2])
        loaded = builder.load(address, align=count * element.bitwidth // 8)
        slots = iter(_elements(context, builder, dst, args[0], count))
        for k in range(count // per_lane):
            word = builder.extract_element(loaded, ir.Constant(ir.IntType(32), k))
            for value in _unpack(builder, word, context.get_data_type(element), per_lane):
                builder.store(value, next(slots))
        return context.get_dummy_value()

    return types.void(dst, pointer, types.int64, n), codegen


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def vstore(typingctx: Any, pointer: Any, index: Any, src: Any, n: Any) -> tuple[Any, Callable[..., Any]]:
    """Local array to global memory; see the module."""
    element, count = _vector_type("vstore", src, pointer, n)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lane, per_lane, address = _vector(context, builder, element, count, args[0], args[1])
        values = [builder.load(slot) for slot in _elements(context, builder, src, args[2], count)]
        vector = ir.Constant(ir.VectorType(lane, count // per_lane), ir.Undefined)
        for k in range(count // per_lane):
            word = _pack(builder, values[k * per_lane : (k + 1) * per_lane])
            vector = builder.insert_element(vector, word, ir.Constant(ir.IntType(32), k))
        builder.store(vector, address, align=count * element.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, src, n), codegen


@intrinsic  # type: ignore[untyped-decorator]
def atomic_inc_u32(typingctx: Any, pointer: Any, index: Any) -> tuple[Any, Callable[..., Any]]:
    """Add 1, return the old value; see the module."""
    if pointer != types.CPointer(types.uint32):
        raise TypingError(f"atomic_inc_u32 needs a pointer to uint32, got {pointer}")

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.gep(args[0], [args[1]]), ir.Constant(ir.IntType(32), 1), "monotonic")

    return types.uint32(pointer, types.int64), codegen


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def local_array(typingctx: Any, n: Any, element: Any) -> tuple[Any, Callable[..., Any]]:
    """Stack elements as a pointer; see the module."""
    if not isinstance(n, types.IntegerLiteral):
        raise RequireLiteralValue("local_array: the number of elements must be a literal")
    dtype = element.dtype

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return cgutils.alloca_once(builder, context.get_data_type(dtype), size=n.literal_value)

    return types.CPointer(dtype)(n, element), codegen


CUDA = {"vload": vload, "vstore": vstore, "atomic_inc_u32": atomic_inc_u32}
CPU = {"local_array": local_array}
"""Names that these targets' namespaces get from this file."""
