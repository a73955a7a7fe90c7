"""D6 P1 P2: what one execute asks of the driver, in a capture and out of it. The driver is the one of tests/unit/fake_cuda.py, so that calls are
counted and nothing is timed."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

import graphdnn
from graphdnn import data_type
from graphdnn.codegen.spec import Limits
from graphdnn.errors import ExecutionError
from graphdnn.targets import cuda_driver
from tests.fake_driver import AnyKernel, install, on_gpu
from tests.unit.fake_cuda import FakeCuda

ROOT = Path(__file__).resolve().parents[2]
ONE_LAUNCH = ["cuCtxGetCurrent", "cuLaunchKernelEx"]
"""The thread's context is read, not changed: a launch in another context would be refused."""
WAITS_OR_ALLOCATES = re.compile("Synchronize|Alloc|Free|Memcpy|Query|Wait")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch, FakeCuda(AnyKernel()))


def chain(count: int):
    """One kernel that reads ``count`` - 1 tensors and writes one."""

    def declare(g):
        tensors = [g.tensor(dim=(4, 64), layout="row", name=f"t{i}", uid=i + 1) for i in range(count - 1)]
        y = g.relu(tensors[0])
        for t in tensors[1:]:
            y = g.add(y, t)
        y.set_output(True).set_uid(count)

    return declare


def pack(count: int) -> dict[int, int]:
    return {uid: uid << 20 for uid in range(1, count + 1)}


def calls_of(fake: FakeCuda, run) -> list[str]:
    fake.calls.clear()
    run()
    return list(fake.calls)


@pytest.fixture
def no_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba's way to launch a kernel raises."""
    from numba.cuda import dispatcher

    def refuse(*args, **kwargs):
        raise AssertionError("an execute went through numba's dispatcher")

    for owner in (dispatcher.CUDADispatcher, dispatcher._LaunchConfiguration, dispatcher._Kernel):
        for name in ("__call__", "call", "launch", "configure", "__getitem__"):
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, refuse)


@pytest.mark.parametrize("count", [4, 13])
def test_P1_P2_one_execute_is_one_launch(fake, no_dispatcher, count):
    """Once warm, for 4 and for 13 tensors; the context was made current by somebody (torch) before, or the call is put between push and pop."""
    g = on_gpu(fake, chain(count))
    fake.stack.append(cuda_driver.primary_context(0))
    for _ in range(3):
        assert calls_of(fake, lambda: g.execute(pack(count), None)) == ONE_LAUNCH
    launch = fake.log[-1]
    assert launch[0] == "launch" and sorted(v for v in launch[6] if v in pack(count).values()) == sorted(pack(count).values())
    fake.stack.clear()
    calls = calls_of(fake, lambda: g.execute(pack(count), None))
    assert calls == ["cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuLaunchKernelEx", "cuCtxPopCurrent_v2"]


@pytest.mark.parametrize("count", [4, 13])
def test_P1_setting_a_stream_calls_no_driver(fake, count):
    """Unchanged or not: set_stream notes an address, and the launch takes it."""
    handle = graphdnn.create_handle("cuda:0")
    g = on_gpu(fake, chain(count), handle=handle)
    fake.stack.append(cuda_driver.primary_context(0))
    for stream in (0x77, 0x77, 0x77, 0x88, 0):
        assert calls_of(fake, lambda stream=stream: graphdnn.set_stream(handle, stream)) == []
        assert calls_of(fake, lambda: g.execute(pack(count), None, handle=handle)) == ONE_LAUNCH
        assert fake.log[-1][5] == stream
    graphdnn.destroy_handle(handle)


