"""`JoinOperator`: what joins by event time share. They keep the rows of each input until event time is past them.

Rules:

- Keys are stored under the names of the left input, whatever they are called on the right.
- A row that the watermark has passed is late. It is dropped, at any batch size alike, as long as watermarks are.
- State is two row tables, `left` and `right`: event time or window, then the columns that the result has.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.actors.kernels.partition import subtask_table
from tidegate.actors.operators.joins.join_columns import LEFT, JoinHow, JoinSides, plain_values
from tidegate.actors.operators.operator import Emit, Operator, OperatorContext
from tidegate.actors.operators.operator_errors import blame
from tidegate.actors.operators.state.keys import check_owner, key_columns, key_schema
from tidegate.actors.operators.state.operator_backend import frozen_backend, make_backend
from tidegate.actors.operators.watermarks.watermark_generator import event_times_ms
from tidegate.actors.protocol.errors import OperatorError
from tidegate.actors.protocol.stream_elements import MIN_WATERMARK_MS
from tidegate.actors.state_backends.common.backend import KeyedBackend
from tidegate.actors.state_backends.common.row_table import RowTable
from tidegate.storage.errors import CorruptionError
from tidegate.storage.state.handover import keys_at_most, taken
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateTable

STATE_NAMES = ("left", "right")
MOMENT = "join.time_ms"
"""The column of a stored row that says when it is over: its event time, or the end of its window."""

Times = NDArray[np.int64]


class JoinOperator(Operator):
    """Keeps rows of two inputs. `schemas` are those of the inputs. ConfigurationError for columns that do not fit."""

    has_keyed_state = True

    def __init__(self, sides: JoinSides, schemas: tuple[pa.Schema, pa.Schema], how: JoinHow) -> None:
        self.sides = sides
        self.how = how
        self.schema = sides.output_schema(*schemas, how)
        """The columns of the result, without those of windows."""
        self.values = sides.stored_values(*schemas, how)
        """Of each input its columns in the result that are no keys, by their names in the input."""
        self.keys = key_schema(schemas[LEFT], sides.keys[LEFT])
        self.tables: tuple[RowTable, ...] = ()
        self.watermark = MIN_WATERMARK_MS
        self._backend: KeyedBackend | None = None
        self._changed_rows = 0

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Take the rows back from tables of any number of former subtasks. CorruptionError for other columns."""
        super().open(context, restored)
        self._owners = subtask_table(context.max_parallelism, context.parallelism)
        backend = self._backend = make_backend(context, self.keys.names)
        self.tables = tuple(backend.rows(state, self._stored(side)) for side, state in enumerate(STATE_NAMES))
        backend.fix_keys(self.keys)
        self.load(restored)

    def load(self, tables: Sequence[StateTable]) -> None:
        """Raises CorruptionError and ConfigurationError as `open` does."""
        backend = self._opened()
        backend.expect(keys_at_most(tables))
        try:
            for table in taken(tables):
                if table.rows.schema.names[: len(self.keys)] == self.keys.names:
                    check_owner(self.context, table.rows.select(self.keys.names), self._owners)
                backend.load(table)
            backend.loaded()
        except CorruptionError as error:
            raise CorruptionError(f"operator {self.context.uid!r}: {error}") from error

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Process a batch of the left input."""
        self.process_input(LEFT, batch, emit)

    def rows_of(self, index: int, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Times, list[pa.Array]]:
        """Keys, event times and stored values of a batch. OperatorError for rows without a time, or other columns."""
        with blame(self.context, batch):
            keys = key_columns(batch, self.sides.keys[index]).rename_columns(self.keys.names)
            values = plain_values(batch, list(self.values[index]))
            times = event_times_ms(batch, self.sides.times[index])
        expected = [field.type for field in self._stored(index)][1:]
        if keys.schema.types != self.keys.types or [value.type for value in values] != expected:
            raise OperatorError(
                f"operator {self.context.name!r} (uid {self.context.uid!r}): a batch of the {STATE_NAMES[index]} input "
                f"has other types than its stream was declared with: {batch.schema}; cast them with with_columns"
            )
        if times.null_count:
            raise OperatorError(
                f"operator {self.context.name!r} (uid {self.context.uid!r}): {times.null_count} rows of the "
                f"{STATE_NAMES[index]} input have no event time in {self.sides.times[index]!r}; filter them out before "
                "the join"
            )
        check_owner(self.context, keys, self._owners)
        return keys, times.to_numpy(), values

    def keep(self, index: int, keys: pa.RecordBatch, moments: Times, values: Sequence[pa.Array]) -> None:
        """Append rows to the state of an input."""
        arrays = [pa.array(moments), *values]
        self.tables[index].append(keys, pa.RecordBatch.from_arrays(arrays, schema=self._stored(index)))
        self._changed_rows += keys.num_rows

    def result(self, left: pa.RecordBatch | None, right: pa.RecordBatch | None, rows: int) -> pa.RecordBatch:
        """Rows of the result, of stored rows that lie side by side. None: a side without a partner, null in the result.

        Keys come from the left side, if there is one.
        """
        found: dict[str, pa.Array] = {}
        for side in (right, left):
            found |= {} if side is None else dict(zip(side.schema.names, side.columns, strict=True))
        arrays = [found[f.name] if f.name in found else pa.nulls(rows, f.type) for f in self.schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def snapshot(self, cut: Cut) -> OperatorSnapshot:
        """Freeze the rows."""
        if cut.keyed:
            self._changed_rows = 0
        return frozen_backend(self.context, self._opened(), cut)

    def changes(self, cut: Cut) -> OperatorSnapshot:
        """As `snapshot`: all state is keyed."""
        return self.snapshot(cut)

    @property
    def changed_bytes(self) -> int:
        """An estimate: 8 bytes for each column of a row that came."""
        return self._changed_rows * (2 + len(self.schema)) * 8

    @property
    def keyed_backend(self) -> KeyedBackend | None:
        """The backend of the rows."""
        return self._backend

    def hand_over(self) -> None:
        """Let go of the backend."""
        self._backend, self.tables = None, ()

    def close(self) -> None:
        """Release what the backend holds."""
        if self._backend is not None:
            self._backend.close()

    def _opened(self) -> KeyedBackend:
        assert self._backend is not None, "a join that is not open"
        return self._backend

    def _stored(self, side: int) -> pa.Schema:
        """The value columns of a row table."""
        names = self.values[side].values()
        fields = [self.schema.field(name) for name in names]
        return pa.schema([pa.field(MOMENT, pa.int64()), *fields])
