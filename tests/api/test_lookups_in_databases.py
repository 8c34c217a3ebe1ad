"""A lookup join reads a table of a database by DB-API: again and again, and when a task begins anew."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import finish, local, rows
from waiting import until

import tidegate as tg
from tidegate.api.tables.lookup_tables import reader_of
from tidegate.operators.functions.batch_functions import BatchContext
from tidegate.operators.joins import lookup_join
from tidegate.operators.joins.join_operator import JoinSides
from tidegate.operators.joins.lookup_join import Lookup, LookupTable
from tidegate.operators.operator import OperatorContext
from tidegate.operators.user_metrics import UserMetrics
from tidegate.storage.ids import OperatorUid, SubtaskIndex

CREATED = "CREATE TABLE planes (tail TEXT, seats INTEGER)"


def executed(database: Path, *statements: str) -> None:
    """Change the database."""
    with closing(sqlite3.connect(database)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def reading(database: Path) -> Callable[[], pl.DataFrame]:
    """A function as the docs have it: it opens a connection, reads, and closes it."""

    def planes() -> pl.DataFrame:
        with closing(sqlite3.connect(database)) as connection:
            return pl.read_database("SELECT tail, seats FROM planes", connection)

    return planes


def looking_up(read: Callable[[], Any], stale_ms: int = 60_000) -> LookupTable:
    """The function of a lookup join, as `lookup_join` makes it."""
    found, schema, changes = reader_of(read)
    assert changes
    sides = JoinSides((("tail",), ("tail",)), (None, None))
    return LookupTable(Lookup(sides, pa.schema({"tail": pa.large_string()}), schema, False, 9), found, 1, stale_ms)


def opened(function: LookupTable) -> LookupTable:
    """As a task begins with it."""
    context = OperatorContext(
        OperatorUid("lookup"), "lookup", SubtaskIndex(0), 1, 1, metrics=UserMetrics("a lookup in a database")
    )
    function.open(BatchContext(context))
    return function


def seats(function: LookupTable) -> list[int | None]:
    """What is known of two planes."""
    found = function.process(pa.RecordBatch.from_pydict({"tail": pa.array(["N1", "N2"], pa.large_string())}))
    assert found is not None
    return [row["seats"] for row in found.sort_by("tail").to_pylist()]


@pytest.mark.slow
def test_rows_meet_those_of_a_database(tmp_path: Path) -> None:
    """In a job, with a function that returns what polars has read over a connection of DB-API."""
    executed(tmp_path / "fleet", CREATED, "INSERT INTO planes VALUES ('N1', 55), ('N2', 180)")
    with local(2) as env:
        legs = env.from_batches(pa.table({"flight": [1, 2, 3], "tail": ["N2", "N3", "N1"]}))
        joined = legs.lookup_join(reading(tmp_path / "fleet"), on="tail", refresh="1min").collect()
        finish(env, tmp_path / "checkpoints")
    assert rows(joined.to_arrow()) == [(1, "N2", 180), (2, "N3", None), (3, "N1", 55)]


def test_changes_are_seen_and_failures_are_not(tmp_path: Path) -> None:
    """Rows meet what the database has now; while it cannot be read, what it had. A task that begins anew reads it."""
    database = tmp_path / "fleet"
    executed(database, CREATED, "INSERT INTO planes VALUES ('N1', 55)")
    function = opened(looking_up(reading(database)))
    assert seats(function) == [55, None]
    executed(database, "INSERT INTO planes VALUES ('N2', 180)")
    until("the new row is known", lambda: seats(function) == [55, 180])
    executed(database, "ALTER TABLE planes RENAME TO hidden", "UPDATE hidden SET seats = 60")
    until("reading fails", lambda: seats(function) == [55, 180] and function._failures > 1)
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        opened(function)
    executed(database, "ALTER TABLE hidden RENAME TO planes")
    assert seats(opened(function)) == [60, 60]
    function.close()


def test_a_database_that_never_answers_fails_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """When what is known is too old: a query that hangs raises nothing by itself."""
    monkeypatch.setattr(lookup_join, "HANGS_S", 0.0)
    known, asked, over = (
        pa.table({"tail": pa.array(["N1"], pa.large_string()), "seats": [55]}),
        threading.Event(),
        threading.Event(),
    )
    reads = iter([known, known])

    def read() -> pa.Table:
        if (table := next(reads, None)) is not None:
            return table
        asked.set()
        over.wait()
        return known

    function = opened(looking_up(read, stale_ms=0))
    asked.wait()
    with pytest.raises(tg.ConfigurationError, match=r"max_stale=.* has not returned .* set a timeout"):
        seats(function)
    over.set()
    function.close()


def test_a_dataframe_of_spark_is_refused() -> None:
    """With what to do: tasks have no Spark."""
    frame = type("DataFrame", (), {"__module__": "pyspark.sql.dataframe"})()
    with (
        local() as env,
        pytest.raises(tg.ConfigurationError, match=r"cannot read a Spark DataFrame.* pl\.read_database"),
    ):
        env.from_batches(pa.table({"tail": ["N1"]})).lookup_join(frame, on="tail")
