"""Gradients of attention against what they are the gradients of: central differences of the built forward graph, and torch's autograd. No reference
of ours is asked."""

from __future__ import annotations

import numpy as np
import pytest

import graphdnn
from graphdnn import data_type as D
from tests.attention_cases import Case, arguments, backward, feeds, forward
from tests.helpers import built

DOUBLE = {"dtype": D.DOUBLE, "compute": D.DOUBLE}
CASES = {
    "groups, band, bias, sink": Case(6, 9, 5, d_v=3, h=4, h_k=2, h_v=1, window=(4, 2, True), bias=(1, 4, 6, 9), sink=True, **DOUBLE),
    "lengths, alibi, dropout": Case(7, 8, 4, lengths=((7, 4), (5, 8)), window=(None, 0, False), alibi=True, dropout=0.4, bias=(2, 1, 1, 8), **DOUBLE),
    "score_mod": Case(5, 7, 4, score_mod="softcap", **DOUBLE),
    "score_mod of a tensor, mask of weights": Case(5, 7, 4, score_mod="tensor", dropout_mask=True, **DOUBLE),
}
SLOW = ("lengths, alibi, dropout", "score_mod of a tensor, mask of weights")
OUTPUTS = {"q": "dq", "k": "dk", "v": "dv", "bias": "dbias", "sink": "dsink"}
STEP = 1e-5


class Built:
    """A graph built once for the CPU and run on values by name."""

    def __init__(self, case, values, declare):
        self.graph = graphdnn.pygraph(device="cpu", **arguments(case))
        declare(case, values)(self.graph)
        built(self.graph)
        self.workspace = np.empty(self.graph.get_workspace_size(), np.uint8)

    def __call__(self, values):
        og, found, pack = self.graph._opgraph, {}, {}
        for i in (*og.inputs, *og.outputs):
            t = og.tensors[i]
            if i in og.outputs:
                pack[t.uid] = found[t.name] = np.empty(t.dim, t.dtype.name.lower().replace("float", "float32").replace("double", "float64"))
            elif t.value is None:
                kind = {D.DOUBLE: np.float64, D.FLOAT: np.float32, D.INT32: np.int32, D.INT64: np.int64}[t.dtype]
                pack[t.uid] = np.ascontiguousarray(np.broadcast_to(values[t.name], t.dim), kind)
        self.graph.execute(pack, self.workspace)
        return found


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CASES])
def test_central_differences(name):
    """A step in a random direction changes sum(O * dO) by the gradient times the direction, to second order."""
    case, rng = CASES[name], np.random.default_rng(3)
    values = feeds(case)
    run, do = Built(case, values, forward), rng.standard_normal(case.dims["o"])
    start = run(values)
    values |= {"do": do, "o": start["o"], "stats": start["stats"]}
    gradients = Built(case, values, backward)(values)
    for source, result in OUTPUTS.items():
        if result not in gradients:
            continue
        way = rng.standard_normal(np.shape(values[source]))
        if source == "sink":  # a FLOAT tensor: a step that it can hold
            way, step = np.sign(way), 2.0**-10
        else:
            step = STEP
        ends = [np.sum(run(values | {source: values[source] + s * step * way})["o"] * do) for s in (1, -1)]
        found, wanted = np.sum(np.float64(gradients[result]) * way), (ends[0] - ends[1]) / (2 * step)
        tolerance = 1e-6 if source == "sink" else 1e-8
        scale = np.sum(np.abs(gradients[result] * way)) + np.sum(np.abs(start["o"] * do))
        assert abs(found - wanted) <= tolerance * scale, f"{result}: {found} by the graph, {wanted} by differences"


def test_torch_autograd():
    """Groups, a causal mask and a bias, in FLOAT."""
    torch = pytest.importorskip("torch")
    case = Case(18, 18, 8, h=4, h_k=2, window=(None, 0, False), bias=(2, 4, 18, 18))
    values, rng = feeds(case), np.random.default_rng(4)
    given = {n: torch.tensor(values[n], dtype=torch.float64, requires_grad=True) for n in ("q", "k", "v", "bias")}
    k, v = (given[n].repeat_interleave(2, dim=1) for n in "kv")
    scores = given["q"] @ k.mT * case.scale + given["bias"]
    scores = scores.masked_fill(~torch.ones(18, 18, dtype=torch.bool).tril(), float("-inf"))
    o, do = torch.softmax(scores, -1) @ v, torch.tensor(rng.standard_normal(case.dims["o"]))
    wanted = torch.autograd.grad(o, list(given.values()), do)
    values |= {"o": o.detach().numpy(), "do": do.numpy(), "stats": torch.logsumexp(scores, -1, keepdim=True).detach().numpy()}
    found = Built(case, values, backward)(values)
    for name, want in zip(("dq", "dk", "dv", "dbias"), wanted, strict=True):
        error = np.abs(found[name] - want.numpy()).max() / np.abs(want.numpy()).max()
        assert error < 64 * 2.0**-24, f"{name}: {error}"
