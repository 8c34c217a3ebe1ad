"""`SessionWindows` aggregates the rows of each key and session. A row that touches several sessions merges them.

Rules:

- The sessions of a key that have not ended are stored in the order of their starts, numbered from 0. The number is the
  namespace of the state. Sessions do not overlap, so they end in the same order. The first session stores the number of
  sessions.
- A batch merges its rows with the stored sessions of their keys: time intervals that are at most the gap apart are one
  session. A row is the interval from its time to the end of its gap, which may differ from row to row. The sessions of
  these keys are rewritten in one call, so a restored state has only merged sessions.
- When the watermark advances, the operator checks the first session of each key, if any session is due at all. Ended
  sessions are emitted and the other sessions are renumbered from 0, both in one step.
- A row is late if the session that it would form alone ended more than `allowed_lateness` ago. It is dropped and
  counted, and does not open a session again.
- A row never joins a session that is over. After a restore from a checkpoint between two steps, such a session may
  still be in the state. It is emitted before rows of its key are added.
- A session may be emitted more than once, after each batch or because it is kept for late rows. Its bounds change each
  time it grows, and it may replace two sessions. Results are therefore changes (`changes.py`): the previous result is
  retracted before the new one is emitted. The emitted result equals the state, so it is not stored separately; `OUT`
  stores whether it was emitted. A session that grows beyond the watermark is retracted, and emitted again when it ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.changes import DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE, changes, with_kind
from tidegate.operators.operator import Emit, OperatorContext
from tidegate.operators.state.keys import key_columns
from tidegate.operators.windows.window_columns import check_last_ends, row_ends
from tidegate.operators.windows.window_specs import Clock, Numbers, Session, Times
from tidegate.operators.windows.window_state import AggregateWindows, MergedGroups, Parts, codes_of
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.state.common.backend import ValueSpec
from tidegate.state.kernels.jit import kernel
from tidegate.state.kernels.paged import scatter
from tidegate.state.kernels.partition import gather
from tidegate.storage.schemas.column_names import own_name
from tidegate.storage.state.snapshot import StateTable

NUMBER = own_name("session")
"""Name of the namespace column: the index of a session among the sessions of its key, from 0."""
START, END, COUNT = own_name("session_start_ms"), own_name("session_end_ms"), own_name("sessions")
OUT = own_name("session_out")
"""Name of the column that is 1 if the stored session was emitted. Stored only if sessions may be emitted more than
once.
"""


@dataclass(frozen=True, slots=True)
class Pulled:
    """Sessions that were removed from the state in order to be merged.

    Has, for each session, the number of its key, its bounds in ms, and its accumulator columns.
    """

    codes: NDArray[np.int64]
    starts: Times
    ends: Times
    parts: list[Parts]
    """Accumulator columns of the first sessions of all keys, then of the second sessions, and so on.

    Sessions are in the order of `codes`.
    """
    sizes: list[int]
    outs: NDArray[np.bool_]
    """True for each session whose result was emitted."""


class SessionWindows(AggregateWindows):
    """Aggregates of sessions, emitted when a session ends or, with `emit="changes"`, after each batch.

    With an allowed lateness, or `emit="changes"`, the results are a stream of changes.
    """

    def __init__(
        self,
        keys: tuple[str, ...],
        spec: Session,
        aggregates: Mapping[str, Aggregate],
        time: str | Clock,
        emit: Literal["final", "changes"] = "final",
        allowed_lateness_ms: int = 0,
        input_schema: pa.Schema | None = None,
    ) -> None:
        self._every_batch = emit == "changes"
        self._changes = self._every_batch or allowed_lateness_ms > 0
        names = (START, END, COUNT, OUT) if self._changes else (START, END, COUNT)
        extra = tuple(ValueSpec(name, pa.int64(), 0) for name in names)
        shown = "changes" if self._changes else "final"
        super().__init__(keys, spec, aggregates, time, shown, NUMBER, extra, input_schema, allowed_lateness_ms)
        self._spec = spec
        self._next_end_ms = self._next_out_ms = MAX_WATERMARK_MS
        self.holds_back_ms = int(self._clock is None)

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Restores the sessions. Raises CorruptionError for tables of other windows or keys."""
        super().open(context, restored)
        self._look_at_all(self._state.exists)

    def load(self, tables: Sequence[StateTable]) -> None:
        """Loads stored tables into the opened state. Raises CorruptionError for tables of other windows or keys."""
        super().load(tables)
        self._look_at_all(True)

    def next_processing_time_ms(self) -> int | None:
        """Returns the time at which the first session of processing time may end, in ms.

        None for event time, or if no session is open.
        """
        due_ms = min(self._next_end_ms, self._next_out_ms)
        return None if self._clock is None or due_ms == MAX_WATERMARK_MS else due_ms

    def _advance_to(self, moment_ms: int, emit: Emit) -> Iterator[None]:
        """Emits the sessions that have ended at `moment_ms`. Yields after each batch of keys."""
        # Advanced first, because a row that arrives between two steps is late for the sessions that fire in them.
        self._fired.reach(moment_ms)
        # A row that arrives between two steps may move waiting sessions to positions that were checked already.
        while self._state.exists and self._next_out_ms - 1 <= moment_ms:
            self._next_out_ms = MAX_WATERMARK_MS
            yield from self._emit_ended(moment_ms, emit)
        over_ms = max(MIN_WATERMARK_MS, moment_ms - self._lateness_ms)
        if not self._state.exists or self._next_end_ms - 1 > over_ms:
            return
        self._next_end_ms = MAX_WATERMARK_MS
        for stored, slots in self._state.table.scan_namespace(0, OUTPUT_ROWS_MAX):
            ends = self._state.extra(END).raw(slots)
            due = ends - 1 <= over_ms
            if not due.all():
                self._next_end_ms = min(self._next_end_ms, int(ends[~due].min()))
            if due.any():
                rows = np.flatnonzero(due).astype(np.int32)
                keys = gather(self._state.user_keys(stored), rows) if self._keys else self._state.user_keys(stored)
                for batch in self._fire(keys, len(rows), over_ms):
                    emit(batch)
            yield

    def _add_rows(self, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Merges the rows of a batch with the stored sessions of their keys. Returns the results to emit at once."""
        times = self._times(batch)
        ends_alone = row_ends(self.context, batch, times, self._spec)
        if isinstance(self._time, str):
            check_last_ends(ends_alone, times, batch.schema.field(self._time).type)
        keys = key_columns(batch, self._keys)
        late = ends_alone - 1 + self._lateness_ms <= self._fired.of_keys(keys, self.context.max_parallelism)
        if late.any():
            rows = self._drop_late(batch, late).astype(np.int32)
            if not len(rows):
                return []
            batch, keys = gather(batch, rows), gather(keys, rows)
            times, ends_alone = times[rows], ends_alone[rows]
        codes, distinct, count = codes_of(keys, len(times))
        pulled = self._pull(distinct, count)
        moments = np.broadcast_to(self._fired.of_keys(distinct, self.context.max_parallelism), count)
        over = pulled.ends - 1 + self._lateness_ms <= moments[pulled.codes]
        # Sessions that are over get separate numbers, after the numbers of all keys, so that rows do not join them.
        of = np.concatenate([pulled.codes + count * over, codes])
        starts = np.concatenate([pulled.starts, times])
        ends = np.concatenate([pulled.ends, ends_alone])
        numbers, firsts, bounds = merged_sessions(of, starts, ends)
        merged = MergedGroups(self._state, len(firsts))
        stored = len(pulled.codes)
        for start, size, parts in zip(np.cumsum([0, *pulled.sizes])[:-1], pulled.sizes, pulled.parts, strict=True):
            merged.merge(numbers[start : start + size], parts)
        merged.update(batch, numbers[stored:])
        merged.done()
        codes = of[firsts]
        stays = codes < count
        outs, updates = np.zeros(len(firsts), dtype=np.bool_), list[pa.RecordBatch]()
        outs[numbers[:stored]] = pulled.outs
        if not stays.all():
            gone = np.flatnonzero(~stays & ~outs)
            ended = self._result(distinct, codes[gone] - count, bounds[0][gone], bounds[1][gone], merged.results(gone))
            updates = self.change_batches([(INSERT, ended)] if len(gone) else []) if self._changes else [ended]
        if self._changes:
            grown = np.zeros(len(firsts), dtype=np.bool_)
            grown[numbers[stored:]] = True
            outs[grown] = self._every_batch | (bounds[1] - 1 <= moments[codes % count])[grown]
            updates += self._updates(distinct, codes, pulled, numbers[:stored], grown, outs, bounds, merged)
            if not outs[stays].all():
                self._next_out_ms = min(self._next_out_ms, int(bounds[1][stays & ~outs].min()))
        left = np.flatnonzero(stays)
        held = merged.parts(left)
        self._put(distinct, codes[left], bounds[0][left], bounds[1][left], outs[left], held)
        self._next_end_ms = min(self._next_end_ms, int(bounds[1][left].min()))
        return updates

    def _updates(
        self,
        keys: pa.RecordBatch,
        codes: Numbers,
        pulled: Pulled,
        numbers: Numbers,
        grown: NDArray[np.bool_],
        outs: NDArray[np.bool_],
        bounds: tuple[Times, Times],
        merged: MergedGroups,
    ) -> list[pa.RecordBatch]:
        """Returns the changes of sessions that have grown: retractions of old results, and new results.

        `codes`, `grown`, `outs`, `bounds` and `merged` describe the merged sessions: key number, whether it has grown,
        whether it is emitted, bounds, and aggregates. `numbers` has the merged session of each session in `pulled`.
        """
        emitted = np.flatnonzero(pulled.outs & grown[numbers])
        before = MergedGroups(self._state, len(pulled.codes)) if len(emitted) else merged
        for start, size, parts in zip(np.cumsum([0, *pulled.sizes])[:-1], pulled.sizes, pulled.parts, strict=True):
            if len(emitted):
                before.merge(np.arange(start, start + size), parts)
        before.done()
        into = numbers[emitted]
        same = outs[into] & (pulled.starts[emitted] == bounds[0][into]) & (pulled.ends[emitted] == bounds[1][into])
        after = np.flatnonzero(grown & outs)
        replaces = np.isin(after, into[same])
        parts_of = (
            (UPDATE_BEFORE, emitted[same], (pulled.codes, pulled.starts, pulled.ends), before),
            (DELETE, emitted[~same], (pulled.codes, pulled.starts, pulled.ends), before),
            (UPDATE_AFTER, after[replaces], (codes, *bounds), merged),
            (INSERT, after[~replaces], (codes, *bounds), merged),
        )
        found = [
            (kind, self._result(keys, of[rows], starts[rows], ends[rows], groups.results(rows)))
            for kind, rows, (of, starts, ends), groups in parts_of
            if len(rows)
        ]
        return self.change_batches(found)

    def _emit_ended(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        """Emits ended sessions that were not emitted before.

        They stay in the state. Yields after each batch of keys.
        """
        number, some = 0, True
        while some:
            some = False
            for stored, slots in self._state.table.scan_namespace(number, OUTPUT_ROWS_MAX):
                some = True
                ends, waiting = self._state.extra(END).raw(slots), self._state.extra(OUT).raw(slots) == 0
                due = waiting & (ends - 1 <= watermark_ms)
                later = ends[waiting & ~due]
                if len(later):
                    self._next_out_ms = min(self._next_out_ms, int(later.min()))
                if due.any():
                    starts, results = self._state.extra(START).raw(slots), self._state.results(slots[due])
                    rows = np.flatnonzero(due)
                    found = self._result(self._state.user_keys(stored), rows, starts[due], ends[due], results)
                    upserted = self._state.table.upsert(gather(stored, rows.astype(np.int32)))
                    scatter(self._state.extra(OUT).pages, upserted.slots, np.ones(len(rows), dtype=np.int64))
                    self._state.table.done()
                    self._changed_rows += len(rows)
                    for batch in self.change_batches([(INSERT, found)]):
                        emit(batch)
                yield
            number += 1

    def _result(
        self, keys: pa.RecordBatch, rows: Numbers, starts: Times, ends: Times, results: list[pa.Array]
    ) -> pa.RecordBatch:
        """Returns the result rows of sessions.

        `rows` has the index of each session's key in `keys`, and `starts` and `ends` its bounds.
        """
        assert self._fired.time_type is not None, "results before the first row"
        of = gather(keys, rows.astype(np.int32)) if self._keys else keys
        return self._rows.output_of(of, starts, ends, results, self._fired.time_type, self._spec)

    def change_batches(self, parts: Sequence[tuple[str, pa.RecordBatch]]) -> list[pa.RecordBatch]:
        """Returns changes as batches of bounded size. `parts` are pairs of a kind of change and its rows."""
        if not parts:
            return []
        rows = changes([(kind, batch.columns) for kind, batch in parts], with_kind(parts[0][1].schema))
        assert rows is not None, "parts without rows"
        return [rows.slice(start, OUTPUT_ROWS_MAX) for start in range(0, rows.num_rows, OUTPUT_ROWS_MAX)]

    def _look_at_all(self, restored: bool) -> None:
        """Makes the next watermark check all stored sessions, because a restore does not bring their ends into
        memory.
        """
        self._next_end_ms = MIN_WATERMARK_MS if restored else MAX_WATERMARK_MS
        self._next_out_ms = self._next_end_ms if self._changes else MAX_WATERMARK_MS

    def _pull(self, keys: pa.RecordBatch, count: int) -> Pulled:
        """Removes all sessions of `count` distinct keys from the state, and returns them."""
        table = self._state.table
        codes: list[NDArray[np.int64]] = []
        starts: list[Times] = []
        ends: list[Times] = []
        parts: list[Parts] = []
        outs: list[Numbers] = []
        left = np.arange(count, dtype=np.int32)
        sessions = np.zeros(count, dtype=np.int64)
        number = 0
        while len(left):
            of = gather(keys, left) if self._keys else keys
            upserted = table.upsert(self._state.stored_keys(np.full(len(left), number, dtype=np.int64), of))
            known = np.delete(np.arange(len(left), dtype=np.int32), upserted.new_rows)
            slots = upserted.slots[known]
            if number == 0 and len(upserted.new_rows):
                self._state.check_owner(gather(of, upserted.new_rows) if self._keys else of)
            assert number == 0 or len(known) == len(left), "a session is missing among those of its key"
            if number == 0:
                sessions[known] = self._state.extra(COUNT).raw(slots)
            if len(known):
                codes.append(left[known].astype(np.int64))
                starts.append(self._state.extra(START).raw(slots))
                ends.append(self._state.extra(END).raw(slots))
                parts.append(self._state.parts(slots))
                if self._changes:
                    outs.append(self._state.extra(OUT).raw(slots))
            table.remove(upserted.slots)
            table.done()
            number += 1
            going_on = sessions > number
            left, sessions = left[going_on], sessions[going_on]
        self._changed_rows += sum(map(len, codes))
        none = [np.zeros(0, dtype=np.int64)]
        of_keys, begins, stops, emitted = (np.concatenate([*none, *column]) for column in (codes, starts, ends, outs))
        flags = emitted == 1 if self._changes else np.zeros(len(of_keys), dtype=np.bool_)
        return Pulled(of_keys, begins, stops, parts, [len(each) for each in codes], flags)

    def _put(
        self, keys: pa.RecordBatch, codes: Numbers, starts: Times, ends: Times, outs: NDArray[np.bool_], parts: Parts
    ) -> None:
        """Stores sessions of keys that have no sessions in the state.

        The sessions are sorted by key and start. `codes` has the index of each session's key in `keys`.
        """
        if not len(codes):
            return
        first = np.flatnonzero(np.diff(codes, prepend=-1))
        counts = np.diff([*first, len(codes)])
        numbers = np.arange(len(codes)) - np.repeat(first, counts)
        rows = codes.astype(np.int32)
        of = gather(keys, rows) if self._keys else keys
        upserted = self._state.table.upsert(self._state.stored_keys(numbers, of))
        assert len(upserted.new_rows) == len(codes), "a session in the place of another one"
        columns = {START: starts, END: ends, COUNT: np.repeat(counts, counts)} | ({OUT: outs} if self._changes else {})
        for name, values in columns.items():
            scatter(self._state.extra(name).pages, upserted.slots, values.astype(np.int64))
        self._state.merge(upserted.slots, parts)
        self._state.table.done()
        self._changed_rows += len(codes)

    def _fire(self, keys: pa.RecordBatch, count: int, watermark_ms: int) -> list[pa.RecordBatch]:
        """Removes the ended sessions of `count` distinct keys from the state.

        Returns the results that were not emitted before.
        """
        pulled = self._pull(keys, count)
        order = np.lexsort((pulled.starts, pulled.codes))
        parts = [
            [pa.concat_arrays([part[group][column] for part in pulled.parts]) for column in range(len(columns))]
            for group, columns in enumerate(pulled.parts[0])
        ]
        codes, starts, ends = (each[order] for each in (pulled.codes, pulled.starts, pulled.ends))
        outs = pulled.outs[order]
        due = ends - 1 <= watermark_ms
        left = ~due
        if left.any():
            held = [[column.take(pa.array(order[left])) for column in columns] for columns in parts]
            self._put(keys, codes[left], starts[left], ends[left], outs[left], held)
            self._next_end_ms = min(self._next_end_ms, int(ends[left].min()))
        if self._changes:
            assert bool(outs[due].all()), "a session goes that has not come out"
            return []
        ended = MergedGroups(self._state, int(due.sum()))
        every = np.arange(int(due.sum()))
        ended.merge(every, [[column.take(pa.array(order[due])) for column in columns] for columns in parts])
        ended.done()
        rows = self._result(keys, codes[due], starts[due], ends[due], ended.results(every))
        return [rows.slice(start, OUTPUT_ROWS_MAX) for start in range(0, rows.num_rows, OUTPUT_ROWS_MAX)]


def merged_sessions(
    codes: NDArray[np.int64], starts: Times, ends: Times
) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[Times, Times]]:
    """Merges the time intervals of each key that overlap or touch into sessions.

    `codes` has the key number of each interval. Returns the session number of each interval, the index of one interval
    of each session, and the starts and ends of the sessions. Sessions are numbered in the order of keys and starts.
    """
    order = np.lexsort((starts, codes))
    numbers = np.empty(len(codes), dtype=np.int64)
    firsts, begins, stops = (np.empty(len(codes), dtype=np.int64) for _ in range(3))
    count = _merge(order, codes, starts, ends, numbers, firsts, begins, stops)
    return numbers, firsts[:count], (begins[:count], stops[:count])


@kernel
def _merge(
    order: NDArray[np.int64],
    codes: NDArray[np.int64],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    numbers: NDArray[np.int64],
    firsts: NDArray[np.int64],
    begins: NDArray[np.int64],
    stops: NDArray[np.int64],
) -> int:
    count = 0
    for i in range(order.shape[0]):
        row = order[i]
        if count == 0 or codes[row] != codes[firsts[count - 1]] or starts[row] > stops[count - 1]:
            firsts[count] = row
            begins[count] = starts[row]
            stops[count] = ends[row]
            count += 1
        elif ends[row] > stops[count - 1]:
            stops[count - 1] = ends[row]
        numbers[row] = count - 1
    return count
