"""`WorkerProcess`: the Ray actor that runs the subtasks of one slot, and takes later attempts in place.

Rules:

- Calls only put a message into the mailbox and return. `frame` has a concurrency group of one thread to itself, so
  frames of one sender keep their order. All other calls come through `control`.
- On the same node frames, credit and messages come over sockets (`peer_connections.py`, `control_channel.py`).
- A subtask is reported as ready when it is restored and the connections to all its neighbours are settled.
- `live` is a call that stays pending: it fails the moment the process dies, faster than any heartbeat.
- The end of an attempt of a subtask is reported (`Ended`), and reported again to a coordinator that takes over.
- A subtask that fails leaves the process to the next attempt, unless the process can start no more threads.
- The end of a subtask is reported first, without a new thread and from memory that was set aside. Closing and logging
  may fail or never return. A process that cannot even report ends itself, which is noticed.
- A subtask has finished when its last elements and reports have arrived. From then on a dead process is no failure.
- Messages for another attempt are dropped, as are deployments that come twice or too late (`DeployFence`).
- The coordinator gets the number of rows when there are new ones, and the first ones at once, because they end a
  recovery. Metrics are written once a second, and are sent along if they have changed.
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
from tidegate.actors.ray.coordinator_liveness import end_process, hold_on
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
"""Set aside while subtasks run, and given back when one fails: its end must be reported where no memory is left."""


class WorkerProcess(HealthEndpoint):
    """The actor's class. `coordinator` takes reports.

    A `spare` process waits for the subtasks of a slot whose process has died.
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
        """`role`: what the process is started for, the name of a slot or "standby"."""
        self._shown_as = f"{context.job_name}: {role}"
        self._log = WorkerLog(context)
        close_sockets_in_children()
        end_at_sigterm()
        keep_freed_memory()
        gc.freeze()  # A full collection of what is imported would take 60 ms in the middle of a batch.
        self._context = context
        self._open_store, self._bundle, self._spare = open_store, bundle, spare
        self._left: dict[TaskId, TaskAnswered] = {}
        """What a subtask that has finished here answers to a coordinator that takes over."""
        self._ended: dict[TaskId, Ended] = {}
        """How the newest attempts of subtasks have ended here."""
        self._obedience = DeployFence()
        self._reserve: bytearray | None = None
        self._pid = os.getpid()
        self._mailbox = Mailbox(
            "tidegate-worker", self._turn, self._tick, TICK_MS, self._failed, METRICS_MS, self._flush
        )
        self._worker = Worker(context.graph, _Wiring(self))
        self._warm = WarmStandby(context, retrying(open_store), self._mailbox, RESTORE_THREADS, self._thread_died)
        self._line = ControlChannel(coordinator, {"tell": self.tell})
        self._outbox = Outbox(partial(self._line.say, "report"), self._mailbox)
        self.why_late = DemandForCalls()
        HealthEndpoint.__init__(self, self._mailbox)
        self._links = self._listen()
        self._mailbox.start()
        hold_on(coordinator, self.info(), lambda: self._obedience.newest)

    def _listen(self) -> PeerConnections:
        """Take connections from the coordinator and from other workers on this node from now on."""
        info, options = self.info(), self._context.options
        links = PeerConnections(info.actor_id, info.node_id, options.shared_bytes, self)
        if options.sockets:

            def came(process_id: str) -> Listener | None:
                return self._line.came() if process_id == COORDINATOR else links.came(process_id)

            connections = Connections(self._context.secret, info.actor_id, came, self._cannot_read)
            try:
                self.address = connections.listen()
            except OSError as error:
                log.warning("this process takes no connections, all goes by calls of Ray: %s", error)
            else:
                links.use(connections)
        return links

    def __repr__(self) -> str:
        """What Ray shows of this actor. Ray calls it once, when the actor has started."""
        return self._shown_as

    # --- calls of Ray ---------------------------------------------------------------------------------------------

    # Ray sends frames and grants again where a connection breaks: they have numbers (`peer_transports.py`).
    @ray.method(concurrency_group="data", num_returns=0, enable_task_events=False, max_task_retries=-1)
    def frame(self, head: Head, elements: tuple[Any, ...] | bytes) -> None:
        """Elements came in on a channel, as they are or pickled; the first one has the number in `head`."""
        self._mailbox.post(partial(self._arrived, now_ms(), head, read_elements(elements), sort=True))

    @ray.method(concurrency_group="control", max_task_retries=-1)
    def no_link(self, process_id: str, reason: str) -> None:
        """Another worker's process cannot connect to this one."""
        self._mailbox.post(partial(self._links.refused, process_id, reason))

    @ray.method(concurrency_group="control", enable_task_events=False, max_task_retries=-1)
    def credit(self, head: Head, window_bytes: int) -> None:
        """The receiver of a channel has room for a total number of bytes."""
        self.credit_came(head, window_bytes)

    @ray.method(concurrency_group="control")
    def tell(self, told: tuple[tuple[TaskId, AttemptNumber, ev.TaskEvent], ...]) -> None:
        """The coordinator sends events to subtasks in their attempts."""
        self._mailbox.post(partial(self._told, told))

    @ray.method(concurrency_group="control")
    def deploy(self, order: TaskDeployment) -> None:
        """Begin an attempt of subtasks, in place of those that run."""
        self._mailbox.post(partial(self._deploy, order))

    @ray.method(concurrency_group="control")
    def follow(self, task: TaskId, restore: RestorePoint) -> None:
        """Hold the keyed state of a subtask that runs elsewhere, as of this checkpoint."""
        self._mailbox.post(lambda: None if self._obedience.given else self._warm.follow(task, restore))

    @ray.method(concurrency_group="control")
    def drop(self, tasks: tuple[TaskId, ...], attempt: AttemptNumber, generation: Generation = ev.UNFENCED) -> None:
        """Stop an attempt of subtasks. Returns once they have stopped: not before a batch under way is done."""
        dropped = threading.Event()
        self._mailbox.post(partial(self._drop, tasks, attempt, generation, dropped))
        dropped.wait()

    @ray.method(concurrency_group="control", num_returns=0)
    def leave(self, generation: Generation) -> None:
        """A coordinator cannot go on: end this process, unless another one is in charge."""
        self._mailbox.post(lambda: None if self._obedience.is_replaced(generation) else end_process())

    @ray.method(concurrency_group="control")
    def held(self) -> ProcessStatus:
        """What this process is there for."""
        given = dict(self._obedience.given)
        return ProcessStatus(self._context.job_id, self.info(), given, self._bundle, self._warm.holds, self._spare)

    @ray.method(concurrency_group="live")
    def live(self) -> None:
        """Pending for ever."""
        threading.Event().wait()

    def oldest_call(self) -> int | None:
        """Return the number of the oldest call of `map_async` under way, or None. From any thread."""
        calls = (running.host.oldest_call for running in list(self._worker.subtasks.values()))
        return min((call for call in calls if call is not None), default=None)

    def acting(self) -> TaskId | None:
        """Return the subtask that acts now, or acted last. From any thread."""
        return self._worker.doing

    # --- on the mailbox -------------------------------------------------------------------------------------------

    def _running(self, task: TaskId, attempt: AttemptNumber) -> _RaySubtask | None:
        running = self._worker.subtasks.get(task)
        assert running is None or isinstance(running, _RaySubtask)
        return running if running is not None and running.attempt == attempt else None

    def _told(self, told: Iterable[tuple[TaskId, AttemptNumber, ev.TaskEvent]]) -> None:
        for task, attempt, event in told:
            if isinstance(event, ev.CoordinatorTookOver):
                self._taken_over(task, attempt, event)
            else:
                self._worker.deliver(task, attempt, event)

    def _taken_over(self, task: TaskId, attempt: AttemptNumber, event: ev.CoordinatorTookOver) -> None:
        if self._obedience.is_replaced(event.generation):
            return
        if (running := self._running(task, attempt)) is not None:
            running.forget_counts()
            self._worker.deliver(task, attempt, event)
            return
        if (left := self._left.get(task)) is not None and left.attempt == attempt:
            self._outbox.send(replace(left, at_ms=now_ms(), generation=event.generation))
        if (ended := self._ended.get(task)) is not None and ended.attempt == attempt:
            self._outbox.send(ended)

    def _arrived(self, at_ms: int, head: Head, elements: tuple[Any, ...], sort: bool) -> None:
        attempt, channel, first_sequence = read_head(head)
        running = self._running(self._context.graph.receiver(channel), attempt)
        if running is not None:
            frame = ev.FrameArrived(at_ms, attempt, channel, first_sequence, elements)
            self._worker.guarded(running, partial(running.sort if sort else running.take, frame))

    # --- what comes over connections (an `Inbox`) -------------------------------------------------------------------

    def frame_came(self, head: Head, elements: tuple[Any, ...]) -> None:
        """A frame came over a socket. From any thread."""
        self._mailbox.post(partial(self._arrived, now_ms(), head, elements, sort=False))

    def credit_came(self, head: Head, window_bytes: int) -> None:
        """A grant came. From any thread."""
        attempt, channel, total_bytes = read_head(head)
        granted = ev.CreditGranted(now_ms(), attempt, channel, total_bytes, window_bytes)
        self._mailbox.post(partial(self._worker.deliver, self._context.graph.sender(channel), attempt, granted))

    def later(self, action: Callable[[], object]) -> None:
        """Have an action run on the mailbox. From any thread."""
        self._mailbox.post(action)

    def settled(self) -> None:
        """It is known how another process is reached: subtasks may be ready."""
        for running in list(self._worker.subtasks.values()):
            assert isinstance(running, _RaySubtask)
            self._worker.guarded(running, running.settled)

    def broke(self, link: PeerConnection, reason: str) -> None:
        """A connection broke. If a process has died that is the failure, and these attempts are gone by then."""
        for running in list(self._worker.subtasks.values()):
            assert isinstance(running, _RaySubtask)
            fail = partial(running.link_broke, link, reason)
            self._mailbox.call_later(LOST_CALL_GRACE_MS, partial(self._worker.guarded, running, fail))

    # --- on the mailbox, again --------------------------------------------------------------------------------------

    def _turn(self) -> bool:
        busy = self._worker.turn()
        self._outbox.flush()
        return busy

    def _flush(self) -> None:
        self._outbox.flush()

    def _tick(self) -> None:
        for running in list(self._worker.subtasks.values()):
            assert isinstance(running, _RaySubtask)
            running.count()

    def _deploy(self, order: TaskDeployment) -> None:
        tasks = self._obedience.begins(order.tasks, order.attempt, order.generation)
        if not tasks:
            log.info("attempt %d of %s is not begun: the order is an old one", order.attempt, order.tasks)
            return
        shown_as = f"{self._context.job_name}: {order.slot}"
        if shown_as != self._shown_as:
            self._shown_as = shown_as
            self._log.is_shown_as(shown_as)
        self._stop(tasks)
        for task in tasks:
            self._left.pop(task, None)
            self._ended.pop(task, None)
        followers = self._warm.end(tasks)
        self._reserve = bytearray(RESERVE_BYTES)
        begun = [running for task in tasks if (running := self._begun(order, task, tasks, followers)) is not None]
        if begun and self._threads(order, begun):
            for running in begun:
                self._worker.guarded(running, partial(running.host.restore, order.restore))

    def _begun(
        self, order: TaskDeployment, task: TaskId, tasks: Collection[TaskId], followers: dict[TaskId, StateFollower]
    ) -> _RaySubtask | None:
        """Make a subtask; None, and its failure is reported, if it cannot be made."""
        self.starting.add(task)
        try:
            return _RaySubtask(self, order, task, tasks, followers.pop(task, None))
        except BaseException as error:  # noqa: BLE001 (functions of users are copied here, by their own code)
            leave_if_forked(self._pid)
            self._cannot_start(order, task, error)
            return None

    def _threads(self, order: TaskDeployment, begun: list[_RaySubtask]) -> bool:
        """Start the threads for the I/O of an attempt, and let its subtasks run. Returns whether they do."""
        try:
            pool = io_pool(self._context.graph, [each.task for each in begun], IO_THREAD_NAMES, self._thread_died)
        except BaseException as error:  # noqa: BLE001 (reported for each subtask)
            for running in begun:
                self._cannot_start(order, running.task, error)
                running.host.close()
            return False
        for running in begun:
            running.begin(running.host, pool)
            self._worker.add(running)
        return True

    def _cannot_start(self, order: TaskDeployment, task: TaskId, error: BaseException) -> None:
        self._report_failure(task, order.attempt, error)
        log_failure(log, f"task {task} of attempt {order.attempt} cannot start", error)

    def _drop(
        self, tasks: tuple[TaskId, ...], attempt: AttemptNumber, generation: Generation, dropped: threading.Event
    ) -> None:
        let_go = self._obedience.lets_go(tasks, attempt, generation)
        running = self._worker.subtasks
        self._stop([task for task in let_go if task in running and running[task].attempt <= attempt])
        dropped.set()

    def _stop(self, tasks: Iterable[TaskId]) -> None:
        for task in tasks:
            if (running := self._worker.stop(task)) is not None:
                assert isinstance(running, _RaySubtask)
                self.starting.discard(task)
                self.let_go(running)

    def finished(self, running: _RaySubtask) -> None:
        """A subtask has finished: report that once all that it has sent has arrived."""
        task = running.task
        self._left[task] = running.last_words()
        running.neighbours.finish()
        # What it has reported so far must be on its way: that is waited for.
        self._outbox.flush()
        running.deliveries.when_all_arrived(partial(self._settle, task, running.attempt))
        self.let_go(running)

    def _settle(self, task: TaskId, attempt: AttemptNumber, outcome: Outcome) -> None:
        if self._obedience.given.get(task) == attempt:
            self._ended[task] = Ended(attempt, task, outcome)
            self._outbox.send(self._ended[task])

    def fail(self, running: _RaySubtask, error: BaseException) -> None:
        """A subtask has failed, and does not run any more."""
        self._report_failure(running.task, running.attempt, error)
        log_failure(log, f"task {running.task} of attempt {running.attempt} failed", error)
        self.let_go(running)

    def _report_failure(self, task: TaskId, attempt: AttemptNumber, error: BaseException) -> None:
        self._reserve = None
        self.starting.discard(task)
        try:
            self._ended[task] = Ended(attempt, task, Outcome.failed(error))
            self._outbox.send(self._ended[task])
            self._outbox.flush()
        except BaseException:  # noqa: BLE001 (nobody would ever hear of it)
            leave_unreported()

    def let_go(self, running: _RaySubtask) -> None:
        """Count the rows of a subtask for the last time, and close what it holds."""
        try:
            running.count(over=True)
        finally:
            running.retire()

    def _failed(self, error: BaseException) -> None:
        """Something of this process has failed, on the mailbox or on another thread: so have all its subtasks."""
        for running in list(self._worker.subtasks.values()):
            self._worker.fail(running, error)
        # One that could not begin, or not finish, runs no more either: nobody may wait for it.
        for task, attempt in self._obedience.holds.items():
            ends = (self._left.get(task), self._ended.get(task))
            if not any(end is not None and end.attempt == attempt for end in ends):
                self._report_failure(task, attempt, error)

    def _cannot_read(self, error: BaseException) -> None:
        """The thread that reads from sockets has died: end the process, which is noticed.

        Its links stay open, and whatever comes over them would be waited for by this attempt and by later ones.
        """
        log_failure(log, "what comes over sockets is not read any more: this process ends", error)
        end_process()

    def _thread_died(self, error: BaseException) -> None:
        self._mailbox.post(partial(self._failed, error))


