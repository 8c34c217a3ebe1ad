"""Prints rows of state, or writes them to a file, batch by batch, for `tidegate state read` and `events --arrow`."""

from __future__ import annotations

import json
from itertools import chain

import pyarrow as pa
import pyarrow.parquet as pq
import typer

from tidegate.storage.errors import StorageError


def print_rows(reader: pa.RecordBatchReader, rows_max: int, as_json: bool) -> None:
    """Print the first rows: as a line of JSON each, or tab-separated. Values that JSON lacks are shown as text."""
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
    """Write all rows to a file: Parquet if its name says so, else Arrow IPC. Returns how many. Raises StorageError."""
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
        raise StorageError(f"cannot write {file}: {error}") from error
    return rows
