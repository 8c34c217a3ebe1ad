"""One job in virtual time, with the same drivers, machines and effects as in every runtime.

A crash destroys the content of a process: the drivers of all subtasks of a slot with their queues and state. Messages
that were sent and I/O that was started are not lost. A stopped task leaves its keyed state to its next attempt, because
its process continues (`processes.py`). A coordinator that is cut off instead of killed continues as a zombie at the
same time as its successor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial

import pyarrow as pa

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.coordinator.events import CoordinatorEvent
from tidegate.actors.coordinator.invariants import permit_sweep
from tidegate.actors.drivers.coordinator_driver import CoordinatorDriver, replay
from tidegate.actors.drivers.coordinator_effects import CoordinatorEffects
from tidegate.actors.drivers.task_effects import TaskEffects
from tidegate.actors.drivers.worker import Subtask
from tidegate.actors.runtimes.running_job import Submission
from tidegate.actors.task import events as ev
from tidegate.actors.task.task_machine import TaskMachine
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.errors import ProtocolError, StorageError
from tidegate.storage.files.store import Store
from tidegate.testing.oracle import InvariantViolated
from tidegate.testing.oracle.coordinator_records import check_requests
from tidegate.testing.oracle.files_at_rest import Damager
from tidegate.testing.oracle.job_observer import Watch
from tidegate.testing.runtime.ports import (
    RECOVERY_MS,
    SimulatedCoordinatorPort,
    SimulatedSubtask,
    WatchedEffects,
    WatchedHost,
)
from tidegate.testing.runtime.processes import DETECTION_MS_MAX, SimulatedNodes, SimulatedProcess, SimulatedProcesses
from tidegate.testing.world.disk import SimulatedDisk, SimulatedStore
from tidegate.testing.world.virtual_time import World

ANSWERS_MS_MAX = 10_000
CHANCES_OF_A_TAKEOVER = 3
"""How often it is drawn whether the coordinator is lost during a takeover. It is large, because this phase is short."""
GRAVES_MAX = 50
"""How many dead coordinators are kept in memory, because their I/O may still be in progress."""
TURN_MS_MAX = (5, 20, 200)
"""Longest wait in ms for a turn. One of them is drawn for each task. Tasks of different speed cause back-pressure."""
MakeMachine = Callable[..., TaskMachine]
MakeEffects = Callable[..., TaskEffects]


class SimulatedJob:
    """Runs one submission in a world until it ends."""

    def __init__(
        self,
        submission: Submission,
        world: World,
        disk: SimulatedDisk,
        watch: Watch,
        make_machine: MakeMachine = TaskMachine,
        make_effects: MakeEffects = TaskEffects,
        make_coordinator: Callable[..., CoordinatorDriver] = CoordinatorDriver,
        log_entries: int | None = None,
        hurries: bool = False,
    ) -> None:
        """`log_entries` and `hurries` are the fields of `JobSetting`."""
        self.world = world
        self.spec = submission.spec
        self.context = submission.context
        self.disk = disk
        self.watch = watch
        watch.damager = Damager(disk, watch.oracle.files, submission.spec.checkpoints.retained)
        self.processes = SimulatedProcesses(self, submission.context.graph, _Wiring(self), world.silence_ms)
        self.nodes = SimulatedNodes(self)
        self.coordinator: CoordinatorDriver | None = None
        self.ended: CoordinatorState | None = None
        self._ended_by: SimulatedCoordinatorPort | None = None
        """The coordinator that has ended the job, or None if it gave up."""
        self.gave_up: str | None = None
        """Reason why the coordinator could not continue, if that ended the job."""
        self.crashes = 0
        self.coordinator_crashes = 0
        self._make_machine = make_machine
        self._make_effects = make_effects
        self._make_coordinator = make_coordinator
        self._log_entries = log_entries
        self._hurries = hurries
        self._incarnations = 0
        self._deployed = -1
        self._backlog: list[CoordinatorEvent] = []
        self._graves: deque[CoordinatorDriver] = deque(maxlen=GRAVES_MAX)
        self.slowness: dict[TaskId, int] = {}
        """Longest wait of each task for its next turn, in ms. It is drawn unless it was set."""

    @property
    def over(self) -> bool:
        """Returns True once the job has ended."""
        return self.ended is not None

    @property
    def deployed(self) -> int:
        """Returns the number of the newest attempt that was deployed."""
        return self._deployed

    def open_store(self, url: str) -> Store:
        """Returns the store at a URL."""
        return SimulatedStore(self.disk, url)

    def run(self, steps_max: int, settle_ms_max: int) -> CoordinatorState:
        """Runs the job to its end.

        Raises InvariantViolated(7) if it hangs, or has not ended `settle_ms_max` after the last fault.
        """
        self.start_coordinator()
        world = self.world
        end_ms = max(world.now_ms, world.faulty_until_ms) + settle_ms_max
        steps_max += world.steps
        while self.ended is None:
            if not world.step():
                raise InvariantViolated(7, "the job hangs: no message and no timer is pending")
            if world.steps > steps_max or world.now_ms > end_ms:
                status = "unknown" if self.coordinator is None else self.coordinator.machine.state.status.value
                raise InvariantViolated(
                    7,
                    f"the job is still {status} {world.now_ms - world.faulty_until_ms} ms after the last fault; the "
                    f"limit is {settle_ms_max} ms ({world.steps} steps)",
                )
        self._await_answers()
        self._await_copies()
        return self.ended

    def _await_answers(self) -> None:
        """Runs until all requests from just before the end are answered. Answers may be lost with a coordinator."""
        world = self.world
        end_ms = world.now_ms + ANSWERS_MS_MAX
        while self.watch.unanswered and not self.coordinator_crashes:
            if world.now_ms > end_ms or not world.step():
                raise InvariantViolated(7, f"the request {self.watch.unanswered[0]} was never answered")

    def _await_copies(self) -> None:
        """Runs until all copies of savepoints have ended.

        The end of a job does not wait for them. They must leave no files behind.
        """
        world = self.world
        port = self._ended_by
        if port is None or self.coordinator_crashes:
            return
        end_ms = world.now_ms + ANSWERS_MS_MAX + world.faults.copy_ms
        while port.savepoint_io:
            if world.now_ms > end_ms or not world.step():
                raise InvariantViolated(5, "the copy or deletion of a savepoint does not end after the end of its job")
        self.watch.oracle.records.check_folders()

    def ask(self, event: co.CheckpointRequested | co.CancelRequested) -> None:
        """Sends a request of a user to the job now."""
        if self.ended is not None:
            return
        self.world.message("user", "coordinator", event)
        if isinstance(event, co.CheckpointRequested):
            self.watch.asked(event)
        self.report(event)

    # --- coordinator ----------------------------------------------------------------------------------------------

    def start_coordinator(self) -> None:
        """Starts a coordinator incarnation, which replays the event log and takes over the job."""
        event_log = EventLog(self.open_store(self.context.root), self.context.job_id)
        try:
            machine, position = replay(event_log)
        except StorageError as error:
            self.world.note(f"coordinator cannot replay: {error}")
            self.world.after(RECOVERY_MS, self.start_coordinator)
            return
        self.watch.causes.replayed(position.next_index, position.next_event)
        self._incarnations += 1
        port = SimulatedCoordinatorPort(self)
        effects = CoordinatorEffects(self.context, self.open_store, port.now_ms, lambda _: self.nodes.folder(0))
        incarnation = f"incarnation-{self._incarnations}"
        host = self._make_coordinator(machine, position, event_log, effects, port, incarnation, self._log_entries)
        port.host = host
        port.effects = effects
        port.ledger.watch(host, machine, event_log)
        self.coordinator = host
        self.world.note("coordinator generation", host.generation, "starts at entry", position.next_index)
        started = co.CoordinatorStarted(self.world.wall_ms, host.generation)
        self.watch.failover.heard(started)
        self.watch.takeovers.heard(started)
        host.start()
        if host.machine.state.spec is None:
            host.handle(co.JobSubmitted(self.world.wall_ms, self.spec))
        backlog = self._backlog
        self._backlog = []
        for event in backlog:
            self.hear(host, event)

    def report(self, event: CoordinatorEvent) -> None:
        """Delivers a message to the coordinator that controls the job.

        If there is none, it is lost or delivered to the next one.
        """
        self.maybe_lose_coordinator()
        if self.coordinator is None and self._is_lost(event):
            self.world.note(type(event).__name__, "finds no coordinator")
            return
        self.watch.reported(event)
        if self.coordinator is None:
            self._backlog.append(event)
        else:
            self.hear(self.coordinator, event)

    def _is_lost(self, event: CoordinatorEvent) -> bool:
        """Returns whether a message is lost because there is no coordinator.

        Half of the messages of tasks are lost. Users repeat their requests until they are answered.
        """
        by_users = isinstance(event, co.CheckpointRequested | co.CancelRequested)
        return self.spec.adoption_timeout_ms is not None and not by_users and self.world.random.random() < 0.5

    def hear(self, coordinator: CoordinatorDriver, event: CoordinatorEvent) -> None:
        """Delivers an event to a coordinator, which may have been replaced."""
        if not coordinator.machine.ignores(event):
            self.watch.failover.heard(event)
            self.watch.takeovers.heard(event)
        coordinator.handle(event)
        check_requests(len(coordinator.machine.state.requests))

    def maybe_lose_coordinator(self, chances: int = 1) -> None:
        """With some probability kills the coordinator, or cuts it off so that it continues as a zombie.

        A successor takes over.
        """
        world = self.world
        if self.coordinator is None or self.coordinator_crashes >= world.faults.coordinator_crashes_max:
            return
        adopts = bool(self.coordinator.machine.state.adopting)
        if not any(world.chance("coordinator_crash") for _ in range(CHANCES_OF_A_TAKEOVER if adopts else chances)):
            return
        self.lose_coordinator(cut_off=world.random.random() < 0.5)

    def lose_coordinator(self, *, cut_off: bool) -> None:
        """Kills the coordinator that controls the job, or cuts it off. A successor takes over."""
        assert self.coordinator is not None
        self.coordinator_crashes += 1
        self.world.note("coordinator", "is cut off" if cut_off else "dies")
        if cut_off:
            self.processes.cut_off(self.coordinator)
        else:
            self.coordinator.halt()
            self._graves.append(self.coordinator)
        self.coordinator = None
        self.world.after(RECOVERY_MS, self.start_coordinator)

    def lost_with(self, host: CoordinatorDriver) -> bool:
        """Returns whether I/O is lost because its coordinator is dead. This applies to half of the I/O in progress."""
        return host in self._graves and self.world.random.random() < 0.5

    # --- tasks ----------------------------------------------------------------------------------------------------

    def deploy(self, instruction: do.DeployAttempt, by: CoordinatorDriver, cause: int | None) -> None:
        """Starts the tasks of an attempt, which replace the tasks of the previous one. An outdated order is ignored."""
        if instruction.attempt <= self._deployed:
            return
        self._deployed = instruction.attempt
        whole = self.context.graph.tasks()
        tasks = whole if instruction.tasks is None else instruction.tasks
        self.watch.deployed(instruction.attempt, instruction.restore, tasks, int(by.generation))
        self._drop_tasks(tasks)
        pointer = None if instruction.restore is None else instruction.restore.pointer
        of = () if instruction.tasks is None else (f"of {len(tasks)} of {len(whole)} tasks",)
        self.world.note("deploy attempt", instruction.attempt, *of, "from", pointer, cause=cause)
        for process, of_process in self.processes.by_process(tasks).items():
            self._begin(
                self.processes.staff(process, by.machine.state.given_up, by.generation), of_process, instruction
            )

    def _begin(self, process: SimulatedProcess, tasks: Collection[TaskId], instruction: do.DeployAttempt) -> None:
        """Starts the tasks `tasks` in a process, and restores their state."""
        subtasks = [self._make_subtask(process, task, tasks, instruction) for task in tasks]
        for subtask in subtasks:
            process.add(subtask)
        for subtask in subtasks:
            process.guarded(subtask, partial(subtask.host.restore, instruction.restore))

    def _make_subtask(
        self, process: SimulatedProcess, task: TaskId, beside: Collection[TaskId], instruction: do.DeployAttempt
    ) -> SimulatedSubtask:
        descriptor = self.context.describe(task, instruction.attempt)
        subtask = SimulatedSubtask(self, process, task, instruction.attempt, beside)
        effects = self._make_effects(
            self.context,
            descriptor,
            self.open_store,
            subtask.now_ms,
            kept=process.kept(task),
            open_folder=lambda _: self.nodes.folder(self.nodes.of(process)),
        )
        if isinstance(effects, WatchedEffects):
            effects.copies_oracle = self.watch.node_copies
        subtask.begin(WatchedHost(self._make_machine(descriptor), effects, subtask, self.watch, self.world), None)
        return subtask

    def cancel(self, instruction: do.CancelAttempt, cause: int | None) -> None:
        """Stops tasks. If one of them belongs to a newer attempt, the order is outdated and ignored."""
        tasks = self.context.graph.tasks() if instruction.tasks is None else instruction.tasks
        if instruction.attempt < self._deployed and any(self._attempt(task) > instruction.attempt for task in tasks):
            return
        of = () if instruction.tasks is None else tasks
        self.world.note("attempt", instruction.attempt, "is cancelled", *of, cause=cause)
        self._drop_tasks(tasks)

    def _attempt(self, task: TaskId) -> int:
        """Returns the attempt in which a task runs or has finished, or -1."""
        process = self.processes.of(task)
        subtask = process.subtasks.get(task) or process.finished.get(task)
        return -1 if subtask is None else subtask.attempt

    def _drop_tasks(self, tasks: Iterable[TaskId]) -> None:
        """Stops tasks. A process that does not receive the order is ended."""
        for process, of_process in self.processes.by_process(tasks).items():
            stopped = [subtask for task in of_process if (subtask := process.let_go(task)) is not None]
            if stopped and not process.hangs and self.nodes.is_cut(process):
                self.processes.end(process, "it does not receive the order to stop a task")
        self.watch.cancelled()

    def deliver(self, task: TaskId, event: ev.TaskEvent) -> None:
        """Delivers an event to a task, if it runs. A finished task only answers a coordinator that takes over."""
        process = self.processes.of(task)
        if (subtask := process.subtasks.get(task)) is not None:
            process.guarded(subtask, partial(subtask.host.handle, event))
            return
        over = process.finished.get(task)
        asked = over is not None and isinstance(event, ev.CoordinatorTookOver)
        if over is not None and asked and process.acts(partial(self.deliver, task, event)):
            over.host.handle(event)

    def hold_if_cut(self, process: SimulatedProcess, action: Callable[[], object]) -> bool:
        """Returns whether the node of a process is cut off. If so, `action` runs when the connection is restored."""
        if not self.nodes.is_cut(process):
            return False
        self.nodes.hold(process, action)
        return True

    def schedule_turn(self, subtask: SimulatedSubtask) -> None:
        """Schedules a turn of a subtask if it has something to do."""
        if subtask.turn_is_due or not subtask.host.machine.runnable:
            return
        subtask.turn_is_due = True
        # Rows take time and control elements hardly any, so that barriers alone do not keep a slow task busy.
        turn_ms_max = self.slowness.setdefault(subtask.task, self.world.random.choice(TURN_MS_MAX))
        slow = _rows_are_next(subtask.host.machine) and not (self._hurries and self.world.calm)
        self.world.after(self.world.between(0, turn_ms_max if slow else 1), partial(self._turn, subtask))

    def _turn(self, subtask: SimulatedSubtask) -> None:
        subtask.turn_is_due = False
        process = subtask.process
        world = self.world
        if not process.has(subtask) or process.hangs:
            return
        self.nodes.maybe_fail(process)
        if self.nodes.is_cut(process):
            self.nodes.hold(process, partial(self.schedule_turn, subtask))
            return
        if not process.has(subtask):
            return
        if self.crashes < world.faults.crashes_max and world.chance("crash"):
            self.crashes += 1
            if world.random.random() < 0.5:
                # It dies in the middle of a round. Messages that have left the process by then arrive.
                process.turn_of(subtask)
            if not process.gone:
                self.processes.end(process, "process died")
            return
        if self.crashes < world.faults.crashes_max and world.chance("hang"):
            self.crashes += 1
            self.processes.hang(process)
            return
        if self.coordinator is None and _rows_are_next(subtask.host.machine):
            self.watch.coverage.saw("row_without_coordinator")
        process.turn_of(subtask)

    def failed(self, subtask: Subtask, reason: str) -> None:
        """Reports that a subtask has failed. Its process continues."""
        self.world.note(subtask.task, "has failed:", reason)
        task = subtask.task
        attempt = subtask.attempt
        delay_ms = self.world.between(0, DETECTION_MS_MAX)
        self.world.after(delay_ms, lambda: self.report(co.TaskFailed(self.world.wall_ms, attempt, task, reason)))

    def give_up(self, port: SimulatedCoordinatorPort, reason: str) -> None:
        """Ends the job, because its coordinator cannot continue."""
        assert port.host is not None
        self._drop_tasks(self.context.graph.tasks())
        self.gave_up = reason
        self.ended = port.host.machine.state

    def _check_log(self, state: CoordinatorState) -> None:
        """Checks that replaying the log, as a successor would, gives the state of the coordinator."""
        event_log = EventLog(self.open_store(self.context.root), self.context.job_id)
        if not state.storage_away and replay(event_log)[0].state != state:
            raise InvariantViolated(
                8, "a replay of the event log does not give the state of the coordinator that wrote the log"
            )

    def end(self, port: SimulatedCoordinatorPort) -> None:
        """Ends the job, and checks its event log."""
        assert port.host is not None and port.effects is not None
        self._drop_tasks(self.context.graph.tasks())
        state = port.host.machine.state
        self.disk.reliable = True
        self._check_log(state)
        whole = self.watch.oracle.tables.is_whole
        tables = [] if state.commits or state.pending else [table for table in self.context.table_urls if whole(table)]
        port.effects.sweep(permit_sweep(state))
        self.watch.oracle.files.check_end(state.kept, tables, state.pending)
        self.watch.ended(state)
        self._ended_by = None if state.gave_up else port
        self.world.note("job ends:", state.status.value, state.ending_reason or "")
        self.ended = state


class _Wiring:
    """The callbacks that `Worker` uses in the simulator."""

    def __init__(self, job: SimulatedJob) -> None:
        self._job = job

    def post(self, action: Callable[[], object]) -> None:
        self._job.world.after(0, action)

    def call_later(self, delay_ms: int, action: Callable[[], object]) -> None:
        self._job.world.after(delay_ms, action)

    def failed(self, subtask: Subtask, error: BaseException) -> None:
        """Reports a subtask that has failed with an error of the protocol or of storage.

        Any other error comes from the simulation, an oracle or a function, and is raised.
        """
        if not isinstance(error, ProtocolError | StorageError):
            raise error
        self._job.failed(subtask, f"{type(error).__name__}: {error}")

    def finished(self, subtask: Subtask) -> None:
        assert isinstance(subtask, SimulatedSubtask)
        subtask.process.finished[subtask.task] = subtask

    def acted(self, subtask: Subtask) -> None:
        assert isinstance(subtask, SimulatedSubtask)
        self._job.schedule_turn(subtask)


def _rows_are_next(machine: TaskMachine) -> bool:
    """Returns whether the next turn of a task processes rows, its source or its timers, and not a control element."""
    channel = machine.inputs.next_channel(machine.checkpoints.blocks)
    return channel is None or bool(channel.recovered) or isinstance(channel.queue[0], pa.RecordBatch)
