"""`DistinctRows` marks each row that is the first with its combination of values in some columns. Counts of distinct
values are computed with it.

Rules:

- All rows are emitted, with one more boolean column. It is true for the first row of each combination of values, and
  false for all other rows. The number of distinct values is the number of rows for which it is true.
- A null in the counted column is not a value: such a row is never marked, and is not stored.
- The state of a combination never changes. An incremental checkpoint has the combinations that occurred since the
  previous checkpoint, including known ones, because a lookup marks the entry as changed.
- State is a table of these combinations, keyed by all of the columns. Rows are distributed by all of them too, so one
  key with many values does not fill a single subtask.

`DistinctViews` marks rows for several counts of distinct values of one column, each with its own condition. The counts
share one table of values, with a bit for each condition (like the filter bits of Flink's distinct views):

- All rows are emitted, with one more boolean column for each condition. It is true for the first row of each
  combination of values for which the condition is true. Without a condition all rows count.
- Rows that meet no condition are neither looked up nor stored.
- The bits of a combination store which conditions its rows have met so far. The first condition has the lowest bit. The
  conditions are part of the column's name, so bits of other conditions are never used by mistake.
- Columns that no later step reads are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.aggregates.aggregate import count
from tidegate.operators.aggregates.aggregate_function import input_column, row_mask
from tidegate.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.operators.operator import Columns, together
from tidegate.operators.state.keys import check_owner, key_columns
from tidegate.state.kernels.accumulate import set_bits
from tidegate.state.kernels.columns import key_column, valid_mask
from tidegate.state.kernels.partition import gather
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.column_names import RESERVED_PREFIX, own_name


class DistinctRows(KeyedAggregate):
    """Operator that adds the boolean column `flag`, which is true for the first row with each combination of values in
    `columns`.

    `columns` are the keys followed by the counted column.
    """

    def __init__(self, columns: Sequence[str], flag: str) -> None:
        self._flag = flag
        self._counted = columns[-1]
        super().__init__(tuple(dict.fromkeys(columns)), {own_name("rows"): count()}, "update")

    def needed_columns(self, after: Columns) -> Columns:
        """Returns the columns that later steps read (`after`), without the flag, and the compared columns."""
        return together(None if after is None else after - {self._flag}, frozenset(self._keys))

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """Returns the input columns and the flag.

        Raises ConfigurationError if a column is missing, or of a type that cannot be compared.
        """
        super().output_schema(input_schema)
        if self._flag in input_schema.names:
            raise ConfigurationError(
                f"there is a column {self._flag!r} already, and tidegate needs this name to mark distinct values; "
                "rename the column in a step before"
            )
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
        """Stores the combinations of values in `keys` that are new.

        Returns the indices of the rows with a new combination.
        """
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
                self._add_rows(accumulator, name, new, replace(upserted, slots=slots))
        self._changed_rows += len(rows)
        self._table.done()
        return rows


VIEWS_MAX = 63
"""Greatest number of conditions in one operator: the bits of an int64 without its sign."""


class DistinctViews(KeyedAggregate):
    """Operator that adds several boolean columns, `flags`. A flag is true for the first row with each combination of
    values that meets the condition of the flag.

    `flags` maps each name to its condition: a boolean column, or None for all rows. `columns` are the keys followed by
    the counted column. `dropped` are the input columns that are not emitted.
    """

    def __init__(
        self, columns: Sequence[str], flags: Mapping[str, str | None], dropped: frozenset[str] = frozenset()
    ) -> None:
        assert 0 < len(flags) <= VIEWS_MAX, f"{len(flags)} conditions do not fit into {VIEWS_MAX} bits"
        self._counted = columns[-1]
        self._flags = dict(flags)
        self._dropped = dropped
        # The name of the column identifies the conditions and their order, so bits of other conditions are refused.
        self._seen = f"{RESERVED_PREFIX}seen under {[*flags.values()]}"
        super().__init__(tuple(dict.fromkeys(columns)), {self._seen: count()}, "update")

    def needed_columns(self, after: Columns) -> Columns:
        """Returns the columns that later steps read (`after`), without the flags, and the compared columns and
        conditions.
        """
        conditions = (condition for condition in self._flags.values() if condition is not None)
        return together(None if after is None else after - self._flags.keys(), frozenset((*self._keys, *conditions)))

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """Returns the emitted input columns and the flags.

        Raises ConfigurationError if a column is missing, has an unsupported type, or has the name of a flag.
        """
        super().output_schema(input_schema)
        for condition in filter(None, self._flags.values()):
            count().where(condition).validate(input_schema)
        passed = [field for field in input_schema if field.name not in self._dropped]
        if taken := sorted(self._flags.keys() & {field.name for field in passed}):
            raise ConfigurationError(
                f"there is a column {taken[0]!r} already, and tidegate needs this name to mark distinct values; "
                "rename the column in a step before"
            )
        return pa.schema([*passed, *(pa.field(flag, pa.bool_()) for flag in self._flags)])

    def _advance(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        self._admit(batch.schema)
        bits = self._bits(batch)
        rows = np.flatnonzero(bits).astype(np.int32)
        if len(rows) == batch.num_rows:
            bits = self._new_bits(key_columns(batch, self._keys), bits)
        elif len(rows):
            bits[rows] = self._new_bits(gather(key_columns(batch, self._keys), rows), bits[rows])
        passed = batch.select([name for name in batch.schema.names if name not in self._dropped])
        for number, flag in enumerate(self._flags):
            passed = passed.append_column(flag, pa.array(bits & np.int64(1 << number) != 0))
        return passed

    def _bits(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        """Returns, for each row, an integer with a bit set for each condition that the row meets."""
        values = input_column(batch, self._counted)
        bits = np.zeros(batch.num_rows, dtype=np.int64)
        for number, condition in enumerate(self._flags.values()):
            mask = row_mask(batch, condition, values)
            bits |= mask.astype(np.int64) << number if len(mask) else np.int64(1 << number)
        return bits

    def _new_bits(self, keys: pa.RecordBatch, bits: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns, for each row, the bits that no earlier row with the same values had, and stores the bits of all
        rows.
        """
        assert self._table is not None
        upserted = self._table.upsert(keys)
        if len(upserted.new_rows):
            check_owner(self.context, gather(keys, upserted.new_rows), self._owners)
        new = np.empty(len(bits), dtype=np.int64)
        set_bits(self._table.column(self._seen).pages, upserted.slots, bits, new)
        self._changed_rows += int(np.count_nonzero(new))
        self._table.done()
        return new
