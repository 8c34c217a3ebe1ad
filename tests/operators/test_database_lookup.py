"""Lookups in tables of databases: the rows of exactly these keys, from as few queries as needed, or one clear error."""

from __future__ import annotations

import datetime
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from local_jobs import finish, local, rows
from postgres_server import PostgresDatabase
from stores_of_sql import Database

import tidegate as tg
from tidegate.connectors.sql.client import DatabaseError
from tidegate.connectors.sql.columns import TableColumn
from tidegate.connectors.sql.lookup import (
    KeyedTable,
    LookupLimits,
    LookupSession,
    key_parts,
    lookup_limits,
    open_table,
)
from tidegate.operators.functions.batch_functions import BatchContext
from tidegate.operators.joins.database_lookup import DatabaseLookup
from tidegate.operators.joins.join_operator import JoinSides
from tidegate.operators.joins.lookup_join import Lookup
from tidegate.operators.operator import OperatorContext
from tidegate.operators.user_metrics import UserMetrics
from tidegate.storage.ids import OperatorUid, SubtaskIndex

AnyDatabase = Database | PostgresDatabase
FLEET = "CREATE TABLE planes (tail VARCHAR(20), seats BIGINT)"


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> AnyDatabase:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return Database(f"sqlite:///{tmp_path}/test.db")
    made: AnyDatabase = request.getfixturevalue(request.param)
    return made


def address(database: AnyDatabase) -> str:
    """The address of a database."""
    return database.dsn if isinstance(database, PostgresDatabase) else database.url


def table_of(database: AnyDatabase, table: str = "planes", **options: Any) -> tg.DatabaseTable:
    """The table, as a program gives it."""
    return tg.DatabaseTable(address(database), table, **options)


