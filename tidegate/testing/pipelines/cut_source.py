"""`CutSource`: a source whose splits are cut into parts, and dealt out before the job starts if wanted.

With many splits the coordinator gives several of them in one answer. What is read is what the source has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from tidegate.connectors.source import ReadResult, Source, SourceReader, SourceSplit
from tidegate.storage.codec import decode, encode, wire


@wire
@dataclass(frozen=True, slots=True)
class _Part:
    """What a split is cut from, and its first row there."""

    split_id: str
    payload: bytes
    rows: int
    start: int


@dataclass(frozen=True, slots=True)
class CutSource:
    """What another source has, each split of known length in so many parts."""

    source: Source
    parts: int
    static_splits: bool
    unbounded: bool = False
    """As that of the source, which is read in turn then."""

    @property
    def schema(self) -> pa.Schema:
        """That of the source."""
        return self.source.schema

    def splits(self) -> Sequence[SourceSplit]:
        """The parts, in the order of their rows."""
        found = []
        for split in self.source.splits():
            for part in range(self.parts):
                start, stop = (split.rows * bound // self.parts for bound in (part, part + 1))
                payload = encode(_Part(split.split_id, split.payload, split.rows, start))
                found.append(SourceSplit(f"{split.split_id}, part {part}", payload, stop - start))
        return found

    def reader(self) -> SourceReader:
        """A reader of parts."""
        return _PartReader(self.source.reader())


class _PartReader:
    def __init__(self, reader: SourceReader) -> None:
        self._reader = reader

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Rows of one part."""
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
        """Nothing to release."""
        self._reader.close()
