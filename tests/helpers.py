"""Run a graph through the public API on guarded buffers and compare every output with the float64 reference.

A test gives a builder, a function that declares tensors and ops on a ``pygraph`` and marks outputs; :func:`check_graph` does the rest on any device:
random inputs with the declared strides inside guarded buffers, outputs and workspace full of 0xFF, the five steps, one or several executions,
comparison, and a check that no byte outside the outputs' elements has changed.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import graphdnn
from graphdnn import reference
from graphdnn.dtypes import data_type, info
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.opspecs import registry
from graphdnn.passes.canonicalize import canonicalize
from graphdnn.passes.expand import viewed
from tests.buffers import GUARD, Array, Guarded, aligned_bytes, decode, encode, fenced, fenced_bytes

Builder = Callable[[Any], Any]
DEVICES = ("cpu", "cudasim", "cuda:0")
EVERY_PLAN = os.environ.get("TEST_EVERY_PLAN") == "1"
"""Whether graphs run with every plan that builds, unless a test says otherwise, and not only with the best one."""


# ------------------------------------------------------------------------------------------------------------------------------------- input data
@dataclass(frozen=True)
class Data:
    """How one input is filled. ``kind``: normal (mean 0, deviation ``hi``), uniform, grid (multiples of ``step`` in lo..hi), special (uniform with
    infinities, NaN, both zeros, the largest and the smallest value mixed in), full (every value of an integer type), values (given)."""

    kind: str = "normal"
    lo: float = -1.0
    hi: float = 1.0
    step: float = 1.0
    values: Any = None


def given(values: Any) -> Data:
    """These values, broadcast to the tensor's dims."""
    return Data("values", values=values)


def default_data(dtype: data_type) -> Data:
    """Small integers for integer types, N(0, 1) for the others."""
    kind = info(dtype).kind
    if kind == "f":
        return Data("normal")
    if kind == "b":
        return Data("grid", 0, 1)
    return Data("grid", max(-8, info(dtype).limits[0]), 7)


def draw(rng: np.random.Generator, dim: tuple[int, ...], dtype: data_type, data: Data) -> Array:
    """Values of shape ``dim`` that ``dtype`` represents exactly, as float64 or int64."""
    row = info(dtype)
    if data.kind == "values":
        values = np.broadcast_to(np.asarray(data.values), dim)
    elif dtype is data_type.FP8_E8M0:
        values = 2.0 ** rng.integers(-3, 4, dim)
    elif data.kind == "normal":
        values = rng.standard_normal(dim) * data.hi
    elif data.kind == "grid":
        values = rng.integers(round(data.lo / data.step), round(data.hi / data.step) + 1, dim) * data.step
    elif data.kind == "full":
        values = rng.integers(int(row.limits[0]), int(row.limits[1]), dim, endpoint=True)
    else:
        values = rng.uniform(data.lo, data.hi, dim)
    if data.kind == "special":
        extremes = np.array(_extremes(dtype))
        values = np.where(rng.random(dim) < 0.4, extremes[rng.integers(0, len(extremes), dim)], values)
    return representable(np.asarray(values), dtype)


SMALLEST = {data_type.FLOAT: 2.0**-149, data_type.DOUBLE: 2.0**-1074, data_type.HALF: 2.0**-24, data_type.BFLOAT16: 2.0**-133}
"""Smallest positive (subnormal) value of the wider float types."""


def _extremes(dtype: data_type) -> list[float]:
    """Values at which arithmetic changes its ways."""
    lowest, highest = info(dtype).limits
    if dtype is data_type.DOUBLE:  # squares stay finite: whether a product that overflows does so inside an FMA is left open by the contract
        lowest, highest = -1e150, 1e150
    if info(dtype).kind != "f":
        return [lowest, highest, 0, 1, -1]
    tiny = SMALLEST.get(dtype, 0.0)
    return [np.nan, np.inf, -np.inf, 0.0, -0.0, highest, lowest, tiny, -tiny, 1.0]


def representable(values: Array, dtype: data_type) -> Array:
    """``values`` rounded into ``dtype`` (clipped to its finite range; NaN and infinities stay where the type has them)."""
    row = info(dtype)
    if row.kind == "b":
        return (np.asarray(values) != 0).astype(np.int64)
    if row.kind == "i":
        whole = np.asarray(values)
        if whole.dtype.kind == "f":
            whole = whole.clip(-(2.0**63), np.nextafter(2.0**63, 0))
        return whole.astype(np.int64).clip(*(int(x) for x in row.limits))
    if row.bits < 16:  # fp8 and fp4: no infinity is stored by us, NaN where the type has one
        values = np.clip(np.nan_to_num(values, nan=0.0) if row.bits == 4 else values, *row.limits)
    with np.errstate(over="ignore", invalid="ignore"):
        return decode(encode(values, dtype), dtype)


