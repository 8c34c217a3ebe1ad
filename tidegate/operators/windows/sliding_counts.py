"""Sliding count windows: after every `slide` rows of a key, a window over its last `rows` rows. `SlidingCountWindows`
aggregates the rows of a window, and `FunctionSlidingCounts` calls a function with them.

Rules (Flink's `countWindow(size, slide)`):

- A window fires after every `slide` rows of a key, counted from its first row. It has the last `rows` rows of the key,
  or all of its rows while there are fewer.
- At the end of the input, the next window of a key fires with the rows that it has, if the program requests it.
  Otherwise the rows since the last result are counted.
- Event time is ignored: rows are never late, and results have no window bounds.

How `SlidingCountWindows` computes windows:

- Each row is added to one pane. Panes have as many rows as the greatest common divisor of `rows` and `slide`, so every
  window is made of whole panes. A pane that is full never changes.
- The state has the open pane of a key in namespace 0, with the number of rows of the key so far. The full panes are in
  the following namespaces, which are used as a ring buffer, until no window needs them any more. The state of a key is
  therefore never removed completely, as in Flink.
- The windows of a batch are merged from runs of 1, 2, 4, ... panes, each made from two shorter runs. A window of n
  panes reads at most log2 n runs, and the order of merging does not depend on how rows are divided into batches.

`FunctionSlidingCounts` stores the rows of a key that the next window contains, each with its number among the rows of
the key. At least one row is always stored, and its number is the number of rows of the key so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.operator import Emit
from tidegate.operators.operator_errors import blame
from tidegate.operators.state.keys import key_columns
from tidegate.operators.watermarks.late_rows import LEFT_RECORDS
from tidegate.operators.windows.count_windows import dealt_out
from tidegate.operators.windows.row_windows import WindowBuffer, pieces
from tidegate.operators.windows.window_calls import WindowCalls
from tidegate.operators.windows.window_specs import Count, Numbers
from tidegate.operators.windows.window_state import AggregateWindows, MergedGroups, Parts, WindowState, codes_of
from tidegate.state.common.backend import FoundRows, ValueSpec
from tidegate.state.kernels.distinct_integers import distinct_integers
from tidegate.state.kernels.paged import scatter
from tidegate.state.kernels.partition import gather
from tidegate.storage.schemas.batches import one_batch
from tidegate.storage.schemas.column_names import own_name
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot

PANE = own_name("window_pane")
"""Name of the namespace column. 0 is the open pane of a key, and other numbers are positions in the ring buffer of its
full panes.
"""
SEEN = own_name("rows_seen")
"""Name of the column with the number of rows of the key so far. Only the open pane stores it."""

PANES_MAX = 65_536
"""Approximate limit of panes that are merged in one call. A single key may have more."""


@dataclass(frozen=True, slots=True)
class _Panes:
    """Full panes of several keys. A pane is a run of consecutive rows of a key whose aggregates windows share.

    Has, for each pane, the number of its key, its number among the panes of the key, and its accumulator columns.
    """

    codes: Numbers
    places: Numbers
    parts: Parts


class SlidingCountWindows(AggregateWindows):
    """Aggregates of the last rows of each key. Without `keys`, aggregates of the last rows of the stream."""

    def __init__(
        self,
        keys: tuple[str, ...],
        spec: Count,
        aggregates: Mapping[str, Aggregate],
        input_schema: pa.Schema | None = None,
    ) -> None:
        assert spec.slide is not None, "windows that do not overlap"
        super().__init__(keys, spec, aggregates, None, "final", PANE, (ValueSpec(SEEN, pa.int64(), 0),), input_schema)
        self._slide_rows, self._fires_at_end = spec.slide, spec.fire_at_end
        self._pane_rows = gcd(spec.rows, spec.slide)
        self._width, self._slide = spec.rows // self._pane_rows, spec.slide // self._pane_rows
        """Number of panes in a window, and from one window to the next."""

    def finish(self, emit: Emit) -> Iterator[None]:
        """At the end of the input, fires the next window of each key that has rows after its last result, if the
        program requests it.

        Otherwise only counts these rows.
        """
        if not self._state.exists:
            return
        table, left = self._state.table, 0
        for keys, slots in table.scan_namespace(0, max(1, PANES_MAX // self._width)):
            seen = self._state.extra(SEEN).raw(slots)
            since = seen % self._slide_rows
            if not self._fires_at_end:
                left += int(since.sum())
                continue
            rows = np.flatnonzero(since)
            if len(rows):
                of = self._state.user_keys(keys)
                self._fire_rest(gather(of, rows.astype(np.int32)) if self._keys else of, seen[rows], emit)
            yield
        if left:
            self.context.metrics.counter(LEFT_RECORDS).inc(left)

    def snapshot(self, cut: Cut) -> OperatorSnapshot:
        """Returns a snapshot of the panes."""
        return self.changes(cut)

    def _advance_to(self, moment_ms: int, emit: Emit) -> Iterator[None]:
        """Does nothing: these windows do not depend on time."""
        return iter(())

    def _add_rows(self, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Adds the rows of a batch to panes. Returns the results of the windows that become full."""
        codes, distinct, count = codes_of(key_columns(batch, self._keys), batch.num_rows)
        table = self._state.table
        heads = table.upsert(self._state.stored_keys(np.zeros(count, dtype=np.int64), distinct))
        if len(heads.new_rows):
            self._state.check_owner(gather(distinct, heads.new_rows) if self._keys else distinct)
        self._changed_rows += count
        seen = self._state.extra(SEEN).raw(heads.slots)
        now_seen = seen + np.bincount(codes, minlength=count)
        held = seen % self._pane_rows
        if int((held + now_seen - seen).max()) < self._pane_rows:
            for accumulator in self._state.accumulators:
                accumulator.update(batch, heads.slots[codes])
            scatter(self._state.extra(SEEN).pages, heads.slots, now_seen)
            table.done()
            return []
        begun = np.flatnonzero(held)
        parts = self._state.parts(heads.slots[begun])
        table.remove(heads.slots)
        table.done()
        panes, firsts, lasts, of_keys, full = dealt_out(codes, held, self._pane_rows)
        merged = MergedGroups(self._state, len(of_keys))
        merged.merge(firsts[begun], parts)
        merged.update(batch, panes)
        merged.done()
        self._put_heads(distinct, now_seen, merged, lasts)
        complete = np.flatnonzero(full)
        order = np.argsort(of_keys[complete], kind="stable")
        complete = complete[order]
        last_rows = np.zeros(len(of_keys), dtype=np.int64)
        last_rows[panes] = np.arange(len(panes))
        results = list[pa.RecordBatch]()
        of_complete = of_keys[complete]
        for start, stop in self._pieces(of_complete):
            piece = complete[start:stop]
            chosen = distinct_integers(of_complete[start:stop])
            keys = gather(distinct, chosen.astype(np.int32)) if self._keys else distinct
            results += self._completed(
                keys,
                seen[chosen] // self._pane_rows,
                np.searchsorted(chosen, of_complete[start:stop]),
                merged.parts(piece),
                last_rows[piece],
            )
        return results

    def _pieces(self, codes: Numbers) -> Iterator[tuple[int, int]]:
        """Divides full panes, which are sorted by key, into pieces that contain all panes of a key.

        Yields the start and end index of each piece.
        """
        bounds = np.flatnonzero(np.diff(codes, prepend=-1, append=-1))
        start = 0
        while start < len(bounds) - 1:
            # The ring of each key may be read as well.
            sizes = bounds[start + 1 :] - bounds[start] + self._width * np.arange(1, len(bounds) - start)
            stop = start + max(1, int(np.searchsorted(sizes, PANES_MAX, side="right")))
            yield int(bounds[start]), int(bounds[stop])
            start = stop

    def _put_heads(self, distinct: pa.RecordBatch, seen: Numbers, merged: MergedGroups, lasts: Numbers) -> None:
        """Stores the open panes of distinct keys that have no open pane in the state.

        `seen` has the number of rows of each key so far.
        """
        heads = self._state.table.upsert(self._state.stored_keys(np.zeros(len(seen), dtype=np.int64), distinct))
        assert len(heads.new_rows) == len(seen), "a pane in the place of another one"
        scatter(self._state.extra(SEEN).pages, heads.slots, seen)
        is_open = np.flatnonzero(seen % self._pane_rows)
        if len(is_open) < len(seen) and self._pane_rows > 1:
            self._state.begin_empty()
        self._state.merge(heads.slots[is_open], merged.parts(lasts[is_open]))
        self._state.table.done()

    def _completed(
        self, keys: pa.RecordBatch, full: Numbers, codes: Numbers, parts: Parts, last_rows: Numbers
    ) -> list[pa.RecordBatch]:
        """Stores panes that have become full, and returns the results of the windows that end with one of these panes.

        `keys` are distinct keys, and `full` has the number of full panes that each had before. `codes` has the key
        number of each new pane, `parts` its accumulators, and `last_rows` the index of the batch row that filled it.
        """
        added = np.bincount(codes, minlength=len(full))
        begins = np.cumsum(added) - added
        new = _Panes(codes, np.arange(len(codes)) - np.repeat(begins - full, added), parts)
        now_full = full + added
        fires = np.flatnonzero(now_full // self._slide > full // self._slide)
        least = self._least(now_full)
        rows = list[pa.RecordBatch]()
        if len(fires):
            lows = self._least(full)
            old = self._stored_panes(keys, fires, lows[fires], full[fires], least)
            ends, of_windows = self._ends(full[fires], now_full[fires])
            track, starts, of_track = self._tracks(fires, old, new)
            windows = MergedGroups(self._state, len(ends))
            firsts = np.maximum(0, ends - self._width)
            of_keys = fires[of_windows]
            _merge_runs(
                self._state, windows, track, of_track, starts[of_windows] + firsts - lows[of_keys], ends - firsts
            )
            completing = last_rows[begins[of_keys] + ends - 1 - full[of_keys]]
            order = np.argsort(completing)
            result = self._rows.output_without_bounds(
                gather(keys, of_keys[order].astype(np.int32)) if self._keys else keys, windows.results(order)
            )
            rows = [result.slice(at, OUTPUT_ROWS_MAX) for at in range(0, result.num_rows, OUTPUT_ROWS_MAX)]
        self._put_panes(keys, new, new.places >= least[codes])
        return rows

    def _least(self, full: Numbers) -> Numbers:
        """Returns the number of the first pane that a later window needs, for keys with `full` full panes."""
        return np.maximum(0, (full // self._slide + 1) * self._slide - self._width)

    def _ends(self, full: Numbers, now_full: Numbers) -> tuple[Numbers, Numbers]:
        """Returns the ends of the windows that become complete, as pane numbers, and the key number of each window.

        `full` and `now_full` have the number of full panes of each key before and now.
        """
        counts = now_full // self._slide - full // self._slide
        of_windows = np.repeat(np.arange(len(full)), counts)
        place = np.arange(len(of_windows)) - np.repeat(np.cumsum(counts) - counts, counts)
        return ((full // self._slide)[of_windows] + 1 + place) * self._slide, of_windows

    def _stored_panes(
        self, keys: pa.RecordBatch, codes: Numbers, lows: Numbers, full: Numbers, least: Numbers | None
    ) -> _Panes:
        """Reads full panes from the state: for the keys with the numbers `codes`, the panes with the numbers from
        `lows` to `full` (exclusive).

        Removes the panes before `least` of each key, or all panes that were read if it is None.
        """
        counts = full - lows
        of_panes = np.repeat(codes, counts)
        places = np.arange(len(of_panes)) - np.repeat(np.cumsum(counts) - counts - lows, counts)
        if not len(of_panes):
            return _Panes(of_panes, places, [[] for _ in self._state.fields])
        table = self._state.table
        found = table.upsert(self._stored_keys(keys, of_panes, places), new_only=True)
        assert not len(found.new_rows), "a pane is missing among those of its key"
        parts = self._state.parts(found.slots)
        table.done()
        # Panes that stay are only read, so that they do not count as changed. Panes to remove are looked up again.
        over = np.flatnonzero(np.ones(len(places)) if least is None else places < least[of_panes])
        if len(over):
            table.remove(table.upsert(self._stored_keys(keys, of_panes[over], places[over])).slots)
            table.done()
            self._changed_rows += len(over)
        return _Panes(of_panes, places, parts)

    def _tracks(self, codes: Numbers, old: _Panes, new: _Panes) -> tuple[Parts, Numbers, Numbers]:
        """Concatenates the panes of some keys, sorted by key and pane number.

        Returns the accumulators of the panes, the index at which each key begins, and, for each pane, the index at
        which its key ends.
        """
        some = np.flatnonzero(np.isin(new.codes, codes))
        of_panes = np.concatenate([old.codes, new.codes[some]])
        parts = _taken(new.parts, some)
        if len(old.codes):
            parts = [
                [pa.concat_arrays(columns) for columns in zip(*groups, strict=True)]
                for groups in zip(old.parts, parts, strict=True)
            ]
        order = np.lexsort((np.concatenate([old.places, new.places[some]]), of_panes))
        counts = np.bincount(np.searchsorted(codes, of_panes), minlength=len(codes))
        ends = np.cumsum(counts)
        return _taken(parts, order), ends - counts, np.repeat(ends, counts)

    def _put_panes(self, keys: pa.RecordBatch, panes: _Panes, some: NDArray[np.bool_]) -> None:
        """Stores the full panes for which `some` is True in the ring buffers of their keys.

        Their positions must be free.
        """
        rows = np.flatnonzero(some)
        if not len(rows):
            return
        put = self._state.table.upsert(self._stored_keys(keys, panes.codes[rows], panes.places[rows]))
        assert len(put.new_rows) == len(rows), "a pane in the place of another one"
        self._state.merge(put.slots, _taken(panes.parts, rows))
        self._state.table.done()
        self._changed_rows += len(rows)

    def _stored_keys(self, keys: pa.RecordBatch, codes: Numbers, places: Numbers) -> pa.RecordBatch:
        """Returns the stored keys of full panes.

        `codes` has the index of each pane's key in `keys`, and `places` the number of the pane.
        """
        of = gather(keys, codes.astype(np.int32)) if self._keys else keys
        return self._state.stored_keys(1 + places % self._width, of)

    def _fire_rest(self, keys: pa.RecordBatch, seen: Numbers, emit: Emit) -> None:
        """Fires the next window of distinct keys early, with the rows that it has so far, and removes the keys from the
        state.

        `seen` has the number of rows of each key.
        """
        table = self._state.table
        heads = table.upsert(self._state.stored_keys(np.zeros(len(seen), dtype=np.int64), keys))
        assert not len(heads.new_rows), "a key without an open pane"
        is_open = np.flatnonzero(seen % self._pane_rows)
        parts = self._state.parts(heads.slots[is_open])
        table.remove(heads.slots)
        table.done()
        self._changed_rows += len(seen)
        full, every = seen // self._pane_rows, np.arange(len(seen))
        old = self._stored_panes(keys, every, self._least(full), full, None)
        track, starts, of_track = self._tracks(every, old, _Panes(is_open, full[is_open], parts))
        windows = MergedGroups(self._state, len(seen))
        _merge_runs(self._state, windows, track, of_track, starts, np.diff(starts, append=len(of_track)))
        emit(self._rows.output_without_bounds(keys, windows.results(every)))


def _merge_runs(
    state: WindowState, windows: MergedGroups, panes: Parts, ends: Numbers, starts: Numbers, sizes: Numbers
) -> None:
    """Merges panes into windows: into window i, `sizes[i]` panes from index `starts[i]` on.

    `ends` has, for each pane, the index at which its key ends.
    """
    every, at, length = np.arange(len(ends)), starts.copy(), 1
    runs = panes
    while True:
        some = np.flatnonzero(sizes & length)
        if len(some):
            windows.merge(some, _taken(runs, at[some]))
            at[some] += length
        if int(sizes.max()) < 2 * length:
            break
        pairs = np.flatnonzero(every + 2 * length <= ends)
        longer = MergedGroups(state, len(every))
        longer.merge(pairs, _taken(runs, pairs))
        longer.merge(pairs, _taken(runs, pairs + length))
        longer.done()
        runs = longer.parts(every)
        length *= 2
    windows.done()


def _taken(parts: Parts, rows: Numbers) -> Parts:
    return [[column.take(pa.array(rows)) for column in group] for group in parts]


_KEYS_A_STEP = 1_024
"""Greatest number of windows that are passed to the function in one step at the end of the input."""


class FunctionSlidingCounts(WindowBuffer):
    """Calls a function with the last `rows` rows of a key, after every `slide` rows of the key."""

    def __init__(self, keys: tuple[str, ...], spec: Count, schema: pa.Schema, calls: WindowCalls) -> None:
        assert spec.slide is not None, "windows that do not overlap"
        super().__init__(keys, schema, calls)
        self._size, self._slide, self._fires_at_end = spec.rows, spec.slide, spec.fire_at_end

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Calls the function with the windows that the rows of a batch complete, and stores the rows that later windows
        need.
        """
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
        """Calls the function with the next window of each key at the end of the input, if the program requests it.

        Otherwise only counts their rows.
        """
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
        """Calls the function with the windows that the rows of a batch complete, in the order of these rows.

        Rows of the batch: `codes` has the number of each row's key, and `numbers` the number of the row among the rows
        of this key. Stored rows: `found` has the numbers of their keys, and `stored` their row numbers. `seen` has the
        number of earlier rows of each key.
        """
        completing = np.flatnonzero((numbers + 1) % self._slide == 0)
        if not len(completing):
            return
        # The rows of each key are consecutive, stored rows first, so a window is a slice of them.
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
