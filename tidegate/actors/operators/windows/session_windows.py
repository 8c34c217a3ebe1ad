"""`SessionWindows`: aggregates of each key and session. Sessions that a row joins become one.

Rules:

- The sessions of a key that have not ended lie in the state in the order of their starts, numbered from 0 (the
  namespace). They do not overlap, so they end in this order too. The first one says how many there are.
- A batch brings its rows and the stored sessions of their keys together: what is at most the gap apart is one session.
  The sessions of these keys are written anew, all in the same call, so a restore finds them merged.
- When the watermark passes, the first session of each key is looked at, if any session is due at all. Those that have
  ended come out, and the rest moves up, both in one step.
- A row is late if a session of it alone has ended. It is dropped and counted, and opens no session again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.actors.kernels.hashing import hash_columns
from tidegate.actors.kernels.jit import kernel
from tidegate.actors.kernels.paged import scatter
from tidegate.actors.kernels.partition import gather
from tidegate.actors.operators.aggregates.aggregate import Aggregate
from tidegate.actors.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.actors.operators.operator import Emit, OperatorContext
from tidegate.actors.operators.state.keys import key_columns
from tidegate.actors.operators.windows.merged_groups import MergedGroups, codes_of
from tidegate.actors.operators.windows.window_operator import WindowOperator
from tidegate.actors.operators.windows.window_specs import Session, Times
from tidegate.actors.operators.windows.window_state import Parts
from tidegate.actors.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.actors.state_backends.common.backend import ValueSpec
from tidegate.storage.state.key_groups import key_groups_of
from tidegate.storage.state.snapshot import StateTable

NUMBER = "session"
"""The column of the namespace: which one it is of the key's sessions."""
START, END, COUNT = "session_start_ms", "session_end_ms", "sessions"
_EXTRA = tuple(ValueSpec(name, pa.int64(), 0) for name in (START, END, COUNT))


@dataclass(frozen=True, slots=True)
class Pulled:
    """Sessions that were taken out of the state: for each the number of its key, its bounds, and accumulators."""

    codes: NDArray[np.int64]
    starts: Times
    ends: Times
    parts: list[Parts]
    """Those of the first sessions of keys, then of the second ones, and so on: together in the order of `codes`."""
    sizes: list[int]


