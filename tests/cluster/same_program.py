"""A program with all that joins a job to Spark, for every topology: the same code must come to the same result.

A bounded and a streaming DataFrame go in; an upsert table and a DataFrame for each checkpoint come out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from waiting import until

import tidegate as tg

ROWS, KEYS = 6_000, 7
LINES = 300

Rows = list[tuple[object, ...]]


def bounded(env: tg.StreamEnvironment, folder: Path) -> Rows:
    """Totals a key of a bounded DataFrame, read back through Spark."""
    rows = env.spark.range(ROWS, numPartitions=2).select((F.col("id") % KEYS).alias("k"), F.col("id").alias("v"))
    totals = env.from_dataframe(rows, uid="rows").key_by("k").aggregate(n=tg.count(), total=tg.sum("v"), uid="totals")
    out = totals.to_table(str(folder / "totals"), mode="upsert", keys=["k"], uid="table")
    checkpoints = tg.CheckpointConfig(interval="200ms", storage=str(folder / "checkpoints"))
    assert env.execute("bounded", checkpoints=checkpoints).wait("4min") == "finished"
    return sorted(tuple(row) for row in out.read(env.spark).collect())


def streamed(env: tg.StreamEnvironment, folder: Path) -> list[int]:
    """Values that a streaming DataFrame reads from files, as Spark's writer has got them for each checkpoint."""
    files, written = folder / "in", folder / "written"
    files.mkdir(parents=True)
    put(files / "first.json", range(LINES))

    seen: set[int] = set()

    def write(df: DataFrame, checkpoint_id: int) -> None:
        df.write.mode("overwrite").parquet(str(written / f"checkpoint={checkpoint_id}"))
        seen.update(row["x"] for row in df.collect())

    rows = env.spark.readStream.schema("x long").json(str(files))
    env.from_dataframe(rows, uid="lines", trigger="50ms").for_each_checkpoint(write, uid="out")
    checkpoints = tg.CheckpointConfig(interval="500ms", storage=str(folder / "checkpoints"))
    job = env.execute("streamed", checkpoints=checkpoints)
    until("the first file", lambda: len(seen) >= LINES, job.progress)
    put(files / "second.json", range(LINES, 2 * LINES))
    until("the second file", lambda: len(seen) >= 2 * LINES, job.progress)
    job.cancel()
    assert job.wait("4min") == "cancelled"
    return sorted(row["x"] for row in env.spark.read.schema("x long").parquet(str(written)).collect())


def expected_totals() -> Rows:
    """What `bounded` comes to."""
    return [(k, len(range(k, ROWS, KEYS)), sum(range(k, ROWS, KEYS))) for k in range(KEYS)]


def expected_values() -> list[int]:
    """What `streamed` comes to."""
    return list(range(2 * LINES))


def put(path: Path, numbers: Iterable[int]) -> None:
    """A new file of JSON, which appears whole."""
    hidden = path.with_name(f".{path.name}")
    hidden.write_text("".join(f"{json.dumps({'x': number})}\n" for number in numbers))
    os.replace(hidden, path)
