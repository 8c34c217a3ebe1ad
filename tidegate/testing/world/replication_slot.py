"""`ReplicationSlot`: an external system that deletes rows after a reader has confirmed them.

The slots of PostgreSQL and queues with acknowledgements work in this way. A job that confirms a row before a completed
checkpoint covers it loses the row with its next restore. Like PostgreSQL, the slot then skips deleted rows without an
error. So the error is visible only as missing rows in the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pyarrow as pa

from tidegate.connectors.memory_source import MemorySource
from tidegate.connectors.source import ReadResult, SourceReader, SourceSplit
from tidegate.storage.errors import ConfigurationError


class ReplicationSlot:
    """A simulated replication slot: the rows of each split, and the number of the split's first row that is not
    deleted.
    """

    def __init__(self, data: pa.Table, splits: int) -> None:
        self._data = MemorySource.of(data, splits)
        self._first = [0] * splits

    def __deepcopy__(self, memo: object) -> ReplicationSlot:
        return self

    @property
    def data(self) -> MemorySource:
        """Returns all rows of the slot, including the deleted ones."""
        return self._data

    def confirm(self, number: int, row: int) -> None:
        """Deletes the rows of a split that are before `row`."""
        self._first[number] = max(self._first[number], row)

    def first(self, number: int) -> int:
        """Returns the number of the first row of a split that is not deleted."""
        return self._first[number]


class ReplicationSlotSource:
    """Reads a slot, and confirms the rows of completed checkpoints.

    The payload of a split is the number of its next row.
    """

    unbounded: Literal[True] = True
    notified = True

    def __init__(self, slot: ReplicationSlot) -> None:
        self._slot = slot

    @property
    def schema(self) -> pa.Schema:
        """Returns the schema of the rows."""
        return self._slot.data.schema

    def splits(self) -> Sequence[SourceSplit]:
        """Returns all splits, each at its first row."""
        return [SourceSplit(f"{number}", b"0") for number, _ in enumerate(self._slot.data.splits())]

    def check_restored(self, splits: Sequence[SourceSplit]) -> None:
        """Raises ConfigurationError if a split of a checkpoint does not exist in the slot. Positions may differ."""
        known = {split.split_id for split in self.splits()}
        strange = [split.split_id for split in splits if split.split_id not in known]
        if strange:
            raise ConfigurationError(f"split {strange[0]!r} does not belong to this slot")

    def reader(self) -> SourceReader:
        """Returns a reader of the rows of the slot."""
        return _SlotReader(self._slot)


class _SlotReader:
    def __init__(self, slot: ReplicationSlot) -> None:
        self._slot = slot
        self._splits = slot.data.splits()
        self._rows = slot.data.reader()

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Returns rows of a split. Deleted rows are skipped."""
        number = int(split.split_id)
        row = max(int(split.payload), self._slot.first(number))
        found = self._rows.read(self._splits[number], row, rows_max)
        next_offset = offset + found.next_offset - row
        return ReadResult(found.batch, next_offset, found.at_end, payload=b"%d" % found.next_offset)

    def checkpoint_completed(self, splits: Sequence[SourceSplit]) -> None:
        """Confirms the rows that a completed checkpoint covers, so that the slot deletes them."""
        for split in splits:
            self._slot.confirm(int(split.split_id), int(split.payload))

    def close(self) -> None:
        """Closes the reader of the rows."""
        self._rows.close()
