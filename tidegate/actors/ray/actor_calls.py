"""Calls between the actors of a job whose loss must be noticed, and the reports of tasks to the coordinator.

Ray repeats lost calls with frames and credit grants. These have numbers, and may arrive twice and late. Ray repeats no
other call (`max_task_retries=0`), and reports a loss only to a caller that reads the result. Callers therefore read it.
Rules:

- The coordinator notices a dead receiver at once. So a lost call has consequences only after `LOST_CALL_GRACE_MS`, when
  its attempt should be gone. The remaining case is a connection that broke while both ends live.
- A task whose call got lost fails if the call still matters (`Deliveries`). A finished task ends once all its messages
  have arrived.
- The reports of all subtasks of a worker in one round of its loop go in one message (`Outbox.flush`).
- While Ray restarts the coordinator, reports wait and are sent again. Data flows meanwhile. The end of a subtask is
  sent until it arrives. The number of other waiting reports is limited: beyond it the worker fails. Watermarks do not
  wait, because newer ones follow.
- Reports may arrive twice, and out of order if some had to wait. The coordinator recognizes reports that it has
  received. A new coordinator requests the status of each worker, because the lost one may not have logged a report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import ray
from ray.exceptions import ActorDiedError, RayActorError

from tidegate.actors.coordinator.events import CoordinatorEvent, WatermarkReported
from tidegate.actors.drivers.threads import is_unfit
from tidegate.actors.ray.mailbox import Mailbox
from tidegate.actors.ray.task_deployment import Handle
from tidegate.protocol.failures import bounded_text, error_text, failure_text, fingerprint, is_permanent
from tidegate.protocol.identity import TaskId
from tidegate.storage.ids import AttemptNumber

NAMESPACE = "tidegate"
"""Ray's namespace for the named actors of jobs, of sessions, and of checkpoints in memory."""
CONCURRENCY_GROUPS = {"control": 1, "ask": 8, "live": 1}
"""Numbers of threads of a coordinator's actor: "control" for calls of its tasks, "ask" for drivers, "live" for
calls that stay pending.
"""
LOST_CALL_GRACE_MS = 5_000


class Watched(Protocol):
    """A sent message whose arrival can be watched. Ray's reference to a call implements it."""

    def future(self) -> Future[Any]:
        """Returns a future that is done when the message has arrived, or fails with an error."""


def watch_call(reference: Watched, mailbox: Mailbox, lost: Callable[[BaseException], object]) -> Future[Any]:
    """Watches a call, and returns its future. If it fails, runs `lost` on the mailbox after `LOST_CALL_GRACE_MS`."""

    def done(future: Future[Any]) -> None:
        error = future.exception()
        if error is not None:
            mailbox.post(lambda: mailbox.call_later(LOST_CALL_GRACE_MS, lambda: lost(error)))

    future: Future[Any] = reference.future()
    future.add_done_callback(done)
    return future


def find_actor(name: str, namespace: str) -> Handle | None:
    """Returns the handle of the Ray actor with this name, or None if there is none."""
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an attempt of a subtask in its worker: finished or failed, with the reason."""

    kind: Literal["finished", "failed"]
    reason: str | None = None
    permanent: bool = False
    """True if a restart cannot help."""
    unfit: bool = False
    """True if the process is unusable, so that another attempt in it would fail too."""
    fingerprint: str = ""
    """Text that is equal for repeated failures with the same error at the same row, as in `TaskFailed`."""

    @staticmethod
    def failed(error: BaseException) -> Outcome:
        """Returns the outcome of an attempt that failed with this error."""
        return Outcome("failed", failure_text(error), is_permanent(error), is_unfit(error), fingerprint(error))


WAITING_MAX = 10_000
SEND_AGAIN_MS = 200


@dataclass(frozen=True, slots=True)
class Ended:
    """Report that an attempt of a subtask has ended in its worker. The `AttemptSupervisor` handles the report, not the
    coordinator's state machine.
    """

    attempt: AttemptNumber
    task: TaskId
    outcome: Outcome


Report: TypeAlias = CoordinatorEvent | Ended


class Sent:
    """A report that is being sent to the coordinator. Its arrival can be watched (`Watched`)."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self._received: Future[None] = Future()

    def future(self) -> Future[None]:
        """Returns a future that is done when the coordinator has received the report, or fails when the outbox stops
        trying to send the report.
        """
        return self._received


