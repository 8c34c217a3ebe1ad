"""`EventHistory`: the events in the log of one job with their numbers, and the causes that led to each of them.

It does not interpret events; the modules that print them do. Rules:

- An entry that cannot be read is reported as unreadable. All other entries are included, also entries that were cut
  from the log and kept.
- A chain of causes begins with an event that has no cause, or where the log was cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tidegate.storage.checkpoints.event_log import RACES_MAX, EventLog, LogEntry
from tidegate.storage.errors import CodecError, ConfigurationError, CorruptionError, NotFoundError
from tidegate.storage.ids import EventId, JobId


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """An event of the log, with its number and the number of the event that caused it, or None."""

    number: EventId
    event: Any
    logged_at_ms: int
    cause: EventId | None

    @property
    def at_ms(self) -> int:
        """Returns the time of the event, in ms since the epoch."""
        return int(getattr(self.event, "at_ms", self.logged_at_ms))


@dataclass(frozen=True, slots=True)
class Chain:
    """The events that led to an event, which is the last one.

    `cut` is the number of the cause of the first event if the log does not contain it, and `cut_why` is the reason.
    """

    events: tuple[LoggedEvent, ...]
    cut: EventId | None = None
    cut_why: str = ""


@dataclass
class EventHistory:
    """The existing entries of a log: (index, entry, its events, None), or (index, None, (), error text)."""

    job_id: JobId
    entries: list[tuple[int, LogEntry | None, tuple[LoggedEvent, ...], str | None]] = field(default_factory=list)

    @staticmethod
    def read(log: EventLog, job_id: JobId, from_index: int = 0) -> EventHistory:
        """Reads all entries from `from_index` on that still exist.

        If a running job cuts its log meanwhile, it starts again, up to `RACES_MAX` times. Raises StorageError.
        """
        for races in itertools.count(1):
            try:
                return EventHistory._read(log, job_id, from_index)
            except NotFoundError:
                if races == RACES_MAX:
                    raise
        raise AssertionError(
            "the loop over reads of the event history must return or raise; this is a bug in tidegate, please report it"
        )

    @staticmethod
    def _read(log: EventLog, job_id: JobId, from_index: int) -> EventHistory:
        history = EventHistory(job_id)
        for index, read in _readers(log, from_index):
            try:
                entry = read()
            except (CodecError, CorruptionError) as error:
                history.entries.append((index, None, (), str(error)))
                continue
            history.entries.append((index, entry, _events(entry), None))
        return history

    @property
    def unreadable(self) -> int:
        """Returns the number of entries that cannot be read."""
        return sum(entry is None for _, entry, _, _ in self.entries)

    def why(self, number: int) -> Chain:
        """Returns the events that led to an event. Raises ConfigurationError if the log does not contain it."""
        known = {logged.number: logged for _, _, events, _ in self.entries for logged in events}
        found = known.get(EventId(number))
        if found is None:
            raise ConfigurationError(
                f"job {self.job_id} has no event {number}: {self._extent(set(known))}; give the number of one of these"
            )
        chain = [found]
        while (cause := chain[0].cause) is not None:
            if cause not in known or cause >= number:
                why = "was folded into a snapshot, and cut from the log"
                if self.unreadable:
                    why = "was cut from the log, or is in one of the entries that cannot be read"
                return Chain(tuple(chain), cause, why)
            chain.insert(0, known[cause])
        return Chain(tuple(chain))

    def _extent(self, known: set[EventId]) -> str:
        if not known:
            return "its log has no events that can be read"
        last = first = max(known)
        while first - 1 in known:
            first = EventId(first - 1)
        older = "; older ones were folded into a snapshot, and cut" if first > 0 else ""
        unreadable = f"; {self.unreadable} entries cannot be read" if self.unreadable else ""
        return f"its log has the events {first} to {last}{older}{unreadable}"


def _readers(log: EventLog, from_index: int) -> list[tuple[int, Callable[[], LogEntry]]]:
    """Returns, for each entry of the log in order, its index and a function that reads it.

    The function reads the entry from the log, or from the segments of cut entries.
    """
    # List the log first: entries that are missing there are in segments by then.
    found: dict[int, Callable[[], LogEntry]] = {index: partial(log.read, index) for index in log.indices()}
    for span in log.segments.spans(from_index):
        try:
            kept = log.segments.read(span)
        except (CodecError, CorruptionError) as error:
            found.setdefault(span.start, partial(_raise, error))
            continue
        found |= {index: partial(log.decoded, index, data) for index, data in kept.items()}
    return [(index, found[index]) for index in sorted(found) if index >= from_index]


def _raise(error: Exception) -> LogEntry:
    raise error


def _events(entry: LogEntry) -> tuple[LoggedEvent, ...]:
    return tuple(
        LoggedEvent(EventId(number), event, entry.at_ms, None if cause is None else EventId(cause))
        for number, (event, cause) in enumerate(zip(entry.events, entry.causes, strict=True), entry.first_event)
    )
