"""Top-n in windows: `WindowTop` emits the first `n` rows of each key and window. `LocalTop` drops rows before the
exchange that cannot be among them.

Rules of `WindowTop`:

- The column `window_end` has the window of a row. A windowed aggregate before this step adds it, or else `LocalTop`
  does. It is one of the keys, so all rows of a key and window are in one subtask.
- The state has the rows that are among the first `n` so far: at most `n` for each key and window, and with `ties` also
  rows that share the last rank. Nothing is emitted before the window ends, so nothing is retracted.
- When the watermark passes the end of windows, several windows with together about `FIRED_ROWS` rows are ranked in one
  step. They are emitted in the order of windows, and of ranks within a key. Their rows are removed in the same step.
- `FiredGroups` stores the time up to which windows have fired. A row for a window that has fired is late: it is
  dropped, counted, and sent to the side output of late rows.

Rules of `LocalTop`:

- It runs before the exchange so that few rows are sent: with n = 1, one row of a batch for each key and window. It has
  no state.
- A row that is not among the first `n` rows of its key and window within its batch cannot be among them in the result.
- Rows of windows that have ended at the watermark are not dropped: they may be late, and `WindowTop` counts late rows.
- If few rows can be dropped, as with many keys, comparing costs more than it saves. If more than half of a batch's rows
  remain, the next batches are sent without comparing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.operator import Emit, Operator
from tidegate.operators.operator_errors import blame
from tidegate.operators.ranking.ranks import Positions, RankWords, first_rows, ranks_of
from tidegate.operators.ranking.top_n import MOMENT, STATE_NAME, Ranking
from tidegate.operators.source_splits import Due
from tidegate.operators.state.keys import key_columns, key_schema
from tidegate.operators.state.operator_backend import RowsOperator
from tidegate.operators.watermarks.watermark_generator import WindowEnd, check_timestamp_column, event_times_ms
from tidegate.operators.windows.window_columns import WINDOW_END, WINDOW_START, bound_type, bounds_of, row_times
from tidegate.operators.windows.window_operator import (
    DueRows,
    WindowOperator,
)
from tidegate.operators.windows.window_specs import (
    Cumulating,
    DueByWindows,
    Sliding,
    Times,
    Tumbling,
    ends_of,
    starts_of,
)
from tidegate.protocol.stream_elements import MIN_WATERMARK_MS
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.arrow_types import decoded_type
from tidegate.storage.schemas.column_names import own_name
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateTable

PASSED_BATCHES = 15
"""Number of batches that are sent without comparing, after a batch of which more than half of the rows remained."""
_END = own_name("window_end_ms")


class WindowTop(WindowOperator, RowsOperator):
    """Stores the first rows of each key and window, and emits them when the window ends.

    `schema` is the input schema. `ranking.keys` must include `window_end`.
    """

    def __init__(self, ranking: Ranking, schema: pa.Schema) -> None:
        if WINDOW_END not in ranking.keys:
            raise ConfigurationError(
                f'top_n(emit="final"): the first rows are known when a window ends, so {WINDOW_END!r} must be '
                f'among the keys, which are {list(ranking.keys)}: key_by("window_start", "window_end", ...)'
            )
        self._ranking = ranking
        self.output = ranking.output_schema(schema)
        self._columns = pa.schema([self.output.field(name) for name in schema.names])
        values = pa.schema([field for field in self._columns if field.name not in ranking.keys])
        WindowOperator.__init__(self, None, WINDOW_END)
        RowsOperator.__init__(
            self, key_schema(schema, ranking.keys), {STATE_NAME: values.append(pa.field(MOMENT, pa.int64()))}
        )
        self._due = DueRows(MOMENT)

    def load(self, tables: Sequence[StateTable]) -> None:
        """Loads stored tables into the opened state. Raises CorruptionError for tables that do not fit."""
        super().load(tables)
        self._due.forget()

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Stores the rows of a batch that are among the first so far.

        Raises OperatorError for a row without a window.
        """
        with blame(self.context, batch):
            rows = self._ranking.columns_of(batch, self._columns)
            words = self._ranking.words(rows)
            found = event_times_ms(batch, WindowEnd(WINDOW_END))
            if found.null_count:
                raise ValueError(
                    f"column {WINDOW_END!r} is null in a row, which belongs to no window then"
                    "; filter such rows out before"
                )
        self._fired.time_type = batch.schema.field(WINDOW_END).type
        moments = found.to_numpy(zero_copy_only=False)
        keys = rows.select(self.keys.names)
        late = moments <= self._fired.of_keys(keys, self.context.max_parallelism)
        in_time = self._drop_late(batch, late)
        if len(in_time) < batch.num_rows:
            picked = pa.array(in_time)
            rows, keys, moments = rows.take(picked), keys.take(picked), moments[in_time]
            words = words.take(in_time)
        if rows.num_rows:
            self._add(rows, keys, moments, words)

    def changes(self, cut: Cut) -> OperatorSnapshot:
        """Returns the changes of the stored rows since the last snapshot."""
        return RowsOperator.snapshot(self, cut)

    def _advance_to(self, moment_ms: int, emit: Emit) -> Iterator[None]:
        """Emits the first rows of the windows that have ended at `moment_ms`. Yields between two steps."""
        for limit_ms in self._due.limits(self.tables, moment_ms):
            self._fire(limit_ms, emit)
            self._fired.reach(limit_ms)
            yield
        self._fired.reach(moment_ms)

    def _add(self, rows: pa.RecordBatch, keys: pa.RecordBatch, moments: NDArray[np.int64], words: RankWords) -> None:
        """Compares new rows with the stored rows of their keys, and stores the first `n` of each key.

        `moments` are the window ends, and `words` the order words of the rows.
        """
        index = KeyIndex(tuple(self.keys.names))
        upserted = index.upsert(keys)
        distinct = keys.take(pa.array(upserted.first_rows))
        self.check_owner(distinct)
        ranking, table = self._ranking, self.tables[0]
        found = table.find(distinct)  # key number i is slot i: first rows ascend
        there = len(found.refs)
        groups = np.concatenate((found.keys, upserted.slots.astype(np.int64)))
        if there:
            stored = ranking.words(table.take(found.refs, list(dict.fromkeys(ranking.by))))
            words = stored.then(words)
        kept = first_rows(groups, words.sorting, ranking.n, ranking.ties, index.size)
        table.remove(found.refs[~kept[:there]])
        came = np.flatnonzero(kept[there:])
        if len(came):
            chosen = rows.take(pa.array(came))
            values = [chosen.column(name) for name in chosen.schema.names if name not in self.keys.names]
            self.append(0, chosen.select(self.keys.names), [*values, pa.array(moments[came])])
            self._due.note(moments[came])
        table.done()

    def _fire(self, limit_ms: int, emit: Emit) -> None:
        """Emits the first rows of the windows that end at `limit_ms` or before, and removes them from the state."""
        rows = self._due.take(self.tables[0], limit_ms)
        self.tables[0].done()
        moments: Positions = rows.column(MOMENT).to_numpy()
        groups = KeyIndex(tuple(self.keys.names)).upsert(rows.select(self.keys.names)).slots.astype(np.int64)
        ranks = ranks_of(groups, self._ranking.words(rows).sorting, self._ranking.ties)
        order = np.lexsort((ranks, groups, moments))
        for start in range(0, len(order), OUTPUT_ROWS_MAX):
            piece = order[start : start + OUTPUT_ROWS_MAX]
            columns = rows.select(self._columns.names).take(pa.array(piece)).columns
            columns += [] if self._ranking.rank is None else [pa.array(ranks[piece] + 1)]
            emit(pa.RecordBatch.from_arrays(columns, schema=self.output))


