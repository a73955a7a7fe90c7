"""What composite ops are written with: pointwise, reduction, matmul and movement nodes.

An op whose spec has ``expand`` is written as a small graph through an :class:`Expansion`. Intermediate values have the node's compute type, so that
nothing is rounded in between that the op's definition does not round; the last step writes the op's own output tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from graphdnn.dtypes import data_type
from graphdnn.ir import layout
from graphdnn.ir.extent import plain
from graphdnn.ir.node import NodeDecl
from graphdnn.ir.tensor import Dims, TensorDecl
from graphdnn.opspecs.shapes import broadcast_dims


class Expansion:
    """Collects the nodes that one composite node stands for. Every method returns the tensor it calculates: ``out`` if given, else a new virtual one
    of the node's compute type (or ``dtype``)."""

    def __init__(self, node: NodeDecl, compute: data_type) -> None:
        """Of ``node``, whose dims and data types are all set; ``compute``: the type it is calculated in (a carrier)."""
        self.node = node
        self.compute = compute
        self.nodes: list[NodeDecl] = []
        self.label = node.label

    def input(self, port: str) -> TensorDecl:
        """The tensor at an input port."""
        return self.node.inputs[port]

    def given(self, port: str) -> TensorDecl | None:
        """The tensor at an optional input port, or None."""
        return self.node.inputs.get(port)

    def output(self, port: str) -> TensorDecl | None:
        """The tensor at an output port; None if the node does not have it."""
        return self.node.outputs.get(port)

    def constant(self, value: float | int, rank: int, dtype: data_type | None = None) -> TensorDecl:
        """A number baked into the kernel, with ``rank`` dims of 1."""
        ones = (1,) * rank
        return TensorDecl(dim=ones, stride=ones, dtype=dtype or self.compute, by_value=True, constant=True, value=value)

    def pointwise(self, mode: str, *inputs: TensorDecl, out: TensorDecl | None = None, dtype: data_type | None = None, **attrs: Any) -> TensorDecl:
        """A pointwise op over the broadcast of its inputs."""
        dim: Dims = ()
        for t in inputs:
            dim = _broadcast(dim, _dims(t))
        ports = {f"IN_{i}": t for i, t in enumerate(inputs)}
        return self.add("POINTWISE", ports, dim, {"mode": mode, **attrs}, ("OUT_0", out), dtype)

    def reduction(self, mode: str, x: TensorDecl, axes: Sequence[int], out: TensorDecl | None = None, dtype: data_type | None = None) -> TensorDecl:
        """Reduce ``axes``, which keep extent 1."""
        gone = {a % len(_dims(x)) for a in axes}
        dim = tuple(1 if a in gone else d for a, d in enumerate(_dims(x)))
        attrs = {"mode": mode, "axes": tuple(sorted(gone)), "keepdim": True}
        return self.add("REDUCTION", {"X": x}, dim, attrs, ("Y", out), dtype)

    def matmul(self, a: TensorDecl, b: TensorDecl, out: TensorDecl | None = None, dtype: data_type | None = None) -> TensorDecl:
        """a @ b over the last two dims, batch dims broadcast."""
        left, right = _dims(a), _dims(b)
        dim = (*_broadcast(left[:-2], right[:-2]), left[-2], right[-1])
        return self.add("MATMUL", {"A": a, "B": b}, dim, {}, ("C", out), dtype)

    def reshape(self, x: TensorDecl, dim: Dims, out: TensorDecl | None = None) -> TensorDecl:
        """The same elements in row-major order."""
        return self.add("RESHAPE", {"X": x}, dim, {"reshape_mode": "LOGICAL"}, ("Y", out), x.dtype)

    def transpose(self, x: TensorDecl, permutation: Sequence[int], out: TensorDecl | None = None) -> TensorDecl:
        """Axes permuted."""
        dim = tuple(_dims(x)[p] for p in permutation)
        return self.add("TRANSPOSE", {"X": x}, dim, {"permutation": tuple(permutation)}, ("Y", out), x.dtype)

    def slice(self, x: TensorDecl, bounds: Sequence[tuple[int, int]], out: TensorDecl | None = None) -> TensorDecl:
        """The elements from start to end (excluded) along each axis."""
        dim = tuple(end - start for start, end in bounds)
        attrs = {"slices": tuple(bounds), "slice_strides": (1,) * len(dim)}
        return self.add("SLICE", {"X": x}, dim, attrs, ("Y", out), x.dtype)

    def view(self, t: TensorDecl) -> TensorDecl:
        """A tensor with a placement, with its declared dims."""
        assert t.placement is not None, "asked for where there is one"
        whole = self.reshape(t, t.placement.padded)
        return whole if plain(t.placement.padded) == plain(_dims(t)) else self.slice(whole, [(0, d) for d in _dims(t)])

    def padded(self, x: TensorDecl, dim: Dims) -> TensorDecl:
        """``x`` with zeros behind it along every axis, up to ``dim``."""
        for a, d in enumerate(dim):
            extent = _dims(x)
            if int(d) > int(extent[a]):
                x = self.concatenate([x, self.zeros((*extent[:a], d - extent[a], *extent[a + 1 :]), x.dtype)], a)
        return x

    def zeros(self, dim: Dims, dtype: data_type) -> TensorDecl:
        """A tensor of zeros, for :meth:`concatenate`."""
        return TensorDecl(dim=dim, stride=layout.packed(dim), dtype=dtype, by_value=True, constant=True, value=0)

    def concatenate(self, parts: Sequence[TensorDecl], axis: int) -> TensorDecl:
        """One behind the other along ``axis``; all have the data type of the first."""
        extent = sum(_dims(t)[axis] for t in parts)
        dim = (*_dims(parts[0])[:axis], extent, *_dims(parts[0])[axis + 1 :])
        return self.add("CONCATENATE", {str(i): t for i, t in enumerate(parts)}, dim, {"axis": axis}, ("Y", None), parts[0].dtype)

    def deliver(self, port: str, value: TensorDecl, logical: Dims | None = None) -> None:
        """Let ``value`` be the output at ``port``, if the node has it: the last thing to do with a value.

        A value that other steps read too stays as it is, in the compute type, and the output is a rounded copy. ``logical``: dims of the value
        that the output has before it is padded."""
        out = self.output(port)
        if out is None:
            return
        place = out.placement
        if int(math.prod(_dims(value))) != int(math.prod(_written(out))):  # as numbers: an extent of 1 that varies may meet one that was calculated
            whole = _dims(out) if place is None else place.padded
            value = self.padded(value if logical is None else self.reshape(value, logical), whole)
        if plain(_dims(value)) != plain(_written(out)):
            value = self.reshape(value, _written(out))
        maker = next((n for n in self.nodes if value in n.outputs.values()), None)
        readers = [n for n in self.nodes if value in n.inputs.values()]
        if maker is None or not value.virtual or (readers and (out.dtype is not value.dtype or place is not None)):
            self.pointwise("IDENTITY", value, out=out)
            return
        maker.outputs = {p: out if t is value else t for p, t in maker.outputs.items()}
        for n in readers:
            n.inputs = {p: out if t is value else t for p, t in n.inputs.items()}

    def add(
        self,
        op: str,
        inputs: dict[str, TensorDecl],
        dim: Dims,
        attrs: dict[str, Any],
        target: tuple[str, TensorDecl | None],
        dtype: data_type | None = None,
    ) -> TensorDecl:
        """Any node with one output, at port ``target[0]``."""
        port, out = target
        if out is None:
            out = TensorDecl(dim=dim, stride=layout.packed(dim), dtype=dtype or self.compute, virtual=True)
            out.name = f"{self.label}.{len(self.nodes)}"
        assert plain(_written(out)) == plain(tuple(dim)), f"{op} in the expansion of '{self.label}' gives {dim}, its output has {out.dim}"
        self.nodes.append(NodeDecl(op, f"{self.label}.{len(self.nodes)}", inputs, {port: out}, attrs, self.compute))
        return out


def _written(t: TensorDecl) -> Dims:
    """The dims under which a kernel writes ``t``."""
    return _dims(t) if t.placement is None else t.placement.dim


def _dims(t: TensorDecl) -> Dims:
    assert t.dim is not None, f"tensor '{t.name}' has its dims after infer"
    return tuple(t.dim)


def _broadcast(a: Dims, b: Dims) -> Dims:
    found = broadcast_dims([a, b])
    assert isinstance(found, tuple), f"{a} and {b} broadcast"
    return found
