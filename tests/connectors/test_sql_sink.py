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


@pytest.mark.parametrize("micros", [-1, 86_400_000_000])
def test_a_time_that_is_not_one_of_a_day_is_refused(tmp_path: Path, micros: int) -> None:
    """Python shows it modulo 24 hours, and that is what the database would have."""
    database = Database(f"sqlite:///{tmp_path}/rows.db")
    database.execute("CREATE TABLE t (at TIME)")
    run = SinkRun(database_sink(database.url, pa.schema({"at": pa.time64("us")})))
    counts = pa.array([0, micros], pa.int64())
    rows = pa.table({"at": pa.Array.from_buffers(pa.time64("us"), 2, counts.buffers())})
    with pytest.raises(tg.ConfigurationError, match="column 'at' is not a time between 00:00 and 24:00"):
        run.write(1, rows)


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


@pytest.mark.parametrize(
    ("type_text", "values", "message"),
    [
        ("BINARY(4)", pa.array([b"ab"]), "has not 4 bytes; the database would add zeros"),
        ("VARBINARY(4)", pa.array([b"abcde"]), "more than 4 bytes"),
        ("CHAR(4)", pa.array(["ab "]), "ends with a space, which the database drops from a CHAR"),
        ("TINYTEXT", pa.array(["é" * 128]), "more than 255 bytes"),
        ("TINYBLOB", pa.array([b"x" * 256]), "more than 255 bytes"),
        ("TIMESTAMP NULL", pa.array([0], pa.timestamp("s", "UTC")), "years 1970 to 2038"),
        ("TIMESTAMP(6) NULL", pa.array([2**31 * 1_000_000], pa.timestamp("us", "UTC")), "years 1970 to 2038"),
    ],
)
def test_values_that_mysql_would_change_or_refuse_fail_before_the_checkpoint(
    mariadb: Database, type_text: str, values: pa.Array, message: str
) -> None:
    """Shorter BINARY values would get zeros, which a later deletion of the key would not find."""
    mariadb.execute(f"CREATE TABLE t (v {type_text})")
    run = SinkRun(database_sink(mariadb.url, pa.schema([("v", values.type)])))
    with pytest.raises(tg.ConfigurationError, match=message):
        run.write(1, pa.table({"v": values}))


@pytest.mark.parametrize("type_text", ["FLOAT(7, 2)", "DOUBLE(7, 2)"])
def test_floats_of_mysql_with_a_number_of_digits_are_refused(mariadb: Database, type_text: str) -> None:
    """The server would round 1.239 to 1.24."""
    mariadb.execute(f"CREATE TABLE t (v {type_text})")
    with pytest.raises(tg.ConfigurationError, match="fixed number of digits"):
        database_sink(mariadb.url, pa.schema([("v", pa.float32())]))


def test_keys_that_mysql_compares_without_their_last_spaces_are_refused(mariadb: Database) -> None:
    """Most collations of MySQL treat 'a' and 'a ' as one key, so one row would replace or delete the other one."""
    rows = pa.table({"k": ["a", "a "], "v": pa.array([1, 2], pa.int32())})
    for collation in ("utf8mb4_bin", "utf8mb4_nopad_bin"):
        table = f"t_{collation}"
        mariadb.execute(f"CREATE TABLE {table} (k VARCHAR(9) COLLATE {collation} PRIMARY KEY, v INT)")
        run = SinkRun(database_sink(mariadb.url, rows.schema, table, "upsert", ["k"]))
        if "nopad" in collation:
            run.write_and_commit(1, rows)
            assert sorted(mariadb.execute(f"SELECT k, v FROM {table}")) == [("a", 1), ("a ", 2)]
        else:
            with pytest.raises(tg.ConfigurationError, match=r"'a '.* ends with a space"):
                run.write(1, rows)


def test_a_percent_sign_in_a_name_is_refused_for_upserts_of_mysql(mariadb: Database) -> None:
    """The driver writes the statement wrongly. Rows that are appended may have such columns, and keys too."""
    rows = pa.table({"a%b": [1], "c%d": [2]})
    with pytest.raises(tg.ConfigurationError, match="'c%d': drivers of MySQL"):
        database_sink(mariadb.url, rows.schema, mode="upsert", keys=["a%b"], create=True)
    SinkRun(database_sink(mariadb.url, rows.schema, create=True)).write_and_commit(1, rows)
    assert mariadb.execute("SELECT * FROM t") == [(1, 2)]


