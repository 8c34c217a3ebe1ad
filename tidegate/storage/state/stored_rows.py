"""How row tables, timers, and rows with watermarks between them are stored.

- Row tables: key columns, a sequence number that distinguishes rows of one key, value columns.
- Timers: one row per timer, identified by all its columns: key, clock and time. In the canonical order rows are sorted
  by key group, clock, time and then key, which is the order in which timers fire. Values of a key column ascend, NaN
  comes after them and null last.
- Rows with watermarks between them, such as rows in flight on channels or rows that wait for calls: the rows, and for
  each watermark the number of rows before it. Watermarks therefore cut no chunk of rows.
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
    """Returns the columns that identify a row, for some key columns."""
    return pa.schema([*keys, SEQUENCE_FIELD])


TIMERS_STATE = own_name("timers")
"""Name of the table of timers, which is stored next to the tables of states."""

TIMER_DOMAIN, TIMER_MOMENT = own_name("timer_domain"), own_name("timer_timestamp_ms")
TIMER_COLUMNS = pa.schema([(TIMER_DOMAIN, pa.string()), (TIMER_MOMENT, pa.int64())])
"""Columns of a timer that follow its key columns."""

DOMAINS = ("event_time", "processing_time")
"""Names of the clocks, by their number."""


def timers_schema(keys: pa.Schema) -> pa.Schema:
    """Returns the columns of the table of timers for some key columns."""
    return pa.schema([*keys, *TIMER_COLUMNS])


def check_timers(rows: pa.RecordBatch, keys: pa.Schema) -> None:
    """Raises CorruptionError if rows have other columns."""
    expected = timers_schema(keys)
    found = rows.schema
    if [(field.name, field.type) for field in found] != [(field.name, field.type) for field in expected]:
        raise CorruptionError(f"stored timers have columns {found.names}, not {expected.names}")


def domain_column(numbers: NDArray[Any]) -> pa.Array:
    """Returns the column of clocks with these numbers."""
    return pa.array(DOMAINS, pa.string()).take(pa.array(numbers))


def domain_numbers(column: pa.Array) -> NDArray[np.uint8]:
    """Returns the number of each clock of a column. Raises CorruptionError for an unknown clock."""
    names = column.dictionary_encode()
    known = names.dictionary.to_pylist()
    if names.null_count or any(name not in DOMAINS for name in known):
        raise CorruptionError(f"stored timers wait for {sorted(map(str, known))}; there are {sorted(DOMAINS)}")
    numbers = np.array([DOMAINS.index(name) for name in known], dtype=np.uint8)
    positions: NDArray[Any] = names.indices.to_numpy(zero_copy_only=False)
    found: NDArray[np.uint8] = numbers[positions]
    return found


Mark: TypeAlias = tuple[int, int]
"""The number of rows before a watermark, and its time in milliseconds."""

_MARKS_SCHEMA = pa.schema([("rows_before", pa.int64()), ("watermark_ms", pa.int64())])


def without_watermarks(elements: Iterable[pa.RecordBatch | int]) -> tuple[list[pa.RecordBatch], list[Mark]]:
    """Splits batches and times of watermarks, in their order, into batches and marks."""
    batches, marks, rows = list[pa.RecordBatch](), list[Mark](), 0
    for element in elements:
        if isinstance(element, int):
            marks.append((rows, element))
        else:
            batches.append(element)
            rows += element.num_rows
    return batches, marks


def with_watermarks(batches: Iterable[pa.RecordBatch], marks: Iterable[Mark]) -> Iterator[pa.RecordBatch | int]:
    """Returns the inverse of `without_watermarks`: yields batches, cut at watermarks between their rows, and
    watermarks.
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
    """Returns marks as rows, the form in which they are stored."""
    columns = zip(*marks, strict=True) if marks else ((), ())
    return pa.record_batch([pa.array(column, pa.int64()) for column in columns], schema=_MARKS_SCHEMA)


def marks_of(rows: pa.RecordBatch) -> list[Mark]:
    """Returns the inverse of `marks_as_rows`: returns the marks."""
    return [*zip(*(rows.column(name).to_pylist() for name in _MARKS_SCHEMA.names), strict=True)]