@dataclass
class Clock:
    """A clock that stands still until it is moved, or paused for."""

    now: float = 1000.0
    pauses: list[float] = field(default_factory=list)
    then: Callable[[], object] = lambda: None

    def read(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
        self.then()


def opened(
    table: KeyedTable,
    limits: LookupLimits,
    stream: pa.Schema,
    on: Sequence[tuple[str, str]],
    clock: Clock,
    *,
    inner: bool = False,
    rows_max: int = 1_000_000,
) -> DatabaseLookup:
    """The join in a task that begins."""
    keys = tuple(left for left, _ in on), tuple(right for _, right in on)
    lookup = Lookup(JoinSides(keys, (None, None)), stream, table.schema, inner, rows_max)
    function = DatabaseLookup(lookup, table, limits, clock.read, clock.pause)
    context = OperatorContext(OperatorUid("lookup"), "lookup", SubtaskIndex(0), 1, 1, metrics=UserMetrics("lookup"))
    function.open(BatchContext(context))
    return function


def join(function: DatabaseLookup, batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
    """The rows of the result for a batch, sorted."""
    found = function.process(batch)
    return [] if found is None else rows(found)


def found_seats(database: AnyDatabase, tails: Sequence[str | None], **options: Any) -> list[tuple[Any, ...]]:
    """The planes with these tails."""
    given = table_of(database, **options)
    stream = pa.schema([("tail", pa.string())])
    function = opened(open_table(given), lookup_limits(given), stream, [("tail", "tail")], Clock(), inner=True)
    try:
        return join(function, pa.RecordBatch.from_arrays([pa.array(tails, pa.string())], schema=stream))
    finally:
        function.close()


# --- jobs ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", ["left", "inner"])
@pytest.mark.parametrize("cache_ttl", [None, "1h"])
def test_rows_meet_their_keys(database: AnyDatabase, tmp_path: Path, how: Any, cache_ttl: str | None) -> None:
    """In a job: none, one or several rows for a key; a null key meets none."""
    database.execute(FLEET)
    database.execute("INSERT INTO planes VALUES ('N1', 55), ('N2', 180), ('N2', 181), (NULL, 1), ('N4', NULL)")
    tails = ["N2", "N3", "N1", None, "N4"] * 100
    legs = pa.table({"leg": pa.array(range(500)), "tail": tails})
    with local(2) as env:
        joined = env.from_batches(legs).lookup_join(table_of(database, cache_ttl=cache_ttl), on="tail", how=how)
        found = joined.collect()
        finish(env, tmp_path / "checkpoints")
    planes: dict[str | None, list[int | None]] = {"N1": [55], "N2": [180, 181], "N4": [None]}
    lonely: list[int | None] = [None] if how == "left" else []
    expected = [(leg, tail, seats) for leg, tail in enumerate(tails) for seats in planes.get(tail, lonely)]
    assert rows(found.to_arrow()) == sorted(expected, key=repr)


@pytest.mark.slow
def test_two_keys_and_chosen_columns(database: AnyDatabase, tmp_path: Path) -> None:
    """Keys with other names, large strings, and a column that both sides have."""
    database.execute("CREATE TABLE prices (shop BIGINT, product VARCHAR(9), price BIGINT, note VARCHAR(9))")
    database.execute("INSERT INTO prices VALUES (1, 'a', 10, 'x'), (1, 'b', 20, 'x'), (2, 'a', 30, 'x')")
    orders = pa.table(
        {
            "at": pa.array([1, 2, 2, None], pa.int64()),
            "what": pa.array(["a", "a", "b", "a"], pa.large_string()),
            "price": [0, 0, 0, 0],
        }
    )
    table = table_of(database, "prices", columns=["shop", "product", "price"])
    with local(1) as env:
        joined = env.from_batches(orders).lookup_join(table, on=[("at", "shop"), ("what", "product")])
        found = joined.collect()
        finish(env, tmp_path / "checkpoints")
    assert joined.columns == ["at", "what", "price", "price_right"]
    assert rows(found.to_arrow()) == sorted(
        [(1, "a", 0, 10), (2, "a", 0, 30), (2, "b", 0, None), (None, "a", 0, None)], key=repr
    )


# --- values -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_keys_are_compared_exactly(database: AnyDatabase) -> None:
    """Quotes, backslashes, percent signs, letters of any case and accents; spaces at the end count."""
    tails = [
        "a",
        "A",
        "á",
        "a ",
        "",
        "'",
        '"',
        "\\",
        "%",
        "a,b",
        "{a}",
        "NULL",
        "null",
        "\\N",
        "😀",
        "?",
        ":keys",
        "a\nb",
    ]
    database.execute(FLEET)
    stored = [tail for number, tail in enumerate(tails) if number % 3 != 1]
    for number, tail in enumerate(stored):
        quoted = tail.replace("'", "''")
        if not isinstance(database, PostgresDatabase):
            quoted = quoted.replace("\\", "\\\\") if database.url.startswith("mysql") else quoted
            quoted = quoted.replace("%", "%%") if database.url.startswith("mysql") else quoted
            database.execute(f"INSERT INTO planes VALUES ('{quoted}', {number})")
        else:
            database.execute("INSERT INTO planes VALUES (%s, %s)", tail, number)
    expected = sorted(((tail, stored.index(tail)) for tail in stored), key=repr)
    assert found_seats(database, [*tails, "a\0", "\0"]) == expected
    for tail in tails:
        assert found_seats(database, [tail]) == [row for row in expected if row[0] == tail]


@pytest.mark.slow
def test_keys_of_every_type(database: AnyDatabase) -> None:
    """Each alone, and all together."""
    zero = datetime.date(1970, 1, 1)
    values: dict[str, tuple[str, list[Any]]] = {
        "small": ("SMALLINT", [-5, 7, 7]),
        "whole": ("INTEGER", [2**31 - 1, -(2**31), 3]),
        "big": ("BIGINT", [2**63 - 1, -(2**63), 0]),
        "yes": ("BOOLEAN", [True, False, True]),
        "day": ("DATE", [zero, datetime.date(2024, 2, 29), datetime.date(1000, 1, 1)]),
        "text": ("VARCHAR(30)", ["a", "b", "c"]),
    }
    if not (isinstance(database, Database) and database.url.startswith("sqlite")):
        values["exact"] = ("NUMERIC(9, 3)", [Decimal("1.500"), Decimal("-0.001"), Decimal("100000.000")])
    database.execute(
        f"CREATE TABLE planes ({', '.join(f'{name} {kind}' for name, (kind, _) in values.items())}, n BIGINT)"
    )
    for number in range(3):
        texts = [
            str(each[number]) if isinstance(each[number], int | Decimal) else f"'{each[number]}'"
            for _, each in values.values()
        ]
        database.execute(f"INSERT INTO planes VALUES ({', '.join(texts)}, {number})")
    given = table_of(database)
    table = open_table(given)
    for names in [*([name] for name in values), list(values)]:
        stream = pa.schema([table.schema.field(name) for name in names])
        function = opened(table, lookup_limits(given), stream, [(name, name) for name in names], Clock(), inner=True)
        batch = pa.RecordBatch.from_pylist(
            [{name: values[name][1][number] for name in names} for number in (0, 2)], schema=stream
        )
        joined = function.process(batch)
        function.close()
        assert joined is not None
        wanted = [{name: values[name][1][number] for name in names} for number in (0, 2)]
        expected = Counter(
            number
            for row in wanted
            for number in range(3)
            if all(values[name][1][number] == row[name] for name in names)
        )
        assert Counter(joined.column("n").to_pylist()) == expected, names


def test_uuids_enums_and_json_are_read_as_text(postgres: PostgresDatabase) -> None:
    """A key that is no UUID has no row. Infinite numbers of days have none either."""
    postgres.execute("CREATE TYPE mood AS ENUM ('sad', 'happy')")
    postgres.execute("CREATE TABLE planes (u uuid, m mood, j jsonb, day date)")
    one = "0f3b5c9e-1111-4222-8333-444455556666"
    postgres.execute(f"INSERT INTO planes VALUES ('{one}', 'sad', '{{\"a\":  1}}', 'infinity')")
    given = table_of(postgres, columns=["u", "m", "j"])
    stream = pa.schema([("u", pa.string())])
    function = opened(open_table(given), lookup_limits(given), stream, [("u", "u")], Clock())
    batch = pa.RecordBatch.from_arrays([pa.array([one, one.upper(), "x"])], schema=stream)
    assert join(function, batch) == sorted(
        [(one, "sad", '{"a": 1}'), (one.upper(), None, None), ("x", None, None)], key=repr
    )
    function.close()
    days = table_of(postgres, columns=["day"])
    with_days = pa.schema([("day", pa.date32())])
    function = opened(open_table(days), lookup_limits(days), with_days, [("day", "day")], Clock())
    batch = pa.RecordBatch.from_arrays(
        [pa.array([2**31 - 1, -(2**31), 0], pa.int32()).cast(pa.date32())], schema=with_days
    )
    found = function.process(batch)
    function.close()
    assert found is not None
    assert found.num_rows == 3


@pytest.mark.slow
def test_many_keys_are_asked_for_in_parts(database: AnyDatabase) -> None:
    """More keys than a query may have, and more rows for a key than a piece of the result has."""
    database.execute(FLEET)
    numbers = ", ".join(f"('N{number}', {number})" for number in range(2_500))
    database.execute(f"INSERT INTO planes VALUES {numbers}")
    tails = [f"N{number}" for number in range(0, 5_000, 2)]
    expected = sorted(((f"N{number}", number) for number in range(0, 2_500, 2)), key=repr)
    assert found_seats(database, tails, keys_per_query=700) == expected
    assert found_seats(database, tails, keys_per_query=30_000) == expected


def test_key_parts_are_bounded() -> None:
    """By the number of keys and by bytes; a key that is too large alone gets a query of its own."""
    keys = pa.RecordBatch.from_pydict({"k": ["x" * size for size in (1, 1, 50, 200, 1, 90, 1)]})
    assert list(key_parts(keys, 2, 120)) == [(0, 2), (2, 1), (3, 1), (4, 2), (6, 1)]
    assert list(key_parts(keys, 100, 1 << 20)) == [(0, 7)]
    assert list(key_parts(keys.slice(0, 0), 100)) == []
    assert [count for _, count in key_parts(pa.RecordBatch.from_pydict({"k": range(10)}), 100, 24)] == [3, 3, 3, 1]


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "on", "message"),
    [
        ({"table": "none"}, "tail", "no table none"),
        ({"columns": ["tail", "nose"]}, "tail", "no column 'nose'; name one of tail, seats"),
        ({"columns": "seats"}, "tail", "no column 'tail'"),
        ({"columns": ["tail", "tail"]}, "tail", "twice"),
        ({}, "seats", r"'seats' of the left stream is string and 'seats' of the right is int64.* cast"),
        ({}, [("tail", "tail"), ("seats", "tail")], "twice"),
        ({"schema": {"nose": int}}, "tail", "no column 'nose'"),
        ({"cache_ttl": "0s"}, "tail", "cache_ttl must be greater than 0"),
        ({"cache_rows": 0}, "tail", "cache_rows=0"),
        ({"keys_per_query": 0}, "tail", "keys_per_query=0"),
        ({"table": "a.b.c"}, "tail", "more than a schema and a name"),
    ],
)
def test_a_lookup_that_does_not_fit_is_refused(
    database: AnyDatabase, options: dict[str, Any], on: Any, message: str
) -> None:
    """When the program is made."""
    database.execute(FLEET)
    stream = pa.table({"tail": ["N1"], "seats": ["55"]})
    with local() as env, pytest.raises(tg.ConfigurationError, match=message):
        env.from_batches(stream).lookup_join(table_of(database, **options), on=on)