class _Wiring:
    """What Ray's worker does for `Worker`."""

    def __init__(self, process: WorkerProcess) -> None:
        self._process = process

    def post(self, action: Callable[[], object]) -> None:
        self._process._mailbox.post(action)

    def call_later(self, delay_ms: int, action: Callable[[], object]) -> None:
        self._process._mailbox.call_later(delay_ms, action)

    def failed(self, subtask: Subtask, error: BaseException) -> None:
        assert isinstance(subtask, _RaySubtask)
        self._process.fail(subtask, error)

    def finished(self, subtask: Subtask) -> None:
        assert isinstance(subtask, _RaySubtask)
        self._process.finished(subtask)

    def acted(self, subtask: Subtask) -> None:
        assert isinstance(subtask, _RaySubtask)
        if subtask.first_rows_untold:
            subtask.count()


class _RaySubtask(Subtask):
    """One subtask of one attempt in this process."""

    def __init__(
        self,
        process: WorkerProcess,
        order: TaskDeployment,
        task: TaskId,
        beside: Collection[TaskId],
        follower: StateFollower | None,
    ) -> None:
        super().__init__(process._worker, task, order.attempt, beside)
        context = process._context
        self._process = process
        descriptor = context.describe(task, order.attempt)
        self.deliveries = Deliveries(process._mailbox, partial(process._worker.guarded, self))
        self.neighbours = PeerTransports(order, context.graph, descriptor, process._links, self.deliveries)
        self._ready: TaskReady | None = None
        """Reported once it is known how all neighbours are reached."""
        self._frames = OrderedFrames(self.take, self.call_later)
        self._counts = ProgressReports(process._line, context, descriptor)
        descriptor = replace(descriptor, backend=replace(descriptor.backend, restore_threads=RESTORE_THREADS))
        effects = TaskEffects(
            context,
            descriptor,
            retrying(process._open_store),
            now_ms,
            RESTORE_THREADS,
            process._worker.kept(task),
            follower,
            why_late=process.why_late,
        )
        self._host = TaskDriver(TaskMachine(descriptor), effects, self)

    def forget_counts(self) -> None:
        """Another coordinator has taken over, and has not heard of any rows."""
        self._counts.forget()

    def last_words(self) -> TaskAnswered:
        """What the subtask, which is over, answers to a coordinator that takes over."""
        asked = ev.CoordinatorTookOver(now_ms(), self.attempt, self.host.machine.fence.generation)
        answers = (i for i in self.host.machine.handle(asked) if isinstance(i, do.AnswerTakeover))
        return answer_of(self.task, now_ms(), next(answers))

    def sort(self, frame: ev.FrameArrived) -> None:
        """A frame came by a call: it is taken in when all before it have been."""
        self._frames.arrived(frame)

    def take(self, frame: ev.FrameArrived) -> None:
        """Take a frame in."""
        self.neighbours.arrived(frame)
        self.host.handle(frame)

    def connect_out(self, neighbour: TaskId) -> Transport:
        return self.neighbours.connect(neighbour)

    def settled(self) -> None:
        """It is known how another process is reached."""
        if self._ready is not None and self.neighbours.settled:
            ready, self._ready = self._ready, None
            self._send(ready)

    def link_broke(self, link: PeerConnection, reason: str) -> None:
        """A link broke some time ago. ConnectionError if that has lost something for this subtask."""
        if self.neighbours.needs(link):
            raise ConnectionError(f"the connection to process {link.process_id} broke: {reason}")

    def report(self, event: CoordinatorEvent) -> None:
        if isinstance(event, TaskReady) and not self.neighbours.settled:
            self._ready = event
        else:
            self._send(event)

    def _send(self, event: CoordinatorEvent) -> None:
        self._counts.metrics.told(event)
        if isinstance(event, TaskReady):
            self._process.starting.discard(self.task)
        elif isinstance(event, TaskFinished):
            self.count(over=True)  # before: this may be the end of the job, which is told of as it is known then
        self.deliveries.watch_until_there(self._process._outbox.send(event))

    @property
    def first_rows_untold(self) -> bool:
        """Whether rows have come in and the coordinator does not know of any."""
        return self._counts.nobody_knows and self.host.rows_in > 0

    def count(self, over: bool = False) -> None:
        """Tell the coordinator and Ray's metrics how far the subtask is. `over`: for the last time."""
        self._counts.tell(self.host, over)


