"""`IntervalJoin`: joins rows of two inputs with the same key whose event times lie within an interval of each other.

Rules:

- A pair is emitted when its later row comes: each row is kept, and looks for partners among the rows of the other side.
- A row is late if the watermark has reached it; then it is dropped. So a row is of no use any more once the watermark
  has reached the end of the other side's interval around it, and no pair is lost.
- Rows of no use are removed now and then: when the watermark has moved on by a quarter of the interval. A row that is
  still there is looked at like any other, but no row that is not late can lie in its interval.
- A null key has no partner, and is not kept.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from tidegate.actors.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.actors.operators.joins.join_columns import LEFT, RIGHT, JoinSides
from tidegate.actors.operators.joins.join_operator import MOMENT, JoinOperator, Times
from tidegate.actors.operators.joins.pairing import without_nulls
from tidegate.actors.operators.operator import Emit
from tidegate.actors.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.storage.errors import ConfigurationError

_SCANNED_ROWS = 131_072
_PROBED_ROWS = 8_192
"""Rows of a batch that look for partners at a time."""
_SWEEP_MS_MIN = 1_000


class IntervalJoin(JoinOperator):
    """Inner join of rows with `lower_ms <= right time - left time <= upper_ms`. ConfigurationError if that is empty."""

    def __init__(self, sides: JoinSides, schemas: tuple[pa.Schema, pa.Schema], lower_ms: int, upper_ms: int) -> None:
        super().__init__(sides, schemas, "inner")
        if lower_ms > upper_ms:
            raise ConfigurationError(
                f"interval_join: between=({lower_ms} ms, {upper_ms} ms): the first bound must not be the later one"
            )
        self._bounds = lower_ms, upper_ms
        self._useful = upper_ms, -lower_ms
        """By side, how long after its event time a row may still find a partner."""
        self._swept_ms = MIN_WATERMARK_MS

    def process_input(self, index: int, batch: pa.RecordBatch, emit: Emit) -> None:
        """Keep the rows of a batch, and emit their pairs with rows of the other side. OperatorError as of `rows_of`."""
        keys, times, values = self.rows_of(index, batch)
        wanted = without_nulls(keys) & (times > self.watermark)
        if not wanted.all():
            picked = pa.array(np.flatnonzero(wanted))
            keys, times = keys.take(picked), times[wanted]
            values = [value.take(picked) for value in values]
        if not len(times):
            return
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
        """Remove rows of no use, if it is time for that."""
        self.watermark = watermark_ms
        every_ms = max(_SWEEP_MS_MIN, (self._bounds[1] - self._bounds[0]) // 4)
        if watermark_ms == MAX_WATERMARK_MS or watermark_ms - self._swept_ms >= every_ms:
            self._swept_ms = watermark_ms
            for side in (LEFT, RIGHT):
                self._sweep(side, watermark_ms)
        return iter(())

    def _probe(self, index: int, mine: pa.RecordBatch, times: Times, emit: Emit) -> None:
        """Emit the pairs of some rows of one side."""
        lower, upper = self._bounds
        theirs = self.tables[1 - index]
        found = theirs.find(mine.select(self.keys.names))
        if len(found.refs):
            others = theirs.take(found.refs, [MOMENT]).column(MOMENT).to_numpy()
            apart = (others - times[found.keys]) * (1 if index == LEFT else -1)
            near = np.flatnonzero((apart >= lower) & (apart <= upper))
            for start in range(0, len(near), OUTPUT_ROWS_MAX):
                some = near[start : start + OUTPUT_ROWS_MAX]
                sides = [mine.take(pa.array(found.keys[some])), theirs.take(found.refs[some])]
                left, right = sides if index == LEFT else reversed(sides)
                emit(self.result(left, right, len(some)))
        theirs.done()

    def _sweep(self, side: int, watermark_ms: int) -> None:
        table, useful_ms = self.tables[side], self._useful[side]
        for rows, refs in table.scan([MOMENT], _SCANNED_ROWS):
            over = rows.column(MOMENT).to_numpy() <= watermark_ms - useful_ms
            table.remove(refs[over])
        table.done()
