"""Queries of databases as sources: every row once, in ranges, from any position, or one clear error."""

from __future__ import annotations

import datetime
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from local_jobs import finish, local, rows
from postgres_server import PostgresDatabase
from source_contract import check_source, read_split, rows_of
from stores_of_sql import Database

import tidegate as tg
from tidegate.connectors.sql.source import sql_source

TYPES = pa.schema([("id", pa.int64()), ("v", pa.string())])
EMPTY = pa.schema([])


def sqlite(tmp_path: Path, count: int = 100) -> Database:
    """A table with rows that differ only in some columns, in no order."""
    database = Database(f"sqlite:///{tmp_path}/test.db")
    database.execute("CREATE TABLE t (id INTEGER, v TEXT)")
    values = ", ".join(f"({i * 37 % count // 2 - 5}, 'v{i % 3}')" for i in range(count))
    database.execute(f"INSERT INTO t VALUES {values}")
    return database


@pytest.mark.slow
@pytest.mark.parametrize("partition_by", [None, "id"])
def test_a_query_keeps_the_contract_of_sources(tmp_path: Path, partition_by: str | None) -> None:
    """From every position, with reads of every size, in ranges of a column or in one."""
    database = sqlite(tmp_path)
    source = sql_source(database.url, "SELECT id, v FROM t;", TYPES, partition_by, 7)
    assert len(source.splits()) == (1 if partition_by is None else 7)
    found = check_source(source)
    assert sorted((row["id"], row["v"]) for row in found) == sorted(database.execute("SELECT id, v FROM t"))


@pytest.mark.parametrize("partition_by", ["id", "day", "at", "zoned"])
def test_ranges_of_a_query_of_postgres_have_each_row_once(postgres: PostgresDatabase, partition_by: str) -> None:
    """With ranges of integers, dates and timestamps. Each read connects, which takes a tenth of a second."""
    postgres.execute(
        "CREATE TABLE t AS SELECT i % 50 AS id, date '1969-12-20' + i % 30 AS day, timestamp '1969-12-31 23:59:00' + "
        "i * interval '1.5 s' AS at, timestamptz '2020-01-01 00:00:00+01' + i * interval '1 h' AS zoned, "
        "'{}'::json AS j FROM generate_series(1, 120) i"
    )
    source = sql_source(postgres.dsn, "SELECT * FROM t -- all", EMPTY, partition_by, 5)
    assert len(source.splits()) == 5
    reader = source.reader()
    found = [row for split in source.splits() for row in rows_of(read_split(source, reader, split, 7))]
    reader.close()
    expected = postgres.execute("SELECT id, day, at, zoned FROM t")
    assert sorted(tuple(row.values())[:-1] for row in found) == sorted(expected)


def test_a_query_of_postgres_keeps_the_contract(postgres: PostgresDatabase) -> None:
    """With a range that has no lower limit, one that has both, and one that has no upper limit."""
    postgres.execute(
        "CREATE TABLE t AS SELECT i % 5 AS id, 'v' || i AS v, '{}'::json AS j FROM generate_series(1, 20) i"
    )
    source = sql_source(postgres.dsn, "SELECT * FROM t -- all", EMPTY, "id", 3)
    found = check_source(source)
    assert len(source.splits()) == 3
    assert sorted((row["id"], row["v"]) for row in found) == sorted(postgres.execute("SELECT id, v FROM t"))


