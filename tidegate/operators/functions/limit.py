"""`Limit`: lets the first rows of a stream through."""

from __future__ import annotations

import pyarrow as pa

from tidegate.operators.functions.process_functions import ProcessBatchContext, ProcessContext, ProcessFunction
from tidegate.operators.state.keyed_state import ListState
from tidegate.storage.errors import ConfigurationError


class Limit(ProcessFunction):
    """Passes the first `n` rows on. How many have passed is state of the operator, which has one subtask."""

    def __init__(self, n: int) -> None:
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise ConfigurationError(f"limit({n!r}): a whole number of rows, at least 0, is needed")
        self._n = n

    def open(self, context: ProcessContext) -> None:
        """Bind the number of rows that have passed."""
        self._passed = context.list_state(ListState("passed", pa.int64()))

    def process_batch(self, batch: pa.RecordBatch, context: ProcessBatchContext) -> pa.RecordBatch | None:
        """Return the rows that still pass."""
        passed = sum(self._passed.get())
        part = batch.slice(0, self._n - passed)
        if not part.num_rows:
            return None
        self._passed.update([passed + part.num_rows])
        return part
