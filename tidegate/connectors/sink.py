"""`Sink` is the contract of sinks that commit in the coordinator, in two phases, and therefore write exactly once.

`tidegate/actors/drivers/user_sinks.py` calls the writing methods in the tasks, and the committing methods in the
coordinator. Sinks that commit in their tasks are in `committing_sink.py`. Rules for a sink:

- Rows passed to `write` are invisible until `commit`. `prepare` makes them durable and returns *committables* for them:
  a few bytes that describe how to make the rows visible. Committables are part of the checkpoint.
- `commit` is called at least once for every committable of a completed checkpoint: again after a lost answer, after a
  failure, and when a job is restored from that checkpoint. Rows that were committed before must stay unchanged.
- Rows that are not in a completed checkpoint are never committed. They come again, to a writer with another `prefix`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

COMMITTABLES_BYTES_MAX = 1 << 20
"""The most bytes that one `prepare` may return, because committables pass through the coordinator and its log."""


@dataclass(frozen=True, slots=True)
class SinkContext:
    """Place of a writer in the job."""

    job_id: str
    job_name: str
    uid: str
    """Number of the attempt. Each deployment of the job's tasks increases it."""
    subtask: int
    parallelism: int
    attempt: int
    """Counts the deployments of the job's tasks."""

    @property
    def prefix(self) -> str:
        """Returns a unique prefix for the names of everything that this writer writes. It begins with the id of the
        job.
        """
        return f"{self.job_id}-{self.uid}-{self.subtask}-{self.attempt}".replace("/", "-")


@dataclass(frozen=True, slots=True)
class CommitContext:
    """The checkpoint whose rows are committed."""

    job_id: str
    """The job that completed it: the one that runs, or the one that it was restored from."""
    checkpoint_id: int
    uid: str
    """The uid of the sink's operator."""


class Sink:
    """Writes rows to a system of the user's, exactly once. Derive from it, and give `to_sink` an object.

    It travels to the tasks with the program, and is copied: every subtask has a writer to itself (`open`, `write`,
    `prepare`, `close`), and the coordinator a committer (`commit`, `abort`), which is never opened. All calls of one
    copy come from one thread at a time.
    """

    def check(self) -> None:
        """Called when a job is submitted, in the program that submits it, before anything starts.

        Raise ConfigurationError if the system cannot take the rows. Attributes that are set here travel to the tasks.
        """

    def open(self, context: SinkContext) -> None:
        """Called once in each subtask that has rows, before the first of them."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Writes rows, which follow the rows of earlier calls. They must stay invisible until `commit`."""
        raise NotImplementedError(f"{type(self).__name__} needs a method write(self, batch)")

    def prepare(self) -> Iterable[bytes]:
        """Called when a checkpoint begins: make the rows since the last call durable, and return their committables."""
        raise NotImplementedError(f"{type(self).__name__} needs a method prepare(self), which returns committables")

    def close(self) -> None:
        """Releases resources. Called once, also after a failure. Rows that were written since `prepare` may be dropped.

        Prepared rows must stay, because they may be in a checkpoint.
        """

    def commit(self, committables: Sequence[bytes], context: CommitContext) -> None:
        """Makes the rows of these committables visible, in their order. Rows that are already visible stay unchanged.

        After an exception it is called again, with growing pauses, for as long as storage may be unavailable
        (`storage_outage`). Then the job fails, and a job that is restored from the checkpoint commits. A single call
        that takes this long, and at least a minute, also fails the job.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method commit(self, committables, context)")

    def abort(self, job_id: str) -> None:
        """Called when the job has ended and its checkpoints are committed: drop its uncommitted rows.

        These are rows of failed attempts, which have a `prefix` of this job. It is not called if the job is killed, or
        if a job that is restored from it still has to commit rows.
        """
