"""Jobs over the log of PostgreSQL: the table of the job equals the table of the database, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import psycopg
import pytest
from local_jobs import config, local
from postgres_server import PostgresDatabase, drop_database
from waiting import until

import tidegate as tg
from tidegate.connectors.postgres_cdc import client as cdc_client
from tidegate.connectors.postgres_cdc import source as cdc_source


@pytest.fixture
def items(postgres: PostgresDatabase) -> PostgresDatabase:
    """A database with a table of some rows."""
    postgres.execute("CREATE TABLE items (id bigint PRIMARY KEY, name text, n int)")
    postgres.execute("INSERT INTO items SELECT i, 'n' || i, i FROM generate_series(1, 100) i")
    return postgres


def slot_of(database: PostgresDatabase) -> str:
    """The slot of a test."""
    return f"s_{database.name}"


class Running:
    """A job that keeps a table equal to a table of the database."""

    def __init__(self, database: PostgresDatabase, folder: Path, restore: str | None = None, **settings: Any) -> None:
        self.database, self.folder = database, folder
        self._env = local(1)
        given = {"tables": ["public.items"], "slot": slot_of(database), "uid": "cdc"}
        stream = self._env.from_postgres_cdc(database.dsn, **(given | settings))["public.items"]
        mode = "append" if restore else "error"
        self.table = stream.to_table(str(folder / "t"), mode="upsert", keys=["id"], uid="t", if_exists=mode)  # type: ignore[arg-type]
        self.job = self._env.execute("job", checkpoints=config(folder / "c", interval="20ms"), restore=restore)

    def rows(self) -> list[tuple[Any, ...]]:
        return sorted(self.table.to_polars().rows())

    def equals(self) -> None:
        """Wait until both tables are equal."""
        expected = sorted(self.database.execute("SELECT * FROM items"))
        until("the table", lambda: self.rows() == expected, lambda: (self.rows()[:5], expected[:5]))

    def stop(self) -> str:
        """Stop with a savepoint."""
        path = self.job.stop(savepoint=str(self.folder / "savepoints"))
        assert self.job.wait("4min") == "suspended"
        self._env.close()
        return path

    def error(self) -> str:
        """Wait for the failure."""
        with pytest.raises(tg.JobFailedError) as raised:
            self.job.wait("4min")
        self._env.close()
        return str(raised.value)


@pytest.fixture
def start(items: PostgresDatabase, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts jobs, which are cancelled at the end."""
    started: list[Running] = []

    def begin(**settings: Any) -> Running:
        started.append(Running(items, tmp_path, **settings))
        return started[-1]

    yield begin
    for each in started:
        each._env.close()


def test_rows_of_the_snapshot_then_every_kind_of_change(items: PostgresDatabase, start: Callable[..., Running]) -> None:
    """With a restore in between: changes that came meanwhile are read from the log."""
    running = start()
    running.equals()
    for statement in (
        "INSERT INTO items VALUES (200, 'new', NULL)",
        "UPDATE items SET name = name || '!' WHERE id < 10",
        "DELETE FROM items WHERE id BETWEEN 20 AND 30",
        "UPDATE items SET id = id + 1000 WHERE id = 5",
        "BEGIN; INSERT INTO items VALUES (300); UPDATE items SET n = 1 WHERE id = 300; DELETE FROM items; COMMIT",
        "BEGIN; INSERT INTO items VALUES (301); ROLLBACK",
    ):
        items.execute(statement)
        running.equals()
    path = running.stop()
    items.execute("UPDATE items SET n = -n")
    items.execute("INSERT INTO items SELECT i, 'later', i FROM generate_series(2000, 2999) i")
    running = start(restore=path)
    running.equals()
    items.execute("TRUNCATE items")
    running.equals()
    items.execute("INSERT INTO items VALUES (1, 'after', 1)")
    running.equals()
    running.stop()


