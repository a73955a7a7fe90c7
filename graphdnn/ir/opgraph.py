"""The operation graph: frozen, in topological order, canonical key."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

from graphdnn.ir.node import Node
from graphdnn.ir.tensor import Tensor


@dataclass(frozen=True)
class OperationGraph:
    """Tensors and nodes after canonicalize. Nodes are in topological order; tensor ids are positions in ``tensors``."""

    tensors: tuple[Tensor, ...]
    nodes: tuple[Node, ...]
    name: str = ""

    @cached_property
    def producer(self) -> dict[int, int]:
        """Tensor id -> index of the node that writes it."""
        return {t: i for i, n in enumerate(self.nodes) for t in n.output_ids}

    @cached_property
    def consumers(self) -> dict[int, tuple[int, ...]]:
        """Tensor id -> indexes of the nodes that read it (each once)."""
        found: dict[int, list[int]] = {}
        for i, n in enumerate(self.nodes):
            for t in dict.fromkeys(n.input_ids):
                found.setdefault(t, []).append(i)
        return {t: tuple(v) for t, v in found.items()}

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """Tensors that no node writes and that come from the variant pack or hold a scalar."""
        read = {t for n in self.nodes for t in n.input_ids}
        return tuple(i for i in range(len(self.tensors)) if i in read and i not in self.producer)

    @cached_property
    def outputs(self) -> tuple[int, ...]:
        """Non-virtual tensors that a node writes."""
        return tuple(i for i in range(len(self.tensors)) if i in self.producer and not self.tensors[i].virtual)

    @cached_property
    def key(self) -> str:
        """SHA-256 of all that changes what is computed or how buffers are read. Names and uids are not in it."""
        tensors = [
            (t.dim, t.stride, t.dtype.name, t.virtual, t.by_value, t.constant, repr(t.value) if t.constant else None, t.alignment)
            for t in self.tensors
        ]
        nodes = [(n.op, n.inputs, n.outputs, n.attrs, n.compute.name) for n in self.nodes]
        return hashlib.sha256(json.dumps([tensors, nodes], sort_keys=True).encode()).hexdigest()
