"""Rows and the watermarks between them as they are stored: the rows, and how many of them lie before each watermark.

So watermarks cut no chunk of rows. What is in flight on channels, and what waits for calls, is stored in this form.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import pyarrow as pa

Mark: TypeAlias = tuple[int, int]
"""How many of the rows lie before a watermark, and its time in milliseconds."""

_SCHEMA = pa.schema([("rows_before", pa.int64()), ("watermark_ms", pa.int64())])


def told_apart(elements: Iterable[pa.RecordBatch | int]) -> tuple[list[pa.RecordBatch], list[Mark]]:
    """Batches and times of watermarks in their order, as batches and marks."""
    batches, marks, rows = list[pa.RecordBatch](), list[Mark](), 0
    for element in elements:
        if isinstance(element, int):
            marks.append((rows, element))
        else:
            batches.append(element)
            rows += element.num_rows
    return batches, marks


def put_together(batches: Iterable[pa.RecordBatch], marks: Iterable[Mark]) -> Iterator[pa.RecordBatch | int]:
    """Inverse of `told_apart`: batches are cut where a watermark lies between their rows."""
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
    """The rows that stand for some marks in storage."""
    columns = zip(*marks, strict=True) if marks else ((), ())
    return pa.record_batch([pa.array(column, pa.int64()) for column in columns], schema=_SCHEMA)


def marks_of(rows: pa.RecordBatch) -> list[Mark]:
    """Inverse of `marks_as_rows`."""
    return [*zip(*(rows.column(name).to_pylist() for name in _SCHEMA.names), strict=True)]