def test_values_have_their_types(postgres: PostgresDatabase, tmp_path: Path) -> None:
    """In the snapshot and in the log, with null, text in quotes, and empty text."""
    postgres.execute("CREATE DOMAIN price AS numeric(10, 2)")
    postgres.execute(
        "CREATE TABLE v (k int, l text, b bool, f real, g float8, c price, d date, t time, ts timestamp, "
        "tz timestamptz, raw bytea, j jsonb, u uuid, a int[], x numeric, big numeric(50, 1), "
        "gen int GENERATED ALWAYS AS (k + 1) STORED, PRIMARY KEY (k, l))"
    )
    given = (
        True, 1.5, float("inf"), Decimal("-1.25"), date(2026, 1, 2), time(23, 59, 59, 1),
        datetime(2026, 1, 2, 3, 4, 5, 6), datetime(2026, 1, 2, 3, 4, 5, 6, UTC), b"\x00\xff", '{"a": 1}',
        "00000000-0000-0000-0000-000000000001", "{1,NULL}", "1.500", Decimal("123456789012345678901234567890.5"),
    )  # fmt: skip
    insert = f"INSERT INTO v VALUES (%s, %s, {', '.join(['%s'] * 14)})"
    texts = ["", 'a "quote", and\na line\\N', "\\N"]
    for text in texts:
        postgres.execute(insert, 1, text, *given)
    postgres.execute(insert, 2, "", *[None] * 14)
    with local(1) as env:
        rows = env.from_postgres_cdc(postgres.dsn, tables=["v"], slot=slot_of(postgres))["v"].collect()
        job = env.execute("job", checkpoints=config(tmp_path, interval="20ms"))
        until("the snapshot", lambda: rows.to_arrow(wait=False).num_rows == 4)
        for text in texts:
            postgres.execute(insert, 3, text, *given)
        postgres.execute(insert, 4, "", *[None] * 14)
        until("the log", lambda: rows.to_arrow(wait=False).num_rows == 8)
        found = rows.to_arrow(wait=False).to_pylist()
        job.cancel()
    values = {(row.pop("k"), row.pop("l")): list(row.values()) for row in found}
    for key in (1, 3):
        for text in texts:
            assert values[key, text] == [*given, "+I"]
    assert values[2, ""] == values[4, ""] == [*[None] * 14, "+I"]


def test_several_tables_are_streams_of_one_slot(items: PostgresDatabase, tmp_path: Path) -> None:
    """Their changes are apart, also if one transaction changes both."""
    items.execute("CREATE TABLE other (a text, b int, note text, PRIMARY KEY (b, a))")
    items.execute("INSERT INTO other VALUES ('x', 1, 'one')")
    with local(2) as env:
        streams = env.from_postgres_cdc(items.dsn, tables=["items", "public.other"], slot=slot_of(items))
        assert sorted(streams) == ["items", "public.other"]
        first = streams["items"].to_table(str(tmp_path / "1"), mode="upsert", keys=["id"])
        second = streams["public.other"].to_table(str(tmp_path / "2"), mode="upsert", keys=["a", "b"])
        job = env.execute("job", checkpoints=config(tmp_path / "c", interval="20ms"))
        until("the snapshot", lambda: len(first.to_polars()) == 100 and len(second.to_polars()) == 1)
        items.execute(
            "BEGIN; DELETE FROM items WHERE id > 2; INSERT INTO other VALUES ('y', 2, NULL); "
            "UPDATE other SET note = 'two' WHERE b = 1; COMMIT"
        )
        expected = [("x", 1, "two"), ("y", 2, None)]
        until("both", lambda: len(first.to_polars()) == 2 and sorted(second.to_polars().rows()) == expected)
        items.execute("TRUNCATE other, items")
        until("both are empty", lambda: len(first.to_polars()) == len(second.to_polars()) == 0)
        job.cancel()


