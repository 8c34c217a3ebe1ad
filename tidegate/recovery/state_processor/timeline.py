"""`TimelineReader`: what the coordinator of a job has decided, line by line, out of its event log.

The log holds events; decisions follow from them. So the events are handed to a `CoordinatorMachine`, as a coordinator
that takes over does it, and a `DecisionLog` says what follows. Rules:
- Old entries may have been folded into a snapshot and cut. Then the timeline begins with the oldest snapshot behind
  which the log is whole.
- An entry that cannot be read leaves a hole, and so does an event that the machine refuses. What came before the
  snapshot, or behind a hole, is told by its events alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.actors.coordinator.coordinator_machine import CoordinatorMachine
from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.coordinator.job_history import DecisionLog, Line, line_alone
from tidegate.actors.drivers.event_log_writer import StoredFold
from tidegate.recovery.event_history import EventHistory, LoggedEvent
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.codec import decode
from tidegate.storage.errors import TidegateError
from tidegate.storage.ids import EventId, JobId


@dataclass(frozen=True, slots=True)
class TimelineLine:
    """A line, and the number of the event that it follows from. `number` is None if nobody can tell it."""

    number: EventId | None
    line: Line


@dataclass(frozen=True, slots=True)
class Timeline:
    """What is left of one job's history. `state` is that at its end; None if it is not known."""

    job_id: JobId
    lines: tuple[TimelineLine, ...]
    state: CoordinatorState | None
    notes: tuple[str, ...]
    """What is missing, and why."""
    unreadable: int


class TimelineReader:
    """The timeline of one job, with all details: each call of `read` has the lines since the one before."""

    def __init__(self, log: EventLog, job_id: JobId) -> None:
        self._log = log
        self._job_id = job_id
        self._next = 0
        """The first entry of the log that was not read."""
        self._start = 0
        """The first one of which it is known what was decided."""
        self._begun = False
        self._whole = True
        self._unreadable = 0
        self._notes: list[str] = []
        self._machine = CoordinatorMachine(CoordinatorState())
        self._decision_log = DecisionLog(CoordinatorState(), details=True)

    def read(self) -> list[TimelineLine]:
        """The new lines, oldest first. Raises StorageError."""
        history = EventHistory.read(self._log, self._job_id, self._next)
        if not self._begun:
            self._begin(history)
        self._unreadable += history.unreadable
        lines: list[TimelineLine] = []
        for index, entry, events, error in history.entries:
            self._next = index + 1
            if entry is None:
                self._lose(f"{error}: what was decided from there on is not known")
            for logged in events:
                lines += (TimelineLine(logged.number, line) for line in self._told(index, logged))
        return lines

    def timeline(self, lines: tuple[TimelineLine, ...] = ()) -> Timeline:
        """What is known after the last call of `read`, with these lines."""
        state = self._machine.state if self._whole else None
        return Timeline(self._job_id, lines, state, tuple(self._notes), self._unreadable)

    def _begin(self, history: EventHistory) -> None:
        self._begun = bool(history.entries)
        if not self._begun:
            return
        start = fold_start(self._log, history)
        if start is None:
            self._lose("the log has no snapshot of what was cut from it: what was decided is not known")
            return
        self._start, state = start
        if self._start > 0:
            self._machine, self._decision_log = CoordinatorMachine(state), DecisionLog(state, details=True)
            self._notes.append("older events were folded into a snapshot, and cut")

    def _told(self, index: int, logged: LoggedEvent) -> list[Line]:
        if self._whole and index >= self._start:
            try:
                instructions = self._machine.handle(logged.event)
                return self._decision_log.lines_about(logged.event, instructions, self._machine.state)
            except TidegateError as error:
                self._lose(
                    f"event {logged.number} does not follow from those before it, as this version sees it: {error}"
                )
        return [line_alone(logged.event)]

    def _lose(self, note: str) -> None:
        """From here on it is not known what was decided."""
        self._notes.append(note)
        self._whole = False


def fold_start(log: EventLog, history: EventHistory) -> tuple[int, CoordinatorState] | None:
    """Returns from which entry on the state can be folded, and the state before it.

    Where nothing was cut that is not kept, that is the first entry and an empty state. Else it is the oldest snapshot
    behind which the entries are contiguous; None if there is none. Raises StorageError.
    """
    found = {index for index, *_ in history.entries}
    first = max(found, default=-1) + 1
    while first - 1 in found:
        first -= 1
    if first <= 0:
        return 0, CoordinatorState()
    snapshot = log.oldest_snapshot(first)
    if snapshot is None:
        return None
    index, fold = snapshot
    assert isinstance(fold, StoredFold)
    state: CoordinatorState = decode(fold.state)
    return index, state


def read_timeline(log: EventLog, job_id: JobId) -> Timeline:
    """The timeline of a job, with all details, oldest first. Raises StorageError."""
    reader = TimelineReader(log, job_id)
    return reader.timeline(tuple(reader.read()))