class LocalTop(Operator):
    """Keeps, of each batch, only rows that are among the first of their key and window within the batch.

    With `window` and `time` (the event-time column), the operator adds the bounds of their windows to the rows. Without
    them, rows have a column `window_end` already. `schema` is the input schema. Raises ConfigurationError for columns
    that do not fit.
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
                    f"top_n: the input has columns {taken}, names that the result needs for the bounds of the "
                    "window; rename them with select, or rank rows in the windows that they have: "
                    'key_by("window_start", "window_end").top_n(..., emit="final")'
                )
            self._bound = bound_type(decoded_type(schema.field(time).type), window)
            self.output = pa.schema([*schema, (WINDOW_START, self._bound), (WINDOW_END, self._bound)])
            self._keys = tuple(key for key in ranking.keys if key not in (WINDOW_START, WINDOW_END))
        self._watermark_ms = MIN_WATERMARK_MS
        self._passes = 0

    @property
    def dues(self) -> Sequence[Due]:
        """Returns the rule by which `WindowTop`, the next operator, treats rows as late: the treatment of a row changes
        when a watermark ends one of its windows.

        Empty if rows have windows already, because results of windows are never late.
        """
        return () if self._window is None else (DueByWindows(self._window),)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emits the rows of a batch that can be among the first of their window.

        Raises OperatorError for a row without a time.
        """
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
        """Records the watermark, to detect windows that have ended. Emits nothing."""
        self._watermark_ms = max(self._watermark_ms, watermark_ms)
        return iter(())

    def _windows(self, batch: pa.RecordBatch) -> tuple[NDArray[np.int64], Times]:
        """Returns the row index and the window end, in ms, for each row and each of its windows."""
        if self._window is None:
            ends = event_times_ms(batch, WindowEnd(WINDOW_END))
            return np.arange(batch.num_rows, dtype=np.int64), ends.to_numpy(zero_copy_only=False) + 1
        assert self._time is not None
        parts = [*ends_of(self._window, row_times(batch, self._time, self._window))]
        if len(parts) == 1:
            return parts[0]
        rows, ends = np.concatenate([rows for rows, _ in parts]), np.concatenate([ends for _, ends in parts])
        in_order = np.argsort(rows, kind="stable")  # of equal rows the first to arrive comes first
        return rows[in_order], ends[in_order]

    def _first(self, batch: pa.RecordBatch, rows: NDArray[np.int64], ends: Times) -> NDArray[np.bool_] | None:
        """Returns a mask of the rows that are among the first of their window, or whose window has ended.

        None if all rows remain without a comparison.
        """
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
            self._passes = PASSED_BATCHES
        return kept

    def _groups(self, batch: pa.RecordBatch, rows: NDArray[np.int64], ends: Times) -> tuple[NDArray[np.int64], int]:
        """Returns the group number of each row, where a group is a key and window, and the number of groups."""
        # Sessions that end together may have begun at different times.
        if set(self._keys) <= {WINDOW_END} and ends.min() == ends.max():
            return np.zeros(len(rows), dtype=np.int64), 1
        columns = key_columns(batch, self._keys)
        if self._window is not None:
            arrays = [column if len(rows) == len(column) else column.take(pa.array(rows)) for column in columns.columns]
            columns = pa.RecordBatch.from_arrays([*arrays, pa.array(ends)], names=[*self._keys, _END])
        index = KeyIndex(tuple(columns.schema.names))
        return index.upsert(columns).slots.astype(np.int64), index.size
