"""The local runtime: whole jobs in one process, on the real clock, without Ray and without a JVM.

`LocalRuntime` runs jobs. A `LocalJob` has a `Worker` for each slot and the coordinator. One thread runs the coordinator
and all workers, and a small pool does the I/O. Rules:

- Messages between machines are appended to one queue, so their order is kept. Messages and timers run before turns, so
  a barrier waits for at most one turn of one subtask. Workers take turns, and so do the subtasks of each worker.
- Code of users runs on threads of the job, never on the main thread. So any exception, also SystemExit or
  KeyboardInterrupt, fails its task. Ctrl-C reaches the caller that waits in the main thread.
- No thread keeps the process from ending. A running job then stops as after a crash.
- Metrics of tasks are measured on the job's thread, and are read on any thread (`TaskMetricsView`).
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.checkpoint_statistics import CheckpointStatistics
from tidegate.actors.coordinator.events import CoordinatorEvent
from tidegate.actors.coordinator.invariants import permit_sweep
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.actors.drivers.coordinator_driver import CoordinatorDriver, replay
from tidegate.actors.drivers.coordinator_effects import COPY_THREADS, CoordinatorEffects
from tidegate.actors.drivers.lease_keeper import LeaseKeeper
from tidegate.actors.drivers.task_driver import TaskDriver
from tidegate.actors.drivers.task_effects import TaskEffects
from tidegate.actors.drivers.threads import ThreadPool, join_all, leave_if_forked
from tidegate.actors.drivers.worker import (
    IO_THREADS,
    IoPool,
    QueueTransport,
    Subtask,
    Transport,
    Worker,
    io_pool,
    keep_freed_memory,
)
from tidegate.actors.graph.job_graph import JobGraph, vertex_labels
from tidegate.actors.graph.slot_plan import slot_plan
from tidegate.actors.runtimes.dropped_row_reports import EVERY_MS, DroppedRowReports
from tidegate.actors.runtimes.job_metrics import RecoveryEnds, RecoveryWatch
from tidegate.actors.runtimes.running_job import (
    Answer,
    JobCard,
    JobOverview,
    JobProgress,
    RunningJob,
    SilentJob,
    SnapshotRequest,
    Submission,
    TaskProcessInfo,
    not_taken,
    not_there,
    progress_of,
)
from tidegate.actors.runtimes.task_metrics import SubtaskMetrics, TaskMeter, TaskTotals, VertexMetrics, vertices_of
from tidegate.actors.runtimes.timers import Timers
from tidegate.actors.task import events as ev
from tidegate.actors.task.task_machine import TaskMachine
from tidegate.protocol.failures import error_text, failure_text, fingerprint, is_permanent, log_failure
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.clock import monotonic_ms, now_ms
from tidegate.storage.errors import ConfigurationError, JobTimeoutError, ProtocolError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.files.retrying_store import retrying
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import AttemptNumber

log = logging.getLogger(__name__)

STOP_WAIT_S = 30
ENDED_MAX = 20
"""Limit of ended jobs that are kept for their pages. The newest are kept."""


class LocalRuntime:
    """Runs jobs in this process."""

    memory_url = "memory://tidegate-checkpoints"
    sends_functions = False

    def __init__(self, open_store: OpenStore = open_store) -> None:
        self.open_store = open_store
        self._jobs: list[LocalJob] = []

    def check(self, graph: JobGraph, urls: Mapping[str, str]) -> None:
        """Accepts every job, because this runtime has no limits."""

    def check_detached(self, name: str, urls: Sequence[str]) -> None:
        """Raises ConfigurationError, because local jobs end with their process."""
        raise ConfigurationError(
            f"execute({name!r}, detached=True): a local job runs in the process of its script and ends with it. Remove "
            "detached, or run it on a Ray cluster that was started separately "
            '(StreamEnvironment.raydp(ray_address="host:port"))'
        )

    def submit(self, submission: Submission) -> RunningJob:
        """Starts a job on a new thread, and returns it."""
        job = LocalJob(submission, self.open_store)
        job.start()
        self._jobs.append(job)
        ended = self.ended()
        dropped = {id(each) for each in ended[: max(0, len(ended) - ENDED_MAX)]}
        self._jobs = [each for each in self._jobs if id(each) not in dropped]
        return job

    def ended(self) -> list[LocalJob]:
        """Returns the newest ended jobs of this runtime, oldest first. Only about `ENDED_MAX` ended jobs are
        remembered.
        """
        return [job for job in list(self._jobs) if job.over]

    def overviews(self) -> list[tuple[str, JobOverview | SilentJob]]:
        """Returns the name and overview of each running job in this process, from all environments."""
        return [(job.name, job.overview()) for job in jobs_here()]

    def attach(self, name: str) -> tuple[JobCard, RunningJob]:
        """Returns the card and the job with this name or id in this process, from any environment. Raises
        ConfigurationError unless exactly one job has it.
        """
        jobs = jobs_here()
        found = [job for job in jobs if name in (job.card.name, job.card.job_id)]
        if len(found) != 1:
            raise not_there(name, "in this process", [job.card for job in jobs])
        return found[0].card, found[0]

    def stop(self) -> None:
        """Cancels the running jobs, and waits up to `STOP_WAIT_S` for their end."""
        jobs = list(self._jobs)
        self._jobs.clear()
        deadline_s = time.monotonic() + STOP_WAIT_S
        for job in jobs:
            if not job.over:
                job.cancel()
        for job in jobs:
            if not job.join(deadline_s):
                log.warning("job %r has not ended within %d s and is abandoned", job.name, STOP_WAIT_S)


IDLE_S = 1.0
GLANCE_S = 0.5
"""Seconds for which a request for metrics waits for the job's thread to measure them."""
CLOSE_WAIT_S = 10.0
"""Seconds that the end of a job waits for running I/O of its coordinator."""
WAIT_SLICE_S = 1.0
"""Seconds after which a waiting caller wakes up and waits again.

Python handles a signal that arrives just before a thread blocks only when the thread wakes up.
"""
LEAVE_WAIT_S = 2.0
"""Seconds for which the exit of the process waits for running jobs to stop."""


