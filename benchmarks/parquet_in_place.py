"""From Parquet files to a table: tidegate with the files in place and staged, and Spark's batch of the same files.

    python benchmarks/parquet_in_place.py [--rows 30000000] [--rounds 2] [--folder .bench/parquet-in-place]

Spark makes the files: int64 key out of `--keys`, float64 value. On a Ray with two executors of one core and two slots
beside each, two programs run by turns:

- **pass**: a filter that Spark knows (half of the rows), and the rows to a table;
- **totals**: count and sum a key, to a table.

Each is run by tidegate with a checkpoint a second, the DataFrame read in place and staged (`stage=`), and by Spark,
which writes Parquet files. The clock runs from the call to the end of the job, so the staging counts. Sums are compared
with Spark's; exit code 1 if they differ.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.compute as pc
from common import describe_machine
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from rich.console import Console
from rich.table import Table

import tidegate as tg

FILES = 8
Sums = tuple[int, float]
PROGRAMS = ("pass", "totals")


def tidegate_run(env: tg.StreamEnvironment, program: str, df: DataFrame, folder: Path, stage: bool) -> Sums:
    """One job, to its end; rows and sum of what its table has."""
    rows = env.from_dataframe(df, stage=stage, uid="rows")
    if program == "totals":
        rows = rows.key_by("key").aggregate(n=tg.count(), value=tg.sum("value"), emit="final", uid="totals")
    table = rows.to_table(folder / "out", uid="table")
    checkpoints = tg.CheckpointConfig(interval="1s", storage=str(folder / "checkpoints"), standbys=0)
    job = env.execute(program, checkpoints=checkpoints, restart=tg.RestartStrategy.none(), progress="off")
    if job.wait("10min") != "finished":
        raise RuntimeError(f"the job is {job.status()}")
    return sums_of(table)


def sums_of(table: tg.OutputTable) -> Sums:
    """Rows and sum of a table."""
    found = table.to_arrow()
    return len(found), pc.sum(found["value"]).as_py()


def spark_run(program: str, df: DataFrame, folder: Path) -> Sums:
    """Spark's batch, which writes files."""
    if program == "totals":
        df = df.groupBy("key").agg(F.count("*").alias("n"), F.sum("value").alias("value"))
    df.write.mode("overwrite").parquet(str(folder / "spark-out"))
    row = df.sparkSession.read.parquet(str(folder / "spark-out")).agg(F.count("*"), F.sum("value")).collect()[0]
    return int(row[0]), float(row[1])


def main() -> int:
    """All runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=30_000_000)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(".bench/parquet-in-place"))
    arguments = parser.parse_args()
    folder: Path = arguments.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    console, wrong = Console(), False
    describe_machine(console)
    with tg.StreamEnvironment.raydp(
        executors=2,
        executor_cores=1,
        executor_memory="1g",
        slots_per_executor=2,
        include_dashboard=False,
        spark_configs={"spark.sql.shuffle.partitions": "4", "spark.sql.files.minPartitionNum": str(FILES)},
        ray_options={"log_to_driver": False},
    ) as env:
        key = (F.rand(seed=1) * arguments.keys).cast("long").alias("key")
        made = env.spark.range(0, arguments.rows, 1, FILES).select(key, F.rand(seed=2).alias("value"))
        made.write.parquet(str(folder / "in"))
        files = env.spark.read.parquet(str(folder / "in"))
        took: dict[tuple[str, str], list[float]] = {}
        for _ in range(arguments.rounds):
            for program in PROGRAMS:
                df = files.filter(F.col("key") < arguments.keys // 2) if program == "pass" else files
                ways: dict[str, Callable[[], Sums]] = {
                    "in place": lambda p=program, d=df: tidegate_run(env, p, d, folder, False),  # type: ignore[misc]
                    "staged": lambda p=program, d=df: tidegate_run(env, p, d, folder, True),  # type: ignore[misc]
                    "Spark": lambda p=program, d=df: spark_run(p, d, folder),  # type: ignore[misc]
                }
                sums: dict[str, Sums] = {}
                for way, run in ways.items():
                    for left_over in ("out", "checkpoints", "spark-out"):
                        shutil.rmtree(folder / left_over, ignore_errors=True)
                    since = time.monotonic()
                    sums[way] = run()
                    took.setdefault((program, way), []).append(time.monotonic() - since)
                    console.print(f"{program}, {way}: {took[program, way][-1]:.1f} s", highlight=False)
                for way, (count, total) in sums.items():
                    if count != sums["Spark"][0] or not math.isclose(total, sums["Spark"][1], rel_tol=1e-9):
                        console.print(f"{program}, {way}: {count:,} rows, sum {total}; Spark has {sums['Spark']}")
                        wrong = True
    table = Table("program", "read", "seconds", "M rows/s", "x Spark")
    for (program, way), seconds in took.items():
        middle, of_spark = statistics.median(seconds), statistics.median(took[program, "Spark"])
        rate = arguments.rows / middle / 1e6
        table.add_row(program, way, f"{middle:.1f}", f"{rate:.2f}", f"{of_spark / middle:.2f}")
    console.print(table)
    shutil.rmtree(folder, ignore_errors=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
