"""The ports of the simulated world: messages that come late, twice or not at all, and I/O that fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from tidegate.actors.coordinator.messages import events as co
from tidegate.actors.coordinator.messages import instructions as do
from tidegate.actors.coordinator.messages.events import CoordinatorEvent
from tidegate.actors.hosts.coordinator.coordinator_effects import CoordinatorEffects
from tidegate.actors.hosts.coordinator.coordinator_host import CoordinatorHost
from tidegate.actors.hosts.job_context import JobContext
from tidegate.actors.hosts.ports import TryAgain
from tidegate.actors.hosts.task.task_host import TaskHost
from tidegate.actors.protocol.identity import TaskId
from tidegate.actors.protocol.stream_elements import Barrier
from tidegate.actors.task.fence import is_order
from tidegate.actors.task.messages import events as ev
from tidegate.actors.task.messages import instructions as task_do
from tidegate.simulation.oracle.decisions.ledger import Ledger
from tidegate.simulation.oracle.files.copies import CopiesOracle
from tidegate.simulation.oracle.violation import InvariantViolated
from tidegate.simulation.oracle.watch import Watch
from tidegate.simulation.runtime.nodes import SimulatedNodes
from tidegate.simulation.runtime.processes import SimulatedProcesses
from tidegate.simulation.world.disk import SimulatedDisk
from tidegate.simulation.world.virtual_time import World
from tidegate.storage.errors import StorageError

CUT_OFF_MS = 1_000
"""How long the messages of a coordinator that was cut off may take."""
RECOVERY_MS = 300
"""How long it takes until a successor of a lost coordinator starts."""
CHANCES_OF_A_COPY = 100
"""A coordinator that copies a savepoint is lost as often as one that does something else in that time."""
TAKEOVER_DROP = 0.1
COORDINATOR = "coordinator"
STORAGE = "storage"
"""Stands in the trace for all that is done beside the machines: files that are written or deleted, and hooks."""


class JobInTheWorld(Protocol):
    """What ports ask of their job; `SimulatedJob` has it."""

    world: World
    watch: Watch
    context: JobContext
    tasks: dict[TaskId, TaskHost]
    disk: SimulatedDisk
    coordinator: CoordinatorHost | None
    """None while it is lost."""
    coordinator_crashes: int

    def deliver(self, task: TaskId, event: ev.TaskEvent) -> None: ...
    def report(self, event: CoordinatorEvent) -> None: ...
    def guarded(self, task: TaskId, host: TaskHost, action: Callable[[], object]) -> None: ...

    processes: SimulatedProcesses
    nodes: SimulatedNodes

    def deploy(self, instruction: do.DeployAttempt, by: CoordinatorHost, cause: int | None) -> None: ...
    def cancel(self, instruction: do.CancelAttempt, cause: int | None) -> None: ...
    def end(self, port: SimulatedCoordinatorPort) -> None: ...
    def give_up(self, port: SimulatedCoordinatorPort, reason: str) -> None: ...
    def start_coordinator(self) -> None: ...
    def maybe_lose_coordinator(self, chances: int = 1) -> None: ...
    def lost_with(self, host: CoordinatorHost) -> bool: ...


class WatchedHost(TaskHost):
    """Shows the watch what its machine does."""

    watch: Watch
    world: World
    processes: SimulatedProcesses
    _ordered: ev.CoordinatorOrder | None = None
    """What a coordinator says, while the machine takes it in."""
    _heard_of = ev.UNFENCED
    """The newest coordinator that the task has heard of."""

    def handle(self, event: ev.TaskEvent | TryAgain) -> None:
        """As every host, under observation."""
        if isinstance(event, TryAgain):
            super().handle(event)
            return
        full = isinstance(event, ev.TurnGranted) and self.watch.oracle.before_turn(self.machine)
        self._ordered = event if is_order(event) else None
        super().handle(event)
        self.watch.oracle.after_event(self.machine, event, full, self._port.monotonic_ms())

    def _perform(self, instructions: Sequence[task_do.TaskInstruction], handled_ms: int) -> None:
        ordered, self._ordered = self._ordered, None
        if ordered is not None:
            task = self.machine.descriptor.task
            self.watch.takeovers.obeyed(task, type(ordered).__name__, ordered.generation, self._heard_of)
            self._heard_of = max(self._heard_of, ordered.generation)
            if isinstance(ordered, ev.WatermarkAnnounced):
                self.watch.oracle.alignment.heard(self.machine, ordered)
            self.processes.obeys(task, self._heard_of)
        for instruction in instructions:
            self.watch.task_does(self.machine, instruction)
            if isinstance(instruction, task_do.PersistSnapshot | task_do.PersistChannelState):
                cause = self.watch.causes.of_trigger(instruction.checkpoint_id)
                self.world.message(self.machine.descriptor.task, STORAGE, instruction, cause=cause)
        super()._perform(instructions, handled_ms)


class SimulatedTaskPort:
    """The world as one simulated task sees it."""

    virtual = True

    def __init__(self, job: JobInTheWorld, task: TaskId) -> None:
        self._job = job
        self._task = task
        self.host: WatchedHost | None = None

    def now_ms(self) -> int:
        return self._job.world.wall_ms

    def send_frame(self, frame: task_do.SendFrame) -> None:
        job, world = self._job, self._job.world
        receiver = job.context.graph.receiver(frame.channel)
        if world.chance("drop"):
            world.message(self._task, receiver, frame.channel, "frame", frame.first_sequence, "is lost")
            return
        barrier = next((element for element in frame.elements if isinstance(element, Barrier)), None)
        cause = None if barrier is None else job.watch.causes.of_trigger(barrier.checkpoint_id)
        world.message(self._task, receiver, frame.channel, frame.first_sequence, frame.elements, cause=cause)

        def arrive() -> None:
            event = ev.FrameArrived(world.wall_ms, frame.attempt, frame.channel, frame.first_sequence, frame.elements)
            job.deliver(receiver, event)

        world.after_in_order((frame.attempt, frame.channel), world.delay_ms(), arrive)
        if world.chance("duplicate"):
            world.after(world.delay_ms() * 2, _again(world, arrive))

    def grant_credit(self, grant: task_do.GrantCredit) -> None:
        job, world = self._job, self._job.world
        sender = job.context.graph.sender(grant.channel)
        if world.chance("drop"):
            world.message(self._task, sender, grant.channel, "grant of", grant.total_bytes, "is lost")
            return
        world.after(
            world.delay_ms(),
            lambda: job.deliver(
                sender,
                ev.CreditGranted(world.wall_ms, grant.attempt, grant.channel, grant.total_bytes, grant.window_bytes),
            ),
        )

    def report(self, event: CoordinatorEvent) -> None:
        job, world = self._job, self._job.world
        cause = max(job.watch.causes.of_tasks(event) or (), default=None)
        if isinstance(event, co.CheckpointAcknowledged | co.TaskAnswered):
            if world.chance("drop") or (isinstance(event, co.TaskAnswered) and _lost_in_a_takeover(world)):
                world.message(self._task, COORDINATOR, event, "is lost", cause=cause)
                return
            if world.chance("duplicate"):
                world.after(world.delay_ms() * 2, lambda: job.report(event))
        world.message(self._task, COORDINATOR, event, cause=cause)
        world.after_in_order(("report", self._task), world.delay_ms(), lambda: job.report(event))
        if isinstance(event, co.TaskReady) and world.faults.restore_crash > 0.0 and (host := self.host) is not None:
            world.after(world.delay_ms(), partial(job.processes.dies_early, self._task, host))

    def monotonic_ms(self) -> int:
        return self._job.world.now_ms

    def call_later(self, delay_ms: int, action: Callable[[], None]) -> None:
        job, host = self._job, self.host
        assert host is not None
        job.world.after(delay_ms, lambda: job.guarded(self._task, host, action))

    def run_io(self, work: Callable[[], ev.TaskEvent | TryAgain | None]) -> None:
        job, world, host = self._job, self._job.world, self.host
        assert host is not None

        def act() -> None:
            current = job.tasks.get(self._task) is host
            if not current and world.random.random() < 0.5:
                return
            if current and job.nodes.is_cut(self._task):
                job.nodes.hold(self._task, act)
                return
            if job.processes.dies_early(self._task, host):
                return
            try:
                event = work()
            except StorageError as error:
                reason = str(error)
                world.after(0, lambda: job.guarded(self._task, host, lambda: _raise(StorageError(reason))))
                return
            if event is not None:
                world.after(world.io_ms(), lambda: job.guarded(self._task, host, lambda: host.handle(event)))

        world.after(world.io_ms(), act)

    def set_timer(self, instruction: task_do.SetTaskTimer, delay_ms: int) -> None:
        job, world, host = self._job, self._job.world, self.host
        assert host is not None
        world.after(
            _delay_ms(world, instruction.due_at_ms, delay_ms),
            lambda: job.guarded(
                self._task,
                host,
                lambda: host.handle(ev.TimerDue(world.wall_ms, instruction.timer, instruction.due_at_ms)),
            ),
        )


class SimulatedCoordinatorPort:
    """The world as one simulated coordinator incarnation sees it."""

    def __init__(self, job: JobInTheWorld) -> None:
        self._job = job
        self._timers: dict[str, do.SetTimer] = {}
        self.ledger = Ledger(job.watch.causes, job.world.note, self._carried_out)
        self._copies = CopiesOracle(job.watch.oracle.files.numbers)
        self._is_copy = False
        """Whether what is carried out now copies a savepoint."""
        self.savepoint_io = 0
        """How many copies and deletions of savepoints are under way."""
        self.host: CoordinatorHost | None = None
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
        host, job = self.host, self._job
        assert host is not None
        job.world.message(COORDINATOR, instruction.process, "is to be ended", cause=self.ledger.cause)
        job.world.after(
            self._late_ms() + job.world.delay_ms(), lambda: job.processes.kill(instruction.process, host.generation)
        )

    def _late_ms(self) -> int:
        """What one says that was cut off may arrive long after its successor has begun."""
        return self._job.world.between(0, CUT_OFF_MS) if self._job.coordinator is not self.host else 0

    def tell(self, task: TaskId, event: ev.TaskEvent) -> None:
        job, world = self._job, self._job.world
        job.watch.told(event)
        job.watch.failover.told(task, event)
        job.watch.takeovers.told(event)
        if isinstance(event, ev.SplitsAssigned):
            job.watch.oracle.splits.assigned(task, event)
        asks = isinstance(event, ev.CoordinatorTookOver) and _lost_in_a_takeover(world)
        if asks or (not isinstance(event, ev.TasksStarted) and world.chance("drop")):
            world.message(COORDINATOR, task, event, "is lost", cause=self.ledger.cause)
            return
        world.message(COORDINATOR, task, event, cause=self.ledger.cause)
        deliver = lambda: job.deliver(task, event)  # noqa: E731
        world.after_in_order(("tell", task, self), self._late_ms() + world.delay_ms(), deliver)
        if world.chance("duplicate"):
            world.after(world.delay_ms() * 2, deliver)

    def run_io(self, work: Callable[[], CoordinatorEvent | None]) -> None:
        world, host, cause = self._job.world, self.host, self.ledger.cause
        assert host is not None

        # A copy takes long. It may have read all of it at once, and writes at the end.
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
            # Nothing comes in while a savepoint is copied, and a coordinator is lost by what comes in.
            world.after(world.delay_ms(), lambda: self._job.maybe_lose_coordinator(CHANCES_OF_A_COPY))

    def run_copy(self, work: Callable[[], CoordinatorEvent | None]) -> None:
        self.savepoint_io += 1

        def counted() -> CoordinatorEvent | None:
            self.savepoint_io -= 1
            return work()

        self.run_io(counted)

    def _heard(self, event: CoordinatorEvent, cause: int | None) -> None:
        """What the coordinator learns from itself: its timers, and its I/O."""
        assert self.host is not None
        self._copies.heard(event)
        self._job.watch.oracle.savepoints.heard(event)
        if not self.host.machine.ignores(event):
            self._job.watch.failover.heard(event)
            self._job.watch.takeovers.heard(event)
        self.ledger.hear(event, cause)

    def append(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        world, host = self._job.world, self.host
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
        world, job = self._job.world, self._job
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
        """For good: should it be the coordinator in charge, the job has failed."""
        job, host = self._job, self.host
        assert host is not None
        job.world.note("coordinator halts:", reason)
        if job.coordinator is host:
            job.coordinator = None
            job.give_up(self, reason)
        elif not fenced:
            job.world.after(self._late_ms() + job.world.delay_ms(), lambda: job.processes.leave(host.generation))


def _lost_in_a_takeover(world: World) -> bool:
    """Questions of a takeover, and their answers, get lost more often than other messages: there are few of them."""
    return world.faulty and world.random.random() < TAKEOVER_DROP


def _delay_ms(world: World, due_at_ms: int, delay_ms: int) -> int:
    """How long a timer takes. What is due by a clock that nobody sets is due."""
    return delay_ms if world.clock_is_set else max(0, due_at_ms - world.now_ms)


def _again(world: World, arrive: Callable[[], None]) -> Callable[[], None]:
    """A second delivery of a message, noted in the trace."""

    def again() -> None:
        world.note("a frame arrives for the second time")
        arrive()

    return again


def _raise(error: Exception) -> None:
    raise error
