"""Reads the rows of states from RocksDB as batches that every state backend can load, a bounded number of rows at a
time.

Keys are sorted by key group and state, so a state is read with one seek per key group, and single rows with one seek
each. The rows of a chunk have the order of the database: sorted by key group. `stored_tables` reads the files of a
checkpoint, from which any backend can be restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import rocksdict

from tidegate.storage.checkpoints.metadata import NativeState, StateKind
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.state.rocksdb.database import open_files, reported
from tidegate.storage.state.rocksdb.keys import RowLength, decode_rows, row_end, timer_rows
from tidegate.storage.state.rocksdb.value_layout import (
    HEAD,
    RocksDescription,
    RocksForm,
    RocksState,
    ValueCodec,
    describe,
    list_codec,
    map_key_codec,
    table_layout,
    unpacked,
    value_codec,
)
from tidegate.storage.state.snapshot import StateChunk, StateTable

CHUNK_ROWS = 65_536
CHUNK_BYTES = 8 * 1024 * 1024
_ROW_AN_ENTRY = (RocksForm.TABLE, RocksForm.VALUE, RocksForm.TIMERS, RocksForm.ROWS)
_MEMORY_BYTES = 16 * 1024 * 1024


def scan_state(
    cursor: rocksdict.RdictIter, description: RocksDescription, state: RocksState, key_groups: range, folder: str
) -> Iterator[StateChunk]:
    """Yields the rows of one state in the given key groups. `folder` is for error texts.

    Raises CorruptionError, StorageError.
    """
    take = _reader(description, state)
    chunk = _Chunk(key_groups.start)
    for group in key_groups:
        prefix = HEAD.pack(group, state.number)
        with reported("read RocksDB", folder):
            cursor.seek(prefix)
        while True:
            more = take(cursor, prefix, chunk, folder)
            if more and not chunk.is_full:
                continue
            if chunk.is_full:
                yield _chunk_of(description, state, chunk, group)
                chunk = _Chunk(group)
            if not more:
                break
        chunk.end_group()
    if chunk.keys:
        yield _chunk_of(description, state, chunk, None)


def scan_keys(
    cursor: rocksdict.RdictIter,
    description: RocksDescription,
    state: RocksState,
    keys: Iterable[bytes],
    folder: str,
    missing: bool = False,
) -> Iterator[StateChunk]:
    """Yields the rows of the given keys of one state, and skips keys that have no row. Raises as `scan_state` does.

    `keys` are encoded as in the database, sorted and unique. With `missing` the function yields the key columns of keys
    without a row instead.
    """
    take = _row_reader(description, state)
    head = HEAD.size
    chunk: _Chunk | None = None
    group = 0
    for key in keys:
        if _is_at(cursor, key, folder) == missing:
            continue
        key_group, _ = HEAD.unpack_from(key)
        if chunk is None:
            chunk = _Chunk(key_group)
        else:
            for _ in range(group, key_group):
                chunk.end_group()
        group = key_group
        if missing:
            chunk.keys.append(key[head:])
            chunk.size_bytes += len(key)
        else:
            take(cursor, key[:head], chunk, folder)
        if chunk.is_full:
            yield _chunk_of(description, state, chunk, group, missing)
            chunk = _Chunk(group)
    if chunk is not None and chunk.keys:
        yield _chunk_of(description, state, chunk, group, missing)


def _is_at(cursor: rocksdict.RdictIter, key: bytes, folder: str) -> bool:
    """Moves the cursor to the row of a key, which may consist of several entries. Returns whether the key has a row."""
    with reported("read RocksDB", folder):
        cursor.seek(key)
        if cursor.valid():
            return bool(cursor.key().startswith(key))
        cursor.status()
    return False


@dataclass(slots=True)
class _Chunk:
    """Rows that were read from RocksDB and are not decoded yet: their encoded keys and values. `_columns` decodes the
    values.
    """

    first_group: int
    keys: list[bytes] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    ends: list[int] = field(default_factory=lambda: [0])
    size_bytes: int = 0

    @property
    def is_full(self) -> bool:
        return len(self.keys) >= CHUNK_ROWS or self.size_bytes >= CHUNK_BYTES

    def end_group(self) -> None:
        if self.keys:
            self.ends.append(len(self.keys))
        else:
            self.first_group += 1


_Take = Callable[[rocksdict.RdictIter, bytes, _Chunk, str], bool]
"""A function that reads rows into a chunk until the chunk is full. Returns False if the prefix has no more rows."""


def _reader(description: RocksDescription, state: RocksState) -> _Take:
    if state.form in _ROW_AN_ENTRY:
        return _take_rows
    return _Pieces(state, row_end(description.keys)).take


def _row_reader(description: RocksDescription, state: RocksState) -> _Take:
    if state.form in _ROW_AN_ENTRY:
        return _take_row
    return _Pieces(state, row_end(description.keys)).take


def _take_row(cursor: rocksdict.RdictIter, prefix: bytes, chunk: _Chunk, folder: str) -> bool:
    """Reads one row from the cursor into a chunk. The row consists of a single entry."""
    with reported("read RocksDB", folder):
        key, value = cursor.key(), cursor.value()
    chunk.keys.append(key[len(prefix) :])
    chunk.values.append(value)
    chunk.size_bytes += len(key) + len(value)
    return True


def _take_rows(cursor: rocksdict.RdictIter, prefix: bytes, chunk: _Chunk, folder: str) -> bool:
    """Reads entries from the cursor, each of which is one row, until the chunk is full. Returns False if the prefix has
    no more entries.
    """
    head = len(prefix)
    keys, values = chunk.keys, chunk.values
    with reported("read RocksDB", folder):
        while cursor.valid():
            key = cursor.key()
            if not key.startswith(prefix):
                return False
            value = cursor.value()
            keys.append(key[head:])
            values.append(value)
            chunk.size_bytes += len(key) + len(value)
            cursor.next()
            if len(keys) >= CHUNK_ROWS or chunk.size_bytes >= CHUNK_BYTES:
                return True
        cursor.status()
    return False


class _Pieces:
    """Reads rows that consist of several entries, such as lists and maps. The key of each entry begins with the key of
    the row.
    """

    def __init__(self, state: RocksState, end: RowLength) -> None:
        self._end = end
        data_type = state.values.field(0).type
        self._is_map = state.form is RocksForm.MAP
        if self._is_map:
            self._map_key = map_key_codec(data_type.key_type)
            self._item = value_codec(data_type.item_type)
        else:
            self._list = list_codec(data_type.value_type)

    def take(self, cursor: rocksdict.RdictIter, prefix: bytes, chunk: _Chunk, folder: str) -> bool:
        """Reads one row with all its entries into a chunk. Returns False if the prefix has no more rows."""
        with reported("read RocksDB", folder):
            if not cursor.valid():
                cursor.status()
                return False
            key = cursor.key()
            if not key.startswith(prefix):
                return False
            row = key[: self._end(key, len(prefix))]
            found: list[Any] = []
            while True:
                data = cursor.value()
                if self._is_map:
                    found.append((self._map_key.decode(key[len(row) :]), self._item.decode(data)))
                else:
                    found.extend(self._list.decode(data))
                chunk.size_bytes += len(key) + len(data)
                cursor.next()
                if not cursor.valid():
                    cursor.status()
                    break
                key = cursor.key()
                if not key.startswith(row):
                    break
        chunk.keys.append(row[len(prefix) :])
        chunk.values.append(found)
        return True


def _chunk_of(
    description: RocksDescription, state: RocksState, chunk: _Chunk, group: int | None, keys_alone: bool = False
) -> StateChunk:
    """Decodes the rows that were read into a `StateChunk`.

    `group` is the key group that continues in the next chunk, or None at the end. `keys_alone` omits the value columns.
    """
    ends = chunk.ends if group is None else [*chunk.ends, len(chunk.keys)]
    if state.form is RocksForm.TIMERS:
        return StateChunk(timer_rows(chunk.keys, description.keys), chunk.first_group, tuple(ends))
    keys = decode_rows(chunk.keys, description.stored_keys(state))
    if keys_alone:
        return StateChunk(keys, chunk.first_group, tuple(ends))
    schema = pa.schema([*keys.schema, *state.values])
    rows = pa.RecordBatch.from_arrays([*keys.columns, *_columns(state, chunk.values)], schema=schema)
    return StateChunk(rows, chunk.first_group, tuple(ends))


def _columns(state: RocksState, values: list[Any]) -> list[pa.Array]:
    if state.form is RocksForm.ROWS:
        return unpacked(values, state.values)
    if state.form is RocksForm.TABLE:
        return table_layout(state.values).columns(values)
    data_type = state.values.field(0).type
    if state.form is RocksForm.VALUE:
        codec: ValueCodec = value_codec(data_type)
        values = [codec.decode(value) for value in values]
    return [pa.array(values, type=data_type)]


def clipped(native: NativeState, key_groups: range | None) -> range:
    """Returns the key groups that were requested and that the stored files contain. `key_groups` None requests all.

    Raises CodecError, CorruptionError, or ConfigurationError for groups beyond the max parallelism of the job.
    """
    first, end = native.key_groups
    if key_groups is None:
        return range(first, end)
    max_parallelism = describe(native).max_parallelism
    if key_groups.start < 0 or key_groups.stop > max_parallelism:
        raise ConfigurationError(
            f"operator {native.uid!r} was written with max parallelism {max_parallelism}; key groups "
            f"{key_groups.start}..{key_groups.stop - 1} were requested. "
            "Keep the max parallelism of the job that wrote the checkpoint"
        )
    return range(max(first, key_groups.start), min(end, key_groups.stop))


def empty_tables(native: NativeState) -> list[StateTable]:
    """Returns an empty table with the right columns for each state in RocksDB files.

    Raises CodecError, CorruptionError.
    """
    description = describe(native)
    schemas = (
        (state.name, pa.schema([*description.stored_keys(state), *state.values])) for state in description.states
    )
    return [StateTable(name, StateKind.KEYED, pa.RecordBatch.from_pylist([], schema)) for name, schema in schemas]


def stored_tables(native: NativeState, key_groups: range, folder: str, only: str | None = None) -> Iterator[StateTable]:
    """Yields the rows of the given key groups, state by state, from a folder with the downloaded RocksDB files.

    `only` selects the state of that name.
    """
    description = describe(native)
    database = open_files(folder, _MEMORY_BYTES)
    try:
        for state in description.states:
            if only not in (None, state.name):
                continue
            options = rocksdict.ReadOptions()
            # Behind deleted rows a cursor would leave the key group, for files that need not have been downloaded.
            options.set_prefix_same_as_start(True)
            with reported("read RocksDB", folder):
                cursor = database.iter(options)
            for chunk in scan_state(cursor, description, state, key_groups, folder):
                yield StateTable(state.name, StateKind.KEYED, chunk.rows)
            del cursor
    finally:
        database.close()
