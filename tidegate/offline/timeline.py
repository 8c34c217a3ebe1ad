"""`read_timeline`: what the coordinator of a job has decided, line by line, out of its event log.

The log holds events; decisions follow from them. So the events are handed to a `CoordinatorMachine`, as a coordinator
that takes over does it, and a `Narrator` says what follows. Rules:
- Old entries may have been folded into a snapshot and cut. Then the timeline begins with the oldest snapshot behind
  which the log is whole.
- An entry that cannot be read leaves a hole, and so does an event that the machine refuses. What came before the
  snapshot, or behind a hole, is told by its events alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.actors.coordinator.coordinator_machine import CoordinatorMachine
from tidegate.actors.coordinator.messages.words import in_words
from tidegate.actors.coordinator.narrator import Line, Narrator
from tidegate.actors.coordinator.state.coordinator_state import CoordinatorState
from tidegate.actors.hosts.coordinator.log_writer import StoredFold
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


def read_timeline(log: EventLog, job_id: JobId) -> Timeline:
    """The timeline of a job, with all details, oldest first. Raises StorageError."""
    history = EventHistory.read(log, job_id)
    found = {index for index, *_ in history.entries}
    first = max(found, default=-1) + 1
    while first - 1 in found:
        first -= 1
    start, state, notes = 0, CoordinatorState(), []
    whole = True
    if first > 0:
        snapshot = log.oldest_snapshot(first)
        if snapshot is None:
            notes.append("the log has no snapshot of what was cut from it: what was decided is not known")
            whole = False
        else:
            start, fold = snapshot
            assert isinstance(fold, StoredFold)
            state = decode(fold.state)
            notes.append("older events were folded into a snapshot, and cut")
    machine = CoordinatorMachine(state)
    narrator = Narrator(state, details=True)
    lines: list[TimelineLine] = []
    for index, entry, events, error in history.entries:
        if entry is None:
            notes.append(f"{error}: what was decided from there on is not known")
            whole = False
        for logged in events:
            told = [_alone(logged)]
            if whole and index >= start:
                try:
                    told = narrator.tell(logged.event, machine.handle(logged.event), machine.state)
                except TidegateError as error:
                    notes.append(
                        f"event {logged.number} does not follow from those before it, as this version sees it: {error}"
                    )
                    whole = False
            lines += (TimelineLine(logged.number, line) for line in told)
    return Timeline(job_id, tuple(lines), machine.state if whole else None, tuple(notes), history.unreadable)


def _alone(logged: LoggedEvent) -> Line:
    """An event of which nobody knows what followed from it."""
    words, event = in_words(logged.event), logged.event
    text = words[:1].upper() + words[1:]
    return Line(logged.at_ms, text, getattr(event, "checkpoint_id", None), getattr(event, "attempt", None))
