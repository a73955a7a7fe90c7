"""CPU target: object code, loading without numba, launches, panels, threads, forks, damage."""

from __future__ import annotations

import functools
import gc
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from graphdnn.codegen.spec import (
    Arg,
    Binary,
    Buffer,
    Constant,
    KernelSpec,
    Launch,
    Matrix,
    Memset,
    Panels,
    PointerParam,
    Recipe,
    ScalarParam,
    Source,
    Step,
    TensorScalar,
)
from graphdnn.dtypes import data_type
from graphdnn.errors import BuildError, ExecutionError, SerializationError
from graphdnn.targets import cpu_pool
from graphdnn.targets.base import Executable, paused_collector
from graphdnn.targets.cpu import CpuTarget
from graphdnn.targets.cpu_object import ObjectCode
from graphdnn.targets.cpu_pool import ThreadPool, pool

TARGET = CpuTarget()

ADD = """
def add_scaled(lo, hi, a, b, s, o):
    for i in range(lo, hi):
        o[i] = float32(float32(a[i] + b[i]) * s)
"""
ADD_BF16 = """
def add_bf16(lo, hi, a, b, o):
    for i in range(lo, hi):
        o[i] = encode_BFLOAT16(round_BFLOAT16(float32(decode_BFLOAT16(a[i]) + decode_BFLOAT16(b[i]))))
"""
FIVE = """
def five(lo, hi, a, b, c, d, e):
    for i in range(lo, hi):
        x = float32(a[i] + b[i])
        c[i] = x
        d[i] = float32(x * x)
        e[i] = float32(x - b[i])
"""
KINDS = """
def kinds(lo, hi, o, f, d, i, l, u):
    for k in range(lo, hi):
        o[k] = float64(float64(f) + d + float64(i) + float64(l) + float64(u))
"""
ROOT = """
def root(lo, hi, a, o):
    for i in range(lo, hi):
        o[i] = float64(math.lgamma(a[i]))
"""
FAILS = """
def fails(lo, hi, o):
    for i in range(lo, hi):
        if i == int64(5000):
            raise ValueError("no")
        o[i] = float32(1)
"""


def pointer(name: str, storage: str = "float32", written: bool = False) -> PointerParam:
    """A parameter."""
    return PointerParam(name, storage, 1, written)


def tensor(index: int, offset: int = 0) -> Buffer:
    """The pointer of a tensor."""
    return Buffer("tensor", index, offset)


@functools.cache
def build(text: str, *params: PointerParam | ScalarParam) -> tuple[KernelSpec, Binary]:
    """Compile the one function of ``text``."""
    spec = KernelSpec("test", text.split("def ")[1].split("(")[0], params)
    return spec, TARGET.compile(Source(spec, text))


def load(kernels: list[tuple[KernelSpec, Binary]], *steps: Step) -> Executable:
    """An executable of ready kernels."""
    return TARGET.load(Recipe(tuple(s for s, _ in kernels), steps), [b for _, b in kernels])


def address(*arrays: np.ndarray) -> dict[int, int]:
    """Tensor id -> address, ids counted from 0."""
    return {i: a.ctypes.data for i, a in enumerate(arrays)}


@pytest.fixture(scope="module")
def add() -> tuple[KernelSpec, Binary]:
    """o = (a + b) * s."""
    return build(ADD, pointer("a"), pointer("b"), ScalarParam("s", "float32"), pointer("o", written=True))


ADD_ARGS: tuple[Arg, ...] = (tensor(0), tensor(1), TensorScalar(3, "float32"), tensor(2))


@pytest.mark.parametrize(("items", "grain"), [(1, 1), (7, 64), (1000, 64), (100_003, 1000), (0, 1)])
def test_launch(add: tuple[KernelSpec, Binary], items: int, grain: int) -> None:
    rng = np.random.default_rng(items)
    a, b = rng.standard_normal((2, items + 3), dtype=np.float32)
    o = np.full(items + 3, np.nan, np.float32)
    load([add], Launch(0, items, ADD_ARGS, grain)).run(address(a, b, o), {3: 0.5}, 0, 0)
    np.testing.assert_array_equal(o[:items], (a + b)[:items] * np.float32(0.5))
    assert np.isnan(o[items:]).all()


