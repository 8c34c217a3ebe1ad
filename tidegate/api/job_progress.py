"""Shows the progress of bounded jobs on stderr of the driver: as bars in a terminal, otherwise as occasional lines.

Rules:

- The display requests progress from the coordinator at most every `POLL_S` seconds. If the display fails, the job
  continues.
- Lines are few. The first one is printed after 10 seconds, and the time to the next one doubles, up to 10 minutes. The
  end of the job is printed if a line was printed before. A job that takes a few seconds prints nothing.
- Each job has one thread, which ends with the job or with its environment. A thread must not call Ray after its
  shutdown, because Ray would start again. The bars of all jobs of a process are one display.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from tidegate.actors.runtimes.running_job import JobProgress, RunningJob, Submission
from tidegate.connectors.source import is_unbounded
from tidegate.protocol.failures import error_text
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.units import duration_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

log = logging.getLogger(__name__)

ProgressKind = Literal["auto", "bar", "lines", "off"]
"""How progress is shown: as a "bar", as "lines", or not ("off"). "auto" is a bar in a terminal, otherwise lines."""
POLL_S = 0.5
STOP_S = 5.0
"""How many seconds `stop_progress` waits for each thread to end."""
FIRST_LINE_S, LINES_APART_MAX_S = 10.0, 600.0
_OVER = ("finished", "failed", "cancelled", "suspended")


def progress_kind(given: str | None, configured: ProgressKind) -> Literal["bar", "lines", "off"]:
    """Returns how to show progress: the argument `progress=` (`given`), or the setting if it is None. "auto" becomes
    "bar" or "lines".

    Raises ConfigurationError for an unknown kind.
    """
    value = configured if given is None else given
    if value == "auto":
        return "bar" if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else "lines"
    if value in ("bar", "lines", "off"):
        return value  # type: ignore[return-value]
    raise ConfigurationError(
        f"execute(progress=...): {value!r} is not known; give one of {', '.join(get_args(ProgressKind))}"
    )


def show_progress(
    running: RunningJob, submission: Submission, kind: Literal["bar", "lines", "off"], runtime: object
) -> None:
    """Starts a thread that shows the progress of a job until the job is over or `stop_progress` is called. Returns at
    once.

    Shows nothing for a job that may never end.
    """
    given = bounded_input(submission)
    if kind == "off" or given is None:
        return
    name = submission.spec.job_name
    shown = BARS.add(name) if kind == "bar" else Lines(name, _print_line)
    follower = Follower(running, ProgressMeter(given), shown)
    with _LOCK:
        if not _FOLLOWERS:
            # Exit functions run in reverse order, and this one must run before Ray's own, which `import ray`
            # registered.
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
    """Stops showing the progress of the jobs of `runtime`, or of all jobs if it is None."""
    with _LOCK:
        found = [_FOLLOWERS.pop(each, []) for each in ([*_FOLLOWERS] if runtime is None else [runtime])]
    followers = [follower for of_one in found for follower in of_one]
    for follower in followers:
        follower.stopped.set()
    for follower in followers:
        follower.thread.join(STOP_S)


class Shown(Protocol):
    """Base class of the displays of one job's progress."""

    def update(self, now_s: float, reading: Reading) -> None:
        """Shows the progress `reading`. `now_s` is the current time in seconds."""

    def end(self) -> None:
        """Ends the display of this job."""


class Follower:
    """Requests the progress of one job and shows it.

    Ends when the job is over, its coordinator no longer answers, or `stopped` is set.
    """

    def __init__(self, running: RunningJob, meter: ProgressMeter, shown: Shown) -> None:
        self._running, self._meter, self._shown = running, meter, shown
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.follow, name="progress of a job", daemon=True)

    def follow(self) -> None:
        """Requests and shows the progress in a loop. Runs in the job's thread."""
        try:
            while not self.stopped.wait(POLL_S):
                progress, now_s = self._running.progress(), time.monotonic()
                self._shown.update(now_s, self._meter.read(now_s, progress))
                if progress.status in _OVER:
                    return
        except Exception as error:  # noqa: BLE001 (the job itself is not affected; callers of `wait` get its errors)
            log.debug("the progress of a job is not shown any more: %s", error_text(error))
        finally:
            self._shown.end()
            _forget(self)


def _forget(follower: Follower) -> None:
    """Removes a follower whose thread ends from `_FOLLOWERS`, because it would keep the job in memory."""
    with _LOCK:
        for runtime, followers in list(_FOLLOWERS.items()):
            if follower in followers:
                followers.remove(follower)
                if not followers:
                    del _FOLLOWERS[runtime]


class Lines:
    """Shows the progress of one job by printing lines at growing intervals."""

    def __init__(self, name: str, write: Callable[[str], None]) -> None:
        self._name = name
        self._write = write
        self._apart_s = FIRST_LINE_S
        self._due_s: float | None = None
        self._wrote = False

    def update(self, now_s: float, reading: Reading) -> None:
        """Prints a line with the progress if the interval has passed, or if the job is over and a line was printed
        before.
        """
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
        """Does nothing, because lines need no end."""