class LocalJob:
    """One job in this process, and the loop that runs its coordinator and tasks."""

    def __init__(self, submission: Submission, open_store: OpenStore) -> None:
        self._spec = submission.spec
        self.card = submission.card
        self.context = submission.context
        self._open_store = open_store
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.messages: deque[Callable[[], object]] = deque()
        self.timers = Timers()
        graph, wiring = self.context.graph, LocalWiring(self)
        plan = slot_plan(graph, vertex_labels(graph))
        workers = {worker: Worker(graph, wiring, self.messages) for worker in plan.names}
        self._workers = [*workers.values()]
        self._worker_of = {task: workers[worker] for task, worker in plan.workers.items()}
        self._next_worker = 0
        """Index of the worker that is offered the next turn first."""
        self._looks = TaskMetricsView(graph)
        self._dropped_rows = DroppedRowReports(graph)
        self._dropped_rows_due_ms = now_ms() + EVERY_MS
        self._pid = os.getpid()
        self.requests: dict[str, Future[Answer]] = {}
        self._done: Future[JobProgress] = Future()
        self._thread = threading.Thread(target=self._run, name=f"tidegate-{self._spec.job_name}", daemon=True)
        event_log = EventLog(open_store(self.context.root), self.context.job_id)
        machine, position = replay(event_log)
        self._effects = CoordinatorEffects(self.context, open_store, now_ms)
        port, incarnation = LocalCoordinatorPort(self), uuid.uuid4().hex
        self.coordinator = CoordinatorDriver(
            machine, position, event_log, self._effects, port, incarnation, log_rows=self.context.log.rows
        )
        with (
            ExitStack() as opened
        ):  # If the process may have no more threads, this raises RuntimeError and closes the pools.
            self._first_pool: IoPool | None = self._io_pool(graph.tasks())
            """The threads for the I/O of the first attempt, until it begins."""
            opened.callback(self._first_pool.close)
            # Separate pools: a source that blocks must not delay the coordinator, and a hook must not delay its log.
            self.coordinator_pool = ThreadPool(IO_THREADS, "tidegate-coordinator", self._thread_died)
            opened.callback(self.coordinator_pool.close)
            self.copy_pool = ThreadPool(COPY_THREADS, "tidegate-savepoints", self._thread_died)
            opened.callback(self.copy_pool.close)
            self.log_pool = ThreadPool(1, "tidegate-log", self._thread_died)
            opened.pop_all()

    # --- for users ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the job. Raises RuntimeError, after closing everything, if the process can start no more
        threads.
        """
        keep_freed_memory()
        with ExitStack() as opened:
            for pool in (self._first_pool, self.coordinator_pool, self.copy_pool, self.log_pool):
                if pool is not None:
                    opened.callback(pool.close)
            self._lease = LeaseKeeper.started(self.context, self._open_store)
            opened.callback(self._lease.end)
            self.post(self.coordinator.start)
            self._tell_coordinator(lambda: co.JobSubmitted(now_ms(), self._spec))
            self._thread.start()
            opened.pop_all()
        _alive.add(self)

    @property
    def name(self) -> str:
        """Returns the name of the job."""
        return self._spec.job_name

    @property
    def over(self) -> bool:
        """Returns whether the job has ended, or has stopped because of an internal failure."""
        return self._done.done()

    def progress(self) -> JobProgress:
        """Returns the progress of the job."""
        if self._done.done():
            return self._done.result()
        hosts = self._hosts()
        rows_in: dict[str, int] = {}
        for task, rows in (self._looks.rows_in() | {task: host.rows_in for task, host in hosts.items()}).items():
            rows_in[task.vertex] = rows_in.get(task.vertex, 0) + rows
        waiting = (self.coordinator.waits_for, *(host.waits_for for host in hosts.values()))
        waits_for = next((each for each in waiting if each is not None), None)
        return replace(progress_of(self.coordinator.machine.state, rows_in, self.coordinator), waits_for=waits_for)

    def wait(self, timeout_s: float | None) -> JobProgress | None:
        """Waits for the end of the job, and returns its progress. Returns None if the timeout passes first. No
        timeout if None.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = WAIT_SLICE_S if deadline_s is None else deadline_s - time.monotonic()
            try:
                return self._done.result(max(0.0, min(left_s, WAIT_SLICE_S)))
            except TimeoutError:
                if left_s <= 0:
                    return None

    def cancel(self) -> None:
        """Requests the cancellation of the job, and does not wait."""
        self._tell_coordinator(lambda: co.CancelRequested(now_ms()))

    def overview(self) -> JobOverview:
        """Returns the overview of this job for a list of jobs."""
        newest = self.statistics().latest_completed
        return JobOverview(self.card, self.progress(), None if newest is None else newest.ended_at_ms)

    def join(self, deadline_s: float) -> bool:
        """Waits for the end of the job's thread until `deadline_s` of the monotonic clock. Returns whether the
        thread has ended.
        """
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Requests that the job stops without cleaning up, as after a crash, because the process ends."""
        self.post(lambda: self.break_down("the process in which it ran has ended"))

    def tasks(self) -> tuple[TaskProcessInfo, ...]:
        """Returns an empty tuple, because all tasks run in this process."""
        return ()

    def vertices(self) -> tuple[VertexMetrics, ...]:
        """Returns the metrics of the tasks, by vertex, measured now.

        While a function of the user keeps the job's thread busy, returns the last measurement.
        """
        if not self._done.done():
            looked: Future[Any] = Future()

            def look() -> None:
                self._looks.look(self._hosts())
                looked.set_result(None)

            self.post(look)
            either: tuple[Future[Any], ...] = (looked, self._done)
            wait(either, timeout=GLANCE_S, return_when=FIRST_COMPLETED)
        return self._looks.vertices()

    @property
    def recovery_ends(self) -> Mapping[AttemptNumber, RecoveryEnds]:
        """Returns, by attempt, the start and end of the newest recoveries that `vertices` has seen."""
        return self._looks.recoveries.ends

    def statistics(self) -> CheckpointStatistics:
        """Returns statistics of the checkpoints so far."""
        return self.coordinator.machine.state.statistics.copy()

    def request(self, wanted: SnapshotRequest, timeout_s: float) -> Answer:
        """Takes a checkpoint or savepoint and waits for the answer. Raises an error if it fails, or
        JobTimeoutError.
        """
        if self._done.done():
            # The inbox is not read any more: an action in it would exist as long as the job object.
            raise not_taken(wanted.kind, f"the job is {self._done.result().status}")
        request = uuid.uuid4().hex
        future: Future[Answer] = Future()
        self.requests[request] = future
        try:
            self._tell_coordinator(
                lambda: co.CheckpointRequested(now_ms(), request, wanted.kind, wanted.target, wanted.savepoint_format)
            )
            if self._done.done() and not future.done():
                raise not_taken(wanted.kind, f"the job is {self._done.result().status}")
            answer = future.result(timeout_s)
        except TimeoutError:
            raise JobTimeoutError(
                f"job {self._spec.job_name!r} has not completed the {wanted.kind.words} within {timeout_s:g} s"
                "; wait longer (timeout=), and look at the job page for tasks that are slow"
            ) from None
        finally:
            self.requests.pop(request, None)
        if answer.checkpoint_id is None:
            raise not_taken(wanted.kind, answer.error)
        return answer

    # --- the loop -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._done.done():
                self._step()
        except BaseException as error:  # noqa: BLE001 (an error in the loop ends the job only)
            leave_if_forked(self._pid)
            self.break_down(f"the local runtime broke down: {error_text(error)}")
            log_failure(log, f"the local runtime of {self.name} broke down", error)
        finally:
            # A source that blocks forever does not delay the end of the job. Its thread ends with its read.
            self._stop(self._worker_of)
            for worker in self._workers:
                worker.forget()
            if self._first_pool is not None:
                self._first_pool.close()
            for request in list(self.requests.values()):  # A request that is added now sees that the job is over.
                if not request.done():
                    request.set_result(Answer(None, "the job has ended"))
            self._effects.close()
            self.coordinator_pool.close()
            self.copy_pool.close()  # Not awaited: the storage of a savepoint may not answer.
            self.log_pool.close()
            if not join_all((self.coordinator_pool, self.log_pool), CLOSE_WAIT_S):
                log.warning("I/O of %s has not ended and is abandoned", self.name)
            _alive.discard(self)

    def break_down(self, reason: str) -> None:
        """Stops a job that can neither continue nor write to its log. Runs on the job's thread."""
        if not self._done.done():
            progress = progress_of(self.coordinator.machine.state, {}, self.coordinator)
            self.coordinator.halt()
            self._lease.end()
            self._done.set_result(replace(progress, status="failed", reason=reason))

    def _thread_died(self, error: BaseException) -> None:
        text = f"a thread of the local runtime died: {error_text(error)}"
        self.post(lambda: self.break_down(text))

    def _step(self) -> None:
        if now_ms() >= self._dropped_rows_due_ms:
            self._dropped_rows_due_ms = now_ms() + EVERY_MS
            self._looks.look(self._hosts())
            self._report_dropped_rows()
        while self.messages:
            self.messages.popleft()()
        if self._done.done():
            return  # The next timer may belong to a checkpoint, hours away.
        busy = self._turn()
        self._take_messages(block=not busy and not self.messages)

    def _turn(self) -> bool:
        """Gives one turn to a subtask of the next worker that has work. Returns False if none has work."""
        count = len(self._workers)
        for index in range(count):
            at = (self._next_worker + index) % count
            if self._workers[at].next_turn():
                self._next_worker = at + 1
                return True
        return False

    def _take_messages(self, block: bool) -> None:
        wait_ms = self.timers.wait_ms if block else 0
        wait_s = IDLE_S if wait_ms is None else wait_ms / 1000
        try:
            self.messages.append(self._inbox.get(timeout=wait_s) if wait_s > 0 else self._inbox.get_nowait())
            while True:
                self.messages.append(self._inbox.get_nowait())
        except queue.Empty:
            pass
        while self.timers.due:
            self.messages.append(self.timers.pop())

    def _report_dropped_rows(self, over: bool = False) -> None:
        for line in self._dropped_rows.lines(now_ms(), self._looks.vertices(), over):
            log.warning("%s: %s", self.name, line)

    def post(self, action: Callable[[], object]) -> None:
        self._inbox.put(action)

    def _tell_coordinator(self, event: Callable[[], CoordinatorEvent]) -> None:
        self.post(lambda: self.coordinator.handle(event()))

    # --- subtasks -------------------------------------------------------------------------------------------------

    def worker_of(self, task: TaskId) -> Worker:
        return self._worker_of[task]

    def failed(self, subtask: Subtask, error: BaseException) -> None:
        self._report_failure(subtask.task, subtask.attempt, error)
        self.let_go(subtask)

    def let_go(self, subtask: Subtask) -> None:
        try:
            self._looks.leave(subtask.task, subtask.host)
        finally:
            subtask.retire()

    def _report_failure(self, task: TaskId, attempt: AttemptNumber, error: BaseException) -> None:
        """Reports the failure of a task to the coordinator, and then logs it. Nothing may prevent the report."""
        reason, permanent, same = failure_text(error), is_permanent(error), fingerprint(error)
        self.messages.append(
            lambda: self.coordinator.handle(co.TaskFailed(now_ms(), attempt, task, reason, permanent, same))
        )
        log_failure(log, f"task {task} of attempt {attempt} failed", error)

    def _hosts(self) -> dict[TaskId, TaskDriver]:
        """Returns the driver of each running subtask, by task. May be called from any thread."""
        found = (subtask for worker in self._workers for subtask in list(worker.subtasks.values()))
        return {subtask.task: subtask.host for subtask in found}

    def _io_pool(self, tasks: Iterable[TaskId]) -> IoPool:
        return io_pool(self.context.graph, tasks, "tidegate-io", self._thread_died)

    def _stop(self, tasks: Iterable[TaskId]) -> None:
        for task in tasks:
            if (subtask := self._worker_of[task].stop(task)) is not None:
                self.let_go(subtask)

    # --- requests of the coordinator ------------------------------------------------------------------------------

    def deploy(self, instruction: do.DeployAttempt) -> None:
        """Starts the tasks of an attempt, which replaces their running attempts. `instruction.tasks` is None for
        all tasks.
        """
        attempt = instruction.attempt
        tasks = self.context.graph.tasks() if instruction.tasks is None else instruction.tasks
        self._stop(tasks)
        # The first attempt uses the threads that were started with the job. A later one gets new threads, because old
        # ones may block.
        pool, self._first_pool = self._first_pool or self._io_pool(tasks), None
        self._looks.recoveries.deployed(attempt, tasks, now_ms())
        siblings: dict[Worker, set[TaskId]] = {}
        for task in tasks:
            siblings.setdefault(self._worker_of[task], set()).add(task)
        begun = [self._begun(task, attempt, siblings[self._worker_of[task]], pool) for task in tasks]
        for subtask in begun:
            if subtask is not None:
                subtask.worker.guarded(subtask, partial(subtask.host.restore, instruction.restore))
        if not any(begun):
            pool.close()

    def _begun(
        self, task: TaskId, attempt: AttemptNumber, siblings: Collection[TaskId], pool: IoPool
    ) -> LocalSubtask | None:
        """Creates and starts a subtask. If that fails, reports the failure and returns None."""
        worker = self._worker_of[task]
        subtask = LocalSubtask(self, worker, task, attempt, siblings)
        try:
            descriptor = self.context.describe(task, attempt)
            store = retrying(self._open_store)
            effects = TaskEffects(self.context, descriptor, store, now_ms, kept=worker.kept(task))
            host = TaskDriver(TaskMachine(descriptor), effects, subtask)
        except BaseException as error:  # noqa: BLE001 (a function of the user is copied here, by its own code)
            leave_if_forked(self._pid)
            self._report_failure(task, attempt, error)
            return None
        subtask.begin(host, pool)
        worker.add(subtask)
        self._looks.begin(task, attempt)
        return subtask

    def cancel_tasks(self, instruction: do.CancelAttempt) -> None:
        """Stops the tasks of an instruction, or all tasks if it names none."""
        self._stop(self._worker_of if instruction.tasks is None else instruction.tasks)

    def end(self, instruction: do.EndJob) -> None:
        """Sweeps the files of a job that has ended, ends its lease, and publishes its end."""
        self._stop(self._worker_of)
        self._report_dropped_rows(over=True)
        state = self.coordinator.machine.state
        self._effects.sweep(permit_sweep(state))
        self.coordinator.halt()
        self._lease.end(finished=state.status is JobStatus.FINISHED and not state.gave_up)
        self._done.set_result(progress_of(state, {}, self.coordinator))


