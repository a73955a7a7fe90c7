"""C1 C3 C6 C8 C9 P3: caches, stored plans, pickles, kernels in plain fp32."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type
from tests.buffers import Guarded
from tests.helpers import built

F32 = data_type.FLOAT
FLOAT = {"io_data_type": F32, "compute_data_type": F32}
ROOT = str(Path(__file__).resolve().parents[2])
X = np.linspace(-3, 3, 24, dtype=np.float32).reshape(2, 3, 4)


def _run(make, x=X, **kwargs):
    """Build ``make(g, x)`` on the CPU, run it on ``x`` and give the output."""
    g = graphdnn.pygraph(device="cpu", **(FLOAT | kwargs))
    t = g.tensor(dim=list(x.shape), layout="row", data_type=x.dtype, name="x")
    y = make(g, t).set_output(True)
    built(g)
    out = Guarded.make(tuple(y.get_dim()), tuple(y.get_stride()), F32)
    g.execute({t: x, y: out.numpy_view()}, np.empty(g.get_workspace_size(), np.uint8))
    return out.read()


PAIRS = {
    "scalar constant": (lambda g, x: g.mul(x, 0.0883883), lambda g, x: g.mul(x, 0.2651650)),
    "attention-like scale": (lambda g, x: g.exp(g.mul(x, 1 / 128**0.5)), lambda g, x: g.exp(g.mul(x, 3 / 128**0.5))),
    "relu upper clip": (lambda g, x: g.relu(x, upper_clip=1.0), lambda g, x: g.relu(x, upper_clip=2.0)),
    "relu lower clip": (lambda g, x: g.relu(x, lower_clip=-1.0), lambda g, x: g.relu(x, lower_clip=-2.0)),
    "relu slope": (lambda g, x: g.relu(x, negative_slope=0.1), lambda g, x: g.relu(x, negative_slope=0.2)),
    "swish beta": (lambda g, x: g.swish(x, swish_beta=1.0), lambda g, x: g.swish(x, swish_beta=2.0)),
    "gen_index axis": (lambda g, x: g.add(x, g.gen_index(x, axis=1)), lambda g, x: g.add(x, g.gen_index(x, axis=2))),
    "pointwise mode": (lambda g, x: g.gelu(x), lambda g, x: g.gelu_approx_tanh(x)),
    "reduction mode": (
        lambda g, x: g.reduction(x, graphdnn.reduction_mode.MAX).set_dim([2, 3, 1]),
        lambda g, x: g.reduction(x, graphdnn.reduction_mode.AMAX).set_dim([2, 3, 1]),
    ),
    "slice start": (
        lambda g, x: g.slice(x, [slice(0, 1), slice(0, 2), slice(None)]),
        lambda g, x: g.slice(x, [slice(0, 1), slice(1, 3), slice(None)]),
    ),
    "slice step": (
        lambda g, x: g.slice(x, [slice(0, 2), slice(0, 3), slice(0, 4, 2)]),
        lambda g, x: g.slice(x, [slice(0, 2), slice(0, 3), slice(0, 4, 3)]),
    ),
    "permutation": (lambda g, x: g.reshape(g.transpose(x, [0, 2, 1])).set_dim([24]), lambda g, x: g.reshape(g.transpose(x, [1, 0, 2])).set_dim([24])),
    "rounding of a virtual tensor": (
        lambda g, x: g.neg(g.mul(x, 1.1).set_data_type(data_type.HALF)),
        lambda g, x: g.neg(g.mul(x, 1.1).set_data_type(data_type.BFLOAT16)),
    ),
    "operand order": (lambda g, x: g.sub(x, 1.0), lambda g, x: g.sub(g.tensor_scalar(1.0, graphdnn.scalar_type.COMPILE_TIME_CONST), x)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_C1_graphs_that_differ_in_one_attribute_give_two_results(name, empty_cache):
    """A, B, then A again, in one process and one cache: B is not A, and A comes back."""
    a, b = PAIRS[name]
    first, second, again = _run(a), _run(b), _run(a)
    assert first.shape != second.shape or not np.array_equal(first, second)
    np.testing.assert_array_equal(first, again)


def test_C1_scalars_that_are_runtime_arguments_may_share_a_kernel(empty_cache):
    """By-value: one plan, two values, two results."""
    g = graphdnn.pygraph(device="cpu", **FLOAT)
    x = g.tensor(dim=[24], stride=[1], name="x")
    s = g.tensor(dim=[1], stride=[1], is_pass_by_value=True, data_type=F32, name="s")
    y = g.mul(x, s).set_output(True)
    built(g)
    flat, out = X.reshape(-1), np.zeros(24, np.float32)
    for value in (128**-0.5, 3 * 128**-0.5):
        g.execute({x: flat, s: value, y: out}, None)
        np.testing.assert_array_equal(out, flat * np.float32(value))


def test_C1_compute_type_changes_the_result(empty_cache):
    """(x + 1) - x at 1e8 is 0 in fp32 and 1 in fp64."""

    def make(compute):
        return lambda g, x: g.sub(g.add(x, 1, compute_data_type=compute), x, compute_data_type=compute).set_data_type(F32)

    x = np.full((2, 3), 1e8, np.float32)
    assert (_run(make(F32), x, compute_data_type=data_type.NOT_SET) == 0).all()
    assert (_run(make(data_type.DOUBLE), x, compute_data_type=data_type.NOT_SET) == 1).all()


def _plan() -> tuple[graphdnn.pygraph, bytes]:
    g = graphdnn.pygraph(device="cpu", **FLOAT)
    x = g.tensor(dim=[24], stride=[1], name="x", uid=1)
    g.relu(g.add(x, 0.5)).set_output(True).set_uid(2)
    built(g)
    return g, bytes(g.serialize())


def _loaded(data: bytes) -> np.ndarray:
    g = graphdnn.pygraph(device="cpu")
    g.deserialize(list(data))
    out = np.zeros(24, np.float32)
    g.execute({1: X.reshape(-1), 2: out}, np.empty(g.get_workspace_size(), np.uint8))
    return out


def test_C6_damaged_plans_give_typed_errors():
    _, data = _plan()
    np.testing.assert_array_equal(_loaded(data), np.maximum(X.reshape(-1) + np.float32(0.5), 0))
    middle = len(data) // 2
    damaged = {
        "flipped byte": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "truncated": data[:-7],
        "half": data[:middle],
        "empty": b"",
        "one byte": b"\x00",
        "longer": data + b"\x00",
        "another file": b"PK\x03\x04" + bytes(200),
    }
    for name, bad in damaged.items():
        g = graphdnn.pygraph(device="cpu")
        with pytest.raises(graphdnn.GraphError) as caught:
            g.deserialize(list(bad))
        assert isinstance(caught.value, graphdnn.SerializationError), name
    np.testing.assert_array_equal(_loaded(data), np.maximum(X.reshape(-1) + np.float32(0.5), 0))


@pytest.mark.parametrize("what", ["version", "arch"])
def test_C6_other_version_or_device_says_built_with_and_running_with(what):
    """A plan of another graphdnn version, and one for another device, are refused with both sides named and a way out."""
    if what == "version":
        script = (
            "import graphdnn._version as v; v.__version__ = '0.0.1'\nimport graphdnn, sys\ngraphdnn.__version__ = '0.0.1'\n"
            "F = graphdnn.data_type.FLOAT\ng = graphdnn.pygraph(device='cpu', io_data_type=F, compute_data_type=F)\n"
            "x = g.tensor(dim=[24], stride=[1], uid=1)\ng.relu(x).set_output(True).set_uid(2)\n"
            "g.build([graphdnn.heur_mode.A])\nsys.stdout.buffer.write(bytes(g.serialize()))"
        )
        data = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout
        sides = ("0.0.1", graphdnn.__version__)
    else:
        g = graphdnn.pygraph(device="sm_90", **FLOAT)
        g.relu(g.tensor(dim=[24], stride=[1], uid=1)).set_output(True).set_uid(2)
        built(g)
        data = bytes(g.serialize())
        sides = ("sm_90", "cpu")
    loader = graphdnn.pygraph(device="cpu")
    with pytest.raises(graphdnn.SerializationError) as caught:
        loader.deserialize(list(data))
    text = str(caught.value)
    assert all(s in text for s in sides), text
    assert "build" in text, f"a way out: {text}"


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
@pytest.mark.parametrize("state", ["fresh", "built"])
def test_C8_graphs_pickle_and_deepcopy(how, state):
    g = graphdnn.pygraph(device="cpu", **FLOAT)
    x = g.tensor(dim=[24], stride=[1], name="x", uid=1)
    g.relu(g.add(x, 0.5)).set_output(True).set_uid(2)
    if state == "built":
        built(g)
    twin = pickle.loads(pickle.dumps(g)) if how == "pickle" else copy.deepcopy(g)
    if state == "fresh":
        built(twin)
    out = np.zeros(24, np.float32)
    twin.execute({1: X.reshape(-1), 2: out}, np.empty(twin.get_workspace_size(), np.uint8))
    np.testing.assert_array_equal(out, np.maximum(X.reshape(-1) + np.float32(0.5), 0))


def test_C8_a_built_plan_travels_to_a_worker_process(tmp_path):
    """Pickled here, run in another process that never compiles."""
    g, _ = _plan()
    (tmp_path / "graph.pickle").write_bytes(pickle.dumps(g))
    np.save(tmp_path / "x.npy", X.reshape(-1))
    script = (
        "import pickle, sys, numpy as np\ng = pickle.load(open('graph.pickle', 'rb'))\nout = np.zeros(24, np.float32)\n"
        "g.execute({1: np.load('x.npy'), 2: out}, np.empty(g.get_workspace_size(), np.uint8))\nnp.save('y.npy', out)\n"
        "assert 'numba' not in sys.modules, 'the object code travels in the pickle'"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=os.environ | {"PYTHONPATH": ROOT}, check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), np.maximum(X.reshape(-1) + np.float32(0.5), 0))


def test_C9_entry_that_is_damaged_is_built_again(empty_cache):
    """Every file of the cache truncated or filled with zeros: the next process still gets the right result, and repairs the cache."""
    _in_new_process(empty_cache)
    files = [f for f in empty_cache.rglob("*") if f.is_file() and f.suffix != ".lock" and f.stat().st_size]
    assert files, "the first process has filled the cache"
    for i, f in enumerate(files):
        f.write_bytes(f.read_bytes()[: f.stat().st_size // 2] if i % 2 else bytes(f.stat().st_size))
    _in_new_process(empty_cache)
    repaired = _in_new_process(empty_cache)
    assert repaired["misses"] == 0 and repaired["disk_hits"] > 0


def test_C3_a_hit_names_its_file(empty_cache):
    """The log of the second process says which file every kernel came from, and that file is there."""
    assert not re.search("cache hit", _in_new_process(empty_cache, GRAPHDNN_LOG="debug")["said"])
    second = _in_new_process(empty_cache, GRAPHDNN_LOG="debug")
    folders = re.findall(r"cache hit from (\S+)", second["said"])
    assert len(folders) == second["disk_hits"] > 0
    assert all(Path(f).is_relative_to(empty_cache) and list(Path(f).iterdir()) for f in folders)


def _in_new_process(folder, **env) -> dict[str, Any]:
    """Build and run x + 0.5 in a new process: what its cache counted, and what it ``said`` in its log."""
    script = (
        "import json, numpy as np, graphdnn\nfrom graphdnn.plans import cache\nF = graphdnn.data_type.FLOAT\n"
        "g = graphdnn.pygraph(device='cpu', io_data_type=F, compute_data_type=F)\nx = g.tensor(dim=[24], stride=[1], uid=1)\n"
        "g.relu(g.add(x, 0.5)).set_output(True).set_uid(2)\ng.build([graphdnn.heur_mode.A])\n"
        "a = np.arange(24, dtype=np.float32) - 12\nout = np.zeros(24, np.float32)\ng.execute({1: a, 2: out}, None)\n"
        "assert (out == np.maximum(a + 0.5, 0)).all()\nprint(json.dumps({'misses': cache.counters.misses, 'disk_hits': cache.counters.disk_hits}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "GRAPHDNN_CACHE_DIR": str(folder), "PYTHONPATH": ROOT} | env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"said": done.stderr}


def test_P3_no_double_precision_in_fp32_kernels():
    """Untyped literals would make ``x * 2.0 + 1`` double precision."""
    g = graphdnn.pygraph(device="sm_90", **FLOAT)
    x = g.tensor(dim=[8, 1024], stride=[1024, 1], name="x")
    y = g.add(g.mul(x, 2.0), 1)
    y = g.gelu(g.swish(g.elu(g.softplus(g.pow(y, 2.0)))))
    g.reduction(y, graphdnn.reduction_mode.NORM2).set_dim([8, 1]).set_output(True)
    g.div(y, 3.0).set_output(True)
    built(g)
    found = [line.strip() for line in g.plan.ptx.splitlines() if re.search(r"\.f64\b", line)]
    assert not found, f"float64 in PTX: {found[:5]}"
