"""Recipes as data: a step with its buffers and kernel numbers changed, recipes one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from graphdnn.codegen.spec import Arg, Buffer, Check, Groups, KernelSpec, Launch, Listing, Matrix, Memset, Panels, Recipe, Step, TensorMap


def listings(step: Check) -> dict[str, Listing]:
    """The numbers in memory that a check reads, by field."""
    found = {f.name: getattr(step, f.name) for f in fields(step)}
    return {name: value for name, value in found.items() if isinstance(value, Listing)}


def mapped(step: Step, buffer: Callable[[Buffer], Buffer], kernel: Callable[[int], int] = lambda number: number) -> Step:
    """``step`` with every buffer and every kernel number changed."""

    def argument(a: Arg) -> Arg:
        if isinstance(a, Buffer):
            return buffer(a)
        return replace(a, buffer=buffer(a.buffer)) if isinstance(a, TensorMap) else a

    def launch(x: Launch) -> Launch:
        return replace(x, kernel=kernel(x.kernel), args=tuple(map(argument, x.args)))

    def matrix(m: Matrix) -> Matrix:
        return replace(m, buffer=buffer(m.buffer))

    if isinstance(step, Memset):
        return replace(step, buffer=buffer(step.buffer))
    if isinstance(step, Launch):
        return launch(step)

    def listing(x: Listing) -> Listing:
        return replace(x, buffer=buffer(x.buffer))

    if isinstance(step, Check):
        changed: dict[str, Any] = {name: listing(x) for name, x in listings(step).items()}
        return replace(step, **changed)
    pack_a, pack_b = (x and launch(x) for x in (step.pack_a, step.pack_b))
    if isinstance(step, Groups):
        step = replace(step, starts=listing(step.starts))
    return replace(step, a=matrix(step.a), b=matrix(step.b), panel=matrix(step.panel), epilogue=launch(step.epilogue), pack_a=pack_a, pack_b=pack_b)


def launches(recipe: Recipe) -> list[Launch]:
    """Every launch of a recipe, those inside panels too."""
    found: list[Launch] = []
    for s in recipe.steps:
        if isinstance(s, Launch):
            found.append(s)
        elif isinstance(s, Panels | Groups):
            found.extend(x for x in (s.pack_b, s.pack_a, s.epilogue) if x is not None)
    return found


def relaunched(step: Step, change: Callable[[Launch], Launch]) -> Step:
    """``step`` with every launch in it changed."""
    if isinstance(step, Launch):
        return change(step)
    if isinstance(step, Panels | Groups):
        pack_a, pack_b = (x and change(x) for x in (step.pack_a, step.pack_b))
        return replace(step, epilogue=change(step.epilogue), pack_a=pack_a, pack_b=pack_b)
    return step


def joined(recipes: Sequence[Recipe]) -> Recipe:
    """All of them, one after the other, in one workspace that each has for itself in its turn. Equal kernels are one."""
    if len(recipes) == 1:
        return recipes[0]
    numbers: dict[str, int] = {}
    kernels: list[KernelSpec] = []
    steps: list[Step] = []
    for r in recipes:
        own = []
        for k in r.kernels:
            if numbers.setdefault(k.digest(), len(kernels)) == len(kernels):
                kernels.append(k)
            own.append(numbers[k.digest()])
        steps += [mapped(s, lambda b: b, own.__getitem__) for s in r.steps]
    return Recipe(tuple(kernels), tuple(steps), max((r.workspace for r in recipes), default=0))
