"""Columns whose values stand in the names of folders, as Hive and Spark write them: `day=2013-01-01/shop=a%2Fb/x`."""

from __future__ import annotations

from urllib.parse import unquote

import pyarrow as pa

from tidegate.connectors.formats.text_columns import converter_of
from tidegate.connectors.formats.text_options import DEFAULTS
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.tables.partitions import HIVE_NULL

_FLOAT_WORDS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
"""Floats as Python and Arrow name folders, by what Spark calls them."""


def folder_values(path: str, partitions: pa.Schema) -> pa.RecordBatch:
    """One row with these columns, whose values are read as those of CSV are.

    Raises ConfigurationError if a folder is missing, comes twice, or has a value of another type.
    """
    parts = [folder.partition("=") for folder in path.split("/")[:-1]]
    names = [unquote(name) for name, separator, _ in parts if separator]
    texts = {unquote(name): value for name, separator, value in parts if separator}
    columns = []
    for field in partitions:
        if field.name not in texts:
            raise ConfigurationError(f"{path} is in no folder {field.name}=...; partitions= names those of every file")
        if names.count(field.name) > 1:
            raise ConfigurationError(f"{path} is in two folders {field.name}=...; which value counts is not known")
        columns.append(_value(path, field, texts[field.name]))
    return pa.RecordBatch.from_arrays(columns, schema=partitions)


def _value(path: str, field: pa.Field, encoded: str) -> pa.Array:
    if encoded == HIVE_NULL:
        if not field.nullable:
            raise ConfigurationError(f"{path}: {field.name} is null there, and partitions= has it as not nullable")
        return pa.nulls(1, field.type)
    try:
        text = unquote(encoded, errors="strict")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: {field.name}={encoded} is not UTF-8; rename the folder") from error
    if pa.types.is_floating(field.type):
        text = _FLOAT_WORDS.get(text, text)
    convert = converter_of(field, DEFAULTS)
    values = pa.array([text], pa.string())
    try:
        return values if convert is None else convert(values)
    except (ValueError, OverflowError) as error:
        raise ConfigurationError(f"{path}: {field.name}={text} is no {field.type}: {error}") from error
