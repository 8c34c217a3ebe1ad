"""`AppliedCounts` and `AppliedSlidingCounts`: a function gets the rows of windows of `n` rows of a key.

Rules are those of `windows/count_windows.py`, also for time-outs and the end of the input, and of
`windows/sliding_counts.py`:

- Of windows that do not overlap, the rows of those that are not full are kept, each with the moment at which the
  time-out of its window comes.
- Of windows with a slide, the rows that the next window of a key has so far are kept, each with its number in the key.
  These are always some, so the number of the last one is how many rows of the key have come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.operator import Emit
from tidegate.operators.operator_errors import blame
from tidegate.operators.watermarks.late_rows import LEFT_RECORDS
from tidegate.operators.windows.count_windows import dealt_out
from tidegate.operators.windows.due_keys import CountTimeouts
from tidegate.operators.windows.merged_groups import codes_of
from tidegate.operators.windows.timed_windows import pieces
from tidegate.operators.windows.window_buffer import PLACE, Numbers, WindowBuffer
from tidegate.operators.windows.window_calls import WindowCalls
from tidegate.operators.windows.window_specs import Count
from tidegate.state.common.row_table import FoundRows
from tidegate.storage.schemas.one_batch import one_batch
from tidegate.storage.state.snapshot import StateTable

_KEYS_A_STEP = 1_024
"""At the end of the input this many windows are given in a step."""


class AppliedCounts(CountTimeouts, WindowBuffer):
    """Calls a function with count windows."""

    def __init__(self, keys: tuple[str, ...], spec: Count, schema: pa.Schema, calls: WindowCalls) -> None:
        CountTimeouts.__init__(self, spec.timeout_ms)
        WindowBuffer.__init__(self, keys, schema, calls)
        self._size, self._fires_at_end = spec.rows, spec.fire_at_end

    def load(self, tables: Sequence[StateTable]) -> None:
        """CorruptionError and ConfigurationError as of all rows."""
        super().load(tables)
        self.find_timeouts()

    def finish(self, emit: Emit) -> Iterator[None]:
        """Give the function the windows that are open, if that was asked for. Else count their rows."""
        if self._fires_at_end:
            keys, _ = self._open_keys()
            for start in range(0, keys.num_rows, _KEYS_A_STEP):
                self._give(keys.slice(start, _KEYS_A_STEP), None, emit)
                yield
            return
        left = sum(len(refs) for _, refs in self.tables[0].scan([PLACE], OUTPUT_ROWS_MAX))
        if left:
            self.context.metrics.counter(LEFT_RECORDS).inc(left)

    def open_windows(self) -> Iterator[tuple[pa.RecordBatch, NDArray[np.int64]]]:
        """The stored keys that have an open window, and when its time-out comes."""
        yield self._open_keys()

    def fire_due(self, keys: pa.RecordBatch, now_ms: int, emit: Emit) -> None:
        """Give the function the windows of some distinct keys, where their time-out has come."""
        self._give(keys, now_ms, emit)

    def _open_keys(self) -> tuple[pa.RecordBatch, NDArray[np.int64]]:
        """The distinct stored keys that have an open window, and when its time-out comes."""
        places, _, keys = self.scanned(0, self.keys.names)
        if not keys.num_rows:
            return pa.RecordBatch.from_pylist([], self.keys), places
        codes, distinct, _ = codes_of(keys, keys.num_rows)
        return distinct, places[np.unique(codes, return_index=True)[1]]

    def _give(self, keys: pa.RecordBatch, now_ms: int | None, emit: Emit) -> None:
        """Give the function the windows of some distinct keys whose time-out has come by now; None: all windows."""
        table = self.tables[0]
        found = table.find(keys)
        places = self.places_of(found.refs)
        due = np.ones(len(places), dtype=np.bool_) if now_ms is None else places <= now_ms
        waiting = ~due
        if waiting.any():
            rows = pa.array(np.unique(found.keys[waiting]))
            self.wait_for(int(places[waiting].min()), keys.take(rows))
        rows, refs = self.taken(found.refs[due]), found.refs[due]
        groups = np.unique(found.keys[due], return_inverse=True)[1]
        table.remove(refs)
        table.done()
        if len(refs):
            self.call(rows, groups, None, emit, self.context)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Give the function the windows that are full, and keep the other rows."""
        with blame(self.context, batch):
            rows, keys = self.rows_of(batch)
        self.check_owner(keys)
        table = self.tables[0]
        codes, distinct, count = codes_of(keys, batch.num_rows)
        found = table.find(distinct)
        held = np.bincount(found.keys, minlength=count)
        windows, firsts, _, of_keys, full = dealt_out(codes, held, self._size)
        of_stored = firsts[found.keys]
        now_ms = self.context.time.now_ms
        dues = np.full(len(of_keys), 0 if self._timeout_ms is None else now_ms + self._timeout_ms, dtype=np.int64)
        if self._timeout_ms is not None:
            begun = ~full
            dues[of_stored] = self.places_of(found.refs)
            begun[of_stored] = False
            if begun.any():
                self.wait_for(now_ms + self._timeout_ms, distinct.take(pa.array(of_keys[begun])))
        stays = ~full[windows]
        came = np.flatnonzero(~stays)
        taken = found.refs[full[of_stored]]
        stored = self.taken(taken)
        table.remove(taken)
        left = pa.array(np.flatnonzero(stays))
        self.keep(rows.take(left), keys.take(left), dues[windows[stays]])
        table.done()
        self.forget_full()
        if not len(came):
            return
        both = one_batch(pa.Table.from_batches([stored, rows.take(pa.array(came))]), "rows of windows")
        numbers = np.full(len(of_keys), -1, dtype=np.int64)
        numbers[full] = np.arange(int(full.sum()))
        groups = np.concatenate([numbers[of_stored[full[of_stored]]], numbers[windows[came]]])
        self.call(both, groups, None, emit, self.context)


