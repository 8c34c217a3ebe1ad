"""`QueryClient` executes queries: `PostgresQueries` through ADBC, `AlchemyQueries` through SQLAlchemy. `Rows` reads the
results.

Rows have exactly the types that the program expects. A value that does not fit its type is an error.
"""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.connectors.formats.text import DEFAULTS, converted, converter_of
from tidegate.connectors.sql import alchemy as sql_alchemy
from tidegate.connectors.sql.alchemy import alchemy, engine_of, reason, use_utc
from tidegate.connectors.sql.client import DatabaseError, first_line
from tidegate.connectors.sql.columns import kind_of
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
"""Approximate size in bytes of the batches that the PostgreSQL driver returns."""

_MYSQL_FLOAT = 4
"""Code of the type FLOAT in the columns that MySQL's drivers describe (`cursor.description`)."""

ROWS_AT_ONCE = 10_000
"""Number of rows that SQLAlchemy fetches at a time."""


def is_postgres(address: str) -> bool:
    """Returns whether an address is a PostgreSQL address (libpq), and not a URL of SQLAlchemy for another database."""
    return "://" not in address or address.startswith(("postgresql://", "postgres://"))


class QueryClient(ABC):
    """Executes queries in a database. It is pickled with the program."""

    @abstractmethod
    def schema(self, query: str) -> pa.Schema:
        """Returns the columns of a query's result. Raises ConfigurationError."""

    def described(self, query: str) -> tuple[QueryClient, pa.Schema]:
        """Returns the client for reading the rows of a query, and its columns. Raises ConfigurationError."""
        return self, self.schema(query)

    def selected(self, name: str) -> str:
        """Returns the SQL expression that reads a column of the query `part`."""
        return f"part.{self.quoted(name)}"

    def zoned_literal(self, time: str) -> str:
        """Returns the SQL literal of a time in UTC, for comparisons with a column of times with a zone."""
        return f"TIMESTAMPTZ '{time}+00'"

    @abstractmethod
    def one_row(self, query: str) -> tuple[Any, ...]:
        """Executes a query that returns one row, and returns it. Raises ConfigurationError."""

    @abstractmethod
    def quoted(self, name: str) -> str:
        """Returns a column name as a quoted SQL identifier."""

    @abstractmethod
    def sorted_by(self, field: pa.Field) -> str:
        """Returns the SQL expression by which rows are sorted for one column."""

    @abstractmethod
    def batches(self, query: str, schema: pa.Schema) -> Rows:
        """Starts a query. Its rows are read as batches with this schema."""


class Rows(ABC):
    """Reads the result of a running query. Errors are DatabaseError, or ConfigurationError if they are permanent."""

    @abstractmethod
    def next(self) -> pa.RecordBatch | None:
        """Returns the next rows of the query's result as a batch, or None at the end."""

    @abstractmethod
    def close(self) -> None:
        """Ends the query and releases its resources."""


# --- PostgreSQL ---------------------------------------------------------------------------------------------------


_NUMBERS = ("bool", "int2", "int4", "int8", "float4", "float8")
_TEXTS = ("text", "varchar", "bpchar", "name", "bytea", "json", "jsonb")
_READ = frozenset([*_NUMBERS, *_TEXTS, "date", "time", "timestamp", "timestamptz"])
"""PostgreSQL types whose values ADBC returns exactly."""


