"""`OwnSink`: decides when the rows for a sink of the user's are written, and when it prepares. The host calls the sink.

Rules:

- Rows wait until there are `flush_bytes` of them, or a barrier comes. So a sink gets few and large batches.
- A barrier empties the buffer, so rows are never in a snapshot. What was written since the barrier before is prepared
  then; without any there is nothing to prepare.
"""

from __future__ import annotations

import pyarrow as pa

from tidegate.operators.operator import Emit
from tidegate.operators.operator_errors import blame
from tidegate.operators.output_schema import PinnedSchema
from tidegate.operators.sinks.staging import StagedRows, StagingSink
from tidegate.state.kernels.partition import compact
from tidegate.storage.schemas.dictionaries import widened

FLUSH_BYTES = 4 << 20


class OwnSink(StagingSink):
    """Collects the rows of one subtask for a `Sink`."""

    def __init__(self, flush_bytes: int = FLUSH_BYTES) -> None:
        assert flush_bytes > 0
        self._flush_bytes = flush_bytes
        self._pinned = PinnedSchema()
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0
        self._unprepared = False

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Keep a batch until it is taken. OperatorError if its schema is not that of the batches before."""
        with blame(self.context, batch):
            kept = compact(self._pinned.conform(widened(batch)))
        self._pending.append(kept)
        self._pending_bytes += kept.nbytes

    def take_files(self, force: bool) -> list[StagedRows]:
        """The rows that wait, as one entry; with `force` also an empty one, if rows before it are not prepared yet."""
        enough = force or self._pending_bytes >= self._flush_bytes
        if not enough or not (self._pending or self._unprepared):
            return []
        # An early batch may have a column of type null that has found its type since.
        rows = tuple(self._pinned.conform(batch) for batch in self._pending)
        self._pending, self._pending_bytes, self._unprepared = [], 0, not force
        return [StagedRows("", rows, prepare=force)]
