"""`TimelineReader`: the decisions of a job's coordinator, one line each, replayed from its event log.

The log stores events; decisions follow from them. The reader therefore passes the events to a `CoordinatorMachine`,
like a coordinator that takes over, and a `DecisionLog` describes the decisions. Rules:

- Old entries may have been folded into a snapshot and cut. Then the timeline begins with the oldest snapshot after
  which the log is complete.
- An entry that cannot be read leaves a gap, and so does an event that the machine refuses. Before the snapshot, and
  after a gap, only the events themselves are described.
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
    """A line of text in a job's timeline, and the number of the event that it describes."""

    number: EventId
    line: Line


@dataclass(frozen=True, slots=True)
class Timeline:
    """The existing history of one job. `state` is the coordinator's state at its end, or None if it is unknown."""

    job_id: JobId
    lines: tuple[TimelineLine, ...]
    state: CoordinatorState | None
    notes: tuple[str, ...]
    """Descriptions of the gaps in the history, with their reasons."""
    unreadable: int


class TimelineReader:
    """Reads the timeline of one job, with all details.

    Each call of `read` returns the lines since the previous call.
    """

    def __init__(self, log: EventLog, job_id: JobId) -> None:
        self._log = log
        self._job_id = job_id
        self._next = 0
        """Index of the first entry of the log that was not read yet."""
        self._start = 0
        """Index of the first entry for which decisions are known."""
        self._begun = False
        self._whole = True
        self._unreadable = 0
        self._notes: list[str] = []
        self._machine = CoordinatorMachine(CoordinatorState())
        self._decision_log = DecisionLog(CoordinatorState(), details=True)

    def read(self) -> list[TimelineLine]:
        """Returns the lines of events that were logged since the last call, oldest first. Raises StorageError."""
        history = EventHistory.read(self._log, self._job_id, self._next)
        if not self._begun:
            self._begin(history)
        self._unreadable += history.unreadable
        lines: list[TimelineLine] = []
        for index, entry, events, error in history.entries:
            self._next = index + 1
            if entry is None:
                self._lose(f"{error}: decisions from there on are unknown")
            for logged in events:
                lines += (TimelineLine(logged.number, line) for line in self._lines_of(index, logged))
        return lines

    def timeline(self, lines: tuple[TimelineLine, ...] = ()) -> Timeline:
        """Returns the timeline with these lines, and the coordinator's state after the last call of `read`."""
        state = self._machine.state if self._whole else None
        return Timeline(self._job_id, lines, state, tuple(self._notes), self._unreadable)

    def _begin(self, history: EventHistory) -> None:
        self._begun = bool(history.entries)
        if not self._begun:
            return
        start = fold_start(self._log, history)
        if start is None:
            self._lose("the log has no snapshot of the entries that were cut from it: decisions are unknown")
            return
        self._start, state = start
        if self._start > 0:
            self._machine, self._decision_log = CoordinatorMachine(state), DecisionLog(state, details=True)
            self._notes.append("older events were folded into a snapshot, and cut")

    def _lines_of(self, index: int, logged: LoggedEvent) -> list[Line]:
        if self._whole and index >= self._start:
            try:
                instructions = self._machine.handle(logged.event)
                return self._decision_log.lines_about(logged.event, instructions, self._machine.state)
            except TidegateError as error:
                self._lose(
                    f"event {logged.number} does not follow from earlier events according to this version: {error}"
                )
        return [line_alone(logged.event)]

    def _lose(self, note: str) -> None:
        """Adds a note to the timeline that decisions are unknown from this point on."""
        self._notes.append(note)
        self._whole = False


def fold_start(log: EventLog, history: EventHistory) -> tuple[int, CoordinatorState] | None:
    """Returns the index of the first entry from which the state can be computed, and the state before it.

    If all cut entries were kept, that is the first entry and an empty state. Otherwise it is the oldest snapshot after
    which no entry is missing. Returns None if there is none. Raises StorageError.
    """
    first = first_whole_entry(history)
    if first <= 0:
        return 0, CoordinatorState()
    snapshot = log.oldest_snapshot(first)
    if snapshot is None:
        return None
    index, fold = snapshot
    assert isinstance(fold, StoredFold)
    state: CoordinatorState = decode(fold.state)
    return index, state


def first_whole_entry(history: EventHistory) -> int:
    """Returns the index of the first entry after which no entry is missing."""
    found = {index for index, *_ in history.entries}
    first = max(found, default=-1) + 1
    while first - 1 in found:
        first -= 1
    return first


def read_timeline(log: EventLog, job_id: JobId) -> Timeline:
    """Returns the timeline of a job, with all details, oldest first. Raises StorageError."""
    reader = TimelineReader(log, job_id)
    return reader.timeline(tuple(reader.read()))
