"""A source subtask that is asked by hand: its cursor, and answers to its reads."""

from __future__ import annotations

from dataclasses import replace

from batches import batch

from tidegate.actors.task.events import SourceBatchRead
from tidegate.actors.task.instructions import ReadSource
from tidegate.actors.task.source_cursor import SourceCursor
from tidegate.actors.task.split_positions import SplitPosition
from tidegate.connectors.source import SourceSplit
from tidegate.operators.source_splits import SourceSplits

FIRST, SECOND = SourceSplit("a", b"\x00\xff", 4), SourceSplit("b", b"", -1)


def cursor(*positions: SplitPosition, read_ahead: int = 2) -> SourceCursor:
    """A cursor that reads two rows at a time."""
    return SourceCursor(positions, rows_max=2, read_ahead=read_ahead)


def answer(read: ReadSource, rows: int, at_end: bool = False) -> SourceBatchRead:
    """The answer to a read: so many rows from its offset on."""
    data = batch(*range(read.offset, read.offset + rows)) if rows else None
    return SourceBatchRead(0, read.read, data, read.offset + rows, at_end)


def read_of(source: SourceCursor) -> ReadSource:
    """The read that the cursor asks for; there must be one."""
    read = source.next_read()
    assert read is not None
    return read


def unbounded(*positions: SplitPosition) -> SourceCursor:
    """A cursor over splits that are read in turn."""
    return SourceCursor(positions, rows_max=2, in_turn=SourceSplits())


def at(event: SourceBatchRead, at_ms: int) -> SourceBatchRead:
    """The same answer at another time."""
    return replace(event, at_ms=at_ms)
