"""Random programs whose extents are dims: the dynamic graph at the program's own shape and at others, against the reference of a graph that was
declared for each shape, and an exception only where the graph of this shape has one."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import graphdnn
from graphdnn import Dim, GraphError, reference
from graphdnn.frontend.symbols import DimExpr
from tests.fuzz.program import Dims, Input, Op, Program, declare
from tests.helpers import Outcome, Setup, _compare, _run_plan, built

EXTENTS = (0, 1, 1, 2, 3, 4, 5, 7, 8, 16, 17)
LARGEST = 1 << 13
"""Elements of a tensor of a changed shape."""


@dataclass
class Dynamic:
    """A program with dims: names of the dims of each input's axes ("" for a number), the values that give the program its own shape."""

    program: Program
    axes: dict[str, tuple[str, ...]]
    own: dict[str, int]

    def at(self, values: dict[str, int]) -> Program:
        """The program of another shape, its extents and strides numbers."""
        return self._with(dict(values))

    def symbolic(self) -> Program:
        """The program with dims for extents."""
        return self._with({n: Dim(n, 0, max(64, v), hint=v) for n, v in self.own.items()})

    def _with(self, values: dict[str, Any]) -> Program:
        inputs = tuple(replace(i, **self._shape(i, values)) for i in self.program.inputs)
        ops = tuple(self._op(o, values) for o in self.program.ops)
        return replace(self.program, inputs=inputs, ops=ops, expect={})

    def _op(self, op: Op, values: dict[str, Any]) -> Op:
        """An op whose set dims are the shared dims of their extents."""
        if op.out_dim is None or op.out_stride is not None:
            return op
        return replace(op, out_dim=tuple(values.get(f"d{e}", e) for e in op.out_dim))

    def _shape(self, i: Input, values: dict[str, Any]) -> dict[str, Any]:
        names = self.axes.get(i.name)
        if names is None:
            return {}
        dim = tuple(values[n] if n else d for n, d in zip(names, i.dim, strict=True))
        return {"dim": dim, "stride": strides(i.dim, i.stride, dim)}


def strides(dim: Dims, stride: Dims, new: tuple[Any, ...]) -> tuple[Any, ...]:
    """``stride`` of ``dim`` carried over to other extents: the same order of axes and the same gaps."""
    found: list[Any] = list(stride)
    before: Any = None
    for a in sorted((a for a in range(len(dim)) if stride[a]), key=lambda a: (stride[a], dim[a])):
        if before is not None:
            low, extent, wide = before
            gap = stride[a] - stride[low] * dim[low]
            found[a] = found[low] * (new[low] if isinstance(new[low], DimExpr) else max(new[low], 1)) + gap if gap >= 0 else stride[a]
        before = (a, dim[a], found[a])
    return tuple(found)


def made_dynamic(program: Program, seed: int) -> Dynamic | None:
    """Equal extents from 2 share a dim; of those of 1 and 0 a few are dims of their own. Tensors of given values keep their extents."""
    r, own, axes = random.Random(seed), {}, {}
    lonely = r.random() < 0.3
    for i in program.inputs:
        if i.mode != "buffer" or i.data.kind == "values" or i.ragged:
            continue
        names = []
        for a, d in enumerate(i.dim):
            if d >= 2 or (lonely and r.random() < 0.4):
                name = f"d{d}" if d >= 2 else f"{i.name}_{a}"
                own[name] = d
                names.append(name)
            else:
                names.append("")
        axes[i.name] = tuple(names)
    return Dynamic(program, axes, own) if own else None


def shapes(d: Dynamic, seed: int, count: int) -> list[dict[str, int]]:
    """The program's own shape and ``count`` others."""
    r, found = random.Random(seed), [d.own]
    for n in range(count):
        changed = dict(d.own)
        for name in r.sample(sorted(d.own), r.randint(1, len(d.own)) if n else 1):
            changed[name] = r.choice(EXTENTS)
        found.append(changed)
    return found


def check_dynamic(program: Program, device: str, seed: int, count: int = 2) -> list[str]:
    """What became of each shape: "same numbers", "refused"; AssertionError for a difference."""
    d = made_dynamic(program, seed)
    if d is None:
        return []
    g = graphdnn.pygraph(device=device, **program.graph_arguments())
    declare(d.symbolic(), g)
    built(g)
    return [_at(g, d, values, device) for values in shapes(d, seed, count)]


def _at(g: Any, d: Dynamic, values: dict[str, int], device: str) -> str:
    program = d.at(values)
    static = graphdnn.pygraph(device=device, **program.graph_arguments())
    try:
        declare(program, static)
        static.validate()
        static.build_operation_graph()
    except GraphError as error:
        return _refused(g, values, error)
    og, bound = static._opgraph, g._frozen_at({n: values[n] for n in g.dims})
    assert [t.dim for t in og.tensors] == [t.dim for t in bound.tensors], "the dims of a shape differ"
    if any(math.prod(t.dim) > LARGEST for t in og.tensors):
        return "too large"
    feeding = program.feeding()
    setup = Setup(bound, device, program.binding)
    setup.fill(feeding["seed"], feeding["data"], feeding["offsets"], feeding["values"])
    told = _Told(g, values)
    outcome = Outcome(told)
    try:
        _run_plan(setup, None, 2, outcome)
    except Exception as error:
        try:
            built(static)
            _run_plan(setup, None, 1, Outcome(static))
        except type(error):
            return f"refused by both: {type(error).__name__}"
        raise AssertionError(f"at {values} the dynamic graph raises {type(error).__name__}: {error}") from error
    algorithms = told.plan().algorithms
    wanted = reference.run_with_error(og, setup.feeds(), algorithms) if algorithms else reference.run_with_error(og, setup.feeds())
    try:
        _compare(setup, wanted, outcome)
    except AssertionError as error:
        raise AssertionError(f"at {values}: {error}") from error
    return "same numbers"


def _refused(g: Any, values: dict[str, int], error: GraphError) -> str:
    """The graph of a shape is refused: so must the dynamic one be, by a class of its own."""
    try:
        _Told(g, values).plan()
    except GraphError as found:
        if type(found) is not type(error):
            return f"refused: {type(found).__name__} for {type(error).__name__}"
        return "refused"
    raise AssertionError(f"at {values} a graph of this shape is refused ({error}), the dynamic one is not")


class _Told:
    """A graph that is told its dims."""

    def __init__(self, graph: Any, dims: dict[str, int]) -> None:
        self._graph, self._dims = graph, {n: dims[n] for n in graph.dims}

    def get_workspace_size(self) -> int:
        """What this shape needs, which is no more than what a user is told."""
        size = int(self.plan().workspace_bytes)
        assert size <= self._graph.get_workspace_size(), "a shape needs more workspace than get_workspace_size() said"
        return size

    def execute(self, pack: Any, workspace: Any) -> None:
        self._graph.execute(pack, workspace, dims=self._dims)

    def plan(self) -> Any:
        return self._graph._for_call(self._graph.plan, {}, self._dims, 0)
