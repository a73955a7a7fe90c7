"""From what the user declared to the frozen operation graph: uids, topological order, dead nodes dropped, compute types resolved to carriers."""

from __future__ import annotations

import graphlib
from collections.abc import Sequence
from dataclasses import replace

from graphdnn.errors import ValidationError, explain
from graphdnn.ir import layout
from graphdnn.ir.node import Node, NodeDecl
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.ir.tensor import Tensor, TensorDecl
from graphdnn.passes.check import carrier


def canonicalize(nodes: Sequence[NodeDecl], tensors: Sequence[TensorDecl], name: str = "") -> tuple[OperationGraph, list[TensorDecl]]:
    """The operation graph of declarations that have passed infer and check, and the declaration of each tensor id.

    A ragged tensor's offsets become an input of their own: port Ragged_X beside port X.

    Assigns missing uids on the declarations (from 1 upward, in node order). Raises ValidationError for a cycle and a twice written tensor.
    """
    _assign_uids(nodes, tensors)
    nodes = [_with_offsets(n) for n in nodes]
    ordered = _live(_topological(nodes))
    decls: dict[TensorDecl, int] = {}
    for n in ordered:
        for t in (*n.inputs.values(), *n.outputs.values()):
            decls.setdefault(t, len(decls))
    frozen = tuple(_freeze(t) for t in decls)
    return OperationGraph(frozen, tuple(_freeze_node(n, decls) for n in ordered), name), list(decls)


def _assign_uids(nodes: Sequence[NodeDecl], tensors: Sequence[TensorDecl]) -> None:
    used = {t.uid for t in tensors if t.uid is not None}
    following = 1
    every = [t for n in nodes for t in (*reversed(n.inputs.values()), *n.outputs.values())] + list(tensors)
    for t in every:
        if t.uid is None:
            while following in used:
                following += 1
            t.uid = following
            used.add(following)


def _with_offsets(n: NodeDecl) -> NodeDecl:
    offsets = {f"Ragged_{port}": t.ragged_offset for port, t in (*n.inputs.items(), *n.outputs.items()) if t.ragged_offset is not None}
    return replace(n, inputs=n.inputs | offsets) if offsets else n


def _topological(nodes: Sequence[NodeDecl]) -> list[NodeDecl]:
    producer: dict[TensorDecl, int] = {}
    for i, n in enumerate(nodes):
        for t in n.outputs.values():
            if t in producer:
                raise ValidationError(
                    explain(
                        "a tensor has one producer",
                        node=n.label,
                        tensor=t.name,
                        expected="one node that writes it",
                        found=f"also node '{nodes[producer[t]].name}'",
                    )
                )
            producer[t] = i
    sorter = graphlib.TopologicalSorter({i: [producer[t] for t in n.inputs.values() if t in producer] for i, n in enumerate(nodes)})
    try:
        return [nodes[i] for i in sorter.static_order()]
    except graphlib.CycleError as error:
        names = " -> ".join(f"'{nodes[i].name}'" for i in error.args[1])
        raise ValidationError(explain("the graph has a cycle", expected="every node to come after the nodes it reads", found=names)) from None


def _live(ordered: list[NodeDecl]) -> list[NodeDecl]:
    """Nodes that a non-virtual output depends on, in order."""
    wanted: set[TensorDecl] = set()
    kept: list[NodeDecl] = []
    for n in reversed(ordered):
        if any(not t.virtual or t in wanted for t in n.outputs.values()):
            kept.append(n)
            wanted.update(n.inputs.values())
    return kept[::-1]


def _freeze(t: TensorDecl) -> Tensor:
    assert t.dim is not None and t.stride is not None and t.uid is not None, "infer has set dims, strides and uids"
    if t.placement is not None:
        return Tensor(t.name, t.uid, t.placement.dim, t.placement.stride, t.dtype, alignment=t.alignment)
    # A virtual tensor has no memory of the user's: where it is stored after all, it is stored packed, in the order of its strides.
    stride = layout.like(t.dim, [abs(s) for s in t.stride]) if t.virtual else tuple(t.stride)
    return Tensor(t.name, t.uid, tuple(t.dim), stride, t.dtype, t.virtual, t.by_value, t.constant, t.value, t.alignment, t.ragged_offset is not None)


def _freeze_node(n: NodeDecl, ids: dict[TensorDecl, int]) -> Node:
    attrs = tuple(sorted((k, _tuples(v)) for k, v in n.attrs.items() if v is not None))
    name = n.name or n.op.lower()  # what reports and errors call it
    return Node(n.op, name, tuple((p, ids[t]) for p, t in n.inputs.items()), tuple((p, ids[t]) for p, t in n.outputs.items()), attrs, carrier(n))


def _tuples(value: object) -> object:
    return tuple(_tuples(v) for v in value) if isinstance(value, (list, tuple)) else value
