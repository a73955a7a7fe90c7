"""Executors: what is refused, threads, life of the buffers; on a driver written in Python also launches, driver calls and several GPUs."""

from __future__ import annotations

import ctypes
import gc
import pickle
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import graphdnn
from graphdnn import device as devices
from graphdnn.errors import BuildError, ExecutionError, KindError, ValidationError
from tests.fake_driver import install
from tests.unit.fake_cuda import CONTEXT, FakeCuda, kinds

F32 = graphdnn.data_type.FLOAT


def scaled_sum(device: str, built: bool = True) -> Any:
    """y = (a + b) * s, uids 1, 2, 4 and by-value 3."""
    g = graphdnn.pygraph(io_data_type=F32, intermediate_data_type=F32, compute_data_type=F32, device=device)
    a, b = (g.tensor(name=n, dim=[2, 3, 64], stride=[192, 64, 1], uid=u) for n, u in (("a", 1), ("b", 2)))
    s = g.tensor(name="s", dim=[1, 1, 1], stride=[1, 1, 1], is_pass_by_value=True, uid=3)
    g.mul(a=g.add(a=a, b=b), b=s).set_output(True).set_uid(4)
    if built:
        g.build([graphdnn.heur_mode.A])
    return g


def arrays() -> dict[int, Any]:
    return {1: np.ones((2, 3, 64), np.float32), 2: np.ones((2, 3, 64), np.float32), 3: 0.5, 4: np.zeros((2, 3, 64), np.float32)}


# ------------------------------------------------------------------------------------------------------------------------------- on a CPU
def test_what_bind_refuses() -> None:
    g = scaled_sum("cpu", built=False)
    with pytest.raises(BuildError, match="no execution plans"):
        g.bind(arrays())
    g = scaled_sum("cpu")
    pack = arrays()
    with pytest.raises(ValidationError, match=r"missing buffer for uid 2"):
        g.bind({k: v for k, v in pack.items() if k != 2})
    both = np.zeros(500, np.float32)
    with pytest.raises(ValidationError, match="overlaps"):
        g.bind(pack | {1: both[:384].reshape(2, 3, 64), 4: both[100:484].reshape(2, 3, 64)})
    with pytest.raises(KindError, match="variant pack"):
        g.bind(None)
    with pytest.raises(KindError, match=r"stream.*stream\.cuda_stream"):
        g.plan.bind(pack, None, "0x77")
    for address in (-1, 1 << 64):
        with pytest.raises(ValidationError, match="not an address"):
            g.plan.bind(pack, None, address)


def test_raw_addresses() -> None:
    g, pack = scaled_sum("cpu"), arrays()
    run = g.bind(pack)
    raw = [pack[u].ctypes.data for u in run.uids]
    for bad in (None, 0):
        with pytest.raises(ValidationError, match="uid 2 is a null pointer"):
            run.run([raw[0], bad, raw[2]])
    with pytest.raises(ValidationError, match=r"wrong number.*3, for uids \[1, 2, 4\].*found 2"):
        run.run(raw[:2])
    run.run(raw)
    assert (pack[4] == 1).all()
    for odd in (None, 5, "abc", [1 << 70, raw[1], raw[2]], [raw[0], -1, raw[2]], [raw[0], 1.5, raw[2]], [*raw[:2], "a"]):
        with pytest.raises(KindError, match="addresses are integers of 64 bits"):
            run.run(odd)
    for call in (lambda: g.execute(pack | {1: 1 << 70}, None), lambda: run.update({1: 1 << 64}), lambda: g.bind(pack | {4: 1 << 64})):
        with pytest.raises(ValidationError, match="is not an address.*64 bits"):
            call()
    pack[4][:] = np.nan
    run()  # what was bound is still there
    assert (pack[4] == 1).all()


