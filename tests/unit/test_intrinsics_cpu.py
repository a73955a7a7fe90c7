"""Intrinsics on the CPU: exact conversions, errors of the elementary functions, integer arithmetic, vector code."""

from __future__ import annotations

import ctypes
import functools
import math
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numba import cfunc, types
from numba.core.errors import TypingError

from graphdnn import intrinsics

SMALL = {
    "HALF": np.float16,
    "BFLOAT16": ml_dtypes.bfloat16,
    "FP8_E4M3": ml_dtypes.float8_e4m3fn,
    "FP8_E5M2": ml_dtypes.float8_e5m2,
    "FP8_E8M0": ml_dtypes.float8_e8m0fnu,
    "FP4_E2M1": ml_dtypes.float4_e2m1fn,
}
BITS = {"HALF": 16, "BFLOAT16": 16, "FP4_E2M1": 4}
SATURATING = ("FP8_E4M3", "FP8_E5M2", "FP4_E2M1")
ERRORS = {
    "exp": 1.1,
    "expm1": 1.7,
    "log": 0.9,
    "log1p": 0.9,
    "tanh": 1.4,
    "erf": 2.3,
    "sigmoid": 2.9,
    "sqrt": 0.51,
    "rsqrt": 1.5,
    "sin": 1,
    "cos": 1,
    "tan": 2,
}
"""Largest error in ulp: the table of graphdnn/intrinsics/elementary.py."""


@functools.cache
def compiled(body: str, results: str, *operands: str) -> Any:
    """A CPU kernel ``r[i] = body``; operands are a, b, ... of the given types."""
    names = "abc"[: len(operands)]
    pointers = [f"p{n}" for n in names]
    for n in names:
        body = re.sub(rf"\b{n}\b", f"p{n}[i]", body)
    text = f"def kernel(lo, hi, r, {', '.join(pointers)}):\n    for i in range(lo, hi):\n        r[i] = {body}\n"
    space = intrinsics.namespace("cpu")
    exec(text, space)
    arguments = [types.CPointer(getattr(types, t)) for t in (results, *operands)]
    return cfunc(types.void(types.int64, types.int64, *arguments), error_model="numpy")(space["kernel"])


def calculate(body: str, results: str, *operands: np.ndarray) -> np.ndarray:
    """The body for every element of the operands."""
    kernel = compiled(body, results, *(o.dtype.name for o in operands))
    out = np.zeros(operands[0].size, results)
    fn = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * (1 + len(operands)))(kernel.address)
    fn(0, out.size, out.ctypes.data, *(o.ctypes.data for o in operands))
    return out


def storage(name: str) -> str:
    return "uint16" if BITS.get(name, 8) == 16 else "uint8"


def grid(name: str) -> np.ndarray:
    """Every value of a small type, as float32, by ml_dtypes."""
    return np.arange(2 ** BITS.get(name, 8), dtype=storage(name)).view(SMALL[name]).astype(np.float32)


def samples(name: str) -> np.ndarray:
    """float32 numbers around every rounding boundary of a type, every exponent, and the special ones."""
    finite = np.unique(grid(name)[np.isfinite(grid(name))].astype(np.float64))
    with np.errstate(all="ignore"):
        ties = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    spread = np.arange(0, 2**32, 4999, dtype=np.uint64).astype(np.uint32).view(np.float32)
    special = np.array(
        [0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 448.1, 464, 465, 480, 57345, 61440, 65519.9, 65520, 3.39e38, 5, 2.5, 1e-45], np.float32
    )
    near = [ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))]
    return np.concatenate([*near, spread, special, grid(name)])


def rounded(name: str, x: np.ndarray) -> np.ndarray:
    """What ml_dtypes rounds x to, after the saturations that docs/numerics.md promises."""
    with np.errstate(all="ignore"):
        if name in SATURATING:
            top = float(ml_dtypes.finfo(SMALL[name]).max)
            x = np.clip(x, -top, top)
        if name == "FP4_E2M1":
            x = np.where(np.isnan(x), np.float32(0), x)
        if name == "FP8_E8M0":
            x = np.where(x >= 0, np.clip(x, 2.0**-127, 2.0**127), x).astype(np.float32)
        return x.astype(SMALL[name])


