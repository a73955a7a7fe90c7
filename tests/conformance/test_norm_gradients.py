"""Forward and backward of normalizations and softmax in one graph, in DOUBLE on the CPU: against torch, and backward against central differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import graphdnn
from graphdnn import data_type, norm_forward_phase

F = torch.nn.functional
DIM, EPSILON = (3, 4, 2, 5), 1e-3
C, LAST, INNER = (1, 4, 1, 1), (1, 1, 1, 5), (1, 4, 2, 5)
TRAINING = norm_forward_phase.TRAINING


@dataclass
class Op:
    """``parameters``: dims of scale and bias, if there are any. ``declare(g, x, dy, *parameters)``: Y, then the gradients of x and the parameters."""

    parameters: tuple[tuple[int, ...], ...]
    declare: Callable[..., list[Any]]
    torch: Callable[..., Any]


def norm(method: str, *more: Any) -> Callable[..., list[Any]]:
    def declare(g, x, dy, s, b):
        y, mean, inverse = getattr(g, method)(TRAINING, x, s, b, EPSILON, *more)
        dx, ds, db = getattr(g, f"{method}_backward")(dy, x, s, mean, inverse)
        return [y, dx, ds.set_dim(s.get_dim()), db.set_dim(b.get_dim())]

    return declare


def rmsnorm(g, x, dy, s, b):
    y, inverse = g.rmsnorm(TRAINING, x, s, b, EPSILON)
    dx, ds, db = g.rmsnorm_backward(dy, x, s, inverse, True)
    return [y, dx, ds.set_dim(LAST), db.set_dim(LAST)]


def batchnorm(g, x, dy, s, b):
    y, mean, inverse, _, _ = g.batchnorm(x, s, b, None, None, EPSILON, None)
    return [y, *g.batchnorm_backward(dy, x, s, mean, inverse)]


def batchnorm_by_parts(g, x, dy, s, b):
    """genstats, bn_finalize, dbn_weight."""
    scale, offset, mean, inverse, _, _ = g.bn_finalize(*g.genstats(x), s, b, EPSILON, 30)
    ds, db, rest, of_dy, of_x = g.dbn_weight(dy, x, mean, inverse, s)
    return [g.add(g.mul(x, scale), offset), g.add(g.add(g.mul(dy, of_dy), g.mul(x, of_x)), rest), ds, db]


def softmax(method: str) -> Callable[..., list[Any]]:
    def declare(g, x, dy):
        y = getattr(g, method)(x, 1)
        return [y, getattr(g, f"{method}_backward")(dy, y, 1)]

    return declare


def flat(t):
    return t.ravel()


OPS = {
    "layernorm": Op((LAST, LAST), norm("layernorm"), lambda x, s, b: F.layer_norm(x, DIM[3:], flat(s), flat(b), EPSILON)),
    "layernorm of samples": Op((INNER, INNER), norm("layernorm"), lambda x, s, b: F.layer_norm(x, DIM[1:], s[0], b[0], EPSILON)),
    "rmsnorm": Op((LAST, LAST), rmsnorm, lambda x, s, b: F.rms_norm(x, DIM[3:], flat(s), EPSILON) + b),
    "adalayernorm": Op(((3, 1, 1, 5),) * 2, norm("adalayernorm"), lambda x, s, b: F.layer_norm(x, DIM[3:], eps=EPSILON) * s + b),
    "instancenorm": Op((C, C), norm("instancenorm"), lambda x, s, b: F.instance_norm(x, weight=flat(s), bias=flat(b), eps=EPSILON)),
    "groupnorm": Op((C, C), norm("groupnorm", 2), lambda x, s, b: F.group_norm(x, 2, flat(s), flat(b), EPSILON)),
    "batchnorm": Op((C, C), batchnorm, lambda x, s, b: F.batch_norm(x, None, None, flat(s), flat(b), True, eps=EPSILON)),
    "batchnorm by parts": Op((C, C), batchnorm_by_parts, lambda x, s, b: F.batch_norm(x, None, None, flat(s), flat(b), True, eps=EPSILON)),
    "softmax": Op((), softmax("softmax"), lambda x: torch.softmax(x, 1)),
    "log_softmax": Op((), softmax("log_softmax"), lambda x: torch.log_softmax(x, 1)),
}


class Runner:
    """One op's graph, run on arrays."""

    def __init__(self, op: Op) -> None:
        double = data_type.DOUBLE
        g = self.graph = graphdnn.pygraph(io_data_type=double, intermediate_data_type=double, compute_data_type=double, device="cpu")
        self.inputs = [g.tensor(dim=d, layout="row") for d in (DIM, DIM, *op.parameters)]
        self.outputs = [t.set_output(True) for t in op.declare(g, *self.inputs)]
        g.build([graphdnn.heur_mode.A])
        self.workspace = np.zeros(g.get_workspace_size(), np.uint8)

    def __call__(self, *arrays: Any) -> list[Any]:
        results = [np.full(np.prod(t.get_dim()), np.nan) for t in self.outputs]
        bytes_of = [[8 * s for s in t.get_stride()] for t in self.outputs]
        results = [np.lib.stride_tricks.as_strided(r, t.get_dim(), s) for r, t, s in zip(results, self.outputs, bytes_of, strict=True)]
        self.graph.execute(dict(zip((*self.inputs, *self.outputs), (*arrays, *results), strict=True)), self.workspace)
        return results


