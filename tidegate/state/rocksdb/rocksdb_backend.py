"""`RocksBackend`: the columnar engine over a cold tier in RocksDB on the local disk, so state may exceed memory.

Rules:
- Vectorised states and row tables are columns in memory, as in `ColumnarBackend`, of about `cache_bytes` each. RocksDB
  stores rows that were evicted, and the state as of the last snapshot. Objects and timers use RocksDB directly, with
  a working set per batch.
- Memory is bounded by the options and by what one batch touches.
- A checkpoint consists of the database's own files (`freeze_native`), of which only new ones are uploaded. Savepoints
  and the changelog are rows (`freeze`), which any backend can read. Rows that are only in memory are written with a
  snapshot (`Unwritten`).
- `RocksLoader` writes stored rows of a checkpoint by any backend, or of a state whose types have changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from operator import lt
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import rocksdict
from numpy.typing import NDArray

from tidegate.state.common.backend import (
    CellSpec,
    Migrate,
    StateSize,
    ValueSpec,
    held_twice,
    not_bound,
    strange_columns,
    strange_rows,
)
from tidegate.state.common.options import BackendPlace
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.state.rocksdb.database_session import RocksSession, Unwritten
from tidegate.state.rocksdb.frozen_rows import Cursors, FrozenRows
from tidegate.state.rocksdb.keys import database_keys, key_group_of
from tidegate.state.rocksdb.object_state import RocksCells, RocksLists, RocksMaps, RocksSweeper, RocksValues
from tidegate.state.rocksdb.row_table import CachedRows, RocksRows
from tidegate.state.rocksdb.timers import RocksTimers
from tidegate.state.rocksdb.vector_table import CachedNamespaces, CachedTable, RocksNamespaces, RocksTable
from tidegate.state.rocksdb.write_back import WriteBack
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import CheckpointId
from tidegate.storage.rocksdb.database import reported
from tidegate.storage.rocksdb.frozen import FrozenRocks
from tidegate.storage.rocksdb.tuning import DatabaseTuning
from tidegate.storage.rocksdb.value_layout import HEAD, RocksDescription, RocksForm, RocksState
from tidegate.storage.schemas.column_names import columns_text
from tidegate.storage.schemas.evolution import migrated
from tidegate.storage.state.snapshot import Cut, FrozenState, StateTable
from tidegate.storage.state.stored_rows import TIMERS_STATE, check_timers, row_identity

C = TypeVar("C", bound=RocksCells)

_TUNING = DatabaseTuning()
_MOVED_ROWS = 16_384
_PUT_ROWS = 8_192
"""Rows on their way into the database become Python values, so many at a time."""


class RocksBackend:
    """A `KeyedBackend` in a folder of its own. `RocksSession` says what may be in the folder at first."""

    def __init__(
        self,
        place: BackendPlace,
        folder: str,
        memory_bytes: int,
        keeps_changes: bool = False,
        cache_bytes: int = 0,
        tuning: DatabaseTuning = _TUNING,
    ) -> None:
        """Open it. Raises StorageError if the folder cannot be used.

        `keeps_changes`: `freeze` on a base gives only what has changed since then. Else hot rows of each vectorised
        state and row table take `cache_bytes` in memory.
        """
        self._session = RocksSession(
            place.uid,
            folder,
            place.max_parallelism,
            place.key_groups,
            memory_bytes,
            keeps_changes,
            place.namespace,
            tuning,
        )
        self.timers = RocksTimers(self._session)
        self._place = place
        self._cache_bytes = 0 if keeps_changes else cache_bytes
        self._loader = RocksLoader(self._session)
        self._tables: dict[str, RocksTable] = {}
        self._cells: dict[str, RocksCells] = {}
        self._rows: dict[str, RocksRows] = {}
        self._sweeper = RocksSweeper(self._session)

    @property
    def stored(self) -> RocksDescription | None:
        """The description of the files that it was opened on: key columns, states and their types."""
        return self._session.stored

    def fix_keys(self, schema: pa.Schema) -> None:
        """Set the stored key columns.

        Raises ConfigurationError if the files have other key columns, or a state that is not bound.
        """
        session = self._session
        if session.stored is not None:
            self._check_stored(schema, session.stored)
        session.key_schema = schema

    def table(self, name: str, columns: Sequence[ValueSpec]) -> RocksTable:
        """A vectorised state. ConfigurationError if the types in the files cannot become these."""
        values = pa.schema([spec.field for spec in columns])
        state, older = self._declared(name, RocksForm.TABLE, values)
        table = self._tables[name] = self._new_table(state, columns)
        if older is not None:
            self._loader.move(older, table)
        return table

    def rows(self, name: str, values: pa.Schema) -> RocksRows:
        """A state with many rows for each key. ConfigurationError if the files have it with other columns."""
        state, older = self._declared(name, RocksForm.ROWS, values)
        if older is not None:
            raise strange_rows(name, self._session.uid, older.values, values)
        if self._cache_bytes:
            rows: RocksRows = CachedRows(self._session, state, self._place.key_names, self._cache_bytes)
        else:
            rows = RocksRows(self._session, state)
        self._rows[name] = rows
        return rows

    def retype(self, name: str, columns: Sequence[ValueSpec], migrate: Migrate) -> RocksTable:
        """Replace a vectorised state by one with the same name and other types, and convert its rows."""
        former = self._tables.pop(name).state
        values = pa.schema([spec.field for spec in columns])
        state = self._session.declare(name, RocksForm.TABLE, values)
        table = self._tables[name] = self._new_table(state, columns)
        self._loader.move(former, table, migrate)
        return table

    def values(self, spec: CellSpec) -> RocksValues:
        """A state with one value for each key. Raises what `table` raises."""
        return self._bound(RocksValues, RocksForm.VALUE, spec)

    def lists(self, spec: CellSpec) -> RocksLists:
        """A state with a list for each key. Raises what `table` raises."""
        return self._bound(RocksLists, RocksForm.LIST, spec)

    def maps(self, spec: CellSpec) -> RocksMaps:
        """A state with a map for each key. Raises what `table` raises."""
        return self._bound(RocksMaps, RocksForm.MAP, spec)

    def enter(self, keys: pa.RecordBatch) -> list[bytes]:
        """Begin a batch of keys: returns the ref of each row's key."""
        refs = database_keys(keys, self._session.max_parallelism, 0, namespace=self._session.namespace)
        self._session.batch_refs = tuple(dict.fromkeys(refs))
        return refs

    def enter_batch(self, keys: pa.RecordBatch) -> NDArray[Any]:
        """The same as an array."""
        refs = np.empty(keys.num_rows, dtype=object)
        refs[:] = self.enter(keys)
        return refs

    def leave(self) -> None:
        """End the batch: write its changes with one call. StorageError."""
        self._flush()
        self._session.batch_refs = ()

    def sweep(self, keys_max: int) -> None:
        """Remove expired state of the next `keys_max` keys of each state. StorageError."""
        expiring = [cells for cells in self._cells.values() if cells.spec.has_expired is not None]
        if not expiring or not self._session.has_keys:
            return
        self._flush()
        batch = rocksdict.WriteBatch(raw_mode=True)
        self._sweeper.sweep(expiring, keys_max, batch)
        self._write(batch)

    def keys(self, state: str, rows_max: int) -> Iterator[pa.RecordBatch]:
        """Keys that have this state when the first batch is drawn, sorted by key group."""
        found = self._session.known(state)
        if found is None or not self._session.has_keys:
            return
        self._write_cached()
        names = self._session.key_schema.names
        for rows in self._session.scan(found, rows_max):
            yield rows.select(names)

    @property
    def size(self) -> StateSize:
        """What RocksDB estimates: its keys, and the bytes of its files and memtables; and what is in memory."""
        size, hot = self._session.size, [table.hot for table in self._cached]
        held_bytes = sum(rows.size_bytes for rows in hot)
        return replace(
            size, rows=max(size.rows, sum(rows.rows for rows in hot)), size_bytes=(size.size_bytes or 0) + held_bytes
        )

    def changed_rows(self, base: CheckpointId) -> tuple[int, int]:
        """Zeros: files are shared, and RocksDB compacts them itself."""
        return 0, 0

    def freeze(self, cut: Cut) -> Sequence[FrozenState]:
        """All states as rows. With a base, if changes are tracked: rows that have changed since then.

        StorageError.
        """
        self._flush()
        session = self._session
        if not session.has_keys:
            return ()
        description = session.describe()
        changed: list[FrozenState] = []
        bound: list[RocksTable | RocksCells | RocksRows | RocksTimers]
        bound = [*self._tables.values(), *self._cells.values(), *self._rows.values(), self.timers]
        for state in bound:
            if state.changes is not None and not cut.in_order:
                changed += state.changes.freeze(cut.checkpoint_id, cut.base, description)
        if session.keeps_changes and cut.base is not None:
            return changed
        cursors = Cursors(session, len(description.states))
        session.unwritten = unwritten = Unwritten(self._changed(), cursors.make)
        if not self._cached:
            unwritten.take()
        return [
            FrozenRows(unwritten.take, cursors, number, description, session)
            for number in range(len(description.states))
        ]

    def freeze_native(self, cut: Cut) -> FrozenRocks | None:
        """All states as files. None before the first key or without a state. StorageError."""
        self._flush()
        session = self._session
        if not session.has_keys or not session.describe().states:
            return None
        session.settle()
        return session.freeze(cut.checkpoint_id, self._changed() if self._cached else None)

    def keep(self, checkpoint_id: CheckpointId) -> None:
        """Nothing to do: a task goes back by the files of the checkpoint, linked or downloaded."""

    def completed(self, checkpoint_id: CheckpointId) -> None:
        """Nothing to do."""

    @property
    def goes_back(self) -> bool:
        """Never."""
        return False

    def kept(self, checkpoint_id: CheckpointId) -> None:
        """None: it never goes back."""
        return

    def go_back(self, checkpoint_id: CheckpointId) -> None:
        """Never called."""
        raise AssertionError("a database goes back to nothing: its files are opened again")

    @property
    def stored_keys(self) -> pa.Schema | None:
        """Key columns of the files that it was opened on."""
        return None if self.stored is None else self.stored.keys

    def stored_schema(self, state: str) -> pa.Schema | None:
        """Key and value columns of a state in the files that it was opened on; None if it is not there."""
        if self.stored is None:
            return None
        found = [known for known in self.stored.states if known.name == state]
        return pa.schema([*self.stored.stored_keys(found[0]), *found[0].values]) if found else None

    def expect(self, keys: int) -> None:
        """Nothing to reserve: keys go to the disk."""

    def load(self, table: StateTable) -> None:
        """Load a stored table.

        Raises CorruptionError for a key that comes twice in layer 0, and StorageError. Raises ConfigurationError for a
        state that is not bound, or whose types cannot become those of the program.
        """
        if table.state == TIMERS_STATE:
            check_timers(table.rows, self._session.key_schema)
            self._loader.load(self.timers, table)
            return
        target = self._bound_states().get(table.state)
        if target is None:
            raise not_bound(table.state, self._bound_states())
        self._loader.load(target, table)

    def loaded(self) -> None:
        """Nothing to do: `load` has checked every key."""

    def close(self) -> None:
        """Close the database and delete its folder."""
        self._session.close()

    @property
    def _cached(self) -> list[WriteBack]:
        return [each for each in (*self._tables.values(), *self._rows.values()) if isinstance(each, WriteBack)]

    def _new_table(self, state: RocksState, columns: Sequence[ValueSpec]) -> RocksTable:
        session, namespace = self._session, self._place.namespace
        if self._cache_bytes:
            cached = CachedNamespaces if namespace else CachedTable
            return cached(session, state, columns, self._place.key_names, self._cache_bytes)
        return (RocksNamespaces if namespace else RocksTable)(session, state, columns)

    def _changed(self) -> Iterator[object]:
        """Freeze what is in memory alone; the result writes it."""
        self._session.settle()
        parts = [table.changed() for table in self._cached]
        return chain.from_iterable(parts)

    def _write_cached(self) -> None:
        for table in self._cached:
            table.write_all()

    def _bound_states(self) -> dict[str, RocksTable | RocksCells | RocksRows]:
        return {**self._tables, **self._cells, **self._rows}

    def _bound(self, cells: type[C], form: RocksForm, spec: CellSpec) -> C:
        state, older = self._declared(spec.name, form, pa.schema([spec.field]))
        bound = cells(self._session, spec, state)
        self._cells[spec.name] = bound
        if older is not None:
            self._loader.move(older, bound, spec.migrate)
        return bound

    def _declared(self, name: str, form: RocksForm, values: pa.Schema) -> tuple[RocksState, RocksState | None]:
        """The state to use, and the state in the files that must be converted to it, if any."""
        assert name not in self._bound_states(), f"two states are named {name!r}"
        known = self._session.known(name)
        if known is None:
            return self._session.declare(name, form, values), None
        if known.form is not form:
            raise ConfigurationError(
                f"state {name!r} of operator {self._session.uid!r} is a {known.form.value} in the checkpoint, and a "
                f"{form.value} in the program; give the state a new name, or the operator a new uid"
            )
        if known.values.equals(values, check_metadata=True):
            return known, None
        return self._session.declare(name, form, values), known

    def _check_stored(self, schema: pa.Schema, stored: RocksDescription) -> None:
        if not schema.equals(stored.keys):
            raise ConfigurationError(
                f"RocksDB files of operator {self._session.uid!r} have the key columns "
                f"{columns_text(stored.keys)}, and the program has {columns_text(schema)}; restore with the keys that "
                "they were written with, or give the operator a new uid"
            )
        unbound = {state.name for state in stored.states} - {*self._bound_states(), TIMERS_STATE}
        if unbound:
            raise ConfigurationError(
                f"the checkpoint has a state {min(unbound)!r} of operator {self._session.uid!r} that the program does "
                f"not bind (it binds {sorted(self._bound_states())}): bind it, or give the operator a new uid"
            )

    def _flush(self) -> None:
        batch = rocksdict.WriteBatch(raw_mode=True)
        with reported("read RocksDB", self._session.folder):
            for cells in self._cells.values():
                cells.flush(batch)
        self._write(batch)

    def _write(self, batch: rocksdict.WriteBatch) -> None:
        if not batch.is_empty():
            self._session.position += 1
            self._session.write(batch)


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