def same(x: np.ndarray, y: np.ndarray) -> bool:
    """Equal bits, or both NaN."""
    return bool(np.all((x.view(np.uint32) == y.view(np.uint32)) | (np.isnan(x) & np.isnan(y))))


@pytest.mark.parametrize("name", SMALL)
def test_every_code_decodes_as_ml_dtypes_has_it(name: str) -> None:
    codes = np.arange(2 ** BITS.get(name, 8), dtype=storage(name))
    assert same(calculate(f"decode_{name}(a)", "float32", codes), grid(name))


@pytest.mark.parametrize("name", SMALL)
def test_rounding_and_encoding(name: str) -> None:
    x = samples(name)
    if name == "FP8_E8M0":  # ml_dtypes rounds subnormal float32 numbers above 2**-127 up to 2**-126, however near
        x = x[~((x > 2.0**-127) & (x < 2.0**-126))]
    expected = rounded(name, x)
    values = expected.astype(np.float32)
    register = calculate(f"round_{name}(a)", "float32", x)
    assert same(register, values)
    assert same(calculate(f"round_{name}(a)", "float32", register), register), "rounding twice changes something"
    codes = calculate(f"encode_{name}(round_{name}(a))", storage(name), x)
    numbers = ~np.isnan(values)
    assert np.array_equal(codes[numbers], expected.view(storage(name))[numbers])
    assert np.isnan(codes[~numbers].view(SMALL[name]).astype(np.float32)).all()


@pytest.mark.parametrize("name", SMALL)
def test_float64_is_rounded_once(name: str) -> None:
    """A float64 just beside a tie must not become the tie on its way through float32."""
    x = grid(name)[np.isfinite(grid(name))].astype(np.float64)
    x = np.unique(x)
    ties = (x[1:] + x[:-1]) / 2
    below, above = x[:-1].astype(np.float32), x[1:].astype(np.float32)
    got_below = calculate(f"round_{name}(a)", "float32", ties - np.abs(ties) * 2.0**-45)
    got_above = calculate(f"round_{name}(a)", "float32", ties + np.abs(ties) * 2.0**-45)
    apart = ties != 0
    assert np.array_equal(got_below[apart], below[apart]) and np.array_equal(got_above[apart], above[apart])
    wide = np.array([1e300, -1e300, 1e-300, np.inf, np.nan])
    assert same(calculate(f"round_{name}(a)", "float32", wide), rounded(name, wide).astype(np.float32))


def test_e8m0_saturates() -> None:
    x = np.array([0.0, -0.0, 1e-45, 3e38, np.inf, -1.0, np.nan, 1.5, 3.0, 2.9], np.float32)
    assert calculate("encode_FP8_E8M0(round_FP8_E8M0(a))", "uint8", x).tolist() == [0, 0, 0, 254, 254, 255, 255, 128, 129, 128]


def test_nibbles() -> None:
    nibbles = np.arange(16, dtype=np.uint8)
    assert calculate("decode_INT4(a)", "int32", nibbles).tolist() == [*range(8), *range(-8, 0)]
    assert calculate("encode_INT4(a)", "uint8", np.arange(-8, 8, dtype=np.int32)).tolist() == [*range(8, 16), *range(8)]


REFERENCES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "erf": lambda x: np.array([math.erf(v) for v in x]),
    "sigmoid": lambda x: np.where(x < 0, np.exp(-abs(x)), 1.0) / (1.0 + np.exp(-abs(x))),
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
}


