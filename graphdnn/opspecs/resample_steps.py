"""RESAMPLE and RESAMPLE_BPROP as windows, weights and reductions. Gradients gather: every element sums over the outputs that use it.

Weights of an interpolation are calculated in integers up to the last step, so that an element's place and its weight never disagree.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from graphdnn.dtypes import data_type, info
from graphdnn.ir.tensor import TensorDecl
from graphdnn.opspecs.expansion import Expansion
from graphdnn.opspecs.sampling import sampling
from graphdnn.opspecs.window import Slide, windowed

_INT = data_type.INT32
_FAR = 1 << 28
"""An index that is none."""
_AWAY = -2
"""An element that has no weight in any result."""


class _Steps:
    """An expansion over windows: tensors of rank 2 + 2 * spatial, positions before taps. ``rank``: of the numbers that it makes.

    ``integer``: the type of places: INT64 where those of an interpolation, counted in 1 / (2 * denominator), do not fit in INT32.
    """

    def __init__(self, e: Expansion, like: TensorDecl) -> None:
        self.e, self.found = e, sampling(e.node.attrs)
        self.spatial = len(self.found.window)
        self.rank = 2 + 2 * self.spatial
        self.image = like.dim or ()
        self.taps = tuple(range(2 + self.spatial, self.rank))
        reach = max(2 * (n * den + num + 3 * den) for n, (num, den) in zip(self.image[2:], self.found.ratio, strict=True))
        self.integer = _INT if self.found.pools or reach < 1 << 31 else data_type.INT64

    def whole(self, mode: str, *inputs: TensorDecl, **attrs: Any) -> TensorDecl:
        """An integer step."""
        found = self.e.pointwise(mode, *inputs, dtype=self.integer, **attrs)
        self.e.nodes[-1].compute = self.integer
        return found

    def number(self, value: int) -> TensorDecl:
        """An integer."""
        return self.e.constant(value, self.rank, self.integer)

    def place(self, like: TensorDecl, axis: int) -> TensorDecl:
        """The coordinate along an axis."""
        return self.whole("GEN_INDEX", like, axis=axis)

    def summed(self, mode: str, x: TensorDecl, keep: bool = False, dtype: data_type | None = None) -> TensorDecl:
        """Reduce the taps."""
        assert x.dim is not None, "the tensors of an expansion have dims"
        dim = (*x.dim[: 2 + self.spatial], *((1,) * self.spatial if keep else ()))
        found = self.e.add("REDUCTION", {"X": x}, dim, {"mode": mode, "axes": self.taps, "keepdim": keep}, ("Y", None), dtype)
        if dtype is _INT:
            self.e.nodes[-1].compute = _INT
        return found

    def product(self, factors: Sequence[TensorDecl]) -> TensorDecl:
        """The product of several values."""
        total = factors[0]
        for f in factors[1:]:
            total = self.e.pointwise("MUL", total, f)
        return total

    # -- windows --------------------------------------------------------------------------------------------------------------------------
    def pooling(self) -> list[Slide]:
        """From outputs to the elements under them."""
        outputs = self.found.outputs(self.image[2:])
        parts = zip(outputs, self.found.window, self.found.ratio, self.found.pre, strict=True)
        return [Slide(p, w, step, 1, -pre) for p, w, (step, _), pre in parts]

    def covering(self) -> list[Slide]:
        """From elements to the outputs whose windows cover them, tap by tap."""
        parts = zip(self.image[2:], self.found.window, self.found.ratio, self.found.pre, strict=True)
        return [Slide(h, w, 1, -1, pre, step, True) for h, w, (step, _), pre in parts]

    def sources(self) -> list[Slide]:
        """From results of an interpolation to the elements that they are made of."""
        result = []
        for h, (num, den) in zip(self.found.outputs(self.image[2:]), self.found.ratio, strict=True):
            linear = self.found.mode == "BILINEAR"
            result.append(Slide(h, 2, 2 * num, 2 * den, num - den, 2 * den) if linear else Slide(h, 1, num, 0, 0, den))
        return result

    def users(self) -> list[Slide]:
        """From elements to the results of an interpolation that may use them."""
        result = []
        for h, (num, den) in zip(self.image[2:], self.found.ratio, strict=True):
            if self.found.mode == "BILINEAR":
                result.append(Slide(h, (2 * den + num - 1) // num + 1, 2 * den, 2 * num, num - den, 2 * num))
            else:
                result.append(Slide(h, (den + num - 1) // num, den, num, num - 1, num))
        return result

    # -- weights --------------------------------------------------------------------------------------------------------------------------
    def distance(self, axis: int, output: TensorDecl, element: TensorDecl) -> TensorDecl:
        """2 den times how far the place of a result of an interpolation, kept within the image, is from an element."""
        num, den = self.found.ratio[axis]
        last = 2 * den * (self.image[2 + axis] - 1)
        place = self.whole("ADD", self.whole("MUL", output, self.number(2 * num)), self.number(num - den))
        place = self.whole("MIN", self.whole("MAX", place, self.number(0)), self.number(last))
        return self.whole("ABS", self.whole("SUB", place, self.whole("MUL", element, self.number(2 * den))))

    def tent(self, axis: int, output: TensorDecl, element: TensorDecl) -> TensorDecl:
        """The weight of an element in a result: 1 - distance, at least 0."""
        _, den = self.found.ratio[axis]
        left = self.whole("MAX", self.whole("SUB", self.number(2 * den), self.distance(axis, output, element)), self.number(0))
        return self.e.pointwise("MUL", left, self.e.constant(1 / (2 * den), self.rank))

    def nearest(self, axis: int, output: TensorDecl, element: TensorDecl) -> TensorDecl:
        """Whether a result is a copy of the element: 0 <= output * num - element * den < den."""
        num, den = self.found.ratio[axis]
        rest = self.whole("SUB", self.whole("MUL", output, self.number(num)), self.whole("MUL", element, self.number(den)))
        return self.whole("LOGICAL_AND", self.whole("CMP_GE", rest, self.number(0)), self.whole("CMP_LT", rest, self.number(den)))

    def chosen(self, value: TensorDecl, condition: TensorDecl) -> TensorDecl:
        """The values of which a condition holds, else 0: what has no part in a sum must not reach it as inf * 0 = NaN either."""
        return self.e.pointwise("BINARY_SELECT", value, self.e.constant(0, self.rank), condition)

    def weighted(self, value: TensorDecl, weights: Sequence[TensorDecl]) -> TensorDecl:
        """Values times the product of their weights; 0 where that is 0, whatever the value."""
        weight = self.product(weights)
        used = self.e.pointwise("CMP_NEQ", weight, self.e.constant(0, self.rank))
        return self.chosen(self.e.pointwise("MUL", value, weight), used)

    def count(self, axis: int, output: TensorDecl) -> TensorDecl:
        """Elements of the image under the window of an output, along one axis."""
        f = self.found
        start = self.whole("ADD", self.whole("MUL", output, self.number(f.ratio[axis][0])), self.number(-f.pre[axis]))
        end = self.whole("MIN", self.whole("ADD", start, self.number(f.window[axis])), self.number(self.image[2 + axis]))
        return self.whole("SUB", end, self.whole("MAX", start, self.number(0)))

    def counted(self, places: Sequence[TensorDecl]) -> TensorDecl:
        """Elements that an average is over."""
        if self.found.mode == "AVGPOOL_INCLUDE_PADDING":
            return self.e.constant(math.prod(self.found.window), self.rank)
        counts = [self.count(a, p) for a, p in enumerate(places)]
        return self.e.pointwise("MAX", self.product(counts), self.e.constant(1, self.rank))

    def tap(self, like: TensorDecl) -> TensorDecl:
        """The place in the window, counted row-major."""
        total = self.place(like, self.taps[0])
        for a, axis in enumerate(self.taps[1:], 1):
            total = self.whole("ADD", self.whole("MUL", total, self.number(self.found.window[a])), self.place(like, axis))
        return total


def expand(e: Expansion) -> None:
    """RESAMPLE."""
    x = e.input("X")
    steps = _Steps(e, x)
    {"MAXPOOL": _maximum, "NEAREST": _interpolate, "BILINEAR": _interpolate}.get(steps.found.mode, _average)(e, x, steps)


def _maximum(e: Expansion, x: TensorDecl, steps: _Steps) -> None:
    lowest = -math.inf if info(e.compute).kind == "f" else int(info(e.compute).limits[0])
    under = windowed(e, x, steps.pooling(), lowest)
    top = steps.summed("MAX", under)
    if e.output("Index") is not None:
        wins = e.pointwise("LOGICAL_OR", e.pointwise("CMP_EQ", under, steps.summed("MAX", under, keep=True)), e.pointwise("CMP_NEQ", under, under))
        place = steps.whole("BINARY_SELECT", steps.tap(under), steps.number(_FAR), wins)
        padding = windowed(e, steps.whole("MUL", steps.place(x, 0), e.constant(0, len(steps.image), _INT)), steps.pooling(), _FAR, _INT)
        e.deliver("Index", steps.summed("MIN", steps.whole("ADD", place, padding), dtype=_INT))
    e.deliver("Y", top)


def _average(e: Expansion, x: TensorDecl, steps: _Steps) -> None:
    total = steps.summed("ADD", windowed(e, x, steps.pooling()))
    steps.rank = len(steps.image)
    e.deliver("Y", e.pointwise("DIV", total, steps.counted([steps.place(total, 2 + a) for a in range(steps.spatial)])))


def _interpolate(e: Expansion, x: TensorDecl, steps: _Steps) -> None:
    slides = steps.sources()
    value = windowed(e, x, slides)
    if steps.found.mode == "BILINEAR":
        weights = []
        for a in range(steps.spatial):
            element = windowed(e, steps.place(x, 2 + a), slides, _AWAY, steps.integer)
            weights.append(steps.tent(a, steps.place(value, 2 + a), element))
        value = steps.weighted(value, weights)
    e.deliver("Y", steps.summed("ADD", value))


def expand_backward(e: Expansion) -> None:
    """RESAMPLE_BPROP."""
    dy, dx = e.input("DY"), e.output("DX")
    assert dx is not None, "a node has its first output"
    steps = _Steps(e, dx)
    slides = steps.covering() if steps.found.pools else steps.users()
    value = windowed(e, dy, slides)
    if steps.found.mode == "MAXPOOL":
        chosen = windowed(e, e.input("Index"), slides, -1, _INT)
        value = steps.chosen(value, steps.whole("CMP_EQ", chosen, steps.tap(chosen)))
    else:
        places = [windowed(e, steps.place(dy, 2 + a), slides, 0, steps.integer) for a in range(steps.spatial)]
        if steps.found.pools:
            value = e.pointwise("DIV", value, steps.counted(places))
        elif steps.found.mode == "BILINEAR":
            value = steps.weighted(value, [steps.tent(a, p, steps.place(value, 2 + a)) for a, p in enumerate(places)])
        else:
            uses = [steps.nearest(a, p, steps.place(value, 2 + a)) for a, p in enumerate(places)]
            value = steps.chosen(value, functools.reduce(lambda x, y: steps.whole("LOGICAL_AND", x, y), uses))
    e.deliver("DX", steps.summed("ADD", value))
