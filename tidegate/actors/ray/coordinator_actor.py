"""`CoordinatorProcess`: the Ray actor that runs the coordinator of one job.

Rules:

- Calls only put a message into the mailbox, or read what the mailbox has published. No call waits for longer than its
  caller allows.
- Each event is in the event log before it has consequences. So Ray may restart this actor at any time: the new process
  replays the log, becomes the next generation, and takes the running workers over (`discovery.py`). It waits while the
  storage of the log does not answer, because it can do nothing without the log.
- A separate thread writes log entries, so a sink commit that hangs does not delay the job's decisions.
- Metrics of the job are published about once a second (`runtimes/job_metrics.py` computes the values).
"""

from __future__ import annotations

import itertools
import logging
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import cache

import ray
from ray import cloudpickle
from ray.util.metrics import Histogram

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.checkpoint_statistics import CheckpointStatistics
from tidegate.actors.coordinator.coordinator_machine import CoordinatorMachine
from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.coordinator.events import CoordinatorEvent
from tidegate.actors.coordinator.invariants import permit_sweep
from tidegate.actors.coordinator.job_history import JobHistory
from tidegate.actors.coordinator.job_spec import FIRST_PAUSE_MS, JobSpec, pause_ms
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.actors.drivers.coordinator_driver import CoordinatorDriver, replay
from tidegate.actors.drivers.coordinator_effects import COPY_THREADS, CoordinatorEffects
from tidegate.actors.drivers.event_log_writer import LogPosition
from tidegate.actors.drivers.job_context import JobContext
from tidegate.actors.drivers.lease_keeper import LeaseKeeper
from tidegate.actors.drivers.outages import OutageNotes
from tidegate.actors.drivers.threads import ThreadPool
from tidegate.actors.ray.actor_calls import Ended, Report
from tidegate.actors.ray.actor_setup import end_at_sigterm, log_of_coordinator
from tidegate.actors.ray.attempt_supervisor import AttemptSupervisor
from tidegate.actors.ray.control_channel import COORDINATOR
from tidegate.actors.ray.coordinator_liveness import Membership, end_process
from tidegate.actors.ray.coordinator_status import Answers, JobView, StatusEndpoint, TaskReports
from tidegate.actors.ray.framed_connections import Connections
from tidegate.actors.ray.heartbeats import Heartbeats
from tidegate.actors.ray.mailbox import Mailbox
from tidegate.actors.ray.metrics import labels, publish_requests, set_gauge
from tidegate.actors.ray.placement import PoolOptions
from tidegate.actors.ray.resource_waits import PendingDemand
from tidegate.actors.ray.slow_tasks import SlowCheckpoints, SlowDeployments, SlowTaskLog
from tidegate.actors.ray.worker_pool import WorkerHandle, WorkerPool
from tidegate.actors.runtimes import metric_registry as m
from tidegate.actors.runtimes.dropped_row_reports import DroppedRowReports
from tidegate.actors.runtimes.job_metrics import JobTimes, Recovery, job_values, newly_completed, status_values
from tidegate.actors.runtimes.metric_registry import Metric
from tidegate.actors.runtimes.running_job import (
    Answer,
    JobCard,
    JobProgress,
    answers_of,
    progress_of,
)
from tidegate.actors.runtimes.task_metrics import SubtaskMetrics, VertexMetrics, waits_of
from tidegate.actors.task import events as task_ev
from tidegate.protocol.failures import bounded_text, error_text, log_failure
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.checkpoints.metadata import SavepointFormat, SnapshotKind
from tidegate.storage.clock import monotonic_ms, now_ms
from tidegate.storage.errors import CorruptionError, StorageError
from tidegate.storage.ids import AttemptNumber

log = logging.getLogger(__name__)

IO_THREADS, TICK_MS = 4, 1_000
TAKEOVERS_MAX = 5
REPLAY_RETRY_S, TASKS_GONE_TIMEOUT_S = 0.5, 15.0


