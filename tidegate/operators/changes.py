"""A stream of changes has rows that are added and rows that are retracted, marked by a column with Flink's names.

| `row_kind` | the row |
| --- | --- |
| `+I` | is added |
| `-U` | is retracted, because a newer version follows |
| `+U` | replaces the retracted row |
| `-D` | is retracted |

Rules:

- A retracted row equals an earlier added row in all columns.
- `-U` and `-D` mean the same to an operator that stores rows, and so do `+I` and `+U`. A filter may therefore drop one
  half of a pair.
- Operators that emit changes emit retractions before additions. All changes of a key come in order.
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
"""Name of the column with the kind of a change: `row_kind`."""

INSERT, UPDATE_AFTER, UPDATE_BEFORE, DELETE = "+I", "+U", "-U", "-D"
_KINDS = (INSERT, UPDATE_AFTER, UPDATE_BEFORE, DELETE)
_COMES = 2
"""Kinds before this index mark added rows, the remaining kinds mark retracted rows."""

_KIND_BYTES = 2
_IT_COMES, _IT_GOES = 1, 2
_MEANINGS = np.zeros(1 << 16, dtype=np.uint8)
"""Maps the two bytes of a kind, as one number, to its meaning. 0 marks an unknown kind."""
_MEANINGS[np.frombuffer("".join(_KINDS).encode(), dtype="<u2")] = [_IT_COMES] * _COMES + [_IT_GOES] * _COMES

Flags = NDArray[np.bool_]


def with_kind(schema: pa.Schema) -> pa.Schema:
    """Returns a schema of rows with the column `CHANGE` added, the schema of a stream of changes."""
    return schema.append(pa.field(CHANGE, pa.string()))


def rows_that_come(batch: pa.RecordBatch) -> Flags:
    """Returns True for each added row of a batch of changes, False for each retracted row.

    Raises ValueError for a row without a valid kind.
    """
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
    """Returns the column `CHANGE` for parts with this many rows of each kind, in this order."""
    rows = sum(count for _, count in parts)
    texts = b"".join(kind.encode() * count for kind, count in parts)
    offsets = np.arange(0, _KIND_BYTES * rows + 1, _KIND_BYTES, dtype=np.int32)
    return pa.StringArray.from_buffers(rows, pa.py_buffer(offsets), pa.py_buffer(texts))


def changes(parts: Sequence[tuple[str, Sequence[pa.Array]]], schema: pa.Schema) -> pa.RecordBatch | None:
    """Returns one batch of changes in which the rows of each part have its kind, or None without rows.

    `schema` is the schema of the rows, with `CHANGE` as the last column.
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
    """Returns the two bytes of each kind as one number, read from the column's memory. None unless all kinds have two
    bytes.
    """
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