def test_facts(add: tuple[KernelSpec, Binary]) -> None:
    binary = add[1]
    assert binary.entry == "add_scaled"
    assert binary.facts["vectorized"] is True
    assert binary.facts["calls"] == []
    assert "define" in binary.texts["llvm"]


def test_offsets_and_workspace(add: tuple[KernelSpec, Binary]) -> None:
    a, b = np.arange(40, dtype=np.float32).reshape(2, 20)
    o, workspace = np.full(20, np.nan, np.float32), np.full(32, np.nan, np.float32)
    first = Launch(0, 8, (tensor(0, 4 * 4), tensor(1), Constant(1.0, "float32"), Buffer("workspace", 0, 64)))
    second = Launch(0, 8, (Buffer("workspace", 0, 64), tensor(1, 12), Constant(2.0, "float32"), tensor(2, 8)))
    load([add], first, second).run(address(a, b, o), {}, workspace.ctypes.data, 0)
    np.testing.assert_array_equal(o[2:10], (a[4:12] + b[:8] + b[3:11]) * 2)
    assert np.isnan(o[:2]).all() and np.isnan(o[10:]).all()


def test_bfloat16_add_rounds_once() -> None:
    import ml_dtypes

    kernel = build(ADD_BF16, pointer("a", "uint16"), pointer("b", "uint16"), pointer("o", "uint16", True))
    a, b = np.random.default_rng(0).standard_normal((2, 5000)).astype(ml_dtypes.bfloat16)
    o = np.zeros(5000, ml_dtypes.bfloat16)
    load([kernel], Launch(0, 5000, (tensor(0), tensor(1), tensor(2)), 512)).run(address(a, b, o), {}, 0, 0)
    np.testing.assert_array_equal(o.view(np.uint16), (a.astype(np.float32) + b.astype(np.float32)).astype(ml_dtypes.bfloat16).view(np.uint16))
    assert kernel[1].facts["vectorized"]


def test_scalar_types() -> None:
    kernel = build(
        KINDS,
        pointer("o", "float64", True),
        *(ScalarParam(n, t) for n, t in zip("fdilu", ("float32", "float64", "int32", "int64", "uint32"), strict=True)),
    )
    args = (
        tensor(0),
        TensorScalar(1, "float32"),
        Constant(0.1, "float64"),
        TensorScalar(2, "int32"),
        TensorScalar(3, "int64"),
        Constant(2**32 - 1, "uint32"),
    )
    o = np.zeros(3)
    load([kernel], Launch(0, 3, args)).run(address(o), {1: 0.1, 2: -5, 3: -(2**40)}, 0, 0)
    np.testing.assert_array_equal(o, float(np.float32(0.1)) + 0.1 - 5 - 2.0**40 + (2**32 - 1))
    load([kernel], Launch(0, 3, args)).run(address(o), {1: 1e300, 2: 2**31, 3: 2**63}, 0, 0)
    np.testing.assert_array_equal(o, np.inf)


def test_many_outputs_vectorize_and_may_overwrite_their_inputs() -> None:
    """More pointer pairs than LLVM tests: a body without aliasing, beside the safe one for in-place use."""
    kernel = build(FIVE, pointer("a"), pointer("b"), *(pointer(n, written=True) for n in "cde"))
    assert re.search(r"fmul <\d+ x float>", kernel[1].texts["llvm"])
    executable = load([kernel], Launch(0, 4001, tuple(tensor(i) for i in range(5)), 100))
    a, b = np.random.default_rng(1).standard_normal((2, 4001), dtype=np.float32)
    c, d, e = (np.full(4001, np.nan, np.float32) for _ in range(3))
    executable.run(address(a, b, c, d, e), {}, 0, 0)
    x = a + b
    for found, expected in ((c, x), (d, x * x), (e, x - b)):
        np.testing.assert_array_equal(found, expected)
    executable.run(address(a, b, a, d, e), {}, 0, 0)
    for found, expected in ((a, x), (d, x * x), (e, x - b)):
        np.testing.assert_array_equal(found, expected)