# -------------------------------------------------------------------------------------------------------------------------------------- tolerance
def assert_close(name: str, got: Array, value: Array, bound: Array, dtype: data_type) -> int:
    """Every element within its derived bound; returns how many have none (infinite) and were not compared.

    There is no slack: ``reference.run_with_error`` carries an interval for every element through the graph, the roundings of each tensor's data type,
    the stated ulps of functions and any order of summation included.
    """
    assert got.shape == np.shape(value), f"'{name}' has shape {got.shape}, expected {np.shape(value)}"
    wrong = reference.mismatches(got, value, bound)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        worst = f"first at {list(at)}: found {got[at]!r}, expected {value[at]!r} within {bound[at]:.3g}"
        raise AssertionError(f"'{name}' ({dtype.name} {list(got.shape)}): {int(wrong.sum())} of {got.size} elements are wrong, {worst}")
    return int(np.isinf(bound).sum())


# ------------------------------------------------------------------------------------------------------------------------------------------ running
@dataclass
class Outcome:
    """What a run gave: logical values of each output by tensor name, what was expected, and how many elements could not be compared."""

    graph: Any
    outputs: dict[str, Array] = field(default_factory=dict)
    expected: dict[str, Array] = field(default_factory=dict)
    elements: int = 0
    excluded: int = 0
    plans: int = 0

    def __repr__(self) -> str:
        return f"Outcome({len(self.outputs)} outputs, {self.elements} elements, {self.excluded} excluded, {self.plans} plans)"


def built(graph: Any, policy: Any = None, barred: Iterable[str] = ()) -> Any:
    """The five steps on ``graph``, without the engines ``barred``."""
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([graphdnn.heur_mode.A, graphdnn.heur_mode.FALLBACK])
    if barred:
        graph.deselect_engines(list(barred))
    graph.check_support()
    graph.build_plans(policy or graphdnn.build_plan_policy.HEURISTICS_CHOICE)
    return graph


@dataclass
class Setup:
    """One graph's buffers: guarded blocks of inputs and outputs and the numbers of by-value tensors, all by tensor id of the operation graph."""

    operation_graph: Any
    device: str
    binding: str
    buffers: dict[int, Guarded] = field(default_factory=dict)
    numbers: dict[int, float | int] = field(default_factory=dict)

    def fill(self, seed: int, data: Mapping[str, Data], offsets: Mapping[str, int], values: Mapping[str, float | int]) -> None:
        """Draw the inputs, clear the outputs."""
        og, packed = self.operation_graph, _packed(self.operation_graph)
        for i in sorted((*og.inputs, *og.outputs), key=lambda i: i in packed):
            t = og.tensors[i]
            if t.constant or t.by_value:
                if t.value is None:
                    self.numbers[i] = values[t.name]
                continue
            if i in packed:
                starts, lengths = (self.buffers[n].read().reshape(-1) for n in packed[i])
                rows = lengths if lengths.size == t.dim[0] else np.diff(starts)
                buffer = Guarded.packed(t.dim, t.stride, t.dtype, starts[:-1], rows, fence=fenced(self.device))
            else:
                buffer = Guarded.make(t.dim, t.stride, t.dtype, offsets.get(t.name, 0), fence=fenced(self.device))
            if i not in og.outputs:
                rng = np.random.default_rng([seed, zlib.crc32(t.name.encode())])
                buffer.write(draw(rng, t.dim, t.dtype, data.get(t.name, default_data(t.dtype))))
            buffer.freeze()
            self.buffers[i] = buffer

    def feeds(self) -> dict[int, Any]:
        """What the reference takes: logical arrays and numbers."""
        og = self.operation_graph
        stored = {i: og.tensors[i].value for i in og.inputs if og.tensors[i].value is not None}
        return stored | self.numbers | {i: self.buffers[i].read() for i in og.inputs if i in self.buffers}

    def pack(self) -> dict[int, Any]:
        """A variant pack by uid."""
        og = self.operation_graph
        make = {"numpy": lambda b: b.numpy_view(), "torch": lambda b: b.torch_view(self.device), "pointer": lambda b: b.address(self.device)}
        how = "torch" if self.binding == "numpy" and self.device.startswith("cuda:") else self.binding
        return {og.tensors[i].uid: make[how](b) for i, b in self.buffers.items()} | {og.tensors[i].uid: v for i, v in self.numbers.items()}

    def clear_outputs(self) -> None:
        """Outputs as they were before the first run."""
        for i in self.operation_graph.outputs:
            buffer = self.buffers[i]
            assert buffer.snapshot is not None
            buffer.block[:] = buffer.snapshot

    def fetch(self) -> None:
        """Bring results back from a GPU."""
        for buffer in self.buffers.values():
            buffer.fetch()

    def assert_undamaged(self) -> None:
        """No byte has changed but those of the outputs' elements."""
        og = self.operation_graph
        for i, buffer in self.buffers.items():
            problem = buffer.damage(written=i in og.outputs)
            assert not problem, f"tensor '{og.tensors[i].name}': {problem}"


