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

from tidegate.state.kernels.columns import plain
from tidegate.storage.user_values import value_text

CHANGE = "row_kind"
"""The column that says what a row of a stream of changes is."""

INSERT, UPDATE_AFTER, UPDATE_BEFORE, DELETE = "+I", "+U", "-U", "-D"
_KINDS = (INSERT, UPDATE_AFTER, UPDATE_BEFORE, DELETE)
_COMES = 2
"""Kinds before this position are of rows that come."""

_KIND_BYTES = 2
_IT_COMES, _IT_GOES = 1, 2
_MEANINGS = np.zeros(1 << 16, dtype=np.uint8)
"""What each two bytes, as one number, say of a row; 0: nothing."""
_MEANINGS[np.frombuffer("".join(_KINDS).encode(), dtype="<u2")] = [_IT_COMES] * _COMES + [_IT_GOES] * _COMES

Flags = NDArray[np.bool_]


def with_kind(schema: pa.Schema) -> pa.Schema:
    """The columns of changes of rows with these columns."""
    return schema.append(pa.field(CHANGE, pa.string()))


def rows_that_come(batch: pa.RecordBatch) -> Flags:
    """Which rows of a batch of changes come; the others are taken back. ValueError for a row that is none."""
    column = plain(batch.column(CHANGE))
    codes = _codes(column)
    if codes is not None and (meanings := _MEANINGS[codes]).all():
        flags: Flags = meanings == _IT_COMES
        return flags
    found = pc.index_in(column, _kinds(column.type)) if _is_text(column.type) else pa.nulls(len(column))
    if found.null_count:
        wrong = column.filter(pc.is_null(found))[0].as_py()
        raise ValueError(f"a row has {value_text(wrong)} in the column {CHANGE!r}; it takes {', '.join(_KINDS)}")
    comes: Flags = found.to_numpy() < _COMES
    return comes


def kinds_of(parts: Sequence[tuple[str, int]]) -> pa.Array:
    """The column `CHANGE` of so many rows of each kind, in this order."""
    rows = sum(count for _, count in parts)
    texts = b"".join(kind.encode() * count for kind, count in parts)
    offsets = np.arange(0, _KIND_BYTES * rows + 1, _KIND_BYTES, dtype=np.int32)
    return pa.StringArray.from_buffers(rows, pa.py_buffer(offsets), pa.py_buffer(texts))


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
    kinds = kinds_of([(kind, len(arrays[0])) for kind, arrays in some])
    return pa.RecordBatch.from_arrays([*columns, kinds], schema=schema)


def _codes(column: pa.Array) -> NDArray[np.uint16] | None:
    """The two bytes of each kind as one number, read from the column's memory. None where not all have two."""
    if column.type != pa.string() or column.null_count or not len(column):
        return None
    _, offset_buffer, data_buffer = column.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int32, count=len(column) + 1, offset=4 * column.offset)
    if data_buffer is None or (offsets[1:] - offsets[:-1] != _KIND_BYTES).any():
        return None
    return np.frombuffer(data_buffer, dtype="<u2", count=len(column), offset=int(offsets[0]))


@cache
def _kinds(data_type: pa.DataType) -> pa.Array:
    return pa.array(_KINDS, data_type)


def _is_text(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_string(data_type) or pa.types.is_large_string(data_type))
