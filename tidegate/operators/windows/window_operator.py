"""`WindowOperator`: what all operators of windows share: their life, snapshots, time, and which rows they take.

A subclass says what it does with rows (`_take_in`) and with time (`_advance_to`). Rules of windows of processing time:

- A row belongs to the moment at which its batch is taken in. No row is late, and watermarks have no part.
- A window fires when the moment of its end has come. Its task asks to be called then.
- Time never goes back, whatever the clock does: not before what has fired, also before a restore.
- Windows that are open when the input ends come out if that was asked for; else they stay in the state, as in Flink.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.aggregate_state import Fields, is_combined, rows_behind
from tidegate.operators.operator import Columns, Emit, Operator, OperatorContext
from tidegate.operators.operator_errors import blame
from tidegate.operators.source_splits import Due
from tidegate.operators.state.operator_backend import frozen_backend
from tidegate.operators.watermarks.late_rows import LATE, LATE_RECORDS
from tidegate.operators.windows.fired_groups import FiredGroups
from tidegate.operators.windows.window_rows import WindowRows, row_times
from tidegate.operators.windows.window_specs import (
    Clock,
    Count,
    DueByWindows,
    Session,
    TimeOf,
    Times,
    WindowSpec,
)
from tidegate.operators.windows.window_state import WindowState
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.state.common.backend import KeyedBackend, ValueSpec
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.state.key_groups import key_group_range
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateTable


class WindowOperator(Operator):
    """Aggregates of each key and window. Without `keys`: of all rows.

    `time` is the column of event time, or the clock; None for windows of no time. `namespace` names the first
    column of the state, and `extra` are value columns before those of the aggregates.
    Raises ConfigurationError for no aggregates, or names that clash.
    """

    has_keyed_state = True
    _lateness_ms = 0

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
    ) -> None:
        self._input_schema = input_schema
        gap = spec.column if isinstance(spec, Session) else None
        assert gap is None or isinstance(gap, str), "an expression that was not computed"
        self._rows = WindowRows(tuple(keys), dict(aggregates), time, emit, gap)
        self._keys, self._time, self._any_spec = tuple(keys), time, spec
        self._clock = time if isinstance(time, Clock) else None
        self._namespace, self._extra = namespace, tuple(extra)
        self._changed_rows = 0
        self._opened: WindowState | None = None
        self.computed: tuple[str, ...] = ()
        """Columns that only the aggregates read: rows that come too late leave without them."""

    @property
    def known_fields(self) -> Fields | None:
        """The state columns of each aggregate. None if the columns of the input are not known."""
        schema = self._input_schema
        if schema is None:
            return None
        return {name: a.state_fields(name, schema) for name, a in self._rows.aggregates.items()}

    def needed_columns(self, after: Columns) -> Columns:
        """Keys, event time, and what is aggregated."""
        return self._rows.needed_columns

    @property
    def dues(self) -> Sequence[Due]:
        """Windows of event time: by which of them are over."""
        spec = self._any_spec
        return () if isinstance(spec, Count) or self._clock else (DueByWindows(spec, self._lateness_ms),)

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
        self._opened = WindowState(
            context, self._namespace, self._keys, self._rows.aggregates, self._extra, self.known_fields
        )
        self._state.restore(restored)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Add a batch. OperatorError if its columns do not fit, or a row has no time."""
        with blame(self.context, batch):
            self._state.admit(batch.schema)
            if (time_type := self._rows.time_type(batch.schema)) is not None:
                self._fired.time_type = time_type
            updates = self._take_in(batch)
        for update in updates:
            emit(update)

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        """Fire what has ended by the watermark, in steps."""
        return iter(()) if self._clock is not None else self._advance_to(self.reached_ms(watermark_ms), emit)

    def on_processing_time(self, now_ms: int, emit: Emit) -> Iterator[None]:
        """Fire what has ended by the clock, in steps."""
        return iter(()) if self._clock is None else self._advance_to(self._fired.steady(now_ms) - 1, emit)

    def finish(self, emit: Emit) -> Iterator[None]:
        """Fire what the end of the input leaves open, if that was asked for."""
        fires = self._clock is not None and self._clock.fires_at_end
        return self._advance_to(MAX_WATERMARK_MS, emit) if fires else iter(())

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
        """An estimate of what changed rows take."""
        return 0 if self._opened is None else self._changed_rows * self._opened.row_bytes

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

    @abstractmethod
    def _advance_to(self, moment_ms: int, emit: Emit) -> Iterator[None]:
        """Time has passed this moment: fire what has ended, in steps."""

    @property
    def _state(self) -> WindowState:
        assert self._opened is not None, "windows that are not open"
        return self._opened

    def _times(self, batch: pa.RecordBatch) -> Times:
        """Times of rows, as of `row_times`."""
        if self._clock is not None:
            return np.full(batch.num_rows, self._fired.steady(self.context.time.now_ms), dtype=np.int64)
        assert isinstance(self._time, str), "windows without a time"
        spec = self._any_spec
        return row_times(batch, self._time, None if isinstance(spec, Count) else spec)

    def _drop_late(self, batch: pa.RecordBatch, late: NDArray[np.bool_]) -> NDArray[np.int32]:
        """Count rows that are late, and emit them aside. Returns the others.

        Rows are combined only if nobody reads them aside.
        """
        self._late.inc(rows_behind(batch, late))
        if not is_combined(batch.schema):
            self.context.emit_aside(LATE, batch.filter(pa.array(late)).drop_columns(list(self.computed)))
        return np.flatnonzero(~late).astype(np.int32)