def test_types_of_postgres(postgres: PostgresDatabase) -> None:
    """Types and values of columns; numeric has its digits from the table, or from the program."""
    query = (
        "SELECT 1::smallint AS a, 1.5::numeric(10, 2) AS b, '{\"x\": 1}'::jsonb AS c, 'é'::varchar(3) AS d, true AS e, "
        "'\\xff'::bytea AS f, 1.25::real AS g, date '2020-01-02' AS h, time '01:02:03' AS i, 2.5::numeric AS j, "
        "NULL::bigint AS k"
    )
    schema = {"j": pa.decimal128(6, 1)}
    source = sql_source(postgres.dsn, query, pa.schema(list(schema.items())), None, 1)
    assert check_source(source) == [
        {
            "a": 1,
            "b": Decimal("1.50"),
            "c": '{"x": 1}',
            "d": "é",
            "e": True,
            "f": b"\xff",
            "g": 1.25,
            "h": datetime.date(2020, 1, 2),
            "i": datetime.time(1, 2, 3),
            "j": Decimal("2.5"),
            "k": None,
        }
    ]
    with pytest.raises(tg.ConfigurationError, match=r"'j' is numeric.*schema="):
        sql_source(postgres.dsn, query, EMPTY, None, 1)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELECT 1::numeric AS x", "give schema="),
        ("SELECT '1.2.3.4'::inet AS x", "cast it to text"),
        ("SELECT ARRAY[1] AS x", "cast it to text"),
        ("SELECT 1 AS x, 2 AS x", "two columns of one name"),
        ("SELECT * FROM none", "does not exist"),
        ("t", "give a SELECT"),
        ("", "give a SELECT"),
    ],
)
def test_a_query_that_cannot_be_read_is_refused(postgres: PostgresDatabase, query: str, message: str) -> None:
    """When the program is made."""
    with pytest.raises(tg.ConfigurationError, match=message):
        sql_source(postgres.dsn, query, EMPTY, None, 1)


@pytest.mark.parametrize(
    ("value", "wanted", "message"),
    [
        ("'0x10'", pa.int64(), "0x10'.* is not a value"),
        ("'1e999'", pa.float64(), "is not a value"),
        ("1e300", pa.float32(), "too great"),
        ("16777217", pa.float32(), r"16777217 would become 16777216\.0"),
        ("'0.1234567890123456789'", pa.float64(), "would become"),
        ("1.5", pa.int64(), "not an integer"),
        ("1700000000", pa.timestamp("us"), "1700000000 is of the Python type int"),
        ("1700000000", pa.date32(), "1700000000 is of the Python type int"),
        ("2", pa.bool_(), "neither 0 nor 1"),
        ("'2026-01-01 10:00:00.5'", pa.timestamp("s"), "is not a value"),
        ("'2026-01-01 10:00:00+02'", pa.timestamp("us"), "is not a value"),
        ("'10:00:00.5'", pa.time32("s"), "is not a value"),
        ("x'ff'", pa.string(), "utf8"),
        ("7", pa.string(), "7 is of the Python type int"),
        ("'x'", pa.binary(), "'x' is of the Python type str"),
    ],
)
def test_a_value_that_another_type_would_change_is_an_error(
    tmp_path: Path, value: str, wanted: pa.DataType, message: str
) -> None:
    """SQLite's columns have values of any type. The value is never cut, or read with another meaning."""
    database = Database(f"sqlite:///{tmp_path}/test.db")
    database.execute("CREATE TABLE t (x)")
    database.execute(f"INSERT INTO t VALUES ({value})")
    source = sql_source(database.url, "SELECT x FROM t", pa.schema([("x", wanted)]), None, 1)
    with pytest.raises(tg.ConfigurationError, match=rf"column 'x' has a value that does not fit.*({message})"):
        check_source(source)


@pytest.mark.parametrize(
    ("values", "wanted", "found"),
    [
        (["1.0", "2", "'+3'", "NULL"], pa.int32(), [1, 2, 3, None]),
        (["'23:59:59.5'"], pa.time64("us"), [datetime.time(23, 59, 59, 500_000)]),
        (["'1.10'"], pa.decimal128(5, 2), [Decimal("1.10")]),
        (["1", "0"], pa.bool_(), [True, False]),
        (["'2026-01-01 10:00:00'"], pa.timestamp("ms"), [datetime.datetime(2026, 1, 1, 10)]),
        (["1.5", "2"], pa.float32(), [1.5, 2.0]),
    ],
)
def test_values_of_sqlite_are_read_as_other_types(
    tmp_path: Path, values: list[str], wanted: pa.DataType, found: list[object]
) -> None:
    """A value is converted where it stays the same."""
    database = Database(f"sqlite:///{tmp_path}/test.db")
    for number, value in enumerate(values):
        database.execute(f"CREATE TABLE t{number} (x)")
        database.execute(f"INSERT INTO t{number} VALUES ({value})")
        source = sql_source(database.url, f"SELECT x FROM t{number}", pa.schema([("x", wanted)]), None, 1)
        assert [row["x"] for row in check_source(source)] == [found[number]]


