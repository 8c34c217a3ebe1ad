"""What a Delta Lake table can hold: columns of a table that is written in that format, checked before a job runs.

Delta keeps fewer types than Arrow. Whoever writes Delta tables elsewhere casts silently (unsigned integers become
signed ones); here such a column is refused, with the cast to make.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from tidegate.storage.errors import TableError
from tidegate.storage.schemas.dictionaries import decoded_type

_FORBIDDEN_IN_NAMES = " ,;{}()\n\t="
"""Parquet readers of Spark refuse them, and so does Delta without column mapping."""


def check_delta_schema(schema: pa.Schema) -> None:
    """Raise TableError, naming the column and what to do, where Delta cannot hold a column."""
    seen: dict[str, str] = {}
    for field in schema:
        if bad := sorted(set(field.name) & set(_FORBIDDEN_IN_NAMES)):
            raise TableError(f"column {field.name!r} has {bad[0]!r} in its name, which Delta Lake refuses: rename it")
        if (other := seen.setdefault(field.name.lower(), field.name)) != field.name:
            raise TableError(
                f"columns {other!r} and {field.name!r} differ by case alone, which Delta Lake ignores: rename one"
            )
        for part in _leaves(field.type):
            if (hint := _hint(part)) is not None:
                raise TableError(f"column {field.name!r} is {field.type}, which Delta Lake cannot hold: {hint}")


def _leaves(data_type: pa.DataType) -> Iterator[pa.DataType]:
    found = decoded_type(data_type)
    if pa.types.is_list(found) or pa.types.is_large_list(found):
        yield from _leaves(found.value_type)
    elif pa.types.is_map(found):
        yield from _leaves(found.key_type)
        yield from _leaves(found.item_type)
    elif pa.types.is_struct(found):
        for field in found:
            yield from _leaves(field.type)
    else:
        yield found


def _hint(found: pa.DataType) -> str | None:
    """What to do about a type; None where it can be held."""
    types = pa.types
    if types.is_timestamp(found):
        if found.unit != "us":
            return f"cast it to microseconds, {pa.timestamp('us', found.tz)}"
        return None if found.tz in (None, "UTC") else "its time zone must be UTC; cast it to timestamp[us, tz=UTC]"
    if types.is_unsigned_integer(found):
        return "cast it to a signed integer"
    if types.is_float16(found):
        return "cast it to float32"
    held = (
        types.is_boolean(found)
        or types.is_signed_integer(found)
        or types.is_floating(found)
        or types.is_string(found)
        or types.is_large_string(found)
        or types.is_binary(found)
        or types.is_large_binary(found)
        or types.is_date32(found)
        or types.is_decimal128(found)
    )
    return None if held else "cast it to a number, a string, a date or a timestamp[us]"
