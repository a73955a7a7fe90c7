"""Extents that may be others in the next call of the same kernel."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any


class Extent(int):
    """The extent of a dim that differs from call to call, or a product or a number of tiles made of such.

    It is an integer; only 1 is not what it seems: it is larger than the number 1 and unequal to it for whoever asks. Engines, passes and index
    expressions take loops of extent 1 and factors 1 out, which would make the kernel of such a shape another one; calculations see the number 1, so
    sizes, offsets and bounds are right."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Extent):
            return int(self) == int(other)
        return int(self) == other and int(self) != 1

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __gt__(self, other: float) -> bool:
        if isinstance(other, Extent):
            return int(self) > int(other)
        return int(self) > other or int(self) == 1 == other

    def __ge__(self, other: float) -> bool:
        return int(self) >= (int(other) if isinstance(other, Extent) else other)

    def __le__(self, other: float) -> bool:
        return not self > other

    def __lt__(self, other: float) -> bool:
        return not self >= other

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __mul__(self, other: int) -> int:
        product = int(self) * other
        return Extent(product) if isinstance(other, int) else product

    __rmul__ = __mul__

    def __add__(self, other: int) -> int:
        return self if isinstance(other, int) and int(other) == 0 else int(self) + other

    __radd__ = __add__

    def __abs__(self) -> int:
        return Extent(abs(int(self)))


def varies(n: int) -> bool:
    """Whether ``n`` may be another number in the next call."""
    return isinstance(n, Extent)


def share(n: int, by: int) -> int:
    """``n`` // ``by``: a number that varies if ``n`` does and ``by`` does not. (Of two that vary the quotient may be the same for all.)"""
    return Extent(int(n) // by) if varies(n) and not varies(by) else int(n) // int(by)


def plain(value: Any) -> Any:
    """``value``, a number or a dataclass or tuple of such, in numbers that are what they seem: for whoever runs what was lowered."""
    if isinstance(value, Extent):
        return int(value)
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: plain(getattr(value, f.name)) for f in fields(value)})
    return value