def test_types_that_cannot_be_read_or_compared_are_refused(postgres: PostgresDatabase) -> None:
    """With the column, its type and what to do."""
    postgres.execute("CREATE TYPE mood AS ENUM ('sad', 'happy')")
    postgres.execute(
        "CREATE TABLE planes (a inet, b numeric, c char(3), d double precision, e timestamp, f mood, g text, h bpchar)"
    )
    for columns, message in (
        (["a"], r"'a' has type inet, which is not supported; give the other columns in columns="),
        (["b"], r"'b' is numeric.*schema="),
    ):
        with pytest.raises(tg.ConfigurationError, match=message):
            open_table(table_of(postgres, columns=columns))
    table = open_table(table_of(postgres, columns=list("bcdefgh"), schema={"b": pa.decimal128(9, 2)}))
    refused = (("c", "spaces"), ("h", "spaces"), ("d", "floats"), ("e", "keys are integers"), ("f", "other rules"))
    for key, message in refused:
        with pytest.raises(tg.ConfigurationError, match=rf"column '{key}' \(.*cannot be a key: .*{message}"):
            table.check_keys([key])
    table.check_keys(["g", "b"])


@pytest.mark.parametrize(
    ("column", "given", "keys"), [("VARCHAR(9)", int, pa.array([1])), ("BIGINT", str, pa.array(["1"]))]
)
def test_a_key_of_another_kind_than_its_column_is_refused(
    database: AnyDatabase, column: str, given: type, keys: pa.Array
) -> None:
    """A database finds '1' for the number 1, and not '01', which is the same number."""
    database.execute(f"CREATE TABLE planes (k {column}, n BIGINT)")
    stream = pa.table({"k": keys})
    with local() as env, pytest.raises(tg.ConfigurationError, match=r"column 'k'.*(is a key, and schema= has|schema=)"):
        env.from_batches(stream).lookup_join(table_of(database, schema={"k": given}), on="k")


