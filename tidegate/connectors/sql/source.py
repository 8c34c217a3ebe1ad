"""`SqlSource`: the rows of a query, read in ranges of a column, which subtasks share.

A split is a range of the values of `partition_by`. The ranges cover every value, so each row is in exactly one of them.
Rules:

- A query has no order, and positions need one. So rows of a range are sorted by the partition column and then by all
  other columns. Rows that are equal in all of them are interchangeable.
- A range is read by one statement, and so sees one state of the table. Ranges are read at different times: rows that
  move to another range meanwhile may be missed or read twice. Read a table, or select rows, that do not change.
- A position contains the number of rows and the sum of their hashes. A reader that continues there, after a failure or
  a restore, reads the range from its beginning and compares both. Rows that have changed fail the job.
- Rows whose partition value is null would be in no range. They are counted before the job starts, and refused.
"""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.connectors.source import ReadResult, SourceReader, SourceSplit
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
from tidegate.state.kernels.hashing import hash_columns
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.arrow_types import plain_schema

BATCH_BYTES = 4 << 20
"""About the size of the batches that the driver of PostgreSQL makes."""

ROWS_AT_ONCE = 10_000
"""Rows that SQLAlchemy fetches at once."""

_EPOCH = datetime.datetime(1970, 1, 1)


@wire
@dataclass(frozen=True, slots=True)
class RangePosition:
    """A range of values, and the rows of it that were read. `low` and `high` are literals of SQL; None is no limit.

    `low` is the first value, `high` is the first value of the next range. `digest` is the sum of the hashes of the
    rows, modulo 2^64.
    """

    low: str | None
    high: str | None
    rows: int = 0
    digest: int = 0


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


@dataclass(frozen=True)
class SqlSource:
    """A bounded source over the rows of a query."""

    client: QueryClient
    query: str
    schema: pa.Schema
    ranges: tuple[RangePosition, ...]
    partition_by: str | None

    def splits(self) -> Sequence[SourceSplit]:
        """Returns one split for each range."""
        return tuple(
            SourceSplit(f"range {number} [{each.low or 'min'}, {each.high or 'max'})", encode(each))
            for number, each in enumerate(self.ranges)
        )

    def check_restored(self, splits: Sequence[SourceSplit]) -> None:
        """Raises ConfigurationError for splits of another source. A restored job reads the ranges of its first run."""
        if strange := [s.split_id for s in splits if s.payload and not isinstance(decode(s.payload), RangePosition)]:
            raise ConfigurationError(
                f"its split {strange[0]!r} is not a range of a query; give the source of the checkpoint, or start "
                "without restore"
            )

    def reader(self) -> SourceReader:
        """Returns a reader for one subtask."""
        return SqlReader(self)

    def statement(self, part: RangePosition) -> str:
        """Returns the query for the rows of a range, in their order."""
        client = self.client
        names = ", ".join(f"part.{client.quoted(name)}" for name in self.schema.names)
        first = [] if self.partition_by is None else [self.partition_by]
        order = [*first, *(name for name in self.schema.names if name not in first)]
        by = ", ".join(client.sorted_by(self.schema.field(name)) for name in order)
        conditions = []
        if self.partition_by is not None:
            column = f"part.{client.quoted(self.partition_by)}"
            if part.low is not None:
                conditions.append(f"{column} >= {part.low}")
            if part.high is not None:
                # A null that comes after the check of all values is in the first range.
                conditions.append(f"({column} < {part.high}" + (f" OR {column} IS NULL)" if part.low is None else ")"))
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        return f"SELECT {names} FROM ({self.query}\n) AS part{where} ORDER BY {by}"


