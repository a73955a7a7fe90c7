"""Extents that are known when a plan is executed: :class:`Dim`, sums and products of such, and their values in a variant pack."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

from graphdnn.errors import KindError, ValidationError, explain
from graphdnn.ir.extent import Extent, varies

Monomial = tuple[str, ...]
"""Sorted names of the factors; () is the constant term."""
LARGEST = 2**31 - 1
TYPICAL = 4096


class DimExpr:
    """A polynomial in dims with integer coefficients: ``2 * batch * heads + 1``. Immutable; ``+``, ``-`` and ``*`` make new ones."""

    __slots__ = ("dims", "terms")

    def __init__(self, terms: Mapping[Monomial, int], dims: Mapping[str, Dim]) -> None:
        """``terms``: coefficients; ``dims``: the dims by name."""
        self.terms = {m: c for m, c in terms.items() if c}
        self.dims = dict(dims)

    def value(self, values: Mapping[str, int]) -> int:
        """The number for ``values`` of the dims by name; one that may be another in the next call if they are."""
        total = 0
        for names, factor in self.terms.items():
            for name in names:
                factor *= values[name]
            total += factor
        return Extent(total) if any(varies(v) for v in values.values()) else total

    def solved(self, name: str, values: Mapping[str, int], total: int) -> int | None:
        """The extent of the dim ``name`` for which this is ``total``, rounded down where there is none; ``values``: of the others. None where it
        does not say."""
        factor = rest = 0
        for names, c in self.terms.items():
            part = math.prod((values[n] for n in names if n != name), start=c)
            if names.count(name) > 1:
                return None
            factor, rest = (factor + part, rest) if name in names else (factor, rest + part)
        return (total - rest) // factor if factor else None

    def _joined(self, other: DimExpr, sign: int) -> DimExpr:
        terms = dict(self.terms)
        for m, c in other.terms.items():
            terms[m] = terms.get(m, 0) + sign * c
        return DimExpr(terms, _union(self, other))

    def __add__(self, other: DimExpr | int) -> DimExpr:
        return self._joined(_expr(other), 1)

    __radd__ = __add__

    def __sub__(self, other: DimExpr | int) -> DimExpr:
        return self._joined(_expr(other), -1)

    def __rsub__(self, other: int) -> DimExpr:
        return _expr(other)._joined(self, -1)

    def __mul__(self, other: DimExpr | int) -> DimExpr:
        right = _expr(other)
        terms: dict[Monomial, int] = {}
        for (m, c), (n, d) in product(self.terms.items(), right.terms.items()):
            key = tuple(sorted(m + n))
            terms[key] = terms.get(key, 0) + c * d
        return DimExpr(terms, _union(self, right))

    __rmul__ = __mul__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DimExpr) and self.terms == other.terms and self.dims == other.dims

    def __hash__(self) -> int:
        return hash(frozenset(self.terms.items()))

    def __repr__(self) -> str:
        parts = []
        for m, c in sorted(self.terms.items(), key=lambda t: (-len(t[0]), t[0])):
            parts.append("*".join(([str(c)] if c != 1 or not m else []) + list(m)))
        return " + ".join(parts) or "0"


class Dim(DimExpr):
    """A dim of a graph whose extent differs from call to call: ``Dim("tokens", min=1, max=8192)``.

    It stands in ``dim=`` and ``stride=`` of a tensor, alone or in sums and products. ``min``, ``max``: its range, ends included (0 and 1 are ordinary
    extents); ``multiple_of``: what every extent is a multiple of; ``hint``: the extent that the heuristics plan for, by default the largest up to
    4096. Dims of one name in a graph are one dim. ValidationError for an empty range, KindError for what is no integer.
    """

    __slots__ = ("hint", "max", "min", "multiple_of", "name")

    def __init__(self, name: str, min: int = 0, max: int = LARGEST, *, multiple_of: int = 1, hint: int | None = None) -> None:
        """See the class."""
        from graphdnn.frontend.tensor import as_integer, as_name

        self.name = as_name(name)
        if not self.name.isidentifier():
            raise ValidationError(explain("the name of a dim must be an identifier", expected="letters, digits and _", found=repr(name)))
        self.min, self.max, self.multiple_of = (as_integer(w, v) for w, v in (("min", min), ("max", max), ("multiple_of", multiple_of)))
        if self.multiple_of < 1 or self.min < 0 or self.max > LARGEST or self._up(self.min) > self.max:
            expected, found = f"0 <= min <= max <= {LARGEST} and a multiple between", f"min {min}, max {max}, multiple_of {multiple_of}"
            raise ValidationError(explain(f"dim '{name}' has no extent", expected=expected, found=found))
        self.hint = self._typical() if hint is None else as_integer("hint", hint)
        self.check(self.hint)
        super().__init__({(self.name,): 1}, {self.name: self})

    def _up(self, n: int) -> int:
        return -(-n // self.multiple_of) * self.multiple_of

    def _typical(self) -> int:
        top = self.max // self.multiple_of * self.multiple_of
        return top if top <= TYPICAL or self._up(TYPICAL) > self.max else max(self._up(TYPICAL), self._up(self.min))

    def check(self, extent: int, where: str = "") -> None:
        """ValidationError, which names ``where`` it comes from, unless ``extent`` is in the range."""
        if self.min <= extent <= self.max and extent % self.multiple_of == 0:
            return
        rule = f"the extent of dim '{self.name}' is outside its range"
        multiple = f", a multiple of {self.multiple_of}" if self.multiple_of > 1 else ""
        found = f"{extent}{f' in {where}' if where else ''}"
        fix = f"declare Dim('{self.name}') with a wider range, or build another graph"
        raise ValidationError(explain(rule, expected=f"{self.min} to {self.max}{multiple}", found=found, fix=fix))

    def __eq__(self, other: object) -> bool:
        facts = ("name", "min", "max", "multiple_of", "hint")
        return isinstance(other, Dim) and all(getattr(self, f) == getattr(other, f) for f in facts)

    def __hash__(self) -> int:
        return hash(self.name)

    def __reduce__(self) -> Any:
        return _dim, (self.name, self.min, self.max, self.multiple_of, self.hint)


def _dim(name: str, min: int, max: int, multiple_of: int, hint: int) -> Dim:
    return Dim(name, min, max, multiple_of=multiple_of, hint=hint)


def _expr(value: Any) -> DimExpr:
    if isinstance(value, DimExpr):
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise KindError(explain("a dim can be added to and multiplied by integers and dims", expected="an integer or a Dim", found=repr(value)[:80]))
    return DimExpr({(): int(value)}, {})


def _union(a: DimExpr, b: DimExpr) -> dict[str, Dim]:
    for name in a.dims.keys() & b.dims.keys():
        if a.dims[name] != b.dims[name]:
            raise _two(name)
    return a.dims | b.dims


def _two(name: str) -> ValidationError:
    return ValidationError(explain(f"two different dims are called '{name}'", expected="one range and hint for each name", fix="use one Dim object"))


Extents = tuple["DimExpr | int", ...]


def symbolic(values: Any) -> bool:
    """Whether a list or tuple of extents holds dims."""
    return isinstance(values, list | tuple) and any(isinstance(v, DimExpr) for v in values)


def at_hint(values: Iterable[Any]) -> list[Any]:
    """The extents with every dim at its hint."""
    return [v.value({n: d.hint for n, d in v.dims.items()}) if isinstance(v, DimExpr) else v for v in values]


def collected(shapes: Iterable[Extents]) -> dict[str, Dim]:
    """All dims in ``shapes``, by name, in order. ValidationError for two that differ and have one name."""
    found: dict[str, Dim] = {}
    for e in (e for shape in shapes for e in shape if isinstance(e, DimExpr)):
        for name, dim in e.dims.items():
            if found.setdefault(name, dim) != dim:
                raise _two(name)
    return found


def parsed(text: str, dims: Mapping[str, Dim]) -> DimExpr | int:
    """The extent that prints as ``text``. KeyError or ValueError for what no extent prints as."""
    if text in dims:
        return dims[text]
    total: DimExpr | int = 0
    for term in text.split(" + "):
        product: DimExpr | int = 1
        for factor in term.split("*"):
            product = product * (dims[factor] if factor.isidentifier() else int(factor))
        total = product + total if isinstance(product, DimExpr) else total + product
    return total