def ulps(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Errors in units of the last place of float32; infinite where one is a NaN or an infinity that the other is not."""
    with np.errstate(all="ignore"):
        single = exact.astype(np.float32)
        unit = 2.0 ** (np.maximum(np.floor(np.log2(np.abs(exact))), -126) - 23)
        error = np.abs(got.astype(np.float64) - exact) / unit
    special = ~(np.isfinite(got) & np.isfinite(single))
    agree = (got == single) | (np.isnan(got) & np.isnan(single))
    error[special] = np.where(agree[special], 0.0, np.inf)
    return error


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_float32_functions(name: str) -> None:
    """A prime share of all float32 numbers, and a dense sample where the functions bend. erf's reference is slow: fewer."""
    step = 15013 if name != "erf" else 90001
    spread = np.arange(0, 2**32, step, dtype=np.uint64).astype(np.uint32).view(np.float32)
    dense = np.linspace(-10, 10, 200_001 if name != "erf" else 40_001).astype(np.float32)
    x = np.concatenate([spread, dense, np.array([0, -0.0, np.inf, -np.inf, np.nan, -1, -88, -103.9, -104.5, 88.7228, 88.73, 89], np.float32)])
    with np.errstate(all="ignore"):
        exact = REFERENCES.get(name, getattr(np, name, None))(x.astype(np.float64))
    error = ulps(calculate(f"{name}(a)", "float32", x), exact)
    assert error.max() <= ERRORS[name], f"{name}({x[error.argmax()]!r}) is off by {error.max()} ulp"


@pytest.mark.parametrize("name", ERRORS)
def test_float64_functions(name: str) -> None:
    x = np.concatenate([np.linspace(-20, 20, 4001), [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-300, 700.0, -700.0, -745.0]])
    with np.errstate(all="ignore"):
        exact = REFERENCES.get(name, getattr(np, name, None))(x)
    np.testing.assert_allclose(calculate(f"{name}(a)", "float64", x), exact, rtol=1e-14, atol=0 if name not in ("sin", "cos", "tan") else 1e-15)


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_signed_zeros_and_infinities(kind: str) -> None:
    x = np.array([0.0, -0.0, np.inf, -np.inf], kind)
    expected = {
        "expm1": [0.0, -0.0, np.inf, -1.0],
        "log1p": [0.0, -0.0, np.inf, np.nan],
        "tanh": [0.0, -0.0, 1.0, -1.0],
        "erf": [0.0, -0.0, 1.0, -1.0],
        "sigmoid": [0.5, 0.5, 1.0, 0.0],
        "log": [-np.inf, -np.inf, np.inf, np.nan],
        "floor": [0.0, -0.0, np.inf, -np.inf],
    }
    for name, values in expected.items():
        got = calculate(f"{name}(a)", kind, x)
        np.testing.assert_array_equal(got, np.array(values, kind), err_msg=name)
        zero = np.array(values) == 0
        assert np.array_equal(np.signbit(got[zero]), np.signbit(np.array(values)[zero])), name


def test_N1_nan_wins() -> None:
    x0 = np.array([-3, np.nan, -1, 0, 1, 2, np.nan], np.float32)
    x1 = np.array([0, 0, np.nan, 0, 0, 0, 0], np.float32)
    np.testing.assert_array_equal(calculate("nanmax(a, float32(0))", "float32", x0), [0, np.nan, 0, 0, 1, 2, np.nan])
    np.testing.assert_array_equal(calculate("nanmax(a, b)", "float32", x0, x1), [0, np.nan, np.nan, 0, 1, 2, np.nan])
    np.testing.assert_array_equal(calculate("nanmin(a, b)", "float64", x0.astype(float), x1.astype(float)), np.minimum(x0, x1))
    assert calculate("nanmax(a, b)", "int32", np.array([3, -4], np.int32), np.array([-3, -2], np.int32)).tolist() == [3, -2]


def test_N11_softplus_keeps_subnormals() -> None:
    x = np.array([100, -100, -88, 0, np.nan], np.float32)
    got = calculate("nanmax(a, float32(0)) + log1p(exp(-fabs(a)))", "float32", x)
    np.testing.assert_allclose(got, [100, 3.783506e-44, 6.054602e-39, math.log(2), np.nan], rtol=2e-6, atol=2e-45)
    assert 0 < got[2] < 2.0**-126


def test_floormod_and_pow() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=500) * 10, rng.normal(size=500) * 3
    a[:7], b[:7] = [5, -5, 5, -5, 0, 7, -0.0], [3, 3, -3, -3, -2, 0, 2]
    with np.errstate(all="ignore"):
        for kind in ("float32", "float64"):
            x, y = a.astype(kind), b.astype(kind)
            np.testing.assert_array_equal(calculate("floormod(a, b)", kind, x, y), np.mod(x, y))
            np.testing.assert_allclose(calculate("pow(a, b)", kind, x, y), np.power(x, y), rtol=2e-7)


