"""The decisions of a coordinator as text for people: `DecisionLog` writes the lines, `JobHistory` stores the recent
past of the job.

`CoordinatorDriver` logs the lines of `DecisionLog` once their events are in the event log. `tidegate events` makes the
same lines from the event log afterwards (`tidegate/recovery/state_processor/timeline.py`).

`JobHistory` stores recent checkpoints, failures, restarts and decisions for the pages that show them. The driver adds
each event that the machine has handled, and a new coordinator adds the events that it replays. Neither class decides
anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.checkpoint_statistics import CheckpointRecord, SubtaskStatistics
from tidegate.actors.coordinator.coordinator_state import CoordinatorState, PendingCheckpoint
from tidegate.actors.coordinator.events import Importance
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.metadata import SavepointFormat
from tidegate.storage.ids import AttemptNumber, CheckpointId

CHECKPOINTS_MAX = 60
SUBTASKS_MAX = 5_000
"""Limit of the statistics of subtasks that are stored, summed over all finished checkpoints."""
FAILURES_MAX = 20
RECOVERIES_MAX = 20
LINES_MAX = 200
LINE_CHARACTERS_MAX = 500
_NAMED_TASKS_MAX = 4


@dataclass(frozen=True, slots=True)
class Line:
    """One line of text about a decision, or about a fact that led to one. `at_ms` is in ms since the epoch.

    It contains no values of rows. Texts of errors come from the events, which limit their length.
    """

    at_ms: int
    text: str
    checkpoint: CheckpointId | None = None
    attempt: AttemptNumber | None = None
    trouble: bool = False
    """True if the line reports a problem that a person should look at."""
    restart: bool = False
    """True if the line is about a failure or a restart."""
    waits: bool = False
    """True if the line reports that the job waits for a restart."""
    detail: bool = False
    """True if there are many such lines: every checkpoint causes one for every task."""


class DecisionLog:
    """Makes the lines of text about the decisions of one coordinator.

    `state`: the state of the coordinator before the first event. `details`: also make the lines that each task causes
    at each checkpoint.
    """

    def __init__(self, state: CoordinatorState, details: bool = False) -> None:
        self.details = details
        self._over = state.statistics.completed + state.statistics.failed
        self._deployed_at_ms: dict[AttemptNumber, int] = {}
        self._failed_at_ms: int | None = None

    def lines_about(
        self, event: ev.CoordinatorEvent, instructions: Sequence[do.CoordinatorInstruction], state: CoordinatorState
    ) -> list[Line]:
        """Returns the lines about an event that the machine has handled.

        `instructions` are the instructions that followed from the event, and `state` is the state of the coordinator
        after the event.
        """
        lines = [*self._of_event(event, state)]
        lines += self._of_checkpoints(event.at_ms, state)
        for instruction in instructions:
            lines += self._of_instruction(event, instruction, state)
        return lines

    def _of_event(self, event: ev.CoordinatorEvent, state: CoordinatorState) -> Iterator[Line]:
        at_ms = event.at_ms
        match event:
            case ev.JobSubmitted(spec=spec):
                start = "It starts afresh" if spec.restore is None else f"It starts from {spec.restore.pointer}"
                how = "1 task" if len(spec.tasks) == 1 else f"{len(spec.tasks)} tasks"
                yield Line(at_ms, f"Job {spec.job_name} ({spec.job_id}) was submitted, {how}. {start}")
                return
            case ev.CoordinatorStarted(generation=generation) if generation > 1:
                yield Line(at_ms, f"Coordinator generation {generation} has taken over", restart=True)
                return
            case ev.CheckpointAcknowledged(checkpoint_id=checkpoint) if self.details:
                pending = state.pending.get(checkpoint)
                measured = None if pending is None else pending.subtasks.get(event.task)
                yield Line(at_ms, _acknowledged(event, measured), checkpoint, event.attempt, detail=True)
                return
            case ev.TaskFailed() if self._failed_at_ms is None:
                self._failed_at_ms = at_ms
        detail = event.importance is Importance.DETAIL
        if event.importance is not Importance.SILENT and (self.details or not detail):
            yield line_alone(event)

    def _of_checkpoints(self, at_ms: int, state: CoordinatorState) -> Iterator[Line]:
        """Yields a log line for each checkpoint that has ended since the previous event."""
        over = state.statistics.completed + state.statistics.failed
        new = over - self._over
        self._over = over
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


def line_alone(event: ev.CoordinatorEvent) -> Line:
    """Returns the line that describes an event, without lines about the decisions that followed."""
    text = event.describe()
    return Line(
        event.at_ms,
        text[:1].upper() + text[1:],
        getattr(event, "checkpoint_id", None),
        getattr(event, "attempt", None),
        trouble=event.importance is Importance.TROUBLE,
        restart=event.about_restart,
        detail=event.importance is Importance.DETAIL,
    )


@dataclass(frozen=True, slots=True)
class EndedCheckpoint:
    """A checkpoint that has completed or failed. `number` counts the ended checkpoints of this coordinator, from 1.

    `subtasks` has the statistics of the subtasks that acknowledged it, or is empty if they are not stored.
    `savepoint_format` is None if unknown.
    """

    number: int
    record: CheckpointRecord
    subtasks: Mapping[TaskId, SubtaskStatistics]
    savepoint_format: SavepointFormat | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a task, at a time in ms since the epoch."""

    at_ms: int
    attempt: AttemptNumber
    task: TaskId
    reason: str


