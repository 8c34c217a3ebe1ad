"""Shows the progress of bounded jobs in their driver, on stderr: as bars in a terminal, else as lines now and then.

Rules:

- What is shown is asked of the coordinator, `POLL_S` apart at least. It has no part in the job: when nothing can be
  shown any more, the job goes on.
- Lines are few: the first one after 10 seconds, then twice as far apart each time, up to 10 minutes; one at the end if
  there was one before. A job that takes seconds says nothing.
- One thread a job, which ends with it, or with its environment: nobody may ask a Ray that is shut down, since Ray would
  start another one. The bars of all jobs of a process are one display.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from tidegate.actors.runtimes.running_job import RunningJob, Submission
from tidegate.api.progress.meter import ProgressMeter, Reading, bounded_input
from tidegate.protocol.failure_reasons import error_text
from tidegate.storage.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

log = logging.getLogger(__name__)

ProgressKind = Literal["auto", "bar", "lines", "off"]
"""How progress is shown. "auto": bars in a terminal, else lines."""
POLL_S = 0.5
STOP_S = 5.0
"""How long a thread is waited for that asks its last question."""
FIRST_LINE_S, LINES_APART_MAX_S = 10.0, 600.0
_OVER = ("finished", "failed", "cancelled", "suspended")


def progress_kind(given: str | None, configured: ProgressKind) -> Literal["bar", "lines", "off"]:
    """What `progress=` says or, where it is None, the configuration. Raises ConfigurationError for anything else."""
    value = configured if given is None else given
    if value == "auto":
        return "bar" if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else "lines"
    if value in ("bar", "lines", "off"):
        return value  # type: ignore[return-value]
    raise ConfigurationError(f"execute(progress=...): {value!r} is none of {', '.join(get_args(ProgressKind))}")


def show_progress(
    running: RunningJob, submission: Submission, kind: Literal["bar", "lines", "off"], runtime: object
) -> None:
    """Show how far a job is, until it is over or `stop_progress` is called; nothing of one that may never end.

    Returns at once.
    """
    given = bounded_input(submission)
    if kind == "off" or given is None:
        return
    name = submission.spec.job_name
    shown = BARS.add(name) if kind == "bar" else Lines(name, _print_line)
    follower = Follower(running, ProgressMeter(given), shown)
    with _LOCK:
        if not _FOLLOWERS:
            # What is registered last is called first: this must be before Ray's own, which came with its import.
            atexit.unregister(stop_progress)
            atexit.register(stop_progress)
        try:
            follower.thread.start()
        except RuntimeError as error:  # The job runs, and needs no display.
            log.warning("the progress of job %r is not shown: %s", name, error)
            shown.end()
            return
        _FOLLOWERS.setdefault(runtime, []).append(follower)


def stop_progress(runtime: object | None = None) -> None:
    """Nothing is asked of the jobs of a runtime (None: of all) any more."""
    with _LOCK:
        found = [_FOLLOWERS.pop(each, []) for each in ([*_FOLLOWERS] if runtime is None else [runtime])]
    followers = [follower for of_one in found for follower in of_one]
    for follower in followers:
        follower.stopped.set()
    for follower in followers:
        follower.thread.join(STOP_S)


class Shown(Protocol):
    """Where the progress of one job is shown."""

    def update(self, now_s: float, reading: Reading) -> None:
        """The job is here now."""

    def end(self) -> None:
        """Nothing follows."""


class Follower:
    """Shows a job until it is over, nobody knows of it any more, or `stopped` is set."""

    def __init__(self, running: RunningJob, meter: ProgressMeter, shown: Shown) -> None:
        self._running, self._meter, self._shown = running, meter, shown
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.follow, name="progress of a job", daemon=True)

    def follow(self) -> None:
        """What the thread does."""
        try:
            while not self.stopped.wait(POLL_S):
                progress, now_s = self._running.progress(), time.monotonic()
                self._shown.update(now_s, self._meter.read(now_s, progress))
                if progress.status in _OVER:
                    return
        except Exception as error:  # noqa: BLE001 (the job is not the less alive; whoever waits for it is told)
            log.debug("the progress of a job is not shown any more: %s", error_text(error))
        finally:
            self._shown.end()
            _forget(self)


def _forget(follower: Follower) -> None:
    """Let go of a follower whose thread ends, and with it of the job and all that the job holds."""
    with _LOCK:
        for runtime, followers in list(_FOLLOWERS.items()):
            if follower in followers:
                followers.remove(follower)
                if not followers:
                    del _FOLLOWERS[runtime]


class Lines:
    """Lines about one job, further and further apart."""

    def __init__(self, name: str, write: Callable[[str], None]) -> None:
        self._name = name
        self._write = write
        self._apart_s = FIRST_LINE_S
        self._due_s: float | None = None
        self._wrote = False

    def update(self, now_s: float, reading: Reading) -> None:
        """Write a line if it is time, or if the job is over and there was one."""
        if self._due_s is None:
            self._due_s = now_s + self._apart_s
        over = reading.status in _OVER
        if now_s < self._due_s and not (over and self._wrote):
            return
        if over and not self._wrote:
            return
        self._wrote = True
        self._apart_s = min(2 * self._apart_s, LINES_APART_MAX_S)
        self._due_s = now_s + self._apart_s
        self._write(f"{self._name}: {reading}")

    def end(self) -> None:
        """Nothing is left open."""


class Bars:
    """The bars of all jobs of this process."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._progress: Progress | None = None
        self._jobs = 0

    def add(self, name: str) -> Bar:
        """A bar for one more job."""
        # Only now: it takes long, and most drivers have no terminal.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        with self._lock:
            if self._progress is None:
                self._progress = Progress(
                    TextColumn("{task.description}"),
                    BarColumn(),
                    TextColumn("{task.fields[reading]}"),
                    console=self._console or Console(stderr=True),
                )
                self._progress.start()
            self._jobs += 1
            return Bar(self, self._progress, self._progress.add_task(name, total=None, reading=""))

    def ended(self) -> None:
        """One job is over. The display ends with the last one; what it has shown stays."""
        with self._lock:
            self._jobs -= 1
            if not self._jobs and self._progress is not None:
                self._progress.stop()
                self._progress = None


class Bar:
    """The bar of one job."""

    def __init__(self, bars: Bars, progress: Progress, task: TaskID) -> None:
        self._bars, self._progress, self._task = bars, progress, task

    def update(self, now_s: float, reading: Reading) -> None:
        """Move it. It goes to and fro where nobody knows how much is to be done."""
        known = {} if reading.part is None else {"total": 1.0, "completed": reading.part}
        self._progress.update(self._task, reading=str(reading), **known)  # type: ignore[arg-type]

    def end(self) -> None:
        """It stays as it is."""
        self._progress.stop_task(self._task)
        self._bars.ended()


BARS = Bars()
_LOCK = threading.Lock()
_FOLLOWERS: dict[object, list[Follower]] = {}
"""Those of the jobs of each runtime that has any."""


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
