"""A stream of changes (a changelog) adds and retracts rows. A column marks each row with Flink's name for the kind of
change.

| `row_kind` | the row |
| --- | --- |
| `+I` | is added |
| `-U` | is retracted, because a newer version follows |
| `+U` | replaces the retracted row |
| `-D` | is retracted |

Rules:

- A retracted row equals an earlier added row in all columns.
- An operator that stores rows treats `-U` like `-D`, and `+I` like `+U`. A filter may therefore drop one row of a pair
  of `-U` and `+U`.
- Operators that emit changes emit retractions before additions. All changes of a key are emitted in the order in which
  they happened.
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
"""Name of the column with the kind of change."""

INSERT, UPDATE_AFTER, UPDATE_BEFORE, DELETE = "+I", "+U", "-U", "-D"
_KINDS = (INSERT, UPDATE_AFTER, UPDATE_BEFORE, DELETE)
_COMES = 2
"""Number of kinds in `_KINDS` that add a row. They come first, and the kinds that retract a row follow."""

_KIND_BYTES = 2
_IT_COMES, _IT_GOES = 1, 2
_MEANINGS = np.zeros(1 << 16, dtype=np.uint8)
"""Maps the two bytes of a kind, read as one number, to whether the kind adds or retracts a row. 0 marks an unknown
kind.
"""
_MEANINGS[np.frombuffer("".join(_KINDS).encode(), dtype="<u2")] = [_IT_COMES] * _COMES + [_IT_GOES] * _COMES

Flags = NDArray[np.bool_]


def with_kind(schema: pa.Schema) -> pa.Schema:
    """Returns a schema with the column `CHANGE` added: the schema of a stream of changes with these rows."""
    return schema.append(pa.field(CHANGE, pa.string()))


def rows_that_come(batch: pa.RecordBatch) -> Flags:
    """Returns True for each row of a batch of changes that is inserted, and False for each row that is retracted.

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
        raise ValueError(f"a row has {value_text(wrong)} in the column {CHANGE!r}; give one of {', '.join(_KINDS)}")
    comes: Flags = found.to_numpy() < _COMES
    return comes


def kinds_of(parts: Sequence[tuple[str, int]]) -> pa.Array:
    """Returns the values of the column `CHANGE` for consecutive parts of a batch. Each part is a pair of a kind of
    change and its number of rows.
    """
    rows = sum(count for _, count in parts)
    texts = b"".join(kind.encode() * count for kind, count in parts)
    offsets = np.arange(0, _KIND_BYTES * rows + 1, _KIND_BYTES, dtype=np.int32)
    return pa.StringArray.from_buffers(rows, pa.py_buffer(offsets), pa.py_buffer(texts))


def changes(parts: Sequence[tuple[str, Sequence[pa.Array]]], schema: pa.Schema) -> pa.RecordBatch | None:
    """Joins parts into one batch of changes. Each part is a pair of a kind of change and the columns of its rows.

    Returns None if all parts are empty. `schema` is the schema of the result, with `CHANGE` as the last column.
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
    """Returns the two bytes of each kind as one number, read from the column's memory.

    None if the column has nulls, has no rows, or has values that are not two bytes long.
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
