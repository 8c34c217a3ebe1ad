"""Helpers of drivers for storage that does not answer: log messages about outages, and deletions that may fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from tidegate.protocol.failures import bounded_text
from tidegate.storage.errors import StorageError
from tidegate.storage.files.store import Store

log = logging.getLogger(__name__)
WARNING_MS = 60_000
"""Time in ms after which a continuing outage is logged again."""
NOTED_MAX = 2_000
"""Limit of tracked outages. Beyond it, the oldest outage is dropped."""


class OutageNotes:
    """Tracks the outages of one target in storage, and logs each outage when it begins, then once a minute, and when it
    ends.
    """

    def __init__(self, what: str, monotonic_ms: Callable[[], int], level: int = logging.WARNING) -> None:
        """Creates the log. `what` names the target, for the text "<what> cannot be reached"."""
        self._what = what
        self._level = level
        self._monotonic_ms = monotonic_ms
        self._since_ms: int | None = None
        self._warned_ms = 0
        self._error = ""

    @property
    def waits_for(self) -> str | None:
        """Returns text with the target, the length of the outage and the newest error, or None while the target can be
        reached.

        May be called from any thread.
        """
        since_ms = self._since_ms
        if since_ms is None:
            return None
        return f"{self._what}, which has failed for {(self._monotonic_ms() - since_ms) // 1000} s: {self._error}"

    @property
    def away(self) -> bool:
        """Returns whether the last attempt to reach the target has failed."""
        return self._since_ms is not None

    def failed(self, error: object, meanwhile: str) -> int:
        """Records another failure of the target. Returns how long, in ms, the target has been failing.

        `meanwhile` is the text that the log adds about the consequence.
        """
        now_ms = self._monotonic_ms()
        self._error = bounded_text(str(error))
        if self._since_ms is None:
            self._since_ms = self._warned_ms = now_ms
            log.log(self._level, "%s cannot be reached (%s); %s", self._what, error, meanwhile)
        elif now_ms - self._warned_ms >= WARNING_MS:
            self._warned_ms = now_ms
            for_s = (now_ms - self._since_ms) / 1000
            log.log(self._level, "%s cannot be reached for %g s now: %s", self._what, for_s, error)
        return now_ms - self._since_ms

    def worked(self) -> None:
        """Records that the target has answered, which ends an outage."""
        if self._since_ms is not None:
            after_s = (self._monotonic_ms() - self._since_ms) / 1000
            log.log(self._level, "%s can be reached again, after %g s", self._what, after_s)
            self._since_ms = None


class NotesOfMany:
    """Tracks and logs the outages of several storage targets of one kind, such as the folders of savepoints."""

    def __init__(self, what: str, monotonic_ms: Callable[[], int], level: int = logging.WARNING) -> None:
        """Creates the log. `what` names the targets, with {} for the number of the target."""
        self._what = what
        self._monotonic_ms = monotonic_ms
        self._level = level
        self._notes: dict[int, OutageNotes] = {}

    def failed(self, number: int, error: object, meanwhile: str, limit_ms: int) -> int:
        """Records another failure of target `number`. Returns how long, in ms, it has been failing.

        Once that reaches `limit_ms`, the target is no longer tracked.
        """
        fresh = OutageNotes(self._what.format(number), self._monotonic_ms, self._level)
        away_ms = self._notes.setdefault(number, fresh).failed(error, meanwhile)
        if away_ms >= limit_ms:
            del self._notes[number]
        elif len(self._notes) > NOTED_MAX:
            del self._notes[next(iter(self._notes))]
        return away_ms

    def worked(self, number: int) -> None:
        """Records that target `number` has answered, or is no longer needed."""
        notes = self._notes.pop(number, None)
        if notes is not None:
            notes.worked()


def delete_files(store: Store, paths: Iterable[str]) -> None:
    """Deletes some files. Files whose deletion fails are left to the sweep at the end of the job."""
    for path in paths:
        try:
            store.delete(path)
        except StorageError as error:
            log.warning("left %s behind for the sweep: %s", path, error)
