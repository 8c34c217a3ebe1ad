"""Jobs that write to databases: appended rows, upserts and changes, each once, also after kills and at another
parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_jobs import finish, local, numbers
from postgres_server import PostgresDatabase
from stores_of_sql import Database
from waiting import until

import tidegate as tg
from tidegate.connectors.sql.postgres import PostgresConnection

pytestmark = pytest.mark.slow


def test_rows_updates_and_changes_arrive_once(tmp_path: Path, postgres: PostgresDatabase) -> None:
    """In PostgreSQL and SQLite, in tables that the sinks create."""
    rows = numbers(2_000)
    url = f"sqlite:///{tmp_path}/test.db"
    with local(2) as env:
        stream = env.from_batches(rows, splits=4, uid="rows")
        stream.to_postgres(postgres.dsn, "plain", create=True, uid="plain")
        counts = stream.key_by("k").aggregate(n=tg.count(), emit="changes")
        counts.to_postgres(postgres.dsn, "counts", mode="upsert", keys="k", create=True, uid="counts")
        sizes = counts.key_by("n").aggregate(keys=tg.count(), emit="changes")
        sizes.to_postgres(postgres.dsn, "sizes", mode="upsert", keys="n", create=True, uid="sizes")
        updates = stream.key_by("k").aggregate(n=tg.count(), emit="update")
        updates.to_sql(url, "counts", mode="upsert", keys="k", create=True, uid="sqlite")
        finish(env, tmp_path / "checkpoints")
    expected = sorted((row["k"], row["k_count"]) for row in rows.group_by("k").aggregate([("k", "count")]).to_pylist())
    assert postgres.execute("SELECT count(*), sum(x)::bigint FROM plain") == [
        (2_000, sum(rows["x"].drop_null().to_pylist()))
    ]
    assert postgres.execute("SELECT k, n FROM counts ORDER BY k") == expected
    assert Database(url).execute("SELECT k, n FROM counts ORDER BY k") == expected
    sizes_expected = {n: sum(m == n for _, m in expected) for _, n in expected}
    assert dict(postgres.execute("SELECT n, keys FROM sizes")) == sizes_expected


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_failure_around_the_commit_loses_and_doubles_nothing(
    tmp_path: Path, postgres: PostgresDatabase, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The connection is lost before the transaction ends, or with its answer. The call is repeated."""
    real, failures = PostgresConnection.commit, list(range(6))

    def commit(connection: PostgresConnection) -> None:
        stored = connection.rows("SELECT 1 FROM pg_locks WHERE locktype = 'transactionid' AND pid = pg_backend_pid()")
        if stored and failures:
            failures.pop()
            if moment == "after":
                real(connection)
            raise OSError("the connection is lost")
        real(connection)

    with local(2) as env:
        stream = env.from_batches(numbers(1_000), splits=4, uid="rows")
        stream.to_postgres(postgres.dsn, "plain", create=True, uid="plain")
        monkeypatch.setattr(PostgresConnection, "commit", commit)
        finish(env, tmp_path / "checkpoints")
    assert len(failures) < 6
    assert postgres.execute("SELECT count(*) FROM plain") == [(1_000,)]


def test_a_restored_job_continues_at_another_parallelism(tmp_path: Path, postgres: PostgresDatabase) -> None:
    """Stopped with a savepoint, and restored with more subtasks: each row once, and the newest count of each key."""
    postgres.execute("CREATE TABLE counts (k bigint PRIMARY KEY, n bigint NOT NULL)")
    postgres.execute("CREATE TABLE plain (timestamp timestamptz, value bigint)")

    def program(env: tg.StreamEnvironment) -> tg.Job:
        ticks = env.from_rate(2_000, rows=3_000, uid="ticks")
        ticks.to_postgres(postgres.dsn, "plain", uid="plain")
        keyed = ticks.select(k=tg_key()).key_by("k").aggregate(n=tg.count(), emit="update", uid="counts")
        keyed.to_postgres(postgres.dsn, "counts", mode="upsert", keys="k", uid="to-counts")
        checkpoints = tg.CheckpointConfig(interval="50ms", storage=str(tmp_path / "checkpoints"))
        return env.execute("counts", checkpoints=checkpoints, restore="latest", progress="off")

    with local(2) as env:
        job = program(env)
        until("rows are committed", lambda: postgres.execute("SELECT count(*) > 0 FROM plain") == [(True,)])
        job.cancel()
    with local(3) as env:
        assert program(env).wait("4min") == "finished"
    assert postgres.execute("SELECT count(*), count(DISTINCT value) FROM plain") == [(3_000, 3_000)]
    assert postgres.execute("SELECT count(*), sum(n)::bigint FROM counts") == [(10, 3_000)]


def tg_key() -> object:
    """The last digit of a number."""
    import polars as pl

    return pl.col("value") % 10
