"""`Chronicle`: the recent past of a job, for pages that show it: checkpoints, failures, restarts, decisions.

A coordinator's host hands it what the machine has taken in; a coordinator that takes over, what it replays. Nothing is
decided by it. Rules:
- It is bounded: so many of each kind, and texts are cut. What is older stands in the event log (`tidegate events`).
- Other threads read it. So what it holds is immutable, and replaced as a whole.
- Of checkpoints that are over it keeps what each subtask has measured, as long as these are not too many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tidegate.actors.coordinator.messages import events as ev
from tidegate.actors.coordinator.messages import instructions as do
from tidegate.actors.coordinator.narrator import Line, Narrator
from tidegate.actors.coordinator.state.checkpoint_statistics import CheckpointRecord, SubtaskStatistics
from tidegate.actors.coordinator.state.coordinator_state import CoordinatorState, JobStatus, PendingCheckpoint
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.metadata import SavepointFormat
from tidegate.storage.ids import AttemptNumber, CheckpointId

CHECKPOINTS_MAX = 60
SUBTASKS_MAX = 5_000
"""Subtasks of checkpoints that are over, all together."""
FAILURES_MAX = RECOVERIES_MAX = 20
LINES_MAX = 200
LINE_CHARACTERS_MAX = 500


@dataclass(frozen=True, slots=True)
class EndedCheckpoint:
    """A checkpoint that is over. `number`: how many of this coordinator's were over with it.

    `subtasks`: those that acknowledged; none where they are not kept. `savepoint_format`: None where nobody knows it.
    """

    number: int
    record: CheckpointRecord
    subtasks: Mapping[TaskId, SubtaskStatistics]
    savepoint_format: SavepointFormat | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A task that has failed."""

    at_ms: int
    attempt: AttemptNumber
    task: TaskId
    reason: str


@dataclass(frozen=True, slots=True)
class Recovery:
    """A deployment after the first one. Times in ms since the epoch, None for what has not happened yet.

    `tasks`: how many were deployed, None for all. `failure`: what has led to it, None where no task had failed.
    """

    attempt: AttemptNumber
    tasks: int | None
    checkpoint: CheckpointId | None
    failure: Failure | None
    deployed_at_ms: int
    running_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Past:
    """What has happened, oldest first. `version` grows with every change of it."""

    version: int = 0
    lines: tuple[Line, ...] = ()
    failures: tuple[Failure, ...] = ()
    recoveries: tuple[Recovery, ...] = ()
    since_ms: tuple[tuple[JobStatus, int], ...] = ()
    """When the job has entered each status last."""


class Chronicle:
    """That of one coordinator, from a state on; without one, from what `begin` is given."""

    def __init__(self, state: CoordinatorState | None = None) -> None:
        self.begin(CoordinatorState() if state is None else state)

    def begin(self, state: CoordinatorState) -> None:
        """Begin anew, with what a coordinator remembers that nobody has told of. Little is known of subtasks."""
        self.past = Past()
        self.checkpoints: tuple[EndedCheckpoint, ...] = ()
        """Those that are over, oldest first."""
        self._ended = 0
        self._pending: dict[CheckpointId, PendingCheckpoint] = state.under_way
        self._status = state.status
        self._failed: Failure | None = None
        """The first failure since all tasks ran."""
        self._narrator, newest = Narrator(state), state.statistics.latest_completed
        for record in state.statistics.history:
            own = newest is not None and record.checkpoint_id == newest.checkpoint_id
            self._over(record, state.statistics.subtasks if own else {})
        if state.running_since_ms is not None:
            self._change(since_ms=((state.status, state.running_since_ms),))

    def replayed(
        self, event: ev.CoordinatorEvent, instructions: Sequence[do.CoordinatorInstruction], state: CoordinatorState
    ) -> None:
        """As `take_in`, of an event that is in the log already: nobody else makes lines of it."""
        self.take_in(event, instructions, self._narrator.tell(event, instructions, state), state)

    def take_in(
        self,
        event: ev.CoordinatorEvent,
        instructions: Sequence[do.CoordinatorInstruction],
        lines: Sequence[Line],
        state: CoordinatorState,
    ) -> None:
        """An event that the machine has taken in, what follows from it, and the state afterwards."""
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
        """When the first task has failed since all of them ran; None if none has."""
        return None if self._failed is None else self._failed.at_ms

    def ended_after(self, number: int) -> tuple[EndedCheckpoint, ...]:
        """Checkpoints that are over, of those the ones that came after this number."""
        return tuple(ended for ended in self.checkpoints if ended.number > number)

    def _of_checkpoints(self, state: CoordinatorState) -> set[CheckpointId]:
        """Some are over, or were begun. Returns savepoints that are over."""
        before, self._pending = self._pending, state.under_way
        statistics, over = state.statistics, before.keys() - self._pending.keys()
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
    """All but details, and checkpoints that went well: of those there may be many a second."""
    return not line.detail and (line.checkpoint is None or line.trouble or line.checkpoint in savepoints)


def _cut(text: str) -> str:
    return text if len(text) <= LINE_CHARACTERS_MAX else f"{text[: LINE_CHARACTERS_MAX - 1]}…"
