"""`TimedWindows`: what functions of windows of time share: which rows are late, and in which order windows come.

Rules:

- What has fired goes forward first (`FiredGroups`), and rows go in the step in which the function has got them. So what
  lies in the state and has ended waits to fire: a row that comes between two steps is late for it, and a checkpoint
  there neither repeats nor loses a window.
- The function gets windows with about `STEP_ROWS` rows at once, but at least one window of one key. A step goes on so
  for a part of the rows that it has looked at: so what is looked at grows with what is due, and not with its square.
- A row is late when its last window is over. It is dropped, counted, and goes to the side output of late rows.
- Where a function has timers, windows and timers come in the order of their moments, whatever the watermarks are; at
  one moment the windows are first. Then what is over goes.
- With processing time there are the rules of `windows/window_operator.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.operator import Emit, OperatorContext
from tidegate.operators.operator_errors import blame
from tidegate.operators.source_splits import Due
from tidegate.operators.watermarks.late_rows import LATE_RECORDS, set_aside
from tidegate.operators.windows.fired_groups import FiredGroups
from tidegate.operators.windows.process_windows import FunctionCalls
from tidegate.operators.windows.window_buffer import WindowBuffer
from tidegate.operators.windows.window_calls import WindowCalls
from tidegate.operators.windows.window_rows import row_times
from tidegate.operators.windows.window_specs import Clock, DueByWindows, EventTimeWindow, Times
from tidegate.operators.windows.window_timers import WindowLife, last_moments
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.state.key_groups import key_group_range
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateTable

STEP_ROWS = 65_536
SCANNED_ROWS = 131_072
_LOOKS = 8
"""So many rows are looked at, at most, for each that goes, however many wait."""
_TIME_MS_END = 1 << 60
"""After every window, and far from the end of 64 bits."""


def budget(rows: int) -> int:
    """About how many rows a step gives the function that has looked at so many."""
    return max(STEP_ROWS, rows // _LOOKS)


def budget_over(rows: int) -> int:
    """How many rows a step lets go of that has looked at so many."""
    return max(SCANNED_ROWS, rows // _LOOKS)


def parts_of(rows: int) -> int:
    """In how many parts the function gets so many rows."""
    return -(-rows // STEP_ROWS)


def pieces(sizes: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Where to cut windows with so many rows each, so that the function gets about `STEP_ROWS` at once."""
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + STEP_ROWS, side="right")))
        yield start, stop
        start = stop


