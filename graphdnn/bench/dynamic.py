"""``graphdnn bench dynamic``: graphs with dims against the same graphs of fixed shapes, on a CUDA GPU.

Both are captured into CUDA graphs, checked against float32 arithmetic and timed in turns; beside the ratio of a large shape it says how many
compilations all the shapes took, and how long a shape takes that is seen for the first time.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import graphdnn
from graphdnn.bench import common
from graphdnn.bench.matmul import Contender, capture, cuda_torch, timer

EXTENTS = (0, 1, 2, 3, 5, 7, 13, 64, 97, 128, 211, 256, 509, 512, 1000, 1024, 1021, 2048, 2053, 4096)
SHAPES = 200
TOLERANCE = 6e-3
Values = tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """One graph: the large shape's ratio dynamic over static, both in microseconds; shapes tried, those that were wrong, compilations, and the median
    of milliseconds that the first call of a shape took."""

    case: str
    ratio: float
    dynamic_us: float
    static_us: float
    error: float
    shapes: int
    wrong: int
    compilations: int
    new_shape_ms: float


@dataclass(frozen=True)
class Case:
    """``declare(graph, extents)`` declares it, ``arrays(extents)`` makes its pack (output "Y"), ``expected(pack)`` is what Y should be."""

    name: str
    large: Values
    least: Values
    declare: Callable[[Any, Sequence[Any]], None]
    arrays: Callable[[Any, Values], dict[str, Any]]
    expected: Callable[[Any, dict[str, Any]], Any]


def _matmul(g: Any, extents: Sequence[Any]) -> None:
    m, n, k = extents
    a, b, bias = (g.tensor(name=s, dim=d, layout="row") for s, d in (("A", [1, m, k]), ("B", [1, k, n]), ("bias", [1, 1, n])))
    g.gelu(g.add(g.matmul(a, b), bias)).set_output(True).set_name("Y")


def _matmul_arrays(torch: Any, extents: Values) -> dict[str, Any]:
    m, n, k = extents
    make = {"A": (1, m, k), "B": (1, k, n), "bias": (1, 1, n)}
    return {s: torch.randn(d, device="cuda", dtype=torch.bfloat16) for s, d in make.items()} | {"Y": _empty(torch, (1, m, n))}


def _matmul_expected(torch: Any, pack: dict[str, Any]) -> Any:
    return torch.nn.functional.gelu(torch.bmm(pack["A"].float(), pack["B"].float()) + pack["bias"].float())


def _layernorm(g: Any, extents: Sequence[Any]) -> None:
    rows, width = extents
    x = g.tensor(name="X", dim=[rows, width, 1, 1], layout="row")
    scale, bias = (g.tensor(name=s, dim=[1, width, 1, 1], layout="row") for s in ("scale", "bias"))
    g.layernorm(graphdnn.norm_forward_phase.INFERENCE, x, scale, bias, 1e-5)[0].set_output(True).set_name("Y")


def _layernorm_arrays(torch: Any, extents: Values) -> dict[str, Any]:
    rows, width = extents
    make = {"X": (rows, width, 1, 1), "scale": (1, width, 1, 1), "bias": (1, width, 1, 1)}
    return {s: torch.randn(d, device="cuda", dtype=torch.bfloat16) for s, d in make.items()} | {"Y": _empty(torch, make["X"])}


def _layernorm_expected(torch: Any, pack: dict[str, Any]) -> Any:
    x, width = pack["X"].float().flatten(1), pack["X"].shape[1]
    y = torch.nn.functional.layer_norm(x, (width,), pack["scale"].float().flatten(), pack["bias"].float().flatten(), 1e-5)
    return y.view(pack["X"].shape)


def _empty(torch: Any, shape: tuple[int, ...]) -> Any:
    return torch.full(shape, float("nan"), device="cuda", dtype=torch.bfloat16)


CASES = (
    Case("matmul + bias + gelu", (8192, 4096, 4096), (0, 0, 0), _matmul, _matmul_arrays, _matmul_expected),
    Case("layernorm", (16384, 4096), (0, 1), _layernorm, _layernorm_arrays, _layernorm_expected),
)


def _graph(case: Case, extents: Sequence[Any]) -> Any:
    g = graphdnn.pygraph(
        io_data_type=graphdnn.data_type.BFLOAT16,
        intermediate_data_type=graphdnn.data_type.FLOAT,
        compute_data_type=graphdnn.data_type.FLOAT,
        device="cuda:0",
    )
    case.declare(g, extents)
    g.build([graphdnn.heur_mode.A])
    return g


def _error(torch: Any, case: Case, pack: dict[str, Any]) -> float:
    expected = case.expected(torch, pack)
    torch.cuda.synchronize()
    if expected.numel() == 0:
        return 0.0
    found, size = pack["Y"].float(), float(expected.norm())
    return float((found - expected).norm()) / size if size else float(found.abs().max())


def _measure(torch: Any, case: Case, rounds: int, shapes: int) -> Result:
    rng = random.Random(7)
    before = graphdnn.stats().compilations
    dims = [graphdnn.Dim(f"d{i}", low, high) for i, (low, high) in enumerate(zip(case.least, case.large, strict=True))]
    dynamic = _graph(case, dims)
    workspace = torch.empty(max(dynamic.get_workspace_size(), 1), device="cuda", dtype=torch.uint8)
    tried = [tuple(max(rng.choice(EXTENTS), low) for low in case.least) for _ in range(shapes)]
    wrong, first = 0, []
    for extents in tried:
        pack = case.arrays(torch, extents)
        start = time.perf_counter()
        dynamic.execute(pack, workspace)
        first.append(1e3 * (time.perf_counter() - start))
        wrong += not _error(torch, case, pack) <= TOLERANCE
    compilations = graphdnn.stats().compilations - before
    pack, static = case.arrays(torch, case.large), _graph(case, case.large)
    own = torch.empty(max(static.get_workspace_size(), 1), device="cuda", dtype=torch.uint8)
    contenders = [
        Contender("dynamic", lambda: dynamic.execute(pack, workspace), {}, 0.0),
        Contender("static", lambda: static.execute(pack, own), {}, 0.0),
    ]
    error = 0.0
    for c in contenders:
        pack["Y"].fill_(float("nan"))
        c.call()
        error = max(error, _error(torch, case, pack))
        capture(torch, c)
    times = common.take_turns([timer(torch, c) for c in contenders], rounds)
    a, b = (statistics.median(t) for t in times)
    return Result(case.name, a / b, a, b, error, len(set(tried)), wrong, compilations, statistics.median(first))


def run(*, rounds: int = common.ROUNDS, shapes: int = SHAPES, output: Path | None = None, tell: Callable[[str], None] = print) -> list[Result]:
    """Run the benchmark; ``shapes``: random shapes before the large one is timed; ``output``: a JSON file.

    Raises ExecutionError without torch or a GPU, GraphError where a plan cannot be built.
    """
    common.expect(output, rounds=rounds, shapes=shapes)
    torch = cuda_torch()
    device = torch.cuda.get_device_name(0)
    tell(common.versions(device, torch))
    results = []
    for case in CASES:
        r = _measure(torch, case, rounds, shapes)
        results.append(r)
        verdict = "" if r.error <= TOLERANCE and not r.wrong else "  WRONG"
        size, times = " x ".join(map(str, case.large)), f"dynamic {r.dynamic_us:.1f} us, static {r.static_us:.1f} us, ratio {r.ratio:.3f}"
        tell(f"{r.case} {size}: {times}, error {r.error:.1e}{verdict}")
        tell(f"  {r.shapes} shapes before, {r.wrong} wrong, {r.compilations} compilations, {r.new_shape_ms:.0f} ms for a new shape (median)")
    if output is not None:
        common.write(output, device, torch, results)
    return results
