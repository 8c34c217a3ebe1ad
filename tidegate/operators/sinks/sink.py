"""`Sink` is a user-defined sink that commits in two phases, and therefore writes exactly once.

`tidegate/actors/drivers/user_sinks.py` calls the writing methods, and `tidegate/actors/drivers/user_sinks.py` calls
the committing methods. Rules for a sink:

- Rows passed to `write` are invisible until `commit`. `prepare` makes them durable and returns *committables* for them:
  a few bytes that describe how to make the rows visible. Committables are part of the checkpoint.
- `commit` is called at least once for every committable of a completed checkpoint: again after a lost answer, after a
  failure, and when a job is restored from that checkpoint. Rows that were committed before must stay unchanged.
- Rows that are not in a completed checkpoint are never committed. They come again, to a writer with another `prefix`.

`StagingSink` is the interface of all sinks to the task machine, which takes rows to write from it. `UserSinkOperator`
implements it for user-defined sinks:

- Rows wait until there are `flush_bytes` of them, or until a barrier comes, so a sink gets few and large batches.
- A barrier empties the buffer, so rows are never in a snapshot. Rows that were written since the previous barrier are
  then prepared. Without any rows nothing is prepared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from tidegate.operators.operator import Emit, Operator
from tidegate.operators.operator_errors import blame
from tidegate.operators.output_schema import PinnedSchema
from tidegate.state.kernels.partition import compact
from tidegate.storage.schemas.arrow_types import widened

COMMITTABLES_BYTES_MAX = 1 << 20
"""The most bytes that one `prepare` may return, because committables pass through the coordinator and its log."""


@dataclass(frozen=True, slots=True)
class SinkContext:
    """Place of a writer in the job."""

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
        """A unique prefix for the names of everything that this writer writes. It begins with the id of the job."""
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


@dataclass(frozen=True, slots=True)
class StagedRows:
    """Rows of one file, in batches of one schema. `folder` is relative to the folder of the attempt, or empty.

    `prepare` is set if a checkpoint begins after the rows, so that a user-defined sink returns its committables.
    """

    folder: str
    batches: tuple[pa.RecordBatch, ...]
    prepare: bool = False


class StagingSink(Operator):
    """Buffers rows until they are taken. Emits nothing."""

    def take_files(self, force: bool) -> list[StagedRows]:
        """Returns the rows to write now, one entry for each file: if they fill a file or, with `force`, if there are
        any.
        """
        raise NotImplementedError


FLUSH_BYTES = 4 << 20


class UserSinkOperator(StagingSink):
    """Collects the rows of one subtask for a `Sink`."""

    def __init__(self, flush_bytes: int = FLUSH_BYTES) -> None:
        assert flush_bytes > 0
        self._flush_bytes = flush_bytes
        self._pinned = PinnedSchema()
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0
        self._unprepared = False

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Buffers a batch. Raises OperatorError if its schema differs from the batches before."""
        with blame(self.context, batch):
            kept = compact(self._pinned.conform(widened(batch)))
        self._pending.append(kept)
        self._pending_bytes += kept.nbytes

    def take_files(self, force: bool) -> list[StagedRows]:
        """The rows that wait, as one entry; with `force` also an empty one, if rows before it are not prepared yet."""
        enough = force or self._pending_bytes >= self._flush_bytes
        if not enough or not (self._pending or self._unprepared):
            return []
        # An early batch may have a column of type null that has found its type since.
        rows = tuple(self._pinned.conform(batch) for batch in self._pending)
        self._pending, self._pending_bytes, self._unprepared = [], 0, not force
        return [StagedRows("", rows, prepare=force)]
