"""What a compiled kernel's machine code contains: the checks that every CUDA template has to pass."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from graphdnn.codegen.spec import Binary, KernelSpec, Source
from graphdnn.targets.cuda import CudaTarget

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_DOUBLE = re.compile(r"D(ADD|MUL|FMA|SETP|MNMX|MMA)\b|[\w.]*(\.F64|64H)\b")
_LOCAL = re.compile(r"(LDL|STL)\b")


def opcodes(sass: str) -> Counter[str]:
    """Instructions of a cuobjdump listing by full opcode ("HGMMA.64x256x16.F32.BF16")."""
    return Counter(_INSTRUCTION.findall(sass))


def inspect(kernel: KernelSpec | Source | Binary, arch: str = "sm_90a") -> dict[str, Any]:
    """Counts of a kernel; a spec or source is compiled for ``arch`` first.

    ``double``: double-precision instructions; ``local``: loads and stores of local memory; ``spills``: bytes; ``regs``: registers a thread;
    ``opcodes``: Counter by opcode; ``facts``: all facts of the binary; ``binary``: the binary.
    """
    binary = _binary(kernel, arch)
    found = opcodes(CudaTarget(arch).sass(binary))
    return {
        "double": sum(n for op, n in found.items() if _DOUBLE.match(op)),
        "local": sum(n for op, n in found.items() if _LOCAL.match(op)),
        "spills": binary.facts["spill_bytes"],
        "regs": binary.facts["registers"],
        "opcodes": found,
        "facts": binary.facts,
        "binary": binary,
    }


def _binary(kernel: KernelSpec | Source | Binary, arch: str) -> Binary:
    if isinstance(kernel, Binary):
        return kernel
    if isinstance(kernel, KernelSpec):
        from graphdnn.codegen.render import render

        kernel = render(kernel)
    return CudaTarget(arch).compile(kernel)
