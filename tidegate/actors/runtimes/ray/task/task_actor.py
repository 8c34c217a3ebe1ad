"""`TaskProcess`: the actor on Ray that holds one task of one attempt, and can be given another one in place.

Rules:

- Calls only put a message into the mailbox and return. `frame` has a concurrency group of one thread to itself, so
  frames of one sender keep their order; whatever else the coordinator and the peers say comes through `control`.
- `live` and `run` are calls that stay pending: they fail the moment the process dies, faster than any heartbeat.
  `live` stands for the process, `run` for one attempt of its task, whose end it returns.
- `pulse` has a thread to itself as well: a process that lives answers it, however long a function of the user takes.
- A task that is stopped leaves its keyed state in the process: the next attempt of the same task may go on with it.
- A task that fails leaves the process to the next attempt, unless no thread can be started any more, which stays so.
- Whatever ends a task, its end is told first: without a new thread, from memory that was set aside. What follows,
  closing and logging, may fail or never come back. A process that cannot even tell ends itself, which is noticed.
- `run` returns when the task's last elements and report have arrived; from then on a dead process is no failure.
- What was meant for another attempt is dropped, and so is an order that comes twice, or after what took it back
  (`Obedience`).
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import ray

from tidegate.actors.coordinator.job.job_spec import RestorePoint
from tidegate.actors.coordinator.messages.events import CoordinatorEvent, TaskAnswered, TaskFinished, TaskReady
from tidegate.actors.hosts.job_context import JobContext
from tidegate.actors.hosts.ports import TryAgain
from tidegate.actors.hosts.task.task_effects import TaskEffects
from tidegate.actors.hosts.task.task_host import TaskHost, answer_of
from tidegate.actors.hosts.threads import WorkerPool, leave_if_forked, leave_unreported
from tidegate.actors.protocol.failure_reasons import log_failure
from tidegate.actors.protocol.identity import ChannelId, TaskId
from tidegate.actors.restore.state_follower import StateFollower
from tidegate.actors.runtimes.ray.exchange.connections import Connections, LinkOffer
from tidegate.actors.runtimes.ray.exchange.frame_exchange import Packed
from tidegate.actors.runtimes.ray.exchange.frame_heads import Head, read_head
from tidegate.actors.runtimes.ray.exchange.line import HasLine
from tidegate.actors.runtimes.ray.exchange.shared_segment import Offer
from tidegate.actors.runtimes.ray.process.actor_log import TaskLog
from tidegate.actors.runtimes.ray.process.belonging import hold_on
from tidegate.actors.runtimes.ray.process.exit_reasons import close_sockets_in_children
from tidegate.actors.runtimes.ray.process.lifeline import end_process
from tidegate.actors.runtimes.ray.process.mailbox import Mailbox
from tidegate.actors.runtimes.ray.process.obedience import Obedience
from tidegate.actors.runtimes.ray.process.orders import Handle, Held, Order
from tidegate.actors.runtimes.ray.process.outbox import Outbox
from tidegate.actors.runtimes.ray.process.outcomes import Outcome, Outcomes
from tidegate.actors.runtimes.ray.process.signs_of_life import IO_THREAD_NAMES, SignsOfLife
from tidegate.actors.runtimes.ray.process.termination import end_at_sigterm
from tidegate.actors.runtimes.ray.slots.pending_demand import DemandForCalls
from tidegate.actors.runtimes.ray.task.channel_calls import ChannelCalls
from tidegate.actors.runtimes.ray.task.deliveries import Deliveries
from tidegate.actors.runtimes.ray.task.frame_order import OrderedFrames
from tidegate.actors.runtimes.ray.task.row_counts import METRICS_MS, RowCounts
from tidegate.actors.runtimes.ray.task.warm_standby import WarmStandby
from tidegate.actors.runtimes.ray.task.warm_up import prepare
from tidegate.actors.runtimes.ray.vertex_labels import task_names
from tidegate.actors.state_backends.common.backend import KeyedBackend
from tidegate.actors.task.messages import events as ev
from tidegate.actors.task.messages import instructions as do
from tidegate.actors.task.task_machine import TaskMachine
from tidegate.storage.clock import monotonic_ms, now_ms
from tidegate.storage.files.retrying_store import retrying
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import AttemptNumber, Generation, OperatorUid

log = logging.getLogger(__name__)

IO_THREADS, RESTORE_THREADS, TICK_MS = 4, 4, 200
RESERVE_BYTES = 1024 * 1024
"""Set aside while a task runs, and given back when it fails: its end must be told where there is no memory left."""


class TaskProcess(SignsOfLife, HasLine):
    """The actor's class. `coordinator` takes reports.

    A `spare` process pays ahead for what its first rows will need. One that has a task at once loads what that needs.
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
        """`role`: what the process is started for, the name of a task or "standby"."""
        self._names = task_names(context.graph)
        self._shown_as = f"{context.job_name}: {role}"
        self._log = TaskLog(context)
        close_sockets_in_children()
        end_at_sigterm()
        prepare(spare, context.graph)
        self._context = context
        self._open_store, self._bundle = open_store, bundle
        self._outcomes = Outcomes()
        self._running: _RunningTask | None = None
        self._left: TaskAnswered | None = None
        """What the task that has finished here last answers to a coordinator that takes over."""
        self._obedience = Obedience()
        self._kept: tuple[TaskId, Mapping[OperatorUid, KeyedBackend]] | None = None
        """What the last task has left to its next attempt."""
        self._reserve: bytearray | None = None
        self._pid = os.getpid()
        self._mailbox = Mailbox("tidegate-task", self._turn, self._tick, TICK_MS, self._failed, METRICS_MS)
        self._warm = WarmStandby(context, retrying(open_store), self._mailbox, RESTORE_THREADS, self._thread_died)
        self._connections = Connections(self._thread_died)
        HasLine.__init__(self, coordinator, self._connections, {"tell": self.tell})
        self._outbox = Outbox(partial(self._line.say, "report"), self._mailbox)
        self.why_late = DemandForCalls()
        self._mailbox.start()
        SignsOfLife.__init__(self, self._mailbox)
        hold_on(coordinator, self.info(), lambda: self._obedience.newest)

    def __repr__(self) -> str:
        """What Ray shows of this actor. Ray calls it once, when the actor has started."""
        return self._shown_as

    # --- calls of Ray ---------------------------------------------------------------------------------------------

    # Ray sends frames and grants again where a connection breaks: they have numbers (`frame_order.py`).
    @ray.method(concurrency_group="data", num_returns=0, enable_task_events=False, max_task_retries=-1)
    def frame(self, head: Head, elements: tuple[Any, ...], place: tuple[Any, ...] | None = None) -> None:
        """Elements came in on a channel; the first one has the number in `head`. `place`: where its batches lie."""
        attempt, channel, first_sequence = read_head(head)
        at_ms = now_ms()
        self._mailbox.post(lambda: self._arrived(at_ms, attempt, channel, first_sequence, (elements, place)))

    @ray.method(concurrency_group="control", enable_task_events=False)
    def offer(self, head: Head, offer: Offer | LinkOffer) -> str:
        """The sender of a channel has memory for its rows, or listens. Returns why not; empty: it is taken."""
        attempt, channel, _ = read_head(head)
        running = self._running
        if running is None or running.attempt != attempt:
            return "the receiver runs another attempt"
        return running.channels.take(channel, offer)

    @ray.method(concurrency_group="control", enable_task_events=False, max_task_retries=-1)
    def credit(self, head: Head, window_bytes: int) -> None:
        """The receiver of a channel has room for a total number of bytes."""
        attempt, channel, total_bytes = read_head(head)
        granted = ev.CreditGranted(now_ms(), attempt, channel, total_bytes, window_bytes)
        self._mailbox.post(partial(self._deliver, attempt, granted))

    @ray.method(concurrency_group="control")
    def tell(self, attempt: AttemptNumber, event: ev.TaskEvent) -> None:
        """The coordinator says something to the task of an attempt."""
        self._mailbox.post(partial(self._deliver, attempt, event))

    @ray.method(concurrency_group="control")
    def deploy(self, order: Order) -> None:
        """Begin an attempt, in place of whatever runs."""
        self._mailbox.post(partial(self._deploy, order))

    @ray.method(concurrency_group="control")
    def follow(self, task: TaskId, restore: RestorePoint) -> None:
        """Hold the keyed state of a task that runs elsewhere, as of this checkpoint."""
        self._mailbox.post(lambda: self._warm.follow(task, restore) if self._obedience.given[0] is None else None)

    @ray.method(concurrency_group="control")
    def drop(self, attempt: AttemptNumber, generation: Generation = ev.UNFENCED) -> None:
        """Stop an attempt. Returns once it has stopped: not before a batch that is being processed is done."""
        dropped = threading.Event()
        self._mailbox.post(partial(self._drop, attempt, generation, dropped))
        dropped.wait()

    @ray.method(concurrency_group="control", num_returns=0)
    def leave(self, generation: Generation) -> None:
        """A coordinator cannot go on: end this process, unless another one is in charge."""
        self._mailbox.post(lambda: None if self._obedience.is_replaced(generation) else end_process())

    @ray.method(concurrency_group="control")
    def held(self) -> Held:
        """What this process is there for."""
        return Held(self._context.job_id, self.info(), *self._obedience.given, self._bundle, self._warm.holds)

    @ray.method(concurrency_group="run")
    def run(self, attempt: AttemptNumber) -> Outcome:
        """Pending until the attempt has ended in this process."""
        return self._outcomes.of(attempt).result()

    @ray.method(concurrency_group="live")
    def live(self) -> None:
        """Pending for ever."""
        threading.Event().wait()

    def oldest_call(self) -> int | None:
        """Return the number of the oldest call of `map_async` under way, or None. From any thread."""
        running = self._running
        return None if running is None else running.host.oldest_call

    # --- on the mailbox -------------------------------------------------------------------------------------------

    def _deliver(self, attempt: AttemptNumber, event: ev.TaskEvent) -> None:
        running, left = self._running, self._left
        if isinstance(event, ev.CoordinatorTookOver) and self._obedience.is_replaced(event.generation):
            return
        if running is not None and running.attempt == attempt:
            self._guarded(running, lambda: running.take(event))
        elif isinstance(event, ev.CoordinatorTookOver) and left is not None and left.attempt == attempt:
            self._outbox.send(replace(left, at_ms=now_ms(), generation=event.generation))

    def _arrived(self, at_ms: int, attempt: AttemptNumber, channel: ChannelId, number: int, packed: Packed) -> None:
        running = self._running
        if running is not None and running.attempt == attempt:
            self._guarded(running, lambda: running.receive(at_ms, channel, number, packed))

    def _turn(self) -> bool:
        running = self._running
        return running is not None and self._guarded(running, running.host.turn)

    def _tick(self) -> None:
        if self._running is not None:
            self._running.count()

    def _guarded(self, running: _RunningTask, action: Callable[[], bool | None]) -> bool:
        """Let the task act if it is still the one that runs; what it raises has failed it."""
        if self._running is not running:
            return False
        try:
            progressed = bool(action())
        except BaseException as error:  # noqa: BLE001 (code of users: whatever it raises has failed the task)
            leave_if_forked(self._pid)
            self._fail(running, error)
            return True
        if running.host.finished:
            self._end(running, Outcome("finished"))
        elif running.first_rows_untold:
            running.count()
        return progressed

    def _deploy(self, order: Order) -> None:
        if not self._obedience.begins(order.task, order.attempt, order.generation):
            log.info("attempt %d of %s is not begun: the order is an old one", order.attempt, order.task)
            return
        self._left = None
        self._log.is_about(order.task, order.attempt)
        shown_as = f"{self._context.job_name}: {self._names[order.task]}"
        if shown_as != self._shown_as:
            self._shown_as = shown_as
            self._log.is_shown_as(shown_as)
        if self._running is not None:
            self._end(self._running, Outcome("replaced"))
        self._outcomes.begin(order.attempt)
        self._starting = True
        try:
            self._reserve = bytearray(RESERVE_BYTES)
            kept, self._kept = self._kept, None
            left = kept[1] if kept is not None and kept[0] == order.task else {}
            running = _RunningTask(self, order, left, self._warm.end(order.task))
        except BaseException as error:  # noqa: BLE001 (functions of users are copied here, by their own code)
            leave_if_forked(self._pid)
            self._tell_failure(order.attempt, error)
            log_failure(log, f"task {order.task} of attempt {order.attempt} cannot start", error)
            return
        self._running = running
        self._guarded(running, lambda: running.host.restore(order.restore))

    def _drop(self, attempt: AttemptNumber, generation: Generation, dropped: threading.Event) -> None:
        if not self._obedience.lets_go(attempt, generation):
            dropped.set()
            return
        if self._running is not None and self._running.attempt <= attempt:
            self._end(self._running, Outcome("replaced"))
        self._outcomes.begin(attempt + 1)
        dropped.set()

    def _end(self, running: _RunningTask, outcome: Outcome) -> None:
        self._running, self._starting = None, False
        if outcome.kind == "finished":
            self._left = running.last_words()
            running.channels.finish()
            running.deliveries.when_all_arrived(partial(self._outcomes.settle, running.attempt))
        else:
            self._outcomes.settle(running.attempt, outcome)
            self._kept = running.task, running.host.hand_over()
        self._let_go(running)

    def _fail(self, running: _RunningTask, error: BaseException) -> None:
        self._running = None
        self._tell_failure(running.attempt, error)
        log_failure(log, f"task {running.task} of attempt {running.attempt} failed", error)
        self._let_go(running)

    def _tell_failure(self, attempt: AttemptNumber, error: BaseException) -> None:
        self._reserve, self._starting = None, False
        try:
            self._outcomes.settle(attempt, Outcome.failed(error))
        except BaseException:  # noqa: BLE001 (nobody would ever hear of it)
            leave_unreported()

    def _let_go(self, running: _RunningTask) -> None:
        try:
            running.count(over=True)
        finally:
            running.retire()

    def _failed(self, error: BaseException) -> None:
        """Something of this process has failed, on the mailbox or on another thread: so has its task."""
        if self._running is not None:
            self._fail(self._running, error)

    def _thread_died(self, error: BaseException) -> None:
        self._mailbox.post(lambda: self._failed(error))


