"""`QueryClient` runs queries: `PostgresQueries` through ADBC, `AlchemyQueries` through SQLAlchemy. `Rows` decodes rows.

Rows have exactly the types that the program expects. A value that does not fit its type is an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.connectors.sql.alchemy import alchemy, engine_of, reason
from tidegate.connectors.sql.client import DatabaseError, first_line
from tidegate.connectors.sql.postgres import (
    DATES,
    TIMESTAMPS,
    PostgresConnection,
    driver,
    identifier,
    is_permanent,
    numeric_type,
)
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.arrow_types import plain_schema

BATCH_BYTES = 4 << 20
"""About the size of the batches that the driver of PostgreSQL makes."""

ROWS_AT_ONCE = 10_000
"""Rows that SQLAlchemy fetches at once."""


def is_postgres(address: str) -> bool:
    """Returns whether an address is one of libpq, not a URL of SQLAlchemy."""
    return "://" not in address or address.startswith(("postgresql://", "postgres://"))


class QueryClient(ABC):
    """Runs queries of a database. It travels to the tasks with the program."""

    @abstractmethod
    def schema(self, query: str) -> pa.Schema:
        """Returns the columns of a query. Raises ConfigurationError."""

    @abstractmethod
    def one_row(self, query: str) -> tuple[Any, ...]:
        """Returns the only row of a query. Raises ConfigurationError."""

    @abstractmethod
    def quoted(self, name: str) -> str:
        """Returns a name of a column as SQL writes it."""

    @abstractmethod
    def sorted_by(self, field: pa.Field) -> str:
        """Returns the expression by which rows are sorted for one column."""

    @abstractmethod
    def batches(self, query: str, schema: pa.Schema) -> Rows:
        """Starts a query, and returns its rows as batches of the schema."""


class Rows(ABC):
    """Batches of a running query. Errors of the driver are DatabaseError, or ConfigurationError if they repeat."""

    @abstractmethod
    def next(self) -> pa.RecordBatch | None:
        """Returns the next rows, None at the end."""

    @abstractmethod
    def close(self) -> None:
        """Ends the query."""


# --- PostgreSQL ---------------------------------------------------------------------------------------------------


_NUMBERS = ("bool", "int2", "int4", "int8", "float4", "float8")
_TEXTS = ("text", "varchar", "bpchar", "name", "bytea", "json", "jsonb")
_READ = frozenset([*_NUMBERS, *_TEXTS, "date", "time", "timestamp", "timestamptz"])
"""Types of PostgreSQL whose values ADBC returns exactly."""


@dataclass(frozen=True)
class PostgresQueries(QueryClient):
    """Queries of PostgreSQL. `given` has types for columns whose type has no limits, such as numeric."""

    dsn: str
    given: pa.Schema
    where: str
    """The step, for errors."""
    advice: str = "cast it to text in the query"
    """The advice for a column of a type that is not supported."""

    def schema(self, query: str) -> pa.Schema:
        """Returns the columns of a query, with the types of `given` where it names them."""
        rows = self._started(f"SELECT * FROM ({query}\n) AS part LIMIT 0")
        try:
            found = rows.reader.schema
        finally:
            rows.close()
        if unknown := [name for name in self.given.names if name not in found.names]:
            raise ConfigurationError(
                f"{self.where}: schema= has the column {unknown[0]!r}, the query has {found.names}"
            )
        return plain_schema(pa.schema([self._field(field) for field in found]))

    def _field(self, field: pa.Field) -> pa.Field:
        metadata = field.metadata or {}
        name = metadata.get(b"POSTGRESQL:type", b"").decode()
        if name == "numeric":
            modifier = int(metadata.get(b"POSTGRESQL:typmod", b"-1"))
            limited = numeric_type(modifier) if modifier >= 4 else None
            if field.name not in self.given.names and limited is None:
                raise ConfigurationError(
                    f"{self.where}: column {field.name!r} is numeric, and its digits are not known: give "
                    f"schema={{{field.name!r}: pa.decimal128(precision, scale)}}"
                )
            found = pa.field(field.name, pa.string() if limited is None else limited)
        elif name in _READ:
            storage = field.type.storage_type if isinstance(field.type, pa.BaseExtensionType) else field.type
            found = pa.field(field.name, storage)
        else:
            raise ConfigurationError(
                f"{self.where}: column {field.name!r} has type {name or field.type}, which is not supported; "
                f"{self.advice}"
            )
        return self.given.field(field.name) if field.name in self.given.names else found

    def one_row(self, query: str) -> tuple[Any, ...]:
        """Returns the only row of a query."""
        try:
            connection = PostgresConnection(self.dsn)
            try:
                return connection.rows(query)[0]
            finally:
                connection.close()
        except driver().Error as error:
            raise ConfigurationError(f"{self.where}: {first_line(error)}") from error

    def quoted(self, name: str) -> str:
        """Returns a name as PostgreSQL writes it."""
        return identifier(name)

    def sorted_by(self, field: pa.Field) -> str:
        """Returns the column, as text in the order of bytes where it is text: json has no order of its own."""
        column = f"part.{identifier(field.name)}"
        return f'{column}::text COLLATE "C"' if pa.types.is_string(field.type) else column

    def batches(self, query: str, schema: pa.Schema) -> Rows:
        """Starts a query."""
        try:
            return self._started(query, schema)
        except ConfigurationError as error:
            if isinstance(error.__cause__, driver().Error) and not is_permanent(error.__cause__):
                raise DatabaseError(str(error)) from error
            raise

    def _started(self, query: str, schema: pa.Schema | None = None) -> PostgresRows:
        connection = None
        try:
            connection = PostgresConnection(self.dsn)
            connection.run("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            connection.run("SET TIME ZONE 'UTC'")
            cursor = connection.reader(query, BATCH_BYTES)
            return PostgresRows(cursor, schema, self.where, connection.close)
        except driver().Error as error:
            if connection is not None:
                connection.close()
            raise ConfigurationError(f"{self.where}: {first_line(error)}") from error


class PostgresRows(Rows):
    """Rows of a query, which ADBC decodes from PostgreSQL's binary COPY. `on_close` is called at the end."""

    def __init__(
        self, cursor: Any, schema: pa.Schema | None, where: str, on_close: Callable[[], None] | None = None
    ) -> None:
        self._cursor = cursor
        self._schema = schema
        self._where = where
        self._on_close = on_close
        self.reader: pa.RecordBatchReader = cursor.fetch_record_batch()

    def next(self) -> pa.RecordBatch | None:
        """Returns the next rows in the types of the schema."""
        assert self._schema is not None
        try:
            batch = self.reader.read_next_batch()
        except StopIteration:
            return None
        except (driver().Error, OSError, pa.ArrowException) as error:
            raise DatabaseError(f"{self._where}: {first_line(error)}") from error
        arrays = []
        for column, field in zip(batch.columns, self._schema, strict=True):
            arrays.append(_exact(column, field, self._where))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def close(self) -> None:
        """Ends the query."""
        self.reader.close()
        self._cursor.close()
        if self._on_close is not None:
            self._on_close()


