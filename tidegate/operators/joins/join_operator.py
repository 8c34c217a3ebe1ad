"""`JoinOperator`: what joins by event time share. They keep the rows of each input until event time is past them.

Rules:

- Keys are stored under the names of the left input, whatever they are called on the right.
- A row that the watermark has passed is late. It is dropped and counted, at any batch size alike, as long as
  watermarks are. How far the watermark has come is state, for each key group: after a restore there is none before both
  inputs have sent one, and a row that was late before would be joined then, where its window or partners are gone.
- State is two row tables, `left` and `right`: event time or window, then the columns that the result has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.joins.join_columns import LEFT, JoinHow, JoinSides, plain_values
from tidegate.operators.operator import Emit, OperatorContext
from tidegate.operators.operator_errors import blame
from tidegate.operators.state.keys import key_columns, key_schema
from tidegate.operators.state.rows_operator import RowsOperator
from tidegate.operators.watermarks.group_moments import GroupMoments
from tidegate.operators.watermarks.late_rows import LATE_RECORDS
from tidegate.operators.watermarks.watermark_generator import event_times_ms
from tidegate.protocol.errors import ChangedTypeError, OperatorError
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.schemas.reserved_names import own_name
from tidegate.storage.state.key_groups import key_group_range
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateTable

STATE_NAMES = ("left", "right")
MOMENT = own_name("join_time_ms")
"""The column of a stored row that says when it is over: its event time, or the end of its window."""

_REACHED_STATE = "join.reached"

Times = NDArray[np.int64]


class JoinOperator(RowsOperator):
    """Keeps rows of two inputs. `schemas` are those of the inputs. ConfigurationError for columns that do not fit."""

    drops_late_rows = True
    """Whether rows are judged by the watermark. If so, how far it has come is in each snapshot."""

    def __init__(self, sides: JoinSides, schemas: tuple[pa.Schema, pa.Schema], how: JoinHow) -> None:
        self.sides = sides
        self.how = how
        self.schema = sides.output_schema(*schemas, how)
        """The columns of the result, without those of windows."""
        self.values = sides.stored_values(*schemas, how)
        """Of each input its columns in the result that are no keys, by their names in the input."""
        stored = {
            name: pa.schema([pa.field(MOMENT, pa.int64()), *(self.schema.field(value) for value in values.values())])
            for name, values in zip(STATE_NAMES, self.values, strict=True)
        }
        super().__init__(key_schema(schemas[LEFT], sides.keys[LEFT]), stored)

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """As that of rows; with a count of those that come too late."""
        groups = key_group_range(context.subtask, context.max_parallelism, context.parallelism)
        self._reached = GroupMoments(groups, _REACHED_STATE, "watermark_ms", "joins by event time")
        for table in restored:
            if table.kind is StateKind.UNION:
                self._reached.load(table)
        super().open(context, restored)
        self.late = context.metrics.counter(LATE_RECORDS)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Process a batch of the left input."""
        self.process_input(LEFT, batch, emit)

    def snapshot(self, cut: Cut) -> OperatorSnapshot:
        """Freeze the rows, and how far event time has come."""
        frozen = self.changes(cut)
        return replace(frozen, states=(*frozen.states, self._reached.freeze())) if self.drops_late_rows else frozen

    def changes(self, cut: Cut) -> OperatorSnapshot:
        """Freeze the rows."""
        return super().snapshot(cut)

    def reach(self, watermark_ms: int) -> None:
        """The watermark of both inputs has come to this moment."""
        for groups, reached_ms in [*self._reached.runs()]:
            if reached_ms < watermark_ms:  # After a restore it may have been further.
                self._reached.advance(groups, watermark_ms)

    def reached(self, keys: pa.RecordBatch) -> Times | int:
        """How far the watermark has ever come for each of these keys; one moment if it is the same for all."""
        return self._reached.of_keys(keys, self.context.max_parallelism)

    def rows_of(self, index: int, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Times, list[pa.Array]]:
        """Keys, event times and stored values of a batch. OperatorError for rows without a time, or other columns."""
        with blame(self.context, batch):
            keys = key_columns(batch, self.sides.keys[index]).rename_columns(self.keys.names)
            values = plain_values(batch, list(self.values[index]))
            time = self.sides.times[index]
            times = pa.repeat(0, batch.num_rows) if time is None else event_times_ms(batch, time)
        expected = self.stored[STATE_NAMES[index]].types[1:]
        if keys.schema.types != self.keys.types or [value.type for value in values] != expected:
            raise ChangedTypeError(
                f"operator {self.context.name!r} (uid {self.context.uid!r}): a batch of the {STATE_NAMES[index]} input "
                f"has other types than its stream was declared with: {batch.schema}; cast them with with_columns"
            )
        if times.null_count:
            raise OperatorError(
                f"operator {self.context.name!r} (uid {self.context.uid!r}): {times.null_count} rows of the "
                f"{STATE_NAMES[index]} input have no event time in {self.sides.times[index]!r}; filter them out before "
                "the join"
            )
        self.check_owner(keys)
        return keys, times.to_numpy(), values

    def keep(self, index: int, keys: pa.RecordBatch, moments: Times, values: Sequence[pa.Array]) -> None:
        """Append rows to the state of an input."""
        self.append(index, keys, [pa.array(moments), *values])

    def result(self, left: pa.RecordBatch | None, right: pa.RecordBatch | None, rows: int) -> pa.RecordBatch:
        """Rows of the result, of stored rows that lie side by side. None: a side without a partner, null in the result.

        Keys come from the left side, if there is one.
        """
        found: dict[str, pa.Array] = {}
        for side in (right, left):
            found |= {} if side is None else dict(zip(side.schema.names, side.columns, strict=True))
        arrays = [found[f.name] if f.name in found else pa.nulls(rows, f.type) for f in self.schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)
