"""`DatabaseSink` writes rows to a table of a database, exactly once.

- A writer stages rows in checkpoint storage (`staged_rows.py`), in the types that are sent to the database. With keys
  each file has at most one row for each key, the newest, and its rows are sorted by bucket.
- After the checkpoint completed, the committer reads the files and writes their rows and the tokens `(sink, job,
  bucket) -> checkpoint` in one transaction. A bucket that has the token already is skipped.

Rows without keys may be in any bucket, so a subtask uses only its first one. Rows with keys are in the bucket of their
key group. So a subtask that takes over a key after rescaling also takes over the key's uncommitted rows, and commits
them before newer rows.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.connectors.committing_sink import (
    DEFAULT_BUCKETS,
    Committable,
    Committer,
    CommittingContext,
    CommittingSink,
    CommittingWriter,
    CommitToken,
)
from tidegate.connectors.sql.client import DELETED, FILE, CommitKey, TableClient, TableSession
from tidegate.connectors.sql.columns import (
    TableColumn,
    check_keys,
    check_new_keys,
    chosen_columns,
    conform,
    sent_schema,
)
from tidegate.connectors.staged_rows import RowStage, StagedPart, forget_staged, staged_rows
from tidegate.state.kernels.columns import plain
from tidegate.state.kernels.hashing import hash_columns
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.batches import together
from tidegate.storage.state.key_groups import key_groups_of
from tidegate.storage.user_values import value_text

FILE_BYTES = 32 << 20
"""Size in bytes of the buffered rows of one file. A commit reads one file at a time; recent files are still in memory
(`staged_rows.RECENT_BYTES_MAX`)."""

_KINDS = ("+I", "+U", "-U", "-D")
_COMES = 2
"""Kinds in `_KINDS` before this index mark added rows."""

_RANGE = struct.Struct("<IQQQQQ")
"""Binary format of a bucket's rows in a file.

