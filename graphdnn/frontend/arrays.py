"""What a graph must know of a framework array: extents, strides, data type, where it lives. Imports no framework that is not loaded already."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from graphdnn.dtypes import as_data_type, data_type, info
from graphdnn.errors import KindError, ValidationError, explain
from graphdnn.ir.layout import packed
from graphdnn.ir.tensor import Dims


@dataclass(frozen=True, slots=True)
class ArrayFacts:
    """Extents and strides in elements; ``dtype`` NOT_SET where the API has no type for the array's."""

    dim: Dims
    stride: Dims
    dtype: data_type
    on_cpu: bool

    @property
    def size(self) -> int:
        """Number of elements."""
        n = 1
        for d in self.dim:
            n *= d
        return n


def is_torch(value: object) -> bool:
    """Whether ``value`` is a torch tensor. Does not import torch: what has not been imported has no tensors."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_array(value: object) -> bool:
    """Whether ``value`` is an array of some framework. Graph tensors and numbers (NumPy's too) are not."""
    return hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")


def _dtype(value: object) -> data_type:
    try:
        found = as_data_type(value)
    except KindError:
        return data_type.NOT_SET
    return found


def _element_strides(strides: Any, itemsize: int, what: str) -> Dims:
    if any(s % itemsize for s in strides):
        raise ValidationError(
            explain(
                "strides of the array are no multiples of its element",
                expected=f"multiples of {itemsize} bytes",
                found=tuple(strides),
                fix=f"copy the {what} array",
            )
        )
    return tuple(int(s) // itemsize for s in strides)


def _of_numpy(array: Any) -> ArrayFacts:
    dtype = _dtype(array.dtype)
    if dtype is not data_type.NOT_SET and info(dtype).bits < 8:
        raise ValidationError(
            explain(
                "a NumPy array holds one element of this type a byte, a graphdnn buffer two",
                found=f"an array of {array.dtype}",
                fix="declare the tensor with pygraph.tensor(dim, stride, data_type) and bind a packed uint8 array",
            )
        )
    return ArrayFacts(tuple(array.shape), _element_strides(array.strides, array.itemsize, "NumPy"), dtype, True)


def _of_cuda_interface(array: Any) -> ArrayFacts:
    import numpy as np

    facts = array.__cuda_array_interface__
    element = np.dtype(facts["typestr"])
    shape = tuple(int(d) for d in facts["shape"])
    strides = facts.get("strides")
    stride = packed(shape) if strides is None else _element_strides(strides, element.itemsize, "device")
    return ArrayFacts(shape, stride, _dtype(element), False)


def describe(array: Any) -> ArrayFacts:
    """Facts of an array of torch, NumPy, CuPy, numba or anything with ``__cuda_array_interface__`` or DLPack. KindError for anything else."""
    if is_torch(array):
        return ArrayFacts(tuple(array.shape), tuple(array.stride()), _dtype(array.dtype), array.device.type == "cpu")
    import numpy as np

    if isinstance(array, np.ndarray):
        return _of_numpy(array)
    if hasattr(array, "__cuda_array_interface__"):
        return _of_cuda_interface(array)
    if hasattr(array, "__dlpack__"):
        on_cpu = array.__dlpack_device__()[0] == 1
        if on_cpu:
            view = np.from_dlpack(array)
            return ArrayFacts(tuple(view.shape), _element_strides(view.strides, view.itemsize, "DLPack"), _dtype(view.dtype), True)
        torch = sys.modules.get("torch")
        if torch is not None:
            return describe(torch.from_dlpack(array))
    raise KindError(
        explain(
            "not a tensor",
            expected="a graph tensor, or an array of torch, NumPy, CuPy, numba, or with __cuda_array_interface__ or DLPack",
            found=type(array).__name__,
        )
    )
