from __future__ import annotations

import ctypes
import dataclasses
import json
import subprocess
import sys

import pytest

from graphdnn import _libcuda, device, errors
from tests.fake_driver import install
from tests.unit.fake_cuda import CONTEXT, FakeCuda

NO_DRIVER = not _libcuda.installed()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch, FakeCuda({}, devices=2))


def all_devices() -> list[device.DeviceProps]:
    return [device.cpu(), device.cudasim(), *(device.describe(a) for a in device.known_archs())]


def test_json_round_trip_and_hash() -> None:
    for props in all_devices():
        again = device.DeviceProps.from_json(props.to_json())
        assert again == props and hash(again) == hash(props)
        assert device.parse(props.text) == props


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"])
def test_described_figures_are_sane(arch: str) -> None:
    props = device.describe(arch)
    assert props.arch == arch and props.described and props.text == arch and props.kind == "cuda"
    assert 48 << 10 < props.shared_per_block_optin < props.shared_per_sm < 1 << 20
    assert 50 < props.sm_count < 200 and 500 < props.dram_gbps < 8000 and 10 < props.rate("FLOAT") < 100
    assert props.rate("BFLOAT16") >= props.rate("TF32") > props.rate("FLOAT") * 0.9
    assert props.rate("BOOLEAN") == props.rate("FLOAT")


def test_h200_figures_match_measurement() -> None:
    props = device.describe("sm_90")
    assert props.arch == "sm_90a" and props.capability == (9, 0)
    assert props.rate("BFLOAT16") == pytest.approx(790, rel=0.02) and props.rate("TF32") == pytest.approx(395, rel=0.02)
    assert props.dram_gbps == pytest.approx(4300, rel=0.01) and props.shared_per_block_optin == 232448


def test_unknown_arch_lists_known() -> None:
    with pytest.raises(errors.ValidationError, match=r"sm_80, sm_86.*'sm_42'"):
        device.describe("sm_42")
    with pytest.raises(errors.ValidationError, match="not a CUDA architecture"):
        device.split_arch("hopper")
    assert device.split_arch("sm_120") == (12, 0, "")


@pytest.mark.parametrize("text", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "sm_", "sm_90:0"])
def test_parse_refuses(text: str) -> None:
    with pytest.raises(errors.ValidationError):
        device.parse(text)


def test_parse_simulator_of_an_arch() -> None:
    assert device.parse("cudasim:sm_80").arch == "sm_80" and device.parse("CUDASIM") == device.cudasim()


def test_cpu_is_stable() -> None:
    assert device._cores() == device.cpu().cores >= 1
    device.cpu.cache_clear()
    first = device.cpu()
    device.cpu.cache_clear()
    assert device.cpu() == first


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "tpu"},
        {"arch": 3},
        {"arch": "x"},
        {"sm_count": "4"},
        {"sm_count": True},
        {"flops": {}},
        {"flops": {"FLOAT": "x"}},
        {"dram_gbps": float("nan")},
        {"more": 1},
    ],
)
def test_damaged_json_is_a_typed_error(change: dict[str, object]) -> None:
    values = json.loads(device.describe("sm_80").to_json()) | change
    with pytest.raises(errors.SerializationError, match="device properties"):
        device.DeviceProps.from_json(json.dumps(values))


@pytest.mark.parametrize("text", ["", "null", "[]", "{", '{"kind": "cpu"}', None])
def test_foreign_json_is_a_typed_error(text: str) -> None:
    with pytest.raises(errors.SerializationError):
        device.DeviceProps.from_json(text)


def test_default_follows_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHDNN_DEVICE", "sm_80")
    assert device.current_default() == device.describe("sm_80")
    monkeypatch.setenv("GRAPHDNN_DEVICE", "toaster")
    with pytest.raises(errors.ValidationError, match="GRAPHDNN_DEVICE"):
        device.current_default()


@pytest.mark.skipif(not NO_DRIVER, reason="this machine has an NVIDIA driver")
def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHDNN_DEVICE", raising=False)
    asked: list[str] = []
    real = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: asked.append(name) or real(name))
    assert device.current_default().kind == "cpu" and len(asked) == 1, "the library is looked for once"
    for ask in (lambda: device.cuda(0), lambda: device.parse("cuda"), lambda: device.parse("cuda:3")):
        with pytest.raises(errors.ExecutionError, match=r"no NVIDIA driver.*libcuda.*device='cpu'"):
            ask()


def test_reads_a_gpu_without_a_context(fake: FakeCuda) -> None:
    props = device.cuda(1)
    assert (props.name, props.arch, props.index, props.text) == ("Fake GPU", "sm_90a", 1, "cuda:1")
    assert dataclasses.replace(props, name="", index=0) == dataclasses.replace(device.describe("sm_90"), name="", index=0)
    assert not fake.log
    with pytest.raises(errors.ValidationError, match="0 to 1.*cuda:2"):
        device.cuda(2)


def test_gpu_newer_than_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_libcuda, "_driver", _libcuda.Driver(FakeCuda({}, capability=(10, 3))))
    assert device.cuda(0).arch == "sm_103" and device.cuda(0).rate("FP4_E2M1") > 1000


def test_gpu_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_libcuda, "_driver", _libcuda.Driver(FakeCuda({}, capability=(7, 5))))
    monkeypatch.delenv("GRAPHDNN_DEVICE", raising=False)
    with pytest.raises(errors.ExecutionError, match=r"too old.*8\.0.*7\.5"):
        device.cuda(0)
    assert device.current_default().kind == "cpu"


def test_default_is_the_current_gpu(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHDNN_DEVICE", raising=False)
    assert device.current_default().index == 0
    fake.stack.append(CONTEXT + 1)
    assert device.current_default().index == 1 and device.parse("cuda").index == 1


def test_forked_child_is_refused(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_libcuda, "forked", True)
    monkeypatch.delenv("GRAPHDNN_DEVICE", raising=False)
    for ask in (device.current_default, lambda: device.cuda(0), lambda: _libcuda.Driver(fake).call("cuCtxSynchronize")):
        with pytest.raises(errors.ExecutionError, match="forked.*spawn"):
            ask()


def test_no_gpu_behind_the_driver(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.fail["cuInit"] = 100
    monkeypatch.setattr(_libcuda, "_driver", None)
    monkeypatch.setattr(_libcuda.ctypes, "CDLL", lambda name: fake)
    with pytest.raises(errors.ExecutionError, match="CUDA_ERROR_NO_DEVICE.*CUDA_VISIBLE_DEVICES"):
        device.cuda(0)


def test_importing_is_light() -> None:
    code = (
        "import sys, graphdnn.device as d; d.cpu(); d.describe('sm_90'); d.current_default();"
        "print([m for m in ('numpy', 'numba', 'llvmlite', 'cuda', 'torch', 'jinja2', 'networkx', 'importlib.metadata') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
