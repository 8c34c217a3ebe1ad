"""Rates of `lookup_join` with a table of PostgreSQL or SQLite, beside a bare loop of the same queries, in one run.

    python benchmarks/database_lookup.py [--rows 300000] [--table 200000] [--rounds 3] [--batch 10000]

The server is the one of the tests, on loopback. A table has `--table` rows with a primary key of integers and three
other columns. Rows with random keys, of which 9 of 10 are in the table, come in batches of `--batch`. In turns:

    bare loop     for each batch: its different keys, queries of 1,000 keys each, and the rows as Arrow tables (for
                  SQLite as tuples of its driver). Nothing is joined
    lookup        the function of `lookup_join` alone, over the same batches, without a cache
    job           a job of one subtask on the local runtime from memory to a step that counts rows, without a cache;
                  from its first row to its end
    cached        the function with a cache as large as the table, over keys of which few come often (Zipf, 1.3)

The rate is rows of the stream a second; the median of the rounds counts. The ratio is to the bare loop over the same
keys.
"""

from __future__ import annotations

import argparse
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import adbc_driver_postgresql.dbapi
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from common import describe_machine
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from postgres_server import new_database, run_postgres

import tidegate as tg
from tidegate.connectors.sql.lookup import lookup_limits, open_table
from tidegate.operators.functions.batch_functions import BatchContext
from tidegate.operators.joins.database_lookup import DatabaseLookup
from tidegate.operators.joins.join_operator import JoinSides
from tidegate.operators.joins.lookup_join import Lookup
from tidegate.operators.operator import OperatorContext
from tidegate.operators.user_metrics import UserMetrics
from tidegate.storage.ids import OperatorUid, SubtaskIndex

KEYS_A_QUERY = 1_000
COLUMNS = "id, name, price, stock"
CREATE = "CREATE TABLE t (id BIGINT PRIMARY KEY, name VARCHAR(20), price DOUBLE PRECISION, stock INTEGER)"
Loop = Callable[[list[pa.RecordBatch]], int]


def bare_postgres(dsn: str) -> Loop:
    """Queries by ADBC alone."""

    def loop(batches: list[pa.RecordBatch]) -> int:
        found = 0
        with closing(adbc_driver_postgresql.dbapi.connect(dsn, autocommit=True)) as connection:
            for batch in batches:
                keys = pc.unique(batch.column("id"))
                for start in range(0, len(keys), KEYS_A_QUERY):
                    text = ",".join(map(str, keys.slice(start, KEYS_A_QUERY).to_pylist()))
                    with connection.cursor() as cursor:
                        cursor.execute(f"SELECT {COLUMNS} FROM t WHERE id = ANY('{{{text}}}'::bigint[])")
                        found += cursor.fetch_arrow_table().num_rows
        return found

    return loop


def bare_sqlite(path: Path) -> Loop:
    """Queries by the driver of Python alone."""

    def loop(batches: list[pa.RecordBatch]) -> int:
        found = 0
        with closing(sqlite3.connect(path)) as connection:
            for batch in batches:
                keys = pc.unique(batch.column("id"))
                for start in range(0, len(keys), KEYS_A_QUERY):
                    part = keys.slice(start, KEYS_A_QUERY).to_pylist()
                    marks = ",".join("?" * len(part))
                    found += len(connection.execute(f"SELECT {COLUMNS} FROM t WHERE id IN ({marks})", part).fetchall())
        return found

    return loop


def lookup_alone(given: tg.DatabaseTable) -> Loop:
    """The function of the join."""

    table = open_table(given)

    def loop(batches: list[pa.RecordBatch]) -> int:
        sides = JoinSides((("id",), ("id",)), (None, None))
        function = DatabaseLookup(
            Lookup(sides, batches[0].schema, table.schema, True, 10_000_000), table, lookup_limits(given)
        )
        context = OperatorContext(OperatorUid("lookup"), "lookup", SubtaskIndex(0), 1, 1, metrics=UserMetrics("lookup"))
        function.open(BatchContext(context))
        found = 0
        for batch in batches:
            joined = function.process(batch)
            found += 0 if joined is None else joined.num_rows
        function.close()
        return found

    return loop