class Outbox:
    """Sends the reports of one process to the coordinator. All methods run on the thread of the mailbox.

    `call` sends a tuple of reports as one message.
    """

    def __init__(self, call: Callable[[tuple[Report, ...]], Any], mailbox: Mailbox) -> None:
        self._call = call
        self._mailbox = mailbox
        self._next: list[Sent] = []
        """Reports for the next message."""
        self._waiting = 0
        """Number of reports that the coordinator has not confirmed."""

    def send(self, report: Report) -> Sent:
        """Adds a report to the next message to the coordinator."""
        sent = Sent(report)
        self._waiting += 1
        self._next.append(sent)
        return sent

    def flush(self) -> None:
        """Sends the reports that were added as one message to the coordinator."""
        if self._next:
            reports, self._next = self._next, []
            self._try(reports)

    def _try(self, reports: Sequence[Sent]) -> None:
        def done(call: Future[Any]) -> None:
            error = call.exception()
            self._mailbox.post(lambda: self._answered(reports, error))

        self._call(tuple(sent.report for sent in reports)).future().add_done_callback(done)

    def _answered(self, reports: Sequence[Sent], error: BaseException | None) -> None:
        # A dead coordinator never comes back. An unavailable one may.
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


class Deliveries:
    """Watches whether the messages of one task arrive. `guarded` runs an action of the task, if the task still
    runs.
    """

    def __init__(self, mailbox: Mailbox, guarded: Callable[[Callable[[], None]], object]) -> None:
        self._mailbox = mailbox
        self._guarded = guarded
        self._on_their_way: set[Future[Any]] = set()
        """Watched messages that may not have arrived."""

    def watch(self, reference: Watched, matters: Callable[[], bool]) -> Future[Any]:
        """Makes the task fail if a message is lost while `matters()` is True. Returns the future of the message."""

        def lost(error: BaseException) -> None:
            if matters():
                raise ConnectionError(
                    f"a message did not arrive: {error_text(error)}; the tasks restart from the newest checkpoint"
                ) from error

        return watch_call(reference, self._mailbox, lambda error: self._guarded(lambda: lost(error)))

    def watch_until_there(self, reference: Watched) -> None:
        """Makes the task fail if a message is lost, and delays the end of the task until the message has arrived."""
        future = self.watch(reference, lambda: True)
        self._on_their_way.add(future)

        def done(call: Future[Any]) -> None:
            if call.exception() is None:
                self._on_their_way.discard(call)

        future.add_done_callback(done)

    def when_all_arrived(self, report: Callable[[Outcome], None]) -> None:
        """Calls `report` with the outcome of a finished task, once all its messages have arrived."""
        calls = tuple(self._on_their_way)
        if not calls:
            report(Outcome("finished"))
            return
        left = set(calls)

        def arrived(call: Future[Any]) -> None:
            left.discard(call)
            if left:
                return
            error = next((error for call in calls if (error := call.exception()) is not None), None)
            if error is None:
                report(Outcome("finished"))
                return
            # As in `watch_call`: if the receiver has died, that is the failure, and this attempt is gone by then.
            outcome = Outcome("failed", bounded_text(f"the last messages did not arrive: {error_text(error)}"))
            self._mailbox.call_later(LOST_CALL_GRACE_MS, lambda: report(outcome))

        for call in calls:
            call.add_done_callback(lambda call: self._mailbox.post(lambda: arrived(call)))
