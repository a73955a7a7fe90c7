"""Thread pool of the CPU target. A job is one native call that several threads make with the same arguments; the native code hands out the chunks.

So a thread crosses into Python twice a job, not twice a chunk: between its two crossings the GIL is free and no thread waits for another. The calling
thread always takes part, so a job ends even if every worker is busy with other callers' jobs. Workers are daemons, started on the first job that
asks for help. A forked child starts with a new, empty pool.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from graphdnn import env

Work = Callable[..., int]
"""``work(*args)`` claims chunks until none is left and returns a status, 0 where all is well. It must release the GIL for threads to help."""


class _Job:
    """One call by several threads. After the caller has left (``closed``) workers turn away at the door; the last one inside releases ``done``."""

    __slots__ = ("_active", "_args", "_closed", "_done", "_lock", "_work", "error", "status")

    def __init__(self, work: Work, args: tuple[Any, ...]) -> None:
        self._work, self._args = work, args
        self._lock = threading.Lock()
        self._done = threading.Lock()
        self._done.acquire()
        self._active = 0
        self._closed = False
        self.status = 0
        self.error: BaseException | None = None

    def call(self) -> None:
        """Make the call in this thread."""
        status = self._work(*self._args)
        if status:
            self.status = status

    def help(self) -> None:
        """A worker's part: make the call if the caller has not left; keep an exception for the caller."""
        with self._lock:
            if self._closed:
                return
            self._active += 1
        try:
            self.call()
        except BaseException as error:
            self.error = error
        finally:
            with self._lock:
                self._active -= 1
                last = self._closed and self._active == 0
            if last:
                self._done.release()

    def close(self) -> None:
        """Return when no worker is inside any more. An interrupt is delivered only then, because the buffers may go away with it."""
        interrupt: BaseException | None = None
        while True:
            try:
                with self._lock:
                    self._closed = True
                    idle = self._active == 0
                if not idle:
                    self._done.acquire()
                break
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


class ThreadPool:
    """``threads`` threads, the caller included. Any number of callers may run jobs at once."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._queue: SimpleQueue[_Job] = SimpleQueue()
        self._lock = threading.Lock()
        self._workers = 0

    def run(self, work: Work, args: tuple[Any, ...], threads: int) -> int:
        """``work(*args)`` in this thread and in up to ``threads`` - 1 workers that are free before this thread is done.

        Returns a status that is not 0 if any call gave one. An exception of any call is raised here, after all threads have left the job.
        """
        helpers = min(threads, self.threads) - 1
        if helpers < 1:
            return work(*args)
        if self._workers < self.threads - 1:
            self._start()
        job = _Job(work, args)
        try:
            for _ in range(helpers):
                self._queue.put(job)
            job.call()
        finally:
            job.close()
        if job.error is not None:
            raise job.error
        return job.status

    def _start(self) -> None:
        """Start the missing workers. Where the system grants no more threads (limits, interpreter exit) the caller does the work alone."""
        with self._lock:
            try:
                for index in range(self._workers, self.threads - 1):
                    threading.Thread(target=_serve, args=(self._queue,), name=f"graphdnn-cpu-{index}", daemon=True).start()
            except RuntimeError:
                pass
            self._workers = self.threads - 1


def _serve(queue: SimpleQueue[_Job]) -> None:
    """Body of a worker. Drops its job before it waits for the next, so that a finished job's arguments do not live on in an idle thread."""
    while True:
        job = queue.get()
        job.help()
        del job


_lock = threading.Lock()
_pool: ThreadPool | None = None


def pool() -> ThreadPool:
    """The process's pool, made on first use with ``env.num_threads()`` threads."""
    global _pool
    found = _pool
    if found is None:
        with _lock:
            if _pool is None:
                _pool = ThreadPool(env.num_threads())
            found = _pool
    return found


def _forget() -> None:
    """In a forked child the parent's workers do not exist, and its locks may be held by threads that do not exist either."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