def test_large_values_that_did_not_change_are_kept(items: PostgresDatabase, start: Callable[..., Running]) -> None:
    """The log does not have them."""
    items.execute("ALTER TABLE items ALTER COLUMN name SET STORAGE EXTERNAL")
    items.execute("UPDATE items SET name = repeat('x', 100000) WHERE id = 7")
    running = start()
    running.equals()
    items.execute("UPDATE items SET n = 5 WHERE id = 7")
    running.equals()
    items.execute("ALTER TABLE items REPLICA IDENTITY FULL")
    items.execute("UPDATE items SET id = 700 WHERE id = 7")
    running.equals()
    running.stop()


def confirmed(database: PostgresDatabase) -> int:
    """The position that the server may forget."""
    asked = "SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots WHERE slot_name = %s"
    return int(database.execute(asked, slot_of(database))[0][0])


def test_the_slot_follows_completed_checkpoints_only(items: PostgresDatabase, tmp_path: Path) -> None:
    """Rows that are read, and not in a checkpoint, are kept by the server."""
    with local(1) as env:
        stream = env.from_postgres_cdc(items.dsn, tables=["items"], slot=slot_of(items))["items"]
        rows = stream.map_batches(_noted(tmp_path / "seen"), schema=stream.schema).collect()
        job = env.execute("job", checkpoints=config(tmp_path / "c"))
        until("the snapshot", lambda: _seen(tmp_path / "seen") == 100)
        before = confirmed(items)
        items.execute("UPDATE items SET n = 0 WHERE id <= 10")
        until("the changes", lambda: _seen(tmp_path / "seen") == 120)
        assert confirmed(items) == before
        job.trigger_checkpoint()
        until("the position", lambda: confirmed(items) > before)
        assert rows is not None
        job.cancel()


def _noted(path: Path) -> Callable[[Any], Any]:
    def note(batch: Any) -> Any:
        with path.open("a") as file:
            file.write("x" * len(batch))
        return batch

    return note


