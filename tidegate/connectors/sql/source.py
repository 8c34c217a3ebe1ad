"""`SqlSource`: reads the rows of a query in ranges of a column, which are distributed over subtasks.

A split is a range of the values of `partition_by`. The ranges cover every value, so each row is in exactly one of them.
Rules:

- Positions need a fixed order of rows. So rows of a range are sorted by the partition column and then by all other
  columns. Rows that are equal in all columns are interchangeable.
- A range is read by one statement, and so sees one state of the table. Ranges are read at different times: rows that
  move to another range meanwhile may be missed or read twice. Read a table, or select rows, that do not change.
- A position contains the number of rows and the sum of their hashes. A reader that continues there, after a failure or
  a restore, reads the range from its beginning and compares both. Rows that have changed fail the job.
- Rows whose partition value is null would be in no range. They are counted before the job starts, and refused.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import pairwise

import numpy as np
import pyarrow as pa

from tidegate.connectors.source import ReadResult, SourceReader, SourceSplit
from tidegate.connectors.sql.queries import AlchemyQueries, PostgresQueries, QueryClient, Rows, is_postgres
from tidegate.state.kernels.hashing import hash_columns
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import ConfigurationError

_EPOCH = datetime.datetime(1970, 1, 1)


@wire
@dataclass(frozen=True, slots=True)
class RangePosition:
    """A range of values of the partition column, and the position of a reader in the range.

    `low` and `high` are SQL literals, or None without a limit.

    `low` is the first value, `high` is the first value of the next range. `rows` rows were read, and `digest` is the
    sum of their hashes, modulo 2^64. `query` identifies the query, because a range of another query has other rows.
    """

    low: str | None
    high: str | None
    rows: int = 0
    digest: int = 0
    query: str = ""


@dataclass(frozen=True)
class SqlSource:
    """A bounded source over the rows of a query."""

    client: QueryClient
    query: str
    schema: pa.Schema
    ranges: tuple[RangePosition, ...]
    partition_by: str | None

    def splits(self) -> Sequence[SourceSplit]:
        """Returns one split for each range of the partition column."""
        query = self._identity
        return tuple(
            SourceSplit(
                f"range {number} [{each.low or 'min'}, {each.high or 'max'})", encode(replace(each, query=query))
            )
            for number, each in enumerate(self.ranges)
        )

    def check_restored(self, splits: Sequence[SourceSplit]) -> None:
        """Raises ConfigurationError for splits of a checkpoint that another kind of source wrote.

        A restored job reads the ranges that were chosen at its first submission.
        """
        if strange := [s.split_id for s in splits if s.payload and not isinstance(decode(s.payload), RangePosition)]:
            raise ConfigurationError(
                f"its split {strange[0]!r} is not a range of a query; give the source of the checkpoint, or start "
                "without restore"
            )
        found = {decode(split.payload).query for split in splits if split.payload}
        if found - {self._identity}:
            raise ConfigurationError(
                "it read another query, or other columns, types or ranges (query=, schema=, partition_by=), and rows "
                "of both would be mixed; give what it had, or start without restore"
            )

    @property
    def _identity(self) -> str:
        """Returns a text that identifies the query and its columns."""
        columns = [f"{field.name} {field.type}" for field in self.schema]
        text = "\n".join([self.query.strip(), str(self.partition_by), *columns])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def reader(self) -> SourceReader:
        """Returns a reader for one subtask."""
        return SqlReader(self)

    def statement(self, part: RangePosition) -> str:
        """Returns the SQL query for the rows of a range, with ORDER BY."""
        client = self.client
        names = ", ".join(client.selected(name) for name in self.schema.names)
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
        """The id of the range that is being read, and the position after the rows that were returned."""
        self._rows: Rows | None = None
        self._held: pa.RecordBatch | None = None

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Returns the next rows of a range. Raises ConfigurationError if the rows before the position have changed."""
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
        """Returns the next rows, up to `rows_max`, or None at the end."""
        assert self._rows is not None
        while self._held is None or not self._held.num_rows:
            self._held = self._rows.next()
            if self._held is None:
                return None
        batch, self._held = self._held.slice(0, rows_max), self._held.slice(rows_max)
        return batch


def _digest(batch: pa.RecordBatch) -> int:
    """Returns the sum of the hashes of rows, which does not depend on their division into batches."""
    return int(np.sum(hash_columns(batch, batch.schema.names), dtype=np.uint64))


