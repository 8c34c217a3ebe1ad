"""Says in the log that something fails for want of storage: at once, then rarely, and when it is over."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

WARNING_MS = 60_000
"""An outage is named again after so long."""


class OutageNotes:
    """Of one thing that needs storage. Knows for how long it has failed, by a clock that nobody sets."""

    def __init__(self, what: str, monotonic_ms: Callable[[], int]) -> None:
        """`what` in words: "<what> cannot be reached"."""
        self._what = what
        self._monotonic_ms = monotonic_ms
        self._since_ms: int | None = None
        self._warned_ms = 0

    @property
    def away(self) -> bool:
        """Whether it failed when it was tried last."""
        return self._since_ms is not None

    def failed(self, error: object, meanwhile: str) -> int:
        """It has failed once more; returns for how many ms it has."""
        now_ms = self._monotonic_ms()
        if self._since_ms is None:
            self._since_ms = self._warned_ms = now_ms
            log.warning("%s cannot be reached (%s); %s", self._what, error, meanwhile)
        elif now_ms - self._warned_ms >= WARNING_MS:
            self._warned_ms = now_ms
            log.warning("%s cannot be reached for %g s now: %s", self._what, (now_ms - self._since_ms) / 1000, error)
        return now_ms - self._since_ms

    def worked(self) -> None:
        """It has succeeded."""
        if self._since_ms is not None:
            log.warning(
                "%s can be reached again, after %g s", self._what, (self._monotonic_ms() - self._since_ms) / 1000
            )
            self._since_ms = None
