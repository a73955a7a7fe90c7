"""``graphdnn bench matmul``: fused matmuls against cuDNN (its Python frontend) and torch, where they are installed, on a CUDA GPU.

Outputs are compared with float32 arithmetic. What is timed is a CUDA graph of several calls, so host time is excluded.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from graphdnn.bench import common
from graphdnn.errors import ExecutionError, ValidationError, explain

Shape = tuple[int, int, int, int]
"""Batch, M, N, K."""
SHAPES: tuple[Shape, ...] = ((16, 512, 512, 1024), (1, 8192, 8192, 8192), (1, 4096, 4096, 4096), (1, 1024, 4096, 4096), (1, 128, 4096, 4096))
COPY_BYTES_S, MATMUL_FLOPS_S = 4.3e12, 790e12
"""What an H200 reaches (2026-11): the floor of a case is the larger of its bytes and its operations at these rates."""
SCALE = 0.125
GRAPH_SECONDS, MOST_CALLS = 4e-3, 20
TOLERANCE = 6e-3
"""Norm of the error over the norm of the result: bfloat16 rounds to 2**-9, twice where a contender stores an intermediate."""


@dataclass
class Contender:
    """``call`` enqueues the work on torch's current stream; ``outputs`` are its results."""

    name: str
    call: Callable[[], Any]
    outputs: dict[str, Any]
    build_s: float
    fused: bool = True
    times: list[float] = field(default_factory=list)
    error: float = 0.0
    replay: Callable[[], Any] | None = None
    calls: int = 1


@dataclass(frozen=True)
class Result:
    """One contender in one case: microseconds a call (median of the rounds), the best round, error, seconds to build."""

    case: str
    contender: str
    fused: bool
    us: float
    best_us: float
    floor_us: float
    tflops: float
    error: float
    right: bool
    build_s: float


@dataclass(frozen=True)
class Case:
    """One shape with or without AMAX."""

    shape: Shape
    amax: bool

    @property
    def name(self) -> str:
        """ "16 x 512 x 512 x 1024 +amax"."""
        return " x ".join(map(str, self.shape)) + (" +amax" if self.amax else "")

    @property
    def flops(self) -> float:
        """Of the matmul."""
        b, m, n, k = self.shape
        return 2.0 * b * m * n * k

    @property
    def floor_us(self) -> float:
        """No kernel of one pass can be faster on an H200."""
        b, m, n, k = self.shape
        nbytes = 2 * (b * (m * k + k * n + m * n) + n)
        return 1e6 * max(nbytes / COPY_BYTES_S, self.flops / MATMUL_FLOPS_S)


def cuda_torch() -> Any:
    """The module torch; ExecutionError without it, or without a GPU that it can use."""
    torch = common.import_torch()
    if not torch.cuda.is_available():
        raise ExecutionError(explain("the benchmark needs a GPU that torch can use", found="torch.cuda.is_available() is False"))
    return torch


def _inputs(torch: Any, shape: Shape) -> dict[str, Any]:
    b, m, n, k = shape
    make = {"device": "cuda", "dtype": torch.bfloat16, "generator": torch.Generator("cuda").manual_seed(1)}
    return {"A": torch.randn(b, m, k, **make), "B": torch.randn(b, k, n, **make), "bias": torch.randn(1, 1, n, **make)}


def _declare(fe: Any, graph: Any, data: dict[str, Any], amax: bool) -> dict[str, Any]:
    """Scale, bias, GELU and AMAX after a matmul, in the API that graphdnn and cuDNN share; the tensors by name."""
    bf16, fp32 = fe.data_type.BFLOAT16, fe.data_type.FLOAT
    t = {k: graph.tensor(name=k, dim=list(v.shape), stride=list(v.stride()), data_type=bf16) for k, v in data.items()}
    t["scale"] = graph.tensor(name="scale", dim=[1, 1, 1], stride=[1, 1, 1], data_type=fp32, is_pass_by_value=True)
    y = graph.mul(a=graph.matmul(A=t["A"], B=t["B"]), b=t["scale"])
    t["out"] = graph.gelu(input=graph.bias(input=y, bias=t["bias"]))
    t["out"].set_output(True).set_data_type(bf16)
    if amax:
        t["amax"] = graph.reduction(input=t["out"], mode=fe.reduction_mode.AMAX)
        t["amax"].set_output(True).set_data_type(fp32).set_dim([1, 1, 1]).set_stride([1, 1, 1])
    return t


