"""`CommittingSink` is the interface of sinks that commit in their tasks, and therefore write rows exactly once.

A `tg.Sink` commits in the coordinator, in one call for all subtasks. That suits a manifest or a rename. A committing
sink suits rows: each subtask commits the rows that it has prepared itself, as Flink's committer does. Rules for a sink:

- Rows passed to `CommittingWriter.write` are invisible until they are committed. `CommittingWriter.prepare` makes them
  durable and returns *committables* for them, a few bytes each. Committables are part of the checkpoint.
- After the checkpoint completed, the subtask calls `Committer.commit` with a `CommitToken`, once for each `prepare`, in
  their order. The call is repeated until it returns, also after a restart: at least once for each token. If several
  checkpoints are due, a committer may commit them in one transaction (`Committer.commit_all`).
- A commit must therefore store the token of each bucket in the same transaction as the rows. A bucket with that token,
  or a later one of the same job, is committed already, and is skipped. Tokens of other jobs do not count.
- A *bucket* belongs to one subtask at a time. Committables keep their buckets when the parallelism changes, and the
  subtask that owns a bucket after a restore commits its rows.
- Two calls for one bucket can overlap only if the earlier subtask was lost and still runs (a zombie). The system must
  let at most one of them store the token, for example by a lock of the bucket's row or a fixed transactional id.

A sink may write files to checkpoint storage (`SinkFiles`). They are deleted when no retained checkpoint refers to them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

DEFAULT_BUCKETS = 128
BUCKETS_MAX = 1 << 15
PENDING_COMMITS = "pendingCommits"
"""Name of the metric that counts completed checkpoints whose rows a subtask has not committed yet."""


@dataclass(frozen=True, slots=True)
class Committable:
    """Describes prepared rows of one bucket, with the data that a commit needs to make the rows visible.

    - `bucket`: one of the subtask's own (`CommittingContext.buckets`).
    - `data`: a few bytes, for example the name of a staged table, or counts. The rows themselves do not belong here.
    - `files`: paths that `SinkFiles.write` returned. They exist as long as a checkpoint with this committable does.
    """

    bucket: int
    data: bytes
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CommitToken:
    """Identifies one `prepare` of a job: the checkpoint that it belonged to. A commit stores it for each bucket.

    Within a job tokens are ordered. A sink stores the newest token for each sink, job and bucket.

    >>> from tidegate import CommitToken
    >>> CommitToken("orders-1", 7).is_covered_by(CommitToken("orders-1", 9))
    True
    >>> CommitToken("orders-1", 7).is_covered_by(CommitToken("orders-2", 9))
    False
    """

    job_id: str
    """The job that prepared the rows: the running one, or the one that it was restored from."""
    checkpoint_id: int

    def is_covered_by(self, stored: CommitToken | None) -> bool:
        """Returns whether a stored token of the same bucket shows that these rows are committed already."""
        return stored is not None and stored.job_id == self.job_id and stored.checkpoint_id >= self.checkpoint_id


class SinkFiles(Protocol):
    """Files of one sink in checkpoint storage. Thread-safe. Every method raises StorageError for a storage fault."""

    def write(self, chunks: Iterable[bytes | memoryview]) -> str:
        """Writes a new file, which appears complete or not at all. Returns its path, for `Committable.files`.

        `chunks` are the parts of its content, in their order.
        """
        ...

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Returns the bytes of a file, or `length` bytes of it (None: the rest) from byte `offset` on.

        `path` is a path that `write` returned. Raises StorageError if there is no such file.
        """
        ...


@dataclass(frozen=True, slots=True)
class CommittingContext:
    """The position of one subtask of a committing sink in the job, and the services that it may use."""

    job_id: str
    job_name: str
    uid: str
    """The uid of the sink's step."""
    name: str
    subtask: int
    parallelism: int
    attempt: int
    """Number of the attempt. Each deployment of the job's tasks increases it."""
    buckets: range
    """The buckets of this subtask, at least one. A sink may use any of them, and need not use them all."""
    files: SinkFiles

    @property
    def prefix(self) -> str:
        """Returns a unique prefix for the names of all objects that this writer creates.

        It begins with the id of the job.
        """
        return f"{self.job_id}-{self.uid}-{self.subtask}-{self.attempt}".replace("/", "-")


