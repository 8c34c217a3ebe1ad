"""Reads rows from local files, batch by batch, for `tidegate state write`.

A name that ends in `.parquet` is Parquet, any other is Arrow IPC: a file or a stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import pyarrow as pa

from tidegate.connectors.files.parquet_rows import ParquetRows, parquet_schema
from tidegate.recovery.contents.state_reader import BATCH_ROWS_MAX
from tidegate.storage.errors import ConfigurationError

_FILE_MAGIC = b"ARROW1"


def rows_of_files(files: Sequence[str]) -> pa.RecordBatchReader:
    """All rows of some files, in order. ConfigurationError for one that cannot be read, or has other columns."""
    schema, first = _opened(files[0])
    return pa.RecordBatchReader.from_batches(schema, chain(first, _others(files[1:], schema)))


def _others(files: Sequence[str], expected: pa.Schema) -> Iterator[pa.RecordBatch]:
    for file in files:
        schema, batches = _opened(file)
        if not schema.equals(expected):
            raise ConfigurationError(
                f"{file} has columns {schema.names}, others than the first file, or of other types"
            )
        yield from batches


def _parquet_batches(file: str, rows: ParquetRows) -> Iterator[pa.RecordBatch]:
    at = 0
    try:
        while (batch := rows.read(at, BATCH_ROWS_MAX)) is not None:
            at += batch.num_rows
            yield batch
    except (OSError, pa.ArrowException, ConfigurationError) as error:
        raise ConfigurationError(f"{file} cannot be read as Parquet: {error}") from error


def _opened(file: str) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    try:
        if file.endswith(".parquet"):
            schema = parquet_schema(file)
            return schema, _parquet_batches(file, ParquetRows(file, file, schema))
        source = pa.memory_map(file)
        is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        source.seek(0)
        reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        if is_file:
            return reader.schema, map(reader.get_batch, range(reader.num_record_batches))
        return reader.schema, iter(reader)
    except (OSError, pa.ArrowException) as error:
        raise ConfigurationError(f"{file} cannot be read as Parquet (.parquet) or Arrow IPC: {error}") from error
