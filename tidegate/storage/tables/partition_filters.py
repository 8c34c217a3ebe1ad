"""Which files of a partitioned table filters leave: by the folders that they lie in, without opening any.

Rules:

- A filter compares a partition column with a value. All rows of a file have the same value there, so files are chosen
  whole, and their rows are exactly those that match.
- In an upsert table all rows of a key are in one partition, so the newest of them is among the files that are left.
- As in SQL, a null is neither equal nor unequal to a value, nor less or greater. `= None` is true for nulls, `!= None`
  for all else; `in` finds a null if there is one among its values.
"""

from __future__ import annotations

import datetime as dt
import operator
from collections.abc import Callable, Collection, Sequence
from functools import cache
from numbers import Integral
from typing import Any

import pyarrow as pa

from tidegate.storage.checkpoints.layout import unescape
from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.errors import ConfigurationError, CorruptionError
from tidegate.storage.schemas.dictionaries import decoded_type
from tidegate.storage.tables.partitions import HIVE_NULL, folder_of
from tidegate.storage.tables.table_info import TableInfo

PartitionFilter = tuple[str, str, object]
"""Column, comparison and value, such as `("carrier", "=", "AA")` or `("day", "in", [1, 2])`."""

_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_Test = Callable[[object], bool]


def matching_files(
    info: TableInfo, files: Sequence[DataFile], filters: Sequence[PartitionFilter]
) -> tuple[DataFile, ...]:
    """Those of a table's files whose rows match every filter.

    ConfigurationError for a filter of another column, of a comparison or a value that is none for it.
    """
    if not filters:
        return tuple(files)
    tests = [_test(info, given) for given in filters]
    types = [decoded_type(info.arrow_schema.field(name).type) for name in info.partition_by]

    @cache
    def matches(folder: str) -> bool:
        values = _values(folder, types)
        return all(test(values[position]) for position, test in tests)

    return tuple(file for file in files if matches(folder_of(file.path)))


def _test(info: TableInfo, given: PartitionFilter) -> tuple[int, _Test]:
    """The position of a filter's column, and what to ask of a value there."""
    if not isinstance(given, tuple | list) or len(given) != 3:
        raise ConfigurationError(
            f'filter {given!r}: give column, comparison and value, such as ("carrier", "=", "AA"), in a list of filters'
        )
    name, comparison, value = given
    if name not in info.partition_by:
        there = f"only by {list(info.partition_by)}" if info.partition_by else "not at all"
        raise ConfigurationError(
            f"filter {given!r}: the table is partitioned {there}; filter the rows that you have read by other columns"
        )
    data_type = decoded_type(info.arrow_schema.field(name).type)
    position = info.partition_by.index(name)
    if comparison == "in":
        if isinstance(value, str) or not isinstance(value, Collection):
            raise ConfigurationError(f'filter {given!r}: "in" takes several values, such as a list')
        wanted = {_checked(given, data_type, one) for one in value}
        return position, lambda found: found in wanted
    if comparison not in _ORDER:
        raise ConfigurationError(f'filter {given!r}: comparisons are "in" and {", ".join(map(repr, _ORDER))}')
    if value is None:
        if comparison not in ("=", "!="):
            raise ConfigurationError(f'filter {given!r}: nothing is less or greater than None; use "=" or "!="')
        return position, lambda found: (found is None) == (comparison == "=")
    compare, sought = _ORDER[comparison], _checked(given, data_type, value)
    return position, lambda found: found is not None and compare(found, sought)


def _checked(given: PartitionFilter, data_type: pa.DataType, value: object) -> object:
    types = pa.types
    if types.is_boolean(data_type):
        fits = isinstance(value, bool)
    elif types.is_integer(data_type):
        fits = isinstance(value, Integral) and not isinstance(value, bool)
    elif types.is_date32(data_type):
        fits = isinstance(value, dt.date) and not isinstance(value, dt.datetime)
    else:
        fits = isinstance(value, str)
    if not fits and value is not None:
        raise ConfigurationError(f"filter {given!r}: {value!r} is no value of a column of type {data_type}")
    return value


def _values(folder: str, data_types: Sequence[pa.DataType]) -> list[object]:
    names = folder.split("/")
    if len(names) != len(data_types):
        raise CorruptionError(f"{folder!r} is no folder of a partition by {len(data_types)} columns")
    return [_value(name.partition("=")[2], data_type) for name, data_type in zip(names, data_types, strict=True)]


def _value(text: str, data_type: pa.DataType) -> object:
    types = pa.types
    if text == HIVE_NULL:
        return None
    if types.is_boolean(data_type):
        return text == "true"
    if types.is_integer(data_type):
        return int(text)
    if types.is_date32(data_type):
        return dt.date.fromisoformat(text)
    return unescape(text)
