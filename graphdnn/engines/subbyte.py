"""Outputs of sub-byte types (FP4_E2M1, INT4: two elements a byte, the even one in the low half).

Two threads would have to write one byte, so a kernel writes such an output with a byte for each element, to scratch, and a second kernel packs whole
bytes. Where the layout leaves gaps, or ends within a byte, a first kernel takes the halves that are not the output's from memory, so they stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphdnn.codegen.recipes import mapped
from graphdnn.codegen.spec import Buffer, KernelSpec, Launch, PointerParam, Recipe, Step
from graphdnn.dtypes import info
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.ir.tensor import Tensor
from graphdnn.passes.regions import Region

_FIRST = -2
"""Index of the workspace buffer that stands for the first unpacked output while a region is lowered; the next ones count downward."""
_BLOCK = 256
_UNPACK = ("p1[{i} * {two}] = uint8(int32(p0[{i}]) & int32(15))", "p1[{i} * {two} + {one}] = uint8(int32(p0[{i}]) >> int32(4))")
_PACK = ("p0[{i}] = uint8(int32(p1[{i} * {two}]) | (int32(p1[{i} * {two} + {one}]) << int32(4)))",)


def outputs(graph: OperationGraph, region: Region) -> tuple[int, ...]:
    """Sub-byte tensors that the region stores."""
    return tuple(t for t in region.stores if info(graph.tensors[t].dtype).bits < 8 and graph.tensors[t].size)


def unpacked(memory: Mapping[int, Buffer], tensors: tuple[int, ...]) -> dict[int, Buffer]:
    """``memory`` with stand-ins for ``tensors``."""
    return dict(memory) | {t: Buffer("workspace", _FIRST - n, 0) for n, t in enumerate(tensors)}


def packing(graph: OperationGraph, tensors: tuple[int, ...], recipe: Recipe, memory: Mapping[int, Buffer], cpu: bool) -> Recipe:
    """``recipe``, lowered with stand-ins, with their scratch placed after its own and the kernels that pack added."""
    places, at = {}, (recipe.workspace + 255) // 256 * 256
    for n, t in enumerate(tensors):
        places[_FIRST - n] = at
        at += (2 * _bytes(graph.tensors[t]) + 255) // 256 * 256

    def placed(b: Buffer) -> Buffer:
        return Buffer("workspace", -1, places[b.index] + b.offset) if b.kind == "workspace" and b.index in places else b

    kernels, before, after = list(recipe.kernels), [], []
    for n, t in enumerate(tensors):
        tensor, scratch = graph.tensors[t], Buffer("workspace", -1, places[_FIRST - n])
        nbytes = _bytes(tensor)
        if tensor.size != 2 * nbytes:
            kernels.append(_kernel("unpack", _UNPACK, nbytes, cpu, written="p1"))
            before.append(_launch(len(kernels) - 1, nbytes, memory[t], scratch, cpu))
        kernels.append(_kernel("pack", _PACK, nbytes, cpu, written="p0"))
        after.append(_launch(len(kernels) - 1, nbytes, memory[t], scratch, cpu))
    steps: tuple[Step, ...] = (*before, *(mapped(s, placed) for s in recipe.steps), *after)
    return Recipe(tuple(kernels), steps, at)


def _bytes(tensor: Tensor) -> int:
    return (tensor.extent + 1) // 2


def _kernel(word: str, lines: tuple[str, ...], nbytes: int, cpu: bool, written: str) -> KernelSpec:
    params = tuple(PointerParam(p, "uint8", 1, p == written) for p in ("p0", "p1"))
    itype = "int64" if cpu or nbytes >= 2**30 else "uint32"
    numbers = {"two": "2", "one": "1"} if cpu else {"two": f"{itype}(2)", "one": f"{itype}(1)"}
    body = [line.format(i="jl", **numbers) for line in lines]
    fields: dict[str, Any] = {"header": [f"# {word}s sub-byte elements, {nbytes} bytes"], "setup": [], "body": body}
    if cpu:
        return KernelSpec("cpu/pointwise.py.j2", f"{word}_{nbytes}", params, fields | {"flat": True})
    fields |= {"itype": itype, "items": nbytes, "split": [], "first": "item", "width": 1, "loads": [], "stores": [], "tail": False, "size": nbytes}
    return KernelSpec("cuda/pointwise.py.j2", f"{word}_{nbytes}", params, fields, block=_BLOCK)


def _launch(kernel: int, nbytes: int, memory: Buffer, scratch: Buffer, cpu: bool) -> Launch:
    return Launch(kernel, nbytes if cpu else -(-nbytes // _BLOCK), (memory, scratch), 32768 if cpu else 1)
