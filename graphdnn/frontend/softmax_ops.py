"""Op methods of softmax, log_softmax and logsumexp."""

from __future__ import annotations

from typing import Any

from graphdnn.dtypes import data_type
from graphdnn.frontend.declare import Declarations
from graphdnn.frontend.tensor import as_integer
from graphdnn.frontend.tensor import tensor as Tensor


class SoftmaxOps(Declarations):
    """Over one axis, negative ones counted from the end; without overflow for any finite input."""

    def _over_axis(self, op: str, name: str, ports: dict[str, Any], axis: Any, compute: Any, **attrs: Any) -> Tensor:
        n = self._node_name(op, name)
        inputs = {port: self._operand(n, argument, t) for port, (argument, t) in ports.items()}
        return self._add(op, n, inputs, ("DX",) if "DY" in ports else ("Y",), {"axis": as_integer("axis", axis)} | attrs, compute)[0]

    def softmax(self, input: Tensor, axis: int, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """e ** x / sum(e ** x) along ``axis``."""
        return self._over_axis("SOFTMAX", name, {"X": ("input", input)}, axis, compute_data_type)

    def log_softmax(self, input: Tensor, axis: int, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """x - log(sum(e ** x)) along ``axis``."""
        return self._over_axis("LOG_SOFTMAX", name, {"X": ("input", input)}, axis, compute_data_type)

    def logsumexp(self, input: Tensor, axis: int, keepdim: bool = False, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """log(sum(e ** x)) along ``axis``, which is dropped from the result unless ``keepdim``."""
        return self._over_axis("LOGSUMEXP", name, {"X": ("input", input)}, axis, compute_data_type, keepdim=bool(keepdim))

    def softmax_backward(self, grad: Tensor, output: Tensor, axis: int, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """Gradient of softmax from dY and its output."""
        return self._over_axis("SOFTMAX_BPROP", name, {"DY": ("grad", grad), "Y": ("output", output)}, axis, compute_data_type)

    def log_softmax_backward(self, grad: Tensor, output: Tensor, axis: int, compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """Gradient of log_softmax from dY and its output."""
        return self._over_axis("LOG_SOFTMAX_BPROP", name, {"DY": ("grad", grad), "Y": ("output", output)}, axis, compute_data_type)

    def logsumexp_backward(
        self, grad: Tensor, input: Tensor, output: Tensor, axis: int, compute_data_type: Any = data_type.NOT_SET, name: str = ""
    ) -> Tensor:
        """Gradient of logsumexp from dY, its input and its output; dY and the output with or without the axis."""
        ports = {"DY": ("grad", grad), "X": ("input", input), "Y": ("output", output)}
        return self._over_axis("LOGSUMEXP_BPROP", name, ports, axis, compute_data_type)
