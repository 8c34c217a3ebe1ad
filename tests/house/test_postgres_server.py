"""The PostgreSQL of tests: databases are apart, and rows of a server that was killed are there after its start."""

from __future__ import annotations

from postgres_server import PostgresDatabase, PostgresServer, new_database


def test_a_database_has_a_name_and_logical_replication(postgres: PostgresDatabase) -> None:
    """Settings of the server that tests of change data rely on."""
    assert postgres.execute("SELECT current_database()::text, current_setting('wal_level')") == [
        (postgres.name, "logical")
    ]


def test_rows_outlive_a_crash_and_databases_are_dropped(postgres_server: PostgresServer) -> None:
    """A replication slot and a prepared transaction hinder no drop."""
    with new_database(postgres_server) as database:
        database.execute("CREATE TABLE t (id bigint)")
        database.execute("INSERT INTO t VALUES (%s)", 7)
        postgres_server.kill()
        assert not postgres_server.answers()
        assert postgres_server.start()
        assert database.execute("SELECT id FROM t") == [(7,)]
        database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", f"slot_{database.name}")
        connection = database.connect()
        connection.execute("INSERT INTO t VALUES (8)")
        connection.execute(f"PREPARE TRANSACTION '{database.name}'")
        connection.rollback()
    connection.close()
    names = postgres_server.execute("SELECT datname::text FROM pg_database")
    assert (database.name,) not in names