@dataclass(frozen=True, slots=True)
class Recovery:
    """A deployment after a failure or restart. Times are in ms since the epoch, or None if not reached yet.

    `tasks` is the number of deployed tasks, or None for all. `failure` is the cause, or None if no task had failed.
    """

    attempt: AttemptNumber
    tasks: int | None
    checkpoint: CheckpointId | None
    failure: Failure | None
    deployed_at_ms: int
    running_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Past:
    """The recent past of a job: its latest events, oldest first. `version` increases with every change."""

    version: int = 0
    lines: tuple[Line, ...] = ()
    failures: tuple[Failure, ...] = ()
    recoveries: tuple[Recovery, ...] = ()
    since_ms: tuple[tuple[JobStatus, int], ...] = ()
    """Pairs of a job status and the time, in ms since the epoch, at which the job last changed to it."""


class JobHistory:
    """The recent past of one job. `state`: the state of its coordinator at the beginning, or None for a new job."""

    def __init__(self, state: CoordinatorState | None = None) -> None:
        self.reset(CoordinatorState() if state is None else state)

    def reset(self, state: CoordinatorState) -> None:
        """Deletes the history, and starts again from a coordinator's state, which has few details of subtasks."""
        self.past = Past()
        self.checkpoints: tuple[EndedCheckpoint, ...] = ()
        """Checkpoints that have ended, oldest first."""
        self._ended = 0
        self._pending: dict[CheckpointId, PendingCheckpoint] = state.under_way
        self._status = state.status
        self._failed: Failure | None = None
        """The first failure since all tasks ran."""
        self._decision_log = DecisionLog(state)
        newest = state.statistics.latest_completed
        for record in state.statistics.history:
            own = newest is not None and record.checkpoint_id == newest.checkpoint_id
            self._over(record, state.statistics.subtasks if own else {})
        if state.running_since_ms is not None:
            self._change(since_ms=((state.status, state.running_since_ms),))

    def replay(
        self, event: ev.CoordinatorEvent, instructions: Sequence[do.CoordinatorInstruction], state: CoordinatorState
    ) -> None:
        """Adds an event from the event log with `add`, and makes the lines of text about the event."""
        self.add(event, instructions, self._decision_log.lines_about(event, instructions, state), state)

    def add(
        self,
        event: ev.CoordinatorEvent,
        instructions: Sequence[do.CoordinatorInstruction],
        lines: Sequence[Line],
        state: CoordinatorState,
    ) -> None:
        """Adds an event that the machine has handled, the instructions that followed, and the state afterwards."""
        savepoints: set[CheckpointId] = set()
        if self._pending.keys() != state.pending.keys() | state.copies.keys():
            savepoints = self._of_checkpoints(state)
        if isinstance(event, ev.TaskFailed):
            self._of_failure(Failure(event.at_ms, event.attempt, event.task, event.reason))
        for instruction in instructions:
            match instruction:
                case do.DeployAttempt(attempt, restore, tasks) if attempt > 0:
                    checkpoint = None if restore is None else restore.checkpoint_id
                    count = None if tasks is None else len(tasks)
                    self._of_recovery(Recovery(attempt, count, checkpoint, self._failed, event.at_ms))
                case do.StartTasks(attempt):
                    self._runs(attempt, event.at_ms)
        if state.status is not self._status:
            self._status = state.status
            since = {**dict(self.past.since_ms), state.status: event.at_ms}
            self._change(since_ms=tuple(since.items()))
        told = [line for line in lines if _is_told(line, savepoints)]
        if told:
            cut = [replace(line, text=_cut(line.text)) for line in told]
            self._change(lines=(*self.past.lines, *cut)[-LINES_MAX:])

    @property
    def down_since_ms(self) -> int | None:
        """Returns the time, in ms, at which a task first failed since all tasks ran, or None."""
        return None if self._failed is None else self._failed.at_ms

    def ended_after(self, number: int) -> tuple[EndedCheckpoint, ...]:
        """Returns the checkpoints that have ended and have a higher `EndedCheckpoint.number`."""
        return tuple(ended for ended in self.checkpoints if ended.number > number)

    def _of_checkpoints(self, state: CoordinatorState) -> set[CheckpointId]:
        """Stores the checkpoints that have ended since the previous event. Returns the ids of the savepoints
        among them.
        """
        before = self._pending
        self._pending = state.under_way
        statistics = state.statistics
        over = before.keys() - self._pending.keys()
        newest = (statistics.latest_completed, statistics.latest_failed)
        records = {r.checkpoint_id: r for r in (*statistics.history, *newest) if r and r.checkpoint_id in over}
        for checkpoint_id in sorted(records):
            pending = before[checkpoint_id]
            self._over(records[checkpoint_id], pending.subtasks, pending.properties.savepoint_format)
        return {number for number, record in records.items() if record.kind.is_savepoint}

    def _over(
        self,
        record: CheckpointRecord,
        subtasks: Mapping[TaskId, SubtaskStatistics],
        savepoint_format: SavepointFormat | None = None,
    ) -> None:
        self._ended += 1
        ended = EndedCheckpoint(self._ended, record, subtasks, savepoint_format)
        kept = [*self.checkpoints, ended][-CHECKPOINTS_MAX:]
        count = sum(len(ended.subtasks) for ended in kept)
        for index, ended in enumerate(kept[:-1]):
            if count <= SUBTASKS_MAX:
                break
            count -= len(ended.subtasks)
            kept[index] = replace(ended, subtasks={})
        self.checkpoints = tuple(kept)

    def _of_failure(self, failure: Failure) -> None:
        self._failed = self._failed or failure
        self._change(failures=(*self.past.failures, failure)[-FAILURES_MAX:])

    def _of_recovery(self, recovery: Recovery) -> None:
        self._change(recoveries=(*self.past.recoveries, recovery)[-RECOVERIES_MAX:])

    def _runs(self, attempt: AttemptNumber, at_ms: int) -> None:
        self._failed = None
        last = self.past.recoveries[-1:]
        if last and last[0].attempt == attempt:
            self._change(recoveries=(*self.past.recoveries[:-1], replace(last[0], running_at_ms=at_ms)))

    def _change(self, **changes: object) -> None:
        self.past = replace(self.past, version=self.past.version + 1, **changes)  # type: ignore[arg-type]


