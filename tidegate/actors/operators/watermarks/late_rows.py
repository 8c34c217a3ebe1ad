"""`LateRows`: takes out the rows that come too late for the windows of a later step, before they are sent there.

Rules:

- A row is late if its last window, and the lateness that is allowed, are over by the watermark that the rows before it
  in its split have made. So the same rows are late at any batch size, whichever split is read faster, and after a
  restore. Behind the exchange the watermark is that of the slowest channel, so no row that this step lets pass is late
  there. The windows judge once more, by that watermark (`windows/sliced_windows.py`, `session_windows.py`).
- Where the rows come from another task, or from an operator that holds rows back, the watermark of the step counts.
- Late rows go to the side output `late`, and are counted.
- A row without a time belongs to no window: OperatorError. Filter such rows out before, or give them a side output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.actors.operators.operator import Columns, Emit, Operator, OperatorContext, together
from tidegate.actors.operators.operator_errors import blame
from tidegate.actors.operators.source_splits import Due
from tidegate.actors.operators.watermarks.watermark_generator import event_times_ms
from tidegate.actors.protocol.stream_elements import MIN_WATERMARK_MS
from tidegate.storage.state.snapshot import StateTable

LATE = "late"
"""The side output of late rows."""
LATE_RECORDS = "numLateRecordsDropped"
"""Flink's name for how many there were."""


LastEnd: TypeAlias = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""For each time the end of the last window that it belongs to."""


class LateRows(Operator):
    """Lets the rows pass that are in time.

    `last_end_ms`: that of the windows. `column`: the one of event time.
    """

    judges_rows = True

    def __init__(self, column: str, last_end_ms: LastEnd, allowed_lateness_ms: int = 0) -> None:
        self._column = column
        self._last_end_ms = last_end_ms
        self._allowed_ms = allowed_lateness_ms
        self._watermark_ms = MIN_WATERMARK_MS

    def needed_columns(self, after: Columns) -> Columns:
        """The column of event time as well."""
        return together(after, frozenset({self._column}))

    @property
    def dues(self) -> Sequence[Due]:
        """The last window of a row is over."""
        return (lambda times, watermarks: self._due_ms(times),)

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Begin to count late rows."""
        super().open(context, restored)
        self._late = context.metrics.counter(LATE_RECORDS)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emit the rows that are in time, and the others on the side. OperatorError for a row without a time."""
        with blame(self.context, batch):
            times = event_times_ms(batch, self._column)
            if times.null_count:
                raise ValueError(
                    f"{times.null_count} rows have no {self._column!r}, so they belong to no window; filter them out "
                    f"with pl.col({self._column!r}).is_not_null(), or name a side output for them where event time is "
                    'assigned: assign_timestamps(..., nulls_to="undated")'
                )
            after_ms = self.context.splits.rows_after_ms
            watermark_ms = self._watermark_ms if after_ms is None else after_ms
            late = self._due_ms(times.to_numpy()) <= watermark_ms
        count = int(np.count_nonzero(late))
        if not count:
            emit(batch)
            return
        self._late.inc(count)
        self.context.emit_aside(LATE, batch.filter(pa.array(late)))
        if count < batch.num_rows:
            emit(batch.filter(pa.array(~late)))

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        """Rows that come from elsewhere are judged by it."""
        self._watermark_ms = max(self._watermark_ms, watermark_ms)
        return iter(())

    def _due_ms(self, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """A window is done when the watermark has reached its last millisecond."""
        return self._last_end_ms(times) - 1 + self._allowed_ms
