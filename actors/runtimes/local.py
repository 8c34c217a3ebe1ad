"""The local runtime: a whole job in one process, on the real clock, without Ray and without a JVM.

One thread drives the coordinator and all tasks in turn; a small pool does the I/O. Messages between machines are
appended to one queue, so nothing overtakes anything.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.events import CoordinatorEvent
from tidegate.actors.coordinator.statistics import CheckpointStatistics
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.identity import TaskId
from tidegate.actors.runtimes.clock import now_ms
from tidegate.actors.runtimes.context import OpenStore
from tidegate.actors.runtimes.coordinator_effects import CoordinatorEffects
from tidegate.actors.runtimes.coordinator_host import CoordinatorHost, replay
from tidegate.actors.runtimes.io_pool import IO_THREADS, io_pool
from tidegate.actors.runtimes.job import (
    Answer,
    JobProgress,
    RunningJob,
    Submission,
    TaskProcessInfo,
    progress_of,
    tables_of,
)
from tidegate.actors.runtimes.lease_keeper import LeaseKeeper
from tidegate.actors.runtimes.task_effects import TaskEffects
from tidegate.actors.runtimes.task_host import TaskHost
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as task_do
from tidegate.actors.task.machine import TaskMachine
from tidegate.storage.errors import CheckpointError, StorageError, TidegateError
from tidegate.storage.event_log import EventLog
from tidegate.storage.filesystem import open_store
from tidegate.storage.ids import CheckpointId
from tidegate.storage.metadata import SnapshotKind

log = logging.getLogger(__name__)

TURNS_A_ROUND_MAX = 16
STOP_WAIT_S = 30


class LocalRuntime:
    """Runs jobs in this process."""

    memory_url = "memory://tidegate-checkpoints"

    def __init__(self, open_store: OpenStore = open_store) -> None:
        self.open_store = open_store
        self._jobs: list[LocalJob] = []

    def check(self, graph: JobGraph, urls: Sequence[str]) -> None:
        """Everything runs here."""

    def submit(self, submission: Submission) -> RunningJob:
        """Start a job on a thread of its own."""
        job = LocalJob(submission, self.open_store)
        self._jobs.append(job)
        job.start()
        return job

    def stop(self) -> None:
        """Cancel what runs, and wait for it."""
        running = [job for job in self._jobs if not job.over]
        self._jobs.clear()
        for job in running:
            job.cancel()
        for job in running:
            try:
                job.wait(STOP_WAIT_S)
            except TidegateError as error:
                # Whoever waits for that job is told; the others have to be stopped as well.
                log.warning("a job broke down while it was being stopped: %s", error)


class LocalJob:
    """One job, and the loop that drives it."""

    def __init__(self, submission: Submission, open_store: OpenStore) -> None:
        self._spec = submission.spec
        self._context = submission.context
        self._open_store = open_store
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._local: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[int, int, Callable[[], None]]] = []
        self._timer_ids = itertools.count()
        self._named: dict[str, int] = {}
        self._tasks: dict[TaskId, TaskHost] = {}
        self._pool = io_pool(self._context.graph)
        # Of its own: a source that blocks must not keep the coordinator from its work, nor a master hook from its log.
        self._coordinator_pool = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="tidegate-coordinator")
        self._log_pool = ThreadPoolExecutor(1, thread_name_prefix="tidegate-log")
        self._requests: dict[str, Future[Answer]] = {}
        self._done: Future[JobProgress] = Future()
        self._thread = threading.Thread(target=self._run, name=f"tidegate-{self._spec.job_name}", daemon=True)
        event_log = EventLog(open_store(self._context.root), self._context.job_id)
        machine, next_index = replay(event_log)
        self._effects = CoordinatorEffects(self._context, open_store, now_ms)
        port, incarnation = _CoordinatorPort(self), uuid.uuid4().hex
        self._coordinator = CoordinatorHost(machine, next_index, event_log, self._effects, port, incarnation)

    # --- for users ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the loop."""
        self._lease = LeaseKeeper.started(self._context, self._open_store)
        self._post(self._coordinator.start)
        self._tell_coordinator(lambda: co.JobSubmitted(now_ms(), self._spec))
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether the job has ended, or broken down."""
        return self._done.done()

    def progress(self) -> JobProgress:
        """The job now."""
        rows_in: dict[str, int] = {}
        for task, host in list(self._tasks.items()):
            rows_in[task.vertex] = rows_in.get(task.vertex, 0) + host.rows_in
        return progress_of(self._coordinator.machine.state, rows_in)

    def wait(self, timeout_s: float | None) -> JobProgress | None:
        """Wait for a terminal status."""
        try:
            return self._done.result(timeout_s)
        except TimeoutError:
            return None

    def cancel(self) -> None:
        """Ask for cancellation."""
        self._tell_coordinator(lambda: co.CancelRequested(now_ms()))

    def tasks(self) -> tuple[TaskProcessInfo, ...]:
        """All tasks run in this process."""
        return ()

    def statistics(self) -> CheckpointStatistics:
        """Statistics of the checkpoints so far."""
        return self._coordinator.machine.state.statistics.copy()

    def request(self, kind: SnapshotKind, target: str | None, timeout_s: float) -> Answer:
        """Take a checkpoint or savepoint and wait for it."""
        request = uuid.uuid4().hex
        future: Future[Answer] = Future()
        self._requests[request] = future
        self._tell_coordinator(lambda: co.CheckpointRequested(now_ms(), request, kind, target))
        if self._done.done() and not future.done():
            raise CheckpointError(f"no {kind.value} was taken: the job is {self._done.result().status}")
        try:
            answer = future.result(timeout_s)
        except TimeoutError:
            raise TimeoutError(
                f"job {self._spec.job_name!r} has not completed the {kind.value} within {timeout_s:g} s"
            ) from None
        if answer.checkpoint_id is None:
            raise CheckpointError(f"no {kind.value} was taken: {answer.error}")
        return answer

    def trigger_checkpoint(self, timeout_s: float) -> CheckpointId:
        """Take a checkpoint and wait for it; raises as `request` does."""
        checkpoint_id = self.request(SnapshotKind.CHECKPOINT, None, timeout_s).checkpoint_id
        assert checkpoint_id is not None, "a request that fails raises"
        return checkpoint_id

    # --- the loop -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._done.done():
                self._step()
        except BaseException as error:
            log.exception("the local runtime of %s broke down", self._spec.job_name)
            self._lease.end()
            self._done.set_exception(error)
        finally:
            self._drop_tasks()
            # A source that blocks for ever must not keep the job from ending; its thread ends with its read.
            self._pool.shutdown(wait=False, cancel_futures=True)
            for request in list(self._requests.values()):  # Whoever asks now adds to it, and sees that the job is over.
                if not request.done():
                    request.set_result(Answer(None, "the job has ended"))
            self._effects.close()
            self._coordinator_pool.shutdown(wait=True)
            self._log_pool.shutdown(wait=True)

    def _step(self) -> None:
        while self._local:
            self._local.popleft()()
        if self._done.done():
            return  # The next timer may be that of a checkpoint, hours away.
        busy = False
        for _ in range(TURNS_A_ROUND_MAX):
            progressed = False
            for task, host in list(self._tasks.items()):
                progressed |= self._guarded(task, host, host.turn)
            busy |= progressed
            if not progressed or not self._inbox.empty():
                break
        self._take_messages(block=not busy and not self._local)

    def _take_messages(self, block: bool) -> None:
        wait_s = 0.0
        if block:
            wait_s = 1.0 if not self._timers else max(0.0, (self._timers[0][0] - now_ms()) / 1000)
        try:
            self._local.append(self._inbox.get(timeout=wait_s) if wait_s > 0 else self._inbox.get_nowait())
            while True:
                self._local.append(self._inbox.get_nowait())
        except queue.Empty:
            pass
        while self._timers and self._timers[0][0] <= now_ms():
            self._local.append(heapq.heappop(self._timers)[2])

    def _guarded(self, task: TaskId, host: TaskHost, action: Callable[[], bool | None]) -> bool:
        if self._tasks.get(task) is not host:
            return False
        try:
            return bool(action())
        except Exception as error:
            log.warning("task %s failed", task, exc_info=error)
            self._tasks.pop(task).close()
            reason = f"{type(error).__name__}: {error}"
            self._local.append(
                lambda: self._coordinator.handle(co.TaskFailed(now_ms(), host.machine.attempt, task, reason))
            )
            return True

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.put(action)

    def _tell_coordinator(self, event: Callable[[], CoordinatorEvent]) -> None:
        self._post(lambda: self._coordinator.handle(event()))

    def _deliver(self, task: TaskId, event: ev.TaskEvent) -> None:
        host = self._tasks.get(task)
        if host is not None:
            self._guarded(task, host, lambda: host.handle(event))

    def _call_at(self, due_at_ms: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (due_at_ms, next(self._timer_ids), action))

    def _drop_tasks(self) -> None:
        for host in self._tasks.values():
            host.close()
        self._tasks.clear()

    # --- what the coordinator asks for ----------------------------------------------------------------------------

    def deploy(self, instruction: do.DeployAttempt) -> None:
        """Make a host for every task and restore it."""
        self._drop_tasks()
        self._pool.shutdown(wait=False)
        self._pool = io_pool(self._context.graph)
        for task in self._context.graph.tasks():
            descriptor = self._context.describe(task, instruction.attempt)
            effects = TaskEffects(self._context, descriptor, self._open_store, now_ms)
            port = _TaskPort(self, task)
            host = TaskHost(TaskMachine(descriptor), effects, port)
            port.host = host
            self._tasks[task] = host
        for task, host in list(self._tasks.items()):
            self._guarded(task, host, lambda host=host: host.restore(instruction.restore))  # type: ignore[misc]

    def end(self, instruction: do.EndJob) -> None:
        """The job is over: sweep and tell."""
        self._drop_tasks()
        state = self._coordinator.machine.state
        tables = [] if state.commits else tables_of(self._context)
        self._effects.sweep([c.checkpoint_id for c in state.completed], tables)
        self._coordinator.halt()
        self._lease.end()
        self._done.set_result(progress_of(state, {}))


class _TaskPort:
    """The world as one task of a local job sees it."""

    def __init__(self, job: LocalJob, task: TaskId) -> None:
        self._job = job
        self._task = task
        self.host: TaskHost | None = None

    def now_ms(self) -> int:
        return now_ms()

    def send_frame(self, frame: task_do.SendFrame) -> None:
        receiver = self._job._context.graph.receiver(frame.channel)
        event = ev.FrameArrived(now_ms(), frame.attempt, frame.channel, frame.first_sequence, frame.elements)
        self._job._local.append(lambda: self._job._deliver(receiver, event))

    def grant_credit(self, grant: task_do.GrantCredit) -> None:
        sender = self._job._context.graph.sender(grant.channel)
        event = ev.CreditGranted(now_ms(), grant.attempt, grant.channel, grant.total_bytes)
        self._job._local.append(lambda: self._job._deliver(sender, event))

    def report(self, event: CoordinatorEvent) -> None:
        self._job._local.append(lambda: self._job._coordinator.handle(event))

    def run_io(self, work: Callable[[], ev.TaskEvent | None]) -> None:
        host = self.host
        assert host is not None

        def done(future: Future[ev.TaskEvent | None]) -> None:
            self._job._post(lambda: self._finish_io(host, future))

        self._job._pool.submit(work).add_done_callback(done)

    def _finish_io(self, host: TaskHost, future: Future[ev.TaskEvent | None]) -> None:
        def finish() -> None:
            event = future.result()
            if event is not None:
                host.handle(event)

        self._job._guarded(self._task, host, finish)

    def set_timer(self, instruction: task_do.SetTaskTimer) -> None:
        host = self.host
        assert host is not None

        def due() -> None:
            self._job._guarded(self._task, host, lambda: host.handle(ev.TimerDue(now_ms(), instruction.timer)))

        self._job._call_at(instruction.due_at_ms, due)


class _CoordinatorPort:
    """The world as the coordinator of a local job sees it."""

    def __init__(self, job: LocalJob) -> None:
        self._job = job

    def now_ms(self) -> int:
        return now_ms()

    def deploy(self, instruction: do.DeployAttempt) -> None:
        self._job.deploy(instruction)

    def cancel_attempt(self, instruction: do.CancelAttempt) -> None:
        self._job._drop_tasks()

    def tell(self, task: TaskId, event: ev.TaskEvent) -> None:
        self._job._local.append(lambda: self._job._deliver(task, event))

    def run_io(self, work: Callable[[], CoordinatorEvent | None]) -> None:
        def finish(future: Future[CoordinatorEvent | None]) -> None:
            event = future.result()
            if event is not None:
                self._job._coordinator.handle(event)

        self._job._coordinator_pool.submit(work).add_done_callback(lambda f: self._job._post(lambda: finish(f)))

    def append(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        def finish(future: Future[None]) -> None:
            self._job._post(lambda: done(future.exception()))

        self._job._log_pool.submit(work).add_done_callback(finish)

    def set_timer(self, timer: str, due_at_ms: int) -> None:
        self._job._named[timer] = due_at_ms

        def fire() -> None:
            if self._job._named.get(timer) == due_at_ms:
                del self._job._named[timer]
                self._job._coordinator.handle(co.TimerFired(now_ms(), timer))

        self._job._call_at(due_at_ms, fire)

    def call_later(self, delay_ms: int, action: Callable[[], None]) -> None:
        self._job._call_at(now_ms() + delay_ms, action)

    def complete_request(self, instruction: do.CompleteRequest) -> None:
        future = self._job._requests.pop(instruction.request, None)
        if future is not None:
            future.set_result(Answer(instruction.checkpoint_id, instruction.error, instruction.path))

    def end_job(self, instruction: do.EndJob) -> None:
        self._job.end(instruction)

    def replay_again(self, reason: str) -> None:
        # A job's id is new with each submission, so nobody else can have written to its log.
        self.halt(reason)

    def halt(self, reason: str) -> None:
        self._job._lease.end()
        self._job._done.set_exception(StorageError(f"the coordinator stopped: {reason}"))
