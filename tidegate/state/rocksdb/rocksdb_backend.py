"""`RocksBackend`: the columnar engine over a cold tier in RocksDB on the local disk, so state may exceed memory.

Rules:
- Each vectorised state and row table is a table in columns, as in `ColumnarBackend`, of about `cache_bytes`. RocksDB
  stores rows that were evicted, and the state as of the last snapshot (`ColdStore`). Object state and timers use
  RocksDB directly, with a working set per batch.
- Memory is bounded by the options and by the keys of one batch.
- A checkpoint consists of the database's own files (`freeze_native`), of which only new ones are uploaded. Savepoints
  and the changelog are rows (`freeze`), which any backend can read. Rows that are only in memory are written with a
  snapshot (`PendingWrites`).
- `RocksLoader` writes the stored rows of a checkpoint, by any backend, and converts states whose types have changed.
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
    Migrate,
    StateDescriptor,
    StateSize,
    ValueSpec,
    duplicate_key,
    not_bound,
    unexpected_columns,
    unexpected_row_columns,
)
from tidegate.state.common.options import BackendPlace
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.state.rocksdb.cold_store import ColdStore, TieredTable
from tidegate.state.rocksdb.database_session import PendingWrites, RocksSession
from tidegate.state.rocksdb.frozen_database import FrozenRocks
from tidegate.state.rocksdb.frozen_rows import Cursors, FrozenRows
from tidegate.state.rocksdb.keys import database_keys, key_group_of
from tidegate.state.rocksdb.object_state import RocksLists, RocksMaps, RocksObjectState, RocksSweeper, RocksValues
from tidegate.state.rocksdb.row_table import RocksRows
from tidegate.state.rocksdb.timers import RocksTimers
from tidegate.state.rocksdb.vector_table import RocksNamespaces, RocksTable
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import CheckpointId
from tidegate.storage.schemas.column_names import columns_text
from tidegate.storage.schemas.evolution import migrated
from tidegate.storage.state.rocksdb.database import reported
from tidegate.storage.state.rocksdb.tuning import DatabaseTuning
from tidegate.storage.state.rocksdb.value_layout import HEAD, RocksDescription, RocksForm, RocksState
from tidegate.storage.state.snapshot import Cut, FrozenState, StateTable
from tidegate.storage.state.stored_rows import TIMERS_STATE, check_timers

C = TypeVar("C", bound=RocksObjectState)

_TUNING = DatabaseTuning()
_MOVED_ROWS = 16_384
_PUT_ROWS = 8_192
"""Number of rows that are converted to Python values at a time, on their way into the database."""


class RocksBackend:
    """A `KeyedBackend` in a RocksDB database with its own folder. `RocksSession` describes which files the folder may
    contain at first.
    """

    def __init__(
        self,
        place: BackendPlace,
        folder: str,
        memory_bytes: int,
        keeps_changes: bool = False,
        cache_bytes: int = 0,
        tuning: DatabaseTuning = _TUNING,
    ) -> None:
        """Opens the backend. Raises StorageError if the folder cannot be used.

        With `keeps_changes`, `freeze` with a base returns only the changes since that checkpoint. Each vectorised state
        and row table may cache `cache_bytes` bytes of rows in memory between batches.
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
        self._cache_bytes = cache_bytes
        self._loader = RocksLoader(self._session)
        self._tables: dict[str, RocksTable] = {}
        self._objects: dict[str, RocksObjectState] = {}
        self._rows: dict[str, RocksRows] = {}
        self._sweeper = RocksSweeper(self._session)

    @property
    def stored(self) -> RocksDescription | None:
        """Returns the description of the files on which the backend was opened: key columns, states and their types.
        None if it began empty.
        """
        return self._session.stored

    def fix_keys(self, schema: pa.Schema) -> None:
        """Sets the stored key columns.

        Raises ConfigurationError if the files have other key columns, or a state that is not bound.
        """
        session = self._session
        if session.stored is not None:
            self._check_stored(schema, session.stored)
        session.key_schema = schema

    def table(self, name: str, columns: Sequence[ValueSpec]) -> RocksTable:
        """Returns a vectorised state. Raises ConfigurationError if the types in the files cannot be converted to the
        types of `columns`.
        """
        values = pa.schema([spec.field for spec in columns])
        state, older = self._declared(name, RocksForm.TABLE, values)
        table = self._tables[name] = self._new_table(state, columns)
        if older is not None:
            self._loader.move(older, table)
        return table

    def rows(self, name: str, values: pa.Schema) -> RocksRows:
        """Returns a state with many rows for each key. Raises ConfigurationError if the state in the files has other
        columns.
        """
        state, older = self._declared(name, RocksForm.ROWS, values)
        if older is not None:
            raise unexpected_row_columns(name, self._session.uid, older.values, values)
        rows = self._rows[name] = RocksRows(self._session, state, self._place.key_names, self._cache_bytes)
        return rows

    def retype(self, name: str, columns: Sequence[ValueSpec], migrate: Migrate) -> RocksTable:
        """Replaces a vectorised state by a state with the same name and other column types, and converts its rows."""
        former = self._tables.pop(name).cold.state
        values = pa.schema([spec.field for spec in columns])
        state = self._session.declare(name, RocksForm.TABLE, values)
        table = self._tables[name] = self._new_table(state, columns)
        self._loader.move(former, table, migrate)
        return table

    def values(self, spec: StateDescriptor) -> RocksValues:
        """Returns a state with one value for each key. Raises the errors of `table`."""
        return self._bound(RocksValues, RocksForm.VALUE, spec)

    def lists(self, spec: StateDescriptor) -> RocksLists:
        """Returns a state with a list for each key. Raises the errors of `table`."""
        return self._bound(RocksLists, RocksForm.LIST, spec)

    def maps(self, spec: StateDescriptor) -> RocksMaps:
        """Returns a state with a map for each key. Raises the errors of `table`."""
        return self._bound(RocksMaps, RocksForm.MAP, spec)

    def enter(self, keys: pa.RecordBatch) -> list[bytes]:
        """Begins a batch of keys. Returns a reference (the database key) to the key of each row."""
        refs = database_keys(keys, self._session.max_parallelism, 0, namespace=self._session.namespace)
        self._session.batch_refs = tuple(dict.fromkeys(refs))
        return refs

    def enter_batch(self, keys: pa.RecordBatch) -> NDArray[Any]:
        """Begins a batch of keys, like `enter`, and returns the references as an array."""
        refs = np.empty(keys.num_rows, dtype=object)
        refs[:] = self.enter(keys)
        return refs

    def leave(self) -> None:
        """Ends the batch of keys, and writes its changes to the database with one call. Raises StorageError."""
        self._flush()
        self._session.batch_refs = ()

    def sweep(self, keys_max: int) -> None:
        """Removes expired state of the next `keys_max` keys of each state. Raises StorageError."""
        expiring = [objects for objects in self._objects.values() if objects.spec.has_expired is not None]
        if not expiring or not self._session.has_keys:
            return
        self._flush()
        batch = rocksdict.WriteBatch(raw_mode=True)
        self._sweeper.sweep(expiring, keys_max, batch)
        self._write(batch)

    def keys(self, state: str, rows_max: int) -> Iterator[pa.RecordBatch]:
        """Yields the keys that have a value in `state` when the first batch is requested, sorted by key group."""
        found = self._session.known(state)
        if found is None or not self._session.has_keys:
            return
        for table in self._tiered:
            table.write_all()
        names = self._session.key_schema.names
        for rows in self._session.scan(found, rows_max):
            yield rows.select(names)

    @property
    def size(self) -> StateSize:
        """Returns RocksDB's estimates of the number of keys and of the bytes in files and memtables, plus the rows in
        memory.
        """
        size, tables = self._session.size, self._tiered
        held_bytes = sum(table.size_bytes for table in tables)
        return replace(
            size,
            rows=max(size.rows, sum(table.used_slots for table in tables)),
            size_bytes=(size.size_bytes or 0) + held_bytes,
        )

    def changed_rows(self, base: CheckpointId) -> tuple[int, int]:
        """Returns zeros, because files are shared between checkpoints and RocksDB compacts them itself."""
        return 0, 0

    def freeze(self, cut: Cut) -> Sequence[FrozenState]:
        """Returns snapshots of all states, as rows.

        With a base, if changed keys are recorded, they have only the changes since that checkpoint. Raises
        StorageError.
        """
        self._flush()
        session = self._session
        if not session.has_keys:
            return ()
        description = session.describe()
        rows = self._unwritten_rows()
        changed: list[FrozenState] = []
        bound: list[RocksObjectState | RocksTimers | ColdStore]
        bound = [*self._objects.values(), self.timers, *(table.cold for table in self._tiered)]
        for state in bound:
            if state.changes is not None and not cut.in_order:
                changed += state.changes.freeze(cut.checkpoint_id, cut.base, description)
        if session.keeps_changes and cut.base is not None:
            return changed
        cursors = Cursors(session, len(description.states))
        session.unwritten = unwritten = PendingWrites(rows or (), cursors.make)
        if rows is None:
            unwritten.take()
        return [
            FrozenRows(unwritten.take, cursors, number, description, session)
            for number in range(len(description.states))
        ]

    def freeze_native(self, cut: Cut) -> FrozenRocks | None:
        """Returns a snapshot of all states as database files. None before the first key, or without a state. Raises
        StorageError.
        """
        self._flush()
        session = self._session
        if not session.has_keys or not session.describe().states:
            return None
        return session.freeze(cut.checkpoint_id, self._unwritten_rows())

    def keep(self, checkpoint_id: CheckpointId) -> None:
        """Does nothing: to return to a checkpoint, the task opens the checkpoint's files instead, linked or
        downloaded.
        """

    def completed(self, checkpoint_id: CheckpointId) -> None:
        """Does nothing: this backend has no data for rewinding."""

    @property
    def goes_back(self) -> bool:
        """Returns False: to return to a checkpoint, files are opened again instead of rewinding the backend."""
        return False

    def kept(self, checkpoint_id: CheckpointId) -> None:
        """Returns None: this backend cannot be rewound."""
        return

    def go_back(self, checkpoint_id: CheckpointId) -> None:
        """Never called, because this backend cannot be rewound (`kept` returns None)."""
        raise AssertionError(
            f"a RocksDB backend cannot go back to checkpoint {checkpoint_id}: its files are opened again; this is a "
            "bug in tidegate, please report it"
        )

    @property
    def stored_keys(self) -> pa.Schema | None:
        """Returns the key columns of the files on which the backend was opened, or None if it began empty."""
        return None if self.stored is None else self.stored.keys

    def stored_schema(self, state: str) -> pa.Schema | None:
        """Returns the key and value columns of a state in the files on which the backend was opened. None if the state
        is not there.
        """
        if self.stored is None:
            return None
        found = [known for known in self.stored.states if known.name == state]
        return pa.schema([*self.stored.stored_keys(found[0]), *found[0].values]) if found else None

    def expect(self, keys: int) -> None:
        """Does nothing: keys are written to disk, so no memory is reserved."""

    def load(self, table: StateTable) -> None:
        """Loads a stored table.

        Raises CorruptionError for a key that occurs twice in layer 0 (the base of a snapshot), and StorageError. Raises
        ConfigurationError for a state that is not bound, or whose types cannot be converted to the types in the
        program.
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
        """Does nothing: `load` has checked every key already."""

    def close(self) -> None:
        """Closes the database and deletes its folder."""
        self._session.close()

    @property
    def _tiered(self) -> list[TieredTable]:
        """Returns the tables in memory that cache rows of the database."""
        return [*self._tables.values(), *(rows.hot for rows in self._rows.values())]

    def _new_table(self, state: RocksState, columns: Sequence[ValueSpec]) -> RocksTable:
        kind = RocksNamespaces if self._place.namespace else RocksTable
        return kind(self._session, state, columns, self._place.key_names, self._cache_bytes)

    def _unwritten_rows(self) -> Iterator[object] | None:
        """Freezes the changes that are only in memory. Returns an iterator that writes a part of them at each step, or
        None without changes. Raises StorageError.
        """
        self._session.settle()
        tables = [table for table in self._tiered if table.unwritten]
        if self._session.keeps_changes:
            # A row is recorded as changed when it is written, so all are written now.
            for table in tables:
                table.write_all(for_snapshot=False)
            return None
        return chain.from_iterable([table.changed() for table in tables]) if tables else None

    def _bound_states(self) -> dict[str, RocksTable | RocksObjectState | RocksRows]:
        return {**self._tables, **self._objects, **self._rows}

    def _bound(self, objects: type[C], form: RocksForm, spec: StateDescriptor) -> C:
        state, older = self._declared(spec.name, form, pa.schema([spec.field]))
        bound = objects(self._session, spec, state)
        self._objects[spec.name] = bound
        if older is not None:
            self._loader.move(older, bound, spec.migrate)
        return bound

    def _declared(self, name: str, form: RocksForm, values: pa.Schema) -> tuple[RocksState, RocksState | None]:
        """Returns the state to use and, if stored rows must be converted to it first, their state in the files, else
        None.
        """
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
            for objects in self._objects.values():
                objects.flush(batch)
        self._write(batch)

    def _write(self, batch: rocksdict.WriteBatch) -> None:
        if not batch.is_empty():
            self._session.position += 1
            self._session.write(batch)


class RocksLoader:
    """Writes rows of a restored checkpoint into the states that the program has bound."""

    def __init__(self, session: RocksSession) -> None:
        self._session = session
        self._groups: dict[str, set[int]] = {}
        """For each state, the key groups with rows loaded in layer 0. Only in these a key can come twice."""
        self._last: dict[str, bytes] = {}
        """For each state, the last key of layer 0, as long as all keys have ascended."""

    def load(self, target: RocksTable | RocksObjectState | RocksTimers | RocksRows, table: StateTable) -> None:
        """Writes the rows of a stored table, or removes its keys. Raises the errors of `RocksBackend.load`."""
        session = self._session
        rows = table.rows
        if isinstance(target, RocksTimers):
            self._load_timers(target, table)
            return
        if isinstance(target, RocksRows):
            self._load_rows(target, table)
            return
        state = target.cold.state if isinstance(target, RocksTable) else target.state
        _check_columns(table, pa.schema([*session.key_schema, *(() if table.removed else state.values)]))
        if rows.num_rows == 0:
            return
        columns = rows.select(session.key_schema.names)
        keys = self._keys_of(target, columns)
        if table.layer == 0 and not table.removed:
            self._check_first(state.name, target, columns, keys)
        for start in range(0, rows.num_rows, _PUT_ROWS):
            part = rows.slice(start, _PUT_ROWS)
            values = None if table.removed else part.columns[len(session.key_schema) :]
            self._put(target, keys[start : start + _PUT_ROWS], values)

    def _load_timers(self, timers: RocksTimers, table: StateTable) -> None:
        if table.rows.num_rows == 0:
            return
        keys = timers.database_keys(table.rows)
        if table.layer == 0 and not table.removed:
            self._check_first(TIMERS_STATE, timers, table.rows, keys)
        for start in range(0, len(keys), _PUT_ROWS):
            (timers.remove if table.removed else timers.put)(keys[start : start + _PUT_ROWS])

    def _load_rows(self, target: RocksRows, table: StateTable) -> None:
        cold = target.cold
        identity = cold.identity
        _check_columns(table, pa.schema([*identity, *(() if table.removed else cold.state.values)]))
        if table.rows.num_rows == 0:
            return
        columns = table.rows.select(identity.names)
        target.number_seen(columns)
        keys = cold.database_keys(columns)
        if table.layer == 0 and not table.removed:
            self._check_first(cold.state.name, cold, columns, keys)
        for start in range(0, len(keys), _PUT_ROWS):
            some = keys[start : start + _PUT_ROWS]
            if table.removed:
                cold.delete(some)
            else:
                target.put(some, table.rows.slice(start, _PUT_ROWS).columns[len(identity) :])

    def move(self, source: RocksState, target: RocksTable | RocksObjectState, migrate: Migrate | None = None) -> None:
        """Converts the rows of the state `source` to the types of the state `target`, which replaces it. `migrate`, if
        given, converts rows.
        """
        session = self._session
        state = target.cold.state if isinstance(target, RocksTable) else target.state
        expected = pa.schema([*session.key_schema, *state.values])
        for rows in session.scan(source, _MOVED_ROWS):
            moved = migrated(rows, expected, source.name, session.uid) if migrate is None else migrate(rows)
            columns = moved.select(session.key_schema.names)
            keys = self._keys_of(target, columns)
            self._put(target, keys, moved.columns[len(session.key_schema) :])
        session.remove_ranges(
            (HEAD.pack(group, source.number), HEAD.pack(group, source.number + 1)) for group in session.key_groups
        )

    def _keys_of(self, target: RocksTable | RocksObjectState, columns: pa.RecordBatch) -> list[bytes]:
        """Returns the database keys for stored key columns: of the rows of a table, or of a key's other states (with
        state number 0).
        """
        if isinstance(target, RocksTable):
            return target.cold.database_keys(columns)
        return database_keys(columns, self._session.max_parallelism, 0, namespace=self._session.namespace)

    def _put(
        self, target: RocksTable | RocksObjectState, keys: Sequence[bytes], columns: Sequence[pa.Array] | None
    ) -> None:
        if isinstance(target, RocksTable):
            if columns is None:
                target.cold.delete(keys)
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
        self,
        name: str,
        target: RocksTable | RocksObjectState | RocksTimers | ColdStore,
        columns: pa.RecordBatch,
        keys: Sequence[bytes],
    ) -> None:
        """Raises CorruptionError if a key of layer 0 (the base of a snapshot) occurs twice, in this table or in earlier
        tables.
        """
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
            store = target.cold if isinstance(target, RocksTable) else target
            double = bool(np.any([store.has(key) for key in suspects]))
        if double:
            raise duplicate_key(name)
        known |= groups

    def _ascend(self, name: str, keys: Sequence[bytes], is_first: bool) -> bool:
        """Returns whether all loaded keys of a state, including these, were in ascending order so far."""
        last = b"" if is_first else self._last.get(name)
        if last is None or not (last < keys[0] and all(map(lt, keys, islice(keys, 1, None)))):
            self._last.pop(name, None)
            return False
        self._last[name] = keys[-1]
        return True


def _check_columns(table: StateTable, expected: pa.Schema) -> None:
    if not table.rows.schema.equals(expected):
        raise unexpected_columns(table.state, table.rows.schema, expected)