class Bars:
    """The display with the progress bars of all jobs of this process."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._progress: Progress | None = None
        self._jobs = 0

    @property
    def shown(self) -> bool:
        """Returns whether the display is on the screen: some job has not ended."""
        return self._progress is not None

    def add(self, name: str) -> Bar:
        """Adds a bar for one more job, and returns it."""
        # Imported late: the import is slow, and most drivers have no terminal.
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
        """Records that one job has ended. After the last job the display ends, and the bars stay on the screen."""
        with self._lock:
            self._jobs -= 1
            if not self._jobs and self._progress is not None:
                self._progress.stop()
                self._progress = None


class Bar:
    """Shows the progress of one job as a bar."""

    def __init__(self, bars: Bars, progress: Progress, task: TaskID) -> None:
        self._bars, self._progress, self._task = bars, progress, task

    def update(self, now_s: float, reading: Reading) -> None:
        """Shows the progress `reading` in the bar. If the total is unknown, the bar moves to and fro."""
        known = {} if reading.part is None else {"total": 1.0, "completed": reading.part}
        self._progress.update(self._task, reading=str(reading), **known)  # type: ignore[arg-type]

    def end(self) -> None:
        """Stops the bar at its current position."""
        self._progress.stop_task(self._task)
        self._bars.ended()


BARS = Bars()
_LOCK = threading.Lock()
_FOLLOWERS: dict[object, list[Follower]] = {}
"""The followers of running jobs, by the runtime of the jobs."""


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


WINDOW_S = 30.0
"""The time in seconds over which the rate (rows per second) is averaged."""


@dataclass(frozen=True, slots=True)
class BoundedInput:
    """The input of a bounded job, by which its progress is measured.

    `rows` is the number of rows, or None if it is unknown for a split. `splits` is the number of splits.
    """

    vertices: frozenset[str]
    """Ids of the source vertices."""
    rows: int | None
    splits: int
    assigned: frozenset[str]
    """Ids of source vertices that get their splits from the coordinator while the job runs."""


def bounded_input(submission: Submission) -> BoundedInput | None:
    """Returns the description of a job's input, or None if the job may never end."""
    sources = [vertex for vertex in submission.context.graph.vertices if vertex.source is not None]
    if any(vertex.source is None or is_unbounded(vertex.source.source) for vertex in sources):
        return None
    splits = [
        position.split
        for vertex in sources
        if vertex.source is not None
        for position in submission.context.splits[vertex.source.uid]
    ]
    return BoundedInput(
        vertices=frozenset(vertex.vertex for vertex in sources),
        rows=None if any(split.rows < 0 for split in splits) else sum(split.rows for split in splits),
        splits=len(splits),
        assigned=frozenset(source.vertex for source in submission.spec.assigned_sources),
    )


@dataclass(frozen=True, slots=True)
class Reading:
    """The progress of a job at one time: rows read, rate in rows per second, and remaining time. Unknown values are
    None.
    """

    status: str
    rows: int
    rows_total: int | None
    splits_begun: int | None
    splits: int
    part: float | None
    """The share of the input that has been read, from 0 to 1."""
    rows_per_s: float | None
    left_s: float | None

    def __str__(self) -> str:
        """Returns the progress as one line of text."""
        rows = f"{self.rows:,} rows" if self.rows_total is None else f"{self.rows:,} of {self.rows_total:,} rows"
        begun = f"{self.splits:,}" if self.splits_begun is None else f"{self.splits_begun:,} of {self.splits:,}"
        shown = [
            self.status,
            *([] if self.part is None else [f"{100 * self.part:.0f} %"]),
            rows,
            f"{begun} split{'' if self.splits == 1 else 's'}{'' if self.splits_begun is None else ' begun'}",
            *([] if self.rows_per_s is None else [f"{self.rows_per_s:,.0f} rows/s"]),
            *([] if self.left_s is None else [f"{duration_text(round(self.left_s) * 1_000)} left"]),
        ]
        return ", ".join(shown)


class ProgressMeter:
    """Computes the progress and the rate of one job from answers of its coordinator.

    The times that callers pass must not decrease.
    """

    def __init__(self, given: BoundedInput) -> None:
        self._input = given
        self._seen: deque[tuple[float, int]] = deque()
        """Pairs of a time in seconds and the number of rows then, for the last `WINDOW_S` seconds, and one pair
        before.
        """

    def read(self, now_s: float, progress: JobProgress) -> Reading:
        """Returns the progress of the job, given the coordinator's answer `progress` at the time `now_s`."""
        given = self._input
        rows = self._of_sources(progress.rows_before) + self._of_sources(progress.rows_in)
        if given.rows is not None:
            rows = min(rows, given.rows)
        begun = None
        if given.assigned == given.vertices and given.splits:
            begun = given.splits - sum(progress.splits_left.get(vertex, 0) for vertex in given.assigned)
        part = None
        if progress.status == "finished":
            part = 1.0
        elif given.rows is not None:
            part = rows / given.rows if given.rows else 1.0
        elif begun is not None:
            part = begun / given.splits
        rate = self._rate(now_s, rows)
        left_s = None
        if rate and given.rows is not None:
            left_s = (given.rows - rows) / rate
        return Reading(progress.status, rows, given.rows, begun, given.splits, part, rate, left_s)

    def _of_sources(self, rows: Mapping[str, int]) -> int:
        return sum(count for vertex, count in rows.items() if vertex in self._input.vertices)

    def _rate(self, now_s: float, rows: int) -> float | None:
        """Returns the rows per second over the last `WINDOW_S` seconds, or None before there are two measurements."""
        if self._seen and rows < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now_s, rows))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - WINDOW_S:
            self._seen.popleft()
        since_s, before = self._seen[0]
        return (rows - before) / (now_s - since_s) if now_s > since_s else None