class SqlReader:
    """Reads the ranges of one subtask, one after the other."""

    def __init__(self, source: SqlSource) -> None:
        self._source = source
        self._open: tuple[str, RangePosition] | None = None
        """The range that is being read, and the position after the rows that were returned."""
        self._rows: Rows | None = None
        self._held: pa.RecordBatch | None = None

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Returns the next rows of a range. Raises ConfigurationError if its earlier rows have changed."""
        position = decode(split.payload)
        assert isinstance(position, RangePosition)
        if self._open != (split.split_id, position):
            self._begin(split, position)
        batch = self._next(rows_max)
        if batch is None:
            self.close()
            return ReadResult(None, offset, at_end=True)
        after = replace(
            position,
            rows=position.rows + batch.num_rows,
            digest=(position.digest + _digest(batch)) % (1 << 64),
        )
        self._open = split.split_id, after
        return ReadResult(batch, offset + batch.num_rows, at_end=False, payload=encode(after))

    def close(self) -> None:
        """Ends the query of the current range."""
        rows, self._rows, self._held, self._open = self._rows, None, None, None
        if rows is not None:
            rows.close()

    def _begin(self, split: SourceSplit, position: RangePosition) -> None:
        self.close()
        source = self._source
        self._rows = source.client.batches(source.statement(position), source.schema)
        skipped = digest = 0
        while skipped < position.rows:
            batch = self._next(position.rows - skipped)
            if batch is None:
                break
            skipped += batch.num_rows
            digest = (digest + _digest(batch)) % (1 << 64)
        if (skipped, digest) != (position.rows, position.digest):
            self.close()
            raise ConfigurationError(
                f"from_sql: {split.split_id}: its first {position.rows} rows were read before, and have changed in the "
                "database since then. Rows would be lost or come twice. Restore the rows, or start the program without "
                "restore; read a query whose rows do not change"
            )

    def _next(self, rows_max: int) -> pa.RecordBatch | None:
        """Returns the next rows, at most `rows_max`, or None at the end."""
        assert self._rows is not None
        while self._held is None or not self._held.num_rows:
            self._held = self._rows.next()
            if self._held is None:
                return None
        batch, self._held = self._held.slice(0, rows_max), self._held.slice(rows_max)
        return batch


def _digest(batch: pa.RecordBatch) -> int:
    """Returns the sum of the hashes of rows, which does not depend on how they are cut into batches."""
    return int(np.sum(hash_columns(batch, batch.schema.names), dtype=np.uint64))


def ranges_of(
    client: QueryClient, query: str, schema: pa.Schema, partition_by: str, count: int
) -> tuple[RangePosition, ...]:
    """Returns ranges that cover all values of a column. Raises ConfigurationError for a column with nulls.

    The first and the last range have no limit, so rows that are added outside later are in one of them.
    """
    column = f"part.{client.quoted(partition_by)}"
    low, high, all_rows, with_value = client.one_row(
        f"SELECT min({column}), max({column}), count(*), count({column}) FROM ({query}\n) AS part"
    )
    if all_rows != with_value:
        raise ConfigurationError(
            f"from_sql: {all_rows - with_value} of {all_rows} rows have NULL in partition_by={partition_by!r}, and "
            f"would be in no range. Add WHERE {partition_by} IS NOT NULL to the query, or give another column"
        )
    if low is None or count == 1:
        return (RangePosition(None, None),)
    literal_of = _literals(schema.field(partition_by).type)
    first, last = _as_number(low), _as_number(high)
    edges = sorted({first + (last - first + 1) * number // count for number in range(1, count)} - {first})
    limits = [None, *(literal_of(edge) for edge in edges), None]
    return tuple(RangePosition(a, b) for a, b in pairwise(limits))


def check_partition_column(client: QueryClient, schema: pa.Schema, partition_by: str) -> None:
    """Raises ConfigurationError unless the column exists, and has a type that can be cut into ranges."""
    if partition_by not in schema.names:
        raise ConfigurationError(
            f"from_sql: there is no column {partition_by!r} for partition_by; it has {schema.names}"
        )
    data_type = schema.field(partition_by).type
    _literals(data_type)
    if isinstance(client, AlchemyQueries) and client.url.startswith("sqlite") and not pa.types.is_integer(data_type):
        raise ConfigurationError(f"from_sql: partition_by={partition_by!r}: SQLite needs a column of integers")


def sql_source(address: str, query: str, given: pa.Schema, partition_by: str | None, count: int) -> SqlSource:
    """Returns the source of a query. Connects to check it, and to choose ranges. Raises ConfigurationError."""
    if not isinstance(query, str) or not query.strip():
        raise ConfigurationError(f"from_sql: query={query!r}; give a SELECT")
    if " " not in query.strip():
        raise ConfigurationError(f"from_sql: query={query!r}; give a SELECT, such as 'SELECT * FROM {query.strip()}'")
    query = query.rstrip().rstrip(";")
    client: QueryClient
    if "://" not in address or address.startswith(("postgresql://", "postgres://")):
        client = PostgresQueries(address, given)
    else:
        client = AlchemyQueries(address, given)
        if not given.names:
            raise ConfigurationError("from_sql: give schema=, the columns and types; only PostgreSQL returns them")
    schema = client.schema(query)
    check_columns(schema)
    if partition_by is None:
        return SqlSource(client, query, schema, (RangePosition(None, None),), None)
    check_partition_column(client, schema, partition_by)
    return SqlSource(client, query, schema, ranges_of(client, query, schema, partition_by, count), partition_by)


def check_columns(schema: pa.Schema) -> None:
    """Raises ConfigurationError for columns whose rows cannot be compared after a failure."""
    if len(set(schema.names)) < len(schema.names):
        raise ConfigurationError(f"from_sql: the query has two columns of one name: {schema.names}; name them by AS")
    for field in schema:
        if pa.types.is_nested(field.type) or pa.types.is_null(field.type):
            raise ConfigurationError(
                f"from_sql: column {field.name!r} has type {field.type}, which is not supported; cast it in the query, "
                "for example to text"
            )


def _literals(data_type: pa.DataType) -> Callable[[int], str]:
    """Returns the function that writes a number as a literal of a type of partition columns."""
    types = pa.types
    if types.is_integer(data_type):
        return str
    if types.is_date32(data_type):
        return lambda days: f"DATE '{datetime.date(1970, 1, 1) + datetime.timedelta(days)}'"
    if types.is_timestamp(data_type):
        zone = "" if data_type.tz is None else "+00"
        kind = "TIMESTAMP" if data_type.tz is None else "TIMESTAMPTZ"
        return lambda micros: f"{kind} '{(_EPOCH + datetime.timedelta(microseconds=micros)).isoformat(' ')}{zone}'"
    raise ConfigurationError(
        f"from_sql: partition_by has type {data_type}; give a column of integers, dates or timestamps"
    )


def _as_number(value: object) -> int:
    """Returns a value of a partition column as an integer: days or microseconds since 1970."""
    if isinstance(value, datetime.datetime):
        naive = value if value.tzinfo is None else value.astimezone(datetime.UTC).replace(tzinfo=None)
        return (naive - _EPOCH) // datetime.timedelta(microseconds=1)
    if isinstance(value, datetime.date):
        return (value - _EPOCH.date()).days
    if isinstance(value, int | Decimal) and value == int(value):
        return int(value)
    raise ConfigurationError(
        f"from_sql: partition_by has the value {value!r}, which is not an integer, date or timestamp"
    )


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

    def schema(self, query: str) -> pa.Schema:
        """Returns the columns of a query, with the types of `given` where it names them."""
        rows = self._started(f"SELECT * FROM ({query}\n) AS part LIMIT 0")
        try:
            found = rows.reader.schema
        finally:
            rows.close()
        if unknown := [name for name in self.given.names if name not in found.names]:
            raise ConfigurationError(f"from_sql: schema= has the column {unknown[0]!r}, the query has {found.names}")
        return plain_schema(pa.schema([self._field(field) for field in found]))

    def _field(self, field: pa.Field) -> pa.Field:
        metadata = field.metadata or {}
        name = metadata.get(b"POSTGRESQL:type", b"").decode()
        if name == "numeric":
            modifier = int(metadata.get(b"POSTGRESQL:typmod", b"-1"))
            limited = numeric_type(modifier) if modifier >= 4 else None
            if field.name not in self.given.names and limited is None:
                raise ConfigurationError(
                    f"from_sql: column {field.name!r} is numeric, and its digits are not known: give "
                    f"schema={{{field.name!r}: pa.decimal128(precision, scale)}}"
                )
            found = pa.field(field.name, pa.string() if limited is None else limited)
        elif name in _READ:
            storage = field.type.storage_type if isinstance(field.type, pa.BaseExtensionType) else field.type
            found = pa.field(field.name, storage)
        else:
            raise ConfigurationError(
                f"from_sql: column {field.name!r} has type {name or field.type}, which is not supported; cast it to "
                "text in the query"
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
            raise ConfigurationError(f"from_sql: {first_line(error)}") from error

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
            return PostgresRows(connection, connection.reader(query, BATCH_BYTES), schema)
        except driver().Error as error:
            if connection is not None:
                connection.close()
            raise ConfigurationError(f"from_sql: {first_line(error)}") from error


class PostgresRows(Rows):
    """Rows of a query, which ADBC decodes from PostgreSQL's binary COPY."""

    def __init__(self, connection: PostgresConnection, cursor: Any, schema: pa.Schema | None) -> None:
        self._connection, self._cursor, self._schema = connection, cursor, schema
        self.reader: pa.RecordBatchReader = cursor.fetch_record_batch()

    def next(self) -> pa.RecordBatch | None:
        """Returns the next rows in the types of the schema."""
        assert self._schema is not None
        try:
            batch = self.reader.read_next_batch()
        except StopIteration:
            return None
        except (driver().Error, OSError, pa.ArrowException) as error:
            raise DatabaseError(f"from_sql: {first_line(error)}") from error
        arrays = []
        for column, field in zip(batch.columns, self._schema, strict=True):
            arrays.append(_exact(column, field))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def close(self) -> None:
        """Ends the query, and disconnects."""
        self.reader.close()
        self._cursor.close()
        self._connection.close()


