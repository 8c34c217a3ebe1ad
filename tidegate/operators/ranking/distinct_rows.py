"""`DistinctRows`: tells of each row whether it is the first with its values in some columns. Counts of distinct values
are made of it.

Rules:

- All rows pass, with one more boolean column. It is true for the first row of each combination of values there ever
  was, and false for all others. So to count distinct values is to count the rows for which it is true.
- A null in the counted column is no value: the row is none of the first, and leaves no state. (Older versions kept it.)
- What the state holds of a combination never changes once it is known. An incremental checkpoint has those that came
  since the one before, known ones included: to look a row up marks it as changed.
- State is a table of these combinations, keyed by all of the columns. Rows are spread by all of them too: one key with
  many values does not fill one subtask alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.aggregates.aggregate import count
from tidegate.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.operators.operator import Columns, together
from tidegate.operators.state.keys import check_owner, key_columns
from tidegate.state.kernels.columns import key_column, valid_mask
from tidegate.state.kernels.partition import gather
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.reserved_names import own_name


class DistinctRows(KeyedAggregate):
    """Adds the column `flag`. `columns` are the keys and the counted column, which is the last."""

    def __init__(self, columns: Sequence[str], flag: str) -> None:
        self._flag = flag
        self._counted = columns[-1]
        super().__init__(tuple(dict.fromkeys(columns)), {own_name("rows"): count()}, "update")

    def needed_columns(self, after: Columns) -> Columns:
        """What follows needs, and the columns that are compared."""
        return together(None if after is None else after - {self._flag}, frozenset(self._keys))

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """The input, and the flag. ConfigurationError if a column is missing, or of a type that cannot be compared."""
        super().output_schema(input_schema)
        if self._flag in input_schema.names:
            raise ConfigurationError(f"there is a column {self._flag!r} already")
        return input_schema.append(pa.field(self._flag, pa.bool_()))

    def _advance(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        self._admit(batch.schema)
        keys = key_columns(batch, self._keys)
        first = np.zeros(batch.num_rows, dtype=np.bool_)
        mask = valid_mask(key_column(batch, self._counted))
        if len(mask):
            rows = np.flatnonzero(mask).astype(np.int32)
            first[rows[self._new_rows(gather(keys, rows))]] = True
        else:
            first[self._new_rows(keys)] = True
        return batch.append_column(self._flag, pa.array(first))

    def _new_rows(self, keys: pa.RecordBatch) -> NDArray[np.int32]:
        """The rows whose combination is new. It is known from now on."""
        assert self._table is not None
        if not keys.num_rows:
            return np.zeros(0, dtype=np.int32)
        upserted = self._table.upsert(keys)
        rows = upserted.new_rows
        if len(rows):
            new = gather(keys, rows)
            check_owner(self.context, new, self._owners)
            slots = upserted.slots[rows]
            for name, accumulator in zip(self._aggregates, self._accumulators, strict=True):
                self._take_in(accumulator, name, new, replace(upserted, slots=slots))
        self._changed_rows += len(rows)
        self._table.done()
        return rows
