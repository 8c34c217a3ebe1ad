"""Sources that end at different times, stops with a savepoint, and what is killed meanwhile.

    python benchmarks/finishing.py [--apart-s 10]

Two sources of generated rows go into one keyed aggregation and one table of all rows; the first source ends `--apart-s`
seconds before the second one. Shown are, each with its own job on Ray:

    ends       checkpoints complete before, between and after the two ends, and tell who has finished; the processes of
               the first source are then killed (SIGKILL), and nothing happens: nobody needs them any more
    restore    a task of the second source is killed when the first one has ended: the next attempt does not read the
               first source again
    refused    a stop whose savepoint cannot be written: the job goes on
    suspend    a stop without drain, and a job that goes on from the savepoint to the end
    drain      a stop with drain: the operators finish with what they have

Every table must be exact at the end, compared with what polars computes from the same rows. Exit code 1 if one is not,
or if one of these things did not happen.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl
import pyarrow as pa
from common import ENDED, GeneratedSource, describe_machine, kill, local_ray
from rich.console import Console
from rich.table import Table

import tidegate as tg
from tidegate import recovery
from tidegate.actors.coordinator.events import TaskFinished
from tidegate.actors.ray.ray_runtime import RayRuntime

FIRST, SECOND = "first", "second"
PARALLELISM = 2
KEYS = 1_009
POLL_S = 0.1
TABLE_CHARACTERS = 120
OVER = (*ENDED, "suspended")


@dataclass(frozen=True)
class PacedSource:
    """Some rows of a `GeneratedSource`, `[start, start + rows)`, read in `seconds`: each of its subtasks takes that."""

    start: int
    rows: int
    seconds: float

    @property
    def schema(self) -> pa.Schema:
        """id, key, value."""
        return _ROWS.schema

    def splits(self) -> Sequence[tg.SourceSplit]:
        """One for each subtask; the payload is the first row's number."""
        bounds = [self.start + self.rows * part // PARALLELISM for part in range(PARALLELISM + 1)]
        return [
            tg.SourceSplit(f"part-{part}", str(bounds[part]).encode(), bounds[part + 1] - bounds[part])
            for part in range(PARALLELISM)
        ]

    def reader(self) -> tg.SourceReader:
        """A reader that takes its time."""
        return _PacedReader(self.seconds * PARALLELISM / self.rows)


class _PacedReader:
    def __init__(self, row_s: float) -> None:
        self._row_s = row_s

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        """Rows of one part."""
        rows = min(rows_max, split.rows - offset)
        if rows <= 0:
            return tg.ReadResult(None, offset, at_end=True)
        time.sleep(rows * self._row_s)
        return tg.ReadResult(
            _ROWS.batch(int(split.payload) + offset, rows), offset + rows, at_end=offset + rows == split.rows
        )

    def close(self) -> None:
        """Nothing to release."""


_ROWS = GeneratedSource(2**40, KEYS, 1)


@dataclass
class Show:
    """One job and what it has shown; `Unexpected` is raised by what did not happen."""

    folder: Path
    arguments: argparse.Namespace
    said: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._runtime = RayRuntime(standbys=1)
        self._begun_at = time.monotonic()
        self._deadline = self._begun_at + self.arguments.timeout_s

    def start(self, restore: str | None = None) -> tg.Job:
        """Execute the program."""
        rows, first_s = self.arguments.rows, self.arguments.first_s
        options = tg.DataPlaneOptions(source_rows_max=self.arguments.batch_rows)
        env = tg.StreamEnvironment(self._runtime, PARALLELISM, options=options)
        first = env.from_source(PacedSource(0, rows, first_s), name=FIRST, uid=FIRST)
        second_s = first_s + self.arguments.apart_s
        second = env.from_source(PacedSource(rows, 2 * rows, second_s), name=SECOND, uid=SECOND)
        both = first.union(second)
        self.rows = both.filter(pl.col("id") >= 0, uid="all").to_table(str(self.folder / "rows"), uid="rows-table")
        totals = both.key_by("key").aggregate(emit="final", uid="totals", n=tg.count(), total=tg.sum("value"))
        self.totals = totals.to_table(str(self.folder / "totals"), uid="totals-table")
        return env.execute(
            self.folder.name,
            checkpoints=tg.CheckpointConfig(
                interval=self.arguments.interval,
                storage=str(self.folder / "checkpoints"),
                savepoints=str(self.folder / "savepoints"),
                num_retained=1_000,
            ),
            restart=tg.RestartStrategy.fixed_delay(attempts=3, delay=0),
            restore=restore,
        )

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._begun_at

    def close(self) -> None:
        """End the job's processes."""
        self._runtime.stop()

    def say(self, what: str, result: object) -> None:
        """A line of the table."""
        self.said.append((what, str(result)))

    def until(self, what: str, job: tg.Job, condition: Callable[[tg.JobProgress], bool]) -> tg.JobProgress:
        """Wait for it."""
        while True:
            progress = job.progress()
            if condition(progress):
                return progress
            if progress.status in OVER or time.monotonic() > self._deadline:
                raise Unexpected(f"waited in vain for {what}: {progress}")
            time.sleep(POLL_S)

    def until_first_has_finished(self, job: tg.Job) -> tg.JobProgress:
        """Wait until the coordinator knows that both tasks of the first source have finished."""
        return self.until("the end of the first source", job, lambda _: len(finished_at_ms(job, FIRST)) == PARALLELISM)

    def end(self, job: tg.Job) -> tg.JobProgress:
        """Wait for the end; all rows must be in the tables."""
        progress = self.until("the end", job, lambda p: p.status in OVER)
        expect(progress.status == "finished", f"the job {progress.status}: {progress.reason}")
        self.compare(pl.DataFrame(_ROWS.batch(0, 3 * self.arguments.rows)))
        return progress

    def compare(self, expected: pl.DataFrame) -> None:
        """The tables hold these rows and their totals, exactly."""
        totals = expected.group_by("key").agg(pl.len().cast(pl.Int64).alias("n"), pl.col("value").sum().alias("total"))
        found_rows, found_totals = pl.DataFrame(self.rows.to_arrow()), pl.DataFrame(self.totals.to_arrow())
        expect(found_rows.sort("id").equals(expected.sort("id")), f"{found_rows.height} rows, not {expected.height}")
        expect(found_totals.sort("key").equals(totals.sort("key")), f"{found_totals.height} keys are not as expected")
        self.say("tables", f"exact: {found_rows.height} rows, {found_totals.height} keys")


class Unexpected(Exception):
    """Something did not happen as it should."""


def expect(condition: bool, otherwise: str) -> None:
    """Raise Unexpected if it is not so."""
    if not condition:
        raise Unexpected(otherwise)


def finished_at_ms(job: tg.Job, vertex: str) -> list[int]:
    """When tasks of a vertex have finished, in the newest attempt that any has."""
    ends = [e for e in job.events() if isinstance(e, TaskFinished) and e.task.vertex == vertex]
    newest = max((e.attempt for e in ends), default=0)
    return [e.at_ms for e in ends if e.attempt == newest]


def ends(show: Show) -> None:
    """Checkpoints before, between and after; processes of tasks that have finished are killed."""
    job = show.start()
    show.until_first_has_finished(job)
    victims = [process for process in job.processes() if process.task.vertex == FIRST]
    expect(len(victims) == PARALLELISM, f"{len(victims)} processes of the first source are there")
    for victim in victims:
        kill(victim.pid)
    progress = show.end(job)
    expect(progress.restarts == 0, f"{progress.restarts} restarts: {progress.last_failure}")
    show.say("processes of the first source killed after its end", f"{len(victims)}, restarts: {progress.restarts}")
    first_ms, second_ms = max(finished_at_ms(job, FIRST)), max(finished_at_ms(job, SECOND))
    show.say("ends of the two sources apart", f"{(second_ms - first_ms) / 1000:.1f} s")
    phases: dict[tuple[str, ...], int] = {}
    for checkpoint in job.checkpoints():
        subtasks = recovery.inspect(checkpoint.path).metadata.subtasks
        unfinished = {s.vertex for s in subtasks if not s.finished}
        done = tuple(sorted(str(vertex) for vertex in {s.vertex for s in subtasks} - unfinished))
        phases[done] = phases.get(done, 0) + 1
    for done, count in phases.items():
        show.say(f"checkpoints with {', '.join(done) or 'nobody'} finished", count)
    expect(bool(phases.get(())) and phases.get((FIRST,), 0) > 1, f"checkpoints were not taken in between: {phases}")
    expect(progress.failed_checkpoints == 0, f"{progress.failed_checkpoints} checkpoints failed")


def restore(show: Show) -> None:
    """A kill when the first source has ended."""
    job = show.start()
    progress = show.until_first_has_finished(job)
    kill(next(process.pid for process in job.processes() if process.task.vertex == SECOND))
    show.until("the next attempt", job, lambda p: p.attempt > progress.attempt and p.rows_in.get(SECOND, 0) > 0)
    end = show.end(job)
    read = end.rows_in.get(FIRST, 0)
    show.say("rows read by the first source after the restore", read)
    show.say("rows read by the second source after the restore", end.rows_in.get(SECOND, 0))
    expect(end.restarts == 1 and read == 0, f"{end.restarts} restarts; the first source has read {read} rows again")


def refused(show: Show) -> None:
    """A stop whose savepoint has nowhere to go."""
    job = show.start()
    show.until("a checkpoint", job, lambda p: p.completed_checkpoints > 0)
    blocker = show.folder / "no-folder"
    blocker.touch()
    for drain in (False, True):
        before = job.progress()
        try:
            job.stop(drain=drain, savepoint=str(blocker), timeout="60s")
        except tg.TidegateError as error:
            show.say(f"stop, drain={drain}", f"{type(error).__name__}: {error}")
        else:
            raise Unexpected("the savepoint was written into a file")
        show.until(
            "a checkpoint after it",
            job,
            lambda p, n=before.completed_checkpoints: p.status == "running" and p.completed_checkpoints > n,  # type: ignore[misc]
        )
    end = show.end(job)
    show.say("the job", f"{end.status}, restarts: {end.restarts}")


def suspend(show: Show) -> None:
    """A stop without drain when the first source has ended, and a second job."""
    job = show.start()
    show.until_first_has_finished(job)
    path = job.stop(timeout="60s")
    status = job.status()
    expect(status == "suspended", f"the job is {status}")
    show.say("the job", status)
    expect(show.totals.to_arrow().num_rows == 0, "the aggregation has emitted, though nothing was drained")
    show.say("rows in the tables then", f"{show.rows.to_arrow().num_rows}, keys: 0")
    after = show.start(restore=path)
    end = show.end(after)
    read = end.rows_in.get(FIRST, 0)
    show.say("restored: rows read by the two sources", f"{read}, {end.rows_in.get(SECOND, 0)}")
    expect(read == 0, f"the first source has read {read} rows again")


def drain(show: Show) -> None:
    """A stop with drain in the middle."""
    job = show.start()
    show.until("rows", job, lambda p: min(p.rows_in.get(FIRST, 0), p.rows_in.get(SECOND, 0)) > 0)
    show.until("a checkpoint", job, lambda p: p.completed_checkpoints > 0)
    job.stop(drain=True, timeout="60s")
    status = job.status()
    expect(status == "finished", f"the job is {status}")
    show.say("the job", status)
    ids = pl.DataFrame(show.rows.to_arrow()).get_column("id").sort()
    expect(ids.n_unique() == len(ids) < 3 * show.arguments.rows, f"{len(ids)} rows, {ids.n_unique()} different ones")
    every = pl.DataFrame(_ROWS.batch(0, 3 * show.arguments.rows))
    show.compare(every.filter(pl.col("id").is_in(ids.implode())))


SHOWS = {show.__name__: show for show in (ends, restore, refused, suspend, drain)}


def main() -> int:
    """All shows. Exit code 1 if one did not go as it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", choices=SHOWS, nargs="+", default=list(SHOWS), help="(default: all of them)")
    parser.add_argument("--first-s", type=float, default=5.0, help="seconds that the first source takes (default 5)")
    parser.add_argument("--apart-s", type=float, default=10.0, help="seconds that the second takes longer (default 10)")
    parser.add_argument("--rows", type=int, default=50_000, help="rows of the first; the second has twice as many")
    parser.add_argument("--batch-rows", type=int, default=500, help="rows of a batch (default 500)")
    parser.add_argument("--interval", default="500ms", help="time between checkpoints (default 500ms)")
    parser.add_argument("--timeout-s", type=float, default=180.0, help="limit of one show in seconds (default 180)")
    parser.add_argument("--folder", type=Path, default=Path(".bench/finishing"), help="where files go")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else TABLE_CHARACTERS)
    describe_machine(console)
    table = Table("show", "what", "result", title="finishing")
    failed = 0
    with local_ray():
        for name in arguments.show:
            folder = (arguments.folder / name).resolve()
            shutil.rmtree(folder, ignore_errors=True)
            show = Show(folder, arguments)
            try:
                SHOWS[name](show)
            except (Unexpected, TimeoutError, tg.TidegateError) as error:
                show.say("[bold red]NOT AS IT SHOULD BE[/bold red]", f"{type(error).__name__}: {error}")
                failed += 1
            finally:
                show.close()
            for what, result in show.said:
                table.add_row(name, what, result)
            table.add_section()
            console.print(f"{name}: {show.seconds:.0f} s", highlight=False)
    console.print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
