"""`AppliedCounts`: a function gets every so many rows of a key, in the order in which they come.

Rules are those of `windows/count_windows.py`, also for time-outs and the end of the input. The rows of windows that are
not full are kept, each with the moment at which the time-out of its window comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.actors.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.actors.operators.operator import Emit
from tidegate.actors.operators.operator_errors import blame
from tidegate.actors.operators.watermarks.late_rows import LEFT_RECORDS
from tidegate.actors.operators.window_functions.window_buffer import PLACE, WindowBuffer
from tidegate.actors.operators.window_functions.window_calls import WindowCalls
from tidegate.actors.operators.windows.count_windows import dealt_out
from tidegate.actors.operators.windows.due_keys import DueKeys
from tidegate.actors.operators.windows.merged_groups import codes_of
from tidegate.actors.operators.windows.window_specs import Count
from tidegate.storage.schemas.one_batch import one_batch
from tidegate.storage.state.snapshot import StateTable

_KEYS_A_STEP = 1_024
"""At the end of the input this many windows are given in a step."""


class AppliedCounts(WindowBuffer):
    """Calls a function with windows of so many rows."""

    def __init__(self, keys: tuple[str, ...], spec: Count, schema: pa.Schema, calls: WindowCalls) -> None:
        super().__init__(keys, schema, calls)
        self._size, self._timeout_ms, self._fires_at_end = spec.rows, spec.timeout_ms, spec.fire_at_end
        self._due = DueKeys()

    def load(self, tables: Sequence[StateTable]) -> None:
        """CorruptionError and ConfigurationError as of all rows."""
        super().load(tables)
        self._find_due()

    def next_processing_time_ms(self) -> int | None:
        """When the next time-out comes, or came for a window that is full by now."""
        return self._due.next_ms

    def on_processing_time(self, now_ms: int, emit: Emit) -> Iterator[None]:
        """Give the function the windows whose time-out has come."""
        for keys in self._due.due(now_ms):
            self._give(keys, now_ms, emit)
            yield

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

    def _find_due(self) -> None:
        """Find the time-outs of the windows that the state has."""
        self._due = DueKeys()
        if self._timeout_ms is not None:
            keys, places = self._open_keys()
            self._due.restore(keys, places)

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
            self._due.add(int(places[waiting].min()), keys.take(rows))
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
                self._due.add(now_ms + self._timeout_ms, distinct.take(pa.array(of_keys[begun])))
        stays = ~full[windows]
        came = np.flatnonzero(~stays)
        taken = found.refs[full[of_stored]]
        stored = self.taken(taken)
        table.remove(taken)
        left = pa.array(np.flatnonzero(stays))
        self.keep(rows.take(left), keys.take(left), dues[windows[stays]])
        table.done()
        if self._due.is_crowded:
            self._find_due()
        if not len(came):
            return
        both = one_batch(pa.Table.from_batches([stored, rows.take(pa.array(came))]), "rows of windows")
        numbers = np.full(len(of_keys), -1, dtype=np.int64)
        numbers[full] = np.arange(int(full.sum()))
        groups = np.concatenate([numbers[of_stored[full[of_stored]]], numbers[windows[came]]])
        self.call(both, groups, None, emit, self.context)