def _is_told(line: Line, savepoints: set[CheckpointId]) -> bool:
    """Returns whether `JobHistory` stores a line of text.

    Details and lines about successful checkpoints are not stored, because they may be frequent.
    """
    return not line.detail and (line.checkpoint is None or line.trouble or line.checkpoint in savepoints)


def _cut(text: str) -> str:
    return text if len(text) <= LINE_CHARACTERS_MAX else f"{text[: LINE_CHARACTERS_MAX - 1]}…"


def seconds_text(duration_ms: int) -> str:
    """Returns a duration in a readable form: `84 ms`, `1.2 s`, `3 min 20 s`."""
    if duration_ms < 1_000:
        return f"{max(0, duration_ms)} ms"
    if duration_ms < 60_000:
        return f"{duration_ms / 1_000:.1f} s"
    return f"{duration_ms // 60_000} min {duration_ms // 1_000 % 60} s"


def bytes_text(size_bytes: int) -> str:
    """Returns a size in a readable form: `812 B`, `1.2 MB`."""
    if size_bytes < 1_000:
        return f"{size_bytes} B"
    for unit, size in (("kB", 10**3), ("MB", 10**6)):
        if size_bytes < 1_000 * size:
            return f"{size_bytes / size:.1f} {unit}"
    return f"{size_bytes / 10**9:.1f} GB"


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


def _acknowledged(event: ev.CheckpointAcknowledged, measured: SubtaskStatistics | None) -> str:
    if measured is None:
        return f"{event.task} acknowledged checkpoint {event.checkpoint_id}"
    m = measured.metrics
    phases = f"start delay {m.start_delay_ms}, alignment {m.alignment_ms}, sync {m.sync_ms}, async {m.async_ms} ms"
    size = bytes_text(measured.state_bytes)
    return (
        f"{event.task} acknowledged checkpoint {event.checkpoint_id} after "
        f"{seconds_text(measured.end_to_end_ms)} ({size}; {phases})"
    )
