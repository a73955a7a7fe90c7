"""Op methods of pooling and interpolation. They are ours: the cuDNN Frontend has RESAMPLE in C++ only."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from numbers import Rational
from typing import Any

from graphdnn.dtypes import data_type
from graphdnn.errors import KindError, ValidationError, explain
from graphdnn.frontend.declare import Declarations
from graphdnn.frontend.tensor import as_dims, as_number
from graphdnn.frontend.tensor import tensor as Tensor

LARGEST_DENOMINATOR = 1 << 12
"""A stride that is a float means the nearest fraction with a smaller denominator."""


def _ratio(node: str, values: Any) -> tuple[tuple[int, int], ...]:
    """Strides as (numerator, denominator); not checked for sign."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise KindError(explain("argument 'stride' has the wrong type", node=node, expected="a list of numbers", found=repr(values)[:80]))
    from fractions import Fraction

    found = []
    for v in values:
        number = as_number(f"node '{node}': an entry of stride", v)
        if not isfinite(number):
            raise ValidationError(explain("stride must be finite", node=node, expected="numbers > 0", found=v))
        exact = Fraction(int(v.numerator), int(v.denominator)) if isinstance(v, Rational) else Fraction(number)
        exact = exact.limit_denominator(LARGEST_DENOMINATOR)
        found.append((exact.numerator, exact.denominator))
    return tuple(found)


class ResampleOps(Declarations):
    """Over images (N, C, spatial...), one entry a spatial dim in every list. Modes: "MAXPOOL", "AVGPOOL_INCLUDE_PADDING",
    "AVGPOOL_EXCLUDE_PADDING", "BILINEAR" (linear in every spatial dim), "NEAREST"; a pooling has a ``window``, its ``stride`` is whole (the window's
    extents if not given); an interpolation's ``stride`` is the input elements for one output element, or follows from dims set on the output."""

    def _sampled(self, op: str, node: str, inputs: dict[str, Tensor], outputs: tuple[str, ...], values: dict[str, Any], compute: Any) -> list[Tensor]:
        mode = values["mode"]
        if not isinstance(mode, str):
            expected = "a string: MAXPOOL, AVGPOOL_INCLUDE_PADDING, AVGPOOL_EXCLUDE_PADDING, BILINEAR or NEAREST"
            raise KindError(explain("argument 'mode' has the wrong type", node=node, expected=expected, found=repr(mode)[:80]))
        lists = {n: as_dims(f"node '{node}': argument '{n}'", values[n]) for n in ("window", "pre_padding", "post_padding")}
        attrs: dict[str, Any] = {"mode": mode.upper(), "ratio": _ratio(node, values["stride"])} | lists
        return self._add(op, node, inputs, outputs, attrs, compute)

    def resample(
        self,
        input: Tensor,
        mode: str,
        window: Iterable[int] = (),
        stride: Iterable[float] = (),
        pre_padding: Iterable[int] = (),
        post_padding: Iterable[int] = (),
        generate_index: bool = False,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
    ) -> list[Tensor | None]:
        """[Y, Index]: the image pooled or interpolated, and for MAXPOOL with ``generate_index`` the place of each largest element in its window,
        counted row-major, as INT32 unless another type is set; else None. Padding never wins and, if excluded, does not count."""
        n = self._node_name("RESAMPLE", name)
        if generate_index and (not isinstance(mode, str) or mode.upper() != "MAXPOOL"):
            raise ValidationError(explain("only MAXPOOL has an index", node=n, expected="generate_index=False", found=mode))
        values = {"mode": mode, "window": window, "stride": stride, "pre_padding": pre_padding, "post_padding": post_padding}
        outputs = ("Y", "Index") if generate_index else ("Y",)
        made: list[Tensor | None] = [*self._sampled("RESAMPLE", n, {"X": self._operand(n, "input", input)}, outputs, values, compute_data_type)]
        if len(made) == 1:
            return [*made, None]
        index = made[1]
        assert index is not None, "one tensor for every port"
        index.set_data_type(data_type.INT32)
        return made

    def resample_backward(
        self,
        loss: Tensor,
        mode: str,
        window: Iterable[int] = (),
        stride: Iterable[float] = (),
        pre_padding: Iterable[int] = (),
        post_padding: Iterable[int] = (),
        index: Tensor | None = None,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """The gradient of ``resample``'s input from that of its output and, for MAXPOOL, the index. Its dims are set on the result."""
        n = self._node_name("RESAMPLE_BPROP", name)
        inputs = {"DY": self._operand(n, "loss", loss)} | ({"Index": self._operand(n, "index", index)} if index is not None else {})
        values = {"mode": mode, "window": window, "stride": stride, "pre_padding": pre_padding, "post_padding": post_padding}
        return self._sampled("RESAMPLE_BPROP", n, inputs, ("DX",), values, compute_data_type)[0]
