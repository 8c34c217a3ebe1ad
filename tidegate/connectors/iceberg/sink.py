"""`IcebergAppend` and `IcebergUpsert`: sinks that commit each checkpoint as one snapshot of an Iceberg table.

Each subtask writes Parquet files, and the coordinator adds the files of all subtasks in one commit (`client.py`).
Rules:

- *Append*: the files are data files of the table, with its partitions and statistics. A committable describes them as
  an encoded manifest, so a commit reads no data file.
- *Upsert*: rows are staged in files outside of the table (`upserts.py`). The commit rewrites the data files that have
  rows with these keys, without these rows, and adds the new rows (copy-on-write). Readers see both in one snapshot.
  Files are selected by the minimum and maximum keys in the table's statistics.
- Staged files are deleted after the commit. A repeated commit finds its token in the table, and needs no file.
- Files of failed attempts, and of commits that lost against another writer, belong to no snapshot. Iceberg's removal of
  orphan files deletes them.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.connectors.iceberg.client import TableLayout, TablePlace, check_partitions, commit_once
from tidegate.connectors.iceberg.options import check_columns
from tidegate.connectors.sink import COMMITTABLES_BYTES_MAX, CommitContext, Sink, SinkContext
from tidegate.connectors.staged_rows import StagedPart, staged_rows
from tidegate.connectors.upserts import (
    check_keys,
    last_of_each_key,
    rows_with_other_keys,
    split_changes,
    upsert_stage,
)
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import ConfigurationError, TableError
from tidegate.storage.schemas.arrow_types import decoded_type

if TYPE_CHECKING:
    from pyiceberg.expressions import BooleanExpression
    from pyiceberg.manifest import DataFile
    from pyiceberg.schema import Schema
    from pyiceberg.table import FileScanTask, Table
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.update.snapshot import UpdateSnapshot, _SnapshotProducer

STAGED_FOLDER = "tidegate-staged"
"""Folder in the table's location for staged rows of an upsert (prepared, not committed yet)."""
KEYS_IN_FILTER_MAX = 200
"""Up to this number of keys, data files are selected by the keys themselves.

Above it they are selected by the range of keys. Iceberg has the same limit for `in`.
"""


@wire
@dataclass(frozen=True, slots=True)
class IcebergFiles:
    """A committable of an append: a compressed manifest of data files, and the layout with which they were written."""

    uuid: str
    schema_id: int
    spec_id: int
    manifest: bytes


@wire
@dataclass(frozen=True, slots=True)
class IcebergRows:
    """A committable of an upsert: the UUID of the table, and the staged files with their paths, in order."""

    uuid: str
    files: tuple[tuple[str, StagedPart], ...]


