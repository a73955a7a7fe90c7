"""Index arithmetic: linear expressions over loop variables, with explicit quotients and remainders where a reshape does not merge.

``divide`` and ``modulo`` simplify with the known ranges, so that a reshape that only splits or merges dims leaves no division behind. Used for
buffer offsets, logical coordinates (gen_index) and predicates (concatenate); ``merge`` rewrites two loop variables as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from graphdnn.ir.extent import share, varies


@dataclass(frozen=True, slots=True)
class Var:
    """A loop variable with values 0 .. size-1."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Quotient:
    """Floor of ``of`` over ``by``."""

    of: Linear
    by: int


@dataclass(frozen=True, slots=True)
class Remainder:
    """``of`` modulo ``by``."""

    of: Linear
    by: int


Atom = Var | Quotient | Remainder


@dataclass(frozen=True, slots=True)
class Linear:
    """const + sum of coefficient * atom; no zero coefficients, each atom once."""

    terms: tuple[tuple[Atom, int], ...] = ()
    const: int = 0

    def coefficient(self, atom: Atom) -> int:
        """Coefficient of ``atom`` (0 if absent)."""
        return next((c for a, c in self.terms if a == atom), 0)

    def __add__(self, other: Linear) -> Linear:
        sums: dict[Atom, int] = dict(self.terms)
        for a, c in other.terms:
            sums[a] = sums.get(a, 0) + c
        return Linear(tuple((a, c) for a, c in sums.items() if c), self.const + other.const)

    def scaled(self, by: int) -> Linear:
        """Every coefficient and the constant times ``by``."""
        return Linear(tuple((a, c * by) for a, c in self.terms) if by else (), self.const * by)

    def shifted(self, by: int) -> Linear:
        """Constant plus ``by``."""
        return Linear(self.terms, self.const + by)


ZERO = Linear()
Index = tuple[Linear, ...]
"""One expression a dim."""


def var(v: Var) -> Linear:
    """The variable itself; 0 if it can only be 0."""
    return Linear(((v, 1),)) if v.size > 1 or varies(v.size) else ZERO


def bounds(e: Linear | Atom) -> tuple[int, int]:
    """Smallest and largest value."""
    if isinstance(e, Var):
        return 0, max(e.size - 1, 0)
    if isinstance(e, Quotient):
        lo, hi = bounds(e.of)
        return lo // e.by, hi // e.by
    if isinstance(e, Remainder):
        lo, hi = bounds(e.of)
        return 0, min(e.by - 1, hi) if lo >= 0 else e.by - 1
    lo = hi = e.const
    for a, c in e.terms:
        alo, ahi = bounds(a)
        lo += c * (alo if c > 0 else ahi)
        hi += c * (ahi if c > 0 else alo)
    return lo, hi