def test_D6_a_capture_sees_nothing_but_the_launches(fake):
    """The first execute of a plan, already inside a capture: a matmul with a scratch reduction, in several kernels and memsets."""

    def declare(g):
        a, b = g.tensor(dim=(96, 64), layout="row", name="a", uid=1), g.tensor(dim=(64, 80), layout="row", name="b", uid=2)
        y = g.matmul(a, b)
        y.set_output(True).set_uid(3)
        g.reduction(y, graphdnn.reduction_mode.ADD).set_dim((1, 1)).set_output(True).set_uid(4)

    g = on_gpu(fake, declare)
    fake.captured.add(0x77)
    fake.stack.append(cuda_driver.primary_context(0))
    handle = graphdnn.create_handle("cuda:0")
    graphdnn.set_stream(handle, 0x77)
    steps = sum(not isinstance(s, Limits) for s in g.plan.recipe.steps)
    for _ in range(2):
        calls = calls_of(fake, lambda: g.execute(pack(4), 1 << 30, handle=handle))
        assert not [c for c in calls if WAITS_OR_ALLOCATES.search(c)]
        assert calls[0] == "cuCtxGetCurrent" and len(calls) == 1 + steps and set(calls[1:]) <= {"cuLaunchKernelEx", "cuMemsetD8Async"}
        assert {entry[5] if entry[0] == "launch" else entry[4] for entry in fake.log[-steps:]} == {0x77}
    graphdnn.destroy_handle(handle)


def test_D6_values_are_not_read_in_a_capture(fake, monkeypatch):
    """GRAPHDNN_CHECK_VALUES waits for the stream, as ``.item()`` would, and so ends a capture: in one it is left out."""
    monkeypatch.setenv("GRAPHDNN_CHECK_VALUES", "1")

    def declare(g):
        q, k, v = (g.tensor(dim=(2, 1, 8, 16), layout="row", name=n, uid=i) for i, n in enumerate("qkv", 1))
        lengths = [g.tensor(dim=(2, 1, 1, 1), layout="row", data_type=data_type.INT32, name=f"len_{n}", uid=i) for i, n in ((4, "q"), (5, "kv"))]
        o, _ = g.sdpa(q, k, v, generate_stats=False, use_padding_mask=True, seq_len_q=lengths[0], seq_len_kv=lengths[1], name="a")
        o.set_dim((2, 1, 8, 16)).set_stride((128, 128, 16, 1)).set_output(True).set_uid(6)

    g = on_gpu(fake, declare)
    assert any(isinstance(s, Limits) for s in g.plan.recipe.steps)
    lengths = (ctypes.c_int32 * 2)(8, 8)
    buffers = pack(6) | {4: ctypes.addressof(lengths), 5: ctypes.addressof(lengths)}
    fake.stack.append(cuda_driver.primary_context(0))
    assert "cuStreamSynchronize" in calls_of(fake, lambda: g.execute(buffers, None))
    fake.captured.add(0)
    calls = calls_of(fake, lambda: g.execute(buffers, None))
    assert "cuLaunchKernelEx" in calls and not [c for c in calls if WAITS_OR_ALLOCATES.search(c)]


def test_D6_what_would_have_to_be_built_in_a_capture_is_refused(fake):
    """A buffer less aligned than declared needs another kernel: outside a capture it is built, inside it is a typed error that names the tensor."""
    g = on_gpu(fake, chain(4))
    fake.captured.add(0)
    with pytest.raises(ExecutionError, match="'t1'.*not aligned.*stream is being captured"):
        g.execute(pack(4) | {2: (2 << 20) + 4}, None)
    assert calls_of(fake, lambda: g.execute(pack(4), None)).count("cuLaunchKernelEx") == 1, "the graph stays usable"


@pytest.mark.parametrize("method", ["populate_cuda_graph", "update_cuda_graph"])
def test_D6_nodes_of_a_graph_are_no_work_of_a_stream(fake, method):
    """No method of a graph begins a capture, and one that writes nodes asks nothing of a stream that is captured: it cannot harm the capture."""
    g = on_gpu(fake, chain(4))
    fake.captured.add(0)
    fake.calls.clear()
    with pytest.raises(ExecutionError, match="cuGraphGetNodes"):  # this driver has none
        getattr(g, method)(None, pack(4), 0, 0x600)
    assert not [c for c in fake.calls if "Stream" in c or "Launch" in c]


def test_D6_every_example_is_run_by_a_test():
    """tests/unit/test_examples.py runs them as a user would; CI runs that file."""
    text = (ROOT / "tests" / "unit" / "test_examples.py").read_text(encoding="utf-8")
    ran = set(re.findall(r'\brun\("(\w+)"', text))
    names = {p.stem for p in (ROOT / "examples").glob("*.py")} - {"pipeline"}  # what three examples share
    missing = {n for n in names if not any(n.startswith(f"{r}_") for r in ran)}
    assert not missing, f"no test runs {missing}"
    assert "pytest" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