class IcebergAppend(Sink):
    """A sink that appends rows to the Iceberg table at `place`."""

    def __init__(self, place: TablePlace, layout: TableLayout, bytes_max: int) -> None:
        """A subtask starts a new data file after `bytes_max` bytes of rows."""
        self._place = place
        self._layout = layout
        self._bytes_max = bytes_max

    def open(self, context: SinkContext) -> None:
        """Loads the table from its catalog."""
        table = self._place.load()
        self._layout.check(table, self._place)
        self._metadata = self._layout.pinned(table.metadata)
        self._io = table.io
        self._counter = itertools.count()
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0
        self._files: list[DataFile] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Buffers rows, and writes a data file once `bytes_max` is reached."""
        self._pending.append(batch)
        self._pending_bytes += batch.nbytes
        if self._pending_bytes >= self._bytes_max:
            self._flush()

    def prepare(self) -> Iterable[bytes]:
        """Returns one committable with all files written since the last call, or none if there are no files."""
        from tidegate.connectors.iceberg.manifests import encoded_files

        self._flush()
        if not self._files:
            return []
        manifest = zlib.compress(encoded_files(self._metadata, self._files))
        layout = self._layout
        committable = encode(IcebergFiles(layout.uuid, layout.schema_id, layout.spec_id, manifest))
        if len(committable) > COMMITTABLES_BYTES_MAX:
            raise ConfigurationError(
                f"one checkpoint of one subtask has {len(self._files)} files for {self._place.named}, more than a "
                "checkpoint can describe: partition the table by columns with fewer values, or take checkpoints more "
                "often"
            )
        self._files = []
        return [committable]

    def commit(self, committables: Sequence[bytes], context: CommitContext) -> None:
        """Adds the files to the table in one snapshot, unless the table already has this checkpoint."""
        from tidegate.connectors.iceberg.manifests import decoded_files

        prepared = [_decoded(committable, IcebergFiles) for committable in committables]
        layouts = {TableLayout(one.uuid, one.schema_id, one.spec_id) for one in prepared}
        if len(layouts) > 1:
            raise TableError(
                f"checkpoint {context.checkpoint_id} has files of several layouts of {self._place.named}"
                "; restore an older checkpoint"
            )
        (layout,) = layouts

        def check(table: Table) -> TableLayout:
            layout.check(table, self._place)
            return layout

        def stage(table: Table, update: UpdateSnapshot) -> _SnapshotProducer[Any]:
            producer = update.fast_append()
            for one in prepared:
                for file in decoded_files(zlib.decompress(one.manifest), one.spec_id):
                    producer.append_data_file(file)
            return producer

        commit_once(self._place, context, check, stage)

    def _flush(self) -> None:
        if self._pending:
            rows = rows_of_table(self._pending, self._metadata.schema(), self._place)
            self._files += new_files(self._metadata, rows, self._io, self._counter)
            self._pending, self._pending_bytes = [], 0


class IcebergUpsert(Sink):
    """A sink that replaces and deletes rows of the Iceberg table at `place` by their keys."""

    def __init__(self, place: TablePlace, layout: TableLayout, keys: tuple[str, ...], bytes_max: int) -> None:
        """A staged file has up to `bytes_max` bytes of rows."""
        self._place = place
        self._layout = layout
        self._keys = keys
        self._bytes_max = bytes_max

    def open(self, context: SinkContext) -> None:
        """Loads the table from its catalog."""
        table = self._place.load()
        self._layout.check(table, self._place)
        unique = f"{context.prefix}-{uuid4().hex[:8]}"
        names = (f"{unique}-{number}.arrows" for number in itertools.count())
        folder = f"{table.location().rstrip('/')}/{STAGED_FOLDER}"
        schema = table.schema()

        def write(chunks: Iterable[memoryview]) -> str:
            path = f"{folder}/{next(names)}"
            with table.io.new_output(path).create(overwrite=True) as stream:
                for chunk in chunks:
                    stream.write(bytes(chunk))
            return path

        def check(rows: pa.Table) -> None:
            kept, deleted = split_changes(rows)
            rows_of_table(kept.to_batches(), schema, self._place)
            rows_of_table(deleted.select(self._keys).to_batches(), schema.select(*self._keys), self._place)

        self._stage = upsert_stage(self._keys, write, check, self._bytes_max)

    def write(self, batch: pa.RecordBatch) -> None:
        """Stages rows in files for the next commit. Raises ConfigurationError for a key without a value."""
        check_keys(batch, self._keys)
        self._stage.add(batch)

    def prepare(self) -> Iterable[bytes]:
        """Returns one committable, with all files since the last call.

        Raises TableError for rows that the table cannot store: a checkpoint that has them could never be committed.
        """
        files = self._stage.take()
        return [encode(IcebergRows(self._layout.uuid, tuple(files)))] if files else []

    def commit(self, committables: Sequence[bytes], context: CommitContext) -> None:
        """Applies the changes in one snapshot, unless the table already has this checkpoint, and deletes the staged
        files.
        """
        prepared = [_decoded(committable, IcebergRows) for committable in committables]
        files = [file for one in prepared for file in one.files]

        def check(table: Table) -> TableLayout:
            for one in prepared:
                if one.uuid != str(table.metadata.table_uuid):
                    TableLayout(one.uuid, self._layout.schema_id, self._layout.spec_id).check(table, self._place)
            return TableLayout.of(table)

        def stage(table: Table, update: UpdateSnapshot) -> _SnapshotProducer[Any] | None:
            return self._changed(table, update, files)

        commit_once(self._place, context, check, stage)
        io = self._place.load().io
        for path, _ in files:
            # A repeated commit may have deleted it before.
            if io.new_input(path).exists():
                io.delete(path)

    def _check_columns(self, metadata: TableMetadata, rows: pa.Schema) -> None:
        """Raises TableError if the table lacks a column of the rows, or has another column of this name by now."""
        check_columns(metadata.schema(), rows, self._place.named)
        before = next((each for each in metadata.schemas if each.schema_id == self._layout.schema_id), None)
        numbers = {} if before is None else {field.name: field.field_id for field in before.fields}
        for name in rows.names:
            if numbers.get(name, -1) not in (-1, metadata.schema().find_field(name).field_id):
                raise TableError(
                    f"{self._place.named} has another column {name!r} than when the job was submitted: the former one "
                    'was renamed or dropped. Execute the job again with restore="latest"'
                )

    def _changed(
        self, table: Table, update: UpdateSnapshot, files: Sequence[tuple[str, StagedPart]]
    ) -> _SnapshotProducer[Any] | None:
        read = partial(_content, table)
        staged = [batch for path, part in files for batch in staged_rows(read, path, part)]
        changes = last_of_each_key(pa.Table.from_batches(staged), self._keys)
        metadata = table.metadata
        self._check_columns(metadata, split_changes(changes)[0].schema)
        check_partitions(metadata, self._place)
        counter = itertools.count()
        replaced: list[DataFile] = []
        added: list[DataFile] = []
        for task in _tasks(table, key_filter(changes, self._keys)):
            rows = _rows_of(table, task)
            kept = rows.filter(pa.array(rows_with_other_keys(rows, changes, self._keys)))
            if kept.num_rows == rows.num_rows:
                continue
            replaced.append(task.file)
            if kept.num_rows:
                added += new_files(metadata, kept, table.io, counter)
        new, _ = split_changes(changes)
        if new.num_rows:
            rows = rows_of_table(new.to_batches(), metadata.schema(), self._place)
            added += new_files(metadata, rows, table.io, counter)
        if not replaced and not added:
            return None
        producer = update.overwrite() if replaced else update.fast_append()
        for file in replaced:
            producer.delete_data_file(file)
        for file in added:
            producer.append_data_file(file)
        return producer


def _content(table: Table, path: str) -> bytes:
    with table.io.new_input(path).open() as stream:
        data: bytes = stream.read()
    return data


def _tasks(table: Table, row_filter: BooleanExpression) -> Iterable[FileScanTask]:
    return table.scan(row_filter=row_filter).plan_files() if table.metadata.current_snapshot() is not None else ()


def _rows_of(table: Table, task: FileScanTask) -> pa.Table:
    """Reads the rows of a data file, without rows that delete files remove."""
    from pyiceberg.expressions import AlwaysTrue
    from pyiceberg.io.pyarrow import ArrowScan

    return ArrowScan(table.metadata, table.io, table.metadata.schema(), AlwaysTrue()).to_table([task])


def key_filter(changes: pa.Table, keys: Sequence[str]) -> BooleanExpression:
    """Returns a pyiceberg filter that every row with one of these keys passes, and few other rows."""
    from pyiceberg.expressions import AlwaysTrue, And, GreaterThanOrEqual, In, LessThanOrEqual

    found: BooleanExpression = AlwaysTrue()
    for name in keys:
        column = changes.column(name)
        if not _is_ordered(column.type):
            continue
        values = pc.unique(column)
        if len(values) <= KEYS_IN_FILTER_MAX:
            found = And(found, In(name, values.to_pylist()))  # type: ignore[call-arg]
        else:
            least = pc.min(column).as_py()
            greatest = pc.max(column).as_py()
            found = And(found, GreaterThanOrEqual(name, least))  # type: ignore[call-arg]
            found = And(found, LessThanOrEqual(name, greatest))  # type: ignore[call-arg]
    return found


def _is_ordered(data_type: pa.DataType) -> bool:
    """Returns whether pyiceberg and Arrow sort values of this type in the same order."""
    types = pa.types
    return bool(types.is_integer(data_type) or types.is_string(data_type) or types.is_date32(data_type))


def rows_of_table(batches: Sequence[pa.RecordBatch], schema: Schema, place: TablePlace) -> pa.Table:
    """Converts rows to the columns of an Iceberg schema. Missing columns are null.

    Raises TableError if a required column has nulls, and for a value that does not fit its column.
    """
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    wanted = schema_to_pyarrow(schema, include_field_ids=False)
    if not batches:
        return wanted.empty_table()
    rows = pa.Table.from_batches(batches)
    columns = []
    for field in wanted:
        if field.name in rows.schema.names:
            found = rows.column(field.name)
            plain = found.cast(decoded_type(found.type))
            for chunk in plain.chunks:
                _check_nested(chunk, field.type, field.name, place)
            try:
                column = plain if plain.type.equals(field.type) else plain.cast(field.type)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise TableError(
                    f"{place.named} has the column {field.name!r} as {field.type}, and a value of the stream does not "
                    f"fit: {error}. Filter or change such rows before the sink"
                ) from error
        else:
            column = pa.chunked_array([pa.nulls(rows.num_rows, field.type)])
        columns.append(column)
    _check_required(pa.table(columns, names=wanted.names), [each.name for each in wanted if not each.nullable], place)
    return pa.Table.from_arrays(columns, schema=wanted)


def _check_required(rows: pa.Table, required: Sequence[str], place: TablePlace) -> None:
    """Raises TableError if a required column has no value in some rows."""
    for name in required:
        if count := rows.column(name).null_count:
            raise TableError(
                f"{place.named} requires a value in the column {name!r}, and {count} rows have none: filter them, or "
                "make the column optional"
            )


def _check_nested(values: pa.Array, wanted: pa.DataType, name: str, place: TablePlace) -> None:
    """Raises TableError if a required element or field within a column has no value. Arrow's cast ignores elements."""
    types = pa.types
    parts: list[tuple[pa.Field, pa.Array]] = []
    if types.is_list(wanted) or types.is_large_list(wanted):
        parts = [(wanted.value_field, values.flatten())]
    elif types.is_map(wanted):
        there = values.filter(values.is_valid())
        parts = [(wanted.key_field, there.keys), (wanted.item_field, there.items)]
    elif types.is_struct(wanted):
        there = values.filter(values.is_valid())
        parts = [(field, there.field(number)) for number, field in enumerate(wanted)]
    for field, found in parts:
        if not field.nullable and found.null_count:
            raise TableError(
                f"{place.named} requires a value in {name}.{field.name}, and {found.null_count} values are null: "
                "filter or change such rows, or make it optional"
            )
        _check_nested(found, field.type, f"{name}.{field.name}", place)


def new_files(metadata: TableMetadata, rows: pa.Table, io: Any, counter: Iterator[int]) -> list[DataFile]:
    """Writes rows as data files of a table, and returns their descriptions. No snapshot contains them yet."""
    from pyiceberg.io.pyarrow import _dataframe_to_data_files

    return list(_dataframe_to_data_files(metadata, rows, io, counter=counter))  # type: ignore[arg-type]


def _decoded(committable: bytes, kind: type[Any]) -> Any:
    found = decode(committable)
    if not isinstance(found, kind):
        raise ConfigurationError(
            f"to_iceberg: the checkpoint has rows of kind {type(found).__name__}, and the sink now needs "
            f"{kind.__name__}: give mode= the value that it had, or give the sink another uid"
        )
    return found