def _seen(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_a_snapshot_that_was_cut_begins_anew(
    items: PostgresDatabase, start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that came before, and were deleted meanwhile, are gone."""
    monkeypatch.setattr(cdc_source, "READ_BYTES_MAX", 40)
    reads: list[int] = []
    real = cdc_source.PostgresCdcReader._snapshot_rows

    def cut(self: Any, snapshot: Any, offset: int, rows_max: int) -> Any:
        reads.append(offset)
        if len(reads) == 8:
            items.execute("DELETE FROM items WHERE id < 5")
            raise cdc_source.driver().OperationalError("the server is away")
        return real(self, snapshot, offset, rows_max)

    monkeypatch.setattr(cdc_source.PostgresCdcReader, "_snapshot_rows", cut)
    running = start()
    until("the rows", lambda: len(running.rows()) == 96, running.rows)
    running.equals()
    assert len(reads) > 8
    items.execute("UPDATE items SET n = 3")
    running.equals()
    running.stop()


def test_the_server_is_restarted(items: PostgresDatabase, start: Callable[..., Running]) -> None:
    """The job waits, and continues where it was."""
    running = start()
    running.equals()
    items.server.kill()
    assert items.server.start()
    items.execute("UPDATE items SET n = 3 WHERE id > 50")
    running.equals()
    running.stop()


def test_what_is_lost_is_an_error(items: PostgresDatabase, start: Callable[..., Running], tmp_path: Path) -> None:
    """A slot that was dropped, one that was read further, and one that a new job finds."""
    running = start()
    running.equals()
    path = running.stop()
    before = confirmed(items)
    running = start(restore=path)
    items.execute("UPDATE items SET n = 3")
    running.equals()
    until("the position", lambda: confirmed(items) > before + 1_000)
    later = running.stop()
    with pytest.raises(tg.ConfigurationError, match="was read up to"):
        start(restore=path)
    assert "exists already" in start_fresh(items, tmp_path / "fresh").error()
    items.execute("SELECT pg_drop_replication_slot(%s)", slot_of(items))
    with pytest.raises(tg.ConfigurationError, match=r"no longer exists: the changes of public\.items after"):
        start(restore=later)


def start_fresh(items: PostgresDatabase, folder: Path) -> Running:
    """A job that begins without a checkpoint."""
    return Running(items, folder)


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("ALTER TABLE items DROP COLUMN n", "column 'n' was dropped or renamed"),
        ("ALTER TABLE items RENAME COLUMN n TO m", "column 'n' was dropped or renamed"),
        ("ALTER TABLE items ALTER COLUMN n TYPE float8", "column 'n' was int32, and is double now"),
        ("ALTER TABLE items ALTER COLUMN name TYPE char(9)", "column 'name' has another type or fewer digits"),
        ("ALTER TABLE items ALTER COLUMN at TYPE timestamp(0)", "column 'at' has another type or fewer digits"),
        ("ALTER TABLE items DROP COLUMN n, ADD COLUMN n int DEFAULT 7", "column 'n' was dropped and added again"),
    ],
)
def test_a_change_of_the_table_that_does_not_fit_is_named(
    statement: str, error: str, items: PostgresDatabase, start: Callable[..., Running]
) -> None:
    """When the next row comes, or when the reader looks at the tables again, whatever is first."""
    items.execute("ALTER TABLE items ADD COLUMN at timestamp")
    running = start()
    running.equals()
    items.execute(statement)
    items.execute("INSERT INTO items (id, name) VALUES (7000, 'new')")
    assert f"table public.items has changed: {error}" in running.error()


@pytest.mark.parametrize(
    ("statement", "looked"),
    [
        (
            "ALTER TABLE items ADD UNIQUE (name), ALTER name SET NOT NULL, REPLICA IDENTITY USING INDEX items_name_key",
            "the log has no primary key of deleted rows of public.items",
        ),
        (
            "ALTER TABLE items DROP CONSTRAINT items_pkey, ADD PRIMARY KEY (name)",
            "table public.items has changed: its primary key was (id), and is (name) now",
        ),
    ],
)
def test_another_identity_of_deleted_rows_is_named(
    statement: str, looked: str, items: PostgresDatabase, start: Callable[..., Running]
) -> None:
    """The next row tells how deleted rows are identified. If the reader looks at the tables first, it finds why."""
    running = start()
    running.equals()
    items.execute(statement)
    items.execute("INSERT INTO items (id, name) VALUES (7000, 'new')")
    error = running.error()
    row = "table public.items has changed: deleted rows are identified by (name) now, and the job needs (id)"
    assert row in error or looked in error


def test_a_table_that_is_renamed_is_named(items: PostgresDatabase, start: Callable[..., Running]) -> None:
    """Its changes come under another name, and must not be passed over."""
    running = start()
    running.equals()
    items.execute("ALTER TABLE items RENAME TO others")
    items.execute("UPDATE others SET n = 0")
    assert "table public.items was renamed to public.others" in running.error()


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("ALTER PUBLICATION p SET (publish = 'insert')", "publication 'p' leaves out some changes"),
        ("ALTER PUBLICATION p SET TABLE others", "publication 'p' does not have table public.items"),
        ("ALTER PUBLICATION p SET TABLE items WHERE (id < 50)", "leaves out rows of public.items: WHERE (id < 50)"),
        ("DROP TABLE items; ALTER TABLE others RENAME TO items", "table public.items was dropped, or created again"),
        (
            "BEGIN; ALTER TABLE items RENAME TO old; ALTER TABLE others RENAME TO items; COMMIT",
            "table public.items was renamed to public.old",
        ),
    ],
)
def test_changes_that_the_server_does_not_send_are_an_error(
    statement: str, error: str, items: PostgresDatabase, start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row comes that could show it, so the reader compares the catalog from time to time."""
    monkeypatch.setattr(cdc_source, "SLOT_CHECK_MS", 50)
    items.execute("CREATE TABLE others (LIKE items INCLUDING ALL)")
    items.execute("CREATE PUBLICATION p FOR TABLE items")
    running = start(publication="p")
    running.equals()
    items.execute(statement)
    assert error in running.error()


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("DROP TABLE items", "table public.items was dropped, or created again"),
        ("ALTER TABLE items RENAME TO others", "table public.items was renamed to public.others"),
        ("ALTER PUBLICATION p DROP TABLE items", "publication 'p' does not have table public.items"),
    ],
)
def test_a_table_that_changes_within_a_check_is_named(statement: str, error: str, items: PostgresDatabase) -> None:
    """After the tables were compared, and before the publication is: it does not have the table any more."""

    class Late(psycopg.Connection[tuple[Any, ...]]):
        def execute(self, query: Any, *args: Any, **more: Any) -> psycopg.Cursor[tuple[Any, ...]]:
            nonlocal statement
            if "pg_publication_tables" in str(query) and statement:
                items.execute(statement)
                statement = ""
            return super().execute(query, *args, **more)

    items.execute("CREATE PUBLICATION p FOR TABLE items")
    with cdc_client.connect(items.dsn) as connection:
        tables = [cdc_client.describe_table(connection, "items")]
        cdc_client.check_tables(connection, "p", tables)
    with Late.connect(items.dsn, autocommit=True) as connection, pytest.raises(tg.ConfigurationError, match=error):
        cdc_client.check_tables(connection, "p", tables)


