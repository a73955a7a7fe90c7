"""The CUDA target on a real GPU: numbers, contexts, streams, threads, graphs, forks, errors. Run with ``-m gpu``; ``-s`` shows host times."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphdnn import _libcuda, device, errors, intrinsics
from graphdnn.codegen.spec import Buffer, Constant, KernelSpec, Launch, Memset, PointerParam, Recipe, ScalarParam, Source, TensorScalar
from graphdnn.targets import get
from graphdnn.targets.base import Executable
from graphdnn.targets.cuda import CudaTarget
from graphdnn.targets.cuda_memory import DeviceArray, Stream

pytestmark = pytest.mark.gpu

N = 100_003
AXPB = """
def axpb_1(x, y, a, b, n):
    i = uint32(uint32(uint32(cuda.blockIdx.x) * uint32(256)) + uint32(cuda.threadIdx.x))
    if i < uint32(n):
        y[i] = float32(x[i] * a) + b
"""
REVERSE = """
def reverse_1(x, y):
    tile = cuda.shared.array(0, float32)
    for i in range(uint32(cuda.threadIdx.x), uint32(25000), uint32(256)):
        tile[i] = x[i]
    cuda.syncthreads()
    for i in range(uint32(cuda.threadIdx.x), uint32(25000), uint32(256)):
        y[i] = tile[uint32(24999) - i]
"""
WILD = """
def wild_1(x):
    x[int64(1) << int64(45)] = float32(1.0)
