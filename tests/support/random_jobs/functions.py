"""Process functions with state and timers for random jobs, and an externally induced source.

The output of a function depends neither on when its timers fire, nor on how rows are batched, nor on restores in
between. A difference is therefore an error of the protocol. Rows that a function still holds at the end are emitted by
a timer at `LAST_MS`, which only the last watermark reaches. The broadcast state of `RuledTotals` does not depend on the
order of its rows, because that order differs between subtasks when several senders broadcast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pyarrow as pa

from tidegate.connectors.memory_source import MemorySource
from tidegate.connectors.source import ReadResult, SourceReader, SourceSplit
from tidegate.operators.functions.process_functions import (
    BroadcastContext,
    CoProcessFunction,
    KeyedBroadcastProcessFunction,
    ProcessContext,
    ProcessFunction,
)
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
    """Emits a row when event time is `DELAY_MS` past it. Emits a late row at the next watermark."""

    def open(self, context: ProcessContext) -> None:
        """Opens the waiting values, by the time at which they are due."""
        self._waiting = context.state(MapState("waiting", pa.int64(), _VALUES))

    def process(self, row: Row, context: ProcessContext) -> None:
        """Stores the row until its timer fires."""
        due_ms = row["t"] + DELAY_MS
        self._waiting.put(due_ms, [*(self._waiting.get(due_ms) or ()), row["v"]])
        context.timer_service.register_event_time_timer(due_ms)

    def on_timer(self, timestamp: int, context: ProcessContext) -> list[Row]:
        """Emits the values that are due now."""
        values = self._waiting.get(timestamp) or ()
        self._waiting.remove(timestamp)
        return [{**context.current_key, "v": 2 * value} for value in values]


class FlushedRows(ProcessFunction):
    """Emits the rows of a key together, some time after the first of them, or when the input ends."""

    def open(self, context: ProcessContext) -> None:
        """Opens the waiting values."""
        self._waiting = context.state(ListState("waiting", pa.int64()))

    def process(self, row: Row, context: ProcessContext) -> None:
        """Stores the row until a timer of the key fires."""
        self._waiting.add(row["v"])
        timers = context.timer_service
        timers.register_processing_time_timer(timers.current_processing_time() + FLUSH_MS)

    def on_timer(self, timestamp: int, context: ProcessContext) -> list[Row]:
        """Emits all waiting values."""
        values = self._waiting.get()
        self._waiting.clear()
        return [{**context.current_key, "v": 2 * value} for value in values]


class Matched(CoProcessFunction):
    """Counts the rows of two streams by key, and sums each stream."""

    def open(self, context: ProcessContext) -> None:
        """Opens three numbers for each key."""
        self._totals = context.state(ValueState("totals", _VALUES))

    def process1(self, row: Row, context: ProcessContext) -> None:
        """Adds a row of the first stream."""
        self._add(context, row["v"], 0)

    def process2(self, row: Row, context: ProcessContext) -> None:
        """Adds a row of the second stream."""
        self._add(context, 0, row["w"])

    def on_timer(self, timestamp: int, context: ProcessContext) -> list[Row]:
        """Emits the totals when both streams have ended."""
        count, left, right = self._totals.value()
        return [{**context.current_key, "n": count, "l": left, "r": right}]

    def _add(self, context: ProcessContext, left: int, right: int) -> None:
        totals = self._totals.value() or [0, 0, 0]
        self._totals.update([totals[0] + 1, totals[1] + left, totals[2] + right])
        context.timer_service.register_event_time_timer(LAST_MS)


class InOrder(ProcessFunction):
    """Checks that the rows of a key arrive in the order of their parts. Rows behind a gap get a negative value.

    A value is `PART * (number of the part) + (number of the row)`. Rows of one key and part are numbered without gaps.
    A row that arrives again (at-least-once) is not a gap. A row that overtakes another one is.
    """

    def open(self, context: ProcessContext) -> None:
        """Opens the number of rows of each part."""
        self._seen = context.state(MapState("seen", pa.int64(), pa.int64()))

    def process(self, row: Row, context: ProcessContext) -> list[Row]:
        """Emits the row, marked if a row before it is missing."""
        part, number = divmod(row["v"], PART)
        seen = self._seen.get(part) or 0
        self._seen.put(part, max(seen, number + 1))
        return [row if number <= seen else {**row, "v": -1 - row["v"]}]


class Outside:
    """A system outside the job that induces checkpoints.

    A master hook notifies it of each checkpoint, and its source puts the mark into the data. The source and the hook of
    a job share one.
    """

    identifier = "outside"

    def __init__(self) -> None:
        self.wanted = 0
        """Number of the newest checkpoint that was requested."""

    def trigger(self, checkpoint_id: CheckpointId, timestamp_ms: int) -> bytes | None:
        """Records that a checkpoint is requested."""
        self.wanted = max(self.wanted, int(checkpoint_id))
        return b"wanted"

    def restore(self, checkpoint_id: CheckpointId, data: bytes | None) -> None:
        """Does nothing, because readers of an attempt only answer requests from during that attempt."""


class OutsideSource(MemorySource):
    """A table source that decides itself where its checkpoints begin."""

    externally_induced: Literal[True] = True

    def __init__(self, outside: Outside, data: pa.Table, splits: int) -> None:
        super().__init__(data, splits)
        self._outside = outside

    def reader(self) -> SourceReader:
        """Returns a reader that answers the requests of the outside system."""
        return _OutsideReader(super().reader(), self._outside)


class _OutsideReader:
    def __init__(self, reader: SourceReader, outside: Outside) -> None:
        self._reader = reader
        self._outside = outside
        self._induced = outside.wanted

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Returns rows, followed by the newest requested checkpoint that has not begun here."""
        found = self._reader.read(split, offset, rows_max)
        wanted = self._outside.wanted
        if wanted <= self._induced:
            return found
        self._induced = wanted
        return ReadResult(found.batch, found.next_offset, found.at_end, CheckpointId(wanted))

    def close(self) -> None:
        """Closes the reader."""
        self._reader.close()


