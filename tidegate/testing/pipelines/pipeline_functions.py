"""Process functions and a source for random simulations.

Rules: what a function writes does not depend on when its timers fire, on how rows are batched, or on what was restored
in between; so a difference is the protocol's. What is still kept at the end goes by a timer at `LAST_MS`, which only
the last watermark reaches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import pyarrow as pa

from tidegate.connectors.memory_source import MemorySource
from tidegate.connectors.source import ReadResult, SourceReader, SourceSplit
from tidegate.operators.functions.process_functions import CoProcessFunction, ProcessContext, ProcessFunction
from tidegate.operators.state.keyed_state import ListState, MapState, ValueState
from tidegate.storage.ids import CheckpointId

LAST_MS = 2**62
DELAY_MS = 25
FLUSH_MS = 40
PART = 1_000
ORDERED_KEYS = 7
_VALUES = pa.list_(pa.int64())

Row = dict[str, Any]


class DelayedRows(ProcessFunction):
    """Emits a row when event time has gone `DELAY_MS` beyond it; a late one at the next watermark."""

    def open(self, context: ProcessContext) -> None:
        """Values that wait, by the time at which they are due."""
        self._waiting = context.state(MapState("waiting", pa.int64(), _VALUES))

    def process(self, row: Row, context: ProcessContext) -> None:
        """Keep the row until its timer fires."""
        due_ms = row["t"] + DELAY_MS
        self._waiting.put(due_ms, [*(self._waiting.get(due_ms) or ()), row["v"]])
        context.timer_service.register_event_time_timer(due_ms)

    def on_timer(self, timestamp: int, context: ProcessContext) -> list[Row]:
        """What waits for this moment leaves."""
        values = self._waiting.get(timestamp) or ()
        self._waiting.remove(timestamp)
        return [{**context.current_key, "v": 2 * value} for value in values]


class FlushedRows(ProcessFunction):
    """Emits the rows of a key together, some time after the first of them has come, or when the input ends."""

    def open(self, context: ProcessContext) -> None:
        """Values that wait."""
        self._waiting = context.state(ListState("waiting", pa.int64()))

    def process(self, row: Row, context: ProcessContext) -> None:
        """Keep the row until some timer of the key fires."""
        self._waiting.add(row["v"])
        timers = context.timer_service
        timers.register_processing_time_timer(timers.current_processing_time() + FLUSH_MS)

    def on_timer(self, timestamp: int, context: ProcessContext) -> list[Row]:
        """What waits leaves."""
        values = self._waiting.get()
        self._waiting.clear()
        return [{**context.current_key, "v": 2 * value} for value in values]


class Matched(CoProcessFunction):
    """Adds the rows of two streams up, by key: how many there are, and a sum for each of the streams."""

    def open(self, context: ProcessContext) -> None:
        """Three numbers a key."""
        self._totals = context.state(ValueState("totals", _VALUES))

    def process1(self, row: Row, context: ProcessContext) -> None:
        """A row of the first stream."""
        self._add(context, row["v"], 0)

    def process2(self, row: Row, context: ProcessContext) -> None:
        """A row of the second stream."""
        self._add(context, 0, row["w"])

    def on_timer(self, timestamp: int, context: ProcessContext) -> list[Row]:
        """Both streams have ended."""
        count, left, right = self._totals.value()
        return [{**context.current_key, "n": count, "l": left, "r": right}]

    def _add(self, context: ProcessContext, left: int, right: int) -> None:
        totals = self._totals.value() or [0, 0, 0]
        self._totals.update([totals[0] + 1, totals[1] + left, totals[2] + right])
        context.timer_service.register_event_time_timer(LAST_MS)


class InOrder(ProcessFunction):
    """Looks whether the rows of a key come in the order of their parts; those beyond a gap leave with a negative value.

    A value is `PART * (the part's number) + (the row's number)`: rows of one key and part are numbered without gaps. A
    row that comes again (at-least-once) is no gap, one that overtakes another is.
    """

    def open(self, context: ProcessContext) -> None:
        """How many rows of each part have come."""
        self._seen = context.state(MapState("seen", pa.int64(), pa.int64()))

    def process(self, row: Row, context: ProcessContext) -> list[Row]:
        """The row, marked if one before it is missing."""
        part, number = divmod(row["v"], PART)
        seen = self._seen.get(part) or 0
        self._seen.put(part, max(seen, number + 1))
        return [row if number <= seen else {**row, "v": -1 - row["v"]}]


class Outside:
    """A system outside the job: a master hook tells it of each checkpoint, and its source puts the mark into the data.

    One for each job: the source and the hook share it.
    """

    identifier = "outside"

    def __init__(self) -> None:
        self.wanted = 0
        """The newest checkpoint that was asked for."""

    def trigger(self, checkpoint_id: CheckpointId, timestamp_ms: int) -> bytes | None:
        """A checkpoint is wanted."""
        self.wanted = max(self.wanted, int(checkpoint_id))
        return b"wanted"

    def restore(self, checkpoint_id: CheckpointId, data: bytes | None) -> None:
        """Nothing has to be taken back: readers of an attempt answer only what is asked for during it."""


class OutsideSource(MemorySource):
    """A table that decides itself where its checkpoints begin."""

    externally_induced: Literal[True] = True

    def __init__(self, outside: Outside, data: pa.Table, splits: int) -> None:
        super().__init__(data, splits)
        self._outside = outside

    def reader(self) -> SourceReader:
        """A reader that answers to the system outside."""
        return _OutsideReader(super().reader(), self._outside)


class _OutsideReader:
    def __init__(self, reader: SourceReader, outside: Outside) -> None:
        self._reader = reader
        self._outside = outside
        self._induced = outside.wanted

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """The rows; right after them the newest checkpoint that is wanted and was not begun here."""
        found = self._reader.read(split, offset, rows_max)
        wanted = self._outside.wanted
        if wanted <= self._induced:
            return found
        self._induced = wanted
        return ReadResult(found.batch, found.next_offset, found.at_end, CheckpointId(wanted))

    def close(self) -> None:
        """Nothing to release."""
        self._reader.close()


def timed_rows(data: Sequence[tuple[int, int]]) -> pa.Table:
    """The rows with a time each, some out of order."""
    times = [10 * number - (15 if number % 3 == 2 else 0) for number in range(len(data))]
    return pa.table(
        {"k": [k for k, _ in data], "v": [v for _, v in data], "t": times},
        schema=pa.schema([("k", pa.int64()), ("v", pa.int64()), ("t", pa.int64())]),
    )


def numbered_rows(count: int, splits: int) -> list[tuple[int, int]]:
    """So many rows of a few keys, with values for `InOrder`: parts are the splits that a `MemorySource` makes."""
    rows = []
    for part in range(splits):
        numbers: Counter[int] = Counter()
        for row in range(count * part // splits, count * (part + 1) // splits):
            key = row % ORDERED_KEYS
            rows.append((key, PART * part + numbers[key]))
            numbers[key] += 1
    return rows