@pytest.mark.parametrize(
    "statements",
    [
        ["ALTER TABLE items DROP COLUMN n, ADD COLUMN n int DEFAULT 7"],
        [
            "DROP TABLE items",
            "CREATE TABLE items (id bigint PRIMARY KEY, name text, n int)",
            "ALTER PUBLICATION p ADD TABLE items",
        ],
    ],
)
def test_a_restore_finds_the_same_table_and_columns(
    statements: list[str], items: PostgresDatabase, start: Callable[..., Running]
) -> None:
    """Others of the same names have rows that the state of the job does not have."""
    items.execute("CREATE PUBLICATION p FOR TABLE items")
    running = start(publication="p")
    running.equals()
    path = running.stop()
    for statement in statements:
        items.execute(statement)
    with pytest.raises(tg.ConfigurationError, match=r"table public\.items is not what it was at the checkpoint"):
        start(restore=path, publication="p")


def test_a_publication_that_leaves_out_rows_or_columns_is_refused(items: PostgresDatabase, tmp_path: Path) -> None:
    """The snapshot would have them."""
    if int(items.execute("SHOW server_version_num")[0][0]) < 150_000:
        pytest.skip("publications have filters since PostgreSQL 15")
    items.execute("CREATE PUBLICATION some_rows FOR TABLE items WHERE (id < 3)")
    items.execute("CREATE PUBLICATION some_columns FOR TABLE items (id, n)")
    for publication, match in (("some_rows", "leaves out rows"), ("some_columns", "leaves out columns .* name")):
        with local(1) as env:
            env.from_postgres_cdc(items.dsn, tables=["items"], slot="s", publication=publication)["items"].collect()
            with pytest.raises(tg.ConfigurationError, match=match):
                env.execute("job", checkpoints=config(tmp_path))


def test_a_user_without_replication_is_refused(items: PostgresDatabase, tmp_path: Path) -> None:
    """Before the job starts, because its reader would try again without end."""
    user = f"u_{items.name}"
    items.execute(f"CREATE ROLE {user} LOGIN")
    try:
        items.execute("CREATE PUBLICATION p FOR TABLE items")
        with local(1) as env:
            dsn = items.dsn.replace("//tidegate@", f"//{user}@")
            env.from_postgres_cdc(dsn, tables=["items"], slot=slot_of(items), publication="p")["items"].collect()
            with pytest.raises(tg.ConfigurationError, match=r"(?i)wal ?sender"):
                env.execute("job", checkpoints=config(tmp_path))
    finally:
        items.execute(f"DROP ROLE {user}")


