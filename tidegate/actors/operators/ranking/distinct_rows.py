"""`DistinctRows`: tells of each row whether it is the first with its values in some columns. Counts of distinct values
are made of it.

Rules:

- All rows pass, with one more boolean column. It is true for the first row of each combination of values there ever
  was, and false for all others. So to count distinct values is to count the rows for which it is true.
- A null in the counted column is no value: the row is none of the first.
- State is a table of these combinations, keyed by all of the columns. Rows are spread by all of them too: one key with
  many values does not fill one subtask alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from tidegate.actors.kernels.columns import key_column, valid_mask
from tidegate.actors.kernels.key_index.entries import Upserted
from tidegate.actors.operators.aggregates.aggregate import count
from tidegate.actors.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.actors.operators.operator import Columns, together
from tidegate.storage.errors import ConfigurationError


class DistinctRows(KeyedAggregate):
    """Adds the column `flag`. `columns` are the keys and the counted column, which is the last."""

    def __init__(self, columns: Sequence[str], flag: str) -> None:
        self._flag = flag
        self._counted = columns[-1]
        rows = "rows"
        while rows in columns:
            rows += "_"
        super().__init__(tuple(dict.fromkeys(columns)), {rows: count()}, "update")

    def needed_columns(self, after: Columns) -> Columns:
        """What follows needs, and the columns that are compared."""
        return together(None if after is None else after - {self._flag}, frozenset(self._keys))

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """The input, and the flag. ConfigurationError if a column is missing, or of a type that cannot be compared."""
        super().output_schema(input_schema)
        if self._flag in input_schema.names:
            raise ConfigurationError(f"there is a column {self._flag!r} already")
        return input_schema.append(pa.field(self._flag, pa.bool_()))

    def _accumulate(self, batch: pa.RecordBatch, keys: pa.RecordBatch, upserted: Upserted) -> pa.RecordBatch | None:
        for name, accumulator in zip(self._aggregates, self._accumulators, strict=True):
            self._take_in(accumulator, name, batch, upserted)
        first = np.zeros(batch.num_rows, dtype=np.uint8)
        first[upserted.new_rows] = 1
        mask = valid_mask(key_column(batch, self._counted))
        if len(mask):
            first &= mask
        return batch.append_column(self._flag, pa.array(first.view(np.bool_)))
