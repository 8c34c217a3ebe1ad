"""`WorkerProcess`: the Ray actor that runs the subtasks of one slot, and later attempts of them in the same process.

Rules:

- Calls only put a message into the mailbox and return. `frame` has a separate concurrency group of one thread, so
  frames of one sender keep their order. All other calls use the group `control`.
- On the same node frames, credit and messages come over sockets (`peer_connections.py`, `control_channel.py`).
- A subtask is reported as ready when it is restored and the transports to all its neighbours are decided.
- `live` is a call that stays pending: it fails the moment the process dies, faster than any heartbeat.
- The end of an attempt of a subtask is reported (`Ended`), and reported again to a new coordinator.
- A subtask that fails leaves the process to the next attempt, unless the process can start no more threads.
- The end of a subtask is reported first, without a new thread and with memory that was reserved. Closing and logging
  may fail or never return. A process that cannot even report ends itself, which the coordinator notices.
- A subtask has finished when its last elements and reports have arrived. From then on the death of its process is no
  failure.
- Messages for another attempt are dropped, as are deployments that arrive twice or too late (`DeployFence`).
- The coordinator gets the number of rows when there are new ones, and the first ones at once, because they end a
  recovery. Metrics are measured once a second, and are sent along if they have changed.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import ray

from tidegate.actors.coordinator.events import CoordinatorEvent, TaskAnswered, TaskFinished, TaskReady
from tidegate.actors.coordinator.job_spec import RestorePoint
from tidegate.actors.drivers.job_context import JobContext
from tidegate.actors.drivers.task_driver import TaskDriver, answer_of
from tidegate.actors.drivers.task_effects import TaskEffects
from tidegate.actors.drivers.threads import leave_if_forked, leave_unreported
from tidegate.actors.drivers.worker import Subtask, Transport, Worker, io_pool, keep_freed_memory
from tidegate.actors.ray.actor_calls import LOST_CALL_GRACE_MS, Deliveries, Ended, Outbox, Outcome
from tidegate.actors.ray.actor_setup import WorkerLog, end_at_sigterm
from tidegate.actors.ray.control_channel import COORDINATOR, ControlChannel
from tidegate.actors.ray.coordinator_liveness import end_process, watch_coordinator
from tidegate.actors.ray.exit_probe import close_sockets_in_children
from tidegate.actors.ray.framed_connections import Connections, Listener
from tidegate.actors.ray.health_endpoint import IO_THREAD_NAMES, HealthEndpoint
from tidegate.actors.ray.mailbox import Mailbox
from tidegate.actors.ray.metrics import TaskMetrics
from tidegate.actors.ray.peer_connections import (
    Head,
    PeerConnection,
    PeerConnections,
    read_elements,
    read_head,
)
from tidegate.actors.ray.peer_transports import OrderedFrames, PeerTransports
from tidegate.actors.ray.resource_waits import DemandForCalls
from tidegate.actors.ray.task_deployment import DeployFence, Handle, ProcessStatus, TaskDeployment
from tidegate.actors.ray.warm_standby import WarmStandby
from tidegate.actors.restore.state_follower import StateFollower
from tidegate.actors.runtimes.task_metrics import SubtaskMetrics, TaskMeter, TaskTotals, task_tags
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.task_descriptor import TaskDescriptor
from tidegate.actors.task.task_machine import TaskMachine
from tidegate.protocol.failures import log_failure
from tidegate.protocol.identity import TaskId
from tidegate.storage.clock import monotonic_ms, now_ms
from tidegate.storage.files.retrying_store import retrying
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import AttemptNumber, Generation

log = logging.getLogger(__name__)

RESTORE_THREADS, TICK_MS = 4, 200
RESERVE_BYTES = 1024 * 1024
"""Size in bytes of memory that is reserved while subtasks run.

