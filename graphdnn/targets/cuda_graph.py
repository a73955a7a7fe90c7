"""The steps of a plan as nodes of a CUDA graph, written through the driver: no stream, no capture.

A plan is a chain: one kernel or memset node a step, each after the one before. The driver copies a node's arguments, TMA descriptors included, when
it is added; clusters are part of the machine code. Changing a plan's nodes needs no memory of who wrote them: a graph is known by what is in it, so a
clone, or the graph of a child node, may be changed as well.

The structures are those of cuda.h (CUDA 12.0 and newer): CUDA_KERNEL_NODE_PARAMS_v2 and CUDA_MEMSET_NODE_PARAMS_v1.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphdnn import _libcuda
from graphdnn._libcuda import Driver
from graphdnn.errors import ExecutionError, ValidationError, explain
from graphdnn.targets.cuda_driver import activated, capture_allowed, captured_now

_KERNEL, _MEMSET = 0, 2
_TYPES = ("a kernel", "a memcpy", "a memset", "a host function", "a child graph", "an empty node", "an event wait", "an event record")
_REPOPULATE = "populate an empty graph with this plan, or update with the plan that populated this one"


class KernelNode(ctypes.Structure):
    """What a kernel node runs: CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]

    def fault(self, found: KernelNode) -> str:
        """What shows that ``found`` is not this launch with other arguments; "" if nothing does."""
        if found.function != self.function:
            return "runs another kernel"
        shapes = ((tuple(n.grid), tuple(n.block), n.shared_bytes) for n in (self, found))
        wanted, seen = shapes
        return "" if wanted == seen else f"launches grid, block, shared bytes {seen}, not {wanted}"


