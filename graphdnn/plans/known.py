"""Packs that a plan knows again: compiled code (``graphdnn/native``) runs one that looks like the last one that Python has checked.

"Looks like" is every fact that the check depends on: keys, type of each value, device, data type, dims, strides, alignment, and addresses that do not
overlap. A number may change where its data type takes Python's numbers as they are. Anything else comes here, is looked at closely, and is learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from graphdnn.dtypes import data_type
from graphdnn.errors import GraphError
from graphdnn.plans.buffers import KINDS, POINTER, TORCH
from graphdnn.plans.quick import reach
from graphdnn.plans.variant_pack import Binder

if TYPE_CHECKING:
    from graphdnn.targets.cuda_launch import CudaExecutable

_MAX_LOOKS = 64
"""So often a plan learns: packs that are never alike shall not pay for it."""
_FORMATS = {
    (data_type.FLOAT, "float32"): "f",
    (data_type.DOUBLE, "float64"): "d",
    (data_type.INT32, "int32"): "i",
    (data_type.INT64, "int64"): "q",
}
"""Data type of a by-value tensor, type of the parameter -> how compiled code writes a Python number of its kind. Others only repeat."""


class Known:
    """What one loaded plan knows again. ``run(pack, workspace, handle)``: whether all is enqueued; else nothing was done."""

    def __init__(self, binder: Binder, executable: CudaExecutable) -> None:
        """Nothing is known yet."""
        self._binder, self._executable, self._left = binder, executable, _MAX_LOOKS
        slots, numbers = executable.slots, [index for index, _, _ in binder.numbers]
        at = [binder.ids.index(t) for t in slots.tensors]
        sources = [(p, 0) for p in at] + [(at[p], n) for p, n in slots.offset_tensors] + [(-1, n) for n in slots.workspace]
        scalars = [
            (numbers.index(t), slots.pointers + i, _FORMATS.get((binder.numbers[numbers.index(t)][1].dtype, type), "0"))
            for i, (t, type) in enumerate(slots.scalars)
        ]
        masks = (*(mask for _, _, mask, _ in binder.checks), binder.workspace_alignment - 1)
        self._call = executable.native.Call(
            executable.device, bool(binder.workspace), masks, tuple(sources), len(numbers), tuple(scalars), tuple(binder.pairs)
        )
        self.run = self._call.run

    def learn(self, pack: Mapping[Any, Any], workspace: Any, handle: Any) -> None:
        """Know packs like this one, which ``execute`` has run, from now on, if they can be known."""
        binder, count = self._binder, len(self._binder.checks)
        if not self._left or type(pack) is not dict or not (handle is None or hasattr(handle, "stream")):  # the number of a handle is looked up
            return
        self._left -= 1
        try:
            addresses, numbers, at = binder.place(pack, workspace)
        except GraphError:  # another plan has run it
            return
        keys = tuple(pack)
        positions = tuple(map(binder.position, keys))
        found: list[Any] = [None] * (count + len(binder.numbers) + 1)
        for position, value in zip(positions, pack.values(), strict=True):
            found[position] = value
        tensors = tuple(found[:count])
        if all(map(_fits, tensors, (nbytes for _, nbytes, _, _ in binder.checks))) and (not binder.workspace or _fits(workspace, binder.workspace)):
            launches, values = self._executable.native_launches(addresses, numbers, at)
            self._call.learn(keys, positions, tensors, tuple(addresses), workspace, handle, tuple(found[count:-1]), values)
            self._call.add(launches)


def _fits(value: Any, nbytes: int) -> bool:
    """Whether all that is needed of the value, which has been checked, is in what compiled code looks at."""
    kind = KINDS.get(type(value))
    return kind == POINTER or (kind == TORCH and reach(value) >= nbytes)