def edges(bits: int) -> list[int]:
    top = 2 ** (bits - 1) - 1
    return [0, 1, -1, 2, -2, 3, -3, 5, 7, -7, 10, 100, top, -top - 1, top - 1, -top, top // 2, top // 2 + 1]


@pytest.mark.parametrize("bits", [32, 64])
def test_integer_arithmetic(bits: int) -> None:
    kind, low, high = f"int{bits}", -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    pairs = [(x, y) for x in edges(bits) for y in edges(bits)]
    a, b = (np.array(column, kind) for column in zip(*pairs, strict=True))

    def wrapped(value: int) -> int:
        return (value - low) % (1 << bits) + low

    def quotient(x: int, y: int) -> int:
        if y == 0:
            return 0 if x == 0 else high if x > 0 else low
        q, r = divmod(abs(x), abs(y))
        q += 2 * r > abs(y) or (2 * r == abs(y) and q % 2)
        return min(q if (x < 0) == (y < 0) else -q, high)

    def power(x: int, y: int) -> int:
        if y < 0:
            return {1: 1, -1: -1 if y % 2 else 1}.get(x, 0)
        return wrapped(pow(x, y, 1 << bits))

    assert calculate("floormod(a, b)", kind, a, b).tolist() == [x % y if y else 0 for x, y in pairs]
    assert calculate("truediv(a, b)", kind, a, b).tolist() == [quotient(x, y) for x, y in pairs]
    assert calculate("ipow(a, b)", kind, a, b).tolist() == [power(x, y) for x, y in pairs]
    assert calculate("fabs(a)", kind, a).tolist() == [wrapped(abs(x)) for x, _ in pairs]


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_float_to_integer(kind: str) -> None:
    values = [
        0.5,
        1.5,
        2.5,
        -0.5,
        -1.5,
        -2.5,
        126.5,
        127.5,
        -128.5,
        -129,
        255.5,
        256,
        7.5,
        -8.5,
        2.0**31,
        -(2.0**31),
        2.0**31 - 128,
        3e9,
        2.0**63,
        1e300,
        -1e300,
    ]
    values += [2.0**62, -(2.0**63), np.inf, -np.inf, np.nan]
    with np.errstate(over="ignore"):
        x = np.array(values).astype(kind)

    def expected(low: int, high: int) -> list[int]:
        exact = [0 if v != v else low if v == -np.inf else high if v == np.inf else round(v) for v in x.tolist()]
        return [min(max(v, low), high) for v in exact]

    for name, low, high in (("sat_INT8", -128, 127), ("sat_UINT8", 0, 255), ("sat_INT4", -8, 7), ("rint_int32", -(2**31), 2**31 - 1)):
        assert calculate(f"{name}(a)", "int32", x).tolist() == expected(low, high), name
    assert calculate("rint_int64(a)", "int64", x).tolist() == expected(-(2**63), 2**63 - 1)
    assert calculate("to_bool(a)", "int32", np.array([0, -0.0, np.nan, 1e-45, -3], kind)).tolist() == [0, 0, 1, int(np.array(1e-45, kind) != 0), 1]


@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_wrapping(kind: str) -> None:
    x = np.array([*range(-300, 600), 2**31 - 1, -(2**31)], kind)
    assert np.array_equal(calculate("wrap_INT8(a)", "int32", x), x.astype(np.int8))
    assert np.array_equal(calculate("wrap_UINT8(a)", "int32", x), x.astype(np.uint8))
    assert np.array_equal(calculate("wrap_INT4(a)", "int32", x), (x.astype(np.int64) + 8) % 16 - 8)


VECTOR = [
    ("exp(a)", "float32", "float32"), ("expm1(a)", "float32", "float32"), ("log(a)", "float32", "float32"), ("log1p(a)", "float32", "float32"),
    ("tanh(a)", "float32", "float32"), ("erf(a)", "float32", "float32"), ("sigmoid(a)", "float32", "float32"), ("rsqrt(a)", "float32", "float32"),
    ("nanmax(a, float32(0))", "float32", "float32"), ("sat_INT8(a)", "int32", "float32"), ("rint_int32(a)", "int32", "float32"),
    ("wrap_INT8(a)", "int32", "int32"), ("encode_BFLOAT16(round_BFLOAT16(decode_BFLOAT16(a)))", "uint16", "uint16"),
    ("encode_HALF(round_HALF(decode_HALF(a)))", "uint16", "uint16"), ("encode_FP8_E4M3(round_FP8_E4M3(decode_FP8_E4M3(a)))", "uint8", "uint8"),
    ("encode_FP8_E5M2(round_FP8_E5M2(decode_FP8_E5M2(a)))", "uint8", "uint8"), ("round_HALF(a)", "float32", "float64"),
]  # fmt: skip


@pytest.mark.parametrize("body, result, operand", VECTOR)
def test_loops_become_vector_code(body: str, result: str, operand: str) -> None:
    """The optimized LLVM text works on vectors, and calls nothing but LLVM's own intrinsics."""
    text = compiled(body, result, operand)._library.get_llvm_str()
    assert re.search(r"<\d+ x (float|double|i32)>", text), body
    called = set(re.findall(r"call [^@\n]*@\"?([\w.]+)", text))
    assert all(name.startswith(("llvm.", "_ZN")) for name in called), called  # _ZN...: the wrapper calls the kernel


def test_reassociated_sum_becomes_vector_code() -> None:
    text = "def kernel(lo, hi, r, p):\n    s = float32(0)\n    for i in range(lo, hi):\n        s = fadd_reassoc(s, p[i])\n    r[0] = s\n"
    space = intrinsics.namespace("cpu")
    exec(text, space)
    pointer = types.CPointer(types.float32)
    kernel = cfunc(types.void(types.int64, types.int64, pointer, pointer), error_model="numpy")(space["kernel"])
    assert re.search(r"fadd reassoc <\d+ x float>", kernel._library.get_llvm_str())
    x, out = np.arange(1000, dtype=np.float32), np.zeros(1, np.float32)
    fn = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 2)(kernel.address)
    fn(0, 1000, out.ctypes.data, x.ctypes.data)
    assert out[0] == 499500


