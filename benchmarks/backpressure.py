"""Checkpoints under back-pressure: aligned, aligned with a timeout and unaligned ones, side by side.

    python benchmarks/backpressure.py [--checkpoints 5] [--queue-mib 1 4 16]

A job on Ray reads generated rows as fast as the machine allows and sends them over a keyed edge to an operator that
takes a tenth of that: a first job without slowness measures what the source can give, and the operator then sleeps for
so long a row. What does not fit waits in the queues, and every barrier with it, unless it may overtake. The same rows
are run with each kind of checkpoint and each size of the queues, one job after the other.

When enough checkpoints were seen, one slow task is killed (SIGKILL) so that the job has to go on from the newest of
them, with what was in flight; the slowness ends, the rows run to their end, and the table must hold their exact sums.
Exit code 1 if one does not, or if an unaligned checkpoint took a second or more.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from common import ENDED, GeneratedSource, describe_machine, kill, local_ray
from rich.console import Console
from rich.table import Table

import tidegate as tg
from tidegate.actors.coordinator.checkpoint_statistics import CheckpointRecord, VertexStatistics
from tidegate.actors.ray.ray_runtime import RayJob, RayRuntime
from tidegate.actors.task.output_gate import BufferLimits
from tidegate.storage.clock import now_ms
from tidegate.storage.units import parse_duration_ms

SOURCE, SLOW = "rows", "slow"
KINDS = ("aligned", "timeout", "unaligned")
PARALLELISM = 2
SLOWNESS = 10
KEYS = 100_000
POLL_S = 0.05
MIB = 2**20
UNALIGNED_MS_MAX = 1_000
TABLE_CHARACTERS = 110
ROW_BYTES = 24
"""id, key and value."""
ROWS_MARGIN = 1.5
"""So many times the rows that the slow part is expected to take: rates vary, and the rest runs at full speed."""
SUMS = pa.schema([("n", pa.int64()), ("ids", pa.int64()), ("total", pa.float64())])


@dataclass(frozen=True)
class Mode:
    """A kind of checkpoint."""

    name: str
    settings: dict[str, object]


@dataclass(frozen=True)
class Slow:
    """Sleeps for every row as long as a file is there, then sums the batch up; without the file it only sums."""

    row_s: float
    while_there: Path

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """One row of sums."""
        if self.while_there.exists():
            time.sleep(self.row_s * batch.num_rows)
        return sums(batch)


@dataclass
class Seen:
    """What came of one job."""

    mode: str
    queue_bytes: int
    records: list[CheckpointRecord] = field(default_factory=list)
    exact: bool = False
    problem: str | None = None


def sums(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The number of rows, the sum of their numbers and of their values: all whole, so their order does not matter."""
    ids, values = batch.column("id").to_numpy(), batch.column("value").to_numpy()
    return pa.RecordBatch.from_pydict({"n": [batch.num_rows], "ids": [ids.sum()], "total": [values.sum()]}, SUMS)


def rate_of_source(arguments: argparse.Namespace, folder: Path) -> float:
    """Rows a second that the job moves when nothing is slow."""
    source = GeneratedSource(arguments.calibration_rows, KEYS, PARALLELISM)
    with _Running("calibration", source, Slow(0.0, folder / "absent"), {}, arguments, folder) as running:
        begun_at, begun = running.until("rows", lambda p: p.rows_in.get(SLOW, 0) > 0)
        ended_at, ended = running.until("the end", lambda p: p.status in ENDED)
        if ended.status != "finished":
            raise RuntimeError(f"the calibration {ended.status}: {ended.reason}")
    return (ended.rows_in[SLOW] - begun.rows_in[SLOW]) / (ended_at - begun_at)


def slow_part_s(queue_bytes: int, rate: float, arguments: argparse.Namespace) -> float:
    """How long the slow part of a job of aligned checkpoints takes, in seconds.

    Each of their barriers waits until a slow task has taken what is queued before it, at both ends of its channels. One
    checkpoint is on its way when counting begins, and one more may be.
    """
    queued_rows = 2 * queue_bytes * PARALLELISM / ROW_BYTES
    checkpoint_s = queued_rows / (rate / SLOWNESS / PARALLELISM) + parse_duration_ms(arguments.interval) / 1_000
    return float(arguments.fill_s + (arguments.checkpoints + 2) * checkpoint_s)


