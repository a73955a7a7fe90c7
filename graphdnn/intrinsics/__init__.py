"""What kernel text may call, on every target.

::

    namespace("cpu" | "cuda" | "cudasim")   names a kernel is executed with
      |
      +-- convert.py arith.py elementary.py philox.py   rows: typing rule, CPU form, CUDA form, simulator model (forms.py says what a row is)
      |     +-- emit.py                       the LLVM forms write through it
      |     +-- lower.py                      row -> numba intrinsic
      +-- memory.py register_tile.py          vector access, atomics, thread arrays; sums in a CPU's vector registers
      +-- mbarrier.py tma.py wgmma.py staging.py warp.py   instructions: PTX, simulator model (instruction.py says what a row is)
      |     +-- lower_ptx.py                  row -> numba intrinsic; the type of a descriptor parameter
      |     +-- simasync.py                   the models: asynchronous copies, barriers, tensor cores
      +-- simtypes.py simmemory.py simblock.py   typed scalars, checked memory, threads and barriers of the simulator

Importing this package imports neither numba nor llvmlite; namespace("cudasim") never does.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any, Literal


@cache
def digest() -> str:
    """SHA-256 over the source files of this package: part of every cache key."""
    total = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def namespace(target: Literal["cpu", "cuda", "cudasim"]) -> dict[str, Any]:
    """A fresh dict of every name that kernel text for ``target`` may use; execute the text in it.

    Types (float32, ..., uint64), ``math``, conversions, arithmetic and elementary functions everywhere; ``local_array`` and register tiles
    (``tile_madd``, ``tile_product``) on the CPU; ``cuda``, vload, vstore and the atomics on CUDA and in the simulator.
    """
    return dict(_simulated() if target == "cudasim" else _compiled(target))


@cache
def _rows() -> tuple[Any, ...]:
    from graphdnn.intrinsics import arith, convert, elementary, philox

    return convert.FORMS + arith.FORMS + elementary.FORMS + philox.FORMS


@cache
def _instructions() -> tuple[Any, ...]:
    from graphdnn.intrinsics import mbarrier, staging, tma, warp, wgmma

    return mbarrier.INSTRUCTIONS + tma.INSTRUCTIONS + wgmma.INSTRUCTIONS + staging.INSTRUCTIONS + warp.INSTRUCTIONS


@cache
def _compiled(target: Literal["cpu", "cuda"]) -> dict[str, Any]:
    import math

    from graphdnn.intrinsics import lower, memory, register_tile

    names: dict[str, Any] = {"math": math} | {k: v for k, v in lower.NUMBA_TYPES.items() if k != "bool"}
    names |= {row.name: lower.make(row, target) for row in _rows()}
    if target == "cpu":
        return names | memory.CPU | register_tile.CPU
    from numba import cuda

    from graphdnn.intrinsics import lower_ptx

    return names | memory.CUDA | {row.name: lower_ptx.make(row) for row in _instructions()} | {"cuda": cuda}


@cache
def _simulated() -> dict[str, Any]:
    from graphdnn.intrinsics import simblock

    return simblock.names(_rows(), _instructions())