def test_an_executor_keeps_its_buffers_and_only_those() -> None:
    class Array(np.ndarray):
        """An array that can be referred to weakly."""

    g, pack = scaled_sum("cpu"), arrays()
    pack[1] = pack[1].view(Array)
    kept, other = weakref.ref(pack[1]), weakref.ref(pack[1])
    run, out = g.bind(pack), pack[4]
    del pack
    gc.collect()
    assert kept() is not None
    run()
    assert (out == 1).all()
    run.update({1: np.full((2, 3, 64), 3, np.float32)})
    gc.collect()
    assert other() is None, "what was replaced is let go"
    run()
    assert (out == 2).all()
    with pytest.raises(KindError, match="pickled"):
        pickle.dumps(run)


# ------------------------------------------------------------------------------------------------------------------------- the Python driver
class CudaArray:
    """An array on a GPU as other libraries show it."""

    def __init__(self, address: int, index: int = 0, shape: tuple[int, ...] = (2, 3, 64)) -> None:
        self.device = type("Device", (), {"id": index})
        self.__cuda_array_interface__ = {"version": 3, "typestr": "<f4", "shape": shape, "strides": None, "data": (address, False)}


def on_gpu(base: int = 0x100000, index: int = 0) -> dict[int, Any]:
    return {1: CudaArray(base, index), 2: CudaArray(base + 0x10000, index), 3: 0.5, 4: CudaArray(base + 0x20000, index)}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Two GPUs; the kernels of ``scaled_sum``."""
    described = scaled_sum("sm_90", built=False)
    described.validate()
    described.build_operation_graph()
    described.create_execution_plans([graphdnn.heur_mode.A])
    kernels = described._planned().plan_at(0).recipe.kernels
    return install(monkeypatch, FakeCuda(_ByStem({k.name: kinds(k) for k in kernels}), devices=2))


class _ByStem(dict[str, Any]):
    """Parameters by entry, whose names carry a digest after the kernel's."""

    def __missing__(self, name: str) -> Any:
        return next(v for k, v in self.items() if name.startswith(k))

    def __contains__(self, name: object) -> bool:
        return any(str(name).startswith(k) for k in self)


def launches(fake: FakeCuda) -> list[tuple[Any, ...]]:
    return [entry for entry in fake.log if entry[0] == "launch"]


def test_launches_and_driver_calls(fake: FakeCuda) -> None:
    """One question for the context and one call a step, bound or not, however often; no allocation, no wait."""
    g, pack = scaled_sum("cuda:0"), on_gpu()
    fake.stack.append(CONTEXT)
    run = g.plan.bind(pack, None, 0x77)
    for call in (lambda: g.plan.execute(pack, None, 0x77), run, run):
        fake.log.clear()
        fake.calls.clear()
        call()
        assert fake.calls == ["cuCtxGetCurrent", "cuLaunchKernelEx"]
        (launch,) = launches(fake)
        assert launch[5] == 0x77 and {0x100000, 0x110000, 0x120000, 0.5} <= set(launch[6])
    fake.log.clear()
    run(stream=0x88)
    run.update({3: 2.0, 4: 0x500000})()
    run.run([0x600000, 0x700000, 0x800000])
    run()
    first, second, third, fourth = launches(fake)
    assert first[5] == 0x88 and second[5] == third[5] == 0x77
    assert {0x100000, 0x500000, 2.0} <= set(second[6]) and {0x600000, 0x700000, 0x800000, 2.0} <= set(third[6]) and fourth[6] == second[6]


def test_a_second_thread_is_refused_and_nothing_is_mixed(fake: FakeCuda) -> None:
    inside, leave, refused = threading.Event(), threading.Event(), []
    launch = fake.cuLaunchKernelEx

    def slow(*args: Any) -> None:
        inside.set()
        leave.wait(10)
        launch(*args)

    fake.cuLaunchKernelEx = slow  # type: ignore[method-assign]
    run = scaled_sum("cuda:0").plan.bind(on_gpu(), None, 0x77)
    thread = threading.Thread(target=run)
    thread.start()
    inside.wait(10)
    for call in (run, lambda: run.run([1, 2, 3]), lambda: run.update(on_gpu(0x900000))):
        with pytest.raises(ExecutionError, match="an executor for every thread") as error:
            call()
        refused.append(error)
    leave.set()
    thread.join()
    assert len(refused) == 3 and {0x100000, 0x110000, 0x120000} <= set(launches(fake)[-1][6])
    run()