It is freed when a subtask fails, because the failure must be reported even without free memory.
"""


class WorkerProcess(HealthEndpoint):
    """The class of the worker's Ray actor.

    `coordinator` is the actor that receives reports. `spare`: the process is a standby. `bundle`: the index of the
    bundle in which it runs, or None.
    """

    def __init__(
        self,
        context: JobContext,
        coordinator: Handle,
        open_store: OpenStore,
        spare: bool = False,
        bundle: int | None = None,
        role: str = "standby",
    ) -> None:
        """Sets up the process and starts its mailbox. `role` is the name of the slot for which it is started, or
        "standby".
        """
        self._shown_as = f"{context.job_name}: {role}"
        self._log = WorkerLog(context)
        close_sockets_in_children()
        end_at_sigterm()
        keep_freed_memory()
        gc.freeze()  # A full collection of all imported modules would take 60 ms in the middle of a batch.
        self.context = context
        self.open_store, self._bundle, self._spare = open_store, bundle, spare
        self._left: dict[TaskId, TaskAnswered] = {}
        """Answers of finished subtasks to a new coordinator, by task."""
        self.ended: dict[TaskId, Ended] = {}
        """The end of the newest attempt of each subtask that has ended in this process."""
        self._fence = DeployFence()
        self._reserve: bytearray | None = None
        self._pid = os.getpid()
        self.mailbox = Mailbox(
            "tidegate-worker", self._turn, self._tick, TICK_MS, self._failed, METRICS_MS, self._flush
        )
        self.worker = Worker(context.graph, _Wiring(self))
        self._warm = WarmStandby(context, retrying(open_store), self.mailbox, RESTORE_THREADS, self.thread_died)
        self.channel = ControlChannel(coordinator, {"deliver": self.deliver})
        self.outbox = Outbox(partial(self.channel.send, "report"), self.mailbox)
        self.why_late = DemandForCalls()
        HealthEndpoint.__init__(self, self.mailbox)
        self.links = self._listen()
        self.mailbox.start()
        watch_coordinator(coordinator, self.info(), lambda: self._fence.newest)

    def _listen(self) -> PeerConnections:
        """Starts to accept connections of the coordinator and of other workers on this node."""
        info, options = self.info(), self.context.options
        links = PeerConnections(info.actor_id, info.node_id, options.shared_bytes, self)
        if options.sockets:

            def accept(process_id: str) -> Listener | None:
                return self.channel.accept() if process_id == COORDINATOR else links.accept(process_id)

            connections = Connections(self.context.secret, info.actor_id, accept, self._cannot_read)
            try:
                self.address = connections.listen()
            except OSError as error:
                log.warning("this process accepts no connections, all messages go by calls of Ray: %s", error)
            else:
                links.use(connections)
        return links

    def __repr__(self) -> str:
        """Returns the name that Ray shows. Ray calls this once, when the actor has started."""
        return self._shown_as

    # --- calls of Ray ---------------------------------------------------------------------------------------------

    # Ray repeats frames and grants when a connection breaks: they have numbers (`peer_transports.py`).
    @ray.method(concurrency_group="data", num_returns=0, enable_task_events=False, max_task_retries=-1)
    def frame(self, head: Head, elements: tuple[Any, ...] | bytes) -> None:
        """Receives a frame: elements of a channel, directly or pickled. `head` has the sequence number of the
        first element.
        """
        self.mailbox.post(partial(self._arrived, now_ms(), head, read_elements(elements), sort=True))

    @ray.method(concurrency_group="control", max_task_retries=-1)
    def no_link(self, process_id: str, reason: str) -> None:
        """Records that another worker's process cannot connect to this process, so that both use Ray calls."""
        self.mailbox.post(partial(self.links.refused, process_id, reason))

    @ray.method(concurrency_group="control", enable_task_events=False, max_task_retries=-1)
    def credit(self, head: Head, window_bytes: int) -> None:
        """Receives a grant of credit from the receiver of a channel."""
        self.credit_came(head, window_bytes)

    @ray.method(concurrency_group="control")
    def deliver(self, events: tuple[tuple[TaskId, AttemptNumber, ev.TaskEvent], ...]) -> None:
        """Receives events of the coordinator for subtasks in their attempts."""
        self.mailbox.post(partial(self._deliver, events))

    @ray.method(concurrency_group="control")
    def deploy(self, deployment: TaskDeployment) -> None:
        """Starts an attempt of subtasks, which replaces their running attempts."""
        self.mailbox.post(partial(self._deploy, deployment))

    @ray.method(concurrency_group="control")
    def follow(self, task: TaskId, restore: RestorePoint) -> None:
        """Makes this standby copy the keyed state of a subtask in another process, from a completed checkpoint."""
        self.mailbox.post(lambda: None if self._fence.given else self._warm.follow(task, restore))

    @ray.method(concurrency_group="control")
    def drop(self, tasks: tuple[TaskId, ...], attempt: AttemptNumber, generation: Generation = ev.UNFENCED) -> None:
        """Stops an attempt of subtasks. Returns when they have stopped, after the batch that is being processed."""
        dropped = threading.Event()
        self.mailbox.post(partial(self._drop, tasks, attempt, generation, dropped))
        dropped.wait()

    @ray.method(concurrency_group="control", num_returns=0)
    def leave(self, generation: Generation) -> None:
        """Ends this process, because its coordinator stops, unless a newer coordinator controls the job."""
        self.mailbox.post(lambda: None if self._fence.is_replaced(generation) else end_process())

    @ray.method(concurrency_group="control")
    def held(self) -> ProcessStatus:
        """Returns which subtasks were deployed to this process, and of which subtasks it copies the state."""
        given = dict(self._fence.given)
        return ProcessStatus(self.context.job_id, self.info(), given, self._bundle, self._warm.holds, self._spare)

    @ray.method(concurrency_group="live")
    def live(self) -> None:
        """Blocks until this process ends, so that callers notice the end of the worker process."""
        threading.Event().wait()

    def oldest_call(self) -> int | None:
        """Returns the number of the longest-running call of `map_async`, or None. May be called from any thread."""
        calls = (running.host.oldest_call for running in list(self.worker.subtasks.values()))
        return min((call for call in calls if call is not None), default=None)

    def acting(self) -> TaskId | None:
        """Returns the subtask that is active, or was active last. May be called from any thread."""
        return self.worker.doing

    # --- on the mailbox -------------------------------------------------------------------------------------------

    def _running(self, task: TaskId, attempt: AttemptNumber) -> _RaySubtask | None:
        running = self.worker.subtasks.get(task)
        assert running is None or isinstance(running, _RaySubtask)
        return running if running is not None and running.attempt == attempt else None

    def _deliver(self, events: Iterable[tuple[TaskId, AttemptNumber, ev.TaskEvent]]) -> None:
        for task, attempt, event in events:
            if isinstance(event, ev.CoordinatorTookOver):
                self._take_over(task, attempt, event)
            else:
                self.worker.deliver(task, attempt, event)

    def _take_over(self, task: TaskId, attempt: AttemptNumber, event: ev.CoordinatorTookOver) -> None:
        if self._fence.is_replaced(event.generation):
            return
        if (running := self._running(task, attempt)) is not None:
            running.forget_counts()
            self.worker.deliver(task, attempt, event)
            return
        if (left := self._left.get(task)) is not None and left.attempt == attempt:
            self.outbox.send(replace(left, at_ms=now_ms(), generation=event.generation))
        if (ended := self.ended.get(task)) is not None and ended.attempt == attempt:
            self.outbox.send(ended)

    def _arrived(self, at_ms: int, head: Head, elements: tuple[Any, ...], sort: bool) -> None:
        attempt, channel, first_sequence = read_head(head)
        running = self._running(self.context.graph.receiver(channel), attempt)
        if running is not None:
            frame = ev.FrameArrived(at_ms, attempt, channel, first_sequence, elements)
            self.worker.guarded(running, partial(running.sort if sort else running.take, frame))

    # --- what comes over connections (an `Inbox`) -------------------------------------------------------------------

    def frame_came(self, head: Head, elements: tuple[Any, ...]) -> None:
        """Receives a frame from another worker's socket. Called on any thread."""
        self.mailbox.post(partial(self._arrived, now_ms(), head, elements, sort=False))

    def credit_came(self, head: Head, window_bytes: int) -> None:
        """Receives a credit grant from a socket or a Ray call. Called on any thread."""
        attempt, channel, total_bytes = read_head(head)
        granted = ev.CreditGranted(now_ms(), attempt, channel, total_bytes, window_bytes)
        self.mailbox.post(partial(self.worker.deliver, self.context.graph.sender(channel), attempt, granted))

    def later(self, action: Callable[[], object]) -> None:
        """Runs an action on the mailbox. May be called from any thread."""
        self.mailbox.post(action)

    def settled(self) -> None:
        """Reports subtasks as ready that were only waiting for the transport to another process to be chosen."""
        for running in list(self.worker.subtasks.values()):
            assert isinstance(running, _RaySubtask)
            self.worker.guarded(running, running.settled)

    def broke(self, link: PeerConnection, reason: str) -> None:
        """Fails the subtasks that need a broken connection, after a grace period.

        If the other process has died, the coordinator has stopped these subtasks by then.
        """
        for running in list(self.worker.subtasks.values()):
            assert isinstance(running, _RaySubtask)
            fail = partial(running.link_broke, link, reason)
            self.mailbox.call_later(LOST_CALL_GRACE_MS, partial(self.worker.guarded, running, fail))

    # --- on the mailbox, again --------------------------------------------------------------------------------------

    def _turn(self) -> bool:
        busy = self.worker.turn()
        self.outbox.flush()
        return busy

    def _flush(self) -> None:
        self.outbox.flush()

    def _tick(self) -> None:
        for running in list(self.worker.subtasks.values()):
            assert isinstance(running, _RaySubtask)
            running.count()

    def _deploy(self, deployment: TaskDeployment) -> None:
        tasks = self._fence.begins(deployment.tasks, deployment.attempt, deployment.generation)
        if not tasks:
            log.info("attempt %d of %s is not begun: the deployment is outdated", deployment.attempt, deployment.tasks)
            return
        shown_as = f"{self.context.job_name}: {deployment.slot}"
        if shown_as != self._shown_as:
            self._shown_as = shown_as
            self._log.is_shown_as(shown_as)
        self._stop(tasks)
        for task in tasks:
            self._left.pop(task, None)
            self.ended.pop(task, None)
        followers = self._warm.end(tasks)
        self._reserve = bytearray(RESERVE_BYTES)
        begun = [running for task in tasks if (running := self._begun(deployment, task, tasks, followers)) is not None]
        if begun and self._threads(deployment, begun):
            for running in begun:
                self.worker.guarded(running, partial(running.host.restore, deployment.restore))

    def _begun(
        self,
        deployment: TaskDeployment,
        task: TaskId,
        tasks: Collection[TaskId],
        followers: dict[TaskId, StateFollower],
    ) -> _RaySubtask | None:
        """Creates a subtask. If that fails, reports the failure and returns None."""
        self.starting.add(task)
        try:
            return _RaySubtask(self, deployment, task, tasks, followers.pop(task, None))
        except BaseException as error:  # noqa: BLE001 (functions of users are copied here, by their own code)
            leave_if_forked(self._pid)
            self._cannot_start(deployment, task, error)
            return None

    def _threads(self, deployment: TaskDeployment, begun: list[_RaySubtask]) -> bool:
        """Starts the I/O threads of an attempt, and then its subtasks. If that fails, reports the failure and
        returns False.
        """
        try:
            pool = io_pool(self.context.graph, [each.task for each in begun], IO_THREAD_NAMES, self.thread_died)
        except BaseException as error:  # noqa: BLE001 (reported for each subtask)
            for running in begun:
                self._cannot_start(deployment, running.task, error)
                running.host.close()
            return False
        for running in begun:
            running.begin(running.host, pool)
            self.worker.add(running)
        return True

    def _cannot_start(self, deployment: TaskDeployment, task: TaskId, error: BaseException) -> None:
        self._report_failure(task, deployment.attempt, error)
        log_failure(log, f"task {task} of attempt {deployment.attempt} cannot start", error)

    def _drop(
        self, tasks: tuple[TaskId, ...], attempt: AttemptNumber, generation: Generation, dropped: threading.Event
    ) -> None:
        stopped = self._fence.stops(tasks, attempt, generation)
        running = self.worker.subtasks
        self._stop([task for task in stopped if task in running and running[task].attempt <= attempt])
        dropped.set()

    def _stop(self, tasks: Iterable[TaskId]) -> None:
        for task in tasks:
            if (running := self.worker.stop(task)) is not None:
                assert isinstance(running, _RaySubtask)
                self.starting.discard(task)
                self.close_subtask(running)

    def finished(self, running: _RaySubtask) -> None:
        """Closes a finished subtask. Reports its end once all frames and reports that it has sent have arrived."""
        task = running.task
        self._left[task] = running.takeover_answer()
        running.neighbours.finish()
        # Its earlier reports must be on their way, because `when_all_arrived` waits only for sent ones.
        self.outbox.flush()
        running.deliveries.when_all_arrived(partial(self._settle, task, running.attempt))
        self.close_subtask(running)

    def _settle(self, task: TaskId, attempt: AttemptNumber, outcome: Outcome) -> None:
        if self._fence.given.get(task) == attempt:
            self.ended[task] = Ended(attempt, task, outcome)
            self.outbox.send(self.ended[task])

    def fail(self, running: _RaySubtask, error: BaseException) -> None:
        """Reports the failure of a subtask, which has stopped, and closes it."""
        self._report_failure(running.task, running.attempt, error)
        log_failure(log, f"task {running.task} of attempt {running.attempt} failed", error)
        self.close_subtask(running)

    def _report_failure(self, task: TaskId, attempt: AttemptNumber, error: BaseException) -> None:
        self._reserve = None
        self.starting.discard(task)
        try:
            self.ended[task] = Ended(attempt, task, Outcome.failed(error))
            self.outbox.send(self.ended[task])
            self.outbox.flush()
        except BaseException:  # noqa: BLE001 (the failure would stay unnoticed)
            leave_unreported()

    def close_subtask(self, running: _RaySubtask) -> None:
        """Reports the last row counts and metrics of a subtask, and closes the subtask."""
        try:
            running.count(over=True)
        finally:
            running.retire()

    def _failed(self, error: BaseException) -> None:
        """Fails all subtasks, because an error of the process itself occurred, on the mailbox or on another
        thread.
        """
        for running in list(self.worker.subtasks.values()):
            self.worker.fail(running, error)
        # Subtasks that could not begin or finish do not run any more either, and must not be waited for.
        for task, attempt in self._fence.holds.items():
            ends = (self._left.get(task), self.ended.get(task))
            if not any(end is not None and end.attempt == attempt for end in ends):
                self._report_failure(task, attempt, error)

    def _cannot_read(self, error: BaseException) -> None:
        """Ends the process, because the thread that reads from sockets has died.

        The connections stay open, so this attempt and later ones would wait forever for messages over them.
        """
        log_failure(log, "sockets are not read any more: this process ends", error)
        end_process()

    def thread_died(self, error: BaseException) -> None:
        """Fails all subtasks, because a thread of this process has died. May be called from any thread."""
        self.mailbox.post(partial(self._failed, error))


