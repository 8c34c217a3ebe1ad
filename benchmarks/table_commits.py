"""What a table with very many commits costs: opening it, its list of files, a commit, and the size of its log.

    python benchmarks/table_commits.py [--commits 100 10000 100000] [--history 600] [--looks 5] [--folder DIR]

Makes the log of a table with so many commits of one file each (the data files themselves are not there), on a local
folder. Then readers that know nothing open it, `--looks` times, and ask who owns it and how many rows it has (*open*),
and which files it shows (*files*): medians, with the ratio to the smallest table. *Restore* is what a new job asks
when it goes on from the middle of the table's life: it reads the whole log. *Commit* is the mean of the last thousand.

With `--history` small files are put together as beside a job, ten at a time. The log is vacuumed and cut 20 times in a
history of that many commits, which the figure for commits includes. *Restore* is then from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from common import describe_machine
from rich.console import Console
from rich.table import Table

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.log.vacuum import Retention
from tidegate.storage.tables.maintenance import FAN_IN, LOOKS_A_HISTORY
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog

JOB, NEXT_JOB = JobId("commits-00000001"), JobId("commits-00000002")
INFO = TableInfo.of(pa.schema([("key", pa.int64()), ("total", pa.float64())]), "append")
LAST = 1_000
SECOND = 1_000
CLOCK = [0]
"""Milliseconds; a commit is made every second."""


class _CountedStore(FileSystemStore):
    """Counts what is read."""

    reads = 0

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        self.reads += 1
        return super().read(path, offset, length)


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a table with `commits` commits. Times in ms."""

    commits: int
    commit_ms: float
    open_ms: float
    open_reads: int
    files_ms: float
    restore_ms: float
    log_files: int
    log_bytes: int


def main() -> int:
    """Measure each size and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commits", type=int, nargs="+", default=[100, 10_000, 100_000])
    parser.add_argument("--history", type=int, help="commits that a history has (default: nothing is put together)")
    parser.add_argument("--looks", type=int, default=5, help="readers of each kind (default 5)")
    parser.add_argument("--folder", type=Path, default=Path(".bench/table-commits"), help="where files go")
    arguments = parser.parse_args()
    console = Console()
    describe_machine(console)
    folder = arguments.folder.resolve()
    show([measure(n, arguments.looks, folder, arguments.history) for n in sorted(arguments.commits)], console)
    return 0


class _Upkeep:
    """Puts small files together, vacuums the log and cuts it, as a job does beside its commits."""

    def __init__(self, log: TableLog, folder: Path, history: int) -> None:
        self._log = log
        self._folder = folder
        self._history = history
        self._levels: list[list[int]] = [[] for _ in range(8)]
        log.take_compacting(JOB, "benchmark")

    def step(self, number: int, seq: int) -> None:
        """After a commit, which is entry `seq`."""
        self._levels[0].append(seq)
        for level, members in enumerate(self._levels[:-1]):
            if len(members) < FAN_IN:
                break
            path = f"data/{JOB}/compacted/{seq:012d}-{level:06d}.parquet"
            self._log.compact(JOB, "benchmark", set(members), level + 1, (DataFile(path, 200, 9_000, "xxh3:0"),))
            fold = self._log.state()
            assert fold is not None
            self._levels[level + 1].append(fold.seq)
            members.clear()
        if number % max(self._history // LOOKS_A_HISTORY, 1) == 0:
            retention = Retention(CLOCK[0] - self._history * SECOND, checkpoints=(CheckpointId(number),))
            reading = TableLog(FileSystemStore(str(self._folder)), now_ms=lambda: CLOCK[0])
            reading.vacuum(retention)
            reading.cut(retention, lambda paths: ())


def measure(commits: int, looks: int, folder: Path, history: int | None) -> Costs:
    """Make a table, look at it, and delete it."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        log = TableLog(FileSystemStore(str(folder)), now_ms=lambda: CLOCK[0])
        log.create(INFO)
        log.claim(JOB)
        upkeep = None if history is None else _Upkeep(log, folder, history)
        since = time.perf_counter()
        for number in range(1, commits + 1):
            if number == max(commits - LAST, 0) + 1:
                since = time.perf_counter()
            file = DataFile(f"data/{JOB}/000001/t-0-{number:06d}.parquet", 200, 4_096, f"xxh3:{number:016x}")
            CLOCK[0] += SECOND
            seq = log.commit(JOB, CheckpointId(number), (file,)).seq
            if upkeep is not None:
                upkeep.step(number, seq)
        commit_ms = (time.perf_counter() - since) * 1_000 / min(LAST, commits)
        opened = [_opened(str(folder)) for _ in range(looks)]
        files_ms = _median(lambda: TableLog(FileSystemStore(str(folder))).snapshot(), looks)
        origin = (JOB, CheckpointId(commits // 2 if history is None else commits))
        restore_ms = _median(lambda: TableLog(FileSystemStore(str(folder))).check_claim(INFO, NEXT_JOB, origin), looks)
        kept = [path for path in (folder / "_tidegate").rglob("*") if path.is_file()]
        assert history is not None or len(log.snapshot().files) == commits
        return Costs(
            commits,
            commit_ms,
            statistics.median(ms for ms, _ in opened),
            opened[0][1],
            files_ms,
            restore_ms,
            len(kept),
            sum(path.stat().st_size for path in kept),
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _opened(folder: str) -> tuple[float, int]:
    """Milliseconds and reads until a new reader knows owner and number of rows."""
    store = _CountedStore(folder)
    since = time.perf_counter()
    log = TableLog(store)
    assert log.owner() is not None
    assert log.rows() > 0
    return (time.perf_counter() - since) * 1_000, store.reads


def _median(look: Callable[[], object], looks: int) -> float:
    times = []
    for _ in range(looks):
        since = time.perf_counter()
        look()
        times.append((time.perf_counter() - since) * 1_000)
    return statistics.median(times)


def show(found: list[Costs], console: Console) -> None:
    """Print a row for each size."""
    table = Table("commits", "commit", "open", "reads", "files", "restore", "log files", "log bytes", "bytes a commit")
    least = found[0]
    for costs in found:
        table.add_row(
            f"{costs.commits:,}",
            f"{costs.commit_ms:.2f} ms",
            f"{costs.open_ms:.1f} ms (x {costs.open_ms / least.open_ms:.1f})",
            str(costs.open_reads),
            f"{costs.files_ms:.1f} ms (x {costs.files_ms / least.files_ms:.1f})",
            f"{costs.restore_ms:.1f} ms",
            str(costs.log_files),
            f"{costs.log_bytes:,}",
            f"{costs.log_bytes / costs.commits:.0f}",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
