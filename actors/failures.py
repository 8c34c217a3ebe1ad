"""Why a checkpoint fails: a closed list (C6), those of Flink's `CheckpointFailureReason` that tidegate can meet.

A reason that is *counted* brings the job nearer to its tolerable number of failed checkpoints; the others are nobody's
fault (a request that came too early, a task that had just finished, an attempt that failed for its own reason).
"""

from __future__ import annotations

import enum

from tidegate.storage.codec import wire


@wire
class CheckpointFailureReason(enum.Enum):
    """One reason for each checkpoint that fails, and for each request that is refused."""

    # Before the trigger: the request is refused.
    SCHEDULER_SHUTDOWN = "the checkpoint scheduler is shut down"
    TOO_MANY_REQUESTS = "too many checkpoint requests are waiting"
    MIN_PAUSE = "the minimum pause between checkpoints is not over"
    NOT_ALL_REQUIRED_TASKS_RUNNING = "not all required tasks are running"
    UNION_STATE_PARTLY_FINISHED = "an operator with union list state has finished in some of its subtasks only"
    # After the trigger, nobody's fault.
    TASK_NOT_READY = "a task was not ready"
    TASK_CLOSING = "a task was closing"
    TASK_FINISHED = "a task finished while the checkpoint was being triggered"
    SUBSUMED = "a newer checkpoint overtook it"
    CANCEL_BARRIER = "an upstream task had cancelled it"
    JOB_FAILOVER = "the attempt failed"
    COORDINATOR_LOST = "the coordinator was lost"
    JOB_ENDING = "the job is ending"
    # Counted.
    DECLINED = "a task declined"
    ASYNC_PART_FAILED = "the asynchronous part of a task's snapshot failed"
    EXPIRED = "it expired before it was complete"
    HOOK_FAILED = "a master hook failed"
    METADATA_NOT_WRITTEN = "its metadata could not be written"
    SAVEPOINT_NOT_WRITTEN = "the savepoint could not be written"

    @property
    def counted(self) -> bool:
        """Whether the failure counts against the tolerable number of failed checkpoints."""
        return self in _COUNTED


_COUNTED = frozenset(
    {
        CheckpointFailureReason.DECLINED,
        CheckpointFailureReason.ASYNC_PART_FAILED,
        CheckpointFailureReason.EXPIRED,
        CheckpointFailureReason.HOOK_FAILED,
        CheckpointFailureReason.METADATA_NOT_WRITTEN,
        CheckpointFailureReason.SAVEPOINT_NOT_WRITTEN,
    }
)
