"""Small floats and nibbles: decode (stored bits -> register), round (register -> nearest value of the type), encode (rounded register -> bits).

Registers are float32, for INT4 int32. ``round_X`` also takes float64 and rounds once (through round-to-odd). Ties go to even. What the types lack:

- FP8_E4M3, FP8_E5M2: beyond the largest finite value, infinities included, saturates to it; NaN stays NaN. An E5M2 infinity read from memory is one.
- FP4_E2M1: saturates to 6; has no NaN: NaN becomes 0.
- FP8_E8M0 (powers of two, no sign, no zero): nearest power, ties up as ml_dtypes has them; saturates at 2**127 and 2**-127 (so 0 becomes 2**-127);
  negative numbers and NaN become NaN (255).
- HALF, BFLOAT16: IEEE; overflow gives an infinity.

``encode_X`` is exact for values on the grid and only for those: codegen prints encode(round(x)), and the simulator refuses anything else.

Bit arithmetic throughout: it vectorizes, LLVM's half conversions crash on CPUs with F16C off, and fp8 cvt exists only from sm_89 on. Exceptions on
CUDA: half through LLVM's type (a conversion there and back cancels) and one cvt for bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphdnn.intrinsics.errors import SimulationError
from graphdnn.intrinsics.forms import FLOATS, Form, both, stored, to

if TYPE_CHECKING:
    from graphdnn.intrinsics.emit import Emit, Value

SIGN, MAGNITUDE, INFINITY = -(2**31), 0x7FFFFFFF, 0x7F800000
"""Fields of a float32, as i32."""


@dataclass(frozen=True)
class SmallFloat:
    """A float type with a sign. ``mantissa``: bits; ``low``: exponent of the smallest normal number; ``largest`` finite value; ``special``: smallest
    code (without sign) that is no finite number; ``infinite``: that code is an infinity in memory; ``overflows``: rounding gives infinities."""

    name: str
    bits: int
    mantissa: int
    low: int
    largest: float
    special: int
    infinite: bool
    overflows: bool = False

    @property
    def storage(self) -> str:
        """numba type of a stored element."""
        return "uint16" if self.bits == 16 else "uint8"

    @property
    def nan(self) -> int:
        """The code that NaN is stored as: quiet, positive."""
        return self.special | (1 << (self.mantissa - 1)) if self.infinite else self.special


HALF = SmallFloat("HALF", 16, 10, -14, 65504.0, 0x7C00, True, True)
BFLOAT16 = SmallFloat("BFLOAT16", 16, 7, -126, 3.3895313892515355e38, 0x7F80, True, True)
E4M3 = SmallFloat("FP8_E4M3", 8, 3, -6, 448.0, 0x7F, False)
E5M2 = SmallFloat("FP8_E5M2", 8, 2, -14, 57344.0, 0x7C, True)
E2M1 = SmallFloat("FP4_E2M1", 4, 1, 0, 6.0, 8, False)


def single(o: Emit, x: Value) -> Value:
    """float32 of a register; a float64 is rounded to odd (truncated, last bit set if inexact), so that rounding again to fewer bits is exact."""
    if x.bits == 32:
        return x
    y = x.to("f32")
    back = y.to("f64")
    bits = y.as_int()
    too_far = o.abs(back) > o.abs(x)
    odd = o.select(too_far, bits - 1, bits) | 1
    inexact = (back < x) | (back > x)
    return o.select(inexact, odd, bits).as_float()


def decode(f: SmallFloat) -> Callable[[Emit, Value], Value]:
    """Bits to float32: shift into place; a subnormal is read with a hidden bit, which is then subtracted (no subnormal float32 arises on the way)."""

    def form(o: Emit, code: Value) -> Value:
        c = code.to("i32", signed=False)
        magnitude = c & ((1 << (f.bits - 1)) - 1)
        normal = (magnitude << (23 - f.mantissa)) + ((f.low + 126) << 23)
        subnormal = (normal + (1 << 23)).as_float() - 2.0**f.low
        bits = o.select(magnitude < (1 << f.mantissa), subnormal.as_int(), normal)
        if f.special < 1 << (f.bits - 1):
            special = (magnitude << (23 - f.mantissa)) | INFINITY
            bits = o.select(magnitude < f.special, bits, special)
        return (bits | ((c << (32 - f.bits)) & SIGN)).as_float()

    return form


def round_to(f: SmallFloat) -> Callable[[Emit, Value], Value]:
    """Nearest value of the type: adding and subtracting 2**(exponent + 23 - mantissa) leaves ``mantissa`` bits, ties to even."""

    def form(o: Emit, register: Value) -> Value:
        x = single(o, register)
        cap = 2.0 * 2.0 ** math.floor(math.log2(f.largest)) if f.overflows else f.largest
        a = o.abs(x)
        a = o.select(a > cap, cap, a)
        exponent = a.as_int() & INFINITY
        lowest = (f.low + 127) << 23
        exponent = o.select(exponent < lowest, lowest, exponent)
        magic = (exponent + ((23 - f.mantissa) << 23)).as_float()
        rounded = (a + magic) - magic
        if f.overflows:
            rounded = o.select(rounded > f.largest, math.inf, rounded)
        rounded = o.copysign(rounded, x)
        return o.select(x.isnan(), 0.0, rounded) if f is E2M1 else rounded

    return form


def encode(f: SmallFloat) -> Callable[[Emit, Value], Value]:
    """Float32 on the grid to bits: :func:`decode` backwards."""

    def form(o: Emit, x: Value) -> Value:
        bits = x.as_int()
        magnitude = bits & MAGNITUDE
        subnormal = (o.abs(x) + 2.0**f.low).as_int() - (1 << 23)
        normal = o.select(magnitude < ((f.low + 127) << 23), subnormal, magnitude)
        code = (normal - ((f.low + 126) << 23)).lshr(23 - f.mantissa)
        if f.overflows:
            code = o.select(magnitude < INFINITY, code, f.special)
        if f is not E2M1:
            code = o.select(magnitude > INFINITY, f.nan, code)
        code = code | (bits.lshr(32 - f.bits) & (1 << (f.bits - 1)))
        return code.to("i16" if f.bits == 16 else "i8")

    return form


def _decode_half_cuda(o: Emit, code: Value) -> Value:
    return code.as_float().to("f32")


def _round_half_cuda(o: Emit, x: Value) -> Value:
    return single(o, x).to("f16").to("f32")


def _encode_half_cuda(o: Emit, x: Value) -> Value:
    return x.to("f16").as_int()


def _decode_bfloat16(o: Emit, code: Value) -> Value:
    return (code.to("i32", signed=False) << 16).as_float()


def _round_bfloat16_cpu(o: Emit, register: Value) -> Value:
    x = single(o, register)
    bits = x.as_int()
    rounded = bits + (bits.lshr(16) & 1) + 0x7FFF
    quiet = bits | 0x00400000
    return (o.select(x.isnan(), quiet, rounded) & -0x10000).as_float()


def _round_bfloat16_cuda(o: Emit, register: Value) -> Value:
    return _decode_bfloat16(o, o.ptx("cvt.rn.bf16.f32 $0, $1;", "=h,f", "i16", single(o, register)))


def _encode_bfloat16(o: Emit, x: Value) -> Value:
    return x.as_int().lshr(16).to("i16")


def _decode_e8m0(o: Emit, code: Value) -> Value:
    c = code.to("i32", signed=False)
    bits = o.select(c.eq(0), 0x00400000, c << 23)
    return o.select(c.eq(255), 0x7FC00000, bits).as_float()


def _round_e8m0(o: Emit, register: Value) -> Value:
    x = single(o, register)
    bits = x.as_int()
    rounded = (bits + 0x00400000) & INFINITY
    rounded = o.select(bits < 0x00600000, 0x00400000, rounded)
    rounded = o.select(bits < 0x7F400000, rounded, 0x7F000000)
    return o.select(x.isnan() | (x < 0.0), 0x7FC00000, rounded).as_float()


def _encode_e8m0(o: Emit, x: Value) -> Value:
    return x.as_int().lshr(23).to("i8")


def _decode_int4(o: Emit, nibble: Value) -> Value:
    return (nibble.to("i32", signed=False) << 28) >> 28


def _encode_int4(o: Emit, x: Value) -> Value:
    return (x & 15).to("i8")


# --- simulator models: exact arithmetic on Python floats, no bit tricks


def decode_model(f: SmallFloat) -> Callable[[int], float]:
    """The value of a code, from the definition of the type."""

    def model(code: int) -> float:
        magnitude = code & ((1 << (f.bits - 1)) - 1)
        exponent, fraction = magnitude >> f.mantissa, magnitude & ((1 << f.mantissa) - 1)
        if magnitude >= f.special:
            value = math.inf if f.infinite and fraction == 0 else math.nan
        elif exponent == 0:
            value = math.ldexp(fraction, f.low - f.mantissa)
        else:
            value = math.ldexp((1 << f.mantissa) + fraction, f.low - f.mantissa + exponent - 1)
        return -value if code >> (f.bits - 1) & 1 else value

    return model


def round_model(f: SmallFloat) -> Callable[[float], float]:
    """Nearest multiple of the unit in the last place of x, by Python's round (half to even)."""

    def model(x: float) -> float:
        if x != x:
            return x if f is not E2M1 else 0.0
        if math.isinf(x):
            return x if f.overflows else math.copysign(f.largest, x)
        unit = max(math.frexp(x)[1] - 1, f.low) - f.mantissa
        value = math.ldexp(float(round(math.ldexp(x, -unit))), unit)
        if abs(value) > f.largest:
            value = math.inf if f.overflows else f.largest
        return math.copysign(value, x)

    return model


