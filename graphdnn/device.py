"""DeviceProps: all that engines and heuristics may know of a device. A CPU, the simulator, a real GPU, or a described one that need not exist.

Everything is read when asked for: importing this module opens no driver, and ``cpu()``, ``cudasim()`` and ``describe()`` never do.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from graphdnn.errors import ExecutionError, SerializationError, ValidationError, explain

if TYPE_CHECKING:
    from graphdnn._libcuda import Driver

# What a good kernel reaches of the peak. NVIDIA H200, 2026-11-29: bf16 matmul 790 of 1070 TFLOP/s at 1.98 GHz, TF32 395 of 535, copy 4.3 of 4.9 TB/s.
_REACHED_FLOPS = 0.74
_REACHED_DRAM = 0.875
_OLDEST = (8, 0)


@dataclass(frozen=True)
class DeviceProps:
    """Facts of one device, the same for every process that sees it.

    ``kind``: "cpu", "cuda" or "cudasim". ``index``: CUDA ordinal; -1 for a described GPU, which can be built for but not run on; 0 otherwise.
    ``arch``: "sm_90a" for CUDA and the simulator, the machine ("x86_64") for a CPU. ``shared_per_block_optin``, ``shared_per_sm``, ``l2_bytes``
    (per core on a CPU) in bytes, ``regs_per_sm`` in 32-bit registers, ``clock_ghz`` the highest clock. ``dram_gbps`` (GB/s) and ``flops``
    (TFLOP/s by data type name, besides "TF32") are what a good kernel reaches, below the data sheet's peak; they serve the roofline model.
    ``cores``: CPUs that this process may use; 0 for a GPU.
    """

    kind: Literal["cpu", "cuda", "cudasim"]
    name: str
    index: int
    arch: str
    sm_count: int
    shared_per_block_optin: int
    shared_per_sm: int
    regs_per_sm: int
    l2_bytes: int
    clock_ghz: float
    dram_gbps: float
    flops: Mapping[str, float] = field(hash=False)
    warp_size: int = 32
    cores: int = 0

    @property
    def described(self) -> bool:
        """Whether this is a GPU that need not exist: plans can be built for it, not run."""
        return self.kind == "cuda" and self.index < 0

    @property
    def text(self) -> str:
        """The text that ``parse`` takes: "cpu", "cuda:0", "cudasim" or "sm_90a"."""
        if self.kind == "cuda":
            return self.arch if self.described else f"cuda:{self.index}"
        return self.kind

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability of a CUDA device or the simulator; (0, 0) for a CPU."""
        return (0, 0) if self.kind == "cpu" else split_arch(self.arch)[:2]

    def rate(self, dtype: str) -> float:
        """TFLOP/s for a data type name; what has no unit of its own is calculated at the rate of FLOAT."""
        return self.flops.get(dtype, self.flops["FLOAT"])

    def to_json(self) -> str:
        """JSON text that ``from_json`` restores exactly."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> DeviceProps:
        """The properties in a text of ``to_json``. Raises SerializationError for anything else."""
        try:
            values = json.loads(text)
        except (TypeError, ValueError) as exc:
            raise _bad_json(f"text that is not JSON ({exc})") from None
        return _from_values(values)


_FIELDS = {f.name: f for f in fields(DeviceProps)}
_FLOATS = ("clock_ghz", "dram_gbps")
_TEXTS = ("kind", "name", "arch")


def _bad_json(found: str) -> SerializationError:
    return SerializationError(explain("device properties cannot be read", expected="text made by DeviceProps.to_json()", found=found))


def _from_values(values: Any) -> DeviceProps:
    if not isinstance(values, dict):
        raise _bad_json(f"a JSON {type(values).__name__}")
    if set(values) != set(_FIELDS):
        missing, extra = sorted(set(_FIELDS) - set(values)), sorted(map(str, set(values) - set(_FIELDS)))
        raise _bad_json(f"missing fields {missing}, unknown fields {extra}")
    for name, value in values.items():
        if name == "flops":
            good = isinstance(value, dict) and "FLOAT" in value and all(_number(v) for v in value.values())
        elif name in _TEXTS:
            good = isinstance(value, str)
        elif name in _FLOATS:
            good = _number(value)
        else:
            good = type(value) is int and -1 <= value < 2**53
        if not good:
            raise _bad_json(f"{name} = {value!r}")
    if values["kind"] not in ("cpu", "cuda", "cudasim"):
        raise _bad_json(f"kind = {values['kind']!r}")
    if values["kind"] != "cpu" and not _ARCH.fullmatch(values["arch"]):
        raise _bad_json(f"arch = {values['arch']!r}")
    return DeviceProps(**values)


def _number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 1e9


@dataclass(frozen=True, slots=True)
class _Gpu:
    """Data sheet of the GPU that stands for an architecture. ``rates``: FLOP per clock and SM, dense; ``dram``: GB/s."""

    name: str
    sm_count: int
    shared_kib: tuple[int, int]
    l2_mib: int
    clock_ghz: float
    dram: float
    rates: dict[str, int]


def _rates(tensor: int, tf32: int, fp8: int, int8: int, fp32: int, fp64: int, fp4: int = 0) -> dict[str, int]:
    rates = {"FLOAT": fp32, "DOUBLE": fp64, "TF32": tf32, "HALF": tensor, "BFLOAT16": tensor, "INT8": int8, "INT32": 128, "INT64": 32}
    return rates | ({"FP8_E4M3": fp8, "FP8_E5M2": fp8} if fp8 else {}) | ({"FP4_E2M1": fp4} if fp4 else {})


_GPUS: dict[str, _Gpu] = {
    "sm_80": _Gpu("NVIDIA A100-SXM4-80GB", 108, (163, 164), 40, 1.41, 2039, _rates(2048, 1024, 0, 4096, 128, 64)),
    "sm_86": _Gpu("NVIDIA GeForce RTX 3090", 82, (99, 100), 6, 1.695, 936, _rates(512, 256, 0, 2048, 256, 4)),
    "sm_89": _Gpu("NVIDIA L40S", 142, (99, 100), 96, 2.52, 864, _rates(1024, 512, 2048, 2048, 256, 4)),
    "sm_90a": _Gpu("NVIDIA H200", 132, (227, 228), 60, 1.98, 4916.7, _rates(4096, 2048, 8192, 8192, 256, 128)),
    "sm_100": _Gpu("NVIDIA B200", 148, (227, 228), 126, 1.85, 8000, _rates(8192, 4096, 16384, 16384, 256, 128, 32768)),
    "sm_120": _Gpu("NVIDIA GeForce RTX 5090", 170, (99, 100), 96, 2.41, 1792, _rates(512, 256, 1024, 2048, 256, 4, 4096)),
}
_ARCH = re.compile(r"sm_(\d{1,2})(\d)([af]?)")


def split_arch(arch: str) -> tuple[int, int, str]:
    """("sm_90a") -> (9, 0, "a"). Raises ValidationError for a text that is not an architecture."""
    found = _ARCH.fullmatch(arch)
    if found is None:
        raise ValidationError(explain("not a CUDA architecture", expected=f"one of {', '.join(_GPUS)}", found=repr(arch)))
    return int(found[1]), int(found[2]), found[3]


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether machine code for ``arch`` runs on a GPU: on its own generation, not older; with an "a" on that very capability."""
    major, minor, suffix = split_arch(arch)
    return capability[0] == major and (capability[1] == minor if suffix == "a" else capability[1] >= minor)


