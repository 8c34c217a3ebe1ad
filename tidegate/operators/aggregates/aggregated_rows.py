"""What all accumulators ask of a batch: a column in plain form, which rows count, and which slots get a value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.aggregates.column_expressions import ColumnLike
from tidegate.state.common.backend import ValueColumn
from tidegate.state.kernels import accumulate
from tidegate.state.kernels.columns import NO_MASK, fixed_values, plain, valid_mask
from tidegate.state.kernels.paged import gathered

Slots = NDArray[np.int32]
Mask = NDArray[np.uint8]


def input_column(batch: pa.RecordBatch, column: ColumnLike | None) -> pa.Array:
    """A column of a batch, without dictionaries. Operators are given names: expressions are computed before them."""
    assert isinstance(column, str), f"{column!r} is no name of a column"
    return plain(batch.column(column))


def row_mask(batch: pa.RecordBatch, condition: ColumnLike | None, *columns: pa.Array) -> Mask:
    """1 for each row for which the condition is true and no column is null. `NO_MASK` if these are all rows."""
    masks = [mask for mask in map(valid_mask, columns) if len(mask)]
    if condition is not None:
        masks.append(fixed_values(input_column(batch, condition).fill_null(False).cast(pa.uint8())))
    if not masks:
        return NO_MASK
    mask = masks[0]
    for other in masks[1:]:
        mask = mask & other
    return mask


def mark(column: ValueColumn, slots: Slots, mask: Mask) -> None:
    """Note which slots get a value. Until there is a null every slot has one: that of the row that made the slot."""
    if len(mask) > 0:
        accumulate.mark(column.track_nulls(), slots, mask)
    elif len(valid_pages := column.valid_pages) > 0:
        accumulate.mark(valid_pages, slots, mask)


def running_valid(column: ValueColumn, slots: Slots, mask: Mask) -> Mask | None:
    """`mark`, and which slots have a value after each row. None: all."""
    valid_pages = column.track_nulls() if len(mask) else column.valid_pages
    if not len(valid_pages):
        return None
    after = np.empty(len(slots), dtype=np.uint8)
    accumulate.mark(valid_pages, slots, mask, after)
    return after


def valid_of(column: ValueColumn, slots: NDArray[Any]) -> Mask | None:
    """Which of some slots have a value. None: all."""
    return gathered(column.valid_pages, slots, np.dtype(np.uint8)) if len(column.valid_pages) else None


def grouped(slots: Slots) -> tuple[NDArray[np.int32], Slots]:
    """The distinct slots among some, in the order in which they first come, and for each slot its place among them."""
    encoded = pa.array(slots).dictionary_encode()
    return encoded.indices.to_numpy(), encoded.dictionary.to_numpy()


def counted_so_far(groups: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each row, how many of `rows` are in its group up to the row and with it. `groups[i]` is that of row i."""
    counted = np.zeros(len(groups), dtype=np.int64)
    counted[rows] = 1
    order = np.argsort(groups, kind="stable")
    counted = counted[order]
    totals = np.cumsum(counted)
    first = np.flatnonzero(np.diff(groups[order], prepend=-1))
    found = np.empty(len(groups), dtype=np.int64)
    found[order] = totals - np.repeat(totals[first] - counted[first], np.diff(first, append=len(groups)))
    return found


def rows_in(mask: Mask, rows: int) -> NDArray[np.int64]:
    """The rows of a mask that count; `NO_MASK`: all."""
    return np.flatnonzero(mask) if len(mask) else np.arange(rows)