def _split(e: Linear, by: int) -> tuple[Linear, Linear]:
    """``e`` = by * first + second, with all of ``e`` that is divisible by ``by`` in the first."""
    whole = Linear(tuple((a, share(c, by)) for a, c in e.terms if _divides(by, c)), e.const // by)
    rest = Linear(tuple((a, c) for a, c in e.terms if not _divides(by, c)), e.const % by)
    return whole, rest


def _divides(by: int, factor: int) -> bool:
    """Whether ``factor`` is a multiple of ``by``, and would be if an extent that varies were not 1."""
    return factor % by == 0 and (not varies(by) or int(by) != 1 or varies(factor))


def divide(e: Linear, by: int) -> Linear:
    """Floor of e / by, without a division where the ranges allow it."""
    if by == 1:
        return e
    whole, rest = _split(e, by)
    lo, hi = bounds(rest)
    if lo // by == hi // by:
        return whole.shifted(lo // by)
    return whole + Linear(((Quotient(rest, by), 1),))


def modulo(e: Linear, by: int) -> Linear:
    """e modulo by, without a division where the ranges allow it."""
    if by == 1:
        return ZERO
    _, rest = _split(e, by)
    lo, hi = bounds(rest)
    if lo // by == hi // by:
        return rest.shifted(-(lo // by) * by)
    return Linear(((Remainder(rest, by), 1),))


def atoms(e: Linear) -> Iterator[Atom]:
    """Every atom in ``e``, those inside quotients and remainders first."""
    for a, _ in e.terms:
        if not isinstance(a, Var):
            yield from atoms(a.of)
        yield a


def linears(e: Linear) -> Iterator[Linear]:
    """``e`` and every linear expression inside it."""
    yield e
    for a, _ in e.terms:
        if not isinstance(a, Var):
            yield from linears(a.of)


def depends(e: Linear, v: Var) -> bool:
    """Whether ``v`` occurs anywhere in ``e``."""
    return any(a == v for a in atoms(e))


def slope(e: Linear, v: Var) -> float:
    """How fast ``e`` grows with ``v`` from one value to the next, with quotients as real numbers. A factor 1 that varies counts as more than 1."""
    total = 0.0
    for a, c in e.terms:
        steps = float(a == v) if isinstance(a, Var) else slope(a.of, v) / (a.by if isinstance(a, Quotient) else 1)
        total += steps * (1.5 if varies(c) and int(c) == 1 else c)
    return total


def lane_step(e: Linear, v: Var, width: int) -> int | None:
    """How much ``e`` grows with ``v`` inside every group of ``width`` values that starts at a multiple of ``width``; None if that is not one number.
    A remainder by a multiple of ``width`` runs on inside a group, the quotient stays."""
    total = 0
    for a, c in e.terms:
        step = int(a == v) if isinstance(a, Var) else _atom_step(a, v, width)
        if step is None:
            return None
        total += c * step
    return total


def _atom_step(a: Quotient | Remainder, v: Var, width: int) -> int | None:
    step = lane_step(a.of, v, width)
    if not step:
        return step
    group = step * width  # what is divided starts a group at a multiple of this, and stays below the next one
    aligned = step == a.of.coefficient(v) > 0 and all(c % group == 0 or b == v for b, c in a.of.terms) and a.of.const % group == 0
    if not aligned or a.by % group:
        return None
    return step if isinstance(a, Remainder) else 0


def rewrite(e: Linear, terms: Callable[[Linear], Linear]) -> Linear:
    """Apply ``terms`` to every linear expression of ``e``, innermost first."""
    inner: list[tuple[Atom, int]] = [(a if isinstance(a, Var) else type(a)(rewrite(a.of, terms), a.by), c) for a, c in e.terms]
    return terms(Linear(tuple(inner), e.const))


def merges(e: Linear, outer: Var, inner: Var) -> bool:
    """Whether ``outer`` and ``inner`` occur in ``e`` only as outer * inner.size + inner."""
    return all(x.coefficient(outer) == x.coefficient(inner) * inner.size for x in linears(e))


def merge(e: Linear, outer: Var, inner: Var, merged: Var) -> Linear:
    """``e`` with outer * inner.size + inner written as ``merged``; only where :func:`merges` holds."""

    def terms(x: Linear) -> Linear:
        return Linear(tuple((merged if a == inner else a, c) for a, c in x.terms if a != outer), x.const)

    return rewrite(e, terms)


def rename(e: Linear, names: dict[Var, Linear]) -> Linear:
    """``e`` with variables replaced."""

    def terms(x: Linear) -> Linear:
        total = Linear((), x.const)
        for a, c in x.terms:
            total = total + (names[a].scaled(c) if isinstance(a, Var) and a in names else Linear(((a, c),)))
        return total

    return rewrite(e, terms)


def substitute(e: Linear, names: dict[Var, Linear]) -> Linear:
    """:func:`rename` that simplifies quotients and remainders anew."""
    total = Linear((), e.const)
    for a, c in e.terms:
        if isinstance(a, Var):
            part = names.get(a, Linear(((a, 1),)))
        else:
            part = (divide if isinstance(a, Quotient) else modulo)(substitute(a.of, names), a.by)
        total = total + part.scaled(c)
    return joined(total)


def joined(e: Linear) -> Linear:
    """``e`` with (x // n) * n + x % n written as x."""
    for a, c in e.terms:
        if isinstance(a, Remainder):
            quotient = Quotient(a.of, a.by)
            if e.coefficient(quotient) == c * a.by:
                rest = Linear(tuple(x for x in e.terms if x[0] not in (a, quotient)), e.const)
                return joined(rest + a.of.scaled(c))
    return e


# ------------------------------------------------------------------------------------------------------------------------------ indexes of tensors
def broadcast(index: Index, dim: tuple[int, ...]) -> Index:
    """Index into a tensor of dims ``dim`` that is broadcast (right-aligned) to the space of ``index``."""
    used = index[len(index) - len(dim) :]
    return tuple(ZERO if d == 1 else i for i, d in zip(used, dim, strict=True))


def offset(index: Index, strides: tuple[int, ...]) -> Linear:
    """Element offset of ``index``."""
    total = ZERO
    for i, s in zip(index, strides, strict=True):
        total = total + i.scaled(s)
    return joined(total)


def reshaped(index: Index, out: tuple[int, ...], source: tuple[int, ...]) -> Index:
    """Index into dims ``source`` of the element that has the same row-major number as ``index`` in dims ``out``."""
    rest, step = ZERO, 1
    for i, d in zip(reversed(index), reversed(out), strict=True):
        rest = rest + i.scaled(step)
        step *= d
    rest = joined(rest)
    result: list[Linear] = []
    for d in reversed(source):
        result.append(modulo(rest, d) if d > 1 else ZERO)
        rest = divide(rest, d) if d > 1 else rest
    return tuple(reversed(result))


def equal(a: Index, b: Index) -> bool:
    """Whether two indexes are the same sums, whatever the order of their terms."""
    return len(a) == len(b) and all(x.const == y.const and dict(x.terms) == dict(y.terms) for x, y in zip(a, b, strict=True))
