"""`Sink`: a sink of the user's own, which commits in two phases, and so writes exactly once.

`own_sink.py` collects its rows, `hosts/task/sink_writers.py` calls the writing half, `hosts/coordinator/own_sinks.py`
the committing one. Rules for whoever writes a sink:

- What `write` gets is invisible until `commit`. `prepare` makes it durable, and returns a *committable* for it: a few
  bytes that say how to make it visible. Committables are a part of the checkpoint.
- `commit` is called for every committable of a completed checkpoint, at least once: again after a lost answer, after a
  failure, and when a job is restored from that checkpoint. So what has been committed before is left as it is.
- What is not in a completed checkpoint is never committed. Its rows come again, to a writer with another `prefix`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

COMMITTABLES_BYTES_MAX = 1 << 20
"""What one `prepare` may return: it travels through the coordinator, and into its log."""


@dataclass(frozen=True, slots=True)
class SinkContext:
    """Where a writer runs."""

    job_id: str
    job_name: str
    uid: str
    """The uid of the sink's operator."""
    subtask: int
    parallelism: int
    attempt: int
    """Counts the deployments of the job's tasks."""

    @property
    def prefix(self) -> str:
        """A name for what this writer writes, which no other one has. It begins with the id of the job."""
        return f"{self.job_id}-{self.uid}-{self.subtask}-{self.attempt}".replace("/", "-")


@dataclass(frozen=True, slots=True)
class CommitContext:
    """Which checkpoint is committed."""

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

    def open(self, context: SinkContext) -> None:
        """Called once in each subtask that has rows, before the first of them."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Take in rows that follow those before. Nobody may see them yet."""
        raise NotImplementedError(f"{type(self).__name__} needs a method write(self, batch)")

    def prepare(self) -> Iterable[bytes]:
        """A checkpoint begins: make durable what was written since the last call, and return its committables."""
        raise NotImplementedError(f"{type(self).__name__} needs a method prepare(self), which returns committables")

    def close(self) -> None:
        """Release resources. Called once, also after a failure. What was written since `prepare` may be dropped.

        What was prepared must stay: a checkpoint may have it.
        """

    def commit(self, committables: Sequence[bytes], context: CommitContext) -> None:
        """Make visible what these committables stand for, in their order. What is visible already stays as it is.

        If it raises it is called again, after growing pauses, for as long as storage may be away (`storage_outage`);
        then the job fails, and a job restored from the checkpoint commits. One call that takes so long, and a minute
        at least, fails the job, too.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method commit(self, committables, context)")

    def abort(self, job_id: str) -> None:
        """The job is over, and all that its checkpoints cover is committed: drop what else it has written.

        That is what carries a `prefix` of this job and was never committed: rows of attempts that failed. It is not
        called if the job is killed, or leaves something to commit to a job that is restored from it.
        """