def encode_model(f: SmallFloat) -> Callable[[float], int]:
    """The code of a value of the type; SimulationError for any other number."""

    def model(x: float) -> int:
        sign = (1 << (f.bits - 1)) if math.copysign(1.0, x) < 0 else 0
        if x != x and f is not E2M1:
            return sign | f.nan
        if math.isinf(x) and f.overflows:
            return sign | f.special
        if x != round_model(f)(x):
            raise SimulationError(f"encode_{f.name} got {x!r}, which is no value of the type; print round_{f.name} before it")
        exponent = max(math.frexp(x)[1] - 1, f.low) if x else f.low
        fraction = int(math.ldexp(abs(x), f.mantissa - exponent))
        return sign | (fraction + ((exponent - f.low) << f.mantissa))

    return model


def _e8m0_model(x: float) -> float:
    if x != x or x < 0.0:
        return math.nan
    if x < 2.0**-127 or math.isinf(x):
        return 2.0**127 if x > 1.0 else 2.0**-127
    fraction, exponent = math.frexp(x)
    return math.ldexp(1.0, min(exponent if fraction >= 0.75 else exponent - 1, 127))


def _e8m0_code_model(x: float) -> int:
    if x != x:
        return 255
    if x != _e8m0_model(x):
        raise SimulationError(f"encode_FP8_E8M0 got {x!r}, which is no value of the type; print round_FP8_E8M0 before it")
    return math.frexp(x)[1] + 126