def _packed(graph: Any) -> dict[int, tuple[int, int]]:
    """Tensor id of every packed tensor -> ids of its offsets and of its lengths (page tables: the offsets again, whose differences they are)."""
    found = {}
    for n in graph.nodes:
        ports = dict(n.inputs) | dict(n.outputs)
        for port, offsets in n.inputs:
            if port.startswith("Ragged_"):
                of = port.removeprefix("Ragged_")
                kind = "SEQ_LEN_KV" if of in ("K", "V", "dK", "dV") else "SEQ_LEN_Q"
                found[ports[of]] = (offsets, offsets if of.startswith("Page") else ports[kind])
    return found


class Workspace:
    """Guarded scratch memory of a plan, full of 0xFF."""

    def __init__(self, size: int, device: str) -> None:
        self.size, self.device = size, device
        self.block = fenced_bytes(GUARD + size) if fenced(device) else aligned_bytes(GUARD + size + GUARD)
        self.block[:] = 0xFF
        self.block[:GUARD] = self.block[GUARD + size :] = 0xA5
        self.on_device: Any = None

    def argument(self) -> Any:
        """What ``execute`` takes."""
        if not self.device.startswith("cuda:"):
            return self.block[GUARD : GUARD + self.size]
        import torch

        self.on_device = torch.from_numpy(self.block).to(self.device)
        return self.on_device[GUARD : GUARD + self.size]

    def assert_undamaged(self) -> None:
        """Its guards are intact."""
        block = self.block if self.on_device is None else self.on_device.cpu().numpy()
        assert (block[:GUARD] == 0xA5).all() and (block[GUARD + self.size :] == 0xA5).all(), "a kernel wrote outside the workspace"


def check_graph(
    build: Builder,
    device: str,
    *,
    seed: int = 0,
    data: Mapping[str, Data] | None = None,
    offsets: Mapping[str, int] | None = None,
    values: Mapping[str, float | int] | None = None,
    binding: str = "numpy",
    graph: Mapping[str, Any] | None = None,
    after_validate: Callable[[Any], None] | None = None,
    runs: int = 2,
    every_plan: bool = EVERY_PLAN,
    may_exclude: float = 0.05,
    barred: Iterable[str] = (),
) -> Outcome:
    """Build what ``build`` declares, run it on ``device`` and compare every output with the reference.

    ``data``, ``offsets`` (elements), ``values`` (by-value tensors): by tensor name. ``binding``: "numpy", "torch" or "pointer". ``graph``: arguments
    of ``pygraph``. ``runs``: executions of each plan, which must give the same bits. ``every_plan``: all candidates that build, not only the best.
    ``may_exclude``: share of output elements whose reference has no finite error bound and that are therefore not compared.
    ``barred``: engines ("eng5") that no plan may use.
    """
    g = graphdnn.pygraph(device=device, **(graph or {}))
    build(g)
    g.validate()
    if after_validate is not None:
        after_validate(g)
    built(g, graphdnn.build_plan_policy.ALL if every_plan else None, barred)
    setup = Setup(g._opgraph, device, binding)
    setup.fill(seed, data or {}, offsets or {}, values or {})
    wanted = reference.run_with_error(setup.operation_graph, setup.feeds())
    assert_composites_agree(g, setup, wanted)
    outcome = Outcome(g)
    for index in [i for i in range(g.get_execution_plan_count()) if not barred or _unbarred(g, i, barred)] if every_plan else (None,):
        _run_plan(setup, index, runs, outcome)
        _compare(setup, _by_plan(setup, g.plan if index is None else g._plans.plan_at(index), wanted), outcome)
        outcome.plans += 1
    assert outcome.excluded <= may_exclude * outcome.elements, f"{outcome.excluded} of {outcome.elements} elements have no finite error bound"
    return outcome


