"""By-value tensors: the number that a user hands over in whatever form, as a value of the tensor's data type."""

from __future__ import annotations

import ctypes
import math
import struct
import sys
from collections.abc import Callable
from typing import Any

from graphdnn.dtypes import data_type, info
from graphdnn.errors import ValidationError, explain
from graphdnn.ir.tensor import Tensor

Number = float | int


def number(value: Any, tensor: Tensor) -> Number:
    """The Python number in ``value``: a number, a NumPy scalar, or a one-element array in host memory. ValidationError for anything else."""
    if isinstance(value, (int, float)):
        return value
    found = type(value).__name__
    size = getattr(value, "size", None)
    count = value.numel() if hasattr(value, "numel") else size if isinstance(size, int) else None
    on_host = not (hasattr(value, "__dlpack_device__") and int(value.__dlpack_device__()[0]) not in (1, 3, 11)) if count is not None else True
    if not on_host:
        raise _refuse(tensor, f"{found} on a device", "give a Python number or a CPU tensor: reading device memory would stop the stream")
    if hasattr(value, "item") and count in (1, None):
        read = value.item()
        return read if isinstance(read, (int, float)) else float(read)
    if count is None and hasattr(value, "__dlpack__"):
        import numpy as np

        return number(np.from_dlpack(value), tensor)
    raise _refuse(tensor, f"{found} of {count} elements" if count is not None else found, "give a Python number or a CPU array of one element")


def _refuse(tensor: Tensor, found: str, fix: str) -> ValidationError:
    return ValidationError(
        explain(
            f"a by-value tensor (uid {tensor.uid}) takes one number", tensor=tensor.name, expected="one number in host memory", found=found, fix=fix
        )
    )


def _half(x: Number) -> float:
    try:
        return float(struct.unpack("<e", struct.pack("<e", x))[0])
    except OverflowError:
        return math.inf if x > 0 else -math.inf


def _float(x: Number) -> float:
    try:
        return ctypes.c_float(x).value
    except OverflowError:
        return math.inf if x > 0 else -math.inf


def _double(x: Number) -> float:
    try:
        return float(x)
    except OverflowError:
        return math.inf if x > 0 else -math.inf


def _bfloat(x: Number) -> float:
    single = _float(x)
    if math.isnan(single) or math.isinf(single):
        return single
    bits = struct.unpack("<I", struct.pack("<f", single))[0]
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def _integer(low: int, high: int) -> Callable[[Number], int]:
    def convert(x: Number) -> int:
        if isinstance(x, int):  # integers wrap
            return (int(x) - low) % (high - low + 1) + low
        return 0 if math.isnan(x) else max(low, min(high, round(max(-1e30, min(1e30, x)))))

    return convert


def _through_numpy(dtype: data_type) -> Callable[[Number], Number]:
    def convert(x: Number) -> Number:
        import numpy as np

        from graphdnn.dtypes import numpy_dtype

        low, high = info(dtype).limits
        kept = x if math.isnan(x) else max(low, min(high, x))
        return float(np.asarray(kept, np.float32).astype(numpy_dtype(dtype)).astype(np.float32))

    return convert


_FLOATS: dict[data_type, Callable[[Number], Number]] = {
    data_type.FLOAT: _float,
    data_type.DOUBLE: _double,
    data_type.HALF: _half,
    data_type.BFLOAT16: _bfloat,
    data_type.BOOLEAN: lambda x: int(x != 0),
}


def converter(dtype: data_type) -> Callable[[Number], Number]:
    """The function that rounds a number to ``dtype`` as a kernel would on a store: half to even; small floats and integers saturate."""
    if dtype in _FLOATS:
        return _FLOATS[dtype]
    facts = info(dtype)
    if facts.kind == "i":
        return _integer(int(facts.limits[0]), int(facts.limits[1]))
    return _through_numpy(dtype)


def read(value: Any, tensor: Tensor, convert: Callable[[Number], Number]) -> Number:
    """``value`` as a number of the tensor's data type."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.is_cpu and value.numel() == 1:
        return convert(value.item())
    return convert(number(value, tensor))
