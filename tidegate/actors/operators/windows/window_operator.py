"""`WindowOperator`: what all operators of windows share: their life, their snapshots, and which rows they take.

A subclass says what it does with rows (`_take_in`) and with time (`advance_watermark`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.actors.operators.aggregates.aggregate import Aggregate
from tidegate.actors.operators.operator import Columns, Emit, Operator, OperatorContext
from tidegate.actors.operators.operator_errors import blame
from tidegate.actors.operators.state.operator_backend import frozen_backend
from tidegate.actors.operators.watermarks.late_rows import LATE, LATE_RECORDS
from tidegate.actors.operators.windows.fired_groups import FiredGroups
from tidegate.actors.operators.windows.window_rows import WindowRows, row_times
from tidegate.actors.operators.windows.window_specs import Times, WindowSpec
from tidegate.actors.operators.windows.window_state import WindowState
from tidegate.actors.state_backends.common.backend import KeyedBackend, ValueSpec
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.state.key_groups import key_group_range
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateTable


class WindowOperator(Operator):
    """Aggregates of each key and window. Without `keys`: of all rows.

    `time` is the column of event time; None for windows that have nothing to do with it. `namespace` names the first
    column of the state, and `extra` are value columns before those of the aggregates.
    Raises ConfigurationError for no aggregates, or names that clash.
    """

    has_keyed_state = True

    def __init__(
        self,
        keys: tuple[str, ...],
        spec: WindowSpec,
        aggregates: Mapping[str, Aggregate],
        time: str | None,
        emit: str,
        namespace: str,
        extra: Sequence[ValueSpec] = (),
    ) -> None:
        reserved = (namespace, *(column.name for column in extra))
        self._rows = WindowRows(tuple(keys), dict(aggregates), time, emit, reserved)
        self._keys, self._time, self._any_spec = tuple(keys), time, spec
        self._namespace, self._extra = namespace, tuple(extra)
        self._changed_rows = 0
        self._opened: WindowState | None = None

    def needed_columns(self, after: Columns) -> Columns:
        """Keys, event time, and what is aggregated."""
        return self._rows.needed_columns

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """Keys, `window_start`, `window_end`, aggregates. ConfigurationError for columns that do not fit."""
        return self._rows.output_schema(input_schema, self._any_spec)

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """CorruptionError if a stored table is not of these windows, or has keys of other subtasks."""
        super().open(context, restored)
        self._groups = key_group_range(context.subtask, context.max_parallelism, context.parallelism)
        self._fired = FiredGroups(self._groups)
        for table in restored:
            if table.kind is not StateKind.KEYED:
                self._fired.load(table)
        self._late = context.metrics.counter(LATE_RECORDS)
        self._opened = WindowState(context, self._namespace, self._keys, self._rows.aggregates, self._extra)
        self._state.restore(restored)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Add a batch. OperatorError if its columns do not fit, or a row has no time."""
        with blame(self.context, batch):
            self._state.admit(batch.schema)
            if self._time is not None:
                self._fired.time_type = batch.schema.field(self._time).type
            updates = self._take_in(batch)
        for update in updates:
            emit(update)

    def snapshot(self, cut: Cut) -> OperatorSnapshot:
        """Freeze the windows, and what has fired."""
        frozen = self.changes(cut)
        return replace(frozen, states=(*frozen.states, self._fired.freeze()))

    def changes(self, cut: Cut) -> OperatorSnapshot:
        """Freeze the windows."""
        if cut.keyed:
            self._changed_rows = 0
        return frozen_backend(self.context, self._state.backend, cut)

    @property
    def changed_bytes(self) -> int:
        """An estimate: 8 bytes for each column of a changed row."""
        return self._changed_rows * 8 * (2 + len(self._keys) + len(self._rows.aggregates))

    @property
    def keyed_backend(self) -> KeyedBackend | None:
        """The backend of the windows."""
        return None if self._opened is None else self._opened.backend

    def load(self, tables: Sequence[StateTable]) -> None:
        """Raises CorruptionError as `open` does."""
        self._state.restore(tables)

    def hand_over(self) -> None:
        """Let go of the backend."""
        self._opened = None

    def close(self) -> None:
        """Release what the backend holds."""
        if self._opened is not None:
            self._opened.backend.close()

    @abstractmethod
    def _take_in(self, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Add rows. Returns results that are to be emitted at once."""

    @property
    def _state(self) -> WindowState:
        assert self._opened is not None, "windows that are not open"
        return self._opened

    def _times(self, batch: pa.RecordBatch) -> Times:
        """Event times of rows, as of `row_times`."""
        assert self._time is not None, "windows without event time"
        return row_times(batch, self._time)

    def _drop_late(self, batch: pa.RecordBatch, late: NDArray[np.bool_]) -> NDArray[np.int32]:
        """Count rows that are late, and emit them aside. Returns the others."""
        self._late.inc(int(late.sum()))
        self.context.emit_aside(LATE, batch.filter(pa.array(late)))
        return np.flatnonzero(~late).astype(np.int32)
