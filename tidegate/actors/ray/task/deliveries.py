"""`Deliveries`: what a task has sent that must not get lost: its last frames, credit, and reports.

Rules: a call that does not arrive fails the task, if it still matters: somebody could wait for it for ever. A task that
has finished is over once everything that it has sent is there.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tidegate.actors.ray.process.calls import LOST_CALL_GRACE_MS, Watched, watch_call
from tidegate.actors.ray.process.mailbox import Mailbox
from tidegate.actors.ray.process.outcome import Outcome
from tidegate.protocol.failure_reasons import bounded_text, error_text


class Deliveries:
    """Of one task. `guarded` runs what it is given as a part of the task, if that still runs."""

    def __init__(self, mailbox: Mailbox, guarded: Callable[[Callable[[], None]], object]) -> None:
        self._mailbox = mailbox
        self._guarded = guarded
        self._on_their_way: set[Future[Any]] = set()
        """What is watched, without what is known to have arrived."""

    def watch(self, reference: Watched, matters: Callable[[], bool]) -> Future[Any]:
        """A call that has to arrive as long as it matters."""

        def lost(error: BaseException) -> None:
            if matters():
                raise ConnectionError(f"a message did not arrive: {error_text(error)}") from error

        return watch_call(reference, self._mailbox, lambda error: self._guarded(lambda: lost(error)))

    def watch_until_there(self, reference: Watched) -> None:
        """A call that has to arrive, also when the task is over."""
        future = self.watch(reference, lambda: True)
        self._on_their_way.add(future)

        def done(call: Future[Any]) -> None:
            if call.exception() is None:
                self._on_their_way.discard(call)

        future.add_done_callback(done)

    def when_all_arrived(self, tell: Callable[[Outcome], None]) -> None:
        """Tell the outcome of a task that has finished, once everything that it has sent is there."""
        calls = tuple(self._on_their_way)
        if not calls:
            tell(Outcome("finished"))
            return
        left = set(calls)

        def arrived(call: Future[Any]) -> None:
            left.discard(call)
            if left:
                return
            error = next((error for call in calls if (error := call.exception()) is not None), None)
            if error is None:
                tell(Outcome("finished"))
                return
            # As in `watch_call`: if the receiver has died, that is the failure, and this attempt is gone by then.
            outcome = Outcome("failed", bounded_text(f"the last messages did not arrive: {error_text(error)}"))
            self._mailbox.call_later(LOST_CALL_GRACE_MS, lambda: tell(outcome))

        for call in calls:
            call.add_done_callback(lambda call: self._mailbox.post(lambda: arrived(call)))