def test_a_value_that_the_server_cannot_send_is_an_error(postgres: PostgresDatabase, tmp_path: Path) -> None:
    """A database without an encoding has any bytes. The log would be read again without end."""
    name = f"{postgres.name}_ascii"
    postgres.execute(f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
    database = PostgresDatabase(postgres.server, name)
    database.execute("CREATE TABLE items (id int PRIMARY KEY, name text)")
    database.execute("INSERT INTO items VALUES (1, 'good')")
    try:
        with local(1) as env:
            rows = env.from_postgres_cdc(database.dsn, tables=["items"], slot=slot_of(database))["items"].collect()
            job = env.execute("job", checkpoints=config(tmp_path, interval="20ms"))
            until("the row", lambda: rows.to_arrow(wait=False).num_rows == 1)
            database.execute("INSERT INTO items VALUES (2, convert_from('\\xff'::bytea, 'SQL_ASCII'))")
            with pytest.raises(tg.JobFailedError, match="invalid byte sequence for encoding"):
                job.wait("4min")
    finally:
        drop_database(postgres.server, name)


def test_row_security_hides_no_rows_of_the_snapshot(items: PostgresDatabase, tmp_path: Path) -> None:
    """A user that may see only some rows gets an error, because the log has all rows."""
    user = f"u_{items.name}"
    items.execute(f"CREATE ROLE {user} LOGIN REPLICATION")
    try:
        items.execute(f"GRANT SELECT ON items TO {user}")
        items.execute("ALTER TABLE items ENABLE ROW LEVEL SECURITY")
        items.execute("CREATE POLICY p ON items USING (id < 3)")
        items.execute("CREATE PUBLICATION p FOR TABLE items")
        with local(1) as env:
            dsn = items.dsn.replace("//tidegate@", f"//{user}@")
            env.from_postgres_cdc(dsn, tables=["items"], slot=slot_of(items), publication="p")["items"].collect()
            job = env.execute("job", checkpoints=config(tmp_path, interval="20ms"))
            with pytest.raises(tg.JobFailedError, match="row-level security policy"):
                job.wait("4min")
    finally:
        items.execute(f"DROP OWNED BY {user}")
        items.execute(f"DROP ROLE {user}")


def test_a_change_that_widens_is_taken(
    items: PostgresDatabase, start: Callable[..., Running], caplog: pytest.LogCaptureFixture
) -> None:
    """Values that fit are read, one that does not fit is an error. A new column is named in the log."""
    running = start()
    running.equals()
    items.execute("ALTER TABLE items ALTER COLUMN n TYPE bigint, ALTER COLUMN name TYPE varchar(90), ADD COLUMN m int")
    items.execute("INSERT INTO items VALUES (7000, 'x', 5, 6)")
    until("the row", lambda: (7000, "x", 5) in running.rows(), running.rows)
    assert "new columns, which are not read" in caplog.text
    items.execute("INSERT INTO items VALUES (7001, 'x', 3000000000, 6)")
    assert "column 'n'" in running.error()


def test_the_log_that_the_server_keeps_is_named(
    items: PostgresDatabase, start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """In bytes, with the slot."""
    monkeypatch.setattr(cdc_source, "SLOT_CHECK_MS", 50)
    running = start(warn_bytes=1)
    running.equals()
    until("the warning", lambda: "bytes of its log for slot" in caplog.text)
    running.stop()
    assert caplog.text.count("bytes of its log for slot") == 1


def test_tables_that_cannot_be_followed_are_refused(items: PostgresDatabase, tmp_path: Path) -> None:
    """In the call, or when the job is submitted."""
    items.execute("CREATE TABLE no_key (id int)")
    items.execute("CREATE TABLE nothing (id int PRIMARY KEY)")
    items.execute("ALTER TABLE nothing REPLICA IDENTITY NOTHING")
    items.execute("CREATE VIEW v AS SELECT 1 id")
    items.execute("CREATE TABLE computed (a int, b int GENERATED ALWAYS AS (a * 2) STORED PRIMARY KEY)")
    with local(1) as env:
        for settings, match in (
            ({"tables": ["missing"]}, "no table 'missing'"),
            ({"tables": ["no_key"]}, "no primary key"),
            ({"tables": ["nothing"]}, "REPLICA IDENTITY DEFAULT"),
            ({"tables": ["computed"]}, r"primary key of public\.computed has the generated column 'b'"),
            ({"tables": ["v"]}, r"no changes of public\.v, because it is a view"),
            ({"tables": "items"}, "give a list"),
            ({"tables": ["items", "public.items"]}, r"public\.items is there twice"),
            ({"tables": ["one too many.dots.in.it"]}, "no table 'one too"),
            ({"slot": "Upper"}, "lower-case"),
            ({"dsn": "nonsense"}, "not an address"),
            ({"dsn": "postgresql://127.0.0.1:1/x"}, "failed to answer"),
        ):
            given: dict[str, Any] = {"dsn": items.dsn, "tables": ["items"], "slot": "s"}
            with pytest.raises(tg.ConfigurationError, match=match):
                env.from_postgres_cdc(**(given | settings))
    items.execute("CREATE PUBLICATION p FOR TABLE nothing")
    with local(1) as env:
        env.from_postgres_cdc(items.dsn, tables=["items"], slot="s", publication="p")["items"].collect()
        with pytest.raises(tg.ConfigurationError, match=r"ADD TABLE public\.items"):
            env.execute("job", checkpoints=config(tmp_path))


_PROGRAM = """
import sys, tidegate as tg
dsn, slot, folder = sys.argv[1:]
env = tg.StreamEnvironment.local(1)
stream = env.from_postgres_cdc(dsn, tables=["items"], slot=slot, uid="cdc")["items"]
stream.to_table(folder + "/t", mode="upsert", keys=["id"], uid="t", if_exists="append")
sums = stream.key_by("name").aggregate(total=tg.sum("n"), rows=tg.count(), emit="changes", uid="sums")
sums.to_table(folder + "/g", mode="upsert", keys=["name"], uid="g", if_exists="append")
job = env.execute("job", checkpoints=tg.CheckpointConfig(interval="30ms", storage=folder + "/c"), restore="latest")
print("runs", flush=True)
job.wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", [int(os.environ.get("CDC_KILLS", "6"))])
def test_kills_lose_and_double_nothing(kills: int, items: PostgresDatabase, tmp_path: Path) -> None:
    """The process of the job is killed while transactions of all kinds go on. Sums would show a row that came twice."""
    random = Random(7)
    command = [sys.executable, "-c", _PROGRAM, items.dsn, slot_of(items), str(tmp_path)]

    def change() -> None:
        # The statements of a transaction are sent together, and their answers are read at its end.
        with items.connect() as connection, connection.pipeline():
            for _ in range(random.randrange(1, 200)):
                key = random.randrange(1, 300)
                connection.execute(
                    random.choice(
                        (
                            f"INSERT INTO items VALUES ({key}, 'g{key % 7}', {key}) ON CONFLICT DO NOTHING",
                            f"UPDATE items SET n = n + 1, name = 'g{random.randrange(7)}' WHERE id = {key}",
                            f"DELETE FROM items WHERE id = {key}",
                        )
                    )
                )
            if random.random() < 0.03:
                connection.execute("TRUNCATE items")

    def rows(name: str) -> list[tuple[Any, ...]]:
        if not (tmp_path / name).exists():
            return []
        return sorted(tg.open_table(str(tmp_path / name)).to_polars().rows(), key=repr)

    for number in range(kills + 1):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=(tmp_path / "err").open("ab")) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == b"runs\n", (tmp_path / "err").read_text()[-3000:]
                if number == 0:
                    # A job that has completed no checkpoint begins with a slot of its own, and refuses the one it left.
                    until("a checkpoint", lambda: rows("t"))
                for _ in range(random.randrange(1, 30)):
                    change()
                if number < kills:
                    continue
                last = sorted(items.execute("SELECT * FROM items"), key=repr)
                until("the table", lambda: rows("t") == last, lambda: (len(rows("t")), len(last)))  # noqa: B023
                sums = items.execute("SELECT name, sum(n)::bigint, count(*) FROM items GROUP BY name")
                until("the sums", lambda: rows("g") == sorted(sums, key=repr), lambda: (rows("g"), sums))  # noqa: B023
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()
