"""`AppliedWindows`: a function gets all rows of each key and window of time, when the window has ended.

Rules, beside those of `timed_windows.py` and `kept_windows.py`:

- A row is kept once for each of its windows (as Flink keeps it), under the end of the window.
- With an allowed lateness, a row that comes when its window has fired gives the function all rows of the key and window
  once more, after its batch.
- Sessions are in `applied_sessions.py`.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.operator import Emit
from tidegate.operators.windows.assigned_windows import ends_of
from tidegate.operators.windows.kept_windows import KeptWindows
from tidegate.operators.windows.process_windows import FunctionCalls
from tidegate.operators.windows.timed_windows import budget, parts_of, pieces
from tidegate.operators.windows.window_buffer import WAITING, Numbers
from tidegate.operators.windows.window_specs import Times
from tidegate.protocol.stream_elements import MIN_WATERMARK_MS
from tidegate.state.kernels.hashing import hash_columns


class AppliedWindows(KeptWindows):
    """Calls a function with the rows of each key and window."""

    def take_in(
        self,
        rows: pa.RecordBatch,
        keys: pa.RecordBatch,
        times: Times,
        ends: Times,
        moments: Times | int,
        emit: Emit,
    ) -> None:
        """Keep rows for their windows. Those whose windows have fired, and are kept, come out again at once."""
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
        """The numbers of rows and the ends of their windows, row by row: so those of a window stay in their order."""
        found = [*ends_of(self._known, times)]
        if len(found) == 1:
            return found[0]
        numbers, ends = (np.concatenate(columns) for columns in zip(*found, strict=True))
        order = np.argsort(numbers, kind="stable")
        return numbers[order], ends[order]

    def fire(self, until_ms: int, emit: Emit) -> bool:
        """Give the function windows that have ended, as many as a step may. Returns whether there were any."""
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
        """Give the function due rows, as many as a step may. Returns the others."""
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
        """The same end by end, until a timer comes before the next one."""
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
        """The first windows among due rows, with about as many rows as a function gets at once."""
        due_ends, counts = np.unique(ends[due], return_counts=True)
        _, windows = next(pieces(counts))
        chosen: Numbers = due[ends[due] <= due_ends[windows - 1]]
        return self._some_keys(refs, chosen) if parts_of(len(chosen)) > 1 and self._key_names else chosen

    def _some_keys(self, refs: NDArray[np.int64], chosen: Numbers) -> Numbers:
        """Those of some rows of a window whose keys are about as many as a step may have."""
        keys = self.keys_of(refs[chosen])
        parts = hash_columns(keys, self.keys.names) % np.uint64(parts_of(len(chosen)))
        some: Numbers = chosen[parts == parts[0]]
        return some
