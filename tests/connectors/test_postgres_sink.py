"""The sink for tables of PostgreSQL, against a real server: exactly the rows of each checkpoint, or one clear error."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator
from decimal import Decimal

import pyarrow as pa
import pytest
from database_sinks import SinkRun, database_sink
from postgres_server import PostgresDatabase, drop_database
from source_contract import read_split, rows_of
from waiting import until

import tidegate as tg
from tidegate.connectors.sql import sink as sink_module
from tidegate.connectors.sql.client import DatabaseError
from tidegate.connectors.sql.source import sql_source

WAITS = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tidegate' AND wait_event_type = 'Lock'"
ROWS = pa.table({"id": pa.array([1, 2, 3]), "v": ["a", None, "c"]})


def changes(*rows: tuple[str, int, str | None]) -> pa.Table:
    """Rows of a stream of changes."""
    kinds, ids, values = zip(*rows, strict=True)
    return pa.table({"id": pa.array(ids, pa.int64()), "v": pa.array(values, pa.string()), "row_kind": list(kinds)})


def test_rows_are_appended_once(postgres: PostgresDatabase) -> None:
    """A commit that is repeated, by this process or another, changes nothing; the next checkpoint adds its rows."""
    postgres.execute("CREATE TABLE t (id bigint, v text)")
    run = SinkRun(database_sink(postgres.dsn, ROWS.schema))
    prepared = run.write(1, ROWS)
    assert postgres.execute("SELECT * FROM t") == []
    for _ in range(3):
        run.commit(1, prepared)
    assert sorted(postgres.execute("SELECT * FROM t")) == [(1, "a"), (2, None), (3, "c")]
    run.write_and_commit(2, ROWS)
    run.commit(1, prepared)
    assert postgres.execute("SELECT count(*) FROM t") == [(6,)]
    assert postgres.execute("SELECT sink, job_id, checkpoint_id FROM tidegate_commits") == [("sink", "job-1", 2)]


def test_another_job_writes_again(postgres: PostgresDatabase) -> None:
    """Checkpoints of a job that starts from nothing have the same numbers, and are other checkpoints."""
    postgres.execute("CREATE TABLE t (id bigint, v text)")
    for job in ("job-1", "job-2"):
        SinkRun(database_sink(postgres.dsn, ROWS.schema), job).write_and_commit(1, ROWS)
    assert postgres.execute("SELECT count(*) FROM t") == [(6,)]


def test_upserts_keep_the_newest_row(postgres: PostgresDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each key, in a batch, in several files of a checkpoint, and over checkpoints."""
    monkeypatch.setattr(sink_module, "FILE_BYTES", 1)
    postgres.execute('CREATE TABLE t (id bigint PRIMARY KEY, "V" text, n integer DEFAULT 7)')
    schema = pa.schema([("id", pa.int64()), ("V", pa.string())])
    run = SinkRun(database_sink(postgres.dsn, schema, mode="upsert", keys=["id"]))

    def rows(*pairs: tuple[int, str]) -> pa.Table:
        return pa.table([[i for i, _ in pairs], [v for _, v in pairs]], schema=schema)

    run.write_and_commit(1, rows((1, "a"), (2, "b"), (1, "c")), rows((2, "d"), (3, "e")), rows((3, "f")))
    assert sorted(postgres.execute("SELECT * FROM t")) == [(1, "c", 7), (2, "d", 7), (3, "f", 7)]
    run.write_and_commit(2, rows((3, "g"), (4, "h")))
    assert sorted(postgres.execute('SELECT id, "V" FROM t')) == [(1, "c"), (2, "d"), (3, "g"), (4, "h")]


