"""Execution by raw addresses: the private methods that programs written for the cuDNN Frontend reach for. ``bind`` is quicker, and public."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from graphdnn.errors import KindError, ValidationError, explain
from graphdnn.frontend.planning import Planning
from graphdnn.frontend.tensor import as_integer

if TYPE_CHECKING:
    from graphdnn.plans.plan import ExecutionPlan


class RawCalls(Planning):
    """Every address is an int. That of a by-value tensor is the address of its number in host memory."""

    def _execute(self, tensor_to_device_buffer: Mapping[int, int], workspace: int, handle: int | None = None) -> None:
        """Run the built plan on uid -> address; checked as ``execute`` checks addresses."""
        self.execute(_with_numbers(self.plan, tensor_to_device_buffer), workspace, handle)

    def _execute_plan_at_index(self, tensor_to_device_buffer: Mapping[int, int], workspace: int, index: int, handle: int | None = None) -> None:
        """Run one plan of the list on uid -> address."""
        self.execute_plan_at_index(_with_numbers(self.plan, tensor_to_device_buffer), workspace, index, handle)

    def _get_variant_pack_uids_sorted(self) -> list[int]:
        """Uids that the built plan needs, ascending: buffers, and by-value tensors that carry no number. BuildError before one is built."""
        binder = self.plan.load()[0]
        numbers = (t.uid for i, t, _ in binder.numbers if i not in binder.defaults)
        return sorted([*(s.tensor.uid for s in binder.slots), *numbers])

    def _prepare_variant_pack_template(self) -> None:
        """Load the built plan, so that the first call by addresses is as quick as the others. BuildError before one is built."""
        self.plan.load()

    def _execute_with_ptrs(self, ptrs: Sequence[int], workspace: int, handle: int | None = None) -> None:
        """Run the built plan on addresses in the order of ``_get_variant_pack_uids_sorted()``. ValidationError for another number of them, KindError
        for what is no sequence."""
        if not hasattr(ptrs, "__len__"):
            raise KindError(explain("ptrs has the wrong type", expected="a sequence of addresses", found=repr(ptrs)[:80]))
        uids = self._count_of(len(ptrs))
        self._execute(dict(zip(uids, ptrs, strict=True)), workspace, handle)

    def _count_of(self, count: int) -> list[int]:
        """The sorted uids; ValidationError unless there are so many."""
        uids = self._get_variant_pack_uids_sorted()
        if count != len(uids):
            raise ValidationError(explain("wrong number of addresses", expected=f"{len(uids)}, for uids {uids}", found=count))
        return uids

    def _execute_with_raw_ptrs(self, ptrs: int, count: int, workspace: int, handle: int | None = None) -> None:
        """``_execute_with_ptrs`` with the address of an array of ``count`` addresses (void**)."""
        if as_integer("ptrs", ptrs) <= 0:
            raise ValidationError(explain("the array of addresses is a null pointer", expected="the address of an array of void*", found=ptrs))
        self._count_of(as_integer("count", count))  # before so many are read
        self._execute_with_ptrs(list((ctypes.c_uint64 * count).from_address(ptrs)), workspace, handle)


def _with_numbers(plan: ExecutionPlan, pack: Mapping[int, int]) -> dict[int, Any]:
    """The pack with the numbers themselves for by-value tensors, read from host memory now."""
    given: dict[int, Any] = dict(pack)
    for _, tensor, _ in plan.load()[0].numbers:
        address = given.get(tensor.uid)
        if address:
            given[tensor.uid] = _read(address, tensor.dtype)
        else:
            given.pop(tensor.uid, None)
    return given


def _read(address: int, dtype: Any) -> float | int:
    import numpy as np

    from graphdnn.dtypes import numpy_dtype

    kind = numpy_dtype(dtype)
    value = np.frombuffer(ctypes.string_at(address, kind.itemsize), kind)[0]
    return int(value) if kind.kind in "iub" else float(value)
