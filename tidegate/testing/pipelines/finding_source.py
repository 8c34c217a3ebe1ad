"""`FindingSource`: a source whose splits are found while the job runs, and say in their payload where they are.

Rules: two splits without rows find the splits of another source, one at a time, with pauses. What they have found is
in their payload, and the next row of a split is in the payload of that one: the number of the row says nothing here.
So a job over it writes what it writes without, if payloads and found splits are restored with the rows they belong to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pyarrow as pa

from tidegate.connectors.source import ReadResult, Source, SourceReader, SourceSplit
from tidegate.storage.errors import ConfigurationError

_SCOUTS = 2
_PAUSE_READS = 3
"""A scout finds something at every third read."""
_FOUND = "found "


@dataclass(frozen=True, slots=True)
class FindingSource:
    """What another source has, in splits that are found one after the other."""

    source: Source
    unbounded: Literal[True] = True

    @property
    def schema(self) -> pa.Schema:
        """That of the source."""
        return self.source.schema

    def splits(self) -> Sequence[SourceSplit]:
        """The scouts. Their payload is how many splits they have found."""
        return [SourceSplit(f"scout {number}", b"0", rows=0) for number in range(_SCOUTS)]

    def check_restored(self, splits: Sequence[SourceSplit]) -> None:
        """All splits of a checkpoint must be scouts, or splits of the source."""
        known = {split.split_id for split in self.splits()} | {_FOUND + each.split_id for each in self.source.splits()}
        strange = [split.split_id for split in splits if split.split_id not in known]
        if strange:
            raise ConfigurationError(f"split {strange[0]!r} is none of this source")

    def reader(self) -> SourceReader:
        """A reader that finds, and reads what was found."""
        return _FindingReader(self.source)


class _FindingReader:
    def __init__(self, source: Source) -> None:
        self._splits = list(source.splits())
        self._reader = source.reader()
        self._looks = 0

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """A split now and then from a scout; rows from the place in the payload from others."""
        if split.rows == 0:
            return self._look(split, offset)
        number, row = map(int, split.payload.split())
        result = self._reader.read(self._splits[number], row, rows_max)
        rows = result.next_offset - row
        payload = b"%d %d" % (number, result.next_offset)
        return replace(result, next_offset=offset + rows, payload=payload)

    def _look(self, scout: SourceSplit, offset: int) -> ReadResult:
        mine = range(int(scout.split_id.split()[1]), len(self._splits), _SCOUTS)
        found = int(scout.payload)
        if found == len(mine):
            return ReadResult(None, offset, at_end=True)
        self._looks += 1
        if self._looks % _PAUSE_READS:
            return ReadResult(None, offset, at_end=False)
        number = mine[found]
        split = SourceSplit(_FOUND + self._splits[number].split_id, b"%d 0" % number)
        return ReadResult(None, offset, at_end=False, payload=b"%d" % (found + 1), found=(split,))

    def close(self) -> None:
        """Close what reads."""
        self._reader.close()
