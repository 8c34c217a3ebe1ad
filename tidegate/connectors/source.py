"""`Source`: the contract of a source. Its splits can be read again from any position.

The state machine of a task does no I/O: it requests a read and receives the batch as an event. It stores the positions
(its splits, and the next row of each) in every checkpoint. So replay is exact only if the rows that `read` returns
depend only on its arguments.

A row number may not be enough to identify a position: offsets of Kafka have gaps, and a folder gets new files. Such a
source returns a new payload of the split with its rows (`ReadResult.payload`). The next read receives this payload, and
checkpoints store it. A split's payload then contains the whole position, and any reader can start from it.

A `MasterHook` notifies a system outside the job of checkpoints (Flink's `MasterTriggerRestoreHook`). An externally
induced source needs one: the hook requests a checkpoint, the outside system puts a mark into the data, and the source
begins the checkpoint at that mark.
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
"""Name of the list state in which a subtask of a source stores its splits, one row for each."""


PENDING_RECORDS = "pendingRecords"
"""Name of the metric for the number of unread records, over all splits of a subtask."""
PENDING_RECORDS_MAX = "pendingRecordsMax"
"""Name of the metric for the number of unread records in the split that has the most."""


@wire
@dataclass(frozen=True, slots=True)
class SourceSplit:
    """A part of the input with rows in a fixed order. `rows` is -1 if the number of rows is not known.

    A split with `rows=0` never has rows, and never delays event time. It may find other splits.
    """

    split_id: str
    payload: bytes
    rows: int = -1


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The result of a read: rows `[offset, next_offset)` of a split. `at_end`: the split ends here. `batch` is None
    without rows.

    A result without a batch that is not at the end means that no rows are available yet. Then the task tries the next
    split of an unbounded source. When no split has rows it pauses for 1 to 100 ms. `induces`: the checkpoint that an
    externally induced source begins right after these rows.

    `payload`: payload of the split from `next_offset` on; None if it does not change. `found`: additional splits that
    this subtask reads from now on; only for an unbounded source. A split must be found only once in a job: the split
    that finds others stores them in its payload.

    `bad`: dead letters, the records among these rows that cannot be read (`bad_rows.py`). They are included in
    `next_offset`. `lost`: number of records that were skipped because they had been deleted before they could be read.
    They have no row numbers.

    `behind`: number of records of the split after these rows that exist already, for a metric; None if unknown.

    `skipped`: number of rows up to `next_offset` that are not in the batch, because the filter of a `FilterableSource`
    drops them.
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
    behind: int | None = None

    def is_empty(self, offset: int) -> bool:
        """Returns whether a read from `offset` on returned no rows and no other information."""
        has_news = self.at_end or self.found or self.induces is not None or self.payload is not None
        return self.next_offset == offset and not has_news


class SourceReader(Protocol):
    """Reads the splits of one subtask. Called from one thread at a time."""

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Reads up to `rows_max` rows from row `offset` on. The same arguments must always return the same rows."""
        ...

    def close(self) -> None:
        """Releases files and connections."""
        ...


class Source(Protocol):
    """A replayable input of a job. Must be picklable by cloudpickle.

    A subtask reads its splits one after the other, each to its end. The coordinator assigns them while the job runs, in
    their order, unless it is a `StaticSource`. Splits that never end need an `UnboundedSource`.
    """

    @property
    def schema(self) -> pa.Schema:
        """Returns the schema of every batch of the source."""
        ...

    def splits(self) -> Sequence[SourceSplit]:
        """Returns all splits, in a fixed order. Called once, when the job is submitted."""
        ...

    def reader(self) -> SourceReader:
        """Returns a reader for one subtask."""
        ...


@runtime_checkable
class ExternallyInducedSource(Protocol):
    """A source that decides after which row a checkpoint begins (Flink's ExternallyInducedSource).

    The coordinator's trigger does not start a checkpoint at such a source. A master hook notifies the outside system of
    the checkpoint, and the reader returns `ReadResult.induces`. Savepoints are triggered as for any source.
    """

    externally_induced: Literal[True]


@runtime_checkable
class UnboundedSource(Protocol):
    """A source with splits that never end, such as partitions. A subtask reads from its splits round-robin."""

    unbounded: Literal[True]


@runtime_checkable
class EndingSource(Protocol):
    """A source whose splits are read round-robin like those in an unbounded source, but which may end."""

    @property
    def ends(self) -> bool:
        """Returns True if the source has an end."""
        ...