def _exact(column: pa.Array, field: pa.Field) -> pa.Array:
    """Returns a column in its type. Raises ConfigurationError for a value that the type cannot hold."""
    values = column.storage if isinstance(column, pa.ExtensionArray) else column
    try:
        check_finite(values, field.name)
        found = values if values.type == field.type else values.cast(field.type)
    except pa.ArrowInvalid as error:
        raise ConfigurationError(
            f"from_sql: column {field.name!r} has a value that does not fit {field.type}: {error}. Give another type "
            "in schema=, or change the query"
        ) from error
    if found.null_count and not field.nullable:
        raise ConfigurationError(f"from_sql: column {field.name!r} has a null, and schema= forbids it")
    return found


def check_finite(values: pa.Array, name: str) -> None:
    """Raises ConfigurationError for PostgreSQL's infinite times, which Arrow cannot represent."""
    is_date = pa.types.is_date32(values.type)
    if not (is_date or pa.types.is_timestamp(values.type)) or values.null_count == len(values):
        return
    found = pc.min_max(values.cast(pa.int32() if is_date else pa.int64()))
    low, high = DATES if is_date else TIMESTAMPS
    if found["min"].as_py() < low or found["max"].as_py() > high:
        raise ConfigurationError(
            f"from_sql: column {name!r} has an infinite time, which Arrow cannot represent; filter it in the query"
        )