def test_mysql_gets_unsigned_and_binary_columns(mariadb: Database) -> None:
    """In a table that the sink creates."""
    rows = pa.table({"k": [b"\x00", b"\x00\x00"], "v": pa.array([2**64 - 1, 0], pa.uint64())})
    SinkRun(database_sink(mariadb.url, rows.schema, mode="upsert", keys=["k"], create=True)).write_and_commit(1, rows)
    assert sorted(mariadb.execute("SELECT k, v FROM t")) == [(b"\x00", 2**64 - 1), (b"\x00\x00", 0)]


@pytest.mark.parametrize(
    ("ddl", "message"),
    [
        ("CREATE TABLE t (a BIGINT CHECK (a < 0))", "CONSTRAINT"),
        ("CREATE TABLE t (a BIGINT) PARTITION BY RANGE (a) (PARTITION p VALUES LESS THAN (0))", "no partition"),
    ],
)
def test_constraints_of_mysql_fail_the_commit_at_once(mariadb: Database, ddl: str, message: str) -> None:
    """Its drivers report them as if the server were away, and a commit would be repeated for minutes."""
    mariadb.execute(ddl)
    rows = pa.table({"a": [1]})
    with pytest.raises(tg.ConfigurationError, match=message):
        SinkRun(database_sink(mariadb.url, rows.schema)).write_and_commit(1, rows)


def test_a_column_that_was_dropped_fails_the_commit_at_once(database: Database) -> None:
    """With the reason, and the rows wait."""
    database.execute("CREATE TABLE t (id BIGINT, v VARCHAR(9))")
    run = SinkRun(database_sink(database.url, ROWS.schema))
    prepared = run.write(1, ROWS)
    database.execute("ALTER TABLE t DROP COLUMN v")
    with pytest.raises(tg.ConfigurationError, match="The rows wait in the checkpoint"):
        run.commit(1, prepared)
    database.execute("ALTER TABLE t ADD COLUMN v VARCHAR(9)")
    run.commit(1, prepared)
    assert database.execute("SELECT count(*) FROM t") == [(3,)]


def test_sqlite_deletes_exactly_the_key(tmp_path: Path) -> None:
    """Also if the column ignores case, and only its unique index compares bytes."""
    database = Database(f"sqlite:///{tmp_path}/test.db")
    database.execute("CREATE TABLE t (k TEXT COLLATE NOCASE, v INT)")
    database.execute("CREATE UNIQUE INDEX u ON t (k COLLATE BINARY)")
    database.execute("INSERT INTO t VALUES ('x', 1), ('X', 2)")
    gone = pa.table({"k": ["x"], "v": pa.array([1], pa.int32()), "row_kind": ["-D"]})
    SinkRun(database_sink(database.url, gone.schema, mode="upsert", keys=["k"], changes=True)).write_and_commit(1, gone)
    assert database.execute("SELECT k, v FROM t") == [("X", 2)]


def test_json_numbers_are_refused_for_sqlite(tmp_path: Path) -> None:
    """A column of the type JSON would store 1.10 as 1.1, and an integer of 21 digits as a float."""
    database = Database(f"sqlite:///{tmp_path}/test.db")
    database.execute("CREATE TABLE t (v JSON)")
    run = SinkRun(database_sink(database.url, pa.schema([("v", pa.string())])))
    run.write_and_commit(1, pa.table({"v": ['{"a": 1.10}', '"1.10"', "null"]}))
    assert database.execute("SELECT v FROM t") == [('{"a": 1.10}',), ('"1.10"',), ("null",)]
    with pytest.raises(tg.ConfigurationError, match=r"' 1\.10'.* is a JSON number"):
        run.write(2, pa.table({"v": [" 1.10"]}))


def test_names_that_the_sink_uses_are_refused(database: Database) -> None:
    """A table of tokens as the table of rows, and the hidden columns of staged rows."""
    for name in ("tidegate_deleted", "tidegate_file"):
        with pytest.raises(tg.ConfigurationError, match=f"'{name}' is used by tidegate"):
            database_sink(database.url, pa.schema([(name, pa.int64())]), create=True)
    with pytest.raises(tg.ConfigurationError, match="is the table of commit tokens"):
        database_sink(database.url, ROWS.schema, "tidegate_commits", create=True)


def test_no_table_is_created_for_keys_of_floats(database: Database) -> None:
    """The program would be refused again after its keys were corrected, because the table had floats."""
    floats = pa.schema([("k", pa.float64())])
    with pytest.raises(tg.ConfigurationError, match="cannot be a key"):
        database_sink(database.url, floats, mode="upsert", keys=["k"], create=True)
    database_sink(database.url, pa.schema([("k", pa.int64())]), mode="upsert", keys=["k"], create=True)


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
