"""Column layouts of stored row tables, timers, and rows with watermarks between them.

- Row tables: key columns, a sequence number that distinguishes rows of one key, value columns.
- Timers: one row per timer, identified by all its columns: key, clock and time. In the canonical format, timers are
  sorted by key group, clock, time and then key, which is the order in which they fire. Values of a key column ascend,
  then NaN, then null.
- Rows with watermarks between them, such as rows in flight on channels or rows that wait for async calls: the rows, and
  for each watermark the number of rows before it. Watermarks therefore do not split a chunk of rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.storage.errors import CorruptionError
from tidegate.storage.schemas.column_names import own_name

ROW_SEQUENCE = own_name("row_sequence")
"""Name of the column of sequence numbers. A later row of the same key has a greater number."""

SEQUENCE_FIELD = pa.field(ROW_SEQUENCE, pa.int64())


def row_identity(keys: pa.Schema) -> pa.Schema:
    """Returns the columns that identify a row of a row table: the key columns and the sequence number."""
    return pa.schema([*keys, SEQUENCE_FIELD])


TIMERS_STATE = own_name("timers")
"""Name of the state that stores timers, next to the user's states."""

TIMER_DOMAIN, TIMER_MOMENT = own_name("timer_domain"), own_name("timer_timestamp_ms")
TIMER_COLUMNS = pa.schema([(TIMER_DOMAIN, pa.string()), (TIMER_MOMENT, pa.int64())])
"""Columns that follow the key columns of a timer: its clock and its time in ms."""

DOMAINS = ("event_time", "processing_time")
"""Names of the clocks of timers. A clock's number is its index here."""


def timers_schema(keys: pa.Schema) -> pa.Schema:
    """Returns the schema of stored timers with the given key columns."""
    return pa.schema([*keys, *TIMER_COLUMNS])


def check_timers(rows: pa.RecordBatch, keys: pa.Schema) -> None:
    """Raises CorruptionError unless `rows` have the columns of stored timers with the key columns `keys`."""
    expected = timers_schema(keys)
    found = rows.schema
    if [(field.name, field.type) for field in found] != [(field.name, field.type) for field in expected]:
        raise CorruptionError(
            f"stored timers have columns {found.names}, not {expected.names}; the file is damaged: choose another "
            "checkpoint"
        )


def domain_column(numbers: NDArray[Any]) -> pa.Array:
    """Returns the column of time domains for timers, given the number of each timer's domain."""
    return pa.array(DOMAINS, pa.string()).take(pa.array(numbers))


def domain_numbers(column: pa.Array) -> NDArray[np.uint8]:
    """Returns the number of each time domain in a column of domain names. Raises CorruptionError for an unknown
    name.
    """
    names = column.dictionary_encode()
    known = names.dictionary.to_pylist()
    if names.null_count or any(name not in DOMAINS for name in known):
        raise CorruptionError(
            f"stored timers have the clocks {sorted(map(str, known))}, and only {sorted(DOMAINS)} exist; the file is "
            "damaged: choose another checkpoint"
        )
    numbers = np.array([DOMAINS.index(name) for name in known], dtype=np.uint8)
    positions: NDArray[Any] = names.indices.to_numpy(zero_copy_only=False)
    found: NDArray[np.uint8] = numbers[positions]
    return found


Mark: TypeAlias = tuple[int, int]
"""The number of rows before a watermark, and its time in milliseconds."""

_MARKS_SCHEMA = pa.schema([("rows_before", pa.int64()), ("watermark_ms", pa.int64())])


def without_watermarks(elements: Iterable[pa.RecordBatch | int]) -> tuple[list[pa.RecordBatch], list[Mark]]:
    """Splits a sequence of batches and watermarks (ms) into the batches and the marks (position and time of each
    watermark).
    """
    batches, marks, rows = list[pa.RecordBatch](), list[Mark](), 0
    for element in elements:
        if isinstance(element, int):
            marks.append((rows, element))
        else:
            batches.append(element)
            rows += element.num_rows
    return batches, marks


def with_watermarks(batches: Iterable[pa.RecordBatch], marks: Iterable[Mark]) -> Iterator[pa.RecordBatch | int]:
    """Merges batches and marks into the original sequence.

    Yields batches, cut at watermarks between their rows, and watermarks (ms).
    """
    left, before = deque(marks), 0
    for batch in batches:
        start = 0
        while left and left[0][0] < before + batch.num_rows:
            rows, watermark_ms = left.popleft()
            if rows - before > start:
                yield batch.slice(start, rows - before - start)
                start = rows - before
            yield watermark_ms
        yield batch.slice(start) if start else batch
        before += batch.num_rows
    for _, watermark_ms in left:
        yield watermark_ms


def marks_as_rows(marks: Sequence[Mark]) -> pa.RecordBatch:
    """Converts marks (positions and times of watermarks) to a batch, the form in which they are stored."""
    columns = zip(*marks, strict=True) if marks else ((), ())
    return pa.record_batch([pa.array(column, pa.int64()) for column in columns], schema=_MARKS_SCHEMA)


def marks_of(rows: pa.RecordBatch) -> list[Mark]:
    """Converts a batch of `marks_as_rows` back to marks (positions and times of watermarks)."""
    return [*zip(*(rows.column(name).to_pylist() for name in _MARKS_SCHEMA.names), strict=True)]
