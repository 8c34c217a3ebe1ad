"""Keyed count and sum on Ray beside Spark executors: rows a second with checkpoints, without, and in Spark's batch.

    make bench [ARGS="--rows 60000000 --rounds 2 --profile"]

Two Spark executors of one core and two task slots each; every job runs with parallelism 2. Spark makes the rows (int64
keys drawn evenly from `--keys`, float64 values) and writes them down twice: as Parquet of its own, which its batch
reads (Spark 3.5 cannot decode the encoding that tidegate stages in), and staged for tidegate. Both are kept for the
next run. Variants take turns, round after round, so that a busy neighbour or a warm cache hits them alike. Every result
is compared with Spark's: number of keys, sum of counts, sum of sums.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from common import ENDED, Run, describe_machine
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.console import Console
from rich.table import Table
from task_profiler import TaskProfiler

import tidegate as tg
from tidegate.spark_bridge import ParquetSource, stage_dataframe

SOURCE = "rows"
POLL_S = 0.1
WINDOW = (0.15, 0.90)
WINDOW_SAMPLES_MIN = 5
JOB_TIMEOUT_S = 900.0
SUM_TOLERANCE = 1e-9
ROW_WISE_GROUP_ROWS = 8_192
WITH, WITHOUT, SPARK, ROW_WISE = "checkpoints", "no checkpoints", "Spark batch", "row-wise map, no checkpoints"


@dataclass(frozen=True, slots=True)
class Totals:
    """What an aggregation must come to."""

    keys: int
    rows: int
    total: float

    def agrees(self, other: Totals) -> bool:
        """Equal; sums up to the order of additions."""
        same = (self.keys, self.rows) == (other.keys, other.rows)
        return same and math.isclose(self.total, other.total, rel_tol=SUM_TOLERANCE)


@dataclass(frozen=True, slots=True)
class Data:
    """The same rows, once for tidegate and once for Spark."""

    staged: ParquetSource
    spark_files: str


@dataclass(frozen=True, slots=True)
class Figures:
    """One run. Rates in rows a second; `steady` is None for Spark, and when the run was too short for it.

    Checkpoints are those that completed in the window of the steady rate.
    """

    end_to_end: float
    seconds: float
    steady: float | None = None
    durations_ms: tuple[int, ...] = ()
    sizes_bytes: tuple[int, ...] = ()


@dataclass
class Benchmark:
    """All runs in one environment."""

    env: tg.StreamEnvironment
    folder: Path
    interval: str
    console: Console
    figures: dict[str, list[Figures]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def run_job(self, variant: str, data: Data, expected: Totals, profile: bool = False) -> None:
        """One job of tidegate. One that is profiled is slower, so that its figures do not count."""
        out_url = self.folder / "out"
        storage = self.folder / "checkpoints"
        for left_over in (out_url, storage):
            shutil.rmtree(left_over, ignore_errors=True)
        stream = self.env.from_source(data.staged, name=SOURCE, uid=SOURCE)
        if variant == ROW_WISE:
            stream = stream.map(
                lambda row: {"key": row["key"], "value": row["value"] + 1.0}, schema=data.staged.schema, uid="map"
            )
        totals = stream.key_by("key").aggregate(
            emit="final", name="totals", uid="totals", n=tg.count(), total=tg.sum("value")
        )
        table = totals.to_table(str(out_url), uid="table")
        interval = self.interval if variant == WITH else None
        job = self.env.execute(
            "throughput", checkpoints=tg.CheckpointConfig(interval=interval, storage=str(storage)), restart=_NO_RESTART
        )
        run = self._follow(job, data.staged.rows, profile)
        job.wait("1min")
        result = table.to_arrow()
        counted, total = int(_sum(result, "n")), _sum(result, "total")
        # The row-wise function adds 1 to each value.
        self._check(variant, expected, Totals(len(result), counted, total - (counted if variant == ROW_WISE else 0)))
        if not profile:
            self._note(variant, figures_of(run, data.staged.rows))
        shutil.rmtree(out_url)

    def run_spark(self, data: Data) -> None:
        """Spark's batch of the same rows: all groups are computed and thrown away."""
        grouped = _aggregated(self.env.spark.read.parquet(data.spark_files))
        started = time.monotonic()
        grouped.write.format("noop").mode("overwrite").save()
        seconds = time.monotonic() - started
        self._note(SPARK, Figures(data.staged.rows / seconds, seconds))

    def _follow(self, job: tg.Job, rows: int, profile: bool) -> Run:
        run = Run()
        profiler: TaskProfiler | None = None
        deadline = time.monotonic() + JOB_TIMEOUT_S
        while run.end is None:
            progress = job.progress()
            run.see(progress, SOURCE)
            if profile and profiler is None and progress.rows_in.get(SOURCE, 0) > WINDOW[0] * rows:
                profiler = TaskProfiler(job.processes(), self.folder / "profile")
            if profiler is not None:
                profiler.poll()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the job is not over after {JOB_TIMEOUT_S:g} s: {progress}")
            if progress.status not in ENDED:
                time.sleep(POLL_S)
        if profiler is not None:
            profiler.finish()
            profiler.show(self.console)
        return run

    def _check(self, variant: str, expected: Totals, found: Totals) -> None:
        if not expected.agrees(found):
            self.wrong.append(f"{variant}: {found}, Spark has {expected}")
            self.console.print(f"[bold red]{self.wrong[-1]}", soft_wrap=True)

    def _note(self, variant: str, figures: Figures) -> None:
        self.figures.setdefault(variant, []).append(figures)
        steady = "" if figures.steady is None else f"{figures.steady / 1e6:.2f} M rows/s steady, "
        self.console.print(
            f"{variant}: {steady}{figures.end_to_end / 1e6:.2f} M rows/s end to end, {figures.seconds:.1f} s",
            highlight=False,
            soft_wrap=True,
        )