def job_seconds(given: tg.DatabaseTable, batches: list[pa.RecordBatch]) -> float:
    """Return the seconds of a job, from its first row to its end."""
    first: list[float] = []

    def seen(batch: pa.RecordBatch) -> pa.RecordBatch:
        first.append(time.perf_counter())
        return batch

    options = tg.DataPlaneOptions(source_rows_max=batches[0].num_rows)
    with tempfile.TemporaryDirectory() as folder, tg.StreamEnvironment.local(1, options=options) as env:
        stream = env.from_batches(pa.Table.from_batches(batches), splits=1)
        joined = stream.map_batches(seen, schema=batches[0].schema).lookup_join(given, on="id", how="inner")
        # Few rows reach the sink, so its cost does not count.
        joined.filter(pl.col("stock") < 0).collect()
        job = env.execute("lookup", checkpoints=tg.CheckpointConfig(interval="1s", storage=folder), progress="off")
        assert job.wait("10min") == "finished"
    return time.perf_counter() - first[0]


def timed(loop: Loop, batches: list[pa.RecordBatch], expected: int | None) -> tuple[float, int]:
    """Return the seconds of a loop, and the rows that it found."""
    begin = time.perf_counter()
    found = loop(batches)
    took = time.perf_counter() - begin
    assert expected is None or found == expected, (found, expected)
    return took, found


def measure(console: Console, name: str, given: tg.DatabaseTable, bare: Loop, options: argparse.Namespace) -> None:
    """Measure one database, and print a table."""
    random = np.random.default_rng(7)
    uniform = random.integers(0, options.table * 10 // 9, options.rows)
    often = random.zipf(1.3, options.rows) % options.table
    with_cache = tg.DatabaseTable(given.address, given.table, cache_ttl="1h", cache_rows=2 * options.table)
    alone, cached = lookup_alone(given), lookup_alone(with_cache)
    sides: dict[str, tuple[np.ndarray, Callable[[list[pa.RecordBatch]], float]]] = {
        "bare loop": (uniform, lambda batches: timed(bare, batches, None)[0]),
        "lookup": (uniform, lambda batches: timed(alone, batches, None)[0]),
        "job": (uniform, lambda batches: job_seconds(given, batches)),
        "bare loop, few keys often": (often, lambda batches: timed(bare, batches, None)[0]),
        "cached, few keys often": (often, lambda batches: timed(cached, batches, options.rows)[0]),
    }
    taken: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(options.rounds + 1):
        for side, (keys, run) in sides.items():
            rows = pa.table({"n": np.arange(options.rows), "id": keys})
            seconds = run(rows.to_batches(options.batch))
            if number:  # Round 0 compiles kernels and fills the caches of the database.
                taken[side].append(seconds)
    table = Table(name, "rows a second", "of the bare loop")
    for side, rounds in taken.items():
        floor = taken["bare loop, few keys often" if "often" in side else "bare loop"]
        median = statistics.median(rounds)
        table.add_row(side, f"{options.rows / median:,.0f}", f"{statistics.median(floor) / median:.2f}")
    console.print(table)


def main() -> None:
    """Measure both databases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--table", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=10_000)
    options = parser.parse_args()
    console = Console()
    describe_machine(console)
    with run_postgres() as server, new_database(server) as database:
        console.print(server.execute("SELECT version()")[0][0])
        database.execute(CREATE)
        numbers = f"generate_series(0, {options.table - 1}) AS i"
        database.execute(f"INSERT INTO t SELECT i, 'name ' || i, i * 1.5, i % 1000 FROM {numbers}")
        database.execute("ANALYZE t")
        given = tg.DatabaseTable(database.dsn, "t", keys_per_query=KEYS_A_QUERY)
        measure(console, "PostgreSQL", given, bare_postgres(database.dsn), options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test.db"
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(CREATE)
            rows = ((i, f"name {i}", i * 1.5, i % 1000) for i in range(options.table))
            connection.executemany("INSERT INTO t VALUES (?, ?, ?, ?)", rows)
        given = tg.DatabaseTable(f"sqlite:///{path}", "t", keys_per_query=KEYS_A_QUERY)
        measure(console, "SQLite", given, bare_sqlite(path), options)


if __name__ == "__main__":
    main()