def known_archs() -> tuple[str, ...]:
    """Architectures that ``describe`` knows."""
    return tuple(_GPUS)


def describe(arch: str) -> DeviceProps:
    """A GPU that need not exist, with the figures of a well-known one of architecture ``arch``.

    "sm_90" means "sm_90a" and is recorded so (wgmma and TMA need it). Raises ValidationError for an unknown architecture.
    """
    arch = "sm_90a" if arch == "sm_90" else arch
    gpu = _GPUS.get(arch)
    if gpu is None:
        raise ValidationError(
            explain("unknown CUDA architecture", expected=f"one of {', '.join(_GPUS)}", found=repr(arch), fix="name the nearest older architecture")
        )
    return _props(gpu, "cuda", f"{gpu.name} (described)", -1, arch)


def _props(gpu: _Gpu, kind: Literal["cuda", "cudasim"], name: str, index: int, arch: str) -> DeviceProps:
    optin, per_sm = (1024 * k for k in gpu.shared_kib)
    return DeviceProps(
        kind=kind,
        name=name,
        index=index,
        arch=arch,
        sm_count=gpu.sm_count,
        shared_per_block_optin=optin,
        shared_per_sm=per_sm,
        regs_per_sm=65536,
        l2_bytes=gpu.l2_mib << 20,
        clock_ghz=gpu.clock_ghz,
        dram_gbps=round(gpu.dram * _REACHED_DRAM, 1),
        flops=_flops(gpu.rates, gpu.sm_count, gpu.clock_ghz),
    )


