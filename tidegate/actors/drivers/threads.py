"""Runs code that may block, raise any exception, or fork, on daemon threads.

Rules:

- The threads are daemons that are never joined without a time limit: a read that blocks forever must not keep a process
  from ending.
- All threads are started with the pool, so that a process which can start no more threads fails before it has work to
  do.
- Any exception of a piece of work, also SystemExit, is its result. A thread that dies for another reason calls `died`.
- The queue has a limit of `WAITING_MAX`, which tidegate reaches only if it has a bug. Beyond it, `submit` raises.
- A process that user code has forked must not continue as a second copy of a task: it ends when that code has returned.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

WAITING_MAX = 10_000

EXIT_UNREPORTED = 77
"""Exit code of a process that could not report a failure. The coordinator notices that the process has ended."""
EXIT_FORKED = 78
"""Exit code of a copy of the process that user code has forked."""

_UNREPORTED = b"tidegate: a failure could not be reported: this process ends\n"

_CANNOT_START = "can't start new thread"
_FORKED = b"tidegate: a process that user code has forked came back from it, and ends here\n"


def _nothing() -> None:
    """Does nothing. Used as the default callback."""


def leave(code: int, last_words: bytes) -> None:
    """Ends the process at once with an exit code, without cleaning up. `last_words`: a text to write to stderr."""
    try:
        os.write(2, last_words)
    finally:
        os._exit(code)


def leave_unreported() -> None:
    """Ends the process, because a failure could not be reported."""
    leave(EXIT_UNREPORTED, _UNREPORTED)


def leave_if_forked(pid: int) -> None:
    """Ends the process if its id is not `pid`.

    Another id means that user code has forked the process.
    """
    if os.getpid() != pid:
        leave(EXIT_FORKED, _FORKED)


class NotBackError(Exception):
    """Raised when a call has not returned within its time limit. The call continues, and its result is dropped."""


def call_within(call: Callable[[], T], limit_s: float, name: str) -> T:
    """Calls code that may never return, on a daemon thread, and waits up to `limit_s` for its result.

    Raises NotBackError after that, and RuntimeError if the thread cannot be started.
    """
    future: Future[T] = Future()
    pid = os.getpid()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 (code of users: the waiting caller gets it)
            future.set_exception(error)
        finally:
            leave_if_forked(pid)

    threading.Thread(target=run, name=name, daemon=True).start()
    if not wait((future,), limit_s).done:
        raise NotBackError(f"the call has not returned within {limit_s:g} s; give it a shorter timeout of its own")
    return future.result()


def lacks_threads(error: BaseException | None) -> bool:
    """Returns whether an error, or one of its causes, shows that the process can start no more threads."""
    for _ in range(100):  # Causes can form a ring.
        if error is None:
            return False
        if type(error) is RuntimeError and error.args == (_CANNOT_START,):
            return True
        error = error.__context__ if error.__cause__ is None else error.__cause__
    return False


def is_unfit(error: BaseException | None) -> bool:
    """Returns whether an error shows that the process is unusable: it can start no more threads, or open no more files.

    The causes of the error are checked too.
    """
    if lacks_threads(error):
        return True
    for _ in range(100):  # Causes can form a ring.
        if error is None:
            return False
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            return True
        error = error.__context__ if error.__cause__ is None else error.__cause__
    return False


class ThreadPool:
    """A fixed number of daemon threads that run pieces of work. The constructor raises RuntimeError if they cannot be
    started.

    `died` is called with the error if a thread ends unexpectedly.
    """

    def __init__(self, threads: int, name: str, died: Callable[[BaseException], object]) -> None:
        self._name = name
        self._died = died
        self._pid = os.getpid()
        self._work: queue.Queue[Callable[[], object] | None] = queue.Queue(WAITING_MAX + threads)
        self._lock = threading.Lock()
        self._alive = threads
        self._closed = False
        self._idle = threading.Event()
        self._then: Callable[[], object] = _nothing
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(threads)
        ]
        started = 0
        try:
            for thread in self._threads:
                thread.start()
                started += 1
        except RuntimeError:
            with self._lock:
                self._alive = started
            self.close()
            raise

    def submit(self, work: Callable[[], T], done: Callable[[Future[T]], object]) -> None:
        """Runs the work on a thread of the pool, then calls `done` with its result or error on the same thread.

        Does nothing once the pool is closed. Raises RuntimeError if `WAITING_MAX` pieces of work wait already.
        """

        def run() -> None:
            future: Future[T] = Future()
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 (code of users, too: `done` gets it)
                future.set_exception(error)
            finally:
                leave_if_forked(self._pid)
            done(future)

        with self._lock:
            if self._closed:
                return
            if self._work.qsize() >= WAITING_MAX:
                raise RuntimeError(
                    f"thread pool {self._name!r} is full: {WAITING_MAX} pieces of work wait; this is a bug in "
                    "tidegate, please report it"
                )
            self._work.put_nowait(run)

    @property
    def closed(self) -> bool:
        """Returns whether the pool accepts no more work."""
        return self._closed

    def close(self, then: Callable[[], object] = _nothing) -> None:
        """Drops waiting work. The last thread that returns calls `then`. Does not wait for the threads."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._then = then
            nobody = not self._alive
            with suppress(queue.Empty):
                while True:
                    self._work.get_nowait()
            for _ in self._threads:
                self._work.put_nowait(None)
        if nobody:
            self._over()

    def join(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s`, after `close`, until all threads have returned. Returns whether they have."""
        return self._idle.wait(timeout_s)

    def _run(self) -> None:
        try:
            while not self._closed:
                work = self._work.get()
                if work is not None:
                    work()
                del work  # An idle thread must not keep what it has done.
        except BaseException as error:  # noqa: BLE001 (whatever it is, a thread of ours is gone)
            self._died(error)
        finally:
            with self._lock:
                self._alive -= 1
                last = self._closed and self._alive == 0
            if last:
                self._over()

    def _over(self) -> None:
        try:
            self._then()
        finally:
            self._idle.set()


def join_all(pools: tuple[ThreadPool, ...], timeout_s: float) -> bool:
    """Waits for the threads of closed pools, up to `timeout_s` in total. Returns whether all threads have ended."""
    deadline_s = time.monotonic() + timeout_s
    return all(pool.join(max(0.0, deadline_s - time.monotonic())) for pool in pools)