def test_a_file_of_sqlite_that_does_not_exist_is_not_created(tmp_path: Path) -> None:
    """A wrong path would give an empty database, and an error about its tables."""
    file = tmp_path / "none.db"
    with pytest.raises(tg.ConfigurationError, match=r"from_sql: there is no file .*none\.db"):
        sql_source(f"sqlite:///{file}", "SELECT id, v FROM t", TYPES, None, 1)
    assert not file.exists()


def test_numeric_columns_are_read_as_integers_and_floats(postgres: PostgresDatabase) -> None:
    """If each value is one: no digits after the point are dropped."""
    query = "SELECT 7::numeric(5, 0) AS a, 8.00::numeric(5, 2) AS b, 1.25::numeric(5, 2) AS c"
    schema = pa.schema([("a", pa.int32()), ("c", pa.float64())])
    found = check_source(sql_source(postgres.dsn, query, schema, None, 1))
    assert found == [{"a": 7, "b": Decimal("8.00"), "c": 1.25}]
    wrong = sql_source(postgres.dsn, query, pa.schema([("c", pa.int64())]), None, 1)
    with pytest.raises(tg.ConfigurationError, match=r"column 'c' has a value that does not fit int64.*1\.25"):
        check_source(wrong)


@pytest.mark.parametrize(
    ("number", "wanted", "found"),
    [
        ("4.00::numeric(5, 2)", pa.int64(), 4),
        ("-70.0::numeric", pa.int8(), -70),
        ("0.1::numeric(38, 20)", pa.float32(), 0.1),
        ("0.1::numeric", pa.float64(), 0.1),
        ("16777216.00::numeric(10, 2)", pa.float32(), 16777216.0),
        ("12345678901234567000::numeric", pa.float64(), 12345678901234567000.0),
    ],
)
def test_a_numeric_value_is_read_as_another_type_that_returns_it(
    postgres: PostgresDatabase, number: str, wanted: pa.DataType, found: float
) -> None:
    """A float returns the number of its shortest text, so 0.1 is one."""
    source = sql_source(postgres.dsn, f"SELECT {number} AS x", pa.schema([("x", wanted)]), None, 1)
    assert check_source(source) == [{"x": pa.scalar(found, wanted).as_py()}]


@pytest.mark.parametrize(
    ("number", "wanted"),
    [
        ("16777217::numeric(10, 0)", pa.float32()),
        ("16777217", pa.float32()),
        ("1234567890123456789.25::numeric(38, 2)", pa.float64()),
        ("0.12345678901234567890::numeric(30, 20)", pa.float64()),
        ("9007199254740993::bigint", pa.float64()),
        ("1e-400::numeric", pa.float64()),
        ("1.25e-44::numeric", pa.float32()),
        ("'16777217'", pa.float32()),
        ("4.01::numeric(5, 2)", pa.int64()),
        ("128.0::numeric", pa.int8()),
    ],
)
def test_a_number_whose_digits_would_be_lost_is_an_error(
    postgres: PostgresDatabase, number: str, wanted: pa.DataType
) -> None:
    """Other sources refuse it too."""
    source = sql_source(postgres.dsn, f"SELECT {number} AS x", pa.schema([("x", wanted)]), None, 1)
    with pytest.raises(tg.ConfigurationError, match=f"column 'x' has a value that does not fit {wanted}"):
        check_source(source)