def test_retracted_rows_delete_their_keys(postgres: PostgresDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last change of a key decides. A deleted row need not have other columns than its key."""
    monkeypatch.setattr(sink_module, "FILE_BYTES", 1)
    postgres.execute("CREATE TABLE t (id bigint PRIMARY KEY, v text NOT NULL)")
    first = changes(("+I", 1, "a"), ("+I", 2, "b"), ("-U", 1, "a"), ("+U", 1, "c"), ("+I", 3, "d"), ("-D", 3, "d"))
    run = SinkRun(database_sink(postgres.dsn, first.schema, mode="upsert", keys=["id"], changes=True))
    run.write_and_commit(1, first)
    assert sorted(postgres.execute("SELECT * FROM t")) == [(1, "c"), (2, "b")]
    run.write_and_commit(2, changes(("-D", 1, None), ("+I", 4, "x")), changes(("-D", 4, "x"), ("-D", 9, None)))
    assert postgres.execute("SELECT * FROM t") == [(2, "b")]
    with pytest.raises(ValueError, match="row_kind"):
        run.write(3, changes(("?", 1, None)))


def test_existing_keys_can_be_kept(postgres: PostgresDatabase) -> None:
    """With on_conflict="ignore", in both modes; by default an existing key fails the commit with its reason."""
    postgres.execute(
        "CREATE TABLE t (id bigint PRIMARY KEY, v text)",
    )
    postgres.execute("INSERT INTO t VALUES (2, 'old')")
    for number, (mode, keys) in enumerate([("append", []), ("upsert", ["id"])]):
        sink = database_sink(postgres.dsn, ROWS.schema, mode=mode, keys=keys, on_conflict="ignore")
        SinkRun(sink, f"job-{number}").write_and_commit(1, ROWS)
        assert sorted(postgres.execute("SELECT * FROM t")) == [(1, "a"), (2, "old"), (3, "c")]
    run = SinkRun(database_sink(postgres.dsn, ROWS.schema), "job-3")
    prepared = run.write(1, ROWS)
    with pytest.raises(tg.ConfigurationError, match=r"checkpoint 1 .*t_pkey.*correct the table"):
        run.commit(1, prepared)
    assert postgres.execute("SELECT count(*) FROM tidegate_commits WHERE job_id = 'job-3'") == [(0,)]
    postgres.execute("DELETE FROM t")
    run.commit(1, prepared)
    assert postgres.execute("SELECT count(*) FROM t") == [(3,)]


EPOCH, MICRO = datetime.datetime(1970, 1, 1), datetime.timedelta(microseconds=1)
VALUES: dict[str, tuple[str, pa.Array, list[object]]] = {
    "bool": ("boolean", pa.array([True, None]), [True, None]),
    "int8": ("smallint", pa.array([-5, None], pa.int8()), [-5, None]),
    "narrowed": ("integer", pa.array([2**31 - 1, None], pa.int64()), [2**31 - 1, None]),
    "uint64": ("bigint", pa.array([5, None], pa.uint64()), [5, None]),
    "float": ("real", pa.array([1.5, None], pa.float32()), [1.5, None]),
    "double": ("double precision", pa.array([float("inf"), None]), [float("inf"), None]),
    "decimal": ("numeric(10, 3)", pa.array([Decimal("-12.30"), None], pa.decimal128(9, 2)), [Decimal("-12.300"), None]),
    "integer as decimal": ("numeric(5, 1)", pa.array([1000, None]), [Decimal("1000.0"), None]),
    "any decimal": ("numeric", pa.array([Decimal("1.50"), None], pa.decimal128(38, 20)), [Decimal("1.5"), None]),
    "text": ("text", pa.array(["é, \"'\\\n", ""], pa.large_string()), ["é, \"'\\\n", ""]),
    "dictionary": ("varchar(3)", pa.array(["abc", None]).dictionary_encode(), ["abc", None]),
    "bytes": ("bytea", pa.array([b"\0\xff", b""]), [b"\0\xff", b""]),
    "date": ("date", pa.array([datetime.date(1, 1, 1), None]), [datetime.date(1, 1, 1), None]),
    "time": ("time", pa.array([datetime.time(1, 2, 3, 4), None]), [datetime.time(1, 2, 3, 4), None]),
    "nanoseconds": ("timestamp", pa.array([1_000, None], pa.timestamp("ns")), [EPOCH + MICRO, None]),
    "seconds": ("timestamp(0)", pa.array([1_000_000, None], pa.timestamp("us")), [EPOCH + 1_000_000 * MICRO, None]),
    "zoned": (
        "timestamptz",
        pa.array([0, None], pa.timestamp("ms", "Europe/Berlin")),
        [datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC), None],
    ),
    "interval": ("interval", pa.array([1_500_000, None], pa.duration("us")), [datetime.timedelta(seconds=1.5), None]),
    "json": ("jsonb", pa.array(['{"a": [1, null]}', "null"]), [{"a": [1, None]}, None]),
    "enum": ("mood", pa.array(["sad", None]), ["sad", None]),
    "null": ("integer", pa.nulls(2), [None, None]),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_values_of_every_type_arrive(postgres: PostgresDatabase, mode: str) -> None:
    """By COPY into the table, or over the temporary table; also the first and the last values of ranges."""
    postgres.execute("CREATE TYPE mood AS ENUM ('sad', 'happy')")
    names = [name for name in VALUES if mode == "upsert" or name not in ("json", "enum")]
    columns = ", ".join(f'"{name}" {VALUES[name][0]}' for name in names)
    postgres.execute(f"CREATE TABLE t (key bigint PRIMARY KEY, {columns})")
    table = pa.table({"key": pa.array([0, 1]), **{name: VALUES[name][1] for name in names}})
    keys = ["key"] if mode == "upsert" else []
    SinkRun(database_sink(postgres.dsn, table.schema, mode=mode, keys=keys)).write_and_commit(1, table)
    found = postgres.execute("SELECT * FROM t ORDER BY key")
    assert {name: [row[i + 1] for row in found] for i, name in enumerate(names)} == {n: VALUES[n][2] for n in names}


@pytest.mark.parametrize(
    ("type_text", "values", "message"),
    [
        ("integer", pa.array([1, 2**31]), "2147483648.* does not fit integer"),
        ("numeric(4, 2)", pa.array([Decimal("1.005")], pa.decimal128(9, 3)), "1.005.* does not fit"),
        ("numeric(4, 2)", pa.array([Decimal("1"), Decimal("100.00")], pa.decimal128(9, 2)), "100.00.* does not fit"),
        ("varchar(2)", pa.array(["ab", "abc"]), "abc.* more than 2 characters"),
        ("text", pa.array(["a\0"]), "NUL"),
        ("text NOT NULL", pa.array(["a", None]), "NOT NULL"),
        ("uuid", pa.array(["x"]), "UUID"),
        ("json", pa.array(['{"a":']), "not valid JSON"),
        ("mood", pa.array(["angry"]), r"not one of \['sad', 'happy'\]"),
        ("timestamp", pa.array([1], pa.timestamp("ns")), "without a loss"),
        ("timestamp(0)", pa.array([1], pa.timestamp("us")), "without a loss"),
        ("timestamp", pa.array([-(2**63) + 1], pa.timestamp("us")), "outside of the range"),
        ("timestamp", pa.array([0, 2**62], pa.timestamp("s")), "4611686018427387904.* does not fit"),
        ("interval", pa.array([2**60], pa.duration("s")), "1152921504606846976.* does not fit"),
    ],
)
def test_a_value_that_does_not_fit_fails_before_the_checkpoint(
    postgres: PostgresDatabase, type_text: str, values: pa.Array, message: str
) -> None:
    """So that no completed checkpoint has rows that the database refuses."""
    postgres.execute("CREATE TYPE mood AS ENUM ('sad', 'happy')")
    postgres.execute(f"CREATE TABLE t (v {type_text})")
    run = SinkRun(database_sink(postgres.dsn, pa.schema([("v", values.type)])))
    with pytest.raises(tg.ConfigurationError, match=message):
        run.write(1, pa.table({"v": values}))


@pytest.mark.parametrize(
    ("columns", "stream", "options", "message"),
    [
        ("id bigint", {"x": pa.int64()}, {}, "column 'x' is not in the table"),
        ("id bigint", {"id": pa.string()}, {}, "string does not fit bigint"),
        ("id real", {"id": pa.float64()}, {}, "digits would be lost"),
        ("id timestamptz", {"id": pa.timestamp("us")}, {}, "time zone of its values is not known"),
        ("id timestamp", {"id": pa.timestamp("us", "UTC")}, {}, "drop the time zone"),
        ("id point", {"id": pa.string()}, {}, "type point is not supported"),
        ("id bigint, n bigint NOT NULL", {"id": pa.int64()}, {}, "'n' of the table is NOT NULL without a default"),
        ("id bigint, n bigint GENERATED ALWAYS AS (id) STORED", {"id": pa.int64(), "n": pa.int64()}, {}, "is computed"),
        ("id bigint", {"id": pa.list_(pa.int64())}, {}, "as JSON"),
        ("id bigint", {"id": pa.int64()}, {"mode": "upsert", "keys": ["id"]}, "needs a primary key or a unique index"),
        ("id real PRIMARY KEY", {"id": pa.float32()}, {"mode": "upsert", "keys": ["id"]}, "cannot be a key"),
        ("id bigint PRIMARY KEY", {"id": pa.int64()}, {"mode": "upsert", "keys": ["x"]}, "no column 'x'"),
    ],
)  # fmt: skip
def test_a_table_that_does_not_fit_is_refused(
    postgres: PostgresDatabase, columns: str, stream: dict[str, pa.DataType], options: dict[str, object], message: str
) -> None:
    """When the program is made, with the column."""
    postgres.execute(f"CREATE TABLE t ({columns})")
    with pytest.raises(tg.ConfigurationError, match=message):
        database_sink(postgres.dsn, pa.schema(stream), **options)  # type: ignore[arg-type]


def test_a_table_or_user_that_cannot_be_exact_is_refused(postgres: PostgresDatabase) -> None:
    """Missing and unlogged tables, views, missing privileges, and a server that does not answer."""
    schema = pa.schema([("id", pa.int64())])
    postgres.execute("CREATE UNLOGGED TABLE u (id bigint)")
    postgres.execute("CREATE VIEW w AS SELECT 1::bigint AS id")
    postgres.execute("CREATE TABLE t (id bigint PRIMARY KEY)")
    for table, message in (("none", "there is no table none"), ("u", "SET LOGGED"), ("w", "is a view")):
        with pytest.raises(tg.ConfigurationError, match=message):
            database_sink(postgres.dsn, schema, table)
    role = f"r{postgres.name}"
    postgres.execute(f"CREATE ROLE {role} LOGIN")
    try:
        with pytest.raises(tg.ConfigurationError, match="table of tokens"):
            database_sink(postgres.dsn.replace("tidegate@", f"{role}@"), schema)
        database_sink(postgres.dsn, schema)
        postgres.execute(f"GRANT ALL ON tidegate_commits TO {role}")
        postgres.execute(f"GRANT INSERT ON t TO {role}")
        with pytest.raises(tg.ConfigurationError, match="lacks SELECT, UPDATE on table t"):
            database_sink(postgres.dsn.replace("tidegate@", f"{role}@"), schema, mode="upsert", keys=["id"])
    finally:
        postgres.execute(f"DROP OWNED BY {role}")
        postgres.execute(f"DROP ROLE {role}")
    with pytest.raises(tg.ConfigurationError, match="does not answer") as error:
        database_sink("postgresql://ann:hidden@127.0.0.1:1/x", schema)
    assert "hidden" not in str(error.value)


@pytest.fixture
def writer(postgres: PostgresDatabase) -> Iterator[str]:
    """A role to whose statements a policy of the table `t` applies."""
    role = f"r{postgres.name}"
    postgres.execute("CREATE TABLE t (id bigint PRIMARY KEY, v text)")
    database_sink(postgres.dsn, ROWS.schema)
    postgres.execute("ALTER TABLE t ENABLE ROW LEVEL SECURITY")
    postgres.execute("CREATE POLICY p ON t USING (id < 100)")
    postgres.execute(f"CREATE ROLE {role} LOGIN")
    postgres.execute(f"GRANT ALL ON t, tidegate_commits TO {role}")
    yield role
    postgres.execute(f"ALTER TABLE t OWNER TO {postgres.execute('SELECT current_user::text')[0][0]}")
    postgres.execute(f"DROP OWNED BY {role}")
    postgres.execute(f"DROP ROLE {role}")


def test_policies_apply_to_upserts_and_inserts(postgres: PostgresDatabase, writer: str) -> None:
    """A row that violates one fails the commit, with nothing written."""
    dsn = postgres.dsn.replace("tidegate@", f"{writer}@")
    SinkRun(database_sink(dsn, ROWS.schema, mode="upsert", keys=["id"])).write_and_commit(1, ROWS)
    more = pa.table({"id": [3, 4], "v": ["x", "y"]})
    SinkRun(database_sink(dsn, ROWS.schema, on_conflict="ignore"), "job-2").write_and_commit(1, more)
    found = [(1, "a"), (2, None), (3, "c"), (4, "y")]
    assert postgres.execute("SELECT * FROM t ORDER BY id") == found
    forbidden = SinkRun(database_sink(dsn, ROWS.schema, mode="upsert", keys=["id"]), "job-3")
    with pytest.raises(tg.ConfigurationError, match="violates row-level security policy"):
        forbidden.write_and_commit(1, pa.table({"id": [5, 200], "v": ["x", "y"]}))
    assert postgres.execute("SELECT * FROM t ORDER BY id") == found


def test_policies_are_refused_for_copies_and_deletes(postgres: PostgresDatabase, writer: str) -> None:
    """A policy would hide rows, so a retraction would delete nothing and report no error."""
    dsn = postgres.dsn.replace("tidegate@", f"{writer}@")
    with pytest.raises(tg.ConfigurationError, match="of table t applies to this user: PostgreSQL refuses COPY"):
        database_sink(dsn, ROWS.schema)
    schema = changes(("+I", 1, "a")).schema
    with pytest.raises(tg.ConfigurationError, match=r"rows that a policy hides would not be deleted.*as its owner$"):
        database_sink(dsn, schema, mode="upsert", keys=["id"], changes=True)
    postgres.execute("ALTER TABLE t FORCE ROW LEVEL SECURITY")
    postgres.execute(f"ALTER TABLE t OWNER TO {writer}")
    with pytest.raises(tg.ConfigurationError, match=r"after ALTER TABLE .* NO FORCE ROW LEVEL SECURITY"):
        database_sink(dsn, ROWS.schema)
    postgres.execute("ALTER TABLE t NO FORCE ROW LEVEL SECURITY")
    database_sink(dsn, ROWS.schema)


def test_policies_of_the_table_of_tokens_are_refused(postgres: PostgresDatabase, writer: str) -> None:
    """A hidden token would let a repeated commit write its rows again."""
    postgres.execute("ALTER TABLE tidegate_commits ENABLE ROW LEVEL SECURITY")
    postgres.execute("CREATE POLICY q ON tidegate_commits FOR INSERT WITH CHECK (true)")
    dsn = postgres.dsn.replace("tidegate@", f"{writer}@")
    with pytest.raises(tg.ConfigurationError, match=r"security of the table of tokens .* applies to this user: rows"):
        database_sink(dsn, ROWS.schema, mode="upsert", keys=["id"])


def test_an_error_of_a_trigger_fails_the_commit_at_once(postgres: PostgresDatabase) -> None:
    """It would fail again, so it is not repeated for minutes."""
    postgres.execute("CREATE TABLE t (id bigint, v text)")
    postgres.execute(
        "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'not today'; END$$"
    )
    postgres.execute("CREATE TRIGGER x BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f()")
    with pytest.raises(tg.ConfigurationError, match="not today"):
        SinkRun(database_sink(postgres.dsn, ROWS.schema)).write_and_commit(1, ROWS)


def test_names_that_postgresql_would_cut_or_shadow_are_refused(postgres: PostgresDatabase) -> None:
    """Before a table is created. The temporary table would hide a table of its name."""
    schema = pa.schema([("é" * 32, pa.int64())])
    with pytest.raises(tg.ConfigurationError, match="has 64 bytes, and PostgreSQL cuts names to 63"):
        database_sink(postgres.dsn, schema, create=True)
    with pytest.raises(tg.ConfigurationError, match="has 64 bytes"):
        database_sink(postgres.dsn, ROWS.schema, "t" * 64, create=True)
    assert postgres.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == [(0,)]
    with pytest.raises(tg.ConfigurationError, match=r"such as public\.tidegate_rows"):
        database_sink(postgres.dsn, ROWS.schema, "tidegate_rows", create=True)
    for _ in range(2):
        sink = database_sink(postgres.dsn, ROWS.schema, "public.tidegate_rows", "upsert", ["id"], create=True)
        SinkRun(sink).write_and_commit(1, ROWS)
    assert postgres.execute("SELECT count(*) FROM public.tidegate_rows") == [(3,)]


@pytest.mark.parametrize("keys", [(), ("k",)], ids=["append", "upsert"])
def test_texts_are_right_in_a_database_of_another_encoding(postgres: PostgresDatabase, keys: tuple[str, ...]) -> None:
    """The driver sends UTF-8, and the encoding of a session is the one of its database unless it is set."""
    latin = PostgresDatabase(postgres.server, f"{postgres.name}_latin")
    postgres.server.execute(
        f"CREATE DATABASE {latin.name} ENCODING 'LATIN1' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"
    )
    try:
        rows = pa.table({"k": ["é", "ß", "a"]})
        mode = "upsert" if keys else "append"
        sink = database_sink(latin.dsn, rows.schema, mode=mode, keys=keys, create=True)
        SinkRun(sink).write_and_commit(1, rows)
        assert sorted(latin.execute("SELECT k, length(k) FROM t")) == [("a", 1), ("ß", 1), ("é", 1)]
        source = sql_source(latin.dsn, "SELECT k FROM t", pa.schema([]), None, 1)
        reader = source.reader()
        found = [row["k"] for split in source.splits() for row in rows_of(read_split(source, reader, split, 9))]
        reader.close()
        assert sorted(found) == ["a", "ß", "é"]
        with pytest.raises(tg.ConfigurationError, match="has no equivalent in encoding"):
            SinkRun(sink).write_and_commit(2, pa.table({"k": ["☃"]}))
    finally:
        drop_database(postgres.server, latin.name)


@pytest.mark.parametrize("create", [False, True])
def test_a_table_is_found_in_each_schema_of_the_search_path(postgres: PostgresDatabase, create: bool) -> None:
    """It is not created again in the first schema."""
    postgres.execute("CREATE SCHEMA a")
    postgres.execute("CREATE TABLE public.t (id bigint, v text)")
    dsn = f"{postgres.dsn}?options=-csearch_path%3Da%2Cpublic"
    SinkRun(database_sink(dsn, ROWS.schema, create=create)).write_and_commit(1, ROWS)
    assert postgres.execute("SELECT count(*) FROM public.t") == [(3,)]


def test_keys_may_be_decimals_of_60_digits(postgres: PostgresDatabase) -> None:
    """The newest row of each of them counts."""
    large, larger = Decimal(10**50), Decimal(10**50 + 1)
    rows = pa.table({"k": pa.array([large, large, larger], pa.decimal256(60, 0)), "v": [1, 2, 3]})
    SinkRun(database_sink(postgres.dsn, rows.schema, mode="upsert", keys=["k"], create=True)).write_and_commit(1, rows)
    assert sorted(postgres.execute("SELECT k, v FROM t")) == [(large, 2), (larger, 3)]


def test_a_table_can_be_created(postgres: PostgresDatabase) -> None:
    """With types for the columns and a primary key; an existing table stays."""
    postgres.execute("CREATE SCHEMA s")
    for _ in range(2):
        sink = database_sink(postgres.dsn, ROWS.schema, 's."my.t"', "upsert", ["id"], create=True)
    SinkRun(sink).write_and_commit(1, ROWS)
    assert postgres.execute('SELECT count(*) FROM s."my.t"') == [(3,)]
    assert postgres.execute("SELECT count(*) FROM s.tidegate_commits") != [(0,)]


def test_a_zombie_and_its_successor_commit_once(postgres: PostgresDatabase) -> None:
    """Also if both have sent their rows before one of them stores the tokens."""
    postgres.execute("CREATE TABLE t (id bigint, v text)")
    run = SinkRun(database_sink(postgres.dsn, ROWS.schema))
    prepared = run.write(1, ROWS)
    with postgres.connect() as other:
        # The zombie has stored its tokens, and has not committed yet.
        other.execute("INSERT INTO tidegate_commits VALUES ('sink', 'job-1', 0, 1)")
        other.execute("INSERT INTO t SELECT 10 * i, 'zombie' FROM generate_series(1, 3) i")
        thread = threading.Thread(target=run.commit, args=(1, prepared))
        thread.start()
        until("the successor waits for the token", lambda: postgres.execute(WAITS) == [(1,)])
        other.commit()
    thread.join()
    assert sorted(postgres.execute("SELECT id, v FROM t")) == [(10, "zombie"), (20, "zombie"), (30, "zombie")]


def test_a_commit_whose_connection_is_lost_can_be_repeated(postgres: PostgresDatabase) -> None:
    """Before the transaction ends: nothing was written. The next call connects again."""
    postgres.execute("CREATE TABLE t (id bigint, v text)")
    run = SinkRun(database_sink(postgres.dsn, ROWS.schema))
    prepared, committer = run.write(1, ROWS), run.committer()
    end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'tidegate'"
    with postgres.connect() as other:
        other.execute("LOCK TABLE tidegate_commits IN SHARE MODE")
        failed: list[BaseException] = []

        def commit() -> None:
            try:
                committer.commit(tg.CommitToken("job-1", 1), prepared)
            except DatabaseError as error:
                failed.append(error)

        thread = threading.Thread(target=commit)
        thread.start()
        until("the commit waits", lambda: postgres.execute(WAITS) == [(1,)])
        postgres.execute(end)
        thread.join()
    assert "terminating connection" in str(failed[0])
    assert postgres.execute("SELECT count(*) FROM t") == [(0,)]
    committer.commit(tg.CommitToken("job-1", 1), prepared)
    committer.commit(tg.CommitToken("job-1", 1), prepared)
    committer.close()
    assert postgres.execute("SELECT count(*) FROM t") == [(3,)]


def test_buckets_move_between_subtasks(postgres: PostgresDatabase) -> None:
    """Rows that two subtasks prepared are committed by three others, each once, whoever has the buckets."""
    postgres.execute("CREATE TABLE t (id bigint PRIMARY KEY, v text)")
    rows = pa.table({"id": list(range(1_000)), "v": [str(i) for i in range(1_000)]})
    run = SinkRun(database_sink(postgres.dsn, rows.schema, mode="upsert", keys=["id"]))
    whole = run.write(1, rows)
    token = tg.CommitToken("job-1", 1)
    for subtask in range(3):
        mine = run.context(subtask, 3, 1).buckets
        committer = run.committer(subtask, 3, 1)
        committer.commit(token, [each for each in whole if each.bucket in mine])
        committer.close()
    assert postgres.execute("SELECT count(*), sum(id)::bigint FROM t") == [(1_000, 499_500)]
    postgres.execute("DELETE FROM t")
    run.commit(1, whole)
    assert postgres.execute("SELECT count(*) FROM t") == [(0,)]
