"""`ExpiringAggregate` computes running aggregates with a time to live: a key is removed when it has no new rows for
this time.

This is Flink's `table.exec.state.ttl`. Rules:

- A key lives from its first row until `ttl_ms` after its last row. A row that comes later starts the key again, without
  its earlier rows. This also happens within a batch: if a key starts again there, the rows before its last start are
  ignored.
- In event time (`time` names the column) the last row of a key is the row with the greatest time. The output does not
  depend on when state is cleaned up: a key with last time s is removed when the watermark reaches s + 2 * ttl. Rows
  that are `ttl` or more behind the watermark are dropped and counted, because the state of their keys may be gone.
- The progress of event time is state for each key group. A row that was late before a restore is therefore late after
  it, at any parallelism.
- In mode `each` every row has a result, including rows before the last start of their key.
- In processing time all rows of a batch have the time at which the batch is processed.
- The time of the last row is a column of the state, so it survives restores and rescaling. Sweeps visit all keys in
  bounded steps, four times in one time to live.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.aggregates.accumulators import Accumulator, make_accumulator, value_specs
from tidegate.operators.aggregates.aggregate import Aggregate, count
from tidegate.operators.aggregates.aggregate_function import grouped
from tidegate.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.operator import Columns, Emit, OperatorContext
from tidegate.operators.source_splits import Due, DueByAge
from tidegate.operators.state.keys import key_columns
from tidegate.operators.watermarks.late_rows import LATE_RECORDS, GroupMoments
from tidegate.operators.watermarks.watermark_generator import check_timestamp_column, event_times_ms
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.state.common.table_columns import BatchColumns
from tidegate.state.kernels.choose import begin_lives
from tidegate.state.kernels.paged import scatter
from tidegate.state.key_index.hash_table import Upserted
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.column_names import own_name
from tidegate.storage.state.key_groups import key_group_range
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateTable

UPDATED = own_name("ttl_updated_ms")
"""Name of the state column with the time of the last row of a key, in ms since the epoch."""

_REACHED_STATE = "ttl.watermark"
"""Name of the state with the watermark that each key group has reached."""

_SWEEPS = 4
"""Number of scans for expired keys within one time to live."""
_NEVER = -(1 << 62)
"""Stored as the time of the last row of a key that has had no row."""


class ExpiringAggregate(KeyedAggregate):
    """Running aggregates of each key with a time to live: emits the updated keys of each batch, or one result for each
    row.

    `ttl_ms` is the time to live, in ms. `time` names the event-time column, or is None for processing time.
    """

    def __init__(
        self,
        keys: tuple[str, ...],
        aggregates: Mapping[str, Aggregate],
        ttl_ms: int,
        time: str | None = None,
        input_schema: pa.Schema | None = None,
        emit: Literal["update", "each"] = "update",
    ) -> None:
        if ttl_ms <= 0:
            raise ConfigurationError(
                'aggregate: ttl must be greater than 0, such as ttl="1h"; to keep keys without a limit remove ttl='
            )
        self._shown = tuple(aggregates)
        self._ttl_ms, self._time = ttl_ms, time
        # It is kept as a count is, but written here.
        super().__init__(keys, {**aggregates, UPDATED: count()}, emit, input_schema)
        self._swept_ms: int | None = None

    def needed_columns(self, after: Columns) -> Columns:
        """Returns the input columns that the operator reads, which include the event-time column."""
        needed = super().needed_columns(after)
        return needed if needed is None or self._time is None else needed | {self._time}

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """Returns the key columns and the aggregates."""
        if self._time is not None:
            check_timestamp_column(input_schema, self._time)
        found = super().output_schema(input_schema)
        return pa.schema([field for field in found if field.name != UPDATED])

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Opens the keyed state and restores the watermark that each key group had reached.

        Raises like `KeyedAggregate.open`.
        """
        groups = key_group_range(context.subtask, context.max_parallelism, context.parallelism)
        self._reached = GroupMoments(groups, _REACHED_STATE, "watermark_ms", "aggregates with a time to live")
        for table in restored:
            if table.kind is StateKind.UNION:
                self._reached.load(table)
        super().open(context, restored)
        self._late = context.metrics.counter(LATE_RECORDS)

    @property
    def waits_for_event_time(self) -> bool:
        """Returns True if keys expire in event time."""
        return self._time is not None

    @property
    def dues(self) -> Sequence[Due]:
        """Returns the rule by which rows are late: a row is dropped once the watermark reaches its event time plus the
        time to live.

        Empty in processing time.
        """
        return () if self._time is None else (DueByAge(self._ttl_ms),)

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        """Removes the keys that the watermark makes expire, in bounded steps. Yields between two steps."""
        if self._time is None or watermark_ms == MAX_WATERMARK_MS:
            return
        for groups, reached_ms in [*self._reached.runs()]:
            if reached_ms < watermark_ms:  # After a restore at another parallelism some may be ahead.
                self._reached.advance(groups, watermark_ms)
        if self._swept_ms is None or watermark_ms - self._swept_ms >= self._pause_ms:
            self._swept_ms = watermark_ms
            yield from self._sweep(watermark_ms - 2 * self._ttl_ms)

    def snapshot(self, cut: Cut) -> OperatorSnapshot:
        """Returns a snapshot of the keyed state and, in event time, of the watermark that each key group has
        reached.
        """
        frozen = super().snapshot(cut)
        return frozen if self._time is None else replace(frozen, states=(*frozen.states, self._reached.freeze()))

    def changes(self, cut: Cut) -> OperatorSnapshot:
        """Returns the changes of keyed state since the last call, for the changelog. Only `snapshot` has watermarks."""
        return super().snapshot(cut)

    def next_processing_time_ms(self) -> int | None:
        """Returns the processing time of the next scan for expired keys, in ms.

        None in event time, or before the first row.
        """
        if self._time is not None or self._table is None:
            return None
        now_ms = self.context.time.now_ms
        # A clock that was set back delays no sweep for longer than it would have waited.
        if self._swept_ms is None or self._swept_ms > now_ms:
            self._swept_ms = now_ms
        return self._swept_ms + self._pause_ms

    def on_processing_time(self, now_ms: int, emit: Emit) -> Iterator[None]:
        """Removes expired keys in bounded steps if a scan is due. Yields between two steps."""
        due_ms = self.next_processing_time_ms()
        if due_ms is not None and due_ms <= now_ms:
            self._swept_ms = now_ms
            yield from self._sweep(now_ms - self._ttl_ms)

    @property
    def _pause_ms(self) -> int:
        return max(1, self._ttl_ms // _SWEEPS)

    def _advance(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        self._admit(batch.schema)
        if self._time is not None:
            batch = self._in_time(batch, self._time)
        return super()._advance(batch) if batch.num_rows else None

    def _accumulate(self, batch: pa.RecordBatch, keys: pa.RecordBatch, upserted: Upserted) -> pa.RecordBatch | None:
        begins = self.begins_anew(batch, upserted)
        if not begins.any():
            return super()._accumulate(batch, keys, upserted)
        results = self._of_lives(batch, upserted, begins) if self._emit_mode == "each" else None
        counted, counted_keys, counted_upserted = self._begun_anew(batch, upserted, begins)
        assert not self.begins_anew(counted, counted_upserted).any(), "a key begins anew among the rows that count"
        updates = super()._accumulate(counted, counted_keys, counted_upserted)
        return updates if results is None else self._output(keys, results)

    def _running(
        self, batch: pa.RecordBatch, slots: NDArray[np.int32], accumulators: Sequence[Accumulator]
    ) -> list[pa.Array]:
        return super()._running(batch, slots, accumulators[: len(self._shown)])

    def _of_lives(self, batch: pa.RecordBatch, upserted: Upserted, begins: NDArray[np.uint8]) -> list[pa.Array]:
        """Returns the result after each row of a batch in which some keys expire and start again with empty state.

        Does not change the state table. The rows of a key are divided at each point where the key starts again. Each
        division uses a temporary slot. The first division continues from the stored state of the key.
        """
        assert self._table is not None
        order = np.argsort(upserted.slots, kind="stable")
        slots = upserted.slots[order]
        is_new = np.zeros(batch.num_rows, dtype=np.bool_)
        is_new[upserted.new_rows] = True
        first_of_key = np.diff(slots, prepend=-1) != 0
        starts = np.flatnonzero(first_of_key | (begins[order] > 0))  # of the lives, in the order of the keys
        goes_on = first_of_key[starts] & (begins[order][starts] == 0) & ~is_new[order[starts]]
        places = np.empty(len(starts), dtype=np.int32)
        places[np.argsort(~goes_on, kind="stable")] = np.arange(
            len(starts)
        )  # lives that continue from the state come first
        place_of_row = np.empty(batch.num_rows, dtype=np.int32)
        place_of_row[order] = np.repeat(places, np.diff(starts, append=len(order)))
        shown = {name: aggregate for name, aggregate in self._aggregates.items() if name != UPDATED}
        aside = BatchColumns([spec for name, a in shown.items() for spec in value_specs(a, self._fields[name])])
        aside.begin(len(starts))
        held = slots[starts[goes_on]]
        for name in (field.name for label in shown for field in self._fields[label]):
            aside.column(name).put(places[goes_on], self._table.column(name).take(held))
        aside.filled(len(held))
        accumulators = [make_accumulator(a, self._fields[name], aside) for name, a in shown.items()]
        return self._running(batch, place_of_row, accumulators)

    def begins_anew(self, batch: pa.RecordBatch, upserted: Upserted) -> NDArray[np.uint8]:
        """Stores the times of the rows.

        Returns a mask with 1 for each row before which its key had expired, so that the key starts again with empty
        state.
        """
        assert self._table is not None
        times = np.full(batch.num_rows, self.context.time.now_ms, dtype=np.int64)
        if self._time is not None:
            times = event_times_ms(batch, self._time).to_numpy()
        pages = self._table.column(UPDATED).pages
        fresh = upserted.slots[upserted.new_rows]
        scatter(pages, fresh, np.full(len(fresh), _NEVER, dtype=np.int64))
        begins = np.zeros(len(times), dtype=np.uint8)
        begin_lives(pages, upserted.slots, times, self._ttl_ms, _NEVER, begins)
        return begins

    def _begun_anew(
        self, batch: pa.RecordBatch, upserted: Upserted, begins: NDArray[np.uint8]
    ) -> tuple[pa.RecordBatch, pa.RecordBatch, Upserted]:
        """Removes the keys that expire within a batch, and inserts them again for the rows after their last expiry.

        `begins` marks the rows at which a key starts again. Returns the rows from the last start of each key on, their
        key columns, and the result of their `upsert`.
        """
        assert self._table is not None
        codes, distinct = grouped(upserted.slots)
        rows = np.flatnonzero(begins)
        last = np.full(len(distinct), -1, dtype=np.int64)
        last[codes[rows]] = rows
        # Keys that are new in this batch are made again, because the table has taken in nothing of them.
        gone = np.concatenate((distinct[last >= 0], upserted.slots[upserted.new_rows]))
        self._table.remove(gone)
        self._table.done()
        counted = batch.filter(pa.array(np.arange(batch.num_rows) >= last[codes]))
        keys = key_columns(counted, self._keys)
        return counted, keys, self._table.upsert(keys)

    def _add_rows(self, accumulator: Accumulator, name: str, batch: pa.RecordBatch, upserted: Upserted) -> None:
        if name != UPDATED:
            super()._add_rows(accumulator, name, batch, upserted)

    def _output(self, keys: pa.RecordBatch, results: Sequence[pa.Array]) -> pa.RecordBatch:
        shown = results[: len(self._shown)]
        return pa.RecordBatch.from_arrays([*keys.columns, *shown], names=[*self.keys, *self._shown])

    def _in_time(self, batch: pa.RecordBatch, time: str) -> pa.RecordBatch:
        """Returns the rows of a batch that are not late, and counts the late rows. `time` is the event-time column."""
        found = event_times_ms(batch, time)
        if found.null_count:
            raise ValueError(
                f"column {time!r} is null in a row, but event time needs a value; filter such rows out before"
            )
        reached_ms = self._reached.of_keys(key_columns(batch, self._keys), self.context.max_parallelism)
        on_time = found.to_numpy() > np.maximum(reached_ms, MIN_WATERMARK_MS + self._ttl_ms) - self._ttl_ms
        if on_time.all():
            return batch
        self._late.inc(int(len(on_time) - on_time.sum()))
        return batch.filter(pa.array(on_time))

    def _sweep(self, expired_ms: int) -> Iterator[None]:
        """Removes the keys whose last row was at `expired_ms` or earlier, in bounded steps. Yields between two steps.

        A batch may be processed between two steps, and the scan may have read a key before that. Each expired key is
        therefore looked up again before it is removed.
        """
        if self._table is None:
            return
        table, column = self._table, self._table.column(UPDATED)
        for keys, slots in table.scan(OUTPUT_ROWS_MAX):
            expired = column.raw(slots) <= expired_ms
            if expired.any():
                found = table.upsert(keys.filter(pa.array(expired)))
                gone = column.raw(found.slots) <= expired_ms
                gone[found.new_rows] = True  # not there any more: it was made to be looked up
                table.remove(found.slots[gone])
                table.done()
                self._changed_rows += int(gone.sum())
            yield