@pytest.mark.parametrize(
    ("column", "wanted"),
    [
        ("now()", pa.timestamp("us")),
        ("now()::timestamp", pa.timestamp("us", "UTC")),
        ("now()::timestamp", pa.date32()),
        ("1", pa.timestamp("us")),
        ("1", pa.bool_()),
        ("1.5::float8", pa.int64()),
    ],
)
def test_a_type_of_another_meaning_is_refused(postgres: PostgresDatabase, column: str, wanted: pa.DataType) -> None:
    """When the program is made."""
    with pytest.raises(tg.ConfigurationError, match=r"column 'x' has type .*, and schema= has"):
        sql_source(postgres.dsn, f"SELECT {column} AS x", pa.schema([("x", wanted)]), None, 1)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("time '24:00'", "the time 24:00"),
        ("date 'infinity'", "an infinite time"),
        ("timestamp '-infinity'", "an infinite time"),
    ],
)
def test_times_that_arrow_does_not_have_are_an_error(postgres: PostgresDatabase, value: str, message: str) -> None:
    """They would be other times."""
    source = sql_source(postgres.dsn, f"SELECT {value} AS x", EMPTY, None, 1)
    with pytest.raises(tg.ConfigurationError, match=f"column 'x' has {message}"):
        check_source(source)


@pytest.mark.parametrize("value", ["date 'infinity'", "timestamp '0044-03-15 BC'"])
def test_ranges_of_times_that_python_does_not_have_are_refused(postgres: PostgresDatabase, value: str) -> None:
    """With what to do, before the job starts."""
    query = f"SELECT {value} AS x UNION ALL SELECT '2020-01-01'"
    with pytest.raises(tg.ConfigurationError, match=r"infinite, or outside of the years 1 to 9999.*Filter"):
        sql_source(postgres.dsn, query, EMPTY, "x", 3)


@pytest.mark.parametrize("partition_by", ["id", "large", "day", "at", "zoned"])
def test_ranges_of_a_query_of_mysql_have_each_row_once(mariadb: Database, partition_by: str) -> None:
    """With times in UTC, whatever the time zone of the server is, and floats with all of their digits."""
    mariadb.execute("SET GLOBAL time_zone = '+05:00'")
    try:
        mariadb.execute(
            "CREATE TABLE t (id BIGINT, large BIGINT UNSIGNED, day DATE, at DATETIME(3), zoned TIMESTAMP(3) NULL, "
            "f FLOAT)"
        )
        values = ", ".join(
            f"({i - 20}, {2**64 - 1 - i}, DATE '1969-12-20' + INTERVAL {i} DAY, TIMESTAMP '1969-12-31 23:59:00.5' + "
            f"INTERVAL {i} SECOND, FROM_UNIXTIME({1_000_000 + i}), {16_777_176 + i})"
            for i in range(40)
        )
        mariadb.execute(f"INSERT INTO t VALUES {values}")
        types = {"id": pa.int64(), "large": pa.uint64(), "day": pa.date32(), "at": pa.timestamp("ms")}
        schema = pa.schema(types | {"zoned": pa.timestamp("ms", "UTC"), "f": pa.float32()})
        source = sql_source(mariadb.url, "SELECT * FROM t", schema, partition_by, 5)
        assert len(source.splits()) == 5
        reader = source.reader()
        rows = [row for split in source.splits() for row in rows_of(read_split(source, reader, split, 7))]
        reader.close()
        found = sorted((tuple(row.values()) for row in rows), key=lambda row: row[0])
        start, unix = datetime.datetime(1969, 12, 31, 23, 59, 0, 500_000), datetime.datetime(1970, 1, 1)
        expected = [
            (
                i - 20,
                2**64 - 1 - i,
                datetime.date(1969, 12, 20) + datetime.timedelta(i),
                start + datetime.timedelta(seconds=i),
                (unix + datetime.timedelta(seconds=1_000_000 + i)).replace(tzinfo=datetime.UTC),
                16_777_176.0 + i,
            )
            for i in range(40)
        ]
        assert found == expected
    finally:
        mariadb.execute("SET GLOBAL time_zone = 'SYSTEM'")


