"""Executors, threads and streams on a real GPU: bound calls are execute's bits on every stream, threads share a plan, stream objects."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

import graphdnn
from tests import hammer

pytestmark = pytest.mark.gpu


def built(device: str) -> Any:
    """y = relu((a + b) * s)."""
    g = graphdnn.pygraph(io_data_type="float32", compute_data_type="float32", device=device)
    a, b = (g.tensor(name=n, dim=[2, 65, 64], stride=[65 * 64, 64, 1], uid=u) for n, u in (("a", 1), ("b", 2)))
    s = g.tensor(name="s", dim=[1, 1, 1], stride=[1, 1, 1], is_pass_by_value=True, uid=3)
    g.relu(input=g.mul(a=g.add(a=a, b=b), b=s)).set_output(True).set_uid(4)
    g.build([graphdnn.heur_mode.A])
    return g


def pack(device: str, seed: int = 1) -> dict[int, Any]:
    """Random inputs and an output of NaN."""
    made = torch.Generator(device).manual_seed(seed)
    a, b = (torch.randn(2, 65, 64, device=device, generator=made) for _ in range(2))
    return {1: a, 2: b, 3: 0.5 + seed, 4: torch.full_like(a, float("nan"))}


def wanted(given: dict[int, Any]) -> Any:
    return ((given[1] + given[2]) * given[3]).relu()


def test_threads_with_an_executor_and_a_stream_each() -> None:
    g, wrong = built("cuda:0"), []

    def work(number: int) -> None:
        stream = torch.cuda.Stream()
        given = pack("cuda:0", number)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            run = g.bind(given)
            assert run.stream == stream.cuda_stream
            for _ in range(200):
                run()
            stream.synchronize()
        if not torch.equal(given[4], wanted(given)):
            wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_stream_objects_are_kept_alive() -> None:
    """What a driver does with a destroyed stream is its own affair: in half of the trials it ended the process (H200, 2026-11-30)."""
    from cuda.core import Device

    g, handle = built("cuda:0"), graphdnn.create_handle("cuda:0")
    there = Device(0)
    there.set_current()
    graphdnn.set_stream(handle, there.create_stream())
    given = pack("cuda:0")
    run = g.plan.bind(given, None, there.create_stream())
    gc.collect()
    for call in (run, lambda: g.execute(given, None, handle), lambda: run(there.create_stream())):
        given[4].fill_(float("nan"))
        torch.cuda.synchronize()
        call()
        torch.cuda.synchronize()
        assert torch.equal(given[4], wanted(given))


@pytest.mark.parametrize(("kind", "calls"), [("pointwise", 10_000), ("matmul", 10_000), ("total", 2_500), ("convolution", 2_500)])
def test_eight_threads_execute_one_plan(kind: str, calls: int) -> None:
    """Each on a stream of its own, with inputs that change and a workspace of its own; every result of every call is compared, bit for bit."""
    g = hammer.built(kind, "cuda:0")
    if kind == "matmul" and g.plan.device.arch == "sm_90a":
        assert "eng3" in g.plan.name, "the plan has TMA descriptors"
    assert kind not in ("matmul", "total") or g.get_workspace_size() > 0
    assert not hammer.hammer(g, kind, ["cuda:0"] * 8, calls)
