"""A coordinator's port that holds everything back until a test lets it happen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.task import events as task_ev
from tidegate.protocol.identity import TaskId
from tidegate.storage.errors import FencedError


@dataclass
class Port:
    """Holds everything back until the test lets it happen."""

    deployed: list[do.DeployAttempt] = field(default_factory=list)
    cancelled: list[do.CancelAttempt] = field(default_factory=list)
    told: list[tuple[TaskId, task_ev.TaskEvent]] = field(default_factory=list)
    io: list[Callable[[], ev.CoordinatorEvent | None]] = field(default_factory=list)
    appends: list[tuple[Callable[[], None], Callable[[BaseException | None], None]]] = field(default_factory=list)
    timers: dict[str, int] = field(default_factory=dict)
    later: list[tuple[int, Callable[[], None]]] = field(default_factory=list)
    answers: list[do.CompleteRequest] = field(default_factory=list)
    ends: list[do.EndJob] = field(default_factory=list)
    halted: list[str] = field(default_factory=list)
    fenced: bool | None = None
    """Of the coordinator that has halted last."""
    killed: list[str] = field(default_factory=list)
    replayed_again: list[str] = field(default_factory=list)
    on_deploy: Callable[[], None] | None = None
    elapsed_ms: int = 0

    def now_ms(self) -> int:
        return 7

    def monotonic_ms(self) -> int:
        return self.elapsed_ms

    def deploy(self, instruction: do.DeployAttempt) -> None:
        self.deployed.append(instruction)
        if self.on_deploy is not None:
            self.on_deploy()

    def cancel_attempt(self, instruction: do.CancelAttempt) -> None:
        self.cancelled.append(instruction)

    def kill_process(self, instruction: do.KillProcess) -> None:
        self.killed.append(instruction.process)

    def send(self, task: TaskId, event: task_ev.TaskEvent) -> None:
        self.told.append((task, event))

    def run_io(self, work: Callable[[], ev.CoordinatorEvent | None]) -> None:
        self.io.append(work)

    def run_copy(self, work: Callable[[], ev.CoordinatorEvent | None]) -> None:
        self.io.append(work)

    def append(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        self.appends.append((work, done))

    def set_timer(self, instruction: do.SetTimer, delay_ms: int) -> None:
        self.timers[instruction.timer] = instruction.due_at_ms

    def cancel_timer(self, timer: str) -> None:
        del self.timers[timer]

    def call_later(self, delay_ms: int, action: Callable[[], None]) -> None:
        self.later.append((delay_ms, action))

    def complete_request(self, instruction: do.CompleteRequest) -> None:
        self.answers.append(instruction)

    def end_job(self, instruction: do.EndJob) -> None:
        self.ends.append(instruction)

    def replay_again(self, reason: str) -> None:
        self.replayed_again.append(reason)

    def halt(self, reason: str, *, fenced: bool) -> None:
        self.halted.append(reason)
        self.fenced = fenced

    # --- what the test lets happen ---

    def append_next(self, error: Exception | None = None, happens: bool = True) -> None:
        """The oldest append is over; with an error it may have happened all the same."""
        work, done = self.appends.pop(0)
        try:
            if happens:
                work()
            done(error)
        except FencedError as fenced:
            done(fenced)

    def settle(self) -> None:
        """Every append succeeds."""
        while self.appends:
            self.append_next()

    def wait(self) -> int:
        """Let the next of the delayed actions happen, when its time has come; returns how long that took."""
        delay_ms, action = self.later.pop(0)
        self.elapsed_ms += delay_ms
        action()
        return delay_ms