class AppliedSlidingCounts(WindowBuffer):
    """Calls a function with the last `rows` rows of a key, after every `slide` rows."""

    def __init__(self, keys: tuple[str, ...], spec: Count, schema: pa.Schema, calls: WindowCalls) -> None:
        assert spec.slide is not None, "windows that do not overlap"
        super().__init__(keys, schema, calls)
        self._size, self._slide, self._fires_at_end = spec.rows, spec.slide, spec.fire_at_end

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Give the function the windows that the rows complete, and keep what the next ones need."""
        with blame(self.context, batch):
            rows, keys = self.rows_of(batch)
        self.check_owner(keys)
        table = self.tables[0]
        codes, distinct, count = codes_of(keys, batch.num_rows)
        found = table.find(distinct)
        stored = self.places_of(found.refs)
        seen = np.zeros(count, dtype=np.int64)
        seen[found.keys] = stored + 1  # the last row of each key counts
        order = np.argsort(codes, kind="stable")
        added = np.bincount(codes, minlength=count)
        numbers = np.empty(len(codes), dtype=np.int64)
        numbers[order] = np.arange(len(codes)) - np.repeat(np.cumsum(added) - added - seen, added)
        self._give_completed(rows, codes, numbers, found, stored, seen, emit)
        least = np.maximum(0, ((seen + added) // self._slide + 1) * self._slide - self._size)
        table.remove(found.refs[stored < least[found.keys]])
        stays = np.flatnonzero(numbers >= least[codes])
        left = pa.array(stays)
        self.keep(rows.take(left), keys.take(left), numbers[stays])
        table.done()

    def finish(self, emit: Emit) -> Iterator[None]:
        """Give the function the next window of each key, if that was asked for. Else count rows after the last one."""
        places, _, keys = self.scanned(0, self.keys.names)
        if not len(places):
            return
        codes, distinct, count = codes_of(keys, len(places))
        seen = np.zeros(count, dtype=np.int64)
        np.maximum.at(seen, codes, places + 1)
        since = seen % self._slide
        if not self._fires_at_end:
            if since.any():
                self.context.metrics.counter(LEFT_RECORDS).inc(int(since.sum()))
            return
        left = distinct.take(pa.array(np.flatnonzero(since)))
        table = self.tables[0]
        for start in range(0, left.num_rows, _KEYS_A_STEP):
            found = table.find(left.slice(start, _KEYS_A_STEP))
            rows = self.taken(found.refs)
            table.remove(found.refs)
            table.done()
            self.call(rows, found.keys, None, emit, self.context)
            yield

    def _give_completed(
        self,
        rows: pa.RecordBatch,
        codes: Numbers,
        numbers: Numbers,
        found: FoundRows,
        stored: Numbers,
        seen: Numbers,
        emit: Emit,
    ) -> None:
        """Give the function the windows that rows complete, in the order of these rows.

        `codes` and `numbers` are of the rows of the batch, `found` and `stored` (numbers too) of those before them, and
        `seen` is how many rows of each key came before.
        """
        completing = np.flatnonzero((numbers + 1) % self._slide == 0)
        if not len(completing):
            return
        # All rows of a key one after the other, those that are stored first: a window is a stretch of them.
        of_rows = np.concatenate([found.keys, codes])
        places = np.concatenate([stored, numbers])
        track = np.lexsort((places, of_rows))
        begins = np.searchsorted(of_rows[track], np.arange(len(seen)))
        firsts = places[track[begins]]
        of = codes[completing]
        ends = numbers[completing] + 1
        starts = np.maximum(0, ends - self._size)
        sizes = ends - starts
        starts += begins[of] - firsts[of]
        for start, stop in pieces(sizes):
            groups = np.repeat(np.arange(stop - start), sizes[start:stop])
            within = np.arange(len(groups)) - np.repeat(
                np.cumsum(sizes[start:stop]) - sizes[start:stop] - starts[start:stop], sizes[start:stop]
            )
            chosen, at = np.unique(track[within], return_inverse=True)
            before = chosen < len(stored)
            both = one_batch(
                pa.Table.from_batches(
                    [self.taken(found.refs[chosen[before]]), rows.take(pa.array(chosen[~before] - len(stored)))]
                ),
                "rows of windows",
            )
            self.call(both.take(pa.array(at.reshape(-1))), groups, None, emit, self.context)
