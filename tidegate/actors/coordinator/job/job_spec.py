"""`JobSpec`: what the coordinator knows about its job. The event `JobSubmitted` brings it into the event log."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tidegate.actors.coordinator.job.outages import FIRST_PAUSE_MS, STORAGE_OUTAGE_MS
from tidegate.protocol.identity import TaskId
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.checkpoints.layout import CheckpointPointer
from tidegate.storage.checkpoints.metadata import OperatorInfo, StoredSplit, TableHead
from tidegate.storage.codec import wire
from tidegate.storage.ids import CheckpointId, JobId, OperatorUid, VertexId

ADOPTION_TIMEOUT_MS = 60_000
"""Longer than the default of `heartbeat.timeout`, after which a hung process is ended anyway."""
DEPLOY_TIMEOUT_MS = 600_000
"""Longer than the default of `slot.request.timeout`; functions that load a large model when they open need minutes."""
COPIES_TIMEOUT_MS = 2_000
"""How long the end of a job waits, when all else is done, until copies of savepoints have stopped and are deleted."""
ENDING_TIMEOUT_MS = 120_000
"""For so long the end of a job waits for tasks that were told to finish."""


@wire
class Retention(enum.Enum):
    """Which checkpoints outlive a job that fails or is cancelled (Flink's `CheckpointRetentionPolicy`).

    RETAIN_ON_FAILURE keeps those of a failed job, RETAIN_ON_CANCELLATION those of a cancelled one as well. A job that
    finishes or is suspended always keeps its own.
    """

    NEVER_RETAIN = "never_retain"
    RETAIN_ON_FAILURE = "retain_on_failure"
    RETAIN_ON_CANCELLATION = "retain_on_cancellation"


@wire
class FailoverStrategy(enum.Enum):
    """What restarts when a task has failed: the whole job, or its pipelined region (Flink's `failover-strategy`)."""

    FULL = "full"
    REGION = "region"


@wire
@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """How the coordinator takes checkpoints. Times in ms; `interval_ms` None: only on request and at the end.

    `unaligned`: from the start if `aligned_timeout_ms` is None or 0, else once the alignment has taken that long.
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
    """Checkpoints that the statistics keep in detail."""
    ignore_in_flight_of: CheckpointId | None = None
    """The checkpoint whose in-flight data is left out when it is restored."""
    keep_events: bool = False
    """Whether what is cut from the event log is kept."""


@wire
@dataclass(frozen=True, slots=True)
class JobEdgeInfo:
    """An edge as the coordinator sees it. `pointwise` joins subtask i to subtask i, else each is joined to each."""

    upstream: VertexId
    downstream: VertexId
    pointwise: bool


@wire
@dataclass(frozen=True, slots=True)
class RestorePoint:
    """The checkpoint or savepoint that a job starts from. Its files lie under `root` (see `CheckpointPointer`).

    `ignore_in_flight`: its in-flight data is left out, and so lost. `dropped_states`: uids of operators, each with the
    name of a state that its function does not declare any more, and that the user has agreed to drop.
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
        """`<root>/<job>/chk-N` or `<folder>/savepoint-<job>-N`, for people and for metadata."""
        return str(CheckpointPointer(self.root, self.job_id, self.checkpoint_id, self.savepoint))


@wire
@dataclass(frozen=True, slots=True)
class AssignedSource:
    """A source whose splits the coordinator assigns to its subtasks. A split is known by its place in `splits`.

    `unread`: the splits that nobody had begun to read where the job starts. Of the others, tasks say that they have
    them.
    """

    uid: OperatorUid
    vertex: VertexId
    splits: tuple[StoredSplit, ...]
    unread: tuple[int, ...]


@wire
@dataclass(frozen=True, slots=True)
class AlignedSource:
    """A source whose splits wait for the slowest one of a group, and are at most so far ahead of it in event time."""

    vertex: VertexId
    group: str
    max_drift_ms: int


@wire
@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job as the coordinator sees it: tasks and operators by name, no code."""

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
    """Urls of the job's output tables."""
    table_heads: tuple[TableHead, ...] = ()
    """How far the log of each output table had got when the job claimed it."""
    seed: int = 0
    """Decides what is random: the delay of the first periodic checkpoint, and the jitter of restarts."""
    deploy_timeout_ms: int = DEPLOY_TIMEOUT_MS
    """An attempt whose tasks are not all ready by then has failed."""
    storage_outage_ms: int = STORAGE_OUTAGE_MS
    """For how long the job goes on while storage does not answer."""
    storage_attempts_max: int = 10
    """How often master hooks, or claims of tables, may fail while storage answers."""
    storage_retry_ms: int = FIRST_PAUSE_MS
    """The pause before the first retry. It grows with each one."""
    failover: FailoverStrategy = FailoverStrategy.FULL
    """The default is for older logs, which do not say: those jobs restarted as a whole."""
    adoption_timeout_ms: int | None = None
    """How long a coordinator that takes over waits for the answers of running tasks. None: it does not ask, and all
    tasks start anew, as in older versions."""
    assigned_sources: tuple[AssignedSource, ...] = ()
    """All other sources, and those of older logs, have their splits dealt out before the job starts."""

    aligned_sources: tuple[AlignedSource, ...] = ()
    """Sources that wait for each other in event time."""

    def aligned_source(self, task: TaskId) -> AlignedSource | None:
        """The source of a task, if it waits for others."""
        return next((source for source in self.aligned_sources if source.vertex == task.vertex), None)

    def assigned_source(self, vertex: VertexId) -> AssignedSource | None:
        """The source of a vertex, if its splits are assigned."""
        return next((source for source in self.assigned_sources if source.vertex == vertex), None)
