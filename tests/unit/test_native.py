"""The compiled part of execute: what it recognizes it launches with the right values, all else it leaves to Python. The driver is in Python."""

from __future__ import annotations

import ctypes
import gc
import os
import struct
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import graphdnn
from graphdnn import _libcuda, frontend
from graphdnn.errors import ExecutionError, ValidationError
from graphdnn.targets import native
from tests.fake_driver import install
from tests.unit.fake_cuda import CONTEXT, FakeCuda, parameters_of
from tests.unit.test_executor import scaled_sum

ROOT = Path(__file__).resolve().parents[2]
BASE = 1 << 20
DIM = (2, 3, 4)


pytestmark = pytest.mark.skipif(not native.built(), reason="graphdnn/native is not compiled: no C compiler at installation")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch, FakeCuda({}))


@pytest.fixture
def graph(fake: FakeCuda) -> Any:
    """y = (a + b) * s on a GPU that is not there."""
    fake.parameters.update(parameters_of(scaled_sum("sm_90").plan))
    fake.stack.append(CONTEXT)
    return scaled_sum("cuda:0")


def addresses() -> dict[Any, Any]:
    return {1: BASE, 2: 2 * BASE, 3: 0.5, 4: 3 * BASE}


class Slow(Exception):
    """Python was asked."""