def test_dates_that_python_does_not_have_find_no_rows(database: AnyDatabase) -> None:
    """The drivers of SQLAlchemy take Python values, and PostgreSQL has other limits."""
    database.execute("CREATE TABLE planes (day DATE, n BIGINT)")
    database.execute("INSERT INTO planes VALUES ('2020-01-01', 1)")
    table = open_table(table_of(database))
    session = table.session(["day"])
    days = pa.array([18262, -3_000_000, 2**31 - 1], pa.int32()).cast(pa.date32())
    assert session.rows(pa.RecordBatch.from_arrays([days], ["day"]), 10).column("n").to_pylist() == [1]
    session.close()


def test_floats_of_mysql_have_all_of_their_digits(mariadb: Database) -> None:
    """Its server returns a FLOAT with six digits."""
    mariadb.execute("CREATE TABLE planes (k BIGINT, f FLOAT, g DOUBLE)")
    mariadb.execute("INSERT INTO planes VALUES (1, 16777215, 0.1), (2, NULL, NULL)")
    session = open_table(table_of(mariadb)).session(["k"])
    found = session.rows(pa.RecordBatch.from_arrays([pa.array([1, 2])], ["k"]), 10)
    session.close()
    assert found.column("f").to_pylist() == [16777215.0, None]
    assert found.column("g").to_pylist() == [0.1, None]


