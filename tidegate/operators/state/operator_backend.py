"""Opens the state backend of an operator and takes its snapshots. `RowsOperator` stores whole rows of each key.

`RowsOperator` is the base of joins and rankings, which keep rows in row tables. The columns of all tables are known
before the first row, and the columns of a checkpoint must match. All state is keyed. Rows must arrive at the subtask
that owns their key group. `check_owner` raises an error otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.operator import Operator, OperatorContext
from tidegate.operators.state.keys import check_owner
from tidegate.state.common.backend import KeyedBackend, RowTable
from tidegate.state.common.options import BackendPlace
from tidegate.state.factory import open_backend
from tidegate.state.kernels.partition import subtask_table
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import CorruptionError, IncompatibleStateError
from tidegate.storage.schemas.column_names import columns_text, is_reserved
from tidegate.storage.state.handover import keys_at_most, taken
from tidegate.storage.state.key_groups import key_group_range
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateTable


def make_backend(context: OperatorContext, key_names: Sequence[str], namespace: bool = False) -> KeyedBackend:
    """Opens the keyed state backend of an operator in this subtask. `key_names` are its key columns.

    With `namespace` the first key column is a namespace (`BackendPlace`). The backend is empty, unless the previous
    attempt of the task left one, which is then returned.
    """
    if context.kept is not None:
        return context.kept
    groups = key_group_range(context.subtask, context.max_parallelism, context.parallelism)
    place = BackendPlace(context.uid, tuple(key_names), context.max_parallelism, groups, namespace)
    return open_backend(context.backend, place)


def frozen_backend(context: OperatorContext, backend: KeyedBackend, cut: Cut) -> OperatorSnapshot:
    """Returns a snapshot of all states of a backend, in the form that the backend options select: the backend's own
    files, increments, or complete states.
    """
    if not cut.keyed:
        return OperatorSnapshot(context.uid)
    if context.backend.kind == "rocksdb" and not cut.canonical and not context.backend.changelog:
        return OperatorSnapshot(context.uid, native=backend.freeze_native(cut))
    frozen = tuple(backend.freeze(cut))
    if context.backend.incremental:
        return OperatorSnapshot(context.uid, layer=frozen)
    return OperatorSnapshot(context.uid, frozen)


_SCANNED_ROWS = 131_072


class RowsOperator(Operator):
    """Base class of operators that store whole rows by the key columns `stored_keys`.

    `stored` maps the name of each table to its value columns.
    """

    has_keyed_state = True

    def __init__(self, stored_keys: pa.Schema, stored: Mapping[str, pa.Schema]) -> None:
        self.keys = stored_keys
        self.stored = dict(stored)
        self.tables: tuple[RowTable, ...] = ()
        self._backend: KeyedBackend | None = None
        self._changed_rows = 0

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Restores the rows from the tables of any number of earlier subtasks.

        Raises CorruptionError for a table with other columns.
        """
        super().open(context, restored)
        self._owners = subtask_table(context.max_parallelism, context.parallelism)
        backend = self._backend = self.make_backend()
        self.tables = tuple(backend.rows(name, values) for name, values in self.stored.items())
        self.fix_keys(backend)
        self.load(restored)

    def make_backend(self) -> KeyedBackend:
        """Creates the backend that stores the rows.

        An operator with further keyed state overrides this method to use one backend for all state.
        """
        return make_backend(self.context, self.keys.names)

    def fix_keys(self, backend: KeyedBackend) -> None:
        """Sets the key columns of the backend. Called after all state is bound."""
        backend.fix_keys(self.keys)

    def load_table(self, table: StateTable) -> None:
        """Loads one stored table into the backend."""
        self._opened().load(table)

    def load(self, tables: Sequence[StateTable]) -> None:
        """Loads stored tables into the opened state.

        Raises CorruptionError, IncompatibleStateError and ConfigurationError for tables that do not fit.
        """
        backend = self._opened()
        backend.expect(keys_at_most(tables))
        try:
            for table in taken(tables):
                if table.kind is not StateKind.KEYED:  # an operator with other state has read it
                    continue
                if table.rows.schema.names[: len(self.keys)] == self.keys.names:
                    check_owner(self.context, table.rows.select(self.keys.names), self._owners)
                self._check_columns(table)
                self.load_table(table)
            backend.loaded()
        except CorruptionError as error:
            raise CorruptionError(
                f"operator {self.context.uid!r}: {error}; restore another checkpoint or a savepoint"
            ) from error

    def _check_columns(self, table: StateTable) -> None:
        """Raises IncompatibleStateError if stored rows have other columns of the user than the rows of the program."""
        if table.removed or table.state not in self.stored:
            return
        kept, stored = (
            pa.schema([field for field in schema if not is_reserved(field.name)])
            for schema in (pa.schema([*self.keys, *self.stored[table.state]]), table.rows.schema)
        )
        if kept.names != stored.names or kept.types != stored.types:
            raise IncompatibleStateError(
                f"operator {self.context.uid!r}: the rows in the checkpoint have columns {columns_text(stored)}, but "
                f"the program has {columns_text(kept)}, and stored rows keep their columns and types; cast or "
                "rename columns before the step"
            )

    def check_owner(self, keys: pa.RecordBatch) -> None:
        """Raises OperatorError if a key belongs to another subtask."""
        check_owner(self.context, keys, self._owners)

    def append(self, table: int, keys: pa.RecordBatch, values: Sequence[pa.Array]) -> None:
        """Appends rows to the table with the index `table`. `values` are the value columns of the rows."""
        schema = list(self.stored.values())[table]
        self.tables[table].append(keys, pa.RecordBatch.from_arrays(list(values), schema=schema))
        self._changed_rows += keys.num_rows

    def snapshot(self, cut: Cut) -> OperatorSnapshot:
        """Returns a snapshot of the stored rows."""
        if cut.keyed:
            self._changed_rows = 0
        return frozen_backend(self.context, self._opened(), cut)

    def changes(self, cut: Cut) -> OperatorSnapshot:
        """Returns the changes of the stored rows since the last snapshot. This operator has no other state."""
        return self.snapshot(cut)

    @property
    def changed_bytes(self) -> int:
        """Returns an estimate of the changed bytes since the last snapshot: 8 bytes for each column of an added row."""
        columns = len(self.keys) + max(len(values) for values in self.stored.values())
        return self._changed_rows * (1 + columns) * 8

    @property
    def keyed_backend(self) -> KeyedBackend | None:
        """Returns the backend that stores the rows."""
        return self._backend

    def hand_over(self) -> None:
        """Drops the references to the backend without closing it, because the next attempt of the task continues with
        it.
        """
        self._backend, self.tables = None, ()

    def close(self) -> None:
        """Closes the backend, unless the next attempt of the task has taken it over."""
        if self._backend is not None:
            self._backend.close()

    def forget_idle_keys(self, time_column: str, since_ms: int) -> None:
        """Removes all rows of the keys whose newest row, in any of the tables, has a time of `since_ms` or earlier."""
        index = KeyIndex(tuple(self.keys.names))
        seen: list[tuple[int, NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]] = []
        for number, table in enumerate(self.tables):
            for rows, refs in table.scan([*self.keys.names, time_column], _SCANNED_ROWS):
                slots = index.upsert(rows.select(self.keys.names)).slots
                seen.append((number, slots, rows.column(time_column).to_numpy(), refs))
        newest = np.full(index.size, np.iinfo(np.int64).min, dtype=np.int64)
        for _, slots, times, _ in seen:
            np.maximum.at(newest, slots, times)
        for number, slots, _, refs in seen:
            idle = newest[slots] <= since_ms
            if idle.any():
                self.tables[number].remove(refs[idle])
        for table in self.tables:
            table.done()

    def _opened(self) -> KeyedBackend:
        assert self._backend is not None, "an operator that is not open"
        return self._backend
