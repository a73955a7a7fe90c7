"""What a graph collects while the user declares it: tensors and nodes, and the rules of op calls that do not depend on the op.

:class:`Snapshot` is how ``validate`` stays a function of what the user said: what a pass has filled in is taken back before the next run, and after
a failed one.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import copysign, inf
from numbers import Real
from typing import Any

from graphdnn.dtypes import COMPUTE_TYPES, as_data_type, data_type, storable
from graphdnn.errors import KindError, ValidationError, explain
from graphdnn.frontend.arrays import is_array
from graphdnn.frontend.enums import scalar_type
from graphdnn.frontend.tensor import as_name, as_number
from graphdnn.frontend.tensor import tensor as Tensor
from graphdnn.ir.jsontext import FLOAT_ATTRIBUTES
from graphdnn.ir.node import NodeDecl
from graphdnn.plans.scalars import converter

NUMBERED = ("POINTWISE", "MATMUL", "CONV_FPROP", "CONCATENATE", "MOE_GROUPED_MATMUL", "MOE_GROUPED_MATMUL_BWD")
"""Ops whose unnamed nodes are called by their index; other unnamed nodes have the name ""."""
RENAMES_INPUTS = ("POINTWISE", "MATMUL")
"""Ops that name their unnamed inputs ``<node>::<port>``."""


class Owner:
    """Identity of a graph, that its tensors carry."""


def float32(value: float) -> float:
    """``value`` rounded to float32; infinite where float32 cannot hold it."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return copysign(inf, value)


