"""`WindowOperator` is the base class of all operators of time windows.

A window operator is made of three parts:

- The assigner (`window_specs.py`) decides to which windows a row belongs.
- The trigger is this class. When event time or processing time advances, it fires each window that has ended once
  (`_advance_to`). It stores up to which time windows have fired (`FiredGroups`). It also drops late rows: it counts
  them and sends them to the side output of late rows (`_drop_late`).
- The contents are implemented by a subclass, which stores the data of open windows and emits the results of ended
  windows. `AggregateWindows` stores accumulators, `TimedWindows` stores rows for a function, and `WindowTop` stores the
  first rows.

Windows fire in steps, and a checkpoint may be taken or a row may arrive between two steps. A subclass keeps its state
consistent in one of two ways:

- A subclass that removes rows when a window fires advances `FiredGroups` first. A stored row of an ended window then
  still has to fire, and a row that comes between two steps is late for that window.
- A subclass whose windows share data (slices), and `WindowTop`, advance `FiredGroups` in the step that emits the
  window.

`WindowJoin` is not a subclass: a join has two inputs, and stores the reached watermark as all joins do. It fires
windows with `DueRows`, as `WindowTop` does.

Rules of windows of processing time:

- The time of a row is the time at which its batch is processed. Rows are never late, and watermarks are ignored.
- A window fires when the clock reaches its end. The task calls the operator at this time.
- The time of rows never decreases, even if the clock is set back, and is never before a time up to which windows have
  fired, also after a restore.
- Windows that are open at the end of the input fire if the program requests it. Otherwise they stay in the state, as in
  Flink.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.operator import Emit, Operator, OperatorContext
from tidegate.operators.source_splits import Due
from tidegate.operators.watermarks.late_rows import LATE_RECORDS, GroupMoments, set_aside
from tidegate.operators.windows.window_columns import row_times
from tidegate.operators.windows.window_specs import Clock, Count, DueByWindows, EventTimeWindow, Numbers, TimeOf, Times
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.state.common.backend import RowTable
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.schemas.column_names import own_name
from tidegate.storage.state.key_groups import key_group_range
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateTable

FIRED_STATE = own_name("fired")
_TIME = "time"
TIME_MS_END = 1 << 60
"""A time in ms that is after the end of every window, and far from the limit of 64 bits."""
FIRED_ROWS = 262_144
"""Approximate number of stored rows of the windows that fire in one step. A step fires at least one window."""
SCANNED_ROWS = 131_072
"""Greatest number of stored rows that a scan of a table returns at a time."""


class WindowOperator(Operator):
    """Base class of window operators: decides when windows fire. Subclasses decide what a window stores and emits.

    - `spec`: the window specification. None if rows contain the bounds of their windows already.
    - `time`: the event-time column, or a `Clock` for processing time. None for windows that do not depend on time
      (`Count`).
    - `lateness_ms`: the allowed lateness, in ms.
    """

    has_keyed_state = True

    def __init__(self, spec: EventTimeWindow | Count | None, time: TimeOf, lateness_ms: int = 0) -> None:
        self._assigner, self._time, self._lateness_ms = spec, time, lateness_ms
        self._clock = time if isinstance(time, Clock) else None
        self.computed: tuple[str, ...] = ()
        """Names of columns that were computed only for this operator.

        Late rows are sent to the side output without them.
        """

    @property
    def dues(self) -> Sequence[Due]:
        """Returns the rule by which rows are late: the treatment of a row changes when one of its windows, including
        the allowed lateness, is over.

        Empty for windows that do not depend on event time.
        """
        spec = self._assigner
        if spec is None or isinstance(spec, Count) or self._clock is not None:
            return ()
        return (DueByWindows(spec, self._lateness_ms),)

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Restores the time up to which windows have fired (`FiredGroups`), then the stored contents.

        Raises CorruptionError for state of other windows or keys.
        """
        self._groups = key_group_range(context.subtask, context.max_parallelism, context.parallelism)
        self._fired = FiredGroups(self._groups)
        for table in restored:
            if table.kind is not StateKind.KEYED:
                self._fired.load(table)
        self._late = context.metrics.counter(LATE_RECORDS)
        super().open(context, restored)

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        """Fires the windows that have ended at the watermark. Yields between two steps."""
        return iter(()) if self._clock is not None else self._pass(self.reached_ms(watermark_ms), emit)

    def on_processing_time(self, now_ms: int, emit: Emit) -> Iterator[None]:
        """Fires the windows of processing time that have ended at `now_ms`. Yields between two steps."""
        return iter(()) if self._clock is None else self._pass(self._fired.steady(now_ms) - 1, emit)

    def finish(self, emit: Emit) -> Iterator[None]:
        """Fires the windows of processing time that are open at the end of the input, if the program requests it."""
        fires = self._clock is not None and self._clock.fires_at_end
        return self._pass(MAX_WATERMARK_MS, emit) if fires else iter(())

    def snapshot(self, cut: Cut) -> OperatorSnapshot:
        """Returns a snapshot of the contents, and of the time up to which windows have fired (`FiredGroups`)."""
        frozen = self.changes(cut)
        assert frozen is not None, "windows without contents"
        return replace(frozen, states=(*frozen.states, self._fired.freeze()))

    @abstractmethod
    def _advance_to(self, moment_ms: int, emit: Emit) -> Iterator[None]:
        """Fires the windows whose last millisecond is `moment_ms` or before.

        Yields between two steps. `moment_ms` is at most `TIME_MS_END`.
        """

    def _pass(self, moment_ms: int, emit: Emit) -> Iterator[None]:
        return self._advance_to(min(moment_ms, TIME_MS_END), emit)

    def _times(self, batch: pa.RecordBatch) -> Times:
        """Returns the time of each row in ms: its event time or, for processing time, the current time.

        Raises ConfigurationError for rows without an event time.
        """
        if self._clock is not None:
            return np.full(batch.num_rows, self._fired.steady(self.context.time.now_ms), dtype=np.int64)
        assert isinstance(self._time, str), "windows without a time"
        spec = self._assigner
        return row_times(batch, self._time, None if isinstance(spec, Count) else spec)

    def _drop_late(self, batch: pa.RecordBatch, late: NDArray[np.bool_]) -> Numbers:
        """Counts the late rows and sends them to the side output. Returns the indices of the other rows."""
        return set_aside(batch, late, self._late, self.context.emit_aside, self.computed)


