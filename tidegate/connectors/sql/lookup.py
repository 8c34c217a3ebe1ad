"""`DatabaseTable` describes a database table in which a lookup join finds rows by their keys.

When the program is created, `open_table` reads the columns of the table and returns a `KeyedTable`, which is pickled to
the tasks. Each subtask opens a `LookupSession` and queries the rows of several keys in one statement. Rules:

- Statements are bounded: at most `keys_per_query` keys and about `STATEMENT_BYTES` bytes of keys (`key_parts`).
- Each statement sees the current state of the table. No transaction stays open between statements.
- Keys are equal if their values are exactly equal. A database may return further rows, for example where a collation
  ignores case; the join drops them. Types whose values a database pads or rounds cannot be keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.connectors.sql import alchemy as sql_alchemy
from tidegate.connectors.sql import postgres
from tidegate.connectors.sql.alchemy import alchemy, bound_type, engine_of, named_errors, reason, use_utc
from tidegate.connectors.sql.client import DatabaseError, first_line
from tidegate.connectors.sql.columns import UUID_OF_A_KEY, TableColumn, kind_of
from tidegate.connectors.sql.options import table_name
from tidegate.connectors.sql.postgres import PostgresConnection, driver, identifier, is_permanent, literal, place_of
from tidegate.connectors.sql.queries import BATCH_BYTES, AlchemyRows, PostgresQueries, PostgresRows, Rows, is_postgres
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.arrow_types import decoded_type, plain_schema
from tidegate.storage.schemas.row_schemas import SchemaLike, as_schema
from tidegate.storage.units import parse_duration_ms

if TYPE_CHECKING:
    import sqlalchemy as sa

WHERE = "lookup_join"
KEYS_PER_QUERY_MAX = 30_000
STATEMENT_BYTES = 4 << 20
"""Approximate limit of the bytes of keys in a statement, unless one key is larger."""

_PARAMETERS_MAX = 30_000
"""Maximum number of parameters in a statement. SQLite allows 32,766, MySQL 65,535."""


@dataclass(frozen=True, slots=True)
class DatabaseTable:
    """A table or view of a database, in which `Stream.lookup_join` finds the rows of its keys.

    Rows are read by queries for the keys of a batch, so the table may be larger than memory, and needs an index on the
    keys. Needs `pip install 'tidegate[databases]'`; see `docs/databases.md`.

    - `address`: for PostgreSQL an address of libpq, such as "postgresql://user@host/database", else a URL of SQLAlchemy
      for SQLite, MySQL or MariaDB, such as "sqlite:////folder/file.db".
    - `table`: a name, or "schema.table".
    - `columns`: the columns to read, with the keys; by default all.
    - `schema`: types of columns whose types the database does not limit, such as numeric without a precision.
    - `cache_ttl`: how long the rows of a key are cached (also that a key has no rows), a duration. By default nothing
      is cached.
    - `cache_rows`: maximum number of rows in the cache of each subtask. A key without rows counts as one row.
    - `keys_per_query`: maximum number of keys in a query.
    - `retry_for`: how long a query is repeated when the database does not answer, a duration; then the task fails.

    Example:

        >>> import sqlite3
        >>> database = sqlite3.connect("users.db", isolation_level=None)
        >>> _ = database.execute("CREATE TABLE users (user TEXT, country TEXT)")
        >>> _ = database.execute("INSERT INTO users VALUES ('ann', 'NL'), ('bob', 'DE')")
        >>> users = tg.DatabaseTable("sqlite:///users.db", "users", cache_ttl="1min")
        >>> orders.lookup_join(users, on="user").limit(2).show()
        +------+--------+------+---------+
        | user | amount |   at | country |
        +------+--------+------+---------+
        | ann  |     30 |    0 | NL      |
        | bob  |      5 | 1000 | DE      |
        +------+--------+------+---------+
    """

    address: str
    table: str
    _: KW_ONLY
    columns: str | Sequence[str] | None = None
    schema: SchemaLike | None = None
    cache_ttl: str | timedelta | int | None = None
    cache_rows: int = 100_000
    keys_per_query: int = 1_000
    retry_for: str | timedelta | int = "1min"


@dataclass(frozen=True, slots=True)
class LookupLimits:
    """The checked limits of a lookup. `ttl_ms` is None without a cache."""

    ttl_ms: int | None
    cache_rows: int
    keys_per_query: int
    retry_ms: int


def lookup_limits(given: DatabaseTable) -> LookupLimits:
    """Parses and checks the limits of a lookup. Raises ConfigurationError."""
    ttl_ms = None
    if given.cache_ttl is not None:
        ttl_ms = parse_duration_ms(given.cache_ttl, setting="DatabaseTable(cache_ttl=...)")
        if not ttl_ms:
            raise ConfigurationError("DatabaseTable: cache_ttl must be greater than 0; remove it for no cache")
    if type(given.cache_rows) is not int or given.cache_rows < 1:
        raise ConfigurationError(f"DatabaseTable: cache_rows={given.cache_rows!r}: it must be at least 1")
    if type(given.keys_per_query) is not int or not 1 <= given.keys_per_query <= KEYS_PER_QUERY_MAX:
        raise ConfigurationError(
            f"DatabaseTable: keys_per_query={given.keys_per_query!r}: it must be between 1 and {KEYS_PER_QUERY_MAX}"
        )
    retry_ms = parse_duration_ms(given.retry_for, setting="DatabaseTable(retry_for=...)")
    return LookupLimits(ttl_ms, given.cache_rows, given.keys_per_query, retry_ms)


class LookupSession(ABC):
    """A database connection that reads rows by keys. It connects at its first query, and again after an error."""

    @abstractmethod
    def rows(self, keys: pa.RecordBatch, rows_max: int) -> pa.Table:
        """Returns the rows with these keys, in any order. Keys must be distinct and not null.

        Raises DatabaseError for a temporary failure, and ConfigurationError for a permanent one, and if there are more
        than `rows_max` rows.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the connection."""


@dataclass(frozen=True)
class KeyedTable(ABC):
    """A database table with the columns that a lookup reads. It is pickled with the program."""

    address: str
    place: tuple[str | None, str]
    columns: tuple[TableColumn, ...]
    schema: pa.Schema

    @property
    def where(self) -> str:
        """Returns the name of the step and of the table, for errors."""
        return f"{WHERE}: table {_shown(self.place)}"

    def check_keys(self, keys: Sequence[str]) -> None:
        """Raises ConfigurationError for a column that cannot be looked up by exact values."""
        by_name = {column.name: column for column in self.columns}
        for name in keys:
            has_text = by_name[name].accepts == "text"
            if by_name[name].accepts is not None and has_text != (kind_of(self.schema.field(name).type) == "text"):
                raise ConfigurationError(
                    f"{self.where}: column {name!r} ({by_name[name].type_text}) is a key, and schema= has "
                    f"{self.schema.field(name).type}: equal values may have several texts. Remove it from schema=, and "
                    "cast the key in a step before the join"
                )
            if (why := self.why_no_key(by_name[name])) is not None:
                raise ConfigurationError(
                    f"{self.where}: column {name!r} ({by_name[name].type_text}) cannot be a key: {why}"
                )

    def why_no_key(self, column: TableColumn) -> str | None:
        """Returns text about why a column cannot be used as a lookup key, or None if it can."""
        data_type = decoded_type(self.schema.field(column.name).type)
        if pa.types.is_floating(data_type):
            return "equal floats may differ in their bytes (0.0 and -0.0, NaN); use a column of integers or decimals"
        if not any(check(data_type) for check in _KEY_TYPES):
            return "keys are integers, decimals, booleans, texts or dates; give a view with such a column"
        return None

    @abstractmethod
    def session(self, keys: Sequence[str]) -> LookupSession:
        """Returns a session that finds rows by these key columns. It has not connected yet."""


_KEY_TYPES = (
    pa.types.is_integer,
    pa.types.is_decimal,
    pa.types.is_boolean,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_date32,
)


def open_table(given: DatabaseTable) -> KeyedTable:
    """Reads the columns of the table, and returns its description. Raises ConfigurationError if it cannot be read."""
    if not isinstance(given.address, str) or not given.address:
        raise ConfigurationError(f"DatabaseTable(address={given.address!r}): give the address of a database, a string")
    place = table_name("DatabaseTable", given.table)
    types = pa.schema([]) if given.schema is None else as_schema(given.schema, "DatabaseTable(schema=...)")
    names = [given.columns] if isinstance(given.columns, str) else given.columns
    of_database = _postgres_table if is_postgres(given.address) else _alchemy_table
    return of_database(given.address, place, names, types)


def key_parts(keys: pa.RecordBatch, keys_max: int, bytes_max: int = STATEMENT_BYTES) -> Iterator[tuple[int, int]]:
    """Yields the ranges (first row, number of rows) into which keys are divided, one range for each query."""
    sizes = np.full(keys.num_rows, 8 * keys.num_columns, np.int64)
    for column in keys.columns:
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            sizes += pc.binary_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
    ends = np.cumsum(sizes)
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        fit = int(np.searchsorted(ends, before + bytes_max, side="right")) - start
        count = min(max(fit, 1), keys_max, len(ends) - start)
        yield start, count
        start += count


def _shown(place: tuple[str | None, str]) -> str:
    schema, table = place
    return table if schema is None else f"{schema}.{table}"


def _chosen(
    place: tuple[str | None, str], found: Sequence[TableColumn], names: Sequence[str] | None, types: pa.Schema
) -> tuple[TableColumn, ...]:
    """Returns the columns to read. Raises ConfigurationError for a missing table or column."""
    by_name = {column.name: column for column in found}
    if not found:
        raise ConfigurationError(f"{WHERE}: there is no table {_shown(place)}; check its name and its schema")
    chosen = tuple(by_name) if names is None else tuple(names)
    if unknown := [name for name in [*chosen, *types.names] if name not in by_name]:
        raise ConfigurationError(
            f"{WHERE}: table {_shown(place)} has no column {unknown[0]!r}; name one of {', '.join(by_name)}"
        )
    if len(set(chosen)) < len(chosen):
        raise ConfigurationError(f"DatabaseTable: columns={list(chosen)} has a column twice; name it once")
    if left := [name for name in types.names if name not in chosen]:
        raise ConfigurationError(f"DatabaseTable: schema= has the column {left[0]!r}, and columns= lacks it; add it")
    return tuple(by_name[name] for name in chosen)


def _all_rows(rows: Rows, schema: pa.Schema, rows_max: int, where: str) -> pa.Table:
    """Reads all rows of a query, and ends the query. Raises ConfigurationError for more than `rows_max` rows."""
    batches = []
    count = 0
    try:
        while (batch := rows.next()) is not None:
            count += batch.num_rows
            if count > rows_max:
                raise ConfigurationError(
                    f"{where}: the keys of one batch have more rows than max_rows= allows. Check that on= names the "
                    "right columns, or raise max_rows="
                )
            batches.append(batch)
    finally:
        rows.close()
    return pa.Table.from_batches(batches, schema)


# --- PostgreSQL ---------------------------------------------------------------------------------------------------

_SESSION = {
    "application_name": "tidegate",
    "default_transaction_read_only": "on",
    "statement_timeout": "30s",
    "timezone": "UTC",
    "client_min_messages": "warning",
}


def _postgres_table(
    dsn: str, place: tuple[str | None, str], names: Sequence[str] | None, types: pa.Schema
) -> PostgresTable:
    where = f"{WHERE}: table {_shown(place)}"
    try:
        connection = PostgresConnection(dsn)
    except driver().Error as error:
        raise ConfigurationError(
            f"{where}: PostgreSQL does not answer: {first_line(error)}; check that it runs, and that the address is "
            "right"
        ) from error
    try:
        found = postgres.columns_of(connection, literal(place_of(*place)))
    except driver().Error as error:
        raise ConfigurationError(
            f"{where}: the columns of table {_shown(place)} cannot be read: {first_line(error)}; check the rights of "
            "the user"
        ) from error
    finally:
        connection.close()
    columns = _chosen(place, found, names, types)
    selected = f"SELECT {_selected(columns)} FROM {place_of(*place)} AS part"
    queries = PostgresQueries(dsn, types, where, advice="give the other columns in columns=, or a view that casts it")
    return PostgresTable(dsn, place, columns, queries.schema(selected))


def _selected(columns: Sequence[TableColumn]) -> str:
    """Returns the column list of a SELECT statement. Types such as uuid, json and enums are read as text."""
    parts = []
    for column in columns:
        name = identifier(column.name)
        parts.append(f"part.{name}::text AS {name}" if column.cast else f"part.{name}")
    return ", ".join(parts)


class PostgresTable(KeyedTable):
    """A `KeyedTable` in PostgreSQL."""

    def why_no_key(self, column: TableColumn) -> str | None:
        """Returns the reason why a column cannot be a lookup key, or None if it can."""
        if column.type_text.startswith(("character(", "bpchar")):
            return "the database pads its values with spaces; use text or varchar"
        if column.cast and column.format != "uuid":
            return "it is compared by other rules than text; give a view with a column of type text"
        return super().why_no_key(column)

    def session(self, keys: Sequence[str]) -> PostgresLookup:
        """Returns a session that finds rows by these key columns."""
        return PostgresLookup(self, tuple(keys))


class PostgresLookup(LookupSession):
    """Reads rows from PostgreSQL over one connection, as Arrow batches in the binary COPY format."""

    def __init__(self, table: PostgresTable, keys: tuple[str, ...]) -> None:
        by_name = {column.name: column for column in table.columns}
        self._table = table
        self._keys = [by_name[name] for name in keys]
        self._select = f"SELECT {_selected(table.columns)} FROM {place_of(*table.place)} AS part WHERE "
        self._connection: PostgresConnection | None = None

    def rows(self, keys: pa.RecordBatch, rows_max: int) -> pa.Table:
        """Returns the rows with these keys, in any order."""
        table = self._table
        keys = _possible(keys, self._keys)
        if not keys.num_rows:
            return table.schema.empty_table()
        try:
            cursor = self._connected().reader(self._select + _condition(keys, self._keys), BATCH_BYTES)
            return _all_rows(PostgresRows(cursor, table.schema, table.where), table.schema, rows_max, table.where)
        except driver().Error as error:
            self.close()
            kind = ConfigurationError if is_permanent(error) else DatabaseError
            raise kind(
                f"{table.where}: the query for the rows of the keys failed: {first_line(error)}; check the table and "
                "that PostgreSQL runs"
            ) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connected(self) -> PostgresConnection:
        if self._connection is None:
            connection = PostgresConnection(self._table.address, autocommit=True)
            try:
                for name, value in _SESSION.items():
                    connection.run(f"SET {name} = {literal(value)}")
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection


def _possible(keys: pa.RecordBatch, columns: Sequence[TableColumn]) -> pa.RecordBatch:
    """Returns the keys without rows that contain a value which the server would refuse with an error.

    No row of the table can have such a key.
    """
    for name, column in zip(keys.schema.names, columns, strict=True):
        values = keys.column(name)
        if column.format == "uuid":
            keys = keys.filter(pc.match_substring_regex(values, UUID_OF_A_KEY))
        elif column.accepts == "text":
            keys = keys.filter(pc.invert(pc.match_substring(values, "\0")))
        elif pa.types.is_date32(values.type):
            days = values.cast(pa.int32())
            low, high = postgres.DATES
            keys = keys.filter(pc.and_(pc.greater_equal(days, low), pc.less_equal(days, high)))
    return keys


def _condition(keys: pa.RecordBatch, columns: Sequence[TableColumn]) -> str:
    """Returns the SQL condition for rows with one of these keys. Each row matches only once."""
    arrays = [_array(values, column) for values, column in zip(keys.columns, columns, strict=True)]
    epoch = "DATE '1970-01-01' + "
    shift = [epoch if pa.types.is_date32(values.type) else "" for values in keys.columns]
    if len(columns) == 1:
        name = identifier(columns[0].name)
        if shift[0]:
            return f"part.{name} = ANY(ARRAY(SELECT {epoch}day FROM unnest({arrays[0]}) AS wanted(day)))"
        return f"part.{name} = ANY({arrays[0]})"
    names = ", ".join(f"part.{identifier(column.name)}" for column in columns)
    wanted = [f"key_{number}" for number in range(len(columns))]
    values = ", ".join(begin + name for begin, name in zip(shift, wanted, strict=True))
    return f"({names}) IN (SELECT {values} FROM unnest({', '.join(arrays)}) AS wanted({', '.join(wanted)}))"


def _array(values: pa.Array, column: TableColumn) -> str:
    """Returns values as an SQL array literal. Dates are written as days since 1970."""
    data_type = values.type
    if pa.types.is_date32(data_type):
        return f"'{{{','.join(map(str, values.cast(pa.int32()).to_pylist()))}}}'::integer[]"
    if pa.types.is_string(data_type) or pa.types.is_large_string(data_type):
        escaped = pc.replace_substring(pc.replace_substring(values, "\\", "\\\\"), '"', '\\"')
        text = '{"' + '","'.join(escaped.to_pylist()) + '"}'
        return f"{literal(text)}::{'uuid' if column.format == 'uuid' else 'text'}[]"
    kind = "numeric" if pa.types.is_decimal(data_type) else postgres.type_in_postgres(data_type)
    return f"'{{{','.join(values.cast(pa.string()).to_pylist())}}}'::{kind}[]"


# --- SQLAlchemy ---------------------------------------------------------------------------------------------------


def _alchemy_table(
    url: str, place: tuple[str | None, str], names: Sequence[str] | None, types: pa.Schema
) -> AlchemyTable:
    where = f"{WHERE}: table {_shown(place)}"
    engine = engine_of(url, where)
    name = engine.dialect.name
    if name == "postgresql":
        raise ConfigurationError(f"{where}: give an address of libpq, such as postgresql://user@host/database")
    if name not in ("sqlite", "mysql", "mariadb"):
        raise ConfigurationError(
            f"{where}: {name} is not a supported database; give the URL of PostgreSQL, SQLite, MySQL or MariaDB"
        )
    sql_alchemy.check_file(engine, where)
    try:
        with named_errors(where):
            found = _found_columns(engine, place)
    finally:
        engine.dispose()
    columns = _chosen(place, found, names, types)
    fields = []
    for column in columns:
        if column.name in types.names:
            fields.append(types.field(column.name))
        elif column.arrow is None:
            raise ConfigurationError(
                f"{where}: column {column.name!r} has type {column.type_text}, which is not supported. Give its type "
                "in schema=, or the other columns in columns="
            )
        else:
            fields.append(pa.field(column.name, column.arrow))
    return AlchemyTable(url, place, columns, plain_schema(pa.schema(fields)))


def _found_columns(engine: sa.Engine, place: tuple[str | None, str]) -> tuple[TableColumn, ...]:
    try:
        return sql_alchemy.columns_of(engine, *place)
    except alchemy().exc.NoSuchTableError:
        return ()


class AlchemyTable(KeyedTable):
    """A `KeyedTable` in SQLite, MySQL or MariaDB."""

    def session(self, keys: Sequence[str]) -> AlchemyLookup:
        """Returns a session that finds rows by these key columns."""
        return AlchemyLookup(self, tuple(keys))


class AlchemyLookup(LookupSession):
    """Reads rows through SQLAlchemy, as Python values."""

    def __init__(self, table: AlchemyTable, keys: tuple[str, ...]) -> None:
        self._table = table
        self._keys = keys
        self._engine: sa.Engine | None = None

    def rows(self, keys: pa.RecordBatch, rows_max: int) -> pa.Table:
        """Returns the rows with these keys, in any order."""
        sa, table = alchemy(), self._table
        for name in keys.schema.names:
            if pa.types.is_date32(keys.schema.field(name).type):
                keys = keys.filter(_in_python(keys.column(name)))
        at_once = _PARAMETERS_MAX // keys.num_columns
        found = [table.schema.empty_table()]
        try:
            engine = self._connected()
            with engine.connect() as connection:
                for start in range(0, keys.num_rows, at_once):
                    part = keys.slice(start, at_once)
                    values = [column.to_pylist() for column in part.columns]
                    wanted = values[0] if len(values) == 1 else list(zip(*values, strict=True))
                    rows = AlchemyRows(connection.execute(self._statement, {"keys": wanted}), table.schema, table.where)
                    found.append(_all_rows(rows, table.schema, rows_max, table.where))
                    rows_max -= found[-1].num_rows
        except sa.exc.SQLAlchemyError as error:
            self.close()
            if sql_alchemy.is_permanent(error):
                raise ConfigurationError(
                    f"{table.where}: the database refuses the query for the rows of the keys: {reason(error)}; check "
                    "the table"
                ) from error
            raise DatabaseError(
                f"{table.where}: the query for the rows of the keys failed: {reason(error)}; check that the database "
                "runs"
            ) from error
        return pa.concat_tables(found)

    def close(self) -> None:
        """Closes all connections of the engine."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.dispose()

    def _connected(self) -> sa.Engine:
        if self._engine is None:
            self._engine = engine_of(self._table.address, self._table.where)
            if self._engine.dialect.name != "sqlite":
                use_utc(self._engine)
            self._statement = self._select()
        return self._engine

    def _select(self) -> Any:
        sa, (schema, name) = alchemy(), self._table.place
        columns = [sa.Column(column.name, bound_type(column)) for column in self._table.columns]
        table = sa.Table(name, sa.MetaData(), *columns, schema=schema)
        keys = [table.c[name] for name in self._keys]
        of_keys = keys[0] if len(keys) == 1 else sa.tuple_(*keys)
        # Results are decoded by the types of the table here, so they must come as the driver returns them.
        read = [
            sa.type_coerce(_read(table.c[column.name], column), sa.types.NullType()).label(column.name)
            for column in self._table.columns
        ]
        return sa.select(*read).where(of_keys.in_(sa.bindparam("keys", expanding=True)))


def _read(found: sa.Column[Any], column: TableColumn) -> Any:
    """Returns the expression that reads a column. MySQL returns a FLOAT with six digits, and a DOUBLE with all."""
    return found * alchemy().literal_column("1e0") if column.accepts == "float32" else found


def _in_python(days: pa.Array) -> pa.Array:
    """Returns which dates Python has, because the drivers of SQLAlchemy take Python values."""
    low, high = sql_alchemy.DAYS
    numbers = days.cast(pa.int32())
    return pc.and_(pc.greater_equal(numbers, low), pc.less_equal(numbers, high))
