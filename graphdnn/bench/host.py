"""``graphdnn bench host``: what a call costs the host, beside the cuDNN frontend where it and a GPU are there; builds and loads in new processes.

Contenders take turns in one process: in every round each makes many calls, each of which is timed alone with an idle queue now and then, and all
samples of a contender after the first round are one distribution. The clock's own cost is a contender ("an empty call"), not subtracted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import graphdnn
from graphdnn.bench import common
from graphdnn.errors import ExecutionError, NotSupportedError, explain

PERCENTILES = (10, 50, 90, 99)
CALLS = 1000
"""Calls of a contender in a round."""
QUEUE = 32
"""Calls between two waits for the device: few enough that the host never waits for room in the queue."""
STARTS = 10
"""New processes for each figure of a start."""
TOLERANCE = {"float32": 1e-5, "bfloat16": 2**-7}
"""Norm of the error over the norm of the result, against float64: a contender may store an intermediate in bfloat16, and ten sums follow."""
EPILOGUES = {"4 tensors": 1, "13 tensors": 10}
"""Case -> biases behind the matmul; its operands and the result are three tensors more."""


@dataclass(frozen=True)
class Result:
    """One distribution: ``unit`` is "us" (a call) or "ms" (a start)."""

    case: str
    contender: str
    unit: str
    p10: float
    p50: float
    p90: float
    p99: float
    samples: int
    right: bool

    def line(self) -> str:
        """One row of the table."""
        times = "  ".join(f"p{p} {getattr(self, f'p{p}'):8.2f}" for p in PERCENTILES)
        return f"  {self.contender:44} {times} {self.unit}" + ("" if self.right else "  WRONG")


def result(case: str, contender: str, unit: str, samples: Sequence[float], right: bool = True) -> Result:
    """The distribution of ``samples`` (nearest rank)."""
    ordered = sorted(samples)
    p10, p50, p90, p99 = (ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in PERCENTILES)
    return Result(case, contender, unit, p10, p50, p90, p99, len(ordered), right)


def declare(fe: Any, graph: Any, data: dict[str, Any], dtype: Any) -> dict[str, Any]:
    """A matmul with biases and ReLU, in the API that graphdnn and cuDNN share; the tensors by name."""
    t = {k: graph.tensor(name=k, dim=list(v.shape), stride=list(v.stride()), data_type=dtype) for k, v in data.items() if k != "out"}
    y = graph.matmul(A=t["A"], B=t["B"])
    for name in t:
        if name.startswith("bias"):
            y = graph.bias(input=y, bias=t[name])
    t["out"] = graph.relu(input=y)
    t["out"].set_output(True).set_data_type(dtype)
    return t


def inputs(torch: Any, device: str, biases: int) -> dict[str, Any]:
    """Operands, biases and an output full of NaN; small, so that the device is done before the host."""
    n, kind = (256, torch.bfloat16) if device.startswith("cuda") else (16, torch.float32)
    made = torch.Generator(device).manual_seed(1)
    draw = {"device": device, "dtype": kind, "generator": made}
    data = {"A": torch.randn(1, n, n, **draw), "B": torch.randn(1, n, n, **draw)}
    data |= {f"bias{i}": torch.randn(1, 1, n, **draw) for i in range(biases)}
    return data | {"out": torch.full((1, n, n), float("nan"), device=device, dtype=kind)}


def expected(data: dict[str, Any]) -> Any:
    """The result in float64."""
    return (data["A"].double() @ data["B"].double() + sum(v.double() for k, v in data.items() if k.startswith("bias"))).relu()


def build(fe: Any, data: dict[str, Any], **where: Any) -> tuple[Any, dict[Any, Any]]:
    """A built graph of ``fe`` and its variant pack."""
    dtype = fe.data_type.BFLOAT16 if str(data["A"].dtype) == "torch.bfloat16" else fe.data_type.FLOAT
    types = {"io_data_type": dtype, "intermediate_data_type": fe.data_type.FLOAT, "compute_data_type": fe.data_type.FLOAT}
    graph = fe.pygraph(**types, **where)
    t = declare(fe, graph, data, dtype)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([fe.heur_mode.A, fe.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph, {t[k]: v for k, v in data.items()}


@dataclass(frozen=True)
class Contender:
    """``call`` enqueues the work; ``out``: where its result is after two calls, None for what has no result."""

    name: str
    call: Callable[[], Any]
    out: Any = None


def _like(data: dict[str, Any]) -> dict[str, Any]:
    """The same values in other memory."""
    return {k: v.clone() for k, v in data.items()}


def ours(torch: Any, device: str, data: dict[str, Any]) -> tuple[list[Contender], Any]:
    """Our contenders, and the graph."""
    fe: Any = graphdnn
    handle = fe.create_handle(device)
    if device.startswith("cuda"):
        fe.set_stream(handle, torch.cuda.current_stream(device).cuda_stream)
    graph, pack = build(fe, data, handle=handle)
    copies = _like(data)
    other = dict(zip(pack, copies.values(), strict=True))
    space = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=device)
    bound, updated = graph.bind(pack, space, handle), graph.bind(pack, space, handle)
    by_uid = {t.get_uid(): v for t, v in pack.items()}
    addresses = [by_uid[u].data_ptr() for u in bound.uids]
    turn = [pack, other]

    def in_turn() -> None:
        turn.reverse()
        graph.execute(turn[0], space, handle)

    out, other_out = data["out"], copies["out"]
    return [
        Contender("graphdnn execute", lambda: graph.execute(pack, space, handle), out),
        Contender("graphdnn execute, two packs in turn", in_turn, other_out),
        Contender("graphdnn bound", bound, out),
        Contender("graphdnn bound, addresses given", lambda: bound.run(addresses), out),
        Contender("graphdnn bound, updated before the call", lambda: updated.update(other)(), other_out),
    ], graph


def theirs(torch: Any, device: str, data: dict[str, Any], tell: Callable[[str], None]) -> list[Contender]:
    """The cuDNN frontend's contender, where it is installed and takes the graph."""
    if not device.startswith("cuda"):
        return []
    torch.nn.functional.conv2d(torch.ones(1, 1, 8, 8, device=device), torch.ones(1, 1, 3, 3, device=device))  # loads torch's own libcudnn
    try:
        import cudnn  # type: ignore[import-not-found,unused-ignore]

        handle = cudnn.create_handle()
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        graph, pack = build(cudnn, data, handle=handle)
        space = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=device)
    except Exception as error:  # whatever the frontend raises: a benchmark without it is better than none
        tell(f"  cuDNN frontend left out: {type(error).__name__}: {str(error)[:200]}")
        return []
    return [Contender(f"cuDNN frontend {cudnn.__version__} execute", lambda: graph.execute(pack, space, handle=handle), data["out"])]


