"""Where the time of task processes goes: py-spy's samples of what runs in Python, and CPU time by thread.

Rules: processes are watched from outside and run on as they are; a watch is bounded in time. py-spy sees Python
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tidegate.actors.runtimes.job import TaskProcessInfo

WATCH_S = 5
SAMPLES_A_SECOND = 100
FUNCTIONS_SHOWN = 12
THREADS_SHOWN = 8
FINISH_TIMEOUT_S = 30.0

CATEGORIES = (
    ("kernels, operators", ("/actors/kernels/", "/actors/operators/", "/numba/", "/polars/")),
    ("transport (Ray)", ("/ray/", "/actors/runtimes/ray_")),
    ("files", ("/storage/", "/fsspec/", "/spark_bridge/", "/pyarrow/parquet/")),
    ("machine, host, mailbox", ("/actors/",)),
)
"""Looked for from the innermost frame outwards; the first frame that belongs to one decides."""

_CLOCK_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass
class _Watched:
    process: TaskProcessInfo
    py_spy: subprocess.Popen[bytes]
    output: Path
    thread_names: dict[int, str]
    cpu_s: dict[int, tuple[str, float]]
    """CPU seconds by thread, with its name: when the watch began, later what was used since."""
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
        """Take the CPU times of watches that are over. Call it now and then, while the processes live."""
        for watched in self._watched:
            if not watched.seconds and time.monotonic() - watched.started_at >= WATCH_S:
                _close_cpu_times(watched)

    def show(self, console: Console) -> None:
        """One table a process."""
        for watched in self._watched:
            console.print(_table(watched))


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


def _close_cpu_times(watched: _Watched) -> None:
    now = _cpu_times(watched.process.pid)
    begun = watched.cpu_s
    watched.seconds = time.monotonic() - watched.started_at
    watched.cpu_s = {
        thread: (watched.thread_names.get(thread, name), used - begun.get(thread, ("", 0.0))[1])
        for thread, (name, used) in now.items()
    }


def _table(watched: _Watched) -> Table:
    self_samples: Counter[str] = Counter()
    categories: Counter[str] = Counter()
    lines = watched.output.read_text().splitlines() if watched.output.exists() else []
    for line in lines:
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        self_samples[_short(frames[-1])] += int(count)
        categories[_category(frames)] += int(count)
    total = max(1, self_samples.total())
    table = Table(title=f"{watched.process.actor}, pid {watched.process.pid}, {total} samples")
    for column in ("% of samples", "by category", "% of samples", "by function, own time", "% of a core", "by thread"):
        table.add_column(column, justify="right" if column.startswith("%") else "left", overflow="fold")
    columns: list[list[tuple[float, str]]] = [
        [(100 * count / total, name) for name, count in categories.most_common()],
        [(100 * count / total, name) for name, count in self_samples.most_common(FUNCTIONS_SHOWN)],
        _busiest_threads(watched),
    ]
    for row in range(max(len(figures) for figures in columns)):
        cells: list[str] = []
        for figures in columns:
            cells += [f"{figures[row][0]:.0f}", figures[row][1]] if row < len(figures) else ["", ""]
        table.add_row(*cells)
    return table


def _busiest_threads(watched: _Watched) -> list[tuple[float, str]]:
    if not watched.seconds:
        return [(0.0, "not measured: the job was over first")]
    by_name: Counter[str] = Counter()
    for name, used_s in watched.cpu_s.values():
        by_name[name] += used_s  # type: ignore[assignment]  # Counters hold floats as well.
    return [(100 * used_s / watched.seconds, name) for name, used_s in by_name.most_common(THREADS_SHOWN)]


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
