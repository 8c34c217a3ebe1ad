"""The states of a job and of a pending checkpoint, as transition tables.

`CoordinatorState.move` and `PendingCheckpoint.advance` use the tables. Each table has an entry for every pair of state
and input, which is None if the input is illegal. An illegal transition raises ProtocolError and changes nothing.
`__main__.py` writes the page `docs/coordinator-states.md` from the tables.
"""

from __future__ import annotations

import enum

from tidegate.storage.codec import wire
from tidegate.storage.errors import ProtocolError


@wire
class JobStatus(enum.Enum):
    """The status of a job. The last four are terminal."""

    CREATED = "created"
    DEPLOYING = "deploying"
    RUNNING = "running"
    RESTARTING = "restarting"
    ENDING = "ending"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SUSPENDED = "suspended"

    @property
    def terminal(self) -> bool:
        """Returns whether the status is terminal."""
        return self in _TERMINAL


# Tuples, not sets: comparing members is cheap, hashing one costs a call.
_TERMINAL = (JobStatus.FINISHED, JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.SUSPENDED)


class JobInput(enum.Enum):
    """The input that moves a job to its next status."""

    DEPLOY = "deploy"
    ALL_READY = "all tasks are ready"
    RESTART = "restart"
    END = "end"
    OVER_FINISHED = "over: finished"
    OVER_FAILED = "over: failed"
    OVER_CANCELLED = "over: cancelled"
    OVER_SUSPENDED = "over: suspended"


@wire
class PendingPhase(enum.Enum):
    """The phase of a checkpoint between its trigger and its end.

    HOOKS: master hooks are being called. COLLECTING: tasks acknowledge. ACKNOWLEDGED: all tasks have acknowledged, and
    another checkpoint may be written first. EXPORTING: the files of a stop's savepoint are copied into the user's
    folder. WRITING: `_metadata` is being created. VOIDING: it is unknown whether `_metadata` was created, so a
    tombstone is created. COMPLETED and FAILED are the end.
    """

    HOOKS = "hooks"
    COLLECTING = "collecting"
    ACKNOWLEDGED = "acknowledged"
    EXPORTING = "exporting"
    WRITING = "writing"
    VOIDING = "voiding"
    COMPLETED = "completed"
    FAILED = "failed"

    @property
    def open(self) -> bool:
        """Returns whether the coordinator can abort the checkpoint in this phase without a request to storage."""
        return self in _OPEN

    @property
    def being_written(self) -> bool:
        """Returns whether the checkpoint is being copied or written in this phase. Only one checkpoint may be in
        such a phase.
        """
        return self in _BEING_WRITTEN


_OPEN = (PendingPhase.HOOKS, PendingPhase.COLLECTING, PendingPhase.ACKNOWLEDGED, PendingPhase.EXPORTING)


_BEING_WRITTEN = (PendingPhase.EXPORTING, PendingPhase.WRITING, PendingPhase.VOIDING)


class PendingInput(enum.Enum):
    """The input that moves a pending checkpoint to its next phase."""

    HOOKS_ANSWERED = "hooks answered"
    ALL_ACKNOWLEDGED = "all tasks acknowledged"
    EXPORT = "its turn: export"
    WRITE = "its turn, or exported: write"
    EXPORT_FAILED = "export failed, to be repeated"
    FATE_UNKNOWN = "fate unknown"
    METADATA_FOUND = "metadata found"
    TOMBSTONE_FOUND = "tombstone found"
    GIVEN_UP = "given up"


_JOB_LEGAL: dict[tuple[JobStatus, JobInput], JobStatus] = {
    (JobStatus.CREATED, JobInput.DEPLOY): JobStatus.DEPLOYING,
    (JobStatus.RESTARTING, JobInput.DEPLOY): JobStatus.DEPLOYING,
    (JobStatus.DEPLOYING, JobInput.ALL_READY): JobStatus.RUNNING,
    (JobStatus.DEPLOYING, JobInput.RESTART): JobStatus.RESTARTING,
    (JobStatus.RUNNING, JobInput.RESTART): JobStatus.RESTARTING,
    # A new generation of the coordinator restarts at once what waited for its restart.
    (JobStatus.RESTARTING, JobInput.RESTART): JobStatus.RESTARTING,
    (JobStatus.CREATED, JobInput.END): JobStatus.ENDING,
    (JobStatus.DEPLOYING, JobInput.END): JobStatus.ENDING,
    (JobStatus.RUNNING, JobInput.END): JobStatus.ENDING,
    (JobStatus.RESTARTING, JobInput.END): JobStatus.ENDING,
    (JobStatus.ENDING, JobInput.OVER_FINISHED): JobStatus.FINISHED,
    (JobStatus.ENDING, JobInput.OVER_FAILED): JobStatus.FAILED,
    (JobStatus.ENDING, JobInput.OVER_CANCELLED): JobStatus.CANCELLED,
    (JobStatus.ENDING, JobInput.OVER_SUSPENDED): JobStatus.SUSPENDED,
}