_alive: weakref.WeakSet[LocalJob] = weakref.WeakSet()


def jobs_here() -> list[LocalJob]:
    """Returns the running jobs of this process, from all environments."""
    return [job for job in list(_alive) if not job.over]


@atexit.register
def _let_go() -> None:
    """Stops the running jobs when the process exits.

    A thread that runs Python code while the interpreter shuts down can crash it.
    """
    deadline_s = time.monotonic() + LEAVE_WAIT_S
    jobs = list(_alive)
    for job in jobs:
        job.abandon()
    for job in jobs:
        job.join(deadline_s)


class LocalWiring:
    """The callbacks of the workers of a local job (a `Wiring`)."""

    def __init__(self, job: LocalJob) -> None:
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
        """Does nothing, because the progress of a local subtask is read directly."""


class LocalSubtask(Subtask):
    """A subtask of a local job. The other workers of the job are in the same process."""

    def __init__(
        self, job: LocalJob, worker: Worker, task: TaskId, attempt: AttemptNumber, siblings: Collection[TaskId]
    ) -> None:
        super().__init__(worker, task, attempt, siblings)
        self._job = job

    def report(self, event: CoordinatorEvent) -> None:
        self._job.messages.append(partial(self._job.coordinator.handle, event))

    def connect_out(self, neighbour: TaskId) -> Transport:
        return QueueTransport(neighbour, self._job.messages, self._job.worker_of(neighbour).deliver, self.now_ms)


