"""What a coordinator is told about its job when it is submitted; the first thing in the event log."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.actors.identity import TaskId
from tidegate.recovery.restart import RestartStrategy
from tidegate.storage.codec import wire
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.metadata import OperatorInfo


@wire
@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """How the coordinator takes checkpoints. Times in ms; `interval_ms` None: only on request and at the end."""

    interval_ms: int | None
    timeout_ms: int = 600_000
    min_pause_ms: int = 0
    tolerable_failures: int = 0
    retained: int = 1


@wire
@dataclass(frozen=True, slots=True)
class RestorePoint:
    """The checkpoint a job starts from. `pointer` is for people; the job's root is the storage of that checkpoint."""

    root: str
    job_id: JobId
    checkpoint_id: CheckpointId
    final: bool

    @property
    def pointer(self) -> str:
        """`<root>/<job>/chk-N`."""
        return f"{self.root}/{self.job_id}/chk-{self.checkpoint_id}"


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
    seed: int = 0
    """Decides the random initial delay of the periodic trigger: machines have no randomness of their own."""
    deploy_timeout_ms: int = 120_000
    storage_attempts_max: int = 10
    storage_retry_ms: int = 500
