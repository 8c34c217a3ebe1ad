"""`Explode`: makes a row of each element of a list column."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.operator import Emit, Operator
from tidegate.operators.operator_errors import blame

_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType)


class Explode(Operator):
    """Emits a row for each element of the list in `column`, with the other columns repeated.

    A row whose list is null or empty is left out; with `outer` it stays, with null in the column.
    """

    def __init__(self, column: str, outer: bool) -> None:
        self._column = column
        self._outer = outer

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emit the rows in order, in batches of bounded size. OperatorError if the column is no list."""
        with blame(self.context, batch):
            lists = batch.column(self._column)
            if not isinstance(lists.type, _LISTS):
                raise TypeError(f"explode needs a list; column {self._column!r} is {lists.type}")
            # A null may lie over elements. `list_flatten` leaves them out, and `list_parent_indices` does not.
            lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
            parents = np.repeat(np.arange(len(lists)), lengths)
            values = pc.list_flatten(lists)
            if self._outer:
                parents, values = _with_empty_ones(lengths, parents, values)
            place = batch.schema.get_field_index(self._column)
            schema = batch.schema.set(place, pa.field(self._column, values.type))
        for start in range(0, max(len(parents), 1), OUTPUT_ROWS_MAX):
            rows = batch.take(pa.array(parents[start : start + OUTPUT_ROWS_MAX]))
            columns = list(rows.columns)
            columns[place] = values.slice(start, OUTPUT_ROWS_MAX)
            if rows.num_rows or not batch.num_rows:
                emit(pa.RecordBatch.from_arrays(columns, schema=schema))


def _with_empty_ones(lengths: np.ndarray, parents: np.ndarray, values: pa.Array) -> tuple[np.ndarray, pa.Array]:
    """Returns parents and values with one null more for each list that is null or empty, in the order of the lists."""
    empty = np.flatnonzero(lengths == 0)
    together = np.concatenate([parents, empty])
    order = np.argsort(together, kind="stable")
    places = np.concatenate([np.arange(len(parents)), np.full(len(empty), -1)])[order]
    return together[order], values.take(pa.array(places, mask=places < 0))
