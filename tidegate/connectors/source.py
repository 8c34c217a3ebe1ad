"""`Source`: the contract of a source. Its splits can be read again from any position.

Reading is I/O, so the task's machine never does it: the machine asks for a read, and gets the batch as an event. The
machine keeps the positions (its splits, and the next row of each) and stores them in every checkpoint. So replay is
exact only if the rows that `read` returns depend on its arguments alone.

The number of the next row may not say where a source is: offsets of Kafka have gaps, and a folder has new files. Such a
source gives a new payload of the split with its rows (`ReadResult.payload`). The next read gets it, and checkpoints
have it. All that is known of a split then travels in its payload, and a reader can start from any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import pyarrow as pa

from tidegate.connectors.pushed_filters import Rows
from tidegate.storage.codec import wire
from tidegate.storage.ids import CheckpointId

SOURCE_STATE = "splits"
"""The list state in which a subtask of a source keeps its splits, one row each."""


@wire
@dataclass(frozen=True, slots=True)
class SourceSplit:
    """A part of the input with rows in a fixed order. `rows` is -1 if the length is not known.

    With `rows=0` it never has rows, and never holds event time back. It may find other splits.
    """

    split_id: str
    payload: bytes
    rows: int = -1


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Rows `[offset, next_offset)` of a split. `at_end`: no rows follow. `batch` is None if there were none.

    No batch and not at the end means that nothing is there yet. Then the task tries the next split of an unbounded
    source. When no split has anything it pauses for 1 to 100 ms. `induces`: an externally induced source wants this
    checkpoint to begin right after these rows.

    `payload`: that of the split from `next_offset` on; None if it stays as it is. `found`: splits that this subtask
    reads from now on, besides its others; only of an unbounded source. A split must be found once in a job: the split
    that finds others remembers them in its payload.

    `bad`: dead letters, the records among these rows that are no rows (`bad_rows.py`). They count as read.

    `lost`: so many records were passed over, because they had been deleted before they could be read. They have no
    numbers among the rows.

    `skipped`: so many rows up to `next_offset` are not in the batch, because the filter of a `FilterableSource` drops
    them. They count as read.
    """

    batch: pa.RecordBatch | None
    next_offset: int
    at_end: bool
    induces: CheckpointId | None = None
    payload: bytes | None = None
    found: tuple[SourceSplit, ...] = ()
    skipped: int = 0
    bad: pa.RecordBatch | None = None
    lost: int = 0

    def says_nothing(self, offset: int) -> bool:
        """Whether, asked for rows from `offset` on, the split has nothing at the moment, and nothing else to tell."""
        told = self.at_end or self.found or self.induces is not None or self.payload is not None
        return self.next_offset == offset and not told


class SourceReader(Protocol):
    """Reads the splits of one subtask. Called from one thread at a time."""

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Up to `rows_max` rows from row `offset` on. The same arguments must always give the same rows."""
        ...

    def close(self) -> None:
        """Release files."""
        ...


class Source(Protocol):
    """A replayable input. Must be picklable by cloudpickle.

    A subtask reads its splits one after the other, each to its end. The coordinator assigns them while the job runs, in
    their order, unless it is a `StaticSource`. Splits that never end need an `UnboundedSource`.
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
    """A source that decides after which row a checkpoint begins (Flink's ExternallyInducedSource).

    The coordinator's trigger starts nothing at such a source. A master hook tells the outside system of the checkpoint,
    and the reader answers with `ReadResult.induces`. Savepoints are triggered as for any source.
    """

    externally_induced: Literal[True]


@runtime_checkable
class UnboundedSource(Protocol):
    """A source whose splits never end, such as partitions. A subtask reads its splits in turn, a batch of each."""

    unbounded: Literal[True]


@runtime_checkable
class EndingSource(Protocol):
    """A source whose splits are read in turn, and that may come to an end all the same."""

    @property
    def ends(self) -> bool:
        """Whether it ends by itself."""
        ...


@runtime_checkable
class DynamicSource(Protocol):
    """A source whose splits are not the same at each submission: they move on, or others are found.

    A restored job goes on in the splits of its checkpoint, whatever `splits()` says now.
    """

    def check_restored(self, splits: Sequence[SourceSplit]) -> None:
        """Raise ConfigurationError if this source cannot go on in the splits that a checkpoint has."""
        ...


@runtime_checkable
class LastingInputSource(Protocol):
    """A source that can say, before a job is restored, whether what it has still to read is as it was."""

    def check_unread(self, splits: Sequence[SourceSplit]) -> None:
        """Raise ConfigurationError if one of these cannot be read any more, and StorageError."""
        ...


@runtime_checkable
class ProjectableSource(Protocol):
    """A source that need not read all of its columns. Splits, and the numbers of their rows, stay what they are."""

    def projected(self, columns: Sequence[str]) -> Source:
        """The same source with these columns only, which it has, in the order of its schema."""
        ...


@runtime_checkable
class FilterableSource(Protocol):
    """A source that need not read all of its rows. Splits, and the numbers of their rows, stay what they are."""

    def filtered(self, rows: Rows) -> Source:
        """The same source, which may leave out rows that are not in `rows`, and says how many (`skipped`)."""
        ...


@runtime_checkable
class DeadLetterSource(Protocol):
    """A source whose readers give dead letters (`ReadResult.bad`), which a program may read as a stream."""

    @property
    def bad_rows_schema(self) -> pa.Schema | None:
        """The columns of dead letters; None if they are only counted and logged."""
        ...


@runtime_checkable
class StaticSource(Protocol):
    """A bounded source whose splits are dealt out before the job starts: split i to subtask i modulo the parallelism.

    Without that a subtask gets its next split when it asks for it, and a fast one reads more of them.
    """

    static_splits: Literal[True]


def is_assignable(source: Source) -> bool:
    """Whether the coordinator may assign the splits of this source while the job runs."""
    if is_unbounded(source) or isinstance(source, ExternallyInducedSource):
        return False
    return not (isinstance(source, StaticSource) and source.static_splits)


def is_unbounded(source: Source) -> bool:
    """Whether subtasks read the splits of this source in turn."""
    return isinstance(source, UnboundedSource) and source.unbounded


def never_ends(source: Source) -> bool:
    """Whether a job that reads this source has no end of its own."""
    return is_unbounded(source) and not (isinstance(source, EndingSource) and source.ends)