def test_rows_that_would_be_in_no_range_are_refused(tmp_path: Path) -> None:
    """A null in the column of ranges, and a column without an order."""
    database = sqlite(tmp_path)
    database.execute("INSERT INTO t VALUES (NULL, 'x')")
    with pytest.raises(tg.ConfigurationError, match="1 of 101 rows have NULL in partition_by='id'"):
        sql_source(database.url, "SELECT id, v FROM t", TYPES, "id", 4)
    with pytest.raises(tg.ConfigurationError, match="integers, dates or timestamps"):
        sql_source(database.url, "SELECT id, v FROM t", TYPES, "v", 4)
    with pytest.raises(tg.ConfigurationError, match="no column 'x'"):
        sql_source(database.url, "SELECT id, v FROM t", TYPES, "x", 4)


@pytest.mark.parametrize(
    ("query", "schema", "partition_by"),
    [
        ("SELECT id, v FROM t WHERE id > 3", TYPES, "id"),
        ("SELECT id AS v, v AS id FROM t", pa.schema([("v", pa.int64()), ("id", pa.string())]), "v"),
        ("SELECT id, v FROM t", TYPES, None),
    ],
)
def test_a_restored_job_reads_the_same_query(
    tmp_path: Path, query: str, schema: pa.Schema, partition_by: str | None
) -> None:
    """Ranges of another query would be read in part, and others twice. The number of ranges may change."""
    database = sqlite(tmp_path)
    splits = sql_source(database.url, "SELECT id, v FROM t", TYPES, "id", 4).splits()
    sql_source(database.url, " SELECT id, v FROM t ", TYPES, "id", 2).check_restored(splits)
    with pytest.raises(tg.ConfigurationError, match="it read another query"):
        sql_source(database.url, query, schema, partition_by, 4).check_restored(splits)


def test_rows_that_come_after_the_ranges_were_chosen_are_read(tmp_path: Path) -> None:
    """Below the first, above the last range, and without a value."""
    database = sqlite(tmp_path, 10)
    source = sql_source(database.url, "SELECT id, v FROM t", TYPES, "id", 4)
    database.execute("INSERT INTO t VALUES (NULL, 'late'), (-1000, 'late'), (1000, 'late')")
    assert sorted(str(row["id"]) for row in check_source(source) if row["v"] == "late") == ["-1000", "1000", "None"]


@pytest.mark.parametrize(
    "change",
    ["DELETE FROM t WHERE id = -5", "UPDATE t SET v = 'other' WHERE id = -5", "INSERT INTO t VALUES (-6, 'new')"],
)
def test_rows_that_changed_after_they_were_read_fail_the_reader(tmp_path: Path, change: str) -> None:
    """A reader that continues in a range compares what was read. Changes after its position are read."""
    database = sqlite(tmp_path)
    source = sql_source(database.url, "SELECT id, v FROM t", TYPES, None, 1)
    (split,) = source.splits()
    reader = source.reader()
    first = reader.read(split, 0, 10)
    reader.close()
    assert first.payload is not None
    after = tg.SourceSplit(split.split_id, first.payload)
    database.execute("UPDATE t SET v = 'later' WHERE id > 30")
    assert reader.read(after, 10, 5).next_offset == 15
    reader.close()
    database.execute(change)
    with pytest.raises(tg.ConfigurationError, match="first 10 rows were read before, and have changed"):
        reader.read(after, 10, 5)


def test_values_that_do_not_fit_are_errors(tmp_path: Path) -> None:
    """SQLite stores anything in a column. An infinite time of PostgreSQL has no value in Arrow."""
    database = sqlite(tmp_path)
    database.execute("INSERT INTO t VALUES (1, 'a'), ('seven', 'b')")
    source = sql_source(database.url, "SELECT id, v FROM t", TYPES, None, 1)
    with pytest.raises(tg.ConfigurationError, match=r"'id' has a value that does not fit int64"):
        check_source(source)
    with pytest.raises(tg.ConfigurationError, match="the query has the columns"):
        sql_source(database.url, "SELECT v FROM t", TYPES, None, 1)
    with pytest.raises(tg.ConfigurationError, match="give schema="):
        sql_source(database.url, "SELECT v FROM t", EMPTY, None, 1)