"""
F32X, F32Y = PointerParam("x", "float32"), PointerParam("y", "float32", written=True)
AXPB_SPEC = KernelSpec("t", "axpb_1", (F32X, F32Y, ScalarParam("a", "float32"), ScalarParam("b", "float32"), ScalarParam("n", "uint32")), block=256)
BLOCKS = -(-N // 256)
AXPB_STEP = Launch(0, BLOCKS, (Buffer("tensor", 0), Buffer("tensor", 1), TensorScalar(2, "float32"), Constant(0.5, "float32"), Constant(N, "uint32")))


def namespace(target: str) -> dict[str, Any]:
    from numba import cuda, types

    return {"cuda": cuda, "range": range, **{n: getattr(types, n) for n in ("float32", "uint32", "int64")}}


@pytest.fixture(autouse=True)
def small_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intrinsics, "namespace", namespace, raising=False)


@pytest.fixture(scope="module")
def target() -> CudaTarget:
    made = get(device.cuda(0))
    assert isinstance(made, CudaTarget)
    return made


def load(target: CudaTarget, spec: KernelSpec, text: str, *steps: Launch | Memset) -> Executable:
    return target.load(Recipe((spec,), steps), [target.compile(Source(spec, text))])


@pytest.fixture
def axpb(target: CudaTarget) -> Executable:
    return load(target, AXPB_SPEC, AXPB, AXPB_STEP)


def numbers(seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(N).astype(np.float32)


def expected(x: Any, a: float) -> Any:
    return x * np.float32(a) + np.float32(0.5)


def run_axpb(executable: Executable, x: DeviceArray, y: DeviceArray, a: float, stream: int = 0) -> None:
    executable.run({0: x.address, 1: y.address}, {2: a}, 0, stream)


def nearly(got: Any, want: Any) -> bool:
    """Equal but for a fused multiply-add."""
    return bool(np.allclose(got, want, rtol=1e-6, atol=1e-6))


def test_properties_of_the_gpu() -> None:
    props = device.cuda(0)
    assert props.kind == "cuda" and props.index == 0 and props.sm_count > 0 and props.warp_size == 32
    assert device.DeviceProps.from_json(props.to_json()) == props and device.parse("cuda:0") == props
    assert device.current_default().kind == "cuda"
    print("\n", props)
    if props.name == "NVIDIA H200":
        described = device.describe("sm_90")
        assert (props.arch, props.sm_count, props.l2_bytes) == (described.arch, described.sm_count, described.l2_bytes)
        assert props.shared_per_block_optin == described.shared_per_block_optin and props.shared_per_sm == described.shared_per_sm
        assert props.dram_gbps == pytest.approx(described.dram_gbps, rel=0.05)  # memory clocks differ from card to card


def test_reading_the_properties_makes_no_context() -> None:
    code = "from graphdnn import _libcuda, device; device.current_default(); print(_libcuda.driver().handle('cuCtxGetCurrent'))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "0"


def test_right_numbers(axpb: Executable) -> None:
    x, y = DeviceArray.from_numpy(numbers()), DeviceArray.from_numpy(np.full(N, np.nan, np.float32))
    for a in (2.0, -3.25, 0.0):
        run_axpb(axpb, x, y, a)
        assert nearly(y.numpy(), expected(numbers(), a))


def test_offsets_workspace_and_memset(target: CudaTarget) -> None:
    spec, half = AXPB_SPEC, 4 * 50_000
    args = (Buffer("tensor", 0, half), Buffer("workspace", 0, 256), TensorScalar(2, "float32"), Constant(0.5, "float32"), Constant(50_000, "uint32"))
    executable = load(target, spec, AXPB, Memset(Buffer("workspace", 0), 64, 0x5A), Launch(0, 196, args))
    x, workspace = DeviceArray.from_numpy(numbers()), DeviceArray.from_numpy(np.zeros(256 + half, np.uint8))
    executable.run({0: x.address}, {2: 2.0}, workspace.address, 0)
    got = workspace.numpy()
    assert (got[:64] == 0x5A).all() and not got[64:256].any()
    assert nearly(got[256:].view(np.float32), expected(numbers()[50_000:100_000], 2.0))


def test_dynamic_shared_memory_beyond_48_kib(target: CudaTarget) -> None:
    spec = KernelSpec("t", "reverse_1", (F32X, F32Y), block=256, shared_bytes=100_000)
    executable = load(target, spec, REVERSE, Launch(0, 1, (Buffer("tensor", 0), Buffer("tensor", 1))))
    x, y = DeviceArray.from_numpy(numbers()[:25000]), DeviceArray((25000,), np.float32)
    executable.run({0: x.address, 1: y.address}, {}, 0, 0)
    assert (y.numpy() == numbers()[:25000][::-1]).all()


def test_more_shared_memory_than_the_device_has(target: CudaTarget) -> None:
    spec = KernelSpec("t", "reverse_1", (F32X, F32Y), block=256, shared_bytes=1 << 20)
    with pytest.raises(errors.ExecutionError, match="1048576 bytes of shared memory.*INVALID_VALUE"):
        load(target, spec, REVERSE, Launch(0, 1, (Buffer("tensor", 0), Buffer("tensor", 1))))


def test_threads_with_their_own_streams(axpb: Executable) -> None:
    wrong: list[str] = []

    def work(seed: int) -> None:
        try:
            stream, host = Stream(), numbers(seed)
            x, y = DeviceArray.from_numpy(host), DeviceArray((N,), np.float32)
            for call in range(500):
                run_axpb(axpb, x, y, float(call), stream.handle)
            stream.synchronize()
            if not nearly(y.numpy(), expected(host, 499.0)):
                wrong.append(f"thread {seed}: wrong numbers")
        except errors.GraphError as exc:
            wrong.append(f"thread {seed}: {exc}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_torch_tensors_on_a_torch_stream(axpb: Executable) -> None:
    import torch
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.randn(N, device="cuda")
        y = torch.full_like(x, float("nan"))
        axpb.run({0: x.data_ptr(), 1: y.data_ptr()}, {2: 4.0}, 0, stream.cuda_stream)
        assert torch.allclose(y, x * 4 + 0.5)


def test_a_captured_graph_outlives_the_executable(target: CudaTarget) -> None:
    import torch
    x, y = torch.randn(N, device="cuda"), torch.full((N,), float("nan"), device="cuda")
    graph = torch.cuda.CUDAGraph()
    text = AXPB.replace("* a) + b", "* a) + b + b")
    with torch.cuda.graph(graph):
        # Loaded and first run inside the capture.
        executable = load(target, AXPB_SPEC, text, AXPB_STEP)
        executable.run({0: x.data_ptr(), 1: y.data_ptr()}, {2: 3.0}, 0, torch.cuda.current_stream().cuda_stream)
    del executable
    gc.collect()
    for factor in (1.0, 5.0):
        x.mul_(factor)
        y.fill_(float("nan"))
        graph.replay()
        assert torch.allclose(y, x * 3 + 1.0, rtol=1e-5, atol=1e-5)


def test_the_context_of_the_caller_stays_current(axpb: Executable) -> None:
    seen: list[int] = []

    def fresh_thread() -> None:
        x, y = DeviceArray.from_numpy(numbers()), DeviceArray((N,), np.float32)
        run_axpb(axpb, x, y, 1.0)
        seen.append(_libcuda.driver().handle("cuCtxGetCurrent"))

    thread = threading.Thread(target=fresh_thread)
    thread.start()
    thread.join()
    assert seen == [0]


def test_a_second_gpu_while_the_first_is_current() -> None:
    if _libcuda.driver().value("cuDeviceGetCount") < 2:
        pytest.skip("one GPU")
    import torch
    torch.cuda.set_device(0)
    executable = load(get(device.cuda(1)), AXPB_SPEC, AXPB, AXPB_STEP)  # type: ignore[arg-type]
    x = torch.randn(N, device="cuda:1")
    y = torch.full_like(x, float("nan"))
    executable.run({0: x.data_ptr(), 1: y.data_ptr()}, {2: 2.0}, 0, torch.cuda.current_stream(1).cuda_stream)
    assert torch.allclose(y, x * 2 + 0.5) and torch.cuda.current_device() == 0


def test_wrong_architecture_and_damaged_code(target: CudaTarget) -> None:
    other = "sm_90a" if device.cuda(0).capability[0] < 9 else "sm_80"
    with pytest.raises(errors.ExecutionError, match=f"another GPU architecture.*{other}"):
        load(CudaTarget(other), AXPB_SPEC, AXPB, AXPB_STEP)
    binary = target.compile(Source(AXPB_SPEC, AXPB))
    for code in (b"", b"not machine code", bytes(len(binary.code))):
        with pytest.raises(errors.ExecutionError, match="loading kernel 'axpb_1'"):
            target.load(Recipe((AXPB_SPEC,), (AXPB_STEP,)), [type(binary)("axpb_1", code)])


STORED = """
import pickle, sys
sys.modules["numba"] = sys.modules["llvmlite"] = sys.modules["cuda"] = None
import time
start = time.perf_counter()
from graphdnn import _libcuda
from graphdnn.targets.cuda import CudaTarget
imported = time.perf_counter()
_libcuda.driver()
opened = time.perf_counter()
recipe, binary, arch = pickle.load(open(sys.argv[1], "rb"))
import numpy as np
from graphdnn.targets.cuda_memory import DeviceArray, synchronize
x, y = DeviceArray.from_numpy(np.arange(100_003, dtype=np.float32)), DeviceArray((100_003,), np.float32)
before = time.perf_counter()
executable = CudaTarget(arch).load(recipe, [binary])
loaded = time.perf_counter()
executable.run({0: x.address, 1: y.address}, {2: 2.0}, 0, 0)
assert (y.numpy() == np.arange(100_003, dtype=np.float32) * 2 + np.float32(0.5)).all()
print(f"import {1e3 * (imported - start):.1f} ms, driver {1e3 * (opened - imported):.1f} ms, load {1e3 * (loaded - before):.1f} ms")
"""


def test_a_stored_kernel_runs_without_a_compiler(target: CudaTarget, tmp_path: Path) -> None:
    stored = tmp_path / "kernel"
    stored.write_bytes(pickle.dumps((Recipe((AXPB_SPEC,), (AXPB_STEP,)), target.compile(Source(AXPB_SPEC, AXPB)), target.arch)))
    done = subprocess.run([sys.executable, "-c", STORED, str(stored)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    print("\n", done.stdout.strip())


FORK = """
import os
from graphdnn import device, errors
from graphdnn.targets.cuda_memory import DeviceArray
array = DeviceArray((4,), "float32")
child = os.fork()
if not child:
    code = 1
    try:
        DeviceArray((4,), "float32")
    except errors.ExecutionError as exc:
        code = 0 if "forked" in str(exc) else 2
    os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