def timer(call: Callable[[], Any], wait: Callable[[], Any], calls: int) -> Callable[[], list[float]]:
    """Microseconds of each of ``calls`` calls; ``wait`` empties the device's queue."""

    def samples() -> list[float]:
        clock, found = time.perf_counter_ns, []
        for number in range(calls):
            if number % QUEUE == 0:
                wait()
            start = clock()
            call()
            found.append((clock() - start) / 1e3)
        wait()
        return found

    return samples


def measure(torch: Any, case: str, device: str, rounds: int, calls: int, tell: Callable[[str], None]) -> tuple[list[Result], Any]:
    """All contenders of a case, and our graph."""
    data = inputs(torch, device, EPILOGUES[case])
    wanted, limit = expected(data), TOLERANCE[str(data["A"].dtype).removeprefix("torch.")]
    mine, graph = ours(torch, device, data)
    contenders = [*mine, *theirs(torch, device, _like(data), tell), Contender("an empty call", lambda: None)]
    wait = partial(torch.cuda.synchronize, device) if device.startswith("cuda") else (lambda: None)
    results = []
    for c, rows in zip(contenders, common.take_turns([timer(c.call, wait, calls) for c in contenders], rounds), strict=True):
        if c.out is not None:
            wait()
            c.out.fill_(float("nan"))
            c.call(), c.call()
            wait()
        right = c.out is None or common.error(c.out, wanted) <= limit
        results.append(result(case, c.name, "us", [x for row in rows for x in row], right))
    return results, graph


# -------------------------------------------------------------------------------------------------------------------------------------- starts
def started(what: str, device: str, path: Path) -> dict[str, Any]:
    """What a new process says of a build ("build", a graph's JSON text) or a load ("load", a serialized plan). Python may write its bytecode there:
    the first start would else compile every module."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "graphdnn.bench.host_start", what, device, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ExecutionError(explain(f"a new process could not {what} the plan", found=(done.stderr.strip().splitlines() or ["nothing"])[-1][-500:]))
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def starts(graph: Any, device: str, count: int) -> list[Result]:
    """Builds from the disk cache and loads of the serialized plan, alternately, each in a new process; the first of each does not count."""
    with tempfile.TemporaryDirectory() as folder:
        text, plan = Path(folder, "graph.json"), Path(folder, "plan.gdnn")
        text.write_text(str(graph))
        plan.write_bytes(bytes(graph.serialize()))
        timers = [lambda: started("build", device, text), lambda: started("load", device, plan)]
        built, loaded = common.take_turns(timers, count)
    return [
        result("start", "build from the disk cache", "ms", [s["ms"] for s in built], all(s["origins"] == ["disk"] for s in built)),
        result("start", "load of a serialized plan", "ms", [s["ms"] for s in loaded]),
        result("start", "import graphdnn and the API", "ms", [s["import_ms"] for s in (*built, *loaded)]),
    ]


def run(
    device: str = "",
    *,
    rounds: int = common.ROUNDS,
    calls: int = CALLS,
    count: int = STARTS,
    output: Path | None = None,
    tell: Callable[[str], None] = print,
) -> list[Result]:
    """Run all of it on ``device`` ("cpu", "cuda:0"; default: as for a graph that says nothing). ``count``: new processes a figure, 0 for none;
    ``output``: a JSON file. ExecutionError without torch, NotSupportedError for a device that runs nothing, ValidationError for arguments."""
    from graphdnn.frontend.handle import resolve_device

    common.expect(output, rounds=rounds, calls=calls)
    common.expect(None, 0, starts=count)
    torch, place = common.import_torch(), resolve_device(device or None)
    if place.described or place.kind not in ("cpu", "cuda"):
        raise NotSupportedError(explain("the benchmark needs a device that runs plans", expected="cpu or cuda:<index>", found=place.text))
    tell(f"host time; {common.versions(f'{place.text} ({place.name})', torch)}; {rounds} rounds of {calls} calls, contenders in turn")
    results: list[Result] = []
    graph = None
    for case in EPILOGUES:
        tell(case)
        found, graph = measure(torch, case, place.text, rounds, calls, tell)
        for row in found:
            tell(row.line())
        peers = [r.p50 for r in found if r.contender.startswith("cuDNN")]
        if peers:
            tell(f"  cuDNN frontend over graphdnn execute, medians: {peers[0] / found[0].p50:.2f}")
        results += found
    if count:
        tell(f"start: {count} new processes each")
        for row in starts(graph, place.text, count):
            tell(row.line())
            results.append(row)
    if output is not None:
        common.write(output, place.text, torch, results)
    return results