@runtime_checkable
class DynamicSource(Protocol):
    """A source whose list of splits differs between submissions, because splits advance or new ones appear.

    A restored job continues in the splits of its checkpoint. The restore calls `check_restored` with them, and does not
    call `splits()`.
    """

    def check_restored(self, splits: Sequence[SourceSplit]) -> None:
        """Raises ConfigurationError if this source cannot continue in the splits of a checkpoint, for example because a
        setting changed.
        """
        ...


@runtime_checkable
class LastingInputSource(Protocol):
    """A source that can check, before a job is restored, whether its unread input still exists unchanged."""

    def check_unread(self, splits: Sequence[SourceSplit]) -> None:
        """Raises ConfigurationError if one of these splits can no longer be read, and StorageError."""
        ...


@runtime_checkable
class ProjectableSource(Protocol):
    """A source that can skip columns. Projecting it changes neither its splits nor their row numbers."""

    def projected(self, columns: Sequence[str]) -> Source:
        """Returns a copy of the source that reads only these columns, in the order of its schema."""
        ...


@runtime_checkable
class FilterableSource(Protocol):
    """A source that can skip rows. Filtering it changes neither its splits nor their row numbers."""

    def filtered(self, rows: Rows) -> Source:
        """Returns a copy of the source that may skip rows which do not match the filter `rows`, and counts them
        (`skipped`).
        """
        ...


@runtime_checkable
class DeadLetterSource(Protocol):
    """A source whose readers return dead letters (`ReadResult.bad`), which a program may read as a stream."""

    @property
    def bad_rows_schema(self) -> pa.Schema | None:
        """Returns the schema of dead letters, or None if they are only counted and logged."""
        ...


@runtime_checkable
class NotifiedSource(Protocol):
    """A source whose readers may be notified of completed checkpoints (`NotifiedReader`)."""

    @property
    def notified(self) -> bool:
        """Returns True if the readers of this source request notifications."""
        ...


@runtime_checkable
class NotifiedReader(Protocol):
    """A reader that reports the positions of completed checkpoints to an outside system, such as offsets of a consumer
    group.

    Notifications may be missing or late.
    """

    def checkpoint_completed(self, splits: Sequence[SourceSplit]) -> None:
        """Receives the splits of the subtask as they are in a completed checkpoint. Must not block.

        Called between two reads, by the same thread, and once more before `close`.
        """
        ...


@runtime_checkable
class StaticSource(Protocol):
    """A bounded source whose splits are assigned before the job starts: split i to subtask i modulo parallelism.

    Otherwise a subtask receives its next split on request, and a fast subtask reads more splits.
    """

    static_splits: Literal[True]


@runtime_checkable
class TwoPartSource(Protocol):
    """An unbounded source with a bounded first part: the second part begins when the first part was read completely.

    The coordinator assigns the splits of the first part on request, as for a bounded source. It assigns the splits of
    the second part once every subtask has processed all of its first part. The splits of the second part are then read
    round-robin.
    """

    def is_second(self, split: SourceSplit) -> bool:
        """Returns whether a split belongs to the second part. Splits that a reader finds belong to the second part."""
        ...


def is_assignable(source: Source) -> bool:
    """Returns whether the coordinator may assign the splits of this source while the job runs."""
    if isinstance(source, TwoPartSource):
        return True
    if is_unbounded(source) or isinstance(source, ExternallyInducedSource):
        return False
    return not (isinstance(source, StaticSource) and source.static_splits)


def is_unbounded(source: Source) -> bool:
    """Returns whether subtasks read the splits of this source round-robin (the source implements `UnboundedSource`)."""
    return isinstance(source, UnboundedSource) and source.unbounded


def never_ends(source: Source) -> bool:
    """Returns whether a job that reads this source runs until it is stopped."""
    return is_unbounded(source) and not (isinstance(source, EndingSource) and source.ends)


@runtime_checkable
class MasterHook(Protocol):
    """A hook that the coordinator calls at each checkpoint, one checkpoint at a time. It is pickled with the job.

    A call may be repeated, and a checkpoint may fail after its trigger. The outside system must handle both.
    """

    @property
    def identifier(self) -> str:
        """Returns the key of the hook's data in a checkpoint: unique in the job, and the same in every run."""
        ...

    def trigger(self, checkpoint_id: CheckpointId, timestamp_ms: int) -> bytes | None:
        """Notifies the outside system that a checkpoint begins, before any task starts it. Returns the data to store
        with the checkpoint.

        `timestamp_ms` is when the checkpoint began, in ms since 1970. Any error fails the checkpoint.
        """
        ...

    def restore(self, checkpoint_id: CheckpointId, data: bytes | None) -> None:
        """Notifies the outside system that an attempt starts from a checkpoint. `data` is the result of `trigger` for
        that checkpoint.

        After an exception the call is repeated a bounded number of times. Then the attempt fails.
        """
        ...