_NO_RESTART = tg.RestartStrategy.none()


def figures_of(run: Run, rows: int) -> Figures:
    """Figures of a job that was followed to its end."""
    low, high = WINDOW[0] * rows, WINDOW[1] * rows
    window = [(at, seen) for at, seen in run.samples if low <= seen <= high]
    seconds = run.ended_at - run.samples[0][0]
    figures = Figures(rows / seconds, seconds)
    if len(window) < WINDOW_SAMPLES_MIN:
        return figures
    times, counts = zip(*window, strict=True)
    inside = [c for c in run.checkpoints.values() if times[0] <= c[0] <= times[-1]]
    return Figures(
        figures.end_to_end,
        seconds,
        statistics.linear_regression(times, counts).slope,
        tuple(c[1] for c in inside),
        tuple(c[2] for c in inside),
    )


def prepare(spark: SparkSession, folder: Path, rows: int, keys: int, files: int, group_rows: int | None) -> Data:
    """The rows in both forms; made only where they are not there from a run before."""
    spark_files = str(folder / "spark")
    staged = folder / "staged"
    if not (folder / "spark" / "_SUCCESS").exists():
        shutil.rmtree(folder, ignore_errors=True)
        key = (F.rand(seed=1) * keys).cast("long").alias("key")
        made = spark.range(0, rows, 1, files).select(key, F.rand(seed=2).alias("value"))
        made.write.parquet(spark_files)
    if (staged / "_staged").exists():
        return Data(ParquetSource.open(str(staged)), spark_files)
    shutil.rmtree(staged, ignore_errors=True)
    df = spark.read.parquet(spark_files)
    if group_rows is None:
        return Data(stage_dataframe(df, str(staged)), spark_files)
    return Data(stage_dataframe(df, str(staged), rows_per_group=group_rows), spark_files)


def _aggregated(df: DataFrame) -> DataFrame:
    return df.groupBy("key").agg(F.count("*").alias("n"), F.sum("value").alias("total"))


def expected_totals(spark: SparkSession, data: Data) -> Totals:
    """Spark's own result. Also warms Spark up."""
    row = _aggregated(spark.read.parquet(data.spark_files)).agg(F.count("*"), F.sum("n"), F.sum("total")).collect()[0]
    return Totals(row[0], row[1], row[2])


def _sum(table: pa.Table, column: str) -> float:
    return float(pc.sum(table.column(column)).as_py())