def _flops(rates: dict[str, int], sm_count: int, clock_ghz: float) -> dict[str, float]:
    return {dtype: round(rate * sm_count * clock_ghz * _REACHED_FLOPS / 1000, 3) for dtype, rate in rates.items()}


def cudasim(arch: str = "sm_90a") -> DeviceProps:
    """The simulator: CUDA kernels of architecture ``arch`` run in Python. Few SMs, so that persistent kernels launch few blocks."""
    described = describe(arch)
    return replace(described, kind="cudasim", name=f"simulator of {described.arch}", index=0, sm_count=4)


@functools.cache
def cpu() -> DeviceProps:
    """This machine's CPU. Bandwidth and FLOP rates are assumed from cores, clock and vector width; they do not change between runs."""
    import platform

    info = _cpuinfo()
    cores = _cores()
    clock = _clock_ghz(info)
    flags = info.get("flags", info.get("Features", "")).split()
    lanes = 16 if "avx512f" in flags else 8 if "avx2" in flags else 4
    # Two FMA units of that width in each core, half of the peak kept; a core alone draws about 12 GB/s, a socket about 200.
    fp32 = round(cores * clock * lanes * 4 * 0.5 / 1000, 4)
    rates = {"FLOAT": fp32, "DOUBLE": fp32 / 2, "INT32": fp32 / 2, "INT64": fp32 / 8}
    return DeviceProps(
        kind="cpu",
        name=info.get("model name", "") or platform.processor() or platform.machine() or "CPU",
        index=0,
        arch=platform.machine() or "unknown",
        sm_count=cores,
        shared_per_block_optin=0,
        shared_per_sm=0,
        regs_per_sm=0,
        l2_bytes=_l2_bytes(),
        clock_ghz=clock,
        dram_gbps=float(min(12 * cores, 200)),
        flops=rates,
        warp_size=1,
        cores=cores,
    )


def _cpuinfo() -> dict[str, str]:
    """First processor of /proc/cpuinfo; empty where there is none."""
    text = _read("/proc/cpuinfo").split("\n\n")[0]
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _cores() -> int:
    """CPUs that this process may use: its affinity, and the quota of a container."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdecimal() and quota[1].isdecimal() and int(quota[1]):
        count = min(count, max(1, round(int(quota[0]) / int(quota[1]))))
    return max(1, count)


def _clock_ghz(info: dict[str, str]) -> float:
    """Highest clock, from the kernel or the model's name; 3 GHz where neither says. The momentary clock would change from run to run."""
    khz = _read("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").strip()
    if khz.isdecimal() and int(khz):
        return round(int(khz) / 1e6, 3)
    named = re.search(r"@\s*([\d.]+)\s*GHz", info.get("model name", ""))
    return float(named[1]) if named else 3.0


def _l2_bytes() -> int:
    size = _read("/sys/devices/system/cpu/cpu0/cache/index2/size").strip()
    kib = re.fullmatch(r"(\d+)([KM])", size)
    return (int(kib[1]) << (10 if kib[2] == "K" else 20)) if kib else 1 << 20


# CUdevice_attribute numbers of cuda.h.
_ATTRIBUTES = {
    "sm_count": 16,
    "clock_khz": 13,
    "memory_khz": 36,
    "bus_bits": 37,
    "l2_bytes": 38,
    "major": 75,
    "minor": 76,
    "shared_per_sm": 81,
    "regs_per_sm": 82,
    "optin": 97,
    "warp_size": 10,
}


