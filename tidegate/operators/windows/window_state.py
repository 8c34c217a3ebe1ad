"""`AggregateWindows` is the base class of windows that store accumulators. `WindowState` is the state table of these
accumulators.

Rules of `WindowState`:

- The table has a row for each key and namespace: a slice, a node of slices, a session, or a pane. The stored columns
  are the namespace, the keys, then the columns of the aggregates.
- The key group of a row depends only on the keys, and not on the namespace, so all slices of a key are in one subtask.
- The set of namespaces is kept in memory. A restore finds it by reading the state.

`MergedGroups` has, in memory, accumulators of the windows that a batch changes. Windows whose bounds depend on rows
(sessions, count windows) remove the windows of a key from the state, merge them in memory with the rows of the batch,
and store the windows that are still open again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.aggregates.accumulators import (
    Accumulator,
    ColumnsByName,
    make_accumulator,
    value_specs,
)
from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.aggregate_state import (
    NULL_WITHOUT_VALUES,
    Fields,
    add_rows,
    combined_fields,
    state_columns,
)
from tidegate.operators.aggregates.keyed_aggregate import StoredLayout, converted, raw_specs
from tidegate.operators.combined_rows import is_combined
from tidegate.operators.operator import Columns, Emit, OperatorContext
from tidegate.operators.operator_errors import blame, failure
from tidegate.operators.state.keys import check_owner, key_schema
from tidegate.operators.state.operator_backend import frozen_backend, make_backend
from tidegate.operators.windows.slices import with_nodes
from tidegate.operators.windows.window_columns import WindowColumns
from tidegate.operators.windows.window_operator import WindowOperator
from tidegate.operators.windows.window_specs import Session, TimeOf, WindowSpec
from tidegate.protocol.failures import ChangedTypeError
from tidegate.state.columnar.columnar_backend import ColumnarBackend
from tidegate.state.common.backend import (
    KeyedBackend,
    NamespacedTable,
    ValueColumn,
    ValueSpec,
)
from tidegate.state.kernels.columns import storage_dtype
from tidegate.state.kernels.partition import subtask_table
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import CorruptionError, IncompatibleStateError
from tidegate.storage.schemas.column_names import columns_text, own_name
from tidegate.storage.state.handover import keys_at_most, merge_small_tables, taken
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateTable

WINDOWS_STATE = "windows"
_RESTORED_ROWS = 131_072

Parts = list[list[pa.Array]]
"""The state columns of each aggregate, with an entry for each of several table rows."""


class AggregateWindows(WindowOperator):
    """Base class of windows that store accumulators: aggregates of each key and window. Without `keys`, aggregates of
    all rows.

    `namespace` is the name of the first column of the state, and `extra` are value columns before the columns of the
    aggregates. Raises ConfigurationError without aggregates, or for names that clash.
    """

    def __init__(
        self,
        keys: tuple[str, ...],
        spec: WindowSpec,
        aggregates: Mapping[str, Aggregate],
        time: TimeOf,
        emit: str,
        namespace: str,
        extra: Sequence[ValueSpec] = (),
        input_schema: pa.Schema | None = None,
        lateness_ms: int = 0,
    ) -> None:
        super().__init__(spec, time, lateness_ms)
        gap = spec.column if isinstance(spec, Session) else None
        assert gap is None or isinstance(gap, str), "an expression that was not computed"
        self._rows = WindowColumns(tuple(keys), dict(aggregates), time, emit, gap)
        self._input_schema = input_schema
        self._keys, self._any_spec = tuple(keys), spec
        self._namespace, self._extra = namespace, tuple(extra)
        self._changed_rows = 0
        self._opened: WindowState | None = None

    @property
    def known_fields(self) -> Fields | None:
        """Returns the state columns of each aggregate, or None if the input schema is not known before the job runs."""
        schema = self._input_schema
        if schema is None:
            return None
        return {name: a.state_fields(name, schema) for name, a in self._rows.aggregates.items()}

    def needed_columns(self, after: Columns) -> Columns:
        """Returns the input columns that the operator reads: key columns, event-time column, and aggregated columns."""
        return self._rows.needed_columns

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """Returns the output columns: keys, `window_start`, `window_end`, aggregates.

        Raises ConfigurationError for an input column that is missing, or has an unsupported type.
        """
        return self._rows.output_schema(input_schema, self._any_spec)

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Restores the accumulators.

        Raises CorruptionError if a table is not the state of these windows, or has keys of other subtasks.
        """
        super().open(context, restored)
        self._opened = WindowState(
            context, self._namespace, self._keys, self._rows.aggregates, self._extra, self.known_fields
        )
        self._state.restore(restored)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Adds the rows of a batch to their windows, and emits results that are due.

        Raises OperatorError if the columns do not fit, or if a row has no time.
        """
        with blame(self.context, batch):
            self._state.admit(batch.schema)
            if (time_type := self._rows.time_type(batch.schema)) is not None:
                self._fired.time_type = time_type
            updates = self._add_rows(batch)
        for update in updates:
            emit(update)

    def changes(self, cut: Cut) -> OperatorSnapshot:
        """Returns the changes of the accumulators since the last snapshot."""
        if cut.keyed:
            self._changed_rows = 0
        return frozen_backend(self.context, self._state.backend, cut)

    @property
    def changed_bytes(self) -> int:
        """Returns an estimate of the size, in bytes, of the table rows that have changed since the last snapshot."""
        return 0 if self._opened is None else self._changed_rows * self._opened.row_bytes

    @property
    def keyed_backend(self) -> KeyedBackend | None:
        """Returns the backend that stores the accumulators, or None before the operator is open."""
        return None if self._opened is None else self._opened.backend

    def load(self, tables: Sequence[StateTable]) -> None:
        """Loads stored tables into the opened state. Raises CorruptionError for tables that do not fit."""
        self._state.restore(tables)

    def hand_over(self) -> None:
        """Drops the references to the backend without closing it, because the next attempt of the task continues with
        it.
        """
        self._opened = None

    def close(self) -> None:
        """Closes the backend, unless the next attempt of the task has taken it over."""
        if self._opened is not None:
            self._opened.backend.close()

    @abstractmethod
    def _add_rows(self, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Adds the rows of a batch to their windows. Returns results to emit at once."""

    @property
    def _state(self) -> WindowState:
        assert self._opened is not None, "windows that are not open"
        return self._opened