def test_local_array() -> None:
    text = (
        "def kernel(lo, hi, r, p):\n    a = local_array(4, float32)\n    for i in range(lo, hi):\n        for j in range(4):\n"
        "            a[j] = p[4 * i + j]\n        for j in range(4):\n            r[4 * i + j] = a[3 - j]\n"
    )
    space = intrinsics.namespace("cpu")
    exec(text, space)
    pointer = types.CPointer(types.float32)
    kernel = cfunc(types.void(types.int64, types.int64, pointer, pointer), error_model="numpy")(space["kernel"])
    x, out = np.arange(12, dtype=np.float32), np.zeros(12, np.float32)
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 2)(kernel.address)(0, 3, out.ctypes.data, x.ctypes.data)
    assert np.array_equal(out.reshape(3, 4), x.reshape(3, 4)[:, ::-1])


@pytest.mark.parametrize("body, operand", [("exp(a)", "int32"), ("round_HALF(a)", "int64"), ("encode_HALF(a)", "float64"), ("ipow(a, a)", "float32")])
def test_a_missing_cast_is_a_typing_error(body: str, operand: str) -> None:
    with pytest.raises(TypingError, match="has no meaning"):
        compiled(body, "float64", operand)


def test_importing_costs_no_compiler() -> None:
    code = (
        "import sys; from graphdnn import intrinsics; intrinsics.digest(); assert not {'numba', 'llvmlite', 'numpy'} & set(sys.modules), 1;"
        "intrinsics.namespace('cudasim'); assert not {'numba', 'llvmlite'} & set(sys.modules), 2"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_target_has_the_same_rows() -> None:
    spaces = {target: set(intrinsics.namespace(target)) for target in ("cpu", "cuda", "cudasim")}
    everywhere = spaces["cpu"] - {"local_array", "tile_madd", "tile_product"}  # stack arrays and register tiles are of CPUs alone
    on_blocks = {"vload", "vstore", "atomic_inc_u32", "cuda"}
    for target in ("cuda", "cudasim"):
        assert everywhere | on_blocks <= spaces[target], target


def test_digest_covers_the_sources() -> None:
    assert re.fullmatch("[0-9a-f]{64}", intrinsics.digest()) and intrinsics.digest() == intrinsics.digest.__wrapped__()