def _exact(column: pa.Array, field: pa.Field, where: str) -> pa.Array:
    """Returns a column in its type. Raises ConfigurationError for a value that the type cannot hold."""
    values = column.storage if isinstance(column, pa.ExtensionArray) else column
    try:
        check_finite(values, field.name, where)
        found = values if values.type == field.type else values.cast(field.type)
    except pa.ArrowInvalid as error:
        raise ConfigurationError(
            f"{where}: column {field.name!r} has a value that does not fit {field.type}: {error}. Give another type "
            "in schema=, or change the query"
        ) from error
    if found.null_count and not field.nullable:
        raise ConfigurationError(f"{where}: column {field.name!r} has a null, and schema= forbids it")
    return found


def check_finite(values: pa.Array, name: str, where: str) -> None:
    """Raises ConfigurationError for PostgreSQL's infinite times, which Arrow cannot represent."""
    is_date = pa.types.is_date32(values.type)
    if not (is_date or pa.types.is_timestamp(values.type)) or values.null_count == len(values):
        return
    found = pc.min_max(values.cast(pa.int32() if is_date else pa.int64()))
    low, high = DATES if is_date else TIMESTAMPS
    if found["min"].as_py() < low or found["max"].as_py() > high:
        raise ConfigurationError(
            f"{where}: column {name!r} has an infinite time, which Arrow cannot represent; filter it in the query"
        )


