"""Arithmetic that Python, NumPy and LLVM disagree on, in one meaning for all targets; float -> integer conversions; wrapping and saturation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from graphdnn.intrinsics.forms import FLOATS, INTEGERS, SIGNED, Form, arithmetic, both, floating, integral, to

if TYPE_CHECKING:
    from graphdnn.intrinsics.emit import Emit, Value

Number = Any
"""A Python float or int in a simulator model."""


def nan_pick(op: str) -> Callable[[Emit, Value, Value], Value]:
    """Larger or smaller of two, NaN if either is. On CUDA one instruction in float32 (max.NaN, sm_80 and later).

    On a CPU llvm.maximum / llvm.minimum, which LLVM vectorizes as a reduction; a chain of compares and selects, as an unrolled reduction makes
    it, takes LLVM 20 exponential time (36 in a row: over a minute).
    """

    def form(o: Emit, a: Value, b: Value) -> Value:
        if o.target == "cuda" and a.real and a.bits == 32:
            return o.ptx(f"{op}.NaN.f32 $0, $1, $2;", "=f,f,f", "f32", a, b)
        if o.target == "cpu" and a.real:
            return o.call(f"llvm.{op}imum.f{a.bits}", a.type, a, b)
        first = a > b if op == "max" else a < b
        if a.real:
            first = first | a.isnan()
        return o.select(first, a, b)

    return form


def _nan_pick_model(fn: Callable[..., Number]) -> Callable[[Number, Number], Number]:
    return lambda a, b: math.nan if a != a or b != b else fn(a, b)


def fabs(o: Emit, x: Value) -> Value:
    """Magnitude; the smallest integer wraps to itself."""
    return o.abs(x) if x.real else o.select(x < 0, -x, x)


def floormod(o: Emit, a: Value, b: Value) -> Value:
    """Remainder with the sign of the divisor (NumPy's mod); x mod 0 is NaN for floats, 0 for integers."""
    if a.real:
        r = o.math("fmod", a, b) if o.target == "cuda" else a % b
        wrong = ((r < 0.0) ^ (b < 0.0)) & r.ne(0.0)
        return o.select(r.eq(0.0), o.copysign(r, b), o.select(wrong, r + b, r))
    # -1 divides everything, but the smallest integer over -1 traps
    harmless = o.select(b.eq(0) | b.eq(-1), 1, b)
    r = a % harmless
    return o.select((r ^ harmless) < 0, o.select(r.ne(0), r + harmless, r), r)


def _floormod_model(a: Number, b: Number) -> Number:
    if isinstance(a, int):
        return a % b if b else 0
    with np.errstate(all="ignore"):
        return float(np.mod(a, b))


def truediv(o: Emit, a: Value, b: Value) -> Value:
    """True quotient; of integers rounded half to even, x / 0 saturated by the sign of x, 0 / 0 = 0."""
    if a.real:
        return a / b
    top = (1 << (a.bits - 1)) - 1
    negative = (a ^ b) < 0
    n, d = o.select(a < 0, -a, a), o.select(b < 0, -b, b)
    d = o.select(d.eq(0), 1, d)
    q = n.udiv(d)
    r = n - q * d
    gap = d - r
    up = gap.ult(r) | (gap.eq(r) & (q & 1).ne(0))
    q = o.select(up, q + 1, q)
    # the only quotient above the range is 2**(bits - 1), whose bits are the smallest integer
    signed = o.select(negative, -q, o.select(q < 0, top, q))
    at_zero = o.select(a < 0, -top - 1, o.select(a.eq(0), a, top))
    return o.select(b.eq(0), at_zero, signed)


def _truediv_model(a: Number, b: Number) -> Number:
    if isinstance(a, int):
        if b == 0:
            return a << 64  # saturates by its sign
        q, r = divmod(abs(a), abs(b))
        q += 2 * r > abs(b) or (2 * r == abs(b) and q % 2 == 1)
        return -q if (a < 0) != (b < 0) else q
    with np.errstate(all="ignore"):
        return float(np.divide(a, b))


def ipow(o: Emit, a: Value, b: Value) -> Value:
    """Integer power by squaring, wrapping. A negative exponent truncates 1 / a**|b| towards 0, so only 1 and -1 give something else; 0 gives 0."""
    builder = o.builder
    entry, loop, end = builder.basic_block, builder.append_basic_block("ipow"), builder.append_basic_block("ipow.end")
    builder.branch(loop)
    builder.position_at_end(loop)
    result, square, left = (o.value(builder.phi(a.type)) for _ in range(3))
    more = o.select((left & 1).ne(0), result * square, result)
    squared, rest = square * square, left.lshr(1)
    for phi, first, following in ((result, o.const(a, 1), more), (square, a, squared), (left, b, rest)):
        phi.v.add_incoming(first.v, entry)
        phi.v.add_incoming(following.v, loop)
    builder.cbranch(rest.ne(0).v, loop, end)
    builder.position_at_end(end)
    of_one = o.select(a.eq(1), 1, o.select((b & 1).ne(0), a, o.const(a, 1)))
    unit = a.eq(1) | a.eq(-1)
    return o.select(b < 0, o.select(unit, of_one, 0), more)


def _ipow_model(a: int, b: int) -> int:
    if b >= 0:
        return pow(a, b, 1 << 64)
    return 0 if a not in (1, -1) else a if b % 2 else 1


def fadd_reassoc(o: Emit, x: Value, y: Value) -> Value:
    """x + y; on the CPU LLVM may reorder a chain of these, so that a sum in a loop becomes a vector of partial sums."""
    return o.value(o.builder.fadd(x.v, y.v, flags=("reassoc",))) if o.target == "cpu" else x + y


def mul_add(o: Emit, x: Value, y: Value, z: Value) -> Value:
    """x * y + z; of floats in one step where the target has one. Integers wrap."""
    return o.mad(x, y, z) if x.real else x * y + z


def rint(bits: int) -> tuple[Callable[[Emit, Value], Value], Callable[[Emit, Value], Value]]:
    """CPU and CUDA forms of float -> integer: half to even, saturating, NaN -> 0."""
    top, limit = (1 << (bits - 1)) - 1, 2.0 ** (bits - 1)

    def cpu(o: Emit, x: Value) -> Value:
        r = o.llvm("rint", x)
        inside = (r >= -limit) & (r < limit)
        i = o.select(inside, r, 0.0).to(f"i{bits}")
        return o.select(r >= limit, top, o.select(r < -limit, -top - 1, i))

    def cuda(o: Emit, x: Value) -> Value:
        source = "fd"[x.bits == 64]
        i = o.ptx(f"cvt.rni.s{bits}.f{x.bits} $0, $1;", f"={'rl'[bits == 64]},{source}", f"i{bits}", x)
        return o.select(x.isnan(), 0, i)

    return cpu, cuda


def _rint_model(x: float) -> int:
    if x != x:
        return 0
    return round(x) if math.isfinite(x) else (1 << 64) * (1 if x > 0 else -1)


def _saturate(low: int, high: int) -> tuple[Callable[[Emit, Value], Value], Callable[[Emit, Value], Value]]:
    """CPU and CUDA forms of float -> an int32 register within [low, high]."""

    def clamp(o: Emit, i: Value) -> Value:
        i = o.select(i < low, low, i)
        return o.select(i > high, high, i)

    cpu, cuda = rint(32)
    return lambda o, x: clamp(o, cpu(o, x)), lambda o, x: clamp(o, cuda(o, x))


def _saturating(name: str, low: int, high: int) -> Form:
    cpu, cuda = _saturate(low, high)
    return Form(name, to("int32", *FLOATS), cpu, cuda, lambda x: min(max(_rint_model(x), low), high))


def _wrapping(name: str, bits: int, signed: bool) -> Form:
    """int32 or int64 -> the int32 register of a narrow type, modulo 2**bits."""

    def form(o: Emit, x: Value) -> Value:
        low = x.to("i32") << (32 - bits)
        return low >> (32 - bits) if signed else low.lshr(32 - bits)

    half = 1 << (bits - 1) if signed else 0
    return both(name, to("int32", *SIGNED), form, lambda x: (x + half) % (1 << bits) - half)


def _to_bool(o: Emit, x: Value) -> Value:
    return (x.ne(0.0) if x.real else x.ne(0)).to("i32", signed=False)


FORMS = (
    both("nanmax", arithmetic, nan_pick("max"), _nan_pick_model(max), arity=2),
    both("nanmin", arithmetic, nan_pick("min"), _nan_pick_model(min), arity=2),
    both("fabs", arithmetic, fabs, abs),
    both("floormod", arithmetic, floormod, _floormod_model, arity=2),
    both("truediv", arithmetic, truediv, _truediv_model, arity=2, saturates=True),
    both("ipow", integral, ipow, _ipow_model, arity=2),
    both("fadd_reassoc", floating, fadd_reassoc, lambda x, y: x + y, arity=2),
    both("mul_add", arithmetic, mul_add, lambda x, y, z: x * y + z, arity=3),
    Form("rint_int32", to("int32", *FLOATS), *rint(32), _rint_model, saturates=True),
    Form("rint_int64", to("int64", *FLOATS), *rint(64), _rint_model, saturates=True),
    _saturating("sat_INT8", -128, 127),
    _saturating("sat_UINT8", 0, 255),
    _saturating("sat_INT4", -8, 7),
    _wrapping("wrap_INT8", 8, True),
    _wrapping("wrap_UINT8", 8, False),
    _wrapping("wrap_INT4", 4, True),
    both("to_bool", to("int32", *FLOATS, *INTEGERS, "bool"), _to_bool, lambda x: int(x != 0)),
)
"""The rows of this file."""
