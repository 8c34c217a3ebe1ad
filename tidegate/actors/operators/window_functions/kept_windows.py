"""`KeptWindows`: rows of windows whose ends are known: those that wait, and those that a function has got.

`AppliedWindows` says what is due. Rules:

- A row of a window that may get late rows, or whose function has state or timers of it, is kept when it has been given,
  until the window is over. Rows are moved from one table to the other in the step in which they are given.
- A late row is put beside the rows of its key and window, and all of them are given once more, once a batch. If its
  window waits to fire (a checkpoint came between two steps) it fires then.
- What is over goes at the end of the watermark, in steps, and the state of the window with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.actors.operators.operator import Emit, OperatorContext
from tidegate.actors.operators.window_functions.process_windows import FunctionCalls
from tidegate.actors.operators.window_functions.window_buffer import PLACE, WindowBuffer
from tidegate.actors.operators.window_functions.window_calls import WindowCalls
from tidegate.actors.operators.window_functions.window_timers import WindowLife
from tidegate.actors.operators.windows.assigned_windows import starts_of
from tidegate.actors.operators.windows.merged_groups import codes_of
from tidegate.actors.operators.windows.window_specs import Cumulating, Sliding, Times, Tumbling
from tidegate.actors.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.storage.state.snapshot import StateTable

_SCANNED_ROWS = 131_072
_WAITING, _KEPT = 0, 1


class KeptWindows(WindowBuffer):
    """Rows by key and end of the window, waiting or kept. `spec`: None for sessions, which have no ends before."""

    def __init__(
        self,
        keys: tuple[str, ...],
        schema: pa.Schema,
        calls: WindowCalls,
        spec: Tumbling | Sliding | Cumulating | None,
        life: WindowLife | None,
    ) -> None:
        super().__init__(keys, schema, calls, life)
        self._known = spec

    _over_ms = MIN_WATERMARK_MS
    """No kept window is over before."""

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """CorruptionError as of all buffers."""
        super().open(context, restored)
        of_function = isinstance(self._calls, FunctionCalls) and self._calls.keeps_windows
        self._keeps = self._life is not None and (of_function or self._life.lateness_ms > 0)

    def load(self, tables: Sequence[StateTable]) -> None:
        """CorruptionError as `open`."""
        super().load(tables)
        self._over_ms = MIN_WATERMARK_MS

    def done(self) -> None:
        """End the batch of all tables."""
        for table in self.tables:
            table.done()

    def give(self, ends: Times, refs: NDArray[np.int64], emit: Emit) -> None:
        """Give the function waiting rows by key and window. They are kept from now on, or gone."""
        rows = self.taken(refs)
        if self._keeps:
            self._keep_given(rows, self.tables[_WAITING].take(refs, self.keys.names), ends)
        self.tables[_WAITING].remove(refs)
        self._call_for(rows, ends, emit)

    def give_again(self, rows: pa.RecordBatch, keys: pa.RecordBatch, ends: Times, waiting: bool, emit: Emit) -> None:
        """Give the function all rows of the keys and windows of late rows. `waiting`: some may not have been given."""
        codes, distinct, count = codes_of(keys, len(ends))
        order = np.unique(ends)
        wanted = np.unique(np.searchsorted(order, ends) * count + codes)
        parts, stored_ends = [rows], [ends]
        moved, moved_keys, moved_ends = [rows], [keys], [ends]
        for number in (_WAITING, _KEPT) if waiting else (_KEPT,):
            table = self.tables[number]
            found = table.find(distinct)
            places = table.take(found.refs, [PLACE]).column(0).to_numpy()
            at = np.minimum(np.searchsorted(order, places), len(order) - 1)
            fits = (order[at] == places) & np.isin(at * count + found.keys, wanted)
            refs = found.refs[fits]
            # Before what is there already: what was given first came first.
            parts.insert(0, self.taken(refs, number))
            stored_ends.insert(0, places[fits])
            if number == _WAITING:
                moved.insert(0, parts[0])
                moved_keys.insert(0, table.take(refs, self.keys.names))
                moved_ends.insert(0, places[fits])
                table.remove(refs)
        self._keep_given(_together(moved), _together(moved_keys), np.concatenate(moved_ends))
        self._call_for(_together(parts), np.concatenate(stored_ends), emit)

    def let_go(self, until_ms: int) -> Iterator[None]:
        """Let go of windows that are over, and of their state, in steps."""
        while self._life is not None and self._over_ms <= until_ms:
            ends, refs, keys = self.scanned(_KEPT, self.keys.names)
            last = self._life.last_ms(ends)
            over = np.flatnonzero(last <= until_ms)
            some = over[:_SCANNED_ROWS]
            self._over_ms = int(last[last > until_ms].min(initial=MAX_WATERMARK_MS))
            if len(some) < len(over):
                self._over_ms = MIN_WATERMARK_MS
            if isinstance(self._calls, FunctionCalls) and len(some):
                of = keys.take(pa.array(some))
                codes, _, count = codes_of(of, len(some))
                _, places = np.unique(ends[some], return_inverse=True)
                _, firsts = np.unique(places.reshape(-1) * count + codes, return_index=True)
                self._calls.forget(of.take(pa.array(firsts)), ends[some][firsts])
            self.tables[_KEPT].remove(refs[some])
            self._changed_rows += len(some)
            self.done()
            if len(some):
                yield

    def scanned(self, number: int, columns: list[str]) -> tuple[Times, NDArray[np.int64], pa.RecordBatch]:
        """Of all rows of a table their places, refs, and some columns."""
        places, refs = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        batches = []
        for rows, found in self.tables[number].scan([*columns, PLACE], _SCANNED_ROWS):
            places.append(rows.column(PLACE).to_numpy())
            refs.append(found)
            batches.append(rows.select(columns))
        schema = pa.schema([self.keys.field(name) for name in columns])
        together = pa.Table.from_batches(batches, schema=schema).combine_chunks().to_batches() if columns else []
        none = pa.RecordBatch.from_arrays([], names=[])
        return np.concatenate(places), np.concatenate(refs), together[0] if together else none

    def _keep_given(self, rows: pa.RecordBatch, keys: pa.RecordBatch, ends: Times) -> None:
        assert self._life is not None, "windows without a life"
        self.keep(rows, keys, ends, _KEPT)
        self._over_ms = min(self._over_ms, int(self._life.last_ms(ends).min()))

    def _call_for(self, rows: pa.RecordBatch, ends: Times, emit: Emit) -> None:
        """Call the function for the keys and windows of some rows, in the order in which the windows end."""
        codes, _, count = codes_of(rows.select(list(self._key_names)), rows.num_rows)
        order, places = np.unique(ends, return_inverse=True)
        found, groups = np.unique(places.reshape(-1) * count + codes, return_inverse=True)
        group_ends = order[found // count]
        assert self._known is not None, "sessions have no ends that are known before"
        self.call(rows, groups.reshape(-1), (starts_of(self._known, group_ends), group_ends), emit, self.context)


def _together(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Batches with rows in at least one, as one."""
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
