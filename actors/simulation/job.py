"""One job in virtual time: the same hosts, machines and effects as everywhere, over a world of chance.

What a crash takes away is what a process loses: the task's host with its queues and state. What it does not take
away is what was on its way already: messages that were sent, and I/O that was started. A coordinator that is cut off
instead of killed goes on as a zombie next to its successor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.events import CoordinatorEvent
from tidegate.actors.coordinator.state import CoordinatorState
from tidegate.actors.identity import TaskId
from tidegate.actors.runtimes.coordinator_effects import CoordinatorEffects
from tidegate.actors.runtimes.coordinator_host import CoordinatorHost, replay
from tidegate.actors.runtimes.job import Submission, tables_of
from tidegate.actors.runtimes.task_effects import TaskEffects
from tidegate.actors.runtimes.task_host import TaskHost
from tidegate.actors.simulation.oracle import InvariantViolated, Oracle
from tidegate.actors.simulation.store import SimulatedDisk, SimulatedStore
from tidegate.actors.simulation.world import World
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as task_do
from tidegate.actors.task.machine import TaskMachine
from tidegate.storage.errors import ProtocolError, StorageError
from tidegate.storage.event_log import EventLog
from tidegate.storage.store import Store

DETECTION_MS_MAX = 500
RECOVERY_MS = 300
TURN_MS_MAX = (5, 20, 200)
"""Some tasks are slower than others: that is what makes back-pressure."""
MakeMachine = Callable[..., TaskMachine]
MakeEffects = Callable[..., TaskEffects]


class SimulatedJob:
    """Runs one submission to its end in a world."""

    def __init__(
        self,
        submission: Submission,
        world: World,
        disk: SimulatedDisk,
        oracle: Oracle | None,
        make_machine: MakeMachine = TaskMachine,
        make_effects: MakeEffects = TaskEffects,
        make_coordinator: Callable[..., CoordinatorHost] = CoordinatorHost,
    ) -> None:
        self.world = world
        self.spec = submission.spec
        self.context = submission.context
        self.disk = disk
        self.oracle = oracle
        self.tasks: dict[TaskId, TaskHost] = {}
        self.coordinator: CoordinatorHost | None = None
        self.ended: CoordinatorState | None = None
        self.crashes = 0
        self.coordinator_crashes = 0
        self._make_machine = make_machine
        self._make_effects = make_effects
        self._make_coordinator = make_coordinator
        self._incarnations = 0
        self._deployed = -1
        self._submitted = False
        self._turns: set[int] = set()
        self._backlog: list[CoordinatorEvent] = []
        self._graves: list[CoordinatorHost] = []
        self._slowness: dict[TaskId, int] = {}

    @property
    def deployed(self) -> int:
        """The attempt that was deployed last."""
        return self._deployed

    def open_store(self, url: str) -> Store:
        """The store of a url."""
        return SimulatedStore(self.disk, url)

    def run(self, steps_max: int, time_ms_max: int) -> CoordinatorState:
        """Run to the end. InvariantViolated(7) when the job does not come to an end."""
        self._start_coordinator()
        end_ms = self.world.now_ms + time_ms_max
        while self.ended is None:
            if not self.world.step():
                raise InvariantViolated(7, "the job hangs: nothing is left to happen")
            if self.world.steps > steps_max or self.world.now_ms > end_ms:
                status = "unknown" if self.coordinator is None else self.coordinator.machine.state.status.value
                raise InvariantViolated(
                    7, f"the job is still {status} after {self.world.steps} steps, {time_ms_max} ms of virtual time"
                )
        return self.ended

    # --- coordinator ----------------------------------------------------------------------------------------------

    def _start_coordinator(self) -> None:
        event_log = EventLog(self.open_store(self.context.root), self.context.job_id)
        try:
            machine, next_index = replay(event_log)
        except StorageError as error:
            self.world.note(f"coordinator cannot replay: {error}")
            self.world.after(RECOVERY_MS, self._start_coordinator)
            return
        self._incarnations += 1
        port = _CoordinatorPort(self)
        effects = CoordinatorEffects(self.context, self.open_store, port.now_ms)
        host = self._make_coordinator(machine, next_index, event_log, effects, port, f"incarnation-{self._incarnations}")
        port.host = host
        port.effects = effects
        self.coordinator = host
        self.world.note(f"coordinator generation {host.generation} starts at entry {next_index}")
        host.start()
        if host.machine.state.spec is None:
            host.handle(co.JobSubmitted(self.world.now_ms, self.spec))
        backlog, self._backlog = self._backlog, []
        for event in backlog:
            host.handle(event)

    def report(self, event: CoordinatorEvent) -> None:
        """A message reaches the coordinator, if there is one."""
        self.maybe_lose_coordinator()
        if self.coordinator is None:
            self._backlog.append(event)
        else:
            self.coordinator.handle(event)

    def maybe_lose_coordinator(self) -> None:
        """The coordinator may die now, or be cut off and live on as a zombie; a successor takes over."""
        world = self.world
        if self.coordinator is None or self.coordinator_crashes >= world.faults.coordinator_crashes_max:
            return
        if not world.chance(world.faults.coordinator_crash):
            return
        self.coordinator_crashes += 1
        zombie = world.random.random() < 0.5
        world.note(f"coordinator {'is cut off' if zombie else 'dies'}")
        if not zombie:
            self.coordinator.halt()
            self._graves.append(self.coordinator)
        self.coordinator = None
        world.after(RECOVERY_MS, self._start_coordinator)

    def lost_with(self, host: CoordinatorHost) -> bool:
        """Whether I/O that was started goes down with its coordinator: half of what a dead one has on its way."""
        return host in self._graves and self.world.random.random() < 0.5

    # --- tasks ----------------------------------------------------------------------------------------------------

    def deploy(self, instruction: do.DeployAttempt) -> None:
        """Start all tasks of an attempt, in place of those of the one before. A stale order changes nothing."""
        if instruction.attempt <= self._deployed:
            return
        self._deployed = instruction.attempt
        restore = instruction.restore
        if self.oracle is not None:
            self.oracle.deployed(instruction.attempt, None if restore is None else restore.checkpoint_id)
        self.drop_tasks()
        self.world.note(f"deploy attempt {instruction.attempt} from {instruction.restore}")
        for task in self.context.graph.tasks():
            descriptor = self.context.describe(task, instruction.attempt)
            port = _TaskPort(self, task)
            effects = self._make_effects(self.context, descriptor, self.open_store, port.now_ms)
            host = _WatchedHost(self._make_machine(descriptor), effects, port)
            host.oracle = self.oracle
            port.host = host
            self.tasks[task] = host
            host.restore(instruction.restore)

    def drop_tasks(self) -> None:
        """The processes of all tasks are gone."""
        self.tasks.clear()

    def deliver(self, task: TaskId, event: ev.TaskEvent) -> None:
        """An event reaches a task, if it is there."""
        host = self.tasks.get(task)
        if host is not None:
            self.guarded(task, host, lambda: host.handle(event))

    def guarded(self, task: TaskId, host: TaskHost, action: Callable[[], object]) -> None:
        """Let a host act; what it raises has failed its task."""
        if self.tasks.get(task) is not host:
            return
        try:
            action()
            if self.oracle is not None:
                self.oracle.after_event(host.machine)
        except ProtocolError as error:
            self._lose(task, host, f"ProtocolError: {error}")
        except StorageError as error:
            self._lose(task, host, f"StorageError: {error}")
        else:
            self.schedule_turn(task, host)

    def schedule_turn(self, task: TaskId, host: TaskHost) -> None:
        """If the task has something to do, let it do it soon."""
        if id(host) in self._turns or not host.machine.runnable:
            return
        self._turns.add(id(host))

        def turn() -> None:
            self._turns.discard(id(host))
            if self.tasks.get(task) is not host:
                return
            world = self.world
            if self.crashes < world.faults.crashes_max and world.chance(world.faults.crash):
                self.crashes += 1
                self._lose(task, host, "process died")
                return
            self.guarded(task, host, host.turn)

        turn_ms_max = self._slowness.setdefault(task, self.world.random.choice(TURN_MS_MAX))
        self.world.after(self.world.random.randint(0, turn_ms_max), turn)

    def _lose(self, task: TaskId, host: TaskHost, reason: str) -> None:
        self.world.note(f"{task} is lost: {reason}")
        del self.tasks[task]
        attempt = host.machine.attempt
        delay_ms = self.world.random.randint(0, DETECTION_MS_MAX)
        self.world.after(
            delay_ms, lambda: self.report(co.TaskFailed(self.world.now_ms, attempt, task, reason))
        )

    def end(self, port: _CoordinatorPort) -> None:
        """The job is over."""
        assert port.host is not None and port.effects is not None
        self.drop_tasks()
        state = port.host.machine.state
        self.disk.reliable = True
        tables = [] if state.commits else tables_of(self.context)
        port.effects.sweep([c.checkpoint_id for c in state.completed], tables)
        if self.oracle is not None:
            self.oracle.check_end([c.checkpoint_id for c in state.completed])
        self.world.note(f"job ends: {state.status.value} {state.ending_reason or ''}")
        self.ended = state


class _WatchedHost(TaskHost):
    """Shows the oracle where a snapshot cuts the channels of its task."""

    oracle: Oracle | None = None

    def _perform(self, instructions: Sequence[task_do.TaskInstruction]) -> None:
        if self.oracle is not None:
            for instruction in instructions:
                if isinstance(instruction, task_do.PersistSnapshot):
                    self.oracle.snapshot_taken(self.machine.descriptor.task, instruction)
        super()._perform(instructions)


class _TaskPort:
    """The world as one simulated task sees it."""

    def __init__(self, job: SimulatedJob, task: TaskId) -> None:
        self._job = job
        self._task = task
        self.host: TaskHost | None = None

    def now_ms(self) -> int:
        return self._job.world.now_ms

    def send_frame(self, frame: task_do.SendFrame) -> None:
        job, world = self._job, self._job.world
        if job.oracle is not None:
            job.oracle.sent(frame)
        receiver = job.context.graph.receiver(frame.channel)
        if world.chance(world.faults.drop):
            world.note(f"{self._task} -> {receiver} {frame.channel} frame {frame.first_sequence} is lost")
            return
        kinds = ",".join(type(e).__name__ for e in frame.elements)
        world.note(f"{self._task} -> {receiver} {frame.channel} {frame.first_sequence}: {kinds}")

        def arrive() -> None:
            event = ev.FrameArrived(
                world.now_ms, frame.attempt, frame.channel, frame.first_sequence, frame.elements
            )
            job.deliver(receiver, event)

        world.after_in_order((frame.attempt, frame.channel), world.delay_ms(), arrive)
        if world.chance(world.faults.duplicate):
            world.after(world.delay_ms() * 2, arrive_again(world, arrive))

    def grant_credit(self, grant: task_do.GrantCredit) -> None:
        job, world = self._job, self._job.world
        if world.chance(world.faults.drop):
            return
        sender = job.context.graph.sender(grant.channel)
        world.after(
            world.delay_ms(),
            lambda: job.deliver(
                sender, ev.CreditGranted(world.now_ms, grant.attempt, grant.channel, grant.total_bytes)
            ),
        )

    def report(self, event: CoordinatorEvent) -> None:
        job, world = self._job, self._job.world
        if isinstance(event, co.CheckpointAcknowledged):
            if world.chance(world.faults.drop):
                world.note(f"{self._task} acknowledges {event.checkpoint_id}, which is lost")
                return
            if world.chance(world.faults.duplicate):
                world.after(world.delay_ms() * 2, lambda: job.report(event))
        world.note(f"{self._task} reports {type(event).__name__}")
        world.after_in_order(("report", self._task), world.delay_ms(), lambda: job.report(event))

    def run_io(self, work: Callable[[], ev.TaskEvent | None]) -> None:
        job, world, host = self._job, self._job.world, self.host
        assert host is not None

        def act() -> None:
            if job.tasks.get(self._task) is not host and world.random.random() < 0.5:
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

    def set_flush_timer(self, due_at_ms: int) -> None:
        job, world, host = self._job, self._job.world, self.host
        assert host is not None
        world.after(
            due_at_ms - world.now_ms,
            lambda: job.guarded(self._task, host, lambda: host.handle(ev.FlushDue(world.now_ms))),
        )


class _CoordinatorPort:
    """The world as one simulated coordinator incarnation sees it."""

    def __init__(self, job: SimulatedJob) -> None:
        self._job = job
        self._timers: dict[str, int] = {}
        self.host: CoordinatorHost | None = None
        self.effects: CoordinatorEffects | None = None

    def now_ms(self) -> int:
        return self._job.world.now_ms

    def deploy(self, instruction: do.DeployAttempt) -> None:
        self._job.deploy(instruction)

    def cancel_attempt(self, instruction: do.CancelAttempt) -> None:
        if instruction.attempt >= self._job.deployed:
            self._job.world.note(f"attempt {instruction.attempt} is cancelled")
            self._job.drop_tasks()

    def tell(self, task: TaskId, event: ev.TaskEvent) -> None:
        job, world = self._job, self._job.world
        if not isinstance(event, ev.SourcesStarted) and world.chance(world.faults.drop):
            world.note(f"coordinator tells {task} {type(event).__name__}, which is lost")
            return
        world.note(f"coordinator tells {task} {type(event).__name__}")
        deliver = lambda: job.deliver(task, event)  # noqa: E731
        world.after_in_order(("tell", task), world.delay_ms(), deliver)
        if world.chance(world.faults.duplicate):
            world.after(world.delay_ms() * 2, deliver)

    def run_io(self, work: Callable[[], CoordinatorEvent | None]) -> None:
        world, host = self._job.world, self.host
        assert host is not None

        def act() -> None:
            if self._job.lost_with(host):
                return
            event = work()
            if event is not None:
                world.after(world.io_ms(), lambda: host.handle(event))

        world.after(world.io_ms(), act)

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
            except Exception as caught:
                error = caught
            world.after(world.random.randint(0, 5), lambda: done(error))

        world.after(world.io_ms(), act)

    def set_timer(self, timer: str, due_at_ms: int) -> None:
        world, host = self._job.world, self.host
        assert host is not None
        self._timers[timer] = due_at_ms

        def fire() -> None:
            if self._timers.get(timer) == due_at_ms:
                del self._timers[timer]
                host.handle(co.TimerFired(world.now_ms, timer))

        world.after(max(0, due_at_ms - world.now_ms), fire)

    def call_later(self, delay_ms: int, action: Callable[[], None]) -> None:
        self._job.world.after(delay_ms, action)

    def complete_request(self, instruction: do.CompleteRequest) -> None:
        self._job.world.note(f"request {instruction.request}: {instruction.error or instruction.checkpoint_id}")

    def end_job(self, instruction: do.EndJob) -> None:
        self._job.end(self)

    def halt(self, reason: str) -> None:
        job = self._job
        job.world.note(f"coordinator halts: {reason}")
        if job.coordinator is self.host:
            job.coordinator = None
            job.world.after(RECOVERY_MS, job._start_coordinator)


def arrive_again(world: World, arrive: Callable[[], None]) -> Callable[[], None]:
    """A second delivery of a message, noted in the trace."""

    def again() -> None:
        world.note("a frame arrives for the second time")
        arrive()

    return again


def _raise(error: Exception) -> None:
    raise error
