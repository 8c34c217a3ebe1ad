"""What a reader sees of tables whose job is killed and restored, again and again.

    python benchmarks/table_reader.py [--kills 20] [--interval 200ms] [--folder .bench/table-reader]

A job in a process of its own writes each row twice, as two halves that go to different subtasks, to a table and to a
Delta Lake table. It is killed (SIGKILL) at random moments and restored from its latest checkpoint. Meanwhile Spark
reads both tables in a loop: the table as its users do, of the Delta table the files that its log lists, since Spark's
own reader of Delta is not among its packages. Every reading must show whole checkpoints: of each part of the input the
rows from the first one to some row, none missing, none twice, both halves of each; and never fewer than the one before.
Prints the readings of each kill, and at the end the files and commits of the tables. Exit code 1 for any difference or
error.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from common import describe_machine
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.console import Console

import tidegate as tg
from tidegate.spark_bridge.java import ensure_java

SCHEMA = pa.schema([("part", pa.int64()), ("id", pa.int64())])
WRITTEN = pa.schema([*SCHEMA, ("half", pa.int64())])
PARTS = 2
ROWS_A_READ, READ_S = 40, 0.005
PROGRESS_S = 120.0
"""After so long without new rows the job counts as stuck."""


class PacedSource:
    """Rows 0, 1, 2, … of each part, slowly and without an end."""

    schema = SCHEMA
    unbounded = True

    def splits(self) -> list[tg.SourceSplit]:
        """The parts."""
        return [tg.SourceSplit(f"part-{part}", str(part).encode(), 1 << 40) for part in range(PARTS)]

    def reader(self) -> PacedReader:
        """A reader of a subtask."""
        return PacedReader()


class PacedReader:
    """Gives a few rows at a time."""

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        """The next rows of a part."""
        time.sleep(READ_S)
        ids = range(offset, offset + min(rows_max, ROWS_A_READ))
        batch = pa.record_batch([pa.array([int(split.payload)] * len(ids)), pa.array(ids)], schema=SCHEMA)
        return tg.ReadResult(batch, offset + len(ids), at_end=False)

    def close(self) -> None:
        """Nothing to release."""


def halves(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Each row twice."""
    twice = pa.concat_batches([batch, batch])
    half = pa.array([0] * batch.num_rows + [1] * batch.num_rows)
    return pa.record_batch([*twice.columns, half], schema=WRITTEN)


def run_job(folder: Path, interval: str, restore: str | None) -> None:
    """The process that is killed."""
    with tg.StreamEnvironment.local(PARTS) as env:
        rows = env.from_source(PacedSource(), uid="in").map_batches(halves, schema=WRITTEN, uid="halves").rebalance()
        rows.to_table(folder / "own", uid="own")
        rows.to_delta(folder / "delta", uid="delta")
        checkpoints = tg.CheckpointConfig(interval=interval, storage=str(folder / "checkpoints"))
        print(env.execute("table reader", checkpoints=checkpoints, restore=restore).wait(), flush=True)