class FiredGroups(GroupMoments):
    """Stores, for each key group, the time in ms up to which windows have fired, and the type of the event-time column.

    A window that shares its slices with other windows leaves no trace in the state when it fires. This time is
    therefore state. Without it a restored operator would fire windows again, or open windows that are over. A restored
    operator needs the type of the event-time column before the first row arrives.
    """

    def __init__(self, groups: range) -> None:
        super().__init__(groups, FIRED_STATE, "fired_ms", "windows")
        self._now_ms = MIN_WATERMARK_MS
        self.time_type: pa.DataType | None = None
        """The type of the event-time column, or None before the first row."""

    def steady(self, now_ms: int) -> int:
        """Returns the processing time for windows, in ms.

        It never decreases, and is never before a time up to which windows have fired.
        """
        self._now_ms = max(self._now_ms, now_ms, self.greatest_ms + 1)
        return self._now_ms

    def reach(self, moment_ms: int) -> None:
        """Advances the fired time of all key groups to `moment_ms`.

        Key groups with a later time, which may exist after a restore, do not change.
        """
        for groups, fired_ms in [*self.runs()]:
            if fired_ms < moment_ms:
                self.advance(groups, moment_ms)

    def load(self, table: StateTable) -> None:
        """Restores the times of this subtask's key groups from the table of an earlier subtask.

        Raises IncompatibleStateError for a table of another state.
        """
        super().load(table)
        time_type = table.rows.schema.field(_TIME).type
        if not pa.types.is_null(time_type):
            self.time_type = time_type

    def _rows(self) -> pa.RecordBatch:
        rows = super()._rows()
        return rows.append_column(_TIME, pa.nulls(rows.num_rows, self.time_type or pa.null()))


class DueRows:
    """Finds the stored rows of windows that have ended, about `FIRED_ROWS` rows at a time.

    A row is due at the time, in ms, in the table column `column`. The operator calls `note` for rows that it stores,
    and `forget` after rows were restored.
    """

    def __init__(self, column: str) -> None:
        self._column = column
        self._first: int | None = None
        """A lower bound of the times of stored rows, in ms. None if unknown."""

    def forget(self) -> None:
        """Discards the known lower bound of the times of stored rows, because rows were restored.

        The next call of `limits` scans the stored rows to find it again.
        """
        self._first = None

    def note(self, moments: Times) -> None:
        """Records that rows with these times, in ms, were stored."""
        if self._first is not None and len(moments):
            self._first = min(self._first, int(moments.min()))

    def limits(self, tables: Sequence[RowTable], until: int) -> Iterator[int]:
        """Yields, for each step, a time in ms: the rows with this time or an earlier one fire in the step. The caller
        must fire and remove these rows before the next step.

        `until` is the time up to which rows are due.
        """
        while self._first is None or self._first <= until:
            limit, self._first = self._next(tables, until)
            if limit is None:
                return
            yield limit

    def take(self, table: RowTable, limit: int) -> pa.RecordBatch:
        """Removes the rows whose time is `limit` or before from a table, and returns them."""
        found = [np.zeros(0, dtype=np.int64)]
        for rows, refs in table.scan([self._column], SCANNED_ROWS):
            found.append(refs[rows.column(self._column).to_numpy() <= limit])
        refs = np.concatenate(found)
        taken = table.take(refs)
        table.remove(refs)
        return taken

    def _next(self, tables: Sequence[RowTable], until: int) -> tuple[int | None, int]:
        """Chooses the rows that fire in this step.

        Returns the time in ms up to which they fire (None for no rows), and the first time of the rows that remain.
        """
        counts: dict[int, int] = {}
        for table in tables:
            for rows, _ in table.scan([self._column], SCANNED_ROWS):
                found, sizes = np.unique(rows.column(self._column).to_numpy(), return_counts=True)
                for moment, size in zip(found.tolist(), sizes.tolist(), strict=True):
                    counts[moment] = counts.get(moment, 0) + size
            table.done()
        limit, rows_due = None, 0
        for moment in sorted(counts):
            if moment > until or (limit is not None and rows_due + counts[moment] > FIRED_ROWS):
                return limit, moment
            limit, rows_due = moment, rows_due + counts[moment]
        return limit, np.iinfo(np.int64).max
