"""Columns whose values stand in the names of folders, as Hive and Spark write them: `day=2013-01-01/shop=a%2Fb/x`."""

from __future__ import annotations

from urllib.parse import unquote

import pyarrow as pa

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.tables.partitions import HIVE_NULL


def folder_values(path: str, partitions: pa.Schema) -> pa.RecordBatch:
    """One row with these columns. ConfigurationError if a folder is missing, or its value is of another type."""
    parts = (folder.partition("=") for folder in path.split("/")[:-1])
    texts = {unquote(name): value for name, separator, value in parts if separator}
    columns = {}
    for field in partitions:
        if field.name not in texts:
            raise ConfigurationError(f"{path} is in no folder {field.name}=...; partitions= names those of every file")
        text = None if texts[field.name] == HIVE_NULL else unquote(texts[field.name])
        try:
            columns[field.name] = pa.array([text], pa.string()).cast(field.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise ConfigurationError(f"{path}: {field.name}={text} is no {field.type}: {error}") from error
    return pa.record_batch(columns)
