"""The conformance tests of a GPU under compute-sanitizer, in several processes, within a time budget.

    python -m tests.gpu.sanitize --tool memcheck --workers 15 --budget 300        the tests, in an order that makes a part of them a fair sample
    python -m tests.gpu.sanitize --self-test                                      that memcheck and racecheck notice planted faults

Each worker is one sanitizer around one pytest (tests/gpu/sanitize_queue.py) that takes test after test from a queue until the time is up. Under
memcheck every tensor is an allocation of its own that ends with the tensor (GRAPHDNN_TEST_FENCE), with unused bytes behind it. All workers, and later
runs, share a kernel cache (GRAPHDNN_TEST_CACHE). Printed at the end: how many tests ran, what failed, what the sanitizer said. Exit status 0: all of
it is clean.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
COMMON = ("--print-limit", "1000", "--show-backtrace", "device", "--check-exit-code", "no", "--require-cuda-init", "no")
COMMON += ("--error-exitcode", "9", "--launch-timeout", "120")
TOOLS: dict[str, tuple[str, ...]] = {
    "none": (),
    "memcheck": ("--destroy-on-device-error", "kernel", "--padding", "4096"),
    "racecheck": ("--racecheck-report", "analysis"),
    "initcheck": (),
    "synccheck": (),
}
PORT, PORTS = 49152, 20
"""compute-sanitizer talks to its program through one of 10 ports from --port on: every worker gets a range of its own."""
LAST, GRACE = 18.0, (0.0, 6.0, 10.0)
"""Seconds before the end of the budget in which no test is begun; seconds after it when pytest is interrupted, when it is killed, which leaves the
sanitizer its summary, and when everything is killed."""
SUMMARY = re.compile(r"=+ (ERROR|RACECHECK|LEAK) SUMMARY: (\d+)")
QUIET = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY", "Saved host backtrace", "Host Frame", "Device Frame")
API = "Program hit"


@dataclass
class Log:
    """What one sanitizer said. ``total``: of its summary, None if it was stopped before. ``heads``: messages with the line below them, and where each
    stands in the file."""

    total: int | None = None
    heads: list[tuple[str, int]] = field(default_factory=list)


def read_log(path: Path) -> Log:
    """The log of one process; the last summary counts."""
    found, at, lines = Log(), 0, path.read_bytes().split(b"\n") if path.exists() else []
    for number, raw in enumerate(lines):
        text = raw.decode(errors="replace")
        if match := SUMMARY.match(text):
            found.total = (found.total or 0) + int(match[2])
        elif re.match(r"=+ \S", text) and not any(q in text for q in QUIET):
            below = lines[number + 1].decode(errors="replace") if number + 1 < len(lines) else ""
            detail = re.sub(r"^=+\s+", " ", below) if re.match(r"=+   +\S", below) else ""
            found.heads.append((re.sub(r"^=+ ", "", text) + detail, at))
        at += len(raw) + 1
    return found


def alike(message: str) -> str:
    """A message without the numbers that differ from launch to launch."""
    return re.sub(r"0x[0-9a-f]+", "0x..", re.sub(r"\b\d+ bytes? (after|before|inside).*|\[\d+ hazards?\]", "", message)).strip()


@dataclass
class Worker:
    """One place in the pool: a process, and another one after it if it ends too early."""

    number: int
    arguments: argparse.Namespace
    folder: Path
    until: float
    starts: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        """Of the process that runs now."""
        return f"{self.number}.{self.starts}"

    def log(self, name: str) -> Path:
        """The sanitizer's words."""
        return self.folder / f"sanitizer-{name}.log"

    def start(self) -> None:
        """The next process."""
        self.starts += 1
        a = self.arguments
        ports = PORT + PORTS * (self.number + (a.workers + 1) * (self.starts - 1)) % 14000
        pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.gpu.sanitize_queue", "-q", "--tb=short", "-m", a.mark]
        pytest += [*(["-k", a.k] if a.k else []), *a.paths]
        env = os.environ | {"GRAPHDNN_QUEUE": str(self.folder), "GRAPHDNN_QUEUE_WORKER": self.name, "GRAPHDNN_QUEUE_UNTIL": repr(self.until)}
        env |= {"GRAPHDNN_QUEUE_LOG": str(self.log(self.name)), "GRAPHDNN_QUEUE_LIMIT": str(a.limit), "GRAPHDNN_TEST_CACHE": a.cache}
        env |= {"GRAPHDNN_QUEUE_AFTER": os.path.abspath(a.after)} if a.after else {}
        env |= {"PYTHONPATH": search_path(), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with open(self.folder / f"pytest-{self.name}.txt", "wb") as out:
            command = [*sanitizer(a, self.log(self.name), ports), *pytest]
            self.process = subprocess.Popen(command, cwd=ROOT, env=env | fences(a.tool), stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def events(self) -> list[dict[str, Any]]:
        """What all its processes have told."""
        found = []
        for n in range(1, self.starts + 1):
            path = self.folder / f"progress-{self.number}.{n}.jsonl"
            found += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
        return found

    def tend(self) -> bool:
        """Whether there is more to wait for. A process that ended before its time is replaced, at most three times in a row without a test done."""
        assert self.process is not None
        if self.process.poll() is None:
            return True
        events = self.events()
        mine = [e for e in events if e["worker"] == self.name]
        fruitless = not any(e["event"] == "done" for e in mine) and self.starts >= 3
        if any(e["event"] == "end" for e in mine) or time.time() > self.until or fruitless:
            return False
        self.start()
        return True

    def stop(self, how: int) -> None:
        """Interrupt pytest (0: it sums up, and so does the sanitizer), kill it (1), or kill everything that the worker has started (2)."""
        if self.process is None or self.process.poll() is not None:
            return
        pids = [e["pid"] for e in self.events() if e["event"] == "collected" and e["worker"] == self.name]
        with contextlib.suppress(ProcessLookupError):
            if how == 2:
                os.killpg(self.process.pid, signal.SIGKILL)
            elif pids:
                os.kill(pids[-1], signal.SIGKILL if how else signal.SIGINT)


def search_path() -> str:
    """PYTHONPATH with the repository in front."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def fences(tool: str) -> dict[str, str]:
    """Under the tools that look at global memory: no allocation is shared, and none reaches beyond its tensor."""
    return {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "GRAPHDNN_TEST_FENCE": "1"} if tool in ("memcheck", "initcheck") else {}


def sanitizer(a: argparse.Namespace, log: Path, port: int) -> list[str]:
    """The front of a command line."""
    if a.tool == "none":
        return []
    return [a.sanitizer, "--tool", a.tool, *a.known[a.tool], "--port", str(port), *a.option, "--log-file", str(log)]


@functools.cache
def accepts(program: str, name: str, value: str) -> bool:
    """Whether this version of compute-sanitizer knows an option; one that it does not know is printed, once."""
    known = subprocess.run([program, name, value, "--version"], capture_output=True, check=False).returncode == 0
    if not known:
        print(f"compute-sanitizer has no {name} {value}: left out")
    return known


def accepted(program: str, options: Sequence[str]) -> list[str]:
    """The options, given as name and value in turn, that it knows."""
    pairs = zip(options[::2], options[1::2], strict=True)
    return [part for pair in pairs if accepts(program, *pair) for part in pair]


def find_sanitizer() -> str:
    """Path of the program; its name where it is not found."""
    places = [shutil.which("compute-sanitizer"), *sorted(map(str, Path("/usr/local").glob("cuda*/bin/compute-sanitizer")), reverse=True)]
    return next((p for p in places if p), "compute-sanitizer")


def run_all(a: argparse.Namespace, folder: Path) -> list[Worker]:
    """Run the workers until the queue is empty or the time is up."""
    end = time.time() + a.budget
    workers = [Worker(n, a, folder, end - min(LAST, a.budget / 4)) for n in range(a.workers)]
    try:
        for worker in workers:
            worker.start()
        step = 0
        while True in [w.tend() for w in workers] and step < len(GRACE):
            if time.time() > end + GRACE[step]:
                for worker in workers:
                    worker.stop(step)
                step += 1
            time.sleep(0.2)
    finally:
        for worker in workers:
            worker.stop(2)
        for worker in workers:
            if worker.process is not None:
                worker.process.wait()
    return workers


def report(a: argparse.Namespace, folder: Path, workers: list[Worker], seconds: float) -> int:
    """Print the table; 0 if everything is clean."""
    events = [e for w in workers for e in w.events()]
    done = [e for e in events if e["event"] == "done"]
    total = max([e["total"] for e in events if e["event"] == "collected"], default=0)
    outcomes = Counter(e["outcome"] for e in done)
    finished = {e["test"] for e in done}
    cut = [e["test"] for e in events if e["event"] == "start" and e["test"] not in finished]
    names = [f"{w.number}.{n}" for w in workers for n in range(1, w.starts + 1)]
    restarts = len(names) - len(workers)
    print(f"{a.tool}: {len(finished)} of {total} tests ran in {seconds:.0f} s ({len(workers)} processes, {restarts} restarts); ", end="")
    print(", ".join(f"{outcomes[o]} {o}" for o in ("passed", "failed", "skipped")) + f"; cut off: {len(cut)}")
    logs = {name: read_log(folder / f"sanitizer-{name}.log") for name in names} if a.tool != "none" else {}
    said = [(alike(text), at, name) for name, log in logs.items() for text, at in log.heads]
    counted = sum(log.total or 0 for log in logs.values())
    open_ends = sum(log.total is None for log in logs.values())
    api = sum(text.startswith(API) for text, _, _ in said)
    if logs:
        print(f"{a.tool}: {counted} errors or hazards in the summaries of {len(logs) - open_ends} logs ({open_ends} logs without one); ", end="")
        print(f"messages: {len(said) - api} of the tool, {api} failed CUDA calls")
    show_messages(said, done)
    for e in [e for e in done if e["outcome"] == "failed"][: a.show]:
        print(f"  FAILED {e['test']}: {' '.join(e.get('message', '').split())[:300]}")
    for e in [e for e in events if e["event"] == "lost"][: a.show]:
        print(f"  context lost in {e['test']}: {e['message'][:200]}")
    for test in cut[: a.show]:
        print(f"  cut off: {test}")
    slow = sorted(done, key=lambda e: -e["seconds"])[:3]
    print(f"  seconds in tests {sum(e['seconds'] for e in done):.0f}; slowest: " + "; ".join(f"{e['seconds']:.1f} {e['test']}" for e in slow))
    keep(a, folder, names, {"tool": a.tool, "total": total, "done": done, "cut": cut, "counted": counted, "messages": said, "seconds": seconds})
    return 0 if done and not counted and not said and not outcomes["failed"] and not any(e["event"] == "lost" for e in events) else 1


def show_messages(said: list[tuple[str, int, str]], done: list[dict[str, Any]]) -> None:
    """The first five distinct messages: how often, and the tests after which the log had them."""
    for text, count in Counter(text for text, _, _ in said).most_common(5):
        tests = []
        for other, at, name in said:
            after = [e for e in done if e["worker"] == name and e["log"] > at]
            if other == text and after:
                tests.append(min(after, key=lambda e: e["log"])["test"])
        where = ", ".join(dict.fromkeys(tests)) or "none that ended"
        print(f"  {count} x {text[:300]}\n      test: {where[:500]}")


def keep(a: argparse.Namespace, folder: Path, names: list[str], facts: dict[str, Any]) -> None:
    """The result as JSON, and the logs that say something in one file."""
    if not a.out:
        return
    out = Path(a.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{a.tool}.json").write_text(json.dumps(facts, indent=0))
    with open(out / f"{a.tool}.txt", "w") as file:
        for name in names:
            for kind in (f"sanitizer-{name}.log", f"pytest-{name}.txt"):
                path = folder / kind
                text = path.read_text(errors="replace") if path.exists() else "(no file)"
                file.write(f"== {kind}\n{text if len(text) < 200_000 else text[:100_000] + '...' + text[-100_000:]}\n")


# ------------------------------------------------------------------------------------------------------------------------------- self-test
PLANTED = {
    ("memcheck", "none"): "",
    ("memcheck", "write"): "Invalid __global__ write",
    ("memcheck", "read"): "Invalid __global__ read",
    ("racecheck", "none"): "",
    ("racecheck", "race"): "Race reported|hazard",
}
"""Tool and fault: what the tool must say, "": nothing but of failed CUDA calls."""


def self_test(a: argparse.Namespace, folder: Path) -> int:
    """Planted faults are noticed and a right graph is clean; 0 if so. All at once, each a sanitizer of its own."""
    running = []
    for number, (tool, fault) in enumerate(PLANTED):
        mine = argparse.Namespace(**vars(a) | {"tool": tool})
        log = folder / f"self-{tool}-{fault}.log"
        command = [*sanitizer(mine, log, PORT + PORTS * number), sys.executable, "-m", "tests.gpu.sanitize_planted", fault]
        env = os.environ | fences(tool) | {"PYTHONPATH": search_path()}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
        running.append((tool, fault, log, subprocess.Popen(command, cwd=ROOT, env=env, **pipes)))
    wrong, end = 0, time.time() + a.budget
    for tool, fault, log, process in running:
        try:
            output = process.communicate(timeout=max(end - time.time(), 1))[0].decode(errors="replace").strip()
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output = "timed out: " + process.communicate()[0].decode(errors="replace").strip()
        found, expected = read_log(log), PLANTED[tool, fault]
        said = [text for text, _ in found.heads if not text.startswith(API)]
        right = any(re.search(expected, text) for text in said) if expected else not said
        good = right and output.endswith("done") and found.total is not None
        wrong += not good
        calls = len(found.heads) - len(said)
        print(
            f"self-test {tool} {fault}: {'right' if good else 'WRONG'}; summary {found.total}, {calls} failed calls, {len(said)} messages", *said[:1]
        )
        if not good:
            print("   " + "\n   ".join(output.splitlines()[-6:]))
            print("   " + "\n   ".join((log.read_text(errors="replace") if log.exists() else "(no log)").splitlines()[:8]))
    return 1 if wrong else 0


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="*", default=["tests/conformance"])
    parser.add_argument("--tool", choices=TOOLS, default="memcheck")
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds; the whole ends at most 11 s later")
    parser.add_argument("-k", default="", help="pytest's expression")
    parser.add_argument("--mark", default="gpu", help="pytest's marker expression")
    parser.add_argument("--limit", type=int, default=1_000_000, help="at most so many tests")
    parser.add_argument("--after", default="", help="the JSON of an earlier run: what has passed there is left out")
    parser.add_argument("--cache", default=str(Path(tempfile.gettempdir()) / "graphdnn-sanitize-cache"), help="folder of compiled kernels, kept")
    parser.add_argument("--out", default="", help="folder for logs and the result as JSON")
    parser.add_argument("--option", action="append", default=[], help="a further option of compute-sanitizer (--option=--kernel-name=kns=attention)")
    parser.add_argument("--processes", choices=("application-only", "all"), default="application-only")
    parser.add_argument("--sanitizer", default=find_sanitizer())
    parser.add_argument("--show", type=int, default=10, help="so many failed tests are listed")
    parser.add_argument("--self-test", action="store_true")
    a = parser.parse_args(argv)
    tools = [t for t in TOOLS if t != "none" and (a.self_test or t == a.tool)]
    a.known = {t: accepted(a.sanitizer, [*COMMON, "--target-processes", a.processes, *TOOLS[t]]) for t in tools}
    with tempfile.TemporaryDirectory(prefix="sanitize-") as name:
        if a.self_test:
            return self_test(a, Path(name))
        start = time.time()
        workers = run_all(a, Path(name))
        return report(a, Path(name), workers, time.time() - start)


if __name__ == "__main__":
    raise SystemExit(main())
