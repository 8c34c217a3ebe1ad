"""Copies of what a function of the user hands over, so that the function may change its own object afterwards.

A row that was yielded, returned or emitted belongs to tidegate from that moment, as in engines that serialise it there.
Operators call this module at that moment, before the function runs on. Rules:

- A row is a mapping, a dataclass object or a named tuple. It becomes a dict, and so do such objects inside it.
- A row is always copied. A value in it is copied if it can be changed: lists, dicts, arrays, byte arrays.
- `PinnedSchema.own_row` skips the look at each value where no column has a type that such a value fits.
- Batches are copied by `owned_arrays.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import decimal
import uuid
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.storage.schemas.owned_arrays import owned_batch, owned_table
from tidegate.storage.user_values import value_text

_FIXED = frozenset(
    {
        *(NoneType, bool, int, float, str, bytes, decimal.Decimal, uuid.UUID),
        *(dt.datetime, dt.date, dt.time, dt.timedelta),
        *(np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
        *(np.float16, np.float32, np.float64, np.datetime64, np.timedelta64, np.str_, np.bytes_),
    }
)
"""Python types whose values cannot be changed."""
_LEFT_ALONE = (pa.Scalar, str, bytes, int, float, dt.date, dt.time, dt.timedelta, decimal.Decimal, np.generic)
"""Their subclasses, such as pandas' moments and enumerations of strings, cannot be changed where Arrow looks."""

OwnRow = Callable[[Any], dict[str, Any]]


def owned_row(row: Any) -> dict[str, Any]:
    """Returns a copy of a row that shares nothing with it that could be changed. TypeError if it is not a row."""
    if not isinstance(row, Mapping):
        row = _fields_of(row)
    return {name: value if type(value) in _FIXED else owned_value(value) for name, value in row.items()}


def owned_flat_row(row: Any) -> dict[str, Any]:
    """Returns a copy of a row whose values cannot be changed. TypeError if it is not a row."""
    if type(row) is dict:
        return row.copy()
    return dict(row) if isinstance(row, Mapping) else _fields_of(row)


def own_row_of(schema: pa.Schema | None) -> OwnRow:
    """Returns what copies rows of a schema; None if the schema is not known yet."""
    return owned_row if schema is None or any(_may_change(field.type) for field in schema) else owned_flat_row


def owned_value(value: Any) -> Any:
    """Returns a copy of a value, or the value itself if it cannot be changed."""
    kind = type(value)
    if kind in _FIXED:
        return value
    if kind is list:
        if _FIXED.issuperset(map(type, value)):
            return value.copy()
        return [owned_value(part) for part in value]
    if kind is dict:
        return {name: part if type(part) in _FIXED else owned_value(part) for name, part in value.items()}
    if kind is tuple:
        return tuple([owned_value(part) for part in value])
    if kind is memoryview:
        return bytes(value)
    if is_record(value):
        return {name: owned_value(part) for name, part in _fields_of(value).items()}
    return value if isinstance(value, _LEFT_ALONE) else copy.deepcopy(value)


def owned_result(result: Any) -> Any:
    """Returns a copy of what a function returned as a whole: a row, a batch or a table. Anything else as it is."""
    if isinstance(result, Mapping) or is_record(result):
        return owned_row(result)
    if isinstance(result, pa.RecordBatch):
        return owned_batch(result)
    if isinstance(result, pa.Table):
        return owned_table(result)
    return result


def _may_change(data_type: pa.DataType) -> bool:
    """Whether a column of a type takes Python values that can be changed."""
    kinds = pa.types
    if kinds.is_dictionary(data_type):
        return _may_change(data_type.value_type)
    return not (
        kinds.is_integer(data_type)
        or kinds.is_floating(data_type)
        or kinds.is_boolean(data_type)
        or kinds.is_string(data_type)
        or kinds.is_large_string(data_type)
        or kinds.is_string_view(data_type)
        or kinds.is_decimal(data_type)
        or kinds.is_temporal(data_type)
    )


def is_record(value: object) -> bool:
    """Returns whether a value is a dataclass object or a named tuple, which stands for a dict of its fields."""
    kind = type(value)
    return dataclasses.is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def _fields_of(row: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass object or a named tuple. TypeError for anything else."""
    if dataclasses.is_dataclass(type(row)):
        return {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    if is_record(row):
        return dict(zip(row._fields, row, strict=True))
    raise TypeError(f"a row must be a dict, not {type(row).__name__}: {value_text(row)}")
