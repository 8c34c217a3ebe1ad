"""`JobSpec`: what a coordinator is told about its job when it is submitted; the first thing in the event log."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tidegate.actors.coordinator.job.outages import STORAGE_OUTAGE_MS
from tidegate.actors.protocol.identity import TaskId
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.checkpoints.layout import CheckpointPointer
from tidegate.storage.checkpoints.metadata import OperatorInfo
from tidegate.storage.codec import wire
from tidegate.storage.ids import CheckpointId, JobId, VertexId

ADOPTION_TIMEOUT_MS = 60_000
"""Longer than processes that hang live on: who does not answer for so long has something else to do."""


@wire
class Retention(enum.Enum):
    """What becomes of a job's checkpoints when it ends, other than by finishing, where they always stay one last time.

    A job that failed keeps them with RETAIN_ON_FAILURE and RETAIN_ON_CANCELLATION, a cancelled one with
    RETAIN_ON_CANCELLATION only (Flink's `CheckpointRetentionPolicy`).
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

    `unaligned` with `aligned_timeout_ms` None or 0 is unaligned from the start, else after so long an alignment.
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
    """In-flight data of this checkpoint is left out when it is restored."""


@wire
@dataclass(frozen=True, slots=True)
class JobEdgeInfo:
    """An edge as the coordinator sees it: `pointwise` joins subtask i to subtask i, else every one to every one."""

    upstream: VertexId
    downstream: VertexId
    pointwise: bool


@wire
@dataclass(frozen=True, slots=True)
class RestorePoint:
    """The checkpoint or savepoint a job starts from; the files of it lie under `root` (see `CheckpointPointer`).

    `ignore_in_flight`: its in-flight elements are left out, and so lost.
    """

    root: str
    job_id: JobId
    checkpoint_id: CheckpointId
    final: bool
    savepoint: bool = False
    ignore_in_flight: bool = False

    @property
    def pointer(self) -> str:
        """`<root>/<job>/chk-N` or `<folder>/savepoint-<job>-N`, for people and for metadata."""
        return str(CheckpointPointer(self.root, self.job_id, self.checkpoint_id, self.savepoint))


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
    seed: int = 0
    """Decides the random initial delay of the periodic trigger: machines have no randomness of their own."""
    deploy_timeout_ms: int = 120_000
    storage_outage_ms: int = STORAGE_OUTAGE_MS
    """For how long the job goes on while storage does not answer."""
    storage_attempts_max: int = 10
    """Of what has failed though storage answers: master hooks, claims of tables."""
    storage_retry_ms: int = 200
    """The pause before the second attempt; those that follow grow."""
    failover: FailoverStrategy = FailoverStrategy.FULL
    """Jobs of older versions restarted as a whole."""
    adoption_timeout_ms: int | None = None
    """How long the successor of a lost coordinator waits for the answers of tasks that run. None: it does not ask, and
    all tasks start anew, as in older versions."""
