"""One simulated job that takes very many checkpoints in a row under survivable faults: none lost, nothing grows.

    python benchmarks/long_run.py [--checkpoints 569027] [--seed 1]

Faults go on all the time: tasks and coordinators die, storage fails and is slow, messages are lost and come twice. The
oracle watches every checkpoint: an attempt that is not restored from the newest completed one, a file that a retained
one refers to and that is gone, or a cut that does not fit ends the run. Prints, a hundred times, what there is:
completed and given-up checkpoints, restarts, files and bytes in storage, resident memory, and the time a checkpoint.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

import tidegate as tg
from tidegate.actors.coordinator import events as co
from tidegate.actors.runtimes.context import DataPlaneOptions
from tidegate.actors.sources import ReadResult, SourceReader, SourceSplit
from tidegate.actors.task.outputs import BufferLimits
from tidegate.recovery import RestartStrategy
from tidegate.simulation_run import STORAGE, JobSetting, Simulation
from tidegate.testing import Faults

FAULTS = Faults(
    crash=0.0003,
    coordinator_crash=0.00003,
    storage=0.0005,
    slow=0.0005,
    duplicate=0.001,
    drop=0.0001,
    delay="0ms..3ms",
    slow_by="200ms",
    duration="100000000s",
    crashes_max=1_000_000_000,
    coordinator_crashes_max=1_000_000_000,
)
LIMITS = BufferLimits(credit_bytes=2_000, queue_bytes_max=2_000, frame_bytes_min=100, frame_bytes_max=1_000)
SOURCE_TURN_MS = 400
SCHEMA = pa.schema([("k", pa.int64())])


class _Endless:
    """One row a read, for ever."""

    schema = SCHEMA

    def splits(self) -> Sequence[SourceSplit]:
        return [SourceSplit("0", b"")]

    def reader(self) -> SourceReader:
        return _Reader()


class _Reader:
    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        return ReadResult(pa.RecordBatch.from_pydict({"k": [offset % 7]}, SCHEMA), offset + 1, False)

    def close(self) -> None:
        """Nothing to release."""


def _build(env: tg.StreamEnvironment) -> None:
    env.from_source(_Endless()).key_by("k").aggregate(n=tg.count())


def main() -> int:
    """Run; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=int, default=569_027)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.getLogger("tidegate").setLevel(logging.CRITICAL)
    simulation = Simulation(options.seed, FAULTS)
    checkpoints = tg.CheckpointConfig(
        interval=10, timeout=3_000, tolerable_failed=1_000_000, storage=STORAGE, retained=2
    )
    setting = JobSetting(
        _build,
        1,
        checkpoints,
        DataPlaneOptions(limits=LIMITS, source_rows_max=1),
        restart=RestartStrategy.fixed_delay(1_000_000_000, "10ms"),
    )
    job = simulation.prepare(setting)
    world, disk, oracle = simulation.world, simulation.disk, job.watch.oracle
    # Barriers are what this is about, not rows.
    job.slowness = dict.fromkeys(job.spec.sources, SOURCE_TURN_MS) | dict.fromkeys(job.spec.tasks[1:], 1)
    job.start_coordinator()
    started = last_time = time.monotonic()
    asked = False
    every = max(1, options.checkpoints // 100)
    due, before = every, 0
    print(f"{'completed':>10} {'given up':>9} {'restarts':>9} {'files':>6} {'kB':>8} {'RSS MB':>7} {'ms a chk':>9}")
    while job.ended is None and world.step():
        done = oracle.completed
        if done >= due:
            now = time.monotonic()
            state = job.coordinator.machine.state if job.coordinator is not None else None
            given_up = state.failed_checkpoints if state is not None else -1
            each_ms = (now - last_time) * 1_000 / max(1, done - before)
            print(
                f"{done:>10,} {given_up:>9,} {job.deployed:>9,} {len(disk.files):>6,} {disk.size_bytes / 1e3:>8,.0f} "
                f"{_rss_mb():>7.1f} {each_ms:>9.2f}",
                flush=True,
            )
            last_time, before, due = now, done, done + every
            world.forget_lines()
        if done >= options.checkpoints and not asked:
            asked = True
            job.ask(co.CancelRequested(world.now_ms))
    state = job.ended
    assert state is not None
    print(
        f"{oracle.completed:,} checkpoints completed, 0 lost; {state.completed_checkpoints:,} by the coordinator's own "
        f"count; {job.crashes:,} task and {job.coordinator_crashes:,} coordinator crashes, {world.faults_happened:,} "
        f"faults; the job {state.status.value}; {time.monotonic() - started:,.0f} s"
    )
    return 0 if state.completed_checkpoints == oracle.completed >= options.checkpoints else 1


def _rss_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


if __name__ == "__main__":
    sys.exit(main())
