"""exp, log, tanh, erf and their kin.

float32 on the CPU: branch-free polynomials that LLVM turns into vector code. Each coefficient set is a minimax fit of the relative error (Lawson's
reweighted least squares on 2,000 Chebyshev nodes, values from mpmath at 40 digits), rounded to float32 from the constant term up, the rest fitted
again after each rounding. float32 on CUDA: libdevice (``ex2.approx`` on a reduced argument, scaled without flushing, so subnormal results are
right); sigmoid has a form of its own. float64: libm and libdevice. Simulator: Python's libm in float64, rounded once.

Largest error in float32, ulp: CPU measured over every 7th float, with and without FMA (tests/unit/test_intrinsics_cpu.py runs a smaller share),
CUDA as NVIDIA states for libdevice (sigmoid, rsqrt: the sum of the steps). sin, cos, tan, pow and all of float64 on the CPU are glibc's.

========  ====  ====   =========  ====  ====
function  CPU   CUDA   function   CPU   CUDA
========  ====  ====   =========  ====  ====
exp       1.1   2      sigmoid    2.9   3
expm1     1.7   1      sin, cos   0.6   2
log       0.9   1      tan        1.4   4
log1p     0.9   1      pow        0.9   4
tanh      1.4   2      sqrt       0.5   0.5
erf       2.3   2      rsqrt      1.5   1.5
========  ====  ====   =========  ====  ====
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from graphdnn.intrinsics.forms import FLOATS, Form, both, floating, to

if TYPE_CHECKING:
    from graphdnn.intrinsics.emit import Emit, Value

INF, NAN = math.inf, math.nan
LOG2E = 1.4426950408889634
LN2_HI, LN2_LO = 0.693359375, -2.12194440e-4
"""ln 2 in two parts; the first has 9 bits, so that its product with any exponent is exact."""
ROUND = 12582912.0
"""1.5 * 2**23: adding it rounds a float32 to an integer, which the low bits of the sum then hold."""
EXP = (0.4999999403953552, 0.1666652113199234, 0.04166828840970993, 0.008368703536689281, 0.0013818938750773668)
EXPM1 = (0.4999999701976776, 0.1666654497385025, 0.04166746512055397, 0.008366423659026623, 0.0013868316309526563)
LOG1P = (
    0.3333333134651184, -0.250008225440979, 0.20001250505447388, -0.1662331521511078,
    0.14201273024082184, -0.13160189986228943, 0.12764763832092285, -0.07638189196586609,
)  # fmt: skip
TANH = (-0.3333328068256378, 0.13331405818462372, -0.05373651534318924, 0.02062816731631756, -0.0056922961957752705)
ERF_NEAR = (
    0.12837916612625122, -0.3761262595653534, 0.11283578723669052, -0.026853347197175026, 0.005187162198126316,
    -0.0007997853099368513, 7.806903158780187e-05,
)  # fmt: skip
ERF_FAR = (
    0.999535083770752, 0.0036383119877427816, -0.013285479508340359, 0.029695484787225723, -0.04451429098844528, 0.04561394825577736,
    -0.030007049441337585, 0.007694768253713846, 0.007892388850450516, -0.009702712297439575, 0.0026859778445214033, 0.0017097728559747338,
    -0.0009562608902342618,
)  # fmt: skip
ERF_CENTER, ERF_HALF = 2.475, 1.475
"""ERF_FAR is in (|x| - center) / half, on 1 <= |x| <= 3.95; beyond, erf is 1 in float32."""


def _power_of_two(n: Value) -> Value:
    """2**n as float32, -126 <= n <= 127."""
    return ((n + 127) << 23).as_float()


def _reduce(o: Emit, x: Value) -> tuple[Value, Value]:
    """x = n ln 2 + r with |r| <= ln 2 / 2 (a little more for large n): (n as i32, r). x within the range of exp; NaN stays in r."""
    shifted = o.mad(x, LOG2E, ROUND)
    n = shifted - ROUND
    r = o.mad(n, -LN2_LO, o.mad(n, -LN2_HI, x))
    return shifted.as_int() - o.const(x, ROUND).as_int(), r


def _exp_reduced(o: Emit, r: Value) -> Value:
    """e**r for |r| <= ln 2 / 2."""
    return o.mad(r * r, o.poly(r, EXP), r) + 1.0


def exp32(o: Emit, x: Value) -> Value:
    """e**x; 2**n is applied in two halves, so that results at both ends of the range are rounded once."""
    x = o.select(x > 89.0, 89.0, x)
    x = o.select(x < -104.0, -104.0, x)
    n, r = _reduce(o, x)
    half = n >> 1
    return _exp_reduced(o, r) * _power_of_two(half) * _power_of_two(n - half)


def expm1_32(o: Emit, x: Value) -> Value:
    """e**x - 1 = 2 (2**(n-1) (e**r - 1) + (2**(n-1) - 1/2)), where 2**(n-1) is in range up to the overflow."""
    clamped = o.select(x > 89.0, 89.0, x)
    clamped = o.select(clamped < -26.0, -26.0, clamped)
    n, r = _reduce(o, clamped)
    scale = _power_of_two(n - 1)
    q = o.mad(r * r, o.poly(r, EXPM1), r)
    result = o.mad(scale, q, scale - 0.5) * 2.0
    return o.select(x.eq(0.0), x, result)


def _log_parts(o: Emit, x: Value) -> tuple[Value, Value]:
    """x = 2**n (1 + f) with sqrt(1/2) <= 1 + f < sqrt(2): (n as float, f). x positive, finite, normal."""
    bits = x.as_int() - 0x3F3504F3
    n = bits >> 23
    f = ((bits & 0x7FFFFF) + 0x3F3504F3).as_float() - 1.0
    return n.to("f32"), f


def _log_sum(o: Emit, n: Value, f: Value, extra: Value | float = 0.0) -> Value:
    """n ln 2 + log(1 + f) + extra, small terms first."""
    square = f * f
    tail = o.mad(f * square, o.poly(f, LOG1P), o.mad(n, LN2_LO, extra))
    tail = o.mad(square, -0.5, tail)
    return o.mad(n, LN2_HI, f + tail)


def log32(o: Emit, x: Value) -> Value:
    """ln x."""
    tiny = x < 1.1754943508222875e-38
    n, f = _log_parts(o, o.select(tiny, x * 8388608.0, x))
    result = _log_sum(o, o.select(tiny, n - 23.0, n), f)
    result = o.select(x.eq(0.0), -INF, result)
    result = o.select(x < 0.0, NAN, result)
    return o.select((x.eq(INF)) | x.isnan(), x, result)


def log1p32(o: Emit, x: Value) -> Value:
    """ln(1 + x): ln u + (x - (u - 1)) / u with u the rounded 1 + x."""
    u = x + 1.0
    n, f = _log_parts(o, u)
    result = _log_sum(o, n, f, (x - (u - 1.0)) / u)
    result = o.select(x.eq(-1.0), -INF, result)
    result = o.select(x < -1.0, NAN, result)
    return o.select(x.eq(INF) | x.eq(0.0) | x.isnan(), x, result)


def tanh32(o: Emit, x: Value) -> Value:
    """An odd polynomial below 0.625, 1 - 2 / (e**2|x| + 1) above."""
    a = o.abs(x)
    n, r = _reduce(o, o.select(a > 10.0, 10.0, a) * 2.0)
    far = 1.0 - 2.0 / (_exp_reduced(o, r) * _power_of_two(n) + 1.0)
    s = a * a
    near = o.mad(a * s, o.poly(s, TANH), a)
    return o.copysign(o.select(a < 0.625, near, far), x)


def erf32(o: Emit, x: Value) -> Value:
    """x + x P(x**2) below 1, a polynomial around 2.475 up to 3.95."""
    a = o.abs(x)
    near = o.mad(a, o.poly(a * a, ERF_NEAR), a)
    far = o.poly((a - ERF_CENTER) * (1.0 / ERF_HALF), ERF_FAR)
    far = o.select((a > 3.95) | (far > 1.0), 1.0, far)
    return o.copysign(o.select(a < 1.0, near, far), x)


def _sigmoid_parts(o: Emit, x: Value, e: Value, inverse: Value) -> Value:
    """1 / (1 + e**-x) from e = e**-|x| and inverse = 1 / (1 + e): never overflows, and its small values are rounded once."""
    return o.select(x < 0.0, e * inverse, inverse)


def sigmoid_cpu(o: Emit, x: Value) -> Value:
    """Logistic function."""
    e = _split(exp32, "exp")(o, -o.abs(x))
    return _sigmoid_parts(o, x, e, 1.0 / (e + 1.0))


def sigmoid_cuda(o: Emit, x: Value) -> Value:
    """Logistic function; in float32 the reciprocal of 1..2 is the approximate one and a Newton step: no slow path, correct to 1 ulp."""
    e = o.math("exp", -o.abs(x))
    d = e + 1.0
    if x.bits == 64:
        return _sigmoid_parts(o, x, e, 1.0 / d)
    y = o.ptx("rcp.approx.ftz.f32 $0, $1;", "=f,f", "f32", d)
    return _sigmoid_parts(o, x, e, o.mad(o.mad(-d, y, 1.0), y, y))


def _split(single: Callable[[Emit, Value], Value], name: str) -> Callable[[Emit, Value], Value]:
    """``single`` for float32, libm for float64."""
    return lambda o, x: single(o, x) if x.bits == 32 else o.math(name, x)


def _library(name: str) -> Callable[..., Value]:
    """libm on the CPU, libdevice on CUDA."""
    return lambda o, *args: o.math(name, *args)


def _llvm(name: str) -> Callable[..., Value]:
    """An LLVM intrinsic that both targets turn into machine code or a call of their library."""
    return lambda o, *args: o.llvm(name, *args)


def rsqrt(o: Emit, x: Value) -> Value:
    """1 / sqrt(x), both steps IEEE."""
    return 1.0 / o.llvm("sqrt", x)


def isnan(o: Emit, x: Value) -> Value:
    """Whether x is a NaN."""
    return x.isnan()


def _numpy(name: str) -> Callable[..., float]:
    """Simulator model: the NumPy function in float64; NaN and infinities instead of exceptions."""
    fn = getattr(np, name)

    def model(*args: float) -> float:
        with np.errstate(all="ignore"):
            return float(fn(*args))

    return model


def _sigmoid_model(x: float) -> float:
    e = math.exp(-abs(x))
    return e / (1.0 + e) if x < 0.0 else 1.0 / (1.0 + e)


def _rsqrt_model(x: float) -> float:
    if x == 0.0:
        return math.copysign(INF, x)
    return 1.0 / math.sqrt(x) if x > 0.0 else NAN


def _pow(o: Emit, x: Value, y: Value) -> Value:
    """C's pow; on the CPU through LLVM, which knows that it writes no memory."""
    return o.math("pow", x, y) if o.target == "cuda" else o.llvm("pow", x, y)


