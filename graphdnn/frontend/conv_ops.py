"""Convolution methods. Each has two forms, as in the API: ``padding=``, the same on both sides, or ``pre_padding=`` and ``post_padding=``.

The forms differ in their positional arguments; a call takes the first form that its arguments fit: the sixth argument of the second is a list, of the
first a convolution_mode.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, overload

from graphdnn.dtypes import data_type
from graphdnn.errors import KindError, explain
from graphdnn.frontend.declare import Declarations
from graphdnn.frontend.enums import convolution_mode
from graphdnn.frontend.tensor import as_dims
from graphdnn.frontend.tensor import tensor as Tensor

_NOT_SET = data_type.NOT_SET
_CORRELATION = convolution_mode.CROSS_CORRELATION
Ints = Iterable[int]


class ConvOps(Declarations):
    """Images (N, C, spatial...), filters (K, C / groups, spatial...); the groups follow from the channels. One entry a spatial dim in every list.
    Every method takes ``name=``, makes one node and returns its output, a new virtual tensor."""

    @overload
    def conv_fprop(
        self,
        image: Tensor,
        weight: Tensor,
        padding: Ints = ...,
        stride: Ints = ...,
        dilation: Ints = ...,
        convolution_mode: convolution_mode = ...,
        compute_data_type: Any = ...,
        name: str = ...,
    ) -> Tensor: ...

    @overload
    def conv_fprop(
        self,
        image: Tensor,
        weight: Tensor,
        pre_padding: Ints = ...,
        post_padding: Ints = ...,
        stride: Ints = ...,
        dilation: Ints = ...,
        convolution_mode: convolution_mode = ...,
        compute_data_type: Any = ...,
        name: str = ...,
    ) -> Tensor: ...

    def conv_fprop(self, *args: Any, **kwargs: Any) -> Tensor:
        """Y[n, k, p] = sum over c and r of image[n, c, p * stride + r * dilation - padding] * weight[k, c, r]; CONVOLUTION reverses r."""
        return _conv(self, "CONV_FPROP", "Y", args, kwargs)

    @overload
    def conv_dgrad(
        self,
        loss: Tensor,
        filter: Tensor,
        padding: Ints = ...,
        stride: Ints = ...,
        dilation: Ints = ...,
        convolution_mode: convolution_mode = ...,
        compute_data_type: Any = ...,
        name: str = ...,
    ) -> Tensor: ...

    @overload
    def conv_dgrad(
        self,
        loss: Tensor,
        filter: Tensor,
        pre_padding: Ints = ...,
        post_padding: Ints = ...,
        stride: Ints = ...,
        dilation: Ints = ...,
        convolution_mode: convolution_mode = ...,
        compute_data_type: Any = ...,
        name: str = ...,
    ) -> Tensor: ...

    def conv_dgrad(self, *args: Any, **kwargs: Any) -> Tensor:
        """The gradient of ``conv_fprop``'s image, from that of its output and the filter. Its dims are set on the result (``set_dim``)."""
        return _conv(self, "CONV_DGRAD", "DX", args, kwargs)

    @overload
    def conv_wgrad(
        self,
        image: Tensor,
        loss: Tensor,
        padding: Ints = ...,
        stride: Ints = ...,
        dilation: Ints = ...,
        convolution_mode: convolution_mode = ...,
        compute_data_type: Any = ...,
        name: str = ...,
    ) -> Tensor: ...

    @overload
    def conv_wgrad(
        self,
        image: Tensor,
        loss: Tensor,
        pre_padding: Ints = ...,
        post_padding: Ints = ...,
        stride: Ints = ...,
        dilation: Ints = ...,
        convolution_mode: convolution_mode = ...,
        compute_data_type: Any = ...,
        name: str = ...,
    ) -> Tensor: ...

    def conv_wgrad(self, *args: Any, **kwargs: Any) -> Tensor:
        """The gradient of ``conv_fprop``'s filter, from its image and the gradient of its output. Its dims are set on the result (``set_dim``)."""
        return _conv(self, "CONV_WGRAD", "DW", args, kwargs)


OPERANDS = {"CONV_FPROP": {"image": "X", "weight": "W"}, "CONV_DGRAD": {"loss": "DY", "filter": "W"}, "CONV_WGRAD": {"image": "X", "loss": "DY"}}
"""Tensor arguments of each method, in order, and their ports."""


@functools.cache
def signatures(op: str) -> tuple[inspect.Signature, inspect.Signature]:
    """The two forms of an op's method."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    found = []
    for padding in (("padding",), ("pre_padding", "post_padding")):
        parameters = [inspect.Parameter(n, kind) for n in ("self", *OPERANDS[op])]
        parameters += [inspect.Parameter(n, kind, default=()) for n in (*padding, "stride", "dilation")]
        more = {"convolution_mode": _CORRELATION, "compute_data_type": _NOT_SET, "name": ""}
        found.append(inspect.Signature(parameters + [inspect.Parameter(n, kind, default=v) for n, v in more.items()]))
    return found[0], found[1]


def _bound(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, in the first form that takes them."""
    errors = []
    for signature in signatures(op):
        try:
            bound = signature.bind(None, *args, **kwargs)
        except TypeError as error:
            errors.append(str(error))
            continue
        bound.apply_defaults()
        if isinstance(bound.arguments["convolution_mode"], convolution_mode):
            return bound.arguments
        errors.append(f"convolution_mode is {bound.arguments['convolution_mode']!r:.80}")
    method = op.lower()
    expected = " or ".join(f"{method}{s}" for s in signatures(op))
    raise KindError(explain(f"{method}(): {errors[0]}", expected=expected, found=errors[-1]))


def _conv(graph: Declarations, op: str, output: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    values = _bound(op, args, kwargs)
    node = graph._node_name(op, values["name"])
    inputs = {port: graph._operand(node, argument, values[argument]) for argument, port in OPERANDS[op].items()}
    pre, post = (values.get(p, values.get("padding")) for p in ("pre_padding", "post_padding"))
    lists = {"pre_padding": pre, "post_padding": post, "stride": values["stride"], "dilation": values["dilation"]}
    attrs: dict[str, Any] = {n: as_dims(f"node '{node}': argument '{n}'", v) for n, v in lists.items()}
    attrs["math_mode"] = values["convolution_mode"].name
    return graph._add(op, node, inputs, (output,), attrs, values["compute_data_type"])[0]


def _form(method: Callable[..., Any], op: str) -> None:
    method.__signature__ = signatures(op)[0]  # type: ignore[attr-defined]


for _op in OPERANDS:
    _form(getattr(ConvOps, _op.lower()), _op)
