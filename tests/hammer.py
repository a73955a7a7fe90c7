"""Many threads execute one plan at the same time, and every result of every call is compared.

Inputs are small integers and factors halves, so that every sum is exact in float32 in any order: results are compared bit by bit with a float64
reference that torch computes on the CPU.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import graphdnn
from graphdnn import data_type

F32, BF16 = data_type.FLOAT, data_type.BFLOAT16
TYPES = {F32: torch.float32, BF16: torch.bfloat16}
A, B, FACTOR, Y, SUM = 1, 2, 3, 4, 5
SETS = 3
"""Sets of inputs that each thread has."""
NAN = float("nan")


def graph(device: str) -> Any:
    return graphdnn.pygraph(io_data_type=F32, intermediate_data_type=F32, compute_data_type=F32, device=device)


def inputs(g: Any, a: Sequence[int], b: Sequence[int], dtype: data_type = F32, layout: str = "row") -> tuple[Any, Any, Any]:
    x, y = (g.tensor(dim=d, layout=layout, data_type=dtype, name=n, uid=u) for d, n, u in ((a, "a", A), (b, "b", B)))
    return x, y, g.tensor(dim=[1] * len(a), layout="row", name="s", uid=FACTOR, is_pass_by_value=True)


def pointwise(device: str) -> Any:
    """y = relu((a + b) * s)."""
    g = graph(device)
    a, b, s = inputs(g, (2, 65, 64), (2, 65, 64))
    g.relu(g.mul(g.add(a, b), s)).set_output(True).set_uid(Y)
    return g


def matmul(device: str) -> Any:
    """y = a @ b * s and its sum: tensor cores, TMA descriptors and a workspace on a Hopper GPU."""
    g = graph(device)
    a, b, s = inputs(g, (256, 128), (128, 256), BF16)
    y = g.mul(g.matmul(a, b), s)
    y.set_output(True).set_uid(Y)
    g.reduction(y, graphdnn.reduction_mode.ADD).set_dim((1, 1)).set_output(True).set_uid(SUM)
    return g


def total(device: str) -> Any:
    """The sum of (a + b) * s: partial sums lie in the workspace."""
    g = graph(device)
    a, b, s = inputs(g, (2, 16384), (2, 16384))
    g.reduction(g.mul(g.add(a, b), s), graphdnn.reduction_mode.ADD).set_dim((1, 1)).set_output(True).set_uid(Y)
    return g


def convolution(device: str) -> Any:
    """y = relu(conv(a, b) * s), channels last."""
    g = graph(device)
    a, b, s = inputs(g, (2, 32, 14, 14), (32, 32, 3, 3), BF16, "channels_last")
    g.relu(g.mul(g.conv_fprop(image=a, weight=b, padding=[1, 1], stride=[1, 1], dilation=[1, 1]), s)).set_output(True).set_uid(Y)
    return g


KINDS: dict[str, tuple[Callable[[str], Any], Callable[[Any, Any, float], Any]]] = {
    "pointwise": (pointwise, lambda a, b, s: ((a + b) * s).relu()),
    "matmul": (matmul, lambda a, b, s: a @ b * s),
    "total": (total, lambda a, b, s: ((a + b) * s).sum().reshape(1, 1)),
    "convolution": (convolution, lambda a, b, s: (torch.nn.functional.conv2d(a, b, padding=1) * s).relu()),
}
"""Graphs, not built yet, and what Y is for inputs in float64."""


def built(kind: str, device: str) -> Any:
    """A built graph of KINDS."""
    g = KINDS[kind][0](device)
    g.build([graphdnn.heur_mode.A])
    return g


@dataclass(frozen=True)
class Values:
    """One set of inputs on a device, as a variant pack without outputs, and the outputs that belong to it by uid."""

    given: dict[int, Any]
    wanted: dict[int, Any]


def place(g: Any, uid: int, device: str) -> Any:
    """Memory for a tensor of the graph."""
    t = next(t for t in g.plan.graph.tensors if t.uid == uid)
    return torch.empty_strided(t.dim, t.stride, dtype=TYPES[t.dtype], device=device)


def values(g: Any, kind: str, device: str, seed: int) -> Values:
    """Random integers from -2 to 2."""
    made, factor = torch.Generator().manual_seed(seed), 0.5 * (1 + seed % 7)
    given = {uid: place(g, uid, "cpu") for uid in (A, B)}
    for tensor in given.values():
        tensor.copy_(torch.randint(-2, 3, tensor.shape, generator=made))
    y = KINDS[kind][1](given[A].double(), given[B].double(), factor)
    found = {Y: y, SUM: y.sum().reshape(1, 1)}
    wanted = {uid: place(g, uid, device).copy_(found[uid]) for uid in outputs(g)}
    return Values({uid: place(g, uid, device).copy_(t) for uid, t in given.items()} | {FACTOR: factor}, wanted)


def outputs(g: Any) -> list[int]:
    """Their uids."""
    return [g.plan.graph.tensors[i].uid for i in g.plan.graph.outputs]


def workspace(g: Any, device: str) -> Any:
    """0xFF, which is NaN."""
    return torch.full((max(g.get_workspace_size(), 1),), 0xFF, dtype=torch.uint8, device=device)


class Thread(threading.Thread):
    """``calls`` executions on a stream of its own, with two packs in turn whose inputs are changed in place now and then. ``wrong``: "", or what
    was not as it should be."""

    def __init__(self, g: Any, kind: str, device: str, number: int, calls: int) -> None:
        super().__init__()
        self.graph, self.place, self.number, self.calls, self.wrong = g, device, number, calls, "did not end"
        self.values = [values(g, kind, device, SETS * number + n) for n in range(SETS)]
        self.held = [0, 1]
        self.packs = [{uid: place(g, uid, device) for uid in (A, B, *outputs(g))} for _ in self.held]
        self.room = workspace(g, device)
        self.faults = {uid: torch.zeros(t.shape, dtype=torch.bool, device=device) for uid, t in self.values[0].wanted.items()}
        self.unequal = {uid: torch.zeros_like(t) for uid, t in self.faults.items()}
        self.stream = torch.cuda.Stream(device) if device.startswith("cuda") else None

    def run(self) -> None:
        try:
            with torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext():
                for call in range(self.calls):
                    self.execute(call)
                if self.stream:
                    self.stream.synchronize()
            bad = {uid: int(t.sum()) for uid, t in self.faults.items() if t.any()}
            self.wrong = f"thread {self.number}: elements by output that were wrong at least once: {bad}" if bad else ""
        except Exception as error:  # reported by the thread that waits for this one
            self.wrong = f"thread {self.number}: {error!r}"

    def execute(self, call: int) -> None:
        """One execution, through the graph and through the plan in turn, and the comparison behind it on the same stream."""
        which = call % 2
        pack = self.packs[which]
        if call < 2 or call % 16 >= 14:
            self.held[which] = (self.held[which] + 1) % SETS
            for uid, new in self.values[self.held[which]].given.items():
                pack[uid] = pack[uid].copy_(new) if uid != FACTOR else new
        for uid in self.faults:
            pack[uid].fill_(NAN)
        if call & 2:
            self.graph.execute(pack, self.room)
        else:
            self.graph.plan.execute(pack, self.room, self.stream.cuda_stream if self.stream else 0)
        for uid, fault in self.faults.items():
            torch.ne(pack[uid], self.values[self.held[which]].wanted[uid], out=self.unequal[uid])
            fault.logical_or_(self.unequal[uid])


def hammer(g: Any, kind: str, devices: Sequence[str], calls: int) -> list[str]:
    """What went wrong in a thread for each of ``devices``, which all execute ``g`` at the same time; nothing if every result was right."""
    threads = [Thread(g, kind, device, number, calls) for number, device in enumerate(devices)]
    for device in {d for d in devices if d.startswith("cuda")}:
        torch.cuda.synchronize(device)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [t.wrong for t in threads if t.wrong]