def measure(mode: Mode, queue_bytes: int, rate: float, arguments: argparse.Namespace, folder: Path) -> Seen:
    """One job: checkpoints under back-pressure, a kill, and the rest at full speed."""
    gate = folder / "slow"
    gate.parent.mkdir(parents=True, exist_ok=True)
    gate.touch()
    slow_s = slow_part_s(queue_bytes, rate, arguments)
    queued_rows = 2 * queue_bytes * PARALLELISM**2 // ROW_BYTES
    source = GeneratedSource(int(ROWS_MARGIN * (slow_s * rate / SLOWNESS + queued_rows)), KEYS, PARALLELISM)
    slow = Slow(SLOWNESS * PARALLELISM / rate, gate)
    limits = BufferLimits(
        credit_bytes=queue_bytes, queue_bytes_max=queue_bytes, frame_bytes_max=min(queue_bytes, 8 * MIB)
    )
    # Full queues are what this is about.
    settings = mode.settings | {"interval": arguments.interval, "history": 1_000, "debloat": False}
    found = Seen(mode.name, queue_bytes)
    with _Running(f"{mode.name}-{queue_bytes}", source, slow, settings, arguments, folder, limits, slow_s) as running:
        try:
            found.records = _until_restarted(running, arguments)
            gate.unlink()
            _, end = running.until("the end", lambda p: p.status in ENDED)
        except TimeoutError as error:
            # The other jobs are worth running all the same.
            found.problem = str(error)
            return found
        if end.status != "finished":
            found.problem = f"the job {end.status}: {end.reason}"
            return found
        found.problem = _difference(running.table.to_arrow(), source)
        found.exact = found.problem is None
    return found


def _until_restarted(running: _Running, arguments: argparse.Namespace) -> list[CheckpointRecord]:
    """Checkpoints under back-pressure, and the kill of a slow task after them."""
    running.until("rows", lambda p: p.rows_in.get(SLOW, 0) > 0)
    # Only then are the queues full.
    time.sleep(arguments.fill_s)
    records = running.completed_since(now_ms(), arguments.checkpoints)
    kill(next(process.pid for process in running.job.tasks() if process.task.vertex == SLOW))
    running.until("the next attempt", lambda p: p.status in ENDED or (p.attempt > 0 and p.status == "running"))
    return records


class _Running:
    """A job while it runs: the table that it writes, and ways to wait."""

    def __init__(
        self,
        name: str,
        source: GeneratedSource,
        slow: Slow,
        settings: dict[str, object],
        arguments: argparse.Namespace,
        folder: Path,
        limits: BufferLimits | None = None,
        slow_s: float = 0.0,
    ) -> None:
        self._runtime = RayRuntime(standbys=1)
        self._deadline = time.monotonic() + arguments.timeout_s + ROWS_MARGIN * slow_s
        options = tg.DataPlaneOptions(limits or BufferLimits(), source_rows_max=arguments.batch_rows)
        env = tg.StreamEnvironment(self._runtime, PARALLELISM, options=options)
        rows = env.from_source(source, name=SOURCE, uid=SOURCE)
        slowed = rows._by_keys(("key",)).map_batches(slow, schema=SUMS, name=SLOW, uid=SLOW)
        self.table = slowed.to_table(str(folder / "table"), uid="table")
        submission = env.plan(
            name,
            checkpoints=tg.CheckpointConfig.model_validate(settings | {"storage": str(folder / "checkpoints")}),
            restart=tg.RestartStrategy.fixed_delay(attempts=3, delay=0),
        )
        self.job: RayJob = self._runtime.submit(submission)

    def __enter__(self) -> _Running:
        return self

    def __exit__(self, *_: object) -> None:
        self._runtime.stop()

    def until(self, what: str, condition: Callable[[tg.JobProgress], bool]) -> tuple[float, tg.JobProgress]:
        """Wait for a condition; returns when it held and what the job was like. Raises TimeoutError."""
        while True:
            progress = self.job.progress()
            if condition(progress):
                return time.monotonic(), progress
            if progress.status in ENDED or time.monotonic() > self._deadline:
                raise TimeoutError(f"waited in vain for {what}: {progress}")
            time.sleep(POLL_S)

    def completed_since(self, at_ms: int, count: int) -> list[CheckpointRecord]:
        """So many completed checkpoints that were triggered after a moment."""
        while True:
            seen = [r for r in self.job.statistics().history if r.triggered_at_ms >= at_ms and r.reason is None]
            if len(seen) >= count:
                return seen[:count]
            self.until("checkpoints", lambda p: p.status == "running")
            time.sleep(POLL_S)
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"{len(seen)} of {count} checkpoints were completed in time")


def _difference(found: pa.Table, source: GeneratedSource) -> str | None:
    """What is wrong with the table, if anything."""
    step, n, ids, total = 1_000_000, 0, 0, 0.0
    for start in range(0, source.rows, step):
        batch = source.batch(start, min(step, source.rows - start))
        n += batch.num_rows
        ids += int(batch.column("id").to_numpy().sum())
        total += float(batch.column("value").to_numpy().sum())
    sums_found = tuple(np.sum(found[name].to_numpy()) for name in SUMS.names)
    return None if sums_found == (n, ids, total) else f"the table has {sums_found}, expected {(n, ids, total)}"


