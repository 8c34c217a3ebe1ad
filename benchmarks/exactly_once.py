"""Jobs on Ray whose processes are killed at random: do the tables hold exactly what they must?

    python benchmarks/exactly_once.py [--runs 20] [--kills 3] [--seed 1]

Each run is one keyed job with three tables: all rows after a stateless step (append), running aggregates of each key
(upsert), final aggregates of each key (append). While it runs, one or two randomly chosen task processes are killed
(SIGKILL) at each of `--kills` random moments; in one run of four the coordinator's process is killed as well. In the
end each table must hold the rows of the reference, exactly: as a multiset, compared bit by bit.

A moment is a number of rows that the current attempt has read, drawn so that all moments come before the end of the
input. Zero is drawn on purpose now and then: that is while the attempt still starts. Each kill is followed until the
job has begun a new attempt, so a kill that is counted has hit a running job. The seed decides moments and victims; what
the machine does meanwhile differs from run to run.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl
import pyarrow as pa
from common import ENDED, GeneratedSource, describe_machine, kill, local_ray
from rich.console import Console

import tidegate as tg
from tidegate.actors.ray.ray_runtime import RayJob, RayRuntime

SOURCE = "rows"
PARALLELISM = 2
POLL_S = 0.02
SHOWN_MAX = 10
AT_ONCE_SHARE = 0.2
"""Share of the moments that are 0 rows."""
TWO_VICTIMS_SHARE = 0.25
COORDINATOR_EVERY = 4
NEW_COLUMN = pl.col("value") * 2 + pl.col("id")


@dataclass
class Outcome:
    """What came of one run."""

    kills: list[str] = field(default_factory=list)
    """Which processes were killed, in order, the coordinator's included."""
    moments: int = 0
    coordinator_kills: int = 0
    end: tg.JobProgress | None = None
    seconds: float = 0.0
    differences: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Tables:
    """The three outputs of a run."""

    rows: tg.OutputTable
    running: tg.OutputTable
    final: tg.OutputTable


def build(env: tg.StreamEnvironment, source: GeneratedSource, folder: Path) -> Tables:
    """The pipeline of every run."""
    rows = env.from_source(source, name=SOURCE, uid=SOURCE)
    stateless = rows.with_columns(NEW_COLUMN.alias("derived"), uid="derived").filter(pl.col("key") % 3 != 0, uid="some")
    n, total, worst = tg.count(), tg.sum("value"), tg.max("value")
    by_key = rows.key_by("key")
    running = by_key.aggregate(emit="update", name="running", uid="running", n=n, total=total, worst=worst)
    final = by_key.aggregate(emit="final", name="final", uid="final", n=n, total=total, worst=worst)
    return Tables(
        stateless.to_table(str(folder / "rows"), uid="rows-table"),
        running.to_table(str(folder / "running"), mode="upsert", keys=("key",), uid="running-table"),
        final.to_table(str(folder / "final"), uid="final-table"),
    )


def reference(source: GeneratedSource) -> tuple[pl.DataFrame, pl.DataFrame]:
    """(rows of the append branch, aggregates of each key), computed by polars from the same rows."""
    frame = pl.DataFrame(source.batch(0, source.rows))
    stateless = frame.with_columns(NEW_COLUMN.alias("derived")).filter(pl.col("key") % 3 != 0)
    totals = frame.group_by("key").agg(
        pl.len().cast(pl.Int64).alias("n"), pl.col("value").sum().alias("total"), pl.col("value").max().alias("worst")
    )
    return stateless, totals


def differences(name: str, found: pa.Table, expected: pl.DataFrame) -> list[str]:
    """Rows that are not in both equally often. Empty if the multisets are equal."""
    frame = pl.DataFrame(found)
    if frame.columns == expected.columns and frame.sort(frame.columns).equals(expected.sort(expected.columns)):
        return []
    here, there = Counter(frame.iter_rows()), Counter(expected.iter_rows())
    lines = [f"{name}: {frame.height} rows of {frame.columns}, expected {expected.height} of {expected.columns}"]
    for what, rows in (("missing", there - here), ("too many", here - there)):
        lines += [f"{name}: {what}, {count} times: {row}" for row, count in list(rows.items())[:SHOWN_MAX]]
    return lines


