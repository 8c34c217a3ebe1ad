"""Partitions of a table: which folder the file of a row lies in.

    data/<job>/<attempt>/carrier=AA/day=2013-01-01/<name>.parquet

Rules:

- One folder a column, in the order of `partition_by`, named as Hive does: `<column>=<value>`. The value is
  percent-encoded. The column is encoded only where its name could not be that of a folder, or has a `=`: Polars
  compares the names of folders with those of columns.
- A null is `__HIVE_DEFAULT_PARTITION__`; a string that reads so is encoded until it does not.
- The columns are in the files as well. Folders help to choose files; what is in a row is never read from a name.
- The path of a file is in the table's log, and with it the values of its rows.
- No folder's name ends as a data file's does, so that whoever lists can tell the two apart.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.storage.checkpoints.layout import escape
from tidegate.storage.errors import TableError
from tidegate.storage.schemas.dictionaries import decoded_type

HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
DATA_FILE_SUFFIX = ".parquet"
TEXT_BYTES_MAX = 64
"""Of a value, in UTF-8: encoded, with the name of its column, it fits into the 255 bytes that a name may have."""

_ESCAPED_COLUMN_BYTES_MAX = 60
_NO_FOLDER = re.compile(r"[/=\\\x00-\x1f\x7f\ud800-\udfff]|^\.")
"""Names with a slash, an equals sign, a backslash or a control character, and hidden ones."""
_ATTEMPT_PARTS = 3


def check_partitioning(schema: pa.Schema, partition_by: Sequence[str], keys: Sequence[str]) -> None:
    """Raise TableError, naming the column, where a table of these columns cannot be partitioned so."""
    for name in partition_by:
        if name not in schema.names:
            raise TableError(f"partition column {name!r} is not among the table's columns {schema.names}")
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
        raise TableError(f"partition_by={list(partition_by)} names a column twice")
    if not schema.names:
        raise TableError("a table has at least one column, and these rows have none")
    if set(partition_by) == set(schema.names):
        raise TableError(f"partition_by={list(partition_by)} leaves no column for the rows of a partition")
    outside = [name for name in partition_by if keys and name not in keys]
    if outside:
        raise TableError(
            f"partition column {outside[0]!r} is not among the keys {list(keys)}: in an upsert table all rows of a key "
            "must be in one partition; add it to the keys, or leave it out of partition_by"
        )


def check_texts(rows: pa.RecordBatch, partition_by: Sequence[str]) -> None:
    """Raise TableError where a string is too long for the name of a folder."""
    for name in partition_by:
        column = rows.column(name)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            continue
        longest = pc.max(pc.binary_length(column)).as_py() or 0
        if longest > TEXT_BYTES_MAX:
            raise TableError(
                f"partition column {name!r} has a value of {longest} bytes; a folder is called after it, so at most "
                f"{TEXT_BYTES_MAX} are possible. Partition by a shorter column"
            )


def partition_folders(rows: pa.RecordBatch, partition_by: Sequence[str]) -> list[str]:
    """The folder of each row, without slashes at its ends."""
    columns = [[folder_name(name, value) for value in rows.column(name).to_pylist()] for name in partition_by]
    return ["/".join(names) for names in zip(*columns, strict=True)]


def folder_name(column: str, value: object) -> str:
    """The name of the folder of a column's value."""
    name = escape(column) if _NO_FOLDER.search(column) else column
    return f"{name}={_text(value)}"


def folder_of(path: str) -> str:
    """The folders of partitions in the path of a data file; empty where it is in none."""
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
