"""`Sink` is the contract of sinks that commit in the coordinator, in two phases, and therefore write exactly once.

`tidegate/actors/drivers/user_sinks.py` calls the writing methods in the tasks, and the committing methods in the
coordinator. Sinks that commit in their tasks are in `committing_sink.py`. Rules for a sink:

- Rows passed to `write` are invisible until `commit`. `prepare` makes them durable and returns *committables* for them:
  a few bytes that describe how to make the rows visible. Committables are part of the checkpoint.
- `commit` is called at least once for every committable of a completed checkpoint. It is called again after a failure,
  and when a job is restored from that checkpoint. Rows that were committed before must then stay unchanged.
- Rows that are not in a completed checkpoint are never committed. They are written again, to a writer with another
  `prefix`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

COMMITTABLES_BYTES_MAX = 1 << 20
"""Maximum total bytes that one `prepare` may return, because committables pass through the coordinator and its log."""


@dataclass(frozen=True, slots=True)
class SinkContext:
    """The position of a sink's writer in the job."""

    job_id: str
    job_name: str
    uid: str
    """The uid of the sink's step."""
    subtask: int
    parallelism: int
    attempt: int
    """Number of the attempt. Each deployment of the job's tasks increases it."""

    @property
    def prefix(self) -> str:
        """Returns a unique prefix for the names of all objects that this writer creates.

        It begins with the id of the job.
        """
        return f"{self.job_id}-{self.uid}-{self.subtask}-{self.attempt}".replace("/", "-")


@dataclass(frozen=True, slots=True)
class CommitContext:
    """Identifies the checkpoint whose rows a sink commits."""

    job_id: str
    """The job that completed the checkpoint: the running job, or an earlier job from which it was restored."""
    checkpoint_id: int
    uid: str
    """The uid of the sink's operator."""


class Sink:
    """Base class of sinks that write exactly once to a system that the user integrates. Pass an object of a subclass to
    `to_sink`.

    The object is pickled and copied: every subtask has one copy as its writer (`open`, `write`, `prepare`, `close`),
    and the coordinator has one as committer (`commit`, `abort`), which is never opened. All calls of one copy come from
    one thread at a time.
    """

    def check(self) -> None:
        """Checks the sink's settings. Called in the program that submits a job, before anything starts.

        Raise ConfigurationError if the system cannot take the rows. Attributes that are set here travel to the tasks.
        """

    def open(self, context: SinkContext) -> None:
        """Prepares a subtask's writer, whose position in the job `context` has. Called once in each subtask that has
        rows, before the first row.
        """

    def write(self, batch: pa.RecordBatch) -> None:
        """Writes the rows of `batch`, which follow the rows of earlier calls. They stay invisible until `commit`."""
        raise NotImplementedError(f"{type(self).__name__} needs a method write(self, batch); define it")

    def prepare(self) -> Iterable[bytes]:
        """Makes the rows since the last call durable, and returns their committables.

        Called when a checkpoint begins.
        """
        raise NotImplementedError(
            f"{type(self).__name__} needs a method prepare(self), which returns committables; define it"
        )

    def close(self) -> None:
        """Releases resources. Called once, also after a failure. Rows that were written since `prepare` may be dropped.

        Prepared rows must stay, because they may be in a checkpoint.
        """

    def commit(self, committables: Sequence[bytes], context: CommitContext) -> None:
        """Makes the rows of these committables visible, in their order. Rows that are already visible stay unchanged.

        After an exception it is called again, with growing pauses, for as long as storage may be unavailable
        (`storage_outage`). Then the job fails, and a job that is restored from the checkpoint commits. A single call
        that takes this long, and at least a minute, also fails the job. ConfigurationError and TableError fail it at
        once.
        """
        raise NotImplementedError(
            f"{type(self).__name__} needs a method commit(self, committables, context); define it"
        )

    def abort(self, job_id: str) -> None:
        """Deletes uncommitted rows of the job. Called when the job has ended and its checkpoints are committed.

        These are rows of failed attempts, which have a `prefix` of this job. It is not called if the job is killed, or
        if a job that is restored from it still has to commit rows.
        """