class MemsetNode(ctypes.Structure):
    """What a memset node fills: CUDA_MEMSET_NODE_PARAMS_v1, with rows of one-byte elements."""

    _fields_ = [
        ("address", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_bytes", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]

    @property
    def nbytes(self) -> int:
        """Bytes that are filled."""
        return int(self.element_bytes * self.width * self.height)

    def fault(self, found: MemsetNode) -> str:
        """What shows that ``found`` is not this memset at another address; "" if nothing does."""
        return "" if found.nbytes == self.nbytes else f"fills {found.nbytes} bytes, not {self.nbytes}"


Node = KernelNode | MemsetNode


@dataclass(frozen=True)
class Nodes:
    """The steps of one plan with the arguments of one call. ``keep``: the memory that the nodes point to."""

    driver: Driver
    context: int
    nodes: tuple[Node, ...]
    keep: Any

    def append(self, graph: int, after: int = 0) -> int:
        """Add the steps to ``graph``, after the node ``after`` (0: from the start). The last node; ``after`` if there is no step."""
        with activated(self.context):
            for number, node in enumerate(self.nodes):
                before = ctypes.c_void_p(after)
                out = ctypes.c_uint64()
                places = (ctypes.addressof(out), graph, ctypes.addressof(before), int(after != 0), ctypes.addressof(node))
                if isinstance(node, KernelNode):
                    result = self.driver.function("cuGraphAddKernelNode_v2")(*places)
                else:
                    result = self.driver.function("cuGraphAddMemsetNode")(*places, self.context)
                self.driver.check(result, f"adding step {number} of the plan to CUDA graph {graph:#x}")
                after = out.value
        return after

    def populate(self, graph: int) -> None:
        """Write the steps into an empty graph. ValidationError for a null one, ExecutionError for one with nodes, and from the driver: the graph may
        hold some of the steps then, and is to be thrown away."""
        _not_null(graph)
        with activated(self.context):
            count = len(_handles(self.driver, "cuGraphGetNodes", graph))
        if count:
            rule = "the CUDA graph is not empty"
            fix = "give an empty one, and add it to another as a child graph; update_cuda_graph changes a populated one"
            raise ExecutionError(explain(rule, expected="a graph of cuGraphCreate without nodes", found=f"{count} nodes", fix=fix))
        self.append(graph)

    def update(self, graph: int) -> None:
        """Give the nodes of a graph that :meth:`populate` of this plan has written the arguments of this call. All nodes are looked at before one
        is changed. ValidationError for a null graph, ExecutionError for any other."""
        _not_null(graph)
        with activated(self.context):
            handles = self._chain(graph)
            for number, (handle, node) in enumerate(zip(handles, self.nodes, strict=True)):
                self._check(number, handle, node)
            for number, (handle, node) in enumerate(zip(handles, self.nodes, strict=True)):
                name = "cuGraphKernelNodeSetParams_v2" if isinstance(node, KernelNode) else "cuGraphMemsetNodeSetParams"
                result = self.driver.function(name)(handle, ctypes.addressof(node))
                self.driver.check(result, f"changing step {number} of the plan in CUDA graph {graph:#x}")

    def _chain(self, graph: int) -> list[int]:
        """The nodes in their order."""
        count = len(_handles(self.driver, "cuGraphGetNodes", graph))
        if count != len(self.nodes):
            raise _foreign(f"a chain of {len(self.nodes)} nodes", f"{count} nodes")
        found: list[int] = []
        following = _handles(self.driver, "cuGraphGetRootNodes", graph) if count else []
        while following:
            if len(following) > 1 or len(found) == count:
                raise _foreign("a chain: one node after another", f"{len(following)} nodes that follow node {len(found) - 1}")
            found += following
            following = _handles(self.driver, "cuGraphNodeGetDependentNodes", found[-1])
        if len(found) != count:
            raise _foreign("a chain: one node after another", f"{len(found)} of {count} nodes in the first chain")
        return found

    def _check(self, number: int, handle: int, node: Node) -> None:
        wanted = _KERNEL if isinstance(node, KernelNode) else _MEMSET
        out = ctypes.c_int()
        self.driver.call("cuGraphNodeGetType", handle, ctypes.addressof(out))
        kind = out.value
        if kind != wanted:
            raise _foreign(f"{_TYPES[wanted]} as node {number}", _TYPES[kind] if 0 <= kind < len(_TYPES) else f"a node of type {kind}")
        if isinstance(node, KernelNode):
            kernel = KernelNode()
            self.driver.call("cuGraphKernelNodeGetParams_v2", handle, ctypes.addressof(kernel))
            fault = node.fault(kernel)
        else:
            memset = MemsetNode()
            self.driver.call("cuGraphMemsetNodeGetParams", handle, ctypes.addressof(memset))
            fault = node.fault(memset)
        if fault:
            raise _foreign("the steps of this plan", f"node {number} {fault}")


def _not_null(graph: int) -> None:
    if graph <= 0:
        raise ValidationError(explain("cuda_graph is not a CUDA graph", expected="the address of a CUgraph (cudaGraph_t)", found=graph))


def _foreign(expected: str, found: str) -> ExecutionError:
    return ExecutionError(explain("the CUDA graph was not populated by this plan", expected=expected, found=found, fix=_REPOPULATE))


def _handles(driver: Driver, name: str, owner: int) -> list[int]:
    """What a driver function lists that takes an owner, room for handles and their number."""
    count = ctypes.c_size_t()
    driver.call(name, owner, None, ctypes.addressof(count))
    if not count.value:
        return []
    found = (ctypes.c_uint64 * count.value)()
    driver.call(name, owner, ctypes.addressof(found), ctypes.addressof(count))
    return list(found)


def nodes(driver: Driver, context: int, block: Any, launch: Any) -> Nodes:
    """The steps whose values lie in ``block``, launch values of a :class:`~graphdnn.targets.cuda_launch.CudaExecutable` that no other call uses.
    ``launch``: the function that stands for a launch among the block's calls; every other call is a memset."""
    found: list[Node] = []
    configs = iter(block.configs)
    for function, args in block.calls:
        if function is launch:
            config = next(configs)
            handle, parameters = (ctypes.addressof(reference._obj) for reference in args[1:3])
            found.append(KernelNode(handle, config.grid, config.block, config.shared_bytes, parameters))
        else:
            found.append(MemsetNode(args[0].value, 0, args[1], 1, args[2], 1))
    return Nodes(driver, context, tuple(found), block)


class Replay:
    """An instantiated CUDA graph: the steps of several plans, one after another. It needs no plan any more, and keeps the buffers alive."""

    def __init__(self, parts: Sequence[Nodes], keep: Any) -> None:
        """Writes and instantiates the graph; nothing runs. ExecutionError for what the driver says. ``keep``: the buffers that the nodes name."""
        self._driver, self._context = parts[0].driver, parts[0].context
        self._executable = 0
        self._lock = threading.Lock()  # the driver's functions on one graph are not to be called by two threads at once
        self.keep = keep
        with activated(self._context), capture_allowed():
            graph = self._driver.handle("cuGraphCreate", 0)
            try:
                last = 0
                for part in parts:
                    last = part.append(graph, last)
                self._executable = self._driver.handle("cuGraphInstantiateWithFlags", graph, 0)
            finally:
                self._driver.call("cuGraphDestroy", graph)

    def launch(self, stream: int) -> None:
        """Enqueue all steps on ``stream``. Raises ExecutionError, and for a stream that is being captured: the driver would refuse the launch (CUDA
        13.0, torch's capture; H200, 2026-11-30) and end the capture."""
        if _libcuda.forked:
            raise _libcuda.fork_error()
        with self._lock, activated(self._context):
            if captured_now(stream):
                rule, fix = "a captured pipeline is not replayed inside a capture", "call execute() of the pipeline there, which can be captured"
                raise ExecutionError(explain(rule, expected="a stream that is not being captured", found=f"stream {stream:#x}", fix=fix))
            self._driver.check(self._driver.function("cuGraphLaunch")(self._executable, stream), f"replaying a CUDA graph on stream {stream:#x}")

    def __del__(self) -> None:
        if getattr(self, "_executable", 0) and not _libcuda.forked:
            # Not ``call``: an error here (an interpreter that ends) has nobody to go to. A graph that still runs is freed when it is done.
            self._driver.function("cuGraphExecDestroy")(self._executable)
