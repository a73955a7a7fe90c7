"""Loading and launching against a driver written in Python: what a kernel would be given, contexts, errors, threads, forks."""

from __future__ import annotations

import ctypes
import math
import os
import random
import threading
from dataclasses import replace

import pytest

from graphdnn import _libcuda, errors
from graphdnn.codegen.spec import (
    Binary,
    Buffer,
    Constant,
    KernelSpec,
    Launch,
    Limits,
    Listing,
    Memset,
    PointerParam,
    Recipe,
    ScalarParam,
    TensorScalar,
)
from graphdnn.dtypes import data_type
from graphdnn.errors import ExecutionError
from graphdnn.targets.cuda import CudaTarget
from tests.fake_driver import install
from tests.unit.fake_cuda import CONTEXT, FakeCuda

U64 = ctypes.c_uint64
SPEC = KernelSpec(
    "cuda/any.j2",
    "k_any",
    (PointerParam("x", "float32"), PointerParam("y", "float32"), ScalarParam("s", "float32"), ScalarParam("n", "int64"), ScalarParam("d", "float64")),
    block=128,
)
PLAIN = KernelSpec("cuda/any.j2", "k_plain", (PointerParam("x", "uint8"), PointerParam("w", "uint8")), block=256, shared_bytes=100_000)
PARAMETERS = {"k_any": [U64, U64, ctypes.c_float, ctypes.c_int64, ctypes.c_double], "k_plain": [U64, U64]}
RECIPE = Recipe(
    (SPEC, PLAIN),
    (
        Memset(Buffer("workspace", 0, 256), 8, 255),
        Launch(0, 5, (Buffer("tensor", 3), Buffer("tensor", 4, 64), TensorScalar(7, "float32"), Constant(-9, "int64"), Constant(-0.0, "float64"))),
        Launch(1, 0, (Buffer("tensor", 3), Buffer("workspace", 0))),
        Launch(1, 6, (Buffer("tensor", 3), Buffer("workspace", 0, 256))),
    ),
    workspace=264,
)
BINARIES = (Binary("k_any", b"cubin 0"), Binary("k_plain", b"cubin 1", {"static_shared_bytes": 1000}))
ADDRESSES, SCALARS = {3: 0x30000, 4: 0x40000}, {7: 1.5}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch, FakeCuda(PARAMETERS))


def launches(fake: FakeCuda) -> list[tuple]:
    return [entry for entry in fake.log if entry[0] in ("launch", "memset")]


def test_a_run_gives_kernels_what_the_recipe_says(fake: FakeCuda) -> None:
    executable = CudaTarget("sm_90a").load(RECIPE, BINARIES)
    assert ("attribute", 8, 99_000) in fake.log, "shared memory beyond the static part is asked for"
    fake.log.clear()
    executable.run(ADDRESSES, SCALARS, 0x50000, 0x77)
    memset, first, second = launches(fake)
    assert memset == ("memset", 0x50100, 255, 8, 0x77)
    assert first[1:6] == ("k_any", (5, 1, 1), (128, 1, 1), 0, 0x77)
    assert first[6] == [0x30000, 0x40040, 1.5, -9, 0.0] and math.copysign(1, first[6][4]) == -1
    assert second[1:6] == ("k_plain", (6, 1, 1), (256, 1, 1), 99_000, 0x77) and second[6] == [0x30000, 0x50100]


