"""Events in plain words, for people who ask what happened to a job (`tidegate events`)."""

from __future__ import annotations

from tidegate.actors.coordinator.messages import events as ev

_TIMERS = {
    "restart": "it was time to start attempt {}",
    "deploy": "tasks of attempt {} were not ready in time",
    "deploy-delayed": "tasks that wait for storage were not ready in time",
    "hooks": "it was time to call the master hooks of attempt {} again",
    "tables": "it was time to claim the output tables for attempt {} again",
    "ending": "tasks did not end in time",
    "copies": "the folders of savepoints that failed could not be deleted in time, and are left as they are",
    "ask": "it was time to ask tasks again what they are doing, for coordinator generation {}",
    "adopt": "tasks had not answered coordinator generation {} in time",
    "periodic": "a periodic checkpoint was due in attempt {}",
    "final": "the final checkpoint was due in attempt {}",
    "timeout": "checkpoint {} had taken too long",
    "export": "it was time to write the folder of savepoint {} again",
    "copy": "the copy of savepoint {} had taken too long",
    "void": "it was time to ask again what became of checkpoint {}",
    "commit": "it was time to commit the output of checkpoint {} again",
    "discard": "it was time to delete checkpoint {} again",
    "discard-savepoint": "it was time to delete the folder of savepoint {} again",
}


def in_words(event: object) -> str:
    """One line that says what happened. An event that has no words here is called by its name."""
    if isinstance(event, ev.CheckpointRequested | ev.CancelRequested | ev.JobSubmitted):
        return _by_users(event)
    if hasattr(event, "task"):
        return _of_tasks(event)
    if hasattr(event, "checkpoint_id"):
        return _of_checkpoints(event)
    match event:
        case ev.CoordinatorStarted(generation=generation):
            return f"coordinator generation {generation} took over" if generation > 1 else "the coordinator started"
        case ev.ProcessGivenUp(reason=reason):
            return f"a process was given up: {reason}"
        case ev.HooksRestored(attempt=attempt):
            return f"the master hooks were restored for attempt {attempt}"
        case ev.HookRestoreFailed(attempt=attempt, error=error):
            return f"the master hooks could not be restored for attempt {attempt}: {error}"
        case ev.TablesTakenBack(attempt=attempt):
            return f"the output tables were claimed for attempt {attempt}"
        case ev.TablesNotTakenBack(attempt=attempt, error=error):
            return f"the output tables could not be claimed for attempt {attempt}: {error}"
        case ev.TimerFired(timer=timer):
            name, _, about = timer.partition(":")
            return _TIMERS.get(name, f"timer {timer} was due").format(about)
        case ev.StorageWentAway(error=error):
            return f"the event log could not be written: {error}"
        case ev.StorageCameBack():
            return "the event log could be written again"
    return type(event).__name__


def _by_users(event: ev.CheckpointRequested | ev.CancelRequested | ev.JobSubmitted) -> str:
    match event:
        case ev.CheckpointRequested(kind=kind, request=request, target=target, savepoint_format=format):
            where = f" in {target}, {format.value}" if target else ""
            return f"a user asked for a {kind.words}{where} (request {request})"
        case ev.CancelRequested():
            return "a user cancelled the job"
        case ev.JobSubmitted(spec=spec):
            start = "afresh" if spec.restore is None else f"from {spec.restore.pointer}"
            return f"the job was submitted, to start {start}"


def _of_tasks(event: object) -> str:
    match event:
        case ev.TaskReady(attempt=attempt, task=task):
            return f"task {task} of attempt {attempt} was ready"
        case ev.RestoreDelayed(attempt=attempt, task=task):
            return f"task {task} of attempt {attempt} could not read its state, and went on trying"
        case ev.TaskFailed(attempt=attempt, task=task, reason=reason):
            return f"task {task} of attempt {attempt} failed: {_in_one_line(reason)}"
        case ev.TaskAnswered(attempt=attempt, task=task, generation=generation):
            return f"task {task} of attempt {attempt} goes on under coordinator generation {generation}"
        case ev.SplitsRequested(attempt=attempt, task=task):
            return f"task {task} of attempt {attempt} asked for more splits"
        case ev.WatermarkReported(attempt=attempt, task=task):
            return f"task {task} of attempt {attempt} told how far it is in event time"
        case ev.TaskReachedEndOfData(attempt=attempt, task=task, stop=int(number)):
            return f"task {task} of attempt {attempt} was stopped, with savepoint {number}"
        case ev.TaskReachedEndOfData(attempt=attempt, task=task):
            return f"task {task} of attempt {attempt} reached the end of its data"
        case ev.TaskFinished(attempt=attempt, task=task):
            return f"task {task} of attempt {attempt} was over"
        case ev.CheckpointAcknowledged(task=task, checkpoint_id=number):
            return f"task {task} had its part of checkpoint {number} in storage"
        case ev.CheckpointDeclined(task=task, checkpoint_id=number, message=message):
            return f"task {task} could not take part in checkpoint {number}: {message}"
    return type(event).__name__


def _of_checkpoints(event: object) -> str:
    match event:
        case ev.HooksTriggered(checkpoint_id=number):
            return f"the master hooks answered for checkpoint {number}"
        case ev.HookFailed(checkpoint_id=number, error=error):
            return f"a master hook failed at checkpoint {number}: {error}"
        case ev.CheckpointDamaged(checkpoint_id=number, attempt=attempt, reason=reason):
            return f"checkpoint {number}, from which attempt {attempt} was to start, is damaged: {reason}"
        case ev.SavepointWritten(checkpoint_id=number, path=path):
            return f"the folder of savepoint {number} was written: {path}"
        case ev.SavepointWriteFailed(checkpoint_id=number, error=error):
            return f"the folder of savepoint {number} could not be written: {error}"
        case ev.SavepointDiscarded(checkpoint_id=number, exported=exported):
            whole = ", which the coordinator before had made whole," if exported else ""
            return f"the folder of savepoint {number}{whole} was deleted"
        case ev.SavepointDiscardFailed(checkpoint_id=number, error=error):
            return f"the folder of savepoint {number} could not be deleted: {error}"
        case ev.MetadataWritten(checkpoint_id=number):
            return f"checkpoint {number} was complete"
        case ev.CheckpointVoided(checkpoint_id=number):
            return f"checkpoint {number} was given up for good"
        case ev.MetadataWriteFailed(checkpoint_id=number, error=error):
            return f"it is not known whether checkpoint {number} is complete: {error}"
        case ev.SinksCommitted(checkpoint_id=number):
            return f"the output of checkpoint {number} was committed"
        case ev.SinkCommitFailed(checkpoint_id=number, error=error):
            return f"the output of checkpoint {number} could not be committed: {error}"
        case ev.CheckpointDiscarded(checkpoint_id=number):
            return f"checkpoint {number} was deleted"
        case ev.CheckpointDiscardFailed(checkpoint_id=number, error=error):
            return f"checkpoint {number} could not be deleted: {error}"
    return type(event).__name__


def _in_one_line(reason: str) -> str:
    """A reason that has several lines, such as the frames of a function, as one: a decision is a line of the log."""
    return "; ".join(line.strip() for line in reason.splitlines())
