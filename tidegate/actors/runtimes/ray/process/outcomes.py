"""`Outcomes`: how attempts of a task have ended in its process, for whoever waits for that.

Rules: somebody may ask before the attempt has begun here, or after it has ended; the first end that is told holds; with
a later attempt every earlier one is over.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from tidegate.actors.hosts.threads import is_unfit
from tidegate.actors.protocol.failure_reasons import failure_text, fingerprint, is_permanent


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt of a task ended in its process."""

    kind: Literal["finished", "failed", "replaced"]
    reason: str | None = None
    permanent: bool = False
    """Whether no restart can help."""
    unfit: bool = False
    """The process is of no use any more: another attempt in it would fail for the same reason."""
    fingerprint: str = ""
    """As of `TaskFailed`."""

    @staticmethod
    def failed(error: BaseException) -> Outcome:
        """The attempt failed with this error."""
        return Outcome("failed", failure_text(error), is_permanent(error), is_unfit(error), fingerprint(error))


class Outcomes:
    """Ends of attempts. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[int, Future[Outcome]] = {}
        self._current = -1

    def of(self, attempt: int) -> Future[Outcome]:
        """Done when the attempt has ended."""
        with self._lock:
            future = self._futures.setdefault(attempt, Future())
            if attempt < self._current and not future.done():
                future.set_result(Outcome("replaced"))
            return future

    def settle(self, attempt: int, outcome: Outcome) -> None:
        """The attempt has ended so, unless it has ended before."""
        future = self.of(attempt)
        with self._lock:
            if not future.done():
                future.set_result(outcome)

    def begin(self, attempt: int) -> None:
        """Every earlier attempt is over."""
        with self._lock:
            self._current = max(self._current, attempt)
            for earlier in [a for a in self._futures if a < self._current]:
                future = self._futures.pop(earlier)
                if not future.done():
                    future.set_result(Outcome("replaced"))