def _pack(torch: Any, t: dict[str, Any], data: dict[str, Any], case: Case) -> tuple[dict[Any, Any], dict[str, Any]]:
    b, m, n, _ = case.shape
    outputs = {"out": torch.full((b, m, n), float("nan"), device="cuda", dtype=torch.bfloat16)}
    if case.amax:
        outputs["amax"] = torch.full((1, 1, 1), float("nan"), device="cuda")
    pack = {t[k]: v for k, v in (*data.items(), *outputs.items())}
    return pack | {t["scale"]: torch.full((1, 1, 1), SCALE)}, outputs


def _ours(torch: Any, data: dict[str, Any], case: Case, every: bool) -> list[Contender]:
    """The plan that heuristics choose; with ``every`` also each other plan that has one kernel for the whole graph."""
    import graphdnn

    fe: Any = graphdnn
    start = time.perf_counter()
    graph = fe.pygraph(
        io_data_type=fe.data_type.BFLOAT16, intermediate_data_type=fe.data_type.FLOAT, compute_data_type=fe.data_type.FLOAT, device="cuda"
    )
    t = _declare(fe, graph, data, case.amax)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([fe.heur_mode.A])
    found = []
    for index in range(graph.get_execution_plan_count()):
        name = graph.get_plan_name_at_index(index)
        if index and (not every or "|" in name):
            continue
        graph.build_plan_at_index(index)
        seconds, start = time.perf_counter() - start, time.perf_counter()
        pack, outputs = _pack(torch, t, data, case)
        workspace = torch.empty(max(graph.get_workspace_size_plan_at_index(index), 1), device="cuda", dtype=torch.uint8)
        knobs = graph._planned().plan_at(index).choices[0].knobs if every else ""
        call = _executes(graph, pack, workspace, index)
        found.append(Contender(f"graphdnn {name} {knobs}".strip() if every else "graphdnn", call, outputs, seconds))
    return found


def _executes(graph: Any, pack: dict[Any, Any], workspace: Any, index: int) -> Callable[[], Any]:
    return lambda: graph.execute_plan_at_index(pack, workspace, index)


