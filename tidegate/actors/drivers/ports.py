"""`TaskPort` and `CoordinatorPort`: what a runtime offers to the hosts of machines. Runtimes differ in this alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # A task does not need the instructions of coordinators.
    from tidegate.actors.coordinator.events import CoordinatorEvent
    from tidegate.actors.coordinator.instructions import (
        CancelAttempt,
        CompleteRequest,
        DeployAttempt,
        EndJob,
        KillProcess,
        SetTimer,
    )
    from tidegate.actors.task.events import TaskEvent
    from tidegate.actors.task.instructions import GrantCredit, SendFrame, SetTaskTimer
    from tidegate.protocol.identity import TaskId


@dataclass(frozen=True, slots=True)
class TryAgain:
    """The result of I/O that could not be done, because storage did not answer."""

    delay_ms: int
    again: Callable[[], None]


class TaskPort(Protocol):
    """The world as one task sees it."""

    virtual: bool
    """True if time is virtual, so that nothing may wait in a thread of its own."""

    def now_ms(self) -> int:
        """The time."""
        ...

    def monotonic_ms(self) -> int:
        """The monotonic time, to measure durations."""
        ...

    def send_frame(self, frame: SendFrame) -> None:
        """Sends without waiting for an answer. Messages of one channel arrive in order."""
        ...

    def grant_credit(self, grant: GrantCredit) -> None:
        """Sends without waiting for an answer."""
        ...

    def report(self, event: CoordinatorEvent) -> None:
        """Reports to the coordinator."""
        ...

    def run_io(self, work: Callable[[], TaskEvent | TryAgain | None]) -> None:
        """Runs off the mailbox thread; the result goes to the task's driver. An exception fails the task."""
        ...

    def call_later(self, delay_ms: int, action: Callable[[], None]) -> None:
        """Runs an action on the task's mailbox after a delay, if the task is still there."""
        ...

    def set_timer(self, instruction: SetTaskTimer, delay_ms: int) -> None:
        """Sends the task a `TimerDue` after a delay, by the monotonic clock."""
        ...


class CoordinatorPort(Protocol):
    """The world as the coordinator of one job sees it."""

    def now_ms(self) -> int:
        """The time."""
        ...

    def monotonic_ms(self) -> int:
        """The monotonic time, to measure durations."""
        ...

    def deploy(self, instruction: DeployAttempt) -> None:
        """Starts the tasks of an attempt, replacing their earlier attempts."""
        ...

    def cancel_attempt(self, instruction: CancelAttempt) -> None:
        """Stops tasks of an attempt, and of older ones."""
        ...

    def kill_process(self, instruction: KillProcess) -> None:
        """Ends a process that was given up, unless it has ended."""
        ...

    def send(self, task: TaskId, event: TaskEvent) -> None:
        """Sends an event to a task in its current attempt. Fire and forget."""
        ...

    def run_io(self, work: Callable[[], CoordinatorEvent | None]) -> None:
        """Runs off the mailbox thread; the event that it returns goes to the coordinator."""
        ...

    def run_copy(self, work: Callable[[], CoordinatorEvent | None]) -> None:
        """Like `run_io`, on threads that only the folders of savepoints use. The end of the job does not wait."""
        ...

    def append(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        """Runs a write of the event log off the mailbox thread, and `done` with its error on the mailbox."""
        ...

    def set_timer(self, instruction: SetTimer, delay_ms: int) -> None:
        """Sends the coordinator a `TimerFired` after a while; replaces a timer of the same name.

        The delay is measured by the monotonic clock; the time in the instruction is wall-clock time.
        """
        ...

    def cancel_timer(self, timer: str) -> None:
        """Drops a timer: nothing would follow from it any more."""
        ...

    def call_later(self, delay_ms: int, action: Callable[[], None]) -> None:
        """Runs an action on the coordinator's mailbox after a delay."""
        ...

    def complete_request(self, instruction: CompleteRequest) -> None:
        """Answers a user's request."""
        ...

    def end_job(self, instruction: EndJob) -> None:
        """The job is over."""
        ...

    def replay_again(self, reason: str) -> None:
        """The log has grown while this coordinator took over: replay it once more, a bounded number of times."""
        ...

    def halt(self, reason: str, *, fenced: bool) -> None:
        """This coordinator must not continue: it was fenced, or its log cannot be written. The job has failed for it.

        `fenced`: another one is known to be in charge, and this one touches nothing any more. Otherwise another one may
        be: then orders of this one that end tasks are refused by the tasks that obey the other.
        """
        ...
