"""Converts rows that a user gives to `SavepointWriter` to the stored form of a state.

Rules:

- Key columns are converted to the stored form of keys, and to the types that they have in the operator's other states.
- Each key occurs once.
- Values are cast to the declared type. A value that does not fit is an error.
- Everything is done column by column, never row by row.
- Rows of a reader that are too large for memory are kept in local files in their stored form, one file for each range
  of key groups (`SpilledRows`). The rows of a few key groups can then be read together.
- Executors write a Spark DataFrame to files, and the driver reads these one batch at a time (`staged_rows`). Collecting
  it would need memory for all of it in the driver. It is staged like the input of a job, in a folder that is deleted
  afterwards.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from fsspec.utils import get_protocol
from numpy.typing import NDArray

from tidegate.operators.state.keyed_state import KeyedState, ListState, MapState
from tidegate.operators.state.keys import key_columns, key_schema
from tidegate.operators.state.operator_state import KEY, VALUE
from tidegate.operators.state.ttl import timed_now
from tidegate.recovery.state_reader import BATCH_ROWS_MAX
from tidegate.state.kernels.distinct_integers import distinct_integers
from tidegate.state.kernels.hashing import hash_columns
from tidegate.storage.checkpoints.metadata import OperatorInfo, StateKind
from tidegate.storage.clock import now_ms
from tidegate.storage.errors import ConfigurationError, StorageError
from tidegate.storage.files.file_system_store import join_url
from tidegate.storage.files.store import Store
from tidegate.storage.schemas.arrow_types import comparable, widened
from tidegate.storage.schemas.column_names import columns_text
from tidegate.storage.state.key_groups import key_groups_of
from tidegate.storage.state.stored_rows import TIMERS_STATE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from tidegate.connectors.staged_parquet import ParquetSource


MEMORY_BYTES = 64 * 1024 * 1024
"""Size in bytes up to which rows of a reader are kept in memory. Larger ones are written to files."""
_SHOWN_MAX = 3


@dataclass(frozen=True, slots=True)
class PutState:
    """A state to be written. `keys` are its key columns; empty for operator state."""

    state: str
    kind: StateKind
    keys: tuple[str, ...]
    rows: pa.Table | SpilledRows
    hashed: tuple[str, ...] = ()
    """The columns that identify rows: the key columns, or for timers all columns."""

    @property
    def key_schema(self) -> pa.Schema:
        """Returns the key columns in their stored form."""
        return pa.schema([self.rows.schema.field(name).remove_metadata() for name in self.keys])

    def tables(self, owned: range) -> Iterator[pa.Table]:
        """Yields the rows, in tables that fit into memory. For keyed state it yields at least the key groups `owned`.

        Raises ConfigurationError for a key that occurs twice.
        """
        if isinstance(self.rows, pa.Table):
            yield self.rows
            return
        for table in self.rows.tables(owned):
            check_unique(table.select(list(self.hashed)), f"state {self.state!r}")
            yield table


def keyed_rows(
    info: OperatorInfo,
    keys: tuple[str, ...],
    state: KeyedState | str,
    rows: Any,
    stored_keys: pa.Schema | None,
    max_parallelism: int,
    folder: Callable[[], str],
) -> PutState:
    """Converts rows to the stored form of a keyed state.

    `stored_keys` are the key columns of the operator's other states, or None if there are none. If the rows of a reader
    exceed `MEMORY_BYTES`, they are written to files in `folder()`. Raises ConfigurationError for columns, types or keys
    that do not fit, StorageError.
    """
    if isinstance(rows, pa.RecordBatchReader):
        first = _first_of(rows)
        if sum(batch.nbytes for batch in first) >= MEMORY_BYTES:
            return _spilled(info, keys, state, chain(first, rows), rows.schema, stored_keys, max_parallelism, folder())
        rows = pa.Table.from_batches(first, rows.schema)
    put = _in_memory(info, keys, state, rows, stored_keys)
    assert isinstance(put.rows, pa.Table)
    check_unique(put.rows.select(list(put.hashed)), f"state {put.state!r} of operator {info.uid!r}")
    return put


def _first_of(reader: pa.RecordBatchReader) -> list[pa.RecordBatch]:
    found, size_bytes = [], 0
    while size_bytes < MEMORY_BYTES and (batch := next(reader, None)) is not None:
        found.append(batch)
        size_bytes += batch.nbytes
    return found


def _spilled(
    info: OperatorInfo,
    keys: tuple[str, ...],
    state: KeyedState | str,
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    stored_keys: pa.Schema | None,
    max_parallelism: int,
    folder: str,
) -> PutState:
    def stored(rows: pa.Table, expected: pa.Schema | None) -> pa.Table:
        table = _in_memory(info, keys, state, rows, expected).rows
        assert isinstance(table, pa.Table)
        return table

    empty = _in_memory(info, keys, state, schema.empty_table(), stored_keys)
    spilled = SpilledRows(folder, empty.rows.schema, max_parallelism)
    tables = (stored(pa.Table.from_batches([batch], schema), empty.key_schema) for batch in batches)
    parts = (part for table in tables for part in table.cast(spilled.schema).to_batches())

    def groups(batch: pa.RecordBatch) -> NDArray[np.uint16]:
        return key_groups_of(hash_columns(batch, keys), max_parallelism)

    spilled.take_in(parts, groups)
    return replace(empty, rows=spilled)


def _in_memory(
    info: OperatorInfo, keys: tuple[str, ...], state: KeyedState | str, rows: Any, stored_keys: pa.Schema | None
) -> PutState:
    name = state if isinstance(state, str) else state.name
    where = f"state {name!r} of operator {info.uid!r}"
    if not keys:
        raise ConfigurationError(
            f"{where}: keys= is empty, and keyed state needs the key columns of its rows; give keys=[...]"
        )
    table = as_table(rows, where)
    wanted = [*keys, name] if not isinstance(state, str) else [*keys, *(n for n in table.column_names if n not in keys)]
    _check_columns(table, wanted, where)
    values = [n for n in wanted if n not in keys]
    if isinstance(state, KeyedState):
        table = _declared(table.select(wanted), state, where)
    found = _with_keys(table, keys, values, stored_keys, where)
    return PutState(name, StateKind.KEYED, keys, found, tuple(wanted) if name == TIMERS_STATE else keys)


def operator_rows(uid: str, state: KeyedState, kind: StateKind, rows: Any) -> PutState:
    """Converts rows to the stored form of operator state.

    Raises ConfigurationError for columns, types or keys that do not fit.
    """
    where = f"state {state.name!r} of operator {uid!r}"
    table = as_table(rows, where)
    expected: type[KeyedState] = MapState if kind is StateKind.BROADCAST else ListState
    if not isinstance(state, expected):
        raise ConfigurationError(f"{where}: a {kind.value} state is declared as tg.{expected.__name__}, not {state!r}")
    stored = state.stored_field.type
    if kind is StateKind.BROADCAST:
        schema = pa.schema([stored.key_field.with_name(KEY), stored.item_field.with_name(VALUE)])
    else:
        schema = pa.schema([stored.value_field.with_name(state.name)])
    _check_columns(table, schema.names, where)
    found = _cast(table.select(schema.names), schema, where)
    for name in schema.names:
        if found.column(name).null_count:
            raise ConfigurationError(f"{where}: column {name!r} has nulls, and null is no element; drop these rows")
    if kind is StateKind.BROADCAST:
        check_unique(found.select([KEY]), where)
    return PutState(state.name, kind, (), found)


def as_table(rows: Any, where: str) -> pa.Table:
    """Converts rows to an Arrow table.

    They may be Arrow, polars, a Spark DataFrame, or any object with an Arrow stream.
    """
    if isinstance(rows, pa.Table):
        return rows
    if isinstance(rows, pa.RecordBatch):
        return pa.Table.from_batches([rows])
    if isinstance(rows, pa.RecordBatchReader):
        return rows.read_all()
    if hasattr(rows, "__arrow_c_stream__"):
        return pa.table(rows)
    if hasattr(rows, "sparkSession"):
        from tidegate.spark_bridge.dataframes.spark_types import arrow_schema_of, readable_schema
        from tidegate.spark_bridge.worker_python import refuse_connect

        refuse_connect(rows, where)
        schema = arrow_schema_of(readable_schema(rows))
        batches = [batch.cast(schema) for batch in rows._collect_as_arrow()]
        return pa.Table.from_batches(batches, schema)
    raise ConfigurationError(
        f"{where}: rows are an Arrow table, batch or reader, a polars or a Spark DataFrame, not a {type(rows).__name__}"
        "; convert it to one of these"
    )


def _check_columns(table: pa.Table, wanted: Sequence[str], where: str) -> None:
    missing = [name for name in wanted if name not in table.column_names]
    doubled = [name for name in dict.fromkeys(table.column_names) if table.column_names.count(name) > 1]
    if missing or doubled:
        problem = f"has no column {missing[0]!r}" if missing else f"has two columns {doubled[0]!r}"
        raise ConfigurationError(
            f"{where}: the table {problem}; it has {table.column_names} and needs {list(wanted)}; add, remove or "
            "rename columns"
        )


def _declared(table: pa.Table, state: KeyedState, where: str) -> pa.Table:
    """Casts the value column to its declared type.

    Drops rows with null and empty values, because they are not state.
    """
    position = table.column_names.index(state.name)
    column = table.column(position)
    kept = column.is_valid()
    if isinstance(state, ListState | MapState):
        lengths = pc.list_value_length(column.cast(_as_list(column.type, where)))
        kept = pc.and_(kept, pc.greater(pc.fill_null(lengths, 0), 0))
    table = table.filter(kept)
    field = state.stored_field
    if state.ttl is not None and not state.expires(table.column(position).type):
        at_ms = now_ms()
        chunks = [timed_now(widened_column(chunk), field.type, at_ms) for chunk in table.column(position).chunks]
        timed = pa.chunked_array(chunks, type=chunks[0].type if chunks else field.type)
        table = table.set_column(position, pa.field(state.name, timed.type), timed)
    fields = [field if n == position else table.schema.field(n) for n in range(table.num_columns)]
    return _cast(table, pa.schema(fields), where)


def widened_column(column: pa.Array) -> pa.Array:
    """Converts a column to the form in which values are stored."""
    return widened(pa.RecordBatch.from_arrays([column], names=["value"])).column(0)


def _as_list(data_type: pa.DataType, where: str) -> pa.DataType:
    if pa.types.is_map(data_type):
        return pa.list_(pa.struct([data_type.key_field, data_type.item_field]))
    if pa.types.is_list(data_type) or pa.types.is_large_list(data_type):
        return data_type
    raise ConfigurationError(
        f"{where}: its column is of type {data_type}, and must be a list or a map; give a column of one of these types"
    )


def _with_keys(
    table: pa.Table, keys: tuple[str, ...], values: Sequence[str], stored_keys: pa.Schema | None, where: str
) -> pa.Table:
    """Returns the table with the key columns first, in their stored form, followed by the values."""
    try:
        expected = key_schema(table.schema, keys) if stored_keys is None else stored_keys
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from error
    if expected.names != list(keys):
        raise ConfigurationError(
            f"{where}: the operator has the keys {expected.names}, not {list(keys)}; give these keys"
        )
    fields = [*expected, *(table.schema.field(name).remove_metadata() for name in values)]
    fields = [f if f.name in keys else table.schema.field(f.name) for f in fields]
    parts = []
    for batch in table.to_batches():
        columns = key_columns(batch, keys)
        parts.append(
            widened(
                pa.RecordBatch.from_arrays(
                    [*columns.columns, *(batch.column(name) for name in values)], names=[*keys, *values]
                )
            )
        )
    if not parts:
        return _cast(table.select([*keys, *values]), pa.schema(fields), where)
    return _cast(pa.Table.from_batches(parts), _resting(parts[0].schema, fields), where)


def _resting(found: pa.Schema, fields: Sequence[pa.Field]) -> pa.Schema:
    """Returns the schema of the rows in temporary files. Dictionary columns have the type of their values instead."""
    return pa.schema(
        [
            field.with_type(before.type) if pa.types.is_dictionary(before.type) else field
            for before, field in zip(found, fields, strict=True)
        ]
    )


def _cast(table: pa.Table, schema: pa.Schema, where: str) -> pa.Table:
    try:
        return table.cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
        raise ConfigurationError(
            f"{where}: its columns {columns_text(table.schema)} cannot become {columns_text(schema)}: {error}"
            "; cast them to these types"
        ) from error


def check_unique(keys: pa.Table, where: str) -> None:
    """Raises ConfigurationError if two rows have the same keys."""
    names = [str(number) for number in range(keys.num_columns)]
    table = pa.table([comparable(column) for column in keys.columns], names=names).append_column(
        "row", pa.array(np.arange(keys.num_rows, dtype=np.int64))
    )
    first = table.group_by(names).aggregate([("row", "min")]).column("row_min")
    if len(first) < keys.num_rows:
        seen = np.zeros(keys.num_rows, dtype=np.bool_)
        seen[first.to_numpy()] = True
        again = keys.take(pa.array(np.flatnonzero(~seen)[:_SHOWN_MAX]))
        raise ConfigurationError(
            f"{where}: {keys.num_rows - len(first)} rows have a key that came before, such as "
            f"{again.to_pylist()[0]}: each key has one row"
            "; remove the later rows"
        )


FILES_MAX = 64

Groups = Callable[[pa.RecordBatch], NDArray[np.uint16]]
"""A function that returns the key group of each row of a batch."""


class SpilledRows:
    """Rows in their stored form, all with the same `schema`, in temporary files in `folder`."""

    def __init__(self, folder: str, schema: pa.Schema, max_parallelism: int) -> None:
        self.schema = schema
        self._folder = folder
        files = min(FILES_MAX, max_parallelism)
        self._starts = np.arange(files + 1) * max_parallelism // files
        """The first key group of each file, and the end of the key groups of the last file."""

    def take_in(self, batches: Iterable[pa.RecordBatch], groups: Groups) -> None:
        """Writes all rows to the files. Raises StorageError if the folder cannot be used."""
        try:
            with ExitStack() as stack:
                writers: dict[int, pa.ipc.RecordBatchStreamWriter] = {}
                for batch in batches:
                    number = np.searchsorted(self._starts, groups(batch), side="right") - 1
                    order = np.argsort(number, kind="stable")
                    ends = np.searchsorted(number[order], np.arange(len(self._starts)))
                    rows = batch.take(pa.array(order))
                    for file in distinct_integers(number).tolist():
                        if file not in writers:
                            sink = stack.enter_context(pa.OSFile(self._path(file), "wb"))
                            writers[file] = stack.enter_context(pa.ipc.new_stream(sink, self.schema))
                        writers[file].write_batch(rows.slice(int(ends[file]), int(ends[file + 1] - ends[file])))
        except OSError as error:
            raise StorageError(
                f"cannot keep rows in {self._folder}: {error}. Free some space there, or set TMPDIR to another folder"
            ) from error

    def tables(self, owned: range) -> Iterator[pa.Table]:
        """Yields the rows of each file that contains some of these key groups, in the order of key groups."""
        for file, (first, end) in enumerate(zip(self._starts[:-1], self._starts[1:], strict=True)):
            path = self._path(file)
            if first < owned.stop and owned.start < end and os.path.exists(path):
                with pa.OSFile(path) as source, pa.ipc.open_stream(source) as reader:
                    yield reader.read_all()

    def _path(self, file: int) -> str:
        return os.path.join(self._folder, f"{file:03d}.arrow")


@contextmanager
def staged_rows(df: DataFrame, store: Store) -> Iterator[pa.RecordBatchReader]:
    """Yields a reader of the rows of a DataFrame. During the block they are staged in a folder of `store`.

    Raises ConfigurationError for a store that executors cannot reach or a type that cannot be stored, and
    SparkBridgeError.
    """
    from tidegate.spark_bridge.dataframes.staging import stage_dataframe

    if get_protocol(store.url) == "memory":
        raise ConfigurationError(
            f"rows of a DataFrame cannot go into a savepoint at {store.url}: Spark's executors are other processes and "
            "do not see this one's memory. Name a folder or a bucket, or give an Arrow table"
        )
    folder = f"staging-{secrets.token_hex(4)}"
    try:
        source = stage_dataframe(df, join_url(store.url, folder))
        yield pa.RecordBatchReader.from_batches(source.schema, _batches(source))
    finally:
        store.delete_tree(folder)


def _batches(source: ParquetSource) -> Iterator[pa.RecordBatch]:
    reader = source.reader()
    try:
        for split in source.splits():
            offset, at_end = 0, False
            while not at_end:
                found = reader.read(split, offset, BATCH_ROWS_MAX)
                if found.batch is not None:
                    yield found.batch
                offset, at_end = found.next_offset, found.at_end
    finally:
        reader.close()
