"""Straight lines of text for small linear maps: rows of a matrix, discrete Fourier transforms. Zeros and ones leave no instruction."""

from __future__ import annotations

import cmath
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from graphdnn.codegen.dialect import literal

if TYPE_CHECKING:
    from fractions import Fraction

Complex = tuple[str | None, str | None]
"""Names of real and imaginary part; None is 0."""


class LinearText:
    """Collects assignments in one register type; results are names, None for what is always 0."""

    def __init__(self, calc: str, prefix: str) -> None:
        self.calc, self.prefix = calc, prefix
        self._lines: list[tuple[str, str, tuple[str, ...]]] = []

    def _assign(self, expr: str, *reads: str) -> str:
        name = f"{self.prefix}{len(self._lines)}"
        self._lines.append((name, expr, reads))
        return name

    def lines(self, results: Iterable[str | None]) -> list[str]:
        """The assignments that ``results`` need, in order."""
        needed, kept = set(results), []
        for name, expr, reads in reversed(self._lines):
            if name in needed:
                needed.update(reads)
                kept.append(f"{name} = {expr}")
        return kept[::-1]

    # -- sums -----------------------------------------------------------------------------------------------------------------------------
    def combination(self, terms: Iterable[tuple[Fraction | float, str | None]]) -> str | None:
        """The sum of factors times names, in this order."""
        total: str | None = None
        for factor, name in terms:
            if factor == 0 or name is None:
                continue
            if total is None:
                total = name if factor == 1 else self._assign(f"{self.calc}(-{name})" if factor == -1 else self._times(name, factor), name)
            elif abs(factor) == 1:
                total = self._assign(f"{self.calc}({total} {'+' if factor > 0 else '-'} {name})", total, name)
            else:
                total = self._assign(f"mul_add({name}, {literal(float(factor), self.calc)}, {total})", name, total)
        return total

    def _times(self, name: str, factor: Fraction | float) -> str:
        return f"{self.calc}({name} * {literal(float(factor), self.calc)})"

    def product(self, rows: Sequence[Sequence[Fraction]], values: Sequence[str | None]) -> list[str | None]:
        """A matrix times a vector."""
        return [self.combination(zip(row, values, strict=True)) for row in rows]

    def product2(
        self, left: Sequence[Sequence[Fraction]], right: Sequence[Sequence[Fraction]], grid: Sequence[Sequence[str | None]]
    ) -> list[str | None]:
        """left X right^T of the matrix X = ``grid``, row by row."""
        across = [self.product(right, row) for row in grid]
        columns = [self.product(left, column) for column in zip(*across, strict=True)]
        return [columns[j][i] for i in range(len(left)) for j in range(len(right))]

    # -- Fourier --------------------------------------------------------------------------------------------------------------------------
    def fourier(self, values: Sequence[Complex], sign: int) -> list[Complex]:
        """sum over j of values[j] exp(sign 2 pi i j k / n) for k = 0 .. n - 1, n a power of two: the recursion of Cooley and Tukey (1965),
        written out."""
        n = len(values)
        if n == 1:
            return list(values)
        even, odd = self.fourier(values[0::2], sign), self.fourier(values[1::2], sign)
        turned = [self._turned(z, k, n, sign) for k, z in enumerate(odd)]
        first = [self._joined(z, t, 1) for z, t in zip(even, turned, strict=True)]
        return first + [self._joined(z, t, -1) for z, t in zip(even, turned, strict=True)]

    def _joined(self, z: Complex, t: Complex, factor: int) -> Complex:
        re, im = (self.combination(((1, a), (factor, b))) for a, b in zip(z, t, strict=True))
        return re, im

    def _turned(self, z: Complex, k: int, n: int, sign: int) -> Complex:
        """z times exp(sign 2 pi i k / n)."""
        if k == 0:
            return z
        if 4 * k == n:
            return self.combination(((-sign, z[1]),)), self.combination(((sign, z[0]),))
        root = cmath.exp(2j * cmath.pi * k / n * sign)
        re = self.combination(((root.real, z[0]), (-root.imag, z[1])))
        return re, self.combination(((root.imag, z[0]), (root.real, z[1])))