# --- SQLAlchemy ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AlchemyQueries(QueryClient):
    """Queries of a database at a URL of SQLAlchemy. Its drivers return no types, so the program gives them."""

    url: str
    given: pa.Schema

    def schema(self, query: str) -> pa.Schema:
        """Returns the given columns, after a check that the query has exactly these."""
        rows = AlchemyRows(self, f"SELECT * FROM ({query}\n) AS part WHERE 1 = 0", self.given, ConfigurationError)
        names = rows.names
        rows.close()
        if names != self.given.names:
            raise ConfigurationError(f"from_sql: the query has the columns {names}, and schema= has {self.given.names}")
        return self.given

    def one_row(self, query: str) -> tuple[Any, ...]:
        """Returns the only row of a query."""
        rows = AlchemyRows(self, query, self.given, ConfigurationError)
        try:
            return tuple(rows.result.one())
        finally:
            rows.close()

    def quoted(self, name: str) -> str:
        """Returns a name as this database writes it."""
        quoted: str = engine_of(self.url, "from_sql").dialect.identifier_preparer.quote_identifier(name)
        return quoted

    def sorted_by(self, field: pa.Field) -> str:
        """Returns the column, in the order of bytes where it is text."""
        column = f"part.{self.quoted(field.name)}"
        if not pa.types.is_string(field.type) and not pa.types.is_large_string(field.type):
            return column
        return f"{column} COLLATE BINARY" if self.url.startswith("sqlite") else f"BINARY {column}"

    def batches(self, query: str, schema: pa.Schema) -> Rows:
        """Starts a query."""
        return AlchemyRows(self, query, schema, DatabaseError)


