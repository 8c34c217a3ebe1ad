"""`TricklingSource`: a source whose splits have nothing at the moment, now and then, and are read in turn.

Rules: when that is so is a function of split and offset, so that a seed stands for one run. What is read is what the
source has, in the end also its end: a job over it writes what it writes without.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from tidegate.connectors.source import ReadResult, Source, SourceReader, SourceSplit

_OFTEN = 3
"""Of so many places in a split there is one at which rows are late."""


@dataclass(frozen=True, slots=True)
class TricklingSource:
    """What another source has, in turn and with pauses."""

    source: Source
    times_max: int = 9
    """How often at most a split has nothing at such a place."""
    unbounded: Literal[True] = True

    @property
    def schema(self) -> pa.Schema:
        """That of the source."""
        return self.source.schema

    def splits(self) -> Sequence[SourceSplit]:
        """Those of the source."""
        return self.source.splits()

    def reader(self) -> SourceReader:
        """A reader that has nothing now and then."""
        return _TricklingReader(self.source.reader(), self.times_max)


class _TricklingReader:
    def __init__(self, reader: SourceReader, times_max: int) -> None:
        self._reader = reader
        self._times_max = times_max
        self._missed: dict[tuple[str, int], int] = {}

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Nothing for a few times, at some places; then the rows."""
        place = split.split_id, offset
        chance = zlib.crc32(repr(place).encode())
        missed = self._missed.get(place, 0)
        if chance % _OFTEN == 0 and missed < 1 + chance // _OFTEN % self._times_max:
            self._missed[place] = missed + 1
            return ReadResult(None, offset, at_end=False)
        return self._reader.read(split, offset, rows_max)

    def close(self) -> None:
        """Nothing to release."""
        self._reader.close()
