"""`TaskPort` and `CoordinatorPort`: the interfaces that a runtime implements for the drivers of tasks and coordinator.

Runtimes differ only in these two.
"""

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
    """Result of I/O that failed because storage did not answer. The driver calls `again` after `delay_ms`."""

    delay_ms: int
    again: Callable[[], None]


class TaskPort(Protocol):
    """The services of a runtime for one task: clocks, messages, threads and timers."""

    virtual: bool
    """True if time is simulated, so that no thread may wait."""

    def now_ms(self) -> int:
        """Returns the wall-clock time in ms since the epoch."""
        ...

    def monotonic_ms(self) -> int:
        """Returns the monotonic time in ms, to measure durations."""
        ...

    def send_frame(self, frame: SendFrame) -> None:
        """Sends a frame, without waiting for an answer. Frames of one channel arrive in order."""
        ...

    def grant_credit(self, grant: GrantCredit) -> None:
        """Sends a credit grant to the sender of a channel, without waiting for an answer."""
        ...

    def report(self, event: CoordinatorEvent) -> None:
        """Sends an event to the coordinator."""
        ...

    def run_io(self, work: Callable[[], TaskEvent | TryAgain | None]) -> None:
        """Runs work on another thread. Its result, unless None, is passed to the task's driver. An exception
        fails the task.
        """
        ...

    def call_later(self, delay_ms: int, action: Callable[[], None]) -> None:
        """Runs an action on the task's thread after a delay, if the task still runs."""
        ...

    def set_timer(self, instruction: SetTaskTimer, delay_ms: int) -> None:
        """Sends the task a `TimerDue` after a delay, measured by the monotonic clock."""
        ...


class CoordinatorPort(Protocol):
    """The services of a runtime for the coordinator of one job: clocks, messages, threads, timers and processes."""

    def now_ms(self) -> int:
        """Returns the wall-clock time in ms since the epoch."""
        ...

    def monotonic_ms(self) -> int:
        """Returns the monotonic time in ms, to measure durations."""
        ...

    def deploy(self, instruction: DeployAttempt) -> None:
        """Starts the tasks of an attempt, replacing their earlier attempts."""
        ...

    def cancel_attempt(self, instruction: CancelAttempt) -> None:
        """Stops tasks of an attempt and of older attempts."""
        ...

    def kill_process(self, instruction: KillProcess) -> None:
        """Kills a process that gets no more tasks, unless it has ended already."""
        ...

    def send(self, task: TaskId, event: TaskEvent) -> None:
        """Sends an event to a task in its current attempt, without waiting for an answer."""
        ...

    def run_io(self, work: Callable[[], CoordinatorEvent | None]) -> None:
        """Runs work on another thread. The event that it returns, unless None, is passed to the coordinator."""
        ...

    def run_copy(self, work: Callable[[], CoordinatorEvent | None]) -> None:
        """Runs work as `run_io` does, on threads that are used only for the folders of savepoints.

        The end of the job does not wait for such work.
        """
        ...

    def append(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        """Runs a write of the event log on another thread. Then calls `done` on the coordinator's thread, with
        the error or None.
        """
        ...

    def set_timer(self, instruction: SetTimer, delay_ms: int) -> None:
        """Sends the coordinator a `TimerFired` after a delay. Replaces a timer of the same name.

        The delay is measured by the monotonic clock. The time in the instruction is wall-clock time.
        """
        ...

    def cancel_timer(self, timer: str) -> None:
        """Cancels a timer that has become useless, because the machine would ignore its event."""
        ...

    def call_later(self, delay_ms: int, action: Callable[[], None]) -> None:
        """Runs an action on the coordinator's thread after a delay."""
        ...

    def complete_request(self, instruction: CompleteRequest) -> None:
        """Answers a user's request for a checkpoint, savepoint or stop."""
        ...

    def end_job(self, instruction: EndJob) -> None:
        """Ends the job: sweeps its files, and notifies the callers that wait for its end."""
        ...

    def replay_again(self, reason: str) -> None:
        """Replays the log once more, because it has grown while this coordinator took over. The number of replays
        is limited.
        """
        ...

    def halt(self, reason: str, *, fenced: bool) -> None:
        """Stops this coordinator, because it was fenced or its log cannot be written. In this process the job counts as
        failed.

        `fenced`: another coordinator has certainly taken over. Then this coordinator gives no more orders. Otherwise it
        orders its tasks to end, and tasks that obey a newer coordinator refuse the order.
        """
        ...