class WindowState:
    """The state table of one window operator in one subtask. `name` is the name of the namespace column.

    `extra` are value columns that the operator adds, before the columns of the aggregates.
    """

    def __init__(
        self,
        context: OperatorContext,
        name: str,
        keys: tuple[str, ...],
        aggregates: Mapping[str, Aggregate],
        extra: Sequence[ValueSpec] = (),
        known_fields: Fields | None = None,
    ) -> None:
        self.namespaces: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """Namespaces that may have rows, ascending."""
        self.backend: KeyedBackend = make_backend(context, (name, *keys), namespace=True)
        self.fields: Fields = {}
        self.accumulators: list[Accumulator] = []
        self._context = context
        self._owners = subtask_table(context.max_parallelism, context.parallelism)
        self._name, self._keys, self._aggregates, self._extra = name, keys, dict(aggregates), tuple(extra)
        self._known_fields = known_fields
        self._key_schema: pa.Schema | None = None
        self._seen: pa.Schema | None = None
        self._table: NamespacedTable | None = None
        stored = self.backend.stored_schema(WINDOWS_STATE)
        if stored is not None:
            self._take_over(stored)
            self._look()

    @property
    def exists(self) -> bool:
        """Returns True if the state table exists. The first input row or a restore creates it."""
        return self._table is not None

    @property
    def table(self) -> NamespacedTable:
        """Returns the state table. It must exist."""
        assert self._table is not None, "windows before the first row"
        return self._table

    @property
    def key_schema(self) -> pa.Schema:
        """Returns the schema of the key columns, without the namespace column."""
        assert self._key_schema is not None, "keys before the first row"
        return self._key_schema

    def admit(self, schema: pa.Schema) -> None:
        """Checks the columns of a batch against the state table. The first batch creates the table. Raises
        ChangedTypeError if the columns differ.
        """
        if self._seen is not None and schema.equals(self._seen):
            return
        found = key_schema(schema, self._keys)
        if is_combined(schema):
            fields = combined_fields(self._aggregates, schema)
        else:
            fields = {name: a.state_fields(name, schema) for name, a in self._aggregates.items()}
        if self._table is None:
            self._create(found, fields)
        elif self._seen is None and found.equals(self.key_schema) and fields != self.fields:
            self._evolve(fields)
        elif not found.equals(self.key_schema) or fields != self.fields:
            raise ChangedTypeError(
                f"operator {self._context.name!r} (uid {self._context.uid!r}) keeps "
                f"{columns_text(state_columns(self.key_schema, self.fields))}, but the batch needs "
                f"{columns_text(state_columns(found, fields))}: a column has changed its type; cast it with "
                "with_columns before the window, or give the operator a new uid"
            )
        self._seen = schema

    def check_owner(self, keys: pa.RecordBatch) -> None:
        """Raises OperatorError if one of these keys belongs to another subtask."""
        if self._keys:
            check_owner(self._context, keys, self._owners)

    def stored_keys(self, namespaces: NDArray[np.int64], keys: pa.RecordBatch) -> pa.RecordBatch:
        """Returns key columns with the namespace column before them, as in the state table."""
        return pa.RecordBatch.from_arrays([pa.array(namespaces), *keys.columns], names=[self._name, *self._keys])

    def user_keys(self, stored: pa.RecordBatch) -> pa.RecordBatch:
        """Returns stored key columns without the namespace column."""
        return stored.select(list(self._keys))

    def parts(self, slots: NDArray[np.int32]) -> Parts:
        """Returns the accumulator columns of some slots (rows of the state table)."""
        return [[self.table.column(field.name).take(slots) for field in group] for group in self.fields.values()]

    def add(self, batch: pa.RecordBatch, slots: NDArray[np.int32]) -> None:
        """Adds row i of a batch to the slot `slots[i]` of the state table."""
        for accumulator, fields in zip(self.accumulators, self.fields.values(), strict=True):
            add_rows(accumulator, fields, batch, slots)

    def merge(self, slots: NDArray[np.int32], parts: Parts) -> None:
        """Merges accumulator columns (`parts`) into slots of the state table: entry i into `slots[i]`."""
        for accumulator, columns in zip(self.accumulators, parts, strict=True):
            accumulator.merge(slots, columns)

    def begin_empty(self) -> None:
        """Marks the slots that are new in this batch as having no value. Call this method before values are merged into
        the new slots.

        Until the first null arrives, aggregates that are null without values treat every new slot as one that gets a
        value in its batch (`mark`). An operator that leaves a new slot without values must call this method.
        """
        for name, aggregate in self._aggregates.items():
            first = self.fields[name][0]
            if aggregate.kind in NULL_WITHOUT_VALUES and storage_dtype(first.type) is not None:
                self.table.column(first.name).track_nulls()

    def results(self, slots: NDArray[np.int32]) -> list[pa.Array]:
        """Returns the results of some slots. Raises OperatorError for a result that does not fit its type."""
        return self.results_of(self.accumulators, slots)

    def results_of(self, accumulators: Sequence[Accumulator], slots: NDArray[Any]) -> list[pa.Array]:
        """Returns the results of accumulators of another table.

        Raises OperatorError for a result that does not fit its type.
        """
        try:
            return [accumulator.results(slots) for accumulator in accumulators]
        except OverflowError as error:
            raise failure(self._context, error, "in the result of a window") from error

    def extra(self, name: str) -> ValueColumn:
        """Returns the value column `name` that the operator has added."""
        return self.table.column(name)

    @property
    def row_bytes(self) -> int:
        """Returns the estimated size of a row of the state table in memory, in bytes."""
        values = 0 if self._table is None else sum(self._table.column(f.name).value_bytes for f in self._values())
        return 8 * (1 + len(self._keys)) + values

    def appeared(self, namespaces: Sequence[int] | NDArray[np.int64]) -> None:
        """Records that these namespaces of the state table now have rows."""
        self.namespaces = with_nodes(self.namespaces, namespaces)

    def emptied(self, namespaces: Sequence[int]) -> None:
        """Records that these namespaces of the state table have no rows any more."""
        if list(namespaces) == self.namespaces[: len(namespaces)].tolist():
            self.namespaces = self.namespaces[len(namespaces) :]
        else:
            self.namespaces = self.namespaces[~np.isin(self.namespaces, namespaces)]

    def accumulators_of(self, table: ColumnsByName) -> list[Accumulator]:
        """Returns accumulators of the aggregates that use the columns of another table."""
        return [make_accumulator(a, self.fields[name], table) for name, a in self._aggregates.items()]

    def specs(self) -> list[ValueSpec]:
        """Returns the specs (name, type, initial value) of the accumulator columns."""
        return self._specs_of(self.fields)

    def _specs_of(self, fields: Fields) -> list[ValueSpec]:
        return [spec for name, a in self._aggregates.items() for spec in value_specs(a, fields[name])]

    def restore(self, tables: Sequence[StateTable]) -> None:
        """Loads the stored tables of keyed state. Raises CorruptionError for a table of other windows or keys."""
        for table in tables:
            if table.kind is StateKind.KEYED and not table.removed and self._table is None:
                layout = self._layout(table.state, table.rows.schema)
                self._create(self._keys_in(layout), self._wanted(layout))
        if self._table is None:
            return
        self.backend.expect(keys_at_most(tables))
        keyed = (table for table in taken(tables) if table.kind is StateKind.KEYED)
        try:
            for table in merge_small_tables(keyed, _RESTORED_ROWS):
                rows = table.rows
                if not table.removed:
                    rows = self._converted(rows.replace_schema_metadata(None), self.fields)
                self.check_owner(rows.select(list(self._keys)))
                self.backend.load(replace(table, rows=rows))
            self.backend.loaded()
        except (CorruptionError, pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise CorruptionError(
                f"operator {self._context.uid!r}: {error}; restore another checkpoint or a savepoint"
            ) from error
        self._look()

    def _look(self) -> None:
        """Reads from the state table which namespaces have rows."""
        self.namespaces = self.table.namespaces()

    def _create(self, keys: pa.Schema, fields: Fields) -> None:
        self.fields = fields
        specs = [*self._extra, *self.specs()]
        table = cast(NamespacedTable, self.backend.table(WINDOWS_STATE, specs))
        self.backend.fix_keys(pa.schema([pa.field(self._name, pa.int64()), *keys]))
        self._key_schema, self._table = keys, table
        self.accumulators = self.accumulators_of(table)

    def _values(self) -> list[pa.Field]:
        return [*(spec.field for spec in self._extra), *(field for group in self.fields.values() for field in group)]

    def _take_over(self, stored: pa.Schema) -> None:
        """Takes over the rows that the backend already has, and converts them if a program with other aggregates wrote
        them. `stored` is the schema of these rows.
        """
        layout = self._layout(WINDOWS_STATE, stored)
        if layout.whole:
            self._create(self._keys_in(layout), layout.fields)
            return
        self.backend.table(WINDOWS_STATE, raw_specs(pa.schema(list(stored)[1 + len(self._keys) :])))
        self.backend.fix_keys(pa.schema([pa.field(self._name, pa.int64()), *self._keys_in(layout)]))
        self._key_schema = self._keys_in(layout)
        self._evolve(self._wanted(layout))

    def _evolve(self, fields: Fields) -> None:
        """Converts the stored rows to the state columns `fields` of the program's aggregates."""
        specs = [*self._extra, *self._specs_of(fields)]
        made = self.backend.retype(WINDOWS_STATE, specs, lambda rows: self._converted(rows, fields))
        self.fields, self._table = fields, cast(NamespacedTable, made)
        self.accumulators = self.accumulators_of(made)

    def _wanted(self, layout: StoredLayout) -> Fields:
        """Returns the state columns of all aggregates of the program: the stored columns, or the columns that follow
        from the input schema for a new aggregate.

        Raises IncompatibleStateError if an aggregate is new and the input schema is not known.
        """
        if layout.whole:
            return layout.fields
        if self._known_fields is None:
            raise IncompatibleStateError(
                f"{self._where}: the state has the aggregates {list(layout.fields)} of {list(self._aggregates)}, and "
                "the columns of the input are known only when the job runs; pass schema= to the step before, so that "
                "the new ones can start empty"
            )
        return {name: layout.fields.get(name, self._known_fields[name]) for name in self._aggregates}

    def _converted(self, rows: pa.RecordBatch, fields: Fields) -> pa.RecordBatch:
        """Returns stored rows, converted to the program's state columns `fields`."""
        head = [pa.field(self._name, pa.int64()), *self.key_schema, *(spec.field for spec in self._extra)]
        return converted(rows, pa.schema(head), self._aggregates, fields, self._where)

    @property
    def _where(self) -> str:
        return f"state {WINDOWS_STATE!r} of operator {self._context.uid!r}"

    def _layout(self, state: str, schema: pa.Schema) -> StoredLayout:
        """Returns the layout of a stored schema. Raises IncompatibleStateError if the state belongs to another
        operator.
        """
        head = [self._name, *self._keys, *(spec.name for spec in self._extra)]
        layout = StoredLayout.of(schema, head, self._aggregates)
        if state != WINDOWS_STATE or layout is None:
            raise IncompatibleStateError(
                f"operator {self._context.uid!r} expects windows by {list(self._keys)} with {list(self._aggregates)}, "
                f"but state {state!r} has {schema.names}; restore with the keys, windows and allowed lateness that "
                "wrote it, or give the operator a new uid"
            )
        return layout

    def _keys_in(self, layout: StoredLayout) -> pa.Schema:
        return pa.schema([layout.head.field(name) for name in self._keys])


_SLOT = own_name("slot")


class MergedGroups:
    """Accumulators in memory for `count` groups, which are numbered from 0.

    Values are added to a group in several calls. When the first null arrives, a table treats all new slots of the batch
    as empty. Each call therefore reports to the table which groups are still empty, so that earlier values are not
    lost.
    """

    def __init__(self, state: WindowState, count: int) -> None:
        backend = ColumnarBackend(1, (_SLOT,), incremental=False)
        self._state, self._fields = state, state.fields
        self._table = backend.table("merged", state.specs())
        backend.fix_keys(pa.schema({_SLOT: pa.int64()}))
        self._accumulators = state.accumulators_of(self._table)
        self._slots = self._table.upsert(pa.record_batch({_SLOT: np.arange(count)})).slots
        self._empty = np.ones(count, dtype=np.bool_)

    def merge(self, numbers: NDArray[Any], parts: Parts) -> None:
        """Merges accumulator columns (`parts`) into groups: entry i into group `numbers[i]`."""
        for accumulator, columns in zip(self._accumulators, parts, strict=True):
            accumulator.merge(self._slots[numbers], columns)
        self._filled(numbers)

    def update(self, batch: pa.RecordBatch, numbers: NDArray[Any]) -> None:
        """Adds row i of a batch to group `numbers[i]`."""
        for accumulator in self._accumulators:
            accumulator.update(batch, self._slots[numbers])
        self._filled(numbers)

    def _filled(self, numbers: NDArray[Any]) -> None:
        """Records that these groups now have values."""
        self._empty[numbers] = False
        self._table.new_slots = self._slots[self._empty]

    def done(self) -> None:
        """Ends adding values to groups. After this call only results and columns are read."""
        self._table.done()

    def parts(self, numbers: NDArray[Any]) -> Parts:
        """Returns the accumulator columns of the groups with these numbers."""
        slots = self._slots[numbers]
        return [[self._table.column(field.name).take(slots) for field in group] for group in self._fields.values()]

    def results(self, numbers: NDArray[Any]) -> list[pa.Array]:
        """Returns the results of the groups with these numbers."""
        return self._state.results_of(self._accumulators, self._slots[numbers])


def codes_of(keys: pa.RecordBatch, rows: int) -> tuple[NDArray[np.int64], pa.RecordBatch, int]:
    """Returns the key number of each row, the distinct keys, and the number of distinct keys. Numbers start at 0, in
    the order of first appearance.

    `rows` is the number of rows. Without key columns all rows have the same key.
    """
    if not keys.num_columns:
        return np.zeros(rows, dtype=np.int64), keys, 1
    found = KeyIndex(tuple(keys.schema.names)).upsert(keys)
    distinct = keys if len(found.first_rows) == rows else keys.take(pa.array(found.first_rows))
    return found.slots.astype(np.int64), distinct, len(found.first_rows)