def test_a_plan_follows_its_tensors_to_another_gpu(fake: FakeCuda) -> None:
    g = scaled_sum("cuda:0")
    fake.log.clear()
    for call in (lambda: g.plan.execute(on_gpu(0x900000, 1)), g.plan.bind(on_gpu(0x900000, 1)), lambda: g.plan.execute(on_gpu())):
        call()
    assert [entry[7] for entry in launches(fake)] == [CONTEXT + 1, CONTEXT + 1, CONTEXT]
    assert len([entry for entry in fake.log if entry[0] == "load"]) == 1, "loaded there once"
    with pytest.raises(ValidationError, match=r"wrong device.*cuda:1.*cuda:0"):
        g.plan.execute(on_gpu(0x900000, 1) | {2: CudaArray(0x10000, 0)})


def test_the_first_load_on_another_gpu_is_refused_in_a_capture(fake: FakeCuda) -> None:
    g = scaled_sum("cuda:0")
    fake.captured.add(0x99)
    with pytest.raises(ExecutionError, match=r"not loaded on cuda:1 yet.*execute\(\) once on that GPU"):
        g.plan.execute(on_gpu(0x900000, 1), None, 0x99)
    g.plan.execute(on_gpu(0x900000, 1), None, 0x77)
    g.plan.execute(on_gpu(0x900000, 1), None, 0x99)


def test_a_gpu_of_another_architecture_is_not_followed(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    g = scaled_sum("cuda:0")
    real = devices.cuda
    monkeypatch.setattr(devices, "cuda", lambda index=0: devices.replace(real(index), arch="sm_80") if index == 1 else real(index))
    with pytest.raises(ValidationError, match=r"wrong device.*found cuda:1.*copy it to cuda:0"):
        g.plan.execute(on_gpu(0x900000, 1))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (400, "live stream.*destroyed stream"),
        (709, "stream.*destroyed|device was reset"),
        (101, "device.*gone|no such device"),
        (46, "device.*busy|exclusive"),
        (999, "restart"),
    ],
)
def test_a_destroyed_stream_and_a_vanished_device(fake: FakeCuda, code: int, message: str) -> None:
    g = scaled_sum("cuda:0")
    run = g.plan.bind(on_gpu(), None, 0x77)
    fake.fail["cuLaunchKernelEx"] = code
    for call in (run, lambda: g.plan.execute(on_gpu(), None, 0x77)):
        with pytest.raises(ExecutionError, match=rf"cuda:0, stream 0x77.*\({code}\).*({message})"):
            call()
    fake.fail.clear()
    run()


# ------------------------------------------------------------------------------------------------------------- private calls of the API page
def test_calls_by_raw_addresses() -> None:
    g, pack = scaled_sum("cpu"), arrays()
    number = ctypes.c_float(0.25)
    at = {u: pack[u].ctypes.data for u in (1, 2, 4)} | {3: ctypes.addressof(number)}
    assert g._get_variant_pack_uids_sorted() == [1, 2, 3, 4] and g._prepare_variant_pack_template() is None
    listed = [at[u] for u in (1, 2, 3, 4)]
    array = (ctypes.c_void_p * 4)(*listed)
    calls = (
        lambda: g._execute(at, 0),
        lambda: g._execute_plan_at_index(at, 0, 0),
        lambda: g._execute_with_ptrs(listed, 0),
        lambda: g._execute_with_raw_ptrs(ctypes.addressof(array), 4, 0),
    )
    for call in calls:
        pack[4][:] = np.nan
        call()
        assert (pack[4] == 0.5).all()
    with pytest.raises(ValidationError, match=r"wrong number.*\[1, 2, 3, 4\].*found 3"):
        g._execute_with_ptrs(listed[:3], 0)
    with pytest.raises(ValidationError, match="uid 3"):
        g._execute(at | {3: 0}, 0)
    with pytest.raises(ValidationError, match="null pointer"):
        g._execute_with_raw_ptrs(0, 4, 0)
    for count in (-1, 3, 1 << 40):  # refused before the array is read
        with pytest.raises(ValidationError, match="wrong number"):
            g._execute_with_raw_ptrs(8, count, 0)
    for odd in (lambda: g._execute_with_ptrs(None, 0), lambda: g._execute_with_raw_ptrs(listed, 4, 0), lambda: g._execute_with_raw_ptrs(8, "4", 0)):
        with pytest.raises(KindError):
            odd()
    with pytest.raises(BuildError):
        scaled_sum("cpu", built=False)._get_variant_pack_uids_sorted()


