"""Replays the event log of a job, and waits while its storage is away: without the log there is nothing else to do."""

from __future__ import annotations

import itertools
import threading

from tidegate.actors.coordinator.chronicle import Chronicle
from tidegate.actors.coordinator.coordinator_machine import CoordinatorMachine
from tidegate.actors.coordinator.job.outages import FIRST_PAUSE_MS, pause_ms
from tidegate.actors.drivers.coordinator_host import replay
from tidegate.actors.drivers.log_writer import LogPosition
from tidegate.actors.drivers.outage_notes import OutageNotes
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.clock import monotonic_ms
from tidegate.storage.errors import CorruptionError, StorageError


def replay_when_it_answers(
    event_log: EventLog, outage_ms: int, chronicle: Chronicle | None = None
) -> tuple[CoordinatorMachine, LogPosition]:
    """As `replay`, tried again for as long as an outage may last. Raises CorruptionError, and then StorageError."""
    notes = OutageNotes("the event log", monotonic_ms)
    for attempt in itertools.count(1):
        try:
            return replay(event_log, chronicle)
        except CorruptionError:
            raise
        except StorageError as error:
            away_ms = notes.failed(error, "the job waits until its log can be read")
            if away_ms >= outage_ms:
                raise
            threading.Event().wait(pause_ms(FIRST_PAUSE_MS, attempt) / 1000)
    raise AssertionError("it returns or raises")
