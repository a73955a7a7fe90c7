"""Handles, streams, devices of graphs, device properties, kernel caches, copies, serialization, environment, log."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

import graphdnn as cudnn
from graphdnn import data_type, env, heur_mode
from graphdnn.device import DeviceProps, cpu, describe

F32 = data_type.FLOAT
RE, VE, TE, NS = RuntimeError, ValueError, TypeError, cudnn.cudnnGraphNotSupportedError


def doubled(**kwargs):
    g = cudnn.pygraph(**({"io_data_type": F32, "intermediate_data_type": F32, "compute_data_type": F32, "device": "cpu"} | kwargs))
    x = g.tensor(dim=[2, 3], stride=[3, 1], name="x", uid=1)
    y = g.mul(x, 2.0, name="twice").set_output(True).set_name("y").set_uid(2)
    return g, x, y


def runs(g, keys=(1, 2)):
    data, out = np.arange(6, dtype=np.float32).reshape(2, 3), np.full((2, 3), np.nan, np.float32)
    g.execute({keys[0]: data, keys[1]: out}, None)
    np.testing.assert_array_equal(out, 2 * data)


# ----------------------------------------------------------------------------------------------------------------------------------------- handles
def test_handles_are_integers_that_know_their_device():
    a, b = cudnn.create_handle("cpu"), cudnn.create_handle(device="cudasim")
    assert a and b and a != b and isinstance(a, int) and hash(a) == hash(int(a))
    assert (a.device.kind, b.device.kind) == ("cpu", "cudasim")
    assert "cpu" in repr(a) and "handle" in repr(a) and str(a) == repr(a) and f"{a:d}" == str(int(a)) and "handle" in f"{a}"
    assert copy.deepcopy(a) is a and copy.copy(a) is a
    other = pickle.loads(pickle.dumps(a))
    assert other.device == a.device and cudnn.get_stream(other) == 0
    assert cudnn.destroy_handle(handle=b) is None
    for call in (lambda: cudnn.get_stream(b), lambda: cudnn.destroy_handle(b), lambda: cudnn.set_stream(b, 0), lambda: cudnn.pygraph(handle=b)):
        with pytest.raises(RE, match="live handle"):
            call()
    with pytest.raises(TE):
        cudnn.set_stream("a", 0)
    with pytest.raises(TE):
        cudnn.create_handle(3.5)


def test_streams():
    h = cudnn.create_handle("cpu")
    assert cudnn.get_stream(h) == 0
    assert cudnn.set_stream(handle=h, stream=4096) is None
    assert cudnn.get_stream(h) == 4096 and cudnn.get_stream(int(h)) == 4096 and "0x1000" in repr(h)
    cudnn.set_stream(h, 0)
    assert cudnn.get_stream(h) == 0
    with pytest.raises(VE):
        cudnn.set_stream(h, -1)
    with pytest.raises(cudnn.ValidationError, match="not an address"):
        cudnn.set_stream(h, 1 << 64)
    with pytest.raises(TE):
        cudnn.set_stream(h, 1.5)


def test_threads_make_different_handles():
    found = []
    threads = [threading.Thread(target=lambda: found.extend(cudnn.create_handle("cpu") for _ in range(100))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(set(found)) == 400


# ----------------------------------------------------------------------------------------------------------------------------- device of a graph
def test_device_of_a_graph(monkeypatch):
    monkeypatch.setenv("GRAPHDNN_DEVICE", "cudasim")
    handle = cudnn.create_handle("cpu")
    assert cudnn.create_handle().device.kind == "cudasim"
    for kwargs, expected in (
        ({}, "cudasim"),
        ({"device": "cpu"}, "cpu"),
        ({"device": cpu()}, "cpu"),
        ({"handle": handle}, "cpu"),
        ({"device": "cpu", "handle": handle}, "cpu"),
        ({"sm_version": 90}, "sm_90a"),
        ({"sm_version": 80}, "sm_80"),
        ({"device": "sm_90", "sm_version": 90}, "sm_90a"),
        ({"device_property": cudnn.create_device_properties("sm_80")}, "sm_80"),
    ):
        assert cudnn.pygraph(**kwargs)._get_device().text == expected, kwargs


@pytest.mark.parametrize(
    "kwargs",
    [
        {"device": "cudasim", "handle": "cpu"},
        {"device": "sm_80", "sm_version": 90},
        {"device": "cpu", "sm_version": 90},
        {"device": "cpu", "device_property": "sm_90"},
        {"device": "sm_77"},
        {"device": "tpu"},
        {"sm_version": 12},
        {"device": "sm_90", "sm_count": 0},
    ],
)
def test_devices_that_do_not_fit_together(kwargs):
    if isinstance(kwargs.get("handle"), str):
        kwargs = kwargs | {"handle": cudnn.create_handle(kwargs["handle"])}
    if "device_property" in kwargs:
        kwargs = kwargs | {"device_property": cudnn.create_device_properties(kwargs["device_property"])}
    with pytest.raises(VE):
        cudnn.pygraph(**kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"device": 3},
        {"handle": "h"},
        {"sm_version": "90"},
        {"sm_count": 1.5},
        {"device_property": "sm_90"},
        {"kernel_cache": {}},
        {"io_data_type": 7},
    ],
)
def test_constructor_kinds(kwargs):
    with pytest.raises(TE):
        cudnn.pygraph(**kwargs)


def test_sm_count_limits_a_gpu():
    assert cudnn.pygraph(device="sm_90", sm_count=16)._get_device().sm_count == 16
    assert cudnn.pygraph(device="sm_90", sm_count=10**6)._get_device().sm_count == describe("sm_90").sm_count
    assert cudnn.pygraph(device="cpu", sm_count=1)._get_device() == cpu()


def test_a_missing_gpu_is_said(monkeypatch):
    if os.path.exists("/dev/nvidia0"):
        pytest.skip("this machine has a GPU")
    for call in (lambda: cudnn.create_handle("cuda:0"), lambda: cudnn.create_device_properties(0), lambda: cudnn.pygraph(device="cuda")):
        with pytest.raises(RE):
            call()
    monkeypatch.setenv("GRAPHDNN_DEVICE", "cuda:0")
    with pytest.raises(RE):
        doubled(device=None)[0].build([heur_mode.A])


def test_plans_for_a_device_that_is_not_there():
    dp = cudnn.create_device_properties("sm_90")
    again = cudnn.create_device_properties(dp.serialize())
    assert again == dp and hash(again) == hash(dp) and "H200" in repr(dp)
    g, *_ = doubled(device=None, device_property=again)
    g.build_operation_graph()
    g.create_execution_plans([heur_mode.A])
    g.check_support()
    assert g._get_device().described


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"kind": "cpu"}'])
def test_damaged_device_properties(text):
    with pytest.raises(cudnn.SerializationError):
        cudnn.create_device_properties(text)


def test_device_properties_of_wrong_kinds():
    with pytest.raises(TE):
        cudnn.create_device_properties(None)
    with pytest.raises(VE):
        cudnn.create_device_properties("tpu")
    with pytest.raises(RE):
        DeviceProps.from_json("x")


# ------------------------------------------------------------------------------------------------------------------------------------ kernel cache
def test_kernel_cache_round_trip(empty_cache, monkeypatch):
    from graphdnn.plans import cache

    kept = cudnn.create_kernel_cache()
    g, *_ = doubled(kernel_cache=kept, is_dynamic_shape_enabled=True)
    g.build([heur_mode.A])
    blob = kept.serialize()
    assert isinstance(blob, str) and "1 kernel" in repr(kept)
    other = cudnn.create_kernel_cache()
    assert other.deserialize(blob) is None and len(other.store) == len(kept.store) == 1
    assert json.loads(other.serialize()) == json.loads(blob)
    monkeypatch.setenv("GRAPHDNN_CACHE", "0")
    cache.memory.clear()
    before = cache.counters.misses
    h, *_ = doubled(kernel_cache=other)
    h.build([heur_mode.A])
    runs(h)
    assert cache.counters.misses == before, "the kernel came from the text"
    assert json.loads(str(h))["context"]["is_dynamic_shape_enabled"] is True
    with pytest.raises(RE, match="before"):
        other.deserialize(blob)


@pytest.mark.parametrize(
    "damage",
    [lambda t: "", lambda t: "{}", lambda t: t[:-20], lambda t: t.replace("kernel cache 1", "kernel cache 9"), lambda t: t[:400] + "A" + t[401:]],
)
def test_damaged_kernel_cache(damage):
    kept = cudnn.create_kernel_cache()
    g, *_ = doubled(kernel_cache=kept)
    g.build([heur_mode.A])
    text = kept.serialize()
    damaged = damage(text)
    if damaged == text:
        damaged = text[:400] + "B" + text[401:]
    with pytest.raises(cudnn.SerializationError):
        cudnn.create_kernel_cache().deserialize(damaged)


# ------------------------------------------------------------------------------------------------------------------------- serialize, pickle, copy
def test_serialize_and_deserialize():
    g, x, y = doubled()
    g.build([heur_mode.A])
    data = g.serialize()
    assert isinstance(data, list) and all(type(b) is int and 0 <= b < 256 for b in data)
    for form in (data, bytes(data), bytearray(data), memoryview(bytes(data)), tuple(data), np.array(data, np.uint8)):
        h = cudnn.pygraph()
        assert h.deserialize(form) is None
        runs(h)
    h = cudnn.pygraph(device="cpu")
    h.deserialize(cudnn.create_handle("cpu"), data)
    runs(h)
    runs(h, (x, y))
    runs(h, ("x", "y"))
    h = cudnn.pygraph()
    h.deserialize(handle_=cudnn.create_handle("cpu"), data=data)
    runs(h)
    assert h.get_execution_plan_count() == 1 and h.get_plan_name_at_index(0) == g.get_plan_name_at_index(0)
    assert h.get_workspace_size() == g.get_workspace_size() and h.get_behavior_notes() == g.get_behavior_notes()
    found = h.query_tensor_attributes_of_uid(1)
    assert (found.get_name(), found.get_dim(), found.get_data_type()) == ("x", [2, 3], F32)
    assert h.serialize() == data
    h.check_support(), h.build_plans(), h.build_plan_at_index(0)
    assert h.explain().kernels == 1 and json.loads(str(h))["nodes"][0]["mode"] == "MUL"
    for call in (lambda: h.deselect_engines(["eng0"]), lambda: h.build_plan_at_index(1)):
        with pytest.raises(RE):
            call()
    h.build([heur_mode.A])
    runs(h)


@pytest.mark.parametrize("data", [[], [1, 2, 3], [-1], [256], [1.5], b"", b"GDNNPLAN", list(range(256))])
def test_damaged_plans(data):
    with pytest.raises(cudnn.SerializationError):
        cudnn.pygraph(device="cpu").deserialize(data)


def test_deserialize_of_wrong_kinds():
    g, *_ = doubled()
    for data in (3, {}, object()):
        with pytest.raises(TE):
            g.deserialize(data)
    with pytest.raises(TE):
        g.deserialize("handle", [1])
    runs_still = doubled()[0]
    runs_still.build([heur_mode.A])
    with pytest.raises(cudnn.SerializationError):
        runs_still.deserialize([0] * 100)
    runs(runs_still)
    with pytest.raises(VE, match="disagree"):
        g.deserialize(cudnn.create_handle("cudasim"), doubled_bytes())


def doubled_bytes():
    g, *_ = doubled()
    g.build([heur_mode.A])
    return g.serialize()


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, lambda g: pickle.loads(pickle.dumps(g))], ids=["deepcopy", "copy", "pickle"])
@pytest.mark.parametrize("state", ["declared", "validated", "frozen", "planned", "built", "loaded"])
def test_copies_of_graphs(way, state):
    g, x, y = doubled(handle=cudnn.create_handle("cpu"))
    if state == "validated":
        g.validate()
    elif state in ("frozen", "planned"):
        g.build_operation_graph()
        if state == "planned":
            g.create_execution_plans([heur_mode.A])
    elif state in ("built", "loaded"):
        g.build([heur_mode.A])
    if state == "loaded":
        data = g.serialize()
        g = cudnn.pygraph(device="cpu")
        g.deserialize(data)
    other = way(g)
    assert other is not g and str(other) == str(g) and other.key() == g.key()
    assert other.get_execution_plan_count() == (1 if state in ("built", "loaded") else 0)
    if state not in ("built", "loaded"):
        other.build([heur_mode.A])
    runs(other)
    if state in ("built", "loaded"):
        runs(g)
        assert other.serialize() == g.serialize()


def test_copies_are_apart():
    g, x, y = doubled()
    other = copy.deepcopy(g)
    mine = next(t for t in other._tensors if t.get_name() == "x")
    assert mine is not x
    other.neg(mine, name="more").set_output(True)
    mine.set_dim([4, 3])
    assert "more" in str(other) and "more" not in str(g) and x.get_dim() == [2, 3]
    with pytest.raises(VE, match="another graph"):
        other.neg(x)


def test_copy_of_a_graph_with_a_kernel_cache():
    kept = cudnn.create_kernel_cache()
    g, *_ = doubled(kernel_cache=kept)
    g.build([heur_mode.A])
    assert copy.deepcopy(g)._kernel_cache is kept
    other = pickle.loads(pickle.dumps(g))
    assert len(other._kernel_cache.store) == 1
    runs(other)


# ------------------------------------------------------------------------------------------------------------------------------- environment, log
@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("GRAPHDNN_LOG", "loud", "debug"),
        ("CUDNN_FRONTEND_LOG_INFO", "maybe", "0 or 1"),
        ("GRAPHDNN_DEVICE", "tpu", "cudasim"),
        ("GRAPHDNN_DEVICE", "sm_77", "sm_80"),
        ("GRAPHDNN_DEVICE", "cuda:x", "cuda:<index>"),
        ("GRAPHDNN_DEVICE", "cpu:1", "cpu"),
        ("GRAPHDNN_CACHE", "2", "0 or 1"),
        ("GRAPHDNN_NUM_THREADS", "0", "integer"),
        ("GRAPHDNN_NUM_THREADS", "-3", "integer"),
        ("GRAPHDNN_LINEINFO", "x", "0 or 1"),
        ("GRAPHDNN_NVTX", "x", "0 or 1"),
    ],
)
def test_unknown_values_name_variable_and_what_is_allowed(monkeypatch, name, value, allowed):
    monkeypatch.setenv(name, value)
    switch = next(s for s in env.SWITCHES if name in (s.name, *(a for a, _ in s.aliases)))
    assert switch.is_set
    with pytest.raises(cudnn.ValidationError) as caught:
        switch()
    assert name in str(caught.value) and allowed in str(caught.value) and repr(value) in str(caught.value)


def test_values_of_switches(monkeypatch, tmp_path):
    for s in env.SWITCHES:
        for name in (s.name, *(a for a, _ in s.aliases)):
            monkeypatch.delenv(name, raising=False)
        assert not s.is_set and s.doc and s.allowed
    assert (env.device(), env.cache(), env.log_level(), env.log_file(), env.lineinfo(), env.nvtx()) == (None, True, "off", "stderr", False, False)
    assert env.num_threads() >= 1 and env.cache_dir().name == "graphdnn"
    for device in ("cpu", "cuda", "cuda:3", "cudasim", "cudasim:sm_80", "SM_90", "sm_80"):
        monkeypatch.setenv("GRAPHDNN_DEVICE", device)
        assert env.device() == device.lower()
    monkeypatch.setenv("GRAPHDNN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("GRAPHDNN_CACHE", "off")
    monkeypatch.setenv("GRAPHDNN_NUM_THREADS", " 3 ")
    monkeypatch.setenv("CUDNN_FRONTEND_LOG_INFO", "1")
    assert (env.cache_dir(), env.cache(), env.num_threads(), env.log_level()) == (tmp_path, False, 3, "info")
    monkeypatch.setenv("GRAPHDNN_LOG", "ERROR")
    assert env.log_level() == "error"


def test_home_may_be_unset(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "GRAPHDNN_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert env.cache_dir().is_absolute()
    monkeypatch.setattr("pathlib.Path.home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert "graphdnn-" in env.cache_dir().name


@pytest.mark.parametrize("names", [("GRAPHDNN_LOG", "GRAPHDNN_LOG_FILE", "info"), ("CUDNN_FRONTEND_LOG_INFO", "CUDNN_FRONTEND_LOG_FILE", "1")])
def test_the_log_holds_the_graph_as_json_lines(tmp_path, names):
    level, place, value = names
    script = (
        "import graphdnn as cudnn\n"
        "g = cudnn.pygraph(io_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT, device='cpu')\n"
        "g.relu(g.tensor(dim=[2], stride=[1], name='x')).set_output(True)\n"
        "g.build()\n"
        "print(g)"
    )
    clean = {k: v for k, v in os.environ.items() if "LOG" not in k} | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for target in (str(tmp_path / "log.txt"), "stdout", "stderr"):
        done = subprocess.run([sys.executable, "-c", script], env=clean | {level: value, place: target}, capture_output=True, text=True, check=True)
        text = {"stdout": done.stdout, "stderr": done.stderr}.get(target) or (tmp_path / "log.txt").read_text()
        lines = [line for line in text.splitlines() if '"context"' in line]
        assert json.loads(lines[0]) == json.loads(done.stdout.splitlines()[-1])


def test_levels_of_the_log(tmp_path, monkeypatch):
    from graphdnn import log

    file = tmp_path / "log"
    monkeypatch.setenv("GRAPHDNN_LOG_FILE", str(file))
    monkeypatch.setenv("GRAPHDNN_LOG", "warning")
    for say in (log.error, log.warning, log.info, log.debug):
        say(f"said by {say.__name__}")
    text = file.read_text()
    assert "WARNING: said by warning" in text and "ERROR: said by error" in text and "info" not in text and "debug" not in text
    monkeypatch.setenv("GRAPHDNN_LOG", "off")
    assert not log.enabled("error")
    monkeypatch.setenv("GRAPHDNN_LOG", "debug")
    monkeypatch.setenv("GRAPHDNN_LOG_FILE", str(tmp_path))
    with pytest.raises(cudnn.ValidationError, match="GRAPHDNN_LOG_FILE"):
        log.error("to a folder")


class Torch:
    cuda_stream = 0x70


class Cupy:
    ptr = 0x71


class Core:
    def __cuda_stream__(self):
        return 0, 0x72


class Property:
    __cuda_stream__ = (0, 0x73)


@pytest.mark.parametrize(("kind", "address"), [(Torch, 0x70), (Cupy, 0x71), (Core, 0x72), (Property, 0x73)])
def test_stream_objects_are_taken_and_kept_alive(kind, address):
    h = cudnn.create_handle("cpu")
    stream = kind()
    alive = weakref.ref(stream)
    cudnn.set_stream(h, stream)
    del stream
    gc.collect()
    assert alive() is not None and cudnn.get_stream(h) == address
    cudnn.set_stream(h, 0)
    gc.collect()
    assert alive() is None
    with pytest.raises(cudnn.KindError, match="stream has the wrong type"):
        cudnn.set_stream(h, True)
    cudnn.destroy_handle(h)
