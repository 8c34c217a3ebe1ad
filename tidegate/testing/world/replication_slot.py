"""`ReplicationSlot`: a system outside the jobs that deletes rows when a reader has confirmed them.

The slots of PostgreSQL and queues with acknowledgements work like that. A job that confirms a row before a completed
checkpoint covers it loses that row with its next restore. Like PostgreSQL, the slot then skips deleted rows without an
error. The rows that are missing in the output show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pyarrow as pa

from tidegate.connectors.memory_source import MemorySource
from tidegate.connectors.source import ReadResult, SourceReader, SourceSplit
from tidegate.storage.errors import ConfigurationError


class ReplicationSlot:
    """The rows of each split, and the first row of each that is not deleted."""

    def __init__(self, data: pa.Table, splits: int) -> None:
        self._data = MemorySource.of(data, splits)
        self._first = [0] * splits

    def __deepcopy__(self, memo: object) -> ReplicationSlot:
        return self

    @property
    def data(self) -> MemorySource:
        """Every row, also the deleted ones."""
        return self._data

    def confirm(self, number: int, row: int) -> None:
        """Deletes the rows of a split before `row`."""
        self._first[number] = max(self._first[number], row)

    def first(self, number: int) -> int:
        """Returns the first row of a split that is not deleted."""
        return self._first[number]


class ReplicationSlotSource:
    """Reads a slot, and confirms the rows of completed checkpoints. The payload of a split is its next row."""

    unbounded: Literal[True] = True
    notified = True

    def __init__(self, slot: ReplicationSlot) -> None:
        self._slot = slot

    @property
    def schema(self) -> pa.Schema:
        """Schema of the rows."""
        return self._slot.data.schema

    def splits(self) -> Sequence[SourceSplit]:
        """Returns the splits from their first rows on."""
        return [SourceSplit(f"{number}", b"0") for number, _ in enumerate(self._slot.data.splits())]

    def check_restored(self, splits: Sequence[SourceSplit]) -> None:
        """Raises ConfigurationError if a split of a checkpoint is not in the slot. Positions may differ."""
        known = {split.split_id for split in self.splits()}
        strange = [split.split_id for split in splits if split.split_id not in known]
        if strange:
            raise ConfigurationError(f"split {strange[0]!r} does not belong to this slot")

    def reader(self) -> SourceReader:
        """Returns a reader."""
        return _SlotReader(self._slot)


class _SlotReader:
    def __init__(self, slot: ReplicationSlot) -> None:
        self._slot = slot
        self._splits = slot.data.splits()
        self._rows = slot.data.reader()

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Returns rows of a split, and passes over deleted ones."""
        number = int(split.split_id)
        row = max(int(split.payload), self._slot.first(number))
        found = self._rows.read(self._splits[number], row, rows_max)
        next_offset = offset + found.next_offset - row
        return ReadResult(found.batch, next_offset, found.at_end, payload=b"%d" % found.next_offset)

    def checkpoint_completed(self, splits: Sequence[SourceSplit]) -> None:
        """Confirms the rows that a completed checkpoint covers."""
        for split in splits:
            self._slot.confirm(int(split.split_id), int(split.payload))

    def close(self) -> None:
        """Closes the reader of the rows."""
        self._rows.close()
