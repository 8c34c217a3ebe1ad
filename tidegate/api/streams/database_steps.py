"""Builds the steps that write to tables of databases: `Stream.to_postgres` and `Stream.to_sql`.

`to_database` builds both. It connects to the database when the program is built, and checks the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tidegate.api.streams.expression_columns import known_schema
from tidegate.api.streams.output_steps import to_sink
from tidegate.api.streams.step import StepOptions
from tidegate.connectors.committing_sink import DEFAULT_BUCKETS
from tidegate.connectors.sql.alchemy import AlchemyClient
from tidegate.connectors.sql.client import TableClient
from tidegate.connectors.sql.options import table_write
from tidegate.connectors.sql.postgres import PostgresClient
from tidegate.connectors.sql.queries import is_postgres
from tidegate.connectors.sql.sink import database_sink
from tidegate.operators.aggregates.column_expressions import column_names
from tidegate.operators.changes import CHANGE
from tidegate.operators.sinks.sink import FLUSH_BYTES
from tidegate.storage.errors import ConfigurationError

if TYPE_CHECKING:
    from tidegate.api.streams.stream import Stream

Method = Literal["to_postgres", "to_sql"]
"""The method of the stream. It determines the database client and the form of an address."""

_ADDRESSES: dict[Method, str] = {
    "to_postgres": "an address of libpq, such as postgresql://user@host/database or host=... dbname=...",
    "to_sql": "a URL of SQLAlchemy, such as sqlite:////folder/file.db",
}


@dataclass(frozen=True, slots=True)
class TableArguments:
    """The arguments of `to_postgres` and `to_sql` that describe the table."""

    address: str
    table: str
    mode: str
    keys: str | Sequence[str]
    on_conflict: str | None
    create: bool
    token_table: str


def to_database(stream: Stream, method: Method, given: TableArguments, options: StepOptions) -> None:
    """Builds the step of `Stream.to_postgres` or `Stream.to_sql`.

    Raises ConfigurationError for arguments that are not valid, or a table that does not fit.
    """
    where = f"{method} {options.name!r}"
    to_postgres = method == "to_postgres"
    address = given.address
    # PostgreSQL has URLs of SQLAlchemy too. `AlchemyClient` refuses them with the advice to use the other method.
    if not isinstance(address, str) or not address or not (is_postgres(address) if to_postgres else "://" in address):
        raise ConfigurationError(f"{where}: give {_ADDRESSES[method]}")
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
    client: TableClient = PostgresClient(address, write, where) if to_postgres else AlchemyClient(address, write, where)
    kind_column = CHANGE if changes else None
    buckets = stream._program.max_parallelism or DEFAULT_BUCKETS
    sink = database_sink(client, schema, create=given.create, kind_column=kind_column, buckets=buckets)
    if keys:
        # Buckets are key groups, so rows must come by the hash of all keys.
        stream = stream._by_keys(keys)
    to_sink(stream, sink, keys, FLUSH_BYTES, options)
