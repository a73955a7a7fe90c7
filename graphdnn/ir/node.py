"""Nodes: the mutable declaration of an op call, and its frozen form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graphdnn.dtypes import data_type
from graphdnn.ir.tensor import TensorDecl


@dataclass(eq=False)
class NodeDecl:
    """One op call as the user made it. ``op`` is the JSON tag (POINTWISE, MATMUL, ...), ports are those of part 5.2 of the API page, ``attrs``
    hold only JSON values (enum members by name, lists as tuples). ``pointwise`` mode and reduction mode are in ``attrs["mode"]``."""

    op: str
    name: str
    inputs: dict[str, TensorDecl]
    outputs: dict[str, TensorDecl]
    attrs: dict[str, Any] = field(default_factory=dict)
    compute: data_type = data_type.NOT_SET

    @property
    def label(self) -> str:
        """What messages and made-up names call it: its name, or its op where it has none."""
        return self.name or self.op.lower()


@dataclass(frozen=True, slots=True)
class Node:
    """One node of an operation graph. Inputs and outputs are (port, tensor id) in port order; ids index ``OperationGraph.tensors``.
    ``compute`` is one of dtypes.COMPUTE_TYPES (the carrier)."""

    op: str
    name: str
    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int], ...]
    attrs: tuple[tuple[str, Any], ...]
    compute: data_type

    @property
    def label(self) -> str:
        """What messages and made-up names call it: its name, or its op where it has none."""
        return self.name or self.op.lower()

    def attr(self, key: str, default: Any = None) -> Any:
        """The attribute ``key``."""
        return dict(self.attrs).get(key, default)

    @property
    def input_ids(self) -> tuple[int, ...]:
        """Tensor ids of the inputs, in port order."""
        return tuple(t for _, t in self.inputs)

    @property
    def output_ids(self) -> tuple[int, ...]:
        """Tensor ids of the outputs, in port order."""
        return tuple(t for _, t in self.outputs)

    def input(self, port: str) -> int:
        """Tensor id at an input port."""
        return dict(self.inputs)[port]
