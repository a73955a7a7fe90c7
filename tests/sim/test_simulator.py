"""The simulator: types as numba has them, checked memory, barriers, and the target."""

from __future__ import annotations

import ctypes
import math
import operator
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from graphdnn import intrinsics
from graphdnn.codegen.spec import (
    Arg,
    Binary,
    Buffer,
    Constant,
    KernelSpec,
    Launch,
    Memset,
    Param,
    PointerParam,
    Recipe,
    ScalarParam,
    Source,
    TensorScalar,
)
from graphdnn.errors import BuildError, ExecutionError
from graphdnn.intrinsics import simtypes
from graphdnn.intrinsics.simtypes import TYPES, type_name
from graphdnn.targets.simulator import SimulationError, SimulatorExecutable, SimulatorTarget

pytestmark = pytest.mark.sim

OPERATIONS = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv, "%": operator.mod,
    ">>": operator.rshift, "<<": operator.lshift, "&": operator.and_, "|": operator.or_, "^": operator.xor, "**": operator.pow,
    "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
NAMES = [*TYPES, "bool"]


def numba_result(function: Any, *names: str) -> str | None:
    """Type that numba's CUDA target gives, None for a typing error."""
    from numba.core import types
    from numba.core.errors import TypingError
    from numba.cuda.descriptor import cuda_target

    context = cuda_target.typing_context
    context.refresh()
    operands = tuple(types.boolean if n == "bool" else getattr(types, n) for n in names)
    try:
        return str(context.resolve_function_type(function, operands, {}).return_type)
    except (TypingError, AttributeError):
        return None


def sim_result(function: Any, *names: str) -> str | None:
    try:
        return type_name(function(*(True if n == "bool" else TYPES[n](3) for n in names)))
    except (SimulationError, TypeError):
        return None


@pytest.mark.parametrize("op", OPERATIONS)
def test_results_have_the_types_that_numba_gives(op: str) -> None:
    pairs = [(a, b) for a in NAMES for b in NAMES if not (op == "**" and "bool" in (a, b))]
    wrong = {(a, b): (numba_result(OPERATIONS[op], a, b), sim_result(OPERATIONS[op], a, b)) for a, b in pairs}
    assert {k: v for k, v in wrong.items() if v[0] != v[1]} == {}


@pytest.mark.parametrize("name", ["min", "max"])
def test_min_and_max_have_the_types_that_numba_gives(name: str) -> None:
    python, ours = {"min": min, "max": max}[name], simtypes.BUILTINS[name]
    assert [(a, b) for a in NAMES for b in NAMES if numba_result(python, a, b) != sim_result(ours, a, b)] == []


@pytest.mark.parametrize("function", [operator.neg, operator.pos, operator.invert, abs])
def test_unary_operators_have_the_types_that_numba_gives(function: Any) -> None:
    assert [n for n in TYPES if numba_result(function, n) != sim_result(function, n)] == []


@pytest.mark.parametrize(
    "bounds", [("int32",), ("uint32",), ("int64",), ("int32", "int32"), ("int32", "int64"), ("uint32", "uint32", "uint32"), ("int32", "uint32")]
)
def test_range_gives_the_types_that_numba_gives(bounds: tuple[str, ...]) -> None:
    state = numba_result(range, *bounds)
    values = simtypes.typed_range(*(TYPES[b](n) for b, n in zip(bounds, ([4], [0, 4], [0, 4, 1])[len(bounds) - 1], strict=True)))
    assert f"range_state_{type_name(next(values))}" == state


