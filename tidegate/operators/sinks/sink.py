"""`StagingSink` is the base class of sink operators. The task takes the rows to write from them.

`UserSinkOperator` implements it for sinks that commit in the coordinator (`tidegate/connectors/sink.py`):

- Rows are buffered until they have `flush_bytes` bytes, or until a barrier comes, so a sink gets few and large batches.
- A barrier empties the buffer, so a snapshot never contains rows. The sink then prepares the rows that were written
  since the previous barrier for the commit. Without such rows it prepares nothing.
- A sink of changes (`deletes`) gets rows without the column `row_kind`. The hidden column `_tidegate_deleted` marks
  retracted rows, as in tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from tidegate.operators.changes import CHANGE, rows_that_come
from tidegate.operators.operator import Emit, Operator
from tidegate.operators.operator_errors import blame
from tidegate.operators.output_schema import PinnedSchema
from tidegate.state.kernels.partition import compact
from tidegate.storage.schemas.arrow_types import widened
from tidegate.storage.schemas.column_names import DELETED_COLUMN


@dataclass(frozen=True, slots=True)
class StagedRows:
    """Rows to write to one file, in batches of one schema. `folder` is relative to the folder of the task attempt, or
    empty.

    `prepare` is True if a checkpoint begins after these rows, so that a user-defined sink returns its committables.
    """

    folder: str
    batches: tuple[pa.RecordBatch, ...]
    prepare: bool = False


class StagingSink(Operator):
    """Base class of sink operators, which buffer rows until the task takes them. Emits nothing."""

    def take_files(self, force: bool) -> list[StagedRows]:
        """Removes and returns the buffered rows to write now, one entry for each file. Empty if there are too few rows
        for a file.

        With `force`, returns all buffered rows.
        """
        raise NotImplementedError


FLUSH_BYTES = 4 << 20


class UserSinkOperator(StagingSink):
    """Buffers the rows of one subtask for a user-defined `Sink`."""

    def __init__(self, flush_bytes: int = FLUSH_BYTES, deletes: bool = False) -> None:
        assert flush_bytes > 0
        self._flush_bytes = flush_bytes
        self._deletes = deletes
        self._pinned = PinnedSchema()
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0
        self._unprepared = False

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Buffers a batch. Raises OperatorError if its schema differs from the schema of earlier batches."""
        with blame(self.context, batch):
            if self._deletes:
                comes = rows_that_come(batch)
                batch = batch.drop_columns([CHANGE]).append_column(DELETED_COLUMN, pa.array(~comes))
            kept = compact(self._pinned.conform(widened(batch)))
        self._pending.append(kept)
        self._pending_bytes += kept.nbytes

    def take_files(self, force: bool) -> list[StagedRows]:
        """Removes and returns the buffered rows as one entry, if there are enough for a batch or with `force`. Else
        returns an empty list.

        With `force`, the entry has no rows if the task has written all rows since the last barrier and only has to
        prepare them.
        """
        enough = force or self._pending_bytes >= self._flush_bytes
        if not enough or not (self._pending or self._unprepared):
            return []
        # An early batch may have a column of type null that has found its type since.
        rows = tuple(self._pinned.conform(batch) for batch in self._pending)
        self._pending, self._pending_bytes, self._unprepared = [], 0, not force
        return [StagedRows("", rows, prepare=force)]