class AlchemyRows(Rows):
    """Rows of a query, which the driver returns as Python values."""

    def __init__(
        self, client: AlchemyQueries, query: str, schema: pa.Schema, failure: type[ConfigurationError | DatabaseError]
    ) -> None:
        sa = alchemy()
        self._schema = schema
        self._engine = engine_of(client.url, "from_sql")
        try:
            self._connection = self._engine.connect().execution_options(stream_results=True, yield_per=ROWS_AT_ONCE)
            if self._engine.dialect.paramstyle in ("format", "pyformat"):
                # The driver would take a percent sign of the query for a parameter.
                query = query.replace("%", "%%")
            self.result = self._connection.exec_driver_sql(query)
        except sa.exc.SQLAlchemyError as error:
            self._engine.dispose()
            raise failure(f"from_sql: {reason(error)}") from error
        self.names = list(self.result.keys())

    def next(self) -> pa.RecordBatch | None:
        """Returns the next rows."""
        try:
            rows = self.result.fetchmany(ROWS_AT_ONCE)
        except alchemy().exc.SQLAlchemyError as error:
            raise DatabaseError(f"from_sql: {reason(error)}") from error
        if not rows:
            return None
        columns = zip(*rows, strict=True)
        arrays = [_from_python(values, field) for values, field in zip(columns, self._schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def close(self) -> None:
        """Ends the query, and disconnects."""
        self.result.close()
        self._connection.close()
        self._engine.dispose()


def _from_python(values: Sequence[Any], field: pa.Field) -> pa.Array:
    """Returns Python values of a driver as a column. SQLite has times as text and booleans as numbers."""
    try:
        if any(isinstance(value, str) for value in values) and not _is_text(field.type):
            return _exact(pc.cast(pa.array(values, pa.string()), field.type), field)
        if pa.types.is_boolean(field.type):
            values = [None if value is None else _as_bool(value) for value in values]
        return _exact(pa.array(values, field.type), field)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, ValueError) as error:
        raise ConfigurationError(
            f"from_sql: column {field.name!r} has a value that does not fit {field.type}: {error}. Give another type "
            "in schema=, or change the query"
        ) from error


def _is_text(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_string(data_type) or pa.types.is_large_string(data_type))


def _as_bool(value: object) -> bool:
    if value in (0, 1):
        return bool(value)
    raise ValueError(f"{value!r} is neither 0 nor 1")