class CoordinatorProcess(StatusEndpoint):
    """The class of the coordinator's Ray actor."""

    def __init__(self, spec: JobSpec, shared_context: bytes, options: PoolOptions, card: JobCard) -> None:
        runtime_context = ray.get_runtime_context()
        self._spec = spec
        self._card = card
        context_reference: ray.ObjectRef[JobContext] = cloudpickle.loads(shared_context)
        self._context: JobContext = (context := ray.get(context_reference))
        log_of_coordinator(context)
        end_at_sigterm()
        self._options = options
        self._ended = threading.Event()
        self._broken: str | None = None
        self._final: JobProgress | None = None
        self._reports = TaskReports(context.graph)
        self._dropped_rows = DroppedRowReports(context.graph)
        self._answers = Answers()
        self._inherited: frozenset[str] = frozenset()
        """Ids of requests in the replayed log."""
        self._host: CoordinatorDriver | None = None
        self._lease: LeaseKeeper | None = None
        self._metrics = JobMetrics(context.job_name, card.submitted_at_ms)
        self._mailbox = Mailbox(
            "tidegate-coordinator", lambda: False, self._tick, TICK_MS, self._broke_down, flush=self._flush
        )
        self._log_pool = ThreadPool(1, "tidegate-log", self._thread_died)
        self._pool = ThreadPool(IO_THREADS, "tidegate-io", self._thread_died)
        self._copy_pool = ThreadPool(COPY_THREADS, "tidegate-savepoints", self._thread_died)
        workers = WorkerPool(
            context.graph,
            context_reference,
            runtime_context.current_actor,
            options,
            self._mailbox.post,
            runtime_context.get_node_id(),
        )
        connections = Connections(context.secret, COORDINATOR, lambda _: None, self._thread_died)
        handlers = {"report": self.report, "counted": self.counted}

        def join(member: WorkerHandle) -> None:
            info = member.info
            if info is not None and info.address and info.node_id == workers.node_id:
                member.channel.join(connections, info.address, info.actor_id, handlers)

        deployment = AttemptSupervisor(workers, self._handle, self._mailbox, context.heartbeats.timeout_ms, join)
        self._deployment = deployment
        self._heartbeats = Heartbeats(
            context.heartbeats,
            workers,
            self._mailbox,
            found=deployment.found_hung,
            evict=deployment.evict,
            silent=deployment.silent,
        )
        late = SlowTaskLog(deployment.doing, self._mailbox.post, self._mailbox.call_later)
        self._late_checkpoints, self._late_deployments = SlowCheckpoints(late), SlowDeployments(late)
        self._demand = PendingDemand(self._mailbox)
        self._effects = CoordinatorEffects(context, options.open_store, now_ms)
        self._takeovers = 0
        self._mailbox.post(self._start)
        self._mailbox.post(self._heartbeats.start)
        self._mailbox.start()

    def __repr__(self) -> str:
        """Returns the name under which Ray shows the actor in logs."""
        return f"{self._spec.job_name}: coordinator"

    # --- calls of tasks -------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="control")
    def report(self, reports: tuple[Report, ...]) -> None:
        """Receives the reports of a worker's subtasks, and queues them for the mailbox."""
        self._mailbox.post(lambda: self._reported(reports))

    @ray.method(concurrency_group="control", enable_task_events=False)
    def membership(self, name: str, actor_id: str) -> Membership:
        """Returns whether the worker process with this actor id belongs to this job."""
        return self._deployment.membership(name, actor_id, self._host is not None and self._host.in_charge)

    @ray.method(concurrency_group="live")
    def live(self) -> None:
        """Blocks until this process ends, so that callers notice the end of the coordinator."""
        threading.Event().wait()

    @ray.method(concurrency_group="control", num_returns=0, enable_task_events=False)
    def counted(self, attempt: AttemptNumber, task: TaskId, rows_in: int, metrics: SubtaskMetrics | None) -> None:
        """Receives the number of rows that a task has received, and its metrics if they have changed."""
        self._reports.store(attempt, task, rows_in, metrics)
        self._deployment.rows_reported(attempt, task, rows_in)

    # --- calls of drivers -----------------------------------------------------------------------------------------

    @ray.method(concurrency_group="ask")
    def view(self, wait_s: float) -> JobView:
        """Returns the state of the job: now or, if the job ends within `wait_s` seconds, at its end."""
        ended = self._ended.wait(wait_s) if wait_s > 0 else self._ended.is_set()
        at_end = (self._statistics(), self._answers.given(), self._reports.vertices(self._host)) if ended else ()
        return JobView(self._progress(), self._host is not None, ended, self._broken, *at_end)

    @ray.method(concurrency_group="ask")
    def cancel(self) -> None:
        """Requests the cancellation of the job."""
        self._mailbox.post(lambda: self._handle(co.CancelRequested(now_ms())))

    @ray.method(concurrency_group="ask")
    def request(self, request: str, kind: SnapshotKind, target: str | None, savepoint_format: SavepointFormat) -> None:
        """Requests a checkpoint or savepoint under the id `request`. `answer` returns the result later."""
        # A driver that got no reply repeats its call with the same request.
        if self._answers.expect(request):
            self._mailbox.post(lambda: self._requested(request, kind, target, savepoint_format))

    @ray.method(concurrency_group="ask")
    def answer(self, request: str, wait_s: float) -> Answer | None:
        """Returns the answer to the request with this id, or None if there is none within `wait_s` seconds."""
        if self._host is None and not self._ended.is_set() and not self._answers.has(request):
            # The log is being replayed, which reveals what became of the request.
            self._ended.wait(min(wait_s, REPLAY_RETRY_S))
            return None
        answer = self._answers.wait(request, 0.0 if self._ended.is_set() else wait_s)
        if answer is None and self._ended.is_set():
            return Answer(None, "the job has ended")
        return answer

    @ray.method(concurrency_group="ask")
    def vertices(self) -> tuple[VertexMetrics, ...]:
        """Returns the metrics of the tasks, by vertex."""
        return self._reports.vertices(self._host)

    # --- on the mailbox -------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._lease is None:
            self._lease = LeaseKeeper.started(self._context, self._options.open_store, self._options.driver)
        event_log = EventLog(self._options.open_store(self._context.root), self._context.job_id)
        job_history = JobHistory()
        machine, position = replay_when_it_answers(event_log, self._spec.storage_outage_ms, job_history)
        known = answers_of(machine.state)
        self._inherited = frozenset(known)
        self._answers.inherit(known)
        self._metrics.begin(machine.state)
        port, incarnation = _Port(self), uuid.uuid4().hex
        effects = self._effects
        self._host = CoordinatorDriver(
            machine,
            position,
            event_log,
            effects,
            port,
            incarnation,
            job_history=job_history,
            log_rows=self._context.log.rows,
        )
        self._deployment.generation = self._host.generation
        if position.next_index > 0:
            log.warning(
                "the coordinator of %s was lost; generation %d continues from entry %d",
                self._spec.job_name,
                self._host.generation,
                position.next_index,
            )
            self._deployment.take_over(machine.state, self._spec.job_id)
        self._host.start()
        if machine.state.spec is None:
            self._host.handle(co.JobSubmitted(now_ms(), self._spec))

    def _take_over_again(self, reason: str) -> None:
        """Replays the log again, because an entry of the lost coordinator has arrived after the replay."""
        self._takeovers += 1
        if self._takeovers >= TAKEOVERS_MAX:
            self._leave_to_successor(f"{TAKEOVERS_MAX} attempts to take over the log were overtaken: {reason}")
        else:
            log.warning("the log has grown during the takeover, it is replayed again: %s", reason)
            self._start()

    def _reported(self, reports: tuple[Report, ...]) -> None:
        for report in reports:
            if not isinstance(report, Ended):
                self._handle(report)
            elif self._host is not None:
                self._deployment.ended(report)

    def _handle(self, event: CoordinatorEvent) -> None:
        if self._host is not None:
            self._deployment.observe(event)
            self._host.handle(event)

    def _requested(
        self, request: str, kind: SnapshotKind, target: str | None, savepoint_format: SavepointFormat
    ) -> None:
        # The driver repeats a call that was lost with the predecessor, which may have received it.
        if request not in self._inherited:
            self._handle(co.CheckpointRequested(now_ms(), request, kind, target, savepoint_format))

    def _progress(self) -> JobProgress:
        if self._final is not None:
            return self._final
        host = self._host
        if host is None:
            return progress_of(CoordinatorState(), {})
        state = host.machine.state
        deployment, (ready, starting) = self._deployment, self._deployment.standbys()
        return replace(
            progress_of(state, self._reports.rows_in(state), host),
            waits_for=deployment.waits_for()
            or host.waits_for
            or waits_of(self._reports.vertices(host))
            or self._demand.waits_for,
            suspect_nodes=deployment.suspect_nodes,
            standbys_ready=ready,
            standbys_starting=starting,
        )

    def _statistics(self) -> CheckpointStatistics:
        host = self._host
        return CheckpointStatistics() if host is None else host.machine.state.statistics.copy()

    def _flush(self) -> None:
        self._deployment.flush()

    def _tick(self) -> None:
        if self._host is not None:
            state, at_ms = self._host.machine.state, now_ms()
            self._metrics.update(state, self._progress(), at_ms, self._deployment.recoveries.newest)
            self._late_checkpoints.look(state.pending.values(), at_ms)
            self._late_deployments.look(state, self._deployment.waits_for() is None, at_ms)
            self._demand.look(self._heartbeats.busy_ms(), at_ms)
            self._report_dropped_rows(at_ms)

    def _end(self) -> None:
        """Waits until the last task process has ended, sweeps the files of the job, and publishes its end."""
        assert self._host is not None
        host, permit = self._host, permit_sweep(self._host.machine.state)
        self._heartbeats.close()
        self._demand.close()
        gone = self._deployment.close()
        final = self._progress()
        host.halt()

        def sweep() -> None:
            wait(gone, timeout=TASKS_GONE_TIMEOUT_S)
            self._effects.sweep(permit)

        def swept(future: Future[None]) -> None:
            if (error := future.exception()) is not None:
                log_failure(log, f"the sweep of {self._spec.job_name} failed, files are left behind", error)
            self._publish_end()

        self._final = final
        self._pool.submit(sweep, swept)

    def _report_dropped_rows(self, at_ms: int, over: bool = False) -> None:
        for line in self._dropped_rows.lines(at_ms, self._reports.vertices(self._host), over):
            log.warning("%s: %s", self._spec.job_name, line)

    def _publish_end(self) -> None:
        self._report_dropped_rows(now_ms(), over=True)
        if self._lease is not None:
            state = self._host.machine.state if self._host is not None else None
            self._lease.end(finished=state is not None and state.status is JobStatus.FINISHED and not state.gave_up)
        self._ended.set()

    def _leave_to_successor(self, reason: str) -> None:
        """Ends this process, because another coordinator controls the job. Touches none of its files and
        processes.
        """
        log.error("the coordinator of %s leaves: %s", self._spec.job_name, bounded_text(reason))
        end_process()

    def _stop(self, reason: str) -> None:
        """Stops the job, because this coordinator cannot continue.

        A newer coordinator may control the job, which this one notices only when it writes to the log. So it orders its
        worker processes to end. Processes that obey a newer coordinator ignore the order.
        """
        self._broken = bounded_text(reason)
        log.error("the coordinator of %s stops: %s", self._spec.job_name, self._broken)
        try:
            if self._host is not None:
                self._host.halt()
            self._heartbeats.close()
            self._demand.close()
            self._deployment.dismiss()
        finally:
            self._publish_end()

    def _broke_down(self, error: BaseException) -> None:
        if self._final is None:  # Else the job has ended, and late errors change nothing.
            self._stop(error_text(error))

    def _thread_died(self, error: BaseException) -> None:
        # The dead thread may have been the one that would publish the end.
        self._mailbox.post(self._publish_end if self._final is not None else lambda: self._broke_down(error))