def ranges_of(
    client: QueryClient, query: str, schema: pa.Schema, partition_by: str, count: int
) -> tuple[RangePosition, ...]:
    """Divides all values of a column into up to `count` ranges. Raises ConfigurationError for a column with nulls.

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
    literal_of = _literals(client, schema.field(partition_by).type)
    first, last = _as_number(low), _as_number(high)
    edges = sorted({first + (last - first + 1) * number // count for number in range(1, count)} - {first})
    limits = [None, *(literal_of(edge) for edge in edges), None]
    return tuple(RangePosition(a, b) for a, b in pairwise(limits))


def check_partition_column(client: QueryClient, schema: pa.Schema, partition_by: str) -> None:
    """Raises ConfigurationError unless the column exists, and has a type that can be divided into ranges."""
    if partition_by not in schema.names:
        raise ConfigurationError(
            f"from_sql: there is no column {partition_by!r} for partition_by; it has {schema.names}; name one of these"
        )
    data_type = schema.field(partition_by).type
    _literals(client, data_type)
    if isinstance(client, AlchemyQueries) and client.url.startswith("sqlite") and not pa.types.is_integer(data_type):
        raise ConfigurationError(f"from_sql: partition_by={partition_by!r}: SQLite needs a column of integers")


def sql_source(address: str, query: str, given: pa.Schema, partition_by: str | None, count: int) -> SqlSource:
    """Creates the source of a query. Connects to check the query and to choose ranges. Raises ConfigurationError."""
    if not isinstance(query, str) or not query.strip():
        raise ConfigurationError(f"from_sql: query={query!r} is not a statement; give a SELECT")
    if " " not in query.strip():
        raise ConfigurationError(f"from_sql: query={query!r}; give a SELECT, such as 'SELECT * FROM {query.strip()}'")
    query = query.rstrip().rstrip(";")
    client: QueryClient
    if is_postgres(address):
        client = PostgresQueries(address, given, "from_sql")
    else:
        client = AlchemyQueries(address, given, "from_sql")
        if not given.names:
            raise ConfigurationError("from_sql: give schema=, the columns and types; only PostgreSQL returns them")
    client, schema = client.described(query)
    check_columns(schema)
    if partition_by is None:
        return SqlSource(client, query, schema, (RangePosition(None, None),), None)
    check_partition_column(client, schema, partition_by)
    return SqlSource(client, query, schema, ranges_of(client, query, schema, partition_by, count), partition_by)


def check_columns(schema: pa.Schema) -> None:
    """Raises ConfigurationError for duplicate names, and for types whose values cannot be hashed and compared after
    a failure.
    """
    if len(set(schema.names)) < len(schema.names):
        raise ConfigurationError(f"from_sql: the query has two columns of one name: {schema.names}; name them by AS")
    for field in schema:
        if pa.types.is_nested(field.type) or pa.types.is_null(field.type):
            raise ConfigurationError(
                f"from_sql: column {field.name!r} has type {field.type}, which is not supported; cast it in the query, "
                "for example to text"
            )


def _literals(client: QueryClient, data_type: pa.DataType) -> Callable[[int], str]:
    """Returns a function that converts a number to an SQL literal of the partition column's type."""
    types = pa.types
    if types.is_integer(data_type):
        return str
    if types.is_date32(data_type):
        return lambda days: f"DATE '{datetime.date(1970, 1, 1) + datetime.timedelta(days)}'"
    if types.is_timestamp(data_type):

        def literal(micros: int) -> str:
            time = (_EPOCH + datetime.timedelta(microseconds=micros)).isoformat(" ")
            return f"TIMESTAMP '{time}'" if data_type.tz is None else client.zoned_literal(time)

        return literal
    raise ConfigurationError(
        f"from_sql: partition_by has type {data_type}; give a column of integers, dates or timestamps"
    )


def _as_number(value: object) -> int:
    """Converts a value of a partition column to an integer: itself, or days or microseconds since 1970."""
    if isinstance(value, datetime.datetime):
        naive = value if value.tzinfo is None else value.astimezone(datetime.UTC).replace(tzinfo=None)
        return (naive - _EPOCH) // datetime.timedelta(microseconds=1)
    if isinstance(value, datetime.date):
        return (value - _EPOCH.date()).days
    if isinstance(value, int | Decimal) and value == int(value):
        return int(value)
    raise ConfigurationError(
        f"from_sql: partition_by has the value {value!r}, which is not an integer, date or timestamp; cast the column "
        "in the query (to bigint, for example), or partition by another one"
    )
