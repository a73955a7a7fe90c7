"""The smallest loop nest: drop loops of extent 1, order loops by stride, merge neighbours that every index expression walks as one."""

from __future__ import annotations

from collections.abc import Sequence

from graphdnn.ir.index import Linear, Var, merge, merges


def ordered(variables: Sequence[Var], priority: Sequence[Linear]) -> list[Var]:
    """``variables`` from slowest to fastest: by coefficient in the first expression of ``priority``, ties by the next ones, then as given."""
    return sorted((v for v in variables if v.size != 1), key=lambda v: tuple(-abs(e.coefficient(v)) for e in priority))


def collapse(variables: Sequence[Var], expressions: Sequence[Linear]) -> tuple[list[Var], list[tuple[Var, Var, Var]]]:
    """Merge adjacent ``variables`` (slowest first) where all ``expressions`` allow it.

    Returns the remaining variables and the merges (outer, inner, merged), to be applied in this order with :func:`apply`.
    """
    result = list(variables)
    current = list(dict.fromkeys(expressions))
    done: list[tuple[Var, Var, Var]] = []
    k = len(result) - 2
    while k >= 0:
        outer, inner = result[k], result[k + 1]
        if all(merges(e, outer, inner) for e in current):
            merged = Var(inner.name, outer.size * inner.size)
            current = [merge(e, outer, inner, merged) for e in current]
            result[k : k + 2] = [merged]
            done.append((outer, inner, merged))
        k -= 1
    return result, done


def apply(e: Linear, merged: Sequence[tuple[Var, Var, Var]]) -> Linear:
    """``e`` after the merges."""
    for outer, inner, new in merged:
        e = merge(e, outer, inner, new)
    return e
