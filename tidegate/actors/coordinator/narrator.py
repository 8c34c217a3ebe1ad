"""`Narrator`: says in the field's words what a coordinator decides, a line for each decision.

`CoordinatorHost` logs the lines once the events behind them are in the event log. `tidegate events` makes the same
lines of the log afterwards (`offline/timeline.py`). Rules:
- A line tells of a decision, or of a fact that led to one, with the attempt, the checkpoint and the cause.
- It holds no values of rows. Texts of errors are those of the events, which are bounded.
- What happens at every checkpoint to every task is a detail. Details are made only where somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tidegate.actors.coordinator.messages import events as ev
from tidegate.actors.coordinator.messages import instructions as do
from tidegate.actors.coordinator.messages.words import in_words
from tidegate.actors.coordinator.state.checkpoint_statistics import CheckpointRecord, SubtaskStatistics
from tidegate.actors.coordinator.state.coordinator_state import CoordinatorState, PendingCheckpoint
from tidegate.protocol.identity import TaskId
from tidegate.storage.ids import AttemptNumber, CheckpointId

_NAMED_TASKS_MAX = 4
_TROUBLE = (
    ev.RestoreDelayed,
    ev.CheckpointDamaged,
    ev.HookFailed,
    ev.HookRestoreFailed,
    ev.TablesNotTakenBack,
    ev.SavepointWriteFailed,
    ev.MetadataWriteFailed,
    ev.SinkCommitFailed,
    ev.StorageWentAway,
)
_NEWS = (
    ev.CancelRequested,
    ev.CheckpointRequested,
    ev.CheckpointVoided,
    ev.SavepointWritten,
    ev.StorageCameBack,
    ev.TablesTakenBack,
)
_DETAILS = (
    ev.TaskReady,
    ev.TaskAnswered,
    ev.TaskReachedEndOfData,
    ev.TaskFinished,
    ev.HooksTriggered,
    ev.HooksRestored,
    ev.SinksCommitted,
    ev.CheckpointDiscarded,
    ev.CheckpointDiscardFailed,
    ev.SavepointDiscarded,
    ev.SavepointDiscardFailed,
)


@dataclass(frozen=True, slots=True)
class Line:
    """One line. `at_ms` is in ms since the epoch.

    `trouble`: somebody should look at it. `restart`: it is about a failure or a restart. `waits`: the job waits.
    `detail`: it is one of many.
    """

    at_ms: int
    text: str
    checkpoint: CheckpointId | None = None
    attempt: AttemptNumber | None = None
    trouble: bool = False
    restart: bool = False
    waits: bool = False
    detail: bool = False


class Narrator:
    """Of one coordinator, from a state on. `details`: whether it makes lines that are details."""

    def __init__(self, state: CoordinatorState, details: bool = False) -> None:
        self.details = details
        self._over = state.statistics.completed + state.statistics.failed
        self._deployed_at_ms: dict[AttemptNumber, int] = {}
        self._failed_at_ms: int | None = None

    def tell(
        self, event: ev.CoordinatorEvent, instructions: Sequence[do.CoordinatorInstruction], state: CoordinatorState
    ) -> list[Line]:
        """Lines about an event that the machine has taken in, what follows from it, and the state afterwards."""
        lines = [*self._of_event(event, state)]
        lines += self._of_checkpoints(event.at_ms, state)
        for instruction in instructions:
            lines += self._of_instruction(event, instruction, state)
        return lines

    def _of_event(self, event: ev.CoordinatorEvent, state: CoordinatorState) -> Iterator[Line]:
        at_ms = event.at_ms
        number, attempt = getattr(event, "checkpoint_id", None), getattr(event, "attempt", None)
        match event:
            case ev.JobSubmitted(spec=spec):
                start = "It starts afresh" if spec.restore is None else f"It starts from {spec.restore.pointer}"
                how = "1 task" if len(spec.tasks) == 1 else f"{len(spec.tasks)} tasks"
                yield Line(at_ms, f"Job {spec.job_name} ({spec.job_id}) was submitted, {how}. {start}")
            case ev.CoordinatorStarted(generation=generation) if generation > 1:
                yield Line(at_ms, f"Coordinator generation {generation} has taken over", restart=True)
            case ev.CheckpointAcknowledged(task=task, checkpoint_id=checkpoint) if self.details:
                pending = state.pending.get(checkpoint)
                measured = None if pending is None else pending.subtasks.get(task)
                yield Line(at_ms, _acknowledged(task, checkpoint, measured), checkpoint, attempt, detail=True)
            case ev.CheckpointDeclined(task=task, checkpoint_id=checkpoint, message=message):
                text = f"Checkpoint {checkpoint} was declined by {task}: {message}"
                yield Line(at_ms, text, checkpoint, attempt, trouble=True)
            case ev.TaskFailed():
                self._failed_at_ms = at_ms if self._failed_at_ms is None else self._failed_at_ms
                yield Line(at_ms, _sentence(event), attempt=attempt, trouble=True, restart=True)
            case ev.ProcessGivenUp():
                yield Line(at_ms, _sentence(event), trouble=True, restart=True)
            case _ if isinstance(event, _TROUBLE):
                about_start = isinstance(event, ev.CheckpointDamaged | ev.HookRestoreFailed | ev.TablesNotTakenBack)
                yield Line(at_ms, _sentence(event), number, attempt, trouble=True, restart=about_start)
            case _ if isinstance(event, _NEWS):
                yield Line(at_ms, _sentence(event), number, attempt, restart=isinstance(event, ev.TablesTakenBack))
            case _ if isinstance(event, _DETAILS) and self.details:
                yield Line(at_ms, _sentence(event), number, attempt, detail=True)

    def _of_checkpoints(self, at_ms: int, state: CoordinatorState) -> Iterator[Line]:
        """Checkpoints that are over since the last event."""
        over = state.statistics.completed + state.statistics.failed
        new, self._over = over - self._over, over
        for record in state.statistics.history[len(state.statistics.history) - new :] if new else ():
            yield Line(at_ms, _ended(record), record.checkpoint_id, trouble=record.reason is not None)

    def _of_instruction(
        self, event: ev.CoordinatorEvent, instruction: do.CoordinatorInstruction, state: CoordinatorState
    ) -> Iterator[Line]:
        at_ms = event.at_ms
        match instruction:
            case do.DeployAttempt(attempt, restore, tasks):
                self._deployed_at_ms = {attempt: at_ms}
                start = "afresh" if restore is None else f"from {restore.pointer}"
                yield Line(
                    at_ms, f"Deploying attempt {attempt} {start}: {_of_job(tasks, state)}", None, attempt, restart=True
                )
            case do.StartTasks(attempt):
                yield Line(at_ms, self._running(at_ms, attempt), attempt=attempt, restart=True)
            case do.TriggerCheckpoint(attempt, checkpoint, _, tasks) if checkpoint in state.pending:
                text = _triggered(state.pending[checkpoint], tasks, event)
                yield Line(at_ms, text, checkpoint, attempt, detail=True)
            case do.SetTimer(timer, due_at_ms) if timer.startswith("restart:"):
                tasks = None if len(state.down) in (0, len(_tasks(state))) else tuple(state.down)
                wait = f"in {seconds_text(due_at_ms - at_ms)}" if due_at_ms > at_ms else "at once"
                text = f"Restarting {_of_job(tasks, state)} as attempt {timer.partition(':')[2]} {wait}"
                yield Line(at_ms, text, restart=True, waits=True)
            case do.KillProcess(process):
                yield Line(at_ms, f"Process {process} is ended", restart=True)
            case do.TakeTablesBack(attempt, checkpoint, reason):
                text = f"{reason}: output tables are taken back to checkpoint {checkpoint}"
                yield Line(at_ms, text, checkpoint, attempt, trouble=True, restart=True)
            case do.EndJob(status, reason):
                why = "" if reason is None else f": {reason}"
                end = "stopped, with a savepoint" if status == "suspended" else status
                yield Line(at_ms, f"The job is {end}{why}", trouble=status == "failed", restart=status == "failed")

    def _running(self, at_ms: int, attempt: AttemptNumber) -> str:
        parts = []
        if (deployed := self._deployed_at_ms.get(attempt)) is not None:
            parts.append(f"{seconds_text(at_ms - deployed)} after its deployment")
        if self._failed_at_ms is not None:
            parts.append(f"{seconds_text(at_ms - self._failed_at_ms)} after the failure")
        self._failed_at_ms = None
        return ", ".join([f"Attempt {attempt} is running", *parts])


def seconds_text(duration_ms: int) -> str:
    """A duration as people read it: `84 ms`, `1.2 s`, `3 min 20 s`."""
    if duration_ms < 1_000:
        return f"{max(0, duration_ms)} ms"
    if duration_ms < 60_000:
        return f"{duration_ms / 1_000:.1f} s"
    return f"{duration_ms // 60_000} min {duration_ms // 1_000 % 60} s"


def bytes_text(size_bytes: int) -> str:
    """A size as people read it: `812 B`, `1.2 MB`."""
    if size_bytes < 1_000:
        return f"{size_bytes} B"
    for unit, size in (("kB", 10**3), ("MB", 10**6)):
        if size_bytes < 1_000 * size:
            return f"{size_bytes / size:.1f} {unit}"
    return f"{size_bytes / 10**9:.1f} GB"


def _sentence(event: object) -> str:
    words = in_words(event)
    return words[:1].upper() + words[1:]


def _tasks(state: CoordinatorState) -> tuple[TaskId, ...]:
    return () if state.spec is None else state.spec.tasks


def _of_job(tasks: tuple[TaskId, ...] | None, state: CoordinatorState) -> str:
    every = _tasks(state)
    if tasks is None or len(tasks) == len(every):
        return "its task" if len(every) == 1 else f"all {len(every)} tasks"
    named = ", ".join(map(str, tasks[:_NAMED_TASKS_MAX]))
    more = f" and {len(tasks) - _NAMED_TASKS_MAX} more" if len(tasks) > _NAMED_TASKS_MAX else ""
    return f"{len(tasks)} of {len(every)} tasks ({named}{more})"


def _triggered(pending: PendingCheckpoint, tasks: tuple[TaskId, ...], event: ev.CoordinatorEvent) -> str:
    periodic = isinstance(event, ev.TimerFired) and event.timer.startswith("periodic:")
    why = "periodic" if periodic else "asked for" if pending.requests else "final" if not tasks else "due"
    base = "" if pending.base is None else f", built on checkpoint {pending.base}"
    kind = pending.properties.kind.words
    return f"Triggering {kind} {pending.checkpoint_id} of attempt {pending.attempt} ({why}{base})"


def _ended(record: CheckpointRecord) -> str:
    kind = record.kind.words
    if record.reason is not None:
        message = record.message or record.reason.value
        parts = f"{record.acknowledged} of {record.tasks} tasks had acknowledged"
        kind = kind[:1].upper() + kind[1:]
        after = f"failed after {seconds_text(record.duration_ms)}: {message}"
        return f"{kind} {record.checkpoint_id} {after} ({parts})"
    size = bytes_text(record.state_bytes)
    if 0 < record.incremental_bytes < record.state_bytes:
        size = f"{size}, {bytes_text(record.incremental_bytes)} of it new"
    flight = f", {bytes_text(record.in_flight_bytes)} in flight" if record.in_flight_bytes else ""
    where = "" if record.path is None else f" at {record.path}"
    return f"Completed {kind} {record.checkpoint_id} ({size}{flight}, {seconds_text(record.duration_ms)}){where}"


def _acknowledged(task: TaskId, checkpoint: CheckpointId, measured: SubtaskStatistics | None) -> str:
    if measured is None:
        return f"{task} acknowledged checkpoint {checkpoint}"
    m = measured.metrics
    phases = f"start delay {m.start_delay_ms}, alignment {m.alignment_ms}, sync {m.sync_ms}, async {m.async_ms} ms"
    size = bytes_text(measured.state_bytes)
    return (
        f"{task} acknowledged checkpoint {checkpoint} after {seconds_text(measured.end_to_end_ms)} ({size}; {phases})"
    )
