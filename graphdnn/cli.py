"""The command ``graphdnn``: doctor, explain, draw, compile, inspect, run, tune, tuning, bench, cache; on graphs as JSON text (``str(graph)``) and
serialized plans.

Reports go to stdout; progress, with elapsed time, and errors go to stderr. Exit status: 0 fine, 1 an error or a wrong result, 2 wrong usage, 130
interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphdnn.errors import GraphError, ValidationError, explain

if TYPE_CHECKING:
    from graphdnn.plans.plan import ExecutionPlan
    from graphdnn.plans.planset import PlanSet
PLAN = "a serialized plan"


# ------------------------------------------------------------------------------------------------------------------------------------ progress
@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Writes what is going on, and every compilation, to stderr with the seconds since the start."""
    from graphdnn.plans import cache

    start = time.perf_counter()

    def tell(line: str) -> None:
        if not quiet:
            print(f"[{time.perf_counter() - start:7.2f} s] {line}", file=sys.stderr, flush=True)

    cache.listeners.append(tell)
    try:
        yield tell
    finally:
        cache.listeners.remove(tell)


# ------------------------------------------------------------------------------------------------------------------------------------- loading
def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValidationError(explain(f"'{path}' cannot be read", expected=f"the JSON text of a graph, or {PLAN}", found=error.strerror)) from error


def _load(path: Path, device: str | None) -> tuple[ExecutionPlan | None, Any]:
    """(plan, None) from a serialized plan, (None, pygraph) from JSON text."""
    import graphdnn
    from graphdnn import device as devices
    from graphdnn.plans import serialize

    data = _read(path)
    if serialize.is_plan(data):
        return serialize.load(data, devices.parse(device) if device else None), None
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValidationError(explain(f"'{path}' is neither JSON text nor a serialized plan", found=str(error))) from error
    graph = graphdnn.pygraph(name=path.stem, device=device)
    graph.deserialize(text)
    return None, graph


def _planned(path: Path, device: str | None, fixed: bool = False) -> PlanSet | ExecutionPlan:
    """The plans of a graph (nothing is compiled), or the plan of a file. ``fixed``: no graph with dims is taken."""
    plan, graph = _load(path, device)
    if plan is not None:
        return plan
    import graphdnn
    from graphdnn.plans import serialize

    serialize.expect_fixed(graph.dims if fixed else None)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([graphdnn.heur_mode.A, graphdnn.heur_mode.FALLBACK])
    graph.check_support()
    plans: PlanSet = graph._planned()
    return plans


def _built(path: Path, device: str | None, tell: Callable[[str], None], fixed: bool = False) -> ExecutionPlan:
    """A plan that is compiled. ``fixed``: see ``_planned``."""
    from graphdnn.plans.plan import ExecutionPlan

    plans = _planned(path, device, fixed)
    if isinstance(plans, ExecutionPlan):
        return plans.build()
    tell(f"{plans.count()} candidate plans on {plans.device.text}; building the first that builds")
    plans.build()
    return plans.chosen


# ------------------------------------------------------------------------------------------------------------------------------------ commands
def _doctor(args: argparse.Namespace) -> int:
    from graphdnn import env
    from graphdnn._version import __version__
    from graphdnn.targets.cuda_toolchain import toolchain_report

    rows = toolchain_report()
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    print(f"graphdnn {__version__}")
    head = ("", "part", "version", "path", "needed for")
    _table(head, [("ok" if r["found"] else "missing", r["part"], r["version"] if r["found"] else "", r["path"], r["needed_for"]) for r in rows])
    for r in rows:
        if not r["found"] and r["version"]:
            print(f"{r['part']}: {r['version']}")
    print()
    _table(("switch", "value", "meaning"), [(s.name, _switch(s), s.doc) for s in env.SWITCHES])
    return 0


