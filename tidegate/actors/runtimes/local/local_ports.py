"""The ports of a local job: its machines' messages go through one queue, their I/O to the job's pools."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from tidegate.actors.coordinator.messages import events as co
from tidegate.actors.coordinator.messages import instructions as do
from tidegate.actors.coordinator.messages.events import CoordinatorEvent
from tidegate.actors.hosts.coordinator.coordinator_host import CoordinatorHost
from tidegate.actors.hosts.job_context import JobContext
from tidegate.actors.hosts.ports import TryAgain
from tidegate.actors.hosts.task.task_host import TaskHost
from tidegate.actors.hosts.threads import WorkerPool
from tidegate.actors.protocol.identity import TaskId
from tidegate.actors.runtimes.running_job import Answer
from tidegate.actors.runtimes.timers import Timers
from tidegate.actors.task.messages import events as ev
from tidegate.actors.task.messages import instructions as task_do
from tidegate.storage.clock import monotonic_ms, now_ms
from tidegate.storage.errors import ProtocolError

log = logging.getLogger(__name__)


class JobOfPorts(Protocol):
    """What ports ask of their job; `LocalJob` has it. For the job's own thread alone, but for what says otherwise."""

    messages: deque[Callable[[], object]]
    """What machines tell each other, in order; the loop takes them one by one."""
    coordinator_pool: WorkerPool
    copy_pool: WorkerPool
    log_pool: WorkerPool
    timers: Timers
    """The newest timer of each name; one that was set again does not fire for the old instruction."""
    requests: dict[str, Future[Answer]]

    @property
    def name(self) -> str: ...
    @property
    def context(self) -> JobContext: ...
    @property
    def coordinator(self) -> CoordinatorHost: ...
    def deliver(self, task: TaskId, event: ev.TaskEvent) -> None: ...
    def post(self, action: Callable[[], None]) -> None:
        """Have the job's thread do something. Safe to call from any thread."""

    def guarded(self, task: TaskId, host: TaskHost, action: Callable[[], bool | None]) -> bool: ...
    def deploy(self, instruction: do.DeployAttempt) -> None: ...
    def cancel_tasks(self, instruction: do.CancelAttempt) -> None: ...
    def end(self, instruction: do.EndJob) -> None: ...
    def break_down(self, reason: str) -> None: ...


class LocalTaskPort:
    """The world as one task of a local job sees it."""

    virtual = False

    def __init__(self, job: JobOfPorts, task: TaskId, pool: WorkerPool) -> None:
        """`pool`: threads for the I/O of the tasks that were deployed together."""
        self._job = job
        self._task = task
        self.pool = pool
        self.host: TaskHost | None = None

    def now_ms(self) -> int:
        return now_ms()

    def monotonic_ms(self) -> int:
        return monotonic_ms()

    def send_frame(self, frame: task_do.SendFrame) -> None:
        receiver = self._job.context.graph.receiver(frame.channel)
        event = ev.FrameArrived(now_ms(), frame.attempt, frame.channel, frame.first_sequence, frame.elements)
        self._job.messages.append(lambda: self._job.deliver(receiver, event))

    def grant_credit(self, grant: task_do.GrantCredit) -> None:
        sender = self._job.context.graph.sender(grant.channel)
        event = ev.CreditGranted(now_ms(), grant.attempt, grant.channel, grant.total_bytes, grant.window_bytes)
        self._job.messages.append(lambda: self._job.deliver(sender, event))

    def report(self, event: CoordinatorEvent) -> None:
        self._job.messages.append(lambda: self._job.coordinator.handle(event))

    def run_io(self, work: Callable[[], ev.TaskEvent | TryAgain | None]) -> None:
        host = self.host
        assert host is not None

        def done(future: Future[ev.TaskEvent | TryAgain | None]) -> None:
            self._job.post(lambda: self._finish_io(host, future))

        self.pool.submit(work, done)

    def _finish_io(self, host: TaskHost, future: Future[ev.TaskEvent | TryAgain | None]) -> None:
        def finish() -> None:
            event = future.result()
            if event is not None:
                host.handle(event)

        self._job.guarded(self._task, host, finish)

    def call_later(self, delay_ms: int, action: Callable[[], None]) -> None:
        host = self.host
        assert host is not None

        def act() -> None:
            self._job.guarded(self._task, host, action)

        self._job.timers.after(delay_ms, act)

    def set_timer(self, instruction: task_do.SetTaskTimer, delay_ms: int) -> None:
        assert self.host is not None
        # A timer may be far away: it must not keep the state of a task that is over until then.
        job, task, weak = self._job, self._task, weakref.ref(self.host)

        def due() -> None:
            host = weak()
            if host is not None:
                event = ev.TimerDue(now_ms(), instruction.timer, instruction.due_at_ms)
                job.guarded(task, host, lambda: host.handle(event))

        job.timers.after(delay_ms, due)


class LocalCoordinatorPort:
    """The world as the coordinator of a local job sees it."""

    def __init__(self, job: JobOfPorts) -> None:
        self._job = job

    def now_ms(self) -> int:
        return now_ms()

    def monotonic_ms(self) -> int:
        return monotonic_ms()

    def deploy(self, instruction: do.DeployAttempt) -> None:
        self._job.deploy(instruction)

    def cancel_attempt(self, instruction: do.CancelAttempt) -> None:
        self._job.cancel_tasks(instruction)

    def kill_process(self, instruction: do.KillProcess) -> None:
        raise ProtocolError(f"the process {instruction.process} is to be ended, and there is one process")

    def tell(self, task: TaskId, event: ev.TaskEvent) -> None:
        self._job.messages.append(lambda: self._job.deliver(task, event))

    def run_io(self, work: Callable[[], CoordinatorEvent | None]) -> None:
        self._run(self._job.coordinator_pool, work)

    def run_copy(self, work: Callable[[], CoordinatorEvent | None]) -> None:
        self._run(self._job.copy_pool, work)

    def _run(self, pool: WorkerPool, work: Callable[[], CoordinatorEvent | None]) -> None:
        def finish(future: Future[CoordinatorEvent | None]) -> None:
            event = future.result()
            if event is not None:
                self._job.coordinator.handle(event)

        pool.submit(work, lambda future: self._job.post(lambda: finish(future)))

    def append(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        def finish(future: Future[None]) -> None:
            self._job.post(lambda: done(future.exception()))

        self._job.log_pool.submit(work, finish)

    def set_timer(self, instruction: do.SetTimer, delay_ms: int) -> None:
        timer = instruction.timer
        self._job.timers.after(delay_ms, lambda: self._job.coordinator.handle(co.TimerFired(now_ms(), timer)), timer)

    def cancel_timer(self, timer: str) -> None:
        self._job.timers.cancel(timer)

    def call_later(self, delay_ms: int, action: Callable[[], None]) -> None:
        self._job.timers.after(delay_ms, action)

    def complete_request(self, instruction: do.CompleteRequest) -> None:
        future = self._job.requests.pop(instruction.request, None)
        if future is not None:
            future.set_result(Answer(instruction.checkpoint_id, instruction.error, instruction.path))

    def end_job(self, instruction: do.EndJob) -> None:
        self._job.end(instruction)

    def replay_again(self, reason: str) -> None:
        # A job's id is new with each submission, so nobody else can have written to its log.
        self.halt(reason, fenced=True)

    def halt(self, reason: str, *, fenced: bool) -> None:
        # All of the job is in this process: nobody can have adopted a task of it.
        log.error("job %s has failed: its coordinator stops: %s", self._job.name, reason)
        self._job.break_down(f"the coordinator stopped: {reason}")
