"""Loads stored rows into RocksDB: of a checkpoint by any backend, or of a state whose types have changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from operator import lt
from typing import Any

import numpy as np
import pyarrow as pa
import rocksdict

from tidegate.state.common.cells import Migrate
from tidegate.state.common.refusals import held_twice, strange_columns
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.state.rocksdb.cells import RocksCells
from tidegate.state.rocksdb.database_session import RocksSession
from tidegate.state.rocksdb.keys import database_keys, key_group_of
from tidegate.state.rocksdb.row_table import RocksRows
from tidegate.state.rocksdb.timers import RocksTimers
from tidegate.state.rocksdb.vector_table import RocksTable
from tidegate.storage.rocksdb.value_layout import HEAD, RocksState
from tidegate.storage.schemas.evolution import migrated
from tidegate.storage.state.snapshot import StateTable
from tidegate.storage.state.stored_rows import row_identity

_MOVED_ROWS = 16_384
_PUT_ROWS = 8_192
"""Rows on their way into the database become Python values, so many at a time."""


class RocksLoader:
    """Writes stored rows as rows of bound states."""

    def __init__(self, session: RocksSession) -> None:
        self._session = session
        self._groups: dict[str, set[int]] = {}
        """By state, the key groups that layer 0 has had rows of. Only there can a key come twice."""
        self._last: dict[str, bytes] = {}
        """By state, the last key of layer 0, as long as all keys have ascended."""

    def load(self, target: RocksTable | RocksCells | RocksTimers | RocksRows, table: StateTable) -> None:
        """Put the rows of a table, or remove its keys. Raises what `RocksBackend.load` raises."""
        session = self._session
        rows = table.rows
        if isinstance(target, RocksTimers):
            self._load_timers(target, table)
            return
        if isinstance(target, RocksRows):
            self._load_rows(target, table)
            return
        _check_columns(table, pa.schema([*session.key_schema, *(() if table.removed else target.state.values)]))
        if rows.num_rows == 0:
            return
        columns = rows.select(session.key_schema.names)
        number = target.state.number if isinstance(target, RocksTable) else 0
        keys = database_keys(columns, session.max_parallelism, number, namespace=session.namespace)
        if table.layer == 0 and not table.removed:
            self._check_first(target, columns, keys)
        for start in range(0, rows.num_rows, _PUT_ROWS):
            part = rows.slice(start, _PUT_ROWS)
            values = None if table.removed else part.columns[len(session.key_schema) :]
            self._put(target, keys[start : start + _PUT_ROWS], values)

    def _load_timers(self, timers: RocksTimers, table: StateTable) -> None:
        if table.rows.num_rows == 0:
            return
        keys = timers.database_keys(table.rows)
        if table.layer == 0 and not table.removed:
            self._check_first(timers, table.rows, keys)
        for start in range(0, len(keys), _PUT_ROWS):
            (timers.remove if table.removed else timers.put)(keys[start : start + _PUT_ROWS])

    def _load_rows(self, target: RocksRows, table: StateTable) -> None:
        identity = row_identity(self._session.key_schema)
        _check_columns(table, pa.schema([*identity, *(() if table.removed else target.state.values)]))
        if table.rows.num_rows == 0:
            return
        columns = table.rows.select(identity.names)
        target.number_seen(columns)
        keys = target.database_keys(columns)
        if table.layer == 0 and not table.removed:
            self._check_first(target, columns, keys)
        for start in range(0, len(keys), _PUT_ROWS):
            some = keys[start : start + _PUT_ROWS]
            if table.removed:
                target.delete(some)
            else:
                target.put(some, table.rows.slice(start, _PUT_ROWS).columns[len(identity) :])

    def move(self, source: RocksState, target: RocksTable | RocksCells, migrate: Migrate | None = None) -> None:
        """Convert the rows of `source` to the types of `target`, which replaces it, by `migrate` if it is given."""
        session = self._session
        expected = pa.schema([*session.key_schema, *target.state.values])
        number = target.state.number if isinstance(target, RocksTable) else 0
        for rows in session.scan(source, _MOVED_ROWS):
            moved = migrated(rows, expected, source.name, session.uid) if migrate is None else migrate(rows)
            columns = moved.select(session.key_schema.names)
            keys = database_keys(columns, session.max_parallelism, number, namespace=session.namespace)
            self._put(target, keys, moved.columns[len(session.key_schema) :])
        session.remove_ranges(
            (HEAD.pack(group, source.number), HEAD.pack(group, source.number + 1)) for group in session.key_groups
        )

    def _put(self, target: RocksTable | RocksCells, keys: Sequence[bytes], columns: Sequence[pa.Array] | None) -> None:
        if isinstance(target, RocksTable):
            if columns is None:
                target.delete(keys)
            else:
                target.put(keys, columns)
            return
        values: Iterable[Any] = [None] * len(keys) if columns is None else columns[0].to_pylist()
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key, value in zip(keys, values, strict=True):
            target.replace(batch, key, value)
        self._session.position += 1
        self._session.write(batch)

    def _check_first(
        self, target: RocksTable | RocksCells | RocksTimers | RocksRows, columns: pa.RecordBatch, keys: Sequence[bytes]
    ) -> None:
        """Raise CorruptionError if a key of layer 0 comes twice, in this table or since an earlier one."""
        name = target.state.name
        known = self._groups.setdefault(name, set())
        if self._ascend(name, keys, not known):
            # Rows of a canonical savepoint and of RocksDB files ascend, so no key can come twice.
            known |= {key_group_of(key) for key in keys}
            return
        upserted = KeyIndex(tuple(columns.schema.names)).upsert(columns)
        groups = {key_group_of(key) for key in keys}
        double = len(upserted.first_rows) < len(keys)
        if not double and groups & known:
            suspects = [key for key in keys if key_group_of(key) in known]
            double = bool(np.any([target.has(key) for key in suspects]))
        if double:
            raise held_twice(name)
        known |= groups

    def _ascend(self, name: str, keys: Sequence[bytes], is_first: bool) -> bool:
        """Whether all keys of a state, with these, have ascended so far."""
        last = b"" if is_first else self._last.get(name)
        if last is None or not (last < keys[0] and all(map(lt, keys, islice(keys, 1, None)))):
            self._last.pop(name, None)
            return False
        self._last[name] = keys[-1]
        return True


def _check_columns(table: StateTable, expected: pa.Schema) -> None:
    if not table.rows.schema.equals(expected):
        raise strange_columns(table.state, table.rows.schema, expected)
