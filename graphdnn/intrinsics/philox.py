"""Random numbers: Philox 4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11), with equal bits on every target.

A number belongs to a logical position, not to a thread: key = ``seed``, counter = (``index``, ``offset``), low halves first. Every element takes a
counter of its own, its first word for a uniform number, its first two for a normal one; so values depend neither on layout, tiles and target nor on
which elements are calculated, and a second kernel (a backward pass) gets them again from the same three numbers.

- ``philox_uniform(seed, offset, index)``: float32 in [0, 1), a multiple of 2**-24.
- ``philox_normal(seed, offset, index)``: float32, mean 0, deviation 1 (Box and Muller): sqrt(-2 ln u) cos(2 pi v), u in (0, 1], v in [0, 1). Every
  step is one IEEE operation that no target may fuse. Largest error against the formula in real numbers: 4 ulp.
- ``mul_rn(a, b)``: a product that is rounded before anything else is done with it: in an FMA it would give other bits where there is one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from graphdnn.intrinsics.elementary import LN2_HI, LN2_LO, LOG1P
from graphdnn.intrinsics.forms import INTEGERS, Signature, both, floating

if TYPE_CHECKING:
    from graphdnn.intrinsics.emit import Emit, Value

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
"""Of the first and the third word of the counter."""
WEYL = (0x9E3779B9, 0xBB67AE85)
"""What the two words of the key grow by from round to round."""
QUARTER = math.pi / 2
COS = tuple((-1.0) ** k * QUARTER ** (2 * k) / math.factorial(2 * k) for k in range(6))
"""cos of x quarter turns in powers of x**2 (Taylor), for |x| <= 1/2: the next term is below 2.5e-8."""
SIN = tuple((-1.0) ** k * QUARTER ** (2 * k + 1) / math.factorial(2 * k + 1) for k in range(6))
"""sin of x quarter turns, divided by x, likewise."""


# --- the words


def _halves(x: Value) -> tuple[Value, Value]:
    return x.to("i32"), x.lshr(32).to("i32")


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def words(o: Emit, seed: Value, offset: Value, index: Value) -> tuple[Value, Value, Value, Value]:
    """The four words (i32) that belong to 64-bit ``seed``, ``offset`` and ``index``."""
    (c0, c1), (c2, c3), (k0, k1) = _halves(index), _halves(offset), _halves(seed)
    for r in range(ROUNDS):
        low = [(c.to("i64", signed=False) * m) for c, m in ((c0, MULTIPLIERS[0]), (c2, MULTIPLIERS[1]))]
        (lo0, hi0), (lo1, hi1) = _halves(low[0]), _halves(low[1])
        key0, key1 = k0 + _signed(r * WEYL[0] & 0xFFFFFFFF), k1 + _signed(r * WEYL[1] & 0xFFFFFFFF)
        c0, c1, c2, c3 = hi1 ^ c1 ^ key0, lo1, hi0 ^ c3 ^ key1, lo0
    return c0, c1, c2, c3


def words_model(seed: int, offset: int, index: int) -> tuple[int, int, int, int]:
    """The same on Python integers."""
    mask = 0xFFFFFFFF
    c = [index & mask, index >> 32 & mask, offset & mask, offset >> 32 & mask]
    k = [seed & mask, seed >> 32 & mask]
    for _ in range(ROUNDS):
        p, q = c[0] * MULTIPLIERS[0], c[2] * MULTIPLIERS[1]
        c = [(q >> 32) ^ c[1] ^ k[0], q & mask, (p >> 32) ^ c[3] ^ k[1], p & mask]
        k = [(k[0] + WEYL[0]) & mask, (k[1] + WEYL[1]) & mask]
    return c[0], c[1], c[2], c[3]


# --- uniform numbers


def uniform(o: Emit, seed: Value, offset: Value, index: Value) -> Value:
    """The upper 24 bits of the first word, as a fraction."""
    return words(o, seed, offset, index)[0].lshr(8).to("f32") * 2.0**-24


def _uniform_model(seed: int, offset: int, index: int) -> float:
    return (words_model(seed, offset, index)[0] >> 8) * 2.0**-24


# --- operations that are rounded one by one


def times(o: Emit, a: Value, b: Value | float) -> Value:
    """a * b, never part of an FMA: LLVM contracts neither what carries no flag (CPU) nor what it cannot read (PTX with an explicit rounding)."""
    if o.target == "cpu":
        return a * b
    return _instruction(o, "mul", a, b)


def plus(o: Emit, a: Value, b: Value | float) -> Value:
    """a + b, likewise."""
    return a + b if o.target == "cpu" else _instruction(o, "add", a, b)


def _instruction(o: Emit, name: str, a: Value, b: Value | float) -> Value:
    letter = "fd"[a.bits == 64]
    other = o.const(a, b) if isinstance(b, (int, float)) else b
    return o.ptx(f"{name}.rn.f{a.bits} $0, $1, $2;", f"={letter},{letter},{letter}", f"f{a.bits}", a, other)


def _single(x: float) -> float:
    found: float = struct.unpack("<f", struct.pack("<f", x))[0]
    return found


# --- normal numbers


_Step = Callable[[Any, Any], Any]


def _gauss(times: _Step, plus: _Step, root: Callable[[Any], Any], pick: _Step, n: Any, f: Any, x: Any) -> Any:
    """sqrt(-2 ln u) times cos or sin of ``x`` quarter turns (``pick`` says which, and gives it its sign); u = 2**``n`` (1 + ``f``)."""

    def poly(at: Any, coefficients: tuple[float, ...]) -> Any:
        total = plus(times(at, coefficients[-1]), coefficients[-2])
        for c in reversed(coefficients[:-2]):
            total = plus(times(total, at), c)
        return total

    square, z = times(f, f), times(x, x)
    tail = plus(times(times(f, square), poly(f, LOG1P)), times(n, LN2_LO))
    log = plus(times(n, LN2_HI), plus(f, plus(tail, times(square, -0.5))))
    return times(root(times(log, -2.0)), pick(poly(z, COS), times(x, poly(z, SIN))))


def normal(o: Emit, seed: Value, offset: Value, index: Value) -> Value:
    """Box and Muller's transformation of the first two words."""
    w0, w1, _, _ = words(o, seed, offset, index)
    bits = ((w0.lshr(8) + 1).to("f32") * 2.0**-24).as_int() - 0x3F3504F3
    f = ((bits & 0x7FFFFF) + 0x3F3504F3).as_float() - 1.0
    t = w1.lshr(8)
    k = (t + (1 << 21)) >> 22
    x = (t - (k << 22)).to("f32") * 2.0**-22

    def pick(cos: Value, sin: Value) -> Value:
        wave = o.select((k & 1).eq(0), cos, sin)
        return o.select(((k + 1) & 2).eq(0), wave, -wave)

    def root(v: Value) -> Value:
        return o.llvm("sqrt", v)

    found: Value = _gauss(lambda a, b: times(o, a, b), lambda a, b: plus(o, a, b), root, pick, (bits >> 23).to("f32"), f, x)
    return found


