"""Whether two strided tensors share memory."""

from __future__ import annotations

from typing import Any

from graphdnn.dtypes import info
from graphdnn.ir.tensor import Tensor

_MAX_WORK: Any = 100_000
"""Steps that NumPy may take to decide whether two strided tensors meet."""


def disjoint(a: Tensor, p: int, b: Tensor, q: int) -> bool:
    """Whether two strided tensors whose byte ranges meet share no byte (columns of one matrix, heads of one packed buffer)."""
    import numpy as np

    if min(info(a.dtype).bits, info(b.dtype).bits) < 8:
        return False
    views = [np.asarray(_View(t, at)) for t, at in ((a, p), (b, q))]
    try:
        return not np.shares_memory(views[0], views[1], max_work=_MAX_WORK)
    except np.exceptions.TooHardError:
        return False


class _View:
    """Describes a tensor at an address to NumPy, which only compares addresses: the memory may be a GPU's."""

    def __init__(self, tensor: Tensor, pointer: int) -> None:
        size = info(tensor.dtype).bits // 8
        strides = tuple(s * size for s in tensor.strides)
        self.__array_interface__ = {"version": 3, "typestr": f"|V{size}", "shape": tensor.dim, "strides": strides, "data": (pointer, False)}