@pytest.fixture
def known(graph: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The graph, which has learned the pack of ``addresses``; Python may not bind any more."""
    graph.execute(addresses(), None)
    assert graph.plan.known.run(addresses(), None, None)

    def refuse(*args: Any) -> None:
        raise Slow

    monkeypatch.setattr(type(graph.plan), "execute", refuse)
    return graph


def launched(fake: FakeCuda) -> list[Any]:
    """Values of the last launch, sorted: three addresses and the number among them."""
    return sorted(fake.log[-1][6])


def test_other_addresses_and_numbers_of_a_known_pack_are_launched(known: Any, fake: FakeCuda) -> None:
    for k in range(1, 5):
        pack = {1: k * BASE, 2: (k + 10) * BASE, 3: 0.25 * k, 4: (k + 20) * BASE}
        known.execute(pack, None)
        assert launched(fake) == sorted([k * BASE, (k + 10) * BASE, 0.25 * k, (k + 20) * BASE])
    for value in (0.1, 1e300, float("-inf")):
        known.execute(addresses() | {3: value}, None)
        single = ctypes.c_float(value).value
        assert single in launched(fake)
    known.execute(addresses() | {3: float("nan")}, None)
    assert any(v != v for v in fake.log[-1][6])


def test_what_python_has_to_look_at(known: Any) -> None:
    tensors = {t.get_name(): t for t in known.tensors()} if hasattr(known, "tensors") else {}
    pack = addresses()
    others: list[Any] = [
        {k: v for k, v in pack.items() if k != 2},
        dict(reversed(pack.items())),
        pack | {5: None},
        {(str(k) if k == 1 else k): v for k, v in pack.items()},
        pack | {1: BASE + 1},  # not aligned
        pack | {1: 0},
        pack | {1: -BASE},
        pack | {1: 1 << 64},
        pack | {1: True},
        pack | {1: None},
        pack | {1: torch.zeros(DIM)},
        pack | {4: BASE + 512},  # overlaps
        pack | {3: 1},
        pack | {3: None},
        pack | {3: True},
        pack | {3: np.float32(0.5)},
        pack | {3: torch.tensor(0.5)},
        list(pack.items()),
        None,
        *({tensors["a"]: BASE, **{k: v for k, v in pack.items() if k != 1}} for _ in tensors if "a" in tensors),
    ]
    for other in others:
        with pytest.raises(Slow):
            known.execute(other, None)
    known.execute(pack | {4: BASE}, None)  # in place, which this graph may run
    known.execute(pack, None)
    for handle in (graphdnn.create_handle("cuda:0"), 17):
        with pytest.raises((Slow, ExecutionError)):
            known.execute(pack, None, handle)


def test_the_stream_of_the_handle(graph: Any, fake: FakeCuda) -> None:
    handle = graphdnn.create_handle("cuda:0")
    for stream in (None, 0x77, 0x88, 0):
        if stream is not None:
            graphdnn.set_stream(handle, stream)
        graph.execute(addresses(), None, handle)
        assert fake.log[-1][5] == (stream or 0)
        assert graph.plan.known.run(addresses(), None, handle)
    graphdnn.destroy_handle(handle)
    assert not graph.plan.known.run(addresses(), None, handle)
    with pytest.raises(ExecutionError, match="not a live handle"):
        graph.execute(addresses(), None, handle)


def test_a_thread_without_a_context_gets_it_for_the_call(known: Any, fake: FakeCuda) -> None:
    seen: list[list[str]] = []

    def work() -> None:
        fake.calls.clear()
        known.execute(addresses(), None)
        seen.append(list(fake.calls))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [["cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuLaunchKernelEx", "cuCtxPopCurrent_v2"]]


@pytest.mark.parametrize(("function", "message"), [("cuLaunchKernelEx", "step 0"), ("cuCtxGetCurrent", "context of cuda:0")])
def test_what_the_driver_refuses_is_raised(known: Any, fake: FakeCuda, function: str, message: str) -> None:
    fake.fail[function] = 700
    run = known.plan.known.run
    with pytest.raises(ExecutionError, match=f"{message}.*\n*.*ILLEGAL_ADDRESS"):
        run(addresses(), None, None)
    fake.fail.clear()
    assert run(addresses(), None, None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork_it_is_refused(known: Any) -> None:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            known.execute(addresses(), None)
            os.write(write, b"ran")
        except ExecutionError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"forked" in os.read(read, 10_000)


def test_more_calls_at_once_than_it_has_values_for(graph: Any, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call inside a call finds the values in use, is run by Python, and brings values of its own for the next time."""
    graph.execute(addresses(), None)
    inner: list[bool] = []

    class Nested(dict[str, int]):
        """Asked for the function's result when the driver is called."""

        def __contains__(self, name: object) -> bool:
            if name == "cuLaunchKernelEx" and len(inner) < 2:
                inner.append(graph.plan.known.run(addresses() | {1: 7 * BASE}, None, None))
                if len(inner) == 1:
                    graph.execute(addresses() | {1: 8 * BASE}, None)
            return False

    fake.fail = Nested()
    graph.execute(addresses(), None)
    assert inner == [False, False]
    assert launched(fake) == sorted([BASE, 2 * BASE, 0.5, 3 * BASE]), "the outer call has its own values"
    assert sum(8 * BASE in entry[6] for entry in fake.log if entry[0] == "launch") == 1
    inner.clear()
    graph.execute(addresses(), None)
    assert True in inner, "the inner call was compiled too"


class Name(str):
    """A key that leads back to the plan."""

    back: Any


def test_a_graph_is_collected_with_the_packs_that_it_knows(graph: Any) -> None:
    made, name, handle = scaled_sum("cuda:0"), Name("other"), graphdnn.create_handle("cuda:0")
    graphdnn.set_stream(handle, 0x77)
    name.back = made
    made.execute({name: 5, **addresses()}, None, handle)
    assert made.plan.known.run({name: 5, **addresses()}, None, handle)
    alive = weakref.ref(made.plan)
    del made, name
    gc.collect()
    assert alive() is None


class Stream:
    """What a handle keeps alive."""

    cuda_stream = 0x77
    back: Any


def test_a_graph_is_collected_with_the_handle_that_it_knows(graph: Any) -> None:
    made, handle, stream = scaled_sum("cuda:0"), graphdnn.create_handle("cuda:0"), Stream()
    graphdnn.set_stream(handle, stream)
    stream.back = made
    made.execute(addresses(), None, handle)
    assert made.plan.known.run(addresses(), None, handle)
    alive = weakref.ref(made.plan)
    frontend.handle._live.pop(int(handle))  # as if it were nobody's
    del made, handle, stream
    gc.collect()
    assert alive() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_of_a_process_that_did_not_start_cuda_may_do_so() -> None:
    script = """
import ctypes, os, sys
import graphdnn._native as native
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
from graphdnn import _libcuda, frontend
from graphdnn.targets.native import _FUNCTIONS
from tests.unit.fake_cuda import CONTEXT, FakeCuda
fake = FakeCuda({})
fake.stack.append(CONTEXT)
driver = _libcuda.Driver(fake)
native.connect(*map(driver.address, _FUNCTIONS))
target = ctypes.c_uint64(0x1000)
native.Launches([target], print, CONTEXT, 0, ((0, ctypes.addressof(target), 7, 16),), ()).launch(0)
assert fake.log == [("memset", 0x1000, 7, 16, 0)], fake.log
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


# ---------------------------------------------------------------------------------------------------- compiled code alone, with tensors of a CPU
class Alone:
    """A Call of two tensors (alignment 16), a workspace (alignment 256) and four numbers; its launches keep their values where a test sees them."""

    def __init__(self, pairs: tuple[Any, ...] = ()) -> None:
        import graphdnn._native as module

        self.fake = FakeCuda({})
        self.fake.stack.append(CONTEXT)
        self.driver = _libcuda.Driver(self.fake)  # which keeps the functions
        module.connect(*map(self.driver.address, native._FUNCTIONS))
        self.values = ctypes.create_string_buffer(8 * 8)
        self.target = ctypes.c_uint64(0)
        sources = ((0, 0), (1, 8), (-1, 256))
        formats = ((0, 3, "f"), (1, 4, "d"), (2, 5, "q"), (3, 6, "0"))
        self.call = module.Call(0, True, (15, 15, 255), sources, 4, formats, pairs)
        step = (0, ctypes.addressof(self.target), 7, 16)
        self.call.add(module.Launches([self.values, self.target], self.fail, CONTEXT, ctypes.addressof(self.values), (step,), ()))

    def fail(self, *what: Any) -> None:
        raise ExecutionError(str(what))

    def learn(self, pack: dict[Any, Any], workspace: Any) -> bool:
        tensors = (pack["a"], pack["b"])
        numbers = tuple(pack.get(k) for k in "fdqx")
        kept = struct.pack("<f4xdqd", *numbers)
        order = {"a": 0, "b": 1, "f": 2, "d": 3, "q": 4, "x": 5}
        at = tuple(order.get(k, -1) for k in pack)
        pointers = tuple(t if type(t) is int else t.data_ptr() for t in tensors)
        return self.call.learn(tuple(pack), at, tensors, pointers, workspace, None, numbers, kept)

    def seen(self) -> tuple[Any, ...]:
        return struct.unpack("<QQQf4xdqd", self.values.raw[:56])


def space() -> Any:
    memory = torch.zeros(1024, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 256 :][:512]


def some(**change: Any) -> dict[Any, Any]:
    return {"a": torch.zeros(DIM), "b": torch.zeros(DIM).transpose(0, 1), "f": 0.5, "d": 0.25, "q": 3, "x": 1.5, "ignored": object()} | change


def test_tensors_are_recognized_by_all_that_matters() -> None:
    alone, work = Alone(), space()
    pack = some()
    assert alone.learn(pack, work)
    for given in (pack, some(), some(f=0.1, d=0.1, q=-(1 << 40))):
        assert alone.call.run(given, work, None) is True
        f = ctypes.c_float(given["f"]).value
        wanted = (given["a"].data_ptr(), given["b"].data_ptr() + 8, work.data_ptr() + 256, f, given["d"], given["q"], 1.5)
        assert alone.seen() == wanted
    assert alone.fake.log[-1][:3] == ("memset", 0, 7)
    parameter = torch.nn.Parameter(torch.zeros(DIM))
    strange = [
        some(a=torch.zeros(DIM, dtype=torch.int32)),
        some(a=torch.zeros(DIM, dtype=torch.bfloat16)),
        some(a=torch.zeros(2, 4, 3)),
        some(a=torch.zeros(1, 2, 3, 4)),
        some(a=torch.zeros(DIM).transpose(0, 1).contiguous().transpose(0, 1)),
        some(b=torch.zeros(3, 2, 4)),
        some(a=torch.zeros(DIM, device="meta")),
        some(a=torch.zeros(25)[1:].view(DIM)),  # not aligned
        some(a=torch.zeros(DIM).to_sparse()),
        some(a=torch.zeros(DIM, dtype=torch.complex64).conj().real),
        some(a=np.zeros(DIM, np.float32)),
        some(a=parameter),
        some(a=torch.zeros(DIM).data_ptr()),
        some(x=1.25),
        some(q=1 << 63),
        some(q=3.0),
        some(f=1),
        some(f=np.float64(0.5)),
    ]
    for given in strange:
        assert alone.call.run(given, work, None) is False, given
    for other in (None, work[:256], work[16:], torch.zeros(512), 0):
        assert alone.call.run(pack, other, None) is False
    assert alone.call.run(pack, work, 5) is False
    assert alone.call.run(pack, work, None) is True


def test_a_tensor_that_was_changed_in_place_is_read_again() -> None:
    alone, work, pack = Alone(), space(), some()
    assert alone.learn(pack, work)
    pack["a"].data = torch.zeros(3, 4, 2)
    assert alone.call.run(pack, work, None) is False
    pack["a"].data = torch.zeros(DIM, dtype=torch.int32)
    assert alone.call.run(pack, work, None) is False
    pack["a"].data = moved = torch.ones(DIM)
    assert alone.call.run(pack, work, None) is True and alone.seen()[0] == moved.data_ptr()
    number = some(f=torch.tensor(0.5))
    assert alone.learn({**number, "f": 0.5}, work) and alone.call.run(number, work, None) is False


def test_overlap_is_left_to_python() -> None:
    alone, work, memory = Alone(pairs=((0, 1, 96, 96, 0, False),)), space(), torch.zeros(100)
    pack = some(b=torch.zeros(DIM))
    assert alone.learn(pack, work)
    assert alone.call.run(pack | {"a": memory[:24].view(DIM), "b": memory[16:40].view(DIM)}, work, None) is False
    assert alone.call.run(pack | {"a": memory[:24].view(DIM), "b": memory[24:48].view(DIM)}, work, None) is True


def test_views_that_torch_negates_are_left_to_python() -> None:
    """As the imaginary part of conjugates: the memory holds the opposite."""
    alone, work, z = Alone(), space(), torch.zeros(DIM, dtype=torch.complex64)
    assert alone.learn(some(b=z.real), work)
    for b, fine in ((z.real, True), (torch._neg_view(z.real), False), (z.conj().real, True)):
        assert b.is_neg() is not fine
        assert alone.call.run(some(b=b), work, None) is fine
    assert not alone.learn(some(b=torch._neg_view(z.real)), work)


class Meddling(torch.Tensor):
    """Runs Python code when it is asked what it is."""

    meddle: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.is_neg and cls.meddle is not None:
            meddle, cls.meddle = cls.meddle, None
            meddle()
        return super().__torch_function__(func, types, args, kwargs or {})


def test_python_code_in_the_middle_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it does to the pack, to what is known, or calls: no harm, and the call's own values or none."""
    alone, work, other = Alone(), space(), some(a=torch.ones(DIM))
    pack: dict[Any, Any] = {}

    def fresh() -> dict[Any, Any]:
        pack.clear()
        strided = torch.zeros(*DIM, 2)[..., 0].as_subclass(Meddling)
        pack.update({"f": 0.1 + len(pack), "d": 0.25, "q": 1 << 40, "x": 1.5, "b": strided, "a": torch.zeros(DIM)})
        return pack

    assert alone.learn(fresh(), work)
    seen: list[Any] = []
    deeds = {
        "nothing": lambda: None,
        "a call inside": lambda: seen.append(alone.call.run(fresh(), work, None)),
        "other packs learned": lambda: seen.append(alone.learn(other, work)),
        "emptied": pack.clear,
        "grown": lambda: pack.update({i: torch.zeros(1) for i in range(500)}),
        "numbers gone": lambda: pack.update({"f": None, "d": None, "q": None, "x": None}),
        "collected": gc.collect,
    }
    for name, deed in deeds.items():
        monkeypatch.setattr(Meddling, "meddle", deed)
        alone.call.run(fresh(), work, None)
        assert Meddling.meddle is None, f"{name}: it was asked"
        fresh()
        assert alone.call.run(pack, work, None) is True, f"{name}: and knows the pack as before"
        assert alone.seen()[0] == pack["a"].data_ptr()
    assert seen == [False, False]


def test_what_cannot_be_recognized_is_not_learned() -> None:
    alone, work = Alone(), space()
    for value in (np.zeros(DIM, np.float32), torch.zeros([1] * 17)):
        tensors = (value, torch.zeros(DIM))
        at = value.ctypes.data if isinstance(value, np.ndarray) else value.data_ptr()
        kept = bytes(32)
        assert not alone.call.learn(("a", "b"), (0, 1), tensors, (at, tensors[1].data_ptr()), work, None, (None,) * 4, kept)
    assert alone.call.run(some(), work, None) is False
    too_many = dict.fromkeys(range(70))
    assert not alone.call.learn(tuple(too_many), (-1,) * 70, (torch.zeros(1),) * 2, (16, 16), work, None, (None,) * 4, bytes(32))
    with pytest.raises(TypeError):
        alone.call.run({})
    with pytest.raises(TypeError):
        alone.call.learn([], 1)


def test_python_runs_it_where_the_compiled_part_is_switched_off(graph: Any, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHDNN_NATIVE", "0")
    again = scaled_sum("cuda:0")
    assert again.plan.known is None
    for value in (0.5, 0.25):
        again.execute(addresses() | {3: value}, None)
        assert launched(fake) == sorted([BASE, 2 * BASE, value, 3 * BASE])
    with pytest.raises(ValidationError, match="overlaps"):
        again.execute(addresses() | {4: BASE + 512}, None)


def test_what_is_older_than_its_sources_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fault = native.where()
    assert path.endswith(".so") and not fault
    (tmp_path / "call.c").write_text("")
    os.utime(tmp_path / "call.c", (2e9, 2e9))
    monkeypatch.setattr(native, "SOURCES", tmp_path)
    assert native.where() == (path, native.STALE)
    monkeypatch.setattr(native, "_module", native._module.__wrapped__)
    assert not native.built()
    os.utime(tmp_path / "call.c", (1e9, 1e9))
    assert native.where() == (path, "") and native.built()
