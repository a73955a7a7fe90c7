"""What a plan needs of a variant pack, worked out once: a slot for every buffer, numbers, alignments, what may overlap. See ``variant_pack``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from graphdnn.codegen.recipes import launches
from graphdnn.codegen.spec import PointerParam, Recipe, TensorScalar
from graphdnn.dtypes import data_type, info
from graphdnn.ir.opgraph import OperationGraph
from graphdnn.ir.tensor import Dims, Tensor
from graphdnn.plans import scalars
from graphdnn.plans.assemble import arg_buffer, buffers, bytes_below, tensor_bytes
from graphdnn.plans.variant_pack import NEVER, Binder, Slot

if TYPE_CHECKING:
    from graphdnn.device import DeviceProps

TMA_ALIGNMENT = 16
"""Bytes that the address in a TMA descriptor must be divisible by."""
_STANDS_FOR: dict[data_type, tuple[str, ...]] = {
    data_type.HALF: ("uint16", "int16", "void16"),
    data_type.BFLOAT16: ("uint16", "int16", "void16"),
    data_type.BOOLEAN: ("uint8", "int8"),
    data_type.UINT8: ("bool",),
    data_type.INT4: ("uint8", "int8"),
    data_type.FP4_E2M1: ("uint8", "int8", "float4_e2m1fn_x2"),
} | dict.fromkeys((data_type.FP8_E4M3, data_type.FP8_E5M2, data_type.FP8_E8M0), ("uint8", "int8", "void8"))
"""Integer storage of the same size that frameworks without a data type use for it."""


def accepted(dtype: data_type) -> frozenset[str]:
    """Names of array data types that may hold ``dtype``. Packed types are not held by their one-value-a-byte array types."""
    facts = info(dtype)
    own = () if facts.bits < 8 else (facts.numpy,)
    return frozenset((*own, *_STANDS_FOR.get(dtype, ())))


def prepare(
    graph: OperationGraph, device: DeviceProps, recipe: Recipe, space: Dims | None = None, inplace: frozenset[tuple[int, int]] = frozenset()
) -> Binder:
    """The binder of a plan. ``space``: see :func:`overlap.elementwise_space`; an output of these dims may lie exactly on an input that is alike.
    ``inplace``: further (output, input) ids that may share memory."""
    needs = _alignments(recipe)
    numbers = sorted({a.index for x in launches(recipe) for a in x.args if isinstance(a, TensorScalar)})
    names = {t: accepted(graph.tensors[t].dtype) for t in needs}
    outputs = set(graph.outputs)
    cpu = device.kind == "cpu"
    slots = []
    for t in sorted(needs):
        total, below = tensor_bytes(graph.tensors[t]), bytes_below(graph.tensors[t])
        slots.append(Slot(t, graph.tensors[t], total - below, below, 1 if cpu else needs[t], t in outputs, names[t], set(_known(names[t]))))
    order = [s.tensor for s in slots] + [graph.tensors[t] for t in numbers]
    by_name: dict[str, int | None] = {}
    for at, tensor in enumerate(order):
        by_name[tensor.name] = None if tensor.name in by_name else at
    defaults = {t: _stored(graph.tensors[t]) for t in numbers if graph.tensors[t].value is not None}
    return Binder(
        slots=tuple(slots),
        ids=tuple(s.index for s in slots),
        numbers=tuple((t, graph.tensors[t], scalars.converter(graph.tensors[t].dtype)) for t in numbers),
        by_uid={t.uid: at for at, t in enumerate(order)},
        by_name=by_name,
        defaults=defaults,
        checks=tuple((s.types, NEVER if s.below else s.nbytes, s.alignment - 1, s.written) for s in slots),
        keys={t.uid: at for at, t in enumerate(order)},
        apart=set(),
        pairs=tuple(_pairs(slots, space, inplace)),
        host=device.kind != "cuda",
        device="cpu" if device.kind != "cuda" else f"cuda:{max(device.index, 0)}",
        ordinal=device.index,
        workspace=recipe.workspace,
        packed=frozenset(at for at, s in enumerate(slots) if s.tensor.ragged),
        workspace_alignment=1 if cpu else max([16, *(p.alignment for k in recipe.kernels for p in k.params if isinstance(p, PointerParam))]),
    )


def _stored(tensor: Tensor) -> float | int:
    assert tensor.value is not None
    return scalars.converter(tensor.dtype)(tensor.value)


def _known(names: Iterable[str]) -> Iterable[Any]:
    """NumPy data types of these names, so that the first bind is as fast as the others."""
    import numpy as np

    for name in names:
        try:
            yield np.dtype(name)
        except TypeError:
            continue


def _alignments(recipe: Recipe) -> dict[int, int]:
    """Tensor id -> what the kernels rely on, in bytes."""
    found = {b.index: 1 for b in buffers(recipe) if b.kind == "tensor"}
    for launch in launches(recipe):
        for param, arg in zip(recipe.kernels[launch.kernel].params, launch.args, strict=True):
            buffer = arg_buffer(arg)
            if buffer is not None and buffer.kind == "tensor":
                alignment = param.alignment if isinstance(param, PointerParam) else TMA_ALIGNMENT
                found[buffer.index] = max(found[buffer.index], alignment)
    return found


def _pairs(slots: Sequence[Slot], space: Dims | None, inplace: frozenset[tuple[int, int]]) -> Iterable[tuple[int, int, int, int, int, bool]]:
    for i, out in enumerate(slots):
        if not out.written or not out.nbytes:
            continue
        for j, other in enumerate(slots):
            if i == j or not other.nbytes or (other.written and j < i):
                continue
            a, b = out.tensor, other.tensor
            alike = (a.dim, a.strides, info(a.dtype).bits) == (b.dim, b.strides, info(b.dtype).bits)
            yield i, j, out.nbytes, other.nbytes, other.below, not other.written and alike and (a.dim == space or (out.index, other.index) in inplace)