Number of the file in its checkpoint, first row, number of rows, and the fields of the file's `StagedPart`. Each bucket
has them, because after rescaling the buckets of a file may be committed by different subtasks.
"""


@dataclass(frozen=True)
class DatabaseSink(CommittingSink):
    """A sink for rows of `schema`. `columns` are the columns of the table, in the order of the stream.

    `kind_column` is the column with the kind of change ("+I", "-D", …), or None.
    """

    client: TableClient
    columns: tuple[TableColumn, ...]
    schema: pa.Schema
    kind_column: str | None
    buckets: int = DEFAULT_BUCKETS

    @property
    def accepts_changes(self) -> bool:  # type: ignore[override]
        """Returns True if the rows have a column with the kind of change."""
        return self.kind_column is not None

    @property
    def sent(self) -> pa.Schema:
        """Returns the columns of rows in files, with the types that are sent to the database."""
        sent = sent_schema(self.schema, self.columns)
        return sent if self.kind_column is None else sent.append(pa.field(DELETED, pa.bool_()))

    def open_writer(self, context: CommittingContext) -> DatabaseWriter:
        """Returns the writer of a subtask."""
        return DatabaseWriter(self, context)

    def open_committer(self, context: CommittingContext) -> DatabaseCommitter:
        """Returns the committer of a subtask."""
        return DatabaseCommitter(context, self.client.open(self.columns, self.sent), self)


def database_sink(
    client: TableClient,
    schema: pa.Schema,
    *,
    create: bool = False,
    kind_column: str | None = None,
    buckets: int = DEFAULT_BUCKETS,
) -> DatabaseSink:
    """Checks the table, and returns the sink for rows of a schema. Raises ConfigurationError.

    - `create`: whether to create the table if it does not exist.
    - `kind_column`: the column with the kind of change, which is not written to the table.
    """
    write = client.write
    if (write.schema, write.table) == (write.token_schema, write.token_table):
        raise ConfigurationError(
            f"{client.where}: table {write.place} is the table of commit tokens; give another table, or another "
            "token_table="
        )
    if kind_column is not None:
        schema = schema.remove(schema.get_field_index(kind_column))
    for name in (DELETED, FILE):
        if name in schema.names:
            raise ConfigurationError(f"{client.where}: the column name {name!r} is used by tidegate; rename the column")
    if create:
        check_new_keys(client.where, write.place, schema, write.keys)
    shape = client.prepare(schema, create)
    columns = chosen_columns(client.where, write.place, shape, schema)
    if write.keys:
        check_keys(client.where, write.place, shape, columns, write.keys)
    return DatabaseSink(client, columns, schema, kind_column, buckets)


class DatabaseWriter(CommittingWriter):
    """Writes the rows of one subtask to files in checkpoint storage."""

    def __init__(self, sink: DatabaseSink, context: CommittingContext) -> None:
        self._sink, self._context = sink, context
        self._keys = sink.client.write.keys
        self._counts: list[list[tuple[int, int]]] = []
        """Buckets and their numbers of rows, in the order of the rows, for each file since the last checkpoint."""
        self._stage = RowStage(
            context.files.write, bytes_max=FILE_BYTES, convert=self._converted, recent_of=context.prefix
        )

    def write(self, batch: pa.RecordBatch) -> None:
        """Buffers rows, and writes a file when the buffer is full."""
        self._stage.add(batch)

    def prepare(self, checkpoint_id: int) -> Sequence[Committable]:
        """Returns one committable for each bucket with rows."""
        ranges: dict[int, list[bytes]] = defaultdict(list)
        paths: dict[int, list[str]] = defaultdict(list)
        files = self._stage.take()
        for number, ((path, part), counts) in enumerate(zip(files, self._counts, strict=True)):
            start = 0
            for bucket, count in counts:
                ranges[bucket].append(_RANGE.pack(number, start, count, part.rows, part.size_bytes, part.checksum))
                paths[bucket].append(path)
                start += count
        self._counts = []
        return [Committable(bucket, b"".join(ranges[bucket]), tuple(paths[bucket])) for bucket in sorted(ranges)]

    def close(self) -> None:
        """Releases memory. Prepared rows stay in their files."""
        self._stage.close()

    def _converted(self, batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
        rows, counts = self._sent_rows(together(batches, self._sink.client.where))
        self._counts.append(counts)
        return [rows]

    def _sent_rows(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, list[tuple[int, int]]]:
        """Returns rows cast to the types that are sent and sorted by bucket. Also returns pairs of a bucket and its
        number of rows.
        """
        where, columns, kinds = self._sink.client.where, self._sink.columns, self._sink.kind_column
        if not self._keys:
            rows = conform(batch, columns, frozenset(), where)
            return rows, [(self._context.buckets[0], rows.num_rows)]
        batch = newest_rows(batch, self._keys)
        buckets = self._buckets_of(batch)
        order = np.argsort(buckets, kind="stable")
        batch = batch.take(pa.array(order))
        found, counts = np.unique(buckets, return_counts=True)
        parts = list(zip(found.tolist(), counts.tolist(), strict=True))
        if kinds is None:
            return conform(batch, columns, frozenset(self._keys), where), parts
        return self._changes(batch, kinds), parts

    def _buckets_of(self, batch: pa.RecordBatch) -> NDArray[np.uint16]:
        """Returns the bucket of each row, which is the key group of its key."""
        buckets = key_groups_of(hash_columns(batch, self._keys), self._sink.buckets)
        mine = self._context.buckets
        if len(buckets) and not mine.start <= buckets.min() <= buckets.max() < mine.stop:
            raise ConfigurationError(
                f"{self._sink.client.where}: the job does not have {self._sink.buckets} key groups, as it had when the "
                "sink was made: set env.max_parallelism to a number before the program is made"
            )
        return buckets

    def _changes(self, batch: pa.RecordBatch, kinds: str) -> pa.RecordBatch:
        """Returns rows with the column `DELETED`. Deleted rows have nulls in all columns except the keys."""
        comes = rows_that_come(batch, kinds)
        where, columns, keys = self._sink.client.where, self._sink.columns, frozenset(self._keys)
        kept = conform(batch.filter(comes), columns, keys, where)
        gone = conform(batch.filter(~comes), [column for column in columns if column.name in keys], keys, where)
        # Both parts keep their order, so row i of the batch is the next row of its part.
        position = np.where(comes, np.cumsum(comes) - 1, kept.num_rows + np.cumsum(~comes) - 1)
        arrays = []
        for field in list(self._sink.sent)[:-1]:
            lower = gone.column(field.name) if field.name in keys else pa.nulls(gone.num_rows, field.type)
            arrays.append(pa.concat_arrays([kept.column(field.name), lower]).take(pa.array(position)))
        return pa.RecordBatch.from_arrays([*arrays, pa.array(~comes)], schema=self._sink.sent)


def rows_that_come(batch: pa.RecordBatch, kinds: str) -> NDArray[np.bool_]:
    """Returns True for each added row of a batch of changes, False for each retracted row.

    Raises ValueError for an unknown kind.
    """
    column = plain(batch.column(kinds))
    found = pc.index_in(column, pa.array(_KINDS, column.type))
    if found.null_count:
        wrong = column.filter(pc.is_null(found))[0].as_py()
        raise ValueError(f"a row has {value_text(wrong)} in the column {kinds!r}; give one of {', '.join(_KINDS)}")
    comes: NDArray[np.bool_] = found.to_numpy() < _COMES
    return comes


def newest_rows(batch: pa.RecordBatch, keys: Sequence[str]) -> pa.RecordBatch:
    """Returns the last row of each key, in their original order."""
    import polars as pl

    columns = {name: batch.column(name) for name in keys}
    for name, values in columns.items():
        if pa.types.is_decimal256(values.type):
            columns[name] = values.cast(pa.string())  # Polars has no such decimals.
    frame = pl.DataFrame(pa.table(columns))
    number = "".join(keys) + "#"
    rows = frame.with_row_index(number).unique(subset=list(keys), keep="last").get_column(number).sort()
    return batch if len(rows) == batch.num_rows else batch.take(rows.to_arrow())


class DatabaseCommitter(Committer):
    """Commits the rows that one subtask has prepared."""

    def __init__(self, context: CommittingContext, session: TableSession, sink: DatabaseSink) -> None:
        self._context, self._session, self._sink = context, session, sink

    def commit(self, token: CommitToken, committables: Sequence[Committable]) -> None:
        """Writes the rows and tokens of buckets that are not committed yet."""
        by_bucket: dict[int, list[Committable]] = defaultdict(list)
        for committable in committables:
            by_bucket[committable.bucket].append(committable)

        def files(buckets: Set[int]) -> Iterator[pa.RecordBatch]:
            wanted: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
            parts: dict[str, StagedPart] = {}
            for bucket in sorted(buckets):
                for committable in by_bucket[bucket]:
                    ranges = _RANGE.iter_unpack(committable.data)
                    for (number, start, count, *part), path in zip(ranges, committable.files, strict=True):
                        wanted[number, path].append((start, count))
                        rows, size_bytes, checksum = part
                        parts[path] = StagedPart(rows, size_bytes, checksum)
            for (_, path), found in sorted(wanted.items()):
                yield self._rows(path, parts[path], sorted(found))

        if by_bucket:
            key = CommitKey(self._context.uid, token.job_id, token.checkpoint_id)
            self._session.commit(key, by_bucket.keys(), files)
            for committable in committables:
                forget_staged(committable.files, recent_of=self._context.prefix)

    def close(self) -> None:
        """Closes the database session."""
        self._session.close()

    def _rows(self, path: str, part: StagedPart, ranges: Sequence[tuple[int, int]]) -> pa.RecordBatch:
        """Reads the given ranges (first row, number of rows) of a file."""
        context = self._context
        (rows,) = staged_rows(context.files.read, path, part, recent_of=context.prefix)
        sent = self._sink.sent
        if not rows.schema.equals(sent):
            raise ConfigurationError(
                f"{self._sink.client.where}: rows of the checkpoint that are not committed yet have the columns "
                f"{_described(rows.schema)}, and the sink has {_described(sent)} now. Restore the program as it was, "
                "stop it with a savepoint, and restore the changed program from that; or give the sink another uid"
            )
        if sum(count for _, count in ranges) == rows.num_rows:
            return rows
        return pa.concat_batches([rows.slice(start, count) for start, count in ranges])


def _described(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name!r} {field.type}" for field in schema if field.name != DELETED)