class LocalCoordinatorPort:
    """The `CoordinatorPort` of a local job."""

    def __init__(self, job: LocalJob) -> None:
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
        raise ProtocolError(
            f"a local job cannot end process {instruction.process}: it has one process; this is a bug in tidegate, "
            "please report it"
        )

    def send(self, task: TaskId, event: ev.TaskEvent) -> None:
        def deliver() -> None:
            worker = self._job.worker_of(task)
            if (subtask := worker.subtasks.get(task)) is not None:
                worker.deliver(task, subtask.attempt, event)

        self._job.messages.append(deliver)

    def run_io(self, work: Callable[[], CoordinatorEvent | None]) -> None:
        self._run(self._job.coordinator_pool, work)

    def run_copy(self, work: Callable[[], CoordinatorEvent | None]) -> None:
        self._run(self._job.copy_pool, work)

    def _run(self, pool: ThreadPool, work: Callable[[], CoordinatorEvent | None]) -> None:
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
        # A job's id is new with each submission, so no other process writes to its log.
        self.halt(reason, fenced=True)

    def halt(self, reason: str, *, fenced: bool) -> None:
        # All of the job is in this process, so no other coordinator has adopted its tasks.
        log.error("job %s has failed: its coordinator stops: %s", self._job.name, reason)
        self._job.break_down(f"the coordinator stopped: {reason}")


