"""What the footer of a Parquet file says: whether Arrow reads its columns as Spark does.

`files_in_place.py` asks for every file of a DataFrame. Rules:

- A column that Spark finds in a file by another spelling, that is stored in another type than the DataFrame has, or in
  one of which Spark and Arrow may think otherwise, is for Spark to read. A column that is not in the file is null.
- Dates and timestamps of old writers may be in the Julian calendar, which Spark converts or refuses. Files count that
  Spark 3.1 or later has written without that, and others if their statistics say that nothing is so old.
- Of nested columns those of Spark 3.1 or later count, if Arrow gives them the same type.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_WRITER = b"org.apache.spark.version"
_OLD_CALENDARS = (b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96")
_NEW_CALENDAR = (3, 1)
"""The version of Spark from which on a file says if its values are in the old one."""
_GREGORIAN_SINCE = dt.date(1900, 1, 1)
"""From here on all calendars and zones agree, with a margin that Spark takes as well."""


def why_only_spark(parquet: pq.ParquetFile, wanted: pa.Schema) -> str | None:
    """None if Arrow reads these columns of an open file as Spark does; else what differs, to follow its name."""
    keys = parquet.metadata.metadata or {}
    by_spark = _spark_version(keys) >= _NEW_CALENDAR and not any(old in keys for old in _OLD_CALENDARS)
    stored = parquet.schema_arrow
    for field in wanted:
        alike = [name for name in stored.names if name.lower() == field.name.lower()]
        if not alike:
            continue
        if alike != [field.name]:
            return f"has {field.name} as {', '.join(alike)}"
        if pa.types.is_nested(field.type):
            if not by_spark or not _same(stored.field(field.name).type, field.type):
                return f"has {field.name} as {stored.field(field.name).type}, which only Spark surely reads alike"
            continue
        column = _leaf(parquet, field.name)
        if column is None or not _reads_alike(column, field.type):
            return f"stores {field.name} in another way than as {field.type}"
        if pa.types.is_temporal(field.type) and not by_spark and not _is_modern(parquet, field.name):
            return f"may have values of {field.name} in an older calendar"
    return None


def _spark_version(keys: dict[bytes, bytes]) -> tuple[int, ...]:
    parts = keys.get(_WRITER, b"").split(b".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()


def _leaf(parquet: pq.ParquetFile, name: str) -> Any:
    found = [parquet.schema[at] for at in range(len(parquet.schema)) if parquet.schema[at].path == name]
    return found[0] if len(found) == 1 and found[0].max_repetition_level == 0 else None


def _reads_alike(column: Any, kind: pa.DataType) -> bool:
    """Whether a plain column is stored as Spark and Arrow both expect a type."""
    types = pa.types
    logical = json.loads(column.logical_type.to_json())
    name, physical = logical.get("Type", "None"), column.physical_type
    if name in ("None", "Undefined") and (plain := _PLAIN.get(physical)) is not None:
        return bool(plain(kind))
    if name == "Int" and types.is_signed_integer(kind):
        return bool(logical["isSigned"]) and logical["bitWidth"] == kind.bit_width
    if name == "String":
        return bool(types.is_string(kind))
    if name == "Date":
        return bool(types.is_date32(kind))
    if name == "Timestamp" and types.is_timestamp(kind):
        exact = logical["timeUnit"] in ("milliseconds", "microseconds")
        return exact and bool(logical["isAdjustedToUTC"]) == (kind.tz is not None)
    if name == "Decimal" and types.is_decimal128(kind):
        return bool(logical["precision"] == kind.precision and logical["scale"] == kind.scale)
    return False


_PLAIN: dict[str, Callable[[pa.DataType], bool]] = {
    "BOOLEAN": pa.types.is_boolean,
    "INT32": pa.types.is_int32,
    "INT64": pa.types.is_int64,
    "FLOAT": pa.types.is_float32,
    "DOUBLE": pa.types.is_float64,
    "BYTE_ARRAY": pa.types.is_binary,
    "INT96": lambda kind: pa.types.is_timestamp(kind) and kind.tz is not None,
}
"""Columns that say nothing but how they are stored. Spark's usual timestamps are among them."""


def _is_modern(parquet: pq.ParquetFile, name: str) -> bool:
    """Whether statistics say that all values are of times in which there is one calendar."""
    at = next(at for at in range(len(parquet.schema)) if parquet.schema[at].path == name)
    for group in range(parquet.metadata.num_row_groups):
        statistics = parquet.metadata.row_group(group).column(at).statistics
        if statistics is None or not statistics.has_min_max:
            if statistics is not None and statistics.null_count == parquet.metadata.row_group(group).num_rows:
                continue
            return False
        least = statistics.min
        if isinstance(least, dt.datetime):
            least = least.date()
        if not isinstance(least, dt.date) or least < _GREGORIAN_SINCE:
            return False
    return True


def _same(stored: pa.DataType, kind: pa.DataType) -> bool:
    """Whether nested types are the same but for the names of elements, and for what may be null."""
    types = pa.types
    if types.is_list(kind):
        return types.is_list(stored) and _same(stored.value_type, kind.value_type)
    if types.is_map(kind):
        keys_and_items = types.is_map(stored) and _same(stored.key_type, kind.key_type)
        return keys_and_items and _same(stored.item_type, kind.item_type)
    if types.is_struct(kind):
        fields = types.is_struct(stored) and [each.name for each in stored] == [each.name for each in kind]
        return fields and all(_same(stored.field(each.name).type, each.type) for each in kind)
    return bool(stored.equals(kind))
