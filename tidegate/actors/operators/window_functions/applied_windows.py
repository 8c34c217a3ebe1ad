"""`AppliedWindows`: a function gets all rows of each key and window of time, when the window has ended.

Rules:

- A row is kept once for each of its windows (as Flink keeps it), under the end of the window; of sessions once, under
  its time, because its session is known when it has ended.
- What has fired goes forward first (`FiredGroups`), and rows go in the step in which the function has got them. So what
  lies in the state and has ended waits to fire: a row that comes between two steps is late for it, and a checkpoint
  there neither repeats nor loses a window.
- The function gets windows with about `STEP_ROWS` rows at once, but at least one window of one key. A step goes on so
  for a part of the rows that it has looked at: so what is looked at grows with what is due, and not with its square.
- With an allowed lateness, rows that a function has got are kept until the window is over (`KeptWindows`). A row that
  comes meanwhile gives the function all rows of its key and window once more, after its batch.
- A row is late when its last window is over. It is dropped, counted, and goes to the side output of late rows.
- Where a function has timers, windows and timers come in the order of their moments, whatever the watermarks are; at
  one moment the windows are first. Then what is over goes.
- With processing time there are the rules of `windows/window_operator.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.actors.kernels.hashing import hash_columns
from tidegate.actors.operators.operator import Emit, OperatorContext
from tidegate.actors.operators.operator_errors import blame
from tidegate.actors.operators.source_splits import Due
from tidegate.actors.operators.watermarks.late_rows import LATE, LATE_RECORDS
from tidegate.actors.operators.window_functions.kept_windows import KeptWindows
from tidegate.actors.operators.window_functions.process_windows import FunctionCalls
from tidegate.actors.operators.window_functions.window_buffer import Numbers
from tidegate.actors.operators.window_functions.window_calls import WindowCalls
from tidegate.actors.operators.window_functions.window_timers import WindowLife
from tidegate.actors.operators.windows.assigned_windows import ends_of
from tidegate.actors.operators.windows.fired_groups import FiredGroups
from tidegate.actors.operators.windows.merged_groups import codes_of
from tidegate.actors.operators.windows.merged_sessions import merged_sessions
from tidegate.actors.operators.windows.window_rows import row_times
from tidegate.actors.operators.windows.window_specs import (
    Clock,
    Cumulating,
    DueByWindows,
    Session,
    Sliding,
    Times,
    Tumbling,
)
from tidegate.actors.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.state.key_groups import key_group_range
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateTable

STEP_ROWS = 65_536
_LOOKS = 8
"""So many rows are looked at, at most, for each that goes, however many wait."""
_TIME_MS_END = 1 << 60
"""After every window, and far from the end of 64 bits."""


def _budget(rows: int) -> int:
    """About how many rows a step gives the function that has looked at so many."""
    return max(STEP_ROWS, rows // _LOOKS)


class AppliedWindows(KeptWindows):
    """Calls a function with the rows of each key and window. `time`: the column of event time, or the clock.

    ConfigurationError for an allowed lateness, or timers, of sessions or by the clock.
    """

    def __init__(
        self,
        keys: tuple[str, ...],
        spec: Tumbling | Sliding | Cumulating | Session,
        time: str | Clock,
        schema: pa.Schema,
        calls: WindowCalls,
        lateness_ms: int = 0,
    ) -> None:
        known = not isinstance(spec, Session) and not isinstance(time, Clock)
        if lateness_ms and not known:
            raise ConfigurationError(
                f"{calls.name} with {spec!r}: allowed_lateness is for tg.Tumbling, tg.Sliding and tg.Cumulating of "
                "event time. A session that grows has other bounds, so its new result would not replace the one "
                "before: give the event time a larger max_out_of_orderness, or use aggregate"
            )
        life = WindowLife(spec, lateness_ms) if known and not isinstance(spec, Session) else None
        super().__init__(keys, schema, calls, None if isinstance(spec, Session) else spec, life)
        self._spec, self._time, self._lateness_ms = spec, time, lateness_ms
        self._clock = time if isinstance(time, Clock) else None
        self.holds_back_ms = int(isinstance(spec, Session) and self._clock is None)
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
        # The first look says when the next window ends. How many rows there are is an estimate on disk, which may be 0.
        self._next_end_ms = MIN_WATERMARK_MS

    def load(self, tables: Sequence[StateTable]) -> None:
        """CorruptionError as `open`."""
        super().load(tables)
        self._next_end_ms = MIN_WATERMARK_MS

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Keep the rows of a batch. OperatorError for a row without a time, or for other columns."""
        with blame(self.context, batch):
            times = self._times(batch)
            last = self._spec.last_end_ms(times)
            rows, keys = self.rows_of(batch)
        self.check_owner(keys)
        moments = self._fired.of_keys(keys, self.context.max_parallelism)
        late = (last - 1 if self._life is None else self._life.last_ms(last)) <= moments
        if late.any():
            self._late.inc(int(np.count_nonzero(late)))
            self.context.emit_aside(LATE, batch.filter(pa.array(late)))
            in_time = pa.array(np.flatnonzero(~late))
            rows, keys, times, last = rows.take(in_time), keys.take(in_time), times[~late], last[~late]
            moments = moments if isinstance(moments, int) else moments[~late]
        if not len(times):
            return
        if isinstance(self._spec, Session):
            self.keep(rows, keys, times)
            self._next_end_ms = min(self._next_end_ms, int(last.min()))
            self.tables[0].done()
        else:
            self._take_in(rows, keys, times, moments, emit)

    def _take_in(
        self, rows: pa.RecordBatch, keys: pa.RecordBatch, times: Times, moments: Times | int, emit: Emit
    ) -> None:
        """Keep rows for their windows. Those whose windows have fired, and are kept, come out again at once."""
        assert not isinstance(self._spec, Session), "sessions are kept under the times of their rows"
        numbers, ends = self._windows_of(self._spec, times)
        fired_ms = moments if isinstance(moments, int) else moments[numbers]
        waits = ends - 1 > fired_ms
        if waits.any():
            some = pa.array(numbers[waits])
            self.keep(rows.take(some), keys.take(some), ends[waits])
            self._next_end_ms = min(self._next_end_ms, int(ends[waits].min()))
        if self._lateness_ms and self._life is not None:
            again = ~waits & (self._life.last_ms(ends) > fired_ms)
            if again.any():
                some, waiting = pa.array(numbers[again]), self._next_end_ms - 1 <= self._fired.greatest_ms
                self.give_again(rows.take(some), keys.take(some), ends[again], waiting, emit)
        self.done()

    def _windows_of(self, spec: Tumbling | Sliding | Cumulating, times: Times) -> tuple[Numbers, Times]:
        """The numbers of rows and the ends of their windows, row by row: so those of a window stay in their order."""
        found = [*ends_of(spec, times)]
        if len(found) == 1:
            return found[0]
        numbers, ends = (np.concatenate(columns) for columns in zip(*found, strict=True))
        order = np.argsort(numbers, kind="stable")
        return numbers[order], ends[order]

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

    def _times(self, batch: pa.RecordBatch) -> Times:
        if isinstance(self._time, str):
            self._fired.time_type = batch.schema.field(self._time).type
            return row_times(batch, self._time)
        return np.full(batch.num_rows, self._fired.steady(self.context.time.now_ms), dtype=np.int64)

    def _advance_to(self, moment_ms: int, emit: Emit) -> Iterator[None]:
        until_ms = min(moment_ms, _TIME_MS_END)
        for groups, fired_ms in [*self._fired.runs()]:
            self._fired.advance(groups, max(fired_ms, until_ms))
        timed = self._calls if isinstance(self._calls, FunctionCalls) and self._calls.has_timers else None
        left = None if timed is None else timed.fires_left()
        while True:
            first_ms = None if timed is None else timed.first_timer_ms()
            if first_ms is not None and first_ms <= until_ms and first_ms < self._next_end_ms - 1:
                assert timed is not None and left is not None, "timers without a function"
                for batch in timed.fire(min(until_ms, self._next_end_ms - 2), left, self._columns):
                    emit(batch)
            elif self._next_end_ms - 1 > until_ms:
                break
            else:
                self._next_end_ms = MAX_WATERMARK_MS
                fire = self._fire_sessions if isinstance(self._spec, Session) else self._fire
                if not fire(until_ms, emit):
                    continue
            yield
        yield from self.let_go(until_ms)

    def _fire(self, until_ms: int, emit: Emit) -> bool:
        """Give the function windows that have ended, as many as a step may. Returns whether there were any."""
        ends, refs, _ = self.scanned(0, [])
        due = ends - 1 <= until_ms
        if not due.all():
            self._next_end_ms = int(ends[~due].min())
        if isinstance(self._calls, FunctionCalls) and self._calls.has_timers:
            left = self._given_in_turn(ends, refs, np.flatnonzero(due), self._calls, emit)
        else:
            left = self._given(ends, refs, np.flatnonzero(due), emit)
        if len(left):
            self._next_end_ms = int(ends[left].min())
        self.done()
        return bool(due.any())

    def _given(self, ends: Times, refs: NDArray[np.int64], due: Numbers, emit: Emit) -> Numbers:
        """Give the function due rows, as many as a step may. Returns the others."""
        budget = _budget(len(ends))
        while len(due) and budget > 0:
            chosen = self._chosen(ends, refs, due)
            budget -= len(chosen)
            due = due[~np.isin(due, chosen, assume_unique=True)]
            self.give(ends[chosen], refs[chosen], emit)
        return due

    def _given_in_turn(
        self, ends: Times, refs: NDArray[np.int64], due: Numbers, calls: FunctionCalls, emit: Emit
    ) -> Numbers:
        """The same end by end, until a timer comes before the next one."""
        due = due[np.argsort(ends[due], kind="stable")]
        starts = np.flatnonzero(np.diff(ends[due], prepend=MIN_WATERMARK_MS))
        budget = _budget(len(ends))
        for start, stop in pairwise([*starts.tolist(), len(due)]):
            first_ms = calls.first_timer_ms()
            if first_ms is not None and first_ms < int(ends[due[start]]) - 1:
                return due[start:]
            of_end = due[start:stop]
            while len(of_end):
                if budget <= 0:
                    return np.concatenate([of_end, due[stop:]])
                chosen = self._some_keys(refs, of_end) if len(of_end) > STEP_ROWS and self._key_names else of_end
                budget -= len(chosen)
                of_end = of_end[~np.isin(of_end, chosen, assume_unique=True)]
                self.give(ends[chosen], refs[chosen], emit)
        return due[:0]

    def _chosen(self, ends: Times, refs: NDArray[np.int64], due: Numbers) -> Numbers:
        """The first windows among due rows, with about as many rows as a function gets at once."""
        due_ends, counts = np.unique(ends[due], return_counts=True)
        windows = max(1, int(np.searchsorted(np.cumsum(counts), STEP_ROWS, side="right")))
        chosen: Numbers = due[ends[due] <= due_ends[windows - 1]]
        return self._some_keys(refs, chosen) if len(chosen) > STEP_ROWS and self._key_names else chosen

    def _some_keys(self, refs: NDArray[np.int64], chosen: Numbers) -> Numbers:
        """Those of some rows of a window whose keys are about as many as a step may have."""
        keys = self.tables[0].take(refs[chosen], self.keys.names)
        parts = hash_columns(keys, self.keys.names) % np.uint64(len(chosen) // STEP_ROWS + 1)
        some: Numbers = chosen[parts == parts[0]]
        return some

    def _fire_sessions(self, until_ms: int, emit: Emit) -> bool:
        """As `_fire`: of the rows of each key, those that follow each other within the gap."""
        assert isinstance(self._spec, Session), "windows whose ends are known"
        times, refs, keys = self.scanned(0, list(self._key_names))
        if not len(times):
            self.tables[0].done()
            return False
        codes, _, _ = codes_of(keys, len(times))
        numbers, _, (starts, ends) = merged_sessions(codes, times, times + self._spec.gap_ms)
        due = ends - 1 <= until_ms
        if not due.all():
            self._next_end_ms = int(ends[~due].min())
        if not due.any():
            self.tables[0].done()
            return False
        left = np.flatnonzero(due)
        sizes = np.bincount(numbers, minlength=len(ends))
        budget = _budget(len(times))
        while len(left) and budget > 0:
            some = left[: max(1, int(np.searchsorted(np.cumsum(sizes[left]), STEP_ROWS, side="right")))]
            left = left[len(some) :]
            place = np.full(len(ends), -1, dtype=np.int64)
            place[some] = np.arange(len(some))
            chosen = np.flatnonzero(place[numbers] >= 0)
            budget -= len(chosen)
            rows = self.taken(refs[chosen])
            self.tables[0].remove(refs[chosen])
            self.call(rows, place[numbers[chosen]], (starts[some], ends[some]), emit, self.context)
        if len(left):
            self._next_end_ms = MIN_WATERMARK_MS
        self.tables[0].done()
        return True
