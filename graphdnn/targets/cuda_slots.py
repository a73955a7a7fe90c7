"""What a launch on a GPU takes from a call: which addresses and numbers, and in which order they lie in a block of launch values."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from graphdnn.codegen.spec import Buffer, Check, Constant, KernelSpec, Memset, Recipe, Step, TensorMap, TensorScalar

FORMATS = {"float32": "f4x", "float64": "d", "int32": "i4x", "uint32": "I4x", "int64": "q"}
"""Types of numbers by value, as module struct writes them into a slot of 8 bytes."""


class Slots(NamedTuple):
    """Order of the values in a block: addresses (plain tensors, offset tensors, workspace parts), then scalars."""

    tensors: tuple[int, ...]
    offset_tensors: tuple[tuple[int, int], ...]
    """Position of the tensor among ``tensors``, offset in bytes."""
    workspace: tuple[int, ...]
    scalars: tuple[tuple[int, str], ...]

    @property
    def pointers(self) -> int:
        """How many addresses there are."""
        return len(self.tensors) + len(self.offset_tensors) + len(self.workspace)

    def position(self, arg: Buffer | TensorScalar, type: str) -> int:
        """Slot number of an argument."""
        if isinstance(arg, TensorScalar):
            return self.pointers + self.scalars.index((arg.index, type))
        if arg.kind == "workspace":
            return len(self.tensors) + len(self.offset_tensors) + self.workspace.index(arg.offset)
        if arg.offset:
            return len(self.tensors) + self.offset_tensors.index((self.tensors.index(arg.index), arg.offset))
        return self.tensors.index(arg.index)


def collect(steps: Sequence[Any], kernels: Sequence[KernelSpec], checked: Iterable[Buffer] = ()) -> Slots:
    """Every distinct value that the steps take from a call; tensors in the order of their ids, also those that are only ``checked``."""
    tensors = {b.index for b in checked if b.kind == "tensor"}
    offset_tensors: dict[tuple[int, int], None] = {}
    workspace: dict[int, None] = {}
    scalars: dict[tuple[int, str], None] = {}
    for step in steps:
        pairs = (
            [(step.buffer, "")]
            if isinstance(step, Memset)
            else [(a, getattr(p, "type", "")) for a, p in zip(step.args, kernels[step.kernel].params, strict=True)]
        )
        for given, type in pairs:
            arg = given.buffer if isinstance(given, TensorMap) else given
            if isinstance(arg, TensorScalar):
                scalars[(arg.index, type)] = None
            elif isinstance(arg, Buffer) and arg.kind == "workspace":
                workspace[arg.offset] = None
            elif isinstance(arg, Buffer):
                tensors.add(arg.index)
                if arg.offset:
                    offset_tensors[(arg.index, arg.offset)] = None
    order = tuple(sorted(tensors))
    return Slots(order, tuple((order.index(t), n) for t, n in offset_tensors), tuple(workspace), tuple(scalars))


def getter(ids: tuple[int, ...]) -> Callable[[Any], tuple[int, ...]]:
    """Fetches the addresses of ``ids`` as a tuple, in C where there are several."""
    if not ids:
        return lambda pointers: ()
    if len(ids) == 1:
        first = ids[0]
        return lambda pointers: (pointers[first],)
    return itemgetter(*ids)


def checks_before(recipe: Recipe, launched: Sequence[Step]) -> dict[int, tuple[Check, ...]]:
    """Checks by the number, among the steps that are launched, of the one that they stand before."""
    found: dict[int, tuple[Check, ...]] = {}
    number = 0
    for step in recipe.steps:
        if isinstance(step, Check):
            found[number] = (*found.get(number, ()), step)
        elif number < len(launched) and step is launched[number]:
            number += 1
    return found


class Constants:
    """Numbers known at build, each in memory of its own that every block shares; only read after the load."""

    def __init__(self) -> None:
        """None yet."""
        self._kept: dict[bytes, Any] = {}

    def address(self, arg: Constant, type: str) -> int:
        """Address of the constant in the type of its parameter."""
        bits = as_bits(arg.value, type)
        memory = self._kept.setdefault(bits, ctypes.create_string_buffer(bits, 8))
        return ctypes.addressof(memory)


def as_bits(value: float | int, type: str) -> bytes:
    """8 bytes that hold ``value`` as ``type``; a double beyond float32 becomes an infinity, as in a cast."""
    if type == "float32":
        return bytes(ctypes.c_float(float(value))).ljust(8, b"\0")
    return struct.pack("<" + FORMATS[type], float(value) if type == "float64" else int(value))