class CommittingWriter(ABC):
    """Writes the rows of one subtask of a committing sink. Calls come one at a time, from changing threads."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Writes rows, which follow the rows of earlier calls. They must stay invisible until they are committed.

        An exception here or in `prepare` fails the task, and the job restarts by its restart strategy.
        """

    @abstractmethod
    def prepare(self, checkpoint_id: int) -> Sequence[Committable]:
        """Makes the rows since the last call durable, and returns their committables. Called when a checkpoint begins,
        if there are such rows.

        The machine may be lost right after the call: what a commit needs must be in the committables, or in a place
        that outlives this process.
        """

    def close(self) -> None:
        """Releases resources. Called once, also after a failure. Prepared rows must stay."""
        return


class Committer(ABC):
    """Commits rows that one subtask has prepared, or that it has taken over from another subtask.

    Calls come one at a time.
    """

    @abstractmethod
    def commit(self, token: CommitToken, committables: Sequence[Committable]) -> None:
        """Makes the rows of these committables visible, and skips rows that are visible already. Called after their
        checkpoint completed.

        `committables` come from one checkpoint: all buckets, in the order in which `prepare` returned them. After an
        exception the call is repeated with growing pauses, for up to `storage_outage`. Then the task fails, and its
        successor commits. A ConfigurationError and a CorruptionError are not retried.
        """

    def commit_all(self, prepared: Sequence[tuple[CommitToken, Sequence[Committable]]]) -> None:
        """Commits the rows of one or more checkpoints, oldest first. Calls `commit` for each of them.

        A subtask that is behind has several. A committer with expensive transactions overrides this method, and commits
        them in one. Such a transaction stores the newest token of each bucket, which covers the earlier ones.
        After an exception the whole call is repeated, maybe together with later checkpoints.
        """
        for token, committables in prepared:
            self.commit(token, committables)

    def close(self) -> None:
        """Releases resources. Called once, also after a failure."""
        return


class CommittingSink(ABC):
    """Writes exactly once to a system that the user integrates, with one commit for each subtask. Pass an object to
    `to_sink`.

    The object is pickled and copied to the tasks. Each subtask opens its own writer, and a committer as soon as there
    are rows to commit.

    >>> import tidegate as tg
    >>> VISIBLE, TOKENS = [], {}
    >>> class Printed(tg.CommittingSink):
    ...     def open_writer(self, context):
    ...         return Writer(context.buckets[0])
    ...
    ...     def open_committer(self, context):
    ...         return Visible()
    >>> class Writer(tg.CommittingWriter):
    ...     def __init__(self, bucket):
    ...         self.bucket, self.rows = bucket, b""
    ...
    ...     def write(self, batch):
    ...         self.rows += b"".join(b"%d " % k for k in batch["k"].to_pylist())
    ...
    ...     def prepare(self, checkpoint_id):
    ...         rows, self.rows = self.rows, b""
    ...         return [tg.Committable(self.bucket, rows)]
    >>> class Visible(tg.Committer):
    ...     def commit(self, token, committables):
    ...         for each in committables:
    ...             key = token.job_id, each.bucket
    ...             if TOKENS.get(key, 0) < token.checkpoint_id:  # one transaction in a real system
    ...                 VISIBLE.append(each.data)
    ...                 TOKENS[key] = token.checkpoint_id
    """

    buckets: int = DEFAULT_BUCKETS
    """Number of buckets, fixed for the life of the sink. The parallelism of the step can be at most this."""

    accepts_changes: bool = False
    """True if batches may have the column `row_kind`, and the sink retracts rows. `to_sink` then needs `keys`."""

    def check(self) -> None:
        """Checks the sink's settings. Called in the program that submits a job, before anything starts.

        Raise ConfigurationError if the system cannot take the rows. Attributes that are set here travel to the tasks.
        """
        return

    @abstractmethod
    def open_writer(self, context: CommittingContext) -> CommittingWriter:
        """Returns the writer of one subtask. Called once in each subtask that has rows, before the first of them."""

    @abstractmethod
    def open_committer(self, context: CommittingContext) -> Committer:
        """Returns the committer of one subtask. Called before the subtask's first commit, and again after a restart."""
