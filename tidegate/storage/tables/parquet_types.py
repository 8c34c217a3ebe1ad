"""Which columns a table's files can hold: Parquet has no place for some types of Arrow. Asked before a job runs."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.storage.errors import TableError


def check_parquet_types(schema: pa.Schema) -> None:
    """Raise TableError, naming the column and what to do, where a Parquet file cannot hold a column."""
    if _refusal(schema) is None:
        return
    for field in schema:
        if (reason := _refusal(pa.schema([field]))) is not None:
            raise TableError(
                f"column {field.name!r} is {field.type}, which the table's Parquet files cannot hold; cast it before, "
                f"or leave it out ({reason})"
            )


def _refusal(schema: pa.Schema) -> str | None:
    """Why Arrow does not begin such a file; None if it does."""
    try:
        pq.ParquetWriter(io.BytesIO(), schema).close()
    except (pa.ArrowException, OSError) as error:  # for a scale below zero it is an OSError
        return str(error)
    return None
