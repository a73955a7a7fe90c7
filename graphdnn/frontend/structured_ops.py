"""Op methods that are not pointwise: matmul, reduction, reshape, transpose, slice, concatenate."""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Sequence
from typing import Any

from graphdnn.dtypes import data_type
from graphdnn.errors import KindError, explain
from graphdnn.frontend.declare import Declarations
from graphdnn.frontend.enums import reshape_mode
from graphdnn.frontend.reduction_modes import reduction_mode
from graphdnn.frontend.tensor import as_dims, as_integer, as_number
from graphdnn.frontend.tensor import tensor as Tensor


def _member(node: str, argument: str, value: Any, kind: type[Any]) -> Any:
    """``value``, which must be a member of the enum ``kind``."""
    if isinstance(value, kind):
        return value
    raise KindError(explain(f"argument '{argument}' has the wrong type", node=node, expected=f"graphdnn.{kind.__name__}", found=repr(value)[:80]))


def _bound(node: str, value: Any) -> int | None:
    return None if value is None else as_integer(f"node '{node}': a slice bound", value)


class StructuredOps(Declarations):
    """Every method takes ``name=``, makes one node and returns its output, a new virtual tensor whose dims, strides and data type ``validate`` infers
    where they are not set."""

    def matmul(self, A: Tensor, B: Tensor, compute_data_type: Any = data_type.NOT_SET, padding: float = 0.0, name: str = "") -> Tensor:
        """C = A @ B over the last two dims: (..., m, k) @ (..., k, n) -> (..., m, n); batch dims are equal or 1 on one side.

        ``padding`` is recorded and has no effect: tails are padded as the op needs it."""
        n = self._node_name("MATMUL", name)
        inputs = {"A": self._operand(n, "A", A), "B": self._operand(n, "B", B)}
        return self._add("MATMUL", n, inputs, ("C",), {"padding_value": as_number(f"node '{n}': argument 'padding'", padding)}, compute_data_type)[0]

    def reduction(
        self,
        input: Tensor,
        mode: reduction_mode,
        compute_data_type: Any = data_type.NOT_SET,
        name: str = "",
        axes: int | Iterable[int] | None = None,
        keepdim: bool = False,
    ) -> Tensor:
        """Reduce ``input`` by ``mode``.

        Without ``axes`` the dims set on the output decide: an axis is reduced where the output has extent 1. ``axes`` names them instead (negative
        ones count from the end) and drops them from the result unless ``keepdim``."""
        n = self._node_name("REDUCTION", name)
        attrs: dict[str, Any] = {"mode": _member(n, "mode", mode, reduction_mode).name, "is_deterministic": True}
        if axes is not None:
            attrs |= {"axes": (as_integer("axes", axes),) if hasattr(axes, "__index__") else as_dims("axes", axes), "keepdim": bool(keepdim)}
        return self._add("REDUCTION", n, {"X": self._operand(n, "input", input)}, ("Y",), attrs, compute_data_type)[0]

    def reshape(self, input: Tensor, name: str = "", reshape_mode: reshape_mode = reshape_mode.VIEW_ONLY) -> Tensor:
        """The elements of ``input``, in row-major order, with the dims set on the output: ``reshape(x).set_dim([6, -1])``."""
        n = self._node_name("RESHAPE", name)
        attrs = {"dim": (), "stride": (), "reshape_mode": _member(n, "reshape_mode", reshape_mode, _RESHAPE_MODE).name}
        return self._add("RESHAPE", n, {"X": self._operand(n, "input", input)}, ("Y",), attrs)[0]

    def transpose(self, input: Tensor, permutation: Iterable[int], compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """Permute the dims: dim i of the result is dim ``permutation[i]`` of ``input``."""
        n = self._node_name("TRANSPOSE", name)
        attrs = {"permutation": as_dims("permutation", permutation)}
        return self._add("TRANSPOSE", n, {"X": self._operand(n, "input", input)}, ("Y",), attrs, compute_data_type)[0]

    def slice(self, input: Tensor, slices: Sequence[builtins.slice] = [], compute_data_type: Any = data_type.NOT_SET, name: str = "") -> Tensor:
        """The part of ``input`` that one Python slice a dim names; negative bounds count from the end, steps are positive."""
        n = self._node_name("SLICE", name)
        if isinstance(slices, builtins.slice) or not all(isinstance(s, builtins.slice) for s in slices):
            raise KindError(explain("argument 'slices' has the wrong type", node=n, expected="a list of slice objects", found=repr(slices)[:80]))
        bounds = tuple((_bound(n, s.start), _bound(n, s.stop)) for s in slices)
        steps = tuple(1 if s.step is None else as_integer(f"node '{n}': a slice step", s.step) for s in slices)
        attrs = {"slices": bounds, "slice_strides": steps}
        return self._add("SLICE", n, {"X": self._operand(n, "input", input)}, ("Y",), attrs, compute_data_type)[0]

    def concatenate(self, inputs: Sequence[Tensor], axis: int, in_place_index: int | None = None, name: str = "") -> Tensor:
        """The inputs one after the other along ``axis``.

        ``in_place_index`` is recorded and has no effect: every input is copied to its place."""
        n = self._node_name("CONCATENATE", name)
        if isinstance(inputs, Tensor) or not isinstance(inputs, Sequence):
            raise KindError(explain("argument 'inputs' has the wrong type", node=n, expected="a list of graph tensors", found=repr(inputs)[:80]))
        attrs = {"axis": as_integer("axis", axis), "in_place_index": None if in_place_index is None else as_integer("in_place_index", in_place_index)}
        ports = {str(i): self._operand(n, f"inputs[{i}]", t) for i, t in enumerate(inputs)}
        return self._add("CONCATENATE", n, ports, ("Y",), attrs)[0]


_RESHAPE_MODE = reshape_mode
