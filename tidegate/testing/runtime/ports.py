"""The ports of the simulated runtime: messages arrive late, twice or not at all, and I/O fails.

All reports of the subtasks of a process in one round are sent in one message, as are the messages of the coordinator to
them. A message is lost or repeated as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.events import CoordinatorEvent
from tidegate.actors.drivers.committing_sinks import CommitFailedError
from tidegate.actors.drivers.coordinator_driver import CoordinatorDriver
from tidegate.actors.drivers.coordinator_effects import CoordinatorEffects
from tidegate.actors.drivers.job_context import JobContext
from tidegate.actors.drivers.ports import TryAgain
from tidegate.actors.drivers.task_driver import TaskDriver
from tidegate.actors.drivers.task_effects import TaskEffects
from tidegate.actors.drivers.worker import Subtask, Transport
from tidegate.actors.graph.slot_plan import WorkerId
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as task_do
from tidegate.actors.task.task_machine import TaskMachine, is_order
from tidegate.protocol.failures import OperatorError
from tidegate.protocol.identity import TaskId
from tidegate.protocol.stream_elements import Barrier
from tidegate.storage.errors import StorageError
from tidegate.storage.ids import AttemptNumber, CheckpointId
from tidegate.testing.oracle import InvariantViolated
from tidegate.testing.oracle.causes import Ledger
from tidegate.testing.oracle.copies import CopiesOracle, NodeCopiesOracle
from tidegate.testing.oracle.job_observer import Watch
from tidegate.testing.runtime.processes import SimulatedNodes, SimulatedProcess, SimulatedProcesses
from tidegate.testing.world.disk import SimulatedDisk
from tidegate.testing.world.virtual_time import World

CUT_OFF_MS = 1_000
"""Longest additional delay in ms of messages from a coordinator that was replaced but still runs."""
RECOVERY_MS = 300
"""Time in ms until the successor of a lost coordinator starts."""
CHANCES_OF_A_COPY = 100
"""How often it is drawn whether the coordinator is lost while it copies a savepoint.

