"""Damaged files: 500 random damages each of a serialized plan, of a file of several plans and of a pipeline give typed errors, 500 of a graph's JSON
text give a typed error or a graph that validates, and nothing that a file says is executed."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type
from tests.helpers import built

F32 = data_type.FLOAT
DAMAGES = 500
X = np.linspace(-2, 2, 60, dtype=np.float32).reshape(3, 20)


def example(device: str = "cpu") -> Any:
    """Matmul, scale, bias, GELU, AMAX: several kernels, a by-value scalar, a constant, a virtual tensor with its own type."""
    g = graphdnn.pygraph(device=device, io_data_type=F32, compute_data_type=F32)
    a = g.tensor(dim=[1, 3, 20], stride=[60, 20, 1], name="a", uid=1)
    b = g.tensor(dim=[1, 20, 4], stride=[80, 4, 1], name="b", uid=2)
    s = g.tensor(dim=[1, 1, 1], stride=[1, 1, 1], is_pass_by_value=True, data_type=F32, name="s", uid=3)
    y = g.gelu(g.add(g.mul(g.matmul(a, b, name="mm"), s), 0.5).set_data_type(data_type.BFLOAT16))
    y.set_output(True).set_uid(4).set_data_type(F32)
    g.reduction(g.slice(y, [slice(None), slice(0, 2), slice(None)]).set_data_type(F32), graphdnn.reduction_mode.AMAX).set_dim([1, 1, 1]).set_output(
        True
    ).set_uid(5)
    return g


def run(g: Any) -> tuple[np.ndarray, np.ndarray]:
    y, m = np.zeros((1, 3, 4), np.float32), np.zeros((1, 1, 1), np.float32)
    g.execute({1: X[None], 2: np.ones((1, 20, 4), np.float32), 3: 0.25, 4: y, 5: m}, np.empty(g.get_workspace_size(), np.uint8))
    return y, m


@pytest.fixture(scope="module")
def stored() -> bytes:
    return bytes(built(example()).serialize())


@pytest.fixture(scope="module")
def text() -> str:
    g = example()
    g.validate()
    g.build_operation_graph()
    return str(g)


EXECUTES = (
    "exec",
    "compile",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "subprocess.Popen",
    "pickle.find_class",
    "marshal.loads",
    "ctypes.dlopen",
    "code.__new__",
)
_events: list[str] | None = None


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _events is not None and event in EXECUTES:
        _events.append(f"{event} {args!r:.120}")


sys.addaudithook(_audit)


@contextmanager
def nothing_executed() -> Iterator[None]:
    """Fails if Python compiles, executes, unpickles, spawns or opens a library inside; what the code imports must have been imported before."""
    global _events
    _events = []
    try:
        yield
        happened = _events
    finally:
        _events = None
    assert not happened, f"loading executed something: {happened[:3]}"


def load(data: bytes) -> Any:
    g = graphdnn.pygraph(device="cpu")
    g.deserialize(list(data))
    return g


def spoiled(data: bytes, rng: random.Random) -> bytes:
    """One random damage."""
    kind, at = rng.randrange(7), rng.randrange(len(data))
    if kind == 0:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data[:at] + data[at + rng.randint(1, 64) :]
    if kind == 3:
        return data[:at] + rng.randbytes(rng.randint(1, 64)) + data[at:]
    if kind == 4:
        return data[:at] + rng.randbytes(min(64, len(data) - at)) + data[at + 64 :]
    if kind == 5:
        other = rng.randrange(len(data))
        lo, hi = sorted((at, other))
        return data[hi:] + data[lo:hi] + data[:lo]
    return data[:at] + bytes(len(data) - at)


def test_500_damages_of_a_plan_give_typed_errors(stored):
    rng = random.Random(20260101)
    want = run(load(stored))
    for _ in range(DAMAGES):
        bad = spoiled(stored, rng)
        if bad == stored:
            continue
        with nothing_executed(), pytest.raises(graphdnn.SerializationError):
            load(bad)
    for a, b in zip(run(load(stored)), want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_500_damages_of_a_file_of_several_plans_give_typed_errors(stored):
    """Whichever plan is asked for, and for looking at it too: damage anywhere in the file is noticed."""
    from graphdnn.inspection.planfile import inspect
    from graphdnn.plans import serialize

    small = graphdnn.pygraph(io_data_type=F32, compute_data_type=F32)
    small.relu(small.tensor(dim=[3, 20], stride=[20, 1], name="x", uid=1)).set_output(True).set_uid(2)
    file = graphdnn.compile_for(small, "sm_80,sm_90a,cpu")
    places = [graphdnn.create_device_properties(name).props for name in ("cpu", "sm_80", "sm_90")]
    rng = random.Random(20260103)
    for place in places:
        assert serialize.load(file, place).built
    inspect(file)
    for turn in range(DAMAGES):
        bad = spoiled(file, rng)
        if bad == file:
            continue
        with nothing_executed(), pytest.raises(graphdnn.SerializationError):
            inspect(bad) if turn % 4 == 3 else serialize.load(bad, places[turn % 4])


def test_500_damages_of_a_pipelines_file_give_typed_errors():
    from graphdnn.inspection.planfile import inspect

    line = graphdnn.Pipeline(name="line")
    for names in ({"x": "first", "y": "second"}, {"x": "second", "y": "third"}):
        g = graphdnn.pygraph(io_data_type=F32, compute_data_type=F32, device="cpu")
        g.relu(g.tensor(dim=[3, 20], stride=[20, 1], name="x")).set_output(True).set_name("y")
        line.add(built(g), names)
    file = bytes(line.build().serialize())
    graphdnn.Pipeline.deserialize(file)
    inspect(file)
    rng = random.Random(20260104)
    for turn in range(DAMAGES):
        bad = spoiled(file, rng)
        if bad == file:
            continue
        with nothing_executed(), pytest.raises(graphdnn.SerializationError):
            inspect(bad) if turn % 4 == 3 else graphdnn.Pipeline.deserialize(bad)


def resealed(data: bytes, edit: Callable[[dict[str, Any]], None], blobs: Callable[[bytes], bytes] = lambda b: b) -> bytes:
    """``data`` with its JSON (or what follows it) edited and the checksum made right again."""
    magic, version, _ = struct.unpack_from("<8sI32s", data)
    (size,) = struct.unpack_from("<Q", data, 44)
    content = json.loads(data[52 : 52 + size])
    edit(content)
    text = json.dumps(content).encode()
    body = struct.pack("<Q", len(text)) + text + blobs(data[52 + size :])
    return struct.pack("<8sI32s", magic, version, hashlib.sha256(body).digest()) + body


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _leaves(inner, (*path, key))


JUNK = (
    None,
    True,
    -1,
    0,
    7,
    2**31,
    2**70,
    -(2**63),
    1.5,
    "",
    "x",
    "FLOAT",
    "__import__('os').system('false')",
    [],
    {},
    [1, 2],
    {"is": "Launch"},
    "NaN",
    [[]],
    "é\x00",
)


def scrambled(content: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """``content`` with one to three values replaced, dropped, doubled or renamed."""
    content = json.loads(json.dumps(content))
    for _ in range(rng.choice((1, 1, 2, 3))):
        paths = list(_leaves(content))
        if not paths:
            break
        *way, last = rng.choice(paths)
        holder: Any = content
        for step in way:
            holder = holder[step]
        kind = rng.randrange(5)
        if kind == 0:
            del holder[last]
        elif kind == 1 and isinstance(holder, dict):
            holder[f"{last}_"] = holder.pop(last)
        elif kind == 2 and isinstance(holder[last], int):
            holder[last] += rng.choice((-1, 1, 1000, 2**33))
        elif kind == 3 and isinstance(holder, list):
            holder.append(holder[last])
        else:
            holder[last] = rng.choice(JUNK)
    return content


def test_plans_whose_content_was_edited_and_sealed_again_are_refused_or_load_without_executing_anything(stored):
    """The checksum is right: only the schema stands between the file and us. Whatever loads is not run: machine code is trusted once sealed."""
    rng = random.Random(7)
    load(stored)
    refused = 0
    for _ in range(150):
        bad = resealed(stored, lambda c: c.update(scrambled(c, rng)))
        with nothing_executed():
            try:
                load(bad)
            except graphdnn.GraphError:
                refused += 1
    assert refused > 75, "most edits break the plan and are noticed"


def test_source_text_in_a_plan_is_never_executed(stored, tmp_path):
    """The source that travels beside the binary is for reading: replaced by a program, it stays unread by Python."""
    marker = tmp_path / "executed"
    want = run(load(stored))
    attack = f"open({str(marker)!r}, 'w')\n".encode()

    def replaced(blobs: bytes) -> bytes:
        (size,) = struct.unpack_from("<Q", stored, 44)
        out, at = b"", 0
        for k in json.loads(stored[52 : 52 + size])["kernels"]:
            text, code = k["source"], k["code"]
            out += (attack + b"#" * text)[:text] + blobs[at + text : at + text + code]
            at += text + code
        return out

    twin = load(resealed(stored, lambda c: None, replaced))
    for a, b in zip(run(twin), want, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not marker.exists()


def spoiled_text(text: str, rng: random.Random) -> str:
    """One random damage of a JSON text: of the characters, or of the values."""
    if rng.random() < 0.6:
        return json.dumps(scrambled(json.loads(text), rng))
    kind, at = rng.randrange(5), rng.randrange(len(text))
    if kind == 0:
        return text[:at] + rng.choice('{}[],:"0e-\\\u0000é9') + text[at + 1 :]
    if kind == 1:
        return text[:at]
    if kind == 2:
        return text[:at] + text[at + rng.randint(1, 40) :]
    if kind == 3:
        return text[:at] + text[rng.randrange(len(text)) :][: rng.randint(1, 80)] + text[at:]
    return text[at:] + text[:at]


def test_500_damages_of_a_graphs_text_give_a_typed_error_or_a_valid_graph(text):
    rng = random.Random(20260102)
    graphdnn.pygraph(device="cpu").deserialize(text)
    valid = refused = 0
    for _ in range(DAMAGES):
        bad = spoiled_text(text, rng)
        g = graphdnn.pygraph(device="cpu")
        with nothing_executed():
            try:
                g.deserialize(bad)
                g.validate()
            except graphdnn.GraphError:
                refused += 1
                continue
        valid += 1
        json.loads(str(g))
    assert valid + refused == DAMAGES
    assert refused > 100 and valid > 5, f"{refused} refused, {valid} valid: the damages reach both outcomes"


def test_text_restores_the_graph(text):
    g = graphdnn.pygraph(device="cpu")
    g.deserialize(text)
    built(g)
    for a, b in zip(run(g), run(built(example())), strict=True):
        np.testing.assert_array_equal(a, b)


def test_damaged_bytes_as_other_kinds_of_data():
    """Things that are no plan at all."""
    for data in ([], [0] * 100, b"", b"\x80\x04\x95", "", "null", "[]", "{}", "{", '{"nodes": 3}', "[" * 100_000, '{"a":' * 50_000):
        with pytest.raises(graphdnn.GraphError):
            graphdnn.pygraph(device="cpu").deserialize(data)
    for data in (None, 3, [256], [-1], ["a"], [None], 2.5):
        with pytest.raises((TypeError, graphdnn.GraphError)):
            graphdnn.pygraph(device="cpu").deserialize(data)


@pytest.mark.parametrize(
    "name", ["a\nraise SystemExit('executed')", "a\rraise SystemExit", "a\x0craise SystemExit", "a\u2028b", "nul\x00", "{{ 7 * 7 }}", "'''", "\\"]
)
def test_names_are_never_code(name):
    """Names stand in comments of generated text; one from a file must not break out of it."""
    g = graphdnn.pygraph(device="cpu", io_data_type=F32, compute_data_type=F32)
    x = g.tensor(dim=[4], stride=[1], name=name, uid=1)
    g.relu(x, name=name).set_output(True).set_name(f"{name} out").set_uid(2)
    twin = graphdnn.pygraph(device="cpu")
    twin.deserialize(str(g))
    built(twin)
    out = np.zeros(4, np.float32)
    twin.execute({1: np.ones(4, np.float32), 2: out}, None)
    assert (out == 1).all()
