"""The sink for tables through SQLAlchemy: SQLite, and MySQL or MariaDB where a server is installed."""

from __future__ import annotations

import datetime
import threading
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
import sqlalchemy as sa
from database_sinks import SinkRun, database_sink
from stores_of_sql import Database

import tidegate as tg
from tidegate.connectors.sql import sink as sink_module

SECOND = datetime.datetime(1970, 1, 1, 0, 0, 1, 1)
ROWS = pa.table({"id": pa.array([1, 2, 3]), "v": ["a", None, "c"]})


@pytest.fixture(params=["sqlite", "mariadb"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return Database(f"sqlite:///{tmp_path}/test.db")
    made: Database = request.getfixturevalue("mariadb")
    return made


def test_rows_are_appended_once(database: Database) -> None:
    """A commit that is repeated changes nothing. Another job writes again."""
    database.execute("CREATE TABLE t (id BIGINT, v VARCHAR(9))")
    run = SinkRun(database_sink(database.url, ROWS.schema))
    prepared = run.write(1, ROWS)
    for _ in range(3):
        run.commit(1, prepared)
    assert database.execute("SELECT id, v FROM t ORDER BY id") == [(1, "a"), (2, None), (3, "c")]
    run.write_and_commit(2, ROWS)
    run.commit(1, prepared)
    assert database.execute("SELECT count(*) FROM t") == [(6,)]
    SinkRun(database_sink(database.url, ROWS.schema), "job-2").write_and_commit(1, ROWS)
    assert database.execute("SELECT count(*) FROM t") == [(9,)]


def test_changes_upsert_and_delete(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last change of each key counts, also over several files of a checkpoint."""
    monkeypatch.setattr(sink_module, "FILE_BYTES", 1)
    database.execute("CREATE TABLE t (id BIGINT PRIMARY KEY, v VARCHAR(9) NOT NULL)")

    def changes(*rows: tuple[str, int, str | None]) -> pa.Table:
        kinds, ids, values = zip(*rows, strict=True)
        return pa.table({"id": pa.array(ids, pa.int64()), "v": pa.array(values, pa.string()), "row_kind": list(kinds)})

    first = changes(("+I", 1, "a"), ("+I", 2, "b"), ("-U", 1, "a"), ("+U", 1, "c"), ("+I", 3, "d"), ("-D", 3, "d"))
    run = SinkRun(database_sink(database.url, first.schema, mode="upsert", keys=["id"], changes=True))
    run.write_and_commit(1, first)
    assert database.execute("SELECT id, v FROM t ORDER BY id") == [(1, "c"), (2, "b")]
    run.write_and_commit(2, changes(("-D", 1, None), ("+I", 4, "x")), changes(("-D", 4, "x")))
    assert database.execute("SELECT id, v FROM t ORDER BY id") == [(2, "b")]


def test_existing_keys(database: Database) -> None:
    """They are replaced, kept, or fail the commit without a trace."""
    database.execute("CREATE TABLE t (id BIGINT PRIMARY KEY, v VARCHAR(9))")
    database.execute("INSERT INTO t VALUES (2, 'old')")
    for number, (mode, keys) in enumerate([("append", []), ("upsert", ["id"])]):
        sink = database_sink(database.url, ROWS.schema, mode=mode, keys=keys, on_conflict="ignore")
        SinkRun(sink, f"job-{number}").write_and_commit(1, ROWS)
        assert database.execute("SELECT id, v FROM t ORDER BY id") == [(1, "a"), (2, "old"), (3, "c")]
    run = SinkRun(database_sink(database.url, ROWS.schema), "job-3")
    prepared = run.write(1, ROWS)
    with pytest.raises(tg.ConfigurationError, match=r"refuses the rows of checkpoint 1 .*correct the table"):
        run.commit(1, prepared)
    database.execute("DELETE FROM t")
    run.commit(1, prepared)
    assert database.execute("SELECT count(*) FROM t") == [(3,)]


def test_values_of_every_type_arrive(database: Database) -> None:
    """In a table that the sink creates."""
    columns = {
        "b": pa.array([True, None]),
        "i": pa.array([2**40, None]),
        "f": pa.array([1.5, None]),
        "t": pa.array(["é, \"'\\\n", ""], pa.large_string()),
        "x": pa.array([b"\0\xff", None]),
        "d": pa.array([datetime.date(2020, 1, 2), None]),
        "n": pa.array([1_000_001, None], pa.timestamp("us")),
    }
    expected = [
        (1, True, 2**40, 1.5, "é, \"'\\\n", b"\0\xff", datetime.date(2020, 1, 2), SECOND),
        (2, None, None, None, "", None, None, None),
    ]  # fmt: skip
    if not database.url.startswith("sqlite"):
        columns["c"] = pa.array([Decimal("-1.50"), None], pa.decimal128(9, 2))
        expected = [(*row, value) for row, value in zip(expected, [Decimal("-1.50"), None], strict=True)]
    table = pa.table({"k": pa.array([1, 2]), **columns})
    SinkRun(database_sink(database.url, table.schema, "t", "upsert", ["k"], create=True)).write_and_commit(1, table)
    with sa.create_engine(database.url).connect() as connection:
        found = sa.Table("t", sa.MetaData(), autoload_with=connection)
        rows = [tuple(row) for row in connection.execute(sa.select(found).order_by(found.c.k))]
    assert rows == expected


def test_floats_that_the_database_does_not_have_are_refused(database: Database) -> None:
    """SQLite would store a null for NaN; MySQL would refuse NaN and infinities only when they are committed."""
    database.execute("CREATE TABLE t (f DOUBLE)")
    run = SinkRun(database_sink(database.url, pa.schema({"f": pa.float64()})))
    with pytest.raises(
        tg.ConfigurationError, match=r"column 'f' \(DOUBLE.*\) has NaN, which the database cannot store"
    ):
        run.write(1, pa.table({"f": [1.0, float("nan")]}))
    infinite = pa.table({"f": [float("-inf")]})
    if database.url.startswith("sqlite"):
        run.write_and_commit(2, infinite)
        assert database.execute("SELECT f FROM t") == [(float("-inf"),)]
        return
    with pytest.raises(tg.ConfigurationError, match="has an infinity, which the database cannot store"):
        run.write(2, infinite)


@pytest.mark.parametrize("names", [["id"], ["id", "w"]])
def test_rows_that_wait_are_refused_if_the_sink_has_other_columns(database: Database, names: list[str]) -> None:
    """A restored program would drop their values, or try to commit them for ten minutes."""
    database.execute("CREATE TABLE t (id BIGINT, v VARCHAR(9), w VARCHAR(9))")
    before = SinkRun(database_sink(database.url, ROWS.schema))
    prepared = before.write(1, ROWS)
    changed = pa.schema([(name, pa.int64() if name == "id" else pa.string()) for name in names])
    after = SinkRun(database_sink(database.url, changed))
    after.files = before.files
    with pytest.raises(tg.ConfigurationError, match="not committed yet have the columns 'id' int64, 'v' string, and"):
        after.commit(1, prepared)
    assert database.execute("SELECT count(*) FROM t") == [(0,)]


def test_dates_that_python_does_not_have_are_refused(database: Database) -> None:
    """Before the checkpoint, because the drivers take Python values: the commit would be tried again without end."""
    database.execute("CREATE TABLE t (d DATE)")
    run = SinkRun(database_sink(database.url, pa.schema({"d": pa.date32()})))
    days = pa.table({"d": pa.array([2_932_897], pa.int32()).cast(pa.date32())})
    with pytest.raises(tg.ConfigurationError, match=r"outside of the range of DATE \(years 1 to 9999\)"):
        run.write(1, days)


@pytest.mark.parametrize(
    ("columns", "stream", "options", "message"),
    [
        ("id BIGINT", {"id": pa.string()}, {}, "string does not fit BIGINT"),
        ("id BIGINT, n BIGINT NOT NULL", {"id": pa.int64()}, {}, "'n' of the table is NOT NULL without a default"),
        ("id BIGINT", {"id": pa.int64()}, {"mode": "upsert", "keys": ["id"]}, "needs a primary key or a unique index"),
        ("id VARCHAR(9) PRIMARY KEY", {"id": pa.string()}, {"mode": "upsert", "keys": ["id"]}, None),
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    database: Database, columns: str, stream: dict[str, pa.DataType], options: dict[str, object], message: str | None
) -> None:
    """When the program is made. A text key needs a collation that compares bytes, which MySQL has not by default."""
    database.execute(f"CREATE TABLE t ({columns})")
    if message is None:
        message = "its collation" if not database.url.startswith("sqlite") else None
    if message is None:
        database.execute("CREATE TABLE other (id VARCHAR(9) COLLATE NOCASE PRIMARY KEY)")
        database_sink(database.url, pa.schema(stream), **options)  # type: ignore[arg-type]
        with pytest.raises(tg.ConfigurationError, match="collation NOCASE"):
            database_sink(database.url, pa.schema(stream), "other", **options)  # type: ignore[arg-type]
        return
    with pytest.raises(tg.ConfigurationError, match=message):
        database_sink(database.url, pa.schema(stream), **options)  # type: ignore[arg-type]


def test_two_processes_commit_once(database: Database) -> None:
    """Whoever stores the token first writes the rows."""
    database.execute("CREATE TABLE t (id BIGINT, v VARCHAR(9))")
    run = SinkRun(database_sink(database.url, ROWS.schema))
    prepared = run.write(1, ROWS)
    threads = [threading.Thread(target=run.commit, args=(1, prepared)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert database.execute("SELECT count(*) FROM t") == [(3,)]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite://", "in memory"),
        ("postgresql+psycopg://x/y", "use to_postgres"),
        ("no such thing", "cannot be used"),
        ("mysql+nodriver://x/y", "cannot be used"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: str, message: str) -> None:
    """With what to give."""
    with pytest.raises(tg.ConfigurationError, match=message):
        database_sink(url, ROWS.schema)