def test_addresses_that_cannot_be_used(tmp_path: Path) -> None:
    """A file that does not exist is not created."""
    file = tmp_path / "none.db"
    for url, message in (
        (f"sqlite:///{file}", "there is no file"),
        ("postgresql+psycopg://x@127.0.0.1:1/d", "address of libpq"),
        ("postgresql://x@127.0.0.1:1/d", "does not answer"),
        ("", "give the address"),
    ):
        with pytest.raises(tg.ConfigurationError, match=message):
            open_table(tg.DatabaseTable(url, "planes"))
    assert not file.exists()


def test_refreshes_are_for_whole_tables(tmp_path: Path) -> None:
    """`refresh` and `max_stale` are refused, and so are queries of SQL and streams of changes."""
    database = Database(f"sqlite:///{tmp_path}/test.db")
    database.execute(FLEET)
    stream = pa.table({"tail": ["N1"]})
    with local() as env:
        tails = env.from_batches(stream, uid="tails")
        with pytest.raises(tg.ConfigurationError, match=r"cache_ttl=\.\.\."):
            tails.lookup_join(table_of(database), on="tail", refresh="1min")
        counts = tails.key_by("tail").aggregate(n=tg.count(), emit="changes")
        with pytest.raises(tg.ConfigurationError, match="another row than was inserted"):
            counts.lookup_join(table_of(database), on="tail")
        env.create_temporary_view("tails", tails)
        env.create_temporary_view("planes", table_of(database))
        with pytest.raises(tg.ConfigurationError, match=r"Stream\.lookup_join"):
            env.sql("SELECT * FROM tails JOIN planes ON tails.tail = planes.tail")


def test_too_many_rows_for_a_batch_are_refused(database: AnyDatabase) -> None:
    """Instead of memory that grows without a limit."""
    database.execute(FLEET)
    database.execute("INSERT INTO planes VALUES " + ", ".join(["('N1', 1)"] * 50 + ["('N2', 2)"] * 50))
    given = table_of(database, keys_per_query=1)
    stream = pa.schema([("tail", pa.string())])
    batch = pa.RecordBatch.from_arrays([pa.array(["N1", "N2"])], schema=stream)
    table, limits, on = open_table(given), lookup_limits(given), [("tail", "tail")]
    function = opened(table, limits, stream, on, Clock(), rows_max=100)
    assert len(join(function, batch)) == 100
    function.close()
    function = opened(table, limits, stream, on, Clock(), rows_max=99)
    with pytest.raises(tg.ConfigurationError, match="more rows than max_rows="):
        join(function, batch)
    function.close()


def test_a_table_that_changes_its_columns_fails_the_task(database: AnyDatabase) -> None:
    """At once, because a repeated query would fail as well."""
    database.execute(FLEET)
    given = table_of(database)
    clock = Clock()
    stream = pa.schema([("tail", pa.string())])
    function = opened(open_table(given), lookup_limits(given), stream, [("tail", "tail")], clock)
    batch = pa.RecordBatch.from_arrays([pa.array(["N1"])], schema=stream)
    assert join(function, batch) == [("N1", None)]
    database.execute("ALTER TABLE planes RENAME COLUMN seats TO chairs")
    with pytest.raises(tg.ConfigurationError, match=r"table planes: .*seats"):
        join(function, batch)
    assert clock.pauses == []
    function.close()