class TaskMetricsView:
    """The last measured metrics of the tasks of one job."""

    def __init__(self, graph: JobGraph) -> None:
        self._graph = graph
        self._meters: dict[TaskId, TaskMeter] = {}
        self._seen: dict[TaskId, SubtaskMetrics] = {}
        self.recoveries = RecoveryWatch(graph)
        """Measures the durations of recoveries from the metrics."""

    def begin(self, task: TaskId, attempt: AttemptNumber) -> None:
        """Records that an attempt of a task begins."""
        self._meters[task] = TaskMeter(task, attempt, monotonic_ms())
        self._seen.pop(task, None)

    def look(self, hosts: Mapping[TaskId, TaskDriver]) -> None:
        """Measures the metrics of the running tasks, given their drivers."""
        came = [(host.first_row_at_ms, task) for task, host in hosts.items() if host.first_row_at_ms is not None]
        for at_ms, task in sorted(came):
            self.recoveries.row_came_in(hosts[task].machine.attempt, task, at_ms)
        for task, host in hosts.items():
            self._seen[task] = self._meters[task].read(TaskTotals.of(host, monotonic_ms()), now_ms())

    def leave(self, task: TaskId, host: TaskDriver) -> None:
        """Measures the metrics of a task that has ended or is stopped, for the last time."""
        self.look({task: host})
        self._seen[task] = self._seen[task].at_rest

    def rows_in(self) -> dict[TaskId, int]:
        """Returns the number of received rows of each task in its newest attempt, at the last measurement."""
        return {task: seen.records_in for task, seen in dict(self._seen).items()}

    def vertices(self) -> tuple[VertexMetrics, ...]:
        """Returns the last measured metrics of the tasks, by vertex."""
        seen = dict(self._seen)
        return vertices_of(self._graph, seen, {task: each.attempt for task, each in seen.items()})
