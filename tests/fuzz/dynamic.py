"""Random programs whose extents are dims: the dynamic graph at the program's own shape and at others, against the reference of a graph that was
declared for each shape, and an exception only where the graph of this shape has one."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from typing import Any

import graphdnn
from graphdnn import Dim, GraphError, ValidationError, reference
from graphdnn.frontend.symbols import LARGEST, DimExpr
from graphdnn.plans.dynamic import numbered
from tests.fuzz.anchors import family
from tests.fuzz.program import Dims, Input, Op, Program, declare
from tests.helpers import Outcome, Setup, _compare, _run_plan

SMALL = (0, 1, 1, 2, 3, 4, 5, 7, 8, 16, 17)
EXTENTS = (*SMALL, *SMALL, 24, 31, 32, 33, 64, 97, 128, 257, 512)
"""Small ones, primes, sizes around tiles, large ones."""
TRIES = 8
"""Shapes that are tried for each that is run: many are no shapes of the program."""
ROOM = {"cpu": 1 << 13, "cudasim": 400}
"""Elements of a tensor of a changed shape; on a GPU as on a CPU."""
SAME, BOTH = "same numbers", "refused by both"
SET = ("conv_dgrad", "conv_wgrad", "reshape", "resample_backward", "sdpa", "sdpa_backward", "reduction")
"""Methods whose results have the dims that were set."""


@dataclass
class Dynamic:
    """A program with dims: names of the dims of each input's axes ("" for a number), the values that give the program its own shape, and the results
    whose dims are left to inference because no dim says them. ``dims``: what the graph is declared with."""

    program: Program
    axes: dict[str, tuple[str, ...]]
    own: dict[str, int]
    inferred: frozenset[str] = frozenset()

    def at(self, values: dict[str, int]) -> Program:
        """The program of another shape, its extents and strides numbers."""
        return self.with_extents(dict(values))

    def with_extents(self, values: dict[str, Any]) -> Program:
        """The program with numbers or dims for the dims' names."""
        inputs = tuple(replace(i, **self._shape(i, values)) for i in self.program.inputs)
        ops = tuple(self._op(o, values) for o in self.program.ops)
        return replace(self.program, inputs=inputs, ops=ops, expect={})

    def _op(self, op: Op, values: dict[str, Any]) -> Op:
        """An op whose set dims and strides follow."""
        made = tuple(replace(m, dim=self.extents(op, m.dim, values)) for m in op.made)
        further = tuple((i, name, *self._laid(op, dim, stride, values)) for i, name, dim, stride in op.further)
        op = replace(op, made=made, further=further)
        if op.out_dim is None or op.out in self.inferred:
            return replace(op, out_dim=None, out_stride=None)
        dim, stride = self._laid(op, op.out_dim, op.out_stride, values)
        return replace(op, out_dim=dim, out_stride=stride)

    def _laid(self, op: Op, dim: Dims, stride: Dims | None, values: dict[str, Any]) -> tuple[Dims, Dims | None]:
        new = self.extents(op, dim, values)
        return new, None if stride is None else strides(dim, stride, new)

    def extents(self, op: Op, dim: Dims, values: dict[str, Any]) -> tuple[Any, ...]:
        """Set dims in terms of the dims: the dim of this extent, for a reshape also the product of two, or a multiple."""
        return tuple(e if e < 2 else self._extent(op, e, values) for e in dim)

    def _extent(self, op: Op, e: int, values: dict[str, Any]) -> Any:
        if f"d{e}" in values or op.method != "reshape":
            return values.get(f"d{e}", e)
        known = sorted((d, name) for name, d in self.own.items() if d >= 2)
        for (d, one), (f, other) in combinations_with_replacement(known, 2):
            if d * f == e:
                return values[one] * values[other]
        return next((values[name] * (e // d) for d, name in reversed(known) if e % d == 0), e)

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
    """Equal extents from 2 share a dim; of those of 1 and 0 a few are dims of their own. Tensors of given values keep their extents, and mostly
    nothing else has a dim of these extents either."""
    r, own, axes = random.Random(seed), {}, {}
    lonely, loose = r.random() < 0.3, r.random() < 0.15
    still = {d for i in program.inputs if _fixed(i) for d in i.dim} if not loose else set()
    for i in program.inputs:
        if i.mode != "buffer" or _fixed(i):
            continue
        names = []
        for a, d in enumerate(i.dim):
            if d not in still and (d >= 2 or (lonely and r.random() < 0.4)):
                name = f"d{d}" if d >= 2 else f"{i.name}_{a}"
                own[name] = d
                names.append(name)
            else:
                names.append("")
        axes[i.name] = tuple(names)
    if not own:
        return None
    made = Dynamic(program, axes, own)
    signs = {n: ("dim", n) for n in own}
    unknown = {o.out for o in program.ops if o.out_dim and o.method not in SET and not _said(made.extents(o, o.out_dim, signs))}
    inferred = replace(made, inferred=frozenset(unknown))
    return inferred if _shaped(inferred.at(own), "cpu") is not None else made


def _fixed(i: Input) -> bool:
    return i.data.kind == "values" or bool(i.ragged)


def _said(extents: Sequence[Any]) -> bool:
    """Whether every extent from 2 is a dim."""
    return all(isinstance(e, tuple) or e < 2 for e in extents)


def _shaped(program: Program, device: str) -> Any:
    """The graph of a program of numbers with its operation graph; None where it is refused."""
    g = graphdnn.pygraph(device=device, **program.graph_arguments())
    try:
        declare(program, g)
        g.validate()
        g.build_operation_graph()
    except GraphError:
        return None
    return g


def shapes(d: Dynamic, r: random.Random, device: str, count: int) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    """The program's own shape and up to ``count`` others; and a few that are refused."""
    room, top = ROOM.get(device, ROOM["cpu"]), 40 if device == "cudasim" else LARGEST
    found, refused = [d.own], []
    for _ in range(TRIES * count):
        changed = dict(d.own)
        for name in r.sample(sorted(d.own), r.choice((1, r.randint(1, len(d.own)), len(d.own)))):
            changed[name] = r.choice([e for e in EXTENTS if e <= top])
        if changed in found or changed in refused:
            continue
        g = _shaped(d.at(changed), device)
        if g is None:
            refused.append(changed)
        elif all(math.prod(t.dim) <= room for t in g._opgraph.tensors):
            found.append(changed)
        if len(found) > count:
            break
    return found, refused[:2]


def declared(d: Dynamic, r: random.Random, valid: Sequence[dict[str, int]]) -> dict[str, Dim]:
    """Dims whose hints are one of the valid shapes, not always the program's own; ranges that are narrow or not, multiples where all are."""
    hints, made = valid[0] if r.random() < 0.5 else r.choice(valid), {}
    for name in d.own:
        taken = [v[name] for v in valid]
        multiple = max(1, math.gcd(*taken)) if r.random() < 0.2 else 1
        top = max(*taken, 1) * multiple if r.random() < 0.75 else LARGEST
        made[name] = Dim(name, min(taken) if r.random() < 0.5 else 0, top, multiple_of=multiple, hint=hints[name])
    return made


def check_dynamic(program: Program, device: str, seed: int, count: int = 3) -> list[str]:
    """What became of each shape: SAME or "refused", and "SAME: family" for each changed shape with a family; AssertionError for a difference."""
    d = made_dynamic(program, seed)
    if d is None:
        return []
    r = random.Random(seed + 1)
    valid, refused = shapes(d, r, device, count)
    g = graphdnn.pygraph(device=device, **program.graph_arguments())
    declare(d.with_extents(declared(d, r, valid)), g)
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([graphdnn.heur_mode.A, graphdnn.heur_mode.FALLBACK])
    index = _built(g, r)
    done = [_refused(g, d, values, device) for values in refused]
    for values in valid:
        done.append(_at(g, d, values, device, index, r.random() < 0.5, any(was.startswith(BOTH) for was in done)))
    changed = done.count(SAME) - 1
    return done + [f"{SAME}: {f}" for f in sorted({family(o.method) for o in program.ops}) for _ in range(changed)]


def _built(g: Any, r: random.Random) -> int:
    """Build the best plan or, now and then, another one; its number."""
    g.check_support()
    if r.random() < 0.4 and g.get_execution_plan_count() > 1:
        index = r.randrange(g.get_execution_plan_count())
        try:
            g.build_plan_at_index(index)
            return index
        except GraphError:  # a plan that does not fit, such as one of the tuner's
            pass
    g.build_plans()
    return int(g._plans.chosen_index)


def _at(g: Any, d: Dynamic, values: dict[str, int], device: str, index: int, by_arrays: bool, again: bool) -> str:
    """What became of a shape. ``again``: values in memory that were refused at another shape, also without dims, may be so here too."""
    program = d.at(values)
    static = _shaped(program, device)
    told = Told(g, values, index, by_arrays)
    og, bound = static._opgraph, told.operation_graph()
    alike = [t.dim for t in og.tensors] == [t.dim for t in bound.tensors]
    assert alike or 1 in values.values(), f"at {values} the dims of tensors differ"
    feeding = program.feeding()
    setup = Setup(bound, device, program.binding)
    setup.fill(feeding["seed"], feeding["data"], feeding["offsets"], feeding["values"])
    outcome = Outcome(told)
    try:
        _run_plan(setup, None, 2, outcome)
    except Exception as error:
        if again and isinstance(error, graphdnn.ExecutionError):
            return f"{BOTH}: {type(error).__name__}"
        try:
            static.build([graphdnn.heur_mode.A, graphdnn.heur_mode.FALLBACK])
            _run_plan(setup, None, 1, Outcome(static))
        except type(error):
            return f"{BOTH}: {type(error).__name__}"
        raise AssertionError(f"at {values} the dynamic graph raises {type(error).__name__}: {error}") from error
    og = og if alike else bound  # an op may infer other dims from a declared 1; here those of the other extents (gradients of a scale)
    wanted = reference.run_with_error(og, setup.feeds(), told.plan().algorithms)
    try:
        _compare(setup, wanted, outcome)
    except AssertionError as error:
        raise AssertionError(f"at {values}, plan {index} ({g._plans.plan_at(index).name}): {error}") from error
    return SAME if alike else f"{SAME} as other extents, not as a 1"


def _refused(g: Any, d: Dynamic, values: dict[str, int], device: str) -> str:
    """The graph of a shape is refused: so must the dynamic one be, by the same class, or as a shape outside the dims' ranges."""
    try:
        static = graphdnn.pygraph(device=device, **d.program.graph_arguments())
        declare(d.at(values), static)
        static.validate()
        static.build_operation_graph()
    except GraphError as error:
        try:
            Told(g, values, int(g._plans.chosen_index), False).plan()
        except GraphError as found:
            alike = type(found) is type(error) or "outside its range" in str(found)
            assert alike, f"at {values} {type(found).__name__} ({found}) for {type(error).__name__} ({error})"
            return "refused"
    raise AssertionError(f"at {values} a graph of this shape is refused, the dynamic one is not")


class Told:
    """One plan of a graph that is told its dims, by the shapes of the arrays if these know them."""

    def __init__(self, graph: Any, dims: dict[str, int], index: int, by_arrays: bool) -> None:
        self._graph, self._dims, self._index = graph, {n: dims[n] for n in graph.dims}, index
        self._by_arrays = by_arrays

    def get_workspace_size(self) -> int:
        """What this shape needs, which is no more than what a user is told, at the latest after the call that says so."""
        try:
            size = int(self.plan().workspace_bytes)
        except ValidationError as error:
            if "more workspace than get_workspace_size" not in str(error):
                raise
            assert "get_workspace_size() again" in str(error)
            self._graph.get_workspace_size_plan_at_index(self._index)
            size = int(self.plan().workspace_bytes)
        told = self._graph.get_workspace_size_plan_at_index(self._index)
        assert size <= told, f"a shape needs more workspace ({size}) than was said ({told})"
        return size

    def execute(self, pack: Any, workspace: Any) -> None:
        if self._by_arrays:
            try:
                return self._graph.execute_plan_at_index(pack, workspace, self._index)
            except ValidationError as error:
                if not re.search(r"the extent of dim '\w+' is not known", str(error)):
                    raise
        self._graph.execute_plan_at_index(pack, workspace, self._index, dims=self._dims)

    def operation_graph(self) -> Any:
        """With the strides that the outputs have; of plain numbers where there is no plan for them."""
        try:
            self.get_workspace_size()
            return numbered(self.plan().graph)
        except GraphError:
            return self._graph._frozen_at(self._dims)

    def plan(self) -> Any:
        """The plan of this shape."""
        return self._graph._for_call(self._graph._plans.plan_at(self._index), {}, self._dims, 0)