class _Wiring:
    """The callbacks (`Wiring`) of the `Worker` in a Ray process."""

    def __init__(self, process: WorkerProcess) -> None:
        self._process = process

    def post(self, action: Callable[[], object]) -> None:
        self._process.mailbox.post(action)

    def call_later(self, delay_ms: int, action: Callable[[], object]) -> None:
        self._process.mailbox.call_later(delay_ms, action)

    def failed(self, subtask: Subtask, error: BaseException) -> None:
        assert isinstance(subtask, _RaySubtask)
        self._process.fail(subtask, error)

    def finished(self, subtask: Subtask) -> None:
        assert isinstance(subtask, _RaySubtask)
        self._process.finished(subtask)

    def acted(self, subtask: Subtask) -> None:
        assert isinstance(subtask, _RaySubtask)
        if subtask.first_rows_unreported:
            subtask.count()


class _RaySubtask(Subtask):
    """An attempt of a subtask in this worker process."""

    def __init__(
        self,
        process: WorkerProcess,
        deployment: TaskDeployment,
        task: TaskId,
        siblings: Collection[TaskId],
        follower: StateFollower | None,
    ) -> None:
        super().__init__(process.worker, task, deployment.attempt, siblings)
        context = process.context
        self._process = process
        descriptor = context.describe(task, deployment.attempt)
        self.deliveries = Deliveries(process.mailbox, partial(process.worker.guarded, self))
        self.neighbours = PeerTransports(deployment, context.graph, descriptor, process.links, self.deliveries)
        self._ready: TaskReady | None = None
        """The report that the subtask is ready, until the transports to all neighbours are decided. Then None."""
        self._frames = OrderedFrames(self.take, self.call_later)
        self._counts = ProgressReports(process.channel, context, descriptor)
        descriptor = replace(descriptor, backend=replace(descriptor.backend, restore_threads=RESTORE_THREADS))
        effects = TaskEffects(
            context,
            descriptor,
            retrying(process.open_store),
            now_ms,
            RESTORE_THREADS,
            process.worker.kept(task),
            follower,
            why_late=process.why_late,
        )
        self._host = TaskDriver(TaskMachine(descriptor), effects, self)

    def forget_counts(self) -> None:
        """Makes the next report of counts complete, because a new coordinator has no counts yet."""
        self._counts.forget()

    def takeover_answer(self) -> TaskAnswered:
        """Returns the status of this finished subtask, for a new coordinator."""
        asked = ev.CoordinatorTookOver(now_ms(), self.attempt, self.host.machine.fence.generation)
        answers = (i for i in self.host.machine.handle(asked) if isinstance(i, do.AnswerTakeover))
        return answer_of(self.task, now_ms(), next(answers))

    def sort(self, frame: ev.FrameArrived) -> None:
        """Receives a frame that arrived by a Ray call, and delivers it after all frames with lower sequence numbers."""
        self._frames.arrived(frame)

    def take(self, frame: ev.FrameArrived) -> None:
        """Passes a frame to the subtask's state machine."""
        self.neighbours.arrived(frame)
        self.host.handle(frame)

    def connect_out(self, neighbour: TaskId) -> Transport:
        return self.neighbours.connect(neighbour)

    def settled(self) -> None:
        """Sends the waiting report that the subtask is ready, if the transports to all neighbours are chosen now."""
        if self._ready is not None and self.neighbours.settled:
            ready, self._ready = self._ready, None
            self._send(ready)

    def link_broke(self, link: PeerConnection, reason: str) -> None:
        """Raises ConnectionError if a broken connection has lost data of this subtask."""
        if self.neighbours.needs(link):
            raise ConnectionError(
                f"the connection to process {link.process_id} broke: {reason}; the tasks restart from the newest "
                "checkpoint"
            )

    def report(self, event: CoordinatorEvent) -> None:
        if isinstance(event, TaskReady) and not self.neighbours.settled:
            self._ready = event
        else:
            self._send(event)

    def _send(self, event: CoordinatorEvent) -> None:
        self._counts.metrics.reported(event)
        if isinstance(event, TaskReady):
            self._process.starting.discard(self.task)
        elif isinstance(event, TaskFinished):
            self.count(over=True)  # First: this may be the end of the job, and the final status has the last counts.
        self.deliveries.watch_until_there(self._process.outbox.send(event))

    @property
    def first_rows_unreported(self) -> bool:
        """Returns whether the subtask has received its first rows and has not reported them to the coordinator."""
        return self._counts.nothing_reported and self.host.rows_in > 0

    def count(self, over: bool = False) -> None:
        """Reports the row counts and metrics of the subtask to the coordinator and to Ray. `over`: this is the last
        report of the attempt.
        """
        self._counts.report(self.host, over)


