"""State as data beside a plain read: how long `read_state_batches` takes, and pyarrow for the same rows in files.

    python benchmarks/read_state.py [--keys 10000000] [--rounds 3] [--parallelism 2] [--spark]

A savepoint with one row a key (an int64 key, a struct of four float64) is made by `SavepointWriter`, and the same rows
are written to an Arrow file and to a Parquet file, which are read batch by batch. All read a warm page cache, and take
turns. `read_state_batches` verifies checksums, which the others do not. A ratio is to the Arrow file, within a round.

With `--spark` the same state is read as a DataFrame by two executors (RayDP), beside Spark's own reading of the Parquet
file. Both count the rows and add up each column; the sums must be those of the rows that were written.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from common import describe_machine
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from rich.console import Console
from rich.table import Table

import tidegate as tg
from tidegate import recovery

VALUE = pa.struct([(f"v{number}", pa.float64()) for number in range(4)])
UID = "per-key"
QUIET = {"log_to_driver": False}


def state_rows(keys: int) -> pa.Table:
    """A row a key."""
    numbers = np.arange(keys, dtype=np.int64)
    values = [pa.array(numbers * (position + 0.5)) for position in range(VALUE.num_fields)]
    value = pa.StructArray.from_arrays(values, fields=list(VALUE))
    return pa.table({"key": pa.array(numbers), "value": value})


def read_arrow(path: Path) -> Iterable[pa.RecordBatch]:
    """The batches of an Arrow file, read into memory as a store would."""
    with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as reader:
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def timed(batches: Callable[[], Iterable[pa.RecordBatch]], expected: int) -> float:
    """Seconds to read all rows, of which the first column is looked at."""
    start = time.perf_counter()
    rows = 0
    for batch in batches():
        rows += batch.num_rows
        np.asarray(batch.column(0)).sum()
    seconds = time.perf_counter() - start
    assert rows == expected, f"{rows} rows of {expected}"
    return seconds


def main() -> None:
    """Write once, then read by turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parallelism", type=int, default=2)
    parser.add_argument("--spark", action="store_true", help="as a DataFrame, beside Spark's reading of Parquet")
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    console = Console(width=120)
    describe_machine(console)
    folder = Path(tempfile.mkdtemp(prefix="read-state-", dir=arguments.folder))
    try:
        measure(arguments, folder, console)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(arguments: argparse.Namespace, folder: Path, console: Console) -> None:
    """The rows of the table, and medians."""
    rows = state_rows(arguments.keys)
    with recovery.SavepointWriter(str(folder), job="benchmark", parallelism=arguments.parallelism) as savepoint:
        savepoint.with_keyed_state(uid=UID, keys=["key"], state=tg.ValueState("value", VALUE), rows=rows)
    arrow, parquet = folder / "rows.arrow", folder / "rows.parquet"
    with pa.OSFile(str(arrow), "wb") as sink, pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=65_536)
    pq.write_table(rows, parquet)
    size_bytes = recovery.inspect(savepoint.path).size_bytes
    console.print(
        f"{arguments.keys:,} keys; state {size_bytes:,} bytes, Arrow {os.path.getsize(arrow):,}, "
        f"Parquet {os.path.getsize(parquet):,}"
    )
    if arguments.spark:
        measure_spark(savepoint.path, parquet, rows, arguments.rounds, console)
        return
    ways: dict[str, Callable[[], Iterable[pa.RecordBatch]]] = {
        "Arrow file": lambda: read_arrow(arrow),
        "Parquet file": lambda: pq.ParquetFile(parquet).iter_batches(65_536),
        "read_state_batches": lambda: recovery.read_state_batches(savepoint.path, uid=UID),
    }
    del rows
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(arguments.rounds):
        for way, batches in ways.items():
            seconds[way].append(timed(batches, arguments.keys))
            console.print(f"round {number + 1}  {way:<20} {seconds[way][-1]:8.3f} s")
    table = Table("median", "seconds", "rows a second", "times the Arrow file")
    for way, found in seconds.items():
        ratios = [one / other for one, other in zip(found, seconds["Arrow file"], strict=True)]
        median = statistics.median(found)
        table.add_row(way, f"{median:.3f}", f"{arguments.keys / median:,.0f}", f"{statistics.median(ratios):.2f}")
    console.print(table)


def measure_spark(savepoint: str, parquet: Path, rows: pa.Table, rounds: int, console: Console) -> None:
    """Seconds of both DataFrames, round after round. Raises AssertionError for another result."""
    expected = [float(pc.sum(pc.struct_field(rows["value"], [n])).as_py()) for n in range(VALUE.num_fields)]
    with tg.StreamEnvironment.raydp(
        executors=2, executor_cores=1, executor_memory="2g", include_dashboard=False, ray_options=QUIET
    ) as env:
        spark = env.spark
        sums = [F.sum(f"value.{field.name}").alias(field.name) for field in VALUE]
        ways: dict[str, Callable[[], DataFrame]] = {
            "Spark's Parquet": lambda: spark.read.parquet(str(parquet)),
            "read_state(spark=)": lambda: recovery.read_state(savepoint, uid=UID, spark=spark),
        }
        for number in range(rounds):
            for way, frame in ways.items():
                start = time.perf_counter()
                (found,) = frame().agg(F.count("*").alias("rows"), *sums).collect()
                seconds = time.perf_counter() - start
                assert found["rows"] == rows.num_rows, f"{way}: {found['rows']} rows of {rows.num_rows}"
                totals = [found[field.name] for field in VALUE]
                assert all(map(math.isclose, totals, expected)), f"{way}: sums {totals}, expected {expected}"
                console.print(f"round {number + 1}  {way:<20} {seconds:8.3f} s, {found['rows']:,} rows, sums equal")


if __name__ == "__main__":
    main()
