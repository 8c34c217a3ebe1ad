"""`WindowTop`: the first `n` rows of each key and window, which come out once, when the window ends.

Rules:

- Rows say themselves which window they are in, by `window_end`: behind a window's aggregate they have it, and
  `LocalTop` gives it to plain rows. The keys have it among them, so a window of a key is in one subtask.
- State is the rows that are among the first so far: at most `n` of each key and window, and those that share the last
  rank with `ties`. Nothing is told before the window ends, so nothing is taken back.
- When the watermark passes, the windows that are due are ranked together, as many at a time as have `FIRED_ROWS` rows.
  They come out in the order of windows, and of ranks within a key. Their rows are gone then, in the same step.
- Up to which moment windows have fired is state (`FiredGroups`): a row for one that has fired is late. It is dropped,
  counted, and goes to the side output of late rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.operator import Emit, OperatorContext
from tidegate.operators.operator_errors import blame
from tidegate.operators.ranking.ranks import Positions, RankWords, first_rows, ranks_of
from tidegate.operators.ranking.top_n import MOMENT, STATE_NAME, Ranking
from tidegate.operators.source_splits import Due
from tidegate.operators.state.keys import key_schema
from tidegate.operators.state.operator_backend import RowsOperator
from tidegate.operators.watermarks.late_rows import LATE_RECORDS, set_aside
from tidegate.operators.watermarks.watermark_generator import WindowEnd, event_times_ms
from tidegate.operators.windows.fired_groups import FiredGroups
from tidegate.operators.windows.window_rows import WINDOW_END
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.state.key_groups import key_group_range
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateTable

FIRED_ROWS = 262_144
"""Windows of about so many rows are ranked in one step, but at least one window."""
_SCANNED_ROWS = 131_072
_TIME_MS_END = 1 << 60
"""After every window, and far from the end of 64 bits."""


class WindowTop(RowsOperator):
    """The first rows of each key and window. `schema` is that of the input; `ranking.keys` have `window_end`."""

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
        super().__init__(key_schema(schema, ranking.keys), {STATE_NAME: values.append(pa.field(MOMENT, pa.int64()))})
        self._next_ms: int | None = None
        """No window in the state ends before; None: not known."""

    @property
    def dues(self) -> Sequence[Due]:
        """None of its own: `LocalTop` before it knows the windows."""
        return ()

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Take rows and moments back. CorruptionError for other columns."""
        self._fired = FiredGroups(key_group_range(context.subtask, context.max_parallelism, context.parallelism))
        for table in restored:
            if table.kind is not StateKind.KEYED:
                self._fired.load(table)
        self._late = context.metrics.counter(LATE_RECORDS)
        super().open(context, restored)

    def load(self, tables: Sequence[StateTable]) -> None:
        """CorruptionError as `open`."""
        super().load(tables)
        self._next_ms = None

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Keep the rows that are among the first so far. OperatorError for a row without a time."""
        with blame(self.context, batch):
            rows = self._ranking.columns_of(batch, self._columns)
            words = self._ranking.words(rows)
            found = event_times_ms(batch, WindowEnd(WINDOW_END))
            if found.null_count:
                raise ValueError(f"column {WINDOW_END!r} is null in a row, which belongs to no window then")
        self._fired.time_type = batch.schema.field(WINDOW_END).type
        moments = found.to_numpy(zero_copy_only=False)
        keys = rows.select(self.keys.names)
        late = moments <= self._fired.of_keys(keys, self.context.max_parallelism)
        in_time = set_aside(batch, late, self._late, self.context.emit_aside)
        if len(in_time) < batch.num_rows:
            picked = pa.array(in_time)
            rows, keys, moments = rows.take(picked), keys.take(picked), moments[in_time]
            words = words.take(in_time)
        if rows.num_rows:
            self._add(rows, keys, moments, words)

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        """Emit the first rows of the windows that have ended."""
        until_ms = min(watermark_ms, _TIME_MS_END)
        while self._next_ms is None or self._next_ms <= until_ms:
            limit_ms, self._next_ms = self._due(until_ms)
            if limit_ms is None:
                break
            self._fire(limit_ms, emit)
            self._advance(limit_ms)
            yield
        self._advance(until_ms)

    def snapshot(self, cut: Cut) -> OperatorSnapshot:
        """Freeze the rows, and what has fired."""
        frozen = self.changes(cut)
        return replace(frozen, states=(*frozen.states, self._fired.freeze()))

    def changes(self, cut: Cut) -> OperatorSnapshot:
        """Freeze the rows."""
        return super().snapshot(cut)

    def _advance(self, moment_ms: int) -> None:
        for groups, fired_ms in [*self._fired.runs()]:
            if fired_ms < moment_ms:
                self._fired.advance(groups, moment_ms)

    def _add(self, rows: pa.RecordBatch, keys: pa.RecordBatch, moments: NDArray[np.int64], words: RankWords) -> None:
        """Compare rows with those that are kept, and keep the first ones of both."""
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
            if self._next_ms is not None:
                self._next_ms = min(self._next_ms, int(moments[came].min()))
        table.done()

    def _due(self, until_ms: int) -> tuple[int | None, int]:
        """The last moment whose windows fire in this step, None without any, and the first one that stays."""
        counts: dict[int, int] = {}
        for rows, _ in self.tables[0].scan([MOMENT], _SCANNED_ROWS):
            for moment, count in zip(*np.unique(rows.column(MOMENT).to_numpy(), return_counts=True), strict=True):
                counts[int(moment)] = counts.get(int(moment), 0) + int(count)
        self.tables[0].done()
        limit, rows_due = None, 0
        for moment in sorted(counts):
            if moment > until_ms or (limit is not None and rows_due + counts[moment] > FIRED_ROWS):
                return limit, moment
            limit, rows_due = moment, rows_due + counts[moment]
        return limit, np.iinfo(np.int64).max

    def _fire(self, limit_ms: int, emit: Emit) -> None:
        """Emit the first rows of windows up to `limit_ms`, and forget them."""
        table = self.tables[0]
        refs = np.concatenate(
            [refs[rows.column(MOMENT).to_numpy() <= limit_ms] for rows, refs in table.scan([MOMENT], _SCANNED_ROWS)]
        )
        rows = table.take(refs)
        table.remove(refs)
        table.done()
        moments: Positions = rows.column(MOMENT).to_numpy()
        groups = KeyIndex(tuple(self.keys.names)).upsert(rows.select(self.keys.names)).slots.astype(np.int64)
        ranks = ranks_of(groups, self._ranking.words(rows).sorting, self._ranking.ties)
        order = np.lexsort((ranks, groups, moments))
        for start in range(0, len(order), OUTPUT_ROWS_MAX):
            piece = order[start : start + OUTPUT_ROWS_MAX]
            columns = rows.select(self._columns.names).take(pa.array(piece)).columns
            columns += [] if self._ranking.rank is None else [pa.array(ranks[piece] + 1)]
            emit(pa.RecordBatch.from_arrays(columns, schema=self.output))