def test_memset() -> None:
    o = np.full(3 << 20, 7, np.uint8)
    load([], Memset(tensor(0, 5), (3 << 20) - 10, 0x5A)).run(address(o), {}, 0, 0)
    assert (o[5:-5] == 0x5A).all() and (o[:5] == 7).all() and (o[-5:] == 7).all()


@pytest.mark.parametrize("bound", [({}, {3: 1.0}), ({0: 64, 1: 64, 2: 64}, {})])
def test_missing_tensor_is_named(add: tuple[KernelSpec, Binary], bound: tuple[dict[int, int], dict[int, float]]) -> None:
    with pytest.raises(ExecutionError, match="tensor '[03]'"):
        load([add], Launch(0, 4, ADD_ARGS)).run(*bound, 0, 0)


@pytest.mark.parametrize("grain", [10_000, 100])
def test_failing_kernel_raises(grain: int) -> None:
    kernel = build(FAILS, pointer("o", written=True))
    o = np.zeros(10_000, np.float32)
    with pytest.raises(ExecutionError, match="fails"):
        load([kernel], Launch(0, 10_000, (tensor(0),), grain)).run(address(o), {}, 0, 0)


@pytest.mark.parametrize(
    "text",
    [
        "def bad(lo, hi, o):\n    o[lo] = unknown(hi)\n",
        "def bad(lo, hi, o):\n    o[lo] = 'text'\n",
        "def bad(lo, hi, o:\n",
        "def other(lo, hi, o):\n    pass\n",
    ],
)
def test_bad_text_is_a_build_error(text: str) -> None:
    spec = KernelSpec("test", "bad", (pointer("o", written=True),))
    with pytest.raises(BuildError, match="bad"):
        TARGET.compile(Source(spec, text))


PACK = """
def pack(lo, hi, x, o, first):
    for r in range(lo, hi):
        for k in range(int64({k})):
            o[int64(r - first) * int64({k}) + k] = {t}(x[r * int64({k}) + k])
"""
PACK_B = """
def pack_b(lo, hi, x, o):
    for r in range(lo, hi):
        for k in range(int64({n})):
            o[r * int64({n}) + k] = {t}(x[r * int64({n}) + k])
"""
EPILOGUE = """
def epilogue(lo, hi, c, bias, o, first):
    for r in range(lo, hi):
        for j in range(int64({n})):
            o[r * int64({n}) + j] = {t}(c[int64(r - first) * int64({n}) + j] + bias[j])
"""


def panels(batch: int, m: int, n: int, k: int, rows: int, dtype: data_type, packed: bool, broadcast: bool) -> tuple[Executable, int]:
    """matmul + bias by panels over tensors a, b, bias, o; (executable, workspace bytes). ``packed``: a and b are stored as float32."""
    t = "float64" if dtype is data_type.DOUBLE else "float32"
    size, source = (8 if t == "float64" else 4), "float32" if packed else t
    kernels = [build(EPILOGUE.format(n=n, t=t), pointer("c", t), pointer("bias", t), pointer("o", t, True), ScalarParam("first", "int64"))]
    buffer_rows = max(rows, m)
    panel_at, a_at, b_at = 0, buffer_rows * n * size, buffer_rows * (n + k) * size
    workspace = [Buffer("workspace", 0, at) for at in (panel_at, a_at, b_at)]
    b_batches = 1 if broadcast else batch
    b_strides = (0 if broadcast else k * n, n, 1)
    pack_a = pack_b = None
    if packed:
        kernels.append(build(PACK.format(k=k, t=t), pointer("x", source), pointer("o", t, True), ScalarParam("first", "int64")))
        kernels.append(build(PACK_B.format(n=n, t=t), pointer("x", source), pointer("o", t, True)))
        pack_a = Launch(1, batch * m, (tensor(0), workspace[1], Constant(0, "int64")), 2)
        pack_b = Launch(2, b_batches * k, (tensor(1), workspace[2]), 2)
    step = Panels(
        Matrix(workspace[1] if packed else tensor(0), dtype, (batch, m, k), (m * k, k, 1)),
        Matrix(workspace[2] if packed else tensor(1), dtype, (batch, k, n), b_strides),
        Matrix(workspace[0], dtype, (1, rows, n), (rows * n, n, 1)),
        rows,
        Launch(0, batch * m, (workspace[0], tensor(2), tensor(3), Constant(0, "int64")), 2),
        pack_a,
        pack_b,
    )
    return load(kernels, step), b_at + b_batches * k * n * size