def test_values_wrap_and_round() -> None:
    i32, u32, u64, f32 = TYPES["int32"], TYPES["uint32"], TYPES["uint64"], TYPES["float32"]
    assert i32(2**31) == -(2**31) and u32(-1) == 2**32 - 1 and u64(-1) == 2**64 - 1
    assert i32(2**31 - 1) + i32(1) == 2**31, "int64: no wrap at 32 bits"
    assert TYPES["int64"](2**63 - 1) + 1 == -(2**63) and u64(0) - u64(1) == 2**64 - 1
    assert u64(2**64 - 1) + i32(0) == -1, "uint64 with a signed one is int64"
    assert i32(-7) // i32(2) == -4 and i32(-7) % i32(3) == 2 and i32(-8) >> 1 == -4
    assert f32(0.1) == np.float32(0.1) and f32(1) / f32(3) == np.float32(1) / np.float32(3)
    assert f32(3e38) * f32(10) == math.inf and math.isnan(f32(0) / f32(0)) and f32(-1) / f32(0) == -math.inf
    assert f32(0.1) * 2.0 == float(np.float32(0.1)) * 2.0 and 2.0 * f32(1) == 2.0 and type_name(2.0 * f32(1)) == "float64"
    assert simtypes.BUILTINS["max"](f32(math.nan), f32(0)) == 0, "max.f32 drops NaN"
    for bad in (
        lambda: i32(math.nan),
        lambda: i32(3e9),
        lambda: i32(1) // i32(0),
        lambda: i32(1) << 64,
        lambda: i32(2) ** i32(-1),
        lambda: f32(1) & 1,
    ):
        with pytest.raises(SimulationError):
            bad()


# --- kernels


def load(
    text: str,
    params: tuple[Param, ...],
    args: tuple[Arg, ...],
    block: int,
    grid: int = 1,
    shared: int = 0,
    before: tuple[Memset, ...] = (),
    workspace: int = 0,
) -> SimulatorExecutable:
    spec = KernelSpec("test", "k", params, block=block, shared_bytes=shared)
    target, recipe = SimulatorTarget(), Recipe((spec,), (*before, Launch(0, grid, args)), workspace)
    return target.load(recipe, [target.compile(Source(spec, text))])


def launch(body: str, *arrays: np.ndarray, block: int = 4, grid: int = 1, shared: int = 0, read_only: tuple[int, ...] = ()) -> None:
    """Run ``body`` with t = cuda.threadIdx.x and pointers p0, p1, ... to the arrays."""
    names = [f"p{i}" for i in range(len(arrays))]
    lines = [f"def k({', '.join(names)}):", "    t = cuda.threadIdx.x", *("    " + line for line in body.strip().splitlines())]
    params = tuple(PointerParam(n, a.dtype.name, a.itemsize, i not in read_only) for i, (n, a) in enumerate(zip(names, arrays, strict=True)))
    executable = load("\n".join(lines) + "\n", params, tuple(Buffer("tensor", i) for i in range(len(arrays))), block, grid, shared)
    executable.set_extents({i: (0, a.nbytes) for i, a in enumerate(arrays)}, 0)
    executable.run({i: a.ctypes.data for i, a in enumerate(arrays)}, {}, 0, 0)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_blocks_and_threads() -> None:
    out = np.zeros(12, np.int32)
    launch("p0[cuda.blockIdx.x * cuda.blockDim.x + t] = int32(100 * cuda.gridDim.x + 10 * cuda.blockIdx.x + t)", out, grid=3)
    assert out.tolist() == [300 + 10 * b + t for b in range(3) for t in range(4)]


def test_shared_memory_and_barriers() -> None:
    x, out = np.arange(64, dtype=np.float32), np.zeros(1, np.float32)
    body = """
a = cuda.shared.array(32, float32); b = cuda.shared.array((2, 16), float32)
a[t] = p0[t]
b[t // 16, t % 16] = p0[32 + t]
cuda.syncthreads()
a[t] = float32(a[t] + b[1 - t // 16, t % 16])
cuda.syncthreads()
step = 16
while step > 0:
    if t < step:
        a[t] = float32(a[t] + a[t + step])
    cuda.syncthreads()
    step = step // 2
if t == 0:
    p1[0] = a[0]
"""
    launch(body, x, out, block=32)
    assert out[0] == x.sum()


def test_dynamic_shared_memory() -> None:
    out = np.zeros(4, np.float32)
    launch("a = cuda.shared.array(0, float32)\na[t] = float32(t)\ncuda.syncthreads()\np0[t] = a[3 - t]", out, shared=16)
    assert out.tolist() == [3, 2, 1, 0]
    with pytest.raises(SimulationError, match="index 4 is outside of 0 .. 3"):
        launch("a = cuda.shared.array(0, float32)\na[t + 1] = float32(t)", out, shared=16)


