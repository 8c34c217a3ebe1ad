"""`IntervalJoin` joins rows of two inputs with the same key whose event times are within an interval of each other.

Rules:

- Each row is stored, and is joined with the stored rows of the other side. A pair is therefore emitted when its second
  row arrives.
- A row is late if the watermark has reached it, and is then dropped. A stored row can be removed once the watermark has
  reached the end of the interval in which rows of the other side can match it. No pair is lost.
- An outer, semi or anti join must decide whether a row has a partner. It decides when no partner can arrive any more:
  until then the row also waits in a separate table. Its partners must still be stored at that time, so the other side
  keeps rows for the width of the interval.
- Rows that are no longer needed are removed from time to time, when the watermark has advanced by a quarter of the
  interval. Until then they are compared like other rows, but do not match, because a row that is not late is outside of
  their interval.
- A null key has no partner.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.joins.join_operator import (
    LEFT,
    MOMENT,
    RIGHT,
    STATE_NAMES,
    JoinHow,
    JoinOperator,
    JoinSides,
    Times,
    without_nulls,
)
from tidegate.operators.operator import Emit
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.state.common.backend import RowTable
from tidegate.storage.errors import ConfigurationError

_SCANNED_ROWS = 131_072
_PROBED_ROWS = 8_192
"""Greatest number of rows of a batch for which partners are searched at a time."""
_SWEEP_MS_MIN = 1_000


class IntervalJoin(JoinOperator):
    """Joins rows with equal keys and `lower_ms <= right time - left time <= upper_ms`.

    Raises ConfigurationError if `lower_ms` is greater than `upper_ms`.
    """

    def __init__(
        self,
        sides: JoinSides,
        schemas: tuple[pa.Schema, pa.Schema],
        lower_ms: int,
        upper_ms: int,
        how: JoinHow = "inner",
    ) -> None:
        super().__init__(sides, schemas, how)
        if lower_ms > upper_ms:
            raise ConfigurationError(
                f"interval_join: between=({lower_ms} ms, {upper_ms} ms): the first bound must not be the later one; "
                "exchange the two bounds"
            )
        self._bounds = lower_ms, upper_ms
        self._useful = upper_ms, -lower_ms
        """For each side, how long after its event time a row may still find a partner, in ms."""
        decided = how in ("left", "full", "semi", "anti"), how in ("right", "full")
        self._waiting = {side: f"{STATE_NAMES[side]}.waiting" for side in (LEFT, RIGHT) if decided[side]}
        """For each side that needs it, the name of the table with the rows that may turn out to have no partner."""
        self._kept_ms = tuple(
            max(useful, upper_ms - lower_ms) if decided[1 - side] else useful
            for side, useful in enumerate(self._useful)
        )
        for side, name in self._waiting.items():
            self.stored[name] = self.stored[STATE_NAMES[side]]
        self._first_ms: dict[int, int | None] = dict.fromkeys(self._waiting)
        """For each side, the time of the first waiting row in ms, or None if unknown."""
        self._swept_ms = MIN_WATERMARK_MS

    def process_input(self, index: int, batch: pa.RecordBatch, emit: Emit) -> None:
        """Stores the rows of a batch, and emits their pairs with stored rows of the other side.

        Raises OperatorError for rows without a time, and ChangedTypeError for other column types.
        """
        keys, times, values = self.rows_of(index, batch)
        if not (in_time := times > self.reached(keys)).all():
            self.late.inc(int(np.count_nonzero(~in_time)))
            keys, times, values = _some(keys, times, values, in_time)
        if index in self._waiting and len(times):
            self.append(self._number(index), keys, [pa.array(times), *values])
            self._table_of_waiting(index).done()
            first_ms = self._first_ms[index]
            self._first_ms[index] = None if first_ms is None else min(first_ms, int(times.min()))
        if not (matching := without_nulls(keys)).all():
            keys, times, values = _some(keys, times, values, matching)
        if not len(times):
            return
        if self.how not in ("semi", "anti"):
            for start in range(0, len(times), _PROBED_ROWS):
                part = slice(start, start + _PROBED_ROWS)
                some = pa.array(np.arange(start, min(start + _PROBED_ROWS, len(times))))
                mine = pa.RecordBatch.from_arrays(
                    [*keys.take(some).columns, *(value.take(some) for value in values)],
                    names=[*self.keys.names, *self.values[index].values()],
                )
                self._probe(index, mine, times[part], emit)
        self.keep(index, keys, times, values)
        self.tables[index].done()

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        """Emits the results of rows that cannot find a partner any more, and removes rows that are no longer needed if
        a cleanup is due.

        Yields between two steps.
        """
        self.reach(watermark_ms)
        for side in self._waiting:
            yield from self._decide(side, watermark_ms - self._useful[side], emit)
        every_ms = max(_SWEEP_MS_MIN, (self._bounds[1] - self._bounds[0]) // 4)
        if watermark_ms == MAX_WATERMARK_MS or watermark_ms - self._swept_ms >= every_ms:
            self._swept_ms = watermark_ms
            for side in (LEFT, RIGHT):
                self._sweep(side, watermark_ms)

    def _probe(self, index: int, mine: pa.RecordBatch, times: Times, emit: Emit) -> None:
        """Emits the pairs of some rows of the input `index` (`mine`) with stored rows of the other input."""
        theirs = self.tables[1 - index]
        found, refs = self._near(index, mine, times)
        for start in range(0, len(found), OUTPUT_ROWS_MAX):
            piece = slice(start, start + OUTPUT_ROWS_MAX)
            sides = [mine.take(pa.array(found[piece])), theirs.take(refs[piece])]
            left, right = sides if index == LEFT else reversed(sides)
            emit(self.result(left, right, len(sides[0])))
        theirs.done()

    def _near(self, index: int, mine: pa.RecordBatch, times: Times) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Finds the stored rows of the other input whose times are within the interval of the rows `mine`.

        Returns two arrays with an entry for each pair: the index in `mine`, and the reference to the stored row.
        """
        lower, upper = self._bounds
        theirs = self.tables[1 - index]
        found = theirs.find(mine.select(self.keys.names))
        if not len(found.refs):
            return found.keys, found.refs
        others = theirs.take(found.refs, [MOMENT]).column(MOMENT).to_numpy()
        apart = (others - times[found.keys]) * (1 if index == LEFT else -1)
        near = np.flatnonzero((apart >= lower) & (apart <= upper))
        return found.keys[near], found.refs[near]

    def _decide(self, side: int, until_ms: int, emit: Emit) -> Iterator[None]:
        """Decides which waiting rows of a side up to the time `until_ms` have a partner, and emits the results.

        Yields between two steps.
        """
        waiting = self._table_of_waiting(side)
        while (first_ms := self._first_ms[side]) is None or first_ms <= until_ms:
            due, first = [np.zeros(0, dtype=np.int64)], np.iinfo(np.int64).max
            for rows, refs in waiting.scan([MOMENT], _SCANNED_ROWS):
                times = rows.column(MOMENT).to_numpy()
                over = times <= until_ms
                due.append(refs[over])
                first = min(first, int(times[~over].min(initial=first)))
            refs = np.concatenate(due)
            some = refs[:OUTPUT_ROWS_MAX]
            if len(some):
                self._emit_decided(side, waiting.take(some), emit)
                waiting.remove(some)
            waiting.done()
            self._first_ms[side] = first if len(some) == len(refs) else None
            if not len(some):
                return
            yield

    def _emit_decided(self, side: int, rows: pa.RecordBatch, emit: Emit) -> None:
        found, _ = self._near(side, rows, rows.column(MOMENT).to_numpy())
        self.tables[1 - side].done()
        met = np.zeros(rows.num_rows, dtype=np.bool_)
        met[found] = True
        met &= without_nulls(rows.select(self.keys.names))
        decided = rows.filter(pa.array(met if self.how == "semi" else ~met))
        if decided.num_rows:
            left, right = (decided, None) if side == LEFT else (None, decided)
            emit(self.result(left, right, decided.num_rows))

    def _sweep(self, side: int, watermark_ms: int) -> None:
        table, kept_ms = self.tables[side], self._kept_ms[side]
        for rows, refs in table.scan([MOMENT], _SCANNED_ROWS):
            over = rows.column(MOMENT).to_numpy() <= watermark_ms - kept_ms
            table.remove(refs[over])
        table.done()

    def _number(self, side: int) -> int:
        """Returns the index of the state table that stores the waiting rows of an input. `side`: 0 is the left input, 1
        the right input.
        """
        return list(self.stored).index(self._waiting[side])

    def _table_of_waiting(self, side: int) -> RowTable:
        return self.tables[self._number(side)]


def _some(
    keys: pa.RecordBatch, times: Times, values: list[pa.Array], wanted: NDArray[np.bool_]
) -> tuple[pa.RecordBatch, Times, list[pa.Array]]:
    """Returns the keys, times and values of the rows where `wanted` is True."""
    picked = pa.array(np.flatnonzero(wanted))
    return keys.take(picked), times[wanted], [value.take(picked) for value in values]