METRICS_MS = 1_000


class ProgressReports:
    """Reports the row counts and metrics of one task: to the coordinator over `channel`, and to Ray's metrics."""

    def __init__(self, channel: ControlChannel, context: JobContext, descriptor: TaskDescriptor) -> None:
        self._channel = channel
        self._task = descriptor.task
        self._attempt = descriptor.attempt
        self._meter = TaskMeter(descriptor.task, descriptor.attempt, monotonic_ms())
        self.metrics = TaskMetrics(task_tags(context, descriptor.task))
        self._reported_rows_in = 0
        self._reported: SubtaskMetrics | None = None
        self._metrics_due_ms = 0

    @property
    def nothing_reported(self) -> bool:
        """Returns whether no row was reported to the coordinator yet."""
        return self._reported_rows_in == 0

    def forget(self) -> None:
        """Makes the next report complete, because a new coordinator has no counts yet."""
        self._reported_rows_in, self._reported = 0, None

    def report(self, host: TaskDriver, over: bool = False) -> None:
        """Sends the row count, and at most once a second the metrics, if they have changed. `over`: this is the last
        report of the attempt.
        """
        metrics: SubtaskMetrics | None = None
        at_ms = monotonic_ms()
        if over or at_ms >= self._metrics_due_ms:
            self._metrics_due_ms = at_ms + METRICS_MS
            metrics = self._measured(host, at_ms, over)
        if host.rows_in != self._reported_rows_in or metrics is not None:
            self._reported_rows_in = host.rows_in
            self._channel.send_unacknowledged("counted", self._attempt, self._task, host.rows_in, metrics)

    def _measured(self, host: TaskDriver, at_ms: int, over: bool) -> SubtaskMetrics | None:
        """Measures the metrics and publishes them in Ray. Returns them if they have changed, else None."""
        read = self._meter.read(TaskTotals.of(host, at_ms), now_ms())
        self.metrics.update(read, over)
        before, self._reported = self._reported, read.at_rest if over else read
        unchanged = before is not None and replace(self._reported, at_ms=before.at_ms) == before
        return None if unchanged else self._reported
