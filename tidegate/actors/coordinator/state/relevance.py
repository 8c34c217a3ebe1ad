"""Tells which events change nothing. The host neither logs them nor hands them to the machine.

`CoordinatorMachine.ignores` asks. It is a pure function of state and event, so a replay answers as before: an event
that was logged is relevant again.
"""

from __future__ import annotations

from collections.abc import Callable

from tidegate.actors.coordinator.job.phases import JobStatus, PendingPhase
from tidegate.actors.coordinator.messages import events as ev
from tidegate.actors.coordinator.state.coordinator_state import CoordinatorState
from tidegate.protocol.identity import TaskId
from tidegate.storage.ids import AttemptNumber, CheckpointId

_AFTER_THE_END = (
    ev.CoordinatorStarted,
    ev.CheckpointRequested,
    ev.CheckpointDiscarded,
    ev.SavepointDiscarded,
    ev.SavepointWritten,
    ev.SavepointWriteFailed,
)


def changes_nothing(event: ev.CoordinatorEvent, state: CoordinatorState) -> bool:
    """Whether nothing follows from an event, now or later."""
    if state.status.terminal:
        return not isinstance(event, _AFTER_THE_END)
    match event:
        case ev.TimerFired(timer=timer):
            return _has_passed(timer, state)
        case ev.TaskReady(attempt=attempt, task=task) | ev.RestoreDelayed(attempt=attempt, task=task):
            return not _is_being_deployed(task, attempt, state)
        case ev.CheckpointDamaged(attempt=attempt):
            return attempt != state.attempt or state.status is not JobStatus.DEPLOYING
        case ev.TablesTakenBack(attempt=attempt) | ev.TablesNotTakenBack(attempt=attempt):
            return attempt != state.attempt or state.fallback is None
        case ev.TaskFailed(attempt=attempt, task=task):
            return not state.is_current(task, attempt)
        case ev.TaskAnswered(attempt=attempt, task=task, generation=generation):
            asked = generation == state.generation and task in state.adopting
            return not asked or not state.is_current(task, attempt)
        case (
            ev.TaskReachedEndOfData(attempt=attempt, task=task)
            | ev.TaskFinished(attempt=attempt, task=task)
            | ev.SplitsRequested(attempt=attempt, task=task)
        ):
            return not state.is_current(task, attempt)
        case ev.WatermarkReported():
            return True  # Answered beside the machine: it changes nothing that lasts.
        case ev.StorageWentAway():
            return state.spec is None or state.storage_away
        case ev.StorageCameBack():
            return not state.storage_away
    return False


def _is_being_deployed(task: TaskId, attempt: int, state: CoordinatorState) -> bool:
    """Whether a task belongs to the attempt that is being deployed: it is the newest one."""
    deploys = state.status is JobStatus.DEPLOYING
    return deploys and attempt == state.attempt and state.is_current(task, AttemptNumber(attempt))


def _waits_for_restart(state: CoordinatorState) -> bool:
    """Whether something waits for its restart, even beside a deployment. Older folds have only the status."""
    return state.status is JobStatus.RESTARTING or (state.status is JobStatus.DEPLOYING and bool(state.down))


def _has_passed(timer: str, state: CoordinatorState) -> bool:
    """Whether what a timer was set for is over, or has been put off."""
    name, _, argument = timer.partition(":")
    if name in ("ending", "copies"):
        return state.status is not JobStatus.ENDING
    number = int(argument)
    pending = state.pending.get(CheckpointId(number))
    deploys = state.status is JobStatus.DEPLOYING
    still: dict[str, Callable[[], bool]] = {
        "restart": lambda: _waits_for_restart(state) and number == state.attempt + 1,
        "deploy": lambda: deploys and number == state.attempt and not state.deploy_delayed,
        "deploy-delayed": lambda: deploys and number == state.deploy_delays and state.deploy_delayed,
        "hooks": lambda: state.restoring_hooks and number == state.attempt,
        "tables": lambda: state.fallback is not None and number == state.attempt,
        "ask": lambda: bool(state.adopting) and number == state.generation,
        "adopt": lambda: bool(state.adopting) and number == state.generation,
        "periodic": lambda: state.status is JobStatus.RUNNING and number == state.attempt,
        "final": lambda: state.status is JobStatus.RUNNING and number == state.attempt,
        "timeout": lambda: pending is not None and pending.phase.open,
        "export": lambda: number in state.copies or (pending is not None and pending.phase is PendingPhase.EXPORTING),
        "copy": lambda: number in state.copies,
        "void": lambda: pending is not None and pending.phase is PendingPhase.VOIDING,
        "commit": lambda: bool(state.commits) and state.commits[0].checkpoint_id == number,
        "discard": lambda: number in state.discards,
        "discard-savepoint": lambda: number in state.savepoint_discards,
    }
    return name not in still or not still[name]()