def test_values_are_checked_where_the_switch_asks(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (ctypes.c_int32 * 3)(4, 9, 0)
    limits = Limits(Listing(Buffer("tensor", 5), data_type.INT32, 3, 1, "lengths"), 1, 0, 0, 8, "a length is out of range")
    recipe, addresses = replace(RECIPE, steps=(limits, *RECIPE.steps)), ADDRESSES | {5: ctypes.addressof(lengths)}
    CudaTarget("sm_90a").load(recipe, BINARIES).run(addresses, SCALARS, 0x50000, 0x77)
    assert launches(fake) and not [entry for entry in fake.log if entry[0] == "synchronize"]
    monkeypatch.setenv("GRAPHDNN_CHECK_VALUES", "1")
    executable = CudaTarget("sm_90a").load(recipe, BINARIES)
    fake.log.clear()
    with pytest.raises(ExecutionError, match=r"lengths.*found 9"):
        executable.run(addresses, SCALARS, 0x50000, 0x77)
    assert ("synchronize", 0x77) in fake.log and not launches(fake) and not fake.stack
    lengths[1] = 8
    executable.run(addresses, SCALARS, 0x50000, 0x77)
    assert launches(fake)


def test_numbers_that_a_kernel_writes_are_checked_behind_it(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the workspace, after the steps in front of the check and before those behind it."""
    lengths = (ctypes.c_int32 * 3)(4, 9, 0)
    limits = Limits(Listing(Buffer("workspace", 0, 8), data_type.INT32, 3, 1, "lengths"), 1, 0, 0, 8, "a length is out of range")
    monkeypatch.setenv("GRAPHDNN_CHECK_VALUES", "1")
    executable = CudaTarget("sm_90a").load(replace(RECIPE, steps=(*RECIPE.steps[:-1], limits, RECIPE.steps[-1])), BINARIES)
    fake.log.clear()
    with pytest.raises(ExecutionError, match=r"lengths.*found 9"):
        executable.run(ADDRESSES, SCALARS, ctypes.addressof(lengths) - 8, 0x77)
    assert len(launches(fake)) == 2 and not fake.stack


def test_every_call_has_its_own_values(fake: FakeCuda) -> None:
    executable = CudaTarget("sm_90a").load(RECIPE, BINARIES)
    for call in range(3):
        fake.log.clear()
        executable.run({3: call, 4: 10 * call}, {7: call}, 100 * call, call)
        memset, first, _ = launches(fake)
        assert memset[1] == 100 * call + 256 and memset[4] == call
        assert first[5] == call and first[6][:3] == [call, 10 * call + 64, call]


def test_context_is_made_current_only_when_it_is_not(fake: FakeCuda) -> None:
    executable = CudaTarget("sm_90a").load(RECIPE, BINARIES)
    assert not fake.stack
    fake.log.clear()
    executable.run(ADDRESSES, SCALARS, 0, 0)
    assert fake.log[0] == ("push", CONTEXT) and fake.log[-1] == ("pop",) and not fake.stack
    fake.stack.append(CONTEXT)
    fake.log.clear()
    executable.run(ADDRESSES, SCALARS, 0, 0)
    assert all(entry[0] in ("launch", "memset") for entry in fake.log)
    fake.stack[:] = [CONTEXT + 1]
    executable.run(ADDRESSES, SCALARS, 0, 0)
    assert fake.stack == [CONTEXT + 1]


def test_context_is_given_back_after_a_failure(fake: FakeCuda) -> None:
    executable = CudaTarget("sm_90a").load(RECIPE, BINARIES)
    fake.fail["cuLaunchKernelEx"] = 1
    with pytest.raises(errors.ExecutionError, match=r"step 1 of the plan, kernel 'k_any' \(grid 5\).*cuda:0.*CUDA_ERROR_INVALID_VALUE \(1\)"):
        executable.run(ADDRESSES, SCALARS, 0, 0)
    assert not fake.stack
    fake.fail.clear()
    executable.run(ADDRESSES, SCALARS, 0, 0)


def test_sticky_and_unknown_errors(fake: FakeCuda) -> None:
    executable = CudaTarget("sm_90a").load(RECIPE, BINARIES)
    fake.fail["cuMemsetD8Async"] = 700
    with pytest.raises(errors.ExecutionError, match="a memset.*ILLEGAL_ADDRESS.*earlier kernel.*restart it.*compute-sanitizer"):
        executable.run(ADDRESSES, SCALARS, 0, 0)
    fake.fail["cuMemsetD8Async"] = 4242
    with pytest.raises(errors.ExecutionError, match="unknown error"):
        executable.run(ADDRESSES, SCALARS, 0, 0)


def test_equal_kernels_share_a_module_that_stays(fake: FakeCuda) -> None:
    for _ in range(3):
        CudaTarget("sm_90a").load(RECIPE, BINARIES)
    assert [entry[1] for entry in fake.log if entry[0] == "load"] == [b"cubin 0", b"cubin 1"]
    assert [entry for entry in fake.log if entry[0] == "attribute"] == [("attribute", 8, 99_000)]


@pytest.mark.parametrize(
    ("pointers", "scalars", "workspace", "message"),
    [
        ({3: 1}, {7: 1.0}, 0, "tensor 4 has no address"),
        ({4: 1}, {7: 1.0}, 0, "tensor 3 has no address"),
        ({3: 1, 4: 2}, {}, 0, "tensor 7 has no by-value scalar"),
        ({3: 1.5, 4: 2}, {7: 1.0}, 0, "not an int"),
        ({3: 1, 4: "2"}, {7: 1.0}, 0, "not an int"),
        ({3: 1, 4: 2}, {7: 1.0}, None, "not an int.*workspace None"),
        ({3: 1, 4: 2}, {7: "x"}, 0, "tensor '7': a by-value scalar does not fit its type"),
    ],
)
def test_bad_arguments(fake: FakeCuda, pointers: dict, scalars: dict, workspace: int, message: str) -> None:
    executable = CudaTarget("sm_90a").load(RECIPE, BINARIES)
    with pytest.raises(errors.ExecutionError, match=message):
        executable.run(pointers, scalars, workspace, 0)
    fake.log.clear()
    executable.run(ADDRESSES, SCALARS, 0, 0)
    assert len(launches(fake)) == 3


def test_scalars_are_converted_as_in_a_cast(fake: FakeCuda) -> None:
    executable = CudaTarget("sm_90a").load(RECIPE, BINARIES)
    for given, seen in ((1e39, math.inf), (-1e39, -math.inf), (3, 3.0), (0.1, ctypes.c_float(0.1).value)):
        fake.log.clear()
        executable.run(ADDRESSES, {7: given}, 0, 0)
        assert launches(fake)[1][6][2] == seen


def test_integer_scalars_in_range(fake: FakeCuda) -> None:
    spec = KernelSpec("t", "k_int", (ScalarParam("a", "int32"), ScalarParam("b", "uint32")), block=32)
    fake.parameters["k_int"] = [ctypes.c_int32, ctypes.c_uint32]
    recipe = Recipe((spec,), (Launch(0, 1, (TensorScalar(1, "int32"), TensorScalar(1, "uint32"))),))
    executable = CudaTarget("sm_90a").load(recipe, (Binary("k_int", b"i"),))
    executable.run({}, {1: 5}, 0, 0)
    executable.run({}, {1: 6.0}, 0, 0)
    assert [entry[6] for entry in launches(fake)] == [[5, 5], [6, 6]]
    with pytest.raises(errors.ExecutionError, match="does not fit.*uint32.*-1"):
        executable.run({}, {1: -1}, 0, 0)


def test_threads_do_not_mix_their_values(fake: FakeCuda) -> None:
    executable = CudaTarget("sm_90a").load(RECIPE, BINARIES)
    wrong: list[object] = []
    seen: dict[int, list] = {}
    launch = fake.cuLaunchKernelEx

    def slow(*args: object) -> None:
        # Another thread runs in the middle of a call.
        threading.Event().wait(random.random() * 1e-4)
        launch(*args)

    fake.cuLaunchKernelEx = slow  # type: ignore[method-assign]

    def work(number: int) -> None:
        for call in range(50):
            base = number * 1000 + call
            executable.run({3: base, 4: base + 1}, {7: float(base)}, base, number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for entry in launches(fake):
        if entry[0] == "launch" and entry[1] == "k_any":
            base = entry[6][0]
            seen.setdefault(entry[5], []).append(base)
            if entry[6] != [base, base + 65, float(base), -9, 0.0] or base // 1000 != entry[5]:
                wrong.append(entry)
    assert not wrong
    assert all(seen[n] == [n * 1000 + call for call in range(50)] for n in range(8))


def test_wrong_architecture(fake: FakeCuda) -> None:
    for arch, has in (("sm_80", "9.0"), ("sm_100", "9.0")):
        with pytest.raises(errors.ExecutionError, match=f"another GPU architecture.*{arch}.*{has}.*sm_90"):
            CudaTarget(arch).load(RECIPE, BINARIES)
    fake.capability = (8, 9)
    CudaTarget("sm_80").load(RECIPE, BINARIES)
    with pytest.raises(errors.ExecutionError):
        CudaTarget("sm_90a").load(RECIPE, BINARIES)


def test_damaged_code_and_missing_entry(fake: FakeCuda) -> None:
    fake.fail["cuModuleLoadData"] = 200
    with pytest.raises(errors.ExecutionError, match="loading kernel 'k_any'.*INVALID_IMAGE.*rebuild"):
        CudaTarget("sm_90a").load(RECIPE, BINARIES)
    fake.fail.clear()
    with pytest.raises(errors.ExecutionError, match="looking up kernel 'other'"):
        CudaTarget("sm_90a").load(RECIPE, (Binary("other", b"x"), BINARIES[1]))


@pytest.mark.parametrize(
    "step",
    [
        Launch(9, 1, ()),
        Launch(1, 2**31, (Buffer("tensor", 3), Buffer("workspace", 0))),
        Launch(1, -1, (Buffer("tensor", 3), Buffer("workspace", 0))),
        Launch(1, 1, (Buffer("tensor", 3),)),
        Launch(1, 1, (Buffer("tensor", 3), Constant(1, "int32"))),
    ],
)
def test_a_recipe_that_cannot_be_launched(fake: FakeCuda, step: Launch) -> None:
    with pytest.raises(errors.ExecutionError, match="step 0 of the plan"):
        CudaTarget("sm_90a").load(Recipe((SPEC, PLAIN), (step,)), BINARIES)


def test_a_driver_without_a_function(fake: FakeCuda) -> None:
    with pytest.raises(errors.ExecutionError, match="no function cuFuture.*13.0.*update"):
        _libcuda.driver().new_function("cuFuture")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_after_a_fork_a_run_is_refused(fake: FakeCuda) -> None:
    executable = CudaTarget("sm_90a").load(RECIPE, BINARIES)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            executable.run(ADDRESSES, SCALARS, 0, 0)
            os.write(write, b"no error")
        except errors.ExecutionError as exc:
            os.write(write, str(exc).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"forked" in os.read(read, 10_000)
    executable.run(ADDRESSES, SCALARS, 0, 0)


@pytest.mark.skipif(_libcuda.installed(), reason="this machine has an NVIDIA driver")
def test_load_without_a_driver() -> None:
    with pytest.raises(errors.ExecutionError, match="no NVIDIA driver"):
        CudaTarget("sm_90a").load(RECIPE, BINARIES)


def test_a_parameter_of_an_unknown_type(fake: FakeCuda) -> None:
    spec = KernelSpec("t", "k_half", (ScalarParam("a", "float16"),), block=32)
    with pytest.raises(errors.ExecutionError, match="kernel 'k_half'.*float32, float64.*float16"):
        CudaTarget("sm_90a").load(Recipe((spec,), (Launch(0, 1, (Constant(1.0, "float16"),)),)), (Binary("k_half", b"h"),))