@dataclass
class Chaos:
    """Kills processes of one job at the moments drawn, and follows it to its end."""

    job: RayJob
    rng: random.Random
    rows_a_moment: int
    deadline: float
    outcome: Outcome

    def run(self, moments: int, coordinator: bool) -> None:
        """One kill after the other, then the end. Raises TimeoutError after the deadline."""
        coordinator_at = self.rng.randrange(moments + 1) if coordinator else -1
        for moment in range(moments + coordinator):
            share = 0.0 if self.rng.random() < AT_ONCE_SHARE else self.rng.random()
            before = self._await_rows(int(share * self.rows_a_moment))
            if before.status in ENDED or not self._kill(moment == coordinator_at):
                break
            after = self._await_attempt(before.attempt + 1)
            if after.attempt == before.attempt:
                break
            self.outcome.moments += moment != coordinator_at
        progress = self.job.wait(max(0.0, self.deadline - time.monotonic()))
        if progress is None:
            raise TimeoutError(f"the job did not end in time: {self.job.progress()}")
        self.outcome.end = progress

    def _kill(self, coordinator: bool) -> bool:
        if coordinator:
            kill(self.job.coordinator().pid)
            self.outcome.kills.append("coordinator")
            self.outcome.coordinator_kills += 1
            return True
        victims = list(self.job.tasks())
        self.rng.shuffle(victims)
        killed = 0
        for victim in victims[: 2 if self.rng.random() < TWO_VICTIMS_SHARE else 1]:
            # One may have died with the job, which ended just now.
            with suppress(ProcessLookupError):
                kill(victim.pid)
                self.outcome.kills.append(str(victim.task))
                killed += 1
        return killed > 0

    def _await_rows(self, rows: int) -> tg.JobProgress:
        """Wait until the attempt that runs has read so many rows; every task has a process then."""
        while True:
            progress = self.job.progress()
            staffed = progress.status == "running" and bool(self.job.tasks())
            if progress.status in ENDED or (staffed and progress.rows_in.get(SOURCE, 0) >= rows):
                return progress
            self._pause(f"{rows} rows", progress)

    def _await_attempt(self, attempt: int) -> tg.JobProgress:
        while True:
            progress = self.job.progress()
            if progress.status in ENDED or (progress.status == "running" and progress.attempt >= attempt):
                return progress
            self._pause(f"attempt {attempt}", progress)

    def _pause(self, what: str, progress: tg.JobProgress) -> None:
        if time.monotonic() > self.deadline:
            raise TimeoutError(f"waited in vain for {what}; killed so far: {self.outcome.kills}; job: {progress}")
        time.sleep(POLL_S)


def one_run(number: int, arguments: argparse.Namespace, folder: Path, source: GeneratedSource) -> Outcome:
    """One job, its kills, and the comparison."""
    rng = random.Random(f"{arguments.seed}/{number}")
    coordinator = number % COORDINATOR_EVERY == 0
    runtime = RayRuntime(standbys=arguments.standbys)
    options = tg.DataPlaneOptions(source_rows_max=arguments.batch_rows)
    env = tg.StreamEnvironment(runtime, PARALLELISM, options=options)
    tables = build(env, source, folder)
    submission = env.plan(
        f"run-{number}",
        checkpoints=tg.CheckpointConfig(
            interval=rng.randrange(200, 301),
            storage=str(folder / "checkpoints"),
        ),
        restart=tg.RestartStrategy.fixed_delay(attempts=1_000, delay=0),
    )
    outcome = Outcome()
    started = time.monotonic()
    try:
        job = runtime.submit(submission)
        rows_a_moment = source.rows // (arguments.kills + coordinator + 1)
        chaos = Chaos(job, rng, rows_a_moment, started + arguments.timeout_s, outcome)
        chaos.run(arguments.kills, coordinator)
    except (TimeoutError, tg.TidegateError) as error:
        outcome.differences.append(f"{type(error).__name__}: {error}")
    finally:
        runtime.stop()
    outcome.seconds = time.monotonic() - started
    if outcome.end is not None:
        outcome.differences += compare(outcome.end, tables, source)
    return outcome


