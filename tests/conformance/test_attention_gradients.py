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
    "lengths, alibi, dropout": Case(
        7, 8, 4, lengths=((7, 4), (5, 8)), window=(None, 0, False), alibi=True, dropout=0.375, bias=(2, 1, 1, 8), **DOUBLE
    ),
    "score_mod": Case(5, 7, 4, score_mod="softcap", **DOUBLE),
    "score_mod of a tensor, mask of weights": Case(5, 7, 4, score_mod="tensor", dropout_mask=True, **DOUBLE),
}
SLOW = ("lengths, alibi, dropout", "score_mod of a tensor, mask of weights")
OUTPUTS = {"q": "dq", "k": "dk", "v": "dv", "bias": "dbias", "sink": "dsink"}
STEP = 1e-5
KINDS = {D.DOUBLE: np.float64, D.FLOAT: np.float32, D.INT32: np.int32, D.INT64: np.int64, D.FP8_E8M0: np.uint8}


class Built:
    """A graph built once for the CPU and run on values by name."""

    def __init__(self, declare, **more):
        self.graph = graphdnn.pygraph(device="cpu", **more)
        declare(self.graph)
        built(self.graph)
        self.workspace = np.empty(self.graph.get_workspace_size(), np.uint8)

    def __call__(self, values):
        og, found, pack = self.graph._opgraph, {}, {}
        for i in (*og.inputs, *og.outputs):
            t = og.tensors[i]
            if i in og.outputs:
                pack[t.uid] = found[t.name] = np.empty(t.dim, KINDS[t.dtype])
            elif t.value is None:
                pack[t.uid] = np.ascontiguousarray(np.broadcast_to(values[t.name], t.dim), KINDS[t.dtype])
        self.graph.execute(pack, self.workspace)
        return found


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CASES])
def test_central_differences(name):
    """A step in a random direction changes sum(O * dO) by the gradient times the direction, to second order."""
    case, rng = CASES[name], np.random.default_rng(3)
    values = feeds(case)
    run, do = Built(forward(case, values), **arguments(case)), rng.standard_normal(case.dims["o"])
    start = run(values)
    values |= {"do": do, "o": start["o"], "stats": start["stats"]}
    gradients = Built(backward(case, values), **arguments(case))(values)
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


def attended(torch, case, given, values):
    """O and Stats by torch in float64: leaves ``given`` by name, everything else from ``values``."""
    k, v = (given[n].repeat_interleave(case.h // given[n].shape[1], dim=1) for n in "kv")
    row, col = torch.arange(case.s_q).reshape(-1, 1), torch.arange(case.s_kv)
    scores = given["q"] @ k.mT * case.scale + given.get("bias", 0.0)
    if case.alibi:  # a power of two of heads
        slopes = 2.0 ** (-8.0 * torch.arange(1, case.h + 1, dtype=torch.float64) / case.h)
        scores = scores + slopes.reshape(-1, 1, 1) * (col - row)
    if case.score_mod:
        scores = {"softcap": lambda: torch.tanh(scores / 3) * 3, "tensor": lambda: (scores + torch.tensor(values["extra"])) * 0.5}[case.score_mod]()
    rows, columns = (torch.tensor(n).reshape(-1, 1, 1, 1) for n in case.lengths or ((case.s_q,) * case.b, (case.s_kv,) * case.b))
    left, right, bottom = case.window
    row_at = row + (columns - rows if bottom else 0)
    keep = (col < columns) & (col <= row_at + (2 * case.s_kv if right is None else right)) & (col > row_at - (2 * case.s_q if left is None else left))
    scores = scores.masked_fill(~keep, float("-inf"))
    sinks = given["sink"].expand(case.b, case.h, case.s_q, 1) if case.sink else torch.full((case.b, case.h, case.s_q, 1), -1e300, dtype=torch.float64)
    stats = torch.logsumexp(torch.cat([scores, sinks], -1), -1, keepdim=True)
    weights = torch.exp(scores - stats)
    if case.dropout:
        weights = weights * torch.tensor(values["dump"]) / (1 - case.dropout)
    if case.dropout_mask:
        weights = weights * torch.tensor(values["drop"]) * float(values["drop_scale"])
    return torch.where(row < rows, weights @ v, 0.0), stats


TORCH = CASES | {"causal, in FLOAT": Case(18, 18, 8, h=4, h_k=2, window=(None, 0, False), bias=(2, 4, 18, 18))}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "groups, band, bias, sink" else pytest.mark.slow) for n in TORCH])
def test_torch_autograd(name):
    """Gradients of Q, K, V, the bias and the sink by torch."""
    import torch
    case = TORCH[name]
    values, rng = feeds(case), np.random.default_rng(4)
    given = {n: torch.tensor(values[n], dtype=torch.float64, requires_grad=True) for n in OUTPUTS if n in values}
    if case.dropout:  # which weights fall out is ours to say
        values |= {"dump": np.float64(Built(forward(case, values), **arguments(case))(values)["dump"])}
    o, stats = attended(torch, case, given, values)
    do = torch.tensor(rng.standard_normal(case.dims["o"]))
    wanted = torch.autograd.grad(o, list(given.values()), do)
    values |= {"o": o.detach().numpy(), "do": do.numpy(), "stats": stats.detach().numpy()}
    found = Built(backward(case, values), **arguments(case))(values)
    epsilon = 2.0**-24 if case.dtype is D.FLOAT else 2.0**-53
    for source, want in zip(given, wanted, strict=True):
        error = np.abs(found[OUTPUTS[source]] - want.numpy()).max() / np.abs(want.numpy()).max()
        assert error < 64 * epsilon, f"{OUTPUTS[source]}: {error}"