def test_a_server_that_is_away_is_asked_again(postgres: PostgresDatabase) -> None:
    """Until it is back, or the time of retries is over. Pauses grow, up to a limit."""
    postgres.execute(FLEET)
    postgres.execute("INSERT INTO planes VALUES ('N1', 55)")
    given = table_of(postgres, retry_for="1min")
    clock = Clock()
    stream = pa.schema([("tail", pa.string())])
    function = opened(open_table(given), lookup_limits(given), stream, [("tail", "tail")], clock)
    batch = pa.RecordBatch.from_arrays([pa.array(["N1"])], schema=stream)
    assert join(function, batch) == [("N1", 55)]
    server = postgres.server
    server.kill()
    try:
        with pytest.raises(DatabaseError, match="table planes"):
            join(function, batch)
        assert clock.pauses[:4] == [0.1, 0.2, 0.4, 0.8]
        assert max(clock.pauses) == 5.0
        assert 50 < sum(clock.pauses) <= 60
        clock.then = lambda: len(clock.pauses) > 2 and (server.answers() or server.start())
        clock.pauses.clear()
        assert join(function, batch) == [("N1", 55)]
        assert len(clock.pauses) == 3
    finally:
        if not server.answers():
            server.start()
    function.close()


# --- cache --------------------------------------------------------------------------------------------------------


class Versions(KeyedTable):
    """A table in memory that counts queries and keys. Its session finds texts equal that differ in case."""

    def __init__(self) -> None:
        schema = pa.schema([("k", pa.string()), ("v", pa.int64())])
        column = TableColumn("k", "text", "text", pa.string(), True)
        super().__init__("", (None, "t"), (column,), schema)
        self.rows: dict[str, list[int]] = {}
        self.asked: list[list[str]] = []

    def __hash__(self) -> int:
        return id(self)

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def session(self, keys: Sequence[str]) -> LookupSession:
        return VersionsSession(self)


class VersionsSession(LookupSession):
    """Reads rows of a `Versions`."""

    def __init__(self, table: Versions) -> None:
        self._table = table

    def rows(self, keys: pa.RecordBatch, rows_max: int) -> pa.Table:
        asked = keys.column("k").to_pylist()
        assert len(set(asked)) == len(asked)
        assert None not in asked
        self._table.asked.append(asked)
        folded = {key.lower() for key in asked}
        found = [(k, v) for k, values in self._table.rows.items() if k.lower() in folded for v in values]
        random.Random(len(found)).shuffle(found)
        return pa.table([[k for k, _ in found], [v for _, v in found]], schema=self._table.schema)

    def close(self) -> None:
        return


STREAM = pa.schema([("n", pa.int64()), ("k", pa.string())])


def batch_of(keys: Sequence[str | None]) -> pa.RecordBatch:
    """Numbered rows with these keys."""
    return pa.RecordBatch.from_arrays([pa.array(range(len(keys))), pa.array(keys, pa.string())], schema=STREAM)


def cached(
    table: Versions, clock: Clock, cache_rows: int, ttl_ms: int | None = 10_000, keys: int = 5
) -> DatabaseLookup:
    """A left join with the table."""
    return opened(table, LookupLimits(ttl_ms, cache_rows, keys, 0), STREAM, [("k", "k")], clock)


def cache_size(function: DatabaseLookup) -> int:
    """The number of rows in the cache."""
    return function.cached_rows


