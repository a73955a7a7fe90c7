"""Device memory for tests and examples where no torch or cupy is installed. Plans never allocate: their buffers are the caller's."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphdnn import _libcuda
from graphdnn.targets.cuda_driver import activated, primary_context, synchronize


class DeviceArray:
    """A contiguous array on a GPU; other libraries take it by ``__cuda_array_interface__``. Freed when it is garbage-collected.

    ``address``: its device address. ``shape`` in elements. Raises ExecutionError if the device is out of memory.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, index: int = 0) -> None:
        self.shape = tuple(int(n) for n in shape)
        self.dtype = np.dtype(dtype)
        self.index = index
        self.nbytes = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        self.address = 0
        with activated(primary_context(index)):
            self.address = _libcuda.driver().handle("cuMemAlloc_v2", max(self.nbytes, 1))

    @classmethod
    def from_numpy(cls, array: Any, index: int = 0) -> DeviceArray:
        """A copy of a NumPy array (any strides; the copy is C-contiguous)."""
        host = np.ascontiguousarray(array)
        made = cls(array.shape, host.dtype, index)
        with activated(primary_context(index)):
            _libcuda.driver().call("cuMemcpyHtoD_v2", made.address, host.ctypes.data, made.nbytes)
        return made

    def numpy(self) -> Any:
        """A copy as a NumPy array, after all work on the device is done."""
        host = np.empty(self.shape, self.dtype)
        synchronize(self.index)
        with activated(primary_context(self.index)):
            _libcuda.driver().call("cuMemcpyDtoH_v2", host.ctypes.data, self.address, self.nbytes)
        return host

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.address, False), "version": 3, "strides": None}

    def __del__(self) -> None:
        if getattr(self, "address", 0) and not _libcuda.forked:
            # Not ``call``: an error here (a context that failed, an interpreter that ends) has nobody to go to.
            _libcuda.driver().function("cuMemFree_v2")(self.address)


class Stream:
    """A stream of one's own that does not wait for the legacy default stream. ``handle`` is what ``set_stream`` takes."""

    def __init__(self, index: int = 0) -> None:
        self.index = index
        with activated(primary_context(index)):
            self.handle = _libcuda.driver().handle("cuStreamCreate", 1)

    def synchronize(self) -> None:
        """Wait for the work of the stream. Raises ExecutionError if it failed."""
        with activated(primary_context(self.index)):
            _libcuda.driver().call("cuStreamSynchronize", self.handle)
