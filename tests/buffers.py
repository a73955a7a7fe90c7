"""Guarded buffers: a tensor's declared elements inside a larger block of bytes whose every other byte is checked after a run.

On a CPU a buffer ends where a page begins that nobody may touch: a kernel that reads past it, though only what it does not use, ends the process
(see :func:`fenced` for a GPU).

A buffer is laid out as GUARD bytes, ``offset`` elements, the tensor's extent, GUARD bytes. Before a run an output is full of 0xFF (NaN in every float
type, -1 in the integers), guards hold 0xA5. After it, only the bytes of logical elements of an output may have changed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphdnn.dtypes import data_type, info, numpy_dtype

GUARD = 256
"""Bytes before and after; keeps a block that starts 256-byte aligned at that alignment."""
GUARD_BYTE = 0xA5
OUTPUT_BYTE = 0xFF
Array = np.ndarray[Any, np.dtype[Any]]


def positions(dim: tuple[int, ...], stride: tuple[int, ...]) -> Array:
    """Element offset of every logical element, as an int64 array of shape ``dim``. Size-1 dims add nothing whatever their stride says."""
    at = np.zeros(dim, np.int64)
    for axis, (d, s) in enumerate(zip(dim, stride, strict=True)):
        shape = [1] * len(dim)
        shape[axis] = d
        at = at + (np.arange(d, dtype=np.int64) * s).reshape(shape)
    return at


def aligned_bytes(count: int) -> Array:
    """Uninitialized bytes that start at a multiple of 256."""
    raw = np.empty(count + 256, np.uint8)
    shift = -raw.ctypes.data % 256
    return raw[shift : shift + count]


def fenced_bytes(count: int) -> Array:
    """Uninitialized bytes that end at a page that may be neither read nor written. Not aligned, as buffers of a CPU need not be."""
    size = -(-count // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = np.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), np.uint8)
    failed = ctypes.CDLL(None).mprotect(ctypes.c_void_p(pages.ctypes.data + size), ctypes.c_size_t(mmap.PAGESIZE), 0)
    assert not failed, "mprotect failed"
    return pages[size - count : size]


def fenced(device: str) -> bool:
    """Whether buffers for ``device`` end with the tensor. On a GPU only with GRAPHDNN_TEST_FENCE: no page ends there, but compute-sanitizer knows
    where an allocation does."""
    return device == "cpu" or bool(os.environ.get("GRAPHDNN_TEST_FENCE")) and device.startswith("cuda:")


def encode(values: Array, dtype: data_type) -> Array:
    """Elements of ``dtype`` for values that are representable in it (4-bit types: one element a byte, low nibble)."""
    if info(dtype).bits == 4:
        return np.asarray(values).astype(numpy_dtype(dtype)).view(np.uint8) & 15
    return np.asarray(values).astype(numpy_dtype(dtype))


def decode(elements: Array, dtype: data_type) -> Array:
    """float64 (float types) or int64 values of stored elements, as :func:`encode` made them."""
    kind = info(dtype).kind
    if info(dtype).bits == 4:
        signed = (elements.astype(np.int64) ^ 8) - 8
        return signed if kind == "i" else elements.astype(np.uint8).view(numpy_dtype(dtype)).astype(np.float64)
    if kind == "b":
        return elements.view(np.uint8).astype(np.int64)
    with np.errstate(invalid="ignore"):
        return elements.astype(np.float64 if kind == "f" else np.int64)


@dataclass
class Guarded:
    """One buffer. ``block``: all bytes; the tensor starts at byte ``start`` and ends ``tail`` bytes before the last; ``at``: element offsets of the
    logical elements from there. A packed tensor has elements only where ``inside`` is true."""

    dim: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: data_type
    block: Array
    start: int
    at: Array
    snapshot: Array | None = None
    device_block: Any = None
    inside: Array | None = None
    tail: int = GUARD

    @classmethod
    def packed(cls, dim: tuple[int, ...], stride: tuple[int, ...], dtype: data_type, starts: Array, rows: Array, fence: bool = False) -> Guarded:
        """A buffer for a packed tensor: batch b starts at element ``starts[b]`` and has ``rows[b]`` rows (dim 2)."""
        at = positions(dim, (0, *stride[1:])) + starts.reshape(-1, 1, 1, 1)
        inside = np.broadcast_to(np.arange(dim[2]).reshape(1, 1, -1, 1) < rows.reshape(-1, 1, 1, 1), dim)
        made = cls.make((int(at[inside].max(initial=-1)) + 1,), (1,), dtype, fence=fence)
        made.dim, made.stride, made.at, made.inside = dim, stride, at, inside
        return made

    @classmethod
    def make(cls, dim: tuple[int, ...], stride: tuple[int, ...], dtype: data_type, offset: int = 0, fence: bool = False) -> Guarded:
        """A buffer for a tensor that starts ``offset`` elements (an even number for 4-bit types) after an aligned address, or, with ``fence``, that
        ends where nothing may be read."""
        at, bits = positions(dim, stride), info(dtype).bits
        extent = int(at.max()) + 1 if at.size else 0
        nbytes, start = (extent * bits + 7) // 8, GUARD + offset * bits // 8
        block = fenced_bytes(start + nbytes) if fence else aligned_bytes(start + nbytes + GUARD)
        block[:] = GUARD_BYTE
        block[start : start + nbytes] = OUTPUT_BYTE
        return cls(dim, stride, dtype, block, start, at, tail=0 if fence else GUARD)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor itself."""
        return len(self.block) - self.start - self.tail

    def elements(self) -> Array:
        """The tensor's memory as a flat array of elements (bytes for 4-bit types)."""
        body = self.block[self.start : self.start + self.nbytes]
        return body if info(self.dtype).bits == 4 else body.view(numpy_dtype(self.dtype))

    def write(self, values: Array) -> None:
        """Store logical ``values``; where elements overlap (stride 0) the last one in row-major order stays."""
        data, flat = encode(np.broadcast_to(values, self.dim), self.dtype).reshape(-1), self.elements()
        if self.inside is not None:
            flat[self.at[self.inside]] = data[self.inside.reshape(-1)]
            return
        if info(self.dtype).bits != 4:
            flat[self.at.reshape(-1)] = data
            return
        for position, nibble in zip(self.at.reshape(-1).tolist(), data.tolist(), strict=True):
            shift = position % 2 * 4
            flat[position // 2] = (int(flat[position // 2]) & (0xF0 >> shift)) | (nibble << shift)

    def read(self) -> Array:
        """Logical values, float64 or int64."""
        flat = self.elements()
        if self.inside is not None:  # what is outside is no part of the tensor: NaN, or the largest integer
            found = np.full(self.dim, np.nan if info(self.dtype).kind == "f" else info(self.dtype).limits[1])
            found = found if info(self.dtype).kind == "f" else found.astype(np.int64)
            found[self.inside] = decode(flat[self.at[self.inside]], self.dtype)
            return found
        if info(self.dtype).bits == 4:
            return decode((flat[self.at // 2] >> (self.at % 2 * 4).astype(np.uint8)) & 15, self.dtype)
        return decode(flat[self.at], self.dtype)

    def freeze(self) -> None:
        """Remember every byte, to compare after the run."""
        self.snapshot = self.block.copy()

    def damage(self, written: bool) -> str:
        """Empty if only what may change has changed since :meth:`freeze`, else a text that says which bytes did. ``written``: it is an output."""
        assert self.snapshot is not None, "freeze() before a run"
        changed = np.flatnonzero(self.block != self.snapshot)
        if written:
            bits = info(self.dtype).bits
            at = self.at if self.inside is None else self.at[self.inside]
            first = at.reshape(-1) * bits // 8 + self.start
            allowed = (first[:, None] + np.arange(max(bits // 8, 1))).reshape(-1)
            changed = np.setdiff1d(changed, allowed)
            changed = np.union1d(changed, self._spoiled_nibbles()) if bits == 4 else changed
        if not changed.size:
            return ""
        what = "outside the elements" if written else "of an input"
        return f"{changed.size} bytes {what} changed, first at {changed[0] - self.start} from the tensor's start"

    def _spoiled_nibbles(self) -> Array:
        """Bytes in which a half that belongs to no element has changed."""
        nibbles = np.stack([self.block & 15, self.block >> 4], 1).reshape(-1)
        assert self.snapshot is not None
        before = np.stack([self.snapshot & 15, self.snapshot >> 4], 1).reshape(-1)
        changed = np.flatnonzero(nibbles != before)
        return np.setdiff1d(changed, self.at.reshape(-1) + 2 * self.start) // 2

    # what goes into a variant pack

    def address(self, device: str) -> int:
        """Address of the tensor on ``device``; uploads the block to a GPU first."""
        if not device.startswith("cuda:"):
            return int(self.block.ctypes.data) + self.start
        import torch

        self.device_block = torch.from_numpy(self.block).to(device)
        return int(self.device_block.data_ptr()) + self.start

    def fetch(self) -> None:
        """Bring a GPU's bytes back."""
        if self.device_block is not None:
            self.block[:] = self.device_block.cpu().numpy()

    def numpy_view(self) -> Array:
        """A NumPy array with the declared dims and strides over the buffer (flat bytes for 4-bit types)."""
        flat = self.elements()
        if info(self.dtype).bits == 4 or self.inside is not None:
            return flat
        body = self.block[self.start : self.start + self.nbytes]
        return np.ndarray(self.dim, flat.dtype, buffer=body.data, strides=tuple(s * flat.itemsize for s in self.stride))

    def torch_view(self, device: str) -> Any:
        """The same as a torch tensor on the CPU or on a GPU."""
        import torch

        if device.startswith("cuda:"):
            self.address(device)
            flat = self.device_block[self.start : self.start + self.nbytes]
        else:
            flat = torch.from_numpy(self.block[self.start : self.start + self.nbytes])
        name = info(self.dtype).torch
        if name is None:
            return flat
        if self.inside is not None:
            return flat.view(getattr(torch, name))
        return flat.view(getattr(torch, name)).as_strided(self.dim, self.stride)
