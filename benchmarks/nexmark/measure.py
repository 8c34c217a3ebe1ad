"""One run of a query as a job whose rows nobody keeps: time, and the processor time of all its processes.

A rate by core is events by second of processor time: on a busy machine it says what a query costs, where a rate by
time says what else ran. Published figures are by core in the same sense.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

import tidegate as tg
from nexmark.query import Events, Query
from nexmark.source import NexmarkSource
from nexmark.workload import KINDS, Workload

POLL_S = 0.1
TIMEOUT_S = 900.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Measured:
    """One run. `rows` are those of the kinds that the query reads, `events` are of all kinds."""

    query: str
    runtime: str
    events: int
    rows: int
    seconds: float
    cpu_seconds: float
    checkpoints: int
    checkpoint_bytes: int

    @property
    def per_core(self) -> float:
        """Events a second of processor time."""
        return self.events / self.cpu_seconds


def dropped(batch: pa.RecordBatch) -> None:
    """Where rows end."""


def measured(
    query: Query,
    env: tg.StreamEnvironment,
    runtime: str,
    workload: Workload,
    folder: Path,
    parts: int = 2,
    interval: str = "1s",
) -> Measured:
    """Run a query to its end. All kinds of events are made, also those that it does not read."""
    shutil.rmtree(folder, ignore_errors=True)
    result = query.program(Events(env, workload, query, parts, all_kinds=True))
    result.map_batches(dropped, name="dropped", uid="dropped")
    own, started = time.process_time(), time.monotonic()
    job = env.execute(
        f"nexmark-{query.name}",
        checkpoints=tg.CheckpointConfig(interval=interval, storage=str(folder)),
        restart=tg.RestartStrategy.none(),
        progress="off",
    )
    spent: dict[int, float] = {}
    sizes: dict[int, int] = {}
    while True:
        progress = job.progress()
        if progress.last_checkpoint is not None:
            sizes[progress.last_checkpoint] = progress.last_checkpoint_bytes or 0
        if progress.status in ("finished", "failed", "cancelled"):
            break
        if runtime != "local":
            for process in job.processes():
                spent[process.pid] = cpu_seconds(process.pid, spent.get(process.pid, 0.0))
        if time.monotonic() - started > TIMEOUT_S:
            raise TimeoutError(f"{query.name} is not over after {TIMEOUT_S:g} s: {progress}")
        time.sleep(POLL_S)
    seconds = time.monotonic() - started
    job.wait("1min")
    cpu = time.process_time() - own if runtime == "local" else sum(spent.values())
    rows = sum(workload.rows(kind) for kind in query.reads)
    shutil.rmtree(folder, ignore_errors=True)
    return Measured(
        query.name,
        runtime,
        workload.events,
        rows,
        seconds,
        cpu,
        progress.completed_checkpoints,
        max(sizes.values(), default=0),
    )


def cpu_seconds(pid: int, before: float = 0.0) -> float:
    """Processor time of a process; what was seen last if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return before
    return (int(fields[11]) + int(fields[12])) / _TICKS


def generator_rate(workload: Workload, blocks: int = 10) -> float:
    """Events of all kinds that can be made in a second of processor time."""
    spent = 0.0
    for kind in KINDS:
        source = NexmarkSource(workload, kind, parts=1)
        reader, split, offset = source.reader(), source.splits()[0], 0
        reader.read(split, 0, workload.block)  # makes what is made once in a process
        started = time.process_time()
        for _ in range(blocks):
            made = reader.read(split, offset, workload.block)
            offset = 0 if made.at_end else made.next_offset
        spent += time.process_time() - started
    return blocks * workload.block / spent
