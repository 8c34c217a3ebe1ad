"""`EventTimeOrder`: holds the rows of a keyed stream until the watermark has passed them, and emits them by event time.

Rules:

- A row waits until the watermark has passed its time. All rows up to that time have then arrived, and are emitted
  together, sorted by event time. Rows of one key with equal times are emitted in arrival order.
- A row is late if the watermark has already passed its time when the row arrives. Late rows are counted and go to the
  side output `late`. The watermark that each key group has reached is stored as state. After a restore there is no
  watermark at first, and without this state a late row would be emitted after newer rows.
- The watermark is forwarded after the rows that it releases, so these rows are not late for later operators.
- State is one row table: the rows that wait. Keys are stored in the form in which they are compared. Key columns whose
  original values may differ from that form (floats, dictionaries) are stored unchanged as well.
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
from tidegate.operators.state.keys import key_columns, key_schema
from tidegate.operators.state.operator_backend import RowsOperator
from tidegate.operators.watermarks.late_rows import LATE_RECORDS, GroupMoments, set_aside
from tidegate.operators.watermarks.watermark_generator import check_timestamp_column, event_times_ms
from tidegate.protocol.failures import ChangedTypeError, OperatorError
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.schemas.arrow_types import decoded_type
from tidegate.storage.schemas.column_names import own_name
from tidegate.storage.state.key_groups import key_group_range
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateTable

STATE_NAME = "waiting"
MOMENT = own_name("order_time_ms")
"""Name of the stored column with the event time of a row."""

_REACHED_STATE = "order.reached"
_SCANNED_ROWS = 131_072
_STEPS_MAX = 32
"""Greatest number of steps in which the rows that are due are emitted.

Limited because each step scans all waiting rows.
"""


class EventTimeOrder(RowsOperator):
    """Emits the rows of a keyed stream sorted by the event-time column `time`, once the watermark has passed them.

    `schema` is the input schema. The attribute `output` is the output schema, with dictionaries decoded. Raises
    ConfigurationError for columns that cannot be keys or event time.
    """

    def __init__(self, keys: Sequence[str], time: str, schema: pa.Schema) -> None:
        check_timestamp_column(schema, time)
        self._time = time
        self._keys = tuple(keys)
        stored_keys = key_schema(schema, keys)
        self.output = pa.schema([pa.field(field.name, decoded_type(field.type)) for field in schema])
        self._stored_as = {
            field.name: own_name(f"order_{field.name}") if field.name in self._keys else field.name
            for field in self.output
            if field.name not in self._keys or pa.types.is_floating(field.type)
        }
        """Maps output columns other than the keys to the names under which they are stored."""
        values = [pa.field(stored, self.output.field(name).type) for name, stored in self._stored_as.items()]
        super().__init__(stored_keys, {STATE_NAME: pa.schema([pa.field(MOMENT, pa.int64()), *values])})
        self._first_ms: int | None = None
        """A lower bound of the times of waiting rows, or None if unknown."""

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Restores the waiting rows and the watermark that each key group has reached, and creates the counter of late
        rows.
        """
        groups = key_group_range(context.subtask, context.max_parallelism, context.parallelism)
        self._reached = GroupMoments(groups, _REACHED_STATE, "watermark_ms", "rows in order of event time")
        for table in restored:
            if table.kind is StateKind.UNION:
                self._reached.load(table)
        super().open(context, restored)
        self._late = context.metrics.counter(LATE_RECORDS)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Stores the rows of a batch until the watermark passes them.

        Raises OperatorError for rows without a time, and ChangedTypeError for columns of other types than declared.
        """
        with blame(self.context, batch):
            keys = key_columns(batch, self._keys)
            times = event_times_ms(batch, self._time)
            plain = {name: _plain(batch.column(name)) for name in self.output.names}
        if keys.schema.types != self.keys.types or [value.type for value in plain.values()] != self.output.types:
            raise ChangedTypeError(
                f"operator {self.context.name!r} (uid {self.context.uid!r}): a batch has other types than its stream "
                f"was declared with: {batch.schema}; cast them with with_columns"
            )
        if times.null_count:
            raise OperatorError(
                f"operator {self.context.name!r} (uid {self.context.uid!r}): {times.null_count} rows have no event "
                f"time in {self._time!r}; filter them out before the step"
            )
        self.check_owner(keys)
        moments = times.to_numpy()
        reached = self._reached.of_keys(keys, self.context.max_parallelism)
        kept = set_aside(batch, moments <= reached, self._late, self.context.emit_aside)
        values = [times, *(plain[name] for name in self._stored_as)]
        if len(kept) < batch.num_rows:
            picked = pa.array(kept)
            keys, moments = keys.take(picked), moments[kept]
            values = [value.take(picked) for value in values]
        if len(kept):
            self.append(0, keys, values)
            self.tables[0].done()
            if self._first_ms is not None:
                self._first_ms = min(self._first_ms, int(moments.min()))

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        """Emits the rows that the watermark has passed, in steps. Yields between two steps."""
        for groups, reached_ms in [*self._reached.runs()]:
            if reached_ms < watermark_ms:  # After a restore it may have been further.
                self._reached.advance(groups, watermark_ms)
        rows_max = 0
        while self._first_ms is None or self._first_ms <= watermark_ms:
            refs = self._due(watermark_ms)
            rows_max = max(rows_max, OUTPUT_ROWS_MAX, -(-len(refs) // _STEPS_MAX))
            some = refs[:rows_max]
            for start in range(0, len(some), OUTPUT_ROWS_MAX):
                emit(self._rows(self.tables[0].take(some[start : start + OUTPUT_ROWS_MAX])))
            if len(some):
                self.tables[0].remove(some)
            self.tables[0].done()
            if len(some) == len(refs):
                break
            self._first_ms = None
            yield

    def snapshot(self, cut: Cut) -> OperatorSnapshot:
        """Returns a snapshot of the waiting rows and of the watermark that each key group has reached."""
        frozen = self.changes(cut)
        return replace(frozen, states=(*frozen.states, self._reached.freeze()))

    def changes(self, cut: Cut) -> OperatorSnapshot:
        """Returns the changes of the waiting rows since the last snapshot, without the reached watermarks."""
        return super().snapshot(cut)

    def _due(self, watermark_ms: int) -> NDArray[np.int64]:
        """Returns references to the stored rows that the watermark has passed, sorted by event time.

        Rows of one key and time keep their order of arrival.
        """
        due, moments, first = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)], np.iinfo(np.int64).max
        for rows, refs in self.tables[0].scan([MOMENT], _SCANNED_ROWS):
            times = rows.column(MOMENT).to_numpy()
            ready = times <= watermark_ms
            due.append(refs[ready])
            moments.append(times[ready])
            if not ready.all():
                first = min(first, int(times[~ready].min()))
        self._first_ms = int(first)
        return np.concatenate(due)[np.argsort(np.concatenate(moments), kind="stable")]

    def _rows(self, stored: pa.RecordBatch) -> pa.RecordBatch:
        """Returns stored rows with the columns of the output schema."""
        columns = [stored.column(self._stored_as.get(name, name)) for name in self.output.names]
        return pa.RecordBatch.from_arrays(columns, schema=self.output)


def _plain(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