FAULTS = {
    "p0[t + 1] = float32(0)": r"kernel 'k', block 0, thread 3, line 3: .*parameter 'p0': index 4 is outside of 0 .. 3",
    "p0[t] = p0[t - 1]": r"thread 0, .*parameter 'p0': index -1 is outside",
    "p0[t] = p0[uint32(t) - uint32(1)]": r"thread 0, .*parameter 'p0': index 18446744073709551615 is outside",
    "p0[1.0] = float32(0)": "is no integer",
    "p1[t] = float32(0)": "parameter 'p1' is written, but",
    "a = cuda.local.array(4, float32)\np0[t] = a[2]": "local array of float32: element 2 is read before it is written",
    "a = cuda.local.array(4, float32)\na[4] = float32(1)": "index 4 is outside of 0 .. 3",
    "a = cuda.shared.array(4, float32)\np0[t] = a[t]": "shared array of float32, element 0, is read before it is written",
    "a = cuda.shared.array(4, float32)\na[t] = float32(1)\np0[t] = a[3 - t]": "is read before it is written|race",
    "a = cuda.shared.array(4, float32)\na[t] = float32(t)\ncuda.syncthreads()\na[t] = float32(a[3 - t])": "race: .*element .* with no barrier",
    "a = cuda.shared.array(1, float32)\na[0] = float32(t)": "race: .*element 0, is written by thread 1 and written by thread 0",
    "a = cuda.shared.array(20000, float32)": "at most 49152 can be had",
    "if t < 2:\n    cuda.syncthreads()": "deadlock: threads 0-1 wait at syncthreads in line 4; threads 2-3 ended",
    "if t < 2:\n    cuda.syncthreads()\nelse:\n    cuda.syncthreads()": "threads wait at different barriers: thread 2 in line 6, thread 0 in line 4",
    "a = cuda.local.array(4, float32)\nvload(a, p0, 1, 2)": "index 1 is not aligned to a vector of 8 bytes",
    "a = cuda.local.array(4, float32)\nvload(a, p0, 2, 4)": r"index 2 .. 5 is outside",
    "a = cuda.local.array(4, float32)\nvstore(p0, 0, a, 4)": "element 0 is read before it is written",
    "a = cuda.local.array(4, float64)\nvload(a, p0, 0, 2)": "vload of 2 x float32 into a local array of 4 x float64",
    "a = cuda.local.array(3, float32)\nvload(a, p0, 0, 3)": "a vector of 3 x float32",
    "p0[t] = encode_HALF(float32(0.1))": "no value of the type; print round_HALF",
    "p0[t] = exp(t)": r"exp\(int32\) has no meaning",
    "p0[t] = decode_HALF(p0[t])": r"decode_HALF\(float32\) has no meaning",
    "p0[t] = nanmax(p0[t])": "has no meaning",
    "atomic_inc_u32(p0, 0)": "needs a pointer to uint32",
    "undefined(t)": "NameError: name 'undefined' is not defined",
    "p0[t] = float32('1')": "TypeError|not a number",
}


@pytest.mark.parametrize("body", FAULTS)
def test_faults_are_found_and_named(body: str) -> None:
    with pytest.raises(SimulationError, match="(?s)" + FAULTS[body]) as caught:
        launch(body, floats(1, 2, 3, 4), floats(1, 2, 3, 4), read_only=(1,))
    assert isinstance(caught.value, ExecutionError) and "kernel 'k', block 0, thread" in str(caught.value)
    assert not [t for t in threading.enumerate() if t.name.startswith("ThreadPool")], "threads are left behind"


def test_equal_values_written_by_several_threads_are_no_race() -> None:
    out = floats(0, 0, 0, 0)
    launch("a = cuda.shared.array(1, float32)\na[0] = float32(7)\ncuda.syncthreads()\np0[t] = a[0]", out)
    assert out.tolist() == [7] * 4


def test_two_calls_in_a_loop_are_one_array() -> None:
    out = np.zeros(2, np.float32)
    launch("for i in range(2):\n    a = cuda.shared.array(4, float32)\n    a[t] = float32(i)\np0[0] = float32(1)", out)
    assert out[0] == 1