array.numpy()
"""


def test_a_forked_child_gets_a_clear_error() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


STICKY = """
import pickle, sys
from graphdnn import errors
from graphdnn.targets.cuda import CudaTarget
from graphdnn.targets.cuda_memory import DeviceArray, synchronize
recipe, binary, arch = pickle.load(open(sys.argv[1], "rb"))
executable = CudaTarget(arch).load(recipe, [binary])
x = DeviceArray((4,), "float32")
executable.run({0: x.address}, {}, 0, 0)
texts = []
for action in (synchronize, lambda: executable.run({0: x.address}, {}, 0, 0)):
    try:
        action()
    except errors.ExecutionError as exc:
        texts.append(str(exc))
assert len(texts) == 2 and all("CUDA_ERROR_" in t and "restart it" in t for t in texts), texts
print(texts[1])
"""


def test_a_fault_of_an_earlier_kernel_is_explained(target: CudaTarget, tmp_path: Path) -> None:
    spec = KernelSpec("t", "wild_1", (F32X,), block=32)
    stored = tmp_path / "kernel"
    recipe = Recipe((spec,), (Launch(0, 1, (Buffer("tensor", 0),)),))
    stored.write_bytes(pickle.dumps((recipe, target.compile(Source(spec, WILD)), target.arch)))
    done = subprocess.run([sys.executable, "-c", STICKY, str(stored)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    print("\n", done.stdout.strip())