It is large, because a copy takes as long as many other events.
"""
TAKEOVER_DROP = 0.1
_UNSURE = (co.CheckpointAcknowledged, co.TaskAnswered)
"""Reports that may be lost or arrive twice."""
COORDINATOR = "coordinator"
ROUND_MS_MAX = 5
"""After at most this time in ms a process sends the reports of its subtasks in one message."""
STORAGE = "storage"
"""The name in the trace for hooks, and for files that are written or deleted."""


class JobInTheWorld(Protocol):
    """The methods of `SimulatedJob` that the ports call."""

    world: World
    watch: Watch
    context: JobContext
    disk: SimulatedDisk
    coordinator: CoordinatorDriver | None
    """The coordinator that controls the job, or None while there is none."""
    coordinator_crashes: int
    processes: SimulatedProcesses
    nodes: SimulatedNodes

    def deliver(self, task: TaskId, event: ev.TaskEvent) -> None: ...
    def report(self, event: CoordinatorEvent) -> None: ...
    def deploy(self, instruction: do.DeployAttempt, by: CoordinatorDriver, cause: int | None) -> None: ...
    def cancel(self, instruction: do.CancelAttempt, cause: int | None) -> None: ...
    def end(self, port: SimulatedCoordinatorPort) -> None: ...
    def give_up(self, port: SimulatedCoordinatorPort, reason: str) -> None: ...
    def start_coordinator(self) -> None: ...
    def maybe_lose_coordinator(self, chances: int = 1) -> None: ...
    def lost_with(self, host: CoordinatorDriver) -> bool: ...


class WatchedHost(TaskDriver):
    """A task driver that reports all events and instructions of its machine to the oracles."""

    def __init__(
        self, machine: TaskMachine, effects: TaskEffects, port: SimulatedSubtask, watch: Watch, world: World
    ) -> None:
        super().__init__(machine, effects, port)
        self._watch = watch
        self._world = world
        self._process = port.process
        self._ordered: ev.CoordinatorOrder | None = None
        """The order of a coordinator that the machine is handling now, or None."""
        self._heard_of = ev.UNFENCED
        """Generation of the newest coordinator from which the task has received an order."""

    def handle(self, event: ev.TaskEvent | TryAgain) -> None:
        """Handles an event, and lets the oracles check the result."""
        if isinstance(event, TryAgain):
            super().handle(event)
            return
        full = isinstance(event, ev.TurnGranted) and self._watch.oracle.before_turn(self.machine)
        self._ordered = event if is_order(event) else None
        if isinstance(event, ev.RowsCommitted):
            self._watch.oracle.commits.confirmed(event.rows)
        if isinstance(event, ev.FrameArrived):
            self._watch.oracle.local_queues.arrived(self._process.name, event)
        super().handle(event)
        self._watch.oracle.after_event(self.machine, event, full, self._port.monotonic_ms())

    def _perform(self, instructions: Sequence[task_do.TaskInstruction], handled_ms: int) -> None:
        ordered = self._ordered
        self._ordered = None
        if ordered is not None:
            task = self.machine.descriptor.task
            self._watch.takeovers.obeyed(task, type(ordered).__name__, ordered.generation, self._heard_of)
            self._heard_of = max(self._heard_of, ordered.generation)
            if isinstance(ordered, ev.WatermarkAnnounced):
                self._watch.oracle.alignment.heard(self.machine, ordered)
            self._process.obeys(self._heard_of)
        for instruction in instructions:
            self._watch.task_does(self.machine, instruction)
            if isinstance(instruction, task_do.SendFrame) and self._watch.oracle.local_queues.sent(
                self._process.name, instruction
            ):
                self._watch.coverage.saw("sent_inside")
            if isinstance(instruction, task_do.PersistSnapshot | task_do.PersistChannelState):
                cause = self._watch.causes.of_trigger(instruction.checkpoint_id)
                self._world.message(self.machine.descriptor.task, STORAGE, instruction, cause=cause)
        super()._perform(instructions, handled_ms)


class _Network:
    """The simulated network between processes. It delays, loses and repeats messages."""

    def __init__(self, job: JobInTheWorld, subtask: SimulatedSubtask, to: TaskId) -> None:
        self._job = job
        self._subtask = subtask
        self._to = to

    def send(self, frame: task_do.SendFrame) -> None:
        """Sends a frame to the receiver. Frames of a channel arrive in order, except for repeated frames."""
        job = self._job
        world = self._job.world
        receiver = self._to
        if world.chance("drop"):
            world.message(self._subtask.task, receiver, frame.channel, "frame", frame.first_sequence, "is lost")
            return
        self._subtask.note(frame)

        def arrive() -> None:
            event = ev.FrameArrived(world.wall_ms, frame.attempt, frame.channel, frame.first_sequence, frame.elements)
            job.deliver(receiver, event)

        world.after_in_order((frame.attempt, frame.channel), world.delay_ms(), arrive)
        if world.chance("duplicate"):
            world.after(world.delay_ms() * 2, _again(world, arrive))

    def grant(self, grant: task_do.GrantCredit) -> None:
        """Sends a grant of credit to the sender of the channel. It may be lost."""
        job = self._job
        world = self._job.world
        sender = self._to
        if world.chance("drop"):
            world.message(self._subtask.task, sender, grant.channel, "grant of", grant.total_bytes, "is lost")
            return
        world.after(
            world.delay_ms(),
            lambda: job.deliver(
                sender,
                ev.CreditGranted(world.wall_ms, grant.attempt, grant.channel, grant.total_bytes, grant.window_bytes),
            ),
        )


class SimulatedSubtask(Subtask):
    """One subtask of one attempt in a simulated process, with its access to network, storage and clock."""

    virtual = True

    def __init__(
        self,
        job: JobInTheWorld,
        process: SimulatedProcess,
        task: TaskId,
        attempt: AttemptNumber,
        siblings: Collection[TaskId],
    ) -> None:
        super().__init__(process, task, attempt, siblings)
        self._job = job
        self.process = process
        self.turn_is_due = False

    def now_ms(self) -> int:
        return self._job.world.wall_ms

    def monotonic_ms(self) -> int:
        return self._job.world.now_ms

    def send_frame(self, frame: task_do.SendFrame) -> None:
        if self.is_sibling(self._job.context.graph.receiver(frame.channel)):
            self.note(frame)
        super().send_frame(frame)

    def note(self, frame: task_do.SendFrame) -> None:
        """Adds a frame that was sent to the trace."""
        job = self._job
        receiver = self._job.context.graph.receiver(frame.channel)
        barrier = next((element for element in frame.elements if isinstance(element, Barrier)), None)
        cause = None if barrier is None else job.watch.causes.of_trigger(barrier.checkpoint_id)
        job.world.message(self.task, receiver, frame.channel, frame.first_sequence, frame.elements, cause=cause)

    def connect_out(self, neighbour: TaskId) -> Transport:
        return _Network(self._job, self, neighbour)

    def report(self, event: CoordinatorEvent) -> None:
        """Adds a report to the next message of the process to the coordinator."""
        unreported = self.process.unreported
        job = self._job
        world = self._job.world
        unreported.append(event)
        if len(unreported) == 1:
            world.after(world.between(0, ROUND_MS_MAX), partial(send_reports, job, self.process))
        if isinstance(event, co.TaskReady) and world.faults.restore_crash > 0.0:
            world.after(world.delay_ms(), partial(job.processes.dies_early, self))

    def run_io(self, work: Callable[[], ev.TaskEvent | TryAgain | None]) -> None:
        job = self._job
        world = self._job.world
        process = self.process

        def act() -> None:
            current = process.has(self)
            if not current and world.random.random() < 0.5:
                return
            if current and job.nodes.is_cut(process):
                job.nodes.hold(process, act)
                return
            if job.processes.dies_early(self):
                return
            try:
                event = work()
            except (StorageError, CommitFailedError) as error:
                reason = str(error)
                world.after(0, lambda: process.guarded(self, lambda: _raise(StorageError(reason))))
                return
            except OperatorError as error:
                if not isinstance(error.__cause__, StorageError):
                    raise  # A function or a sink of the pipeline has failed, and not the simulated storage.
                reason = str(error)
                world.after(0, lambda: process.guarded(self, lambda: _raise(StorageError(reason))))
                return
            if event is not None:
                world.after(world.io_ms(), lambda: process.guarded(self, lambda: self.host.handle(event)))

        world.after(world.io_ms(), act)

    def set_timer(self, instruction: task_do.SetTaskTimer, delay_ms: int) -> None:
        super().set_timer(instruction, _delay_ms(self._job.world, instruction.due_at_ms, delay_ms))


def send_reports(job: JobInTheWorld, process: SimulatedProcess) -> None:
    """Sends the reports that the subtasks of a process have queued, in one message.

    The reports that may be lost are lost together and repeated together. All other reports always arrive.
    """
    if not process.acts(partial(send_reports, job, process)):
        return
    events = tuple(process.unreported)
    world = job.world
    process.unreported.clear()
    unsure = tuple(event for event in events if isinstance(event, _UNSURE))
    answers = any(isinstance(event, co.TaskAnswered) for event in unsure)

    def arrive(reports: Sequence[CoordinatorEvent]) -> None:
        if len({event.task for event in reports if isinstance(event, co.CheckpointAcknowledged)}) > 1:
            job.watch.coverage.saw("acknowledged_together")
        for event in reports:
            job.report(event)

    if unsure and (world.chance("drop") or (answers and _lost_in_a_takeover(world))):
        world.message(_sender(unsure[0]), COORDINATOR, *unsure, "is lost", cause=_cause(job, unsure[0]))
        events = tuple(event for event in events if not isinstance(event, _UNSURE))
    elif unsure and world.chance("duplicate"):
        world.after(world.delay_ms() * 2, partial(arrive, unsure))
    for event in events:
        world.message(_sender(event), COORDINATOR, event, cause=_cause(job, event))
    if events:
        world.after_in_order(("report", process.slot), world.delay_ms(), partial(arrive, events))


def _sender(event: CoordinatorEvent) -> object:
    return getattr(event, "task", None)


def _cause(job: JobInTheWorld, event: CoordinatorEvent) -> int | None:
    return max(job.watch.causes.of_tasks(event) or (), default=None)


class _Told(NamedTuple):
    """A message from the coordinator to a task, and the number of the log event that caused it."""

    task: TaskId
    event: ev.TaskEvent
    cause: int | None


class SimulatedCoordinatorPort:
    """The access of one coordinator incarnation to network, storage and clock."""

    def __init__(self, job: JobInTheWorld) -> None:
        self._job = job
        self._timers: dict[str, do.SetTimer] = {}
        self.ledger = Ledger(job.watch.causes, job.world.note, self._carried_out)
        self._unsent: dict[WorkerId, list[_Told]] = {}
        """Messages to the tasks of each slot that are sent together."""
        self._copies = CopiesOracle(job.watch.oracle.files.numbers)
        self._is_copy = False
        """True while an instruction is executed that copies a savepoint."""
        self.savepoint_io = 0
        """How many copies and deletions of savepoints are in progress."""
        self.host: CoordinatorDriver | None = None
        self.effects: CoordinatorEffects | None = None

    def now_ms(self) -> int:
        return self._job.world.wall_ms

    def _carried_out(
        self,
        instruction: do.CoordinatorInstruction,
        event: CoordinatorEvent,
        beside: Sequence[do.CoordinatorInstruction],
    ) -> None:
        self._copies.ordered(instruction)
        self._is_copy = isinstance(instruction, do.WriteSavepoint)
        if not self._job.coordinator_crashes and not self._job.world.clock_is_set:
            self._job.watch.restarts.done(instruction, event, beside)

    def monotonic_ms(self) -> int:
        return self._job.world.now_ms

    def deploy(self, instruction: do.DeployAttempt) -> None:
        assert self.host is not None
        self._job.deploy(instruction, self.host, self.ledger.cause)

    def cancel_attempt(self, instruction: do.CancelAttempt) -> None:
        self._job.cancel(instruction, self.ledger.cause)

    def kill_process(self, instruction: do.KillProcess) -> None:
        host = self.host
        job = self._job
        assert host is not None
        job.world.message(COORDINATOR, instruction.process, "is to be ended", cause=self.ledger.cause)
        job.world.after(
            self._late_ms() + job.world.delay_ms(), lambda: job.processes.kill(instruction.process, host.generation)
        )

    def _late_ms(self) -> int:
        """Returns a random additional delay of messages in ms. It is long if this coordinator has been replaced."""
        return self._job.world.between(0, CUT_OFF_MS) if self._job.coordinator is not self.host else 0

    def send(self, task: TaskId, event: ev.TaskEvent) -> None:
        """Adds an event to the next message to the process of the task."""
        job = self._job
        job.watch.told(event)
        job.watch.failover.told(task, event)
        job.watch.takeovers.told(event)
        if isinstance(event, ev.SplitsAssigned):
            job.watch.oracle.splits.assigned(task, event)
        if not self._unsent:
            job.world.after(0, self._flush)
        self._unsent.setdefault(job.processes.of(task).slot, []).append(_Told(task, event, self.ledger.cause))

    def _flush(self) -> None:
        """Sends the queued messages, one for each slot."""
        unsent = self._unsent
        self._unsent = {}
        for slot, told in unsent.items():
            self._send(slot, told)

    def _send(self, slot: WorkerId, told: Sequence[_Told]) -> None:
        job = self._job
        world = self._job.world
        asks = any(isinstance(one.event, ev.CoordinatorTookOver) for one in told) and _lost_in_a_takeover(world)
        unsure = [one for one in told if not isinstance(one.event, ev.TasksStarted)]
        if unsure and (asks or world.chance("drop")):
            lost = unsure[0]
            world.message(COORDINATOR, lost.task, *(one.event for one in unsure), "is lost", cause=lost.cause)
            told = [one for one in told if isinstance(one.event, ev.TasksStarted)]
        for one in told:
            world.message(COORDINATOR, one.task, one.event, cause=one.cause)

        def deliver() -> None:
            for one in told:
                job.deliver(one.task, one.event)

        if told:
            world.after_in_order(("tell", slot, self), self._late_ms() + world.delay_ms(), deliver)
            if world.chance("duplicate"):
                world.after(world.delay_ms() * 2, deliver)

    def run_io(self, work: Callable[[], CoordinatorEvent | None]) -> None:
        world = self._job.world
        host = self.host
        cause = self.ledger.cause
        assert host is not None

        # A copy takes long. It may read everything at the beginning and write at the end.
        past = dict(self._job.disk.files) if self._is_copy and world.reads_at_once() else {}

        def act() -> None:
            if self._job.lost_with(host):
                return
            self._job.disk.past = past
            event = work()
            self._job.disk.past = {}
            if event is not None:
                world.message(STORAGE, COORDINATOR, event, cause=cause)
                world.after(world.io_ms(), lambda: self._heard(event, cause))

        world.after(world.copy_ms() if self._is_copy else world.io_ms(), act)
        if self._is_copy and world.faults.slow_copies is not None:
            # A coordinator is otherwise lost only when a message arrives, and none arrives while it copies a savepoint.
            world.after(world.delay_ms(), lambda: self._job.maybe_lose_coordinator(CHANCES_OF_A_COPY))

    def run_copy(self, work: Callable[[], CoordinatorEvent | None]) -> None:
        self.savepoint_io += 1

        def counted() -> CoordinatorEvent | None:
            self.savepoint_io -= 1
            return work()

        self.run_io(counted)

    def _heard(self, event: CoordinatorEvent, cause: int | None) -> None:
        """Delivers an event to the coordinator that resulted from its own instruction: a timer or the result of I/O."""
        assert self.host is not None
        self._copies.heard(event)
        self._job.watch.oracle.savepoints.heard(event)
        if not self.host.machine.ignores(event):
            self._job.watch.failover.heard(event)
            self._job.watch.takeovers.heard(event)
        self.ledger.hear(event, cause)

    def append(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        world = self._job.world
        host = self.host
        assert host is not None

        def act() -> None:
            if self._job.coordinator is host:
                self._job.maybe_lose_coordinator()
            if self._job.lost_with(host):
                return
            error: Exception | None = None
            try:
                work()
            except InvariantViolated:
                raise
            except Exception as caught:  # noqa: BLE001 (handed to `done`, as a future would)
                error = caught
            world.after(world.between(0, 5), lambda: done(error))

        world.after(world.io_ms(), act)

    def set_timer(self, instruction: do.SetTimer, delay_ms: int) -> None:
        cause = self.ledger.done(instruction)
        timer = instruction.timer
        world = self._job.world
        job = self._job
        self._timers[timer] = instruction

        def fire() -> None:
            if self._timers.get(timer) is instruction:
                del self._timers[timer]
                event = co.TimerFired(world.wall_ms, timer)
                job.watch.reported(event)
                self._heard(event, cause)

        world.after(_delay_ms(world, instruction.due_at_ms, delay_ms), fire)

    def cancel_timer(self, timer: str) -> None:
        self._timers.pop(timer, None)

    def call_later(self, delay_ms: int, action: Callable[[], None]) -> None:
        self._job.world.after(delay_ms, action)

    def complete_request(self, instruction: do.CompleteRequest) -> None:
        world = self._job.world
        done = instruction.error or "is done"
        world.message(COORDINATOR, "user", instruction.request, done, instruction, cause=self.ledger.cause)
        self._job.watch.answered(instruction)

    def end_job(self, instruction: do.EndJob) -> None:
        self._job.end(self)

    def replay_again(self, reason: str) -> None:
        job = self._job
        job.world.note("coordinator replays again:", reason)
        if job.coordinator is self.host:
            job.coordinator = None
            job.world.after(RECOVERY_MS, job.start_coordinator)

    def halt(self, reason: str, *, fenced: bool) -> None:
        """Stops the coordinator permanently. If it controls the job, the job has failed."""
        job = self._job
        host = self.host
        assert host is not None
        job.world.note("coordinator halts:", reason)
        if job.coordinator is host:
            job.coordinator = None
            job.give_up(self, reason)
        elif not fenced:
            job.world.after(self._late_ms() + job.world.delay_ms(), lambda: job.processes.leave(host.generation))


def _lost_in_a_takeover(world: World) -> bool:
    """Returns at random whether a request or an answer of a takeover is lost.

    There are few of these messages, so they are lost more often than other messages.
    """
    return world.faulty and world.random.random() < TAKEOVER_DROP


def _delay_ms(world: World, due_at_ms: int, delay_ms: int) -> int:
    """Returns the delay of a timer in ms. If the wall clock is never set, the timer fires exactly when it is due."""
    return delay_ms if world.clock_is_set else max(0, due_at_ms - world.now_ms)


def _again(world: World, arrive: Callable[[], None]) -> Callable[[], None]:
    """Returns an action that delivers a message for the second time and adds that to the trace."""

    def again() -> None:
        world.note("a frame arrives for the second time")
        arrive()

    return again


def _raise(error: Exception) -> None:
    raise error


class WatchedEffects(TaskEffects):
    """Task effects that report each deletion of local copies to the oracle."""

    def __init__(self, *args: Any, **named: Any) -> None:
        """Takes the same arguments as `TaskEffects`."""
        super().__init__(*args, **named)
        self.copies_oracle: NodeCopiesOracle | None = None
        self._bases: dict[CheckpointId, frozenset[str]] = {}
        self._completed: CheckpointId | None = None
        """The newest completed checkpoint of which the task was notified.

        Notifications of older checkpoints are then ignored.
        """

    def persist(
        self, instruction: task_do.PersistSnapshot, sync_ms: int
    ) -> ev.SnapshotPersisted | ev.SnapshotFailed | None:
        """Stores the subtask's part of a checkpoint, and records on which files the part is based."""
        event = super().persist(instruction, sync_ms)
        if isinstance(event, ev.SnapshotPersisted):
            self._bases[event.checkpoint_id] = frozenset() if instruction.base is None else instruction.base.paths
        return event

    def checkpoint_over(self, event: ev.CheckpointCompleted | ev.CheckpointAborted) -> None:
        """Deletes copies that are no longer needed, and then lets the oracle check the remaining ones."""
        super().checkpoint_over(event)
        if self.copies_oracle is None or self._copies is None:
            return
        task = self.descriptor.task
        number = event.checkpoint_id
        if isinstance(event, ev.CheckpointAborted):
            self.copies_oracle.aborted(self._copies, task, number)
            return
        base = self._bases.pop(number, None)
        if self._completed is not None and number < self._completed:
            return  # Files that the newer checkpoint needs have been kept.
        self._completed = number
        if base is not None:
            self.copies_oracle.completed(self._copies, task, number, base)
