"""Builds the steps that write to tables of databases: `Stream.to_postgres` and `Stream.to_sql`.

Both connect when the program is made, check the table, and make a `DatabaseSink`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidegate.api.streams.expression_columns import known_schema
from tidegate.api.streams.output_steps import to_sink
from tidegate.api.streams.step import StepOptions
from tidegate.connectors.committing_sink import DEFAULT_BUCKETS
from tidegate.connectors.sql.alchemy import AlchemyClient
from tidegate.connectors.sql.client import TableClient
from tidegate.connectors.sql.columns import check_keys, chosen_columns
from tidegate.connectors.sql.options import TableWrite, table_write
from tidegate.connectors.sql.postgres import PostgresClient
from tidegate.connectors.sql.sink import DatabaseSink
from tidegate.operators.aggregates.column_expressions import column_names
from tidegate.operators.changes import CHANGE
from tidegate.operators.sinks.sink import FLUSH_BYTES
from tidegate.storage.errors import ConfigurationError

if TYPE_CHECKING:
    from tidegate.api.streams.stream import Stream


@dataclass(frozen=True, slots=True)
class DatabaseTable:
    """The arguments of `to_postgres` and `to_sql` that describe the table."""

    address: str
    table: str
    mode: str
    keys: str | Sequence[str]
    on_conflict: str | None
    create: bool
    token_table: str


def to_postgres(stream: Stream, given: DatabaseTable, options: StepOptions) -> None:
    """Builds `Stream.to_postgres`."""
    where = f"to_postgres {options.name!r}"
    scheme = given.address.partition("://")[0] if isinstance(given.address, str) and "://" in given.address else ""
    if not isinstance(given.address, str) or not given.address or scheme not in ("", "postgresql", "postgres"):
        raise ConfigurationError(
            f"{where}: give an address of libpq, such as postgresql://user@host/database or host=... dbname=..."
        )
    _to_database(stream, where, given, PostgresClient, options)


def to_sql(stream: Stream, given: DatabaseTable, options: StepOptions) -> None:
    """Builds `Stream.to_sql`."""
    where = f"to_sql {options.name!r}"
    if not isinstance(given.address, str) or "://" not in given.address:
        raise ConfigurationError(f"{where}: give a URL of SQLAlchemy, such as sqlite:////folder/file.db")
    _to_database(stream, where, given, AlchemyClient, options)


def _to_database(
    stream: Stream,
    where: str,
    given: DatabaseTable,
    client_of: Callable[[str, TableWrite, str], TableClient],
    options: StepOptions,
) -> None:
    schema = known_schema(stream, options.name)
    keys = column_names(given.keys, f"{where}: keys=")
    changelog = stream._changelog
    changes = changelog is not None and changelog.changes
    if changelog is not None:
        changelog.check_kind_is_no_key(repr(options.name), keys)
        changelog.check_upsert(repr(options.name), keys)
    write = table_write(where, given.table, given.mode, keys, given.on_conflict, given.token_table, deletes=changes)
    if changelog is not None and write.on_conflict != "update":
        raise ConfigurationError(f"{where}: its rows replace earlier ones; remove on_conflict={given.on_conflict!r}")
    if changes:
        schema = schema.remove(schema.get_field_index(CHANGE))
    client = client_of(given.address, write, where)
    shape = client.prepare(schema, given.create)
    columns = chosen_columns(where, write.place, shape, schema)
    if keys:
        check_keys(where, write.place, shape, columns, keys)
        # Buckets are key groups, so rows must come by the hash of all keys.
        stream = stream._by_keys(keys)
    buckets = stream._program.max_parallelism or DEFAULT_BUCKETS
    sink = DatabaseSink(client, columns, schema, CHANGE if changes else None, buckets)
    to_sink(stream, sink, keys, FLUSH_BYTES, options)
