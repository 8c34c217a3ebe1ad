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

from tidegate.operators.operator import Emit, OperatorContext
from tidegate.operators.windows.assigned_windows import starts_of
from tidegate.operators.windows.merged_groups import codes_of
from tidegate.operators.windows.process_windows import FunctionCalls
from tidegate.operators.windows.timed_windows import TimedWindows, budget_over, pieces
from tidegate.operators.windows.window_buffer import KEPT, WAITING, together
from tidegate.operators.windows.window_calls import WindowCalls
from tidegate.operators.windows.window_specs import Clock, Cumulating, Sliding, Times, Tumbling
from tidegate.operators.windows.window_timers import WindowLife
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.storage.state.snapshot import StateTable

SlicedSpec = Tumbling | Sliding | Cumulating


class KeptWindows(TimedWindows):
    """Rows by key and end of the window, waiting or kept."""

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
        """No kept window is over before."""

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """CorruptionError as of all buffers."""
        super().open(context, restored)
        of_function = isinstance(self._calls, FunctionCalls) and self._calls.keeps_windows
        self._keeps = self._life is not None and (of_function or self._lateness_ms > 0)

    def load(self, tables: Sequence[StateTable]) -> None:
        """CorruptionError as `open`."""
        super().load(tables)
        self._over_ms = MIN_WATERMARK_MS

    def give(self, ends: Times, refs: NDArray[np.int64], emit: Emit) -> None:
        """Give the function waiting rows by key and window. They are kept from now on, or gone."""
        rows = self.taken(refs)
        if self._keeps:
            self._keep_given(rows, self.keys_of(refs), ends)
        self.tables[WAITING].remove(refs)
        self._call_for(rows, ends, emit)

    def give_again(self, rows: pa.RecordBatch, keys: pa.RecordBatch, ends: Times, waiting: bool, emit: Emit) -> None:
        """Give the function all rows of the keys and windows of late rows. `waiting`: some may not have been given."""
        codes, distinct, count = codes_of(keys, len(ends))
        order = np.unique(ends)
        windows, of_rows = np.unique(np.searchsorted(order, ends) * count + codes, return_inverse=True)
        of_rows = of_rows.reshape(-1)
        sizes = np.bincount(of_rows)
        held: list[tuple[int, NDArray[np.int64], NDArray[np.int64]]] = []
        # Before what came now: what was given first came first.
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

    def let_go(self, until_ms: int) -> Iterator[None]:
        """Let go of windows that are over, and of their state, in steps."""
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
        """Call the function for the keys and windows of some rows, in the order in which the windows end."""
        codes, _, count = codes_of(rows.select(list(self._key_names)), rows.num_rows)
        order, places = np.unique(ends, return_inverse=True)
        found, groups = np.unique(places.reshape(-1) * count + codes, return_inverse=True)
        group_ends = order[found // count]
        self.call(rows, groups.reshape(-1), (starts_of(self._known, group_ends), group_ends), emit, self.context)