def show(results: list[Seen], console: Console) -> None:
    """A line for each job, and how durations grow."""
    table = Table(title="checkpoints under back-pressure: times in ms, sizes in MiB")
    columns = ("queue", "kind", "p50", "max", "p50 ratio", "delay", "align", "async", "in flight", "overtook")
    for column in (*columns, "table"):
        table.add_column(column, justify="right", no_wrap=True)
    unaligned_ms = {seen.queue_bytes: _median_ms(seen) for seen in results if seen.mode == "unaligned" and seen.records}
    queue = None
    for seen in results:
        if seen.queue_bytes != queue and queue is not None:
            table.add_section()
        queue = seen.queue_bytes
        durations = [r.duration_ms for r in seen.records]
        slow = [v for r in seen.records if (v := _of_slow(r)) is not None]
        table.add_row(
            f"{queue / MIB:g}",
            seen.mode,
            f"{_median_ms(seen):.0f}" if durations else "-",
            str(max(durations, default="-")),
            f"{_median_ms(seen) / max(unaligned_ms[queue], 1):.1f}" if durations and queue in unaligned_ms else "-",
            str(max((v.start_delay_ms.max for v in slow), default=0)),
            str(max((v.alignment_ms.max for v in slow), default=0)),
            str(max((v.async_ms.max for v in slow), default=0)),
            f"{max((r.in_flight_bytes for r in seen.records), default=0) / MIB:.1f}",
            f"{sum(v.unaligned for v in slow)}/{sum(v.subtasks for v in slow)}",
            "[green]exact[/green]" if seen.exact else f"[bold red]{_verdict(seen)}[/bold red]",
        )
    console.print(table)
    for seen in results:
        if seen.problem is not None:
            console.print(f"{seen.mode}, {seen.queue_bytes / MIB:g} MiB: {seen.problem}", markup=False, soft_wrap=True)


def _verdict(seen: Seen) -> str:
    return "exact" if seen.exact else "WRONG" if seen.records else "none"


def _median_ms(seen: Seen) -> float:
    return statistics.median(record.duration_ms for record in seen.records)


def _of_slow(record: CheckpointRecord) -> VertexStatistics | None:
    return next((v for v in record.vertices if v.vertex == SLOW), None)


def main() -> int:
    """All jobs. Exit code 1 if a table is wrong or an unaligned checkpoint took a second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=KINDS, help="(default: all three)")
    parser.add_argument("--checkpoints", type=int, default=5, help="checkpoints of each job (default 5)")
    parser.add_argument("--queue-mib", type=float, nargs="+", default=[1, 4, 16], help="queues of a channel, each end")
    parser.add_argument("--interval", default="1s", help="time between checkpoints (default 1s)")
    parser.add_argument("--aligned-timeout", default="300ms", help="of the second kind (default 300ms)")
    parser.add_argument("--fill-s", type=float, default=3.0, help="seconds before checkpoints count (default 3)")
    parser.add_argument("--calibration-rows", type=int, default=30_000_000, help="(default 30 million)")
    parser.add_argument("--batch-rows", type=int, default=32_768, help="rows of a batch (default 32,768)")
    parser.add_argument(
        "--timeout-s", type=float, default=300.0, help="limit of one job, beyond its slow part (default 300)"
    )
    parser.add_argument("--folder", type=Path, default=Path(".bench/backpressure"), help="where files go")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else TABLE_CHARACTERS)
    describe_machine(console)
    modes = (
        Mode("aligned", {}),
        Mode("timeout", {"unaligned": True, "aligned_timeout": arguments.aligned_timeout}),
        Mode("unaligned", {"unaligned": True}),
    )
    folder = arguments.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    results = []
    with local_ray():
        rate = rate_of_source(arguments, folder / "calibration")
        console.print(f"source: {rate / 1e6:.2f} M rows/s; the slow operator takes a tenth", highlight=False)
        for queue_mib in arguments.queue_mib:
            for mode in (m for m in modes if m.name in arguments.kinds):
                job_folder = folder / f"{mode.name}-{queue_mib:g}"
                seen = measure(mode, int(queue_mib * MIB), rate, arguments, job_folder)
                results.append(seen)
                console.print(
                    f"{queue_mib:g} MiB, {mode.name}: {', '.join(str(r.duration_ms) for r in seen.records)} ms; "
                    f"table {_verdict(seen)}",
                    highlight=False,
                    soft_wrap=True,
                )
                shutil.rmtree(job_folder, ignore_errors=True)
    show(results, console)
    late = [r for s in results if s.mode == "unaligned" for r in s.records if r.duration_ms >= UNALIGNED_MS_MAX]
    if late:
        console.print(f"[red]{len(late)} unaligned checkpoints took a second or more")
    return 1 if late or not all(seen.exact for seen in results) else 0


if __name__ == "__main__":
    sys.exit(main())
