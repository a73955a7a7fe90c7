"""``graphdnn bench cpu``: plans for the CPU beside torch eager with as many threads, in the same process, alternately.

A sample is the mean of several calls after one that is not timed; the figure is the median of the rounds. Both results are compared with torch's in
float64.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphdnn import env
from graphdnn.bench import common
from graphdnn.bench.cpu_cases import CASES, Case, Setting
from graphdnn.errors import ValidationError, explain

SAMPLE_SECONDS = 0.05
"""A sample has as many calls as take about this long."""
TOLERANCE = {"float32": 1e-5, "bfloat16": 2**-8, "float16": 2**-11}
"""Norm of the error over the norm of the result. 16-bit types round to 2**-9 and 2**-12 of a value at most half the time; float32 to 2**-24, and its
sums of thousands of terms, and transformed convolutions, stay below a hundred times that."""


@dataclass(frozen=True)
class Result:
    """One case: microseconds a call (medians and best rounds), torch's time over ours, errors, seconds to build, what runs."""

    case: str
    title: str
    us: float
    best_us: float
    torch_us: float
    torch_best_us: float
    ratio: float
    error: float
    torch_error: float
    right: bool
    build_s: float
    plan: str


@dataclass(frozen=True)
class Prepared:
    """A built case: the two calls, our output buffers, torch's results in float64."""

    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    outputs: list[Any]
    expected: list[Any]
    build_s: float
    plan: str


def chosen(names: Sequence[str]) -> list[Case]:
    """The cases of these names, all of them for none; ValidationError for a name that is not one."""
    known = {c.name: c for c in CASES}
    for name in names:
        if name not in known:
            raise ValidationError(explain("not a case of the benchmark", expected=", ".join(known), found=repr(name)))
    return [known[n] for n in dict.fromkeys(names)] if names else list(CASES)


def prepare(torch: Any, case: Case, sizes: dict[str, Any]) -> Prepared:
    """Declare, build, make the buffers; the plan is that which heuristics choose."""
    setting = Setting(torch)
    start = time.perf_counter()
    peer, graph = case.declare(setting, **sizes), setting.graph
    graph.build([setting.fe.heur_mode.A])
    seconds = time.perf_counter() - start
    values = [v for _, v in setting.data]
    wide = peer(*(v.double() if v.is_floating_point() else v for v in values))
    expected = [e.reshape(tuple(t.dim)) for e, t in zip(_listed(wide), setting.results, strict=False)]
    outputs = [_buffer(torch, t) for t in setting.results]
    pack = dict([*setting.data, *zip(setting.results, outputs, strict=True)])
    workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8)
    plan = graph.get_plan_name_at_index(0)
    return Prepared(lambda: graph.execute(pack, workspace), lambda: peer(*values), outputs, expected, seconds, plan)


def _listed(made: Any) -> list[Any]:
    return list(made) if isinstance(made, tuple | list) else [made]


def _buffer(torch: Any, tensor: Any) -> Any:
    """Filled with NaN, so that what is not written is never right."""
    kind = {"FLOAT": torch.float32, "BFLOAT16": torch.bfloat16, "HALF": torch.float16}[tensor.dtype.name]
    return torch.empty_strided(tuple(tensor.dim), tuple(tensor.stride), dtype=kind).fill_(float("nan"))


def errors(made: Prepared) -> tuple[float, float, bool]:
    """Run both once: the largest error of our results, that of torch's, and whether all of ours are within the tolerance of their type."""
    made.ours()
    theirs = [t.reshape(e.shape) for t, e in zip(_listed(made.theirs()), made.expected, strict=False)]
    found = [common.error(o, e) for o, e in zip(made.outputs, made.expected, strict=True)]
    limits = [TOLERANCE[str(o.dtype).removeprefix("torch.")] for o in made.outputs]
    other = [common.error(t, e) for t, e in zip(theirs, made.expected, strict=True)]
    return max(found), max(other), all(f <= limit for f, limit in zip(found, limits, strict=True))  # false for NaN


def timer(call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> Callable[[], float]:
    """Microseconds a call, of as many calls as fill a sample."""
    call()
    start = clock()
    call()
    calls = max(1, int(SAMPLE_SECONDS / max(clock() - start, 1e-6)))

    def sample() -> float:
        call()  # wakes the threads, and fetches what the other contender drove out of the caches
        start = clock()
        for _ in range(calls):
            call()
        return 1e6 * (clock() - start) / calls

    return sample


def measure(torch: Any, case: Case, sizes: dict[str, Any], rounds: int) -> Result:
    """Build, check and time one case."""
    made = prepare(torch, case, sizes)
    error, torch_error, right = errors(made)
    ours, theirs = common.take_turns([timer(made.ours), timer(made.theirs)], rounds)
    us, torch_us = statistics.median(ours), statistics.median(theirs)
    times = us, min(ours), torch_us, min(theirs), torch_us / us
    return Result(case.name, case.title, *times, error, torch_error, right, made.build_s, made.plan)


def line(r: Result) -> str:
    """One row of the table."""
    times = f"{r.us / 1e3:9.2f} ms  torch {r.torch_us / 1e3:9.2f} ms  {r.ratio:5.2f} x"
    return f"{times}  error {r.error:.1e}  build {r.build_s:5.2f} s  {r.title}" + ("" if r.right else "  WRONG")


def run(
    names: Sequence[str] = (),
    *,
    rounds: int = common.ROUNDS,
    small: bool = False,
    output: Path | None = None,
    tell: Callable[[str], None] = print,
) -> list[Result]:
    """Run the cases ``names`` (default: all); ``small``: on the sizes of tests; ``output``: a JSON file. Torch gets as many threads as graphdnn.

    Raises ExecutionError without torch, ValidationError for a name that is not a case, GraphError for a plan that cannot be built."""
    common.expect(output, rounds=rounds)
    cases, torch = chosen(names), common.import_torch()
    threads, before = env.num_threads(), torch.get_num_threads()
    device = f"cpu, {threads} threads each"
    tell(f"{common.versions(device, torch)}; x: torch's time over graphdnn's")
    results = []
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            for case in cases:
                results.append(measure(torch, case, case.small if small else case.sizes, rounds))
                tell(line(results[-1]))
    finally:
        torch.set_num_threads(before)
    if output is not None:
        common.write(output, device, torch, results)
    return results
