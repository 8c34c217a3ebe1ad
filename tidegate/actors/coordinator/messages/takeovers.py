"""The events that outlive a coordinator: one begins, the tasks that run answer it, and processes are given up."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.protocol.identity import TaskId
from tidegate.storage.codec import wire
from tidegate.storage.ids import AttemptNumber, CheckpointId, Generation


@wire
@dataclass(frozen=True, slots=True)
class CoordinatorStarted:
    """A generation of the coordinator has replayed the log and begins. Answers to the previous one may be lost."""

    at_ms: int
    generation: Generation


@wire
@dataclass(frozen=True, slots=True)
class TaskAnswered:
    """A task that runs says what it is doing. `generation`: that of the coordinator which it answers and obeys.

    It repeats what it had told the previous generation, because nobody knows whether that was logged.
    """

    at_ms: int
    attempt: AttemptNumber
    task: TaskId
    generation: Generation
    started: bool = True
    """Whether it was told that every task of its attempt is ready."""
    ended: bool = False
    """Whether its operators have finished."""
    finished: bool = False
    """Whether it is over."""
    covered_by: CheckpointId | None = None
    """The checkpoint whose completion let it go."""
    snapshotted: CheckpointId = CheckpointId(0)
    """The newest checkpoint that it has taken a snapshot for; 0 for none."""
    collecting: CheckpointId | None = None
    """The checkpoint whose barriers it is collecting."""


@wire
@dataclass(frozen=True, slots=True)
class ProcessGivenUp:
    """A process gets no task any more, and is to be ended: it hangs, or is of no use.

    No process of a job that goes on is ended before this is in the log: a coordinator that was cut off takes all for
    hung, and cannot write that down. `process` is unique, also over coordinators; `reason` says which it is, to people.
    """

    at_ms: int
    process: str
    reason: str