@pytest.mark.parametrize("rows", [4, 5, 13, 20, 64])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [data_type.FLOAT, data_type.DOUBLE])
@pytest.mark.parametrize("broadcast", [False, True])
def test_panels(rows: int, packed: bool, dtype: data_type, broadcast: bool) -> None:
    """M is no multiple of the rows; 20 and 64 rows take several batches of 10 rows at a time."""
    batch, m, n, k = 3, 10, 17, 11
    executable, size = panels(batch, m, n, k, rows, dtype, packed, broadcast)
    rng = np.random.default_rng(rows)
    real = np.float64 if dtype is data_type.DOUBLE else np.float32
    stored = np.float32 if packed else real
    a, b = rng.standard_normal((batch, m, k)).astype(stored), rng.standard_normal((1 if broadcast else batch, k, n)).astype(stored)
    bias, o = rng.standard_normal(n).astype(real), np.full((batch, m, n), np.nan, real)
    workspace = np.full(size, 0xFF, np.uint8)
    executable.run(address(a, b, bias, o), {}, workspace.ctypes.data, 0)
    bound = 1e-5 if real is np.float32 else 1e-12
    np.testing.assert_allclose(o, a.astype(np.float64) @ b.astype(np.float64) + bias, rtol=bound, atol=bound)


@pytest.mark.parametrize("shape", [(2, 3, 4, 0), (2, 0, 4, 3), (2, 3, 0, 4), (0, 3, 4, 2)])
def test_empty_panels(shape: tuple[int, int, int, int]) -> None:
    """K = 0 sums nothing: the result is the epilogue of 0."""
    batch, m, n, k = shape
    executable, size = panels(batch, m, n, k, 2, data_type.FLOAT, False, False)
    bias, o = np.arange(n, dtype=np.float32), np.full((batch, m, n), np.nan, np.float32)
    workspace = np.full(size + 64, 0xFF, np.uint8)
    executable.run({0: 0, 1: 0, 2: bias.ctypes.data, 3: o.ctypes.data}, {}, workspace.ctypes.data, 0)
    np.testing.assert_array_equal(o, np.broadcast_to(bias, o.shape))


def test_panels_keep_nonfinite_values_silent(recwarn: pytest.WarningsRecorder) -> None:
    executable, size = panels(1, 4, 4, 4, 4, data_type.FLOAT, False, False)
    a, b, bias, o = np.full((4, 4), np.inf, np.float32), np.zeros((4, 4), np.float32), np.zeros(4, np.float32), np.zeros((4, 4), np.float32)
    executable.run(address(a, b, bias, o), {}, np.zeros(size, np.uint8).ctypes.data, 0)
    assert np.isnan(o).all() and not recwarn.list


