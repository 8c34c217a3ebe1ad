"""Reads, writes and prints rows of state, batch by batch, for the commands `state` and `events`.

A file whose name ends in `.parquet` is Parquet. Any other file is Arrow IPC: a file or a stream.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain

import pyarrow as pa
import pyarrow.parquet as pq
import typer

from tidegate.connectors.formats.parquet import ParquetRows, parquet_schema
from tidegate.recovery.state_reader import BATCH_ROWS_MAX
from tidegate.storage.errors import ConfigurationError, StorageError

_FILE_MAGIC = b"ARROW1"


def rows_of_files(files: Sequence[str]) -> pa.RecordBatchReader:
    """Returns the rows of several files, in order.

    Raises ConfigurationError for a file that cannot be read or has different columns.
    """
    schema, first = _opened(files[0])
    return pa.RecordBatchReader.from_batches(schema, chain(first, _others(files[1:], schema)))


def _others(files: Sequence[str], expected: pa.Schema) -> Iterator[pa.RecordBatch]:
    for file in files:
        schema, batches = _opened(file)
        if not schema.equals(expected):
            raise ConfigurationError(
                f"{file} has columns {schema.names}, which differ from the first file in names or types"
                "; give files with the same columns"
            )
        yield from batches


def _parquet_batches(file: str, rows: ParquetRows) -> Iterator[pa.RecordBatch]:
    at = 0
    try:
        while (batch := rows.read(at, BATCH_ROWS_MAX)) is not None:
            at += batch.num_rows
            yield batch
    except (OSError, pa.ArrowException, ConfigurationError) as error:
        raise ConfigurationError(f"{file} cannot be read as Parquet: {error}; give a Parquet file") from error


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
        raise ConfigurationError(
            f"{file} cannot be read as Parquet (.parquet) or Arrow IPC: {error}; give such a file"
        ) from error


def print_rows(reader: pa.RecordBatchReader, rows_max: int, as_json: bool) -> None:
    """Prints the first rows, each as a line of JSON or tab-separated.

    Values of types that JSON lacks are printed as text.
    """
    found: list[pa.RecordBatch] = []
    left = rows_max
    for batch in reader:
        found.append(batch.slice(0, left))
        left -= found[-1].num_rows
        if left == 0:
            break
    rows = list(chain.from_iterable(batch.to_pylist() for batch in found))
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row, ensure_ascii=False, default=str))
        return
    typer.echo("\t".join(f"{field.name}: {field.type}" for field in reader.schema))
    for row in rows:
        typer.echo("\t".join(str(value) for value in row.values()))


def write_rows(reader: pa.RecordBatchReader, file: str) -> int:
    """Writes all rows to a file, as Parquet or Arrow IPC depending on its name. Returns the number of rows.

    Raises StorageError.
    """
    rows = 0
    try:
        if file.endswith(".parquet"):
            with pq.ParquetWriter(file, reader.schema) as parquet:
                for batch in reader:
                    parquet.write_batch(batch)
                    rows += batch.num_rows
        else:
            with pa.OSFile(file, "wb") as sink, pa.ipc.new_file(sink, reader.schema) as arrow:
                for batch in reader:
                    arrow.write_batch(batch)
                    rows += batch.num_rows
    except OSError as error:
        raise StorageError(
            f"cannot write {file}: {error}; name a file in a folder that this user can write to"
        ) from error
    return rows
