"""``python -m tests.fuzz.run --device cpu --count 2000 --seed 0``: random graphs, a table, and a script for every seed that fails. With ``--dims``
extents are dims, and each graph runs at several shapes.

Seeds are run by a worker process, so that a crash is a failed seed like any other and the run goes on.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import subprocess
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from graphdnn.errors import ExecutionError, GraphError
from tests.fuzz.anchors import families
from tests.fuzz.dynamic import check_dynamic
from tests.fuzz.features import features, table
from tests.fuzz.generator import generate
from tests.fuzz.program import Program, check, script
from tests.fuzz.repair import tame
from tests.fuzz.shapes import SMALL, USUAL, Limits
from tests.fuzz.shrink import shrink

BATCH = 100
"""Seeds per worker process; bounds what a leak can cost."""
PATIENCE = 300.0
"""Seconds after which a seed is taken for hung: the worker prints where it hangs and ends."""


@dataclass
class Result:
    """Of one seed. ``problem`` is empty if all is well, else ``kind`` is "wrong" (numbers, damage, inference), "refused" (an error of graphdnn before
    it ran) or "crashed" (any other error, the process gone or hung). ``families``: how many ops of each the graph has;
    ``features``: of what kinds they are; ``shapes``: with dims, what became of how many shapes."""

    seed: int
    problem: str = ""
    kind: str = ""
    detail: str = ""
    ops: int = 0
    elements: int = 0
    excluded: int = 0
    seconds: float = 0.0
    families: dict[str, int] = field(default_factory=dict)
    features: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, int] = field(default_factory=dict)


KINDS = ("wrong", "refused", "crashed")


def limits_for(device: str) -> Limits:
    """Sizes that suit the device."""
    return SMALL if device == "cudasim" else USUAL


def run_seed(seed: int, device: str, dims: bool = False) -> Result:
    """Generate, build, run and compare; ``dims``: at several shapes of a graph with dims."""
    started = time.perf_counter()
    result = Result(seed)
    try:
        program = tame(seed, limits_for(device))
        result.ops = len(program.ops)
        result.families = dict(Counter(families(program.ops)))
        result.features = dict(Counter(features(program.ops)))
        if dims:
            result.shapes = dict(Counter(check_dynamic(program, device, seed)))
        else:
            outcome = check(program, device)
            result.elements, result.excluded = outcome.elements, outcome.excluded
    except Exception as error:
        result.problem, result.kind = signature(error), kind_of(error)
        result.detail = "".join(traceback.format_exception(error)[-6:])
    result.seconds = time.perf_counter() - started
    return result


def kind_of(error: BaseException) -> str:
    """One of KINDS."""
    if isinstance(error, AssertionError):
        return "wrong"
    return "refused" if isinstance(error, GraphError) and not isinstance(error, ExecutionError) else "crashed"


def signature(error: BaseException) -> str:
    """First line of an error, without numbers: what two failing seeds have in common."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:160]}"


def worker(device: str, seeds: list[int], dims: bool) -> None:
    """Print a line before and one after every seed."""
    for seed in seeds:
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        print(json.dumps({"start": seed}), flush=True)
        print(json.dumps(asdict(run_seed(seed, device, dims))), flush=True)


