"""`Deduplicate` emits one row of each key: the first or last by a column, or the first or last to arrive.

Rules:

- Without `by` the order is the order of arrival. The first row of a key is emitted, and nothing replaces it. With
  `keep="last"` there is no state: each batch emits the last row of every key in it.
- With `by` a row is emitted when it is before (or after) the row that was emitted last for its key. A batch emits at
  most one row of each key. Of rows with equal values in `by`, the first (or last) to arrive counts.
- State is the key, and the value of `by` and the time of the last emitted row. The row itself is not stored.
- The time to live is measured in event time. A row that is at least `ttl` later than the last emitted row of its key is
  treated like the first row of a new key. The output does not depend on when state is cleaned up: an entry of time s is
  removed when the watermark reaches s + 2 * ttl. Rows that are `ttl` or more behind the watermark are dropped and
  counted, because the state of their keys may be gone.
- The table is scanned for expired entries when event time has advanced by a quarter of the time to live, so each entry
  is visited only a few times.
- The state is one table (`KeptRows`), created from the first batch or from a checkpoint, whose columns must match. The
  operator checks that each new key and each restored key belongs to this subtask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.operator import Emit, Operator, OperatorContext
from tidegate.operators.operator_errors import blame
from tidegate.operators.ranking.ranks import check_order_column, order_form, order_words
from tidegate.operators.source_splits import Due, DueByAge
from tidegate.operators.state.keys import check_owner, key_columns, key_schema
from tidegate.operators.state.operator_backend import frozen_backend, make_backend
from tidegate.operators.watermarks.late_rows import LATE_RECORDS, GroupMoments
from tidegate.operators.watermarks.watermark_generator import check_timestamp_column, event_times_ms
from tidegate.protocol.failures import ChangedTypeError
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.state.common.backend import KeyedBackend, ValueSpec, VectorTable
from tidegate.state.kernels.choose import NO_WORDS, better_rows, first_arrivals, last_of_each
from tidegate.state.kernels.paged import NO_PAGES
from tidegate.state.kernels.partition import gather, subtask_table
from tidegate.state.key_index.hash_table import Upserted
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ConfigurationError, CorruptionError
from tidegate.storage.schemas.column_names import columns_text, own_name, part_name
from tidegate.storage.schemas.evolution import migrated
from tidegate.storage.state.handover import keys_at_most, merge_small_tables, taken
from tidegate.storage.state.key_groups import key_group_range
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateTable

STATE_NAME = "deduplicate"
_REACHED_STATE = "deduplicate.reached"

_TIME, _SEEN = own_name("time_ms"), own_name("seen")
_SWEEPS = 4
"""Number of scans for expired keys within one time to live."""

_NO_ROWS: NDArray[np.int32] = np.zeros(0, dtype=np.int32)

Keep = Literal["first", "last"]


class Deduplicate(Operator):
    """Emits one row of each key: the first or the last, by the column `by` or by arrival (`by` is None).

    `time` names the event-time column, which a time to live of `ttl_ms` needs. Raises ConfigurationError for arguments
    that contradict each other.
    """

    def __init__(
        self,
        keys: tuple[str, ...],
        by: str | None = None,
        keep: Keep = "first",
        time: str | None = None,
        ttl_ms: int | None = None,
    ) -> None:
        self._keys = tuple(keys)
        self._by = by
        self._last = keep == "last"
        self._time = time
        self._ttl_ms = ttl_ms
        self._check_arguments(keep)
        self.has_keyed_state = by is not None or not self._last
        self._kept: KeptRows | None = None
        self._seen: pa.Schema | None = None
        self._swept_ms: int | None = None

    def validate(self, input_schema: pa.Schema) -> None:
        """Raises ConfigurationError if batches of this schema cannot be deduplicated."""
        key_schema(input_schema, self._keys)
        if self._by is not None:
            check_order_column(input_schema, self._by, "deduplicate")
        if self._ttl_ms is not None:
            assert self._time is not None
            check_timestamp_column(input_schema, self._time)

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Restores the state.

        Raises CorruptionError and ConfigurationError for tables that do not fit (see `KeptRows.load`).
        """
        super().open(context, restored)
        groups = key_group_range(context.subtask, context.max_parallelism, context.parallelism)
        self._reached = GroupMoments(groups, _REACHED_STATE, "watermark_ms", "deduplicate with a time to live")
        for table in restored:
            if table.kind is StateKind.UNION:
                self._reached.load(table)
        if self.has_keyed_state:
            self._kept = KeptRows(context, STATE_NAME, self._keys)
            self._kept.load([table for table in restored if table.kind is not StateKind.UNION])
        if self._ttl_ms is not None:
            self._late = context.metrics.counter(LATE_RECORDS)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emits the rows that are the first or last of their key.

        Raises OperatorError for columns that do not fit, or for a null in the column `by`.
        """
        with blame(self.context, batch):
            if self._seen is None or not batch.schema.equals(self._seen):
                self.validate(batch.schema)
                self._seen = batch.schema
            times = NO_WORDS
            if self._ttl_ms is not None:
                batch, times = self._in_time(batch)
            rows = self._winners(batch, times) if batch.num_rows else _NO_ROWS
        if len(rows) == batch.num_rows > 0:
            emit(batch)
        elif len(rows):
            emit(gather(batch, rows))

    @property
    def waits_for_event_time(self) -> bool:
        """Returns True if keys expire in event time."""
        return self._ttl_ms is not None

    @property
    def dues(self) -> Sequence[Due]:
        """Returns the rule by which rows are late: a row is dropped once the watermark reaches its event time plus the
        time to live.

        Empty without a time to live.
        """
        return () if self._ttl_ms is None else (DueByAge(self._ttl_ms),)

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        """Removes expired keys, if enough event time has passed since the last scan.

        Yields between two bounded steps.
        """
        if self._ttl_ms is None or watermark_ms == MAX_WATERMARK_MS:
            return
        for groups, reached_ms in [*self._reached.runs()]:
            if reached_ms < watermark_ms:  # After a restore it may have been further.
                self._reached.advance(groups, watermark_ms)
        pause = max(1, self._ttl_ms // _SWEEPS)
        if self._swept_ms is None or watermark_ms - self._swept_ms >= pause:
            self._swept_ms = watermark_ms
            yield from self._sweep(watermark_ms - 2 * self._ttl_ms)

    def snapshot(self, cut: Cut) -> OperatorSnapshot | None:
        """Returns a snapshot of the stored keys, if any, and of the watermark that each key group has reached, which
        decides which rows are late.
        """
        frozen = self.changes(cut)
        if frozen is None or self._ttl_ms is None:
            return frozen
        return replace(frozen, states=(*frozen.states, self._reached.freeze()))

    def changes(self, cut: Cut) -> OperatorSnapshot | None:
        """Returns the changes of the stored keys since the last snapshot, without the reached watermarks."""
        return None if self._kept is None else self._kept.snapshot(cut)

    @property
    def changed_bytes(self) -> int:
        """Returns an estimate of the changed bytes since the last snapshot: 8 bytes for each column of a changed
        entry.
        """
        return 0 if self._kept is None else self._kept.changed_bytes

    @property
    def keyed_backend(self) -> KeyedBackend | None:
        """Returns the backend that stores the keys."""
        return None if self._kept is None else self._kept.backend

    def load(self, tables: Sequence[StateTable]) -> None:
        """Loads stored tables into the opened state.

        Raises CorruptionError and ConfigurationError for tables that do not fit.
        """
        assert self._kept is not None, "the keyed state is not open"
        self._kept.load(tables)

    def hand_over(self) -> None:
        """Drops the reference to the backend without closing it, because the next attempt of the task continues with
        it.
        """
        self._kept = None

    def close(self) -> None:
        """Releases the resources of the backend."""
        if self._kept is not None:
            self._kept.backend.close()

    def _check_arguments(self, keep: str) -> None:
        if not self._keys:
            raise ConfigurationError("deduplicate needs at least one key column: key_by(...)")
        if keep not in ("first", "last"):
            raise ConfigurationError(f'deduplicate: keep must be "first" or "last", not {keep!r}')
        if self._ttl_ms is None:
            return
        if self._ttl_ms <= 0:
            raise ConfigurationError(
                'deduplicate: ttl must be greater than 0, such as ttl="1h"; to keep rows without a limit remove ttl='
            )
        if self._time is None:
            raise ConfigurationError(
                "deduplicate: ttl is event time, and the stream has none: call assign_timestamps before key_by"
            )
        if self._by is None and self._last:
            raise ConfigurationError(
                'deduplicate: the last row to arrive (keep="last" without by=) is found without state, so there is '
                "nothing that a ttl could limit; remove ttl="
            )

    def _in_time(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, NDArray[np.int64]]:
        """Returns the rows of a batch that are not late, and their event times in ms. Counts the late rows."""
        assert self._time is not None and self._ttl_ms is not None
        found = event_times_ms(batch, self._time)
        if found.null_count:
            raise ValueError(
                f"column {self._time!r} is null in a row, but event time needs a value; filter such rows out before"
            )
        times: NDArray[np.int64] = found.to_numpy(zero_copy_only=False)
        reached = self._reached.of_keys(key_columns(batch, self._keys), self.context.max_parallelism)
        on_time = times > np.maximum(reached, MIN_WATERMARK_MS + self._ttl_ms) - self._ttl_ms
        if not on_time.all():
            self._late.inc(int(len(times) - on_time.sum()))
            batch, times = batch.filter(pa.array(on_time)), times[on_time]
        times = times.view()
        times.flags.writeable = False
        return batch, times

    def _winners(self, batch: pa.RecordBatch, times: NDArray[np.int64]) -> NDArray[np.int32]:
        if self._kept is None:
            slots = KeyIndex(self._keys).upsert(key_columns(batch, self._keys)).slots
            return last_of_each(slots, np.ones(batch.num_rows, dtype=np.uint8))
        table = self._kept.admit(batch.schema, self._fields(batch.schema))
        words = NO_WORDS if self._by is None else order_words(batch, self._by)
        only_keys = self._by is None and self._ttl_ms is None
        upserted = self._kept.upsert(batch, new_only=only_keys)
        if only_keys:
            table.done()
            return upserted.new_rows
        wins = np.zeros(batch.num_rows, dtype=np.uint8)
        fresh = flags_of(upserted.new_rows, batch.num_rows)
        pages = NO_PAGES if self._ttl_ms is None else table.column(_TIME).pages
        ttl_ms = self._ttl_ms or 0
        if self._by is None:
            first_arrivals(pages, upserted.slots, fresh, times, ttl_ms, wins)
            table.done()
            return np.flatnonzero(wins).astype(np.int32)
        order = table.column(self._order_name(batch.schema)).pages
        flip = -1 if self._last else 0
        better_rows(order, upserted.slots, fresh, words, flip, self._last, pages, times, ttl_ms, wins)
        table.done()
        return last_of_each(upserted.slots, wins)

    def _fields(self, schema: pa.Schema) -> list[pa.Field]:
        fields = [] if self._by is None else [pa.field(self._order_name(schema), pa.int64())]
        if self._ttl_ms is not None:
            fields.append(pa.field(_TIME, pa.int64()))
        return fields or [pa.field(_SEEN, pa.uint8())]

    def _order_name(self, schema: pa.Schema) -> str:
        assert self._by is not None
        return part_name(self._by, f".order ({order_form(schema.field(self._by).type)})")

    def _sweep(self, expired_ms: int) -> Iterator[None]:
        """Removes the entries whose time is `expired_ms` or earlier. Yields between two bounded steps."""
        table = None if self._kept is None else self._kept.table
        if table is None:
            return
        for keys in _expired_keys(table, expired_ms):
            upserted = table.upsert(keys)
            expired = table.column(_TIME).raw(upserted.slots) <= expired_ms  # a batch may have come between two steps
            expired[upserted.new_rows] = True
            table.remove(upserted.slots[expired])
            table.done()
            yield


def _expired_keys(table: VectorTable, expired_ms: int) -> list[pa.RecordBatch]:
    """Returns the keys of all expired entries. They are collected before any is removed, because a removal may move
    other entries.
    """
    found = []
    for keys, slots in table.scan(OUTPUT_ROWS_MAX):
        expired = pc.less_equal(table.column(_TIME).take(slots), expired_ms)
        if expired.true_count:
            found.append(keys.filter(expired))
    return found


_RESTORED_ROWS = 131_072
"""Greatest number of stored rows that a restore loads at a time."""


class KeptRows:
    """A state table with an entry for each key and fixed-width value columns. `state` is the name of the table.

    New entries have the value 0.
    """

    def __init__(self, context: OperatorContext, state: str, keys: tuple[str, ...]) -> None:
        self.backend: KeyedBackend = make_backend(context, keys)
        self.table: VectorTable | None = None
        """The table, or None before the first key."""
        self.changed_rows = 0
        """Number of entries that changed since the last snapshot.

        An entry counts once for each batch that changed it.
        """
        self._context = context
        self._state = state
        self._keys = keys
        self._owners = subtask_table(context.max_parallelism, context.parallelism)
        self._schema: pa.Schema | None = None
        self._seen: pa.Schema | None = None
        stored = self.backend.stored_schema(state)
        if stored is not None:
            self._create(stored)

    @property
    def changed_bytes(self) -> int:
        """Estimate of the bytes that changed since the last snapshot: 8 bytes for each column of a changed entry."""
        return self.changed_rows * 8 * (0 if self._schema is None else len(self._schema))

    def admit(self, schema: pa.Schema, fields: Sequence[pa.Field]) -> VectorTable:
        """Returns the state table for batches with this schema. `fields` are its value columns. The first batch creates
        the table.

        Raises ChangedTypeError if the columns differ from the columns of the table.
        """
        if self.table is not None and self._seen is not None and schema.equals(self._seen):
            return self.table
        wanted = pa.schema([*key_schema(schema, self._keys), *fields])
        if self._schema is None:
            self._create(wanted)
        elif wanted.names == self._schema.names and not wanted.equals(self._schema) and self._seen is None:
            self._retype(wanted)
        elif not wanted.equals(self._schema):
            raise ChangedTypeError(
                f"operator {self._context.name!r} (uid {self._context.uid!r}) keeps {columns_text(self._schema)}, but "
                f"the batch needs {columns_text(wanted)}: a column has changed its type; cast it with with_columns "
                "before key_by, or give the operator a new uid to start without what is kept"
            )
        self._seen = schema
        assert self.table is not None
        return self.table

    def upsert(self, batch: pa.RecordBatch, new_only: bool = False) -> Upserted:
        """Looks up the keys of a batch in the table, adds new keys, and returns their slots. With `new_only`, only new
        keys are marked as changed.

        Must be followed by `done` of the table. Raises an error for a key that belongs to another subtask.
        """
        assert self.table is not None
        keys = key_columns(batch, self._keys)
        upserted = self.table.upsert(keys, new_only)
        if len(upserted.new_rows):
            check_owner(self._context, gather(keys, upserted.new_rows), self._owners)
        self.changed_rows += len(upserted.new_rows if new_only else upserted.first_rows)
        return upserted

    def snapshot(self, cut: Cut) -> OperatorSnapshot:
        """Returns a snapshot of the state that `cut` selects."""
        if cut.keyed:
            self.changed_rows = 0
        return frozen_backend(self._context, self.backend, cut)

    def load(self, tables: Sequence[StateTable]) -> None:
        """Loads stored tables.

        Raises CorruptionError if a key occurs twice or belongs to another subtask, and ConfigurationError if a table
        has other columns.
        """
        stored = [table.rows.schema for table in tables if not table.removed]
        if stored and self.table is None:
            self._create(stored[-1])
        if self.table is None:
            return  # nothing but removed keys, which are in no layer below
        assert self._schema is not None
        self.backend.expect(keys_at_most(tables))
        try:
            for table in merge_small_tables(taken(tables), _RESTORED_ROWS):
                self._check_keys(table.rows.schema, table.state)
                check_owner(self._context, table.rows.select(list(self._keys)), self._owners)
                rows = table.rows if table.removed else self._migrated(table.rows)
                self.backend.load(replace(table, rows=rows))
            self.backend.loaded()
        except CorruptionError as error:
            raise CorruptionError(
                f"operator {self._context.uid!r}: {error}; restore another checkpoint or a savepoint"
            ) from error

    def _create(self, stored: pa.Schema) -> None:
        stored = stored.remove_metadata()
        self._check_keys(stored, self._state)
        self.table = self.backend.table(self._state, self._specs(stored))
        self.backend.fix_keys(pa.schema([pa.field(name, stored.field(name).type) for name in self._keys]))
        self._schema = stored

    def _retype(self, wanted: pa.Schema) -> None:
        """Converts the stored entries to the columns `wanted`, because the first batch after a restore has wider
        types.
        """
        before, self._schema = self._schema, wanted
        assert before is not None
        if any(before.field(name).type != wanted.field(name).type for name in self._keys):
            raise ChangedTypeError(
                f"operator {self._context.name!r} (uid {self._context.uid!r}) keeps {columns_text(before)}, and a key "
                f"column has another type now: {columns_text(wanted)}; cast it with with_columns before key_by"
            )
        self.table = self.backend.retype(self._state, self._specs(wanted), self._migrated)

    def _migrated(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        assert self._schema is not None
        rows = rows.replace_schema_metadata(None)
        return migrated(rows, self._schema, self._state, self._context.uid)

    def _specs(self, schema: pa.Schema) -> list[ValueSpec]:
        return [ValueSpec(field.name, field.type, 0) for field in list(schema)[len(self._keys) :]]

    def _check_keys(self, schema: pa.Schema, state: str) -> None:
        names = schema.names[: len(self._keys)]
        if state != self._state or tuple(names) != self._keys:
            raise ConfigurationError(
                f"operator {self._context.uid!r} keeps {self._state!r} for the keys {list(self._keys)}, but the "
                f"checkpoint has {state!r} with the columns {schema.names}; restore with the program that wrote it, or "
                "change the uid"
            )


def flags_of(rows: NDArray[np.int32], count: int) -> NDArray[np.uint8]:
    """Returns an array of `count` bytes, which is 1 at the indices `rows` and 0 elsewhere."""
    flags = np.zeros(count, dtype=np.uint8)
    flags[rows] = 1
    return flags