@dataclass(frozen=True)
class PostgresQueries(QueryClient):
    """Executes queries in PostgreSQL. `given` has the types of columns whose type is not limited, such as numeric."""

    dsn: str
    given: pa.Schema
    where: str
    """The name of the step, for errors."""
    advice: str = "cast it to text in the query"
    """Advice in the error for a column of an unsupported type."""

    def schema(self, query: str) -> pa.Schema:
        """Returns the columns of a query's result. Types in `given` take precedence."""
        rows = self._started(f"SELECT * FROM ({query}\n) AS part LIMIT 0")
        try:
            found = rows.reader.schema
        finally:
            rows.close()
        if unknown := [name for name in self.given.names if name not in found.names]:
            raise ConfigurationError(
                f"{self.where}: schema= has the column {unknown[0]!r}, the query has {found.names}; remove it, or "
                "select it in the query"
            )
        return plain_schema(pa.schema([self._field(field) for field in found]))

    def _field(self, field: pa.Field) -> pa.Field:
        metadata = field.metadata or {}
        name = _postgres_type(field)
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
        if field.name not in self.given.names:
            return found
        given = self.given.field(field.name)
        if not _is_read_as(found.type, given.type):
            raise ConfigurationError(
                f"{self.where}: column {field.name!r} has type {name}, and schema= has {given.type}; give "
                f"{found.type}, or {self.advice}"
            )
        return given

    def one_row(self, query: str) -> tuple[Any, ...]:
        """Executes a query that returns one row, and returns it. Raises ConfigurationError."""
        try:
            connection = PostgresConnection(self.dsn)
            try:
                return connection.rows(query)[0]
            except (OverflowError, ValueError) as error:
                raise ConfigurationError(
                    f"{self.where}: a date or time is infinite, or outside of the years 1 to 9999: {error}. Filter "
                    "such rows in the query"
                ) from error
            finally:
                connection.close()
        except driver().Error as error:
            raise ConfigurationError(
                f"{self.where}: PostgreSQL refuses the query: {first_line(error)}; correct it, or check that the "
                "server runs"
            ) from error

    def quoted(self, name: str) -> str:
        """Returns a column name as a quoted SQL identifier."""
        return identifier(name)

    def sorted_by(self, field: pa.Field) -> str:
        """Returns the column for ORDER BY.

        Text columns are sorted by bytes, and json is cast to text, because it has no order.
        """
        column = f"part.{identifier(field.name)}"
        return f'{column}::text COLLATE "C"' if pa.types.is_string(field.type) else column

    def batches(self, query: str, schema: pa.Schema) -> Rows:
        """Starts a query. Its rows are read as batches with this schema."""
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
            raise ConfigurationError(
                f"{self.where}: PostgreSQL refuses the query: {first_line(error)}; correct it, or check that the "
                "server runs"
            ) from error


def _postgres_type(field: pa.Field) -> str:
    """Returns the name of the PostgreSQL type of a result's column, or an empty string if ADBC does not give it."""
    found: bytes = (field.metadata or {}).get(b"POSTGRESQL:type", b"")
    return found.decode()


_NOT_NUMBERS = (("nan", "NaN"), ("inf", "Infinity"), ("-inf", "-Infinity"))
"""The texts of ADBC for values of numeric that are not numbers, and the texts of PostgreSQL."""


def _numeric_texts(column: pa.Array) -> pa.Array:
    """Returns the values of a numeric column as texts, as PostgreSQL writes them."""
    texts = (column.storage if isinstance(column, pa.ExtensionArray) else column).cast(pa.string())
    for given, written in _NOT_NUMBERS:
        texts = pc.if_else(pc.equal(texts, given), written, texts)
    return texts


class PostgresRows(Rows):
    """The result of a query as Arrow batches, which ADBC decodes from binary COPY. `close` also calls `on_close`."""

    def __init__(
        self, cursor: Any, schema: pa.Schema | None, where: str, on_close: Callable[[], None] | None = None
    ) -> None:
        self._cursor = cursor
        self._schema = schema
        self._where = where
        self._on_close = on_close
        self.reader: pa.RecordBatchReader = cursor.fetch_record_batch()

    def next(self) -> pa.RecordBatch | None:
        """Returns the next rows of the query's result, cast to the schema, or None at the end."""
        assert self._schema is not None
        try:
            batch = self.reader.read_next_batch()
        except StopIteration:
            return None
        except (driver().Error, OSError, pa.ArrowException) as error:
            raise DatabaseError(
                f"{self._where}: PostgreSQL stopped returning rows: {first_line(error)}; check that it runs"
            ) from error
        arrays = []
        for column, field, sent in zip(batch.columns, self._schema, self.reader.schema, strict=True):
            values = _numeric_texts(column) if _postgres_type(sent) == "numeric" else column
            arrays.append(_exact(values, field, self._where))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def close(self) -> None:
        """Ends the query and releases its resources."""
        self.reader.close()
        self._cursor.close()
        if self._on_close is not None:
            self._on_close()


_NUMBERS_OF = frozenset({"int", "float32", "float64", "decimal"})
_READ_AS = {
    "int": _NUMBERS_OF,
    "decimal": _NUMBERS_OF,
    "float32": frozenset({"float32", "float64"}),
    "float64": frozenset({"float32", "float64"}),
    "text": _NUMBERS_OF | {"text", "bool", "date", "time", "naive", "zoned"},
}
"""The kinds of types to which values of each kind may be converted. A value that would not be exact is an error."""


