"""Object code of CPU kernels as it is stored, and its way back into memory through llvmlite, without numba.

Stored form: 8 bytes of magic, SHA-256 of the rest, then JSON (entry, external symbols, host) and the object file. LLVM never sees bytes whose digest
is wrong: it may abort the process on a damaged object.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import json
import os
import struct
import threading
from dataclasses import dataclass
from typing import Any

from graphdnn.errors import ExecutionError, SerializationError, explain

PIPELINE = 2
"""Version of what cpu_compile does to a kernel and of the stored form: part of the toolchain key."""

MAGIC = b"gdnncpu1"
_LENGTH = struct.Struct("<I")
_HEAD = len(MAGIC) + 32
PROTOTYPE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64))
"""``status = kernel(lo, hi, block, chunk, counter)``: items [lo, hi) with the parameters in the 8-byte slots of ``block``. With a counter (0 at
first), threads that make the same call share the items: each claims ``chunk`` items at a time until none is left. Without one (None) the caller does
all. A ctypes call releases the GIL."""


@dataclass(frozen=True)
class ObjectCode:
    """One compiled kernel. ``entry`` has type PROTOTYPE; ``symbols``: functions that it calls outside (libm); ``host``: the CPU it was made for."""

    entry: str
    symbols: tuple[str, ...]
    host: str
    image: bytes

    def pack(self) -> bytes:
        """The stored form."""
        head = json.dumps({"entry": self.entry, "symbols": self.symbols, "host": self.host}, sort_keys=True).encode()
        body = _LENGTH.pack(len(head)) + head + self.image
        return MAGIC + hashlib.sha256(body).digest() + body

    @staticmethod
    def unpack(code: bytes) -> ObjectCode:
        """Read the stored form. Raises SerializationError for anything that :meth:`pack` did not write."""
        body = code[_HEAD:]
        if code[: len(MAGIC)] != MAGIC or hashlib.sha256(body).digest() != code[len(MAGIC) : _HEAD]:
            raise _unusable("is damaged", None, "object code whose SHA-256 agrees", f"{len(code)} bytes that do not")
        (length,) = _LENGTH.unpack_from(body)
        start = _LENGTH.size + length
        head = json.loads(body[_LENGTH.size : start])
        return ObjectCode(head["entry"], tuple(head["symbols"]), head["host"], body[start:])


def _llvm() -> Any:
    """llvmlite, which is all that a stored kernel needs to run. ExecutionError without it."""
    try:
        import llvmlite.binding
    except ImportError as error:
        fix = "pip install llvmlite; a plan for a GPU needs no compiler and no linker"
        raise ExecutionError(explain("a CPU plan is linked by llvmlite", expected="package llvmlite", found=str(error), fix=fix)) from error
    return llvmlite.binding


@functools.cache
def host_cpu() -> tuple[str, str, str]:
    """(LLVM triple, CPU name, CPU features) of this process, as LLVM's code generator takes them.

    Without AVX-512: LLVM 20 lowers a masked store of one lane of narrowed integers (``masked.store.v8i16`` of a ``trunc``, mask <1, 0, ...>), which
    its vectorizer makes of loops of 9 elements, to a 4-byte ``vmovd``, and so writes past the end (Xeon Emerald Rapids, 2026-11-29: 6 of 2,000 random
    graphs). AVX2 has no such masked store. Nothing is lost where memory is the limit.
    """
    llvm = _llvm()

    features = ("-" + f[1:] if f[1:].startswith(("avx512", "avx10")) else f for f in llvm.get_host_cpu_features().flatten().split(","))
    return llvm.get_process_triple(), llvm.get_host_cpu_name(), ",".join(features)


@functools.cache
def host_key() -> str:
    """Short text of :func:`host_cpu`: machine code made under one key does not run under another."""
    triple, name, features = host_cpu()
    return f"{triple}:{name}:{hashlib.sha256(features.encode()).hexdigest()[:16]}"


class LoadedKernel:
    """Machine code in memory. ``call`` is the entry; the code lives as long as this object."""

    __slots__ = ("_tracker", "call", "name")

    def __init__(self, name: str, address: int, tracker: Any) -> None:
        self.name = name
        self.call = PROTOTYPE(address)
        self._tracker = tracker


_lock = threading.Lock()
_count = itertools.count()
_jit: Any = None


def load(code: bytes) -> LoadedKernel:
    """Link stored object code into this process.

    Raises SerializationError if it is damaged, was made for another CPU, or calls a function that this process lacks (then the plan compiles anew).
    """
    stored = ObjectCode.unpack(code)
    if stored.host != host_key():
        raise _unusable("was made for another CPU", stored.entry, f"running on {host_key()}", f"built for {stored.host}")
    llvm = _llvm()

    # The process gives what LLVM itself calls (memset, fmod); symbols are named because numba registers helpers that the process does not export.
    builder = llvm.JITLibraryBuilder().add_object_img(stored.image).add_current_process().export_symbol(stored.entry)
    with _lock:
        linker = _linker()
        for symbol in stored.symbols:
            builder.import_symbol(symbol, _address(symbol, stored.entry))
        try:
            tracker = builder.link(linker, f"graphdnn-{next(_count)}")
        except RuntimeError as error:
            raise _unusable("cannot be linked by LLVM", stored.entry, None, str(error).strip()) from error
    return LoadedKernel(stored.entry, tracker[stored.entry], tracker)


def _linker() -> Any:
    """The process's ORC JIT, used as a linker only. Holds ``_lock``."""
    global _jit
    if _jit is None:
        llvm = _llvm()

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        with contextlib.suppress(RuntimeError):  # not every system names libm so; there the process exports it
            llvm.load_library_permanently("libm.so.6")
        _jit = llvm.create_lljit_compiler()
    return _jit


def _address(symbol: str, entry: str) -> int:
    """Address of a C function. What the process does not export may be a helper that numba registers with LLVM: only then is numba imported."""
    llvm = _llvm()

    address = llvm.address_of_symbol(symbol)
    if address is None:
        try:
            from numba.core.registry import cpu_target
        except ImportError as error:
            raise _unusable("calls a helper of numba", entry, "package numba", str(error)) from error
        cpu_target.target_context.refresh()
        address = llvm.address_of_symbol(symbol)
    if address is None:
        raise _unusable("calls a function that this process lacks", entry, "a function of libm", symbol)
    return int(address)


def _unusable(what: str, entry: str | None, expected: str | None, found: str) -> SerializationError:
    return SerializationError(explain(f"stored CPU kernel {what}", node=entry, expected=expected, found=found, fix="build the plan again"))


def _forget_lock() -> None:
    """In a forked child the lock may be held by a thread that does not exist there."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)
