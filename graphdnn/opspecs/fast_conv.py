"""Convolutions by tiles with fewer products: Winograd's minimal filtering and the discrete Fourier transform.

A tile of ``size`` inputs along each spatial dim gives size - taps + 1 outputs. Both are bilinear: y = A^T [(G g) * (B^T d)] along each dim, with *
element by element and the sum over channels taken in front of A^T.

**Winograd** (Winograd, Arithmetic Complexity of Computations, 1980; Lavin & Gray, Fast Algorithms for Convolutional Neural Networks, 2016): the
transpose of Toom's and Cook's product of polynomials, evaluated at POINTS and at infinity. With M_j(x) the product of (x - p_l) over all points
but p_j: A^T[i][j] = p_j^i, G[j][k] = p_j^k / M_j(p_j), B^T[j] = the coefficients of M_j; at infinity the highest coefficient, and in B^T the product
of all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from fractions import Fraction

    Rows = tuple[tuple[Fraction, ...], ...]

POINTS = {4: (0, 1, -1), 6: (0, 1, -1, 2, -2)}
"""Where a Winograd tile of so many inputs is evaluated, beside infinity."""


@dataclass(frozen=True)
class FastConv:
    """How a convolution is made: tiles of ``size`` x ``size`` inputs."""

    kind: Literal["winograd", "fft"]
    size: int


@dataclass(frozen=True)
class Winograd:
    """The matrices of F(outputs, taps) along one dim: ``output`` A^T, ``filter`` G, ``input`` B^T."""

    output: Rows
    filter: Rows
    input: Rows


def winograd(size: int, taps: int) -> Winograd:
    """F(size - taps + 1, taps), exactly."""
    from fractions import Fraction

    points = [Fraction(p) for p in POINTS[size]]
    assert len(points) == size - 1, "one value of a tile is at infinity"
    outputs = size - taps + 1

    def product(without: int | None) -> list[Fraction]:
        found = [Fraction(1)]
        for j, p in enumerate(points):
            if j != without:
                found = [(found[i - 1] if i else Fraction(0)) - p * (found[i] if i < len(found) else 0) for i in range(len(found) + 1)]
        return found + [Fraction(0)] * (size - len(found))

    def last(n: int) -> tuple[Fraction, ...]:
        return tuple(Fraction(int(k == n - 1)) for k in range(n))

    scale = [math.prod((p - q for q in points if q != p), start=Fraction(1)) for p in points]
    weights = tuple(tuple(p**k / scale[j] for k in range(taps)) for j, p in enumerate(points))
    results = tuple((*(p**i for p in points), Fraction(int(i == outputs - 1))) for i in range(outputs))
    return Winograd(results, (*weights, last(taps)), (*(tuple(product(j)) for j in range(size - 1)), tuple(product(None))))