def _unbarred(g: Any, index: int, barred: Iterable[str]) -> bool:
    """Whether a plan uses none of the engines ``barred``."""
    return not {f"eng{c.engine}" for c in g._plans.plan_at(index).choices} & set(barred)


def _by_plan(setup: Setup, plan: Any, wanted: Mapping[int, Any]) -> Mapping[int, Any]:
    """``wanted`` with the bounds of the algorithms that a plan uses."""
    return reference.run_with_error(setup.operation_graph, setup.feeds(), plan.algorithms) if plan.algorithms else wanted


def assert_composites_agree(graph: Any, setup: Setup, wanted: Mapping[int, Any]) -> None:
    """The references of composite ops, which know nothing of what they expand to, agree with the expanded graph within its bounds (and with what
    float64 loses, for outputs that are exact or DOUBLE).

    Bounds say what float32 kernels of the expansion may give, each rounded in the end: the exact value may lie just outside. Where it does, both are
    compared again with DOUBLE in place of FLOAT."""
    if not any(registry.spec(n.op).expand for n in graph._nodes):
        return
    declared, _ = canonicalize(viewed(graph._nodes), list(graph._tensors))
    ids = {t.uid: i for i, t in enumerate(setup.operation_graph.tensors)}
    feeds = setup.feeds()
    unread = [i for i in declared.inputs if declared.tensors[i].uid not in ids]  # by what the ops expand to
    given_feeds = {i: feeds[ids[declared.tensors[i].uid]] for i in declared.inputs if i not in unread}
    given_feeds |= dict.fromkeys(unread, 0)
    wide: tuple[dict[int, Array], dict[int, Array]] | None = None
    for i, got in reference.run(declared, given_feeds).items():
        t = declared.tensors[i]
        value, bound = wanted[ids[t.uid]]
        bound = bound + 2.0**-44 * np.abs(value[np.isfinite(value)]).max(initial=0.0)
        if reference.mismatches(got, value, bound).any():
            wide = wide or (reference.run(in_double(declared), given_feeds), reference.run(in_double(setup.operation_graph), feeds))
            got, value = wide[0][i], wide[1][ids[t.uid]]
        assert_close(f"{t.name}, by the reference of its op", got, value, bound, t.dtype)


def in_double(graph: OperationGraph) -> OperationGraph:
    """``graph`` with DOUBLE wherever it has FLOAT."""
    wide = data_type.DOUBLE
    tensors = tuple(replace(t, dtype=wide) if t.dtype is data_type.FLOAT else t for t in graph.tensors)
    return OperationGraph(tensors, tuple(replace(n, compute=wide) if n.compute is data_type.FLOAT else n for n in graph.nodes))


def _run_plan(setup: Setup, index: int | None, runs: int, outcome: Outcome) -> None:
    g, before = outcome.graph, None
    size = g.get_workspace_size() if index is None else g.get_workspace_size_plan_at_index(index)
    for _ in range(runs):
        setup.clear_outputs()
        pack, workspace = setup.pack(), Workspace(size, setup.device)
        if index is None:
            g.execute(pack, workspace.argument())
        else:
            g.execute_plan_at_index(pack, workspace.argument(), index)
        setup.fetch()
        setup.assert_undamaged()
        workspace.assert_undamaged()
        now = {i: setup.buffers[i].block.tobytes() for i in setup.operation_graph.outputs}
        assert before is None or before == now, "two runs of one plan gave different bits"
        before = now


def _compare(setup: Setup, wanted: Mapping[int, Any], outcome: Outcome) -> None:
    og = setup.operation_graph
    for i in og.outputs:
        t = og.tensors[i]
        got = setup.buffers[i].read()
        value, bound = wanted[i]
        if setup.buffers[i].inside is not None:
            got = np.where(setup.buffers[i].inside, got, value)
        outcome.outputs[t.name], outcome.expected[t.name] = got, value
        outcome.elements += got.size
        outcome.excluded += assert_close(t.name, got, value, bound, t.dtype)