def test_keys_are_read_once_for_their_time_to_live() -> None:
    """Also keys without rows. After that time they are read again."""
    table, clock = Versions(), Clock()
    table.rows = {"a": [1, 2]}
    function = cached(table, clock, 100)
    assert join(function, batch_of(["a", "b", "a"])) == [
        (0, "a", 1),
        (0, "a", 2),
        (1, "b", None),
        (2, "a", 1),
        (2, "a", 2),
    ]
    table.rows = {"a": [3], "b": [4]}
    clock.now += 9.9
    assert join(function, batch_of(["b", "a"])) == [(0, "b", None), (1, "a", 1), (1, "a", 2)]
    assert table.asked == [["a", "b"]]
    clock.now += 0.1
    assert join(function, batch_of(["b", "c", "a"])) == [(0, "b", 4), (1, "c", None), (2, "a", 3)]
    assert table.asked == [["a", "b"], ["b", "c", "a"]]


def test_without_a_time_to_live_each_batch_reads_its_keys() -> None:
    """And nothing stays in memory."""
    table, clock = Versions(), Clock()
    function = cached(table, clock, 100, ttl_ms=None)
    for value in (1, 2):
        table.rows = {"a": [value]}
        assert join(function, batch_of(["a", "a"])) == [(0, "a", value), (1, "a", value)]
        assert cache_size(function) == 0
    assert table.asked == [["a"], ["a"]]


def test_rows_that_a_database_finds_equal_by_its_own_rules_are_dropped() -> None:
    """Also where both spellings are asked for, and where one of them is asked for later."""
    table, clock = Versions(), Clock()
    table.rows = {"a": [1], "A": [2]}
    function = cached(table, clock, 100)
    assert join(function, batch_of(["a"])) == [(0, "a", 1)]
    assert join(function, batch_of(["A", "a"])) == [(0, "A", 2), (1, "a", 1)]
    assert table.asked == [["a"], ["A"]]
    assert join(cached(table, clock, 100), batch_of(["A", "a"])) == [(0, "A", 2), (1, "a", 1)]


@pytest.mark.slow
def test_keys_that_come_often_stay_in_the_cache() -> None:
    """While keys that come once pass through it."""
    table, clock = Versions(), Clock()
    function = cached(table, clock, 100)
    for number in range(500):
        join(function, batch_of(["often", f"once {number}"]))
        assert cache_size(function) <= 100
    asked = Counter(itertools.chain.from_iterable(table.asked))
    assert asked.pop("often") == 1
    assert set(asked.values()) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_the_cache_gives_the_rows_of_a_recent_version(seed: int) -> None:
    """Of random batches, over tables that change: each key meets one version, which is not older than the time to live.

    The size of the cache is bounded, and without changes of time no key is read twice while everything fits.
    """
    rng = random.Random(seed)
    table, clock = Versions(), Clock()
    ttl_s = 10
    cache_rows = rng.choice([1, 7, 40, 10_000])
    function = cached(table, clock, cache_rows, ttl_s * 1000, keys=rng.choice([1, 3, 100]))
    names = [f"{letter}{number}" for letter in "aAbB" for number in range(6)]
    history: list[tuple[float, dict[str, list[int]]]] = []
    serial = itertools.count()
    for _ in range(60):
        if rng.random() < 0.6:
            table.rows = {name: [next(serial) for _ in range(rng.randrange(4))] for name in names if rng.random() < 0.7}
        history.append((clock.now, {name: sorted(values) for name, values in table.rows.items()}))
        table.asked.clear()
        keys = [rng.choice([None, *names]) for _ in range(rng.randrange(30))]
        found: dict[int, list[int]] = {}
        for number, key, value in join(function, batch_of(keys)):
            assert key == keys[number]
            found.setdefault(number, []).extend([] if value is None else [value])
        assert sorted(found) == list(range(len(keys)))
        recent = [rows for moment, rows in history if moment > clock.now - ttl_s or rows is history[-1][1]]
        by_key: dict[str | None, list[int]] = {}
        for number, values in found.items():
            key = keys[number]
            assert sorted(values) == by_key.setdefault(key, sorted(values)), "one version for each key of a batch"
            assert not values if key is None else sorted(values) in [rows.get(key, []) for rows in recent]
        assert cache_size(function) <= cache_rows
        asked = Counter(itertools.chain.from_iterable(table.asked))
        assert not asked or max(asked.values()) == 1
        clock.now += rng.choice([0, 1, 3, 20])