class Declarations(ABC):
    """Tensors and nodes of a graph, in the order of their declaration."""

    def __init__(self) -> None:
        """No tensors, no nodes."""
        self._owner = Owner()
        self._tensors: dict[Tensor, None] = {}
        self._nodes: list[NodeDecl] = []

    @abstractmethod
    def _changed(self) -> None:
        """Called when a node is added: what was built before does not belong to this graph any more."""

    def _adopt(self, found: Tensor, node: str | None = None) -> Tensor:
        """Take a tensor into this graph. ValidationError if it belongs to another."""
        if found._owner is None:
            found._owner = self._owner
        elif found._owner is not self._owner:
            raise ValidationError(
                explain(
                    "the tensor belongs to another graph",
                    node=node,
                    tensor=found.name,
                    expected="a tensor of this graph",
                    fix="declare it here too: tensor_like(tensor) copies dims, strides and data type",
                )
            )
        self._tensors[found] = None
        return found

    def _operand(self, node: str | None, argument: str, value: Any) -> Tensor:
        """``value`` as a tensor of this graph; KindError for anything but a graph tensor."""
        if isinstance(value, Tensor):
            return self._adopt(value, node)
        fix = "make a graph tensor of it with tensor_like(...)" if is_array(value) else None
        raise KindError(explain(f"argument '{argument}' has the wrong type", node=node, expected="a graph tensor", found=repr(value)[:80], fix=fix))

    def _operand_or_number(self, node: str, argument: str, value: Any) -> Tensor:
        """Like :meth:`_operand`; a number becomes a compile-time constant whose data type follows the other operands."""
        if isinstance(value, Real) and not isinstance(value, Tensor):
            number: float | int = int(value) if isinstance(value, int) or hasattr(value, "__index__") else as_number(f"argument '{argument}'", value)
            made = self._scalar(number, scalar_type.COMPILE_TIME_CONST)
            made._number = number
            return made
        return self._operand(node, argument, value)

    def _scalar(self, value: float | int, kind: scalar_type) -> Tensor:
        made = self._adopt(Tensor())
        made.dim = made.stride = (1,)
        if isinstance(value, int):
            made.dtype, made.value = data_type.INT32 if -(2**31) <= value < 2**31 else data_type.INT64, value
        else:
            made.dtype, made.value = data_type.FLOAT, float32(value)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValidationError(explain("the scalar does not fit in 64 bits", expected="-2**63 to 2**63 - 1", found=value))
        made.by_value = kind is scalar_type.RUNTIME_PARAM
        made.constant = kind is scalar_type.COMPILE_TIME_CONST
        return made

    def _node_name(self, op: str, name: Any) -> str:
        """The user's name, or the default one."""
        return as_name(name, op) or (str(len(self._nodes)) if op in NUMBERED else "")

    def _add(
        self, op: str, name: str, inputs: Mapping[str, Tensor], outputs: Sequence[str], attrs: dict[str, Any], compute_data_type: Any = None
    ) -> list[Tensor]:
        """Append a node; its outputs are new virtual tensors named ``<name>::<port>``."""
        node = NodeDecl(op, name, dict(inputs), {}, attrs, as_data_type(compute_data_type))
        if op in RENAMES_INPUTS:
            for port, found in inputs.items():
                found.name = found.name or f"{name}::{port}"
        for port in outputs:
            made = self._adopt(Tensor())
            made.name, made.virtual = f"{name}::{port}", True
            node.outputs[port] = made
        self._nodes.append(node)
        self._changed()
        return [node.outputs[p] for p in outputs]  # type: ignore[misc]

    def _settle_numbers(self) -> None:
        """Give numbers that were operands their data type: DOUBLE beside DOUBLE operands, so that no digit is lost, else FLOAT; and round float
        attributes to float32 where a node does not calculate in DOUBLE, as the JSON text does.

        A virtual tensor without a data type will get the compute type of its node, so that is followed through the graph. A constant of a narrow
        type is rounded to it."""
        wide: set[int] = set()
        for node in self._nodes:
            tensors = node.inputs.values()
            double = node.compute is data_type.DOUBLE or any(t.dtype is data_type.DOUBLE or id(t) in wide for t in tensors)
            for t in tensors:
                number = t._number if isinstance(t, Tensor) else None
                if isinstance(number, float):
                    t.dtype, t.value = (data_type.DOUBLE, number) if double else (data_type.FLOAT, float32(number))
            if not double:
                node.attrs |= {n: float32(v) for n, v in node.attrs.items() if n in FLOAT_ATTRIBUTES and v is not None}
            if double and node.compute in (data_type.NOT_SET, data_type.DOUBLE):
                wide.update(id(t) for t in node.outputs.values() if t.dtype is data_type.NOT_SET)
        for t in self._tensors:
            if t.constant and t.value is not None and t.dtype in storable() and t.dtype not in COMPUTE_TYPES:
                t.value = converter(t.dtype)(t.value)


class Snapshot:
    """What the fields that passes fill in (dims, strides, data types, attributes) held at one moment."""

    _TENSOR = ("dim", "stride", "dtype", "value", "virtual", "placement")

    def __init__(self, graph: Declarations) -> None:
        """Remember the fields of all tensors and nodes of ``graph``."""
        self._fields: list[tuple[Any, str, Any]] = [(t, n, getattr(t, n)) for t in graph._tensors for n in self._TENSOR]
        for node in graph._nodes:
            self._fields += [(node, "compute", node.compute), (node, "attrs", dict(node.attrs))]

    def restore(self) -> None:
        """Put everything back as it was."""
        for o, name, value in self._fields:
            setattr(o, name, value)

    def changes_since(self, before: Snapshot) -> list[tuple[Any, str, Any, Any]]:
        """(object, field, value then, value now) of every field that differs; both snapshots are of the same objects."""
        return [(o, n, old, new) for (o, n, old), (_, _, new) in zip(before._fields, self._fields, strict=True) if old != new]


def take_back(changes: Sequence[tuple[Any, str, Any, Any]]) -> None:
    """Undo what passes have filled in, last first, except where the user has set something else since."""
    for o, name, old, new in reversed(changes):
        now = getattr(o, name)
        if now is new or (now == new and not isinstance(new, tuple)):  # equal dims that the user has set are another tuple
            setattr(o, name, old)