def test_an_untyped_literal_shows() -> None:
    with pytest.raises(SimulationError, match=r"encode_HALF\(float64\) has no meaning"):
        launch("p0[t] = encode_HALF(float32(1) * 2.0)", np.zeros(4, np.uint16))


def test_atomics() -> None:
    count, last = np.zeros(1, np.uint32), floats(0)
    body = """
if atomic_inc_u32(p0, 0) == uint32(7):
    p1[0] = float32(1)
"""
    launch(body, count, last, grid=2)
    assert last[0] == 1
    assert count[0] == 8
    total = np.zeros(1, np.int32)
    body = """
a = cuda.shared.array(1, int32)
a[0] = int32(0)
cuda.syncthreads()
cuda.atomic.add(a, 0, int32(t))
cuda.syncthreads()
if t == 0:
    p0[0] = a[0]
"""
    launch(body, total)
    assert total[0] == 6


@pytest.mark.parametrize("storage, count", [("float32", 4), ("uint16", 8), ("uint8", 16), ("float64", 2), ("int8", 4), ("int64", 1)])
def test_vectors(storage: str, count: int) -> None:
    x = np.arange(count * 2).astype(storage)
    out = np.zeros_like(x)
    launch(
        f"a = cuda.local.array({count}, {storage})\nvload(a, p0, {count} * t, {count})\nvstore(p1, {count} * (1 - t), a, {count})", x, out, block=2
    )
    assert np.array_equal(out, np.roll(x, count))


# --- models against the CPU forms


def close(sim: Any, cpu: Any, ulp: float) -> bool:
    value = float(sim)
    if not math.isfinite(value):
        return bool(value == cpu or (value != value and cpu != cpu))
    return abs(value - float(cpu)) <= ulp * float(np.spacing(np.float32(abs(value))))


ARGUMENTS = [
    0.0,
    -0.0,
    0.3,
    -0.7,
    1.0,
    1.5,
    2.5,
    -2.5,
    5.75,
    88.0,
    -88.0,
    -103.0,
    1e-30,
    -1e-42,
    3.39e38,
    447.0,
    465.0,
    math.inf,
    -math.inf,
    math.nan,
]


@pytest.mark.parametrize("kind", ["float32", "int32", "int64"])
def test_models_agree_with_the_compiled_forms(kind: str) -> None:
    """One CPU kernel calls every intrinsic on every argument; the simulator's models give the same, elementary functions within their error."""
    from numba import cfunc, types

    values = ARGUMENTS if kind == "float32" else [0, 1, -1, 2, -3, 7, 100, -129, 2**31 - 1, -(2**31)]
    rows = [r for r in intrinsics._rows() if not r.name.startswith(("encode", "decode")) and r.rule((kind,) * r.arity)]
    pairs = [(a, b) for a in values for b in (values if any(r.arity > 1 for r in rows) else values[:1])]
    calls = [f"{r.name}({', '.join('aba'[: r.arity])})" for r in rows]
    body = "".join(f"        r[i * {len(rows)} + {n}] = {call}\n" for n, call in enumerate(calls))
    space = intrinsics.namespace("cpu")
    exec(f"def k(lo, hi, r, p, q):\n    for i in range(lo, hi):\n        a = p[i]\n        b = q[i]\n{body}", space)
    number = getattr(types, kind)
    kernel = cfunc(types.void(types.int64, types.int64, types.CPointer(types.float64), *[types.CPointer(number)] * 2), error_model="numpy")(
        space["k"]
    )
    x, y = (np.array(column, kind) for column in zip(*pairs, strict=True))
    out = np.zeros((len(pairs), len(rows)))
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 3)(kernel.address)(
        0, len(pairs), out.ctypes.data, x.ctypes.data, y.ctypes.data
    )
    sim, exact = intrinsics.namespace("cudasim"), TYPES[kind]
    wrong = []
    for i, (a, b) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
        for n, r in enumerate(rows):
            got = sim[r.name](*(exact(a), exact(b), exact(a))[: r.arity])
            if not close(got, out[i, n], 3.0 if kind == "float32" else 0.0):
                wrong.append((calls[n], a, b, got, out[i, n]))
    assert wrong == []


