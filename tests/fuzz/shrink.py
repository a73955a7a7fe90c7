"""Make a failing program smaller while it goes on failing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from graphdnn.ir.layout import packed
from tests.fuzz.program import Input, Program, needed

BUDGET = 60
"""Programs tried."""


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """The smallest program found that ``fails``; ``program`` itself if nothing smaller does."""
    tried, progress = 0, True
    while progress:
        progress = False
        for smaller in candidates(program):
            tried += 1
            if tried > BUDGET:
                return program
            if fails(smaller):
                program, progress = smaller, True
                break
    return program


def candidates(program: Program) -> Iterator[Program]:
    """Programs one step smaller: an output dropped, an op cut off from what makes its operand, plain layouts, plain inputs."""
    program = program.without_expectations()
    yield from _without_an_output(program)
    for op in program.ops:
        if op.out_stride is not None and op.out_dim is not None and not op.ragged and op.out_stride != packed(op.out_dim):
            yield _with_op(program, op.out, out_stride=packed(op.out_dim), out_offset=0)
    for i in program.inputs:
        if i.mode == "buffer" and not i.ragged and (i.stride != packed(i.dim) or i.offset):
            yield _with_input(program, replace(i, stride=packed(i.dim), offset=0))
        if i.mode == "buffer" and i.dtype not in ("FLOAT", "INT32"):
            yield _with_input(program, replace(i, dtype="INT32" if "INT" in i.dtype or i.dtype == "BOOLEAN" else "FLOAT"))


def _without_an_output(program: Program) -> Iterator[Program]:
    outputs = [o for o in program.ops if o.output]
    for op in program.ops:
        read = {a for o in program.ops for a in o.reads}
        if any(name not in read for _, name, _ in op.extra):
            yield _live(_with_op(program, op.out, extra=tuple(e for e in op.extra if e[1] in read)))
    for op in reversed(outputs):
        if len(outputs) > 1:
            yield _live(_with_op(program, op.out, output=False))
    for op in reversed(program.ops):
        feeders = [o for o in program.ops if o.out in op.reads]
        if op.output and len(outputs) == 1:
            for feeder in feeders:
                if feeder.out_dim is not None and feeder.out_stride is not None:
                    yield _live(_with_op(_with_op(program, op.out, output=False), feeder.out, output=True, out_dtype=feeder.out_dtype or "FLOAT"))


def _live(program: Program) -> Program:
    """Without ops and inputs that no output depends on."""
    wanted: set[str] = set()
    ops = []
    for op in reversed(program.ops):
        if op.lasting or wanted & set(op.results):
            ops.append(op)
            wanted.update(op.reads)
    return replace(program, ops=tuple(ops[::-1]), inputs=needed(program.inputs, ops))


def _with_op(program: Program, name: str, **changes: object) -> Program:
    return replace(program, ops=tuple(replace(o, **changes) if o.out == name else o for o in program.ops))  # type: ignore[arg-type]


def _with_input(program: Program, changed: Input) -> Program:
    return replace(program, inputs=tuple(changed if i.name == changed.name else i for i in program.inputs))
