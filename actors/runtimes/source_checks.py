"""What a source has read, checked where it comes in: a source may be code of the user.

A wrong answer that passed here would make a finished job whose table nobody can read, or rows that a replay does not
find again. The same answer would come again after a restart, so it is a ConfigurationError.
"""

from __future__ import annotations

import pyarrow as pa

from tidegate.actors.graph.job_graph import SourceSpec
from tidegate.actors.sources import ReadResult, SourceSplit
from tidegate.storage.errors import ConfigurationError


def checked_read(source: SourceSpec, schema: pa.Schema, split: SourceSplit, offset: int, result: object) -> ReadResult:
    """The answer to a read of a split from `offset` on; `schema` is the source's. ConfigurationError if it is wrong."""
    reason = _fault(schema, offset, result)
    if reason is None:
        assert isinstance(result, ReadResult)
        return result
    raise ConfigurationError(
        f"source {source.name!r} (uid {source.uid!r}): read({split.split_id!r}, offset {offset}) {reason}"
    )


def _fault(schema: pa.Schema, offset: int, result: object) -> str | None:
    if not isinstance(result, ReadResult):
        return f"returned {type(result).__name__}, and not a tg.ReadResult"
    batch, next_offset = result.batch, result.next_offset
    if not isinstance(next_offset, int) or isinstance(next_offset, bool):
        return f"has a next_offset that is no int: {next_offset!r}"
    if not isinstance(result.at_end, bool):
        return f"has an at_end that is no bool: {result.at_end!r}"
    if batch is None:
        rows = 0
    elif not isinstance(batch, pa.RecordBatch):
        return f"has a batch that is no Arrow record batch, but {type(batch).__name__}"
    elif not batch.schema.equals(schema):
        return f"has columns {_columns(batch.schema)}, and the schema of the source is {_columns(schema)}"
    else:
        rows = batch.num_rows
    if next_offset != offset + rows:
        return f"has {rows} rows and next_offset {next_offset}; it must be {offset + rows}, the row after the last one"
    return None


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