def differences(run: Runner, arrays: list[Any], at: int, step: float = 1e-6) -> Any:
    """Gradient of sum(dY * Y) in input ``at`` by central differences."""
    found = np.zeros(arrays[at].shape)
    for place in np.ndindex(found.shape):
        values = []
        for way in (step, -step):
            moved = arrays[at].copy()
            moved[place] += way
            values.append(np.sum(arrays[1] * run(*arrays[:at], moved, *arrays[at + 1 :])[0]))
        found[place] = (values[0] - values[1]) / (2 * step)
    return found


@pytest.mark.parametrize("name", OPS)
def test_gradients(name):
    op = OPS[name]
    run, rng = Runner(op), np.random.default_rng(3)
    arrays = [rng.standard_normal(d) for d in (DIM, DIM, *op.parameters)]
    y, *gradients = run(*arrays)
    x, dy, *parameters = (torch.tensor(a, requires_grad=True) for a in arrays)
    want = op.torch(x, *parameters)
    np.testing.assert_allclose(y, want.detach().numpy(), rtol=1e-9, atol=1e-12)
    want.backward(dy.detach())
    for at, (found, leaf) in enumerate(zip(gradients, (x, *parameters), strict=True)):
        np.testing.assert_allclose(found, leaf.grad.numpy(), rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(found, differences(run, arrays, at if at == 0 else at + 1), rtol=1e-6, atol=1e-7)


def test_gradient_of_logsumexp():
    double = data_type.DOUBLE
    g = graphdnn.pygraph(io_data_type=double, intermediate_data_type=double, compute_data_type=double, device="cpu")
    x, dy = g.tensor(dim=[3, 7], layout="row"), g.tensor(dim=[3], layout="row")
    y = g.logsumexp(x, 1).set_output(True)
    dx = g.logsumexp_backward(dy, x, y, 1).set_output(True)
    g.build([graphdnn.heur_mode.A])
    a = torch.randn(3, 7, dtype=torch.float64, generator=torch.manual_seed(0), requires_grad=True)
    pack = {x: a.detach(), dy: torch.tensor([1.0, -2.0, 3.0]).double(), y: torch.empty(3).double(), dx: torch.empty(3, 7).double()}
    g.execute(pack, np.zeros(g.get_workspace_size(), np.uint8))
    want = torch.logsumexp(a, 1)
    want.backward(pack[dy])
    torch.testing.assert_close(pack[y], want.detach())
    torch.testing.assert_close(pack[dx], a.grad)
    found, start = torch.zeros(3, 7).double(), a.detach().clone()
    for place in np.ndindex(3, 7):
        ends = []
        for step in (1e-6, -1e-6):
            pack[x] = start.clone()
            pack[x][place] += step
            g.execute(pack | {dx: torch.empty(3, 7).double()}, np.zeros(g.get_workspace_size(), np.uint8))
            ends.append(torch.sum(pack[y] * pack[dy]))
        found[place] = (ends[0] - ends[1]) / 2e-6
    torch.testing.assert_close(found, a.grad, rtol=1e-6, atol=1e-7)
