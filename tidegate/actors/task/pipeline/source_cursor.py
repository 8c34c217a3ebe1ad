"""`SourceCursor`: the position of a source subtask in its splits. It only counts; the runtime reads.

The position counts what has been *processed*. What was read ahead is not part of it, and is simply read again after
a restore: `SourceReader.read` is a function of its arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from tidegate.actors.sources.source import SourceSplit
from tidegate.actors.task.channels.turn_pacer import ROWS_UNLIMITED
from tidegate.actors.task.messages.events import SourceBatchRead
from tidegate.actors.task.messages.instructions import ReadSource
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import StateChunk, StateTable

SOURCE_STATE = "splits"
_SCHEMA = pa.schema(
    [
        ("split_id", pa.string()),
        ("payload", pa.binary()),
        ("rows", pa.int64()),
        ("next_offset", pa.int64()),
        ("at_end", pa.bool_()),
    ]
)


@dataclass(frozen=True, slots=True)
class SplitPosition:
    """How far a split has been processed: `next_offset` is the first row that was not."""

    split: SourceSplit
    next_offset: int = 0
    at_end: bool = False


@dataclass(frozen=True, slots=True)
class FrozenPositions:
    """Positions as they were; already immutable, so freezing is taking the reference."""

    positions: tuple[SplitPosition, ...]
    state: str = SOURCE_STATE
    kind: StateKind = StateKind.LIST
    removed: bool = False

    def chunks(self) -> Iterator[StateChunk]:
        """One row a split."""
        rows = pa.RecordBatch.from_pylist(
            [
                {
                    "split_id": p.split.split_id,
                    "payload": p.split.payload,
                    "rows": p.split.rows,
                    "next_offset": p.next_offset,
                    "at_end": p.at_end,
                }
                for p in self.positions
            ],
            schema=_SCHEMA,
        )
        yield StateChunk(rows)


def positions_from_tables(tables: Sequence[StateTable]) -> tuple[SplitPosition, ...]:
    """Inverse of `FrozenPositions.chunks`, over the tables of several subtasks."""
    return tuple(
        SplitPosition(SourceSplit(row["split_id"], row["payload"], row["rows"]), row["next_offset"], row["at_end"])
        for table in tables
        if table.state == SOURCE_STATE
        for row in table.rows.to_pylist()
    )


class SourceCursor:
    """Reads splits one after the other, at most `read_ahead` batches ahead of processing."""

    def __init__(self, positions: Sequence[SplitPosition], rows_max: int, read_ahead: int = 2) -> None:
        self._positions = list(positions)
        self._ready: deque[tuple[int, SourceBatchRead]] = deque()
        self._reads = 0
        self._outstanding: int | None = None
        self._rows_max = rows_max
        self._read_ahead = read_ahead
        self._reading = self._first_open()
        self._read_offset = positions[self._reading].next_offset if self._reading is not None else 0

    @property
    def has_batch(self) -> bool:
        """Whether a batch waits to be processed."""
        return bool(self._ready)

    @property
    def at_end(self) -> bool:
        """Whether every row of every split has been processed."""
        return self._reading is None and not self._ready and self._outstanding is None

    def next_read(self, rows_max: int = ROWS_UNLIMITED) -> ReadSource | None:
        """The read to ask for now, of `rows_max` rows at most, if any."""
        if self._reading is None or self._outstanding is not None or len(self._ready) >= self._read_ahead:
            return None
        self._outstanding = self._reads
        self._reads += 1
        split = self._positions[self._reading].split
        return ReadSource(self._outstanding, split, self._read_offset, min(rows_max, self._rows_max))

    def batch_read(self, event: SourceBatchRead) -> None:
        """A read was answered. An answer that nobody waits for is dropped (it was delivered twice)."""
        if event.read != self._outstanding:
            if event.read < self._reads:
                return
            raise ProtocolError(f"an answer to read {event.read} came, which was never asked for")
        assert self._reading is not None
        self._outstanding = None
        self._ready.append((self._reading, event))
        self._read_offset = event.next_offset
        if event.at_end:
            self._reading = self._first_open(self._reading + 1)
            self._read_offset = self._positions[self._reading].next_offset if self._reading is not None else 0

    def take(self) -> tuple[pa.RecordBatch | None, CheckpointId | None]:
        """The next batch, whose rows count as processed from now on, and the checkpoint that it induces.

        None where a split was empty at its end, and where no checkpoint was induced.
        """
        index, event = self._ready.popleft()
        position = self._positions[index]
        assert not position.at_end and event.next_offset >= position.next_offset
        self._positions[index] = SplitPosition(position.split, event.next_offset, event.at_end)
        return event.batch if event.batch is not None and event.batch.num_rows else None, event.induces

    def freeze(self) -> FrozenPositions:
        """Positions of all splits of this subtask."""
        return FrozenPositions(tuple(self._positions))

    def _first_open(self, start: int = 0) -> int | None:
        for index in range(start, len(self._positions)):
            if not self._positions[index].at_end:
                return index
        return None
