"""Operation graphs made by hand, for tests of passes, engines and templates that need no frontend."""

from __future__ import annotations

from graphdnn.dtypes import data_type
from graphdnn.ir.layout import packed
from graphdnn.ir.node import Node
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.ir.tensor import Tensor


class Builder:
    """Operation graphs in a few words."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.nodes: list[Node] = []

    def tensor(
        self, *dim: int, virtual: bool = False, dtype: data_type = data_type.FLOAT, stride: tuple[int, ...] | None = None, by_value: bool = False
    ) -> int:
        number = len(self.tensors)
        self.tensors.append(Tensor(f"t{number}", number + 1, dim, stride or packed(dim), dtype, virtual, by_value))
        return len(self.tensors) - 1

    def node(
        self,
        op: str,
        inputs: tuple[int, ...],
        dim: tuple[int, ...],
        ports: str,
        virtual: bool = True,
        dtype: data_type = data_type.FLOAT,
        output: str = "OUT_0",
        **attrs: object,
    ) -> int:
        out = self.tensor(*dim, virtual=virtual, dtype=dtype)
        pairs = tuple(zip(ports.split(), inputs, strict=True))
        self.nodes.append(Node(op, f"n{len(self.nodes)}", pairs, ((output, out),), tuple(sorted(attrs.items())), data_type.FLOAT))
        return out

    def add(self, a: int, b: int, *dim: int, virtual: bool = True) -> int:
        return self.node("POINTWISE", (a, b), dim, "IN_0 IN_1", virtual, mode="ADD")

    def total(self, x: int, *dim: int, virtual: bool = True) -> int:
        return self.node("REDUCTION", (x,), dim, "X", virtual, mode="ADD")

    def matmul(self, a: int, b: int, *dim: int, virtual: bool = True) -> int:
        return self.node("MATMUL", (a, b), dim, "A B", virtual)

    def graph(self) -> OperationGraph:
        return OperationGraph(tuple(self.tensors), tuple(self.nodes))
