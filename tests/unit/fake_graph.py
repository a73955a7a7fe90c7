"""The fake driver with CUDA graphs: nodes hold copies of what they are given, read at the offsets that cuda.h (CUDA 12 and 13, 64 bits) gives."""

from __future__ import annotations

import ctypes
import itertools
import struct
from dataclasses import dataclass, field
from typing import Any

from tests.unit.fake_cuda import FakeCuda, _write

KERNEL = struct.Struct("<Q3I3II4xQQQQ")
"""func, grid, block, sharedMemBytes, kernelParams, extra, kern, ctx."""
MEMSET = struct.Struct("<QQIIQQ")
"""dst, pitch, value, elementSize, width, height."""
CHILD = 4
assert (KERNEL.size, MEMSET.size) == (72, 40)


@dataclass
class Node:
    kind: int
    raw: bytes
    values: list[Any]
    after: list[int]
    graph: int


@dataclass
class Graph:
    nodes: list[int] = field(default_factory=list)


class FakeGraphs(FakeCuda):
    """``graphs``, ``nodes``: what exists, by handle. ``executed``: instantiated graphs and the steps that they hold."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.graphs: dict[int, Graph] = {}
        self.nodes: dict[int, Node] = {}
        self.executed: dict[int, list[tuple[Any, ...]]] = {}
        self._handles = itertools.count(0x6000, 0x10)

    # -- what a test does as a user would
    def new_graph(self) -> int:
        handle = next(self._handles)
        self.graphs[handle] = Graph()
        return handle

    def add(self, graph: int, kind: int, raw: bytes, values: list[Any], after: list[int]) -> int:
        handle = next(self._handles)
        self.nodes[handle] = Node(kind, raw, values, after, graph)
        self.graphs[graph].nodes.insert(0, handle)  # the driver promises no order
        return handle

    def steps(self, graph: int) -> list[tuple[Any, ...]]:
        """("launch", entry, grid, block, shared, arguments) and ("memset", address, value, bytes) in the order of the chain."""
        found: list[tuple[Any, ...]] = []
        at = [h for h in self.graphs[graph].nodes if not self.nodes[h].after]
        while at:
            assert len(at) == 1, "not a chain"
            node = self.nodes[at[0]]
            if node.kind == 0:
                func, *rest = KERNEL.unpack(node.raw)
                found.append(("launch", self.functions[func - 1], tuple(rest[:3]), tuple(rest[3:6]), rest[6], node.values))
            else:
                address, _, value, element, width, height = MEMSET.unpack(node.raw)
                assert (element, height) == (1, 1)
                found.append(("memset", address, value, width))
            at = [h for h in self.graphs[graph].nodes if at[0] in self.nodes[h].after]
        assert len(found) == len(self.graphs[graph].nodes)
        return found

    # -- the driver's functions
    def cuGraphCreate(self, out: int, flags: int) -> None:
        _write(out, self.new_graph())

    def cuGraphDestroy(self, graph: int) -> None:
        del self.graphs[graph]

    def _arguments(self, raw: bytes) -> list[Any]:
        func, *_, parameters, extra, kern, ctx = KERNEL.unpack(raw)
        assert (extra, kern, ctx) == (0, 0, 0)
        kinds = self.parameters[self.functions[func - 1]]
        places = (ctypes.c_void_p * len(kinds)).from_address(parameters)
        return [kind.from_address(place).value for kind, place in zip(kinds, places, strict=True)]

    def _after(self, dependencies: int, count: int) -> list[int]:
        return list((ctypes.c_uint64 * count).from_address(dependencies)) if count else []

    def cuGraphAddKernelNode_v2(self, out: int, graph: int, dependencies: int, count: int, params: int) -> None:
        raw = ctypes.string_at(params, KERNEL.size)
        _write(out, self.add(graph, 0, raw, self._arguments(raw), self._after(dependencies, count)))

    def cuGraphAddMemsetNode(self, out: int, graph: int, dependencies: int, count: int, params: int, context: int) -> None:
        assert context == self.stack[-1]
        _write(out, self.add(graph, 2, ctypes.string_at(params, MEMSET.size), [], self._after(dependencies, count)))

    def _list(self, handles: list[int], out: int | None, count: int) -> None:
        if out:
            room = (ctypes.c_uint64 * ctypes.c_size_t.from_address(count).value).from_address(out)
            room[:] = handles
        _write(count, len(handles), ctypes.c_size_t)

    def cuGraphGetNodes(self, graph: int, out: int | None, count: int) -> None:
        self._list(self.graphs[graph].nodes, out, count)

    def cuGraphGetRootNodes(self, graph: int, out: int | None, count: int) -> None:
        self._list([h for h in self.graphs[graph].nodes if not self.nodes[h].after], out, count)

    def cuGraphNodeGetDependentNodes(self, node: int, out: int | None, count: int) -> None:
        self._list([h for h in self.graphs[self.nodes[node].graph].nodes if node in self.nodes[h].after], out, count)

    def cuGraphNodeGetType(self, node: int, out: int) -> None:
        _write(out, self.nodes[node].kind, ctypes.c_int)

    def _get(self, node: int, out: int) -> None:
        ctypes.memmove(out, self.nodes[node].raw, len(self.nodes[node].raw))

    cuGraphKernelNodeGetParams_v2 = cuGraphMemsetNodeGetParams = _get

    def cuGraphKernelNodeSetParams_v2(self, node: int, params: int) -> None:
        raw = ctypes.string_at(params, KERNEL.size)
        self.nodes[node].raw, self.nodes[node].values = raw, self._arguments(raw)

    def cuGraphMemsetNodeSetParams(self, node: int, params: int) -> None:
        self.nodes[node].raw = ctypes.string_at(params, MEMSET.size)

    def cuGraphInstantiateWithFlags(self, out: int, graph: int, flags: int) -> None:
        handle = next(self._handles)
        self.executed[handle] = self.steps(graph)
        _write(out, handle)

    def cuGraphExecDestroy(self, executable: int) -> None:
        del self.executed[executable]

    def cuGraphLaunch(self, executable: int, stream: int) -> None:
        self.log.append(("graph", self.executed[executable], stream or 0))