class SessionWindows(WindowOperator):
    """Aggregates of sessions of event time."""

    def __init__(self, keys: tuple[str, ...], spec: Session, aggregates: Mapping[str, Aggregate], time: str) -> None:
        super().__init__(keys, spec, aggregates, time, "final", NUMBER, _EXTRA)
        self._spec = spec

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """CorruptionError as of all windows."""
        super().open(context, restored)
        # Not known after a restore: the first watermark looks at all.
        self._next_end_ms = MIN_WATERMARK_MS if self._state.exists else MAX_WATERMARK_MS

    def load(self, tables: Sequence[StateTable]) -> None:
        """CorruptionError as of all windows."""
        super().load(tables)
        self._next_end_ms = MIN_WATERMARK_MS

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        """Emit the sessions that have ended, in steps of a batch of keys."""
        # First of all: a row that comes between two steps is late for what fires in them.
        for groups, moment_ms in [*self._fired.runs()]:
            self._fired.advance(groups, max(moment_ms, watermark_ms))
        if not self._state.exists or self._next_end_ms - 1 > watermark_ms:
            return
        self._next_end_ms = MAX_WATERMARK_MS
        for stored, slots in self._state.table.scan_namespace(0, OUTPUT_ROWS_MAX):
            ends = self._state.extra(END).raw(slots)
            due = ends - 1 <= watermark_ms
            if not due.all():
                self._next_end_ms = min(self._next_end_ms, int(ends[~due].min()))
            if due.any():
                rows = np.flatnonzero(due).astype(np.int32)
                keys = gather(self._state.user_keys(stored), rows) if self._keys else self._state.user_keys(stored)
                for batch in self._fire(keys, len(rows), watermark_ms):
                    emit(batch)
            yield

    def _take_in(self, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Merge the rows with the sessions of their keys."""
        times = self._times(batch)
        keys = key_columns(batch, self._keys)
        last = self._spec.last_end_ms(times) - 1
        late = last <= self._moments(keys, len(times))
        if late.any():
            rows = self._drop_late(batch, late)
            if not len(rows):
                return []
            batch, keys, times = gather(batch, rows), gather(keys, rows), times[rows]
        codes, distinct, count = codes_of(keys, len(times))
        pulled = self._pull(distinct, count)
        of = np.concatenate([pulled.codes, codes])
        starts = np.concatenate([pulled.starts, times])
        ends = np.concatenate([pulled.ends, times + self._spec.gap_ms])
        numbers, firsts, bounds = merged_sessions(of, starts, ends)
        merged = MergedGroups(self._state, len(firsts))
        stored = len(pulled.codes)
        for start, size, parts in zip(np.cumsum([0, *pulled.sizes])[:-1], pulled.sizes, pulled.parts, strict=True):
            merged.merge(numbers[start : start + size], parts)
        merged.update(batch, numbers[stored:])
        merged.done()
        held = merged.parts(np.arange(len(firsts)))
        self._put(distinct, of[firsts], bounds[0], bounds[1], held)
        self._next_end_ms = min(self._next_end_ms, int(bounds[1].min()))
        return []

    def _moments(self, keys: pa.RecordBatch, rows: int) -> Times | int:
        """Up to when sessions have fired, for each row."""
        runs = [*self._fired.runs()]
        if len(runs) == 1:
            return runs[0][1]
        groups = key_groups_of(hash_columns(keys, self._keys), self.context.max_parallelism)
        moments = np.full(rows, MIN_WATERMARK_MS, dtype=np.int64)
        for of, moment_ms in runs:
            moments[(groups >= of.start) & (groups < of.stop)] = moment_ms
        return moments

    def _pull(self, keys: pa.RecordBatch, count: int) -> Pulled:
        """Take the sessions of some distinct keys out of the state."""
        table = self._state.table
        codes: list[NDArray[np.int64]] = []
        starts: list[Times] = []
        ends: list[Times] = []
        parts: list[Parts] = []
        left = np.arange(count, dtype=np.int32)
        sessions = np.zeros(count, dtype=np.int64)
        number = 0
        while len(left):
            of = gather(keys, left) if self._keys else keys
            upserted = table.upsert(self._state.stored_keys(np.full(len(left), number, dtype=np.int64), of))
            known = np.setdiff1d(np.arange(len(left), dtype=np.int32), upserted.new_rows)
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
            table.remove(upserted.slots)
            table.done()
            number += 1
            going_on = sessions > number
            left, sessions = left[going_on], sessions[going_on]
        self._changed_rows += sum(map(len, codes))
        none = [np.zeros(0, dtype=np.int64)]
        of_keys, begins, stops = (np.concatenate([*none, *column]) for column in (codes, starts, ends))
        return Pulled(of_keys, begins, stops, parts, [len(each) for each in codes])

    def _put(self, keys: pa.RecordBatch, codes: NDArray[np.int64], starts: Times, ends: Times, parts: Parts) -> None:
        """Put sessions of keys that have none, in the order of keys and starts."""
        if not len(codes):
            return
        first = np.flatnonzero(np.diff(codes, prepend=-1))
        counts = np.diff([*first, len(codes)])
        numbers = np.arange(len(codes)) - np.repeat(first, counts)
        rows = codes.astype(np.int32)
        of = gather(keys, rows) if self._keys else keys
        upserted = self._state.table.upsert(self._state.stored_keys(numbers, of))
        assert len(upserted.new_rows) == len(codes), "a session in the place of another one"
        for name, values in ((START, starts), (END, ends), (COUNT, np.repeat(counts, counts))):
            scatter(self._state.extra(name).pages, upserted.slots, values.astype(np.int64))
        self._state.merge(upserted.slots, parts)
        self._state.table.done()
        self._changed_rows += len(codes)

    def _fire(self, keys: pa.RecordBatch, count: int, watermark_ms: int) -> list[pa.RecordBatch]:
        """Take the sessions of keys that have ended out of the state. Returns their results."""
        pulled = self._pull(keys, count)
        order = np.lexsort((pulled.starts, pulled.codes))
        parts = [
            [pa.concat_arrays([part[group][column] for part in pulled.parts]) for column in range(len(columns))]
            for group, columns in enumerate(pulled.parts[0])
        ]
        codes, starts, ends = pulled.codes[order], pulled.starts[order], pulled.ends[order]
        due = ends - 1 <= watermark_ms
        ended = MergedGroups(self._state, int(due.sum()))
        every = np.arange(int(due.sum()))
        ended.merge(every, [[column.take(pa.array(order[due])) for column in columns] for columns in parts])
        ended.done()
        left = ~due
        if left.any():
            held = [[column.take(pa.array(order[left])) for column in columns] for columns in parts]
            self._put(keys, codes[left], starts[left], ends[left], held)
            self._next_end_ms = min(self._next_end_ms, int(ends[left].min()))
        results = ended.results(every)
        of = gather(keys, codes[due].astype(np.int32)) if self._keys else keys
        assert self._fired.time_type is not None, "results before the first row"
        rows = self._rows.output_of(of, starts[due], ends[due], results, self._fired.time_type, self._spec)
        return [rows.slice(start, OUTPUT_ROWS_MAX) for start in range(0, rows.num_rows, OUTPUT_ROWS_MAX)]


def merged_sessions(
    codes: NDArray[np.int64], starts: Times, ends: Times
) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[Times, Times]]:
    """Merge stretches of time of the same key that overlap or touch.

    Returns the number of the session that each belongs to, in the order of keys and starts; for each session a member,
    and its bounds.
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
