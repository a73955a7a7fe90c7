"""Index arithmetic against plain integers: every simplification must keep the value at every point."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from graphdnn.ir.index import (
    Linear,
    Quotient,
    Remainder,
    Var,
    bounds,
    divide,
    equal,
    lane_step,
    linears,
    merge,
    merges,
    modulo,
    offset,
    reshaped,
    substitute,
    var,
)
from graphdnn.passes.collapse import apply, collapse


def value(e: Linear, at: dict[Var, int]) -> int:
    total = e.const
    for a, c in e.terms:
        if isinstance(a, Var):
            total += c * at[a]
        else:
            inner = value(a.of, at)
            total += c * (inner // a.by if isinstance(a, Quotient) else inner % a.by)
    return total


def points(variables: list[Var]) -> list[dict[Var, int]]:
    return [dict(zip(variables, p, strict=True)) for p in itertools.product(*(range(v.size) for v in variables))]


def test_divide_and_modulo_keep_values() -> None:
    rng = random.Random(0)
    for _ in range(300):
        variables = [Var(f"i{n}", rng.randint(1, 5)) for n in range(3)]
        e = Linear((), rng.randint(-4, 9))
        for v in variables:
            e = e + var(v).scaled(rng.choice((0, 1, 2, 3, 4, 6, 12)))
        by = rng.randint(1, 12)
        q, r = divide(e, by), modulo(e, by)
        for at in points(variables):
            assert value(q, at) == value(e, at) // by
            assert value(r, at) == value(e, at) % by
            assert bounds(q)[0] <= value(q, at) <= bounds(q)[1]
            assert bounds(r)[0] <= value(r, at) <= bounds(r)[1]


@pytest.mark.parametrize(("out", "source"), [((4, 6), (24,)), ((24,), (4, 6)), ((2, 3, 4), (6, 4)), ((6, 4), (2, 3, 4)), ((8, 3), (2, 4, 3))])
def test_a_reshape_that_merges_leaves_no_division(out: tuple[int, ...], source: tuple[int, ...]) -> None:
    loop = [Var(f"i{a}", d) for a, d in enumerate(out)]
    index = reshaped(tuple(var(v) for v in loop), out, source)
    strides = [1]
    for d in reversed(source[1:]):
        strides.insert(0, strides[0] * d)
    total = Linear()
    for i, s in zip(index, strides, strict=True):
        total = total + i.scaled(s)
    want = {at: n for n, at in enumerate(itertools.product(*(range(d) for d in out)))}
    for at, number in want.items():
        assert value(total, dict(zip(loop, at, strict=True))) == number
    if len(source) < len(out):
        assert not any(isinstance(a, (Quotient, Remainder)) for e in linears(total) for a, _ in e.terms)


def test_a_reshape_that_does_not_merge_is_right() -> None:
    out, source = (3, 8), (4, 6)
    loop = [Var("i", 3), Var("j", 8)]
    index = reshaped(tuple(var(v) for v in loop), out, source)
    for at in points(loop):
        number = at[loop[0]] * 8 + at[loop[1]]
        assert [value(i, at) for i in index] == [number // 6, number % 6]


@pytest.mark.parametrize(("dim", "view"), [((4, 6, 5), (2, 2, 2, 3, 5)), ((24, 5), (4, 6, 5)), ((8, 9), (6, 12)), ((4, 1, 6), (2, 12, 1))])
def test_a_reshape_and_back_is_where_it_was(dim: tuple[int, ...], view: tuple[int, ...]) -> None:
    loop = [Var(f"i{a}", d) for a, d in enumerate(dim)]
    index = tuple(var(v) for v in loop)
    moved = reshaped(index, dim, view)
    assert equal(reshaped(moved, view, dim), index)
    for at in points(loop):
        assert 0 <= min(value(i, at) for i in moved) and all(value(i, at) < d for i, d in zip(moved, view, strict=True))
    packed = tuple(math.prod(view[a + 1 :]) for a in range(len(view)))
    assert equal((offset(moved, packed),), (offset(index, tuple(math.prod(dim[a + 1 :]) for a in range(len(dim)))),)), "memory order is kept"


def test_substitute_keeps_values_and_simplifies() -> None:
    rng = random.Random(1)
    i, j, g, n = Var("i", 12), Var("j", 3), Var("g", 3), Var("n", 4)
    for _ in range(200):
        inner = var(i).scaled(rng.choice((1, 2, 3))) + var(j).scaled(rng.choice((1, 4, 6))).shifted(rng.randint(0, 3))
        e = divide(inner, rng.randint(1, 6)).scaled(rng.randint(1, 5)) + modulo(inner, rng.randint(1, 6)).scaled(rng.randint(1, 5))
        new = substitute(e, {i: var(g).scaled(4) + var(n)})
        for at in points([g, n, j]):
            assert value(new, at) == value(e, {i: at[g] * 4 + at[n], j: at[j]})
    assert substitute(Linear(((Quotient(var(i), 4), 1),)), {i: var(g).scaled(4) + var(n)}) == var(g)


def test_lane_steps() -> None:
    i, j = Var("i", 4), Var("j", 24)
    heads = [divide(var(j), 8), modulo(var(j), 8)]
    split = heads[0].scaled(80) + heads[1] + var(i).scaled(8)
    assert lane_step(split, j, 8) == lane_step(split, j, 4) == 1 and lane_step(split, j, 16) is None
    assert lane_step(modulo(divide(var(j), 8), 2) + var(j).scaled(3), j, 8) == 3
    rng = random.Random(2)
    for _ in range(400):
        inner = var(j).scaled(rng.choice((1, 1, 2))) + var(i).scaled(rng.choice((1, 2, 4, 8))).shifted(rng.choice((0, 0, 1, 4)))
        by, width = rng.randint(1, 12), rng.choice((2, 4, 8))
        e = divide(inner, by).scaled(rng.randint(1, 5)) + modulo(inner, by).scaled(rng.randint(0, 3)) + var(j).scaled(rng.randint(0, 1))
        step = lane_step(e, j, width)
        steps = {value(e, at | {j: at[j] + 1}) - value(e, at) for at in points([i, j]) if at[j] % width < width - 1}
        assert step is None or steps == {step}


def test_collapse_merges_what_is_walked_as_one() -> None:
    i, j, k = Var("i", 3), Var("j", 4), Var("k", 5)
    packed = var(i).scaled(20) + var(j).scaled(5) + var(k)
    kept, merged = collapse([i, j, k], [packed])
    assert [v.size for v in kept] == [60]
    assert apply(packed, merged) == var(kept[0])
    padded = var(i).scaled(24) + var(j).scaled(6) + var(k)
    kept, _ = collapse([i, j, k], [packed, padded])
    assert [v.size for v in kept] == [12, 5]
    kept, _ = collapse([i, j, k], [packed, var(j)])
    assert [v.size for v in kept] == [3, 4, 5]


def test_merge_only_where_it_holds() -> None:
    i, j = Var("i", 3), Var("j", 4)
    e = Linear(((Quotient(var(i).scaled(4) + var(j), 5), 2),))
    assert merges(e, i, j)
    new = Var("n", 12)
    assert merge(e, i, j, new) == Linear(((Quotient(var(new), 5), 2),))
    assert not merges(var(j), i, j)
