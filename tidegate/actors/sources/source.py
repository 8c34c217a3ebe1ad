"""`Source`: the contract of a source, whose splits can be read again from any row offset.

A source does I/O, so the machine never calls it: the machine asks the runtime to read, and gets a batch back as an
event. The position (which splits, which row of each) is the machine's, is stored in every checkpoint, and is what
makes replay exact. `read` must therefore be a function of its arguments alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import pyarrow as pa

from tidegate.storage.codec import wire
from tidegate.storage.ids import CheckpointId


@wire
@dataclass(frozen=True, slots=True)
class SourceSplit:
    """A part of the input with rows in a fixed order. `rows` is -1 where the length is not known."""

    split_id: str
    payload: bytes
    rows: int = -1


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Rows `[offset, next_offset)` of a split. `batch` is None when there was nothing; `at_end` after the last row.

    Nothing, and not at the end: there is nothing at the moment. The task asks the next split, where the source is
    unbounded, and asks again after a pause of 1 to 100 ms when no split has anything.

    `induces`: an externally induced source wants this checkpoint to begin right after these rows.
    """

    batch: pa.RecordBatch | None
    next_offset: int
    at_end: bool
    induces: CheckpointId | None = None


class SourceReader(Protocol):
    """Reads splits; one reader a subtask, called from one thread at a time."""

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Read up to `rows_max` rows from row `offset` on. The same arguments give the same rows, always."""
        ...

    def close(self) -> None:
        """Release files."""
        ...


class Source(Protocol):
    """A replayable input. Must be picklable by cloudpickle.

    Its splits are read one after the other to their end. One that never ends is an `UnboundedSource`.
    """

    @property
    def schema(self) -> pa.Schema:
        """Schema of every batch."""
        ...

    def splits(self) -> Sequence[SourceSplit]:
        """All splits, in a fixed order. Asked once, when the job is submitted."""
        ...

    def reader(self) -> SourceReader:
        """A reader for one subtask."""
        ...


@runtime_checkable
class ExternallyInducedSource(Protocol):
    """A source that decides itself where in its rows a checkpoint begins (Flink's ExternallyInducedSource).

    The coordinator's trigger starts nothing at such a source; a master hook tells the outside world of the checkpoint,
    and the reader answers with `ReadResult.induces`. Savepoints are triggered as everywhere.
    """

    externally_induced: Literal[True]


@runtime_checkable
class UnboundedSource(Protocol):
    """A source whose splits go on (partitions, lanes of a log): a subtask reads its own in turn, a batch of each."""

    unbounded: Literal[True]


def is_unbounded(source: Source) -> bool:
    """Whether the splits of a source are read in turn."""
    return isinstance(source, UnboundedSource) and source.unbounded