# --- SQLAlchemy ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AlchemyQueries(QueryClient):
    """Queries of a database at a URL of SQLAlchemy. Its drivers return no types, so the program gives them."""

    url: str
    given: pa.Schema
    where: str
    """The step, for errors."""

    def schema(self, query: str) -> pa.Schema:
        """Returns the given columns, after a check that the query has exactly these."""
        rows = self._started(f"SELECT * FROM ({query}\n) AS part WHERE 1 = 0", self.given, ConfigurationError)
        names = list(rows.result.keys())
        rows.close()
        if names != self.given.names:
            raise ConfigurationError(
                f"{self.where}: the query has the columns {names}, and schema= has {self.given.names}"
                "; give the same columns in schema="
            )
        return self.given

    def one_row(self, query: str) -> tuple[Any, ...]:
        """Returns the only row of a query."""
        rows = self._started(query, self.given, ConfigurationError)
        try:
            return tuple(rows.result.one())
        finally:
            rows.close()

    def quoted(self, name: str) -> str:
        """Returns a name as this database writes it."""
        quoted: str = engine_of(self.url, self.where).dialect.identifier_preparer.quote_identifier(name)
        return quoted

    def sorted_by(self, field: pa.Field) -> str:
        """Returns the column, in the order of bytes where it is text."""
        column = f"part.{self.quoted(field.name)}"
        if not pa.types.is_string(field.type) and not pa.types.is_large_string(field.type):
            return column
        return f"{column} COLLATE BINARY" if self.url.startswith("sqlite") else f"BINARY {column}"

    def batches(self, query: str, schema: pa.Schema) -> Rows:
        """Starts a query."""
        return self._started(query, schema, DatabaseError)

    def _started(self, query: str, schema: pa.Schema, failure: type[ConfigurationError | DatabaseError]) -> AlchemyRows:
        engine = engine_of(self.url, self.where)
        try:
            connection = engine.connect().execution_options(stream_results=True, yield_per=ROWS_AT_ONCE)
            if engine.dialect.paramstyle in ("format", "pyformat"):
                # The driver would take a percent sign of the query for a parameter.
                query = query.replace("%", "%%")
            result = connection.exec_driver_sql(query)
        except alchemy().exc.SQLAlchemyError as error:
            engine.dispose()
            raise failure(f"{self.where}: {reason(error)}") from error

        def disconnect() -> None:
            connection.close()
            engine.dispose()

        return AlchemyRows(result, schema, self.where, disconnect)


class AlchemyRows(Rows):
    """Rows of a query, which the driver returns as Python values. `on_close` is called at the end."""

    def __init__(self, result: Any, schema: pa.Schema, where: str, on_close: Callable[[], None] | None = None) -> None:
        self.result = result
        self._schema = schema
        self._where = where
        self._on_close = on_close

    def next(self) -> pa.RecordBatch | None:
        """Returns the next rows."""
        try:
            rows = self.result.fetchmany(ROWS_AT_ONCE)
        except alchemy().exc.SQLAlchemyError as error:
            raise DatabaseError(f"{self._where}: {reason(error)}") from error
        if not rows:
            return None
        columns = zip(*rows, strict=True)
        arrays = [_from_python(values, field, self._where) for values, field in zip(columns, self._schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def close(self) -> None:
        """Ends the query."""
        self.result.close()
        if self._on_close is not None:
            self._on_close()


def _from_python(values: Sequence[Any], field: pa.Field, where: str) -> pa.Array:
    """Returns Python values of a driver as a column. SQLite has times as text and booleans as numbers."""
    try:
        if any(isinstance(value, str) for value in values) and not _is_text(field.type):
            return _exact(pc.cast(pa.array(values, pa.string()), field.type), field, where)
        if pa.types.is_boolean(field.type):
            values = [None if value is None else _as_bool(value) for value in values]
        return _exact(pa.array(values, field.type), field, where)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, ValueError) as error:
        raise ConfigurationError(
            f"{where}: column {field.name!r} has a value that does not fit {field.type}: {error}. Give another type "
            "in schema=, or change the query"
        ) from error


def _is_text(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_string(data_type) or pa.types.is_large_string(data_type))


def _as_bool(value: object) -> bool:
    if value in (0, 1):
        return bool(value)
    raise ValueError(f"{value!r} is neither 0 nor 1")