@pytest.mark.parametrize("name", ["HALF", "BFLOAT16", "FP8_E4M3", "FP8_E5M2", "FP8_E8M0", "FP4_E2M1"])
def test_codes_survive_a_round_trip(name: str) -> None:
    import ml_dtypes

    sim, bits = intrinsics.namespace("cudasim"), {"HALF": 16, "BFLOAT16": 16, "FP4_E2M1": 4}.get(name, 8)
    kinds = {"HALF": np.float16, "BFLOAT16": ml_dtypes.bfloat16, "FP8_E4M3": ml_dtypes.float8_e4m3fn, "FP8_E5M2": ml_dtypes.float8_e5m2}
    kinds |= {"FP8_E8M0": ml_dtypes.float8_e8m0fnu, "FP4_E2M1": ml_dtypes.float4_e2m1fn}
    storage = "uint16" if bits == 16 else "uint8"
    with np.errstate(invalid="ignore"):  # signaling NaN codes
        expected = np.arange(2**bits, dtype=storage).view(kinds[name]).astype(np.float64)
    decode, encode, raw = sim[f"decode_{name}"], sim[f"encode_{name}"], TYPES[storage]
    for code in range(0, 2**bits, 1 if bits < 16 else 7):
        value = decode(raw(code))
        assert value == expected[code] or (value != value and np.isnan(expected[code]))
        if value == value and not (name == "FP8_E5M2" and math.isinf(value)):
            assert encode(value) == code


# --- the target


def test_scalars_workspace_and_memset() -> None:
    params: tuple[Param, ...] = (
        PointerParam("out", "float32", 4, True),
        PointerParam("w", "float32", 4, True),
        ScalarParam("s", "float32"),
        ScalarParam("n", "int32"),
    )
    text = "def k(out, w, s, n):\n    t = cuda.threadIdx.x\n    out[t] = w[t] * s if t < n else w[t]\n"
    args = (Buffer("tensor", 5), Buffer("workspace", 0, 256), TensorScalar(7, "float32"), Constant(2, "int32"))
    executable = load(text, params, args, 4, before=(Memset(Buffer("workspace", 0, 256), 8),), workspace=272)
    out, workspace = floats(1, 1, 1, 1), np.zeros(68, np.float32)
    executable.run({5: out.ctypes.data}, {7: 0.5}, workspace.ctypes.data, 0)
    np.testing.assert_array_equal(out, floats(0, 0, math.nan, math.nan), err_msg="what is not set in the workspace is NaN")


def test_extents_with_offsets_and_negative_strides() -> None:
    text = "def k(p):\n    t = cuda.threadIdx.x\n    p[-t] = float32(t)\n"
    executable = load(text, (PointerParam("p", "float32", 4, True),), (Buffer("tensor", 0, 12),), 4)
    x = floats(9, 9, 9, 9, 9)
    executable.set_extents({0: (0, 20)}, 0)
    with pytest.raises(SimulationError, match="index -1 is outside"):
        executable.run({0: x.ctypes.data}, {}, 0, 0)
    executable.set_extents({0: (-4, 16)}, 0)
    executable.run({0: x.ctypes.data + 4}, {}, 0, 0)
    assert x.tolist() == [9, 3, 2, 1, 0]


def test_arguments_are_checked() -> None:
    x = np.zeros(5, np.float32)
    aligned = (PointerParam("p", "float32", 16, True),)
    text = "def k(p):\n    p[0] = float32(1)\n"
    offset = 4 if x.ctypes.data % 16 == 0 else 16 - x.ctypes.data % 16 + 4
    with pytest.raises(SimulationError, match="kernel 'k': parameter 'p': the kernel relies on an alignment of 16 bytes"):
        load(text, aligned, (Buffer("tensor", 0),), 1).run({0: x.ctypes.data + offset}, {}, 0, 0)
    with pytest.raises(SimulationError, match="is not aligned to its elements"):
        load(text, (PointerParam("p", "float32", 1, True),), (Buffer("tensor", 0),), 1).run({0: x.ctypes.data + 1}, {}, 0, 0)
    with pytest.raises(SimulationError, match="cannot be given"):
        load("def k(s):\n    pass\n", (ScalarParam("s", "float32"),), (Constant(1, "float64"),), 1).run({}, {}, 0, 0)
    with pytest.raises(SimulationError, match="wrong number of arguments"):
        load(text, aligned, (), 1).run({}, {}, 0, 0)
    memset = Memset(Buffer("workspace", 0, 8), 16)
    with pytest.raises(SimulationError, match="writes past its end"):
        load(text, aligned, (Buffer("tensor", 0),), 1, before=(memset,), workspace=16).run({0: 0}, {}, x.ctypes.data, 0)


