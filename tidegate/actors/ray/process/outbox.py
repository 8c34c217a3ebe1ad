"""`Outbox`: what a worker reports to its coordinator, until that has received it.

Rules:

- What the subtasks of a worker report in one round of its loop goes in one message (`flush`).
- While Ray restarts the coordinator a report waits, and is sent again after a while. Data flows meanwhile.
- An end is sent until the coordinator has received it: nobody else would report it. There is one for each subtask.
- What else waits is bounded. A worker with more to report than that has failed: its coordinator is away for too long.
- How far a subtask is in event time it reports again anyway, and later knows better: that does not wait.
- Reports may arrive twice, and out of order when some had to wait: a coordinator knows what it has received.
- A coordinator that received a report and was lost before it had written that down asks when it is back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

from ray.exceptions import ActorDiedError, RayActorError

from tidegate.actors.coordinator.messages.events import CoordinatorEvent, WatermarkReported
from tidegate.actors.ray.process.mailbox import Mailbox
from tidegate.actors.ray.process.outcome import Outcome
from tidegate.protocol.identity import TaskId
from tidegate.storage.ids import AttemptNumber

WAITING_MAX = 10_000
SEND_AGAIN_MS = 200


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt of a subtask has ended in its worker. For the supervisor; the machines do not see it."""

    attempt: AttemptNumber
    task: TaskId
    outcome: Outcome


Report: TypeAlias = CoordinatorEvent | Ended


class Sent:
    """A report on its way; stands for Ray's reference to a call."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self._received: Future[None] = Future()

    def future(self) -> Future[None]:
        """Done when the coordinator has received it, or it is given up."""
        return self._received


class Outbox:
    """Of one process. `call` sends reports to the coordinator. Everything runs on the mailbox's thread."""

    def __init__(self, call: Callable[[tuple[Report, ...]], Any], mailbox: Mailbox) -> None:
        self._call = call
        self._mailbox = mailbox
        self._next: list[Sent] = []
        """What goes with the next message."""
        self._waiting = 0
        """Reports that the coordinator has not received."""

    def send(self, report: Report) -> Sent:
        """Report with the next message."""
        sent = Sent(report)
        self._waiting += 1
        self._next.append(sent)
        return sent

    def flush(self) -> None:
        """Send what was reported since the last message."""
        if self._next:
            reports, self._next = self._next, []
            self._try(reports)

    def _try(self, reports: Sequence[Sent]) -> None:
        def done(call: Future[Any]) -> None:
            error = call.exception()
            self._mailbox.post(lambda: self._answered(reports, error))

        self._call(tuple(sent.report for sent in reports)).future().add_done_callback(done)

    def _answered(self, reports: Sequence[Sent], error: BaseException | None) -> None:
        # A coordinator that has died for good comes never back; one that is away only does not answer.
        away = isinstance(error, RayActorError) and not isinstance(error, ActorDiedError)
        again = [sent for sent in reports if self._goes_again(sent.report, error, away)]
        if again:
            self._mailbox.call_later(SEND_AGAIN_MS, lambda: self._try(again))
        for sent in reports:
            if sent in again:
                continue
            self._waiting -= 1
            if error is None or (away and isinstance(sent.report, WatermarkReported)):
                sent.future().set_result(None)
            else:
                sent.future().set_exception(error)

    def _goes_again(self, report: Report, error: BaseException | None, away: bool) -> bool:
        if error is None or isinstance(error, ActorDiedError):
            return False
        if isinstance(report, Ended):
            return True
        return away and not isinstance(report, WatermarkReported) and self._waiting <= WAITING_MAX