def _normal_model(seed: int, offset: int, index: int) -> float:
    """The same in float64, rounded after every step: that gives the float32 result of +, * and sqrt."""
    w0, w1, _, _ = words_model(seed, offset, index)
    fraction, n = math.frexp(((w0 >> 8) + 1) * 2.0**-24)
    if fraction * 2 < _single(math.sqrt(2.0)):
        fraction, n = fraction * 2, n - 1
    t = w1 >> 8
    k = (t + (1 << 21)) >> 22

    def pick(cos: float, sin: float) -> float:
        wave = sin if k & 1 else cos
        return -wave if (k + 1) & 2 else wave

    def rounded(op: Callable[[float, float], float]) -> Callable[[float, float], float]:
        return lambda a, b: _single(op(a, _single(b)))

    product, total = rounded(lambda a, b: a * b), rounded(lambda a, b: a + b)
    return float(_gauss(product, total, lambda v: _single(math.sqrt(v)), pick, float(n), fraction - 1.0, (t - (k << 22)) * 2.0**-22))


# --- the rows


def _integers(types: tuple[str, ...]) -> Signature | None:
    """Any integers, taken as int64."""
    return (("int64",) * 3, "float32") if all(t in INTEGERS for t in types) else None


FORMS = (
    both("philox_uniform", _integers, uniform, _uniform_model, arity=3),
    both("philox_normal", _integers, normal, _normal_model, arity=3),
    both("mul_rn", floating, times, lambda a, b: a * b, arity=2),
)
"""The rows of this file."""
