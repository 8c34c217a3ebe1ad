"""`BrokerContact`: reports in the log that brokers cannot be reached, without a line for each of the client's tries.

The client tries again several times a second, and logs each failure twice. Here that is one line when the first try
fails, one a minute while it lasts, and one when the brokers answer again. What the client logs of its tries is DEBUG.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tidegate.storage.clock import monotonic_ms

log = logging.getLogger(__name__)
_AGAIN_MS = 60_000
_SETTLED_MS = 15_000
"""Longer than the client waits between two tries to connect: without a failure for this long, all brokers answer."""
_TRIES = {"FAIL", "ERROR"}
_NOISE = {"CONFWARN"}
"""Warnings that a setting of a consumer means nothing to a client for questions."""


class BrokerContact:
    """Whether the brokers at `servers` answer one client. It is the client's logger, and its threads may call it."""

    def __init__(self, servers: str, clock_ms: Callable[[], int] = monotonic_ms) -> None:
        self._servers = servers
        self._clock_ms = clock_ms
        self._lock = threading.Lock()
        self._since_ms: int | None = None
        self._failed_at_ms = 0
        self._logged_at_ms = 0

    def log(self, level: int, text: str, *values: object) -> None:
        """Take a line of the client, as `logging.Logger.log` does."""
        kind = str(values[0]) if values else ""
        if kind in _TRIES and level >= logging.ERROR:
            log.debug(text, *values)
            self.failed(str(values[-1]))
        else:
            log.log(logging.DEBUG if kind in _NOISE else level, text, *values)

    def failed(self, reason: object) -> None:
        """A try has failed."""
        with self._lock:
            now_ms = self._clock_ms()
            self._failed_at_ms = now_ms
            if self._since_ms is None:
                self._since_ms = self._logged_at_ms = now_ms
                log.warning("the brokers at %s do not answer, and are tried again: %s", self._servers, reason)
            elif now_ms - self._logged_at_ms >= _AGAIN_MS:
                self._logged_at_ms = now_ms
                lasted_s = (now_ms - self._since_ms) // 1000
                log.warning("the brokers at %s have not answered for %d s: %s", self._servers, lasted_s, reason)

    def answered(self) -> None:
        """The brokers have answered. A broker of several may still be away: then failures go on."""
        with self._lock:
            now_ms = self._clock_ms()
            if self._since_ms is None or now_ms - self._failed_at_ms < _SETTLED_MS:
                return
            log.info("the brokers at %s answer again, after %d s", self._servers, (now_ms - self._since_ms) // 1000)
            self._since_ms = None
