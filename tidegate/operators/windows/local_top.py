"""`LocalTop`: of each batch the rows that can be among the first of their window; it says which windows these are.

It stands before the exchange, so that few rows are sent: of a batch of bids one for each window, if the first one is
wanted. It has no state, and `WindowTop` behind it takes the first ones of all.

Rules:

- A row that others of its batch keep out of the first `n` of its window cannot be among them.
- Rows of windows that are over by the watermark pass: they may be late, and `WindowTop` counts late rows.
- Where most rows stay, as with many keys, comparing does not pay: then most batches pass as they are. That is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.operator import Emit, Operator
from tidegate.operators.operator_errors import blame
from tidegate.operators.ranking.ranks import first_rows
from tidegate.operators.ranking.top_n import Ranking
from tidegate.operators.source_splits import Due
from tidegate.operators.state.keys import key_columns
from tidegate.operators.watermarks.watermark_generator import WindowEnd, check_timestamp_column, event_times_ms
from tidegate.operators.windows.assigned_windows import ends_of, starts_of
from tidegate.operators.windows.window_rows import WINDOW_END, WINDOW_START, bound_type, bounds_of, row_times
from tidegate.operators.windows.window_specs import Cumulating, DueByWindows, Sliding, Times, Tumbling
from tidegate.protocol.stream_elements import MIN_WATERMARK_MS
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.dictionaries import decoded_type
from tidegate.storage.schemas.reserved_names import own_name

_PASSED_BATCHES = 15
"""So many batches pass as they are after one in which comparing did not pay."""
_END = own_name("window_end_ms")


class LocalTop(Operator):
    """The first rows of windows in each batch. With `window` and `time` rows get the bounds of their windows here.

    Without them they have `window_end` already. `schema` is that of the input. ConfigurationError for columns that do
    not fit.
    """

    def __init__(
        self,
        ranking: Ranking,
        schema: pa.Schema,
        window: Tumbling | Sliding | Cumulating | None = None,
        time: str | None = None,
    ) -> None:
        self._ranking, self._window, self._time = ranking, window, time
        self._keys = ranking.keys
        self.output = schema
        """The columns of the result."""
        if window is not None:
            assert time is not None, "windows without event time"
            check_timestamp_column(schema, time)
            taken = sorted(set(schema.names) & {WINDOW_START, WINDOW_END})
            if taken:
                raise ConfigurationError(
                    f"top_n: columns {taken} are those of the window; rename yours with select, or rank rows in the "
                    'windows that they have: key_by("window_start", "window_end").top_n(..., emit="final")'
                )
            self._bound = bound_type(decoded_type(schema.field(time).type), window)
            self.output = pa.schema([*schema, (WINDOW_START, self._bound), (WINDOW_END, self._bound)])
            self._keys = tuple(key for key in ranking.keys if key not in (WINDOW_START, WINDOW_END))
        self._watermark_ms = MIN_WATERMARK_MS
        self._passes = 0

    @property
    def dues(self) -> Sequence[Due]:
        """`WindowTop` behind it judges rows by which windows are over. Results of windows are never late."""
        return () if self._window is None else (DueByWindows(self._window),)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emit the rows of a batch that count. OperatorError for a row without a time."""
        with blame(self.context, batch):
            rows, ends = self._windows(batch)
            kept = self._first(batch, rows, ends)
        if kept is not None:
            rows, ends = rows[kept], ends[kept]
        whole = len(rows) == batch.num_rows and bool((rows == np.arange(len(rows))).all())
        chosen = batch if whole else batch.take(pa.array(rows))
        if self._window is not None:
            bounds = [bounds_of(each, self._bound) for each in (starts_of(self._window, ends), ends)]
            chosen = pa.RecordBatch.from_arrays(
                [*chosen.columns, *bounds], names=[*chosen.schema.names, WINDOW_START, WINDOW_END]
            )
        emit(chosen)

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        """Windows up to here are over."""
        self._watermark_ms = max(self._watermark_ms, watermark_ms)
        return iter(())

    def _windows(self, batch: pa.RecordBatch) -> tuple[NDArray[np.int64], Times]:
        """Rows, each once for each of its windows, and the ends of these."""
        if self._window is None:
            ends = event_times_ms(batch, WindowEnd(WINDOW_END))
            return np.arange(batch.num_rows, dtype=np.int64), ends.to_numpy(zero_copy_only=False) + 1
        assert self._time is not None
        parts = [*ends_of(self._window, row_times(batch, self._time, self._window))]
        if len(parts) == 1:
            return parts[0]
        rows, ends = np.concatenate([rows for rows, _ in parts]), np.concatenate([ends for _, ends in parts])
        in_order = np.argsort(rows, kind="stable")  # of equal rows the first to arrive is before the others
        return rows[in_order], ends[in_order]

    def _first(self, batch: pa.RecordBatch, rows: NDArray[np.int64], ends: Times) -> NDArray[np.bool_] | None:
        """Which of these are among the first, or late. None: all, because nobody has looked."""
        if self._passes:
            self._passes -= 1
            return None
        ranking = self._ranking
        words = ranking.words(batch)
        words = words if len(rows) == batch.num_rows else words.take(rows)
        groups, size = self._groups(batch, rows, ends)
        kept = first_rows(groups, words.sorting, ranking.n, ranking.ties, size)
        kept |= ends - 1 <= self._watermark_ms
        if 2 * np.count_nonzero(kept) > len(kept):
            self._passes = _PASSED_BATCHES
        return kept

    def _groups(self, batch: pa.RecordBatch, rows: NDArray[np.int64], ends: Times) -> tuple[NDArray[np.int64], int]:
        """The number of the group of each row, and how many there are."""
        # Sessions that end together may have begun at different times.
        if set(self._keys) <= {WINDOW_END} and ends.min() == ends.max():
            return np.zeros(len(rows), dtype=np.int64), 1
        columns = key_columns(batch, self._keys)
        if self._window is not None:
            arrays = [column if len(rows) == len(column) else column.take(pa.array(rows)) for column in columns.columns]
            columns = pa.RecordBatch.from_arrays([*arrays, pa.array(ends)], names=[*self._keys, _END])
        index = KeyIndex(tuple(columns.schema.names))
        return index.upsert(columns).slots.astype(np.int64), index.size
