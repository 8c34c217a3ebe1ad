"""Checks the results of a source's methods when they arrive, because a source may be user code.

Rules:

- A wrong result is a ConfigurationError, because a restart would get it again. If it passed, the job could finish with
  an unreadable table, or a replay could miss rows.
- Anything that `splits()` raises at submission counts as the source's fault, even SystemExit, so that the driver
  reports it. Only Ctrl-C passes through.
"""

from __future__ import annotations

import pyarrow as pa

from tidegate.actors.graph.job_graph import SourceSpec
from tidegate.connectors.source import FilterableSource, ReadResult, SourceSplit, is_unbounded
from tidegate.protocol.failures import error_text, interrupts
from tidegate.storage.errors import ConfigurationError, TidegateError
from tidegate.storage.schemas.column_names import columns_text
from tidegate.storage.user_values import repr_text


def checked_read(source: SourceSpec, schema: pa.Schema, split: SourceSplit, offset: int, result: object) -> ReadResult:
    """Returns the result of a source's read of a split at `offset`. Raises ConfigurationError if the result is
    invalid.
    """
    reason = _fault(schema, offset, result) or _dynamic_fault(source, result)
    if reason is None:
        assert isinstance(result, ReadResult)
        return result
    raise ConfigurationError(
        f"source {source.name!r} (uid {source.uid!r}): read({split.split_id!r}, offset {offset}) {reason}"
    )


def _dynamic_fault(source: SourceSpec, result: object) -> str | None:
    assert isinstance(result, ReadResult)
    if result.payload is not None and not isinstance(result.payload, bytes):
        return f"has a payload that is no bytes: {repr_text(result.payload)}"
    wrong = next((split for split in result.found if not isinstance(split, SourceSplit)), None)
    if wrong is not None:
        return f"has found what is no tg.SourceSplit: {repr_text(wrong)}"
    if result.skipped and not isinstance(source.source, FilterableSource):
        return "has skipped rows; only a source that can be filtered may"
    wanted = getattr(source.source, "bad_rows_schema", None)
    if result.bad is not None and wanted is not None and not result.bad.schema.equals(wanted):
        return f"has dead letters with columns {columns_text(result.bad.schema)}, not {columns_text(wanted)}"
    if result.found and not is_unbounded(source.source):
        return "has found splits; only a source with unbounded = True may"
    return None


def splits_of(source: SourceSpec) -> tuple[SourceSplit, ...]:
    """Returns the splits of a source. Raises ConfigurationError, which names the source, if the source's code
    fails.
    """
    named = f"source {source.name!r} (uid {source.uid!r})"
    try:
        splits = tuple(source.source.splits())
    except TidegateError:
        raise
    except BaseException as error:
        if interrupts(error):
            raise
        raise ConfigurationError(
            f"{named}: splits() failed with {error_text(error)}; it must return the splits of the input"
        ) from error
    wrong = next((split for split in splits if not isinstance(split, SourceSplit)), None)
    if wrong is not None:
        raise ConfigurationError(
            f"{named}: splits() must return tg.SourceSplit objects, not {repr_text(wrong)}; return a list of these"
        )
    return splits


def _fault(schema: pa.Schema, offset: int, result: object) -> str | None:
    if not isinstance(result, ReadResult):
        return f"returned {type(result).__name__}, and not a tg.ReadResult"
    batch = result.batch
    next_offset = result.next_offset
    if not isinstance(next_offset, int) or isinstance(next_offset, bool):
        return f"has a next_offset that is no int: {next_offset!r}"
    if not isinstance(result.at_end, bool):
        return f"has an at_end that is no bool: {result.at_end!r}"
    if batch is None:
        rows = 0
    elif not isinstance(batch, pa.RecordBatch):
        return f"has a batch that is no Arrow record batch, but {type(batch).__name__}"
    elif not batch.schema.equals(schema):
        return f"has columns {columns_text(batch.schema)}, and the schema of the source is {columns_text(schema)}"
    else:
        rows = batch.num_rows
    if result.bad is not None and not isinstance(result.bad, pa.RecordBatch):
        return f"has dead letters that are no Arrow record batch, but {type(result.bad).__name__}"
    rows += 0 if result.bad is None else result.bad.num_rows
    if not isinstance(result.skipped, int) or result.skipped < 0:
        return f"has skipped {result.skipped!r} rows"
    if next_offset != offset + rows + result.skipped:
        wanted = offset + rows + result.skipped
        return f"has {rows} rows and next_offset {next_offset}; it must be {wanted}, the row after the last one"
    return None