class TimedWindows(WindowBuffer):
    """Rows that wait for their windows. `time`: the column of event time, or the clock.

    ConfigurationError for an allowed lateness by the clock.
    """

    def __init__(
        self,
        keys: tuple[str, ...],
        spec: EventTimeWindow,
        time: str | Clock,
        schema: pa.Schema,
        calls: WindowCalls,
        lateness_ms: int,
        life: WindowLife | None = None,
        told: Sequence[pa.Field] = (),
        own: Sequence[pa.Field] = (),
    ) -> None:
        self._clock = time if isinstance(time, Clock) else None
        if lateness_ms and self._clock is not None:
            raise ConfigurationError(
                f"{calls.name} with {spec!r}: no row is late for processing time; leave allowed_lateness out"
            )
        super().__init__(keys, schema, calls, life, told, own)
        self._spec, self._time, self._lateness_ms = spec, time, lateness_ms
        self.computed: tuple[str, ...] = ()
        """Columns that only the operator reads: rows that come too late leave without them."""
        self._next_end_ms = MIN_WATERMARK_MS
        """No window in the state ends before."""

    @property
    def dues(self) -> Sequence[Due]:
        """By which windows are over."""
        return (DueByWindows(self._spec, self._lateness_ms),) if self._clock is None else ()

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Take rows and moments back. CorruptionError for other columns."""
        self._fired = FiredGroups(key_group_range(context.subtask, context.max_parallelism, context.parallelism))
        for table in restored:
            if table.kind is not StateKind.KEYED:
                self._fired.load(table)
        self._late = context.metrics.counter(LATE_RECORDS)
        super().open(context, restored)

    def load(self, tables: Sequence[StateTable]) -> None:
        """CorruptionError as `open`."""
        super().load(tables)
        # The first look says when the next window ends. How many rows there are is an estimate on disk, which may be 0.
        self._next_end_ms = MIN_WATERMARK_MS

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Keep the rows of a batch. OperatorError for a row without a time, or for other columns."""
        with blame(self.context, batch):
            times = self._times(batch)
            ends = self.last_ends(batch, times)
            rows, keys = self.rows_of(batch)
        self.check_owner(keys)
        moments = self._fired.of_keys(keys, self.context.max_parallelism)
        late = self.last_ms(ends) <= moments
        in_time = set_aside(batch.drop_columns(list(self.computed)), late, self._late, self.context.emit_aside)
        if len(in_time) < batch.num_rows:
            picked = pa.array(in_time)
            rows, keys, times, ends = rows.take(picked), keys.take(picked), times[in_time], ends[in_time]
            moments = moments if isinstance(moments, int) else moments[in_time]
        if len(times):
            self.take_in(rows, keys, times, ends, moments, emit)
            self.done()

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        """Give the function what has ended by the watermark, in steps."""
        super().advance_watermark(watermark_ms, emit)
        return iter(()) if self._clock is not None else self._advance_to(self.reached_ms(watermark_ms), emit)

    def next_processing_time_ms(self) -> int | None:
        """When the first window ends, if that is a matter of processing time."""
        return None if self._clock is None or self._next_end_ms == MAX_WATERMARK_MS else self._next_end_ms

    def on_processing_time(self, now_ms: int, emit: Emit) -> Iterator[None]:
        """Give the function what has ended by the clock, in steps."""
        return iter(()) if self._clock is None else self._advance_to(self._fired.steady(now_ms) - 1, emit)

    def finish(self, emit: Emit) -> Iterator[None]:
        """Give the function what the end of the input leaves open, if that was asked for."""
        fires = self._clock is not None and self._clock.fires_at_end
        return self._advance_to(MAX_WATERMARK_MS, emit) if fires else iter(())

    def snapshot(self, cut: Cut) -> OperatorSnapshot:
        """Freeze the rows, and what has fired."""
        frozen = self.changes(cut)
        return replace(frozen, states=(*frozen.states, self._fired.freeze()))

    def last_ms(self, ends: Times) -> Times:
        """The last moment of windows with these ends: they are over when the watermark has come to it."""
        return last_moments(ends, self._lateness_ms)

    def last_ends(self, batch: pa.RecordBatch, times: Times) -> Times:
        """The end of the last window of each row. Raises ConfigurationError and OperatorError."""
        del batch  # sessions may read the gap of a row
        return self._spec.last_end_ms(times)

    def take_in(
        self,
        rows: pa.RecordBatch,
        keys: pa.RecordBatch,
        times: Times,
        ends: Times,
        moments: Times | int,
        emit: Emit,
    ) -> None:
        """Keep rows that are not late. `ends`: of their last windows. `moments`: how far event time is for each."""
        raise NotImplementedError

    def fire(self, until_ms: int, emit: Emit) -> bool:
        """Give the function windows that have ended, as many as a step may. Returns whether there were any.

        It says when the next window ends.
        """
        raise NotImplementedError

    def let_go(self, until_ms: int) -> Iterator[None]:
        """Let go of what is over, in steps."""
        raise NotImplementedError

    def _times(self, batch: pa.RecordBatch) -> Times:
        if isinstance(self._time, str):
            self._fired.time_type = batch.schema.field(self._time).type
            return row_times(batch, self._time, self._spec)
        return np.full(batch.num_rows, self._fired.steady(self.context.time.now_ms), dtype=np.int64)

    def _advance_to(self, moment_ms: int, emit: Emit) -> Iterator[None]:
        until_ms = min(moment_ms, _TIME_MS_END)
        for groups, fired_ms in [*self._fired.runs()]:
            self._fired.advance(groups, max(fired_ms, until_ms))
        timed = self._calls if isinstance(self._calls, FunctionCalls) and self._calls.has_timers else None
        chains = None if timed is None else timed.chains(at_end=until_ms == _TIME_MS_END)
        while True:
            first_ms = None if timed is None else timed.first_timer_ms()
            if first_ms is not None and first_ms <= until_ms and first_ms < self._next_end_ms - 1:
                assert timed is not None and chains is not None, "timers without a function"
                for batch in timed.fire(min(until_ms, self._next_end_ms - 2), chains, self._columns):
                    emit(batch)
            elif self._next_end_ms - 1 > until_ms:
                break
            else:
                self._next_end_ms = MAX_WATERMARK_MS
                if not self.fire(until_ms, emit):
                    continue
            yield
        yield from self.let_go(until_ms)
