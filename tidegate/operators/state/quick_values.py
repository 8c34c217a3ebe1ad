"""Values of Arrow types as state keeps them, for values that need no look by Arrow: the way that common ones take.

`StateType` asks here first. What is not quick goes through `exact_array`, which takes 25 us. Rules:

- What a quick conversion gives is what Arrow would give back of the same value. Where that is not certain it says
  `NOT_QUICK`.
- A dict or list is converted into a new one, part by part. One part that is not quick makes the whole value so.
"""

from __future__ import annotations

import datetime as dt
import math
import struct
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import pyarrow as pa

NOT_QUICK: Final = object()
"""The answer for a value that Arrow has to look at."""

Quick: TypeAlias = Callable[[Any], Any]

_SINGLE = struct.Struct("<f")
_MICROSECONDS_END = dt.timedelta(microseconds=2**63 - 1)


def quick_conversion(data_type: pa.DataType) -> Quick:
    """How values of a type are converted; `NOT_QUICK` for all of them if the type is an uncommon one.

    Only nested ones may hold None.
    """
    kinds = pa.types
    if isinstance(data_type, pa.BaseExtensionType):
        return never_quick
    if kinds.is_integer(data_type):
        bits = data_type.bit_width
        unsigned = kinds.is_unsigned_integer(data_type)
        return _integer(0 if unsigned else -(2 ** (bits - 1)), 2 ** (bits if unsigned else bits - 1))
    if kinds.is_struct(data_type):
        return _struct(data_type)
    if kinds.is_list(data_type) or kinds.is_large_list(data_type):
        return _list(data_type)
    return _OF_TYPE.get(data_type, never_quick)


def one_nan(value: Any) -> Any:
    """NaN as one object, so that a map finds it again; anything else as it is."""
    return math.nan if isinstance(value, float) and value != value else value


def never_quick(value: Any) -> Any:
    """The conversion of types of which no value is common."""
    return NOT_QUICK


def _integer(least: int, end: int) -> Quick:
    def convert(value: Any) -> Any:
        return value if type(value) is int and least <= value < end else NOT_QUICK

    return convert


def _float(value: Any) -> Any:
    if type(value) is not float:
        return NOT_QUICK
    return value if value == value else math.nan


def _single(value: Any) -> Any:
    if type(value) is not float:
        return NOT_QUICK
    try:
        (rounded,) = _SINGLE.unpack(_SINGLE.pack(value))
    except OverflowError:
        return NOT_QUICK
    return rounded if rounded == rounded else math.nan


def _text(value: Any) -> Any:
    if type(value) is not str:
        return NOT_QUICK
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # the checkpoint that has to write it would fail
            return NOT_QUICK
    return value


def _moment(value: Any) -> Any:
    return value if type(value) is dt.datetime and value.tzinfo is None and not value.fold else NOT_QUICK


def _duration(value: Any) -> Any:
    return value if type(value) is dt.timedelta and -_MICROSECONDS_END <= value <= _MICROSECONDS_END else NOT_QUICK


def _same(python_type: type[Any]) -> Quick:
    def convert(value: Any) -> Any:
        return value if type(value) is python_type else NOT_QUICK

    return convert


def _struct(data_type: pa.DataType) -> Quick:
    parts = tuple((field.name, _part(field)) for field in data_type)
    if len({name for name, _ in parts}) < len(parts):
        return never_quick

    def convert(value: Any) -> Any:
        if type(value) is not dict or len(value) != len(parts):
            return NOT_QUICK
        stored = {}
        for name, quick in parts:
            part = quick(value.get(name, NOT_QUICK))
            if part is NOT_QUICK:
                return NOT_QUICK
            stored[name] = part
        return stored

    return convert


def _part(field: pa.Field) -> Quick:
    """The conversion of a field, element or entry, which may be None if it is nullable."""
    quick = quick_conversion(field.type)
    return (lambda value: None if value is None else quick(value)) if field.nullable else quick


def _list(data_type: pa.DataType) -> Quick:
    quick = _part(data_type.value_field)

    def convert(value: Any) -> Any:
        if type(value) is not list and type(value) is not tuple:
            return NOT_QUICK
        stored = [quick(item) for item in value]
        return NOT_QUICK if NOT_QUICK in stored else stored

    return convert


_OF_TYPE: dict[pa.DataType, Quick] = {
    pa.float64(): _float,
    pa.float32(): _single,
    pa.string(): _text,
    pa.binary(): _same(bytes),
    pa.bool_(): _same(bool),
    pa.date32(): _same(dt.date),
    pa.timestamp("us"): _moment,
    pa.duration("us"): _duration,
}