def _is_read_as(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Returns whether values of the type `found` keep their meaning when they are read as the type `wanted`. A number,
    for example, never becomes a time.
    """
    kind = kind_of(found)
    return kind_of(wanted) in _READ_AS.get(kind, {kind})


def _exact(column: pa.Array, field: pa.Field, where: str) -> pa.Array:
    """Casts a column to the type of a field. Raises ConfigurationError for a value that the type cannot represent."""
    values = column.storage if isinstance(column, pa.ExtensionArray) else column
    try:
        check_finite(values, field.name, where)
        found = _cast(values, field)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OverflowError, ValueError) as error:
        raise ConfigurationError(
            f"{where}: column {field.name!r} has a value that does not fit {field.type}: {error}. Give another type "
            "in schema=, or change the query"
        ) from error
    if found.null_count and not field.nullable:
        raise ConfigurationError(
            f"{where}: column {field.name!r} has a null, and schema= forbids it; make it nullable there, or filter "
            "such rows in the query"
        )
    return found


def _cast(values: pa.Array, field: pa.Field) -> pa.Array:
    """Returns values in the type of a field. Raises pa.ArrowInvalid or ValueError for a value that would change."""
    if values.type == field.type:
        return values
    if kind_of(values.type) == "text" and kind_of(field.type) != "text":
        # Arrow's own cast reads 0x10 as 16, and 1e999 as infinity.
        reasons: dict[int, str] = {}
        nullable = field.with_nullable(True)
        convert = converter_of(nullable, DEFAULTS)
        texts = values.cast(pa.string())
        if kind_of(field.type) == "int":
            texts = pc.replace_substring_regex(texts, r"^([+-]?[0-9]+)\.0+$", r"\1")
        found = converted(texts, nullable, convert, reasons, blank_is_null=False)
        if reasons:
            raise ValueError(reasons[min(reasons)].removeprefix(f"column {field.name!r}: "))
        if pa.types.is_floating(field.type):
            _check_digits(texts, found)
        return found
    found = values.cast(field.type)
    if pa.types.is_floating(values.type) and pc.sum(pc.is_inf(found)) != pc.sum(pc.is_inf(values)):
        raise ValueError(
            f"a number is too great for {field.type}; give the column float64 or a decimal type in schema="
        )
    return found


def _check_digits(texts: pa.Array, found: pa.Array) -> None:
    """Raises ValueError for a number that its float returns as another one, such as 16777217 as a 32-bit float.

    The float with the shortest text that identifies it is the number again, so 0.1 is accepted.
    """
    limits = np.finfo(found.type.to_pandas_dtype())
    digits = pc.replace_substring_regex(pc.replace_substring_regex(texts, "[eE].*$", ""), "[^0-9]", "")
    count = pc.binary_length(pc.utf8_ltrim(digits, "0"))
    # Numbers with fewer digits are returned, except in the range where floats have fewer digits.
    is_small = pc.and_(pc.greater(count, 0), pc.less(pc.abs(found), pa.scalar(limits.tiny, found.type)))
    unsure = pc.and_(pc.is_finite(found), pc.or_(pc.greater(count, limits.precision), is_small))
    for text, value in zip(texts.filter(unsure).to_pylist(), found.filter(unsure).to_numpy(), strict=True):
        _check_number(Decimal(text), value)


def _check_number(number: Decimal | int, value: np.floating[Any]) -> None:
    if Decimal(str(value)) != number:
        raise ValueError(f"{number} would become {value}; give the column a decimal type in schema=, or text")


def check_finite(values: pa.Array, name: str, where: str) -> None:
    """Raises ConfigurationError for PostgreSQL's infinite times and the time 24:00, which Arrow cannot represent."""
    if pa.types.is_time64(values.type) and pc.max(values.cast(pa.int64())).as_py() == _DAY[values.type.unit]:
        raise ConfigurationError(
            f"{where}: column {name!r} has the time 24:00, which Arrow cannot represent; change it in the query"
        )
    is_date = pa.types.is_date32(values.type)
    if not (is_date or pa.types.is_timestamp(values.type)) or values.null_count == len(values):
        return
    found = pc.min_max(values.cast(pa.int32() if is_date else pa.int64()))
    low, high = DATES if is_date else TIMESTAMPS
    if found["min"].as_py() < low or found["max"].as_py() > high:
        raise ConfigurationError(
            f"{where}: column {name!r} has an infinite time, which Arrow cannot represent; filter it in the query"
        )


_DAY = {"us": 86_400 * 10**6, "ns": 86_400 * 10**9}


# --- SQLAlchemy ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AlchemyQueries(QueryClient):
    """Executes queries in a database at a URL of SQLAlchemy. Its drivers return no types, so the program gives them."""

    url: str
    given: pa.Schema
    where: str
    """The name of the step, for errors."""
    floats: frozenset[str] = frozenset()
    """Columns of the type FLOAT of MySQL, which its server returns with six digits."""

    def schema(self, query: str) -> pa.Schema:
        """Returns the given columns, after checking that the query returns exactly these."""
        return self.described(query)[1]

    def described(self, query: str) -> tuple[QueryClient, pa.Schema]:
        """Returns the client for reading the rows of a query, and its columns. Raises ConfigurationError."""
        rows = self._started(f"SELECT * FROM ({query}\n) AS part WHERE 1 = 0", self.given, ConfigurationError)
        names = list(rows.result.keys())
        floats = frozenset(each[0] for each in rows.result.cursor.description if each[1] == _MYSQL_FLOAT)
        rows.close()
        if names != self.given.names:
            raise ConfigurationError(
                f"{self.where}: the query has the columns {names}, and schema= has {self.given.names}"
                "; give the same columns in schema="
            )
        return replace(self, floats=floats), self.given

    def selected(self, name: str) -> str:
        """Returns the SQL expression that reads a column. The product of a FLOAT of MySQL is a DOUBLE."""
        column = f"part.{self.quoted(name)}"
        return f"{column} * 1e0 AS {self.quoted(name)}" if name in self.floats else column

    def zoned_literal(self, time: str) -> str:
        """Returns the SQL literal of a time in UTC, which is the time zone of the session."""
        return f"TIMESTAMP '{time}'"

    def one_row(self, query: str) -> tuple[Any, ...]:
        """Executes a query that returns one row, and returns it. Raises ConfigurationError."""
        rows = self._started(query, self.given, ConfigurationError)
        try:
            return tuple(rows.result.one())
        finally:
            rows.close()

    def quoted(self, name: str) -> str:
        """Returns a column name as a quoted identifier in this database's syntax."""
        quoted: str = engine_of(self.url, self.where).dialect.identifier_preparer.quote_identifier(name)
        return quoted

    def sorted_by(self, field: pa.Field) -> str:
        """Returns the column for ORDER BY. Text columns are sorted by bytes."""
        column = f"part.{self.quoted(field.name)}"
        if not pa.types.is_string(field.type) and not pa.types.is_large_string(field.type):
            return column
        return f"{column} COLLATE BINARY" if self.url.startswith("sqlite") else f"BINARY {column}"

    def batches(self, query: str, schema: pa.Schema) -> Rows:
        """Starts a query. Its rows are read as batches with this schema."""
        return self._started(query, schema, DatabaseError)

    def _started(self, query: str, schema: pa.Schema, failure: type[ConfigurationError | DatabaseError]) -> AlchemyRows:
        engine = engine_of(self.url, self.where)
        sql_alchemy.check_file(engine, self.where)
        if engine.dialect.name != "sqlite":
            use_utc(engine)
        try:
            connection = engine.connect().execution_options(stream_results=True, yield_per=ROWS_AT_ONCE)
            if engine.dialect.paramstyle in ("format", "pyformat"):
                # The driver would take a percent sign of the query for a parameter.
                query = query.replace("%", "%%")
            result = connection.exec_driver_sql(query)
        except alchemy().exc.SQLAlchemyError as error:
            engine.dispose()
            kind = ConfigurationError if sql_alchemy.is_permanent(error) else failure
            raise kind(
                f"{self.where}: the database refuses the query: {reason(error)}; correct it, or check that the server "
                "runs"
            ) from error

        def disconnect() -> None:
            connection.close()
            engine.dispose()

        return AlchemyRows(result, schema, self.where, disconnect)


class AlchemyRows(Rows):
    """The result of a query, converted from the driver's Python values. `close` also calls `on_close`."""

    def __init__(self, result: Any, schema: pa.Schema, where: str, on_close: Callable[[], None] | None = None) -> None:
        self.result = result
        self._schema = schema
        self._where = where
        self._on_close = on_close

    def next(self) -> pa.RecordBatch | None:
        """Returns the next rows of the query's result as a batch, or None at the end."""
        try:
            rows = self.result.fetchmany(ROWS_AT_ONCE)
        except alchemy().exc.SQLAlchemyError as error:
            raise DatabaseError(
                f"{self._where}: the database stopped returning rows: {reason(error)}; check that it runs"
            ) from error
        if not rows:
            return None
        columns = zip(*rows, strict=True)
        arrays = [_from_python(values, field, self._where) for values, field in zip(columns, self._schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def close(self) -> None:
        """Ends the query and releases its resources."""
        self.result.close()
        if self._on_close is not None:
            self._on_close()


_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (int,),
    "int": (int, float, Decimal),
    "float32": (float, int, Decimal),
    "float64": (float, int, Decimal),
    "decimal": (Decimal, int),
    "text": (str, bytes),
    "binary": (bytes, bytearray, memoryview),
    "date": (datetime.date,),
    "time": (datetime.time,),
    "naive": (datetime.date,),
    "zoned": (datetime.datetime,),
    "interval": (datetime.timedelta,),
}
"""The Python types of drivers' values that are accepted for each kind of types. Text is accepted for all but binary."""


def _from_python(values: Sequence[Any], field: pa.Field, where: str) -> pa.Array:
    """Converts a driver's Python values to a column. SQLite returns times as text and booleans as numbers."""
    kind = kind_of(field.type)
    types = {type(value) for value in values if value is not None}
    try:
        if types == {str} and kind != "binary":
            return _exact(pa.array(values, pa.string()), field, where)
        for value in values if len(types) > 1 or not types <= set(_PYTHON_TYPES.get(kind, ())) else ():
            if value is not None and not isinstance(value, _PYTHON_TYPES.get(kind, ())):
                raise ValueError(
                    f"{value!r} is of the Python type {type(value).__name__}, which does not fit the column"
                )
        return _exact(_array(values, kind, field.type), field, where)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, ValueError) as error:
        raise ConfigurationError(
            f"{where}: column {field.name!r} has a value that does not fit {field.type}: {error}. Give another type "
            "in schema=, or change the query"
        ) from error


def _array(values: Sequence[Any], kind: str, wanted: pa.DataType) -> pa.Array:
    """Returns values as an array that has all of their digits. Arrow itself drops digits of Python values."""
    if kind == "bool":
        return pa.array([None if value is None else _as_bool(value) for value in values], pa.bool_())
    if kind == "int":
        return pa.array([value if value is None or type(value) is int else _as_int(value) for value in values], wanted)
    if kind in ("float32", "float64"):
        for value in values:
            if isinstance(value, int | Decimal) and value == value:
                _check_number(value, wanted.to_pandas_dtype()(value))
        return pa.array([float(value) if isinstance(value, Decimal) else value for value in values], pa.float64())
    if kind == "date":
        times = [value for value in values if isinstance(value, datetime.datetime)]
        if times:
            raise ValueError(f"{times[0]} is a date with a time, and the column has dates")
        return pa.array(values, pa.date32())
    if kind == "time":
        return pa.array(values, pa.time64("us"))
    if kind in ("naive", "zoned"):
        found = [None if value is None else _as_datetime(value, kind) for value in values]
        return pa.array(found, pa.timestamp("us", wanted.tz))
    return pa.array(values, wanted)


def _as_datetime(value: datetime.date, kind: str) -> datetime.datetime:
    if not isinstance(value, datetime.datetime):
        return datetime.datetime.combine(value, datetime.time())
    if value.tzinfo is not None and kind == "naive":
        raise ValueError(f"{value} has a time zone, and the column has times without one")
    return value


def _as_int(value: Any) -> int:
    if value != int(value):
        raise ValueError(f"{value!r} is not an integer, and the column has integers")
    return int(value)


def _as_bool(value: object) -> bool:
    if value in (0, 1):
        return bool(value)
    raise ValueError(f"{value!r} is neither 0 nor 1, and the column has booleans")