def _cudnn(torch: Any, data: dict[str, Any], case: Case) -> list[Contender]:
    """cuDNN's own choice; nothing where its frontend is not installed."""
    if find_spec("cudnn") is None:
        return []
    fe: Any = import_module("cudnn")
    handle = fe.create_handle()
    start = time.perf_counter()
    graph = fe.pygraph(
        handle=handle, io_data_type=fe.data_type.BFLOAT16, intermediate_data_type=fe.data_type.FLOAT, compute_data_type=fe.data_type.FLOAT
    )
    t = _declare(fe, graph, data, case.amax)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([fe.heur_mode.A, fe.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    seconds = time.perf_counter() - start
    pack, outputs = _pack(torch, t, data, case)
    workspace = torch.empty(max(graph.get_workspace_size(), 1), device="cuda", dtype=torch.uint8)

    def call() -> None:
        # a handle that is not on the capturing stream would leave the CUDA graph empty
        fe.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(pack, workspace, handle=handle)

    return [Contender("cudnn", call, outputs, seconds)]


def _torch_contenders(torch: Any, data: dict[str, Any], case: Case, compile: bool) -> list[Contender]:
    """The bare matmul (cuBLAS, no epilogue), and torch.compile of the whole where that was asked for."""
    bare = torch.empty(*case.shape[:3], device="cuda", dtype=torch.bfloat16)
    found = [Contender("torch.bmm alone", lambda: torch.bmm(data["A"], data["B"], out=bare), {}, 0.0, fused=False)]
    if compile:
        found.append(_compiled(torch, data, case))
    return found


def _compiled(torch: Any, data: dict[str, Any], case: Case) -> Contender:
    def whole(a: Any, b: Any, bias: Any) -> Any:
        y = torch.nn.functional.gelu(torch.bmm(a, b).float() * SCALE + bias).to(torch.bfloat16)
        return (y, y.abs().amax().float()) if case.amax else (y,)

    start = time.perf_counter()
    run = torch.compile(whole)
    arguments = (data["A"], data["B"], data["bias"])
    results = run(*arguments)
    torch.cuda.synchronize()
    outputs = dict(zip(("out", "amax"), results, strict=False))
    return Contender("torch.compile", lambda: run(*arguments), outputs, time.perf_counter() - start)


def _expected(torch: Any, data: dict[str, Any]) -> Any:
    """The result in float32, without TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    y = torch.bmm(data["A"].float(), data["B"].float())
    return torch.nn.functional.gelu(y.mul_(SCALE).add_(data["bias"].float()))


def _check(torch: Any, contender: Contender, expected: Any) -> None:
    """Run once and note the error; NaN stays NaN, so that it is never right."""
    contender.call()
    torch.cuda.synchronize()
    if "out" in contender.outputs:
        contender.error = common.error(contender.outputs["out"], expected)
    if "amax" in contender.outputs:
        top = expected.abs().max()
        contender.error = max(contender.error, float((contender.outputs["amax"].max() - top).abs() / top) / 2)


def capture(torch: Any, contender: Contender) -> None:
    """A CUDA graph of as many calls as take a few milliseconds."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            contender.call()
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        contender.call()
        end.record()
        stream.synchronize()
        contender.calls = int(min(max(GRAPH_SECONDS * 1e3 // max(begin.elapsed_time(end), 1e-3), 1), MOST_CALLS))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(contender.calls):
                contender.call()
    contender.replay = graph.replay


def timer(torch: Any, contender: Contender) -> Callable[[], float]:
    """Microseconds a call of the captured graph."""
    replay = contender.replay
    assert replay is not None, f"{contender.name} has not been captured"

    def time_one() -> float:
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        return float(1e3 * begin.elapsed_time(end) / contender.calls)

    return time_one


def _measure(torch: Any, case: Case, rounds: int, every: bool, compile: bool) -> list[Result]:
    data = _inputs(torch, case.shape)
    contenders = _ours(torch, data, case, every) + _cudnn(torch, data, case) + _torch_contenders(torch, data, case, compile)
    expected = _expected(torch, data)
    for c in contenders:
        _check(torch, c, expected)
    del expected
    for c in contenders:
        capture(torch, c)
    for c, times in zip(contenders, common.take_turns([timer(torch, c) for c in contenders], rounds), strict=True):
        c.times = times
    return [_result(case, c) for c in contenders]


def _result(case: Case, c: Contender) -> Result:
    us = statistics.median(c.times)
    right = c.error <= TOLERANCE  # false for NaN
    return Result(case.name, c.name, c.fused, us, min(c.times), case.floor_us, case.flops / us / 1e6, c.error, right, c.build_s)


def _lines(results: Sequence[Result]) -> list[str]:
    """The table of one case: times, and how many times as long as graphdnn each takes."""
    ours = results[0].us
    lines = [f"{results[0].case}: floor {results[0].floor_us:.1f} us"]
    for r in results:
        verdict = "" if not r.fused else f"error {r.error:.1e}" + ("" if r.right else "  WRONG")
        lines.append(f"  {r.us:9.1f} us  {r.tflops:6.0f} TFLOP/s  {r.us / ours:5.2f} x  build {r.build_s:5.2f} s  {r.contender}  {verdict}".rstrip())
    return lines


def run(
    shapes: Sequence[Shape] = SHAPES,
    *,
    rounds: int = common.ROUNDS,
    every: bool = False,
    compile: bool = False,
    output: Path | None = None,
    tell: Callable[[str], None] = print,
) -> list[Result]:
    """Run the benchmark; ``every``: each fused plan, not only the chosen one; ``compile``: torch.compile too; ``output``: a JSON file.

    Raises ExecutionError without torch or a GPU, GraphError where a plan cannot be built.
    """
    common.expect(output, rounds=rounds)
    torch = cuda_torch()
    device = torch.cuda.get_device_name(0)
    tell(f"{common.versions(device, torch)}; x: time over graphdnn's")
    results: list[Result] = []
    for shape in shapes:
        for amax in (True, False):
            found = _measure(torch, Case(shape, amax), rounds, every, compile)
            results += found
            for line in _lines(found):
                tell(line)
            torch.cuda.empty_cache()
    if output is not None:
        common.write(output, device, torch, results)
    return results


def parse_shape(text: str) -> Shape:
    """ "16x512x512x1024" as (16, 512, 512, 1024); a ValidationError for anything else."""
    parts = text.lower().split("x")
    if len(parts) != 4 or not all(p.strip().isdecimal() and int(p) > 0 for p in parts):
        raise ValidationError(explain("not a matmul shape", expected="BxMxNxK, such as 16x512x512x1024", found=repr(text)))
    b, m, n, k = (int(p) for p in parts)
    return b, m, n, k