def test_an_infinite_time_is_an_error(postgres: PostgresDatabase) -> None:
    """It has no value in Arrow."""
    source = sql_source(postgres.dsn, "SELECT 'infinity'::timestamp AS at", EMPTY, None, 1)
    with pytest.raises(tg.ConfigurationError, match="infinite time"):
        check_source(source)


@pytest.mark.slow
def test_a_job_reads_ranges_in_parallel(tmp_path: Path, postgres: PostgresDatabase) -> None:
    """Each row once, by two subtasks, from both kinds of databases."""
    database = sqlite(tmp_path)
    postgres.execute("CREATE TABLE t AS SELECT i::bigint AS id, 'v' || i AS v FROM generate_series(1, 1000) i")
    for address, options in ((database.url, {"schema": TYPES}), (postgres.dsn, {})):
        given: dict[str, Any] = options
        with local(2) as env:
            found = env.from_sql(address, "SELECT id, v FROM t", partition_by="id", partitions=6, **given).collect()
            finish(env, tmp_path / f"checkpoints-{len(given)}")
        expected = database.execute("SELECT id, v FROM t") if given else postgres.execute("SELECT id, v FROM t")
        assert rows(found.to_arrow()) == sorted(expected, key=repr)


def test_numeric_values_that_are_not_numbers(postgres: PostgresDatabase) -> None:
    """Floats have them, as PostgreSQL casts them, and texts, as PostgreSQL writes them. Decimals do not."""
    values = "(1, 'NaN'::numeric), (2, 'Infinity'), (3, '-Infinity'), (4, 1.5), (5, NULL)"
    query = f"SELECT * FROM (VALUES {values}) AS t(id, x)"
    written = [row[0] for row in postgres.execute(f"SELECT x::text FROM ({query}) AS t ORDER BY id")]
    assert written == ["NaN", "Infinity", "-Infinity", "1.5", None]
    numbers = [math.nan, math.inf, -math.inf, 1.5, None]
    for wanted, expected in ((pa.float64(), numbers), (pa.float32(), numbers), (pa.string(), written)):
        source = sql_source(postgres.dsn, query, pa.schema([("x", wanted)]), None, 1)
        (split,) = source.splits()
        batch = source.reader().read(split, 0, 10).batch
        assert batch is not None
        found = dict(zip(batch["id"].to_pylist(), batch["x"].to_pylist(), strict=True))
        assert str([found[number] for number in sorted(found)]) == str(expected)
    for number in ("NaN", "Infinity", "-Infinity"):
        query = f"SELECT '{number}'::numeric AS x"
        source = sql_source(postgres.dsn, query, pa.schema([("x", pa.decimal128(9, 2))]), None, 1)
        with pytest.raises(tg.ConfigurationError, match=f"column 'x' has a value that does not fit .*'{number}'"):
            check_source(source)


def test_char_of_postgres_has_its_spaces(postgres: PostgresDatabase) -> None:
    """Padding stays, as with JDBC and Spark. PostgreSQL ignores it in comparisons, so a filter finds the value."""
    postgres.execute("CREATE TABLE t (c char(5))")
    postgres.execute("INSERT INTO t VALUES ('ab'), ('abcde'), (NULL)")
    rows = check_source(sql_source(postgres.dsn, "SELECT * FROM t", EMPTY, None, 1))
    assert [row["c"] for row in rows] == ["ab   ", "abcde", None]
    rows = check_source(sql_source(postgres.dsn, "SELECT c::text AS c FROM t WHERE c = 'ab'", EMPTY, None, 1))
    assert [row["c"] for row in rows] == ["ab"]
