"""Compiling for CUDA with no GPU and no driver: machine code, facts, determinism, and what is said when a part is missing."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from graphdnn import errors, intrinsics
from graphdnn.codegen.spec import KernelSpec, PointerParam, ScalarParam, Source
from graphdnn.targets import cuda_toolchain as toolchain
from graphdnn.targets import cuda_versions
from graphdnn.targets.cuda import CudaTarget
from tests.compile.sass import inspect, opcodes

ARCHS = ("sm_80", "sm_90a")
TEXT = """
def scale_exp_1(x, y, s, n):
    tile = cuda.shared.array(256, float32)
    t = uint32(cuda.threadIdx.x)
    i = uint32(uint32(uint32(cuda.blockIdx.x) * uint32(256)) + t)
    tile[t] = x[i] if i < uint32(n) else float32(0.0)
    cuda.syncthreads()
    if i < uint32(n):
        y[i] = float32(math.exp(tile[uint32(255) - t]) * s)
"""
PARAMS = (PointerParam("x", "float32"), PointerParam("y", "float32", written=True), ScalarParam("s", "float32"), ScalarParam("n", "uint32"))


def source(text: str = TEXT, **fields: Any) -> Source:
    return Source(KernelSpec("cuda/none.j2", "scale_exp_1", PARAMS, **({"block": 256} | fields)), text)


@pytest.fixture(autouse=True)
def small_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are of the target: the names their kernels use do not depend on the intrinsics."""

    def namespace(target: str) -> dict[str, Any]:
        import math

        from numba import cuda, types

        assert target == "cuda"
        return {"cuda": cuda, "math": math, **{n: getattr(types, n) for n in ("float32", "float64", "uint32")}}

    monkeypatch.setattr(intrinsics, "namespace", namespace, raising=False)


@pytest.mark.parametrize("arch", [*ARCHS, "sm_86", "sm_89", "sm_100", "sm_120"])
def test_machine_code_and_facts(arch: str) -> None:
    seen = inspect(source(), arch)
    facts = seen["facts"]
    assert (seen["double"], seen["local"], seen["spills"]) == (0, 0, 0) and 0 < seen["regs"] < 64
    assert facts["arch"] == arch and facts["static_shared_bytes"] == facts["shared_bytes"] == 1024 and facts["stack_bytes"] == 0
    assert re.fullmatch(r"\d+\.\d+", facts["ptxas"]) and facts["compile_seconds"] > 0
    assert seen["binary"].entry == "scale_exp_1" and seen["binary"].code[:4] == b"\x7fELF"
    assert any(op.startswith("MUFU.EX2") for op in seen["opcodes"])


def test_ptx_has_stable_names_and_nothing_of_numba() -> None:
    ptx = CudaTarget("sm_90a").compile(source()).texts["ptx"]
    assert ".target sm_90a" in ptx and ".visible .entry scale_exp_1(" in ptx and ".param .u64 scale_exp_1_param_0" in ptx
    assert "NumbaEnv" not in ptx and "cudapy" not in ptx and "_ZN" not in ptx
    assert ".maxntid 256, 1, 1" in ptx and ".minnctapersm 1" in ptx


def test_min_blocks_bound_the_registers() -> None:
    assert ".minnctapersm 4" in CudaTarget("sm_90a").compile(source(min_blocks=4)).texts["ptx"]


def test_equal_kernels_are_equal_bytes() -> None:
    target = CudaTarget("sm_80")
    first = target.compile(source())
    target.compile(source(TEXT.replace("exp(", "log(")))
    again = target.compile(source())
    assert first.code == again.code and first.texts == again.texts


