"""TMA descriptors on a GPU: encoded once when a plan is loaded, copied for each block of launch values, their address patched where it changes."""

from __future__ import annotations

import ctypes
from typing import Any

from graphdnn._libcuda import Driver
from graphdnn.codegen.spec import TensorMap
from graphdnn.dtypes import data_type
from graphdnn.errors import ExecutionError, explain

BYTES = 128
_ALIGNMENT = 64
_DATA_TYPES = {
    data_type.UINT8: 0,
    data_type.INT8: 0,
    data_type.FP8_E4M3: 0,
    data_type.FP8_E5M2: 0,
    data_type.INT32: 3,
    data_type.INT64: 5,
    data_type.HALF: 6,
    data_type.FLOAT: 7,
    data_type.DOUBLE: 8,
    data_type.BFLOAT16: 9,
}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_PROMOTE_256 = 3
_PLACEHOLDER = 1 << 20
"""The address at load: encoding only looks at its alignment."""


def encode(driver: Driver, tensor_map: TensorMap) -> bytes:
    """The descriptor, with a placeholder as address. Raises ExecutionError if the driver refuses it. A context must be current."""
    rank = len(tensor_map.dims)
    kind, swizzle = _DATA_TYPES.get(tensor_map.dtype), _SWIZZLES.get(tensor_map.swizzle)
    if kind is None or swizzle is None or not rank == len(tensor_map.box) == len(tensor_map.strides) + 1:
        raise ExecutionError(explain("the plan has a tensor map that cannot be encoded", found=repr(tensor_map)))
    out = _aligned()
    dims, strides = (ctypes.c_uint64 * rank)(*tensor_map.dims), (ctypes.c_uint64 * max(rank - 1, 1))(*tensor_map.strides)
    box, steps = (ctypes.c_uint32 * rank)(*tensor_map.box), (ctypes.c_uint32 * rank)(*[1] * rank)
    places = (ctypes.addressof(x) for x in (dims, strides, box, steps))
    result = driver.function("cuTensorMapEncodeTiled")(ctypes.addressof(out), kind, rank, _PLACEHOLDER, *places, 0, swizzle, _PROMOTE_256, 0)
    driver.check(result, f"encoding the TMA descriptor of {tensor_map}")
    return bytes(out)


def _aligned() -> Any:
    """BYTES bytes at a multiple of _ALIGNMENT."""
    memory = ctypes.create_string_buffer(BYTES + _ALIGNMENT)
    return (ctypes.c_char * BYTES).from_buffer(memory, -ctypes.addressof(memory) % _ALIGNMENT)


class Descriptor:
    """A descriptor among the launch values of one block. ``slot``: which of the block's addresses it follows."""

    __slots__ = ("_replace", "address", "memory", "now", "slot")

    def __init__(self, driver: Driver, encoded: bytes, slot: int) -> None:
        self.memory = _aligned()
        self.memory[:] = encoded
        self.address = ctypes.addressof(self.memory)
        self.slot = slot
        self._replace = driver.function("cuTensorMapReplaceAddress")
        self.now = 0

    def move(self, driver: Driver, address: int) -> None:
        """Let the descriptor point to ``address``, a multiple of 16. Raises ExecutionError if the driver refuses it."""
        if address != self.now:
            driver.check(self._replace(self.address, address), f"moving a TMA descriptor to {address:#x}")
            self.now = address
