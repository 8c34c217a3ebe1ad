"""Rates of the sink for PostgreSQL, of COPY alone, and of upserts by INSERT ... ON CONFLICT in batches, in one run.

    .venv/bin/python benchmarks/postgres_sink.py [ROWS]

The server is the one of the tests, on loopback, without fsync. Each side writes the same rows of five columns into an
empty table with a primary key, in turns, and the median of the rounds counts. The sink's time contains its files, which
are in memory here, and the tokens. Ratios hold on other machines; rates do not.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.csv
from database_sinks import SinkRun, database_sink
from postgres_server import PostgresDatabase, new_database, run_postgres

from tidegate.connectors.sql.postgres import PostgresConnection

ROUNDS = 3
BATCH = 65_536
INSERT_ROWS = 1_000
COLUMNS = "id bigint PRIMARY KEY, k text, x double precision, n integer, at timestamptz"


def rows_of(count: int) -> pa.Table:
    """Returns rows with a key, in no order."""
    random = np.random.default_rng(7)
    return pa.table(
        {
            "id": random.permutation(count),
            "k": pa.array(random.integers(0, 1_000, count)).cast(pa.string()),
            "x": random.random(count),
            "n": pa.array(random.integers(0, 1 << 30, count), pa.int32()),
            "at": pa.array(random.integers(0, 1 << 50, count), pa.timestamp("us", "UTC")),
        }
    )


def seconds(database: PostgresDatabase, filled: pa.Table | None, write: Callable[[], None]) -> float:
    """Returns how long a call takes on an empty table, or one that has these rows."""
    database.execute("DROP TABLE IF EXISTS t")
    database.execute(f"CREATE TABLE t ({COLUMNS})")
    if filled is not None:
        binary_copy(database, filled)
    begin = time.perf_counter()
    write()
    return time.perf_counter() - begin


def binary_copy(database: PostgresDatabase, rows: pa.Table) -> None:
    """COPY in the binary format, by ADBC alone."""
    connection = PostgresConnection(database.dsn)
    connection.copy(None, "t", rows.to_reader())
    connection.commit()
    connection.close()


def csv_copy(database: PostgresDatabase, text: bytes) -> None:
    """COPY of a text that exists already, by psycopg."""
    command = "COPY t FROM STDIN (FORMAT csv)"
    with psycopg.connect(database.dsn) as connection, connection.cursor().copy(command) as copy:
        for start in range(0, len(text), 1 << 18):
            copy.write(text[start : start + (1 << 18)])


def sink(database: PostgresDatabase, rows: pa.Table, **options: object) -> Callable[[], None]:
    """The sink: one checkpoint with all rows."""

    def write() -> None:
        made = database_sink(database.dsn, rows.schema, **options)  # type: ignore[arg-type]
        run = SinkRun(made, f"job-{time.monotonic_ns()}")
        run.write_and_commit(1, pa.Table.from_batches(rows.to_batches(BATCH)))

    return write


def inserts(database: PostgresDatabase, values: list[tuple[object, ...]]) -> None:
    """INSERT ... ON CONFLICT with many rows a statement."""
    one = "(%s, %s, %s, %s, %s)"
    end = " ON CONFLICT (id) DO UPDATE SET k = EXCLUDED.k, x = EXCLUDED.x, n = EXCLUDED.n, at = EXCLUDED.at"
    with psycopg.connect(database.dsn) as connection:
        for start in range(0, len(values), INSERT_ROWS):
            part = values[start : start + INSERT_ROWS]
            flat = [value for row in part for value in row]
            connection.execute(f"INSERT INTO t VALUES {', '.join([one] * len(part))}{end}", flat)


def main() -> None:
    """Measure, and print a line for each side."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300_000
    rows = rows_of(count)
    out = pa.BufferOutputStream()
    pa.csv.write_csv(rows, out, pa.csv.WriteOptions(include_header=False))
    text = out.getvalue().to_pybytes()
    values = [tuple(row.values()) for row in rows.to_pylist()]
    with run_postgres() as server, new_database(server) as database:
        upsert = sink(database, rows, mode="upsert", keys=["id"])
        sides: dict[str, tuple[pa.Table | None, Callable[[], None]]] = {
            "COPY alone, binary": (None, lambda: binary_copy(database, rows)),
            "COPY alone, csv": (None, lambda: csv_copy(database, text)),
            "sink, append": (None, sink(database, rows)),
            "INSERT ON CONFLICT, new keys": (None, lambda: inserts(database, values)),
            "sink, upsert, new keys": (None, upsert),
            "INSERT ON CONFLICT, old keys": (rows, lambda: inserts(database, values)),
            "sink, upsert, old keys": (rows, upsert),
        }
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(ROUNDS):
            for name, (filled, write) in sides.items():
                taken[name].append(seconds(database, filled, write))
    rates = {name: count / statistics.median(each) for name, each in taken.items()}
    for name, rate in rates.items():
        print(f"{name:32s} {rate:12,.0f} rows/s")
    print(f"append / binary COPY  {rates['sink, append'] / rates['COPY alone, binary']:.2f}")
    print(f"append / csv COPY     {rates['sink, append'] / rates['COPY alone, csv']:.2f}")
    for keys in ("new", "old"):
        ratio = rates[f"sink, upsert, {keys} keys"] / rates[f"INSERT ON CONFLICT, {keys} keys"]
        print(f"upsert / INSERT, {keys}  {ratio:.2f}")


if __name__ == "__main__":
    main()