def test_threads_compile_at_once() -> None:
    codes: list[bytes] = []
    threads = [threading.Thread(target=lambda: codes.append(CudaTarget("sm_80").compile(source()).code)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(codes) == 4 and len(set(codes)) == 1


def test_doubles_and_local_memory_are_seen() -> None:
    text = """
def scale_exp_1(x, y, s, n):
    a = cuda.local.array(64, float32)
    for i in range(64):
        a[uint32(uint32(i) * uint32(n)) & uint32(63)] = x[i]
    y[0] = float32(float64(a[uint32(n) & uint32(63)]) * float64(s) + float64(y[1]))
"""
    for arch in ARCHS:
        seen = inspect(source(text), arch)
        assert seen["double"] >= 2 and seen["local"] >= 1 and seen["facts"]["stack_bytes"] >= 256


def test_opcodes_of_a_listing() -> None:
    listing = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;   /* 0x00000a0000017a02 */
        /*0010*/              @!P0 DADD R2, R2, R4 ;        /* 0x0000000002027229 */
        /*0020*/             @!UP0 UMOV UR4, URZ ;          /* 0x0000000000007918 */
        /*0030*/         {         I2F.F64 R2, R3 ;
        /*0040*/                   F2F.F32.F64 R2, R3  } ;
        /*12d0*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24 ;
"""
    assert opcodes(listing) == {"MOV": 1, "DADD": 1, "UMOV": 1, "I2F.F64": 1, "F2F.F32.F64": 1, "HGMMA.64x256x16.F32.BF16": 1}


def test_line_information_on_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = CudaTarget("sm_90a")
    plain_key = target.toolchain_key()
    monkeypatch.setenv("GRAPHDNN_LINEINFO", "1")
    monkeypatch.setenv("GRAPHDNN_CACHE_DIR", str(tmp_path))
    assert target.toolchain_key() != plain_key
    binary = target.compile(source())
    named = re.search(r'\.file\s+1 "(.+)"', binary.texts["ptx"])
    assert named and ".loc" in binary.texts["ptx"] and Path(named[1]).read_text() == TEXT
    assert b".debug_line" in binary.code or b".nv_debug" in binary.code
    monkeypatch.setenv("GRAPHDNN_CACHE_DIR", "/dev/null/nowhere")
    assert ".loc" in target.compile(source()).texts["ptx"]


@pytest.mark.parametrize("mistake", ["math.exp -> math.nothing", "tile[t] -> tiles[t]", "x[i] -> x.nothing[i]", "def -> fed"])
def test_a_bad_text_is_a_build_error(mistake: str) -> None:
    with pytest.raises(errors.BuildError, match="kernel 'scale_exp_1' could not be compiled for sm_80"):
        CudaTarget("sm_80").compile(source(TEXT.replace(*mistake.split(" -> "))))
    assert CudaTarget("sm_80").compile(source()).code


def test_ptxas_message_is_passed_on() -> None:
    with pytest.raises(errors.BuildError, match=r"ptxas 1\d\.\d refused kernel 'k' for sm_80.*shared data"):
        toolchain.assemble(_too_much_shared(), "sm_80", "k")


def _too_much_shared() -> str:
    release = toolchain.tools("ptxas")[0].version
    return f"""// Cuda compilation tools, release {release}, V{release}.0
.version 8.0
.target sm_80
.address_size 64
.visible .shared .align 4 .b8 much[102400];
.visible .entry k() {{
    .reg .b32 %r<2>;
    mov.u32 %r1, 1;
    st.shared.b32 [much], %r1;
    ret;
}}
"""


def test_no_ptxas_new_enough_says_what_to_install() -> None:
    with pytest.raises(errors.BuildError, match=r"ptxas of CUDA 99\.9 or newer.*found .*ptxas \(1\d\.\d\).*pip install 'graphdnn\[cu13\]'"):
        toolchain.ptxas_for("// Cuda compilation tools, release 99.9, V99.9.1\n")


def test_no_ptxas_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "tools", lambda name: ())
    with pytest.raises(errors.BuildError, match=r"found none.*pip install 'graphdnn\[cu13\]'"):
        CudaTarget("sm_80").compile(source())
    with pytest.raises(errors.BuildError, match="cuobjdump.*pip install"):
        toolchain.disassemble(b"")


def test_ptxas_is_of_the_toolkit_of_libnvvm() -> None:
    library = toolchain.libnvvm()
    assert library is not None
    assert toolchain.tools("ptxas")[0].path.parent.parent in library.parents


def test_damaged_cubin_cannot_be_shown() -> None:
    binary = CudaTarget("sm_80").compile(source())
    with pytest.raises(errors.BuildError, match="could not disassemble"):
        toolchain.disassemble(binary.code[:100])


def _run(code: str, **environment: str) -> str:
    import os

    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "the compiler must be silent"
    return done.stdout


COMPILE = f"""
import graphdnn.intrinsics as intrinsics
def namespace(target):
    import math
    from numba import cuda, types
    return {{"cuda": cuda, "math": math, "float32": types.float32, "uint32": types.uint32}}
intrinsics.namespace = namespace
from graphdnn import errors
from graphdnn.codegen.spec import KernelSpec, PointerParam, ScalarParam, Source
from graphdnn.targets.cuda import CudaTarget
source = Source(KernelSpec("t", "scale_exp_1", {PARAMS!r}, block=256), {TEXT!r})
"""


def test_another_process_makes_the_same_bytes_in_silence() -> None:
    code = COMPILE + "import hashlib; print(hashlib.sha256(CudaTarget('sm_90a').compile(source).code).hexdigest())"
    import hashlib

    here = hashlib.sha256(CudaTarget("sm_90a").compile(source()).code).hexdigest()
    assert _run(code).strip() == here


def test_without_numba_cuda() -> None:
    block = "import importlib.util as u; find = u.find_spec\nu.find_spec = lambda n, *a: None if n == 'numba_cuda' else find(n, *a)\n"
    code = block + COMPILE + "\ntry:\n    CudaTarget('sm_80').compile(source)\nexcept errors.BuildError as e:\n    print(e)"
    assert re.search(r"numba-cuda.*pip install 'graphdnn\[cu13\]'.*device='cpu'", _run(code))


def test_with_numbas_simulator_switched_on() -> None:
    code = COMPILE + "\ntry:\n    CudaTarget('sm_80').compile(source)\nexcept errors.BuildError as e:\n    print(e)"
    assert "NUMBA_ENABLE_CUDASIM" in _run(code, NUMBA_ENABLE_CUDASIM="1")


def test_key_names_versions_and_imports_no_compiler() -> None:
    code = (
        "import sys\nfrom graphdnn.targets.cuda import CudaTarget\nprint(CudaTarget('sm_90a').toolchain_key())\n"
        "print([m for m in ('numba', 'llvmlite', 'cuda', 'cuda.pathfinder', 'numpy', 'importlib.metadata', 'subprocess') if m in sys.modules])"
    )
    key, modules = _run(code).strip().splitlines()
    assert key.startswith("cuda sm_90a ") and modules == "[]"
    for part in ("numba", "numba-cuda", "llvmlite"):
        assert re.search(rf" {part}=\d+\.\d+", key)
    assert re.search(r"nvidia-nvvm=\d|nvidia-cuda-nvcc-cu12=\d|toolkit=/", key)


def test_key_of_a_machine_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_versions, "installed", dict)
    assert " numba-cuda=none " in cuda_versions.key("sm_80")


def test_report_names_every_part() -> None:
    report = toolchain.toolchain_report()
    by_part = {row["part"]: row for row in report}
    assert all(set(row) == {"part", "found", "version", "path", "needed_for"} for row in report)
    for part in (
        "python",
        "numpy",
        "numba",
        "llvmlite",
        "jinja2",
        "ml_dtypes",
        "networkx",
        "numba-cuda",
        "libnvvm",
        "ptxas",
        "cuobjdump",
        "nvdisasm",
    ):
        assert by_part[part]["found"] and by_part[part]["version"] and by_part[part]["path"], part
    assert "libcuda driver" in by_part and any(part.startswith("GPU") for part in by_part)


def test_report_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom graphdnn.targets.cuda_toolchain import toolchain_report\ntoolchain_report()\n"
        "print([m for m in ('numba', 'llvmlite', 'torch', 'networkx', 'jinja2', 'numpy', 'cuda.core', 'cuda.bindings.driver') if m in sys.modules])"
    )
    assert _run(code).strip() == "[]"
