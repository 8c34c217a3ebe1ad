"""`Outbox`: what a task reports to its coordinator, until that has heard it.

Rules:

- While Ray restarts the coordinator a report waits, and is sent again after a while. Data flows meanwhile.
- What waits is bounded. A task that has more to say than that has failed: its coordinator is away for too long.
- How far a task is in event time it tells again anyway, and later knows better: that does not wait.
- Reports may come twice, and out of order when some had to wait: a coordinator knows what it has heard.
- A coordinator that heard a report and was lost before it had written that down asks when it is back.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ray.exceptions import ActorDiedError, RayActorError

from tidegate.actors.coordinator.messages.events import CoordinatorEvent, WatermarkReported
from tidegate.actors.runtimes.ray.process.mailbox import Mailbox

WAITING_MAX = 1_000
SEND_AGAIN_MS = 200


class Sent:
    """A report on its way; stands for Ray's reference to a call."""

    def __init__(self) -> None:
        self._heard: Future[None] = Future()

    def future(self) -> Future[None]:
        """Done when the coordinator has heard it, or it is given up."""
        return self._heard


class Outbox:
    """Of one process. `report` calls the coordinator. `send` is for the mailbox's thread."""

    def __init__(self, report: Callable[[CoordinatorEvent], Any], mailbox: Mailbox) -> None:
        self._report = report
        self._mailbox = mailbox
        self._waiting = 0
        """Reports that nobody has heard."""

    def send(self, event: CoordinatorEvent) -> Sent:
        """Tell the coordinator."""
        sent = Sent()
        self._waiting += 1
        self._try(event, sent.future())
        return sent

    def _try(self, event: CoordinatorEvent, heard: Future[None]) -> None:
        def done(call: Future[Any]) -> None:
            error = call.exception()
            self._mailbox.post(lambda: self._told(event, heard, error))

        self._report(event).future().add_done_callback(done)

    def _told(self, event: CoordinatorEvent, heard: Future[None], error: BaseException | None) -> None:
        # A coordinator that has died for good comes never back; one that is away only does not answer.
        away = isinstance(error, RayActorError) and not isinstance(error, ActorDiedError)
        if away and isinstance(event, WatermarkReported):
            error = None
        elif away and self._waiting <= WAITING_MAX:
            self._mailbox.call_later(SEND_AGAIN_MS, lambda: self._try(event, heard))
            return
        self._waiting -= 1
        if error is None:
            heard.set_result(None)
        else:
            heard.set_exception(error)