class _Port:
    """The `CoordinatorPort` of the coordinator's driver."""

    def __init__(self, process: CoordinatorProcess) -> None:
        self._process = process

    def now_ms(self) -> int:
        return now_ms()

    def monotonic_ms(self) -> int:
        return monotonic_ms()

    def deploy(self, instruction: do.DeployAttempt) -> None:
        self._process._deployment.deploy(instruction)

    def cancel_attempt(self, instruction: do.CancelAttempt) -> None:
        self._process._deployment.cancel(instruction)

    def kill_process(self, instruction: do.KillProcess) -> None:
        self._process._deployment.kill(instruction.process)

    def send(self, task: TaskId, event: task_ev.TaskEvent) -> None:
        deployment, host = self._process._deployment, self._process._host
        deployment.send(task, event)
        if isinstance(event, task_ev.CheckpointCompleted) and host is not None:
            deployment.completed(task, event, host.machine.state)

    def run_io(self, work: Callable[[], CoordinatorEvent | None]) -> None:
        self._run(self._process._pool, work)

    def run_copy(self, work: Callable[[], CoordinatorEvent | None]) -> None:
        self._run(self._process._copy_pool, work)

    def _run(self, pool: ThreadPool, work: Callable[[], CoordinatorEvent | None]) -> None:
        process = self._process

        def finish(future: Future[CoordinatorEvent | None]) -> None:
            event = future.result()
            if event is not None:
                process._handle(event)

        pool.submit(work, lambda future: process._mailbox.post(lambda: finish(future)))

    def append(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        process, host = self._process, self._process._host
        assert host is not None
        done = process._metrics.observing(host.machine.state, done)
        process._log_pool.submit(work, lambda future: process._mailbox.post(lambda: done(future.exception())))

    def set_timer(self, instruction: do.SetTimer, delay_ms: int) -> None:
        process, timer = self._process, instruction.timer
        process._mailbox.call_later(delay_ms, lambda: process._handle(co.TimerFired(now_ms(), timer)), timer)

    def cancel_timer(self, timer: str) -> None:
        self._process._mailbox.cancel_call(timer)

    def call_later(self, delay_ms: int, action: Callable[[], None]) -> None:
        self._process._mailbox.call_later(delay_ms, action)

    def complete_request(self, instruction: do.CompleteRequest) -> None:
        answer = Answer(instruction.checkpoint_id, instruction.error, instruction.path)
        self._process._answers.give(instruction.request, answer)

    def end_job(self, instruction: do.EndJob) -> None:
        why = f": {instruction.reason}" if instruction.reason else ""
        log.info("job %s is over: %s%s", self._process._spec.job_name, instruction.status, why)
        self._process._end()

    def replay_again(self, reason: str) -> None:
        self._process._take_over_again(reason)

    def halt(self, reason: str, *, fenced: bool) -> None:
        if fenced:
            self._process._leave_to_successor(reason)
        else:
            self._process._stop(reason)


def replay_when_it_answers(
    event_log: EventLog, outage_ms: int, job_history: JobHistory | None = None
) -> tuple[CoordinatorMachine, LogPosition]:
    """Replays the log as `replay` does, and retries while storage does not answer.

    Raises CorruptionError at once, and StorageError after an outage of `outage_ms`.
    """
    notes = OutageNotes("the event log", monotonic_ms)
    for attempt in itertools.count(1):
        try:
            return replay(event_log, job_history)
        except CorruptionError:
            raise
        except StorageError as error:
            away_ms = notes.failed(error, "the job waits until its log is readable")
            if away_ms >= outage_ms:
                raise
            threading.Event().wait(pause_ms(FIRST_PAUSE_MS, attempt) / 1000)
    raise AssertionError(
        "the loop over reads of the event log must return or raise; this is a bug in tidegate, please report it"
    )


_Done = Callable[[BaseException | None], None]

_DURATION_BOUNDARIES_MS = [5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1e3, 2.5e3, 5e3, 10e3, 60e3]


@cache
def _histogram(metric: Metric) -> Histogram:
    return Histogram(metric.name, description=metric.meaning, boundaries=_DURATION_BOUNDARIES_MS, tag_keys=metric.tags)


class JobMetrics:
    """Publishes the metrics of one job in Ray, from its coordinator."""

    def __init__(self, job: str, submitted_at_ms: int) -> None:
        self._tags = {"job": job}
        self._times = JobTimes(submitted_at_ms)
        self._completed = 0

    def begin(self, state: CoordinatorState) -> None:
        """Starts from a replayed state. Checkpoints that completed under an earlier coordinator are not counted
        again.
        """
        self._completed = state.statistics.completed

    def observing(self, state: CoordinatorState, done: _Done) -> _Done:
        """Returns a callback for writes to the event log that calls `observe`, then `done`.

        A call of `observe` once a second would miss checkpoints if several complete in between and the history drops
        them.
        """

        def observed(error: BaseException | None) -> None:
            self.observe(state)
            done(error)

        return observed

    def observe(self, state: CoordinatorState) -> None:
        """Adds the duration of each checkpoint that has completed since the last call to the histogram."""
        if state.statistics.completed != self._completed:
            for record in newly_completed(state.statistics, self._completed):
                _histogram(m.CHECKPOINT_DURATION).observe(record.duration_ms, labels(self._tags))
            self._completed = state.statistics.completed

    def update(
        self, state: CoordinatorState, progress: JobProgress, now_ms: int, recovery: Recovery | None = None
    ) -> None:
        """Publishes the current values of the job's gauges. `recovery` is the newest recovery, or None."""
        publish_requests(self._tags["job"])
        self._times = self._times.at(state, now_ms)
        for metric, value in job_values(state, progress, self._times, now_ms, recovery).items():
            set_gauge(metric, value, self._tags)
        for status, value in status_values(state).items():
            set_gauge(m.STATUS, value, self._tags | {"status": status})
