"""``graph.bind`` on every target: bound, updated and raw calls give the bits of ``execute``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphdnn
from graphdnn.errors import ValidationError

F32 = graphdnn.data_type.FLOAT


def memory(device: str, array: Any) -> Any:
    """The array where the plan runs."""
    if not device.startswith("cuda:"):
        return array
    import torch

    return torch.from_numpy(array).to(device)


def host(array: Any) -> Any:
    """Its values."""
    return array if isinstance(array, np.ndarray) else array.cpu().numpy()


def scaled_matmul(device: str) -> tuple[Any, Any]:
    """(x @ w) * s + b, and a second output that sums its squares: several steps, a by-value number, on a CPU a workspace."""
    g = graphdnn.pygraph(io_data_type=F32, intermediate_data_type=F32, compute_data_type=F32, device=device)
    x = g.tensor(name="x", dim=[2, 5, 7], stride=[35, 7, 1], uid=1)
    w = g.tensor(name="w", dim=[2, 7, 6], stride=[42, 6, 1], uid=2)
    b = g.tensor(name="b", dim=[1, 1, 6], stride=[6, 6, 1], uid=3)
    s = g.tensor(name="s", dim=[1, 1, 1], stride=[1, 1, 1], is_pass_by_value=True, uid=4)
    y = g.add(a=g.mul(a=g.matmul(A=x, B=w), b=s), b=b)
    y.set_output(True).set_uid(5)
    g.build([graphdnn.heur_mode.A])
    return g, x


def buffers(device: str, seed: int) -> dict[Any, Any]:
    """Random inputs, an output full of NaN."""
    rng = np.random.default_rng(seed)
    made: dict[Any, Any] = {u: rng.standard_normal(d, np.float32) for u, d in ((1, (2, 5, 7)), (2, (2, 7, 6)), (3, (1, 1, 6)))}
    made[5] = np.full((2, 5, 6), np.nan, np.float32)
    return {u: memory(device, a) for u, a in made.items()} | {4: float(rng.standard_normal())}


def test_bound_updated_and_raw_calls_are_every_form_of_execute(device: str) -> None:
    g, x = scaled_matmul(device)
    workspace = memory(device, np.zeros(max(g.get_workspace_size(), 1), np.uint8))
    first, second = buffers(device, 1), buffers(device, 2)
    for pack in (first, second):
        g.execute(pack, workspace)
    wanted = [host(pack[5]).copy() for pack in (first, second)]
    a, c, bias, s = (np.asarray(host(first[u]), np.float64) if u != 4 else first[4] for u in (1, 2, 3, 4))
    np.testing.assert_allclose(wanted[0], a @ c * s + bias, rtol=1e-5, atol=1e-5)

    def result(call: Any, pack: dict[Any, Any]) -> Any:
        pack[5][:] = np.nan
        call()
        return host(pack[5])

    run = g.bind(first, workspace)
    assert run.uids == (1, 2, 3, 5)
    for _ in range(2):
        np.testing.assert_array_equal(result(run, first), wanted[0])
    assert run.update({"x": second[1], 2: second[2], 3: second[3], 4: second[4], 5: second[5]}) is run
    np.testing.assert_array_equal(result(run, second), wanted[1])
    with pytest.raises(ValidationError, match="too small"):
        run.update({x: first[1], 5: memory(device, np.zeros(3, np.float32))})
    np.testing.assert_array_equal(result(run, second), wanted[1])
    run.update({x: first[1]}).update({2: first[2], 3: first[3], 4: first[4]})
    np.testing.assert_array_equal(result(run, second), wanted[0])
    raw = [p.data_ptr() if hasattr(p, "data_ptr") else p.ctypes.data for p in (first[u] for u in run.uids)]
    np.testing.assert_array_equal(result(lambda: run.run(raw), first), wanted[0])
    np.testing.assert_array_equal(result(run, second), wanted[0])
