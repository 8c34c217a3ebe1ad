"""The ports of a local job: all messages between its machines go through one queue, so nothing overtakes anything."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from tidegate.actors.coordinator.messages import events as co
from tidegate.actors.coordinator.messages import instructions as do
from tidegate.actors.coordinator.messages.events import CoordinatorEvent
from tidegate.actors.drivers.coordinator_host import CoordinatorHost
from tidegate.actors.drivers.threads import WorkerPool
from tidegate.actors.drivers.transport import Transport
from tidegate.actors.drivers.worker import QueueTransport, Subtask, Worker
from tidegate.actors.runtimes.running_job import Answer
from tidegate.actors.runtimes.timers import Timers
from tidegate.actors.task.messages import events as ev
from tidegate.protocol.identity import TaskId
from tidegate.storage.clock import monotonic_ms, now_ms
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import AttemptNumber

log = logging.getLogger(__name__)


class JobOfPorts(Protocol):
    """What ports ask of their job; `LocalJob` has it. For the job's own thread alone, but for what says otherwise."""

    messages: deque[Callable[[], object]]
    """What machines send each other, in order; the loop takes them one by one."""
    coordinator_pool: WorkerPool
    copy_pool: WorkerPool
    log_pool: WorkerPool
    timers: Timers
    """The newest timer of each name; one that was set again does not fire for the old instruction."""
    requests: dict[str, Future[Answer]]

    @property
    def name(self) -> str: ...
    @property
    def coordinator(self) -> CoordinatorHost: ...
    def worker_of(self, task: TaskId) -> Worker: ...
    def post(self, action: Callable[[], object]) -> None:
        """Have the job's thread do something. Safe to call from any thread."""

    def failed(self, subtask: Subtask, error: BaseException) -> None: ...
    def let_go(self, subtask: Subtask) -> None: ...
    def deploy(self, instruction: do.DeployAttempt) -> None: ...
    def cancel_tasks(self, instruction: do.CancelAttempt) -> None: ...
    def end(self, instruction: do.EndJob) -> None: ...
    def break_down(self, reason: str) -> None: ...


class LocalWiring:
    """What a local job does for its workers."""

    def __init__(self, job: JobOfPorts) -> None:
        self._job = job

    def post(self, action: Callable[[], object]) -> None:
        self._job.post(action)

    def call_later(self, delay_ms: int, action: Callable[[], object]) -> None:
        self._job.timers.after(delay_ms, action)

    def failed(self, subtask: Subtask, error: BaseException) -> None:
        self._job.failed(subtask, error)

    def finished(self, subtask: Subtask) -> None:
        self._job.let_go(subtask)

    def acted(self, subtask: Subtask) -> None:
        """Users look at a subtask when they like: it need not report how far it is."""


class LocalSubtask(Subtask):
    """A subtask of a local job: the other workers of the job are in the same process."""

    def __init__(
        self, job: JobOfPorts, worker: Worker, task: TaskId, attempt: AttemptNumber, beside: Collection[TaskId]
    ) -> None:
        super().__init__(worker, task, attempt, beside)
        self._job = job

    def report(self, event: CoordinatorEvent) -> None:
        self._job.messages.append(partial(self._job.coordinator.handle, event))

    def connect_out(self, neighbour: TaskId) -> Transport:
        return QueueTransport(neighbour, self._job.messages, self._job.worker_of(neighbour).deliver, self.now_ms)


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
        def deliver() -> None:
            worker = self._job.worker_of(task)
            if (subtask := worker.subtasks.get(task)) is not None:
                worker.deliver(task, subtask.attempt, event)

        self._job.messages.append(deliver)

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
