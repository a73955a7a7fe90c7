"""From a candidate to one launch recipe: every region is lowered, the workspace is laid out, the pieces are joined.

What lives in the workspace are the virtual tensors that one region stores for another, and each region's own scratch. Sub-buffers are aligned to 256
bytes and share memory where their lifetimes (in regions) do not meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphdnn.codegen.recipes import launches, listings, mapped
from graphdnn.codegen.spec import Arg, Buffer, Check, Groups, KernelSpec, Memset, Panels, Recipe, Step, TensorMap
from graphdnn.dtypes import info
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.ir.tensor import Tensor
from graphdnn.plans import views
from graphdnn.plans.heuristics import Candidate

if TYPE_CHECKING:
    from graphdnn.device import DeviceProps

ALIGNMENT = 256
SCRATCH = -1
"""Index of a workspace buffer whose offset counts from the start of its region's own scratch."""


@dataclass
class _Block:
    size: int
    first: int
    last: int
    offset: int = 0


class Arena:
    """Offsets for blocks that live from region ``first`` to region ``last``."""

    def __init__(self) -> None:
        """Empty."""
        self._blocks: list[_Block] = []
        self.size = 0

    def place(self, size: int, first: int, last: int) -> int:
        """The lowest aligned offset that is free all that time."""
        offset = 0
        for b in sorted((b for b in self._blocks if b.first <= last and first <= b.last), key=lambda b: b.offset):
            if offset + size <= b.offset:
                break
            offset = max(offset, _up(b.offset + b.size))
        if size:
            self._blocks.append(_Block(size, first, last, offset))
            self.size = max(self.size, offset + size)
        return offset


def _up(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes from the lowest to one past the highest element that the strides reach; 0, which is not checked, for packed rows."""
    if tensor.ragged:
        return 0
    return (tensor.extent * info(tensor.dtype).bits + 7) // 8


def bytes_below(tensor: Tensor) -> int:
    """Of these, bytes below element (0, ..., 0), to which an address points: more than 0 only with negative strides."""
    if tensor.size == 0:
        return 0
    return (sum((d - 1) * -s for d, s in zip(tensor.dim, tensor.stride, strict=True) if s < 0) * info(tensor.dtype).bits + 7) // 8


def assemble(graph: OperationGraph, device: DeviceProps, candidate: Candidate) -> tuple[Recipe, tuple[tuple[int, ...], ...]]:
    """The recipe of the whole plan, and for each region the indexes of its kernels in the recipe."""
    regions = candidate.partition.regions
    arena = Arena()
    memory = {i: Buffer("tensor", i) for i in range(len(graph.tensors))}
    lives = []
    for t in candidate.partition.materialized:
        writers = [r for r, g in enumerate(regions) if t in g.stores]
        readers = [r for r, g in enumerate(regions) if t in g.reads]
        assert min(writers) < min(readers, default=len(regions)), f"'{graph.tensors[t].name}' is read before it is stored"
        lives.append((tensor_bytes(graph.tensors[t]), min(writers), max(writers + readers), t))
    for size, first, last, t in sorted(lives, key=lambda x: (-x[0], x[3])):
        memory[t] = Buffer("workspace", 0, arena.place(size, first, last) + bytes_below(graph.tensors[t]))
    kernels: list[KernelSpec] = []
    steps: list[Step] = []
    owned = []
    for r, (region, option) in enumerate(zip(regions, candidate.options, strict=True)):
        used = {t: memory[t] for t in (*region.reads, *region.stores)} | views.buffers(graph, region, memory)
        part = option.engine.lower(graph, region, device, option.knobs, used)
        base = arena.place(part.workspace, r, r)
        numbers = [_number(kernels, k) for k in part.kernels]
        owned.append(tuple(dict.fromkeys(numbers)))
        steps.extend(_step(s, numbers, base) for s in part.steps)
    return Recipe(tuple(kernels), tuple(steps), arena.size), tuple(owned)


def _number(kernels: list[KernelSpec], spec: KernelSpec) -> int:
    """Position of ``spec`` in ``kernels``; equal kernels of several regions are one."""
    for i, k in enumerate(kernels):
        if k.name == spec.name and k == spec:
            return i
    kernels.append(spec)
    return len(kernels) - 1


def _step(step: Step, numbers: Sequence[int], base: int) -> Step:
    def buffer(b: Buffer) -> Buffer:
        return Buffer("workspace", 0, b.offset + base) if b.kind == "workspace" and b.index == SCRATCH else b

    return mapped(step, buffer, numbers.__getitem__)


def arg_buffer(arg: Arg) -> Buffer | None:
    """The memory that an argument names."""
    return arg if isinstance(arg, Buffer) else arg.buffer if isinstance(arg, TensorMap) else None


def buffers(recipe: Recipe) -> list[Buffer]:
    """Every buffer that a recipe names."""
    found = [b for x in launches(recipe) for b in map(arg_buffer, x.args) if b is not None]
    for s in recipe.steps:
        if isinstance(s, Memset):
            found.append(s.buffer)
        elif isinstance(s, Panels | Groups):
            found.extend((s.a.buffer, s.b.buffer, s.panel.buffer))
        if isinstance(s, Groups):
            found.append(s.starts.buffer)
        elif isinstance(s, Check):
            found.extend(x.buffer for x in listings(s).values())
    return found