def run(device: str, seeds: list[int], jobs: int = 1, dims: bool = False) -> list[Result]:
    """Results of all seeds in their order, each batch in a process of its own, ``jobs`` of them at a time."""
    size = max(1, min(BATCH, -(-len(seeds) // jobs)))
    batches = [seeds[i : i + size] for i in range(0, len(seeds), size)]
    results: list[Result] = []
    with ThreadPoolExecutor(jobs) as pool:
        for done in pool.map(partial(_all_of, device, dims), batches):
            results.extend(done)
            failed = sum(bool(r.problem) for r in results)
            print(f"{device}: {len(results)} of {len(seeds)} seeds, {failed} failed", file=sys.stderr, flush=True)
    return results


def _all_of(device: str, dims: bool, seeds: list[int]) -> list[Result]:
    """Results of one batch; after a crash the rest goes on in a new process."""
    results: list[Result] = []
    while len(results) < len(seeds):
        done, lost = _batch(device, dims, seeds[len(results) :])
        results.extend(done)
        if lost is not None:
            results.append(lost)
    return results


def _batch(device: str, dims: bool, seeds: list[int]) -> tuple[list[Result], Result | None]:
    command = [sys.executable, "-m", "tests.fuzz.run", "--device", device, *["--dims"] * dims, "--worker", *map(str, seeds)]
    done: list[Result] = []
    current = seeds[0]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[2]) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            record = json.loads(line)
            if "start" in record:
                current = record["start"]
            else:
                done.append(Result(**record))
        code = process.wait()
    if len(done) == len(seeds):
        return done, None
    return done, Result(current, problem=f"the process ended with status {code}", kind="crashed")


def report(results: list[Result], device: str, out: Path | None, *, shrinking: bool = True) -> int:
    """Print the table; write a script per kind of failure. The number of failed seeds."""
    failed = [r for r in results if r.problem]
    elements, excluded = sum(r.elements for r in results), sum(r.excluded for r in results)
    kinds = Counter(r.kind for r in failed)
    heads = "".join(f" {k:>7}" for k in KINDS)
    print(f"{'device':<10} {'graphs':>7} {'ops':>7} {'elements':>10} {'not compared':>13}{heads} {'seconds':>8}")
    share = f"{excluded / max(elements, 1):.3%}"
    ops, seconds = sum(r.ops for r in results), sum(r.seconds for r in results)
    counts = "".join(f" {kinds[k]:>7}" for k in KINDS)
    print(f"{device:<10} {len(results):>7} {ops:>7} {elements:>10} {share:>13}{counts} {seconds:>8.1f}")
    drawn = sum((Counter(r.families) for r in results), Counter())
    print("ops by family: " + ", ".join(f"{name} {count}" for name, count in sorted(drawn.items())))
    print(table(sum((Counter(r.features) for r in results), Counter())))
    shapes = sum((Counter(r.shapes) for r in results), Counter())
    print("shapes: " + ", ".join(f"{what} {count}" for what, count in sorted(shapes.items()))) if shapes else None
    problems = Counter(r.problem for r in failed)
    for problem, count in problems.most_common():
        seeds = [r.seed for r in failed if r.problem == problem]
        print(f"\n{count} x {problem}\n    seeds {seeds[:12]}{' ...' if count > 12 else ''}")
        first = next(r for r in failed if r.problem == problem)
        program = tame(first.seed, limits_for(device)) if first.ops else generate(first.seed, limits_for(device))
        print(f"    python -m tests.fuzz.run --device {device} --seed {first.seed} --count 1{' --dims' * bool(shapes)}")
        if shrinking and first.ops and not shapes:
            program = shrink(program, partial(still_fails, device=device, problem=first.problem))
        text = script(program, device, f"seed {first.seed} on {device}: {problem}")
        if out is None:
            print(text)
        else:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"seed_{first.seed}_{device.replace(':', '')}.py").write_text(text)
    return len(failed)


def still_fails(program: Program, device: str, problem: str) -> bool:
    """Whether a smaller program fails with the same class of error."""
    try:
        check(program, device)
    except Exception as error:
        return type(error).__name__ == problem.split(":")[0]
    return False


def main(argv: list[str] | None = None) -> int:
    """Command line; the status is 1 if a seed failed or too much could not be compared."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes at a time")
    parser.add_argument("--out", type=Path, help="folder for scripts of failing seeds; default: print them")
    parser.add_argument("--dims", action="store_true", help="extents are dims")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--show", action="store_true", help="print the program of --seed and stop")
    parser.add_argument("--worker", nargs="*", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.show:
        print(script(tame(options.seed, limits_for(options.device)), options.device, f"seed {options.seed}"))
        return 0
    if options.worker is not None:
        worker(options.device, options.worker, options.dims)
        return 0
    results = run(options.device, list(range(options.seed, options.seed + options.count)), options.jobs, options.dims)
    failed = report(results, options.device, options.out, shrinking=not options.no_shrink)
    compared = sum(r.elements for r in results)
    too_many = sum(r.excluded for r in results) > 0.05 * compared
    if too_many:
        print("more than 5 % of the elements could not be compared")
    return 1 if failed or too_many else 0


if __name__ == "__main__":
    sys.exit(main())
