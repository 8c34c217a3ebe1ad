"""What a checkpoint costs as a job gets wider, measured here, and what that makes of 10,000 subtasks and 10 TB.

    python benchmarks/scale.py [--runtime ray] [--parallelism 2 8 16 32] [--checkpoints 5] [--exchange sockets calls]
    python benchmarks/scale.py --runtime local --parallelism 8 32 64 128

A keyed job of so many sources and so many keyed subtasks stands still, with a little state, and takes checkpoints on
demand. Every source has a channel to every keyed subtask, so that channels grow with the square. The processor time of
all its processes (on Ray: raylet and GCS too) is counted from one checkpoint to the next, less what they use while
nothing happens. Least squares make three unit costs of it: of a checkpoint, of a subtask in it, of a channel in it.

On Ray each size is measured twice: with frames over sockets, as within a node, and by calls of Ray, as between nodes;
with `--exchange sockets` the first way alone.

The second table is paper. `scale_model` takes the unit costs to clusters that are not here. Its first lines are this
machine again, so that the model can be compared with what was measured.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from common import GeneratedSource, describe_machine, local_ray
from rich.console import Console
from rich.table import Table
from scale_model import PAPER, Cluster, UnitCosts, predict

import tidegate as tg
from tidegate.actors.ray.ray_runtime import RayRuntime
from tidegate.storage.clock import now_ms

ROWS_A_PART = 1_000
WARM_CHECKPOINTS = 6
"""Before any is measured: connections are made after a few frames."""
KEYS = 10_000
KEYED = "totals-1"
TIMEOUT = "10min"


@dataclass(frozen=True)
class Still(GeneratedSource):
    """The first rows of each part; then nothing comes, and the part does not end."""

    def reader(self) -> tg.SourceReader:
        """A reader for one subtask."""
        return _StillReader(self)


class _StillReader:
    def __init__(self, source: Still) -> None:
        self._source = source

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        """Rows of one part, or none for now."""
        rows = min(rows_max, split.rows - offset)
        batch = self._source.batch(int(split.payload) + offset, rows) if rows else None
        return tg.ReadResult(batch, offset + rows, at_end=False)

    def close(self) -> None:
        """Nothing to release."""


@dataclass(frozen=True)
class Measured:
    """A checkpoint of a job: medians. Times in ms; `cpu_ms` is of all processes together."""

    parallelism: int
    cpu_ms: float
    coordinator_ms: float
    duration_ms: float
    files: float
    """Open files of a task's process; none are counted in the local runtime."""

    @property
    def subtasks(self) -> int:
        """Sources and keyed ones."""
        return 2 * self.parallelism

    @property
    def channels(self) -> int:
        """From each source to each keyed subtask."""
        return self.parallelism**2


@contextmanager
def _environment(runtime: str, parallelism: int, sockets: bool) -> Iterator[tg.StreamEnvironment]:
    if runtime == "local":
        with tg.StreamEnvironment.local(parallelism) as env:
            yield env
    else:
        options = tg.DataPlaneOptions(sockets=sockets)
        with (
            local_ray(),
            tg.StreamEnvironment(RayRuntime(standbys=0), parallelism=parallelism, options=options) as env,
        ):
            yield env


def _read(path: str) -> bytes:
    """A file of the kernel about a process; nothing if the process has gone."""
    try:
        return Path(path).read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _family() -> dict[int, float]:
    """Processor seconds of this process and of all that it has started, by process id."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        # What follows the name, which may hold anything, in brackets: state, parent; user and system time.
        if fields := _read(f"{folder}/stat").rpartition(b")")[2].split():
            pid = int(folder.name)
            parents[pid] = int(fields[1])
            seconds[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return {pid: seconds[pid] for pid in family if pid in seconds}


@dataclass(frozen=True)
class _Used:
    """Processor seconds: of this process and all that it has started, and of the coordinator's among them."""

    all_s: float
    coordinator_s: float
    at_s: float

    @classmethod
    def now(cls) -> _Used:
        """Until now."""
        used, coordinator = 0.0, 0.0
        for pid, seconds in _family().items():
            used += seconds
            coordinator += seconds if b"Coordinator" in _read(f"/proc/{pid}/cmdline") else 0.0
        return cls(used, coordinator, time.monotonic())

    def rates_since(self, before: _Used) -> tuple[float, float]:
        """Of one second."""
        seconds = self.at_s - before.at_s
        return (self.all_s - before.all_s) / seconds, (self.coordinator_s - before.coordinator_s) / seconds


def measure(
    runtime: str, parallelism: int, checkpoints: int, pause_s: float, start_s: float, folder: Path, sockets: bool = True
) -> Measured:
    """Run one job, and take its checkpoints one after the other."""
    source = Still(ROWS_A_PART * parallelism, KEYS, parallelism)
    with _environment(runtime, parallelism, sockets) as env:
        rows = env.from_source(source, name="rows")
        totals = rows.key_by("key").aggregate(n=tg.count(), x=tg.sum("value"), name="totals")
        totals.map_batches(lambda batch: None, name="dropped")
        job = env.execute("scale", checkpoints=tg.CheckpointConfig(interval="1h", storage=str(folder)), progress="off")
        try:
            deadline = time.monotonic() + start_s
            while job.progress().rows_in.get(KEYED, 0) < source.rows:
                assert time.monotonic() < deadline, f"not all rows came: {job.progress()}"
                time.sleep(0.1)
            for _ in range(WARM_CHECKPOINTS):
                job.trigger_checkpoint(TIMEOUT)
            costs, of_coordinator, durations = [], [], []
            for _ in range(checkpoints):
                quiet = _Used.now()
                time.sleep(pause_s)
                before = _Used.now()
                idle, coordinator_idle = before.rates_since(quiet)
                job.trigger_checkpoint(TIMEOUT)
                # What follows the end of a checkpoint (confirmations, deletions) belongs to it.
                time.sleep(pause_s / 4)
                after = _Used.now()
                seconds = after.at_s - before.at_s
                costs.append(after.all_s - before.all_s - idle * seconds)
                of_coordinator.append(after.coordinator_s - before.coordinator_s - coordinator_idle * seconds)
                record = job.statistics().latest_completed
                assert record is not None
                durations.append(record.duration_ms)
            files = np.median([len(os.listdir(f"/proc/{info.pid}/fd")) for info in job.processes()] or [0])
        finally:
            job.cancel()
    cpu_ms, coordinator_ms = (float(np.median(each)) * 1e3 for each in (costs, of_coordinator))
    return Measured(parallelism, cpu_ms, coordinator_ms, float(np.median(durations)), float(files))