def test_an_empty_grid_runs_nothing() -> None:
    load("def k(p):\n    p[0] = float32(1)\n", (PointerParam("p", "float32", 4, True),), (Buffer("tensor", 0),), 1, grid=0).run({0: 0}, {}, 0, 0)


@pytest.mark.parametrize("text", ["def k(:\n", "def other():\n    pass\n"])
def test_text_that_is_no_kernel_is_a_build_error(text: str) -> None:
    with pytest.raises(BuildError, match="kernel 'k'"):
        SimulatorTarget().compile(Source(KernelSpec("test", "k", (), block=1), text))


def test_binary_is_the_text_and_the_key_follows_the_intrinsics() -> None:
    target = SimulatorTarget()
    assert target.compile(Source(KernelSpec("test", "k", (), block=1), "def k():\n    pass\n")) == Binary(
        "k", b"def k():\n    pass\n", {"arch": "cudasim"}
    )
    assert intrinsics.digest() in target.toolchain_key()


def test_several_threads_may_run_one_executable() -> None:
    text = (
        "def k(p):\n    t = cuda.threadIdx.x\n    a = cuda.shared.array(8, float32)\n    a[t] = p[t]\n    cuda.syncthreads()\n    p[t] = a[7 - t]\n"
    )
    executable = load(text, (PointerParam("p", "float32", 4, True),), (Buffer("tensor", 0),), 8)
    arrays = [np.arange(8, dtype=np.float32) + 10 * i for i in range(6)]
    expected = [a[::-1].copy() for a in arrays]
    runners = [threading.Thread(target=executable.run, args=({0: a.ctypes.data}, {}, 0, 0)) for a in arrays]
    for r in runners:
        r.start()
    for r in runners:
        r.join()
    assert all(np.array_equal(a, e) for a, e in zip(arrays, expected, strict=True))


def test_a_block_of_64_threads_is_fast() -> None:
    """About 100 operations and 4 barriers a thread, in CPU time: other work on the machine does not count."""
    x, out = np.linspace(-2, 2, 64).astype(np.float32), np.zeros(64, np.float32)
    body = "a = cuda.shared.array(64, float32)\nx = p0[t]\n"
    body += "for i in range(4):\n    a[t] = x\n    cuda.syncthreads()\n    y = a[63 - t]\n    cuda.syncthreads()\n"
    body += "    x = float32(float32(x * float32(0.5)) + float32(y * float32(0.25)))\n" * 4
    body += "p1[t] = tanh(x)"
    launch(body, x, out, block=64)
    begin = time.process_time()
    launch(body, x, out, block=64)
    assert time.process_time() - begin < 0.3


def test_the_simulator_needs_no_numba() -> None:
    code = (
        "import sys, numpy as np\n"
        "from graphdnn.codegen.spec import *\n"
        "from graphdnn.targets.simulator import SimulatorTarget\n"
        "spec = KernelSpec('t', 'k', (PointerParam('p', 'float32', 4, True),), block=2)\n"
        "target, x = SimulatorTarget(), np.zeros(2, np.float32)\n"
        "binary = target.compile(Source(spec, 'def k(p):\\n    t = cuda.threadIdx.x\\n    p[t] = exp(float32(t))\\n'))\n"
        "target.load(Recipe((spec,), (Launch(0, 1, (Buffer('tensor', 0),)),)), [binary]).run({0: x.ctypes.data}, {}, 0, 0)\n"
        "assert x[1] > 2.7 and not {'numba', 'llvmlite', 'jinja2', 'networkx', 'ml_dtypes'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
