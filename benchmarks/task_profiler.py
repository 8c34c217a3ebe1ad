"""Where the time of task processes goes: py-spy's samples of what runs in Python, and CPU time by thread.

Rules: processes are watched from outside, which stops each for a moment at every sample, so a watched run is slower and
its rate does not count; a watch is bounded in time. py-spy sees Python
threads only, and a native function as the Python line that calls it; Ray's own threads appear in the CPU times, by the
name that the operating system knows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from tidegate.actors.runtimes.running_job import TaskProcessInfo

WATCH_S = 3
SAMPLES_A_SECOND = 50
FUNCTIONS_SHOWN = 12
THREADS_SHOWN = 8
FINISH_TIMEOUT_S = 30.0

CATEGORIES = (
    ("kernels, operators", ("/tidegate/state/kernels/", "/tidegate/operators/", "/numba/", "/polars/")),
    ("transport (Ray)", ("/ray/", "/tidegate/actors/ray/")),
    ("files", ("/tidegate/storage/", "/fsspec/", "/tidegate/spark_bridge/", "/pyarrow/parquet/")),
    ("machine, host, mailbox", ("/tidegate/actors/",)),
)
"""Looked for from the innermost frame outwards; the first frame that belongs to one decides."""
WAITING = (
    "Condition.wait (python3.11/threading.py)",
    "Worker.main_loop (_private/worker.py)",
    "_worker (futures/thread.py)",
    "Mailbox._take_messages (process/mailbox.py)",
)
"""py-spy takes a thread that has just been woken for a busy one; these functions do nothing but wait."""

_CLOCK_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass
class _Watched:
    process: TaskProcessInfo
    py_spy: subprocess.Popen[bytes]
    output: Path
    thread_names: dict[int, str]
    cpu_before: dict[int, tuple[str, float]]
    """Name and CPU seconds of each thread when the watch began."""
    cpu_after: dict[int, tuple[str, float]] = field(default_factory=dict)
    """The same, `seconds` later."""
    started_at: float = field(default_factory=time.monotonic)
    seconds: float = 0.0


class TaskProfiler:
    """Watches processes for some seconds, in the background."""

    def __init__(self, processes: Sequence[TaskProcessInfo], folder: Path) -> None:
        """Begin at once. Raises OSError if py-spy cannot be started (it comes with `ray[default]`)."""
        py_spy = Path(sysconfig.get_path("scripts")) / "py-spy"
        folder.mkdir(parents=True, exist_ok=True)
        self._watched = [_watch(py_spy, process, folder) for process in processes]

    def finish(self) -> None:
        """Wait for the samples. Raises subprocess.TimeoutExpired if py-spy does not come back."""
        for watched in self._watched:
            watched.py_spy.wait(FINISH_TIMEOUT_S)

    def poll(self) -> None:
        """Read CPU times while the watch lasts. Call it now and then: a process that has ended has none."""
        for watched in self._watched:
            seconds = time.monotonic() - watched.started_at
            if seconds <= WATCH_S and (now := _cpu_times(watched.process.pid)):
                watched.cpu_after, watched.seconds = now, seconds

    def show(self, console: Console) -> None:
        """A paragraph for each process."""
        for watched in self._watched:
            for line in _lines(watched):
                console.print(line, highlight=False, soft_wrap=True)


def _watch(py_spy: Path, process: TaskProcessInfo, folder: Path) -> _Watched:
    names = _thread_names(py_spy, process.pid)
    output = folder / f"{process.pid}.raw"
    arguments = ["--duration", str(WATCH_S), "--rate", str(SAMPLES_A_SECOND), "--format", "raw", "--full-filenames"]
    command = [str(py_spy), "record", "--pid", str(process.pid), *arguments, "--output", str(output)]
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return _Watched(process, started, output, names, _cpu_times(process.pid))


def _thread_names(py_spy: Path, pid: int) -> dict[int, str]:
    """Python's names of threads by their number in the operating system."""
    dump = subprocess.run([str(py_spy), "dump", "--pid", str(pid), "--json"], capture_output=True, check=False)
    if dump.returncode != 0:
        return {}
    return {t["os_thread_id"]: t["thread_name"] for t in json.loads(dump.stdout) if t.get("thread_name")}


def _cpu_times(pid: int) -> dict[int, tuple[str, float]]:
    """CPU seconds, user and system, of every thread; empty where the process has gone."""
    times = {}
    for folder in Path(f"/proc/{pid}/task").glob("*"):
        try:
            text = (folder / "stat").read_text()
        except OSError:
            continue  # The thread has ended.
        name, _, rest = text.partition("(")[2].rpartition(")")
        fields = rest.split()
        times[int(folder.name)] = (name, (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS_A_SECOND)
    return times


def _lines(watched: _Watched) -> Iterator[str]:
    functions: Counter[str] = Counter()
    categories: Counter[str] = Counter()
    waiting = 0
    raw = watched.output.read_text().splitlines() if watched.output.exists() else []
    for line in raw:
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        function, samples = _short(frames[-1]), int(count)
        if not stack or function in WAITING:
            waiting += samples
        else:
            functions[function] += samples
            categories[_category(frames)] += samples
    total = functions.total()
    yield f"[bold]{watched.process.actor}[/bold], pid {watched.process.pid}: {total} samples, {waiting} more in waiting"
    yield f"  by category: {_shares(categories.most_common(), total)}"
    for name, samples in functions.most_common(FUNCTIONS_SHOWN):
        yield f"  {100 * samples / total:5.1f} % {name}"
    yield f"  CPU, % of a core, by thread: {_busiest_threads(watched)}"


def _shares(counts: Sequence[tuple[str, int]], total: int) -> str:
    return ", ".join(f"{name} {100 * count / total:.0f} %" for name, count in counts)


def _busiest_threads(watched: _Watched) -> str:
    if not watched.seconds:
        return "not measured, the job was over first"
    by_name: dict[str, float] = {}
    for thread, (name, after_s) in watched.cpu_after.items():
        known_as = watched.thread_names.get(thread, name)
        used_s = after_s - watched.cpu_before.get(thread, ("", 0.0))[1]
        by_name[known_as] = by_name.get(known_as, 0.0) + used_s
    busiest = sorted(by_name.items(), key=lambda item: -item[1])[:THREADS_SHOWN]
    all_s = sum(by_name.values())
    return ", ".join(f"{name} {100 * used_s / watched.seconds:.0f}" for name, used_s in (("all", all_s), *busiest))


def _category(frames: Sequence[str]) -> str:
    for frame in reversed(frames):
        for name, places in CATEGORIES:
            if any(place in frame for place in places):
                return name
    return "other"


def _short(frame: str) -> str:
    """`function (folder/file.py:line)`, without the line: `function (folder/file.py)`."""
    function, _, place = frame.partition(" (")
    parts = place.rstrip(")").rpartition(":")[0].split("/")
    return f"{function} ({'/'.join(parts[-2:])})"