def test_threads_share_an_executable(add: tuple[KernelSpec, Binary]) -> None:
    """8 threads, 1,000 runs each, every run through the pool: bitwise equal results, no deadlock."""
    executable = load([add], Launch(0, 4096, ADD_ARGS, 128))
    a, b = np.random.default_rng(2).standard_normal((2, 4096), dtype=np.float32)
    expected = (a + b) * np.float32(3)
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(1000):
            o = np.full(4096, np.nan, np.float32)
            executable.run(address(a, b, o), {3: 3.0}, 0, 0)
            if not np.array_equal(o, expected):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert not wrong


def test_threads_run_panels_at_once() -> None:
    """BLAS and our pool under 4 callers; panels of one plan give the same bits in every thread."""
    batch, m, n, k = 2, 96, 80, 64
    executable, size = panels(batch, m, n, k, 40, data_type.FLOAT, True, False)
    rng = np.random.default_rng(4)
    a, b, bias = (rng.standard_normal(s, dtype=np.float32) for s in ((batch, m, k), (batch, k, n), (n,)))
    results: list[bytes] = []

    def work() -> None:
        o, workspace = np.empty((batch, m, n), np.float32), np.empty(size, np.uint8)
        for _ in range(25):
            o.fill(np.nan)
            executable.run(address(a, b, bias, o), {}, workspace.ctypes.data, 0)
            results.append(o.tobytes())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert len(results) == 100 and len(set(results)) == 1