def timed_rows(data: Sequence[tuple[int, int]]) -> pa.Table:
    """Returns the rows with a time column, in which some times are out of order."""
    times = [10 * number - (15 if number % 3 == 2 else 0) for number in range(len(data))]
    return pa.table(
        {"k": [k for k, _ in data], "v": [v for _, v in data], "t": times},
        schema=pa.schema([("k", pa.int64()), ("v", pa.int64()), ("t", pa.int64())]),
    )


def numbered_rows(count: int, splits: int) -> list[tuple[int, int]]:
    """Returns `count` rows of a few keys with values for `InOrder`.

    Their parts are the splits that a `MemorySource` makes.
    """
    rows = []
    for part in range(splits):
        numbers: Counter[int] = Counter()
        for row in range(count * part // splits, count * (part + 1) // splits):
            key = row % ORDERED_KEYS
            rows.append((key, PART * part + numbers[key]))
            numbers[key] += 1
    return rows


RULED = pa.schema([(name, pa.int64()) for name in ("k", "n", "t", "rules", "updates", "sum")])
_PAIR = pa.struct([("n", pa.int64()), ("sum", pa.int64())])


class RuledTotals(KeyedBroadcastProcessFunction):
    """Emits for each key the number of its rows and their sum, and the totals of all rules."""

    def open(self, context: ProcessContext) -> None:
        """Opens the totals of the keys and of the rules."""
        self._totals = context.state(ValueState("totals", _PAIR))
        self._rules = context.broadcast_state(MapState("rules", pa.int64(), _PAIR))

    def process(self, row: Row, context: ProcessContext) -> None:
        """Adds a row of the key."""
        self._totals.update(_plus(self._totals.value(), row["v"]))
        context.timer_service.register_event_time_timer(LAST_MS)

    def process_broadcast(self, row: Row, context: BroadcastContext) -> None:
        """Adds a rule. Every third rule rewrites the state of all keys unchanged."""
        self._rules.put(row["k"], _plus(self._rules.get(row["k"]), row["v"]))
        if row["v"] % 3 == 0:
            context.apply_to_keyed_state(self._totals, _written_again)

    def on_timer(self, timestamp: int, context: ProcessContext) -> Iterator[Row]:
        """Emits the totals when both streams have ended."""
        totals = self._totals.value()
        rules = list(self._rules.values())
        yield {
            **context.current_key,
            "n": totals["n"],
            "t": totals["sum"],
            "rules": len(rules),
            "updates": sum(rule["n"] for rule in rules),
            "sum": sum(rule["sum"] for rule in rules),
        }


class KeptRows(ProcessFunction):
    """Stores all rows until the end. Then it emits them, and a row of key -1 for each row that was counted."""

    def open(self, context: ProcessContext) -> None:
        """Opens the rows and the counts of this subtask. After a restore the first subtask takes over all counts."""
        self._rows = context.list_state(ListState("rows", pa.struct([("k", pa.int64()), ("v", pa.int64())])))
        self._counts = context.union_list_state(ListState("counts", pa.int64()))
        self._counts.update(self._counts.get() if context.subtask == 0 else ())

    def process(self, row: Row, context: ProcessContext) -> None:
        """Stores the row."""
        self._rows.add({"k": row["k"], "v": 2 * row["v"]})
        self._counts.add(1)

    def finish(self, context: ProcessContext) -> Iterator[Row]:
        """Emits all stored rows and counts."""
        yield from self._rows.get()
        yield from ({"k": -1, "v": count} for count in self._counts.get())


def _plus(total: Row | None, value: int) -> Row:
    had = total or {"n": 0, "sum": 0}
    return {"n": had["n"] + 1, "sum": had["sum"] + value}


def _written_again(key: Row, totals: ValueState) -> None:
    totals.update(totals.value())
