"""Partitions of a table: computes the partition folder of a row, and selects files by filters on partition columns.

    data/<job>/<attempt>/carrier=AA/day=2013-01-01/<name>.parquet

Rules of folders:

- Each partition column has one folder, in the order of `partition_by`, named as Hive does: `<column>=<value>`. The
  value is percent-encoded. The column is encoded only if its name cannot be the name of a folder, or contains `=`,
  because Polars compares the names of folders with the names of columns.
- A null is `__HIVE_DEFAULT_PARTITION__`. A string with this text is encoded, so that it differs.
- The columns are in the files as well. Folders help to choose files; values of rows are never read from a name.
- The path of a file is in the table's log, and with it the partition values of its rows.
- No folder name ends with the suffix of a data file, so that a listing can distinguish folders and files.

Rules of filters:

- A filter compares a partition column with a value. All rows of a file have the same value in that column, so a filter
  selects whole files without opening them.
- In an upsert table all rows of a key are in one partition, so the newest row of the key is in one of the selected
  files.
- As in SQL, a null is neither equal nor unequal to a value, nor less or greater. `= None` matches nulls, `!= None`
  matches everything else, and `in` matches a null if None is among its values.
"""

from __future__ import annotations

import datetime as dt
import operator
import re
from collections.abc import Callable, Collection, Sequence
from functools import cache
from numbers import Integral
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.storage.checkpoints.layout import escape, unescape
from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.errors import ConfigurationError, CorruptionError, TableError
from tidegate.storage.schemas.arrow_types import decoded_type


class PartitionedTable(Protocol):
    """The part of `TableInfo` that partition filters use."""

    @property
    def arrow_schema(self) -> pa.Schema:
        """Returns the schema of all columns of the table."""

    @property
    def partition_by(self) -> tuple[str, ...]:
        """Returns the names of the partition columns."""


HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
DATA_FILE_SUFFIX = ".parquet"
TEXT_BYTES_MAX = 64
"""Limit of the size of a partition value, in bytes of UTF-8.

Encoded, and with its column's name, a value of this size fits into the 255 bytes of a file name.
"""

_ESCAPED_COLUMN_BYTES_MAX = 60
_NO_FOLDER = re.compile(r"[/=\\\x00-\x1f\x7f\ud800-\udfff]|^\.")
"""Matches names that cannot be part of a folder name: with a slash, an equals sign, a backslash or a control character,
and hidden names.
"""
_ATTEMPT_PARTS = 3


def check_partitioning(schema: pa.Schema, partition_by: Sequence[str], keys: Sequence[str]) -> None:
    """Raises TableError, naming the column, if a table with these columns and keys cannot be partitioned by
    `partition_by`.
    """
    for name in partition_by:
        if name not in schema.names:
            raise TableError(
                f"partition column {name!r} is not among the table's columns {schema.names}; name one of these"
            )
        if not _may_partition(schema.field(name).type):
            raise TableError(
                f"column {name!r} is {schema.field(name).type}, which cannot be a partition: use a column of integers, "
                "booleans, strings or dates, such as the date of a timestamp"
            )
        if len(escape(name)) > _ESCAPED_COLUMN_BYTES_MAX:
            raise TableError(
                f"partition column {name!r} is too long for the name of a folder; use at most "
                f"{_ESCAPED_COLUMN_BYTES_MAX} letters and digits (any other character counts for up to 12)"
            )
    if len(set(partition_by)) < len(partition_by):
        raise TableError(f"partition_by={list(partition_by)} names a column twice; name it once")
    if not schema.names:
        raise TableError("a table has at least one column, and these rows have none; select at least one")
    if set(partition_by) == set(schema.names):
        raise TableError(
            f"partition_by={list(partition_by)} leaves no column for the rows of a partition"
            "; partition by fewer columns"
        )
    outside = [name for name in partition_by if keys and name not in keys]
    if outside:
        raise TableError(
            f"partition column {outside[0]!r} is not among the keys {list(keys)}: in an upsert table all rows of a key "
            "must be in one partition; add it to the keys, or remove it from partition_by"
        )


