"""Declares small graphs without the frontend, and takes them to an OperationGraph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graphdnn.dtypes import data_type
from graphdnn.ir import layout
from graphdnn.ir.node import NodeDecl
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.ir.tensor import TensorDecl
from graphdnn.opspecs import registry
from graphdnn.opspecs.pointwise import POINTWISE
from graphdnn.passes.canonicalize import canonicalize
from graphdnn.passes.check import check
from graphdnn.passes.infer import Context, infer

F32 = data_type.FLOAT


@dataclass
class Declared:
    """Tensors and nodes in the making."""

    context: Context = field(default_factory=Context)
    nodes: list[NodeDecl] = field(default_factory=list)
    tensors: list[TensorDecl] = field(default_factory=list)

    def tensor(self, dim, stride=None, dtype=F32, **more: Any) -> TensorDecl:
        dim = tuple(dim)
        stride = layout.packed(dim) if stride is None else tuple(stride)
        t = TensorDecl(more.pop("name", f"x{len(self.tensors)}"), dim, stride, dtype, **more)
        self.tensors.append(t)
        return t

    def scalar(self, value, constant=True) -> TensorDecl:
        dtype = data_type.INT32 if isinstance(value, int) else F32
        return self.tensor((1,), (1,), dtype, value=value, constant=constant, by_value=not constant)

    def node(
        self, op: str, inputs: dict[str, TensorDecl], *, compute=data_type.NOT_SET, out=None, dtype=data_type.NOT_SET, **attrs: Any
    ) -> TensorDecl:
        """Add a node. ``out``: (dim, stride) to set on its output, stride None: left open. Returns the output, virtual until :meth:`output`."""
        spec = registry.spec(op)
        n = len(self.nodes)
        y = TensorDecl(f"t{n}", dtype=dtype, virtual=True)
        if out is not None:
            y.dim, y.stride = out
        self.nodes.append(NodeDecl(op, f"n{n}", inputs, {spec.outputs[0]: y}, attrs, compute))
        self.tensors.append(y)
        return y

    def pointwise(self, mode: str, *operands: TensorDecl, **more: Any) -> TensorDecl:
        assert len(operands) == len(POINTWISE[mode].args)
        return self.node("POINTWISE", {f"IN_{i}": t for i, t in enumerate(operands)}, mode=mode, **more)

    def output(self, t: TensorDecl, dtype=None) -> TensorDecl:
        t.virtual = False
        if dtype is not None:
            t.dtype = dtype
        return t

    def infer(self) -> None:
        infer(self.nodes, self.tensors, self.context)

    def build(self) -> tuple[OperationGraph, dict[TensorDecl, int]]:
        """infer, check, canonicalize; the graph and the tensor ids."""
        self.infer()
        check(self.nodes)
        graph, decls = canonicalize(self.nodes, self.tensors)
        return graph, {t: i for i, t in enumerate(decls)}