def _forms(f: SmallFloat) -> tuple[Form, Form, Form]:
    cpu = decode(f), round_to(f), encode(f)
    cuda = cpu
    if f is HALF:
        cuda = _decode_half_cuda, _round_half_cuda, _encode_half_cuda
    elif f is BFLOAT16:
        cpu = _decode_bfloat16, _round_bfloat16_cpu, _encode_bfloat16
        cuda = _decode_bfloat16, _round_bfloat16_cuda, _encode_bfloat16
    return (
        Form(f"decode_{f.name}", stored(f.storage, "float32"), cpu[0], cuda[0], decode_model(f)),
        Form(f"round_{f.name}", to("float32", *FLOATS), cpu[1], cuda[1], round_model(f)),
        Form(f"encode_{f.name}", to(f.storage, "float32"), cpu[2], cuda[2], encode_model(f)),
    )


FORMS = (
    *(form for f in (HALF, BFLOAT16, E4M3, E5M2, E2M1) for form in _forms(f)),
    both("decode_FP8_E8M0", stored("uint8", "float32"), _decode_e8m0, lambda code: math.nan if code == 255 else math.ldexp(1.0, code - 127)),
    both("round_FP8_E8M0", to("float32", *FLOATS), _round_e8m0, _e8m0_model),
    both("encode_FP8_E8M0", to("uint8", "float32"), _encode_e8m0, _e8m0_code_model),
    both("decode_INT4", stored("uint8", "int32"), _decode_int4, lambda nibble: (nibble & 15 ^ 8) - 8),
    both("encode_INT4", stored("int32", "uint8"), _encode_int4, lambda x: x & 15),
)
"""The rows of this file."""
