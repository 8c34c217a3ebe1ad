"""Changes: rows that come and rows that are taken back, in one stream. A column says which, in Flink's words.

| `row_kind` | the row |
| --- | --- |
| `+I` | comes |
| `-U` | is taken back, because a newer version follows |
| `+U` | comes in the place of the one that was taken back |
| `-D` | is taken back |

Rules:

- A row that is taken back is equal to one that came before it, in all columns.
- `-U` and `-D` mean the same to whoever keeps rows, and so do `+I` and `+U`: a filter may let one half of a pair pass.
- Operators that make changes emit what is taken back before what comes. All changes of a key come in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.actors.kernels.columns import plain

CHANGE = "row_kind"
"""The column that says what a row of a stream of changes is."""

INSERT, UPDATE_AFTER, UPDATE_BEFORE, DELETE = "+I", "+U", "-U", "-D"
_KINDS = (INSERT, UPDATE_AFTER, UPDATE_BEFORE, DELETE)
_COMES = 2
"""Kinds before this position are of rows that come."""

Flags = NDArray[np.bool_]


def with_kind(schema: pa.Schema) -> pa.Schema:
    """The columns of changes of rows with these columns."""
    return schema.append(pa.field(CHANGE, pa.string()))


def rows_that_come(batch: pa.RecordBatch) -> Flags:
    """Which rows of a batch of changes come; the others are taken back. ValueError for a row that is none."""
    column = plain(batch.column(CHANGE))
    found = pc.index_in(column, _kinds(column.type)) if _is_text(column.type) else pa.nulls(len(column))
    if found.null_count:
        wrong = column.filter(pc.is_null(found))[0].as_py()
        raise ValueError(f"a row has {wrong!r} in the column {CHANGE!r}; it takes {', '.join(_KINDS)}")
    comes: Flags = found.to_numpy() < _COMES
    return comes


def changes(parts: Sequence[tuple[str, Sequence[pa.Array]]], schema: pa.Schema) -> pa.RecordBatch | None:
    """One batch of changes: the rows of each part, in order, are of its kind. None without rows.

    `schema` is that of the rows, with `CHANGE` as the last column.
    """
    some = [(kind, columns) for kind, columns in parts if len(columns[0])]
    if not some:
        return None
    columns = [
        pa.concat_arrays([arrays[i] for _, arrays in some]) if len(some) > 1 else some[0][1][i]
        for i in range(len(schema) - 1)
    ]
    kinds = pa.concat_arrays([pa.repeat(kind, len(arrays[0])) for kind, arrays in some])
    return pa.RecordBatch.from_arrays([*columns, kinds], schema=schema)


@cache
def _kinds(data_type: pa.DataType) -> pa.Array:
    return pa.array(_KINDS, data_type)


def _is_text(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_string(data_type) or pa.types.is_large_string(data_type))
