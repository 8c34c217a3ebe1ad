"""`Sink`: a sink of the user's own, which commits in two phases, and so writes exactly once.

`sink.py` collects its rows, `hosts/task/sink_writers.py` calls the writing half, `hosts/coordinator/own_sinks.py`
the committing one. Rules for whoever writes a sink:

- What `write` gets is invisible until `commit`. `prepare` makes it durable, and returns a *committable* for it: a few
  bytes that say how to make it visible. Committables are a part of the checkpoint.
- `commit` is called for every committable of a completed checkpoint, at least once: again after a lost answer, after a
  failure, and when a job is restored from that checkpoint. So what has been committed before is left as it is.
- What is not in a completed checkpoint is never committed. Its rows come again, to a writer with another `prefix`.

### MERGE
`StagingSink`: what the task machine asks of any sink: what is to be written now, and whether a checkpoint begins.

### MERGE
`OwnSink`: decides when the rows for a sink of the user's are written, and when it prepares. The host calls the sink.

Rules:

- Rows wait until there are `flush_bytes` of them, or a barrier comes. So a sink gets few and large batches.
- A barrier empties the buffer, so rows are never in a snapshot. What was written since the barrier before is prepared
  then; without any there is nothing to prepare.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from tidegate.operators.operator import Emit, Operator
from tidegate.operators.operator_errors import blame
from tidegate.operators.output_schema import PinnedSchema
from tidegate.state.kernels.partition import compact
from tidegate.storage.schemas.dictionaries import widened

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


@dataclass(frozen=True, slots=True)
class StagedRows:
    """The rows of one file, in batches of one schema. `folder`: below the folder of the attempt; empty for none.

    `prepare`: a checkpoint begins after them, so a sink of the user's says what is to be committed.
    """

    folder: str
    batches: tuple[pa.RecordBatch, ...]
    prepare: bool = False


class StagingSink(Operator):
    """Buffers rows until they are taken. Emits nothing."""

    def take_files(self, force: bool) -> list[StagedRows]:
        """What to write now, one entry for each file: if there is enough for one or, with `force`, if there is any."""
        raise NotImplementedError


FLUSH_BYTES = 4 << 20


class OwnSink(StagingSink):
    """Collects the rows of one subtask for a `Sink`."""

    def __init__(self, flush_bytes: int = FLUSH_BYTES) -> None:
        assert flush_bytes > 0
        self._flush_bytes = flush_bytes
        self._pinned = PinnedSchema()
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0
        self._unprepared = False

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Keep a batch until it is taken. OperatorError if its schema is not that of the batches before."""
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
