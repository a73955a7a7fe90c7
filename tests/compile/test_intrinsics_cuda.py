"""Intrinsics on CUDA, with no GPU: what their machine code contains and does not contain."""

from __future__ import annotations

import re

import pytest

from graphdnn.codegen.spec import KernelSpec, PointerParam, ScalarParam, Source
from tests.compile.sass import inspect

ARCHS = ("sm_80", "sm_90a")
TAIL = ScalarParam("n", "int32")


def kernel(results: str, operand: str, bodies: list[str]) -> Source:
    """``r[i] = body`` for each body, one after the other in r; ``a`` and ``b`` are operands."""
    lines = [
        "def k(r, p, q, n):",
        "    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x",
        "    if i < n:",
        "        a = p[i]",
        "        b = q[i]",
    ]
    lines += [f"        r[i + {k} * n] = {body}" for k, body in enumerate(bodies)]
    params = (PointerParam("r", results, 1, True), PointerParam("p", operand), PointerParam("q", operand), TAIL)
    return Source(KernelSpec("test", "k", params, block=256), "\n".join(lines) + "\n")


CONVERSIONS = ("HALF", "BFLOAT16", "FP8_E4M3", "FP8_E5M2", "FP8_E8M0", "FP4_E2M1")
GROUPS = {
    "exponentials": kernel("float32", "float32", [f"{f}(a)" for f in ("exp", "expm1", "log", "log1p", "tanh", "erf", "sigmoid")]),
    "roots and powers": kernel("float32", "float32", ["sqrt(a)", "rsqrt(a)", "pow(a, b)", "floormod(a, b)", "truediv(a, b)", "floor(a)", "ceil(a)"]),
    "choices": kernel("float32", "float32", ["nanmax(a, b)", "nanmin(a, b)", "fabs(a)", "b if isnan(a) else a", "fadd_reassoc(a, b)"]),
    "decode 16": kernel("float32", "uint16", ["decode_HALF(a)", "decode_BFLOAT16(a)"]),
    "decode 8": kernel("float32", "uint8", [f"decode_{t}(a)" for t in CONVERSIONS[2:]]),
    "round": kernel("float32", "float32", [f"round_{t}(a)" for t in CONVERSIONS]),
    "encode 16": kernel("uint16", "float32", [f"encode_{t}(round_{t}(a))" for t in CONVERSIONS[:2]]),
    "encode 8": kernel("uint8", "float32", [f"encode_{t}(round_{t}(a))" for t in CONVERSIONS[2:]]),
    "to integer": kernel("int32", "float32", [f"{f}(a)" for f in ("rint_int32", "sat_INT8", "sat_UINT8", "sat_INT4", "to_bool")]),
    "random numbers": kernel("float32", "int64", ["philox_uniform(a, b, i)", "philox_normal(a, b, i)"]),
    "to long": kernel("int64", "float32", ["rint_int64(a)"]),
    "integers": kernel(
        "int32",
        "int32",
        [f"{f}(a, b)" for f in ("floormod", "truediv", "ipow", "nanmax")]
        + [f"{f}(a)" for f in ("fabs", "wrap_INT8", "wrap_UINT8", "wrap_INT4", "to_bool", "encode_INT4")]
        + ["decode_INT4(encode_INT4(a))"],
    ),
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("group", GROUPS)
def test_no_double_precision_and_no_local_memory(group: str, arch: str) -> None:
    found = inspect(GROUPS[group], arch)
    assert (found["double"], found["local"], found["spills"]) == (0, 0, 0), found["opcodes"]


def test_random_numbers_have_no_fused_steps() -> None:
    """Equal bits on every target: an FMA would round once where a CPU without one rounds twice (sqrt alone refines its root with it)."""
    counts = inspect(GROUPS["random numbers"])["binary"].texts["ptx"]
    assert "fma.rn" not in counts and "mul.rn.f32" in counts and "add.rn.f32" in counts


def test_argument_reduction_is_the_exception() -> None:
    """sin, cos and tan: libdevice reduces large arguments with one double-precision product; no local memory either."""
    found = inspect(kernel("float32", "float32", ["sin(a)", "cos(a)", "tan(a)"]))
    assert found["double"] > 0 and (found["local"], found["spills"]) == (0, 0)


def test_float64_and_int64_compile() -> None:
    for source in (
        kernel(
            "float64",
            "float64",
            [f"{f}(a)" for f in ("exp", "expm1", "log", "log1p", "tanh", "erf", "sigmoid", "sqrt", "rsqrt", "floor", "ceil", "fabs")],
        ),
        kernel("float64", "float64", [f"{f}(a, b)" for f in ("pow", "floormod", "truediv", "nanmax", "nanmin", "fadd_reassoc")]),
        kernel("float32", "float64", [f"round_{t}(a)" for t in CONVERSIONS]),
        kernel("int64", "float64", ["rint_int64(a)", "int64(rint_int32(a))", "int64(sat_INT8(a))", "int64(to_bool(a))"]),
        kernel("int64", "int64", [f"{f}(a, b)" for f in ("floormod", "truediv", "ipow", "nanmax", "nanmin")]),
    ):
        found = inspect(source)
        assert (found["local"], found["spills"]) == (0, 0)


def test_results_are_not_flushed_to_zero() -> None:
    """.ftz only where the value is not subnormal: 2**x and 1/x of a reduced argument. So softplus(-88) keeps its subnormal result."""
    body = "nanmax(a, float32(0)) + log1p(exp(-fabs(a)))"
    for source in (kernel("float32", "float32", [body]), GROUPS["exponentials"]):
        ptx = inspect(source)["binary"].texts["ptx"]
        flushed = set(re.findall(r"\b[\w.]*\.ftz[\w.]*", ptx))
        assert flushed <= {"ex2.approx.ftz.f32", "rcp.approx.ftz.f32"}
        assert set(re.findall(r"\b\w+\.approx[\w.]*", ptx)) <= {"ex2.approx.ftz.f32", "rcp.approx.ftz.f32"}
        assert "ex2.approx.ftz.f32" in flushed


def test_rounding_to_half_and_bfloat16_is_one_conversion() -> None:
    """Encoding what was just rounded costs nothing more."""
    counts = inspect(GROUPS["encode 16"])["opcodes"]
    assert sum(n for op, n in counts.items() if op.startswith(("F2F", "F2FP"))) == 2


def vector_kernel(storage: str, count: int) -> Source:
    text = f"""
def k(r, p, n):
    i = uint32(uint32(cuda.blockIdx.x) * uint32(256) + uint32(cuda.threadIdx.x))
    if i < n:
        base = uint32(i * uint32({count}))
        a = cuda.local.array({count}, {storage})
        vload(a, p, base, {count})
        for j in range({count}):
            a[j] = {storage}(a[j] + a[j])
        vstore(r, base, a, {count})
"""
    params = (PointerParam("r", storage, 16, True), PointerParam("p", storage, 16), ScalarParam("n", "uint32"))
    return Source(KernelSpec("test", "k", params, block=256), text)


@pytest.mark.parametrize(
    "storage, count, width",
    [("float32", 4, ".128"), ("float32", 2, ".64"), ("float32", 1, ""), ("float64", 2, ".128"), ("uint16", 8, ".128"), ("uint16", 4, ".64"),
     ("uint16", 2, ""), ("uint8", 16, ".128"), ("int8", 8, ".64"), ("uint8", 4, ""), ("int32", 4, ".128"), ("int64", 2, ".128")],
)  # fmt: skip
def test_vector_access_is_one_instruction(storage: str, count: int, width: str) -> None:
    found = inspect(vector_kernel(storage, count), "sm_90a")
    assert found["local"] == 0
    accesses = {op: n for op, n in found["opcodes"].items() if op.startswith(("LDG", "STG"))}
    assert accesses == {f"LDG.E{width}": 1, f"STG.E{width}": 1}


def test_atomics() -> None:
    text = """
def k(count, top, p):
    i = cuda.threadIdx.x
    sh = cuda.shared.array(32, float32)
    sh[i] = p[i]
    cuda.syncthreads()
    top[0] = sh[31 - i]
    cuda.threadfence()
    if atomic_inc_u32(count, 0) == uint32(3):
        top[1] = float32(1)
"""
    params = (PointerParam("count", "uint32", 4, True), PointerParam("top", "float32", 4, True), PointerParam("p", "float32"))
    ptx = inspect(Source(KernelSpec("test", "k", params, block=32), text))["binary"].texts["ptx"]
    assert "atom.global.add.u32" in ptx


@pytest.mark.parametrize("body", ["exp(int32(a))", "encode_HALF(float64(a))", "vload(a, p, i, 4)"])
def test_wrong_types_are_build_errors(body: str) -> None:
    from graphdnn.errors import BuildError

    with pytest.raises(BuildError):
        inspect(kernel("float32", "float32", [body]))
