"""Reads keys of rows: as columns in the form that is stored, and as Python values for operators that work row by row.

Rules:

- Two rows have the same key exactly if the key hash takes them for one. Null is a key like any other; there is one NaN
  and one zero.
- A Python key is a tuple with one value for each column. The same key gives equal tuples with equal hashes.
- In it dates and times are the integers that Arrow stores, so that none loses its nanoseconds. `KeyCodec` turns a key
  back, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.operators.operator import OperatorContext
from tidegate.operators.operator_errors import first_row
from tidegate.protocol.errors import OperatorError
from tidegate.state.kernels.columns import key_column, key_form, storage_dtype
from tidegate.state.kernels.hashing import hash_columns
from tidegate.storage.state.key_groups import key_groups_of
from tidegate.storage.user_values import value_text

Key: TypeAlias = tuple[Any, ...]


def key_columns(batch: pa.RecordBatch, keys: Sequence[str]) -> pa.RecordBatch:
    """The key columns of a batch as they are stored: dictionaries decoded, floats with one zero and one NaN.

    Raises ConfigurationError for a column that is missing.
    """
    return pa.RecordBatch.from_arrays([_one_zero(key_column(batch, name)) for name in keys], names=list(keys))


def key_schema(schema: pa.Schema, keys: Sequence[str]) -> pa.Schema:
    """Names and types of the stored key columns of batches of a schema.

    Raises ConfigurationError for a column that is missing or of a type that cannot be a key.
    """
    columns = key_columns(pa.RecordBatch.from_pylist([], schema), keys)
    for name in keys:
        key_form(columns.column(name), name)
    return columns.schema


def check_owner(context: OperatorContext, keys: pa.RecordBatch, owners: NDArray[np.uint16]) -> None:
    """Raise OperatorError if a key (a row of key columns) is another subtask's. `subtask_table` gives `owners`."""
    groups = key_groups_of(hash_columns(keys, keys.schema.names), context.max_parallelism)
    strangers = owners[groups] != context.subtask
    if np.any(strangers):
        row = int(np.argmax(strangers))
        raise OperatorError(
            f"operator {context.name!r} (uid {context.uid!r}) on subtask {context.subtask + 1} of "
            f"{context.parallelism} got the key {value_text(first_row(keys.slice(row, 1)))}, which belongs to subtask "
            f"{int(owners[groups[row]]) + 1}: its input must be partitioned by {keys.schema.names}"
        )


class KeyCodec:
    """Keys of one schema of stored key columns, as Python tuples and back."""

    __slots__ = ("_stored", "schema")

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._stored = tuple(_stored_type(field.type) for field in schema)

    def encode(self, columns: pa.RecordBatch) -> list[Key]:
        """The key of each row of stored key columns (of `key_columns`, in the order of the schema)."""
        lists = [_python_values(c, stored) for c, stored in zip(columns.columns, self._stored, strict=True)]
        return list(zip(*lists, strict=True))

    def decode(self, keys: Sequence[Key]) -> pa.RecordBatch:
        """Stored key columns, one row for each key."""
        arrays = []
        for position, (field, stored) in enumerate(zip(self.schema, self._stored, strict=True)):
            column = pa.array([key[position] for key in keys], type=stored or field.type)
            arrays.append(column if stored is None else column.view(field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def sort_key(key: Key) -> tuple[tuple[int, Any], ...]:
    """Orders keys of one codec: values ascending, NaN after them, null last."""
    return tuple((2, 0) if v is None else (1, 0) if v != v else (0, v) for v in key)


def _python_values(column: pa.Array, stored: pa.DataType | None) -> list[Any]:
    values: list[Any] = (column if stored is None else column.view(stored)).to_pylist()
    if pa.types.is_floating(column.type):
        return [math.nan if value != value else value for value in values]  # one object: a tuple finds it again
    return values


def _stored_type(data_type: pa.DataType) -> pa.DataType | None:
    """The integer type beneath a date or time; None for types whose Python values are exact."""
    if not pa.types.is_temporal(data_type):
        return None
    dtype = storage_dtype(data_type)
    return None if dtype is None else pa.from_numpy_dtype(dtype)


def _one_zero(column: pa.Array) -> pa.Array:
    """Floats with one zero and one NaN, as they are hashed; other columns as they are."""
    if not pa.types.is_floating(column.type):
        return column
    if pa.types.is_float16(column.type):  # Arrow does not calculate with it
        return _one_zero(column.cast(pa.float32())).cast(pa.float16())
    nan = pa.scalar(float("nan"), column.type)
    positive = pc.add(column, pa.scalar(0.0, column.type))
    return pc.if_else(pc.is_nan(positive), nan, positive)