class _RunningTask:
    """One task of one attempt in this process, and the world as it sees it (a `TaskPort`)."""

    virtual = False

    def __init__(
        self,
        process: TaskProcess,
        order: Order,
        kept: Mapping[OperatorUid, KeyedBackend],
        follower: StateFollower | None,
    ) -> None:
        context = process._context
        self.task = order.task
        self.attempt = order.attempt
        self._process = process
        self._peers = order.peers
        descriptor = context.describe(order.task, order.attempt)
        self.deliveries = Deliveries(process._mailbox, lambda action: process._guarded(self, action))
        node_id, connections = process.info().node_id, process._connections
        doors: Any = process  # what comes over a connection comes in where calls do
        self.channels = ChannelCalls(order, context, descriptor, node_id, self.deliveries, connections, doors)
        self._frames = OrderedFrames(self.take, self.call_later)
        self._counts = RowCounts(process._line, context, descriptor)
        descriptor = replace(descriptor, backend=replace(descriptor.backend, restore_threads=RESTORE_THREADS))
        store = retrying(process._open_store)
        effects = TaskEffects(
            context, descriptor, store, now_ms, RESTORE_THREADS, kept, follower, why_late=process.why_late
        )
        self.host = TaskHost(TaskMachine(descriptor), effects, self)
        try:
            self._pool = WorkerPool(IO_THREADS, IO_THREAD_NAMES, process._thread_died)
        except BaseException:
            self.host.close()
            raise

    def take(self, event: ev.TaskEvent) -> None:
        """Let the task take in one fact."""
        if isinstance(event, ev.CoordinatorTookOver):
            self._counts.forget()
        self.host.handle(event)

    def last_words(self) -> TaskAnswered:
        """What the task, which is over, answers to a coordinator that takes over."""
        asked = ev.CoordinatorTookOver(now_ms(), self.attempt, self.host.machine.fence.generation)
        answers = (i for i in self.host.machine.handle(asked) if isinstance(i, do.AnswerTakeover))
        return answer_of(self.task, now_ms(), next(answers))

    def now_ms(self) -> int:
        return now_ms()

    def receive(self, at_ms: int, channel: ChannelId, first_sequence: int, packed: Packed) -> None:
        """A frame came in."""
        if (arrived := self.channels.received(at_ms, channel, first_sequence, packed)) is not None:
            self._frames.arrived(arrived)

    def send_frame(self, frame: do.SendFrame) -> None:
        self.channels.send(frame)

    def grant_credit(self, grant: do.GrantCredit) -> None:
        self.channels.grant(grant)

    def report(self, event: CoordinatorEvent) -> None:
        self._counts.metrics.told(event)
        if isinstance(event, TaskReady):
            self._process._starting = False
        elif isinstance(event, TaskFinished):
            self.count(over=True)  # before: this may be the end of the job, which is told of as it is known then
        self.deliveries.watch_until_there(self._process._outbox.send(event))

    monotonic_ms = staticmethod(monotonic_ms)

    def call_later(self, delay_ms: int, action: Callable[[], None]) -> None:
        self._process._mailbox.call_later(delay_ms, lambda: self._process._guarded(self, action))

    def run_io(self, work: Callable[[], ev.TaskEvent | TryAgain | None]) -> None:
        def finish(future: Future[ev.TaskEvent | TryAgain | None]) -> None:
            if (event := future.result()) is not None:
                self.host.handle(event)

        self._pool.submit(work, lambda future: self.deliveries.later(lambda: finish(future)))

    def set_timer(self, instruction: do.SetTaskTimer, delay_ms: int) -> None:
        # A timer may be far away: it must not keep the state of a task that is over until then.
        process, weak = self._process, weakref.ref(self)

        def fire() -> None:
            if (running := weak()) is not None:
                event = ev.TimerDue(now_ms(), instruction.timer, instruction.due_at_ms)
                process._guarded(running, lambda: running.host.handle(event))

        process._mailbox.call_later(delay_ms, fire)

    @property
    def first_rows_untold(self) -> bool:
        """Whether rows have come in and the coordinator does not know of any."""
        return self._counts.nobody_knows and self.host.rows_in > 0

    def count(self, over: bool = False) -> None:
        """Tell the coordinator and Ray's metrics how far the task is. `over`: for the last time."""
        self._counts.tell(self.host, over)

    def retire(self) -> None:
        """Let go of files once the I/O that is under way has come back; what it brings is dropped."""
        self.channels.close()
        self.host.hurry()
        self._pool.close(self.host.close)
