"""`JobSpec`: the description of a job for its coordinator, and constants that the machines and their drivers share.

The event `JobSubmitted` brings the `JobSpec` into the event log. `pause_ms` gives the pauses between retries, for the
machine and for the drivers of coordinator and tasks. `drawn` and `draw_fraction` give pseudo-random numbers that follow
from the seed in the event log, so that a replay gets the same numbers.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tidegate.protocol.identity import TaskId
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.checkpoints.layout import CheckpointPointer
from tidegate.storage.checkpoints.metadata import OperatorInfo, StoredSplit, TableHead
from tidegate.storage.codec import wire
from tidegate.storage.ids import CheckpointId, JobId, OperatorUid, VertexId

STORAGE_OUTAGE_MS = 600_000
"""Default time in ms for which a job continues to run while storage does not answer."""
FIRST_PAUSE_MS = 200
"""Pause in ms before the first retry of a failed operation on storage."""
PAUSE_MS_MAX = 10_000


def pause_ms(first_ms: int, failures: int) -> int:
    """Returns the pause in ms before a retry, after `failures` consecutive failures.

    It starts with `first_ms` and doubles with each failure, up to `PAUSE_MS_MAX`.
    """
    return min(first_ms << min(failures - 1, 32), max(first_ms, PAUSE_MS_MAX))


ADOPTION_TIMEOUT_MS = 60_000
"""Time in ms for which a new coordinator waits for the answers of running tasks.

