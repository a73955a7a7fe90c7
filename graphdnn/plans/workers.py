"""Plans built, and run once, in worker processes: what dies or hangs there takes nothing with it.

A worker is a new interpreter (not a fork, and not multiprocessing, which would import the user's main module again) that takes pickled plans on its
standard input and answers with compiled kernels. It runs each plan once on random inputs of its own; a plan that crashes ends its worker, and
another one is started for the plans that are left. Workers end when their parent does.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from signal import Signals
from typing import TYPE_CHECKING, Any

from graphdnn import log
from graphdnn.errors import GraphError, NotSupportedError

if TYPE_CHECKING:
    from graphdnn.codegen.spec import Binary
    from graphdnn.plans.plan import ExecutionPlan

_PROGRAM = "from graphdnn.plans import workers; workers.main()"


@dataclass(frozen=True)
class Outcome:
    """What a worker made of a plan: its kernels with their keys; ``error``: why there are none, or why it must not be run. ``spent``: the process may
    be of no use for other plans, since a fault on a GPU breaks its context."""

    kernels: tuple[tuple[str, Binary], ...] = ()
    error: str = ""
    spent: bool = False


class Worker:
    """One process. Started when it is first asked for something, and again after it died."""

    def __init__(self) -> None:
        """No process yet."""
        self._process: subprocess.Popen[bytes] | None = None
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  what a process says before it dies; closed when none may be started any more
        self._lock = threading.Lock()

    def ask(self, plan: bytes, timeout_s: float) -> Outcome:
        """Build and run a pickled plan. An outcome with an error if the process dies or takes longer than ``timeout_s``."""
        with self._lock:
            process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        hung = threading.Event()

        def end() -> None:
            hung.set()
            _kill(process)

        timer = threading.Timer(min(timeout_s, threading.TIMEOUT_MAX), end)
        timer.start()
        try:
            pickle.dump(plan, process.stdin)
            process.stdin.flush()
            found = pickle.load(process.stdout)
            assert isinstance(found, Outcome), "workers answer with outcomes"
            if found.spent:
                self._ended()
            return found
        except (OSError, EOFError, pickle.UnpicklingError):
            status = self._ended()
            if hung.is_set():
                return Outcome(error=f"did not finish within {timeout_s:g} s; its process was killed")
            return Outcome(error=f"its process died: {_death(status)}{self._last_words()}")
        except BaseException:  # an answer that was read in part: the next one must not be taken for its end
            self._ended()
            raise
        finally:
            timer.cancel()
            timer.join()
            if hung.is_set():  # in the moment in which the answer came: the next plan is not to blame
                self._ended()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            env=_environment(),
            process_group=0 if hasattr(os, "killpg") else None,
        )
        assert process.stdin is not None, "it is a pipe"
        pickle.dump(os.getpid(), process.stdin)
        return process

    def _ended(self) -> int:
        """End the process; its exit status."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return 0
        _kill(process)
        process.communicate()
        return int(process.returncode)

    def _last_words(self) -> str:
        """The last line that the process wrote to its standard error."""
        size = self._words.seek(0, os.SEEK_END)
        self._words.seek(max(0, size - 2000))
        lines = self._words.read().decode(errors="replace").strip().splitlines()
        self._words.seek(0)
        self._words.truncate()
        return f" ({lines[-1][:300]})" if lines else ""

    def close(self) -> None:
        """End the process, whatever thread asks it; no other one is started."""
        with self._lock:
            self._words.close()
        self._ended()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process, and the compilers that it has started: they are its group."""
    with contextlib.suppress(OSError):  # it has ended
        if process.returncode is None:
            os.killpg(process.pid, Signals.SIGKILL) if hasattr(os, "killpg") else process.kill()


def _environment() -> dict[str, str]:
    """Ours, with what can be imported here: graphdnn itself, and engines of a user's own."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}


def _death(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def build(plans: Sequence[ExecutionPlan], count: int, timeout_s: float, tell: Callable[[str], None] = lambda line: None) -> list[Outcome]:
    """Outcomes of ``plans``, built in up to ``count`` processes at once. Their kernels are in this process' cache afterwards."""
    from graphdnn.plans import cache

    free: SimpleQueue[Worker] = SimpleQueue()
    pool = [Worker() for _ in range(min(count, len(plans)))]
    for worker in pool:
        free.put(worker)
    done, stopped = itertools.count(1), threading.Event()

    def one(plan: ExecutionPlan) -> Outcome:
        worker = free.get()
        start = time.perf_counter()
        try:
            found = worker.ask(pickle.dumps(plan), timeout_s)
        except Exception as error:  # a plan that cannot be pickled, a system without processes: this plan's loss alone
            found = Outcome(error=f"{type(error).__name__}: {error}")
        finally:
            free.put(worker)
        if stopped.is_set():
            return found
        for key, binary in found.kernels:
            cache.memory.put(key, binary)
        tell(f"tuning: {next(done)} of {len(plans)} plans built; {plan.name} {found.error.splitlines()[0] if found.error else 'is fine'} "
             f"({time.perf_counter() - start:.2f} s)")  # fmt: skip
        return found

    try:
        with ThreadPoolExecutor(max(len(pool), 1)) as threads:
            try:
                return list(threads.map(one, plans))
            except BaseException:  # an interrupt: nobody waits for what is left
                stopped.set()
                threads.shutdown(wait=False, cancel_futures=True)
                for worker in pool:
                    worker.close()
                raise
    finally:
        for worker in pool:
            worker.close()


# ------------------------------------------------------------------------------------------------------------------------------- in the worker
def main() -> None:
    """The loop of a worker: plans from standard input, outcomes to standard output, until the input ends."""
    source = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    parent = pickle.load(source)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    while True:
        try:
            plan = pickle.load(source)
        except EOFError:
            return
        pickle.dump(_made(plan), answers)
        answers.flush()


def _end_with(parent: int) -> None:
    """A parent that was killed cannot end a worker that hangs in a kernel, or in a compiler, which is of its group."""
    while os.getppid() == parent:
        time.sleep(1.0)
    if hasattr(os, "killpg"):
        os.killpg(0, Signals.SIGKILL)
    os._exit(1)


def _made(data: bytes) -> Outcome:
    try:
        plan = pickle.loads(data).build()
        kernels = tuple((k.key, k.binary) for k in plan.kernels)
    except Exception as error:  # whatever it is, the answer says it
        return Outcome(error=str(error) if isinstance(error, GraphError) else f"{type(error).__name__}: {error}")
    try:
        try_out(plan)
    except Exception as error:
        return Outcome(kernels, f"does not run: {error if isinstance(error, GraphError) else repr(error)}", spent=True)
    return Outcome(kernels)


def try_out(plan: Any) -> None:
    """Run a built plan once on random inputs. Nothing is run where inputs cannot be random, or where there is no memory for them. ExecutionError."""
    import numpy as np

    from graphdnn.inspection.check import random_feeds
    from graphdnn.plans.scratch import Scratch, enough

    memory = Scratch(plan.graph, plan.device)
    try:
        with enough():
            feeds = random_feeds(plan, np.random.default_rng(0))
            pack = {plan.graph.tensors[t].uid: memory.give(t, values) for t, values in feeds.items()}
            pack |= {plan.graph.tensors[t].uid: memory.put(t, None) for t in plan.graph.outputs}
            workspace = memory.block(plan.workspace_bytes)
    except NotSupportedError as error:
        log.debug(f"plan {plan.name} is not tried out: {error}")
        return
    plan.execute(pack, workspace)
    memory.wait()