@dataclass
class Killer:
    """Kills the job, and starts it again."""

    folder: Path
    kills: int
    interval: str
    chance: random.Random
    done: int = 0
    errors: list[str] = field(default_factory=list)
    over: bool = False
    readings: int = 0
    """How often both tables were read; the job is not killed before it was so twice."""

    def run(self) -> None:
        """Until it was killed so often; it is killed once more at the end."""
        try:
            for number in range(self.kills + 1):
                self._one(number)
                self.done = min(number + 1, self.kills)
        except Exception as error:  # noqa: BLE001 (told at the end, as everything that goes wrong)
            self.errors.append(f"{type(error).__name__}: {error}")
        finally:
            self.over = True

    def _one(self, number: int) -> None:
        command = [sys.executable, __file__, "--job", "--folder", str(self.folder), "--interval", self.interval]
        before, read = self._rows(), self.readings
        with (self.folder / f"job-{number}.log").open("w") as log:
            job = subprocess.Popen([*command, *(["--restored"] if number else [])], stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + PROGRESS_S
            while self._rows() <= before or self.readings < read + 2:
                if job.poll() is not None or time.monotonic() > deadline:
                    said = Path(log.name).read_text()[-500:]
                    raise RuntimeError(f"job {number} made no progress; it ended with {job.poll()}: {said}")
                time.sleep(0.05)
            time.sleep(self.chance.uniform(0.2, 3.0))
        finally:
            job.send_signal(signal.SIGKILL)
            job.wait()

    def _rows(self) -> int:
        try:
            return tg.open_table(self.folder / "own").rows_committed()
        except tg.TableError:
            return 0


def differences(rows: DataFrame, newest: Counter[int]) -> list[str]:
    """What is wrong with a reading; `newest` is how many rows of each part an earlier one had."""
    n, distinct, first, last, ones = (F.count("*"), F.countDistinct("id"), F.min("id"), F.max("id"), F.sum("half"))
    found = []
    for part, *values in rows.groupBy("part").agg(n, distinct, first, last, ones).collect():
        count, ids, smallest, largest, seconds = values
        if not (smallest == 0 and largest == ids - 1 and count == 2 * ids and seconds == ids):
            found.append(
                f"part {part}: rows {smallest} to {largest}, {ids} of them, {count} halves, {seconds} second halves"
            )
        if ids < newest[part]:
            found.append(f"part {part}: {ids} rows after {newest[part]}")
        newest[part] = max(newest[part], ids)
    return found


def read_own(spark: SparkSession, folder: Path) -> DataFrame | None:
    """The table, if it is there."""
    try:
        return tg.open_table(folder / "own").read(spark)
    except tg.TableError:
        return None


def read_delta(spark: SparkSession, folder: Path) -> DataFrame | None:
    """The files that Delta lists, if there are any."""
    url = str(folder / "delta")
    files = DeltaTable(url).file_uris() if DeltaTable.is_deltatable(url) else []
    return spark.read.parquet(*files) if files else None


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--interval", default="200ms")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path(".bench/table-reader"))
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--restored", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder: Path = arguments.folder.resolve()
    if arguments.job:
        run_job(folder, arguments.interval, "latest" if arguments.restored else None)
        return 0
    console = Console()
    describe_machine(console)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ensure_java()
    builder: Any = SparkSession.builder
    spark = builder.master("local[2]").config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", 2)
    return watch(
        console, spark.getOrCreate(), Killer(folder, arguments.kills, arguments.interval, random.Random(arguments.seed))
    )


def watch(console: Console, spark: SparkSession, killer: Killer) -> int:
    """Read both tables until the last kill, and once more."""
    spark.sparkContext.setLogLevel("ERROR")
    thread = threading.Thread(target=killer.run, name="killer")
    thread.start()
    readers = {"own": read_own, "delta": read_delta}
    newest: dict[str, Counter[int]] = {name: Counter() for name in readers}
    readings: Counter[str] = Counter()
    wrong: list[str] = []
    told, last = 0, False
    while not last:
        last = killer.over
        for name, read in readers.items():
            try:
                rows = read(spark, killer.folder)
                if rows is None:
                    continue
                wrong += [f"{name}, reading {readings[name]}: {text}" for text in differences(rows, newest[name])]
                readings[name] += 1
            except Exception as error:  # noqa: BLE001 (whatever a reader gets is what this looks for)
                wrong.append(f"{name}, reading {readings[name]}: {type(error).__name__}: {error}")
        killer.readings += 1
        if killer.done > told:
            told = killer.done
            console.print(f"kill {told}: {dict(readings)} readings, {len(wrong)} wrong", highlight=False)
    thread.join()
    spark.stop()
    wrong += killer.errors
    for text in wrong[:20]:
        console.print(text, markup=False, soft_wrap=True)
    table = tg.open_table(killer.folder / "own")
    files, delta = len(table.log.snapshot().files), DeltaTable(str(killer.folder / "delta"))
    console.print(
        f"{killer.done} kills, {sum(readings.values())} readings, {len(wrong)} wrong; {table.rows_committed():,} rows "
        f"in {files} files after {len(table.history())} commits, the Delta table in {len(delta.file_uris())}",
        highlight=False,
    )
    return 1 if wrong or killer.done < killer.kills or not all(newest[name] for name in readers) else 0


if __name__ == "__main__":
    sys.exit(main())