def _trigonometric(name: str) -> Form:
    return Form(name, floating, _llvm(name), _library(name), _numpy(name))


FORMS = (
    Form("exp", floating, _split(exp32, "exp"), _library("exp"), _numpy("exp")),
    Form("expm1", floating, _split(expm1_32, "expm1"), _library("expm1"), _numpy("expm1")),
    Form("log", floating, _split(log32, "log"), _library("log"), _numpy("log")),
    Form("log1p", floating, _split(log1p32, "log1p"), _library("log1p"), _numpy("log1p")),
    Form("tanh", floating, _split(tanh32, "tanh"), _library("tanh"), _numpy("tanh")),
    Form("erf", floating, _split(erf32, "erf"), _library("erf"), math.erf),
    Form("sigmoid", floating, sigmoid_cpu, sigmoid_cuda, _sigmoid_model),
    _trigonometric("sin"),
    _trigonometric("cos"),
    _trigonometric("tan"),
    both("pow", floating, _pow, _numpy("power"), arity=2),
    both("sqrt", floating, _llvm("sqrt"), _numpy("sqrt")),
    both("rsqrt", floating, rsqrt, _rsqrt_model),
    both("floor", floating, _llvm("floor"), _numpy("floor")),
    both("ceil", floating, _llvm("ceil"), _numpy("ceil")),
    both("isnan", to("bool", *FLOATS), isnan, lambda x: x != x),
)
"""The rows of this file."""
