"""Make a drawn program worth running: ops whose reference is mostly NaN, infinite, or without a finite error bound are replaced.

A random chain soon takes logarithms of negative numbers or floors of values near integers. What such an op gives cannot be compared, nor can what
follows from it, so the first bad op becomes a tame one of the same operands, or an input of the same shape, until none is left.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

import graphdnn
from graphdnn import reference
from graphdnn.ir.layout import packed
from tests.fuzz.generator import METHODS, generate
from tests.fuzz.program import Input, Op, Program, declare, needed
from tests.fuzz.shapes import Limits
from tests.helpers import Setup

TAME = {1: "tanh", 2: "max", 3: "binary_select"}
"""A method that is harmless on any operands, by their number."""
ODD_SHARE = 0.25
"""NaN or infinite elements that an op may have."""
LOOSE_SHARE = 0.04
"""Elements without a finite bound that it may have."""


@lru_cache(maxsize=64)
def tame(seed: int, limits: Limits) -> Program:
    """The program of ``seed`` with no bad op."""
    program = generate(seed, limits)
    for _ in range(4 * len(program.ops) + 4):
        bad = first_bad(program)
        if bad is None:
            return program
        program = repaired(program, *bad)
    return program


def first_bad(program: Program) -> tuple[Op, tuple[int, ...]] | None:
    """The first op whose values cannot be compared, with its dims."""
    g = graphdnn.pygraph(device="cpu", **program.graph_arguments())
    tensors = declare(program, g)
    g.validate()
    g.build_operation_graph()
    setup = Setup(g._opgraph, "cpu", program.binding)
    setup.fill(**program.feeding())
    results = reference.run_with_error(g._opgraph, setup.feeds())
    ids = {t.name: i for i, t in enumerate(g._opgraph.tensors)}
    for op in program.ops:
        plain = {a for o in program.ops for a in o.reads} | {op.out} - {*op.ragged}
        if any(_odd(*results[ids[n]], finite=n in plain) for n in op.results if n in ids and ids[n] in results):
            return op, tuple(tensors[op.out].get_dim())
    return None


def _odd(value: Any, bound: Any, *, finite: bool) -> bool:
    """Whether too much of a tensor is without a bound or, where that matters to what follows, not finite."""
    odd = 0 if value.dtype.kind == "i" or not finite else np.count_nonzero(~np.isfinite(value))
    return bool(odd > ODD_SHARE * value.size or np.count_nonzero(np.isinf(bound)) > LOOSE_SHARE * value.size)


def repaired(program: Program, op: Op, dim: tuple[int, ...]) -> Program:
    """``op`` replaced by a tame one, by one that reduces tamely, or by an input."""
    tame = TAME.get(len(op.args))  # an op whose operands have names is cut
    if op.method in METHODS and tame not in (None, op.method):
        return _with(program, op, replace(op, method=tame, kwargs={}))
    if op.method == "reduction" and op.kwargs["mode"] != "MAX":
        return _with(program, op, replace(op, kwargs=op.kwargs | {"mode": "MAX"}))
    cut = Input(op.out, dim, packed(dim), op.out_dtype or "FLOAT")
    lost, rest = {name for _, name, _ in op.extra}, []
    for o in program.ops:
        if o is op or lost & {*o.reads}:  # what reads another result of the op goes with it
            lost |= set(o.results) - {op.out}
        else:
            rest.append(o)
    if not any(o.lasting for o in rest):
        rest.append(Op("identity", (op.out,), "only", out_dtype="FLOAT", output=True))
    rest = _kept(rest)
    return replace(program, inputs=needed((*program.inputs, cut), rest), ops=tuple(rest)).without_expectations()


def _kept(ops: list[Op]) -> list[Op]:
    """Ops that an output depends on."""
    wanted: set[str] = set()
    kept = []
    for o in reversed(ops):
        if o.lasting or wanted & set(o.results):
            kept.append(o)
            wanted.update(o.reads)
    return kept[::-1]


def _with(program: Program, old: Op, new: Op) -> Program:
    return replace(program, ops=tuple(new if o is old else o for o in program.ops))
