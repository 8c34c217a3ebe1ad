"""Functions over windows of time: a function gets all rows of each key and window when the window has ended.

`FunctionWindows` implements windows that depend only on the time of a row (tumbling, sliding, cumulating).
`FunctionSessions` implements sessions. Both also follow the rules of `row_windows.py`.

Rules of `FunctionWindows`:

- A row is stored once for each of its windows (as in Flink), under the end of the window.
- If a window may get late rows, or its function has state or timers of the window, its rows are kept after the call
  until the window is over, that is, until neither late rows nor timers can come. The call and the move of the rows to
  the table of kept rows are one step.
- With an allowed lateness, the function is called again with all rows of a key and window when a row arrives after the
  window has fired, once for each batch. A window that has ended but not fired yet (after a restore from a checkpoint
  between two steps) fires at the same time.
- Windows that are over are removed in steps when the watermark advances, together with their state.

Rules of `FunctionSessions`:

- A row is stored once, by its time, and with the end of its gap if each row has its own gap. Which rows form a session
  is computed when the session has ended.
- With an allowed lateness, an ended session is kept until no late row can join it: its rows, and in `RESULTS_STATE` its
  bounds and the rows that the function has returned. A late row that touches such sessions merges them into a new
  session.
- Results are then changes (`changes.py`): the results of the merged sessions are retracted before the result of all
  their rows is emitted. If the new session has not ended yet, its rows wait again.
- Only rows at or before the watermark can touch an ended session, so keys of other rows are not looked up.
- After a restore from a checkpoint between two steps, an ended session may not have been passed to the function. It is
  passed before a new row of its key is stored, so that the row joins it only within the lateness.
- The function gets rows from earlier calls first, and all other rows in arrival order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.changes import (
    CHANGE,
    DELETE,
    INSERT,
    UPDATE_AFTER,
    UPDATE_BEFORE,
    changes,
    with_kind,
)
from tidegate.operators.operator import Emit, OperatorContext
from tidegate.operators.windows.process_windows import FunctionCalls, WindowLife
from tidegate.operators.windows.row_windows import (
    KEPT,
    KEPT_STATE,
    PLACE,
    RESULTS,
    RESULTS_STATE,
    WAITING,
    TimedWindows,
    budget,
    budget_over,
    parts_of,
    pieces,
    together,
)
from tidegate.operators.windows.session_windows import merged_sessions
from tidegate.operators.windows.window_calls import Grouped, WindowCalls
from tidegate.operators.windows.window_columns import bounds_of, check_last_ends, row_ends
from tidegate.operators.windows.window_specs import (
    Clock,
    Cumulating,
    Numbers,
    Session,
    Sliding,
    Times,
    Tumbling,
    ends_of,
    starts_of,
)
from tidegate.operators.windows.window_state import codes_of
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.state.kernels.distinct_integers import distinct_integers
from tidegate.state.kernels.hashing import hash_columns
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.arrow_types import decoded_type
from tidegate.storage.schemas.column_names import own_name
from tidegate.storage.state.snapshot import StateTable

SlicedSpec = Tumbling | Sliding | Cumulating
ROW_END = own_name("row_end_ms")
"""Name of the column with the end of the session that the row would form alone. Stored if each row has its own gap."""
START, OUT = own_name("window_start_ms"), own_name("window_out")
"""Names of the columns of an ended session: its start, and whether the function has returned a row. The column `PLACE`
is its end.
"""

Refs = NDArray[np.int64]


class KeptWindows(TimedWindows):
    """Base class of window operators that store rows by key and window end.

    Rows are stored until the window ends or, with allowed lateness, until no late row can arrive for the window.
    """

    def __init__(
        self,
        keys: tuple[str, ...],
        spec: SlicedSpec,
        time: str | Clock,
        schema: pa.Schema,
        calls: WindowCalls,
        lateness_ms: int,
    ) -> None:
        life = None if isinstance(time, Clock) else WindowLife(spec, lateness_ms)
        super().__init__(keys, spec, time, schema, calls, lateness_ms, life)
        self._known = spec
        self._over_ms = MIN_WATERMARK_MS
        """A lower bound of the times, in ms, at which kept windows can be removed."""

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Restores the rows and windows. Raises CorruptionError for tables that do not fit."""
        super().open(context, restored)
        of_function = isinstance(self._calls, FunctionCalls) and self._calls.keeps_windows
        self._keeps = self._life is not None and (of_function or self._lateness_ms > 0)

    def load(self, tables: Sequence[StateTable]) -> None:
        """Loads stored tables into the opened state. Raises CorruptionError for tables that do not fit."""
        super().load(tables)
        self._over_ms = MIN_WATERMARK_MS

    def give(self, ends: Times, refs: NDArray[np.int64], emit: Emit) -> None:
        """Calls the function with waiting rows, grouped by key and window. Afterwards the rows are stored for late
        calls, or removed.

        `refs` are references to the rows, and `ends` the ends of their windows in ms.
        """
        rows = self.taken(refs)
        if self._keeps:
            self._keep_given(rows, self.keys_of(refs), ends)
        self.tables[WAITING].remove(refs)
        self._call_for(rows, ends, emit)

    def give_again(self, rows: pa.RecordBatch, keys: pa.RecordBatch, ends: Times, waiting: bool, emit: Emit) -> None:
        """Calls the function again for the keys and windows of late rows, with all rows of these windows.

        `rows`, `keys` and `ends` are the late rows, their keys and the ends of their windows. With `waiting`, some rows
        of the windows may not have been passed to the function yet.
        """
        codes, distinct, count = codes_of(keys, len(ends))
        order = distinct_integers(ends)
        windows, of_rows = np.unique(np.searchsorted(order, ends) * count + codes, return_inverse=True)
        of_rows = of_rows.reshape(-1)
        sizes = np.bincount(of_rows)
        held: list[tuple[int, NDArray[np.int64], NDArray[np.int64]]] = []
        # Rows from earlier calls come before the new rows.
        for number in (KEPT, WAITING) if waiting else (KEPT,):
            found = self.tables[number].find(distinct)
            places = self.places_of(found.refs, number)
            at = np.minimum(np.searchsorted(order, places), len(order) - 1)
            codes_found = at * count + found.keys
            of_found = np.minimum(np.searchsorted(windows, codes_found), len(windows) - 1)
            fits = (order[at] == places) & (windows[of_found] == codes_found)
            held.append((number, found.refs[fits], of_found[fits]))
            sizes += np.bincount(of_found[fits], minlength=len(windows))
        for start, stop in pieces(sizes):
            parts, part_ends = list[pa.RecordBatch](), list[Times]()
            for number, refs, of in held:
                some = refs[(of >= start) & (of < stop)]
                parts.append(self.taken(some, number))
                part_ends.append(self.places_of(some, number))
                if number == WAITING and len(some):
                    self._keep_given(parts[-1], self.keys_of(some), part_ends[-1])
                    self.tables[WAITING].remove(some)
            of_piece = (of_rows >= start) & (of_rows < stop)
            new = pa.array(np.flatnonzero(of_piece))
            parts.append(rows.take(new))
            part_ends.append(ends[of_piece])
            self._keep_given(parts[-1], keys.take(new), part_ends[-1])
            self._call_for(together(parts), np.concatenate(part_ends), emit)

    def remove_over(self, until_ms: int) -> Iterator[None]:
        """Removes the windows that are over at the watermark `until_ms`, and their state. Yields between two steps."""
        while self._life is not None and self._over_ms <= until_ms:
            ends, refs, _ = self.scanned(KEPT, [])
            last = self._life.last_ms(ends)
            over = np.flatnonzero(last <= until_ms)
            some = over[: budget_over(len(ends))]
            self._over_ms = int(last[last > until_ms].min(initial=MAX_WATERMARK_MS))
            if len(some) < len(over):
                self._over_ms = MIN_WATERMARK_MS
            if isinstance(self._calls, FunctionCalls) and self._calls.keeps_windows and len(some):
                of = self.keys_of(refs[some], KEPT)
                codes, _, count = codes_of(of, len(some))
                _, places = np.unique(ends[some], return_inverse=True)
                _, firsts = np.unique(places.reshape(-1) * count + codes, return_index=True)
                self._calls.forget(of.take(pa.array(firsts)), ends[some][firsts])
            self.tables[KEPT].remove(refs[some])
            self._changed_rows += len(some)
            self.done()
            if len(some):
                yield

    def _keep_given(self, rows: pa.RecordBatch, keys: pa.RecordBatch, ends: Times) -> None:
        assert self._life is not None, "windows without a life"
        self.keep(rows, keys, ends, KEPT)
        self._over_ms = min(self._over_ms, int(self._life.last_ms(ends).min()))

    def _call_for(self, rows: pa.RecordBatch, ends: Times, emit: Emit) -> None:
        """Calls the function with rows, grouped by key and window, in the order in which the windows end."""
        codes, _, count = codes_of(rows.select(list(self._key_names)), rows.num_rows)
        order, places = np.unique(ends, return_inverse=True)
        found, groups = np.unique(places.reshape(-1) * count + codes, return_inverse=True)
        group_ends = order[found // count]
        self.call(rows, groups.reshape(-1), (starts_of(self._known, group_ends), group_ends), emit, self.context)


class FunctionWindows(KeptWindows):
    """Calls a function with the rows of each key and window.

    Which windows a row belongs to depends only on its time.
    """

    def add_rows(
        self,
        rows: pa.RecordBatch,
        keys: pa.RecordBatch,
        times: Times,
        ends: Times,
        moments: Times | int,
        emit: Emit,
    ) -> None:
        """Stores rows for their windows.

        For late rows of windows that have fired and are still stored, calls the function again at once.
        """
        numbers, ends = self._windows_of(times)
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

    def _windows_of(self, times: Times) -> tuple[Numbers, Times]:
        """Returns an entry for each row and window of the row: the row index, and the end of the window in ms.

        The rows of a window stay in order.
        """
        found = [*ends_of(self._known, times)]
        if len(found) == 1:
            return found[0]
        numbers, ends = (np.concatenate(columns) for columns in zip(*found, strict=True))
        order = np.argsort(numbers, kind="stable")
        return numbers[order], ends[order]

    def fire(self, until_ms: int, emit: Emit) -> bool:
        """Calls the function with windows that have ended at `until_ms`, up to the limit of a step.

        Returns False if there were none.
        """
        ends, refs, _ = self.scanned(WAITING, [])
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
        """Calls the function with rows of ended windows, up to the limit of a step. Returns the indices of the rows
        that were not passed to the function.

        `ends` and `refs` have the window end and the reference of each stored row, and `due` the indices of the rows of
        ended windows.
        """
        rest = budget(len(ends))
        while len(due) and rest > 0:
            chosen = self._chosen(ends, refs, due)
            rest -= len(chosen)
            due = due[~np.isin(due, chosen, assume_unique=True)]
            self.give(ends[chosen], refs[chosen], emit)
        return due

    def _given_in_turn(
        self, ends: Times, refs: NDArray[np.int64], due: Numbers, calls: FunctionCalls, emit: Emit
    ) -> Numbers:
        """Calls the function with rows of ended windows, one window end after the other, and stops before a window that
        ends after the next timer.

        The parameters and the result are as in `_given`.
        """
        due = due[np.argsort(ends[due], kind="stable")]
        starts = np.flatnonzero(np.diff(ends[due], prepend=MIN_WATERMARK_MS))
        rest = budget(len(ends))
        for start, stop in pairwise([*starts.tolist(), len(due)]):
            first_ms = calls.first_timer_ms()
            if first_ms is not None and first_ms < int(ends[due[start]]) - 1:
                return due[start:]
            of_end = due[start:stop]
            while len(of_end):
                if rest <= 0:
                    return np.concatenate([of_end, due[stop:]])
                chosen = self._some_keys(refs, of_end) if parts_of(len(of_end)) > 1 and self._key_names else of_end
                rest -= len(chosen)
                of_end = of_end[~np.isin(of_end, chosen, assume_unique=True)]
                self.give(ends[chosen], refs[chosen], emit)
        return due[:0]

    def _chosen(self, ends: Times, refs: NDArray[np.int64], due: Numbers) -> Numbers:
        """Returns the part of `due` (indices of rows) that belongs to the first windows, with about as many rows as the
        function gets in one step.
        """
        due_ends, counts = np.unique(ends[due], return_counts=True)
        _, windows = next(pieces(counts))
        chosen: Numbers = due[ends[due] <= due_ends[windows - 1]]
        return self._some_keys(refs, chosen) if parts_of(len(chosen)) > 1 and self._key_names else chosen

    def _some_keys(self, refs: NDArray[np.int64], chosen: Numbers) -> Numbers:
        """Returns the rows of some keys of one window, so that a step has about `STEP_ROWS` rows.

        Selects keys with the same part of the key hash.
        """
        keys = self.keys_of(refs[chosen])
        parts = hash_columns(keys, self.keys.names) % np.uint64(parts_of(len(chosen)))
        some: Numbers = chosen[parts == parts[0]]
        return some


@dataclass(frozen=True, slots=True)
class _EndedSessions:
    """Ended sessions, with one entry in each array: the reference to the stored session, the number of its key, its
    start and end in ms, and whether a result was emitted.
    """

    refs: Refs
    codes: Numbers
    starts: Times
    ends: Times
    outs: NDArray[np.bool_]

    def where(self, some: NDArray[np.bool_]) -> _EndedSessions:
        """Returns the sessions for which the mask `some` is True."""
        return _EndedSessions(self.refs[some], self.codes[some], self.starts[some], self.ends[some], self.outs[some])


class FunctionSessions(TimedWindows):
    """Calls a function with the rows of each key and session. With an allowed lateness (`lateness_ms`) the results are
    changes.

    Raises ConfigurationError for a lateness if the columns that the function returns are not known.
    """

    def __init__(
        self,
        keys: tuple[str, ...],
        spec: Session,
        time: str | Clock,
        schema: pa.Schema,
        calls: WindowCalls,
        lateness_ms: int = 0,
    ) -> None:
        returned = _kept_columns(calls) if lateness_ms else []
        results = [pa.field(START, pa.int64()), pa.field(OUT, pa.bool_()), *returned] if lateness_ms else []
        own = [pa.field(ROW_END, pa.int64())] if spec.gap_ms is None else []
        super().__init__(keys, spec, time, schema, calls, lateness_ms, results=results, own=own)
        self._session, self._gap_ms = spec, spec.gap_ms
        self.holds_back_ms = int(self._clock is None)
        self._over_ms = MIN_WATERMARK_MS
        """A lower bound of the times, in ms, at which ended sessions can be removed."""

    def load(self, tables: Sequence[StateTable]) -> None:
        """Loads stored tables into the opened state. Raises CorruptionError for tables that do not fit."""
        super().load(tables)
        self._over_ms = MIN_WATERMARK_MS

    def load_table(self, table: StateTable) -> None:
        """Loads one stored table.

        Raises ConfigurationError for a table of ended sessions if the program has no allowed lateness.
        """
        if not self._lateness_ms and table.state in (KEPT_STATE, RESULTS_STATE):
            raise ConfigurationError(
                f"operator {self.context.uid!r}: the checkpoint is of sessions with an allowed lateness, whose results "
                "are changes; keep allowed_lateness, or give the operator another uid to begin with no sessions"
            )
        super().load_table(table)

    def last_ends(self, batch: pa.RecordBatch, times: Times) -> Times:
        """Returns the end, in ms, of the session that each row would form alone.

        Raises ConfigurationError or OperatorError for a gap or a time that is not valid.
        """
        ends = row_ends(self.context, batch, times, self._session)
        if isinstance(self._time, str):
            check_last_ends(ends, times, batch.schema.field(self._time).type)
        return ends

    def add_rows(
        self,
        rows: pa.RecordBatch,
        keys: pa.RecordBatch,
        times: Times,
        ends: Times,
        moments: Times | int,
        emit: Emit,
    ) -> None:
        """Stores rows.

        Calls the function at once for sessions that have already ended: stored sessions that late rows join, and new
        sessions.
        """
        # Ended sessions, also the ones that wait to be emitted, end at the watermark or before.
        touches = times - 1 <= moments
        touched = keys.filter(pa.array(touches)) if touches.any() else None
        if touched is not None and self._next_end_ms <= int(np.max(moments)) + 1:
            self._give_ended(touched, emit)
        self._keep_rows(rows, keys, times, ends)
        waits = ends - 1 > moments
        if waits.any():
            self._next_end_ms = min(self._next_end_ms, int(ends[waits].min()))
        if self._lateness_ms and touched is not None:
            self._join(touched, emit)

    def fire(self, until_ms: int, emit: Emit) -> bool:
        """Calls the function with sessions that have ended at `until_ms`, up to the limit of a step. Returns False if
        there were none.

        The rows of a key belong to one session if no pause between them is longer than the gap.
        """
        times, refs, columns = self.scanned(WAITING, [*self._key_names, *self._own_names])
        if not len(times):
            self.done()
            return False
        codes, _, _ = codes_of(columns.select(list(self._key_names)), len(times))
        ends_alone = self._ends_in(columns, times)
        numbers, _, bounds = merged_sessions(codes, times, ends_alone)
        due = bounds[1] - 1 <= until_ms
        if not due.all():
            self._next_end_ms = int(bounds[1][~due].min())
        left = np.flatnonzero(due)
        rest, given = budget(len(times)), 0
        sizes = np.bincount(numbers, minlength=len(due))[left]
        for start, stop in pieces(sizes):
            if rest <= 0:
                self._next_end_ms = MIN_WATERMARK_MS
                break
            some = left[start:stop]
            rest -= self._give(some, refs, times, ends_alone, numbers, bounds, emit)
            given += len(some)
        self.done()
        return given > 0

    def remove_over(self, until_ms: int) -> Iterator[None]:
        """Removes sessions that no late row can join any more. Yields between two steps."""
        while self._lateness_ms and self._over_ms <= until_ms:
            ends, refs, rows = self.scanned(RESULTS, [*self.keys.names, START])
            last = self.last_ms(ends)
            over = np.flatnonzero(last <= until_ms)
            some = over[: budget_over(len(ends))]
            self._over_ms = int(last[last > until_ms].min(initial=MAX_WATERMARK_MS))
            if len(some) < len(over):
                self._over_ms = MIN_WATERMARK_MS
            if not len(some):
                self.done()
                continue
            rows = rows.take(pa.array(some))
            codes, distinct, _ = codes_of(rows.select(self.keys.names), len(some))
            kept = self.tables[KEPT].find(distinct)
            starts = rows.column(START).to_numpy()
            of = _sessions_of(kept.keys, *self._stretches_of(kept.refs, KEPT), codes, starts, ends[some])
            self.tables[KEPT].remove(kept.refs[of >= 0])
            self.tables[RESULTS].remove(refs[some])
            self._changed_rows += len(some) + int(np.count_nonzero(of >= 0))
            self.done()
            yield

    def _give_ended(self, keys: pa.RecordBatch, emit: Emit) -> None:
        """Calls the function with sessions of these keys that have ended but were not passed to the function, because a
        checkpoint was taken between two steps.
        """
        _, distinct, count = codes_of(keys, keys.num_rows)
        moments = np.broadcast_to(self._fired.of_keys(distinct, self.context.max_parallelism), count)
        waiting = self.tables[WAITING].find(distinct)
        times, ends_alone = self._stretches_of(waiting.refs, WAITING)
        numbers, firsts, bounds = merged_sessions(waiting.keys, times, ends_alone)
        ended = np.flatnonzero(bounds[1] - 1 <= moments[waiting.keys[firsts]])
        for start, stop in pieces(np.bincount(numbers, minlength=len(firsts))[ended]):
            self._give(ended[start:stop], waiting.refs, times, ends_alone, numbers, bounds, emit)

    def _give(
        self,
        some: Numbers,
        refs: Refs,
        times: Times,
        ends_alone: Times,
        numbers: Numbers,
        bounds: tuple[Times, Times],
        emit: Emit,
    ) -> int:
        """Calls the function for the first time with sessions made of stored rows. Returns the number of their rows.

        `some` are the numbers of these sessions, and `bounds` the starts and ends of all sessions. `refs`, `times`,
        `ends_alone` and `numbers` have an entry for each row: its reference, its time, the end of its gap, and the
        number of its session.
        """
        place = np.full(len(bounds[0]), -1, dtype=np.int64)
        place[some] = np.arange(len(some))
        chosen = np.flatnonzero(place[numbers] >= 0)
        rows, groups = self.taken(refs[chosen]), place[numbers[chosen]]
        of = bounds[0][some], bounds[1][some]
        if self._lateness_ms:
            self._keep_rows(rows, self.keys_of(refs[chosen]), times[chosen], ends_alone[chosen], KEPT)
        self.tables[WAITING].remove(refs[chosen])
        if self._lateness_ms:
            self._emit_sessions(rows, groups, of, None, groups, emit)
        else:
            self.call(rows, groups, of, emit, self.context)
        return len(chosen)

    def _join(self, keys: pa.RecordBatch, emit: Emit) -> None:
        """Merges waiting rows and ended sessions of these keys that touch each other, and emits the results of the
        merged sessions.
        """
        _, distinct, count = codes_of(keys, keys.num_rows)
        moments = np.broadcast_to(self._fired.of_keys(distinct, self.context.max_parallelism), count)
        waiting = self.tables[WAITING].find(distinct)
        times, ends_alone = self._stretches_of(waiting.refs, WAITING)
        known = self._ended_sessions(distinct)
        # A session that is over but not removed yet may overlap a later one. It only serves to exclude its own rows.
        live = self.last_ms(known.ends) > moments[known.codes]
        former = known.where(live)
        stored = len(former.codes)
        numbers, firsts, bounds = merged_sessions(
            np.concatenate([former.codes, waiting.keys]),
            np.concatenate([former.starts, times]),
            np.concatenate([former.ends, ends_alone]),
        )
        codes = np.concatenate([former.codes, waiting.keys])[firsts]
        joins = np.bincount(numbers[:stored], minlength=len(firsts)) > 0
        grown = np.bincount(numbers[stored:], minlength=len(firsts)) > 0
        ended = bounds[1] - 1 <= moments[codes]
        changed = grown & (joins | ended)
        if not changed.any():
            return
        gone = changed[numbers[:stored]]
        former, of_former, of_waiting = former.where(gone), numbers[:stored][gone], numbers[stored:]
        kept = self.tables[KEPT].find(distinct) if len(former.codes) else self.tables[KEPT].find(distinct.slice(0, 0))
        sessions = np.full(len(known.codes), -1, dtype=np.int64)
        sessions[np.flatnonzero(live)[gone]] = of_former
        kept_in = _sessions_of(kept.keys, *self._stretches_of(kept.refs, KEPT), known.codes, known.starts, known.ends)
        kept_of = np.where(kept_in >= 0, sessions[kept_in], -1) if len(sessions) else kept_in
        kept_refs, of_kept = kept.refs[kept_of >= 0], kept_of[kept_of >= 0]
        sizes = np.bincount(of_waiting, minlength=len(firsts)) + np.bincount(of_kept, minlength=len(firsts))
        later, again = np.flatnonzero(changed & ~ended), np.flatnonzero(changed & ended)
        for start, stop in pieces(sizes[later]):
            some = np.zeros(len(firsts), dtype=np.bool_)
            some[later[start:stop]] = True
            self._wait_again(some, former, of_former, (kept_refs, of_kept), (waiting.refs, of_waiting), emit)
        for start, stop in pieces(sizes[again]):
            of = again[start:stop]
            place = np.full(len(firsts), -1, dtype=np.int64)
            place[of] = np.arange(len(of))
            old, new = place[of_kept] >= 0, place[of_waiting] >= 0
            rows = self.taken(waiting.refs[new])
            both = together([self.taken(kept_refs[old], KEPT), rows])
            groups = np.concatenate([place[of_kept[old]], place[of_waiting[new]]])
            self._keep_rows(rows, self.keys_of(waiting.refs[new]), times[new], ends_alone[new], KEPT)
            self.tables[WAITING].remove(waiting.refs[new])
            back = place[of_former] >= 0
            self._emit_sessions(
                both, groups, (bounds[0][of], bounds[1][of]), former.where(back), place[of_former[back]], emit
            )

    def _wait_again(
        self,
        some: NDArray[np.bool_],
        former: _EndedSessions,
        of_former: Numbers,
        kept: tuple[Refs, Numbers],
        waiting: tuple[Refs, Numbers],
        emit: Emit,
    ) -> None:
        """Retracts the results of sessions that have grown beyond the watermark, and stores their rows again as waiting
        rows.

        `some` marks these sessions. `former` are the ended sessions, and `of_former` has the new session of each.
        `kept` and `waiting` have references to rows and the new session of each row.
        """
        back = former.where(some[of_former])
        parts = [(KEPT, kept[0][some[kept[1]]]), (WAITING, waiting[0][some[waiting[1]]])]
        rows, keys = (together([of(refs, table) for table, refs in parts]) for of in (self.taken, self.keys_of))
        stretches = [self._stretches_of(refs, table) for table, refs in parts]
        times, ends_alone = (np.concatenate(columns) for columns in zip(*stretches, strict=True))
        for table, refs in parts:
            self.tables[table].remove(refs)
        self._keep_rows(rows, keys, times, ends_alone)
        old = self._results_of(back.refs[back.outs])
        self.tables[RESULTS].remove(back.refs)
        self.emit_changes([(DELETE, old)], emit)

    def _emit_sessions(
        self,
        rows: pa.RecordBatch,
        groups: Numbers,
        bounds: tuple[Times, Times],
        former: _EndedSessions | None,
        of_former: Numbers,
        emit: Emit,
    ) -> None:
        """Calls the function with sessions and emits the results. Retracts and removes the results of the ended
        sessions (`former`) that they replace.

        `groups` has the session of each row, `bounds` the starts and ends of the sessions, and `of_former` the session
        that replaces each ended session.
        """
        grouped = self.grouped(rows, groups, bounds)
        has = np.zeros(len(bounds[0]), dtype=np.bool_)
        found = list[pa.RecordBatch]()
        for numbers, batch in self._calls.numbered_results(self.context, grouped):
            has[numbers] = True
            found.append(batch)
        result = together(found) if found else None
        self._note(grouped, bounds, has, result)
        parts, replaces = list[tuple[str, pa.RecordBatch]](), np.zeros(len(has), dtype=np.bool_)
        if former is not None:
            same = has[of_former] & (former.starts == bounds[0][of_former]) & (former.ends == bounds[1][of_former])
            replaces[of_former[same & former.outs]] = True
            parts.append((UPDATE_BEFORE, self._results_of(former.refs[former.outs & same])))
            parts.append((DELETE, self._results_of(former.refs[former.outs & ~same])))
            self.tables[RESULTS].remove(former.refs)
        if result is not None:
            parts.append((UPDATE_AFTER, result.filter(pa.array(replaces[has]))))
            parts.append((INSERT, result.filter(pa.array(~replaces[has]))))
        self.emit_changes(parts, emit)

    def _note(
        self, grouped: Grouped, bounds: tuple[Times, Times], has: NDArray[np.bool_], result: pa.RecordBatch | None
    ) -> None:
        """Stores the bounds and the results of sessions.

        `has` is True for sessions for which the function has returned a row.
        """
        keys, count = grouped.keys, len(has)
        if not self._key_names:
            keys = pa.RecordBatch.from_arrays([pa.array(np.zeros(count, dtype=np.int8))], schema=self.keys)
        at = pa.array(np.cumsum(has) - 1, mask=~has)
        values = [
            pa.nulls(count, field.type) if result is None else result.column(field.name).take(at)
            for field in self._returned
        ]
        self.append(RESULTS, keys, [pa.array(bounds[1]), pa.array(bounds[0]), pa.array(has), *values])
        self._over_ms = min(self._over_ms, int(self.last_ms(bounds[1]).min()))

    def _ended_sessions(self, keys: pa.RecordBatch) -> _EndedSessions:
        """Returns the ended sessions of these keys that were not removed yet."""
        found = self.tables[RESULTS].find(keys)
        rows = self.tables[RESULTS].take(found.refs, [START, PLACE, OUT])
        starts, ends = rows.column(START).to_numpy(), rows.column(PLACE).to_numpy()
        outs = rows.column(OUT).to_numpy(zero_copy_only=False)
        return _EndedSessions(found.refs, found.keys, starts, ends, outs)

    @property
    def _own_names(self) -> list[str]:
        return [] if self._gap_ms is not None else [ROW_END]

    def _keep_rows(
        self, rows: pa.RecordBatch, keys: pa.RecordBatch, times: Times, ends: Times, table: int = WAITING
    ) -> None:
        """Appends rows to a state table, with their times and, if each row has its own gap, the ends of their gaps."""
        self.keep(rows, keys, times, table, () if self._gap_ms is not None else (pa.array(ends),))

    def _stretches_of(self, refs: Refs, table: int) -> tuple[Times, Times]:
        """Returns two arrays in ms for stored rows: their times, and the ends of their session gaps."""
        found = self.tables[table].take(refs, [PLACE, *self._own_names])
        times: Times = found.column(PLACE).to_numpy()
        return times, self._ends_in(found, times)

    def _ends_in(self, columns: pa.RecordBatch, times: Times) -> Times:
        """Returns the ends of the gaps of rows with these times, in ms.

        `columns` has the stored column of ends if each row has its own gap.
        """
        if self._gap_ms is not None:
            return times + self._gap_ms
        ends: Times = columns.column(ROW_END).to_numpy()
        return ends

    def _results_of(self, refs: Refs) -> pa.RecordBatch:
        """Returns the results that were emitted for the sessions with these references, with the columns of the
        output.
        """
        rows = self.tables[RESULTS].take(refs, [*self._key_names, START, PLACE, *self._returned.names])
        assert self._calls.bounds is not None, "sessions without bounds"
        bounds = [bounds_of(rows.column(name).to_numpy(), self._calls.bounds) for name in (START, PLACE)]
        columns = [*rows.select(list(self._key_names)).columns, *bounds, *rows.select(self._returned.names).columns]
        return pa.RecordBatch.from_arrays(columns, names=self._calls.names)

    def emit_changes(self, parts: Sequence[tuple[str, pa.RecordBatch]], emit: Emit) -> None:
        """Emits changes of some kinds, in batches of bounded size."""
        if not parts:
            return
        rows = changes([(kind, batch.columns) for kind, batch in parts], with_kind(parts[-1][1].schema))
        if rows is not None:
            for start in range(0, rows.num_rows, OUTPUT_ROWS_MAX):
                emit(rows.slice(start, OUTPUT_ROWS_MAX))

    @property
    def _returned(self) -> pa.Schema:
        assert self._calls.schema is not None, "results without columns"
        return self._calls.schema


def _kept_columns(calls: WindowCalls) -> list[pa.Field]:
    """Returns the fields of the results, which are stored so that they can be retracted.

    Raises ConfigurationError if the columns are not known, or if they cannot be stored.
    """
    schema = calls.schema
    if schema is None:
        raise ConfigurationError(
            f"{calls.name}: with allowed_lateness the results of a session are stored, to retract them when the "
            "session grows; give schema= with the columns that the function returns"
        )
    if CHANGE in schema.names:
        raise ConfigurationError(
            f"{calls.name}: the function returns a column {CHANGE!r}, which the result already uses for the kind of "
            "each change; give the column another name"
        )
    for field in schema:
        if not decoded_type(field.type).equals(field.type):
            raise ConfigurationError(
                f"{calls.name}: column {field.name!r} is {field.type}; results that may be retracted cannot have "
                f"dictionary columns; give {decoded_type(field.type)} in schema="
            )
    return [field.with_nullable(True) for field in schema]


def _sessions_of(codes: Numbers, times: Times, row_ends: Times, of: Numbers, starts: Times, ends: Times) -> Numbers:
    """Returns the number of the session that each row belongs to, or -1 if it belongs to none.

    Row i of key `codes[i]` is the interval from `times[i]` to `row_ends[i]`. Session j of key `of[j]` is the interval
    from `starts[j]` to `ends[j]`. If several sessions contain a row, the row belongs to the session that ends first.
    Sessions can overlap: a row that arrives after a session is over opens another session, which may contain the first
    session until that one is removed.
    """
    found = np.full(len(codes), -1, dtype=np.int64)
    if not len(of) or not len(codes):
        return found
    order = np.lexsort((ends, of))
    moments = distinct_integers(np.concatenate([ends, row_ends]))
    at = of[order] * len(moments) + np.searchsorted(moments, ends[order])
    place = np.searchsorted(at, codes * len(moments) + np.searchsorted(moments, row_ends), side="left")
    left = np.arange(len(codes))
    while len(left):
        left = left[place[left] < len(order)]
        sessions = order[place[left]]
        same = of[sessions] == codes[left]
        holds = same & (starts[sessions] <= times[left])
        found[left[holds]] = sessions[holds]
        left = left[same & ~holds]
        place[left] += 1
    return found
