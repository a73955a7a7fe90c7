"""Serialized plans: round trips, what a file says of itself, damage, forged content, other versions, toolchains and devices; the strict codec."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from graphdnn import device as devices
from graphdnn import targets
from graphdnn._version import __version__
from graphdnn.codegen.spec import Arg, Buffer, Constant, KernelSpec, Launch, Memset, PointerParam, Recipe, Step, TensorScalar
from graphdnn.dtypes import data_type
from graphdnn.errors import BuildError, ExecutionError, SerializationError
from graphdnn.ir.node import Node
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.ir.tensor import Tensor
from graphdnn.plans import candidates, codec, serialize

ROOT = Path(__file__).resolve().parents[2]
F32 = data_type.FLOAT
CPU = devices.cpu()
X = np.linspace(-2, 2, 24, dtype=np.float32)
EXPECTED = np.maximum(X * np.float32(0.5) + 1, 0)


def graph() -> OperationGraph:
    """relu(x * s + 1): a by-value scalar with a stored value and a constant."""
    tensors = (
        Tensor("x", 1, (24,), (1,), F32),
        Tensor("s", 2, (1,), (1,), F32, by_value=True, value=0.5),
        Tensor("one", 3, (1,), (1,), F32, by_value=True, constant=True, value=1.0),
        Tensor("h", 4, (24,), (1,), F32, virtual=True),
        Tensor("z", 5, (24,), (1,), F32, virtual=True),
        Tensor("y", 6, (24,), (1,), F32),
    )
    nodes = (
        Node("POINTWISE", "scale", (("IN_0", 0), ("IN_1", 1)), (("OUT_0", 3),), (("mode", "MUL"),), F32),
        Node("POINTWISE", "add", (("IN_0", 3), ("IN_1", 2)), (("OUT_0", 4),), (("mode", "ADD"),), F32),
        Node("POINTWISE", "relu", (("IN_0", 4),), (("OUT_0", 5),), (("mode", "RELU_FWD"), ("relu_upper_clip", float("inf"))), F32),
    )
    return OperationGraph(tensors, nodes, "stored")


@pytest.fixture(scope="module")
def plan():
    return candidates.create(graph(), CPU).plan_at(0).build()


@pytest.fixture(scope="module")
def data(plan) -> bytes:
    return serialize.dump(plan)


def run(p) -> np.ndarray:
    y = np.full(24, np.nan, np.float32)
    p.execute({1: X, "y": y}, np.empty(p.workspace_bytes, np.uint8))
    return y


def resealed(data: bytes, edit) -> bytes:
    """``data`` with its JSON edited and the checksum made right again."""
    (size,) = struct.unpack_from("<Q", data, 44)
    content = json.loads(data[52 : 52 + size])
    edit(content)
    text = json.dumps(content).encode()
    rest = struct.pack("<Q", len(text)) + text + data[52 + size :]
    return data[:12] + hashlib.sha256(rest).digest() + rest


# ------------------------------------------------------------------------------------------------------------------------------ round trips
def test_a_loaded_plan_runs_at_once(plan, data):
    twin = serialize.load(data)
    np.testing.assert_array_equal(run(twin), EXPECTED)
    assert twin.built and twin.name == plan.name and twin.graph == plan.graph and twin.partition == plan.partition
    assert codec.encode(twin.recipe) == codec.encode(plan.recipe) and twin.recipe.steps == plan.recipe.steps
    assert twin.choices == plan.choices and twin.source == plan.source and twin.workspace_bytes == plan.workspace_bytes
    assert [k.origin for k in twin.kernels] == ["file"] * len(plan.kernels)


def test_the_same_plan_has_the_same_bytes(plan, data):
    assert serialize.dump(plan) == data and serialize.dump(serialize.load(data)) == data


def test_only_a_built_plan_can_be_dumped():
    with pytest.raises(BuildError, match="not built"):
        serialize.dump(candidates.create(graph(), CPU).plan_at(0))


def test_loading_in_a_new_process_imports_no_compiler(data, tmp_path):
    (tmp_path / "plan").write_bytes(data)
    script = (
        "import sys, numpy as np\nfrom graphdnn.plans import serialize\n"
        "p = serialize.load(open(sys.argv[1], 'rb').read())\nx = np.linspace(-2, 2, 24, dtype=np.float32)\ny = np.empty(24, np.float32)\n"
        "p.execute({1: x, 6: y}, None)\nassert (y == np.maximum(x * np.float32(0.5) + 1, 0)).all()\n"
        "bad = {'numba', 'jinja2', 'networkx', 'torch', 'ml_dtypes', 'graphdnn.engines.pointwise'} & set(sys.modules)\nassert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "plan")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_cuda_plan_is_used_as_it_is(monkeypatch):
    device = devices.describe("sm_90")
    plan = candidates.create(graph(), device).plan_at(0).build()
    data = serialize.dump(plan)
    target = targets.get(device)
    monkeypatch.setattr(type(target), "compile", lambda *a: pytest.fail("compiled"))
    monkeypatch.setattr(type(target), "toolchain_key", lambda self: "no compiler here")
    twin = serialize.load(data, device)
    assert twin.kernels[0].binary == plan.kernels[0].binary and twin.ptx == plan.ptx
    with pytest.raises(ExecutionError):
        run(twin)


# ------------------------------------------------------------------------------------------------------------------------------ other places
@pytest.mark.parametrize(("built", "here"), [("sm_90", "cpu"), ("cpu", "sm_90"), ("sm_80", "sm_90")])
def test_another_device(built, here):
    data = serialize.dump(candidates.create(graph(), devices.parse(built)).plan_at(0).build())
    with pytest.raises(SerializationError, match=r"another device.*built with .*running with .*build the graph again") as caught:
        serialize.load(data, devices.parse(here))
    assert {"sm_90": "sm_90a"}.get(built, built) in str(caught.value) and {"sm_90": "sm_90a"}.get(here, here) in str(caught.value)


def test_another_version(data):
    bad = resealed(data, lambda c: c.update(graphdnn="0.0.1"))
    with pytest.raises(SerializationError, match=rf"another version.*built with graphdnn 0\.0\.1 for .*running with graphdnn {__version__}"):
        serialize.load(bad, CPU)


def test_another_format(data):
    with pytest.raises(SerializationError, match=r"built with plan format 9, running with plan format 2"):
        serialize.load(data[:8] + struct.pack("<I", 9) + data[12:])


def test_another_cpu_compiles_again(data):
    twin = serialize.load(resealed(data, lambda c: c.update(host="another CPU")))
    assert "file" not in {k.origin for k in twin.kernels}
    np.testing.assert_array_equal(run(twin), EXPECTED)


def test_another_cpu_and_an_engine_that_is_gone(data):
    def edit(content: dict[str, Any]) -> None:
        content["host"] = "other"
        content["choices"][0]["engine"] = 99

    with pytest.raises(SerializationError, match="engine 99"):
        serialize.load(resealed(data, edit))


# ------------------------------------------------------------------------------------------------------------------------------ damage
def _damaged(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return [
        lambda: data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :],
        lambda: data[:at],
        lambda: data[:at] + rng.randbytes(rng.randint(1, 9)) + data[at:],
        lambda: data[:at] + data[at + rng.randint(1, 9) :],
        lambda: data + rng.randbytes(1),
        lambda: data[:8] + struct.pack("<I", rng.randrange(2, 2**32)) + data[12:],
        lambda: rng.randbytes(at),
    ][rng.randrange(7)]()


def test_500_damages(data):
    rng = random.Random(1)
    for _ in range(500):
        bad = _damaged(data, rng)
        with pytest.raises(SerializationError, match=r"running with"):
            serialize.load(bad, CPU)


@pytest.mark.parametrize("text", [b"", b"[]", b"nonsense", b"[" * 100_000, b'"x"', b"{}", b"null"])
def test_a_right_checksum_over_nonsense(text):
    rest = struct.pack("<Q", len(text)) + text
    with pytest.raises(SerializationError):
        serialize.load(struct.pack("<8sI32s", serialize.MAGIC, serialize.FORMAT, hashlib.sha256(rest).digest()) + rest, CPU)


FORGED = {
    "kernel out of range": lambda c: c["recipe"]["steps"][-1].update(kernel=5),
    "negative grid": lambda c: c["recipe"]["steps"][-1].update(grid=-1),
    "tensor out of range": lambda c: c["recipe"]["steps"][-1]["args"][0].update(index=77),
    "workspace out of range": lambda c: c["recipe"]["steps"][-1]["args"].__setitem__(
        0, {"is": "Buffer", "kind": "workspace", "index": 0, "offset": 64}
    ),
    "too few arguments": lambda c: c["recipe"]["steps"][-1]["args"].pop(),
    "number for a pointer": lambda c: c["recipe"]["steps"][-1]["args"].__setitem__(0, {"is": "Constant", "value": 1, "type": "int64"}),
    "negative workspace": lambda c: c["recipe"].update(workspace=-1),
    "a missing binary": lambda c: c.update(kernels=[]),
    "code that is not there": lambda c: c["kernels"][0].update(code=c["kernels"][0]["code"] + 1),
    "code left over": lambda c: c["kernels"][0].update(code=c["kernels"][0]["code"] - 1),
    "negative length": lambda c: c["kernels"][0].update(code=-1),
    "a missing key": lambda c: c.pop("recipe"),
    "a node's tensor": lambda c: c["graph"]["nodes"][0]["inputs"][0].__setitem__(1, 50),
    "a region's node": lambda c: c["partition"]["regions"][0].update(nodes=[50]),
    "dims and strides": lambda c: c["graph"]["tensors"][0].update(stride=[1, 1]),
    "an unknown dtype": lambda c: c["graph"]["tensors"][0].update(dtype="FLOAT13"),
    "an engine too few": lambda c: c.update(choices=[]),
    "another class": lambda c: c["recipe"].update({"is": "Popen"}),
    "text for a number": lambda c: c["recipe"].update(workspace="0"),
    "bool for a number": lambda c: c["recipe"].update(workspace=False),
    "an extra key": lambda c: c["recipe"].update(extra=1),
    "notes": lambda c: c.update(notes=[1]),
    "the device": lambda c: c["device"].update(kind="toaster"),
    "no device": lambda c: c.update(device=None),
    "kernels of regions": lambda c: c.update(region_kernels=[[9]]),
}


@pytest.mark.parametrize("what", FORGED)
def test_forged_content(data, what):
    with pytest.raises(SerializationError):
        serialize.load(resealed(data, FORGED[what]), CPU)


# ------------------------------------------------------------------------------------------------------------------------------ codec
def test_codec_round_trip():
    spec = KernelSpec("t", "k", (PointerParam("x", "float32", 16, True),), {"body": ("a", "b"), "flag": True, "nested": {"n": (1, 2.5)}}, 64)
    steps: tuple[Step, ...] = (
        Memset(Buffer("workspace", 0, 4), 8, 255),
        Launch(0, 3, (Buffer("tensor", 1), TensorScalar(2, "float32"), Constant(2.0, "float32"))),
    )
    recipe = Recipe((spec,), steps, 12)
    text = json.dumps(codec.encode(recipe))
    assert codec.decode(Recipe, json.loads(text)) == recipe
    assert codec.decode(OperationGraph, json.loads(json.dumps(codec.encode(graph())))) == graph()


@dataclass(frozen=True)
class Sample:
    number: int
    real: float
    kind: Literal["a", "b"]
    arg: Arg
    pair: tuple[int, str] = (1, "x")
    maybe: int | None = None


GOOD = Sample(1, 2.0, "a", Constant(1, "int64"))


@pytest.mark.parametrize(
    "change",
    [{"number": 1.0}, {"number": True}, {"number": None}, {"real": 1}, {"real": "1"}, {"kind": "c"}, {"kind": 1}, {"arg": None}, {"arg": 3}]
    + [{"arg": {"is": "Memset"}}, {"arg": {}}, {"pair": [1]}, {"pair": [1, 2]}, {"pair": "1x"}, {"maybe": "1"}, {"maybe": 1.5}, {"is": "Other"}],
)
def test_codec_is_strict(change):
    value = codec.encode(GOOD)
    assert codec.decode(Sample, value) == GOOD
    with pytest.raises(SerializationError, match="Sample"):
        codec.decode(Sample, value | change)
    for key in value:
        with pytest.raises(SerializationError):
            codec.decode(Sample, {k: v for k, v in value.items() if k != key})


def test_codec_writes_no_objects():
    for bad in (object(), {1: 2}, {"a": object()}, b"bytes", {1, 2}):
        with pytest.raises(TypeError):
            codec.encode(bad)
    assert codec.encode(replace(GOOD, number=np.int64(3))) == codec.encode(replace(GOOD, number=3))