def cuda(index: int = 0) -> DeviceProps:
    """A GPU of this machine, read from the driver; creates no context.

    Raises ExecutionError that says what is missing (driver or GPU), or that the GPU is older than sm_80; ValidationError for an index out of range.
    """
    from graphdnn import _libcuda

    driver = _libcuda.driver()
    count = driver.value("cuDeviceGetCount")
    if not 0 <= index < count:
        fix = "check CUDA_VISIBLE_DEVICES; nvidia-smi lists the GPUs"
        raise ValidationError(explain("no such CUDA device", expected=f"an index from 0 to {count - 1}", found=f"cuda:{index}", fix=fix))
    return _cuda(index, driver)


@functools.cache
def _cuda(index: int, driver: Driver) -> DeviceProps:
    ordinal = driver.value("cuDeviceGet", index)
    read = {name: driver.value("cuDeviceGetAttribute", number, ordinal) for name, number in _ATTRIBUTES.items()}
    capability = (read["major"], read["minor"])
    name = _gpu_name(driver, ordinal)
    if capability < _OLDEST:
        found = f"{capability[0]}.{capability[1]}"
        raise ExecutionError(
            explain(f"GPU {index} ({name}) is too old", expected="compute capability 8.0 or newer", found=found, fix="use device='cpu'")
        )
    # Throughput per clock is not among the attributes: take it from the newest known architecture that is not newer than the GPU.
    row = _GPUS[max((a for a in _GPUS if split_arch(a)[:2] <= capability), key=lambda a: split_arch(a)[:2])]
    clock = read["clock_khz"] / 1e6 or row.clock_ghz
    # Two transfers a memory clock.
    dram = 2 * read["memory_khz"] * 1e3 * read["bus_bits"] / 8 / 1e9 or row.dram
    return DeviceProps(
        kind="cuda",
        name=name,
        index=index,
        arch="sm_90a" if capability == (9, 0) else f"sm_{capability[0]}{capability[1]}",
        sm_count=read["sm_count"],
        shared_per_block_optin=read["optin"],
        shared_per_sm=read["shared_per_sm"],
        regs_per_sm=read["regs_per_sm"],
        l2_bytes=read["l2_bytes"],
        clock_ghz=round(clock, 3),
        dram_gbps=round(dram * _REACHED_DRAM, 1),
        flops=_flops(row.rates, read["sm_count"], clock),
        warp_size=read["warp_size"],
    )


def _gpu_name(driver: Driver, ordinal: int) -> str:
    import ctypes

    text = ctypes.create_string_buffer(256)
    driver.call("cuDeviceGetName", ctypes.addressof(text), len(text), ordinal)
    return text.value.decode(errors="replace")


def parse(text: str) -> DeviceProps:
    """The device that a text names: "cpu", "cuda" (the current one), "cuda:1", "cudasim", "cudasim:sm_80" or a described one such as "sm_90".

    Raises ValidationError for any other text, ExecutionError for a CUDA device that is not there.
    """
    kind, colon, rest = text.strip().lower().partition(":")
    if kind == "cpu" and not colon:
        return cpu()
    if kind == "cudasim":
        return cudasim(rest) if colon else cudasim()
    if kind == "cuda" and not colon:
        return cuda(current_index())
    if kind == "cuda" and rest.isdecimal():
        return cuda(int(rest))
    if kind.startswith("sm_") and not colon:
        return describe(kind)
    raise ValidationError(
        explain("unknown device", expected=f"cpu, cuda, cuda:<index>, cudasim, or a described device: {', '.join(_GPUS)}", found=repr(text))
    )


def current_index() -> int:
    """Index of the CUDA device that is current in this thread; 0 if none is. Raises ExecutionError without a driver or GPU."""
    from graphdnn import _libcuda

    return _libcuda.driver().current_device() or 0


def current_default() -> DeviceProps:
    """The device of a graph that says nothing: GRAPHDNN_DEVICE, else the current CUDA device if it can be used, else the CPU.

    Without a driver this costs one failed dlopen. It creates no CUDA context. Raises ValidationError for an unknown value of GRAPHDNN_DEVICE;
    ExecutionError if that names a CUDA device that is not there, and in a child forked after CUDA was started (a CPU instead would be a surprise).
    """
    from graphdnn import _libcuda, env

    named = env.device()
    if named is not None:
        return parse(named)
    if _libcuda.forked:
        raise _libcuda.fork_error()
    if not _libcuda.installed():
        return cpu()
    try:
        return cuda(current_index())
    except ExecutionError:
        return cpu()
