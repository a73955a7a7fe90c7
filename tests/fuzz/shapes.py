"""Random shapes and layouts."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np

from tests.buffers import positions
from tests.fuzz.program import Dims


@dataclass(frozen=True)
class Limits:
    """Sizes: elements of any tensor, multiply-adds of a matmul, ops, ``long``: whether one dim may be in the thousands."""

    elements: int = 3000
    work: int = 60_000
    ops: int = 8
    rank: int = 6
    long: bool = True


USUAL = Limits()
SMALL = Limits(elements=120, work=1500, ops=6, rank=5, long=False)
"""For the simulator, which runs a Python thread per CUDA thread."""


@dataclass(frozen=True)
class Value:
    """A tensor in the making. ``stride`` None: inherited by a rule that the generator does not model. ``kind``: "f" or "i"."""

    name: str
    dim: Dims
    stride: Dims | None
    kind: str
    dtype: str


def overlaps(dim: Dims, stride: Dims) -> bool:
    """Whether two logical elements share a place."""
    at = positions(dim, stride).reshape(-1)
    return len(np.unique(at)) != len(at)


class Shapes:
    """Draws dims and strides from one random source."""

    def __init__(self, r: random.Random, limits: Limits) -> None:
        self.r = r
        self.limits = limits

    def dims(self) -> Dims:
        """A random shape within the limits; sometimes with a 0, sometimes with a long last dim."""
        r, rank = self.r, self.r.choice([n for n in (0, 1, 2, 2, 3, 3, 3, 4, 4, 5, 6) if n <= self.limits.rank])
        if rank and self.limits.long and r.random() < 0.08:
            return tuple(r.choice((1, 2, 3)) for _ in range(rank - 1))[:2] + (r.choice((257, 1000, 1025, 4099)),)
        out: list[int] = []
        for _ in range(rank):
            room = self.limits.elements // max(math.prod(out), 1)
            out.append(r.choice([d for d in (1, 1, 2, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 33, 64, 65) if d <= max(room, 1)]))
        r.shuffle(out)
        if rank and r.random() < 0.03:
            out[r.randrange(rank)] = 0
        return tuple(out)

    def strides(self, dim: Dims, *, repeat: bool) -> Dims:
        """A random layout: order, padding, junk strides on size-1 dims; ``repeat``: perhaps stride 0 on a dim."""
        r, rank = self.r, len(dim)
        order = list(range(rank))[::-1]
        if r.random() < 0.5:
            r.shuffle(order)
        pad, step, out = r.random() < 0.3, 1, [0] * rank
        for axis in order:
            out[axis] = step
            step *= max(dim[axis], 1)
            step += r.choice((0, 1, 3, 8)) if pad else 0
        if pad and r.random() < 0.3:
            out = [s * 2 for s in out]
        for axis in range(rank):
            if dim[axis] == 1 and r.random() < 0.3:
                out[axis] = r.choice((0, 1, 2, 7, 100))
        if repeat and rank and r.random() < 0.12:
            out[r.randrange(rank)] = 0
        return tuple(out)

    def narrowed(self, dim: Dims) -> Dims:
        """Dims that broadcast to ``dim``."""
        r = self.r
        out = [1 if r.random() < 0.35 else d for d in dim]
        return tuple(out[r.randrange(len(out)) :] if out and r.random() < 0.15 else out)