It is longer than the default of `heartbeat.timeout`, after which a hung process is killed anyway.
"""
DEPLOY_TIMEOUT_MS = 600_000
"""Default time limit in ms for a deployment. It is longer than the default of `slot.request.timeout`, because functions
that load a large model when they open need minutes.
"""
COPIES_TIMEOUT_MS = 2_000
"""Time in ms for which the end of a job waits for copies of savepoints to be stopped and deleted, after all other
work.
"""
REMINDER_MS = 500
"""Pause in ms before tasks are notified again that the job's last checkpoint is complete. It grows with each
repetition.
"""
REMINDERS_MAX = 16
"""Number of these notifications, in about two minutes, after which all tasks start again only to commit."""
ENDING_TIMEOUT_MS = 120_000
"""Time in ms for which the end of a job waits for its tasks to finish."""


@wire
class Retention(enum.Enum):
    """Which checkpoints are kept when a job fails or is cancelled (Flink's `CheckpointRetentionPolicy`).

    RETAIN_ON_FAILURE keeps them after a failure, RETAIN_ON_CANCELLATION after a failure or a cancellation. A job that
    finishes or is suspended always keeps its checkpoints.
    """

    NEVER_RETAIN = "never_retain"
    RETAIN_ON_FAILURE = "retain_on_failure"
    RETAIN_ON_CANCELLATION = "retain_on_cancellation"


@wire
class FailoverStrategy(enum.Enum):
    """The scope of a restart when a task has failed: the whole job, or the pipelined region of the task (Flink's
    `failover-strategy`).
    """

    FULL = "full"
    REGION = "region"


@wire
@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """The checkpoint settings of a job. Times are in ms.

    `interval_ms` is None for checkpoints only on request and at the end. With `unaligned`, barriers are unaligned from
    the start if `aligned_timeout_ms` is None or 0. Otherwise they become unaligned after an alignment of this length.
    `retained` is the number of completed checkpoints to keep.
    """

    interval_ms: int | None
    timeout_ms: int = 600_000
    min_pause_ms: int = 0
    tolerable_failures: int = 0
    retained: int = 1
    exactly_once: bool = True
    unaligned: bool = False
    aligned_timeout_ms: int | None = None
    max_concurrent: int = 1
    retention: Retention = Retention.RETAIN_ON_CANCELLATION
    history_max: int = 10
    """Number of checkpoints that the statistics keep in detail."""
    ignore_in_flight_of: CheckpointId | None = None
    """The checkpoint whose in-flight data is ignored when it is restored."""
    keep_events: bool = False
    """True if entries that are removed from the event log are archived."""


@wire
@dataclass(frozen=True, slots=True)
class JobEdgeInfo:
    """An edge of the job graph for the coordinator.

    `pointwise`: upstream subtask i sends to downstream subtask i only. Otherwise each sends to all.
    """

    upstream: VertexId
    downstream: VertexId
    pointwise: bool


@wire
@dataclass(frozen=True, slots=True)
class RestorePoint:
    """The checkpoint or savepoint from which a job starts. Its files are below the URL `root` (see
    `CheckpointPointer`).

    `ignore_in_flight`: its in-flight data is ignored, and so lost. `dropped_states`: pairs of the uid of an operator
    and the name of a state that its function no longer declares, and that the user has agreed to drop.
    """

    root: str
    job_id: JobId
    checkpoint_id: CheckpointId
    final: bool
    savepoint: bool = False
    ignore_in_flight: bool = False
    dropped_states: tuple[tuple[OperatorUid, str], ...] = ()

    @property
    def pointer(self) -> str:
        """Returns the path `<root>/<job>/chk-N` or `<folder>/savepoint-<job>-N`, as error messages and metadata show
        it.
        """
        return str(CheckpointPointer(self.root, self.job_id, self.checkpoint_id, self.savepoint))


@wire
@dataclass(frozen=True, slots=True)
class AssignedSource:
    """A source whose splits the coordinator assigns to subtasks. The coordinator identifies a split by its index in
    `splits`.

    `unread`: indices of the splits of which no row was read at the job's start. The other splits were in the checkpoint
    of some task, which reports them when it is restored. `second`: index of the first split in the second part of a
    `TwoPartSource`, or None if the source has one part.
    """

    uid: OperatorUid
    vertex: VertexId
    splits: tuple[StoredSplit, ...]
    unread: tuple[int, ...]
    second: int | None = None


@wire
@dataclass(frozen=True, slots=True)
class AlignedSource:
    """A source with watermark alignment: its splits are at most `max_drift_ms` ahead of the slowest split of a
    group.
    """

    vertex: VertexId
    group: str
    max_drift_ms: int


@wire
@dataclass(frozen=True, slots=True)
class JobSpec:
    """The description of a job for its coordinator: tasks and operators by name, without code."""

    job_id: JobId
    job_name: str
    root: str
    tasks: tuple[TaskId, ...]
    sources: tuple[TaskId, ...]
    operators: tuple[OperatorInfo, ...]
    checkpoints: CheckpointSettings
    restart: RestartStrategy
    restore: RestorePoint | None = None
    edges: tuple[JobEdgeInfo, ...] = ()
    hooks: tuple[str, ...] = ()
    """Identifiers of the job's master hooks."""
    tables: tuple[str, ...] = ()
    """URLs of the job's output tables."""
    table_heads: tuple[TableHead, ...] = ()
    """The newest entry in the log of each output table when the job claimed the table."""
    seed: int = 0
    """Seed of random choices: the delay of the first periodic checkpoint, and the jitter of restarts."""
    deploy_timeout_ms: int = DEPLOY_TIMEOUT_MS
    """Time limit in ms within which all tasks of an attempt must be ready. Otherwise the attempt has failed."""
    storage_outage_ms: int = STORAGE_OUTAGE_MS
    """Time in ms for which the job continues while storage does not answer."""
    storage_attempts_max: int = 10
    """Limit of failed attempts to call master hooks, or to claim tables, while storage answers."""
    storage_retry_ms: int = FIRST_PAUSE_MS
    """Pause in ms before the first retry of an operation on storage. It grows with each retry."""
    failover: FailoverStrategy = FailoverStrategy.FULL
    """The scope of a restart after a failure: the whole job, or the region of the failed task."""
    adoption_timeout_ms: int | None = None
    """Time in ms for which a new coordinator waits for the answers of running tasks. With None all tasks start
    again at once.
    """
    assigned_sources: tuple[AssignedSource, ...] = ()
    """Sources whose splits are assigned while the job runs. Splits of other sources are distributed before it
    starts."""

    aligned_sources: tuple[AlignedSource, ...] = ()
    """Sources with watermark alignment, which wait for each other in event time."""
    committing: tuple[VertexId, ...] = ()
    """Vertices with a sink that commits in its tasks. The job does not end before their tasks have committed."""

    def aligned_source(self, task: TaskId) -> AlignedSource | None:
        """Returns the watermark alignment of a task's source, or None if it has none."""
        return next((source for source in self.aligned_sources if source.vertex == task.vertex), None)

    def assigned_source(self, vertex: VertexId) -> AssignedSource | None:
        """Returns the source of a vertex if the coordinator assigns its splits, else None."""
        return next((source for source in self.assigned_sources if source.vertex == vertex), None)


_DRAWS = 2**64


def drawn(seed: int, number: int) -> int:
    """Returns a pseudo-random integer in [0, 2**64) that depends only on `seed` and `number`."""
    return (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9) % _DRAWS


def draw_fraction(seed: int, purpose: int, number: int) -> float:
    """Returns a pseudo-random number in [0, 1) that depends only on the arguments. Draws for different purposes
    are independent.
    """
    mixed = drawn(seed ^ (purpose * 0x94D049BB133111EB), number + 1) % _DRAWS
    # The finaliser of splitmix64: neighbouring numbers give draws that are far apart.
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % _DRAWS
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % _DRAWS
    return ((mixed ^ (mixed >> 31)) >> 11) / 2**53