def _switch(switch: Any) -> str:
    try:
        return f"{switch()}" + ("" if switch.is_set else " (default)")
    except ValidationError as error:
        return f"INVALID: {error}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """With rich where it is installed and somebody looks, else in plain columns."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table(*head)
            for row in rows:
                table.add_row(*map(str, row))
            Console().print(table)
            return
    widths = [max(len(str(r[i])) for r in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        print("  ".join(str(c).ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())


def _explain(args: argparse.Namespace) -> int:
    from graphdnn.inspection.explain import explain as report

    with _progress(args.quiet):
        plans = _planned(args.file, args.device)
        found = report(plans.graph, plans)
    print(json.dumps(found.data, indent=2) if args.json else found)
    return 0


def _draw(args: argparse.Namespace) -> int:
    from graphdnn.inspection.draw import draw
    from graphdnn.plans.plan import ExecutionPlan

    plans = _planned(args.file, args.device)
    plan = plans if isinstance(plans, ExecutionPlan) else plans.plan_at(0)
    path = args.output or args.file.with_suffix("." + (args.format or "svg"))
    draw(plan.graph, plan.partition, path, args.format, [c.name for c in plan.choices])
    print(path)
    return 0


def _compile(args: argparse.Namespace) -> int:
    from graphdnn.plans import container, serialize

    start = time.perf_counter()
    with _progress(args.quiet) as tell:
        plans = [_built(args.file, args.device, tell, fixed=True)] if args.arch is None else _for_each(args, tell)
        path = args.output or args.file.with_suffix(".gdnn")
        data = serialize.merge(map(serialize.dump, plans)) if len(plans) > 1 else serialize.dump(plans[0])
        container.write(path, data)
    for plan in plans:
        print(f"{plan.name} on {plan.device.text}: kernels {len(plan.kernels)}, workspace {plan.workspace_bytes} bytes")
        for k in plan.kernels:
            facts = f"{len(k.binary.code)} bytes of code"
            if k.registers:
                facts += f", {k.registers} registers, {k.shared_bytes} bytes shared, {k.spill_bytes} bytes spilled"
            print(f"  {k.name}: {facts} ({k.origin})")
    print(f"{path}: {len(data)} bytes, {time.perf_counter() - start:.2f} s")
    return 0


def _for_each(args: argparse.Namespace, tell: Callable[[str], None]) -> list[ExecutionPlan]:
    """A plan for each architecture of --arch."""
    from graphdnn.frontend import ahead

    if args.device:
        found = f"--arch {args.arch} --device {args.device}"
        raise ValidationError(explain("--arch and --device exclude each other", found=found, fix="name the device among those of --arch"))
    try:
        text = _read(args.file).decode()
    except UnicodeDecodeError as error:
        rule, fix = f"'{args.file}' is no JSON text of a graph", "a plan that is built has its architecture"
        raise ValidationError(explain(rule, found=str(error), fix=fix)) from error
    return ahead.plans_for(text, args.arch, args.file.stem, tell=tell)


def _inspect(args: argparse.Namespace) -> int:
    from graphdnn.inspection import planfile

    found = planfile.inspect(_read(args.file), [t for t in planfile.TEXTS if getattr(args, t)])
    print(json.dumps(found.data, indent=2) if args.json else found)
    return 0


def _run(args: argparse.Namespace) -> int:
    from graphdnn.inspection.check import check

    with _progress(args.quiet) as tell:
        plan = _built(args.file, args.device, tell)
        found = check(plan, args.seed, args.repeat, tell)
    print(f"{plan.name} on {plan.device.text}")
    for line in found.lines():
        print(f"  {line}")
    return 0 if found.right else 1


def _bench_matmul(args: argparse.Namespace) -> int:
    from graphdnn.bench import matmul

    shapes = [matmul.parse_shape(s) for s in args.shapes] or matmul.SHAPES
    found = matmul.run(shapes, rounds=args.rounds, every=args.every, compile=args.torch_compile, output=args.json)
    return 0 if all(r.right for r in found if r.contender.startswith("graphdnn")) else 1


def _bench_cpu(args: argparse.Namespace) -> int:
    from graphdnn.bench import cpu

    found = cpu.run(args.only, rounds=args.rounds, small=args.small, output=args.json)
    return 0 if all(r.right for r in found) else 1


def _bench_host(args: argparse.Namespace) -> int:
    from graphdnn.bench import host

    found = host.run(args.device, rounds=args.rounds, calls=args.calls, count=args.starts, output=args.json)
    return 0 if all(r.right for r in found) else 1


def _bench_dynamic(args: argparse.Namespace) -> int:
    from graphdnn.bench import dynamic

    found = dynamic.run(rounds=args.rounds, shapes=args.shapes, output=args.json)
    return 0 if not any(r.wrong or r.error > dynamic.TOLERANCE for r in found) else 1


def _cache(args: argparse.Namespace) -> int:
    from graphdnn import env
    from graphdnn.plans import cache

    place = cache.disk()
    if args.what == "path":
        print(env.cache_dir())
        return 0
    if place is None:
        print("the cache on disk is switched off (GRAPHDNN_CACHE=0), or its folder belongs to somebody else")
        return 0
    if args.what == "clear":
        print(f"{place.clear()} kernels removed from {place.root}")
        return 0
    entries = place.entries()
    print(f"{place.root}: {len(entries)} kernels, {sum(n for _, n in entries) / 2**20:.1f} MiB")
    return 0


def _tune(args: argparse.Namespace) -> int:
    plan, graph = _load(args.file, args.device)
    if plan is not None:
        rule = f"'{args.file}' is a serialized plan, which was chosen before"
        raise ValidationError(explain(rule, expected="the JSON text of a graph", fix="tune the graph and serialize it again"))
    with _progress(args.quiet):
        found = graph.autotune(
            workspace_limit=args.workspace_limit, iterations=args.iterations, candidates=args.candidates, workers=args.workers, reuse=not args.again
        )
    print(found)
    if found.problem:
        print(f"not stored: {found.problem}")
    return 0


def _tuning(args: argparse.Namespace) -> int:
    from graphdnn.plans import tuning, tuning_files

    place = tuning.database()
    if place is None:
        print("there is no tuning database: the cache is switched off (GRAPHDNN_CACHE=0) and GRAPHDNN_TUNING_DB names no file")
        return 0
    if args.what == "merge":
        found = [run for path in args.files for run in tuning_files.load(path)]
        print(f"{place.add(found)} of {len(found)} runs were new in {place.path}")
    elif args.what == "clear":
        print(f"{place.clear()} runs removed from {place.path}")
    elif args.what == "export":
        runs = place.runs()
        tuning_files.write(args.output, runs)
        print(f"{args.output}: {len(runs)} runs")
    else:
        runs = place.runs()
        print(tuning_files.dump(runs) if args.json else f"{place.path}: {len(runs)} runs")
        if runs and not args.json:
            _table(tuning_files.COLUMNS, [tuning_files.columns(r) for r in runs])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="graphdnn", description="Look at, compile and run graphs stored as JSON text, and serialized plans.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str, file: bool = True, device: bool = True) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        made.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
        if file:
            made.add_argument("file", type=Path, help={"inspect": PLAN, "tune": "JSON text of a graph"}.get(name, f"JSON text of a graph, or {PLAN}"))
        if file and device:
            made.add_argument("--device", help="cpu, cuda:0, cudasim, or a described GPU such as sm_90; default: as for a graph that says nothing")
        return made

    doctor = command("doctor", _doctor, "every part of the toolchain: found or missing, version, path, what it is needed for", file=False)
    doctor.add_argument("--json", action="store_true", help="as JSON")
    told = command("explain", _explain, "what a plan does and why: kernels, traffic, operations, choices, rejections")
    told.add_argument("--json", action="store_true", help="as JSON")
    drawn = command("draw", _draw, "a picture of the graph and of what is fused")
    drawn.add_argument("-o", "--output", type=Path, help="file to write; default: beside the graph")
    drawn.add_argument("--format", choices=("svg", "png", "dot", "mermaid"), help="default: by the suffix of the output, else svg")
    made = command("compile", _compile, "build plans for one or several architectures and store them in one file; needs no GPU")
    made.add_argument("--arch", metavar="LIST", help="architectures of the plans in the file, such as sm_80,sm_90a,cpu; in place of --device")
    made.add_argument("-o", "--output", type=Path, help="file to write; default: beside the graph, with suffix .gdnn")
    seen = command(
        "inspect", _inspect, "what a plan file holds: versions, architectures, graph, engines, knobs, launch recipe, kernels", device=False
    )
    seen.add_argument("--json", action="store_true", help="as JSON")
    for which in ("source", "ptx", "llvm", "sass"):
        seen.add_argument(f"--{which}", action="store_true", help=f"with the {which} text of every kernel that has one")
    ran = command("run", _run, "run a graph or plan on random inputs and compare it with the float64 reference")
    ran.add_argument("--seed", type=int, default=0, help="of the random inputs")
    ran.add_argument("--repeat", type=int, default=5, help="timed executions")
    timed = commands.add_parser("bench", help="time plans beside cuDNN and torch").add_subparsers(dest="what", required=True, metavar="what")
    on_gpu = timed.add_parser("matmul", help="fused matmuls beside cuDNN and torch, on a GPU")
    on_gpu.add_argument("shapes", nargs="*", metavar="BxMxNxK", help="default: the five shapes of docs/performance.md")
    on_gpu.add_argument("--every", action="store_true", help="every fused plan, not only the chosen one")
    on_gpu.add_argument("--torch-compile", action="store_true", help="torch.compile too")
    on_cpu = timed.add_parser("cpu", help="kernels for the CPU beside torch eager with as many threads")
    on_cpu.add_argument("--only", action="append", default=[], metavar="NAME", help="one case, by its name; may be repeated; default: all")
    on_cpu.add_argument("--small", action="store_true", help="sizes of a few hundred elements, to see that all of it runs")
    on_host = timed.add_parser("host", help="what a call costs the host, beside the cuDNN frontend; builds and loads in new processes")
    on_host.add_argument("--device", default="", help="cpu or cuda:0; default: as for a graph that says nothing")
    on_host.add_argument("--calls", type=int, default=1000, help="timed calls in a round")
    on_host.add_argument("--starts", type=int, default=10, help="new processes for each figure of a start; 0: none")
    on_shapes = timed.add_parser("dynamic", help="graphs with dims beside graphs of fixed shapes, on a GPU")
    on_shapes.add_argument("--shapes", type=int, default=200, help="random shapes before the large one is timed")
    for what, run in ((on_gpu, _bench_matmul), (on_cpu, _bench_cpu), (on_host, _bench_host), (on_shapes, _bench_dynamic)):
        what.set_defaults(run=run)
        what.add_argument("--rounds", type=int, default=10, help="timed rounds; the contenders take turns in each")
        what.add_argument("--json", type=Path, help="file for the results")
    tuned = command("tune", _tune, "measure the plans of a graph, on random inputs, and keep the result in the tuning database")
    tuned.add_argument("--again", action="store_true", help="measure even what the database knows")
    tuned.add_argument("--workspace-limit", type=int, metavar="BYTES", help="leave out plans that need more")
    tuned.add_argument("--iterations", type=int, default=20, help="rounds in which the best plans take turns")
    tuned.add_argument("--candidates", type=int, help="plans that are tried, the best guesses first; default: 32")
    tuned.add_argument("--workers", type=int, help="processes that build; default: one for each processor, 8 at most")
    known = commands.add_parser("tuning", help="the tuning database").add_subparsers(dest="what", required=True, metavar="what")
    known.add_parser("list", help="every run: when, where, device, graph, the chosen plan").add_argument(
        "--json", action="store_true", help="as JSON"
    )
    known.add_parser("export", help="write all runs to a JSON file").add_argument("-o", "--output", type=Path, required=True, help="file to write")
    merged = known.add_parser("merge", help="add the runs of other databases, or of files that export wrote")
    merged.add_argument("files", type=Path, nargs="+", metavar="FILE")
    known.add_parser("clear", help="delete every run")
    for made in known.choices.values():
        made.set_defaults(run=_tuning)
    kept = command("cache", _cache, "the kernel cache on disk", file=False)
    kept.add_argument("what", choices=("info", "path", "clear"), nargs="?", default="info")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: that of the process); the exit status."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except (GraphError, MemoryError) as error:
        print(f"graphdnn: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("graphdnn: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read has seen enough; what is left in the buffer goes nowhere
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status
