"""The positions in the splits of a source, as a snapshot stores them: one row for each split.

`SourceCursor` computes them, and a restore reads them. A position is the number of the next row of its split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from tidegate.connectors.source import SOURCE_STATE, SourceSplit
from tidegate.operators.source_splits import EventTimes
from tidegate.storage.checkpoints.metadata import StateKind, StoredSplit
from tidegate.storage.state.snapshot import StateChunk, StateTable

_SCHEMA = pa.schema(
    [
        ("split_id", pa.string()),
        ("payload", pa.binary()),
        ("rows", pa.int64()),
        ("next_offset", pa.int64()),
        ("at_end", pa.bool_()),
        ("event_times", pa.map_(pa.string(), pa.int64())),
    ]
)


@dataclass(frozen=True, slots=True)
class SplitPosition:
    """The position in a split. `next_offset` is the first row that was not processed.

    `event_times`: for each operator that generates watermarks, the greatest timestamp of the split, in ms since 1970.
    `at_end`: the split was read to its end.
    """

    split: SourceSplit
    next_offset: int = 0
    at_end: bool = False
    event_times: EventTimes = ()


@dataclass(frozen=True, slots=True)
class FrozenPositions:
    """The positions in a snapshot. They are immutable, so the snapshot needs no copy."""

    positions: tuple[SplitPosition, ...]
    state: str = SOURCE_STATE
    kind: StateKind = StateKind.LIST
    removed: bool = False

    @classmethod
    def read_to_the_end(cls, splits: Sequence[StoredSplit]) -> FrozenPositions:
        """Returns positions at the end of each of these splits, as for a finished subtask."""
        return cls(tuple(SplitPosition(SourceSplit(s.split_id, s.payload, s.rows), s.rows, True) for s in splits))

    @property
    def splits(self) -> tuple[StoredSplit, ...]:
        """Returns the splits of the source, in the order of their positions."""
        return tuple(StoredSplit(p.split.split_id, p.split.payload, p.split.rows) for p in self.positions)

    def chunks(self) -> Iterator[StateChunk]:
        """Yields the positions as one state table, with a row for each split."""
        rows = pa.RecordBatch.from_pylist(
            [
                {
                    "split_id": p.split.split_id,
                    "payload": p.split.payload,
                    "rows": p.split.rows,
                    "next_offset": p.next_offset,
                    "at_end": p.at_end,
                    "event_times": p.event_times,
                }
                for p in self.positions
            ],
            schema=_SCHEMA,
        )
        yield StateChunk(rows)


def positions_from_tables(tables: Sequence[StateTable]) -> tuple[SplitPosition, ...]:
    """Returns the positions that are in the state tables of several subtasks. The inverse of
    `FrozenPositions.chunks`.
    """
    return tuple(
        SplitPosition(
            SourceSplit(row["split_id"], row["payload"], row["rows"]),
            row["next_offset"],
            row["at_end"],
            tuple(row.get("event_times") or ()),
        )
        for table in tables
        if table.state == SOURCE_STATE
        for row in table.rows.to_pylist()
    )