def compare(end: tg.JobProgress, tables: Tables, source: GeneratedSource) -> list[str]:
    """What is wrong with a job that has ended."""
    if end.status != "finished":
        return [f"the job {end.status}: {end.reason}"]
    stateless, totals = reference(source)
    try:
        return [
            *differences("rows", tables.rows.to_arrow(), stateless),
            *differences("running", tables.running.to_arrow(), totals),
            *differences("final", tables.final.to_arrow(), totals),
        ]
    except tg.TidegateError as error:
        return [f"{type(error).__name__}: {error}"]


def main() -> int:
    """All runs. Exit code 1 if a table is wrong, a job fails, or fewer kills than asked for hit a running job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--kills", type=int, default=3, help="moments at which tasks are killed, a run (default 3)")
    parser.add_argument("--seed", type=int, default=1, help="decides moments and victims (default 1)")
    parser.add_argument("--rows", type=int, default=400_000, help="rows of each run (default 400,000)")
    parser.add_argument("--keys", type=int, default=1_009, help="distinct keys (default 1,009)")
    parser.add_argument("--batch-rows", type=int, default=500, help="rows of a batch of the source (default 500)")
    parser.add_argument("--standbys", type=int, default=2, help="spare processes of each job (default 2)")
    parser.add_argument("--timeout-s", type=float, default=180.0, help="limit of one run in seconds (default 180)")
    parser.add_argument("--folder", type=Path, default=Path(".bench/exactly-once"), help="where files go")
    arguments = parser.parse_args()
    console = Console()
    describe_machine(console)
    source = GeneratedSource(arguments.rows, arguments.keys, parts=2 * PARALLELISM)
    outcomes = []
    with local_ray():
        for number in range(1, arguments.runs + 1):
            folder = (arguments.folder / f"run-{number}").resolve()
            shutil.rmtree(folder, ignore_errors=True)
            outcome = one_run(number, arguments, folder, source)
            outcomes.append(outcome)
            _show(console, number, arguments.runs, outcome)
            if not outcome.differences:
                shutil.rmtree(folder)
    return _verdict(console, outcomes, arguments.kills)


def _show(console: Console, number: int, runs: int, outcome: Outcome) -> None:
    end = outcome.end
    restarts, checkpoints = (-1, -1) if end is None else (end.restarts, end.completed_checkpoints)
    tasks = len(outcome.kills) - outcome.coordinator_kills
    equal = "[green]equal[/green]" if not outcome.differences else "[bold red]NOT EQUAL[/bold red]"
    console.print(
        f"run {number:2}/{runs}: {equal}, {tasks} tasks killed at {outcome.moments} moments"
        f"{' and the coordinator' if outcome.coordinator_kills else ''}, {restarts} restarts, {checkpoints} "
        f"checkpoints, {outcome.seconds:.1f} s; killed: {', '.join(outcome.kills)}",
        highlight=False,
        soft_wrap=True,
    )
    for difference in outcome.differences:
        console.print(f"  {difference}", markup=False, soft_wrap=True)


def _verdict(console: Console, outcomes: list[Outcome], kills: int) -> int:
    wrong = sum(bool(outcome.differences) for outcome in outcomes)
    short = sum(outcome.moments < kills for outcome in outcomes)
    console.print(
        f"{len(outcomes)} runs, {sum(len(o.kills) for o in outcomes)} processes killed, "
        f"{sum(o.coordinator_kills for o in outcomes)} of them coordinators: "
        f"{len(outcomes) - wrong} runs equal to the reference, {wrong} not",
        highlight=False,
        soft_wrap=True,
    )
    if short:
        console.print(f"[red]{short} runs were over before {kills} kills had hit them; give more --rows")
    return 1 if wrong or short else 0


if __name__ == "__main__":
    sys.exit(main())