def check_texts(rows: pa.RecordBatch, partition_by: Sequence[str]) -> None:
    """Raises TableError if a string in a partition column is too long for the name of a folder."""
    for name in partition_by:
        column = rows.column(name)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            continue
        longest = pc.max(pc.binary_length(column)).as_py() or 0
        if longest > TEXT_BYTES_MAX:
            raise TableError(
                f"partition column {name!r} has a value of {longest} bytes, but names of folders allow at most "
                f"{TEXT_BYTES_MAX}. Partition by a shorter column"
            )


def partition_folders(rows: pa.RecordBatch, partition_by: Sequence[str]) -> list[str]:
    """Returns the partition folder of each row, such as `day=2013-01-01/shop=a`."""
    columns = [[folder_name(name, value) for value in rows.column(name).to_pylist()] for name in partition_by]
    return ["/".join(names) for names in zip(*columns, strict=True)]


def folder_name(column: str, value: object) -> str:
    """Returns the name of the folder for one value of a partition column, such as `day=2013-01-01`."""
    name = escape(column) if _NO_FOLDER.search(column) else column
    return f"{name}={_text(value)}"


def folder_of(path: str) -> str:
    """Returns the partition folders in the path of a data file, such as `day=2013-01-01/shop=a`.

    Empty without partitions.
    """
    return "/".join(path.split("/")[_ATTEMPT_PARTS:-1])


def _text(value: object) -> str:
    match value:
        case None:
            return HIVE_NULL
        case bool():
            return "true" if value else "false"
        case dt.date():
            return value.isoformat()
        case _:
            text = escape(str(value)).replace(".", "%2E")
            return f"%5F{text[1:]}" if text == HIVE_NULL else text


def _may_partition(data_type: pa.DataType) -> bool:
    types, found = pa.types, decoded_type(data_type)
    return bool(
        types.is_integer(found)
        or types.is_boolean(found)
        or types.is_string(found)
        or types.is_large_string(found)
        or types.is_date32(found)
    )


PartitionFilter = tuple[str, str, object]
"""A filter on a partition column: column, comparison and value, such as `("carrier", "=", "AA")` or `("day", "in", [1,
2])`.
"""

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
    info: PartitionedTable, files: Sequence[DataFile], filters: Sequence[PartitionFilter]
) -> tuple[DataFile, ...]:
    """Returns the files whose partition values match every filter.

    Raises ConfigurationError for a filter on another column, for an unknown comparison, and for a value of the wrong
    type.
    """
    if not filters:
        return tuple(files)
    tests = [_test(info, given) for given in filters]
    types = [decoded_type(info.arrow_schema.field(name).type) for name in info.partition_by]

    @cache
    def matches(folder: str) -> bool:
        values = _parsed_values(folder, types)
        return all(test(values[position]) for position, test in tests)

    return tuple(file for file in files if matches(folder_of(file.path)))


def _test(info: PartitionedTable, given: PartitionFilter) -> tuple[int, _Test]:
    """Returns the index of the filtered column among the partition columns, and a function that tests a value of the
    column.
    """
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
        raise ConfigurationError(
            f"filter {given!r}: {value!r} is not a value of a column of type {data_type}; give a value of this type"
        )
    return value


def _parsed_values(folder: str, data_types: Sequence[pa.DataType]) -> list[object]:
    names = folder.split("/")
    if len(names) != len(data_types):
        raise CorruptionError(
            f"{folder!r} is not the folder of a partition by {len(data_types)} columns"
            "; restore the log from a copy of the table"
        )
    return [_parsed_value(name.partition("=")[2], data_type) for name, data_type in zip(names, data_types, strict=True)]


def _parsed_value(text: str, data_type: pa.DataType) -> object:
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
