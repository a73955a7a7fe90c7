"""A pytest plugin: several processes run the tests of one selection, each taking the next one that none has taken, until the time is up.

All sort the tests by a hash of their names, so those that were run are a fair sample wherever it ends. Every event is a line of JSON, written at once
to ``$GRAPHDNN_QUEUE/progress-<worker>.jsonl``, so that nothing is lost when a process is killed. Environment: GRAPHDNN_QUEUE (a folder),
GRAPHDNN_QUEUE_WORKER (a name), GRAPHDNN_QUEUE_UNTIL (seconds as ``time.time`` counts them; no test is begun later), GRAPHDNN_QUEUE_LOG (the
sanitizer's log; its size is noted after every test), GRAPHDNN_QUEUE_LIMIT (so many tests of the selection at most), GRAPHDNN_QUEUE_AFTER (the result
of an earlier run as JSON: what has passed in it is left out).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(os.environ.get("GRAPHDNN_QUEUE", "."))
WORKER = os.environ.get("GRAPHDNN_QUEUE_WORKER", "0")
UNTIL = float(os.environ.get("GRAPHDNN_QUEUE_UNTIL", "inf"))
LOG = os.environ.get("GRAPHDNN_QUEUE_LOG", "")
LIMIT = int(os.environ.get("GRAPHDNN_QUEUE_LIMIT", "1000000"))
AFTER = os.environ.get("GRAPHDNN_QUEUE_AFTER", "")
LOST = 70
"""Exit status of a process whose GPU context has failed: another one goes on."""
seen: dict[str, Any] = {}
"""The worst outcome of the running test so far, with what was said of it."""


def tell(**what: Any) -> None:
    """One line."""
    with open(FOLDER / f"progress-{WORKER}.jsonl", "a") as file:
        file.write(json.dumps({"at": round(time.time(), 3), "worker": WORKER, **what}) + "\n")


def claim() -> int:
    """The number of the next test, which no other process gets."""
    with open(FOLDER / "next", "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        number = int(file.read() or 0)
        file.truncate(0)
        file.write(str(number + 1))
    return number


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())
    if AFTER:
        passed = {e["test"] for e in json.loads(Path(AFTER).read_text())["done"] if e["outcome"] == "passed"}
        items[:] = [item for item in items if item.nodeid not in passed]
    del items[LIMIT:]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if session.config.option.collectonly:
        return None
    items = session.items
    tell(event="collected", total=len(items), pid=os.getpid())
    now = claim()
    while now < len(items) and time.time() < UNTIL:
        following = claim()  # known ahead, because fixtures of a module stay for the next test of it
        nextitem = items[following] if following < len(items) else None
        items[now].config.hook.pytest_runtest_protocol(item=items[now], nextitem=nextitem)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        now = following
    tell(event="end", all=now >= len(items))
    return True


def pytest_runtest_logstart(nodeid: str) -> None:
    seen.clear()
    seen.update(outcome="passed", start=time.time())
    tell(event="start", test=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.outcome == "failed" and seen["outcome"] != "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        seen.update(outcome="failed", message=f"{report.when}: {crash.message if crash else report.longrepr}"[:600])
    elif report.outcome == "skipped" and seen["outcome"] == "passed":
        seen["outcome"] = "skipped"


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Wait for the GPU, so that what the sanitizer says of this test is said by now."""
    lost = ""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            lost = str(error).splitlines()[0]
    size = os.path.getsize(LOG) if LOG and os.path.exists(LOG) else 0
    more = {"message": seen["message"]} if "message" in seen else {}
    tell(event="done", test=nodeid, outcome=seen["outcome"], seconds=round(time.time() - seen["start"], 3), log=size, **more)
    if lost:
        tell(event="lost", test=nodeid, message=lost)
        pytest.exit(f"the GPU context has failed: {lost}", LOST)
