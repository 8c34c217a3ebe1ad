"""`ColumnarBackend`: keeps all keyed state of an operator in memory, in pages over one `KeySpace`.

A snapshot blocks processing only while one reference per page is taken. Pages are copied later, as they change. With
`incremental`, a snapshot can contain only the changes since another one. With memory for an undo log, the backend can
go back to the newest checkpoint; the operator of the next attempt then binds its states again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.columnar.columnar_timers import ColumnarTimers
from tidegate.state.columnar.key_space import KeySpace, key_pieces
from tidegate.state.columnar.object_state import (
    ColumnarLists,
    ColumnarMaps,
    ColumnarValues,
    ObjectState,
    ValueColumns,
    flat_specs,
)
from tidegate.state.columnar.paged_state import FrozenSlots
from tidegate.state.columnar.row_table import ColumnarRows, RowSequence
from tidegate.state.columnar.undo_log import UndoLog
from tidegate.state.columnar.vector_table import ColumnarNamespaces, ColumnarTable
from tidegate.state.common.backend import Migrate, StateDescriptor, StateSize, ValueSpec, not_bound, unexpected_columns
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut, FrozenNative, FrozenState, StateTable
from tidegate.storage.state.stored_rows import TIMERS_STATE, row_identity

C = TypeVar("C", bound=ObjectState | ValueColumns)

_MOVED_ROWS = 65_536


class ColumnarBackend:
    """A `KeyedBackend` that stores state in memory, in columns. `key_names` are the stored key columns."""

    def __init__(
        self,
        max_parallelism: int,
        key_names: tuple[str, ...],
        incremental: bool,
        undo_bytes_max: int = 0,
        restore_threads: int = 1,
        namespace: bool = False,
    ) -> None:
        undo = UndoLog(undo_bytes_max)
        self._max_parallelism = max_parallelism
        grouped_by = tuple(key_names)[1:] if namespace else None
        self._space = KeySpace(max_parallelism, tuple(key_names), undo, restore_threads, grouped_by)
        self._table_type = ColumnarNamespaces if namespace else ColumnarTable
        self.timers = ColumnarTimers(max_parallelism, tuple(key_names), incremental, undo)
        self._incremental = incremental
        self._tables: dict[str, ColumnarTable] = {}
        self._objects: dict[str, ObjectState | ValueColumns] = {}
        self._rows: dict[str, ColumnarRows] = {}
        self._sequence = RowSequence()
        self._gone_back = False
        self._unbound: set[str] = set()
        """After `go_back`: states that are not bound again yet."""
        self._swept = 0
        """The slot where the next sweep begins."""

    def fix_keys(self, schema: pa.Schema) -> None:
        """Sets the stored key columns. Called once, before the first key."""
        self._space.fix(schema)
        self.timers.fix_keys(schema)
        for rows in self._rows.values():
            rows.fix_keys(schema)

    def table(self, name: str, columns: Sequence[ValueSpec]) -> ColumnarTable:
        """Returns a vectorised state: a table with value columns and a row for each key."""
        if name in self._unbound:
            return self._table_again(name, columns)
        self._check_new(name)
        self._tables[name] = table = self._table_type(self._space, name, columns, self._incremental)
        return table

    def rows(self, name: str, values: pa.Schema) -> ColumnarRows:
        """Returns a row table: a state with any number of rows for each key."""
        if name in self._unbound:
            known = self._rows.get(name)
            if known is None or not known.values.equals(values):
                raise _bound_otherwise(name)
            self._unbound.remove(name)
            return known
        self._check_new(name)
        other_logs = (self._space.undo, self.timers.undo, *(rows.undo for rows in self._rows.values()))
        rows = ColumnarRows(
            name, values, self._max_parallelism, self._space.names, self._incremental, other_logs, self._sequence
        )
        self._rows[name] = rows
        if self._space.schema is not None:
            rows.fix_keys(self._space.schema)
        return rows

    def retype(self, name: str, columns: Sequence[ValueSpec], migrate: Migrate) -> ColumnarTable:
        """Replaces a vectorised state by a state with the same name and other column types, and converts its rows."""
        former = self._tables.pop(name)
        self._space.undo.clear()
        self._space.drop(former)
        table = self.table(name, columns)
        for keys, slots in former.scan(_MOVED_ROWS):
            values = [former.column(spec.name).take(slots) for spec in former.specs]
            names = [*keys.schema.names, *(spec.name for spec in former.specs)]
            table.load(migrate(pa.RecordBatch.from_arrays([*keys.columns, *values], names=names)), layer=0)
        return table

    def values(self, spec: StateDescriptor) -> ColumnarValues | ValueColumns:
        """Returns a state with one value for each key.

        Stores the values in columns if the function processes whole batches and the value type allows that. Otherwise
        stores Python objects.
        """
        if spec.by_batch and flat_specs(spec):
            return self._bound(ValueColumns, spec)
        return self._bound(ColumnarValues, spec)

    def lists(self, spec: StateDescriptor) -> ColumnarLists:
        """Returns a state with a list of values for each key."""
        return self._bound(ColumnarLists, spec)

    def maps(self, spec: StateDescriptor) -> ColumnarMaps:
        """Returns a state with a map of values for each key."""
        return self._bound(ColumnarMaps, spec)

    def enter(self, keys: pa.RecordBatch) -> list[int]:
        """Begins a batch of keys. Returns the slot of the key of each row."""
        slots: list[int] = self._space.upsert(keys).slots.tolist()
        return slots

    def enter_batch(self, keys: pa.RecordBatch) -> NDArray[np.int32]:
        """Begins a batch of keys, like `enter`, and returns the slots as an array."""
        return self._space.upsert(keys).slots

    def leave(self) -> None:
        """Ends the batch of keys that `enter` began."""
        for objects in self._objects.values():
            objects.flush()
        self._space.settle()
        self.timers.settle()

    def sweep(self, keys_max: int) -> None:
        """Removes expired state from the next `keys_max` slots. The next call continues at the slot where this one
        ended.
        """
        expiring = [objects for objects in self._objects.values() if objects.spec.has_expired is not None]
        if not expiring or not self._space.slots:
            return
        start = self._swept if self._swept < self._space.slots else 0
        self._swept = min(start + keys_max, self._space.slots)
        for objects in expiring:
            objects.expire_many(np.arange(start, self._swept, dtype=np.int32))

    def keys(self, state: str, rows_max: int) -> Iterator[pa.RecordBatch]:
        """Yields the keys that have a value in `state`, in slot order, in batches."""
        if state in self._rows:
            return self._rows[state].pieces(rows_max)
        return (keys for keys, _ in key_pieces(self._space, self._state(state).live, rows_max))

    @property
    def size(self) -> StateSize:
        """Returns the exact number of rows and timers. The size in bytes is unknown (None)."""
        states: list[ColumnarTable | ObjectState | ColumnarRows]
        states = [*self._tables.values(), *self._objects.values(), *self._rows.values()]
        return StateSize(sum(state.rows for state in states), self.timers.count(sys.maxsize))

    def changed_rows(self, base: CheckpointId) -> tuple[int, int]:
        """Returns two numbers over all states: slots that are marked as changed since the checkpoint `base`, and all
        rows.
        """
        states: list[ColumnarTable | ObjectState] = [*self._tables.values(), *self._objects.values()]
        marked = sum(s.dirty.changed_since(base, self._space.slots) for s in states if s.dirty is not None)
        apart = [state.changed_rows(base) for state in self._apart]
        return marked + sum(each for each, _ in apart), sum(s.rows for s in states) + sum(each for _, each in apart)

    def freeze(self, cut: Cut) -> Sequence[FrozenState]:
        """Returns snapshots of all states that are not empty. With `cut.base`, they have only the changes since that
        checkpoint.
        """
        frozen: list[FrozenState] = []
        for table in (*self._tables.values(), *self._objects.values()):
            parts = table.freeze(cut)
            # A single Python object may be large, so objects are always encoded in the asynchronous part.
            gathered = isinstance(table, ColumnarTable)
            frozen += (part.now() if gathered and isinstance(part, FrozenSlots) else part for part in parts)
        frozen += self.timers.freeze(cut)
        for rows in self._rows.values():
            frozen += rows.freeze(cut)
        self._keep(cut.checkpoint_id, after_freeze=True)
        return frozen

    def freeze_native(self, cut: Cut) -> FrozenNative | None:
        """Returns None, because this backend has no files of its own."""
        return None

    @property
    def stored_keys(self) -> pa.Schema | None:
        """Returns the key columns if the backend was rewound to a checkpoint, else None."""
        return self._space.schema if self._gone_back else None

    def stored_schema(self, state: str) -> pa.Schema | None:
        """Returns the columns of a state if the backend was rewound to a checkpoint, else None."""
        return self._schema_of(state) if self._gone_back and state in self._names() else None

    def keep(self, checkpoint_id: CheckpointId) -> None:
        """Records that the current state equals this checkpoint, so that the backend can be rewound to it.

        Does nothing if the undo log may not use memory.
        """
        self._keep(checkpoint_id, after_freeze=False)

    def completed(self, checkpoint_id: CheckpointId) -> None:
        """Drops the undo data for checkpoints before this one, because this checkpoint has completed."""
        self._space.undo.completed(checkpoint_id)
        for state in self._apart:
            state.undo.completed(checkpoint_id)

    @property
    def goes_back(self) -> bool:
        """Returns whether there is a checkpoint to which the backend can be rewound."""
        return not self._space.undo.empty and not any(state.undo.empty for state in self._apart)

    def kept(self, checkpoint_id: CheckpointId) -> Sequence[StateTable] | None:
        """Returns a table without rows for each state of this checkpoint.

        None if the backend cannot be rewound to the checkpoint.
        """
        if not (self._space.undo.keeps(checkpoint_id) and all(s.undo.keeps(checkpoint_id) for s in self._apart)):
            return None
        schemas = {state: self._schema_of(state) for state in (*self._tables, *self._objects)}
        return [
            StateTable(state, StateKind.KEYED, pa.RecordBatch.from_pylist([], schema))
            for state, schema in schemas.items()
        ] + [table for state in self._apart for table in state.kept()]

    def go_back(self, checkpoint_id: CheckpointId) -> None:
        """Rewinds the backend to the state of this checkpoint, which must be one of `kept`. The caller must bind the
        states again afterwards.
        """
        self._space.undo.go_back(checkpoint_id)
        for state in self._apart:
            state.undo.go_back(checkpoint_id)
        self._gone_back = True
        self._unbound = self._names()
        self._swept = 0

    def expect(self, keys: int) -> None:
        """Announces that up to `keys` keys will be loaded in layer 0 (the base of a snapshot), so that memory can be
        reserved.
        """
        self._space.expect(keys)

    def load(self, table: StateTable) -> None:
        """Loads a stored table.

        Raises CorruptionError if its columns are wrong. A key that occurs twice in layer 0 (the base of a snapshot) is
        a CorruptionError too, raised here, by a later call, or at the latest by `loaded`. Raises ConfigurationError for
        a state that is not bound.
        """
        if table.state == TIMERS_STATE:
            self.timers.load(table)
        elif table.state in self._rows:
            self._load_rows(self._rows[table.state], table)
        elif table.removed:
            self._check_columns(table, [])
            self._state(table.state).forget(table.rows)
        elif table.state in self._tables:
            vector = self._tables[table.state]
            self._check_columns(table, [spec.field for spec in vector.specs])
            vector.load(table.rows, table.layer)
        else:
            objects = self._state(table.state)
            assert isinstance(objects, ObjectState | ValueColumns)
            self._check_columns(table, [objects.spec.field])
            objects.load(table.rows, table.layer)

    def loaded(self) -> None:
        """Builds the key index after a restore. Raises CorruptionError if a key occurred twice in layer 0."""
        self._space.build_index()
        self.timers.loaded()
        for rows in self._rows.values():
            rows.loaded()

    def close(self) -> None:
        """Ends the threads of a restore that was not finished."""
        self._space.close()

    def _keep(self, checkpoint_id: CheckpointId, after_freeze: bool) -> None:
        if self._space.schema is not None:
            states = (*self._tables.values(), *self._objects.values())
            self._space.undo.begin(checkpoint_id, states, after_freeze)
            for state in self._apart:
                state.keep(checkpoint_id, after_freeze)

    @property
    def _apart(self) -> list[ColumnarTimers | ColumnarRows]:
        """Returns the states that have a separate key space, instead of the slots that other states share."""
        return [self.timers, *self._rows.values()]

    def _names(self) -> set[str]:
        return {*self._tables, *self._objects, *self._rows}

    def _load_rows(self, rows: ColumnarRows, table: StateTable) -> None:
        keys = self._space.schema
        assert keys is not None, "state before its keys are known"
        expected = pa.schema([*row_identity(keys), *(() if table.removed else rows.values)])
        if not table.rows.schema.equals(expected):
            raise unexpected_columns(table.state, table.rows.schema, expected)
        rows.load(table)

    def _bound(self, kind: type[C], spec: StateDescriptor) -> C:
        if spec.name in self._unbound:
            objects = self._objects.get(spec.name)
            if not isinstance(objects, kind) or objects.spec.column_type != spec.column_type:
                raise _bound_otherwise(spec.name)
            objects.spec = spec
            self._unbound.remove(spec.name)
            return objects
        self._check_new(spec.name)
        objects = kind(self._space, spec, self._incremental)
        self._objects[spec.name] = objects
        return objects

    def _table_again(self, name: str, columns: Sequence[ValueSpec]) -> ColumnarTable:
        table = self._tables.get(name)
        if table is None or table.specs != tuple(columns):
            raise _bound_otherwise(name)
        self._unbound.remove(name)
        return table

    def _schema_of(self, state: str) -> pa.Schema:
        keys = self._space.schema
        assert keys is not None, "state before its keys are known"
        if state in self._rows:
            return pa.schema([*row_identity(keys), *self._rows[state].values])
        if state in self._tables:
            return pa.schema([*keys, *(spec.field for spec in self._tables[state].specs)])
        return pa.schema([*keys, self._objects[state].spec.field])

    def _check_new(self, name: str) -> None:
        assert name not in self._names(), f"two states are named {name!r}"

    def _state(self, name: str) -> ColumnarTable | ObjectState:
        state = self._tables.get(name) or self._objects.get(name)
        if state is None:
            raise not_bound(name, self._names())
        return state

    def _check_columns(self, table: StateTable, values: Sequence[pa.Field]) -> None:
        keys = self._space.schema
        assert keys is not None, "state before its keys are known"
        expected, found = pa.schema([*keys, *values]), table.rows.schema
        if [(field.name, field.type) for field in found] != [(field.name, field.type) for field in expected]:
            raise unexpected_columns(table.state, found, expected)


def _bound_otherwise(state: str) -> ConfigurationError:
    return ConfigurationError(
        f"state {state!r} is bound with another type than in the previous attempt, which kept it in memory; a function "
        "must bind the same states whenever it is opened"
    )