def test_arrays_of_other_libraries_are_checked_every_time(fake: FakeCuda) -> None:
    """What describes itself as an array that fitted is taken at once; address, size, type, device and alignment still count."""
    g, pack = scaled_sum("cuda:0"), on_gpu()
    for given in (pack, on_gpu(0x900000), pack):
        g.plan.execute(given)
    assert [{0x100000, 0x120000} <= set(x[6]) for x in launches(fake)] == [True, False, True]
    assert {0x900000, 0x910000, 0x920000} <= set(launches(fake)[1][6])
    other = CudaArray(0x100000)
    other.__cuda_array_interface__ = other.__cuda_array_interface__ | {"typestr": "<f2"}
    for wrong, message in (
        (CudaArray(0x100000, shape=(2, 3, 63)), "too small"),
        (other, "wrong data type"),
        (CudaArray(0), "null pointer"),
        (CudaArray(0x110100), "overlaps"),
    ):
        for _ in range(2):
            with pytest.raises(ValidationError, match=message):
                g.plan.execute(pack | {4: wrong})


def test_the_stream_that_arrays_name(fake: FakeCuda) -> None:
    """One is used where the caller has set none; several, what is no address, and the legacy default stream are the legacy default stream."""
    g, pack, handle = scaled_sum("cuda:0"), on_gpu(), graphdnn.create_handle("cuda:0")

    def named(*streams: Any) -> dict[int, Any]:
        for array, stream in zip((pack[1], pack[2], pack[4]), streams, strict=True):
            array.__cuda_array_interface__ |= {"stream": stream}
        return pack

    cases = (((None, 0x77, 0x77), 0x77), ((2, 2, 2), 2), ((0x77, 0x88, None), 0), ((1, 1, 1), 0), ((0, 0, 0), 0), (([5], "6", 1 << 64), 0))
    for streams, expected in cases:
        g.execute(named(*streams), None)
        g.bind(named(*streams))()
        assert [x[5] for x in launches(fake)[-2:]] == [expected, expected], streams
    graphdnn.set_stream(handle, 0x99)
    g.execute(named(0x77, 0x77, 0x77), None, handle=handle)
    assert launches(fake)[-1][5] == 0x99


def test_other_shapes_on_a_described_device_say_that_it_is_described() -> None:
    """Not that there is no driver, which this machine may have."""
    n = graphdnn.Dim("n", 1, 64)
    for dim, more in ((n, {"dims": {"n": 5}}), (4, {"override_uids": [1, 2], "override_shapes": [[5, 8]] * 2, "override_strides": [[8, 1]] * 2})):
        g = graphdnn.pygraph(device="sm_90", io_data_type="float32", compute_data_type="float32", is_override_shape_enabled=dim == 4)
        g.relu(g.tensor(dim=[dim, 8], layout="row", uid=1)).set_output(True).set_uid(2)
        g.build([graphdnn.heur_mode.A])
        with pytest.raises(ExecutionError, match="built for a described device"):
            g.execute({1: 1 << 20, 2: 2 << 20}, None, **more)
