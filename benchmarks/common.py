"""What the benchmarks on Ray share: a source without files, a Ray on this machine, following a job, killing.

Rules: rows of a `GeneratedSource` are functions of their numbers, so any part of it can be read again, and the
reference is computed from the same function. Following a job costs one small call to its coordinator a sample. Only
processes that a job of ours names are ever killed.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Deaths that a benchmark brings about on purpose are no news. Ray reads this when it is imported.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import ray
from rich.console import Console

import tidegate as tg
from tidegate.storage.clock import now_ms

ENDED = ("finished", "failed", "cancelled")
VALUES = 1_000
"""Values are whole numbers below this, so that sums of them are exact."""


@dataclass(frozen=True)
class GeneratedSource:
    """`rows` rows: id (int64, the row's number), key (int64 below `keys`), value (whole float64), in `parts` splits."""

    rows: int
    keys: int
    parts: int

    @property
    def schema(self) -> pa.Schema:
        """id, key, value."""
        return pa.schema([("id", pa.int64()), ("key", pa.int64()), ("value", pa.float64())])

    def splits(self) -> Sequence[tg.SourceSplit]:
        """Contiguous parts; the payload is the first row's number."""
        bounds = [self.rows * part // self.parts for part in range(self.parts + 1)]
        return [
            tg.SourceSplit(f"part-{part:03d}", str(bounds[part]).encode(), bounds[part + 1] - bounds[part])
            for part in range(self.parts)
        ]

    def reader(self) -> tg.SourceReader:
        """A reader for one subtask."""
        return _GeneratedReader(self)

    def batch(self, start: int, rows: int) -> pa.RecordBatch:
        """The rows `[start, start + rows)`."""
        ids = np.arange(start, start + rows, dtype=np.int64)
        mixed = _mixed(ids.view(np.uint64))
        keys = (mixed % np.uint64(self.keys)).astype(np.int64)
        values = ((mixed >> np.uint64(40)) % np.uint64(VALUES)).astype(np.float64)
        return pa.RecordBatch.from_arrays([ids, keys, values], schema=self.schema)


class _GeneratedReader:
    def __init__(self, source: GeneratedSource) -> None:
        self._source = source

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        """Rows of one part."""
        rows = min(rows_max, split.rows - offset)
        if rows <= 0:
            return tg.ReadResult(None, offset, at_end=True)
        batch = self._source.batch(int(split.payload) + offset, rows)
        return tg.ReadResult(batch, offset + rows, at_end=offset + rows == split.rows)

    def close(self) -> None:
        """Nothing to release."""


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64: neighbouring numbers come out unlike."""
    mixed = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@contextmanager
def local_ray(cpus: int = 2) -> Iterator[Path]:
    """Ray on this machine, without Spark and dashboard; gives the folder that its logs are in."""
    # Ray's types do not tell which kind of context comes back.
    context: Any = ray.init(
        address="local",
        num_cpus=cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        yield Path(context.address_info["session_dir"]) / "logs"
    finally:
        ray.shutdown()


@dataclass
class Run:
    """What was seen of a job from outside. Times in seconds of `time.monotonic`."""

    samples: list[tuple[float, int]] = field(default_factory=list)
    """(time, rows of the source), one for each change that was seen."""
    checkpoints: dict[int, tuple[float, int, int]] = field(default_factory=dict)
    """Of each checkpoint that was seen: when, its duration in ms, its size in bytes."""
    ended_at: float = 0.0
    end: tg.JobProgress | None = None

    def see(self, progress: tg.JobProgress, vertex: str) -> None:
        """Take in one look at the job."""
        now = time.monotonic()
        rows = progress.rows_in.get(vertex, 0)
        if rows and (not self.samples or rows != self.samples[-1][1]):
            self.samples.append((now, rows))
        newest = progress.last_checkpoint
        if newest is not None and newest not in self.checkpoints:
            self.checkpoints[newest] = (now, progress.last_checkpoint_ms or 0, progress.last_checkpoint_bytes or 0)
        if progress.status in ENDED and self.end is None:
            self.ended_at, self.end = now, progress


def kill(pid: int) -> int:
    """`kill -9` one process. Returns the wall-clock time in ms just before."""
    at_ms = now_ms()
    os.kill(pid, signal.SIGKILL)
    return at_ms


def describe_machine(console: Console) -> None:
    """One line for the report: cores, load, versions."""
    load = ", ".join(f"{part:.1f}" for part in os.getloadavg())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    packages = ", ".join(f"{name} {version(name)}" for name in ("ray", "pyspark", "pyarrow", "numba"))
    console.print(
        f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} cores, {memory:.0f} GiB, load {load}; "
        f"Python {platform.python_version()}, {packages}",
        highlight=False,
        soft_wrap=True,
    )