def show(figures: dict[str, list[Figures]], console: Console) -> None:
    """Medians of all rounds, a column for each variant."""
    table = Table(title="Median of all rounds (least to most)")
    table.add_column("")
    for variant in figures:
        table.add_column(variant, justify="right")
    runs = list(figures.values())
    ends = {variant: statistics.median(f.end_to_end for f in of) for variant, of in figures.items()}
    steady = {variant: _median([f.steady for f in of]) for variant, of in figures.items()}
    table.add_row("M rows/s, steady", *(_spread([f.steady / 1e6 for f in of if f.steady], 2) for of in runs))
    table.add_row("M rows/s, end to end", *(_spread([f.end_to_end / 1e6 for f in of], 2) for of in runs))
    table.add_row("seconds, end to end", *(_spread([f.seconds for f in of], 1) for of in runs))
    table.add_row("x Spark, end to end", *(_ratio(ends[variant], ends[SPARK]) for variant in figures))
    table.add_row("x no checkpoints, steady", *(_ratio(steady[variant], steady[WITHOUT]) for variant in figures))
    table.add_row("x no checkpoints, end to end", *(_ratio(ends[variant], ends[WITHOUT]) for variant in figures))
    table.add_row("checkpoints in the window", *(_spread([len(f.durations_ms) for f in of], 0) for of in runs))
    table.add_row("ms a checkpoint", *(_spread([d for f in of for d in f.durations_ms], 0) for of in runs))
    table.add_row("MB a checkpoint", *(_spread([s / 1e6 for f in of for s in f.sizes_bytes], 1) for of in runs))
    console.print(table)
    console.print(
        f"cost of checkpoints: {_cost(steady[WITH], steady[WITHOUT])} of steady throughput, "
        f"{_cost(ends[WITH], ends[WITHOUT])} end to end",
        highlight=False,
        soft_wrap=True,
    )


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _spread(values: list[float] | list[int], digits: int) -> str:
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _ratio(value: float | None, base: float | None) -> str:
    return "" if value is None or base is None else f"{value / base:.2f}"


def _cost(value: float | None, base: float | None) -> str:
    return "not known (too short)" if value is None or base is None else f"{100 * (1 - value / base):.1f} %"


def main() -> int:
    """Measure. Exit code 1 if a result is not Spark's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=60_000_000, help="rows of the stream (default 60,000,000)")
    parser.add_argument("--keys", type=int, default=1_000_000, help="distinct keys (default 1,000,000)")
    parser.add_argument("--files", type=int, default=8, help="partitions of the data, 4 or more (default 8)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each variant (default 2)")
    parser.add_argument("--interval", default="1s", help="time between checkpoints (default 1s)")
    parser.add_argument("--executor-memory", default="2g", help="heap of each Spark executor (default 2g)")
    parser.add_argument("--row-wise-rows", type=int, default=1_000_000, help="rows of the row-wise job; 0: none")
    parser.add_argument("--profile", action="store_true", help="watch the tasks of one more run with py-spy")
    parser.add_argument("--folder", type=Path, default=Path(".bench/throughput"), help="where files go")
    parser.add_argument("--json", type=Path, help="write the medians, end to end, here, too")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    console = Console()
    describe_machine(console)
    with tg.StreamEnvironment.raydp(
        executors=2,
        executor_cores=1,
        executor_memory=arguments.executor_memory,
        slots_per_executor=2,
        include_dashboard=False,
        spark_configs={
            # The default of 200 would cost Spark most of its time here.
            "spark.sql.shuffle.partitions": "4",
            "spark.sql.files.minPartitionNum": str(arguments.files),
        },
        ray_options={"log_to_driver": False},
    ) as env:
        started = time.monotonic()

        def prepared(rows: int, group_rows: int | None) -> tuple[Data, Totals]:
            name = f"data-{rows}-{arguments.keys}-{arguments.files}"
            data = prepare(env.spark, folder / name, rows, arguments.keys, arguments.files, group_rows)
            return data, expected_totals(env.spark, data)

        data, expected = prepared(arguments.rows, None)
        small = prepared(arguments.row_wise_rows, ROW_WISE_GROUP_ROWS) if arguments.row_wise_rows else None
        console.print(
            f"{arguments.rows:,} rows, {expected.keys:,} keys, {len(data.staged.files)} staged files of "
            f"{sum(f.size_bytes for f in data.staged.files) / 1e6:.0f} MB in all; made and checked by Spark in "
            f"{time.monotonic() - started:.0f} s",
            highlight=False,
            soft_wrap=True,
        )
        benchmark = Benchmark(env, folder, arguments.interval, console)
        if arguments.profile:
            benchmark.run_job(WITH, data, expected, profile=True)
        for _ in range(arguments.rounds):
            benchmark.run_job(WITH, data, expected)
            benchmark.run_job(WITHOUT, data, expected)
            benchmark.run_spark(data)
            if small is not None:
                benchmark.run_job(ROW_WISE, *small)
    show(benchmark.figures, console)
    if arguments.json is not None:
        ends = {name: statistics.median(f.end_to_end for f in of) for name, of in benchmark.figures.items()}
        arguments.json.write_text(json.dumps(ends))
    console.print("[red]not all results equal Spark's" if benchmark.wrong else "all results equal Spark's")
    return 1 if benchmark.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
