"""One simulated job that takes very many checkpoints in a row under survivable faults: none lost, nothing grows.

    python benchmarks/long_run.py [--checkpoints 569027] [--seed 1]

Faults go on all the time: tasks and coordinators die, storage fails and is slow, messages are lost and come twice. The
oracle watches every checkpoint: an attempt that is not restored from the newest completed one, a file that a retained
one refers to and that is gone, or a cut that does not fit ends the run. Prints, some thirty times, what there is:
completed and given-up checkpoints, restarts, lost coordinators, faults, files and bytes in storage, resident memory,
and the CPU of a checkpoint; then the faults of each kind, and a verdict. Exit code 1 if something was lost or grows.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

import tidegate as tg
from tidegate.actors.coordinator import events as co
from tidegate.actors.drivers.job_context import DataPlaneOptions
from tidegate.actors.task.output_gate import BufferLimits
from tidegate.connectors.source import ReadResult, SourceReader, SourceSplit
from tidegate.recovery import RestartStrategy
from tidegate.testing import Faults
from tidegate.testing.runtime.run import STORAGE, JobSetting, Simulation
from tidegate.testing.runtime.simulated_job import SimulatedJob

FAULTS = Faults(
    crash=0.001,
    coordinator_crash=0.0001,
    storage=0.0003,
    slow=0.0005,
    duplicate=0.001,
    drop=0.0002,
    delay="0ms..3ms",
    slow_by="200ms",
    duration="100000000s",
    crashes_max=1_000_000_000,
    coordinator_crashes_max=1_000_000_000,
)
LIMITS = BufferLimits(credit_bytes=2_000, queue_bytes_max=2_000, frame_bytes_min=100, frame_bytes_max=1_000)
SOURCE_TURN_MS = 400
INTERVAL_MS = 50
"""About as long as one checkpoint takes: there is always one, and timers that come too early are few."""
RETAINED = 2
LINES = 30
FILES_MAX = 20_000
"""The log keeps up to two thousand entries, and more where truncating it failed a few times in a row."""
RSS_GROWTH_MB_MAX = 64
"""Of resident memory, from the first tenth of the run to its end."""
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
    job = simulation.prepare(_setting())
    # Barriers are what this is about, not rows.
    job.slowness = dict.fromkeys(job.spec.sources, SOURCE_TURN_MS) | dict.fromkeys(job.spec.tasks[1:], 1)
    job.start_coordinator()
    report = _run(simulation, job, options.checkpoints)
    problems = report.problems(job, options.checkpoints)
    print(f"faults: {', '.join(f'{count:,} {kind}' for kind, count in sorted(simulation.world.happened.items()))}")
    print(
        f"{job.watch.oracle.completed:,} checkpoints completed, {job.crashes:,} task and {job.coordinator_crashes:,} "
        f"coordinator crashes, {simulation.world.faults_happened:,} faults; {time.process_time():,.0f} s of CPU"
    )
    print("ok: none lost, files and memory flat" if not problems else "NOT OK: " + "; ".join(problems))
    return 1 if problems else 0


def _setting() -> JobSetting:
    checkpoints = tg.CheckpointConfig(
        interval=INTERVAL_MS,
        timeout=3_000,
        tolerable_failed_checkpoints=1_000_000,
        storage=STORAGE,
        num_retained=RETAINED,
    )
    return JobSetting(
        _build,
        1,
        checkpoints,
        DataPlaneOptions(limits=LIMITS, source_rows_max=1),
        restart=RestartStrategy.fixed_delay(1_000_000_000, "10ms"),
    )


def _run(simulation: Simulation, job: SimulatedJob, wanted: int) -> _Report:
    """Until the job has ended, which is cancelled after so many checkpoints."""
    world, disk, oracle = simulation.world, simulation.disk, job.watch.oracle
    report = _Report()
    last_cpu_s, before, given_up = time.process_time(), 0, 0
    every = max(1, wanted // LINES)
    due = every
    print(
        f"{'completed':>10} {'given up':>9} {'restarts':>9} {'coord.':>7} {'faults':>9} {'files':>6} {'kB':>7} "
        f"{'RSS MB':>7} {'CPU ms':>7}"
    )
    while job.ended is None and world.step():
        done = oracle.completed
        if done < due:
            continue
        cpu_s, rss_mb = time.process_time(), _rss_mb()
        if job.coordinator is not None:
            given_up = job.coordinator.machine.state.failed_checkpoints
        report.files.append(len(disk.files))
        report.rss_mb.append(rss_mb)
        each_ms = (cpu_s - last_cpu_s) * 1_000 / (done - before)
        print(
            f"{done:>10,} {given_up:>9,} {job.deployed:>9,} {job.coordinator_crashes:>7,} {world.faults_happened:>9,} "
            f"{len(disk.files):>6,} {disk.size_bytes / 1e3:>7,.0f} {rss_mb:>7.1f} {each_ms:>7.2f}",
            flush=True,
        )
        last_cpu_s, before, due = cpu_s, done, min(due + every, wanted) if done < wanted else done + wanted
        world.forget_lines()
        if done >= wanted:
            job.ask(co.CancelRequested(world.now_ms))
    return report


@dataclass(slots=True)
class _Report:
    """What was seen at each line."""

    files: list[int] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)

    def problems(self, job: SimulatedJob, wanted: int) -> list[str]:
        """What is not as it has to be; empty if all is well."""
        state, found = job.ended, []
        if state is None:
            return ["the job hangs"]
        if not state.completed_checkpoints == job.watch.oracle.completed >= wanted:
            found.append(f"the coordinator counts {state.completed_checkpoints:,} completed checkpoints")
        if max(self.files) > FILES_MAX:
            found.append(f"{max(self.files):,} files were there at once, {FILES_MAX:,} are enough")
        growth_mb = self.rss_mb[-1] - self.rss_mb[len(self.rss_mb) // 10]
        if growth_mb > RSS_GROWTH_MB_MAX:
            found.append(f"memory has grown by {growth_mb:.0f} MB")
        return found


def _rss_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


if __name__ == "__main__":
    sys.exit(main())
