"""Pipelines of graphs on every target: right numbers, planned memory, captures where there are CUDA graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type, heur_mode
from graphdnn.errors import NotSupportedError

F32 = data_type.FLOAT
B, M, K, N = 2, 9, 12, 10
GUARD = 0xA5


def new(device: str, name: str) -> Any:
    return graphdnn.pygraph(name, io_data_type=F32, intermediate_data_type=F32, compute_data_type=F32, device=device)


def project(device: str) -> Any:
    """h = x @ w + bias * scale, t = relu(x); h has padded rows."""
    g = new(device, "project")
    x, w = g.tensor(dim=(B, M, K), layout="row", name="x"), g.tensor(dim=(1, K, N), layout="row", name="w")
    scale = g.tensor(dim=(1, 1, 1), layout="row", name="scale", is_pass_by_value=True)
    bias = g.tensor(dim=(1, 1, N), layout="row", name="bias")
    g.add(g.matmul(x, w), g.mul(bias, scale)).set_output(True).set_name("h").set_dim((B, M, N)).set_stride((M * 16, 16, 1))
    g.relu(x).set_output(True).set_name("t")
    return built(g)


def normalize(device: str) -> Any:
    """Rows of what lies 16 apart, softmax over columns."""
    g = new(device, "normalize")
    rows = g.tensor(dim=(B, M, N), stride=(M * 16, 16, 1), name="rows")
    g.softmax(rows, axis=-1).set_output(True).set_name("out").set_dim((B, M, N)).set_stride((M * N, N, 1))
    return built(g)


def combine(device: str) -> Any:
    """y = p^T @ t, summed to s as well."""
    g = new(device, "combine")
    p, t = g.tensor(dim=(B, M, N), layout="row", name="p"), g.tensor(dim=(B, M, K), layout="row", name="t")
    y = g.matmul(g.transpose(p, (0, 2, 1)), t)
    y.set_output(True).set_name("y")
    g.reduction(y, graphdnn.reduction_mode.ADD).set_dim((B, 1, 1)).set_output(True).set_name("s")
    return built(g)


def built(g: Any) -> Any:
    g.build([heur_mode.A])
    return g


def pipeline(device: str, keep: tuple[str, ...] = ()) -> tuple[Any, list[Any]]:
    graphs = [project(device), normalize(device), combine(device)]
    made = graphdnn.Pipeline("three")
    made.add(graphs[0]).add(graphs[1], {"rows": "h", "out": "probabilities"}).add(graphs[2], {"p": "probabilities"})
    return made.build(keep), graphs


class Memory:
    """Arrays on the device, and back."""

    def __init__(self, device: str) -> None:
        self.gpu = device.startswith("cuda:")

    def put(self, array: Any) -> Any:
        if self.gpu:
            from graphdnn.targets.cuda_memory import DeviceArray

            return DeviceArray.from_numpy(array)
        return array.copy()

    def get(self, array: Any) -> Any:
        return array.numpy() if self.gpu else array

    def change(self, array: Any, values: Any) -> None:
        """In place."""
        if self.gpu:
            from graphdnn import _libcuda
            from graphdnn.targets.cuda_driver import activated, primary_context

            with activated(primary_context(0)):
                _libcuda.driver().call("cuMemcpyHtoD_v2", array.address, np.ascontiguousarray(values).ctypes.data, values.nbytes)
        else:
            array[...] = values


def numbers(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {"x": (B, M, K), "w": (1, K, N), "bias": (1, 1, N)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def outputs(memory: Memory, **more: tuple[int, ...]) -> dict[str, Any]:
    shapes = {"y": (B, N, K), "s": (B, 1, 1)} | more
    return {name: memory.put(np.full(shape, np.nan, np.float32)) for name, shape in shapes.items()}


def workspace(memory: Memory, made: Any) -> Any:
    """0xFF, NaN as floats, with bytes behind that must stay."""
    nbytes = made.workspace_bytes
    return memory.put(np.concatenate([np.full(nbytes, 0xFF, np.uint8), np.full(256, GUARD, np.uint8)]))


def one_by_one(memory: Memory, graphs: list[Any], values: dict[str, Any], scale: float) -> dict[str, Any]:
    """The graphs, each executed by itself on buffers of its own."""
    arrays = {name: memory.put(v) for name, v in values.items()}
    arrays |= {"h": memory.put(np.full((B, M, 16), np.nan, np.float32)), "t": memory.put(np.full((B, M, K), np.nan, np.float32))}
    arrays |= {"probabilities": memory.put(np.full((B, M, N), np.nan, np.float32))} | outputs(memory)
    names = ({}, {"rows": "h", "out": "probabilities"}, {"p": "probabilities"})
    for g, other in zip(graphs, names, strict=True):
        pack = {t.name: arrays[other.get(t.name, t.name)] for t in g.plan.graph.tensors if other.get(t.name, t.name) in arrays}
        g.execute(pack | ({"scale": scale} if not other else {}), memory.put(np.zeros(max(g.get_workspace_size(), 1), np.uint8)))
    return {name: memory.get(array) for name, array in arrays.items()}


def reference(values: dict[str, Any], scale: float) -> dict[str, Any]:
    x, w, bias = (values[name].astype(np.float64) for name in ("x", "w", "bias"))
    h = x @ w + bias * scale
    e = np.exp(h - h.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    y = p.swapaxes(1, 2) @ np.maximum(x, 0)
    return {"probabilities": p, "y": y, "s": y.sum((1, 2), keepdims=True)}


def test_three_graphs(device: str) -> None:
    """Equal, bit for bit, to the graphs one by one, and near float64: sums of at most 12 and 120 terms, each of a relative error of some 2**-24."""
    memory, (made, graphs) = Memory(device), pipeline(device)
    assert made.inputs == ("x", "w", "bias", "scale") and set(made.outputs) == {"y", "s"} and set(made.intermediates) == {"h", "t", "probabilities"}
    values, ws = numbers(1), workspace(memory, made)
    pack = {name: memory.put(v) for name, v in values.items()} | outputs(memory)
    for _ in range(2):
        made.execute(pack | {"scale": 0.5}, ws)
    wanted, near = one_by_one(memory, graphs, values, 0.5), reference(values, 0.5)
    for name in ("y", "s"):
        found = memory.get(pack[name])
        assert np.array_equal(found, wanted[name])
        assert np.allclose(found, near[name], rtol=1e-4, atol=1e-5)
    assert (memory.get(ws)[made.workspace_bytes :] == GUARD).all()


def test_kept_intermediates(device: str) -> None:
    memory, (made, graphs) = Memory(device), pipeline(device, ("probabilities",))
    less = pipeline(device)[0]
    assert made.workspace_bytes <= less.workspace_bytes and made.outputs == ("probabilities", "y", "s")
    values = numbers(2)
    pack = {name: memory.put(v) for name, v in values.items()} | outputs(memory, probabilities=(B, M, N)) | {"scale": 2.0}
    made.execute(pack, workspace(memory, made))
    wanted = one_by_one(memory, graphs, values, 2.0)
    for name in made.outputs:
        assert np.array_equal(memory.get(pack[name]), wanted[name])


def test_capture_and_replay(device: str) -> None:
    """Inputs changed in place; a by-value number stays that of the capture. Without CUDA graphs: an error that says why."""
    memory, (made, graphs) = Memory(device), pipeline(device)
    pack = {name: memory.put(v) for name, v in numbers(3).items()} | outputs(memory) | {"scale": 0.5}
    ws = workspace(memory, made)
    if not memory.gpu:
        with pytest.raises(NotSupportedError, match=f"plan .* of {device}.*execute"):
            made.capture(pack, ws)
        return
    made.capture(pack, ws)
    for seed in (4, 5):
        values = numbers(seed)
        for name, v in values.items():
            memory.change(pack[name], v)
        wanted = one_by_one(memory, graphs, values, 0.5)
        made.replay()
        for name in ("y", "s"):
            assert np.array_equal(memory.get(pack[name]), wanted[name])


def test_one_file(device: str) -> None:
    """Serialized, loaded, executed: the same workspace, the same bits. The same pipeline gives the same bytes."""
    memory, (made, _) = Memory(device), pipeline(device, ("probabilities",))
    data = made.serialize()
    loaded = graphdnn.Pipeline.deserialize(data, device=device)
    assert (loaded.name, loaded.inputs, loaded.outputs, loaded.workspace_bytes) == ("three", made.inputs, made.outputs, made.workspace_bytes)
    assert loaded.explain() == made.explain() and pipeline(device, ("probabilities",))[0].serialize() == data
    values, found = numbers(6), []
    for p in (made, loaded):
        pack = {name: memory.put(v) for name, v in values.items()} | outputs(memory, probabilities=(B, M, N)) | {"scale": -1.5}
        p.execute(pack, workspace(memory, p))
        found.append([memory.get(pack[name]) for name in p.outputs])
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