METRICS_MS = 1_000


class ProgressReports:
    """Those of one task; the coordinator is told over `line`."""

    def __init__(self, line: ControlChannel, context: JobContext, descriptor: TaskDescriptor) -> None:
        self._line = line
        self._task = descriptor.task
        self._attempt = descriptor.attempt
        self._meter = TaskMeter(descriptor.task, descriptor.attempt, monotonic_ms())
        self.metrics = TaskMetrics(task_tags(context, descriptor.task))
        self._told_rows_in = 0
        self._told: SubtaskMetrics | None = None
        self._metrics_due_ms = 0

    @property
    def nobody_knows(self) -> bool:
        """Whether the coordinator has not heard of any row that came in."""
        return self._told_rows_in == 0

    def forget(self) -> None:
        """Another coordinator has taken over, and has not heard of any."""
        self._told_rows_in, self._told = 0, None

    def tell(self, host: TaskDriver, over: bool = False) -> None:
        """Tell how far the task is. `over`: nothing follows."""
        metrics: SubtaskMetrics | None = None
        at_ms = monotonic_ms()
        if over or at_ms >= self._metrics_due_ms:
            self._metrics_due_ms = at_ms + METRICS_MS
            metrics = self._measured(host, at_ms, over)
        if host.rows_in != self._told_rows_in or metrics is not None:
            self._told_rows_in = host.rows_in
            self._line.send_unacknowledged("counted", self._attempt, self._task, host.rows_in, metrics)

    def _measured(self, host: TaskDriver, at_ms: int, over: bool) -> SubtaskMetrics | None:
        """Publish the metrics. Returns them if they have changed."""
        read = self._meter.read(TaskTotals.of(host, at_ms), now_ms())
        self.metrics.update(read, over)
        told, self._told = self._told, read.at_rest if over else read
        return None if told is not None and replace(self._told, at_ms=told.at_ms) == told else self._told