def unit_costs(found: Sequence[Measured]) -> UnitCosts:
    """Least squares over what was measured, each size weighted alike; no cost is negative."""
    columns = np.array([[1.0, each.subtasks, each.channels] for each in found])
    cpu = np.array([each.cpu_ms for each in found])
    kept = [0, 1, 2]
    while True:
        solved = np.linalg.lstsq(columns[:, kept] / cpu[:, None], np.ones(len(cpu)), rcond=None)[0]
        if (solved >= 0).all():
            break
        kept.pop(int(np.argmin(solved)))
    costs = np.zeros(3)
    costs[kept] = solved
    subtasks = np.array([each.subtasks for each in found])
    coordinator_ms = max(0.0, float(np.polyfit(subtasks, [each.coordinator_ms for each in found], 1)[0]))
    files = max(0.0, float(np.polyfit(subtasks / 2, [each.files for each in found], 1)[0]))
    return UnitCosts(float(costs[0]), float(costs[1]), float(costs[2]), float(costs[2]), coordinator_ms, files)


def main() -> int:
    """Measure each size, fit, predict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", choices=("ray", "local"), default="ray", help="where tasks run (default ray)")
    parser.add_argument("--parallelism", type=int, nargs="+", default=[2, 4, 8, 16, 32], help="of each job")
    parser.add_argument("--checkpoints", type=int, default=5, help="of each job (default 5)")
    parser.add_argument("--pause-s", type=float, default=4.0, help="of quiet before each (default 4)")
    parser.add_argument("--start-s", type=float, default=240.0, help="until all rows are there, at most (default 240)")
    parser.add_argument(
        "--exchange",
        choices=("calls", "sockets"),
        nargs="+",
        default=["calls", "sockets"],
        help="on Ray (default both)",
    )
    parser.add_argument("--folder", type=Path, default=Path(".bench/scale"), help="where files go")
    arguments = parser.parse_args()
    if len(set(arguments.parallelism)) < 3:
        parser.error("three unit costs need three sizes at least: --parallelism 2 8 16")
    console = Console(width=120, highlight=False)
    describe_machine(console)
    folder = arguments.folder.resolve() / str(now_ms())
    found: dict[bool, list[Measured]] = {False: [], True: []}
    ways = [way == "sockets" for way in arguments.exchange] if arguments.runtime == "ray" else [True]
    for parallelism, sockets in itertools.product(arguments.parallelism, ways):
        each = measure(
            arguments.runtime,
            parallelism,
            arguments.checkpoints,
            arguments.pause_s,
            arguments.start_s,
            folder / f"{parallelism}-{sockets}",
            sockets,
        )
        found[sockets].append(each)
        console.print(
            f"{'over sockets' if sockets else 'by calls of Ray'}: {each.subtasks} subtasks, {each.channels} channels: "
            f"{each.cpu_ms:.0f} ms of processor a checkpoint ({each.coordinator_ms:.0f} of them the coordinator's), "
            f"{each.duration_ms:.0f} ms from trigger to end, {each.files:.0f} open files of a task",
            highlight=False,
        )
    near = unit_costs(found[True] or found[False])
    costs = replace(unit_costs(found[False] or found[True]), near_channel_ms=near.channel_ms)
    console.print(
        f"a checkpoint {costs.fixed_ms:.1f} ms, a subtask {costs.subtask_ms:.2f} ms ({costs.coordinator_ms:.2f} the "
        f"coordinator's), a channel {costs.channel_ms * 1e3:.0f} us by calls of Ray and "
        f"{near.channel_ms * 1e3:.0f} us over a socket; {costs.files_a_peer:.1f} open files for each",
        highlight=False,
    )
    here = [Cluster(each.parallelism, each.parallelism, 1, 2, 0.0) for each in found[True] or found[False]]
    table = Table(title="On paper: one aligned checkpoint, all of the state")
    for name in (
        "subtasks",
        "channels",
        "state, TB",
        "nodes",
        "coordinator, s",
        "exchange, s",
        "storage, s",
        "open files",
        "first",
    ):
        table.add_column(name, justify="right")
    for cluster in [*here, *PAPER]:
        paper = predict(cluster, costs)
        table.add_row(
            f"{cluster.subtasks:,}",
            f"{cluster.channels:,}",
            f"{cluster.state_tb:g}",
            f"{cluster.nodes:,}",
            f"{paper.coordinator_s:.2f}",
            f"{paper.exchange_s:.2f}",
            f"{paper.storage_s:.1f}",
            f"{paper.files_a_process:,.0f}",
            paper.gives_way,
        )
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