@pytest.mark.parametrize("threads", ["1", "3"])
def test_thread_count_does_not_change_bits(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    executable, size = panels(2, 33, 17, 29, 10, data_type.FLOAT, False, False)
    rng = np.random.default_rng(5)
    a, b, bias = (rng.standard_normal(s, dtype=np.float32) for s in ((2, 33, 29), (2, 29, 17), (17,)))
    results = []
    for count in ("2", threads):
        monkeypatch.setenv("GRAPHDNN_NUM_THREADS", count)
        monkeypatch.setattr(cpu_pool, "_pool", None)
        assert pool().threads == int(count)
        o, workspace = np.full((2, 33, 17), np.nan, np.float32), np.zeros(size, np.uint8)
        executable.run(address(a, b, bias, o), {}, workspace.ctypes.data, 0)
        results.append(o.tobytes())
    assert results[0] == results[1]


def test_pool_calls_once_a_thread_and_raises_what_a_thread_raises() -> None:
    threads = ThreadPool(4)
    calls: list[int] = []
    gate = threading.Barrier(4, timeout=30)

    def work() -> int:
        calls.append(threading.get_ident())
        gate.wait()
        return 0

    assert threads.run(work, (), 9) == 0
    assert len(set(calls)) == 4

    caller = threading.get_ident()

    def fail() -> int:
        gate.wait()
        if threading.get_ident() != caller:
            raise ValueError("worker")
        return 0

    with pytest.raises(ValueError, match="worker"):
        threads.run(fail, (), 4)
    assert threads.run(lambda: 3, (), 1) == 3


def test_pool_waits_for_its_workers_when_the_caller_is_interrupted() -> None:
    threads = ThreadPool(2)
    caller, inside, leave, left = threading.get_ident(), threading.Event(), threading.Event(), threading.Event()

    def work() -> int:
        if threading.get_ident() == caller:
            assert inside.wait(30)
            threading.Timer(0.05, leave.set).start()
            raise KeyboardInterrupt
        inside.set()
        assert leave.wait(30)
        left.set()
        return 0

    with pytest.raises(KeyboardInterrupt):
        threads.run(work, (), 2)
    assert left.is_set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_has_its_own_pool(add: tuple[KernelSpec, Binary]) -> None:
    executable = load([add], Launch(0, 4096, ADD_ARGS, 128))
    a = np.ones(4096, np.float32)
    o = np.zeros(4096, np.float32)
    executable.run(address(a, a, o), {3: 1.0}, 0, 0)
    parent = pool()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            executable.run(address(a, a, o), {3: 2.0}, 0, 0)
            status = 0 if (o == 4).all() and pool() is not parent else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


RELOAD = """
import sys
import numpy as np
from graphdnn.codegen.spec import Binary, Buffer, KernelSpec, Launch, PointerParam, Recipe, TensorScalar, ScalarParam
from graphdnn.targets.cpu import CpuTarget
import llvmlite.binding
target = CpuTarget()
key = target.toolchain_key()
spec = KernelSpec("test", "root", (PointerParam("a", "float64"), PointerParam("o", "float64", 1, True)))
code = open(sys.argv[1], "rb").read()
executable = target.load(Recipe((spec,), (Launch(0, 1000, (Buffer("tensor", 0), Buffer("tensor", 1)), 64),)), [Binary("root", code)])
a, o = np.linspace(1, 9, 1000), np.zeros(1000)
executable.run({0: a.ctypes.data, 1: o.ctypes.data}, {}, 0, 0)
import math
assert (o == [math.lgamma(x) for x in a]).all() or np.allclose(o, [math.lgamma(x) for x in a], rtol=1e-14)
loaded = [m for m in ("numba", "jinja2", "networkx", "torch") if m in sys.modules]
assert not loaded, loaded
assert key == sys.argv[2], key
"""


def test_object_loads_in_a_new_process_without_numba(tmp_path: Path) -> None:
    """With a call to libm."""
    _, binary = build(ROOT, pointer("a", "float64"), pointer("o", "float64", True))
    assert binary.facts["calls"] == ["lgamma"]
    path = tmp_path / "root.bin"
    path.write_bytes(binary.code)
    run = subprocess.run([sys.executable, "-c", RELOAD, str(path), TARGET.toolchain_key()], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def test_toolchain_key_names_what_decides_the_code() -> None:
    import llvmlite
    import numba

    key = TARGET.toolchain_key()
    assert numba.__version__ in key and llvmlite.__version__ in key and key == CpuTarget().toolchain_key()


def test_every_damage_is_a_typed_error(add: tuple[KernelSpec, Binary]) -> None:
    code = add[1].code
    rng = np.random.default_rng(3)
    damaged = [b"", b"x", code[:-1], code + b"\0", code[: len(code) // 2]]
    for position in rng.integers(0, len(code), 200):
        changed = bytearray(code)
        changed[position] ^= int(rng.integers(1, 256))
        damaged.append(bytes(changed))
    for bytes_ in damaged:
        with pytest.raises(SerializationError):
            load([(add[0], Binary("add_scaled", bytes_))])


def test_object_of_another_host_or_without_its_symbols(add: tuple[KernelSpec, Binary]) -> None:
    stored = ObjectCode.unpack(add[1].code)
    other = ObjectCode(stored.entry, stored.symbols, "riscv64:none:0", stored.image)
    with pytest.raises(SerializationError, match="riscv64"):
        load([(add[0], Binary("add_scaled", other.pack()))])
    lacking = ObjectCode(stored.entry, ("no_such_function",), stored.host, stored.image)
    with pytest.raises(SerializationError, match="no_such_function"):
        load([(add[0], Binary("add_scaled", lacking.pack()))])
    wrong = ObjectCode("no_such_entry", stored.symbols, stored.host, stored.image)
    with pytest.raises(SerializationError, match="no_such_entry"):
        load([(add[0], Binary("add_scaled", wrong.pack()))])


def test_kernels_that_do_not_belong_to_the_recipe(add: tuple[KernelSpec, Binary]) -> None:
    with pytest.raises(SerializationError):
        TARGET.load(Recipe((add[0],), ()), [])


def test_code_is_freed_with_its_executable(add: tuple[KernelSpec, Binary]) -> None:
    """1,000 loads must not leave 1,000 mappings behind."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc")
    executable = load([add], Launch(0, 4, ADD_ARGS))
    before = len(maps.read_text().splitlines())
    for _ in range(1000):
        executable = load([add], Launch(0, 4, ADD_ARGS))
    assert len(maps.read_text().splitlines()) < before + 100
    del executable


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_paused_and_restored(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError), paused_collector():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
