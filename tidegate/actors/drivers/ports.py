"""`TaskPort` and `CoordinatorPort`: what a runtime offers to the hosts of machines. Runtimes differ in this alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # A task has no use for what coordinators are told to do.
    from tidegate.actors.coordinator.messages.events import CoordinatorEvent
    from tidegate.actors.coordinator.messages.instructions import (
        CancelAttempt,
        CompleteRequest,
        DeployAttempt,
        EndJob,
        KillProcess,
        SetTimer,
    )
    from tidegate.actors.task.messages.events import TaskEvent
    from tidegate.actors.task.messages.instructions import GrantCredit, SendFrame, SetTaskTimer
    from tidegate.protocol.identity import TaskId


@dataclass(frozen=True, slots=True)
class TryAgain:
    """What comes of I/O that could not be done, because storage did not answer."""

    delay_ms: int
    again: Callable[[], None]


class TaskPort(Protocol):
    """The world as one task sees it."""

    virtual: bool
    """Whether time is virtual, so that nothing may wait in a thread of its own."""

    def now_ms(self) -> int:
        """The time."""
        ...

    def monotonic_ms(self) -> int:
        """A time that nobody sets: how long something takes."""
        ...

    def send_frame(self, frame: SendFrame) -> None:
        """Fire and forget, in order for each channel."""
        ...

    def grant_credit(self, grant: GrantCredit) -> None:
        """Fire and forget."""
        ...

    def report(self, event: CoordinatorEvent) -> None:
        """Tell the coordinator."""
        ...

    def run_io(self, work: Callable[[], TaskEvent | TryAgain | None]) -> None:
        """Run beside the mailbox; what it returns goes to the task's host. An exception fails the task."""
        ...

    def call_later(self, delay_ms: int, action: Callable[[], None]) -> None:
        """Run an action on the task's mailbox after a delay, if the task is still there."""
        ...

    def set_timer(self, instruction: SetTaskTimer, delay_ms: int) -> None:
        """Send the task a `TimerDue` after a while, by a clock that nobody sets."""
        ...


class CoordinatorPort(Protocol):
    """The world as the coordinator of one job sees it."""

    def now_ms(self) -> int:
        """The time."""
        ...

    def monotonic_ms(self) -> int:
        """A time that nobody sets: how long something takes."""
        ...

    def deploy(self, instruction: DeployAttempt) -> None:
        """Start the tasks of an attempt, in place of those that they were before."""
        ...

    def cancel_attempt(self, instruction: CancelAttempt) -> None:
        """Stop tasks of an attempt, and of older ones."""
        ...

    def kill_process(self, instruction: KillProcess) -> None:
        """End a process that was given up, unless it has ended."""
        ...

    def tell(self, task: TaskId, event: TaskEvent) -> None:
        """Send an event to a task in its current attempt. Fire and forget."""
        ...

    def run_io(self, work: Callable[[], CoordinatorEvent | None]) -> None:
        """Run beside the mailbox; the event that it returns goes to the coordinator."""
        ...

    def run_copy(self, work: Callable[[], CoordinatorEvent | None]) -> None:
        """As `run_io`, on threads that only the folders of savepoints use. The end of the job does not wait."""
        ...

    def append(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        """Run a write of the event log beside the mailbox, and `done` with its error on the mailbox."""
        ...

    def set_timer(self, instruction: SetTimer, delay_ms: int) -> None:
        """Send the coordinator a `TimerFired` after a while; replaces a timer of the same name.

        What waits goes by a clock that nobody sets: the time of the instruction is that of the wall clock.
        """
        ...

    def cancel_timer(self, timer: str) -> None:
        """Drop a timer: nothing would follow from it any more."""
        ...

    def call_later(self, delay_ms: int, action: Callable[[], None]) -> None:
        """Run an action on the coordinator's mailbox after a delay."""
        ...

    def complete_request(self, instruction: CompleteRequest) -> None:
        """Answer a user's request."""
        ...

    def end_job(self, instruction: EndJob) -> None:
        """The job is over."""
        ...

    def replay_again(self, reason: str) -> None:
        """The log has grown while this coordinator took over: replay it once more, a bounded number of times."""
        ...

    def halt(self, reason: str, *, fenced: bool) -> None:
        """This coordinator must not go on: it was fenced, or its log cannot be written. The job has failed for it.

        `fenced`: another one is known to be in charge, and this one touches nothing any more. Otherwise another one may
        be: whatever ends the job's tasks has to be refused by those that obey it.
        """
        ...
