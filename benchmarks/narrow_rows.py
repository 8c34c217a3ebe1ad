"""Rows a second and core of narrow rows: q1 and q2 of Nexmark over four numbers, and tumbling windows of many keys.

    .venv/bin/python benchmarks/narrow_rows.py [--rows 20000000] [--rounds 3] [--interval 1s] [--runtimes local,ray]

`q1` and `q2` are the programs of Nexmark over auction, bidder, price and time; `W3` counts and sums in tumbling windows
of ten seconds over 100,000 keys. Rows are made once in memory, and handed out again and again with later times, so what
the source costs stands in a line of its own (`source`). A checkpoint each `--interval`. The local runtime takes one
core. On Ray two subtasks read and two count: rows a second are the slope of the rows read between 15 and 90 % of them,
and processor time is that of the job's processes meanwhile. Take `--rows 200000000` there.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
import pyarrow as pa
from common import ENDED, Run, describe_machine, local_ray
from nexmark.measure import cpu_seconds, dropped
from nexmark.queries.stateless import EURO, euros
from rich.console import Console

import tidegate as tg

SCHEMA = pa.schema(
    [("auction", pa.int64()), ("bidder", pa.int64()), ("price", pa.int64()), ("date_time", pa.timestamp("ms"))]
)
KEYS = 100_000
BLOCK = 1 << 17
TIMEOUT_S = 900.0
LOOKS_MIN = 5
ROWS_A_MS = 1_000
"""Of event time: a window of ten seconds has ten million rows."""


@dataclass(frozen=True)
class Narrow:
    """`rows` rows in each of two splits."""

    rows: int
    unbounded: Literal[True] = True

    @property
    def schema(self) -> pa.Schema:
        """Four numbers."""
        return SCHEMA

    def splits(self) -> Sequence[tg.SourceSplit]:
        """Two, which are read side by side."""
        return [tg.SourceSplit(f"part-{part}", str(part).encode(), self.rows) for part in range(2)]

    def reader(self) -> tg.SourceReader:
        """A reader for one subtask."""
        return _Reader()


class _Reader:
    def __init__(self) -> None:
        chance = np.random.default_rng(1)
        self._columns = [
            pa.array(chance.integers(0, KEYS, BLOCK)),
            pa.array(chance.integers(0, 1_000, BLOCK)),
            pa.array(chance.integers(100, 1_000_000, BLOCK)),
        ]
        self._times = np.arange(BLOCK, dtype=np.int64) // (ROWS_A_MS // 2)

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        """The block again, as far as it goes, at the time of its place in the split."""
        start = offset % BLOCK
        rows = min(rows_max, BLOCK - start, split.rows - offset)
        if not rows:
            return tg.ReadResult(None, offset, at_end=True)
        times = self._times[start : start + rows] + (offset - start) // (ROWS_A_MS // 2)
        columns = [column.slice(start, rows) for column in self._columns]
        batch = pa.RecordBatch.from_arrays([*columns, pa.array(times).view(pa.timestamp("ms"))], schema=SCHEMA)
        return tg.ReadResult(batch, offset + rows, at_end=offset + rows == split.rows)

    def close(self) -> None:
        """Nothing to let go of."""


def _q1(rows: tg.Stream) -> tg.Stream:
    return rows.select("auction", "bidder", euros().cast(EURO).alias("price"), "date_time")


def _q2(rows: tg.Stream) -> tg.Stream:
    return rows.filter(pl.col("auction") % 123 == 0).select("auction", "price")


def _windows(rows: tg.Stream) -> tg.Stream:
    return rows.key_by("auction").window(tg.Tumbling("10s")).aggregate(n=tg.count(), total=tg.sum("price"))


PROGRAMS: dict[str, Callable[[tg.Stream], tg.Stream]] = {
    "source": lambda rows: rows,
    "q1": _q1,
    "q2": _q2,
    "W3": _windows,
}


def started(name: str, env: tg.StreamEnvironment, rows: int, interval: str, folder: Path) -> tg.Job:
    """The program's job."""
    stream = env.from_source(Narrow(rows // 2)).assign_timestamps("date_time")
    PROGRAMS[name](stream).map_batches(dropped, name="dropped")
    checkpoints = tg.CheckpointConfig(interval=interval, storage=str(folder))
    return env.execute(name, checkpoints=checkpoints, restart=tg.RestartStrategy.none(), progress="off")


def local_rate(name: str, rows: int, interval: str, folder: Path) -> tuple[float, float]:
    """Rows a second, and rows a second of processor time, of one run in this process."""
    with tg.StreamEnvironment.local(2) as env:
        cpu, begun = time.process_time(), time.monotonic()
        started(name, env, rows, interval, folder).wait("15min")
        seconds, cpu = time.monotonic() - begun, time.process_time() - cpu
    return rows / seconds, rows / cpu


def ray_rate(name: str, rows: int, interval: str, folder: Path) -> tuple[float, float]:
    """The same of one run on the Ray that is up, without its start and its end."""
    run, spent = Run(), list[tuple[int, float]]()
    with tg.StreamEnvironment.ray(parallelism=2) as env:
        job = started(name, env, rows, interval, folder)
        source, deadline = next(iter(job.progress().rows_in), ""), time.monotonic() + TIMEOUT_S
        while run.end is None:
            progress = job.progress()
            source = source or next(iter(progress.rows_in), "")
            run.see(progress, source)
            cpu = sum(cpu_seconds(process.pid) for process in job.processes()) if progress.status not in ENDED else 0.0
            if cpu:
                spent.append((progress.rows_in.get(source, 0), cpu))
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} is not over after {TIMEOUT_S:g} s: {progress}")
            time.sleep(0.1)
        job.wait("1min")
    steady = [(at, read) for at, read in run.samples if 0.15 * rows <= read <= 0.9 * rows]
    costs = [(read, cpu) for read, cpu in spent if 0.15 * rows <= read <= 0.9 * rows]
    if len(steady) < LOOKS_MIN or len(costs) < LOOKS_MIN:
        raise ValueError(f"{name} was over after {len(steady)} looks; take more --rows")
    slope = np.polyfit([at for at, _ in steady], [read for _, read in steady], 1)[0]
    per_core = np.polyfit([cpu for _, cpu in costs], [read for read, _ in costs], 1)[0]
    return float(slope), float(per_core)


def rate(runtime: str, name: str, rows: int, interval: str, folder: Path) -> tuple[float, float]:
    """Rows a second, and rows a second of processor time, of one run."""
    shutil.rmtree(folder, ignore_errors=True)
    found = (local_rate if runtime == "local" else ray_rate)(name, rows, interval, folder)
    shutil.rmtree(folder, ignore_errors=True)
    return found


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="names with commas between (default: all)")
    parser.add_argument("--rows", type=int, default=20_000_000, help="rows of a run (default 20,000,000)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--interval", default="1s", help="time between checkpoints (default 1s)")
    parser.add_argument("--runtimes", default="local", help="local (default), ray, or both")
    parser.add_argument("--folder", type=Path, default=Path(".bench/narrow"), help="where files go")
    arguments = parser.parse_args()
    console = Console()
    describe_machine(console)
    names = arguments.programs.split(",")
    if unknown := [name for name in names if name not in PROGRAMS]:
        parser.error(f"there is no program {', '.join(unknown)}; there are {', '.join(PROGRAMS)}")
    runtimes = arguments.runtimes.split(",")
    if unknown := [runtime for runtime in runtimes if runtime not in ("local", "ray")]:
        parser.error(f"there is no runtime {', '.join(unknown)}; there are local, ray")
    for runtime in runtimes:
        with local_ray() if runtime == "ray" else nullcontext():
            measure(runtime, names, arguments, console)
    return 0


def measure(runtime: str, names: Sequence[str], arguments: argparse.Namespace, console: Console) -> None:
    """All programs on one runtime, in turns, and their medians."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            run = rate(runtime, name, arguments.rows, arguments.interval, arguments.folder.resolve())
            found[name].append(run)
            told = " and ".join(f"{each / 1e6:.1f}" for each in run)
            console.print(f"{name} on {runtime}: {told} M rows/s, by time and by core", highlight=False)
    for name, runs in found.items():
        by_time, by_core = (statistics.median(run[i] for run in runs) / 1e6 for i in (0, 1))
        console.print(f"median of {name} on {runtime}: {by_time:.1f} M rows/s, {by_core:.1f} M a core", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