OVER_BY = {
    JobStatus.FINISHED: JobInput.OVER_FINISHED,
    JobStatus.FAILED: JobInput.OVER_FAILED,
    JobStatus.CANCELLED: JobInput.OVER_CANCELLED,
    JobStatus.SUSPENDED: JobInput.OVER_SUSPENDED,
}
"""The input that leads to each terminal status."""


_PENDING_LEGAL: dict[tuple[PendingPhase, PendingInput], PendingPhase] = {
    (PendingPhase.HOOKS, PendingInput.HOOKS_ANSWERED): PendingPhase.COLLECTING,
    (PendingPhase.COLLECTING, PendingInput.ALL_ACKNOWLEDGED): PendingPhase.ACKNOWLEDGED,
    (PendingPhase.ACKNOWLEDGED, PendingInput.EXPORT): PendingPhase.EXPORTING,
    (PendingPhase.ACKNOWLEDGED, PendingInput.WRITE): PendingPhase.WRITING,
    (PendingPhase.EXPORTING, PendingInput.EXPORT_FAILED): PendingPhase.EXPORTING,
    (PendingPhase.EXPORTING, PendingInput.WRITE): PendingPhase.WRITING,
    (PendingPhase.WRITING, PendingInput.FATE_UNKNOWN): PendingPhase.VOIDING,
    (PendingPhase.VOIDING, PendingInput.FATE_UNKNOWN): PendingPhase.VOIDING,
    (PendingPhase.WRITING, PendingInput.METADATA_FOUND): PendingPhase.COMPLETED,
    (PendingPhase.VOIDING, PendingInput.METADATA_FOUND): PendingPhase.COMPLETED,
    (PendingPhase.WRITING, PendingInput.TOMBSTONE_FOUND): PendingPhase.FAILED,
    (PendingPhase.VOIDING, PendingInput.TOMBSTONE_FOUND): PendingPhase.FAILED,
    (PendingPhase.HOOKS, PendingInput.GIVEN_UP): PendingPhase.FAILED,
    (PendingPhase.COLLECTING, PendingInput.GIVEN_UP): PendingPhase.FAILED,
    (PendingPhase.ACKNOWLEDGED, PendingInput.GIVEN_UP): PendingPhase.FAILED,
    (PendingPhase.EXPORTING, PendingInput.GIVEN_UP): PendingPhase.FAILED,
}


JOB_TRANSITIONS: dict[tuple[JobStatus, JobInput], JobStatus | None] = {
    (status, input): _JOB_LEGAL.get((status, input)) for status in JobStatus for input in JobInput
}


PENDING_TRANSITIONS: dict[tuple[PendingPhase, PendingInput], PendingPhase | None] = {
    (phase, input): _PENDING_LEGAL.get((phase, input)) for phase in PendingPhase for input in PendingInput
}


def next_status(status: JobStatus, input: JobInput) -> JobStatus:
    """Returns the status of a job after an input. Raises ProtocolError if the input is not allowed in its present
    status.
    """
    following = JOB_TRANSITIONS[status, input]
    if following is None:
        raise ProtocolError(
            f"a job with status {status.value} does not allow the input {input.value!r}; this is a bug in tidegate, "
            "please report it"
        )
    return following


def next_phase(phase: PendingPhase, input: PendingInput) -> PendingPhase:
    """Returns the phase of a checkpoint after an input. Raises ProtocolError if the input is not allowed in its
    present phase.
    """
    following = PENDING_TRANSITIONS[phase, input]
    if following is None:
        raise ProtocolError(
            f"a checkpoint in phase {phase.value} does not allow the input {input.value!r}; this is a bug in "
            "tidegate, please report it"
        )
    return following
