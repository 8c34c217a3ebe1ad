"""Sources that wrap another source and deliver the same rows in a harder way.

- `TricklingSource` has nothing to read now and then, and its splits are read in turn.
- `FindingSource` finds its splits while the job runs and keeps positions in their payload.
- `CutSource` cuts splits into parts, and can assign them before the job starts.
- `two_halves` reads the first part of each split in a bounded source, and the rest in an unbounded one after it.

A job over any of them writes the same rows as over the wrapped source. A row that is missing or repeated is therefore
an error of the protocol.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pyarrow as pa

from tidegate.connectors.hybrid_source import hybrid_source
from tidegate.connectors.source import ReadResult, Source, SourceReader, SourceSplit
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import ConfigurationError

_OFTEN = 3
"""Rows are delayed at one of this many places in a split."""


@dataclass(frozen=True, slots=True)
class TricklingSource:
    """Delivers the rows of another source in turn and with pauses."""

    source: Source
    times_max: int = 9
    """Number of times at most that a split has nothing at such a place."""
    unbounded: Literal[True] = True

    @property
    def schema(self) -> pa.Schema:
        """Schema of the wrapped source."""
        return self.source.schema

    def splits(self) -> Sequence[SourceSplit]:
        """Returns the splits of the wrapped source."""
        return self.source.splits()

    def reader(self) -> SourceReader:
        """Returns a reader that has nothing to read now and then."""
        return _TricklingReader(self.source.reader(), self.times_max)


class _TricklingReader:
    def __init__(self, reader: SourceReader, times_max: int) -> None:
        self._reader = reader
        self._times_max = times_max
        self._missed: dict[tuple[str, int], int] = {}

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Returns nothing a few times at some places, then the rows."""
        place = split.split_id, offset
        chance = zlib.crc32(repr(place).encode())
        missed = self._missed.get(place, 0)
        if chance % _OFTEN == 0 and missed < 1 + chance // _OFTEN % self._times_max:
            self._missed[place] = missed + 1
            return ReadResult(None, offset, at_end=False)
        return self._reader.read(split, offset, rows_max)

    def close(self) -> None:
        """Closes the wrapped reader."""
        self._reader.close()


_SCOUTS = 2
_PAUSE_READS = 3
"""A scout finds a split at every third read."""
_FOUND = "found "


@dataclass(frozen=True, slots=True)
class FindingSource:
    """Delivers the rows of another source in splits that are found one after the other.

    Two splits without rows, the scouts, find the splits of the wrapped source, one at a time, with pauses. The number
    of splits found is in their payload. The position in a found split is in its payload too, not in the number of its
    next row. Output therefore stays the same only if payloads and found splits are restored with the rows that they
    belong to.
    """

    source: Source
    unbounded: Literal[True] = True

    @property
    def schema(self) -> pa.Schema:
        """Schema of the wrapped source."""
        return self.source.schema

    def splits(self) -> Sequence[SourceSplit]:
        """Returns the scouts. Their payload is the number of splits they have found."""
        return [SourceSplit(f"scout {number}", b"0", rows=0) for number in range(_SCOUTS)]

    def check_restored(self, splits: Sequence[SourceSplit]) -> None:
        """Raises ConfigurationError if a split of a checkpoint is neither a scout nor a split of the source."""
        known = {split.split_id for split in self.splits()} | {_FOUND + each.split_id for each in self.source.splits()}
        strange = [split.split_id for split in splits if split.split_id not in known]
        if strange:
            raise ConfigurationError(f"split {strange[0]!r} does not belong to this source")

    def reader(self) -> SourceReader:
        """Returns a reader that finds splits and reads found splits."""
        return _FindingReader(self.source)


class _FindingReader:
    def __init__(self, source: Source) -> None:
        self._splits = list(source.splits())
        self._reader = source.reader()
        self._looks = 0

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Returns a found split now and then for a scout; for other splits rows from the position in their payload."""
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
        """Closes the wrapped reader."""
        self._reader.close()


@wire
@dataclass(frozen=True, slots=True)
class _Part:
    """The split from which a part is cut, and the first row of the part in it."""

    split_id: str
    payload: bytes
    rows: int
    start: int


@dataclass(frozen=True, slots=True)
class CutSource:
    """Delivers the rows of another source with each split cut into `parts`.

    With many splits the coordinator assigns several of them in one answer. With `static_splits` they are assigned
    before the job starts. The number of rows of each split must be known.
    """

    source: Source
    parts: int
    static_splits: bool
    unbounded: bool = False
    """Like the wrapped source. An unbounded source reads its splits in turn."""

    @property
    def schema(self) -> pa.Schema:
        """Schema of the wrapped source."""
        return self.source.schema

    def splits(self) -> Sequence[SourceSplit]:
        """Returns the parts, in the order of their rows."""
        found = []
        for split in self.source.splits():
            for part in range(self.parts):
                start, stop = (split.rows * bound // self.parts for bound in (part, part + 1))
                payload = encode(_Part(split.split_id, split.payload, split.rows, start))
                found.append(SourceSplit(f"{split.split_id}, part {part}", payload, stop - start))
        return found

    def reader(self) -> SourceReader:
        """Returns a reader of parts."""
        return _PartReader(self.source.reader())


@dataclass(frozen=True, slots=True)
class _EverySecondSource:
    """Delivers every second split of another source."""

    source: Source
    first: int

    @property
    def schema(self) -> pa.Schema:
        """Schema of the wrapped source."""
        return self.source.schema

    def splits(self) -> Sequence[SourceSplit]:
        """Returns every second split."""
        return self.source.splits()[self.first :: 2]

    def reader(self) -> SourceReader:
        """Returns a reader of the wrapped source."""
        return self.source.reader()


def two_halves(source: Source, *, finding: bool) -> Source:
    """Returns a hybrid source: the first half of each split, and then the second halves, found or with pauses."""
    cut = CutSource(source, 2, static_splits=False)
    rest = _EverySecondSource(cut, 1)
    return hybrid_source(_EverySecondSource(cut, 0), FindingSource(rest) if finding else TricklingSource(rest))


class _PartReader:
    def __init__(self, reader: SourceReader) -> None:
        self._reader = reader

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Returns rows of one part."""
        rows = min(rows_max, split.rows - offset)
        if rows <= 0:
            return ReadResult(None, offset, at_end=True)
        part = decode(split.payload)
        assert isinstance(part, _Part)
        whole = SourceSplit(part.split_id, part.payload, part.rows)
        found = self._reader.read(whole, part.start + offset, rows)
        next_offset = found.next_offset - part.start
        return ReadResult(found.batch, next_offset, at_end=next_offset == split.rows)

    def close(self) -> None:
        """Closes the wrapped reader."""
        self._reader.close()
